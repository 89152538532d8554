"""How a model's generation_config.json asks for sampling: followed where nothing else is said."""

import json
import logging
import math
from pathlib import Path

import pytest
import real
import refusals
from refusals import exits, found_in, mentions

pytest.importorskip("starlette")

from asking import CHAT, COMPLETIONS, chat, client_of, reply, said

import ssmlx
from perf.run.options import parse_systems_with_baselines
from ssmlx.commands import chat as chat_command
from ssmlx.commands import check, generate
from ssmlx.commands.answer_lines import sampling_line
from ssmlx.commands.decoding_options import generate_config
from ssmlx.errors import InputError
from ssmlx.loading.generation_config import read_model_sampling, sampling_asked_for
from ssmlx.server import __main__ as server
from ssmlx.server.app import make_app
from ssmlx.server.handler import RequestHandler
from ssmlx.settings import AcceptanceConfig, GenerateConfig, ModelSampling, SamplingConfig
from ssmlx.training import adapt_check

ASKED = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "eos_token_id": 2}
THE_MODELS = "generation_config.json"
"""The file that a line names where it says that the model asks for sampling."""
SAMPLED = ("temp", "1", "top-p", "0.95", "--temp 0")
LENGTH = 8
PROMPT = [8, 9, 10]


def write(folder: Path, content: dict | str) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def sampling(tmp_path_factory):
    """The folder of a model that asks for sampling."""
    return write(real.write_base(tmp_path_factory.mktemp("sampling") / "base"), ASKED)


@pytest.fixture(scope="module")
def asking(sampling):
    """Its model and tokenizer."""
    return ssmlx.load(str(sampling), dtype="float32")


@pytest.fixture(scope="module")
def greedy(base):
    """What the same model answers greedily."""
    return [*real.answer(*ssmlx.load(str(base), dtype="float32"), PROMPT, max_tokens=LENGTH)[0]]


@pytest.mark.parametrize(("content", "expected"), [
    ({}, {}),
    ({"eos_token_id": 2, "repetition_penalty": 1.3}, {}),
    ({"temperature": 0.7, "repetition_penalty": 1.05}, {"temp": 0.7, "repetition_penalty": 1.05}),
    ({"do_sample": True, "repetition_penalty": None}, {"temp": 1.0}),
    ({"do_sample": False, "repetition_penalty": 1.3}, {}),
    ({"do_sample": True, "top_k": 50.0}, {"temp": 1.0, "top_k": 50}),
    ({"top_k": -1.0, "temperature": 1}, {"temp": 1.0}),
    ({"do_sample": True}, {"temp": 1.0}),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temp": 0.6, "top_k": 20}),
    ({"temperature": 0.6, "min_p": 0.1}, {"temp": 0.6, "min_p": 0.1}),
    ({"top_k": 64, "top_p": 0.95}, {"temp": 1.0, "top_k": 64, "top_p": 0.95}),
    ({"do_sample": True, "top_k": None, "top_p": 1.0}, {"temp": 1.0, "top_p": 1.0}),
    ({"do_sample": True, "top_k": -1, "temperature": None}, {"temp": 1.0}),
    ({"temperature": 0}, {}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
    ({"do_sample": None, "temperature": 0.6}, {"temp": 0.6}),
])  # fmt: skip
def test_what_a_file_asks_for(content, expected, caplog):
    assert sampling_asked_for(content) == ModelSampling(**expected)
    assert caplog.text == ""


GOOD = {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1, "top_p": 0.9,
        "repetition_penalty": 1.05}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("temperature", [1]),
    ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.5), ("top_k", 2.5),
    ("top_k", -7), ("min_p", "low"), ("repetition_penalty", 0), ("do_sample", "yes"),
    ("do_sample", 1),
])  # fmt: skip
def test_one_bad_value_is_named_and_the_others_followed(tmp_path, name, value, caplog):
    rest = {one: number for one, number in GOOD.items() if one != name}
    expected = sampling_asked_for(rest)
    write(tmp_path, {**rest, name: value})
    with caplog.at_level(logging.WARNING, "ssmlx"):
        assert read_model_sampling(tmp_path) == expected != ModelSampling()
    (record,) = caplog.records
    assert mentions(record.getMessage(), "generation_config.json", name, repr(value))


@pytest.mark.parametrize("content", ['{"temperature": 1e999}', "{", "[]", '"text"'])
def test_a_file_of_nonsense_is_said_once_and_not_followed(tmp_path, content, caplog):
    write(tmp_path, content)
    with caplog.at_level(logging.WARNING, "ssmlx"):
        assert read_model_sampling(tmp_path) == ModelSampling()
    assert len(caplog.records) == 1 and "generation_config.json" in caplog.text


def test_a_broken_file_leaves_the_model_greedy(tmp_path, greedy):
    folder = write(real.write_base(tmp_path / "base"), "{")
    model, tokenizer = ssmlx.load(str(folder), dtype="float32")
    assert [*real.answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0]] == greedy


def answers_of(ask) -> set:
    return {tuple(ask()) for _ in range(5)}


def test_the_api_samples_unless_told_otherwise(asking, greedy):
    def ask(**settings):
        return real.answer(*asking, PROMPT, max_tokens=LENGTH, **settings)[0]

    assert len(answers_of(ask)) > 1
    assert len(answers_of(lambda: ask(top_p=0.5))) > 1
    assert answers_of(lambda: ask(temp=0)) == {tuple(greedy)}
    assert answers_of(lambda: ask(top_k=1)) == {tuple(greedy)}
    seeded = {"seed": 3, "decoding": "plain"}
    assert answers_of(lambda: ask(seed=3)) == {tuple(ask(temp=1, top_p=0.95, min_p=0, **seeded))}
    assert ask(temp=0.5, **seeded) == ask(temp=0.5, top_p=0.95, top_k=0, **seeded)
    assert len(answers_of(lambda: ask(deterministic=True))) == 1


def test_typical_acceptance_goes_with_the_models_own_temperature(asking, base, greedy):
    typical = AcceptanceConfig(kind="typical")
    how = {"acceptance": typical, "drafter": "prompt-lookup", "max_tokens": LENGTH}
    assert real.answer(*asking, PROMPT, **how)[0]
    others = ssmlx.load(str(base), dtype="float32")
    assert "acceptance=typical" in refusals.refusal(real.answer, *others, PROMPT, **how)
    with pytest.raises(InputError):
        GenerateConfig(acceptance=typical, temp=0)


def test_an_engine_and_its_chats_sample_with_every_adapter(sampling, adapter, greedy):
    with ssmlx.Engine(str(sampling), (str(adapter),), dtype="float32") as engine:
        for name in ("none", str(adapter)):

            def ask(name=name, **settings):
                told = engine.stream(PROMPT, adapter=name, max_tokens=LENGTH, **settings)
                return real.tokens_of(told)

            assert len(answers_of(ask)) > 1
            assert len(answers_of(lambda: ask(temp=0))) == 1
        session = engine.chat(adapter="none", max_tokens=LENGTH)

        def talk():
            session.reset()
            return real.tokens_of(session.reply("w1 w2"))

        assert len(answers_of(talk)) > 1
        assert session.compare().same_tokens  # of one seed
        session.config = GenerateConfig(max_tokens=LENGTH, temp=0)
        assert len(answers_of(talk)) == 1


@pytest.fixture(scope="module")
def engine(sampling):
    with ssmlx.Engine(str(sampling), dtype="float32") as engine:
        yield engine


def client_with(engine, **settings):
    config = GenerateConfig(max_tokens=LENGTH, **settings)
    return client_of(make_app(RequestHandler(engine, {"m": None}), config))


def test_a_server_follows_it_field_by_field(engine):
    client = client_with(engine)

    def ask(client=client, **fields):
        return said(reply(client, chat(**fields)))

    def complete():
        return said(reply(client, {"prompt": "w1 w2"}, COMPLETIONS))

    assert len({ask() for _ in range(5)}) > 1 and len({complete() for _ in range(5)}) > 1
    assert len({ask(top_p=0.9) for _ in range(5)}) > 1
    expected = {ask(temperature=0)}
    for fields in ({"temperature": 0}, {"top_k": 1}, {"temperature": 0, "top_p": 0.9}):
        assert {ask(**fields) for _ in range(3)} == expected
    assert ask(seed=7) == ask(seed=7, temperature=1.0, top_p=0.95)
    assert ask(seed=7, temperature=0.5) == ask(seed=7, temperature=0.5, top_p=0.95)
    for settings in ({"temp": 0}, {"temp": 0, "top_p": 0}):
        other = client_with(engine, **settings)
        assert {ask(other) for _ in range(3)} == expected
        assert len({ask(other, temperature=1) for _ in range(5)}) > 1
    body = {"model": "m", "max_tokens": LENGTH, "messages": chat()["messages"]}
    told = [client.post("/v1/messages", json=body).json()["content"] for _ in range(5)]
    assert len({json.dumps(one) for one in told}) > 1
    assert client.post(CHAT, json=chat(temperature="hot")).status_code == 400


def parsed(command, *words):
    needed = ["--prompt", "w1"] if command is generate else []
    return generate_config(command.parse_args([*needed, *words]))


@pytest.mark.parametrize("command", [generate, chat_command, server])
def test_options_leave_it_to_the_model_or_do_not(command):
    own = ModelSampling(temp=0.6, top_p=0.95)
    assert parsed(command).numbers(own) == own
    assert parsed(command, "--generation-config", "auto").numbers(own) == own
    assert parsed(command, "--top-p", "0.5").numbers(own) == ModelSampling(temp=0.6, top_p=0.5)
    assert parsed(command, "--temp", "0").temp == 0
    alone = parsed(command, "--generation-config", "none")
    assert alone.numbers(own) == ModelSampling()
    hot = parsed(command, "--generation-config", "none", "--temp", "2")
    assert hot.numbers(own) == ModelSampling(temp=2.0)


def run(capsys, command, folder, *args):
    usual = ("--model", folder, "--dtype", "float32", *args)
    return refusals.exit_code(command.main, *usual), *capsys.readouterr()


def test_generate_says_which_sampling_it_uses(capsys, sampling, base):
    ask = ("--prompt", "w1 w2", "--max-tokens", LENGTH)
    for more in ((), ("--jsonl",), ("--verbose",)):
        code, _, err = run(capsys, generate, sampling, *ask, *more)
        assert code == 0 and err.count(THE_MODELS) == 1
        (line,) = [line for line in err.splitlines() if THE_MODELS in line]
        assert mentions(line, *SAMPLED)
    texts = set()
    for more in (("--temp", 0), ("--generation-config", "none")):
        code, out, err = run(capsys, generate, sampling, *ask, *more)
        assert code == 0 and THE_MODELS in err and not mentions(err, "0.95")
        texts.add(out)
    code, out, err = run(capsys, generate, base, *ask)
    assert texts == {out} and THE_MODELS not in err
    # An option of chance does nothing where decoding turns out to be greedy.
    asked = ("--model", base, "--dtype", "float32", *ask, "--top-p", "0.5")
    assert mentions(found_in(exits(capsys, generate.main, *asked)), "--top-p")
    assert run(capsys, generate, sampling, *ask, "--top-p", "0.5")[0] == 0


def test_chat_and_check_say_which_sampling_is_used(capsys, sampling, base, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", (tmp_path / "empty").open("w+"))
    code, _, err = run(capsys, chat_command, sampling, "--decoding", "plain")
    assert code == 0 and err.count(THE_MODELS) == 1 and mentions(err, *SAMPLED)
    raw = write(real.write_base(tmp_path / "raw"), {})
    (raw / "chat_template.jinja").unlink()
    code, _, err = run(capsys, chat_command, raw, "--decoding", "plain")
    assert code == 0 and mentions(err, "chat template") and THE_MODELS not in err
    _, out, _ = run(capsys, check, sampling, "--seconds", "0.01")
    assert mentions(next(line for line in out.splitlines() if THE_MODELS in line), *SAMPLED)
    _, out, _ = run(capsys, check, base, "--seconds", "0.01")
    assert THE_MODELS not in out


def test_what_a_line_says_of_mixed_sources():
    """What was asked for stands before what the file asks for."""
    own = ModelSampling(temp=0.6, top_k=20)
    asked, models = sampling_line(GenerateConfig(temp=0.9), own).split("top-k")
    assert mentions(asked, "0.9") and mentions(models, "20", THE_MODELS)
    line = sampling_line(GenerateConfig(temp=0.9, top_k=0), own)
    assert mentions(line, "0.9") and THE_MODELS not in line


def test_what_compares_tokens_or_measures_is_greedy_by_itself():
    own = ModelSampling(temp=1.0, top_p=0.9, top_k=5)
    systems = parse_systems_with_baselines(["streams", "trees"], SamplingConfig(temp=0))
    configs = [*(one.config for one in systems), adapt_check._PLAIN, adapt_check._DRAFTED]
    assert {one.numbers(own).temp for one in (*configs, adapt_check._LOOKUP)} == {0}
    (sampled, *_) = parse_systems_with_baselines([], SamplingConfig(temp=0.7, top_k=3))
    assert sampled.config.numbers(own) == ModelSampling(temp=0.7, top_k=3)


@pytest.fixture(scope="module")
def penalising(tmp_path_factory):
    """A model, and its tokenizer, whose file asks for a penalty too, as Qwen2.5's do."""
    folder = real.write_base(tmp_path_factory.mktemp("penalising") / "base")
    return ssmlx.load(str(write(folder, {**ASKED, "repetition_penalty": 1.8})), dtype="float32")


def test_a_repetition_penalty_goes_with_the_models_sampling(penalising, greedy):
    def ask(**settings):
        return [*real.answer(*penalising, PROMPT, max_tokens=24, **settings)[0]]

    seeded = {"seed": 3, "decoding": "plain"}
    followed = ask(**seeded)
    assert followed == ask(repetition_penalty=1.8, **seeded) != ask(repetition_penalty=1, **seeded)
    assert followed == ask(seed=3, drafter="prompt-lookup")
    assert ask(temp=0)[:LENGTH] == greedy
    assert ask(temp=0, repetition_penalty=1.8) != ask(temp=0)


def test_a_line_names_the_penalty():
    own = ModelSampling(temp=0.7, repetition_penalty=1.05)
    assert mentions(sampling_line(GenerateConfig(), own), "0.7", "1.05", THE_MODELS)
    asked, models = sampling_line(GenerateConfig(repetition_penalty=1.2), own).split("0.7")
    assert mentions(asked, "penalty", "1.2") and mentions(models, THE_MODELS)
    assert "penalty" not in sampling_line(GenerateConfig(repetition_penalty=1), own)
    assert not mentions(sampling_line(GenerateConfig(temp=0), own), "0.7")


def test_a_penalty_that_changes_nothing_costs_nothing():
    assert SamplingConfig(repetition_penalty=1, presence_penalty=0).context_size == 0
    assert SamplingConfig().following(ModelSampling(temp=1.0)).context_size == 0
    assert SamplingConfig(repetition_penalty=1.2).context_size == 20
