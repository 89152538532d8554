"""What answers have taught of this machine: kept in the cache folder, for later ones."""

import atexit
import json
import logging
import math
import time
from pathlib import Path
from weakref import WeakKeyDictionary

from ..decoding.pace import Learned
from ..json_files import from_json, read_json, to_json
from ..loading.files import write_whole
from ..model.streams import StreamFusedModel
from .profile import MLX_VERSION, ProfileKey

FORMAT = "ssmlx-experience/1"
_FOLDER = "experience"
_EVERY = 30.0
"""Seconds between two writings of a process."""
_MOST = 64
"""Entries of a kind in a file that is believed."""
_log = logging.getLogger("ssmlx")


class Experience:
    """What was learned of a model with its adapter on this machine, and its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = time.monotonic()
        self._is_new = False
        self.learned = _read(path)
        atexit.register(self.write)

    def keep(self) -> None:
        """An answer has ended: write, but not too often. What cannot be written is lost."""
        self._is_new = True
        if time.monotonic() - self._written > _EVERY:
            self.write()

    def write(self) -> None:
        """Write what is new."""
        if not self._is_new:
            return
        self._written = time.monotonic()
        self._is_new = False
        learned = to_json(self.learned)
        values = {name: learned[name] for name in _KEPT}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": FORMAT, "mlx": MLX_VERSION, **values}
            write_whole(self.path, json.dumps(content).encode())
        except OSError as error:
            _log.debug("%s cannot be written: %s", self.path, error)


_KEPT = ("costs", "texts", "saved")
_KNOWN: WeakKeyDictionary[StreamFusedModel, Experience] = WeakKeyDictionary()
_BY_PATH: dict[Path, Experience] = {}


def experience_of(model: StreamFusedModel) -> Experience:
    """That of a model with streams on this machine; one for all that are loaded of it."""
    if model not in _KNOWN:
        path = ProfileKey.of(model).path(model.backbone.cache_dir, _FOLDER)
        if path not in _BY_PATH:
            _BY_PATH[path] = Experience(path)
        _KNOWN[model] = _BY_PATH[path]
    return _KNOWN[model]


def _read(path: Path) -> Learned:
    """What a file says, if it can be believed."""
    if path.is_file():
        try:
            values = read_json(path, "what answers have taught")
            learned: Learned = from_json(Learned, {name: values[name] for name in _KEPT})
            means = [*learned.costs.values(), *learned.texts.values()]
            numbers = [x for one in means for x in (one.value, one.weight)] + [abs(learned.saved)]
            is_ours = (values["format"], values["mlx"]) == (FORMAT, MLX_VERSION)
            if is_ours and len(means) <= _MOST and all(0 <= x < math.inf for x in numbers):
                return learned
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, OSError) as error:
            _log.debug("%s is ignored: %s", path, error)
    return Learned()
