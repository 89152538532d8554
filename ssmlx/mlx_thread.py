"""The one thread of a process that runs MLX.

MLX's streams belong to threads: what one builds, another cannot compute. So all that computes is
asked of one thread, in order. A fork copies neither that thread nor MLX's own: a process that was
forked from one in which MLX has computed asks nothing of them, not even at its exit.
"""

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import mlx.core as mx

from .blas import OpenBlasThreads
from .errors import InputError, require

Params = ParamSpec("Params")
Result = TypeVar("Result")

_computing_process: int | None = None
"""The id of the process in which MLX computes, once it does: of the process, so that a fork finds
it. Never reset; tests of forks fork."""


class Closable(Protocol):
    """An object that is open until it is closed, as an answer is."""

    def close(self) -> None:
        """End it, on the MLX thread."""


def is_forked() -> bool:
    """Whether this process was forked from one in which MLX had computed."""
    return _computing_process not in (None, os.getpid())


def unless_forked(end: Callable[Params, None]) -> Callable[Params, None]:
    """Have a method that ends or writes something do nothing in a forked process.

    What it would end there is the parent's, as are the threads that could.
    """

    @wraps(end)
    def end_unless_forked(*args: Params.args, **kwargs: Params.kwargs) -> None:
        if not is_forked():
            end(*args, **kwargs)

    return end_unless_forked


def claim_process() -> None:
    """Note that MLX computes in this process; to be called before it does, any number of times."""
    global _computing_process
    # It would wait for ever for threads that the fork did not copy.
    require(
        not is_forked(),
        "this process was forked from one that had used MLX",
        expected="a new process, as a fork copies none of MLX's threads",
        do='start it with `multiprocessing.get_context("spawn")`, or fork before a model is loaded',
    )
    _computing_process = os.getpid()


@dataclass(frozen=True)
class _Task(Generic[Result]):
    """A call for the MLX thread, and where its result or its error goes."""

    future: Future[Result]
    call: Callable[[], Result]
    device: mx.Device  # the caller's default device

    def run(self) -> None:
        try:
            result = self.call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class MlxThread:
    """The one thread that runs MLX. It starts with the first task, and never ends."""

    def __init__(self) -> None:
        # Put may be called by a finalizer in the middle of another put; of queues, this one can.
        self._tasks: SimpleQueue[_Task[Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_stopped = False
        self.open: set[Closable] = set()  # what is closed when Python ends

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def enqueue(self, task: Callable[[], Result]) -> Future[Result]:
        """Have `task` done after those asked for before, on the caller's default device.

        The future holds an InputError in a forked process, and a RuntimeError when Python is
        ending.
        """
        future: Future[Result] = Future()
        try:
            claim_process()
        except InputError as error:
            future.set_exception(error)
            return future
        if self._is_stopped:
            future.set_exception(
                RuntimeError("Python is shutting down: no more answers are computed")
            )
            return future
        self._tasks.put(_Task(future, task, mx.default_device()))
        if self._thread is None:
            self._start()
        return future

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                # A daemon, for Python waits for any other thread before `atexit` runs.
                self._thread = threading.Thread(target=self._run, name="ssmlx", daemon=True)
                self._thread.start()
                atexit.register(self._close_at_exit)

    def _run(self) -> None:
        threads = OpenBlasThreads()
        while True:
            task = self._tasks.get()
            threads.adjust()
            if mx.default_device() != task.device:
                mx.set_default_device(task.device)
            if task.future.set_running_or_notify_cancel():
                task.run()
            del task  # or its arrays would wait for the next one

    @unless_forked
    def _close_at_exit(self) -> None:
        """Close what is open, wait for that, and take no more tasks."""
        # The thread itself waits: as a thread ends, what MLX keeps for it asks for Python, which
        # may be gone by then.
        closing = self.enqueue(self._close_open)
        self._is_stopped = True
        closing.result()

    def _close_open(self) -> None:
        for one in list(self.open):
            one.close()


THREAD = MlxThread()
"""One for the process: arrays of one thread cannot be computed on another, so that two engines in
one process share it. Never reset: it stops with the process."""


def _keep_open_alive() -> None:
    """In a forked process, keep what the parent has open alive for ever."""
    # Python runs a generator's end when its last reference goes, and these ends would wait for MLX.
    for one in THREAD.open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


os.register_at_fork(after_in_child=_keep_open_alive)


def run_on_mlx_thread(task: Callable[[], Result]) -> Result:
    """Do `task` on the MLX thread, in its turn, and wait for it; at once if this is that thread."""
    return task() if THREAD.is_current else THREAD.enqueue(task).result()


def on_mlx_thread(task: Callable[Params, Result]) -> Callable[Params, Result]:
    """Have a function run on the MLX thread, from any calling thread; see `run_on_mlx_thread`."""

    @wraps(task)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        return run_on_mlx_thread(lambda: task(*args, **kwargs))

    return run


_num_wired = 0
"""Open blocks of `wired_weights`: of the process, as MLX's limit is, which the last sets back."""
_limit_before = 0


@contextmanager
def wired_weights() -> Iterator[None]:
    """Keep macOS from paging out MLX's memory in the block, as mlx-lm does. MLX thread."""
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
