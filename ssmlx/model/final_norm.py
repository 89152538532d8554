"""Last hidden states of a model that is called as a whole: what enters its final norm, noted there.

A model with stages gives them as the output of its last layer. In other models they pass inside the
model's own call, so the final norm gets a class that notes its input while somebody asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from .modules import note_inputs

_here = threading.local()  # `inputs`: where this thread notes what enters final norms, if it does


@contextmanager
def noting_norm_inputs() -> Iterator[list[mx.array]]:
    """A list of what enters final norms on this thread, [1, R, D] each time. Nested blocks end
    together."""
    found: list[mx.array] = []
    _here.inputs = found
    try:
        yield found
    finally:
        _here.inputs = None


def hook_final_norm(norm: nn.Module) -> None:
    note_inputs(norm, _note)


def _note(entering: mx.array) -> None:
    inputs: list[mx.array] | None = getattr(_here, "inputs", None)
    if inputs is not None:
        inputs.append(entering)
