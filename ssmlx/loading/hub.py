"""Models and adapters of the Hugging Face Hub: found in its cache, or downloaded into it.

The Hub's client is imported only when it is needed, as that takes a while.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..bars import Progress
from ..errors import InputError, first_line, require
from .folders import (
    ADAPTER_FILES,
    CONFIG_FILE,
    LORA_SETTINGS,
    Fetch,
    first_missing_adapter_file,
    first_missing_model_file,
)

# A name on the Hub, and the revision after it, if any: org/name@revision.
HUB_NAME = re.compile(r"(?!.*\.\.)([\w.-]+/[\w.-]+)(?:@(\w[\w./-]*))?")
# mlx-lm's own list, but for code.
ALLOW_PATTERNS = [
    "*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
    "*.jsonl", "*.jinja",
]  # fmt: skip
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_BYTES = {".json": 2**20, ".safetensors": 2**30}  # of a file of an adapter on the Hub
_MOST_IN_ALL = 2**31
_HUB_TIMEOUT = 5  # seconds until a Hub that does not answer counts as out of reach

logger = logging.getLogger("ssmlx")


def fetch_model(name: str, revision: str | None, fetch: Fetch) -> Path:
    """A model's folder in the Hub's cache; whether a download is whole is not checked."""
    return _fetch_whole(name, revision, fetch, ALLOW_PATTERNS, _first_missing_file, _download_model)


def fetch_adapter(name: str, revision: str | None, fetch: Fetch) -> Path:
    """An adapter's folder in the Hub's cache."""
    download = partial(_download_adapter, name)
    return _fetch_whole(name, revision, fetch, ADAPTER_FILES, first_missing_adapter_file, download)


def _first_missing_file(path: Path) -> str | None:
    # Other tools may have cached a model without its tokenizer.
    names = ("*token*", "vocab*", "*.model", "tekken.json")
    has_words = any(one for name in names for one in path.glob(name))
    return first_missing_model_file(path) or (None if has_words else "tokenizer")


def _fetch_whole(
    name: str,
    revision: str | None,  # a commit, tag or branch; None for the newest
    fetch: Fetch,
    patterns: Sequence[str],  # of the files to download
    missing_file: Callable[[Path], str | None],  # the first one that a folder lacks
    download: Callable[..., Path],  # of revision, progress and `snapshot_download` of `name`
) -> Path:
    """The folder in the Hub's cache, downloaded if the cache does not have all of it."""
    from huggingface_hub import constants, snapshot_download

    options = {"allow_patterns": list(patterns), "etag_timeout": _HUB_TIMEOUT}
    snapshot = partial(snapshot_download, name, cache_dir=fetch.hub, **options)
    with suppress(Exception):  # a cache that cannot be read: the Hub itself comes next
        cached = Path(snapshot(revision=revision, local_files_only=True))
        # Other tools may have cached a tokenizer, or settings, and nothing else.
        if not missing_file(cached):
            logger.debug("%s: commit %s (cache)", name, cached.name)
            return cached
    asked = name if revision is None else f"{name} at {revision}"
    target = fetch.hub or constants.HF_HUB_CACHE
    fetch.require_not_offline(asked, target)
    logger.info("downloading %s from the Hugging Face Hub to %s", asked, target)
    with _explained_errors(name, revision):
        path = download(revision, fetch.progress, snapshot)
    logger.info("%s: commit %s", name, path.name)
    return path


def find_cached_model(name: str, fetch: Fetch) -> Path | None:
    """A model's folder, at the commit that "main" meant when it was last downloaded."""
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "model.safetensors.index.json", "model*.safetensors"]
    with suppress(Exception):  # a cache that cannot be read counts as empty
        folder = Path(
            snapshot_download(
                name, cache_dir=fetch.hub, allow_patterns=patterns, local_files_only=True
            )
        )
        return folder if first_missing_model_file(folder) is None else None
    return None


def _download_model(
    revision: str | None, progress: Progress | None, snapshot: Callable[..., str]
) -> Path:
    tqdm_class = _byte_progress_bar(progress)
    return Path(snapshot(revision=revision, local_files_only=False, tqdm_class=tqdm_class))


def _download_adapter(
    name: str,
    revision: str | None,
    progress: Progress | None,
    snapshot: Callable[..., str],  # `snapshot_download` of `name` and the adapter's files
) -> Path:
    """Download at one commit, after a check of sizes; contents other than listed are deleted."""
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
        f"{name} has neither {CONFIG_FILE} nor {LORA_SETTINGS} in commit {commit!r} on the "
        "Hugging Face Hub"
    )
    require(is_there, found, expected="an adapter", do="check the name")

    def check_size(done: int, total: int, most: int = _MOST_IN_ALL, what: str = "files") -> None:
        """Refuse files that are too large; `what` is the message's word for what has so many
        bytes."""
        told = f"{name} has {what} of {max(done, total)} bytes on the Hugging Face Hub"
        do = "do not trust it, or download it yourself and give the folder"
        require(max(done, total) <= most, told, expected=f"at most {most}", do=do)
        if progress is not None and done:
            progress(done, total)

    sizes = {file: one.size if (one.size or 0) > 0 else 2**63 for file, one in listed.items()}
    for file, size in sizes.items():
        check_size(0, size, _MOST_BYTES[Path(file).suffix], file)
    check_size(0, sum(sizes.values()))
    folder = Path(snapshot(revision=commit, tqdm_class=_byte_progress_bar(check_size)))
    others = [
        folder / file for file, one in listed.items() if not _matches_listing(folder / file, one)
    ]
    for path in others:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    told = ", ".join(path.name for path in others)
    do = "try again; if it happens again, do not trust it"
    require(not others, f"{told} arrived with other contents", expected="what the Hub lists", do=do)
    ref = folder.parents[1] / "refs" / (revision or constants.DEFAULT_REVISION)
    if ref.name != commit:  # what a branch or a tag meant, in the file that the Hub's client reads
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ref, commit.encode())
    return folder


def _matches_listing(path: Path, listed: Any) -> bool:
    """Whether a file is the one that the Hub lists: by SHA-256 for large files (`lfs`), by git's
    SHA-1 for others."""
    with path.open("rb") as file:
        if listed.lfs:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == listed.lfs["sha256"])
        content = file.read(listed.size + 1)
        git = hashlib.sha1(b"blob %d\0" % len(content) + content)
        return bool(git.hexdigest() == listed.blob_id)


@contextmanager
def _explained_errors(
    name: str,
    revision: str | None,  # as the user asked for it; None for the newest
) -> Iterator[None]:
    from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    expected = "a repository that you may read, and a network"
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
        found = f"{asked} cannot be downloaded from the Hugging Face Hub ({first_line(error)})"
        do = "check the name and the network, or give a folder"
        if isinstance(error, RepositoryNotFoundError):
            found = f"no folder {name}, and no repository {name} on the Hugging Face Hub"
            do = "check the name; `hf auth login` if it is private"
        if isinstance(error, GatedRepoError):
            found = f"{name} is gated on the Hugging Face Hub"
            do = f"ask for access at https://huggingface.co/{name}, and `hf auth login`"
        raise InputError(found, expected=expected, do=do) from error


def _byte_progress_bar(progress: Progress | None) -> type:
    """A subclass of the Hub client's tqdm that draws nothing and reports the bytes of files."""
    from huggingface_hub.utils import tqdm

    class Telling(tqdm):  # type: ignore[misc]  # mypy skips the Hub's client
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # There may also be a bar that counts files, and one of bytes that came by the network.
            is_of_files = "transfer" not in str(kwargs.get("name"))
            self._progress = progress if kwargs.get("unit") == "B" and is_of_files else None
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():
                self.n += n or 0
                if self._progress is not None and self.total:
                    self._progress(int(self.n), int(self.total))

    return Telling
