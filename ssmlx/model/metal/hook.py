"""The way of a step to the fused kernel: the switch, its mask as bits, the hook in the layers.

mlx-lm's attention modules call `scaled_dot_product_attention` by a name of their own module. That
name is replaced by a function that looks at the mask: a `TreeMask` is ours, everything else goes to
the original as it came. So other users of the same module notice nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, wraps
from typing import Any

import mlx.core as mx

from ...errors import check_choice, require
from ...settings import ATTENTIONS, Attention
from ..family import attention_of
from .division import AttentionShape, Bucket, Division, divide_attention, is_supported, this_chip
from .kernels import attend, pack_bits
from .trial import Trial, try_kernel

_NAME = "scaled_dot_product_attention"
_HOOKED = "_takes_tree_masks"
_chosen: Attention = (
    "auto"  # of the whole process, as are the functions that `hook_layers` replaces
)
_trials: dict[Bucket, Trial] = {}  # on this chip, whatever model asked
_wanted: dict[Bucket, AttentionShape] = {}  # wait for their trial, between two calls of any answer


def is_available() -> bool:
    """Whether kernels can run: MLX has Metal here, and works on the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def choose_attention(
    # "auto": the fused kernel at shapes for which a trial found it right and clearly faster; "mlx":
    # never; "fused": always, if the head sizes allow
    attention: Attention,
) -> None:
    """Choose the attention of tree and stream rows, in this process, from the next step on. Without
    Metal, "auto" is "mlx"."""
    global _chosen
    check_choice("attention", attention, ATTENTIONS)
    require(
        attention != "fused" or is_available(),
        "attention=fused, but MLX has no Metal device here",
        expected="a Mac with Apple silicon, and MLX on its GPU",
        do="use attention=auto",
    )
    _chosen = attention


def chosen_attention() -> Attention:
    return _chosen


def is_on() -> bool:
    return _chosen != "mlx" and is_available()


class TreeMask:
    """A step's mask in both forms; each is made when the first layer asks for it."""

    def __init__(
        self,
        visible: mx.array,  # [R, C] of the first C keys; every row sees the others
        dense: Callable[[], mx.array],  # gives [R, C + L], for layers that MLX's kernels serve
    ) -> None:
        self.visible = visible
        self._dense = dense

    @cached_property
    def bits(self) -> mx.array:  # [R, W] uint32
        return pack_bits(self.visible)

    @cached_property
    def dense(self) -> mx.array:  # [R, C + L]
        return self._dense()


def all_call_mlx_attention(layers: Iterable[Any]) -> bool:
    """Whether each attention's class has a Python `__call__` that uses a global
    `scaled_dot_product_attention` of its own file, as mlx-lm's do."""
    calls: list[Any] = [type(attention_of(layer)).__call__ for layer in layers]
    codes = (getattr(call, "__code__", None) for call in calls)
    return all(
        code is not None and _NAME in code.co_names and _NAME in call.__globals__
        for call, code in zip(calls, codes, strict=True)
    )


def hook_layers(layers: Iterable[Any]) -> bool:
    """Replace that global in the Python files of the layers' attention classes, for the whole
    process and for good, unless a layer lacks it: other models of these classes are changed too.
    Returns whether all layers take a `TreeMask` now."""
    layers = list(layers)
    if not all_call_mlx_attention(layers):
        return False
    for layer in layers:
        call: Any = type(attention_of(layer)).__call__
        original = call.__globals__[_NAME]
        if not hasattr(original, _HOOKED):
            call.__globals__[_NAME] = _wrap_attention(original)
    return True


def _wrap_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
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
            division = choose_division(queries, keys) if others.get("sinks") is None else None
            if division is not None:
                return attend(queries, keys, values, mask.bits, scale, division)
            mask = mask.dense
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)

    setattr(attention, _HOOKED, True)
    return attention


def choose_division(
    queries: mx.array,  # [1, H, R, Dh]; only shape and dtype count
    keys: mx.array,  # [1, Hkv, C + L, Dh]; only the shape counts
) -> Division | None:
    """The kernel's division of this attention; None for MLX's own. With "auto" a shape without a
    trial is noted for `time_pending_shape`, with "fused" the trial is made here."""
    if not is_on():
        return None
    shape = AttentionShape.of(queries.shape, keys.shape, queries.dtype)
    is_auto = _chosen == "auto"
    (division, bucket), trial = _division_and_bucket(shape), Trial(agrees=False)
    if is_supported(shape):
        if bucket not in _trials and is_auto:
            _wanted.setdefault(bucket, shape)
            return None
        trial = _trials.get(bucket) or _record_trial(bucket, shape, division)
    require(
        trial.agrees or is_auto,
        f"attention=fused, for heads of {shape.head_size} in {shape.dtype}",
        expected="head sizes that are multiples of 8 up to 128, and a GPU that runs the kernel",
        do="use attention=mlx",
    )
    return division if trial.takes_kernel or not is_auto else None


# The layers of a step ask for the same.
@lru_cache(maxsize=16)
def _division_and_bucket(shape: AttentionShape) -> tuple[Division, Bucket]:
    """The kernel's division of a shape on this chip, and the shapes that share its trial."""
    division = divide_attention(shape, this_chip())
    return division, Bucket.of(shape, division)


def trials() -> Mapping[Bucket, Trial]:
    return _trials


def time_pending_shape() -> bool:
    """Try the kernel at the shape that was noted last, and return whether there was one. To be
    called between calls: it takes some 50 ms, and longer if the kernel has to be compiled."""
    if not _wanted or not is_on():
        return False
    bucket, shape = _wanted.popitem()
    _record_trial(bucket, shape, _division_and_bucket(shape)[0])
    return True


def _record_trial(bucket: Bucket, shape: AttentionShape, division: Division) -> Trial:
    failed = any(not trial.agrees for trial in _trials.values())
    found = Trial(agrees=False) if failed else try_kernel(shape, division)
    _trials[bucket] = found
    return found
