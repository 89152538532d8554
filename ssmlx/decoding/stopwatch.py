"""A stopwatch for target calls, used by the loop that launches them and waits for results."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import mlx.core as mx

Result = TypeVar("Result")
now = time.perf_counter
_BLOCKS = 0.4
"""Share of a call's time in launching it from which on the backend computes while it launches."""
_WAITS = 0.2
"""Share of a call's time that the host waits for it, below which the device may have been idle."""
_AWAY = 0.05
"""Share of a call's time that the reader holds its tokens, from which on that matters."""


@dataclass(frozen=True)
class PendingCall:
    """A call that was launched and not read yet."""

    launched_at: float  # seconds, of `time.perf_counter`
    launch_seconds: float
    others: int  # calls that other loops had launched, and other work
    follows_unread_drafting: bool  # launched after drafting of which nothing was read yet


class Stopwatch:
    """Times the calls of one decoding loop, unless their time is hidden.

    A call lasts from one read to the next. A GPU works meanwhile: if the host comes late because
    the reader held the tokens, it is unknown how long the GPU worked. If the host comes late
    because it built the next call, as with a small model, that is what calls take here. MLX's CPU
    backend works mostly while a call is launched, and not while the reader holds the tokens.
    Between another loop's calls, or other work of the device, nothing is timed.
    """

    launches: ClassVar[int] = 0  # of all loops, and other work that was noted

    def __init__(self) -> None:
        self._last_read = 0.0
        self._untimed = 0.0
        self._own = 0

    def launch(
        self,
        *arrays: object,  # or nested lists of them
        follows_unread_drafting: bool = False,
    ) -> PendingCall:
        """Start computing what a call decides. Each launched call is read once, in order."""
        Stopwatch.launches += 1
        self._own += 1
        started = now()
        mx.async_eval(*arrays)
        others = Stopwatch.launches - self._own
        return PendingCall(started, now() - started, others, follows_unread_drafting)

    def read(self, call: PendingCall, read: Callable[[], Result]) -> tuple[Result, float | None]:
        """Wait for a call by `read`; returns its result, and the seconds since the read before."""
        started = now()
        found = read()
        done = now()
        since = self._last_read or call.launched_at
        untimed = self._untimed
        self._last_read = done
        self._untimed = 0.0
        # Another loop, or other work, was on the device too.
        if call.others != Stopwatch.launches - self._own:
            return found, None
        # Launching blocks, as on the CPU: nothing ran while the reader held the tokens, and
        # drafting that was not read yet may have run within this call.
        if call.launch_seconds >= _BLOCKS * (done - call.launched_at):
            return found, None if call.follows_unread_drafting else done - since - untimed
        # Otherwise the device may have been idle while the reader held the tokens.
        is_busy = done - started >= _WAITS * (done - since)
        return found, done - since if is_busy or untimed < _AWAY * (done - since) else None

    @classmethod
    def note_other_work(cls) -> None:
        """Note that the device did other work: no call under way is timed, in any loop."""
        cls.launches += 1

    def yield_untimed(self, tokens: Result) -> Iterator[Result]:
        """Yield `tokens` once; the next `read` accounts for the time that the reader holds them."""
        left = now()
        yield tokens
        self._untimed += now() - left

    def exclude_time(self, turns: Iterable[Result]) -> Iterator[Result]:
        """Yield from `turns`, work while no call is under way; its time counts for no call."""
        started = now()
        yield from turns
        self._last_read += now() - started
