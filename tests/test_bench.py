"""perf.bench on tiny adapters: its clock, its report, and the command as it is run."""

import json
from time import perf_counter

import mlx.core as mx
import pytest
from real import words, write_base, write_tiny_adapter
from refusals import exits, mentions
from tiny import FakeClock, make_model

from perf.bench import __main__ as bench
from perf.bench import machine
from perf.bench.__main__ import (
    Part,
    Rounds,
    answer_rounds,
    measure_after_context,
    part_deadlines,
)
from perf.bench.report import format_text_report
from perf.run.tasks import Example
from perf.run.timing import TimedAnswer
from ssmlx.model import metal
from ssmlx.model.metal.division import AttentionShape, Bucket
from ssmlx.model.metal.trial import Trial


@pytest.fixture
def time():
    return FakeClock(now=100.0)


def test_parts_share_the_time_by_weight_and_in_order():
    found = part_deadlines(100.0, 60.0, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert found == pytest.approx({"a": 110, "b": 130, "c": 160})


def test_a_median_is_taken_over_turns_but_the_first(time):
    order = []
    slow = iter([100.0, 3.0, 1.0, 2.0])

    def call(rows, seconds):
        order.append(rows)
        time.spend(seconds)
        return mx.array(0)

    calls = {1: lambda: call(1, next(slow)), 2: lambda: call(2, 5.0), 4: lambda: call(4, 6.0)}
    found, noise = machine.time_calls_in_turns(calls, 3, time)
    assert found == {1: 2.0, 2: 5.0, 4: 6.0} and order == [1, 2, 4] * 4
    assert noise == 0.0  # of the three calls, two are steady
    spreads = [
        machine.relative_quartile_spread(one) for one in ([1.0], [2.0, 2.0], [1.0, 2.0, 3.0, 4.0])
    ]
    assert spreads == [0.0, 0.0, 0.6]


def test_rows_are_timed_in_trees_of_that_many_nodes_behind_the_context():
    model = make_model()
    for size in machine.ROWS:
        assert machine.make_typical_tree(model, size).num_nodes == size
    assert machine.make_filled_cache(model, [1, 2, 3], 20, scratch_rows=8).offset == 20
    assert machine.weight_bits(model) == 32


class FakeTarget:
    """Answers that take so many seconds each, the last as long as there are more."""

    def __init__(self, time, *seconds):
        self.time = time
        self.seconds = [*seconds]
        self.asked = []

    def answer(self, system, prompt):
        self.time.spend(self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0])
        self.asked.append(prompt)
        return prompt


@pytest.mark.parametrize(("seconds", "limit", "found"), [
    ((4, 3), 16, "abc"),  # four rounds in 13 s, and another might take 4
    ((1, 1, 6), 13, "ab"),  # rounds grew slower: a third might end too late
])  # fmt: skip
def test_as_many_rounds_as_fit_after_a_warm_up(time, seconds, limit, found):
    target = FakeTarget(time, *seconds)
    limit = time() + limit
    measured = answer_rounds(
        target, bench.bench_systems(1)[:1], "abcdefgh", limit, label="", now=time
    )
    assert [one["mlx-lm"] for one in measured.answers] == list(found) and not measured.is_cold
    assert target.asked == ["a", *found] and time() <= limit
    assert measured.longest_seconds == max(seconds)


def test_where_nothing_fits_the_warm_up_counts_and_is_called_cold(time):
    of = bench.bench_systems(1)
    target = FakeTarget(time, 3)
    found = answer_rounds(target, of, "ab", time() + 5, label="", now=time)
    assert found.answers == [{one.name: "a" for one in of}] and found.is_cold


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, adapters of two scopes, and prompts."""
    root = tmp_path_factory.mktemp("bench")
    base = write_base(root / "base")
    for name in ("all", "streams"):
        write_tiny_adapter(root / name, base, scope=name)
    rows = [json.dumps({"prompt": words(5 + first, first)}) for first in range(2)]
    (root / "prompts.jsonl").write_text("\n".join(rows))
    return root


def parts_of(folders):
    data = folders / "prompts.jsonl"
    return [Part(str(folders / name), "chat", 6, 1.0, data) for name in ("all", "streams")]


def loaded(folders):
    experiment = bench.experiment_of_part(parts_of(folders)[1], folders / "base", "float32")
    return experiment, *experiment.load_target_and_prompts()


def test_texts_end_with_a_prompt_behind_others_and_their_answers(folders):
    texts = [[1, 2, 3], [4, 5], [6, 7]], [[8], [9, 10], []]
    assert bench.make_context(2, 0, *texts) == [2, 3]
    assert bench.make_context(6, 1, *texts) == [1, 2, 3, 8, 4, 5]
    assert bench.make_context(9, 4, *texts) == [10, 6, 7, 1, 2, 3, 8, 4, 5]
    _, target, _ = loaded(folders)
    *text, end = bench.encode_reference(Example({"prompt": "w1"}, ("w5 w6", "w7")), target)
    assert target.tokenizer.decode(text) == "w5 w6" and end == target.tokenizer.eos_token_id
    assert bench.encode_reference(Example({"prompt": "w1"}), target) == []


def run_bench(folders, out, monkeypatch, *more):
    monkeypatch.setattr(bench, "PARTS", parts_of(folders))
    monkeypatch.setattr(machine, "TURNS", (2, 2))
    monkeypatch.setattr(bench, "MOST_ROUNDS", 2)
    monkeypatch.setattr(bench, "CONTEXT_TOKENS", 8)
    argv = ["--model", str(folders / "base"), "--out", str(out), "--contexts", "24", "8", *more]
    return bench.main(argv)


@pytest.mark.slow
def test_the_command_prints_and_saves(folders, tmp_path, monkeypatch, capsys):
    assert run_bench(folders, tmp_path / "out", monkeypatch) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (tmp_path / "out" / "bench.txt").read_text() == format_text_report(result) + "\n"
    assert format_text_report(result) in out and result["left_out"] == []
    assert [task["prompts"] for task in result["answers"]] == [2, 2]
    assert [task["scope"] for task in result["answers"]] == ["all", "streams"]
    assert [one["tokens"] for one in result["contexts"]] == [8, 24]
    rows = result["rows"]
    launches = result["launches"]
    assert str(folders) not in out
    assert launches["paused_seconds"] > 0 and launches["straight_peak"] >= 0
    found = {**launches, "straight_peak": launches["paused_peak"] + 2**30}
    assert format_text_report({**result, "launches": found}) not in out, "the cache was copied"
    assert launches["reads"] == 1
    assert rows["rows"][0] == rows["ratios"][0] == 1 and rows["bits"] == 32
    assert len(rows["ratios"]) == len(rows["rows"]) and min(rows["seconds"], default=0) > 0
    assert rows["launch"] > 0
    rows = result["answers"][0]["systems"]
    assert [row["name"] for row in rows] == ["mlx-lm", "plain", "default"]
    assert rows[2]["same_as_plain"] == 2 and rows[2]["tokens_per_call"]["value"] >= 1
    assert min(row["peak_bytes"] for row in rows) > 0 and rows[2]["speedup"]["low"] > 0
    assert result["weights"] == "float32"  # auto on the CPU
    learned = [["plain calls a call, by nodes", "4"], ["streams, from 0 tokens on", "1.75"]]
    text = format_text_report({**result, "learned": learned})
    assert text.splitlines().count("streams, from 0 tokens on     1.75") == 1
    assert len(format_text_report({**result, "learned": []})) < len(text)


def test_what_there_is_no_time_for_is_left_out_and_told(folders, tmp_path, monkeypatch, capsys):
    assert run_bench(folders, tmp_path, monkeypatch, "--minutes", "0.0001") == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    (task,) = result["answers"]  # the first adapter always gets its first round
    assert task["is_cold"] and task["prompts"] == 1 and not result["contexts"]
    assert result["left_out"] == ["streams", "8 tokens of context", "24 tokens of context"]
    out = capsys.readouterr().out
    assert all(left_out in out for left_out in result["left_out"])
    (table,) = [block for block in out.split("\n\n") if block.startswith("== all")]
    assert "[" not in table


def test_a_context_is_not_begun_where_a_round_would_end_too_late(folders, monkeypatch):
    experiment, target, prompts = loaded(folders)
    monkeypatch.setattr(bench, "CONTEXT_TOKENS", 4)
    monkeypatch.setattr(bench, "MOST_ROUNDS", 1)
    answer = TimedAnswer([1, 2], 1, 100.0, prefill_seconds=100.0)
    before = Rounds([{"plain": answer}], False, 200.0)
    given = (experiment, target, [[1, 2, 3, 4], *prompts[1:]], before)
    now = perf_counter()
    assert measure_after_context(*given, now + 389, 8) is None  # 1.3 times 200 + 100 seconds
    assert measure_after_context(*given, now + 450, 12) is None
    found = measure_after_context(*given, now + 450, 8)
    assert found["tokens"] == 8 and found["prompts"] == 1


@pytest.mark.slow
def test_where_the_attention_kernel_is_taken(folders, tmp_path, monkeypatch, capsys):
    trials = [Trial(True, 1.5, 3e-5), Trial(True, 0.5, 3e-5), Trial(agrees=False)]
    shapes = [AttentionShape(rows, 4, 2, 256, 64, mx.float16) for rows in (4, 8, 16)]
    found = {Bucket(one, 1, False): trial for one, trial in zip(shapes, trials, strict=True)}
    monkeypatch.setattr(metal, "trials", lambda: found)
    assert run_bench(folders, tmp_path, monkeypatch, "--minutes", "0.0001") == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if mentions(one, "4x256")]
    assert mentions(line, "30/20", "8x256", "30/60", "16x256")


@pytest.mark.parametrize(("argv", "named"), [
    (["--minutes", "0"], "--minutes 0"),
    (["--contexts", "64", "0"], "--contexts 0"),
    (["--dtype", "int3"], "--dtype"),
    (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
])  # fmt: skip
def test_bad_input_is_one_line(argv, named, tmp_path, capsys):
    line = exits(capsys, bench.main, *argv, "--out", tmp_path / "out")
    assert mentions(line, *named.split())
