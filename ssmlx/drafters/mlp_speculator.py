"""Drafts from an MLP speculator on the newest accepted node."""

from __future__ import annotations

from collections.abc import Sequence

from ..decoding.drafter import Verified
from ..model.backbone import Backbone
from ..model.tree import Tree
from ..settings import SpeculatorTreeConfig
from .speculator_heads import MlpSpeculator, num_candidate_nodes


class MlpSpeculatorDrafter:
    """Drafts from the stages of an MLP speculator, each of which sees the token before its own.

    Args:
        backbone: the target.
        speculator: the one that was attached to it.
        tree: widths of the tree, and what is kept of it.

    Raises:
        InputError: the speculator cannot draft a tree of these widths.
    """

    num_streams, draft_calls, cache_bytes = 0, 0, 0
    waits = False

    def __init__(
        self, backbone: Backbone, speculator: MlpSpeculator, tree: SpeculatorTreeConfig
    ) -> None:
        self._backbone, self._speculator = backbone, speculator
        self._widths, self._size = speculator.checked_widths(tree.widths), tree.size
        self._candidates = tree.candidates
        if tree.size is None and tree.candidates is None:
            self._candidates = speculator.config.candidates
        self.num_levels = len(self._widths)
        most = num_candidate_nodes(self._widths, self._candidates)
        self.max_nodes = min(most, tree.size or most)
        self.num_parameters = speculator.num_parameters

    def start(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the stages see the newest hidden state and their own guesses alone."""

    def propose(self, verified: Verified) -> Tree:
        hidden = self._backbone.final_norm(verified.last_hidden)[0]
        return self._speculator.propose_tree(
            verified.root, hidden, self._widths, self._size, candidates=self._candidates
        )
