"""perf.quality: metrics by hand, intervals, kept answers, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from real import one_line, run_module, words, write_base, write_tiny_adapter

import ssmlx
from perf.quality import __main__ as quality
from perf.quality import answers
from perf.quality.answers import AnswerStore, Kept
from perf.quality.plan import parse_trees, tree_label
from perf.quality.report import PAPER, aligned, draw, report
from perf.quality.summary import is_lossless
from perf.run.metrics import (
    Estimate,
    exact_match,
    mean,
    normalise_sql,
    paired_difference,
    ratio,
    rouge_scorer,
    score_all,
)
from perf.run.systems import named_adapters
from perf.run.tasks import TASKS, read_examples
from ssmlx.calibration.timing import Answer
from ssmlx.errors import InputError

# -------------------------------------------------------------------------------- metrics


def test_sql_is_matched_up_to_white_space():
    assert normalise_sql("  SELECT a\n\tFROM  t ") == "SELECT a FROM t"
    assert exact_match("SELECT  a\nFROM t ", ["SELECT a FROM t"]) == (100, 100)
    assert exact_match("select a from T", ["SELECT a FROM t"]) == (0, 100)
    assert exact_match("SELECT a FROM t;", ["SELECT a FROM t"]) == (0, 0)
    assert exact_match("SELECT a,b", ["SELECT a, b"]) == (0, 0)
    assert exact_match("B", ["a", "B"]) == (100, 100)


def test_rouge_against_figures_worked_by_hand():
    score = rouge_scorer()
    # 3 of 3 words right, 3 of 4 found: F1 = 2 * 1 * 0.75 / 1.75.
    assert score("the cat sat", ["the cat sat down"]) == pytest.approx((600 / 7, 600 / 7))
    # The longest common subsequence is "the cat": 2 of 3 and 2 of 4.
    assert score("sat the cat", ["the cat sat down"]) == pytest.approx((600 / 7, 400 / 7))
    assert score("dog", ["cat"]) == (0, 0)
    assert score("", ["cat"]) == (0, 0)
    # Stemmed, and without case or punctuation.
    assert score("Dogs, running!", ["dog runs"]) == pytest.approx((100, 100))


def test_rouge_lsum_takes_lines_for_sentences():
    score = rouge_scorer()
    assert score("three four\none two", ["one two\nthree four"]) == pytest.approx((100, 100))
    assert score("three four one two", ["one two three four"]) == pytest.approx((100, 50))


def test_rouge_is_the_best_over_references_figure_by_figure():
    score = rouge_scorer()
    answer = "one two three four"
    far, near = "four three two one", "one two three six"
    assert score(answer, [far]) == pytest.approx((100, 25))
    assert score(answer, [near]) == pytest.approx((75, 75))
    assert score(answer, [far, near]) == pytest.approx((100, 75))


def test_scores_come_figure_by_figure():
    scores = score_all(exact_match, ["a", "B", "c"], [["a"], ["b"], ["x"]])
    assert scores.tolist() == [[100, 0, 0], [100, 100, 0]]


def test_rouge_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rouge_score", None)
    with pytest.raises(InputError, match=r"rouge-score is not installed.*\[quality\]"):
        rouge_scorer()


# ------------------------------------------------------------------------------ intervals


def test_intervals_are_the_same_in_every_run():
    values = np.random.default_rng(5).normal(size=40)
    assert mean(values) == mean(values.copy())
    assert mean(values).value == pytest.approx(values.mean())


def test_an_interval_has_the_width_that_theory_gives():
    values = np.random.default_rng(1).normal(10, 3, 400)
    found = mean(values)
    half = 1.96 * values.std() / 20
    assert found.high - found.value == pytest.approx(half, rel=0.1)
    assert found.value - found.low == pytest.approx(half, rel=0.1)


def test_intervals_hold_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(2)
    found = [mean(100 * (rng.random(100) < 0.4)) for _ in range(300)]
    held = sum(one.low <= 40 <= one.high for one in found)
    assert 0.91 * 300 <= held <= 0.98 * 300


def test_a_ratio_is_of_sums():
    assert ratio([10, 30], [5, 5]).value == 4.0
    assert ratio([6, 9, 12], [2, 3, 4]) == Estimate(3, 3, 3)
    assert ratio([1, 2], [0, 0]) == Estimate(0, 0, 0)
    one = mean([7.0])
    assert (one.low, one.high) == (7, 7)


def test_a_paired_difference_sees_what_two_intervals_do_not():
    rng = np.random.default_rng(3)
    theirs = rng.normal(50, 20, 200)
    ours = theirs + rng.normal(2, 3, 200)
    gap = paired_difference(ours, theirs)
    assert mean(ours).low < mean(theirs).high
    assert gap.low > 0 and gap.verdict == "not within noise: higher"
    assert paired_difference(theirs, ours).verdict == "not within noise: lower"
    assert paired_difference(theirs, theirs).verdict == "within noise"
    assert paired_difference(theirs + rng.normal(0, 3, 200), theirs).verdict == "within noise"


def test_an_estimate_as_text():
    assert Estimate(1.234, 1.1, 1.456).text() == "1.23 [1.10, 1.46]"
    assert Estimate(0.5, -1.0, 2.0).text(1, signed=True) == "+0.5 [-1.0, +2.0]"


# -------------------------------------------------------------------------------- options


def test_trees_are_read_and_named():
    trees = parse_trees("full:2, best:32")
    assert [(t.kind, t.width, t.size) for t in trees] == [("full", 2, 16), ("best", None, 32)]
    assert [tree_label(tree) for tree in trees] == ["full:2", "best:32"]
    for text in ("", "full", "full:x", "wide:3", "full:2,", "best:-1"):
        with pytest.raises(InputError, match="--trees"):
            parse_trees(text)


def test_adapters_are_named(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert named_adapters(["x=one/two"]) == {"x": Path("one/two")}
    assert list(named_adapters(["one/two", "./three"])) == ["two", "three"]
    assert list(named_adapters([str(tmp_path / "a=b")])) == ["a=b"]
    for bad in (["x=./a", "x=./b"], ["baseline=./a"], ["=./a"]):
        with pytest.raises(InputError, match="a name of its own"):
            named_adapters(bad)
    with pytest.raises(InputError, match="no bundled adapter"):
        named_adapters(["nothing"])


def test_a_bundled_adapter_goes_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems" / "streams_config.json").write_text("{}")
    monkeypatch.setattr("ssmlx.loading.names.ADAPTERS_FOLDER", tmp_path)
    assert named_adapters(["poems", "x=poems"]) == dict.fromkeys(("poems", "x"), tmp_path / "poems")


def test_examples_take_references_before_the_completion(tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "q", "references": ["r", "s"]}]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    examples = read_examples(path, TASKS["e2e"], None)
    assert [example.references for example in examples] == [("c",), ("r", "s")]
    assert len(read_examples(path, TASKS["e2e"], 1)) == 1
    path.write_text('{"prompt": "p"}\n')
    assert read_examples(path, TASKS["chat"], None)[0].references == ()
    with pytest.raises(InputError, match="object 1, has no answer to compare with"):
        read_examples(path, TASKS["e2e"], None)


# --------------------------------------------------------------------------- kept answers

KEPT = Kept(Answer([1, 2], 1, 0.5), "a “b”", "v1")


def test_kept_answers_come_back(tmp_path):
    store = AnswerStore(tmp_path, "sql", {"a": (1, 2)})
    store.keep([5, 6], KEPT)
    again = AnswerStore(tmp_path, "sql", {"a": (1, 2)})
    assert [5, 6] in again and [5] not in again
    assert again[[5, 6]] == KEPT


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    store = AnswerStore(tmp_path, "sql", {})
    store.keep([1], KEPT)
    store.keep([2], KEPT)
    whole = store.path.read_bytes()
    for cut in (1, 30, len(whole) // 3):
        store.path.write_bytes(whole[:-cut])
        again = AnswerStore(tmp_path, "sql", {})
        assert [1] in again
        again.keep([3], KEPT)
        assert [3] in AnswerStore(tmp_path, "sql", {})


def test_answers_of_other_settings_are_not_mixed_in(tmp_path):
    one, two = ({"max_tokens": n} for n in (8, 9))
    first = AnswerStore(tmp_path, "sql", one)
    first.keep([1], KEPT)
    second = AnswerStore(tmp_path, "sql", two)
    assert [1] not in second and first.path != second.path
    # Nor where a file with the right name says otherwise inside.
    second.path.write_text(first.path.read_text())
    assert [1] not in AnswerStore(tmp_path, "sql", two)
    first.forget()
    assert [1] not in AnswerStore(tmp_path, "sql", one)


# ------------------------------------------------------------------------------ the table


def figure(value: float, half: float = 1.0) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def row(name: str, role: str, decoding: str, **more):
    return {
        "name": name,
        "role": role,
        "scope": "all",
        "decoding": decoding,
        "extra_parameters": 10944 if role == "adapter" else 0,
        "figures": {"exact match": figure(60, 4), "exact match, any case": figure(65, 4)},
        "tokens_per_call": figure(3 if role == "adapter" else 1, 0.1),
        "target_calls": 1000,
        "target_calls_per_answer": figure(10),
        "tokens": 3000,
        "tokens_per_answer": figure(30),
        "tokens_per_second": figure(24),
        "cut_at_max_tokens": 2,
        **more,
    }


def fake_result() -> dict:
    def tree(label):
        return {**row("", "adapter", label), "tree": label, "same_answers": 100}

    streaming = row("sql", "adapter", "best:16", trees=[tree("full:2"), tree("best:16")])
    return {
        "task": "sql",
        "data": "d.jsonl",
        "model": "m",
        "prompts": 100,
        "max_tokens": 64,
        "most_references": 1,
        "figures": ["exact match", "exact match, any case"],
        "systems": [
            row("mlx-lm (sql)", "mlx-lm", "mlx-lm", same_answers=100),
            row("baseline", "baseline", "plain"),
            streaming,
        ],
        "differences": [
            {
                "adapter": "sql",
                "baseline": "baseline",
                "figure": "exact match",
                **figure(0.5, 2),
                "verdict": "within noise",
            }
        ],
        "identical_to_base": [{"adapter": "chat", "base": "base", "same_answers": 99}],
    }


def test_columns_stand_under_each_other():
    assert aligned([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc   d"]


def test_the_table_says_all_of_it():
    text = report(fake_result())
    assert text.startswith("sql: 100 prompts of d.jsonl, m, greedy, float32, at most 64 tokens")
    lines = {line.split("  ")[0]: line for line in text.split("\n")}
    for part in ("best:16", "60.0 [56.0, 64.0]", "3.00 [2.90, 3.10]", "1,000", "10,944"):
        assert part in lines["sql"]
    assert lines["baseline"].endswith("-")
    assert "best:16 *" in text and "100 of 100" in text
    assert "sql - baseline, exact match: +0.5 [-1.5, +2.5], within noise" in text
    assert "chat and the untouched base: 99 of 100 answers the same" in text
    assert "3.53 to 4.13 tokens per call, exact match 87.40 to 91.70" in text
    assert "fewer than" not in text
    assert "fewer than 30 prompts" in report({**fake_result(), "prompts": 6})


def test_answers_that_differ_are_a_failure():
    result = fake_result()
    assert not is_lossless(result)
    result["identical_to_base"][0]["same_answers"] = 100
    assert is_lossless(result)
    result["systems"][2]["trees"][0]["same_answers"] = 99
    assert not is_lossless(result)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for name, change in {"all": {}, "no metric": {"figures": [], "task": "chat"}}.items():
        path = tmp_path / f"{name}.png"
        draw({**fake_result(), **change}, path)
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_papers_figures():
    assert PAPER["sql"].call_reduction == (3.53, 4.13)
    assert PAPER["e2e"].call_reduction == (3.55, 3.72)
    assert PAPER["dialogsum"].call_reduction == (2.34, 2.62)


# ---------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, adapters of both scopes, and data whose first answer is right."""
    root = tmp_path_factory.mktemp("quality")
    base = write_base(root / "base")
    template = "user: {prompt} | model:"
    write_tiny_adapter(root / "tuned", base, template=template)
    write_tiny_adapter(root / "light", base, scope="streams", template=template)
    model, tokenizer = ssmlx.load(str(base), adapter=root / "tuned", dtype="float32")
    prompts = [words(4, first) for first in (1, 9, 17, 25)]
    rows = [{"prompt": prompt, "completion": "none"} for prompt in prompts]
    first = template.replace("{prompt}", prompts[0])
    rows[0]["completion"] = ssmlx.generate(model, tokenizer, first, max_tokens=9) + " \n"
    (root / "sql").mkdir()
    (root / "sql" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture
def command(folders, tmp_path, capsys):
    """Run the command on the tiny model; gives (exit code, stdout, stderr)."""

    def run(*args, adapters=("tuned",), task="sql"):
        argv = ["--task", task, "--model", folders / "base", "--data-dir", folders]
        argv += ["--out", tmp_path / "out", "--max-tokens", 9]
        for name in adapters:
            argv += ["--adapter", folders / name]
        code = quality.main([*map(str, argv), *map(str, args)])
        return code, *capsys.readouterr()

    return run


def saved(tmp_path: Path, task: str = "sql") -> dict:
    return json.loads((tmp_path / "out" / f"quality-{task}.json").read_text())


def test_an_evaluation_from_end_to_end(command, folders, tmp_path):
    code, out, _ = command(
        *("--baseline", folders / "tuned", "--trees", "full:1,full:2,best:8", "--with-mlx-lm"),
        adapters=("tuned", "light"),
    )
    assert code == 0, out
    result = saved(tmp_path)
    rows = {row["name"]: row for row in result["systems"]}
    assert list(rows) == ["mlx-lm (tuned)", "base", "baseline", "tuned", "light"]
    tuned = rows["tuned"]
    assert tuned["figures"]["exact match"]["value"] == 25.0
    assert tuned["extra_parameters"] == 2 * 32 + 2 * 4 * 32
    assert [tree["same_answers"] for tree in tuned["trees"]] == [4, 4, 4]
    most = max(tree["tokens_per_call"]["value"] for tree in tuned["trees"])
    assert tuned["tokens_per_call"]["value"] == most >= 1
    assert rows["mlx-lm (tuned)"]["same_answers"] == 4
    # The same LoRA: streams change no answer, and plain decoding has a token a call.
    assert rows["baseline"]["tokens"] == rows["baseline"]["target_calls"] == tuned["tokens"]
    assert {row["verdict"] for row in result["differences"]} == {"within noise"}
    assert {row["value"] for row in result["differences"]} == {0.0}
    assert result["identical_to_base"] == [{"adapter": "light", "base": "base", "same_answers": 4}]
    assert "light and the untouched base: 4 of 4 answers the same" in out
    assert (tmp_path / "out" / "quality-sql.txt").read_text() == out
    assert (tmp_path / "out" / "quality-sql.png").exists()


def test_a_run_that_was_stopped_goes_on(command, tmp_path, monkeypatch):
    real, asked = answers.ssmlx_answer, []

    def answer(model, tokenizer, prompt, config):
        asked.append(prompt)
        if len(asked) == stop:
            raise KeyboardInterrupt
        return real(model, tokenizer, prompt, config)

    monkeypatch.setattr(answers, "ssmlx_answer", answer)
    stop = 4  # after the warm-up and two answers
    assert command()[0] == 130
    (part,) = (tmp_path / "out").glob("quality-sql-*.part.jsonl")
    assert len(part.read_text().splitlines()) == 1 + 2
    stop, asked[:] = -1, []
    code, _, err = command()
    assert code == 0 and len(asked) == 1 + 2 and "2 answers of an earlier run" in err
    before = saved(tmp_path)["systems"]
    asked.clear()
    assert command()[0] == 0 and not asked and saved(tmp_path)["systems"] == before
    command("--max-tokens", 8)
    assert len(asked) == 1 + 4
    asked.clear()
    command("--fresh")
    assert len(asked) == 1 + 4


def test_answers_of_other_code_are_told(command, monkeypatch):
    assert command("--count", 2)[0] == 0
    monkeypatch.setattr(answers, "code_version", lambda: "other")
    assert "2 answers of an earlier run, 2 of them by other code" in command()[2]


def test_a_changed_adapter_is_answered_again(command, folders, tmp_path):
    first = answers.weights_version(folders / "base", folders / "tuned")
    assert first != answers.weights_version(folders / "base", folders / "light")
    assert first != answers.weights_version(folders / "base", None)
    assert first == answers.weights_version(folders / "base", folders / "tuned")


def test_rouge_and_chat_without_references(command, folders, tmp_path):
    code, out, _ = command("--data", folders / "sql" / "test.jsonl", task="e2e")
    assert code == 0 and saved(tmp_path, "e2e")["figures"] == ["ROUGE-1", "ROUGE-LSum"]
    assert saved(tmp_path, "e2e")["systems"][0]["figures"]["ROUGE-1"]["value"] >= 25
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "w1 w2"}\n')
    code, out, _ = command("--data", chat, task="chat", adapters=("light",))
    assert code == 0 and "1 of 1 answers the same" in out and "ROUGE" not in out


BAD = {
    "no data": (("--data", "nowhere.jsonl"), "no data file nowhere.jsonl"),
    "no test file": (("--data-dir", "nowhere"), "no data file nowhere/sql/test.jsonl"),
    "count": (("--count", 0), "--count 0"),
    "max tokens": (("--max-tokens", 0), "--max-tokens 0"),
    "no adapter": (("--adapter", "x=nowhere"), "no adapter folder nowhere"),
    "no baseline": (("--baseline", "nowhere"), "no folder nowhere"),
    "trees": (("--trees", "full"), "--trees 'full'"),
    "two trees": (("--trees", "full:2", "--tree-size", 8), "--tree-size beside --trees"),
    "tree too large": (("--trees", "full:40"), "expected at most 1024"),
    "idle option": (("--prune-to", 4), "--prune-to would do nothing here"),
    "streams": (("--num-streams", 9), "--num-streams 9"),
    "mlx-lm": (("--with-mlx-lm", "x"), "--with-mlx-lm x"),
    "template": (("--template", "x"), "--template 'x'"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(command, args, message):
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert message in one_line(err, "perf.quality")


def test_a_baseline_of_streams_is_refused(command, folders):
    code, _, err = command("--baseline", folders / "light")
    assert code == 2 and "adapter_config.json does not exist" in one_line(err, "perf.quality")


def test_the_command_as_users_run_it():
    done = run_module("perf.quality", "--task", "poems", "--adapter", "x")
    assert done.returncode == 2
    assert "invalid choice: 'poems'" in one_line(done.stderr, "perf.quality")


def test_a_chat_of_several_turns_is_asked_under_the_chat_template(tmp_path):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Who are you?"},
    ]
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "Hi"}))
    first, second = read_examples(data, TASKS["chat"], None)
    asked = []

    class Words:
        has_chat_template = True

        def apply_chat_template(self, messages, add_generation_prompt):
            asked.append((messages, add_generation_prompt))
            return [1, 2]

    assert first.tokens(None, Words(), None) == [1, 2] and asked == [(turns, True)]
    assert (first.prompt, second.prompt) == ("Who are you?", "Hi")
    with pytest.raises(InputError, match='bad "messages"'):
        data.write_text(json.dumps({"messages": turns[:1]}))
        read_examples(data, TASKS["chat"], None)
