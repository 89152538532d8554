"""Drafting heads in PyTorch, their parameters named as they are published.

Published names are prefixed with "heads." for Medusa's, and with nothing for a speculator's.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ssmlx.drafters.head_drafter import HeadConfig
from ssmlx.drafters.medusa import MedusaConfig
from ssmlx.drafters.mlp_speculator import EPSILON, MlpSpeculatorConfig

from ..typed_torch import Module, without_gradients

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]  # [V, D] and [V]


class HeadInput(NamedTuple):
    """The factors of one head's logits."""

    states: torch.Tensor  # [..., W]
    weight: torch.Tensor  # [Vd, W]
    bias: torch.Tensor | None  # [Vd]


class HeadReference(Module):
    """Drafting heads of one kind; without `draft_vocab` [Vd] int32 they guess among all tokens."""

    draft_vocab: torch.Tensor | None

    def __init__(self, config: HeadConfig, draft_vocab: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config: Any = config
        self.register_buffer("draft_vocab", draft_vocab)

    def iterate_head_inputs(
        self,
        hidden: torch.Tensor,  # [..., D] final-normed
        following: torch.Tensor,  # [..., H] ids; entry i is i + 1 tokens after `hidden`'s token
        # the base's rows of the draft vocabulary, for heads without a matrix
        lm_head: WeightAndBias,
    ) -> Iterator[HeadInput]:
        """Yield the factors of each head's logits."""
        raise NotImplementedError

    def forward(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> torch.Tensor:
        """Logits [H, ..., Vd] of every head, given the text itself, as in `iterate_head_inputs`."""
        rows = self.iterate_head_inputs(hidden, following, lm_head)
        return torch.stack([nn.functional.linear(*row) for row in rows])


class ResidualBlock(Module):
    """x + SiLU(W x + b); the identity when new, as W and b are zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaReference(HeadReference):
    """Residual blocks, then the head's own matrix or the base's LM head (Cai et al., 2024)."""

    def __init__(self, config: MedusaConfig, draft_vocab: torch.Tensor | None = None) -> None:
        super().__init__(config, draft_vocab)
        width = config.hidden_size

        def head(index: int) -> nn.ModuleList:
            parts: list[nn.Module] = [ResidualBlock(width) for _ in range(config.num_layers)]
            if index not in config.shared_heads:
                parts.append(nn.Linear(width, config.num_guessed, bias=False))
            return nn.ModuleList(parts)

        self.heads = nn.ModuleList([head(index) for index in range(config.num_heads)])

    @without_gradients
    def copy_lm_head(
        self,
        lm_head: torch.Tensor,  # [V, D]
    ) -> None:
        """Copy the LM head into every head's own matrix."""
        rows = lm_head if self.draft_vocab is None else lm_head[self.draft_vocab.long()]
        for head in self.heads:
            for matrix in head[self.config.num_layers :]:
                matrix.weight.copy_(rows)

    def iterate_head_inputs(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> Iterator[HeadInput]:
        for head in self.heads:
            state = hidden
            for block in head[: self.config.num_layers]:
                state = block(state)
            own = head[self.config.num_layers :]
            weight, bias = (own[0].weight, None) if len(own) else lm_head
            yield HeadInput(state, weight, bias)


class _RmsNorm(Module):
    """Divides by the root mean square, then applies a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return divide_by_rms(x) * self.weight + self.bias


def divide_by_rms(x: torch.Tensor) -> torch.Tensor:
    """Divide [..., D] by its root mean square, without subtracting the mean."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


class MlpSpeculatorReference(HeadReference):
    """Stages that each mix the previous state with a token's embedding (arXiv 2404.19124)."""

    def __init__(
        self, config: MlpSpeculatorConfig, draft_vocab: torch.Tensor | None = None
    ) -> None:
        """Build the stages; with tied weights they share modules."""
        super().__init__(config, draft_vocab)
        width = config.width
        stages = range(config.n_predict)
        shared = 1 if config.tie_weights else config.n_predict

        def each(modules: list[Any]) -> nn.ModuleList:
            return nn.ModuleList([modules[min(stage, len(modules) - 1)] for stage in stages])

        self.emb = each([nn.Embedding(config.vocab_size, width) for _ in range(shared)])
        inputs = [config.emb_dim, *(width for _ in range(min(shared, config.n_predict - 1)))]
        self.proj = each([nn.Linear(size, width, bias=False) for size in inputs])
        self.ln = each([_RmsNorm(width) for _ in range(shared)])
        self.head = each([nn.Linear(width, config.num_guessed, bias=False) for _ in range(shared)])
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.trunc_normal_(module.weight, 0, width**-0.5)

    def first_state(
        self,
        hidden: torch.Tensor,  # [..., D] final-normed
    ) -> torch.Tensor:
        """The state from which stage 0 starts."""
        return divide_by_rms(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def next_state(
        self,
        stage: int,
        # [..., D] of `first_state` for stage 0, else [..., inner] of the stage before
        state: torch.Tensor,
        tokens: torch.Tensor,  # [...] each path's last token
    ) -> torch.Tensor:
        """The stage's state, float32 [..., inner]."""
        mixed = self.proj[stage](state) + self.config.emb_weight * self.emb[stage](tokens)
        return nn.functional.gelu(self.ln[stage](mixed.float()))

    def iterate_head_inputs(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> Iterator[HeadInput]:
        """Yield the factors of each stage's logits, given the text's own tokens."""
        state = self.first_state(hidden)
        for stage in range(self.config.n_predict):
            state = self.next_state(stage, state, following[..., stage])
            yield HeadInput(state, self.head[stage].weight, None)

    def draft_full_trees(
        self,
        roots: torch.Tensor,  # [E] the tokens after `hidden`
        hidden: torch.Tensor,  # [E, D] final-normed
        widths: Sequence[int],  # children of a node, by level
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Draft each node's likeliest children: tokens, and log probabilities given the node.

        By level, [E, widths[0] * ... * widths[i]], the children of a node together, best first.
        """
        # [E, beams, D]
        state = self.first_state(hidden)[:, None]
        tokens = roots[:, None]
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


def new_reference(
    config: HeadConfig,
    draft_vocab: torch.Tensor | None,  # [Vd] int32; None for all tokens
) -> HeadReference:
    kinds: dict[str, Any] = {"medusa": MedusaReference, "mlp_speculator": MlpSpeculatorReference}
    made: HeadReference = kinds[config.kind](config, draft_vocab)
    return made
