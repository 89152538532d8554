"""A fused attention kernel for tree and stream rows on Apple GPUs, and what leads to it.

    attention.metal   the kernel's functions, in Metal's language
    kernels           its entry points and their arguments
    plan              sizes, chips, and how the kernel divides its work
    paths             which kernels a step takes, MLX's or ours, and what they read
    mask              ancestors as bits
    hook              from mlx-lm's layers to the kernel
    switch            on and off

MLX's `scaled_dot_product_attention` stays the reference and the fallback. The kernel was run for
its meaning, on the CPU (`tests/metal`); it has not run on an Apple GPU yet.
"""

from .hook import hook_layers
from .mask import StepMasks, TreeMask
from .switch import ATTENTIONS, Attention, in_use, is_available, use

__all__ = [
    "ATTENTIONS",
    "Attention",
    "StepMasks",
    "TreeMask",
    "hook_layers",
    "in_use",
    "is_available",
    "use",
]
