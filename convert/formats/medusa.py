"""Medusa heads in PyTorch, and the files that they are published in.

    medusa_lm_head.safetensors (or .pt)    {h}.{l}.linear.{weight,bias} of residual block l of
                                           head h, and {h}.{L}.weight, its matrix
    config.json                            medusa_num_heads and more, often wrong: not read

Medusa-2 models carry the same tensors as `medusa_head.*` among their own weights.
"""

from __future__ import annotations

import torch
from torch import nn

from ssmlx.drafters.medusa_heads import MedusaConfig


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); the identity when new, as W and b are zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaReference(nn.Module):
    """Medusa heads, named as they are published behind `heads.`.

    Args:
        config: their settings.
        draft_vocab: [Vd] int32, given exactly where the settings have a `draft_vocab_size`.
    """

    def __init__(self, config: MedusaConfig, draft_vocab: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.draft_vocab: torch.Tensor | None
        self.register_buffer("draft_vocab", draft_vocab)
        rows = config.draft_vocab_size or config.vocab_size

        def head(index: int) -> nn.ModuleList:
            parts: list[nn.Module] = [
                ResidualBlock(config.hidden_size) for _ in range(config.num_layers)
            ]
            if index not in config.shared_heads:
                parts.append(nn.Linear(config.hidden_size, rows, bias=False))
            return nn.ModuleList(parts)

        self.heads = nn.ModuleList([head(index) for index in range(config.num_heads)])

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor) -> None:
        """Make every head say what the base model's `lm_head` [V, D] says."""
        rows = lm_head if self.draft_vocab is None else lm_head[self.draft_vocab.long()]
        for index in range(self.config.num_heads):
            matrix = self.matrix(index)
            if matrix is not None:
                matrix.copy_(rows)

    def matrix(self, index: int) -> torch.Tensor | None:
        """[Vd, D] the matrix of a head; None where it uses the base model's LM head."""
        last = self.heads[index][-1] if len(self.heads[index]) else None
        return last.weight if isinstance(last, nn.Linear) else None

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """H of [..., D]: what each head's matrix is given.

        Args:
            hidden: [..., D] behind the base model's final norm.
        """
        states = []
        for head in self.heads:
            state = hidden
            for block in head[: self.config.num_layers]:
                state = block(state)
            states.append(state)
        return states

    def forward(self, hidden: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """[H, ..., Vd] logits of every head.

        Args:
            hidden: [..., D] behind the base model's final norm.
            lm_head: the base model's, for heads without a matrix.
        """
        logits = []
        for index, state in enumerate(self.states(hidden)):
            matrix = self.matrix(index)
            if matrix is not None:
                logits.append(nn.functional.linear(state, matrix))
                continue
            assert lm_head is not None
            every = lm_head(state)
            vocab = self.draft_vocab
            logits.append(every if vocab is None else every[..., vocab.long()])
        return torch.stack(logits)


def medusa_tensors(
    model: MedusaReference, lm_head: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The heads under their published names, every matrix of the whole vocabulary.

    Args:
        model: the heads.
        lm_head: [V, D] rows for the tokens that the draft vocabulary leaves out; zeros unless
            given.
    """
    tensors = {
        name.removeprefix("heads."): weight.detach().cpu().contiguous()
        for name, weight in model.named_parameters()
    }
    if model.draft_vocab is not None:
        shape = model.config.vocab_size, model.config.hidden_size
        rest = torch.zeros(shape) if lm_head is None else lm_head.detach().cpu().float()
        for name in model.config.matrix_names:
            whole = rest.clone()
            whole[model.draft_vocab.long().cpu()] = tensors[name].float()
            tensors[name] = whole
    return tensors


def medusa_settings(config: MedusaConfig, base_model: str) -> dict[str, object]:
    """The published config.json."""
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": base_model,
    }
