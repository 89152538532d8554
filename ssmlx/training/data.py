"""Data folders as token ids, draft vocabularies, and bucketed batches.

A folder, as mlx-lm's LoRA training takes it, holds `train.jsonl` and `valid.jsonl`, one JSON
object a line:

    {"prompt": ..., "completion": ...}                    a question and its answer
    {"messages": [{"role": ..., "content": ...}, ...]}    a chat; its last answer is learnt
    {"text": ...}                                         learnt from its second token on
    {"prompt_tokens": [...], "completion_tokens": [...]}  ids, as `convert.continuations` writes

The answers of a batch start in one column:

    column     0   1   2   3   4   5   6      P = 3, the widest prompt
    row 0      .   a   b   A   B   C   /      . padding before the prompt
    row 1      d   e   f   D   /   .   .      / end token      . padding behind it

Node rows P - 1 to T - 2 carry streams: one list of carriers for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError
from ..prompts import chat_tokens, encode, plain_turns, read_lines
from ..settings import parse_json

_FORMS = "prompt and completion, messages, text, or prompt_tokens and completion_tokens"
_POOL = 32  # batches' worth of shuffled examples that are sorted by length among themselves


@dataclass(frozen=True, eq=False)
class Example:
    tokens: np.ndarray  # [T] ids, prompt first
    start: int  # the first token of the answer, at least 1

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Encoder:
    tokenizer: TokenizerWrapper
    template: str | None  # text with `{prompt}`, or None for the model's chat template
    end_token: int | None  # put behind an answer that has none; None for no end token
    max_length: int  # tokens of an example at most

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
            prompt, answer = self._chat(plain_turns(line["messages"]), line.get("tools"))
        elif isinstance(line.get("text"), str):
            prompt, answer = [], self._answer(line["text"])
            prompt, answer = answer[:1], answer[1:]
        else:
            raise ValueError(f"it has {', '.join(line) or 'no fields'}")
        if not prompt or not answer:
            raise ValueError("its prompt or its answer is empty")
        if len(prompt) >= self.max_length:
            return None
        tokens = [index(token) for token in (*prompt, *answer)][: self.max_length]
        return Example(np.array(tokens, np.int32), len(prompt))

    def _prompt(self, text: str) -> list[int]:
        if self.template is None:
            return chat_tokens(self.tokenizer, [{"role": "user", "content": text}])
        return encode(self.template.replace("{prompt}", text), self.tokenizer)

    def _chat(self, turns: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
        prompt = chat_tokens(self.tokenizer, turns[:-1], tools=tools)
        if not turns[-1].get("tool_calls"):
            return prompt, self._answer(turns[-1]["content"])
        # How a model calls a tool, its template alone knows.
        whole = chat_tokens(self.tokenizer, turns, tools=tools, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise ValueError("its tool calls do not stand where the template starts an answer")
        answer, end = whole[len(prompt) :], self.end_token
        if end is not None and end in answer:
            del answer[answer.index(end) + 1 :]
        return prompt, answer

    def _answer(self, text: str) -> list[int]:
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        return tokens if self.end_token is None else [*tokens, self.end_token]


def read_examples(
    path: Path, encoder: Encoder, progress: Callable[[Sequence[Any]], Iterator[Any]] | None = None
) -> list[Example]:
    """Every example of a JSON Lines file whose prompt is not too long."""
    lines = read_lines(path, "--data", "a folder with train.jsonl and valid.jsonl")
    examples = []
    for number, text in progress(lines) if progress else lines:
        where = f"{path}, line {number}"
        try:
            example = encoder.encode(parse_json(text))
        except InputError as error:
            found = f"{where}: {error.found}"
            raise InputError(found, expected=error.expected, do=error.do) from error
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(
                f"{where}: {error or type(error).__name__}",
                expected=f"a JSON object with {_FORMS}",
                do="correct the line",
            ) from error
        if example is not None:
            examples.append(example)
    if not examples:
        raise InputError(
            f"{path} has no example that fits",
            expected=f"prompts of less than {encoder.max_length} tokens",
            do="raise --max-length, or check the file",
        )
    return examples


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
    answers = np.concatenate([example.tokens[example.start :] for example in examples])
    return float(np.isin(answers, draft_vocab).mean())


def draft_indices(targets: np.ndarray, draft_vocab: np.ndarray | None) -> np.ndarray:
    """Target ids as places in the draft vocabulary; -1 where they are not in it, or were -1."""
    if draft_vocab is None:
        return targets
    places = np.searchsorted(draft_vocab, targets).clip(max=len(draft_vocab) - 1)
    return np.where(draft_vocab[places] == targets, places, -1)


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples side by side: B of them, T columns, K carriers, G streams."""

    indices: np.ndarray  # [B] which examples they are
    tokens: np.ndarray  # [B, T] ids, 0 for padding
    lengths: np.ndarray  # [B] tokens of each example
    pads: np.ndarray  # [B] columns of padding before each example
    prompt_width: int  # P, the column in which answers start
    whole: Batch | None = None  # of which it is the part of one of many ranks

    @property
    def positions(self) -> np.ndarray:
        """[B, T] place of each token in its example; 0 for padding."""
        columns = np.arange(self.tokens.shape[1])
        return np.maximum(columns - self.pads[:, None], 0).astype(np.int32)

    @property
    def visible(self) -> np.ndarray:
        """[B, T, T] bool: what each node row sees; causal, padding hidden but from itself."""
        columns = np.arange(self.tokens.shape[1])
        causal = columns <= columns[:, None]
        own = columns[None, None, :] >= self.pads[:, None, None]
        return (causal & own) | np.eye(len(columns), dtype=bool)

    def part(self, rank: int, size: int) -> Batch:
        """Every `size`-th example from the `rank`-th on; if there is none, one without targets."""
        rows = np.arange(rank, len(self.tokens), size)
        lengths = self.lengths[rows]
        if not len(rows):
            rows, lengths = np.zeros(1, int), np.zeros(1, int)
        parts = self.indices[rows], self.tokens[rows], lengths, self.pads[rows]
        return Batch(*parts, self.prompt_width, self)

    @property
    def carriers(self) -> np.ndarray:
        """[K] columns whose rows predict an answer token, and so carry streams."""
        return np.arange(self.prompt_width - 1, self.tokens.shape[1] - 1)

    def targets(self, ahead: int) -> np.ndarray:
        """[B, K] the token that stream `ahead` of each carrier predicts; -1 where there is none.

        Stream j predicts j + 1 places on (eq. 5); `ahead` 0 is the main stream.
        """
        at = self.carriers + ahead + 1
        padded = np.concatenate(
            [self.tokens, np.zeros((len(self.tokens), ahead + 1), self.tokens.dtype)], axis=1
        )
        inside = at < (self.pads + self.lengths)[:, None]
        return np.where(inside, padded[:, at], -1)


def collate(examples: Sequence[Example], indices: np.ndarray) -> Batch:
    chosen = [examples[i] for i in indices]
    prompt_width = max(example.start for example in chosen)
    columns = prompt_width + max(example.num_answer for example in chosen)
    pads = np.array([prompt_width - example.start for example in chosen])
    tokens = np.zeros((len(chosen), columns), np.int32)
    for row, (example, pad) in enumerate(zip(chosen, pads, strict=True)):
        tokens[row, pad : pad + len(example.tokens)] = example.tokens
    lengths = np.array([len(example.tokens) for example in chosen])
    return Batch(np.asarray(indices), tokens, lengths, pads, prompt_width)


def epoch_order(
    examples: Sequence[Example], batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Index arrays of one epoch's batches, each of at most `batch_size` alike in length.

    The examples are shuffled, sorted by length in pools of 32 batches, cut into batches, and
    the batches are shuffled. Depends on nothing but the arguments, so that a run resumes.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(examples))
    batches = []
    for first in range(0, len(order), batch_size * _POOL):
        pool = order[first : first + batch_size * _POOL]
        sizes = [(examples[i].num_answer, examples[i].start) for i in pool]
        pool = pool[sorted(range(len(pool)), key=sizes.__getitem__)]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


class BatchPlan:
    """Which examples each step of a run sees; the `rank`-th of `size` parts of them if told."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._part = rank, size
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def batch(self, step: int) -> Batch:
        """The batch of `step`, counted from 0 over all epochs."""
        epoch, place = divmod(step, -(-len(self._examples) // self._batch_size))
        if epoch != self._epoch:
            self._batches = epoch_order(self._examples, self._batch_size, self._seed, epoch)
            self._epoch = epoch
        batch = collate(self._examples, self._batches[place])
        return batch if self._part == (0, 1) else batch.part(*self._part)


def in_order(examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """Every example once, those of like length together: for passes without learning."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    starts = range(0, len(order), batch_size)
    return [collate(examples, np.array(order[i : i + batch_size])) for i in starts]
