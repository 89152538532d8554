"""The time that `perf.bench` may take: shared out between its parts, and kept to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from huggingface_hub.utils import tqdm

Item = TypeVar("Item")
Found = TypeVar("Found")
Now = Callable[[], float]


class Clock:
    """Shares what is left of a time between parts by weight: what one leaves, later ones get.

    Args:
        seconds: all the time there is, from now.
        weights: the parts, in the order in which they come.
        now: seconds of some clock.
    """

    def __init__(
        self, seconds: float, weights: Mapping[str, float], now: Now = time.perf_counter
    ) -> None:
        self.now, self._end = now, now() + seconds
        self._weights = dict(weights)

    @property
    def left(self) -> float:
        """Seconds until the end; below 0 when it is past."""
        return self._end - self.now()

    def deadline(self, part: str) -> float:
        """When `part`, which begins now, should end. Parts before it are over."""
        names = list(self._weights)
        for name in names[: names.index(part)]:
            del self._weights[name]
        share = self._weights[part] / sum(self._weights.values())
        return self.now() + max(0.0, share * self.left)


@dataclass(frozen=True)
class Rounds(Generic[Found]):
    """What was found in round after round.

    Attributes:
        found: of every round that counts.
        is_cold: whether the only one was the first, which warms up.
        seconds: of the longest.
    """

    found: list[Found]
    is_cold: bool
    seconds: float


def rounds(
    items: Sequence[Item],
    measure: Callable[[int, Item], Found],
    deadline: float,
    *,
    label: str,
    now: Now = time.perf_counter,
) -> Rounds[Found]:
    """Measure one item to warm up and to see what it takes, then as many as the time allows.

    Args:
        items: what there is to measure, one or more; the first comes twice.
        measure: told which round it is, from 0, and the item.
        deadline: none is begun that would probably end later.
        label: of the progress bar.
    """
    started = now()
    warm_up = measure(0, items[0])
    longest = now() - started
    planned = min(len(items), int((deadline - now()) / max(longest, 1e-9)))
    found: list[Found] = []
    with tqdm(total=max(1, planned), desc=label, unit="round", disable=None) as bar:
        for index, item in enumerate(items[: max(0, planned)]):
            if now() + longest > deadline:
                break
            started = now()
            found.append(measure(index, item))
            longest = max(longest, now() - started)
            bar.update()
    return Rounds(found or [warm_up], not found, longest)
