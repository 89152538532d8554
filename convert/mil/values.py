"""Types of MIL values, and the constants that stand in the program itself."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ssmlx.errors import InputError

# What an operation takes and gives: arrays, and strings as settings.
Value = np.ndarray | str


@dataclass(frozen=True)
class Dtype:
    """An element type of MIL.

    Attributes:
        name: MIL's.
        numpy: what carries it; a whole byte for types of fewer than eight bits.
        bits: of one element where it is stored.
    """

    name: str
    numpy: np.dtype
    bits: int

    @property
    def is_float(self) -> bool:
        return self.numpy.kind == "f"

    @property
    def is_packed(self) -> bool:
        """Several elements share a byte in storage."""
        return self.bits < 8


def _dtype(name: str, carrier: str, bits: int | None = None) -> Dtype:
    numpy = np.dtype(carrier)
    return Dtype(name, numpy, numpy.itemsize * 8 if bits is None else bits)


# By the numbers of MIL.proto's DataType.
DTYPES = {
    1: _dtype("bool", "bool"),
    2: _dtype("string", "object"),
    10: _dtype("fp16", "float16"),
    11: _dtype("fp32", "float32"),
    12: _dtype("fp64", "float64"),
    21: _dtype("int8", "int8"),
    22: _dtype("int16", "int16"),
    23: _dtype("int32", "int32"),
    24: _dtype("int64", "int64"),
    25: _dtype("int4", "int8", 4),
    31: _dtype("uint8", "uint8"),
    32: _dtype("uint16", "uint16"),
    33: _dtype("uint32", "uint32"),
    34: _dtype("uint64", "uint64"),
    35: _dtype("uint4", "uint8", 4),
    36: _dtype("uint2", "uint8", 2),
    37: _dtype("uint1", "uint8", 1),
    38: _dtype("uint6", "uint8", 6),
    39: _dtype("uint3", "uint8", 3),
}


@dataclass(frozen=True)
class TensorType:
    """What an input, output or state is declared to be.

    Attributes:
        dtype: of the elements.
        shape: every size is known.
        is_state: it lives between calls.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    is_state: bool = False

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def read_type(message: dict[str, Any], what: str) -> TensorType:
    """A ValueType message of the value `what`.

    Raises:
        InputError: it is no tensor of fixed shape.
    """
    if "stateType" in message:
        inner = read_type(message["stateType"].get("wrappedType", {}), what)
        return TensorType(inner.dtype, inner.shape, is_state=True)
    tensor = message.get("tensorType")
    code = None if tensor is None else tensor.get("dataType", 0)
    sizes = [] if tensor is None else [d.get("constant") for d in tensor.get("dimensions", [])]
    if code not in DTYPES or None in sizes or len(sizes) != (tensor or {}).get("rank", 0):
        kinds = ", ".join(message) if tensor is None else f"element type {code}, sizes {sizes}"
        raise InputError(
            f"the value {what} is of a type that is not read ({kinds or 'none'})",
            expected="a tensor whose shape is fixed",
            do="export the model with fixed shapes",
        )
    return TensorType(
        DTYPES[code], tuple(size.get("size", 0) for size in sizes if size is not None)
    )


def read_immediate(tensor: dict[str, Any], kind: TensorType, what: str) -> Value:
    """The TensorValue message of a constant `what`: an array, or a str where it is one.

    Raises:
        InputError: it holds another number of elements than its type says.
    """
    stored: Any = next((part.get("values", []) for part in tensor.values()), [])
    if isinstance(stored, bytes):
        array = unpack(stored, kind.dtype, prod(kind.shape))
    else:
        array = np.array(stored, dtype=kind.dtype.numpy)
    if array.size != prod(kind.shape):
        raise InputError(
            f"the constant {what} has {array.size} elements",
            expected=f"{prod(kind.shape)} elements, of {kind}",
            do="export the model again, the package may be damaged",
        )
    if kind.dtype.name == "string" and not kind.shape:
        return str(array.item())
    return array.reshape(kind.shape)


def unpack(stored: bytes | np.ndarray, dtype: Dtype, count: int) -> np.ndarray:
    """`count` elements out of bytes; element i of n-bit ones fills the bits from i * n on.

    Fewer come back where the bytes do not hold so many.
    """
    if not dtype.is_packed:
        return np.frombuffer(stored, dtype.numpy.newbyteorder("<"))[:count]
    bits = np.unpackbits(np.frombuffer(stored, np.uint8), bitorder="little")
    whole = bits[: len(bits) // dtype.bits * dtype.bits].reshape(-1, dtype.bits)[:count]
    values = np.packbits(whole, axis=1, bitorder="little")[:, 0]
    if dtype.numpy.kind == "u":
        return values
    sign = np.uint8(1 << (dtype.bits - 1))
    return (values ^ sign).view(np.int8) - sign.view(np.int8)
