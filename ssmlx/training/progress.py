"""How far a run of `ssmlx.adapt` has come, what of it is kept, and how long it will take yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .mlx_trainer import saved_step

ENDED_FILE = "ended"  # of a round's folder
ANSWERS_FILE = "answers.part"  # likewise
QUESTIONS_FILE = "questions.part"


@dataclass
class Clock:
    """Seconds that a run has taken, waiting for others left out.

    Attributes:
        before: those of earlier processes.
    """

    before: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _waited: float = 0.0

    @property
    def spent(self) -> float:
        return self.before + time.monotonic() - self._started - self._waited

    def exclude_waiting(self, wait: Callable[[], None]) -> Callable[[], None]:
        """`wait`, whose time does not count."""

        def waits() -> None:
            started = time.monotonic()
            wait()
            self._waited += time.monotonic() - started

        return waits


class StepPace:
    """Seconds that training steps take, validations among them, and what is left of them.

    Args:
        clock: of the run.
        num_steps: of the training.
    """

    def __init__(self, clock: Clock, num_steps: int) -> None:
        self._clock = clock
        self._num_steps = num_steps
        self._first: tuple[float, int] | None = None

    def begins(self, step: int) -> None:
        """Note that a step begins behind `step` others."""
        if self._first is None:
            self._first = self._clock.spent, step

    def seconds_left(self, step: int) -> float:
        """Of the steps behind `step`, by those that this process has taken."""
        if self._first is None or step <= self._first[1]:
            return 0.0
        spent, first = self._first
        return (self._clock.spent - spent) / (step - first) * (self._num_steps - step)


def format_duration(seconds: float) -> str:
    """A time as it is said: "some 4 min", or seconds below one and a half minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def describe_round_progress(folder: Path, num_answers: int, num_steps: int, state: str) -> str:
    """What is kept of a round, in words.

    Args:
        folder: the round's.
        num_answers, num_steps: that it is to have.
        state: the name of the trainer's state in it.
    """
    if (folder / ENDED_FILE).exists():
        return "all answers and all training"
    step = saved_step(folder / state)
    answers = _count_finished_lists(folder / ANSWERS_FILE)
    if step:
        return f"{answers:,} answers, and step {step:,} of {num_steps:,} of the training"
    if answers:
        return f"{answers:,} of {num_answers:,} answers"
    return f"{_count_finished_lists(folder / QUESTIONS_FILE):,} questions"


def _count_finished_lists(path: Path) -> int:
    """Lists in a part file, behind its line of settings."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return max(
            0, sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) - 1
        )
