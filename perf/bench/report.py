"""What `perf.bench` says: a report, and one line of JSON for a table of many machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ssmlx.memory import LABELS, MIB, Memory
from ssmlx.tuning.report import aligned

from ..run.metrics import FEW, estimate
from .target import SYSTEMS

Row = Mapping[str, Any]
WEIGHTS = ("base", "lora", "streams", "draft_head")
NOTES = (
    "[95 % bootstrap intervals]; medians over prompts, systems taking turns in an order that "
    "rotates, each greedy and on the same weights",
    "mlx-lm: its own stream_generate; streaming: as ssmlx decodes here by default, tuned where "
    "ssmlx.calibrate was run; prefill: the prompt over the time to the first token; peak: weights "
    "that the system needs, and the most in use beside them",
)


def report(result: Row) -> str:
    """The result as text."""
    blocks = [heading(result)]
    for task in result["answers"]:
        blocks.append([task_heading(task), *answers_table(task)])
    if result["contexts"]:
        blocks.append([context_heading(result), *contexts_table(result)])
    blocks += [energy_lines(result), memory_lines(result), notes(result)]
    paste = ["for a shared table:", line(result)]
    return "\n\n".join("\n".join(block) for block in [*blocks, paste] if block)


def heading(result: Row) -> list[str]:
    """What was measured, and on what."""
    found = result["machine"]
    return [
        f"{found['machine']}, {found['memory']}, {found['os']}, power: {found['power']}",
        f"{result['model']}, {result['weights']}, {found['device']}; mlx {found['mlx']}, mlx-lm "
        f"{found['mlx-lm']}, ssmlx {found['ssmlx']} ({found['commit']}), Python {found['python']}",
    ]


def task_heading(task: Row) -> str:
    """What the answers were to."""
    prompts = counted(task["prompts"], "prompt")
    return (
        f"== {task['adapter']} (scope {task['scope']}): {prompts}, at most {task['max_tokens']} "
        f"tokens; {task['drafting']}{cold_mark(task)}"
    )


def counted(number: int, what: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {what}{'s' * (number != 1)}"


def interval(values: Mapping[str, float], number: int, digits: int) -> str:
    """A figure, with its interval where more than one was measured."""
    one = estimate(values)
    return one.text(digits) if number > 1 else f"{one.value:.{digits}f}"


def cold_mark(measured: Row) -> str:
    """A warning where there was time for the first round alone."""
    return "; the first round alone, not warmed up" if measured["is_cold"] else ""


def answers_table(task: Row) -> list[str]:
    """A line for each system."""
    head = [
        "system", "decode tokens/s", "over mlx-lm", "tokens/call", "first token, ms", "peak, MiB",
        "same tokens as plain",
    ]  # fmt: skip
    return aligned([head, *(answers_cells(task, name) for name in SYSTEMS)])


def answers_cells(task: Row, name: str) -> list[str]:
    """A system's line."""
    row, over, number = task["systems"][name], task["speedup"].get(name), task["prompts"]
    first = {key: 1e3 * value for key, value in row["first_token_seconds"].items()}
    return [
        name,
        interval(row["tokens_per_second"], number, 1),
        interval(over, number, 2) if over else "1.00" if name == "mlx-lm" else "-",
        f"{row['tokens_per_call']['value']:.2f}",
        interval(first, number, 0),
        f"{row['peak_bytes'] / MIB:.1f}",
        f"{task['same_tokens'][name]} of {task['prompts']}",
    ]


def context_heading(result: Row) -> str:
    """What the speeds by context are of."""
    measured = ", ".join(
        f"{one['tokens']} ({counted(one['rounds'], 'round')}{', cold' if one['is_cold'] else ''})"
        for one in result["contexts"]
    )
    return f"== by tokens of context: {measured}; {result['context_tokens']} tokens written"


def contexts_table(result: Row) -> list[str]:
    """A line for each length and system."""
    rows = [["context", "prefill tokens/s", "decode tokens/s", "tokens/call", "ms a call"]]
    for one in result["contexts"]:
        for name in SYSTEMS:
            row = one["systems"][name]
            rows.append([
                f"{one['tokens']:5} {name}",
                interval(row["prefill_tokens_per_second"], one["rounds"], 0),
                interval(row["tokens_per_second"], one["rounds"], 1),
                f"{row['tokens_per_call']:.2f}",
                f"{1e3 * row['call_seconds']:.1f}",
            ])  # fmt: skip
    return aligned(rows)


def energy_lines(result: Row) -> list[str]:
    """Joules a token, or why there are none."""
    energy = result["energy"]
    if isinstance(energy, str):
        return [f"energy: {energy}"]
    return [
        f"energy, {name}: {one['joules_per_token']:.3f} J a token at {one['watts']:.1f} W"
        for name, one in energy.items()
    ]


def memory_lines(result: Row) -> list[str]:
    """What streaming keeps beside plain decoding, part by part."""
    lines = []
    for task in result["answers"]:
        parts = Memory(**task["memory"]).parts
        weights = ", ".join(
            f"{LABELS[name]} {parts[name] / MIB:.1f}" for name in WEIGHTS if parts[name]
        )
        peaks = {name: row["peak_bytes"] for name, row in task["systems"].items()}
        over = peaks["streaming"] / peaks["plain"] - 1
        lines.append(
            f"memory, {task['adapter']}: weights in MiB: {weights}; streaming's peak is "
            f"{over:+.1%} on plain decoding's"
        )
    return lines


def notes(result: Row) -> list[str]:
    """How to read the rest, what is missing, and how long it took."""
    lines = list(NOTES)
    if any(task["prompts"] < FEW for task in result["answers"]):
        lines.append(f"fewer than {FEW} prompts: intervals are narrower than they should be")
    if result["left_out"]:
        lines.append(f"not measured, for want of time: {', '.join(result['left_out'])}")
    return [*lines, f"took {result['seconds'] / 60:.1f} of {result['minutes']:g} minutes"]


def line(result: Row) -> str:
    """The result in one line of flat JSON; null is what was not measured."""
    found = result["machine"]
    values: dict[str, Any] = {
        "bench": 1,
        "date": result["date"],
        "chip": found["machine"].partition(", ")[2],
        **{name: found[name] for name in ("memory", "os", "power", "mlx", "mlx-lm", "ssmlx")},
        "commit": found["commit"],
        "model": result["model"],
        "weights": result["weights"],
    }
    for task in result["answers"]:
        values |= answers_values(task)
    for one in result["contexts"]:
        values |= context_values(one)
    energy = result["energy"]
    for name in SYSTEMS:
        joules = None if isinstance(energy, str) else round(energy[name]["joules_per_token"], 4)
        values[f"joules_per_token_{key(name)}"] = joules
    return json.dumps(values, separators=(",", ":"))


def key(system: str) -> str:
    """A system's name as part of a column's."""
    return system.replace("-", "_")


def answers_values(task: Row) -> dict[str, Any]:
    """A task's columns."""
    name, rows, over = task["adapter"], task["systems"], task["speedup"]["streaming"]
    values: dict[str, Any] = {f"{name}_prompts": task["prompts"]}
    for system, row in rows.items():
        values[f"{name}_tps_{key(system)}"] = round(row["tokens_per_second"]["value"], 1)
        first = 1e3 * row["first_token_seconds"]["value"]
        values[f"{name}_first_ms_{key(system)}"] = round(first, 1)
        values[f"{name}_peak_mib_{key(system)}"] = round(row["peak_bytes"] / MIB, 1)
    for end, label in (("value", ""), ("low", "_low"), ("high", "_high")):
        is_known = over and (end == "value" or task["prompts"] > 1)
        values[f"{name}_speedup{label}"] = round(over[end], 3) if is_known else None
    calls = rows["streaming"]["tokens_per_call"]["value"]
    same = all(count == task["prompts"] for count in task["same_tokens"].values())
    return {**values, f"{name}_tokens_per_call": round(calls, 3), f"{name}_same_tokens": same}


def context_values(one: Row) -> dict[str, Any]:
    """A length's columns."""
    values = {}
    for system, row in one["systems"].items():
        for name, column in (
            ("tps", "tokens_per_second"),
            ("prefill", "prefill_tokens_per_second"),
        ):
            label = f"context{one['tokens']}_{name}_{key(system)}"
            values[label] = round(row[column]["value"], 1)
    return values
