"""The trainer of draft models: what it trains, writes and refuses, and how its model drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ssmlx

import mlx.core as mx  # isort: skip
import mlx_lm
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from real import (
    LAYERS,
    VOCAB,
    answer,
    kill_once_there,
    one_line,
    words,
    write_base,
    write_nested_base,
    write_tokenizer,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file
from test_reference import make_base
from torch.nn import functional as F

from convert.base import load_base
from convert.train import main as train_streams
from convert.train_draft import MODEL_FOLDER, PROG, STATE_FILE, main
from convert.training.draft import (
    DraftObjective,
    build_draft,
    chain_calls,
    trained_weights,
    write_draft,
)
from convert.training.run import TorchTrainer, freeze_base
from ssmlx.loading.load import load_weights
from ssmlx.settings import DraftModelConfig, StreamConfig
from ssmlx.training.batches import BatchPlan, collate
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Example
from ssmlx.training.record import LOG_FILE, read_record

KEPT = 2
SMALL = (
    "--layers", str(KEPT), "--batch-size", "8", "--device", "cpu", "--dtype", "float32",
    "--template", "{prompt}", "--valid-count", "16", "--save-every", "3", "--valid-every", "50",
    "--learning-rate", "0.01",
)  # fmt: skip
PROMPTS = [words(1 + i % 3, first=3 * i) for i in range(16)]
UNSEEN = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("draft") / "base")


@pytest.fixture(scope="module")
def data(base, tmp_path_factory):
    """Prompts and the base model's own greedy answers; held out are those and four more."""
    folder = tmp_path_factory.mktemp("data")
    model, tokenizer = ssmlx.load(str(base), dtype="float32")
    lines = []
    for prompt in map(tokenizer.encode, PROMPTS):
        tokens, _ = answer(model, tokenizer, prompt, decoding="plain", max_tokens=10)
        lines.append({"prompt_tokens": prompt, "completion_tokens": tokens})
    for name, own in (("train", lines[:-UNSEEN]), ("valid", lines)):
        text = "".join(json.dumps(line) + "\n" for line in own)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def argv(base, data, out, *more):
    return ["--model", str(base), "--data", str(data), "--out", str(out), *SMALL, *more]


def random_examples(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 5)), int(rng.integers(2, 9))) for _ in range(count)]
    return [Example(rng.integers(0, VOCAB, p + a).astype(np.int32), p) for p, a in sizes]


def make_objective(base, num_layers=KEPT, dtype=torch.float32):
    train = TrainConfig(num_streams=0, num_msa_layers=num_layers, prune_rank=0, learning_rate=0.01)
    sizes = json.loads((base / "config.json").read_text())
    config = StreamConfig(
        num_streams=0,
        num_msa_layers=num_layers,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
    )
    model = build_draft(base, config, num_layers)
    freeze_base(model, dtype)
    return DraftObjective(model, train, None, torch.device("cpu"), dtype)


def take_steps(objective, count=4):
    run, plan = TorchTrainer(objective, 20), BatchPlan(random_examples(16), 8, 0)
    for step in range(count):
        run.advance(plan.batch(step), objective.lower(plan.batch(step)))
    return run


# What is trained ----------------------------------------------------------------------------


def test_a_batch_costs_what_each_example_costs(base):
    """Padded and bucketed, the loss is that of the first layers run by transformers."""
    objective, examples = make_objective(base), random_examples(5)
    batch = collate(examples, np.arange(5))
    with torch.no_grad():
        total, parts = objective.loss(batch, objective.lower(batch), 0)
    losses = []
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long()
        with torch.no_grad():
            logits = objective.model.base(tokens[None]).logits[0]
        span = slice(example.start - 1, -1)
        losses += F.cross_entropy(logits[span], tokens[example.start :], reduction="none").tolist()
    assert len(objective.model.base.model.layers) == KEPT
    assert list(parts) == ["main_loss"]
    assert float(total) == pytest.approx(np.mean(losses), rel=1e-4)
    assert parts["main_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_layers_and_norm_learn_and_nothing_else_does(base):
    objective, before = make_objective(base), load_base(base).state_dict()
    run = take_steps(objective)
    moved = {
        name
        for name, parameter in objective.model.base.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    first = tuple(f"model.layers.{n}." for n in range(KEPT))
    assert moved == {n for n in before if n.startswith(first)} | {"model.norm.weight"}
    assert moved == {name.removeprefix("base.") for name in run.named}


def test_bfloat16_holds_what_is_trained_in_float32(base):
    fine, rough = (make_objective(base, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {p.dtype for p in take_steps(rough, 1).named.values()} == {torch.float32}
    frozen = {p.dtype for p in rough.model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    rough = make_objective(base, dtype=torch.bfloat16)
    batch = collate(random_examples(5), np.arange(5))
    exact = fine.parts(batch, fine.lower(batch))["main_loss"]
    found = rough.parts(batch, rough.lower(batch))["main_loss"]
    assert found == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("agrees", "length", "calls"),
    [
        ([0], 3, 1),
        (
            [1, 1, 1, 1, 1],
            3,
            2,
        ),  # the prompt's call gives one token, the next one three and its own
        ([1, 1, 1, 1, 1, 1], 3, 3),
        ([1, 0, 0, 0], 3, 4),
        ([0, 1, 0, 1, 1, 0], 3, 3),
        ([1, 1, 1, 1, 1], 1, 3),
        ([1, 1, 1, 1], 9, 2),
    ],
)
def test_calls_of_a_chain(agrees, length, calls):
    assert chain_calls(np.array(agrees, bool), length) == calls


# What is written ----------------------------------------------------------------------------


def tied(folder):
    """A base whose LM head is its embedding."""
    _, config = load_model(write_base(folder))
    config |= {"tie_word_embeddings": True}
    save_config(config, folder / "config.json")
    weights = {
        n: w for n, w in mx.load(str(folder / "model.safetensors")).items() if "lm_" not in n
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def packed(folder):
    """A tied base in 4 bits, as mlx-lm writes it."""
    model, config = load_model(tied(folder))
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def of_transformers(architecture, **changes):
    def write(folder):
        model = make_base(architecture, vocab=VOCAB, **changes)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return write


BASES = {
    "untied": write_base,
    "tied": tied,
    "packed": packed,
    "layer types": of_transformers("Qwen2"),
    "another norm": of_transformers("Phi", partial_rotary_factor=0.5),
    "learned positions": of_transformers("OPT", ffn_dim=48, word_embed_proj_dim=32),
}


@pytest.mark.parametrize("kind", BASES)
def test_what_is_written_is_what_was_trained(kind, tmp_path):
    """By transformers, by mlx-lm and by ssmlx's loader: the same logits, frozen parts as before."""
    base, out = BASES[kind](tmp_path / "base"), tmp_path / "model"
    objective = make_objective(base)
    run = take_steps(objective)
    assert any("norm" in name and "layers" not in name for name in run.named)
    write_draft(trained_weights(objective.model), base, KEPT, out)
    tokens = torch.arange(9)[None] + 7
    with torch.no_grad():
        expected = objective.model(tokens, stream_rows=tokens[0, :0]).main_logits
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
        assert torch.allclose(loaded.float()(tokens).logits, expected, atol=1e-5)
    models = [load_weights(out, "stored", "")[0]]
    if kind in ("untied", "tied", "packed"):
        models.append(mlx_lm.load(str(out))[0])
    for model in models:
        found = np.array(model(mx.array(tokens.numpy())))
        assert np.allclose(found, expected.numpy(), atol=1e-4)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == KEPT
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    before, after = load_base(base).state_dict(), load_file(out / "model.safetensors")
    for name in after.keys() - trained_weights(objective.model).keys():
        assert torch.equal(before[name], after[name])


# The command --------------------------------------------------------------------------------


def weights(out):
    return load_file(out / MODEL_FOLDER / "model.safetensors")


def test_a_run_that_stops_goes_on_to_the_same_result(base, data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(argv(base, data, whole, "--epochs", "3")) == 0
    for stop in ("2", "4"):
        assert main(argv(base, data, parts, "--epochs", "3", "--max-steps", stop)) == 0
    assert main(argv(base, data, parts, "--epochs", "3")) == 0
    left, right = weights(whole), weights(parts)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    logs = [read_record(out / LOG_FILE) for out in (whole, parts)]
    assert [e["step"] for e in logs[1]] == list(range(1, 7))
    assert [e["main_loss"] for e in logs[0]] == [e["main_loss"] for e in logs[1]]


def test_a_killed_run_goes_on_to_the_same_result(base, data, tmp_path):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    more = ("--epochs", "40", "--save-every", "2")
    arguments = argv(base, data, out, *more)
    kill_once_there(out / STATE_FILE, PROG, arguments)
    assert 0 < torch.load(out / STATE_FILE, weights_only=True)["step"] < 80
    assert not (out / MODEL_FOLDER).exists()
    assert main(arguments) == 0
    assert main(argv(base, data, whole, *more)) == 0
    left, right = weights(whole), weights(out)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_it_learns_shows_when_it_drafts(base, data, tmp_path, dtype):
    """Fewer calls for the same tokens, and as many as the validation foretold."""
    run = tmp_path / "run"
    more = ("--epochs", "60", "--num-draft-tokens", "4", "--dtype", dtype)
    assert main(argv(base, data, run, *more)) == 0
    log = read_record(run / LOG_FILE)
    assert log[-1]["main_loss"] < 0.5 * log[0]["main_loss"]
    assert log[-1]["tokens_per_call"] > 2
    assert (run / "curves.png").stat().st_size > 10_000
    model, tokenizer = ssmlx.load(str(base), dtype="float32")
    draft = ssmlx.load_draft_model(str(run / MODEL_FOLDER), tokenizer, VOCAB, dtype="float32")
    chain = DraftModelConfig(num_draft_tokens=4)
    settings = {"max_tokens": 10, "draft_model": draft, "draft": chain}
    tokens = calls = 0
    for prompt in map(tokenizer.encode, PROMPTS):
        plain, _ = answer(model, tokenizer, prompt, decoding="plain", max_tokens=10)
        found, last = answer(model, tokenizer, prompt, **settings)
        assert found == plain
        tokens, calls = tokens + len(found), calls + last.target_calls
    foretold = log[-1]["tokens_per_call"]
    assert tokens / calls == pytest.approx(foretold, rel=1e-3 if dtype == "float32" else 0.1)


def test_the_command_drafts_with_the_folder(base, data, tmp_path, capsys):
    from ssmlx.commands.generate import main as generate

    assert main(argv(base, data, tmp_path / "run", "--epochs", "1")) == 0
    options = ["--model", str(base), "--prompt", "w1 w2", "--max-tokens", "5"]
    assert (
        generate([*options, "--drafter", f"draft-model model={tmp_path / 'run' / MODEL_FOLDER}"])
        == 0
    )
    drafted = capsys.readouterr().out
    assert generate([*options, "--decoding", "plain"]) == 0
    assert capsys.readouterr().out == drafted


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layers", "9"), f"--layers 9; expected 1 to {LAYERS}"),
        (("--layers", "0"), f"--layers 0; expected 1 to {LAYERS}"),
        (("--num-draft-tokens", "0"), "--num-draft-tokens 0"),
        (("--data", "nowhere"), "does not exist"),
        (("--model", "./nowhere"), "nowhere"),
        (("--template", "no place"), "no place"),
        (("--epochs", "0"), "--epochs 0"),
        (("--save-every", "0"), "--save-every 0"),
        (("--max-length", "1"), "no example that fits"),
    ],
)
def test_bad_options_are_told_in_one_line(base, data, tmp_path, capsys, more, said):
    assert main(argv(base, data, tmp_path / "run", *more)) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run").exists()


def test_an_option_that_would_do_nothing_is_refused(base, data, tmp_path, capsys):
    for flag in ("--tree-size", "--cache-gb"):
        with pytest.raises(SystemExit) as exit_code:
            main(argv(base, data, tmp_path / "run", flag, "8"))
        assert exit_code.value.code == 2
        assert flag in capsys.readouterr().err


def test_a_model_of_nested_settings_is_refused(base, data, tmp_path, capsys):
    nested = write_nested_base(tmp_path / "nested", base)
    assert main(argv(nested, data, tmp_path / "run")) == 2
    assert "None for " in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run").exists()


def test_another_runs_folder_is_refused(base, data, tmp_path, capsys):
    out, streams = tmp_path / "run", tmp_path / "streams"
    assert main(argv(base, data, out, "--max-steps", "2")) == 0
    before = (out / STATE_FILE).read_bytes()
    capsys.readouterr()
    for more in (("--seed", "5"), ("--layers", "3"), ("--dtype", "bfloat16")):
        assert main(argv(base, data, out, *more)) == 2
        assert "other settings" in one_line(capsys.readouterr().err, PROG)
    assert (out / STATE_FILE).read_bytes() == before
    (out / STATE_FILE).write_bytes(before[: len(before) // 2])
    assert main(argv(base, data, out)) == 2
    assert "cannot be read" in one_line(capsys.readouterr().err, PROG)
    (out / STATE_FILE).unlink()
    assert main(argv(base, data, out)) == 2
    assert "state.pt beside it does not" in one_line(capsys.readouterr().err, PROG)
    options = ["--model", base, "--data", data, "--out", streams, "--num-streams", "0",
               "--prune-rank", "0", "--num-msa-layers", KEPT, "--device", "cpu", "--max-steps", "1",
               "--template", "{prompt}", "--dtype", "float32"]  # fmt: skip
    assert train_streams([str(option) for option in options]) == 0
    capsys.readouterr()
    assert main(argv(base, data, streams)) == 2
    assert "other settings" in one_line(capsys.readouterr().err, PROG)
