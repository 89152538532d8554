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
from pathlib import Path
from typing import Any

import mlx.core as mx

from ssmlx.commands.options import make_parser, run
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import resolve_model
from ssmlx.settings import DTYPES
from ssmlx.tuning.machine import machine
from ssmlx.tuning.report import publish

from ..run.options import add_base, add_out, check_counts
from ..run.results import machine_load
from .clock import Clock
from .energy import unavailable
from .measure import CONTEXT_TOKENS, CONTEXTS, Part, measure_part
from .report import draw, line, report

PROG = "perf.bench"
EPILOG = """examples:
  python -m perf.bench
  sudo -v && python -m perf.bench        # with energy, on macOS
  python -m perf.bench --minutes 2 --dtype float16
  python -m perf.bench --minutes 20 --contexts 64 512 2000 4000

Writes bench.json, .txt and .png into --out, and adds the line to bench.jsonl there. What there is
no time for is left out, and the report says so."""
RESERVED_SECONDS = 8.0  # for the picture
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
    return args


def measure(args: argparse.Namespace, parts: Sequence[Part]) -> dict[str, Any]:
    """All measurements, the first adapter's first."""
    base = resolve_model(args.model)  # before the clock: a download is no measurement
    started = time.perf_counter()
    clock = Clock(60 * args.minutes - RESERVED_SECONDS, weights_of(parts, args.contexts))
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
        if result["answers"] and clock.left <= result["part_seconds"]:
            result["left_out"].append(part.adapter)
            continue
        contexts = [] if result["answers"] else args.contexts
        found = measure_part(part, base, args.dtype, clock, contexts)
        result["answers"].append(found.pop("answers"))
        if len(result["answers"]) == 1:
            result |= found
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


def add_line(result: Mapping[str, Any], path: Path) -> None:
    """Put the result's line behind those of earlier runs."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line(result) + "\n")


def _main(args: argparse.Namespace) -> int:
    make_folder(args.out)
    result = measure(args, PARTS)
    publish(result, args.out / "bench", report(result), draw)
    add_line(result, args.out / "bench.jsonl")
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
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
