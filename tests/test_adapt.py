"""`ssmlx.adapt`: a model learns to draft for itself, however often the run is stopped."""

import json
import os
import shutil
from argparse import Namespace
from types import SimpleNamespace

import pytest
import test_families
from mlx_lm.utils import save_config, save_model
from real import answer, one_line, words, write_packed, write_tokenizer
from tiny import slow

import ssmlx
from ssmlx.calibration.costs import CostPlan
from ssmlx.commands import adapt, adapting, upload
from ssmlx.commands.adapt import PROG, main
from ssmlx.loading.attach import adapters_for, default_adapter
from ssmlx.loading.files import PartFile, folder_digest
from ssmlx.loading.load import load_base
from ssmlx.loading.names import own_adapters, resolve_adapter
from ssmlx.training import answers, record, sizing
from ssmlx.training.answers import Speaker, Text
from ssmlx.training.config import TrainConfig
from ssmlx.tuning.profile import profile_of

HELD_OUT = 4
ANSWERS = 26
LENGTH = 12
CALIBRATE = adapting.Run._calibrate
RATES = {"answer": 9.0, "token": 0.1, "lower": 0.1, "batch_size": 4, "together": 3, "memory": 2**30}


def within(hours, rates, prompt_tokens, before):
    return sizing.Plan(
        hours=hours,
        answers=before + int(ANSWERS * hours),
        epochs=2,
        answer_seconds=1.0,
        train_seconds=1.0,
    )


@pytest.fixture(scope="module")
def packed(base):
    folder = write_packed(base.parent / "packed", base)
    shutil.copy(base / "chat_template.jinja", folder)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A plan of seconds, the same each time."""
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sizing.Plan, "within", within)
    monkeypatch.setattr(adapting, "measure", lambda *_: sizing.Rates(**RATES))
    monkeypatch.setattr(adapting, "ANSWER_TOKENS", LENGTH)
    monkeypatch.setattr(adapting, "HELD_OUT", HELD_OUT)
    monkeypatch.setattr(adapting, "CHECKED", 2)
    monkeypatch.setattr(answers, "QUESTION_TOKENS", 6)
    monkeypatch.setattr(record, "find_spec", lambda _: None)  # no picture
    monkeypatch.setattr(adapting, "CHECKED_TOKENS", 8)
    monkeypatch.setattr(adapting.Run, "_calibrate", lambda *_: None)


def adapted(model, *more):
    assert main(["--model", str(model), "--name", "mine", *map(str, more)]) == 0
    return resolve_adapter("mine")


def test_a_packed_model_drafts_for_itself_afterwards(packed, capsys):
    folder = adapted(packed)
    said = capsys.readouterr().out
    assert "plan: 26 answers" in said and "of 2 answers the same" in said
    assert "should bring" in said and "less than 1.1x" in said and "GiB of memory" in said
    # By itself, and by its name; of no other model's folder.
    assert own_adapters(packed) == own_adapters() == {"mine": folder}
    assert own_adapters(packed.parent) == {}
    other = shutil.copytree(folder.parent, folder.parents[1] / "other")
    assert list(own_adapters(packed)) == ["mine", "other"]
    os.utime(other / "adapter" / "streams_config.json")
    assert list(own_adapters(packed)) == ["other", "mine"]
    (other / "plan.json").write_text("[]")  # somebody else's
    assert list(own_adapters(packed)) == ["mine"]
    shutil.rmtree(other)
    plain, tokenizer = ssmlx.load(packed, dtype="float32")
    assert default_adapter(plain, "chat") == "mine" and list(adapters_for(plain)) == ["mine"]
    with ssmlx.Engine(str(packed), dtype="float32") as engine:
        assert engine.model().config.num_streams > 0
        found = [t for one in engine.stream("w1 w2 w3", max_tokens=LENGTH) for t in one.tokens]
    prompt = ssmlx.prompt_tokens("w1 w2 w3", plain, tokenizer)
    assert found == answer(plain, tokenizer, prompt, max_tokens=LENGTH, decoding="plain")[0]


def test_what_it_brings_is_told_in_a_file_that_a_card_is_made_of(packed, capsys):
    folder = adapted(packed)
    figures = json.loads((folder / "figures.json").read_text())
    curve = ssmlx.load(packed, adapter=folder)[0].config.tokens_per_call
    assert figures["figures"]["tokens_per_call"] == {str(n): one for n, one in curve.items()}
    assert figures["figures"]["untrained_tokens_per_call"] <= curve[6]
    assert figures["data"]["private"] is False
    assert figures["base"] == {"model": str(packed), "revision": None, "bits": 4}
    capsys.readouterr()
    assert upload.main(["--adapter", "mine", "--repo", "me/mine", "--dry-run"]) == 0
    assert f"6: {curve[6]}," in capsys.readouterr().out


def test_it_calibrates_what_will_be_used_unless_others_disturb(packed, monkeypatch, capsys):
    monkeypatch.setattr(adapting.Run, "_calibrate", CALIBRATE)
    plan = CostPlan(rows=(1, 4), fused_nodes=(1,), contexts=(16,), repeats=1)
    monkeypatch.setattr(adapting, "CALIBRATED", plan)
    monkeypatch.setattr(adapting, "BUSY", -1.0)
    folder = adapted(packed)
    assert "not calibrated" in capsys.readouterr().out
    assert profile_of(ssmlx.load(packed, adapter=folder)[0]) is None
    monkeypatch.setattr(adapting, "BUSY", float("inf"))
    adapted(packed)
    assert "calibrated: fastest here is a best tree of 4 nodes" in capsys.readouterr().out
    assert profile_of(ssmlx.load(packed, adapter=folder)[0]).best().shape.num_nodes == 4


def write_family(folder, name):
    """A random model of mlx-lm's class, in 4 bits, with a tokenizer."""
    own = {**test_families.FAMILIES, **test_families.PLAIN}[name]
    settings = {**({} if "text_config" in own else test_families.SIZES), **own, "model_type": name}
    folder.mkdir()
    save_model(folder, test_families.make_base(name, bits=4))
    settings |= {"tie_word_embeddings": True, "eos_token_id": 2}
    save_config({**settings, "quantization": {"group_size": 32, "bits": 4}}, folder / "config.json")
    write_tokenizer(folder)
    return folder


class Stopped(KeyboardInterrupt):
    pass


def stopped(monkeypatch, owner, name, turn, *argv):
    """Run until `name` of `owner` was called so many times."""
    real = getattr(owner, name)
    calls = []

    def stops(self, *values):
        calls.append(self)
        if len(calls) == turn:
            raise Stopped
        return real(self, *values)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stops)
        assert main(list(map(str, argv))) == 130


@pytest.mark.slow
def test_stopped_anywhere_and_begun_again_it_comes_to_the_same(packed, tmp_path, monkeypatch):
    once = ("--model", packed, "--name", "mine")
    twice = ("--hours", 2)
    whole = folder_digest(adapted(packed))
    grown = adapted(packed, *twice)
    more = folder_digest(grown)
    assert more != whole
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "again"))
    for owner, name, turn in (
        (PartFile, "append", 3),
        (PartFile, "append", 20),
        (sizing.MlxTrainer, "advance", 4),
        (adapting.Run, "check", 1),
    ):
        stopped(monkeypatch, owner, name, turn, *once)
    folder = adapted(packed)
    assert folder_digest(folder) == whole
    # More hours, stopped in what they make; what a kill leaves of the adapter is put back.
    stopped(monkeypatch, PartFile, "append", 20, *once, *twice)
    stopped(monkeypatch, sizing.MlxTrainer, "advance", 4, *once, *twice)
    folder.rename(folder.with_name(".adapter.x.old"))
    (folder.parent / ".adapter.x").mkdir()
    assert folder_digest(adapted(packed, *twice)) == more
    assert not list(folder.parent.glob(".adapter*"))


@pytest.mark.slow
def test_more_hours_go_on_from_what_fewer_made(packed, tmp_path, capsys, monkeypatch):
    first = adapted(packed)
    rows = (first.parent / "round-1" / "data" / "train.jsonl").read_text()
    held = (first.parent / "round-1" / "data" / "valid.jsonl").read_text()
    before = record.read_record(first.parent / "round-1" / "log.jsonl")
    assert "goes on with what was planned" not in capsys.readouterr().out
    adapted(packed, "--hours", 2.5)
    assert "plan: 39 more answers" in capsys.readouterr().out
    data = first.parent / "round-2" / "data"
    assert (data / "valid.jsonl").read_text() == held
    assert (data / "train.jsonl").read_text().startswith(rows)
    asked = [json.loads(line)["asked"] for line in (data / "train.jsonl").open()]
    assert len(set(asked)) == len(asked) > len(rows.splitlines())
    after = record.read_record(first.parent / "round-2" / "log.jsonl")
    best = max(one.get("tokens_per_call", 0) for one in before)
    assert after[0]["tokens_per_call"] == pytest.approx(best, abs=1e-3)
    figures = json.loads((first / "figures.json").read_text())
    assert figures["recipe"]["steps"] == before[-1]["step"] + after[-1]["step"]
    held = [len(json.loads(line)["completion_tokens"]) for line in (data / "valid.jsonl").open()]
    calls = sum(held) / before[0]["tokens_per_call"] - len(held)
    told = pytest.approx((sum(held) - len(held)) / calls, abs=2e-3)
    assert figures["figures"]["untrained_tokens_per_call"] == told
    adapted(packed, "--hours", 2.5)
    assert "goes on with what was planned" in capsys.readouterr().out
    # What makes worse guesses than before does not take its place.
    kept = folder_digest(first)
    with monkeypatch.context() as patch:
        patch.setattr(TrainConfig, "rate", lambda *_: 0.5)
        adapted(packed, "--hours", 4)
    log = record.read_record(first.parent / "round-3" / "log.jsonl")
    assert max(one.get("tokens_per_call", 0) for one in log[1:]) < log[0]["tokens_per_call"]
    assert folder_digest(first) == kept
    # Planned for more before the first hours were over.
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "early"))
    stopped(monkeypatch, sizing.MlxTrainer, "advance", 2, "--model", packed, "--name", "mine")
    early = adapted(packed, "--hours", 2.5)
    assert folder_digest(early) == folder_digest(first)


def test_your_prompts_come_first_and_are_told_to_be_private(packed, tmp_path):
    data = tmp_path / "own.jsonl"
    instruction = "w7 " * 8
    asked = [{"prompt": f"{instruction}w{n}"} for n in range(6)] + [{"prompt": words(2000)}]
    data.write_text("\n".join(map(json.dumps, asked)))
    folder = adapted(packed, "--data", data)
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["data"]["private"] is True
    rows = [
        json.loads(line)
        for name in ("train", "valid")
        for line in (folder.parent / "round-1" / "data" / f"{name}.jsonl").open()
    ]
    assert sum(row["source"] == adapting.FILES for row in rows) == 6


def refused(capsys, *argv):
    assert main(list(map(str, argv))) == 2
    return one_line(capsys.readouterr().err, PROG)


def test_bad_input_is_told_in_one_line(packed, tmp_path, capsys):
    model = ["--model", packed]
    for option in ("--hours", "--memory-gb"):
        for value in ("0.0", "nan", "inf"):
            assert f"{option} {value}; " in refused(capsys, *model, option, value)
    assert "--name chat" in refused(capsys, *model, "--name", "chat")
    assert "--name ../x" in refused(capsys, *model, "--name", "../x")
    assert "does not exist" in refused(capsys, "--model", tmp_path / "none", "--name", "x")
    assert "none.jsonl" in refused(capsys, *model, "--data", tmp_path / "none.jsonl")
    (tmp_path / "own.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w1 \\ud800"}')
    assert "prompt 2 of your files: " in refused(capsys, *model, "--data", tmp_path / "own.jsonl")
    recurrent = write_family(tmp_path / "lfm2", "lfm2")
    assert "cannot draft for itself" in refused(capsys, "--model", recurrent)
    assert own_adapters() == {} and not list((tmp_path / "cache").rglob("plan.json"))
    adapted(packed)
    capsys.readouterr()
    own = [*model, "--name", "mine"]
    assert "other settings" in refused(capsys, *own, "--seed", 2)
    assert "1 or more" in refused(capsys, *own, "--hours", 0.5)
    assert "more than 30" in refused(capsys, *own, "--hours", 1.1)


def test_memory_decides_how_many_go_at_a_time():
    peaks = {1: 100, 3: 300}
    assert sizing._largest((16, 8, 4), peaks, 900, "training") == (8, 800)
    with pytest.raises(ssmlx.InputError, match="training takes"):
        sizing._largest((16, 8, 4), peaks, 300, "training")


def test_weights_are_unpacked_where_there_is_room(packed, tmp_path):
    settings = json.loads((packed / "config.json").read_text())
    size = (packed / "model.safetensors").stat().st_size
    assert sizing.frozen_dtype(packed, settings, 20 * size) == "auto"
    assert sizing.frozen_dtype(packed, settings, 6 * size) == "stored"
    plain = {**settings, "quantization": None, "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert sizing.frozen_dtype(packed, adapting.read_base(tmp_path), 6 * size) == "auto"


def test_what_is_measured_is_what_steps_then_take(base, monkeypatch):
    batches = []
    whole = sizing.collate
    monkeypatch.setattr(sizing, "collate", lambda *a: batches.append(whole(*a)) or batches[-1])
    backbone, _ = load_base(base, "float32")
    train = sizing.TrainConfig(
        num_streams=2,
        num_msa_layers=2,
        adapter_scope="streams",
        draft_vocab_size=32,
        max_length=64 + sizing.ANSWER_TOKENS,
    )
    speaker = Speaker(backbone.model, ssmlx.load(base)[1], 1)
    settings = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 64}
    config = adapting.stream_config(train, settings, SimpleNamespace(template=None, model="a"), [2])
    rates = sizing.measure(backbone, config, train, speaker, 64, 2**33)
    assert rates.batch_size == 16 and rates.together == 32 and min(rates.answer, rates.token) > 0
    assert batches and all((batch.tokens < 32).all() for batch in batches)  # streams learn of all
    # The largest batch, for real.
    tokens = sizing.np.arange(train.max_length, dtype="int32") % 32
    twin = backbone.twin()
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
    speaker = Speaker(model.backbone.model, tokenizer, 3, seed=5)
    prompts = [ssmlx.prompt_tokens(words(n), model, tokenizer) for n in (1, 9, 3, 5, 2)]
    texts = [Text(n, prompt, 0.8 * (n == 2)) for n, prompt in enumerate(prompts)]
    together = dict(speaker.answers(texts, LENGTH))
    alone = dict(one for text in texts for one in speaker.answers([text], LENGTH))
    assert together == alone and sorted(together) == [0, 1, 2, 3, 4]
    for number in (0, 1, 3, 4):
        expected, _ = answer(model, tokenizer, prompts[number], max_tokens=LENGTH, decoding="plain")
        assert together[number] == expected
    other = dict(Speaker(model.backbone.model, tokenizer, 3, seed=6).answers(texts, LENGTH))
    assert other[2] != together[2]


def test_a_model_that_asks_nothing_sensible_is_not_waited_for(base, tmp_path, monkeypatch):
    model, tokenizer = ssmlx.load(base, dtype="float32")
    monkeypatch.setattr(answers, "QUESTION_TOKENS", 4)
    part = PartFile(tmp_path / "questions.part", {})
    speaker = Speaker(model.backbone.model, tokenizer, 2)
    assert speaker.questions(2, part) == []  # it never ends a text
    assert len(part.done) == answers._TRIES * 2
    assert speaker.questions(100, part) == [] and len(part.done) == answers._ROUNDS * 4


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
    monkeypatch.setattr(adapting, "time", now)
    monkeypatch.setattr(adapting, "power_source", lambda: next(sources))
    monkeypatch.setattr(os, "getloadavg", lambda: next(free))
    adapting.waiting(True)()
    assert len(slept) == waits
    adapting.waiting(False)()
    assert len(slept) == waits


def test_names_of_models_become_names_of_adapters():
    for model, name in (("org/Some-Model_4bit@refs/pr/3", "some-model_4bit"), ("a/b c", "b-c")):
        assert adapt.name_of(Namespace(model=model, name=None)) == name


@pytest.mark.parametrize("name", ["qwen3", *slow("gemma3_text", "gpt_oss", "mistral3", "cohere2")])
def test_families_draft_for_themselves(name, tmp_path):
    folder = write_family(tmp_path / name, name)
    model, tokenizer = ssmlx.load(folder, adapter=adapted(folder), dtype="float32")
    assert model.num_streams > 0 and model.backbone.base().model.model_type == name
    prompt = ssmlx.prompt_tokens(words(40), model, tokenizer)
    plain, _ = answer(model, tokenizer, prompt, max_tokens=LENGTH, decoding="plain")
    assert answer(model, tokenizer, prompt, max_tokens=LENGTH, decoding="streaming")[0] == plain
