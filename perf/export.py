"""Compare exported models with MLX: are their tokens plain decoding's, and how fast are they?

A package of Core AI also runs on Linux, one of Core ML only on a Mac, with every choice of compute
units in turn, and with the devices that Core ML would run each operation of "decode" on (without a
Mac, the project's tests execute such packages in numpy). The tokens are compared with MLX's plain
decoding; in float32 they must be equal, or the exit code is 1. In float16, and with compressed
weights, the share of equal answers is reported, and how close the logits of the first different
token are. The target calls are compared with MLX's speculative decoding on the same tree; they may
differ if two nodes of a draft are equally likely except for rounding.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ssmlx import exported
from ssmlx.commands.parser import add_int_options, add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.decoding.loop import prefill
from ssmlx.errors import require
from ssmlx.exported.backends import COMPUTE_UNITS, DECODE
from ssmlx.exported.manifest import REPORT
from ssmlx.json_files import read_json
from ssmlx.loading.files import make_folder
from ssmlx.loading.load import load
from ssmlx.model.shapes import to_float
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import read_prompts
from ssmlx.settings import DTYPES, GenerateConfig, PruneConfig

from .run.environment import describe_machine
from .run.results import RESULTS, explain_broken_result, print_and_save
from .run.tasks import SQL
from .run.timing import TimedAnswer, answer_with_ssmlx, timed_answer_from_responses

PROG = "perf.export"


class DevicePlan(NamedTuple):
    """The devices that Core ML prefers for operations."""

    operations: dict[str, int]  # by device, such as "CPU" or "NeuralEngine"
    cost_shares: dict[str, float]  # of the estimated cost, by device; empty if no cost is known


def count_operations_by_device(
    plan: Any,  # a compute plan of coremltools
    operations: Iterable[Any],
) -> DevicePlan:
    """Count operations by device; those without a preference are left out."""
    counts: dict[str, int] = {}
    weights: dict[str, float] = {}
    for operation in operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is None:
            continue
        name = type(usage.preferred_compute_device).__name__
        device = name.removeprefix("ML").removesuffix("ComputeDevice")
        cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
        counts[device] = counts.get(device, 0) + 1
        weights[device] = weights.get(device, 0.0) + (0.0 if cost is None else cost.weight)
    total = sum(weights.values())
    shares = {device: weight / total for device, weight in weights.items() if total}
    return DevicePlan(counts, shares)


def plan_devices_of_decode(
    package: Path,
    compute_units: str,  # that Core ML may use, such as "cpu-and-ne"
) -> DevicePlan:
    """Ask Core ML for its plan, on a Mac only; waits for the answer."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    unit = getattr(ct.ComputeUnit, compute_units.upper().replace("-", "_"))
    compiled = ct.models.utils.compile_model(str(package))
    plan: Any = MLComputePlan.load_from_path(path=compiled, compute_units=unit)
    return count_operations_by_device(
        plan, plan.model_structure.program.functions[DECODE].block.operations
    )


def config_of_package(manifest: exported.Manifest, max_tokens: int) -> GenerateConfig:
    """Settings with which MLX drafts and prunes the same tree as an exported package."""
    pruned = manifest.num_kept < manifest.num_nodes
    return GenerateConfig(
        decoding="speculative",
        temp=0,
        max_tokens=max_tokens,
        num_streams=manifest.num_streams,
        tree=manifest.tree.config,
        prune=PruneConfig(kind="budget", keep=manifest.num_kept) if pruned else PruneConfig(),
    )


def logit_gap_at_first_difference(
    model: StreamFusedModel, prompt: Sequence[int], package: TimedAnswer, plain: TimedAnswer
) -> float:
    """MLX's logit of its own token minus that of the package's token; 0 if no token differs."""
    pairs = zip(package.tokens, plain.tokens, strict=False)
    where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return 0.0  # one answer is only longer
    *known, last = [*prompt, *plain.tokens[:where]]
    cache = model.make_cache()
    prefill(model, known, cache)
    (logits,) = model.backbone.append(mx.array([last]), cache).logits
    return to_float(logits[plain.tokens[where]] - logits[package.tokens[where]])


class Sides(NamedTuple):
    """Answers to the same prompts: of a package, of MLX on the same tree, of plain decoding."""

    package: Sequence[TimedAnswer]
    same_tree: Sequence[TimedAnswer]
    plain: Sequence[TimedAnswer]


def compare_package(
    args: argparse.Namespace,
    folder: Path,
    mlx: tuple[StreamFusedModel, Any],  # model and tokenizer; answers once for all choices
) -> list[dict[str, Any]]:
    """A row of figures for each choice of compute units; one for Core AI.

    "largest_gap" is the largest `logit_gap_at_first_difference`; None if all answers are plain
    decoding's.
    """
    manifest = exported.Manifest.read(folder)
    choices: Sequence[str | None] = [args.compute_units] if args.compute_units else COMPUTE_UNITS
    prompts: list[list[int]] = []
    plain = []
    speculative = []
    rows = []
    for units in choices if manifest.target == "coreml" else [args.compute_units]:
        package = exported.load(folder, compute_units=units)
        if not prompts:
            asked = read_prompts(args.prompts)[: args.count]
            prompts = [exported.prompt_tokens(package, prompt) for prompt in asked]
            alone = GenerateConfig(decoding="plain", max_tokens=args.max_tokens, temp=0)
            drafting = config_of_package(manifest, args.max_tokens)
            plain = [answer_with_ssmlx(*mlx, prompt, alone) for prompt in prompts]
            speculative = [answer_with_ssmlx(*mlx, prompt, drafting) for prompt in prompts]
        if units is not None:
            list(exported.stream_generate(package, prompts[0], max_tokens=1))  # warm-up
        answers = [
            timed_answer_from_responses(
                exported.stream_generate(package, prompt, max_tokens=args.max_tokens)
            )
            for prompt in prompts
        ]
        gaps = [
            logit_gap_at_first_difference(mlx[0], prompt, own, expected)
            for prompt, own, expected in zip(prompts, answers, plain, strict=True)
            if own.tokens != expected.tokens
        ]
        row = _figures_row(folder, units, manifest, Sides(answers, speculative, plain))
        rows.append({**row, "largest_gap": round(max(gaps), 4) if gaps else None})
    return rows


def _figures_row(
    folder: Path,
    units: str | None,  # compute units of Core ML; None for Core AI
    manifest: exported.Manifest,
    sides: Sides,
) -> dict[str, Any]:
    """Make a row; figures per call and per second are of the three sides, in order.

    "same_calls" counts, among answers with plain decoding's tokens, those with as many target calls
    as MLX's on the same tree.
    """
    same = [
        (own, drafted)
        for own, drafted, plain in zip(*sides, strict=True)
        if own.tokens == plain.tokens
    ]
    counts = [sum(len(a.tokens) for a in side) for side in sides]
    calls = [sum(a.target_calls for a in side) for side in sides]
    seconds = [sum(a.decode_seconds for a in side) for side in sides]
    is_core_ml = units is not None and sys.platform == "darwin"
    planned = DevicePlan({}, {})
    if is_core_ml:
        planned = plan_devices_of_decode(manifest.unchanged_package(folder), units or "")
    return {
        "name": folder.name,
        "backend": "Core AI" if units is None else f"Core ML, {units}",
        "profile": manifest.profile,
        "precision": manifest.dtype,
        "compression": manifest.compression,
        "prompts": len(sides.plain),
        "same_tokens": len(same),
        "same_calls": sum(mine.target_calls == theirs.target_calls for mine, theirs in same),
        "tokens_per_call": [round(n / c, 3) for n, c in zip(counts, calls, strict=True)],
        "tokens_per_second": [
            round((n - len(sides.plain)) / s, 2) if s else 0.0
            for n, s in zip(counts, seconds, strict=True)
        ],
        "operations": planned.operations,
        "cost": planned.cost_shares,
    }


def read_size_and_weight_error(folder: Path) -> dict[str, Any]:
    """Read a package's size and weight error (relative RMS), which is None if not reported."""
    report = read_json(folder / REPORT, "the report of an export")
    with explain_broken_result(folder / REPORT, "ssmlx.export"):
        error = (report["weight_error"] or {}).get("relative_rms")
        return {"megabytes": round(report["package_bytes"] / 1e6, 1), "weight_error": error}


def format_row_as_lines(row: Mapping[str, Any]) -> str:
    error = row["weight_error"]
    gap = row["largest_gap"]
    rates = (
        "{:.2f} {} (MLX {:.2f}, plain {:.2f})".format(row[name][0], unit, *row[name][1:])
        for name, unit in (("tokens_per_call", "a call"), ("tokens_per_second", "tokens/s"))
    )
    lines = [
        "{name:12} {backend:11} {profile:3} {precision:7} {compression:10} {megabytes:6.1f} MB  "
        "weight error {error:8} same tokens {same_tokens}/{prompts}, same calls {same_calls}"
        "{gap}".format(
            **row,
            error="" if error is None else f"{error:.1e}",
            gap="" if gap is None else f"; differs where logits are {gap:.3f} apart",
        ),
        "    " + "; ".join(rates),
    ]
    for device, count in sorted(row["operations"].items()):
        share = f" ({row['cost'][device]:.0%} of the cost)" if row["cost"] else ""
        lines.append(f"    {device} {count} operations{share}")
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="an export")
    add_options(
        parser,
        ("--model", None, "that was exported (default: %(default)s)", "smollm2-135m-q4_1"),
        ("--adapter", None, "that was exported (default: %(default)s)", "sql"),
        (
            "--dtype",
            None,
            "what MLX computes in; auto for its own speed (default: %(default)s)",
            "float32",
            DTYPES,
        ),
        ("--prompts", "FILE", 'objects with a "prompt" or "messages"', SQL.test),
        ("--compute-units", None, "one choice only", str, COMPUTE_UNITS),
    )
    add_int_options(parser, ("count", 20, "prompts"), ("max-tokens", 64, "longest answer"))
    return parser.parse_args(argv)


def _compare(args: argparse.Namespace) -> int:
    """Compare; exit code 1 if a float32 package's tokens differ from plain decoding's."""
    require(args.count >= 1, f"--count {args.count}", expected="1 or more", do="raise it")
    told = [(folder, read_size_and_weight_error(folder)) for folder in args.folders]
    mlx = load(args.model, adapter=args.adapter, dtype=args.dtype)
    rows = [{**row, **own} for folder, own in told for row in compare_package(args, folder, mlx)]
    make_folder(RESULTS)
    result = {"machine": describe_machine(), "rows": rows}
    print_and_save(result, RESULTS / "export", "\n".join(map(format_row_as_lines, rows)))
    exact = all(
        row["same_tokens"] == row["prompts"] for row in rows if row["precision"] == "float32"
    )
    return 0 if exact else 1


main = make_main(PROG, parse_args, _compare)

if __name__ == "__main__":
    raise SystemExit(main())
