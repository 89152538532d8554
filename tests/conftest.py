"""What holds for every test: a home and an environment of its own, workers, the device, and what
`.ci/long` need not run.
"""

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest

# What a user has set, or keeps at home, decides nothing here: not in this process, nor in those
# that it starts. What says how this machine reaches a package index stays.
_OF_USERS = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "SSMLX_", "XDG_", "MLX_", "OPENBLAS_", "GOTO_", "OMP_",
    "MKL_", "BLIS_", "VECLIB_", "PYTHON", "LC_", "LANG", "TERM", "COLUMNS", "LINES", "NO_COLOR",
    "FORCE_COLOR", "CLICOLOR", "TQDM_", "TOKENIZERS_", "MPL", "HTTP_", "HTTPS_", "ALL_", "NO_PROXY",
    "http_", "https_", "all_", "no_proxy", "PYTEST_ADDOPTS", "GIT_", "OPENAI_", "ANTHROPIC_",
    "LLM_", "PROMETHEUS_", "WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS", "NODE_OPTIONS", "TORCH",
    "PYRIGHT_", "PLAYWRIGHT_", "LD_PRELOAD",
)  # fmt: skip
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # which say that the Hub is not to be asked
_OF_TESTS = ("SSMLX_PASSED", "SSMLX_TEST_DEVICE", "SSMLX_TESTS_HOME")
_ROOT = Path(__file__).parents[1]
_KEPT = _ROOT / ".pytest_cache" / "kept"  # what no run need fetch or make again
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
_users_environment = dict(os.environ)


def _make_home() -> Path:
    """A home for this process: below that of the one which has started it, if it is a worker."""
    if above := os.environ.get("SSMLX_TESTS_HOME"):
        home = Path(above, _WORKER or f"of-{os.getpid()}")
        home.mkdir(exist_ok=True)
        return home
    home = Path(tempfile.mkdtemp(prefix="ssmlx-tests-"))
    atexit.register(_remove_home, home, os.getpid())
    return home


def _remove_home(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked
        shutil.rmtree(home, ignore_errors=True)


_HOME = _make_home()
_GIT_CONFIG = _HOME / "gitconfig"
_GIT_CONFIG.write_text("[safe]\n\tdirectory = *\n")  # else git refuses another owner's checkout
for _name in [one for one in os.environ if one.startswith(_OF_USERS) and one not in _OF_TESTS]:
    del os.environ[_name]
os.environ |= {
    "HOME": str(_HOME),
    "SSMLX_TESTS_HOME": os.environ.get("SSMLX_TESTS_HOME", str(_HOME)),
    "SSMLX_CACHE": str(_HOME / "cache"),
    "PYTHONPATH": str(_ROOT),
    "MPLCONFIGDIR": str(_KEPT / "matplotlib"),
    "PYRIGHT_PYTHON_CACHE_DIR": str(_KEPT / "pyright"),
    "GIT_CONFIG_GLOBAL": str(_GIT_CONFIG),
    "GIT_CONFIG_NOSYSTEM": "1",
}
if _WORKER:
    # Workers share the cores, so each takes one; and each has a folder for what MLX's CPU backend
    # compiles (see `compiled_kernels`), which two at once would write over each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    _own = _HOME / "tmp"
    _own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(_own)

import ssmlx  # first: it chooses the BLAS that MLX will load

import mlx.core as mx  # isort: skip

from ssmlx.settings import DEFAULT_MODEL

# `.ci/long` names a file of tests that passed, which are not run again.
_PASSED = Path(os.environ.get("SSMLX_PASSED", os.devnull))
_real_model: Path | None = None  # its folder, once it is found
_cache_numbers = count()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker the user's environment, which is needed to fetch the model."""
    node.workerinput["users_environment"] = _users_environment


_FIND_MODEL = """
import sys
from ssmlx.loading.names import Fetch, resolve_model
name, kept = sys.argv[1:]
try:
    print(resolve_model(name, Fetch(offline=True)))
except Exception:
    print(resolve_model(name, Fetch(cache_dir=kept)))
"""


def environment_to_find_model(user):
    """The environment of a process that looks for the real model where its user keeps models."""
    own = {name: value for name, value in user.items() if name not in _OFFLINE}
    return {**own, "PYTHONPATH": str(_ROOT)}


def pytest_collection_finish(session):
    """Find the real model, if a test needs it: that of the user, which is only read, or else one
    that the checkout keeps, fetched by the first run.
    """
    global _real_model
    if not any(item.get_closest_marker("real") for item in session.items):
        return
    of_worker = getattr(session.config, "workerinput", {})
    user = of_worker.get("users_environment", _users_environment)
    _KEPT.mkdir(parents=True, exist_ok=True)
    with (_KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers do this at once
        done = subprocess.run(
            [sys.executable, "-c", _FIND_MODEL, DEFAULT_MODEL, str(_KEPT)],
            env=environment_to_find_model(user),
            capture_output=True,
            text=True,
        )
    if done.returncode == 0:  # else a test that needs it says why it cannot be had
        _real_model = Path(done.stdout.strip())
        _link_real_model(_HOME / "cache")


def _link_real_model(cache):
    """Let a cache folder have the real model, as aliases find it there."""
    if _real_model is not None:
        (cache / "models").mkdir(parents=True)
        (cache / "models" / _real_model.name).symlink_to(_real_model)


def pytest_configure(config):
    config.option.loadscopereorder = False  # but as here: files of the real model take longest


def pytest_collection_modifyitems(config, items):
    """Put tests of the real model first, and leave out those that passed in an earlier run."""
    real = {item.path for item in items if item.get_closest_marker("real")}
    items.sort(key=lambda item: item.path not in real)
    passed = set(_PASSED.read_text().splitlines()) if _PASSED.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report):
    """Write down each test that passed, for a later run; workers of xdist do not."""
    if report.when == "call" and report.passed and not _WORKER:
        with _PASSED.open("a") as file:
            file.write(f"{report.nodeid}\n")


_THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "", None)
_asked_outside: list[str] | None = None  # while a test runs that must stay on this machine


def _refuse_other_machines(event, args):
    """An audit hook: refuse and note what a test asks of another machine, in any thread."""
    if _asked_outside is None:
        return
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in _THIS_MACHINE:
        _asked_outside.append(str(host))
        raise OSError(f"a test asks {host}")


sys.addaudithook(_refuse_other_machines)


@pytest.fixture(autouse=True)
def stays_on_this_machine(request):
    """No test contacts another machine, but for those of the real model, which may fetch it."""
    global _asked_outside
    if request.node.get_closest_marker("real"):
        yield
        return
    _asked_outside = asked = []
    yield
    _asked_outside = None
    assert not asked, f"the test asked other machines: {asked}"


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels():
    """Share what MLX's CPU backend compiles, a second of a core each, with other workers and with
    later runs."""
    if not _WORKER:
        yield
        return
    own, kept = _own / "mlx" / mx.__version__ / "cpu", _KEPT / "compiled" / mx.__version__
    for folder in (own, kept):
        folder.mkdir(parents=True, exist_ok=True)
    for kernel in kept.glob("*.so"):
        if not (own / kernel.name).exists():
            (own / kernel.name).symlink_to(kernel)
    yield
    for kernel in own.glob("*.so"):
        is_whole = time.time() - kernel.stat().st_mtime > 2  # a process may be compiling still
        if is_whole and not (kept / kernel.name).exists():
            work = kept / f"{_WORKER}.work"  # the names of kernels are as long as names may be
            shutil.copy(kernel, work)
            work.replace(kept / kernel.name)


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    """Let PyTorch use one thread: at these sizes a second one makes it slower."""
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """The tiny model's folder and its adapter's, made once; nothing may change them."""
    from real import write_base, write_tiny_adapter

    made = tmp_path_factory.mktemp("made")
    base = write_base(made / "base")
    return base, write_tiny_adapter(made / "adapter", base)


@pytest.fixture(scope="module")
def base(tiny_folders, tmp_path_factory):
    """The tiny model's folder; a module may write beside it."""
    return _copied(tiny_folders[0], tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def adapter(tiny_folders, base):
    """The folder of an adapter of the tiny model."""
    return _copied(tiny_folders[1], base.parent / "adapter")


def _copied(folder, to):
    return shutil.copytree(folder, to, copy_function=shutil.copy)  # as new as if it was made


@pytest.fixture(scope="module")
def loaded(base, adapter):
    """The tiny model with its adapter, and the tokenizer."""
    return ssmlx.load(str(base), adapter=adapter, dtype="float32")


@pytest.fixture(scope="module")
def engine(base):
    """An engine of the tiny model."""
    with ssmlx.Engine(str(base), dtype="float32") as engine:
        yield engine


@pytest.fixture
def serve(engine, adapter):
    """Return a function that makes the server's application for the tiny model.

    The model is `tiny`, with its adapter `tiny:own`. Answers have 8 tokens unless `config` says
    otherwise; `more` are arguments of `RequestHandler`.
    """
    from ssmlx.prompt_cache import PromptCache
    from ssmlx.server.app import make_app
    from ssmlx.server.handler import RequestHandler

    def make(config=None, keys=(), **more):
        given = {"prompt_caches": [PromptCache()], **more}
        handler = RequestHandler(engine, {"tiny": None, "tiny:own": str(adapter)}, **given)
        return make_app(handler, config or ssmlx.GenerateConfig(max_tokens=8), keys=keys)

    return make


@pytest.fixture(autouse=True)
def device(request):
    """Compute on the CPU; tests marked `metal`, and all if SSMLX_TEST_DEVICE is gpu, on the GPU."""
    is_metal = request.node.get_closest_marker("metal") is not None
    if is_metal and not mx.metal.is_available():
        pytest.skip("needs an Apple GPU")
    on_gpu = is_metal or os.environ.get("SSMLX_TEST_DEVICE") == "gpu"
    mx.set_default_device(mx.gpu if on_gpu else mx.cpu)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, request):
    """A cache folder for each test, in which nothing is kept and nothing was learned; it is
    returned."""
    cache = _HOME / f"cache-{next(_cache_numbers)}"
    monkeypatch.setenv("SSMLX_CACHE", str(cache))
    monkeypatch.setattr("ssmlx.generation.learned._BY_MODEL", WeakKeyDictionary())
    if request.node.get_closest_marker("real"):
        _link_real_model(cache)
    yield cache
    shutil.rmtree(cache, ignore_errors=True)


@pytest.fixture(scope="module")
def folders(base):
    """Folders of adapters of both scopes, "streams" and "all", and "none" for the base alone."""
    from real import write_tiny_adapter

    shelf = base.parent / "adapters"
    return {
        "streams": str(write_tiny_adapter(shelf / "one", base, scope="streams")),
        "all": str(write_tiny_adapter(shelf / "other", base, template="w5 {prompt} w6")),
        "none": "none",
    }
