"""Answers to prompts, decoded here, with what the streams guess along them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import check_prompt
from ..bars import bar
from ..errors import require
from ..model.streams import StreamFusedModel
from ..prompts import encode_prompt, read_prompts
from ..settings import GenerateConfig, TreeConfig
from ..training.guesses import guesses_along, most_candidates
from ..training.replay import Guesses
from .timing import ssmlx_answer

_LEAST_TOKENS = 50


@dataclass(frozen=True)
class RecordedAnswer:
    prompt: list[int]
    guesses: Guesses


def read_tokens(
    path: Path, model: StreamFusedModel, tokenizer: TokenizerWrapper
) -> list[list[int]]:
    found = [encode_prompt(prompt, model, tokenizer) for prompt in read_prompts(path, "--data")]
    for tokens in found:
        check_prompt(model, len(tokens))
    return found


def split_prompts(
    prompts: Sequence[list[int]], count: int, checked: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The last `count` prompts to learn from, and `checked` before them to check on."""
    require(
        count >= 1 and checked >= 0 and len(prompts) >= count + checked,
        f"--count {count} --check {checked} of {len(prompts)} prompts",
        expected="1 or more to learn from, others to check on, and no more than there are",
        do="give smaller numbers, or more --data",
    )
    first = len(prompts) - count
    return list(prompts[first:]), list(prompts[first - checked : first])


def record_answers(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[list[int]],
    max_tokens: int,
    largest: int,
) -> list[RecordedAnswer]:
    """Decode each prompt, and record what trees of up to `largest` nodes are made of."""
    config = GenerateConfig(decoding="streaming", max_tokens=max_tokens, tree=TreeConfig())
    most = most_candidates(model, largest)
    found = []
    for prompt in bar(prompts, "answers"):
        answer = ssmlx_answer(model, tokenizer, prompt, config).tokens
        found.append(RecordedAnswer(prompt, guesses_along(model, prompt, answer, most)))
    tokens = sum(len(one.guesses.answer) for one in found)
    require(
        tokens >= _LEAST_TOKENS,
        f"the answers have {tokens} tokens in all",
        expected=f"{_LEAST_TOKENS} or more",
        do="give --data with longer answers, or a larger --count or --max-tokens",
    )
    return found
