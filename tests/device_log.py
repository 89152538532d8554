"""What a decoding loop asks of the device, seen at MLX itself and at the target's own layers.

How the loop is written does not matter: what is launched and waited for, when the target is called
and when tokens are given out is what a device, or a reader, sees of any loop.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import pytest
from tiny import FakeClock

from ssmlx.decoding import stopwatch
from ssmlx.decoding.step import Step
from ssmlx.model.shapes import arrays_in

RUN = "run"  # the target's first layer is given rows: a call, or a piece of a prompt, is built
LAUNCH = "launch"  # work is handed to the device
READ = "read"  # the host waits for values
IDLE = "idle"  # the host has waited for the newest work: the device has none now


def is_launched(array: mx.array) -> bool:
    """Whether an array is computed, or the device has been told to."""
    dot = io.StringIO()
    mx.export_to_dot(dot, array)
    return "shape=rectangle" not in dot.getvalue()  # a primitive that is still to run


@dataclass(frozen=True)
class Turn:
    """All that happened from the giving out of one step to that of the next."""

    events: tuple[str, ...]
    calls_under_way: int  # target calls that were launched, and not waited for

    def count(self, event: str) -> int:
        return self.events.count(event)

    @property
    def after_read(self) -> tuple[str, ...]:
        """What happened between the last read and the giving out of its tokens."""
        reads = [place for place, event in enumerate(self.events) if event == READ]
        return self.events[reads[-1] + 1 :]


class DeviceLog:
    """The events of all loops, and the turns of one; see `watched`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._newest = self._finished = 0  # numbers of launches: the last, and the last waited for
        # Arrays by the launch that they were handed over in; held, or an id would come again.
        self._numbers: dict[int, tuple[int, mx.array]] = {}
        self._is_building = False  # whether the first layer was run since the last one was
        self._built: list[mx.array] = []  # what leaves the last layer, of calls not launched yet
        self._calls: list[int] = []  # the launch of each target call

    def turns(self, steps: Iterator[Step | None], count: int) -> list[Turn]:
        """Take `count` steps; turns for other answers, which are None, are not counted."""
        found = []
        while len(found) < count:
            self.events.clear()
            while next(steps) is None:
                pass
            under_way = sum(number > self._finished for number in self._calls)
            found.append(Turn(tuple(self.events), under_way))
        return found

    def note_layer(self, hidden: mx.array, *, is_first: bool) -> None:
        """Note that the target's first or last layer is run; streams run the last ones alone."""
        if is_first:
            self.events.append(RUN)
        elif self._is_building:
            self._built.append(hidden)
        self._is_building = is_first

    @contextmanager
    def noting_launch(self, *given: object) -> Iterator[None]:
        arrays = arrays_in(given)
        is_new = not all(map(is_launched, arrays))
        yield
        if not is_new:
            return
        self._newest += 1
        self.events.append(LAUNCH)
        self._numbers |= {id(one): (self._newest, one) for one in arrays}
        launched = [one for one in self._built if is_launched(one)]
        self._calls += [self._newest for _ in launched]
        self._built = [one for one in self._built if not any(one is other for other in launched)]

    def note_wait(self, *given: object) -> None:
        numbers = [self._numbers.get(id(one), (self._newest,))[0] for one in arrays_in(given)]
        if numbers and max(numbers) > self._finished:
            self._finished = max(numbers)
            if self._finished == self._newest:
                self.events.append(IDLE)


@contextmanager
def watched(model=None) -> Iterator[DeviceLog]:
    """Log what is asked of the device within the block; the calls of `model`, if it is given."""
    log = DeviceLog()
    launch, wait = mx.async_eval, mx.eval

    def launching(*arrays):
        with log.noting_launch(arrays):
            launch(*arrays)

    def waiting(*arrays):
        with log.noting_launch(arrays):
            wait(*arrays)
        log.note_wait(arrays)

    def reading(name):
        read = getattr(mx.array, name)

        def reading(array):
            log.events.append(READ)
            with log.noting_launch(array):
                found = read(array)
            log.note_wait(array)
            return found

        return reading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", launching)
        patch.setattr(mx, "eval", waiting)
        for name in ("item", "tolist"):
            patch.setattr(mx.array, name, reading(name))
        if model is not None:
            first, *_, last = model.backbone.layers
            run = type(first).__call__

            def running(layer, *given, **named):
                hidden = run(layer, *given, **named)
                if layer is first or layer is last:
                    log.note_layer(hidden, is_first=layer is first)
                return hidden

            patch.setattr(type(first), "__call__", running)
        yield log


@contextmanager
def rows_by_layer(model) -> Iterator[list[int]]:
    """Count the rows that the model's layers are given within the block, call by call."""
    rows: list[int] = []
    kinds = {type(layer) for layer in model.backbone.layers}

    def counting(run):
        def counted(layer, hidden, *given, **named):
            rows.append(hidden.shape[1])
            return run(layer, hidden, *given, **named)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            patch.setattr(kind, "__call__", counting(kind.__call__))
        yield rows


def peak_growth(
    steps: Iterator[Step], count: int, hold: Callable[[], object] = lambda: None
) -> int:
    """Bytes in use at once, beyond those before, while `count` steps are given out; what `hold`
    returns is held for a step."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    held = None
    for _ in range(count):
        next(steps)
        held = hold()
    del held
    return mx.get_peak_memory() - before


@contextmanager
def on_clock(*, launch: float = 0.0, read: float = 0.0) -> Iterator[FakeClock]:
    """Let the loop's calls be timed by a clock that goes on by so many seconds with each launch and
    each read, and by what is spent of it otherwise. To launch is to compute then, as on a CPU."""
    clock = FakeClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch, "now", clock)
        if launch:
            patch.setattr(mx, "async_eval", lambda *given: clock.spend(launch) or mx.eval(*given))
        if read:
            values = mx.array.tolist
            patch.setattr(mx.array, "tolist", lambda one: clock.spend(read) or values(one))
        yield clock
