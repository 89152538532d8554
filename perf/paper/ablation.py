"""`python -m perf.paper.ablation`: figures 6 and 9a of the paper, in tokens per target call.

`train` runs `convert.train` over the layers with multi-stream attention, with stream embeddings
and with value rotation, and over the rank of f (eq. 3); `draw` shows what the runs came to.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convert import train as trainer
from convert.reference.format import ADAPTER_WEIGHTS
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.train_options import train_config
from ssmlx.errors import InputError
from ssmlx.loading.files import make_folder
from ssmlx.tuning.report import write_result

from ..run.common import RESULTS, ROOT
from .ablation_report import VARIED, draw, read_run, read_runs, settings_of, table

PROG = "perf.paper.ablation"
EPILOG = """examples:
  python -m perf.paper.ablation train --data data/sql --out runs/ablation --epochs 1
  python -m perf.paper.ablation draw --runs runs/ablation

Options that `train` does not know go to every run of convert.train. The same command again goes
on with the run that was stopped, and skips those that are finished."""


def variants(args: argparse.Namespace) -> dict[str, list[str]]:
    """The options that tell the runs apart, by name."""
    runs, identity = {}, ["--stream-init", "identity"]
    for count in args.layers:
        runs[f"embeddings-{count}"] = ["--num-msa-layers", str(count), *identity]
    for count in args.layers:
        rotation = ["--stream-design", "value_rotation", "--rotation-step", str(args.rotation_step)]
        runs[f"rotation-{count}"] = ["--num-msa-layers", str(count), *rotation, *identity]
    for rank in args.ranks:
        f = ["--stream-init", "low_rank", "--stream-init-rank", str(rank)]
        runs[f"rank-{rank}"] = ["--num-msa-layers", str(args.rank_layers), *f]
    return runs


def commands(args: argparse.Namespace, shared: list[str]) -> dict[Path, list[str]]:
    """The options of every run by its folder, checked.

    Raises:
        InputError: an option makes no sense, or is one of those that tell the runs apart.
    """
    needed = ["--data", "", "--out", ""]
    given, default = trainer.parse_args([*needed, *shared]), trainer.parse_args(needed)
    for name in VARIED:
        if getattr(given, name) != getattr(default, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} for every run", expected="what varies", do=f"drop {flag}")
    found = {}
    for name, own in variants(args).items():
        folder = args.out / name
        found[folder] = ["--data", str(args.data), "--out", str(folder), *shared, *own]
        train_config(trainer.parse_args(found[folder]))
    return found


def is_done(folder: Path, options: Sequence[str]) -> bool:
    """Whether this very run has ended; convert.train itself refuses other settings."""
    if not (folder / ADAPTER_WEIGHTS).exists():
        return False
    command = " ".join([f"python -m {trainer.PROG}", *options])
    found = read_run(folder)
    return settings_of(folder)["command"] == command and found is not None and found.is_finished


def train(args: argparse.Namespace, shared: list[str]) -> int:
    """Run what is left to run; stops at the first run that fails."""
    for folder, options in commands(args, shared).items():
        if is_done(folder, options):
            print(f"{folder}: finished", file=sys.stderr)
            continue
        print(f"{folder}: training", file=sys.stderr)
        code = subprocess.run([sys.executable, "-m", trainer.PROG, *options]).returncode
        if code:
            return code
        for path in folder.glob(f"{trainer.STORE_FILE}*"):
            path.unlink()  # gigabytes, of no more use
    return 0


def show(args: argparse.Namespace) -> int:
    """Print the table; write it, the JSON and the picture."""
    runs, shared = read_runs(args.runs)
    for path in (args.results, args.out.parent):
        make_folder(path)
    result = {"shared": shared, "runs": [asdict(one) for one in runs]}
    write_result(result, args.results / "ablation", table(runs))
    try:
        draw(runs, shared, args.runs.resolve().name, args.out)
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
    return 0


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="run the variants", allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    for flag, default, text in (
        ("--layers", [2, 4, 8, 16], "Ns of the runs of both designs"),
        ("--ranks", [8, 32, 128], "eta of the runs with f of eq. 3"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(
            flag, type=int, nargs="+", default=default, metavar="N",
            help=f"{text} (default: {shown})",
        )  # fmt: skip
    parser.add_argument(
        "--rank-layers", type=int, default=8, metavar="N",
        help="Ns of the runs with f (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rotation-step", type=float, default=0.2, metavar="X",
        help="epsilon of eq. 7, radians (default: %(default)s)",
    )  # fmt: skip


def _add_draw(commands: Any) -> None:
    parser = commands.add_parser("draw", help="show what the runs came to", allow_abbrev=False)
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "perf" / "figures" / "ablation.png", metavar="FILE",
        help="the picture (default: perf/figures/ablation.png)",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER",
        help="for ablation.json and ablation.txt (default: perf/results)",
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands)
    _add_draw(commands)
    args, shared = parser.parse_known_args(argv)
    if args.command == "train":
        return run(lambda: train(args, shared), PROG)
    if shared:
        parser.error(f"unrecognized arguments: {' '.join(shared)}")
    return run(lambda: show(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
