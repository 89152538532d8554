"""What streams guess along an answer, recorded so that any tree can be replayed.

An answer is decoded once. One forward over it, the whole answer as a tree of one branch with all
its streams beside it, then says what the streams would have drafted at every place (the paper's
own pass, section 3.2.1); with greedy decoding that is what they do draft there, whatever the
tree. `ssmlx.training.replay` replays it; a test compares with real decoding, call for call. Only
how far copies are trusted follows the calls: here it is as if every token were one's.
"""

import mlx.core as mx
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ssmlx.decoding.loop import prefill
from ssmlx.drafters.copies import (
    TextOnDevice,
    count_hits_and_trials,
    initial_hits_and_trials,
    mix_copies,
)
from ssmlx.drafters.stream_drafter import DraftVocab
from ssmlx.model.cache import TreeCache
from ssmlx.model.condition import RESCORED
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN, Tree, full_topology
from ssmlx.training.replay import Guesses

_LOGIT_ROWS = 64  # rows of logits at a time: a vocabulary of 150,000 makes 40 MB of them


def compute_guesses(
    model: StreamFusedModel,
    prompt: list[int],
    answer: list[int],
    count: int,
    cache: TreeCache | None = None,
) -> Guesses:
    """Run one forward over a prompt and its answer, and return what the streams guess at each
    token.

    Args:
        model: with streams.
        prompt: token ids, one or more.
        answer: A token ids, one or more, the model's own or any others.
        count: C, candidates of each stream; fewer are returned where the draft vocabulary is
            smaller, and at most `RESCORED`, as many as decoding takes, where streams have a
            condition.
        cache: holds a beginning of the prompt, or more; it is trimmed, and left holding the prompt
            but for its last token. None for a fresh one.

    Returns:
        Guesses [A, G, C], with copies mixed in where streams have a condition.
    """
    cache = cache or TreeCache(model.num_layers)
    streams = model.num_streams
    cache.keep_first(min(cache.offset, len(prompt) - 1))
    prefill(model, prompt[cache.offset : -1], cache)
    topology = full_topology(1, len(answer) - 1)
    nodes = mx.array([prompt[-1], *answer[:-1]], mx.int32)
    tree = Tree(nodes, topology.depths, topology.paths, topology.num_internal, topology)
    cache.reserve(more_tokens=1, step_rows=tree.num_nodes * (1 + streams))
    hidden = model.lower(tree, cache)
    known = None
    if model.starts_from_root:
        known = model.root_states(mx.array([answer]), model.upper(hidden, tree, cache, 0))
    hidden = model.insert(hidden, streams, known)
    starts = [model.window_start(cache, cache.offset + place) for place in range(len(answer))]
    rows = model.upper(hidden, tree, cache, streams, starts=mx.array(starts, mx.int32))
    rows = rows[:, tree.num_nodes :]
    most = RESCORED if model.is_conditional else count
    count = min(count, most, model.draft_vocab_size)
    parts = []
    at_once = max(1, _LOGIT_ROWS // streams)
    vocab = DraftVocab(model, prompt)
    for first in range(0, len(answer), at_once):
        own = rows[:, first * streams :][:, : at_once * streams]
        roots = answer[first:][:at_once]
        tokens, logprobs = vocab.rank_stream_tokens(own, mx.array(roots), count)
        mx.eval(tokens, logprobs)
        parts.append((np.array(tokens, np.int32), np.array(logprobs, np.float32)))
    tokens_along, logprobs_along = (np.concatenate(part) for part in zip(*parts, strict=True))
    if model.is_conditional:
        copies = mix_copies_along(prompt, answer, tokens_along, logprobs_along)
        tokens_along, logprobs_along = (np.array(found) for found in copies)
    return Guesses(tokens_along, logprobs_along, np.array(answer))


def mix_copies_along(
    prompt: list[int], answer: list[int], tokens: np.ndarray, logprobs: np.ndarray
) -> tuple[mx.array, mx.array]:
    """Mix tokens that are copied from the text into the streams' guesses, as decoding does.

    How far copies are trusted is learned as if every token of the answer came of a call of its own.

    Args:
        prompt: token ids.
        answer: A token ids.
        tokens: [A, G, C] guesses.
        logprobs: [A, G, C, C] their log probabilities given each candidate of the stream before.

    Returns:
        Tokens and log probabilities of the same shapes.
    """
    length, streams, _ = tokens.shape
    ends = len(prompt) + mx.arange(length)
    guessed = (mx.array(tokens), mx.array(logprobs))
    copied = TextOnDevice([*prompt, *answer]).find_continuations(ends, streams)
    behind = np.array([*answer[1:], *[PAD_TOKEN - 1] * streams], np.int32)
    said = mx.array(sliding_window_view(behind, streams))
    shown = np.array(mx.vmap(count_hits_and_trials)(*guessed, copied, said))
    known = np.zeros((length, 2, 2), np.float32)
    for level in range(min(2, streams)):  # what a token shows is known behind it
        known[1 + level :, :, level] = shown[: -1 - level, :, level]
    return mix_copies(*guessed, copied, initial_hits_and_trials() + mx.array(known.cumsum(axis=0)))
