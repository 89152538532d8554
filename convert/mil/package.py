"""The folder that a Core ML model is saved in.

Manifest.json                   says which item is the model
Data/com.apple.CoreML/          model.mlmodel, a protobuf message; weights/weight.bin
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError

from .wire import WireError, parse

_EXPECTED = "a Core ML package (.mlpackage) of an ML program"


def find_model(package: Path) -> Path:
    """The path of the model file in a package.

    Raises:
        InputError: there is none, or its manifest cannot be read.
    """
    manifest = package / "Manifest.json"
    if not manifest.is_file():
        raise InputError(f"{manifest} does not exist", expected=_EXPECTED, do="check the path")
    try:
        items = json.loads(manifest.read_text())
        path = items["itemInfoEntries"][items["rootModelIdentifier"]]["path"]
        model = package / "Data" / path
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{manifest} does not say where the model is",
            expected=_EXPECTED,
            do="copy the package again, it may be truncated",
        ) from error
    if not model.is_file():
        raise InputError(f"{model} does not exist", expected=_EXPECTED, do="copy it again")
    return model


def read_model(path: Path) -> dict[str, Any]:
    """The Model message of a file, parsed by `wire.SCHEMA`.

    Raises:
        InputError: the file is truncated, or holds another kind of model.
    """
    data = path.read_bytes()
    try:
        model = parse(data, "Model")
    except WireError as error:
        raise InputError(
            f"{path} cannot be read ({error}; {len(data)} bytes)",
            expected=_EXPECTED,
            do="copy it again, it may be truncated",
        ) from error
    if not model.get("mlProgram", {}).get("functions"):
        raise InputError(
            f"{path} holds no ML program",
            expected=_EXPECTED,
            do="convert the model with minimum_deployment_target iOS 18 or macOS 15",
        )
    return model
