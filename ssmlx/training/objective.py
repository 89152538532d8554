"""What every trainer computes of a batch: eq. 5, and how decoding held-out text would go.

What the frozen lower layers say of an example never changes: it is computed once, and kept in a
file as long as the data has tokens, whose part that is in use stays in memory.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..bars import bar
from ..errors import require, unwritable
from ..loading.files import write_whole
from ..model.tree import num_candidates
from ..settings import TreeConfig
from .config import TrainConfig
from .data import Batch, Example, draft_indices, in_order
from .replay import Guesses, Replay, replay

RECORDED_TREE_SIZES = (2, 3, 4, 6, 8, 12, 16)
"""Nodes of the trees whose tokens per call an adapter's settings record."""

MAIN = "main"
STREAM = "stream"
GIVEN = "given"
PRUNE = "prune"
STRIDE = 4
"""One carrier in so many, a different one each step, teaches the pruning adapter, and streams
beside a condition what they guess without it: perf/README.md, "Objectives"."""

_CHUNK_LOGITS = 1 << 24
_BITS: dict[int, np.dtype] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_BATCH_SIZE = 32
_BATCHES_PER_MARK = 16

Lower = Callable[[Batch], Any]
"""A batch to [B, T, D] hidden states before layer N - Ns."""


@dataclass(frozen=True, eq=False)
class Term:
    """One part of eq. 5: a mean of cross-entropies over some rows."""

    name: str  # what the log calls it, without "_loss"
    # which hidden states its rows are of: `MAIN`, `STREAM`, `PRUNE`, or `GIVEN`: a stream's,
    # corrected by the token before the one that it guesses
    kind: str
    rows: np.ndarray  # [B, k] places in these, batch and rows flattened
    targets: np.ndarray  # [B, k] ids, or places in the draft vocabulary; -1 where a row has none
    weight: float  # alpha
    previous: np.ndarray | None = None  # [B, k] that token; None for other kinds

    @property
    def num_targets(self) -> int:
        return int((self.targets >= 0).sum())


class Objective(ABC):
    """A loss over a model that streams are trained on; its hidden states are its own affair."""

    train: TrainConfig
    vocab_size: int
    draft_vocab: np.ndarray | None  # [Vd] tokens that streams may guess; None for all
    hidden_size: int
    state_bytes: int  # of one number of what `lower` gives, 2 or 4

    @property
    def draft_vocab_size(self) -> int:
        """Vd; V where every token may be guessed."""
        return self.vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    @property
    def state_size(self) -> int:
        """Numbers of what `lower` gives of a token."""
        return self.hidden_size * (self.train.num_streams if self.train.keeps_streams else 1)

    @property
    def is_conditional(self) -> bool:
        """Whether what streams guess is scored given the tokens before it."""
        return self.train.condition_rank > 0

    @abstractmethod
    def lower(self, batch: Batch) -> Any:
        """[B, T, `state_size`] what is frozen says: layers, or streams and all below them."""

    @abstractmethod
    def to_bits(self, states: Any) -> np.ndarray:
        """What `lower` gives as NumPy's integers of its width: NumPy has no bfloat16."""

    @abstractmethod
    def from_bits(self, bits: np.ndarray) -> Any:
        """The way back."""

    @abstractmethod
    def parts(self, batch: Batch, lower: Any) -> dict[str, float]:
        """Each part of the loss in nats a token, without learning."""

    @abstractmethod
    def ranked(self, batch: Batch, lower: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
        """[B, K, G, count] the likeliest draft tokens of every stream, and log probabilities.

        Best first. Beside a condition the latter are [B, K, G, count, count], of each given each of
        the stream before, see `DraftVocab.rank`.
        """

    def terms(self, batch: Batch, step: int) -> list[Term]:
        """The parts of eq. 5; `step` decides which carriers teach the pruning adapter."""
        train = self.train
        found = []
        node_rows = np.arange(batch.tokens.size).reshape(batch.tokens.shape)
        node_rows = np.take_along_axis(node_rows, batch.carriers, axis=1)
        main_targets = batch.targets(0)
        if train.adapter_scope == "all" and not train.train_only:
            found.append(Term(MAIN, MAIN, node_rows, main_targets, train.main_weight))
        some = slice(step % STRIDE, None, STRIDE)
        own = some if train.condition_rank else slice(None)
        shape = (*node_rows.shape, train.num_streams)
        stream_rows = np.arange(node_rows.size * train.num_streams).reshape(shape)
        for stream, alpha in enumerate(train.alphas, 1):
            targets = draft_indices(batch.targets(stream), self.draft_vocab)
            rows = stream_rows[:, :, stream - 1]
            if not train.keeps_streams:
                found.append(Term(f"stream_{stream}", STREAM, rows[:, own], targets[:, own], alpha))
            if train.condition_rank:
                before = batch.targets(stream - 1)
                found.append(Term(f"given_{stream}", GIVEN, rows, targets, alpha, before))
        if train.prune_rank and train.prune_weight and not train.keeps_streams:
            rows = node_rows[:, some]
            targets = main_targets[:, some]
            found.append(Term(PRUNE, PRUNE, rows, targets, train.prune_weight))
        return found

    def guesses(self, batch: Batch, lower: Any, count: int) -> list[Guesses]:
        tokens, logprobs = self.ranked(batch, lower, count)
        return [
            Guesses(tokens[row, places], logprobs[row, places], answer)
            for row, places, answer in batch.answers()
        ]

    def replay(self, batch: Batch, lower: Any, size: int) -> Replay | None:
        """The target calls of decoding the answers with best trees of `size` nodes.

        None where nothing drafts.
        """
        if not self.train.num_streams:
            return None
        return replay(self.guesses(batch, lower, self.num_ranked(size)), size)

    def num_ranked(self, size: int) -> int:
        """Candidates of a stream that best trees of up to `size` nodes may need: no more than it
        may guess."""
        tree = TreeConfig(size=size, width=self.draft_vocab_size)
        count = num_candidates(tree, self.train.num_streams, conditional=self.is_conditional)
        return min(count, self.draft_vocab_size)


class Validation:
    """Held-out examples: their losses, and the target calls that decoding them would take.

    Args:
        objective: of the training.
        batches: of the examples.
        size: nodes of the trees that are replayed.
        largest: nodes of the largest tree whose replay is asked for by `curve` before the weights
            change: what is guessed for it is kept, as guessing takes most of the time. 0 keeps
            nothing.
    """

    def __init__(
        self, objective: Objective, batches: Sequence[Batch], size: int, largest: int = 0
    ) -> None:
        self._objective = objective
        self._size = size
        self._largest = largest if objective.train.num_streams else 0
        self._guesses: list[Guesses] = []
        self._batches = [(batch, objective.lower(batch)) for batch in batches]

    def __call__(self) -> dict[str, float]:
        """Mean losses, and tokens per call where something drafts."""
        sums: dict[str, float] = {}
        replays: list[Replay] = []
        self._guesses = []
        for batch, lower in bar(self._batches, "validating"):
            for name, value in self._objective.parts(batch, lower).items():
                sums[f"valid_{name}"] = sums.get(f"valid_{name}", 0.0) + value
            found = self._replayed(batch, lower)
            replays += [] if found is None else [found]
        entry = {name: round(value / len(self._batches), 4) for name, value in sums.items()}
        if replays:
            whole = Replay(sum(r.num_tokens for r in replays), sum(r.num_calls for r in replays))
            entry["tokens_per_call"] = round(whole.tokens_per_call, 4)
        return entry

    def _replayed(self, batch: Batch, lower: Any) -> Replay | None:
        if not self._largest:
            return self._objective.replay(batch, lower, self._size)
        count = self._objective.num_ranked(self._largest)
        found = self._objective.guesses(batch, lower, count)
        self._guesses += found
        return replay(found, self._size)

    def curve(self, sizes: Sequence[int]) -> dict[int, float]:
        """Tokens per call after the prompts', by nodes, as adapters tell; none if none drafts."""
        objective = self._objective
        if not objective.train.num_streams:
            return {}
        guesses = self._guesses
        if not guesses or max(sizes) > self._largest:
            count = objective.num_ranked(max(sizes))
            guesses = [g for b, lower in self._batches for g in objective.guesses(b, lower, count)]
        replays = {size: replay(guesses, size).after(len(guesses)) for size in sizes}
        return {size: round(max(1.0, one.tokens_per_call), 3) for size, one in replays.items()}


def row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Rows whose logits are computed at a time: by far the largest arrays of a step."""
    size = max(1, _CHUNK_LOGITS // vocab_size)
    for first in range(0, num_rows, size):
        yield slice(first, first + size)


class LowerStore:
    """[tokens of all examples, D] hidden states in a file.

    A file beside it marks how much of it is done, and the `identity` of its layers and data: one
    of another identity is begun anew.
    """

    def __init__(
        self, path: Path, examples: Sequence[Example], objective: Objective, identity: str = ""
    ) -> None:
        self._examples = examples
        self._objective = objective
        self._identity = identity
        ends = np.cumsum([len(example.tokens) for example in examples])
        self._starts = np.concatenate([[0], ends[:-1]])
        shape = int(ends[-1]), objective.state_size
        self._mark = path.with_name(path.name + ".json")
        size = int(ends[-1]) * objective.state_size * objective.state_bytes
        is_own = self._read_mark().get("identity") == identity
        if not path.exists() or path.stat().st_size != size or not is_own:
            self._mark.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(path.parent).free
            require(
                size <= free,
                f"{path.parent} has {free / 2**30:.1f} GiB free",
                expected=f"{size / 2**30:.1f} for the frozen layers' results",
                do="free some, or give --cache-gb 0",
            )
            with path.open("wb") as file:
                file.truncate(size)
        self._path = path
        self._states: np.ndarray = np.memmap(path, _BITS[objective.state_bytes], "r", shape=shape)

    def fill(self, label: str = "") -> None:
        """Compute what is not there yet, in batches that depend on the examples alone."""
        batches = in_order(self._examples, _BATCH_SIZE)
        done = self._read_mark().get("batches", 0)
        if done == len(batches):
            return
        try:  # a write through the mapping, where the disk is full, would end the process
            with self._path.open("r+b") as file:
                for number, batch in enumerate(bar(batches[done:], label), done + 1):
                    self._write(file, batch)
                    if number % _BATCHES_PER_MARK == 0 or number == len(batches):
                        file.flush()
                        mark = {"batches": number, "identity": self._identity}
                        write_whole(self._mark, json.dumps(mark).encode())
        except OSError as error:
            raise unwritable(self._path, error, "free some, or give --cache-gb 0") from error

    def _write(self, file: BinaryIO, batch: Batch) -> None:
        bits = self._objective.to_bits(self._objective.lower(batch))
        for (index, pad, length), states in zip(self._rows(batch), bits, strict=True):
            file.seek(index * self._states.strides[0])
            file.write(states[pad : pad + length].tobytes())

    def get(self, batch: Batch) -> Any:
        """[B, T, D] of a batch, as the objective has them; zeros at its padding."""
        out = np.zeros((*batch.tokens.shape, self._objective.state_size), self._states.dtype)
        for row, (index, pad, length) in enumerate(self._rows(batch)):
            out[row, pad : pad + length] = self._states[index : index + length]
        return self._objective.from_bits(out)

    def _rows(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """(first state, column, tokens) of each row."""
        for index, pad, length in zip(batch.indices, batch.pads, batch.lengths, strict=True):
            yield int(self._starts[index]), int(pad), int(length)

    def _read_mark(self) -> dict:
        try:
            return dict(json.loads(self._mark.read_text()))
        except (OSError, ValueError, TypeError):  # none, or cut off
            return {}
