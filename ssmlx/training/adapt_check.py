"""Measures an adapter of `ssmlx.adapt`: decodes held-out prompts with it and without it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import __version__
from ..api import stream_generate
from ..bars import bar, busy
from ..blas import this_machine
from ..errors import require
from ..json_files import json_digest
from ..loading.adapt_runs import is_worth_using
from ..loading.adapter import load_stream_adapter
from ..loading.files import write_whole
from ..loading.folders import FIGURES_FILE
from ..loading.load import load
from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig
from .adapt_run import AdaptOptions, AdaptPlan, AdaptRun, Amounts, read_round_examples
from .replay import Replay
from .sizing import Rates

_PLAIN = GenerateConfig(decoding="plain", temp=0)
_DRAFTED = GenerateConfig(temp=0)
_LOOKUP = GenerateConfig(drafter="prompt-lookup", temp=0)
# how each held-out prompt is answered at the end
_CHECKED = {"plain": _PLAIN, "drafted": _DRAFTED, "lookup": _LOOKUP}
_WARM_TOKENS = 8


def estimate_check_seconds(
    rates: Rates,
    amounts: Amounts,
    prompt_tokens: int,  # of a usual prompt
) -> float:
    """Seconds of the check: every prompt is answered three times, each time at plain speed."""
    answer = rates.prompt_seconds_per_token * prompt_tokens
    answer += rates.call_seconds * amounts.checked_tokens
    return len(_CHECKED) * amounts.checked * answer


class MeasuredFigures(TypedDict):
    """What an adapter brings on held-out prompts, as its figures.json has it.

    Tokens per call do not count the prompts' calls.
    """

    speed_up: float  # of the adapter over plain decoding
    text_speed_up: float  # of prompt lookup over plain decoding
    machine: str
    tokens_per_call: Mapping[int, float]  # of the adapter, by nodes of the tree, from its settings
    untrained_tokens_per_call: float
    lookup_tokens_per_call: float


def measure_adapter(
    run: AdaptRun,
    held_out: Sequence[dict[str, Any]],
    untrained_tokens_per_call: float,  # along all `held_out`, prompts' calls counted
    dtype: str,  # as `load` takes it
) -> MeasuredFigures:
    """Decode the prompts in every way, in alternating order, after a few untimed tokens."""
    options = run.options
    folder = options.adapter_folder
    found = "no training step made better guesses than untrained streams"
    require(folder.exists(), found, expected="more tokens per call", do="give more --hours")
    with busy("loading"):
        model, tokenizer = load(str(options.path), adapter=folder, dtype=dtype)
    amounts = options.amounts
    seconds = dict.fromkeys(_CHECKED, 0.0)
    num_tokens = 0
    num_same = 0
    lookup_calls = 0
    checked = held_out[: amounts.checked]
    for how in _CHECKED.values():  # warm up: no way pays for first-time work
        time_answer(model, tokenizer, checked[0]["prompt_tokens"], how, _WARM_TOKENS)
    for number, row in enumerate(bar(checked, "checking")):
        turns = [*_CHECKED.items()][:: 1 if number % 2 else -1]
        found_now = {
            name: time_answer(model, tokenizer, row["prompt_tokens"], how, amounts.checked_tokens)
            for name, how in turns
        }
        for name, one in found_now.items():
            seconds[name] += one.seconds
        plain = found_now["plain"].tokens
        num_tokens += len(plain)
        num_same += plain == found_now["drafted"].tokens
        lookup_calls += found_now["lookup"].target_calls
    curve = load_stream_adapter(folder).config.tokens_per_call or {}
    by_lookup = Replay(num_tokens, lookup_calls).without_prompts(len(checked)).tokens_per_call
    held = sum(len(row["completion_tokens"]) for row in held_out)
    untrained_calls = round(held / untrained_tokens_per_call)
    untrained = Replay(held, untrained_calls).without_prompts(len(held_out)).tokens_per_call
    speed_up = seconds["plain"] / seconds["drafted"]
    text_speed_up = seconds["plain"] / seconds["lookup"]
    run.say(
        f"{options.out.name}: {curve.get(6, 0.0):.2f} tokens per call with 6 nodes on held-out "
        f"answers (untrained {untrained:.2f}, prompt lookup {by_lookup:.2f}); "
        f"{speed_up:.2f} times plain decoding's speed ({text_speed_up:.2f} by prompt lookup alone) "
        f"on {len(checked)} prompts, {num_same} of {len(checked)} answers the same, token for token"
    )
    return {
        "speed_up": round(speed_up, 3),
        "text_speed_up": round(text_speed_up, 3),
        "machine": ", ".join(this_machine()),
        "tokens_per_call": curve,
        "untrained_tokens_per_call": round(untrained, 3),
        "lookup_tokens_per_call": round(by_lookup, 3),
    }


@dataclass(frozen=True)
class TimedAnswer:
    tokens: list[int]
    target_calls: int  # the prompt's counted as one
    seconds: float  # the whole answer's


def time_answer(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    config: GenerateConfig,
    max_tokens: int,
) -> TimedAnswer:
    config = replace(config, max_tokens=max_tokens)
    started = time.perf_counter()
    segments = list(stream_generate(model, tokenizer, prompt, config))
    seconds = time.perf_counter() - started
    tokens = [token for one in segments for token in one.tokens]
    return TimedAnswer(tokens, segments[-1].target_calls, seconds)


def write_figures_json(
    run: AdaptRun,
    plan: AdaptPlan,
    measured: Mapping[str, Any],
    base_bits: int | None,  # of quantized weights
    # of all rounds, as `read_round_logs` returns them
    log_entries: Sequence[Mapping[str, Any]],
) -> None:
    """Write figures.json into the adapter's folder; `ssmlx.upload` makes the card from it."""
    options = run.options
    rows = read_round_examples(options, len(plan.rounds) - 1, "train")
    # A revision is known only in the Hub's cache.
    is_snapshot = options.path.parent.name == "snapshots"
    figures = {
        "rounds": len(plan.rounds),
        "base": {
            "model": options.model,
            "revision": options.path.name if is_snapshot else None,
            "bits": base_bits,
            "weights": plan.settings["weights"],
        },
        "recipe": {
            "command": " ".join([f"python -m {run.prog}", *sys.argv[1:]]),
            "version": __version__,
            "steps": log_entries[-1]["step"],
            "seconds": round(plan.spent),
            "train": plan.train.to_dict(),
        },
        "data": {
            # A LoRA, which is part of the adapter, may contain private data.
            "private": bool(options.data) or options.adapter is not None,
            "answers": len(rows),
            "tokens": sum(len(row["completion_tokens"]) for row in rows),
            "sources": Counter(row["source"] for row in rows),
            "sha256": json_digest(rows),
        },
        "figures": {
            "prompts": options.amounts.held_out,
            "max_tokens": options.amounts.answer_tokens,
            "plain_tokens_per_call": 1.0,
            **measured,
        },
    }
    write_whole(options.adapter_folder / FIGURES_FILE, json.dumps(figures, indent=1).encode())


def verdict_line(options: AdaptOptions, measured: Mapping[str, Any]) -> str:
    """What to do with the adapter; one made with a LoRA is found only if it is named."""
    if is_worth_using(measured):
        named = "" if options.adapter is None else f" --adapter {options.out.name}"
        return f"use it: python -m ssmlx.chat --model {options.model}{named}"
    hours = options.hours
    return (
        f"it brings nothing on this machine, so nothing drafts with it here unless it is named; "
        f"{hours:g} more hours may change that (--hours {2 * hours:g})"
    )
