"""A training run in PyTorch: the model, its losses (eq. 5), its steps, and what is saved.

Every step is a function of the settings, the data and the state before it. A run that was killed
goes on from its last saved state to the same result.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ssmlx.errors import require
from ssmlx.settings import StreamConfig
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Batch
from ssmlx.training.job import Trainer, check_gradient_is_finite
from ssmlx.training.objective import GIVEN, MAIN, PRUNE, STREAM, Objective, TermKind, split_rows

from ..reference.format import LoraSettings
from ..reference.model import HiddenStates, StreamFusedReference, anchor_indices
from ..typed_torch import Function, without_gradients

STREAM_ATTENTION = "ssmlx_streams"
IGNORED = -1  # the target of a row that has none


def new_streams(
    base: nn.Module,  # of transformers; becomes part of the model, and is changed
    config: StreamConfig,
    train: TrainConfig,
    draft_vocab: np.ndarray | None,  # [Vd] int32; None for all
) -> StreamFusedReference:
    """Make a model with new streams; seeds PyTorch's global generator with `train.seed`."""
    torch.manual_seed(train.seed)
    return StreamFusedReference(
        base,
        config,
        lora=LoraSettings(train.lora_rank, train.lora_alpha, train.lora_modules),
        draft_vocab=None if draft_vocab is None else torch.from_numpy(draft_vocab),
    )


def cast_frozen_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def autocast_for(
    device: torch.device, dtype: torch.dtype
) -> contextlib.AbstractContextManager[Any]:
    if dtype == torch.float32:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast(device.type, dtype)
    return context


def choose_device(name: str) -> torch.device:
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there))
    require(
        there[name],
        f"--device {name}, which PyTorch does not find here",
        expected=", ".join(kind for kind, is_there in there.items() if is_there),
        do="choose one of them, or auto",
    )
    return torch.device(name)


class TermRows(NamedTuple):
    """The rows of one term of a loss, and the head that scores them."""

    name: str  # as in `Term`
    alpha: float  # the term's weight
    states: torch.Tensor  # [R, D]
    head: torch.Tensor  # [V, D]
    bias: torch.Tensor | None  # [V]
    targets: torch.Tensor  # [R], `IGNORED` if there is none


class TorchObjective(Objective):
    """The loss of eq. 5 in PyTorch, over a model and its draft vocabulary [Vd], if any."""

    def __init__(
        self,
        model: StreamFusedReference,
        train: TrainConfig,
        draft_vocab: np.ndarray | None,  # [Vd] tokens; None for all
        device: torch.device,
        dtype: torch.dtype,  # of the frozen weights and the arithmetic
    ) -> None:
        self.model = model
        self.train = train
        self.device = device
        self.dtype = dtype
        self.draft_vocab = draft_vocab
        head = model.base.lm_head
        weight = head.weight.detach()
        bias = getattr(head, "bias", None)
        rows = slice(None) if draft_vocab is None else torch.from_numpy(draft_vocab).long()
        # The draft vocabulary's rows of the LM head are gathered once.
        own = weight[rows].contiguous(), None if bias is None else bias[rows]
        self._lm_heads = {MAIN: (weight, bias), STREAM: own, GIVEN: own, PRUNE: (weight, bias)}
        self.vocab_size, self.hidden_size = weight.shape
        self.state_bytes = dtype.itemsize

    @without_gradients
    def lower(self, batch: Batch) -> torch.Tensor:
        """Compute the states of `Objective.lower`; streams are final-normed, and on the CPU."""
        with autocast_for(self.device, self.dtype):
            states = self.model.lower_states(
                self.index_tensor(batch.tokens), **self.row_arguments(batch)
            )
        if not self.train.keeps_streams:
            return states
        # Streams after the norm, in the columns of their anchors.
        streams = self.upper(batch, states).streams.to(self.dtype)
        rows = torch.zeros(*batch.tokens.shape, self.state_size, dtype=self.dtype)
        rows[anchor_indices(torch.from_numpy(batch.anchors))] = streams.flatten(2).cpu()
        return rows

    def upper(
        self,
        batch: Batch,
        lower: torch.Tensor,  # [B, T, D] on the device
        rootless: np.ndarray | None = None,  # [B, K] bool: streams without the root's term
    ) -> HiddenStates:
        """Run from the insertion layer to the final norm, with streams on every anchor."""
        anchors = self.index_tensor(batch.anchors)
        without = None if rootless is None else torch.from_numpy(rootless).to(self.device)
        with autocast_for(self.device, self.dtype):
            tokens = self.index_tensor(batch.tokens)
            return self.model.upper_states(
                lower, tokens, stream_rows=anchors, rootless=without, **self.row_arguments(batch)
            )

    def logits(
        self,
        hidden: torch.Tensor,  # [..., D] final-normed
        kind: TermKind,  # whose rows of the LM head are used
    ) -> torch.Tensor:  # [..., V], of streams [..., Vd]
        return F.linear(hidden.to(self.dtype), *self._lm_heads[kind])

    def loss_and_term_means(
        self,
        batch: Batch,
        lower: torch.Tensor,  # [B, T, state_size]
        step: int,  # see `Objective.loss_terms`
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Eq. 5's weighted sum, with gradients, and the means as "NAME_loss" in nats per token."""
        states = self._hidden_states_by_kind(batch, lower, self.rootless_anchors(batch, step))
        found = []
        for term in self.loss_terms(batch, step):
            flat = states[term.kind].reshape(-1, self.hidden_size)
            rows = flat[self.index_tensor(term.rows)]
            targets = self.index_tensor(term.targets)
            if term.kind == PRUNE:
                with autocast_for(self.device, self.dtype):
                    rows = self.model.early_exit_states(rows)
            if term.previous is not None:
                with autocast_for(self.device, self.dtype):
                    rows = self.model.apply_condition(
                        rows, self.index_tensor(term.previous).clamp(min=0)
                    )
            head, bias = self._lm_heads[term.kind]
            rows = rows.to(self.dtype)
            found.append(TermRows(term.name, term.weight, rows, head, bias, targets))
        return self.weighted_loss(found)

    def _hidden_states_by_kind(
        self, batch: Batch, lower: torch.Tensor, rootless: np.ndarray | None = None
    ) -> dict[TermKind, torch.Tensor]:
        """States [..., D]: main and streams final-normed, the pruning's as returned by `lower`."""
        nodes = lower.to(self.device)
        if self.train.keeps_streams:
            streams = nodes[anchor_indices(self.index_tensor(batch.anchors))]
            return {STREAM: streams, GIVEN: streams}
        hidden = self.upper(batch, nodes, rootless)
        return {MAIN: hidden.main, STREAM: hidden.streams, GIVEN: hidden.streams, PRUNE: nodes}

    def weighted_loss(self, terms: Iterable[TermRows]) -> tuple[torch.Tensor, dict[str, float]]:
        """The sum and means as in `loss_and_term_means`; a term without targets counts 0."""
        total = torch.zeros((), device=self.device)
        parts: dict[str, float] = {}
        for name, alpha, rows, weight, bias, targets in terms:
            there = targets != IGNORED
            rows = rows[there]
            targets = targets[there]
            scale = alpha / max(1, len(targets))
            part, losses = LinearCrossEntropy.apply(rows, weight, bias, targets, scale)
            total = total + part
            parts[f"{name}_loss"] = float(losses.mean()) if len(targets) else 0.0
        return total, parts

    @without_gradients
    def rank_candidates(
        self, batch: Batch, lower: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        streams = self._hidden_states_by_kind(batch, lower)[STREAM].unflatten(
            -1, (-1, self.hidden_size)
        )
        shape = *batch.anchors.shape, self.train.num_streams, -1
        streams = streams.reshape(shape)
        with autocast_for(self.device, self.dtype):
            logits = self.logits(streams, STREAM).float()
        best = logits.log_softmax(-1).topk(count)
        tokens = best.indices
        logprobs = best.values
        if self.draft_vocab is not None:
            tokens = self.index_tensor(self.draft_vocab)[tokens]
        if self.is_conditional:
            every = zip(streams, self.index_tensor(batch.targets(0)), tokens, logprobs, strict=True)
            logprobs = torch.stack([self._condition_candidates(*one) for one in every])
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _condition_candidates(
        self,
        streams: torch.Tensor,  # [K, G, D] final-normed
        # [K] the token after each anchor, before the first stream's; -1 for none
        roots: torch.Tensor,
        tokens: torch.Tensor,  # [K, G, C] candidates
        logprobs: torch.Tensor,  # [K, G, C] without a condition
    ) -> torch.Tensor:
        """Log probabilities [K, G, C, C], given each candidate of the stream before."""
        first = roots.clamp(min=0)[:, None, None].expand(-1, 1, tokens.shape[-1])
        previous = torch.cat([first, tokens[:, :-1]], dim=1)
        with autocast_for(self.device, self.dtype):
            rows = self._lm_heads[MAIN][0][tokens]
            more = self.model.condition_logits(streams.to(self.dtype), previous, rows).float()
        scores = logprobs[:, :, None] + more
        # The C candidates have the same total probability as without a condition.
        mass = logprobs.logsumexp(-1)[:, :, None, None]
        return scores.log_softmax(-1) + mass

    @without_gradients
    def mean_losses(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        return self.loss_and_term_means(batch, lower, 0)[1]

    def to_bits(self, states: torch.Tensor) -> np.ndarray:
        kind = torch.int16 if self.state_bytes == 2 else torch.int32
        bits: np.ndarray = states.cpu().view(kind).numpy()
        return bits

    def from_bits(self, bits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(bits).view(self.dtype)

    def index_tensor(self, array: np.ndarray) -> torch.Tensor:
        """An int64 tensor on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).long().to(self.device)

    def row_arguments(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Positions [B, T] and what rows see [B, T, T], by the reference's argument names."""
        masks = {"visible": batch.causal_visible, "stream_visible": batch.stream_visible}
        seen = {name: torch.from_numpy(mask).to(self.device) for name, mask in masks.items()}
        return {"positions": self.index_tensor(batch.positions), **seen}


class TorchTrainer(Trainer):
    """Takes training steps in PyTorch; stream embeddings learn at a multiple of the rate."""

    STATE_FILE = "state.pt"
    objective: TorchObjective

    def __init__(
        self,
        objective: TorchObjective,
        num_steps: int,  # of the whole run, for the learning rate
    ) -> None:
        self.objective = objective
        self.num_steps = num_steps
        self.step = 0
        self.named = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
        train = objective.train
        rest = [p for name, p in self.named.items() if name != "stream_embeddings"]
        groups: list[dict[str, Any]] = [{"params": rest, "multiple": 1.0}]
        if "stream_embeddings" in self.named:
            own = [self.named["stream_embeddings"]]
            groups.append({"params": own, "multiple": train.embedding_rate})
        self.optimizer = torch.optim.AdamW(
            groups, lr=train.learning_rate, weight_decay=train.weight_decay
        )

    def advance(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        train = self.objective.train
        rate = train.learning_rate_at(self.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiple"]
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self.objective.loss_and_term_means(batch, lower, self.step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.named.values(), train.clip_norm)
        check_gradient_is_finite(float(norm), self.step + 1)
        self.optimizer.step()
        self.step += 1
        return {"step": self.step, "rate": rate, **parts}

    def write(self, path: Path, identity: str) -> None:
        weights = {name: p.detach().cpu() for name, p in self.named.items()}
        state = {"identity": identity, "step": self.step, "weights": weights}
        torch.save({**state, "optimizer": self.optimizer.state_dict()}, path)

    def read(self, path: Path) -> tuple[str, Any]:
        state: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
        return state["identity"], state

    @without_gradients
    def restore(self, state: dict[str, Any]) -> None:
        for name, parameter in self.named.items():
            parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


class LinearCrossEntropy(Function):
    """The scaled sum of cross-entropies under a linear head, and each row's own [R] in nats.

    The logits are by far the largest arrays of a step: loss and gradient are computed a few rows at
    a time, in one go, and no logits are kept. Gradients reach `hidden`, and `weight` if it takes
    gradients; not `bias`, and nothing passes through the rows' losses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [R, D]
        weight: torch.Tensor,  # [V, D]
        bias: torch.Tensor | None,  # [V]
        targets: torch.Tensor,  # [R] ids
        scale: float,  # of every row in the sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sum, and already the gradients, for `backward`."""
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        of_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if is_trained else None
        for rows in split_rows(len(hidden), len(weight)):
            logits = F.linear(hidden[rows], weight, bias).float()
            chosen = targets[rows][:, None]
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses[rows] = (normaliser - logits.gather(1, chosen))[:, 0]
            # d loss / d logits: the probabilities, less one at the target
            slopes = logits.sub_(normaliser).exp_()
            slopes.scatter_add_(1, chosen, torch.full_like(normaliser, -1.0))
            slopes = slopes.mul_(scale).to(weight.dtype)
            of_hidden[rows] = slopes @ weight
            if of_weight is not None:
                of_weight += slopes.T @ hidden[rows]
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = (
            one if one is None else one * upstream[0].to(one.dtype) for one in ctx.saved_tensors
        )
        return *found, None, None, None


def use_stream_attention(base: nn.Module, num_streams: int) -> None:
    """Make the attention modules of `base` score stream rows sparsely, by `stream_attention`.

    With K anchors of G streams, a stream row sees the node rows and at most G of the K * G stream
    rows; PyTorch's kernels would score it against all of them. Node rows still go to these kernels.

    It is registered with transformers for the whole process, so the `num_streams` of the last call
    applies to all bases.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention [B, rows, H, Dh], and None for weights, as transformers' modules expect."""
        # Rows with as many queries as keys, or without a mask, are nodes.
        if attention_mask is None or query.shape[2] == key.shape[2]:
            of_nodes: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **settings
            )
            return of_nodes
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mixed = stream_attention(query, key, value, attention_mask, num_streams, scale)
        return mixed.transpose(1, 2), None

    AttentionInterface.register(STREAM_ATTENTION, attention)
    AttentionMaskInterface.register(STREAM_ATTENTION, sdpa_mask)
    base.set_attn_implementation(STREAM_ATTENTION)


def stream_attention(
    query: torch.Tensor,  # [B, H, K * G, Dh], not scaled yet
    key: torch.Tensor,  # [B, Hkv, T + K * G, Dh], nodes first
    value: torch.Tensor,  # [B, Hkv, T + K * G, Dh]
    # [B, 1, K * G, T + K * G] additive; only its columns of nodes are read: a stream sees its
    # anchor's streams up to itself
    mask: torch.Tensor,
    num_streams: int,  # G
    scale: float,
) -> torch.Tensor:  # [B, H, K * G, Dh]
    """Attention (eq. 2) of the K * G stream rows, anchor by anchor."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    num_nodes = key.shape[2] - rows
    groups = heads // kv_heads
    num_anchors = rows // num_streams
    # [B, Hkv, groups, K, G, Dh]: a KV head's query heads side by side
    parted = (query * scale).view(batch, kv_heads, groups, num_anchors, num_streams, width)
    folded = parted.reshape(batch, kv_heads, groups * rows, width)
    node_scores = folded @ key[:, :, :num_nodes].transpose(2, 3)
    node_scores = node_scores.view(batch, heads, rows, num_nodes) + mask[..., :num_nodes]

    def only_stream_rows(x: torch.Tensor) -> torch.Tensor:
        """The streams' part [B * Hkv * K, G, Dh] of keys or values."""
        return x[:, :, num_nodes:].reshape(-1, num_streams, width)

    def by_node(x: torch.Tensor) -> torch.Tensor:
        """Reshape [B, Hkv, groups, K, G, n] to [B * Hkv * K, groups * G, n]."""
        return x.transpose(2, 3).reshape(-1, groups * num_streams, x.shape[-1])

    def by_row(x: torch.Tensor) -> torch.Tensor:
        """Undo `by_node`, as [B, H, K * G, n]."""
        shape = batch, kv_heads, num_anchors, groups, num_streams, x.shape[-1]
        return x.view(shape).transpose(2, 3).reshape(batch, heads, rows, -1)

    own_scores = by_row(torch.bmm(by_node(parted), only_stream_rows(key).transpose(1, 2)))
    rank = torch.arange(rows, device=query.device) % num_streams
    later = rank[:, None] < torch.arange(num_streams, device=query.device)
    own_scores = own_scores.masked_fill(later, torch.finfo(own_scores.dtype).min)

    weights = torch.cat([node_scores, own_scores], dim=-1).float().softmax(dim=-1).to(value.dtype)
    on_nodes, on_own = weights.split([num_nodes, num_streams], dim=-1)
    mixed = on_nodes.reshape(batch, kv_heads, groups * rows, num_nodes) @ value[:, :, :num_nodes]
    on_own = on_own.reshape(*parted.shape[:-1], num_streams)
    return mixed.view(batch, heads, rows, width) + by_row(
        torch.bmm(by_node(on_own), only_stream_rows(value))
    )
