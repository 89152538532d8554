"""A training run in MLX: its losses (eq. 5), its steps, and what is saved.

Every step is a function of the settings, the data and the state before it. A run that was
killed goes on from its last saved state to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from ..decoding.drafter import rank_candidates
from ..errors import InputError
from ..loading.load import load_base, resolve_dtype
from ..model.backbone import Backbone
from ..model.shapes import to_int, to_list
from ..settings import read_json
from ..tuning.replay import Guesses
from .batches import Batch
from .config import TrainConfig
from .draft_vocab import draft_indices
from .job import check_gradient
from .lower_store import LowerStore
from .mlx_losses import linear_cross_entropy
from .mlx_model import Layout, TrainedModel, Weights
from .validation import answers

PRUNE_STRIDE = 4
"""One carrier in so many, a different one each step, teaches the pruning adapter."""

_ROWS_AT_ONCE = 256
_CACHE_BYTES = 1 << 31
_STREAM_LOSS, _MAIN_LOSS, _PRUNE_LOSS = "stream", "main", "prune"


def load_frozen(path: Path, dtype: str) -> Backbone:
    """The base model of a folder, to be trained on.

    Packed weights stay packed for "stored", and on a GPU for "auto". Nothing runs in float16,
    in which small gradients vanish: such weights are held, exactly, in float32.

    Raises:
        InputError: it cannot be loaded, or is not a regular decoder.
    """
    packed = "quantization" in read_json(path / "config.json", "a model folder")
    if dtype == "auto" and resolve_dtype(dtype) == "stored" and not packed:
        dtype = "bfloat16"
    backbone, _ = load_base(path, dtype)
    if backbone.dtype == mx.float16:
        backbone.model.set_dtype(mx.float32)
        mx.eval(backbone.model.parameters())
    return backbone


@dataclass(frozen=True, eq=False)
class Term:
    """One part of eq. 5: a mean of cross-entropies over some rows.

    Attributes:
        name: what the log calls it.
        kind: which hidden states its rows are of.
        rows: [R] places in these, batch and rows flattened.
        targets: [R] token ids, or places in the draft vocabulary.
        weight: alpha.
    """

    name: str
    kind: str
    rows: np.ndarray
    targets: np.ndarray
    weight: float

    @property
    def scales(self) -> np.ndarray:
        """[R] the weight of each row in the sum, so that the sum is the weighted mean."""
        return np.full(len(self.rows), self.weight / max(1, len(self.rows)), np.float32)


class Objective:
    """Eq. 5 over a model and its draft vocabulary.

    Args:
        model: the model to train.
        train: the weights of the losses.
        draft_vocab: [Vd] tokens that streams may guess, or None.
    """

    def __init__(
        self, model: TrainedModel, train: TrainConfig, draft_vocab: np.ndarray | None
    ) -> None:
        self.model, self.train, self.draft_vocab = model, train, draft_vocab
        self._vocab_size = model.backbone.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that streams may guess."""
        return self._vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    def lower(self, batch: Batch) -> mx.array:
        """[B, T, D] what the frozen layers say."""
        nodes = self.model.lower(self._layout(batch))
        mx.eval(nodes)
        return nodes

    def loss(
        self, weights: Weights, batch: Batch, lower: mx.array, step: int
    ) -> tuple[mx.array, list[mx.array]]:
        """The weighted sum of eq. 5, and the mean of each of its terms, in `terms`' order.

        Args:
            weights: what is trained.
            batch: the examples.
            lower: [B, T, D] as `lower` gives them.
            step: decides which carriers teach the pruning adapter.
        """
        self.model.bind(weights)
        nodes, streams = self.model.upper(lower, self._layout(batch))
        states = {_MAIN_LOSS: nodes, _STREAM_LOSS: streams, _PRUNE_LOSS: lower}
        total, means = mx.array(0.0), {}
        terms = [term for term in self.terms(batch, step) if len(term.rows)]
        for drafting in (False, True):
            own = [term for term in terms if self._drafts(term) == drafting]
            if not own:
                continue
            part, losses = self._cross_entropy(own, states, drafting)
            total = total + part
            ends = np.cumsum([len(term.rows) for term in own])
            for term, rows in zip(own, mx.split(losses, ends[:-1].tolist()), strict=True):
                means[term.name] = rows.mean()
        return total, [means.get(term.name, mx.array(0.0)) for term in self.terms(batch, step)]

    def terms(self, batch: Batch, step: int) -> list[Term]:
        """The parts of eq. 5 for a batch."""
        train, found = self.train, []
        node_rows = np.arange(batch.tokens.size).reshape(batch.tokens.shape)[:, batch.carriers]
        main_targets = batch.targets(0)
        if train.adapter_scope == "all":
            found.append(_term("main", _MAIN_LOSS, node_rows, main_targets, train.main_weight))
        shape = (*node_rows.shape, train.num_streams)
        stream_rows = np.arange(node_rows.size * train.num_streams).reshape(shape)
        for stream, alpha in enumerate(train.alphas, 1):
            targets = draft_indices(batch.targets(stream), self.draft_vocab)
            rows = stream_rows[:, :, stream - 1]
            found.append(_term(f"stream_{stream}", _STREAM_LOSS, rows, targets, alpha))
        if train.prune_rank and train.prune_weight:
            some = slice(step % PRUNE_STRIDE, None, PRUNE_STRIDE)
            rows, targets = node_rows[:, some], main_targets[:, some]
            found.append(_term("prune", _PRUNE_LOSS, rows, targets, train.prune_weight))
        return found

    def parts(self, batch: Batch, lower: mx.array) -> dict[str, float]:
        """Each part of eq. 5 in nats a token, without learning."""
        _, means = self.loss(self.model.weights, batch, lower, 0)
        return self.named_parts(batch, 0, means)

    def named_parts(self, batch: Batch, step: int, means: list[mx.array]) -> dict[str, float]:
        """The means that `loss` gives, under the names that the log has for them."""
        values = to_list(mx.stack(means)) if means else []
        names = [f"{term.name}_loss" for term in self.terms(batch, step)]
        return dict(zip(names, values, strict=True))

    def guesses(self, batch: Batch, lower: mx.array, count: int) -> list[Guesses]:
        """The `count` likeliest tokens of every stream of every example."""
        _, streams = self.model.upper(lower, self._layout(batch))
        rows = streams.reshape(-1, streams.shape[-1])
        pieces = []
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            logits = self.model.logits(rows[first : first + _ROWS_AT_ONCE], drafting=True)
            piece = rank_candidates(logits, count)
            mx.eval(piece)
            pieces.append([np.array(found) for found in piece])
        shape = len(batch.tokens), len(batch.carriers), self.train.num_streams, count
        columns = zip(*pieces, strict=True)
        tokens, logprobs = (np.concatenate(column).reshape(shape) for column in columns)
        if self.draft_vocab is not None:
            tokens = self.draft_vocab[tokens]
        return [
            Guesses(tokens[row, : len(answer)], logprobs[row, : len(answer)], answer)
            for row, answer in enumerate(answers(batch))
        ]

    def _layout(self, batch: Batch) -> Layout:
        return Layout.of(batch, self.train.num_streams)

    def _drafts(self, term: Term) -> bool:
        """Whether a term's rows meet the head of the draft vocabulary."""
        return term.kind == _STREAM_LOSS and self.draft_vocab is not None

    def _cross_entropy(
        self, terms: list[Term], states: dict[str, mx.array], drafting: bool
    ) -> tuple[mx.array, mx.array]:
        """The weighted sum over terms that share a head, and each row's loss."""

        def rows_of(term: Term) -> mx.array:
            flat = states[term.kind].reshape(-1, self.model.config.hidden_size)
            rows = flat[mx.array(term.rows)]
            return self.model.early_exit(rows) if term.kind == _PRUNE_LOSS else rows

        return linear_cross_entropy(
            partial(self.model.logits, drafting=drafting),
            mx.concatenate([rows_of(term) for term in terms]),
            mx.array(np.concatenate([term.targets for term in terms]).astype(np.int32)),
            mx.array(np.concatenate([term.scales for term in terms])),
            self.draft_vocab_size if drafting else self._vocab_size,
        )


def _term(name: str, kind: str, rows: np.ndarray, targets: np.ndarray, weight: float) -> Term:
    """A term over those of the rows [B, k] that have a target."""
    there = targets >= 0
    return Term(name, kind, rows[there].astype(np.int32), targets[there], weight)


class MlxLowerStore:
    """A store of the frozen layers' results, as arrays of MLX."""

    def __init__(self, store: LowerStore, dtype: mx.Dtype) -> None:
        self._store, self._dtype = store, dtype
        self._bits = mx.int16 if dtype.size == 2 else mx.int32

    def fill(self, objective: Objective, progress: Any) -> None:
        """Compute what is not there yet."""
        self._store.fill(lambda batch: np.array(objective.lower(batch).view(self._bits)), progress)

    def get(self, batch: Batch) -> mx.array:
        """[B, T, D] of a batch; zeros at its padding."""
        return mx.array(self._store.get(batch)).view(self._dtype)


class Adam:
    """AdamW over named weights, the stream embeddings at a rate of their own.

    Args:
        weights: what is trained.
        train: rates and decay.
    """

    def __init__(self, weights: Weights, train: TrainConfig) -> None:
        embeddings = [name for name in weights if name == "stream_embeddings"]
        rest = [name for name in weights if name not in embeddings]
        # With bias correction it is PyTorch's AdamW.
        make = partial(optim.AdamW, weight_decay=train.weight_decay, bias_correction=True)
        groups = ((rest, 1.0), (embeddings, train.embedding_rate))
        self._groups: list[tuple[list[str], float, Any]] = [
            (names, multiple, make(train.learning_rate)) for names, multiple in groups if names
        ]
        for names, _, optimizer in self._groups:
            optimizer.init({name: weights[name] for name in names})

    def update(self, gradients: Weights, weights: Weights, rate: float) -> Weights:
        """The weights after a step."""
        updated: Weights = {}
        for names, multiple, optimizer in self._groups:
            optimizer.learning_rate = rate * multiple
            own = {name: gradients[name] for name in names}
            updated |= optimizer.apply_gradients(own, {name: weights[name] for name in names})
        return {name: updated[name] for name in weights}

    @property
    def state(self) -> dict[str, mx.array]:
        """Its arrays, flat."""
        arrays: dict[str, mx.array] = {}
        for names, _, optimizer in self._groups:
            arrays["step"] = optimizer.state["step"]
            for name in names:
                arrays |= {f"{part} {name}": optimizer.state[name][part] for part in "mv"}
        return arrays

    @state.setter
    def state(self, arrays: dict[str, mx.array]) -> None:
        for names, _, optimizer in self._groups:
            own = {name: {part: arrays[f"{part} {name}"] for part in "mv"} for name in names}
            optimizer.state |= {"step": arrays["step"], **own}


class Run:
    """The trained weights, their optimiser, and the step that they are at."""

    def __init__(self, objective: Objective, num_steps: int) -> None:
        self.objective, self.num_steps, self.step = objective, num_steps, 0
        self.weights = objective.model.weights
        self.optimizer = Adam(self.weights, objective.train)

    def gradients(self, batch: Batch, lower: mx.array) -> tuple[Weights, list[mx.array]]:
        """The gradient of eq. 5, and the mean of each of its terms."""
        gradient_of = mx.value_and_grad(self.objective.loss)
        (_, means), gradients = gradient_of(self.weights, batch, lower, self.step)
        self.objective.model.bind(self.weights)  # in the place of what MLX traced with
        return gradients, means

    def advance(self, batch: Batch, lower: mx.array) -> dict[str, float]:
        """One optimiser step; returns the parts of its loss.

        Raises:
            InputError: the loss is no number any more.
        """
        train = self.objective.train
        rate = train.rate(self.step, self.num_steps)
        gradients, means = self.gradients(batch, lower)
        gradients, norm = optim.clip_grad_norm(gradients, train.clip_norm)
        self.weights = self.optimizer.update(gradients, self.weights, rate)
        mx.eval(self.weights, self.optimizer.state, means, norm)
        self.objective.model.bind(self.weights)
        if mx.get_cache_memory() > _CACHE_BYTES:  # of buffers in the shapes of other batches
            mx.clear_cache()
        check_gradient(float(norm), self.step + 1)
        parts = self.objective.named_parts(batch, self.step, means)
        self.step += 1
        return {"step": self.step, "rate": rate, **parts}

    def save(self, path: Path, identity: str) -> None:
        """Write the state beside `path`, then put it there."""
        weights = {f"weight {name}": array for name, array in self.weights.items()}
        arrays = {**self.optimizer.state, **weights}
        work = path.with_name("new." + path.name)
        mx.save_safetensors(str(work), arrays, metadata={"identity": identity})
        work.replace(path)

    def resume(self, path: Path, identity: str) -> None:
        """Go on from a saved state, if there is one.

        Raises:
            InputError: it is another run's, or broken.
        """
        if not path.exists():
            return
        try:
            arrays, metadata = _read_state(path)
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(
                f"{path} cannot be read ({type(error).__name__})",
                expected="the state of a stopped run",
                do="delete it to start again",
            ) from error
        if metadata.get("identity") != identity:
            raise InputError(
                f"{path.parent} holds a run with other settings, other data or another base model",
                expected="the settings that it was started with",
                do="give those, or another --out",
            )
        self.weights = {name: arrays[f"weight {name}"] for name in self.weights}
        self.optimizer.state = arrays
        self.step = to_int(arrays["step"])
        self.objective.model.bind(self.weights)


def _read_state(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    arrays, metadata = loaded
    mx.eval(arrays)
    return arrays, metadata
