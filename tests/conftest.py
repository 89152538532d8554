"""What holds for every test: workers, the device, a folder for what is learned, and what `.ci/long`
need not run."""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if _WORKER:
    # Workers share the cores, so each takes one; and each has a folder for what MLX's CPU backend
    # compiles, which two at once would write over each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _own = Path(tempfile.gettempdir()) / f"ssmlx-tests-{_WORKER}"
    _own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(_own)

import ssmlx  # first: it chooses the BLAS that MLX will load

import mlx.core as mx  # isort: skip

# `.ci/long` names a file of tests that passed, which are not run again.
_PASSED = Path(os.environ.get("SSMLX_PASSED", os.devnull))


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


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    """Let PyTorch use one thread: at these sizes a second one makes it slower."""
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny model's folder; a module may write beside it."""
    from real import write_base

    return write_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    """The folder of an adapter of the tiny model."""
    from real import write_tiny_adapter

    return write_tiny_adapter(base.parent / "adapter", base)


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
def nothing_learned(monkeypatch, tmp_path):
    """Start every test without costs and acceptance from other answers."""
    monkeypatch.setattr("ssmlx.generation.learned._FOLDER", str(tmp_path / "costs"))
    monkeypatch.setattr("ssmlx.generation.learned._BY_MODEL", WeakKeyDictionary())


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
