"""What `perf.attention` measured, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmlx.tuning.report import aligned, new_figure

# Below this the two sides count as equally fast.
_NOISE = 0.03


def speed_up(line: Mapping[str, Any]) -> float:
    """How many times as fast as MLX's the fused kernel is."""
    return line["mlx_ms"] / line["fused_ms"]


def verdict(line: Mapping[str, Any]) -> str:
    """Whether the rule chose the faster side."""
    gain = speed_up(line)
    if abs(gain - 1) < _NOISE:
        return "even"
    return "right" if (gain > 1) == (line["chosen"] == "fused") else "WRONG"


def report(result: Mapping[str, Any]) -> str:
    """The result as text."""
    settings, lines = result["settings"], result["lines"]
    head = ("rows", "keys", "MLX's path", "MLX ms", "fused ms", "speed-up", "chosen", "rule")
    table = [
        (
            str(line["rows"]),
            str(line["keys"]),
            line["mlx_path"],
            f"{line['mlx_ms']:.3f}",
            f"{line['fused_ms']:.3f}",
            f"{speed_up(line):.2f}",
            line["chosen"],
            verdict(line),
        )
        for line in lines
    ]
    counts = {word: sum(verdict(line) == word for line in lines) for word in ("right", "WRONG")}
    return "\n".join(
        [
            f"attention of one layer, {settings['heads']} heads on {settings['kv_heads']} of "
            f"{settings['head_size']}, {settings['dtype']}; {result['machine']['machine']}, "
            f"{result['machine']['power']}, mlx {result['machine']['mlx']}",
            f"medians, through {result['layers']} layers in a run",
            "",
            *aligned([head, *table]),
            "",
            f"largest difference {max(line['largest_difference'] for line in lines):.2g}; the rule "
            f"was right {counts['right']} times, wrong {counts['WRONG']}, and made no difference "
            f"(under {_NOISE:.0%}) {len(lines) - sum(counts.values())}",
        ]
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speed-up against the keys, a line for each number of rows."""
    lines = result["lines"]
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for rows in sorted({line["rows"] for line in lines}):
        own = sorted((line["keys"], line) for line in lines if line["rows"] == rows)
        points = [(keys, speed_up(line)) for keys, line in own]
        (drawn,) = axes.plot(*zip(*points, strict=True), label=f"{rows} rows", lw=1.5)
        for chosen, face in ((True, drawn.get_color()), (False, "white")):
            picked = [
                (k, speed_up(line)) for k, line in own if (line["chosen"] == "fused") == chosen
            ]
            if picked:
                axes.plot(
                    *zip(*picked, strict=True), "o", color=drawn.get_color(), markerfacecolor=face
                )
    axes.axhline(1, color="#444444", lw=1, ls="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("keys (rows and context)")
    axes.set_ylabel("times as fast as MLX's attention")
    axes.set_title(
        f"fused attention on {result['machine']['machine']}; filled where it is chosen", fontsize=9
    )
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
