"""What tells models from each other, by three relations.

* The same stored bytes, all of them: `stored_weights_digest`, by which an adapter that was made
  here is found.
* The same base, in whatever precision: `BaseIdentity`, for which streams and heads draft.
* The same keys and values of the same tokens: `CacheKey`, under which prompts are kept.

Reading all bytes of a large model takes time, so the digests of folders are remembered, by the
stamps of their files; what lives in one process goes by the stamps alone.
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
_PROBE_TOLERANCE = 0.02
_WEIGHTS = "model*.safetensors"  # as mlx-lm reads them
_SETTINGS = ("config.json", "hf_quant_config.json")  # all that it reads of a model's settings
_CLOCK_TICK = 0.02  # seconds, more than the kernel's clock takes from one time of files to the next
_COARSE_TICK = 2.05  # the same where times of files are whole seconds, or even ones (FAT)
_MOST_WAITS = 3  # for a file that is being written
_PIECE_BYTES = 2**22
_MOST_THREADS = 4
_REMEMBERED_FILE = "weights.json"
_MOST_REMEMBERED = 256

_One = TypeVar("_One")


# --- the same stored bytes ---


def stamp_model_files(folder: Path) -> tuple[FileStamp, ...]:
    """Stamp the files that decide what a folder's model computes: weights and settings.

    As long as the stamps are the same, so are the bytes: no program can set the time of a file's
    last change of state. exFAT and FAT keep no such time: there a program that changes a file and
    sets the time of its content back, as some that copy do, leaves the stamp as it was.

    If a file was changed a moment ago, the clock's next tick is waited for, so that the next change
    has another time: 0.02 s, or 2 s where the file system has times of whole seconds.

    Args:
        folder: the model's; files that are missing or cannot be looked at have no stamp.
    """

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


def require_unchanged(folder: Path, files: tuple[FileStamp, ...] | None) -> None:
    """Raise InputError unless a model's folder has the files that the model was loaded from.

    Args:
        folder: the model's.
        files: their stamps then; None where they were changed meanwhile.
    """
    require(
        stamp_model_files(folder) == files,
        f"{folder} was changed after the model was loaded from it",
        expected="the same files, which are read again",
        do="load the model again",
    )


def stored_weights_digest(folder: Path) -> str:
    """A digest of the weights that are stored in a model's folder, and of nothing beside them.

    It is of names, types, shapes and all bytes of all tensors, whichever files they are in. So a
    copy of the folder has the same, whatever its configuration says and in whatever type it is
    loaded, and no other weights have.

    All bytes are read, with a bar where bars are shown; docs/decisions.md says how long that takes.
    The digests of the last 256 folders are remembered in the cache folder, by their files' names,
    inodes, sizes and times.

    Args:
        folder: with `model*.safetensors`, as mlx-lm reads them.

    Returns:
        `stored_shapes_digest`, a dash, and 64 hexadecimal digits.

    Raises:
        InputError: there are no weights, a file of them is broken, or they were changed meanwhile.
        OSError: a file cannot be read.
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
    require(is_same, found, expected="weights that nothing writes to", do="try again")
    _remember(folder, {"files": stamps, "sha256": digest})
    return digest


def stored_shapes_digest(folder: Path) -> str:
    """16 hexadecimal digits of the names, types and shapes of a folder's weights, with which
    `stored_weights_digest` begins; no weights are read.

    Raises:
        InputError: there are no weights, or a file of them is broken.
        OSError: a file cannot be read.
    """
    return _shapes_digest(_stored_tensors(folder))


def weights_and_configs_digest(folder: Path | None) -> str:
    """Return the SHA-256, in hexadecimal, over names and contents of the files `*.safetensors` and
    `*config.json` in a folder.

    All bytes are read, each time. Other files and folders inside do not count. For None, and for a
    folder without such files, it is the digest of nothing.
    """
    digest = hashlib.sha256()
    if folder is not None:
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*config.json"))):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def digest_arrays(named: Iterable[tuple[str, mx.array]]) -> str:
    """64 hexadecimal digits of named arrays: of names, types, shapes and all bytes.

    Waits for the device to compute them, so it has to run on the thread that runs MLX. Arrays that
    are no rows one after the other in memory are copied.

    Args:
        named: in any order, but for arrays of one name.
    """
    rows: list[tuple[str, Any]] = [
        (f"{name} {one.dtype} {one.shape}", mx.contiguous(one)) for name, one in named
    ]
    mx.eval([one for _, one in rows])
    return _digest_each([(name, memoryview(one)) for name, one in rows], _sha256)


def _stamp_weights(folder: Path) -> list[FileStamp]:
    return [one for one in stamp_model_files(folder) if one.name not in _SETTINGS]


def _read_remembered() -> dict[str, Any]:
    """Read the digests that were made before: {"files", "sha256"} by folder, the newest last;
    nothing where the file is missing or broken.
    """
    path = cache_dir() / _REMEMBERED_FILE
    with suppress(InputError):
        if path.exists():
            return read_json(path, "digests of weights")
    return {}


def _remember(folder: Path, digest: Mapping[str, Any]) -> None:
    """Write a folder's digest as the newest; where that cannot be, it is made again."""
    place = str(folder.resolve())
    others = [pair for pair in _read_remembered().items() if pair[0] != place]
    content = {**dict(others[-_MOST_REMEMBERED + 1 :]), place: digest}
    with suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        write_whole(cache_dir() / _REMEMBERED_FILE, json.dumps(content).encode())


def _stored_tensors(folder: Path) -> list[StoredTensor]:
    """Find the tensors of a folder's weights; errors as `stored_shapes_digest`."""
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
    """Digest all things by threads, and their names and digests together, sorted by names."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(digest_one, (one for _, one in named))
        digests = list(bar(found, "reading all weights, once", total=len(named)))
    names = (name for name, _ in named)
    pairs = sorted(zip(names, digests, strict=True), key=lambda pair: pair[0])
    return _digest_json(pairs)


def _sha256_of_stored(tensor: StoredTensor) -> str:
    """The SHA-256 of a tensor's bytes; InputError where its file ends before they do."""
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
    """What tells one base model from another, in whatever precision it is stored.

    No token depends on it: what it is asked for only drafts.
    """

    model_type: str  # mlx-lm's name of the architecture; "" where it has none
    num_layers: int
    hidden_size: int
    vocab_size: int
    # the first weights of its final norm, which no quantisation touches
    norm_probe: tuple[float, ...]

    @classmethod
    def of(cls, backbone: Backbone) -> BaseIdentity:
        """The identity of a loaded model: the first `NORM_PROBE_LENGTH` weights of its final norm
        are rounded to 6 digits after the point. Waits for the device.
        """
        probe = backbone.final_norm_weight[:NORM_PROBE_LENGTH].astype(mx.float32)
        return cls(
            str(getattr(backbone.model, "model_type", "")),
            len(backbone.layers),
            backbone.hidden_size,
            backbone.vocab_size,
            tuple(round(value, 6) for value in to_list(probe)),
        )

    @classmethod
    def from_settings(cls, path: Path, values: Mapping[str, Any]) -> BaseIdentity:
        """The identity of the base model that a settings file names in its entry `base`.

        Args:
            path: of the file, for the message; it is not read.
            values: its content, whose entry `base` is a mapping with exactly this class's fields.

        Raises:
            InputError: `base` is missing or has other fields; a size is no int; or `norm_probe` is
                no list of finite numbers.
        """
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

    def require_same(self, other: BaseIdentity, found: str, *, expected: str, do: str) -> None:
        """Raise an error unless `other` is the same base model, see `find_difference`.

        Args:
            other: the identity of the model in use; this one's is what something was made for.
            found: the beginning of the message, subject and verb, such as "the heads belong".
            expected: what was expected, for the message.
            do: what the user can do, for the message.

        Raises:
            InputError: the models differ; the message names the first difference.
        """
        difference = self.find_difference(other)
        found += f" to another base model: this one has {difference}"
        require(difference is None, found, expected=expected, do=do)

    def find_difference(self, other: BaseIdentity) -> str | None:
        """Say in words what is other in the model `other`; None if they are the same model.

        The first difference of model type, number of layers, D, V and final norm. Each norm weight
        may differ by 0.02, or by 2 % where it is larger than 1, for precision; their number may
        not.
        """
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

    Models with equal keys may continue each other's caches. LoRA that acts on every row counts,
    merged into the weights or not, as that differs by rounding alone. Streams, and LoRA of the
    scope "streams", leave a prompt's rows as they are and do not count.

    A model is taken to be what it was when its backbone was made: who changes its arrays or
    settings afterwards makes a new `Backbone` of it.

    Attributes:
        model: the model type, its number of layers and its width, in words.
        dtype: of the activations, such as "float32".
        weights: digest of the base model's weights and settings, and of how they were loaded.
        lora: digest of the LoRA that acts on every row, or "none".
        computed_by: versions of this package, mlx-lm and MLX, and what computes: a GPU by its name,
            or a CPU's kind and its BLAS.
    """

    model: str
    dtype: str
    weights: str
    lora: str
    computed_by: str

    @classmethod
    def of(cls, model: StreamFusedModel) -> CacheKey:
        """The key of a model in this process, as it answers now; no weights are read for it.

        Models have the same that were loaded alike from the same files, unchanged, and that stand
        on one `Backbone`.
        """
        return cls._with_weights(model, _weights_in_process(model.backbone))

    @classmethod
    def in_files(cls, model: StreamFusedModel) -> CacheKey:
        """The key of a model in every process, as it answers now.

        All weights are read for it, once: those of the folder that the model was loaded from, see
        `stored_weights_digest`, or else those in memory. Any thread may call it.

        Raises:
            InputError: the folder was changed after the model was loaded from it, so that nothing
                tells what it was.
        """
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
    """What computes, such as "Metal on Apple M4" or "CPU x86_64, OpenBLAS 0.3.33 (SkylakeX)".

    Others round in another way, so that a prompt which one of them has processed may get another
    answer from the next.
    """
    if mx.default_device() == mx.gpu:
        backend = "Metal" if mx.metal.is_available() else "CUDA"
        return f"{backend} on {mx.device_info(mx.gpu).get('device_name', 'an unknown GPU')}"
    return f"CPU {platform.machine()}, {blas_name()}"


def _weights_in_process(backbone: Backbone) -> str:
    """Digest the stamps of the files that a model was loaded from, and how; of a model in memory, a
    number of its own that stays with its weights.
    """
    own = backbone.kept_with_weights.setdefault("number", secrets.token_hex(16))
    return _digest_json([backbone.origin.files or own, *_how_loaded(backbone)])


def _weights_in_files(backbone: Backbone) -> str:
    """Digest all bytes of a base model's weights, and how they were loaded, once for all that stand
    on them; InputError where they are no longer stored as they were loaded.
    """
    kept = backbone.kept_with_weights
    if "digest" not in kept:
        if backbone.origin.folder is None:
            kept["digest"] = run_on_mlx_thread(lambda: _digest_in_memory(backbone))
        else:
            kept["digest"] = _digest_as_loaded(backbone.origin.folder, backbone.origin.files)
    return _digest_json([kept["digest"], *_how_loaded(backbone)])


def _how_loaded(backbone: Backbone) -> list[Any]:
    """JSON values that say what a base model computes with its stored weights."""
    group = backbone.group
    part = None if group is None else [group.rank(), group.size()]
    return [backbone.origin.dtype, part, getattr(backbone.args, "__dict__", {})]


def _digest_as_loaded(folder: Path, files: tuple[FileStamp, ...] | None) -> str:
    """Digest the weights and settings of a folder, of which a model was loaded when its files had
    these stamps; InputError unless they have them before and afterwards.
    """
    require_unchanged(folder, files)
    paths = [folder / name for name in _SETTINGS]
    settings = {one.name: _sha256(one.read_bytes()) for one in paths if one.exists()}
    digest = _digest_json([stored_weights_digest(folder), settings])
    require_unchanged(folder, files)
    return digest


def _digest_in_memory(backbone: Backbone) -> str:
    """Digest all arrays and plain settings of a base model's modules. On the MLX thread."""
    model = backbone.without_adapter().model
    leaves: Any = tree_flatten(model)  # among them what its lists, tuples and dicts hold
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
