"""The LoRA of a task in a folder, as mlx-lm's LoRA training and `ssmlx.train` write it."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..model.backbone import Backbone
from ..model.lora import LoraWeights
from ..settings import read_json
from .adapter import (
    CONFIG_FILE,
    LORA_FILES,
    BaseIdentity,
    check_lora,
    read_identity,
    read_lora_file,
)

LORA_FILE, LORA_SETTINGS = LORA_FILES["all"], "adapter_config.json"
_EXPECTED = f"a folder with {LORA_FILE} and {LORA_SETTINGS}, as mlx-lm's LoRA training writes it"


def read_lora(folder: Path, option: str) -> dict[str, LoraWeights]:
    """LoRA as mlx-lm writes and reads it.

    Args:
        folder: holds its weights and settings.
        option: what named the folder, for the message.

    Raises:
        InputError: the folder holds none.
    """
    if not folder.is_dir():
        raise InputError(f"no folder {folder}", expected=_EXPECTED, do=f"check {option}")
    settings = read_json(folder / LORA_SETTINGS, _EXPECTED)
    scale = (settings.get("lora_parameters") or {}).get("scale")
    if settings.get("fine_tune_type", "lora") != "lora" or not isinstance(scale, int | float):
        raise InputError(
            f"{folder / LORA_SETTINGS} does not describe LoRA",
            expected='"fine_tune_type": "lora" and a scale in "lora_parameters"',
            do="convert a PEFT checkpoint with `python -m convert` first",
        )
    lora = read_lora_file(folder / LORA_FILE, _EXPECTED, float(scale))
    if not lora:
        raise InputError(
            f"{folder / LORA_FILE} is empty",
            expected="pairs of lora_a and lora_b",
            do="use a LoRA's own file",
        )
    return lora


def read_task_lora(folder: Path, backbone: Backbone) -> dict[str, LoraWeights]:
    """The LoRA that a model is to have on every row while streams learn to draft for it.

    Raises:
        InputError: the folder holds none, or another model's.
    """
    lora = read_lora(folder, "--task-lora")
    if (folder / CONFIG_FILE).exists():
        difference = read_identity(folder).difference(BaseIdentity.of(backbone))
        if difference:
            raise InputError(
                f"the LoRA in {folder} belongs to another base model: this one has {difference}",
                expected="a LoRA of this model",
                do="choose its model with --model, or another --task-lora",
            )
    check_lora(backbone.model, lora, folder)
    return lora
