"""The multi-token prediction head of Qwen3-Next and Qwen3.5, in PyTorch.

By the equations of vLLM's `qwen3_next_mtp.py`, with the modules of transformers:

    x = fc([norm_e(embed(token i+1)); norm_h(h_i)])      h_i: behind the model's final norm
    y = norm(layer(x))                                   one layer of attention, its own keys
    logits of token i+2 = the model's output head of y; y stands for h in the head's next step
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm


class Head(nn.Module):  # type: ignore[misc]
    """A multi-token prediction head; its parameters have the names of published checkpoints.

    Args:
        config: of the model; the head's layer is like the model's layers of attention.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        """Make the modules: random matrices, norms that change nothing."""
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

    def join_and_project(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Make the layer's input.

        Args:
            embeddings: [B, R, D] of tokens i+1.
            hidden: [B, R, D] hidden states of tokens i, or what stands for them.

        Returns:
            [B, R, D].
        """
        parts = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        joined: torch.Tensor = self.fc(torch.cat(parts, dim=-1))
        return joined

    def forward(
        self, joined: torch.Tensor, rotary: nn.Module, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer and the last norm.

        Args:
            joined: [B, R, D] of `join_and_project`.
            rotary: the model's, which makes the embeddings of positions.
            positions: [R] of the rows.
            mask: [R, R] true where a row sees another.

        Returns:
            [B, R, D].
        """
        embedded = rotary(joined, positions[None])
        visible = mask[None, None].expand(joined.shape[0], 1, -1, -1)
        hidden = self.layers[0](joined, position_embeddings=embedded, attention_mask=visible)
        output: torch.Tensor = self.norm(hidden)
        return output


def mask_of_stacked_steps(rows_of_step: int, num_steps: int) -> torch.Tensor:
    """Make the mask of several steps of the head, the rows of one behind those of the other.

    A row sees what it would see where it drafts: the rows of the first step up to its own, and its
    own row of the steps in between, and itself.

    Args:
        rows_of_step: R.
        num_steps: S.

    Returns:
        [S R, S R] true where a row sees another.
    """
    causal = torch.ones(rows_of_step, rows_of_step, dtype=torch.bool).tril()
    own = torch.eye(rows_of_step, dtype=torch.bool)
    nothing = torch.zeros_like(own)
    lines = [
        torch.cat([causal, *[own] * step, *[nothing] * (num_steps - 1 - step)], dim=1)
        for step in range(num_steps)
    ]
    return torch.cat(lines)


def run_all_steps_in_one_pass(
    model: Qwen3_5ForCausalLM, head: Head, joined_inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Run several steps of the head at every token at once; no step reads another's output here.

    Args:
        model: gives the embeddings of positions.
        head: runs.
        joined_inputs: [B, R, D] of `Head.join_and_project`, one for each step.

    Returns:
        [B, R, D] hidden states behind the head's norm, one for each step.
    """
    rows = joined_inputs[0].shape[1]
    positions = torch.cat([torch.arange(rows) + step for step in range(len(joined_inputs))])
    mask = mask_of_stacked_steps(rows, len(joined_inputs))
    outputs = head(torch.cat(joined_inputs, dim=1), model.model.rotary_emb, positions, mask)
    return list(outputs.split(rows, dim=1))


def losses_of_two_steps(
    model: Qwen3_5ForCausalLM, head: Head, tokens: torch.Tensor, hidden: torch.Tensor
) -> list[torch.Tensor]:
    """Compute the head's losses one and two tokens behind the model's own next token.

    The first step's output goes into the second without a gradient.

    Args:
        model: gives the embedding and the output head, neither of which learns here.
        head: learns.
        tokens: [B, L].
        hidden: [B, L, D] the model's hidden states behind its final norm, detached.

    Returns:
        Mean cross entropy of tokens i+2, then of tokens i+3.
    """
    rows = tokens.shape[1] - 3
    table = model.model.embed_tokens.weight.detach()
    first = head.join_and_project(F.embedding(tokens[:, 1 : rows + 1], table), hidden[:, :rows])
    with torch.no_grad():
        (drafted,) = run_all_steps_in_one_pass(model, head, [first])
    second = head.join_and_project(F.embedding(tokens[:, 2 : rows + 2], table), drafted)
    return [
        F.cross_entropy(
            F.linear(output, table).float().flatten(0, 1),
            tokens[:, step + 2 : step + 2 + rows].flatten(),
        )
        for step, output in enumerate(run_all_steps_in_one_pass(model, head, [first, second]))
    ]


def draft_chains(
    model: Qwen3_5ForCausalLM, head: Head, tokens: torch.Tensor, hidden: torch.Tensor, length: int
) -> torch.Tensor:
    """Draft greedily behind every token of a text, as if each were the newest.

    Args:
        model: gives the embedding and the output head.
        head: drafts.
        tokens: [1, L].
        hidden: [1, L, D] the model's hidden states behind its final norm.
        length: tokens of a chain, K.

    Returns:
        [L - 1, K] drafted tokens; row i is the chain behind token i + 1.
    """
    table = model.model.embed_tokens.weight
    inputs = [head.join_and_project(F.embedding(tokens[:, 1:], table), hidden[:, :-1])]
    chains: list[torch.Tensor] = []
    while True:
        output = run_all_steps_in_one_pass(model, head, inputs)[-1]
        chains.append(F.linear(output, table).argmax(dim=-1))
        if len(chains) == length:
            return torch.stack(chains, dim=-1)[0]
        inputs.append(head.join_and_project(F.embedding(chains[-1], table), output))
