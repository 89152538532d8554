"""The stream-fused model as a function of its trained weights, in batches, for gradients.

mlx-lm's own layers run unchanged, as in `ssmlx.model.streams`. Each layer with multi-stream
attention runs on the node rows first (eq. 1), then on the stream rows, which see the keys and
values that the node rows left (eq. 2). So node rows are exactly what the base model computes, and
streams of far apart anchors, which never see each other, run in groups: their masks stay small.

Shapes, beside the legend of `ssmlx.model.shapes`:
    B   examples of a batch
    T   node rows: the batch's columns
    K   node rows that carry streams; stream j of the m-th is row m * G + j - 1 of the streams'
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
    write_adapter_in_place,
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

Weights = dict[str, mx.array]
"""What is trained, by its name in the adapter's files."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Where some rows of a batch stand, and which keys they see."""

    positions: mx.array  # [B, R]
    mask: mx.array  # [B, 1, R, keys] bool, which row sees which key
    key_positions: mx.array  # [B, keys]

    def mask_in_window(self, window: int | None) -> mx.array:
        """Return [B, 1, R, keys] bool: `mask` without the keys that stand `window` tokens or more
        before the row; `mask` itself for None.
        """
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
        """Build the layout of a batch whose anchors have `num_streams` streams each.

        A group has the streams of `_ANCHORS_AT_ONCE` anchor columns at most; without streams there
        are no groups.
        """
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
    """Return rows [B, 1] and columns [B, k], which together index anchors [B, k] in [B, T, ...]."""
    return mx.arange(len(anchors))[:, None], mx.array(anchors)


def _stream_rows(
    positions: np.ndarray, visible: np.ndarray, anchors: np.ndarray, num_streams: int
) -> Rows:
    """Return where the streams of some anchors stand, and what they see (eq. 2).

    Stream j of an anchor stands j positions further on. It sees what its anchor's streams may see
    of the nodes, and streams 1 to j of that anchor.

    Args:
        positions: [B, T] of the node rows.
        visible: [B, T, T] bool, which nodes (third axis) the streams of each node (second axis)
            see.
        anchors: [B, k] columns.
        num_streams: G, of each anchor.

    Returns:
        Rows with positions [B, k * G] and a mask [B, 1, k * G, T + k * G], anchor by anchor.
    """
    ahead = np.arange(1, num_streams + 1, dtype=np.int32)
    texts = np.arange(len(anchors))[:, None]
    own_positions = (positions[texts, anchors, None] + ahead).reshape(len(positions), -1)
    row = np.arange(own_positions.shape[1])
    siblings = (row[:, None] // num_streams == row // num_streams) & (row <= row[:, None])
    sees_nodes = np.repeat(visible[texts, anchors], num_streams, axis=1)
    sees_streams = np.broadcast_to(siblings, (len(positions), *siblings.shape))
    mask = np.concatenate([sees_nodes, sees_streams], axis=2)[:, None]
    keys = np.concatenate([positions, own_positions], axis=1)
    return Rows(mx.array(own_positions), mx.array(mask), mx.array(keys))


class _LayerCache:
    """Stands in the place of mlx-lm's cache for one layer: it keeps the keys and values of one
    pass.
    """

    def __init__(
        self, rows: Rows, nodes: _LayerCache | None = None, rotation: ValueRotation | None = None
    ) -> None:
        """Begin with nothing kept.

        Args:
            rows: of this pass; only their positions are used, for rotary embeddings.
            nodes: the cache that a pass of the node rows has filled, whose keys and values stand
                before those of stream rows; None for a pass of node rows.
            rotation: turns the values of stream rows (eq. 7); None turns none.
        """
        self.offset = rows.positions
        self.kept: tuple[mx.array, mx.array] | None = None
        self._nodes = nodes
        self._rotation = rotation

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values that the rows of this pass may see, and keep them in `kept`,
        in the place of older ones.

        Args:
            keys: [B, Hkv, R, Dh] of the rows of this pass.
            values: [B, Hkv, R, Dh] likewise; of streams, turned first where they rotate.

        Returns:
            Keys and values [B, Hkv, R, Dh]; of stream rows [B, Hkv, T + R, Dh], behind those of the
            nodes.
        """
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
    """What the last layer gives, before the final norm."""

    nodes: mx.array  # [B, T, D]
    streams: mx.array  # [B, K * G, D], anchor by anchor; [B, 0, D] without streams


class TrainedModel:
    """A base model whose streams, LoRA and pruning adapter can be replaced, so that it is a
    function of them: for gradients.
    """

    def __init__(
        self, backbone: Backbone, adapter: StreamAdapter, part: Part | None = None
    ) -> None:
        """Put LoRA on the layers of a frozen model in place, and bind the weights of an adapter, in
        float32.

        The adapter's task LoRA is merged into the layers where these are not quantised, and stays
        as it is.

        Args:
            backbone: the base model; its layers are changed.
            adapter: of this base model.
            part: which of the adapter's weights `weights` has, and training changes, see
                `trainable_weights`; None for all.

        Raises:
            InputError: the adapter is another model's.
        """
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
        self.bind_and_reset_others_to_start(self.weights)

    @property
    def adapter(self) -> StreamAdapter:
        """The adapter with the weights that are bound now, which are float32."""
        return replace_weights(self._adapter, self.weights)

    def measure_and_write(self, folder: Path, validation: Validation) -> Path:
        """Write the adapter with the weights that are bound now into a folder, see
        `measure_and_write_adapter`; return the folder.
        """
        return measure_and_write_adapter(folder, self.adapter, validation)

    @property
    def _streams(self) -> StreamWeights:
        assert self._fused.streams is not None
        return self._fused.streams

    def bind_and_reset_others_to_start(self, weights: Weights) -> None:
        """Put `weights` into the model, by their names in the adapter's files, and keep them as
        `self.weights`.

        They may be traced arrays of a gradient. Those that are not given have the values that they
        had when the model was made, not those that were bound last.
        """
        self.weights = weights
        every = {**self._start, **weights}
        for path, module in self._loras.items():
            module.lora_a = every[f"{path}.lora_a"]
            module.lora_b = every[f"{path}.lora_b"]
        vocab = self._adapter.streams.draft_vocab
        self._fused.streams = replace(streams_from_tensors(every), draft_vocab=vocab)

    def lower(self, layout: Layout) -> mx.array:
        """Return [B, T, D] node states before the insertion layer: embeddings, run through the
        frozen layers below it.
        """
        batch, length = layout.tokens.shape
        embedded = self.backbone.embed(layout.tokens.flatten(), layout.nodes.positions.flatten())
        nodes = embedded.reshape(batch, length, -1)
        for index in range(self.config.insertion_layer):
            nodes = self._run(index, nodes, layout.nodes, _LayerCache(layout.nodes))
        return nodes

    def upper_before_norm(self, nodes: mx.array, layout: Layout) -> LastStates:
        """Run node rows, and then their streams, through the layers from the insertion layer on.

        Args:
            nodes: [B, T, D] node states before the insertion layer.
            layout: of the batch.

        Returns:
            The last hidden states, to which the final norm is not applied.
        """
        started = nodes
        views = []
        for index in range(self.config.insertion_layer, self.config.num_layers):
            views.append((index, _LayerCache(layout.nodes)))
            nodes = self._run(index, nodes, layout.nodes, views[-1][1])
        streams = [nodes[:, :0]]
        for (texts, anchors), rows in layout.groups:
            known = None
            if self._fused.starts_from_root:
                roots = layout.tokens[texts, anchors + 1]
                known = self._fused.root_states(roots, nodes[texts, anchors])
            states = started[texts, anchors]
            count = self.config.num_streams
            states = self._fused.start_streams(states, count, known)
            with self._scope.starting_at(0):
                for index, view in views:
                    own = _LayerCache(rows, view, self._fused.rotation)
                    states = self._run(index, states, rows, own)
            streams.append(states)
        return LastStates(nodes, mx.concatenate(streams, axis=1))

    def early_exit(self, nodes: mx.array) -> mx.array:
        """Return node states with the pruning adapter's correction added, as the LM head takes them
        behind the final norm (Speculative Streaming, section 3.2.3).

        Args:
            nodes: [..., D] states before the insertion layer.

        Returns:
            [..., D] in the same dtype, before the final norm.
        """
        assert self._streams.prune is not None
        return (nodes + self._streams.prune(nodes)).astype(nodes.dtype)

    def head(self, uses_draft_head: bool) -> LMHead:
        """Return the draft head where it is asked for and there is one, else the LM head."""
        return (self.draft_head if uses_draft_head else None) or self.backbone.lm_head

    def apply_condition(self, normed: mx.array, tokens: mx.array) -> mx.array:
        """Return final-normed stream rows with what the tokens before their guesses tell them
        added.

        Args:
            normed: [R, D] rows behind the final norm.
            tokens: [R] ids, of each row the token before the one that it guesses.

        Returns:
            [R, D] in the dtype of `normed`.
        """
        assert self._streams.condition is not None
        correction = self._streams.condition(normed, self.backbone.token_embeddings(tokens))
        return (normed + correction).astype(normed.dtype)

    def rank_candidates(
        self, streams: mx.array, roots: mx.array, count: int
    ) -> tuple[mx.array, mx.array]:
        """Return the `count` likeliest draft tokens of each stream, and their log probabilities.

        Args:
            streams: [A * G, D] hidden states before the final norm, anchor by anchor.
            roots: [A] the token after each anchor.
            count: C, candidates of a stream.

        Returns:
            Tokens [A, G, C], best first, and log probabilities: [A, G, C], or [A, G, C, C] given
            each candidate of the stream before where there is a condition; see
            `DraftVocab.rank_stream_tokens`.
        """
        return DraftVocab(self._fused).rank_stream_tokens(streams[None], roots, count)

    def _run(self, index: int, hidden: mx.array, rows: Rows, view: Any) -> mx.array:
        mask = rows.mask_in_window(self.backbone.windows[index])
        return self.backbone.run(hidden, index, index + 1, mask, [view])


def trainable_weights(adapter: StreamAdapter, part: Part | None = None) -> Weights:
    """Return the arrays of an adapter that training may change, in float32, by name.

    Args:
        adapter: the adapter, which stays as it is.
        part: "streams" takes the streams, their condition, and LoRA on stream rows; "condition" the
            condition alone; None the streams and the LoRA that is trained with them.

    Returns:
        The arrays by their names in the adapter's files; never the draft vocabulary.
    """
    lora = adapter.stream_lora if part else adapter.trained_lora
    weights = {**stream_tensors(adapter.streams), **lora_tensors(lora)}
    weights.pop("draft_vocab", None)
    first = "condition." if part == "condition" else ""
    return {n: array.astype(mx.float32) for n, array in weights.items() if n.startswith(first)}


def replace_weights(adapter: StreamAdapter, weights: Weights) -> StreamAdapter:
    """Return a copy of the adapter with these arrays in the place of those of the same names;
    others stay as they are.

    Args:
        adapter: the adapter.
        weights: arrays by their names in the adapter's files, as `trainable_weights` gives them.
    """
    trained = adapter.trained_lora
    every = {**stream_tensors(adapter.streams), **lora_tensors(trained), **weights}
    lora = {
        path: replace(old, a=every[f"{path}.lora_a"], b=every[f"{path}.lora_b"])
        for path, old in trained.items()
    }
    return adapter.with_trained(lora, streams=streams_from_tensors(every))


def bind_weights_that_adapter_has(
    model: TrainedModel, adapter: StreamAdapter, source: Path
) -> None:
    """Bind the weights of another adapter to a model, as far as that has them.

    The adapter may lack parts, such as streams where it is a LoRA alone; these keep the model's
    weights. Its draft vocabulary is not taken.

    Args:
        model: its weights are replaced, in float32.
        adapter: to start from.
        source: its folder, for messages.

    Raises:
        InputError: the adapter is for another base, its streams are of another design, or a scale
            or a shape differs.
    """
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
    model.bind_and_reset_others_to_start(weights)


def measure_and_write_adapter(folder: Path, adapter: StreamAdapter, validation: Validation) -> Path:
    """Measure tokens per call on held-out text, and write an adapter with them in its settings.

    Args:
        folder: an older one is replaced as a whole when the new one is written.
        adapter: it stays as it is.
        validation: replays with trees of `RECORDED_TREE_SIZES`; without streams nothing is
            recorded.

    Returns:
        The folder.
    """
    config = replace(
        adapter.config,
        tokens_per_call=validation.tokens_per_call_by_tree_size(RECORDED_TREE_SIZES) or None,
    )
    with atomic_folder(folder) as work:
        write_adapter_in_place(work, replace(adapter, config=config))
    return folder


def add_condition_and_root_init(adapter: StreamAdapter, train: TrainConfig) -> StreamAdapter:
    """Return a copy of the adapter with a condition and a root init where `train` asks for one and
    it has none.

    New weights change no guess before they are trained. The settings of the copy have the two ranks
    of `train`, and no recorded tokens per call.
    """
    streams = adapter.streams
    size = adapter.config.hidden_size
    condition = streams.condition or draw_condition_or_none(train, size)
    root_init = streams.root_init or draw_root_init_or_none(train, size)
    config = replace(
        adapter.config,
        condition_rank=train.condition_rank,
        root_init_rank=train.root_init_rank,
        tokens_per_call=None,
    )
    streams = replace(streams, condition=condition, root_init=root_init)
    return replace(adapter, config=config, streams=streams)


def draw_root_init_or_none(train: TrainConfig, hidden_size: int) -> LowRank | None:
    """Draw what the root token and the last hidden state add to f of eq. 3: a low-rank map from 2
    `hidden_size` to `hidden_size` numbers.

    It is zero until it is trained. None where `train.root_init_rank` is 0.
    """
    rng = np.random.default_rng([train.seed, 2])
    return draw_low_rank_or_none(rng, train.root_init_rank, 2 * hidden_size, hidden_size)


def draw_low_rank_or_none(
    rng: np.random.Generator, rank: int, inputs: int, size: int
) -> LowRank | None:
    """Draw a low-rank map from `inputs` to `size` numbers, whose second factor is zero; None for
    rank 0.
    """
    return LowRank(_uniform(rng, rank, inputs, inputs), mx.zeros((size, rank))) if rank else None


def draw_condition_or_none(train: TrainConfig, hidden_size: int) -> Condition | None:
    """Draw a condition for hidden size `hidden_size`, from the run's seed; None where
    `train.condition_rank` is 0.

    Its last factor is zero, so it changes no guess until it is trained.
    """
    rank = train.condition_rank
    rng = np.random.default_rng([train.seed, 1])
    if not rank:
        return None
    embed, gate = (_uniform(rng, rank, hidden_size, hidden_size) for _ in range(2))
    return Condition(embed, gate, mx.zeros((hidden_size, rank)))


def _uniform(rng: np.random.Generator, rows: int, columns: int, inputs: int) -> mx.array:
    """Draw [rows, columns] float32, uniform between -1 and 1 over the square root of `inputs`."""
    bound = inputs**-0.5
    return mx.array(rng.uniform(-bound, bound, (rows, columns)).astype(np.float32))


def new_adapter(
    backbone: Backbone,
    config: StreamConfig,
    train: TrainConfig,
    draft_vocab: np.ndarray | None,
    task_lora: Loras | None = None,
) -> StreamAdapter:
    """Make an adapter that changes no answer yet: the second factor of every low-rank pair is zero.

    The rest is drawn from the run's seed, alike on every machine. LoRA is made for linear modules
    from the insertion layer on.

    Args:
        backbone: the base model, whose linear modules get LoRA; it stays as it is.
        config: the adapter's settings.
        train: ranks, modules and the seed.
        draft_vocab: [Vd] int32 tokens that streams draft from; None for all.
        task_lora: LoRA on every row of the model that the streams draft for, beside streams of
            scope "streams"; None for none.

    Raises:
        InputError: `train.lora_modules` names no linear module.
    """
    rng = np.random.default_rng(train.seed)
    size = config.hidden_size
    scale = train.lora_alpha / train.lora_rank
    embeddings = None
    if config.has_embeddings:
        drawn = EMBEDDING_STD * rng.standard_normal((config.num_streams, config.hidden_size))
        embeddings = mx.array(drawn.astype(np.float32))
    streams = StreamWeights(
        embeddings,
        draw_low_rank_or_none(rng, config.stream_init_rank, size, size),
        draw_root_init_or_none(train, size),
        draw_low_rank_or_none(rng, config.prune_rank, size, size),
        None if draft_vocab is None else mx.array(draft_vocab),
        draw_condition_or_none(train, size),
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
