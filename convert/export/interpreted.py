"""A Core ML package run by `convert.mil`, without a Mac: a check, not a runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssmlx.exported.backends import DECODE, FUNCTIONS, Arrays, Backend, CarriedCache
from ssmlx.exported.manifest import Manifest

from ..mil import Program


class InterpretedState:
    """A backend that keeps the caches as the package's state."""

    def __init__(self, program: Program) -> None:
        self._functions = {name: program.function(name) for name in FUNCTIONS}

    def make_state(self) -> Any:
        """See `Backend`."""
        return self._functions[DECODE].make_state()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """See `Backend`."""
        return self._functions[function].predict(dict(inputs), state)


def interpreted_backend(package: Path, manifest: Manifest, arithmetic: Any = "declared") -> Backend:
    """Run a package in numpy.

    Args:
        package: an .mlpackage.
        manifest: beside it.
        arithmetic: as `convert.mil.Program.load` takes it.
    """
    program = Program.load(package, arithmetic=arithmetic)
    if manifest.cache == "state":
        return InterpretedState(program)
    functions = {name: program.function(name) for name in FUNCTIONS}
    return CarriedCache(lambda name, inputs: functions[name].predict(dict(inputs)), manifest)
