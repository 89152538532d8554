"""Describes where and with what a figure was measured; unavailable values are "unknown"."""

import os
import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from ssmlx import __version__
from ssmlx.blas import blas_name
from ssmlx.commands.power import UNKNOWN, command_output_or_empty, power_source_or_unknown

ROOT = Path(__file__).parents[2]  # of the checkout
_TIMED_ON = ("machine", "device", "blas", "mlx", "mlx-lm", "transformers", "power")
PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy", "ssmlx")


def describe_machine() -> dict[str, str]:
    chip = mx.device_info(mx.cpu).get("device_name") or UNKNOWN
    return {
        "machine": f"{platform.system()} {platform.machine()}, {chip}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.3g} GiB",
        "os": _system_name(),
        "power": power_source_or_unknown(),
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        "blas": blas_name(),
        **{name: _package_version_or_unknown(name) for name in PACKAGES},
        "commit": _git_commit_or_unknown(),
    }


@lru_cache(maxsize=1)
def timing_environment() -> dict[str, str]:
    """What times depend on in addition to the code."""
    found = describe_machine()
    return {name: found[name] for name in _TIMED_ON}


def machine_load_text() -> str:
    """The load of the last minute, as `1.4 of 2 cores busy when it began`."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores busy when it began"


def _system_name() -> str:
    """The system's name, as "macOS 15.1" or "Debian GNU/Linux 12 (bookworm)"; else the kernel's."""
    if macos := platform.mac_ver()[0]:
        return f"macOS {macos}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _git_commit_or_unknown() -> str:
    """The commit's first 12 digits, with ", changed" if tracked files differ from it."""
    git = ("git", "-C", str(ROOT))
    name = command_output_or_empty(*git, "rev-parse", "--short=12", "HEAD")
    if not (ROOT / ".git").exists() or not name:
        return UNKNOWN
    changed = command_output_or_empty(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if changed else name


def _package_version_or_unknown(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return __version__ if name == "ssmlx" else UNKNOWN
