"""How long and how fast the small hybrid learns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn."""

    minutes: float = 50.0  # of learning, on the clock, all runs together
    batch: int = 8  # sequences per step
    length: int = 256  # tokens of a sequence
    rate: float = 2e-3  # the highest, after `warm_up` steps; then it falls to a tenth
    warm_up: int = 50
    save_minutes: float = 3.0  # time between two saves
