"""How a step comes to the fused kernel: the switch, its mask as bits, and the hook in the layers.

mlx-lm's attention modules call `scaled_dot_product_attention` by a name of their own module. That
name is replaced by a function that looks at the mask: a `TreeMask` is ours, everything else goes
to the original as it came. So other users of the same module notice nothing.
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
_chosen: Attention = "auto"
"""Of the whole process, as the functions are that `hook_layers` replaces. Tests reset it by
`choose_attention("auto")`."""
_trials: dict[Bucket, Trial] = {}
"""What was timed on this chip, whatever model asked. Tests clear it."""
_wanted: dict[Bucket, AttentionShape] = {}
"""Shapes that wait for their trial, between two calls of any answer. Tests clear it."""


def is_available() -> bool:
    """Whether kernels can run: MLX has Metal here, and works on the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def choose_attention(attention: Attention) -> None:
    """Choose what computes the attention of tree and stream rows, in this process, from the next
    step on.

    Args:
        attention: "auto", the fused kernel at the shapes where `time_pending_shape` found it right
            and clearly faster; "mlx", never; "fused", wherever its head sizes allow. Without Metal,
            "auto" is "mlx".

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


def chosen_attention() -> Attention:
    """What `choose_attention` chose last; "auto" at first."""
    return _chosen


def is_on() -> bool:
    """Whether the fused kernel may be used at all."""
    return _chosen != "mlx" and is_available()


class TreeMask:
    """A step's mask in both forms; each is made when the first layer asks for it.

    Args:
        visible: [R, C] bool, which row sees which of the first C keys; all see the others.
        dense: gives the bool mask [R, C + L], for layers that MLX's kernels serve.
    """

    def __init__(self, visible: mx.array, dense: Callable[[], mx.array]) -> None:
        self.visible = visible
        self._dense = dense

    @cached_property
    def bits(self) -> mx.array:
        """[R, W] uint32; see `pack_bits`."""
        return pack_bits(self.visible)

    @cached_property
    def dense(self) -> mx.array:
        """[R, C + L] bool."""
        return self._dense()


def all_call_mlx_attention(layers: Iterable[Any]) -> bool:
    """Whether the attention of all `layers` can be hooked, see `hook_layers`.

    That is so where the class of each layer's attention has a Python `__call__` that uses a
    global `scaled_dot_product_attention` of its own file, as mlx-lm's classes do. Nothing is
    changed or run. True where there are no layers.
    """
    calls: list[Any] = [type(attention_of(layer)).__call__ for layer in layers]
    codes = (getattr(call, "__code__", None) for call in calls)
    return all(
        code is not None and _NAME in code.co_names and _NAME in call.__globals__
        for call, code in zip(calls, codes, strict=True)
    )


def hook_layers(layers: Iterable[Any]) -> bool:
    """Let the attention of `layers` take a `TreeMask` as its mask.

    In the Python files of their attention classes, the global `scaled_dot_product_attention` is
    replaced for the whole process, for good, and once: other models of the same classes are changed
    too. Masks of other kinds go to the original.

    Returns:
        Whether all layers can, see `all_call_mlx_attention`. Nothing is replaced where one cannot.
    """
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
    """Make a function like mlx-lm's attention `original` that also takes a `TreeMask` as its mask.

    Under a `TreeMask` it runs the fused kernel where `kernel_division_if_used` gives a division and
    there are no attention sinks (the argument `sinks`); else `original` with the mask's dense form.
    Any other mask goes to `original` as it came.
    """

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
        """mlx-lm's attention, [1, H, R, Dh]; a `TreeMask` goes to the fused kernel, or becomes
        dense.
        """
        if isinstance(mask, TreeMask):
            division = (
                kernel_division_if_used(queries, keys) if others.get("sinks") is None else None
            )
            if division is not None:
                return attend(queries, keys, values, mask.bits, scale, division)
            mask = mask.dense
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)

    setattr(attention, _HOOKED, True)
    return attention


def kernel_division_if_used(queries: mx.array, keys: mx.array) -> Division | None:
    """Decide whether the fused kernel computes an attention, and how it divides the work.

    With "auto" the kernel is used where a trial at such a shape found it right and clearly faster;
    a shape without a trial is noted for `time_pending_shape`. With "fused" the trial is made here,
    unless there was one, and the kernel is used where its values are right, however fast it is.

    Args:
        queries: [1, H, R, Dh]; only its shape and dtype count.
        keys: [1, Hkv, C + L, Dh]; only its shape counts.

    Returns:
        The kernel's division; None for MLX's own attention, also where the kernel is off.

    Raises:
        InputError: with "fused", a shape that the kernel cannot do, or a GPU where its values are
            not right.
    """
    if not is_on():
        return None
    shape = AttentionShape.of(queries.shape, keys.shape, queries.dtype)
    is_auto = _chosen == "auto"
    (division, bucket), trial = _division_and_bucket(shape), Trial(agrees=False)
    if is_supported(shape):
        if bucket not in _trials and is_auto:
            _wanted.setdefault(bucket, shape)
            return None
        trial = _trials.get(bucket) or _try_kernel_and_record(bucket, shape, division)
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
    """The division of a shape on this chip, and the bucket whose trial speaks for it."""
    division = divide_attention(shape, this_chip())
    return division, Bucket.of(shape, division)


def trials() -> Mapping[Bucket, Trial]:
    """What trials found so far, by bucket of shapes."""
    return _trials


def time_pending_shape() -> bool:
    """Compare the kernel with MLX's attention at the shape that `kernel_division_if_used` noted
    last.

    The result is kept in `trials`, and the shape is no longer noted. Does nothing where no shape is
    noted or the kernel is off. For a moment when nobody waits: it takes some 50 ms, and longer
    where the kernel is compiled.

    Returns:
        Whether a shape was noted, so that the device may have worked for a trial.
    """
    if not _wanted or not is_on():
        return False
    bucket, shape = _wanted.popitem()
    _try_kernel_and_record(bucket, shape, _division_and_bucket(shape)[0])
    return True


def _try_kernel_and_record(bucket: Bucket, shape: AttentionShape, division: Division) -> Trial:
    """Try the kernel at `shape`, and keep the result in `trials` for its bucket.

    Where any trial before did not agree, the kernel is not tried: the result is one that does not
    agree.

    Returns:
        The result.
    """
    failed = any(not trial.agrees for trial in _trials.values())
    found = Trial(agrees=False) if failed else try_kernel(shape, division)
    _trials[bucket] = found
    return found
