"""Progress of work that takes long: to a callback, or by bars where a command shows them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Thread
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (number done, number in all) as work goes on; what is counted says who takes it."""

shown: ContextVar[bool] = ContextVar("shown", default=False)
"""Whether bars are shown, where standard error is a terminal."""

PATIENCE_SECONDS = 2.0
_TICK_SECONDS = 1.0


def bar(items: Iterable[Any], label: str, **settings: Any) -> Any:
    """`items` as an iterable that draws a progress bar where bars are shown, else `items` itself.

    Bars are shown where `shown` is set, and standard error is a terminal. The bar appears after
    `PATIENCE_SECONDS`, and is wiped out at the end.

    Args:
        items: what is gone through.
        label: what stands before the bar.
        settings: tqdm's, such as `total`.
    """
    return _behind_bar(items, label, settings) if shown.get() else items


def _behind_bar(items: Iterable[Any], label: str, settings: dict[str, Any]) -> Iterator[Any]:
    """Yield `items`, and draw a bar meanwhile."""
    with _ticking_bar(iterable=items, desc=label, **settings) as drawn:
        yield from drawn


@contextmanager
def busy(label: str) -> Iterator[None]:
    """Show `label` and the seconds that the block has taken so far, where bars are shown.

    Nothing is drawn in the first `PATIENCE_SECONDS`; the line is wiped out at the end.
    """
    if not shown.get():
        yield
        return
    with _ticking_bar(desc=label, bar_format="{desc}: {elapsed}"):
        yield


@contextmanager
def _ticking_bar(**settings: Any) -> Iterator[Any]:
    """Yield a tqdm bar that a thread draws again every second, so that its time goes on between
    items.

    It appears after `PATIENCE_SECONDS`, and where standard error is no terminal not at all. It is
    wiped out, and the thread ended, at the end of the block.
    """
    from huggingface_hub.utils import tqdm

    over = Event()

    def tick() -> None:
        """Draw the bar after `PATIENCE_SECONDS`, and then every second, until the block is over;
        run by a thread of its own.
        """
        wait = PATIENCE_SECONDS
        while not over.wait(wait):
            drawn.refresh()
            wait = _TICK_SECONDS

    with tqdm(disable=None, leave=False, delay=PATIENCE_SECONDS, **settings) as drawn:
        ticker = Thread(target=tick, daemon=True)
        if not drawn.disable:
            ticker.start()
        try:
            yield drawn
        finally:
            over.set()
            if ticker.is_alive():
                ticker.join()
