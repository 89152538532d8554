"""A fused attention kernel for tree and stream rows on Apple GPUs, and what leads to it.

MLX's `scaled_dot_product_attention` stays the reference and the fallback. The kernel's results were
checked on the CPU (`tests/metal`); it has not run on an Apple GPU yet.
"""

from .hook import (
    TreeMask,
    all_call_mlx_attention,
    choose_attention,
    chosen_attention,
    hook_layers,
    is_available,
    is_on,
    time_pending_shape,
    trials,
)

__all__ = [
    "TreeMask",
    "all_call_mlx_attention",
    "choose_attention",
    "chosen_attention",
    "hook_layers",
    "is_available",
    "is_on",
    "time_pending_shape",
    "trials",
]
