"""Modules of MLX: copies that share arrays, and modules whose inputs are noted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def copy_with_parts(module: nn.Module, call: Any = None, **parts: Any) -> Any:
    """Make a shallow copy of a module, with some attributes replaced.

    Args:
        module: stays as it is; the copy shares its arrays and its other submodules.
        call: a function of the module and its arguments, which becomes the copy's `__call__` where
            given: the copy gets a subclass of its class.
        parts: the new values, by attribute.
    """
    twin = copy.copy(module)
    kind = type(module)
    for name, part in parts.items():
        setattr(twin, name, part)
    if call is not None:
        twin.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return twin


def module_arrays(model: nn.Module) -> list[mx.array]:
    """Every array that a model's modules hold, those that are no parameters among them, such as a
    rotary embedding's frequencies.
    """
    held = (value for module in model.modules() for value in module.values())
    return [value for value in held if isinstance(value, mx.array)]


def clone_sharing_arrays(model: nn.Module) -> nn.Module:
    """A copy of a model's modules, whose arrays are the very arrays of `model`.

    A module that stands in two places is one module in the copy too.
    """
    twin: nn.Module = _clone_modules_in(model, {})
    return twin


def _clone_modules_in(value: Any, copies: dict[int, Any]) -> Any:
    """Copy `value` with all modules in it, also those in lists, tuples and dictionaries.

    Anything else, arrays among it, is returned as it is.

    Args:
        value: a module, a container, or anything else.
        copies: the modules' copies so far, by `id` of the original; new ones are added, so that a
            module that is met again has one copy.
    """
    if isinstance(value, nn.Module):
        if id(value) not in copies:
            twin: Any = copy.copy(value)
            copies[id(value)] = twin
            for name, part in value.items():
                twin[name] = _clone_modules_in(part, copies)
        return copies[id(value)]
    if isinstance(value, dict):
        return {name: _clone_modules_in(part, copies) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clone_modules_in(part, copies) for part in value)
    return value


def note_inputs(module: nn.Module, note: Callable[[mx.array], None]) -> None:
    """Let `note` be called with the first argument of `module` before each of its calls, for good.

    The module gets another class, in place, and computes what it did. One whose inputs are noted
    already stays as it is: a second `note` is never called. The class is kept for good, by the
    module's class and `note`, which is best a function of a file.
    """
    if not hasattr(module, "_notes_input"):
        module.__class__ = _noting_class(type(module), note)


@cache
def _noting_class(kind: type[nn.Module], note: Callable[[mx.array], None]) -> type[nn.Module]:
    """Make a subclass of `kind` that calls `note` first; the same one for the same arguments."""
    original: Any = kind.__call__

    def call(self: Any, x: mx.array, *others: Any, **named: Any) -> mx.array:
        note(x)
        result: mx.array = original(self, x, *others, **named)
        return result

    return type(kind.__name__, (kind,), {"__call__": call, "_notes_input": True})
