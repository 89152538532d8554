"""A fast matrix library for MLX's CPU backend on Linux.

MLX's Linux wheel carries the reference BLAS, some thirty times slower than OpenBLAS. Where the
system has OpenBLAS, loading it first and for all gives its symbols precedence: what
`LD_PRELOAD` does, without the variable. Nothing of this happens on macOS.
"""

import ctypes
import ctypes.util
import sys

HINT = (
    "MLX runs on its reference BLAS here, some thirty times slower than OpenBLAS; "
    "`apt install libopenblas0-pthread` (or your system's package) and start again"
)


def prefer_openblas() -> bool:
    """Load the system's OpenBLAS ahead of MLX; whether MLX will be fast, as far as known."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return True
    name = ctypes.util.find_library("openblas")
    if name is None:
        return False
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
