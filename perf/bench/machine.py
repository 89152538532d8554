"""Measures calls on this machine: rows, launches, reads, and whether caches are copied."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx

from ssmlx.bars import bar
from ssmlx.decoding.loop import prefill, speculative_decode
from ssmlx.decoding.step import AnswerPart, take_all
from ssmlx.generation.plan import make_plan
from ssmlx.model import metal
from ssmlx.model.cache import TreeCache
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import Tree, draft_topology, grow_tree
from ssmlx.settings import GenerateConfig, TreeConfig

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 128  # tokens in front of the rows
TURNS = (3, 40)  # how often all numbers of rows are timed: at least, at most
WARM_TURNS = 1  # which do not count
CHAINS = (200, 3200)  # tiny kernels that wait for each other
CHAIN_TURNS = 5
LAUNCH_STEPS = 16
LAUNCH_ROOM = 4096  # tokens of a cache
PAUSE = 0.02  # seconds

Clock = Callable[[], float]


def measure_machine(
    model: StreamFusedModel,
    prompt: list[int],  # token ids of any text, repeated to `CONTEXT` tokens
    deadline: float,  # on `time.perf_counter`'s clock, in seconds, when the forwards should end
) -> dict[str, Any]:
    """Time forward passes of trees of `ROWS` nodes, launches of kernels, and decoding steps."""
    cache = make_filled_cache(model, prompt, CONTEXT, scratch_rows=max(ROWS))

    def forward(tree: Tree) -> mx.array:
        hidden = model.insert(model.lower(tree, cache), 0)
        return mx.argmax(model.backbone.logits(model.upper(hidden, tree, cache, 0)), axis=-1)

    calls = {row: partial(forward, make_typical_tree(model, row)) for row in ROWS}
    once = sum(time_calls_in_turns(calls, 1).seconds.values())
    turns = min(max(int((deadline - time.perf_counter()) / once), TURNS[0]), TURNS[1])
    times = time_calls_in_turns(calls, turns)
    seconds = list(times.seconds.values())
    rows = {
        "bits": weight_bits(model),
        "context": CONTEXT,
        "turns": turns,
        "noise": times.noise,
        "rows": ROWS,
        "seconds": seconds,
        "ratios": [one / seconds[0] for one in seconds],
        "launch": seconds_per_chained_kernel(),
    }
    return {"rows": rows, "launches": time_steps(model, prompt)}


def weight_bits(model: StreamFusedModel) -> int:
    """Bits of a weight in the last layer; the fewest, if its matrices differ."""
    backbone = model.backbone
    packed = [one.bits for one in backbone.layers[-1].modules() if hasattr(one, "bits")]
    return min(packed, default=8 * backbone.dtype.size)


def make_filled_cache(
    model: StreamFusedModel,
    tokens: Sequence[int],  # one or more ids, repeated until there are enough
    num_tokens: int,
    *,
    scratch_rows: int,  # room beside the tokens
) -> TreeCache:
    cache = TreeCache(model.num_layers, scratch=scratch_rows)
    text = [tokens[index % len(tokens)] for index in range(num_tokens)]
    # Allocate beforehand: a growing buffer is copied, which would be timed.
    cache.reserve(more_tokens=num_tokens, step_rows=scratch_rows)
    prefill(model, text, cache)
    return cache


def make_typical_tree(model: StreamFusedModel, num_nodes: int) -> Tree:
    """Make a tree whose guesses halve in probability, about as in trees that streams draft."""
    streams = model.num_streams
    config = TreeConfig(kind="best", size=num_nodes)
    count = min(draft_topology(config, streams).num_candidates, model.draft_vocab_size)
    tokens = mx.broadcast_to(mx.arange(count, dtype=mx.int32), (streams, count))
    logprobs = mx.broadcast_to(-0.7 * mx.arange(1, count + 1), (streams, count))
    root = mx.array([0], mx.int32)
    tree = grow_tree(root, tokens, logprobs, replace(config, width=count))
    mx.eval(tree.tokens, tree.depths, tree.paths)
    return tree


class CallTimes(NamedTuple):
    """The times of calls, and their noise."""

    seconds: dict[int, float]  # the median of each call, by its number of rows
    noise: float  # the median over calls of `relative_quartile_spread`


def time_calls_in_turns(
    calls_by_rows: Mapping[int, Callable[[], mx.array]],
    turns: int,  # which count, after `WARM_TURNS` others
    clock: Clock = time.perf_counter,  # in seconds
) -> CallTimes:
    """Time calls in turns, so that other load on the machine affects all calls alike."""
    times: dict[int, list[float]] = {rows: [] for rows in calls_by_rows}
    order = [(turn, rows) for turn in range(WARM_TURNS + turns) for rows in calls_by_rows]
    for turn, rows in bar(order, "forwards"):
        started = clock()
        mx.eval(calls_by_rows[rows]())
        seconds = clock() - started
        if turn >= WARM_TURNS:
            times[rows].append(seconds)
        else:
            metal.time_pending_shape()
    noise = statistics.median(relative_quartile_spread(values) for values in times.values())
    return CallTimes({rows: statistics.median(values) for rows, values in times.items()}, noise)


def relative_quartile_spread(times: Sequence[float]) -> float:
    """The distance between the first and third quartile, divided by the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def seconds_per_chained_kernel() -> float:
    """Seconds per tiny kernel, in a chain of kernels that wait for each other."""

    def time_one_chain(length: int) -> float:
        """Time a chain, without building it."""
        found = mx.array(1.0)
        for _ in range(length):
            found = found + 1
        started = time.perf_counter()
        mx.eval(found)
        return time.perf_counter() - started

    # The difference of two chains cancels the fixed cost of a launch.
    short, long = (min(time_one_chain(one) for _ in range(CHAIN_TURNS)) for one in CHAINS)
    return (long - short) / (CHAINS[1] - CHAINS[0])


def kernel_trials() -> list[dict[str, Any]]:
    """Trials of this process in which the fused kernel was compared with MLX's."""
    return [
        {
            "rows": one.largest.rows,
            "keys": one.largest.keys,
            **vars(trial),
            "taken": trial.takes_kernel,
        }
        for one, trial in metal.trials().items()
    ]


@contextmanager
def count_reads() -> Iterator[Counter[str]]:
    """Count reads of arrays by the host inside the block, on any thread."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[[mx.array], Any]:
        own = getattr(mx.array, name)

        def read(array: mx.array) -> Any:
            calls[name] += 1
            return own(array)

        return read

    replaced: Any = {name: counting(name) for name in ("item", "tolist")}
    with patch.multiple(mx.array, **replaced):
        yield calls


def sleep_and_take_all(seconds: float, tokens: Sequence[int]) -> AnswerPart:
    """Yield endlessly as an answer does, with a pause before each step."""
    time.sleep(seconds)
    return take_all(tokens)


def time_steps(model: StreamFusedModel, prompt: list[int]) -> dict[str, float]:
    """Detect whether MLX copies a layer's cache, which the GPU still holds at the next launch.

    Then the peak without pauses is higher by a layer's cache or more, and steps take longer. Each
    way is measured twice: seconds are the lower ones, all else is of the second time. Seconds are
    without pauses, peaks in bytes, "reads" per step.
    """
    drafters = make_plan(model, GenerateConfig(decoding="speculative", temp=0)).drafters
    assert drafters
    found: dict[str, float] = {}
    for name, pause in [("straight", 0.0), ("paused", PAUSE)] * 2:
        cache = model.make_cache()
        cache.reserve(more_tokens=LAUNCH_ROOM)
        take = partial(sleep_and_take_all, pause)
        steps = speculative_decode(model, prompt, cache, drafters=drafters, take=take)
        calls = filter(None, steps)
        for _ in range(LAUNCH_STEPS // 2):
            next(calls)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        with count_reads() as reads:
            for _ in range(LAUNCH_STEPS):
                next(calls)
        seconds = (time.perf_counter() - started) / LAUNCH_STEPS - pause
        found[f"{name}_seconds"] = min(seconds, found.get(f"{name}_seconds", seconds))
        found[f"{name}_peak"] = mx.get_peak_memory() - before
        found |= {"layer": cache.nbytes / model.num_layers, "reads": reads.total() / LAUNCH_STEPS}
    return found
