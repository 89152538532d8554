"""What is told of work that takes long: to a callback, or by bars where a command shows them."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

Progress = Callable[[int, int], None]
"""Told (done, in all), of what its giver says."""

shown: ContextVar[bool] = ContextVar("shown", default=False)
"""Whether bars are shown, where standard error is a terminal."""

PATIENCE_SECONDS = 2.0


def bar(items: Iterable[Any], label: str, **settings: Any) -> Any:
    """`items`, behind a bar where bars are shown; `settings` are tqdm's."""
    if not shown.get():
        return items
    from huggingface_hub.utils import tqdm

    return tqdm(items, desc=label, disable=None, leave=False, delay=PATIENCE_SECONDS, **settings)
