"""Timing of calls that verify drafted trees on this machine, in calls of plain decoding."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from statistics import fmean

from mlx_lm.generate import wired_limit

from ..decoding.draft_shape import Always, DraftShape
from ..decoding.drafter import Drafter, Needs, Taps, Verified
from ..decoding.drafting import scratch_rows
from ..decoding.loop import plain_decode, speculative_decode
from ..decoding.step import Step
from ..drafters.stream_drafter import StreamDrafter
from ..drafters.trie import Trie
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..model.tree import Tree
from ..settings import TreeConfig

PLAIN = 1
"""Nodes of a call of plain decoding: the root alone."""
_TIMED_CALLS = 3
_DROPPED_CALLS = 2  # the prompt's, and the first that drafts or launches ahead


@dataclass(frozen=True)
class CallTimings:
    """The time that calls took on this machine, each after another of the same kind."""

    costs: Mapping[int, float]  # plain calls that a call with n nodes takes, by n
    plain_seconds: Sequence[float]  # of each of the plain calls


class NewestTokenRepeater:
    """Drafts chains that repeat the newest token: to time calls that verify so many rows."""

    name = "any-chain"
    needs = Needs(host_tokens=True)
    num_parameters = draft_model_calls = cache_bytes = 0

    def __init__(self, nodes: int) -> None:
        self.largest = DraftShape(self.name, nodes, nodes - 1)
        self._last = 0

    def start(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1]

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        self._last = tokens[-1]

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        trie = Trie(self._last, shape.nodes)
        trie.add([self._last] * shape.levels)
        return trie.to_padded_tree(shape.levels)


def measure_costs(
    model: StreamFusedModel,  # nothing else decodes with it meanwhile
    tokens: Sequence[int],  # the text that is decoded after, two tokens or more
    sizes: Sequence[int] = (2, 3, 4, 6, 8, 12, 16),  # nodes of the trees, each 2 or more
    *,
    seconds: float = 3.0,  # after which no other round over the sizes begins
    # after which no other size is begun in the first round either
    first_round_seconds: float = inf,
) -> CallTimings:
    """Time steady calls of the real loop, with best trees of streams, or else with free chains.

    Sizes are timed in turns, smallest first; the least mean of each counts, because any
    disturbance makes a timing longer. After a size that takes more plain calls than any tree can
    bring tokens, larger ones are left out.
    """
    assert len(tokens) > 1
    ascending = sorted({*sizes})
    drafter = _drafter_for(model, ascending[-1])
    cache = model.make_cache()
    # At once, while the cache is empty: buffers that grow later are copied.
    cache.reserve(more_tokens=0, step_rows=scratch_rows([drafter]))
    least: dict[int, float] = {}
    plain_seconds: list[float] = []
    most_tokens = 1 + drafter.largest.levels  # of a call
    started = time.perf_counter()
    is_first_round = True

    def time_size(size: int) -> bool:
        """Time some calls of a size, and update `least` and `plain_seconds`; False if the first
        round's time is over."""
        deadline = started + first_round_seconds if is_first_round else inf
        calls = _decode_calls(model, list(tokens), cache, drafter, size)
        took = _time_few_calls(calls, deadline)
        if not took:
            return False
        if size == PLAIN:
            plain_seconds.extend(took)
        least[size] = min(fmean(took), least.get(size, inf))
        return True

    def is_too_slow(size: int) -> bool:
        return least[size] > most_tokens * least[PLAIN]

    with wired_limit(model.backbone.model):
        while is_first_round or time.perf_counter() - started < seconds:
            has_time = time_size(PLAIN)
            for size in ascending:
                has_time = has_time and time_size(size)
                if not has_time:
                    break
                # Retry if a size looks too slow: something else may have been running.
                if is_first_round and is_too_slow(size) and time_size(size) and is_too_slow(size):
                    break
            ascending = [size for size in ascending if size in least]
            is_first_round = False
            if not ascending:
                break
    return CallTimings({size: least[size] / least[PLAIN] for size in ascending}, plain_seconds)


def _drafter_for(model: StreamFusedModel, nodes: int) -> Drafter:
    if model.num_streams:
        return StreamDrafter(model, TreeConfig(size=nodes), model.num_streams)
    return NewestTokenRepeater(nodes)


def _time_few_calls(
    calls: Iterator[Step],  # without end, left open
    deadline: float,  # of `time.perf_counter`
) -> list[float]:
    """Seconds of `_TIMED_CALLS` calls; an empty list if the prompt's call misses the deadline."""
    for _ in islice(calls, _DROPPED_CALLS):
        if time.perf_counter() > deadline:
            return []
        deadline = inf
    seconds = []
    for _ in range(_TIMED_CALLS):
        started = time.perf_counter()
        next(calls)
        seconds.append(time.perf_counter() - started)
    return seconds


def _decode_calls(
    model: StreamFusedModel,
    text: list[int],  # tokens, two or more
    cache: TextCache,  # may hold a beginning of `text`, or more, which is taken back now
    drafter: Drafter,  # of trees at least as large
    size: int,
) -> Iterator[Step]:
    """Steps after `text`, without end, with a tree of `size` nodes in every call."""
    held = cache.longest_keepable(min(cache.offset, len(text) - 1))
    cache.keep_first(held)
    prompt = text[held:]
    context = text[:held]
    if size == PLAIN:
        steps = plain_decode(model, prompt, cache, context=context)
    else:
        largest = drafter.largest
        shape = DraftShape(largest.drafter, size, min(largest.levels, size - 1))
        steps = speculative_decode(
            model, prompt, cache, context=context, drafters=[drafter], controller=Always(shape)
        )
    return filter(None, steps)
