"""How exactly the interpreter computes: which numbers carry a value, and when they are rounded.

    declared    every operation computes in float32, and its result is rounded once to the type
                that the program declares; float16 values are carried as float32 numbers that
                are float16 numbers
    float32     the same, without rounding to float16: what the program would say if its float16
                lost nothing. Weights stay as they were stored
    float64     computes and carries in float64

On a device the sums inside an operation may be taken in float16 or in another order; that is the
device's own, and no interpreter shows it.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from ssmlx.errors import InputError

from .values import Dtype, TensorType, Value

Name = Literal["declared", "float32", "float64"]


class Arithmetic:
    """One of the three ways.

    Args:
        name: of the way.

    Raises:
        InputError: there is no such way.
    """

    def __init__(self, name: Name) -> None:
        if name not in get_args(Name):
            raise InputError(
                f"arithmetic {name!r}",
                expected=f"one of {', '.join(get_args(Name))}",
                do="name one",
            )
        self.name = name
        self._float = np.dtype("float64" if name == "float64" else "float32")

    def stored(self, dtype: Dtype) -> np.dtype:
        """The numpy type of states and outputs that are declared as `dtype`."""
        return self._float if dtype.is_float and self.name != "declared" else dtype.numpy

    def carry(self, array: np.ndarray) -> np.ndarray:
        """An input, state or constant as operations compute with it."""
        return array.astype(self._float, copy=False) if array.dtype.kind == "f" else array

    def settle(self, value: Value, kind: TensorType, *, rounds: bool = True) -> Value:
        """What an operation gave, as the value of the declared `kind` that the next one takes.

        Args:
            value: the result.
            kind: its declared type.
            rounds: False where the operation only moves numbers that were rounded before.

        Raises:
            ValueError: it has another shape, or another type of numbers, than declared.
        """
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        if array.shape != kind.shape:
            raise ValueError(f"gives shape {list(array.shape)}, declared {kind}")
        if not kind.dtype.is_float:
            if array.dtype != kind.dtype.numpy:
                raise ValueError(f"gives {array.dtype}, declared {kind}")
            return array
        if array.dtype.kind != "f":
            raise ValueError(f"gives {array.dtype}, declared {kind}")
        if rounds and self.name == "declared" and kind.dtype.name == "fp16":
            array = array.astype(np.float16)
        return self.carry(array)
