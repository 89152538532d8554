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

from ..errors import require
from ..generation.head_start import seed_costs
from ..loading.attach import attach_adapter
from ..loading.lora_files import Loras
from ..model.backbone import Backbone
from ..settings import StreamConfig
from .answers import Speaker, Text
from .config import RunOptions, TrainConfig
from .data import Example, collate
from .job import stream_config
from .mlx_model import TrainedModel, new_adapter
from .mlx_trainer import MlxObjective, MlxTrainer

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
RESERVE = 0.12
"""Share of the time for validations, and for the figures at the end."""
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
    where answers have taught it more, that is taken.

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
        adapter = new_adapter(backbone.twin(), config, train, _any_vocab(train), lora)
        model = attach_adapter(backbone, adapter, merge_lora=True)
        text = tokens[:_TIMED_CONTEXT]
        found[num_layers] = seed_costs(model, text, TIMED_SIZES, seconds=seconds)
    return found


def choose_layers(costs: Mapping[int, StepCosts], num_layers: int) -> int:
    """The number of layers with streams that should be fastest by what calls cost."""
    kept = candidate_layers(num_layers)

    def speedup(layers: int) -> float:
        tokens = {n: 1 + kept[layers] * (one - 1) for n, one in _USUAL_TOKENS.items()}
        return best_tree(costs[layers], tokens)[1]

    return max(costs, key=speedup)


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
    at_once, answer_rate, for_answers = _answer_rate(speaker, prompt, answer_tokens, most)
    twin = backbone.twin()
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
    return Rates(
        answer_tokens_per_second=answer_rate,
        train_seconds_per_token=step.seconds / most_probed / answer_tokens,
        frozen_seconds_per_token=frozen.seconds / most_probed / len(tokens),
        batch_size=batch_size,
        answers_at_once=at_once,
        memory=max(for_answers, for_steps),
    )


def _answer_rate(
    speaker: Speaker, prompt: list[int], answer_tokens: int, most: int
) -> tuple[int, float, int]:
    """Answers at a time, their tokens/s, and the bytes that they take."""
    peaks = {}
    for count in _PROBED:
        texts = [Text(number, prompt) for number in range(count)]
        with _watched() as prompts:
            list(replace(speaker, batch_size=count).answers(texts, max(1, answer_tokens // 10)))
        peaks[count] = prompts.peak
    at_once, memory = _largest(_ANSWERS_AT_ONCE, peaks, most, "answering")
    texts = [Text(number, prompt[-8:], 1.0) for number in range(at_once)]
    with _watched() as spent:
        found = list(replace(speaker, batch_size=at_once).answers(texts, _PROBED_TOKENS))
    return at_once, sum(len(answer) for _, answer in found) / spent.seconds, memory


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
    epochs: int
    answer_seconds: float
    train_seconds: float


def plan_round(
    hours: float, rates: Rates, prompt_tokens: int, answer_tokens: int, before: Round | None = None
) -> Round:
    """How many answers, and passes over all, fit into the hours.

    More passes where answers take longer to make.

    Args:
        hours: in all, those of the rounds before among them.
        rates: as measured.
        prompt_tokens: of a usual prompt.
        answer_tokens: that an answer may have.
        before: the round before, if there was one.
    """
    old = before.answers if before else 0
    tokens = _USUAL_SHARE * answer_tokens
    make_seconds = (1 + _QUESTION_SHARE) * tokens / rates.answer_tokens_per_second
    frozen_seconds = rates.frozen_seconds_per_token * (prompt_tokens + tokens)
    pass_seconds = rates.train_seconds_per_token * tokens
    epochs = min(_MOST_EPOCHS, max(1, round(make_seconds / pass_seconds)))
    train_seconds = frozen_seconds + epochs * pass_seconds
    seconds = (1 - RESERVE) * 3600 * (hours - (before.hours if before else 0.0))
    new = max(0, int((seconds - old * train_seconds) / (make_seconds + train_seconds)))
    return Round(
        hours=hours,
        answers=old + new,
        epochs=epochs,
        answer_seconds=new * make_seconds,
        train_seconds=(old + new) * train_seconds,
    )
