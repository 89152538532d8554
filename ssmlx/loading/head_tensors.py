"""Tensors of drafting heads among a model's own weights: their names, and a model without them.

Light on purpose: no weights are read, and MLX is not imported.
"""

from pathlib import Path
from typing import Any

from ..errors import InputError
from .stored_tensors import tensor_names

MEDUSA_PREFIX = "medusa_head."  # of Medusa heads that are among the model's own weights (Medusa-2)
MTP_PREFIX = "mtp."  # of a head for multi-token prediction; another prefix may come first


def is_mtp_name(name: str) -> bool:
    return name.startswith(MTP_PREFIX) or f".{MTP_PREFIX}" in name


def may_have_drafting_heads(folder: Path) -> bool:
    """By the tensors' names; True too if they cannot be read."""
    try:
        names = tensor_names(folder)
    except (InputError, OSError):  # mlx-lm's loader says what is wrong with them
        return True
    return any(name.startswith(MEDUSA_PREFIX) or is_mtp_name(name) for name in names)


def without_drafting_heads(model_class: Any) -> Any:
    """A subclass of a model class of mlx-lm that drops drafting heads when it loads weights."""

    class WithoutHeads(model_class):  # type: ignore[misc]  # known at run time
        __module__ = model_class.__module__  # messages name the model by it

        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            kept = {n: tensor for n, tensor in weights.items() if not n.startswith(MEDUSA_PREFIX)}
            kept = super().sanitize(kept) if hasattr(model_class, "sanitize") else kept
            # After mlx-lm's own function, which may infer from these how norms are stored.
            return {name: tensor for name, tensor in kept.items() if not is_mtp_name(name)}

    return WithoutHeads
