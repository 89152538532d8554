"""Answers that any thread reads, segment by segment, while one thread decodes.

A decoding loop lives on the MLX thread, a call at a time, and a reader of an answer only asks for
its next segment. Readers do not ask ahead, and requests are served in order: so answers that are
read at the same time take turns, call by call.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from .bars import Progress
from .mlx_thread import THREAD, is_forked, unless_forked

Segment = TypeVar("Segment")


@dataclass(frozen=True)
class Prefilled:
    """Takes the place of a segment when a turn processed a piece of the prompt and gave no text."""

    done: int  # tokens
    total: int


class _SegmentSource(Generic[Segment]):
    """A generator of segments, which only the MLX thread touches."""

    def __init__(self, segments: Generator[Segment | Prefilled]) -> None:
        self._segments = segments
        self.is_over = False

    def compute_next(self) -> Segment | Prefilled | None:
        """The next segment; None if the answer is over. MLX thread."""
        if self.is_over:
            return None
        THREAD.open.add(self)
        try:
            segment = next(self._segments)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                return None
            raise
        if getattr(segment, "finish_reason", None):
            self.close()  # now, because no one requests anything after the last segment
        return segment

    def close(self) -> None:
        """End the answer, and run what its generator does at its end. MLX thread."""
        self.is_over = True
        THREAD.open.discard(self)
        self._segments.close()


class Answer(Iterator[Segment], AsyncIterator[Segment], Generic[Segment]):
    """An answer's segments, one for each call of the model: to iterate, or to iterate `async`.

    Any thread and any event loop may continue to read where another one stopped, and any may
    `cancel`; a second reader at the same time gets a RuntimeError. At most one step is computed
    before a reader asks for it. An answer without references is cancelled. If a step fails, reading
    raises the error, and the answer is over.

        with ssmlx.stream_generate(model, tokenizer, prompt) as answer:
            for segment in answer:
                print(segment.text, end="")

    The functions of this package make answers.

    Args:
        segments: computes the segments; only the MLX thread touches and closes it. It may also
            yield how much of the prompt was processed.
        progress: called with (tokens processed, tokens in all) of the prompt, on the thread that
            reads.
    """

    def __init__(
        self, segments: Generator[Segment | Prefilled], progress: Progress | None = None
    ) -> None:
        self._source = _SegmentSource(segments)
        self._progress = progress
        self._requested: Future[Segment | Prefilled | None] | None = None
        self._reading = threading.Lock()
        closing = weakref.finalize(self, _end, self._source)
        closing.atexit = False

    @property
    def is_over(self) -> bool:
        """Whether the last segment was read, or the answer was cancelled or failed."""
        return self._source.is_over

    def cancel(self) -> Future[None]:
        """Stop the answer after the call that runs now, wherever it is; does not wait for it.

        A thread that waits for a segment still gets that of the running call; then reading ends.
        Segments that were not read are lost.

        Returns:
            A future that is done when the answer has ended. In a forked process, where it cannot
            be ended, it holds an InputError.
        """
        self._requested = None
        return _end(self._source)

    @unless_forked
    def close(self) -> None:
        """Cancel the answer, and wait until its cache can be used. Not in a forked process."""
        if THREAD.is_current:
            self._source.close()
        else:
            self.cancel().result()

    async def aclose(self) -> None:
        """Cancel the answer, and await its end. Not in a forked process."""
        if not is_forked():
            # The end comes even if the task that awaits it is cancelled.
            await asyncio.shield(asyncio.wrap_future(self.cancel()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Segment:
        with self._exclusive_reading():
            while True:
                if THREAD.is_current:
                    segment = self._source.compute_next()
                else:
                    asked = self._request_segment()
                    with self._keeping_request(asked):
                        segment = asked.result()
                if segment is None:
                    raise StopIteration
                if not isinstance(segment, Prefilled):
                    return segment
                self._report_progress(segment)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        with self._exclusive_reading():
            while True:
                asked = self._request_segment()
                with self._keeping_request(asked):
                    segment = await asyncio.shield(asyncio.wrap_future(asked))
                if segment is None:
                    raise StopAsyncIteration
                if not isinstance(segment, Prefilled):
                    return segment
                self._report_progress(segment)

    def _request_segment(self) -> Future[Segment | Prefilled | None]:
        """Ask for the next segment, unless an interrupted reader has asked already."""
        if self._requested is None:
            self._requested = THREAD.enqueue(self._source.compute_next)
        return self._requested

    @contextmanager
    def _keeping_request(self, asked: Future[Segment | Prefilled | None]) -> Iterator[None]:
        """Keep the request for the next reader if waiting for it is interrupted."""
        try:
            yield
        except BaseException as error:
            # The segment's own error is no interruption.
            if asked.done() and asked.exception() is error:
                self._requested = None
            raise
        self._requested = None

    def _report_progress(self, turn: Prefilled) -> None:
        if self._progress is not None:
            self._progress(turn.done, turn.total)

    @contextmanager
    def _exclusive_reading(self) -> Iterator[None]:
        """Refuse other readers of the answer inside the block."""
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("another thread or task is already reading this answer")
        try:
            yield
        finally:
            self._reading.release()


def _end(source: _SegmentSource[Any]) -> Future[None]:
    """End an answer at once for its readers; the future is done when it is closed."""
    source.is_over = True
    return THREAD.enqueue(source.close)
