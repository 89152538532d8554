"""Slots for open answers, and the answers of one request merged into one stream of parts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from prometheus_client import Gauge

from .requests import StreamItem, Waiting


class AnswerSlots:
    """A semaphore for open answers, over all requests, whose count a gauge shows."""

    def __init__(self, count: int, gauge: Gauge) -> None:
        """Make all slots free.

        Args:
            count: how many there are.
            gauge: shows how many are taken.
        """
        self._free = asyncio.Semaphore(count)
        self._gauge = gauge  # shows how many are taken

    @property
    def is_full(self) -> bool:
        """Whether the next one has to wait."""
        return self._free.locked()

    async def take(self) -> None:
        """Wait for a slot, first come, first served; the caller has to give it back."""
        await self._free.acquire()
        self._gauge.inc()

    def give_back(self) -> None:
        """Free a slot that was taken."""
        self._gauge.dec()
        self._free.release()


class RequestSlots:
    """The slots of one request: the one that it was admitted with, then others as they get free.

    One answer of a request waits for a slot at a time. So a request of many answers does not keep
    another request from its first slot.
    """

    def __init__(self, slots: AnswerSlots) -> None:
        """Begin with the slot that the request was admitted with.

        Args:
            slots: those of the server, one of which was already taken for this request.
        """
        self._slots = slots
        self._has_first = True
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def wait_for_and_hold_slot(self) -> AsyncIterator[None]:
        """Wait for a slot, hold it inside the block, and free it.

        The first block gets the slot that the request was admitted with.
        """
        async with self._turn:
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
        self._counts: dict[int, tuple[int, int]] = {}

    def callback_for(self, number: int) -> Callable[[int, int], None]:
        """Return a callback that keeps the progress of answer `number` for `waiting`, and sends
        nothing.

        It is called with (tokens done, tokens in all); the newest call counts.
        """

        def keep(done: int, total: int) -> None:
            self._counts[number] = done, total

        return keep

    def waiting(self) -> Waiting:
        """Return a `Waiting` with the sums over all answers whose callback was called."""
        counts = self._counts.values()
        return Waiting(sum(done for done, _ in counts), sum(total for _, total in counts))


async def merge_answers(
    answers: Sequence[AsyncGenerator[StreamItem]], silence_seconds: float, progress: PromptProgress
) -> AsyncGenerator[StreamItem]:
    """Yield the parts of several answers as they come.

    Each answer is read by a task of its own. An answer has at most one part that was not taken yet,
    and one more part of any answer is queued.

    Args:
        answers: generators of parts; they are closed in the end.
        silence_seconds: time without a part after which a `Waiting` is yielded.
        progress: what that `Waiting` says.

    Raises:
        Exception: the first error of an answer; the others are cancelled.
    """
    queue: asyncio.Queue[StreamItem | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_put_parts_then_none_or_error(one, queue)) for one in answers]
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


async def _put_parts_then_none_or_error(
    answer: AsyncGenerator[StreamItem], queue: asyncio.Queue[StreamItem | Exception | None]
) -> None:
    """Put an answer's parts into the queue; at its end None, or the error that ended it. The answer
    is closed.
    """
    try:
        async with aclosing(answer):
            async for part in answer:
                await queue.put(part)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
