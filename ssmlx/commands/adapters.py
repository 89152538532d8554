"""The adapters command: what `ssmlx.adapt` has made here, and how to be rid of it."""

from __future__ import annotations

import argparse
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, require, unwritable_error
from ..loading.names import adapters_home, bundled_adapters
from .adapt import check_name
from .options import command, make_parser

if TYPE_CHECKING:
    from ..loading.found import Run

PROG = "ssmlx.adapters"
EPILOG = """examples:
  python -m ssmlx.adapters
  python -m ssmlx.adapters remove qwen3-4b-4bit
  python -m ssmlx.adapters rename qwen3-4b-4bit qwen

An adapter belongs to the weights that it was made from, wherever they lie and whatever the adapter
is called: chat, generate, the engine and the server take the newest that was made from theirs."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    text = "List the adapters that ssmlx.adapt has made here, remove or rename them."
    usage = "[list | remove NAME | rename NAME NEW]"
    parser = make_parser(PROG, text, EPILOG, usage)
    parser.add_argument("act", nargs="?", choices=("list", "remove", "rename"), default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the adapter; and the new one")
    args = parser.parse_args(argv)
    wanted = {"list": 0, "remove": 1, "rename": 2}[args.act]
    if len(args.names) != wanted:
        parser.error(f"{args.act} takes {wanted} names, and not {len(args.names)}")
    return args


def describe(run: Run) -> str:
    """An adapter in a line: its base and whether that is here, its date, what it brings."""
    curve = (run.figures.get("figures") or {}).get("tokens_per_call") or {}
    nodes = max(curve, key=curve.__getitem__, default=None)
    if not run.is_finished:
        brings = "unfinished"
    elif nodes is None:
        brings = run.verdict
    else:
        brings = f"{curve[nodes]:.2f} tokens a call with {nodes} nodes, {run.verdict}"
    tuned = "" if run.is_for_base else ", with a LoRA"
    changed = datetime.fromtimestamp(run.changed).isoformat(" ", "minutes")
    return f"{run.name}  {changed}  of {run.model}{tuned} ({_place(run)}): {brings}"


def _place(run: Run) -> str:
    """Whether the base model lies where it lay, and is what it was."""
    from ..loading.weights import weights_digest

    try:
        is_same = weights_digest(run.model_folder) == run.settings["weights"]
    except (InputError, OSError):
        return f"not in {run.model_folder} any more"
    return "here" if is_same else "other weights are there now"


def _folder_of(name: str) -> Path:
    """The folder of a run, broken ones among them."""
    folder = adapters_home() / name
    is_one = Path(name).name == name and name not in (".", "..") and folder.is_dir()
    is_bundled = name in bundled_adapters()
    found = f"{name} ships with ssmlx" if is_bundled and not is_one else f"no adapter {name}"
    names = sorted(one.name for one in adapters_home().glob("*") if one.is_dir())
    expected = f"one that was made here ({', '.join(names) or 'there is none'})"
    require(is_one, found, expected=expected, do="see python -m ssmlx.adapters")
    return folder


def _main(args: argparse.Namespace) -> None:
    from ..loading.files import alone_in
    from ..loading.found import runs

    if args.act == "list":
        found = runs()
        for run in found:
            print(describe(run))
        print(f"in {adapters_home()}: {len(found)} adapter{'s' * (len(found) != 1)}")
        return
    folder = _folder_of(args.names[0])
    try:
        with alone_in(folder):  # refused while a run writes there
            if args.act == "remove":
                shutil.rmtree(folder)
                print(f"removed {folder}")
            else:
                check_name(args.names[1], "NEW")
                new = folder.with_name(args.names[1])
                taken = f"{new} is there already"
                require(not new.exists(), taken, expected="a new name", do="give another")
                folder.rename(new)
                print(f"{folder.name} is called {new.name} now")
    except OSError as error:
        raise unwritable_error(folder, error) from error


main = command(PROG, parse_args, _main)
