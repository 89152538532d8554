"""What `perf.bench` says: a report, a picture, and one line of JSON for a table of machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssmlx.memory import LABELS, MIB, Memory
from ssmlx.tuning.report import Columns, new_figure, table

from ..run.show import COLOURS, Panel, Row, draw_panel, interval, same_text
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
    blocks = [heading, *(_answers_block(task) for task in result["answers"])]
    if result["contexts"]:
        blocks.append(_contexts_block(result))
    blocks += [_energy_lines(result), _memory_lines(result), _note_lines(result)]
    paste = ["for a shared table:", line(result)]
    return "\n\n".join("\n".join(block) for block in [*blocks, paste])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _interval(values: Row | None, task: Row, digits: int, scale: float = 1.0) -> str:
    """A figure, with its interval where more than one was measured."""
    if values is None:
        return "-"
    text = interval(values, digits, scale)
    return text if task["prompts"] > 1 else text.partition(" ")[0]


def _answers_block(task: Row) -> list[str]:
    cold = "; the first round alone, not warmed up" if task["is_cold"] else ""
    columns: Columns = {
        "system": lambda row: row["name"],
        "decode tokens/s": lambda row: _interval(row["decode_rate"], task, 1),
        "over mlx-lm": lambda row: _interval(row["speedup"], task, 2),
        "tokens/call": lambda row: f"{row['tokens_per_call']['value']:.2f}",
        "first token, ms": lambda row: _interval(row["first_token_seconds"], task, 0, 1e3),
        "peak, MiB": lambda row: f"{_peak(task, row) / MIB:.1f}",
        "same tokens as plain": same_text(task["prompts"]),
    }
    heading = (
        f"== {task['adapter']} (scope {task['scope']}): {_counted(task['prompts'], 'prompt')}, at "
        f"most {task['max_tokens']} tokens; {task['drafting']}{cold}"
    )
    return [heading, *table(columns, task["systems"])]


def _contexts_block(result: Row) -> list[str]:
    measured = ", ".join(
        f"{one['tokens']} ({_counted(one['prompts'], 'round')}{', cold' if one['is_cold'] else ''})"
        for one in result["contexts"]
    )
    columns: Columns = {
        "context": lambda row: f"{row['of']['tokens']:5} {row['name']}",
        "prefill tokens/s": lambda row: f"{prefill_rate(row['of'], row):.0f}",
        "decode tokens/s": lambda row: _interval(row["decode_rate"], row["of"], 1),
        "tokens/call": lambda row: f"{row['tokens_per_call']['value']:.2f}",
        "ms a call": lambda row: f"{1e3 * row['call_seconds']:.1f}",
    }
    rows = [{**row, "of": one} for one in result["contexts"] for row in one["systems"]]
    heading = f"== by tokens of context: {measured}; {result['context_tokens']} tokens written"
    return [heading, *table(columns, rows)]


def _peak(task: Row, row: Row) -> int:
    """Weights that a system needs, and the most in use beside them."""
    return int(task["target_bytes"] + row["peak_bytes"])


def prefill_rate(context: Row, row: Row) -> float:
    """Tokens/s until the first token."""
    return float(context["tokens"] / row["first_token_seconds"]["value"])


def _energy_lines(result: Row) -> list[str]:
    """Joules a token, or why there are none."""
    energy = result["energy"]
    if isinstance(energy, str):
        return [f"energy: {energy}"]
    return [
        f"energy, {name}: {one['joules_per_token']:.3f} J a token at {one['watts']:.1f} W"
        for name, one in energy.items()
    ]


def _memory_lines(result: Row) -> list[str]:
    """What streaming keeps beside plain decoding, part by part."""
    lines = []
    for task in result["answers"]:
        parts = Memory(**task["memory"]).parts
        weights = ", ".join(
            f"{LABELS[name]} {parts[name] / MIB:.1f}" for name in WEIGHTS if parts[name]
        )
        _, plain, streaming = (_peak(task, row) for row in task["systems"])
        lines.append(
            f"memory, {task['adapter']}: weights in MiB: {weights}; streaming's peak is "
            f"{streaming / plain - 1:+.1%} on plain decoding's"
        )
    return lines


def _note_lines(result: Row) -> list[str]:
    """How to read the rest, what is missing, and how long it took."""
    lines = [*NOTES, f"load: {result['load']}"]
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
        values |= _answers_values(task)
    for one in result["contexts"]:
        for row in one["systems"]:
            label = f"context{one['tokens']}_%s_{_key(row)}"
            values[label % "tps"] = round(row["tokens_per_second"], 1)
            values[label % "prefill"] = round(prefill_rate(one, row), 1)
    energy = result["energy"]
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
    """The picture: answers above, speeds by length of context below."""
    tasks, contexts, found = result["answers"], result["contexts"], result["machine"]
    columns = max(2, len(tasks))
    picture = new_figure(4.6 * columns, 5.6 if contexts else 2.9)
    grid = picture.add_gridspec(2 if contexts else 1, columns)
    for place, task in enumerate(tasks):
        spot = grid[0, place] if len(tasks) > 1 else grid[0, :]
        _draw_task(task, picture.add_subplot(spot))
    if contexts:
        rate = "decode tokens/s"
        _draw_contexts(contexts, picture.add_subplot(grid[1, 0]), rate, decode_rate)
        _draw_contexts(contexts, picture.add_subplot(grid[1, 1]), "prefill tokens/s", prefill_rate)
    picture.suptitle(
        f"{found['machine']}, {found['memory']}; {result['model']}, {result['weights']}; mlx "
        f"{found['mlx']}\n95 % intervals; systems take turns",
        fontsize=9,
    )
    picture.savefig(path, dpi=150)


def decode_rate(context: Row, row: Row) -> float:
    """Tokens/s behind the first."""
    return float(row["tokens_per_second"])


def _draw_task(task: Row, axes: Any) -> None:
    """Decode tokens/s of each system, and what they are over mlx-lm's."""
    draw_panel(axes, task, Panel("decode tokens/s", lambda row: row["decode_rate"], digits=1))
    over, calls = task["systems"][-1]["speedup"], task["systems"][-1]["tokens_per_call"]["value"]
    gain = f": {_interval(over, task, 2)} times mlx-lm" if over else ""
    title = f"{task['adapter']}, {_counted(task['prompts'], 'prompt')}{gain}"
    axes.set_title(f"{title}\n{calls:.2f} tokens a call", loc="left", fontsize=9)


def _draw_contexts(contexts: Any, axes: Any, label: str, rate: Callable[[Row, Row], float]) -> None:
    """A line for each system over the lengths."""
    lengths = [one["tokens"] for one in contexts]
    for place, row in enumerate(contexts[0]["systems"]):
        rates = [rate(one, one["systems"][place]) for one in contexts]
        axes.plot(lengths, rates, label=row["name"], color=COLOURS[row["kind"]], marker="o", ms=4)
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens of context", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
