"""Inputs for each operation of the MIL interpreter, and what PyTorch does in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

RNG = np.random.default_rng(0)


def floats(*shape: int, low: float = -2, high: float = 2) -> np.ndarray:
    return RNG.uniform(low, high, shape).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(frozen=True)
class Case:
    """Inputs of an operation.

    Attributes:
        name: of the operation.
        inputs: by MIL's names.
        torch: the same in PyTorch, of the tensors among the inputs.
        inferred: coremltools computes it too, when it folds constants.
    """

    name: str
    inputs: dict[str, Any]
    torch: Callable[..., Any]
    inferred: bool = True

    def __str__(self) -> str:
        return self.name


X, Y = floats(2, 3, 4), floats(3, 1)
COUNTS, FEW = RNG.integers(1, 9, (2, 3), np.int32), RNG.integers(1, 5, (3,), np.int32)
TIES = np.round(floats(3, 40))
MASK = np.where(RNG.random((1, 1, 5, 7)) < 0.3, -1e4, 0).astype(np.float32)
SEEN = RNG.random((1, 1, 5, 7)) < 0.7
SEEN[..., 0] = True
QUERY, KEY, VALUE = floats(1, 2, 5, 8), floats(1, 2, 7, 8), floats(1, 2, 7, 6)
CACHE, ROWS = floats(1, 2, 6, 3), floats(1, 2, 2, 3)
SLOTS = ints(4, 1)
WHERE = np.broadcast_to(SLOTS[None, None, :, None], ROWS.shape).copy()


# coremltools computes nothing for these when it folds constants.
NOT_INFERRED = {"silu", "conv", "gather_nd", "scatter", "scatter_nd", "one_hot"}


def case(name: str, function: Callable[..., Any], **inputs: Any) -> Case:
    return Case(name, inputs, function, inferred=name not in NOT_INFERRED)


def misfolded(name: str, function: Callable[..., Any], **inputs: Any) -> Case:
    """A case that coremltools folds against its own documentation, or cannot fold.

    Equal numbers of topk come in turned order and k = -1 fails, interleaving concatenates,
    scattered numbers replace whatever the mode, and exclusive sums raise a TypeError.
    """
    return Case(name, inputs, function, inferred=False)


def elementwise() -> list[Case]:
    two = {"x": X, "y": Y}
    positive = {"x": np.abs(X) + 0.1}
    flags = {"x": X > 0, "y": Y > 0}
    return [
        case("add", torch.add, **two),
        case("add", torch.add, x=COUNTS, y=FEW),
        case("sub", torch.sub, **two),
        case("mul", torch.mul, **two),
        case("real_div", torch.div, **two),
        case("maximum", torch.maximum, **two),
        case("minimum", torch.minimum, **two),
        case("pow", torch.pow, x=np.abs(X), y=Y),
        case("floor_div", torch.floor_divide, x=COUNTS - 5, y=FEW),
        case("mod", torch.remainder, x=COUNTS - 5, y=FEW),
        case("equal", torch.eq, x=COUNTS, y=FEW),
        case("not_equal", torch.ne, x=COUNTS, y=FEW),
        case("greater", torch.gt, **two),
        case("greater_equal", torch.ge, x=COUNTS, y=FEW),
        case("less", torch.lt, **two),
        case("less_equal", torch.le, x=COUNTS, y=FEW),
        case("logical_and", torch.logical_and, **flags),
        case("logical_or", torch.logical_or, **flags),
        case("logical_xor", torch.logical_xor, **flags),
        case("logical_not", torch.logical_not, x=X > 0),
        *(
            case(name, getattr(torch, name), x=X)
            for name in (
                "abs",
                "ceil",
                "cos",
                "erf",
                "exp",
                "floor",
                "relu",
                "round",
                "sigmoid",
                "sign",
                "sin",
                "square",
                "tanh",
            )
        ),
        case("sqrt", torch.sqrt, **positive),
        case("rsqrt", torch.rsqrt, **positive),
        case("rsqrt", lambda x: (x + 0.5).rsqrt(), **positive, epsilon=np.float32(0.5)),
        case("inverse", lambda x: 1 / (x + 1e-4), **positive),
        case("log", torch.log, **positive),
        case("log", lambda x: torch.log(x + 0.5), **positive, epsilon=np.float32(0.5)),
        case("clip", lambda x: x.clamp(-0.5, 1), x=X, alpha=np.float32(-0.5), beta=np.float32(1)),
        case("identity", lambda x: x, x=X),
        case("silu", F.silu, x=20 * X),
        case("sigmoid", torch.sigmoid, x=50 * X),
        case("gelu", F.gelu, x=X),
        case("gelu", lambda x: F.gelu(x, approximate="tanh"), x=X, mode="TANH_APPROXIMATION"),
        case("gelu", lambda x: x * torch.sigmoid(1.702 * x), x=X, mode="SIGMOID_APPROXIMATION"),
        case("select", torch.where, cond=X > 0, a=X, b=np.broadcast_to(Y, X.shape).copy()),
        case("cast", lambda x: x.int(), x=3 * X, dtype="int32"),
        case("cast", lambda x: x.bool(), x=np.round(X), dtype="bool"),
        case("cast", lambda x: x.float(), x=COUNTS, dtype="fp32"),
        case("cast", lambda x: x.to(torch.int16), x=COUNTS, dtype="int16"),
    ]


def reductions() -> list[Case]:
    last, first_two = {"axes": ints(-1), "keep_dims": True}, {"axes": ints(0, 1)}
    gamma, beta = floats(4), floats(4)
    return [
        case("reduce_sum", lambda x: x.sum((0, 1)), x=X, **first_two),
        case("reduce_sum", lambda x: x.sum(0), x=COUNTS, axes=ints(0)),
        case("reduce_mean", lambda x: x.mean(-1, keepdim=True), x=X, **last),
        case("reduce_max", lambda x: x.amax(-1, keepdim=True), x=X, **last),
        case("reduce_min", lambda x: x.amin((0, 1)), x=X, **first_two),
        case("reduce_max", torch.max, x=X),
        case("reduce_sum_square", lambda x: x.square().sum(-1, keepdim=True), x=X, **last),
        case("reduce_log_sum_exp", lambda x: x.logsumexp((0, 1)), x=80 * X, **first_two),
        case("reduce_argmax", lambda x: x.argmax(1), x=X, axis=1, keep_dims=False),
        case("reduce_argmin", lambda x: x.argmin(-1, keepdim=True), x=X, axis=-1, keep_dims=True),
        case("softmax", lambda x: x.softmax(-1), x=300 * X, axis=-1),
        case("softmax", lambda x: x.softmax(1), x=X, axis=1),
        case("layer_norm", lambda x: F.layer_norm(x, (4,)), x=X, axes=ints(-1)),
        case(
            "layer_norm",
            lambda x, gamma, beta: F.layer_norm(x, (4,), gamma, beta, 0.1),
            x=X,
            axes=ints(-1),
            gamma=gamma,
            beta=beta,
            epsilon=np.float32(0.1),
        ),
        case(
            "layer_norm",
            lambda x, gamma: F.layer_norm(x.mT, (3,), gamma).mT,
            x=X,
            axes=ints(1),
            gamma=floats(3),
        ),
        case("cumsum", lambda x: x.cumsum(1), x=X, axis=1),
        misfolded(
            "cumsum",
            lambda x: x.flip(0).cumsum(0).flip(0) - x,
            x=X,
            axis=0,
            exclusive=True,
            reverse=True,
        ),
        case("topk", lambda x: tuple(x.topk(3)), x=X, k=3, axis=-1),
        case("topk", lambda x: tuple(x.topk(2, 1, False)), x=X, k=2, axis=1, ascending=True),
        misfolded("topk", lambda x: tuple(x.sort(stable=True, descending=True)), x=TIES, k=-1),
        misfolded(
            "topk",
            lambda x: tuple(p[:, :7] for p in x.sort(stable=True, descending=True)),
            x=TIES,
            k=7,
        ),
    ]


def linear() -> list[Case]:
    weight, bias = floats(5, 4), floats(5)
    kernel = floats(5, 3, 1)
    return [
        case("linear", F.linear, x=X, weight=weight, bias=bias),
        case("linear", F.linear, x=X[0, 0], weight=weight),
        case("matmul", torch.matmul, x=X, y=floats(4, 5)),
        case("matmul", lambda x, y: x @ y.mT, x=X, y=floats(2, 5, 4), transpose_y=True),
        case("matmul", lambda x, y: x.mT @ y, x=X, y=floats(2, 3, 5), transpose_x=True),
        case(
            "einsum",
            lambda values: torch.einsum("nchw,nwhu->nchu", values),
            values=[floats(1, 2, 3, 4), floats(1, 4, 3, 5)],
            equation="nchw,nwhu->nchu",
        ),
        case("conv", F.conv1d, x=X, weight=kernel, bias=bias),
        case(
            "conv",
            F.conv2d,
            x=X[:, :, None],
            weight=kernel[..., None],
            groups=1,
            strides=ints(1, 1),
            pad=ints(0, 0, 0, 0),
            pad_type="valid",
            dilations=ints(1, 1),
        ),
        *(
            case(
                "scaled_dot_product_attention",
                lambda query, key, value, attn_mask=None: F.scaled_dot_product_attention(
                    query, key, value, attn_mask
                ),
                query=QUERY,
                key=KEY,
                value=VALUE,
                **mask,
            )
            for mask in ({}, {"attn_mask": MASK}, {"attn_mask": SEEN})
        ),
    ]


def movement() -> list[Case]:
    sliced = {"begin": ints(0, 1, -3), "end": ints(2, 3, -1)}
    masks = {
        "begin": ints(1, 1, 9),
        "end": ints(0, 9, 9),
        "stride": ints(1, 1, 2),
        "begin_mask": np.array([False, False, True]),
        "end_mask": np.array([False, True, True]),
        "squeeze_mask": np.array([True, False, False]),
    }
    return [
        case("reshape", lambda x: x.reshape(4, 6), x=X, shape=ints(4, -1)),
        case("reshape", lambda x: x.reshape(1, 2, 3, 4), x=X, shape=ints(1, 2, 0, -1)),
        case("transpose", lambda x: x.permute(2, 0, 1), x=X, perm=ints(2, 0, 1)),
        case("expand_dims", lambda x: x[:, None, ..., None], x=X, axes=ints(1, -1)),
        case("squeeze", lambda x: x.squeeze(1), x=X[:, None], axes=ints(1)),
        case("squeeze", torch.squeeze, x=X[:, None, :, :1]),
        case(
            "concat",
            lambda values: torch.cat(values, 1),
            values=[X, X + 1, Y[None].repeat(2, 0).repeat(4, 2)],
            axis=1,
        ),
        misfolded(
            "concat",
            lambda values: torch.stack(values, 2).reshape(2, 6, 4),
            values=[X, X + 1],
            axis=1,
            interleave=True,
        ),
        case("stack", lambda values: torch.stack(values, -1), values=[X, X + 1], axis=3),
        case("split", lambda x: x.split(2, 2), x=X, axis=2, num_splits=2),
        case("split", lambda x: x.split((1, 2), 1), x=X, axis=1, split_sizes=ints(1, 2)),
        case("tile", lambda x: x.repeat(2, 1, 3), x=X, reps=ints(2, 1, 3)),
        case("reverse", lambda x: x.flip(1), x=X, axes=ints(1)),
        case(
            "pad",
            lambda x: F.pad(x, (1, 2, 0, 3), value=7),
            x=X,
            pad=ints(0, 3, 1, 2),
            mode="constant",
            constant_val=np.float32(7),
        ),
        case(
            "pad", lambda x: F.pad(x, (1, 2), mode="reflect"), x=X, pad=ints(1, 2), mode="reflect"
        ),
        case(
            "pad",
            lambda x: F.pad(x, (1, 2), mode="replicate"),
            x=X,
            pad=ints(1, 2),
            mode="replicate",
        ),
        case("band_part", torch.tril, x=X, lower=-1, upper=0),
        case("band_part", lambda x: x.triu(-1).tril(2), x=X, lower=1, upper=2),
        case("fill", lambda: torch.full((2, 3), 0.5), shape=ints(2, 3), value=np.float32(0.5)),
        case("fill_like", lambda: torch.full((2, 3, 4), 0.5), ref_tensor=X, value=np.float32(0.5)),
        case("shape", lambda x: torch.tensor(x.shape, dtype=torch.int32), x=X),
        case(
            "range_1d",
            lambda: torch.arange(2, 9, 3, dtype=torch.int32),
            start=np.int32(2),
            end=np.int32(9),
            step=np.int32(3),
        ),
        case(
            "slice_by_size",
            lambda x: x[1:, 1:2, -3:-1],
            x=X,
            begin=ints(1, 1, -3),
            size=ints(-1, 1, 2),
        ),
        case("slice_by_index", lambda x: x[0:2, 1:3, -3:-1], x=X, **sliced),
        case("slice_by_index", lambda x: x[1, 1:, ::2], x=X, **masks),
        case(
            "slice_update",
            lambda x, update: put(x, np.s_[0:2, 1:3, 1:3], update),
            x=X,
            update=floats(2, 2, 2),
            **sliced,
        ),
        case(
            "slice_update",
            lambda x, update: put(x, np.s_[1, 1:, ::2], update),
            x=X,
            update=floats(2, 2),
            **masks,
        ),
    ]


def put(x, cuts, update):
    """x with `update` in x[cuts]."""
    changed = x.clone()
    changed[cuts] = update
    return changed


def coordinates(indices):
    return tuple(indices.long().movedim(-1, 0))


def indexing() -> list[Case]:
    pairs = np.array([[[0, 1], [1, 2]], [[1, 0], [0, 0]]], np.int32)
    flat = RNG.permutation(np.arange(24))[:6].reshape(2, 3)
    along = RNG.integers(0, 3, (2, 2, 4), np.int32)
    update = {"mode": "update"}
    return [
        case("gather", lambda x, indices: x[:, indices], x=X, indices=ints([2, 0], [1, 1]), axis=1),
        case("gather", lambda x, indices: x[..., indices], x=X, indices=ints(3), axis=-1),
        case(
            "gather",
            lambda x, indices: torch.stack([x[0, indices[0].long()], x[1, indices[1].long()]]),
            x=X,
            indices=ints([2, 0], [1, 1]),
            axis=1,
            batch_dims=1,
        ),
        case(
            "gather_along_axis",
            lambda x, indices: x.gather(1, indices.long()),
            x=X,
            indices=along,
            axis=1,
        ),
        case(
            "gather_nd", lambda x, indices: x[indices[..., 0], indices[..., 1]], x=X, indices=pairs
        ),
        case(
            "gather_nd",
            lambda x, indices: torch.stack(
                [x[b][indices[b, :, 0], indices[b, :, 1]] for b in range(2)]
            ),
            x=X,
            indices=pairs,
            batch_dims=1,
        ),
        case(
            "scatter",
            lambda data, indices, updates: data.index_copy(2, indices.long(), updates),
            data=CACHE,
            indices=SLOTS,
            updates=ROWS,
            axis=2,
            **update,
        ),
        case(
            "scatter",
            lambda data, indices, updates: data.index_add(2, indices.long(), updates),
            data=CACHE,
            indices=ints(3, 3),
            updates=ROWS,
            axis=2,
        ),
        case(
            "scatter_along_axis",
            lambda data, indices, updates: data.scatter(2, indices.long(), updates),
            data=CACHE,
            indices=WHERE,
            updates=ROWS,
            axis=2,
            **update,
        ),
        misfolded(
            "scatter_along_axis",
            lambda data, indices, updates: data.scatter_add(2, indices.long(), updates),
            data=CACHE,
            indices=0 * WHERE,
            updates=ROWS,
            axis=2,
            mode="add",
        ),
        misfolded(
            "scatter_along_axis",
            lambda data, indices, updates: data.scatter_reduce(2, indices.long(), updates, "amax"),
            data=CACHE,
            indices=WHERE,
            updates=ROWS,
            axis=2,
            mode="max",
        ),
        case(
            "scatter_nd",
            lambda data, indices, updates: data.index_put(coordinates(indices), updates),
            data=X,
            indices=np.stack(np.unravel_index(flat, X.shape), -1).astype(np.int32),
            updates=floats(2, 3),
            **update,
        ),
        case(
            "scatter_nd",
            lambda data, indices, updates: data.index_put(
                coordinates(indices), updates, accumulate=True
            ),
            data=X,
            indices=pairs[:, :, :1] * 0,
            updates=floats(2, 2, 3, 4),
            mode="add",
        ),
        case(
            "one_hot",
            lambda indices: F.one_hot(indices.long(), 5).int(),
            indices=ints(3, 0, 4),
            one_hot_vector_size=5,
        ),
        case(
            "one_hot",
            lambda indices: F.one_hot(indices.long(), 5).T.float() * 2 - 1,
            indices=ints(3, 0, 4),
            one_hot_vector_size=5,
            axis=0,
            on_value=np.float32(1),
            off_value=np.float32(-1),
        ),
    ]


CASES = [*elementwise(), *reductions(), *linear(), *movement(), *indexing()]
