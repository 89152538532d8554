"""Progress bars that are passed as a callback."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..bars import PATIENCE_SECONDS


class CallbackBar:
    """A bar that appears after two seconds, on a terminal, and vanishes when done; another call
    then begins a new one."""

    def __init__(self, label: str, unit: str, **settings: Any) -> None:
        self._settings = {"desc": label, "unit": unit, "leave": False, **settings}
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            from huggingface_hub.utils import tqdm

            self._bar = tqdm(disable=None, delay=PATIENCE_SECONDS, **self._settings)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None


PromptBar = partial(CallbackBar, "prompt", "token")
DownloadBar = partial(CallbackBar, "download", "B", unit_scale=True)
