"""Runs a saved Core ML package on any machine: an interpreter of MIL programs in numpy.

It reads the package itself, the protobuf message and the weights file, and shares no code with
the tools that write packages. It knows the operations that this project's exports use.
"""

from .execution import ExecutionError
from .program import Function, Program
from .values import Dtype, TensorType

__all__ = ["Dtype", "ExecutionError", "Function", "Program", "TensorType"]
