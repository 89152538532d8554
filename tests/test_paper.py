"""perf.paper: eq. 6 and the figures, and the runs of an ablation."""

import json
import shlex
import subprocess
from itertools import product
from pathlib import Path

import pytest
from real import one_line

from convert.train import parse_args
from perf.paper import figures, training
from perf.paper.figures import parity_points, theoretical_speedup, tree_curves
from perf.paper.training import read_runs
from perf.run.published import TABLE_1, TABLE_2, speeds
from perf.run.results import ROOT
from ssmlx.commands.train_options import train_config
from ssmlx.settings import TreeConfig
from ssmlx.training.job import SETTINGS_FILE
from ssmlx.training.record import LOG_FILE


def test_eq_6_by_hand_and_where_the_paper_has_parity():
    # (4 * 1 + 10) / 2 = 7 a token there, 10 / 4 = 2.5 here: zeta / beta = 2 / 4, C_ss = C_target.
    assert theoretical_speedup(10, 0.5, gamma=4) == pytest.approx(7 / 2.5)
    assert theoretical_speedup(10, 0.5, gamma=4, overhead=1.4) == pytest.approx(2.0)
    assert theoretical_speedup(10, 1.0, 4) == pytest.approx(1.4)
    assert theoretical_speedup(10, 1.4) == pytest.approx(1.0)
    # A draft model for nothing leaves the advancements alone.
    assert theoretical_speedup(1e9, 0.6) == pytest.approx(1 / 0.6)


def test_the_papers_tables_are_whole():
    assert len(TABLE_1) == 18 and len(TABLE_2) == 12
    medusa = [row.speedup for row in speeds("sql", "Medusa")]
    assert medusa == [2.07, 2.58, 3.20] and not speeds("chat", "Medusa")
    assert {row.extra_parameters for row in TABLE_1 if row.method == "SS (ours)"} == {40960, 81900}
    # Section 4.1.2: fewer target calls with a draft model, and yet a longer wait.
    for a, b in zip(TABLE_2[::2], TABLE_2[1::2], strict=True):
        assert a.target_calls < b.target_calls and a.milliseconds > b.milliseconds


def figure(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def row(name: str, speedup: float = 1.5, per_call: float = 3.0, call: float = 0.02, **more) -> dict:
    kind = name.split()[0]
    return {
        "name": name,
        "kind": kind,
        "speedup": figure(speedup),
        "call_seconds": call,
        "tokens_per_call": figure(per_call),
        "options": {},
        **more,
    }


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
    rows = draft_rows()
    assert parity_points([result(*rows[:2], draft_call=0.002), result(*rows)]) == []
    assert parity_points([result(*rows, draft_call=0.002, top_k=10)]) == []


def test_the_curves_of_figure_5_are_full_trees():
    best = row("streams", options={"levels": 3, "tree": {"kind": "best"}})
    rows = [full_tree(1), full_tree(None), full_tree(2, "threshold"), best, row("mlx-lm")]
    curves = tree_curves([result(*rows)])
    plain = ("sql", "gamma = 3, without pruning")
    pruned = ("sql", "gamma = 3, pruned below 0.05")
    found = {curve: sorted(points) for curve, points in curves.items()}
    assert found == {plain: [1, TreeConfig(kind="full").full_width], pruned: [2]}
    assert curves[pruned][2][0].value == 1.2
    newer = full_tree(1) | {"speedup": figure(9.0)}
    assert tree_curves([result(*rows), result(newer)])[plain][1][0].value == 9.0


def test_the_results_that_ship_have_figure_5():
    curves = tree_curves(figures.read_results([ROOT / "perf" / "measured"]))
    assert [len(points) for points in curves.values()] == [6, 6]


@pytest.fixture
def draw(tmp_path, capsys):
    """Draw from the given results; gives (exit code, stdout, stderr)."""
    pytest.importorskip("matplotlib")

    def draw(*results: dict) -> tuple[int, str, str]:
        folder = tmp_path / "results"
        for number, one in enumerate(results):
            (folder / str(number)).mkdir(parents=True)
            (folder / str(number) / "compare.json").write_text(json.dumps(one))
        folder.mkdir(exist_ok=True)
        argv = ["--results", str(folder), "--out", str(tmp_path / "figures")]
        return figures.main(argv), *capsys.readouterr()

    return draw


def test_all_figures_are_drawn_from_their_results(draw, tmp_path):
    code, out, err = draw()
    assert code == 0 and len(out.split()) == 3
    assert err.count(": nothing of ours yet; see perf/README.md\n") == 3
    ways = product(("sql", "e2e"), (10, 20))
    sampled = [result(row("streams"), row("medusa"), task=task, top_k=k) for task, k in ways]
    trees = [full_tree(width, prune) for width in (1, 2) for prune in ("off", "budget")]
    code, out, err = draw(result(*draft_rows(), draft_call=0.002), result(*trees), *sampled)
    assert (code, err) == (0, "")
    names = ["figure-4.png", "figure-5.png", "figure-9b.png"]
    assert out.split() == [str(tmp_path / "figures" / name) for name in names]
    for name in names:
        assert (tmp_path / "figures" / name).read_bytes()[:4] == b"\x89PNG"


BROKEN = {
    "is not valid JSON": "{",
    "holds no result of perf.compare": "{}",
    "compare.json is incomplete (no 'temp')": '{"tasks": [{}]}',
    "compare.json is incomplete ('int'": '{"temp": 0, "tasks": [1]}',
}


def test_bad_input_is_one_line(draw, tmp_path, capsys):
    assert figures.main(["--results", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in one_line(capsys.readouterr().err, figures.PROG)
    (tmp_path / "results").mkdir()
    for said, text in BROKEN.items():
        (tmp_path / "results" / "compare.json").write_text(text)
        code, out, err = draw()
        assert (code, out) == (2, "") and said in one_line(err, figures.PROG)


NAMES = [
    *(f"embeddings-{n}" for n in (2, 4, 8, 16)),
    *(f"rotation-{n}" for n in (2, 4, 8, 16)),
    *(f"rank-{n}" for n in (8, 32, 128)),
]
EXAMPLES = 320
STEPS = 20


def write_run(options: list[str], steps: int = STEPS) -> None:
    """What convert.train leaves, had it been run for `steps`; the last is always validated."""
    args = parse_args(options)
    train = train_config(args)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"train": train.to_dict(), "examples": EXAMPLES}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    rate = 1.6 + 0.25 * train.num_msa_layers**0.5 + 0.0005 * train.stream_init_rank
    rate -= 0.12 * (train.stream_design == "value_rotation")
    entries = [{"step": step, "main_loss": 1.0} for step in range(1, steps + 1)]
    entries[0]["tokens_per_call"] = 1.0
    losses = {"valid_main_loss": 0.5, "valid_stream_1_loss": 3 - rate, "valid_prune_loss": 2.0}
    entries[-1] |= {"tokens_per_call": rate, **losses}
    (folder / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def trained(tmp_path):
    """The runs that the command's help tells of, in a folder."""
    script = training.EPILOG.partition("  python -m perf")[0]
    folder = tmp_path / "runs"
    for told, own in (
        ("examples:", ""),
        ("python -m convert.train", "echo"),
        ("runs/ablation", str(folder)),
    ):
        script = script.replace(told, own)
    shown = subprocess.check_output(["sh", "-c", script], text=True)
    for line in shown.splitlines():
        write_run(shlex.split(line))
    return folder


def test_the_runs_of_the_help_are_shown(trained, tmp_path, capsys):
    runs = {one.name: one for one in read_runs(trained)[0]}
    assert set(runs) == set(NAMES) and {one.num_steps for one in runs.values()} == {STEPS}
    shape = {name: (one.design, one.num_layers, one.rank) for name, one in runs.items()}
    assert shape["embeddings-16"] == ("embeddings", 16, 0)
    assert shape["rotation-2"] == ("value_rotation", 2, 0)
    assert shape["rank-128"] == ("embeddings", 8, 128)
    show = ["--runs", str(trained), "--out", str(tmp_path / "results")]
    shared = ["--data", "d", "--epochs", "1", "--out"]
    rank = ["--stream-init", "low_rank", "--stream-init-rank", "8"]
    write_run([*shared, str(trained / "rank-8"), *rank], steps=5)
    assert training.main(show) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split("  ") for line in out.splitlines()}
    assert len(lines) == 1 + len(NAMES) and "rank-8 (step 5 of 20)" in lines
    shown = [cell.strip() for cell in lines["rank-32"] if cell]
    assert shown[1:] == ["stream embeddings", "8", "rank 32", "2.323", "0.500", "0.677", "2.000"]
    saved = json.loads((tmp_path / "results" / "ablation.json").read_text())
    assert len(saved["runs"]) == len(NAMES) and saved["shared"]["examples"] == EXAMPLES
    assert (tmp_path / "results" / "ablation.txt").read_text() == out
    pytest.importorskip("matplotlib")
    assert (tmp_path / "results" / "ablation.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_that_do_not_belong_together_are_refused(tmp_path, capsys):
    folder = tmp_path / "runs"
    show = ["--runs", str(folder), "--out", str(tmp_path / "results")]
    assert training.main(show) == 2
    assert f"no finished run in {folder}" in one_line(capsys.readouterr().err, training.PROG)
    for name, seed in (("embeddings-16", "0"), ("other", "1")):
        write_run(["--data", "d", "--epochs", "1", "--out", str(folder / name), "--seed", seed])
    assert training.main(show) == 2
    said = one_line(capsys.readouterr().err, training.PROG)
    assert "other and embeddings-16 differ in seed" in said
