"""Backends that run an exported model: one small interface, for Core ML and Core AI."""

import asyncio
import contextlib
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import InputError, check_choice, first_line, missing_package_error, require
from .manifest import Manifest

PREFILL = "prefill"
DECODE = "decode"
FUNCTIONS = (PREFILL, DECODE)
NEW = "_new"
COMPUTE_UNITS = ("all", "cpu-and-gpu", "cpu-and-ne", "cpu-only")
DEFAULT_UNITS = {"gpu": "cpu-and-gpu", "ane": "cpu-and-ne"}
Arrays = Mapping[str, np.ndarray]


class Backend(Protocol):
    """Runs the two functions of an exported model, "prefill" and "decode"."""

    def make_state(self) -> Any:
        """An empty cache for one sequence."""
        ...

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """Run a function, which writes into the cache.

        Args:
            function: its name, "prefill" or "decode".
            inputs: arrays by name, without the cache; so are the outputs.
            state: the cache, as `make_state` returned it; changed in place.
        """
        ...


class CarriedCacheBackend:
    """Runs packages whose cache is inputs and outputs: `state` is a dict of arrays by name, which
    `call` gets among the inputs and returns among the outputs."""

    def __init__(self, call: Callable[[str, Arrays], Arrays], manifest: Manifest) -> None:
        self._call = call
        self._manifest = manifest

    def make_state(self) -> dict[str, np.ndarray]:
        return self._manifest.empty_cache()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """Run a function; for every NAME of `state`, the output NAME_new becomes `state[NAME]`."""
        found = dict(self._call(function, {**inputs, **state}))
        for name in state:
            state[name] = found.pop(name + NEW)
        return found


class CoreMLStateBackend:
    """Runs Core ML packages whose cache is Core ML's own state; `models` has an `MLModel` for each
    function."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models

    def make_state(self) -> Any:
        # The state that one function makes serves the other as well.
        return self._models[DECODE].make_state()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        outputs: Arrays = self._models[function].predict(dict(inputs), state=state)
        return outputs


def coreml_backend(
    package: Path,
    manifest: Manifest,
    # one of `COMPUTE_UNITS`; None for those that it was exported for
    compute_units: str | None = None,
) -> Backend:
    """Load a Core ML package, on macOS alone."""
    what = "Core ML only runs on macOS"
    do = "copy the exported folder to a Mac"
    require(sys.platform == "darwin", what, expected="macOS 15 or later", do=do)
    units = compute_units or DEFAULT_UNITS[manifest.profile]
    check_choice("--compute-units", units, COMPUTE_UNITS)
    try:
        import coremltools as ct

        unit = getattr(ct.ComputeUnit, units.upper().replace("-", "_"))
        models = {
            name: ct.models.MLModel(str(package), compute_units=unit, function_name=name)
            for name in FUNCTIONS
        }
    except ImportError as error:
        raise missing_package_error("coremltools", error, "coreml") from error
    except Exception as error:  # Core ML's own, of no common kind
        raise InputError(
            f"{package} cannot be loaded by Core ML ({first_line(error)})",
            expected="a package that this macOS can run (macOS 15 or later)",
            do="update macOS, or export again",
        ) from error
    if manifest.cache == "state":
        return CoreMLStateBackend(models)
    return CarriedCacheBackend(lambda name, inputs: models[name].predict(dict(inputs)), manifest)


class CoreAIBackend:
    """Runs Core AI packages, whose cache is arrays that the host owns: `state` is a dict of them by
    name. Calls have an event loop of their own."""

    def __init__(self, package: Path, manifest: Manifest) -> None:
        from coreai.authoring import AIModelAsset
        from coreai.runtime import NDArray

        self._array = NDArray
        self._manifest = manifest
        self._loop = asyncio.new_event_loop()
        context = AIModelAsset.load(package).executable()
        model = self._loop.run_until_complete(context.__aenter__())
        # The functions live as long as the model, and the model until its context ends.
        self._functions = {name: model.load_function(name) for name in FUNCTIONS}
        self._release_model = weakref.finalize(
            self, _release_model, self._loop, context, self._functions
        )

    def make_state(self) -> dict[str, Any]:
        empty = self._manifest.empty_cache()
        return {name: self._array(zeros) for name, zeros in empty.items()}

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        given = {name: self._array(np.ascontiguousarray(x)) for name, x in inputs.items()}
        call = self._functions[function](inputs=given, state=state)
        found = self._loop.run_until_complete(call)
        # A copy: the runtime may use the memory again.
        return {name: np.array(array.numpy()) for name, array in found.items()}

    def close(self) -> None:
        """Release the model, which cannot be used afterwards."""
        self._release_model()


def _release_model(loop: Any, context: Any, functions: dict[str, Any]) -> None:
    functions.clear()
    with contextlib.suppress(Exception):  # the runtime may be half gone at the interpreter's end
        loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


def coreai_backend(package: Path, manifest: Manifest) -> CoreAIBackend:
    try:
        return CoreAIBackend(package, manifest)
    except ImportError as error:
        what = "Core AI's runtime (for Python 3.11 or later)"
        raise missing_package_error(what, error, "coreai") from error
    except (RuntimeError, OSError, KeyError) as error:
        raise InputError(
            f"{package} cannot be loaded by Core AI ({first_line(error)})",
            expected="a package that this version of coreai-core can run",
            do="export it again",
        ) from error
