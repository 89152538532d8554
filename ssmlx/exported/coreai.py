"""An exported model run by Core AI, whose runtime exists on macOS and on Linux."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, first_line
from .backends import FUNCTIONS, Arrays
from .manifest import Manifest

COMPUTE_UNITS = ("all", "cpu-only")


class CoreAIBackend:
    """A backend whose caches are Core AI's state, in arrays that the host owns.

    Core AI's calls are coroutines; each is run to its end before the host goes on.

    Args:
        package: an .aimodel.
        manifest: beside it.
    """

    def __init__(self, package: Path, manifest: Manifest) -> None:
        from coreai.authoring import AIModelAsset
        from coreai.runtime import NDArray

        self._array, self._manifest = NDArray, manifest
        self._loop = asyncio.new_event_loop()
        context = AIModelAsset.load(package).executable()
        model = self._loop.run_until_complete(context.__aenter__())
        # The functions live as long as the model, and the model until its context ends.
        self._functions = {name: model.load_function(name) for name in FUNCTIONS}
        self._end = weakref.finalize(self, _end, self._loop, context, self._functions)

    def make_state(self) -> dict[str, Any]:
        """See `Backend`."""
        manifest = self._manifest
        empty = np.zeros(manifest.cache_shape, manifest.float_type)
        return {name: self._array(empty.copy()) for name in manifest.cache_names}

    def predict(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """See `Backend`."""
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
    """Run a package with Core AI.

    Args:
        package: an .aimodel.
        manifest: beside it.

    Raises:
        InputError: the runtime is missing, or cannot load the package.
    """
    try:
        return CoreAIBackend(package, manifest)
    except ImportError as error:
        raise InputError(
            "Core AI's runtime is not installed",
            expected="the packages coreai-core and coreai-torch (Python 3.11 or later)",
            do='`pip install "ssmlx[coreai]"`',
        ) from error
    except (RuntimeError, OSError, KeyError) as error:
        raise InputError(
            f"{package} cannot be loaded by Core AI ({first_line(error)})",
            expected="a package that this version of coreai-core can run",
            do="export it again",
        ) from error
