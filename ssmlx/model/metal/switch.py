"""The one switch between MLX's attention and the fused kernel, for the whole process."""

from __future__ import annotations

import mlx.core as mx

from ...errors import InputError, check_choice
from ...settings import ATTENTIONS, Attention

_chosen: Attention = "auto"


def is_available() -> bool:
    """Whether kernels can run: MLX has Metal here, and works on the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def use(attention: Attention) -> None:
    """Choose what computes the attention of tree and stream rows, from the next step on.

    Args:
        attention: "auto", the fused kernel where `paths.choose_path` says so and it agreed with
            MLX on this machine; "mlx", never; "fused", wherever its head sizes allow. Without
            Metal, "auto" is "mlx".

    Raises:
        InputError: there is no such choice, or "fused" without Metal.
    """
    global _chosen
    check_choice("--attention", attention, ATTENTIONS)
    if attention == "fused" and not is_available():
        raise InputError(
            "--attention fused, but MLX has no Metal device here",
            expected="a Mac with Apple silicon, and MLX on its GPU",
            do="use --attention auto",
        )
    _chosen = attention


def in_use() -> Attention:
    """The last choice."""
    return _chosen


def is_on() -> bool:
    """Whether the fused kernel may be used at all."""
    return _chosen != "mlx" and is_available()
