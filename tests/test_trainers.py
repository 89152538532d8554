"""Both trainers, MLX's and PyTorch's: the same steps, resuming, and what they write."""

import json
from dataclasses import replace

import numpy as np
import pytest

import ssmlx

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_flatten

torch = pytest.importorskip("torch")
import oracle
import real
import refusals
from guessed import compute_guesses
from loops import speculative_steps
from oracle import gap
from oracle import make_base as make_torch_base
from refusals import found_in, mentions
from tiny import first_tokens
from torch.nn import functional as F
from trainers import ALONE, MLX, OWN, TORCH

from convert.__main__ import main as convert
from convert.base import load_base as load_torch_base
from convert.export.export import build_reference
from convert.reference.checkpoint import (
    build_frozen,
    load_fine_tuned,
    load_reference,
    merge_lora,
    replace_trained_weights,
    set_trained_part,
)
from convert.reference.format import TASK_LORA, LoraSettings
from convert.reference.model import StreamFusedReference
from convert.training import run as torch_run
from convert.training.run import (
    TorchObjective,
    TorchTrainer,
    cast_frozen_parameters,
    new_streams,
    stream_attention,
    use_stream_attention,
)
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.attach import attach_adapter, read_task_lora
from ssmlx.loading.load import load_base
from ssmlx.loading.tensors import read_tensors
from ssmlx.model.lora import RowLora, RowScope, attach_lora
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import TokensBetweenTurns
from ssmlx.settings import StreamConfig, TreeConfig
from ssmlx.training import mlx_trainer
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Batch, Packing, collate
from ssmlx.training.job import SETTINGS_FILE, Trainer
from ssmlx.training.mlx_model import Layout, TrainedModel, new_adapter, trainable_weights
from ssmlx.training.mlx_trainer import MlxObjective, MlxTrainer, load_trainable_base
from ssmlx.training.objective import PRUNE, STREAM, STRIDE, LowerStore
from ssmlx.training.record import LOG_FILE, read_log_entries

SHARED = ("num_streams", "num_msa_layers", "stream_init", "stream_init_rank", "prune_rank",
          "adapter_scope", "stream_design", "rotation_step", "root_init_rank",
          "condition_rank")  # fmt: skip


both = pytest.mark.parametrize("command", [MLX, TORCH], ids=lambda command: command.prog)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Questions, each answered by the five words after it."""
    return real.write_data(tmp_path_factory.mktemp("data"), real.questions(range(24)))


@pytest.fixture(scope="module")
def packed_base(base, tmp_path_factory):
    """The base in 4 bits, its scales in float16."""
    return real.write_packed(tmp_path_factory.mktemp("train"), base, dtype=mx.float16)


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


PACKING = Packing(24, TokensBetweenTurns(closing=(1, 2)), 8)


def some_batch(count=5, vocab=real.VOCAB, packing=None):
    return collate(real.random_examples(count, vocab), np.arange(count), packing)


def mlx_objective(base=None, draft_vocab=None, backbone=None, task_lora=None, **changes):
    """An objective on a folder's model, every trained weight at random."""
    backbone = backbone or load_base(base, "float32")[0]
    train, config = settings(len(backbone.layers), backbone.hidden_size, draft_vocab, **changes)
    adapter = new_adapter(backbone, config, train, draft_vocab, task_lora)
    model = TrainedModel(backbone, adapter)
    rng = np.random.default_rng(3)
    drawn = {name: rng.normal(0, 0.2, array.shape) for name, array in model.weights.items()}
    model.bind({name: mx.array(array, mx.float32) for name, array in drawn.items()})
    return MlxObjective(model, train, draft_vocab)


def torch_objective(base, draft_vocab=None, dtype=torch.float32, **changes):
    """An objective whose LoRA does something."""
    train, config = settings(real.LAYERS, real.WIDTH, draft_vocab, **changes)
    loaded = load_torch_base(base, attn_implementation="sdpa")
    model = new_streams(loaded, config, train, draft_vocab)
    with torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.endswith("lora_B.weight"):
                parameter.normal_(std=0.1)
    cast_frozen_parameters(model, dtype)
    return TorchObjective(model, train, draft_vocab, torch.device("cpu"), dtype)


def trainer_of(base, command, **changes) -> Trainer:
    if command is MLX:
        return MlxTrainer(mlx_objective(base, **changes), 10)
    return TorchTrainer(torch_objective(base, **changes), 10)


def pair(folder, architecture, draft_vocab, changes):
    """Both trainers on one base model, at the same random weights."""
    theirs_base = make_torch_base(architecture, attention="sdpa")
    theirs_base.save_pretrained(folder / "base")
    sizes = theirs_base.config.num_hidden_layers, theirs_base.config.hidden_size
    train, config = settings(*sizes, draft_vocab, **changes)
    model = new_streams(theirs_base, config, train, draft_vocab)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.4 if name.startswith(("stream", "condition")) else 0.1)
    cpu, (adapter, backbone) = torch.device("cpu"), oracle.convert(folder, model)
    theirs = TorchTrainer(TorchObjective(model, train, draft_vocab, cpu, torch.float32), 10)
    mine = MlxObjective(TrainedModel(backbone, load_adapter(adapter)), train, draft_vocab)
    return MlxTrainer(mine, 10), theirs


def named_as_mine(named):
    """PyTorch's arrays under the names that MLX's adapter has for them."""
    found = {}
    for name, array in named.items():
        path, _, kind = name.removeprefix("base.").partition(".adapter.lora_")
        found |= {f"{path}.lora_{kind[0].lower()}": array.T} if kind else {name: array}
    return found


VARIANTS = [
    {},
    {"stream_init": "residual", "stream_init_rank": 3},
    {"stream_init": "low_rank", "stream_init_rank": 3},
    {"stream_design": "value_rotation", "rotation_step": 0.3},
    {"lora_modules": ("q_proj", "mlp.down_proj"), "prune_rank": 0},
    {"condition_rank": 4},
    {"root_init_rank": 3},
    {"root_init_rank": 3, "root_dropout": 0.4},
    {"pack": 24, "condition_rank": 4, "root_init_rank": 3},
    {"weight_decay": 0.1, "clip_norm": 0.05, "stream_weights": (0.5, 0.2, 0.1)},
]
STEPS = [
    pytest.param(
        architecture,
        scope,
        reduced,
        changes,
        id="-".join([architecture, scope, *["reduced"] * reduced, *changes]),
        # The default tier takes half of Llama's, with and without a draft vocabulary by turns.
        marks=[] if architecture == "Llama" and (number + reduced) % 2 else [pytest.mark.slow],
    )
    for architecture in ("Llama", "Qwen3")
    for scope in ("all", "streams")
    for reduced in (False, True)
    for number, changes in enumerate(VARIANTS)
]


@pytest.mark.parametrize(("architecture", "scope", "reduced", "changes"), STEPS)
def test_a_step_is_pytorchs_step(tmp_path, monkeypatch, architecture, scope, reduced, changes):
    monkeypatch.setattr("ssmlx.training.mlx_model._ANCHORS_AT_ONCE", 3)  # several groups
    monkeypatch.setattr("ssmlx.training.objective._CHUNK_LOGITS", 7 * 97)  # several chunks
    vocab = np.arange(0, 97, 2, dtype=np.int32) if reduced else None
    mine, theirs = pair(tmp_path, architecture, vocab, {"adapter_scope": scope, **changes})
    for trainer in (mine, theirs):
        trainer.step = 2  # the rate's, and of the anchors that teach in turn
    batch = some_batch(8, 97, PACKING if "pack" in changes else None)
    assert len(set(batch.pads)) > 2 or len(batch.tokens) < 5
    lower = mine.objective.lower(batch)
    theirs_lower = theirs.objective.lower(batch)
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        end = pad + length
        assert gap(lower[row, pad:end], theirs_lower[row, pad:end]) < 5e-5
    total, _ = theirs.objective.loss_and_term_means(batch, theirs_lower, 2)
    total.backward()
    gradients, _ = mine.gradients(batch, lower)
    expected = named_as_mine({name: p.grad for name, p in theirs.named.items()})
    assert gradients.keys() == expected.keys()
    assert max(gap(gradients[n], g) for n, g in expected.items()) < 1e-4
    assert mine.advance(batch, lower) == pytest.approx(
        theirs.advance(batch, theirs_lower), rel=1e-5
    )
    for name, weight in named_as_mine(theirs.named).items():
        clear = expected[name].abs().numpy() > 1e-7  # elsewhere Adam divides noise by noise
        assert gap(np.array(mine.weights[name]) * clear, weight.detach().numpy() * clear) < 1e-4


@pytest.mark.parametrize(("reduced", "packing"), [(False, None), (True, None), (True, PACKING)])
def test_a_condition_learns_alone_as_it_does_beside_the_streams(
    tmp_path, monkeypatch, reduced, packing
):
    """Streams of packed texts see what they see when decoding; what is copied is not learned."""
    monkeypatch.setattr("guessed.mix_copies_along", lambda *found: found[2:])
    monkeypatch.setattr("ssmlx.drafters.stream_drafter.TEXT_TOKENS", 0)
    vocab = np.arange(0, 97, 2, dtype=np.int32) if reduced else None
    alone = {"condition_rank": 5, "adapter_scope": "streams", "root_init_rank": 0}
    whole, _ = pair(tmp_path, "Llama", vocab, alone)
    train = replace(whole.objective.train, train_only="condition")
    adapter = whole.objective.model.adapter
    batch = some_batch(8, 97, packing)
    model = build_frozen(make_torch_base("Llama", attention="sdpa"), adapter)
    set_trained_part(model, "condition")
    cpu = torch.device("cpu")
    backbone = load_base(tmp_path / "base", "float32")[0]
    mine = MlxTrainer(MlxObjective(TrainedModel(backbone, adapter, "condition"), train, vocab), 10)
    theirs = TorchTrainer(TorchObjective(model, train, vocab, cpu, torch.float32), 10)
    every, losses = whole.gradients(batch, whole.objective.lower(batch))
    assert theirs.objective._hidden_states_by_kind(batch, theirs.objective.lower(batch))[
        "stream"
    ].is_contiguous()
    lower = mine.objective.lower(batch)
    theirs_lower = theirs.objective.lower(batch)
    own, means = mine.gradients(batch, lower)
    assert own.keys() == theirs.named.keys() == {n for n in every if n.startswith("condition.")}
    assert max(gap(gradient, every[name]) for name, gradient in own.items()) < 1e-4
    assert gap(mx.stack(means), mx.stack(losses[1:6:2])) < 1e-5
    rows = [
        one.objective.rank_candidates(batch, of, 3)
        for one, of in ((mine, lower), (theirs, theirs_lower))
    ]
    assert (rows[0][0] == rows[1][0]).all() and rows[0][1].shape[-2:] == (3, 3)
    assert gap(rows[0][1], rows[1][1]) < 1e-4
    replayed = theirs.objective.replay(batch, theirs_lower, 6)
    assert mine.objective.replay(batch, lower, 6) == replayed
    window = PACKING.window if packing else 256
    alike = replace(adapter, config=replace(adapter.config, stream_window=window))
    fused = attach_adapter(load_base(tmp_path / "base", "float32")[0], alike, merge_lora=True)
    ends = []
    second = StreamFusedModel.second_pass
    monkeypatch.setattr(
        StreamFusedModel, "second_pass", lambda *one: ends.append(second(*one)) or ends[-1]
    )
    streams = mine.objective._hidden_states_by_kind(batch, lower)["stream"].reshape(
        *batch.anchors.shape, 3, -1
    )
    guesses = mine.objective.guesses(batch, lower, 16)
    for (row, places, answer), found in zip(batch.answers_with_anchors(), guesses, strict=True):
        first = batch.anchors[row, places.start]
        text = batch.tokens[row, batch.pads[row] : first + len(answer)].tolist()
        prompt = text[: len(text) + 1 - len(answer)]
        along = compute_guesses(fused, prompt, answer.tolist(), 16)
        assert (along.tokens == found.tokens).all()
        assert gap(along.logprobs, found.logprobs) < 1e-4
        ends.clear()
        drafter = StreamDrafter(fused, TreeConfig(kind="full", width=1), 3)
        first_tokens(speculative_steps(fused, text, [drafter]), 2)
        assert gap(streams[row, places.stop - 1], ends[0][0]) < 1e-4
    for _ in range(2):
        assert mine.advance(batch, lower) == pytest.approx(
            theirs.advance(batch, theirs_lower), rel=1e-5
        )
    assert max(gap(mine.weights[n], p) for n, p in theirs.named.items()) < 1e-4
    written = replace_trained_weights(adapter, model)
    assert gap(written.streams.condition.out, mine.weights["condition.out.weight"]) < 1e-4
    own = mine.objective.model.adapter.trained_lora
    trained = adapter.trained_lora
    assert all(own[path].a is old.a and own[path].b is old.b for path, old in trained.items())


@pytest.mark.parametrize("with_bias", [False, True])
def test_pytorchs_loss_and_gradient_are_those_of_cross_entropy(monkeypatch, with_bias):
    """The weight is trained where it has no bias, as drafting heads are."""
    monkeypatch.setattr("ssmlx.training.objective._CHUNK_LOGITS", 7 * 11)  # several chunks
    torch.manual_seed(0)
    hidden = torch.randn(23, 5, requires_grad=True)
    weight = torch.randn(11, 5)
    bias = torch.randn(11) if with_bias else None
    weight.requires_grad_(not with_bias)
    targets = torch.randint(0, 11, (23,))
    total, losses = torch_run.LinearCrossEntropy.apply(hidden, weight, bias, targets, 0.3 / 23)
    (2 * total).backward()
    twin, twins_weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    expected = 0.3 * F.cross_entropy(F.linear(twin, twins_weight, bias), targets)
    (2 * expected).backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gap(hidden.grad, twin.grad) < 5e-5
    assert with_bias or gap(weight.grad, twins_weight.grad) < 5e-5
    assert losses.mean().item() == pytest.approx(expected.item() / 0.3, rel=1e-5)


@pytest.mark.parametrize("vocab_size", [13, 50_001])
def test_small_probabilities_count(vocab_size):
    logits = np.random.default_rng(0).normal(0, 2.5, (4, vocab_size)).astype(np.float32)
    logits[:, 7] += 20  # beside it, each of the others is below float32's resolution
    exact = logits.astype(np.float64)
    top = exact.max(axis=1, keepdims=True)
    probs = np.exp(exact - top)
    expected = top[:, 0] + np.log(probs.sum(axis=1))
    probs /= probs.sum(axis=1, keepdims=True)
    targets = np.array([7, 0, 7, 12])
    losses, found = mlx_trainer.cross_entropies_and_probs(mx.array(logits), mx.array(targets))
    assert gap(losses, expected - exact[np.arange(4), targets]) < 5e-6
    assert gap(found, probs) < 5e-5


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_batch_costs_what_eq_5_says_of_each_example(base, scope, reduced):
    """Padded and bucketed, the sum is what the plain forward gives example by example."""
    vocab = np.arange(0, real.VOCAB, 2, dtype=np.int32) if reduced else None
    alphas = (0.5, 0.25, 0.125)
    objective = torch_objective(
        base,
        vocab,
        adapter_scope=scope,
        stream_weights=alphas,
        prune_weight=0.0,
        root_dropout=0.0,
    )
    examples = real.random_examples(5)
    batch = some_batch()
    losses = {stream: [] for stream in range(4)}
    with torch.no_grad():
        total, parts = objective.loss_and_term_means(batch, objective.lower(batch), 0)
        outputs = [objective.model(torch.from_numpy(e.tokens).long()[None]) for e in examples]
    for example, output in zip(examples, outputs, strict=True):
        for place in range(example.start - 1, len(example.tokens) - 1):
            for stream, target in enumerate(example.tokens[place + 1 : place + 5]):
                logits = output.main_logits[0, place]
                if stream:
                    logits = output.stream_logits[0, place, stream - 1]
                    if reduced and target % 2:
                        continue
                    target = target // 2 if reduced else target
                losses[stream].append(float(F.cross_entropy(logits, torch.tensor(int(target)))))
    means = [float(np.mean(losses[stream])) for stream in range(4)]
    assert ("main_loss" in parts) == (scope == "all")
    found = [parts[f"stream_{stream}_loss"] for stream in (1, 2, 3)]
    assert found == pytest.approx(means[1:], rel=1e-5)
    expected = sum(a * m for a, m in zip(alphas, means[1:], strict=True))
    assert float(total) == pytest.approx(expected + means[0] * (scope == "all"), rel=1e-5)


@pytest.mark.parametrize("kind", [STREAM, PRUNE])
def test_in_turn_every_carrier_teaches(base, kind):
    objective = torch_objective(base, condition_rank=4)
    batch = some_batch()
    every = [
        t for step in range(STRIDE) for t in objective.loss_terms(batch, step) if t.kind == kind
    ]
    rows = np.concatenate([term.rows.flatten() for term in every])
    assert len({*rows}) == len(rows) == batch.anchors.size * (3 if kind == STREAM else 1)


def test_the_pruning_loss_reaches_its_adapter_alone(base):
    objective = torch_objective(base, stream_weights=(0.0,), main_weight=0.0, prune_weight=1.0)
    trainer = TorchTrainer(objective, 10)
    batch = some_batch()
    total, parts = objective.loss_and_term_means(batch, objective.lower(batch), 0)
    total.backward()
    assert parts["prune_loss"] > 0
    moved = {n for n, p in trainer.named.items() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved == {"prune_adapter.lora_A.weight", "prune_adapter.lora_B.weight"}


def test_scope_streams_leaves_the_node_rows_to_the_base(base):
    objective = mlx_objective(base, adapter_scope="streams")
    batch = some_batch(3)
    layout = Layout.of(batch, 3)
    nodes, _ = objective.model.upper_before_norm(objective.model.lower(layout), layout)
    plain = load_base(base, "float32")[0]
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        tokens = mx.array(batch.tokens[row, pad : pad + length])
        normed = objective.model.backbone.final_norm(nodes[row, pad : pad + length])
        found = objective.model.head(uses_draft_head=False)(normed)
        assert gap(found, plain.model(tokens[None])[0]) < 5e-5


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Phi3"])
@pytest.mark.parametrize("design", ["embeddings", "value_rotation"])
def test_sparse_stream_attention_is_the_dense_one(monkeypatch, architecture, design):
    torch.manual_seed(3)
    base = make_torch_base(architecture, attention="sdpa")
    rotation = {"stream_design": design, "rotation_step": 0.1 if design != "embeddings" else 0.0}
    _, config = settings(
        base.config.num_hidden_layers,
        base.config.hidden_size,
        prune_rank=0,
        stream_init="identity",
        **rotation,
    )
    model = StreamFusedReference(base, config, lora=LoraSettings(2))
    batch = some_batch(4)
    where = {
        "positions": torch.from_numpy(batch.positions).long(),
        "visible": torch.from_numpy(batch.causal_visible),
        "stream_rows": torch.from_numpy(batch.anchors),
    }

    def gradients():
        model.zero_grad()
        output = model(torch.from_numpy(batch.tokens).long(), **where)
        (output.stream_logits.sin().sum() + output.main_logits.sin().sum()).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        return output.stream_logits.detach(), grads

    dense, dense_grads = gradients()
    calls = []
    monkeypatch.setattr(
        "convert.training.run.stream_attention",
        lambda *args: calls.append(1) or stream_attention(*args),
    )
    use_stream_attention(base, 3)
    sparse, sparse_grads = gradients()
    assert len(calls) == config.num_msa_layers
    assert gap(sparse, dense) < 5e-5
    gaps = {name: gap(sparse_grads[name], grad) for name, grad in dense_grads.items()}
    assert max(gaps.values()) < 1e-4, gaps


def test_packed_weights_stay_packed_and_give_the_same_step(packed_base):
    batch = some_batch()
    found = []
    for dtype in ("stored", "float32"):
        backbone = load_trainable_base(packed_base, dtype)
        kinds = {type(m) for _, m in backbone.layers[-1].named_modules()}
        assert (nn.QuantizedLinear in kinds) == (dtype == "stored")
        assert backbone.dtype == mx.float32
        trainer = MlxTrainer(mlx_objective(backbone=backbone, stream_init="identity"), 10)
        found.append(trainer.gradients(batch, trainer.objective.lower(batch)))
    (mine, losses), (expected, expected_losses) = found
    assert gap(mx.stack(losses), mx.stack(expected_losses)) < 1e-4
    assert max(gap(mine[name], gradient) for name, gradient in expected.items()) < 1e-3


@both
def test_bfloat16_holds_what_is_trained_in_float32(base, command):
    if command is MLX:
        backbone = load_trainable_base(base, "bfloat16")
        trainer = MlxTrainer(mlx_objective(backbone=backbone), 10)
        trained = {array.dtype for array in trainer.weights.values()}
        leaves = tree_flatten(backbone.model.parameters())
        frozen = {array.dtype for name, array in leaves if "lora" not in name}
        assert (trained, frozen) == ({mx.float32}, {mx.bfloat16})
    else:
        trainer = TorchTrainer(torch_objective(base, dtype=torch.bfloat16), 10)
        model = trainer.objective.model
        trained = {p.dtype for p in trainer.named.values()}
        frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert (trained, frozen) == ({torch.float32}, {torch.bfloat16})
    exact = trainer_of(base, command)
    batch = some_batch()
    rough = trainer.objective.mean_losses(batch, trainer.objective.lower(batch))
    fine = exact.objective.mean_losses(batch, exact.objective.lower(batch))
    assert rough == pytest.approx(fine, rel=0.05)


@both
def test_stored_lower_states_are_those_of_the_layers(base, tmp_path, monkeypatch, command):
    monkeypatch.setattr("ssmlx.training.objective._BATCHES_PER_MARK", 1)
    objective = trainer_of(base, command).objective
    examples = real.random_examples(70)
    calls = []
    lower = objective.lower

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
        store().fill_missing()
    for _ in range(2):
        store().fill_missing()
    assert sum(calls) == 70  # nothing is computed twice, or left out
    batch = collate(examples, np.array([3, 44, 9]))
    found = store().read_batch(batch)
    expected = lower(batch)
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        assert gap(found[row, pad : pad + length], expected[row, pad : pad + length]) < 5e-5
    store("another model").fill_missing()
    assert sum(calls) == 140
    (tmp_path / "states.json").write_text("[")  # cut off
    store("another model").fill_missing()
    assert sum(calls) == 210
    objective.to_bits = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    refusals.refusal(store("a third").fill_missing)


@both
def test_a_run_that_stops_goes_on_to_the_same_result(base, data, tmp_path, command):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    command.train(base, data, whole, "--epochs", "2")
    for stop in (["--max-steps", "4"], ["--max-steps", "7"], []):
        command.train(base, data, parts, "--epochs", "2", *stop)
    assert command.weights(whole) == command.weights(parts)
    logs = [read_log_entries(out / LOG_FILE) for out in (whole, parts)]
    assert [e["step"] for e in logs[1]] == list(range(1, 13))
    assert [e["main_loss"] for e in logs[0]] == [e["main_loss"] for e in logs[1]]


@pytest.mark.slow
@both
def test_a_killed_run_goes_on_to_the_same_result(base, data, tmp_path, command):
    out = tmp_path / "killed"
    more = ("--epochs", "20", "--save-every", "2")
    arguments = command.argv(base, data, out, *more)
    real.kill_once_there(out / command.state, command.prog, arguments)
    assert 0 < len(read_log_entries(out / LOG_FILE)) < 120
    assert command.main(arguments) == 0
    command.train(base, data, tmp_path / "whole", *more)
    assert command.weights(tmp_path / "whole") == command.weights(out)


def own_answers(base, folder):
    """Twelve prompts with the base model's own answers."""
    model, tokenizer = ssmlx.load(str(base), adapter="none")
    prompts = [[first, first + 1] for first in range(7, 19)]
    found = [(p, real.answer(model, tokenizer, p, max_tokens=8)[0]) for p in prompts]
    return real.write_data(folder, [{"prompt_tokens": p, "completion_tokens": t} for p, t in found])


def adapter_of(command, base, run, tmp_path):
    """A run's adapter, converted where it is PyTorch's."""
    if command is MLX:
        return run
    out = tmp_path / "adapter"
    assert convert(["--base", str(base), "--lora", str(run), "--out", str(out)]) == 0
    return out


def answer_of(base, adapter, prompt, decoding):
    """(tokens, target calls) of at most 8 tokens."""
    model, tokenizer = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens, last = real.answer(model, tokenizer, prompt, decoding=decoding, max_tokens=8)
    return tokens, last.target_calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "scope"), [(MLX, "all"), (MLX, "streams"), (TORCH, "all")],
    ids=["ssmlx-all", "ssmlx-streams", "convert"],
)  # fmt: skip
def test_what_it_learns_shows_when_it_decodes(base, data, tmp_path, command, scope):
    """From data to an adapter that answers in fewer calls, and as plain decoding does."""
    if scope == "streams":
        data = own_answers(base, tmp_path / "own")
    run = tmp_path / "run"
    more = ("--adapter-scope", scope, "--draft-vocab-size", "60")
    result = command.train(base, data, run, *more, "--epochs", "60")
    log = read_log_entries(run / LOG_FILE)
    assert log[-1]["tokens_per_call"] > 1.8
    assert log[-1]["stream_2_loss"] < 0.5 * log[0]["stream_2_loss"]
    assert json.loads((run / SETTINGS_FILE).read_text())["draft_vocab_coverage"] == 1.0
    assert (run / "curves.png").stat().st_size > 10_000
    line = json.loads((data / "train.jsonl").read_text().splitlines()[3])
    prompt = line.get("prompt_tokens") or line["prompt"]
    adapter = adapter_of(command, base, result, tmp_path)
    tokens, calls = answer_of(base, adapter, prompt, "speculative")
    plain, plain_calls = answer_of(base, adapter, prompt, "plain")
    assert tokens == plain
    _, tokenizer = ssmlx.load(str(base), adapter="none")
    expected = line.get("completion_tokens") or tokenizer.encode(line["completion"])
    assert plain[: len(expected)] == expected[:8]
    assert calls <= 5 < plain_calls


@pytest.mark.parametrize(("command", "more"), [
    (MLX, ALONE),
    (TORCH, ALONE),
    (MLX, ("--stream-design", "value_rotation", "--rotation-step", "0.3")),
    (TORCH, ("--lora-modules", "q_proj", *OWN)),
    (MLX, ("--stream-init", "residual", "--stream-init-rank", "3", "--cache-gb", "0")),
])  # fmt: skip
def test_every_kind_of_adapter_loads(base, data, tmp_path, command, more):
    run = tmp_path / "run"
    result = command.train(base, data, run, *more, "--epochs", "1")
    assert any(run.glob("lower.states*")) == ("--cache-gb" not in more)
    adapter = adapter_of(command, base, result, tmp_path)
    plain, calls = answer_of(base, adapter, real.words(3), "plain")
    assert len(plain) == calls == 8
    if more is not ALONE:
        assert answer_of(base, adapter, real.words(3), "speculative")[0] == plain
    if command is TORCH:
        streams = load_reference(load_torch_base(base), run).config.num_streams
        assert streams == (0 if more is ALONE else 2)


def test_a_packed_model_trains_and_decodes(packed_base, data, tmp_path):
    adapter = MLX.train(packed_base, data, tmp_path, "--dtype", "stored", "--max-steps", "3")
    model, tokenizer = ssmlx.load(str(packed_base), adapter=adapter, dtype="stored")
    assert ssmlx.generate(model, tokenizer, real.words(3), max_tokens=3)


@both
@pytest.mark.slow
def test_a_run_starts_from_another_runs_weights(base, data, tmp_path, command):
    """From a LoRA alone: its LoRA at step 0, streams anew; a stopped run still goes on."""
    lora, out, whole, twin = (tmp_path / name for name in ("lora", "out", "whole", "twin"))
    init = ("--init", command.train(base, data, lora, *ALONE, "--max-steps", "4"))
    command.train(base, data, out, *init, "--learning-rate", "1e-30", "--max-steps", "1")
    first = command.weights(lora)
    started = command.weights(out)
    assert first.items() <= started.items()
    assert "stream_embeddings" in started.keys() - first.keys()
    assert any(
        np.frombuffer(w, np.float32).any() for n, w in first.items() if "lora_b" in n.lower()
    )
    for folder, stops in ((whole, ("6",)), (twin, ("3", "6"))):
        for stop in stops:
            command.train(base, data, folder, *init, "--max-steps", stop)
    assert command.weights(whole) == command.weights(twin)


@pytest.fixture(scope="module")
def streams(base, data, tmp_path_factory):
    """An adapter without a condition."""
    out = tmp_path_factory.mktemp("streams")
    more = (*OWN, "--draft-vocab-size", "60")
    return MLX.train(base, data, out, *more, "--max-steps", "3")


ALONG = ("--train-only", "condition", "--condition-rank", "4", "--dtype", "float32",
         "--batch-size", "4", "--save-every", "2", "--valid-count", "4")  # fmt: skip


def add_condition(command, base, data, init, out, *more):
    places = ("--model", base, "--data", data, "--init", init, "--out", out)
    return command.main([str(one) for one in (*places, *ALONG, *command.options, *more)])


@both
@pytest.mark.slow
def test_a_condition_is_added_to_streams_that_stay(base, data, streams, tmp_path, command):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    for out, stops in ((whole, [()]), (parts, [("--max-steps", "3"), ("--max-steps", "7"), ()])):
        for stop in stops:
            assert add_condition(command, base, data, streams, out, *stop) == 0
    found = MLX.weights(whole)
    assert found == MLX.weights(parts)
    old = {
        n: a for path in streams.glob("*.safetensors") for n, a in read_tensors(path, "").items()
    }
    assert found.keys() - old.keys() == {f"condition.{n}.weight" for n in ("embed", "gate", "out")}
    assert all(found[name] == np.array(array).tobytes() for name, array in old.items())
    assert np.frombuffer(found["condition.out.weight"], np.float32).any()  # zero when new
    before = load_adapter(streams)
    after = load_adapter(whole / MLX.result)
    assert after.config == replace(before.config, condition_rank=4)
    assert after.config.tokens_per_call
    log = read_log_entries(whole / LOG_FILE)
    assert [name for name in log[0] if "loss" in name] == ["given_1_loss", "given_2_loss"]
    assert log[-1]["given_2_loss"] < log[0]["given_2_loss"]
    assert (
        answer_of(base, whole, real.words(3), "speculative")[0]
        == answer_of(base, "none", real.words(3), "plain")[0]
    )
    packed = ("--pack", "32", "--max-steps", "1")
    assert add_condition(command, base, data, whole, tmp_path / "on", *packed) == 0
    first = command.train(base, data, tmp_path / "first", "--max-steps", "1")
    more = ("--init", first, "--condition-rank", "3", "--max-steps", "2")
    assert "condition.gate.weight" in command.weights(
        command.train(base, data, tmp_path / "both", *more) and tmp_path / "both"
    )


CONDITIONS = [
    (("--condition-rank", "0"), "--condition-rank 0"),
    (("--condition-rank", "-1"), "--condition-rank -1"),
    (("--init", "nowhere"), "nowhere"),
    (("--init", "none"), "--train-only --init"),
    *(((flag, value), flag) for flag, value in {
        "--num-streams": "3", "--lora-rank": "3", "--template": "{prompt} .",
        "--task-lora": "folder",
    }.items()),
    (("--train-only", "streams", "--num-streams", "3"), "--num-streams"),
    (("--train-only", "streams", "--init", "none"), "--train-only streams --init"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "named"), CONDITIONS)
def test_what_a_condition_cannot_be_trained_with_is_refused(
    base, data, streams, tmp_path, capsys, more, named
):
    assert add_condition(MLX, base, data, streams, tmp_path / "run", *more) == 2
    line = refusals.one_line(capsys.readouterr().err, MLX.prog)
    assert mentions(found_in(line), *named.split())


STARTS = [
    (("--lora-rank", "8", "--lora-alpha", "64"), ".lora_"),
    (("--lora-rank", "8"), "8"),
    (("--num-streams", "3"), "stream_embeddings"),
    (("--prune-rank", "0"), "prune_adapter"),
    (("--num-msa-layers", "1"), "num_msa_layers 2"),
    (("--stream-init", "identity"), "stream_init low_rank"),
    (("--stream-init-rank", "8"), "stream_init_rank 32"),
    (("--stream-design", "value_rotation", "--rotation-step", "0.1"), "stream_design embeddings"),
]


@both
def test_a_start_of_other_settings_is_refused(base, data, tmp_path, capsys, command):
    first = command.train(base, data, tmp_path / "first", "--max-steps", "1")
    run = tmp_path / "run"
    for more, named in STARTS:
        line = command.refusal(capsys, base, data, run, "--init", first, *more)
        assert all(one in line for one in named.split()), line
    assert "nowhere" in command.refusal(capsys, base, data, run, "--init", tmp_path / "nowhere")
    assert not (run / command.state).exists()


BAD_OPTIONS = [
    (MLX, ("--num-msa-layers", "9"), "num_msa_layers 9 4"),
    (MLX, ("--draft-vocab-size", "999"), "draft_vocab_size 999 64"),
    (MLX, ("--condition-rank", "4", *ALONE), "--condition-rank 4"),
    (MLX, ("--lora-modules", "query"), "query"),
    (TORCH, ("--lora-modules", "query"), "query"),
    (MLX, ("--template", "no place"), "'no"),
    (MLX, ("--learning-rate", "nan"), "--learning-rate nan"),
    (MLX, ("--main-weight", "1e38"), "1"),
    (MLX, ("--rotation-step", "9", "--stream-design", "value_rotation"), "--rotation-step 9"),
    (TORCH, ("--max-steps", "0"), "--max-steps 0"),
    (MLX, ("--tree-size", "9999"), "--tree-size 9999"),
    (MLX, ("--cache-gb", "-1"), "--cache-gb -1"),
    (TORCH, ("--data", "nowhere"), "nowhere"),
    (MLX, ("--max-length", "1"), "--max-length"),
    (MLX, ("--model", "nowhere/at/all"), "nowhere/at/all"),
    pytest.param(
        TORCH, ("--device", "cuda"), "cuda",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "more", "named"), BAD_OPTIONS)
def test_bad_options_are_one_line(base, data, tmp_path, capsys, command, more, named):
    line = command.refusal(capsys, base, data, tmp_path / "run", *more)
    assert all(mentions(line, one) for one in named.split()), line
    assert not (tmp_path / "run" / command.state).exists()


def test_what_cannot_be_read_or_written_is_named(base, data, tmp_path, capsys):
    run = tmp_path / "run"
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in MLX.refusal(capsys, base, data, tmp_path / "file")
    assert not run.exists()
    good = '{"prompt": "w1", "completion": "w2 w3"}\n'
    for line, named in (
        ("{", "train.jsonl 2"),
        ('{"question": "w1"}', "train.jsonl 2 question"),
        ('{"prompt_tokens": ["w"], "completion_tokens": [3]}', "train.jsonl 2"),
        ('{"prompt_tokens": [1], "completion_tokens": [64]}', "train.jsonl 64"),
        ('{"prompt_tokens": [-1], "completion_tokens": [3]}', "train.jsonl 2 -1"),
    ):
        (tmp_path / "train.jsonl").write_text(good + line + "\n")
        (tmp_path / "valid.jsonl").write_text(good)
        assert mentions(found_in(MLX.refusal(capsys, base, tmp_path, run)), *named.split())
    (tmp_path / "train.jsonl").write_bytes(b"\xff\n")
    assert mentions(MLX.refusal(capsys, base, tmp_path, run), "train.jsonl", "1")


@both
def test_a_full_disk_is_one_line(base, data, tmp_path, capsys, monkeypatch, command):
    def write(self, path, identity):
        path.write_text("part")
        raise RuntimeError("[write] Unable to write 9 bytes to file.")

    monkeypatch.setattr(MlxTrainer if command is MLX else TorchTrainer, "write", write)
    out = tmp_path / "run"
    command.refusal(capsys, base, data, out, "--max-steps", "1")
    assert not list(out.glob("new.*")) and not (out / command.state).exists()


@both
def test_another_runs_folder_is_refused(base, data, tmp_path, capsys, command):
    state = tmp_path / command.state
    mine = tmp_path / "base"
    mine.symlink_to(base)
    command.train(mine, data, tmp_path, "--max-steps", "3")
    before = state.read_bytes()
    for other in (("--seed", "5"), ("--dtype", "bfloat16")):
        line = command.refusal(capsys, mine, data, tmp_path, *other)
        assert mentions(found_in(line), str(tmp_path), *other)
    mine.unlink()
    mine.symlink_to(real.write_base(tmp_path / "other", seed=1))
    assert str(tmp_path) in found_in(command.refusal(capsys, mine, data, tmp_path))
    assert state.read_bytes() == before
    state.write_bytes(before[: len(before) // 2])
    assert str(state) in command.refusal(capsys, mine, data, tmp_path)


def test_a_gradient_that_is_no_number_spoils_no_state(base, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainConfig, "learning_rate_at", lambda train, step, num_steps: 1e30)
    line = TORCH.refusal(capsys, base, data, tmp_path, "--save-every", "1")
    assert mentions(line, "2", "nan")
    assert torch.load(tmp_path / TORCH.state, weights_only=True)["step"] == 1


@both
def test_a_step_whose_gradient_is_no_number_changes_nothing(base, command):
    """Weights, moments and the step: what follows is what follows without it."""
    batch = some_batch()
    found = []
    for spoils in (False, True):
        torch.manual_seed(0)
        trainer = trainer_of(base, command)
        lower = trainer.objective.lower(batch)
        trainer.advance(batch, lower)
        if spoils:
            line = refusals.refusal(trainer.advance, batch, lower * float("nan"))
            assert mentions(line, "2", "nan")
        losses = trainer.advance(batch, lower)
        held = trainer.weights if command is MLX else trainer.named
        weights = {
            name: np.array(one if command is MLX else one.detach().numpy()).tobytes()
            for name, one in held.items()
        }
        found.append((losses, weights))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def task(base, data, tmp_path_factory):
    """The LoRA of a task, as the command writes it."""
    out = tmp_path_factory.mktemp("task")
    more = ("--num-msa-layers", "3", "--epochs", "4")
    return MLX.train(base, data, out, *ALONE, *more)


@pytest.mark.parametrize(("count", "ranks"), [(5, 2), (2, 3)])  # the third has no example
def test_parts_of_a_batch_add_up_to_it(base, count, ranks):
    batch = some_batch(count)
    vocab = np.arange(0, real.VOCAB, 2, dtype=np.int32)
    trainer = MlxTrainer(mlx_objective(base, vocab), 10)

    def flat(of: Batch) -> mx.array:
        gradients, means = trainer.gradients(of, trainer.objective.lower(of))
        return mx.concatenate([*(array.flatten() for array in gradients.values()), mx.stack(means)])

    found = sum(flat(batch.part_of_rank(rank, ranks)) for rank in range(ranks))
    assert gap(found, flat(batch)) < 5e-5


def test_a_step_beside_a_tasks_lora_is_a_step_on_the_merged_model(base, task):
    batch = some_batch()
    found = []
    for apart in (False, True):
        backbone = load_base(base, "float32")[0]
        lora = read_task_lora(task, backbone)
        if not apart:
            attach_lora(backbone.model, lora, RowScope(0), merge=True, dtype=mx.float32)
            lora = {}
        objective = mlx_objective(backbone=backbone, adapter_scope="streams", task_lora=lora)
        kinds = {type(m) for _, m in backbone.layers[1].named_modules()}
        assert RowLora not in kinds  # merged, where nothing is packed
        found.append(MlxTrainer(objective, 10).gradients(batch, objective.lower(batch)))
    (mine, losses), (expected, expected_losses) = found
    assert gap(mx.stack(losses), mx.stack(expected_losses)) < 5e-5
    assert mine.keys() == expected.keys()
    assert max(gap(mine[name], gradient) for name, gradient in expected.items()) < 5e-5


@pytest.mark.parametrize("kind", ["whole", "packed"])
def test_streams_learn_to_draft_for_a_fine_tuned_model(
    base, packed_base, data, task, tmp_path, capsys, kind
):
    folder = base if kind == "whole" else packed_base
    own = (*OWN, "--epochs", "6")
    result = MLX.train(folder, data, tmp_path, *own, "--task-lora", task)
    assert str(tmp_path) in found_in(MLX.refusal(capsys, folder, data, tmp_path, *own))
    line = MLX.refusal(capsys, folder, data, tmp_path / "on", *own, "--init", result)
    assert mentions(line, "--task-lora", "--train-only streams")
    adapter = load_adapter(result)
    alone = load_adapter(task)
    assert adapter.config.adapter_scope == "streams" and alone.config.adapter_scope == "all"
    assert adapter.task_lora.keys() == alone.lora.keys()
    for path, weights in alone.lora.items():
        assert mx.array_equal(adapter.task_lora[path].a, weights.a)
        assert mx.array_equal(adapter.task_lora[path].b, weights.b)
    assert any(mx.abs(weights.b).max() > 0 for weights in adapter.stream_lora.values())
    prompt = real.words(2, first=3)
    expected, _ = answer_of(folder, task, prompt, "plain")
    assert answer_of(folder, result, prompt, "plain")[0] == expected
    assert answer_of(folder, result, prompt, "speculative")[0] == expected
    assert answer_of(folder, "none", prompt, "plain")[0] != expected


@both
def test_streams_of_an_adapter_go_on_as_in_a_run_with_its_settings(
    base, data, task, tmp_path, command
):
    own = (*OWN, "--task-lora", task, "--condition-rank", "4")
    first = MLX.train(base, data, tmp_path / "first", *own, "--max-steps", "3")
    parts = tmp_path / "parts"
    own = (*own, "--pack", "32")
    expected = MLX.train(base, data, tmp_path / "on", *own, "--init", first)
    more = ("--train-only", "streams", "--condition-rank", "0", "--learning-rate", "0.01")
    for stop in (("--max-steps", "5"), ()):
        assert add_condition(command, base, data, first, parts, *more, *own[-2:], *stop) == 0
    whole, found = (load_adapter(one) for one in (expected, parts / MLX.result))
    assert found.config == load_adapter(first).config
    assert found.task_lora.keys() == whole.task_lora.keys()
    for path, weights in whole.task_lora.items():
        assert mx.array_equal(found.task_lora[path].a, weights.a)
        assert mx.array_equal(found.task_lora[path].b, weights.b)
    assert found.stream_lora.keys() == whole.stream_lora.keys()
    trained, wanted = (trainable_weights(one) for one in (found, whole))
    started = trainable_weights(load_adapter(first))
    assert trained.keys() == wanted.keys() == started.keys()
    for name, array in wanted.items():
        # Adam divides noise by noise where gradients are small.
        assert gap(trained[name], array) < 2e-3 and not mx.array_equal(trained[name], started[name])


@pytest.mark.parametrize("command", [MLX, TORCH])
def test_an_adapter_gets_a_start_from_the_root(base, data, tmp_path, command, capsys):
    none = ("--root-init-rank", "0", "--max-steps", "2")
    first = MLX.train(base, data, tmp_path / "first", *OWN, *none)
    root = ("--root-init-rank", "3", "--max-steps", "2")
    assert load_adapter(first).config.root_init_rank == 0
    for part in ("streams", "condition"):
        more = ("--train-only", part, *root)
        if add_condition(command, base, data, first, tmp_path / part, *more) == 0:
            found = load_adapter(tmp_path / part / MLX.result)
            assert found.config.root_init_rank == 3 and found.streams.root_init.b.any()
            assert found.config.starts_without_root
    assert part == "condition" and not (tmp_path / part).exists()
    assert mentions(capsys.readouterr().err, "--root-init-rank")


def test_a_lora_that_is_no_task_of_this_model_is_refused(base, data, task, tmp_path, capsys):
    def refused(*more):
        return MLX.refusal(capsys, base, data, tmp_path / "run", *more)

    own = (*OWN, "--task-lora")
    assert mentions(refused("--task-lora", task), "--task-lora", "--adapter-scope all")
    assert str(tmp_path / "none") in refused(*own, tmp_path / "none")
    other = real.write_base(tmp_path / "other", norm=0.5)
    others = MLX.train(other, data, tmp_path / "others", *ALONE, "--max-steps", "1")
    assert mentions(refused(*own, others), "norm")
    (tmp_path / "mlx").mkdir()
    values = {"fine_tune_type": "full", "lora_parameters": {"scale": 2.0}}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(values))
    assert str(tmp_path / "mlx") in refused(*own, tmp_path / "mlx")


@pytest.mark.slow
def test_pytorchs_streams_draft_for_a_fine_tuned_model(base, data, tmp_path, capsys):
    """The checkpoint carries the task's LoRA, and every side computes the same with it."""
    lora = TORCH.train(base, data, tmp_path / "lora", *ALONE, "--epochs", "4")
    own = (*OWN, "--epochs", "2")
    run = TORCH.train(base, data, tmp_path / "run", *own, "--task-lora", lora)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run / TASK_LORA / name).read_bytes() == (lora / name).read_bytes()
    moved = [array for name, array in TORCH.weights(run).items() if "lora_B" in name]
    assert any(np.frombuffer(array, np.float32).any() for array in moved)

    adapter = adapter_of(TORCH, base, run, tmp_path)
    tokens = [3, 9, 4, 7]
    model, _ = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    assert model.is_fine_tuned
    ours = model.backbone.append(mx.array(tokens), model.make_cache()).logits[-1]
    tuned = merge_lora(load_fine_tuned(load_torch_base(base), lora))
    exported = build_reference(base, load_adapter(adapter), model.num_streams)
    found = [
        one(torch.tensor([tokens])).main_logits[0, -1]
        for one in (load_reference(tuned, run), exported)
    ]
    assert max(gap(ours, found[0]), gap(found[1], found[0])) < 1e-4
    assert gap(load_torch_base(base)(torch.tensor([tokens])).logits[0, -1], found[0]) > 1e-2

    assert str(run) in found_in(TORCH.refusal(capsys, base, data, run, *own))
    line = TORCH.refusal(capsys, base, data, tmp_path / "on", *own, "--init", run)
    assert mentions(line, "--task-lora", "--train-only streams")
    line = TORCH.refusal(capsys, base, data, tmp_path / "new", "--task-lora", lora)
    assert mentions(line, "--task-lora", "--adapter-scope all")
