"""The operations that the interpreter knows, by MIL's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ssmlx.errors import InputError

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A pure function of arrays and settings, whose parameters have MIL's names.

    Attributes:
        name: MIL's.
        call: the function.
        rounds: it computes new numbers; False where it only moves those that it got.
        lists: parameters that take a list, however many values the program binds to them.
    """

    name: str
    call: Function
    rounds: bool
    lists: frozenset[str]

    def check(self, bound: Iterable[str], made: str) -> None:
        """That the function takes the `bound` parameters, for the value `made`.

        Raises:
            InputError: one is unknown here, or one that is needed is not bound.
        """
        known = inspect.signature(self.call).parameters
        needed = {name for name, p in known.items() if p.default is inspect.Parameter.empty}
        strange, missing = set(bound) - set(known), needed - set(bound)
        if strange or missing:
            raise InputError(
                f"the operation {self.name} of {made} has inputs {', '.join(sorted(bound))}",
                expected=f"some of {', '.join(known)} and all of {', '.join(sorted(needed))}",
                do="export without it, or add it to convert/mil/ops",
            )


OPERATIONS: dict[str, Operation] = {}


def operation(
    *names: str, rounds: bool = True, lists: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Register a function under MIL's names; its own name where none is given."""

    def register(call: Function) -> Function:
        for name in names or (call.__name__,):
            OPERATIONS[name] = Operation(
                name=name, call=call, rounds=rounds, lists=frozenset(lists)
            )
        return call

    return register


def find_operation(name: str, made: str) -> Operation:
    """The operation `name`, of which the program makes the value `made`.

    Raises:
        InputError: the interpreter has none such.
    """
    found = OPERATIONS.get(name)
    if found is None:
        raise InputError(
            f"the program makes {made} by the operation {name}, which the interpreter lacks",
            expected=f"one of its {len(OPERATIONS)} operations",
            do="export without it, or add it to convert/mil/ops",
        )
    return found
