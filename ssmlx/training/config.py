"""Settings of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import InputError
from ..settings import ADAPTER_SCOPES, STREAM_DESIGNS, STREAM_INITS, AdapterScope, StreamInit

Schedule = Literal["linear", "cosine", "constant"]
SCHEDULES = ("linear", "cosine", "constant")
STREAM_INIT_RANK = 32


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How an adapter is trained; the same for both trainers. Defaults follow section 4.

    Attributes:
        num_streams: gamma; 0 trains the LoRA alone, the baseline of table 1.
        num_msa_layers: Ns, top layers with multi-stream attention; LoRA is on these layers.
        adapter_scope: "all", LoRA on every row; "streams", on stream rows alone, base frozen.
        stream_design: "embeddings" (eq. 3) or "value_rotation" (eq. 7).
        rotation_step: epsilon of eq. 7 in radians; 0 for embeddings.
        stream_init, stream_init_rank: f of eq. 3 and its rank eta. None chooses: low_rank of
            rank 32, or identity (which has none) where streams rotate, or where there are none.
        prune_rank: theta, the rank of the early-exit adapter; 0 trains none.
        draft_vocab_size: tokens that streams may guess, the most frequent; 0 for all.
        lora_rank, lora_alpha, lora_modules: LoRA in PEFT's terms; no modules means every linear.
        main_weight: alpha_0 of eq. 5.
        stream_weights: alpha_1 .. alpha_gamma; one number stands for all.
        prune_weight: of the early-exit loss (section 3.2.3), which reaches the adapter alone.
        epochs, batch_size: passes over the data, and examples a step.
        learning_rate, schedule, warmup: AdamW's peak rate, its course, and the share of steps
            in which it rises.
        embedding_rate: the rate of the stream embeddings, as a multiple of learning_rate. They
            are added to hidden states some hundred times their first size.
        weight_decay, clip_norm: AdamW's decay, and the gradient norm that is never exceeded.
        max_length: tokens an example may have; longer answers are cut, longer prompts left out.
        seed: of weights and of the order of the data.
    """

    num_streams: int = 4
    num_msa_layers: int = 8
    adapter_scope: AdapterScope = "all"
    stream_design: str = "embeddings"
    rotation_step: float = 0.0
    stream_init: StreamInit | None = None
    stream_init_rank: int | None = None
    prune_rank: int = 8
    draft_vocab_size: int = 0
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_modules: tuple[str, ...] = ()
    main_weight: float = 1.0
    stream_weights: tuple[float, ...] = (0.1,)
    prune_weight: float = 0.1
    epochs: float = 3.0
    batch_size: int = 16
    learning_rate: float = 5e-4
    embedding_rate: float = 20.0
    schedule: Schedule = "linear"
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    max_length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        self._settle_f()
        for name in ("num_msa_layers", "lora_rank", "batch_size", "max_length"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in (
            "num_streams", "prune_rank", "draft_vocab_size", "stream_init_rank", "rotation_step",
            "main_weight", "prune_weight", "weight_decay", "seed",
        ):  # fmt: skip
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("epochs", "learning_rate", "embedding_rate", "clip_norm", "lora_alpha"):
            self._check(name, getattr(self, name) > 0, "more than 0")
        self._check("learning_rate", self.learning_rate <= 1, "at most 1")
        self._check("warmup", 0 <= self.warmup < 1, "a share of the steps, below 1")
        self._check("schedule", self.schedule in SCHEDULES, "one of " + ", ".join(SCHEDULES))
        self._check("adapter_scope", self.adapter_scope in ADAPTER_SCOPES, "all or streams")
        self._check(
            "stream_design", self.stream_design in STREAM_DESIGNS, ", ".join(STREAM_DESIGNS)
        )
        self._check("stream_init", self.stream_init in STREAM_INITS, ", ".join(STREAM_INITS))
        for field in fields(self):
            value = getattr(self, field.name)
            is_sound = not isinstance(value, float) or math.isfinite(value)
            self._check(field.name, is_sound, "a finite number")
        self._check_pairs()

    def _settle_f(self) -> None:
        kind, rank = self.stream_init, self.stream_init_rank
        if kind is None:
            embedded = self.stream_design == "embeddings" and self.num_streams > 0
            kind = "low_rank" if embedded and rank != 0 else "identity"
        if rank is None:
            rank = 0 if kind == "identity" else STREAM_INIT_RANK
        object.__setattr__(self, "stream_init", kind)
        object.__setattr__(self, "stream_init_rank", rank)

    def _check_pairs(self) -> None:
        rotated = self.stream_design == "value_rotation"
        self._check("rotation_step", rotated == (self.rotation_step > 0), "0 unless streams rotate")
        self._check("rotation_step", self.rotation_step <= math.pi / 2, "at most pi / 2")
        identity = self.stream_init == "identity"
        self._check("stream_init_rank", identity == (self.stream_init_rank == 0), "0 for identity")
        self._check(
            "num_streams",
            self.num_streams > 0 or self.adapter_scope == "all",
            "1 or more where LoRA acts on streams alone",
        )
        self._check(
            "stream_weights",
            len(self.stream_weights) in (1, self.num_streams or 1)
            and all(0 <= weight < math.inf for weight in self.stream_weights),
            f"one weight of 0 or more, or {self.num_streams}",
        )

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(self, name)}",
                expected=expected,
                do="correct the option",
            )

    @property
    def alphas(self) -> tuple[float, ...]:
        """alpha_1 .. alpha_gamma."""
        weights = self.stream_weights
        return weights if len(weights) == self.num_streams else weights * self.num_streams

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build from JSON values; lists become tuples, unknown keys are ignored."""
        names = {f.name for f in fields(cls)}
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names
        }
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def num_steps(self, num_examples: int) -> int:
        """Optimiser steps over `num_examples`."""
        per_epoch = -(-num_examples // self.batch_size)
        return max(1, round(self.epochs * per_epoch))

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of `step`, counted from 0."""
        warm = max(1, round(self.warmup * num_steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        left = (num_steps - step) / max(1, num_steps - warm)
        if self.schedule == "linear":
            return self.learning_rate * left
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 - math.cos(math.pi * left))
        return self.learning_rate
