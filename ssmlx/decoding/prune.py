"""Parallel tree pruning by early exit (section 3.2.3): improbable nodes leave half-way up.

The budget's rule is written once more for exported graphs, in PyTorch on fixed shapes:
`convert.export.graph.surviving_nodes`.
"""

import math

import mlx.core as mx

from ..model.shapes import expect_shape, indices, to_int
from ..model.tree import PAD_TOKEN, Tree, clip_logprobs, top_nodes
from ..settings import PruneConfig


def transition_logprobs(
    tree: Tree,
    # [I, V] of the first I nodes, which hold every parent: H(o(M_l)) of section 3.2.3
    exit_logits: mx.array,
) -> mx.array:
    """[N] float32 early-exit log probability of each node's token given its parent."""
    expect_shape("early-exit logits", exit_logits, tree.num_internal, None)
    exit_logits = exit_logits.astype(mx.float32)
    of_child = exit_logits[tree.parents, tree.tokens]
    logprobs = of_child - mx.logsumexp(exit_logits, axis=-1)[tree.parents]
    logprobs = mx.where(tree.tokens == PAD_TOKEN, -math.inf, logprobs)
    # The root is certain.
    return mx.where(tree.depths == 0, 0.0, logprobs)


def nodes_within_budget(
    tree: Tree,
    edge_logprobs: mx.array,  # [N] of each node given its parent
    keep: int,  # the root included; at least 1
) -> mx.array:
    """[M] int32: the `keep` nodes of the largest path probabilities, ascending."""
    return top_nodes(tree.path_sums(clip_logprobs(edge_logprobs)), keep)


def nodes_over_threshold(
    tree: Tree,
    edge_logprobs: mx.array,  # [N] of each node given its parent; 0 for the root
    least_token_probability: float,  # of each token on the path; 0 or less keeps all nodes
) -> mx.array:
    """[M] int32: the nodes all of whose path is probable enough; waits for the device."""
    floor = math.log(least_token_probability) if least_token_probability > 0 else -math.inf
    kept = (edge_logprobs >= floor)[tree.paths].all(axis=1)
    nodes = mx.where(kept, indices(tree.num_nodes), tree.num_nodes)
    return mx.sort(nodes)[: to_int(kept.sum())].astype(mx.int32)


def may_drop_nodes(tree: Tree, config: PruneConfig) -> bool:
    if config.kind == "budget":
        return config.keep < tree.num_nodes
    return config.kind == "threshold" and tree.num_nodes > 1


def surviving_nodes(
    tree: Tree,
    edge_logprobs: mx.array,  # [N] see `transition_logprobs`
    config: PruneConfig,  # not of the kind "off"; a threshold waits for the device
) -> mx.array:
    """[M] int32: the nodes that pruning keeps, ascending, with all their ancestors."""
    if config.kind == "budget":
        return nodes_within_budget(tree, edge_logprobs, config.keep)
    return nodes_over_threshold(tree, edge_logprobs, config.threshold)
