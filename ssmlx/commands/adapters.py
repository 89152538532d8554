"""The adapters command: what `ssmlx.adapt` has made here, renaming it, and deleting it."""

from __future__ import annotations

import argparse
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, one_line, quoted, require, unwritable_error
from ..loading.folders import adapters_home
from ..loading.names import bundled_adapters
from .adapt import require_allowed_adapter_name
from .parser import add_yes_option, make_parser
from .running import confirmed, make_main

if TYPE_CHECKING:
    from ..loading.adapt_runs import StoredRun

PROG = "ssmlx.adapters"
EPILOG = """examples:
  python -m ssmlx.adapters
  python -m ssmlx.adapters remove qwen3-4b-4bit
  python -m ssmlx.adapters rename qwen3-4b-4bit qwen

remove asks before it deletes. Without a terminal to ask on, it needs --yes.

An adapter works with the weights that it was made from, wherever they are stored. Without
--adapter, chat, generate, the engine and the server use the newest one made from their weights."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    text = "List, remove or rename the adapters that ssmlx.adapt has made on this machine."
    usage = "[list | remove NAME [--yes] | rename NAME NEW]"
    parser = make_parser(PROG, text, EPILOG, usage)
    acts = ("list", "remove", "rename")
    parser.add_argument("act", nargs="?", choices=acts, default="list", help="(default: list)")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="name of the adapter; for rename, then the new name",
    )
    add_yes_option(parser)
    args = parser.parse_intermixed_args(argv)
    wanted = {"list": 0, "remove": 1, "rename": 2}[args.act]
    if len(args.names) != wanted:
        names = "1 name" if wanted == 1 else f"{wanted} names"
        parser.error(f"{args.act} takes {names}, got {len(args.names)}")
    return args


def describe_run(run: StoredRun) -> str:
    """One line about a run; the base model's weights are read for their digest."""
    curve = (run.figures.get("figures") or {}).get("tokens_per_call") or {}
    nodes = max(curve, key=curve.__getitem__, default=None)
    if not run.is_finished:
        brings = "unfinished"
    elif nodes is None:
        brings = run.speed_up_text
    else:
        brings = f"{curve[nodes]:.2f} tokens a call with {nodes} nodes, {run.speed_up_text}"
    tuned = "" if run.is_for_base else ", with a LoRA"
    changed = datetime.fromtimestamp(run.changed).isoformat(" ", "minutes")
    base = _describe_base(run)
    return f"{run.name}  {changed}  of {run.model}{tuned} ({base}): {brings}"


def _describe_base(run: StoredRun) -> str:
    from ..loading.identity import stored_weights_digest

    try:
        is_same = stored_weights_digest(run.model_folder) == run.settings["weights"]
    except (InputError, OSError):
        return f"not in {run.model_folder} any more"
    return "here" if is_same else run.why_outdated


def _existing_run_folder(name: str) -> Path:
    """The folder of a run by its name, even of a broken or unfinished one."""
    home = adapters_home()
    # The name is compared with those that are there: a path made of it could lead anywhere.
    names = sorted(one.name for one in home.iterdir() if one.is_dir()) if home.is_dir() else []
    is_bundled = name in bundled_adapters()
    require(
        name in names,
        f"{name} ships with ssmlx" if is_bundled else f"no adapter {name or quoted(name)}",
        expected=f"an adapter made on this machine ({', '.join(names) or 'none yet'})",
        do="see python -m ssmlx.adapters",
    )
    return home / name


def _remove(folder: Path) -> None:
    """Delete a folder; of a link to one, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _rename(folder: Path, name: str) -> None:
    require_allowed_adapter_name(name, "NEW")
    new = folder.with_name(name)
    is_free = not os.path.lexists(new)
    require(is_free, f"{new} already exists", expected="a new name", do="give another")
    folder.rename(new)


def _carry_out(args: argparse.Namespace) -> int:
    """List, remove or rename; the exit code is 1 if the user does not confirm."""
    from ..loading.adapt_runs import read_adapt_runs
    from ..loading.files import locked_folder

    if args.act == "list":
        found = read_adapt_runs()
        for run in found:
            print(one_line(describe_run(run)))
        print(f"in {adapters_home()}: {len(found)} adapter{'s' * (len(found) != 1)}")
        return 0
    folder = _existing_run_folder(args.names[0])
    try:
        with locked_folder(folder):  # refused while a run writes there
            if args.act == "rename":
                _rename(folder, args.names[1])
                print(one_line(f"renamed {folder.name} to {args.names[1]}"))
            elif not confirmed(f"delete {folder} and all that is in it", args):
                return 1
            else:
                _remove(folder)
                print(one_line(f"removed {folder}"))
    except OSError as error:
        raise unwritable_error(folder, error) from error
    return 0


main = make_main(PROG, parse_args, _carry_out)
