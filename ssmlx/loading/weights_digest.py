"""What tells a model's stored weights from others, wherever they lie."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from ..json_files import parse_json, read_json
from .files import write_whole
from .folders import cache_dir

PIECE_BYTES = 1024
MOST_PIECES = 8
MOST_READS = 16_384
"""Of a tensor, and of a model with very many tensors in all."""
_MOST_HEADER = 2**28
_REMEMBERED_FILE = "weights.json"
_MOST_REMEMBERED = 256


@dataclass(frozen=True)
class _StoredTensor:
    """Where the bytes of a tensor lie: from `begin` to below `end` of the file `path`."""

    name: str
    kind: str  # its type and shape, as the header says them
    path: Path
    begin: int
    end: int


def sampled_weights_digest(folder: Path) -> str:
    """A digest of the weights that are stored in a model's folder, and of nothing beside them.

    It is of the names, types and shapes of all tensors, and of up to `MOST_PIECES` pieces of
    `PIECE_BYTES` of each one's bytes: the first, the last, and those evenly between. So a copy of
    the folder has the same, whatever its configuration says and in whatever type it is loaded, and
    a model of 40 GB takes a second or two, once: the digests of the last 256 folders are remembered
    in the cache folder, by their files' names, sizes and times. A fine-tuned model has another, for
    training changes all of a matrix.

    What it does not see: which file a tensor is in; and a change that misses every piece, such as
    that of a few rows of a large embedding.

    Args:
        folder: with `model*.safetensors`, as mlx-lm reads them.

    Returns:
        32 hexadecimal digits.

    Raises:
        InputError: there are no weights, or a file of them is broken.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(
            f"{folder} has no weights",
            expected="model*.safetensors",
            do="check the path, or download the model again",
        )
    stamp = [_file_stamp(file) for file in files]
    place = str(folder.resolve())
    remembered = _read_known_digests()
    known = remembered.get(place)
    if isinstance(known, dict) and known.get("files") == stamp:
        return str(known.get("digest"))
    digest = _digest_sampled_tensors(files)
    remembered.pop(place, None)
    kept = [*remembered.items()][-_MOST_REMEMBERED + 1 :]
    content = {**dict(kept), place: {"files": stamp, "digest": digest}}
    with suppress(OSError):  # then it is made again
        cache_dir().mkdir(parents=True, exist_ok=True)
        write_whole(cache_dir() / _REMEMBERED_FILE, json.dumps(content).encode())
    return digest


def stored_names(path: Path) -> list[str]:
    """Return the names of a safetensors file's tensors, from its header alone.

    Raises:
        InputError: the header cannot be read.
    """
    return [tensor.name for tensor in _read_header(path)]


def _file_stamp(file: Path) -> list[Any]:
    """Return a file's name, size in bytes, and times of its last change of content and of state, in
    nanoseconds.
    """
    stat = file.stat()
    return [file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_known_digests() -> dict[str, Any]:
    """Read the digests that were made before: {"files", "digest"} by folder, the newest last.

    Empty where the file is missing or no JSON object.
    """
    path = cache_dir() / _REMEMBERED_FILE
    with suppress(InputError):
        if path.exists():
            return read_json(path, "digests of weights")
    return {}


def _digest_sampled_tensors(files: list[Path]) -> str:
    """Compute the 32 hexadecimal digits of `sampled_weights_digest` from safetensors files.

    Raises:
        InputError: a file has no header that can be read.
    """
    tensors = [tensor for file in files for tensor in _read_header(file)]
    tensors.sort(key=lambda one: one.name)
    pieces = max(1, min(MOST_PIECES, MOST_READS // max(1, len(tensors))))
    digest = hashlib.sha256()
    opened = {file: file.open("rb", buffering=0) for file in files}
    try:
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.kind}\n".encode())
            for piece in _read_spread_pieces(tensor, opened[tensor.path], pieces):
                digest.update(piece)
    finally:
        for file in opened.values():
            file.close()
    return digest.hexdigest()[:32]


def _read_header(path: Path) -> Iterator[_StoredTensor]:
    """Yield where each tensor of a safetensors file lies, from the file's header, in its order.

    Raises:
        InputError: the header cannot be read, or is larger than `_MOST_HEADER` bytes.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_HEADER:
                raise ValueError
            header = parse_json(file.read(size))
        for name, one in header.items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                kind = f"{one['dtype']} {one['shape']}"
                yield _StoredTensor(name, kind, path, 8 + size + int(begin), 8 + size + int(end))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} has no header that can be read",
            expected="a whole safetensors file",
            do="download the model again",
        ) from error


def _read_spread_pieces(tensor: _StoredTensor, file: BinaryIO, num_pieces: int) -> Iterator[bytes]:
    """Yield `num_pieces` pieces of `PIECE_BYTES` of a tensor's bytes, evenly from the first to the
    last; of a tensor that is no larger than these together, all bytes as one piece.
    """
    size = tensor.end - tensor.begin
    if size <= num_pieces * PIECE_BYTES:
        yield os.pread(file.fileno(), size, tensor.begin)
        return
    room = size - PIECE_BYTES
    for number in range(num_pieces):
        first = room * number // max(1, num_pieces - 1)
        yield os.pread(file.fileno(), PIECE_BYTES, tensor.begin + first)
