"""The losses of drafting heads on a frozen model, and held-out text replayed with them.

Head h guesses the token h + 2 places after a row of final-normed hidden states, as stream h + 1
does: so batches, schedule and saved state are the stream trainer's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ssmlx.drafters.head_drafter import HeadConfig
from ssmlx.settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB, StreamConfig
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Batch, draft_vocab_indices
from ssmlx.training.objective import STREAM
from ssmlx.training.replay import Replay

from ..base import load_base
from ..reference.checkpoint import merge_fine_tuning
from ..reference.heads import (
    HeadInput,
    HeadReference,
    MedusaReference,
    MlpSpeculatorReference,
    new_reference,
)
from ..reference.model import StreamFusedReference, anchor_indices
from ..typed_torch import without_gradients
from .run import TermRows, TorchObjective, autocast_for, cast_frozen_parameters


def new_heads(
    config: HeadConfig,
    draft_vocab: np.ndarray | None,  # [Vd] int32 tokens that heads guess among; None for all
    seed: int,
    lm_head: torch.Tensor,  # [V, D] of the base model, the initial value of Medusa's matrices
) -> HeadReference:
    """Make new heads; seeds PyTorch's global generator with `seed`."""
    torch.manual_seed(seed)
    model = new_reference(config, None if draft_vocab is None else torch.from_numpy(draft_vocab))
    if isinstance(model, MedusaReference):
        model.copy_lm_head(lm_head)
    return model


def load_frozen_model(
    path: Path,
    lora: Path | None,  # see `merge_fine_tuning`
) -> StreamFusedReference:
    """Load the model for which heads are trained, frozen, in float32, without streams."""
    base = load_base(path, attn_implementation="sdpa")
    if lora is not None:
        base = merge_fine_tuning(base, lora)
    config = StreamConfig(
        num_streams=0,
        num_msa_layers=1,
        num_layers=base.config.num_hidden_layers,
        hidden_size=base.config.hidden_size,
    )
    return StreamFusedReference(base, config)


class HeadObjective(TorchObjective):
    """Weighted cross-entropies of all heads, over the hidden states of a frozen model."""

    FROZEN_PART = "frozen model"
    STORE_FILE = "hidden.states"
    LOWER_KIND = ("final norm",)

    def __init__(
        self,
        model: HeadReference,  # stays in float32
        frozen: StreamFusedReference,  # the model that heads draft for
        train: TrainConfig,  # its `stream_weights` are the heads'
        # children of a node by level, of the tree that a replay drafts with an MLP speculator
        widths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,  # of the frozen weights and the arithmetic
    ) -> None:
        """Cast `frozen` to `dtype`, and move both models to the device, in place."""
        frozen.to(device).requires_grad_(False)
        cast_frozen_parameters(frozen, dtype)
        vocab = None if model.draft_vocab is None else model.draft_vocab.cpu().numpy()
        super().__init__(frozen, train, vocab, device, dtype)
        self._frozen = frozen
        self._widths = tuple(widths)
        self.model: Any = model.to(device)

    @without_gradients
    def lower(self, batch: Batch) -> torch.Tensor:
        """Compute final-normed hidden states [B, T, D] of the frozen model, in `dtype`."""
        tokens = self.index_tensor(batch.tokens)
        nothing = torch.arange(0, device=self.device)
        with autocast_for(self.device, self.dtype):
            hidden = self._frozen.hidden_states(
                tokens, stream_rows=nothing, **self.row_arguments(batch)
            )
        return hidden.main.to(self.dtype)

    def loss_and_term_means(
        self,
        batch: Batch,
        lower: torch.Tensor,  # [B, T, D]
        step: int = 0,  # not used
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum, and each head's mean as "head_N_loss", in nats per token."""
        heads = zip(self._head_inputs_of_anchors(batch, lower), self.train.alphas, strict=True)
        found = []
        for number, (one, alpha) in enumerate(heads, 1):
            targets = self.index_tensor(
                draft_vocab_indices(batch.targets(number), self.draft_vocab)
            )
            name = f"head_{number}"
            found.append(TermRows(name, alpha, one.states, one.weight, one.bias, targets))
        return self.weighted_loss(found)

    def _head_inputs_of_anchors(self, batch: Batch, lower: torch.Tensor) -> list[HeadInput]:
        """By head: its states [B, K, W], and the matrix and bias of its logits."""
        levels = range(self.model.config.num_levels)
        # After the text's end there is no target either.
        text = torch.stack([self.index_tensor(batch.targets(level)) for level in levels], dim=-1)
        with autocast_for(self.device, self.dtype):
            rows = self.model.iterate_head_inputs(
                self._anchor_states(batch, lower), text.clamp(min=0), self._lm_heads[STREAM]
            )
            return [
                HeadInput(states.to(self.dtype), weight.to(self.dtype), bias)
                for states, weight, bias in rows
            ]

    def _anchor_states(self, batch: Batch, lower: torch.Tensor) -> torch.Tensor:
        """The states [B, K, D] from which heads guess, in float32."""
        return lower[anchor_indices(torch.from_numpy(batch.anchors))].to(self.device).float()

    @without_gradients
    def rank_candidates(
        self, batch: Batch, lower: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank candidates; a speculator's stages receive the text's own tokens."""
        found: list[Any] = []
        for row in self._head_inputs_of_anchors(batch, lower):
            logits = nn.functional.linear(*row)
            found.append(logits.float().log_softmax(-1).topk(count))
        tokens = torch.stack([best.indices for best in found], dim=2).cpu().numpy()
        logprobs = torch.stack([best.values for best in found], dim=2)
        tokens = tokens if self.draft_vocab is None else self.draft_vocab[tokens]
        return tokens, logprobs.cpu().numpy()

    @without_gradients
    def replay(
        self,
        batch: Batch,
        lower: torch.Tensor,
        size: int,  # nodes of a tree, the root included
    ) -> Replay:
        """Replay held-out text; an MLP speculator drafts after its own guesses here."""
        if not isinstance(self.model, MlpSpeculatorReference):
            return super().replay(batch, lower, size)
        # All answers are drafted together: a stage's guesses depend on the path.
        hidden = self._anchor_states(batch, lower)
        texts = [answer.tokens.tolist() for answer in batch.answers_with_anchors()]
        places = [0] * len(texts)
        calls = len(texts)
        widths = tuple(min(width, self.draft_vocab_size) for width in self._widths)
        while True:
            rows = [row for row, text in enumerate(texts) if places[row] + 1 < len(text)]
            if not rows:
                return Replay(sum(map(len, texts)), calls)
            roots = self.index_tensor(np.array([texts[row][places[row]] for row in rows]))
            with autocast_for(self.device, self.dtype):
                states = hidden[rows, [places[row] for row in rows]]
                tokens, edges = self.model.draft_full_trees(roots, states, widths)
            for place, row in enumerate(rows):
                following = texts[row][places[row] + 1 :]
                said = [level[place].cpu().numpy() for level in tokens]
                sure = [level[place].cpu().numpy() for level in edges]
                places[row] += 1 + accepted_depth(said, sure, widths, size, following)
                calls += 1


def accepted_depth(
    # by level, [widths[0] * ... * widths[i]] guesses, siblings together
    tokens: Sequence[np.ndarray],
    edge_logprobs: Sequence[np.ndarray],  # of the same shapes, given the node above
    widths: Sequence[int],  # children of a node, by level
    num_nodes: int,  # the root included; nodes that tie with the last one stay
    following: Sequence[int],  # the text's next tokens
) -> int:
    """How far the text follows one path in the tree of the `num_nodes` likeliest nodes."""
    sums = []
    above = np.zeros(1)
    for own, width in zip(edge_logprobs, widths, strict=True):
        above = np.repeat(above, width) + np.clip(own, MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB)
        sums.append(above)
    every = np.concatenate(sums)
    least = np.sort(every)[-min(num_nodes - 1, len(every))] if num_nodes > 1 else np.inf
    beam = 0
    depth = 0
    for level, width, wanted in zip(range(len(widths)), widths, following, strict=False):
        children = np.arange(beam * width, (beam + 1) * width)
        agreeing = children[tokens[level][children] == wanted]
        if not len(agreeing) or sums[level][agreeing[0]] < least:
            break
        beam = int(agreeing[0])
        depth = depth + 1
    return depth
