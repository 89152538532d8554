"""The trainer of drafting heads: losses, replay, resuming, what it writes."""

import json

import numpy as np
import pytest

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import real
import refusals
from real import answer
from refusals import exits, found_in, mentions
from tiny_heads import converted

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch.nn import functional as F

from convert import train_heads
from convert.__main__ import main as convert
from convert.base import load_base
from convert.formats.heads import DRAFT_VOCAB_FILE, load_published_heads
from convert.reference.checkpoint import load_reference
from convert.reference.heads import MlpSpeculatorReference
from convert.train import main as train_streams
from convert.train_heads import HeadSettings, build_head_config
from convert.training import heads as heads_training
from convert.training.run import TorchTrainer
from ssmlx.drafters.heads import load_heads
from ssmlx.loading.load import load_base as load_mlx_base
from ssmlx.settings import SpeculatorTreeConfig, TreeConfig
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import BatchPlan, collate
from ssmlx.training.record import LOG_FILE, read_log_entries

SMALL = (
    "--batch-size", "8", "--device", "cpu", "--dtype", "float32", "--template", "{prompt}",
    "--save-every", "3", "--valid-every", "50", "--learning-rate", "0.01",
)  # fmt: skip
OWN = {
    "medusa": ("--kind", "medusa", "--num-heads", "2", "--valid-count", "4"),
    "mlp_speculator": ("--kind", "mlp_speculator", "--num-heads", "2", "--valid-count", "4"),
}
KINDS = ("medusa", "mlp_speculator")
PROMPTS = [real.words(1 + i % 3, first=3 * i) for i in range(16)]
UNSEEN = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four questions, each answered by the five words after it, six times over."""
    return real.write_data(tmp_path_factory.mktemp("data"), real.questions([0, 1, 2, 3] * 6))


@pytest.fixture(scope="module")
def own_answers(base, tmp_path_factory):
    """Prompts and the base model's own greedy answers; held out are those and four more."""
    model, tokenizer = ssmlx.load(str(base), dtype="float32")
    lines = []
    for prompt in map(tokenizer.encode, PROMPTS):
        tokens, _ = answer(model, tokenizer, prompt, decoding="plain", max_tokens=10)
        lines.append({"prompt_tokens": prompt, "completion_tokens": tokens})
    return real.write_data(tmp_path_factory.mktemp("own"), lines[:-UNSEEN], lines)


def argv(kind, base, data, out, *more):
    where = ["--model", str(base), "--data", str(data), "--out", str(out)]
    return [*where, *SMALL, *OWN[kind], *more]


def run_trainer(kind, *where_and_more):
    """The exit code of a trainer."""
    return train_heads.main(argv(kind, *where_and_more))


def train_lora(base, data, out, *more):
    options = ["--model", base, "--data", data, "--out", out, "--device", "cpu"]
    options += ["--template", "{prompt}", "--num-msa-layers", "2", *more]
    assert train_streams([str(option) for option in options]) == 0


@pytest.fixture
def refused(capsys):
    """The line that a trainer prints when it refuses to run."""

    def refused(kind, *where_and_more):
        capsys.readouterr()
        assert run_trainer(kind, *where_and_more) == 2
        return refusals.one_line(capsys.readouterr().err, train_heads.PROG)

    return refused


def weights(out):
    return dict(load_published_heads(out).named_parameters())


def near(found, expected, rel=1e-5):
    """Whether two tensors differ by no more than a part of the largest number."""
    expected = torch.as_tensor(np.asarray(expected))
    gap = (torch.as_tensor(np.asarray(found)) - expected).abs().max()
    return bool(gap <= rel * expected.abs().max())


def take_steps(objective, count=4):
    trainer = TorchTrainer(objective, 20)
    plan = BatchPlan(real.random_examples(16), 8, 0)
    for step in range(count):
        trainer.advance(plan.batch(step), objective.lower(plan.batch(step)))
    return trainer


def head_objective(base, kind, vocab=None, alphas=(1.0, 0.5, 0.25), dtype=torch.float32, **shape):
    """Heads of which every number does something, on the tiny base."""
    settings = HeadSettings(kind=kind, num_heads=3, **shape)
    train = TrainConfig(num_streams=3, prune_rank=0, stream_weights=alphas, learning_rate=0.01)
    frozen = heads_training.load_frozen_model(base, None)
    config = build_head_config(settings, real.VOCAB, real.WIDTH, 0 if vocab is None else len(vocab))
    model = heads_training.new_heads(config, vocab, 0, frozen.base.lm_head.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return heads_training.HeadObjective(model, frozen, train, (4, 3, 2), torch.device("cpu"), dtype)


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
    vocab = np.arange(0, real.VOCAB, 2, dtype=np.int32) if reduced else None
    alphas = (1.0, 0.5, 0.25)
    objective = head_objective(base, kind, vocab, alphas, **shape)
    examples = real.random_examples(5)
    own = load_base(base)
    batch = collate(examples, np.arange(5))
    with torch.no_grad():
        total, parts = objective.loss_and_term_means(batch, objective.lower(batch))
    lm_head = own.lm_head.weight if vocab is None else own.lm_head.weight[vocab], None
    losses: list[list[float]] = [[], [], []]
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long()
        with torch.no_grad():
            hidden = own.model(tokens[None]).last_hidden_state[0]
        for place in range(example.start - 1, len(tokens) - 2):
            following = F.pad(tokens[place + 1 : place + 4], (0, 3))[:3]
            with torch.no_grad():
                logits = objective.model(hidden[place], following, lm_head)
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
    objective = head_objective(base, kind, **shape)
    before = {name: p.detach().clone() for name, p in objective.model.named_parameters()}
    batch = BatchPlan(real.random_examples(16), 8, 0).batch(0)
    first = objective.mean_losses(batch, objective.lower(batch))
    trained = take_steps(objective).named
    assert trained.keys() == before.keys()
    assert [name for name, p in trained.items() if torch.equal(p, before[name])] == []
    assert objective.mean_losses(batch, objective.lower(batch)) != first
    frozen = dict(objective._frozen.base.named_parameters())
    for name, parameter in load_base(base).named_parameters():
        assert torch.equal(parameter, frozen[name])


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_is_what_mlx_would_draft(base, tmp_path, kind, reduced):
    """Answer by answer, with the trees that the converted heads propose."""
    vocab = np.arange(0, real.VOCAB, 3, dtype=np.int32) if reduced else None
    objective = head_objective(base, kind, vocab)
    examples = real.random_examples(4, seed=2)
    for example in examples:
        example.tokens[:] = example.tokens // 8 * 3  # likely enough to be guessed
    batch = collate(examples, np.arange(4))
    found = objective.replay(batch, objective.lower(batch), 24)
    backbone, _ = load_mlx_base(base, "float32")
    heads = load_heads(converted(objective.model, backbone, tmp_path), backbone)
    own = load_base(base)
    calls = 0
    for example in examples:
        with torch.no_grad():
            every = own.model(torch.from_numpy(example.tokens).long()[None]).last_hidden_state[0]
        answer = example.tokens[example.start :].tolist()
        place = 0
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


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_holds_what_is_trained_in_float32(base, kind):
    fine = head_objective(base, kind, dtype=torch.float32)
    rough = head_objective(base, kind, dtype=torch.bfloat16)
    batch = collate(real.random_examples(5), np.arange(5))
    exact = fine.mean_losses(batch, fine.lower(batch))
    for name, value in rough.mean_losses(batch, rough.lower(batch)).items():
        assert value == pytest.approx(exact[name], rel=0.05)
    assert {p.dtype for p in take_steps(rough, 1).named.values()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in rough.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("medusa", ()), ("medusa", ("--draft-vocab-size", "60")), ("medusa", ("--share-lm-head",)),
        ("mlp_speculator", ()), ("mlp_speculator", ("--draft-vocab-size", "60", "--scale-input")),
    ],
)  # fmt: skip
def test_what_heads_learn_shows_when_they_draft(base, data, tmp_path, kind, more):
    """From data to heads in MLX, which guess what follows."""
    run = tmp_path / "run"
    folder = tmp_path / "heads"
    assert run_trainer(kind, base, data, run, "--epochs", "40", "--tree-size", "8", *more) == 0
    log = read_log_entries(run / LOG_FILE)
    assert log[-1]["tokens_per_call"] > 1.8
    assert log[-1]["head_2_loss"] < 0.5 * log[0]["head_2_loss"]
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / DRAFT_VOCAB_FILE).exists() == ("--draft-vocab-size" in more)
    assert convert(["--base", str(base), "--heads", str(run), "--out", str(folder)]) == 0
    backbone, _ = load_mlx_base(base, "float32")
    heads = load_heads(folder, backbone)
    assert heads.config.num_guessed == (60 if "--draft-vocab-size" in more else real.VOCAB)


def test_heads_for_a_fine_tuned_model(base, data, tmp_path):
    """The hidden states are the fine-tuned model's, and both are frozen."""
    lora = tmp_path / "lora"
    out = tmp_path / "run"
    train_lora(
        base,
        data,
        lora,
        "--num-streams",
        0,
        "--prune-rank",
        0,
        "--epochs",
        2,
        "--learning-rate",
        0.01,
        "--lora-rank",
        4,
    )
    frozen = heads_training.load_frozen_model(base, lora)
    settings = HeadSettings(kind="medusa", num_heads=3)
    train = TrainConfig(num_streams=3, prune_rank=0)
    config = build_head_config(settings, real.VOCAB, real.WIDTH, 0)
    model = heads_training.new_heads(config, None, 0, frozen.base.lm_head.weight)
    objective = heads_training.HeadObjective(
        model, frozen, train, (), torch.device("cpu"), torch.float32
    )
    batch = collate(real.random_examples(1), np.arange(1))
    tokens = torch.from_numpy(batch.tokens).long()
    with torch.no_grad():
        expected = load_reference(load_base(base), lora).hidden_states(tokens).main
        plain = load_base(base).model(tokens).last_hidden_state
    assert near(objective.lower(batch), expected) and not near(plain, expected, 1e-3)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert run_trainer("medusa", base, data, out, "--lora", str(lora), "--epochs", "1") == 0
    # The store and the state know which model they are of.
    assert run_trainer("medusa", base, data, out, "--epochs", "1") == 2


def test_stage_2_goes_on_from_stage_1(base, data, own_answers, tmp_path, capsys):
    one = tmp_path / "one"
    two = tmp_path / "two"
    kind = "mlp_speculator"
    shape = ("--num-heads", "3", "--inner-dim", "16", "--widths", "4", "2", "1",
             "--draft-vocab-size", "50")  # fmt: skip
    assert run_trainer(kind, base, data, one, *shape, "--epochs", "2") == 0
    start = ["--kind", kind, "--model", str(base), "--out", str(two), "--device", "cpu",
             "--template", "{prompt}", "--valid-count", "4", "--epochs", "1",
             "--stage", "2"]  # fmt: skip
    init = ["--init", str(one)]
    own = ["--data", str(own_answers)]
    for more, named in (
        (own, "--stage 2 --init"),
        ([*init, "--data", str(data)], "completion_tokens"),
        ([*init, *own, "--inner-dim", "8"], "--inner-dim"),
    ):
        assert mentions(found_in(exits(capsys, train_heads.main, *start, *more)), *named.split())
    assert train_heads.main([*start, *init, *own]) == 0
    settings = json.loads((two / "training.json").read_text())["train"]
    assert (settings["learning_rate"], settings["batch_size"]) == (1e-4, 64)
    assert settings["max_length"] == 256
    model = load_published_heads(two)
    assert isinstance(model, MlpSpeculatorReference)
    assert model.config == load_published_heads(one).config
    assert model.config.widths == (4, 2, 1) and model.config.draft_vocab_size == 50
    before = weights(one)
    after = weights(two)
    gaps = [(before[name] - after[name]).abs().max().item() for name in before]
    assert 0 < max(gaps) < 0.01  # one step at stage 2's rate


@pytest.mark.parametrize(("kind", "more", "named"), [
    ("medusa", ("--stage", "2"), "--stage"),
    ("medusa", ("--tie-weights",), "--tie-weights"),
    ("mlp_speculator", ("--decay", "0.5"), "--decay"),
    ("medusa", ("--decay", "0"), "--decay 0"),
    ("medusa", ("--num-heads", "0"), "--num-heads 0"),
    ("medusa", ("--share-lm-head", "--num-layers", "0"), "--share-lm-head"),
    ("mlp_speculator", ("--widths", "3"), "--widths 3"),
    ("medusa", ("--init", "nowhere"), "nowhere"),
    ("medusa", ("--draft-vocab-size", "65"), "draft_vocab_size 65 64"),
])  # fmt: skip
def test_bad_options_are_one_line(base, data, tmp_path, refused, kind, more, named):
    line = refused(kind, base, data, tmp_path / "run", *more)
    assert mentions(line, *named.split())
    assert not (tmp_path / "run" / TorchTrainer.STATE_FILE).exists()


def test_another_runs_folder_is_refused(base, data, tmp_path, refused):
    kind = "medusa"
    out = tmp_path / "run"
    mine = tmp_path / "base"
    mine.symlink_to(base)
    assert run_trainer(kind, mine, data, out, "--max-steps", "2") == 0
    before = (out / TorchTrainer.STATE_FILE).read_bytes()
    changed = ((("--dtype", "bfloat16"), "--dtype"), (("--decay", "0.7"), "--stream-weights"))
    for more, named in changed:
        assert mentions(found_in(refused(kind, mine, data, out, *more)), str(out), named)
    mine.unlink()
    mine.symlink_to(real.write_base(tmp_path / "other", norm=1.5))
    assert mentions(found_in(refused(kind, mine, data, out)), str(out))
    assert (out / TorchTrainer.STATE_FILE).read_bytes() == before
