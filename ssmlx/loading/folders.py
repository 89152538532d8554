"""Folders of models and adapters: the names of their files, what one lacks, where they are kept.

Light on purpose: `--help` names the adapters, and must not wait for MLX or the Hub's client.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bars import Progress
from ..errors import InputError, quoted, require
from ..json_files import read_json

CONFIG_FILE = "streams_config.json"
STREAMS_FILE = "streams.safetensors"
LORA_FILES = {"all": "adapters.safetensors", "streams": "stream_adapters.safetensors"}
LORA_SETTINGS = "adapter_config.json"  # of mlx-lm and of PEFT
PEFT_FILE = "adapter_model.safetensors"
PEFT_PICKLE = "adapter_model.bin"
FIGURES_FILE = "figures.json"
# What an adapter on the Hub consists of, and all that is fetched of it.
ADAPTER_FILES = (
    CONFIG_FILE, STREAMS_FILE, *LORA_FILES.values(), LORA_SETTINGS, PEFT_FILE, FIGURES_FILE
)  # fmt: skip
# Patterns of the files of a model folder that is written here, an adapter's files among them.
MODEL_FILES = (
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"
)  # fmt: skip
TRAINED_FOLDER = "adapter"  # of a training run, where the adapter is
PLAN_FILE = "plan.json"  # of a run of `ssmlx.adapt`


def home() -> Path:
    """The user's home folder; for a user without one, a path that cannot exist."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def cache_dir() -> Path:
    """This package's cache folder, which need not exist; if it cannot be made, nothing is kept."""
    if own := os.environ.get("SSMLX_CACHE"):
        return expand_user(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expand_user(shared) / "ssmlx"
    return home() / ".cache" / "ssmlx"


def adapters_home() -> Path:
    """The folder in which `ssmlx.adapt` keeps its runs, each in a folder of its own."""
    return cache_dir() / "adapters"


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Where models and adapters are downloaded to, and whether they may be."""

    # models of the Hub are in `hub` below it; None for the usual folders
    cache_dir: str | Path | None = None
    offline: bool = False  # download nothing
    progress: Progress | None = None  # called with (bytes so far, bytes in all)

    @property
    def folder(self) -> Path:
        """The folder of converted models."""
        return cache_dir() if self.cache_dir is None else expand_user(self.cache_dir)

    @property
    def hub(self) -> str | None:
        """The folder of the Hub's models; None for the Hub's own cache."""
        return None if self.cache_dir is None else str(self.folder / "hub")

    def require_not_offline(
        self,
        missing: str,  # its name, for messages
        target: str | Path,  # the folder that it would be in
    ) -> None:
        require(
            not self.offline,
            f"{missing} is not in {target}",
            expected="it there, as downloads are off (offline)",
            do="load it once while online, or give a folder",
        )


def expand_user(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~user, and no such user is known
        return Path(path)


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder has the files of streams, of LoRA, or of a training run that has made
    streams."""
    files = (CONFIG_FILE, LORA_SETTINGS, f"{TRAINED_FOLDER}/{CONFIG_FILE}")
    return any((folder / file).is_file() for file in files)


def is_lora_folder(folder: Path) -> bool:
    """Whether a folder has LoRA alone, as mlx-lm and PEFT write it."""
    return not (folder / CONFIG_FILE).exists() and (folder / LORA_SETTINGS).exists()


def adapter_weight_files(settings: dict[str, Any]) -> list[str]:
    """The weight files that an adapter's settings (`CONFIG_FILE`) ask for, the streams' first."""
    scopes = [] if settings.get("fused") else [settings.get("adapter_scope", "all")]
    if settings.get("task_lora_scale") is not None:
        scopes.append("all")
    return [STREAMS_FILE, *(LORA_FILES[scope] for scope in scopes)]


def first_missing_adapter_file(folder: Path) -> str | None:
    """The first weight file that an adapter's folder lacks; None if it is whole."""
    # LoRA alone is in mlx-lm's file or in PEFT's.
    if is_lora_folder(folder):
        weights = (LORA_FILES["all"], PEFT_FILE)
        return None if any((folder / file).is_file() for file in weights) else " or ".join(weights)
    needed = adapter_weight_files(read_json(folder / CONFIG_FILE, "the settings of an adapter"))
    return next((file for file in needed if not (folder / file).is_file()), None)


def first_missing_model_file(folder: Path) -> str | None:
    """The first file that a model folder lacks; None if it is whole."""
    if not (folder / "config.json").is_file():
        return "config.json"
    indexed = files_in_weight_index(folder)
    if indexed is None:
        is_there = any(file.is_file() for file in folder.glob("model*.safetensors"))
        return None if is_there else "model*.safetensors"
    return next((file.name for file in indexed if not file.is_file()), None)


def files_in_weight_index(folder: Path) -> list[Path] | None:
    """The weight files that a folder's index names, which may not exist; None without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    names = read_json(index, "an index of weights").get("weight_map")
    found = [*names.values()] if isinstance(names, dict) else []
    require(
        bool(found) and all(isinstance(one, str) and Path(one).name == one != "" for one in found),
        f"{index} has {quoted(names)} for weight_map",
        expected="names of files beside it",
        do="download the model again",
    )
    return sorted({folder / name for name in found})


def require_model_folder(folder: Path) -> Path:
    """`folder` itself, if it has config.json and all weights."""
    do = "check the path, or give an alias or a Hub name (org/name)"
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {found}", expected="a model folder", do=do)
    if missing := first_missing_model_file(folder):
        if any(folder.glob("pytorch_model*.bin")):
            do = f"convert it to safetensors: python -m ssmlx.convert.base {folder} OUT"
        raise InputError(
            f"{folder} has no {missing}", expected="config.json and model*.safetensors", do=do
        )
    return folder
