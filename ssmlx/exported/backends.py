"""What runs an exported model: one small interface, and Core ML or Core AI behind it."""

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
    def make_state(self) -> Any:
        """An empty cache, for one sequence."""
        ...

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """The outputs of `function`, by name; what it writes into the cache is in `state`."""
        ...


class CarriedCache:
    """A backend whose caches are inputs and outputs, which the host carries from call to call;
    `call` makes outputs of a function's name and inputs."""

    def __init__(self, call: Callable[[str, Arrays], Arrays], manifest: Manifest) -> None:
        self._call = call
        self._manifest = manifest

    def make_state(self) -> dict[str, np.ndarray]:
        return self._manifest.empty_cache()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        found = dict(self._call(function, {**inputs, **state}))
        for name in state:
            state[name] = found.pop(name + NEW)
        return found


class CoreMLState:
    """A backend whose caches Core ML keeps, of a loaded `MLModel` of each function."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models

    def make_state(self) -> Any:
        # The state that one function makes serves the other as well.
        return self._models[DECODE].make_state()

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self._models[function].predict(dict(inputs), state=state)


def coreml_backend(package: Path, manifest: Manifest, compute_units: str | None = None) -> Backend:
    """Run an .mlpackage with Core ML itself, which only macOS has."""
    what = "Core ML runs on macOS alone"
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
        return CoreMLState(models)
    return CarriedCache(lambda name, inputs: models[name].predict(dict(inputs)), manifest)


class CoreAIBackend:
    """A backend whose caches are Core AI's state, in arrays that the host owns."""

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
        self._end = weakref.finalize(self, _end, self._loop, context, self._functions)

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
        """Release the model; it cannot be used afterwards."""
        self._end()


def _end(loop: Any, context: Any, functions: dict[str, Any]) -> None:
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
