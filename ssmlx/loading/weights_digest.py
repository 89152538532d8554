"""What tells stored weights from others, wherever they lie: a model's by samples, others whole."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from ..json_files import read_json
from .files import write_whole
from .folders import cache_dir
from .stored_tensors import StoredTensor, read_header

PIECE_BYTES = 1024
MOST_PIECES = 8
MOST_READS = 16_384
"""Of a tensor, and of a model with very many tensors in all."""
_REMEMBERED_FILE = "weights.json"
_MOST_REMEMBERED = 256


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
    tensors = [tensor for file in files for tensor in read_header(file)]
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


def _read_spread_pieces(tensor: StoredTensor, file: BinaryIO, num_pieces: int) -> Iterator[bytes]:
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
