"""Last hidden states of a model that is called as a whole: what enters its final norm, noted there.

A model with stages gives them as the output of its last layer. Of another they pass inside the
model's own call, so its final norm gets a class that notes its input where somebody asks for it.
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
    """Let the input of `norm` be noted by `noting_norm_inputs`, for good."""
    note_inputs(norm, _note)


def _note(entering: mx.array) -> None:
    """Note what enters a final norm, where this thread does."""
    inputs: list[mx.array] | None = getattr(_here, "inputs", None)
    if inputs is not None:
        inputs.append(entering)
