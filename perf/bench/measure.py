"""The measurements of `perf.bench`: answers to prompts, and speeds by length of context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ssmlx.calibration.timing import Answer
from ssmlx.loading.load import is_quantised
from ssmlx.loading.names import resolve_adapter
from ssmlx.plan import make_plan
from ssmlx.settings import GenerateConfig

from ..run.experiment import Experiment, Measured
from ..run.figures import task_result
from ..run.results import machine_load
from ..run.sample import adapter_with_streams
from ..run.store import Kept
from ..run.target import MLX_LM, PLAIN, STREAMS, System, Target, Weights
from ..run.tasks import TASKS, Example, data_file, read_examples
from .clock import Clock, Rounds, rounds
from .energy import measure_energy

STREAMING = "streaming"
CONTEXTS = (64, 512, 2000)
CONTEXT_TOKENS = 24  # about what the answers have: behind its end a text is hard to guess
MOST_ROUNDS = 12  # at each length of context
SAFETY = 1.3
Found = dict[str, Answer]
"""One round: an answer of each system."""


@dataclass(frozen=True)
class Part:
    """An adapter to measure.

    Attributes:
        adapter: a bundled name, or a folder.
        task: one of `TASKS`.
        max_tokens: longest answer.
        data: what to ask; None for what ships for the task.
    """

    adapter: str
    task: str
    max_tokens: int
    data: Path | None = None


def systems(max_tokens: int) -> list[System]:
    """How each answers, greedily; streaming as by default: where a profile says that drafting does
    not pay, it stops."""
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    streaming = System(STREAMING, STREAMS, GenerateConfig(max_tokens=max_tokens))
    return [System(MLX_LM, MLX_LM, plain), System(PLAIN, PLAIN, plain), streaming]


def experiment_of(part: Part, base: Path, dtype: str) -> Experiment:
    """What is asked of an adapter.

    Raises:
        InputError: something is missing or broken.
    """
    folder, task = resolve_adapter(part.adapter), TASKS[part.task]
    assert folder is not None
    adapter = adapter_with_streams(folder)
    return Experiment(
        name=Path(part.adapter).name,
        weights=Weights(base, dtype, draft_head="auto", adapter=adapter, folder=folder),
        systems=systems(part.max_tokens),
        examples=read_examples(data_file(task, part.data), task),
        task=task,
    )


def measure_part(
    part: Part, base: Path, dtype: str, clock: Clock, contexts: Sequence[int]
) -> dict[str, Any]:
    """Measure an adapter until its deadline; where there are `contexts`, by those and its energy
    too."""
    started, experiment = clock.now(), experiment_of(part, base, dtype)
    target, prompts = experiment.load()
    load_seconds = clock.now() - started
    found = rounds(
        prompts, round_of(target, experiment.systems), clock.deadline(part.adapter),
        label=experiment.name, now=clock.now,
    )  # fmt: skip
    streams = target.drafting(STREAMS).model
    drafter = make_plan(streams, GenerateConfig(decoding="streaming")).drafter
    assert drafter is not None
    answers = figures_of(
        experiment, target, prompts, found,
        drafting=f"trees of {drafter.max_nodes} nodes, {drafter.num_levels} levels",
        memory=asdict(target.memory(STREAMS)),
    )  # fmt: skip
    if not contexts:
        return {"answers": answers}
    texts = Texts(prompts, [answer_tokens(one, target) for one in experiment.examples])
    measured = contexts_result(experiment, target, texts, found, clock, contexts)
    answerers = {one.name: partial(target.answer, one) for one in experiment.systems}
    return {
        "answers": answers,
        # What another adapter will take at least; its answers are longer.
        "part_seconds": load_seconds + 2 * found.seconds,
        "weights": weights_text(target),
        "contexts": measured,
        "left_out": [f"{length} tokens of context" for length in contexts[len(measured) :]],
        "energy": measure_energy(answerers, prompts, clock),
    }


def round_of(target: Target, of: Sequence[System]) -> Callable[[int, list[int]], Found]:
    """Told a turn and a prompt, an answer of each system, in an order that rotates."""

    def one_round(turn: int, prompt: list[int]) -> Found:
        first = turn % len(of)
        return {one.name: target.answer(one, prompt) for one in (*of[first:], *of[:first])}

    return one_round


def figures_of(
    experiment: Experiment,
    target: Target,
    prompts: Sequence[list[int]],
    found: Rounds[Found],
    **more: Any,
) -> dict[str, Any]:
    """What rounds of answers come to."""
    answers = {
        system.name: [[Kept(one[system.name], "", "")] for one in found.found]
        for system in experiment.systems
    }
    measured = Measured(replace(experiment, task=None), target, prompts, answers, machine_load())
    return task_result(measured, is_cold=found.is_cold, **more)


def weights_text(target: Target) -> str:
    """Such as `float32`, or `4-bit weights, float16`."""
    dtype = str(target.plain.backbone.dtype).removeprefix("mlx.core.")
    if not is_quantised(target.mlx_model):
        return dtype
    bits = {module.bits for module in target.mlx_model.modules() if hasattr(module, "bits")}
    return f"{'/'.join(map(str, sorted(bits)))}-bit weights, {dtype}"


@dataclass(frozen=True)
class Texts:
    """Prompts, and a right answer to each with its end; nothing where none is known."""

    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]

    def of_length(self, length: int, turn: int) -> list[int]:
        """`length` tokens that end with a prompt, the one of that number: prompts with their
        answers stand before it, as far as there is room."""
        text = list(self.prompts[turn % len(self.prompts)])
        while len(text) < length:
            turn -= 1
            before = turn % len(self.prompts)
            text = [*self.prompts[before], *self.answers[before], *text]
        return text[-length:]


def answer_tokens(example: Example, target: Target) -> list[int]:
    """The first right answer with its end; nothing where none is known."""
    if not example.references:
        return []
    tokenizer = target.tokenizer
    text = tokenizer.encode(example.references[0], add_special_tokens=False)
    return [*text, tokenizer.eos_token_id]


def contexts_result(
    experiment: Experiment,
    target: Target,
    texts: Texts,
    before: Rounds[Found],
    clock: Clock,
    contexts: Sequence[int],
) -> list[dict[str, Any]]:
    """Speeds by length of context, each length until its deadline.

    Where a first round would not end in time, that length and the longer ones are left out.

    Args:
        experiment, target: who decodes.
        texts: what contexts are made of.
        before: answers to prompts, which tell what to expect.
        clock: says how much time there is.
        contexts: tokens, ascending.
    """
    experiment, results = replace(experiment, systems=systems(CONTEXT_TOKENS)), []
    limit = target.plain.backbone.context_length or max(contexts) + CONTEXT_TOKENS
    found, known = before, len(texts.prompts[0])
    for length in contexts:
        expected = expected_seconds(found, length / known)
        if length + CONTEXT_TOKENS > limit or expected > clock.left:
            break
        own = [texts.of_length(length, turn) for turn in range(MOST_ROUNDS)]
        with target.endless():
            found = rounds(
                own, round_of(target, experiment.systems), clock.deadline(str(length)),
                label=f"{length} tokens of context", now=clock.now,
            )  # fmt: skip
        known = length
        results.append(figures_of(experiment, target, own, found, tokens=length))
    return results


def expected_seconds(found: Rounds[Found], growth: float) -> float:
    """What a round will take at most, where prompts are `growth` times as long."""
    answers = [answer for one in found.found for answer in one.values()]
    seconds = sum(a.prefill_seconds * max(1.0, growth) + a.decode_seconds for a in answers)
    return SAFETY * seconds / len(found.found)
