"""What streams a model should have, what they should bring, and how long that takes here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import require
from ..model.backbone import Backbone
from ..settings import StreamConfig
from ..tuning.chips import MOST_ROWS, Bound, Chip, Decoder, costs, row_costs
from ..tuning.cost import interpolate
from ..tuning.ladder import USUAL_CONTEXT, shapes
from .answers import Speaker, Text
from .config import DRAFT_VOCAB_SIZE, TrainConfig
from .data import Example, collate
from .mlx_model import TrainedModel, new_adapter
from .mlx_trainer import MlxObjective, MlxTrainer
from .objective import STRIDE

ANSWER_TOKENS = 160
USUAL_TOKENS = 120  # of an answer, of the tokens that it may have
_QUESTION_SHARE = 0.15  # of the time of answers, that the model's own questions take
RESERVE = 0.12  # of the time: validations, and figures at the end
_MOST_EPOCHS = 3
TRAINED: Mapping[int, float] = {2: 1.59, 3: 1.81, 4: 1.98, 6: 2.16, 8: 2.28, 12: 2.37, 16: 2.5}
"""Tokens per call by nodes of the adapter `chat`, on answers that were held out."""
LEARNT: Mapping[int, float] = {1450: 0.54, 11_000: 1.0}
"""What its like has of its accepted drafts after so many answers, each pass over one counted."""
SHARES: Mapping[float, float] = {2 / 30: 0.75, 4 / 30: 0.82, 8 / 30: 1.0}
"""What is left of them where only so many of the layers have streams: perf/figures/ablation.png."""
_STREAMS: Mapping[int, float] = {2: 0.88, 3: 0.96, 4: 1.0}
"""What is left of them where only so many streams guess."""
_BATCHES = (16, 8, 4, 2, 1)
_TOGETHER = (32, 16, 8, 4, 1)
_PROBED = (1, 3)
_PROBED_TOKENS = 16
_WEIGHTS_SHARE = 2 / 3
_MEMORY_SHARE = 0.7  # of the machine's, that may be used unless told


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Streams, and the speed-up over plain decoding that they should bring on a chip."""

    num_layers: int
    num_streams: int
    nodes: int  # of the tree that should be fastest
    low: float
    middle: float
    high: float

    def train(self, **more: Any) -> TrainConfig:
        return TrainConfig(
            num_streams=self.num_streams,
            num_msa_layers=self.num_layers,
            adapter_scope="streams",
            root_init_rank=64,
            condition_rank=64,
            stream_weights=(1.0,),
            schedule="cosine",
            learning_rate=1e-3,
            prune_rank=0,
            **more,
        )


def choose_sizes(decoder: Decoder, chip: Chip) -> Sizes:
    """Those that should be fastest on a chip, by what others published of its rows."""
    layers = {max(1, round(share * decoder.layers)) for share in SHARES}
    found = [predicted(decoder, chip, n, g) for n in sorted(layers) for g in _STREAMS]
    return max(found, key=lambda one: one.middle)


def _drafting(decoder: Decoder, layers: int, streams: int) -> Decoder:
    return replace(
        decoder,
        msa_layers=layers,
        num_streams=streams,
        is_conditional=True,
        starts_from_root=True,
        draft_vocab=min(decoder.vocab, DRAFT_VOCAB_SIZE),
    )


def predicted(
    decoder: Decoder, chip: Chip, layers: int, streams: int, learnt: float = min(LEARNT)
) -> Sizes:
    """What these sizes should bring, once so many answers are learnt."""
    drafting = _drafting(decoder, layers, streams)
    kept = interpolate([*SHARES], [*SHARES.values()], layers / decoder.layers) * _STREAMS[streams]
    kept *= interpolate([log(n) for n in LEARNT], [*LEARNT.values()], log(max(1.0, learnt)))
    tokens = {n: 1 + kept * (one - 1) for n, one in TRAINED.items()}

    def speedups(bound: Bound) -> dict[int, float]:
        steps = costs(drafting, chip, bound)
        every = {shape.num_nodes: shape for shape in shapes(streams)}
        return {n: tokens[n] / steps.breakeven(one, USUAL_CONTEXT) for n, one in every.items()}

    middle = speedups("middle")
    nodes = max(middle, key=middle.__getitem__)
    return Sizes(
        num_layers=layers,
        num_streams=streams,
        nodes=nodes,
        low=speedups("high")[nodes],
        middle=middle[nodes],
        high=speedups("low")[nodes],
    )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured here, of real steps on random tokens."""

    answer: float  # tokens/s of answers, together
    token: float  # seconds that learning a token of an answer takes
    lower: float  # seconds that the frozen layers take of a token
    batch_size: int  # examples of a step, as many as the memory allows
    together: int  # answers at a time
    memory: int  # bytes that all this takes at the most


def expected_rates(decoder: Decoder, chip: Chip, sizes: Sizes) -> Rates:
    """What `measure` should find on a chip, by what others published of its rows; no memory.

    Learning a token takes a row of it, and one of each stream forth and back, through the layers
    that have streams, and the draft head forth and back, once and for one token in `STRIDE` twice.
    """
    layers = sizes.num_layers
    streams = sizes.num_streams
    drafting = _drafting(decoder, layers, streams)
    together = _TOGETHER[0]
    row = row_costs(chip, decoder.bits)[MOST_ROWS] / MOST_ROWS
    layer = row * chip.seconds(decoder.layer_bytes())
    head = row * chip.seconds(decoder.head_bytes(drafting.draft_vocab))
    return Rates(
        answer=together / costs(drafting, chip).batch_seconds(together, USUAL_CONTEXT),
        token=layers * layer * (1 + 2 * streams) + 2 * (1 + 1 / STRIDE) * streams * head,
        lower=(decoder.layers - layers) * layer,
        batch_size=_BATCHES[0],
        together=together,
        memory=0,
    )


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


def measure(
    backbone: Backbone,
    config: StreamConfig,
    train: TrainConfig,
    speaker: Speaker,
    prompt_tokens: int,
    most: int,
) -> Rates:
    """Time some answers, and some steps, of the longest prompts; `most` is the bytes allowed.

    Raises:
        InputError: not even one example at a time fits.
    """
    rng = np.random.default_rng(train.seed)
    size = train.draft_vocab_size
    known = size or backbone.vocab_size  # tokens that are learnt, as nearly all of an answer's are
    tokens = rng.integers(0, known, prompt_tokens + ANSWER_TOKENS).astype(np.int32)
    together, answer, for_answers = _answer_rate(speaker, tokens[:prompt_tokens].tolist(), most)
    twin = backbone.twin()
    vocab = np.arange(size, dtype=np.int32) if size else None
    model = TrainedModel(twin, new_adapter(twin, config, train, vocab))
    objective = MlxObjective(model, train, vocab)
    trainer = MlxTrainer(objective, 100)
    peaks = {}
    for count in _PROBED:
        batch = collate([Example(tokens, prompt_tokens)] * count, np.arange(count))
        with _watched() as lower:
            states = objective.lower(batch)
        with _watched() as step:
            trainer.advance(batch, states)
        peaks[count] = step.peak
    batch_size, for_steps = _largest(_BATCHES, peaks, most, "training")
    return Rates(
        answer=answer,
        token=step.seconds / count / ANSWER_TOKENS,
        lower=lower.seconds / count / len(tokens),
        batch_size=batch_size,
        together=together,
        memory=max(for_answers, for_steps),
    )


def _answer_rate(speaker: Speaker, prompt: list[int], most: int) -> tuple[int, float, int]:
    """Answers at a time, their tokens/s, and the bytes that they take."""
    peaks = {}
    for count in _PROBED:
        texts = [Text(number, prompt) for number in range(count)]
        with _watched() as prompts:
            list(replace(speaker, batch_size=count).answers(texts, ANSWER_TOKENS // 10))
        peaks[count] = prompts.peak
    together, memory = _largest(_TOGETHER, peaks, most, "answering")
    texts = [Text(number, prompt[-8:], 1.0) for number in range(together)]
    with _watched() as spent:
        found = list(replace(speaker, batch_size=together).answers(texts, _PROBED_TOKENS))
    return together, sum(len(answer) for _, answer in found) / spent.seconds, memory


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
class Plan:
    """How much is made in the time that there is."""

    hours: float  # those of plans before it among them
    answers: int  # likewise
    epochs: int
    answer_seconds: float
    train_seconds: float

    @classmethod
    def within(cls, hours: float, rates: Rates, prompt_tokens: int, before: int = 0) -> Plan:
        """Answers beside those that are there, and passes over all.

        More passes where answers take longer to make.
        """
        asking = 1 + _QUESTION_SHARE
        tokens = USUAL_TOKENS
        made = tokens / rates.answer * asking
        frozen = rates.lower * (prompt_tokens + tokens)
        learnt = rates.token * tokens
        epochs = min(_MOST_EPOCHS, max(1, round(made / learnt)))
        trained = frozen + epochs * learnt
        seconds = (1 - RESERVE) * 3600 * hours
        answers = before + int((seconds - before * trained) / (made + trained))
        return cls(
            hours=hours,
            answers=answers,
            epochs=epochs,
            answer_seconds=(answers - before) * made,
            train_seconds=answers * trained,
        )
