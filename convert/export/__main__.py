"""`python -m ssmlx.export`: the stream-fused model as an asset for Core ML or Core AI."""

import argparse
import sys
from pathlib import Path

from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.commands.setting_options import (
    add_setting_options,
    given_settings,
    option_fields,
)
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
    options = option_fields(ExportConfig).values()
    choices = [one.name for one in options if one.metadata["allowed"].choices]
    sizes = [one.name for one in options if one.name not in choices]
    add_setting_options(parser.add_argument_group("asset"), ExportConfig, choices)
    shapes = parser.add_argument_group("shapes, which are fixed in the asset")
    add_setting_options(shapes, ExportConfig, sizes)
    add_setting_options(shapes, TreeConfig)
    return parser.parse_args(argv)


def export_model(args: argparse.Namespace) -> None:
    tree = TreeConfig(**given_settings(args, TreeConfig))
    config = ExportConfig(tree=tree, **given_settings(args, ExportConfig))
    check_installed(_NEEDED[args.target], args.target, f'pip install "ssmlx[{args.target}]"')
    from .export import export

    report = export(args.model, args.adapter, args.out, config)
    print(f"{args.out}: {report}", file=sys.stderr)


main = make_main(PROG, parse_args, export_model)

if __name__ == "__main__":
    raise SystemExit(main())
