"""Operations on each element by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .registry import operation

_BINARY: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "pow": np.power,
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "floor": np.floor,
    "logical_not": np.logical_not,
    "round": np.round,
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
}
# MIL's names of what `cast` gives.
_CASTS = {"fp16": "float16", "fp32": "float32"}
_erf = np.frompyfunc(math.erf, 1, 1)


def _register_binary(name: str, function: np.ufunc) -> None:
    def call(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        _check_same_kind(x, y)
        return function(x, y)

    operation(name)(call)


def _register_unary(name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    def call(x: np.ndarray) -> np.ndarray:
        return function(x)

    operation(name)(call)


for _name, _binary in _BINARY.items():
    _register_binary(_name, _binary)
for _name, _unary in _UNARY.items():
    _register_unary(_name, _unary)


def _check_same_kind(x: np.ndarray, y: np.ndarray) -> None:
    if x.dtype != y.dtype:
        raise ValueError(f"takes two arrays of one type, not {x.dtype} and {y.dtype}")


@operation()
def real_div(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y of floats."""
    _check_same_kind(x, y)
    if x.dtype.kind != "f":
        raise ValueError("real_div of integers is not defined here: use floor_div")
    return x / y


@operation()
def identity(x: np.ndarray) -> np.ndarray:
    """x."""
    return x


@operation()
def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """x as fp16, fp32, bool or an integer type; floats are cut towards zero.

    Raises:
        ValueError: a number is outside what the integer type holds: what a device then gives is
            not defined.
    """
    target = np.dtype(_CASTS.get(dtype, dtype))
    if target.kind == "f":
        # Where float16 is rounded to is for `Arithmetic` to say.
        return x if x.dtype.kind == "f" else x.astype(np.float64)
    if target.kind in "iu" and x.size and x.dtype != target:
        limits = np.iinfo(target)
        if not (x.min() >= limits.min and x.max() <= limits.max):
            raise ValueError(f"casts {x.min()} to {x.max()} to {target}")
    return x.astype(target)


@operation()
def clip(x: np.ndarray, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """x, at least alpha and at most beta."""
    return np.minimum(np.maximum(x, alpha), beta)


@operation()
def select(cond: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a where cond, else b."""
    _check_same_kind(a, b)
    return np.where(cond, a, b)


@operation()
def log(x: np.ndarray, epsilon: np.ndarray | float = 1e-45) -> np.ndarray:
    """The natural logarithm of x + epsilon."""
    return np.log(x + _like(x, epsilon))


@operation()
def rsqrt(x: np.ndarray, epsilon: np.ndarray | float = 1e-12) -> np.ndarray:
    """1 / sqrt(x + epsilon)."""
    return 1 / np.sqrt(x + _like(x, epsilon))


@operation()
def inverse(x: np.ndarray, epsilon: np.ndarray | float = 1e-4) -> np.ndarray:
    """1 / (x + epsilon)."""
    return 1 / (x + _like(x, epsilon))


@operation()
def erf(x: np.ndarray) -> np.ndarray:
    """The error function."""
    return _erf(x).astype(x.dtype) if x.size else x


@operation()
def relu(x: np.ndarray) -> np.ndarray:
    """x where positive, else 0."""
    return np.maximum(x, 0)


@operation()
def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    # By tanh, as e^-x overflows.
    return 0.5 * (1 + np.tanh(0.5 * x))


@operation()
def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x * sigmoid(x)


@operation()
def gelu(x: np.ndarray, mode: str = "EXACT") -> np.ndarray:
    """x times the normal distribution's integral, exactly or as one of two approximations."""
    if mode == "EXACT":
        return 0.5 * x * (1 + erf(x * 0.5**0.5))
    if mode == "TANH_APPROXIMATION":
        return 0.5 * x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    if mode == "SIGMOID_APPROXIMATION":
        return x * sigmoid(1.702 * x)
    raise ValueError(f"has no mode {mode}")


def _like(x: np.ndarray, number: np.ndarray | float) -> np.ndarray:
    return np.asarray(number, x.dtype)
