"""`python -m perf.predict`: what streams should bring on M1 to M5. Predictions, not measurements.

Tokens per call come from a result of `ssmlx.calibrate`, seconds from the roofline that section
4.1.2 of the paper argues from. A forward reads its weights and multiplies them with R rows. It
takes at least as long as the memory needs for the bytes, and the lanes for the arithmetic:

    seconds >= max(bytes / bandwidth, 2 * R * weights / peak)

Plain decoding has one row, and waits for memory; a tree's rows ride on the same bytes. Each
speed-up is a range of two bounds: `repeated`, weights come from memory as often as MLX's kernel
asks for them, to `once`. Launching kernels, building graphs, unpacking weights, norms and softmax
are left out, so small models stay below what is said here. For models other than the one that was
calibrated, its tokens per call are an assumption, and said to be one.

Bandwidth and GPU cores are Apple's, of each chip's largest form, read in reports of its
announcements. Apple publishes no GPU clock: clocks are those that hmc-tech.com lists, and
`clock_from` names the chip whose clock stands in where none was found. Floating-point rates
follow as cores * 128 lanes * 2 * clock, in float32 and float16 alike; for M1 and M2 that gives
the 2.6 and 3.6 TFLOPS that Apple did publish. What M5's neural accelerators add to matrix
products is not published as a rate ("over 4x" of M4's peak for AI), and is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ssmlx.calibration.choice import PricedShape, best
from ssmlx.commands.calibrate import results_dir
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import publish
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.settings import from_json, read_json
from ssmlx.tuning.cost import DraftShape, StepCosts, Surface
from ssmlx.tuning.report import Columns, finish, new_figure, table

from .run.options import add_out
from .run.results import reading

PROG = "perf.predict"
CALIBRATION = "calibrate-sql.json"
Result = Mapping[str, Any]
LABEL = "PREDICTION from published figures, not measured on any of these chips"
COLOURS = ("#0b6e4f", "#33658a", "#b06f10")
CAPTION = (
    "Bars run from weights that come from memory as often as MLX's quantised kernels ask for them "
    "to weights that come once, each with its fastest tree. Launches, unpacking and graph building "
    "are left out: small models fall short of this."
)
Bound = Literal["once", "repeated"]
Matrix = tuple[int, int]
"""(inner, outer) of a product x @ W.T, x of [R, inner]."""
GROUP = 64
ROWS = tuple(range(1, 65))
_FAR = 8192

LANES = 128
QMV_TILE = 5
"""Rows that M3 and later multiply with a weight they have read once (qmv_wide)."""
QMM_TILE = 32
"""Rows of a tile of the matrix kernel."""

_M1 = ((2048, 14), (4096, 10), (0, 6))
_M3 = ((2048, 13), (4096, 15), (0, 13))
_M5 = ((2048, 33), (4096, 25), (0, 13))
_ULTRA = ((2048, 32), (4096, 18), (0, 12))
_LIMITS = {1: _M1, 2: _M1, 3: _M3, 4: _M3, 5: _M5}


@dataclass(frozen=True)
class Chip:
    """A chip."""

    name: str  # such as "M2 Pro"
    generation: int  # 1 to 5
    gpu_cores: int  # of its largest form
    bandwidth: float  # of its memory, GB/s
    clock: int  # of its GPU, MHz
    clock_from: str = ""  # the chip whose clock that is, where its own was not found

    @property
    def tflops(self) -> float:
        """Peak of its ordinary lanes, 10^12 operations a second."""
        return self.gpu_cores * LANES * 2 * self.clock / 1e6

    def matrix_rows(self, inner: int, outer: int) -> int:
        """Rows from which on a quantised product is left to the matrix kernel.

        As `get_qmv_batch_limit` of MLX 0.32 has it, for transposed weights [outer, inner].
        """
        # MLX takes an Ultra for one of two dies.
        limits = _ULTRA if self.name.endswith("Ultra") else _LIMITS[self.generation]
        for size, rows in limits:
            if not size or (inner <= size and outer <= size):
                return rows
        raise AssertionError("the last limit holds for every size")

    def weight_passes(self, rows: int, inner: int, outer: int) -> int:
        """How often the kernel that MLX takes asks for each quantised weight.

        Caches may answer all but the first time.
        """
        if rows >= self.matrix_rows(inner, outer):
            return ceil(rows / QMM_TILE)
        return ceil(rows / QMV_TILE) if self.generation >= 3 else rows

    def seconds(self, read: float, operations: float) -> float:
        """At least, for so many bytes from memory and floating-point operations."""
        return max(read / (self.bandwidth * 1e9), operations / (self.tflops * 1e12))


CHIPS = (
    Chip("M1", 1, 8, 68.25, 1278),
    Chip("M1 Pro", 1, 16, 200, 1290, "M1 Ultra"),
    Chip("M1 Max", 1, 32, 400, 1290, "M1 Ultra"),
    Chip("M1 Ultra", 1, 64, 800, 1290),
    Chip("M2", 2, 10, 100, 1398),
    Chip("M2 Pro", 2, 19, 200, 1398, "M2 Max"),
    Chip("M2 Max", 2, 38, 400, 1398),
    Chip("M2 Ultra", 2, 76, 800, 1398, "M2 Max"),
    Chip("M3", 3, 10, 100, 1398),
    Chip("M3 Pro", 3, 18, 150, 1398),
    Chip("M3 Max", 3, 40, 400, 1398),
    Chip("M3 Ultra", 3, 80, 819, 1398, "M3 Max"),
    Chip("M4", 4, 10, 120, 1470),
    Chip("M4 Pro", 4, 20, 273, 1470),
    Chip("M4 Max", 4, 40, 546, 1678),
    Chip("M5", 5, 10, 153, 1740),
    Chip("M5 Pro", 5, 20, 307, 1740, "M5"),
    Chip("M5 Max", 5, 40, 614, 1740, "M5"),
)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder of regular layers, in numbers."""

    name: str
    # hidden, heads, kv_heads, inner, layers, vocab: its sizes
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    vocab: int
    # of a weight; 16 is not quantised. Quantised ones come with a scale and a bias of 16 bits for
    # every `GROUP`.
    bits: int = 16
    msa_layers: int = 0  # Ns, the top layers through which streams run
    num_streams: int = 0  # G
    draft_vocab: int = 0  # tokens that streams draft from

    @property
    def weight_bytes(self) -> float:
        """Of one weight, its share of scales and biases included."""
        return self.bits / 8 + (4 / GROUP if self.bits < 16 else 0)

    @property
    def layer(self) -> tuple[Matrix, ...]:
        """The products of a layer."""
        keys = self.kv_heads * self.hidden // self.heads
        attention = (self.hidden, self.hidden), (self.hidden, keys), (self.hidden, keys)
        ends = (self.hidden, self.hidden), (self.inner, self.hidden)
        return (*attention, *ends, (self.hidden, self.inner), (self.hidden, self.inner))

    def drafting(self, streams: Result) -> Decoder:
        """With streams in as large a share of its layers as those of an adapter's settings."""
        share = streams["num_msa_layers"] / streams["num_layers"]
        return replace(
            self,
            msa_layers=max(1, round(self.layers * share)),
            num_streams=streams["num_streams"],
            draft_vocab=min(streams["draft_vocab_size"] or self.vocab, self.vocab),
        )


MODELS = (
    Decoder(
        name="smollm2-135m", hidden=576, heads=9, kv_heads=3, inner=1536, layers=30, vocab=49152
    ),
    Decoder(
        name="llama-3.2-1b", hidden=2048, heads=32, kv_heads=8, inner=8192, layers=16, vocab=128256
    ),
    Decoder(
        name="llama-3.1-8b", hidden=4096, heads=32, kv_heads=8, inner=14336, layers=32, vocab=128256
    ),
)


def product_seconds(decoder: Decoder, chip: Chip, bound: Bound, matrix: Matrix, rows: int) -> float:
    """One product of `rows` rows."""
    inner, outer = matrix
    once = bound == "once" or decoder.bits == 16
    passes = 1 if once else chip.weight_passes(rows, inner, outer)
    return chip.seconds(passes * inner * outer * decoder.weight_bytes, 2.0 * rows * inner * outer)


def layer_seconds(decoder: Decoder, chip: Chip, bound: Bound, rows: int, context: int) -> float:
    """A layer on `rows` rows behind `context` tokens, each product after the other."""
    products = sum(product_seconds(decoder, chip, bound, one, rows) for one in decoder.layer)
    keys_and_values = 2 * context * decoder.kv_heads * decoder.hidden // decoder.heads
    attended = 4.0 * rows * context * decoder.hidden
    return products + chip.seconds(2 * keys_and_values, attended)  # of 16 bits


def costs(decoder: Decoder, chip: Chip, bound: Bound) -> StepCosts:
    """What steps would cost at least, in the form that measured costs have."""
    upper, streams = decoder.msa_layers, decoder.num_streams

    def head(vocab: int, rows: Sequence[int]) -> Surface:
        matrix = (decoder.hidden, vocab)
        return Surface.of(
            {(row, 0): product_seconds(decoder, chip, bound, matrix, row) for row in rows}
        )

    def run(layers: int, rows: Sequence[int], more: float = 0.0) -> Surface:
        return Surface.of(
            {
                (row, at): layers * layer_seconds(decoder, chip, bound, row, at) + more
                for row in rows
                for at in (0, _FAR)
            }
        )

    whole_head = head(decoder.vocab, ROWS)
    return StepCosts(
        plain=run(decoder.layers, [1], whole_head.at(1)),
        lower=run(decoder.layers - upper, ROWS),
        upper=run(upper, ROWS),
        fused=run(upper, [row * (1 + streams) for row in ROWS]),
        head=whole_head,
        draft_head=head(decoder.draft_vocab, range(1, streams + 1)),
        early_exit=whole_head,
    )


def predict(
    decoder: Decoder, chip: Chip, ways: Sequence[tuple[DraftShape, float]], context: float
) -> dict[str, Any]:
    """What the fastest of `ways`, shapes and their tokens per call, brings: JSON values.

    `low` and `high` are speed-ups with weights read `repeated`ly and `once`, `plain` the most
    tokens/s of plain decoding.
    """

    def fastest(bound: Bound) -> PricedShape:
        least = costs(decoder, chip, bound)
        return best([PricedShape.of(shape, tokens, least, context) for shape, tokens in ways])

    low, high = fastest("repeated"), fastest("once")
    return {
        "chip": asdict(chip),
        "model": decoder.name,
        "bits": decoder.bits,
        "plain": 1 / high.plain_seconds,
        "low": low.speedup,
        "high": high.speedup,
        "low_shape": asdict(low.shape),
        "high_shape": asdict(high.shape),
        "tflops": chip.tflops,
    }


def lines_of(predictions: Sequence[Result]) -> list[str]:
    """A line for every chip."""

    def chip(one: Result) -> str:
        clock = one["chip"]["clock_from"]
        return one["chip"]["name"] + (f" (clock of {clock})" if clock else "")

    def both(what: str) -> Callable[[Result], str]:
        def cell(one: Result) -> str:
            shapes = (from_json(DraftShape, one[f"{bound}_shape"]) for bound in ("low", "high"))
            return " to ".join(dict.fromkeys(str(getattr(shape, what)) for shape in shapes))

        return cell

    columns: Columns = {
        "chip": chip,
        "GB/s": lambda one: f"{one['chip']['bandwidth']:g}",
        "TFLOPS": lambda one: f"{one['tflops']:.1f}",
        "plain tokens/s, at most": lambda one: f"{one['plain']:.0f}",
        "speed-up": lambda one: f"{one['low']:.2f} to {one['high']:.2f}",
        "tree, N": both("num_nodes"),
        "schedule": both("stream_schedule"),
    }
    return table(columns, predictions)


def report(calibrated: Result, groups: Mapping[str, Sequence[Result]]) -> str:
    """All predictions as text."""
    parts = [LABEL]
    for name, predictions in groups.items():
        bits = predictions[0]["bits"]
        stored = f"{bits}-bit weights" if bits < 16 else "16-bit weights, not quantised"
        own = name == calibrated["model"].removesuffix("-q4_1")
        source = f"as calibrated with adapter {calibrated['adapter']}"
        source += "" if own else ", an ASSUMPTION for this model"
        title = f"{name}, {stored}; tokens per call {source}; behind {calibrated['context']} tokens"
        parts.append("\n".join([title, *lines_of(predictions)]))
    return "\n\n".join(parts)


def draw(groups: Mapping[str, Sequence[Result]], path: Path) -> None:
    """A bar for every chip and model."""
    figure = new_figure(9.6, 6.4)
    axes = figure.subplots()
    height = 0.8 / len(groups)
    for index, (name, predictions) in enumerate(groups.items()):
        places, colour = np.arange(len(CHIPS)) + index * height, COLOURS[index]
        low = np.array([one["low"] for one in predictions])
        high = np.array([one["high"] for one in predictions])
        title = f"{name}, {predictions[0]['bits']} bits"
        axes.barh(places, high - low, left=low, height=0.85 * height, color=colour, label=title)
        axes.plot(high, places, "|", color=colour, ms=5)
    middles = np.arange(len(CHIPS)) + 0.4 - height / 2
    axes.set_yticks(middles, [chip.name for chip in CHIPS], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#2b2d42", lw=0.8, ls=":")
    axes.set(xlabel="predicted speed-up over plain decoding", xlim=(0, None))
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.set_title(LABEL, fontsize=9)
    finish(figure, CAPTION, path)


def _main(args: argparse.Namespace) -> None:
    require(
        args.calibration.is_file(),
        f"no calibration {args.calibration}",
        expected="a result of ssmlx.calibrate",
        do="run python -m ssmlx.calibrate --adapter sql, or give --calibration FILE",
    )
    calibrated: Result = read_json(args.calibration, "a result of ssmlx.calibrate")
    groups: dict[str, list[Result]] = {}
    with reading(args.calibration, "ssmlx.calibrate"):
        ways = [
            (from_json(DraftShape, one["shape"]), float(one["tokens_per_call"]))
            for one in calibrated["candidates"]
        ]
        context = float(calibrated["context"])
        for model in MODELS:
            decoder = replace(model, bits=args.bits).drafting(calibrated["streams"])
            groups[model.name] = [predict(decoder, chip, ways, context) for chip in CHIPS]
        text = report(calibrated, groups)
    make_folder(args.out)
    values = [one for group in groups.values() for one in group]
    result = {"label": LABEL, "calibration": args.calibration.name, "predictions": values}
    publish(result, args.out / "predict", text, lambda _, path: draw(groups, path))


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
        "--bits", type=int, choices=(4, 8, 16), default=4, help="of a weight (default: 4)"
    )
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
