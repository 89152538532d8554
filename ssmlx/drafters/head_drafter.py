"""The common part of all drafting heads: settings, weights, and the drafter over them.

Heads guess the next tokens from the target's newest hidden state, after its final norm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import mlx.core as mx

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Verified
from ..decoding.ranking import Noise
from ..decoding.sampling import GREEDY, Sampling
from ..model.backbone import Backbone
from ..model.tree import Tree
from ..settings import check_settings, setting
from .base import BaseDrafter, DrafterInputs

HeadKind = Literal["medusa", "mlp_speculator"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Settings of drafting heads of any kind, as their folder has them; checked when made."""

    kind: ClassVar[HeadKind]
    vocab_size: int = setting(least=1)  # V, the base model's
    # Vd, tokens that the heads guess among; 0 for the whole vocabulary
    draft_vocab_size: int = setting(0, least=0)

    def __post_init__(self) -> None:
        found = "{name} is {value!r} in the settings of drafting heads"
        check_settings(self, found=found, do="check the heads, or convert them again")

    @property
    def base_width(self) -> int:
        """D, the base model's width."""
        raise NotImplementedError

    @property
    def num_levels(self) -> int:
        """Levels below the root of the largest tree."""
        raise NotImplementedError

    @property
    def num_guessed(self) -> int:
        """Tokens that the heads guess among: Vd, or V."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def matrix_names(self) -> list[str]:
        """The tensors with a row for each token that may be guessed."""
        raise NotImplementedError

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of weights by name; a weight that heads share is listed once."""
        raise NotImplementedError

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors in the folder: the weights, and `draft_vocab` if any."""
        vocab = {"draft_vocab": (self.draft_vocab_size,)} if self.draft_vocab_size else {}
        return {**self.weight_shapes(), **vocab}

    @property
    def num_parameters(self) -> int:
        """Trained numbers, shared ones counted once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


class DraftingHeads:
    """Heads on a base model, which guess tokens from its last hidden state."""

    drafter: ClassVar[str]
    nbytes: int  # in memory beside the base model

    def __init__(
        self,
        config: HeadConfig,
        # those of `config.tensor_shapes()`, in the base model's dtype
        tensors: Mapping[str, mx.array],
        backbone: Backbone,
    ) -> None:
        self.config: Any = config
        # [Vd] the token of each column of their logits; None for all tokens
        self.draft_vocab = tensors.get("draft_vocab")
        self.num_parameters: int = config.num_parameters

    def tree_settings(self, tree: Any) -> Any:
        """`tree` with defaults filled in, and widths cut to the number of guessable tokens."""
        raise NotImplementedError

    def chain_settings(self, tree: Any) -> Any:
        """The settings of a chain of as many levels as those of `tree`."""
        raise NotImplementedError

    def tree_size(
        self,
        tree: Any,  # as `tree_settings` returns it
    ) -> tuple[int, int]:
        """Levels below the root, and nodes including the root, of the largest tree."""
        raise NotImplementedError

    def propose_tree(
        self,
        root: mx.array,  # [1] decided at `hidden`
        hidden: mx.array,  # [1, D] the last hidden state, after the final norm
        tree: Any,
        # [H, Vd] what `Sampling.noise` knows of the decisions that each head guesses
        noise: Noise = None,
    ) -> Tree:
        raise NotImplementedError


class HeadDrafter(BaseDrafter):
    """Drafts from heads on the hidden state of the last accepted node, always the largest tree.

    If the target takes no trees, the likeliest tokens are drafted as a chain, and the hidden state
    is the tap of the final norm: such a target's calls give no others.
    """

    keeps_to_chains = True

    def __init__(
        self,
        backbone: Backbone,
        heads: DraftingHeads,
        tree: Any,
        sampling: Sampling = GREEDY,
        *,
        is_chain: bool = False,
    ) -> None:
        self._tap: int | None = None
        if is_chain:
            backbone.capabilities.require("last_hidden", "drafting heads")
            tree = heads.chain_settings(tree)
            self._tap = len(backbone.layers)
        self.needs = Needs(taps=() if self._tap is None else (self._tap,))
        self._backbone = backbone
        self._heads = heads
        self._tree = heads.tree_settings(tree)
        self._sampling = sampling
        levels, nodes = heads.tree_size(self._tree)
        self.largest = DraftShape(heads.drafter, nodes, levels)
        self.num_parameters = heads.num_parameters

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Self:
        tree = inputs.config.tree if inputs.settings is None else inputs.settings
        backbone = inputs.model.backbone
        return cls(backbone, inputs.loaded, tree, inputs.guess_sampling, is_chain=inputs.is_chain)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        if self._tap is None:
            newest = verified.last_hidden
        else:
            newest = verified.taps[self._tap][:, verified.acceptance.last]
        hidden = self._backbone.final_norm(newest)[0]
        levels = self.largest.levels
        noise = self._sampling.noise(verified.root_position, levels, self._heads.draft_vocab)
        return self._heads.propose_tree(verified.root, hidden, self._tree, noise)
