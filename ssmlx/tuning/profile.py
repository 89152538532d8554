"""What `python -m ssmlx.calibrate` found to be fastest here, kept on disk and used by default.

A profile belongs to a machine, a backend, a model in a dtype and an adapter, each told by what
is loaded and not by a name: it is found again wherever the same is loaded from, and never used
for anything else. One that is of another MLX, or broken, is ignored with one line.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from .. import has_fast_blas
from ..errors import InputError, unwritable
from ..json_files import from_json, read_json, to_json
from ..loading.adapter import BaseIdentity, stream_tensors
from ..loading.files import make_folder, write_whole
from ..loading.names import NO_ROOM, cache_dir
from ..model.streams import StreamFusedModel
from .cost import MeasuredShape, StepCosts

FORMAT = "ssmlx-profile/2"
MLX_VERSION = version("mlx")
logger = logging.getLogger("ssmlx")
_FOLDER = "profiles"
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
SLACK = 0.01
"""Shapes whose speeds are this close are equal: the figures are no surer."""


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    machine: str  # the chip, and on the CPU how many cores of it
    backend: str  # what computes
    model: str  # digest of what identifies the base model, and of how its weights are packed
    dtype: str  # of its activations
    adapter: str  # digest of the streams and their settings

    @classmethod
    def of(cls, model: StreamFusedModel) -> Self:
        backbone, (machine, backend) = model.backbone, this_machine()
        # Not LoRA's own modules: an adapter about to be swapped in is looked up before them.
        packed = Counter(
            f"{type(module).__name__} {module.bits} {module.group_size}"
            for module in backbone.model.modules()
            if hasattr(module, "bits")
        )
        return cls(
            machine=machine,
            backend=backend,
            model=digest_of([asdict(BaseIdentity.of(backbone)), packed]),
            dtype=str(backbone.dtype).removeprefix("mlx.core."),
            adapter=_adapter_digest(model),
        )

    def path(self, folder: str | Path | None = None, kind: str = "") -> Path:
        """Where its profile lies, or what else there is of some `kind`; by default in our cache."""
        own = Path(folder or cache_dir()).expanduser() / (kind or _FOLDER)
        return own / f"{digest_of(asdict(self))}.json"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured with a model on a machine, and what is best there."""

    key: ProfileKey = field(metadata={"json": "place"})  # what it is of
    made: str  # the day, as 2026-08-02
    mlx: str  # the version that was measured
    context: int  # committed tokens that the answers had, half-way through
    # the fastest to draft behind so many; then those that are faster behind others
    shapes: tuple[MeasuredShape, ...] = field(metadata={"json": "ways"})
    costs: StepCosts  # what steps cost here

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ValueError("it says nothing to draft")

    def best(self, context: float | None = None) -> MeasuredShape:
        """The fastest to draft behind `context` tokens; behind its own unless told."""
        first = self.shapes[0]
        if context is None:
            return first
        fastest = max(self.shapes, key=lambda one: self._speedup(one, context))
        better = self._speedup(fastest, context) > (1 + SLACK) * self._speedup(first, context)
        return fastest if better else first

    def speedup(self, context: float | None = None) -> float:
        """Expected tokens/s over plain decoding's, behind `context` tokens or its own."""
        return self._speedup(self.best(context), self.context if context is None else context)

    def drafting_pays(self, context: float | None = None) -> bool:
        """Whether it is faster, behind the contexts that were measured and behind this one."""
        return min(self.speedup(), self.speedup(context)) > 1.0

    def _speedup(self, measured: MeasuredShape, context: float) -> float:
        return measured.tokens_per_call / self.costs.breakeven(measured.shape, context)


@lru_cache(maxsize=1)
def this_machine() -> tuple[str, str]:
    name = str(mx.device_info().get("device_name", "unknown chip"))
    if mx.default_device() == mx.gpu:
        return name, "gpu"
    # Those that MLX's CPU backend may use: all that there are, or as the environment says.
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    limits = [os.environ.get(name, "") for name in _THREADS]
    cores = min([cores, *(int(limit) for limit in limits if limit.isdigit() and int(limit))])
    counted = f"{cores} core{'s' if cores > 1 else ''}"
    return f"{name}, {counted}", f"cpu, {'fast' if has_fast_blas else 'reference'} BLAS"


def digest_of(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _adapter_digest(model: StreamFusedModel) -> str:
    assert model.config is not None and model.streams is not None
    settings = replace(model.config, tokens_per_call=None).to_dict()
    if model.draft_head is not None and model.backbone.draft_bits is not None:
        settings["draft_bits"] = model.backbone.draft_bits  # another cost, and other guesses
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(stream_tensors(model.streams).items()):
        digest.update(name.encode() + np.array(tensor.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]


def store_profile(profile: Profile) -> Path:
    """Write a profile where it will be found, whole or not at all; the path."""
    path = profile.key.path()
    text = json.dumps({"format": FORMAT, **to_json(profile)}, indent=1)
    make_folder(path.parent)
    try:
        write_whole(path, f"{text}\n".encode())
    except OSError as error:
        raise unwritable(path, error, NO_ROOM) from error
    _KNOWN.clear()
    return path


_KNOWN: WeakKeyDictionary[StreamFusedModel, Profile | None] = WeakKeyDictionary()


def profile_of(model: StreamFusedModel) -> Profile | None:
    """The profile of a model with streams on this machine; None where there is none to be used.

    It is looked up once for a loaded model: a chat goes on as it began.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _read(ProfileKey.of(model), model)
    return _KNOWN[model]


def _read(key: ProfileKey, model: StreamFusedModel) -> Profile | None:
    path = key.path(model.backbone.cache_dir)
    if not path.is_file():
        return None
    try:
        return _checked(read_json(path, "a profile"), key, model)
    except (TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        reason = error.found if isinstance(error, InputError) else str(error)
        again = "python -m ssmlx.calibrate makes a new one"
        logger.warning("%s is ignored (%s); %s", path, reason, again)
        return None


def _checked(values: dict[str, Any], key: ProfileKey, model: StreamFusedModel) -> Profile:
    """Raises ValueError where the profile of a file is not for `model` here and now."""
    found = values.get("format")
    if found != FORMAT:
        raise ValueError(f"its format is {found!r}, this is {FORMAT!r}")
    profile: Profile = from_json(Profile, values)
    if profile.key != key:
        raise ValueError("it is of another machine, model or adapter")
    if profile.mlx != MLX_VERSION:
        raise ValueError(f"it was measured with mlx {profile.mlx}, this is {MLX_VERSION}")
    can_prune = model.streams is not None and model.streams.prune is not None
    for one in profile.shapes:
        streams = one.shape.num_streams
        pruned = one.shape.is_pruned
        if not 1 <= streams <= model.num_streams or (pruned and not can_prune):
            raise ValueError("the adapter cannot draft what it says")
        if not (one.tokens_per_call > 0 and profile.speedup() > 0 and one.shape.num_nodes > 0):
            raise ValueError("its figures are out of range")
    return profile
