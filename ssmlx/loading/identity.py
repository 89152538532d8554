"""Which models are the same, by three relations.

* The same stored bytes, all of them: `stored_weights_digest`, which finds adapters made here, and
  `folder_digest`, settings included, by which interrupted work is resumed.
* The same base in any precision: `BaseIdentity`, which streams and heads draft for.
* The same keys and values of the same tokens: `CacheKey`, under which prompts are cached.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import __version__
from ..bars import bar
from ..blas import blas_name
from ..errors import InputError, require
from ..json_files import read_json
from ..mlx_thread import run_on_mlx_thread
from ..model.backbone import Backbone, FileStamp
from ..model.shapes import to_list
from .files import write_whole
from .folders import cache_dir
from .stored_tensors import StoredTensor, read_header

if TYPE_CHECKING:
    from ..model.streams import StreamFusedModel

NORM_PROBE_LENGTH = 32
_PROBE_TOLERANCE = 0.02  # of a norm weight, for precision; relative if the weight is above 1
_WEIGHTS = "model*.safetensors"  # as mlx-lm reads them
_SETTINGS = ("config.json", "hf_quant_config.json")  # all that it reads of a model's settings
# Seconds of the kernel's clock: two changes of a file within one tick may have the same time.
_CLOCK_TICK = 0.02
_COARSE_TICK = 2.05  # the same if times of files are whole seconds, or even ones (FAT)
_MOST_WAITS = 3  # for a file that is being written
_PIECE_BYTES = 2**22
_MOST_THREADS = 4
_REMEMBERED_FILE = "weights.json"
_MOST_REMEMBERED = 256

_One = TypeVar("_One")


# --- the same stored bytes ---


def stamp_model_files(folder: Path) -> tuple[FileStamp, ...]:
    """The stamps of the files that decide what a folder's model computes: weights and settings.

    Files with the same stamps have the same bytes, except on file systems without a time of state
    changes (see below).
    """

    # No program can set the time of a file's last change of state (ctime). exFAT and FAT keep no
    # such time: there a program that changes a file and sets the time of its content back, as some
    # that copy do, leaves the stamp as it was.
    def stamps() -> tuple[FileStamp, ...]:
        found = []
        for path in sorted({path for one in (_WEIGHTS, *_SETTINGS) for path in folder.glob(one)}):
            with suppress(OSError):
                stat = path.stat()
                times = stat.st_mtime_ns, stat.st_ctime_ns
                found.append(FileStamp(path.name, stat.st_ino, stat.st_size, *times))
        return tuple(found)

    found = stamps()
    for _ in range(_MOST_WAITS):
        times = [one.changed_ns for one in found]
        is_coarse = all(one % 10**9 == 0 for one in times)
        tick = _COARSE_TICK if is_coarse else _CLOCK_TICK
        if time.time() - max(times, default=0) / 1e9 >= tick:
            break
        time.sleep(tick)
        before, found = found, stamps()
        if found == before:  # a change from now on has another time
            break
    return found


def require_unchanged(
    folder: Path,
    files: tuple[FileStamp, ...] | None,  # None: they were changed while it was loaded
) -> None:
    """Refuse a folder whose files are not those that the model was loaded from."""
    require(
        stamp_model_files(folder) == files,
        f"{folder} was changed after the model was loaded from it",
        expected="the same files, as they are read again",
        do="load the model again",
    )


def stored_weights_digest(folder: Path) -> str:
    """`stored_shapes_digest`, a dash, and 64 hexadecimal digits of all bytes of a folder's weights.

    A copy of the folder has the same digest, whatever its configuration says and however it is
    split into files. Reading all bytes takes time, so digests are remembered by the stamps of the
    files; docs/decisions.md says how long it takes.
    """
    stamps = _stamp_weights(folder)
    known = _read_remembered().get(str(folder.resolve()))
    if isinstance(known, dict) and known.get("files") == [[*one] for one in stamps]:
        return str(known["sha256"])
    tensors = _stored_tensors(folder)
    named = [(f"{one.name} {one.kind}", one) for one in tensors]
    digest = f"{_shapes_digest(tensors)}-{_digest_each(named, _sha256_of_stored)}"
    found = f"{folder} was changed while it was read"
    is_same = _stamp_weights(folder) == stamps
    require(is_same, found, expected="weights that do not change meanwhile", do="try again")
    _remember(folder, {"files": stamps, "sha256": digest})
    return digest


def stored_shapes_digest(folder: Path) -> str:
    """16 hexadecimal digits of the names, types and shapes of a folder's weights; none is read."""
    return _shapes_digest(_stored_tensors(folder))


def folder_digest(folder: Path | None) -> str:
    """SHA-256 over all bytes of `*.safetensors` and `*config.json`; for None, that of no bytes."""
    digest = hashlib.sha256()
    if folder is not None:
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*config.json"))):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def digest_arrays(named: Iterable[tuple[str, mx.array]]) -> str:
    """64 hexadecimal digits: the digest of names, types, shapes and all bytes; on the MLX
    thread."""
    rows: list[tuple[str, Any]] = [
        (f"{name} {one.dtype} {one.shape}", mx.contiguous(one)) for name, one in named
    ]
    mx.eval([one for _, one in rows])
    return _digest_each([(name, memoryview(one)) for name, one in rows], _sha256)


def _stamp_weights(folder: Path) -> list[FileStamp]:
    return [one for one in stamp_model_files(folder) if one.name not in _SETTINGS]


def _read_remembered() -> dict[str, Any]:
    """The remembered digests, {"files", "sha256"} by folder, the newest last."""
    path = cache_dir() / _REMEMBERED_FILE
    with suppress(InputError):
        if path.exists():
            return read_json(path, "digests of weights")
    return {}


def _remember(folder: Path, digest: Mapping[str, Any]) -> None:
    place = str(folder.resolve())
    others = [pair for pair in _read_remembered().items() if pair[0] != place]
    content = {**dict(others[-_MOST_REMEMBERED + 1 :]), place: digest}
    with suppress(OSError):  # what is not remembered is computed again
        cache_dir().mkdir(parents=True, exist_ok=True)
        write_whole(cache_dir() / _REMEMBERED_FILE, json.dumps(content).encode())


def _stored_tensors(folder: Path) -> list[StoredTensor]:
    files = sorted(folder.glob(_WEIGHTS))
    if not files:
        raise InputError(
            f"{folder} has no weights",
            expected=_WEIGHTS,
            do="check the path, or download the model again",
        )
    return [tensor for file in files for tensor in read_header(file)]


def _shapes_digest(tensors: Iterable[StoredTensor]) -> str:
    return _digest_json(sorted([one.name, one.kind] for one in tensors))[:16]


def _digest_each(named: Sequence[tuple[str, _One]], digest_one: Callable[[_One], str]) -> str:
    """Digest things in threads, then all names and digests together, sorted by name."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(digest_one, (one for _, one in named))
        digests = list(bar(found, "reading all weights, once", total=len(named)))
    names = (name for name, _ in named)
    pairs = sorted(zip(names, digests, strict=True), key=lambda pair: pair[0])
    return _digest_json(pairs)


def _sha256_of_stored(tensor: StoredTensor) -> str:
    digest = hashlib.sha256()
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left > 0:
            piece = file.read(min(left, _PIECE_BYTES))
            found = f"{tensor.path} ends within {tensor.name}"
            expected = "a whole safetensors file"
            require(bool(piece), found, expected=expected, do="download the model again")
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_json(values: Any) -> str:
    return _sha256(json.dumps(values, sort_keys=True, default=str).encode())


# --- the same base, in whatever precision ---


@dataclass(frozen=True)
class BaseIdentity:
    """What distinguishes one base model from another, in whatever precision it is stored.

    It only decides what may draft, so no token depends on it.
    """

    model_type: str  # mlx-lm's name of the architecture; "" if it has none
    num_layers: int
    hidden_size: int
    vocab_size: int
    # the first weights of the final norm, which is never quantised, to 6 digits after the point
    norm_probe: tuple[float, ...]

    @classmethod
    def of(cls, backbone: Backbone) -> BaseIdentity:
        """The identity of a loaded base; waits for the device."""
        probe = backbone.final_norm_weight[:NORM_PROBE_LENGTH].astype(mx.float32)
        return cls(
            str(getattr(backbone.model, "model_type", "")),
            len(backbone.layers),
            backbone.hidden_size,
            backbone.vocab_size,
            tuple(round(value, 6) for value in to_list(probe)),
        )

    @classmethod
    def from_settings(
        cls,
        path: Path,  # for messages
        values: Mapping[str, Any],
    ) -> BaseIdentity:
        """The identity of the base model that a settings file describes in its entry `base`."""
        base: Any = values.get("base")
        sizes = ("num_layers", "hidden_size", "vocab_size")
        try:
            probe = tuple(map(float, base["norm_probe"]))
            if not all(map(math.isfinite, probe)) or any(
                type(base[one]) is not int for one in sizes
            ):
                raise ValueError
            return cls(**{**base, "norm_probe": probe})
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise InputError(
                f"{path} does not say which base model it is for",
                expected="an entry `base`",
                do="convert it again",
            ) from error

    def require_same(
        self,
        other: BaseIdentity,  # the model in use
        found: str,  # begins the message: subject and verb, such as "the heads belong"
        *,
        expected: str,
        do: str,
    ) -> None:
        difference = self.find_difference(other)
        found += f" to another base model: this one has {difference}"
        require(difference is None, found, expected=expected, do=do)

    def find_difference(self, other: BaseIdentity) -> str | None:
        """The first difference in words; None if they are the same model in some precision."""
        for name in ("model_type", "num_layers", "hidden_size", "vocab_size"):
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        pairs = zip_longest(self.norm_probe, other.norm_probe, fillvalue=math.nan)
        if not all(abs(a - b) <= _PROBE_TOLERANCE * max(1.0, abs(a)) for a, b in pairs):
            return "other weights (its final norm differs)"
        return None


# --- the same keys and values ---


@dataclass(frozen=True)
class CacheKey:
    """What decides the keys and values of a token sequence beside its tokens.

    Models with equal keys may continue each other's caches. Streams, and LoRA on stream rows alone,
    leave a prompt's rows as they are and do not count. Code that changes a model's arrays or
    settings makes a new `Backbone` of it.
    """

    model: str  # model type, number of layers and width, in words
    dtype: str  # of the activations, such as "float32"
    weights: str  # digest of the base's weights and settings, and of how they were loaded
    lora: str  # digest of the LoRA on every row, or "none"; merged LoRA differs by rounding alone
    # versions of ssmlx, mlx-lm and MLX; the GPU's name, or the CPU's kind and its BLAS
    computed_by: str

    @classmethod
    def of(cls, model: StreamFusedModel) -> CacheKey:
        """The key within this process, for which no weights are read."""
        return cls._with_weights(model, _weights_in_process(model.backbone))

    @classmethod
    def in_files(cls, model: StreamFusedModel) -> CacheKey:
        """The key in every process, for which all weights are read once; any thread may call it."""
        return cls._with_weights(model, _weights_in_files(model.backbone))

    @classmethod
    def _with_weights(cls, model: StreamFusedModel, weights: str) -> CacheKey:
        backbone = model.backbone
        kind = getattr(backbone.model, "model_type", type(backbone.model).__name__)
        return cls(
            model=f"{kind}, {model.num_layers} layers of {backbone.hidden_size}",
            dtype=str(backbone.dtype).removeprefix("mlx.core."),
            weights=weights,
            lora=model.lora_digest or "none",
            computed_by=f"{_versions()}, {_device()}",
        )


@cache
def _versions() -> str:
    return f"ssmlx {__version__}, mlx-lm {version('mlx-lm')}, MLX {version('mlx')}"


def _device() -> str:
    """What computes, such as "Metal on Apple M4" or "CPU x86_64, OpenBLAS 0.3.33 (SkylakeX)"."""
    # Each rounds in its own way, so a prompt processed by one may get another answer from the next.
    if mx.default_device() == mx.gpu:
        backend = "Metal" if mx.metal.is_available() else "CUDA"
        return f"{backend} on {mx.device_info(mx.gpu).get('device_name', 'an unknown GPU')}"
    return f"CPU {platform.machine()}, {blas_name()}"


def _weights_in_process(backbone: Backbone) -> str:
    # A model in memory has no files: it gets a number of its own, which stays with its weights.
    own = backbone.kept_with_weights.setdefault("number", secrets.token_hex(16))
    return _digest_json([backbone.origin.files or own, *_how_loaded(backbone)])


def _weights_in_files(backbone: Backbone) -> str:
    """Digest of all bytes, and of how they were loaded; computed once for all models on the same
    weights."""
    kept = backbone.kept_with_weights
    if "digest" not in kept:
        if backbone.origin.folder is None:
            kept["digest"] = run_on_mlx_thread(lambda: _digest_in_memory(backbone))
        else:
            kept["digest"] = _digest_as_loaded(backbone.origin.folder, backbone.origin.files)
    return _digest_json([kept["digest"], *_how_loaded(backbone)])


def _how_loaded(backbone: Backbone) -> list[Any]:
    """JSON values that decide what a base computes with its stored weights."""
    group = backbone.group
    part = None if group is None else [group.rank(), group.size()]
    return [backbone.origin.dtype, part, getattr(backbone.args, "__dict__", {})]


def _digest_as_loaded(folder: Path, files: tuple[FileStamp, ...] | None) -> str:
    """Digest of a folder's weights and settings; InputError if it has changed since the model was
    loaded."""
    require_unchanged(folder, files)
    paths = [folder / name for name in _SETTINGS]
    settings = {one.name: _sha256(one.read_bytes()) for one in paths if one.exists()}
    digest = _digest_json([stored_weights_digest(folder), settings])
    require_unchanged(folder, files)
    return digest


def _digest_in_memory(backbone: Backbone) -> str:
    """Digest of all arrays and plain settings of a base's modules; on the MLX thread."""
    model = backbone.without_adapter().model
    leaves: Any = tree_flatten(model)  # including those in lists, tuples and dicts
    others = [
        (f"{path}.{name}", one)
        for path, module in model.named_modules()
        for name, one in (("is", type(module).__name__), *vars(module).items())
    ]
    arrays = [(name, one) for name, one in leaves if isinstance(one, mx.array)]
    settings = [(name, one) for name, one in (*leaves, *others) if _is_plain(one)]
    return _digest_json([sorted(settings, key=lambda one: one[0]), digest_arrays(arrays)])


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
