"""A model over several machines, tensor-parallel as mlx-lm splits it.

Each process, a rank, holds its part of every layer and of every key/value cache. All run the same
steps; rank 0 decides for all (`from_rank0`), as other chips may round in another way.
"""

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import InputError, first_line, require

Group = mx.distributed.Group

SPLIT_OUTPUTS = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)
SPLIT_INPUTS = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)
UNPACKED_LINEARS = (nn.Linear, nn.AllToShardedLinear, nn.ShardedToAllLinear)
LINEARS = (nn.Linear, nn.QuantizedLinear, *SPLIT_OUTPUTS, *SPLIT_INPUTS)


def launched_group() -> Group | None:
    """The processes that `mlx.launch` started; None if this one runs alone."""
    # Only then: looking for MPI, say, takes time, and may fail.
    group = mx.distributed.init() if os.environ.get("MLX_RANK") else None
    return group if group is not None and group.size() > 1 else None


def shard_over_ranks(model: nn.Module, group: Group) -> None:
    """Cut the model's weights, which need not be computed yet, to this rank's part; in place."""
    wrapped: Any = model
    size = group.size()
    require(
        hasattr(model, "shard"),
        f"mlx-lm cannot split the model type {getattr(model, 'model_type', '')!r} over ranks",
        expected="a model that it can, such as Llama, Mistral or Qwen",
        do="run this model on one machine",
    )
    args = getattr(wrapped, "language_model", wrapped).args
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(args, name, None) or size
        found = f"{size} ranks for a model whose {name} is {heads}"
        expected = "a number of ranks that divides it"
        require(heads % size == 0, found, expected=expected, do="start fewer")
    try:
        model.shard(group)
    except ValueError as error:
        raise InputError(
            f"the model cannot be split over {size} ranks ({first_line(error)})",
            expected="a number of ranks that divides its widths",
            do="start fewer",
        ) from error


def partial_product(
    linear: nn.Module,  # of `SPLIT_INPUTS`, quantised or not
    x: mx.array,  # [..., in / ranks]
) -> mx.array:  # [..., out], not summed over ranks, without bias
    if isinstance(linear, nn.ShardedToAllLinear):
        return x @ linear.weight.T
    form = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return mx.quantized_matmul(x, linear.weight, linear.scales, linear.get("biases"), **form)


def sum_over_ranks(arrays: Sequence[mx.array], group: Group) -> list[mx.array]:
    """Sum each array over the ranks, in one message, since sums must come in one order on every
    rank: all ranks call this with the same shapes and dtypes."""
    flat = mx.concatenate([array.flatten() for array in arrays])
    flat = mx.distributed.all_sum(flat, group=group)
    ends = list(accumulate(array.size for array in arrays))
    parts = zip(mx.split(flat, ends[:-1]), arrays, strict=True)
    return [part.reshape(array.shape).astype(array.dtype) for part, array in parts]


def from_rank0(arrays: Sequence[mx.array], group: Group | None) -> list[mx.array]:
    """The values that `arrays` have on rank 0, lazily: all ranks call this with the same shapes and
    dtypes."""
    if group is None:
        return list(arrays)
    if group.rank() > 0:
        # Zeros are sent once the arrays that they replace are computed, as on rank 0.
        arrays = mx.depends([mx.zeros_like(array) for array in arrays], list(arrays))
    return sum_over_ranks(arrays, group)
