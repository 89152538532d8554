"""Medusa heads (arXiv 2401.10774): head h guesses the token h + 2 places after a hidden state's.

Each head is a few residual blocks, x + SiLU(W x + b), and a matrix of its own, or the base model's
LM head where it has none. All heads see the same state and not each other's guesses, so trees
grow from their ranks exactly as from streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..decoding.drafter import num_trained, rank_candidates
from ..errors import InputError
from ..model.backbone import Backbone, LMHead, head_bytes
from ..model.shapes import arrays_in, expect_shape
from ..model.tree import Tree, draft_topology, grow_tree
from ..settings import DrafterKind, TreeConfig


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """What the tensors of Medusa heads say of themselves.

    Attributes:
        num_heads: H.
        num_layers: residual blocks of each head.
        hidden_size: D, the base model's width.
        vocab_size: V, the base model's.
        shared_heads: heads without a matrix of their own, which use the base model's LM head.
        draft_vocab_size: Vd, tokens that the heads guess among; 0 for the whole vocabulary.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    shared_heads: tuple[int, ...] = ()
    draft_vocab_size: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_heads", 1), ("num_layers", 0), ("hidden_size", 1), ("vocab_size", 1),
            ("draft_vocab_size", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"{name} is {value!r} in the settings of Medusa heads",
                    expected=f"a whole number of {least} or more",
                    do="check the heads, or convert them again",
                )

    @property
    def num_levels(self) -> int:
        """Levels below the root of the trees that the heads draft."""
        return self.num_heads

    @property
    def matrix_names(self) -> list[str]:
        """The tensors with a row for each token that may be guessed."""
        own = (head for head in range(self.num_heads) if head not in self.shared_heads)
        return [f"{head}.{self.num_layers}.weight" for head in own]

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of an MLX heads file."""
        width, rows = self.hidden_size, self.draft_vocab_size or self.vocab_size
        expected: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                expected[f"{head}.{layer}.linear.weight"] = (width, width)
                expected[f"{head}.{layer}.linear.bias"] = (width,)
        expected |= {name: (rows, width) for name in self.matrix_names}
        if self.draft_vocab_size:
            expected["draft_vocab"] = (self.draft_vocab_size,)
        return expected


class MedusaHeads:
    """The heads on a base model.

    Args:
        config: their settings.
        tensors: `config.expected_tensors()`, in the backbone's dtype.
        backbone: the base model, whose LM head serves heads that have no matrix.

    Attributes:
        config: as given.
        draft_vocab: [Vd] int32, the token of each column of the logits; None for all.
        drafter: the name under which they draft.
        num_parameters: weights of their own.
    """

    drafter: DrafterKind = "medusa"

    def __init__(
        self, config: MedusaConfig, tensors: Mapping[str, mx.array], backbone: Backbone
    ) -> None:
        self.config = config
        self.draft_vocab = tensors.get("draft_vocab")
        self.num_parameters = num_trained(tensors)
        heads, layers = range(config.num_heads), range(config.num_layers)
        self._shared = list(config.shared_heads)
        self._own = [head for head in heads if head not in self._shared]

        def stacked(names: list[str]) -> mx.array:
            return mx.stack([tensors[name] for name in names])

        self._blocks = [
            (
                stacked([f"{head}.{layer}.linear.weight" for head in heads]),
                stacked([f"{head}.{layer}.linear.bias" for head in heads]),
            )
            for layer in layers
        ]
        self._matrices = stacked(config.matrix_names) if self._own else None
        self._lm_head: LMHead | None = None
        if self._shared:
            vocab = self.draft_vocab
            self._lm_head = backbone.lm_head if vocab is None else backbone.draft_head(vocab)
        order = [*self._own, *self._shared]
        self._places = None if order == sorted(order) else mx.array([order.index(h) for h in heads])
        mx.eval(self._blocks, self._matrices, self._places)

    @property
    def num_levels(self) -> int:
        """H, levels below the root of the drafted trees."""
        return self.config.num_heads

    @property
    def nbytes(self) -> int:
        """Bytes of their own weights, and of the LM head's rows that they copied."""
        own = [self._blocks, self._matrices, self.draft_vocab, self._places]
        copied = 0 if self.draft_vocab is None else head_bytes(self._lm_head)
        return copied + sum(array.nbytes for array in arrays_in(own) if array is not None)

    @property
    def draft_vocab_size(self) -> int:
        """Vd; V where the heads guess among the whole vocabulary."""
        return self.config.draft_vocab_size or self.config.vocab_size

    def medusa_logits(self, hidden: mx.array) -> mx.array:
        """[H, Vd] logits of every head.

        Args:
            hidden: [1, D] the newest accepted node's state, behind the base model's final norm.
        """
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
        return logits if self._places is None else logits[self._places]

    def propose_tree(self, root: mx.array, hidden: mx.array, tree: TreeConfig) -> Tree:
        """The tree below `root` [1], full or best, as streams grow it.

        Args:
            root: the token that the base model decided on at `hidden`.
            hidden: [1, D] as `medusa_logits` takes it.
            tree: the shape of the tree; no wider than the heads have tokens.
        """
        tree = self.fitting(tree)
        count = draft_topology(tree, self.num_levels).num_candidates
        tokens, logprobs = rank_candidates(self.medusa_logits(hidden), count)
        if self.draft_vocab is not None:
            tokens = self.draft_vocab[tokens]
        return grow_tree(root, tokens, logprobs, tree)

    def fitting(self, tree: TreeConfig) -> TreeConfig:
        """`tree`, no wider than there are tokens to guess."""
        return tree.no_wider_than(self.draft_vocab_size)
