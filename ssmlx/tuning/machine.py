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
CHECKOUT = Path(__file__).parents[2]
POWER_SUPPLY = Path("/sys/class/power_supply")
PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy", "ssmlx")


def machine() -> dict[str, str]:
    """Chip, memory, system, power, and the versions of everything that takes part."""
    chip, size, system = _mac() if platform.system() == "Darwin" else _linux()
    return {
        "machine": f"{platform.system()} {platform.machine()}, {chip}",
        "memory": f"{size / 2**30:.3g} GiB" if size else UNKNOWN,
        "os": system,
        "power": power_source(),
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        "blas": "OpenBLAS or Accelerate" if has_fast_blas else f"reference ({HINT})",
        **{name: _package_version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def power_source() -> str:
    """ "AC power", "battery" or "unknown"."""
    if platform.system() == "Darwin":
        drawn = _found(r"drawing from '(AC|Battery) Power'", output_of("pmset", "-g", "batt"))
        return {"AC": "AC power", "Battery": "battery"}.get(drawn, UNKNOWN)
    supplies = list(POWER_SUPPLY.iterdir()) if POWER_SUPPLY.is_dir() else []
    if any(_read(supply / "online") == "1" for supply in supplies):
        return "AC power"
    states = [(_read(supply / "type"), _read(supply / "status")) for supply in supplies]
    return "battery" if ("Battery", "Discharging") in states else UNKNOWN


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


def _mac() -> tuple[str, int, str]:
    """The chip, bytes of memory, and the system, such as "macOS 15.1 (24B83)"."""
    versions = output_of("sw_vers")
    name, build = (_found(rf"{one}Version:\s*(\S+)", versions) for one in ("Product", "Build"))
    size = output_of("sysctl", "-n", "hw.memsize")
    return (
        output_of("sysctl", "-n", "machdep.cpu.brand_string") or UNKNOWN,
        int(size) if size.isdigit() else 0,
        f"macOS {name} ({build})" if name else UNKNOWN,
    )


def _linux() -> tuple[str, int, str]:
    """As `_mac`; the system such as "Debian GNU/Linux 12 (bookworm)"."""
    chips = set(re.findall(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE))
    system = _found(r'^PRETTY_NAME="?([^"\n]+)', _read(Path("/etc/os-release")))
    return (
        ", ".join(sorted(chips)) or platform.processor() or UNKNOWN,
        1024 * int(_found(r"^MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo"))) or 0),
        system or platform.system(),
    )


def _commit() -> str:
    """The checkout's git commit, and whether tracked files differ from it."""
    git = ("git", "-C", str(CHECKOUT))
    name = output_of(*git, "rev-parse", "--short=12", "HEAD")
    if not (CHECKOUT / ".git").exists() or not name:
        return UNKNOWN
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if changed else name


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return __version__ if name == "ssmlx" else UNKNOWN


def _found(pattern: str, text: str) -> str:
    """What the pattern's group is in `text`; nothing where it is not there."""
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _read(path: Path) -> str:
    """A small text file; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
