"""16-bit products as a GPU computes them, on a CPU: sums in float32 by BLAS, rounded once.

MLX's CPU backend takes seconds a row for packed weights with 16-bit activations, and adds up in 16
bits. These layers hold the very same weights in float32, and round every output; as on a GPU, the
order of a sum depends on how many rows there are.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


class RoundedLinear(nn.Linear):
    """A linear layer, packed or not, in 16 bits."""

    def __init__(self, linear: Any) -> None:
        nn.Module.__init__(self)
        self.weight = _unpacked(linear)
        if "bias" in linear:
            self.bias = linear.bias.astype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] to [..., out], of the type of `x`."""
        return super().__call__(x.astype(mx.float32)).astype(x.dtype)


class RoundedEmbedding(nn.Embedding):
    """An embedding, packed or not, in 16 bits; also where it is the LM head."""

    def __init__(self, embedding: Any, dtype: str) -> None:
        nn.Module.__init__(self)
        # its name: it can be copied
        self.weight = _unpacked(embedding)
        self._dtype = dtype

    def __call__(self, x: mx.array) -> mx.array:
        """[...] to [..., D]."""
        return super().__call__(x).astype(getattr(mx, self._dtype))

    def as_linear(self, x: mx.array) -> mx.array:
        """[..., D] to [..., V], of the type of `x`."""
        return super().as_linear(x.astype(mx.float32)).astype(x.dtype)


def _unpacked(layer: Any) -> mx.array:
    """The weights in float32, every one of them as it is."""
    if not isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return layer.weight.astype(mx.float32)
    scales, biases = (layer[name].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits)


def round_products(model: nn.Module, dtype: str) -> None:
    """Put these layers in the place of a model's own, which compute in `dtype`."""
    updates: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            updates.append((path, RoundedLinear(module)))
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            updates.append((path, RoundedEmbedding(module, dtype)))
    model.update_modules(tree_unflatten(updates))
