"""Architectures that mlx-lm lacks, each a model file in mlx-lm's own style."""

from __future__ import annotations

from typing import Any

from . import opt

_FILES = {"opt": opt}


def model_classes(model_type: str) -> tuple[Any, Any] | None:
    """`Model` and `ModelArgs` of `model_type`; None where mlx-lm is to choose them."""
    file = _FILES.get(model_type)
    return None if file is None else (file.Model, file.ModelArgs)


__all__ = ["model_classes"]
