"""Medusa heads (arXiv 2401.10774): head h guesses the token h + 2 positions after a hidden state's.

Each head is a few residual blocks, x + SiLU(W x + b), and a matrix of its own, or else the base
model's LM head. All heads see the same state and not each other's guesses, so trees grow from their
ranks exactly as from streams.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..decoding.ranking import Noise, rank_candidates, with_noise
from ..model.backbone import Backbone
from ..model.lm_head import LMHead, head_bytes
from ..model.shapes import arrays_in, expect_shape
from ..model.tree import Tree, draft_topology, grow_tree
from ..settings import MAX_DRAFT_TOKENS, MAX_LAYERS, TreeConfig, setting
from .head_drafter import DraftingHeads, HeadConfig


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    kind = "medusa"
    num_heads: int = setting(least=1, most=MAX_DRAFT_TOKENS)  # H
    num_layers: int = setting(least=0, most=MAX_LAYERS)  # residual blocks of each head
    hidden_size: int = setting(least=1)  # D, the base model's width
    # heads without a matrix of their own, which use the base model's LM head
    shared_heads: tuple[int, ...] = setting((), least=0)

    @property
    def base_width(self) -> int:
        return self.hidden_size

    @property
    def num_levels(self) -> int:
        return self.num_heads

    @property
    def matrix_names(self) -> list[str]:
        own = (head for head in range(self.num_heads) if head not in self.shared_heads)
        return [f"{head}.{self.num_layers}.weight" for head in own]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"{head}.{layer}.linear.weight"] = (width, width)
                shapes[f"{head}.{layer}.linear.bias"] = (width,)
        return shapes | {name: (self.num_guessed, width) for name in self.matrix_names}


class MedusaHeads(DraftingHeads):
    drafter = "medusa"

    def __init__(
        self, config: MedusaConfig, tensors: Mapping[str, mx.array], backbone: Backbone
    ) -> None:
        super().__init__(config, tensors, backbone)
        heads = range(config.num_heads)
        vocab = self.draft_vocab
        self._shared = list(config.shared_heads)
        self._own = [head for head in heads if head not in self._shared]

        def stacked(names: list[str]) -> mx.array:
            return mx.stack([tensors[name] for name in names])

        self._blocks = [
            (
                stacked([f"{head}.{layer}.linear.weight" for head in heads]),
                stacked([f"{head}.{layer}.linear.bias" for head in heads]),
            )
            for layer in range(config.num_layers)
        ]
        self._matrices = stacked(config.matrix_names) if self._own else None
        self._lm_head: LMHead | None = None
        if self._shared:
            self._lm_head = backbone.lm_head if vocab is None else backbone.draft_head(vocab)
        order = [*self._own, *self._shared]
        self._head_order = (
            None if order == sorted(order) else mx.array([order.index(h) for h in heads])
        )
        mx.eval(self._blocks, self._matrices, self._head_order)
        kept = arrays_in([self._blocks, self._matrices, vocab, self._head_order])
        copied = 0 if vocab is None else head_bytes(self._lm_head)  # the LM head's rows
        self.nbytes = copied + sum(array.nbytes for array in kept if array is not None)

    def medusa_logits(
        self,
        hidden: mx.array,  # [1, D] after the final norm
    ) -> mx.array:  # [H, Vd], in the order of heads
        expect_shape("hidden state", hidden, 1, self.config.hidden_size)
        states = mx.broadcast_to(hidden, (self.config.num_heads, *hidden.shape))  # [H, 1, D]
        for weights, biases in self._blocks:
            states = states + nn.silu(states @ weights.swapaxes(1, 2) + biases[:, None])
        found: list[mx.array] = []
        if self._matrices is not None:
            own = states[mx.array(self._own)] if self._shared else states
            found.append((own @ self._matrices.swapaxes(1, 2))[:, 0])
        if self._lm_head is not None:
            shared = states[mx.array(self._shared)] if self._own else states
            found.append(self._lm_head(shared.swapaxes(0, 1))[0])
        logits = found[0] if len(found) == 1 else mx.concatenate(found)
        return logits if self._head_order is None else logits[self._head_order]

    def tree_settings(self, tree: TreeConfig) -> TreeConfig:
        return tree.no_wider_than(self.config.num_guessed)

    def chain_settings(self, tree: TreeConfig) -> TreeConfig:
        """A level for each head, whatever `tree` says."""
        return TreeConfig(kind="full", width=1)

    def tree_size(self, tree: TreeConfig) -> tuple[int, int]:
        return self.config.num_heads, tree.num_nodes(self.config.num_heads)

    def propose_tree(
        self, root: mx.array, hidden: mx.array, tree: TreeConfig, noise: Noise = None
    ) -> Tree:
        """The likeliest tokens of head h, from 0, at level h + 1."""
        tree = self.tree_settings(tree)
        count = draft_topology(tree, self.config.num_heads).num_candidates
        logits = with_noise(self.medusa_logits(hidden), noise)
        ranked = rank_candidates(logits, count, self.draft_vocab)
        return grow_tree(root, *ranked, tree)
