"""A training run in MLX: its losses (eq. 5), its steps, and what is saved.

Every step is a function of the settings, the data and the state before it. A run that was
killed goes on from its last saved state to the same result.
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

LogitsOf = Callable[[mx.array], mx.array]
"""Hidden states [R, D] after the final norm to logits [R, V]: the LM head, packed or not."""


def linear_cross_entropy(
    logits_of: LogitsOf, hidden: mx.array, targets: mx.array, scales: mx.array, vocab_size: int
) -> tuple[mx.array, mx.array]:
    """Return the weighted sum of cross-entropies under an LM head, and each row's own.

    Logits are computed some rows at a time, with the gradient of `hidden` in the same go, and are
    not kept.

    Args:
        logits_of: the LM head, to which no gradient goes.
        hidden: [R, D] final-normed states; the gradient reaches them.
        targets: [R] token ids.
        scales: [R] float32, the weight of each row in the sum.
        vocab_size: V of the head, which decides how many rows go at a time.

    Returns:
        The sum; and each row's cross-entropy [R] in nats, which has no gradient.
    """

    def surrogate_and_losses(
        rows: mx.array, wanted: mx.array, weights: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return a scalar that has the loss's gradient, if not its value; and the cross-entropies
        of the rows.
        """
        logits = logits_of(rows).astype(mx.float32)
        losses, probs = cross_entropies_and_probs(mx.stop_gradient(logits), wanted)
        chosen = mx.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        return ((logits * (probs * weights[:, None])).sum() - (chosen * weights).sum()), losses

    def sum_rows_and_gradient_by_chunks(hidden: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the sum, each row's loss [R] and the sum's gradient [R, D], chunk by chunk."""
        losses: list[mx.array] = []
        gradients: list[mx.array] = []
        for rows in split_rows(len(hidden), vocab_size):
            part = hidden[rows]
            if losses:  # the last chunk's logits are done with first, however MLX orders its work
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
        """Return the stored gradient of `hidden`, times that of the sum."""
        return (found[2] * upstream[0]).astype(hidden.dtype)

    summed: Any = mx.custom_function(sum_rows_and_gradient_by_chunks)
    summed.vjp(gradient_of_hidden)
    total, losses, _ = summed(hidden)
    return total, mx.stop_gradient(losses)


def cross_entropies_and_probs(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return cross-entropies [R] in nats and probabilities [R, V] of float32 logits [R, V].

    Sums are taken a block of tokens at a time. MLX's CPU backend adds one number after the other:
    over a whole vocabulary small ones are lost, losses come out some 1e-4 too low, and gradients of
    likely tokens are off by percents.

    Args:
        logits: [R, V] float32.
        targets: [R] token ids.
    """
    rows = len(logits)
    whole = logits.shape[1] // _BLOCK * _BLOCK
    top = logits.max(axis=-1, keepdims=True)
    powers = mx.exp(logits - top)
    sums = [powers[:, :whole].reshape(rows, -1, _BLOCK).sum(axis=-1), powers[:, whole:]]
    mass = mx.concatenate(sums, axis=1).sum(axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)
    return (mx.log(mass) + top - chosen)[:, 0], powers / mass


def load_base_in_trainable_dtype(path: Path, dtype: str, name: str = Origin.name) -> Backbone:
    """Load the base model of a folder for training, in a type that small gradients survive.

    Quantised weights stay packed for "stored", and on a GPU for "auto". Nothing runs in float16, in
    which small gradients vanish, nor packed weights on the CPU in 16 bits, an eighth as fast:
    floating parameters, scales among them, are held in float32 then. On a GPU, "auto" holds weights
    that are not quantised in bfloat16.

    Args:
        path: the model's folder.
        dtype: as `load` takes it.
        name: what messages call the model, as the user gave it.

    Raises:
        InputError: the folder cannot be loaded.
    """
    packed = read_json(path / "config.json", "a model folder").get("quantization") is not None
    if dtype == "auto" and resolve_dtype(dtype) == "stored" and not packed:
        dtype = "bfloat16"
    backbone, _ = load_base(path, dtype, origin=Origin(name=name))
    on_cpu = mx.default_device() == mx.cpu
    if backbone.dtype == mx.float16 or (on_cpu and is_quantised(backbone.model)):
        backbone.model.set_dtype(mx.float32)
        mx.eval(backbone.model.parameters())
    return backbone


class MlxObjective(Objective):
    """The loss of eq. 5 in MLX, over a model and its draft vocabulary, if it has one."""

    def __init__(
        self, model: TrainedModel, train: TrainConfig, draft_vocab: np.ndarray | None
    ) -> None:
        """Keep the arguments, and read vocabulary, hidden size and bytes of a number from the
        model.

        Args:
            model: whose weights are trained.
            train: which terms the loss has, and their weights.
            draft_vocab: [Vd] tokens that streams draft from; None for all.
        """
        self.model = model
        self.train = train
        self.draft_vocab = draft_vocab
        self.vocab_size = model.backbone.vocab_size
        self.hidden_size = model.config.hidden_size
        self.state_bytes = model.backbone.dtype.size

    def lower(self, batch: Batch) -> mx.array:
        """Return [B, T, state_size] what the frozen layers give, evaluated.

        That is node states before the insertion layer; or, where the condition alone is trained,
        all G streams of each anchor before the final norm, in the anchor's column, and zeros in
        others.
        """
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
        """Return states as integers of their width in NumPy, which has no bfloat16."""
        return np.array(states.view(mx.int16 if self.state_bytes == 2 else mx.int32))

    def from_bits(self, bits: np.ndarray) -> mx.array:
        """Return the states of which `to_bits` made these integers."""
        return mx.array(bits).view(self.model.backbone.dtype)

    def loss_and_term_means(
        self, weights: Weights, batch: Batch, lower: mx.array, step: int
    ) -> tuple[mx.array, list[mx.array]]:
        """Return eq. 5's weighted sum, and the mean of each of its terms.

        Args:
            weights: bound to the model first; the gradient reaches them.
            batch: B texts.
            lower: [B, T, state_size] as `lower` returns it.
            step: decides which anchors teach the pruning adapter, see `loss_terms`.

        Returns:
            The sum; and the means in nats a token, in the order of `loss_terms`, 0 for one without
            targets. Of one rank's part of a batch, both are shares that add up over the ranks.
        """
        self.model.bind_and_reset_others_to_start(weights)
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
        """Return hidden states before the final norm, by the kinds of rows that terms name.

        Args:
            batch: the examples.
            lower: what `lower` returned of the batch: states before the insertion layer, or where
                the condition alone is trained the streams' last states, and no layer is run.
            rootless: as `TrainedModel.upper_before_norm` takes it.

        Returns:
            [B, T, D] of `MAIN` and `PRUNE`, the latter `lower` itself; and of `STREAM` and `GIVEN`
            the same array of the streams' rows, anchor by anchor. Where the condition alone is
            trained there are only the latter two.
        """
        if self.train.keeps_streams:
            streams = lower[anchor_indices(batch.anchors)]
            return {STREAM: streams, GIVEN: streams}
        nodes, streams = self.model.upper_before_norm(lower, self._layout(batch), rootless)
        return {MAIN: nodes, STREAM: streams, GIVEN: streams, PRUNE: lower}

    def mean_losses(self, batch: Batch, lower: mx.array) -> dict[str, float]:
        """Return the mean of each term under the weights that are bound, by "NAME_loss", in nats a
        token.

        Args:
            batch: B texts.
            lower: as `lower` returns it for the batch.
        """
        _, means = self.loss_and_term_means(self.model.weights, batch, lower, 0)
        return self.read_losses_by_name(batch, 0, means)

    def read_losses_by_name(
        self, batch: Batch, step: int, means: list[mx.array]
    ) -> dict[str, float]:
        """Read the means that `loss_and_term_means` has returned from the device, by "NAME_loss".

        Args:
            batch: as given to `loss_and_term_means`.
            step: as given to `loss_and_term_means`.
            means: of the terms, in order; may be empty.
        """
        values = to_list(mx.stack(means)) if means else []
        names = [f"{term.name}_loss" for term in self.loss_terms(batch, step)]
        return dict(zip(names, values, strict=True))

    def rank_candidates(
        self, batch: Batch, lower: mx.array, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank the tokens that every stream of a batch may guess, under the weights that are bound.

        Args:
            batch: B texts with K anchors at most.
            lower: as `lower` returns it for the batch.
            count: C, tokens of each stream.

        Returns:
            [B, K, G, C] the likeliest draft tokens, best first; and their log probabilities [B, K,
            G, C], or [B, K, G, C, C] given each candidate of the stream before where there is a
            condition.
        """
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
        """Whether a term's rows go to the draft head, and not to the whole LM head."""
        return term.kind in (STREAM, GIVEN) and self.draft_vocab is not None

    def _weighted_sum_and_row_losses(
        self,
        terms: list[Term],
        states: dict[TermKind, mx.array],
        uses_draft_head: bool,
        whole_targets: Mapping[str, int],
    ) -> tuple[mx.array, mx.array]:
        """Return the weighted sum of losses over terms that share a head, and each row's loss.

        Rows without a target are left out; the others stand term by term.

        Args:
            terms: one or more, each with a target at least.
            states: hidden states before the final norm, by kind.
            uses_draft_head: whether the head is the draft head.
            whole_targets: by a term's name, its targets in the whole batch, over all ranks.
        """
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
            # Of each row in the sum, so that the sum is the weighted mean.
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
    """AdamW over named weights, as PyTorch's; the stream embeddings have a learning rate of their
    own, a multiple of the others'.
    """

    def __init__(self, weights: Weights, train: TrainConfig) -> None:
        """Start with zero moments for `weights`; `train` has the decay, and the multiple of the
        rate for stream embeddings.
        """
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
        """Return new weights after a step of AdamW; the moments and the step count change.

        Args:
            gradients: by name, of all weights.
            weights: by name; they stay as they are.
            learning_rate: of the step, multiplied for stream embeddings.
        """
        updated: Weights = {}
        for names, multiple, optimizer in self._groups:
            optimizer.learning_rate = learning_rate * multiple
            own = {name: gradients[name] for name in names}
            updated |= optimizer.apply_gradients(own, {name: weights[name] for name in names})
        return {name: updated[name] for name in weights}

    @property
    def state(self) -> dict[str, mx.array]:
        """The moments and the step count, by "m NAME", "v NAME" and "step"; settable."""
        arrays: dict[str, mx.array] = {}
        for names, _, optimizer in self._groups:
            arrays["step"] = optimizer.state["step"]
            for name in names:
                arrays |= {f"{part} {name}": optimizer.state[name][part] for part in "mv"}
        return arrays

    @state.setter
    def state(self, arrays: dict[str, mx.array]) -> None:
        """Put back moments and step count that `state` has given; other names are ignored."""
        for names, _, optimizer in self._groups:
            own = {name: {part: arrays[f"{part} {name}"] for part in "mv"} for name in names}
            optimizer.state |= {"step": arrays["step"], **own}


def read_saved_step_or_0(path: Path) -> int:
    """Return the step count of a state file that `MlxTrainer` wrote; 0 where there is none that can
    be read.
    """
    try:
        loaded: Any = mx.load(str(path), format="safetensors")
        return to_int(loaded["step"])
    except (RuntimeError, ValueError, KeyError):
        return 0


class MlxTrainer(Trainer):
    """Takes training steps in MLX, alone or as one rank of several that share each batch."""

    STATE_FILE = "state.safetensors"
    objective: MlxObjective

    def __init__(self, objective: MlxObjective, num_steps: int, group: Group | None = None) -> None:
        """Begin at step 0 with the weights of the objective's model, and zero moments.

        Args:
            objective: with the model, whose weights are trained.
            num_steps: of the whole run, for the learning rate.
            group: the ranks among which each batch is split; None for one process.
        """
        self.objective = objective
        self.num_steps = num_steps
        self.step = 0
        self._group = group
        self.part = (group.rank(), group.size()) if group else (0, 1)
        self.weights = objective.model.weights
        self.optimizer = Adam(self.weights, objective.train)

    def gradients(self, batch: Batch, lower: mx.array) -> tuple[Weights, list[mx.array]]:
        """Return the gradient of eq. 5 by weight, and the terms' means in nats, of the whole batch
        on every rank.

        Nothing is changed; the model keeps the trainer's weights.

        Args:
            batch: this rank's part.
            lower: as `MlxObjective.lower` gives it for this batch.
        """
        gradient_of = mx.value_and_grad(self.objective.loss_and_term_means)
        (_, means), gradients = gradient_of(self.weights, batch, lower, self.step)
        self.objective.model.bind_and_reset_others_to_start(
            self.weights
        )  # in the place of what MLX traced with
        return self._sum_over_ranks(gradients, means)

    def _sum_over_ranks(
        self, gradients: Weights, means: list[mx.array]
    ) -> tuple[Weights, list[mx.array]]:
        """Return the sums over all ranks of gradients, by name, and of means, evaluated; without a
        group, both as they are.
        """
        if self._group is None:
            return gradients, means
        every = sum_over_ranks([*gradients.values(), *means], self._group)
        mx.eval(every)  # a GPU must not wait for a slower rank
        return dict(zip(gradients, every, strict=False)), every[len(gradients) :]

    def advance(self, batch: Batch, lower: mx.array) -> dict[str, float]:
        """Take one optimiser step on a batch: gradients are clipped, weights and moments updated,
        and the weights bound to the model.

        Args:
            batch: this rank's part.
            lower: as `MlxObjective.lower` gives it for this batch.

        Returns:
            The steps taken so far as "step", the learning rate as "rate", and the losses before the
            step as "NAME_loss", of the whole batch.

        Raises:
            InputError: the gradient is not finite; no step is taken.
        """
        train = self.objective.train
        rate = train.learning_rate_at(self.step, self.num_steps)
        gradients, means = self.gradients(batch, lower)
        gradients, norm = _clip_gradients(gradients, train.clip_norm)
        mx.eval(gradients, means, norm)
        check_gradient_is_finite(float(norm), self.step + 1)
        self.weights = self.optimizer.update(gradients, self.weights, rate)
        mx.eval(self.weights, self.optimizer.state)
        self.objective.model.bind_and_reset_others_to_start(self.weights)
        if mx.get_cache_memory() > _CACHE_BYTES:  # of buffers in the shapes of other batches
            mx.clear_cache()
        parts = self.objective.read_losses_by_name(batch, self.step, means)
        self.step += 1
        return {"step": self.step, "rate": rate, **parts}

    @property
    def _state(self) -> dict[str, mx.array]:
        """All arrays that a run goes on from, by name."""
        weights = {f"weight {name}": array for name, array in self.weights.items()}
        return {**self.optimizer.state, **weights}

    def write(self, path: Path, identity: str) -> None:
        """Write weights, moments and the step count into a safetensors file, with the run's
        identity.
        """
        mx.save_safetensors(str(path), self._state, metadata={"identity": identity})

    def read(self, path: Path) -> tuple[str, Any]:
        """Return the identity in a file of `write`, and its arrays by name, evaluated; nothing is
        changed.
        """
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        mx.eval(arrays)
        return metadata.get("identity", ""), arrays

    def resume_if_saved(self, path: Path, identity: str, differing_options: str = "") -> None:
        """Go on from a saved state, as `Trainer.resume_if_saved`; other ranks then take rank 0's
        state, whatever they have read.

        Args:
            path: of the state's file; where there is none, this rank reads nothing.
            identity: of this run, hexadecimal digits.
            differing_options: what another run has other than this one, for the message; may be
                empty.

        Raises:
            InputError: the file cannot be read or is another run's, or this rank has other data or
                settings than rank 0.
        """
        super().resume_if_saved(path, identity, differing_options)
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
        """Set weights, moments and step count to those of a state that `read` returned, and bind
        the weights to the model.
        """
        self.weights = {name: state[f"weight {name}"] for name in self.weights}
        self.optimizer.state = state
        self.step = to_int(state["step"])
        self.objective.model.bind_and_reset_others_to_start(self.weights)
