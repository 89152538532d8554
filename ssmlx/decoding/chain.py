"""One call of a target that is called as a whole: verify a chain of drafted tokens."""

import mlx.core as mx

from ..model.stages import Tapped
from ..model.state_cache import StateCache
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, chain_tree
from ..settings import AcceptanceConfig
from .call import EXACT, TargetCall, decide_and_accept, filled_taps
from .drafter import Verified
from .sampling import GREEDY, Sampling, row_positions


def verify_as_chain(
    model: StreamFusedModel,
    tree: Tree,
    cache: StateCache,
    *,
    tail: mx.array,
    sampler: Sampling = GREEDY,
    acceptance: AcceptanceConfig = EXACT,
    taps: tuple[int, ...] = (),
) -> TargetCall:
    """Build a target call on the N nodes of `tree`, each taken as the child of the one before it.

    What is proposed for such a target is a chain. Of any other tree a part is wrong guesses, which
    are rejected. The cache is changed at once, though nothing is committed or computed yet.

    Args:
        model: the target.
        tree: what was drafted, two nodes or more.
        cache: holds the tokens before the root; `StateCache.advance` says how many nodes join.
        tail: [C] the last tokens before the root, for samplers that need them.
        sampler: decides the target's tokens.
        acceptance: when a drafted token counts as the target's.
        taps: numbers of the layers whose input a drafter reads: the final norm's at most.

    Returns:
        The call, not committed. Its `verified` is of the chain, without streams, and has logits
        [1, N, V] in the place of hidden states; what enters the final norm is among its taps alone.
        Its counts of nodes and of drafted tokens are those of `tree`.

    Raises:
        InputError: the model gives no such taps.
        ValueError: the tree is a root alone, or what a layer keeps cannot be taken back, see
            `StateCache.verify`.
    """
    chain = chain_tree(tree.tokens)
    position = cache.length
    positions = row_positions(chain, position, tail)
    tapped: Tapped = dict.fromkeys(taps)
    hidden = model.backbone.verify_chain(chain.tokens, cache, tapped)
    logits = model.backbone.logits(hidden)
    target_tokens, accepted = decide_and_accept(
        model, chain, logits, sampler, positions, acceptance
    )
    no_streams = hidden[:, :0]
    verified = Verified(
        chain,
        target_tokens,
        accepted,
        hidden,
        no_streams,
        hidden,
        position,
        cache,
        filled_taps(tapped),
    )
    for_host = mx.concatenate([accepted.num_accepted, accepted.new_tokens])
    logprobs = sampler.token_logprobs_or_none(logits, positions, accepted.path, accepted.new_tokens)
    next_tail = positions.tail_at(accepted.last)
    return TargetCall(
        verified, next_tail, for_host, logprobs, False, tree.num_nodes, tree.num_drafted
    )
