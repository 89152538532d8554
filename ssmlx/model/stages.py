"""The stages of an mlx-lm model: embedding, decoder layers, final norm, LM head.

mlx-lm's own layers run unchanged, and so does what a model does before and behind them, to scale
embeddings or cap logits: it is called without its layers.

A model without rotary embedding adds learned positions to its embeddings (OPT, in `opt`). A
node then has its own position. A stream starts from its node's hidden state, which carries the
node's position, and gets no other: its stream embedding alone says how far ahead it looks.
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

LayerInputs = dict[int, mx.array | None]
"""Hidden states [1, R, D] by the layer that they enter; None until a run fills them in.

Of a model of N layers number N is the final norm's input."""

Mask = mx.array | TreeMask | WindowMasks | CausalMasks
"""Which row sees which key: a bool array [.., R, keys], a `TreeMask` where all layers take them, or
an object that makes such a mask for each layer's window."""


@dataclass(frozen=True, eq=False)
class CallOutput:
    """What a call of the model gives for its R rows, all of it lazy: logits that nobody evaluates
    are never computed.

    Attributes:
        logits: [R, V] of the token behind each row.
        last_hidden: [1, R, D] last hidden states, before the final norm; None of a model without
            stages, which gives them as a tap where it can.
        insertion_hidden: [1, R, D] the input of the layer before which streams are inserted; None
            without streams.
        stream_hidden: [1, R * G, D] last hidden states of the rows' streams, row by row; None where
            the call carried none.
        taps: by layer, its input at the R rows, of the layers that were asked for.
    """

    logits: mx.array
    last_hidden: mx.array | None = None
    insertion_hidden: mx.array | None = None
    stream_hidden: mx.array | None = None
    taps: Mapping[int, mx.array] = field(default_factory=dict)


class Stages:
    """An mlx-lm model whose embedding, layers, norm and head are run one after the other.

    Args:
        model: as `mlx_lm.load` returns it. Layers with latent attention get another class.

    Raises:
        InputError: the model lacks a part, or a layer keeps a state that cannot be cut back.
    """

    parts: Parts
    # The decoder without its layers, where it does more than look tokens up in its embedding.
    _embedder: Any = None
    # Whether the model scales or caps what its LM head returns.
    _changes_logits = False
    # Whether attention takes the mask "causal" by name: what is not mlx-lm's own may not.
    _takes_named_masks = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refresh_parts()

    def refresh_parts(self) -> None:
        """Find the parts of `model` again, after some of its modules were exchanged.

        Sets `parts`. Layers with latent attention get another class, in place. Calls on two tokens
        find out what the model does before its layers and behind its head.

        Raises:
            InputError: the model lacks a part, or a layer keeps a state that cannot be cut back.
        """
        self.parts = find_parts(self.model)
        run_rows_as_texts(self.parts.layers)
        self._takes_named_masks = all_call_mlx_attention(self.parts.layers)
        self._probe_embedder_and_head()

    @property
    def args(self) -> Any:
        """The settings that the model was built from: mlx-lm's `ModelArgs` of its class."""
        return self.parts.args

    @property
    def layers(self) -> list[Any]:
        """The decoder layers, from the first."""
        return self.parts.layers

    @property
    def windows(self) -> list[int | None]:
        """By layer, how many tokens a token sees, itself among them; None for all."""
        return self.parts.windows

    @property
    def final_norm(self) -> Any:
        """The norm between the last layer and the LM head; None where it was not found."""
        return self.parts.final_norm

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.parts.vocab_size

    @property
    def embeds_positions(self) -> bool:
        """Whether positions are learned, and added to the embeddings (OPT)."""
        return self.parts.embeds_positions

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the hidden states between layers."""
        return self._embed_one_token().dtype

    @property
    def hidden_size(self) -> int:
        """D; 0 of a model that is called as a whole and does not say it."""
        return self._embed_one_token().shape[-1]

    def embed(self, tokens: mx.array, positions: mx.array | None = None) -> mx.array:
        """The input of the first layer.

        Args:
            tokens: [R] their ids.
            positions: [R] int, where they stand in the text; only models that embed positions
                read them.

        Returns:
            [1, R, D], changed as the model does before its layers, such as scaled.

        Raises:
            ValueError: the model embeds positions, and none are given.
        """
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

    def token_embeddings(self, tokens: mx.array) -> mx.array:
        """[..., D] rows of the embedding for `tokens` [...], neither scaled nor with positions."""
        rows: mx.array = self.parts.embedding(tokens)
        return rows

    def run(
        self,
        hidden: mx.array,
        first: int,
        last: int,
        mask: Mask,
        views: list[LayerView],
        tapped: LayerInputs | None = None,
    ) -> mx.array:
        """Run the decoder layers from number `first` up to, not including, `last`.

        Args:
            hidden: [B, R, D] the input of layer `first`.
            first: number of the first layer.
            last: number after the last layer.
            mask: which of the R rows sees which key.
            views: for each of these layers, in order, the cache object that it is handed; it
                writes the rows' keys and values. As many layers run as there are views.
            tapped: for those of its keys that are among these layers, set to the input of that
                layer, [B, R, D]; no key is added. The number of all layers stands for the final
                norm, whose input is the last layer's output.

        Returns:
            [B, R, D] the output of the last of these layers, before the final norm.
        """
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

    def logits(self, hidden: mx.array, head: LMHead | None = None) -> mx.array:
        """Next-token logits, through final norm and LM head.

        Args:
            hidden: [1, R, D] the last layer's output.
            head: the head of some tokens alone, as `Backbone.draft_head` makes it; the model's own
                unless given.

        Returns:
            [R, V] as the model gives them; [R, Vd] with a head of Vd tokens.
        """
        # Not [0], which MLX takes as a gather.
        normed = self.final_norm(hidden).squeeze(0)
        return (head or self.lm_head)(normed)

    @property
    def lm_head(self) -> LMHead:
        """Normed hidden states [..., D] to logits [..., V], scaled and capped as the model does."""
        return self._head_with_layer(None)

    def append(self, tokens: mx.array, cache: TreeCache, taps: Sequence[int] = ()) -> CallOutput:
        """Run tokens through all layers and commit them to the cache.

        Each sees the tokens before it, as its layers' windows allow.

        Args:
            tokens: [R] that follow what the cache holds.
            cache: gets their keys and values; paths that it has not counted yet are dropped.
            taps: numbers of the layers whose input is wanted; the number of all layers stands for
                the final norm.

        Returns:
            Logits, last hidden states and taps of the R tokens.

        Raises:
            ValueError: a tap is no layer's number, and not the final norm's.
        """
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

    def _embed_one_token(self) -> mx.array:
        """[1, 1, D] embedding of some token: its shape and type are those of hidden states."""
        return self.embed(mx.array([0]), mx.array([0]))

    def _query_scale(self, hidden: mx.array, offset: int | mx.array | Positions) -> mx.array:
        """What a model that scales queries multiplies them by (Ministral, Mistral 4).

        Args:
            hidden: [B, R, D] the rows; R and the dtype are read off it.
            offset: their positions, [R], or [B] where R is 1; or the first one's, a number or [1],
                which the others follow.

        Returns:
            [B, 1, R, 1] in the dtype of `hidden`; B is 1 where all texts have the same positions.
        """
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

    def _head_with_layer(self, replacement: Any) -> LMHead:
        """The LM head, on the layer `replacement` in the place of its own; on its own where None.

        `replacement` has a row for each token that is scored, and is of the kind of the model's:
        an embedding where the head is tied, else a linear layer. The model stays as it is.

        Returns:
            A function of normed hidden states [..., D] to logits [..., number of rows]: the layer
            itself, an embedding's `as_linear`, or a `ScaledHead` where the model scales or caps
            logits.
        """
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
        """Find out, on two tokens, what the model does before its layers and behind its head.

        Sets `_embedder` to the decoder without its layers where that gives something else than the
        embedding's rows, else to None; and `_changes_logits` to whether the model's logits are
        something else than its head's. A model that embeds positions is not tried: None and False.
        """
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
    """The entries of `tapped` that a run of layers has set; layers that did not run are left
    out."""
    return {layer: rows for layer, rows in tapped.items() if rows is not None}


class _NoCache:
    """What a decoder without layers is given in the place of their caches."""

    offset = 0


def make_ropes_take_positions(stages: Stages) -> list[tuple[Any, nn.Module]]:
    """Wrap every layer's rotary embedding, in place, so that each row may have its own position.

    Returns:
        For each that was wrapped, the attention module and the rotary embedding that it had. Empty
        for a model that embeds positions; layers whose rotary embedding is wrapped already, or that
        have none as `rope` of their attention, are left out.
    """
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
