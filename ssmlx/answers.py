"""The one thread that runs MLX for answers, and the answers that are read from any other.

MLX's streams belong to threads: what one builds, another cannot compute. So a decoding loop lives
on one thread of the process, a call at a time, and whoever reads an answer only asks for its next
segment. Nobody asks ahead, requests are served in the order in which they come, and so answers
that are read at the same time take turns, call by call.

A fork copies neither that thread nor MLX's own. So a process that was forked from one in which
MLX has computed asks nothing of them, at its exit either: see `claim_process`.
"""

import asyncio
import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

import mlx.core as mx

from .bars import Progress
from .errors import InputError, require

Result = TypeVar("Result")
Segment = TypeVar("Segment")


@dataclass(frozen=True)
class Prefilled:
    """In place of a segment, a turn that processed a piece of the prompt."""

    done: int  # tokens
    total: int


_computing_process: int | None = None


def is_forked() -> bool:
    """Whether this process was forked from one in which MLX had computed."""
    return _computing_process not in (None, os.getpid())


def claim_process() -> None:
    """MLX is to compute in this process, from now on: no process forked from it can do so.

    Raises:
        InputError: it is itself forked from one in which MLX has computed, and would wait for ever
            for threads that the fork did not copy.
    """
    global _computing_process
    require(
        not is_forked(),
        "this process was forked from one in which MLX had computed",
        expected="a process of its own, as a fork copies none of MLX's threads",
        do='start it by `multiprocessing.get_context("spawn")`, or fork before a model is loaded',
    )
    _computing_process = os.getpid()


@dataclass(frozen=True)
class _Task(Generic[Result]):
    future: Future[Result]
    call: Callable[[], Result]
    device: mx.Device  # the default one of whoever asks

    def do(self) -> None:
        try:
            result = self.call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _MlxThread:
    """A thread that does what it is given, in order. It starts with the first task."""

    def __init__(self) -> None:
        # Put may be called by a finalizer in the middle of another put; of queues, this one can.
        self._tasks: SimpleQueue[_Task[Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_stopped = False
        self.open: set[_Turns[Any]] = set()  # answers that are not over

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        try:
            claim_process()
        except InputError as error:
            future.set_exception(error)
            return future
        if self._is_stopped:
            future.set_exception(RuntimeError("Python is ending: nothing is answered any more"))
            return future
        self._tasks.put(_Task(future, task, mx.default_device()))
        if self._thread is None:
            self._start()
        return future

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                # A daemon, for Python waits for any other thread before `atexit` runs.
                self._thread = threading.Thread(target=self._work, name="ssmlx", daemon=True)
                self._thread.start()
                atexit.register(self._stop)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if mx.default_device() != task.device:
                mx.set_default_device(task.device)
            if task.future.set_running_or_notify_cancel():
                task.do()
            del task  # or its arrays would wait for the next one

    def _stop(self) -> None:
        """Close what is open, and begin nothing more. The thread stays, and waits: as a thread
        ends, what MLX keeps for it asks for Python, which may be gone by then."""
        if is_forked():
            return
        closing = self.submit(self._close_open)
        self._is_stopped = True
        closing.result()

    def _close_open(self) -> None:
        for turns in list(self.open):
            turns.close()


_mlx_thread = _MlxThread()


def _never_close_open() -> None:
    """In a forked process: the ends of the answers that its parent has open would wait for MLX, and
    Python runs a generator's end when nobody holds it any more. So somebody holds them."""
    for turns in _mlx_thread.open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(turns))


os.register_at_fork(after_in_child=_never_close_open)


def run(task: Callable[[], Result]) -> Result:
    """Do a task on the thread that runs MLX, after what it was asked for before; its result."""
    return task() if _mlx_thread.is_current else _mlx_thread.submit(task).result()


class _Turns(Generic[Segment]):
    """A generator of segments, which only the MLX thread touches."""

    def __init__(self, segments: Iterator[Segment | Prefilled]) -> None:
        self._segments: Any = segments
        self.is_over = False

    def take(self) -> Segment | Prefilled | None:
        """The next segment; None where the answer is over."""
        if self.is_over:
            return None
        _mlx_thread.open.add(self)
        try:
            segment = next(self._segments)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                return None
            raise
        if getattr(segment, "finish_reason", None):
            self.close()  # now, for nobody need ask for what comes after the last segment
        return segment

    def close(self) -> None:
        self.is_over = True
        _mlx_thread.open.discard(self)
        self._segments.close()


class Answer(Iterator[Segment], AsyncIterator[Segment], Generic[Segment]):
    """An answer's segments, one for each call of the model: to iterate, or to iterate `async`.

    Any thread and any event loop may read on where another one stopped, and any may `cancel`. A
    step ahead at most is computed before somebody asks for it. An answer that nobody holds any
    more is cancelled. Where a step fails, reading raises the error, and the answer is over.

        with ssmlx.stream_generate(model, tokenizer, prompt) as answer:
            for segment in answer: ...

    The functions of this package make answers.

    Args:
        segments: computes the segments, on the thread that runs MLX; between them may stand how
            much of the prompt was processed.
        progress: given (tokens processed, tokens in all) of the prompt, on the thread that reads.
    """

    def __init__(
        self, segments: Iterator[Segment | Prefilled], progress: Progress | None = None
    ) -> None:
        """`progress` is told of the prompt on the thread that reads."""
        self._turns = _Turns(segments)
        self._progress = progress
        self._asked: Future[Segment | Prefilled | None] | None = None
        self._reading = threading.Lock()
        closing = weakref.finalize(self, _cancel, self._turns)
        closing.atexit = False

    @property
    def is_over(self) -> bool:
        """Whether the last segment was given out, or the answer was cancelled or failed."""
        return self._turns.is_over

    def cancel(self) -> Future[None]:
        """Stop the answer after the call that runs now, wherever it is; does not wait for it."""
        self._asked = None
        return _cancel(self._turns)

    def close(self) -> None:
        """Cancel the answer, and wait until what it leaves behind can be used."""
        if is_forked():
            return
        if _mlx_thread.is_current:
            self._turns.close()
        else:
            self.cancel().result()

    async def aclose(self) -> None:
        """As `close`."""
        if is_forked():
            return
        # Who is cancelled waits no longer, but the answer ends.
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
        with self._alone():
            while True:
                if _mlx_thread.is_current:
                    segment = self._turns.take()
                else:
                    asked = self._ask()
                    with self._served(asked):
                        segment = asked.result()
                if segment is None:
                    raise StopIteration
                if not isinstance(segment, Prefilled):
                    return segment
                self._tell(segment)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        with self._alone():
            while True:
                asked = self._ask()
                with self._served(asked):
                    segment = await asyncio.shield(asyncio.wrap_future(asked))
                if segment is None:
                    raise StopAsyncIteration
                if not isinstance(segment, Prefilled):
                    return segment
                self._tell(segment)

    def _ask(self) -> Future[Segment | Prefilled | None]:
        if self._asked is None:
            self._asked = _mlx_thread.submit(self._turns.take)
        return self._asked

    @contextmanager
    def _served(self, asked: Future[Segment | Prefilled | None]) -> Iterator[None]:
        """Where a reader is interrupted, the next one gets what was asked for."""
        try:
            yield
        except BaseException as error:
            if asked.done() and asked.exception() is error:
                self._asked = None
            raise
        self._asked = None

    def _tell(self, turn: Prefilled) -> None:
        if self._progress is not None:
            self._progress(turn.done, turn.total)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("this answer is being read already, by another thread or task")
        try:
            yield
        finally:
            self._reading.release()


def _cancel(turns: _Turns[Any]) -> Future[None]:
    turns.is_over = True  # at once: what is asked for from now on comes after the end
    return _mlx_thread.submit(turns.close)


_num_wired = 0
_limit_before = 0


@contextmanager
def wired() -> Iterator[None]:
    """Keep the weights in memory that macOS would page out, as mlx-lm does while it generates.

    On the MLX thread alone. Of blocks that overlap, the last one to end sets the limit back.
    """
    global _num_wired, _limit_before
    if not mx.metal.is_available():
        yield
        return
    if _num_wired == 0:
        most = int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
        _limit_before = mx.set_wired_limit(most)
    _num_wired += 1
    try:
        yield
    finally:
        _num_wired -= 1
        if _num_wired == 0:
            mx.synchronize()
            mx.set_wired_limit(_limit_before)
