"""A saved Core ML program that runs in numpy: nothing of Apple's is needed, or used.

`Program.load` reads a package, `Program.function` makes one of its functions ready, and
`Function.predict` runs it:

    program = Program.load("model.mlpackage")
    decode = program.function("decode")
    state = decode.make_state()
    outputs = decode.predict({"tokens": tokens, ...}, state)

Shapes and types of every value are those that the program declares; a value that is not so is an
error. So is an operation that the interpreter lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ssmlx.errors import InputError

from .arithmetic import Arithmetic, Name
from .blobs import BlobFile
from .compiler import Code, compile_function
from .constants import Constants
from .execution import Observer, Run, State
from .package import find_model, read_model
from .values import TensorType, Value


class Program:
    """The functions of a package.

    Args:
        model: a Model message, as `package.read_model` gives it.
        folder: what the weights' paths start from.
        arithmetic: how exactly to compute; `arithmetic.py` says how.

    Attributes:
        metadata: the texts that its maker put into the package.
        function_names: in their order.
    """

    def __init__(
        self, model: dict[str, Any], folder: Path, *, arithmetic: Name = "declared"
    ) -> None:
        self._functions: dict[str, dict[str, Any]] = model["mlProgram"]["functions"]
        description = model.get("description", {})
        self.metadata: dict[str, str] = description.get("metadata", {}).get("userDefined", {})
        self.function_names = tuple(self._functions)
        self._arithmetic = Arithmetic(arithmetic)
        self._constants = Constants(cache(lambda name: BlobFile(folder / name)), self._arithmetic)
        self._ready: dict[str, Function] = {}

    @classmethod
    def load(cls, path: str | Path, *, arithmetic: Name = "declared") -> Program:
        """Read an .mlpackage.

        Args:
            path: of the folder.
            arithmetic: "declared" rounds as the program's types say, "float32" does not round
                to float16, "float64" computes in float64.

        Raises:
            InputError: it is missing, truncated, or holds no ML program.
        """
        model = find_model(Path(path))
        return cls(read_model(model), model.parent, arithmetic=arithmetic)

    def function(self, name: str = "main") -> Function:
        """A function, ready to run; functions share the weights that they have in common.

        Raises:
            InputError: there is none of this name, it has an operation that the interpreter
                lacks, or the weights are missing or truncated.
        """
        if name not in self._functions:
            raise InputError(
                f"no function {name}",
                expected=f"one of {', '.join(self._functions)}",
                do="name one of these",
            )
        if name not in self._ready:
            code = compile_function(self._functions[name], self._constants)
            self._ready[name] = Function(name, code, self._constants, self._arithmetic)
        return self._ready[name]


class Function:
    """A function of a program.

    Attributes:
        name: its own.
        inputs: the declared types of what `predict` takes, by name.
        outputs: of what it gives.
        states: of what lives between calls.
    """

    def __init__(self, name: str, code: Code, constants: Constants, arithmetic: Arithmetic) -> None:
        self.name, self._code = name, code
        self._constants, self._arithmetic = constants, arithmetic
        self.inputs = {n: kind for n, kind in code.inputs.items() if not kind.is_state}
        self.states = {n: kind for n, kind in code.inputs.items() if kind.is_state}
        self.outputs = {n: kind for n, (kind, _) in code.outputs.items()}

    def make_state(self) -> State:
        """Zeros for every state, as Core ML makes them."""
        return {
            name: np.zeros(kind.shape, self._arithmetic.stored(kind.dtype))
            for name, kind in self.states.items()
        }

    def predict(
        self,
        inputs: Mapping[str, np.ndarray],
        state: State | None = None,
        *,
        observe: Observer | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the function once.

        Args:
            inputs: arrays of the declared shapes. Floats may be of any width, and are rounded to
                the declared one; integers of any width that holds them.
            state: of `make_state`; when the run ends well, what it wrote takes the place of the
                entries. No array is changed: a shallow copy of the dict is a snapshot.
            observe: called with every value that an operation makes.

        Returns:
            The outputs by name, in the declared types (floats as wide as they were computed,
            where the arithmetic is not "declared").

        Raises:
            InputError: inputs or states are missing, spare or misshapen.
            ExecutionError: an operation could not be run as declared.
        """
        state = {} if state is None else state
        _check_names("input", inputs, self.inputs)
        _check_names("state", state, self.states)
        values: dict[str, Value] = {
            name: self._taken(name, inputs[name], kind) for name, kind in self.inputs.items()
        }
        for name, kind in self.states.items():
            if state[name].dtype != self._arithmetic.stored(kind.dtype):
                raise _misfit(name, state[name], kind)
            _check_shape(name, state[name], kind)
        changed = dict(state)
        run = Run(self._constants, self._arithmetic, values, changed)
        with np.errstate(all="ignore"):
            for step in self._code.steps:
                run.take(step, observe)
        state.update(changed)
        return {name: self._given(run, name) for name in self.outputs}

    def _taken(self, name: str, given: np.ndarray, kind: TensorType) -> Value:
        """An input as operations take it."""
        array = np.asarray(given)
        _check_shape(name, array, kind)
        target = kind.dtype.numpy
        both_integers = array.dtype.kind in "iu" and target.kind in "iu"
        if array.dtype.kind != target.kind and not both_integers:
            raise _misfit(name, array, kind)
        if not kind.dtype.is_float:
            narrow = array.astype(target)
            if not np.array_equal(narrow, array):
                raise _misfit(name, array, kind)
            array = narrow
        return self._arithmetic.settle(array, kind)

    def _given(self, run: Run, name: str) -> np.ndarray:
        """An output for the caller, who may do with it what he likes."""
        kind, source = self._code.outputs[name]
        return np.array(run.value(source), self._arithmetic.stored(kind.dtype))


def _check_names(
    what: str, given: Mapping[str, np.ndarray], declared: Mapping[str, TensorType]
) -> None:
    if set(given) == set(declared):
        return
    missing, spare = sorted(set(declared) - set(given)), sorted(set(given) - set(declared))
    parts = [f"{kind} {', '.join(n)}" for kind, n in (("missing", missing), ("spare", spare)) if n]
    raise InputError(
        f"{what}s {'; '.join(parts)}",
        expected=", ".join(declared) or f"no {what}s",
        do=f"give just these {what}s",
    )


def _check_shape(name: str, array: np.ndarray, kind: TensorType) -> None:
    if array.shape != kind.shape:
        raise _misfit(name, array, kind)


def _misfit(name: str, array: np.ndarray, kind: TensorType) -> InputError:
    return InputError(
        f"{name} is {array.dtype}{list(array.shape)}",
        expected=f"numbers that fit {kind}",
        do="give what the function declares",
    )
