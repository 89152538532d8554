"""The one thread that runs MLX for answers, and the answers that are read from any other.

MLX's streams belong to threads: what one builds, another cannot compute. So a decoding loop lives
on one thread of the process, a call at a time, and whoever reads an answer only asks for its next
segment. Nobody asks ahead, requests are served in the order in which they come, and so answers
that are read at the same time take turns, call by call.

A fork copies neither that thread nor MLX's own. So a process that was forked from one in which
MLX has computed asks nothing of them, at its exit either: see `claim_process_for_mlx`.
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
    """Stands for a segment where a turn processed a piece of the prompt and gave no text.

    Attributes:
        done: tokens that were processed so far.
        total: tokens to process in all.
    """

    done: int  # tokens
    total: int


_computing_process: int | None = None


def is_forked() -> bool:
    """Whether this process was forked from one in which MLX had computed."""
    return _computing_process not in (None, os.getpid())


def claim_process_for_mlx() -> None:
    """Note that MLX computes in this process from now on, so that none forked from it may.

    To be called before MLX computes anything; as often as wanted.

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
    """A call for the MLX thread, and where its result or its error goes."""

    future: Future[Result]
    call: Callable[[], Result]
    device: mx.Device  # the default one of whoever asks

    def run_into_future(self) -> None:
        """Call it, and put its result, or any exception that it raises, into the future. Nothing is
        raised.
        """
        try:
            result = self.call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _MlxThread:
    """The one thread that runs MLX: it does tasks in the order of asking.

    It starts with the first task, and never ends.
    """

    def __init__(self) -> None:
        """Make the queue of tasks; no thread is started before the first of them."""
        # Put may be called by a finalizer in the middle of another put; of queues, this one can.
        self._tasks: SimpleQueue[_Task[Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_stopped = False
        self.open: set[_SegmentSource[Any]] = set()  # answers that are not over

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def enqueue(self, task: Callable[[], Result]) -> Future[Result]:
        """Have `task` done behind those that were asked for before, also where the MLX thread
        itself asks; returns at once.

        It is done on the default device that the calling thread has now. The first task starts the
        thread.

        Returns:
            A future of its result or its error. The error is an InputError in a forked process, and
            a RuntimeError when Python is ending; the task is not done then.
        """
        future: Future[Result] = Future()
        try:
            claim_process_for_mlx()
        except InputError as error:
            future.set_exception(error)
            return future
        if self._is_stopped:
            future.set_exception(RuntimeError("Python is ending: nothing is answered any more"))
            return future
        self._tasks.put(_Task(future, task, mx.default_device()))
        if self._thread is None:
            self._start_thread_once()
        return future

    def _start_thread_once(self) -> None:
        """Start the thread, unless it was, and have open answers closed when Python ends."""
        with self._starting:
            if self._thread is None:
                # A daemon, for Python waits for any other thread before `atexit` runs.
                self._thread = threading.Thread(
                    target=self._run_tasks_for_ever, name="ssmlx", daemon=True
                )
                self._thread.start()
                atexit.register(self._close_open_answers_at_exit)

    def _run_tasks_for_ever(self) -> None:
        """Do tasks for ever, each on the default device of whoever asked; cancelled ones are left
        out."""
        while True:
            task = self._tasks.get()
            if mx.default_device() != task.device:
                mx.set_default_device(task.device)
            if task.future.set_running_or_notify_cancel():
                task.run_into_future()
            del task  # or its arrays would wait for the next one

    def _close_open_answers_at_exit(self) -> None:
        """When Python ends: close what is open, wait for that, and take no more tasks.

        Does nothing in a forked process. Tasks that were asked for before are still done. The
        thread stays, and waits: as a thread ends, what MLX keeps for it asks for Python, which may
        be gone by then.
        """
        if is_forked():
            return
        closing = self.enqueue(self._close_open)
        self._is_stopped = True
        closing.result()

    def _close_open(self) -> None:
        for turns in list(self.open):
            turns.close()


_mlx_thread = _MlxThread()


def _keep_open_answers_alive() -> None:
    """Keep the answers that the parent has open alive for ever, in a forked process.

    Python runs a generator's end when nobody holds it any more, and these ends would wait for MLX.
    """
    for turns in _mlx_thread.open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(turns))


os.register_at_fork(after_in_child=_keep_open_answers_alive)


def run_on_mlx_thread(task: Callable[[], Result]) -> Result:
    """Do `task` on the thread that runs MLX, wait for it, and return its result or raise its error.

    On that thread itself it is done at once; elsewhere behind what was asked for before.
    """
    return task() if _mlx_thread.is_current else _mlx_thread.enqueue(task).result()


class _SegmentSource(Generic[Segment]):
    """A generator of segments, which only the MLX thread touches."""

    def __init__(self, segments: Iterator[Segment | Prefilled]) -> None:
        self._segments: Any = segments
        self.is_over = False

    def compute_next(self) -> Segment | Prefilled | None:
        """Compute and return the next segment; None where the answer is over. On the MLX thread.

        An error, which is raised, or a segment with a finish reason ends the answer: its generator
        is closed at once.
        """
        if self.is_over:
            return None
        _mlx_thread.open.add(self)
        try:
            segment: Segment | Prefilled = next(self._segments)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                return None
            raise
        if getattr(segment, "finish_reason", None):
            self.close()  # now, for nobody need ask for what comes after the last segment
        return segment

    def close(self) -> None:
        """End the answer, and run what its generator does at its end. On the MLX thread."""
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
        """Begin nothing yet: a segment is computed when it is asked for.

        Args:
            segments: computes the segments; touched by the MLX thread alone. A generator.
            progress: called with (tokens processed, tokens in all) while the prompt is processed,
                on the thread that reads; None for nothing.
        """
        self._source = _SegmentSource(segments)
        self._progress = progress
        self._requested: Future[Segment | Prefilled | None] | None = None
        self._reading = threading.Lock()
        closing = weakref.finalize(self, _end_and_close_source, self._source)
        closing.atexit = False

    @property
    def is_over(self) -> bool:
        """Whether the last segment was given out, or the answer was cancelled or failed."""
        return self._source.is_over

    def cancel(self) -> Future[None]:
        """Stop the answer after the call that runs now, wherever it is; does not wait for it.

        A thread that waits for a segment still gets that of the running call; reading ends
        behind it. Segments that were not read are lost.

        Returns:
            A future that is done when the answer has ended.
        """
        self._requested = None
        return _end_and_close_source(self._source)

    def close(self) -> None:
        """Cancel the answer, and wait until its end was run and its cache can be used.

        In a forked process it does nothing.
        """
        if is_forked():
            return
        if _mlx_thread.is_current:
            self._source.close()
        else:
            self.cancel().result()

    async def aclose(self) -> None:
        """Cancel the answer, and await its end; the end comes too where the awaiting task is
        cancelled.

        In a forked process it does nothing.
        """
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
        """Wait for the next segment; pieces of the prompt go to `progress` meanwhile.

        On the MLX thread itself it is computed at once.

        Raises:
            StopIteration: the answer is over.
            RuntimeError: another thread or task is reading it, or Python is ending.
            Exception: what computing the segment has raised; the answer is over then.
        """
        with self._exclusive_reading():
            while True:
                if _mlx_thread.is_current:
                    segment = self._source.compute_next()
                else:
                    asked = self._request_segment()
                    with self._keep_request_if_interrupted(asked):
                        segment = asked.result()
                if segment is None:
                    raise StopIteration
                if not isinstance(segment, Prefilled):
                    return segment
                self._report_progress(segment)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        """Await the next segment; pieces of the prompt go to `progress` meanwhile.

        Raises:
            StopAsyncIteration: the answer is over.
            RuntimeError: another thread or task is reading it, or Python is ending.
            Exception: what computing the segment has raised; the answer is over then.
        """
        with self._exclusive_reading():
            while True:
                asked = self._request_segment()
                with self._keep_request_if_interrupted(asked):
                    segment = await asyncio.shield(asyncio.wrap_future(asked))
                if segment is None:
                    raise StopAsyncIteration
                if not isinstance(segment, Prefilled):
                    return segment
                self._report_progress(segment)

    def _request_segment(self) -> Future[Segment | Prefilled | None]:
        """Ask the MLX thread for the next segment, unless an interrupted reader has asked."""
        if self._requested is None:
            self._requested = _mlx_thread.enqueue(self._source.compute_next)
        return self._requested

    @contextmanager
    def _keep_request_if_interrupted(
        self, asked: Future[Segment | Prefilled | None]
    ) -> Iterator[None]:
        """While its reader waits for `asked` in the block: forget the request when the block ends.

        Where the reader is interrupted instead, the request is kept, and the next reader gets its
        segment. An error of the segment itself is no interruption. All exceptions go on.
        """
        try:
            yield
        except BaseException as error:
            if asked.done() and asked.exception() is error:
                self._requested = None
            raise
        self._requested = None

    def _report_progress(self, turn: Prefilled) -> None:
        """Call `progress`, if there is one."""
        if self._progress is not None:
            self._progress(turn.done, turn.total)

    @contextmanager
    def _exclusive_reading(self) -> Iterator[None]:
        """Let nobody else read the answer inside the block.

        Raises:
            RuntimeError: another thread or task is reading it already.
        """
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("this answer is being read already, by another thread or task")
        try:
            yield
        finally:
            self._reading.release()


def _end_and_close_source(source: _SegmentSource[Any]) -> Future[None]:
    """End an answer at once for its readers, and have it closed behind the call that runs now.

    Returns:
        A future that is done when it is closed.
    """
    source.is_over = True
    return _mlx_thread.enqueue(source.close)


_num_wired = 0
_limit_before = 0


@contextmanager
def wired_weights() -> Iterator[None]:
    """Keep macOS from paging out MLX's memory in the block, up to the bytes that it recommends.

    As mlx-lm does while it generates. On the MLX thread alone; does nothing where there is no
    Metal. Of blocks that overlap, the last one to end waits for the GPU and sets the limit back.
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
