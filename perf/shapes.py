"""Which shape of streams is worth the most: tokens per call over what a call costs, chip by chip.

A call costs its rows, as measured here or as others published them of Apple's chips, and drafting:
the rows of the streams through their layers and the draft head, by the share of the model's weights
that these read.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import require
from ssmlx.json_files import build_settings, read_json
from ssmlx.loading.folders import CONFIG_FILE
from ssmlx.loading.names import resolve_adapter, resolve_model
from ssmlx.policy.costs import interpolate
from ssmlx.settings import StreamConfig
from ssmlx.training.job import read_base_settings
from ssmlx.training.sizing import StepCosts, fastest_tree

PROG = "perf.shapes"
EPILOG = """examples:
  python -m perf.shapes chat sql
  python -m perf.shapes chat --like 2:8192:0.75 --like 4:16384:0.82
  python -m perf.shapes runs/two/adapter runs/three/adapter --rows here=1:1,4:1.25,6:1.33,16:1.9

`perf.bench` measures what rows cost on a machine. --like LAYERS:VOCABULARY:SHARE adds the first
adapter as it would be in another shape, with that share of its accepted drafts."""

ROWS: Mapping[str, StepCosts] = {
    "M3 Max": {1: 1.0, 2: 1.0, 4: 1.28, 8: 2.5, 16: 3.95},
    "M4 Pro": {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84},
    "M5 Max": {1: 1.0, 3: 1.12, 5: 1.49, 8: 2.25, 16: 3.9},
}
"""Calls of n rows in plain calls, 4-bit weights: perf/README.md, "What rows cost on Apple GPUs"."""


def drafting_share(config: StreamConfig, base: Mapping[str, int]) -> float:
    """The share of the model's weights that a drafting pass reads.

    `base` has the settings of a base model of Llama's form.
    """
    width = base["hidden_size"]
    heads = base["num_attention_heads"]
    key_width = width // heads * base.get("num_key_value_heads", heads)
    layer = width * (2 * width + 2 * key_width + 3 * base["intermediate_size"])
    vocab = base["vocab_size"]
    read = config.num_msa_layers * layer + (config.draft_vocab_size or vocab) * width
    return read / (config.num_layers * layer + vocab * width)


def call_costs(config: StreamConfig, rows: StepCosts, share: float) -> dict[int, float]:
    """Plain calls that a call costs, drafting included, by nodes, up to the most rows that are
    known.
    """

    def cost(count: int) -> float:
        return interpolate(sorted(rows), [rows[n] for n in sorted(rows)], count)

    assert config.tokens_per_call is not None
    drafting = share * cost(config.num_streams)
    return {n: cost(n) + drafting for n in config.tokens_per_call if n <= max(rows)}


def in_shape(config: StreamConfig, text: str) -> StreamConfig:
    """The settings in the shape that an option --like describes."""
    parts = text.split(":")
    require(
        len(parts) == 3 and all(part.replace(".", "", 1).isdecimal() for part in parts),
        f"--like {text}",
        expected="LAYERS:VOCABULARY:SHARE, such as 4:16384:0.82",
        do="correct it",
    )
    return replace(
        config,
        num_msa_layers=int(parts[0]),
        draft_vocab_size=int(parts[1]),
        tokens_per_call=tokens_with_share(config, float(parts[2])),
    )


def tokens_with_share(config: StreamConfig, share: float) -> dict[int, float]:
    """Tokens per call by nodes if that share of the accepted drafts is accepted."""
    assert config.tokens_per_call is not None
    return {n: 1 + share * (one - 1) for n, one in config.tokens_per_call.items()}


def read_rows(text: str) -> tuple[str, StepCosts]:
    """Parse an option --rows into a name and costs."""
    name, _, costs = text.partition("=")
    try:
        pairs = (one.split(":") for one in costs.split(","))
        return name, {int(n): float(cost) for n, cost in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=1:1,4:1.25 or the like") from None


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Price shapes of streams by published rows and by yours.", EPILOG)
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help="a name or a folder")
    parser.add_argument("--like", action="append", default=[], metavar="SHAPE", help="see below")
    parser.add_argument(
        "--rows", action="append", default=[], type=read_rows, metavar="NAME=COSTS",
        help="measured cost of an n-row call on another machine, in plain calls",
    )  # fmt: skip
    add_options(
        parser,
        ("--kept", "X", "share of the accepted drafts that harder text leaves", 1.0),
    )
    return parser.parse_args(argv)


def price(args: argparse.Namespace) -> None:
    """Print a table: a line for each shape, its speed over plain decoding and its tree by chip."""
    chips = {**ROWS, **dict(args.rows)}
    shapes = []
    for name in args.adapters:
        folder = resolve_adapter(name)
        path = Path(folder or name) / CONFIG_FILE
        config = build_settings(StreamConfig, read_json(path, "the settings of an adapter"), path)
        require(
            config.tokens_per_call is not None,
            f"{path} has no tokens_per_call",
            expected="an adapter that was measured as it was written",
            do="train it one step further with --train-only streams",
        )
        shapes.append((name, config))
    shapes += [(f"{shapes[0][0]}, so", in_shape(shapes[0][1], text)) for text in args.like]
    print("| adapter | layers | vocabulary |", " | ".join(chips), "|")
    print("|---" * (3 + len(chips)) + "|")
    for name, config in shapes:
        share = drafting_share(config, read_base_settings(resolve_model(config.base_model)))
        tokens = tokens_with_share(config, args.kept)
        cells = []
        for rows in chips.values():
            nodes, speed = fastest_tree(call_costs(config, rows, share), tokens)
            cells.append(f"{speed:.2f} ({nodes} nodes)")
        shape = f"| {name} | {config.num_msa_layers} | {config.draft_vocab_size:,} |"
        print(shape, " | ".join(cells), "|")


main = make_main(PROG, parse_args, price)

if __name__ == "__main__":
    raise SystemExit(main())
