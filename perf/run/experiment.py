"""An experiment: systems answer the same prompts on the same weights, in turns.

    what is asked (tasks) x who answers (target) -> answers (store) -> figures (statistics)

What a command asks, and how it shows the figures, is in the command's own folder.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import tqdm

from ssmlx.decoding.drafter import Drafter
from ssmlx.drafters.registry import settings_in
from ssmlx.generation.divergence import compare_logits, first_difference
from ssmlx.generation.segments import check_prompt
from ssmlx.loading.identity import folder_digest
from ssmlx.prompts import encode_prompt
from ssmlx.settings import field_of_drafter_settings

from .environment import describe_machine, machine_load_text, timing_environment
from .price import Prices, cheapest_system, price_answers, price_figures
from .results import (
    AnswerStore,
    Kept,
    file_stats_digest,
    sources_digest,
)
from .statistics import Estimate, mean, median, medians_over_repeats, ratio, ratio_of_median_rates
from .target import (
    DRAFT_ALONE,
    DRAFT_MODEL,
    MLX_LM,
    PLAIN,
    STREAMS,
    System,
    Target,
    Weights,
)
from .tasks import Example, Task, leave_out_middle, mean_scores
from .timing import rotate_turns

KeptAnswers = Sequence[Sequence[Kept]]  # one system's answers: for every prompt, its repeats
AnswersBySystem = Mapping[str, KeptAnswers]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Systems that answer the same prompts on the same weights, in turns."""

    name: str  # begins the names of the experiment's files
    # weights and systems: the target and what drafts for it; who answers
    weights: Weights
    systems: Sequence[System]
    # examples and data: the prompts, and their name
    examples: Sequence[Example]
    task: Task | None = None  # how answers are judged; None if they are only timed or compared
    data: str = ""
    # why a system does not take part, by its name
    left_out: Mapping[str, str] = field(default_factory=dict)
    repeats: int = 1
    warm_up: int = 1  # answers of each system before the first that counts
    out: Path | None = None  # where `measure` keeps answers as they come
    fresh: bool = False  # whether answers of an earlier run are discarded

    @property
    def fixed_trees(self) -> list[str]:
        """Names of the systems that draft one fixed tree of streams at every call."""
        return [
            one.name for one in self.systems if one.kind == STREAMS and not one.config.is_controlled
        ]

    def load_target_and_prompts(self) -> tuple[Target, list[list[int]]]:
        """Load everything that the systems draft with, which checks that the experiment can run."""
        target = Target(self.weights)
        adapter = self.weights.adapter
        template = adapter.config.prompt_template if adapter else None
        plain = target.plain
        tokenizer = target.tokenizer
        prompts = [encode_prompt(one.asked, plain, tokenizer, template) for one in self.examples]
        if self.task and self.task.max_prompt_tokens:
            prompts = [leave_out_middle(one, self.task.max_prompt_tokens) for one in prompts]
        for prompt in prompts:
            check_prompt(plain, prompt)
        for system in self.systems:
            target.make_new_drafters(system)
        return target, prompts

    def measure(self) -> Measured:
        """Answer all prompts; reuses what an earlier run with the same settings stored in `out`.

        Before the first new answer, each system that lacks some answers the first prompt `warm_up`
        times, which is not kept and teaches nothing.
        """
        mx.clear_cache()
        load = machine_load_text()
        target, prompts = self.load_target_and_prompts()
        systems = {system.name: system for system in self.systems}
        assert self.out is not None
        stores = {
            name: AnswerStore(
                self.out, self.name, self.settings_of_answers(system), fresh=self.fresh
            )
            for name, system in systems.items()
        }
        keys = [[repeat, *prompt] for repeat in range(self.repeats) for prompt in prompts]
        # For a run that continues, the first learned costs are unknown.
        num_costs = {
            name: None
            if any(key in stores[name] for key in keys)
            else target.count_learned_call_costs(system)
            for name, system in systems.items()
        }
        for name, store in stores.items():
            kept = [store[key] for key in keys if key in store]
            if kept:
                said = f"{self.name}, {name}: {len(kept)} answers of an earlier run"
                print(said, file=sys.stderr)
            for _ in range(self.warm_up if len(kept) < len(keys) else 0):
                # The first answer that counts must not have learned from this one.
                config = replace(systems[name].config, deterministic=True)
                target.answer(replace(systems[name], config=config), prompts[0])
        progress = tqdm(keys, desc=self.name, unit="prompt", disable=None)
        for key, name in rotate_turns(progress, list(stores)):
            if key not in stores[name]:
                answer = target.answer(systems[name], key[1:], key[0])
                stores[name].add(key, Kept(answer, target.decode_text(answer.tokens)))
        answers = {
            name: [[store[[r, *prompt]] for r in range(self.repeats)] for prompt in prompts]
            for name, store in stores.items()
        }
        for store in stores.values():
            store.file.close()
        return Measured(self, target, prompts, answers, load, num_costs)

    def settings_of_answers(self, system: System) -> dict[str, Any]:
        """Everything but the prompt that an answer and its time depend on, as JSON values."""
        weights = self.weights
        kind = DRAFT_MODEL if system.kind == DRAFT_ALONE else system.kind
        return {
            # Other code may give other answers.
            "code": sources_digest(),
            "base": file_stats_digest(weights.base),
            "folder": folder_digest(weights.folder),
            "checkpoint": file_stats_digest(weights.checkpoints.get(kind)),
            "dtype": weights.dtype,
            "rounds": weights.rounds,
            "system": system.name,
            # Speeds are comparable if systems took turns: other systems make it another run.
            "systems": [other.name for other in self.systems],
            "kind": system.kind,
            "config": asdict(system.config),
            "costs": str(weights.costs) if system.config.is_controlled else None,
            "machine": timing_environment(),
        }


@dataclass(frozen=True, eq=False)
class Measured:
    """An experiment with all its answers; `load` says how busy the machine was at its start."""

    experiment: Experiment
    target: Target
    prompts: Sequence[list[int]]
    answers: AnswersBySystem
    load: str
    # number of costs that each system knew at the run's start; None if it learns none, or unknown
    num_costs: Mapping[str, int | None] = field(default_factory=dict)

    def answers_of_first_repeat(self, system_name: str) -> list[Kept]:
        return [repeats[0] for repeats in self.answers[system_name]]


def run_result(
    experiment: Experiment,  # the first system's sampling is recorded
    model_name: str,  # as the user gave it
    task_results: Sequence[Any],
) -> dict[str, Any]:
    """The result of a command as JSON values."""
    config = experiment.systems[0].config
    return {
        "machine": describe_machine(),
        "model": model_name,
        "dtype": experiment.weights.dtype,
        "temp": config.temp,
        "top_k": config.top_k,
        "seed": config.seed,
        "repeats": experiment.repeats,
        "warm_up": experiment.warm_up,
        "tasks": list(task_results),
    }


def task_result(
    measured: Measured,  # mlx-lm and plain decoding are among the systems
    **more: Any,  # override figures of the same names
) -> dict[str, Any]:
    """The task's figures as JSON values; the draft model alone has only its seconds per call."""
    experiment = measured.experiment
    weights = measured.experiment.weights
    plain_metrics = _mean_scores_of(experiment, measured.answers_of_first_repeat(PLAIN))
    systems = [one for one in experiment.systems if one.kind != DRAFT_ALONE]
    prices = _answer_prices(measured)
    tree = cheapest_system(prices, experiment.fixed_trees)
    return {
        "task": experiment.task.name if experiment.task else experiment.name,
        "data": experiment.data,
        "prompts": len(measured.answers_of_first_repeat(PLAIN)),
        "max_tokens": experiment.systems[0].config.max_tokens,
        "max_prompt_tokens": experiment.task.max_prompt_tokens if experiment.task else None,
        "adapter": weights.folder.resolve().name if weights.folder else None,
        "scope": weights.scope,
        "target_bytes": measured.target.measure_memory().weights,
        "figures": list(plain_metrics),
        "left_out": dict(experiment.left_out),
        "load": measured.load,
        "draft_call_seconds": _median_seconds_of_later_calls(measured.answers.get(DRAFT_ALONE, ())),
        "best_tree": tree,
        "systems": [
            {
                **_system_row(system, measured, plain_metrics),
                **speedup_figures(system, measured.answers, tree),
                "price": price_figures(system.name, prices, tree),
                "num_costs": measured.num_costs.get(system.name),
            }
            for system in systems
        ],
        "categories": _category_results(measured, systems, prices),
        **more,
    }


def _answer_prices(measured: Measured) -> Prices:
    systems = {one.name: one.kind for one in measured.experiment.systems if one.kind != DRAFT_ALONE}
    answers = {
        name: [[kept.answer for kept in repeats] for repeats in measured.answers[name]]
        for name in systems
    }
    return price_answers(systems, answers)


def _category_results(
    measured: Measured,
    systems: Sequence[System],
    prices: Prices,
) -> list[dict[str, Any]]:
    """Results of each category from its own prompts; the reference tree is chosen for each."""
    of_category: dict[str, list[int]] = {}
    for index, example in enumerate(measured.experiment.examples[: len(measured.prompts)]):
        if example.category:
            of_category.setdefault(example.category, []).append(index)
    found = []
    for category, own in of_category.items():
        answers = {name: [prompts[i] for i in own] for name, prompts in measured.answers.items()}
        own_prices = {name: [prompts[i] for i in own] for name, prompts in prices.items()}
        tree = cheapest_system(own_prices, measured.experiment.fixed_trees)
        rows = [
            {
                "name": system.name,
                "kind": system.kind,
                "tokens_per_call": asdict(_tokens_per_call(answers[system.name])),
                **speedup_figures(system, answers, tree),
                "price": price_figures(system.name, own_prices, tree),
            }
            for system in systems
        ]
        found.append(
            {"category": category, "prompts": len(own), "best_tree": tree, "systems": rows}
        )
    return found


def _tokens_per_call(answers: KeptAnswers) -> Estimate:
    """Tokens per call of the first repeats."""
    first = [repeats[0].answer for repeats in answers]
    return ratio([len(one.tokens) for one in first], [one.target_calls for one in first])


def _mean_scores_of(experiment: Experiment, kept: Sequence[Kept]) -> dict[str, Any]:
    task = experiment.task
    return mean_scores(task, experiment.examples, [one.text for one in kept]) if task else {}


def _system_row(
    system: System,
    measured: Measured,
    plain_metrics: Mapping[str, Any],  # of plain decoding, not computed again for the same tokens
) -> dict[str, Any]:
    """A row: times are medians of repeats; tokens and calls are the first's; peaks are of all."""
    prompts = measured.answers[system.name]
    first = measured.answers_of_first_repeat(system.name)
    plain = measured.answers_of_first_repeat(PLAIN)
    is_shared = all(a.answer.tokens == b.answer.tokens for a, b in zip(first, plain, strict=True))
    differences = find_differences_from_plain(measured, system)
    target = measured.target
    weight_bytes = target.measure_memory(system.kind).weights - target.measure_memory().weights
    tokens = [len(kept.answer.tokens) for kept in first]
    calls = [kept.answer.target_calls for kept in first]
    drafts = [kept.answer.draft_model_calls for kept in first]
    rates = medians_over_repeats(prompts, lambda kept: kept.answer.tokens_per_second)
    return {
        "name": system.name,
        "kind": system.kind,
        "options": _describe_largest_tree(system, target.make_new_drafters(system)),
        "tokens_per_call": asdict(_tokens_per_call(prompts)),
        "target_calls": sum(calls),
        "target_calls_per_answer": asdict(mean(calls)),
        "tokens": sum(tokens),
        "tokens_per_answer": asdict(mean(tokens)),
        "cut_at_max_tokens": sum(count == system.config.max_tokens for count in tokens),
        "draft_calls": sum(drafts),
        "draft_calls_per_answer": asdict(mean(drafts)),
        "latency_seconds": asdict(
            mean(medians_over_repeats(prompts, lambda kept: kept.answer.seconds))
        ),
        "first_token_seconds": asdict(
            mean(medians_over_repeats(prompts, lambda kept: kept.answer.prefill_seconds))
        ),
        "decode_seconds": asdict(
            mean(medians_over_repeats(prompts, lambda kept: kept.answer.decode_seconds))
        ),
        "tokens_per_second": statistics.median(rates),
        "decode_rate": asdict(median(rates)),
        "call_seconds": _median_seconds_of_later_calls(prompts),
        "figures": plain_metrics if is_shared else _mean_scores_of(measured.experiment, first),
        "figures_of": PLAIN if is_shared else system.name,
        "extra_parameters": target.count_added_parameters(system),
        "weight_bytes": weight_bytes,
        "peak_bytes": weight_bytes + max(k.answer.peak_bytes for one in prompts for k in one),
        "differences": differences or [],
        "same_as_plain": None if differences is None else len(prompts) - len(differences),
    }


def _describe_largest_tree(system: System, drafters: Sequence[Drafter]) -> dict[str, Any]:
    """Describe its levels and nodes, and the settings that shape it; empty without drafters."""
    if not drafters:
        return {}
    drafter = drafters[0]  # the first, if several may draft
    config = system.config
    shapes = {name: asdict(config)[name] for name in ("tree", "prune")}
    if config.drafter is not None and (own := settings_in(config, config.drafter)) is not None:
        shapes[field_of_drafter_settings(type(own))] = asdict(own)
    return {"levels": drafter.largest.levels, "nodes": drafter.largest.nodes, **shapes}


def _median_seconds_of_later_calls(answers: KeptAnswers) -> float | None:
    """The median over answers of the mean seconds of a target call after the first."""
    timed = [kept.answer for repeats in answers for kept in repeats]
    times = [a.decode_seconds / (a.target_calls - 1) for a in timed if a.target_calls > 1]
    return statistics.median(times) if times else None


def speedup_figures(
    system: System, answers: AnswersBySystem, best_tree_system: str | None = None
) -> dict[str, Any]:
    """Ratios of decode tokens/s and of whole answers' times ("latency_..."); above 1 is faster.

    A ratio of tokens/s is None if no prompt has answers of two tokens or more by both.
    """
    rates = {
        n: medians_over_repeats(prompts, lambda kept: kept.answer.tokens_per_second)
        for n, prompts in answers.items()
    }
    base, plain, own = (
        medians_over_repeats(answers[n], lambda kept: kept.answer.seconds)
        for n in (MLX_LM, PLAIN, system.name)
    )
    found: dict[str, Any] = {
        "speedup": ratio_of_median_rates(rates[system.name], rates[MLX_LM]),
        "latency_speedup": asdict(ratio(base, own)),
        "over_plain": ratio_of_median_rates(rates[system.name], rates[PLAIN]),
        "latency_over_plain": asdict(ratio(plain, own)),
    }
    if best_tree_system is not None:
        theirs = medians_over_repeats(answers[best_tree_system], lambda kept: kept.answer.seconds)
        found["latency_over_best_tree"] = asdict(ratio(theirs, own))
    if DRAFT_MODEL in rates and system.kind == STREAMS:
        found["speedup_over_draft_model"] = ratio_of_median_rates(
            rates[system.name], rates[DRAFT_MODEL]
        )
    return found


def find_differences_from_plain(measured: Measured, system: System) -> list[dict[str, Any]] | None:
    """Compare the first differing repeat; None for mlx-lm if it samples, with its own noise."""
    if system.kind == MLX_LM and system.config.temp:
        return None
    found = []
    expected = [kept.answer.tokens for kept in measured.answers_of_first_repeat(PLAIN)]
    for index, repeats in enumerate(measured.answers[system.name]):
        tokens = [kept.answer.tokens for kept in repeats]
        other = next((row for row in tokens if row != expected[index]), None)
        if other is not None:
            found.append(describe_first_difference(measured, index, expected[index], other))
    return found


def describe_first_difference(
    measured: Measured,
    prompt_index: int,
    plain: list[int],  # token ids
    other: list[int],  # token ids, not the same
) -> dict[str, Any]:
    """ "token" counts from 0; the logits' "gap" is None if sampled, or if one is only shorter."""
    experiment = measured.experiment
    place = first_difference(plain, other)
    assert place is not None
    found = {"prompt": prompt_index, "token": place, "gap": None, "logit": None, "near_tie": False}
    if experiment.systems[0].config.temp or place == min(len(plain), len(other)):
        return found
    text = mx.array([measured.prompts[prompt_index] + plain[:place]])
    logits = measured.target.mlx_model(text)[0, -1]
    dtype = getattr(mx, experiment.weights.activations)
    one = compare_logits(place, plain[place], other[place], logits, None, dtype)
    return {**found, "gap": one.gap, "logit": one.logit, "near_tie": one.is_near_tie}


def systems_parting_beyond_ties(result: Mapping[str, Any]) -> list[str]:
    """List "task, system" of those that differ from plain decoding by more than rounding."""
    return [
        f"{task['task']}, {row['name']}"
        for task in result["tasks"]
        for row in task["systems"]
        if row["kind"] != MLX_LM and not all(one["near_tie"] for one in row["differences"])
    ]
