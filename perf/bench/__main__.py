"""`python -m perf.bench`: what this machine gives, in five minutes and without an argument.

What rows and launches cost; then mlx-lm's own stream_generate, plain decoding, and what is drafted
by default with the bundled adapters answer the same prompts in turns; then behind a long context.
Prints and saves a report to paste, which names nobody.
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

from ssmlx.answers import run as on_mlx_thread
from ssmlx.commands.machine import machine
from ssmlx.commands.options import add_options, make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.generation.learned import cost_table_rows, learned_of
from ssmlx.loading.files import make_folder
from ssmlx.loading.load import is_quantised
from ssmlx.loading.names import resolve_model
from ssmlx.settings import DTYPES, GenerateConfig

from ..run.experiment import Experiment, Measured, task_result
from ..run.options import DEFAULT, adapter_with_streams, add_base, add_out, check_counts
from ..run.results import Kept, machine_load
from ..run.target import MLX_LM, PLAIN, STREAMS, System, Target, Weights
from ..run.tasks import TASKS, Example, data_file, read_examples
from ..run.timing import TimedAnswer
from .machine import machine_result, trials_result, weight_bits
from .report import report

PROG = "perf.bench"
EPILOG = """examples:
  python -m perf.bench
  python -m perf.bench --minutes 2 --dtype float16
  python -m perf.bench --minutes 20 --contexts 64 512 2000 4000

Writes bench.json and .txt into --out. What there is no time for is left out, and the report
says so."""
Now = Callable[[], float]
CONTEXTS = (2000,)
CONTEXT_TOKENS = 24  # about what the answers have: behind its end a text is hard to guess
MOST_ROUNDS = 12  # at each length of context
SAFETY = 1.3
BAR = "{l_bar}{bar}"


class Part(NamedTuple):
    """An adapter to measure, a bundled name or a folder."""

    adapter: str
    task: str
    max_tokens: int
    weight: float  # of its share of the time
    data: Path | None = None


ROWS_WEIGHT = 0.06
# The last adapter is also what contexts are measured with.
PARTS = (Part("chat", "chat", 96, 0.3), Part("e2e", "e2e", 64, 0.25), Part("sql", "sql", 64, 0.25))


def deadlines(now: float, seconds: float, weights: Mapping[str, float]) -> dict[str, float]:
    """When each part should end, by weight and in order, of `seconds` from now: what one leaves,
    later ones get."""
    ends = accumulate(weights.values())
    whole = sum(weights.values())
    return {name: now + seconds * end / whole for name, end in zip(weights, ends, strict=True)}


class Rounds(NamedTuple):
    """What was found in every round that counts.

    Attributes:
        found: in each, an answer of every system.
        is_cold: whether the only one was the first, which warms up.
        seconds: of the longest.
    """

    found: Sequence[Mapping[str, TimedAnswer]]
    is_cold: bool
    seconds: float


def rounds(
    target: Target,
    of: Sequence[System],
    prompts: Sequence[list[int]],
    deadline: float,
    *,
    label: str,
    now: Now = time.perf_counter,
) -> Rounds:
    """An answer of each system to the first prompt, to warm up and to see what it takes; then to
    as many prompts as time allows, in an order that rotates.

    No round is begun that would probably end after the deadline.
    """
    longest = 0.0
    found = list[dict[str, TimedAnswer]]()
    is_cold = True
    began = now()
    shown = tqdm(total=max(1, deadline - began), desc=label, bar_format=BAR, disable=None)
    for turn, prompt in enumerate([prompts[0], *prompts]):
        started = now()
        if turn and started + longest > deadline:
            break
        first = max(0, turn - 1) % len(of)
        one_round = {one.name: target.answer(one, prompt) for one in (*of[first:], *of[:first])}
        longest = max(longest, now() - started)
        found = [one_round] if turn < 2 else [*found, one_round]
        is_cold = not turn
        shown.update(min(now() - began, shown.total) - shown.n)
    shown.close()
    return Rounds(found, is_cold, longest)


def measure(args: argparse.Namespace, parts: Sequence[Part]) -> dict[str, Any]:
    """All measurements: the machine's, each adapter's answers, and the last one's contexts."""
    base = resolve_model(args.model)  # before the clock: a download is no measurement
    started = time.perf_counter()
    weights = {"rows": ROWS_WEIGHT, **{part.adapter: part.weight for part in parts}}
    # Mostly what reading the context takes.
    weights |= {str(length): 0.06 + 7e-5 * length for length in args.contexts}
    ends = deadlines(started, 60 * args.minutes, weights)
    result: dict[str, Any] = {
        "machine": machine(),
        "load": machine_load(),
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
        experiment = experiment_of(part, base, args.dtype)
        target, prompts = experiment.load()
        streams = target.drafting(STREAMS).model
        loaded = time.perf_counter() - begun
        if not result["answers"]:
            result["weights"] = weights_text(target)
            given = streams, prompts[0], ends["rows"]
            result |= on_mlx_thread(partial(machine_result, *given))
        end = ends[part.adapter]
        label = experiment.name
        found = rounds(target, experiment.systems, prompts, end, label=label)
        needed = max(needed, loaded + found.seconds)
        result["answers"].append(figures_of(experiment, target, prompts, found))
        result["learned"] = cost_table_rows(learned_of(streams)[0].costs)
        for length in args.contexts if part is parts[-1] else ():
            end = ends[str(length)]
            contexts[length] = context_result(experiment, target, prompts, found, end, length)
        del target, streams
        gc.collect()
        mx.clear_cache()
    left_out += [f"{length} tokens of context" for length, one in contexts.items() if one is None]
    return {
        **result,
        "contexts": [one for one in contexts.values() if one],
        "trials": trials_result(),
        "left_out": left_out,
        "seconds": time.perf_counter() - started,
    }


def systems(max_tokens: int) -> list[System]:
    """How each answers, greedily."""
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    default = System(DEFAULT, STREAMS, GenerateConfig(max_tokens=max_tokens))
    return [System(MLX_LM, MLX_LM, plain), System(PLAIN, PLAIN, plain), default]


def experiment_of(part: Part, base: Path, dtype: str) -> Experiment:
    """What is asked of an adapter."""
    task, (folder, adapter) = TASKS[part.task], adapter_with_streams(part.adapter)
    return Experiment(
        name=Path(part.adapter).name,
        weights=Weights(base, dtype, draft_head="auto", adapter=adapter, folder=folder),
        systems=systems(part.max_tokens),
        examples=read_examples(data_file(task, part.data), task),
        task=task,
    )


def figures_of(
    experiment: Experiment, target: Target, prompts: Sequence[list[int]], found: Rounds, **more: Any
) -> dict[str, Any]:
    """What rounds of answers come to."""
    answers = {
        system.name: [[Kept(one[system.name], "")] for one in found.found]
        for system in experiment.systems
    }
    measured = Measured(replace(experiment, task=None), target, prompts, answers, machine_load())
    return task_result(measured, is_cold=found.is_cold, **more)


def weights_text(target: Target) -> str:
    """Such as `float32`, or `4-bit weights, float16`."""
    dtype = str(target.plain.backbone.dtype).removeprefix("mlx.core.")
    if not is_quantised(target.mlx_model):
        return dtype
    return f"{weight_bits(target.plain)}-bit weights, {dtype}"


def text_of_length(
    length: int, turn: int, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[int]:
    """`length` tokens that end with a prompt, the one of that number: prompts with their answers
    stand before it, as far as there is room."""
    text = list(prompts[turn % len(prompts)])
    while len(text) < length:
        turn -= 1
        before = turn % len(prompts)
        text = [*prompts[before], *answers[before], *text]
    return text[-length:]


def answer_tokens(example: Example, target: Target) -> list[int]:
    """The first right answer with its end; nothing where none is known."""
    if not example.references:
        return []
    tokenizer = target.tokenizer
    text = tokenizer.encode(example.references[0], add_special_tokens=False)
    return [*text, tokenizer.eos_token_id]


def context_result(
    experiment: Experiment,
    target: Target,
    prompts: Sequence[list[int]],
    before: Rounds,
    deadline: float,
    length: int,
) -> dict[str, Any] | None:
    """Answers behind `length` tokens until the deadline; None where by what `before` took not even
    one round would end in time."""
    limit = target.plain.backbone.context_length or length + CONTEXT_TOKENS
    taken = [answer for one in before.found for answer in one.values()]
    growth = max(1.0, length / len(prompts[0]))
    seconds = sum(one.prefill_seconds * growth + one.decode_seconds for one in taken)
    expected = SAFETY * seconds / len(before.found)
    if length + CONTEXT_TOKENS > limit or time.perf_counter() + expected > deadline:
        return None
    answers = [answer_tokens(one, target) for one in experiment.examples]
    own = [text_of_length(length, turn, prompts, answers) for turn in range(MOST_ROUNDS)]
    experiment = replace(experiment, systems=systems(CONTEXT_TOKENS))
    with target.endless():
        label = f"{length} tokens of context"
        found = rounds(target, experiment.systems, own, deadline, label=label)
    return figures_of(experiment, target, own, found, tokens=length)


def _main(args: argparse.Namespace) -> int:
    make_folder(args.out)
    result = measure(args, PARTS)
    write_result(result, args.out / "bench", report(result))
    differing = [
        task["adapter"]
        for task in result["answers"]
        if any(row["same_as_plain"] < task["prompts"] for row in task["systems"])
    ]
    if differing and result["weights"] == "float32":
        print(f"tokens differ from plain decoding's: {', '.join(differing)}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description.partition(": ")[2], f"{more}\n{EPILOG}")
    add_base(parser)
    add_options(
        parser,
        ("--minutes", "N", "at most (default: %(default)g)", 5.0),
        ("--dtype", None, "as of python -m ssmlx.generate (default: %(default)s)", "auto", DTYPES),
        ("--contexts", "N", f"tokens of context (default: {CONTEXTS[0]})", list(CONTEXTS)),
    )
    add_out(parser)
    args = parser.parse_args(argv)
    args.contexts = sorted(set(args.contexts))
    check_counts(parser, args, "contexts")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
