"""How long and how fast the small hybrid learns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn.

    Attributes:
        minutes: of learning, on the clock, all runs together.
        batch: sequences a step.
        length: tokens of a sequence.
        rate: the highest learning rate, reached after `warm_up` steps; it falls to a tenth.
        save_minutes: how often all is saved.
    """

    minutes: float = 50.0
    batch: int = 8
    length: int = 256
    rate: float = 2e-3
    warm_up: int = 50
    save_minutes: float = 3.0
