"""The trainer of drafting heads: losses, replay, resuming, and what it writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ssmlx  # noqa: F401  first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
from real import VOCAB, WIDTH, kill_once_there, one_line, words, write_base, write_nested_base

torch = pytest.importorskip("torch")
from torch.nn import functional as F

from convert.__main__ import main as convert
from convert.base import load_base
from convert.formats.heads import DRAFT_VOCAB_FILE, load_published
from convert.reference.checkpoint import load_reference
from convert.reference.heads import MlpSpeculatorReference
from convert.reference.losses import linear_cross_entropy, mean_scales
from convert.train import main as train_streams
from convert.train_heads import (
    PROG,
    STATE_FILE,
    STORE_FILE,
    HeadSettings,
    check_continuations,
    head_config,
    main,
)
from convert.training.heads import HeadObjective, accepted_depth, build_heads, load_frozen
from convert.training.run import TorchTrainer
from ssmlx.drafters.heads import load_heads
from ssmlx.errors import InputError
from ssmlx.loading.load import load_base as load_mlx_base
from ssmlx.training.batches import BatchPlan, collate
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Example
from ssmlx.training.record import LOG_FILE, read_record

SMALL = (
    "--batch-size", "8", "--device", "cpu", "--dtype", "float32", "--template", "{prompt}",
    "--valid-count", "4", "--save-every", "3", "--valid-every", "50", "--learning-rate", "0.01",
    "--num-heads", "2",
)  # fmt: skip
KINDS = ("medusa", "mlp_speculator")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("heads") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four questions, each answered by the five words after it, six times over."""
    folder = tmp_path_factory.mktemp("data")
    lines = [
        {"prompt": words(1 + i % 3, first=i), "completion": words(5, first=i + i % 3 + 1)}
        for i in [0, 1, 2, 3] * 6
    ]
    for name in ("train", "valid"):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def argv(kind, base, data, out, *more):
    where = ["--kind", kind, "--model", str(base), "--data", str(data), "--out", str(out)]
    return [*where, *SMALL, *more]


def make_objective(base, kind, vocab=None, alphas=(1.0, 0.5, 0.25), dtype=torch.float32, **shape):
    """Heads of which every number does something, on the tiny base."""
    settings = HeadSettings(kind=kind, num_heads=3, **shape)
    train = TrainConfig(num_streams=3, prune_rank=0, stream_weights=alphas, learning_rate=0.01)
    frozen = load_frozen(base, None)
    config = head_config(settings, VOCAB, WIDTH, 0 if vocab is None else len(vocab))
    model = build_heads(config, vocab, 0, frozen.base.lm_head.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return HeadObjective(model, frozen, train, (4, 3, 2), torch.device("cpu"), dtype)


def random_examples(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 5)), int(rng.integers(2, 9))) for _ in range(count)]
    return [Example(rng.integers(0, VOCAB, p + a).astype(np.int32), p) for p, a in sizes]


# Losses -------------------------------------------------------------------------------------


def test_the_loss_reaches_hidden_states_and_weight(monkeypatch):
    monkeypatch.setattr("ssmlx.training.objective._CHUNK_LOGITS", 7 * 11)  # several chunks
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    targets = torch.randint(0, 11, (23,))
    total, losses = linear_cross_entropy(hidden, weight, None, targets, mean_scales(targets, 0.3))
    (2 * total).backward()
    twins = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    expected = 0.3 * F.cross_entropy(F.linear(*twins), targets)
    (2 * expected).backward()
    assert torch.allclose(total, expected, atol=1e-6)
    assert float(losses.mean()) == pytest.approx(expected.item() / 0.3, abs=1e-5)
    for tensor, twin in zip((hidden, weight), twins, strict=True):
        assert torch.allclose(tensor.grad, twin.grad, atol=1e-6)


SHAPES = [
    ("medusa", {}),
    ("medusa", {"share_lm_head": True}),
    ("mlp_speculator", {}),
    ("mlp_speculator", {"inner_dim": 24, "tie_weights": True, "scale_input": True}),
]


@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize("reduced", [False, True])
def test_a_batch_costs_what_each_example_costs(base, kind, shape, reduced):
    """Padded and bucketed, the sum is what the plain forward gives example by example."""
    vocab = np.arange(0, VOCAB, 2, dtype=np.int32) if reduced else None
    alphas = (1.0, 0.5, 0.25)
    objective = make_objective(base, kind, vocab, alphas, **shape)
    examples, own = random_examples(5), load_base(base)
    batch = collate(examples, np.arange(5))
    with torch.no_grad():
        total, parts = objective.loss(batch, objective.lower(batch))
    losses: list[list[float]] = [[], [], []]
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long()
        with torch.no_grad():
            hidden = own.model(tokens[None]).last_hidden_state[0]
        for place in range(example.start - 1, len(tokens) - 2):
            following = F.pad(tokens[place + 1 : place + 4], (0, 3))[:3]
            with torch.no_grad():
                if kind == "medusa":
                    logits = objective.model(hidden[place], own.lm_head)
                else:
                    logits = objective.model(hidden[place], following)
            for head in range(3):
                if place + 2 + head >= len(tokens):
                    continue
                target = int(tokens[place + 2 + head])
                if reduced and target % 2:
                    continue
                target = target // 2 if reduced else target
                losses[head].append(float(F.cross_entropy(logits[head], torch.tensor(target))))
    means = [float(np.mean(found)) for found in losses]
    for head in range(3):
        assert parts[f"head_{head + 1}_loss"] == pytest.approx(means[head], rel=1e-4)
    expected = sum(a * m for a, m in zip(alphas, means, strict=True))
    assert float(total) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "shape"), SHAPES)
def test_the_heads_learn_and_nothing_else_does(base, kind, shape):
    objective = make_objective(base, kind, **shape)
    run = TorchTrainer(objective, 20)
    before = {name: p.detach().clone() for name, p in run.named.items()}
    plan = BatchPlan(random_examples(16), 8, 0)
    first = objective.parts(plan.batch(0), objective.lower(plan.batch(0)))
    for step in range(4):
        run.advance(plan.batch(step), objective.lower(plan.batch(step)))
    assert [name for name, p in run.named.items() if torch.equal(p, before[name])] == []
    assert objective.parts(plan.batch(0), objective.lower(plan.batch(0))) != first
    frozen = {n: p for n, p in objective._frozen.base.named_parameters()}
    for name, parameter in load_base(base).named_parameters():
        assert torch.equal(parameter, frozen[name])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float32(base, kind):
    fine, rough = (make_objective(base, kind, dtype=d) for d in (torch.float32, torch.bfloat16))
    batch = collate(random_examples(5), np.arange(5))
    exact = fine.parts(batch, fine.lower(batch))
    for name, value in rough.parts(batch, rough.lower(batch)).items():
        assert value == pytest.approx(exact[name], rel=0.05)
    assert {p.dtype for p in rough.model.parameters()} == {torch.float32}


# Replay -------------------------------------------------------------------------------------


def test_accepted_depth_walks_the_kept_nodes():
    tokens = [np.array([7, 8]), np.array([1, 2, 3, 4])]
    edges = [np.log([0.6, 0.3]), np.log([0.5, 0.4, 0.9, 0.1])]
    # best first: 7 (.6), 7 1 (.3), 8 (.3), 8 3 (.27), 7 2 (.24), 8 4 (.03)
    for keep, following, depth in (
        (7, [7, 2, 9], 2), (6, [7, 2], 2), (5, [7, 2], 1), (5, [8, 3], 2), (2, [7, 1], 1),
        (2, [8], 0), (1, [7], 0), (99, [8, 4], 2), (7, [8], 1), (7, [], 0), (7, [5], 0),
    ):  # fmt: skip
        assert accepted_depth(tokens, edges, (2, 2), keep, following) == depth


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_is_what_mlx_would_draft(base, tmp_path, kind, reduced):
    """Answer by answer, with the trees that the converted heads propose."""
    from convert.formats.heads import save_published
    from ssmlx.settings import SpeculatorTreeConfig, TreeConfig

    vocab = np.arange(0, VOCAB, 3, dtype=np.int32) if reduced else None
    objective = make_objective(base, kind, vocab)
    examples = random_examples(4, seed=2)
    for example in examples:
        example.tokens[:] = example.tokens // 8 * 3  # likely enough to be guessed
    batch = collate(examples, np.arange(4))
    found = objective.replay(batch, objective.lower(batch), 24)
    save_published(objective.model, tmp_path / "files", lm_head=None)
    command = ["--heads", str(tmp_path / "files"), "--base", str(base)]
    assert convert([*command, "--out", str(tmp_path / "mlx")]) == 0
    backbone, _ = load_mlx_base(base, "float32")
    heads = load_heads(tmp_path / "mlx", backbone)
    own, calls = load_base(base), 0
    for example in examples:
        with torch.no_grad():
            every = own.model(torch.from_numpy(example.tokens).long()[None]).last_hidden_state[0]
        answer, place = example.tokens[example.start :].tolist(), 0
        calls += 1
        while place + 1 < len(answer):
            hidden = mx.array(every[example.start - 1 + place].numpy())[None]
            root = mx.array([answer[place]], mx.int32)
            if kind == "medusa":
                tree = heads.propose_tree(root, hidden, TreeConfig(kind="best", size=24))
            else:
                tree = heads.propose_tree(
                    root, hidden, SpeculatorTreeConfig(widths=(4, 3, 2), size=24)
                )
            place += 1 + longest(tree, answer[place + 1 :])
            calls += 1
    assert (found.num_calls, found.num_tokens) == (calls, sum(e.num_answer for e in examples))
    assert backbone.final_norm is backbone.model.model.norm


def longest(tree, following):
    tokens, paths, depths = (np.array(a) for a in (tree.tokens, tree.paths, tree.depths))
    return max(
        depth
        for path, depth in zip(paths, depths, strict=True)
        if tokens[path[1 : depth + 1]].tolist() == following[:depth]
    )


# The command --------------------------------------------------------------------------------


def weights(out):
    return dict(load_published(out).named_parameters())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("medusa", ("--draft-vocab-size", "20")),
        ("mlp_speculator", ("--tie-weights", "--inner-dim", "16", "--num-heads", "3")),
    ],
)
def test_a_run_that_stops_goes_on_to_the_same_result(base, data, tmp_path, kind, more):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = (*more, "--epochs", "2")
    assert main(argv(kind, base, data, whole, *more)) == 0
    for stop in ("2", "4"):
        assert main(argv(kind, base, data, parts, *more, "--max-steps", stop)) == 0
    assert main(argv(kind, base, data, parts, *more)) == 0
    left, right = weights(whole), weights(parts)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    logs = [read_record(out / LOG_FILE) for out in (whole, parts)]
    assert [e["step"] for e in logs[1]] == list(range(1, 7))
    assert [e["head_1_loss"] for e in logs[0]] == [e["head_1_loss"] for e in logs[1]]


def test_a_killed_run_goes_on_to_the_same_result(base, data, tmp_path):
    out = tmp_path / "killed"
    arguments = argv("medusa", base, data, out, "--epochs", "20", "--save-every", "2")
    kill_once_there(out / STATE_FILE, PROG, arguments)
    assert 0 < torch.load(out / STATE_FILE, weights_only=True)["step"] < 60
    assert main(arguments) == 0
    whole = tmp_path / "whole"
    more = ("--epochs", "20", "--save-every", "2")
    assert main(argv("medusa", base, data, whole, *more)) == 0
    left, right = weights(whole), weights(out)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("medusa", ()),
        ("medusa", ("--draft-vocab-size", "60")),
        ("medusa", ("--share-lm-head",)),
        ("mlp_speculator", ()),
        ("mlp_speculator", ("--draft-vocab-size", "60", "--scale-input")),
    ],
)
def test_what_it_learns_shows_when_it_drafts(base, data, tmp_path, kind, more):
    """From data to heads in MLX, which guess what follows."""
    run, folder = tmp_path / "run", tmp_path / "heads"
    assert main(argv(kind, base, data, run, "--epochs", "40", "--tree-size", "8", *more)) == 0
    log = read_record(run / LOG_FILE)
    assert log[-1]["tokens_per_call"] > 1.8
    assert log[-1]["head_2_loss"] < 0.5 * log[0]["head_2_loss"]
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / DRAFT_VOCAB_FILE).exists() == ("--draft-vocab-size" in more)
    assert convert(["--base", str(base), "--heads", str(run), "--out", str(folder)]) == 0
    backbone, _ = load_mlx_base(base, "float32")
    heads = load_heads(folder, backbone)
    assert heads.draft_vocab_size == (60 if "--draft-vocab-size" in more else VOCAB)


def test_heads_for_a_fine_tuned_model(base, data, tmp_path):
    """The hidden states are the fine-tuned model's, and both are frozen."""
    lora, out = tmp_path / "lora", tmp_path / "run"
    options = ["--model", base, "--data", data, "--out", lora, "--num-streams", "0"]
    options += ["--prune-rank", "0", "--num-msa-layers", "2", "--device", "cpu", "--epochs", "2"]
    options += ["--template", "{prompt}", "--learning-rate", "0.01", "--lora-rank", "4"]
    assert train_streams([str(option) for option in options]) == 0
    frozen = load_frozen(base, lora)
    settings = HeadSettings(kind="medusa", num_heads=3)
    train = TrainConfig(num_streams=3, prune_rank=0)
    config = head_config(settings, VOCAB, WIDTH, 0)
    model = build_heads(config, None, 0, frozen.base.lm_head.weight)
    objective = HeadObjective(model, frozen, train, (), torch.device("cpu"), torch.float32)
    batch = collate(random_examples(1), np.arange(1))
    tokens = torch.from_numpy(batch.tokens).long()
    with torch.no_grad():
        expected = load_reference(load_base(base), lora).hidden_states(tokens).main
        plain = load_base(base).model(tokens).last_hidden_state
    assert torch.allclose(objective.lower(batch), expected, atol=1e-5)
    assert not torch.allclose(expected, plain, atol=1e-3)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert main(argv("medusa", base, data, out, "--lora", str(lora), "--epochs", "1")) == 0
    before = weights(out)
    # The store and the state know which model they are of.
    assert main(argv("medusa", base, data, out, "--epochs", "1")) == 2
    assert main(argv("medusa", base, data, tmp_path / "plain", "--epochs", "1")) == 0
    after = weights(tmp_path / "plain")
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_lora_on_streams_alone_is_refused(base, data, tmp_path, capsys):
    lora = tmp_path / "lora"
    options = ["--model", base, "--data", data, "--out", lora, "--adapter-scope", "streams",
               "--num-msa-layers", "2", "--device", "cpu", "--max-steps", "1",
               "--template", "{prompt}", "--num-streams", "1"]  # fmt: skip
    assert train_streams([str(option) for option in options]) == 0
    capsys.readouterr()
    assert main(argv("medusa", base, data, tmp_path / "run", "--lora", str(lora))) == 2
    assert "acts on streams alone" in one_line(capsys.readouterr().err, PROG)


def test_stage_2_goes_on_from_stage_1_on_the_models_own_answers(base, data, tmp_path, capsys):
    one, two, own = (tmp_path / name for name in ("one", "two", "own"))
    kind = "mlp_speculator"
    shape = ("--num-heads", "3", "--inner-dim", "16", "--widths", "4", "2", "1",
             "--draft-vocab-size", "50")  # fmt: skip
    assert main(argv(kind, base, data, one, *shape, "--epochs", "2")) == 0
    own.mkdir()
    rng = np.random.default_rng(0)
    lines = [
        {"prompt_tokens": rng.integers(7, VOCAB, 3).tolist(),
         "completion_tokens": rng.integers(7, VOCAB, 6).tolist()}
        for _ in range(12)
    ]  # fmt: skip
    for name in ("train", "valid"):
        (own / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = ["--kind", kind, "--model", str(base), "--out", str(two), "--device", "cpu"]
    start += ["--template", "{prompt}", "--valid-count", "4", "--epochs", "1", "--stage", "2"]
    capsys.readouterr()
    assert main([*start, "--data", str(own)]) == 2
    assert "--stage 2 without --init" in one_line(capsys.readouterr().err, PROG)
    start += ["--init", str(one)]
    assert main([*start, "--data", str(data)]) == 2
    assert "has no completion_tokens" in one_line(capsys.readouterr().err, PROG)
    assert main([*start, "--data", str(own), "--inner-dim", "8"]) == 2
    assert "--inner-dim would do nothing with --init" in one_line(capsys.readouterr().err, PROG)
    assert main([*start, "--data", str(own)]) == 0
    settings = json.loads((two / "training.json").read_text())["train"]
    assert (settings["learning_rate"], settings["batch_size"]) == (1e-4, 64)
    assert settings["max_length"] == 256
    model = load_published(two)
    assert isinstance(model, MlpSpeculatorReference)
    assert model.config == load_published(one).config
    assert model.config.widths == (4, 2, 1) and model.config.draft_vocab_size == 50
    before, after = weights(one), weights(two)
    gaps = [(before[name] - after[name]).abs().max().item() for name in before]
    assert 0 < max(gaps) < 0.01  # one step at stage 2's rate


def test_answers_may_hold_any_line_separator_of_unicode(tmp_path):
    row = {"completion": "w1\u2028w2\u0085w3", "completion_tokens": [1]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n", "utf-8")
    check_continuations(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match="not UTF-8 text"):
        check_continuations(tmp_path / "x.jsonl")


def test_without_room_for_the_store_the_model_runs_every_step(base, data, tmp_path):
    out = tmp_path / "run"
    assert main(argv("medusa", base, data, out, "--epochs", "1", "--cache-gb", "0")) == 0
    assert not (out / STORE_FILE).exists()
    assert main(argv("medusa", base, data, tmp_path / "stored", "--epochs", "1")) == 0
    left, right = weights(out), weights(tmp_path / "stored")
    assert all(torch.allclose(left[name], right[name], atol=1e-5) for name in left)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("medusa", ("--stage", "2"), "--stage would do nothing with --kind medusa"),
        ("medusa", ("--tie-weights",), "--tie-weights would do nothing"),
        ("mlp_speculator", ("--decay", "0.5"), "--decay would do nothing"),
        ("medusa", ("--decay", "0"), "--decay 0"),
        ("medusa", ("--num-heads", "0"), "--num-heads 0"),
        ("medusa", ("--share-lm-head", "--num-layers", "0"), "nothing would be trained"),
        ("mlp_speculator", ("--widths", "3"), "2 numbers of 1 or more"),
        ("medusa", ("--init", "nowhere"), "holds no drafting heads"),
        ("medusa", ("--data", "nowhere"), "does not exist"),
        ("medusa", ("--draft-vocab-size", "65"), "draft_vocab_size is 65 of 64 tokens"),
        ("medusa", ("--epochs", "0"), "--epochs 0"),
    ],
)
def test_bad_options_are_told_in_one_line(base, data, tmp_path, capsys, kind, more, said):
    assert main(argv(kind, base, data, tmp_path / "run", *more)) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run" / STATE_FILE).exists()


def test_a_model_of_nested_settings_is_refused(base, data, tmp_path, capsys):
    nested = write_nested_base(tmp_path / "nested", base)
    assert main(argv("medusa", nested, data, tmp_path / "run")) == 2
    assert "None for " in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run").exists()


def test_another_runs_folder_is_refused(base, data, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(argv("medusa", base, data, out, "--max-steps", "2")) == 0
    before = (out / STATE_FILE).read_bytes()
    capsys.readouterr()
    for more in (("--seed", "5"), ("--decay", "0.7"), ("--num-layers", "2")):
        assert main(argv("medusa", base, data, out, *more)) == 2
        assert "other settings" in one_line(capsys.readouterr().err, PROG)
    assert (out / STATE_FILE).read_bytes() == before
