"""Chooses the streams for a model, and how many answers fit into the hours, as measured here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import InputError, require
from ..generation.head_start import time_costs
from ..generation.learned import learned_of
from ..json_files import read_json
from ..loading.adapt_runs import StoredRun
from ..loading.attach import attach_adapter
from ..loading.folders import CONFIG_FILE
from ..loading.lora_files import Loras
from ..model.backbone import Backbone
from ..model.streams import StreamFusedModel
from ..policy.costs import ROWS
from ..settings import StreamConfig
from .batch_responder import BatchResponder, NumberedPrompt
from .config import RunOptions, TrainConfig
from .data import Example, collate
from .job import make_stream_config
from .mlx_model import TrainedModel, new_adapter
from .mlx_trainer import MlxObjective, MlxTrainer
from .objective import Validation

NUM_STREAMS = 4
# Shares of the layers that may have streams, and the share of accepted drafts that remains with
# them on SmolLM2-135M: perf/figures/ablation.png.
LAYER_SHARES: Mapping[float, float] = {2 / 30: 0.75, 4 / 30: 0.82, 8 / 30: 1.0}
TIMED_SIZES = (2, 4, 8, 16)  # nodes of the trees whose calls are timed
# Tokens per call of the adapter `chat` by nodes, on held-out answers. They only decide between
# geometries: forecasts use the adapter's own figures.
_USUAL_TOKENS: Mapping[int, float] = {2: 1.59, 4: 1.98, 8: 2.28, 16: 2.5}
_TIMED_CONTEXT = 128
# Cost of a draft vocabulary's head in plain calls, if nothing was timed; about as on
# SmolLM2-135M.
_DRAFT_HEAD_COST = 0.05
RESERVE = 0.12  # share of the time kept in reserve for underestimates
MOST_VALIDATIONS = 10  # of a round's training, each with a forecast of its speed-up
_LEAST_VALIDATIONS = 2
_VALIDATION_SHARE = 0.15  # of the hours that validations may take, if that leaves the least
# At least this share of the hours goes to answers and training, and of the passes over the answers:
# less would not pay for the run's other work.
_LEAST_SHARE = 0.5
_QUESTION_SHARE = 0.15  # share of the answers' time for the model's own questions
_USUAL_SHARE = 0.75  # usual length of an answer, as a share of its maximum
_MOST_EPOCHS = 3
_BATCHES = (16, 8, 4, 2, 1)
_ANSWERS_AT_ONCE = (32, 16, 8, 4, 1)
_PROBED = (1, 3)
_PROBED_TOKENS = 16
_WEIGHTS_SHARE = 2 / 3
_MEMORY_SHARE = 0.7  # of the machine's, by default

StepCosts = Mapping[int, float]  # by n: cost of a call with n nodes, in plain calls


def stream_train_config(num_layers: int, **more: Any) -> TrainConfig:
    """How `ssmlx.adapt` trains streams in the top `num_layers` layers."""
    return TrainConfig(
        num_streams=NUM_STREAMS,
        num_msa_layers=num_layers,
        adapter_scope="streams",
        condition_rank=64,
        stream_weights=(1.0,),
        schedule="cosine",
        learning_rate=1e-3,
        prune_rank=0,
        **more,
    )


def candidate_layers(num_layers: int) -> dict[int, float]:
    """For each number of top layers with streams: the share of accepted drafts that remains."""
    return {max(1, round(share * num_layers)): kept for share, kept in LAYER_SHARES.items()}


def time_candidate_streams(
    backbone: Backbone,
    base: dict[str, Any],  # as `read_base_settings` gives it
    options: RunOptions,
    tokens: Sequence[int],  # a text, whose first 128 tokens are the context of the calls
    *,
    seconds: float,  # for each number of layers
    lora: Loras | None = None,  # on every row of the model
) -> dict[int, StepCosts]:
    """Time calls with untrained streams: training does not change what a call costs.

    The costs are written to this machine's cost tables: of adapters of these sizes, if answers have
    not taught them yet; and of the base model, for `forecast_speedup_of_adapting`.
    """
    found: dict[int, StepCosts] = {}
    for num_layers in candidate_layers(base["num_hidden_layers"]):
        train = stream_train_config(num_layers).with_default_draft_vocab_size(base["vocab_size"])
        config = make_stream_config(train, base, options, [])
        adapter = new_adapter(
            backbone.clone_sharing_weights(), config, train, _placeholder_vocab(train), lora
        )
        model = attach_adapter(backbone, adapter, merge_lora=True)
        text = tokens[:_TIMED_CONTEXT]
        found[num_layers] = time_costs(model, text, TIMED_SIZES, seconds=seconds)
    learned, _ = learned_of(StreamFusedModel(backbone))
    for num_layers, costs in found.items():
        learned.costs.set_head_start(
            {(_untrained_cost_name(num_layers), n): cost for n, cost in costs.items()}
        )
    learned.keep(at_once=True)
    return found


def _untrained_cost_name(num_layers: int) -> str:
    """The name in the base model's cost table."""
    return f"untrained streams in {num_layers} layers"


def forecast_speedup_of_adapting(base_model: StreamFusedModel) -> float | None:
    """Forecast by timed calls of untrained streams, or by costs of rows; None without either."""
    frozen = learned_of(base_model)[0].costs.frozen(0)
    known = frozen.known
    rows = {n for name, n in known if name == ROWS and n in TIMED_SIZES}
    speeds = []
    depth = len(base_model.backbone.layers)
    for num_layers, kept in candidate_layers(depth).items():
        name = _untrained_cost_name(num_layers)
        costs = {n: calls for (one, n), (calls, _) in known.items() if one == name}
        if not costs and rows:
            # Streams run through the top layers in their own pass, after the rows.
            second = num_layers / depth * frozen.calls((ROWS, 1 + NUM_STREAMS)) + _DRAFT_HEAD_COST
            costs = {n: frozen.calls((ROWS, n)) + second for n in rows}
        if costs:
            speeds.append(_expected_speedup(costs, kept))
    return max(speeds, default=None)


def forecast_unfinished_run_speedup(run: StoredRun) -> float | None:
    """Forecast by recorded tokens per call and the run's timed costs; None if either is missing."""
    try:
        values = read_json(run.adapter / CONFIG_FILE, "the settings of an adapter")
        curve = {int(n): float(tokens) for n, tokens in values["tokens_per_call"].items()}
        costs = {int(n): float(cost) for n, cost in run.plan["step_costs"].items()}
        return fastest_tree({n: cost for n, cost in costs.items() if n in curve}, curve)[1]
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return None


def choose_layers(costs: Mapping[int, StepCosts], num_layers: int) -> int:
    kept = candidate_layers(num_layers)
    return max(costs, key=lambda layers: _expected_speedup(costs[layers], kept[layers]))


def _expected_speedup(costs: StepCosts, kept: float) -> float:
    """Speed-up over plain decoding, if `kept` times as many drafts are accepted as `chat`'s."""
    return fastest_tree(costs, {n: 1 + kept * (one - 1) for n, one in _USUAL_TOKENS.items()})[1]


def fastest_tree(costs: StepCosts, tokens_per_call: Mapping[int, float]) -> tuple[int, float]:
    """The fastest tree's nodes, and its speed as a multiple of plain decoding's."""
    speeds = {n: tokens_per_call[n] / cost for n, cost in costs.items()}
    nodes = max(speeds, key=speeds.__getitem__)
    return nodes, speeds[nodes]


def _placeholder_vocab(train: TrainConfig) -> np.ndarray | None:
    """Any draft vocabulary of the right size: which tokens it has does not change times."""
    size = train.draft_vocab_size
    return np.arange(size, dtype=np.int32) if size else None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured on this machine: seconds, batch sizes and memory of answers and training."""

    answer_tokens_per_second: float  # of all simultaneous answers together
    train_seconds_per_token: float  # of learning a token of an answer
    frozen_seconds_per_token: float  # of the layers below the streams'
    batch_size: int  # examples per step, as many as fit into memory
    answers_at_once: int
    memory: int  # most bytes that all this takes
    prompt_seconds_per_token: float = 0.0  # of reading a prompt
    call_seconds: float = 0.0  # of a plain call of one text
    validate_seconds: float = 0.0  # per held-out answer and validation


def default_memory_bytes() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(_MEMORY_SHARE * whole)


def choose_frozen_dtype(path: Path, settings: Mapping[str, Any], most_bytes: int) -> str:
    """Choose a dtype for `load`: "auto", dequantized on the CPU, or "stored", quantized."""
    # MLX's CPU backend multiplies quantized weights slowly: they are dequantized if there is room.
    bits = (settings.get("quantization") or {}).get("bits", 16)
    stored = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    return "auto" if stored * 32 / bits <= _WEIGHTS_SHARE * most_bytes else "stored"


def measure_rates(
    backbone: Backbone,
    config: StreamConfig,
    train: TrainConfig,
    responder: BatchResponder,  # answers with the same model, `lora` on it
    prompt_tokens: int,  # of the longest prompt
    answer_tokens: int,  # of the longest answer
    most_bytes: int,  # peak of MLX's memory
    lora: Loras | None = None,
) -> Rates:
    """Measure on random texts of the longest prompt and answer."""
    rng = np.random.default_rng(train.seed)
    # Counts tokens that streams learn, which are nearly all of an answer's.
    known = train.draft_vocab_size or backbone.vocab_size
    tokens = rng.integers(0, known, prompt_tokens + answer_tokens).astype(np.int32)
    prompt = tokens[:prompt_tokens].tolist()
    timed = _time_answers(responder, prompt, answer_tokens, most_bytes)
    twin = backbone.clone_sharing_weights()
    vocab = _placeholder_vocab(train)
    model = TrainedModel(twin, new_adapter(twin, config, train, vocab, lora))
    objective = MlxObjective(model, train, vocab)
    trainer = MlxTrainer(objective, 100)
    peaks = {}
    for count in _PROBED:
        batch = collate([Example(tokens, prompt_tokens)] * count, np.arange(count))
        with _measure() as frozen:
            states = objective.lower(batch)
        with _measure() as step:
            trainer.advance(batch, states)
        peaks[count] = step.peak
    most_probed = _PROBED[-1]
    batch_size, for_steps = _largest_fitting_batch(_BATCHES, peaks, most_bytes, "training")
    one = collate([Example(tokens, prompt_tokens)], np.arange(1))
    validation = Validation(objective, [one], TIMED_SIZES[-1], TIMED_SIZES[-1])
    with _measure() as validated:
        validation.measure()
        validation.tokens_per_call_by_tree_size(TIMED_SIZES)
    return Rates(
        answer_tokens_per_second=timed.tokens_per_second,
        train_seconds_per_token=step.seconds / most_probed / answer_tokens,
        frozen_seconds_per_token=frozen.seconds / most_probed / len(tokens),
        batch_size=batch_size,
        answers_at_once=timed.at_once,
        memory=max(timed.memory, for_steps),
        prompt_seconds_per_token=timed.prompt_seconds / len(prompt),
        call_seconds=timed.call_seconds,
        validate_seconds=validated.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class _AnswerTimes:
    """How fast a model answers, with how many simultaneous answers, and in how much memory."""

    at_once: int  # number of simultaneous answers
    tokens_per_second: float  # of all these, after their prompts
    memory: int  # bytes for all these
    prompt_seconds: float  # of reading one of the longest prompts
    call_seconds: float  # of a plain call of one text


def _time_answers(
    responder: BatchResponder,
    prompt: list[int],  # of the longest length
    answer_tokens: int,  # of the longest answer
    most_bytes: int,
) -> _AnswerTimes:
    """Time 16 sampled tokens of each answer, after the prompt's last 8 tokens."""
    # The first calls take longer.
    list(responder.stream_answers([NumberedPrompt(0, prompt[-8:])], 2))
    peaks = {}
    seconds = {}
    # Measure memory and a prompt's time with 1 and 3 answers of a tenth of the longest one.
    length = max(1, answer_tokens // 10)
    for count in _PROBED:
        texts = [NumberedPrompt(number, prompt) for number in range(count)]
        with _measure() as prompts:
            list(replace(responder, batch_size=count).stream_answers(texts, length))
        peaks[count] = prompts.peak
        seconds[count] = prompts.seconds
    at_once, memory = _largest_fitting_batch(_ANSWERS_AT_ONCE, peaks, most_bytes, "answering")
    texts = [NumberedPrompt(number, prompt[-8:], 1.0) for number in range(at_once)]
    with _measure() as spent:
        found = list(replace(responder, batch_size=at_once).stream_answers(texts, _PROBED_TOKENS))
    few, many = _PROBED
    # Texts share their calls, which take about the same time; the rest is their prompts'.
    of_prompt = min(max(0.0, (seconds[many] - seconds[few]) / (many - few)), seconds[few])
    return _AnswerTimes(
        at_once=at_once,
        tokens_per_second=sum(len(answer) for _, answer in found) / spent.seconds,
        memory=memory,
        prompt_seconds=of_prompt,
        call_seconds=(seconds[few] - of_prompt) / length,
    )


@dataclass
class _Usage:
    """Seconds and memory of a block, see `_measure`."""

    seconds: float = 0.0
    peak: int = 0  # bytes


@contextmanager
def _measure() -> Iterator[_Usage]:
    """Measure the block's seconds and peak, set at its end; frees MLX's unused buffers first."""
    spent = _Usage()
    start = time.perf_counter()
    mx.clear_cache()
    mx.reset_peak_memory()
    yield spent
    spent.seconds = time.perf_counter() - start
    spent.peak = mx.get_peak_memory()


class _FittingBatch(NamedTuple):
    """The number of texts in a batch, and the bytes that it should take."""

    size: int
    num_bytes: int


def _largest_fitting_batch(
    sizes: Sequence[int],  # the largest first
    peaks: Mapping[int, int],  # measured bytes by batch size, of exactly two, the smaller first
    most_bytes: int,
    what: str,  # what such batches do, for the message
) -> _FittingBatch:
    """Choose the largest batch that fits, by a line through two measured sizes."""
    (low, few), (high, many) = peaks.items()
    used = {size: int(few + (many - few) * (size - low) / (high - low)) for size in sizes}
    fitting = [size for size in sizes if used[size] <= most_bytes]
    require(
        bool(fitting),
        f"{what} takes {min(used.values()) / 2**30:.1f} GiB",
        expected=f"at most {most_bytes / 2**30:.1f}",
        do="raise --memory-gb, or choose a smaller --model",
    )
    return _FittingBatch(fitting[0], used[fitting[0]])


@dataclass(frozen=True, kw_only=True)
class Round:
    """How many answers a round makes, how often it trains on them, and how long it should take."""

    hours: float  # earlier rounds included
    answers: int  # earlier rounds included
    epochs: float
    answer_seconds: float
    train_seconds: float
    validations: int = MOST_VALIDATIONS
    other_seconds: float = 0.0  # of validations, and of the figures at the end
    spent_before: float = 0.0  # seconds that the run had taken when this round was planned

    @property
    def seconds(self) -> float:
        return self.answer_seconds + self.train_seconds + self.other_seconds


def plan_round(
    hours: float,  # in total; only hours beyond the previous round's are planned
    rates: Rates,
    prompt_tokens: int,  # of a usual prompt
    answer_tokens: int,  # of the longest answer
    before: Round | None = None,  # the previous round, whose answers are trained on again
    *,
    held_out: int = 0,  # number of answers in each validation
    check_seconds: float = 0.0,  # that the check of the finished adapter takes
    spent_seconds: float = 0.0,  # that the run has taken so far
) -> Round:
    """Plan how many new answers, and how many passes over all answers, fit into the hours.

    The longer making an answer takes beside a pass over it, the more passes, 1 to 3.
    """
    old = before.answers if before else 0
    tokens = _USUAL_SHARE * answer_tokens
    make_seconds = (1 + _QUESTION_SHARE) * tokens / rates.answer_tokens_per_second
    make_seconds += rates.prompt_seconds_per_token * prompt_tokens
    frozen_seconds = rates.frozen_seconds_per_token * (prompt_tokens + tokens)
    pass_seconds = rates.train_seconds_per_token * tokens
    epochs = min(_MOST_EPOCHS, max(1, round(make_seconds / pass_seconds)))
    train_seconds = frozen_seconds + epochs * pass_seconds
    given = 3600 * (hours - (before.hours if before else 0.0))
    each = held_out * rates.validate_seconds
    fitting = int(_VALIDATION_SHARE * given / each) if each else MOST_VALIDATIONS
    validations = min(MOST_VALIDATIONS, max(_LEAST_VALIDATIONS, fitting))
    # One more is before the first step.
    other_seconds = (1 + validations) * each + check_seconds
    # A first round has spent this time on measuring.
    left = given - other_seconds - (0.0 if before else spent_seconds)
    seconds = (1 - RESERVE) * max(left, _LEAST_SHARE * given)
    new = max(0, int((seconds - old * train_seconds) / (make_seconds + train_seconds)))
    return Round(
        hours=hours,
        answers=old + new,
        epochs=epochs,
        answer_seconds=new * make_seconds,
        train_seconds=(old + new) * train_seconds,
        validations=validations,
        other_seconds=other_seconds,
        spent_before=spent_seconds,
    )


def cut_passes_to_hours(
    planned: Round,
    before: Round | None,  # its hours and seconds do not count
    spent_seconds: float,  # that the run has taken so far
) -> Round:
    """Use fewer passes if answers took too long for the hours; at least half of them."""
    given = 3600 * (planned.hours - (before.hours if before else 0.0))
    since = spent_seconds - (planned.spent_before if before else 0.0)
    left = given - planned.other_seconds - since
    share = max(_LEAST_SHARE, left / planned.train_seconds)
    if share >= 1:
        return planned
    return replace(
        planned,
        epochs=round(planned.epochs * share, 2),
        train_seconds=planned.train_seconds * share,
    )
