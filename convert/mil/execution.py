"""One run of a function: its values, and the states that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import Arithmetic
from .compiler import READ_STATE, Source, Step
from .constants import Constant, Constants
from .values import Value

State = dict[str, np.ndarray]
# Called with the name of a value and the value, as soon as it is computed.
Observer = Callable[[str, np.ndarray], None]


class ExecutionError(RuntimeError):
    """An operation refused what it was given, or gave what was not declared."""


class Run:
    """The values of one call.

    Args:
        constants: of the package.
        arithmetic: how exactly to compute.
        values: the inputs, as operations take them; becomes this run's.
        state: the caller's states; a write replaces an entry and changes no array.
    """

    def __init__(
        self,
        constants: Constants,
        arithmetic: Arithmetic,
        values: dict[str, Value],
        state: State,
    ) -> None:
        self._constants, self._arithmetic = constants, arithmetic
        self._values, self._state = values, state

    def value(self, source: Source) -> Value:
        """A constant, or what a step made."""
        if isinstance(source, Constant):
            return self._constants.value(source)
        return self._values[source]

    def take(self, step: Step, observe: Observer | None = None) -> None:
        """Run a step and drop what no later one needs.

        Raises:
            ExecutionError: it cannot be run as declared.
        """
        try:
            results = self._results(step)
            rounds = step.operation is not None and step.operation.rounds
            for (name, kind), result in zip(step.outputs, results, strict=True):
                settled = self._arithmetic.settle(result, kind, rounds=rounds)
                self._values[name] = settled
                if observe is not None and not isinstance(settled, str):
                    observe(name, settled)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise ExecutionError(f"{step}: {error}") from error
        for name in step.frees:
            self._values.pop(name, None)

    def _results(self, step: Step) -> tuple[Any, ...]:
        bound = {
            parameter: [self.value(source) for source in item]
            if isinstance(item, list)
            else self.value(item)
            for parameter, item in step.inputs.items()
        }
        if step.operation is not None:
            results = step.operation.call(**bound)
            return results if isinstance(results, tuple) else (results,)
        assert step.state is not None
        if step.name == READ_STATE:
            return (self._arithmetic.carry(self._state[step.state]),)
        self._write(step.state, bound["data"])
        return ()

    def _write(self, name: str, data: Any) -> None:
        old = self._state[name]
        if not isinstance(data, np.ndarray) or data.shape != old.shape:
            raise ValueError(f"puts {np.shape(data)} into {name} of {old.shape}")
        # A copy, as `data` may be an input, which is the caller's.
        self._state[name] = data.astype(old.dtype)
