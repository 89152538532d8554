"""How a step comes to the fused kernel: the switch, its mask as bits, and the hook in the layers.

mlx-lm's attention modules call `scaled_dot_product_attention` by a name of their own module. That
name is replaced by a function that looks at the mask: a `TreeMask` is ours, everything else goes
to the original as it came. So other users of the same module notice nothing.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, lru_cache, wraps
from typing import Any

import mlx.core as mx

from ...errors import check_choice, require
from ...settings import ATTENTIONS, Attention
from ..shapes import indices, to_float
from .kernels import attend
from .plan import (
    TILE_KEYS,
    AttentionShape,
    Plan,
    ceil_div,
    choose_path,
    is_supported,
    make_plan,
    this_chip,
)

_NAME = "scaled_dot_product_attention"
_HOOKED = "_takes_tree_masks"
# Largest differences from MLX's attention of normally distributed values.
_TOLERANCES = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
# MLX gives smaller arrays to a kernel in another address space, which would be another source.
_MIN_WORDS = 8

_chosen: Attention = "auto"


def is_available() -> bool:
    """Whether kernels can run: MLX has Metal here, and works on the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def use(attention: Attention) -> None:
    """Choose what computes the attention of tree and stream rows, from the next step on.

    Args:
        attention: "auto", the fused kernel where `plan.choose_path` says so and it agreed with
            MLX on this machine; "mlx", never; "fused", wherever its head sizes allow. Without
            Metal, "auto" is "mlx".

    Raises:
        InputError: there is no such choice, or "fused" without Metal.
    """
    global _chosen
    check_choice("attention", attention, ATTENTIONS)
    require(
        attention != "fused" or is_available(),
        "attention=fused, but MLX has no Metal device here",
        expected="a Mac with Apple silicon, and MLX on its GPU",
        do="use attention=auto",
    )
    _chosen = attention


def in_use() -> Attention:
    """The last choice."""
    return _chosen


def is_on() -> bool:
    """Whether the fused kernel may be used at all."""
    return _chosen != "mlx" and is_available()


def pack_bits(visible: mx.array) -> mx.array:
    """[R, W] uint32 words: bit j of word w is set where a row sees column 32 * w + j.

    Columns beyond the C of `visible` [R, C] are committed tokens, which every row sees.
    """
    rows, columns = visible.shape
    words = max(ceil_div(columns, TILE_KEYS), ceil_div(_MIN_WORDS, rows))
    padded = mx.pad(
        visible, [(0, 0), (0, words * TILE_KEYS - columns)], constant_values=mx.array(True)
    )
    bits = padded.reshape(rows, words, TILE_KEYS).astype(mx.uint32)
    return (bits << indices(TILE_KEYS).astype(mx.uint32)).sum(axis=-1)


class TreeMask:
    """A step's mask in both forms; each is made when the first layer asks for it.

    Args:
        visible: [R, C] bool, which row sees which of the first C keys; all see the others.
        dense: gives the bool mask [R, C + L], for layers that MLX's kernels serve.
    """

    def __init__(self, visible: mx.array, dense: Callable[[], mx.array]) -> None:
        self.visible, self._dense = visible, dense

    @cached_property
    def bits(self) -> mx.array:
        """[R, W] uint32; see `pack_bits`."""
        return pack_bits(self.visible)

    @cached_property
    def dense(self) -> mx.array:
        """[R, C + L] bool."""
        return self._dense()


def hook_layers(layers: Iterable[Any]) -> bool:
    """Let the attention of `layers` take a `TreeMask`; whether all of them can.

    Only a layer whose `self_attn` calls mlx-lm's function by its usual name can.
    """
    calls = [type(getattr(layer, "self_attn", None)).__call__ for layer in layers]
    for call in calls:
        code = getattr(call, "__code__", None)
        if code is None or _NAME not in code.co_names or _NAME not in call.__globals__:
            return False
    for call in calls:
        original = call.__globals__[_NAME]
        if not hasattr(original, _HOOKED):
            call.__globals__[_NAME] = _taking_tree_masks(original)
    return True


def _taking_tree_masks(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(original)
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any = None,
        **others: Any,
    ) -> mx.array:
        if isinstance(mask, TreeMask):
            plan = plan_for(queries, keys) if others.get("sinks") is None else None
            if plan is not None:
                return attend(queries, keys, values, mask.bits, scale, plan)
            mask = mask.dense
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)

    setattr(attention, _HOOKED, True)
    return attention


def plan_for(queries: mx.array, keys: mx.array) -> Plan | None:
    """How the fused kernel does attention of queries [1, H, R, Dh] over keys [1, Hkv, C + L, Dh].

    None where MLX's own is to do it.
    """
    if not is_on():
        return None
    return _plan_for(AttentionShape.of(queries.shape, keys.shape, queries.dtype), in_use())


# The layers of a step ask for the same.
@lru_cache(maxsize=64)
def _plan_for(shape: AttentionShape, attention: Attention) -> Plan | None:
    chip = this_chip()
    plan = make_plan(shape, chip)
    if attention == "auto" and choose_path(shape, chip) != "fused":
        return None
    works = is_supported(shape) and agrees_with_mlx(shape.dtype, shape.head_size, plan.blocks)
    require(
        works or attention == "auto",
        f"attention=fused, for heads of {shape.head_size} in {shape.dtype}",
        expected="head sizes that are multiples of 8 up to 128, and a GPU that runs the kernel",
        do="use attention=mlx",
    )
    return plan if works else None


@lru_cache(maxsize=32)
def agrees_with_mlx(dtype: mx.Dtype, head_size: int, blocks: int) -> bool:
    """Try the kernel once on this machine: its attention of random rows must be MLX's own.

    It was tested for meaning, not on every GPU and compiler: nobody's text may depend on that.
    """
    try:
        gap = _gap_to_mlx(dtype, head_size, blocks)
        reason = f"differs from MLX's by {gap:.2g}"
    except (RuntimeError, ValueError) as error:
        gap, reason = math.inf, f"does not run ({error})".replace("\n", " ")
    agrees = gap <= _TOLERANCES[dtype]
    if not agrees:
        logging.getLogger("ssmlx").warning("the fused attention kernel %s; MLX's is used", reason)
    return agrees


def _gap_to_mlx(dtype: mx.Dtype, head_size: int, blocks: int) -> float:
    """Largest difference from MLX's attention, with split keys and without."""
    rows, committed, heads, kv_heads = (16, 40)[blocks - 1], 600, 6, 2
    sizes = [(1, heads, rows, head_size), *2 * [(1, kv_heads, rows + committed, head_size)]]
    normal = [mx.random.normal(s, dtype, key=mx.random.key(i)) for i, s in enumerate(sizes)]
    queries, keys, values = normal
    row, scale = mx.arange(rows), head_size**-0.5
    visible = (row[:, None] >= row) & ((row[:, None] - row) % 3 != 1)
    mask = mx.concatenate([visible, mx.ones((rows, committed), mx.bool_)], axis=1)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    plan = make_plan(AttentionShape.of(queries.shape, keys.shape, dtype), this_chip())
    assert plan.blocks == blocks
    gaps = [
        mx.abs(attend(queries, keys, values, pack_bits(visible), scale, p) - expected).max()
        for p in (plan, replace(plan, splits=1))
    ]
    gap = to_float(mx.maximum(*gaps).astype(mx.float32))
    return math.inf if math.isnan(gap) else gap
