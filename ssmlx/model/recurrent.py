"""Recurrent layers: the state after any row of a call, without running the call again.

A recurrent layer (a gated delta net, Mamba 2, linear attention, a short convolution) keeps a state
of the text instead of keys and values. A token cannot be dropped from a state as a row is dropped
from a cache. So a call on drafted tokens keeps the inputs of its recurrences, noted as
mlx-lm's modules call them. Once it is known how many tokens were accepted, only the recurrence runs
again, over their rows, from the state before the call; and the window that a convolution keeps is
cut from its input. Both are small beside the call: no weight matrix is read again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .modules import Notes, note_inputs


@dataclass(frozen=True)
class _Signature:
    """The arguments of one of mlx-lm's recurrences, which returns its outputs and a state."""

    by_row: tuple[str, ...]  # arguments that have a row for each token
    axis: int  # of these arguments: that of the rows
    state: str  # the argument that is the state before the call; None before the first token


# mlx-lm's functions that run a recurrence, by the name under which its modules call them.
RECURRENCES: Mapping[str, _Signature] = {
    # gated delta nets: Qwen3-Next, Qwen3.5, Kimi Linear, OLMo Hybrid, Bailing v3
    "gated_delta_update": _Signature(("q", "k", "v", "a", "b"), 1, "state"),
    # Mamba 2: Falcon-H1, Granite 4, Nemotron-H, PLaMo 2
    "ssm_update": _Signature(("hidden_states", "B", "C", "dt"), 1, "state"),
    # linear attention: the other hybrids of Bailing
    "recurrent_gla": _Signature(("q", "k", "v"), 2, "h"),
}
_HOOKED = "_notes_recurrences"


@dataclass(frozen=True, eq=False)
class Recurrence:
    """One run of a recurrence, which can run again over its first rows."""

    state: mx.array  # that it left
    _function: Callable[..., tuple[mx.array, mx.array]]
    _arguments: Mapping[str, Any]
    _signature: _Signature

    def state_after_first(self, count: int) -> mx.array | None:
        """The state after the first `count` rows; None before a text's first token."""
        if count == 0:
            return self._arguments.get(self._signature.state)  # type: ignore[no-any-return]
        axis = self._signature.axis
        first = (slice(None),) * axis + (slice(count),)
        rows = {name: self._arguments[name][first] for name in self._signature.by_row}
        return self._function(**{**self._arguments, **rows})[1]


@dataclass(frozen=True, eq=False)
class Recording:
    """The inputs of recurrences and convolutions in a call, in the order of the call."""

    recurrences: list[Recurrence]
    # [1, K - 1 + R, C] inputs of convolutions over K tokens: the window that the call before left,
    # then R rows
    convolutions: list[mx.array]


_recurrences = Notes()
_convolutions = Notes()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the runs of models that `hook_recurrences` has seen, on this thread."""
    with _recurrences.taken() as recurrences, _convolutions.taken() as convolutions:
        yield Recording(recurrences, convolutions)


def hook_recurrences(model: nn.Module) -> None:
    """Hook a model's recurrences, for good: `nn.Conv1d` modules get another class, and the
    functions of `RECURRENCES` are replaced, for the whole process, in the Python files of the
    classes of all modules of `model`."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            note_inputs(module, _convolutions.add)
        for kind in type(module).__mro__:
            home = sys.modules[kind.__module__]
            for name, signature in RECURRENCES.items():
                function = getattr(home, name, None)
                if function is not None and not hasattr(function, _HOOKED):
                    setattr(home, name, _noting_recurrence(function, signature))


def _noting_recurrence(
    function: Callable[..., tuple[mx.array, mx.array]], signature: _Signature
) -> Callable[..., tuple[mx.array, mx.array]]:
    parameters = inspect.signature(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> tuple[mx.array, mx.array]:
        outputs, state = function(*given, **named)
        if _recurrences.found is not None:
            bound = parameters.bind(*given, **named)
            _recurrences.add(Recurrence(state, function, bound.arguments, signature))
        return outputs, state

    setattr(call, _HOOKED, True)
    return call
