"""OPT (https://arxiv.org/abs/2205.01068), as transformers has it, in the style of mlx-lm.

Modules are named as in Hugging Face's checkpoints, so that PEFT's names of LoRA fit, and a folder
that is written from this model loads in transformers. It is the OPT of 125 million parameters, and
of 1.3 billion and more: OPT-350m and Galactica, which are built otherwise, are refused.

Positions are learned and added to the embedding; `stages` says what that means for streams.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention

_FIRST_POSITION = 2  # row of the position table that belongs to the first token

# Settings that decide how it is built, which is as their defaults say.
_BUILT = (
    "do_layer_norm_before", "_remove_final_layer_norm", "activation_function", "enable_bias",
    "layer_norm_elementwise_affine", "tie_word_embeddings",
)  # fmt: skip


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc]  # mlx-lm has no types
    """The fields of config.json that decide what is computed; defaults are transformers'."""

    model_type: str = "opt"
    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048
    word_embed_proj_dim: int = 0  # hidden_size
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self.word_embed_proj_dim = self.word_embed_proj_dim or self.hidden_size
        built = {name: getattr(ModelArgs, name) for name in _BUILT}
        for name, expected in {**built, "word_embed_proj_dim": self.hidden_size}.items():
            if (found := getattr(self, name)) != expected:
                raise ValueError(f"{name} is {found!r} and not {expected!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )


class Attention(nn.Module):
    """Multi-head attention with biases, without rotary embedding."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size = args.hidden_size
        self.num_heads = args.num_attention_heads
        self.scale = (size // self.num_heads) ** -0.5
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.q_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def __call__(
        self,
        x: mx.array,  # [B, R, D]
        mask: Any = None,
        cache: Any = None,
    ) -> mx.array:  # [B, R, D]
        batch, length, _ = x.shape

        def heads(y: mx.array) -> mx.array:
            return y.reshape(batch, length, self.num_heads, -1).transpose(0, 2, 1, 3)

        queries = heads(self.q_proj(x))
        keys = heads(self.k_proj(x))
        values = heads(self.v_proj(x))
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.out_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class DecoderLayer(nn.Module):
    """Attention and a ReLU MLP, each after a layer norm and with a residual."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.self_attn = Attention(args)
        self.self_attn_layer_norm = nn.LayerNorm(args.hidden_size)
        self.fc1 = nn.Linear(args.hidden_size, args.ffn_dim)
        self.fc2 = nn.Linear(args.ffn_dim, args.hidden_size)
        self.final_layer_norm = nn.LayerNorm(args.hidden_size)

    def __call__(
        self,
        x: mx.array,  # [B, R, D]
        mask: Any = None,
        cache: Any = None,
    ) -> mx.array:  # [B, R, D]
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask, cache)
        return x + self.fc2(nn.relu(self.fc1(self.final_layer_norm(x))))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size = args.hidden_size
        self.last_position = args.max_position_embeddings - 1
        self.embed_tokens = nn.Embedding(args.vocab_size, size)
        self.embed_positions = nn.Embedding(args.max_position_embeddings + _FIRST_POSITION, size)
        self.layers = [DecoderLayer(args) for _ in range(args.num_hidden_layers)]
        self.final_layer_norm = nn.LayerNorm(size)

    @property
    def norm(self) -> nn.Module:
        """The final norm, under the name that other models have for it."""
        return self.final_layer_norm

    def embed_at(
        self,
        tokens: mx.array,  # [B, R]
        positions: mx.array,  # [B, R] or [R], from 0 at the text's first token
    ) -> mx.array:  # [B, R, D]
        """A draft tree may reach beyond the last position; such tokens are never part of an answer,
        and get the last position's. Padding comes before the first, at -1."""
        positions = mx.clip(positions, -1, self.last_position)
        embedded: mx.array = self.embed_tokens(tokens)
        of_positions: mx.array = self.embed_positions(positions + _FIRST_POSITION)
        return embedded + of_positions

    def __call__(
        self,
        tokens: mx.array,  # [B, R]
        cache: Any = None,
    ) -> mx.array:  # [B, R, D], after the final norm
        cache = cache or [None] * len(self.layers)
        offset = mx.array(0 if cache[0] is None else cache[0].offset)
        hidden = self.embed_at(tokens, mx.arange(tokens.shape[1]) + offset[..., None])
        mask = create_attention_mask(hidden, cache[0])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, mask, layer_cache)
        normed: mx.array = self.norm(hidden)
        return normed


class OPTModel(nn.Module):
    """The decoder under the name that Hugging Face's checkpoints have for it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.decoder = Decoder(args)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden: mx.array = self.decoder(tokens, cache)
        return hidden


class Model(nn.Module):
    """OPT with its LM head, which is tied to the embedding."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = OPTModel(args)

    def __call__(
        self,
        inputs: mx.array,  # [B, R]
        cache: Any = None,
    ) -> mx.array:  # [B, R, V]
        logits: mx.array = self.model.decoder.embed_tokens.as_linear(self.model(inputs, cache))
        return logits

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """mlx-lm calls it while it loads. Some checkpoints are of the model without its head:
        "model." is missing. `lm_head.weight` is the embedding."""
        return {
            f"model.{name}" if name.startswith("decoder.") else name: array
            for name, array in weights.items()
            if name != "lm_head.weight"
        }

    @property
    def layers(self) -> list[Any]:
        return self.model.decoder.layers
