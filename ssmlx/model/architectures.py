"""Which classes a model folder's weights need, where mlx-lm's own would not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils

from . import opt

# Architectures that mlx-lm lacks, each a model file in mlx-lm's own style.
_FILES = {"opt": opt}

MEDUSA_PREFIX = "medusa_head."
"""Of the tensors of Medusa heads that are among the model's own weights (Medusa-2)."""


def model_classes(model_type: str) -> tuple[Any, Any] | None:
    """`Model` and `ModelArgs` of `model_type`; None where mlx-lm is to choose them."""
    file = _FILES.get(model_type)
    return None if file is None else (file.Model, file.ModelArgs)


def carries_heads(folder: Path) -> bool:
    """Whether a model's own weights hold Medusa heads (Medusa-2). Reads their names alone."""
    for path in folder.glob("model*.safetensors"):
        tensors: Any = mx.load(str(path))
        if any(name.startswith(MEDUSA_PREFIX) for name in tensors):
            return True
    return False


def classes_without_heads(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of a model that may carry Medusa heads in its own weights (Medusa-2).

    They leave the heads out, which mlx-lm's loader would refuse; it takes this function as
    `get_model_classes`.
    """
    model, args = utils._get_classes(config)

    class WithoutHeads(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            kept = {
                name: tensor
                for name, tensor in weights.items()
                if not name.startswith(MEDUSA_PREFIX)
            }
            return super().sanitize(kept) if hasattr(model, "sanitize") else kept

    return WithoutHeads, args
