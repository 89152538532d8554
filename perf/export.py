"""Compare exported models with MLX: are their tokens plain decoding's, and how fast are they?

A package of Core AI runs on Linux too, one of Core ML on a Mac alone, with every choice of compute
units in turn, and with the devices that Core ML would run each operation of "decode" on (without a
Mac, the project's tests execute such packages in numpy). The tokens are compared with MLX's plain
decoding; in float32 they must be equal, or the exit code is 1. In float16, and with compressed
weights, the share of equal answers is told, and by how little the first different token won. The
target calls are compared with MLX's speculative decoding on the same tree; they may differ where
two nodes of a draft are equally likely but for rounding.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ssmlx import exported
from ssmlx.commands.machine import describe_machine
from ssmlx.commands.options import add_int_options, add_options, make_main, make_parser
from ssmlx.commands.results import print_and_save_json_and_txt
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

from .run.results import RESULTS, explain_broken_result
from .run.tasks import SQL
from .run.timing import TimedAnswer, ssmlx_answer, time_answer

PROG = "perf.export"


def count_by_device(
    plan: Any, operations: Iterable[Any]
) -> tuple[dict[str, int], dict[str, float]]:
    """Count operations by the device that Core ML prefers for them.

    Operations without a preference are not counted.

    Args:
        plan: a compute plan of coremltools.
        operations: of a function of the package.

    Returns:
        The number of operations by device, such as "CPU" or "NeuralEngine"; and the share of the
        estimated cost by device, empty where no cost is known.
    """
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
    return counts, {device: weight / total for device, weight in weights.items() if total}


def planned_devices(package: Path, compute_units: str) -> tuple[dict[str, int], dict[str, float]]:
    """Return `count_by_device` of a Core ML package's function "decode"; on a Mac alone.

    Args:
        package: the .mlpackage.
        compute_units: those that Core ML may use, such as "cpu-and-ne".
    """
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    unit = getattr(ct.ComputeUnit, compute_units.upper().replace("-", "_"))
    compiled = ct.models.utils.compile_model(str(package))
    plan: Any = MLComputePlan.load_from_path(path=compiled, compute_units=unit)
    return count_by_device(plan, plan.model_structure.program.functions[DECODE].block.operations)


def config_of_same_tree(manifest: exported.Manifest, max_tokens: int) -> GenerateConfig:
    """Return settings with which MLX drafts the same tree, and prunes it alike, as an exported
    package.
    """
    pruned = manifest.num_kept < manifest.num_nodes
    return GenerateConfig(
        decoding="speculative",
        max_tokens=max_tokens,
        num_streams=manifest.num_streams,
        tree=manifest.tree.config,
        prune=PruneConfig(kind="budget", keep=manifest.num_kept) if pruned else PruneConfig(),
    )


def logit_gap(
    model: StreamFusedModel, prompt: Sequence[int], mine: TimedAnswer, theirs: TimedAnswer
) -> float:
    """Return how much higher MLX's logit of its own token is than of the package's, where two
    answers first differ.

    Args:
        model: MLX's.
        prompt: token ids.
        mine: the package's answer.
        theirs: MLX's plain answer.

    Returns:
        The difference of logits at the first different token; 0 where one answer is only shorter.
    """
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return 0.0  # one ends where the other goes on
    text = mx.array([*prompt, *theirs.tokens[:where]])
    logits = model.backbone.logits(model.backbone.append(text, model.make_cache())[:, -1:])[0]
    return to_float(logits[theirs.tokens[where]] - logits[mine.tokens[where]])


def compare_package(
    args: argparse.Namespace, folder: Path, mlx: tuple[StreamFusedModel, Any]
) -> list[dict[str, Any]]:
    """Run an exported folder on the prompts, and compare its answers with MLX's.

    Args:
        args: of the command.
        folder: the export.
        mlx: model and tokenizer.

    Returns:
        A row for each choice of compute units; one for Core AI.
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
            alone = GenerateConfig(decoding="plain", max_tokens=args.max_tokens)
            drafting = config_of_same_tree(manifest, args.max_tokens)
            plain = [ssmlx_answer(*mlx, prompt, alone) for prompt in prompts]
            speculative = [ssmlx_answer(*mlx, prompt, drafting) for prompt in prompts]
        if units is not None:
            list(exported.stream_generate(package, prompts[0], max_tokens=1))  # warm-up
        answers = [
            time_answer(exported.stream_generate(package, prompt, max_tokens=args.max_tokens))
            for prompt in prompts
        ]
        gaps = [
            logit_gap(mlx[0], prompt, mine, theirs)
            for prompt, mine, theirs in zip(prompts, answers, plain, strict=True)
            if mine.tokens != theirs.tokens
        ]
        row = _figures_row(folder, units, manifest, (answers, speculative, plain))
        rows.append({**row, "largest_gap": round(max(gaps), 4) if gaps else None})
    return rows


def _figures_row(
    folder: Path,
    units: str | None,
    manifest: exported.Manifest,
    sides: tuple[Sequence[TimedAnswer], ...],
) -> dict[str, Any]:
    """Return the figures of a package on one runtime, as JSON values.

    Args:
        folder: of the package.
        units: compute units of Core ML; None for Core AI.
        manifest: of the package.
        sides: answers of the package, of MLX with the same tree, and of plain decoding. Figures by
            call and by second are of these three, in order; those by second do not count the
            prompts and first tokens.
    """
    same = [(a, b) for a, b, c in zip(*sides, strict=True) if a.tokens == c.tokens]
    counts = [sum(len(a.tokens) for a in side) for side in sides]
    calls = [sum(a.target_calls for a in side) for side in sides]
    seconds = [sum(a.decode_seconds for a in side) for side in sides]
    is_core_ml = units is not None and sys.platform == "darwin"
    planned = (
        planned_devices(manifest.unchanged_package(folder), units or "") if is_core_ml else ({}, {})
    )
    return {
        "name": folder.name,
        "backend": "Core AI" if units is None else f"Core ML, {units}",
        "profile": manifest.profile,
        "precision": manifest.dtype,
        "compression": manifest.compression,
        "prompts": len(sides[0]),
        "same_tokens": len(same),
        "same_calls": sum(mine.target_calls == theirs.target_calls for mine, theirs in same),
        "tokens_per_call": [round(n / c, 3) for n, c in zip(counts, calls, strict=True)],
        "tokens_per_second": [
            round((n - len(sides[0])) / s, 2) if s else 0.0
            for n, s in zip(counts, seconds, strict=True)
        ],
        "operations": planned[0],
        "cost": planned[1],
    }


def package_figures(folder: Path) -> dict[str, Any]:
    """Return the size in megabytes and the relative RMS error of the weights, from an export's
    report.

    The error is None where the report has none.

    Raises:
        InputError: the report is missing or broken.
    """
    report = read_json(folder / REPORT, "the report of an export")
    with explain_broken_result(folder / REPORT, "ssmlx.export"):
        error = (report["weight_error"] or {}).get("relative_rms")
        return {"megabytes": round(report["package_bytes"] / 1e6, 1), "weight_error": error}


def row_text(row: Mapping[str, Any]) -> str:
    """Format a row as lines of text: figures, rates, and operations by device."""
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
            gap="" if gap is None else f"; parts where logits are {gap:.3f}",
        ),
        "    " + "; ".join(rates),
    ]
    for device, count in sorted(row["operations"].items()):
        share = f" ({row['cost'][device]:.0%} of the cost)" if row["cost"] else ""
        lines.append(f"    {device} {count} operations{share}")
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options of `perf.export`; one folder or several are required.

    Args:
        argv: the words after the command; None for the process's own.
    """
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


def _export(args: argparse.Namespace) -> int:
    """Compare all packages with MLX, print the rows, and save them in perf's folder of results.

    Returns:
        The exit code: 1 if a float32 package's tokens differ from plain decoding's, else 0.
    """
    require(args.count >= 1, f"--count {args.count}", expected="1 or more", do="raise it")
    told = [(folder, package_figures(folder)) for folder in args.folders]
    mlx = load(args.model, adapter=args.adapter, dtype=args.dtype)
    rows = [{**row, **own} for folder, own in told for row in compare_package(args, folder, mlx)]
    make_folder(RESULTS)
    result = {"machine": describe_machine(), "rows": rows}
    print_and_save_json_and_txt(result, RESULTS / "export", "\n".join(map(row_text, rows)))
    exact = all(
        row["same_tokens"] == row["prompts"] for row in rows if row["precision"] == "float32"
    )
    return 0 if exact else 1


main = make_main(PROG, parse_args, _export)

if __name__ == "__main__":
    raise SystemExit(main())
