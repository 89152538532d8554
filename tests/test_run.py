"""perf.run: metrics by hand, intervals, kept answers, all that decodes one target; perf.serving."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from real import make_adapter, write_base, write_packed, write_tiny_adapter
from refusals import found_in, mentions, refusal
from tiny import make_lora

from perf import serving
from perf.run import results, tasks
from perf.run import target as targets
from perf.run.experiment import speedup_figures
from perf.run.price import (
    cheapest_system,
    kinds_of_calls,
    price_answers,
    price_figures,
)
from perf.run.results import AnswerStore, Kept, file_stats_digest
from perf.run.statistics import (
    Estimate,
    mean,
    median_ratio,
    paired_difference,
    ratio,
    ratio_of_median_rates,
)
from perf.run.target import MLX_LM, PLAIN, STREAMS, System, Target, Weights
from perf.run.timing import TimedAnswer, TimedCall
from ssmlx.loading.load import load_base
from ssmlx.loading.names import bundled_adapters
from ssmlx.settings import GenerateConfig


def test_sql_is_matched_up_to_white_space():
    assert tasks.normalise_sql("  SELECT a\n\tFROM  t ") == "SELECT a FROM t"
    assert tasks.exact_match("SELECT  a\nFROM t ", ["SELECT a FROM t"]) == (100, 100)
    assert tasks.exact_match("select a from T", ["SELECT a FROM t"]) == (0, 100)
    assert tasks.exact_match("SELECT a FROM t;", ["SELECT a FROM t"]) == (0, 0)
    assert tasks.exact_match("SELECT a,b", ["SELECT a, b"]) == (0, 0)
    assert tasks.exact_match("B", ["a", "B"]) == (100, 100)


@pytest.mark.parametrize(("answer", "references", "found"), [
    # 3 of 3 words right, 3 of 4 found: F1 = 2 * 1 * 0.75 / 1.75.
    ("the cat sat", ["the cat sat down"], (600 / 7, 600 / 7)),
    # The longest common subsequence is "the cat": 2 of 3 and 2 of 4.
    ("sat the cat", ["the cat sat down"], (600 / 7, 400 / 7)),
    ("dog", ["cat"], (0, 0)),
    ("", ["cat"], (0, 0)),
    # Stemmed, and without case or punctuation.
    ("Dogs, running!", ["dog runs"], (100, 100)),
    # ROUGE-LSum takes lines for sentences.
    ("three four\none two", ["one two\nthree four"], (100, 100)),
    ("three four one two", ["one two three four"], (100, 50)),
    # The best over references, figure by figure.
    ("one two three four", ["four three two one", "one two three six"], (100, 75)),
])  # fmt: skip
def test_rouge_against_figures_worked_by_hand(answer, references, found):
    assert tasks.make_rouge_scorer()(answer, references) == pytest.approx(found)


def test_what_ships_is_asked():
    for task in tasks.TASKS.values():
        if task.test:
            assert len(tasks.read_examples(tasks.find_data_file(task, None), task, 2)) == 2


def test_a_folder_that_is_named_must_have_the_data(tmp_path):
    assert "test.jsonl" in refusal(tasks.find_data_file, tasks.SQL, None, tmp_path)
    assert "dialogsum" in refusal(tasks.find_data_file, tasks.TASKS["dialogsum"], None)


def test_examples_take_references_before_the_completion(tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "q", "references": ["r", "s"]}]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    examples = tasks.read_examples(path, tasks.TASKS["e2e"])
    assert [example.references for example in examples] == [("c",), ("r", "s")]
    assert len(tasks.read_examples(path, tasks.TASKS["e2e"], 1)) == 1
    path.write_text('{"prompt": "p"}\n')
    assert tasks.read_examples(path, tasks.TASKS["chat"])[0].references == ()
    line = found_in(refusal(tasks.read_examples, path, tasks.TASKS["e2e"]))
    assert mentions(line.replace(str(path), ""), "1") and str(path) in line


def test_spec_bench_asks_first_turns_by_category(tmp_path):
    kinds = ["rag"] * 20 + ["writing", "math", "qa"] + ["stem"] * 20
    rows = [
        {"question_id": n, "category": kind, "turns": [f"{kind} {n}", "then"]}
        for n, kind in enumerate(kinds)
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    examples = tasks.read_examples(path, tasks.SPEC_BENCH)
    counts = Counter(one.category for one in examples)
    assert counts == {"rag": 16, "mt_bench": 22, "qa": 1}
    assert examples[15].asked == {"prompt": "rag 15"} and examples[16].category == "mt_bench"
    assert tasks.read_examples(path, tasks.SPEC_BENCH, 3) == examples[:3]
    for bad in ('{"category": "rag", "turns": []}', '{"category": "x", "turns": ["a"]}', "[1]"):
        path.write_text(bad)
        line = refusal(tasks.read_examples, path, tasks.SPEC_BENCH)
        assert mentions(line, str(path), "turns", "category")


def test_a_long_prompt_keeps_its_beginning_and_its_end():
    assert tasks.leave_out_middle([1, 2, 3], 3) == [1, 2, 3]
    assert tasks.leave_out_middle([1, 2, 3, 4, 5, 6], 4) == [1, 2, 5, 6]
    assert tasks.leave_out_middle([1, 2, 3, 4, 5, 6], 3) == [1, 5, 6]


def test_an_interval_has_the_width_that_theory_gives_and_is_the_same_in_every_run():
    values = np.random.default_rng(1).normal(10, 3, 400)
    found = mean(values)
    half = 1.96 * values.std() / 20
    assert found == mean(values.copy()) and found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.1)
    assert found.value - found.low == pytest.approx(half, rel=0.1)


def test_a_ratio_is_of_sums():
    assert ratio([10, 30], [5, 5]).value == 4.0
    assert ratio([6, 9, 12], [2, 3, 4]) == Estimate(3, 3, 3)
    assert ratio([1, 2], [0, 0]) == Estimate(0, 0, 0)
    assert mean([7.0]) == Estimate(7, 7, 7)


def test_a_paired_difference_sees_what_two_intervals_do_not():
    rng = np.random.default_rng(3)
    theirs = rng.normal(50, 20, 200)
    ours = theirs + rng.normal(2, 3, 200)
    gap = paired_difference(ours, theirs)
    assert mean(ours).low < mean(theirs).high
    lower, alike = paired_difference(theirs, ours), paired_difference(theirs, theirs)
    assert gap.low > 0 > lower.high and alike.low <= 0 <= alike.high
    assert len({gap.verdict, lower.verdict, alike.verdict}) == 3


def test_a_speed_up_is_a_ratio_of_medians_over_prompts():
    assert median_ratio([4 / 1.0, 4 / 2.0, 1.0], [2.0, 4 / 3, 0.5]).value == pytest.approx(1.5)
    # A single token takes no time to decode: such an answer says nothing of speed.
    assert ratio_of_median_rates([0.0], [0.0]) is None
    assert ratio_of_median_rates([0.0, 3.0], [1.0, 2.0])["value"] == 1.5


def test_speed_ups_are_of_the_median_repeat():
    def kept(seconds: float) -> Kept:
        return Kept(TimedAnswer([0] * 5, 5, seconds), "")

    ours = [[kept(1.0), kept(9.0), kept(1.0)], [kept(2.0)] * 3, [kept(4.0)] * 3]
    theirs = [[kept(2.0)] * 3, [kept(3.0)] * 3, [kept(8.0)] * 3]
    system = System(STREAMS, STREAMS, GenerateConfig())
    found = speedup_figures(system, {STREAMS: ours, MLX_LM: theirs, PLAIN: ours})
    assert found["speedup"]["value"] == pytest.approx((4 / 2.0) / (4 / 3.0))
    assert found["latency_speedup"]["value"] == pytest.approx(13 / 7)
    assert found["over_plain"]["value"] == found["latency_over_plain"]["value"] == 1


def answer_of_calls(*calls: tuple[int, float], prefill: float = 1.0, tokens: int = 30):
    """An answer behind 300 tokens whose calls have these (rows, seconds)."""
    timed = [TimedCall(rows, 2, 300 + 2 * index, s) for index, (rows, s) in enumerate(calls)]
    decode = sum(one.seconds for one in timed)
    return TimedAnswer([0] * tokens, len(calls) + 1, decode, prefill, calls=timed)


def test_the_kinds_of_calls():
    def kinds(system, *rows):
        found = kinds_of_calls(system, answer_of_calls(*((one, 1.0) for one in rows)).calls)
        return [(one.drafter, one.rows, one.place) for one in found]

    streams = kinds(STREAMS, 1, 1, 6, 6, 16, 1, 1)
    assert [place for _, _, place in streams] == [
        "steady", "entry", "steady", "steady", "exit", "steady", "steady"
    ]  # fmt: skip
    # What an entry drafts is verified by the next call; a bare root is plain decoding's own.
    assert [(name, rows) for name, rows, _ in streams[:3]] == [
        ("plain", 1), ("streams", 6), ("streams", 6)
    ]  # fmt: skip
    assert [place for _, _, place in kinds(STREAMS, 16, 16, 16)] == ["first", "steady", "last"]
    assert {*kinds(PLAIN, 1, 1, 1)} == {("plain", 1, "steady")}
    assert {*kinds(MLX_LM, 1, 1, 1)} == {("mlx-lm", 1, "steady")}
    # A bare root of prompt lookup's is not launched ahead, as plain decoding's is.
    lookup = kinds("prompt-lookup", 1, 1, 9, 1)
    assert [place for _, _, place in lookup] == ["first", "entry", "exit", "last"]
    assert {name for name, _, _ in lookup} == {"prompt-lookup"}
    (short, long) = (TimedCall(1, 1, context, 1.0) for context in (100, 4000))
    assert [one.bucket for one in kinds_of_calls(PLAIN, [short, long])] == [0, 3072]


def priced(**answers):
    """Prices by prompt and repeat, of streams and plain decoding that answer each prompt once."""
    kinds = {name: PLAIN if name == "plain" else STREAMS for name in answers}
    return price_answers(kinds, {name: [[one] for one in own] for name, own in answers.items()})


def test_a_price_is_of_median_calls():
    # One answer was disturbed for a call, and the watch has it.
    calm = [(1, 1.0)] * 9
    plain = [answer_of_calls(*calm), answer_of_calls(*calm[1:], (1, 10.0))]
    tree = [answer_of_calls((16, 3.5), (16, 1.5), (16, 1.5), (16, 0.5), prefill=3.0)] * 5
    prices = priced(plain=plain, tree=tree[:2])
    assert [one.seconds for (one,) in prices["plain"]] == [2.0 + 9] * 2
    # Too few first and last calls: they have the median of all, and that is told.
    ((found,), _) = prices["tree"]
    assert found.seconds == 2.0 + 4 * 1.5
    assert (found.without_place, found.by_nearest_rows) == (4, 0)
    ((found,), *_) = priced(plain=[answer_of_calls(*calm)] * 5, tree=tree)["tree"]
    assert found.seconds == pytest.approx(2.0 + 3.5 + 1.5 + 1.5 + 0.5)
    assert (found.calls, found.without_place) == (4, 0)


def test_a_rare_number_of_rows_has_the_price_of_the_nearest():
    rare = answer_of_calls((16, 2.0), (12, 9.0), (4, 1.0), (16, 2.0))
    often = answer_of_calls(*[(16, 2.0)] * 6)
    ((found,), _) = priced(plain=[answer_of_calls((1, 1.0))] * 2, tree=[rare, often])["tree"]
    assert found.by_nearest_rows == 2 and found.seconds == 1.0 + 4 * 2.0
    # A last call is more like other last ones than like a steady one of as many rows.
    last = answer_of_calls(*[(16, 2.0)] * 6, (16, 0.1))
    own = answer_of_calls(*[(8, 1.5)] * 6, (8, 9.0))
    plain = [answer_of_calls((1, 1.0))] * 6
    (*_, (found,)) = priced(plain=plain, tree=[*[last] * 5, own])["tree"]
    assert found.seconds == pytest.approx(1.0 + 2.0 + 5 * 1.5 + 0.1)


def test_prices_are_compared_prompt_by_prompt():
    plain = [answer_of_calls(*[(1, 1.0)] * 9)] * 6
    good = [answer_of_calls(*[(16, 2.0)] * 2)] * 6
    poor = [answer_of_calls(*[(6, 2.0)] * 5, tokens=tokens) for tokens in (23, 24, 30, 30, 30, 30)]
    prices = priced(plain=plain, good=good, poor=poor)
    assert (
        cheapest_system(prices, ["poor", "good"]) == "good" and cheapest_system(prices, []) is None
    )
    found = price_figures("poor", prices, "good")
    assert found["over_plain"]["value"] == pytest.approx(10 / 11)
    assert found["over_best_tree"]["value"] == found["over_best"]["value"] == pytest.approx(5 / 11)
    # An answer of 23 tokens does not count.
    assert (found["answers"], found["slower"]) == (5, {"0.93": 5, "0.88": 0})
    assert found["worst"] == pytest.approx(10 / 11)
    assert price_figures("poor", prices, "poor")["over_best"] == found["over_plain"]
    assert price_figures("good", prices, None)["over_best_tree"] is None


KEPT = Kept(TimedAnswer([1, 2], 2, 0.5, calls=[TimedCall(1, 1, 7, 0.5)]), "a “b”")


def stored(folder, *prompts, fresh=False, **settings):
    """A store to which these were added, and which is closed."""
    store = AnswerStore(folder, "sql", settings, fresh=fresh)
    for prompt in prompts:
        store.add(prompt, KEPT)
    store.file.close()
    return store


def test_kept_answers_come_back_and_a_line_that_was_cut_short_is_dropped(tmp_path):
    store = stored(tmp_path, [1], [5, 6], a=(1, 2))
    path = store.file.path
    again = stored(tmp_path, a=(1, 2))
    whole = path.read_bytes()
    assert [5, 6] in again and [5] not in again and again[[5, 6]] == KEPT
    for cut in (1, 30, len(whole) // 3):
        path.write_bytes(whole[:-cut])
        assert [1] in stored(tmp_path, [3], a=(1, 2))
        assert [3] in stored(tmp_path, a=(1, 2))


def test_answers_of_other_settings_are_not_mixed_in(tmp_path):
    stored(tmp_path, [1], max_tokens=8)
    assert [1] not in stored(tmp_path, max_tokens=9)
    assert [1] in stored(tmp_path, max_tokens=8)
    assert [1] not in stored(tmp_path, fresh=True, max_tokens=8)


def test_a_folder_whose_files_changed_is_another(tmp_path):
    (tmp_path / "a").write_text("1")
    first = file_stats_digest(tmp_path)
    (tmp_path / "a").write_text("12")
    assert file_stats_digest(tmp_path) != first and file_stats_digest(None) is None


def test_code_that_decides_answers_is_told_from_other(tmp_path, monkeypatch):
    names = ("settings.py", "model/metal/attention.metal")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    versions = {results.sources_digest.__wrapped__()}
    for name in (*(f"ssmlx/{one}" for one in names), "perf/run/timing.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
        versions.add(results.sources_digest.__wrapped__())
    assert len(versions) == 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, the same one packed, and an adapter of each scope."""
    root = tmp_path_factory.mktemp("run")
    base = write_base(root / "base", width=64)
    write_packed(root / "packed", base)
    return root


def adapter_of(base: Path, scope: str):
    """Random streams and LoRA for `base`; of the scope "task", with LoRA on every row besides."""
    adapter = make_adapter(base, scope="all" if scope == "all" else "streams")
    backbone, _ = load_base(base, "float32")
    lora = make_lora(backbone.model, 2, 1, scale=1.0)
    task = make_lora(backbone.model, 1, 5, scale=1.0) if scope == "task" else {}
    config = replace(adapter.config, hidden_size=64, prune_rank=0, end_token_ids=(3,))
    embeddings = 0.3 * mx.random.normal((config.num_streams, 64), key=mx.random.key(2))
    streams = replace(adapter.streams, embeddings=embeddings, prune=None)
    adapter = replace(adapter, lora=task).with_trained(lora)
    return replace(adapter, config=config, streams=streams)


@pytest.mark.parametrize(("base", "dtype"), [("base", "float32"), ("packed", "stored")])
@pytest.mark.parametrize("scope", ["all", "streams", "task"])
def test_all_systems_write_the_same_with_the_same_arrays(folders, scope, base, dtype):
    adapter = adapter_of(folders / "base", scope)
    target = Target(Weights(folders / base, dtype, adapter=adapter))
    streams = target.load_drafting_once(STREAMS).model
    ours = {id(array) for _, array in tree_flatten(target.mlx_model.parameters())}
    for model in (target.plain, streams):
        arrays = dict(tree_flatten(model.backbone.model.parameters()))
        own = [name for name, array in arrays.items() if id(array) not in ours]
        # LoRA on stream rows stands beside the very arrays.
        assert all(name.endswith((".lora_a", ".lora_b")) for name in own)
        assert bool(own) == (model is streams and scope != "all")
    plain = GenerateConfig(decoding="plain", max_tokens=9)
    systems = [
        System(MLX_LM, MLX_LM, plain),
        System(PLAIN, PLAIN, plain),
        System(STREAMS, STREAMS, replace(plain, decoding="speculative")),
    ]
    answers = [target.answer(system, [9, 8, 7, 30]) for system in systems]
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert answers[2].target_calls <= answers[1].target_calls == len(answers[1].tokens)
    for answer in answers:
        assert len(answer.calls) == answer.target_calls - 1
        assert sum(call.tokens for call in answer.calls) == len(answer.tokens) - 1
        assert sum(call.seconds for call in answer.calls) == pytest.approx(answer.decode_seconds)
        assert answer.calls[0].context == 4
        places = [call.context + call.tokens for call in answer.calls]
        assert places == [*(call.context for call in answer.calls[1:]), 3 + len(answer.tokens)]
    assert {call.rows for answer in answers[:2] for call in answer.calls} == {1}
    # A drafter that is named drafts at every call.
    assert {call.rows for call in answers[2].calls} == {16}
    assert target.weights.scope == scope and {2, 3} <= target.tokenizer.eos_token_ids
    with target.without_end_tokens():
        assert target.tokenizer.eos_token_ids == set() and not streams.config.end_token_ids
    assert streams.config.end_token_ids == (3,)


def test_what_drafting_adds_is_counted_once(tmp_path):
    base = write_base(tmp_path / "base")
    for scope in ("all", "streams"):
        adapter = make_adapter(base, scope=scope)
        lora = sum(one.a.size + one.b.size for one in adapter.trained_lora.values())
        streams = adapter.streams.num_parameters
        assert targets.count_parameters_of_streams(adapter) == streams + (
            lora if scope == "streams" else 0
        )
        target = Target(Weights(base, adapter=adapter))
        system = System(STREAMS, STREAMS, GenerateConfig(decoding="speculative"))
        assert target.count_added_parameters(system) == targets.count_parameters_of_streams(adapter)


def test_the_parameters_of_the_bundled_adapters_are_those_of_the_readme():
    read = [
        targets.read_adapter_with_own_lora(bundled_adapters()[name]) for name in ("sql", "chat")
    ]
    assert [*map(targets.count_parameters_of_streams, read)] == [1_572_672, 1_572_096]


def test_an_adapter_without_lora_of_its_own_is_refused(tmp_path):
    base = write_base(tmp_path / "base")
    folder = write_tiny_adapter(tmp_path / "x", base)
    settings = json.loads((folder / "streams_config.json").read_text())
    (folder / "streams_config.json").write_text(json.dumps({**settings, "fused": True}))
    assert mentions(refusal(targets.read_adapter_with_own_lora, folder), str(folder), "LoRA")


@pytest.mark.parametrize("chunks", [3, serving.BEFORE, serving.BEFORE + 1])
def test_an_answer_that_ends_too_soon_tells_no_delay(chunks):
    def ask(prompt, max_tokens, tell=print):
        times = [float(count) for count in range(1, min(chunks, max_tokens) + 1)]
        for count in range(len(times)):
            tell(count + 1)
        return serving.ReceivedAnswer(asked=0.0, times=times)

    rows = serving.measure_delay("ssmlx", ask, "hello", 4000)
    assert [row["longest"] for row in rows] == [1.0] * (chunks > serving.BEFORE)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["mine", "none"])
def test_the_server_is_asked_for_the_adapter_that_it_has(adapter, tmp_path, monkeypatch):
    base = write_base(tmp_path / "base")
    write_tiny_adapter(tmp_path / "runs" / "mine", base)
    monkeypatch.chdir(tmp_path / "runs")  # a folder is named from here
    with serving.running_server("ssmlx", base, adapter) as ask:
        assert ask("w1 w2 w3", 4).tokens == 4


def test_a_refusal_is_told_as_one(monkeypatch):
    def refuse(request, timeout):
        raise HTTPError(request.full_url, 400, "Bad Request", {}, None)

    monkeypatch.setattr(serving, "urlopen", refuse)
    line = refusal(serving.ask_server, "http://127.0.0.1:1", "m", "hello", 1)
    assert mentions(line, "400", "--long")
