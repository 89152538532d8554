"""The PyTorch side: checkpoints into MLX adapters, and the reference forward of the model."""

import importlib.util
from collections.abc import Sequence
from inspect import signature
from typing import Any

import ssmlx  # noqa: F401  (before MLX, so that it finds OpenBLAS)
from ssmlx.errors import require


def check_installed(names: Sequence[str], extra: str, install: str) -> None:
    """Check that the packages of an extra are there; `install` is the command that brings them."""
    for name in names:
        require(
            importlib.util.find_spec(name) is not None,
            f"the package {name} is not installed",
            expected=f"what the extra {extra} brings",
            do=f"`{install}`",
        )


def check_torch() -> None:
    check_installed(["torch"], "torch", 'pip install -e ".[torch]"')


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """A cache, or None, as arguments of a module of transformers, which calls it `cache` from 5.24
    on."""
    name = "cache" if "cache" in signature(module.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": cache is not None}
