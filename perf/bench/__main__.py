"""`python -m perf.bench`: what this machine gives, in five minutes and without an argument.

Plain decoding, streaming with the bundled adapters, and mlx-lm's own stream_generate answer the
same prompts in turns; then the first token, decoding and prefill by length of context; memory,
and energy where powermetrics may be run. Prints a report, saves it with a picture, and ends with
a line of JSON fit to paste into a shared table.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ssmlx.commands.options import make_parser, run
from ssmlx.loading.files import make_folder
from ssmlx.loading.load import is_quantised
from ssmlx.loading.names import resolve_model
from ssmlx.settings import DTYPES
from ssmlx.tuning.machine import machine
from ssmlx.tuning.report import publish

from ..run.common import BASE, RESULTS, check_counts
from ..run.tasks import TASKS, data_file
from .clock import Clock
from .energy import measure_energy, unavailable
from .picture import draw
from .report import line, report
from .run import CONTEXT_TOKENS, CONTEXTS, answer_prompts, answers_result, contexts_result
from .target import Target, load_target

PROG = "perf.bench"
EPILOG = """examples:
  python -m perf.bench
  sudo -v && python -m perf.bench        # with energy, on macOS
  python -m perf.bench --minutes 2 --dtype float16
  python -m perf.bench --minutes 20 --contexts 64 512 2000 4000

Writes bench.json, .txt and .png into --out, and adds the line to bench.jsonl there. What there is
no time for is left out, and the report says so."""
RESERVED_SECONDS = 8.0  # for the picture


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


PARTS = (Part("sql", "sql", 64), Part("chat", "chat", 96))
# Shares of the time. The first adapter is also what contexts and energy are measured with.
WEIGHTS = {"sql": 0.3, "energy": 0.08, "chat": 0.25}


def context_weight(length: int) -> float:
    """The share of `length` tokens of context: mostly what reading them takes."""
    return 0.06 + 7e-5 * length


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description.partition(": ")[2], f"{more}\n{EPILOG}")
    parser.add_argument(
        "--minutes", type=float, default=5.0, metavar="N", help="at most (default: %(default)g)"
    )
    parser.add_argument(
        "--model", default=BASE,
        help="the base of the bundled adapters: a folder, a Hub name or an alias "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="as of python -m ssmlx.generate (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N",
        help="tokens of context (default: " + " ".join(map(str, CONTEXTS)) + ")",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    args.contexts = sorted(set(args.contexts))
    check_counts(parser, args, "contexts")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    return args


def weights_text(target: Target) -> str:
    """Such as `float32`, or `4-bit weights, float16`."""
    backbone = target.model.backbone
    dtype = str(backbone.dtype).removeprefix("mlx.core.")
    if not is_quantised(backbone.model):
        return dtype
    bits = {m.bits for m in backbone.model.modules() if hasattr(m, "bits")}
    return f"{'/'.join(map(str, sorted(bits)))}-bit weights, {dtype}"


def measure(args: argparse.Namespace, parts: Sequence[Part]) -> dict[str, Any]:
    """All measurements, the first adapter's first."""
    path = resolve_model(args.model)  # before the clock: a download is no measurement
    started = time.perf_counter()
    clock = Clock(60 * args.minutes - RESERVED_SECONDS, weights_of(parts, args.contexts))
    result: dict[str, Any] = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "model": args.model,
        "minutes": args.minutes,
        "context_tokens": CONTEXT_TOKENS,
        "answers": [],
        "left_out": [],
    }
    for part in parts:
        if result["answers"] and clock.left <= result["part_seconds"]:
            result["left_out"].append(part.adapter)
            continue
        result |= measure_part(part, path, args, clock, result)
        gc.collect()
        mx.clear_cache()
    return {**result, "seconds": time.perf_counter() - started}


def weights_of(parts: Sequence[Part], contexts: Sequence[int]) -> dict[str, float]:
    """Shares of the time, in order: the first adapter, what is measured with it, the others."""
    first, *others = (part.adapter for part in parts)
    between = {str(length): context_weight(length) for length in contexts}
    if unavailable() is None:
        between["energy"] = WEIGHTS["energy"]
    adapters = {name: WEIGHTS.get(name, WEIGHTS["sql"]) for name in (first, *others)}
    return {first: adapters.pop(first), **between, **adapters}


def measure_part(
    part: Part, path: Path, args: argparse.Namespace, clock: Clock, result: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure an adapter; the first one also by context, and its energy."""
    started = clock.now()
    task = TASKS[part.task]
    target = load_target(part.adapter, path, args.dtype, task, data_file(task, part.data))
    load_seconds = clock.now() - started
    found = answer_prompts(target, part.max_tokens, clock.deadline(part.adapter), clock)
    answers = answers_result(target, part.max_tokens, found)
    answers["memory"] = asdict(target.memory)
    added: dict[str, Any] = {"answers": [*result["answers"], answers]}
    if result["answers"]:
        return added
    contexts = contexts_result(target, found, clock, args.contexts)
    missing = [n for n in args.contexts if n not in [one["tokens"] for one in contexts]]
    return {
        **added,
        # What another adapter will take at least; its answers are longer.
        "part_seconds": load_seconds + 2 * found.seconds,
        "weights": weights_text(target),
        "contexts": contexts,
        "left_out": [*result["left_out"], *(f"{n} tokens of context" for n in missing)],
        "energy": energy(target, part.max_tokens, clock),
    }


def energy(target: Target, max_tokens: int, clock: Clock) -> dict[str, Any] | str:
    """Joules a token of each system, or why there are none."""
    why = unavailable()
    if why is not None:
        return why
    seconds = clock.deadline("energy") - clock.now()
    if seconds < 3:
        return "not measured: no time left"
    return measure_energy(target.answerers(max_tokens), target.prompts, seconds)


def add_line(result: Mapping[str, Any], path: Path) -> None:
    """Put the result's line behind those of earlier runs."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line(result) + "\n")


def _main(args: argparse.Namespace) -> int:
    make_folder(args.out)
    result = measure(args, PARTS)
    publish(result, args.out / "bench", report(result), draw)
    add_line(result, args.out / "bench.jsonl")
    differing = [task["adapter"] for task in result["answers"] if not all_same(task)]
    if differing and result["weights"] == "float32":
        print(f"tokens differ from plain decoding's: {', '.join(differing)}", file=sys.stderr)
        return 1
    return 0


def all_same(task: Mapping[str, Any]) -> bool:
    """Whether every system wrote plain decoding's tokens."""
    return all(count == task["prompts"] for count in task["same_tokens"].values())


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
