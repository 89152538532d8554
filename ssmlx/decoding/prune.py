"""Parallel tree pruning by early exit (section 3.2.3): improbable nodes leave half-way up.

The budget's rule is written once more for exported graphs, in PyTorch on fixed shapes:
`convert.export.graph.surviving_nodes`.
"""

import math

import mlx.core as mx

from ..model.shapes import expect_shape, indices, to_int
from ..model.tree import PAD_TOKEN, Tree, clip_logprobs, top_nodes
from ..settings import PruneConfig


def transition_logprobs(tree: Tree, exit_logits: mx.array) -> mx.array:
    """The early-exit log probability of each node's token, given its parent.

    Args:
        tree: of N nodes.
        exit_logits: [I, V] early-exit logits of the tree's first I nodes, which hold every parent:
            H(o(M_l)) in the Speculative Streaming paper's notation (section 3.2.3).

    Returns:
        [N] float32; 0 for the root, -inf for nodes of PAD_TOKEN.

    Raises:
        ValueError: `exit_logits` are not of the tree's `num_internal` nodes.
    """
    expect_shape("early-exit logits", exit_logits, tree.num_internal, None)
    exit_logits = exit_logits.astype(mx.float32)
    of_child = exit_logits[tree.parents, tree.tokens]
    logprobs = of_child - mx.logsumexp(exit_logits, axis=-1)[tree.parents]
    logprobs = mx.where(tree.tokens == PAD_TOKEN, -math.inf, logprobs)
    return mx.where(tree.depths == 0, 0.0, logprobs)


def nodes_within_budget(tree: Tree, edge_logprobs: mx.array, keep: int) -> mx.array:
    """Find the nodes of the largest path probabilities.

    Args:
        tree: of N nodes.
        edge_logprobs: [N] log probability of each node given its parent; clipped before they are
            summed.
        keep: how many nodes, the root included; at least 1.

    Returns:
        [M] int32 node numbers, ascending; M is `keep`, or N where that is less.
    """
    return top_nodes(tree.path_sums(clip_logprobs(edge_logprobs)), keep)


def wait_for_nodes_over_threshold(
    tree: Tree, edge_logprobs: mx.array, least_token_probability: float
) -> mx.array:
    """Find the nodes on whose path from the root every token is probable enough.

    How many they are is not known beforehand, so this waits for the device.

    Args:
        tree: of N nodes.
        edge_logprobs: [N] log probability of each node given its parent; 0 for the root.
        least_token_probability: of each token on the path; 0 or less keeps all nodes.

    Returns:
        [M] int32 node numbers, ascending, the root among them.
    """
    floor = math.log(least_token_probability) if least_token_probability > 0 else -math.inf
    kept = (edge_logprobs >= floor)[tree.paths].all(axis=1)
    nodes = mx.where(kept, indices(tree.num_nodes), tree.num_nodes)
    return mx.sort(nodes)[: to_int(kept.sum())].astype(mx.int32)


def may_drop_nodes(tree: Tree, config: PruneConfig) -> bool:
    """Whether pruning is on, and may drop nodes of this tree.

    A budget drops some where it is less than N, the tree's nodes. A threshold may drop some of any
    tree but a bare root. The kind "off" drops none.
    """
    if config.kind == "budget":
        return config.keep < tree.num_nodes
    return config.kind == "threshold" and tree.num_nodes > 1


def surviving_nodes(tree: Tree, edge_logprobs: mx.array, config: PruneConfig) -> mx.array:
    """The nodes that pruning keeps; every ancestor of a kept node is kept.

    Args:
        tree: of N nodes.
        edge_logprobs: [N] log probability of each node given its parent, as `transition_logprobs`
            returns.
        config: a budget of nodes, or the least probability of each token on a node's path. A
            threshold waits for the device. The kind must not be "off".

    Returns:
        [M] int32 node numbers, ascending, the root's, 0, among them.
    """
    if config.kind == "budget":
        return nodes_within_budget(tree, edge_logprobs, config.keep)
    return wait_for_nodes_over_threshold(tree, edge_logprobs, config.threshold)
