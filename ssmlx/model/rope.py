"""Rotary settings, how far a model reaches, and rotary embeddings at a position for each row."""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from transformers import CONFIG_MAPPING

# Scaling that was added to a model later may leave the number of positions as it was. If the
# original number times the factor is more, that is the context, for these kinds, and provided that
# mlx-lm's class of the model scales by it:
#
# | kind of scaling | what mlx-lm computes | context |
# |---|---|---|
# | yarn, linear | angles, or those of low frequencies, over the factor | original times factor |
# | yarn, linear without an original length | the same, yarn's from 4,096 | as the settings say |
# | yarn, linear of a class that ignores scaling (Qwen 3 MoE) | plain angles | the same |
# | llama3, longrope, su | angles over factors that were trained | the same: it is the long one |
# | dynamic | other angles past the context's end, which kept keys do not follow | the same |
# | default, mrope, proportional | plain angles | the same |
_INTERPOLATING = ("linear", "yarn", "deepseek_yarn", "telechat3-yarn")
# What families call the most positions in config.json; the largest counts, as some models were
# extended by a second one.
_LENGTHS = (
    "max_position_embeddings", "max_sequence_length", "max_seq_len", "max_context_length",
    "model_max_length",
)  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")
_OF_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def rope_settings(
    config: Mapping[str, Any],  # the content of config.json
) -> dict[str, Any]:
    """The changes to a config.json by which every mlx-lm class reads its rotary settings.

    transformers 5 nests them under `rope_parameters`, which some of mlx-lm's classes ignore; for
    models whose sliding layers turn by other angles, once more by kind of layer. There the classes
    have one setting for each kind: `rope_theta` and `rope_scaling` of full attention,
    `rope_local_base_freq` of sliding attention. What is nested takes precedence over what is beside
    it, except for a `rope_scaling` that was added, as in transformers.
    """
    settings: dict[str, Any] = {}
    inner = config.get("text_config")
    if isinstance(inner, dict) and (of_text := rope_settings(inner)):
        settings["text_config"] = {**inner, **of_text}
    nested = config.get("rope_parameters")
    nested = nested if isinstance(nested, dict) else {}
    by_kind = {kind: one for kind in _KINDS if isinstance(one := nested.get(kind), dict)}
    if by_kind:
        full, sliding = (by_kind.get(kind, {}) for kind in _KINDS)
        # The share of features that turn stays nested: classes that have one read it by kind.
        nested = {name: one for name, one in full.items() if name != "partial_rotary_factor"}
        if sliding.get("rope_theta") is not None:
            settings["rope_local_base_freq"] = sliding["rope_theta"]
    for name, of_gpt_neox in _OF_GPT_NEOX.items():
        if nested.get(name) is not None:
            own_name = of_gpt_neox if config.get("model_type") == "gpt_neox" else name
            settings[own_name] = nested[name]
    scaling = config.get("rope_scaling") or nested
    if isinstance(scaling, dict) and scaling:
        settings["rope_scaling"] = _scaling_by_both_names(scaling)
    return settings


def _scaling_by_both_names(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    rest = {name: value for name, value in scaling.items() if name != "rope_theta"}
    return None if kind == "default" else {**rest, "type": kind, "rope_type": kind}


def context_length(
    model: nn.Module,
    args: Any,
    # the content of its config.json; empty if it was built of `args` alone
    config: Mapping[str, Any],
) -> int | None:
    """Most positions that a model was made for; None if its settings do not say, or if it has only
    recurrent layers, which no number of positions bounds."""
    if all(isinstance(one, ArraysCache) for one in make_prompt_cache(model)):
        return None
    inner = config.get("text_config")
    stated = {**config, **(inner if isinstance(inner, dict) else {})}
    built = getattr(args, "__dict__", {})
    # What config.json leaves out is the default of the class in transformers, or else of mlx-lm's.
    lengths = _lengths(stated) or _lengths(_defaults(stated.get("model_type"))) or _lengths(built)
    scaling = rope_settings(stated or built).get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if kind in _INTERPOLATING and isinstance(factor, int | float) and isinstance(original, int):
        is_finite = original * factor < math.inf
        if is_finite and _scales_angles(model, kind, factor):
            lengths.append(int(original * factor))
    return max(lengths, default=None)


def _lengths(settings: Mapping[str, Any]) -> list[int]:
    """The context lengths that settings name, in tokens; empty if they name none."""
    # `n_positions` counts alone: it is the length of a table of learned positions.
    names = ("n_positions",) if settings.get("n_positions") else _LENGTHS
    values: list[Any] = [settings.get(name) for name in names]
    return [int(one) for one in values if type(one) in (int, float) and 1 <= one < math.inf]


def _defaults(model_type: Any) -> dict[str, Any]:
    """The defaults in transformers' settings of a model type."""
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    kind = CONFIG_MAPPING[model_type] if is_known else None
    return {name: getattr(kind, name, None) for name in _LENGTHS}


def _scales_angles(model: nn.Module, kind: str, factor: float) -> bool:
    """Whether a rotary embedding of the model is of that kind; of "linear", with that factor."""
    modules = model.modules()
    if kind == "linear":
        ropes = [one for one in modules if type(one) is nn.RoPE]
        return any(math.isclose(one.scale * factor, 1) for one in ropes)
    # mlx-lm has two classes of it, one only for DeepSeek V2.
    return any("Yarn" in type(one).__name__ for one in modules)


def keep_positions_in_table(model: nn.Module) -> None:
    """Let a table of learned positions (`wpe`) give its last row for any position past it, in
    place. No answer goes so far, but drafted tokens may, and MLX would read past the table."""
    for module in model.modules():
        table = module.get("wpe")
        if isinstance(table, nn.Module):
            table.__class__ = _bounded_class(type(table))


def _bounded_class(kind: Any) -> Any:
    def look_up(self: Any, positions: mx.array) -> mx.array:
        rows: mx.array = kind.__call__(self, mx.minimum(positions, self.weight.shape[0] - 1))
        return rows

    return type(kind.__name__, (kind,), {"__call__": look_up})


class Positions:
    """The positions of a step's rows, with their rotary angles, computed once for all layers."""

    def __init__(
        self,
        array: mx.array,  # [R]; or [1], the first row's, if the others follow it
    ) -> None:
        self.array = array
        self._tables: dict[tuple[object, ...], tuple[mx.array, mx.array]] = {}

    def rotary_tables(
        self,
        rope: Any,  # an `nn.RoPE` that pairs feature i with i + Dh / 2 (not `traditional`)
        rows: int,  # R
        dtype: mx.Dtype,
    ) -> tuple[mx.array, mx.array]:
        """Cosines and signed sines, [R, Dh] each: what a feature and its partner are multiplied by.
        They are read off the vector (1, 0) of each pair as `rope` turns it."""
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
    """A rotary embedding that also takes one position a row: `mx.fast.rope` takes one offset a
    batch row, so rows become the batch for the call."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        if isinstance(rope, DynamicNTKScalingRoPE):
            # It turns by other angles only past the context's end, where nothing is answered.
            rope = nn.RoPE(rope.dims, rope.traditional, rope.base)
        self.rope = rope

    def __call__(
        self,
        x: mx.array,  # [B, H, R, Dh]
        # the first row's: a number or [1], or [B] unless B is 1; or every row's: [R] if B is 1, or
        # [B, R]
        offset: int | mx.array | Positions = 0,
    ) -> mx.array:  # [B, H, R, Dh]
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
