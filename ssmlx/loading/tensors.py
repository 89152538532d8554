"""Safetensors files read and written strictly: whole, of the names and shapes that are asked for,
and finite.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import InputError, first_line, join_first, require, unwritable_error
from ..mlx_thread import claim_process


def write_finite_tensors_in_place(
    path: Path, tensors: Mapping[str, mx.array], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, in place over an older one; it is not replaced as a whole.

    Args:
        path: of the file, in a folder that is there.
        tensors: by name; they are evaluated.
        metadata: texts for the file's header; None for none.

    Raises:
        InputError: a tensor has NaN or infinity, or its sum overflows float32, before anything is
            written; or the file cannot be written.
    """
    odd = next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)
    found = f"{odd} has NaN or infinity in {path.name}"
    do = "choose a wider --dtype, or train anew"
    require(odd is None, found, expected="finite weights", do=do)
    try:
        mx.save_safetensors(str(path), dict(tensors), metadata)
    except RuntimeError as error:  # MLX's of a full disk
        raise unwritable_error(path, error) from error


def read_tensors(path: Path, what: str, names_begin_with: str = "") -> dict[str, mx.array]:
    """Read the tensors of a safetensors file, or those whose names begin so, evaluated.

    Args:
        path: of the file.
        what: it should hold, for messages.
        names_begin_with: a prefix of the names, which keep it; empty for all tensors.

    Returns:
        The tensors by name; empty where no name begins so.

    Raises:
        InputError: there is no file, it cannot be read, or this process may not use MLX, see
            `claim_process`.
    """
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
    source: Path,
    of_any_dtype: Collection[str] = ("draft_vocab",),
) -> None:
    """Raise InputError unless `found` has exactly the `expected` names and shapes, of finite
    floats.

    Args:
        found: tensors by name.
        expected: shapes by name.
        source: named in the message, which lists the first few tensors of every fault.
        of_any_dtype: names of tensors that need not be floats.
    """
    missing = [name for name in expected if name not in found]
    spare = [name for name in found if name not in expected]
    misshapen = [
        f"{name} {found[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    # What is misshapen, and may be huge, is not read.
    fitting = [name for name in found if found[name].shape == expected.get(name)]
    kinds = {"missing": missing, "spare": spare, "misshapen": misshapen}
    kinds["with NaN or infinity"] = [name for name in fitting if not _is_finite(found[name])]
    kinds["that are no floats"] = [
        name
        for name in fitting
        if name not in of_any_dtype and not mx.issubdtype(found[name].dtype, mx.floating)
    ]

    problems = [f"{kind}: {join_first(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise InputError(
            f"{source} has tensors {'; '.join(problems)}",
            expected=f"{len(expected)} tensors that fit its settings and the base model",
            do="use the files that belong together, or make them again",
        )


def _is_finite(tensor: mx.array) -> bool:
    """Whether a tensor has no NaN and no infinity. It is told by its sum in float32, so a sum that
    overflows makes it False too.
    """
    # The sum is no number where a value is none, and several times as fast as a look at each.
    total: Any = tensor.astype(mx.float32).sum().item()
    return math.isfinite(total)
