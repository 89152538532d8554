"""Last hidden states of a model that is called as a whole: what enters its final norm, noted there.

A model with stages gives them as the output of its last layer. Of another they pass inside the
model's own call, so its final norm gets a class that notes its input where somebody asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_here = threading.local()  # `inputs`: where this thread notes what enters final norms, if it does


@contextmanager
def noting_norm_inputs() -> Iterator[list[mx.array]]:
    """Note what enters final norms on this thread inside the `with` block.

    Those that `hook_final_norm` has seen. A block inside of another ends both.

    Yields:
        A list, empty at first: [1, R, D] of each time that such a norm is called.
    """
    found: list[mx.array] = []
    _here.inputs = found
    try:
        yield found
    finally:
        _here.inputs = None


def hook_final_norm(norm: nn.Module) -> None:
    """Let the input of `norm` be noted by `noting_norm_inputs`, for good.

    It gets another class, in place. Outside of `noting_norm_inputs` it computes what it did.
    """
    if not hasattr(norm, "_notes_input"):
        norm.__class__ = _noting_class(type(norm))


@cache
def _noting_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of `kind` that notes the input of each call; always the same one."""

    def call(self: Any, x: mx.array, *others: Any, **named: Any) -> mx.array:
        inputs = getattr(_here, "inputs", None)
        if inputs is not None:
            inputs.append(x)
        original: Any = kind.__call__
        normed: mx.array = original(self, x, *others, **named)
        return normed

    return type(kind.__name__, (kind,), {"__call__": call, "_notes_input": True})
