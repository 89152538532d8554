"""The weights file of a package, in the storage format of Apple's MILBlob (version 2).

    64 bytes   header: count of blobs (uint32), version (uint32), unused
    then       of each blob 64 bytes that describe it, then its data, both on 64-byte boundaries

The description: 0xDEADBEEF (uint32), element type (uint32), size in bytes, offset of the data and
unused bits of the last byte (uint64 each). The program refers to a blob by the place of its
description. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import numpy as np

from ssmlx.errors import InputError

from .values import TensorType, unpack

_HEADER, _DESCRIPTION = struct.Struct("<II"), struct.Struct("<IIQQQ")
_VERSION, _SENTINEL = 2, 0xDEADBEEF
# MIL's names by the numbers of MILBlob's BlobDataType.
_NAMES = {
    1: "fp16", 2: "fp32", 3: "uint8", 4: "int8", 6: "int16", 7: "uint16", 8: "int4", 9: "uint1",
    10: "uint2", 11: "uint4", 12: "uint3", 13: "uint6", 14: "int32", 15: "uint32",
}  # fmt: skip


class BlobFile:
    """A weights file, mapped into memory and not read before it is asked for.

    Args:
        path: of the file.

    Raises:
        InputError: it is missing, or no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(
                f"{path} does not exist",
                expected="the weights that the program refers to",
                do="copy the whole package again",
            )
        self._size = path.stat().st_size
        self._data = np.memmap(path, np.uint8, "r") if self._size else np.empty(0, np.uint8)
        version = _HEADER.unpack(self._take(0, _HEADER.size, "the header").tobytes())[1]
        if version != _VERSION:
            raise InputError(
                f"{path} is of version {version}",
                expected=f"a weights file of version {_VERSION}",
                do="export the model for iOS 18 or macOS 15",
            )

    def check(self, offset: int, kind: TensorType) -> None:
        """That a whole blob of `kind` is described at `offset`.

        Raises:
            InputError: there is none, or the file ends before it does.
        """
        self._stored(offset, kind)

    def read(self, offset: int, kind: TensorType) -> np.ndarray:
        """The array of `kind` that is described at `offset`; a view where nothing is packed.

        Raises:
            InputError: as `check`.
        """
        count = prod(kind.shape)
        return unpack(self._stored(offset, kind), kind.dtype, count).reshape(kind.shape)

    def _stored(self, offset: int, kind: TensorType) -> np.ndarray:
        what = f"the blob at {offset}"
        description = self._take(offset, _DESCRIPTION.size, what).tobytes()
        sentinel, code, size, start, _ = _DESCRIPTION.unpack(description)
        needed = -(-prod(kind.shape) * kind.dtype.bits // 8)
        if sentinel != _SENTINEL or _NAMES.get(code) != kind.dtype.name or size != needed:
            raise InputError(
                f"{self.path} has no {kind} at {offset}",
                expected="the weights that the program refers to",
                do="use the weights and the program of one package, or export it again",
            )
        return self._take(start, size, what)

    def _take(self, start: int, size: int, what: str) -> np.ndarray:
        if start + size > self._size:
            raise InputError(
                f"{self.path} has {self._size} bytes",
                expected=f"at least {start + size}, for {what}",
                do="copy it again, it may be truncated",
            )
        return self._data[start : start + size]
