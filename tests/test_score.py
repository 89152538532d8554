"""perf.score: metrics of answers in files, beside each other."""

from __future__ import annotations

import json

import pytest
from real import one_line

from perf.score import PROG, main


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path):
    """Forty prompts; of two files of answers, one is right in thirty and one in ten of them."""
    rows = [{"prompt": f"q{i}", "completion": f"SELECT {i}"} for i in range(40)]
    folder = tmp_path / "sql"
    folder.mkdir()
    write(folder / "test.jsonl", rows)
    for name, right in (("good", 30), ("poor", 10)):
        answers = [
            {"prompt": f"q{i}", "completion": f"SELECT {i}" if i < right else "select 7"}
            for i in reversed(range(40))
        ]
        write(tmp_path / f"{name}.jsonl", answers)
    return tmp_path


def argv(data, *names):
    files = [f"{name}={data / name}.jsonl" for name in names]
    return ["--task", "sql", "--data-dir", str(data), "--out", str(data / "out"), *files]


def test_files_are_scored_and_compared_prompt_by_prompt(data, capsys):
    assert main(argv(data, "good", "poor")) == 0
    text = capsys.readouterr().out
    result = json.loads((data / "out" / "score-sql.json").read_text())
    good, poor = result["rows"]
    assert good["figures"]["exact match"]["value"] == 75
    assert poor["figures"]["exact match"]["value"] == 25
    gap = poor["differences"]["exact match"]
    assert gap["value"] == -50 and gap["low"] < -50 < gap["high"] < 0
    assert "poor less good, exact match: -50.0" in text and "not within noise: lower" in text
    assert set(good["differences"]["exact match"].values()) == {0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: ["good"], "expected NAME=FILE.jsonl"),
        (lambda data: [f"a={data}/good.jsonl", f"a={data}/poor.jsonl"], "a name of its own"),
        (lambda data: [f"a={data}/none.jsonl"], "cannot be read"),
        (lambda data: [f"a={write(data / 'x', [{'prompt': 'q1'}])}"], "cannot be read"),
        (
            lambda data: [f"a={write(data / 'x', [{'prompt': 'q0', 'completion': 'b'}])}"],
            "no answer to 39 of 40",
        ),
    ],
)
def test_bad_input_is_told_in_one_line(data, capsys, change, said):
    assert main([*argv(data), *change(data)]) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    assert not (data / "out").exists()
