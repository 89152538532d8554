"""Figures 4, 5 and 9b of the paper, ours beside what its text gives in numbers.

Ours are drawn from the results of perf.compare (and, for figure 5, of perf.quality with --trees
and --with-mlx-lm). Figures 6 and 9a come from `python -m perf.paper.ablation draw`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import InputError
from ssmlx.loading.files import make_folder

from ..run.common import RESULTS, ROOT
from .figure_pictures import draw_parity, draw_sampling, draw_trees
from .figure_points import parity_points, read_results, sampling_curves, tree_curves

PROG = "perf.paper.figures"
CAPTION_4 = (
    "Lines: eq. 6 as in the paper, C_ss = C_target, whose curves are this formula's. Diamonds: "
    "eq. 6 with our gamma and the time of our streams' calls. Bars: 95 % intervals over prompts."
)
CAPTION_5 = (
    "Ours with 95 % intervals over prompts. The paper (gamma = 3) gives no numbers for its curves, "
    "only that the speed-up rises with k, falls again as calls become compute-bound, and that "
    "pruning helps at larger k; its axis runs from 1 to 2."
)
CAPTION_9B = (
    "Ours with 95 % intervals over prompts. The paper (OPT-1.3b, E2E-NLG) gives no numbers for "
    "its curves, only that speed-ups fall as k grows and that its streams stay ahead of Medusa; "
    "the marks at the left are its greedy figures for the same model and task, from table 1."
)


def command_4() -> str:
    """What measures the points of figure 4."""
    return (
        "python -m perf.compare --task sql --draft-model MODEL --systems streams draft-model "
        f"--out {shown(RESULTS / 'figure-4')}"
    )


def command_5() -> str:
    """What measures the curves of figure 5."""
    systems = [
        f'"streams --num-streams 3 --tree full --tree-width {width}{prune}"'
        for prune in ("", " --prune threshold")
        for width in range(1, 7)
    ]
    return (
        "python -m perf.compare --task sql --systems "
        + " ".join(systems)
        + f" --out {shown(RESULTS / 'figure-5')}"
    )


def command_9b() -> str:
    """What measures the curves of figure 9b."""
    return (
        "for k in 10 20 30 40 50; do python -m perf.compare --task e2e --adapter e2e=FOLDER "
        "--medusa e2e=FOLDER --systems streams medusa --temp 1 --top-k $k "
        f"--out {shown(RESULTS)}/top-k-$k; done"
    )


def shown(path: Path) -> str:
    """A path of the checkout, as seen from there."""
    return path.relative_to(ROOT).as_posix()


def draw_all(folders: Sequence[Path], wanted: Sequence[str], out: Path) -> list[str]:
    """Draw the figures that are wanted; what to run for those that nothing was measured for.

    Raises:
        InputError: a result is broken.
    """
    compared = read_results(folders, "compare.json", "tasks")
    rated = read_results(folders, "quality-*.json", "systems")
    figures: dict[str, tuple[Any, Callable[[Any, str, Path], None], str, Callable[[], str]]] = {
        "4": (parity_points(compared), draw_parity, CAPTION_4, command_4),
        "5": (tree_curves(compared, rated), draw_trees, CAPTION_5, command_5),
        "9b": (sampling_curves(compared), draw_sampling, CAPTION_9B, command_9b),
    }
    missing = []
    for name in wanted:
        points, draw, caption, command = figures[name]
        if not points:
            missing.append(f"figure {name}: nothing of ours yet; run\n  {command()}")
            caption += " Ours: not measured yet."
        path = out / f"figure-{name}.png"
        draw(points, caption, path)
        print(path)
    return missing


def _main(args: argparse.Namespace) -> int:
    folders = [RESULTS] if args.results is None else args.results
    for folder in args.results or ():
        if not folder.is_dir():
            raise InputError(
                f"--results {folder} is no folder",
                expected="folders with compare.json or quality-TASK.json in or below them",
                do="check the path",
            )
    make_folder(args.out)
    try:
        missing = draw_all(folders, args.figures, args.out)
    except ImportError as error:
        raise InputError(
            "matplotlib is not installed", expected="it", do="pip install matplotlib"
        ) from error
    for line in missing:
        print(line, file=sys.stderr)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    parser.add_argument(
        "--figures", nargs="+", choices=("4", "5", "9b"), default=["4", "5", "9b"],
        help="which to draw (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="FOLDER",
        help="where results are, in these folders and below (default: perf/results)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=ROOT / "perf" / "figures", metavar="FOLDER",
        help="for figure-4.png and so on (default: perf/figures)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
