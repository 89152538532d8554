"""Formats the report of `perf.bench` as text."""

from collections.abc import Iterator
from functools import partial

from ssmlx.generation.memory import MIB
from ssmlx.report import Columns, align_rows, table

from ..run.show import Result, Row, figure_cell, same_tokens_cell
from ..run.statistics import FEW

NOTES = (
    "[95 % bootstrap intervals] over prompts, systems in turns, greedy and on the same weights; "
    "rates are medians, first tokens means; whole: with the time to the first token",
    "mlx-lm: its stream_generate; default: without any option; peak: weights and the "
    "most beside them; attention kernel: rows x keys at most, MLX's time and the kernel's",
)


def format_text_report(result: Result) -> str:
    found = result["machine"]
    heading = [
        f"{found['machine']}, {found['memory']}, {found['os']}, power: {found['power']}",
        f"{result['model']}, {result['weights']}, {found['device']}; mlx {found['mlx']}, mlx-lm "
        f"{found['mlx-lm']}, ssmlx {found['ssmlx']} ({found['commit']}), Python {found['python']}",
    ]
    notes = [*NOTES]
    if any(task["prompts"] < FEW for task in result["answers"]):
        notes.append(f"fewer than {FEW} prompts: intervals are narrower than they should be")
    if result["left_out"]:
        notes.append(f"not measured, as time was short: {', '.join(result['left_out'])}")
    took = f"took {result['seconds'] / 60:.1f} of {result['minutes']:g} minutes"
    notes.append(f"{took}; load: {result['load']}")
    blocks = [
        heading,
        [*_machine_lines(result)],
        *(_adapter_table(task) for task in result["answers"]),
        [*map(_context_line, result["contexts"])],
        _learned_cost_lines(result),
        notes,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _machine_lines(result: Result) -> Iterator[str]:
    rows = result["rows"]
    launches = result["launches"]
    yield (
        f"== rows of a whole forward, {rows['bits']}-bit weights, after {rows['context']} tokens: "
        f"medians of {rows['turns']} turns, {rows['noise']:.0%} noise"
    )
    yield from align_rows(
        [
            ["rows", *map(str, rows["rows"])],
            ["ms", *(f"{1e3 * one:.1f}" for one in rows["seconds"])],
            ["T(n)/T(1)", *(f"{one:.2f}" for one in rows["ratios"])],
        ]
    )
    yield (
        f"a launch: {1e6 * rows['launch']:.2f} us; "
        f"the host reads {launches['reads']:g} times a step"
    )
    straight, paused = (
        f"{1e3 * launches[f'{name}_seconds']:.1f} ms, {launches[f'{name}_peak'] / MIB:.1f} MiB"
        for name in ("straight", "paused")
    )
    copied = launches["straight_peak"] >= launches["paused_peak"] + launches["layer"]
    yield (
        f"a step: {straight} at the peak; with a pause before each {paused}; a layer's cache, "
        f"{launches['layer'] / MIB:.1f} MiB, is {'COPIED' if copied else 'written in place'}"
    )
    shapes = ", ".join(map(_kernel_trial_text, result["trials"]))
    yield f"attention kernel: {shapes or 'no trial without Metal'}"


def _learned_cost_lines(result: Result) -> list[str]:
    rows = result["learned"]
    adapter = result["answers"][-1]["adapter"]
    title = f"== what default decoding has learned of calls with {adapter}"
    return [title, *align_rows(rows)] if rows else []


def _kernel_trial_text(one: Row) -> str:
    """Format a trial: rows x keys, microseconds of MLX and of the kernel, whether it is used."""
    shape = f"{one['rows']}x{one['keys']}"
    end = "used" if one["taken"] else "not used"
    mlx = 1e6 * one["seconds"]
    return (
        f"{shape} {mlx:.0f}/{mlx / one['gain']:.0f} us {end}" if one["agrees"] else f"{shape} WRONG"
    )


def _adapter_table(task: Row) -> list[str]:
    """Format the table; figures have intervals if there is more than one prompt."""
    count = task["prompts"]
    what = f"{count} prompt{'s' * (count != 1)}, at most {task['max_tokens']} tokens"
    if task["is_cold"]:
        what += "; the first round alone, not warmed up"
    cell = partial(figure_cell, with_interval=count > 1)
    columns: Columns = {
        "system": lambda row: row["name"],
        "decode tokens/s": cell("decode_rate", 1),
        "over mlx-lm": cell("speedup", 2),
        "over plain": cell("over_plain", 2),
        "whole, over plain": cell("latency_over_plain", 2),
        "tokens/call": lambda row: f"{row['tokens_per_call']['value']:.2f}",
        "first token, ms": cell("first_token_seconds", 0, 1e3),
        "peak, MiB": lambda row: f"{_weights_and_peak_bytes(task, row) / MIB:.1f}",
        "same as plain": same_tokens_cell(count),
    }
    return [
        f"== {task['adapter']} (scope {task['scope']}): {what}",
        *table(columns, task["systems"]),
    ]


def _context_line(task: Row) -> str:
    speedup = figure_cell("speedup", with_interval=task["prompts"] > 1)
    shown = [
        f"{row['name']} {speedup(row)}, prefill {prompt_tokens_per_second(task, row):.0f}"
        for row in task["systems"]
    ]
    where = f"{task['adapter']} after {task['tokens']} tokens of context"
    return f"{where}, over mlx-lm, and prompt tokens/s: {'; '.join(shown)}"


def _weights_and_peak_bytes(task: Row, row: Row) -> int:
    return int(task["target_bytes"] + row["peak_bytes"])


def prompt_tokens_per_second(context: Row, row: Row) -> float:
    """A context's tokens over the mean seconds until the first token."""
    return float(context["tokens"] / row["first_token_seconds"]["value"])
