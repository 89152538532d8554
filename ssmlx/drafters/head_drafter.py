"""What all kinds of drafting heads share: settings, weights, and the drafter over them.

Heads guess the next tokens from the target's newest hidden state, behind its final norm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import mlx.core as mx

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.ranking import Noise
from ..decoding.sampling import GREEDY, Sampling
from ..model.backbone import Backbone
from ..model.tree import Tree
from ..settings import check_settings, setting

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
        """Levels below the root of the trees that the heads draft, at most."""
        raise NotImplementedError

    @property
    def num_guessed(self) -> int:
        """Tokens that the heads guess among: Vd, or V where that is the whole vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def matrix_names(self) -> list[str]:
        """The tensors with a row for each token that may be guessed."""
        raise NotImplementedError

    def trained_weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained weights by name; a weight that heads share stands once."""
        raise NotImplementedError

    def shapes_of_all_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name of all tensors of the folder: the weights, and `draft_vocab` if any."""
        vocab = {"draft_vocab": (self.draft_vocab_size,)} if self.draft_vocab_size else {}
        return {**self.trained_weight_shapes(), **vocab}

    @property
    def num_parameters(self) -> int:
        """Trained numbers, those that heads share counted once."""
        return sum(math.prod(shape) for shape in self.trained_weight_shapes().values())


class DraftingHeads:
    """Heads on a base model, which guess tokens from its last hidden state.

    Args:
        config: their settings.
        tensors: those of `config.shapes_of_all_tensors()`, in the base model's dtype.
        backbone: the base model.

    Attributes:
        drafter: the registered name of the drafter that they are for.
        nbytes: bytes that they keep in memory beside the base model.
        draft_vocab: [Vd] int32, the token of each column of their logits; None where these are all
            tokens.
        num_parameters: trained numbers.
    """

    drafter: ClassVar[str]
    nbytes: int

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, mx.array], backbone: Backbone
    ) -> None:
        self.config: Any = config
        self.draft_vocab = tensors.get("draft_vocab")
        self.num_parameters: int = config.num_parameters

    def complete_tree_settings(self, tree: Any) -> Any:
        """The settings `tree` with defaults filled in, and widths cut to the tokens there are to
        guess.

        Raises:
            InputError: these heads cannot draft such a tree.
        """
        raise NotImplementedError

    def chain_settings(self, tree: Any) -> Any:
        """The settings `tree` of a chain: as many levels, and one node at each."""
        raise NotImplementedError

    def max_levels_and_nodes(self, tree: Any) -> tuple[int, int]:
        """(levels below the root, nodes with the root) of the trees of these settings, at most.

        `tree` is what `complete_tree_settings` returned.
        """
        raise NotImplementedError

    def propose_tree(
        self, root: mx.array, hidden: mx.array, tree: Any, noise: Noise = None
    ) -> Tree:
        """Draft a tree.

        Args:
            root: [1] the token that the base model decided on at `hidden`.
            hidden: [1, D] the base model's last hidden state, behind its final norm.
            tree: the tree's settings, as `complete_tree_settings` takes them.
            noise: [H, Vd] what `Sampling.noise` knows of the decisions that each head guesses.
        """
        raise NotImplementedError


class HeadDrafter:
    """Drafts from heads on the hidden state of the last accepted node, always the largest tree.

    Args:
        backbone: the target's, for its final norm.
        heads: what guesses.
        tree: the tree's settings, as the heads' `complete_tree_settings` takes them.
        sampling: how the target decides.
        is_chain: whether the target takes no trees. The likeliest tokens are drafted as a chain
            then, and the hidden state is the tap of the final norm: such a target's calls give no
            others.
    """

    draft_calls = 0
    cache_bytes = 0

    def __init__(
        self,
        backbone: Backbone,
        heads: DraftingHeads,
        tree: Any,
        sampling: Sampling = GREEDY,
        *,
        is_chain: bool = False,
    ) -> None:
        """Fill in the tree's settings by the heads', which gives `largest`; nothing runs yet.

        InputError where the heads cannot draft such a tree, or the target does not give the hidden
        states that a chain needs.
        """
        self._tap: int | None = None
        if is_chain:
            backbone.capabilities.require("last_hidden", "drafting heads")
            tree = heads.chain_settings(tree)
            self._tap = len(backbone.layers)
        self.needs = Needs(taps=() if self._tap is None else (self._tap,))
        self._backbone = backbone
        self._heads = heads
        self._tree = heads.complete_tree_settings(tree)
        self._sampling = sampling
        levels, nodes = heads.max_levels_and_nodes(self._tree)
        self.largest = DraftShape(heads.drafter, nodes, levels)
        self.num_parameters = heads.num_parameters

    def start(self, tokens: Sequence[int]) -> None:
        """Nothing to do: heads see the newest hidden state and their own guesses alone."""

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Nothing to do, as in `start`."""

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Draft the largest tree behind the last accepted node; `shape` is not looked at.

        The heads get that node's hidden state behind the final norm, and where the target samples,
        the noise of the positions that they guess.
        """
        if self._tap is None:
            newest = verified.last_hidden
        else:
            newest = verified.taps[self._tap][:, verified.acceptance.last]
        hidden = self._backbone.final_norm(newest)[0]
        levels = self.largest.levels
        noise = self._sampling.noise(verified.root_position, levels, self._heads.draft_vocab)
        return self._heads.propose_tree(verified.root, hidden, self._tree, noise)
