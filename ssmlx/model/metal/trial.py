"""The fused kernel and MLX's own attention, both on random rows of one shape, on this machine:
whether they say the same, and which is faster."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..shapes import to_float
from .division import AttentionShape, Division
from .kernels import attend, pack_bits

clock = time.perf_counter
MIN_GAIN = 1.05  # times MLX's speed: from here on the kernel is taken
TURNS = 3  # at least
MAX_SECONDS = 0.03  # after which there are no more turns
_ROWS_IN_A_CALL = 32_768  # keys that a timed call reads, in one attention or in several
# Largest differences from MLX's attention of normally distributed values.
_TOLERANCES = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}

KeyValues = tuple[mx.array, mx.array]  # keys and values [1, Hkv, keys, Dh] of a layer
# Attention of queries [1, H, R, Dh] over a layer's keys and values.
AttentionFunction = Callable[[mx.array, mx.array, mx.array], mx.array]


class Attentions(NamedTuple):
    """Both attentions under one mask; each maps queries, keys and values to [1, H, R, Dh]."""

    of_mlx: AttentionFunction
    of_kernel: AttentionFunction


@dataclass(frozen=True)
class Trial:
    agrees: bool
    gain: float = 0.0  # times MLX's speed
    seconds: float = 0.0  # of MLX's

    @property
    def takes_kernel(self) -> bool:
        """Whether the kernel is clearly faster."""
        return self.agrees and self.gain >= MIN_GAIN


def make_random_inputs(shape: AttentionShape) -> tuple[mx.array, KeyValues, mx.array]:
    """[1, H, R, Dh] queries; keys and values [1, Hkv, keys, Dh], slices of one cache, with free
    space before and after the keys, as in a real cache; and a mask [R, R], cut to [R, keys]. Always
    the same for one shape; computed."""
    key = mx.random.key(0)
    queries = mx.random.normal((1, shape.heads, shape.rows, shape.head_size), shape.dtype, key=key)
    size = (2, shape.kv_heads, shape.keys + 64, shape.head_size)
    cache = mx.random.normal(size, shape.dtype, key=key)
    used = slice(32, 32 + shape.keys)
    row = mx.arange(shape.rows)
    chance = mx.random.uniform(shape=(shape.rows, shape.rows), key=key) < 0.3
    visible = ((row[:, None] == row) | ((row[:, None] > row) & chance))[:, : shape.keys]
    mx.eval(queries, cache, visible)
    return queries, (cache[:1, :, used], cache[1:, :, used]), visible


def make_attentions(
    shape: AttentionShape,
    visible: mx.array,  # [R, C] of the first C keys; every row sees the others
    division: Division,
) -> Attentions:
    """Make both attentions; masks are computed here, as once for all layers of a step."""
    scale = shape.head_size**-0.5
    committed = mx.ones((shape.rows, shape.keys - visible.shape[1]), mx.bool_)
    mask = mx.concatenate([visible, committed], axis=1)
    bits = pack_bits(visible)
    mx.eval(mask, bits)
    return Attentions(
        partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask),
        lambda queries, keys, values: attend(queries, keys, values, bits, scale, division),
    )


def run_layers(
    queries: mx.array,  # [1, H, R, Dh] of the first layer; others get the output before
    key_values: list[KeyValues],  # by layer
    attention: AttentionFunction,
) -> mx.array:  # [1, H, R, Dh]
    for keys, values in key_values:
        queries = attention(queries, keys, values)
    return queries


def try_kernel(shape: AttentionShape, division: Division) -> Trial:
    """Check the kernel's values, then its speed: it was not tested on every GPU and compiler, and
    no answer may depend on these. Takes `MAX_SECONDS` or `TURNS` turns, whichever is longer, beside
    the compilation."""
    queries, layer_key_values, visible = make_random_inputs(shape)
    theirs, ours = make_attentions(shape, visible, division)
    expected = theirs(queries, *layer_key_values)
    mx.eval(expected)
    try:
        gap = to_float(mx.abs(ours(queries, *layer_key_values) - expected).max().astype(mx.float32))
        reason = f"differs from MLX's by {gap:.2g}"
    except (RuntimeError, ValueError) as error:
        gap = math.inf
        reason = f"does not run ({error})".replace("\n", " ")
    if not gap <= _TOLERANCES[shape.dtype]:  # also false for NaN
        logging.getLogger("ssmlx").warning("the fused attention kernel %s; MLX's is used", reason)
        return Trial(agrees=False)
    key_values = [layer_key_values] * max(1, min(8, _ROWS_IN_A_CALL // shape.keys))
    best = [math.inf, math.inf]
    turn = 0
    began = clock()
    while turn < TURNS or clock() - began < MAX_SECONDS:
        for index, attention in enumerate((theirs, ours)):
            started = clock()
            mx.eval(run_layers(queries, key_values, attention))
            best[index] = min(best[index], clock() - started)
        turn += 1
    return Trial(agrees=True, gain=best[0] / best[1], seconds=best[0] / len(key_values))
