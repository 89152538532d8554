"""perf.paper.figures: eq. 6, the points of results, and the pictures."""

from __future__ import annotations

import json
import shlex

import pytest
from real import one_line, run_module

from perf.compare import __main__ as compare
from perf.compare.plan import parse_systems
from perf.paper import figures
from perf.paper.figures import (
    Point,
    parity,
    parity_points,
    sampling_curves,
    theoretical_speedup,
    tree_curves,
)
from perf.paper.published import TABLE_1, TABLE_2, latencies, speeds
from perf.run.statistics import Estimate
from ssmlx.settings import PruneConfig, SamplingConfig, TreeConfig

# ----------------------------------------------------------------------------------- eq. 6


def test_eq_6_by_hand():
    # (4 * 1 + 10) / 2 = 7 a token there, 10 / 4 = 2.5 here: zeta / beta = 2 / 4, C_ss = C_target.
    assert theoretical_speedup(10, 0.5, gamma=4) == pytest.approx(7 / 2.5)
    assert theoretical_speedup(10, 0.5, gamma=4, overhead=1.4) == pytest.approx(2.0)


def test_parity_is_where_the_paper_says():
    assert parity(10, gamma=4) == pytest.approx(1.4)
    assert theoretical_speedup(10, 1.4) == pytest.approx(1.0)
    for ratio in (2, 10, 50):
        assert theoretical_speedup(ratio, parity(ratio, 3, 1.2), 3, 1.2) == pytest.approx(1.0)
    # A draft model for nothing leaves the advancements alone.
    assert theoretical_speedup(1e9, 0.6) == pytest.approx(1 / 0.6)


# ------------------------------------------------------------------------------- the paper


def test_the_papers_tables_are_whole():
    assert len(TABLE_1) == 18 and len(TABLE_2) == 12
    medusa = [row.speedup for row in speeds("sql", "Medusa")]
    assert medusa == [2.07, 2.58, 3.20] and not speeds("chat", "Medusa")
    assert {row.extra_parameters for row in TABLE_1 if row.method == "SS (ours)"} == {40960, 81900}
    assert [row.draft_calls for row in latencies("e2e", "Two-model SD")] == [31.47, 31.58]
    # Section 4.1.2: fewer target calls with a draft model, and yet a longer wait.
    pairs = zip(TABLE_2[::2], TABLE_2[1::2], strict=True)
    assert all(
        a.target_calls < b.target_calls and a.milliseconds > b.milliseconds for a, b in pairs
    )


# ------------------------------------------------------------------------------ the points


def figure(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def row(name: str, speedup: float = 1.5, per_call: float = 3.0, call: float = 0.02, **more) -> dict:
    kind = name.split()[0]
    return {"name": name, "kind": kind, "speedup": figure(speedup), "call_seconds": call,
            "tokens_per_call": figure(per_call), "options": {}, **more}  # fmt: skip


def result(*rows: dict, task: str = "sql", top_k: int = 0, draft_call: float | None = None) -> dict:
    found = {"task": task, "draft_call_seconds": draft_call, "systems": list(rows)}
    return {"temp": 1.0 if top_k else 0.0, "top_k": top_k, "tasks": [found]}


def draft_rows() -> list[dict]:
    return [
        row("plain", per_call=1.0, call=0.01),
        row("streams", per_call=2.5, call=0.02, speedup_over_draft_model=figure(1.3)),
        row("draft-model", per_call=3.0, options={"levels": 3}),
    ]


def full_tree(width: int | None, prune: str = "off") -> dict:
    tree = {"kind": "full", "width": width, "size": 16}
    pruning = {"kind": prune, "keep": 8, "threshold": 0.05}
    name = f"streams --tree full --tree-width {width} --prune {prune}"
    options = {"levels": 3, "tree": tree, "prune": pruning}
    return row(name, 1 + (width or 3) / 10, options=options)


def test_a_point_of_figure_4_is_what_was_measured():
    (point,) = parity_points([result(*draft_rows(), draft_call=0.002)])
    assert point.latency_ratio == pytest.approx(5)
    assert point.advance_ratio == pytest.approx(3.0 / 2.5)
    assert point.measured.value == 1.3
    # (3 * 2 + 10) / 3 ms a token there, 20 / 2.5 ms here.
    assert point.predicted == pytest.approx((16 / 3) / 8)


def test_figure_4_needs_streams_and_a_draft_model():
    rows = draft_rows()
    assert parity_points([result(*rows[:2], draft_call=0.002), result(*rows)]) == []
    rows[1]["call_seconds"] = None
    assert parity_points([result(*rows, draft_call=0.002)]) == []
    assert parity_points([result(*draft_rows(), draft_call=0.002, top_k=10)]) == []


def test_the_curves_of_figure_5_are_full_trees():
    best = row("streams", options={"levels": 3, "tree": {"kind": "best"}})
    rows = [full_tree(1), full_tree(None), full_tree(2, "threshold"), best, row("mlx-lm")]
    curves = tree_curves([result(*rows)])
    plain = ("sql", "gamma = 3, without pruning")
    pruned = ("sql", "gamma = 3, pruned below 0.05")
    assert {curve: sorted(points) for curve, points in curves.items()} == {
        plain: [1, TreeConfig(kind="full").full_width],
        pruned: [2],
    }
    assert curves[pruned][2].speedup.value == 1.2
    newer = full_tree(1) | {"speedup": figure(9.0)}
    assert tree_curves([result(*rows), result(newer)])[plain][1].speedup.value == 9.0


def test_the_curves_of_figure_9b_are_of_sampling():
    results = [result(row("streams"), row("medusa", 1.1), row("plain"), top_k=k) for k in (10, 20)]
    curves = sampling_curves([*results, result(row("streams"))])
    assert {curve: sorted(points) for curve, points in curves.items()} == {
        ("sql", "streams"): [10, 20],
        ("sql", "medusa"): [10, 20],
    }


# ---------------------------------------------------------------------------- the pictures


@pytest.fixture
def draw(tmp_path, capsys):
    """Draw from the given results; gives (exit code, stdout, stderr)."""
    pytest.importorskip("matplotlib")

    def draw(*results: dict, more: tuple[str, ...] = ()) -> tuple[int, str, str]:
        folder = tmp_path / "results"
        for number, one in enumerate(results):
            (folder / str(number)).mkdir(parents=True)
            (folder / str(number) / "compare.json").write_text(json.dumps(one))
        folder.mkdir(exist_ok=True)
        argv = ["--results", str(folder), "--out", str(tmp_path / "figures"), *more]
        return figures.main(argv), *capsys.readouterr()

    return draw


def test_all_figures_are_drawn_from_their_results(draw, tmp_path):
    sampled = [
        result(row("streams"), row("medusa"), task=task, top_k=k)
        for task in ("sql", "e2e")
        for k in (10, 20)
    ]
    trees = [full_tree(width, prune) for width in (1, 2) for prune in ("off", "budget")]
    code, out, err = draw(result(*draft_rows(), draft_call=0.002), result(*trees), *sampled)
    assert (code, err) == (0, "")
    names = ["figure-4.png", "figure-5.png", "figure-9b.png"]
    assert out.split() == [str(tmp_path / "figures" / name) for name in names]
    for name in names:
        assert (tmp_path / "figures" / name).read_bytes()[:4] == b"\x89PNG"


def looks(axes) -> tuple[list[str], int]:
    """The labels of a legend, and how many of its lines look different."""
    handles, labels = axes.get_legend_handles_labels()
    lines = [getattr(handle, "lines", [handle])[0] for handle in handles]
    drawn = {(one.get_color(), one.get_linestyle(), one.get_marker()) for one in lines}
    return sorted(labels), len(drawn)


def test_every_curve_is_drawn_and_looks_different(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(figures, "finish", lambda figure, *_: drawn.append(figure))
    point = Point(*[Estimate(1.0, 0.9, 1.1)] * 2)
    curves = {("sql", f"curve {number}"): {1: point, 2: point} for number in range(9)}
    figures.draw_trees(curves, "", tmp_path / "x.png")
    left, _ = drawn[0].axes
    assert looks(left) == ([f"sql, curve {number}" for number in range(9)], 9)


def test_what_was_not_measured_is_told_with_its_command(draw, tmp_path):
    code, out, err = draw()
    assert code == 0 and len(out.split()) == 3
    for name in ("figure 4", "figure 5", "figure 9b"):
        assert f"{name}: nothing of ours yet; run\n  " in err
    code, out, err = draw(result(*draft_rows(), draft_call=0.002), more=("--figures", "4"))
    assert out.split() == [str(tmp_path / "figures" / "figure-4.png")] and err == ""


def test_a_fresh_checkout_is_told_what_to_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "RESULTS", figures.ROOT / "perf" / "no-results")
    assert figures.main(["--figures", "4", "--out", str(tmp_path)]) == 0
    assert "nothing of ours yet; run\n  python -m perf.compare" in capsys.readouterr().err


def test_the_commands_that_are_told_are_commands():
    for name, text in figures.commands().items():
        words = shlex.split(text.partition("; do ")[2].partition("; done")[0] or text)
        assert words[:3] == ["python", "-m", "perf.compare"]
        args = compare.parse_args([word.replace("$k", "10") for word in words[3:]])
        systems = parse_systems(args.systems, SamplingConfig())
        assert len(systems) == (14 if name == "5" else 4)
    trees = [system.config for system in systems_of(figures.commands()["5"])]
    assert {config.tree.full_width for config in trees} == set(range(1, 7))
    assert {config.prune.kind for config in trees} == {"off", "threshold"} > {PruneConfig().kind}
    assert {config.num_streams for config in trees} == {3}


def systems_of(text: str) -> list:
    args = compare.parse_args(shlex.split(text)[3:])
    return parse_systems(args.systems, SamplingConfig())[2:]


# ------------------------------------------------------------------------------- bad input


def test_bad_input_is_one_line(draw, tmp_path, capsys):
    assert figures.main(["--results", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in one_line(capsys.readouterr().err, "perf.paper.figures")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "compare.json").write_text("{")
    code, _, err = draw()
    assert code == 2 and "is not valid JSON" in one_line(err, "perf.paper.figures")
    (tmp_path / "results" / "compare.json").write_text('{"summary": 1}')
    code, _, err = draw()
    assert code == 2 and "holds no result of perf.compare" in one_line(err, "perf.paper.figures")


@pytest.mark.parametrize(
    ("broken", "lacking"),
    [
        ({"tasks": [{}]}, "no 'temp'"),
        ({"temp": 0, "tasks": [{"task": "sql"}]}, "no 'systems'"),
        ({"temp": 1, "tasks": [{"systems": [{"name": "streams"}]}]}, "no 'top_k'"),
        ({"temp": 0, "tasks": [1]}, "int"),
    ],
)
def test_an_incomplete_result_is_told_in_one_line(draw, broken, lacking):
    code, out, err = draw(broken)
    assert (code, out) == (2, "")
    told = one_line(err, "perf.paper.figures")
    assert ".json is incomplete (" in told and lacking in told and "; measure again" in told


def test_the_command_as_users_run_it():
    done = run_module("perf.paper.figures", "--figures", "6")
    assert done.returncode == 2
    assert "invalid choice: '6'" in one_line(done.stderr, "perf.paper.figures")
