"""How long a target call takes, measured by whoever launches it and waits for its result."""

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
"""Share of a call's time with whoever reads the tokens, from which on that matters."""


@dataclass(frozen=True)
class PendingCall:
    """A call that was launched and not read yet, with times in seconds of `time.perf_counter`."""

    launched_at: float
    launch_seconds: float
    others: int  # calls that other loops had launched, and other work
    follows_unread_drafting: bool  # follows drafting of which nothing was read yet


class Stopwatch:
    """Times the calls of one decoding loop, where nothing hides their time.

    A call lasts from one read to the next. A GPU works meanwhile, and if the host comes late
    because somebody held the tokens, nobody knows for how long. If it comes late because it was
    building the next call, as with a small model, that is what calls take here. MLX's CPU backend
    works mostly while a call is launched, and not while the tokens are with whoever asked for them.
    Between another loop's calls, or other work of the device, nothing is timed.
    """

    launches: ClassVar[int] = 0  # of all loops, and other work that was noted

    def __init__(self) -> None:
        self._last_read = 0.0
        self._untimed = 0.0
        self._own = 0

    def launch(self, *arrays: object, follows_unread_drafting: bool = False) -> PendingCall:
        """Start computing what a call decides, without waiting for it.

        Args:
            arrays: arrays, or nested lists of them: what the call decides, and what has to be
                computed with it.
            follows_unread_drafting: whether the call is launched behind drafting of which nothing
                was read yet.

        Returns:
            The times that `read` needs; each launched call is to be read once, in order.
        """
        Stopwatch.launches += 1
        self._own += 1
        started = now()
        mx.async_eval(*arrays)
        others = Stopwatch.launches - self._own
        return PendingCall(started, now() - started, others, follows_unread_drafting)

    def read(self, call: PendingCall, read: Callable[[], Result]) -> tuple[Result, float | None]:
        """Wait for a call, and time it.

        Args:
            call: as `launch` returned it.
            read: waits for the call, and returns what is wanted of it.

        Returns:
            What `read` returned, and the seconds from the read before (or the launch, for the
            first) to this one. Where launching blocks, as on the CPU, without the time that tokens
            were with whoever asked for them. None where nobody knows what the call took: another
            loop launched calls meanwhile, or other work was noted; launching blocks and the call
            `follows_unread_drafting`; or the device may have been idle while tokens were with
            whoever asked for them.
        """
        started = now()
        found = read()
        done = now()
        since = self._last_read or call.launched_at
        untimed = self._untimed
        self._last_read = done
        self._untimed = 0.0
        if call.others != Stopwatch.launches - self._own:
            return found, None
        if call.launch_seconds >= _BLOCKS * (done - call.launched_at):
            return found, None if call.follows_unread_drafting else done - since - untimed
        is_busy = done - started >= _WAITS * (done - since)
        return found, done - since if is_busy or untimed < _AWAY * (done - since) else None

    @classmethod
    def note_other_work(cls) -> None:
        """Note that the device did other work: no call that is under way now has a time, in any
        loop.
        """
        cls.launches += 1

    def yield_untimed(self, tokens: Result) -> Iterator[Result]:
        """Yield `tokens` once, and note how long it takes until somebody asks for more.

        `read` takes that time into account for the call that is read next.
        """
        left = now()
        yield tokens
        self._untimed += now() - left

    def exclude_time(self, turns: Iterable[Result]) -> Iterator[Result]:
        """Yield from `turns`, other work while no call is under way; its time counts for no call.

        Args:
            turns: does the work as it is iterated; what it yields is yielded on.
        """
        started = now()
        yield from turns
        self._last_read += now() - started
