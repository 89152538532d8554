"""The losses of drafting heads on a frozen model, and held-out text replayed with them.

Head h guesses the token h + 2 places after a row of final-normed hidden states, as stream h + 1
does: so the batches, the schedule and the saved state are those of the stream trainer.
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


def seed_torch_and_build_new_heads(
    config: HeadConfig, draft_vocab: np.ndarray | None, seed: int, lm_head: torch.Tensor
) -> HeadReference:
    """Build new drafting heads.

    Args:
        config: kind and sizes.
        draft_vocab: [Vd] int32 tokens that they guess among; None for all.
        seed: PyTorch's global generator is seeded with it, and a speculator's weights are drawn.
        lm_head: [V, D] of the base model, which Medusa's matrices start from; a speculator ignores
            it.
    """
    torch.manual_seed(seed)
    model = new_reference(config, None if draft_vocab is None else torch.from_numpy(draft_vocab))
    if isinstance(model, MedusaReference):
        model.copy_lm_head(lm_head)
    return model


def load_base_with_lora_merged(path: Path, lora: Path | None) -> StreamFusedReference:
    """Load the model that heads are trained for, in float32, with the weights of a LoRA added.

    Args:
        path: the base model's folder.
        lora: a folder with LoRA, see `merge_fine_tuning`; None for the base model itself.

    Returns:
        The model without streams; its base is frozen.

    Raises:
        InputError: the base or the LoRA cannot be loaded, or does not fit.
    """
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
    """Weighted cross-entropies of every head, over the hidden states of a model that stays frozen.

    In `train`, `stream_weights` stand for the heads'. `widths`, children of a node by level, are of
    the tree that a replay drafts with an MLP speculator.
    """

    FROZEN_PART = "frozen model"
    STORE_FILE = "hidden.states"
    LOWER_KIND = ("final norm",)

    def __init__(
        self,
        model: HeadReference,
        frozen: StreamFusedReference,
        train: TrainConfig,
        widths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Freeze the model that is drafted for, cast it to `dtype`, and move both to the device, in
        place.

        Args:
            model: the heads, which stay in float32.
            frozen: the model that they draft for.
            train: settings of the training.
            widths: of the class.
            device: to compute on.
            dtype: of the frozen weights and the arithmetic.
        """
        frozen.to(device).requires_grad_(False)
        cast_frozen_parameters(frozen, dtype)
        vocab = None if model.draft_vocab is None else model.draft_vocab.cpu().numpy()
        super().__init__(frozen, train, vocab, device, dtype)
        self._frozen = frozen
        self._widths = tuple(widths)
        self.model: Any = model.to(device)

    @without_gradients
    def lower(self, batch: Batch) -> torch.Tensor:
        """Return [B, T, D] final-normed hidden states of the frozen model, in `dtype`."""
        tokens = self.index_tensor(batch.tokens)
        nothing = torch.arange(0, device=self.device)
        with autocast_for(self.device, self.dtype):
            hidden = self._frozen.hidden_states(
                tokens, stream_rows=nothing, **self.row_arguments(batch)
            )
        return hidden.main.to(self.dtype)

    def loss_and_term_means(
        self, batch: Batch, lower: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted sum of the heads' losses, and each head's mean as "head_N_loss", in
        nats a token.

        Args:
            batch: B texts; heads guess behind their anchors.
            lower: [B, T, D] as `lower` gives it.
            step: is not read.
        """
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
        """Return, for each head, its states [B, K, W], and the matrix and bias that give logits of
        them.

        Args:
            batch: B texts of K anchors.
            lower: [B, T, D] as `lower` gives it.
        """
        levels = range(self.model.config.num_levels)
        # Where the text has ended there is no target either.
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
        """Return the states [B, K, D] of the anchors, from which heads guess, in float32."""
        return lower[anchor_indices(torch.from_numpy(batch.anchors))].to(self.device).float()

    @without_gradients
    def rank_candidates(
        self, batch: Batch, lower: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the `count` likeliest tokens of every head; a speculator's stages are given the
        text's own tokens before theirs.

        Args:
            batch: B texts of K anchors.
            lower: [B, T, D] as `lower` gives it.
            count: tokens of each head.

        Returns:
            [B, K, G, count] tokens, best first, and their log probabilities.
        """
        found: list[Any] = []
        for row in self._head_inputs_of_anchors(batch, lower):
            logits = nn.functional.linear(*row)
            found.append(logits.float().log_softmax(-1).topk(count))
        tokens = torch.stack([best.indices for best in found], dim=2).cpu().numpy()
        logprobs = torch.stack([best.values for best in found], dim=2)
        tokens = tokens if self.draft_vocab is None else self.draft_vocab[tokens]
        return tokens, logprobs.cpu().numpy()

    @without_gradients
    def replay(self, batch: Batch, lower: torch.Tensor, size: int) -> Replay:
        """Count the target calls of decoding the batch's answers with trees of `size` nodes.

        An MLP speculator drafts behind its own guesses here, not behind the text. Medusa heads are
        replayed as `Objective.replay` does it.

        Args:
            batch: B texts.
            lower: [B, T, D] as `lower` gives it.
            size: nodes of a tree, the root included.

        Returns:
            Tokens and calls of all answers; the call of each prompt is counted.
        """
        if not isinstance(self.model, MlpSpeculatorReference):
            return super().replay(batch, lower, size)
        # All answers side by side: a stage's guesses depend on the path.
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
    tokens: Sequence[np.ndarray],
    edge_logprobs: Sequence[np.ndarray],
    widths: Sequence[int],
    num_nodes: int,
    following: Sequence[int],
) -> int:
    """Return how many of the next tokens stand on one path from a tree's root: how many would be
    accepted.

    The tree is the full one, cut to the likeliest nodes; where the last of these ties, all that tie
    stay.

    Args:
        tokens: by level, [widths[0] * ... * widths[i]] guesses, the children of a node side by
            side.
        edge_logprobs: of the same shapes, given the node above; they are cut to the bounds that all
            drafting has.
        widths: children of a node, by level.
        num_nodes: of the tree, the root included.
        following: the text's next tokens.
    """
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
