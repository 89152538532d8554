"""`python -m ssmlx.export`: the stream-fused model as an asset for Core ML or Core AI."""

import argparse
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.settings import DEFAULT_MODEL, TreeConfig

from .. import check_installed
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
    parser = make_parser(
        PROG, "Export a model that drafts for itself to Core ML or Core AI.", EPILOG
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="what to write")
    add_options(
        parser,
        (
            "--model",
            None,
            "a local folder, a Hub name or an alias (default: %(default)s)",
            DEFAULT_MODEL,
        ),
        (
            "--adapter",
            "NAME|FOLDER",
            "the streams that draft, and LoRA: a bundled adapter's name "
            "or a folder (default: those of a fused model folder)",
            str,
        ),
    )
    asset = parser.add_argument_group("asset")
    shapes = parser.add_argument_group("shapes, which are fixed in the asset")
    for one in _options():
        allowed = one.metadata["allowed"]
        default = one.default
        text = one.metadata["help"] + ("" if default is None else f" (default: {default})")
        flag = allowed.option or "--" + one.name.replace("_", "-")
        named: dict[str, Any] = {"dest": one.name, "default": default, "help": text}
        if allowed.choices:
            asset.add_argument(flag, choices=allowed.choices, **named)
        else:
            shapes.add_argument(flag, type=int, metavar="N", **named)
    add_options(
        shapes,
        (
            "--tree",
            None,
            "full: every combination of K children a level; best: the N likeliest "
            "nodes (default: %(default)s)",
            "best",
            ("full", "best"),
        ),
        ("--tree-width", "K", "children a level (default: 3 for full, no limit for best)", int),
        (
            "--tree-size",
            "N",
            "nodes of the best tree, the root included (default: %(default)s)",
            TreeConfig().size,
        ),
    )
    return parser.parse_args(argv)


def _options() -> list[Field[Any]]:
    return [one for one in fields(ExportConfig) if one.metadata.get("help")]


def export_model(args: argparse.Namespace) -> None:
    config = ExportConfig(
        tree=TreeConfig(kind=args.tree, width=args.tree_width, size=args.tree_size),
        **{one.name: getattr(args, one.name) for one in _options()},
    )
    check_installed(_NEEDED[args.target], args.target, f'pip install "ssmlx[{args.target}]"')
    from .export import export

    report = export(args.model, args.adapter, args.out, config)
    print(f"{args.out}: {report}", file=sys.stderr)


main = make_main(PROG, parse_args, export_model)

if __name__ == "__main__":
    raise SystemExit(main())
