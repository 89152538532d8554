"""`python -m perf.export`: does an exported model write what plain decoding writes, and how fast?

A package of Core AI runs on Linux too, one of Core ML on a Mac alone, with every choice of compute
units in turn, and with the devices that Core ML would run each operation of "decode" on (without a
Mac, the project's tests execute such packages in numpy). The tokens are compared with MLX's plain
decoding; in float32 they must be equal, or the exit code is 1. In float16, and with compressed
weights, the share of equal answers is told, and by how little the first different token won. The
target calls are compared with MLX's streaming on the same tree; they may differ where two nodes of
a draft are equally likely but for rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ssmlx import exported
from ssmlx.calibration.timing import Answer, ssmlx_answer
from ssmlx.commands.options import add_counts, make_parser, run
from ssmlx.errors import InputError
from ssmlx.exported.backends import COMPUTE_UNITS, DECODE
from ssmlx.exported.manifest import REPORT
from ssmlx.loading.load import load
from ssmlx.model.shapes import to_float
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import read_prompts
from ssmlx.settings import DTYPES, GenerateConfig, PruneConfig, TreeConfig

from ..run.results import save
from ..run.tasks import SQL

PROG = "perf.export"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one exported folder came to, by one runtime.

    Attributes:
        name: of the folder.
        backend: what ran it.
        profile, precision, compression: of the export.
        megabytes: size of the package.
        weight_error: relative RMS against float32; None where it was not measured.
        prompts: how many.
        same_tokens: answers equal to plain decoding's, token for token.
        same_calls: of these, answers in as many target calls as MLX's streaming took.
        tokens_per_call: of the exported model, MLX with the same tree, and plain decoding.
        tokens_per_second: of the same three, without the prompts.
        largest_gap: over answers that part, the most by which MLX's logit of its own token beat
            that of the exported model's, where they part; None where none does.
        operations: how many Core ML would run on each device.
        cost: the share of the estimated cost of these; empty where Core ML estimates none.
    """

    name: str
    backend: str
    profile: str
    precision: str
    compression: str
    megabytes: float
    weight_error: float | None
    prompts: int
    same_tokens: int
    same_calls: int
    tokens_per_call: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    largest_gap: float | None
    operations: dict[str, int] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether every answer is plain decoding's."""
        return self.same_tokens == self.prompts

    def __str__(self) -> str:
        error = "" if self.weight_error is None else f"{self.weight_error:.1e}"
        gap = "" if self.largest_gap is None else f"; parts where logits are {self.largest_gap:.3f}"
        calls, rates = (
            f"{mine:.2f} {{}} (MLX {theirs:.2f}, plain {plain:.2f})"
            for mine, theirs, plain in (self.tokens_per_call, self.tokens_per_second)
        )
        lines = [
            f"{self.name:12} {self.backend:11} {self.profile:3} {self.precision:7} "
            f"{self.compression:10} {self.megabytes:6.1f} MB  weight error {error:8} "
            f"same tokens {self.same_tokens}/{self.prompts}, same calls {self.same_calls}{gap}",
            f"    {calls.format('a call')}; {rates.format('tokens/s')}",
        ]
        for device, count in sorted(self.operations.items()):
            share = f" ({self.cost[device]:.0%} of the cost)" if self.cost else ""
            lines.append(f"    {device} {count} operations{share}")
        return "\n".join(lines)


# --- Where Core ML would run a package ---


def placement(
    costs: Iterable[tuple[str | None, float | None]],
) -> tuple[dict[str, int], dict[str, float]]:
    """Operations and shares of the cost by device, of both for each operation.

    Constants, which run nowhere, have no device.
    """
    operations: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for device, cost in costs:
        if device is not None:
            operations[device] += 1
            weights[device] = weights.get(device, 0.0) + (cost or 0.0)
    total = sum(weights.values())
    shares = {device: weight / total for device, weight in weights.items()} if total else {}
    return dict(operations), shares


def compute_plan(package: Path, compute_units: str) -> tuple[dict[str, int], dict[str, float]]:
    """What Core ML plans for "decode" of a package, as `placement`."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    unit = getattr(ct.ComputeUnit, compute_units.upper().replace("-", "_"))
    compiled = ct.models.utils.compile_model(str(package))
    plan: Any = MLComputePlan.load_from_path(path=compiled, compute_units=unit)
    operations = plan.model_structure.program.functions[DECODE].block.operations
    return placement((device_of(plan, op), _cost(plan, op)) for op in operations)


def device_of(plan: Any, operation: Any) -> str | None:
    """The device that an operation prefers; None for a constant."""
    usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
    if usage is None:
        return None
    name = type(usage.preferred_compute_device).__name__
    return name.removeprefix("ML").removesuffix("ComputeDevice")


def _cost(plan: Any, operation: Any) -> float | None:
    found = plan.get_estimated_cost_for_mlprogram_operation(operation)
    return None if found is None else float(found.weight)


# --- Answers ---


def mlx_config(manifest: exported.Manifest, max_tokens: int) -> GenerateConfig:
    """MLX's settings for the trees of an exported model."""
    tree, streams = manifest.tree, manifest.num_streams
    most = tree.topology.num_candidates
    full = sum(most**level for level in range(streams + 1)) == manifest.num_nodes
    pruned = manifest.num_kept < manifest.num_nodes
    return GenerateConfig(
        decoding="streaming",
        max_tokens=max_tokens,
        num_streams=streams,
        tree=TreeConfig(kind="full" if full else "best", width=most, size=tree.size),
        prune=PruneConfig(kind="budget", keep=manifest.num_kept) if pruned else PruneConfig(),
    )


def exported_answer(
    model: exported.ExportedModel, prompt: Sequence[int], max_tokens: int
) -> Answer:
    """An answer by an exported model."""
    responses = list(exported.stream_generate(model, prompt, max_tokens=max_tokens))
    tokens, last = [token for one in responses for token in one.tokens], responses[-1]
    return Answer(tokens, last.target_calls, last.decode_seconds, last.prefill_seconds)


def gap(model: StreamFusedModel, prompt: Sequence[int], mine: Answer, theirs: Answer) -> float:
    """By how much MLX's logit of its token beats that of `mine`, where the answers part."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return 0.0  # one ends where the other goes on
    text = mx.array([*prompt, *theirs.tokens[:where]])
    logits = model.backbone.logits(model.backbone.append(text, model.make_cache())[:, -1:])[0]
    return to_float(logits[theirs.tokens[where]] - logits[mine.tokens[where]])


def load_exported(folder: Path, units: str | None) -> exported.ExportedModel:
    """An exported model, to run on this machine."""
    return exported.load(folder, compute_units=units)


def compare(args: argparse.Namespace, folder: Path, mlx: tuple[StreamFusedModel, Any]) -> list[Row]:
    """Run one exported folder on the prompts and compare, a row for each choice of units."""
    manifest = exported.Manifest.read(folder)
    choices: Sequence[str | None] = [args.compute_units] if args.compute_units else COMPUTE_UNITS
    prompts: list[list[int]] = []
    plain, streaming, rows = [], [], []
    for units in choices if manifest.target == "coreml" else [None]:
        package = load_exported(folder, units)
        if not prompts:
            asked = read_prompts(args.prompts)[: args.count]
            prompts = [exported.prompt_tokens(package, prompt) for prompt in asked]
            alone = GenerateConfig(decoding="plain", max_tokens=args.max_tokens)
            drafting = mlx_config(manifest, args.max_tokens)
            plain = [ssmlx_answer(*mlx, prompt, alone) for prompt in prompts]
            streaming = [ssmlx_answer(*mlx, prompt, drafting) for prompt in prompts]
        if units is not None:
            exported_answer(package, prompts[0], 1)  # warm-up
        answers = [exported_answer(package, prompt, args.max_tokens) for prompt in prompts]
        gaps = [
            gap(mlx[0], prompt, mine, theirs)
            for prompt, mine, theirs in zip(prompts, answers, plain, strict=True)
            if mine.tokens != theirs.tokens
        ]
        rows.append(_row(folder, units, manifest, (answers, streaming, plain), gaps))
        print(rows[-1], flush=True)
    return rows


def _row(
    folder: Path,
    units: str | None,
    manifest: exported.Manifest,
    sides: tuple[Sequence[Answer], ...],
    gaps: Sequence[float],
) -> Row:
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    same = [(a, b) for a, b, c in zip(*sides, strict=True) if a.tokens == c.tokens]
    counts = [sum(len(a.tokens) for a in side) for side in sides]
    calls = [sum(a.target_calls for a in side) for side in sides]
    seconds = [sum(a.decode_seconds for a in side) for side in sides]
    package = manifest.package(folder)
    is_core_ml = units is not None and sys.platform == "darwin"
    operations, cost = compute_plan(package, units or "") if is_core_ml else ({}, {})
    return Row(
        name=folder.name,
        backend="Core AI" if units is None else f"Core ML, {units}",
        profile=manifest.profile,
        precision=manifest.dtype,
        compression=manifest.compression,
        megabytes=round(report["package_bytes"] / 1e6, 1),
        weight_error=(report["weight_error"] or {}).get("relative_rms"),
        prompts=len(sides[0]),
        same_tokens=len(same),
        same_calls=sum(mine.target_calls == theirs.target_calls for mine, theirs in same),
        tokens_per_call=tuple(round(n / c, 3) for n, c in zip(counts, calls, strict=True)),
        tokens_per_second=tuple(
            round((n - len(sides[0])) / s, 2) if s else 0.0
            for n, s in zip(counts, seconds, strict=True)
        ),
        largest_gap=round(max(gaps), 4) if gaps else None,
        operations=operations,
        cost=cost,
    )


# --- The command ---


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="what `ssmlx.export` wrote"
    )
    parser.add_argument(
        "--model", default="smollm2-135m-q4_1", help="that was exported (default: %(default)s)"
    )
    parser.add_argument("--adapter", default="sql", help="that was exported (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="what MLX computes in; auto for its own speed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, default=SQL.test, metavar="FILE",
        help='objects with a "prompt" or "messages"',
    )  # fmt: skip
    add_counts(parser, ("count", 20, "prompts"), ("max-tokens", 64, "longest answer"))
    parser.add_argument("--compute-units", choices=COMPUTE_UNITS, help="one choice only")
    parser.add_argument(
        "--name", default="export", help="of the result's file (default: %(default)s)"
    )
    return parser.parse_args(argv)


def _main(args: argparse.Namespace) -> int:
    if args.count < 1:
        raise InputError(f"--count {args.count}", expected="1 or more", do="give a larger number")
    mlx = load(args.model, adapter=args.adapter, dtype=args.dtype)
    rows = [row for folder in args.folders for row in compare(args, folder, mlx)]
    print("saved", save(args.name, {"rows": [asdict(row) for row in rows]}), file=sys.stderr)
    return 0 if all(row.is_exact for row in rows if row.precision == "float32") else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if a float32 export writes anything else than MLX."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
