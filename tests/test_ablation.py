"""perf.paper.ablation: which runs are trained, which are skipped, and what is shown of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from real import one_line, run_module

from convert.reference.format import ADAPTER_WEIGHTS
from convert.train import STORE_FILE, parse_args
from perf.paper import ablation
from perf.paper.ablation import read_run, read_runs, report
from ssmlx.commands.train_options import train_config
from ssmlx.errors import InputError
from ssmlx.training.job import SETTINGS_FILE
from ssmlx.training.record import LOG_FILE

NAMES = [
    *(f"embeddings-{n}" for n in (2, 4, 8, 16)),
    *(f"rotation-{n}" for n in (2, 4, 8, 16)),
    *(f"rank-{n}" for n in (8, 32, 128)),
]
EXAMPLES, STEPS = 320, 20


def write_run(options: list[str], steps: int = STEPS) -> None:
    """What convert.train leaves, had it been run for `steps`; the last is always validated."""
    args = parse_args(options)
    train, folder = train_config(args), Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m convert.train", *options])
    settings = {"command": command, "train": train.to_dict(), "examples": EXAMPLES}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    rate = 1.6 + 0.25 * train.num_msa_layers**0.5 + 0.0005 * train.stream_init_rank
    rate -= 0.12 * (train.stream_design == "value_rotation")
    entries = [{"step": step, "main_loss": 1.0} for step in range(1, steps + 1)]
    entries[0]["tokens_per_call"] = 1.0
    losses = {"valid_main_loss": 0.5, "valid_stream_1_loss": 3 - rate, "valid_prune_loss": 2.0}
    entries[-1] |= {"tokens_per_call": rate, **losses}
    (folder / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / ADAPTER_WEIGHTS).touch()
    (folder / STORE_FILE).touch()


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`perf.paper.ablation train` with a trainer that takes no time; gives its runs' names."""
    names: list[str] = []

    def fake(command):
        options = command[3:]
        name = Path(parse_args(options).out).name
        if name == fails:
            return SimpleNamespace(returncode=3)
        write_run(options)
        names.append(name)
        return SimpleNamespace(returncode=0)

    def train(*more: str, fail: str = "") -> tuple[int, list[str]]:
        nonlocal fails
        fails, names[:] = fail, []
        argv = ["train", "--data", "d", "--out", str(tmp_path / "runs"), "--epochs", "1", *more]
        return ablation.main(argv), list(names)

    fails = ""
    # The name in `ablation` alone: matplotlib runs commands of its own, once on a new machine.
    monkeypatch.setattr(ablation, "subprocess", SimpleNamespace(run=fake))
    return train


def test_every_variant_is_trained_once(trained, tmp_path):
    code, names = trained("--num-streams", "3")
    assert (code, names) == (0, NAMES)
    runs = {name: read_run(tmp_path / "runs" / name) for name in NAMES}
    assert {one.num_steps for one in runs.values()} == {STEPS}
    shape = {name: (one.design, one.num_layers, one.rank) for name, one in runs.items()}
    assert shape["embeddings-16"] == ("embeddings", 16, 0)
    assert shape["rotation-2"] == ("value_rotation", 2, 0)
    assert shape["rank-128"] == ("embeddings", 8, 128)
    assert read_runs(tmp_path / "runs")[1]["num_streams"] == 3
    assert not list(tmp_path.rglob(STORE_FILE))
    assert trained("--num-streams", "3") == (0, [])


def test_a_run_that_is_not_finished_goes_on(trained, tmp_path):
    assert trained(fail="rotation-4") == (3, NAMES[:5])
    folder = tmp_path / "runs" / "embeddings-4"
    assert read_run(folder).is_finished
    lines = (folder / LOG_FILE).read_text().splitlines(keepends=True)
    (folder / LOG_FILE).write_text("".join(lines[:-1]))
    assert trained() == (0, ["embeddings-4", *NAMES[5:]])
    # Other settings are for convert.train to refuse.
    assert trained("--seed", "5")[1] == NAMES


def test_bad_options_are_told_before_the_first_run(trained, capsys):
    for more, said in (
        (("--num-msa-layers", "4"), "--num-msa-layers for every run"),
        (("--rotation-step", "0"), "--rotation-step 0"),
        (("--batch-size", "0"), "--batch-size 0"),
    ):
        assert trained(*more) == (2, [])
        assert said in one_line(capsys.readouterr().err, ablation.PROG)
    with pytest.raises(SystemExit):
        trained("--nonsense")


def draw(tmp_path: Path) -> tuple[int, Path]:
    picture = tmp_path / "figures" / "ablation.png"
    argv = [
        "draw",
        "--runs",
        tmp_path / "runs",
        "--out",
        picture,
        "--results",
        tmp_path / "results",
    ]
    return ablation.main([*map(str, argv)]), picture


def test_the_runs_are_shown(trained, tmp_path, capsys):
    trained()
    code, picture = draw(tmp_path)
    assert code == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split("  ") for line in out.splitlines()}
    assert len(lines) == 1 + len(NAMES)
    shown = [cell.strip() for cell in lines["rank-32"] if cell]
    assert shown[1:] == ["stream embeddings", "8", "rank 32", "2.323", "0.500", "0.677", "2.000"]
    saved = json.loads((tmp_path / "results" / "ablation.json").read_text())
    assert len(saved["runs"]) == len(NAMES) and saved["shared"]["examples"] == EXAMPLES
    assert (tmp_path / "results" / "ablation.txt").read_text() == out
    pytest.importorskip("matplotlib")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_unfinished_runs_are_named_and_not_drawn(trained, tmp_path):
    trained()
    out, f = str(tmp_path / "runs" / "rank-32"), ["--stream-init", "low_rank"]
    options = ["--data", "d", "--out", out, "--epochs", "1", *f, "--stream-init-rank", "32"]
    write_run(options, steps=5)
    runs, _ = read_runs(tmp_path / "runs")
    assert "rank-32 (step 5 of 20)" in report(runs)
    assert [one.name for one in runs if not one.is_finished] == ["rank-32"]
    assert draw(tmp_path)[0] == 0


def test_runs_that_do_not_compare_are_refused(trained, tmp_path):
    with pytest.raises(InputError, match="no finished run"):
        read_runs(tmp_path / "runs")
    trained()
    write_run(["--data", "d", "--out", str(tmp_path / "runs" / "other"), "--epochs", "1",
               "--seed", "1"])  # fmt: skip
    with pytest.raises(InputError, match="other and embeddings-16 differ in seed"):
        read_runs(tmp_path / "runs")


def test_the_command_as_users_run_it(tmp_path):
    done = run_module("perf.paper.ablation", "draw", "--runs", str(tmp_path), "--layers", "2")
    assert done.returncode == 2
    assert "unrecognized arguments: --layers" in one_line(done.stderr, ablation.PROG)
