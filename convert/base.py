"""Base models for the PyTorch side, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import nn

from ssmlx.config import read_json
from ssmlx.errors import InputError


def load_base(path: str | Path, *, attn_implementation: str = "eager") -> Any:
    """Load a base model of transformers in float32 from a local folder.

    Args:
        path: a Hugging Face folder, or one of mlx-lm with packed weights, which are dequantised.
        attn_implementation: "eager" or "sdpa".

    Raises:
        InputError: the folder holds no such model, or lacks some of its weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(path)
    quantization = read_json(folder / "config.json", "a model folder").get("quantization")
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    if quantization is None:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in ("quantization", "quantization_config"):
        if hasattr(config, name):
            delattr(config, name)
    model = AutoModelForCausalLM.from_config(config, **options)
    _fill_base(model, _dequantised(folder, quantization), folder)
    return model.eval()


def _dequantised(folder: Path, quantization: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of an mlx-lm folder in float32, unpacked in float32 arithmetic."""
    packed: dict[str, Any] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded: Any = mx.load(str(file))
        packed |= loaded
    weights = {}
    for name, array in packed.items():
        module, _, kind = name.rpartition(".")
        if f"{module}.scales" in packed and kind != "weight":
            continue
        if f"{module}.scales" in packed:
            array = _unpack(packed, module, {**quantization, **_own(quantization, module)})
        weights[name] = torch.from_numpy(np.array(array.astype(mx.float32)))
    return weights


def _own(quantization: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings that mlx-lm gives one module where they differ from the model's."""
    own = quantization.get(module)
    return own if isinstance(own, dict) else {}


def _unpack(packed: Mapping[str, Any], module: str, settings: Mapping[str, Any]) -> Any:
    """One module's [out, in] weight in float32, on the CPU: the same bits on every machine."""
    scales, biases = packed[f"{module}.scales"], packed.get(f"{module}.biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    options = {key: settings[key] for key in ("group_size", "bits", "mode") if key in settings}
    return mx.dequantize(packed[f"{module}.weight"], scales, biases, **options, stream=mx.cpu)


def _fill_base(model: nn.Module, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    report = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    faults = [f"lacks {name}" for name in report.missing_keys if name not in tied]
    faults += [f"holds an unknown {name}" for name in report.unexpected_keys]
    if faults:
        raise InputError(
            f"{folder} {faults[0]}",
            expected=f"the weights of {type(model).__name__}",
            do="download or convert the base model again",
        )
