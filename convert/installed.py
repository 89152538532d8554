"""What a command needs beside the package itself, told before anything slow."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ssmlx.errors import InputError


def check_installed(names: Sequence[str], extra: str, install: str) -> None:
    """Check that what an extra of this package brings is there.

    Args:
        names: packages, as they are imported.
        extra: the extra.
        install: the command that brings it.

    Raises:
        InputError: names the first package that is not there.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"the package {name} is not installed",
                expected=f"what the extra {extra} brings",
                do=f"`{install}`",
            )


def check_torch() -> None:
    """Check that the PyTorch side is there.

    Raises:
        InputError: it is not.
    """
    check_installed(["torch"], "torch", 'pip install -e ".[torch]"')
