"""What `perf.bench` says: a report, a picture, and one line of JSON for a table of machines."""

import json
from pathlib import Path
from typing import Any

from ssmlx.memory import LABELS, MIB, Memory
from ssmlx.tuning.report import Columns, table

from ..run.show import TOKENS_PER_CALL, Cell, Panel, Row, draw_tasks, interval, same_text
from ..run.statistics import FEW

WEIGHTS = ("base", "lora", "streams", "draft_head")
NOTES = (
    "[95 % bootstrap intervals]; rates are medians over prompts, first tokens means, systems "
    "taking turns in an order that rotates, each greedy and on the same weights",
    "mlx-lm: its own stream_generate; streaming: as ssmlx decodes here by default, tuned where "
    "ssmlx.calibrate was run; prefill: the prompt over the time to the first token; peak: weights "
    "that the system needs, and the most in use beside them",
)


def report(result: Row) -> str:
    """The result as text."""
    found = result["machine"]
    heading = [
        f"{found['machine']}, {found['memory']}, {found['os']}, power: {found['power']}",
        f"{result['model']}, {result['weights']}, {found['device']}; mlx {found['mlx']}, mlx-lm "
        f"{found['mlx-lm']}, ssmlx {found['ssmlx']} ({found['commit']}), Python {found['python']}",
    ]
    notes = [*NOTES, f"load: {result['load']}"]
    if any(task["prompts"] < FEW for task in result["answers"]):
        notes.append(f"fewer than {FEW} prompts: intervals are narrower than they should be")
    if result["left_out"]:
        notes.append(f"not measured, for want of time: {', '.join(result['left_out'])}")
    notes.append(f"took {result['seconds'] / 60:.1f} of {result['minutes']:g} minutes")
    blocks = [
        heading,
        *(_block(task) for task in (*result["answers"], *result["contexts"])),
        [_launches_line(result["launches"])],
        [*_energy_lines(result["energy"]), *(_memory_line(task) for task in result["answers"])],
        notes,
        ["for a shared table:", line(result)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _block(task: Row) -> list[str]:
    """Answers of an adapter, or those behind a length of context."""
    rounds = f"{task['prompts']} {'round' if 'tokens' in task else 'prompt'}"
    what = f"{rounds}{'s' * (task['prompts'] != 1)}, at most {task['max_tokens']} tokens"
    if "drafting" in task:
        what += f"; {task['drafting']}"
    if task["is_cold"]:
        what += "; the first round alone, not warmed up"
    columns: Columns = {
        "system": lambda row: row["name"],
        "decode tokens/s": _interval(task, "decode_rate", 1),
        "over mlx-lm": _interval(task, "speedup", 2),
        "tokens/call": lambda row: f"{row['tokens_per_call']['value']:.2f}",
        "ms a call": lambda row: f"{1e3 * row['call_seconds']:.1f}" if row["call_seconds"] else "-",
        "first token, ms": _interval(task, "first_token_seconds", 0, 1e3),
    }
    if "tokens" in task:
        columns = {**columns, "prefill tokens/s": lambda row: f"{prefill_rate(task, row):.0f}"}
    columns = {
        **columns,
        "peak, MiB": lambda row: f"{_peak(task, row) / MIB:.1f}",
        "same tokens as plain": same_text(task["prompts"]),
    }
    return [f"== {_name(task)} (scope {task['scope']}): {what}", *table(columns, task["systems"])]


def _name(task: Row) -> str:
    context = f" behind {task['tokens']} tokens of context" if "tokens" in task else ""
    return f"{task['adapter']}{context}"


def _interval(task: Row, name: str, digits: int, scale: float = 1.0) -> Cell:
    """A cell with a figure, with its interval where more than one was measured."""

    def cell(row: Row) -> str:
        text = interval(row[name], digits, scale) if row[name] else "-"
        return text if task["prompts"] > 1 else text.partition(" ")[0]

    return cell


def _peak(task: Row, row: Row) -> int:
    """Weights that a system needs, and the most in use beside them."""
    return int(task["target_bytes"] + row["peak_bytes"])


def prefill_rate(context: Row, row: Row) -> float:
    """Tokens/s until the first token."""
    return float(context["tokens"] / row["first_token_seconds"]["value"])


def _energy_lines(energy: Any) -> list[str]:
    """Joules a token, or why there are none."""
    if isinstance(energy, str):
        return [f"energy: {energy}"]
    return [
        f"energy, {name}: {one['joules_per_token']:.3f} J a token at {one['watts']:.1f} W"
        for name, one in energy.items()
    ]


def _launches_line(found: Row) -> str:
    """Whether caches were written in place, and what tells it."""
    straight, paused = (
        f"{1e3 * found[f'{name}_seconds']:.1f} ms a step and {found[f'{name}_peak'] / MIB:.1f} MiB"
        for name in ("straight", "paused")
    )
    copied = found["straight_peak"] >= found["paused_peak"] + found["layer"]
    return (
        f"launches: {straight} at the peak, with a pause before each {paused}; a layer's cache, "
        f"{found['layer'] / MIB:.1f} MiB, is {'COPIED' if copied else 'written in place'}"
    )


def _memory_line(task: Row) -> str:
    """What streaming keeps beside plain decoding, part by part."""
    parts = Memory(**task["memory"]).parts
    shown = [f"{LABELS[name]} {parts[name] / MIB:.1f}" for name in WEIGHTS if parts[name]]
    _, plain, streaming = (_peak(task, row) for row in task["systems"])
    return (
        f"memory, {task['adapter']}: weights in MiB: {', '.join(shown)}; streaming's peak is "
        f"{streaming / plain - 1:+.1%} on plain decoding's"
    )


def line(result: Row) -> str:
    """The result in one line of flat JSON; null is what was not measured."""
    found, energy = result["machine"], result["energy"]
    names = ("memory", "os", "power", "mlx", "mlx-lm", "ssmlx", "commit")
    values: dict[str, Any] = {
        "bench": 1,
        "date": result["date"],
        "chip": found["machine"].partition(", ")[2],
        **{name: found[name] for name in names},
        "model": result["model"],
        "weights": result["weights"],
    }
    for name in ("straight", "paused"):
        values[f"step_ms_{name}"] = round(1e3 * result["launches"][f"{name}_seconds"], 2)
        values[f"step_peak_mib_{name}"] = round(result["launches"][f"{name}_peak"] / MIB, 1)
    for task in result["answers"]:
        values |= _answers_values(task)
    for one in result["contexts"]:
        for row in one["systems"]:
            label = f"context{one['tokens']}_%s_{_key(row)}"
            values[label % "tps"] = round(row["tokens_per_second"], 1)
            values[label % "prefill"] = round(prefill_rate(one, row), 1)
    for row in result["answers"][0]["systems"]:
        joules = None if isinstance(energy, str) else energy[row["name"]]["joules_per_token"]
        values[f"joules_per_token_{_key(row)}"] = joules and round(joules, 4)
    return json.dumps(values, separators=(",", ":"))


def _key(row: Row) -> str:
    return str(row["name"]).replace("-", "_")


def _answers_values(task: Row) -> dict[str, Any]:
    """A task's columns."""
    name, rows = task["adapter"], task["systems"]
    values: dict[str, Any] = {f"{name}_prompts": task["prompts"]}
    for row in rows:
        first = 1e3 * row["first_token_seconds"]["value"]
        values[f"{name}_tps_{_key(row)}"] = round(row["tokens_per_second"], 1)
        values[f"{name}_first_ms_{_key(row)}"] = round(first, 1)
        values[f"{name}_peak_mib_{_key(row)}"] = round(_peak(task, row) / MIB, 1)
    over, calls = rows[-1]["speedup"], rows[-1]["tokens_per_call"]["value"]
    for end, label in (("value", ""), ("low", "_low"), ("high", "_high")):
        is_known = over and (end == "value" or task["prompts"] > 1)
        values[f"{name}_speedup{label}"] = round(over[end], 3) if is_known else None
    same = all(row["same_as_plain"] == task["prompts"] for row in rows)
    return {**values, f"{name}_tokens_per_call": round(calls, 3), f"{name}_same_tokens": same}


def draw(result: Row, path: Path) -> None:
    """The picture: a row for each adapter, and for each length of context."""
    tasks = [
        {**one, "task": _name(one), "adapter": None}
        for one in (*result["answers"], *result["contexts"])
    ]
    rate = Panel("decode tokens/s", lambda row: row["decode_rate"], digits=1)
    found = result["machine"]
    title = (
        f"{found['machine']}, {found['memory']}; {result['model']}, {result['weights']}; mlx "
        f"{found['mlx']}\n95 % intervals; systems take turns"
    )
    draw_tasks(tasks, [rate, TOKENS_PER_CALL], title, path)
