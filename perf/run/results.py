"""Stores results, and answers on disk by model, machine and version."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError, first_line
from ssmlx.json_files import to_json
from ssmlx.loading.files import write_whole
from ssmlx.training.part_file import PartFile

from .environment import ROOT
from .timing import TimedAnswer, TimedCall

RESULTS = ROOT / "perf" / "results"


def print_and_save(
    result: Mapping[str, Any],
    target: Path,  # without a suffix; its folder exists
    text: str,
    draw: Callable[[Any, Path], None] | None = None,  # ImportError: matplotlib is missing
) -> None:
    """Print `text`; write `target`.json and .txt, and .png with `draw`."""
    print(text)
    saved = json.dumps(result, indent=1, ensure_ascii=False)
    write_whole(target.with_suffix(".json"), f"{saved}\n".encode())
    write_whole(target.with_suffix(".txt"), f"{text}\n".encode())
    print("saved", target.with_suffix(".json"), file=sys.stderr)
    if draw is None:
        return
    try:
        draw(result, target.with_suffix(".png"))
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)


@contextmanager
def explain_broken_result(
    path: Path,
    command: str,  # the module that writes such results
) -> Iterator[None]:
    """Raise any exception in the block as an InputError: the result is incomplete."""
    try:
        yield
    except Exception as error:  # a broken file can raise anything
        what = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise InputError(
            f"{path} is incomplete ({what})",
            expected=f"what this version of python -m {command} writes",
            do="measure again",
        ) from error


@dataclass(frozen=True)
class Kept:
    """An answer with its times, and its text."""

    answer: TimedAnswer
    text: str


class AnswerStore:
    """Answers on disk, one line each, by repeat and prompt, so that a stopped run can go on.

    Answers with other `settings` are in another file. A key is [repeat, *token ids].
    """

    def __init__(
        self,
        folder: Path,
        file_prefix: str,
        # everything but its key that an answer depends on, as JSON values
        settings: Mapping[str, Any],
        *,
        fresh: bool = False,
    ) -> None:
        """Open and lock the file, until `file.close`."""
        path = folder / f"{file_prefix}-{short_digest(settings)}.part.jsonl"
        self.file = PartFile(path, to_json(settings), fresh=fresh)
        self._kept = {
            key: Kept(_timed_answer_from_json(values), text) for key, text, values in self.file.done
        }

    def __contains__(self, key: Sequence[int]) -> bool:
        return short_digest(key) in self._kept

    def __getitem__(self, key: Sequence[int]) -> Kept:
        return self._kept[short_digest(key)]

    def add(self, key: Sequence[int], kept: Kept) -> None:
        """Add an answer, which is on disk when this returns."""
        self._kept[short_digest(key)] = kept
        self.file.append([short_digest(key), kept.text, asdict(kept.answer)])


def _timed_answer_from_json(values: Mapping[str, Any]) -> TimedAnswer:
    calls = [TimedCall(*call) for call in values["calls"]]
    return TimedAnswer(**{**values, "calls": calls})


def file_stats_digest(folder: Path | None) -> str | None:
    """A digest of names, sizes and modification times of a folder's files, not of its folders."""
    if folder is None:
        return None
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return short_digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """A digest of the sources that decide answers and their times."""
    own = [f"perf/run/{name}.py" for name in ("rounding", "target", "timing")]
    names = "ssmlx/**/*.py", "ssmlx/**/*.metal", *own
    sources = sorted(path for name in names for path in ROOT.glob(name))
    return short_digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in sources])


def short_digest(value: Any) -> str:
    """The first 12 digits of the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
