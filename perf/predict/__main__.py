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
from pathlib import Path
from typing import Any, get_args

from ssmlx.calibration.choice import PricedShape, best
from ssmlx.commands.calibrate import results_dir
from ssmlx.commands.options import make_parser, run
from ssmlx.errors import InputError
from ssmlx.loading.files import make_folder
from ssmlx.settings import from_json, read_json
from ssmlx.tuning.cost import DraftShape
from ssmlx.tuning.report import aligned, write_result

from ..run.common import RESULTS
from .chips import CHIPS, Chip
from .pictures import draw_roofline, draw_speedups
from .roofline import Bound, Decoder, costs

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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What streams should bring to a model on a chip.

    Attributes:
        chip, model, bits: of what.
        plain: most tokens/s of plain decoding.
        low, high: speed-up over it, weights read `repeated`ly and `once`.
        low_shape, high_shape: the fastest way to draft in either case.
    """

    chip: Chip
    model: str
    bits: int
    plain: float
    low: float
    high: float
    low_shape: DraftShape
    high_shape: DraftShape

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "tflops": self.chip.tflops}


def decoder_of(name: str, config: Mapping[str, Any], bits: int, streams: Mapping[str, Any]) -> Any:
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
    found: dict[Bound, PricedShape] = {}
    for bound in get_args(Bound):
        least = costs(decoder, chip, bound)
        found[bound] = best(
            [PricedShape.of(shape, tokens, least, context) for shape, tokens in ways]
        )
    low, high = found["repeated"], found["once"]
    return Prediction(
        chip=chip,
        model=decoder.name,
        bits=decoder.bits,
        plain=1 / high.plain_seconds,
        low=low.speedup,
        high=high.speedup,
        low_shape=low.shape,
        high_shape=high.shape,
    )


def ways_of(calibrated: Result) -> list[tuple[DraftShape, float]]:
    """Every shape that was tried, with its tokens per call."""
    return [
        (from_json(DraftShape, one["shape"]), float(one["tokens_per_call"]))
        for one in calibrated["candidates"]
    ]


def table(predictions: Sequence[Prediction]) -> list[str]:
    """A line for every chip."""
    head = ["chip", "GB/s", "TFLOPS", "plain tokens/s, at most", "speed-up", "tree, N", "schedule"]
    rows = []
    for one in predictions:
        shapes = (one.low_shape, one.high_shape)
        sizes = dict.fromkeys(str(shape.num_nodes) for shape in shapes)
        schedules = dict.fromkeys(shape.stream_schedule for shape in shapes)
        clock = f" (clock of {one.chip.clock_from})" if one.chip.clock_from else ""
        rows.append(
            [
                one.chip.name + clock,
                f"{one.chip.bandwidth:g}",
                f"{one.chip.tflops:.1f}",
                f"{one.plain:.0f}",
                f"{one.low:.2f} to {one.high:.2f}",
                " to ".join(sizes),
                " to ".join(schedules),
            ]
        )
    return aligned([head, *rows])


def report(calibrated: Result, groups: Mapping[str, Sequence[Prediction]]) -> str:
    """All predictions as text."""
    parts = [LABEL]
    for name, predictions in groups.items():
        bits = predictions[0].bits
        stored = f"{bits}-bit weights" if bits < 16 else "16-bit weights, not quantised"
        own = name == calibrated["model"].removesuffix("-q4_1")
        source = f"as calibrated with adapter {calibrated['adapter']}"
        source += "" if own else ", an ASSUMPTION for this model"
        title = f"{name}, {stored}; tokens per call {source}; behind {calibrated['context']} tokens"
        parts.append("\n".join([title, *table(predictions)]))
    return "\n\n".join(parts)


def read_calibration(path: Path) -> Result:
    """A result of `ssmlx.calibrate`.

    Raises:
        InputError: it is missing or something else.
    """
    if not path.is_file():
        raise InputError(
            f"no calibration {path}",
            expected="a result of ssmlx.calibrate",
            do="run python -m ssmlx.calibrate --adapter sql, or give --calibration FILE",
        )
    result = read_json(path, "a result of ssmlx.calibrate")
    try:
        assert ways_of(result)
        for name in ("num_streams", "num_msa_layers", "num_layers", "draft_vocab_size"):
            int(result["streams"][name])
        str(result["model"]), str(result["adapter"]), float(result["context"])
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise InputError(
            f"{path} is no whole result of ssmlx.calibrate ({type(error).__name__}: {error})",
            expected="one of this version",
            do="calibrate again",
        ) from error
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
        if missing:
            raise InputError(
                f"{folder / 'config.json'} lacks {', '.join(missing)}",
                expected="the settings of a decoder, under Hugging Face's names",
                do="give another --config",
            )
        models[folder.resolve().name] = config
    return models


def _main(args: argparse.Namespace) -> int:
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
    write_result(result, args.out / "predict", report(calibrated, groups))
    chip = next(one for one in CHIPS if one.name == args.chip)
    nodes = next(one for one in groups[decoders[-1].name] if one.chip == chip).high_shape.num_nodes
    try:
        draw_speedups(groups, LABEL, args.out / "predict.png")
        half = replace(decoders[-1], bits=16)
        draw_roofline(half, chip, nodes, args.out / "figure-3.png")
    except ImportError as error:
        raise InputError(
            "matplotlib is not installed", expected="it", do="pip install matplotlib"
        ) from error
    return 0


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
