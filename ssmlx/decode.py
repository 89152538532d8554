"""The decoding loops, on token ids: Speculative Streaming, and plain decoding beside it.

Both yield the same thing, so that one is the other's oracle and baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .accept import Acceptance, accept
from .cache import TreeCache
from .config import PruneConfig
from .draft import Drafter, Verified
from .model import StreamFusedModel
from .prune import is_pruned, surviving_nodes
from .shapes import to_int, to_list
from .tree import Tree, root_tree

Sampler = Callable[[mx.array], mx.array]
"""Log probabilities [R, V] to tokens [R], as mlx-lm's samplers."""

Progress = Callable[[int, int], None]
"""Told (prompt tokens processed, prompt tokens in all)."""

PREFILL_STEP_SIZE = 2048


def greedy(logprobs: mx.array) -> mx.array:
    """[R] the likeliest token of each row of `logprobs` [R, V]."""
    return mx.argmax(logprobs, axis=-1)


def prefill(
    model: StreamFusedModel,
    tokens: list[int],
    cache: TreeCache,
    *,
    step_size: int = PREFILL_STEP_SIZE,
    progress: Progress | None = None,
) -> None:
    """Put `tokens` into the cache, `step_size` at a time."""
    report = progress or (lambda done, total: None)
    report(0, len(tokens))
    for first in range(0, len(tokens), step_size):
        chunk = tokens[first : first + step_size]
        model.backbone.append(mx.array(chunk), cache)
        mx.eval(cache.state)
        mx.clear_cache()
        report(first + len(chunk), len(tokens))


def choose(model: StreamFusedModel, hidden: mx.array, sampler: Sampler) -> mx.array:
    """[R] the target's token after each row of `hidden` [1, R, D]."""
    logits = model.backbone.logits(hidden)
    if sampler is not greedy:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return sampler(logits).astype(mx.int32)


def prune_tree(
    model: StreamFusedModel, tree: Tree, hidden: mx.array, config: PruneConfig
) -> tuple[Tree, mx.array, mx.array]:
    """The tree that is left, its hidden states [1, M, D], and the old index of each node [M]."""
    if not is_pruned(tree, config):
        return tree, hidden, mx.arange(tree.num_nodes)
    exit_logits = model.early_exit_logits(hidden[:, : tree.num_internal])
    keep = surviving_nodes(tree, exit_logits, config)
    return tree.select(keep), hidden[:, keep], keep


def stream_rows_of(rows: mx.array, node: mx.array, num_nodes: int, num_streams: int) -> mx.array:
    """[1, G, D] the streams of `node` [1] among the upper rows [1, M * (1 + G), D]."""
    indices = num_nodes + node[:, None] * num_streams + mx.arange(num_streams)
    return rows[:, indices[0]]


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one target call leaves on the device: what was accepted, and the next tree."""

    acceptance: Acceptance
    next_tree: Tree

    def arrays(self) -> list[mx.array]:
        """All that the next step and the host will read."""
        tree = self.next_tree
        accepted = self.acceptance
        return [accepted.new_tokens, accepted.num_accepted, tree.tokens, tree.depths, tree.paths]


def step(
    model: StreamFusedModel,
    tree: Tree,
    cache: TreeCache,
    drafter: Drafter,
    prune: PruneConfig,
    sampler: Sampler = greedy,
) -> StepResult:
    """One target call: verify `tree` and draft the next (sections 3.2.1 to 3.2.3, figure 7)."""
    num_streams, split = drafter.num_streams, model.insertion_layer
    cache.reserve(tokens=tree.paths.shape[1], scratch=tree.num_nodes * (1 + num_streams))

    hidden = model.lower(tree, cache)
    kept, hidden, kept_index = prune_tree(model, tree, hidden, prune)
    rows = model.insert(hidden, num_streams)
    rows = model.upper(rows, kept, cache, num_streams)
    node_hidden = rows[:, : kept.num_nodes]
    target_tokens = choose(model, node_hidden, sampler)
    accepted = accept(kept, target_tokens)
    cache.commit(kept_index[accepted.path], accepted.path, split)
    own_streams = stream_rows_of(rows, accepted.last, kept.num_nodes, num_streams)
    verified = Verified(kept, target_tokens, accepted, node_hidden, own_streams)
    return StepResult(accepted, drafter.propose(verified))


def streaming_decode(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    *,
    drafter: Drafter,
    context: Sequence[int] = (),
    prune: PruneConfig | None = None,
    sampler: Sampler = greedy,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    progress: Progress | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens that each target call advances by, endlessly.

    Args:
        model: a model with streams, or with any drafter that needs none.
        prompt: one token or more; they follow what `cache` already holds.
        cache: left holding the prompt and every yielded token but the last.
        drafter: proposes each next tree.
        context: the tokens that `cache` holds, for drafters that read the text.
        prune: which nodes to drop half-way up; off unless told.
        sampler: decides the target's tokens; greedy unless told.

    The prompt's last token is the first tree: a bare root, whose step drafts like any other.
    """
    prune = prune or PruneConfig()
    drafter.start([*context, *prompt])
    prefill(model, prompt[:-1], cache, step_size=prefill_step_size, progress=progress)
    tree = root_tree(mx.array(prompt[-1:], mx.int32))
    while True:
        result = step(model, tree, cache, drafter, prune, sampler)
        mx.eval(result.arrays(), cache.state)
        num_new = to_int(result.acceptance.num_accepted) + 1
        cache.advance(num_new)
        yield to_list(result.acceptance.new_tokens)[:num_new]
        tree = result.next_tree


def plain_decode(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    *,
    sampler: Sampler = greedy,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    progress: Progress | None = None,
) -> Iterator[list[int]]:
    """Yield one token for each target call, endlessly: the same model without drafting.

    As in mlx-lm, the next call is under way while its predecessor's token is read; a call whose
    token nobody asks for is wasted, and not counted.
    """
    prefill(model, prompt[:-1], cache, step_size=prefill_step_size, progress=progress)

    def call(token: mx.array) -> mx.array:
        chosen = choose(model, model.backbone.append(token, cache), sampler)
        mx.async_eval(chosen)
        return chosen

    token = call(mx.array(prompt[-1:], mx.int32))
    while True:
        next_token = call(token)
        yield to_list(token)
        token = next_token
