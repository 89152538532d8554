"""The adapters that ship inside the package, and what a user may call an adapter.

Light on purpose: `--help` names the adapters, and must not wait for MLX.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..errors import InputError

NO_ADAPTER = "none"
CONFIG_FILE = "streams_config.json"
ADAPTERS_FOLDER = Path(__file__).parents[1] / "adapters"


def bundled_adapters() -> dict[str, Path]:
    """Folders of the adapters that ship with the package, by name."""
    if not ADAPTERS_FOLDER.is_dir():
        return {}
    folders = (folder for folder in ADAPTERS_FOLDER.iterdir() if (folder / CONFIG_FILE).is_file())
    return {folder.name: folder for folder in sorted(folders)}


def resolve_adapter(adapter: str | Path) -> Path | None:
    """The folder of an adapter; None for "none", which means to decode without one.

    Args:
        adapter: "none"; a bundled adapter's name; or a folder. A bare name (without a path
            separator) is looked for in the working directory first, then among the bundled
            adapters; where both have it, the choice is told on standard error. A `Path` is
            always a folder.

    Raises:
        InputError: a bare name that is neither a folder nor a bundled adapter.
    """
    if adapter == NO_ADAPTER:
        return None
    if isinstance(adapter, Path) or not _is_bare(adapter):
        return _expanded(adapter)
    folder, bundled = Path(adapter), bundled_adapters().get(adapter)
    if adapter and folder.is_dir():
        if bundled is not None:
            _say(
                f"adapter {adapter}: the folder of that name in the working directory, "
                "not the bundled adapter"
            )
        return folder
    if bundled is None:
        raise InputError(
            f"no adapter folder {adapter}, and no bundled adapter of that name",
            expected=f"a folder that `python -m convert` wrote{_or_bundled()}",
            do="check --adapter, or convert a checkpoint",
        )
    return bundled


def _is_bare(name: str) -> bool:
    separators = {"/", os.sep, os.altsep or os.sep}
    return not name.startswith("~") and not separators & set(name)


def _expanded(adapter: str | Path) -> Path:
    try:
        return Path(adapter).expanduser()
    except RuntimeError:  # ~user, where no such user is known
        return Path(adapter)


def _or_bundled() -> str:
    names = ", ".join(bundled_adapters())
    return f", or a bundled adapter ({names})" if names else ""


def _say(line: str) -> None:
    print(f"ssmlx: {line}", file=sys.stderr)
