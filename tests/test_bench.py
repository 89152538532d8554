"""perf.bench on tiny adapters: its clock, its energy, its report, and the command as it is run."""

import json
import subprocess
import sys
from time import sleep

import pytest
from real import exit_code, one_line, words, write_base, write_tiny_adapter
from tiny import FakeClock

from perf.bench import __main__ as bench
from perf.bench.__main__ import Part, contexts_result, deadlines, expected_seconds, rounds
from perf.bench.report import line, report
from perf.run.tasks import Example
from ssmlx.calibration.timing import TimedAnswer


@pytest.fixture
def time():
    return FakeClock(now=100.0)


def test_parts_share_the_time_by_weight_and_in_order():
    found = deadlines(100.0, 60.0, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert found == pytest.approx({"a": 110, "b": 130, "c": 160})


class FakeTarget:
    """Answers that take so many seconds each, the last as long as there are more."""

    def __init__(self, time, *seconds):
        self.time, self.seconds, self.asked = time, [*seconds], []

    def answer(self, system, prompt):
        self.time.spend(self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0])
        self.asked.append(prompt)
        return prompt


@pytest.mark.parametrize(
    ("seconds", "limit", "found"),
    [
        ((4, 3), 16, "abc"),  # four rounds in 13 s, and another might take 4
        ((1, 1, 6), 13, "ab"),  # rounds grew slower: a third might end too late
    ],
)
def test_as_many_rounds_as_fit_after_a_warm_up(time, seconds, limit, found):
    target, limit = FakeTarget(time, *seconds), time() + limit
    measured = rounds(target, bench.systems(1)[:1], "abcdefgh", limit, label="", now=time)
    assert [one["mlx-lm"] for one in measured.found] == list(found) and not measured.is_cold
    assert target.asked == ["a", *found] and time() <= limit
    assert measured.seconds == max(seconds)


def test_where_nothing_fits_the_warm_up_counts_and_is_called_cold(time):
    of, target = bench.systems(1), FakeTarget(time, 3)
    found = rounds(target, of, "ab", time() + 5, label="", now=time)
    assert found.found == [{one.name: "a" for one in of}] and found.is_cold


SAMPLES = """*** Sampled system activity (Fri Sep 11 13:41:46 2026 -0700) (1002.90ms elapsed) ***

CPU Power: 823 mW
GPU Power: 26 mW
Combined Power (CPU + GPU + ANE): 1172 mW
*** Sampled system activity (Fri Sep 11 13:41:47 2026 -0700) (1010.09ms elapsed) ***
Combined Power (CPU + GPU + ANE): 2.5 W
"""


def test_why_there_is_no_energy(monkeypatch):
    said = {}
    monkeypatch.setattr(bench, "output_of", lambda *command: said.get(command[0], ""))
    monkeypatch.setattr(bench.platform, "system", lambda: "Linux")
    assert bench.unavailable() == "not measured: needs macOS"
    monkeypatch.setattr(bench.platform, "system", lambda: "Darwin")
    assert bench.unavailable() == "not measured: needs sudo"
    said["sudo"] = "Intel energy model derived package power (CPUs+GT+SA): 2.48W"
    assert "no combined power" in bench.unavailable()
    said["sudo"] = SAMPLES
    assert bench.unavailable() is None


def sampler(text: str):
    """Something that runs for a moment and prints `text`, as powermetrics would."""
    code = f"import time; time.sleep(0.3); print({text!r})"

    def start(samples, output):
        assert samples == 1
        return subprocess.Popen([sys.executable, "-c", code], stdout=output, text=True)

    return start


def test_energy_is_power_times_time_over_tokens():
    asked = []

    def answer(prompt):
        asked.append(prompt)
        sleep(0.05)
        return TimedAnswer([1, 2, 3, 4], 4, 0.05)

    found = bench.energy_of(answer, [[1], [2]], 0.25, sampler(SAMPLES))
    assert found["watts"] == pytest.approx(1.836) and asked[:3] == [[1], [2], [1]]
    # Some 0.05 s for four tokens.
    assert 0.05 / 4 < found["joules_per_token"] / found["watts"] < 0.15 / 4
    assert bench.energy_of(answer, [[1]], 0.25, sampler("no power here")) is None


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
    experiment = bench.experiment_of(parts_of(folders)[1], folders / "base", "float32")
    return experiment, *experiment.load()


def test_texts_end_with_a_prompt_behind_others_and_their_answers(folders):
    texts = [[1, 2, 3], [4, 5], [6, 7]], [[8], [9, 10], []]
    assert bench.text_of_length(2, 0, *texts) == [2, 3]
    assert bench.text_of_length(6, 1, *texts) == [1, 2, 3, 8, 4, 5]
    assert bench.text_of_length(9, 4, *texts) == [10, 6, 7, 1, 2, 3, 8, 4, 5]
    _, target, _ = loaded(folders)
    *text, end = bench.answer_tokens(Example({"prompt": "w1"}, ("w5 w6", "w7")), target)
    assert target.tokenizer.decode(text) == "w5 w6" and end == target.tokenizer.eos_token_id
    assert bench.answer_tokens(Example({"prompt": "w1"}), target) == []


def run_bench(folders, out, monkeypatch, *more):
    monkeypatch.setattr(bench, "PARTS", parts_of(folders))
    monkeypatch.setattr(bench, "RESERVED_SECONDS", 0.0)
    monkeypatch.setattr(bench.platform, "system", lambda: "Linux")
    monkeypatch.setattr(bench, "MOST_ROUNDS", 2)
    monkeypatch.setattr(bench, "CONTEXT_TOKENS", 8)
    argv = ["--model", str(folders / "base"), "--out", str(out), "--contexts", "24", "8", *more]
    return bench.main(argv)


def test_the_command_prints_saves_draws_and_adds_its_line(folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.jsonl").write_text("{}\n")  # of an earlier run
    assert run_bench(folders, tmp_path / "out", monkeypatch) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (tmp_path / "out" / "bench.txt").read_text() == report(result) + "\n"
    assert report(result) in said and result["left_out"] == []
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [task["prompts"] for task in result["answers"]] == [2, 2]
    assert [task["scope"] for task in result["answers"]] == ["all", "streams"]
    assert [one["tokens"] for one in result["contexts"]] == [8, 24]
    assert result["energy"] == "not measured: needs macOS" and "energy: not measured" in said
    _, text = (tmp_path / "out" / "bench.jsonl").read_text().splitlines()
    values = json.loads(text)
    assert text == line(result) and not any(isinstance(v, dict | list) for v in values.values())
    assert "launches: " in said and "is written in place" in said
    assert values["step_ms_paused"] > 0 and values["step_peak_mib_straight"] >= 0
    found = {**result["launches"], "straight_peak": result["launches"]["paused_peak"] + 2**30}
    assert "is COPIED" in report({**result, "launches": found})
    rows = result["answers"][0]["systems"]
    assert [row["name"] for row in rows] == ["mlx-lm", "plain", "streaming"]
    assert values["all_tps_streaming"] == round(rows[2]["tokens_per_second"], 1)
    assert values["all_same_tokens"] is True and values["all_prompts"] == 2
    assert values["context24_prefill_mlx_lm"] > 0 and values["context8_tps_streaming"] > 0
    assert values["joules_per_token_plain"] is None and values["all_first_ms_plain"] > 0
    assert values["weights"] == "float32"  # auto on the CPU
    assert values["streams_peak_mib_streaming"] > values["streams_peak_mib_plain"] > 0
    assert values["streams_tokens_per_call"] >= 1 and values["all_speedup_low"] > 0


def test_what_there_is_no_time_for_is_left_out_and_told(folders, tmp_path, monkeypatch, capsys):
    assert run_bench(folders, tmp_path, monkeypatch, "--minutes", "0.0001") == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    (task,) = result["answers"]  # the first adapter always gets its first round
    assert task["is_cold"] and task["prompts"] == 1 and not result["contexts"]
    left_out = ["8 tokens of context", "24 tokens of context", str(folders / "streams")]
    assert result["left_out"] == left_out
    said = capsys.readouterr().out
    assert "not measured, for want of time: 8 tokens of context" in said
    values = json.loads((tmp_path / "bench.jsonl").read_text())
    assert values["all_speedup"] > 0 and values["all_speedup_low"] is None  # of one prompt
    (table,) = [block for block in said.split("\n\n") if block.startswith("==")]
    assert "the first round alone, not warmed up" in table and "[" not in table


def test_a_longer_context_is_not_begun_where_a_shorter_one_was_too_long(folders, monkeypatch, time):
    experiment, target, prompts = loaded(folders)
    monkeypatch.setattr(bench, "CONTEXT_TOKENS", 4)
    monkeypatch.setattr(bench, "MOST_ROUNDS", 1)
    before = rounds(target, experiment.systems, prompts, 0.0, label="", now=lambda: 0.0)
    assert expected_seconds(before, 10) > expected_seconds(before, 1) > 0
    monkeypatch.setattr(bench, "expected_seconds", lambda found, growth: 5 * growth)
    ends = deadlines(time(), 12, {"8": 1, "24": 1, "48": 1})
    found = contexts_result(experiment, target, prompts, before, ends, (8, 24, 48), time)
    assert [one["tokens"] for one in found] == [8]  # 24 might take 15 s of the 12


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--minutes", "0"], "--minutes 0: expected more than 0"),
        (["--contexts", "64", "0"], "--contexts 0: expected 1 or more"),
        (["--dtype", "int3"], "--dtype"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line(argv, said, tmp_path, capsys):
    assert exit_code(bench.main, *argv, "--out", tmp_path / "out") == 2
    assert said in one_line(capsys.readouterr().err, "perf.bench")


def test_another_models_adapter_is_refused(folders, tmp_path, monkeypatch, capsys):
    other = write_base(tmp_path / "other", norm=2.0)
    assert run_bench(folders, tmp_path / "out", monkeypatch, "--model", str(other)) == 2
    assert "belongs to another base model" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
