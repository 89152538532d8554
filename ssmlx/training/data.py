"""Data folders, in the forms that mlx-lm's LoRA training takes, as token ids.

A folder holds `train.jsonl` and `valid.jsonl`, one JSON object a line:

    {"prompt": ..., "completion": ...}                    a question and its answer
    {"messages": [{"role": ..., "content": ...}, ...]}    a chat; its last answer is learnt
    {"text": ...}                                         learnt from its second token on
    {"prompt_tokens": [...], "completion_tokens": [...]}  ids, as `convert.continuations` writes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError
from ..prompts import chat_tokens, encode, read_lines

_FORMS = "prompt and completion, messages, text, or prompt_tokens and completion_tokens"


@dataclass(frozen=True, eq=False)
class Example:
    """One example.

    Attributes:
        tokens: [T] ids, prompt first.
        start: the first token of the answer, at least 1.
    """

    tokens: np.ndarray
    start: int

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Encoder:
    """Turns a line of a data file into an example.

    Attributes:
        tokenizer: the model's.
        template: text with `{prompt}`, or None for the model's chat template.
        end_token: put behind an answer that has none; None for no end token.
        max_length: tokens of an example at most.
    """

    tokenizer: TokenizerWrapper
    template: str | None
    end_token: int | None
    max_length: int

    def encode(self, line: dict[str, Any]) -> Example | None:
        """The example, its answer cut to fit; None where its prompt alone is too long.

        Raises:
            ValueError: the line has none of the forms above.
        """
        if "completion_tokens" in line:
            prompt, answer = list(line["prompt_tokens"]), list(line["completion_tokens"])
        elif "completion" in line and isinstance(line.get("prompt"), str):
            prompt, answer = self._prompt(line["prompt"]), self._answer(line["completion"])
        elif "messages" in line:
            *before, last = line["messages"]
            prompt, answer = chat_tokens(self.tokenizer, before), self._answer(last["content"])
        elif isinstance(line.get("text"), str):
            prompt, answer = [], self._answer(line["text"])
            prompt, answer = answer[:1], answer[1:]
        else:
            raise ValueError(f"it has {', '.join(line) or 'no fields'}")
        if not prompt or not answer:
            raise ValueError("its prompt or its answer is empty")
        if len(prompt) >= self.max_length:
            return None
        return Example(np.array([*prompt, *answer][: self.max_length], np.int32), len(prompt))

    def _prompt(self, text: str) -> list[int]:
        if self.template is None:
            return chat_tokens(self.tokenizer, [{"role": "user", "content": text}])
        return encode(self.template.replace("{prompt}", text), self.tokenizer)

    def _answer(self, text: str) -> list[int]:
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        return tokens if self.end_token is None else [*tokens, self.end_token]


def read_examples(
    path: Path, encoder: Encoder, progress: Callable[[Sequence[Any]], Iterator[Any]] | None = None
) -> list[Example]:
    """Every example of a data file whose prompt is not too long.

    Args:
        path: a JSON Lines file.
        encoder: makes the examples.
        progress: wraps the lines, to show how far it is.
    """
    lines = read_lines(path, "--data", "a folder with train.jsonl and valid.jsonl")
    found = [
        _example(path, number, text, encoder)
        for number, text in (progress(lines) if progress else lines)
    ]
    examples = [example for example in found if example is not None]
    if not examples:
        raise InputError(
            f"{path} has no example that fits",
            expected=f"prompts of less than {encoder.max_length} tokens",
            do="raise --max-length, or check the file",
        )
    return examples


def _example(path: Path, number: int, text: str, encoder: Encoder) -> Example | None:
    try:
        return encoder.encode(json.loads(text))
    except InputError as error:
        raise InputError(
            f"{path}, line {number}: {error.found}", expected=error.expected, do=error.do
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}, line {number}: {error or type(error).__name__}",
            expected=f"a JSON object with {_FORMS}",
            do="correct the line",
        ) from error


def choose_draft_vocab(examples: Sequence[Example], size: int, vocab_size: int) -> np.ndarray:
    """[size] ids, ascending: the most frequent tokens of the answers.

    Where the answers have fewer kinds of token, those of the prompts follow, then the lowest
    ids. Tokens that are left out can never be guessed, only be decided by the target.
    """
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(answers, example.tokens[example.start :], 1)
        np.add.at(prompts, example.tokens[: example.start], 1)
    order = np.lexsort((np.arange(vocab_size), -prompts, -answers))
    return np.sort(order[: min(size, vocab_size)]).astype(np.int32)


def coverage(examples: Sequence[Example], draft_vocab: np.ndarray) -> float:
    """The share of answer tokens that are in the draft vocabulary."""
    answers = np.concatenate([example.tokens[example.start :] for example in examples])
    return float(np.isin(answers, draft_vocab).mean())


def draft_indices(targets: np.ndarray, draft_vocab: np.ndarray | None) -> np.ndarray:
    """Target ids as places in the draft vocabulary; -1 where they are not in it, or were -1."""
    if draft_vocab is None:
        return targets
    places = np.searchsorted(draft_vocab, targets).clip(max=len(draft_vocab) - 1)
    return np.where(draft_vocab[places] == targets, places, -1)
