"""`python -m perf.bench`: what this machine gives, in five minutes and without an argument.

Plain decoding, streaming with the bundled adapters, and mlx-lm's own stream_generate answer the
same prompts in turns; then the first token, decoding and prefill by length of context; memory,
and energy where powermetrics may be run. Prints a report, saves it with a picture, and ends with
a line of JSON fit to paste into a shared table.
"""

import argparse
import gc
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import mlx.core as mx
from huggingface_hub.utils import tqdm

from ssmlx.answers import run as on_mlx_thread
from ssmlx.calibration.timing import TimedAnswer
from ssmlx.commands.machine import machine, output_of
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import publish
from ssmlx.decoding.loop import streaming_decode
from ssmlx.loading.files import make_folder
from ssmlx.loading.load import is_quantised
from ssmlx.loading.names import resolve_model
from ssmlx.model.streams import StreamFusedModel
from ssmlx.plan import make_plan
from ssmlx.settings import DTYPES, GenerateConfig

from ..run.experiment import Experiment, Measured, task_result
from ..run.options import adapter_with_streams, add_base, add_out, check_counts
from ..run.results import Kept, machine_load
from ..run.target import MLX_LM, PLAIN, STREAMS, System, Target, Weights
from ..run.tasks import TASKS, Example, data_file, read_examples
from .report import draw, line, report

PROG = "perf.bench"
EPILOG = """examples:
  python -m perf.bench
  sudo -v && python -m perf.bench        # with energy, on macOS
  python -m perf.bench --minutes 2 --dtype float16
  python -m perf.bench --minutes 20 --contexts 64 512 2000 4000

Writes bench.json, .txt and .png into --out, and adds the line to bench.jsonl there. What there is
no time for is left out, and the report says so."""
STREAMING = "streaming"
Now = Callable[[], float]
Deadlines = Mapping[str, float]
CONTEXTS = (64, 512, 2000)
CONTEXT_TOKENS = 24  # about what the answers have: behind its end a text is hard to guess
MOST_ROUNDS = 12  # at each length of context
SAFETY = 1.3
LAUNCH_STEPS, LAUNCH_ROOM, PAUSE = 16, 4096, 0.02  # steps, tokens of a cache, seconds

# Energy: powermetrics wants root, and says so where it cannot run.
INTERVAL_MS = 250
COMMAND = ("sudo", "-n", "powermetrics", "--samplers", "cpu_power,gpu_power", "-i")
_POWER = re.compile(r"^Combined Power \(CPU \+ GPU \+ ANE\): *([\d.]+) *(m?)W", re.MULTILINE)

Sampler = Callable[[int, IO[str]], "subprocess.Popen[str]"]


class Part(NamedTuple):
    """An adapter to measure, a bundled name or a folder; None asks what ships for the task."""

    adapter: str
    task: str
    max_tokens: int
    weight: float  # of its share of the time
    data: Path | None = None


RESERVED_SECONDS = 8.0  # for the picture
# The first adapter is also what contexts and energy are measured with.
PARTS = (Part("sql", "sql", 64, 0.3), Part("chat", "chat", 96, 0.25))


def deadlines(now: float, seconds: float, weights: Mapping[str, float]) -> dict[str, float]:
    """When each part should end, by weight and in order, of `seconds` from now: what one leaves,
    later ones get."""
    ends, whole = accumulate(weights.values()), sum(weights.values())
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
    longest, found, is_cold = 0.0, list[dict[str, TimedAnswer]](), True
    for turn, prompt in enumerate(tqdm([prompts[0], *prompts], desc=label, disable=None)):
        started = now()
        if turn and started + longest > deadline:
            break
        first = max(0, turn - 1) % len(of)
        one_round = {one.name: target.answer(one, prompt) for one in (*of[first:], *of[:first])}
        longest = max(longest, now() - started)
        found = [one_round] if turn < 2 else [*found, one_round]
        is_cold = not turn
    return Rounds(found, is_cold, longest)


def measure(args: argparse.Namespace, parts: Sequence[Part]) -> dict[str, Any]:
    """All measurements, the first adapter's first."""
    base = resolve_model(args.model)  # before the clock: a download is no measurement
    started = time.perf_counter()
    first, *others = ((part.adapter, part.weight) for part in parts)
    # Mostly what reading the context takes.
    between = [(str(length), 0.06 + 7e-5 * length) for length in args.contexts]
    if unavailable() is None:
        between.append(("energy", 0.08))
    seconds = 60 * args.minutes - RESERVED_SECONDS
    ends = deadlines(started, seconds, dict([first, *between, *others]))
    result: dict[str, Any] = {
        "machine": machine(),
        "load": machine_load(),
        "date": time.strftime("%Y-%m-%d"),
        "model": args.model,
        "minutes": args.minutes,
        "context_tokens": CONTEXT_TOKENS,
        "answers": [],
        "left_out": [],
    }
    for part in parts:
        left = max(ends.values()) - time.perf_counter()
        if result["answers"] and left <= result["part_seconds"]:
            result["left_out"].append(part.adapter)
            continue
        contexts = [] if result["answers"] else args.contexts
        found = measure_part(part, base, args.dtype, ends, contexts)
        result["answers"].append(found.pop("answers"))
        if len(result["answers"]) == 1:
            result |= found
        gc.collect()
        mx.clear_cache()
    return {**result, "seconds": time.perf_counter() - started}


def systems(max_tokens: int) -> list[System]:
    """How each answers, greedily; streaming as by default: where a profile says that drafting does
    not pay, it stops."""
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    streaming = System(STREAMING, STREAMS, GenerateConfig(max_tokens=max_tokens))
    return [System(MLX_LM, MLX_LM, plain), System(PLAIN, PLAIN, plain), streaming]


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


def measure_part(
    part: Part, base: Path, dtype: str, ends: Deadlines, contexts: Sequence[int]
) -> dict[str, Any]:
    """Measure an adapter until its deadline; where there are `contexts`, by those and its energy
    too."""
    started, experiment = time.perf_counter(), experiment_of(part, base, dtype)
    target, prompts = experiment.load()
    load_seconds = time.perf_counter() - started
    found = rounds(target, experiment.systems, prompts, ends[part.adapter], label=experiment.name)
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
    measured = contexts_result(experiment, target, prompts, found, ends, contexts)
    return {
        "answers": answers,
        # What another adapter will take at least; its answers are longer.
        "part_seconds": load_seconds + 2 * found.seconds,
        "weights": weights_text(target),
        "launches": on_mlx_thread(partial(launches_result, streams, prompts[0])),
        "contexts": measured,
        "left_out": [f"{length} tokens of context" for length in contexts[len(measured) :]],
        "energy": energy_result(experiment.systems, target, prompts, ends),
    }


def pausing(seconds: float, tokens: list[int]) -> bool:
    """Asked whether an answer ends, wait; it does not."""
    time.sleep(seconds)
    return False


def launches_result(model: StreamFusedModel, prompt: list[int]) -> dict[str, float]:
    """Seconds and peak bytes of steps, with a pause between the read of each and its successor's
    launch and without; and the bytes of a layer's cache.

    MLX copies a layer's cache where the GPU has not let go of it when the next step is launched:
    then a straight peak is higher by a layer or more, and a straight step takes longer.
    """
    found: dict[str, float] = {}
    for name, pause in [("straight", 0.0), ("paused", PAUSE)] * 2:
        cache, drafter = model.make_cache(), make_plan(model, GenerateConfig()).drafter
        assert drafter is not None
        cache.reserve(tokens=LAUNCH_ROOM)
        steps = streaming_decode(
            model, prompt, cache, drafter=drafter, ends=partial(pausing, pause)
        )
        calls = filter(None, steps)
        for _ in range(LAUNCH_STEPS // 2):
            next(calls)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        for _ in range(LAUNCH_STEPS):
            next(calls)
        seconds = (time.perf_counter() - started) / LAUNCH_STEPS - pause
        found[f"{name}_seconds"] = min(seconds, found.get(f"{name}_seconds", seconds))
        found[f"{name}_peak"] = mx.get_peak_memory() - before
        found["layer"] = cache.nbytes / model.num_layers
    return found


def unavailable() -> str | None:
    """Why there is no energy to be measured here; None where there is.

    Needs a password that was typed not long ago (`sudo -v`), or a rule that asks for none.
    """
    if platform.system() != "Darwin":
        return "not measured: needs macOS"
    said = output_of(*COMMAND, "100", "-n", "1")
    if not said:
        return "not measured: needs sudo"
    return None if watts_of(said) else "not measured: powermetrics names no combined power"


def watts_of(text: str) -> list[float]:
    """The power of CPU, GPU and Neural Engine in each sample of what powermetrics prints."""
    return [float(value) / (1000 if milli else 1) for value, milli in _POWER.findall(text)]


def start_sampler(samples: int, output: IO[str]) -> subprocess.Popen[str]:
    """powermetrics for so many samples: it ends by itself, since root's cannot be stopped."""
    command = [*COMMAND, str(INTERVAL_MS), "-n", str(samples)]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True)


def energy_of(
    answer: Callable[[list[int]], TimedAnswer],
    prompts: Sequence[list[int]],
    seconds: float,
    sampler: Sampler = start_sampler,
) -> dict[str, float] | None:
    """Watts, and joules a token, prompts included, of a warm system that answers prompt after
    prompt while power is sampled; None where no sample can be read."""
    tokens, turn = 0, 0
    # A file: a pipe that nobody empties would stop the sampler.
    with tempfile.TemporaryFile("w+") as output:
        process = sampler(max(1, round(1000 * seconds / INTERVAL_MS)), output)
        started = time.perf_counter()
        while process.poll() is None and time.perf_counter() - started < 3 * seconds:
            tokens += len(answer(prompts[turn % len(prompts)]).tokens)
            turn += 1
        elapsed = time.perf_counter() - started
        output.seek(0)
        watts = watts_of(output.read())
    if not watts or not tokens:
        return None
    return {
        "watts": statistics.mean(watts),
        "joules_per_token": statistics.mean(watts) * elapsed / tokens,
    }


def energy_result(
    of: Sequence[System], target: Target, prompts: Sequence[list[int]], ends: Deadlines
) -> dict[str, Any] | str:
    """The energy of each system until its deadline; or why there is none."""
    why = unavailable()
    if why is not None:
        return why
    share = (ends["energy"] - time.perf_counter()) / len(of)
    if share < 1:
        return "not measured: no time left"
    found = {one.name: energy_of(partial(target.answer, one), prompts, share) for one in of}
    return found if all(found.values()) else "not measured: powermetrics could not be read"


def figures_of(
    experiment: Experiment,
    target: Target,
    prompts: Sequence[list[int]],
    found: Rounds,
    **more: Any,
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
    bits = {module.bits for module in target.mlx_model.modules() if hasattr(module, "bits")}
    return f"{'/'.join(map(str, sorted(bits)))}-bit weights, {dtype}"


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


def contexts_result(
    experiment: Experiment,
    target: Target,
    prompts: Sequence[list[int]],
    before: Rounds,
    ends: Deadlines,
    contexts: Sequence[int],
    now: Now = time.perf_counter,
) -> list[dict[str, Any]]:
    """Speeds by length of context, ascending, each length until its deadline.

    Where a first round would not end in time, by what `before` took, that length and the longer
    ones are left out.
    """
    answers = [answer_tokens(one, target) for one in experiment.examples]
    experiment, results = replace(experiment, systems=systems(CONTEXT_TOKENS)), []
    limit = target.plain.backbone.context_length or max(contexts) + CONTEXT_TOKENS
    found, known = before, len(prompts[0])
    for length in contexts:
        expected = expected_seconds(found, length / known)
        if length + CONTEXT_TOKENS > limit or expected > max(ends.values()) - now():
            break
        own = [text_of_length(length, turn, prompts, answers) for turn in range(MOST_ROUNDS)]
        with target.endless():
            found = rounds(
                target, experiment.systems, own, ends[str(length)],
                label=f"{length} tokens of context", now=now,
            )  # fmt: skip
        known = length
        results.append(figures_of(experiment, target, own, found, tokens=length))
    return results


def expected_seconds(found: Rounds, growth: float) -> float:
    """What a round will take at most, where prompts are `growth` times as long."""
    answers = [answer for one in found.found for answer in one.values()]
    seconds = sum(a.prefill_seconds * max(1.0, growth) + a.decode_seconds for a in answers)
    return SAFETY * seconds / len(found.found)


def _main(args: argparse.Namespace) -> int:
    make_folder(args.out)
    result = measure(args, PARTS)
    publish(result, args.out / "bench", report(result), draw)
    with (args.out / "bench.jsonl").open("a", encoding="utf-8") as file:
        file.write(line(result) + "\n")
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
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description.partition(": ")[2], f"{more}\n{EPILOG}")
    parser.add_argument(
        "--minutes", type=float, default=5.0, metavar="N", help="at most (default: %(default)g)"
    )
    add_base(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="as of python -m ssmlx.generate (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N",
        help="tokens of context (default: " + " ".join(map(str, CONTEXTS)) + ")",
    )  # fmt: skip
    add_out(parser)
    args = parser.parse_args(argv)
    args.contexts = sorted(set(args.contexts))
    check_counts(parser, args, "contexts")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
