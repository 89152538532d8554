"""What streams guess along an answer, recorded so that any tree can be replayed.

An answer is decoded once. One forward over it, the whole answer as a tree of one branch with all
its streams beside it, then says what the streams would have drafted at every place (the paper's
own pass, section 3.2.1); with greedy decoding that is what they do draft there, whatever the
tree. `ssmlx.tuning.replay` replays it; a test compares with real decoding, call for call.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import check_prompt
from ..bars import bar
from ..decoding.drafter import rank_candidates
from ..decoding.loop import own_turn, prefill
from ..decoding.prune import transition_logprobs
from ..drafters.streams import rank_given
from ..errors import require
from ..model.cache import TreeCache
from ..model.condition import RESCORED
from ..model.shapes import to_list
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, clip_edges, full_topology, grow_tree, num_candidates
from ..prompts import encode_prompt, read_prompts
from ..settings import GenerateConfig, TreeConfig
from ..tuning.replay import NEVER, Floats, Guesses, Ints, true_ranks
from .timing import ssmlx_answer

EXIT_TREE, EXIT_TOKENS = 32, 300
_LEAST_TOKENS = 50
_LOGIT_ROWS = 64  # rows of logits at a time: a vocabulary of 150,000 makes 40 MB of them


@dataclass(frozen=True)
class RecordedAnswer:
    prompt: list[int]
    guesses: Guesses


def read_tokens(
    path: Path, model: StreamFusedModel, tokenizer: TokenizerWrapper
) -> list[list[int]]:
    found = [encode_prompt(prompt, model, tokenizer) for prompt in read_prompts(path, "--data")]
    for tokens in found:
        check_prompt(model, len(tokens))
    return found


def split_prompts(
    prompts: Sequence[list[int]], count: int, checked: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The last `count` prompts to learn from, and `checked` before them to check on."""
    require(
        count >= 1 and checked >= 0 and len(prompts) >= count + checked,
        f"--count {count} --check {checked} of {len(prompts)} prompts",
        expected="1 or more to learn from, others to check on, and no more than there are",
        do="give smaller numbers, or more --data",
    )
    first = len(prompts) - count
    return list(prompts[first:]), list(prompts[first - checked : first])


def record_answers(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[list[int]],
    max_tokens: int,
    largest: int,
) -> list[RecordedAnswer]:
    """Decode each prompt, and record what trees of up to `largest` nodes are made of."""
    config = GenerateConfig(decoding="streaming", max_tokens=max_tokens, tree=TreeConfig())
    most = most_candidates(model, largest)
    found = []
    for prompt in bar(prompts, "answers"):
        answer = ssmlx_answer(model, tokenizer, prompt, config).tokens
        found.append(RecordedAnswer(prompt, guesses_along(model, prompt, answer, most)))
    tokens = sum(len(one.guesses.answer) for one in found)
    require(
        tokens >= _LEAST_TOKENS,
        f"the answers have {tokens} tokens in all",
        expected=f"{_LEAST_TOKENS} or more",
        do="give --data with longer answers, or a larger --count or --max-tokens",
    )
    return found


def most_candidates(model: StreamFusedModel, size: int) -> int:
    """C, the candidates of each stream that replays of best trees of up to `size` nodes need."""
    tree = TreeConfig(size=size).no_wider_than(model.draft_vocab_size)
    return num_candidates(tree, model.num_streams, conditional=model.is_conditional)


def guesses_along(
    model: StreamFusedModel,
    prompt: list[int],
    answer: list[int],
    count: int,
    cache: TreeCache | None = None,
) -> Guesses:
    """What the streams guess along `answer`: [A, G, count], fewer where the vocabulary is.

    Where they are scored given those before, of as many as when decoding. A `cache` that is given
    holds a part of the prompt or more, and is left holding it.
    """
    cache, streams = cache or model.make_cache(), model.num_streams
    cache.trim(min(cache.offset, len(prompt) - 1))
    prefill(model, prompt[cache.offset : -1], cache)
    topology = full_topology(1, len(answer) - 1)
    nodes = mx.array([prompt[-1], *answer[:-1]], mx.int32)
    tree = Tree(nodes, topology.depths, topology.paths, topology.num_internal, topology)
    cache.reserve(tokens=1, scratch=tree.num_nodes * (1 + streams))
    hidden = model.insert(model.lower(tree, cache), streams)
    cache.turn = len(prompt) - own_turn(prompt, model.turn_opening)
    starts = [model.window_start(cache, cache.offset + place) for place in range(len(answer))]
    rows = model.upper(hidden, tree, cache, streams, starts=mx.array(starts, mx.int32))
    rows = rows[:, tree.num_nodes :]
    count, parts = min(count, model.draft_vocab_size), []
    at_once = max(1, _LOGIT_ROWS // streams)
    for first in range(0, len(answer), at_once):
        own, roots = rows[:, first * streams :][:, : at_once * streams], answer[first:][:at_once]
        if model.is_conditional:
            columns, logprobs = rank_given(model, own, mx.array(roots), min(count, RESCORED))
        else:
            columns, logprobs = rank_candidates(model.draft_logits(own), count)
            shape = (len(roots), streams, count)
            columns, logprobs = columns.reshape(shape), logprobs.reshape(shape)
        tokens = model.drafted_tokens(columns)
        mx.eval(tokens, logprobs)
        parts.append((np.array(tokens, np.int32), np.array(logprobs, np.float32)))
    tokens_along, logprobs_along = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Guesses(tokens_along, logprobs_along, np.array(answer))


def rank_table(guesses: Iterable[Guesses], ranks: Sequence[int]) -> list[list[float]]:
    """a[j][r]: how often stream j + 1 has the answer's token among its first `ranks[r]`.

    Counted at the places where the streams before it had theirs among all that they ranked.
    """
    found = np.concatenate([true_ranks(one) for one in guesses])
    table, reached = [], np.ones(len(found), bool)
    for column in found.T:
        own = column[reached]
        table.append([float((own < rank).mean()) if len(own) else 0.0 for rank in ranks])
        reached &= column < NEVER
    return table


@dataclass(frozen=True, eq=False)
class Exits:
    """Best trees of an answer's places, and what early exit says of their nodes (section 3.2.3)."""

    drafted: Floats  # [A, N] draft score of each node
    judged: Floats  # [A, N] early-exit score of each node's path
    path: Ints  # [A, G] the node at which the answer stands at each depth; -1 where there is none

    def depths(self, size: int, keep: int) -> Ints:
        """[A] how far the answer holds in the best `size` nodes, pruned to `keep`."""
        held = np.ones(len(self.path), bool)
        depths = np.zeros(len(self.path), np.int32)
        inside = _order_of(self.drafted) < size
        kept = _order_of(np.where(inside, self.judged, -np.inf)) < keep
        for node in self.path.T:
            places = np.arange(len(node))
            held &= (node >= 0) & inside[places, node] & kept[places, node]
            depths += held
        return depths


def _order_of(scores: Floats) -> Ints:
    """[A, N] where each node comes by score, 0 for the best."""
    return np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1).astype(np.int32)


def record_exits(
    model: StreamFusedModel, answers: Sequence[RecordedAnswer], streams: int
) -> list[Exits]:
    taken, tokens = [], 0
    for one in answers:
        if tokens < EXIT_TOKENS:
            taken.append(one)
            tokens += len(one.guesses.answer)
    return [
        exits_along(model, one.prompt, one.guesses, streams, EXIT_TREE)
        for one in bar(taken, "early exits")
    ]


def exits_along(
    model: StreamFusedModel, prompt: list[int], guesses: Guesses, levels: int, size: int
) -> Exits:
    """What early exit says of the best tree of `size` nodes at every place of an answer.

    The lower layers run once on each tree, from the answer's end: a cache can forget tokens, and
    need not read any of them twice.
    """
    answer, config = guesses.answer.tolist(), TreeConfig(size=size, width=guesses.tokens.shape[2])
    count = num_candidates(config, levels, conditional=model.is_conditional)
    cache = model.make_cache(size)
    prefill(model, [*prompt, *answer[:-1]], cache)
    cache.reserve(tokens=1, scratch=size)
    rows = []
    for place in reversed(range(len(answer))):
        cache.trim(len(prompt) + place)
        tokens, logprobs = guesses.tokens[place, :levels], guesses.logprobs[place, :levels]
        ranked = mx.array(tokens[:, :count]), mx.array(logprobs[:, :count])
        tree = grow_tree(mx.array(answer[place : place + 1]), *ranked, config)
        logits = model.early_exit_logits(model.lower(tree, cache)[:, : tree.num_internal])
        edges = clip_edges(transition_logprobs(tree, logits))
        judged = np.array(tree.path_sums(edges), np.float32)
        scores, path = _places_in(tree, tokens, guesses.edges[place], answer[place + 1 :])
        rows.append((scores, judged, path + [-1] * (levels - len(path))))
    drafted, judged_rows, paths = zip(*reversed(rows), strict=True)
    return Exits(np.stack(drafted), np.stack(judged_rows), np.array(paths, np.int32))


def _places_in(
    tree: Tree, tokens: Ints, edges: Floats, following: Sequence[int]
) -> tuple[Floats, list[int]]:
    """[N] draft score of each node, and the nodes where the text that follows stands, of the
    candidates [G, C] and log probabilities [G, C or 1, C] that the tree was grown from."""
    said, depths, parents = map(to_list, (tree.tokens, tree.depths, tree.parents))
    scores, slots, path = np.zeros(len(said), np.float32), [0] * len(said), [0]
    for node in range(1, len(said)):
        above, level = parents[node], depths[node] - 1
        slots[node] = int(np.argmax(tokens[level] == said[node]))
        row = slots[above] if edges.shape[1] > 1 else 0
        scores[node] = scores[above] + edges[level, row, slots[node]]
        if above == path[-1] and level < len(following) and said[node] == following[level]:
            path.append(node)
    return scores, path[1:]
