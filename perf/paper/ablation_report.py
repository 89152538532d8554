"""What `perf.paper.ablation` shows: a table and a picture of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError
from ssmlx.settings import read_json
from ssmlx.training.config import TrainConfig
from ssmlx.training.job import SETTINGS_FILE
from ssmlx.training.record import LOG_FILE, read_record
from ssmlx.tuning.report import aligned

VARIED = ("num_msa_layers", "stream_design", "rotation_step", "stream_init", "stream_init_rank")
COLOURS = {"embeddings": "#0b6e4f", "value_rotation": "#b06f10"}
LABELS = {"embeddings": "stream embeddings", "value_rotation": "value rotation"}


@dataclass(frozen=True)
class Run:
    """What a run came to, at its last validation.

    Attributes:
        name: of its folder.
        design: what tells its streams apart.
        num_layers: Ns.
        rank: eta, the rank of f; 0 for identity.
        step, num_steps: where the validation was, and where the run ends.
        tokens_per_call: of held-out text, replayed.
        losses: of held-out text, in nats a token.
    """

    name: str
    design: str
    num_layers: int
    rank: int
    step: int
    num_steps: int
    tokens_per_call: float
    losses: Mapping[str, float]

    @property
    def is_finished(self) -> bool:
        """Whether the validation is the run's last."""
        return self.step >= self.num_steps


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings that a run was started with."""
    return read_json(folder / SETTINGS_FILE, "a run's settings")


def read_run(folder: Path) -> Run | None:
    """A run at its last validation; None where there was none yet."""
    entries = [entry for entry in read_record(folder / LOG_FILE) if "tokens_per_call" in entry]
    if not entries:
        return None
    settings, last = settings_of(folder), entries[-1]
    config = TrainConfig.from_dict(settings["train"])
    return Run(
        folder.name,
        config.stream_design,
        config.num_msa_layers,
        config.stream_init_rank or 0,
        last["step"],
        config.num_steps(settings["examples"]),
        last["tokens_per_call"],
        {
            name.removeprefix("valid_").removesuffix("_loss"): value
            for name, value in last.items()
            if name.startswith("valid_") and name.endswith("_loss")
        },
    )


def sharedsettings_of(folders: Iterable[Path]) -> dict[str, Any]:
    """What the runs have in common: all but what varies.

    Raises:
        InputError: they cannot be compared.
    """
    first: tuple[str, dict[str, Any]] | None = None
    for folder in folders:
        values = settings_of(folder)
        train = {k: v for k, v in values["train"].items() if k not in VARIED}
        shared = {"examples": values["examples"], **train}
        first = first or (folder.name, shared)
        odd = [name for name in shared if shared[name] != first[1].get(name)]
        if odd:
            raise InputError(
                f"{folder.name} and {first[0]} differ in {', '.join(odd)}",
                expected="runs of one ablation",
                do="move the others elsewhere",
            )
    return first[1] if first else {}


def read_runs(folder: Path) -> tuple[list[Run], dict[str, Any]]:
    """Every run that was validated, and what they have in common.

    Raises:
        InputError: none is finished, or they cannot be compared.
    """
    folders = sorted(path.parent for path in folder.glob(f"*/{SETTINGS_FILE}"))
    runs = [found for path in folders if (found := read_run(path)) is not None]
    if not any(one.is_finished for one in runs):
        raise InputError(
            f"no finished run in {folder}",
            expected="the --out of `python -m perf.paper.ablation train`",
            do="train first",
        )
    runs.sort(key=lambda one: (one.design, one.rank, one.num_layers))
    return runs, sharedsettings_of(folders)


def table(runs: Sequence[Run]) -> str:
    """A line for each run."""
    names = list(dict.fromkeys(name for one in runs for name in one.losses))
    head = ["run", "streams", "Ns", "f", "tokens/call", *(f"{name} loss" for name in names)]
    lines = [
        [
            one.name + ("" if one.is_finished else f" (step {one.step} of {one.num_steps})"),
            LABELS[one.design],
            str(one.num_layers),
            f"rank {one.rank}" if one.rank else "identity",
            f"{one.tokens_per_call:.3f}",
            *(f"{one.losses[name]:.3f}" if name in one.losses else "-" for name in names),
        ]
        for one in runs
    ]
    return "\n".join(aligned([head, *lines]))


def _line(axes: Any, points: Mapping[int, float], *, above: bool = True, **style: Any) -> None:
    axes.plot(list(points), list(points.values()), marker="o", **style)
    for x, y in points.items():
        axes.annotate(f"{y:.2f}", (x, y), (0, 7 if above else -15), textcoords="offset points",
                      ha="center", fontsize=8, color=style["color"])  # fmt: skip


def _finish(axes: Any, places: Iterable[int], label: str) -> None:
    ticks = sorted(set(places))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.margins(0.12, 0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if ticks:
        axes.legend(frameon=False, fontsize=8)


def draw_layers(axes: Any, runs: Sequence[Run]) -> None:
    """Tokens per call against Ns, as figure 9a is laid out."""
    for design, label in LABELS.items():
        points = {
            r.num_layers: r.tokens_per_call for r in runs if (r.design, r.rank) == (design, 0)
        }
        if points:
            _line(axes, points, above=design == "embeddings", label=label, color=COLOURS[design])
    places = [one.num_layers for one in runs if not one.rank]
    _finish(axes, places, "layers with multi-stream attention, Ns")
    axes.set_ylabel("tokens per target call")


def draw_ranks(axes: Any, runs: Sequence[Run]) -> None:
    """Tokens per call against eta, beside f as identity on the same layers."""
    with_rank = [one for one in runs if one.rank]
    for count in sorted({one.num_layers for one in with_rank}):
        points = {r.rank: r.tokens_per_call for r in with_rank if r.num_layers == count}
        _line(axes, points, label=f"f of rank η, Ns = {count}", color="#33658a")
        for one in runs:
            if (one.design, one.num_layers, one.rank) == ("embeddings", count, 0):
                axes.axhline(one.tokens_per_call, ls="--", lw=1.2, color=COLOURS["embeddings"],
                             label=f"f = identity, Ns = {count}")  # fmt: skip
    _finish(axes, [one.rank for one in with_rank], "rank η of f")


def draw(runs: Sequence[Run], shared: Mapping[str, Any], title: str, path: Path) -> None:
    """The picture of the runs that are finished."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    finished = [one for one in runs if one.is_finished]
    draw_layers(left, finished)
    draw_ranks(right, finished)
    figure.suptitle(
        f"{title}: {shared['examples']:,} examples, epochs: {shared['epochs']:g}, "
        f"{shared['num_streams']} streams; held-out text, replayed",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
