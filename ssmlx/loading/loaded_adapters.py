"""The adapters that an engine has loaded: all on one base, whose weights they share."""

import threading
from pathlib import Path

from ..errors import require
from ..model.streams import StreamFusedModel
from .adapter import load_adapter
from .attach import choose_adapter, swap_adapter
from .folders import Fetch
from .names import AUTO_ADAPTER


class LoadedAdapters:
    """One base, alone and with any of its adapters, each loaded when it is first requested.

    Any thread may call it. One folder gives one model, whatever name it is requested by.
    """

    def __init__(
        self,
        loaded: StreamFusedModel,  # if it has streams (a fused folder), these are what "auto" means
        *,
        merge_lora: bool,
        fetch: Fetch,
    ) -> None:
        self._merge_lora = merge_lora
        self._fetch = fetch
        self._lock = threading.Lock()  # of all below
        self._own_streams = loaded if loaded.config is not None else None
        # By resolved folder; None for the base alone.
        self._models: dict[Path | None, StreamFusedModel] = {None: swap_adapter(loaded, None)}
        # The own name and the folder that a name was found to mean. Not of a `Path`, which is
        # another folder in another working directory.
        self._chosen: dict[str, tuple[str, Path | None]] = {}

    @property
    def is_closed(self) -> bool:
        return not self._models

    @property
    def names(self) -> list[str]:
        """The names under which adapters were first requested, and "none" for the base alone."""
        return [str(one.adapter_name) for one in list(self._models.values())]

    def model(self, asked: str | Path) -> StreamFusedModel:
        """The base with an adapter; another thread that asks for it meanwhile waits.

        What a name is first found to mean, "auto" too, it means until `close`.
        """
        name, folder = self._choose(asked)
        key = None if folder is None else folder.resolve()
        with self._lock:
            self._require_open()  # again, as it may have been closed meanwhile
            if name is None:
                assert self._own_streams is not None
                return self._own_streams
            if folder is not None and key not in self._models:
                adapter = load_adapter(folder, name)
                alone = self._models[None]
                self._models[key] = swap_adapter(alone, adapter, merge_lora=self._merge_lora)
            if isinstance(asked, str):
                self._chosen[asked] = name, folder
            return self._models[key]

    def name_of(self, asked: str | Path) -> str | None:
        """The name of an adapter: `asked` itself, unchecked; for "auto", the adapter's own name,
        "none" for the base alone, None for the base's own streams."""
        if asked != AUTO_ADAPTER:
            return str(asked)
        name, folder = self._choose(asked)
        if name is not None:
            with self._lock:  # what it means now, it means until `close`
                self._chosen[AUTO_ADAPTER] = name, folder
        return name

    def _choose(self, asked: str | Path) -> tuple[str | None, Path | None]:
        """(name, folder) by `choose_adapter`; both None for the base's own streams."""
        with self._lock:
            self._require_open()
            if asked == AUTO_ADAPTER and self._own_streams is not None:
                return None, None
            if isinstance(asked, str) and asked in self._chosen:
                return self._chosen[asked]
            alone = self._models[None]
        # The lock is free meanwhile, as a download takes long.
        return choose_adapter(asked, alone, self._fetch)

    def _require_open(self) -> None:
        require(
            not self.is_closed,
            "the engine is closed",
            expected="an open one",
            do="make a new `ssmlx.Engine`",
        )

    def close(self) -> bool:
        """Release all models; returns whether it was open."""
        with self._lock:
            was_open = not self.is_closed
            self._models = {}
            self._own_streams = None
            return was_open
