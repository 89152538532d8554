"""Where results lie; answers on disk, and what tells those of one model, machine or version
from another's.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssmlx.calibration.timing import TimedAnswer
from ssmlx.commands.machine import machine, power_source
from ssmlx.errors import InputError
from ssmlx.settings import parse_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"
_ANSWER = [field.name for field in fields(TimedAnswer)]
_TIMED_ON = ("machine", "device", "blas", "mlx", "mlx-lm", "transformers")


def machine_load() -> str:
    """How busy the machine is: a measurement shares it with whatever else runs."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores busy when it began"


@contextmanager
def reading(path: Path, command: str) -> Iterator[None]:
    """Tell in one line that a saved result lacks what the block reads of it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"{path} is incomplete ({what})",
            expected=f"what this version of python -m {command} writes",
            do="measure again",
        ) from error


@dataclass(frozen=True)
class Kept:
    answer: TimedAnswer
    text: str


class AnswerStore:
    """Answers on disk, one line each as they come: a run that is stopped goes on from there.

    Other `settings`, all that an answer depends on beside its key, have another file; without a
    `folder` answers are kept in memory alone.
    """

    def __init__(self, folder: Path | None, name: str, settings: Mapping[str, Any]) -> None:
        self._header = json.dumps({"settings": settings})
        own = f"{name}-{digest(settings)}.part.jsonl"
        self.path = None if folder is None else folder / own
        self._kept: dict[str, Kept] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __contains__(self, prompt: Sequence[int]) -> bool:
        return digest(prompt) in self._kept

    def __getitem__(self, prompt: Sequence[int]) -> Kept:
        return self._kept[digest(prompt)]

    def forget(self) -> None:
        self._kept = {}
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def keep(self, prompt: Sequence[int], kept: Kept) -> None:
        """Add an answer; it is on disk when this returns."""
        self._kept[digest(prompt)] = kept
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(self._header + "\n")
            file.write(_line(digest(prompt), kept))

    def _read(self, path: Path) -> None:
        text = path.read_bytes().decode("utf-8", errors="replace")
        first, *lines = text.split("\n")
        for line in lines if first == self._header else ():
            # A run that was killed while it wrote leaves half a line.
            try:
                row = parse_json(line)
                answer = TimedAnswer(**{name: row[name] for name in _ANSWER if name in row})
                self._kept[row["prompt"]] = Kept(answer, row["text"])
            except (ValueError, KeyError, TypeError):
                continue
        whole = [self._header + "\n", *(_line(*pair) for pair in self._kept.items())]
        work = path.with_suffix(f".{os.getpid()}.new")
        work.write_text("".join(whole), encoding="utf-8")
        work.replace(path)


def _line(prompt: str, kept: Kept) -> str:
    values = {"prompt": prompt, "text": kept.text, **asdict(kept.answer)}
    return json.dumps(values, ensure_ascii=False) + "\n"


@lru_cache(maxsize=1)
def timed_on() -> dict[str, str]:
    found = machine()
    return {**{name: found[name] for name in _TIMED_ON}, "power": power_source()}


def files_version(folder: Path | None) -> str | None:
    """Tells one folder's files from another's, by name, size and date."""
    if folder is None:
        return None
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


@lru_cache(maxsize=1)
def code_version() -> str:
    """Tells one state of the package's sources from another."""
    sources = sorted((ROOT / "ssmlx").rglob("*.py"))
    return digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in sources])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
