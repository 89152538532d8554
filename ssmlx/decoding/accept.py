"""Acceptance: the longest drafted path that the target itself would have written (A.1)."""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from ..model.shapes import expect_shape, indices, take
from ..model.tree import PAD_TOKEN, Tree
from ..settings import AcceptanceConfig


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The part of a draft tree that the target accepted; arrays on the device."""

    # [P] accepted nodes from the root on; entries after `num_accepted` repeat the last
    path: mx.array
    # [P] the target's tokens along the path: `num_accepted` confirmed drafts, then the correction,
    # which the entries after it repeat
    new_tokens: mx.array
    num_accepted: mx.array  # [1] accepted nodes below the root

    @cached_property
    def last(self) -> mx.array:
        """[1] the deepest accepted node."""
        return self.path[-1:]

    @cached_property
    def correction(self) -> mx.array:
        """[1] the target's token after the last accepted node: the next tree's root."""
        return self.new_tokens[-1:]


def accept(
    tree: Tree,  # M nodes; siblings carry different tokens
    # [M] the token decided after each node; a negative one accepts no child
    target_tokens: mx.array,
) -> Acceptance:
    """Accept the longest drafted path that carries the target's own tokens (A.1)."""
    # No rejection rule is needed: what is drawn does not depend on what was drafted, only on noise
    # that belongs to a position in the text, so the target's distribution stays exact.
    expect_shape("target tokens", target_tokens, tree.num_nodes)
    if tree.num_nodes == 1:
        return Acceptance(indices(1), target_tokens, indices(1))
    agrees = tree.tokens == take(target_tokens, tree.parents)
    accepted = agrees[tree.paths[:, 1:]].all(axis=1)
    # Siblings carry different tokens, so the accepted nodes are one path and the deepest is unique;
    # if there are none, it is the first node, the root.
    last = mx.where(accepted, tree.depths, -1).argmax(keepdims=True)
    path = tree.paths[last].flatten()
    return Acceptance(path, take(target_tokens, path), take(tree.depths, last))


def accept_typical(
    tree: Tree,  # M nodes
    target_tokens: mx.array,  # [M] the target's own token after each node
    logprobs: mx.array,  # [M, V] the target's log probabilities after each node
    config: AcceptanceConfig,
) -> Acceptance:
    """Accept drafted tokens that the target finds likely enough. LOSSY (Medusa, section 3.3.1)."""
    expect_shape("target tokens", target_tokens, tree.num_nodes)
    expect_shape("log probabilities", logprobs, tree.num_nodes, None)
    parents = tree.parents
    drafted = mx.maximum(tree.tokens, 0)
    # Accepted: p > min(epsilon, delta * exp(-H)), H the entropy in nats after the parent, and so
    # all along the path. Padding never is.
    entropy = -mx.where(logprobs > -mx.inf, mx.exp(logprobs) * logprobs, 0.0).sum(axis=1)
    bound = mx.minimum(config.epsilon, config.delta * mx.exp(-entropy))
    edges = logprobs[parents, drafted]
    likely = (mx.exp(edges) > bound[parents]) & (tree.tokens != PAD_TOKEN)
    accepted = (likely | (tree.depths == 0))[tree.paths].all(axis=1)
    likelihood = mx.exp(tree.path_sums(edges))
    # The deepest path wins; of equally deep ones, the likeliest.
    last = mx.where(accepted, tree.depths + likelihood / 2, -1).argmax(keepdims=True)
    path = tree.paths[last][0]
    num_accepted = tree.depths[last]
    correction = target_tokens[last]
    following = mx.concatenate([tree.tokens[path[1:]], correction])
    new_tokens = mx.where(indices(path.shape[0]) < num_accepted, following, correction)
    return Acceptance(path, new_tokens, num_accepted)
