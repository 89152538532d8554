"""`ssmlx.adapt`: a model learns to draft for itself, however often the run is stopped."""

import errno
import json
import os
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx.utils import tree_flatten
from real import answer, words, write_packed
from refusals import as_shown, found_in, mentions, one_line, refusal
from tiny import slow
from tiny_adapt import AMOUNTS, LENGTH, RATES, Stopped, write_family
from tiny_lora import write_lora

import ssmlx
from ssmlx.commands import adapt as adapt_command
from ssmlx.commands import power as power_command
from ssmlx.commands import upload
from ssmlx.commands.adapt import PROG, main
from ssmlx.commands.running import file_error
from ssmlx.generation.learned import learned_of
from ssmlx.loading.adapt_runs import PAYS, find_runs_by_weights, read_adapt_runs
from ssmlx.loading.attach import find_adapters_of_base, find_default_adapter
from ssmlx.loading.files import locked_folder
from ssmlx.loading.folders import adapters_home
from ssmlx.loading.identity import (
    digest_arrays,
    folder_digest,
    stored_weights_digest,
)
from ssmlx.loading.load import load_base
from ssmlx.loading.names import adapters_made_here, resolve_adapter
from ssmlx.training import (
    adapt_check,
    adapt_plan,
    adapt_run,
    adapt_workflow,
    batch_responder,
    record,
    sizing,
)
from ssmlx.training.adapt_run import AdaptOptions, Amounts
from ssmlx.training.batch_responder import BatchResponder, NumberedPrompt
from ssmlx.training.config import RunOptions, TrainConfig
from ssmlx.training.job import make_stream_config, read_base_settings
from ssmlx.training.part_file import PartFile


@pytest.fixture(scope="module")
def packed(base):
    folder = write_packed(base.parent / "packed", base)
    shutil.copy(base / "chat_template.jinja", folder)
    return folder


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """The same plan on every machine, of few answers."""
    monkeypatch.setattr(adapt_plan, "measure_rates", lambda *_: RATES)


def adapted(model, *, hours=1.0, data=(), seed=0, adapter=None, lines=None):
    """Run to the end, or go on, with small amounts; the adapter's folder, and what was said, which
    goes to `lines` as well."""
    out = adapters_home() / "mine"
    lines = [] if lines is None else lines
    options = AdaptOptions(
        model=str(model),
        path=model,
        out=out,
        adapter=adapter,
        hours=hours,
        data=tuple(data),
        seed=seed,
        amounts=AMOUNTS,
    )
    with locked_folder(out):
        adapt_workflow.adapt(options, prog=PROG, say=lines.append)
    return resolve_adapter("mine"), "\n".join(lines)


@pytest.mark.slow
def test_a_packed_model_drafts_for_itself_afterwards(packed):
    folder, said = adapted(packed)
    assert mentions(said, "26", "2")
    # By itself, and by its name; of no other model's folder.
    (run,) = find_runs_by_weights(packed, "x").fitting
    assert (run.name, run.adapter, run.is_finished, run.hours) == ("mine", folder, True, 1.0)
    other = shutil.copytree(folder.parent, folder.parents[1] / "other")
    assert (
        list(adapters_made_here()) == [run.name for run in read_adapt_runs()] == ["mine", "other"]
    )
    os.utime(other / "adapter" / "streams_config.json")
    assert (
        list(adapters_made_here()) == [run.name for run in read_adapt_runs()] == ["other", "mine"]
    )
    (other / "plan.json").write_text("[]")  # somebody else's
    assert list(adapters_made_here()) == [run.name for run in read_adapt_runs()] == ["mine"]
    shutil.rmtree(other)
    figures = json.loads((folder / "figures.json").read_text())
    figures["figures"] |= {"speed_up": 1.5, "text_speed_up": 1.0}  # whatever they were here
    (folder / "figures.json").write_text(json.dumps(figures))
    plain, tokenizer = ssmlx.load(packed, adapter="none", dtype="float32")
    assert find_default_adapter(plain) == ("mine", folder) and list(
        find_adapters_of_base(plain)
    ) == ["mine"]
    with ssmlx.Engine(str(packed), dtype="float32") as engine:
        assert engine.model().config.num_streams > 0
        found = [t for one in engine.stream("w1 w2 w3", max_tokens=LENGTH) for t in one.tokens]
    prompt = ssmlx.prompt_tokens("w1 w2 w3", plain, tokenizer)
    assert found == answer(plain, tokenizer, prompt, max_tokens=LENGTH, decoding="plain")[0]


@pytest.mark.slow
def test_streams_are_learned_for_the_model_as_a_lora_tunes_it(packed, tmp_path):
    keys = ["self_attn.q_proj", "mlp.up_proj", "model.embed_tokens"]
    lora = write_lora(tmp_path / "lora", packed, keys=keys, num_layers=4)
    folder, said = adapted(packed, adapter=lora)
    assert any(mentions(line, "LoRA", "4", "9") for line in said.splitlines())
    tuned, tokenizer = ssmlx.load(packed, adapter=lora, dtype="float32")
    model, _ = ssmlx.load(packed, adapter="mine", dtype="float32")
    assert model.num_streams > 0 and model.is_fine_tuned
    prompt = ssmlx.prompt_tokens("w1 w2 w3", model, tokenizer)
    expected = answer(tuned, tokenizer, prompt, max_tokens=LENGTH)[0]
    found, last = answer(model, tokenizer, prompt, max_tokens=LENGTH, decoding="speculative")
    assert found == expected and last.drafted_tokens > 0
    plain, _ = ssmlx.load(packed, adapter="none", dtype="float32")
    assert answer(plain, tokenizer, prompt, max_tokens=LENGTH)[0] != expected
    # They learned the tuned model's answers, and are not what drafts for the model without it.
    rows = [json.loads(line) for line in (folder.parent / "round-1/data/train.jsonl").open()]
    learned = {one: 0 for one in (tuned, plain)}
    for row in rows[:6]:  # of which some are sampled
        told = row["completion_tokens"]
        for one in learned:
            asked = answer(one, tokenizer, row["prompt_tokens"], max_tokens=len(told))
            learned[one] += asked[0] == told
    assert learned[tuned] > 2 and learned[plain] == 0
    assert (
        find_runs_by_weights(packed, str(packed)).fitting == ()
        and find_default_adapter(plain) is None
    )
    assert adapters_made_here() == {"mine": folder} and "mine" in find_adapters_of_base(plain)
    # Nothing goes on that was made with another LoRA, or without one.
    other = write_lora(tmp_path / "other", packed, keys=keys, seed=1)
    for adapter in (other, None):
        assert str(adapters_home() / "mine") in refusal(adapted, packed, adapter=adapter)


def test_an_adapter_with_streams_learns_no_others(packed, folders):
    said = refusal(adapted, packed, adapter=Path(folders["streams"]))
    assert mentions(found_in(said), "streams")


@pytest.mark.slow
def test_what_it_brings_is_told_in_a_file_that_a_card_is_made_of(packed, capsys):
    folder, _ = adapted(packed)
    figures = json.loads((folder / "figures.json").read_text())
    curve = ssmlx.load(packed, adapter=folder)[0].config.tokens_per_call
    assert figures["figures"]["tokens_per_call"] == {str(n): one for n, one in curve.items()}
    assert figures["figures"]["untrained_tokens_per_call"] <= curve[6]
    assert figures["data"]["private"] is False
    digest = stored_weights_digest(packed)
    assert figures["base"] == {
        "model": str(packed), "revision": None, "bits": 4, "weights": digest
    }  # fmt: skip
    capsys.readouterr()
    assert upload.main(["--adapter", "mine", "--repo", "me/mine", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"6: {curve[6]}," in out and mentions(out, "--base")


@pytest.mark.slow
def test_what_it_should_bring_is_forecast_as_training_goes_on(packed):
    folder, said = adapted(packed)
    plan = json.loads((folder.parent / "plan.json").read_text())
    costs = {int(n): cost for n, cost in plan["step_costs"].items()}
    assert {2} <= {*costs} <= {2, 4, 8, 16} and min(costs.values()) > 0
    # The adapter's own answers start from what was timed with untrained streams of its sizes.
    known = learned_of(ssmlx.load(packed, adapter=folder)[0])[0].costs.frozen(0)
    assert {*costs} <= {n for name, n in known.known if name == "streams"}
    log = record.read_log_entries(folder.parent / "round-1" / "log.jsonl")
    curve = ssmlx.load(packed, adapter=folder)[0].config.tokens_per_call
    kept = max(range(len(log)), key=lambda n: log[n].get("tokens_per_call", 0.0))
    nodes, speedup = sizing.fastest_tree(costs, curve)
    validated = [entry["step"] for entry in log if "tokens_per_call" in entry and entry["step"]]
    assert len(validated) >= sizing.MOST_VALIDATIONS and log[kept]["step"] in validated
    told = (f"{curve[nodes]:.2f}", str(nodes), f"{speedup:.2f}", *[f"{PAYS}"] * (speedup < PAYS))
    assert any(mentions(line, *told) for line in said.splitlines())


def test_streams_get_the_layers_that_should_be_fastest():
    cheap = {2: 1.0, 4: 1.1, 8: 1.2, 16: 1.4}
    dear = {2: 2.0, 4: 3.0}
    assert {*sizing.candidate_layers(30)} == {2, 4, 8}
    assert sizing.choose_layers({2: cheap, 4: dear, 8: dear}, 30) == 2
    assert sizing.choose_layers({2: cheap, 4: cheap, 8: cheap}, 30) == 8
    assert {*sizing.candidate_layers(4)} == {1}
    assert sizing.fastest_tree({2: 1.0, 4: 3.0}, {2: 1.5, 4: 2.0}) == (2, 1.5)


@pytest.mark.slow
def test_candidates_are_timed_with_the_base_left_as_it_is(packed, tmp_path):
    backbone, _ = load_base(packed, "float32")
    run = RunOptions(data=tmp_path, out=tmp_path, model=str(packed), template=None)
    base = {**read_base_settings(packed), "num_hidden_layers": 4}
    before = digest_arrays(tree_flatten(backbone.model.parameters()))
    found = sizing.time_candidate_streams(backbone, base, run, range(3, 40), seconds=0)
    assert {*found} == {*sizing.candidate_layers(4)}
    assert all(costs[2] > 0 for costs in found.values())
    assert digest_arrays(tree_flatten(backbone.model.parameters())) == before


@pytest.mark.slow
def test_what_this_machine_makes_fits_into_the_hours(packed, monkeypatch):
    monkeypatch.setattr(
        adapt_plan,
        "measure_rates",
        sizing.measure_rates,
    )
    said = []
    # Up to the check, which so few steps need not pass.
    asked = {"hours": 0.002, "lines": said}
    stopped(monkeypatch, adapt_workflow, "measure_adapter", 1, packed, **asked)
    plan = json.loads((adapters_home() / "mine" / "plan.json").read_text())
    (planned,) = plan["rounds"]
    assert planned["answers"] > plan["train"]["batch_size"] + AMOUNTS.held_out
    seconds = planned["answer_seconds"] + planned["train_seconds"]
    assert seconds <= (1 - sizing.RESERVE) * 3600 * 0.002
    assert mentions("\n".join(said), f"{planned['answers']:,}")


@pytest.mark.slow
def test_what_was_measured_decides_and_a_finished_run_says_so(packed, monkeypatch):
    seconds = {"plain": 3.0, "prompt-lookup": 2.0, None: 1.0}

    def timed(_model, _tokenizer, _prompt, config, _count):
        how = "plain" if config.decoding == "plain" else config.drafter
        return adapt_check.TimedAnswer([3, 4], 2, seconds[how])

    monkeypatch.setattr(adapt_check, "time_answer", timed)
    folder, said = adapted(packed)
    assert any(mentions(line, "3.00", "1.50", "2") for line in said.splitlines())
    use_it = f"python -m ssmlx.chat --model {packed}"
    assert said.splitlines()[-1].endswith(use_it)
    (run,) = read_adapt_runs()
    assert run.speed_up == 3.0 and find_runs_by_weights(packed, "x").chosen.name == "mine"
    before = folder_digest(folder)
    again = adapted(packed)[1].splitlines()
    assert mentions(again[0], "mine") and len(again) == 2 and again[1].endswith(use_it)
    # What is no faster than the text's own drafts brings nothing, and is not used by itself.
    figures = folder / "figures.json"
    figures.unlink()  # as where it was stopped before it was measured
    seconds |= {"plain": 1.5, "prompt-lookup": 1.0}
    _, said = adapted(packed)
    *earlier, last = said.splitlines()
    assert any(mentions(line, "1.50") for line in earlier) and mentions(last, "1", "--hours 2")
    assert any(mentions(line, "mine") for line in earlier)
    assert find_runs_by_weights(packed, "x").chosen is None
    assert adapted(packed)[1].splitlines()[-1] == last
    assert folder_digest(folder) == before


@pytest.mark.slow
def test_a_copy_of_the_model_goes_on_with_its_run(packed, tmp_path, monkeypatch):
    lines = []
    with pytest.raises(Stopped), monkeypatch.context() as patch:
        real = sizing.MlxTrainer.advance
        patch.setattr(sizing.MlxTrainer, "advance", stops_at(4, real))
        adapted(packed, lines=lines)
    assert mentions(lines[-1], "26", "3", "12")
    copy = shutil.copytree(packed, tmp_path / "copy")
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "of_a_later_release": 1}))
    options = AdaptOptions(model=str(copy), path=copy, out=adapters_home() / "copy")
    assert adapt_run.find_run_folder(options) == adapters_home() / "mine"
    assert adapt_run.find_run_folder(replace(options, seed=1)) == adapters_home() / "copy"
    folder, said = adapted(copy)
    assert any(mentions(line, "mine", "26", "3", "12") for line in said.splitlines())
    (run,) = read_adapt_runs()
    assert (run.model, run.model_folder, run.is_finished) == (str(copy), copy, True)
    log = record.read_log_entries(folder.parent / "round-1" / "log.jsonl")
    assert [entry["step"] for entry in log] == list(range(13))


def stops_at(turn, real):
    calls = []

    def stops(*values, **more):
        calls.append(1)
        if len(calls) == turn:
            raise Stopped
        return real(*values, **more)

    return stops


def test_answers_that_take_long_leave_fewer_passes():
    one = sizing.Round(hours=1, answers=10, epochs=3, answer_seconds=1000, train_seconds=2000)
    assert sizing.cut_passes_to_hours(one, None, 1000) == one
    late = sizing.cut_passes_to_hours(one, None, 2600)
    assert (late.epochs, late.train_seconds) == (1.5, 1000)  # as many as fit into 1,000 s
    assert sizing.cut_passes_to_hours(one, None, 9999).epochs == 1.5  # half at least
    second = replace(one, hours=2, spent_before=5000)
    assert sizing.cut_passes_to_hours(second, one, 6000) == second
    # What else takes time leaves less for answers.
    plans = [sizing.plan_round(1, RATES, 30, LENGTH, check_seconds=other) for other in (0, 1200)]
    assert plans[0].answers == 26 and plans[1].answers == 17
    assert all(plan.seconds <= 3600 for plan in plans)
    # Nor do validations take more than their share of the hours, where that leaves two.
    for seconds, count in ((0.5, 10), (15.0, 9), (1000.0, 2)):
        rates = replace(RATES, validate_seconds=seconds)
        plan = sizing.plan_round(1, rates, 30, LENGTH, held_out=4)
        assert plan.validations == count and plan.other_seconds == (1 + count) * 4 * seconds


@pytest.mark.slow
def test_a_full_disk_is_named(packed, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr("os.fsync", full)
        adapted(packed)
    part = adapters_home() / "mine" / "round-1" / "questions.part"
    assert str(file_error(caught.value)).startswith(f"{part}: No space left on device; expected")
    adapted(packed)  # once there is room


def stopped(monkeypatch, owner, name, turn, model, **asked):
    """Run until `name` of `owner` was called so many times."""
    real = getattr(owner, name)
    calls = []

    def stops(*values, **more):
        calls.append(name)
        if len(calls) == turn:
            raise Stopped
        return real(*values, **more)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(owner, name, stops)
        adapted(model, **asked)


@pytest.mark.slow
def test_stopped_anywhere_and_begun_again_it_comes_to_the_same(packed, tmp_path, monkeypatch):
    whole = folder_digest(adapted(packed)[0])
    more = folder_digest(adapted(packed, hours=2)[0])
    assert more != whole
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "again"))
    # The candidate is chosen by the clock: the tiny model has one.
    for owner, name, turn in (
        (PartFile, "append", 3),
        (PartFile, "append", 20),
        (sizing.MlxTrainer, "advance", 4),
        (adapt_workflow, "measure_adapter", 1),
    ):
        stopped(monkeypatch, owner, name, turn, packed)
    folder, _ = adapted(packed)
    assert folder_digest(folder) == whole
    # More hours, stopped in what they make; what a kill leaves of the adapter is put back.
    stopped(monkeypatch, PartFile, "append", 20, packed, hours=2)
    stopped(monkeypatch, sizing.MlxTrainer, "advance", 4, packed, hours=2)
    folder.rename(folder.with_name(".adapter.x.old"))
    (folder.parent / ".adapter.x").mkdir()
    assert folder_digest(adapted(packed, hours=2)[0]) == more
    assert not list(folder.parent.glob(".adapter*"))


@pytest.mark.slow
def test_more_hours_go_on_from_what_fewer_made(packed, tmp_path, monkeypatch):
    first, said = adapted(packed)
    rows = (first.parent / "round-1" / "data" / "train.jsonl").read_text()
    held = (first.parent / "round-1" / "data" / "valid.jsonl").read_text()
    before = record.read_log_entries(first.parent / "round-1" / "log.jsonl")
    _, said = adapted(packed, hours=2.5)
    assert mentions(said, "26")
    data = first.parent / "round-2" / "data"
    assert (data / "valid.jsonl").read_text() == held
    assert (data / "train.jsonl").read_text().startswith(rows)
    asked = [json.loads(line)["asked"] for line in (data / "train.jsonl").open()]
    assert len(set(asked)) == len(asked) > len(rows.splitlines())
    after = record.read_log_entries(first.parent / "round-2" / "log.jsonl")
    best = max(one.get("tokens_per_call", 0) for one in before)
    assert after[0]["tokens_per_call"] == pytest.approx(best, abs=1e-3)
    figures = json.loads((first / "figures.json").read_text())
    assert figures["recipe"]["steps"] == before[-1]["step"] + after[-1]["step"]
    held = [len(json.loads(line)["completion_tokens"]) for line in (data / "valid.jsonl").open()]
    calls = sum(held) / before[0]["tokens_per_call"] - len(held)
    untrained = pytest.approx((sum(held) - len(held)) / calls, abs=2e-3)
    assert figures["figures"]["untrained_tokens_per_call"] == untrained
    _, said = adapted(packed, hours=2.5)
    assert mentions(said.splitlines()[0], "mine") and len(said.splitlines()) == 2
    # What makes worse guesses than before does not take its place.
    kept = folder_digest(first)
    with monkeypatch.context() as patch:
        patch.setattr(TrainConfig, "learning_rate_at", lambda *_: 0.5)
        adapted(packed, hours=4)
    log = record.read_log_entries(first.parent / "round-3" / "log.jsonl")
    assert max(one.get("tokens_per_call", 0) for one in log[1:]) <= log[0]["tokens_per_call"]
    assert folder_digest(first) == kept
    # Planned for more before the first hours were over.
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "early"))
    stopped(monkeypatch, sizing.MlxTrainer, "advance", 2, packed)
    early, _ = adapted(packed, hours=2.5)
    assert folder_digest(early) == folder_digest(first)


@pytest.mark.slow
def test_your_prompts_come_first_and_are_told_to_be_private(packed, tmp_path):
    data = tmp_path / "own.jsonl"
    instruction = "w7 " * 8
    asked = [{"prompt": f"{instruction}w{n}"} for n in range(6)] + [{"prompt": words(2000)}]
    data.write_text("\n".join(map(json.dumps, asked)))
    folder, _ = adapted(packed, data=[data])
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["data"]["private"] is True
    rows = [
        json.loads(line)
        for name in ("train", "valid")
        for line in (folder.parent / "round-1" / "data" / f"{name}.jsonl").open()
    ]
    assert sum(row["source"] == adapt_run.FILES for row in rows) == 6


@pytest.fixture
def refused(packed, capsys):
    """Return a function that runs the command, which refuses, and returns its line."""

    def run(*argv):
        assert main([*map(str, argv)]) == 2
        return one_line(capsys.readouterr().err, PROG)

    return run


def test_bad_input_is_one_line(packed, refused, own_cache, tmp_path):
    model = ("--model", packed)
    for option in ("--hours", "--memory-gb"):
        for value in ("0.0", "nan", "inf"):
            assert mentions(found_in(refused(*model, option, value)), option, value)
    assert mentions(found_in(refused(*model, "--name", "chat")), "--name chat")
    assert mentions(found_in(refused(*model, "--name", "../x")), "--name ../x")
    assert str(tmp_path / "none") in refused("--model", tmp_path / "none", "--name", "x")
    assert "none.jsonl" in refused(*model, "--data", tmp_path / "none.jsonl")
    (tmp_path / "own.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w1 \\ud800"}')
    line = refused(*model, "--data", tmp_path / "own.jsonl")
    assert mentions(found_in(line), "own.jsonl", "2")
    recurrent = write_family(tmp_path / "lfm2", "lfm2")
    line = refused("--model", recurrent)
    assert as_shown(load_base(recurrent)[0].capabilities.stages) in line
    assert adapters_made_here() == {} and not list(own_cache.rglob("plan.json"))


@pytest.mark.slow
def test_what_a_finished_run_cannot_follow_is_refused(packed, refused, capsys):
    adapted(packed)
    capsys.readouterr()
    own = ("--model", packed, "--name", "mine")
    assert str(adapters_home() / "mine") in refused(*own, "--seed", 2)
    assert mentions(refused(*own, "--hours", 0.5), "--hours", "0.5", "1")
    assert mentions(refused(*own, "--hours", 1.1), "--hours", "1.1", "36")


def test_memory_decides_how_many_go_at_a_time():
    peaks = {1: 100, 3: 300}
    assert sizing._largest_fitting_batch((16, 8, 4), peaks, 900, "training") == (8, 800)
    assert mentions(refusal(sizing._largest_fitting_batch, (16, 8, 4), peaks, 300, "THIS"), "THIS")


def test_weights_are_unpacked_where_there_is_room(packed, tmp_path):
    settings = json.loads((packed / "config.json").read_text())
    size = (packed / "model.safetensors").stat().st_size
    assert sizing.choose_frozen_dtype(packed, settings, 20 * size) == "auto"
    assert sizing.choose_frozen_dtype(packed, settings, 6 * size) == "stored"
    plain = {**settings, "quantization": None, "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert sizing.choose_frozen_dtype(packed, read_base_settings(tmp_path), 6 * size) == "auto"


def test_what_is_measured_is_what_steps_then_take(base, monkeypatch):
    batches = []
    whole = sizing.collate
    monkeypatch.setattr(sizing, "collate", lambda *a: batches.append(whole(*a)) or batches[-1])
    backbone, _ = load_base(base, "float32")
    answer_tokens = Amounts().answer_tokens
    train = sizing.TrainConfig(
        num_streams=2,
        num_msa_layers=2,
        adapter_scope="streams",
        draft_vocab_size=32,
        max_length=64 + answer_tokens,
    )
    responder = BatchResponder(backbone.model, ssmlx.load(base)[1], 1)
    settings = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 64}
    config = make_stream_config(train, settings, SimpleNamespace(template=None, model="a"), [2])
    rates = sizing.measure_rates(backbone, config, train, responder, 64, answer_tokens, 2**33)
    assert rates.batch_size == 16 and rates.answers_at_once == 32
    assert min(rates.answer_tokens_per_second, rates.train_seconds_per_token) > 0
    assert batches and all((batch.tokens < 32).all() for batch in batches)  # streams learn of all
    # The largest batch, for real.
    tokens = sizing.np.arange(train.max_length, dtype="int32") % 32
    twin = backbone.clone_sharing_weights()
    vocab = sizing.np.arange(32, dtype="int32")
    model = sizing.TrainedModel(twin, sizing.new_adapter(twin, config, train, vocab))
    objective = sizing.MlxObjective(model, train, vocab)
    batch = whole([sizing.Example(tokens, 64)] * 16, sizing.np.arange(16))
    states = objective.lower(batch)
    sizing.mx.reset_peak_memory()
    sizing.MlxTrainer(objective, 10).advance(batch, states)
    assert sizing.mx.get_peak_memory() == pytest.approx(rates.memory, rel=0.15)


def test_answers_are_those_of_one_text_after_the_other(base, tmp_path):
    model, tokenizer = ssmlx.load(base, dtype="float32")
    responder = BatchResponder(model.backbone.model, tokenizer, 3, seed=5)
    prompts = [ssmlx.prompt_tokens(words(n), model, tokenizer) for n in (1, 9, 3, 5, 2)]
    texts = [NumberedPrompt(n, prompt, 0.8 * (n == 2)) for n, prompt in enumerate(prompts)]
    together = dict(responder.stream_answers(texts, LENGTH))
    alone = dict(one for text in texts for one in responder.stream_answers([text], LENGTH))
    assert together == alone and sorted(together) == [0, 1, 2, 3, 4]
    for number in (0, 1, 3, 4):
        expected, _ = answer(model, tokenizer, prompts[number], max_tokens=LENGTH, decoding="plain")
        assert together[number] == expected
    other = dict(
        BatchResponder(model.backbone.model, tokenizer, 3, seed=6).stream_answers(texts, LENGTH)
    )
    assert other[2] != together[2]


def test_a_model_that_asks_nothing_sensible_is_is_not_waited_for(base, tmp_path):
    model, tokenizer = ssmlx.load(base, dtype="float32")
    part = PartFile(tmp_path / "questions.part", {})
    responder = BatchResponder(model.backbone.model, tokenizer, 2)
    assert responder.make_up_questions(2, 4, part) == []  # it never ends a text
    assert len(part.done) == batch_responder._TRIES * 2
    assert (
        responder.make_up_questions(100, 4, part) == []
        and len(part.done) == batch_responder._ROUNDS * 4
    )


@pytest.mark.parametrize(
    ("load", "power", "waits"), [(0.0, "AC", 0), (9.0, "AC", 1), (0.0, "battery", 1)]
)
def test_it_gives_way_where_that_is_asked_for(monkeypatch, load, power, waits):
    clock = iter(range(0, 1000, 20))
    slept = []
    now = SimpleNamespace(
        monotonic=lambda: next(clock), process_time=lambda: 0.0, sleep=slept.append
    )
    free = iter([(load,) * 3, *[(0.0,) * 3] * 9])
    sources = iter([power, *["AC"] * 9])
    monkeypatch.setattr(adapt_command, "time", now)
    monkeypatch.setattr(power_command, "power_source_or_unknown", lambda: next(sources))
    monkeypatch.setattr(os, "getloadavg", lambda: next(free))
    adapt_command.make_wait(True)()
    assert len(slept) == waits
    adapt_command.make_wait(False)()
    assert len(slept) == waits


def test_names_of_models_become_names_of_adapters():
    for model, name in (("org/Some-Model_4bit@refs/pr/3", "some-model_4bit"), ("a/b c", "b-c")):
        assert adapt_command.adapter_name(Namespace(model=model, name=None, adapter=None)) == name
    asked = Namespace(model="org/Qwen3-4B", name=None, adapter="you/My-LoRA@main")
    assert adapt_command.adapter_name(asked) == "qwen3-4b-my-lora"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", *slow("gemma3_text", "gpt_oss", "mistral3", "cohere2")])
def test_families_draft_for_themselves(name, tmp_path):
    folder = write_family(tmp_path / name, name)
    model, tokenizer = ssmlx.load(folder, adapter=adapted(folder)[0], dtype="float32")
    assert model.num_streams > 0 and model.backbone.without_adapter().model.model_type == name
    prompt = ssmlx.prompt_tokens(words(40), model, tokenizer)
    plain, _ = answer(model, tokenizer, prompt, max_tokens=LENGTH, decoding="plain")
    assert answer(model, tokenizer, prompt, max_tokens=LENGTH, decoding="speculative")[0] == plain
