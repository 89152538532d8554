"""What an answer consists of: its segments with their statistics, and where it ends."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from .memory import Memory

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerationResponse:
    """A segment of an answer, with the statistics up to it.

    Attributes:
        text: the text that this call completed; may be empty.
        tokens: ids of the segment; an end token is among them but not in the text.
        finish_reason: None before the last segment; then "stop" (an end token), "length"
            (`max_tokens`) or "context" (the model's context is full).
        prompt_tokens: tokens of the prompt, those already in the cache included.
        generation_tokens: tokens so far, the end token included.
        target_calls: forward passes of the target so far, the prompt's counted as one.
        prefill_seconds: until the first call's token.
        decode_seconds: from then on.
        peak_memory: GB, as `mx.get_peak_memory`.
        draft_calls: forward passes of a draft model so far.
        cached_tokens: tokens of the prompt that the cache held already.
        lossy: whether tokens were accepted that the target might not have written.
        memory: where the memory goes; on the last segment alone.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    generation_tokens: int
    target_calls: int
    prefill_seconds: float
    decode_seconds: float
    peak_memory: float
    draft_calls: int = 0
    cached_tokens: int = 0
    lossy: bool = False
    memory: Memory | None = None

    @property
    def tokens_per_call(self) -> float:
        """Tokens advanced per target call: the paper's call reduction (CR)."""
        return self.generation_tokens / self.target_calls

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second, of those that were processed."""
        processed = self.prompt_tokens - self.cached_tokens
        return processed / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second after the first, which comes with the prompt's call."""
        return (self.generation_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Budget:
    """Where an answer ends: at an end token, at `max_tokens`, or at the context's end."""

    end_tokens: Set[int]
    max_tokens: int
    context_room: int | None
    generated: int = 0

    def ends(self, step: list[int]) -> bool:
        """Whether the answer ends with the tokens of `step`."""
        return self.cut(step)[1] is not None

    def cut(self, step: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of `step` that belongs to the answer, and why it ends if it does."""
        generated = self.generated
        for index, token in enumerate(step, 1):
            if token in self.end_tokens:
                return step[:index], "stop"
            if generated + index == self.max_tokens:
                return step[:index], "length"
            if generated + index == self.context_room:
                return step[:index], "context"
        return step, None


def summary(response: GenerationResponse, plain_tps: float | None = None) -> str:
    """One quiet line about an answer: tokens/s, tokens per target call, speed-up if known."""
    parts = ["LOSSY (typical acceptance)"] if response.lossy else []
    parts += [
        f"{response.generation_tokens} tokens",
        f"{response.generation_tps:.1f} tokens/s",
        f"{response.tokens_per_call:.2f} tokens per target call",
    ]
    if plain_tps:
        parts.append(f"{response.generation_tps / plain_tps:.2f}x plain decoding")
    if response.finish_reason == "length":
        parts.append("cut at --max-tokens")
    if response.finish_reason == "context":
        parts.append("the context is full")
    return " · ".join(parts)
