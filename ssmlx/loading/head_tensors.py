"""Tensors of drafting heads among a model's own weights: their names, and a model without them.

Light on purpose: no weights are read, and MLX is not imported.
"""

from pathlib import Path
from typing import Any

from ..errors import InputError
from .stored_tensors import tensor_names

MEDUSA_PREFIX = "medusa_head."
"""Of the tensors of Medusa heads that are among the model's own weights (Medusa-2)."""
MTP_PREFIX = "mtp."
"""Of the tensors of a head for multi-token prediction; another prefix may stand before it."""


def is_mtp_name(name: str) -> bool:
    """Whether a tensor's name has `MTP_PREFIX` as a part of it."""
    return name.startswith(MTP_PREFIX) or f".{MTP_PREFIX}" in name


def may_have_drafting_heads(folder: Path) -> bool:
    """Whether a model's own weights have Medusa heads (Medusa-2) or a head for multi-token
    prediction, by the tensors' names; True too where the names cannot be read.
    """
    try:
        names = tensor_names(folder)
    except (InputError, OSError):  # what is wrong with the weights, mlx-lm's loader tells
        return True
    return any(name.startswith(MEDUSA_PREFIX) or is_mtp_name(name) for name in names)


def without_drafting_heads(model_class: Any) -> Any:
    """Return a subclass of a model class of mlx-lm's that drops the tensors of drafting heads when
    it takes weights.
    """

    class WithoutHeads(model_class):  # type: ignore[misc]  # known at run time
        """mlx-lm's model, which drops tensors of drafting heads."""

        __module__ = model_class.__module__  # by which users are told what the model is

        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            """Return the tensors by the names of mlx-lm's model, without those of heads."""
            kept = {n: tensor for n, tensor in weights.items() if not n.startswith(MEDUSA_PREFIX)}
            kept = super().sanitize(kept) if hasattr(model_class, "sanitize") else kept
            # Behind mlx-lm's own function, which may tell by these how norms are stored.
            return {name: tensor for name, tensor in kept.items() if not is_mtp_name(name)}

    return WithoutHeads
