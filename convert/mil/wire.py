"""Protobuf's wire format, read without generated code.

Only what a Core ML package needs, by the field numbers of `SCHEMA`, which are those of Apple's
published `Model.proto` and `MIL.proto`. So nothing that wrote a package takes part in reading it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class WireError(ValueError):
    """Bytes that are no whole protobuf message."""


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        name: as in the .proto file.
        kind: "int" (any varint), "float", "double", "string", "name" (a string that can be shown
            on one line), "bytes", or a message of `SCHEMA`.
        many: it is repeated: a list, or an array where `kind` is a number.
        keyed: it is a map from strings.
    """

    name: str
    kind: str
    many: bool = False
    keyed: bool = False


def _field(name: str, kind: str) -> Field:
    """`kind*` for a repeated field, `kind@` for a map from strings."""
    return Field(name, kind.rstrip("*@"), kind.endswith("*"), kind.endswith("@"))


def _message(**fields: tuple[int, str]) -> dict[int, Field]:
    return {number: _field(name, kind) for name, (number, kind) in fields.items()}


SCHEMA: dict[str, dict[int, Field]] = {
    "Model": _message(
        specificationVersion=(1, "int"),
        description=(2, "ModelDescription"),
        mlProgram=(502, "Program"),
    ),
    "ModelDescription": _message(defaultFunctionName=(21, "name"), metadata=(100, "Metadata")),
    "Metadata": _message(userDefined=(100, "string@")),
    "Program": _message(version=(1, "int"), functions=(2, "Function@")),
    "Function": _message(
        inputs=(1, "NamedValueType*"), opset=(2, "name"), block_specializations=(3, "Block@")
    ),
    "Block": _message(
        inputs=(1, "NamedValueType*"), outputs=(2, "name*"), operations=(3, "Operation*")
    ),
    "Operation": _message(
        type=(1, "name"),
        inputs=(2, "Argument@"),
        outputs=(3, "NamedValueType*"),
        blocks=(4, "Block*"),
        attributes=(5, "Value@"),
    ),
    "Argument": _message(arguments=(1, "Binding*")),
    "Binding": _message(name=(1, "name"), value=(2, "Value")),
    "NamedValueType": _message(name=(1, "name"), type=(2, "ValueType")),
    "ValueType": _message(
        tensorType=(1, "TensorType"),
        listType=(2, "Unread"),
        tupleType=(3, "Unread"),
        dictionaryType=(4, "Unread"),
        stateType=(5, "StateType"),
    ),
    "StateType": _message(wrappedType=(1, "ValueType")),
    "TensorType": _message(dataType=(1, "int"), rank=(2, "int"), dimensions=(3, "Dimension*")),
    "Dimension": _message(constant=(1, "ConstantDimension"), unknown=(2, "Unread")),
    "ConstantDimension": _message(size=(1, "int")),
    "Value": _message(
        type=(2, "ValueType"), immediateValue=(3, "ImmediateValue"), blobFileValue=(5, "BlobFile")
    ),
    "ImmediateValue": _message(tensor=(1, "TensorValue"), list=(3, "Unread")),
    "BlobFile": _message(fileName=(1, "name"), offset=(2, "int")),
    "TensorValue": _message(
        floats=(1, "Floats"),
        ints=(2, "Ints"),
        bools=(3, "Ints"),
        strings=(4, "Strings"),
        longInts=(5, "Ints"),
        doubles=(6, "Doubles"),
        bytes=(7, "Bytes"),
    ),
    "Floats": _message(values=(1, "float*")),
    "Doubles": _message(values=(1, "double*")),
    "Ints": _message(values=(1, "int*")),
    "Strings": _message(values=(1, "string*")),
    "Bytes": _message(values=(1, "bytes")),
    "Unread": {},
}


def parse(data: bytes | memoryview, message: str) -> dict[str, Any]:
    """The fields of a message by name; those that `SCHEMA` lacks are passed over.

    Raises:
        WireError: `data` is cut off, or no such message.
    """
    fields, found = SCHEMA[message], dict[str, Any]()
    for number, wire_type, payload in _fields(memoryview(data)):
        field = fields.get(number)
        if field is None:
            continue
        if field.keyed:
            key, value = _map_entry(payload, field.kind)
            found.setdefault(field.name, {})[key] = value
        elif field.many:
            found.setdefault(field.name, []).extend(_items(payload, wire_type, field.kind))
        else:
            found[field.name] = _single(payload, wire_type, field.kind)
    return found


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and payload of each field: an int, or the bytes themselves."""
    at = 0
    while at < len(view):
        tag, at = _varint(view, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            payload, at = _varint(view, at)
            yield number, wire_type, payload
            continue
        if wire_type == _BYTES:
            size, at = _varint(view, at)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise WireError(f"wire type {wire_type}")
        if at + size > len(view):
            raise WireError(f"a field of {size} bytes where {len(view) - at} are left")
        yield number, wire_type, view[at : at + size]
        at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and where it ends."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(view):
            raise WireError("a number that is cut off")
        byte = view[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise WireError("a number of more than ten bytes")


def _signed(value: int) -> int:
    """The 64 bits of a varint as protobuf's int32 and int64 mean them."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _map_entry(payload: Any, kind: str) -> tuple[str, Any]:
    key, value = "", {} if kind in SCHEMA else ""
    for number, wire_type, part in _fields(_expect_bytes(payload)):
        if number == 1:
            key = _single(part, wire_type, "name")
        elif number == 2:
            value = _single(part, wire_type, kind)
    return key, value


def _single(payload: Any, wire_type: int, kind: str) -> Any:
    if kind == "int":
        if wire_type != _VARINT:
            raise WireError(f"wire type {wire_type} for an integer")
        return _signed(payload)
    data = _expect_bytes(payload)
    if kind in ("string", "name"):
        return _text(data, kind)
    if kind == "bytes":
        return bytes(data)
    if kind in ("float", "double"):
        layout = struct.Struct("<f" if kind == "float" else "<d")
        if len(data) != layout.size:
            raise WireError(f"{len(data)} bytes for a {kind}")
        return layout.unpack(data)[0]
    return parse(data, kind)


def _text(data: memoryview, kind: str) -> str:
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise WireError("a string that is no UTF-8") from error
    if kind == "name" and not text.isprintable():
        raise WireError(f"the name {text!r}")
    return text


def _items(payload: Any, wire_type: int, kind: str) -> list[Any]:
    """A repeated field's next items: numbers may come packed, many in one payload."""
    if wire_type != _BYTES or kind not in ("int", "float", "double"):
        return [_single(payload, wire_type, kind)]
    if kind != "int":
        width = "<f4" if kind == "float" else "<f8"
        if len(payload) % np.dtype(width).itemsize:
            raise WireError(f"{len(payload)} bytes of packed numbers")
        return np.frombuffer(payload, width).tolist()
    values, at = [], 0
    while at < len(payload):
        value, at = _varint(payload, at)
        values.append(_signed(value))
    return values


def _expect_bytes(payload: Any) -> memoryview:
    if not isinstance(payload, memoryview):
        raise WireError("a number where bytes belong")
    return payload
