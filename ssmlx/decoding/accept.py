"""Acceptance: the longest drafted path that the target itself would have written (A.1)."""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from ..model.shapes import expect_shape, indices, take
from ..model.tree import PAD_TOKEN, Tree
from ..settings import AcceptanceConfig


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What the target accepted of a draft tree, on the device."""

    # [P] accepted nodes from the root on; entries after `num_accepted` repeat the last
    path: mx.array
    # [P] the target's tokens along the path: `num_accepted` confirmed drafts, then the
    # correction. Entries after that repeat the correction.
    new_tokens: mx.array
    num_accepted: mx.array  # [1] accepted nodes below the root

    @cached_property
    def last(self) -> mx.array:
        """[1] the node number of the deepest accepted node."""
        return self.path[-1:]

    @cached_property
    def correction(self) -> mx.array:
        """[1] the target's token after the last accepted node: the next tree's root."""
        return self.new_tokens[-1:]


def accept(tree: Tree, target_tokens: mx.array) -> Acceptance:
    """Find the longest drafted path that carries the target's own tokens (Speculative Streaming,
    A.1).

    Because what is drawn does not depend on what was drafted, though drafts may depend on the noise
    of the draw, the target's distribution stays exact; no rejection rule is needed.

    Args:
        tree: of M nodes; children of one node have different tokens.
        target_tokens: [M] the token that the target decided on after each node: its argmax, or its
            own sample. A negative one accepts no child.

    Returns:
        The path from the root on, as long as a child has the token that the target decided on after
        its parent; the root alone where no child of it has. P, the tree's levels, is 1 for a bare
        root. `new_tokens` are the target's.

    Raises:
        ValueError: `target_tokens` is not [M].
    """
    expect_shape("target tokens", target_tokens, tree.num_nodes)
    if tree.num_nodes == 1:
        return Acceptance(indices(1), target_tokens, indices(1))
    agrees = tree.tokens == take(target_tokens, tree.parents)
    accepted = agrees[tree.paths[:, 1:]].all(axis=1)
    # Siblings carry different tokens, so the accepted nodes are one path and the deepest is unique;
    # where there are none, the first node is, the root.
    last = mx.where(accepted, tree.depths, -1).argmax(keepdims=True)
    path = tree.paths[last].flatten()
    return Acceptance(path, take(target_tokens, path), take(tree.depths, last))


def accept_typical(
    tree: Tree, target_tokens: mx.array, logprobs: mx.array, config: AcceptanceConfig
) -> Acceptance:
    """Accept drafted tokens that the target finds likely enough: LOSSY (Medusa, section 3.3.1).

    A drafted token is accepted where its probability after its parent exceeds min(epsilon, delta *
    exp(-H)), H being the entropy of the target's distribution there in nats; so are all on its
    path. The deepest path wins, of equally deep ones the likeliest. Padding is never accepted.

    Args:
        tree: of M nodes.
        target_tokens: [M] the target's own token after each node; only the one after the path's
            last node is used.
        logprobs: [M, V] the target's log probabilities after each node.
        config: epsilon and delta.

    Returns:
        The path; its `new_tokens` are the accepted drafted tokens, then the target's own token
        after the last of them. The root alone where no child is accepted.

    Raises:
        ValueError: an array has another number of rows than M.
    """
    expect_shape("target tokens", target_tokens, tree.num_nodes)
    expect_shape("log probabilities", logprobs, tree.num_nodes, None)
    parents = tree.parents
    drafted = mx.maximum(tree.tokens, 0)
    entropy = -mx.where(logprobs > -mx.inf, mx.exp(logprobs) * logprobs, 0.0).sum(axis=1)
    bound = mx.minimum(config.epsilon, config.delta * mx.exp(-entropy))
    edges = logprobs[parents, drafted]
    likely = (mx.exp(edges) > bound[parents]) & (tree.tokens != PAD_TOKEN)
    accepted = (likely | (tree.depths == 0))[tree.paths].all(axis=1)
    likelihood = mx.exp(tree.path_sums(edges))
    last = mx.where(accepted, tree.depths + likelihood / 2, -1).argmax(keepdims=True)
    path = tree.paths[last][0]
    num_accepted = tree.depths[last]
    correction = target_tokens[last]
    following = mx.concatenate([tree.tokens[path[1:]], correction])
    new_tokens = mx.where(indices(path.shape[0]) < num_accepted, following, correction)
    return Acceptance(path, new_tokens, num_accepted)
