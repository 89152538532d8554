"""The stream-fused language model in PyTorch: the reference for MLX, and the model that is trained.

It drives the decoder layers of transformers' own models. Every layer with multi-stream attention
runs twice: on the node rows, then on the stream rows, which see the keys and values that the node
rows left in `_NodeKeys`. So node rows are computed exactly as the base model computes them. Nothing
here keeps a cache between calls.

Shapes, beside the legend of `ssmlx.model.shapes`:

    B   batch              T   node rows: prompt tokens, and the nodes of a draft tree
    Vd  tokens that streams draft from: the draft vocabulary, or V without one
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
from ssmlx.loading.adapter import check_draft_vocab
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
    """Logits of the main stream, of the speculative streams, and of the early exit."""

    main_logits: torch.Tensor  # [B, T, V] next token of every node row
    stream_logits: torch.Tensor  # [B, K, G, Vd]; entry j - 1: stream j, j tokens further on
    early_exit_logits: torch.Tensor | None  # [B, T, V] as layer N - Ns sees it
    draft_vocab: torch.Tensor | None = None  # [Vd] tokens of `stream_logits`; None for all


@dataclass(frozen=True)
class HiddenStates:
    """Outputs of the final norm, ready for the LM head."""

    main: torch.Tensor  # [B, T, D]
    streams: torch.Tensor  # [B, K, G, D]
    early_exit: torch.Tensor | None  # [B, T, D]


class LowRank(Module):
    """Maps x [..., in] to B A x [..., out]; zero when new, as B is zero. The names are LoRA's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        like: torch.Tensor,  # for type and device
    ) -> None:
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
    """Corrects a stream by the token before its guess (`ssmlx.model.condition`); zero when new."""

    def __init__(
        self,
        hidden_size: int,
        rank: int,
        like: torch.Tensor,  # for type and device
    ) -> None:
        super().__init__()
        place = {"bias": False, "dtype": like.dtype, "device": like.device}
        self.embed, self.gate = (nn.Linear(hidden_size, rank, **place) for _ in range(2))
        self.out = nn.Linear(rank, hidden_size, **place)
        nn.init.zeros_(self.out.weight)

    def forward(self, normed: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The correction [..., D] of final-normed streams by embeddings of the tokens before."""
        return self.out(self.mix(normed, embedded))

    def mix(self, normed: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens before, gated by the streams, [..., rank]."""
        return torch.sigmoid(self.gate(normed)) * self.embed(scale_to_unit_rms(embedded))


class LoraLinear(Module):
    """LoRA on stream rows, and on node rows too if `on_nodes`; adds nothing when new."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, *, on_nodes: bool) -> None:
        super().__init__()
        self.linear = linear
        self.adapter = LowRank(linear.in_features, linear.out_features, rank, linear.weight)
        self.scale = scale
        self.on_nodes = on_nodes
        self.rows_are_streams = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on_nodes or self.rows_are_streams:
            return self.linear(x) + self.scale * self.adapter(x)
        return self.linear(x)


@dataclass(frozen=True)
class _Rows:
    """The positions of rows, and what they see in layers of each sliding window."""

    positions: torch.Tensor  # [B, R]
    rotary: tuple[torch.Tensor, torch.Tensor] | None  # [B, R, Dh] each; None: learned positions
    masks: dict[int | None, torch.Tensor]  # [B, 1, R, keys], by sliding window


class _CallRows(NamedTuple):
    nodes: _Rows
    streams: _Rows | None  # None if no node carries streams
    anchors: torch.Tensor  # [K] or [B, K], the node rows that carry streams


class _NodeKeys:
    """The part of transformers' `Cache` that attention calls: one layer's node keys and values.

    The first update, by node rows, is kept. Later ones, by stream rows, are appended for one call,
    their values rotated if the settings say so (eq. 7).
    """

    def __init__(self, config: StreamConfig) -> None:
        self.nodes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._config = config

    def update(
        self,
        keys: torch.Tensor,  # [B, Hkv, R, Dh] of the new rows
        values: torch.Tensor,  # [B, Hkv, R, Dh]
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        module: Any = base
        for name in cls.path.split("."):
            module = getattr(module, name, None)
        for names in cls.parts:
            if all(getattr(module, name, None) is None for name in names):
                return f"{cls.path}.{names[0]}"
        return None if hasattr(base, "lm_head") else "lm_head"

    @property
    def layers(self) -> nn.ModuleList:
        return self.module.layers

    @property
    def embedding_table(self) -> torch.Tensor:
        """The table [V, D], whose type and device new parameters take."""
        return self.module.embed_tokens.weight

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed [B, R] as [B, R, D]; positions are not used here."""
        return self.module.embed_tokens(tokens)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The cosines and sines [B, R, Dh] at positions [B, R]."""
        tables: tuple[torch.Tensor, torch.Tensor] = self.module.rotary_emb(
            self.embedding_table, positions
        )
        return tables

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        found = getattr(self.module, "norm", None)
        return (self.module.final_layernorm if found is None else found)(hidden)


class _LearnedPositions(_Decoder):
    """OPT's parts: a table of positions is added to embeddings, and nothing is rotated.

    A stream starts from its node's hidden state, which includes the node's position; nothing is
    added for the stream.
    """

    path = "model.decoder"
    parts = (("embed_tokens",), ("layers",), ("final_layer_norm",), ("embed_positions",))

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = self.module.embed_tokens(tokens)
        table = self.module.embed_positions
        return embedded + nn.functional.embedding(positions + table.offset, table.weight)

    def rotary(self, positions: torch.Tensor) -> None:
        return None

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.final_layer_norm(hidden)


def _decoder_kind(base: nn.Module) -> type[_Decoder]:
    inner = getattr(base, "model", None)
    return _LearnedPositions if hasattr(inner, "decoder") else _Decoder


class StreamFusedReference(Module):
    """A decoder with speculative streams (Speculative Streaming, arXiv 2402.11131, section 3.2.1),
    LoRA and a pruning adapter.

    Called on its own, `base` is the main stream.
    """

    def __init__(
        self,
        # becomes part of the model: it is frozen, and linear modules are wrapped in place
        base: nn.Module,
        config: StreamConfig,
        *,
        lora: LoraSettings = _NO_LORA,  # without `layers`, on those with multi-stream attention
        draft_vocab: torch.Tensor | None = None,  # [Vd] int32, strictly ascending
    ) -> None:
        """Build new weights, drawn from PyTorch's global generator."""
        super().__init__()
        check_base(base, config)
        require(
            (draft_vocab is not None) == (config.draft_vocab_size > 0),
            f"the model has {'no' if draft_vocab is None else 'a'} draft_vocab, and its settings "
            f"the draft_vocab_size {config.draft_vocab_size}",
            expected="both or neither",
            do="give the tensor draft_vocab if, and only if, draft_vocab_size is not 0",
        )
        if draft_vocab is not None:
            size = config.draft_vocab_size
            check_draft_vocab(draft_vocab, size, base.config.vocab_size, "the model")
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
        """Run a whole text at once; arguments are those of `hidden_states`."""
        hidden = self.hidden_states(input_ids, stream_rows=stream_rows, **where)
        head = self.base.lm_head
        early = hidden.early_exit
        return ReferenceOutput(
            head(hidden.main),
            self.draft_logits(hidden.streams),
            None if early is None else head(early),
            self.draft_vocab,
        )

    def draft_logits(
        self,
        hidden_streams: torch.Tensor,  # [..., D] final-normed
    ) -> torch.Tensor:
        """Logits [..., Vd]. Each call gathers the head's rows: pass many states at a time."""
        head = self.base.lm_head
        vocab = self.draft_vocab
        if vocab is None:
            return head(hidden_streams)
        bias = None if head.bias is None else head.bias[vocab]
        return nn.functional.linear(hidden_streams, head.weight[vocab], bias)

    def apply_condition(
        self,
        hidden_streams: torch.Tensor,  # [..., D] final-normed
        tokens: torch.Tensor,  # [...] before the one that each stream guesses
    ) -> torch.Tensor:  # [..., D]
        assert self.condition is not None
        correction = self.condition(hidden_streams, self.decoder.module.embed_tokens(tokens))
        return (hidden_streams + correction).to(hidden_streams.dtype)

    def condition_logits(
        self,
        streams: torch.Tensor,  # [..., D] final-normed
        previous: torch.Tensor,  # [..., C'] tokens before the one that the stream guesses
        rows: torch.Tensor,  # [..., C, D] the LM head's rows of the candidates
    ) -> torch.Tensor:
        """What each token before adds to the logits of a stream's candidates, [..., C', C]."""
        assert self.condition is not None
        embedded = self.decoder.module.embed_tokens(previous)
        mixed = self.condition.mix(streams[..., None, :], embedded)
        return mixed @ (rows @ self.condition.out.weight).mT

    def hidden_states(
        self,
        input_ids: torch.Tensor,  # [B, T]
        *,
        # [K] or [B, K] anchors; None for all, except the last if streams start from the next token
        stream_rows: torch.Tensor | None = None,
        **where: torch.Tensor | None,
    ) -> HiddenStates:
        """The inputs of the LM head, for losses that apply it to a few rows at a time.

        `positions` [B, T] are 0 to T - 1 unless given. `visible` [B, T, T] bool, which node row
        (second axis) sees which (third), is causal unless given; a row must see itself.
        `stream_visible` [B, T, T], what its streams see, is `visible` unless given.
        """
        nodes = self.lower_states(input_ids, **where)
        return self.upper_states(nodes, input_ids, stream_rows=stream_rows, **where)

    def lower_states(
        self,
        input_ids: torch.Tensor,  # [B, T]
        **where: torch.Tensor | None,  # `positions` and `visible` as in `hidden_states`
    ) -> torch.Tensor:
        """Compute node states [B, T, D] before layer N - Ns."""
        node_rows, _, anchors = self._make_call_rows(input_ids.shape, torch.arange(0), **where)
        nodes = self.decoder.embed(input_ids.to(anchors.device), node_rows.positions)
        for index in range(self.config.insertion_layer):
            nodes = self._run_layer(index, nodes, node_rows, None)
        return nodes

    def upper_states(
        self,
        nodes: torch.Tensor,  # [B, T, D] of `lower_states`
        input_ids: torch.Tensor | None = None,  # [B, T], for streams that start from the next token
        *,
        stream_rows: torch.Tensor | None = None,
        rootless: torch.Tensor | None = None,  # [B, K] bool: streams without the root's term
        **where: torch.Tensor | None,
    ) -> HiddenStates:
        """Run from layer N - Ns to the final norm, with streams on the anchors."""
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
                expected="a layer whose keys and values streams can read",
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

    def early_exit_states(
        self,
        nodes: torch.Tensor,  # [..., D] of `lower_states`
    ) -> torch.Tensor:
        """Final-normed states [..., D] (Speculative Streaming, section 3.2.3)."""
        assert self.prune_adapter is not None
        return self.decoder.norm((nodes + self.prune_adapter(nodes)).to(nodes.dtype))

    def root_states(
        self,
        roots: torch.Tensor,  # [B, K] the token after each anchor
        normed: torch.Tensor,  # [B, K, D] the anchors' final-normed states
    ) -> torch.Tensor:
        """The input of `root_init`: embeddings of unit RMS, then normed states, [B, K, 2 D]."""
        embedded = self.decoder.module.embed_tokens(roots.to(normed.device))
        return torch.cat([scale_to_unit_rms(embedded).to(normed.dtype), normed], dim=-1)

    def insert_streams(
        self,
        nodes: torch.Tensor,  # [B, K, D] before layer N - Ns
        root_inputs: torch.Tensor | None = None,  # [B, K, 2 D] of `root_states`
    ) -> torch.Tensor:
        """Start the anchors' streams (eq. 3), anchor by anchor: [B, K * G, D]."""
        started = nodes
        if self.stream_init is not None:
            started = self.stream_init(nodes)
        if self.config.stream_init == "residual":
            started = nodes + started
        if self.root_init is not None:
            assert root_inputs is not None, "these streams start from the root too"
            started = started + self.root_init(root_inputs)
        # If values are rotated, streams have no embeddings: all streams of an anchor start alike.
        if self.stream_embeddings is None:
            started = started.repeat_interleave(self.config.num_streams, dim=1)
        else:
            started = (started[:, :, None] + self.stream_embeddings).flatten(1, 2)
        # Under autocast the adapter's parameters may be wider than the base model's.
        return started.to(nodes.dtype)

    def _make_call_rows(
        self,
        shape: tuple[int, int],  # (B, T)
        stream_rows: torch.Tensor | None,  # this and the rest as in `hidden_states`
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        stream_visible: torch.Tensor | None = None,
    ) -> _CallRows:
        """Lay out the call's rows; ValueError if `positions` or `visible` has another shape."""
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
        # The token after the last row is unknown.
        known = length - (self.root_init is not None)
        anchors = torch.arange(known) if stream_rows is None else stream_rows
        anchors = anchors if num_streams else anchors[..., :0]
        positions = positions.to(device)
        visible = visible.to(device)
        anchors = anchors.to(device)
        nodes = self._make_rows(positions, visible, positions)
        if not anchors.shape[-1]:
            return _CallRows(nodes, None, anchors)
        ahead = torch.arange(1, num_streams + 1, device=device)
        stream_positions = (positions[anchor_indices(anchors)][..., None] + ahead).flatten(1)
        key_positions = torch.cat([positions, stream_positions], dim=1)
        of_streams = visible if stream_visible is None else stream_visible.to(device)
        seen = stream_visibility(of_streams, anchors, num_streams)
        streams = self._make_rows(stream_positions, seen, key_positions)
        return _CallRows(nodes, streams, anchors)

    def _make_rows(
        self,
        positions: torch.Tensor,  # [B, R]
        visible: torch.Tensor,  # [B, R, keys] bool; a layer's sliding window narrows it
        key_positions: torch.Tensor,  # [B, keys]
    ) -> _Rows:
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
        self,
        index: int,
        hidden: torch.Tensor,
        rows: _Rows,
        # gets the rows' keys and values, and decides what they see; None: they see one another
        keys: _NodeKeys | None,
    ) -> torch.Tensor:
        """Run rows [B, R, D] through one of transformers' own layers."""
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
        """Apply LoRA of scope "streams" to all rows that pass inside the block."""
        for adapter in self.adapters.values():
            adapter.rows_are_streams = True
        try:
            yield
        finally:
            for adapter in self.adapters.values():
                adapter.rows_are_streams = False

    def _wrap_linears(self) -> dict[str, LoraLinear]:
        """Wrap linear modules, by paths below the decoder, such as "layers.3.self_attn.q_proj"."""
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
        """Detect scaled embeddings and capped logits, by the logits of four tokens."""
        training = self.base.training
        device = self.decoder.embedding_table.device
        probe = torch.arange(4, device=device)[None] % self.base.config.vocab_size
        self.base.eval()
        expected = self.base(probe, use_cache=False).logits
        try:
            found = self(probe, stream_rows=probe[0, :0]).main_logits
        except TypeError:  # if layers of each kind have their own rotary embedding, for example
            found = torch.zeros_like(expected)
        self.base.train(training)
        tolerance = 1e-3 if found.dtype == torch.float32 else 0.05
        require(
            torch.allclose(found, expected, tolerance, tolerance * float(expected.std())),
            f"{type(self.base).__name__} computes more than its layers, norm and LM head",
            expected=_PLAIN,
            do="choose another base model",
        )


def rotate_values(
    values: torch.Tensor,  # [B, Hkv, K * G, Dh], node by node
    num_streams: int,  # G
    step: float,  # radians
) -> torch.Tensor:
    """Rotate the values of stream n by n * `step` radians (eq. 7), in float32 at least.

    A head's feature i is the real and feature i + Dh / 2 the imaginary part of one number, as in
    rotary embeddings' "rotate half".
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    angles = step * torch.arange(1, num_streams + 1, dtype=dtype, device=values.device)[:, None]
    cos = angles.cos()
    sin = angles.sin()
    real, imaginary = values.to(dtype).unflatten(2, (-1, num_streams)).chunk(2, dim=-1)
    turned = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)
    return turned.flatten(2, 3).to(values.dtype)


def stream_visibility(
    visible: torch.Tensor,  # [B, T, T], which node row (second axis) sees which
    stream_rows: torch.Tensor,  # [K] or [B, K], the anchors
    num_streams: int,  # G
) -> torch.Tensor:
    """Which stream row sees which key (eq. 2), [B, K * G, T + K * G] bool.

    Stream j of a node sees what the node sees, and the node's streams 1 to j. With a root, its
    child and G = 2:

                n0  n1  s01 s02 s11 s12
            s01  x       x
            s02  x       x   x
            s11  x   x           x
            s12  x   x           x   x
    """
    sees_nodes = visible[anchor_indices(stream_rows)].repeat_interleave(num_streams, dim=1)
    count = stream_rows.shape[-1] * num_streams
    row = torch.arange(count, device=visible.device)
    same_node = row[:, None] // num_streams == row // num_streams
    sees_streams = same_node & (row <= row[:, None])
    return torch.cat([sees_nodes, sees_streams.expand(len(visible), count, count)], dim=2)


def anchor_indices(
    rows: torch.Tensor,  # [K], the same in every text, or [B, K]
) -> tuple[Any, torch.Tensor]:
    """Indices for the first two axes of [B, T, ...], which pick [B, K, ...]."""
    if rows.dim() == 1:
        return slice(None), rows
    return torch.arange(len(rows), device=rows.device)[:, None], rows


def _sliding_windows(config: Any, num_layers: int) -> list[int | None]:
    """Each layer's window in tokens; None if it sees everything."""
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


def check_base(base: nn.Module, config: StreamConfig) -> None:
    """Check the base against the settings, except for its vocabulary."""
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
