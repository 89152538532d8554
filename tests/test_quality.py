"""perf.quality and perf.score: trees, baselines and files of answers on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real import one_line, words, write_base, write_tiny_adapter

import ssmlx
from perf import quality, score
from perf.run.published import PAPER
from perf.run.tasks import SQL
from ssmlx.errors import InputError

TEMPLATE = "user: {prompt} | model:"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, adapters of both scopes, and data whose first answer is right."""
    root = tmp_path_factory.mktemp("quality")
    base = write_base(root / "base")
    write_tiny_adapter(root / "tuned", base, template=TEMPLATE)
    write_tiny_adapter(root / "light", base, scope="streams", template=TEMPLATE)
    model, tokenizer = ssmlx.load(str(base), adapter=root / "tuned", dtype="float32")
    prompts = [words(4, first) for first in (1, 9, 17, 25)]
    rows = [{"prompt": prompt, "completion": "none"} for prompt in prompts]
    first = TEMPLATE.replace("{prompt}", prompts[0])
    rows[0]["completion"] = ssmlx.generate(model, tokenizer, first, max_tokens=9) + " \n"
    (root / "sql").mkdir()
    (root / "sql" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture
def command(folders, tmp_path, capsys):
    """Run the command on the tiny model; gives (exit code, stdout, stderr)."""

    def run(*args, adapter="tuned", task="sql"):
        argv = ["--task", task, "--model", folders / "base", "--data-dir", folders]
        argv += ["--out", tmp_path / "out", "--max-tokens", 9, "--adapter", folders / adapter]
        try:
            code = quality.main([str(item) for item in (*argv, *args)])
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return run


def saved(tmp_path: Path, task: str = "sql") -> dict:
    return json.loads((tmp_path / "out" / f"quality-{task}.json").read_text())


def test_trees_beside_plain_decoding_and_a_baseline(command, folders, tmp_path):
    trees = ("--trees", "full:1,full:2,best:8")
    code, out, _ = command("--baseline", folders / "tuned", *trees)
    assert code == 0, out
    result = saved(tmp_path)
    own, baseline = result["tasks"]
    rows = {row["name"]: row for row in own["systems"]}
    assert list(rows) == ["mlx-lm", "plain", "full:1", "full:2", "best:8"]
    assert {row["same_as_plain"] for row in rows.values()} == {4}
    assert {row["figures"]["exact match"]["value"] for row in rows.values()} == {25.0}
    assert rows["best:8"]["extra_parameters"] == 2 * 32 + 2 * 4 * 32
    assert rows["best:8"]["tokens_per_call"]["value"] >= 1
    # The same LoRA: streams change no answer, and plain decoding has a token a call.
    assert [row["kind"] for row in baseline["systems"]] == ["mlx-lm", "plain"]
    plain = baseline["systems"][1]
    assert plain["tokens"] == plain["target_calls"] == rows["plain"]["tokens"]
    assert own["differences"] == {key: {"value": 0, "low": 0, "high": 0} for key in SQL.figures}
    assert "tuned - baseline, exact match: +0.0 [+0.0, +0.0], within noise" in out
    assert "3.53 to 4.13 tokens per call, exact match 87.40 to 91.70" in out
    assert (
        (tmp_path / "out" / "quality-sql.txt").read_text() == out == quality.report(result) + "\n"
    )
    assert (tmp_path / "out" / "quality-sql.png").read_bytes()[:4] == b"\x89PNG"


def test_streams_of_an_untouched_model_and_a_run_that_goes_on(command, tmp_path):
    assert command("--count", 2, adapter="light")[0] == 0
    code, out, err = command(adapter="light")
    assert code == 0 and "quality-sql, best:16: 2 answers of an earlier run" in err
    (task,) = saved(tmp_path)["tasks"]
    assert [row["same_as_plain"] for row in task["systems"]] == [4, 4, 4]
    assert task["scope"] == "streams" and "plain: what the streams draft for" in out


def test_rouge_and_chat_without_references(command, folders, tmp_path):
    code, out, _ = command("--data", folders / "sql" / "test.jsonl", task="e2e")
    (task,) = saved(tmp_path, "e2e")["tasks"]
    assert code == 0 and task["figures"] == ["ROUGE-1", "ROUGE-LSum"]
    assert task["systems"][0]["figures"]["ROUGE-1"]["value"] >= 25
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "w1 w2"}\n')
    code, out, _ = command("--data", chat, task="chat", adapter="light")
    assert code == 0 and "1 of 1" in out and "ROUGE" not in out


def test_trees_are_read_and_named():
    trees = quality.parse_trees("full:2, best:32")
    assert [(t.kind, t.width, t.size) for t in trees] == [("full", 2, 16), ("best", None, 32)]
    assert [quality.tree_label(tree) for tree in trees] == ["full:2", "best:32"]
    for text in ("", "full", "full:x", "wide:3", "full:2,", "best:-1"):
        with pytest.raises(InputError, match="--trees"):
            quality.parse_trees(text)


def test_the_papers_figures():
    assert PAPER["sql"].call_reduction == (3.53, 4.13)
    assert PAPER["e2e"].call_reduction == (3.55, 3.72)
    assert PAPER["dialogsum"].call_reduction == (2.34, 2.62)


BAD = {
    "no data": (("--data", "nowhere.jsonl"), "no data file nowhere.jsonl"),
    "no test file": (("--data-dir", "nowhere"), "no data file nowhere/sql/test.jsonl"),
    "count": (("--count", 0), "--count 0"),
    "max tokens": (("--max-tokens", 0), "--max-tokens 0"),
    "no adapter": (("--adapter", "nowhere"), "no adapter folder nowhere"),
    "no baseline": (("--baseline", "nowhere"), "no folder nowhere"),
    "trees": (("--trees", "full"), "--trees 'full'"),
    "two trees": (("--trees", "full:2", "--tree-size", 8), "--tree-size beside --trees"),
    "tree too large": (("--trees", "full:40"), "expected at most 1024"),
    "idle option": (("--prune-to", 4), "--prune-to would do nothing here"),
    "streams": (("--num-streams", 9), "--num-streams 9"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(command, args, message):
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert message in one_line(err, "perf.quality")


def test_a_baseline_of_streams_is_refused(command, folders):
    code, _, err = command("--baseline", folders / "light")
    assert code == 2 and "adapter_config.json does not exist" in one_line(err, "perf.quality")


# ---------------------------------------------------------------------------------- score


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path):
    """Forty prompts; of two files of answers, one is right in thirty and one in ten of them."""
    rows = [{"prompt": f"q{i}", "completion": f"SELECT {i}"} for i in range(40)]
    (tmp_path / "sql").mkdir()
    write(tmp_path / "sql" / "test.jsonl", rows)
    for name, right in (("good", 30), ("poor", 10)):
        answers = [
            {"prompt": f"q{i}", "completion": f"SELECT {i}" if i < right else "select 7"}
            for i in reversed(range(40))
        ]
        write(tmp_path / f"{name}.jsonl", answers)
    return tmp_path


def score_argv(data, *names):
    files = [f"{name}={data / name}.jsonl" for name in names]
    return ["--task", "sql", "--data-dir", str(data), "--out", str(data / "out"), *files]


def test_files_are_scored_and_compared_prompt_by_prompt(data, capsys):
    assert score.main(score_argv(data, "good", "poor")) == 0
    text = capsys.readouterr().out
    result = json.loads((data / "out" / "score-sql.json").read_text())
    good, poor = result["rows"]
    assert good["figures"]["exact match"]["value"] == 75
    assert poor["figures"]["exact match"]["value"] == 25
    gap = poor["differences"]["exact match"]
    assert gap["value"] == -50 and gap["low"] < -50 < gap["high"] < 0
    assert "poor - good, exact match: -50.0" in text and "not within noise: lower" in text
    assert set(good["differences"]["exact match"].values()) == {0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: ["good"], "expected NAME=FILE.jsonl"),
        (lambda data: [f"a={data}/good.jsonl", f"a={data}/poor.jsonl"], "a name of its own"),
        (lambda data: [f"a={data}/none.jsonl"], "does not exist"),
        (lambda data: [f"a={write(data / 'x', [{'prompt': 'q1'}])}"], "no answer to 40 of 40"),
        (
            lambda data: [f"a={write(data / 'x', [{'prompt': 'q0', 'completion': 'b'}])}"],
            "no answer to 39 of 40",
        ),
    ],
)
def test_bad_files_are_told_in_one_line(data, capsys, change, said):
    assert score.main([*score_argv(data), *change(data)]) == 2
    assert said in one_line(capsys.readouterr().err, score.PROG)
    assert not (data / "out").exists()
