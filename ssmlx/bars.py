"""Progress of work that takes long: to a callback, or by bars if a command shows them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Thread
from typing import Any

# Called with (number done, number in all) as work goes on; the receiver says what is counted.
Progress = Callable[[int, int], None]

# Whether bars are shown, if standard error is a terminal.
shown: ContextVar[bool] = ContextVar("shown", default=False)

PATIENCE_SECONDS = 2.0
_TICK_SECONDS = 1.0


def bar(
    items: Iterable[Any],
    label: str,
    **settings: Any,  # tqdm's, such as `total`
) -> Any:
    """`items`, with a progress bar if bars are shown; it appears after `PATIENCE_SECONDS`."""
    return _with_bar(items, label, settings) if shown.get() else items


def _with_bar(items: Iterable[Any], label: str, settings: dict[str, Any]) -> Iterator[Any]:
    with _ticking_bar(iterable=items, desc=label, **settings) as drawn:
        yield from drawn


@contextmanager
def busy(label: str) -> Iterator[None]:
    """Show `label` and the seconds that the block has taken so far, if bars are shown."""
    if not shown.get():
        yield
        return
    with _ticking_bar(desc=label, bar_format="{desc}: {elapsed}"):
        yield


@contextmanager
def _ticking_bar(**settings: Any) -> Iterator[Any]:
    """A tqdm bar that a thread redraws every second, so that its time goes on between items."""
    from huggingface_hub.utils import tqdm

    over = Event()

    def tick() -> None:
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
