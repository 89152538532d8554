"""A fast matrix library for MLX's CPU backend on Linux, and what computes on this machine.

MLX's Linux wheel carries the reference BLAS, some thirty times slower than OpenBLAS. Where the
system has OpenBLAS, loading it first and for all gives its symbols precedence: what
`LD_PRELOAD` does, without the variable. Nothing of this happens on macOS.
"""

import ctypes
import ctypes.util
import os
import sys
from functools import lru_cache
from typing import NamedTuple

HINT = (
    "MLX runs on its reference BLAS here, some thirty times slower than OpenBLAS; "
    "`apt install libopenblas0-pthread` (or your system's package) and start again"
)

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@lru_cache(maxsize=1)
def load_openblas_before_mlx() -> bool:
    """Load the system's OpenBLAS before MLX, so that MLX's CPU backend uses it. On Linux alone.

    Returns:
        False on Linux where OpenBLAS is missing or cannot be loaded; True where it was loaded, on
        other systems, and where MLX was imported before, when nobody can tell. The first call's
        answer is kept for the process.
    """
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


class Machine(NamedTuple):
    """What computes here."""

    chip_and_cores: str  # the cores that MLX may use, of a CPU alone
    backend: str  # "gpu", or "cpu" and its BLAS


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Find the chip, and what of it MLX computes on.

    Such as ("Apple M4", "gpu"), or ("x86_64, 2 cores", "cpu, fast BLAS"). By MLX's default device
    when it is first called; found once a process. The cores are those that the process may run on,
    or fewer where `OPENBLAS_NUM_THREADS` or `OMP_NUM_THREADS` says so.
    """
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown chip"))
    if mx.default_device() == mx.gpu:
        return Machine(name, "gpu")
    # Those that MLX's CPU backend may use: all that there are, or as the environment says.
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    limits = [os.environ.get(name, "") for name in _THREADS]
    cores = min([cores, *(int(limit) for limit in limits if limit.isdigit() and int(limit))])
    counted = f"{cores} core{'s' if cores > 1 else ''}"
    blas = "fast" if load_openblas_before_mlx() else "reference"
    return Machine(f"{name}, {counted}", f"cpu, {blas} BLAS")
