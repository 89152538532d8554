"""Settings of a training run; each field has its bounds and its text for `--help`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import require
from ..settings import (
    ADAPTER_SCOPES,
    MAX_DRAFT_TOKENS,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TREE_NODES,
    STREAM_DESIGNS,
    STREAM_INITS,
    AdapterScope,
    StreamDesign,
    StreamInit,
    check_settings,
    setting,
)

Schedule = Literal["linear", "cosine", "constant"]
Part = Literal["streams", "condition"]
PARTS = get_args(Part)
SCHEDULES = get_args(Schedule)
STREAM_INIT_RANK = 32
ROOT_INIT_RANK = 64
DRAFT_VOCAB_SIZE = 16384
_MAX_RANK = 4096
_DO = "correct the option"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How an adapter is trained, by both trainers. Defaults follow section 4 of Speculative
    Streaming (arXiv 2402.11131).
    """

    num_streams: int = setting(
        4,
        "gamma: tokens that streams guess ahead; 0 trains LoRA alone",
        least=0,
        most=MAX_DRAFT_TOKENS,
    )
    num_msa_layers: int = setting(
        8, "Ns: how many top layers run streams and have LoRA", least=1, most=MAX_LAYERS
    )
    adapter_scope: AdapterScope = setting(
        "all",
        "all: LoRA acts on every row, and fine-tunes the model for the data. streams: LoRA acts on "
        "stream rows alone, and the model's answers stay as they are; train on its own answers",
        choices=ADAPTER_SCOPES,
    )
    stream_design: StreamDesign = setting(
        "embeddings",
        "how streams differ: by an embedding each (eq. 3), or a rotation of their values (eq. 7)",
        choices=STREAM_DESIGNS,
    )
    rotation_step: float = setting(
        0.0,
        "radians: the values of stream n are rotated by n times this",
        least=0,
        most=math.pi / 2,
    )
    stream_init: StreamInit | None = setting(
        None,
        "f of eq. 3: identity is h, low_rank is B A h, residual is h + B A h",
        choices=STREAM_INITS,
    )
    stream_init_rank: int | None = setting(None, "eta: rank of f", least=0, most=_MAX_RANK)
    root_init_rank: int | None = setting(
        None,
        "rank of what the root token and the last hidden state before it add to f; 0 adds none",
        least=0,
        most=_MAX_RANK,
    )
    prune_rank: int = setting(
        8, "theta: rank of the pruning adapter; 0 trains none", least=0, most=_MAX_RANK
    )
    condition_rank: int = setting(
        0,
        "rank of the condition: how a drafted token changes the stream's next guess. It is trained "
        "beside the streams; 0 trains none",
        least=0,
        most=_MAX_RANK,
    )
    draft_vocab_size: int | None = setting(
        None,
        "number of the data's most frequent tokens that streams guess among; 0 for all",
        least=0,
        most=MAX_SIZE,
    )
    lora_rank: int = setting(16, "rank of LoRA", least=1, most=_MAX_RANK)
    lora_alpha: float = setting(32.0, "LoRA is multiplied by this over its rank", above=0, most=1e6)
    lora_modules: tuple[str, ...] = setting(
        (), "linear layers that get LoRA, such as q_proj v_proj (default: all)"
    )
    main_weight: float = setting(
        1.0, "alpha_0: weight of the next token's loss", least=0, most=1e38
    )
    stream_weights: tuple[float, ...] = setting(
        (0.1,),
        "alpha_1 to alpha_gamma: weight of each stream's loss; one number is used for all",
        least=0,
        most=1e38,
    )
    # The loss of section 3.2.3, which reaches that adapter alone.
    prune_weight: float = setting(0.1, "weight of the pruning adapter's loss", least=0, most=1e38)
    train_only: Part | None = setting(
        None,
        "streams: train the streams of --init further, with their LoRA and condition; a task's "
        "LoRA stays as it is. condition: train the condition alone; the streams stay too. Settings "
        "are those of --init",
        choices=PARTS,
    )
    epochs: float = setting(3.0, "passes over the data", above=0, most=1e6)
    batch_size: int = setting(16, "examples per step", least=1, most=2**16)
    learning_rate: float = setting(5e-4, "highest learning rate of AdamW", above=0, most=1)
    # They are added to hidden states that are some hundred times as large as new embeddings.
    embedding_rate: float = setting(
        20.0,
        "learning rate of stream embeddings, in multiples of --learning-rate",
        above=0,
        most=1e6,
    )
    schedule: Schedule = setting(
        "linear",
        "the learning rate after the warm-up: linear and cosine fall to 0, constant stays",
        choices=SCHEDULES,
    )
    warmup: float = setting(
        0.03, "share of the steps in which the learning rate rises", least=0, below=1
    )
    weight_decay: float = setting(0.0, "weight decay of AdamW", least=0, most=1e6)
    clip_norm: float = setting(1.0, "larger gradients are scaled to this norm", above=0, most=1e6)
    max_length: int = setting(
        512,
        "maximum tokens of an example: a longer answer is cut, a longer prompt left out",
        least=1,
        most=2**20,
    )
    pack: int = setting(
        0,
        "join the examples of half of the batches, drawn at random, as turns of conversations of "
        "at most this many tokens, so that streams also learn in long texts; 0 joins none",
        least=0,
        most=2**20,
    )
    root_dropout: float = setting(
        0.25,
        "share of the places where streams learn without what --root-init-rank adds, as they start "
        "in a fused pass; with 0 they need a second pass",
        least=0,
        below=1,
    )
    seed: int = setting(
        0, "seed of the first weights and of the order of examples", least=0, most=2**32 - 1
    )

    def __post_init__(self) -> None:
        self._fill_in_missing_stream_init()
        if self.root_init_rank is None:
            rank = ROOT_INIT_RANK if self.num_streams else 0
            object.__setattr__(self, "root_init_rank", rank)
        check_settings(self, do=_DO)
        rotated = self.stream_design == "value_rotation"
        identity = self.stream_init == "identity"
        weights = f"one weight, or {self.num_streams}"
        has_condition = self.condition_rank > 0
        for name, ok, expected in (
            ("rotation_step", rotated == (self.rotation_step > 0), "0 unless streams rotate"),
            ("stream_init_rank", identity == (self.stream_init_rank == 0), "0 for identity"),
            (
                "num_streams",
                self.num_streams > 0 or self.adapter_scope == "all",
                "1 or more if LoRA acts on streams alone",
            ),
            (
                "num_streams",
                self.num_streams > 0 or not self.train_only,
                "1 or more to train streams",
            ),
            (
                "condition_rank",
                self.num_streams > 0 or not has_condition,
                "0 without streams",
            ),
            (
                "root_init_rank",
                self.num_streams > 0 or not self.root_init_rank,
                "0 without streams",
            ),
            (
                "condition_rank",
                has_condition or not self.keeps_streams,
                "1 or more, such as 64, to train the condition",
            ),
            ("stream_weights", len(self.stream_weights) in (1, self.num_streams or 1), weights),
        ):
            found = f"--{name.replace('_', '-')} {getattr(self, name)}"
            require(ok, found, expected=expected, do=_DO)

    def _fill_in_missing_stream_init(self) -> None:
        kind = self.stream_init
        rank = self.stream_init_rank
        if kind is None:
            embedded = self.stream_design == "embeddings" and self.num_streams > 0
            kind = "low_rank" if embedded and rank != 0 else "identity"
        if rank is None:
            rank = 0 if kind == "identity" else STREAM_INIT_RANK
        object.__setattr__(self, "stream_init", kind)
        object.__setattr__(self, "stream_init_rank", rank)

    def with_default_draft_vocab_size(self, model_vocab_size: int) -> TrainConfig:
        """Fill in an unset size: a draft vocabulary pays if the model has twice as many tokens."""
        if self.draft_vocab_size is not None:
            return self
        pays = self.num_streams > 0 and model_vocab_size >= 2 * DRAFT_VOCAB_SIZE
        return replace(self, draft_vocab_size=DRAFT_VOCAB_SIZE if pays else 0)

    @property
    def teaches_rootless_starts(self) -> bool:
        """Whether streams that start from the root also learn to start without it."""
        return bool(self.root_init_rank) and self.root_dropout > 0 and not self.keeps_streams

    @property
    def keeps_streams(self) -> bool:
        """Whether hidden states of streams never change, since the condition alone is trained."""
        return self.train_only == "condition"

    @property
    def alphas(self) -> tuple[float, ...]:
        """alpha_1 to alpha_gamma of eq. 5; a single weight applies to all streams."""
        weights = self.stream_weights
        return weights if len(weights) == self.num_streams else weights * self.num_streams

    @classmethod
    def from_dict_ignoring_unknown(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build from JSON values, which a newer or older version may have written."""
        names = {f.name for f in fields(cls)}
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names
        }
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def num_steps(self, num_examples: int) -> int:
        # An incomplete last batch is a step.
        per_epoch = -(-num_examples // self.batch_size)
        return max(1, round(self.epochs * per_epoch))

    def learning_rate_at(
        self,
        step: int,  # counted from 0
        num_steps: int,
    ) -> float:
        warm = max(1, round(self.warmup * num_steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        left = (num_steps - step) / max(1, num_steps - warm)
        if self.schedule == "linear":
            return self.learning_rate * left
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 - math.cos(math.pi * left))
        return self.learning_rate


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a training run reads and writes, and how often it saves and validates."""

    data: Path  # folder with train.jsonl and valid.jsonl
    out: Path  # folder for the checkpoint, the run's state, its log and its picture
    model: str  # the base model
    template: str | None  # text with `{prompt}`; None for the model's chat template
    save_every: int = setting(50, "steps from one saved state to the next", least=1)
    valid_every: int = setting(200, "steps from one validation to the next", least=1)
    valid_count: int = setting(64, "examples of valid.jsonl that a validation uses", least=1)
    tree_size: int = setting(
        16,
        "nodes of the draft trees that a validation replays",
        least=1,
        most=MAX_TREE_NODES,
    )
    cache_gb: float = setting(8.0, least=0)  # GB of disk for the frozen layers' results
    max_steps: int | None = setting(
        None, "save and stop after this many steps (default: at the end of the run)", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self, do=_DO)
