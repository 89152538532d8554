"""A base model with the LoRA of a task in its weights, whichever trainer wrote that LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from ssmlx.errors import InputError
from ssmlx.loading.adapter import LORA_FILE, read_lora
from ssmlx.loading.names import CONFIG_FILE
from ssmlx.model.lora import LoraWeights, layer_of
from ssmlx.settings import read_json

from ..reference.model import load_fine_tuned, merge_lora
from .checkpoint import ADAPTER_WEIGHTS


def fine_tuned(base: Any, folder: Path) -> Any:
    """`base` with LoRA added into its weights.

    Args:
        base: a model as `convert.base.load_base` gives it; changed in place.
        folder: a checkpoint of `convert.train` of scope "all", or LoRA as mlx-lm's training and
            `ssmlx.train` write it.

    Raises:
        InputError: the folder holds no LoRA, one that acts on streams alone, or another model's.
    """
    if (folder / LORA_FILE).is_file() and not (folder / ADAPTER_WEIGHTS).is_file():
        merge_weights(base, read_lora(folder, "--lora"), folder)
        return base
    return merge_lora(load_fine_tuned(base, folder))


def template_of(folder: Path) -> str | None:
    """The prompt template that travels with a LoRA; None for the model's own chat template."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    template: str | None = read_json(folder / CONFIG_FILE, "stream settings").get("prompt_template")
    return template


@torch.no_grad()
def merge_weights(base: Any, lora: Mapping[str, LoraWeights], source: Path) -> None:
    """Add LoRA in mlx-lm's layout into the linear modules of a PyTorch model.

    Raises:
        InputError: the model has no such module, or one of another shape.
    """
    layers = getattr(base.model, "decoder", base.model).layers
    for path, weights in lora.items():
        a, b = (tensor_of(part) for part in (weights.a, weights.b))
        found = _weight(layers, path)
        if found is None or found.shape != (b.shape[1], a.shape[0]):
            raise InputError(
                f"{source} has LoRA for {path} of {a.shape[0]} inputs and {b.shape[1]} outputs",
                expected="linear modules of this base model",
                do="choose the model that the LoRA was trained on",
            )
        found += weights.scale * (a @ b).t()


def _weight(layers: Any, path: str) -> torch.Tensor | None:
    try:
        layer, module = layer_of(path)
        return layers[layer].get_submodule(module).weight
    except (AttributeError, IndexError, ValueError):
        return None


def tensor_of(array: mx.array) -> torch.Tensor:
    """An MLX array as a tensor: int32 stays, floating types become float32."""
    whole = array if array.dtype == mx.int32 else array.astype(mx.float32)
    return torch.from_numpy(np.array(whole))
