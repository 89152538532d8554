"""How decoder layers come to the fused kernel.

mlx-lm's attention modules call `scaled_dot_product_attention` by a name of their own module. That
name is replaced by a function that looks at the mask: a `TreeMask` is ours, everything else goes
to the original as it came. So other users of the same module notice nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx

from ...errors import InputError
from ..shapes import to_float
from .kernels import attend
from .mask import TreeMask, pack_bits
from .paths import choose_path
from .plan import AttentionShape, Chip, Plan, is_supported, make_plan, this_chip
from .switch import Attention, in_use, is_on

_NAME = "scaled_dot_product_attention"
_HOOKED = "_takes_tree_masks"
_TOLERANCES = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}

Attend = Callable[..., mx.array]


def hook_layers(layers: Iterable[Any]) -> bool:
    """Let the attention of `layers` take a `TreeMask`; whether all of them can.

    Only a layer whose `self_attn` calls mlx-lm's function by its usual name can.
    """
    calls = [type(getattr(layer, "self_attn", None)).__call__ for layer in layers]
    if not all(_calls_by_name(call) for call in calls):
        return False
    for call in calls:
        original = call.__globals__[_NAME]
        if not hasattr(original, _HOOKED):
            call.__globals__[_NAME] = _taking_tree_masks(original)
    return True


def _calls_by_name(call: Any) -> bool:
    code = getattr(call, "__code__", None)
    return code is not None and _NAME in code.co_names and _NAME in call.__globals__


def _taking_tree_masks(original: Attend) -> Attend:
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
    """How the fused kernel does this attention; None where MLX's own is to do it.

    Args:
        queries: [1, H, R, Dh]
        keys: [1, Hkv, C + L, Dh]

    Raises:
        InputError: "fused" was chosen, and the kernel cannot do it or disagrees with MLX.
    """
    if not is_on():
        return None
    return _plan_for(queries.shape, keys.shape, queries.dtype, in_use())


# The layers of a step ask for the same.
@lru_cache(maxsize=64)
def _plan_for(
    queries: tuple[int, ...], keys: tuple[int, ...], dtype: mx.Dtype, attention: Attention
) -> Plan | None:
    shape, chip = shape_of(queries, keys, dtype), this_chip()
    if attention == "auto":
        if choose_path(shape, chip) != "fused" or not _is_trusted(shape, chip):
            return None
    elif not is_supported(shape) or not _is_trusted(shape, chip):
        raise InputError(
            f"--attention fused, for heads of {shape.head_size} in {shape.dtype}",
            expected="head sizes that are multiples of 8 up to 128, and a GPU that runs the kernel",
            do="use --attention mlx",
        )
    return make_plan(shape, chip)


def shape_of(queries: Sequence[int], keys: Sequence[int], dtype: mx.Dtype) -> AttentionShape:
    """The sizes of the attention of queries [1, H, R, Dh] over keys [1, Hkv, C + L, Dh]."""
    _, heads, rows, head_size = queries
    _, kv_heads, num_keys, _ = keys
    return AttentionShape(
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        keys=num_keys,
        head_size=head_size,
        dtype=dtype,
    )


def _is_trusted(shape: AttentionShape, chip: Chip) -> bool:
    blocks = make_plan(shape, chip).blocks
    return agrees_with_mlx(shape.dtype, shape.head_size, blocks)


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
        warnings.warn(f"the fused attention kernel {reason}; MLX's is used", stacklevel=2)
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
    plan = make_plan(shape_of(queries.shape, keys.shape, dtype), this_chip())
    bits = pack_bits(visible)
    assert plan.blocks == blocks
    gaps = [
        mx.abs(attend(queries, keys, values, bits, scale, p) - expected).max()
        for p in (plan, replace(plan, splits=1))
    ]
    gap = to_float(mx.maximum(*gaps).astype(mx.float32))
    return math.inf if math.isnan(gap) else gap
