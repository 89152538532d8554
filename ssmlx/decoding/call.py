"""One call of the target: verify a draft tree, or go on by a single token.

The stages of `verify_tree` are those of section 3.2 and figure 7 of the Speculative Streaming
paper: lower layers, pruning, insertion of streams, upper layers, verification, commit.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..model.cache import TreeCache
from ..model.shapes import indices, to_list
from ..model.stages import Tapped
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, root_tree
from ..settings import AcceptanceConfig, PruneConfig
from .accept import Acceptance, accept, accept_typical
from .drafter import Noise, Taps, Verified, with_noise
from .prune import is_pruned, surviving_nodes, transition_logprobs
from .sampling import GREEDY, Places, Sampling, last_tokens, places_of

EXACT = AcceptanceConfig()
NO_PRUNING = PruneConfig()


@dataclass(eq=False)
class TargetCall:
    """A target call, on the device."""

    states: Verified | None  # what a drafter may read of it; None once it is released
    tail: mx.array  # [C] the last tokens before the next root, as the sampler needs them
    # [1 + P] accepted nodes below the root, then `acceptance.new_tokens`; [1] the token alone
    # where no tree was verified
    for_host: mx.array
    # [P, 1 + 2 T] log probabilities of the new tokens, see `Sampling.token_logprobs`
    token_logprobs: mx.array | None
    # whether the call's row is committed; rows of a tree are when the host has read how many count
    is_committed: bool
    num_drafted: int  # nodes of the verified tree below its root, before pruning

    @property
    def verified(self) -> Verified:
        """What a drafter may read of it."""
        if self.states is None:
            raise ValueError("the call's states were released")
        return self.states

    def release(self) -> None:
        """Free its hidden states: a tree is drafted behind it."""
        self.states = None

    def decided(self) -> list[mx.array]:
        """What the host will read, and the next tail: all of it before anything is drafted."""
        logprobs = [] if self.token_logprobs is None else [self.token_logprobs]
        return [self.for_host, self.tail, *logprobs]

    def read(self) -> list[int]:
        """The tokens that the call advanced by: its one read, which waits for it."""
        if self.is_committed:
            return to_list(self.for_host)
        num_accepted, *new_tokens = to_list(self.for_host)
        return new_tokens[: num_accepted + 1]


def plain_call(
    model: StreamFusedModel,
    token: mx.array,
    tail: mx.array,
    cache: TreeCache,
    sampler: Sampling = GREEDY,
    taps: tuple[int, ...] = (),
) -> TargetCall:
    """Decide on the token after `token` [1], whose row is committed at once.

    `tail` [C] holds the last tokens before it, for samplers that need them.
    """
    tree = root_tree(token)
    position = cache.length
    places = places_of(tree, position, tail)
    tapped: Tapped = dict.fromkeys(taps)
    last_hidden, insertion_hidden = model.append(token, cache, tapped)
    logits = model.backbone.logits(last_hidden)
    chosen = choose(model, logits, sampler, places)
    chosen = settle(model, chosen, logits, sampler, places, indices(1))
    accepted = Acceptance(indices(1), chosen, indices(1))
    no_streams = last_hidden[:, :0]
    verified = Verified(
        tree,
        chosen,
        accepted,
        last_hidden,
        no_streams,
        insertion_hidden,
        position,
        cache,
        filled(tapped),
    )
    logprobs = sampler.token_logprobs(logits, places, indices(1), chosen)
    return TargetCall(verified, places.tail_at(indices(1)), chosen, logprobs, True, 0)


def verify_tree(
    model: StreamFusedModel,
    tree: Tree,
    cache: TreeCache,
    *,
    num_streams: int = 0,
    prune: PruneConfig = NO_PRUNING,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    tail: mx.array | None = None,
    taps: tuple[int, ...] = (),
) -> TargetCall:
    """One target call on the N nodes of `tree` (sections 3.2.1 to 3.2.3, figure 7).

    Args:
        tree: what was drafted, or a bare root.
        cache: holds the tokens before the root; `TreeCache.advance` commits the accepted path.
        num_streams: G, streams that run beside every node, where they draft in this pass.
        prune: which nodes to drop half-way up.
        sampler: decides the target's tokens.
        acceptance: when a drafted token counts as the target's.
        tail: [C] the last tokens before the root, for samplers that need them.
        taps: layers whose input a drafter reads.
    """
    split = model.insertion_layer
    tail = last_tokens((), sampler.context_size) if tail is None else tail
    cache.reserve(tokens=tree.paths.shape[1], scratch=tree.num_nodes * (1 + num_streams))

    nodes = model.node_rows(tree, cache)
    lower_taps: Tapped = {layer: None for layer in taps if layer < split}
    upper_taps: Tapped = {layer: None for layer in taps if layer >= split}
    hidden = model.lower(tree, cache, nodes, lower_taps)
    position = cache.length
    known = sampler if acceptance.kind == "exact" else GREEDY
    noise = known.noise(position, tree.paths.shape[1])
    kept, hidden, kept_index = prune_tree(model, tree, hidden, prune, noise)
    rows = model.insert(hidden, num_streams)
    rows = model.upper(
        rows, kept, cache, num_streams, nodes if kept is tree else None, tapped=upper_taps
    )
    node_hidden = rows[:, : kept.num_nodes]
    places = places_of(kept, position, tail)
    logits = model.backbone.logits(node_hidden)
    target_tokens, accepted = verify(model, kept, logits, sampler, places, acceptance)
    lower_path = accepted.path if kept is tree else kept_index[accepted.path]
    cache.commit(lower_path, accepted.path, split, accepted.num_accepted + 1)
    own_streams = stream_rows_of(rows, accepted.last, kept.num_nodes, num_streams)
    verified = Verified(
        kept,
        target_tokens,
        accepted,
        node_hidden,
        own_streams,
        hidden,
        position,
        cache,
        {
            **{layer: rows[:, kept_index] for layer, rows in filled(lower_taps).items()},
            **{layer: rows[:, : kept.num_nodes] for layer, rows in filled(upper_taps).items()},
        },
    )
    for_host = mx.concatenate([accepted.num_accepted, accepted.new_tokens])
    logprobs = sampler.token_logprobs(logits, places, accepted.path, accepted.new_tokens)
    next_tail = places.tail_at(accepted.last)
    return TargetCall(verified, next_tail, for_host, logprobs, False, tree.num_nodes - 1)


def filled(tapped: Tapped) -> Taps:
    """What a run filled in, all of it."""
    return {layer: rows for layer, rows in tapped.items() if rows is not None}


def prune_tree(
    model: StreamFusedModel, tree: Tree, hidden: mx.array, config: PruneConfig, noise: Noise = None
) -> tuple[Tree, mx.array, mx.array]:
    """The tree that is left, its hidden states [1, M, D], and the old index of each node [M].

    `noise` [P, V] is known of what is decided behind each depth, see `Sampling.noise`.
    """
    if not is_pruned(tree, config):
        return tree, hidden, indices(tree.num_nodes)
    exit_logits = model.early_exit_logits(hidden[:, : tree.num_internal])
    if noise is not None:
        exit_logits = with_noise(exit_logits, noise[tree.depths[: tree.num_internal]])
    (edges,) = model.backbone.broadcast_from_rank0(transition_logprobs(tree, exit_logits))
    keep = surviving_nodes(tree, edges, config)
    return tree.select(keep), hidden[:, keep], keep


def choose(
    model: StreamFusedModel, logits: mx.array, sampler: Sampling, places: Places
) -> mx.array:
    """[R] the target's token after each row of `logits` [R, V], see `Sampling.choose`."""
    return model.backbone.broadcast_from_rank0(sampler.choose(logits, places))[0]


def settle(
    model: StreamFusedModel,
    tokens: mx.array,
    logits: mx.array,
    sampler: Sampling,
    places: Places,
    row: mx.array,
) -> mx.array:
    """What `choose` gave, with the token of `row` [1] decided where it was left open."""
    if not sampler.leaves_open:
        return tokens
    return model.backbone.broadcast_from_rank0(sampler.settle(tokens, logits, places, row))[0]


def verify(
    model: StreamFusedModel,
    tree: Tree,
    logits: mx.array,
    sampler: Sampling,
    places: Places,
    acceptance: AcceptanceConfig,
) -> tuple[mx.array, Acceptance]:
    """The target's token after each node [M], of `logits` [M, V], and how far the tree holds."""
    if acceptance.kind == "exact":
        target_tokens = choose(model, logits, sampler, places)
        found = accept(tree, target_tokens)
        if sampler.leaves_open:
            target_tokens = settle(model, target_tokens, logits, sampler, places, found.last)
            found = replace(found, new_tokens=target_tokens[found.path])
        return target_tokens, found
    logprobs = sampler.logprobs(logits, places)
    target_tokens = mx.argmax(sampler.perturb(logprobs, places), axis=-1).astype(mx.int32)
    found = accept_typical(tree, target_tokens, logprobs, acceptance)
    agreed = model.backbone.broadcast_from_rank0(
        target_tokens, found.path, found.new_tokens, found.num_accepted
    )
    return agreed[0], Acceptance(*agreed[1:])


def stream_rows_of(rows: mx.array, node: mx.array, num_nodes: int, num_streams: int) -> mx.array:
    """[1, G, D] the streams of `node` [1] among the upper rows [1, M * (1 + G), D]."""
    own = num_nodes + node[:, None] * num_streams + indices(num_streams)
    return rows[:, own[0]]
