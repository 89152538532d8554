"""How far a run of `ssmlx.adapt` has come, what of it is kept, and how long it will take yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .mlx_trainer import read_saved_step_or_0
from .part_file import count_lists_in_part_file

ENDED_FILE = "ended"  # of a round's folder
ANSWERS_FILE = "answers.part"  # likewise
QUESTIONS_FILE = "questions.part"


@dataclass
class Clock:
    """Counts the seconds that a run has taken, in earlier processes and in this one since the clock
    was made, without waiting.

    Attributes:
        before: seconds that earlier processes have taken.
    """

    before: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _waited: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds of the run until now."""
        return self.before + time.monotonic() - self._started - self._waited

    def exclude_waiting(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Return a function without arguments that calls `wait`, and takes the time of the call out
        of `spent`.
        """

        def waits() -> None:
            """Call `wait`, and count the seconds that it took."""
            started = time.monotonic()
            wait()
            self._waited += time.monotonic() - started

        return waits


class StepPace:
    """Estimates the time left of a training from the steps that this process has taken."""

    def __init__(self, clock: Clock, num_steps: int) -> None:
        """Start without a measurement.

        Args:
            clock: of the run.
            num_steps: of the whole training, those of earlier processes among them.
        """
        self._clock = clock
        self._num_steps = num_steps
        self._first: tuple[float, int] | None = None

    def start_if_not_started(self, step: int) -> None:
        """Start the measurement now, when `step` steps were taken; do nothing if it has started."""
        if self._first is None:
            self._first = self._clock.spent, step

    def seconds_left(self, step: int) -> float:
        """Estimate the seconds of the steps that are left when `step` were taken, by the mean of
        those since the measurement's start; 0 where there were none.
        """
        if self._first is None or step <= self._first[1]:
            return 0.0
        spent, first = self._first
        return (self._clock.spent - spent) / (step - first) * (self._num_steps - step)


def format_duration(seconds: float) -> str:
    """Write seconds as "40 s", or from one and a half minutes on as "4 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def describe_round_progress(folder: Path, num_answers: int, num_steps: int, state_file: str) -> str:
    """Return in words what a stopped round has kept: all, answers and training steps, answers, or
    questions.

    Args:
        folder: the round's; files that are not there count as nothing.
        num_answers: new answers that it is to make.
        num_steps: training steps that it is to take.
        state_file: the name of the trainer's state file in the folder.
    """
    if (folder / ENDED_FILE).exists():
        return "all answers and all training"
    step = read_saved_step_or_0(folder / state_file)
    answers = count_lists_in_part_file(folder / ANSWERS_FILE)
    if step:
        return f"{answers:,} answers, and step {step:,} of {num_steps:,} of the training"
    if answers:
        return f"{answers:,} of {num_answers:,} answers"
    return f"{count_lists_in_part_file(folder / QUESTIONS_FILE):,} questions"
