"""One call of the target: verify a draft tree, or go on by a single token.

The stages of `verify_tree` are those of section 3.2 and figure 7 of the Speculative Streaming
paper: lower layers, pruning, insertion of streams, upper layers, verification, commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from ..model.cache import TreeCache
from ..model.shapes import indices, to_list
from ..model.stages import CallOutput, LayerInputs, filled_taps
from ..model.state_cache import StateCache
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..model.tree import Tree, chain_tree, root_tree
from ..settings import AcceptanceConfig, PruneConfig
from .accept import Acceptance, accept, accept_typical
from .drafter import Verified
from .prune import may_drop_nodes, surviving_nodes, transition_logprobs
from .ranking import Noise, with_noise
from .sampling import (
    GREEDY,
    RowPositions,
    Sampling,
    TokenLogprobs,
    last_tokens,
    read_logprobs,
    row_positions,
)

EXACT = AcceptanceConfig()
NO_PRUNING = PruneConfig()


@dataclass(eq=False)
class TargetCall:
    """A target call that was built: its results are arrays that MLX may not have computed yet."""

    states: Verified | None  # what a drafter may read of it; None once released
    tail: mx.array  # [C] the last tokens before the next root, for the sampler
    # [1 + P] accepted nodes below the root, then `acceptance.new_tokens`; [1] of a plain call
    for_host: mx.array
    token_logprobs: mx.array | None  # [P, 1 + 2 T] of the new tokens, see `own_and_top_logprobs`
    # built by `plain_call`, which committed its row at once. The rows of any other call are
    # committed when the host knows how many were accepted, even those of a bare root.
    is_plain: bool
    num_nodes: int  # of the verified tree, before pruning
    num_drafted: int  # drafted tokens among them

    @property
    def verified(self) -> Verified:
        """The states that a drafter may read; ValueError after `release`."""
        if self.states is None:
            raise ValueError("the call's states were released")
        return self.states

    def release(self) -> None:
        """Drop all that drafters may read (`states`), so that MLX can free it."""
        self.states = None

    def arrays_to_read(self) -> list[mx.array]:
        """The arrays to launch: what the host reads, and the tail, which the next call needs."""
        logprobs = [] if self.token_logprobs is None else [self.token_logprobs]
        return [self.for_host, self.tail, *logprobs]

    def read_tokens(self) -> list[int]:
        """Read the accepted drafted tokens, then the target's own; waits for the device."""
        if self.is_plain:
            return to_list(self.for_host)
        num_accepted, *new_tokens = to_list(self.for_host)
        return new_tokens[: num_accepted + 1]

    def read_logprobs(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        """Read those of `tokens`, which `read_tokens` returned; waits for the device."""
        if self.token_logprobs is None:
            return None
        return read_logprobs(tokens, self.token_logprobs)


def plain_call(
    model: StreamFusedModel,
    token: mx.array,  # [1] the newest token, not in the cache yet
    tail: mx.array,  # [C] the last tokens before it
    cache: TextCache,  # holds the tokens before `token`; has no uncounted paths
    sampler: Sampling = GREEDY,
    taps: tuple[int, ...] = (),  # layers whose input a drafter reads
) -> TargetCall:
    """Build a target call on one token, without a draft; its row is committed at once."""
    tree = root_tree(token)
    positions = row_positions(tree, cache.root_position, tail)
    output = model.append(token, cache, taps)
    decided = decide_and_accept(model, tree, output.logits, sampler, positions, EXACT)
    return assemble_call(tree, output, decided, positions, cache, sampler, is_plain=True)


def verify(
    model: StreamFusedModel,
    tree: Tree,
    cache: TextCache,
    *,
    streams_per_node: int = 0,
    prune: PruneConfig = NO_PRUNING,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    tail: mx.array | None = None,
    taps: tuple[int, ...] = (),
) -> TargetCall:
    """Build a target call on a draft tree; or, for a `StateCache`, on its nodes as a chain.

    For a chain, `streams_per_node` and `prune` have no effect: its models have no streams, and a
    chain is not pruned.
    """
    if isinstance(cache, StateCache):
        return verify_as_chain(
            model, tree, cache, sampler=sampler, acceptance=acceptance, tail=tail, taps=taps
        )
    assert isinstance(cache, TreeCache)
    return verify_tree(
        model,
        tree,
        cache,
        streams_per_node=streams_per_node,
        prune=prune,
        sampler=sampler,
        acceptance=acceptance,
        tail=tail,
        taps=taps,
    )


def verify_tree(
    model: StreamFusedModel,
    tree: Tree,  # N nodes that were drafted, or a bare root
    cache: TreeCache,  # holds the tokens before the root
    *,
    streams_per_node: int = 0,  # G, if streams draft in this pass
    prune: PruneConfig = NO_PRUNING,  # which nodes to drop at the insertion layer
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    tail: mx.array | None = None,  # [C] the last tokens before the root
    taps: tuple[int, ...] = (),  # layers whose input a drafter reads
) -> TargetCall:
    """Build a target call on a draft tree (Speculative Streaming, 3.2.1 to 3.2.3 and figure 7).

    Nothing is computed yet, unless pruning is by a threshold, which waits for the device. The cache
    gets the accepted path as one that is not counted yet: `commit_accepted` commits it, once the
    host has read the call.
    """
    split = model.insertion_layer
    tail = last_tokens((), sampler.context_size) if tail is None else tail
    cache.reserve(
        more_tokens=tree.paths.shape[1], step_rows=tree.num_nodes * (1 + streams_per_node)
    )

    nodes = model.node_rows(tree, cache)
    lower_taps: LayerInputs = {layer: None for layer in taps if layer < split}
    upper_taps: LayerInputs = {layer: None for layer in taps if layer >= split}
    # Lower layers: M of the nodes (3.2.2, eq. 4).
    hidden = model.lower(tree, cache, nodes, lower_taps)
    position = cache.root_position
    known = sampler if acceptance.kind == "exact" else GREEDY
    noise = known.noise(position, tree.paths.shape[1])
    # Pruning by early exit (3.2.3).
    kept, hidden, kept_index = prune_tree(model, tree, hidden, prune, noise)
    # Streams start (eq. 3), and run with the nodes through the upper layers (eqs. 1 and 2).
    rows = model.insert(hidden, streams_per_node)
    rows = model.upper(
        rows, kept, cache, streams_per_node, nodes if kept is tree else None, tapped=upper_taps
    )
    count = kept.num_nodes
    node_hidden = rows[:, :count]
    positions = row_positions(kept, position, tail)
    output = CallOutput(
        logits=model.backbone.logits(node_hidden),
        last_hidden=node_hidden,
        insertion_hidden=hidden if model.num_streams else None,
        stream_hidden=rows[:, count:] if streams_per_node else None,
        taps={
            **{layer: found[:, kept_index] for layer, found in filled_taps(lower_taps).items()},
            **{layer: found[:, :count] for layer, found in filled_taps(upper_taps).items()},
        },
    )
    # Verification (A.1).
    decided = decide_and_accept(model, kept, output.logits, sampler, positions, acceptance)
    accepted = decided.acceptance
    lower_path = accepted.path if kept is tree else kept_index[accepted.path]
    cache.hold_accepted_path(lower_path, accepted.path, split, accepted.num_accepted + 1)
    return assemble_call(kept, output, decided, positions, cache, sampler, drafted=tree)


def verify_as_chain(
    model: StreamFusedModel,
    tree: Tree,  # two nodes or more
    cache: StateCache,  # changed at once, though nothing is committed or computed yet
    *,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    tail: mx.array | None = None,  # [C] the last tokens before the root
    taps: tuple[int, ...] = (),  # the final norm's at most
) -> TargetCall:
    """Build a target call on N nodes, each taken as the child of the one before it."""
    # Of a tree that is no chain a part is wrong guesses, which are rejected.
    chain = chain_tree(tree.tokens)
    tail = last_tokens((), sampler.context_size) if tail is None else tail
    positions = row_positions(chain, cache.root_position, tail)
    output = model.backbone.verify_chain(chain.tokens, cache, taps)
    decided = decide_and_accept(model, chain, output.logits, sampler, positions, acceptance)
    return assemble_call(chain, output, decided, positions, cache, sampler, drafted=tree)


class Decided(NamedTuple):
    """The target's token after each of M nodes, and how far the tree agrees with these."""

    target_tokens: mx.array  # [M]; only those along the accepted path are sure to be resolved
    acceptance: Acceptance


def assemble_call(
    tree: Tree,  # the M nodes that were verified
    output: CallOutput,  # of the model for them; the call does not hold its logits
    decided: Decided,
    positions: RowPositions,
    cache: TextCache,
    sampler: Sampling,
    *,
    drafted: Tree | None = None,  # `tree` before pruning
    is_plain: bool = False,
) -> TargetCall:
    """Assemble what a call leaves for the host, for a drafter, and for the next call."""
    target_tokens, accepted = decided
    if drafted is None:
        drafted = tree
    own_streams = None
    if output.stream_hidden is not None:
        own_streams = stream_rows_of_node(output.stream_hidden, accepted.last, tree.num_nodes)
    verified = Verified(
        tree=tree,
        target_tokens=target_tokens,
        acceptance=accepted,
        node_hidden=output.last_hidden,
        stream_hidden=own_streams,
        insertion_hidden=output.insertion_hidden,
        position=positions.first,
        cache=cache,
        taps=output.taps,
    )
    for_host = target_tokens
    if not is_plain:
        for_host = mx.concatenate([accepted.num_accepted, accepted.new_tokens])
    logprobs = sampler.token_logprobs(output.logits, positions, accepted.path, accepted.new_tokens)
    return TargetCall(
        states=verified,
        tail=positions.tail_at(accepted.last),
        for_host=for_host,
        token_logprobs=logprobs,
        is_plain=is_plain,
        num_nodes=drafted.num_nodes,
        num_drafted=drafted.num_drafted,
    )


class PrunedTree(NamedTuple):
    """The M nodes that pruning left of a tree of N; all N if it dropped none."""

    tree: Tree  # of the kept nodes
    hidden: mx.array  # [1, M, D] their hidden states
    kept_nodes: mx.array  # [M] their numbers in the tree before, ascending


def prune_tree(
    model: StreamFusedModel,
    tree: Tree,  # N nodes
    hidden: mx.array,  # [1, N, D] before the insertion layer
    config: PruneConfig,
    noise: Noise = None,  # [P, V] at each depth, see `Sampling.noise`
) -> PrunedTree:
    """Drop improbable nodes before the upper layers (section 3.2.3), as rank 0 decides."""
    if not may_drop_nodes(tree, config):
        return PrunedTree(tree, hidden, indices(tree.num_nodes))
    exit_logits = model.early_exit_logits(hidden[:, : tree.num_internal])
    if noise is not None:
        exit_logits = with_noise(exit_logits, noise[tree.depths[: tree.num_internal]])
    (edges,) = model.backbone.broadcast_from_rank0(transition_logprobs(tree, exit_logits))
    keep = surviving_nodes(tree, edges, config)
    return PrunedTree(tree.select(keep), hidden[:, keep], keep)


def sample_on_rank0(
    model: StreamFusedModel,
    logits: mx.array,  # [R, V]
    sampler: Sampling,
    positions: RowPositions,
) -> mx.array:
    """[R] the token after each row, see `Sampling.sample`."""
    return model.backbone.broadcast_from_rank0(sampler.sample(logits, positions))[0]


def resolve_row_on_rank0(
    model: StreamFusedModel,
    tokens: mx.array,  # [R] from `sample_on_rank0`
    logits: mx.array,  # [R, V]
    sampler: Sampling,
    positions: RowPositions,
    row: mx.array,  # [1] its number
) -> mx.array:
    """[R] `tokens`, with one row decided among all V tokens if it was unresolved."""
    if not sampler.may_leave_unresolved:
        return tokens
    resolved = sampler.resolve_row(tokens, logits, positions, row)
    return model.backbone.broadcast_from_rank0(resolved)[0]


def decide_and_accept(
    model: StreamFusedModel,
    tree: Tree,  # M nodes
    logits: mx.array,  # [M, V]
    sampler: Sampling,
    positions: RowPositions,
    acceptance: AcceptanceConfig,
) -> Decided:
    """Decide the target's token after each node, and accept drafted nodes by the rule of
    `acceptance`; rank 0 decides."""
    if acceptance.kind == "exact":
        target_tokens = sample_on_rank0(model, logits, sampler, positions)
        found = accept(tree, target_tokens)
        if sampler.may_leave_unresolved:
            target_tokens = resolve_row_on_rank0(
                model, target_tokens, logits, sampler, positions, found.last
            )
            along = target_tokens if tree.num_nodes == 1 else target_tokens[found.path]
            found = replace(found, new_tokens=along)
        return Decided(target_tokens, found)
    logprobs = sampler.logprobs(logits, positions)
    target_tokens = mx.argmax(sampler.add_gumbel_noise(logprobs, positions), axis=-1).astype(
        mx.int32
    )
    found = accept_typical(tree, target_tokens, logprobs, acceptance)
    agreed = model.backbone.broadcast_from_rank0(
        target_tokens, found.path, found.new_tokens, found.num_accepted
    )
    return Decided(agreed[0], Acceptance(*agreed[1:]))


def stream_rows_of_node(
    rows: mx.array,  # [1, M * G, D] node by node
    node: mx.array,  # [1] its number
    num_nodes: int,  # M
) -> mx.array:
    """[1, G, D] the rows of one node's streams."""
    num_streams = rows.shape[1] // num_nodes
    own = node[:, None] * num_streams + indices(num_streams)
    return rows[:, own[0]]
