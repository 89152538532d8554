"""Energy a token by macOS's `powermetrics`, which wants root and says so where it cannot run."""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import IO

from ssmlx.calibration.timing import Answer
from ssmlx.tuning.machine import output_of

INTERVAL_MS = 250
COMMAND = ("sudo", "-n", "powermetrics", "--samplers", "cpu_power,gpu_power", "-i")
_POWER = re.compile(r"^Combined Power \(CPU \+ GPU \+ ANE\): *([\d.]+) *(m?)W", re.MULTILINE)

Answerer = Callable[[list[int]], Answer]
Sampler = Callable[[int, IO[str]], "subprocess.Popen[str]"]


def unavailable() -> str | None:
    """Why there is no energy to be measured here; None where there is.

    Needs a password that was typed not long ago (`sudo -v`), or a rule that asks for none.
    """
    if platform.system() != "Darwin":
        return "not measured: needs macOS"
    said = output_of(*COMMAND, "100", "-n", "1")
    if not said:
        return "not measured: needs sudo"
    return None if watts_of(said) else "not measured: powermetrics names no combined power"


def watts_of(text: str) -> list[float]:
    """The power of CPU, GPU and Neural Engine in each sample of what powermetrics prints."""
    return [float(value) / (1000 if milli else 1) for value, milli in _POWER.findall(text)]


def start_sampler(samples: int, output: IO[str]) -> subprocess.Popen[str]:
    """powermetrics for so many samples: it ends by itself, since root's cannot be stopped."""
    command = [*COMMAND, str(INTERVAL_MS), "-n", str(samples)]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True)


def energy_of(
    answer: Answerer,
    prompts: Sequence[list[int]],
    seconds: float,
    sampler: Sampler = start_sampler,
) -> dict[str, float] | None:
    """Watts, and joules a token, prompts included, of a warm system that answers prompt after
    prompt while power is sampled; None where no sample can be read."""
    tokens, turn = 0, 0
    # A file: a pipe that nobody empties would stop the sampler.
    with tempfile.TemporaryFile("w+") as output:
        process = sampler(max(1, round(1000 * seconds / INTERVAL_MS)), output)
        started = time.perf_counter()
        while process.poll() is None and time.perf_counter() - started < 3 * seconds:
            tokens += len(answer(prompts[turn % len(prompts)]).tokens)
            turn += 1
        elapsed = time.perf_counter() - started
        output.seek(0)
        watts = watts_of(output.read())
    if not watts or not tokens:
        return None
    return {"watts": mean(watts), "joules_per_token": mean(watts) * elapsed / tokens}
