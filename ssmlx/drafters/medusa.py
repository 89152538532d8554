"""Drafts from Medusa heads on the newest accepted node."""

from __future__ import annotations

from collections.abc import Sequence

from ..decoding.drafter import Verified
from ..model.backbone import Backbone
from ..model.tree import Tree
from ..settings import TreeConfig
from .medusa_heads import MedusaHeads


class MedusaDrafter:
    """Drafts from the ranks of Medusa heads, full or best, as streams do.

    Args:
        backbone: the target.
        heads: those that were attached to it.
        tree: the shape of the tree.

    Raises:
        InputError: the full tree would be too large.
    """

    num_streams, draft_calls, cache_bytes = 0, 0, 0
    waits = False

    def __init__(self, backbone: Backbone, heads: MedusaHeads, tree: TreeConfig) -> None:
        self._backbone, self._heads, self._tree = backbone, heads, heads.fitting(tree)
        self.num_levels = heads.num_levels
        self.max_nodes = self._tree.num_nodes(heads.num_levels)
        self.num_parameters = heads.num_parameters

    def start(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the heads see the newest hidden state alone."""

    def propose(self, verified: Verified) -> Tree:
        hidden = self._backbone.final_norm(verified.last_hidden)[0]
        return self._heads.propose_tree(verified.root, hidden, self._tree)
