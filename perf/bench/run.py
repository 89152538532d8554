"""The measurements of `perf.bench`: answers to prompts, and speeds by length of context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ssmlx.calibration.timing import Answer

from ..compare.run import answer_once
from ..run.metrics import Estimate, ratio, ratio_interval, speedup
from .clock import Clock, Rounds, rounds
from .target import SYSTEMS, Answerer, Target, endless, text_of_length

CONTEXTS = (64, 512, 2000)
CONTEXT_TOKENS = 24  # about what the answers have: behind its end a text is hard to guess
MOST_ROUNDS = 12  # at each length of context
SAFETY = 1.3
Found = Mapping[str, Answer]
"""One round: an answer of each system."""


def median_of(values: Sequence[float]) -> Estimate:
    """The median, and its 95 % bootstrap interval."""
    return Estimate(*ratio_interval(list(values), [1.0] * len(values)))


def one_round(answerers: Mapping[str, Answerer], turn: int, prompt: list[int]) -> Found:
    """An answer of each system, in an order that rotates from turn to turn."""
    names, first = list(answerers), turn % len(answerers)
    order = (*names[first:], *names[:first])
    return {name: answer_once(answerers[name], prompt) for name in order}


def answer_prompts(target: Target, max_tokens: int, deadline: float, clock: Clock) -> Rounds[Found]:
    """Round after round over the target's prompts."""
    answerers = target.answerers(max_tokens)
    return rounds(
        target.prompts,
        lambda turn, prompt: one_round(answerers, turn, prompt),
        deadline,
        label=target.name,
        now=clock.now,
    )


def answers_result(target: Target, max_tokens: int, found: Rounds[Found]) -> dict[str, Any]:
    """What the answers to prompts come to."""
    rows = {name: [one[name] for one in found.found] for name in SYSTEMS}
    plain = [answer.tokens for answer in rows["plain"]]
    speeds = {name: [a.tokens_per_second for a in answers] for name, answers in rows.items()}
    return {
        "adapter": target.name,
        "scope": target.scope,
        "drafting": target.drafting,
        "max_tokens": max_tokens,
        "prompts": len(found.found),
        "is_cold": found.is_cold,
        "systems": {name: system_row(target, name, answers) for name, answers in rows.items()},
        "speedup": {name: speedup(speeds[name], speeds["mlx-lm"]) for name in SYSTEMS[1:]},
        "same_tokens": {
            name: sum(a.tokens == b for a, b in zip(answers, plain, strict=True))
            for name, answers in rows.items()
        },
    }


def system_row(target: Target, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """A system's figures: medians over prompts, and the most memory that any of them took."""
    tokens, calls = [len(a.tokens) for a in answers], [a.target_calls for a in answers]
    # An answer of one token has nothing to time after its first.
    speeds = [a.tokens_per_second for a in answers if a.tokens_per_second] or [0.0]
    return {
        "tokens_per_second": asdict(median_of(speeds)),
        "first_token_seconds": asdict(median_of([a.prefill_seconds for a in answers])),
        "tokens_per_call": asdict(ratio(tokens, calls)),
        "peak_bytes": target.weight_bytes(name) + max(a.peak_bytes for a in answers),
        "weight_bytes": target.weight_bytes(name),
    }


def contexts_result(
    target: Target, before: Rounds[Found], clock: Clock, contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """Speeds by length of context, each length until its deadline.

    Where a first round would not end in time, that length and the longer ones are left out.

    Args:
        target: what decodes.
        before: answers to prompts, which tell what to expect.
        clock: says how much time there is.
        contexts: tokens, ascending.
    """
    answerers, results = target.answerers(CONTEXT_TOKENS), []
    limit = target.model.backbone.context_length or max(contexts) + CONTEXT_TOKENS
    found, known = before, len(target.prompts[0])
    for length in contexts:
        expected = expected_seconds(found, length / known)
        if length + CONTEXT_TOKENS > limit or expected > clock.left:
            break
        texts = [text_of_length(target, length, turn) for turn in range(MOST_ROUNDS)]
        with endless(target):
            found = rounds(
                texts,
                lambda turn, prompt: one_round(answerers, turn, prompt),
                clock.deadline(str(length)),
                label=f"{length} tokens of context",
                now=clock.now,
            )
        known = length
        results.append(context_result(length, found))
    return results


def expected_seconds(found: Rounds[Found], growth: float) -> float:
    """What a round will take at most, where prompts are `growth` times as long."""
    answers = [answer for one in found.found for answer in one.values()]
    seconds = sum(a.prefill_seconds * max(1.0, growth) + a.decode_seconds for a in answers)
    return SAFETY * seconds / len(found.found)


def context_result(length: int, found: Rounds[Found]) -> dict[str, Any]:
    """A length's figures: medians over rounds."""
    systems = {}
    for name in SYSTEMS:
        answers = [one[name] for one in found.found]
        calls = sum(a.target_calls - 1 for a in answers)
        systems[name] = {
            "prefill_tokens_per_second": asdict(
                median_of([length / a.prefill_seconds for a in answers])
            ),
            "tokens_per_second": asdict(median_of([a.tokens_per_second for a in answers])),
            "tokens_per_call": sum(len(a.tokens) - 1 for a in answers) / max(1, calls),
            "call_seconds": median(a.decode_seconds / max(1, a.target_calls - 1) for a in answers),
        }
    return {
        "tokens": length,
        "rounds": len(found.found),
        "is_cold": found.is_cold,
        "systems": systems,
    }
