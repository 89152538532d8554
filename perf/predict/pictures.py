"""The pictures of `perf.predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ssmlx.tuning.report import new_figure

from ..paper.figure_pictures import finish
from ..run.pictures import PAPER_COLOUR
from .chips import Chip
from .roofline import Decoder, Work, call_work

COLOURS = ("#0b6e4f", "#33658a", "#b06f10", "#7b5ea7")
GAMMA = 4
OPT: dict[str, Any] = {
    "head_size": 64, "vocab": 50272, "msa_layers": 4, "num_streams": 4, "draft_vocab": 50272,
    "bits": 16, "is_gated": False,
}  # fmt: skip
OPT_TARGET = Decoder(
    name="OPT-1.3b", hidden=2048, heads=32, kv_heads=32, inner=8192, layers=24, **OPT
)
OPT_DRAFT = Decoder(
    name="OPT-125m", hidden=768, heads=12, kv_heads=12, inner=3072, layers=12, **OPT
)
CAPTION_3 = (
    "PREDICTION, memory and arithmetic alone. Left: what the chip can reach at so many operations "
    "a byte, and forwards on so many rows, 16-bit weights read once. Right: the argument of the "
    "paper's figure 3 (OPT-1.3b; the draft model is OPT-125m, gamma = 4; the paper gives no "
    "numbers for its bars): memory and lanes in use over the calls of one step, streams' own rows "
    "left out."
)
CAPTION_SPEED = (
    "Bars run from weights that come from memory as often as MLX's quantised kernels ask for them "
    "to weights that come once, each with its fastest tree. Launches, unpacking and graph building "
    "are left out: small models fall short of this."
)


@dataclass(frozen=True)
class Use:
    """How much of a chip is in use, from 0 to 1, over the calls of a step."""

    name: str
    memory: float
    lanes: float


def draw_speedups(groups: Mapping[str, Sequence[Any]], label: str, path: Path) -> None:
    """A bar for every chip and model."""
    figure = new_figure(9.6, 6.4)
    axes = figure.subplots()
    height = 0.8 / len(groups)
    for index, ((name, predictions), colour) in enumerate(
        zip(groups.items(), cycle(COLOURS), strict=False)
    ):
        places = np.arange(len(predictions)) + index * height
        low = np.array([one.low for one in predictions])
        high = np.array([one.high for one in predictions])
        title = f"{name}, {predictions[0].bits} bits"
        axes.barh(places, high - low, left=low, height=0.85 * height, color=colour, label=title)
        axes.plot(high, places, "|", color=colour, ms=5)
    first = next(iter(groups.values()))
    axes.set_yticks(
        np.arange(len(first)) + 0.4 - height / 2, [one.chip.name for one in first], fontsize=8
    )
    axes.invert_yaxis()
    axes.axvline(1.0, color="#2b2d42", lw=0.8, ls=":")
    axes.set(xlabel="predicted speed-up over plain decoding", xlim=(0, None))
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.set_title(label, fontsize=9)
    finish(figure, CAPTION_SPEED, path)


def draw_roofline(decoder: Decoder, chip: Chip, nodes: int, path: Path) -> None:
    """A chip's roofline with forwards on it, and figure 3 of the paper beside it."""
    figure = new_figure(10.4, 4.8)
    left, right = figure.subplots(1, 2)
    draw_roof(left, decoder, chip, nodes)
    draw_use(right, uses(chip, nodes), chip)
    finish(figure, CAPTION_3, path)


def draw_roof(axes: Any, decoder: Decoder, chip: Chip, nodes: int) -> None:
    """Reachable rate against operations a byte."""
    intensity = np.logspace(-1, 3, 200)
    axes.loglog(intensity, np.minimum(intensity * chip.bandwidth / 1e3, chip.tflops),
                color="#2b2d42", lw=1.4)  # fmt: skip
    for rows, text in ((1, "plain: 1 row"), (nodes, f"streams: {nodes} nodes"), (64, "64 rows")):
        work = call_work(decoder, rows)
        rate = work.operations / work.seconds(chip) / 1e12
        axes.plot(work.intensity, rate, "o", color="#0b6e4f")
        axes.annotate(text, (work.intensity, rate), (6, -12), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    axes.set(xlabel="operations a byte of weights", ylabel="reachable TFLOPS")
    axes.set_title(f"{decoder.name} on {chip.name}: {chip.bandwidth:g} GB/s, "
                   f"{chip.tflops:.1f} TFLOPS", fontsize=9)  # fmt: skip


def uses(chip: Chip, nodes: int) -> list[Use]:
    """The methods of figure 3 that the roofline tells apart."""
    streams = [call_work(OPT_TARGET, nodes)]
    two_models = [*[call_work(OPT_DRAFT, 1)] * GAMMA, call_work(OPT_TARGET, GAMMA + 1)]
    steps = {
        "plain decoding": [call_work(OPT_TARGET, 1)],
        f"draft model, {GAMMA} calls\nand a verification": two_models,
        f"speculative streaming,\n{nodes} nodes": streams,
    }
    return [_use(name, calls, chip) for name, calls in steps.items()]


def _use(name: str, calls: Sequence[Work], chip: Chip) -> Use:
    seconds = sum(one.seconds(chip) for one in calls)
    memory = sum(one.read for one in calls) / (chip.bandwidth * 1e9)
    lanes = sum(one.operations for one in calls) / (chip.tflops * 1e12)
    return Use(name, memory / seconds, lanes / seconds)


def draw_use(axes: Any, found: Sequence[Use], chip: Chip) -> None:
    """Bars of memory and lanes in use."""
    places = np.arange(len(found))
    for shift, values, colour, label in (
        (-0.2, [one.memory for one in found], PAPER_COLOUR, "memory"),
        (0.2, [one.lanes for one in found], "#0b6e4f", "lanes (kernel)"),
    ):
        bars = axes.bar(places + shift, [100 * one for one in values], 0.38, color=colour,
                        label=label)  # fmt: skip
        axes.bar_label(bars, fmt="%.0f %%", fontsize=8)
    axes.set_xticks(places, [one.name for one in found], fontsize=8)
    axes.set(ylabel="in use, %", ylim=(0, 125))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    axes.set_title(f"OPT-1.3b on {chip.name}", fontsize=9)
