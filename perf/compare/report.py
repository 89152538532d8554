"""What `perf.compare` says: tables 1 and 2 with the paper's lines below, memory, and notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssmlx.tuning.report import aligned

from ..paper.published import METHODS, Latency, Span, Speed, latencies, span, speeds
from ..run.metrics import FEW, estimate

Row = Mapping[str, Any]
MIB = 2**20


def report(result: Mapping[str, Any]) -> str:
    """The result as text."""
    blocks = [[heading(result)]]
    for task in result["tasks"]:
        blocks += [
            [task_heading(task)],
            speed_table(task),
            latency_table(task),
            memory_table(task),
            task_notes(task),
        ]
    return "\n\n".join("\n".join(block) for block in [*blocks, notes(result)] if block)


def heading(result: Mapping[str, Any]) -> str:
    """What was measured, and on what."""
    machine = result["machine"]
    return (
        f"{result['model']}, {decoding_text(result)}, {result['dtype']}; {machine['machine']}, "
        f"{machine['memory']}, {machine['os']}, power: {machine['power']}; mlx {machine['mlx']}, "
        f"mlx-lm {machine['mlx-lm']}, ssmlx {machine['ssmlx']} ({machine['commit']})"
    )


def decoding_text(result: Mapping[str, Any]) -> str:
    """`greedy`, or how tokens were drawn."""
    if not result["temp"]:
        return "greedy"
    top_k = f", top-k {result['top_k']}" if result["top_k"] else ""
    return f"temperature {result['temp']:g}{top_k}, seed {result['seed']}"


def task_heading(task: Row) -> str:
    """What a task's answers were to."""
    target = {
        "all": f"the base with the LoRA of {task['adapter']} merged, for every system",
        "task": f"the base with the task's LoRA of {task['adapter']} merged, for every system",
        "streams": f"the base as it is; the adapter {task['adapter']} drafts",
        None: "the base as it is",
    }[task["scope"]]
    return (
        f"== {task['task']}: {task['prompts']} prompts of {task['data']}, at most "
        f"{task['max_tokens']} tokens an answer; target: {target}"
    )


def speed_table(task: Row) -> list[str]:
    """Table 1."""
    figures = [f"{name}, %" for name in task["figures"]]
    head = ["table 1", "speed-up over mlx-lm", "tokens/call", *figures, "extra parameters"]
    lines = [
        [
            row["name"],
            speedup_text(row),
            estimate(row["tokens_per_call"]).text(),
            *figure_cells(task, row),
            f"{row['extra_parameters']:,}" if row["extra_parameters"] else "-",
        ]
        for row in task["systems"]
    ]
    return aligned([head, *lines, *paper_lines(task, speeds, speed_cells)])


def figure_cells(task: Row, row: Row) -> list[str]:
    """A system's metric, marked where it is plain decoding's since all tokens are the same."""
    mark = " =" if row["figures_of"] != row["name"] else "  "
    return [estimate(row["figures"][name]).text(1) + mark for name in task["figures"]]


def speedup_text(row: Row) -> str:
    """A speed-up with its interval; a dash where there was nothing to time."""
    if row["kind"] == "mlx-lm":
        return "1.00"
    return "-" if row["speedup"] is None else estimate(row["speedup"]).text()


def latency_speedup_text(task: Row, row: Row) -> str:
    """How much sooner whole answers are there than mlx-lm's, prompts and all.

    A result of before it was kept has no interval.
    """
    if row["kind"] == "mlx-lm":
        return "1.00"
    if "latency_speedup" in row:
        return estimate(row["latency_speedup"]).text()
    base = next(one for one in task["systems"] if one["kind"] == "mlx-lm")
    return f"{base['latency_seconds']['value'] / row['latency_seconds']['value']:.2f}"


def latency_table(task: Row) -> list[str]:
    """Table 2, with what the latency is made of."""
    head = [
        "table 2",
        "target calls",
        "draft calls",
        "latency, ms",
        "over mlx-lm",
        "first token, ms",
        "decode, ms",
        "decode tokens/s",
    ]
    lines = [
        [
            row["name"],
            estimate(row["target_calls_per_answer"]).text(1),
            estimate(row["draft_calls_per_answer"]).text(1) if row["draft_calls"] else "-",
            milliseconds(row["latency_seconds"]),
            latency_speedup_text(task, row),
            *(milliseconds(row[f"{name}_seconds"]) for name in ("first_token", "decode")),
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in task["systems"]
    ]
    return aligned([head, *lines, *paper_lines(task, latencies, latency_cells)])


def milliseconds(values: Mapping[str, float]) -> str:
    """Seconds with their interval, as milliseconds."""
    return estimate({name: 1e3 * value for name, value in values.items()}).text(0)


def memory_table(task: Row) -> list[str]:
    """Memory beside the target's weights, and how many answers are plain decoding's."""
    head = ["beside the target", "weights, MiB", "peak, MiB", "same tokens as plain"]
    lines = [
        [
            row["name"],
            f"{row['weight_bytes'] / MIB:.1f}" if row["weight_bytes"] else "-",
            f"{row['peak_bytes'] / MIB:.1f}",
            same_text(row, task["prompts"]),
        ]
        for row in task["systems"]
    ]
    return aligned([head, *lines])


def same_text(row: Row, prompts: int) -> str:
    """How many answers are plain decoding's, token for token."""
    count = row["same_as_plain"]
    return "draws of its own" if count is None else f"{count} of {prompts}"


def paper_lines(
    task: Row,
    rows_of: Callable[[str, str], Sequence[Any]],
    cells: Callable[[Sequence[Any], int], list[str]],
) -> list[list[str]]:
    """The paper's figures for the same task, from least to most over its models."""
    kinds = {row["kind"] for row in task["systems"]}
    found = {kind: rows_of(task["task"], METHODS[kind]) for kind in METHODS if kind in kinds}
    return [
        [f"  paper: {METHODS[kind]}", *cells(rows, len(task["figures"]))]
        for kind, rows in found.items()
        if rows
    ]


def speed_cells(rows: Sequence[Speed], figures: int) -> list[str]:
    """The paper's cells of table 1; it has a single exact match, where we have two."""
    metrics = [span_text(span(column)) for column in zip(*(r.metrics for r in rows), strict=True)]
    return [
        span_text(span(row.speedup for row in rows)),
        span_text(span(row.call_reduction for row in rows)),
        *(metrics + ["-"] * figures)[:figures],
        span_text(span(row.extra_parameters for row in rows), ",.0f"),
    ]


def latency_cells(rows: Sequence[Latency], figures: int) -> list[str]:
    """The paper's cells of table 2."""
    columns = [[r.target_calls, r.draft_calls, r.milliseconds] for r in rows]
    target, draft, time = (span(column) for column in zip(*columns, strict=True))
    return [
        span_text(target),
        span_text(draft) if draft[1] else "-",
        span_text(time, ".0f"),
        *["-"] * 4,
    ]


def span_text(values: Span, form: str = ".2f") -> str:
    """`2.39 to 3.14`."""
    low, high = values
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


def task_notes(task: Row) -> list[str]:
    """What the tables of a task do not show."""
    lines = [f"{name}: left out, {why}" for name, why in task["left_out"].items()]
    for row in task["systems"]:
        lines += [f"{row['name']}: {difference_text(one)}" for one in row["differences"]]
    for row in task["systems"]:
        over = row.get("speedup_over_draft_model")
        if over:
            lines.append(f"{row['name']}: {estimate(over).text()} over the draft model's tokens/s")
    if task["draft_call_seconds"]:
        lines.append(f"draft model: {1e3 * task['draft_call_seconds']:.1f} ms a call")
    if task["prompts"] < FEW:
        lines.append(f"fewer than {FEW} prompts: the intervals are narrower than they should be")
    cut = {row["name"]: row["cut_at_max_tokens"] for row in task["systems"]}
    lines.append(f"cut at {task['max_tokens']} tokens: {cut['plain']} of plain's answers")
    return lines


def difference_text(one: Mapping[str, Any]) -> str:
    """Where an answer parts from plain decoding's, and how sure the target was there."""
    place = f"prompt {one['prompt'] + 1} parts from plain at token {one['token'] + 1}"
    if one["gap"] is None:
        return place
    tie = ", a near tie in this precision" if one["near_tie"] else ""
    return f"{place}; the target's two logits are {one['gap']:.2g} apart{tie}"


def timing_text(result: Mapping[str, Any]) -> str:
    """What intervals and times are."""
    many = "s" if result["repeats"] > 1 else ""
    return (
        f"[95 % bootstrap intervals over prompts]; times are medians of {result['repeats']} "
        f"repeat{many} an answer, systems taking turns"
    )


def notes(result: Mapping[str, Any]) -> list[str]:
    """What the columns mean."""
    return [
        timing_text(result),
        "speed-up: ratio of median decode tokens/s to mlx-lm's own stream_generate; "
        "tokens/call: the paper's call reduction",
        "latency: of whole answers, from the prompt to the last token; over mlx-lm: ratio of means",
        "=: every token is plain decoding's, so the metric is that of the same answers",
        "peak: most memory in use while answering, beside the target's weights; KV cache included",
        "the paper: models of 1.3B to 7B on an A100, float16; least to most over models",
    ]
