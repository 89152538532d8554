"""A training run in PyTorch: the model, its losses (eq. 5), its steps, and what is saved.

Every step is a function of the settings, the data and the state before it. A run that was
killed goes on from its last saved state to the same result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ssmlx.errors import InputError
from ssmlx.settings import StreamConfig
from ssmlx.training.batches import Batch, in_order
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Example
from ssmlx.training.draft_vocab import draft_indices
from ssmlx.training.job import check_gradient
from ssmlx.training.validation import answers
from ssmlx.tuning.replay import Guesses, Replay

from ..reference.losses import linear_cross_entropy, mean_scales
from ..reference.model import StreamFusedReference

PRUNE_STRIDE = 4
"""One carrier in so many, a different one each step, teaches the pruning adapter."""

_VALIDATION_BATCH = 16

Lower = Callable[[Batch], torch.Tensor]
"""A batch to [B, T, D] hidden states before layer N - Ns."""


def build_model(
    base: nn.Module, config: StreamConfig, train: TrainConfig, draft_vocab: np.ndarray | None
) -> StreamFusedReference:
    """The model to train, its new weights drawn from the run's seed."""
    torch.manual_seed(train.seed)
    return StreamFusedReference(
        base,
        config,
        lora_rank=train.lora_rank,
        lora_alpha=train.lora_alpha,
        lora_modules=train.lora_modules,
        draft_vocab=None if draft_vocab is None else torch.from_numpy(draft_vocab),
    )


def freeze_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold what is not trained in `dtype`; what is trained stays in float32."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def precision(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """The context in which the model runs in `dtype`."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        InputError: it is not there.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there))
    if not there[name]:
        raise InputError(
            f"--device {name}, which PyTorch does not find here",
            expected=", ".join(kind for kind, is_there in there.items() if is_there),
            do="choose one of them, or auto",
        )
    return torch.device(name)


@dataclass(frozen=True, eq=False)
class Layout:
    """A batch as tensors on the device.

    Attributes:
        tokens: [B, T]
        where: `positions` [B, T] and `visible` [B, T, T], as the reference takes them.
        carriers: [K]
    """

    tokens: torch.Tensor
    where: Mapping[str, torch.Tensor]
    carriers: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Layout:
        """The tensors of a batch."""

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        where = {"positions": tensor(batch.positions).long(), "visible": tensor(batch.visible)}
        return cls(tensor(batch.tokens).long(), where, tensor(batch.carriers))


class Objective:
    """Eq. 5 over a model and its draft vocabulary.

    Args:
        model: the model to train.
        train: the weights of the losses.
        draft_vocab: [Vd] tokens that streams may guess, or None.
        device, dtype: what it runs on and in.
    """

    def __init__(
        self,
        model: StreamFusedReference,
        train: TrainConfig,
        draft_vocab: np.ndarray | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.train = model, train
        self.device, self.dtype, self.draft_vocab = device, dtype, draft_vocab
        head = model.base.lm_head
        self._head = head.weight.detach(), getattr(head, "bias", None)
        rows = slice(None) if draft_vocab is None else torch.from_numpy(draft_vocab).long()
        weight, bias = self._head
        self._draft_head = weight[rows].contiguous(), None if bias is None else bias[rows]

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that streams may guess."""
        return len(self._draft_head[0])

    def lower(self, batch: Batch) -> torch.Tensor:
        """[B, T, D] what the frozen layers say, without gradient."""
        layout = Layout.of(batch, self.device)
        with torch.no_grad(), precision(self.device, self.dtype):
            return self.model.lower_states(layout.tokens, **layout.where)

    def loss(
        self, batch: Batch, lower: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum of eq. 5, and each of its parts in nats a token.

        Args:
            batch: the examples.
            lower: [B, T, D] as `lower` gives them.
            step: decides which carriers teach the pruning adapter.
        """
        layout = Layout.of(batch, self.device)
        nodes = lower.to(self.device)
        with precision(self.device, self.dtype):
            hidden = self.model.upper_states(nodes, **layout.where, stream_rows=layout.carriers)
        total = torch.zeros((), device=self.device)
        parts: dict[str, float] = {}
        main_targets = self._tensor(batch.targets(0))
        if self.train.adapter_scope == "all":
            main = hidden.main[:, layout.carriers]
            term, mean = self._term(main, self._head, main_targets, self.train.main_weight)
            total, parts["main_loss"] = total + term, mean
        for stream, alpha in enumerate(self.train.alphas, 1):
            targets = self._tensor(draft_indices(batch.targets(stream), self.draft_vocab))
            rows = hidden.streams[:, :, stream - 1]
            term, mean = self._term(rows, self._draft_head, targets, alpha)
            total, parts[f"stream_{stream}_loss"] = total + term, mean
        if self.model.prune_adapter is not None and self.train.prune_weight:
            taught = layout.carriers[step % PRUNE_STRIDE :: PRUNE_STRIDE]
            targets = main_targets[:, step % PRUNE_STRIDE :: PRUNE_STRIDE]
            with precision(self.device, self.dtype):
                early = self.model.early_exit_states(nodes[:, taught])
            term, mean = self._term(early, self._head, targets, self.train.prune_weight)
            total, parts["prune_loss"] = total + term, mean
        return total, parts

    def _term(
        self,
        hidden: torch.Tensor,
        head: tuple[torch.Tensor, torch.Tensor | None],
        targets: torch.Tensor,
        weight: float,
    ) -> tuple[torch.Tensor, float]:
        """One weighted mean cross-entropy of [B, K, D] rows, and the mean itself."""
        there = targets >= 0
        rows, wanted = hidden[there].to(self.dtype), targets[there]
        term, losses = linear_cross_entropy(rows, *head, wanted, mean_scales(wanted, weight))
        return term, float(losses.mean()) if len(wanted) else 0.0

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).long().to(self.device)

    @torch.no_grad()
    def parts(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        """Each part of eq. 5 in nats a token, without learning."""
        return self.loss(batch, lower, 0)[1]

    @torch.no_grad()
    def guesses(self, batch: Batch, lower: torch.Tensor, count: int) -> list[Guesses]:
        """The `count` likeliest tokens of every stream of every example."""
        layout = Layout.of(batch, self.device)
        with precision(self.device, self.dtype):
            hidden = self.model.upper_states(
                lower.to(self.device), **layout.where, stream_rows=layout.carriers
            )
            weight, bias = self._draft_head
            logits = nn.functional.linear(hidden.streams.to(self.dtype), weight, bias).float()
        best = logits.log_softmax(-1).topk(count)
        tokens, logprobs = best.indices.cpu().numpy(), best.values.cpu().numpy()
        if self.draft_vocab is not None:
            tokens = self.draft_vocab[tokens]
        return [
            Guesses(tokens[row, : len(answer)], logprobs[row, : len(answer)], answer)
            for row, answer in enumerate(answers(batch))
        ]


class Replayed(Protocol):
    """An objective that knows how decoding would go."""

    def lower(self, batch: Batch) -> torch.Tensor:
        """[B, T, D] what the frozen layers say."""
        ...

    def parts(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        """Each part of the loss in nats a token, without learning."""
        ...

    def replay(self, batch: Batch, lower: torch.Tensor, size: int) -> Replay:
        """The target calls that decoding the answers would take."""
        ...


class ReplayValidation:
    """Held-out examples: their losses, and the target calls that decoding them would take.

    Args:
        objective: what is trained.
        examples: held out.
        size: of what the replay drafts: nodes of a tree, or tokens of a chain.
    """

    def __init__(self, objective: Replayed, examples: Sequence[Example], size: int) -> None:
        self._objective, self._size = objective, size
        batches = in_order(examples, _VALIDATION_BATCH)
        self._batches = [(batch, objective.lower(batch)) for batch in batches]

    def __call__(self) -> dict[str, float]:
        """Mean losses, and tokens per call."""
        entry: dict[str, float] = {}
        tokens = calls = 0
        for batch, lower in self._batches:
            for name, value in self._objective.parts(batch, lower).items():
                entry[f"valid_{name}"] = entry.get(f"valid_{name}", 0.0) + value
            found = self._objective.replay(batch, lower, self._size)
            tokens, calls = tokens + found.num_tokens, calls + found.num_calls
        entry = {name: round(value / len(self._batches), 4) for name, value in entry.items()}
        return {**entry, "tokens_per_call": round(Replay(tokens, calls).tokens_per_call, 4)}


class Run:
    """The trained weights, their optimiser, and the step that they are at."""

    def __init__(self, objective: Objective, num_steps: int) -> None:
        self.objective, self.num_steps, self.step = objective, num_steps, 0
        self.named = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
        train = objective.train
        embeddings = {n: p for n, p in self.named.items() if n == "stream_embeddings"}
        rest = [p for n, p in self.named.items() if n not in embeddings]
        groups: list[dict[str, Any]] = [{"params": rest, "multiple": 1.0}]
        if embeddings:
            multiple = train.embedding_rate
            groups.append({"params": list(embeddings.values()), "multiple": multiple})
        self.optimizer = torch.optim.AdamW(
            groups, lr=train.learning_rate, weight_decay=train.weight_decay
        )

    def advance(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        """One optimiser step; returns the parts of its loss.

        Raises:
            InputError: the gradient is no number any more; the weights stay as they were.
        """
        train = self.objective.train
        rate = train.rate(self.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiple"]
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self.objective.loss(batch, lower, self.step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.named.values(), train.clip_norm)
        check_gradient(float(norm), self.step + 1)
        self.optimizer.step()
        self.step += 1
        return {"step": self.step, "rate": rate, **parts}

    def save(self, path: Path, identity: str) -> None:
        """Write the state beside `path`, then put it there."""
        work = path.with_suffix(".new")
        weights = {name: p.detach().cpu() for name, p in self.named.items()}
        state = {
            "identity": identity,
            "step": self.step,
            "weights": weights,
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, work)
        work.replace(path)

    def resume(self, path: Path, identity: str) -> None:
        """Go on from a saved state, if there is one.

        Raises:
            InputError: it is another run's, or broken.
        """
        if not path.exists():
            return
        try:
            state: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
        except Exception as error:  # the unpickler raises many kinds
            raise InputError(
                f"{path} cannot be read ({type(error).__name__})",
                expected="the state of a stopped run",
                do="delete it to start again",
            ) from error
        if state["identity"] != identity:
            raise InputError(
                f"{path.parent} holds a run with other settings or other data",
                expected="the settings that it was started with",
                do="give those, or another --out",
            )
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
