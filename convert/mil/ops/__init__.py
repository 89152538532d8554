"""Operations of MIL in numpy, one small pure function each, by the semantics of iOS 18.

Arrays are of any shape unless a docstring says more; `*` stands for any sizes, and arrays are
broadcast as numpy does it. No function changes what it got.
"""

from . import compression, elementwise, indexing, linear, movement, reductions  # noqa: F401
from .registry import OPERATIONS, Operation, find_operation

__all__ = ["OPERATIONS", "Operation", "find_operation"]
