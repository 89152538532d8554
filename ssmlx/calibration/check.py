"""Whether calibration told the truth: some ways of decoding, timed on other prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig, TreeConfig
from ..tuning.cost import DraftShape
from .choice import Choice, PricedShape
from .costs import config_of
from .timing import Answer, in_turns, progress, ssmlx_answer

PLAIN, CHOSEN = "plain", "chosen"


def check(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[list[int]],
    choice: Choice,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """Decode `prompts` in several ways, and set what was expected beside what came."""
    shapes = shapes_to_check(choice.chosen, choice.candidates)
    configs = {name: config_of(one.shape, max_tokens=max_tokens) for name, one in shapes.items()}
    configs[PLAIN] = GenerateConfig(decoding="plain", max_tokens=max_tokens)

    def answer(name: str, prompt: list[int]) -> Answer:
        return ssmlx_answer(model, tokenizer, prompt, configs[name])

    return compare(shapes, answer_all(answer, list(configs), prompts))


def shapes_to_check(
    chosen: PricedShape, candidates: Sequence[PricedShape]
) -> dict[str, PricedShape]:
    """The chosen shape, and others that it should beat: the default, a small tree, and the other
    schedule, as far as they are others."""
    shape, streams = chosen.shape, max(one.shape.num_streams for one in candidates)
    schedule = "second-pass" if shape.stream_schedule == "fused" else "fused"
    wanted = {
        "default": DraftShape(tree=TreeConfig(), num_streams=streams),
        "small": DraftShape(tree=TreeConfig(size=4), num_streams=streams),
        "other schedule": replace(shape, stream_schedule=schedule),  # type: ignore[arg-type]
    }
    known = {one.shape: one for one in candidates if one.shape != shape}
    others = {name: known[one] for name, one in wanted.items() if one in known}
    return {CHOSEN: chosen, **others}


def answer_all(
    answer: Callable[[str, list[int]], Answer],
    names: Sequence[str],
    prompts: Sequence[list[int]],
) -> dict[str, list[Answer]]:
    """The answers under every name, in turns, after one each that does not count."""
    for name in names:
        answer(name, prompts[0])
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for prompt, name in progress(in_turns(prompts, names), "held-out answers"):
        answers[name].append(answer(name, prompt))
    return answers


def compare(
    shapes: Mapping[str, PricedShape], answers: Mapping[str, Sequence[Answer]]
) -> list[dict[str, Any]]:
    """Expected beside measured, of each of `shapes` and of plain decoding, as JSON values.

    `expected` and `measured` are tokens/s after the prompt's call, `ratio` the one over the other;
    tokens per call, seconds of a call and the speed-up over plain decoding are told likewise.
    Empty where one has nothing to time: every answer is a single token.
    """
    totals = {name: _totals(own) for name, own in answers.items()}
    if not all(calls and seconds for _, calls, seconds in totals.values()):
        return []
    plain_seconds = shapes[CHOSEN].plain_seconds
    plain_tokens, _, plain_took = totals[PLAIN]
    said = [one.tokens for one in answers[PLAIN]]
    found = []
    for name, (tokens, calls, seconds) in totals.items():
        priced = shapes.get(name)
        per_call = priced.tokens_per_call if priced else 1.0
        call_seconds = priced.step_seconds if priced else plain_seconds
        expected, measured = per_call / call_seconds, tokens / seconds
        found.append(
            {
                "name": name,
                "what": priced.shape.text() if priced else "plain decoding",
                "nodes": priced.shape.num_nodes if priced else 1,
                "expected": expected,
                "measured": measured,
                "ratio": expected / measured,
                "expected_per_call": per_call,
                "per_call": tokens / calls,
                "expected_seconds": call_seconds,
                "seconds": seconds / calls,
                "expected_speedup": expected * plain_seconds,
                "speedup": measured / (plain_tokens / plain_took),
                "same_tokens": [one.tokens for one in answers[name]] == said,
            }
        )
    return found


def _totals(answers: Sequence[Answer]) -> tuple[int, int, float]:
    """Tokens, calls and seconds after each answer's first token, which the prompt's call brings."""
    tokens = sum(len(one.tokens) - 1 for one in answers)
    calls = sum(one.target_calls - 1 for one in answers)
    return tokens, calls, sum(one.decode_seconds for one in answers)
