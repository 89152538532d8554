"""A fast matrix library for MLX's CPU backend on Linux, and what computes on this machine.

MLX's Linux wheel carries the reference BLAS, with which several rows cost some fifteen times as
much as with OpenBLAS. So MLX's library is loaded here, with OpenBLAS in its place. Nothing of this
happens on macOS.
"""

import ctypes
import ctypes.util
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import NamedTuple

HINT = (
    "MLX computes with its reference BLAS here, in which several rows cost some fifteen times as "
    "much as in OpenBLAS. Import ssmlx before mlx; if that is so already, `apt install "
    "libopenblas0-pthread` (or your system's package) and start again"
)

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


_openblas: ctypes.CDLL | None = None
"""The OpenBLAS that MLX computes with; of the process, as MLX is."""


def load_openblas_before_mlx() -> None:
    """Have MLX's CPU backend on Linux compute with OpenBLAS: the installed wheel's, or else the
    system's.

    It does nothing if the process has one for all already, as by `LD_PRELOAD`, or has imported MLX.
    """
    global _openblas
    if sys.platform != "linux":
        return
    everything = ctypes.CDLL(None)
    if hasattr(everything, "openblas_get_config"):
        _openblas = everything
        return
    if "mlx.core" in sys.modules:
        return
    for find in (_openblas_of_wheel, _openblas_of_system):
        with suppress(OSError, StopIteration):
            _openblas = _load_mlx_with(find())
            return


def _openblas_of_wheel() -> Path:
    return next(_files_in("ngsolve_openblas", ".", "libopenblas*.so*"))


def _openblas_of_system() -> Path:
    ctypes.CDLL(ctypes.util.find_library("openblas") or "libopenblas.so.0")
    loaded = Path("/proc/self/maps").read_text().split()
    return next(Path(one) for one in loaded if Path(one).name.startswith("libopenblas"))


def _load_mlx_with(openblas: Path) -> ctypes.CDLL:
    """Load MLX's library with this OpenBLAS as its BLAS, and return the latter.

    MLX's library looks for its BLAS in a folder beside itself, and so does OpenBLAS for GCC's
    Fortran library, which few machines have, and MLX's wheel under another name. So they are loaded
    from a folder of links to them. Other libraries of the process keep the BLAS that they have.
    """
    with TemporaryDirectory(prefix="ssmlx-openblas-") as name:
        libraries = Path(name) / "mlx_cpu.libs"
        libraries.mkdir()
        for file in _files_in("mlx", "../mlx_cpu.libs", "lib*.so*"):
            is_blas = file.name.startswith("libblas")
            (libraries / file.name).symlink_to(openblas if is_blas else file)
            if file.name.startswith("libgfortran"):
                (libraries / "libgfortran.so.5").symlink_to(file)
        mlx = next(_files_in("mlx", "lib", "libmlx.so"))
        linked = Path(name) / "mlx" / "lib" / mlx.name
        linked.parent.mkdir(parents=True)
        linked.symlink_to(mlx)
        blas = ctypes.CDLL(str(next(libraries.glob("libblas*"))))
        ctypes.CDLL(str(linked))
    return blas


def _files_in(package: str, folder: str, pattern: str) -> Iterator[Path]:
    """Files of a folder beside or in an installed package, which is not imported."""
    spec = find_spec(package)
    for place in (spec and spec.submodule_search_locations) or ():
        yield from (Path(place) / folder).resolve().glob(pattern)


@lru_cache(maxsize=1)
def blas_name() -> str:
    """Which library multiplies matrices on the CPU: "Accelerate", "OpenBLAS 0.3.33 (SkylakeX)",
    whose kernels are those of the core in brackets, or "the reference BLAS"."""
    if sys.platform == "darwin":
        return "Accelerate"
    if _openblas is None:
        return "the reference BLAS"
    config, core = _openblas.openblas_get_config, _openblas.openblas_get_corename
    config.restype = core.restype = ctypes.c_char_p
    return f"{' '.join(config().decode().split()[:2])} ({core().decode()})"


def has_fast_blas() -> bool:
    """Whether several rows cost little more than one on the CPU; `HINT` says what to do if not."""
    return blas_name() != "the reference BLAS"


class OpenBlasThreads:
    """Lets OpenBLAS use no more threads than other processes leave cores idle.

    Its threads wait for each other without giving way, so one that has no core holds up all: beside
    one busy process on two cores, two threads take some twenty times as long as one.
    """

    _SECONDS = 0.5  # between two looks, as /proc/stat counts in hundredths

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._most = _openblas.openblas_get_num_threads() if _openblas else 1
        self._used = self._most
        self._looked = -math.inf
        self._others_busy = 0.0

    def adjust(self) -> None:
        """Look at what others used since the last time, if that was long enough ago.

        Nothing changes where the system does not say. Not to be called by two threads at once;
        products may run meanwhile.
        """
        now = monotonic()
        passed = now - self._looked
        if _openblas is None or self._most == 1 or passed < self._SECONDS:
            return
        with suppress(OSError, ValueError):  # no such file, no more files to open, another form
            busy = self._seconds_of_others()
            share = max(0.0, busy - self._others_busy) / passed
            self._looked, self._others_busy = now, busy
            # a core of which others use a quarter still counts as idle
            threads = max(1, min(self._most, int(len(_usable_cores()) - share + 0.25)))
            if threads != self._used:
                _openblas.openblas_set_num_threads(threads)
                self._used = threads

    def _seconds_of_others(self) -> float:
        """Seconds that the usable cores were busy with other processes' work."""
        names = {f"cpu{number}" for number in _usable_cores()}
        ticks = 0
        for name, *counts in map(str.split, self._stat.read_text().splitlines()):
            if name in names:
                user, nice, system, _idle, _waiting, irq, soft, stolen, *_ = map(int, counts)
                ticks += user + nice + system + irq + soft + stolen
        own = os.times()
        return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _usable_cores() -> set[int]:
    allowed = getattr(os, "sched_getaffinity", None)
    return allowed(0) if allowed else set(range(os.cpu_count() or 1))


class Machine(NamedTuple):
    """What computes here."""

    chip_and_cores: str  # the cores that MLX may use, of a CPU alone
    backend: str  # "gpu", or "cpu" and its BLAS


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Find the chip, and what of it MLX computes on.

    Such as ("Apple M4", "gpu"), or ("x86_64, 2 cores", "cpu, OpenBLAS 0.3.33 (SkylakeX)"). By MLX's
    default device when it is first called; found once a process. The cores are those that the
    process may run on, or fewer if `OPENBLAS_NUM_THREADS` or `OMP_NUM_THREADS` says so.
    """
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown chip"))
    if mx.default_device() == mx.gpu:
        return Machine(name, "gpu")
    # Those that MLX's CPU backend may use: all that there are, or as the environment says.
    cores = len(_usable_cores())
    limits = [os.environ.get(name, "") for name in _THREADS]
    cores = min([cores, *(int(limit) for limit in limits if limit.isdigit() and int(limit))])
    counted = f"{cores} core{'s' if cores > 1 else ''}"
    return Machine(f"{name}, {counted}", f"cpu, {blas_name()}")
