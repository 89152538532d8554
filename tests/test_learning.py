"""perf.paper.learning: the curve of runs that went on from one another."""

from __future__ import annotations

import json

import pytest
from real import one_line

from perf.paper import learning
from ssmlx.training.record import LOG_FILE


def write_log(folder, validations):
    folder.mkdir()
    entries = [{"step": 1, "stream_1_loss": 9.0}]
    for step, rate in validations:
        entries.append({"step": step, "tokens_per_call": rate, "valid_stream_1_loss": 5 - rate})
    (folder / LOG_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


@pytest.fixture
def folders(tmp_path):
    first = write_log(tmp_path / "first", [(50, 1.5), (100, 2.0)])
    return first, write_log(tmp_path / "second", [(30, 2.25)])


def run(tmp_path, *more):
    out = ("--out", str(tmp_path / "shown" / "curve.png"), "--results", str(tmp_path / "shown"))
    return learning.main([*more, *out])


def test_a_round_goes_on_where_the_one_before_ended(folders, tmp_path, capsys):
    first, second = folders
    assert run(tmp_path, "--run", f"a={first},{second}", "--run", f"b={second}") == 0
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["a", "1", "50", "1.50", "3.500"],
        ["a", "1", "100", "2.00", "3.000"],
        ["a", "2", "130", "2.25", "2.750"],
        ["b", "1", "30", "2.25", "2.750"],
    ]
    picture = tmp_path / "shown" / "curve.png"
    assert picture.stat().st_size > 5000
    saved = tmp_path / "shown" / "learning.json"
    assert json.loads(saved.read_text())["a"] == [
        [[50, 1.5, 3.5], [100, 2.0, 3.0]],
        [[130, 2.25, 2.75]],
    ]
    assert run(tmp_path, "--from", str(saved)) == 0
    assert capsys.readouterr().out == table


def test_a_task_has_one_colour_and_each_of_its_curves_another_line():
    found = learning.styles(["a", "b", "a, other", "c", "d", "e", "a, third"])
    (a, b, other, *_, e, third) = found
    assert a[0] == other[0] == third[0] != b[0]
    assert (a[1], other[1], third[1]) == learning.LINES[:3]
    assert e[1] == "-" and len(set(found[:5])) == 5


@pytest.mark.parametrize(
    ("option", "said"),
    [("a", "NAME=FOLDER"), ("a=", "NAME=FOLDER"), ("a=none", "holds no validation")],
)
def test_bad_runs_are_told_in_one_line(tmp_path, capsys, option, said):
    assert run(tmp_path, "--run", option) == 2
    assert said in one_line(capsys.readouterr().err, learning.PROG)
    assert not (tmp_path / "shown").exists()
