"""One call of a target that is called as a whole: verify a chain of drafted tokens."""

import mlx.core as mx

from ..model.state_cache import StateCache
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, chain_tree
from ..settings import AcceptanceConfig
from .call import EXACT, TargetCall, decide_and_accept, finish_call
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
        cache: holds the tokens before the root; `commit_accepted` says how many nodes join.
        tail: [C] the last tokens before the root, for samplers that need them.
        sampler: decides the target's tokens.
        acceptance: when a drafted token counts as the target's.
        taps: numbers of the layers whose input a drafter reads: the final norm's at most.

    Returns:
        The call, not committed. Its `verified` is of the chain, without any hidden states: what
        enters the final norm is among its taps. Its counts of nodes and of drafted tokens are those
        of `tree`.

    Raises:
        InputError: the model gives no such taps.
        ValueError: the tree is a root alone, or what a layer keeps cannot be taken back, see
            `StateCache.verify`.
    """
    chain = chain_tree(tree.tokens)
    positions = row_positions(chain, cache.root_position, tail)
    output = model.backbone.verify_chain(chain.tokens, cache, taps)
    decided = decide_and_accept(model, chain, output.logits, sampler, positions, acceptance)
    return finish_call(chain, output, decided, positions, cache, sampler, drafted=tree)
