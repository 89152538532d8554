"""The MLX trainer: the same steps as PyTorch's, resuming, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import ssmlx

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_flatten
from real import ROOT, VOCAB, kill_once_there, one_line, words, write_base, write_nested_base

from ssmlx.commands.train import ADAPTER_FOLDER, PROG, STATE_FILE, STORE_FILE, main
from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.attach import read_task_lora
from ssmlx.loading.files import read_tensors
from ssmlx.loading.load import load_base
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import RowLora, RowScope, attach_lora
from ssmlx.settings import StreamConfig
from ssmlx.training.batches import collate
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Example
from ssmlx.training.lower_store import LowerStore
from ssmlx.training.mlx_model import Layout, TrainedModel, new_adapter
from ssmlx.training.mlx_trainer import (
    MlxObjective,
    MlxTrainer,
    linear_cross_entropy,
    load_frozen,
    log_normaliser,
)
from ssmlx.training.record import LOG_FILE, read_record

from tiny import make_base as make_tiny  # isort: skip

SMALL = (
    "--num-streams", "2", "--num-msa-layers", "2", "--lora-rank", "4", "--prune-rank", "4",
    "--batch-size", "4", "--template", "{prompt}", "--valid-count", "4",
    "--save-every", "3", "--valid-every", "5", "--learning-rate", "0.01",
)  # fmt: skip
SHARED = ("num_streams", "num_msa_layers", "stream_init", "stream_init_rank", "prune_rank",
          "adapter_scope", "stream_design", "rotation_step")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("train") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Questions w_i, each answered by the five words after it."""
    folder = tmp_path_factory.mktemp("data")
    lines = [
        {"prompt": words(1 + i % 3, first=i), "completion": words(5, first=i + i % 3 + 1)}
        for i in range(24)
    ]
    for name in ("train", "valid"):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def argv(base, data, out, *more):
    return ["--model", str(base), "--data", str(data), "--out", str(out), *SMALL, *more]


def settings(num_layers, width, draft_vocab=None, **changes):
    """Both kinds of settings of a small run."""
    values = {"num_streams": 3, "num_msa_layers": 2, "lora_rank": 4, "prune_rank": 4, **changes}
    train = TrainConfig(**values)
    config = StreamConfig(
        num_layers=num_layers,
        hidden_size=width,
        draft_vocab_size=0 if draft_vocab is None else len(draft_vocab),
        **{name: getattr(train, name) for name in SHARED},
    )
    return train, config


def random_examples(count, vocab, seed=0):
    """Prompts of 1 to 4 tokens, answers of 2 to 8."""
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 5)), int(rng.integers(2, 9))) for _ in range(count)]
    return [Example(rng.integers(0, vocab, p + a).astype(np.int32), p) for p, a in sizes]


def make_objective(base, draft_vocab=None, backbone=None, task_lora=None, **changes):
    """An objective on a folder's model, every trained weight at random."""
    backbone = backbone or load_base(base, "float32")[0]
    train, config = settings(len(backbone.layers), backbone.hidden_size, draft_vocab, **changes)
    adapter = new_adapter(backbone, config, train, draft_vocab)
    model = TrainedModel(backbone, replace(adapter, task_lora=task_lora or {}))
    rng = np.random.default_rng(3)
    model.bind(
        {
            name: mx.array(rng.normal(0, 0.2, array.shape), mx.float32)
            for name, array in model.weights.items()
        }
    )
    return MlxObjective(model, train, draft_vocab)


# The same step as PyTorch's -----------------------------------------------------------------


def pair(folder, architecture, draft_vocab, changes):
    """Both trainers on one base model, at the same random weights."""
    torch = pytest.importorskip("torch")
    from test_reference import make_base

    from convert.formats.adapter import read_checkpoint
    from convert.reference.checkpoint import save_reference
    from convert.training.run import TorchObjective, TorchTrainer, build_model

    theirs_base = make_base(architecture, attention="sdpa")
    theirs_base.save_pretrained(folder / "base")
    sizes = theirs_base.config.num_hidden_layers, theirs_base.config.hidden_size
    train, config = settings(*sizes, draft_vocab, **changes)
    model = build_model(theirs_base, config, train, draft_vocab)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.4 if name.startswith("stream") else 0.1)
    save_reference(model, folder / "checkpoint")
    cpu = torch.device("cpu")
    theirs = TorchTrainer(TorchObjective(model, train, draft_vocab, cpu, torch.float32), 10)
    backbone, _ = load_base(folder / "base", "float32")
    adapter = read_checkpoint(
        folder / "checkpoint", folder / "checkpoint" / "streams.safetensors", backbone
    )
    mine = MlxTrainer(MlxObjective(TrainedModel(backbone, adapter), train, draft_vocab), 10)
    return mine, theirs


def named_as_mine(named):
    """PyTorch's arrays under the names that MLX's adapter has for them."""
    found = {}
    for name, array in named.items():
        if not name.startswith("base.model."):
            found[name] = array
            continue
        path, kind = name.removeprefix("base.").split(".adapter.lora_")
        found[f"{path}.lora_{kind[0].lower()}"] = array.T
    return found


def gap(mine, theirs):
    """The largest difference of two arrays, relative to the largest number."""
    theirs = theirs.detach().numpy()
    return np.abs(np.array(mine) - theirs).max() / max(np.abs(theirs).max(), 1e-12)


VARIANTS = [
    {},
    {"stream_init": "residual", "stream_init_rank": 3},
    {"stream_init": "low_rank", "stream_init_rank": 3},
    {"stream_design": "value_rotation", "rotation_step": 0.3},
    {"lora_modules": ("q_proj", "mlp.down_proj"), "prune_rank": 0},
    {"weight_decay": 0.1, "clip_norm": 0.05, "stream_weights": (0.5, 0.2, 0.1)},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(changes) or "plain")
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "draft_vocab"])
@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_a_step_is_pytorchs_step(tmp_path, monkeypatch, architecture, scope, reduced, changes):
    monkeypatch.setattr("ssmlx.training.mlx_model._CARRIERS_AT_ONCE", 3)  # several groups
    monkeypatch.setattr("ssmlx.training.objective._CHUNK_LOGITS", 7 * 97)  # several chunks
    vocab = np.arange(0, 97, 2, dtype=np.int32) if reduced else None
    mine, theirs = pair(tmp_path, architecture, vocab, {"adapter_scope": scope, **changes})
    for run in (mine, theirs):
        run.step = 1  # the rate's, and the carriers' of the pruning adapter
    batch = collate(random_examples(5, 97), np.arange(5))
    assert len(set(batch.pads)) > 2
    lower = mine.objective.lower(batch)
    theirs_lower = theirs.objective.lower(batch)
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        span = slice(pad, pad + length)
        assert gap(lower[row, span.start : span.stop], theirs_lower[row, span]) < 1e-5
    total, _ = theirs.objective.loss(batch, theirs_lower, 1)
    total.backward()
    gradients, _ = mine.gradients(batch, lower)
    expected = named_as_mine({name: p.grad for name, p in theirs.named.items()})
    assert gradients.keys() == expected.keys()
    gaps = {"gradient": max(gap(gradients[n], g) for n, g in expected.items())}
    found_parts = mine.advance(batch, lower)
    expected_parts = theirs.advance(batch, theirs_lower)
    assert found_parts == pytest.approx(expected_parts, abs=1e-5)
    gaps["loss"] = max(abs(found_parts[n] - v) for n, v in expected_parts.items())
    gaps["weight"] = max(gap(mine.weights[n], p) for n, p in named_as_mine(theirs.named).items())
    assert max(gaps["gradient"], gaps["weight"]) < 1e-4


# Losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_and_its_gradient_are_those_of_cross_entropy(monkeypatch, packed):
    monkeypatch.setattr("ssmlx.training.objective._CHUNK_LOGITS", 7 * 11)  # several chunks
    rng = np.random.default_rng(0)
    head = nn.Linear(32, 11)
    if packed:
        head = nn.QuantizedLinear.from_linear(head, group_size=32, bits=4)
    hidden = mx.array(rng.normal(0, 1, (23, 32)), mx.float32)
    targets, scales = mx.array(rng.integers(0, 11, 23)), mx.array(rng.random(23), mx.float32)

    def expected(hidden):
        losses = nn.losses.cross_entropy(head(hidden), targets)
        return 3 * (losses * scales).sum(), losses

    def found(hidden):
        total, losses = linear_cross_entropy(head, hidden, targets, scales, 11)
        return 3 * total, losses

    (total, losses), gradient = mx.value_and_grad(found)(hidden)
    (plain, plain_losses), plain_gradient = mx.value_and_grad(expected)(hidden)
    assert float(total) == pytest.approx(float(plain), rel=1e-6)
    assert mx.allclose(losses, plain_losses, atol=1e-5)
    assert mx.allclose(gradient, plain_gradient, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [13, 512, 50_001])
def test_small_probabilities_count(vocab_size):
    logits = np.random.default_rng(0).normal(0, 2.5, (4, vocab_size)).astype(np.float32)
    logits[:, 7] += 20  # beside it, each of the others is below float32's resolution
    exact = logits.astype(np.float64)
    top = exact.max(axis=1, keepdims=True)
    probs = np.exp(exact - top)
    expected = top[:, 0] + np.log(probs.sum(axis=1))
    probs /= probs.sum(axis=1, keepdims=True)
    assert np.abs(np.array(log_normaliser(mx.array(logits))) - expected).max() < 1e-5
    gradient = mx.grad(lambda x: log_normaliser(x).sum())(mx.array(logits))
    assert np.abs(np.array(gradient) - probs).max() < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_groups_of_carriers_change_nothing(monkeypatch, architecture):
    batch = collate(random_examples(5, 13), np.arange(5))
    found = []
    for size in (1, 3, 99):
        monkeypatch.setattr("ssmlx.training.mlx_model._CARRIERS_AT_ONCE", size)
        objective = make_objective(None, backbone=Backbone(make_tiny(architecture)))
        layout = Layout.of(batch, 3)
        assert len(layout.groups) == -(-len(batch.carriers) // size)
        found.append(objective.model.upper(objective.model.lower(layout), layout)[1])
    scale = mx.abs(found[0]).max()
    assert mx.allclose(found[0] / scale, found[1] / scale, atol=1e-5)
    assert mx.allclose(found[0] / scale, found[2] / scale, atol=1e-5)


def test_padding_changes_nothing(base):
    """A batch costs what its examples cost alone, weighted by their targets."""
    objective = make_objective(base, prune_weight=0.0)
    examples = random_examples(5, VOCAB)
    whole = collate(examples, np.arange(5))
    alone = [collate(examples, np.array([i])) for i in range(5)]
    losses = objective.parts(whole, objective.lower(whole))
    for stream, name in enumerate(losses):
        counts = [int((batch.targets(stream) >= 0).sum()) for batch in alone]
        own = [objective.parts(batch, objective.lower(batch))[name] for batch in alone]
        mean = sum(c * v for c, v in zip(counts, own, strict=True)) / sum(counts)
        assert losses[name] == pytest.approx(mean, abs=1e-4)


def test_scope_streams_leaves_the_node_rows_to_the_base(base):
    objective = make_objective(base, adapter_scope="streams")
    batch = collate(random_examples(3, VOCAB), np.arange(3))
    layout = Layout.of(batch, 3)
    nodes, _ = objective.model.upper(objective.model.lower(layout), layout)
    plain = load_base(base, "float32")[0]
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        tokens = mx.array(batch.tokens[row, pad : pad + length])
        expected = plain.model(tokens[None])[0]
        found = objective.model.logits(nodes[row, pad : pad + length], drafting=False)
        assert mx.allclose(found, expected, atol=1e-4)


# The frozen model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed_base(base, tmp_path_factory):
    """The base in 4 bits, its scales in float16."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model
    from real import write_tokenizer

    folder = tmp_path_factory.mktemp("train") / "packed"
    model, config = load_model(base)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    write_tokenizer(folder)
    return folder


def test_packed_weights_stay_packed_and_give_the_same_step(packed_base):
    batch = collate(random_examples(5, VOCAB), np.arange(5))
    found = []
    for dtype in ("stored", "float32"):
        backbone = load_frozen(packed_base, dtype)
        kinds = {type(m) for _, m in backbone.layers[-1].named_modules()}
        assert (nn.QuantizedLinear in kinds) == (dtype == "stored")
        assert backbone.dtype == mx.float32
        run = MlxTrainer(make_objective(None, backbone=backbone, stream_init="identity"), 10)
        found.append(run.gradients(batch, run.objective.lower(batch)))
    (mine, losses), (expected, expected_losses) = found
    assert mx.allclose(mx.stack(losses), mx.stack(expected_losses), atol=1e-4)
    for name, gradient in expected.items():
        assert float(mx.abs(mine[name] - gradient).max() / mx.abs(gradient).max()) < 1e-3


def test_bfloat16_holds_what_is_trained_in_float32(base):
    backbone = load_frozen(base, "bfloat16")
    run = MlxTrainer(make_objective(None, backbone=backbone), 10)
    batch = collate(random_examples(5, VOCAB), np.arange(5))
    rough = run.advance(batch, run.objective.lower(batch))
    assert {array.dtype for array in run.weights.values()} == {mx.float32}
    frozen = tree_flatten(backbone.model.parameters())
    assert {a.dtype for name, a in frozen if "lora" not in name} == {mx.bfloat16}
    fine_run = MlxTrainer(make_objective(base), 10)
    fine = fine_run.advance(batch, fine_run.objective.lower(batch))
    for name, value in fine.items():
        assert rough[name] == pytest.approx(value, rel=0.05)


def test_stored_lower_states_are_those_of_the_layers(base, tmp_path, monkeypatch):
    monkeypatch.setattr("ssmlx.training.lower_store._BATCHES_PER_MARK", 1)
    objective, examples = make_objective(base), random_examples(70, VOCAB)
    calls, lower = [], objective.lower

    def counted(batch):
        if len(calls) == 2:
            calls.append(0)
            raise KeyboardInterrupt
        calls.append(len(batch.indices))
        return lower(batch)

    objective.lower = counted

    def store(identity="a"):
        return LowerStore(tmp_path / "states", examples, objective, identity)

    with pytest.raises(KeyboardInterrupt):
        store().fill()
    for _ in range(2):
        store().fill()
    assert sum(calls) == 70  # nothing is computed twice, or left out
    batch = collate(examples, np.array([3, 44, 9]))
    found, expected = store().get(batch), lower(batch)
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        span = slice(pad, pad + length)
        assert mx.allclose(found[row, span], expected[row, span], atol=1e-4)
    store("another model").fill()
    assert sum(calls) == 140


# The command --------------------------------------------------------------------------------


def weights(out):
    folder = out / ADAPTER_FOLDER
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= read_tensors(file, "weights")
    return found


def assert_same(left, right):
    left, right = weights(left), weights(right)
    assert left.keys() == right.keys()
    assert all(mx.array_equal(left[name], right[name]) for name in left)


def test_a_run_that_stops_goes_on_to_the_same_result(base, data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(argv(base, data, whole, "--epochs", "2")) == 0
    for stop in ("4", "7"):
        assert main(argv(base, data, parts, "--epochs", "2", "--max-steps", stop)) == 0
    assert main(argv(base, data, parts, "--epochs", "2")) == 0
    assert_same(whole, parts)
    logs = [read_record(out / LOG_FILE) for out in (whole, parts)]
    assert [e["step"] for e in logs[1]] == list(range(1, 13))
    assert [e["main_loss"] for e in logs[0]] == [e["main_loss"] for e in logs[1]]


def test_a_killed_run_goes_on_to_the_same_result(base, data, tmp_path):
    out = tmp_path / "killed"
    more = ("--epochs", "20", "--save-every", "2")
    arguments = argv(base, data, out, *more)
    kill_once_there(out / STATE_FILE, "ssmlx.train", arguments)
    assert not (out / ADAPTER_FOLDER).exists()
    assert main(arguments) == 0
    assert main(argv(base, data, tmp_path / "whole", *more)) == 0
    assert_same(tmp_path / "whole", out)


@pytest.mark.parametrize("scope", ["all", "streams"])
def test_what_it_learns_shows_when_it_decodes(base, data, tmp_path, scope):
    """From data to an adapter that answers in fewer calls, and as plain decoding does."""
    run = tmp_path / "run"
    if scope == "streams":
        data = own_answers(base, tmp_path / "own")
    options = ("--adapter-scope", scope, "--epochs", "60", "--draft-vocab-size", "60")
    assert main(argv(base, data, run, *options)) == 0
    log = read_record(run / LOG_FILE)
    assert log[-1]["tokens_per_call"] > 1.8
    assert log[-1]["stream_2_loss"] < 0.5 * log[0]["stream_2_loss"]
    assert (run / "curves.png").stat().st_size > 10_000
    model, tokenizer = ssmlx.load(str(base), adapter=run / ADAPTER_FOLDER)
    line = json.loads((data / "train.jsonl").read_text().splitlines()[3])
    prompt = line.get("prompt_tokens") or tokenizer.encode(line["prompt"])
    config = ssmlx.GenerateConfig(max_tokens=8)
    answers = {}
    for decoding in ("streaming", "plain"):
        found = list(ssmlx.stream_generate(model, tokenizer, prompt, config, decoding=decoding))
        answers[decoding] = [t for r in found for t in r.tokens], found[-1].target_calls
    assert answers["streaming"][0] == answers["plain"][0]
    expected = line.get("completion_tokens") or tokenizer.encode(line["completion"])
    assert answers["plain"][0][: len(expected)] == expected[:8]
    assert answers["streaming"][1] <= 5 < answers["plain"][1]


def own_answers(base, folder):
    """Twelve prompts with the base model's own answers."""
    model, _ = ssmlx.load(str(base), adapter="none")
    lines = []
    for first in range(7, 19):
        prompt = [first, first + 1]
        found = list(prompt)
        for _ in range(8):
            logits = model.backbone.model(mx.array([found]))[0, -1]
            found.append(int(mx.argmax(logits).item()))
        lines.append({"prompt_tokens": prompt, "completion_tokens": found[2:]})
    folder.mkdir()
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


@pytest.mark.parametrize(
    "more",
    [
        ("--num-streams", "0", "--prune-rank", "0"),
        ("--stream-design", "value_rotation", "--rotation-step", "0.3", "--lora-modules", "q_proj"),
        ("--stream-init", "low_rank", "--stream-init-rank", "3"),
    ],
)
def test_every_kind_of_adapter_loads(base, data, tmp_path, more):
    run = tmp_path / "run"
    assert main(argv(base, data, run, *more, "--epochs", "1")) == 0
    model, tokenizer = ssmlx.load(str(base), adapter=run / ADAPTER_FOLDER)
    assert model.num_streams == (0 if more[1] == "0" else 2)
    assert ssmlx.generate(model, tokenizer, words(3), max_tokens=3)


def test_a_packed_model_trains_and_decodes(packed_base, data, tmp_path):
    run = tmp_path / "run"
    assert main(argv(packed_base, data, run, "--dtype", "stored", "--max-steps", "3")) == 0
    adapter = run / ADAPTER_FOLDER
    model, tokenizer = ssmlx.load(str(packed_base), adapter=adapter, dtype="stored")
    assert ssmlx.generate(model, tokenizer, words(3), max_tokens=3)


def test_a_run_starts_from_another_runs_weights(base, data, tmp_path):
    """From a LoRA alone: its LoRA at step 0, streams anew; a stopped run still goes on."""
    lora, out, whole, twin = (tmp_path / name for name in ("lora", "out", "whole", "twin"))
    alone = ("--num-streams", "0", "--prune-rank", "0", "--max-steps", "4")
    assert main(argv(base, data, lora, *alone)) == 0
    init = ("--init", str(lora / ADAPTER_FOLDER))
    still = ("--learning-rate", "1e-30", "--max-steps", "1")
    assert main(argv(base, data, out, *init, *still)) == 0
    first, started = (load_adapter(run / ADAPTER_FOLDER) for run in (lora, out))
    for path, weights_there in first.lora.items():
        assert mx.abs(weights_there.b).sum() > 0
        assert mx.allclose(weights_there.b, started.lora[path].b)
    assert first.streams.embeddings is None
    assert mx.abs(started.streams.embeddings).sum() > 0
    for folder, stops in ((whole, ("6",)), (twin, ("3", "6"))):
        for stop in stops:
            assert main(argv(base, data, folder, *init, "--max-steps", stop)) == 0
    assert_same(whole, twin)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--lora-rank", "8", "--lora-alpha", "64"), "of shape ["),
        (("--lora-rank", "8"), "has the scale alpha / rank 8"),
        (("--num-streams", "3"), "stream_embeddings of shape [2,"),
        (("--prune-rank", "0"), "expected none of that name"),
        (("--num-msa-layers", "1"), "have num_msa_layers 2"),
        (("--stream-init", "identity"), "have stream_init low_rank"),
        (("--stream-init-rank", "8"), "have stream_init_rank 32"),
        (("--stream-design", "value_rotation", "--rotation-step", "0.1"), "have stream_design emb"),
    ],
)
def test_a_start_of_other_settings_is_refused(base, data, tmp_path, capsys, more, said):
    first = tmp_path / "first"
    assert main(argv(base, data, first, "--max-steps", "1")) == 0
    capsys.readouterr()
    init = ("--init", str(first / ADAPTER_FOLDER))
    assert main(argv(base, data, tmp_path / "run", *init, *more)) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    assert main(argv(base, data, tmp_path / "run", "--init", str(tmp_path / "nowhere"))) == 2
    assert "no adapter folder" in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run" / STATE_FILE).exists()


def test_without_room_for_the_store_the_layers_run_every_step(base, data, tmp_path):
    assert main(argv(base, data, tmp_path / "run", "--max-steps", "2", "--cache-gb", "0")) == 0
    assert not (tmp_path / "run" / STORE_FILE).exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--num-msa-layers", "9"), "num_msa_layers is 9 of 4 layers"),
        (("--draft-vocab-size", "999"), "draft_vocab_size is 999 of 64 tokens"),
        (("--lora-modules", "query"), "no linear module query"),
        (("--template", "no place"), "no place"),
        (("--epochs", "0"), "--epochs 0"),
        (("--epochs", "inf"), "--epochs inf"),
        (("--learning-rate", "nan"), "--learning-rate nan"),
        (("--learning-rate", "1e38"), "--learning-rate 1e+38"),
        (("--main-weight", "1e38"), "the gradient of step"),
        (("--stream-weights", "1", "2", "3"), "--stream-weights"),
        (("--rotation-step", "9", "--stream-design", "value_rotation"), "--rotation-step 9"),
        (("--save-every", "0"), "--save-every 0"),
        (("--max-steps", "0"), "--max-steps 0"),
        (("--tree-size", "9999"), "--tree-size 9999"),
        (("--cache-gb", "-1"), "--cache-gb -1"),
        (("--data", "nowhere"), "does not exist"),
        (("--max-length", "1"), "no example that fits"),
        (("--model", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_bad_options_are_told_in_one_line(base, data, tmp_path, capsys, more, said):
    assert main(argv(base, data, tmp_path / "run", *more)) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run" / STATE_FILE).exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('{"question": "w1"}', "line 2: it has question"),
        ('{"prompt": "", "completion": "w1"}', "line 2"),
        ('{"prompt_tokens": ["w"], "completion_tokens": [3]}', "line 2"),
        ('{"prompt_tokens": [1], "completion_tokens": [64]}', "the token id 64"),
        ('{"prompt_tokens": [-1], "completion_tokens": [3]}', "the token id -1"),
    ],
)
def test_bad_lines_are_told(base, tmp_path, capsys, line, said):
    good = '{"prompt": "w1", "completion": "w2 w3"}\n'
    (tmp_path / "train.jsonl").write_text(good + line + "\n")
    (tmp_path / "valid.jsonl").write_text(good)
    assert main(argv(base, tmp_path, tmp_path / "run")) == 2
    message = one_line(capsys.readouterr().err, PROG)
    assert "train.jsonl" in message
    assert said in message


def test_what_cannot_be_read_or_written_is_told(base, data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(argv(base, data, tmp_path / "file")) == 2
    assert "cannot write" in one_line(capsys.readouterr().err, PROG)
    (tmp_path / "train.jsonl").write_bytes(b"\xff\n")
    assert main(argv(base, tmp_path, tmp_path / "run")) == 2
    assert "not UTF-8" in one_line(capsys.readouterr().err, PROG)


def test_a_model_of_nested_settings_is_refused(base, data, tmp_path, capsys):
    nested = write_nested_base(tmp_path / "nested", base)
    assert main(argv(nested, data, tmp_path / "run")) == 2
    assert "None for " in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run").exists()


def test_another_runs_folder_is_refused(base, data, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(argv(base, data, out, "--max-steps", "3")) == 0
    before = (out / STATE_FILE).read_bytes()
    for other in (("--seed", "5"), ("--dtype", "bfloat16")):
        capsys.readouterr()
        assert main(argv(base, data, out, *other)) == 2
        assert "other settings" in one_line(capsys.readouterr().err, PROG)
    assert (out / STATE_FILE).read_bytes() == before
    (out / STATE_FILE).write_bytes(before[: len(before) // 2])
    capsys.readouterr()
    assert main(argv(base, data, out)) == 2
    assert "cannot be read" in one_line(capsys.readouterr().err, PROG)


# Streams for a fine-tuned model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def task(base, data, tmp_path_factory):
    """The LoRA of a task, as the command writes it."""
    out = tmp_path_factory.mktemp("task") / "run"
    alone = ("--num-streams", "0", "--prune-rank", "0", "--num-msa-layers", "3", "--epochs", "4")
    assert main(argv(base, data, out, *alone)) == 0
    return out / ADAPTER_FOLDER


def test_a_step_beside_a_tasks_lora_is_a_step_on_the_merged_model(base, task):
    batch, found = collate(random_examples(5, VOCAB), np.arange(5)), []
    for apart in (False, True):
        backbone = load_base(base, "float32")[0]
        lora = read_task_lora(task, backbone)
        if not apart:
            attach_lora(backbone.model, lora, RowScope(0), merge=True, dtype=mx.float32)
            lora = {}
        objective = make_objective(None, backbone=backbone, adapter_scope="streams", task_lora=lora)
        kinds = {type(m) for _, m in backbone.layers[1].named_modules()}
        assert RowLora not in kinds  # merged, where nothing is packed
        found.append(MlxTrainer(objective, 10).gradients(batch, objective.lower(batch)))
    (mine, losses), (expected, expected_losses) = found
    assert mx.allclose(mx.stack(losses), mx.stack(expected_losses), atol=1e-6)
    assert mine.keys() == expected.keys()
    assert all(mx.allclose(mine[name], gradient, atol=1e-6) for name, gradient in expected.items())


@pytest.mark.parametrize("kind", ["whole", "packed"])
def test_streams_learn_to_draft_for_a_fine_tuned_model(
    base, packed_base, data, task, tmp_path, kind
):
    folder = base if kind == "whole" else packed_base
    out = tmp_path / "run"
    more = ("--adapter-scope", "streams", "--task-lora", str(task), "--epochs", "6")
    assert main(argv(folder, data, out, *more)) == 0
    adapter, alone = load_adapter(out / ADAPTER_FOLDER), load_adapter(task)
    assert adapter.config.adapter_scope == "streams" and alone.config.adapter_scope == "all"
    assert adapter.task_lora.keys() == alone.lora.keys()
    for path, weights in alone.lora.items():
        assert mx.array_equal(adapter.task_lora[path].a, weights.a)
        assert mx.array_equal(adapter.task_lora[path].b, weights.b)
    assert any(mx.abs(weights.b).max() > 0 for weights in adapter.lora.values())

    def greedy(source, decoding):
        model, tokenizer = ssmlx.load(str(folder), adapter=source, dtype="float32")
        config = ssmlx.GenerateConfig(decoding=decoding, max_tokens=12)
        responses = list(ssmlx.stream_generate(model, tokenizer, words(2, first=3), config))
        return [token for response in responses for token in response.tokens]

    expected = greedy(task, "plain")
    assert greedy(out / ADAPTER_FOLDER, "plain") == expected
    assert greedy(out / ADAPTER_FOLDER, "streaming") == expected
    assert greedy(None, "plain") != expected


def test_a_run_is_that_of_its_tasks_lora(base, data, task, tmp_path, capsys):
    """Neither its state nor the frozen layers' results are those of another LoRA."""
    out = tmp_path / "run"
    own = ("--adapter-scope", "streams", "--max-steps", "2")
    assert main(argv(base, data, out, *own, "--task-lora", str(task))) == 0
    capsys.readouterr()
    assert main(argv(base, data, out, *own)) == 2
    one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], PROG)


def test_a_lora_that_is_no_task_of_this_model_is_refused(base, data, task, tmp_path, capsys):
    def refused(*more):
        capsys.readouterr()
        assert main(argv(base, data, tmp_path / "run", *more)) == 2
        return one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], PROG)

    own = ("--adapter-scope", "streams", "--task-lora")
    assert "--task-lora with --adapter-scope all" in refused("--task-lora", str(task))
    assert "no folder" in refused(*own, str(tmp_path / "none"))
    other = write_base(tmp_path / "other", norm=0.5)
    out = tmp_path / "others"
    alone = ("--num-streams", "0", "--prune-rank", "0", "--max-steps", "1")
    assert main(argv(other, data, out, *alone)) == 0
    assert "belongs to another base model" in refused(*own, str(out / ADAPTER_FOLDER))
    (tmp_path / "mlx").mkdir()
    settings = {"fine_tune_type": "full", "lora_parameters": {"scale": 2.0}}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(settings))
    assert "does not describe LoRA" in refused(*own, str(tmp_path / "mlx"))


def test_help_comes_without_mlx():
    code = "import sys, ssmlx.train; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "ssmlx.train", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "examples:" in done.stdout
