"""Threads that read requests, slots for open answers, and one stream of a request's answers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeVar, TypeVarTuple

from prometheus_client import Gauge

from .requests import StreamItem, Waiting

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

# Bytes of a body that is read without a queue: it takes some hundredths of a second.
SMALL = 64 * 2**10


# Large requests wait for each other alone, and the memory that they take is that of one.
class ReadingThreads:
    """Threads for what is computed of requests before they are answered, in pieces."""

    def __init__(self) -> None:
        self._for_small = ThreadPoolExecutor(4, "ssmlx-small-requests")
        self._for_large = ThreadPoolExecutor(1, "ssmlx-large-requests")

    async def run(
        self,
        num_bytes: int,  # of the request's body
        piece: Callable[[*_Args], _Result],
        *args: *_Args,
    ) -> _Result:
        """Compute a piece; one that has not begun is left out if the awaiting task is cancelled."""
        threads = self._for_small if num_bytes <= SMALL else self._for_large
        return await asyncio.wrap_future(threads.submit(piece, *args))


READING = ReadingThreads()  # one for the process, as its cores are


class BodyBytes:
    """The bytes of all bodies that are held, except small ones, within a limit."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    @contextmanager
    def part(self) -> Iterator["BodyPart"]:
        part = BodyPart(self)
        try:
            yield part
        finally:
            part.grow_to(0)

    def take(self, num_bytes: int) -> bool:
        """Take bytes, or give them back if negative; False, and nothing, if there are too few."""
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


class BodyPart:
    """What one body holds of `BodyBytes`."""

    def __init__(self, bodies: BodyBytes) -> None:
        self._bodies = bodies
        self._held = 0

    def grow_to(self, num_bytes: int) -> bool:
        """Hold so many bytes; if there are too few, return False and hold what was held."""
        wanted = num_bytes if num_bytes > SMALL else 0
        has_room = self._bodies.take(wanted - self._held)
        if has_room:
            self._held = wanted
        return has_room


class AnswerSlots:
    """A semaphore for open answers, over all requests, whose count a gauge shows."""

    def __init__(self, count: int, gauge: Gauge) -> None:
        self._free = asyncio.Semaphore(count)
        self._gauge = gauge
        self.num_free = count

    async def take(self) -> None:
        """Wait for a slot, first come, first served; the caller has to give it back."""
        await self._free.acquire()
        self.num_free -= 1
        self._gauge.inc()

    def give_back(self) -> None:
        self._gauge.dec()
        self.num_free += 1
        self._free.release()


class RequestSlots:
    """The slots of one request, whose answers wait for a slot one at a time."""

    def __init__(self, slots: AnswerSlots, deadline: float) -> None:
        self._slots = slots
        self._deadline = deadline  # by the clock of the event loop
        self._has_first = True  # the slot that the request was admitted with
        # A request of many answers does not keep another request from its first slot.
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a slot inside the block; raises TimeoutError if none is free before the deadline."""
        async with asyncio.timeout_at(self._deadline), self._turn:
            if not self._has_first:
                await self._slots.take()
            self._has_first = False
        try:
            yield
        finally:
            self._slots.give_back()

    def close(self) -> None:
        """Free the slot that the request was admitted with, if no answer took it."""
        if self._has_first:
            self._slots.give_back()
        self._has_first = False


class PromptProgress:
    """How many prompt tokens of a request's answers are processed."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}  # by answer: tokens done, tokens in all

    def callback_for(self, number: int) -> Callable[[int, int], None]:
        """Return a callback that keeps the progress of answer `number`."""

        def keep(done: int, total: int) -> None:
            self._counts[number] = done, total

        return keep

    def waiting(self) -> Waiting:
        """Return a `Waiting` with the sums over all answers."""
        counts = self._counts.values()
        return Waiting(sum(done for done, _ in counts), sum(total for _, total in counts))


async def merge_answers(
    answers: Sequence[AsyncGenerator[StreamItem]],  # are closed in the end
    silence_seconds: float,  # without a part, after which comes a `Waiting`
    progress: PromptProgress,
) -> AsyncGenerator[StreamItem]:
    """Yield the parts of several answers as they come; one answer's error cancels the others."""
    # An answer has at most one part that was not taken yet, and one more of any is queued.
    queue: asyncio.Queue[StreamItem | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_put_parts(one, queue)) for one in answers]
    num_open = len(tasks)
    try:
        while num_open:
            try:
                async with asyncio.timeout(silence_seconds):
                    part = await queue.get()
            except TimeoutError:
                part = progress.waiting()
            if isinstance(part, Exception):
                raise part
            if part is None:
                num_open -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _put_parts(
    answer: AsyncGenerator[StreamItem], queue: asyncio.Queue[StreamItem | Exception | None]
) -> None:
    """Put an answer's parts into the queue; at its end None, or the error that ended it."""
    try:
        async with aclosing(answer):
            async for part in answer:
                await queue.put(part)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
