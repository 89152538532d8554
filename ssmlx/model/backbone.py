"""The stages of an mlx-lm model: embed, decoder layers, final norm, head.

mlx-lm's own layers run unchanged. What the package must know of a model is small, and is checked
when the model is wrapped: that its cache is the plain one, that its rotary embedding takes
positions, and, by running both on a few tokens, that the stages put together are the model.

A model without rotary embedding adds learned positions to its embeddings (OPT, in `models`). A
node then has its own position. A stream starts from its node's hidden state, which carries the
node's position, and gets no other: its stream embedding alone says how far ahead it looks.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..errors import InputError, first_line, require
from .cache import TreeCache
from .metal import TreeMask, hook_layers
from .ranks import Group, from_first
from .rope import PositionedRope
from .shapes import arrays_in, to_float, to_list

# Which of them there are depends on mlx-lm's release.
_ROPE_NAMES = ("SuScaledRoPE", "Llama3RoPE", "YarnRoPE", "ProportionalRoPE")
_ROPES = (nn.RoPE, *(getattr(rope_utils, n) for n in _ROPE_NAMES if hasattr(rope_utils, n)))
_PROBE_TOKENS = (1, 2, 3)
PACKED_KINDS = (nn.QuantizedLinear, nn.QuantizedEmbedding)
_HEAD_KINDS = (nn.Linear, nn.Embedding, *PACKED_KINDS)
PROBE_LENGTH = 32
_PROBE_TOLERANCE = 0.02
_DIGEST_VALUES = 64

LMHead = Callable[[mx.array], mx.array]
"""Normed hidden states [1, R, D] to logits [1, R, number of tokens]."""


def arrays_of(model: nn.Module) -> list[mx.array]:
    """Every array of a model, such as a rotary embedding's frequencies, which count as no
    parameters."""
    held = (value for module in model.modules() for value in module.values())
    return [value for value in held if isinstance(value, mx.array)]


def on_same_arrays(model: nn.Module) -> nn.Module:
    """A copy of a model's modules, whose arrays are the very arrays of `model`."""
    twin: nn.Module = _copied(model, {})
    return twin


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """`value` with its modules copied; one that stands in two places stays one."""
    if isinstance(value, nn.Module):
        if id(value) not in copies:
            twin: Any = copy.copy(value)
            copies[id(value)] = twin
            for name, part in value.items():
                twin[name] = _copied(part, copies)
        return copies[id(value)]
    if isinstance(value, dict):
        return {name: _copied(part, copies) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part, copies) for part in value)
    return value


Reload = Callable[[Collection[str]], dict[str, nn.Module]]
"""Paths of modules to the modules as the base model has them."""


def pack_rows(layer: nn.Module, bits: int) -> nn.Module:
    """A linear layer or embedding with its weights packed to `bits` bits, mlx-lm's affine format.

    As it is where it is packed already, or no group size of MLX's divides its width.
    """
    width = int(layer.weight.shape[-1])
    sizes = [size for size in (64, 32) if width % size == 0]
    if isinstance(layer, PACKED_KINDS) or not sizes:
        return layer
    packable: Any = layer
    return packable.to_quantized(group_size=sizes[0], bits=bits)


def head_bytes(head: LMHead | None) -> int:
    """Bytes of the weights behind an LM head, such as `Backbone.draft_head` made."""
    # A tied head is its embedding's own method.
    layer = getattr(head, "__self__", head)
    arrays = arrays_in(layer.parameters()) if isinstance(layer, nn.Module) else []
    return sum(array.nbytes for array in arrays)


def digest_of(tensors: Iterable[tuple[str, mx.array]]) -> str:
    """A digest of arrays that costs milliseconds: of names, shapes, types, and some values each."""
    samples = []
    for name, array in tensors:
        stride = max(1, array.size // _DIGEST_VALUES) | 1  # odd, to meet every column
        values = array.flatten()[::stride]
        exact = values.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else values
        samples.append((f"{name} {array.dtype} {array.shape}", mx.contiguous(exact)))
    mx.eval([values for _, values in samples])
    digest = hashlib.sha256()
    for name, values in samples:
        digest.update(name.encode() + np.asarray(values).tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class BaseIdentity:
    """What tells one base model from another, in whatever precision it is stored."""

    model_type: str  # mlx-lm's name of the architecture
    num_layers: int
    hidden_size: int
    vocab_size: int
    # the first weights of its final norm, which no quantisation touches
    norm_probe: tuple[float, ...]

    @classmethod
    def of(cls, backbone: Backbone) -> BaseIdentity:
        """The identity of a loaded model."""
        probe = backbone.final_norm_weight[:PROBE_LENGTH].astype(mx.float32)
        return cls(
            str(getattr(backbone.model, "model_type", "")),
            len(backbone.layers),
            backbone.hidden_size,
            backbone.vocab_size,
            tuple(round(value, 6) for value in to_list(probe)),
        )

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> BaseIdentity:
        """The identity in the settings `values` of the file `path`."""
        base: Any = values.get("base")
        sizes = ("num_layers", "hidden_size", "vocab_size")
        try:
            probe = tuple(map(float, base["norm_probe"]))
            if not all(map(math.isfinite, probe)) or any(
                type(base[one]) is not int for one in sizes
            ):
                raise ValueError
            return cls(**{**base, "norm_probe": probe})
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise InputError(
                f"{path} does not say which base model it is for",
                expected="an entry `base`",
                do="convert it again",
            ) from error

    def require_same(self, other: BaseIdentity, found: str, *, expected: str, do: str) -> None:
        """Refuse what this is the identity of, as in "the heads belong", for the model `other`."""
        difference = self.difference(other)
        found += f" to another base model: this one has {difference}"
        require(difference is None, found, expected=expected, do=do)

    def difference(self, other: BaseIdentity) -> str | None:
        """What tells `other` apart, in words; None if they are one model."""
        for name in ("model_type", "num_layers", "hidden_size", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        pairs = zip(self.norm_probe, other.norm_probe, strict=False)
        if any(abs(a - b) > _PROBE_TOLERANCE * max(1.0, abs(a)) for a, b in pairs):
            return "other weights (its final norm differs)"
        return None


class Backbone:
    """An mlx-lm model in stages.

    Its arrays are computed when it is made, so that any thread may use it.

    Args:
        model: as `mlx_lm.load` returns it. Its layers' rotary embeddings are wrapped in place; the
            model itself works as before.
        reload: reads modules, given by path, once more as the model was loaded. Without it,
            weights that an adapter is merged into are kept beside the merged ones.
        draft_bits: bits of the weights of `draft_head`, where the head's own are not packed; None
            leaves them as they are.
        group: the ranks that the model is split over, as `ranks.shard` does it.

    Attributes:
        final_norm: what last hidden states pass before the LM head.
        replaced: the base model's modules that an attached adapter's LoRA stands in for, by path;
            None for those that `reload` gives.
        name: what the model is called.
        cache_dir: the folder that was given to keep things in; None for the user's cache folder.
        offline: whether nothing may be fetched.
        turn_opening: the tokens with which a user's turn begins, where a chat has several; none
            where nobody knows.
    """

    name: str = "this model"
    cache_dir: str | Path | None = None
    offline: bool = False
    turn_opening: tuple[int, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        reload: Reload | None = None,
        draft_bits: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.model, self.reload, self.draft_bits = model, reload, draft_bits
        self.group = group
        self.replaced: Mapping[str, nn.Module | None] = {}
        inner = getattr(model, "model", None)
        # What has embedding, layers and norm.
        self._decoder: Any = getattr(inner, "decoder", inner)
        self._take_parts()
        self._position_ropes()
        mx.eval(arrays_of(model))
        self._check_stages()

    def twin(self) -> Backbone:
        """The same model with modules of its own, to be exchanged, on the very same arrays."""
        twin = copy.copy(self)
        twin.model = on_same_arrays(self.model)
        inner: Any = twin.model.model
        twin._decoder = getattr(inner, "decoder", inner)
        twin._take_parts()
        return twin

    def base(self) -> Backbone:
        """The base model alone, of one that an adapter is attached to: a twin, or itself.

        Raises:
            InputError: weights that LoRA was merged into cannot be read again.
        """
        if not self.replaced:
            return self
        dropped = [path for path, module in self.replaced.items() if module is None]
        read = self.reload(dropped) if dropped and self.reload is not None else {}
        base = self.twin()
        base.model.update_modules(tree_unflatten([*self.kept.items(), *read.items()]))
        base.replaced = {}
        return base

    @property
    def kept(self) -> dict[str, nn.Module]:
        """Those of `replaced` that are in memory."""
        return {path: module for path, module in self.replaced.items() if module is not None}

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the activations."""
        return self._embed_one().dtype

    @cached_property
    def digest(self) -> str:
        """What tells these settings and weights from others, to reuse keys and values.

        Of the base model: it is asked for before an adapter changes layers.
        """
        settings = json.dumps(vars(self.model.args), sort_keys=True, default=str)
        return digest_of([(settings, mx.array(0)), *tree_flatten(self.model.parameters())])

    @property
    def hidden_size(self) -> int:
        """D."""
        return self._embed_one().shape[-1]

    @property
    def context_length(self) -> int | None:
        """Most positions that the model was made for, where its settings say."""
        return getattr(self.model.args, "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.model.args.vocab_size)

    @property
    def final_norm_weight(self) -> mx.array:
        """[D] weight of the final norm."""
        return self.final_norm.weight

    @property
    def embeds_positions(self) -> bool:
        """Whether positions are learned, and added to the embeddings."""
        return hasattr(self._decoder, "embed_at")

    def embed(self, tokens: mx.array, positions: mx.array | None = None) -> mx.array:
        """[1, R, D] embeddings of `tokens` [R] at `positions` [R], where they are embedded too."""
        if not self.embeds_positions:
            return self._decoder.embed_tokens(tokens[None])
        if positions is None:
            raise ValueError("this model adds positions to its embeddings: give them to `embed`")
        return self._decoder.embed_at(tokens[None], positions[None])

    def token_embeddings(self, tokens: mx.array) -> mx.array:
        """[..., D] of `tokens` [...] alone, wherever they stand."""
        return self._decoder.embed_tokens(tokens)

    def run(self, hidden: mx.array, first: int, last: int, mask: Any, views: list[Any]) -> mx.array:
        """[1, R, D] output of layers `first` to `last` - 1 for their input `hidden`.

        Args:
            mask: as mlx-lm's layers take it: None, "causal" or a bool array [R, keys]; or a
                `metal.TreeMask`, where the backbone `takes_tree_masks`.
            views: the cache object of each of these layers.
        """
        for layer, view in zip(self.layers[first:last], views, strict=True):
            hidden = layer(hidden, mask, view)
        return hidden

    def logits(self, hidden: mx.array, head: LMHead | None = None) -> mx.array:
        """[R, V] next-token logits of `hidden` [1, R, D], through final norm and head.

        With a `head` that `draft_head` made, the logits [R, Vd] of its tokens alone.
        """
        # Not [0], which MLX takes as a gather.
        normed = self.final_norm(hidden).squeeze(0)
        return (head or self.lm_head)(normed)

    @property
    def lm_head(self) -> LMHead:
        """[..., D] to [..., V], tied, packed or plain, without the final norm before it."""
        return self._decoder.embed_tokens.as_linear if self._head is None else self._head

    def draft_head(self, tokens: mx.array) -> LMHead:
        """The LM head of `tokens` [Vd] alone, with its own copy of their rows.

        It only guesses, so its weights may be packed to `draft_bits`: an answer does not change.
        """
        tied = self._head is None
        head: Any = self._decoder.embed_tokens if tied else self._head
        self._require_rows(head, "a draft vocabulary")
        rows: Any = copy.copy(head)
        for name in ("weight", "scales", "biases", "bias"):
            if head.get(name) is not None:
                rows[name] = head[name][tokens]
        if self.draft_bits is not None:
            rows = pack_rows(rows, self.draft_bits)
        mx.eval(rows.parameters())
        return rows.as_linear if tied else rows

    def head_rows(self, columns: mx.array, head: LMHead | None = None) -> mx.array:
        """[..., D] unpacked weights of `columns` [...] of the LM head, or of a `draft_head`."""
        # A tied head is its embedding's own method.
        layer: Any = getattr(head or self.lm_head, "__self__", head or self.lm_head)
        self._require_rows(layer, "a condition")
        kind = nn.QuantizedEmbedding if isinstance(layer, PACKED_KINDS) else nn.Embedding
        return kind.__call__(layer, columns)

    def agreed(self, *arrays: mx.array) -> list[mx.array]:
        """What rank 0 has for `arrays`, where the model is split over ranks; else themselves."""
        return from_first(arrays, self.group)

    def append(self, tokens: mx.array, cache: TreeCache) -> mx.array:
        """[1, R, D] last hidden states of `tokens` [R], which join the cache."""
        count = tokens.shape[0]
        cache.reserve(tokens=count)
        num_layers = len(self.layers)
        views = [cache.append_view(layer) for layer in range(num_layers)]
        mask = "causal" if count > 1 else None
        embedded = self.embed(tokens, mx.arange(count) + cache.offset)
        hidden = self.run(embedded, 0, num_layers, mask, views)
        cache.advance(count)
        return hidden

    def _embed_one(self) -> mx.array:
        """[1, 1, D] embedding of some token."""
        return self.embed(mx.array([0]), mx.array([0]))

    def _require_rows(self, head: Any, taker: str) -> None:
        if not isinstance(head, _HEAD_KINDS):
            kind = type(head).__name__
            raise self._unsupported(f"its LM head is a {kind}, of which {taker} takes rows")

    def _unsupported(self, why: str) -> InputError:
        name = getattr(self.model, "model_type", type(self.model).__name__)
        return InputError(
            f"the model type {name!r} cannot draft for itself: {why}",
            expected="a decoder of regular layers (such as Llama, Mistral, Qwen, Phi, OPT)",
            do="use such a model, or mlx-lm for this one",
        )

    def _take_parts(self) -> None:
        decoder = self._decoder
        if decoder is None or not hasattr(self.model, "layers"):
            raise self._unsupported("it has no `model.layers`")
        if not hasattr(decoder, "embed_tokens"):
            raise self._unsupported("it has no token embedding named `embed_tokens`")
        norm = getattr(decoder, "norm", None) or getattr(decoder, "final_layernorm", None)
        if norm is None:
            raise self._unsupported("it has no final norm")
        self.final_norm = norm
        self._head = getattr(self.model, "lm_head", None)
        self.layers: list[Any] = list(self.model.layers)
        for layer, cache in enumerate(make_prompt_cache(self.model)):
            if type(cache) is not KVCache:
                raise self._unsupported(
                    f"layer {layer} keeps a {type(cache).__name__} (a sliding window or a "
                    "recurrent state), from which rejected tokens cannot be taken back"
                )

    def _position_ropes(self) -> None:
        if self.embeds_positions:
            return
        for index, layer in enumerate(self.layers):
            attention: Any = getattr(layer, "self_attn", None)
            rope: Any = getattr(attention, "rope", None)
            if isinstance(rope, PositionedRope):
                continue
            if not isinstance(rope, _ROPES):
                raise self._unsupported(
                    f"layer {index} has the rotary embedding {type(rope).__name__}, which does "
                    "not take positions"
                )
            attention.rope = PositionedRope(rope)

    def _check_stages(self) -> None:
        tokens = mx.array(_PROBE_TOKENS)
        try:
            staged = self._tree_logits(tokens)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._unsupported(
                f"its layers cannot be run one by one ({first_line(error)})"
            ) from error
        gap = self._gap(staged, self.model(tokens[None])[0])
        if gap is not None:
            raise self._unsupported(
                f"embedding, layers, norm and head one by one give logits that differ by {gap:.3g} "
                "from its own (it scales embeddings or logits, or masks in its own way)"
            )

    def _gap(self, logits: mx.array, expected: mx.array) -> float | None:
        """Largest difference between two logits; None where rounding explains it."""
        expected = expected.astype(mx.float32)
        gap = to_float(mx.abs(logits.astype(mx.float32) - expected).max())
        share = 1e-3 if self.dtype == mx.float32 else 0.1
        return None if gap <= share * max(1.0, to_float(mx.abs(expected).max())) else gap

    @cached_property
    def takes_tree_masks(self) -> bool:
        """Whether every layer's attention takes a `metal.TreeMask`, tried on a few tokens.

        Their modules' attention function is replaced for it; see `metal.hook`.
        """
        tokens = mx.array(_PROBE_TOKENS)
        if not hook_layers(self.layers):
            return False
        expected = self._tree_logits(tokens)
        visible = mx.tri(tokens.size, dtype=mx.bool_)
        try:
            logits = self._tree_logits(tokens, TreeMask(visible, lambda: visible))
        except InputError:
            raise
        except (TypeError, ValueError, AttributeError):
            return False
        return self._gap(logits, expected) is None

    def _tree_logits(self, tokens: mx.array, mask: Any = None) -> mx.array:
        """[R, V] logits of a chain of `tokens` [R], run as the rows of a step."""
        rows, num_layers = tokens.shape[0], len(self.layers)
        cache = TreeCache(num_layers, scratch=rows)
        positions = mx.arange(rows)
        views = [cache.view(layer, positions) for layer in range(num_layers)]
        mask = positions[:, None] >= positions if mask is None else mask
        embedded = self.embed(tokens, positions)
        return self.logits(self.run(embedded, 0, num_layers, mask, views))
