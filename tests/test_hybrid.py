"""perf.hybrid: a small hybrid with a multi-token prediction head, trained and measured."""

import json

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from refusals import exits, mentions, refusal
from tiny import assert_close
from transformers import Qwen3_5ForCausalLM

from perf.hybrid import learn, measure, train
from perf.hybrid.figures import (
    accepted_share_by_level,
    count_accepted,
    count_bytes_to_go_back,
    cut_held_out_prompts,
    load_torch_model,
    replayed_tokens_per_call,
)
from perf.hybrid.head import Head, draft_chains, mask_of_stacked_steps
from perf.hybrid.learn import Run, Sampler, Sizes, make_config, save_checkpoint
from perf.hybrid.schedule import Schedule
from perf.hybrid.text import END, MARKDOWN, PYTHON, Source, is_held_out, read_sources
from perf.run.timing import TimedAnswer, TimedCall
from ssmlx.model.recurrent import hook_recurrences, recording

SIZES = Sizes(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
TOKENS = [(7 * place * place + 3) % SIZES.vocab_size for place in range(20)]


def random_modules():
    """A random model and head, norms included."""
    torch.manual_seed(1)
    model = Qwen3_5ForCausalLM(make_config(SIZES)).eval()
    head = Head(model.config).eval()
    with torch.no_grad():
        for module in (model, head):
            for one in module.parameters():
                one += 0.2 * torch.randn_like(one)
    return model, head


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of random numbers."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(*random_modules(), folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two tasks, and a document."""
    folder = tmp_path_factory.mktemp("data")
    for task in ("add", "count"):
        (folder / task).mkdir()
        for part in ("train", "test"):
            rows = [{"prompt": f"{part} {n} and {n}", "completion": f"{2 * n}"} for n in range(90)]
            lines = "\n".join(map(json.dumps, rows))
            (folder / task / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "notes.md").write_text("A document of a few words. " * 40, encoding="utf-8")
    return folder


def test_a_step_sees_the_first_steps_rows_and_its_own():
    drawn = ["100 000 000", "110 000 000", "111 000 000"]
    drawn += ["100 100 000", "110 010 000", "111 001 000"]
    drawn += ["100 100 100", "110 010 010", "111 001 001"]
    expected = [[mark == "1" for mark in line if mark != " "] for line in drawn]
    assert mask_of_stacked_steps(3, 3).tolist() == expected


def test_chains_are_those_of_one_step_after_the_other():
    """Each chain drafted alone, row by row behind the pairs of the text before it."""
    model, head = random_modules()
    text = torch.tensor([TOKENS])
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        hidden = model.model(text, use_cache=False).last_hidden_state
        chains = draft_chains(model, head, text, hidden, 3)
        for root in range(1, len(TOKENS)):
            rows = head.join_and_project(
                F.embedding(text[:, 1 : root + 1], table), hidden[:, :root]
            )
            drafted = []
            for _ in range(3):
                length = rows.shape[1]
                causal = torch.ones(length, length, dtype=torch.bool).tril()
                output = head(rows, model.model.rotary_emb, torch.arange(length), causal)[:, -1:]
                token = F.linear(output, table).argmax(dim=-1)
                drafted.append(int(token))
                rows = torch.cat(
                    [rows, head.join_and_project(F.embedding(token, table), output)], dim=1
                )
            assert chains[root - 1].tolist() == drafted
    assert len({*chains.flatten().tolist()}) > 5


def test_mlx_lm_loads_the_folder_and_computes_what_transformers_does(folder):
    model, _ = load_model(folder)
    assert not [name for name, _ in tree_flatten(model.parameters()) if "mtp" in name]
    reference, head = load_torch_model(folder)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS]), use_cache=False).logits
    assert_close(model(mx.array([TOKENS])), mx.array(expected.numpy()), 1e-4)
    saved = dict(random_modules()[1].named_parameters())
    assert all(bool((one == saved[name]).all()) for name, one in head.named_parameters())
    names = [name for name in mx.load(str(folder / "model.safetensors")) if "mtp" in name]
    assert "mtp.layers.0.self_attn.q_proj.weight" in names and len(names) == len(saved)


def test_bytes_are_those_that_a_call_records(folder):
    model, _ = load_model(folder)
    hook_recurrences(model)
    cache = model.make_cache()
    with recording() as recorded:
        model(mx.array([TOKENS[:5]]), cache=cache)
    states = sum(one.state.nbytes for one in recorded.recurrences)
    inputs = sum(one.nbytes for one in recorded.convolutions)
    for one in recorded.recurrences:
        inputs += sum(one._arguments[name].nbytes for name in one._signature.by_row)
    config = make_config(SIZES).to_dict()
    assert count_bytes_to_go_back(config, 5, 4) == {"states": states, "inputs": inputs}
    assert len(recorded.recurrences) == 3


def test_whole_files_and_packages_are_held_out(data):
    sources = {source.name: source for source in read_sources(data, data)}
    assert [*sources] == ["add", "count", MARKDOWN, PYTHON]
    assert sources["add"].train[3] == "train 3 and 3\n6\n"
    assert sources["add"].held_out[3] == "test 3 and 3\n6\n"
    for source in sources.values():
        assert not {*source.train} & {*source.held_out}
    python = sources[PYTHON]
    assert len(python.train) > 2 * len(python.held_out) > 50
    assert 0 < sum(map(is_held_out, map(str, range(120)))) < 30


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (None, "train.jsonl test.jsonl"),
        ("{", "train.jsonl 1"),
        ('{"prompt": "a"}', "train.jsonl 1 prompt"),
    ],
    ids=["nothing", "no JSON", "no completion"],
)
def test_broken_data_is_one_line(tmp_path, capsys, line, named):
    if line is not None:
        (tmp_path / "task").mkdir()
        for part in ("train", "test"):
            (tmp_path / "task" / f"{part}.jsonl").write_text(line, encoding="utf-8")
    assert mentions(refusal(read_sources, tmp_path, tmp_path), *named.split())
    assert train.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_run_is_one_line(data, tmp_path, capsys):
    argv = ["--data", str(data), "--documents", str(data)]
    line = exits(capsys, measure.main, *argv, "--model", tmp_path)
    assert mentions(line, str(tmp_path), "config.json", "model.safetensors")
    line = exits(capsys, train.main, *argv, "--out", tmp_path, "--minutes", "0")
    assert mentions(line, "--minutes", "0")
    schedule = Schedule(length=64)
    streams = {"short": np.zeros(64, np.int32)}
    refusal(Sampler, streams, {}, schedule.length)  # no text is long enough
    run = Run(SIZES, schedule, Sampler({"one": np.zeros(65, np.int32)}, {}, schedule.length))
    for content in (b"", b"no tensors"):
        (tmp_path / learn.STATE).write_bytes(content)
        assert "training.pt" in refusal(run.load_if_saved, tmp_path)


def test_prompts_lie_evenly_over_what_is_held_out():
    words = ["alpha", "beta", "gamma", "delta"]
    sources = [Source(word, [word * 50], [f"{word} {n}" for n in range(90)]) for word in words]
    tokenizer = learn.train_tokenizer(sources, 280)
    prompts = cut_held_out_prompts(tokenizer, [*sources, Source("short", [], ["x"])], 6, 12)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert [len(prompt) for prompt in prompts] == [12] * 6
    for text, word in zip(texts, [*words, *words[:2]], strict=True):
        assert word[1:] in text.replace(END, " ") or word in text
    assert texts[0] != texts[4]


def test_acceptance_is_counted_by_level():
    calls = [TimedCall(rows, tokens, 0, 0.1, "mtp") for rows, tokens in ((3, 3), (3, 2), (2, 1))]
    calls.append(TimedCall(1, 1, 0, 0.1))
    assert accepted_share_by_level([TimedAnswer([], 5, 1.0, calls=calls)]) == [2 / 3, 1 / 2]
    assert accepted_share_by_level([TimedAnswer([], 1, 1.0)]) == []


def test_replayed_calls_are_those_of_a_walk():
    text = [5, 6, 7, 8, 9, 10, 11]
    chains = torch.tensor([[7, 8], [8, 0], [0, 0], [10, 11], [0, 0], [0, 0]])
    accepted = count_accepted(text, chains, 1)
    assert accepted == [2, 1, 0, 2]
    assert replayed_tokens_per_call([accepted], 2) == (3 + 3) / 2
    assert replayed_tokens_per_call([accepted], 1) == (2 + 1 + 2) / 3


@pytest.mark.slow
def test_model_and_head_learn(data):
    tokenizer, streams = learn.load_tokens(data, data, data, SIZES.vocab_size)
    assert tokenizer.get_vocab_size() == SIZES.vocab_size
    schedule = Schedule(minutes=10.0, batch=4, length=64, warm_up=5)
    tasks = {name: streams[name] for name in ("add", "count")}
    run = Run(SIZES, schedule, Sampler(tasks, learn.WEIGHTS, schedule.length))
    losses = [run.learn_from_one_batch() for _ in range(40)]
    assert all(after < before - 0.5 for before, after in zip(losses[0], losses[-1], strict=True))


@pytest.mark.slow
def test_a_run_goes_on_and_its_model_is_measured(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learn, "Sizes", lambda: SIZES)
    out = tmp_path / "model"
    argv = ["--data", str(data), "--documents", str(data), "--out", str(out), "--batch", "2"]
    saved = []
    for minutes in ("0.03", "0.06"):
        assert train.main([*argv, "--minutes", minutes]) == 0
        saved.append(torch.load(out / learn.STATE, weights_only=True))
    first, second = saved
    assert second["steps"] > first["steps"] > 0 and second["seconds"] > first["seconds"]
    table = "model.embed_tokens.weight"
    assert not bool((first["model"][table] == second["model"][table]).all())
    _, head = load_torch_model(out)
    assert bool((head.fc.weight == second["head"]["fc.weight"]).all())
    capsys.readouterr()
    measured = ["--data", str(data), "--documents", str(data), "--model", str(out)]
    measured += ["--out", str(tmp_path), "--count", "4", "--prompt-tokens", "20"]
    assert measure.main([*measured, "--max-tokens", "32"]) == 0
    result = json.loads((tmp_path / "hybrid.json").read_text())
    assert result["difference"] < 1e-4
    assert {row["same_as_plain"] for row in result["systems"]} == {4}
    assert result["times"]["calls"] > 3 and len(result["times"]["alone"]) == 5
    assert "`mtp tokens=4`" in capsys.readouterr().out
