"""Copies of MLX modules that share arrays with the original."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def replace_parts(module: nn.Module, call: Any = None, **parts: Any) -> Any:
    """A module like `module`, on the same arrays, with some other parts, and maybe another call."""
    twin = copy.copy(module)
    kind = type(module)
    for name, part in parts.items():
        setattr(twin, name, part)
    if call is not None:
        twin.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return twin


def module_arrays(model: nn.Module) -> list[mx.array]:
    """Every array of a model, such as a rotary embedding's frequencies, which count as no
    parameters."""
    held = (value for module in model.modules() for value in module.values())
    return [value for value in held if isinstance(value, mx.array)]


def clone_sharing_arrays(model: nn.Module) -> nn.Module:
    """A copy of a model's modules, whose arrays are the very arrays of `model`."""
    twin: nn.Module = _clone(model, {})
    return twin


def _clone(value: Any, copies: dict[int, Any]) -> Any:
    """`value` with its modules copied; one that stands in two places stays one."""
    if isinstance(value, nn.Module):
        if id(value) not in copies:
            twin: Any = copy.copy(value)
            copies[id(value)] = twin
            for name, part in value.items():
                twin[name] = _clone(part, copies)
        return copies[id(value)]
    if isinstance(value, dict):
        return {name: _clone(part, copies) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clone(part, copies) for part in value)
    return value
