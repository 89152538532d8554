"""The answers of one request, which are read at once: several prompts, and choices of each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from prometheus_client import Gauge

from .asks import Heard, Waiting


class Places:
    """Where answers may be open, so many at once over all requests."""

    def __init__(self, count: int, gauge: Gauge) -> None:
        self._free = asyncio.Semaphore(count)
        self._gauge = gauge  # shows how many are taken

    @property
    def is_full(self) -> bool:
        """Whether the next one has to wait."""
        return self._free.locked()

    async def take(self) -> None:
        """Wait for a place; those who wait get one as they came."""
        await self._free.acquire()
        self._gauge.inc()

    def give_back(self) -> None:
        self._gauge.dec()
        self._free.release()


class OwnPlaces:
    """The places of one request: the one with which it was let in, then others as they get free.

    One answer of a request waits for a place at a time, so that many of them keep no other request
    from its first one.
    """

    def __init__(self, places: Places) -> None:
        """`places`, one of which was taken for the request."""
        self._places = places
        self._has_first = True
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place for an answer."""
        async with self._turn:
            if not self._has_first:
                await self._places.take()
            self._has_first = False
        try:
            yield
        finally:
            self._places.give_back()

    def close(self) -> None:
        """Give the first place back, if no answer came for it."""
        if self._has_first:
            self._places.give_back()
        self._has_first = False


class PromptProgress:
    """How much of the prompts of a request's answers is processed."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def of(self, number: int) -> Callable[[int, int], None]:
        """What the answer of such a number tells its progress."""

        def tell(done: int, total: int) -> None:
            self._counts[number] = done, total

        return tell

    def waiting(self) -> Waiting:
        counts = self._counts.values()
        return Waiting(sum(done for done, _ in counts), sum(total for _, total in counts))


async def read_together(
    answers: Sequence[AsyncGenerator[Heard]], silence: float, progress: PromptProgress
) -> AsyncGenerator[Heard]:
    """The parts of all answers as they come, and `Waiting` by `progress` after each `silence`, the
    seconds in which none of them had a part.

    Each answer holds one part at most that nobody has taken, and all of them share a place for one
    more. Where one fails the others are cancelled, and its error is raised.
    """
    queue: asyncio.Queue[Heard | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_put_parts(one, queue)) for one in answers]
    num_open = len(tasks)
    try:
        while num_open:
            try:
                async with asyncio.timeout(silence):
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
    answer: AsyncGenerator[Heard], queue: asyncio.Queue[Heard | Exception | None]
) -> None:
    """Put an answer's parts into the queue; at its end None, or the error that ended it."""
    try:
        async with aclosing(answer):
            async for part in answer:
                await queue.put(part)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
