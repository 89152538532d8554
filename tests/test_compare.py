"""perf.compare on tiny models: every system, its tables, and what stops and goes on."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from real import (
    VOCAB,
    WIDTH,
    make_adapter,
    one_line,
    run_module,
    words,
    write_base,
    write_tiny_adapter,
)
from tiny_heads import HEAD_KINDS, LEVELS, random_heads

import ssmlx
from perf.compare import __main__ as compare
from perf.compare import bench as compare_bench
from perf.compare import readme as compare_readme
from perf.compare import run as compare_run
from perf.compare import summary as compare_summary
from perf.compare.bench import load_bench
from perf.compare.picture import draw
from perf.compare.plan import by_task, make_plan
from perf.compare.readme import FIRST, LAST, rewrite
from perf.compare.report import report
from perf.compare.run import settings_of
from perf.compare.summary import failures, speedups
from perf.compare.systems import PLAIN, SYSTEMS, DecodingMethod, parse_systems
from perf.run.store import Kept
from ssmlx.calibration.timing import Answer
from ssmlx.decoding import loop as decode
from ssmlx.drafters.heads import write_heads
from ssmlx.errors import InputError
from ssmlx.loading.adapter import write_adapter
from ssmlx.loading.load import load_base
from ssmlx.settings import SamplingConfig
from ssmlx.tuning import machine
from ssmlx.tuning.report import write_result

TEMPLATE = "user: {prompt} | model:"
PROMPTS = [words(4, first) for first in (1, 9, 17)]
GREEDY = SamplingConfig()
LOSSLESS = [name for name in SYSTEMS if name != "mlx-lm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, another one, a draft model, adapters of both scopes, heads, and data."""
    root = tmp_path_factory.mktemp("compare")
    base = write_base(root / "base")
    write_base(root / "draft", seed=3)
    write_tiny_adapter(root / "tuned", base, template=TEMPLATE)
    write_tiny_adapter(root / "light", base, scope="streams", template=TEMPLATE)
    other = write_base(root / "other", norm=1.5)
    write_tiny_adapter(root / "strange", other)
    backbone, _ = load_base(base, "float32")
    for kind in HEAD_KINDS:
        (root / kind).mkdir()
        write_heads(root / kind, random_heads(kind, backbone))
    model, tokenizer = ssmlx.load(str(base), adapter=root / "tuned", dtype="float32")
    first = TEMPLATE.replace("{prompt}", PROMPTS[0])
    rows = [{"prompt": prompt, "completion": "none"} for prompt in PROMPTS]
    rows[0]["completion"] = ssmlx.generate(model, tokenizer, first, max_tokens=9)
    for task in ("sql", "chat"):
        (root / task).mkdir()
        (root / task / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture
def arguments(folders, tmp_path):
    """Options of the command on the tiny model."""

    def arguments(*more, adapter="sql=tuned", task=("sql",)):
        name, _, folder = adapter.partition("=")
        argv = ["--task", *task, "--model", folders / "base", "--data-dir", folders]
        argv += ["--out", tmp_path / "out", "--repeats", 2]
        argv += [] if "--max-tokens" in more else ["--max-tokens", 9]
        argv += ["--adapter", f"{name}={folders / folder}"]
        return [*map(str, argv), *map(str, more)]

    return arguments


@pytest.fixture
def command(arguments, capsys, monkeypatch):
    """Run the command on the tiny model, without its picture; (exit code, stdout, stderr)."""
    monkeypatch.setattr(compare, "draw", lambda result, path: None)

    def run(*more, **settings):
        code = compare.main(arguments(*more, **settings))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def weights(folders):
    """Options for what every system drafts with."""
    return (
        *("--medusa", f"sql={folders / 'medusa'}"),
        *("--mlp-speculator", f"sql={folders / 'mlp-speculator'}"),
        *("--draft-model", folders / "draft"),
    )


def saved(tmp_path: Path, folder: str = "out") -> dict:
    return json.loads((tmp_path / folder / "compare.json").read_text())


def rows_of(result: dict, task: int = 0) -> dict[str, dict]:
    return {row["name"]: row for row in result["tasks"][task]["systems"]}


# -------------------------------------------------------------------------- from end to end


def test_every_system_from_end_to_end(command, weights, tmp_path):
    code, out, err = command(*weights)
    assert code == 0, err
    result = saved(tmp_path)
    task, rows = result["tasks"][0], rows_of(result)
    assert tuple(rows) == SYSTEMS and task["left_out"] == {}
    assert [row["same_as_plain"] for row in rows.values()] == [3] * len(SYSTEMS)
    figures = [row["figures"]["exact match"]["value"] for row in rows.values()]
    assert figures == pytest.approx([100 / 3] * len(SYSTEMS))
    assert rows["plain"]["tokens"] == rows["plain"]["target_calls"] == 27
    assert rows["mlx-lm"]["speedup"] == {"value": 1, "low": 1, "high": 1}
    assert all(row["tokens"] == 27 and row["target_calls"] <= 27 for row in rows.values())
    assert all(row["latency_seconds"]["value"] > row["decode_seconds"]["value"] > 0
               for row in rows.values())  # fmt: skip
    draft = rows["draft-model"]
    assert draft["draft_calls"] > 0 and task["draft_call_seconds"] > 0
    assert {row["draft_calls"] for row in rows.values() if row is not draft} == {0}
    assert rows["streams"]["speedup_over_draft_model"]["value"] > 0
    assert (tmp_path / "out" / "compare.txt").read_text() == out
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_what_systems_need_beside_the_target(command, weights, tmp_path):
    assert command(*weights, "--count", 1)[0] == 0
    rows = rows_of(saved(tmp_path))
    names = ("mlx-lm", "plain", "streams", "draft-model", "lookahead")
    found = {name: rows[name]["extra_parameters"] for name in names}
    size = sum(array.size for _, array in tree_flatten(load_parameters(weights[-1])))
    streams = 2 * WIDTH + 2 * 4 * WIDTH
    assert found == {"mlx-lm": 0, "plain": 0, "streams": streams, "draft-model": size,
                     "lookahead": 0}  # fmt: skip
    assert rows["medusa"]["extra_parameters"] == LEVELS * (WIDTH * WIDTH + WIDTH + VOCAB * WIDTH)
    assert rows["draft-model"]["weight_bytes"] >= 4 * size
    assert rows["streams"]["weight_bytes"] >= 4 * streams
    assert rows["plain"]["weight_bytes"] == 0 < rows["plain"]["peak_bytes"]
    assert all(row["peak_bytes"] > row["weight_bytes"] for row in rows.values())


def load_parameters(folder):
    return load_base(Path(folder), "float32")[0].model.parameters()


def test_streams_alone_leave_the_target_as_it_is(command, folders, tmp_path):
    systems = ("--systems", "streams", "lookahead")
    assert command(*systems, adapter="sql=light")[0] == 0
    result = saved(tmp_path)
    rows = rows_of(result)
    assert result["tasks"][0]["scope"] == "streams"
    assert [row["same_as_plain"] for row in rows.values()] == [3] * 4
    # Its LoRA is not the target's: it counts as the streams' own.
    lora = make_adapter(folders / "base", scope="streams").lora.values()
    extra = sum(one.a.size + one.b.size for one in lora) + 2 * WIDTH + 2 * 4 * WIDTH
    assert rows["streams"]["extra_parameters"] == extra
    command(*systems, "--out", tmp_path / "bare", adapter="sql=tuned")
    assert rows_of(saved(tmp_path, "bare"))["plain"]["figures"] != rows["plain"]["figures"]


def test_a_system_without_its_weights_is_left_out(command, folders, tmp_path):
    code, out, err = command("--count", 1)
    assert code == 0
    task = saved(tmp_path)["tasks"][0]
    assert set(task["left_out"]) == {"medusa", "mlp-speculator", "draft-model"}
    assert "medusa: left out, no --medusa sql=FOLDER" in out
    assert "sql: medusa is left out, no --medusa sql=FOLDER" in err
    argv = ("--task", "sql", "--model", folders / "base", "--data-dir", folders, "--count", 1,
            "--out", tmp_path / "base", "--adapter", "none", "--max-tokens", 5)  # fmt: skip
    assert compare.main([*map(str, argv)]) == 0
    task = saved(tmp_path, "base")["tasks"][0]
    assert task["left_out"]["streams"] == "no --adapter sql=FOLDER" and task["scope"] is None


def test_several_tasks_and_trees(command, folders, tmp_path):
    full = "streams --tree full --tree-width 2 --num-streams 1 --prune budget --prune-to 2"
    code, _, _ = command(
        *("--systems", full, "medusa --tree-size 5", "--medusa", f"chat={folders / 'medusa'}"),
        *("--adapter", f"chat={folders / 'light'}", "--repeats", 1),
        *("--max-tokens", "sql=9", "--max-tokens", "chat=7"),
        task=("sql", "chat"),
    )
    assert code == 0
    result = saved(tmp_path)
    assert [task["max_tokens"] for task in result["tasks"]] == [9, 7]
    assert [task["task"] for task in result["tasks"]] == ["sql", "chat"]
    assert list(rows_of(result, 0)) == ["mlx-lm", "plain", full]
    assert list(rows_of(result, 1)) == ["mlx-lm", "plain", full, "medusa --tree-size 5"]
    options = rows_of(result, 1)[full]["options"]
    assert (options["levels"], options["nodes"]) == (1, 3)
    assert options["tree"]["width"] == 2 and options["prune"]["kind"] == "budget"
    assert rows_of(result, 1)["medusa --tree-size 5"]["options"]["nodes"] == 5


def test_sampling_writes_one_text_whatever_drafts(command, weights, tmp_path):
    code, out, _ = command(*weights, "--temp", 1, "--top-k", 4, "--seed", 2)
    assert code == 0 and "temperature 1, top-k 4, seed 2" in out and "draws of its own" in out
    result = saved(tmp_path)
    rows = rows_of(result)
    assert (result["temp"], result["top_k"], result["seed"]) == (1, 4, 2)
    assert [rows[name]["same_as_plain"] for name in LOSSLESS] == [3] * len(LOSSLESS)
    assert rows["mlx-lm"]["same_as_plain"] is None and rows["mlx-lm"]["differences"] == []


# ---------------------------------------------------------------------- on the same weights


@pytest.mark.parametrize("adapter", ["tuned", "light"])
def test_all_systems_share_the_targets_arrays(arguments, weights, adapter):
    plan = make_plan(compare.parse_args(arguments(*weights, adapter=f"sql={adapter}")))
    bench = load_bench(plan, plan.tasks[0])
    own = dict(tree_flatten(bench.model.parameters()))
    target = dict(tree_flatten(model_of(bench, "plain").backbone.model.parameters()))
    assert own.keys() == target.keys() and all(own[name] is target[name] for name in own)
    streams = dict(tree_flatten(model_of(bench, "streams").backbone.model.parameters()))
    # LoRA on stream rows stands beside the very arrays, inside its layer.
    plain = {name.replace(".linear.", "."): array for name, array in streams.items()}
    assert all(own[name] is plain[name] for name in own)
    assert (len(plain) > len(own)) == (adapter == "light")
    assert bench.target_bytes == sum(array.nbytes for array in own.values())


def model_of(bench, name):
    """The model that a system's answers come from."""
    (drafting,) = (
        cell.cell_contents
        for cell in bench.answerers[name].__closure__
        if isinstance(cell.cell_contents, compare_bench.Drafting)
    )
    return drafting.model


def test_a_draft_model_starts_every_answer_from_nothing(command, folders, tmp_path):
    draft = ("--systems", "draft-model", "--draft-model", folders / "draft")
    assert command(*draft, "--count", 1, "--repeats", 3)[0] == 0
    parts = [path.read_text().splitlines() for path in (tmp_path / "out").glob("*.part.jsonl")]
    lines = next(p for p in parts if json.loads(p[0])["settings"]["system"] == "draft-model")
    assert len({json.loads(line)["draft_calls"] for line in lines[1:]}) == 1


# -------------------------------------------------------------------------------- in turns


@pytest.fixture
def asked(monkeypatch):
    """Who was asked, in order; raises Ctrl-C at the answer whose number is in `stop`."""
    names: list[str] = []
    ours, theirs = compare_bench.ssmlx_answer, compare_bench.mlx_lm_answer

    def note(name):
        names.append(name)
        if len(names) == stop[0]:
            raise KeyboardInterrupt

    def ssmlx_answer(model, tokenizer, prompt, config):
        note(config.drafter or config.decoding)
        return ours(model, tokenizer, prompt, config)

    def mlx_lm_answer(*args):
        note("mlx-lm")
        return theirs(*args)

    stop = [-1]
    monkeypatch.setattr(compare_bench, "ssmlx_answer", ssmlx_answer)
    monkeypatch.setattr(compare_bench, "mlx_lm_answer", mlx_lm_answer)
    return names, stop


def test_systems_take_turns_in_an_order_that_rotates(command, asked):
    names, _ = asked
    assert command("--systems", "streams", "--count", 2, "--repeats", 2, "--warm-up", 2)[0] == 0
    warm_up, order = names[:6], ["mlx-lm", "plain", "streams"]
    assert warm_up == [name for name in order for _ in range(2)]
    turns = [order[turn % 3 :] + order[: turn % 3] for turn in range(4)]
    assert names[6:] == [name for turn in turns for name in turn]


def test_a_run_that_was_stopped_goes_on(command, asked, tmp_path):
    names, stop = asked
    systems = ("--systems", "streams", "prompt-lookup")
    assert command(*systems, "--out", tmp_path / "whole")[0] == 0
    stop[0], names[:] = 4 + 10 + 1, []  # after the warm-ups and ten answers
    code, _, err = command(*systems)
    assert code == 130 and "interrupted" in err
    parts = list((tmp_path / "out").glob("compare-sql-*.part.jsonl"))
    assert sum(len(path.read_text().splitlines()) - 1 for path in parts) == 10
    stop[0], names[:] = -1, []
    code, _, err = command(*systems)
    assert code == 0 and "sql, streams: 3 answers of an earlier run" in err
    assert len(names) == 4 + 4 * 3 * 2 - 10
    assert without_times(saved(tmp_path)) == without_times(saved(tmp_path, "whole"))
    before, names[:] = saved(tmp_path), []
    assert command(*systems)[0] == 0 and not names  # every answer is there
    assert without_times(saved(tmp_path)) == without_times(before)
    assert command(*systems, "--fresh")[0] == 0 and len(names) == 4 + 4 * 3 * 2
    # Speeds compare within a run: other systems beside them are another one.
    names[:] = []
    assert command("--systems", "streams")[0] == 0 and len(names) == 3 + 3 * 3 * 2


def without_times(result: dict) -> list:
    """What does not depend on the clock, or on what else lies in memory."""
    names = ("tokens", "target_calls", "draft_calls", "tokens_per_call", "figures", "differences",
             "same_as_plain", "extra_parameters", "options")  # fmt: skip
    return [[row[name] for name in names] for row in result["tasks"][0]["systems"]]


def test_answers_depend_on_all_that_moves_them(arguments, weights, tmp_path):
    def settings(*more, system="medusa", **adapter):
        plan = make_plan(compare.parse_args(arguments(*weights, *more, **adapter)))
        task = plan.tasks[0]
        return settings_of(plan, task, next(s for s in task.systems if s.name == system))

    first = settings()
    assert first == settings("--repeats", 5) == settings("--count", 2)
    assert first != settings(system="plain")
    for more in (("--max-tokens", 8), ("--dtype", "bfloat16"), ("--temp", 1),
                 ("--systems", "medusa")):  # fmt: skip
        assert settings(*more) != first
    assert settings(adapter="sql=light") != first


# ------------------------------------------------------------------------------ same tokens


def test_a_lossy_drafter_is_a_failure(command, monkeypatch, tmp_path):
    def lossy(model, tree, hidden, sampler, places, acceptance):
        tokens = (decode.choose(model, hidden, sampler, places) + 1) % VOCAB
        return tokens, decode.accept(tree, tokens)

    monkeypatch.setattr(decode, "verify", lossy)
    code, out, err = command("--systems", "prompt-lookup")
    assert code == 1 and "tokens differ from plain decoding's: sql, prompt-lookup" in err
    assert "prompt-lookup: prompt 1 parts from plain at token 1; the target's two logits" in out
    row = rows_of(saved(tmp_path))["prompt-lookup"]
    assert row["same_as_plain"] == 0 and row["figures_of"] == "prompt-lookup"
    assert row["figures"]["exact match"]["value"] == 0
    assert not any(one["near_tie"] for one in row["differences"])


def test_mlx_lm_that_differs_is_told_and_no_failure(command, monkeypatch, tmp_path):
    real = compare_bench.mlx_lm_answer

    def other(*args):
        answer = real(*args)
        return replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % VOCAB])

    monkeypatch.setattr(compare_bench, "mlx_lm_answer", other)
    code, out, _ = command("--systems", "streams")
    assert code == 0 and "mlx-lm: prompt 3 parts from plain at token 9" in out
    rows = rows_of(saved(tmp_path))
    assert rows["mlx-lm"]["same_as_plain"] == 0 and rows["streams"]["same_as_plain"] == 3


def test_a_near_tie_is_rounding_in_half_precision_alone(arguments):
    options = arguments("--systems", "streams", "--dtype", "bfloat16")
    plan = make_plan(compare.parse_args(options))
    bench = load_bench(plan, plan.tasks[0])
    logits = bench.model(mx.array([bench.prompts[0]]))[0, -1].astype(mx.float32)
    order = [int(token) for token in mx.argsort(-logits)]
    close = min(range(VOCAB - 1), key=lambda i: float(logits[order[i]] - logits[order[i + 1]]))
    for pair, tie in (((order[close], order[close + 1]), True), ((order[0], order[-1]), False)):
        found = compare_run.difference(plan, bench, 0, [pair[0]], [pair[1]])
        assert (found.token, found.near_tie) == (0, tie)
        assert found.gap == pytest.approx(abs(float(logits[pair[0]] - logits[pair[1]])))
        row = {"name": "x", "kind": "streams", "differences": [{"near_tie": found.near_tie}]}
        assert failures({"tasks": [{"task": "sql", "systems": [row]}]}) == (
            [] if tie else ["sql, x"]
        )
    exact = compare_run.difference(
        replace(plan, dtype="float32"), bench, 0, [order[close]], [order[close + 1]]
    )
    assert exact.near_tie is (exact.gap == 0)
    assert compare_run.difference(plan, bench, 0, [1, 2], [1]).gap is None


def test_the_metric_of_equal_answers_is_computed_once(command, monkeypatch, tmp_path):
    real, scored = compare_summary.score_texts, []

    def score(task, examples, texts):
        scored.append(texts)
        return real(task, examples, texts)

    monkeypatch.setattr(compare_summary, "score_texts", score)
    code, out, _ = command("--systems", "streams", "lookahead")
    assert code == 0 and len(scored) == 1
    assert {row["figures_of"] for row in rows_of(saved(tmp_path)).values()} == {PLAIN}
    assert " =" in next(line for line in out.splitlines() if line.startswith("streams"))


# ------------------------------------------------------------------------------- the figures


def kept(seconds: float, tokens: int = 5) -> Kept:
    return Kept(Answer(list(range(tokens)), tokens, seconds), "", "")


def test_a_speed_up_is_a_ratio_of_medians_over_prompts():
    ours = [[kept(1.0), kept(9.0), kept(1.0)], [kept(2.0)] * 3, [kept(4.0)] * 3]
    theirs = [[kept(2.0)] * 3, [kept(3.0)] * 3, [kept(8.0)] * 3]
    method = DecodingMethod("streams", "streams")

    def speedup(ours, theirs):
        return speedups(method, {"streams": ours, "mlx-lm": theirs})["speedup"]

    found = speedup(ours, theirs)
    assert found["value"] == pytest.approx((4 / 2.0) / (4 / 3.0))
    assert found["low"] <= found["value"] <= found["high"]
    # A single token takes no time to decode: such an answer says nothing of speed.
    assert speedup([[kept(0.0, 1)]], [[kept(0.0, 1)]]) is None
    assert speedup([[kept(0.0, 1)], ours[1]], [theirs[0], theirs[1]])["value"] == 1.5


def test_the_papers_lines_stand_below_ours(command):
    _, out, _ = command("--systems", "streams", "--count", 1)
    lines = [line.split() for line in out.splitlines() if line.startswith("  paper: SS")]
    assert " ".join(lines[0][3:9]) == "2.39 to 3.14 3.53 to 4.13"
    assert " ".join(lines[1][3:6]) == "6.88 to 7.79" and "133 to 157" in " ".join(lines[1])


def test_values_by_task(tmp_path):
    tasks = ("sql", "chat")
    assert by_task("medusa", ["sql=a", "chat=b"], tasks) == {"sql": "a", "chat": "b"}
    assert by_task("draft_model", ["org/small"], tasks) == dict.fromkeys(tasks, "org/small")
    (tmp_path / "a=b").mkdir()
    whole = str(tmp_path / "a=b")
    assert by_task("medusa", [whole], ("sql",)) == {"sql": whole}
    for bad in (["e2e=a"], ["sql="], ["sql=a", "sql=b"], ["a", "sql=b"]):
        with pytest.raises(InputError, match=r"--medusa .* once for each task"):
            by_task("medusa", bad, tasks)


def test_systems_are_parsed_with_the_options_of_generate():
    systems = {s.name: s for s in parse_systems(["streams", "lookahead window=7"], GREEDY)}
    assert list(systems) == ["mlx-lm", "plain", "streams", "lookahead window=7"]
    assert systems["lookahead window=7"].config.lookahead.window == 7
    assert systems["mlx-lm"].config is None and systems["plain"].config.decoding == "plain"
    assert systems["streams"].config.drafter == "streams"


# --------------------------------------------------------------------------------- README


def test_the_readmes_table_is_rewritten_between_its_marks(command, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_bytes(f"# a\r\n\r\n{FIRST}\nold\n{LAST}\r\nb\n".encode())
    assert command("--systems", "streams", "--readme", readme)[0] == 0
    text = readme.read_bytes().decode()
    assert text.startswith(f"# a\r\n\r\n{FIRST}\n") and text.endswith(f"\n{LAST}\r\nb\n")
    assert "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| `mlx-lm`",
        "| `plain`",
        "| `streams`",
    ]
    assert len({line.count("|") for line in lines}) == 1 and "3 of 3" in lines[-1]
    before = text
    result = tmp_path / "out" / "compare.json"
    assert compare.main(["--from", str(result), "--readme", str(readme)]) == 0
    assert readme.read_bytes().decode() == before
    assert capsys.readouterr().out == result.with_suffix(".txt").read_text()


def test_a_kill_leaves_readme_and_result_as_they_were(monkeypatch, tmp_path):
    def killed(*args):
        raise KeyboardInterrupt

    readme, result = tmp_path / "README.md", tmp_path / "x.json"
    readme.write_text(f"{FIRST}\nold\n{LAST}\n")
    result.write_text("old")
    monkeypatch.setattr(compare_readme, "markdown", lambda result: "new")
    monkeypatch.setattr(Path, "replace", killed)
    for write in (lambda: rewrite(readme, {}), lambda: write_result({}, result, "new")):
        with pytest.raises(KeyboardInterrupt):
            write()
    assert "old" in readme.read_text() and result.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2, "nothing is left beside them"


@pytest.mark.parametrize("text", ["", FIRST, f"{LAST} {FIRST}", f"{FIRST}{FIRST}{LAST}"])
def test_a_readme_without_its_marks_is_refused_before_the_run(command, tmp_path, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    code, out, err = command("--readme", readme)
    assert (code, out) == (2, "") and "has no place for the table" in one_line(err, "perf.compare")
    with pytest.raises(InputError):
        rewrite(readme, {})
    assert readme.read_text() == text


# ------------------------------------------------------------------------------- bad input

BAD = {
    "system": (("--systems", "dreams"), "--systems 'dreams'; expected one of mlx-lm, plain"),
    "twice": (("--systems", "streams", "streams"), "--systems names 'streams' twice"),
    "mlx-lm": (("--systems", "mlx-lm --tree full"), "--systems 'mlx-lm --tree full'"),
    "option": (("--systems", "streams --width 2"), "unrecognized arguments: --width"),
    "idle": (("--systems", "lookahead --tree-size 8"), "--tree-size would do nothing here"),
    "drafter": (("--systems", "streams head=8bit"), "head=8bit is not a system's"),
    "streams": (("--systems", "streams --num-streams 9"), "--num-streams 9"),
    "repeats": (("--repeats", 0), "--repeats 0; expected 1 or more"),
    "warm-up": (("--warm-up", -1), "--warm-up -1"),
    "count": (("--count", 0), "--count 0"),
    "max tokens": (("--max-tokens", 0), "--max-tokens 0; expected a number of 1 or more"),
    "max tokens of two": (("--max-tokens", 4, "--max-tokens", "sql=5"), "--max-tokens sql=5"),
    "top-k": (("--top-k", 4), "--top-k would do nothing here"),
    "no data": (("--data", "nowhere.jsonl"), "no data file nowhere.jsonl"),
    "task of data": (("--data", "e2e=x.jsonl"), "--data e2e=x.jsonl"),
    "task of heads": (("--medusa", "poems=x"), "--medusa poems=x; expected TASK=VALUE"),
    "no heads": (("--medusa", "nowhere"), "no heads folder nowhere"),
    "no draft model": (("--draft-model", "./nowhere"), "nowhere"),
    "model": (("--model", "./nowhere"), "nowhere"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(command, args, message):
    code, out, err = command(*args)
    err = "".join(line for line in err.splitlines(True) if "is left out" not in line)
    assert (code, out) == (2, "")
    assert message in one_line(err, "perf.compare")


def test_weights_of_another_model_are_refused(command, folders):
    medusa = ("--systems", "medusa", "--medusa")
    for more, adapter, said in (
        ((), "sql=strange", "the adapter belongs to another base model"),
        ((), "sql=nowhere", "no adapter folder"),
        ((*medusa, folders / "mlp-speculator"), "sql=tuned", "holds heads for mlp-speculator"),
        ((*medusa, folders / "tuned"), "sql=tuned", "heads_config.json does not exist"),
    ):
        code, _, err = command(*more, adapter=adapter)
        err = "".join(line for line in err.splitlines(True) if "is left out" not in line)
        assert code == 2 and said in one_line(err, "perf.compare"), said


def test_a_later_task_is_checked_before_the_first_answer(command, folders, asked):
    code, _, err = command(
        "--systems", "streams", "--adapter", f"chat={folders / 'strange'}", task=("sql", "chat")
    )
    assert code == 2 and "another base model" in one_line(err, "perf.compare")
    assert asked[0] == []


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    for text, said in (("{}", "holds something else"), ("[", "is not valid JSON")):
        path.write_text(text)
        assert compare.main(["--from", str(path)]) == 2
        assert said in one_line(capsys.readouterr().err, "perf.compare")


def test_results_of_several_tasks_are_shown_as_one(tmp_path, command, capsys):
    assert command("--systems", "streams")[0] == 0
    whole, parts = saved(tmp_path), []
    whole["tasks"].append({**whole["tasks"][0], "task": "e2e"})
    for index, task in enumerate(whole["tasks"]):
        parts.append(tmp_path / f"{index}.json")
        parts[-1].write_text(json.dumps({**whole, "tasks": [task]}))
    files, joined = [str(path) for path in parts], tmp_path / "new" / "joined"
    assert compare.main(["--from", *files, "--out", str(joined)]) == 0
    assert saved(joined.parent, "joined") == whole
    assert (joined / "compare.txt").read_text() == report(whole) + "\n"
    assert capsys.readouterr().out == report(whole) + "\n"
    assert compare.main(["--from", *files, files[0]]) == 2
    assert "holds sql, and so does" in one_line(capsys.readouterr().err, "perf.compare")
    for settings in ({"dtype": "float16"}, {"machine": {**whole["machine"], "memory": "1 GiB"}}):
        parts[1].write_text(json.dumps({**whole, "tasks": whole["tasks"][1:], **settings}))
        assert compare.main(["--from", *files]) == 2
        said = one_line(capsys.readouterr().err, "perf.compare")
        assert f" in {files[0]} and " in said and "measured in the same way" in said


def keys_of(value, *path):
    """The path of every key in a result."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            yield (*path, key)
        if isinstance(inner, dict | list):
            yield from keys_of(inner, *path, key)


def test_an_incomplete_result_is_told_in_one_line(command, tmp_path, capsys):
    assert command("--systems", "streams")[0] == 0
    whole, cut = saved(tmp_path), tmp_path / "cut.json"
    readme = tmp_path / "README.md"
    readme.write_text(f"{FIRST}\n{LAST}\n")
    capsys.readouterr()
    codes = set()
    for *above, last in keys_of(whole):
        broken = copy.deepcopy(whole)
        inner = functools.reduce(lambda found, key: found[key], above, broken)
        del inner[last]
        cut.write_text(json.dumps(broken))
        codes.add(code := compare.main(["--from", str(cut), "--readme", str(readme)]))
        out, err = capsys.readouterr()
        assert code == 0 or (out == "" and str(cut) in one_line(err, "perf.compare"))
    assert codes == {0, 2}


def test_the_command_as_users_run_it():
    done = run_module("perf.compare", "--task", "poems")
    assert done.returncode == 2 and "invalid choice: 'poems'" in one_line(
        done.stderr, "perf.compare"
    )


# --------------------------------------------------------------------------------- machine

MAC = {
    "sysctl -n machdep.cpu.brand_string": "Apple M2 Pro",
    "sysctl -n hw.memsize": "17179869184",
    "sw_vers": "ProductName:\t\tmacOS\nProductVersion:\t\t15.1\nBuildVersion:\t\t24B83",
    "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0\t87%; discharging",
}


@pytest.fixture
def mac(monkeypatch):
    """A Mac whose tools say what `said` holds."""
    said = dict(MAC)
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine, "output_of", lambda *args: said.get(" ".join(args), ""))
    return said


def test_a_mac_is_described(mac):
    found = machine.machine()
    assert found["machine"] == "Darwin arm64, Apple M2 Pro"
    assert (found["memory"], found["os"]) == ("16 GiB", "macOS 15.1 (24B83)")
    assert found["power"] == "battery"
    mac["pmset -g batt"] = "Now drawing from 'AC Power'"
    assert machine.power_source() == "AC power"
    mac.clear()
    found = machine.machine()
    assert found["machine"] == "Darwin arm64, unknown"
    assert {found[name] for name in ("memory", "os", "power", "commit")} == {"unknown"}


@pytest.fixture
def linux(monkeypatch, tmp_path):
    """A Linux machine whose files are in the folder that this gives."""
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "POWER_SUPPLY", tmp_path / "power")
    monkeypatch.setattr(machine, "OS_RELEASE", tmp_path / "os-release")
    return tmp_path


def supply(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_a_linux_machine_is_described(linux):
    (linux / "cpuinfo").write_text("model name\t: Fast 9000\nflags\t: a\nmodel name\t: Fast 9000\n")
    (linux / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    (linux / "os-release").write_text('ID=x\nPRETTY_NAME="Some Linux 12"\n')
    found = machine.machine()
    assert found["machine"].endswith(", Fast 9000") and found["memory"] == "16 GiB"
    assert found["os"] == "Some Linux 12" and found["power"] == "unknown"
    supply(linux / "power" / "BAT0", type="Battery", status="Discharging")
    assert machine.power_source() == "battery"
    supply(linux / "power" / "AC", type="Mains", online="1")
    assert machine.power_source() == "AC power"


def test_a_machine_that_tells_nothing_is_unknown(linux, monkeypatch):
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    assert (machine.chip(), machine.memory(), machine.power()) == ("unknown",) * 3
    assert machine.os_version() == "Linux"
    assert machine.output_of("no-such-command-here") == machine.output_of("false") == ""


def test_the_commit_says_whether_files_were_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CHECKOUT", tmp_path)
    assert machine.commit() == "unknown"
    (tmp_path / ".git").mkdir()
    said = {"rev-parse": "abc123", "status": " M a.py"}
    monkeypatch.setattr(machine, "output_of", lambda *args: said[args[3]])
    assert machine.commit() == "abc123, changed"
    said["status"] = ""
    assert machine.commit() == "abc123"


def test_versions_of_everything_that_takes_part():
    found = machine.machine()
    assert {"mlx", "mlx-lm", "numpy", "ssmlx", "python", "blas", "device", "commit"} <= set(found)
    assert found["ssmlx"] == ssmlx.__version__
    assert machine.package_version("no-such-package-here") == "unknown"


def test_the_report_of_a_saved_result_is_the_same(command, tmp_path):
    code, out, _ = command("--systems", "streams", "--count", 2)
    assert code == 0 and report(saved(tmp_path)) + "\n" == out
    assert "power: " in out and "fewer than 30 prompts" in out


def test_an_adapter_without_streams_leaves_streams_out(folders, arguments, tmp_path):
    adapter = make_adapter(folders / "base")
    streams = replace(adapter.streams, embeddings=None, prune=None)
    config = replace(adapter.config, num_streams=0, prune_rank=0)
    (tmp_path / "lora").mkdir()
    write_adapter(tmp_path / "lora", replace(adapter, config=config, streams=streams))
    options = arguments("--adapter", f"chat={tmp_path / 'lora'}", task=("sql", "chat"))
    plan = make_plan(compare.parse_args(options))
    assert plan.tasks[1].left_out["streams"] == "the adapter has no streams"
