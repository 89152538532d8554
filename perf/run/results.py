"""Where results lie; answers on disk, and what tells those of one model, machine or version
from another's.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssmlx.commands.machine import describe_machine, power_source_or_unknown
from ssmlx.errors import InputError, first_line
from ssmlx.json_files import to_json
from ssmlx.loading.files import PartFile

from .timing import TimedAnswer, TimedCall

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"
_TIMED_ON = ("machine", "device", "blas", "mlx", "mlx-lm", "transformers")


def machine_load() -> str:
    """How busy the machine is: a measurement shares it with whatever else runs."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores busy when it began"


@contextmanager
def explain_broken_result(path: Path, command: str) -> Iterator[None]:
    """Turn any exception inside the block into an InputError of one line: the result is incomplete.

    Args:
        path: of the result.
        command: the module that writes such results, for the message.
    """
    try:
        yield
    except Exception as error:  # a broken file's can be any
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
        self, folder: Path, name: str, settings: Mapping[str, Any], *, fresh: bool = False
    ) -> None:
        """Open the file, or make it, lock it, and read its answers.

        Args:
            folder: of the file.
            name: the file's name begins with it.
            settings: everything that an answer depends on beside its key, as JSON values.
            fresh: whether to forget earlier answers.

        Raises:
            InputError: another process writes into the file, or it cannot be read.
        """
        path = folder / f"{name}-{digest(settings)}.part.jsonl"
        self.file = PartFile(path, to_json(settings), fresh=fresh)
        self._kept = {
            prompt: Kept(_answer_of(values), text) for prompt, text, values in self.file.done
        }

    def __contains__(self, prompt: Sequence[int]) -> bool:
        return digest(prompt) in self._kept

    def __getitem__(self, prompt: Sequence[int]) -> Kept:
        return self._kept[digest(prompt)]

    def keep(self, prompt: Sequence[int], kept: Kept) -> None:
        """Add an answer; it is on disk when this returns."""
        self._kept[digest(prompt)] = kept
        self.file.append([digest(prompt), kept.text, asdict(kept.answer)])


def _answer_of(values: Mapping[str, Any]) -> TimedAnswer:
    """Make an answer of its JSON values."""
    calls = [TimedCall(*call) for call in values["calls"]]
    return TimedAnswer(**{**values, "calls": calls})


@lru_cache(maxsize=1)
def timing_environment() -> dict[str, str]:
    found = describe_machine()
    return {**{name: found[name] for name in _TIMED_ON}, "power": power_source_or_unknown()}


def files_version(folder: Path | None) -> str | None:
    """Return a digest of the names, sizes and times of change of the files in a folder; None for
    None.

    Folders inside it are not looked at.
    """
    if folder is None:
        return None
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return a digest of all sources that decide answers and their times; it is computed once a
    process.
    """
    own = [f"perf/run/{name}.py" for name in ("rounding", "target", "timing")]
    names = "ssmlx/**/*.py", "ssmlx/**/*.metal", *own
    sources = sorted(path for name in names for path in ROOT.glob(name))
    return digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in sources])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
