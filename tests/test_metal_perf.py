"""`perf.attention`: on a Mac it times both sides; elsewhere it says so in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from metal import shim

from perf.attention import __main__ as attention
from perf.attention.report import draw, report, verdict
from ssmlx.model.metal import is_available, kernels
from ssmlx.model.metal.plan import AttentionShape, Chip
from ssmlx.tuning.report import publish

M1 = Chip.of("applegpu_g13g")


def tiny(rows: int, keys: int) -> AttentionShape:
    """Sizes that the shim runs in no time."""
    return AttentionShape(rows=rows, heads=4, kv_heads=2, keys=keys, head_size=8, dtype=mx.float32)


@pytest.mark.skipif(is_available(), reason="Metal is here")
def test_without_metal_it_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention.main(["--out", str(tmp_path / "new")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "perf.attention: error: MLX has no Metal device here; expected a Mac with Apple silicon; "
        "run it there\n"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "9", "--kv-heads", "2"], "heads a multiple of key/value heads"),
        (["--rows", "0"], "positive numbers"),
        (["--head-size", "256"], "a multiple of 8, up to 128"),
    ],
)
def test_sizes_are_checked_first(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention.main(options) == 2
    assert message in capsys.readouterr().err


def test_both_sides_go_through_the_same_layers(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if shim.COMPILER is None:
        pytest.skip(shim.NO_COMPILER)
    runner = shim.Shim(Path(request.config.cache.mkdir("metal")))
    monkeypatch.setattr(kernels, "run_on_metal", runner)
    ticks = count(1)

    def clock(work: Callable[[], None]) -> float:
        work()
        # MLX's turn comes first: 3, 5, 7 ms against 4, 6, 8.
        return next(ticks) / 1000

    monkeypatch.setattr(attention, "WARM_UP", 1)
    line = attention.compare(tiny(6, 40), layers=2, repeats=3, chip=M1, clock=clock)
    assert line["largest_difference"] < 1e-5
    assert (line["mlx_ms"], line["fused_ms"]) == (2.5, 3.0)
    assert (line["mlx_path"], line["chosen"]) == ("composed", "fused")
    assert line["mlx_mib"] > line["fused_mib"] > 0
    assert runner.calls == 4 * 2 + 1  # runs through two layers, and one more to compare


def made_up_result() -> dict:
    """Timings that nobody measured, to see the report and the picture with."""
    shapes = [(rows, keys) for rows in (8, 16, 64) for keys in (136, 1040, 8256)]
    lines = [
        {
            "rows": rows,
            "keys": keys,
            "mlx_path": "vector" if rows == 8 else "full",
            "chosen": "fused" if keys > 500 else "full",
            "mlx_ms": 0.010 + 1e-6 * keys * rows,
            "fused_ms": 0.012 + 4e-7 * keys * rows**0.5,
            "largest_difference": 3e-4,
        }
        for rows, keys in shapes
    ]
    machine = {"machine": "Darwin arm64, made-up chip", "power": "AC power", "mlx": "0.32"}
    settings = {"heads": 9, "kv_heads": 3, "head_size": 64, "dtype": "float16"}
    return {"machine": machine, "settings": settings, "layers": 16, "lines": lines}


def test_report_picture_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = made_up_result()
    publish(result, tmp_path / "attention", report(result), draw)
    text = capsys.readouterr().out
    assert "9 heads on 3 of 64, float16; Darwin arm64, made-up chip" in text
    (row,) = (line for line in text.splitlines() if line.split()[:2] == ["64", "8256"])
    assert row.split()[2:] == ["full", "0.538", "0.038", "14.01", "fused", "right"]
    assert "the rule was right 7 times, wrong 1, and made no difference (under 3%) 1" in text
    assert json.loads((tmp_path / "attention.json").read_text())["lines"] == result["lines"]
    assert (tmp_path / "attention.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("mlx_ms", "chosen", "said"),
    [
        (2.0, "fused", "right"),
        (2.0, "full", "WRONG"),
        (0.5, "full", "right"),
        (1.02, "full", "even"),
    ],
)
def test_verdict_on_the_rule(mlx_ms: float, chosen: str, said: str) -> None:
    assert verdict({"mlx_ms": mlx_ms, "fused_ms": 1.0, "chosen": chosen}) == said
