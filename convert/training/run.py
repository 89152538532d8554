"""A training run in PyTorch: the model, its losses (eq. 5), its steps, and what is saved.

Every step is a function of the settings, the data and the state before it. A run that was
killed goes on from its last saved state to the same result.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ssmlx.errors import require
from ssmlx.settings import StreamConfig
from ssmlx.training.batches import Batch
from ssmlx.training.config import TrainConfig
from ssmlx.training.job import Trainer, check_gradient
from ssmlx.training.objective import MAIN, PRUNE, STREAM, Objective

from ..reference.format import LoraSettings
from ..reference.losses import linear_cross_entropy, mean_scales
from ..reference.model import HiddenStates, StreamFusedReference


def build_model(
    base: nn.Module, config: StreamConfig, train: TrainConfig, draft_vocab: np.ndarray | None
) -> StreamFusedReference:
    """The model to train, its new weights drawn from the run's seed."""
    torch.manual_seed(train.seed)
    return StreamFusedReference(
        base,
        config,
        lora=LoraSettings(train.lora_rank, train.lora_alpha, train.lora_modules),
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
    """The device of that name; "auto" takes CUDA, then MPS, then the CPU."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there))
    require(
        there[name],
        f"--device {name}, which PyTorch does not find here",
        expected=", ".join(kind for kind, is_there in there.items() if is_there),
        do="choose one of them, or auto",
    )
    return torch.device(name)


class TorchObjective(Objective):
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
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        rows = slice(None) if draft_vocab is None else torch.from_numpy(draft_vocab).long()
        own = weight[rows].contiguous(), None if bias is None else bias[rows]
        self._lm_heads = {MAIN: (weight, bias), STREAM: own, PRUNE: (weight, bias)}
        self.vocab_size, self.hidden_size = weight.shape
        self.state_bytes = dtype.itemsize

    def lower(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), precision(self.device, self.dtype):
            return self.model.lower_states(self.tensor(batch.tokens), **self.where(batch))

    def upper(self, batch: Batch, lower: torch.Tensor) -> HiddenStates:
        """From `lower` to the final norm, streams on every carrier."""
        carriers = self.tensor(batch.carriers)
        with precision(self.device, self.dtype):
            return self.model.upper_states(lower, stream_rows=carriers, **self.where(batch))

    def logits(self, hidden: torch.Tensor, kind: str) -> torch.Tensor:
        """[..., V], or [..., Vd] of kind `STREAM`, of [..., D] behind the norm."""
        return nn.functional.linear(hidden.to(self.dtype), *self._lm_heads[kind])

    def loss(
        self, batch: Batch, lower: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The weighted sum of eq. 5, and each of its parts in nats a token.

        Args:
            batch: the examples.
            lower: [B, T, D] as `lower` gives them.
            step: decides which carriers teach the pruning adapter.
        """
        nodes = lower.to(self.device)
        hidden = self.upper(batch, nodes)
        states = {MAIN: hidden.main, STREAM: hidden.streams, PRUNE: nodes}
        total = torch.zeros((), device=self.device)
        parts: dict[str, float] = {}
        for term in self.terms(batch, step):
            flat = states[term.kind].reshape(-1, self.hidden_size)
            rows, targets = flat[self.tensor(term.rows)], self.tensor(term.targets)
            if term.kind == PRUNE:
                with precision(self.device, self.dtype):
                    rows = self.model.early_exit_states(rows)
            there = targets >= 0
            rows, targets = rows[there].to(self.dtype), targets[there]
            scales = mean_scales(targets, term.weight)
            part, losses = linear_cross_entropy(rows, *self._lm_heads[term.kind], targets, scales)
            total = total + part
            parts[f"{term.name}_loss"] = float(losses.mean()) if len(targets) else 0.0
        return total, parts

    @torch.no_grad()
    def ranked(
        self, batch: Batch, lower: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        hidden = self.upper(batch, lower.to(self.device))
        with precision(self.device, self.dtype):
            logits = self.logits(hidden.streams, STREAM).float()
        best = logits.log_softmax(-1).topk(count)
        return best.indices.cpu().numpy(), best.values.cpu().numpy()

    @torch.no_grad()
    def parts(self, batch: Batch, lower: torch.Tensor) -> dict[str, float]:
        return self.loss(batch, lower, 0)[1]

    def to_bits(self, states: torch.Tensor) -> np.ndarray:
        return states.cpu().view(torch.int16 if self.state_bytes == 2 else torch.int32).numpy()

    def from_bits(self, bits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(bits).view(self.dtype)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Whole numbers on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).long().to(self.device)

    def where(self, batch: Batch) -> dict[str, torch.Tensor]:
        """`positions` [B, T] and `visible` [B, T, T], as the reference takes them."""
        visible = torch.from_numpy(batch.visible).to(self.device)
        return {"positions": self.tensor(batch.positions), "visible": visible}


class TorchTrainer(Trainer):
    """The trained weights, their optimiser, and the step that they are at."""

    objective: TorchObjective

    def __init__(self, objective: TorchObjective, num_steps: int) -> None:
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

    def write(self, path: Path, identity: str) -> None:
        weights = {name: p.detach().cpu() for name, p in self.named.items()}
        state = {
            "identity": identity,
            "step": self.step,
            "weights": weights,
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, path)

    def read(self, path: Path) -> tuple[str, Any]:
        state: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
        return state["identity"], state

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        for name, parameter in self.named.items():
            parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
