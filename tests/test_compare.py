"""perf.compare: every system, its tables, what stops and goes on."""

import copy
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
import real
import refusals
from mlx.utils import tree_flatten
from refusals import exits, found_in, mentions
from tiny_heads import HEAD_KINDS, LEVELS, random_heads
from tiny_mtp import head_tensors, published, write_head, write_target

import ssmlx
from perf import compare
from perf.compare import format_markdown_report, write_bar_chart
from perf.run import experiment as figures
from perf.run import options, show, target
from perf.run.experiment import Experiment, Measured
from perf.run.options import SYSTEMS, build_task_experiment, parse_systems_with_baselines
from ssmlx.decoding import call
from ssmlx.drafters.heads import save_heads
from ssmlx.generation.learned import _BY_PATH
from ssmlx.loading.adapter import StreamAdapter, write_adapter
from ssmlx.loading.load import load_base
from ssmlx.settings import SamplingConfig

TEMPLATE = "user: {prompt} | model:"
GREEDY = SamplingConfig()
PROMPTS = [real.words(4, first) for first in (1, 9, 17, 25)]
# The tiny model has no MTP head.
LOSSLESS = [name for name in SYSTEMS if name not in ("mlx-lm", "mtp")]
MEASURED = Path(__file__).parents[1] / "perf" / "measured"


def with_rotation(adapter: StreamAdapter) -> StreamAdapter:
    """The adapter with values turned in place of embeddings, and 20 tokens to draft from."""
    config = replace(
        adapter.config, stream_design="value_rotation", rotation_step=0.4, draft_vocab_size=20
    )
    vocab = mx.arange(3, 63, 3).astype(mx.int32)
    return replace(
        adapter, config=config, streams=replace(adapter.streams, embeddings=None, draft_vocab=vocab)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, another one, a draft model, adapters of all kinds, heads, and data."""
    root = tmp_path_factory.mktemp("compare")
    base = real.write_base(root / "base")
    real.write_base(root / "draft", seed=3)
    real.write_tiny_adapter(root / "tuned", base, template=TEMPLATE)
    real.write_tiny_adapter(root / "light", base, scope="streams", template=TEMPLATE)
    turned = with_rotation(real.without_prune(real.make_adapter(base, template=TEMPLATE)))
    (root / "turned").mkdir()
    write_adapter(root / "turned", turned)
    other = real.write_base(root / "other", norm=1.5)
    real.write_tiny_adapter(root / "strange", other)
    backbone, _ = load_base(base, "float32")
    for kind in HEAD_KINDS:
        (root / kind).mkdir()
        save_heads(root / kind, random_heads(kind, backbone))
    model, tokenizer = ssmlx.load(str(base), adapter=root / "tuned", dtype="float32")
    first = TEMPLATE.replace("{prompt}", PROMPTS[0])
    rows = [{"prompt": prompt, "completion": "none"} for prompt in PROMPTS]
    rows[0]["completion"] = ssmlx.generate(model, tokenizer, first, max_tokens=9)
    (root / "sql").mkdir()
    (root / "sql" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture
def arguments(folders, tmp_path):
    """Options of the commands on the tiny model."""

    def arguments(*more, adapter="tuned", task="sql"):
        argv = ["--task", task, "--model", folders / "base", "--data-dir", folders]
        argv += ["--out", tmp_path / "out", "--repeats", 2, "--max-tokens", 9]
        argv += ["--count", 3, "--adapter", folders / adapter, *more]
        return [str(item) for item in argv]

    return arguments


@pytest.fixture
def command(arguments, capsys, monkeypatch):
    """Run the command on the tiny model, without its picture: (exit code, stdout, stderr)."""
    monkeypatch.setattr(compare, "write_bar_chart", lambda result, path: None)

    def run(*more, **settings):
        return refusals.exit_code(compare.main, *arguments(*more, **settings)), *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def weights(folders):
    """Options for what every system drafts with."""
    heads = [item for kind in HEAD_KINDS for item in (f"--{kind}", folders / kind)]
    return (*heads, "--draft-model", folders / "draft")


def saved(tmp_path: Path, name: str = "out/compare") -> dict:
    return json.loads((tmp_path / f"{name}.json").read_text())


def experiment(argv: list[str]) -> Experiment:
    return build_task_experiment(compare.parse_args(argv), "compare")


def rows_of(result: dict) -> dict[str, dict]:
    return {row["name"]: row for row in result["tasks"][0]["systems"]}


@pytest.mark.slow
def test_every_system_from_end_to_end(command, weights, tmp_path):
    code, out, err = command(*weights)
    assert code == 0, err
    result = saved(tmp_path)
    task = result["tasks"][0]
    rows = rows_of(result)
    assert list(rows) == [name for name in SYSTEMS if name != "mtp"]
    assert list(task["left_out"]) == ["mtp"]
    assert [row["same_as_plain"] for row in rows.values()] == [3] * len(rows)
    metric = [row["figures"]["exact match"]["value"] for row in rows.values()]
    assert metric == pytest.approx([100 / 3] * len(rows))
    assert rows["plain"]["tokens"] == rows["plain"]["target_calls"] == 27
    assert rows["mlx-lm"]["speedup"] == {"value": 1, "low": 1, "high": 1}
    assert all(row["tokens"] == 27 and row["target_calls"] <= 27 for row in rows.values())
    assert all(
        row["latency_seconds"]["value"] > row["decode_seconds"]["value"] > 0
        for row in rows.values()
    )
    draft = rows["draft-model"]
    assert draft["draft_calls"] > 0 and task["draft_call_seconds"] > 0
    assert {row["draft_calls"] for row in rows.values() if row is not draft} == {0}
    assert rows["streams"]["speedup_over_draft_model"]["value"] > 0
    # What systems need beside the target.
    drafts = load_base(Path(weights[-1]), "float32")[0].model.parameters()
    size = sum(array.size for _, array in tree_flatten(drafts))
    streams = 2 * real.WIDTH + 2 * 4 * real.WIDTH
    extra = {name: row["extra_parameters"] for name, row in rows.items()}
    assert extra["mlx-lm"] == extra["plain"] == extra["lookahead"] == 0
    assert (extra["streams"], extra["draft-model"]) == (streams, size)
    assert extra["medusa"] == LEVELS * (
        real.WIDTH * real.WIDTH + real.WIDTH + real.VOCAB * real.WIDTH
    )
    assert draft["weight_bytes"] >= 4 * size and rows["streams"]["weight_bytes"] >= 4 * streams
    assert rows["plain"]["weight_bytes"] == 0 < rows["plain"]["peak_bytes"]
    assert all(row["peak_bytes"] > row["weight_bytes"] for row in rows.values())
    # And what is said of it.
    assert (
        (tmp_path / "out" / "compare.txt").read_text()
        == out
        == format_markdown_report(result) + "\n"
    )
    assert mentions(out, "power", "30", "load")
    write_bar_chart(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_system_that_is_named_drafts_at_every_call():
    found = parse_systems_with_baselines(
        ["default", "streams", "lookahead", "streams --tree-size 4"], GREEDY, 9
    )
    assert [one.name for one in found if one.config.is_controlled] == ["default"]


@pytest.mark.slow
def test_prices_stand_beside_watched_times(command, arguments, tmp_path, capsys):
    systems = ("--systems", "default", "streams --tree-size 4", "streams")
    code, out, err = command(*systems, "--max-tokens", 30)
    assert code == 0, err
    (task,) = saved(tmp_path)["tasks"]
    rows = rows_of(saved(tmp_path))
    assert task["best_tree"] in ("streams", "streams --tree-size 4")
    plain = rows["plain"]["price"]
    assert plain["over_plain"]["value"] == 1 and plain["slower"] == {"0.93": 0, "0.88": 0}
    assert plain["answers"] == 6 and plain["calls"] == 6 * 29
    best = rows[task["best_tree"]]
    assert best["price"]["over_best_tree"]["value"] == best["latency_over_best_tree"]["value"] == 1
    for row in rows.values():
        price = row["price"]
        assert price["over_plain"]["low"] <= price["over_plain"]["value"]
        assert price["calls"] == 2 * (row["target_calls"] - 3) or row["name"] == "default"
        assert price["without_place"] + price["by_nearest_rows"] <= price["calls"]
    assert mentions(out, "sql, prices") and "categories" not in out
    assert compare.main(["--from", str(tmp_path / "out" / "compare.json")]) == 0
    assert capsys.readouterr().out == out


def test_spec_bench_is_told_by_category(command, tmp_path):
    kinds = ["writing", "rag", "rag", "stem"]
    questions = [{"category": kind, "turns": [real.words(3, n)]} for n, kind in enumerate(kinds)]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)))
    more = ("--data", file, "--systems", "default", "streams", "--count", 4)
    code, out, err = command(*more, task="spec_bench", adapter="light")
    assert code == 0, err
    (task,) = saved(tmp_path)["tasks"]
    assert [(one["category"], one["prompts"]) for one in task["categories"]] == [
        ("mt_bench", 2),
        ("rag", 2),
    ]
    for one in task["categories"]:
        assert [row["name"] for row in one["systems"]] == ["mlx-lm", "plain", "default", "streams"]
        assert all(row["price"]["over_best"]["value"] > 0 for row in one["systems"])
        assert one["best_tree"] == "streams"
        assert mentions(out, f"spec_bench, {one['category']}")
    calls = {row["name"]: row["tokens_per_call"]["value"] for row in task["systems"]}
    assert calls["plain"] == 1 <= calls["streams"]


@pytest.mark.slow
def test_what_default_learns_stays_in_a_folder_of_the_run(command, tmp_path, monkeypatch):
    own = str(tmp_path / "user")
    monkeypatch.setenv("SSMLX_CACHE", own)
    kept = tmp_path / "kept"
    more = ("--systems", "default", "--max-tokens", 30)
    assert command(*more, "--costs", kept)[0] == 0
    row = rows_of(saved(tmp_path))["default"]
    assert row["num_costs"] == 0
    # Whether so few calls teach a cost is chance; it is written when the process ends.
    (learned,) = (one for path, one in _BY_PATH.items() if kept in path.parents)
    assert learned.costs.plain_seconds(0) is not None
    learned.costs.learn(("streams", 4), 0, 1.5)
    learned.write()
    assert not Path(own).exists() and list((kept / "costs").glob("*.json"))
    code, out, _ = command(*more, "--costs", kept, "--fresh")
    known = rows_of(saved(tmp_path))["default"]["num_costs"]
    assert code == 0 and known > 0
    (line,) = [line for line in out.splitlines() if ": default: " in line]
    assert mentions(line, str(known))
    # Another folder is another run, and begins with nothing.
    code, out, _ = command(*more, "--costs", tmp_path / "new")
    (line,) = [line for line in out.splitlines() if ": default: " in line]
    assert code == 0 and not re.search(r"\d", line)


PRUNED = {"tuned": 3, "light": 3, "turned": 0}


@pytest.mark.parametrize("name", PRUNED)
def test_every_tree_of_an_adapter_is_lossless(command, tmp_path, name):
    more = ("--systems", "trees", "--repeats", 1, "--count", 2)
    code, out, _ = command(*more, adapter=name)
    (task,), trees = saved(tmp_path)["tasks"], 3 + PRUNED[name]
    rows = task["systems"]
    assert code == 0 and [row["kind"] for row in rows] == ["mlx-lm", "plain", *["streams"] * trees]
    assert {row["same_as_plain"] for row in rows} == {2}
    assert len(task["left_out"]) == 6 - trees
    assert all("prun" in reason for reason in task["left_out"].values())
    assert (task["adapter"], task["data"]) == (name, "test.jsonl")
    assert task["scope"] == ("streams" if name == "light" else "all")
    assert mentions(out, "2 of 2")


def test_a_system_without_its_weights_is_left_out(command, folders, arguments, tmp_path):
    code, out, err = command("--count", 1, "--repeats", 1)
    assert code == 0
    assert set(saved(tmp_path)["tasks"][0]["left_out"]) == {*HEAD_KINDS, "mtp", "draft-model"}
    for text in (out, err):
        lines = text.splitlines()
        assert any(mentions(line, "medusa", "--medusa FOLDER") for line in lines)
        assert any(mentions(line, "mtp", "--mtp MODEL") for line in lines)
    plan = experiment([*arguments(), "--adapter", "none"])
    assert mentions(plan.left_out["streams"], "--adapter FOLDER")
    assert plan.weights.scope is None
    adapter = real.make_adapter(folders / "base")
    streams = replace(adapter.streams, embeddings=None, prune=None)
    config = replace(adapter.config, num_streams=0, prune_rank=0)
    (tmp_path / "lora").mkdir()
    write_adapter(tmp_path / "lora", replace(adapter, config=config, streams=streams))
    plan = experiment([*arguments(), "--adapter", str(tmp_path / "lora")])
    assert mentions(plan.left_out["streams"], "streams")


@pytest.mark.slow
def test_a_models_own_mtp_head_is_measured(command, tmp_path):
    """Beside a folder of a head alone, which drafts the same; without either it is left out."""
    name = "qwen3_5_moe"
    head = published(head_tensors(name), raw=False)
    model = write_target(name, tmp_path / "model", head)
    bare = write_target(name, tmp_path / "bare")
    beside = write_head(name, tmp_path / "head", head)
    more = ("--systems", "mtp", "mtp tokens=1", "--count", 2, "--repeats", 1)
    calls = []
    for given in ((model,), (bare, "--mtp", beside)):
        code, _, err = command(*more, "--fresh", "--model", *given, "--adapter", "none")
        assert code == 0 and "--mtp" not in err, err
        rows = rows_of(saved(tmp_path))
        assert list(rows) == ["mlx-lm", "plain", "mtp", "mtp tokens=1"]
        assert {row["same_as_plain"] for row in rows.values()} == {2}
        assert rows["mtp"]["options"]["drafter_settings"]["num_draft_tokens"] == 3
        assert [rows[one]["options"]["nodes"] for one in ("mtp", "mtp tokens=1")] == [4, 2]
        assert rows["mtp"]["extra_parameters"] > 0 < rows["mtp"]["weight_bytes"]
        calls.append([row["target_calls"] for row in rows.values()])
    assert calls[0] == calls[1]
    code, _, err = command(*more, "--model", bare, "--adapter", "none")
    assert code == 0 and list(rows_of(saved(tmp_path))) == ["mlx-lm", "plain"]
    assert err.count("--mtp MODEL") == 2


def test_systems_have_the_options_of_generate(command, weights, tmp_path):
    full = "streams --tree full --tree-width 2 --num-streams 1 --prune budget --prune-to 2"
    more = ("--systems", full, "medusa --tree-size 5", "--count", 1, "--repeats", 1)
    assert command(*more, *weights)[0] == 0
    rows = rows_of(saved(tmp_path))
    assert list(rows) == ["mlx-lm", "plain", full, "medusa --tree-size 5"]
    options = rows[full]["options"]
    assert (options["levels"], options["nodes"]) == (1, 3)
    assert options["tree"]["width"] == 2 and options["prune"]["kind"] == "budget"
    assert rows["medusa --tree-size 5"]["options"]["nodes"] == 5
    (lookahead,) = parse_systems_with_baselines(["lookahead window=7"], SamplingConfig(), 9)[2:]
    assert lookahead.config.lookahead.window == 7 and lookahead.config.max_tokens == 9


@pytest.mark.slow
def test_sampling_writes_one_text_whatever_drafts(command, weights, tmp_path):
    code, out, _ = command(*weights, "--temp", 1, "--top-k", 4, "--seed", 2)
    assert code == 0 and mentions(out, "1", "top-k 4", "seed 2")
    rows = rows_of(saved(tmp_path))
    assert [rows[name]["same_as_plain"] for name in LOSSLESS] == [3] * len(LOSSLESS)
    assert rows["mlx-lm"]["same_as_plain"] is None and rows["mlx-lm"]["differences"] == []


@pytest.fixture
def asked(monkeypatch):
    """Who was asked, in order; raises Ctrl-C at the answer whose number is in `stop`."""
    names: list[str] = []
    answered = target.Target.answer

    def answer(self, system, *asked):
        names.append(system.name)
        if len(names) == stop[0]:
            raise KeyboardInterrupt
        return answered(self, system, *asked)

    stop = [-1]
    monkeypatch.setattr(target.Target, "answer", answer)
    return names, stop


def test_systems_take_turns_in_an_order_that_rotates(command, asked):
    names, _ = asked
    assert command("--systems", "streams", "--count", 2, "--repeats", 2)[0] == 0
    warm_up = names[:3]
    order = ["mlx-lm", "plain", "streams"]
    assert warm_up == order
    turns = [order[turn % 3 :] + order[: turn % 3] for turn in range(4)]
    assert names[3:] == [name for turn in turns for name in turn]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(command, asked, tmp_path):
    names, stop = asked
    systems = ("--systems", "streams", "prompt-lookup")
    assert command(*systems, "--out", tmp_path / "whole")[0] == 0
    # after the warm-ups and ten answers
    stop[0] = 4 + 10 + 1
    names[:] = []
    code, _, err = command(*systems)
    assert code == 130
    parts = list((tmp_path / "out").glob("compare-sql-*.part.jsonl"))
    assert sum(len(path.read_text().splitlines()) - 1 for path in parts) == 10
    stop[0] = -1
    names[:] = []
    code, _, err = command(*systems)
    (line,) = [line for line in err.splitlines() if mentions(line, "compare-sql", "streams")]
    assert code == 0 and mentions(line, "3")
    assert len(names) == 4 + 4 * 3 * 2 - 10
    assert without_times(saved(tmp_path)) == without_times(saved(tmp_path, "whole/compare"))
    names[:] = []
    assert command(*systems)[0] == 0 and not names  # every answer is there
    assert command(*systems, "--fresh")[0] == 0 and len(names) == 4 + 4 * 3 * 2
    # Speeds compare within a run: other systems beside them are another one.
    names[:] = []
    assert command("--systems", "streams")[0] == 0 and len(names) == 3 + 3 * 3 * 2


def without_times(result: dict) -> list:
    """What does not depend on the clock, or on what else lies in memory."""
    names = ("tokens", "target_calls", "draft_calls", "tokens_per_call", "figures", "differences",
             "same_as_plain", "extra_parameters", "options")  # fmt: skip
    return [[row[name] for name in names] for row in result["tasks"][0]["systems"]]


def test_answers_depend_on_all_that_moves_them(arguments, weights, monkeypatch):
    def settings(*more, system="medusa", **adapter):
        plan = experiment(arguments(*weights, *more, **adapter))
        return plan.settings_of_answers(next(one for one in plan.systems if one.name == system))

    first = settings()
    assert first == settings("--repeats", 5) == settings("--count", 2)
    assert first != settings(system="plain")
    for more in (
        ("--max-tokens", 8),
        ("--dtype", "bfloat16"),
        ("--temp", 1),
        ("--systems", "medusa"),
    ):
        assert settings(*more) != first
    assert settings(adapter="light") != first
    monkeypatch.setattr("perf.run.experiment.sources_digest", lambda: "other")
    assert settings() != first


def test_a_draft_model_starts_every_answer_from_nothing(command, folders, tmp_path):
    draft = ("--systems", "draft-model", "--draft-model", folders / "draft")
    assert command(*draft, "--count", 1, "--repeats", 3)[0] == 0
    parts = [path.read_text().splitlines() for path in (tmp_path / "out").glob("*.part.jsonl")]
    lines = next(p for p in parts if json.loads(p[0])["system"] == "draft-model")
    assert len({json.loads(line)[2]["draft_model_calls"] for line in lines[1:]}) == 1


def test_a_lossy_drafter_is_a_failure(command, monkeypatch, tmp_path):
    decide = call.decide_and_accept

    def lossy(model, tree, logits, sampler, places, acceptance):
        if tree.num_nodes == 1:  # also plain decoding's
            return decide(model, tree, logits, sampler, places, acceptance)
        tokens = (call.sample_on_rank0(model, logits, sampler, places) + 1) % real.VOCAB
        return call.Decided(tokens, call.accept(tree, tokens))

    monkeypatch.setattr(call, "decide_and_accept", lossy)
    code, out, err = command("--systems", "prompt-lookup")
    assert code == 1 and mentions(err, "sql", "prompt-lookup")
    assert any(mentions(line, "prompt-lookup", "1", "plain", "4") for line in out.splitlines())
    row = rows_of(saved(tmp_path))["prompt-lookup"]
    assert row["same_as_plain"] == 0 and row["figures_of"] == "prompt-lookup"
    assert row["figures"]["exact match"]["value"] == 0
    assert not any(one["near_tie"] for one in row["differences"])


def test_mlx_lm_that_differs_is_told_and_no_failure(command, monkeypatch, tmp_path):
    answered = target.answer_with_mlx_lm

    def other(*args):
        answer = answered(*args)
        return replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % real.VOCAB])

    monkeypatch.setattr(target, "answer_with_mlx_lm", other)
    code, out, _ = command("--systems", "streams")
    assert code == 0
    assert any(mentions(line, "mlx-lm", "3", "plain", "9") for line in out.splitlines())
    rows = rows_of(saved(tmp_path))
    assert rows["mlx-lm"]["same_as_plain"] == 0 and rows["streams"]["same_as_plain"] == 3
    assert rows["streams"]["figures_of"] == "plain"


def test_a_near_tie_is_rounding_in_half_precision_alone(arguments):
    plan = experiment(arguments("--systems", "streams", "--dtype", "bfloat16"))
    loaded, prompts = plan.load_target_and_prompts()
    measured = Measured(plan, loaded, prompts, {}, "")
    logits = loaded.mlx_model(mx.array([prompts[0]]))[0, -1].astype(mx.float32)
    order = [int(token) for token in mx.argsort(-logits)]
    close = min(range(real.VOCAB - 1), key=lambda i: float(logits[order[i]] - logits[order[i + 1]]))
    for pair, tie in (((order[close], order[close + 1]), True), ((order[0], order[-1]), False)):
        found = figures.describe_first_difference(measured, 0, [pair[0]], [pair[1]])
        assert (found["token"], found["near_tie"]) == (0, tie)
        assert found["gap"] == pytest.approx(abs(float(logits[pair[0]] - logits[pair[1]])))
        row = {"name": "x", "kind": "streams", "differences": [found]}
        failed = figures.systems_parting_beyond_ties({"tasks": [{"task": "sql", "systems": [row]}]})
        assert failed == ([] if tie else ["sql, x"])
    exact = replace(plan, weights=replace(plan.weights, dtype="float32"))
    pair = [order[close]], [order[close + 1]]
    found = figures.describe_first_difference(replace(measured, experiment=exact), 0, *pair)
    assert found["near_tie"] is (found["gap"] == 0)
    assert figures.describe_first_difference(measured, 0, [1, 2], [1])["gap"] is None


def test_the_published_tables_are_those_of_the_saved_result(capsys):
    readme = (MEASURED.parent / "README.md").read_text()
    table = readme.partition("<!-- perf.compare -->")[2].partition("<!-- /perf.compare -->")[0]
    assert compare.main(["--from", str(MEASURED / "compare.json")]) == 0
    assert len(table) > 4000 and capsys.readouterr().out.startswith(table[1:])


def test_the_readme_s_table_is_that_of_the_saved_result():
    text = (real.ROOT / "README.md").read_text().replace("**", "")
    tasks = json.loads((MEASURED / "compare.json").read_text())["tasks"]
    for title, name in (("with trained streams", "default"), ("without training", "text")):
        (row,) = re.findall(rf"(?m)^\| {title}[^|]*\| (.*) \|$", text)
        *cells, spec_bench = row.split(" | ")
        found = [
            system["latency_speedup"]
            for task in tasks
            for system in task["systems"]
            if system["name"] == name
        ]
        assert cells == [
            f"{one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" for one in found
        ]
        assert spec_bench in (MEASURED.parent / "README.md").read_text()


def test_results_of_several_tasks_are_shown_as_one(tmp_path, capsys):
    whole = json.loads((MEASURED / "compare.json").read_text())
    parts = [tmp_path / f"{index}.json" for index, _ in enumerate(whole["tasks"])]
    for path, task in zip(parts, whole["tasks"], strict=True):
        path.write_text(json.dumps({**whole, "tasks": [task]}))
    files = [str(path) for path in parts]
    joined = tmp_path / "new" / "joined"
    assert compare.main(["--from", *files, "--out", str(joined)]) == 0
    assert json.loads((joined / "compare.json").read_text()) == whole
    assert capsys.readouterr().out == format_markdown_report(whole) + "\n"
    assert mentions(found_in(exits(capsys, compare.main, "--from", *files, files[0])), "sql")
    other = {**whole["machine"], "memory": "1 GiB"}
    for settings, name in (({"dtype": "float16"}, "dtype"), ({"machine": other}, "memory")):
        parts[1].write_text(json.dumps({**whole, "tasks": whole["tasks"][1:], **settings}))
        assert mentions(exits(capsys, compare.main, "--from", *files), files[0], name)


def test_an_incomplete_result_is_named_in_one_line(tmp_path, capsys):
    whole = json.loads((MEASURED / "compare.json").read_text())
    cut = tmp_path / "cut.json"
    for above, last in (
        ((), "machine"),
        (("machine",), "mlx"),
        (("tasks", 0), "systems"),
        (("tasks", 0, "systems", 2), "speedup"),
        (("tasks", 0, "systems", 2, "speedup"), "low"),
    ):
        broken = copy.deepcopy(whole)
        del functools.reduce(lambda found, key: found[key], above, broken)[last]
        cut.write_text(json.dumps(broken))
        assert mentions(exits(capsys, compare.main, "--from", cut), str(cut), f"'{last}'")
    task = whole["tasks"][0]
    rows = whole["tasks"][0]["systems"]
    few = (rows[1:], [rows[0], *rows[2:]], [*rows, {**rows[2], "kind": "odd"}])
    tasks = ([], *([{**task, "systems": systems}] for systems in few))
    for text, more, named in (
        ("[", [], str(cut)),
        (json.dumps(whole), ["--count", "3"], "--count"),
        *((json.dumps({**whole, "tasks": one}), [], str(cut)) for one in tasks),
    ):
        cut.write_text(text)
        assert mentions(found_in(exits(capsys, compare.main, "--from", cut, *more)), named)


def test_trees_beside_plain_decoding(command, tmp_path):
    trees = ["streams --tree full --tree-width 2", "streams --tree-size 8"]
    code, _, err = command("--systems", *trees)
    assert code == 0, err
    rows = rows_of(saved(tmp_path))
    assert list(rows) == ["mlx-lm", "plain", *trees]
    assert {row["same_as_plain"] for row in rows.values()} == {3}
    metric = [row["figures"]["exact match"]["value"] for row in rows.values()]
    assert metric == pytest.approx([100 / 3] * 4)
    assert rows[trees[1]]["tokens_per_call"]["value"] >= 1
    assert rows["plain"]["tokens"] == rows["plain"]["target_calls"]


def test_rouge_and_chat_without_references(command, folders, tmp_path):
    data = ("--data", folders / "sql" / "test.jsonl")
    code, out, _ = command(*data, "--systems", "streams", task="e2e")
    (task,) = saved(tmp_path)["tasks"]
    assert code == 0 and task["figures"] == ["ROUGE-1", "ROUGE-LSum"]
    assert task["systems"][0]["figures"]["ROUGE-1"]["value"] >= 33
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "w1 w2"}\n')
    code, out, _ = command("--data", chat, "--systems", "streams", task="chat", adapter="light")
    assert code == 0 and mentions(out, "1 of 1") and "ROUGE" not in out


BAD = {
    "system": (("--systems", "dreams"), "--systems 'dreams' mlx-lm plain"),
    "twice": (("--systems", "streams", "streams"), "--systems 'streams'"),
    "option": (("--systems", "streams --width 2"), "--width"),
    "idle": (("--systems", "lookahead --tree-size 8"), "--tree-size"),
    "drafter": (("--systems", "streams head=8bit"), "head=8bit"),
    "streams": (("--systems", "streams --num-streams 9"), "--num-streams 9"),
    "max tokens": (("--max-tokens", 0), "--max-tokens 0"),
    "top-k": (("--top-k", 4), "--top-k"),
    "count": (("--count", 0), "--count 0"),
    "no data": (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
    "no draft model": (("--draft-model", "./nowhere"), "nowhere"),
    "costs": (("--systems", "streams", "--costs", "x"), "--costs"),
    "model": (("--model", "./nowhere"), "nowhere"),
}  # fmt: skip


def refused(result):
    """The one line of a command that left systems out, and then refused the rest."""
    code, out, err = result
    assert (code, out) == (2, "")
    *left_out, line = err.splitlines(keepends=True)
    assert all(mentions(one, "sql") for one in left_out)
    return refusals.one_line(line, "perf.compare")


@pytest.mark.parametrize(("args", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(command, args, named):
    assert mentions(refused(command(*args)), *named.split())


def test_weights_of_another_model_are_refused(command, folders):
    medusa = ("--systems", "medusa", "--medusa")
    for more, adapter, *named in (
        ((), "strange", "norm"),
        ((), "nowhere", "nowhere"),
        ((*medusa, folders / "mlp-speculator"), "tuned", "medusa", "mlp-speculator"),
        ((*medusa, folders / "tuned"), "tuned", "heads_config.json"),
    ):
        assert mentions(refused(command(*more, adapter=adapter)), *named)


@pytest.fixture
def data(tmp_path):
    """Forty prompts; of two files of answers, one is right in thirty and one in ten of them."""
    (tmp_path / "sql").mkdir()
    for name, right in (("sql/test", 40), ("good", 30), ("poor", 10), ("few", 1)):
        answers = [
            {"prompt": f"q{i}", "completion": f"SELECT {i}" if i < right else "select 7"}
            for i in reversed(range(1 if name == "few" else 40))
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, answers)))
    return tmp_path


def score(data, *files):
    where = ["--data-dir", str(data), "--out", str(data / "out")]
    return refusals.exit_code(compare.main, "--task", "sql", *where, "--answers", *files)


def test_files_are_scored_and_compared_prompt_by_prompt(data, capsys):
    files = [f"{name}={data / name}.jsonl" for name in ("good", "poor")]
    assert score(data, *files) == 0
    text = capsys.readouterr().out
    result = json.loads((data / "out" / "score-sql.json").read_text())
    good, poor = result["rows"]
    assert good["figures"]["exact match"]["value"] == 75
    assert poor["figures"]["exact match"]["value"] == 25
    gap = poor["differences"]["exact match"]
    assert gap["value"] == -50 and gap["low"] < -50 < gap["high"] < 0
    assert "poor - good, exact match: -50.0" in text
    assert set(good["differences"]["exact match"].values()) == {0}


def test_chats_are_told_apart_by_all_their_turns(data, capsys):
    chats = [
        [
            {"role": role, "content": one}
            for role, one in (("user", f"w{n}"), ("assistant", "w8"), ("user", "w9"))
        ]
        for n in (1, 2)
    ]
    rows = [{"messages": one, "completion": f"SELECT {n}"} for n, one in enumerate(chats)]
    (data / "sql" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert score(data, f"gold={data}/sql/test.jsonl") == 0
    assert mentions(capsys.readouterr().out, "100.0 [100.0, 100.0]", "30")


@pytest.mark.parametrize(("files", "named"), [
    (["good"], "NAME=FILE.jsonl"),
    (["a={}/good.jsonl", "a={}/poor.jsonl"], "a"),
    (["a={}/none.jsonl"], "none.jsonl"),
    (["a={}/few.jsonl"], "few.jsonl 39 40"),
    (["a={}/numbers.jsonl"], "numbers.jsonl 40"),
    (["a={}/good.jsonl", "--repeats", "9"], "--repeats"),
    (["a={}/good.jsonl", "--systems", "plain"], "--systems"),
])  # fmt: skip
def test_bad_files_are_named_in_one_line(data, capsys, files, named):
    numbers = [json.dumps({"prompt": f"q{i}", "completion": i}) for i in range(40)]
    (data / "numbers.jsonl").write_text("\n".join(numbers))
    assert score(data, *(file.format(data) for file in files)) == 2
    line = refusals.one_line(capsys.readouterr().err, compare.PROG)
    assert mentions(line, *named.split())
    assert not (data / "out").exists()


def test_every_kind_of_system_has_a_colour():
    assert {*options.SYSTEMS, *options.CONTROLLED.values()} <= show.COLOURS.keys()
