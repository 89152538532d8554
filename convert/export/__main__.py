"""`python -m ssmlx.export`: the stream-fused model as an asset for Core ML or Core AI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ssmlx.commands.options import make_parser, run
from ssmlx.settings import DEFAULT_MODEL, PruneConfig, TreeConfig

from ..installed import check_installed

if TYPE_CHECKING:
    from .export import Report
    from .settings import ExportConfig

PROG = "ssmlx.export"
_NEEDED = {
    "coreml": ("torch", "transformers", "coremltools", "sklearn"),
    "coreai": ("torch", "transformers", "coreai", "coreai_torch"),
}
EPILOG = """examples:
  python -m ssmlx.export --adapter sql --out exported/sql
  python -m ssmlx.export --adapter sql --profile ane --compress palettised --out exported/sql-ane
  python -m ssmlx.export --adapter sql --target coreai --dtype float32 --out exported/sql-coreai
  python -m ssmlx.exported --package exported/sql --prompt "..."     # on a Mac

FOLDER is written whole or not at all: the package with its functions "prefill" and "decode",
manifest.json, report.json and the tokenizer. convert/export/README.md explains the profiles."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(
        PROG, "Export a model that drafts for itself to Core ML or Core AI.", EPILOG
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="what to write")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL,
        help="a local folder, a Hub name or an alias (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--adapter", metavar="NAME|FOLDER",
        help="the streams that draft, and LoRA: a bundled adapter's name or a folder (default: "
        "those of a fused model folder)",
    )  # fmt: skip
    _add_asset_options(parser.add_argument_group("asset"))
    _add_shape_options(parser.add_argument_group("shapes, which are fixed in the asset"))
    return parser.parse_args(argv)


def _add_asset_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target", choices=("coreml", "coreai"), default="coreml",
        help="coreml: an .mlpackage for iOS 18, macOS 15 and later; coreai: an .aimodel for OS 27 "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--profile", choices=("gpu", "ane"), default="gpu",
        help="gpu: fused attention, scattered cache writes; ane: for the Neural Engine, "
        "channels first, one-hot cache writes (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--compress", choices=("none", "int8", "int4", "palettised"), default="none",
        help="weights of layers and LM head: int8 a row; int4 in blocks of 32, for gpu; "
        "palettised, 4 bits, for ane (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=("float16", "float32"), default="float16",
        help="of weights and arithmetic; float32 is for checking tokens, and in Core ML makes the "
        "cache inputs and outputs, as its state is float16 alone (default: %(default)s)",
    )  # fmt: skip


def _add_shape_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--context", type=int, default=1024, metavar="S",
        help="tokens that the cache has room for (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--chunk", type=int, default=64, metavar="T",
        help="prompt tokens a call of prefill (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--num-streams",
        type=int,
        metavar="G",
        help="tokens that streams draft ahead (default: all)",
    )
    group.add_argument(
        "--tree", choices=("full", "best"), default="best",
        help="full: every combination of K children a level; best: the N likeliest nodes "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--tree-width", type=int, metavar="K",
        help="children a level (default: 3 for full, no limit for best)",
    )  # fmt: skip
    group.add_argument(
        "--tree-size", type=int, default=TreeConfig().size, metavar="N",
        help="nodes of the best tree, the root included (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--prune-to", type=int, metavar="M",
        help="nodes that pass the upper layers, chosen by early exit inside the graph "
        "(default: all)",
    )  # fmt: skip


def export_config(args: argparse.Namespace) -> ExportConfig:
    """The settings that the options ask for.

    Raises:
        InputError: one is out of range.
    """
    from .settings import ExportConfig

    pruned = args.prune_to is not None
    return ExportConfig(
        target=args.target,
        profile=args.profile,
        compression=args.compress,
        precision=args.dtype,
        tree=TreeConfig(kind=args.tree, width=args.tree_width, size=args.tree_size),
        prune=PruneConfig(kind="budget", keep=args.prune_to) if pruned else PruneConfig(),
        num_streams=args.num_streams,
        context=args.context,
        chunk=args.chunk,
    )


def summary(out: Path, report: Report) -> str:
    """Size, weight error, time and memory, a line each."""
    lines = [f"{out}: {report.package_bytes / 1e6:.1f} MB"]
    if report.weight_error is not None:
        from .compression import WeightError

        lines.append(f"weights against float32: {WeightError(**report.weight_error)}")
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in report.seconds.items())
    lines.append(f"{sum(report.seconds.values()):.0f} s ({stages})")
    lines.append(f"peak memory {report.peak_bytes / 1e9:.2f} GB")
    return "\n".join(lines)


def _main(args: argparse.Namespace) -> None:
    config = export_config(args)
    check_installed(_NEEDED[args.target], args.target, f'pip install "ssmlx[{args.target}]"')
    from .export import export

    print(summary(args.out, export(args.model, args.adapter, args.out, config)), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
