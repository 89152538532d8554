"""The terms of eq. 5 for a batch, whose loss each trainer computes; and how decoding would go.

The frozen lower layers' states of an example never change: they are computed once, and cached in a
memory-mapped file.
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

# nodes of the trees whose tokens per call an adapter's settings record
RECORDED_TREE_SIZES = (2, 3, 4, 6, 8, 12, 16)

# Whose hidden states a term's rows are: the nodes', the streams', the streams' corrected by the
# token before the guessed one, or the early exit's.
TermKind = Literal["main", "stream", "given", "prune"]
MAIN: Final = "main"
STREAM: Final = "stream"
GIVEN: Final = "given"
PRUNE: Final = "prune"
# One anchor in STRIDE, a different one each step, teaches the pruning adapter, and streams beside a
# condition what they guess without it: docs/decisions.md, "The loss is cross-entropy".
STRIDE = 4

_CHUNK_LOGITS = 1 << 24
_BITS: dict[int, np.dtype] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_BATCH_SIZE = 32
_BATCHES_PER_MARK = 16
_GOLDEN_RATIO = (1 + 5**0.5) / 2
_PLACES_A_STEP = 1009

Lower = Callable[[Batch], Any]  # a batch to [B, T, state_size], see `Objective.lower`


@dataclass(frozen=True, eq=False)
class Term:
    """One part of eq. 5: the mean cross-entropy of some rows, and its weight."""

    name: str  # what the log calls it, without "_loss"
    kind: TermKind
    rows: np.ndarray  # [B, k] indices into these, batch and rows flattened
    targets: np.ndarray  # [B, k] ids, or indices in the draft vocabulary; -1 if a row has none
    weight: float  # alpha
    previous: np.ndarray | None = None  # [B, k] the token before, of `GIVEN`; None for other kinds

    @property
    def num_targets(self) -> int:
        return int((self.targets >= 0).sum())


class Objective(ABC):
    """The loss of eq. 5 over a model, and what its streams guess; each trainer implements it.

    B texts of T tokens, K anchors at most, G streams, C candidates of each stream.
    """

    FROZEN_PART: ClassVar[str] = "frozen layers"  # label of `lower`'s progress bar
    STORE_FILE: ClassVar[str] = "lower.states"  # in a run's folder, with what `lower` returns
    # distinguishes what `lower` returns from states before the insertion layer
    LOWER_KIND: ClassVar[tuple[str, ...]] = ()
    train: TrainConfig
    vocab_size: int
    draft_vocab: np.ndarray | None  # [Vd] tokens that streams may guess; None for all
    hidden_size: int
    state_bytes: int  # bytes of one number of what `lower` returns, 2 or 4

    @property
    def draft_vocab_size(self) -> int:
        """Vd; V without a draft vocabulary."""
        return self.vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    @property
    def state_size(self) -> int:
        """Numbers of `lower` per token: D, or G * D if the condition alone is trained."""
        return self.hidden_size * (self.train.num_streams if self.train.keeps_streams else 1)

    @property
    def is_conditional(self) -> bool:
        return self.train.condition_rank > 0

    @abstractmethod
    def lower(self, batch: Batch) -> Any:
        """Compute the frozen part's states, which no step changes: [B, T, state_size].

        These are hidden states before the insertion layer. If the condition alone is trained, they
        are the streams' last hidden states, in the columns of their anchors.
        """

    @abstractmethod
    def to_bits(self, states: Any) -> np.ndarray:
        """States as integers of the same width and shape, for a file: NumPy has no bfloat16."""

    @abstractmethod
    def from_bits(self, bits: np.ndarray) -> Any:
        """The inverse of `to_bits`."""

    @abstractmethod
    def mean_losses(self, batch: Batch, lower: Any) -> dict[str, float]:
        """Compute each term's mean as "NAME_loss", in nats per token."""

    @abstractmethod
    def rank_candidates(
        self, batch: Batch, lower: Any, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The C likeliest draft tokens of every stream, best first, [B, K, G, C]; and their log
        probabilities.

        These are [B, K, G, C], or with a condition [B, K, G, C, C]: given each candidate (fourth
        axis) of the stream before, see `DraftVocab.rank_stream_tokens`.
        """

    def rootless_anchors(self, batch: Batch, step: int) -> np.ndarray | None:
        """Which anchors' streams learn at a step without the root's term, [B, K] bool, or None."""
        if not self.train.teaches_rootless_starts:
            return None
        # Multiples of the golden ratio spread evenly, and are not in step with `STRIDE`.
        places = np.arange(batch.anchors.shape[1]) + _PLACES_A_STEP * step
        rootless = places * _GOLDEN_RATIO % 1 < self.train.root_dropout
        return np.tile(rootless, (len(batch.tokens), 1))

    def loss_terms(self, batch: Batch, step: int) -> list[Term]:
        """The terms of eq. 5 that `train` uses; `step` decides which anchors `STRIDE` picks."""
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
        """Guess `count` candidates of each stream, for each of `Batch.answers_with_anchors`."""
        tokens, logprobs = self.rank_candidates(batch, lower, count)
        return [
            Guesses(tokens[row, places], logprobs[row, places], answer)
            for row, places, answer in batch.answers_with_anchors()
        ]

    def replay(self, batch: Batch, lower: Any, size: int) -> Replay:
        """Replay the answers with best trees of `size` nodes; the prompts' calls are counted."""
        return replay(self.guesses(batch, lower, self.num_candidates_for_tree(size)), size)

    def num_candidates_for_tree(self, size: int) -> int:
        """The most candidates of each stream that the best tree of `size` nodes may need."""
        tree = TreeConfig(size=size, width=self.draft_vocab_size)
        count = count_candidates(tree, self.train.num_streams, conditional=self.is_conditional)
        return min(count, self.draft_vocab_size)


class Validation:
    """Measures held-out examples: their losses, and the target calls that they would take."""

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Batch],
        tree_size: int,  # nodes of the trees that are replayed
        # largest tree of `tokens_per_call_by_tree_size`; 0 keeps no guesses
        keep_guesses_to_size: int = 0,
    ) -> None:
        self._objective = objective
        self._tree_size = tree_size
        # Guessing takes most of the time, so guesses for the larger trees are cached.
        self._largest = keep_guesses_to_size
        self._guesses: list[Guesses] = []
        # The frozen layers' results stay in memory.
        self._batches = [(batch, objective.lower(batch)) for batch in batches]

    def measure(self) -> dict[str, float]:
        """Measure losses in nats per token, and "tokens_per_call", prompts' calls included."""
        sums: dict[str, float] = {}
        replays: list[Replay] = []
        self._guesses = []
        for batch, lower in bar(self._batches, "validating"):
            for name, value in self._objective.mean_losses(batch, lower).items():
                sums[f"valid_{name}"] = sums.get(f"valid_{name}", 0.0) + value
            if self._objective.train.num_streams:
                replays.append(self._replay(batch, lower))
        entry = {name: round(value / len(self._batches), 4) for name, value in sums.items()}
        if replays:
            whole = Replay(sum(r.num_tokens for r in replays), sum(r.num_calls for r in replays))
            entry["tokens_per_call"] = round(whole.tokens_per_call, 4)
        return entry

    def _replay(self, batch: Batch, lower: Any) -> Replay:
        if not self._largest:
            return self._objective.replay(batch, lower, self._tree_size)
        count = self._objective.num_candidates_for_tree(self._largest)
        found = self._objective.guesses(batch, lower, count)
        self._guesses += found
        return replay(found, self._tree_size)

    def tokens_per_call_by_tree_size(self, sizes: Sequence[int]) -> dict[int, float]:
        """Tokens per call without the prompts' calls, at least 1; reuses cached guesses."""
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
    """Slices of rows whose float32 logits take about 64 MB."""
    size = max(1, _CHUNK_LOGITS // vocab_size)
    for first in range(0, num_rows, size):
        yield slice(first, first + size)


class LowerStore:
    """A file of the frozen layers' results for all examples, [tokens of all examples, state_size].

    A second file beside it records how much is done, and the `identity` of the layers and the data.
    Files of another identity or size are deleted and begun anew.
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
        is_own = self._read_progress().get("identity") == identity
        if not path.exists() or path.stat().st_size != size or not is_own:
            self._mark.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(path.parent).free
            require(
                size <= free,
                f"{path.parent} has {free / 2**30:.1f} GiB free",
                expected=f"{size / 2**30:.1f} for the frozen layers' results",
                do="free some space, or give --cache-gb 0",
            )
            with path.open("wb") as file:
                file.truncate(size)
        self._path = path
        self._states: np.ndarray = np.memmap(path, _BITS[objective.state_bytes], "r", shape=shape)

    def fill_missing(self, label: str = "") -> None:
        """Compute what is missing; progress is recorded every 16 batches for a later run."""
        batches = batches_by_length(self._examples, _BATCH_SIZE)
        done = self._read_progress().get("batches", 0)
        if done == len(batches):
            return
        try:  # a write through the mapping would end the process if the disk is full
            with self._path.open("r+b") as file:
                for number, batch in enumerate(bar(batches[done:], label), done + 1):
                    self._compute_and_write(file, batch)
                    if number % _BATCHES_PER_MARK == 0 or number == len(batches):
                        file.flush()
                        mark = {"batches": number, "identity": self._identity}
                        write_whole(self._mark, json.dumps(mark).encode())
        except OSError as error:
            raise unwritable_error(
                self._path, error, "free some space, or give --cache-gb 0"
            ) from error

    def _compute_and_write(self, file: BinaryIO, batch: Batch) -> None:
        bits = self._objective.to_bits(self._objective.lower(batch))
        for (index, pad, length), states in zip(self._row_places(batch), bits, strict=True):
            file.seek(index * self._states.strides[0])
            file.write(states[pad : pad + length].tobytes())

    def read_batch(self, batch: Batch) -> Any:
        """Read [B, T, state_size] of a batch that is not packed; padding is zero."""
        out = np.zeros((*batch.tokens.shape, self._objective.state_size), self._states.dtype)
        for row, (index, pad, length) in enumerate(self._row_places(batch)):
            out[row, pad : pad + length] = self._states[index : index + length]
        return self._objective.from_bits(out)

    def _row_places(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """For each row: the index of its first state in the file, its padding, its length."""
        for index, pad, length in zip(batch.indices, batch.pads, batch.lengths, strict=True):
            yield int(self._starts[index]), int(pad), int(length)

    def _read_progress(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._mark.read_text()))
        except (OSError, ValueError, TypeError):  # missing or truncated
            return {}
