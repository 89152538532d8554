"""Values that are known before a program runs, read and decompressed when first needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ssmlx.errors import InputError

from .arithmetic import Arithmetic
from .blobs import BlobFile
from .ops import Operation
from .values import TensorType, Value, read_immediate, read_type

_MODEL_PATH = "@model_path/"


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant and the way to it.

    Attributes:
        key: equal for equal constants, so that functions share the weights that they have in
            common.
        kind: its declared type.
        read: gives it, anew by every call.
    """

    key: Hashable
    kind: TensorType
    read: Callable[[], Value]


class Constants:
    """The constants of a package, each read once.

    Args:
        open_weights: gives the weights file of a path below the model's folder.
        arithmetic: how numbers are carried.
    """

    def __init__(self, open_weights: Callable[[str], BlobFile], arithmetic: Arithmetic) -> None:
        self._open = open_weights
        self._arithmetic = arithmetic
        self._read: dict[Hashable, Value] = {}

    def value(self, constant: Constant) -> Value:
        """The constant as operations take it."""
        if constant.key not in self._read:
            found = constant.read()
            if not isinstance(found, str):
                found = self._arithmetic.carry(found)
            self._read[constant.key] = found
        return self._read[constant.key]

    def literal(self, message: dict[str, Any], what: str) -> Constant:
        """The constant of a Value message; a blob is checked now and read later.

        Raises:
            InputError: the message, or the weights file that it refers to, is damaged.
        """
        kind = read_type(message.get("type", {}), what)
        blob = message.get("blobFileValue")
        if blob is None:
            found = read_immediate(_tensor(message, what), kind, what)
            content = found if isinstance(found, str) else found.tobytes()
            return Constant(key=(kind, content), kind=kind, read=lambda: found)
        name, offset = blob.get("fileName", ""), blob.get("offset", 0)
        file = self._open(name.removeprefix(_MODEL_PATH))
        file.check(offset, kind)
        return Constant(key=(kind, name, offset), kind=kind, read=lambda: file.read(offset, kind))

    def decompressed(
        self, operation: Operation, inputs: dict[str, Constant], kind: TensorType
    ) -> Constant:
        """What a constexpr operation makes of other constants."""
        key = (operation.name, kind, tuple((name, c.key) for name, c in sorted(inputs.items())))

        def read() -> Value:
            # The compressed form is not kept: nothing else asks for it.
            values = {name: self._once(constant) for name, constant in inputs.items()}
            return self._arithmetic.settle(operation.call(**values), kind)

        return Constant(key=key, kind=kind, read=read)

    def _once(self, constant: Constant) -> Value:
        found = constant.read()
        return found if isinstance(found, str) else self._arithmetic.carry(found)


def _tensor(message: dict[str, Any], what: str) -> dict[str, Any]:
    tensor = message.get("immediateValue", {}).get("tensor")
    if tensor is None:
        raise InputError(
            f"the constant {what} is no tensor",
            expected="numbers, flags or a string",
            do="export the model for iOS 18 or macOS 15",
        )
    return tensor
