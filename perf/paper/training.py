"""What the runs of an ablation came to: figures 6 and 9a of the paper.

They are over the layers with multi-stream attention, with stream embeddings and with value
rotation, and over the rank of f (eq. 3); unfinished ones are shown as far as they came.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import publish
from ssmlx.errors import require
from ssmlx.json_files import read_json
from ssmlx.loading.files import make_folder
from ssmlx.report import Columns, finish, new_figure, table
from ssmlx.training.config import TrainConfig
from ssmlx.training.job import SETTINGS_FILE
from ssmlx.training.record import LOG_FILE, read_record

from ..run.options import add_out

PROG = "perf.paper.training"
EPILOG = """examples:
  train="python -m convert.train --data data/sql --epochs 1 --out runs/ablation"
  for n in 2 4 8 16; do
    $train/embeddings-$n --num-msa-layers $n --stream-init identity
    $train/rotation-$n --num-msa-layers $n --stream-init identity \\
        --stream-design value_rotation --rotation-step 0.2
  done
  for rank in 8 32 128; do
    $train/rank-$rank --num-msa-layers 8 --stream-init low_rank --stream-init-rank $rank
  done
  python -m perf.paper.training --runs runs/ablation

A run that was stopped goes on with the same command."""
VARIED = ("num_msa_layers", "stream_design", "rotation_step", "stream_init", "stream_init_rank")
DESIGNS = {
    "embeddings": ("stream embeddings", "#0b6e4f"),
    "value_rotation": ("value rotation", "#b06f10"),
}


@dataclass(frozen=True)
class TrainedVariant:
    """What a run came to, at its last validation, of held-out text, replayed."""

    name: str
    design: str
    num_layers: int  # Ns
    rank: int  # eta, the rank of f; 0 for identity
    # step and num_steps: where the validation was, and where the run ends
    step: int
    num_steps: int
    tokens_per_call: float
    losses: Mapping[str, float]  # in nats a token

    @property
    def is_finished(self) -> bool:
        return self.step >= self.num_steps


def read_run(folder: Path) -> TrainedVariant | None:
    """A run at its last validation; None where there was none yet."""
    entries = [one for one in read_record(folder / LOG_FILE) if "tokens_per_call" in one]
    if not entries:
        return None
    settings = read_json(folder / SETTINGS_FILE, "a run's settings")
    last = entries[-1]
    config = TrainConfig.from_dict(settings["train"])
    return TrainedVariant(
        name=folder.name,
        design=config.stream_design,
        num_layers=config.num_msa_layers,
        rank=config.stream_init_rank or 0,
        step=last["step"],
        num_steps=config.num_steps(settings["examples"]),
        tokens_per_call=last["tokens_per_call"],
        losses={
            name.removeprefix("valid_").removesuffix("_loss"): value
            for name, value in last.items()
            if name.startswith("valid_") and name.endswith("_loss")
        },
    )


def read_runs(folder: Path) -> tuple[list[TrainedVariant], dict[str, Any]]:
    folders = sorted(path.parent for path in folder.glob(f"*/{SETTINGS_FILE}"))
    runs = [found for path in folders if (found := read_run(path)) is not None]
    what = f"no finished run in {folder}"
    expected = "one folder a run of `python -m convert.train`"
    require(any(one.is_finished for one in runs), what, expected=expected, do="train some first")
    shared: dict[str, Any] = {}
    for path in folders:
        values = read_json(path / SETTINGS_FILE, "a run's settings")
        own = {name: value for name, value in values["train"].items() if name not in VARIED}
        own = {"examples": values["examples"], **own}
        shared = shared or own
        odd = [name for name, value in own.items() if value != shared.get(name)]
        what = f"{path.name} and {folders[0].name} differ in {', '.join(odd)}"
        require(not odd, what, expected="runs of one ablation", do="move the others elsewhere")
    runs.sort(key=lambda one: (one.design, one.rank, one.num_layers))
    return runs, shared


def ablation_report(runs: Sequence[TrainedVariant]) -> str:
    def loss(name: str) -> Callable[[TrainedVariant], str]:
        return lambda one: f"{one.losses[name]:.3f}" if name in one.losses else "-"

    names = dict.fromkeys(name for one in runs for name in one.losses)
    columns: Columns = {
        "run": lambda one: (
            one.name + ("" if one.is_finished else f" (step {one.step} of {one.num_steps})")
        ),
        "streams": lambda one: DESIGNS[one.design][0],
        "Ns": lambda one: str(one.num_layers),
        "f": lambda one: f"rank {one.rank}" if one.rank else "identity",
        "tokens/call": lambda one: f"{one.tokens_per_call:.3f}",
        **{f"{name} loss": loss(name) for name in names},
    }
    return "\n".join(table(columns, runs))


def draw_ablation(
    runs: Sequence[TrainedVariant], shared: Mapping[str, Any], title: str, path: Path
) -> None:
    """The picture of the runs that are finished: tokens per call against Ns, as figure 9a is laid
    out, and against eta, beside f as identity on the same layers."""
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    finished = [one for one in runs if one.is_finished]
    plain, with_rank = ([r for r in finished if bool(r.rank) == ranked] for ranked in (False, True))
    for design, (label, colour) in DESIGNS.items():
        points = {r.num_layers: r.tokens_per_call for r in plain if r.design == design}
        if points:
            _line(left, points, above=design == "embeddings", label=label, color=colour)
    _label(left, [one.num_layers for one in plain], "layers with multi-stream attention, Ns")
    left.set_ylabel("tokens per target call")
    for count in sorted({one.num_layers for one in with_rank}):
        points = {r.rank: r.tokens_per_call for r in with_rank if r.num_layers == count}
        _line(right, points, label=f"f of rank η, Ns = {count}", color="#33658a")
        for one in plain:
            if (one.design, one.num_layers) == ("embeddings", count):
                right.axhline(
                    one.tokens_per_call,
                    ls="--",
                    lw=1.2,
                    color="#0b6e4f",
                    label=f"f = identity, Ns = {count}",
                )
    _label(right, [one.rank for one in with_rank], "rank η of f")
    figure.suptitle(
        f"{title}: {shared['examples']:,} examples, epochs: {shared['epochs']:g}, "
        f"{shared['num_streams']} streams; held-out text, replayed",
        fontsize=9,
    )
    finish(figure, "", path)


def _line(axes: Any, points: Mapping[int, float], *, above: bool = True, **style: Any) -> None:
    axes.plot(list(points), list(points.values()), marker="o", **style)
    for x, y in points.items():
        axes.annotate(
            f"{y:.2f}",
            (x, y),
            (0, 7 if above else -15),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=style["color"],
        )


def _label(axes: Any, places: Iterable[int], label: str) -> None:
    ticks = sorted(set(places))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.margins(0.12, 0.15)
    if ticks:
        axes.legend(frameon=False, fontsize=8)


def show(args: argparse.Namespace) -> None:
    runs, shared = read_runs(args.runs)
    make_folder(args.out)
    title = args.runs.resolve().name
    result = {"shared": shared, "runs": [asdict(r) for r in runs]}
    publish(
        result,
        args.out / "ablation",
        ablation_report(runs),
        lambda _, path: draw_ablation(runs, shared, title, path),
    )


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER")
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: show(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
