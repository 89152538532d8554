"""The terms of eq. 5 for a batch, whose loss each trainer computes; and how decoding would go.

What the frozen lower layers say of an example never changes: it is computed once, and kept in a
file as long as the data has tokens, whose part that is in use stays in memory.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal

import numpy as np

from ..bars import bar
from ..errors import require, unwritable_error
from ..loading.files import write_whole
from ..model.tree import count_candidates
from ..settings import TreeConfig
from .config import TrainConfig
from .data import Batch, Example, batches_by_length, draft_vocab_indices
from .replay import Guesses, Replay, replay

RECORDED_TREE_SIZES = (2, 3, 4, 6, 8, 12, 16)
"""Nodes of the trees whose tokens per call an adapter's settings record."""

TermKind = Literal["main", "stream", "given", "prune"]
"""Whose hidden states a term's rows are: the nodes'; the streams'; the streams', each corrected by
the token before the one that it guesses; or the early exit's."""
MAIN: Final = "main"
STREAM: Final = "stream"
GIVEN: Final = "given"
PRUNE: Final = "prune"
STRIDE = 4
"""One anchor in so many, a different one each step, teaches the pruning adapter, and streams
beside a condition what they guess without it: perf/README.md, "Objectives"."""

_CHUNK_LOGITS = 1 << 24
_BITS: dict[int, np.dtype] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_BATCH_SIZE = 32
_BATCHES_PER_MARK = 16
_GOLDEN_RATIO = (1 + 5**0.5) / 2
_PLACES_A_STEP = 1009

Lower = Callable[[Batch], Any]
"""A batch to [B, T, state_size] of the frozen part, see `Objective.lower`."""


@dataclass(frozen=True, eq=False)
class Term:
    """One part of eq. 5: the mean cross-entropy of some rows, and its weight."""

    name: str  # what the log calls it, without "_loss"
    kind: TermKind
    rows: np.ndarray  # [B, k] places in these, batch and rows flattened
    targets: np.ndarray  # [B, k] ids, or places in the draft vocabulary; -1 where a row has none
    weight: float  # alpha
    previous: np.ndarray | None = None  # [B, k] the token before, of `GIVEN`; None for other kinds

    @property
    def num_targets(self) -> int:
        """How many rows have a target."""
        return int((self.targets >= 0).sum())


class Objective(ABC):
    """The loss of eq. 5 over a model, and what its streams guess; each trainer has its own."""

    FROZEN_PART: ClassVar[str] = "frozen layers"
    """What `lower` computes, for a progress bar."""
    STORE_FILE: ClassVar[str] = "lower.states"
    """Of a run's folder, with what `lower` gives."""
    LOWER_KIND: ClassVar[tuple[str, ...]] = ()
    """Tells what `lower` gives from the states before the insertion layer."""
    train: TrainConfig
    vocab_size: int
    draft_vocab: np.ndarray | None  # [Vd] tokens that streams may guess; None for all
    hidden_size: int
    state_bytes: int  # of one number of what `lower` gives, 2 or 4

    @property
    def draft_vocab_size(self) -> int:
        """Vd, how many tokens streams may guess; V without a draft vocabulary."""
        return self.vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    @property
    def state_size(self) -> int:
        """How many numbers `lower` gives for each token: D, or G * D where the condition alone is
        trained.
        """
        return self.hidden_size * (self.train.num_streams if self.train.keeps_streams else 1)

    @property
    def is_conditional(self) -> bool:
        """Whether the scores of what a stream guesses depend on the token before it."""
        return self.train.condition_rank > 0

    @abstractmethod
    def lower(self, batch: Batch) -> Any:
        """Return [B, T, state_size] what the frozen part of the model gives, which no step changes.

        That is the hidden states before the insertion layer; or, where only the condition is
        trained, the streams' last hidden states before the final norm in the columns of their
        anchors.
        """

    @abstractmethod
    def to_bits(self, states: Any) -> np.ndarray:
        """Return what `lower` gives as integers of the same width and shape, for a file: NumPy has
        no bfloat16.
        """

    @abstractmethod
    def from_bits(self, bits: np.ndarray) -> Any:
        """Return the states of which `to_bits` made these integers, as an array of the trainer's
        own kind.
        """

    @abstractmethod
    def mean_losses(self, batch: Batch, lower: Any) -> dict[str, float]:
        """Return the mean of each term of the loss, by "NAME_loss", in nats a token; nothing is
        learned.

        Args:
            batch: B texts.
            lower: as the method of that name gives it for the batch.
        """

    @abstractmethod
    def rank_candidates(
        self, batch: Batch, lower: Any, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank the tokens that every stream of a batch may guess.

        Args:
            batch: B texts with K anchors at most.
            lower: as the method of that name gives it for the batch.
            count: C, tokens of each stream.

        Returns:
            [B, K, G, C] the likeliest draft tokens, best first; and their log probabilities [B, K,
            G, C], or [B, K, G, C, C] given each candidate of the stream before where there is a
            condition, see `DraftVocab.rank_stream_tokens`.
        """

    def rootless_anchors(self, batch: Batch, step: int) -> np.ndarray | None:
        """[B, K] bool, which anchors' streams learn at a step without the root's term; None for
        none.
        """
        if not self.train.teaches_rootless_starts:
            return None
        # Multiples of the golden ratio spread evenly, and keep no time with `STRIDE`.
        places = np.arange(batch.anchors.shape[1]) + _PLACES_A_STEP * step
        rootless = places * _GOLDEN_RATIO % 1 < self.train.root_dropout
        return np.tile(rootless, (len(batch.tokens), 1))

    def loss_terms(self, batch: Batch, step: int) -> list[Term]:
        """Return the terms of eq. 5 for a batch, with their rows and targets.

        These are the main stream's where LoRA on every row is trained; each stream's own and, where
        there is a condition, each one's given the token before; and the pruning adapter's, unless
        its weight is 0. What is not trained, see `TrainConfig.train_only`, has none.

        Args:
            batch: B texts.
            step: decides which anchors, one in `STRIDE`, teach the pruning adapter, and the streams
                themselves where there is a condition.
        """
        train = self.train
        found = []
        node_rows = np.arange(batch.tokens.size).reshape(batch.tokens.shape)
        node_rows = np.take_along_axis(node_rows, batch.anchors, axis=1)
        main_targets = batch.targets(0)
        if train.adapter_scope == "all" and not train.train_only:
            found.append(Term(MAIN, MAIN, node_rows, main_targets, train.main_weight))
        some = slice(step % STRIDE, None, STRIDE)
        own = some if train.condition_rank else slice(None)
        shape = (*node_rows.shape, train.num_streams)
        stream_rows = np.arange(node_rows.size * train.num_streams).reshape(shape)
        for stream, alpha in enumerate(train.alphas, 1):
            targets = draft_vocab_indices(batch.targets(stream), self.draft_vocab)
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
        """Return what the streams guess along every answer of a batch, `count` candidates each, in
        the order of `Batch.answers_with_anchors`.

        Args:
            batch: B texts.
            lower: as the method of that name gives it for the batch.
            count: C, candidates of each stream.
        """
        tokens, logprobs = self.rank_candidates(batch, lower, count)
        return [
            Guesses(tokens[row, places], logprobs[row, places], answer)
            for row, places, answer in batch.answers_with_anchors()
        ]

    def replay(self, batch: Batch, lower: Any, size: int) -> Replay:
        """Count the target calls of decoding the batch's answers with best trees of `size` nodes;
        there must be a stream or more.

        Args:
            batch: B texts.
            lower: as the method of that name gives it for the batch.
            size: nodes of a tree, the root included.

        Returns:
            Tokens and calls, the prompts' calls counted.
        """
        return replay(self.guesses(batch, lower, self.num_candidates_for_tree(size)), size)

    def num_candidates_for_tree(self, size: int) -> int:
        """Return how many candidates of each stream the best tree of `size` nodes may need; at most
        Vd.
        """
        tree = TreeConfig(size=size, width=self.draft_vocab_size)
        count = count_candidates(tree, self.train.num_streams, conditional=self.is_conditional)
        return min(count, self.draft_vocab_size)


class Validation:
    """Held-out examples: their losses, and the target calls that decoding them would take."""

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Batch],
        tree_size: int,
        keep_guesses_to_size: int = 0,
    ) -> None:
        """Compute the frozen layers' results of all batches, which stay in memory.

        Args:
            objective: of the training.
            batches: of the examples.
            tree_size: nodes of the trees that are replayed.
            keep_guesses_to_size: nodes of the largest tree whose replay is asked for by
                `tokens_per_call_by_tree_size` before the weights change: what is guessed for it is
                kept, as guessing takes most of the time. 0 keeps nothing.
        """
        self._objective = objective
        self._tree_size = tree_size
        self._largest = keep_guesses_to_size
        self._guesses: list[Guesses] = []
        self._batches = [(batch, objective.lower(batch)) for batch in batches]

    def measure_losses_and_tokens_per_call(self) -> dict[str, float]:
        """Measure the held-out examples under the weights as they are now.

        Returns:
            The mean losses over batches as "valid_NAME_loss", in nats a token, and
            "tokens_per_call", the prompts' calls counted, where there are streams. Empty without
            batches.
        """
        sums: dict[str, float] = {}
        replays: list[Replay] = []
        self._guesses = []
        for batch, lower in bar(self._batches, "validating"):
            for name, value in self._objective.mean_losses(batch, lower).items():
                sums[f"valid_{name}"] = sums.get(f"valid_{name}", 0.0) + value
            if self._objective.train.num_streams:
                replays.append(self._replay_and_keep_guesses(batch, lower))
        entry = {name: round(value / len(self._batches), 4) for name, value in sums.items()}
        if replays:
            whole = Replay(sum(r.num_tokens for r in replays), sum(r.num_calls for r in replays))
            entry["tokens_per_call"] = round(whole.tokens_per_call, 4)
        return entry

    def _replay_and_keep_guesses(self, batch: Batch, lower: Any) -> Replay:
        """Replay a batch with trees of `tree_size` nodes, and keep the guesses where
        `keep_guesses_to_size` asks for it; there must be a stream or more.
        """
        if not self._largest:
            return self._objective.replay(batch, lower, self._tree_size)
        count = self._objective.num_candidates_for_tree(self._largest)
        found = self._objective.guesses(batch, lower, count)
        self._guesses += found
        return replay(found, self._tree_size)

    def tokens_per_call_by_tree_size(self, sizes: Sequence[int]) -> dict[int, float]:
        """Return tokens per call, 1 at least and without the prompts' calls, by nodes of the tree;
        empty without streams.

        The guesses that `measure_losses_and_tokens_per_call` has kept last are replayed where they
        are enough, also if the weights have changed since; else new ones are made.

        Args:
            sizes: nodes of trees, the root included.
        """
        objective = self._objective
        if not objective.train.num_streams:
            return {}
        guesses = self._guesses
        if not guesses or max(sizes) > self._largest:
            count = objective.num_candidates_for_tree(max(sizes))
            guesses = [g for b, lower in self._batches for g in objective.guesses(b, lower, count)]
        replays = {size: replay(guesses, size).without_prompts(len(guesses)) for size in sizes}
        return {size: round(max(1.0, one.tokens_per_call), 3) for size, one in replays.items()}


def split_rows(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Yield slices that cover `num_rows` rows in order, each of as many as have some 64 MB of
    float32 logits over `vocab_size` tokens, 1 at least.
    """
    size = max(1, _CHUNK_LOGITS // vocab_size)
    for first in range(0, num_rows, size):
        yield slice(first, first + size)


class LowerStore:
    """The frozen layers' results of all examples, [tokens of all examples, state_size], in a file.

    A second file beside it notes how much is done, and the `identity` of the layers and the data.
    Files of another identity or size are deleted and begun anew.
    """

    def __init__(
        self, path: Path, examples: Sequence[Example], objective: Objective, identity: str = ""
    ) -> None:
        """Open the file, or make one of the full size, which `fill_missing` fills.

        A file of another identity or size is deleted first, with the note of what is done.

        Args:
            path: of the file, in a folder that is there.
            examples: whose results are kept, one or more.
            objective: computes them.
            identity: tells layers and data from others.

        Raises:
            InputError: the disk has no room.
        """
        self._examples = examples
        self._objective = objective
        self._identity = identity
        ends = np.cumsum([len(example.tokens) for example in examples])
        self._starts = np.concatenate([[0], ends[:-1]])
        shape = int(ends[-1]), objective.state_size
        self._mark = path.with_name(path.name + ".json")
        size = int(ends[-1]) * objective.state_size * objective.state_bytes
        is_own = self._read_progress_or_empty().get("identity") == identity
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

    def fill_missing(self, label: str = "") -> None:
        """Compute what is not in the file yet, with a progress bar called `label`.

        Progress is noted every 16 batches and at the end, so that a stopped run goes on from there.

        Raises:
            InputError: the disk is full.
        """
        batches = batches_by_length(self._examples, _BATCH_SIZE)
        done = self._read_progress_or_empty().get("batches", 0)
        if done == len(batches):
            return
        try:  # a write through the mapping, where the disk is full, would end the process
            with self._path.open("r+b") as file:
                for number, batch in enumerate(bar(batches[done:], label), done + 1):
                    self._compute_and_write(file, batch)
                    if number % _BATCHES_PER_MARK == 0 or number == len(batches):
                        file.flush()
                        mark = {"batches": number, "identity": self._identity}
                        write_whole(self._mark, json.dumps(mark).encode())
        except OSError as error:
            raise unwritable_error(self._path, error, "free some, or give --cache-gb 0") from error

    def _compute_and_write(self, file: BinaryIO, batch: Batch) -> None:
        """Compute the frozen layers' results of a batch, and write those of its tokens to their
        places in the file.
        """
        bits = self._objective.to_bits(self._objective.lower(batch))
        for (index, pad, length), states in zip(self._row_places(batch), bits, strict=True):
            file.seek(index * self._states.strides[0])
            file.write(states[pad : pad + length].tobytes())

    def read_batch(self, batch: Batch) -> Any:
        """Read [B, T, state_size] of a batch that is not packed, as the objective's `lower` gives
        it; zeros at its padding.
        """
        out = np.zeros((*batch.tokens.shape, self._objective.state_size), self._states.dtype)
        for row, (index, pad, length) in enumerate(self._row_places(batch)):
            out[row, pad : pad + length] = self._states[index : index + length]
        return self._objective.from_bits(out)

    def _row_places(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """Yield, for each row of a batch: the number of its first state in the file, its first
        column that is no padding, and how many tokens it has.
        """
        for index, pad, length in zip(batch.indices, batch.pads, batch.lengths, strict=True):
            yield int(self._starts[index]), int(pad), int(length)

    def _read_progress_or_empty(self) -> dict[str, Any]:
        """Return how many "batches" are in the file, and of which "identity"; empty where there is
        no whole note.
        """
        try:
            return dict(json.loads(self._mark.read_text()))
        except (OSError, ValueError, TypeError):  # none, or cut off
            return {}
