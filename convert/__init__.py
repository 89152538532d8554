"""The PyTorch side: checkpoints into MLX adapters, and the reference forward of the model."""

import importlib.util
from collections.abc import Sequence

import ssmlx  # noqa: F401  (before MLX, so that it finds OpenBLAS)
from ssmlx.errors import require


def check_installed(
    names: Sequence[str],
    extra: str,  # ssmlx's extra that installs them, for the message
    install: str,  # the command that installs it, for the message
) -> None:
    """Check that the modules are installed, without importing them."""
    for name in names:
        require(
            importlib.util.find_spec(name) is not None,
            f"the package {name} is not installed",
            expected=f"the extra {extra}",
            do=f"`{install}`",
        )


def check_torch() -> None:
    check_installed(["torch"], "torch", 'pip install "ssmlx[torch]"')
