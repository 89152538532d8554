"""Safetensors files read and written strictly: whole, finite, of the expected names and shapes."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import InputError, first_line, join_first, require, unwritable_error
from ..mlx_thread import claim_process


def write_tensors(
    path: Path,
    tensors: Mapping[str, mx.array],
    metadata: dict[str, str] | None = None,  # of the file's header
) -> None:
    """Write a file over an older one, which is not replaced as a whole."""
    odd = next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)
    found = f"{odd} has NaN or infinity in {path.name}"
    do = "choose a wider --dtype, or train again"
    require(odd is None, found, expected="finite weights", do=do)
    try:
        mx.save_safetensors(str(path), dict(tensors), metadata)
    except RuntimeError as error:  # as of a full disk
        raise unwritable_error(path, error) from error


def read_tensors(
    path: Path,
    what: str,  # the file should hold, for messages
    names_begin_with: str = "",  # others are not read
) -> dict[str, mx.array]:
    """The tensors of a file, evaluated."""
    if not path.is_file():
        raise InputError(f"{path} does not exist", expected=what, do="check the path")
    claim_process()
    try:
        loaded = mx.load(str(path), format="safetensors")
        assert isinstance(loaded, dict)
        found = {name: array for name, array in loaded.items() if name.startswith(names_begin_with)}
        mx.eval(found)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({first_line(error)}; {path.stat().st_size} bytes)",
            expected=f"{what}, a whole safetensors file",
            do="copy it again, it may be truncated",
        ) from error
    return found


def check_tensors(
    found: Mapping[str, mx.array],
    expected: Mapping[str, tuple[int, ...]],
    source: str | Path,  # for messages
    of_any_dtype: Collection[str] = ("draft_vocab",),
) -> None:
    """Refuse tensors unless they are finite floats of exactly the expected names and shapes."""
    missing = [name for name in expected if name not in found]
    spare = [name for name in found if name not in expected]
    misshapen = [
        f"{name} {found[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    # Misshapen tensors may be huge, and are not read.
    fitting = [name for name in found if found[name].shape == expected.get(name)]
    kinds = {"missing": missing, "spare": spare, "misshapen": misshapen}
    kinds["with NaN or infinity"] = [name for name in fitting if not _is_finite(found[name])]
    kinds["that are not floats"] = [
        name
        for name in fitting
        if name not in of_any_dtype and not mx.issubdtype(found[name].dtype, mx.floating)
    ]

    problems = [f"{kind}: {join_first(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise InputError(
            f"{source} has tensors {'; '.join(problems)}",
            expected=f"{len(expected)} tensors that fit its settings and the base model",
            do="use files that belong together, or create them again",
        )


def _is_finite(tensor: mx.array) -> bool:
    # NaN and infinity carry into the sum, which is several times as fast as a look at each value.
    # A sum that overflows counts as infinite too.
    total: Any = tensor.astype(mx.float32).sum().item()
    return math.isfinite(total)
