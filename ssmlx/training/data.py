"""Data folders as token ids, draft vocabularies, and bucketed batches.

A folder, as mlx-lm's LoRA training takes it, holds `train.jsonl` and `valid.jsonl`, one JSON object
per line; `_FORMS` below lists their fields. "messages" is a chat whose last answer is learned;
"text" is learned from its second token on; token ids are as `convert.continuations` writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError, require
from ..json_files import found_in_json, read_json_rows
from ..model.masks import hide_outside_window, window_start
from ..prompts import (
    TokensBetweenTurns,
    check_text,
    encode,
    encode_turns,
    require_text_field,
    shows_last_turn_alone,
)
from ..templates import frozen_at_new_year_2026
from ..turns import normalise_turns

_FORMS = "prompt and completion, messages, text, or prompt_tokens and completion_tokens"
_TOKEN_FIELDS = ("prompt_tokens", "completion_tokens")
_POOL = 32  # batches' worth of shuffled examples that are sorted by length among themselves


_log = logging.getLogger("ssmlx")


@dataclass(frozen=True, eq=False)
class Example:
    """A text to learn from: a prompt and an answer, or a conversation with several answers."""

    tokens: np.ndarray  # [T] ids, prompt first
    start: int  # index of the answer's first token, at least 1
    turns: tuple[tuple[int, int], ...] = ()  # of several answers: where each begins and ends
    is_cut: bool = False  # whether its end was cut off

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.start

    @property
    def answers(self) -> tuple[tuple[int, int], ...]:
        """(first token, end) of each answer in `tokens`; the end is not part of it."""
        return self.turns or ((self.start, len(self.tokens)),)


class _PromptAndAnswer(NamedTuple):
    """Token ids, either of which may be empty."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Encoder:
    """Turns lines of training data into token ids, by `encode_row`."""

    tokenizer: TokenizerWrapper
    template: str | None  # text with `{prompt}`, or None for the model's chat template
    end_token: int | None  # ends an answer that has none; None for no end token
    max_length: int  # tokens of an example at most

    def encode_row(
        self,
        row: Mapping[str, Any],
        where: str = "the row",  # the file and line, which each message begins with
    ) -> Example | None:
        """Encode a row, cut to `max_length`; None if the prompt alone is too long."""
        prompt, answer = self._encode(row, where)
        empty = "answer" if prompt else "prompt"
        require(
            bool(prompt and answer),
            f"{where}, has an empty {empty}",
            expected="a token or more",
            do="correct the line",
        )
        if len(prompt) >= self.max_length:
            return None
        tokens = [*prompt, *answer]
        kept = np.array(tokens[: self.max_length], np.int32)
        return Example(kept, len(prompt), is_cut=len(tokens) > self.max_length)

    def _encode(self, row: Mapping[str, Any], where: str) -> _PromptAndAnswer:
        if "completion_tokens" in row:
            prompt, answer = (_token_ids_of(row, name, where) for name in _TOKEN_FIELDS)
            return _PromptAndAnswer(prompt, answer)
        if "text" in row and not {"completion", "messages"} & row.keys():
            tokens = encode(require_text_field(row, "text", where), self.tokenizer)
            return _PromptAndAnswer(tokens[:1], [*tokens[1:], *self._encode_answer("")])
        turns = _turns_of(row, where)
        try:
            return self._encode_prompt_and_answer(turns, row.get("tools"))
        except InputError as error:
            raise error.at(where) from error

    def _encode_prompt_and_answer(
        self, turns: list[dict[str, Any]], tools: Any
    ) -> _PromptAndAnswer:
        require(
            not (len(turns) > 2 and shows_last_turn_alone(turns[:-1], self.template, tools=tools)),
            "it has several turns",
            expected="one question and its answer: --template has room for one question",
            do="give such rows, or no --template",
        )
        of_turns = partial(encode_turns, tokenizer=self.tokenizer, own_template=self.template)
        prompt = of_turns(turns[:-1], tools=tools)
        if not turns[-1].get("tool_calls"):
            return _PromptAndAnswer(prompt, self._encode_answer(turns[-1]["content"]))
        # What the template writes after the first end token is cut.
        # Only the template knows how the model calls a tool.
        whole = of_turns(turns, tools=tools, add_generation_prompt=False)
        require(
            whole[: len(prompt)] == prompt,
            "its tool calls are not where the template starts an answer",
            expected="a chat template that writes them there",
            do="leave such rows out, or use another model",
        )
        answer = whole[len(prompt) :]
        end = self.end_token
        if end is not None and end in answer:
            del answer[answer.index(end) + 1 :]
        return _PromptAndAnswer(prompt, answer)

    def _encode_answer(self, text: str) -> list[int]:
        """Encode an answer without special tokens, except the end token."""
        check_text(text)
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        return tokens if self.end_token is None else [*tokens, self.end_token]


def _turns_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Read the row's turns; the last one is the assistant's."""
    if "completion" in row and ("prompt" in row or "messages" not in row):
        asked = require_text_field(row, "prompt", where)
        answer = require_text_field(row, "completion", where, may_be_blank=True)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    do = "correct the line"
    names = ", ".join(row) or "no fields"
    expected = f"a JSON object with {_FORMS}"
    require("messages" in row, f"{where}, has {names}", expected=expected, do=do)
    found = f'{where}, has a bad "messages"'
    turns = normalise_turns(row["messages"], f"{where}, messages")
    ends_well = bool(turns) and turns[-1]["role"] == "assistant"
    expected = "one turn or more, the last one the assistant's"
    require(ends_well, found, expected=expected, do=do)
    return turns


def _token_ids_of(row: Mapping[str, Any], name: str, where: str) -> list[int]:
    given = row.get(name)
    expected = "a list of token ids, whole numbers from 0 on"
    do = "correct the line"
    has = f'has {found_in_json(given)} for "{name}"' if name in row else f'lacks "{name}"'
    require(isinstance(given, list), f"{where}, {has}", expected=expected, do=do)
    tokens = list(given or ())
    for place, one in enumerate(tokens):
        is_fine = type(one) is int and 0 <= one < 2**31
        found = f'{where}, has {found_in_json(one)} in "{name}", at place {place}'
        require(is_fine, found, expected=expected, do=do)
    return tokens


@frozen_at_new_year_2026()
def read_examples(
    path: Path,
    encoder: Encoder,
    # yields the rows again, with a progress bar
    progress: Callable[[Sequence[Any]], Iterator[Any]] | None = None,
) -> list[Example]:
    """Read examples; templates that ask for the date get a fixed one, so runs are repeatable."""
    rows = read_json_rows(path, "--data", f"a JSON object a line, with {_FORMS}")
    examples = []
    for where, row in (progress or iter)(rows):
        example = encoder.encode_row(row, where)
        if example is not None:
            examples.append(example)
    most = encoder.max_length
    require(
        bool(examples),
        f"{path} has no example that fits: all of its {len(rows)} prompts are too long",
        expected=f"prompts of fewer than {most} tokens",
        do="raise --max-length, or check the file",
    )
    if cut := sum(one.is_cut for one in examples):
        _log.info(
            "%s: %d of %d rows are longer than %d tokens and were cut", path, cut, len(rows), most
        )
    if left_out := len(rows) - len(examples):
        _log.info(
            "%s: %d of %d rows were left out, as their prompts have %d tokens or more",
            path, left_out, len(rows), most,
        )  # fmt: skip
    return examples


def choose_draft_vocab(
    examples: Sequence[Example],
    size: int,  # Vd
    vocab_size: int,  # V, of the model
) -> np.ndarray:
    """[Vd] int32, ascending: the answers' most frequent tokens, then those of prompts."""
    answers = np.zeros(vocab_size, np.int64)
    prompts = np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(answers, example.tokens[example.start :], 1)
        np.add.at(prompts, example.tokens[: example.start], 1)
    order = np.lexsort((np.arange(vocab_size), -prompts, -answers))
    return np.sort(order[: min(size, vocab_size)]).astype(np.int32)


def draft_vocab_coverage(examples: Sequence[Example], draft_vocab: np.ndarray) -> float:
    """The share of the answers' tokens, by occurrences, in the draft vocabulary [Vd]: 0 to 1."""
    answers = np.concatenate([example.tokens[example.start :] for example in examples])
    return float(np.isin(answers, draft_vocab).mean())


def draft_vocab_indices(
    targets: np.ndarray,  # ids, or -1
    draft_vocab: np.ndarray | None,  # [Vd] ids, ascending
) -> np.ndarray:
    """Indices in a draft vocabulary, in the shape of `targets`; -1 for tokens that it lacks."""
    if draft_vocab is None:
        return targets
    places = np.searchsorted(draft_vocab, targets).clip(max=len(draft_vocab) - 1)
    return np.where(draft_vocab[places] == targets, places, -1)


@dataclass(frozen=True)
class Packing:
    """Joins examples as turns of a conversation, and computes what streams see."""

    num_tokens: int  # at most, in a conversation
    frame: TokensBetweenTurns
    window: int  # `StreamConfig.stream_window`

    def pack(self, examples: Sequence[Example]) -> list[Example]:
        """Join examples, in order, into conversations; one longer than `num_tokens` stays alone."""
        found: list[list[Example]] = []
        for example in examples:
            longer = [*found[-1], example] if found else []
            if longer and len(self.join_as_turns(longer).tokens) <= self.num_tokens:
                found[-1] = longer
            else:
                found.append([example])
        return [self.join_as_turns(turns) for turns in found]

    def join_as_turns(self, examples: Sequence[Example]) -> Example:
        """Joins examples as turns of one conversation."""
        if len(examples) == 1:
            return examples[0]
        text: list[int] = []
        turns = []
        size = len(self.frame.opening)
        opening = list(self.frame.opening)
        for example in examples:
            own = example.tokens.tolist()
            # Text before a prompt's first turn, such as a system prompt, is taken from the first
            # example only.
            opens = [n for n in range(example.start) if size and own[n : n + size] == opening]
            if text:
                # The template's closing, which is not learned; the answer may end with its first
                # token.
                text += self.frame.closing[text[-1:] == [*self.frame.closing[:1]] :]
                own = own[opens[0] if opens else 0 :]
            text += own
            turns.append((len(text) - example.num_answer, len(text)))
        return Example(np.array(text, np.int32), turns[0][0], tuple(turns))

    def first_visible_tokens(self, text: Example, start: int, end: int) -> list[int]:
        """For each anchor, the first token after the attention sinks that its streams see."""
        return [window_start(place, self.window) for place in range(start - 1, end - 1)]


class BatchAnswer(NamedTuple):
    row: int
    anchors: slice  # of `Batch.anchors[row]`, those of this answer
    tokens: np.ndarray  # [A] ids


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts side by side: B of them, T columns; K anchors in the text with the most; G streams
    each.

    The answers of a batch start in one column, P:

        column     0   1   2   3   4   5   6      P = 3, the widest prompt
        row 0      .   a   b   A   B   C   /      . padding before the prompt
        row 1      d   e   f   D   /   .   .      / end token      . padding after it

    Node rows P - 1 to T - 2 carry streams. If several examples are packed into one text, as turns
    of a conversation, texts start in column 0, and each example has anchors of its own.
    """

    indices: np.ndarray  # [B] which examples they are, or all that are packed into them
    tokens: np.ndarray  # [B, T] ids, 0 for padding
    lengths: np.ndarray  # [B] tokens of each text
    pads: np.ndarray  # [B] columns of padding before each text
    # [B, T] the column after the answer of which each row predicts a token, and so carries
    # streams; 0 for others
    ends: np.ndarray
    # [B, T] of packed texts: the first token after the sinks that streams of each anchor see
    firsts: np.ndarray | None = None
    whole: Batch | None = None  # the batch of all ranks, if this is one rank's part

    @property
    def positions(self) -> np.ndarray:
        """[B, T] int32 position of each token in its text; 0 for padding before it."""
        columns = np.arange(self.tokens.shape[1])
        positions: np.ndarray = np.maximum(columns - self.pads[:, None], 0).astype(np.int32)
        return positions

    @property
    def causal_visible(self) -> np.ndarray:
        """[B, T, T] bool, which node row (second axis) sees which (third axis)."""
        # Padding before the text sees only itself. Packed examples see earlier ones of their text.
        columns = np.arange(self.tokens.shape[1])
        causal = columns <= columns[:, None]
        own = columns[None, None, :] >= self.pads[:, None, None]
        visible: np.ndarray = (causal & own) | np.eye(len(columns), dtype=bool)
        return visible

    @property
    def stream_visible(self) -> np.ndarray:
        """[B, T, T] bool, which node rows (third axis) a row's (second axis) streams see."""
        # Streams of packed texts see only the attention sinks and what begins at `firsts`.
        if self.firsts is None:
            return self.causal_visible
        return np.asarray(hide_outside_window(self.causal_visible, self.positions, self.firsts))

    def part_of_rank(self, rank: int, num_ranks: int) -> Batch:
        """One rank's part; a rank without texts gets the first text, without targets."""
        rows = np.arange(rank, len(self.tokens), num_ranks)
        share = min(1, len(rows))
        rows = rows if share else np.zeros(1, int)
        arrays = {name: array[rows] for name, array in vars(self).items() if array is not None}
        arrays |= {"lengths": arrays["lengths"] * share, "ends": arrays["ends"] * share}
        return Batch(**{**arrays, "whole": self})

    @property
    def anchors(self) -> np.ndarray:
        """[B, K] columns of rows that carry streams, ascending; those without targets are last."""
        most = (self.ends > 0).sum(axis=1).max()
        return np.argsort(self.ends == 0, axis=1, kind="stable")[:, :most]

    def targets(self, ahead: int) -> np.ndarray:
        """[B, K] the token that stream `ahead` of each anchor should predict (eq. 5); -1 after the
        answer's end.

        Stream j predicts the token j + 1 places after its anchor; `ahead` 0 is the main stream.
        """
        at = self.anchors + ahead + 1
        found = np.take_along_axis(self.tokens, np.minimum(at, self.tokens.shape[1] - 1), axis=1)
        return np.where(at < np.take_along_axis(self.ends, self.anchors, axis=1), found, -1)

    def answers_with_anchors(self) -> Iterator[BatchAnswer]:
        """Yield the answers row by row; a packed text has several."""
        for row, ends in enumerate(self.ends):
            place = 0
            for end in np.unique(ends[ends > 0]):
                answer = self.tokens[row, int(np.argmax(ends == end)) + 1 : end]
                anchors = slice(place, place := place + len(answer))
                yield BatchAnswer(row, anchors, answer)


def collate(
    examples: Sequence[Example],
    indices: np.ndarray,  # [B] indices of `examples`
    packing: Packing | None = None,
) -> Batch:
    """Align texts so that answers start in one column; packed texts start in column 0."""
    texts = [examples[one] for one in indices]
    if packing is not None:
        texts = packing.pack(texts)
    starts = np.array([text.start for text in texts])
    lengths = np.array([len(text.tokens) for text in texts])
    pads = starts.max() - starts if packing is None else np.zeros_like(starts)
    shape = len(texts), int((pads + lengths).max())
    tokens, ends, firsts = (np.zeros(shape, np.int32) for _ in range(3))
    for row, (text, pad, length) in enumerate(zip(texts, pads, lengths, strict=True)):
        tokens[row, pad : pad + length] = text.tokens
        for start, end in text.answers:
            anchors = slice(pad + start - 1, pad + end - 1)
            ends[row, anchors] = pad + end
            if packing is not None:
                firsts[row, anchors] = packing.first_visible_tokens(text, start, end)
    sight = None if packing is None else firsts
    return Batch(np.asarray(indices), tokens, lengths, pads, ends, sight)


def draw_epoch_batches(
    examples: Sequence[Example],
    batch_size: int,
    seed: int,
    epoch: int,  # counted from 0
) -> list[np.ndarray]:
    """Draw an epoch's batches; they depend only on the arguments, so a stopped run repeats them."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(examples))
    batches = []
    for first in range(0, len(order), batch_size * _POOL):
        # Texts of similar length share a batch: within a pool, sorted by the answer's length, then
        # the prompt's.
        pool = order[first : first + batch_size * _POOL]
        sizes = [(examples[i].num_answer, examples[i].start) for i in pool]
        pool = pool[sorted(range(len(pool)), key=sizes.__getitem__)]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


class BatchPlan:
    """Which examples each step of a run learns from, by the seed and the step alone."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,  # examples of a step, over all ranks
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        # joins examples in half of each epoch's batches, drawn at random
        half_packing: Packing | None = None,
    ) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._seed = seed
        self._part = (rank, num_ranks)
        self._packing = half_packing
        self._epoch = -1
        self._batches: list[np.ndarray] = []
        self._joined: set[int] = set()

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs; this rank's part of it."""
        epoch, place = divmod(step, -(-len(self._examples) // self._batch_size))
        if epoch != self._epoch:
            self._batches = draw_epoch_batches(self._examples, self._batch_size, self._seed, epoch)
            self._epoch = epoch
            if self._packing is not None:
                self._choose_packed_half()
        packing = self._packing if place in self._joined else None
        batch = collate(self._examples, self._batches[place], packing)
        return batch if self._part == (0, 1) else batch.part_of_rank(*self._part)

    def _choose_packed_half(self) -> None:
        """Mark half of the epoch's batches, rounded up, as packed, and shuffle their examples."""
        rng = np.random.default_rng([self._seed, self._epoch, 1])
        batches = self._batches
        chosen = rng.permutation(len(batches))[: (len(batches) + 1) // 2]
        mixed = rng.permutation(np.concatenate([batches[place] for place in chosen]))
        ends = np.cumsum([len(batches[place]) for place in chosen])
        for place, part in zip(chosen, np.split(mixed, ends[:-1]), strict=True):
            batches[place] = part
        self._joined = set(chosen.tolist())


def batches_by_length(examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """Batches of similar length, the shortest first, for passes without learning."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    starts = range(0, len(order), batch_size)
    return [collate(examples, np.array(order[i : i + batch_size])) for i in starts]
