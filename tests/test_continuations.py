"""A model's own answers: batched, resumed, refused."""

import json
import shutil
from contextlib import closing

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from refusals import exits, found_in, mentions, refusal

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tiny_torch import greedy, make_model, make_tokenizer

from convert import continuations
from convert.__main__ import main as convert
from convert.continuations import Sampling, encode_prompts, generate_batch
from ssmlx.prompts import as_messages, encode_with_template, read_prompts
from ssmlx.settings import StreamConfig
from ssmlx.training.part_file import PartFile

PROMPTS = [
    {"prompt": "w1 w2 w3"},
    {"prompt": "w4"},
    {"messages": [{"role": "system", "content": "w9 w8"}, {"role": "user", "content": "w5 w6"}]},
    {"prompt": "w7 w7 w7 w7 w7"},
    {"prompt": "w3 w2"},
    {"prompt": "w30 w31 w32 w1"},
    {"prompt": "w11"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def command(folder, prompts, out, **changes):
    options = {"batch-size": 3, "dtype": "float32", "device": "cpu", "max-tokens": 9, **changes}
    argv = ["--prompts", str(prompts), "--out", str(out), "--model", str(folder)]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return argv


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_say_what_one_prompt_after_the_other_says(folder, prompts, tmp_path, batch_size):
    out = tmp_path / "out.jsonl"
    argv = command(folder, prompts, out, **{"batch-size": batch_size})
    assert continuations.main(argv) == 0
    model = make_model()
    tokenizer = make_tokenizer()
    reasons = set()
    rows = read(out)
    assert len(rows) == len(PROMPTS)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        tokens = tokenizer.apply_chat_template(
            as_messages(prompt), add_generation_prompt=True, return_dict=False
        )
        answer = greedy(model, list(tokens), 9, {2})
        reasons.add(row["finish_reason"])
        assert row == {
            **prompt,
            "completion": tokenizer.decode(answer, skip_special_tokens=True),
            "prompt_tokens": tokens,
            "completion_tokens": answer,
            "finish_reason": "stop" if answer[-1] == 2 else "length",
        }
    assert reasons == {"stop", "length"}  # else the model tests one of the two only
    assert not out.with_name("out.jsonl.part").exists()


def checkpoint_of(model, folder, **settings):
    """A trained-looking checkpoint; returns the reference that it was written from."""
    from convert.reference.checkpoint import save_reference
    from convert.reference.format import LoraSettings
    from convert.reference.model import StreamFusedReference

    config = StreamConfig(num_streams=1, num_msa_layers=1, num_layers=2, hidden_size=32, **settings)
    reference = StreamFusedReference(model, config, lora=LoraSettings(2)).eval()
    torch.manual_seed(3)
    for adapter in reference.adapters.values():
        torch.nn.init.normal_(adapter.adapter.lora_B.weight, std=1.0)
    save_reference(reference, folder)
    return reference


def test_a_fine_tuned_model_answers_under_its_own_template(folder, tmp_path):
    template = "w9 {prompt} :"
    lora = tmp_path / "lora"
    reference = checkpoint_of(make_model(), lora, prompt_template=template)
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    texts = ["w1 w2 w3", "w4", "w7 w7", "w4", "w30"]
    prompts.write_text("".join(json.dumps({"prompt": t, "completion": "-"}) + "\n" for t in texts))
    assert continuations.main([*command(folder, prompts, out), "--lora", str(lora)]) == 0
    rows = read(out)
    words = make_tokenizer()
    plain = make_model()
    assert [row["prompt"] for row in rows] == ["w1 w2 w3", "w4", "w7 w7", "w30"]  # each once
    for row in rows:
        tokens = words.encode(template.replace("{prompt}", row["prompt"]))
        assert row["prompt_tokens"] == tokens
        assert row["completion_tokens"] == greedy(reference.base, tokens, 9, {2})
    assert any(
        row["completion_tokens"] != greedy(plain, row["prompt_tokens"], 9, {2}) for row in rows
    )


def test_lora_as_peft_writes_it_gives_pefts_answers(folder, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", lambda *_: None)
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_dora=True
    )
    tuned = peft.get_peft_model(make_model(), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1.0)
    tuned.save_pretrained(str(tmp_path / "lora"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in ["w1 w2", "w4", "w30"]))
    out = tmp_path / "out.jsonl"
    lora = str(tmp_path / "lora")
    assert continuations.main([*command(folder, prompts, out), "--lora", lora]) == 0
    merged = tuned.merge_and_unload().eval()
    for row in read(out):
        expected = greedy(merged, row["prompt_tokens"], 9, {2})
        assert row["completion_tokens"] == expected
        assert expected != greedy(make_model(), row["prompt_tokens"], 9, {2})


def test_lora_as_mlx_lm_writes_it_gives_the_same_answers(folder, tmp_path, capsys):
    lora = tmp_path / "lora"
    converted = tmp_path / "converted"
    checkpoint_of(make_model(), lora, prompt_template="w9 {prompt} :")
    assert convert(["--base", str(folder), "--lora", str(lora), "--out", str(converted)]) == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in ["w1 w2", "w4", "w30"]))

    def answers(source):
        out = tmp_path / "out.jsonl"
        assert continuations.main([*command(folder, prompts, out), "--lora", str(source)]) == 0
        return read(out)

    expected = answers(lora)
    assert answers(converted) == expected
    (converted / "streams_config.json").unlink()  # mlx-lm's own folders have none
    plain_template = answers(converted)
    words = make_tokenizer()
    assert [row["prompt"] for row in plain_template] == [row["prompt"] for row in expected]
    for row in plain_template:
        turn = [{"role": "user", "content": row["prompt"]}]
        text = words.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        assert row["prompt_tokens"] == words.encode(text, add_special_tokens=False)
    settings = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**{**settings, "hidden_size": 48})
    ).save_pretrained(other)
    make_tokenizer().save_pretrained(other)
    options = [*command(other, prompts, tmp_path / "no.jsonl"), "--lora", str(converted)]
    exits(capsys, continuations.main, *options)


def test_a_checkpoint_that_does_not_change_the_answers_is_refused(
    folder, prompts, tmp_path, capsys
):
    lora = tmp_path / "lora"
    out = tmp_path / "out.jsonl"
    checkpoint_of(make_model(), lora, adapter_scope="streams")
    options = [*command(folder, prompts, out), "--lora", str(lora)]
    assert "streams" in found_in(exits(capsys, continuations.main, *options))
    assert not out.exists()


def test_turns_are_asked_as_decoding_asks_them(folder, prompts, tmp_path):
    lora = tmp_path / "lora"
    out = tmp_path / "out.jsonl"
    template = "{prompt} :"
    checkpoint_of(make_model(), lora, prompt_template=template)
    assert continuations.main([*command(folder, prompts, out), "--lora", str(lora)]) == 0
    words = TokenizerWrapper(make_tokenizer())
    for row in map(json.loads, out.read_text().splitlines()):
        assert row["prompt_tokens"] == encode_with_template(row, words, template)


def test_sampling_answers_a_prompt_as_often_as_it_is_asked(folder, tmp_path):
    # a folder to make
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "own" / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "w1 w2"}) + "\n" + json.dumps({"prompt": "w1 w2"}))
    assert continuations.main(command(folder, prompts, out, temp=1.0, seed=1)) == 0
    assert len(read(out)) == 2
    argv = command(folder, prompts, out, temp=1.0, count=3)
    assert continuations.main([*argv, "--prompts", str(prompts), str(prompts)]) == 0
    assert len(read(out)) == 3
    assert continuations.main(command(folder, prompts, out)) == 0
    assert len(read(out)) == 1


@pytest.mark.parametrize("temp", [0, 0.8])
def test_a_killed_run_goes_on_and_gives_the_same_file(folder, prompts, tmp_path, monkeypatch, temp):
    whole = tmp_path / "whole.jsonl"
    out = tmp_path / "out.jsonl"
    assert continuations.main(command(folder, prompts, whole, temp=temp, seed=3)) == 0
    ran = []
    real = generate_batch

    def dies_on_the_last(model, batch, sampling, stop, number):
        if number == 2:
            raise KeyboardInterrupt
        return real(model, batch, sampling, stop, number)

    def counts(model, batch, sampling, stop, number):
        ran.append(number)
        return real(model, batch, sampling, stop, number)

    argv = command(folder, prompts, out, temp=temp, seed=3)
    monkeypatch.setattr(continuations, "generate_batch", dies_on_the_last)
    assert continuations.main(argv) == 130
    part = out.with_name("out.jsonl.part")
    assert not out.exists()
    part.write_bytes(part.read_bytes()[:-5])  # as if killed while writing the second batch
    monkeypatch.setattr(continuations, "generate_batch", counts)
    assert continuations.main(argv) == 0
    assert ran == [1, 2]
    assert out.read_bytes() == whole.read_bytes()
    assert not part.exists()


@pytest.mark.parametrize(("change", "named"), [
    ({"max-tokens": 8}, "max_tokens"), ({"batch-size": 2}, "batch_size"), ({"seed": 1}, "seed"),
    ({}, "model"), ({}, "prompts"),
])  # fmt: skip
def test_a_part_of_another_command_is_refused(
    folder, prompts, tmp_path, monkeypatch, capsys, change, named
):
    out = tmp_path / "out.jsonl"
    mine = tmp_path / "model"
    mine.symlink_to(folder)

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(continuations, "generate_batch", dies)
    assert continuations.main(command(mine, prompts, out)) == 130
    capsys.readouterr()
    if not change:
        mine.unlink()
        shutil.copytree(folder, mine)
    if named == "model":
        make_model(seed=1).save_pretrained(mine)
    elif named == "prompts":  # as tokens, which the template makes
        (mine / "chat_template.jinja").write_text("{{ messages[0]['content'] }} w9")
    assert continuations.main(command(mine, prompts, out, **change)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "out.jsonl.part" in last and mentions(found_in(last), named)


def test_a_part_of_other_prompts_or_of_something_else_is_refused(tmp_path):
    part = tmp_path / "x.part"
    PartFile(part, {"prompts": "a"}).close()
    assert mentions(refusal(PartFile, part, {"prompts": "b"}), str(part), "prompts")
    with closing(PartFile(part, {"prompts": "a"})) as held:
        held.append([1])
        assert str(part) in refusal(PartFile, part, {"prompts": "a"}, fresh=True)
        assert part.read_text().endswith("[1]\n")
    with closing(PartFile(part, {"prompts": "b"}, fresh=True)) as own:
        assert own.done == []
    part.write_text("no JSON\n")
    assert str(part) in refusal(PartFile, part, {"prompts": "a"})


@pytest.mark.parametrize(("text", "named"), [
    ('{"prompt": "w1"}\n\n{"prompt": \n', "3"),
    ('{"prompt": "w1", "messages": []}\n', "1 prompt messages"),
    ('{"prompt": 3}\n', "1 3 prompt"),
    ('{"messages": []}\n', "1 messages"),
    ('{"messages": [{"role": "assistant", "content": "w1"}]}\n', "1 messages"),
    ('{"prompt": "w1"}\n{"prompt": "' + "w2 " * 60 + '"}\n', "2 67"),
])  # fmt: skip
def test_bad_prompts_are_one_line(folder, tmp_path, capsys, text, named):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    assert continuations.main(command(folder, prompts, tmp_path / "out.jsonl")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert mentions(last.replace(str(prompts), ""), "ssmlx.convert.continuations", *named.split())
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_prompt_that_the_template_refuses_is_named():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].content == 'w4' %}{{ raise_exception('w4') }}{% endif %}<s> "
        "{{ messages[0].content }}"
    )
    asked = (PROMPTS, TokenizerWrapper(tokenizer), 64)
    assert mentions(refusal(encode_prompts, *asked), "2", "w4")


@pytest.mark.parametrize("changes", [
    {"max-tokens": 0}, {"max-tokens": 64}, {"temp": -1}, {"temp": "nan"}, {"batch-size": 0},
    {"seed": -1}, {"count": -1}, {"device": "cuda"},
], ids=str)  # fmt: skip
def test_bad_options_are_one_line(folder, prompts, tmp_path, capsys, changes):
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is one")
    argv = command(folder, prompts, tmp_path / "out.jsonl", **changes)
    assert continuations.main(argv) == 2
    ((option, value),) = changes.items()
    last = capsys.readouterr().err.splitlines()[-1]
    assert mentions(found_in(last), f"--{option}", str(value))


def test_missing_prompts_and_unwritable_output_are_one_line(
    folder, prompts, tmp_path, capsys, monkeypatch
):
    argv = command(folder, tmp_path / "nothing.jsonl", tmp_path / "out.jsonl")
    assert continuations.main(argv) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(continuations, "load_answering_model", None)  # told before it
    for out, place in ((tmp_path / "file" / "out.jsonl", tmp_path / "file"), (tmp_path, tmp_path)):
        line = exits(capsys, continuations.main, *command(folder, prompts, out))
        assert mentions(line, str(place))


def test_examples_of_chats_are_answered_anew(tmp_path):
    turns = [{"role": role, "content": "w1"} for role in ("system", "user", "assistant")]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (turns, turns[:2])))
    assert read_prompts(path) == [{"messages": turns[:2]}] * 2


def test_top_p_keeps_the_likeliest_tokens():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(400, -1)
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in ((0.1, {0}), (0.7, {0, 1}), (1.0, {0, 1, 2, 3})):
        sampling = Sampling(temp=1.0, top_p=top_p)
        assert set(continuations.choose_tokens(logits, sampling, generator).tolist()) == kept


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_is_sdpa(masked):
    torch.manual_seed(0)
    query = torch.randn(2, 6, 1, 8)
    key, value = torch.randn(2, 2, 2, 5, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5]).bool()[:, None, None] if masked else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    found, _ = continuations.grouped_attention(None, query, key, value, mask)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    if mask is not None:
        additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        found, _ = continuations.grouped_attention(None, query, key, value, additive)
        torch.testing.assert_close(found, expected.transpose(1, 2))
