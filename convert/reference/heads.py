"""Drafting heads in PyTorch, their parameters named as they are published.

In front of the published names stand "heads." for Medusa's, and nothing for a speculator's.
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

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
"""A weight [V, D] and its bias [V], or None."""


class HeadInput(NamedTuple):
    """What the logits of one head are the product of."""

    states: torch.Tensor  # [..., W]
    weight: torch.Tensor  # [Vd, W]
    bias: torch.Tensor | None  # [Vd]


class HeadReference(Module):
    """Drafting heads of one kind; `draft_vocab` [Vd] int32 is None where they guess among all
    tokens.
    """

    draft_vocab: torch.Tensor | None

    def __init__(self, config: HeadConfig, draft_vocab: torch.Tensor | None = None) -> None:
        """Keep the settings and the draft vocabulary [Vd] int32, or None."""
        super().__init__()
        self.config: Any = config
        self.register_buffer("draft_vocab", draft_vocab)

    def iterate_head_inputs(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> Iterator[HeadInput]:
        """Yield what each head's logits are the product of: its states, its matrix and its bias.

        Args:
            hidden: [..., D] final-normed hidden states of the base model.
            following: [..., H] token ids; entry i stands i + 1 places behind the token of `hidden`.
            lm_head: the base's rows of the draft vocabulary, and bias, for heads without a matrix.
        """
        raise NotImplementedError

    def forward(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> torch.Tensor:
        """Return [H, ..., Vd] logits of every head, given the text itself.

        Args:
            hidden: [..., D] final-normed hidden states of the base model.
            following: [..., H] token ids, as `iterate_head_inputs` takes them.
            lm_head: the base's rows of the draft vocabulary, and bias, for heads without a matrix.
        """
        rows = self.iterate_head_inputs(hidden, following, lm_head)
        return torch.stack([nn.functional.linear(*row) for row in rows])


class ResidualBlock(Module):
    """x + SiLU(W x + b); the identity when new, as W and b are zero."""

    def __init__(self, width: int) -> None:
        """Make a block that is the identity."""
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaReference(HeadReference):
    """Medusa heads (Cai et al., 2024): residual blocks, then a matrix of the head's own, or for
    heads in `shared_heads` the base's LM head.
    """

    def __init__(self, config: MedusaConfig, draft_vocab: torch.Tensor | None = None) -> None:
        """Make heads whose blocks are the identity, and whose matrices are drawn.

        Args:
            config: number of heads and blocks, sizes, and which heads share the LM head.
            draft_vocab: [Vd] int32, or None.
        """
        super().__init__(config, draft_vocab)
        width = config.hidden_size

        def head(index: int) -> nn.ModuleList:
            """Make a head's modules: its identity blocks, then its matrix, drawn, unless it shares
            the LM head.
            """
            parts: list[nn.Module] = [ResidualBlock(width) for _ in range(config.num_layers)]
            if index not in config.shared_heads:
                parts.append(nn.Linear(width, config.num_guessed, bias=False))
            return nn.ModuleList(parts)

        self.heads = nn.ModuleList([head(index) for index in range(config.num_heads)])

    @without_gradients
    def copy_lm_head(self, lm_head: torch.Tensor) -> None:
        """Copy the base's LM head into every head's matrix; heads without a matrix stay.

        Args:
            lm_head: [V, D]; its rows of the draft vocabulary are taken where there is one.
        """
        rows = lm_head if self.draft_vocab is None else lm_head[self.draft_vocab.long()]
        for head in self.heads:
            for matrix in head[self.config.num_layers :]:
                matrix.weight.copy_(rows)

    def iterate_head_inputs(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> Iterator[HeadInput]:
        """Yield each head's states and matrix, as `HeadReference.iterate_head_inputs` says;
        `following` is not read.
        """
        for head in self.heads:
            state = hidden
            for block in head[: self.config.num_layers]:
                state = block(state)
            own = head[self.config.num_layers :]
            weight, bias = (own[0].weight, None) if len(own) else lm_head
            yield HeadInput(state, weight, bias)


class _RmsNorm(Module):
    """Division by the root mean square, then a weight and a bias."""

    def __init__(self, width: int) -> None:
        """Start with a weight of ones and a bias of zeros."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return divide_by_rms(x) * self.weight + self.bias


def divide_by_rms(x: torch.Tensor) -> torch.Tensor:
    """Divide [..., D] by its root mean square over the last axis; the mean is not subtracted."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


class MlpSpeculatorReference(HeadReference):
    """An MLP speculator (arXiv 2404.19124): each stage mixes the state before with a token's
    embedding.
    """

    def __init__(
        self, config: MlpSpeculatorConfig, draft_vocab: torch.Tensor | None = None
    ) -> None:
        """Draw embeddings and matrices; norms begin as ones and zeros. With tied weights, stages
        share modules.

        Args:
            config: stages, sizes, and whether weights are tied.
            draft_vocab: [Vd] int32, or None.
        """
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

    def first_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the state [..., D] that stage 0 starts from.

        Args:
            hidden: [..., D] final-normed; with `scale_input` it is divided by its RMS and the root
                of 2.
        """
        return divide_by_rms(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def next_state(self, stage: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the state [..., inner] of a stage, float32.

        Args:
            stage: its number from 0 on.
            state: [..., D] of `first_state` for stage 0, else [..., inner] of the stage before.
            tokens: [...] each path's last token.
        """
        mixed = self.proj[stage](state) + self.config.emb_weight * self.emb[stage](tokens)
        return nn.functional.gelu(self.ln[stage](mixed.float()))

    def iterate_head_inputs(
        self, hidden: torch.Tensor, following: torch.Tensor, lm_head: WeightAndBias
    ) -> Iterator[HeadInput]:
        """Yield each stage's state and matrix, as `HeadReference.iterate_head_inputs` says, given
        the text's own tokens.
        """
        state = self.first_state(hidden)
        for stage in range(self.config.n_predict):
            state = self.next_state(stage, state, following[..., stage])
            yield HeadInput(state, self.head[stage].weight, None)

    def draft_full_trees(
        self, roots: torch.Tensor, hidden: torch.Tensor, widths: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Draft full trees level by level: below each node its likeliest children, best first.

        Args:
            roots: [E] the tokens that follow `hidden`.
            hidden: [E, D] final-normed hidden states of the base model.
            widths: children of a node, by level; at most as many levels as stages.

        Returns:
            Tokens, and log probabilities given the node above: for each level i a tensor [E,
            widths[0] * ... * widths[i]], the children of a node side by side.
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


def new_reference(config: HeadConfig, draft_vocab: torch.Tensor | None) -> HeadReference:
    """Make new heads of the kind of `config`, Medusa's or an MLP speculator.

    Args:
        config: kind and sizes.
        draft_vocab: [Vd] int32 tokens that they guess among; None for all.
    """
    kinds: dict[str, Any] = {"medusa": MedusaReference, "mlp_speculator": MlpSpeculatorReference}
    made: HeadReference = kinds[config.kind](config, draft_vocab)
    return made
