"""The stream-fused model as a function of its trained weights, in batches, for gradients.

mlx-lm's own layers run unchanged, first on the node rows (eq. 1), then on the stream rows, which
see the keys and values of the nodes (eq. 2). So node rows are exactly what the base model computes;
streams of different anchors never see each other and run in groups, whose masks stay small.

Shapes, beside the legend of `ssmlx.model.shapes`: B examples of a batch; T node rows, its columns;
K node rows that carry streams, stream j of the m-th being row m * G + j - 1 of the streams'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..drafters.stream_drafter import DraftVocab
from ..loading.adapter import (
    StreamAdapter,
    stream_tensors,
    streams_from_tensors,
    write_adapter,
)
from ..loading.attach import require_same_base
from ..loading.files import atomic_folder
from ..loading.identity import BaseIdentity
from ..loading.lora_files import Loras, lora_tensors
from ..model.backbone import Backbone
from ..model.condition import Condition
from ..model.lm_head import LMHead
from ..model.lora import (
    LoraWeights,
    RowLora,
    RowScope,
    attach_lora,
    linear_paths,
    linear_sizes,
    split_layer_path,
)
from ..model.streams import LowRank, StreamFusedModel, StreamWeights, ValueRotation
from ..settings import StreamConfig
from .config import Part, TrainConfig
from .data import Batch
from .job import (
    require_run_has_start_shapes,
    require_same_lora_scale,
    require_same_stream_design,
    require_task_lora_kept,
)
from .objective import RECORDED_TREE_SIZES, Validation

EMBEDDING_STD = 0.02
_ANCHORS_AT_ONCE = 64

Weights = dict[str, mx.array]  # what is trained, by its name in the adapter's files


@dataclass(frozen=True, eq=False)
class Rows:
    """The positions of some rows of a batch, and the keys that they see."""

    positions: mx.array  # [B, R]
    mask: mx.array  # [B, 1, R, keys] bool, which row sees which key
    key_positions: mx.array  # [B, keys]

    def mask_in_window(self, window: int | None) -> mx.array:
        """`mask` [B, 1, R, keys] without keys that are `window` or more tokens before the row."""
        if window is None:
            return self.mask
        first = self.positions[:, None, :, None] - window + 1
        return self.mask & (self.key_positions[:, None, None] >= first)


@dataclass(frozen=True, eq=False)
class Layout:
    """The node rows of a batch, and its stream rows in groups that run one after the other."""

    tokens: mx.array  # [B, T]
    nodes: Rows  # the node rows
    # places of anchors [B, k] and their stream rows [k * G], in turn
    groups: list[tuple[tuple[mx.array, mx.array], Rows]]

    @classmethod
    def of(cls, batch: Batch, num_streams: int) -> Layout:
        """Lay out a batch; a group has the streams of at most `_ANCHORS_AT_ONCE` columns."""
        positions = mx.array(batch.positions)
        nodes = Rows(positions, mx.array(batch.causal_visible[:, None]), positions)
        cuts = range(0, batch.anchors.shape[1] if num_streams else 0, _ANCHORS_AT_ONCE)
        parts = [batch.anchors[:, first : first + _ANCHORS_AT_ONCE] for first in cuts]
        visible = batch.stream_visible
        groups = [
            (anchor_indices(part), _stream_rows(batch.positions, visible, part, num_streams))
            for part in parts
        ]
        return cls(mx.array(batch.tokens), nodes, groups)


def anchor_indices(anchors: np.ndarray) -> tuple[mx.array, mx.array]:
    """Rows [B, 1] and columns [B, k], which together index anchors [B, k] in [B, T, ...]."""
    return mx.arange(len(anchors))[:, None], mx.array(anchors)


def _stream_rows(
    positions: np.ndarray,  # [B, T] of the node rows
    visible: np.ndarray,  # [B, T, T] bool: nodes (third axis) that each node's streams see
    anchors: np.ndarray,  # [B, k] columns
    num_streams: int,  # G, of each anchor
) -> Rows:
    """Positions [B, k * G], mask [B, 1, k * G, T + k * G] of streams, anchor by anchor (eq. 2)."""
    ahead = np.arange(1, num_streams + 1, dtype=np.int32)
    texts = np.arange(len(anchors))[:, None]
    own_positions = (positions[texts, anchors, None] + ahead).reshape(len(positions), -1)
    row = np.arange(own_positions.shape[1])
    # A stream sees itself and the earlier streams of its anchor.
    siblings = (row[:, None] // num_streams == row // num_streams) & (row <= row[:, None])
    sees_nodes = np.repeat(visible[texts, anchors], num_streams, axis=1)
    sees_streams = np.broadcast_to(siblings, (len(positions), *siblings.shape))
    mask = np.concatenate([sees_nodes, sees_streams], axis=2)[:, None]
    keys = np.concatenate([positions, own_positions], axis=1)
    return Rows(mx.array(own_positions), mx.array(mask), mx.array(keys))


class _LayerCache:
    """Replaces mlx-lm's cache for one layer and one pass; holds that pass's keys and values."""

    def __init__(
        self,
        rows: Rows,  # of this pass; only their positions are used, for rotary embeddings
        nodes: _LayerCache | None = None,  # of the pass of node rows, for stream rows
        rotation: ValueRotation | None = None,  # of stream rows' values (eq. 7)
    ) -> None:
        self.offset = rows.positions
        self.kept: tuple[mx.array, mx.array] | None = None
        self._nodes = nodes
        self._rotation = rotation

    def update_and_fetch(
        self,
        keys: mx.array,  # [B, Hkv, R, Dh]
        values: mx.array,  # [B, Hkv, R, Dh]
    ) -> tuple[mx.array, mx.array]:
        """What this pass sees: [B, Hkv, R, Dh]; stream rows see T + R, nodes first."""
        if self._rotation is not None:
            values = self._rotation.rotate_streams(values)
        if self._nodes is not None:
            assert self._nodes.kept is not None, "streams ran before their nodes"
            node_keys, node_values = self._nodes.kept
            keys = mx.concatenate([node_keys, keys], axis=2)
            values = mx.concatenate([node_values, values], axis=2)
        self.kept = keys, values
        return self.kept


class LastStates(NamedTuple):
    """The last layer's output, before the final norm."""

    nodes: mx.array  # [B, T, D]
    streams: mx.array  # [B, K * G, D], anchor by anchor; [B, 0, D] without streams


class TrainedModel:
    """A base model as a function of its streams, LoRA and pruning adapter, for gradients."""

    def __init__(
        self,
        backbone: Backbone,  # its layers are changed in place
        adapter: StreamAdapter,
        part: Part | None = None,  # what `weights` has, and training changes; None for all
    ) -> None:
        require_same_base(adapter, backbone)
        self.backbone = backbone
        self.config = adapter.config
        self._adapter = adapter
        attach_lora(backbone.model, adapter.task_lora, RowScope(0), merge=True, dtype=mx.float32)
        lora = adapter.trained_lora
        self._scope = RowScope(0 if self.config.adapter_scope == "all" else None)
        backbone.replaced = attach_lora(
            backbone.model, lora, self._scope, merge=False, dtype=mx.float32, shares_products=False
        )
        backbone.refresh_parts()
        modules: Mapping[str, Any] = dict(backbone.model.named_modules())
        self._loras: dict[str, RowLora] = {path: modules[path] for path in lora}
        self._fused = StreamFusedModel(backbone, self.config, adapter.streams)
        self.draft_head = self._fused.draft_head
        self._start = trainable_weights(adapter)
        self.weights = trainable_weights(adapter, part)
        self.bind(self.weights)

    @property
    def adapter(self) -> StreamAdapter:
        """The adapter with the currently bound weights, in float32."""
        return replace_weights(self._adapter, self.weights)

    def measure_and_write(self, folder: Path, validation: Validation) -> Path:
        return measure_and_write_adapter(folder, self.adapter, validation)

    @property
    def _streams(self) -> StreamWeights:
        assert self._fused.streams is not None
        return self._fused.streams

    def bind(
        self,
        weights: Weights,  # may be traced arrays of a gradient
    ) -> None:
        """Bind weights; those that are not given return to their first values."""
        self.weights = weights
        every = {**self._start, **weights}
        for path, module in self._loras.items():
            module.lora_a = every[f"{path}.lora_a"]
            module.lora_b = every[f"{path}.lora_b"]
        vocab = self._adapter.streams.draft_vocab
        self._fused.streams = replace(streams_from_tensors(every), draft_vocab=vocab)

    def lower(self, layout: Layout) -> mx.array:
        """Compute node states [B, T, D] before the insertion layer."""
        batch, length = layout.tokens.shape
        embedded = self.backbone.embed(layout.tokens.flatten(), layout.nodes.positions.flatten())
        nodes = embedded.reshape(batch, length, -1)
        for index in range(self.config.insertion_layer):
            nodes = self._run(index, nodes, layout.nodes, _LayerCache(layout.nodes))
        return nodes

    def upper_before_norm(
        self,
        nodes: mx.array,  # [B, T, D] before the insertion layer
        layout: Layout,
        rootless: np.ndarray | None = None,  # [B, K] bool: streams without the root's term
    ) -> LastStates:
        """Run the nodes, and then their streams, from the insertion layer to the last layer."""
        started = nodes
        views = []
        for index in range(self.config.insertion_layer, self.config.num_layers):
            views.append((index, _LayerCache(layout.nodes)))
            nodes = self._run(index, nodes, layout.nodes, views[-1][1])
        streams = [nodes[:, :0]]
        for number, ((texts, anchors), rows) in enumerate(layout.groups):
            known = None
            if self._fused.starts_from_root:
                roots = layout.tokens[texts, anchors + 1]
                known = self._fused.root_states(roots, nodes[texts, anchors])
                if rootless is not None:
                    first = number * _ANCHORS_AT_ONCE
                    without = mx.array(rootless[:, first : first + _ANCHORS_AT_ONCE, None])
                    known = mx.where(without, 0, known)
            states = started[texts, anchors]
            count = self.config.num_streams
            states = self._fused.start_streams(states, count, known)
            with self._scope.starting_at(0):
                for index, view in views:
                    own = _LayerCache(rows, view, self._fused.rotation)
                    states = self._run(index, states, rows, own)
            streams.append(states)
        return LastStates(nodes, mx.concatenate(streams, axis=1))

    def early_exit(
        self,
        nodes: mx.array,  # [..., D] before the insertion layer
    ) -> mx.array:  # [..., D] before the final norm
        """Compute the early exit's states (Speculative Streaming, section 3.2.3)."""
        assert self._streams.prune is not None
        return (nodes + self._streams.prune(nodes)).astype(nodes.dtype)

    def head(self, uses_draft_head: bool) -> LMHead:
        return (self.draft_head if uses_draft_head else None) or self.backbone.lm_head

    def apply_condition(
        self,
        normed: mx.array,  # [R, D] after the final norm
        tokens: mx.array,  # [R] the token before the one that each row guesses
    ) -> mx.array:  # [R, D]
        assert self._streams.condition is not None
        correction = self._streams.condition(normed, self.backbone.token_embeddings(tokens))
        return (normed + correction).astype(normed.dtype)

    def rank_candidates(
        self,
        streams: mx.array,  # [A * G, D] before the final norm, anchor by anchor
        roots: mx.array,  # [A] the token after each anchor
        count: int,  # C, candidates of a stream
    ) -> tuple[mx.array, mx.array]:
        """Tokens [A, G, C], best first, and the log probabilities of `rank_stream_tokens`."""
        return DraftVocab(self._fused).rank_stream_tokens(streams[None], roots, count)

    def _run(self, index: int, hidden: mx.array, rows: Rows, view: Any) -> mx.array:
        mask = rows.mask_in_window(self.backbone.windows[index])
        return self.backbone.run(hidden, index, index + 1, mask, [view])


def trainable_weights(adapter: StreamAdapter, part: Part | None = None) -> Weights:
    """Float32 arrays by their names in the adapter's files, without the draft vocabulary."""
    # "streams" includes their condition and LoRA on stream rows.
    lora = adapter.stream_lora if part else adapter.trained_lora
    weights = {**stream_tensors(adapter.streams), **lora_tensors(lora)}
    weights.pop("draft_vocab", None)
    first = "condition." if part == "condition" else ""
    return {n: array.astype(mx.float32) for n, array in weights.items() if n.startswith(first)}


def replace_weights(adapter: StreamAdapter, weights: Weights) -> StreamAdapter:
    trained = adapter.trained_lora
    every = {**stream_tensors(adapter.streams), **lora_tensors(trained), **weights}
    lora = {
        path: replace(old, a=every[f"{path}.lora_a"], b=every[f"{path}.lora_b"])
        for path, old in trained.items()
    }
    return adapter.with_trained(lora, streams=streams_from_tensors(every))


def bind_adapter(
    model: TrainedModel,
    adapter: StreamAdapter,
    source: Path,  # the adapter's folder, for messages
) -> None:
    """Bind an adapter's weights; those that it lacks stay, and so does the draft vocabulary."""
    require_same_base(adapter, model.backbone)
    start_has_it = bool(adapter.task_lora)
    run_has_it = bool(model.adapter.task_lora)
    require_task_lora_kept(source, start_has_it=start_has_it, run_has_it=run_has_it)
    require_same_stream_design(source, adapter.config, model.config)
    scales = {lora.scale for lora in model.adapter.trained_lora.values()}
    for lora in adapter.trained_lora.values():
        require_same_lora_scale(source, lora.scale, max(scales, default=lora.scale))
    found = trainable_weights(adapter)
    require_run_has_start_shapes(source, found, model.weights)
    weights = {**model.weights, **found}
    mx.eval(weights)
    model.bind(weights)


def measure_and_write_adapter(
    folder: Path,  # replaced as a whole once the new one is written
    adapter: StreamAdapter,
    validation: Validation,
) -> Path:
    """Write the adapter, with the tokens per call of trees of `RECORDED_TREE_SIZES`."""
    config = replace(
        adapter.config,
        tokens_per_call=validation.tokens_per_call_by_tree_size(RECORDED_TREE_SIZES) or None,
    )
    with atomic_folder(folder) as work:
        write_adapter(work, replace(adapter, config=config))
    return folder


def add_condition_and_root_init(adapter: StreamAdapter, train: TrainConfig) -> StreamAdapter:
    """Add new weights, which change no guess; the recorded tokens per call are dropped."""
    streams = adapter.streams
    size = adapter.config.hidden_size
    condition = streams.condition or draw_condition(train, size)
    root_init = streams.root_init or draw_root_init(train, size)
    config = replace(
        adapter.config,
        condition_rank=train.condition_rank,
        root_init_rank=train.root_init_rank or 0,
        starts_without_root=adapter.config.starts_without_root or train.teaches_rootless_starts,
        tokens_per_call=None,
    )
    streams = replace(streams, condition=condition, root_init=root_init)
    return replace(adapter, config=config, streams=streams)


def draw_root_init(train: TrainConfig, hidden_size: int) -> LowRank | None:
    """Draw f's term of root token and last hidden state (eq. 3), [2 D] to [D]; zero at first."""
    rng = np.random.default_rng([train.seed, 2])
    return draw_low_rank(rng, train.root_init_rank or 0, 2 * hidden_size, hidden_size)


def draw_low_rank(rng: np.random.Generator, rank: int, inputs: int, size: int) -> LowRank | None:
    """Draw a low-rank pair whose second factor is zero."""
    return LowRank(_uniform(rng, rank, inputs, inputs), mx.zeros((size, rank))) if rank else None


def draw_condition(train: TrainConfig, hidden_size: int) -> Condition | None:
    """Draw a condition whose last factor is zero: it changes no guess until it is trained."""
    rank = train.condition_rank
    rng = np.random.default_rng([train.seed, 1])
    if not rank:
        return None
    embed, gate = (_uniform(rng, rank, hidden_size, hidden_size) for _ in range(2))
    return Condition(embed, gate, mx.zeros((hidden_size, rank)))


def _uniform(rng: np.random.Generator, rows: int, columns: int, inputs: int) -> mx.array:
    """Draw [rows, columns] float32 between -1 and 1, over the square root of `inputs`."""
    bound = inputs**-0.5
    return mx.array(rng.uniform(-bound, bound, (rows, columns)).astype(np.float32))


def new_adapter(
    backbone: Backbone,
    config: StreamConfig,
    train: TrainConfig,
    draft_vocab: np.ndarray | None,  # [Vd] int32 tokens; None for all
    task_lora: Loras | None = None,  # on every row, of the model that the streams draft for
) -> StreamAdapter:
    """Draw a new adapter, the same on every machine; zero second factors change no answer."""
    rng = np.random.default_rng(train.seed)
    size = config.hidden_size
    scale = train.lora_alpha / train.lora_rank
    embeddings = None
    if config.has_embeddings:
        drawn = EMBEDDING_STD * rng.standard_normal((config.num_streams, config.hidden_size))
        embeddings = mx.array(drawn.astype(np.float32))
    streams = StreamWeights(
        embeddings,
        draw_low_rank(rng, config.stream_init_rank, size, size),
        draw_root_init(train, size),
        draw_low_rank(rng, config.prune_rank, size, size),
        None if draft_vocab is None else mx.array(draft_vocab),
        draw_condition(train, size),
    )
    layers = range(config.insertion_layer, config.num_layers)
    modules: Mapping[str, Any] = dict(backbone.model.named_modules())
    lora = {}
    paths = linear_paths(backbone.model, layers, train.lora_modules, "correct --lora-modules")
    for path in sorted(paths, key=split_layer_path):
        out_size, in_size = linear_sizes(modules[path])
        a = _uniform(rng, in_size, train.lora_rank, in_size)
        lora[path] = LoraWeights(a, mx.zeros((train.lora_rank, out_size)), scale)
    adapter = StreamAdapter(
        config=config,
        streams=streams,
        base=BaseIdentity.of(backbone),
        lora=task_lora or {},
        base_model=config.base_model,
    )
    return adapter.with_trained(lora)
