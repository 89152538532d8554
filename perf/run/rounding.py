"""16-bit products as a GPU computes them, on a CPU: sums in float32 by BLAS, rounded once.

MLX's CPU backend takes seconds per row for quantized weights with 16-bit activations, and adds up
in 16 bits. These layers hold the very same weights in float32, and round every output; as on a GPU,
the order of a sum depends on how many rows there are.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten

# MLX's layers have no types: their methods' results are annotated, and calls of them are ignored.


class RoundedLinear(Linear):
    """Computes in float32 and rounds its output to the input's type."""

    def __init__(self, linear: Any) -> None:
        Module.__init__(self)  # type: ignore[no-untyped-call]
        self.weight = _float32_weights(linear)
        if "bias" in linear:
            self.bias = linear.bias.astype(mx.float32)

    def __call__(
        self,
        x: mx.array,  # [..., in]
    ) -> mx.array:  # [..., out]
        product: mx.array = super().__call__(x.astype(mx.float32))  # type: ignore[no-untyped-call]
        return product.astype(x.dtype)


class RoundedEmbedding(Embedding):
    """Computes in float32 and rounds its output, also as the LM head."""

    def __init__(
        self,
        embedding: Any,
        dtype: str,  # name of the type to which rows are rounded, such as "float16"
    ) -> None:
        Module.__init__(self)  # type: ignore[no-untyped-call]
        self.weight = _float32_weights(embedding)
        self._dtype = dtype  # the name, which can be copied

    def __call__(
        self,
        x: mx.array,  # [...] ids
    ) -> mx.array:  # [..., D]
        rows: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return rows.astype(getattr(mx, self._dtype))

    def as_linear(
        self,
        x: mx.array,  # [..., D]
    ) -> mx.array:  # [..., V]
        product: mx.array = super().as_linear(x.astype(mx.float32))  # type: ignore[no-untyped-call]
        return product.astype(x.dtype)


def _float32_weights(layer: Any) -> mx.array:
    """The weights in float32; scales are cast before dequantizing, so nothing is rounded."""
    if not isinstance(layer, QuantizedLinear | QuantizedEmbedding):
        weights: mx.array = layer.weight.astype(mx.float32)
        return weights
    scales, biases = (layer[name].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits)


def replace_by_rounding_layers(
    model: Module,
    embedding_dtype: str,  # name of the type to which embeddings are rounded
) -> None:
    """Replace the model's linear and embedding layers, in place."""
    updates: list[tuple[str, Module]] = []
    for path, module in model.named_modules():  # type: ignore[no-untyped-call]
        if isinstance(module, Linear | QuantizedLinear):
            updates.append((path, RoundedLinear(module)))
        elif isinstance(module, Embedding | QuantizedEmbedding):
            updates.append((path, RoundedEmbedding(module, embedding_dtype)))
    model.update_modules(tree_unflatten(updates))
