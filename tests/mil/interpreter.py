"""Runs a saved Core ML package in numpy, state included: a check of exports without a Mac.

coremltools reads the package (the protobuf message and the weights) and fills in its operations'
defaults; what they compute is `operations.py`'s. Each computes in float32, and its result is
rounded once to the type that the program declares. On a device the sums inside an operation may
be taken in float16 or in another order; no interpreter shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil.types import builtin_to_string

from convert.export.compression import load_program
from ssmlx.exported.backends import DECODE, FUNCTIONS, Arrays, Backend, CarriedCache
from ssmlx.exported.manifest import Manifest

from .operations import MOVES, NUMPY, run

State = dict[str, np.ndarray]


class Function:
    """A function of a package.

    Args:
        function: of the program that coremltools read.

    Attributes:
        operations: the operations, in their order.
    """

    def __init__(self, function: Any) -> None:
        self.operations = list(function.operations)
        self._inputs, self._outputs = function.inputs, function.outputs
        self._constants: dict[str, Any] = {}

    def make_state(self) -> State:
        """Zeros for every state, as Core ML makes them."""
        return {
            name: np.zeros(var.shape, np.float16)
            for name, var in self._inputs.items()
            if _is_state(var)
        }

    def predict(self, inputs: Mapping[str, np.ndarray], state: State | None = None) -> State:
        """The outputs by name, in their declared types; what it writes is in `state`.

        Raises:
            ValueError: something is not as the program declares it, or cannot be computed.
        """
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
    array, kind = np.asarray(value), _numpy(var)
    if array.shape != tuple(var.shape) or array.dtype.kind != kind.kind:
        raise ValueError(f"{array.dtype} {array.shape}, declared {kind} {var.shape}")
    if kind.kind != "f":
        return array.astype(kind)
    return (array.astype(kind) if rounds else array).astype(np.float32, copy=False)


def load_functions(package: Path) -> dict[str, Function]:
    """The functions of a package, by name."""
    return {name: Function(code) for name, code in load_program(package).functions.items()}


class InterpretedState:
    """A backend that keeps the caches as the package's state."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions

    def make_state(self) -> State:
        """See `Backend`."""
        return self._functions[DECODE].make_state()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """See `Backend`."""
        return self._functions[function].predict(inputs, state)


def interpreted_backend(package: Path, manifest: Manifest) -> Backend:
    """Run a package here; its manifest is beside it."""
    functions = load_functions(package)
    assert set(functions) == set(FUNCTIONS)
    if manifest.cache == "state":
        return InterpretedState(functions)
    return CarriedCache(lambda name, inputs: functions[name].predict(inputs), manifest)
