"""Knowledge from answers about a machine and an adapter's texts, kept on disk for later ones.

A file in the cache folder belongs to one machine and one geometry: what decides how long a call
takes, which the values of the weights do not. It holds the costs of calls, and for each adapter of
that geometry how well its texts are guessed. A file that is broken, or of another MLX, is ignored.
"""

import atexit
import hashlib
import json
import logging
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..blas import this_machine
from ..json_files import json_digest, read_json
from ..loading.adapter import stream_tensors
from ..loading.files import write_whole
from ..loading.folders import cache_dir
from ..mlx_thread import unless_forked
from ..model.streams import StreamFusedModel
from ..policy.acceptance import AcceptancePrior
from ..policy.costs import CostTable

FORMAT = "ssmlx-costs/1"
MLX_VERSION = version("mlx")
_SECONDS_BETWEEN_WRITES = 30.0
_MOST_ADAPTERS = 64
_log = logging.getLogger("ssmlx")


class Learned:
    """Knowledge about this machine, for models of one geometry, and its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.costs = CostTable()
        self._priors: dict[str, AcceptancePrior] = {}
        self._written_at = time.monotonic()
        self._is_new = False
        self._read_file()
        atexit.register(self.write)

    def prior(self, adapter: str) -> AcceptancePrior:
        """The acceptance ratios of an adapter, by its digest; new ones if it has none."""
        if adapter not in self._priors and len(self._priors) >= _MOST_ADAPTERS:
            # Forget the one that is known longest.
            del self._priors[next(iter(self._priors))]
        return self._priors.setdefault(adapter, AcceptancePrior())

    def keep(self, *, at_once: bool = False) -> None:
        """Note that something was learned; writes the file, unless that was done lately."""
        self._is_new = True
        if at_once or time.monotonic() - self._written_at > _SECONDS_BETWEEN_WRITES:
            self.write()

    @unless_forked
    def write(self) -> None:
        """Write the file, whole or not at all, if anything is new since the last time."""
        if not self._is_new:
            return
        self._written_at = time.monotonic()
        self._is_new = False
        content = {
            "format": FORMAT,
            "mlx": MLX_VERSION,
            "costs": self.costs.to_dict(),
            "acceptance": {name: prior.to_dict() for name, prior in self._priors.items()},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(content).encode())
        except OSError as error:
            # Not tried again until something new is learned.
            _log.debug("%s cannot be written: %s", self.path, error)

    def _read_file(self) -> None:
        """Take over the file's costs and ratios; all of them, or nothing."""
        if not self.path.is_file():
            return
        try:
            values = read_json(self.path, "what answers have taught")
            if (values.get("format"), values.get("mlx")) != (FORMAT, MLX_VERSION):
                return
            priors = dict(values["acceptance"])
            if len(priors) > _MOST_ADAPTERS:
                raise ValueError("it has too many adapters")
            costs = CostTable.from_dict(values["costs"])
            self._priors = {name: AcceptancePrior.from_dict(one) for name, one in priors.items()}
            self.costs = costs
        except (TypeError, ValueError, AttributeError, KeyError, OSError) as error:
            _log.debug("%s is ignored: %s", self.path, error)


_BY_PATH: dict[Path, Learned] = {}
"""One `Learned` for each file, in the whole process: two that wrote the same file would each lose
what the other learned. Tests replace it by an empty one."""
_BY_MODEL: WeakKeyDictionary[StreamFusedModel, tuple[Path, str]] = WeakKeyDictionary()
"""The file and the adapter of a model, which digests of its weights decide, as long as it lives.
Tests begin with an empty one each (`own_cache`), for the cache folder is another then."""


def learned_of(model: StreamFusedModel) -> tuple[Learned, AcceptancePrior]:
    """The knowledge for `model` on this machine, and the acceptance ratios of its adapter.

    The first call for a model computes digests of its weights, and waits for the device.
    """
    if model not in _BY_MODEL:
        folder = Path(model.backbone.origin.cache_dir or cache_dir()).expanduser() / "costs"
        _BY_MODEL[model] = folder / f"{geometry_digest(model)}.json", adapter_digest(model)
    path, adapter = _BY_MODEL[model]
    if path not in _BY_PATH:
        _BY_PATH[path] = Learned(path)
    learned = _BY_PATH[path]
    return learned, learned.prior(adapter)


def geometry_digest(model: StreamFusedModel) -> str:
    """Digest, 16 hexadecimal digits: of what decides how long calls take, not weights' values."""
    streams = [] if model.streams is None else stream_tensors(model.streams).items()
    weights = [*tree_flatten(model.backbone.model.parameters()), *streams]
    layers = [model.num_layers, model.insertion_layer, model.num_streams]
    shapes = sorted([name, list(array.shape), str(array.dtype)] for name, array in weights)
    # Without a draft head, no head is packed.
    bits = None if model.draft_head is None else model.backbone.draft_bits
    heads = [model.draft_head is not None, bits, str(model.backbone.dtype)]
    return json_digest([this_machine(), shapes, layers, heads])


def adapter_digest(model: StreamFusedModel) -> str:
    """Digest, 16 hexadecimal digits: of streams, or else of LoRA. Waits for the device."""
    if model.config is None or model.streams is None:
        return model.lora_digest or "none"
    settings = replace(model.config, tokens_per_call=None).to_dict()
    if model.draft_head is not None and model.backbone.draft_bits is not None:
        settings["draft_bits"] = model.backbone.draft_bits  # other guesses
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(stream_tensors(model.streams).items()):
        digest.update(name.encode() + np.array(tensor.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]
