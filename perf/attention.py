"""`python -m perf.attention`: the fused attention kernel against MLX's own, on a Mac.

Every number of rows and every context is timed both ways, in turns, through several layers, each
with a cache of its own and fed by the layer before, as in a model. "taken" is what steps of such
a shape come to use here.
"""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import tqdm

from ssmlx.calibration.costs import Calls, Clock, medians
from ssmlx.commands.machine import machine
from ssmlx.commands.options import add_counts, make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.errors import InputError, require
from ssmlx.loading.files import make_folder
from ssmlx.model.metal.hook import is_available
from ssmlx.model.metal.plan import AttentionShape, Chip, is_supported, make_plan, this_chip
from ssmlx.model.metal.trial import MIN_GAIN, both_ways, make_inputs, through
from ssmlx.tuning.report import Columns, table

from .run.options import add_out

PROG = "perf.attention"
EPILOG = """examples:
  python -m perf.attention
  python -m perf.attention --heads 32 --kv-heads 8 --head-size 128 --rows 8 16 32

The sizes are those of SmolLM2-135M unless given; a model's config.json has its own."""
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
WARM_UP = 3


def compare(
    shape: AttentionShape, layers: int, repeats: int, chip: Chip, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """One line of the table: milliseconds a layer through `layers` of them.

    Medians of `repeats` runs of each side, in turns.
    """
    queries, sides, visible = make_inputs(shape, layers)
    ways = both_ways(shape, visible, make_plan(shape, chip))
    calls: Calls = {
        (name, shape.rows, shape.keys): partial(through, queries, sides, way)
        for name, way in zip(("mlx", "fused"), ways, strict=True)
    }
    seconds, _ = medians(calls, repeats, clock, warm=WARM_UP)
    mlx_ms, fused_ms = (1e3 * one / layers for one in seconds.values())
    first = [way(queries, *sides[0]).astype(mx.float32) for way in ways]
    return {
        "rows": shape.rows,
        "keys": shape.keys,
        "mlx_ms": mlx_ms,
        "fused_ms": fused_ms,
        "taken": "fused" if mlx_ms >= MIN_GAIN * fused_ms else "mlx",
        "largest_difference": float(mx.abs(first[0] - first[1]).max().item()),  # type: ignore[arg-type]
    }


def report(result: Mapping[str, Any]) -> str:
    settings, lines, where = result["settings"], result["lines"], result["machine"]
    columns: Columns = {
        "rows": lambda line: str(line["rows"]),
        "keys": lambda line: str(line["keys"]),
        "MLX ms": lambda line: f"{line['mlx_ms']:.3f}",
        "fused ms": lambda line: f"{line['fused_ms']:.3f}",
        "speed-up": lambda line: f"{line['mlx_ms'] / line['fused_ms']:.2f}",
        "taken": lambda line: line["taken"],
    }
    lines_shown = [
        f"attention of one layer, {settings['heads']} heads on {settings['kv_heads']} of "
        f"{settings['head_size']}, {settings['dtype']}; {where['machine']}, "
        f"{where['power']}, mlx {where['mlx']}",
        f"medians, through {result['layers']} layers in a run\n",
        *table(columns, lines),
        f"\nlargest difference {max(line['largest_difference'] for line in lines):.2g}; the kernel "
        f"is taken from {MIN_GAIN:.2f} times MLX's speed on",
    ]
    return "\n".join(lines_shown)


def shapes_of(args: argparse.Namespace) -> list[AttentionShape]:
    """Every number of rows with every context."""
    sizes = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_size")}
    try:
        shapes = [
            AttentionShape(rows=rows, keys=rows + context, dtype=DTYPES[args.dtype], **sizes)
            for rows, context in product(args.rows, args.contexts)
        ]
    except ValueError as error:
        raise InputError(
            f"--heads {args.heads} --kv-heads {args.kv_heads} --rows {args.rows}",
            expected="positive numbers, heads a multiple of key/value heads",
            do="take them from the model's config.json",
        ) from error
    require(
        is_supported(shapes[0]),
        f"--head-size {args.head_size}",
        expected="a multiple of 8, up to 128",
        do="there is nothing to compare for other sizes",
    )
    return shapes


def _main(args: argparse.Namespace) -> None:
    shapes = shapes_of(args)
    found = "MLX has no Metal device here"
    require(is_available(), found, expected="a Mac with Apple silicon", do="run it there")
    make_folder(args.out)
    chip = this_chip()
    shown = tqdm(shapes, desc="attention", unit="shape", disable=None)
    lines = [compare(shape, args.layers, args.repeats, chip) for shape in shown]
    settings = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_size", "dtype")}
    result = {"machine": machine(), "settings": settings, "layers": args.layers, "lines": lines}
    write_result(result, args.out / "attention", report(result))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, (__doc__ or "").partition("\n\n")[2], EPILOG)
    add_counts(
        parser,
        ("heads", 9, "of the queries"),
        ("kv-heads", 3, "of keys and values"),
        ("head-size", 64, "channels of a head"),
        ("layers", 16, "one after the other in a run"),
        ("repeats", 15, "timed runs of each side"),
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float16")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    contexts = [128, 512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts)
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
