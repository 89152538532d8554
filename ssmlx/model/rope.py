"""Rotary embeddings of rows that stand at positions of their own, and how far they reach."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

_INTERPOLATING = ("linear", "yarn", "deepseek_yarn", "telechat3-yarn")


def context_length(model: nn.Module, args: Any) -> int | None:
    """Return the most positions that a model was made for; None where its settings do not say.

    That is `max_position_embeddings`. Scaling that was added to a model's settings later may leave
    this as it was, and say by `original_max_position_embeddings` and `factor` what it is now: where
    their product is more, that is the context, if mlx-lm's class of the model scales by it.

    | kind of scaling | what mlx-lm computes | context |
    |---|---|---|
    | yarn, linear | angles, or those of low frequencies, over the factor | original times factor |
    | yarn, linear without an original length | the same, yarn's from 4,096 | as the settings say |
    | yarn, linear of a class that ignores scaling (Qwen 3 MoE) | plain angles | the same |
    | llama3, longrope, su | angles over factors that were trained | the same: it is the long one |
    | dynamic | other angles past the context's end, which kept keys do not follow | the same |
    | default, mrope, proportional | plain angles | the same |

    Args:
        model: as mlx-lm builds it.
        args: its settings, those of the language model where that is wrapped.
    """
    stated: int | None = getattr(args, "max_position_embeddings", None)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = getattr(args, name, None)
        if stated is None or not isinstance(scaling, dict):
            continue
        kind = scaling.get("type") or scaling.get("rope_type")
        factor = scaling.get("factor")
        original = scaling.get("original_max_position_embeddings")
        if kind not in _INTERPOLATING or not isinstance(original, int):
            continue
        if isinstance(factor, int | float) and stated < (longer := original * factor) < math.inf:
            stated = int(longer) if _scales_angles(model, kind, factor) else stated
    return stated


def _scales_angles(model: nn.Module, kind: str, factor: float) -> bool:
    """Whether a rotary embedding of the model is of that kind; of "linear", with that factor."""
    modules = model.modules()
    if kind == "linear":
        ropes = [one for one in modules if type(one) is nn.RoPE]
        return any(math.isclose(one.scale * factor, 1) for one in ropes)
    # mlx-lm has two classes of it, one for DeepSeek V2 alone.
    return any("Yarn" in type(one).__name__ for one in modules)


class Positions:
    """Where a step's rows stand, with the rotary angles that follow, computed once for all layers.

    Args:
        array: [R] positions; or [1], the first row's, where the others follow it.
    """

    def __init__(self, array: mx.array) -> None:
        self.array = array
        self._tables: dict[tuple[object, ...], tuple[mx.array, mx.array]] = {}

    def rotary_tables(self, rope: Any, rows: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Cosines and signed sines of the rows' rotary angles.

        They are read off the vector (1, 0) of each pair as `rope` turns it, and kept: computed once
        for all layers whose rope has the same dims, base and scale.

        Args:
            rope: an `nn.RoPE` that pairs feature i with i + Dh / 2 (not `traditional`).
            rows: R.
            dtype: of the result.

        Returns:
            [R, Dh] what each feature is multiplied by, and [R, Dh] what its partner is multiplied
            by, in the sum that is the rotated feature.
        """
        key = (rope.dims, rope.base, rope.scale, rows, dtype)
        if key not in self._tables:
            halves = mx.repeat(mx.array([1, 0], dtype), rope.dims // 2)
            shape = (1, 1, rows) if self.array.size == 1 else (rows, 1, 1)
            # A tile is a copy: MLX's CUDA kernel writes by its input's strides, 0 of a broadcast.
            vectors = mx.tile(halves, (rows, 1)).reshape(*shape, rope.dims)
            turned = rope(vectors, offset=self.array)
            cos, sin = mx.split(turned.reshape(rows, -1), 2, axis=-1)
            pair = mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
            self._tables[key] = pair
        return self._tables[key]


def is_one_kernel() -> bool:
    """Whether `mx.fast.rope` is one kernel here: on the CPU it is twenty, most for the same
    angles."""
    return mx.default_device() == mx.gpu


class PositionedRope(nn.Module):
    """A rotary embedding that also takes one position a row.

    `mx.fast.rope` takes one offset a batch row, so rows become the batch for the call.

    Args:
        rope: a rotary embedding of mlx-lm's. One that changes angles past the context's end is
            replaced by a plain one: nothing is answered there.
    """

    def __init__(self, rope: nn.Module) -> None:
        """Wrap `rope`; one that changes angles past the context's end becomes a plain `nn.RoPE`."""
        super().__init__()
        if isinstance(rope, DynamicNTKScalingRoPE):
            # It turns by other angles past the context's end alone, where nothing is answered.
            rope = nn.RoPE(rope.dims, rope.traditional, rope.base)
        self.rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array | Positions = 0) -> mx.array:
        """Rotate queries or keys by their rows' positions in the text.

        Args:
            x: [B, H, R, Dh].
            offset: the first row's position, which the others follow: a number or [1] for all
                texts, or [B] where B is not 1. Or the position of every row: [R] where B is 1, or
                [B, R]. `Positions` stand for their array; on the CPU their tables are used.

        Returns:
            The same shape.
        """
        rope: Any = self.rope
        if isinstance(offset, Positions):
            is_plain = type(rope) is nn.RoPE and not rope.traditional and rope.dims == x.shape[-1]
            if is_plain and not is_one_kernel():
                own, partners = offset.rotary_tables(rope, x.shape[2], x.dtype)
                real, imaginary = mx.split(x, 2, axis=-1)
                return x * own + mx.concatenate([imaginary, real], axis=-1) * partners
            offset = offset.array
        turned: mx.array
        if isinstance(offset, int) or offset.shape == (1,) or offset.shape == x.shape[:1]:
            turned = rope(x, offset=offset)
            return turned
        if offset.ndim == 1:
            turned = rope(x.transpose(2, 1, 0, 3), offset=offset)
            return turned.transpose(2, 1, 0, 3)
        batch, heads, rows, size = x.shape
        folded = x.transpose(0, 2, 1, 3).reshape(batch * rows, heads, 1, size)
        turned = rope(folded, offset=offset.flatten())
        return turned.reshape(batch, rows, heads, size).transpose(0, 2, 1, 3)
