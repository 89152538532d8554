"""The multi-token prediction head of Qwen3-Next and Qwen3.5, in PyTorch.

By the equations of vLLM's `qwen3_next_mtp.py`, with the modules of transformers:

    x = fc([norm_e(embed(token i+1)); norm_h(h_i)])      h_i: after the model's final norm
    y = norm(layer(x))                                   one layer of attention, its own keys
    logits of token i+2 = the model's output head of y; y stands for h in the head's next step
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm


class Head(nn.Module):  # type: ignore[misc]
    """A multi-token prediction head; its parameters have the names of published checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
            elif isinstance(module, Qwen3_5RMSNorm):
                nn.init.zeros_(module.weight)

    def join_and_project(
        self,
        embeddings: torch.Tensor,  # [B, R, D] of tokens i+1
        hidden: torch.Tensor,  # [B, R, D] of tokens i, or what replaces them
    ) -> torch.Tensor:
        """Compute the layer's input [B, R, D]."""
        parts = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        joined: torch.Tensor = self.fc(torch.cat(parts, dim=-1))
        return joined

    def forward(
        self,
        joined: torch.Tensor,  # [B, R, D] of `join_and_project`
        rotary: nn.Module,  # the model's
        positions: torch.Tensor,  # [R]
        mask: torch.Tensor,  # [R, R] true if a row sees another
    ) -> torch.Tensor:  # [B, R, D]
        embedded = rotary(joined, positions[None])
        visible = mask[None, None].expand(joined.shape[0], 1, -1, -1)
        hidden = self.layers[0](joined, position_embeddings=embedded, attention_mask=visible)
        output: torch.Tensor = self.norm(hidden)
        return output


def mask_of_stacked_steps(rows_of_step: int, num_steps: int) -> torch.Tensor:
    """Mask [S R, S R], true if a row sees another, of S steps of R rows, one step after the other.

    A row sees what it would see when it drafts: the rows of the first step up to its own, its own
    row of the steps in between, and itself.
    """
    causal = torch.ones(rows_of_step, rows_of_step, dtype=torch.bool).tril()
    own = torch.eye(rows_of_step, dtype=torch.bool)
    nothing = torch.zeros_like(own)
    lines = [
        torch.cat([causal, *[own] * step, *[nothing] * (num_steps - 1 - step)], dim=1)
        for step in range(num_steps)
    ]
    return torch.cat(lines)


def run_steps(
    model: Qwen3_5ForCausalLM,
    head: Head,
    joined_inputs: list[torch.Tensor],  # [B, R, D] of `Head.join_and_project`, for each step
) -> list[torch.Tensor]:
    """Run all steps; [B, R, D] after the norm for each. No step reads another's output here."""
    rows = joined_inputs[0].shape[1]
    positions = torch.cat([torch.arange(rows) + step for step in range(len(joined_inputs))])
    mask = mask_of_stacked_steps(rows, len(joined_inputs))
    outputs = head(torch.cat(joined_inputs, dim=1), model.model.rotary_emb, positions, mask)
    return list(outputs.split(rows, dim=1))


def losses_of_two_steps(
    model: Qwen3_5ForCausalLM,
    head: Head,
    tokens: torch.Tensor,  # [B, L]
    hidden: torch.Tensor,  # [B, L, D] after the model's final norm, detached
) -> list[torch.Tensor]:
    """Mean cross-entropy of tokens i+2, then of tokens i+3; only the head learns."""
    rows = tokens.shape[1] - 3
    table = model.model.embed_tokens.weight.detach()
    first = head.join_and_project(F.embedding(tokens[:, 1 : rows + 1], table), hidden[:, :rows])
    # The first step's output goes into the second without a gradient.
    with torch.no_grad():
        (drafted,) = run_steps(model, head, [first])
    second = head.join_and_project(F.embedding(tokens[:, 2 : rows + 2], table), drafted)
    return [
        F.cross_entropy(
            F.linear(output, table).float().flatten(0, 1),
            tokens[:, step + 2 : step + 2 + rows].flatten(),
        )
        for step, output in enumerate(run_steps(model, head, [first, second]))
    ]


def draft_chains(
    model: Qwen3_5ForCausalLM,
    head: Head,
    tokens: torch.Tensor,  # [1, L]
    hidden: torch.Tensor,  # [1, L, D] after the model's final norm
    length: int,  # K, tokens of a chain
) -> torch.Tensor:  # [L - 1, K]
    """Draft greedily after every token, as if each were the newest: chain i follows token i + 1."""
    table = model.model.embed_tokens.weight
    inputs = [head.join_and_project(F.embedding(tokens[:, 1:], table), hidden[:, :-1])]
    chains: list[torch.Tensor] = []
    while True:
        output = run_steps(model, head, inputs)[-1]
        chains.append(F.linear(output, table).argmax(dim=-1))
        if len(chains) == length:
            return torch.stack(chains, dim=-1)[0]
        inputs.append(head.join_and_project(F.embedding(chains[-1], table), output))
