"""`python -m perf.predict`: what streams should bring on M1 to M5. Predictions, not measurements.

Tokens per call come from a result of `ssmlx.calibrate`, bandwidth and peak rates from what is
published of the chips, seconds from the roofline between them (section 4.1.2 of the paper). Each
speed-up is a range: weights that come from memory as often as MLX's kernels ask for them, to
weights that come once. For models other than the one that was calibrated, its tokens per call
are an assumption, and said to be one. Writes JSON and two pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ssmlx.calibration.choice import PricedShape, best
from ssmlx.commands.calibrate import results_dir
from ssmlx.commands.options import make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.settings import from_json, read_json
from ssmlx.tuning.cost import DraftShape
from ssmlx.tuning.report import Columns, finish, new_figure, publish, table

from ..run.results import RESULTS, reading
from ..run.show import PAPER_COLOUR
from .roofline import CHIPS, Bound, Chip, Decoder, Work, call_work, costs

PROG = "perf.predict"
CALIBRATION = "calibrate-sql.json"
Result = Mapping[str, Any]
MODELS: dict[str, dict[str, int]] = {
    "smollm2-135m": {
        "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    },
}  # fmt: skip
LABEL = "PREDICTION from published figures, not measured on any of these chips"
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
class Prediction:
    """What streams should bring to a model on a chip.

    Attributes:
        low, high: the fastest way to draft, weights read `repeated`ly and `once`.
    """

    chip: Chip
    decoder: Decoder
    low: PricedShape
    high: PricedShape

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `plain` is the most tokens/s of plain decoding."""
        return {
            "chip": asdict(self.chip),
            "model": self.decoder.name,
            "bits": self.decoder.bits,
            "plain": 1 / self.high.plain_seconds,
            "low": self.low.speedup,
            "high": self.high.speedup,
            "low_shape": asdict(self.low.shape),
            "high_shape": asdict(self.high.shape),
            "tflops": self.chip.tflops,
        }


def decoder_of(name: str, config: Mapping[str, Any], bits: int, streams: Result) -> Decoder:
    """A model with streams in as large a share of its layers as the calibrated adapter has."""
    layers, share = config["num_hidden_layers"], streams["num_msa_layers"] / streams["num_layers"]
    vocab = int(config["vocab_size"])
    return Decoder.of(
        name,
        config,
        bits=bits,
        num_streams=streams["num_streams"],
        msa_layers=max(1, round(layers * share)),
        draft_vocab=min(streams["draft_vocab_size"] or vocab, vocab),
    )


def predict(
    decoder: Decoder, chip: Chip, ways: Sequence[tuple[DraftShape, float]], context: float
) -> Prediction:
    """The fastest of `ways`, shapes and their tokens per call, under both bounds."""

    def fastest(bound: Bound) -> PricedShape:
        least = costs(decoder, chip, bound)
        return best([PricedShape.of(shape, tokens, least, context) for shape, tokens in ways])

    return Prediction(chip, decoder, fastest("repeated"), fastest("once"))


def ways_of(calibrated: Result) -> list[tuple[DraftShape, float]]:
    """Every shape that was tried, with its tokens per call."""
    return [
        (from_json(DraftShape, one["shape"]), float(one["tokens_per_call"]))
        for one in calibrated["candidates"]
    ]


def lines_of(predictions: Sequence[Prediction]) -> list[str]:
    """A line for every chip."""
    columns: Columns = {
        "chip": lambda one: (
            one.chip.name + (f" (clock of {one.chip.clock_from})" if one.chip.clock_from else "")
        ),
        "GB/s": lambda one: f"{one.chip.bandwidth:g}",
        "TFLOPS": lambda one: f"{one.chip.tflops:.1f}",
        "plain tokens/s, at most": lambda one: f"{1 / one.high.plain_seconds:.0f}",
        "speed-up": lambda one: f"{one.low.speedup:.2f} to {one.high.speedup:.2f}",
        "tree, N": lambda one: _range(one.low.shape.num_nodes, one.high.shape.num_nodes),
        "schedule": lambda one: _range(
            one.low.shape.stream_schedule, one.high.shape.stream_schedule
        ),
    }
    return table(columns, predictions)


def _range(low: object, high: object) -> str:
    return str(low) if low == high else f"{low} to {high}"


def report(calibrated: Result, groups: Mapping[str, Sequence[Prediction]]) -> str:
    """All predictions as text."""
    parts = [LABEL]
    for name, predictions in groups.items():
        bits = predictions[0].decoder.bits
        stored = f"{bits}-bit weights" if bits < 16 else "16-bit weights, not quantised"
        own = name == calibrated["model"].removesuffix("-q4_1")
        source = f"as calibrated with adapter {calibrated['adapter']}"
        source += "" if own else ", an ASSUMPTION for this model"
        title = f"{name}, {stored}; tokens per call {source}; behind {calibrated['context']} tokens"
        parts.append("\n".join([title, *lines_of(predictions)]))
    return "\n\n".join(parts)


def draw_speedups(groups: Mapping[str, Sequence[Prediction]], label: str, path: Path) -> None:
    """A bar for every chip and model."""
    figure = new_figure(9.6, 6.4)
    axes = figure.subplots()
    height = 0.8 / len(groups)
    for index, ((name, predictions), colour) in enumerate(
        zip(groups.items(), cycle(COLOURS), strict=False)
    ):
        places = np.arange(len(predictions)) + index * height
        low = np.array([one.low.speedup for one in predictions])
        high = np.array([one.high.speedup for one in predictions])
        title = f"{name}, {predictions[0].decoder.bits} bits"
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


def uses(chip: Chip, nodes: int) -> dict[str, tuple[float, float]]:
    """How much of memory and lanes is in use over the calls of a step, from 0 to 1, by the methods
    of figure 3 that the roofline tells apart."""
    two_models = [*[call_work(OPT_DRAFT, 1)] * GAMMA, call_work(OPT_TARGET, GAMMA + 1)]
    steps = {
        "plain decoding": [call_work(OPT_TARGET, 1)],
        f"draft model, {GAMMA} calls\nand a verification": two_models,
        f"speculative streaming,\n{nodes} nodes": [call_work(OPT_TARGET, nodes)],
    }
    found = {}
    for name, calls in steps.items():
        seconds, work = sum(one.seconds(chip) for one in calls), sum(calls, Work(0, 0))
        memory, lanes = work.read / (chip.bandwidth * 1e9), work.operations / (chip.tflops * 1e12)
        found[name] = memory / seconds, lanes / seconds
    return found


def draw_use(axes: Any, found: Mapping[str, tuple[float, float]], chip: Chip) -> None:
    """Bars of memory and lanes in use."""
    places = np.arange(len(found))
    for column, (label, colour) in enumerate(
        (("memory", PAPER_COLOUR), ("lanes (kernel)", COLOURS[0]))
    ):
        shares = [100 * one[column] for one in found.values()]
        bars = axes.bar(places + 0.4 * column - 0.2, shares, 0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f %%", fontsize=8)
    axes.set_xticks(places, list(found), fontsize=8)
    axes.set(ylabel="in use, %", ylim=(0, 125))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    axes.set_title(f"OPT-1.3b on {chip.name}", fontsize=9)


def read_calibration(path: Path) -> Result:
    """A result of `ssmlx.calibrate`.

    Raises:
        InputError: it is missing or something else.
    """
    require(
        path.is_file(),
        f"no calibration {path}",
        expected="a result of ssmlx.calibrate",
        do="run python -m ssmlx.calibrate --adapter sql, or give --calibration FILE",
    )
    result = read_json(path, "a result of ssmlx.calibrate")
    with reading(path, "ssmlx.calibrate"):
        ways_of(result)[0]
        for name in ("num_streams", "num_msa_layers", "num_layers", "draft_vocab_size"):
            int(result["streams"][name])
        str(result["model"]), str(result["adapter"]), float(result["context"])
    return result


def read_models(args: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """The models to predict for, by name.

    Raises:
        InputError: a folder's settings are not those of a decoder.
    """
    models: dict[str, Mapping[str, Any]] = {name: MODELS[name] for name in args.models}
    for folder in args.config:
        config = read_json(folder / "config.json", "a model's settings")
        missing = [name for name in MODELS["smollm2-135m"] if not isinstance(config.get(name), int)]
        require(
            not missing,
            f"{folder / 'config.json'} lacks {', '.join(missing)}",
            expected="the settings of a decoder, under Hugging Face's names",
            do="give another --config",
        )
        models[folder.resolve().name] = config
    return models


def _main(args: argparse.Namespace) -> None:
    calibrated = read_calibration(args.calibration)
    models = read_models(args)
    make_folder(args.out)
    ways, streams = ways_of(calibrated), calibrated["streams"]
    decoders = [decoder_of(name, config, args.bits, streams) for name, config in models.items()]
    groups = {
        decoder.name: [predict(decoder, chip, ways, calibrated["context"]) for chip in CHIPS]
        for decoder in decoders
    }
    values = [one.to_dict() for group in groups.values() for one in group]
    result = {"label": LABEL, "calibration": args.calibration.name, "predictions": values}
    chip = next(one for one in CHIPS if one.name == args.chip)
    nodes = next(one for one in groups[decoders[-1].name] if one.chip == chip).high.shape.num_nodes

    def draw(_: Result, path: Path) -> None:
        draw_speedups(groups, LABEL, path)
        draw_roofline(replace(decoders[-1], bits=16), chip, nodes, args.out / "figure-3.png")

    publish(result, args.out / "predict", report(calibrated, groups), draw)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    parser.add_argument(
        "--calibration", type=Path, default=results_dir() / CALIBRATION, metavar="FILE.json",
        help="a result of ssmlx.calibrate, for tokens per call (default: "
        f"calibration/{CALIBRATION} in the cache folder)",
    )  # fmt: skip
    parser.add_argument(
        "--models", nargs="*", choices=tuple(MODELS), default=list(MODELS),
        help="models whose sizes are known here (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, nargs="*", default=[], metavar="FOLDER",
        help="and models by their config.json",
    )  # fmt: skip
    parser.add_argument(
        "--bits", type=int, choices=(4, 8, 16), default=4, help="of a weight (default: 4)"
    )
    parser.add_argument(
        "--chip", choices=[chip.name for chip in CHIPS], default="M4",
        help="whose roofline is drawn (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER",
        help="for predict.json, .txt, .png and figure-3.png (default: perf/results)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if not args.models and not args.config:
        parser.error("--models and --config name no model")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
