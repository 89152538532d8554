"""The stages of an mlx-lm model: embed, decoder layers, final norm, head.

mlx-lm's own layers run unchanged, and so does what a model does before and behind them, to scale
embeddings or cap logits: it is called without its layers. What the package must know of a model is
small, and is checked when the model is wrapped: how far its layers see and, by running both on
some tokens, that the stages put together are the model. Where they are not, or a class is built
otherwise than this file takes it to be, the model decodes plainly, by its own call.

A model without rotary embedding adds learned positions to its embeddings (OPT, in `models`). A
node then has its own position. A stream starts from its node's hidden state, which carries the
node's position, and gets no other: its stream embedding alone says how far ahead it looks.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache

from ..errors import InputError, first_line, require
from .cache import StateCache, TreeCache
from .capabilities import Capabilities, Reason
from .latent import run_rows_as_texts
from .lora import EmbeddingLora, RowLora
from .masks import CausalMasks, WindowMasks
from .metal import TreeMask, calls_attention, hook_layers
from .ranks import Group, from_first
from .rope import PositionedRope, Positions
from .shapes import arrays_in, to_float, to_list

_PROBE_TOKENS = (1, 2, 3, 5, 1, 4, 2, 6, 3, 1, 5, 2)
_PROBE_WINDOW = 4
_WINDOW_NAMES = ("sliding_window", "window_size")
_NORM_NAMES = ("norm", "final_layernorm", "embedding_norm")
PACKED_KINDS = (nn.QuantizedLinear, nn.QuantizedEmbedding)
_HEAD_KINDS = (nn.Linear, nn.Embedding, *PACKED_KINDS, RowLora, EmbeddingLora)
PROBE_LENGTH = 32
_PROBE_TOLERANCE = 0.02
_DIGEST_VALUES = 64
_log = logging.getLogger("ssmlx")

LMHead = Callable[[mx.array], mx.array]
"""Normed hidden states [1, R, D] to logits [1, R, number of tokens]."""

Tapped = dict[int, mx.array | None]
"""Hidden states [1, R, D] by the layer that they enter; None until a run fills them in."""

Mask = mx.array | TreeMask | WindowMasks | CausalMasks
"""Who sees whom: a bool array [.., R, keys], a `TreeMask` where the backbone takes them, or one of
these for each layer."""


@dataclass(frozen=True, eq=False)
class Head:
    """An LM head of whose logits its model makes others: it scales them, or caps them."""

    layer: nn.Module  # with a row for each token
    model: nn.Module  # with that head, and a body that gives back what it takes

    def __call__(self, normed: mx.array) -> mx.array:
        return self.model(normed)


def with_parts(module: nn.Module, call: Any = None, **parts: Any) -> Any:
    """A module like `module`, on the same arrays, with some other parts, and maybe another call."""
    twin = copy.copy(module)
    kind = type(module)
    for name, part in parts.items():
        setattr(twin, name, part)
    if call is not None:
        twin.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return twin


def _given_back(_self: nn.Module, hidden: mx.array, *_more: Any, **_others: Any) -> mx.array:
    return hidden


def _in_float32(self: Any, tokens: mx.array) -> Any:
    kind: Any = type(self).__base__
    return kind.__call__(self, tokens).astype(mx.float32)


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
    layer = _layer_of(head)
    arrays = arrays_in(layer.parameters()) if isinstance(layer, nn.Module) else []
    return sum(array.nbytes for array in arrays)


def _layer_of(head: LMHead | None) -> Any:
    """The module that has a row for each token."""
    # A tied head is its embedding's own method.
    return head.layer if isinstance(head, Head) else getattr(head, "__self__", head)


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
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        pairs = zip_longest(self.norm_probe, other.norm_probe, fillvalue=math.nan)
        if not all(abs(a - b) <= _PROBE_TOLERANCE * max(1.0, abs(a)) for a, b in pairs):
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
        folder: where its weights were read, if they were.
    """

    name: str = "this model"
    cache_dir: str | Path | None = None
    offline: bool = False
    args: Any
    final_norm: Any = None
    layers: list[Any]
    windows: list[int | None]
    folder: Path | None = None
    _outer: Any
    _no_stages: Reason = None

    def __init__(
        self,
        model: nn.Module,
        reload: Reload | None = None,
        draft_bits: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.model = model
        self.reload = reload
        self.draft_bits = draft_bits
        self.group = group
        self.replaced: Mapping[str, nn.Module | None] = {}
        own_ropes: list[tuple[Any, nn.Module]] = []
        try:
            self._take_parts()
            self._position_ropes(own_ropes)
            mx.eval(arrays_of(model))
            self._check_stages()
        except Exception as error:  # of many kinds, where a class is built in a way of its own
            _log.debug("the stages of a model cannot be run", exc_info=True)
            for attention, rope in own_ropes:
                attention.rope = rope
            if not isinstance(error, InputError):
                error = self._unsupported(
                    f"its layers cannot be run one by one ({first_line(error)})"
                )
            self._take_whole(error.found)

    def twin(self) -> Backbone:
        """The same model with modules of its own, to be exchanged, on the very same arrays."""
        twin = copy.copy(self)
        twin.model = on_same_arrays(self.model)
        twin.take_modules()
        return twin

    def take_modules(self) -> None:
        """Know the model's modules, some of which were exchanged."""
        if self._no_stages is None:
            self._take_parts()
            return
        self._outer = self.model
        self.layers = list(getattr(self._outer, "layers", []))

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
        base.take_modules()
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
        settings = json.dumps(getattr(self.args, "__dict__", {}), sort_keys=True, default=str)
        return digest_of([(settings, mx.array(0)), *tree_flatten(self.model.parameters())])

    @property
    def hidden_size(self) -> int:
        """D."""
        return self._embed_one().shape[-1]

    @property
    def context_length(self) -> int | None:
        """Most positions that the model was made for, where its settings say."""
        return getattr(self.args, "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def final_norm_weight(self) -> mx.array:
        """[D] weight of the final norm."""
        return getattr(self.final_norm, "weight", mx.zeros(0))

    @property
    def embeds_positions(self) -> bool:
        """Whether positions are learned, and added to the embeddings."""
        return hasattr(self._decoder, "embed_at")

    def embed(self, tokens: mx.array, positions: mx.array | None = None) -> mx.array:
        """[1, R, D] embeddings of `tokens` [R] at `positions` [R], where they are embedded too."""
        if self._front is not None:
            return self._front(tokens[None], cache=[_NoCache()] * len(self.layers))
        if not self.embeds_positions:
            return self._decoder.embed_tokens(tokens[None])
        if positions is None:
            raise ValueError("this model adds positions to its embeddings: give them to `embed`")
        return self._decoder.embed_at(tokens[None], positions[None])

    def token_embeddings(self, tokens: mx.array) -> mx.array:
        """[..., D] of `tokens` [...] alone, wherever they stand, as they are stored."""
        return self._decoder.embed_tokens(tokens)

    def run(
        self,
        hidden: mx.array,
        first: int,
        last: int,
        mask: Mask,
        views: list[Any],
        tapped: Tapped | None = None,
    ) -> mx.array:
        """[1, R, D] output of layers `first` to `last` - 1 for their input `hidden`.

        `views` are the cache objects of these layers; `tapped` is filled with what enters those
        layers that are its keys.
        """
        more: dict[str, Any] = {}
        if self._scales_queries:
            more["attn_scale"] = self._query_scale(hidden, views[0].offset) if views else None
        own: Any = mask
        for number, view in enumerate(views, first):
            if isinstance(mask, WindowMasks | CausalMasks):
                own, *hidden_keys = mask.of(self.windows[number])
                view = view.without(*hidden_keys)
            if tapped is not None and number in tapped:
                tapped[number] = hidden
            hidden = self.layers[number](hidden, mask=own, cache=view, **more)
        return hidden

    def _query_scale(self, hidden: mx.array, offset: int | mx.array | Positions) -> mx.array:
        """[B, 1, R, 1] what a layer's queries are multiplied by, for where they stand."""
        if isinstance(offset, Positions):
            offset = offset.array
        places = mx.array(offset).reshape(-1)
        if places.size == 1:
            places = places + mx.arange(hidden.shape[1])
        by_length = type(self.layers[0]).__call__.__globals__["_get_llama_4_attn_scale"]
        rope = self.args.rope_parameters
        beta = rope["llama_4_scaling_beta"]
        most = rope["original_max_position_embeddings"]
        scale = by_length(1, places, beta, most).astype(hidden.dtype)
        return scale.reshape(-1, 1, hidden.shape[1], 1)

    def logits(self, hidden: mx.array, head: LMHead | None = None) -> mx.array:
        """[R, V] next-token logits of `hidden` [1, R, D], through final norm and head.

        With a `head` that `draft_head` made, the logits [R, Vd] of its tokens alone.
        """
        if self._no_stages is not None:
            return hidden.squeeze(0)
        # Not [0], which MLX takes as a gather.
        normed = self.final_norm(hidden).squeeze(0)
        return (head or self.lm_head)(normed)

    @property
    def lm_head(self) -> LMHead:
        """[..., D] to [..., V], tied, packed or plain, without the final norm before it."""
        return self._head_of(None)

    def _head_of(self, rows: Any) -> LMHead:
        """The head with these rows, or all, and with what the model makes of its logits."""
        layer = rows or (self._decoder.embed_tokens if self._head is None else self._head)
        if not self._bends_logits:
            return layer.as_linear if self._head is None else layer  # type: ignore[no-any-return]
        body = {} if self._head is not None else {"embed_tokens": layer}
        parts = {} if self._head is None else {"lm_head": layer}
        parts["model"] = with_parts(self._outer.model, _given_back, **body)
        return Head(layer, with_parts(self._outer, **parts))

    def draft_head(self, tokens: mx.array) -> LMHead:
        """The LM head of `tokens` [Vd] alone, with its own copy of their rows.

        It only guesses, so its weights may be packed to `draft_bits`: an answer does not change.
        """
        head: Any = _layer_of(self.lm_head)
        self._require_rows(head, "a draft vocabulary")
        if isinstance(head, EmbeddingLora | RowLora):
            rows: Any = head.rows(tokens)
        else:
            rows = copy.copy(head)
            for name in ("weight", "scales", "biases", "bias"):
                if head.get(name) is not None:
                    rows[name] = head[name][tokens]
        if self.draft_bits is not None:
            rows = pack_rows(rows, self.draft_bits)
        mx.eval(rows.parameters())
        return self._head_of(rows)

    def head_rows(self, tokens: mx.array) -> mx.array:
        """[..., D] unpacked weights of `tokens` [...] of the LM head."""
        layer = _layer_of(self.lm_head)
        self._require_rows(layer, "a condition")
        if isinstance(layer, EmbeddingLora | RowLora):
            return mx.unflatten(layer.rows(tokens.flatten()).weight, 0, tokens.shape)
        kind = nn.QuantizedEmbedding if isinstance(layer, PACKED_KINDS) else nn.Embedding
        return kind.__call__(layer, tokens)

    @cached_property
    def logit_scale(self) -> float:
        """What the model multiplies logits by, where they are small enough not to be capped."""
        if not self._bends_logits:
            return 1.0
        hidden = 1e-3 * mx.ones((1, self.hidden_size), self.dtype)
        layer: Any = _layer_of(self.lm_head)
        plain = (layer.as_linear if self._head is None else layer)(hidden)
        scaled = self.lm_head(hidden)
        most = mx.argmax(mx.abs(plain))
        return to_float(scaled.flatten()[most]) / to_float(plain.flatten()[most])

    def agreed(self, *arrays: mx.array) -> list[mx.array]:
        """What rank 0 has for `arrays`, where the model is split over ranks; else themselves."""
        return from_first(arrays, self.group)

    def append(self, tokens: mx.array, cache: TreeCache, tapped: Tapped | None = None) -> mx.array:
        """[1, R, D] last hidden states of `tokens` [R], which join the cache.

        Of a model that decodes plainly alone, what `logits` makes no others of. `tapped` is filled
        as by `run`.
        """
        count = tokens.shape[0]
        if tapped and not all(0 <= layer < len(self.layers) for layer in tapped):
            raise ValueError(f"taps at layers {list(tapped)} of {len(self.layers)}")
        if isinstance(cache, StateCache):
            if tapped:
                self.capabilities.require("taps", "hidden states between layers")
            cache.advance(count)
            return self._outer(tokens[None], cache=cache.own)
        cache.reserve(tokens=count)
        num_layers = len(self.layers)
        views = [cache.append_view(layer) for layer in range(num_layers)]
        mask = CausalMasks(count, cache.offset, dense=not self._takes_names)
        embedded = self.embed(tokens, mx.arange(count) + cache.offset)
        hidden = self.run(embedded, 0, num_layers, mask, views, tapped)
        cache.advance(count)
        return hidden

    def _embed_one(self) -> mx.array:
        """[1, 1, D] embedding of some token."""
        if self._no_stages is not None:
            return self._embedded
        return self.embed(mx.array([0]), mx.array([0]))

    def make_own_cache(self) -> list[Any]:
        """Caches by layer, of the model's own kinds."""
        return list(make_prompt_cache(self._outer))

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do. Batches are tried when they are first asked about."""
        reason = self._no_stages
        return Capabilities(
            stages=reason,
            taps=reason,
            trees=reason,
            chains=reason,
            try_batches=lambda: self._no_batches,
        )

    def _take_whole(self, why: str) -> None:
        """Keep to the model's own call, where there is no more to be had: `why` tells."""
        self.args = _settings_of(self._outer)
        self._outer = self.model
        try:
            logits = self._outer(mx.array([_PROBE_TOKENS]), cache=self.make_own_cache())
            self._embedded = mx.zeros((1, 1, getattr(self.args, "hidden_size", 1)), logits.dtype)
            mx.eval(logits, self._embedded, arrays_of(self.model))
        except Exception as error:  # a class of mlx-lm's raises many kinds
            raise InputError(
                f"the model type {self._type!r} does not run ({first_line(error)})",
                expected="settings and weights that its class in mlx-lm runs on",
                do="compare its config.json with the original's, or use another model",
            ) from error
        self._vocab_size = int(logits.shape[-1])
        self._no_stages = why
        self.layers = list(getattr(self._outer, "layers", []))
        self.windows = [None] * len(self.layers)

    def _require_rows(self, head: Any, taker: str) -> None:
        if not isinstance(head, _HEAD_KINDS):
            kind = type(head).__name__
            raise self._unsupported(f"its LM head is a {kind}, of which {taker} takes rows")

    @property
    def _type(self) -> str:
        return str(getattr(self.model, "model_type", type(self.model).__name__))

    def _unsupported(self, why: str) -> InputError:
        return InputError(
            f"the model type {self._type!r} cannot draft for itself: {why}",
            expected="a decoder whose layers run one by one",
            do="use such a model",
        )

    def _take_parts(self) -> None:
        # A model that also sees wraps the one that reads.
        model: Any = self.model
        self._outer = getattr(model, "language_model", model)
        inner = getattr(self._outer, "model", None)
        # What has embedding, layers and norm.
        decoder: Any = getattr(inner, "decoder", inner)
        self._decoder = decoder
        if decoder is None or not hasattr(model, "layers"):
            raise self._unsupported("it has no `model.layers`")
        if not hasattr(decoder, "embed_tokens"):
            raise self._unsupported("it has no token embedding named `embed_tokens`")
        name = next((one for one in _NORM_NAMES if hasattr(decoder, one)), None)
        if name is None:
            raise self._unsupported("it has no final norm")
        self.args = _settings_of(self._outer)
        self._vocab_size = int(self.args.vocab_size)
        self.final_norm = getattr(decoder, name)
        self._head = getattr(self._outer, "lm_head", None)
        self.layers = list(model.layers)
        self.windows = [
            self._window(layer, cache) for layer, cache in enumerate(make_prompt_cache(self._outer))
        ]
        run_rows_as_texts(self.layers)
        self._takes_names = calls_attention(self.layers)
        self._scales_queries = "attn_scale" in signature(type(self.layers[0]).__call__).parameters
        self._take_ends(name)

    def _window(self, layer: int, cache: Any) -> int | None:
        """Tokens that the layer sees, itself among them; None where it sees all."""
        if type(cache) is RotatingKVCache and cache.keep == 0:
            return int(cache.max_size)
        if type(cache) is not KVCache:
            raise self._unsupported(
                f"layer {layer} keeps its state in {type(cache).__name__}, from which rejected "
                "tokens cannot be taken back"
            )
        return None

    def _take_ends(self, norm: str) -> None:
        """What the model does before its layers and behind its head, where it does something."""
        self._front = None
        self._bends_logits = False
        if self.embeds_positions:
            return
        tokens = mx.array([[1, 2]])
        front = with_parts(self._decoder, layers=[], **{norm: nn.Identity()})
        embedded = front(tokens, cache=[_NoCache()] * len(self.layers))
        plain = self._decoder.embed_tokens(tokens)
        self._front = None if mx.array_equal(embedded, plain) else front
        self._bends_logits = True
        own = self.lm_head(plain)
        self._bends_logits = False
        self._bends_logits = not mx.array_equal(own, self.lm_head(plain))

    def _position_ropes(self, replaced: list[tuple[Any, nn.Module]]) -> None:
        """Let rotary embeddings take positions, if they can: `_check_stages` finds out.

        Each module that had one is noted in `replaced`, with what it had.
        """
        if self.embeds_positions:
            return
        for layer in self.layers:
            attention: Any = getattr(layer, "self_attn", None)
            rope: Any = getattr(attention, "rope", None)
            if isinstance(rope, nn.Module) and not isinstance(rope, PositionedRope):
                replaced.append((attention, rope))
                attention.rope = PositionedRope(rope)

    def _check_stages(self) -> None:
        """Run some tokens both ways, in float32, past windows that are made short for it."""
        probe = self._with_short_windows()
        longest = max(one or 0 for one in probe.windows)
        tokens = mx.tile(mx.array(_PROBE_TOKENS), 1 + longest // 6)[: None if longest else 6]
        caches: Any = make_prompt_cache(probe._outer)
        first = tokens.size // 2
        calls = mx.split(tokens, range(first, tokens.size) if longest else [first])
        staged = probe._tree_logits(tokens, behind=first)
        own = mx.concatenate([probe._outer(call[None], cache=caches)[0] for call in calls])
        gap = probe._gap(staged, own)
        if gap is not None:
            raise self._unsupported(
                f"embedding, layers, norm and head one by one give logits that differ by {gap:.3g} "
                "from its own"
            )

    def _with_short_windows(self) -> Backbone:
        """The same weights in float32, with windows of a few tokens where they can be set."""
        probe = copy.copy(self)
        twin: Any = on_same_arrays(self.model)
        probe.model = twin
        outer = getattr(twin, "language_model", twin)
        decoder = getattr(outer.model, "decoder", outer.model)
        short = dict.fromkeys(_WINDOW_NAMES, _PROBE_WINDOW)
        for module in (outer, decoder):
            if hasattr(module, "args"):
                module.args = copy.copy(module.args)
            for one in (module, getattr(module, "args", None)):
                for name, size in short.items():
                    if isinstance(getattr(one, name, None), int):
                        setattr(one, name, size)
        if self.dtype != mx.float32:
            decoder.embed_tokens = with_parts(decoder.embed_tokens, _in_float32)
        probe._take_parts()
        return probe

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

    @cached_property
    def _no_batches(self) -> Reason:
        """Why rows of texts of different lengths disturb each other in the model's calls."""
        if self._no_stages is not None:
            return self._no_stages
        probe = self._with_short_windows()
        tokens = mx.array(_PROBE_TOKENS)
        first = tokens.size // 2
        padding = mx.zeros(tokens.size // 2, tokens.dtype)
        rows = mx.stack([tokens, mx.concatenate([padding, tokens[first:]])])
        caches = [BatchKVCache([0, first]) for _ in self.layers]
        try:
            calls = mx.split(rows, [first, rows.shape[1] - 1], axis=1)
            both = [probe._outer(call, cache=caches)[:, -1] for call in calls][-1]
            alone = [probe._tree_logits(one)[-1] for one in (tokens, tokens[first:])]
            gap = probe._gap(both, mx.stack(alone))
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            return f"texts of different lengths cannot share a call ({first_line(error)})"
        if gap is not None:
            return (
                "texts of different lengths that share a call get logits that differ by "
                f"{gap:.3g} from their own"
            )
        return None

    def _tree_logits(
        self, tokens: mx.array, mask: mx.array | TreeMask | None = None, behind: int = 0
    ) -> mx.array:
        """[R, V] logits of a chain of `tokens` [R], run as the rows of a step.

        Those `behind` which it stands are appended before.
        """
        rows = tokens.shape[0] - behind
        num_layers = len(self.layers)
        cache = TreeCache(num_layers, scratch=rows)
        found = [self.logits(self.append(tokens[:behind], cache))] if behind else []
        positions = mx.arange(behind, tokens.shape[0])
        views = [cache.view(layer, positions) for layer in range(num_layers)]
        if mask is None:
            seen = mx.concatenate([positions, mx.arange(behind)])
            mask = positions[:, None] >= seen
        by_layer = WindowMasks(mask, positions, rows, cache)
        embedded = self.embed(tokens[behind:], positions)
        hidden = self.run(embedded, 0, num_layers, by_layer, views)
        return mx.concatenate([*found, self.logits(hidden)])


class _NoCache:
    """What a model without layers takes for their caches."""

    offset = 0


def _settings_of(model: Any) -> Any:
    """What a model was built from, by either name that mlx-lm's classes keep it under."""
    return getattr(model, "args", getattr(model, "config", None))
