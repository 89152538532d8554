"""`python -m perf.attention`: the fused attention kernel against MLX's own, on a Mac.

Every number of rows and every context is timed both ways, in turns, through several layers, each
with a cache of its own and fed by the layer before, as in a model. The table says which of MLX's
kernels it was, and whether the rule that chooses between them (`ssmlx.model.metal.plan`) was
right here.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
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
from ssmlx.model.metal.hook import is_available, pack_bits
from ssmlx.model.metal.kernels import attend
from ssmlx.model.metal.plan import (
    AttentionShape,
    Chip,
    choose_path,
    is_supported,
    make_plan,
    mlx_path,
    this_chip,
)
from ssmlx.tuning.report import Columns, table

from .run.options import add_out

PROG = "perf.attention"
EPILOG = """examples:
  python -m perf.attention
  python -m perf.attention --heads 32 --kv-heads 8 --head-size 128 --rows 8 16 32

The sizes are those of SmolLM2-135M unless given; a model's config.json has its own."""
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
WARM_UP = 3
NOISE = 0.03  # below this the two sides count as equally fast

Attention = Callable[[mx.array, mx.array, mx.array], mx.array]


def make_inputs(shape: AttentionShape, layers: int) -> tuple[Any, ...]:
    """Random inputs, evaluated; each cache has room in front and behind, as a real one.

    Returns:
        [1, H, R, Dh] queries of the first layer; keys and values of each layer, slices of a cache;
        and [R, R] bool, a random tree's rows among themselves.
    """
    key = mx.random.key(0)
    queries = mx.random.normal((1, shape.heads, shape.rows, shape.head_size), shape.dtype, key=key)
    size = (2, shape.kv_heads, shape.keys + 64, shape.head_size)
    caches = [mx.random.normal(size, shape.dtype, key=mx.random.key(i)) for i in range(layers)]
    used = slice(32, 32 + shape.keys)
    row = mx.arange(shape.rows)
    chance = mx.random.uniform(shape=(shape.rows, shape.rows), key=key) < 0.3
    visible = (row[:, None] == row) | ((row[:, None] > row) & chance)
    mx.eval(queries, caches, visible)
    return queries, [(cache[:1, :, used], cache[1:, :, used]) for cache in caches], visible


def attentions(shape: AttentionShape, visible: mx.array, chip: Chip) -> dict[str, Attention]:
    """Both ways, by name; masks are made beforehand, as a step makes them once for all layers."""
    scale, plan = shape.head_size**-0.5, make_plan(shape, chip)
    committed = mx.ones((shape.rows, shape.keys - shape.rows), mx.bool_)
    mask, bits = mx.concatenate([visible, committed], axis=1), pack_bits(visible)
    mx.eval(mask, bits)
    return {
        "mlx": partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask),
        "fused": lambda queries, keys, values: attend(queries, keys, values, bits, scale, plan),
    }


def compare(
    shape: AttentionShape, layers: int, repeats: int, chip: Chip, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """One line of the table: milliseconds a layer through `layers` of them, and the rule's choice.

    Medians of `repeats` runs of each side, in turns.
    """
    queries, sides, visible = make_inputs(shape, layers)

    def through_layers(attention: Attention) -> mx.array:
        hidden = queries
        for keys, values in sides:
            hidden = attention(hidden, keys, values)
        return hidden

    ways = attentions(shape, visible, chip)
    calls: Calls = {
        (name, shape.rows, shape.keys): partial(through_layers, way) for name, way in ways.items()
    }
    seconds, _ = medians(calls, repeats, clock, warm=WARM_UP)
    mlx_ms, fused_ms = (1e3 * one / layers for one in seconds.values())
    first = [way(queries, *sides[0]).astype(mx.float32) for way in ways.values()]
    return {
        "rows": shape.rows,
        "keys": shape.keys,
        "mlx_path": mlx_path(shape, chip),
        "chosen": choose_path(shape, chip),
        "mlx_ms": mlx_ms,
        "fused_ms": fused_ms,
        "largest_difference": float(mx.abs(first[0] - first[1]).max().item()),  # type: ignore[arg-type]
    }


def verdict(line: Mapping[str, Any]) -> str:
    """Whether the rule chose the faster side."""
    gain = line["mlx_ms"] / line["fused_ms"]
    if abs(gain - 1) < NOISE:
        return "even"
    return "right" if (gain > 1) == (line["chosen"] == "fused") else "WRONG"


def report(result: Mapping[str, Any]) -> str:
    """The result as text."""
    settings, lines, where = result["settings"], result["lines"], result["machine"]
    columns: Columns = {
        "rows": lambda line: str(line["rows"]),
        "keys": lambda line: str(line["keys"]),
        "MLX's path": lambda line: line["mlx_path"],
        "MLX ms": lambda line: f"{line['mlx_ms']:.3f}",
        "fused ms": lambda line: f"{line['fused_ms']:.3f}",
        "speed-up": lambda line: f"{line['mlx_ms'] / line['fused_ms']:.2f}",
        "chosen": lambda line: line["chosen"],
        "rule": verdict,
    }
    counts = Counter(verdict(line) for line in lines)
    lines_shown = [
        f"attention of one layer, {settings['heads']} heads on {settings['kv_heads']} of "
        f"{settings['head_size']}, {settings['dtype']}; {where['machine']}, "
        f"{where['power']}, mlx {where['mlx']}",
        f"medians, through {result['layers']} layers in a run\n",
        *table(columns, lines),
        f"\nlargest difference {max(line['largest_difference'] for line in lines):.2g}; the rule "
        f"was right {counts['right']} times, wrong {counts['WRONG']}, and made no difference "
        f"(under {NOISE:.0%}) {counts['even']}",
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
    """Entry point; returns the exit code."""
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
