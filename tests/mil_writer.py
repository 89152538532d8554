"""Core ML packages written byte by byte, by the published field numbers, for tests of reading."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, content: int | str | bytes) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def entry(number: int, key: str, value: bytes) -> bytes:
    """An entry of a map."""
    return field(number, field(1, key) + field(2, value))


CODES = {
    "bool": 1, "string": 2, "float16": 10, "float32": 11, "int8": 21, "int32": 23, "uint16": 32,
    "int4": 25, "uint4": 35, "uint2": 36, "uint1": 37, "uint6": 38, "uint3": 39,
}  # fmt: skip
BLOB_CODES = {
    "float16": 1, "float32": 2, "int8": 4, "int32": 14, "int4": 8, "uint1": 9, "uint2": 10,
    "uint4": 11, "uint3": 12, "uint6": 13,
}  # fmt: skip


def value_type(dtype: str, shape: tuple[int, ...], *, state: bool = False) -> bytes:
    sizes = b"".join(field(3, field(1, field(1, size))) for size in shape)
    tensor = field(1, field(1, CODES[dtype]) + field(2, len(shape)) + sizes)
    return field(5, field(1, tensor)) if state else tensor


def named(name: str, dtype: str, *shape: int, state: bool = False) -> bytes:
    return field(1, name) + field(2, value_type(dtype, shape, state=state))


def operation(kind: str, inputs: dict[str, str | list[str]], *outputs: bytes) -> bytes:
    """An operation that takes values by name and gives `outputs`, made by `named`."""
    body = field(1, kind)
    for parameter, names in inputs.items():
        names = [names] if isinstance(names, str) else names
        bindings = b"".join(field(1, field(1, name)) for name in names)
        body += entry(2, parameter, bindings)
    return body + b"".join(field(3, output) for output in outputs)


def const(name: str, content: np.ndarray | str | int) -> bytes:
    """A constant that stands in the program."""
    if isinstance(content, str):
        dtype, shape, held = "string", (), field(4, field(1, content))
    else:
        array = np.asarray(content)
        array = array.astype(np.int32) if array.dtype == np.int64 else array
        dtype, shape = str(array.dtype), array.shape
        packed = b"".join(map(varint, array.ravel().tolist())) if array.dtype.kind in "ib" else b""
        held = {
            "float32": lambda: field(1, field(1, array.tobytes())),
            "float16": lambda: field(7, field(1, array.tobytes())),
            "int32": lambda: field(2, field(1, packed)),
            "bool": lambda: field(3, field(1, packed)),
        }[dtype]()
    value = field(2, value_type(dtype, shape)) + field(3, field(1, held))
    return field(1, "const") + field(3, named(name, dtype, *shape)) + entry(5, "val", value)


def blob_const(name: str, dtype: str, shape: tuple[int, ...], offset: int) -> bytes:
    """A constant in the weights file."""
    where = field(5, field(1, "@model_path/weights/weight.bin") + field(2, offset))
    value = field(2, value_type(dtype, shape)) + where
    return field(1, "const") + field(3, named(name, dtype, *shape)) + entry(5, "val", value)


def function(inputs: list[bytes], operations: list[bytes], outputs: list[str]) -> bytes:
    block = b"".join(field(2, name) for name in outputs)
    block += b"".join(field(3, item) for item in operations)
    head = b"".join(field(1, item) for item in inputs) + field(2, "CoreML8")
    return head + entry(3, "CoreML8", block)


def blob_file(*blobs: tuple[str, bytes]) -> tuple[bytes, list[int]]:
    """A weights file of (dtype, stored bytes), and where each is described."""
    data, offsets = struct.pack("<II", len(blobs), 2).ljust(64, b"\0"), []
    for dtype, stored in blobs:
        offsets.append(len(data))
        start = len(data) + 64
        head = struct.pack("<IIQQQ", 0xDEADBEEF, BLOB_CODES[dtype], len(stored), start, 0)
        data += head.ljust(64, b"\0") + stored.ljust(-(-len(stored) // 64) * 64, b"\0")
    return data, offsets


def write_package(
    folder: Path, functions: dict[str, bytes], weights: bytes = b"", **metadata: str
) -> Path:
    """A package of functions that `function` made."""
    home = folder / "Data" / "com.apple.CoreML"
    (home / "weights").mkdir(parents=True)
    program = field(1, 1) + b"".join(entry(2, name, body) for name, body in functions.items())
    texts = b"".join(entry(100, key, text.encode()) for key, text in metadata.items())
    model = field(1, 9) + field(2, field(100, texts)) + field(502, program)
    (home / "model.mlmodel").write_bytes(model)
    if weights:
        (home / "weights" / "weight.bin").write_bytes(weights)
    items = {"root": {"path": "com.apple.CoreML/model.mlmodel"}}
    manifest = {"itemInfoEntries": items, "rootModelIdentifier": "root"}
    (folder / "Manifest.json").write_text(json.dumps(manifest))
    return folder
