"""Which streams a model should have, and how many answers fit into the hours, as measured here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import InputError, require
from ..generation.head_start import seed_costs
from ..generation.learned import learned_of
from ..json_files import read_json
from ..loading.attach import attach_adapter
from ..loading.found import Run
from ..loading.lora_files import Loras
from ..loading.names import CONFIG_FILE
from ..model.backbone import Backbone
from ..model.streams import StreamFusedModel
from ..policy.costs import ROWS
from ..settings import StreamConfig
from .answers import Speaker, Text
from .config import RunOptions, TrainConfig
from .data import Example, collate
from .job import stream_config
from .mlx_model import TrainedModel, new_adapter
from .mlx_trainer import MlxObjective, MlxTrainer
from .objective import Validation

NUM_STREAMS = 4
LAYER_SHARES: Mapping[float, float] = {2 / 30: 0.75, 4 / 30: 0.82, 8 / 30: 1.0}
"""Shares of the layers that may have streams, and the share of accepted drafts that is left with
them on SmolLM2-135M: perf/figures/ablation.png."""
TIMED_SIZES = (2, 4, 8, 16)
"""Nodes of the trees whose calls are timed."""
_USUAL_TOKENS: Mapping[int, float] = {2: 1.59, 4: 1.98, 8: 2.28, 16: 2.5}
"""Tokens per call by nodes of the adapter `chat`, on held-out answers. They only decide between
geometries: what is forecast is what the adapter itself shows."""
_TIMED_CONTEXT = 128
_DRAFT_HEAD_COST = 0.05
"""Plain calls that the head of a draft vocabulary takes where nothing was timed, about as on
SmolLM2-135M."""
RESERVE = 0.12
"""Share of the time for what turns out to take longer."""
MOST_VALIDATIONS = 10
_LEAST_VALIDATIONS = 2
_VALIDATION_SHARE = 0.15
"""How often a round's training is validated, and its speed-up forecast; the share of the hours that
this may take, where that leaves two."""
_LEAST_SHARE = 0.5
"""Share of the hours that answers and training have at least, and of the passes over the answers:
less would not pay for what a run takes beside them."""
_QUESTION_SHARE = 0.15  # of the time of answers, that the model's own questions take
_USUAL_SHARE = 0.75  # of the tokens that an answer may have, that it has
_MOST_EPOCHS = 3
_BATCHES = (16, 8, 4, 2, 1)
_ANSWERS_AT_ONCE = (32, 16, 8, 4, 1)
_PROBED = (1, 3)
_PROBED_TOKENS = 16
_WEIGHTS_SHARE = 2 / 3
_MEMORY_SHARE = 0.7  # of the machine's, where nothing is asked for

StepCosts = Mapping[int, float]
"""Plain calls that a call with n nodes takes, by n."""


def stream_training(num_layers: int, **more: Any) -> TrainConfig:
    """How streams in so many top layers are trained; `more` are other settings."""
    return TrainConfig(
        num_streams=NUM_STREAMS,
        num_msa_layers=num_layers,
        adapter_scope="streams",
        root_init_rank=64,
        condition_rank=64,
        stream_weights=(1.0,),
        schedule="cosine",
        learning_rate=1e-3,
        prune_rank=0,
        **more,
    )


def candidate_layers(num_layers: int) -> dict[int, float]:
    """Numbers of layers that may have streams, and the share of accepted drafts that is left."""
    return {max(1, round(share * num_layers)): kept for share, kept in LAYER_SHARES.items()}


def time_candidates(
    backbone: Backbone,
    base: dict[str, Any],
    options: RunOptions,
    tokens: Sequence[int],
    *,
    seconds: float,
    lora: Loras | None = None,
) -> dict[int, StepCosts]:
    """Time calls with untrained streams: what a call costs does not depend on what they learned.

    So the costs are those of adapters of the same sizes, too: they go to this machine's table, and
    where answers have taught it more, that is taken. The base's own table has them besides, for
    `forecast`.

    Args:
        backbone: the base model, which stays as it is.
        base: its settings, as `read_base` gives them.
        options: of the run.
        tokens: a text, the beginning of which is decoded behind.
        seconds: for each candidate.
        lora: on every row of the model, if there is some.

    Returns:
        What calls cost, by the number of layers with streams.
    """
    found: dict[int, StepCosts] = {}
    for num_layers in candidate_layers(base["num_hidden_layers"]):
        train = stream_training(num_layers).sized(base["vocab_size"])
        config = stream_config(train, base, options, [])
        adapter = new_adapter(
            backbone.clone_sharing_weights(), config, train, _any_vocab(train), lora
        )
        model = attach_adapter(backbone, adapter, merge_lora=True)
        text = tokens[:_TIMED_CONTEXT]
        found[num_layers] = seed_costs(model, text, TIMED_SIZES, seconds=seconds)
    learned, _ = learned_of(StreamFusedModel(backbone))
    for num_layers, costs in found.items():
        learned.costs.seed({(_untrained(num_layers), n): cost for n, cost in costs.items()})
    learned.keep(at_once=True)
    return found


def _untrained(num_layers: int) -> str:
    """What calls with untrained streams are called in the table of a model without any."""
    return f"untrained streams in {num_layers} layers"


def forecast(model: StreamFusedModel) -> float | None:
    """The speed over plain decoding's that an adapter of `ssmlx.adapt` should bring here.

    Args:
        model: without streams.

    Returns:
        That of the best number of layers: by calls with untrained streams, or else by what rows
        alone cost; None where neither was timed.
    """
    frozen = learned_of(model)[0].costs.frozen(0)
    known = frozen.known
    rows = {n for name, n in known if name == ROWS and n in TIMED_SIZES}
    speeds = []
    depth = len(model.backbone.layers)
    for num_layers, kept in candidate_layers(depth).items():
        name = _untrained(num_layers)
        costs = {n: calls for (one, n), (calls, _) in known.items() if one == name}
        if not costs and rows:
            # Streams go through the top layers in a pass of their own, behind the rows.
            second = num_layers / depth * frozen.calls((ROWS, 1 + NUM_STREAMS)) + _DRAFT_HEAD_COST
            costs = {n: frozen.calls((ROWS, n)) + second for n in rows}
        if costs:
            speeds.append(_usual_speed(costs, kept))
    return max(speeds, default=None)


def run_forecast(run: Run) -> float | None:
    """The speed over plain decoding's that an unfinished run's streams should bring as they are.

    Returns:
        None where none were kept yet.
    """
    try:
        values = read_json(run.adapter / CONFIG_FILE, "the settings of an adapter")
        curve = {int(n): float(tokens) for n, tokens in values["tokens_per_call"].items()}
        costs = {int(n): float(cost) for n, cost in run.plan["step_costs"].items()}
        return best_tree({n: cost for n, cost in costs.items() if n in curve}, curve)[1]
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return None


def choose_layers(costs: Mapping[int, StepCosts], num_layers: int) -> int:
    """The number of layers with streams that should be fastest by what calls cost."""
    kept = candidate_layers(num_layers)
    return max(costs, key=lambda layers: _usual_speed(costs[layers], kept[layers]))


def _usual_speed(costs: StepCosts, kept: float) -> float:
    """Over plain decoding's, with that share of the usual accepted drafts."""
    return best_tree(costs, {n: 1 + kept * (one - 1) for n, one in _USUAL_TOKENS.items()})[1]


def best_tree(costs: StepCosts, tokens_per_call: Mapping[int, float]) -> tuple[int, float]:
    """Nodes of the fastest tree, and its speed as a multiple of plain decoding's."""
    speeds = {n: tokens_per_call[n] / cost for n, cost in costs.items()}
    nodes = max(speeds, key=speeds.__getitem__)
    return nodes, speeds[nodes]


def _any_vocab(train: TrainConfig) -> np.ndarray | None:
    """A draft vocabulary of the right size: which tokens it has changes no time."""
    size = train.draft_vocab_size
    return np.arange(size, dtype=np.int32) if size else None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured here, of real steps on random tokens."""

    answer_tokens_per_second: float  # of all answers that are made at once
    train_seconds_per_token: float  # of learning a token of an answer
    frozen_seconds_per_token: float  # of the layers below the streams'
    batch_size: int  # examples of a step, as many as the memory allows
    answers_at_once: int
    memory: int  # bytes that all this takes at most
    prompt_seconds_per_token: float = 0.0  # of reading a prompt
    call_seconds: float = 0.0  # of a plain call of one text
    validate_seconds: float = 0.0  # of a held-out answer each time


def memory_here() -> int:
    """Bytes that may be used."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(_MEMORY_SHARE * whole)


def frozen_dtype(path: Path, settings: Mapping[str, Any], most: int) -> str:
    """How to hold a folder's weights, as `load_frozen` takes it, in `most` bytes.

    MLX's CPU backend multiplies packed weights slowly: they are unpacked where two thirds of that
    are enough for them.
    """
    bits = (settings.get("quantization") or {}).get("bits", 16)
    stored = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    return "auto" if stored * 32 / bits <= _WEIGHTS_SHARE * most else "stored"


def measure_rates(
    backbone: Backbone,
    config: StreamConfig,
    train: TrainConfig,
    speaker: Speaker,
    prompt_tokens: int,
    answer_tokens: int,
    most: int,
    lora: Loras | None = None,
) -> Rates:
    """Time some answers, and some training steps, of the longest examples.

    Args:
        backbone: the base model, which stays as it is.
        config: of the adapter.
        train: its training.
        speaker: answers with the same model, `lora` on it.
        prompt_tokens: of the longest prompt.
        answer_tokens: that an answer may have.
        most: bytes of memory that may be used.
        lora: on every row of the model, if there is some.

    Raises:
        InputError: not even one example at a time fits.
    """
    rng = np.random.default_rng(train.seed)
    # Of tokens that streams learn, as nearly all of an answer's are.
    known = train.draft_vocab_size or backbone.vocab_size
    tokens = rng.integers(0, known, prompt_tokens + answer_tokens).astype(np.int32)
    prompt = tokens[:prompt_tokens].tolist()
    timed = _time_answers(speaker, prompt, answer_tokens, most)
    twin = backbone.clone_sharing_weights()
    vocab = _any_vocab(train)
    model = TrainedModel(twin, new_adapter(twin, config, train, vocab, lora))
    objective = MlxObjective(model, train, vocab)
    trainer = MlxTrainer(objective, 100)
    peaks = {}
    for count in _PROBED:
        batch = collate([Example(tokens, prompt_tokens)] * count, np.arange(count))
        with _watched() as frozen:
            states = objective.lower(batch)
        with _watched() as step:
            trainer.advance(batch, states)
        peaks[count] = step.peak
    most_probed = _PROBED[-1]
    batch_size, for_steps = _largest(_BATCHES, peaks, most, "training")
    one = collate([Example(tokens, prompt_tokens)], np.arange(1))
    validate = Validation(objective, [one], TIMED_SIZES[-1], TIMED_SIZES[-1])
    with _watched() as validated:
        validate()
        validate.curve(TIMED_SIZES)
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
    at_once: int  # answers
    tokens_per_second: float  # of all these, behind their prompts
    memory: int  # bytes that they take
    prompt_seconds: float  # of reading one of the longest prompts
    call_seconds: float  # of a plain call of one text


def _time_answers(
    speaker: Speaker, prompt: list[int], answer_tokens: int, most: int
) -> _AnswerTimes:
    list(speaker.answers([Text(0, prompt[-8:])], 2))  # the first calls take longer
    peaks = {}
    seconds = {}
    length = max(1, answer_tokens // 10)
    for count in _PROBED:
        texts = [Text(number, prompt) for number in range(count)]
        with _watched() as prompts:
            list(replace(speaker, batch_size=count).answers(texts, length))
        peaks[count] = prompts.peak
        seconds[count] = prompts.seconds
    at_once, memory = _largest(_ANSWERS_AT_ONCE, peaks, most, "answering")
    texts = [Text(number, prompt[-8:], 1.0) for number in range(at_once)]
    with _watched() as spent:
        found = list(replace(speaker, batch_size=at_once).answers(texts, _PROBED_TOKENS))
    few, many = _PROBED
    # What texts share is their calls, which take about the same; so the rest is their prompts.
    of_prompt = min(max(0.0, (seconds[many] - seconds[few]) / (many - few)), seconds[few])
    return _AnswerTimes(
        at_once=at_once,
        tokens_per_second=sum(len(answer) for _, answer in found) / spent.seconds,
        memory=memory,
        prompt_seconds=of_prompt,
        call_seconds=(seconds[few] - of_prompt) / length,
    )


@dataclass
class _Spent:
    seconds: float = 0.0
    peak: int = 0  # bytes that were in use at the most


@contextmanager
def _watched() -> Iterator[_Spent]:
    spent = _Spent()
    start = time.perf_counter()
    mx.clear_cache()
    mx.reset_peak_memory()
    yield spent
    spent.seconds = time.perf_counter() - start
    spent.peak = mx.get_peak_memory()


def _largest(
    sizes: Sequence[int], peaks: Mapping[int, int], most: int, what: str
) -> tuple[int, int]:
    """The largest of `sizes` that fits, and its bytes, by those of two others."""
    (low, few), (high, many) = peaks.items()
    used = {size: int(few + (many - few) * (size - low) / (high - low)) for size in sizes}
    fitting = [size for size in sizes if used[size] <= most]
    require(
        bool(fitting),
        f"{what} takes {min(used.values()) / 2**30:.1f} GiB",
        expected=f"at most {most / 2**30:.1f}",
        do="give --memory-gb more, or a smaller --model",
    )
    return fitting[0], used[fitting[0]]


@dataclass(frozen=True, kw_only=True)
class Round:
    """How much is made in the time that there is."""

    hours: float  # those of rounds before it among them
    answers: int  # likewise
    epochs: float
    answer_seconds: float
    train_seconds: float
    validations: int = MOST_VALIDATIONS
    other_seconds: float = 0.0  # of validations, and of the figures at the end
    spent_before: float = 0.0  # seconds of the run, when the round was planned

    @property
    def seconds(self) -> float:
        """Of all that the round makes."""
        return self.answer_seconds + self.train_seconds + self.other_seconds


def plan_round(
    hours: float,
    rates: Rates,
    prompt_tokens: int,
    answer_tokens: int,
    before: Round | None = None,
    *,
    held_out: int = 0,
    check_seconds: float = 0.0,
    spent: float = 0.0,
) -> Round:
    """How many answers, and passes over all, fit into the hours.

    More passes where answers take longer to make.

    Args:
        hours: in all, those of the rounds before among them.
        rates: as measured.
        prompt_tokens: of a usual prompt.
        answer_tokens: that an answer may have.
        before: the round before, if there was one.
        held_out: answers that each validation replays.
        check_seconds: what the figures at the end take.
        spent: seconds that the run has taken so far.
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
    # Of a first round, what was spent has measured all this.
    left = given - other_seconds - (0.0 if before else spent)
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
        spent_before=spent,
    )


def fitted_round(planned: Round, before: Round | None, spent: float) -> Round:
    """The round with fewer passes where its answers took so long that the hours would not do.

    Args:
        planned: the round, whose answers are made.
        before: the round before, if there was one.
        spent: seconds that the run has taken so far.
    """
    given = 3600 * (planned.hours - (before.hours if before else 0.0))
    since = spent - (planned.spent_before if before else 0.0)
    left = given - planned.other_seconds - since
    share = max(_LEAST_SHARE, left / planned.train_seconds)
    if share >= 1:
        return planned
    return replace(
        planned,
        epochs=round(planned.epochs * share, 2),
        train_seconds=planned.train_seconds * share,
    )
