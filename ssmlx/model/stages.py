"""The stages of an mlx-lm model: embedding, decoder layers, final norm, LM head.

mlx-lm's own layers run unchanged, and so does what a model does before and after them, to scale
embeddings or cap logits: it is called without its layers.

A model without rotary embedding adds learned positions to its embeddings (OPT, in `opt`). A node
then has its own position. A stream starts from its node's hidden state, which carries the node's
position, and gets no other: only its stream embedding says how far ahead it looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cache import TreeCache
from .family import Parts, attention_of, find_parts, language_model
from .latent import run_rows_as_texts
from .layer_state import LayerView
from .lm_head import LMHead, ScaledHead, return_input
from .masks import CausalMasks, WindowMasks
from .metal import TreeMask, all_call_mlx_attention
from .modules import copy_with_parts
from .rope import PositionedRope, Positions

# Hidden states [1, R, D] by the layer that they enter; None until a run fills them in. Of a model
# of N layers number N is the final norm's input.
LayerInputs = dict[int, mx.array | None]

# Which row sees which key: a bool array [.., R, keys], a `TreeMask` if all layers take them, or
# an object that makes such a mask for each layer's window.
Mask = mx.array | TreeMask | WindowMasks | CausalMasks


@dataclass(frozen=True, eq=False)
class CallOutput:
    """The results of a model's call on R rows, all lazy: logits that are not evaluated are never
    computed."""

    logits: mx.array  # [R, V] of the token after each row
    # [1, R, D] before the final norm; None without stages (see `taps`)
    last_hidden: mx.array | None = None
    # [1, R, D] the input of the insertion layer; None without streams
    insertion_hidden: mx.array | None = None
    stream_hidden: mx.array | None = None  # [1, R * G, D] last hidden states of streams, row by row
    taps: Mapping[int, mx.array] = field(default_factory=dict)  # by layer, its input at the R rows


class Stages:
    """An mlx-lm model whose embedding, layers, norm and head are run one after the other. Layers
    with latent attention get another class."""

    parts: Parts
    # The decoder without its layers, if it does more than look tokens up in its embedding.
    _embedder: Any = None
    # Whether the model scales or caps what its LM head returns.
    _changes_logits = False
    # Whether attention takes the mask "causal" by name: what is not mlx-lm's own may not.
    _takes_named_masks = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refresh_parts()

    def refresh_parts(self) -> None:
        """Find the parts again after modules of `model` were exchanged. Calls on two tokens find
        out what the model does before its layers and after its head."""
        self.parts = find_parts(self.model)
        run_rows_as_texts(self.parts.layers)
        self._takes_named_masks = all_call_mlx_attention(self.parts.layers)
        self._probe_embedder_and_head()

    @property
    def args(self) -> Any:
        """mlx-lm's `ModelArgs` of the model's class."""
        return self.parts.args

    @property
    def layers(self) -> list[Any]:
        return self.parts.layers

    @property
    def windows(self) -> list[int | None]:
        """The tokens that a token of each layer sees, including itself; None for all."""
        return self.parts.windows

    @property
    def final_norm(self) -> Any:
        """The norm before the LM head; None if it was not found."""
        return self.parts.final_norm

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens in the vocabulary."""
        return self.parts.vocab_size

    @property
    def embeds_positions(self) -> bool:
        """Whether positions are learned, and added to the embeddings (OPT)."""
        return self.parts.embeds_positions

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the hidden states between layers."""
        return self._embed_one_token().dtype

    @property
    def hidden_size(self) -> int:
        """D; 0 of a model that is called as a whole and does not say it."""
        return self._embed_one_token().shape[-1]

    def embed(
        self,
        tokens: mx.array,  # [R]
        positions: mx.array | None = None,  # [R]; only models that embed positions read them
    ) -> mx.array:  # [1, R, D], the input of the first layer
        embedded: mx.array
        if self._embedder is not None:
            embedded = self._embedder(tokens[None], cache=[_NoCache()] * len(self.layers))
        elif not self.embeds_positions:
            embedded = self.token_embeddings(tokens[None])
        elif positions is None:
            raise ValueError("this model adds positions to its embeddings: give them to `embed`")
        else:
            embedded = self.parts.decoder.embed_at(tokens[None], positions[None])
        return embedded

    def token_embeddings(
        self,
        tokens: mx.array,  # [...]
    ) -> mx.array:  # [..., D]
        """Rows of the embedding, neither scaled nor with positions."""
        rows: mx.array = self.parts.embedding(tokens)
        return rows

    def run(
        self,
        hidden: mx.array,  # [B, R, D] the input of layer `first`
        first: int,
        last: int,  # not included
        mask: Mask,
        views: list[LayerView],  # of these layers; as many layers run as there are views
        # set to the inputs [B, R, D] of its keys' layers, as far as these run
        tapped: LayerInputs | None = None,
    ) -> mx.array:  # [B, R, D] before the final norm
        more: dict[str, Any] = {}
        if self.parts.scales_queries:
            more["attn_scale"] = self._query_scale(hidden, views[0].offset) if views else None
        layer_mask: Any = mask
        for number, view in enumerate(views, first):
            if isinstance(mask, WindowMasks | CausalMasks):
                seen = mask.for_window(self.windows[number])
                layer_mask = seen.mask
                view = view.without_keys(seen.first_left_out, seen.end_left_out)
            if tapped is not None and number in tapped:
                tapped[number] = hidden
            hidden = self.layers[number](hidden, mask=layer_mask, cache=view, **more)
        if tapped is not None and last == len(self.layers) and last in tapped:
            tapped[last] = hidden
        return hidden

    def logits(
        self,
        hidden: mx.array,  # [1, R, D] the last layer's output
        # of some tokens, as `Backbone.draft_head` makes it; the model's own unless given
        head: LMHead | None = None,
    ) -> mx.array:  # [R, V]; [R, Vd] with a head of Vd tokens
        # Not [0], which MLX takes as a gather.
        normed = self.final_norm(hidden).squeeze(0)
        return (head or self.lm_head)(normed)

    @property
    def lm_head(self) -> LMHead:  # normed [..., D] to logits [..., V]
        """The LM head, which scales and caps logits as the model does."""
        return self._head_with_layer(None)

    def append(
        self,
        tokens: mx.array,  # [R] that follow what the cache holds
        cache: TreeCache,
        # layers whose input is wanted; the number of all layers means the final norm
        taps: Sequence[int] = (),
    ) -> CallOutput:
        """Run tokens through all layers and commit them; paths that the cache has not counted yet
        are dropped."""
        count = tokens.shape[0]
        num_layers = len(self.layers)
        if not all(0 <= layer <= num_layers for layer in taps):
            raise ValueError(f"taps at layers {list(taps)} of {num_layers}")
        cache.drop_paths()
        cache.reserve(more_tokens=count)
        views = [cache.append_view(layer) for layer in range(num_layers)]
        mask = CausalMasks(count, cache.offset, dense=not self._takes_named_masks)
        embedded = self.embed(tokens, mx.arange(count) + cache.offset)
        tapped: LayerInputs = dict.fromkeys(taps)
        hidden = self.run(embedded, 0, num_layers, mask, views, tapped)
        cache.commit_appended(count)
        return CallOutput(self.logits(hidden), hidden, taps=filled_taps(tapped))

    def _embed_one_token(self) -> mx.array:  # [1, 1, D]
        """The embedding of a token, for the shape and type of hidden states."""
        return self.embed(mx.array([0]), mx.array([0]))

    def _query_scale(
        self,
        hidden: mx.array,  # [B, R, D]
        # [R], or [B] if R is 1; or the first row's, a number or [1]
        offset: int | mx.array | Positions,
    ) -> mx.array:  # [B, 1, R, 1]; B is 1 if all texts have the same positions
        """The factors of a model that scales queries (Ministral, Mistral 4)."""
        if isinstance(offset, Positions):
            offset = offset.array
        positions = mx.array(offset).reshape(-1)
        if positions.size == 1:
            positions = positions + mx.arange(hidden.shape[1])
        # mlx-lm's own function, from the file of the layer's class.
        scale_at = type(self.layers[0]).__call__.__globals__["_get_llama_4_attn_scale"]
        rope = self.args.rope_parameters
        beta = rope["llama_4_scaling_beta"]
        original_length = rope["original_max_position_embeddings"]
        scale: mx.array = scale_at(1, positions, beta, original_length).astype(hidden.dtype)
        return scale.reshape(-1, 1, hidden.shape[1], 1)

    def _head_with_layer(
        self,
        # has a row for each token that is scored, of the kind of the model's own layer; None for
        # that
        replacement: Any,
    ) -> LMHead:  # normed [..., D] to logits [..., rows]
        head = self.parts.head
        layer = replacement or (self.parts.embedding if head is None else head)
        if not self._changes_logits:
            plain: LMHead = layer.as_linear if head is None else layer
            return plain
        body = {} if head is not None else {self.parts.embedding_name: layer}
        parts = {} if head is None else {self.parts.head_name: layer}
        outer = language_model(self.parts.outer)
        parts["model"] = copy_with_parts(outer.model, return_input, **body)
        return ScaledHead(layer, copy_with_parts(outer, **parts))

    def _probe_embedder_and_head(self) -> None:
        """Find out, on two tokens, what the model does before its layers and after its head. A
        model that embeds positions is not tried."""
        self._embedder = None
        self._changes_logits = False
        if self.embeds_positions:
            return
        tokens = mx.array([[1, 2]])
        no_norm = {self.parts.norm_name: nn.Identity()}
        embedder = copy_with_parts(self.parts.decoder, layers=[], **no_norm)
        embedded = embedder(tokens, cache=[_NoCache()] * len(self.layers))
        plain = self.token_embeddings(tokens)
        self._embedder = None if mx.array_equal(embedded, plain) else embedder
        self._changes_logits = True
        changed = self.lm_head(plain)
        self._changes_logits = False
        self._changes_logits = not mx.array_equal(changed, self.lm_head(plain))


def filled_taps(tapped: LayerInputs) -> dict[int, mx.array]:
    return {layer: rows for layer, rows in tapped.items() if rows is not None}


class _NoCache:
    """Takes the place of the layers' caches in a decoder without layers."""

    offset = 0


def wrap_ropes(stages: Stages) -> list[tuple[Any, nn.Module]]:
    """Wrap layers' rotary embeddings in place; returns the attention modules that were changed,
    with their former rotary embeddings."""
    found: list[tuple[Any, nn.Module, PositionedRope]] = []
    for layer in [] if stages.embeds_positions else stages.layers:
        attention: Any = attention_of(layer)
        rope: Any = getattr(attention, "rope", None)
        if isinstance(rope, nn.Module) and not isinstance(rope, PositionedRope):
            found.append((attention, rope, PositionedRope(rope)))
    # All are made before the first one is set: an error leaves the model as it was.
    for attention, _, positioned in found:
        attention.rope = positioned
    return [(attention, rope) for attention, rope, _ in found]
