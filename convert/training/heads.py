"""The losses of drafting heads on a frozen model, and held-out text replayed with them.

Head h guesses the token h + 2 places after a row of final-normed hidden states, as stream h + 1
does: so the batches, the schedule and the saved state are those of the stream trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ssmlx.model.tree import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB
from ssmlx.settings import TreeConfig
from ssmlx.training.batches import Batch
from ssmlx.training.config import TrainConfig
from ssmlx.training.draft_vocab import draft_indices
from ssmlx.training.validation import answers
from ssmlx.tuning.replay import Guesses, Replay, num_candidates, replay

from ..reference.heads import HeadReference, MedusaReference, MlpSpeculatorReference
from ..reference.losses import IGNORED, linear_cross_entropy, mean_scales
from ..reference.model import StreamFusedReference
from .run import Layout, precision

_CHUNK_LOGITS = 1 << 24


def trained_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`losses.linear_cross_entropy` whose gradient reaches the head's weight too.

    Args:
        hidden: [R, D]
        weight: [V, D]
        targets: [R] token ids; every row has one.
        scales: [R] the weight of each row in the sum.
    """
    total, losses = _TrainedCrossEntropy.apply(hidden, weight, targets, scales)
    return total, losses


class _TrainedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scales: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        size = max(1, _CHUNK_LOGITS // len(weight))
        for first in range(0, len(hidden), size):
            rows = slice(first, first + size)
            logits = nn.functional.linear(hidden[rows], weight).float()
            chosen = targets[rows, None]
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses[rows] = (normaliser - logits.gather(1, chosen))[:, 0]
            # d loss / d logits: the probabilities, less one at the target
            slopes = logits.sub_(normaliser).exp_()
            slopes.scatter_add_(1, chosen, torch.full_like(normaliser, -1.0))
            slopes = slopes.mul_(scales[rows, None]).to(weight.dtype)
            of_hidden[rows] = slopes @ weight
            of_weight += slopes.T @ hidden[rows]
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * scales).sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        factor = upstream[0]
        return (
            of_hidden * factor.to(of_hidden.dtype),
            of_weight * factor.to(of_weight.dtype),
            None,
            None,
        )


@dataclass(frozen=True, eq=False)
class _Head:
    """One head's rows of a batch.

    Attributes:
        states: [B, K, W] what its matrix is given.
        weight: [Vd, W] the matrix.
        bias: [Vd] or None.
        is_trained: whether the matrix learns.
    """

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_trained: bool


class HeadObjective:
    """Weighted cross-entropies of every head, over the frozen model's hidden states.

    Args:
        model: the heads to train.
        frozen: the model that they draft for, its LoRA included; frozen here.
        train: the weights of the losses, `stream_weights` standing for the heads'.
        widths: of the tree that a replay drafts with an MLP speculator.
        device, dtype: what it runs on and in.

    """

    def __init__(
        self,
        model: HeadReference,
        frozen: StreamFusedReference,
        train: TrainConfig,
        widths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.train, self._widths = model.to(device), train, tuple(widths)
        self.device, self.dtype = device, dtype
        self._frozen = frozen.to(device).requires_grad_(False)
        for parameter in frozen.parameters():
            parameter.data = parameter.data.to(dtype)
        vocab = model.draft_vocab
        self.draft_vocab = None if vocab is None else vocab.cpu().numpy()
        head = frozen.base.lm_head
        rows = slice(None) if vocab is None else vocab.long()
        bias = getattr(head, "bias", None)
        self._lm_head = head.weight[rows], None if bias is None else bias[rows]

    @property
    def hidden_size(self) -> int:
        """D."""
        return self._lm_head[0].shape[1]

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the heads may guess."""
        return len(self._lm_head[0])

    @torch.no_grad()
    def lower(self, batch: Batch) -> torch.Tensor:
        """[B, T, D] final-normed hidden states, the same however the heads change."""
        layout = Layout.of(batch, self.device)
        nothing = torch.arange(0, device=self.device)
        with precision(self.device, self.dtype):
            hidden = self._frozen.hidden_states(layout.tokens, **layout.where, stream_rows=nothing)
        return hidden.main.to(self.dtype)

    def loss(
        self, batch: Batch, lower: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum, and each head's mean in nats a token.

        Args:
            batch: the examples.
            lower: [B, T, D] as `lower` gives them.
            step: not used.
        """
        total = torch.zeros((), device=self.device)
        parts: dict[str, float] = {}
        for index, (head, alpha) in enumerate(
            zip(self._heads(batch, lower), self.train.alphas, strict=True)
        ):
            targets = self._tensor(draft_indices(batch.targets(index + 1), self.draft_vocab))
            there = targets != IGNORED
            rows, wanted = head.states[there].to(self.dtype), targets[there]
            scales = mean_scales(wanted, alpha)
            if head.is_trained:
                weight = head.weight.to(self.dtype)
                term, losses = trained_cross_entropy(rows, weight, wanted, scales)
            else:
                term, losses = linear_cross_entropy(rows, head.weight, head.bias, wanted, scales)
            total = total + term
            parts[f"head_{index + 1}_loss"] = float(losses.mean()) if len(wanted) else 0.0
        return total, parts

    def _heads(self, batch: Batch, lower: torch.Tensor) -> Iterator[_Head]:
        """Every head's rows of a batch, K carriers wide."""
        hidden = lower[:, torch.from_numpy(batch.carriers)].to(self.device).float()
        if isinstance(self.model, MedusaReference):
            with precision(self.device, self.dtype):
                states = self.model.states(hidden)
            for index, state in enumerate(states):
                own = self.model.matrix(index)
                weight, bias = self._lm_head if own is None else (own, None)
                yield _Head(state, weight, bias, own is not None)
            return
        state = self.model.first_state(hidden)
        for stage in range(self.model.config.n_predict):
            # Where the text has ended there is no target either.
            tokens = self._tensor(batch.targets(stage)).clamp(min=0)
            with precision(self.device, self.dtype):
                state = self.model.next_state(stage, state, tokens)
            yield _Head(state, self.model.head[stage].weight, None, True)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).long().to(self.device)

    @torch.no_grad()
    def parts(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        """Each head's mean loss, without learning."""
        return self.loss(batch, lower)[1]

    @torch.no_grad()
    def guesses(self, batch: Batch, lower: torch.Tensor, count: int) -> list[Guesses]:
        """The `count` likeliest tokens of every Medusa head at every carrier."""
        found: list[Any] = []
        for head in self._heads(batch, lower):
            weight = head.weight.to(self.dtype)
            logits = nn.functional.linear(head.states.to(self.dtype), weight, head.bias)
            found.append(logits.float().log_softmax(-1).topk(count))
        tokens = torch.stack([best.indices for best in found], dim=2).cpu().numpy()
        logprobs = torch.stack([best.values for best in found], dim=2).cpu().numpy()
        if self.draft_vocab is not None:
            tokens = self.draft_vocab[tokens]
        return [
            Guesses(tokens[row, : len(answer)], logprobs[row, : len(answer)], answer)
            for row, answer in enumerate(answers(batch))
        ]

    def replay(self, batch: Batch, lower: torch.Tensor, tree_size: int) -> Replay:
        """The target calls that decoding the answers would take, with trees of that size."""
        if isinstance(self.model, MedusaReference):
            tree = TreeConfig(kind="best", size=tree_size, width=self.draft_vocab_size)
            count = num_candidates(tree, self.train.num_streams)
            return replay(self.guesses(batch, lower, count), tree)
        return self._replay_stages(batch, lower, tree_size)

    @torch.no_grad()
    def _replay_stages(self, batch: Batch, lower: torch.Tensor, keep: int) -> Replay:
        """As `replay`, of all answers side by side: a stage's guesses depend on the path."""
        assert isinstance(self.model, MlpSpeculatorReference)
        hidden = lower[:, torch.from_numpy(batch.carriers)].to(self.device).float()
        texts = [answer.tolist() for answer in answers(batch)]
        places, calls = [0] * len(texts), len(texts)
        widths = tuple(min(width, self.draft_vocab_size) for width in self._widths)
        while True:
            rows = [row for row, text in enumerate(texts) if places[row] + 1 < len(text)]
            if not rows:
                return Replay(sum(map(len, texts)), calls)
            roots = self._tensor(np.array([texts[row][places[row]] for row in rows]))
            with precision(self.device, self.dtype):
                states = hidden[rows, [places[row] for row in rows]]
                tokens, edges = self.model.rank_paths(roots, states, widths)
            for place, row in enumerate(rows):
                following = texts[row][places[row] + 1 :]
                said = [level[place].cpu().numpy() for level in tokens]
                sure = [level[place].cpu().numpy() for level in edges]
                places[row] += 1 + accepted_depth(said, sure, widths, keep, following)
                calls += 1


def accepted_depth(
    tokens: Sequence[np.ndarray],
    edges: Sequence[np.ndarray],
    widths: Sequence[int],
    keep: int,
    following: Sequence[int],
) -> int:
    """How far down the `keep` best nodes of a full tree say what follows.

    Args:
        tokens: of level i, [widths[0] * ... * widths[i]], path by path.
        edges: log probabilities, likewise.
        widths: children of each node, by level.
        keep: nodes that are left, the root included.
        following: the text behind the root.
    """
    sums, above = [], np.zeros(1)
    for own, width in zip(edges, widths, strict=True):
        above = np.repeat(above, width) + np.clip(own, MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB)
        sums.append(above)
    every = np.concatenate(sums)
    least = np.sort(every)[-min(keep - 1, len(every))] if keep > 1 else np.inf
    beam, depth = 0, 0
    for level, width, wanted in zip(range(len(widths)), widths, following, strict=False):
        children = np.arange(beam * width, (beam + 1) * width)
        agreeing = children[tokens[level][children] == wanted]
        if not len(agreeing) or sums[level][agreeing[0]] < least:
            break
        beam, depth = int(agreeing[0]), depth + 1
    return depth
