"""Where and with what a figure was measured. What cannot be told is "unknown"."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from .. import __version__, has_fast_blas
from ..blas import HINT

UNKNOWN = "unknown"
AC, BATTERY = "AC power", "battery"
CHECKOUT = Path(__file__).parents[2]
PROC, POWER_SUPPLY = Path("/proc"), Path("/sys/class/power_supply")
OS_RELEASE = Path("/etc/os-release")
PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy", "ssmlx")


def machine() -> dict[str, str]:
    """Chip, memory, system, power, and the versions of everything that takes part."""
    is_mac = platform.system() == "Darwin"
    return {
        "machine": f"{platform.system()} {platform.machine()}, {mac_chip() if is_mac else chip()}",
        "memory": mac_memory() if is_mac else memory(),
        "os": mac_version() if is_mac else os_version(),
        "power": power_source(),
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        "blas": "OpenBLAS or Accelerate" if has_fast_blas else f"reference ({HINT})",
        **{name: package_version(name) for name in PACKAGES},
        "commit": commit(),
    }


def power_source() -> str:
    """ "AC power", "battery" or "unknown"."""
    return mac_power() if platform.system() == "Darwin" else power()


def output_of(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def mac_chip() -> str:
    """Such as "Apple M2 Pro"."""
    return output_of("sysctl", "-n", "machdep.cpu.brand_string") or UNKNOWN


def mac_memory() -> str:
    """Such as "16 GiB"."""
    size = output_of("sysctl", "-n", "hw.memsize")
    return _gibibytes(int(size)) if size.isdigit() else UNKNOWN


def mac_version() -> str:
    """Such as "macOS 15.1 (24B83)"."""
    lines = (line.partition(":") for line in output_of("sw_vers").splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    if "ProductVersion" not in found:
        return UNKNOWN
    build = f" ({found['BuildVersion']})" if "BuildVersion" in found else ""
    return f"{found.get('ProductName', 'macOS')} {found['ProductVersion']}{build}"


def mac_power() -> str:
    """What `pmset` says that power is drawn from."""
    found = re.search(r"drawing from '(AC|Battery) Power'", output_of("pmset", "-g", "batt"))
    return {"AC": AC, "Battery": BATTERY}[found[1]] if found else UNKNOWN


def chip() -> str:
    """The processor's name, from /proc."""
    names = set(re.findall(r"^model name\s*:\s*(.+)$", _read(PROC / "cpuinfo"), re.MULTILINE))
    return ", ".join(sorted(names)) or platform.processor() or UNKNOWN


def memory() -> str:
    """All memory, from /proc."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(PROC / "meminfo"), re.MULTILINE)
    return _gibibytes(1024 * int(found[1])) if found else UNKNOWN


def os_version() -> str:
    """Such as "Debian GNU/Linux 12 (bookworm)"."""
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read(OS_RELEASE), re.MULTILINE)
    return found[1] if found else platform.system()


def power() -> str:
    """The mains or the battery, from /sys."""
    supplies = list(POWER_SUPPLY.iterdir()) if POWER_SUPPLY.is_dir() else []
    if any(_read(supply / "online").strip() == "1" for supply in supplies):
        return AC
    drained = [
        supply for supply in supplies
        if (_read(supply / "type").strip(), _read(supply / "status").strip())
        == ("Battery", "Discharging")
    ]  # fmt: skip
    return BATTERY if drained else UNKNOWN


def commit() -> str:
    """The checkout's git commit, and whether tracked files differ from it."""
    git = ("git", "-C", str(CHECKOUT))
    name = output_of(*git, "rev-parse", "--short=12", "HEAD")
    if not (CHECKOUT / ".git").exists() or not name:
        return UNKNOWN
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if changed else name


def package_version(name: str) -> str:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return __version__ if name == "ssmlx" else UNKNOWN


def _read(path: Path) -> str:
    """A small text file; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
