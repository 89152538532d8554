"""A fused attention kernel for tree and stream rows on Apple GPUs, and what leads to it.

    attention.metal   the kernel's functions, in Metal's language
    kernels           its entry points and their arguments
    division          sizes, chips, and how the kernel divides its work
    trial             both on random rows: the same values, and which is faster here
    hook              the switch, masks as bits, and the way from mlx-lm's layers to the kernel

MLX's `scaled_dot_product_attention` stays the reference and the fallback. The kernel was run for
its meaning, on the CPU (`tests/metal`); it has not run on an Apple GPU yet.
"""

from .hook import (
    TreeMask,
    calls_attention,
    chosen_attention,
    hook_layers,
    is_available,
    is_on,
    time_pending_shape,
    trials,
    use,
)

__all__ = [
    "TreeMask",
    "calls_attention",
    "chosen_attention",
    "hook_layers",
    "is_available",
    "is_on",
    "time_pending_shape",
    "trials",
    "use",
]
