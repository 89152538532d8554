"""`python -m perf.predict`: what streams should bring on M1 to M5. Predictions, not measured.

Tokens per call are those that an adapter tells of itself, costs what others published of rows,
launches and bandwidth: `ssmlx/tuning/chips.py` and its table, each figure with its source. A
speed-up is told for the tree that is best by the middle of what was published, and ranges from the
dearest rows to the cheapest. For models other than the adapter's own, its tokens per call are an
assumption, and said to be one.

Beside them stands how far this can be trusted: speed-ups and rates of others' programs, as they
published them and as the same table predicts them, with their own measurements and without.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

from ssmlx.tuning.chips import CHIPS, Bound, Chip, Decoder, costs
from ssmlx.tuning.cost import DraftShape
from ssmlx.tuning.ladder import USUAL_CONTEXT, shapes, tokens_of

from ssmlx.calibration.choice import PricedShape, best
from ssmlx.commands.options import add_options, make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.report import Columns, table
from ssmlx.settings import StreamConfig
from ssmlx.training.sizing import Plan, choose_sizes, expected_rates, predicted
from ssmlx.tuning import chips

from .run.options import adapter_with_streams, add_out

PROG = "perf.predict"
Result = Mapping[str, Any]
LABEL = "PREDICTION from published figures, not measured on any of these chips"
ON = [chip for chip in CHIPS.values() if chip.name.startswith("M")]

MODELS = (
    Decoder("smollm2-135m", 576, 9, 3, 64, 1536, 30, 49152),
    Decoder("llama-3.2-3b", 3072, 24, 8, 128, 8192, 28, 128256),
    Decoder("llama-3.1-8b", 4096, 32, 8, 128, 14336, 32, 128256),
)
QWEN = Decoder("qwen3-4b", 2560, 32, 8, 128, 9728, 36, 151936)
ADAPTED = (MODELS[1], Decoder("qwen3-8b", 4096, 32, 8, 128, 12288, 36, 151936))
ADAPTED_ON = ("M2", "M3 Max", "M5", "M5 Max")
ASKED = 60
"""Tokens of a prompt that `ssmlx.adapt` has answered."""


def drafting(decoder: Decoder, streams: StreamConfig) -> Decoder:
    """With streams in as large a share of its layers as those of an adapter."""
    return replace(
        decoder,
        msa_layers=max(1, round(decoder.layers * streams.num_msa_layers / streams.num_layers)),
        num_streams=streams.num_streams,
        draft_vocab=min(streams.draft_vocab_size or decoder.vocab, decoder.vocab),
        window=streams.stream_window,
        is_conditional=streams.condition_rank > 0,
        starts_from_root=streams.root_init_rank > 0,
    )


def predict(
    decoder: Decoder, chip: Chip, ways: Sequence[tuple[DraftShape, float]], context: float
) -> dict[str, Any]:
    """What the best of `ways`, shapes and their tokens per call, brings: JSON values.

    `low`, `middle` and `high` are its speed-ups, `plain` plain decoding's tokens/s.
    """
    middle = costs(decoder, chip)
    found = best([PricedShape.of(shape, tokens, middle, context) for shape, tokens in ways])

    def breakeven(bound: Bound) -> float:
        return costs(decoder, chip, bound).breakeven(found.shape, context)

    return {
        "chip": asdict(chip),
        "model": decoder.name,
        "bits": decoder.bits,
        "plain": 1 / found.plain_seconds,
        "low": found.tokens_per_call / breakeven("high"),
        "middle": found.speedup,
        "high": found.tokens_per_call / breakeven("low"),
        "shape": asdict(found.shape),
        "nodes": found.shape.num_nodes,
    }


def peers() -> list[dict[str, Any]]:
    """Speed-ups that others published, beside what the table predicts for their rows."""
    found = []
    for one in chips.published()["speed_ups"]:
        call = partial(chips.ratio, CHIPS[one["chip"]], one, one["rows"])
        least, most = one["draft"]
        draft = (least + most) / 2
        seconds = {
            "low": call("high") + most,
            "middle": call() + draft,
            "high": call("low") + least,
            "without": call(without=chips.origin(one["source"])) + draft,
        }
        found.append(one | {name: one["tokens"] / each for name, each in seconds.items()})
    return found


def rates() -> list[dict[str, Any]]:
    """Rates of plain decoding that others published, beside what the table predicts."""
    known = {model.name: model for model in (*MODELS, QWEN)}
    found = []
    for one in chips.published()["rates"]:
        plain = costs(replace(known[one["model"]], bits=one["bits"]), CHIPS[one["chip"]])
        found.append(one | {"middle": 1 / plain.plain_seconds(one["context"])})
    return found


def spread(one: Result) -> str:
    """A speed-up with its range."""
    return f"{one['middle']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def error_of(what: str, errors: Iterable[float]) -> str:
    """Errors in a line."""
    sizes = [abs(error) for error in errors]
    median = statistics.median(sizes)
    return f"{what}: {len(sizes)} figures, median error {median:.0%}, largest {max(sizes):.0%}"


def trust() -> list[str]:
    """Published beside predicted, and the errors."""
    told: Columns = {
        "program, model, bits": lambda one: f"{one['name']}, {one['model']}, {one['bits']}",
        "chip": lambda one: one["chip"],
        "rows": lambda one: str(one["rows"]),
        "tokens per call": lambda one: f"{one['tokens']:.2f}",
        "published": lambda one: f"{one['speedup']:.2f}",
        "predicted": spread,
        "without their own figures": lambda one: f"{one['without']:.2f}",
    }
    compared = peers()
    speeds = rates()
    errors = chips.left_out()
    return [
        "What others published, and what this table predicts of it",
        *table(told, compared),
        error_of("speed-ups", (one["middle"] / one["speedup"] - 1 for one in compared)),
        error_of(
            "... without their own", (one["without"] / one["speedup"] - 1 for one in compared)
        ),
        "",
        "Plain decoding, tokens/s",
        *(
            f"{one['chip']}, {one['model']}, {one['bits']} bits: published "
            f"{one['tokens_per_second']:.1f}, predicted {one['middle']:.1f}"
            for one in speeds
        ),
        error_of("rates", (one["middle"] / one["tokens_per_second"] - 1 for one in speeds)),
        "",
        "T(n) / T(1), predicted without its authors' figures",
        *(error_of(name, own) for name, own in errors.items()),
        error_of("all", chain.from_iterable(errors.values())),
    ]


def lines_of(predictions: Sequence[Result]) -> list[str]:
    """A line for every chip."""
    columns: Columns = {
        "chip": lambda one: one["chip"]["name"],
        "GB/s": lambda one: f"{one['chip']['bandwidth']:g}",
        "plain tokens/s": lambda one: f"{one['plain']:.0f}",
        "speed-up": spread,
        "tree, N": lambda one: str(one["nodes"]),
        "streams": lambda one: str(one["shape"]["num_streams"]),
        "schedule": lambda one: one["shape"]["stream_schedule"],
    }
    return table(columns, predictions)


def adapted(decoder: Decoder, chip: Chip, hours: float = 1.0) -> dict[str, Any]:
    """What `ssmlx.adapt` should come to, and in which minutes."""
    sizes = choose_sizes(decoder, chip)
    rates = expected_rates(decoder, chip, sizes)
    plan = Plan.within(hours, rates, ASKED)
    learnt = plan.answers * plan.epochs
    sizes = predicted(decoder, chip, sizes.num_layers, sizes.num_streams, learnt)
    return {
        "model": decoder.name,
        "chip": chip.name,
        **asdict(plan),
        **asdict(sizes),
        "answer_rate": rates.answer,
        "token_ms": 1000 * rates.token,
    }


def adapting(bits: int) -> list[str]:
    """An hour of `ssmlx.adapt`, a line for each chip and model."""
    columns: Columns = {
        "model": lambda one: one["model"],
        "chip": lambda one: one["chip"],
        "layers": lambda one: str(one["num_layers"]),
        "streams": lambda one: str(one["num_streams"]),
        "answers": lambda one: f"{one['answers']:,}",
        "tokens/s": lambda one: f"{one['answer_rate']:.0f}",
        "min": lambda one: f"{one['answer_seconds'] / 60:.0f}",
        "epochs": lambda one: str(one["epochs"]),
        "ms a token": lambda one: f"{one['token_ms']:.2f}",
        "training, min": lambda one: f"{one['train_seconds'] / 60:.0f}",
        "speed-up": spread,
    }
    pairs = [(replace(model, bits=bits), CHIPS[name]) for model in ADAPTED for name in ADAPTED_ON]
    return [
        f"An hour of ssmlx.adapt, {bits}-bit weights",
        *table(columns, [adapted(model, chip) for model, chip in pairs]),
    ]


def report(adapter: str, groups: Mapping[str, Sequence[Result]]) -> str:
    """All predictions as text."""
    parts = [LABEL]
    for name, predictions in groups.items():
        bits = predictions[0]["bits"]
        stored = f"{bits}-bit weights" if bits < 16 else "16-bit weights, not quantised"
        source = f"tokens per call of adapter {adapter}"
        source += "" if name == MODELS[0].name else ", an ASSUMPTION for this model"
        title = f"{name}, {stored}; {source}; behind {USUAL_CONTEXT} tokens"
        parts.append("\n".join([title, *lines_of(predictions)]))
    return "\n\n".join([*parts, "\n".join(adapting(bits)), "\n".join(trust())])


def _main(args: argparse.Namespace) -> None:
    _, adapter = adapter_with_streams(args.adapter)
    streams = adapter.config
    require(
        streams.tokens_per_call is not None,
        f"--adapter {args.adapter} does not say its tokens per call",
        expected="`tokens_per_call` in its streams_config.json",
        do="name one of the bundled adapters",
    )
    ways = [(shape, tokens_of(shape, streams)) for shape in shapes(streams.num_streams)]
    groups = {
        model.name: [
            predict(drafting(replace(model, bits=args.bits), streams), chip, ways, USUAL_CONTEXT)
            for chip in ON
        ]
        for model in MODELS
    }
    make_folder(args.out)
    values = {"predictions": [*chain.from_iterable(groups.values())], "peers": peers()}
    result = {"label": LABEL, "adapter": args.adapter, **values, "rates": rates()}
    write_result(result, args.out / "predict", report(args.adapter, groups))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, __doc__)
    add_options(
        parser,
        ("--adapter", "NAME|FOLDER", "whose tokens per call to take (default: %(default)s)", "sql"),
        ("--bits", None, "of a weight (default: 4)", 4, (4, 8, 16)),
    )
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
