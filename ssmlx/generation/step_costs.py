"""What a call that verifies a drafted tree costs on this machine, in calls of plain decoding."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from statistics import fmean

from mlx_lm.generate import wired_limit

from ..decoding.controller import Always, DraftShape
from ..decoding.drafting import scratch_rows
from ..decoding.loop import plain_decode, speculative_decode
from ..drafters.streams import StreamDrafter
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from ..settings import TreeConfig

PLAIN = 1
"""Nodes of a call of plain decoding: the root alone."""
_TIMED_CALLS = 3
_DROPPED_CALLS = 2  # the prompt's, and the first that drafts or launches ahead


@dataclass(frozen=True)
class StepTimings:
    """What steady calls took here.

    Attributes:
        costs: plain calls that a call with n nodes takes, by n.
        plain_seconds: of each of the plain calls.
    """

    costs: Mapping[int, float]
    plain_seconds: Sequence[float]


def measure_step_costs(
    model: StreamFusedModel,
    tokens: Sequence[int],
    sizes: Sequence[int] = (2, 3, 4, 6, 8, 12, 16),
    *,
    seconds: float = 3.0,
    first_round_seconds: float = inf,
) -> StepTimings:
    """Time steady calls of the real decoding loop, with best trees of streams and without.

    Sizes are timed in turns, smallest first, until the seconds are used; the least time of each
    counts, because whatever disturbs a timing makes it longer. Behind a size that takes more plain
    calls than any tree can bring tokens, larger ones are left out.

    Args:
        model: has streams; nothing else decodes with it meanwhile.
        tokens: the text that is decoded behind, two tokens or more.
        sizes: nodes of the trees, each 2 or more.
        seconds: after which no other round begins.
        first_round_seconds: after which no other size is begun in the first round either; by
            default it comes to all of them, however long that takes.
    """
    assert len(tokens) > 1 and model.num_streams > 0
    ascending = sorted({*sizes})
    drafter = StreamDrafter(model, TreeConfig(size=ascending[-1]), model.num_streams)
    cache = model.make_cache()
    # At once, while the cache is empty: buffers that grow later are copied.
    cache.reserve(tokens=0, scratch=scratch_rows([drafter]))
    least: dict[int, float] = {}
    plain_seconds: list[float] = []
    most_tokens = 1 + model.num_streams  # of a call
    started = time.perf_counter()
    is_first_round = True

    def time_calls(size: int) -> bool:
        """Whether there was time for calls of a size."""
        deadline = started + first_round_seconds if is_first_round else inf
        calls = _calls_behind(model, list(tokens), cache, drafter, size)
        took = _seconds_of_calls(calls, deadline)
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
    return StepTimings({size: least[size] / least[PLAIN] for size in ascending}, plain_seconds)


def _seconds_of_calls(calls: Iterator[list[int]], deadline: float) -> list[float]:
    """Seconds of a few steady calls, behind those that are dropped; none where the first of these,
    with what is read of the prompt, does not end before the deadline."""
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


def _calls_behind(
    model: StreamFusedModel, text: list[int], cache: TreeCache, drafter: StreamDrafter, size: int
) -> Iterator[list[int]]:
    """The tokens of each call behind `text`, of which `cache` holds a part or more, with a tree of
    `size` nodes in every call; of plain decoding where that is `PLAIN`."""
    held = min(cache.offset, len(text) - 1)
    cache.trim(held)
    prompt = text[held:]
    context = text[:held]
    if size == PLAIN:
        steps = plain_decode(model, prompt, cache, context=context)
    else:
        shape = DraftShape(drafter.name, size, min(drafter.largest.levels, size - 1))
        steps = speculative_decode(
            model, prompt, cache, context=context, drafters=[drafter], controller=Always(shape)
        )
    return filter(None, steps)
