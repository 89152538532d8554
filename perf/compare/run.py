"""The answers of `perf.compare`: systems take turns, and every answer is kept as it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import tqdm

from ssmlx.calibration.timing import Answer, in_turns
from ssmlx.model.shapes import to_float
from ssmlx.tuning.machine import power_source

from ..run.common import text_of
from ..run.store import (
    AnswerStore,
    Kept,
    code_version,
    files_version,
    tell_kept,
    timed_on,
    weights_version,
)
from ..run.systems import MLX_LM
from .bench import Answerer, Bench, load_bench
from .plan import Plan, TaskPlan
from .systems import DRAFT_ALONE, PLAIN, DecodingMethod

Answers = Mapping[str, Sequence[Sequence[Kept]]]
"""By the name of the system: for every prompt, its repeats."""

# How far two logits may be apart for rounding to have decided between them, as a share of the
# larger: 8 units in the last place. In float32 every system must write the same.
_NEAR_TIE = {"float32": 0.0, "float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}


@dataclass(frozen=True)
class Difference:
    """Where an answer first parts from plain decoding's.

    Attributes:
        prompt, token: their numbers, from 0.
        gap: how far the target's logits of the two tokens are apart; None where none was found.
        near_tie: whether that is within the rounding of the precision.
    """

    prompt: int
    token: int
    gap: float | None
    near_tie: bool


@dataclass(frozen=True, eq=False)
class Measured:
    """A task's answers, and what is known of those who gave them.

    Attributes:
        bench: its models are used up.
        answers: of every system, and of the draft model alone.
        differences: from plain decoding, by the name of the system; of mlx-lm where it is greedy.
    """

    bench: Bench
    answers: Answers
    differences: Mapping[str, Sequence[Difference]]


def measure(plan: Plan, task: TaskPlan, *, fresh: bool) -> Measured:
    """Answer what is not answered yet, each system in its turn."""
    bench = load_bench(plan, task)
    stores = open_stores(plan, task, fresh=fresh)
    rounds = [(repeat, prompt) for repeat in range(plan.repeats) for prompt in bench.prompts]
    keys = [[repeat, *prompt] for repeat, prompt in rounds]
    code = code_version()
    for name, store in stores.items():
        tell_kept(f"{task.task.name}, {name}", [store[key] for key in keys if key in store], code)
        if any(key not in store for key in keys):
            for _ in range(plan.warm_up):
                bench.answerers[name](bench.prompts[0])
    progress = tqdm(rounds, desc=task.task.name, unit="prompt", disable=None)
    for (repeat, prompt), name in in_turns(progress, list(stores)):
        if [repeat, *prompt] not in stores[name]:
            answer = answer_once(bench.answerers[name], prompt)
            kept = Kept(answer, text_of(bench.tokenizer, answer.tokens), code)
            stores[name].keep([repeat, *prompt], kept)
    answers = {
        name: [[store[[r, *prompt]] for r in range(plan.repeats)] for prompt in bench.prompts]
        for name, store in stores.items()
    }
    return Measured(bench, answers, find_differences(plan, bench, answers))


def answer_once(answer: Answerer, prompt: list[int]) -> Answer:
    """An answer, with the most memory that it took on top of what was in use before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = answer(prompt)
    return replace(found, peak_bytes=max(0, mx.get_peak_memory() - before))


def open_stores(plan: Plan, task: TaskPlan, *, fresh: bool) -> dict[str, AnswerStore]:
    """Where each system's answers are kept."""
    stores = {
        system.name: AnswerStore(
            plan.out, f"compare-{task.task.name}", settings_of(plan, task, system)
        )
        for system in task.timed
    }
    for store in stores.values():
        if fresh:
            store.forget()
    return stores


def settings_of(plan: Plan, task: TaskPlan, system: DecodingMethod) -> dict[str, Any]:
    """Everything that an answer and its time depend on, beside the prompt's tokens."""
    kind = "draft-model" if system.kind == DRAFT_ALONE else system.kind
    checkpoint = task.checkpoints.get(kind)
    return {
        "format": 1,
        "weights": weights_version(plan.weights, task.adapter),
        "checkpoint": files_version(checkpoint) if checkpoint else None,
        "system": system.name,
        # Speeds compare where systems took turns: other systems beside it are another run.
        "systems": [other.name for other in task.timed],
        "decoding": asdict(system.config) if system.config else MLX_LM,
        "sampling": asdict(plan.sampling),
        "dtype": plan.dtype,
        "max_tokens": task.max_tokens,
        "machine": {**timed_on(), "power": power_source()},
    }


def find_differences(plan: Plan, bench: Bench, answers: Answers) -> dict[str, list[Difference]]:
    """Where each system's answers part from plain decoding's, in any repeat."""
    expected = [repeats[0].answer.tokens for repeats in answers[PLAIN]]
    found: dict[str, list[Difference]] = {}
    for name, prompts in answers.items():
        # The draft model is another model, and mlx-lm draws with noise of its own.
        if name == DRAFT_ALONE or (name == MLX_LM and plan.sampling.temp):
            continue
        found[name] = []
        for index, repeats in enumerate(prompts):
            tokens = [kept.answer.tokens for kept in repeats]
            other = next((row for row in tokens if row != expected[index]), None)
            if other is not None:
                found[name].append(difference(plan, bench, index, expected[index], other))
    return found


def difference(
    plan: Plan, bench: Bench, index: int, plain: list[int], other: list[int]
) -> Difference:
    """Where two answers to a prompt part, and by how little the target chose there."""
    pairs = zip(plain, other, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    if plan.sampling.temp or place == min(len(plain), len(other)):
        return Difference(index, place, None, near_tie=False)
    text = bench.prompts[index] + plain[:place]
    logits = bench.model(mx.array([text]))[0, -1].astype(mx.float32)
    ours, theirs = to_float(logits[plain[place]]), to_float(logits[other[place]])
    gap = abs(ours - theirs)
    limit = _NEAR_TIE[plan.dtype] * max(abs(ours), abs(theirs))
    return Difference(index, place, gap, near_tie=gap <= limit)
