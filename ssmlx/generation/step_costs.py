"""What a call that verifies a drafted tree costs on this machine, in calls of plain decoding."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice

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


def measure_step_costs(
    model: StreamFusedModel,
    tokens: Sequence[int],
    sizes: Sequence[int] = (2, 3, 4, 6, 8, 12, 16),
    *,
    seconds: float = 3.0,
) -> dict[int, float]:
    """Time steady calls of the real decoding loop, with best trees of streams and without.

    Sizes are timed in turns, smallest first, until the seconds are used; the least time of each
    counts, because whatever disturbs a timing makes it longer. Behind a size that takes more plain
    calls than any tree can bring tokens, larger ones are left out.

    Args:
        model: has streams; nothing else decodes with it meanwhile.
        tokens: the text that is decoded behind, two tokens or more.
        sizes: nodes of the trees, each 2 or more.
        seconds: after which no other round begins; the first round always ends.

    Returns:
        Plain calls that a call with n nodes takes, by n.
    """
    assert len(tokens) > 1 and model.num_streams > 0
    ascending = sorted({*sizes})
    drafter = StreamDrafter(model, TreeConfig(size=ascending[-1]), model.num_streams)
    cache = model.make_cache()
    # At once, while the cache is empty: buffers that grow later are copied.
    cache.reserve(tokens=0, scratch=scratch_rows([drafter]))
    least: dict[int, float] = {}
    most_tokens = 1 + model.num_streams  # of a call

    def time_calls(size: int) -> None:
        took = _seconds_of_a_call(_calls_behind(model, list(tokens), cache, drafter, size))
        least[size] = min(took, least.get(size, took))

    started = time.perf_counter()
    with wired_limit(model.backbone.model):
        is_first_round = True
        while is_first_round or time.perf_counter() - started < seconds:
            time_calls(PLAIN)
            for size in ascending:
                time_calls(size)
                if is_first_round and least[size] > most_tokens * least[PLAIN]:
                    time_calls(size)  # once more: something else may have been running
                    if least[size] > most_tokens * least[PLAIN]:
                        break
            ascending = [size for size in ascending if size in least]
            is_first_round = False
    return {size: least[size] / least[PLAIN] for size in ascending}


def _seconds_of_a_call(calls: Iterator[list[int]]) -> float:
    """Seconds that a steady call takes: the mean of a few, behind those that are dropped."""
    for _ in islice(calls, _DROPPED_CALLS):
        pass
    started = time.perf_counter()
    for _ in islice(calls, _TIMED_CALLS):
        pass
    return (time.perf_counter() - started) / _TIMED_CALLS


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
