"""Answers of a language model of transformers, many prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssmlx.errors import require

if TYPE_CHECKING:
    import torch

COMPACT_AT = 0.125  # drop finished rows once they are this share of the batch


class Answer(NamedTuple):
    """What the model said to one prompt.

    Attributes:
        tokens: the tokens, with the end token where there is one.
        finish_reason: "stop" at an end token, "length" where max_tokens came first.
    """

    tokens: list[int]
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when to stop.

    Attributes:
        max_tokens: longest answer.
        temp: temperature; 0 is greedy.
        top_p: sample among the likeliest tokens that hold this much probability together.
        seed: of the sampler.
    """

    max_tokens: int = 160
    temp: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "1 or more"),
            ("--temp", self.temp, 0 <= self.temp < float("inf"), "0 or more"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            require(good, f"{name} {value}", expected=expected, do=f"change {name}")


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end_tokens: Sequence[int],
    stream: int = 0,
) -> list[Answer]:
    """Answer B prompts together.

    Args:
        model: a causal LM of transformers.
        prompts: B lists of tokens; they are padded on the left to the longest.
        sampling: how to choose tokens.
        end_tokens: tokens that end an answer.
        stream: with `sampling.seed` the seed of this batch, so that batches do not depend on
            which ones ran before.
    """
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    tokens, mask = (part.to(device) for part in left_pad(prompts))  # [B, L] both
    generator = torch.Generator(device).manual_seed(sampling.seed * 1_000_003 + stream)
    ends = torch.tensor(list(end_tokens), device=device)
    positions, cache = mask.cumsum(1).sub(1).clamp(min=0), DynamicCache()
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt that each row of the batch answers
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for _ in range(sampling.max_tokens):
        logits = _forward(model, tokens, mask, positions, cache)  # [B, V]
        chosen = choose_tokens(logits, sampling, generator)  # [B]
        for row, token, done in zip(rows, chosen.tolist(), ended.tolist(), strict=True):
            if not done:
                answers[row].append(token)
        ended |= torch.isin(chosen, ends)
        if ended.all():
            break
        if ended.float().mean() >= COMPACT_AT:
            kept = (~ended).nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows = [rows[index] for index in kept.tolist()]
            chosen, mask, positions, ended = (x[kept] for x in (chosen, mask, positions, ended))
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    stop = set(end_tokens)
    return [Answer(answer, "stop" if answer[-1] in stop else "length") for answer in answers]


def _forward(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
) -> torch.Tensor:
    """[B, L] new tokens -> [B, V] float32 logits after the last one."""
    import torch

    with torch.inference_mode():
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return output.logits[:, -1].float()


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """B lists of tokens -> [B, L] tokens and [B, L] 0/1 mask, padding first."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    tokens = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def choose_tokens(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> torch.Tensor:
    """[B, V] float32 logits -> [B] tokens."""
    import torch

    if sampling.temp == 0:
        return logits.argmax(dim=1)
    probs, order = (logits / sampling.temp).softmax(dim=1).sort(dim=1, descending=True)
    before = probs.cumsum(dim=1) - probs
    probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token a row, without a copy of the keys for every query head.

    On the CPU several times as fast as PyTorch's kernel there, which takes over for prompts.

    Args:
        query: [B, H, L, Dh].
        key: [B, Hkv, S, Dh]; `value` alike.
        attention_mask: [B, 1, L, S], True or 0 where visible, or None where everything is.

    Returns:
        [B, L, H, Dh], and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype is not scores.dtype:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.float().softmax(dim=-1).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, width), None


def load_generator(
    path: Path, dtype: str, device: str, lora: Path | None = None
) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder, ready for `generate_batch`.

    Args:
        path: a model folder.
        dtype: "float32" or "bfloat16".
        device: "cpu", "cuda", "mps", or "auto" for the first GPU there is.
        lora: the LoRA that the model is to answer with, as `fine_tuned` reads it.

    Raises:
        InputError: the device is not there, or the checkpoint does not change the answers.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer
    from transformers.masking_utils import sdpa_mask

    from .base import load_base
    from .reference.checkpoint import fine_tuned
    from .training.run import choose_device

    place = choose_device(device)
    model = load_base(path, attn_implementation="sdpa")
    if lora is not None:
        model = fine_tuned(model, lora)
    model = model.to(place, getattr(torch, dtype)).eval()
    if place.type == "cpu":
        AttentionInterface.register("grouped", grouped_attention)
        AttentionMaskInterface.register("grouped", sdpa_mask)
        model.set_attn_implementation("grouped")
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's settings."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    own = own if isinstance(own, list) else [own]
    return sorted({token for token in (tokenizer.eos_token_id, *own) if token is not None})
