"""How long a call takes, told from outside: by whoever launches it and waits for its result."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import mlx.core as mx

Told = TypeVar("Told")
now = time.perf_counter
_BLOCKS = 0.4
_WAITS = 0.2


@dataclass(frozen=True)
class Launch:
    """A call that is under way."""

    at: float
    seconds: float  # that launching took
    others: int  # calls that other loops had launched
    is_first: bool  # behind a drafting that nothing was read of yet


class Stopwatch:
    """Times the calls of one decoding loop, where nothing hides their time.

    A call lasts from one read to the next. A GPU works meanwhile, and if the host comes late,
    nobody knows for how long. MLX's CPU backend works mostly while a call is launched, and not
    while the tokens are with whoever asked for them. Between another loop's calls nothing is timed.
    """

    launches: ClassVar[int] = 0  # of all loops

    def __init__(self) -> None:
        self._last_read = self._away = 0.0
        self._own = 0

    def launch(self, *arrays: object, is_first: bool = False) -> Launch:
        """Have `arrays` computed."""
        Stopwatch.launches += 1
        self._own += 1
        started = now()
        mx.async_eval(*arrays)
        others = Stopwatch.launches - self._own
        return Launch(started, now() - started, others, is_first)

    def read(self, launch: Launch, read: Callable[[], Told]) -> tuple[Told, float | None]:
        """What a launched call has to say, and the seconds that it took, if they are known."""
        started = now()
        found = read()
        done = now()
        since = self._last_read or launch.at
        away = self._away
        self._last_read = done
        self._away = 0.0
        if launch.others != Stopwatch.launches - self._own:
            return found, None
        if launch.seconds >= _BLOCKS * (done - launch.at):
            return found, None if launch.is_first else done - since - away
        return found, done - since if done - started >= _WAITS * (done - since) else None

    def away(self, tokens: Told) -> Iterator[Told]:
        """Give out `tokens`."""
        left = now()
        yield tokens
        self._away += now() - left
