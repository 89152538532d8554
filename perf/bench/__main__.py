"""Measure costs of calls and speed-ups on this machine, in five minutes and without an argument.

It times calls of the model with 1 to 16 rows, and launches of kernels. Then mlx-lm, plain decoding
and drafting by default answer the same prompts in turns, with the bundled adapters; then the same
after a long context. It prints and saves a report, without your name or paths.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from huggingface_hub.utils import tqdm

from ssmlx.commands.learned_lines import cost_table_rows
from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.generation.learned import learned_of
from ssmlx.loading.files import make_folder
from ssmlx.loading.load import is_quantised
from ssmlx.loading.names import resolve_model
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.settings import DTYPES, GenerateConfig

from ..run.environment import describe_machine, machine_load_text
from ..run.experiment import Experiment, Measured, task_result
from ..run.options import (
    DEFAULT,
    add_model_option,
    add_out_option,
    check_counts,
    read_adapter_with_streams,
)
from ..run.results import Kept, print_and_save
from ..run.target import MLX_LM, PLAIN, STREAMS, System, Target, Weights
from ..run.tasks import TASKS, Example, find_data_file, read_examples
from ..run.timing import TimedAnswer
from .machine import (
    kernel_trials,
    measure_machine,
    weight_bits,
)
from .report import format_text_report

PROG = "perf.bench"
EPILOG = """examples:
  python -m perf.bench
  python -m perf.bench --minutes 2 --dtype float16
  python -m perf.bench --minutes 20 --contexts 64 512 2000 4000

Writes bench.json and .txt into --out. What there is no time for is left out, and the report
says so."""
Now = Callable[[], float]
CONTEXTS = (2000,)
CONTEXT_TOKENS = 24  # about the answers' own length: tokens after their end are hard to guess
MOST_ROUNDS = 12  # for each length of context
SAFETY = 1.3
BAR = "{l_bar}{bar}"


class Part(NamedTuple):
    """An adapter to measure."""

    adapter: str  # a bundled name or a folder
    task: str
    max_tokens: int  # of an answer, at most
    weight: float  # its share of the time
    data: Path | None = None  # None for the data that ships


ROWS_WEIGHT = 0.06
# Long contexts are measured with the last adapter.
PARTS = (Part("chat", "chat", 96, 0.3), Part("e2e", "e2e", 64, 0.25), Part("sql", "sql", 64, 0.25))


def part_deadlines(
    now: float,  # in seconds, on any clock
    seconds: float,
    weights: Mapping[str, float],
) -> dict[str, float]:
    """When each part should end, by weight; later parts get the time that one leaves."""
    ends = accumulate(weights.values())
    whole = sum(weights.values())
    return {name: now + seconds * end / whole for name, end in zip(weights, ends, strict=True)}


class Rounds(NamedTuple):
    """Answers of rounds, in each of which every system answers one prompt."""

    answers: Sequence[Mapping[str, TimedAnswer]]  # by round and by the system's name
    is_cold: bool  # only the first round, which warms up, fitted into the time
    longest_seconds: float  # of a round


def answer_rounds(
    target: Target,
    systems: Sequence[System],
    prompts: Sequence[list[int]],
    deadline: float,  # in seconds, on the clock of `now`
    *,
    label: str,
    now: Now = time.perf_counter,
) -> Rounds:
    """Answer in rounds, with systems in rotating order; a lone first round also counts.

    A round begins only if the longest one so far, the warm-up included, would let it end by the
    deadline.
    """
    longest = 0.0
    answers = list[dict[str, TimedAnswer]]()
    is_cold = True
    began = now()
    shown = tqdm(total=max(1, deadline - began), desc=label, bar_format=BAR, disable=None)
    for turn, prompt in enumerate([prompts[0], *prompts]):
        started = now()
        if turn and started + longest > deadline:
            break
        first = max(0, turn - 1) % len(systems)
        one_round = {
            one.name: target.answer(one, prompt) for one in (*systems[first:], *systems[:first])
        }
        longest = max(longest, now() - started)
        answers = [one_round] if turn < 2 else [*answers, one_round]
        is_cold = not turn
        shown.update(min(now() - began, shown.total) - shown.n)
    shown.close()
    return Rounds(answers, is_cold, longest)


def measure_what_time_allows(
    args: argparse.Namespace,
    parts: Sequence[Part],  # in order; the last one also answers after long contexts
) -> dict[str, Any]:
    """Measure the machine and the first adapter, and others if they should end in time."""
    base = resolve_model(args.model)  # before the clock starts: a download is not measured
    started = time.perf_counter()
    weights = {"rows": ROWS_WEIGHT, **{part.adapter: part.weight for part in parts}}
    # Mostly the time to read the context.
    weights |= {str(length): 0.06 + 7e-5 * length for length in args.contexts}
    ends = part_deadlines(started, 60 * args.minutes, weights)
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "load": machine_load_text(),
        "date": time.strftime("%Y-%m-%d"),
        "model": base.name if Path(args.model).expanduser().exists() else args.model,
        "minutes": args.minutes,
        "answers": [],
    }
    left_out = []
    needed = -inf
    contexts = dict[int, Any].fromkeys(args.contexts)
    for part in parts:
        begun = time.perf_counter()
        if begun + needed > max(ends.values()):
            left_out.append(Path(part.adapter).name)
            continue
        experiment = experiment_of_part(part, base, args.dtype)
        target, prompts = experiment.load_target_and_prompts()
        streams = target.load_drafting_once(STREAMS).model
        loaded = time.perf_counter() - begun
        if not result["answers"]:
            result["weights"] = precision_text(target)
            given = streams, prompts[0], ends["rows"]
            result |= run_on_mlx_thread(partial(measure_machine, *given))
        end = ends[part.adapter]
        label = experiment.name
        rounds = answer_rounds(target, experiment.systems, prompts, end, label=label)
        needed = max(needed, loaded + rounds.longest_seconds)
        result["answers"].append(figures_of_rounds(experiment, target, prompts, rounds))
        result["learned"] = cost_table_rows(learned_of(streams)[0].costs)
        for length in args.contexts if part is parts[-1] else ():
            end = ends[str(length)]
            contexts[length] = measure_after_context(
                experiment, target, prompts, rounds, end, length
            )
        del target, streams
        gc.collect()
        mx.clear_cache()
    left_out += [f"{length} tokens of context" for length, one in contexts.items() if one is None]
    return {
        **result,
        "contexts": [one for one in contexts.values() if one],
        "trials": kernel_trials(),
        "left_out": left_out,
        "seconds": time.perf_counter() - started,
    }


def bench_systems(max_tokens: int) -> list[System]:
    """The systems of the benchmark; all are greedy."""
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens, temp=0)
    default = System(DEFAULT, STREAMS, GenerateConfig(max_tokens=max_tokens, temp=0))
    return [System(MLX_LM, MLX_LM, plain), System(PLAIN, PLAIN, plain), default]


def experiment_of_part(part: Part, base: Path, dtype: str) -> Experiment:
    """Build a part's experiment, reading its examples and adapter, but not the base."""
    task, (folder, adapter) = TASKS[part.task], read_adapter_with_streams(part.adapter)
    return Experiment(
        name=Path(part.adapter).name,
        weights=Weights(base, dtype, draft_head="auto", adapter=adapter, folder=folder),
        systems=bench_systems(part.max_tokens),
        examples=read_examples(find_data_file(task, part.data), task),
        task=task,
    )


def figures_of_rounds(
    experiment: Experiment,
    target: Target,
    prompts: Sequence[list[int]],  # token ids of each round's prompt
    rounds: Rounds,
    **more: Any,  # override figures of the same names
) -> dict[str, Any]:
    """Compute figures as in `task_result`, without scores."""
    answers = {
        system.name: [[Kept(one[system.name], "")] for one in rounds.answers]
        for system in experiment.systems
    }
    measured = Measured(
        replace(experiment, task=None), target, prompts, answers, machine_load_text()
    )
    return task_result(measured, is_cold=rounds.is_cold, **more)


def precision_text(target: Target) -> str:
    """Describe the precision, as `float32`, or `4-bit weights, float16`."""
    dtype = str(target.plain.backbone.dtype).removeprefix("mlx.core.")
    if not is_quantised(target.mlx_model):
        return dtype
    return f"{weight_bits(target.plain)}-bit weights, {dtype}"


def make_context(
    length: int,
    last_prompt: int,  # counted from 0; prompts repeat if there are too few
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> list[int]:
    """Make exactly `length` tokens: earlier prompts and answers, cut at the front; the prompt."""
    text = list(prompts[last_prompt % len(prompts)])
    number = last_prompt
    while len(text) < length:
        number -= 1
        before = number % len(prompts)
        text = [*prompts[before], *answers[before], *text]
    return text[-length:]


def encode_reference(example: Example, target: Target) -> list[int]:
    """Encode the reference answer; empty if none is known."""
    if not example.references:
        return []
    tokenizer = target.tokenizer
    text = tokenizer.encode(example.references[0], add_special_tokens=False)
    return [*text, tokenizer.eos_token_id]


def measure_after_context(
    experiment: Experiment,
    target: Target,
    prompts: Sequence[list[int]],
    rounds_without: Rounds,  # from which the time of a round is estimated
    deadline: float,  # in seconds, on `time.perf_counter`'s clock
    context_tokens: int,
) -> dict[str, Any] | None:
    """Measure after a long context; None if it exceeds the model's, or a round would take too long.

    Each answer has `CONTEXT_TOKENS` tokens, as no token ends it.
    """
    needed = context_tokens + CONTEXT_TOKENS
    limit = target.plain.backbone.context_length or needed
    taken = [answer for one in rounds_without.answers for answer in one.values()]
    growth = max(1.0, context_tokens / len(prompts[0]))
    seconds = sum(one.prefill_seconds * growth + one.decode_seconds for one in taken)
    expected = SAFETY * seconds / len(rounds_without.answers)
    if needed > limit or time.perf_counter() + expected > deadline:
        return None
    answers = [encode_reference(one, target) for one in experiment.examples]
    own = [make_context(context_tokens, number, prompts, answers) for number in range(MOST_ROUNDS)]
    experiment = replace(experiment, systems=bench_systems(CONTEXT_TOKENS))
    with target.without_end_tokens():
        label = f"{context_tokens} tokens of context"
        rounds = answer_rounds(target, experiment.systems, own, deadline, label=label)
    return figures_of_rounds(experiment, target, own, rounds, tokens=context_tokens)


def _measure(args: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if answers in float32 differ from plain decoding's."""
    make_folder(args.out)
    result = measure_what_time_allows(args, PARTS)
    print_and_save(result, args.out / "bench", format_text_report(result))
    differing = [
        task["adapter"]
        for task in result["answers"]
        if any(row["same_as_plain"] < task["prompts"] for row in task["systems"])
    ]
    if differing and result["weights"] == "float32":
        print(f"tokens differ from plain decoding's: {', '.join(differing)}", file=sys.stderr)
        return 1
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse options; `contexts` becomes sorted, without repetitions."""
    parser = make_parser(PROG, f"{__doc__}\n{EPILOG}")
    add_model_option(parser)
    add_options(
        parser,
        ("--minutes", "N", "maximum minutes (default: %(default)g)", 5.0),
        ("--dtype", None, "as of python -m ssmlx.generate (default: %(default)s)", "auto", DTYPES),
        ("--contexts", "N", f"tokens of context (default: {CONTEXTS[0]})", list(CONTEXTS)),
    )
    add_out_option(parser)
    args = parser.parse_args(argv)
    args.contexts = sorted(set(args.contexts))
    check_counts(parser, args, "contexts")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    return args


main = make_main(PROG, parse_args, _measure)


if __name__ == "__main__":
    raise SystemExit(main())
