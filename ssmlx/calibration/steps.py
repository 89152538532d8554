"""Whole steps of the real loop, for `ssmlx.calibrate`: what they take beyond their forwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..api import token_steps
from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig
from ..tuning.cost import DraftShape, StepCosts, Surface
from .costs import WARM_CALLS, Bar, Clock, no_bar


def config_of(shape: DraftShape, **settings: Any) -> GenerateConfig:
    """Settings that draft in `shape`."""
    return GenerateConfig(
        decoding="streaming",
        tree=shape.tree,
        prune=shape.prune,
        num_streams=shape.num_streams,
        stream_schedule=shape.stream_schedule,
        **settings,
    )


def timed_steps(
    model: StreamFusedModel,
    prompt: list[int],
    shape: DraftShape,
    count: int,
    clock: Clock = time.perf_counter,
) -> list[tuple[int, float]]:
    """(committed tokens, seconds) of `count` steps of the real loop, after the first ones."""
    cache, taken = model.make_cache(), []
    steps = token_steps(model, prompt, cache, config_of(shape))
    length = len(prompt)
    for turn in range(WARM_CALLS + count):
        started = clock()
        new_tokens = next(steps)
        if turn >= WARM_CALLS:
            taken.append((length, clock() - started))
        length += len(new_tokens)
    return taken


def with_beside(
    model: StreamFusedModel,
    costs: StepCosts,
    prompts: Sequence[list[int]],
    shapes: Sequence[DraftShape],
    *,
    steps: int = 12,
    clock: Clock = time.perf_counter,
    bar: Bar = no_bar,
) -> StepCosts:
    """`costs` with what real steps of `shapes` take beyond their forwards.

    Args:
        model: with streams.
        costs: of the forwards.
        prompts: each is decoded a little way with every shape in turn.
        shapes: several sizes of each schedule, all streams, not pruned.
        steps: of each prompt and shape.
        clock: seconds.
        bar: shows the progress.
    """
    found: dict[DraftShape, list[float]] = {shape: [] for shape in shapes}
    for prompt, shape in bar([(p, s) for p in prompts for s in shapes], "whole steps"):
        for context, seconds in timed_steps(model, prompt, shape, steps, clock):
            found[shape].append(seconds - costs.forward_seconds(shape, context))
    schedules = dict.fromkeys(shape.stream_schedule for shape in shapes)
    return replace(
        costs,
        beside={
            schedule: Surface.of(
                {
                    (shape.num_nodes, 0): statistics.median(values)
                    for shape, values in found.items()
                    if shape.stream_schedule == schedule
                }
            )
            for schedule in schedules
        },
    )
