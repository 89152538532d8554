"""The stream-fused language model in PyTorch: what MLX is compared with, and what is trained.

It drives the decoder layers of transformers' own models. Every layer with multi-stream attention
runs twice: on the node rows, then on the stream rows, which see the keys and values that the node
rows left in `_NodeKeys`. So node rows are computed exactly as the base model computes them,
whether streams are there or not. Nothing here keeps a cache between calls.

Shapes, beside the legend of `ssmlx.model.shapes`:

    B   batch              T   node rows: prompt tokens, and the nodes of a draft tree
    Vd  tokens that streams draft from: the draft vocabulary, or V where there is none
    K   node rows that carry streams; the stream rows stand node by node, so that stream j
        (1 to G) of the m-th such node is row T + m * G + j - 1 of what the upper layers see
    N   layers of the model           Ns  the top ones, with multi-stream attention
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ssmlx.errors import require
from ssmlx.loading.adapter import require_ascending_draft_vocab
from ssmlx.model.condition import EPSILON
from ssmlx.model.lora import select_paths_by_name
from ssmlx.settings import StreamConfig

from ..typed_torch import Module, without_gradients
from .format import CHECK_MODULES, LoraSettings, require_same_layers_and_width

EMBEDDING_STD = 0.02
_NO_LORA = LoraSettings()
_PLAIN = "a plain decoder such as Llama, Qwen2, Qwen3, Phi, OPT or Mistral"


@dataclass(frozen=True)
class ReferenceOutput:
    """Logits of the main stream, of the speculative streams, and of the early exit.

    `early_exit_logits` is None without a pruning adapter. K counts the node rows that carry
    streams.
    """

    main_logits: torch.Tensor  # [B, T, V] next token of every node row
    stream_logits: torch.Tensor  # [B, K, G, Vd]; entry j - 1 is stream j, j places further on
    early_exit_logits: torch.Tensor | None  # [B, T, V] as layer N - Ns sees it
    draft_vocab: torch.Tensor | None = None  # [Vd] tokens of `stream_logits`; None for all


@dataclass(frozen=True)
class HiddenStates:
    """The final norm's output, ready for the LM head. `early_exit` is None without a pruning
    adapter.
    """

    main: torch.Tensor  # [B, T, D]
    streams: torch.Tensor  # [B, K, G, D]
    early_exit: torch.Tensor | None  # [B, T, D]


class LowRank(Module):
    """x [..., in] to B A x [..., out]: zero when new, as A is random and B is zero. The names are
    LoRA's.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, like: torch.Tensor) -> None:
        """Draw A, and set B to zero; type and device are those of `like`."""
        super().__init__()
        place = {"bias": False, "dtype": like.dtype, "device": like.device}
        self.lora_A = nn.Linear(in_features, rank, **place)
        self.lora_B = nn.Linear(rank, out_features, **place)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self.lora_A(x))


def scale_to_unit_rms(embedded: torch.Tensor) -> torch.Tensor:
    """Scale embeddings [..., D] to a root mean square of 1."""
    return nn.functional.rms_norm(embedded, embedded.shape[-1:], eps=EPSILON)


class Condition(Module):
    """Corrects a stream by the token before its own, see `ssmlx.model.condition.Condition`; zero
    when new.
    """

    def __init__(self, hidden_size: int, rank: int, like: torch.Tensor) -> None:
        """Draw `embed` and `gate`, and set `out` to zero.

        Args:
            hidden_size: D.
            rank: of all three.
            like: gives type and device.
        """
        super().__init__()
        place = {"bias": False, "dtype": like.dtype, "device": like.device}
        self.embed, self.gate = (nn.Linear(hidden_size, rank, **place) for _ in range(2))
        self.out = nn.Linear(rank, hidden_size, **place)
        nn.init.zeros_(self.out.weight)

    def forward(self, normed: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the correction [..., D] of final-normed streams [..., D] by embeddings [..., D] of
        the tokens before.
        """
        return self.out(self.mix(normed, embedded))

    def mix(self, normed: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return [..., rank], embeddings of the tokens before, gated by the streams."""
        return torch.sigmoid(self.gate(normed)) * self.embed(scale_to_unit_rms(embedded))


class LoraLinear(Module):
    """A linear module with LoRA on stream rows, and on node rows too where `on_nodes`.

    Rows are stream rows while `rows_are_streams` is set.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, *, on_nodes: bool) -> None:
        """Wrap a linear module, with new LoRA that adds nothing yet.

        Args:
            linear: is applied as it is.
            rank: of the LoRA.
            scale: of what the LoRA adds.
            on_nodes: whether it acts on node rows too.
        """
        super().__init__()
        self.linear = linear
        self.adapter = LowRank(linear.in_features, linear.out_features, rank, linear.weight)
        self.scale = scale
        self.on_nodes = on_nodes
        self.rows_are_streams = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear module, with LoRA where the rows are streams or `on_nodes`."""
        if self.on_nodes or self.rows_are_streams:
            return self.linear(x) + self.scale * self.adapter(x)
        return self.linear(x)


@dataclass(frozen=True)
class _Rows:
    """Where rows stand, and what they see in layers of each sliding window."""

    positions: torch.Tensor  # [B, R]
    rotary: tuple[torch.Tensor, torch.Tensor] | None  # [B, R, Dh] each; None: learned positions
    masks: dict[int | None, torch.Tensor]  # [B, 1, R, keys], by sliding window


class _CallRows(NamedTuple):
    """The rows of one call."""

    nodes: _Rows
    streams: _Rows | None  # None where no node carries streams
    anchors: torch.Tensor  # [K] or [B, K], the node rows that carry streams


class _NodeKeys:
    """The part of transformers' `Cache` that attention calls: one layer's node keys and values.

    The first update, by node rows, is kept; each later one, by stream rows, is put behind it and
    not kept, its values rotated as in eq. 7 where the settings say so.
    """

    def __init__(self, config: StreamConfig) -> None:
        self.nodes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._config = config

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that the new rows may see, and keep those of the first call.

        Args:
            keys: [B, Hkv, R, Dh] of the new rows.
            values: likewise.

        Returns:
            Keys and values: at the first call those given; then the first's with those given behind
            them.
        """
        if self.nodes is None:
            self.nodes = keys, values
            return self.nodes
        if self._config.stream_design == "value_rotation":
            values = rotate_values(values, self._config.num_streams, self._config.rotation_step)
        return torch.cat([self.nodes[0], keys], dim=2), torch.cat([self.nodes[1], values], dim=2)


class _Decoder:
    """The parts of a transformers model around its layers: embedding, positions and final norm."""

    path = "model"  # of the decoder in the model, as PEFT's names of LoRA say it
    parts: tuple[tuple[str, ...], ...] = (
        ("embed_tokens",), ("layers",), ("norm", "final_layernorm"), ("rotary_emb",)
    )  # fmt: skip

    def __init__(self, base: nn.Module) -> None:
        self.module: Any = base.get_submodule(self.path)

    @classmethod
    def first_missing_part(cls, base: nn.Module) -> str | None:
        """Return the path of the first part that `base` lacks; None where it has all, the LM head
        included.
        """
        module: Any = base
        for name in cls.path.split("."):
            module = getattr(module, name, None)
        for names in cls.parts:
            if all(getattr(module, name, None) is None for name in names):
                return f"{cls.path}.{names[0]}"
        return None if hasattr(base, "lm_head") else "lm_head"

    @property
    def layers(self) -> nn.ModuleList:
        """The N decoder layers."""
        return self.module.layers

    @property
    def embedding_table(self) -> torch.Tensor:
        """The embedding table [V, D]; new parameters take its type and device."""
        return self.module.embed_tokens.weight

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [B, R, D] embeddings of tokens [B, R]; `positions` are not read here."""
        return self.module.embed_tokens(tokens)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cos and sin, [B, R, Dh] each, that rotate queries and keys at positions [B, R]."""
        tables: tuple[torch.Tensor, torch.Tensor] = self.module.rotary_emb(
            self.embedding_table, positions
        )
        return tables

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to [..., D], the module `norm` or else `final_layernorm`."""
        found = getattr(self.module, "norm", None)
        return (self.module.final_layernorm if found is None else found)(hidden)


class _LearnedPositions(_Decoder):
    """OPT's parts: a table of positions is added to the embeddings, and nothing is rotated.

    A stream starts from its node's hidden state, which has the node's position in it; nothing is
    added for the stream.
    """

    path = "model.decoder"
    parts = (("embed_tokens",), ("layers",), ("final_layer_norm",), ("embed_positions",))

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [B, R, D] embeddings of tokens [B, R], with those of positions [B, R] added."""
        embedded = self.module.embed_tokens(tokens)
        table = self.module.embed_positions
        return embedded + nn.functional.embedding(positions + table.offset, table.weight)

    def rotary(self, positions: torch.Tensor) -> None:
        return None

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.final_layer_norm(hidden)


def _decoder_kind(base: nn.Module) -> type[_Decoder]:
    """Return the class for a model's parts: `_LearnedPositions` where its `model` has a `decoder`,
    as OPT's.
    """
    inner = getattr(base, "model", None)
    return _LearnedPositions if hasattr(inner, "decoder") else _Decoder


class StreamFusedReference(Module):
    """A decoder model with speculative streams (Speculative Streaming, arXiv 2402.11131, section
    3.2.1), LoRA and a pruning adapter.

    Called on its own, `base` is the main stream.

    Args:
        base: a causal language model of transformers. It becomes part of the model: its weights are
            frozen, and linear modules are wrapped in place.
        config: the streams' settings.
        lora: rank, scale, modules and layers; without layers, those with multi-stream attention.
        draft_vocab: [Vd] int32, strictly ascending, the tokens that streams draft from; given
            exactly where `config.draft_vocab_size` is not 0.

    Raises:
        InputError: the base cannot be driven layer by layer, or does not fit the settings.
    """

    def __init__(
        self,
        base: nn.Module,
        config: StreamConfig,
        *,
        lora: LoraSettings = _NO_LORA,
        draft_vocab: torch.Tensor | None = None,
    ) -> None:
        """Check and freeze the base, draw new streams, and wrap the base's linear modules in place.

        New weights are drawn from PyTorch's global generator. Where the scope is "all", LoRA acts
        on node rows too. Arguments and errors are those of the class.
        """
        super().__init__()
        check_base_can_carry_streams(base, config)
        require(
            (draft_vocab is not None) == (config.draft_vocab_size > 0),
            f"the model has {'no' if draft_vocab is None else 'a'} draft_vocab, and its settings "
            f"the draft_vocab_size {config.draft_vocab_size}",
            expected="both or neither",
            do="give the tensor draft_vocab exactly where draft_vocab_size is not 0",
        )
        if draft_vocab is not None:
            size = config.draft_vocab_size
            require_ascending_draft_vocab(draft_vocab, size, base.config.vocab_size, "the model")
        self.base = base.requires_grad_(False)
        self.config = config
        self.decoder = _decoder_kind(base)(base)
        self.windows = _sliding_windows(base.config, config.num_layers)
        like = self.decoder.embedding_table
        width = config.hidden_size
        self.stream_embeddings: nn.Parameter | None = None
        if config.has_embeddings:
            random = torch.randn(config.num_streams, width, dtype=like.dtype).to(like.device)
            self.stream_embeddings = nn.Parameter(EMBEDDING_STD * random)
        self.draft_vocab: torch.Tensor | None
        self.register_buffer(
            "draft_vocab", None if draft_vocab is None else draft_vocab.clone().to(like.device)
        )
        self.stream_init, self.root_init, self.prune_adapter = (
            LowRank(inputs, width, rank, like) if rank else None
            for inputs, rank in (
                (width, config.stream_init_rank),
                (2 * width, config.root_init_rank),
                (width, config.prune_rank),
            )
        )
        self._check_against_base_logits()
        layers = lora.layers or range(config.insertion_layer, config.num_layers)
        self.lora = replace(lora, layers=tuple(sorted(set(layers))))
        self.adapters: dict[str, LoraLinear] = self._wrap_linears() if lora.rank else {}
        rank = config.condition_rank
        self.condition = Condition(width, rank, like) if rank else None

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        stream_rows: torch.Tensor | None = None,
        **where: torch.Tensor | None,
    ) -> ReferenceOutput:
        """Predict with the main stream and the speculative streams, on a whole text at once.

        Args:
            input_ids: [B, T] tokens of the node rows.
            stream_rows: [K] or [B, K] the node rows that carry streams; all unless given, but not
                the last where streams start from the token after their node.
            where: `positions` [B, T], where each row stands; 0 to T - 1 unless given. `visible`
                [B, T, T] bool, which node row (second axis) sees which (third); causal unless
                given. A row must see itself. `stream_visible` [B, T, T], which its streams see;
                `visible` unless given.

        Raises:
            InputError: a layer of the base does not use the cache that it is handed.
            ValueError: `positions` or `visible` has another shape.
        """
        hidden = self.hidden_states(input_ids, stream_rows=stream_rows, **where)
        head = self.base.lm_head
        early = hidden.early_exit
        return ReferenceOutput(
            head(hidden.main),
            self.draft_logits(hidden.streams),
            None if early is None else head(early),
            self.draft_vocab,
        )

    def draft_logits(self, hidden_streams: torch.Tensor) -> torch.Tensor:
        """Return logits [..., Vd] of the tokens that streams draft from.

        The head's rows are gathered by every call: give it many states at a time.

        Args:
            hidden_streams: [..., D] final-normed.
        """
        head = self.base.lm_head
        vocab = self.draft_vocab
        if vocab is None:
            return head(hidden_streams)
        bias = None if head.bias is None else head.bias[vocab]
        return nn.functional.linear(hidden_streams, head.weight[vocab], bias)

    def apply_condition(self, hidden_streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return final-normed streams [..., D], each corrected by the token before the one that it
        guesses.

        Args:
            hidden_streams: [..., D] final-normed.
            tokens: [...] these tokens.
        """
        assert self.condition is not None
        correction = self.condition(hidden_streams, self.decoder.module.embed_tokens(tokens))
        return (hidden_streams + correction).to(hidden_streams.dtype)

    def condition_logits(
        self, streams: torch.Tensor, previous: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return [..., C', C], what each token before adds to the logits of a stream's candidates.

        Args:
            streams: [..., D] final-normed.
            previous: [..., C'] tokens before the one that the stream guesses.
            rows: [..., C, D] the LM head's rows of the candidates.
        """
        assert self.condition is not None
        embedded = self.decoder.module.embed_tokens(previous)
        mixed = self.condition.mix(streams[..., None, :], embedded)
        return mixed @ (rows @ self.condition.out.weight).mT

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        *,
        stream_rows: torch.Tensor | None = None,
        **where: torch.Tensor | None,
    ) -> HiddenStates:
        """Return what the LM head is applied to, for losses that apply it to a few rows at a time.

        Arguments and errors are those of `forward`.
        """
        nodes = self.lower_states(input_ids, **where)
        return self.upper_states(nodes, input_ids, stream_rows=stream_rows, **where)

    def lower_states(self, input_ids: torch.Tensor, **where: torch.Tensor | None) -> torch.Tensor:
        """Return node states [B, T, D] before layer N - Ns.

        Args:
            input_ids: [B, T].
            where: `positions` and `visible` as in `forward`.
        """
        node_rows, _, anchors = self._make_call_rows(input_ids.shape, torch.arange(0), **where)
        nodes = self.decoder.embed(input_ids.to(anchors.device), node_rows.positions)
        for index in range(self.config.insertion_layer):
            nodes = self._run_layer(index, nodes, node_rows, None)
        return nodes

    def upper_states(
        self,
        nodes: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        *,
        stream_rows: torch.Tensor | None = None,
        rootless: torch.Tensor | None = None,
        **where: torch.Tensor | None,
    ) -> HiddenStates:
        """Run node states from layer N - Ns to the final norm, with streams on the anchors.

        Args:
            nodes: [B, T, D] as `lower_states` gives them.
            input_ids: [B, T], needed only where streams start from the token after their node too.
            stream_rows: as in `forward`.
            rootless: [B, K] bool, which of them have streams that start without the root's term;
                none unless given.
            where: as in `forward`.

        Returns:
            Final-normed states; early exit's where there is a pruning adapter.

        Raises:
            InputError: a layer of the base does not use the cache that it is handed.
        """
        norm = self.decoder.norm
        node_rows, speculative_rows, anchors = self._make_call_rows(
            nodes.shape[:2], stream_rows, **where
        )
        early = None if self.prune_adapter is None else self.early_exit_states(nodes)
        places = anchor_indices(anchors)
        kept = []
        start = nodes[places]
        for index in range(self.config.insertion_layer, self.config.num_layers):
            keys = _NodeKeys(self.config)
            nodes = self._run_layer(index, nodes, node_rows, keys)
            require(
                keys.nodes is not None,
                f"layer {index} ignored its cache",
                expected="one that streams can see the node rows through",
                do="turn gradient checkpointing off, or use a supported architecture",
            )
            kept.append((index, keys))
        main = norm(nodes)
        root_inputs = None
        streams = start[:, :0]
        if speculative_rows is not None:
            if self.root_init is not None:
                assert input_ids is not None, "these streams start from the root too"
                root_inputs = self.root_states(input_ids[anchor_indices(anchors + 1)], main[places])
                if rootless is not None:
                    root_inputs = root_inputs.masked_fill(rootless[..., None], 0)
            streams = self.insert_streams(start, root_inputs)
            with self.treating_rows_as_streams():
                for index, keys in kept:
                    streams = self._run_layer(index, streams, speculative_rows, keys)
        grouped = streams.unflatten(1, (anchors.shape[-1], self.config.num_streams))
        return HiddenStates(main, norm(grouped), early)

    def early_exit_states(self, nodes: torch.Tensor) -> torch.Tensor:
        """Return final-normed states [..., D] for the early exit's head (Speculative Streaming,
        section 3.2.3).

        Args:
            nodes: [..., D] as `lower_states` gives them.
        """
        assert self.prune_adapter is not None
        return self.decoder.norm((nodes + self.prune_adapter(nodes)).to(nodes.dtype))

    def root_states(self, roots: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return [B, K, 2 D], the input of `root_init`: embeddings of unit RMS, then normed states.

        Args:
            roots: [B, K] the token after each anchor.
            normed: [B, K, D] the anchors' final-normed states, which predicted these tokens.
        """
        embedded = self.decoder.module.embed_tokens(roots.to(normed.device))
        return torch.cat([scale_to_unit_rms(embedded).to(normed.dtype), normed], dim=-1)

    def insert_streams(
        self, nodes: torch.Tensor, root_inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Start the streams of anchors (eq. 3).

        Where values are rotated, streams have no embeddings: those of an anchor start alike.

        Args:
            nodes: [B, K, D] the anchors' states before layer N - Ns.
            root_inputs: [B, K, 2 D] as `root_states` gives them; None where streams do not start
                from roots.

        Returns:
            [B, K * G, D], anchor by anchor.
        """
        started = nodes
        if self.stream_init is not None:
            started = self.stream_init(nodes)
        if self.config.stream_init == "residual":
            started = nodes + started
        if self.root_init is not None:
            assert root_inputs is not None, "these streams start from the root too"
            started = started + self.root_init(root_inputs)
        if self.stream_embeddings is None:
            started = started.repeat_interleave(self.config.num_streams, dim=1)
        else:
            started = (started[:, :, None] + self.stream_embeddings).flatten(1, 2)
        # Under autocast the adapter's parameters may be wider than the base model's.
        return started.to(nodes.dtype)

    def _make_call_rows(
        self,
        shape: tuple[int, int],
        stream_rows: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        stream_visible: torch.Tensor | None = None,
    ) -> _CallRows:
        """Work out where a call's rows stand, which streams there are, and what every row sees.

        Args:
            shape: (B, T).
            stream_rows: as in `forward`.
            positions: as in `forward`.
            visible: as in `forward`.
            stream_visible: as in `forward`.

        Raises:
            ValueError: `positions` or `visible` has another shape.
        """
        batch, length = shape
        device = self.decoder.embedding_table.device
        num_streams = self.config.num_streams
        if positions is None:
            positions = torch.arange(length).expand(batch, length)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1)
        shapes = {"positions": (batch, length), "visible": (batch, length, length)}
        for (what, expected), given in zip(shapes.items(), (positions, visible), strict=True):
            if given.shape != expected:
                raise ValueError(f"{what} has shape {tuple(given.shape)}, expected {expected}")
        # What the root is behind the last row, nobody says.
        known = length - (self.root_init is not None)
        anchors = torch.arange(known) if stream_rows is None else stream_rows
        anchors = anchors if num_streams else anchors[..., :0]
        positions = positions.to(device)
        visible = visible.to(device)
        anchors = anchors.to(device)
        nodes = self._make_masks_and_rotary(positions, visible, positions)
        if not anchors.shape[-1]:
            return _CallRows(nodes, None, anchors)
        ahead = torch.arange(1, num_streams + 1, device=device)
        stream_positions = (positions[anchor_indices(anchors)][..., None] + ahead).flatten(1)
        key_positions = torch.cat([positions, stream_positions], dim=1)
        of_streams = visible if stream_visible is None else stream_visible.to(device)
        seen = stream_visibility(of_streams, anchors, num_streams)
        streams = self._make_masks_and_rotary(stream_positions, seen, key_positions)
        return _CallRows(nodes, streams, anchors)

    def _make_masks_and_rotary(
        self, positions: torch.Tensor, visible: torch.Tensor, key_positions: torch.Tensor
    ) -> _Rows:
        """Return the rotary tables and masks of rows.

        Args:
            positions: [B, R] of the rows.
            visible: [B, R, keys] bool; a layer's sliding window narrows it.
            key_positions: [B, keys].
        """
        masks = {}
        dtype = self.decoder.embedding_table.dtype
        for window in set(self.windows):
            seen = visible
            if window is not None:
                seen = visible & (positions[:, :, None] - key_positions[:, None] < window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            masks[window] = mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]
        return _Rows(positions, self.decoder.rotary(positions), masks)

    def _run_layer(
        self, index: int, hidden: torch.Tensor, rows: _Rows, keys: _NodeKeys | None
    ) -> torch.Tensor:
        """Run rows [B, R, D] through one of transformers' own layers, and return them.

        Args:
            index: of the layer.
            hidden: [B, R, D].
            rows: where they stand and what they see.
            keys: is given the rows' keys and values, and decides what they see; None lets rows see
                one another alone.
        """
        rotary = {} if rows.rotary is None else {"position_embeddings": rows.rotary}
        out: torch.Tensor = self.decoder.layers[index](
            hidden,
            attention_mask=rows.masks[self.windows[index]],
            position_ids=rows.positions,
            cache=keys,
            use_cache=keys is not None,
            **rotary,
        )
        return out

    @contextmanager
    def treating_rows_as_streams(self) -> Iterator[None]:
        """Take all rows that pass inside the block for stream rows, on which LoRA of scope
        "streams" acts; afterwards none are.
        """
        for adapter in self.adapters.values():
            adapter.rows_are_streams = True
        try:
            yield
        finally:
            for adapter in self.adapters.values():
                adapter.rows_are_streams = False

    def _wrap_linears(self) -> dict[str, LoraLinear]:
        """Put LoRA on the chosen linear modules of the base, in place.

        Returns:
            The new modules by their paths below the decoder, such as "layers.3.self_attn.q_proj".

        Raises:
            InputError: LoRA is for a layer that is not there, or below the streams where it acts on
                them alone; or a module is unknown.
        """
        lora = self.lora
        scope = self.config.adapter_scope
        adapters = {}
        least = self.config.insertion_layer if scope == "streams" else 0
        for index in lora.layers:
            require(
                least <= index < self.config.num_layers,
                f"LoRA of scope {scope!r} is on layer {index}",
                expected=f"layers {least} to {self.config.num_layers - 1}, which its rows pass",
                do="check lora_layers, or layers_to_transform in adapter_config.json",
            )
            layer: Any = self.decoder.layers[index]
            linears = [p for p, module in layer.named_modules() if isinstance(module, nn.Linear)]
            for path in select_paths_by_name(
                linears, lora.modules, f"layer {index}", CHECK_MODULES
            ):
                linear = layer.get_submodule(path)
                wrapped = LoraLinear(linear, lora.rank, lora.scale, on_nodes=scope == "all")
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, wrapped)
                adapters[f"layers.{index}.{path}"] = wrapped
        return adapters

    @without_gradients
    def _check_against_base_logits(self) -> None:
        """Raise InputError where the base computes more than its layers, norm and LM head.

        Logits of four tokens are compared with the base's own, so scaled embeddings or capped
        logits are found. Whether the base is in training mode stays as it was.
        """
        training = self.base.training
        device = self.decoder.embedding_table.device
        probe = torch.arange(4, device=device)[None] % self.base.config.vocab_size
        self.base.eval()
        expected = self.base(probe, use_cache=False).logits
        try:
            found = self(probe, stream_rows=probe[0, :0]).main_logits
        except TypeError:  # such as of a rotary embedding for each kind of layer
            found = torch.zeros_like(expected)
        self.base.train(training)
        tolerance = 1e-3 if found.dtype == torch.float32 else 0.05
        require(
            torch.allclose(found, expected, tolerance, tolerance * float(expected.std())),
            f"{type(self.base).__name__} computes more than its layers, norm and LM head",
            expected=_PLAIN,
            do="choose another base model",
        )


def rotate_values(values: torch.Tensor, num_streams: int, step: float) -> torch.Tensor:
    """Rotate the values of stream rows: those of stream n by n * `step` radians (eq. 7).

    A head's feature i is the real and feature i + Dh / 2 the imaginary part of one number: the
    pairs of rotary embeddings' "rotate half".

    Args:
        values: [B, Hkv, K * G, Dh], node by node.
        num_streams: G.
        step: radians.

    Returns:
        The same shape and type; computed in float32 at least.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    angles = step * torch.arange(1, num_streams + 1, dtype=dtype, device=values.device)[:, None]
    cos = angles.cos()
    sin = angles.sin()
    real, imaginary = values.to(dtype).unflatten(2, (-1, num_streams)).chunk(2, dim=-1)
    turned = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)
    return turned.flatten(2, 3).to(values.dtype)


def stream_visibility(
    visible: torch.Tensor, stream_rows: torch.Tensor, num_streams: int
) -> torch.Tensor:
    """Return [B, K * G, T + K * G] bool: which stream row sees which key (eq. 2).

    Stream j of a node sees what the node sees, and the node's streams 1 to j. With a root, its
    child and G = 2:

                n0  n1  s01 s02 s11 s12
            s01  x       x
            s02  x       x   x
            s11  x   x           x
            s12  x   x           x   x

    Args:
        visible: [B, T, T], which node row (second axis) sees which.
        stream_rows: [K] or [B, K], the anchors.
        num_streams: G.
    """
    sees_nodes = visible[anchor_indices(stream_rows)].repeat_interleave(num_streams, dim=1)
    count = stream_rows.shape[-1] * num_streams
    row = torch.arange(count, device=visible.device)
    same_node = row[:, None] // num_streams == row // num_streams
    sees_streams = same_node & (row <= row[:, None])
    return torch.cat([sees_nodes, sees_streams.expand(len(visible), count, count)], dim=2)


def anchor_indices(rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return what picks rows out of a tensor [B, T, ...], as its index.

    Args:
        rows: [K], the same of every text, or [B, K], of each its own.

    Returns:
        Two indices, for the first two axes; what they pick is [B, K, ...].
    """
    if rows.dim() == 1:
        return slice(None), rows
    return torch.arange(len(rows), device=rows.device)[:, None], rows


def _sliding_windows(config: Any, num_layers: int) -> list[int | None]:
    """Return each layer's sliding window in tokens; None where a layer sees everything.

    Args:
        config: of transformers. Without `layer_types` all layers have its `sliding_window`.
        num_layers: N.

    Raises:
        InputError: a layer has attention of another type.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * num_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    require(
        not unknown,
        f"the base model has layers of type {', '.join(sorted(unknown))}",
        expected="full_attention or sliding_attention",
        do="choose another base model",
    )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def check_base_can_carry_streams(base: nn.Module, config: StreamConfig) -> None:
    """Raise InputError where a model of transformers cannot carry streams.

    That is where it cannot be driven layer by layer, has a reference's LoRA already, has attention
    that takes no additive mask, or has another number of layers or hidden size than `config`. The
    vocabulary is not compared.
    """
    lacking = _decoder_kind(base).first_missing_part(base)
    require(
        lacking is None,
        f"{type(base).__name__} has no {lacking}",
        expected=_PLAIN,
        do="choose another base model",
    )
    require(
        not any(isinstance(module, LoraLinear) for module in base.modules()),
        "the base model already carries a reference's LoRA",
        expected="an unadapted model",
        do="load the base model again",
    )
    attention: Any = base.config._attn_implementation
    require(
        attention in ("eager", "sdpa"),
        f"the base model uses {attention} attention",
        expected="eager or sdpa, which take an additive mask",
        do="load it with attn_implementation='sdpa'",
    )
    sizes: Any = base.config
    require_same_layers_and_width(config, sizes.num_hidden_layers, sizes.hidden_size)
