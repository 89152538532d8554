"""What a call that verifies a drafted tree costs on this machine, in calls of plain decoding."""

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
    """What calls took on this machine, one behind another of the same kind.

    Attributes:
        costs: plain calls that a call with n nodes takes, by n.
        plain_seconds: of each of the plain calls.
    """

    costs: Mapping[int, float]
    plain_seconds: Sequence[float]


class NewestTokenRepeater:
    """A drafter of chains that repeat the newest token: to time calls that verify so many rows.

    Args:
        nodes: nodes of a chain at most, the root included.
    """

    name = "any-chain"
    needs = Needs(host_tokens=True)
    num_parameters = draft_calls = cache_bytes = 0

    def __init__(self, nodes: int) -> None:
        self.largest = DraftShape(self.name, nodes, nodes - 1)
        self._last = 0

    def start(self, tokens: Sequence[int]) -> None:
        """Note the newest token."""
        self._last = tokens[-1]

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Note the newest token."""
        self._last = tokens[-1]

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """A chain that repeats the newest token `shape.levels` times, padded to a usual number of
        nodes.

        `verified` is not read.
        """
        trie = Trie(self._last, shape.nodes)
        trie.add([self._last] * shape.levels)
        return trie.to_padded_tree(shape.levels)


def measure_costs_in_plain_calls(
    model: StreamFusedModel,
    tokens: Sequence[int],
    sizes: Sequence[int] = (2, 3, 4, 6, 8, 12, 16),
    *,
    seconds: float = 3.0,
    first_round_seconds: float = inf,
) -> CallTimings:
    """Time steady calls of the real decoding loop, with best trees of streams and without.

    Of a model without streams, calls that verify chains that were drafted at no cost.

    Sizes are timed in turns, smallest first, until the seconds are used; the least mean of each
    counts, because whatever disturbs a timing makes it longer. Behind a size that takes more plain
    calls than any tree can bring tokens, larger ones are left out.

    Args:
        model: nothing else decodes with it meanwhile.
        tokens: the text that is decoded behind, two tokens or more.
        sizes: nodes of the trees, one size or more, each 2 or more.
        seconds: time after which no other round over the sizes begins.
        first_round_seconds: time after which no other size is begun in the first round either; by
            default it comes to all of them, however long that takes.

    Returns:
        The costs of the sizes that were timed, in plain calls, and the seconds of all timed plain
        calls; none where not even a plain call was timed.
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

    def time_calls(size: int) -> bool:
        """Time some calls of a size; keep the least mean, and the seconds of plain calls.

        Returns:
            False, with nothing kept, where the time for the first round was over before the first
            call had ended.
        """
        deadline = started + first_round_seconds if is_first_round else inf
        calls = _decode_calls(model, list(tokens), cache, drafter, size)
        took = _time_few_calls(calls, deadline)
        if not took:
            return False
        if size == PLAIN:
            plain_seconds.extend(took)
        least[size] = min(fmean(took), least.get(size, inf))
        return True

    def is_too_dear(size: int) -> bool:
        return least[size] > most_tokens * least[PLAIN]

    with wired_limit(model.backbone.model):
        while is_first_round or time.perf_counter() - started < seconds:
            has_time = time_calls(PLAIN)
            for size in ascending:
                has_time = has_time and time_calls(size)
                if not has_time:
                    break
                # Once more where it seems too dear: something else may have been running.
                if is_first_round and is_too_dear(size) and time_calls(size) and is_too_dear(size):
                    break
            ascending = [size for size in ascending if size in least]
            is_first_round = False
            if not ascending:
                break
    return CallTimings({size: least[size] / least[PLAIN] for size in ascending}, plain_seconds)


def _drafter_for(model: StreamFusedModel, nodes: int) -> Drafter:
    """A drafter of trees of up to `nodes`: of streams, or of chains where the model has none."""
    if model.num_streams:
        return StreamDrafter(model, TreeConfig(size=nodes), model.num_streams)
    return NewestTokenRepeater(nodes)


def _time_few_calls(calls: Iterator[Step], deadline: float) -> list[float]:
    """Make `_DROPPED_CALLS` calls that are not timed and then `_TIMED_CALLS`, and return the
    seconds of each of the latter.

    An empty list where the first call, which processes the prompt, does not end before `deadline`
    (of `time.perf_counter`); later calls have no deadline. `calls` are without end, and are left
    open.
    """
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
    model: StreamFusedModel, text: list[int], cache: TextCache, drafter: Drafter, size: int
) -> Iterator[Step]:
    """Decode behind `text` with a tree of `size` nodes in every call; plainly where it is `PLAIN`.

    Args:
        model: the target.
        text: tokens, two or more.
        cache: may hold a beginning of `text`, or all of it and more, which is taken back now.
        drafter: of trees as large at least.
        size: nodes, the root included.

    Returns:
        An iterator over the steps of an answer, without end.
    """
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
