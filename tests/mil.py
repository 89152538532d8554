"""Runs a saved Core ML package in numpy, state included: a check of exports without a Mac.

coremltools reads the package (the protobuf message and the weights) and fills in its operations'
defaults; what they compute is written out here, by MIL's names and parameters, for those that our
exports use. Each computes in float32, and its result is rounded once to the type that the program
declares. What an operation cannot do as MIL defines it is a ValueError. On a device the sums inside
an operation may be taken in float16 or in another order; no interpreter shows that.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil.types import builtin_to_string

from convert.export.compression import load_program
from ssmlx.exported.backends import FUNCTIONS, Backend, CarriedCacheBackend, CoreMLStateBackend
from ssmlx.exported.manifest import Manifest

State = dict[str, np.ndarray]
Array = np.ndarray
NUMPY = {"fp16": "float16", "fp32": "float32"}
"""numpy's names of MIL's types, where they differ."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "clip": lambda x, alpha, beta: np.clip(x, alpha, beta),
    "concat": lambda values, axis, interleave: np.concatenate(values, int(axis)),
    "equal": lambda x, y: x == y,
    "exp": lambda x: np.exp(x),
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "inverse": lambda x, epsilon: 1 / (x + epsilon),
    "less": lambda x, y: x < y,
    "log": lambda x, epsilon: np.log(x + epsilon),
    "logical_not": lambda x: ~x,
    "logical_or": lambda x, y: x | y,
    "minimum": lambda x, y: np.minimum(x, y),
    "mul": lambda x, y: x * y,
    "pow": lambda x, y: x**y,
    "real_div": lambda x, y: x / y,
    "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "rsqrt": lambda x, epsilon: 1 / np.sqrt(x + epsilon),
    "select": lambda cond, a, b: np.where(cond, a, b),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sub": lambda x, y: x - y,
    "tile": lambda x, reps: np.tile(x, tuple(reps)),
    "transpose": lambda x, perm: x.transpose(tuple(perm)),
}
MOVES = {
    "concat", "expand_dims", "gather", "reduce_argmax", "reduce_max", "reshape",
    "scatter_along_axis", "select", "slice_by_index", "tile", "topk", "transpose",
}  # fmt: skip
"""Operations that only move numbers, which were rounded when they were made."""


def operation(call: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function under its own name."""
    OPERATIONS[call.__name__] = call
    return call


def run(name: str, inputs: dict[str, Any]) -> tuple[Any, ...]:
    call = OPERATIONS.get(name)
    if call is None or not set(inputs) <= set(inspect.signature(call).parameters):
        raise NotImplementedError(f"{name} of {', '.join(inputs)}")
    results = call(**inputs)
    return results if isinstance(results, tuple) else (results,)


@operation
def cast(x: Array, dtype: str) -> Array:
    """x as numbers of another type; towards zero from floats to integers."""
    found = x.astype(NUMPY.get(dtype, dtype))
    if found.dtype.kind in "iu" and x.size and not np.array_equal(found, np.trunc(x)):
        raise ValueError(f"casts {x.min()} to {x.max()} to {dtype}")
    return found


@operation
def linear(x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
    return x @ weight.T + bias


@operation
def conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    strides: Sequence[int] = (1, 1),
    pad_type: str = "valid",
    pad: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Array:
    """[1, in, h, w] to [1, out, h, w], by kernels of one element."""
    if weight.shape[2:] != (1, 1) or groups != 1 or max(strides) > 1 or any(pad):
        raise ValueError("takes kernels of one element, one by one")
    found = np.einsum("oi,nihw->nohw", weight[:, :, 0, 0], x, optimize=True)
    return found if bias is None else found + bias[:, None, None]


@operation
def matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    x, y = (np.swapaxes(a, -1, -2) if t else a for a, t in ((x, transpose_x), (y, transpose_y)))
    return x @ y


@operation
def scaled_dot_product_attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None
) -> Array:
    scores = query @ np.swapaxes(key, -1, -2) / np.float32(math.sqrt(query.shape[-1]))
    return softmax(scores if attn_mask is None else scores + attn_mask, -1) @ value


def _reduction(function: Callable[..., Array]) -> Callable[..., Array]:
    def call(x: Array, axes: Array | None = None, keep_dims: bool = False) -> Array:
        over = None if axes is None else tuple(int(axis) for axis in axes)
        return np.asarray(function(x, axis=over, keepdims=bool(keep_dims))).astype(x.dtype)

    return call


for _name in ("max", "mean", "sum"):
    OPERATIONS[f"reduce_{_name}"] = _reduction(getattr(np, _name))


@operation
def reduce_argmax(
    x: Array, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> Array:
    return np.argmax(x, int(axis), keepdims=bool(keep_dims)).astype(output_dtype)


@operation
def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(int(axis), keepdims=True))
    return powers / powers.sum(int(axis), keepdims=True)


@operation
def topk(
    x: Array,
    k: int,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Array, Array]:
    """The k largest numbers, largest first, and where they stand; equal ones in their order."""
    if ascending or not return_indices or not 0 < k <= x.shape[int(axis)]:
        raise ValueError(f"takes the {k} largest of {x.shape[int(axis)]}, with their places")
    order = np.argsort(-x, axis=int(axis), kind="stable").take(range(int(k)), int(axis))
    return np.take_along_axis(x, order, int(axis)), order.astype(output_indices_dtype)


def _checked(indices: Array, size: int) -> Array:
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise ValueError(f"indices {indices.min()} to {indices.max()} into {size} elements")
    return indices.astype(np.int64)


@operation
def gather(
    x: Array, indices: Array, axis: int, batch_dims: int = 0, validate_indices: bool = False
) -> Array:
    if batch_dims:
        raise ValueError("takes no batches")
    return np.take(x, _checked(np.asarray(indices), x.shape[int(axis)]), int(axis))


@operation
def scatter_along_axis(
    data: Array,
    indices: Array,
    updates: Array,
    axis: int,
    mode: str = "update",
    validate_indices: bool = False,
) -> Array:
    if mode != "update":
        raise ValueError(f"mode {mode}")
    changed = data.copy()
    np.put_along_axis(changed, _checked(indices, data.shape[int(axis)]), updates, int(axis))
    return changed


@operation
def slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    """x[begin:end:stride] on every axis.

    A set begin_mask or end_mask means from the first element, or to the last; a set squeeze_mask
    the element at `begin` alone, without its axis.
    """
    unset = [False] * x.ndim
    open_, closed, alone = (unset if m is None else m for m in (begin_mask, end_mask, squeeze_mask))
    steps = [1] * x.ndim if stride is None else stride
    cuts: list[slice | int] = []
    for axis in range(x.ndim):
        first = None if open_[axis] else int(begin[axis])
        last = None if closed[axis] else int(end[axis])
        cuts.append(first or 0 if alone[axis] else slice(first, last, int(steps[axis])))
    return x[tuple(cuts)]


@operation
def constexpr_blockwise_shift_scale(data: Array, scale: Array, offset: Any = None) -> Array:
    """scale * data, each scale for a block of the elements."""
    if offset is not None:
        raise ValueError("takes symmetric weights")
    for axis, (size, parts) in enumerate(zip(data.shape, scale.shape, strict=True)):
        if size % parts:
            raise ValueError(f"{size} elements in {parts} blocks")
        scale = np.repeat(scale, size // parts, axis)
    return data.astype(np.float32) * scale


class Function:
    """A function of the program that coremltools read."""

    def __init__(self, function: Any) -> None:
        self.operations = list(function.operations)
        self._inputs = function.inputs
        self._outputs = function.outputs
        self._constants: dict[str, Any] = {}

    def make_state(self) -> State:
        """Zeros for every state, as Core ML makes them."""
        return {
            name: np.zeros(var.shape, np.float16)
            for name, var in self._inputs.items()
            if _is_state(var)
        }

    def predict(self, inputs: Mapping[str, np.ndarray], state: State | None = None) -> State:
        """The outputs by name, in their declared types; what it writes is in `state`."""
        taken = {n: v for n, v in self._inputs.items() if not _is_state(v)}
        if set(taken) != set(inputs):
            raise ValueError(f"inputs {sorted(inputs)}, declared {sorted(taken)}")
        values = {name: _settled(inputs[name], var) for name, var in taken.items()}
        with np.errstate(all="ignore"):
            for op in self.operations:
                self._step(op, values, state or {})
        return {v.name: values[v.name].astype(_numpy(v), copy=False) for v in self._outputs}

    def _step(self, op: Any, values: dict[str, Any], state: State) -> None:
        if op.op_type == "const" or op.op_type.startswith("constexpr"):
            return
        try:
            if op.op_type == "read_state":
                results: tuple[Any, ...] = (state[op.input.name].astype(np.float32),)
            elif op.op_type == "coreml_update_state":
                state[op.state.name] = self._value(op.value, values).astype(np.float16)
                results = (state[op.state.name].astype(np.float32),)
            else:
                results = run(op.op_type, self._bound(op, values))
            for var, result in zip(op.outputs, results, strict=True):
                values[var.name] = _settled(result, var, rounds=op.op_type not in MOVES)
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{op.op_type} of {op.outputs[0].name}: {error}") from error

    def _bound(self, op: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [self._value(one, values) for one in var]
            if isinstance(var, (tuple, list))
            else self._value(var, values)
            for name, var in op.inputs.items()
            if var is not None
        }

    def _value(self, var: Any, values: dict[str, Any]) -> Any:
        """What a step made, or a constant; those of the weights are made once."""
        if var.name in values:
            return values[var.name]
        if var.name not in self._constants:
            self._constants[var.name] = self.constant(var)
        return self._constants[var.name]

    def constant(self, var: Any) -> Any:
        """A constant of the program, decompressed where it is compressed."""
        if var.op.op_type == "const":
            value = var.val
            is_float = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "f"
            return value.astype(np.float32) if is_float else value
        parts = {name: part for name, part in var.op.inputs.items() if part is not None}
        found = run(var.op.op_type, {name: self.constant(part) for name, part in parts.items()})
        return _settled(found[0], var)


def _is_state(var: Any) -> bool:
    return "state" in str(var.sym_type)


def _numpy(var: Any) -> np.dtype:
    name = builtin_to_string(var.dtype)
    return np.dtype(NUMPY.get(name, name))


def _settled(value: Any, var: Any, *, rounds: bool = True) -> np.ndarray:
    """A result as the next operation takes it: as declared, and floats carried as float32."""
    array = np.asarray(value)
    kind = _numpy(var)
    if array.shape != tuple(var.shape) or array.dtype.kind != kind.kind:
        raise ValueError(f"{array.dtype} {array.shape}, declared {kind} {var.shape}")
    if kind.kind != "f":
        return array.astype(kind)
    return (array.astype(kind) if rounds else array).astype(np.float32, copy=False)


def load_functions(package: Path) -> dict[str, Function]:
    """The functions of a package, by name."""
    return {name: Function(code) for name, code in load_program(package).functions.items()}


def interpreted_backend(package: Path, manifest: Manifest) -> Backend:
    """Run a package here; its manifest is beside it."""
    functions = load_functions(package)
    assert set(functions) == set(FUNCTIONS)
    if manifest.cache == "state":
        return CoreMLStateBackend(functions)
    return CarriedCacheBackend(lambda name, inputs: functions[name].predict(inputs), manifest)
