"""`python -m perf.export.mac`: what only a Mac can show of an exported Core ML model.

For every choice of compute units: tokens/s, target calls, milliseconds of a call, whether the
tokens are MLX's plain decoding's, and on which device Core ML would run each operation of "decode",
with the share of the estimated cost. Then the same prompts by MLX, streaming and plain. macOS 15
or later; a few minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssmlx import exported
from ssmlx.commands.options import make_parser, run
from ssmlx.errors import InputError
from ssmlx.exported.backends import COMPUTE_UNITS, DECODE
from ssmlx.loading.load import load
from ssmlx.prompts import read_prompts
from ssmlx.settings import GenerateConfig

from ..run.results import save
from .check import Answer, add_source_options, exported_answer, mlx_answer, mlx_config

PROG = "perf.export.mac"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the operations of a function would run.

    Attributes:
        operations: how many prefer each device.
        cost: the share of the estimated cost of these; empty where Core ML estimates none.
    """

    operations: dict[str, int]
    cost: dict[str, float]

    def __str__(self) -> str:
        parts = [
            f"{device} {count} operations" + (f" ({self.cost[device]:.0%})" if self.cost else "")
            for device, count in sorted(self.operations.items())
        ]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One way to answer the prompts.

    Attributes:
        name: "core ml, <compute units>", or MLX's decoding.
        tokens_per_second: over all prompts, prefill included.
        tokens_per_call: tokens advanced a target call.
        call_ms: milliseconds of a target call, the prompts' chunks shared among them.
        same_tokens: answers equal to MLX's plain decoding's.
        prompts: how many.
        placement: of "decode"; None for MLX.
    """

    name: str
    tokens_per_second: float
    tokens_per_call: float
    call_ms: float
    same_tokens: int
    prompts: int
    placement: Placement | None = None

    def __str__(self) -> str:
        placed = "" if self.placement is None else f"\n    {self.placement}"
        return (
            f"{self.name:24} {self.tokens_per_second:7.1f} tokens/s "
            f"{self.tokens_per_call:5.2f} a call {self.call_ms:7.1f} ms a call, "
            f"same tokens {self.same_tokens}/{self.prompts}{placed}"
        )


def placement(costs: Iterable[tuple[str | None, float | None]]) -> Placement:
    """Of the device and the cost of each operation; constants, which run nowhere, have none."""
    operations: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for device, cost in costs:
        if device is not None:
            operations[device] += 1
            weights[device] += cost or 0.0  # type: ignore[assignment]
    total = sum(weights.values())
    shares = {device: weights[device] / total for device in operations} if total else {}
    return Placement(operations=dict(operations), cost=shares)


def compute_plan(package: Path, compute_units: str, function: str = DECODE) -> Placement:
    """What Core ML plans for a function of a package."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    unit = getattr(ct.ComputeUnit, compute_units.upper().replace("-", "_"))
    compiled = ct.models.utils.compile_model(str(package))
    plan: Any = MLComputePlan.load_from_path(path=compiled, compute_units=unit)
    operations = plan.model_structure.program.functions[function].block.operations
    return placement((_device(plan, op), _cost(plan, op)) for op in operations)


def _device(plan: Any, operation: Any) -> str | None:
    usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
    if usage is None:
        return None
    name = type(usage.preferred_compute_device).__name__
    return name.removeprefix("ML").removesuffix("ComputeDevice")


def _cost(plan: Any, operation: Any) -> float | None:
    found = plan.get_estimated_cost_for_mlprogram_operation(operation)
    return None if found is None else float(found.weight)


def speed(
    name: str,
    answers: Sequence[Answer],
    oracle: Sequence[Answer],
    placed: Placement | None = None,
) -> Speed:
    """What `answers` come to."""
    tokens = sum(len(answer.tokens) for answer in answers)
    calls = sum(answer.target_calls for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    pairs = zip(answers, oracle, strict=True)
    return Speed(
        name=name,
        tokens_per_second=round(tokens / seconds, 2),
        tokens_per_call=round(tokens / calls, 3),
        call_ms=round(1000 * seconds / calls, 2),
        same_tokens=sum(mine.tokens == theirs.tokens for mine, theirs in pairs),
        prompts=len(answers),
        placement=placed,
    )


def mlx_speeds(
    args: argparse.Namespace, manifest: exported.Manifest, prompts: Sequence[list[int]]
) -> tuple[list[Speed], list[Answer]]:
    """MLX's streaming and plain decoding, and the plain answers, which all are compared with."""
    model, tokenizer = load(args.model, adapter=args.adapter)
    configs: Mapping[str, GenerateConfig] = {
        "mlx, plain": GenerateConfig(decoding="plain", max_tokens=args.max_tokens),
        "mlx, streaming": mlx_config(manifest, args.max_tokens),
    }
    found = {}
    for name, config in configs.items():
        mlx_answer(model, tokenizer, prompts[0], config)  # warm-up
        found[name] = [mlx_answer(model, tokenizer, prompt, config) for prompt in prompts]
    oracle = found["mlx, plain"]
    return [speed(name, answers, oracle) for name, answers in found.items()], oracle


def coreml_speed(
    folder: Path, units: str, prompts: Sequence[list[int]], oracle: Sequence[Answer], limit: int
) -> Speed:
    """Core ML on `units`."""
    model = exported.load(folder, compute_units=units)
    exported_answer(model, prompts[0], limit)  # warm-up
    answers = [exported_answer(model, prompt, limit) for prompt in prompts]
    plan = compute_plan(model.manifest.package(folder), units)
    return speed(f"core ml, {units}", answers, oracle, plan)


def _main(args: argparse.Namespace) -> None:
    if sys.platform != "darwin":
        raise InputError(
            "Core ML runs on macOS alone", expected="macOS 15 or later", do="run this on a Mac"
        )
    manifest = exported.Manifest.read(args.folder)
    units = [args.compute_units] if args.compute_units else COMPUTE_UNITS
    package = exported.load(args.folder, compute_units=units[0])
    asked = read_prompts(args.prompts)[: max(1, args.count)]
    prompts = [exported.prompt_tokens(package, prompt) for prompt in asked]
    rows, oracle = mlx_speeds(args, manifest, prompts)
    for unit in units:
        rows.append(coreml_speed(args.folder, unit, prompts, oracle, args.max_tokens))
        print(rows[-1], flush=True)
    for row in rows[:2]:
        print(row)
    saved = save(f"export-mac-{args.folder.resolve().name}", {"rows": [asdict(r) for r in rows]})
    print("saved", saved, file=sys.stderr)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `ssmlx.export` wrote")
    add_source_options(parser)
    parser.add_argument("--compute-units", choices=COMPUTE_UNITS, help="one choice only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
