"""The stream-fused model: one forward verifies the old tree and drafts the new one.

The stages are those of figures 2 and 7 of the paper; `decoding/loop.py` puts them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import require
from ..settings import STREAM_SCHEDULES, StreamConfig, StreamSchedule
from .backbone import Backbone
from .cache import RowsCache, StreamCache, TreeCache
from .condition import Condition, scale_to_unit_rms
from .latent import is_latent
from .lm_head import LMHead
from .lora import RowScope
from .masks import (
    SINKS,
    WindowMasks,
    earlier_streams_mask,
    hide_outside_window,
    stream_positions,
    stream_visibility,
    window_start,
)
from .metal import TreeMask
from .rope import Positions
from .shapes import evaluated, expect_shape, indices
from .stages import CallOutput, LayerInputs, Mask
from .state_cache import StateCache
from .text_cache import TextCache
from .tree import Tree


@dataclass(frozen=True, eq=False)
class LowRank:
    """A linear map of rank r without bias: h -> B A h."""

    a: mx.array  # [r, in]
    b: mx.array  # [D, r]

    def __call__(
        self,
        hidden: mx.array,  # [..., in]
    ) -> mx.array:  # [..., D]
        return (hidden @ self.a.T) @ self.b.T


@dataclass(frozen=True, eq=False)
class StreamWeights:
    """The weights that an adapter adds to the base model beside LoRA."""

    # [G, D] the stream identifier embeddings P_j of eq. 3; None if the rotation of
    # their values tells streams apart
    embeddings: mx.array | None
    init: LowRank | None = None  # f of eq. 3, None for identity
    # of [2 D], the root token's embedding and the normed last hidden state that predicted it;
    # None if streams start from f alone
    root_init: LowRank | None = None
    # the early-exit adapter o_theta of section 3.2.3, None without one
    prune: LowRank | None = None
    # [Vd] int32, the tokens that streams draft from, ascending; None for all
    draft_vocab: mx.array | None = None
    condition: Condition | None = None  # on the tokens drafted before; None without one

    @property
    def trainable_arrays(self) -> list[mx.array]:
        """The trained arrays, always in the same order: training and its checkpoints go by it."""
        low_rank = (self.init, self.root_init, self.prune)
        maps = [array for m in low_rank if m is not None for array in (m.a, m.b)]
        if (given := self.condition) is not None:
            maps += [given.embed, given.gate, given.out]
        return maps if self.embeddings is None else [self.embeddings, *maps]

    @property
    def num_parameters(self) -> int:
        """Trained numbers beside LoRA."""
        return sum(array.size for array in self.trainable_arrays)


class ValueRotation:
    """Tells streams apart by rotating their values: those of stream n by n times `step` (eq. 7).

    A head's feature i is the real and feature i + Dh / 2 the imaginary part of one number: the
    pairs of rotary embeddings' "rotate half". Every pair turns by the same angle.
    """

    def __init__(
        self,
        num_streams: int,  # G, the most streams
        step: float,  # radians
    ) -> None:
        angles = step * mx.arange(1, num_streams + 1)[:, None]
        self._cos = evaluated(mx.cos(angles))
        self._sin = evaluated(mx.sin(angles))

    def __call__(
        self,
        values: mx.array,  # [1, Hkv, M * (1 + G), Dh], nodes first, then streams node by node
        num_nodes: int,  # M
        num_streams: int,  # G
    ) -> mx.array:  # as `values`
        """Rotate the values of streams; those of nodes stay as they are."""
        if num_streams == 0:
            return values
        turned = self.rotate_streams(values[:, :, num_nodes:], num_streams)
        return mx.concatenate([values[:, :, :num_nodes], turned], axis=2)

    def rotate_streams(
        self,
        values: mx.array,  # [B, Hkv, M * G, Dh] of stream rows alone, node by node
        num_streams: int | None = None,  # G; as many as this was made for unless given
    ) -> mx.array:  # as `values`
        cos = self._cos[:num_streams]
        sin = self._sin[:num_streams]
        batch, num_heads, _, head_size = values.shape
        streams = values.reshape(batch, num_heads, -1, cos.shape[0], head_size)
        real, imaginary = mx.split(streams.astype(mx.float32), 2, axis=-1)
        parts = [real * cos - imaginary * sin, imaginary * cos + real * sin]
        return mx.concatenate(parts, axis=-1).astype(values.dtype).reshape(values.shape)


@dataclass(frozen=True, eq=False)
class NodeRows:
    """Positions and mask of a tree's nodes, which every lower layer needs."""

    positions: Positions  # [N]
    mask: Mask  # whom they see


class StreamFusedModel:
    """A base model with LoRA attached, and its speculative streams; read-only while it decodes.

    Without streams, `config` and `streams` are None: for plain decoding and other drafters.
    """

    def __init__(
        self,
        backbone: Backbone,  # LoRA is on its layers already
        config: StreamConfig | None = None,
        streams: StreamWeights | None = None,  # in the backbone's dtype
        scope: RowScope | None = None,  # that the attached LoRA follows
    ) -> None:
        self.backbone = backbone
        self.config = config
        self.adapter_name: str | None = "none"  # as it was asked for; None for streams of its own
        self.streams = streams
        self._scope = scope or RowScope()
        self.lora_digest: str | None = None  # of LoRA on every row, if there is any
        self.rotation: ValueRotation | None = None
        self.draft_head: LMHead | None = None  # of the draft vocabulary, if there is one
        if config is None or streams is None:
            return
        backbone.capabilities.require("stages", "an adapter")
        sizes = config.num_streams, config.hidden_size
        if config.stream_design == "value_rotation":
            require(
                not any(map(is_latent, backbone.layers)),
                "streams that are told apart by the rotation of their values, for a model whose "
                "attention keeps a latent vector in the place of values",
                expected="stream embeddings",
                do="use an adapter of the design `embeddings`",
            )
            self.rotation = ValueRotation(config.num_streams, config.rotation_step)
        elif config.has_embeddings:
            if streams.embeddings is None:
                raise ValueError(f"stream embeddings are missing, expected {sizes}")
            expect_shape("stream embeddings", streams.embeddings, *sizes)
        if streams.draft_vocab is not None:
            expect_shape("draft vocabulary", streams.draft_vocab, config.draft_vocab_size)
            self.draft_head = backbone.draft_head(streams.draft_vocab)
        if streams.condition is not None:
            backbone.head_weights(indices(1))  # refuses a head without rows

    @property
    def is_fine_tuned(self) -> bool:
        """Whether LoRA acts on every row: then its answers are not the base model's."""
        return self.lora_digest is not None

    @property
    def num_streams(self) -> int:
        """G as trained; 0 without streams."""
        return self.config.num_streams if self.config else 0

    @property
    def draft_vocab(self) -> mx.array | None:  # [Vd]
        """The tokens that streams draft from; None for the whole vocabulary."""
        return self.streams.draft_vocab if self.streams else None

    @property
    def is_conditional(self) -> bool:
        """Whether what streams draft is scored given the tokens before it."""
        return self.streams is not None and self.streams.condition is not None

    @property
    def starts_from_root(self) -> bool:
        """Whether streams start from the root too, if it is known."""
        return self.streams is not None and self.streams.root_init is not None

    @property
    def needs_root(self) -> bool:
        """Whether streams were never trained to start without the root."""
        return self.starts_from_root and not (self.config and self.config.starts_without_root)

    @property
    def schedules(self) -> tuple[StreamSchedule, ...]:
        # In the fused pass the root is not decided yet.
        return ("second-pass",) if self.needs_root else STREAM_SCHEDULES

    @property
    def draft_vocab_size(self) -> int:
        """Vd; V if streams draft from the whole vocabulary."""
        vocab = self.draft_vocab
        return self.backbone.vocab_size if vocab is None else vocab.shape[0]

    @property
    def num_layers(self) -> int:
        """N, layers of the base model."""
        return len(self.backbone.layers)

    @property
    def insertion_layer(self) -> int:
        """N - Ns, the layer before which streams are inserted."""
        return self.config.insertion_layer if self.config else self.num_layers

    def make_cache(
        self,
        # S, the most rows of a step, if known: the cache makes more room when a step needs it
        scratch: int = 0,
    ) -> TextCache:
        """An empty cache for one text."""
        if not self.backbone.capabilities.has("stages"):
            return StateCache(self.backbone.make_model_cache)
        return TreeCache(self.num_layers, scratch=scratch)

    def node_rows(self, tree: Tree, cache: TreeCache) -> NodeRows:
        """Positions and mask of nodes without streams. The mask is written into a buffer of the
        cache: it holds until the next mask of the same size."""
        key = tree.topology
        takes_bits = self._takes_bits
        mask = cache.lower_masks.step_mask(tree.ancestors, cache, key, takes_bits)
        positions = Positions(tree.depths + cache.root_position)
        return NodeRows(positions, self._mask_by_layer(mask, positions, tree.num_nodes, cache))

    def append(self, tokens: mx.array, cache: TextCache, taps: Sequence[int] = ()) -> CallOutput:
        """`Backbone.append`, with the input of the insertion layer if there are streams."""
        if not self.num_streams:
            return self.backbone.append(tokens, cache, taps)
        split = self.insertion_layer
        output = self.backbone.append(tokens, cache, [split, *taps])
        asked = {layer: output.taps[layer] for layer in taps}
        return replace(output, insertion_hidden=output.taps[split], taps=asked)

    def lower(
        self,
        tree: Tree,
        cache: TreeCache,
        nodes: NodeRows | None = None,  # this tree's `node_rows`, if they are known
        tapped: LayerInputs | None = None,  # set to the inputs [1, N, D] of its keys' layers
    ) -> mx.array:  # [1, N, D] the input of the insertion layer
        """The layers before the insertion layer (section 3.2.2, eq. 4); the cache gets the nodes'
        keys and values as scratch rows."""
        nodes = nodes or self.node_rows(tree, cache)
        views = [cache.view(layer, nodes.positions) for layer in range(self.insertion_layer)]
        hidden = self.backbone.embed(tree.tokens, nodes.positions.array)
        return self.backbone.run(hidden, 0, self.insertion_layer, nodes.mask, views, tapped)

    def early_exit_logits(
        self,
        hidden: mx.array,  # [1, R, D] the input of the insertion layer
    ) -> mx.array:  # [R, V]
        """H(o(M_l)), half-way up (section 3.2.3): the early-exit adapter's output is added to the
        states before final norm and LM head."""
        assert self.streams is not None and self.streams.prune is not None
        return self.backbone.logits(hidden + self.streams.prune(hidden))

    def condition_logits(
        self,
        normed: mx.array,  # [..., D] last hidden states of streams, after the final norm
        previous: mx.array,  # [..., K'] tokens that may come before the stream's own
        tokens: mx.array,  # [..., K] the stream's tokens whose logits are wanted
    ) -> mx.array:  # [..., K', K]
        """Terms to add to the logits of `tokens`, for each token before (`Condition`); scaled as
        the model scales its logits."""
        assert self.streams is not None and self.streams.condition is not None
        condition = self.streams.condition
        embedded = self.backbone.token_embeddings(previous)
        rows = self.backbone.head_weights(tokens)
        mixed = condition.mix(normed[..., None, :], embedded)
        scores = mixed @ (rows @ condition.out).swapaxes(-1, -2)
        scale = self.backbone.logit_scale
        return scores if scale == 1.0 else scale * scores

    def root_states(
        self,
        roots: mx.array,  # [B, M] the token after each node, the next tree's root
        last_hidden: mx.array,  # [B, M, D] the nodes' last hidden states, before the final norm
    ) -> mx.array:  # [B, M, 2 D]
        """The input of `StreamWeights.root_init`: the root's embedding, of RMS 1, then the state
        after the final norm."""
        normed = self.backbone.final_norm(last_hidden)
        embedded = scale_to_unit_rms(self.backbone.token_embeddings(roots))
        return mx.concatenate([embedded.astype(normed.dtype), normed], axis=-1)

    def insert(
        self,
        hidden: mx.array,  # [1, M, D] the nodes' rows, as they enter the insertion layer
        num_streams: int,  # G
        root_states: mx.array | None = None,  # [1, M, 2 D]
    ) -> mx.array:  # [1, M * (1 + G), D]
        """The nodes' rows, then their streams' (eq. 3)."""
        if num_streams == 0:
            return hidden
        return mx.concatenate(
            [hidden, self.start_streams(hidden, num_streams, root_states)], axis=1
        )

    def start_streams(
        self,
        hidden: mx.array,  # [B, M, D] the nodes' rows, as they enter the insertion layer
        num_streams: int,  # G, at most as many as were trained
        # [B, M, 2 D], needed if the streams start from the root
        root_states: mx.array | None = None,
    ) -> mx.array:  # [B, M * G, D], node by node
        """The streams' rows as they enter the insertion layer (eq. 3): stream j of a node h starts
        as f(h) + P_j, plus `root_init` of `root_states` if there is one."""
        assert self.streams is not None and self.config is not None
        batch, num_nodes, size = hidden.shape
        start = hidden
        if self.streams.init is not None:
            start = self.streams.init(hidden)
            if self.config.stream_init == "residual":
                start = hidden + start
        if self.needs_root and root_states is None:
            raise ValueError("these streams start from the root too, which is not known here")
        if self.streams.root_init is not None and root_states is not None:
            start = start + self.streams.root_init(root_states)
        if self.streams.embeddings is None:
            rows = mx.repeat(start, num_streams, axis=1)
        else:
            rows = start[:, :, None, :] + self.streams.embeddings[:num_streams]
        return rows.reshape(batch, num_nodes * num_streams, size).astype(hidden.dtype)

    def upper(
        self,
        rows: mx.array,  # [1, M * (1 + G), D], as `insert` gives them
        tree: Tree,  # the M nodes that are left after pruning
        cache: TreeCache,
        num_streams: int,  # G
        # this tree's `node_rows`, if they are known; used only if G is 0
        nodes: NodeRows | None = None,
        # [M] the first token after the sinks that each node's streams see
        starts: mx.array | None = None,
        # set to the inputs [1, M * (1 + G), D] of its keys' layers
        tapped: LayerInputs | None = None,
    ) -> mx.array:  # [1, M * (1 + G), D] before the final norm
        """The layers from the insertion layer on (eqs. 1 and 2); the cache gets the rows' keys and
        values as scratch rows. Nodes see the whole text, streams from `starts` on, by default
        `window_start` of the root."""
        num_nodes = tree.num_nodes
        expect_shape("upper rows", rows, 1, num_nodes * (1 + num_streams), None)
        if num_streams == 0:
            nodes = nodes or self.node_rows(tree, cache)
            views = [cache.view(n, nodes.positions) for n in self._upper_layers]
            return self._run_upper_layers(rows, nodes.mask, views, None, tapped)
        positions = Positions(stream_positions(tree.depths + cache.root_position, num_streams))
        rotate = None
        if self.rotation is not None:
            rotate = partial(self.rotation, num_nodes=num_nodes, num_streams=num_streams)
        visible = stream_visibility(tree.ancestors, num_streams)
        most = cache.offset + sum(path.length for path in cache.paths)
        if starts is None and self.window_start(cache, most) > SINKS:
            # The device knows the root's position, the host perhaps not yet.
            assert self.config is not None
            start = window_start(cache.root_position, self.config.stream_window)
            starts = mx.broadcast_to(start, (num_nodes,))
        if starts is None:
            mask = cache.upper_masks.step_mask(visible, cache, tree.topology, self._takes_bits)
        else:
            columns = cache.key_positions(positions.array)
            dense = cache.upper_masks.dense_mask(visible, cache, tree.topology)
            firsts = mx.concatenate([mx.zeros_like(starts), mx.repeat(starts, num_streams)])
            mask = hide_outside_window(dense, columns, firsts)
        views = [cache.view(n, positions, rotate) for n in self._upper_layers]
        by_layer = self._mask_by_layer(mask, positions, rows.shape[1], cache)
        return self._run_upper_layers(rows, by_layer, views, num_nodes, tapped)

    def window_start(self, cache: TreeCache, position: int | None = None) -> int:
        """`masks.window_start` of a position in the text, the end of the committed tokens unless
        given."""
        assert self.config is not None
        position = cache.offset if position is None else position
        return window_start(position, self.config.stream_window)

    def second_pass(
        self,
        hidden: mx.array,  # [1, M, D] the nodes' rows, as they entered the insertion layer
        last: mx.array,  # [1] the number of the last accepted node
        position: mx.array,  # [1] its position in the text
        cache: StreamCache,  # has caught up with the target's cache, from `window_start` on
        num_streams: int,  # G
        root_states: mx.array | None = None,  # [1, 1, 2 D] that node's
    ) -> mx.array:  # [1, G, D] before the final norm
        """The streams of the last accepted node alone through the upper layers (eq. 2), after the
        verifying pass; they see what `upper` lets them see. The cache gets their keys and values as
        scratch rows."""
        rows = self.start_streams(mx.take(hidden, last, axis=1), num_streams, root_states)
        positions = Positions(position + indices(1, 2))
        visible = earlier_streams_mask(num_streams)
        mask = cache.upper_masks.step_mask(visible, cache, num_streams, self._takes_bits)
        rotate = None
        if self.rotation is not None:
            rotate = partial(self.rotation.rotate_streams, num_streams=num_streams)
        views = [cache.view(n, positions, rotate) for n in self._upper_layers]
        by_layer = self._mask_by_layer(mask, positions, num_streams, cache)
        return self._run_upper_layers(rows, by_layer, views, 0)

    def _mask_by_layer(
        self, mask: mx.array | TreeMask, positions: Positions, num_rows: int, cache: RowsCache
    ) -> Mask:
        if not any(self.backbone.windows):
            return mask
        return WindowMasks(mask, positions.array, num_rows, cache)

    def _takes_bits(self) -> bool:
        return self.backbone.takes_tree_masks

    @property
    def _upper_layers(self) -> range:
        return range(self.insertion_layer, self.num_layers)

    def _run_upper_layers(
        self,
        rows: mx.array,  # [1, R, D]
        mask: Mask,
        views: list[Any],
        # first row that LoRA of scope "streams" acts on; None for no row
        first_lora_row: int | None,
        tapped: LayerInputs | None = None,  # set to the inputs [1, R, D] of its keys' layers
    ) -> mx.array:  # [1, R, D] before the final norm
        layers = self._upper_layers
        if self._scope.first == 0:  # LoRA acts on every row
            return self.backbone.run(rows, layers.start, layers.stop, mask, views, tapped)
        with self._scope.starting_at(first_lora_row):
            return self.backbone.run(rows, layers.start, layers.stop, mask, views, tapped)
