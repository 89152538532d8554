"""Where and with what a figure was measured. What cannot be found out is "unknown"."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from .. import __version__
from ..blas import blas_name

UNKNOWN = "unknown"
CHECKOUT = Path(__file__).parents[2]
POWER_SUPPLY = Path("/sys/class/power_supply")
PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy", "ssmlx")


def describe_machine() -> dict[str, str]:
    """Return chip, memory, system, power, MLX's device, BLAS, versions and commit, as texts by
    name.

    What cannot be found out is "unknown".
    """
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


def _system_name() -> str:
    """Return the system's name, such as "macOS 15.1" or "Debian GNU/Linux 12 (bookworm)".

    Where no name of a distribution is found, it is the kernel's, such as "Linux".
    """
    if macos := platform.mac_ver()[0]:
        return f"macOS {macos}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def command_output_or_empty(*command: str) -> str:
    """Run a command, and return what it prints on standard output, stripped.

    It is empty if the command is missing, fails, or takes over 10 s.

    Args:
        command: its words.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def power_source_or_unknown() -> str:
    """Return "AC power" where that is connected, "battery" where one is drained, else "unknown".

    On macOS pmset is asked, elsewhere Linux's list of power supplies.
    """
    if platform.system() == "Darwin":
        battery_state = command_output_or_empty("pmset", "-g", "batt")
        on_mains = "'AC Power'" in battery_state
        drained = "'Battery Power'" in battery_state
    else:
        supplies = list(POWER_SUPPLY.iterdir()) if POWER_SUPPLY.is_dir() else []
        on_mains = any(_read_or_empty(one / "online").strip() == "1" for one in supplies)
        states = [
            (_read_or_empty(one / "type").strip(), _read_or_empty(one / "status").strip())
            for one in supplies
        ]
        drained = ("Battery", "Discharging") in states
    return "AC power" if on_mains else "battery" if drained else UNKNOWN


def _git_commit_or_unknown() -> str:
    """Return the checkout's commit, 12 digits, with ", changed" if tracked files differ from it.

    "unknown" without a checkout or git.
    """
    git = ("git", "-C", str(CHECKOUT))
    name = command_output_or_empty(*git, "rev-parse", "--short=12", "HEAD")
    if not (CHECKOUT / ".git").exists() or not name:
        return UNKNOWN
    changed = command_output_or_empty(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if changed else name


def _package_version_or_unknown(name: str) -> str:
    """Return the version of an installed package, or "unknown"; ssmlx's own where it is not
    installed.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return __version__ if name == "ssmlx" else UNKNOWN


def _read_or_empty(path: Path) -> str:
    """Return the text of a small file; an empty text if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
