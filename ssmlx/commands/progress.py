"""Progress bars on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")
_PATIENCE_SECONDS = 1.0


def bar(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """`items` with a bar of `total` steps, shown on a terminal only."""
    from huggingface_hub.utils import tqdm

    return iter(tqdm(items, total=total, desc=label, unit="prompt", disable=None, leave=False))


class PromptBar:
    """A bar for a prompt that takes a while: appears after a second, and leaves when done."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Told (tokens processed, tokens in all)."""
        from huggingface_hub.utils import tqdm

        if self._started is None or done == 0:
            self._started = time.perf_counter()
        late = time.perf_counter() - self._started > _PATIENCE_SECONDS
        if self._bar is None and late and done < total:
            self._bar = tqdm(total=total, desc="prompt", unit="token", disable=None, leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._bar.close()
                self._bar = None
