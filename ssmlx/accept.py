"""Acceptance: the longest drafted path that the target itself would have written (A.1)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .shapes import expect_shape
from .tree import Tree


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What the target made of a draft tree, on the device.

    Attributes:
        path: [P] accepted nodes from the root on; entries after `num_accepted` repeat the last.
        new_tokens: [P] the target's tokens along the path: `num_accepted` confirmed drafts,
            then the correction. Entries after that repeat the correction.
        num_accepted: [1] accepted nodes below the root.
    """

    path: mx.array
    new_tokens: mx.array
    num_accepted: mx.array

    @property
    def last(self) -> mx.array:
        """[1] the deepest accepted node."""
        return self.path[-1:]

    @property
    def correction(self) -> mx.array:
        """[1] the target's token after the last accepted node: the next tree's root."""
        return self.new_tokens[-1:]


def accept(tree: Tree, target_tokens: mx.array) -> Acceptance:
    """Walk from the root along children that carry the target's own token.

    Args:
        tree: M nodes.
        target_tokens: [M] the token that the target decided on after each node: its argmax, or
            its own draw. Because the draft is deterministic given the past, following the
            target's draw as long as it is in the tree leaves the target's distribution exact;
            no rejection rule is needed.
    """
    expect_shape("target tokens", target_tokens, tree.num_nodes)
    agrees = (tree.tokens == target_tokens[tree.parents]) | (tree.depths == 0)
    accepted = agrees[tree.paths].all(axis=1)
    # Siblings carry different tokens, so the accepted nodes are one path and the deepest is unique.
    last = mx.where(accepted, tree.depths, -1).argmax(keepdims=True)
    path = tree.paths[last][0]
    return Acceptance(path, target_tokens[path], tree.depths[last])
