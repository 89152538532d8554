"""PyTorch's base classes and its decorator, with types: mypy does not follow PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:

    class Module:
        """`torch.nn.Module`; its other attributes are `Any`."""

        def __init__(self) -> None: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...

    class Function:
        """`torch.autograd.Function`."""

        @classmethod
        def apply(cls, *args: Any) -> Any: ...

else:
    from torch.autograd import Function
    from torch.nn import Module

__all__ = ["Function", "Module", "without_gradients"]
_F = TypeVar("_F", bound=Callable[..., Any])


def without_gradients(function: _F) -> _F:
    """`torch.no_grad()`, with types."""
    decorated: _F = torch.no_grad()(function)
    return decorated
