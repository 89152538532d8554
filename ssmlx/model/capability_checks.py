"""Trials of a model's abilities: a few tokens run through its stages and through itself.

If both give the same logits, the stages are the model. That is tried when a model is loaded, in
float32 and past windows that are made short for it, so that it takes a few calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache

from ..errors import InputError, first_line
from .cache import TreeCache
from .capabilities import Reason
from .family import WINDOW_NAMES, make_caches, model_type, no_stages_error
from .masks import WindowMasks
from .metal import TreeMask, hook_layers
from .modules import clone_sharing_arrays
from .shapes import to_float
from .stages import Stages
from .state_cache import StateCache

CHECK_TOKENS = (1, 2, 3, 5, 1, 4, 2, 6, 3, 1, 5, 2)
_WRONG_TOKENS = (6, 1, 6, 2)  # that do not follow in `CHECK_TOKENS`
_CHECK_WINDOW = 4


def check_stages(stages: Stages) -> None:
    """The stages one by one must give the logits of the model's own call, but for float32 rounding.

    Half of the tokens are appended to the cache, the other half run as the rows of one step. Errors
    of the model's own class are not caught. Waits for the device.
    """
    tried = _float32_with_short_windows(stages)
    longest = max(window or 0 for window in tried.windows)
    tokens = mx.tile(mx.array(CHECK_TOKENS), 1 + longest // 6)[: None if longest else 6]
    caches = make_caches(tried.model)
    first = tokens.size // 2
    # Past a window a token at a time: so mlx-lm's rotating cache is right.
    calls = mx.split(tokens, range(first, tokens.size) if longest else [first])
    staged = chain_logits(tried, tokens, num_appended=first)
    own = mx.concatenate([tried.parts.outer(call[None], cache=caches)[0] for call in calls])
    difference = _unexplained_difference(staged, own, tried.dtype)
    if difference is not None:
        raise no_stages_error(
            stages.model,
            f"with embedding, norm and head they give logits that differ by {difference:.3g} from "
            "its own",
        )


def try_tree_masks(stages: Stages) -> bool:
    """Whether every layer's attention takes a `metal.TreeMask`. The attention function of their
    modules is replaced for it, for the whole process and for good, if `metal.hook_layers` can."""
    tokens = mx.array(CHECK_TOKENS)
    if not hook_layers(stages.layers):
        return False
    expected = chain_logits(stages, tokens)
    visible = mx.tri(tokens.size, dtype=mx.bool_)
    try:
        logits = chain_logits(stages, tokens, TreeMask(visible, lambda: visible))
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError):
        return False
    return _unexplained_difference(logits, expected, stages.dtype) is None


def try_batches(stages: Stages) -> Reason:
    """Find out why texts of different lengths cannot share a call, if so: two run in shared calls,
    the shorter one padded in front, and each alone. Waits for the device."""
    tried = _float32_with_short_windows(stages)
    tokens = mx.array(CHECK_TOKENS)
    first = tokens.size // 2
    padding = mx.zeros(tokens.size // 2, tokens.dtype)
    rows = mx.stack([tokens, mx.concatenate([padding, tokens[first:]])])
    caches = [BatchKVCache([0, first]) for _ in stages.layers]
    try:
        calls = mx.split(rows, [first, rows.shape[1] - 1], axis=1)
        both = [tried.parts.outer(call, cache=caches)[:, -1] for call in calls][-1]
        alone = [chain_logits(tried, text)[-1] for text in (tokens, tokens[first:])]
        difference = _unexplained_difference(both, mx.stack(alone), tried.dtype)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        return f"texts of different lengths cannot share a call ({first_line(error)})"
    if difference is None:
        return None
    return (
        "texts of different lengths that share a call get logits that differ by "
        f"{difference:.3g} from their own"
    )


def try_chains(
    model: nn.Module,  # `recurrent.hook_recurrences` has seen it
    make_model_cache: Callable[[], list[Any]],
    dtype: mx.Dtype,  # of its own logits, for how far these may differ by rounding
) -> Reason:
    """Find out why rejected tokens cannot be taken back, if so, from what a model without stages
    keeps. `CHECK_TOKENS` run in pieces, as chains with wrong tokens after them, and in one call.
    Waits for the device."""
    tried: Any = clone_sharing_arrays(model)
    _let_embeddings_return_float32(tried)
    tokens = mx.array(CHECK_TOKENS)
    wrong = mx.array(_WRONG_TOKENS)
    cache = StateCache(make_model_cache)
    try:
        expected = tried(tokens[None], cache=make_model_cache())
        found = [cache.append(tried, tokens[:3])]
        for num_rows, num_accepted in ((6, 2), (2, 1), (4, 4)):
            right = tokens[cache.offset : cache.offset + num_accepted]
            chain = mx.concatenate([right, wrong])[:num_rows]
            found.append(cache.verify(tried, chain)[:, :num_accepted])
            cache.commit_accepted(num_accepted)
        found.append(cache.append(tried, tokens[cache.offset :]))
        logits = mx.concatenate(found, axis=1)
        # A model may rule tokens out: minus infinity in both.
        known = mx.isfinite(expected) | (logits != expected)
        difference = _unexplained_difference(
            mx.where(known, logits, 0), mx.where(known, expected, 0), dtype
        )
    except Exception as error:  # a class of mlx-lm's raises many kinds
        why = first_line(error)
    else:
        if difference is None:
            return None
        why = f"after them its logits differ by {difference:.3g} from a whole text's"
    return f"the model type {model_type(model)!r} cannot take back rejected tokens: {why}"


def try_last_hidden(
    stages: Stages,
    norm_inputs: list[mx.array],  # what entered the final norm in one call
    logits: mx.array,  # [1, R, V] of this call
) -> Reason:
    """Find out why a model without stages cannot give its last hidden states, if so. Waits for the
    device."""
    try:
        if stages.final_norm is None:
            why = "its final norm was not found"
        elif len(norm_inputs) != 1:
            why = f"its final norm runs {len(norm_inputs)} times in a call"
        else:
            own = stages.lm_head(stages.final_norm(norm_inputs[0][:, -1:]))
            difference = _unexplained_difference(own, logits[:, -1:], logits.dtype)
            if difference is None:
                return None
            why = f"final norm and head give logits that differ by {difference:.3g} from its own"
    except Exception as error:  # a class of mlx-lm's raises many kinds
        why = first_line(error)
    return f"the last hidden states of {model_type(stages.model)!r} cannot be had: {why}"


def chain_logits(
    stages: Stages,
    tokens: mx.array,  # [T] the text
    # [R, R + num_appended], R the rows of the step; causal unless given
    mask: mx.array | TreeMask | None = None,
    num_appended: int = 0,  # of the first tokens, before the step
) -> mx.array:  # [T, V], including the appended tokens
    """Logits of a text whose tokens run through the stages as the rows of one step."""
    num_rows = tokens.shape[0] - num_appended
    num_layers = len(stages.layers)
    cache = TreeCache(num_layers, scratch=num_rows)
    found = []
    if num_appended:
        found.append(stages.append(tokens[:num_appended], cache).logits)
    positions = mx.arange(num_appended, tokens.shape[0])
    views = [cache.view(layer, positions) for layer in range(num_layers)]
    if mask is None:
        key_positions = mx.concatenate([positions, mx.arange(num_appended)])
        mask = positions[:, None] >= key_positions
    by_layer = WindowMasks(mask, positions, num_rows, cache)
    embedded = stages.embed(tokens[num_appended:], positions)
    hidden = stages.run(embedded, 0, num_layers, by_layer, views)
    return mx.concatenate([*found, stages.logits(hidden)])


def _float32_with_short_windows(stages: Stages) -> Stages:
    """A copy on the same arrays, with windows of `_CHECK_WINDOW` tokens. Weights stay as they are
    stored; what the embedding looks up is cast, and all layers follow."""
    twin: Any = clone_sharing_arrays(stages.model)
    outer = getattr(twin, "language_model", twin)
    decoder = getattr(outer.model, "decoder", outer.model)
    for module in (outer, decoder):
        if hasattr(module, "args"):
            module.args = copy.copy(module.args)
        for holder in (module, getattr(module, "args", None)):
            for name in WINDOW_NAMES:
                if isinstance(getattr(holder, name, None), int):
                    setattr(holder, name, _CHECK_WINDOW)
    _let_embeddings_return_float32(twin)
    return Stages(twin)


def _let_embeddings_return_float32(model: nn.Module) -> None:
    """Give each embedding, in place, a class that returns float32."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"__call__": _embed_in_float32})


def _embed_in_float32(self: Any, tokens: mx.array) -> mx.array:
    original: Any = type(self).__base__
    embedded: mx.array = original.__call__(self, tokens)
    return embedded.astype(mx.float32)


def _unexplained_difference(logits: mx.array, expected: mx.array, dtype: mx.Dtype) -> float | None:
    """The largest difference, or None if rounding explains it: at most a thousandth of the largest
    expected logit (or of 1) if `dtype` is float32, a tenth for other types. Waits for the
    device."""
    expected = expected.astype(mx.float32)
    difference = to_float(mx.abs(logits.astype(mx.float32) - expected).max())
    tolerance = 1e-3 if dtype == mx.float32 else 0.1
    largest = max(1.0, to_float(mx.abs(expected).max()))
    return None if difference <= tolerance * largest else difference
