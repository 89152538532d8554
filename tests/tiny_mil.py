"""A tiny stateful decoder in PyTorch, with what exports of this project consist of."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# A head size of 16 makes the scale of attention a number that float16 holds.
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 32, 4, 2, 16, 48, 50
SLOTS, ROWS, STREAMS, LAYERS, MASKED = 32, 4, 2, 2, -1e4


class Norm(nn.Module):
    """RMS norm as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Pointwise(nn.Conv2d):
    """A linear map of rows [1, R, in] as the Neural Engine likes it: a 1x1 convolution."""

    def __init__(self, in_size: int, out_size: int, **_: bool) -> None:
        super().__init__(in_size, out_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)[:, :, None])[:, :, 0].transpose(1, 2)


class Layer(nn.Module):
    """Attention with rotary positions over a cache of slots, and a gated MLP.

    The last rows, the speculative streams', have LoRA on their queries.
    """

    def __init__(self, write: str, channels_first: bool) -> None:
        super().__init__()
        self.write, self.plain_attention = write, channels_first
        linear = Pointwise if channels_first else nn.Linear
        self.q = linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o = linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate, self.up = (linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = linear(HIDDEN, WIDTH, bias=False)
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, HEADS * HEAD_DIM, bias=False)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)] if channels_first else [Norm(), Norm()]
        )

    def forward(self, x, rotary, mask, slots, keys, values):
        h = self.norms[0](x)
        lora = self.lora_b(self.lora_a(h[:, -STREAMS:]))
        q = self.q(h) + F.pad(lora, (0, 0, ROWS - STREAMS, 0))
        q, k, v = (split_heads(part) for part in (q, self.k(h), self.v(h)))
        self.put(keys, slots, rotate(k, rotary))
        self.put(values, slots, v)
        x = x + self.o(self.attend(rotate(q, rotary), keys, values, mask))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * F.gelu(self.up(h)))

    def put(self, cache, slots, rows):
        """Write [1, Hkv, R, Dh] rows into slots of the cache, in one of three ways."""
        if self.write == "scatter":
            where = slots.long().view(1, 1, ROWS, 1).expand_as(rows)
            cache[:] = cache.scatter(2, where, rows)
        elif self.write == "onehot":
            onehot = (slots[:, None] == torch.arange(SLOTS)).to(rows.dtype)
            keep = (1 - onehot.sum(0))[None, None, :, None]
            cache[:] = cache * keep + onehot.T @ rows
        else:
            cache[:, :, slots[0] : slots[0] + ROWS] = rows

    def attend(self, q, keys, values, mask):
        repeated = [part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values)]
        if self.plain_attention:
            scores = q @ repeated[0].transpose(-1, -2) * HEAD_DIM**-0.5 + mask
            mixed = scores.softmax(-1) @ repeated[1]
        else:
            mixed = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)
        return mixed.transpose(1, 2).reshape(1, ROWS, HEADS * HEAD_DIM)


def split_heads(x):
    return x.view(1, ROWS, -1, HEAD_DIM).transpose(1, 2)


def rotate(x, rotary):
    half = HEAD_DIM // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * rotary[0] + turned * rotary[1]


class Decoder(nn.Module):
    """Rows of tokens to the choices, the best three, and one gathered row's logits.

    Args:
        write: how the cache is written, "scatter", "onehot" or "slice".
        channels_first: with 1x1 convolutions, layer norms and attention in single operations.
    """

    def __init__(self, write: str = "scatter", channels_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(write, channels_first) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for name in state_names():
            self.register_buffer(name, torch.zeros(1, KV_HEADS, SLOTS, HEAD_DIM))
        turns = torch.outer(torch.arange(64.0), 100 ** (-torch.arange(HEAD_DIM // 2) / 8))
        for name, table in (("cos", turns.cos()), ("sin", turns.sin())):
            self.register_buffer(name, torch.cat([table, table], -1))

    def forward(self, tokens, positions, mask, slots, chosen):
        x = self.embed(tokens)
        rotary = self.cos[positions][None, None], self.sin[positions][None, None]
        for index, layer in enumerate(self.layers):
            caches = getattr(self, f"keys_{index}"), getattr(self, f"values_{index}")
            x = layer(x, rotary, mask, slots, *caches)
        logits = self.head(x)
        best, ids = logits.topk(3)
        row = self.head(x.index_select(1, chosen))
        return logits.argmax(-1).int(), best, ids.int(), row.log_softmax(-1)

    @torch.no_grad()
    def predict(self, inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(out.numpy() for out in self(*map(torch.from_numpy, inputs.values())))

    def reset(self) -> Decoder:
        """Forget what is in the cache."""
        for name in state_names():
            getattr(self, name).zero_()
        return self


def state_names() -> list[str]:
    return [f"{part}_{index}" for index in range(LAYERS) for part in ("keys", "values")]


def make_inputs(step: int) -> dict[str, np.ndarray]:
    """Random tokens; rows see what is in the cache and the rows before them.

    Each step takes the next slots, but the fourth takes those of the second again, whose rows a
    host has given up.
    """
    rng, block = np.random.default_rng(step), 1 if step == 3 else step
    own, committed = block * ROWS + np.arange(ROWS), {0, 1, 2} & set(range(step)) - {block}
    mask = np.full((ROWS, SLOTS), MASKED, np.float32)
    mask[:, [slot for slot in range(SLOTS) if slot // ROWS in committed]] = 0
    mask[:, own] = np.triu(np.full((ROWS, ROWS), MASKED), 1)
    return {
        "tokens": rng.integers(0, VOCAB, (1, ROWS), np.int32),
        "positions": np.arange(step * ROWS, (step + 1) * ROWS, dtype=np.int32),
        "mask": mask[None, None],
        "slots": own.astype(np.int32),
        "chosen": np.array([step % ROWS], np.int32),
    }
