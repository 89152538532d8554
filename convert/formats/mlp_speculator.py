"""The MLP speculator in PyTorch, and the files that it is published in.

config.json           model_type "mlp_speculator" and the settings of `MlpSpeculatorConfig`
model*.safetensors    speculator.{emb,proj,head}.{i}.weight, speculator.ln.{i}.{weight,bias};
                      of tied weights, the duplicates may be left out
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ssmlx.drafters.speculator_heads import EPSILON, MODEL_TYPE, PREFIX, MlpSpeculatorConfig


class _RmsNorm(nn.Module):
    """Division by the root mean square, then a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms(x) * self.weight + self.bias


def rms(x: torch.Tensor) -> torch.Tensor:
    """[..., D] over its root mean square, the mean left in."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


class MlpSpeculatorReference(nn.Module):
    """A speculator, its parameters named as they are published behind "speculator.".

    Args:
        config: its settings.
        draft_vocab: [Vd] int32, given exactly where the settings have a `draft_vocab_size`.
    """

    def __init__(
        self, config: MlpSpeculatorConfig, draft_vocab: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.draft_vocab: torch.Tensor | None
        self.register_buffer("draft_vocab", draft_vocab)
        width, stages = config.width, range(config.n_predict)
        rows = config.draft_vocab_size or config.vocab_size
        shared = 1 if config.tie_weights else config.n_predict

        def each(modules: list[Any]) -> nn.ModuleList:
            return nn.ModuleList([modules[min(stage, len(modules) - 1)] for stage in stages])

        self.emb = each([nn.Embedding(config.vocab_size, width) for _ in range(shared)])
        inputs = [config.emb_dim, *(width for _ in range(min(shared, config.n_predict - 1)))]
        self.proj = each([nn.Linear(size, width, bias=False) for size in inputs])
        self.ln = each([_RmsNorm(width) for _ in range(shared)])
        self.head = each([nn.Linear(width, rows, bias=False) for _ in range(shared)])
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.trunc_normal_(module.weight, 0, width**-0.5)

    def first_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] what stage 0 starts from, of final-normed hidden states [..., D]."""
        return rms(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def next_state(self, stage: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[..., inner] the state of `stage`.

        Args:
            stage: which one.
            state: [..., D] of `first_state`, or [..., inner] of the stage before.
            tokens: [...] the last token of each path.
        """
        weight = self.config.emb_weight / self.config.state_weight
        mixed = self.proj[stage](state) + weight * self.emb[stage](tokens)
        return nn.functional.gelu(self.ln[stage](mixed.float()))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[stages, ..., Vd] logits of every stage, given the text itself.

        Args:
            hidden: [..., D] behind the base model's final norm.
            tokens: [..., stages]; entry i is the token i + 1 places after the hidden state's.
        """
        state, logits = self.first_state(hidden), []
        for stage in range(self.config.n_predict):
            state = self.next_state(stage, state, tokens[..., stage])
            logits.append(self.head[stage](state))
        return torch.stack(logits)

    def rank_paths(
        self, roots: torch.Tensor, hidden: torch.Tensor, widths: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tokens and edge log probabilities of full trees, level by level.

        Args:
            roots: [E] the token decided at each hidden state.
            hidden: [E, D] behind the base model's final norm.
            widths: branches at each stage.

        Returns:
            For level i, [E, widths[0] * ... * widths[i]] both, path by path.
        """
        state, tokens = self.first_state(hidden)[:, None], roots[:, None]  # [E, beams, D]
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for stage, width in enumerate(widths):
            state = self.next_state(stage, state, tokens)
            best = self.head[stage](state).float().log_softmax(-1).topk(width)
            places = best.indices.flatten(1)
            tokens = places if self.draft_vocab is None else self.draft_vocab.long()[places]
            state = state.repeat_interleave(width, dim=1)
            found[0].append(tokens)
            found[1].append(best.values.flatten(1))
        return found


def speculator_tensors(model: MlpSpeculatorReference) -> dict[str, torch.Tensor]:
    """The tensors under their published names, shared ones once.

    Heads of a draft vocabulary get zeros for the tokens that it leaves out.
    """
    tensors = {
        PREFIX + name: weight.detach().cpu().contiguous()
        for name, weight in model.named_parameters()
    }
    if model.draft_vocab is not None:
        for name in model.config.matrix_names:
            whole = torch.zeros(model.config.vocab_size, model.config.width)
            whole[model.draft_vocab.long().cpu()] = tensors[PREFIX + name].float()
            tensors[PREFIX + name] = whole
    return tensors


def speculator_settings(config: MlpSpeculatorConfig, base_model: str) -> dict[str, object]:
    """The published config.json."""
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": MODEL_TYPE,
        "emb_dim": config.emb_dim,
        "inner_dim": config.inner_dim,
        "n_predict": config.n_predict,
        "vocab_size": config.vocab_size,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        "top_k_tokens_per_head": list(config.widths),
        "n_candidates": config.n_candidates or 5,
        "base_model_name_or_path": base_model,
    }
