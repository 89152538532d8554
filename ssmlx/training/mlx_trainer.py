"""A training run in MLX: its losses (eq. 5), its steps, and what is saved.

Every step is a function of the settings, the data and the state before it. A run that was killed
goes on from its last saved state to the same result.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from ..errors import require
from ..json_files import read_json
from ..loading.load import is_quantised, load_base, resolve_dtype
from ..model.backbone import Backbone, Origin
from ..model.ranks import Group, from_rank0, sum_over_ranks
from ..model.shapes import to_int, to_list
from .config import TrainConfig
from .data import Batch
from .job import Trainer, check_gradient_is_finite
from .mlx_model import Layout, TrainedModel, Weights, anchor_indices
from .objective import GIVEN, MAIN, PRUNE, STREAM, Objective, Term, TermKind, split_rows

_BLOCK = 256
_ROWS_AT_ONCE = 256
_CACHE_BYTES = 1 << 31
_clip_gradients: Callable[[Weights, float], tuple[Weights, mx.array]] = optim.clip_grad_norm

# Hidden states [R, D] after the final norm to logits [R, V]: the LM head, quantized or not.
LogitsOf = Callable[[mx.array], mx.array]


def linear_cross_entropy(
    logits_of: LogitsOf,  # no gradient goes to it
    hidden: mx.array,  # [R, D] final-normed
    targets: mx.array,  # [R] token ids
    scales: mx.array,  # [R] float32, weight of each row in the sum
    vocab_size: int,  # decides how many rows are computed at a time
) -> tuple[mx.array, mx.array]:
    """The weighted sum of cross-entropies, and each row's own [R] in nats, which has no gradient.

    Logits are the largest arrays of a step: they are computed, with the gradient of `hidden`, some
    rows at a time, and not kept.
    """

    def surrogate_and_losses(
        rows: mx.array, wanted: mx.array, weights: mx.array
    ) -> tuple[mx.array, mx.array]:
        """A scalar with the loss's gradient but not its value, and the rows' cross-entropies."""
        logits = logits_of(rows).astype(mx.float32)
        losses, probs = cross_entropies_and_probs(mx.stop_gradient(logits), wanted)
        chosen = mx.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        return ((logits * (probs * weights[:, None])).sum() - (chosen * weights).sum()), losses

    def sum_by_chunks(hidden: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The sum, each row's loss [R], and the sum's gradient [R, D]."""
        losses: list[mx.array] = []
        gradients: list[mx.array] = []
        for rows in split_rows(len(hidden), vocab_size):
            part = hidden[rows]
            if losses:  # free the last chunk's logits first, whatever order MLX chooses
                part = mx.depends([part], [losses[-1], gradients[-1]])[0]
            (_, own), gradient = mx.value_and_grad(surrogate_and_losses)(
                part, targets[rows], scales[rows]
            )
            losses.append(own)
            gradients.append(gradient)
        every = mx.concatenate(losses)
        return (every * scales).sum(), every, mx.concatenate(gradients)

    def gradient_of_hidden(
        hidden: mx.array, upstream: tuple[mx.array, ...], found: tuple[mx.array, ...]
    ) -> mx.array:
        return (found[2] * upstream[0]).astype(hidden.dtype)

    summed: Any = mx.custom_function(sum_by_chunks)
    summed.vjp(gradient_of_hidden)
    total, losses, _ = summed(hidden)
    return total, mx.stop_gradient(losses)


def cross_entropies_and_probs(
    logits: mx.array,  # [R, V] float32
    targets: mx.array,  # [R] token ids
) -> tuple[mx.array, mx.array]:
    """Cross-entropies [R] in nats, and probabilities [R, V]."""
    rows = len(logits)
    whole = logits.shape[1] // _BLOCK * _BLOCK
    top = logits.max(axis=-1, keepdims=True)
    powers = mx.exp(logits - top)
    # MLX's CPU backend adds one number after the other: over a whole vocabulary small ones are
    # lost, losses come out some 1e-4 too low, and gradients of likely tokens are off by percents.
    # So sums are taken a block of tokens at a time.
    sums = [powers[:, :whole].reshape(rows, -1, _BLOCK).sum(axis=-1), powers[:, whole:]]
    mass = mx.concatenate(sums, axis=1).sum(axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)
    return (mx.log(mass) + top - chosen)[:, 0], powers / mass


def load_trainable_base(
    path: Path,
    dtype: str,  # as `load` takes it
    name: str = Origin.name,  # of the model in messages, as the user gave it
) -> Backbone:
    """Load in float32 or bfloat16, which keep small gradients; quantized weights stay so."""
    # Quantized weights stay so for "stored", and on a GPU for "auto".
    packed = read_json(path / "config.json", "a model folder").get("quantization") is not None
    if dtype == "auto" and resolve_dtype(dtype) == "stored" and not packed:
        dtype = "bfloat16"
    backbone, _ = load_base(path, dtype, origin=Origin(name=name))
    on_cpu = mx.default_device() == mx.cpu
    # Small gradients vanish in float16; quantized weights in 16 bits run an eighth as fast on the
    # CPU. Floating parameters, scales among them, are then held in float32.
    if backbone.dtype == mx.float16 or (on_cpu and is_quantised(backbone.model)):
        backbone.model.set_dtype(mx.float32)
        mx.eval(backbone.model.parameters())
    return backbone


class MlxObjective(Objective):
    def __init__(
        self,
        model: TrainedModel,
        train: TrainConfig,
        draft_vocab: np.ndarray | None,  # [Vd] tokens that streams draft from; None for all
    ) -> None:
        self.model = model
        self.train = train
        self.draft_vocab = draft_vocab
        self.vocab_size = model.backbone.vocab_size
        self.hidden_size = model.config.hidden_size
        self.state_bytes = model.backbone.dtype.size

    def lower(self, batch: Batch) -> mx.array:
        """Compute the states of `Objective.lower`, evaluated; streams are before the final norm."""
        layout = self._layout(batch)
        states = self.model.lower(layout)
        if self.train.keeps_streams:  # streams before the norm, in the columns of their anchors
            _, streams = self.model.upper_before_norm(states, layout)
            rows = streams.reshape(*batch.anchors.shape, self.state_size)
            states = mx.zeros((*batch.tokens.shape, self.state_size), rows.dtype)
            states[anchor_indices(batch.anchors)] = rows
        mx.eval(states)
        return states

    def to_bits(self, states: mx.array) -> np.ndarray:
        return np.array(states.view(mx.int16 if self.state_bytes == 2 else mx.int32))

    def from_bits(self, bits: np.ndarray) -> mx.array:
        return mx.array(bits).view(self.model.backbone.dtype)

    def loss_and_term_means(
        self,
        weights: Weights,  # bound to the model first; the gradient reaches them
        batch: Batch,
        lower: mx.array,  # [B, T, state_size]
        step: int,  # see `loss_terms`
    ) -> tuple[mx.array, list[mx.array]]:
        """Eq. 5's weighted sum, and the means of `loss_terms` in nats per token, 0 without targets.

        Of one rank's part of a batch, both are partial sums that add up over the ranks.
        """
        self.model.bind(weights)
        states = self._hidden_states_by_kind(batch, lower, self.rootless_anchors(batch, step))
        total = mx.array(0.0)
        means = {}
        terms = self.loss_terms(batch, step)
        whole = {
            term.name: term.num_targets for term in self.loss_terms(batch.whole or batch, step)
        }
        for drafting in (False, True):
            own = [t for t in terms if self._uses_draft_head(t) == drafting and t.num_targets]
            if not own:
                continue
            part, losses = self._weighted_sum_and_row_losses(own, states, drafting, whole)
            total = total + part
            ends = np.cumsum([term.num_targets for term in own])
            for term, rows in zip(own, mx.split(losses, ends[:-1].tolist()), strict=True):
                means[term.name] = rows.sum() / whole[term.name]
        return total, [means.get(term.name, mx.array(0.0)) for term in terms]

    def _hidden_states_by_kind(
        self, batch: Batch, lower: mx.array, rootless: np.ndarray | None = None
    ) -> dict[TermKind, mx.array]:
        """States before the final norm: nodes [B, T, D], streams [B, K * G, D] anchor by anchor."""
        if self.train.keeps_streams:
            streams = lower[anchor_indices(batch.anchors)]
            return {STREAM: streams, GIVEN: streams}
        nodes, streams = self.model.upper_before_norm(lower, self._layout(batch), rootless)
        return {MAIN: nodes, STREAM: streams, GIVEN: streams, PRUNE: lower}

    def mean_losses(self, batch: Batch, lower: mx.array) -> dict[str, float]:
        _, means = self.loss_and_term_means(self.model.weights, batch, lower, 0)
        return self.read_losses_by_name(batch, 0, means)

    def read_losses_by_name(
        self, batch: Batch, step: int, means: list[mx.array]
    ) -> dict[str, float]:
        """Read the means of `loss_and_term_means` from the device."""
        values = to_list(mx.stack(means)) if means else []
        names = [f"{term.name}_loss" for term in self.loss_terms(batch, step)]
        return dict(zip(names, values, strict=True))

    def rank_candidates(
        self, batch: Batch, lower: mx.array, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self._hidden_states_by_kind(batch, lower)[STREAM].reshape(-1, self.hidden_size)
        pieces = []
        streams = self.train.num_streams
        roots = mx.array(np.maximum(batch.targets(0), 0).flatten())
        places = max(1, _ROWS_AT_ONCE // streams)
        for first in range(0, len(roots), places):
            own = rows[first * streams : (first + places) * streams]
            piece = self.model.rank_candidates(own, roots[first : first + places], count)
            mx.eval(piece)
            pieces.append([np.array(found) for found in piece])
        tokens, logprobs = (np.concatenate(part) for part in zip(*pieces, strict=True))
        shape = *batch.anchors.shape, streams, count
        return tokens.reshape(shape), logprobs.reshape(*shape, *logprobs.shape[3:])

    def _layout(self, batch: Batch) -> Layout:
        return Layout.of(batch, self.train.num_streams)

    def _uses_draft_head(self, term: Term) -> bool:
        return term.kind in (STREAM, GIVEN) and self.draft_vocab is not None

    def _weighted_sum_and_row_losses(
        self,
        terms: list[Term],  # each has a target
        states: dict[TermKind, mx.array],  # before the final norm
        uses_draft_head: bool,
        # by a term's name: its targets in the whole batch, over all ranks
        whole_targets: Mapping[str, int],
    ) -> tuple[mx.array, mx.array]:
        """The weighted sum of terms that share a head; rows without a target are left out."""
        rows = []
        targets = []
        scales = []
        model = self.model
        for term in terms:
            there = term.targets >= 0
            flat = states[term.kind].reshape(-1, self.hidden_size)
            own = flat[mx.array(term.rows[there].astype(np.int32))]
            own = model.backbone.final_norm(model.early_exit(own) if term.kind == PRUNE else own)
            if term.previous is not None:
                own = model.apply_condition(own, mx.array(term.previous[there]))
            rows.append(own)
            targets.append(term.targets[there].astype(np.int32))
            # The weight of each row, so that the sum is the weighted mean.
            scale = term.weight / whole_targets[term.name]
            scales.append(np.full(term.num_targets, scale, np.float32))
        return linear_cross_entropy(
            model.head(uses_draft_head),
            mx.concatenate(rows),
            mx.array(np.concatenate(targets)),
            mx.array(np.concatenate(scales)),
            self.draft_vocab_size if uses_draft_head else self.vocab_size,
        )


class Adam:
    """AdamW, equal to PyTorch's; stream embeddings learn at a multiple of the rate."""

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

    def update(self, gradients: Weights, weights: Weights, learning_rate: float) -> Weights:
        updated: Weights = {}
        for names, multiple, optimizer in self._groups:
            optimizer.learning_rate = learning_rate * multiple
            own = {name: gradients[name] for name in names}
            updated |= optimizer.apply_gradients(own, {name: weights[name] for name in names})
        return {name: updated[name] for name in weights}

    @property
    def state(self) -> dict[str, mx.array]:
        """The moments and the step count, as "m NAME", "v NAME" and "step"."""
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


def read_saved_step(path: Path) -> int:
    try:
        loaded: Any = mx.load(str(path), format="safetensors")
        return to_int(loaded["step"])
    except (RuntimeError, ValueError, KeyError):
        return 0


class MlxTrainer(Trainer):
    """Takes training steps in MLX, alone or as one of several ranks that share each batch."""

    STATE_FILE = "state.safetensors"
    objective: MlxObjective

    def __init__(
        self,
        objective: MlxObjective,
        num_steps: int,  # of the whole run, for the learning rate
        group: Group | None = None,  # ranks among which each batch is split
    ) -> None:
        self.objective = objective
        self.num_steps = num_steps
        self.step = 0
        self._group = group
        self.part = (group.rank(), group.size()) if group else (0, 1)
        self.weights = objective.model.weights
        self.optimizer = Adam(self.weights, objective.train)

    def gradients(
        self,
        batch: Batch,  # this rank's part
        lower: mx.array,  # as `MlxObjective.lower` gives it for this batch
    ) -> tuple[Weights, list[mx.array]]:
        """Gradients of eq. 5, and the terms' means in nats, of the whole batch on every rank."""
        gradient_of = mx.value_and_grad(self.objective.loss_and_term_means)
        (_, means), gradients = gradient_of(self.weights, batch, lower, self.step)
        self.objective.model.bind(self.weights)  # replace the arrays that MLX traced with
        return self._sum_over_ranks(gradients, means)

    def _sum_over_ranks(
        self, gradients: Weights, means: list[mx.array]
    ) -> tuple[Weights, list[mx.array]]:
        if self._group is None:
            return gradients, means
        every = sum_over_ranks([*gradients.values(), *means], self._group)
        mx.eval(every)  # a GPU must not wait for a slower rank
        return dict(zip(gradients, every, strict=False)), every[len(gradients) :]

    def advance(self, batch: Batch, lower: mx.array) -> dict[str, float]:
        train = self.objective.train
        rate = train.learning_rate_at(self.step, self.num_steps)
        gradients, means = self.gradients(batch, lower)
        gradients, norm = _clip_gradients(gradients, train.clip_norm)
        mx.eval(gradients, means, norm)
        check_gradient_is_finite(float(norm), self.step + 1)
        self.weights = self.optimizer.update(gradients, self.weights, rate)
        mx.eval(self.weights, self.optimizer.state)
        self.objective.model.bind(self.weights)
        if mx.get_cache_memory() > _CACHE_BYTES:  # of buffers in the shapes of other batches
            mx.clear_cache()
        parts = self.objective.read_losses_by_name(batch, self.step, means)
        self.step += 1
        return {"step": self.step, "rate": rate, **parts}

    @property
    def _state(self) -> dict[str, mx.array]:
        """All arrays from which a run can continue, by name."""
        weights = {f"weight {name}": array for name, array in self.weights.items()}
        return {**self.optimizer.state, **weights}

    def write(self, path: Path, identity: str) -> None:
        mx.save_safetensors(str(path), self._state, metadata={"identity": identity})

    def read(self, path: Path) -> tuple[str, Any]:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        mx.eval(arrays)
        return metadata.get("identity", ""), arrays

    def resume(self, path: Path, identity: str, differing_options: str = "") -> None:
        """Continue from rank 0's state, whatever other ranks have read."""
        super().resume(path, identity, differing_options)
        if self._group is None:
            return
        own = mx.array(list(bytes.fromhex(identity)))
        (first,) = from_rank0([own], self._group)
        require(
            to_list(first) == to_list(own),
            f"rank {self.part[0]} has other data, another base model or other settings than rank 0",
            expected="the same files on every machine",
            do="copy them",
        )
        state = self._state
        arrays = from_rank0(list(state.values()), self._group)
        mx.eval(arrays)
        self.restore(dict(zip(state, arrays, strict=True)))

    def restore(self, state: dict[str, mx.array]) -> None:
        self.weights = {name: state[f"weight {name}"] for name in self.weights}
        self.optimizer.state = state
        self.step = to_int(state["step"])
        self.objective.model.bind(self.weights)
