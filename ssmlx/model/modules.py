"""Modules of MLX: copies that share arrays, and modules whose inputs are noted."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def copy_with_parts(
    module: nn.Module,
    call: Any = None,  # becomes the copy's `__call__`, by a subclass
    **parts: Any,  # new values, by attribute
) -> Any:
    """A shallow copy that shares all arrays and other submodules."""
    twin = copy.copy(module)
    kind = type(module)
    for name, part in parts.items():
        setattr(twin, name, part)
    if call is not None:
        twin.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return twin


def module_arrays(model: nn.Module) -> list[mx.array]:
    """All arrays of a model, also those that are no parameters, such as rotary frequencies."""
    held = (value for module in model.modules() for value in module.values())
    return [value for value in held if isinstance(value, mx.array)]


def clone_sharing_arrays(model: nn.Module) -> nn.Module:
    """A copy of the modules, on the same arrays; a module that occurs twice is one in it too."""
    twin: nn.Module = _clone_modules_in(model, {})
    return twin


def _clone_modules_in(
    value: Any,  # a module, a container, or anything else
    copies: dict[int, Any],  # by `id` of the original
) -> Any:
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


class Notes(threading.local):
    """A list of its own on each thread, filled only inside of `with notes.taken() as found`. Nested
    blocks end together."""

    found: list[Any] | None = None

    @contextmanager
    def taken(self) -> Iterator[list[Any]]:
        found: list[Any] = []
        self.found = found
        try:
            yield found
        finally:
            self.found = None

    def add(self, one: Any) -> None:
        if self.found is not None:
            self.found.append(one)


def note_inputs(module: nn.Module, note: Callable[[mx.array], None]) -> None:
    """Call `note` with the first argument of `module` before each of its calls, for good: the
    module gets another class. A second `note` is never called. The class is kept by `note`, so that
    should live as long as the process."""
    if not hasattr(module, "_notes_input"):
        module.__class__ = _noting_class(type(module), note)


@cache
def _noting_class(kind: type[nn.Module], note: Callable[[mx.array], None]) -> type[nn.Module]:
    original: Any = kind.__call__

    def call(self: Any, x: mx.array, *others: Any, **named: Any) -> mx.array:
        note(x)
        result: mx.array = original(self, x, *others, **named)
        return result

    return type(kind.__name__, (kind,), {"__call__": call, "_notes_input": True})
