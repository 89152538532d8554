"""What calibration found, as text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..json_files import from_json, to_json
from ..model.streams import StreamFusedModel
from ..report import Columns, table
from ..tuning.cost import DraftShape, StepCosts
from ..tuning.profile import FORMAT, Profile
from . import BUSY
from .choice import Choice

Result = Mapping[str, Any]
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_SHAPES = 6


def result_of(
    model: StreamFusedModel, profile: Profile, choice: Choice, checks: Sequence[Result]
) -> dict[str, Any]:
    assert model.config is not None
    key = profile.key
    guesses = choice.guesses
    return {
        "where": f"{key.machine} ({key.backend}), mlx {profile.mlx}, {profile.made}",
        "dtype": key.dtype,
        "answers": len(guesses),
        "tokens": sum(len(one.answer) for one in guesses),
        "context": profile.context,
        "streams": model.config.to_dict(),
        "costs": to_json(profile.costs),
        "candidates": [one.to_dict() for one in choice.candidates],
        "chosen": choice.chosen.to_dict(),
        "by_context": [
            {"context": context, **one.to_dict()} for context, one in choice.by_context.items()
        ],
        "checks": list(checks),
        "profile": {"format": FORMAT, **to_json(profile)},
    }


def forward_table(costs: StepCosts) -> list[str]:
    """Milliseconds of a forward on R nodes, all layers and the head without streams, by context."""

    def cell(rows: int) -> Callable[[int], str]:
        def text(context: int) -> str:
            layers = costs.lower.at(rows, context) + costs.upper.at(rows, context)
            return f"{1e3 * (layers + costs.head.at(rows)):.1f}"

        return text

    rows = [rows for rows in _SHOWN_ROWS if rows in costs.lower.rows]
    columns: Columns = {
        "context": str,
        **{f"R = {one}": cell(one) for one in rows},
        "plain call": lambda context: f"{1e3 * costs.plain_seconds(context):.1f}",
    }
    return table(columns, costs.lower.contexts)


def shape_lines(shapes: Sequence[Result], without: str) -> list[str]:
    columns: Columns = {
        "draft": lambda one: str(from_json(DraftShape, one["shape"])),
        "behind": lambda one: str(one["context"]),
        "tokens per call": lambda one: f"{one['tokens_per_call']:.2f}",
        "ms a call": lambda one: f"{1e3 * one['step_seconds']:.1f}",
        "tokens/s": lambda one: f"{one['tokens_per_second']:.1f}",
        "over plain": lambda one: f"{one['speedup']:.2f}x",
    }
    return table({name: cell for name, cell in columns.items() if name != without}, shapes)


def check_lines(checks: Sequence[Result]) -> list[str]:
    def pair(expected: str, measured: str, digits: int, scale: float = 1.0) -> Any:
        return lambda one: " / ".join(
            f"{scale * one[name]:.{digits}f}" for name in (expected, measured)
        )

    columns: Columns = {
        "held-out prompts": lambda one: f"{one['name']}: {one['what']}",
        "tokens per call": pair("expected_per_call", "per_call", 2),
        "ms a call": pair("expected_seconds", "seconds", 1, 1e3),
        "tokens/s": pair("expected", "measured", 1),
        "ratio": lambda one: f"{one['ratio']:.2f}",
        "over plain": pair("expected_speedup", "speedup", 2),
    }
    same = all(one["same_tokens"] for one in checks)
    told = "all ways gave the same tokens" if same else "the ways gave DIFFERENT tokens"
    return [*table(columns, checks), told]


def report(result: Result) -> str:
    chosen = result["chosen"]
    candidates = result["candidates"]
    fastest = sorted(candidates, key=lambda one: -one["tokens_per_second"])[:_SHOWN_SHAPES]
    shape = str(from_json(DraftShape, chosen["shape"]))
    plain = "plain decoding; the best draft would be " if chosen["speedup"] <= 1 else ""
    parts = [
        [f"{result['model']}, adapter {result['adapter']}, {result['dtype']}; {result['where']}"],
        [
            "milliseconds of a forward on R nodes, without streams",
            *forward_table(from_json(StepCosts, result["costs"])),
        ],
        [
            f"expected behind {result['context']} tokens, of {result['answers']} answers to "
            f"{result['data']}, {result['tokens']} tokens in all; {len(candidates)} ways tried",
            *shape_lines(fastest, without="behind"),
        ],
        [
            f"chosen: {plain}{shape}: {chosen['speedup']:.2f}x plain decoding",
            f"  {chosen['options']}",
        ],
        [
            "the fastest way behind other contexts",
            *shape_lines(result["by_context"], without="tokens/s"),
        ],
    ]
    if result["checks"]:
        parts.append(["expected / measured", *check_lines(result["checks"])])
    if result["noise"] > BUSY:
        parts.append(
            [
                f"timings varied by {100 * result['noise']:.0f} %: something else was running, "
                "calibrate again when the machine has nothing else to do"
            ]
        )
    return "\n\n".join("\n".join(lines) for lines in parts)
