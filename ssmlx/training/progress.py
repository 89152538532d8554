"""The progress of a run of `ssmlx.adapt`: what is stored, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .mlx_trainer import read_saved_step
from .part_file import count_lists

ENDED_FILE = "ended"  # of a round's folder
ANSWERS_FILE = "answers.part"  # of a round's folder
QUESTIONS_FILE = "questions.part"


@dataclass
class Clock:
    """Counts the seconds of a run, in this and earlier processes (`before`), without waiting."""

    before: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _waited: float = 0.0

    @property
    def spent(self) -> float:
        return self.before + time.monotonic() - self._started - self._waited

    def exclude_waiting(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Wrap `wait` so that its seconds do not count as spent."""

        def waits() -> None:
            started = time.monotonic()
            wait()
            self._waited += time.monotonic() - started

        return waits


class StepPace:
    """Estimates the time left of a training from the steps of this process."""

    def __init__(
        self,
        clock: Clock,
        num_steps: int,  # of the whole training, earlier processes' steps included
    ) -> None:
        self._clock = clock
        self._num_steps = num_steps
        self._first: tuple[float, int] | None = None

    def start(self, step: int) -> None:
        if self._first is None:
            self._first = self._clock.spent, step

    def seconds_left(self, step: int) -> float:
        """The estimated time left; 0 before this process has taken a step."""
        if self._first is None or step <= self._first[1]:
            return 0.0
        spent, first = self._first
        return (self._clock.spent - spent) / (step - first) * (self._num_steps - step)


def format_duration(seconds: float) -> str:
    """Format seconds, as "40 s", or as "4 min" from one and a half minutes on."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def describe_round_progress(
    folder: Path,  # the round's
    num_answers: int,  # new answers that it is to make
    num_steps: int,  # training steps that it is to take
    state_file: str,
) -> str:
    """Describe what a stopped round has: everything, answers and steps, answers, or questions."""
    if (folder / ENDED_FILE).exists():
        return "all answers and all training"
    step = read_saved_step(folder / state_file)
    answers = count_lists(folder / ANSWERS_FILE)
    if step:
        return f"{answers:,} answers, and step {step:,} of {num_steps:,} of the training"
    if answers:
        return f"{answers:,} of {num_answers:,} answers"
    return f"{count_lists(folder / QUESTIONS_FILE):,} questions"
