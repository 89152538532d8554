"""Seconds of a step's forwards against rows and context, and of whole steps.

Every call is taken in turn, round after round, so that what else the machine does falls on all
of them alike; a figure is the median of its rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import mlx.core as mx

from ..api import token_steps
from ..bars import bar
from ..decoding.loop import plain_decode, prefill
from ..decoding.prune import nodes_within_budget, transition_logprobs
from ..model import metal
from ..model.cache import TreeCache
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, draft_topology, grow_tree
from ..settings import GenerateConfig, TreeConfig
from ..tuning.cost import DraftShape, StepCosts, Surface
from . import CONTEXTS

ROWS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 20, 24, 32, 48, 64)
FUSED_NODES = (1, 2, 4, 8, 12, 16, 24, 32)
WARM_ROUNDS = 1
WARM_CALLS = 2
PLAIN_CALLS = 4
STEP_SIZES = (4, 16, 48)
STEP_PROMPTS = 3

Clock = Callable[[], float]
Point = tuple[str, int, int]
"""What is timed: its name as a field of `StepCosts`, its rows, and the context."""
Calls = dict[Point, Callable[[], Any]]
"""Each gives what is to be evaluated, or its own seconds."""


@dataclass(frozen=True, kw_only=True)
class CostPlan:
    rows: tuple[int, ...] = ROWS  # of the lower and upper layers and the heads
    fused_nodes: tuple[int, ...] = FUSED_NODES  # M, nodes whose streams stand beside them
    contexts: tuple[int, ...] = CONTEXTS  # committed tokens
    repeats: int = 5  # rounds that count

    def within(self, limit: int | None) -> Self:
        """The same for a model with a context of `limit` tokens; its longest one at the least."""
        if limit is None:
            return self
        room = max(1, limit - max(self.rows) - PLAIN_CALLS - WARM_CALLS - 2)
        return replace(self, contexts=tuple(sorted({min(one, room) for one in self.contexts})))


def measure_costs(
    model: StreamFusedModel, prompts: Sequence[list[int]], plan: CostPlan
) -> tuple[StepCosts, float]:
    """Seconds of the forwards, of what whole steps take beyond them, and how much they varied."""
    costs, noise = forward_costs(model, [token for prompt in prompts for token in prompt], plan)
    shapes = [
        DraftShape(
            tree=TreeConfig(size=size), num_streams=model.num_streams, stream_schedule=schedule
        )
        for size in STEP_SIZES
        if size <= max(plan.rows)
        for schedule in model.schedules
    ]
    return with_whole_steps(model, costs, prompts[:STEP_PROMPTS], shapes), noise


def forward_costs(
    model: StreamFusedModel, tokens: Sequence[int], plan: CostPlan, clock: Clock = time.perf_counter
) -> tuple[StepCosts, float]:
    """Time the forwards that `plan` names behind `tokens`, over and over; and the noise in it."""
    plan = plan.within(model.backbone.context_length)
    scratch = max(*plan.rows, *(n * (1 + model.num_streams) for n in plan.fused_nodes))
    calls = head_calls(model, plan)
    for context in bar(plan.contexts, "contexts"):
        cache = filled_cache(model, tokens, context, scratch)
        calls.update(layer_calls(model, cache, context, plan))
        calls["plain", 1, context] = partial(plain_call, model, cache, clock)
    seconds, noise = medians(calls, plan.repeats, clock)
    window = model.config.stream_window if model.config else None
    return replace(surfaces(seconds, overhead(clock)), window=window), noise


def filled_cache(
    model: StreamFusedModel, tokens: Sequence[int], context: int, scratch: int
) -> TreeCache:
    """A cache of `context` tokens, with room for what is timed."""
    cache = model.make_cache(scratch)
    text = [tokens[index % len(tokens)] for index in range(context)]
    # Room beforehand: a buffer that grows is copied, which would be timed.
    cache.reserve(tokens=context + PLAIN_CALLS + WARM_CALLS + 2, scratch=scratch)
    prefill(model, text, cache)
    return cache


def layer_calls(model: StreamFusedModel, cache: TreeCache, context: int, plan: CostPlan) -> Calls:
    """The layers below and above the insertion layer, on every number of rows."""
    calls: Calls = {}

    def upper(tree: Tree, hidden: mx.array, streams: int) -> mx.array:
        known = None
        if streams and model.starts_from_root:  # as costly as if it were fused
            known = mx.zeros((1, hidden.shape[1], 2 * hidden.shape[2]), hidden.dtype)
        return model.upper(model.insert(hidden, streams, known), tree, cache, streams)

    for rows in plan.rows:
        tree, hidden = likely_tree(model, rows)
        calls["lower", rows, context] = partial(model.lower, tree, cache)
        calls["upper", rows, context] = partial(upper, tree, hidden, 0)
    for nodes in plan.fused_nodes:
        rows = nodes * (1 + model.num_streams)
        streams = model.num_streams
        calls["fused", rows, context] = partial(upper, *likely_tree(model, nodes), streams)
    return calls


def head_calls(model: StreamFusedModel, plan: CostPlan) -> Calls:
    """The heads, on every number of rows; they do not see the context."""
    calls: Calls = {}

    def head(hidden: mx.array) -> mx.array:
        return mx.argmax(model.backbone.logits(hidden), axis=-1)

    def early_exit(tree: Tree, hidden: mx.array) -> mx.array:
        edges = transition_logprobs(tree, model.early_exit_logits(hidden))
        return nodes_within_budget(tree, edges, max(1, tree.num_nodes // 2))

    can_prune = model.streams is not None and model.streams.prune is not None
    for rows in plan.rows:
        tree, hidden = likely_tree(model, rows)
        calls["head", rows, 0] = partial(head, hidden)
        if can_prune:
            # Of a tree chosen on the device, any node may have children.
            tree = replace(tree, num_internal=tree.num_nodes)
            calls["early_exit", rows, 0] = partial(early_exit, tree, hidden)
    for rows in range(1, model.num_streams + 1):
        of_rows = partial(model.backbone.logits, _some_hidden(model, rows), model.draft_head)
        calls["draft_head", rows, 0] = of_rows
    return calls


def likely_tree(model: StreamFusedModel, size: int) -> tuple[Tree, mx.array]:
    """A best tree of `size` nodes as streams draft it, where each rank is half as likely as the
    one before; and some hidden states of its nodes."""
    streams = model.num_streams
    config = TreeConfig(kind="best", size=size)
    count = min(draft_topology(config, streams).num_candidates, model.draft_vocab_size)
    config = replace(config, width=count)
    tokens = mx.broadcast_to(mx.arange(count, dtype=mx.int32), (streams, count))
    logprobs = mx.broadcast_to(-0.7 * mx.arange(1, count + 1), (streams, count))
    tree = grow_tree(mx.array([0], mx.int32), tokens, logprobs, config)
    mx.eval(tree.tokens, tree.depths, tree.paths)
    return tree, _some_hidden(model, tree.num_nodes)


def _some_hidden(model: StreamFusedModel, rows: int) -> mx.array:
    """[1, R, D]"""
    key = mx.random.key(rows)
    shape = (1, rows, model.backbone.hidden_size)
    hidden = mx.random.normal(shape, key=key).astype(model.backbone.dtype)
    mx.eval(hidden)
    return hidden


def medians(
    calls: Calls, repeats: int, clock: Clock = time.perf_counter
) -> tuple[dict[Point, float], float]:
    """Median seconds of each call, all taken in turn, after `WARM_ROUNDS` that do not count.

    With them comes how noisy the machine was: the median `spread` of all calls.
    """
    times: dict[Point, list[float]] = {point: [] for point in calls}
    rounds = [(turn, point) for turn in range(WARM_ROUNDS + repeats) for point in calls]
    for turn, point in bar(rounds, "forwards"):
        started = clock()
        found = calls[point]()
        mx.eval(found)
        seconds = found if isinstance(found, float) else clock() - started
        if turn >= WARM_ROUNDS:
            times[point].append(seconds)
        else:
            metal.settle()
    noise = statistics.median(spread(values) for values in times.values())
    return {point: statistics.median(values) for point, values in times.items()}, noise


def spread(times: Sequence[float]) -> float:
    """How far the middle half of `times` lies apart, of their median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def plain_call(model: StreamFusedModel, cache: TreeCache, clock: Clock) -> float:
    """Seconds of a call of the plain loop, one of several in a row."""
    context = cache.offset
    steps = plain_decode(model, [1], cache)
    for _ in range(WARM_CALLS):
        next(steps)
    started = clock()
    for _ in range(PLAIN_CALLS):
        next(steps)
    seconds = clock() - started
    steps.close()  # type: ignore[attr-defined]
    mx.eval(cache.state)
    cache.trim(context)
    return seconds / PLAIN_CALLS


def overhead(clock: Clock = time.perf_counter, repeats: int = 50) -> float:
    """Seconds that handing over any work takes, which every forward above holds once."""
    one = mx.array(1.0)
    times = []
    for _ in range(repeats):
        started = clock()
        mx.eval(one + 1)
        times.append(clock() - started)
    return statistics.median(times)


def surfaces(seconds: Mapping[Point, float], overhead: float = 0.0) -> StepCosts:
    """Costs from medians; `overhead` is taken from every forward, which runs beside others."""
    points: dict[str, dict[tuple[int, int], float]] = {}
    for (name, rows, context), value in seconds.items():
        own = value if name == "plain" else max(0.0, value - overhead)
        points.setdefault(name, {})[rows, context] = own
    known: dict[str, Any] = {name: Surface.of(one) for name, one in points.items()}
    return StepCosts(**known)


def with_whole_steps(
    model: StreamFusedModel,
    costs: StepCosts,
    prompts: Sequence[list[int]],
    shapes: Sequence[DraftShape],
    *,
    steps: int = 12,
    clock: Clock = time.perf_counter,
) -> StepCosts:
    """`costs` with what real steps of `shapes`, some of each schedule, take beyond forwards."""
    found: dict[DraftShape, list[float]] = {shape: [] for shape in shapes}
    for prompt, shape in bar([(p, s) for p in prompts for s in shapes], "whole steps"):
        decoded = token_steps(model, prompt, model.make_cache(), config_of(shape))
        context = len(prompt)
        for turn in range(WARM_CALLS + steps):
            started = clock()
            new_tokens = next(decoded)
            seconds = clock() - started
            if turn >= WARM_CALLS:
                found[shape].append(seconds - costs.forward_seconds(shape, context))
            context += len(new_tokens)
    points: dict[str, dict[tuple[int, int], float]] = {}
    for shape, values in found.items():
        own = points.setdefault(shape.stream_schedule, {})
        own[shape.num_nodes, 0] = statistics.median(values)
    return replace(costs, overhead={name: Surface.of(one) for name, one in points.items()})


def config_of(shape: DraftShape, **settings: Any) -> GenerateConfig:
    return GenerateConfig(decoding="streaming", **vars(shape), **settings)
