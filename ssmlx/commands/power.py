"""What supplies the machine with power."""

import os
import platform
import subprocess
from pathlib import Path

UNKNOWN = "unknown"
POWER_SUPPLY = Path("/sys/class/power_supply")


def power_source_or_unknown() -> str:
    """What supplies the machine with power, by pmset on macOS, elsewhere by Linux's list of power
    supplies."""
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


def command_output_or_empty(*command: str) -> str:
    """What a command prints; empty if it is missing, fails, or takes over 10 s."""
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


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
