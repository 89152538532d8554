"""A fast matrix library for MLX's CPU backend on Linux, and what computes on this machine.

MLX's Linux wheel carries the reference BLAS, with which several rows cost some fifteen times as
much as with OpenBLAS. So MLX's library is loaded here, with OpenBLAS in its place. Nothing of this
happens on macOS.
"""

import ctypes
import ctypes.util
import logging
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
    "MLX uses its reference BLAS here, with which several rows cost about fifteen times as much as "
    "with OpenBLAS. Import ssmlx before mlx; if you do already, `apt install "
    "libopenblas0-pthread` (or your system's package) and start again"
)

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


_openblas: ctypes.CDLL | None = None  # the one that MLX computes with; of the process, as MLX is
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_GCC_FORTRAN = "libgfortran.so.5"
_log = logging.getLogger("ssmlx")


def load_openblas_before_mlx() -> None:
    """Have MLX's CPU backend on Linux use OpenBLAS: the installed wheel's, or else the system's."""
    global _openblas
    if sys.platform != "linux":
        return
    everything = ctypes.CDLL(None)
    if hasattr(everything, "openblas_get_config"):  # as by LD_PRELOAD
        _openblas = everything
    elif "mlx.core" not in sys.modules:
        _openblas = _load_mlx_with_any()
    elif any(_files_in("mlx", "../mlx_cpu.libs", "libblas*")):
        _log.warning(HINT)
    with suppress(AttributeError, OSError):  # an unusual build of it, or a system that does not say
        most = num_usable_cores()
        # No more threads than the process may run at once.
        if _openblas is not None and _openblas.openblas_get_num_threads() > most:
            _openblas.openblas_set_num_threads(most)


def _load_mlx_with_any() -> ctypes.CDLL | None:
    for find in (_openblas_of_wheel, _openblas_of_system):
        with suppress(OSError, StopIteration, AttributeError):  # no such file, or symbol in it
            return _load_mlx_with(find())
    return None


def _openblas_of_wheel() -> Path:
    return next(_files_in("ngsolve_openblas", ".", "libopenblas*.so*"))


class _SymbolPlace(ctypes.Structure):
    """What glibc's `dladdr` says of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _openblas_of_system() -> Path:
    loaded = ctypes.CDLL(ctypes.util.find_library("openblas") or "libopenblas.so.0")
    place = _SymbolPlace()
    address = ctypes.cast(loaded.cblas_sgemm, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(place)):
        raise OSError("the system does not say where its OpenBLAS is")
    return Path(os.fsdecode(place.file)).resolve()


def _load_mlx_with(openblas: Path) -> ctypes.CDLL:
    """Load MLX's library with this OpenBLAS as its BLAS, and return the latter."""
    # MLX's library looks for its BLAS in a folder beside itself, and so does OpenBLAS for GCC's
    # Fortran library, which few machines have, and MLX's wheel under another name. So they are
    # loaded from a folder of links to them. Other libraries of the process keep their own BLAS.
    with TemporaryDirectory(prefix="ssmlx-openblas-") as name:
        libraries = Path(name) / "mlx_cpu.libs"
        libraries.mkdir()
        files = {file.name: file for file in _files_in("mlx", "../mlx_cpu.libs", "lib*.so*")}
        for fortran in [one for one in files if one.startswith("libgfortran")]:
            files.setdefault(_GCC_FORTRAN, files[fortran])
        for file_name, file in files.items():
            is_blas = file_name.startswith("libblas")
            (libraries / file_name).symlink_to(openblas if is_blas else file)
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
    """The BLAS that MLX uses, such as "OpenBLAS 0.3.33 (SkylakeX)", with the core that its kernels
    are for."""
    if sys.platform == "darwin":
        return "Accelerate"
    if _openblas is None:
        return "the reference BLAS"
    config, core = _openblas.openblas_get_config, _openblas.openblas_get_corename
    config.restype = core.restype = ctypes.c_char_p
    return f"{' '.join(config().decode().split()[:2])} ({core().decode()})"


def has_fast_blas() -> bool:
    """Whether several rows cost little more than one on the CPU; if not, `HINT` says what to do."""
    return blas_name() != "the reference BLAS"


class OpenBlasThreads:
    """Lets OpenBLAS use no more threads than other processes leave cores idle.

    Its threads wait for each other without giving way, so one without a core holds up all: beside
    one busy process on two cores, two threads take some twenty times as long as one.
    """

    _SECONDS = 0.5  # between two looks, as /proc/stat counts in hundredths

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._most = _openblas.openblas_get_num_threads() if _openblas else 1
        self._used = self._most
        self._looked = -math.inf
        self._others_busy = math.inf  # seconds, at the last look; infinite if unknown

    def adjust(self) -> None:
        """Set the number of threads by what other processes leave idle. Not to be called by two
        threads at once; products may run meanwhile."""
        now = monotonic()
        passed = now - self._looked
        if _openblas is None or self._most == 1 or passed < self._SECONDS:
            return
        before = self._others_busy
        self._looked, self._others_busy = now, math.inf
        with suppress(OSError, ValueError):  # the system does not say: then nothing changes
            self._others_busy = self._seconds_of_others()
            share = max(0.0, self._others_busy - before) / passed
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


def num_usable_cores() -> int:
    """Cores that the process may keep busy; a container's control group may allow it less time."""
    return max(1, int(min(len(_usable_cores()), *_cores_of_cgroups())))


def _cores_of_cgroups() -> Iterator[float]:
    """Cores whose time each control group of the process allows; infinity at the end."""
    groups = {Path()}  # a container sees its own one there
    with suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            own = Path(line.partition(":")[2].partition(":")[2].lstrip("/"))
            groups |= {own, *own.parents}
    for group in groups:
        with suppress(OSError, ValueError, ZeroDivisionError):  # without a limit, or of version 1
            quota, period = map(int, (_CGROUPS / group / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError, ValueError, ZeroDivisionError):
            files = (_CGROUPS / "cpu" / group / f"cpu.cfs_{one}_us" for one in ("quota", "period"))
            quota, period = (int(file.read_text()) for file in files)
            yield quota / period if quota > 0 else math.inf
    yield math.inf


class Machine(NamedTuple):
    chip_and_cores: str  # cores that MLX may use, if it is a CPU
    backend: str  # "gpu", or "cpu" and its BLAS


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """This machine, such as ("Apple M4", "gpu") or ("x86_64, 2 cores", "cpu, OpenBLAS 0.3.33
    (SkylakeX)")."""
    # Found once a process, by MLX's default device when it is first called.
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown chip"))
    if mx.default_device() == mx.gpu:
        return Machine(name, "gpu")
    # Those that MLX's CPU backend may use: all, or as the environment says.
    cores = num_usable_cores()
    limits = [os.environ.get(name, "") for name in _THREADS]
    cores = min([cores, *(int(limit) for limit in limits if limit.isdigit() and int(limit))])
    counted = f"{cores} core{'s' if cores > 1 else ''}"
    return Machine(f"{name}, {counted}", f"cpu, {blas_name()}")
