"""The MLP speculator: PyTorch and MLX, the published files, and its trees."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import ssmlx  # noqa: F401  first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
from real import VOCAB, WIDTH, one_line, snapshot, write_base

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file

from convert.__main__ import main
from convert.formats.heads import (
    convert_heads,
    detect_kind,
    load_published,
    read_published,
    save_published,
)
from convert.reference.heads import MlpSpeculatorReference
from ssmlx.drafters.heads import load_heads, read_heads, write_heads
from ssmlx.drafters.mlp_speculator import (
    MlpSpeculatorConfig,
    num_candidate_nodes,
    widths_topology,
)
from ssmlx.errors import InputError
from ssmlx.loading.load import load_base
from ssmlx.model.tree import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB
from ssmlx.settings import SpeculatorTreeConfig

WEIGHTS = "model.safetensors"
WIDTHS = (4, 3, 2)
VARIANTS = [
    {},
    {"inner_dim": 24},
    {"tie_weights": True, "inner_dim": 24, "scale_input": True},
    {"n_predict": 1, "top_k_tokens_per_head": (5,)},
    {"n_predict": 4, "tie_weights": True, "top_k_tokens_per_head": (3, 2, 1, 1)},
]


def random_speculator(vocab=None, seed=0, **changes):
    """A speculator of which every number does something."""
    size = 0 if vocab is None else len(vocab)
    settings = {"emb_dim": WIDTH, "n_predict": 3, "vocab_size": VOCAB, "draft_vocab_size": size,
                "top_k_tokens_per_head": WIDTHS}  # fmt: skip
    config = MlpSpeculatorConfig(**{**settings, **changes})
    torch.manual_seed(seed)
    model = MlpSpeculatorReference(config, None if vocab is None else torch.from_numpy(vocab))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4).add_(1.0 if parameter.ndim == 1 else 0.0)
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("speculator") / "base")


@pytest.fixture(scope="module")
def backbone(base):
    return load_base(base, "float32")[0]


@pytest.fixture
def published(tmp_path):
    save_published(random_speculator(), tmp_path / "published", "tiny")
    return tmp_path / "published"


@pytest.fixture
def refusal(base, tmp_path, capsys):
    """The line that a failed conversion prints; nothing may be left behind."""

    def refusal(folder, base=base):
        before = snapshot(tmp_path)
        out = tmp_path / "out"
        assert main(["--heads", str(folder), "--base", str(base), "--out", str(out)]) == 2
        assert snapshot(tmp_path) == before
        return one_line(capsys.readouterr().err, "convert")

    return refusal


def in_mlx(model, backbone, tmp_path):
    """A reference through published files, the converter and the loader."""
    save_published(model, tmp_path / "files")
    out = tmp_path / "mlx"
    out.mkdir(exist_ok=True)
    write_heads(out, convert_heads(tmp_path / "files", backbone, "tiny", "stored"))
    return load_heads(out, backbone)


def inputs(stages, rows=5, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return hidden, rng.integers(0, VOCAB, (rows, stages)).astype(np.int32)


# The modules --------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("reduced", [False, True])
def test_both_sides_say_the_same(backbone, tmp_path, changes, reduced):
    vocab = np.arange(1, VOCAB, 3, dtype=np.int32) if reduced else None
    model = random_speculator(vocab, **changes)
    heads = in_mlx(model, backbone, tmp_path)
    stages = model.config.n_predict
    hidden, tokens = inputs(stages)
    with torch.no_grad():
        expected = model(torch.from_numpy(hidden), torch.from_numpy(tokens).long()).numpy()
    state = heads.first_state(mx.array(hidden))
    for stage in range(stages):
        state, logits = heads.stage(stage, state, mx.array(tokens[:, stage]))
        error = np.abs(np.array(logits) - expected[stage]).max()
        assert error <= 1e-5 * np.abs(expected[stage]).max()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_stage_is_the_published_formula(scaled):
    """Written out in NumPy, state and embedding weighed as the paper's authors weigh them."""
    model = random_speculator(inner_dim=24, scale_input=scaled)
    hidden, tokens = inputs(3, rows=1)
    with torch.no_grad():
        found = model(torch.from_numpy(hidden), torch.from_numpy(tokens).long()).numpy()
    t = {name: p.detach().numpy().astype(np.float64) for name, p in model.named_parameters()}
    state = hidden[0].astype(np.float64)
    if scaled:
        state = state / np.sqrt((state**2).mean() + 1e-6) / math.sqrt(2)
    state_weight = 0.5 ** (0.5 / 3)
    emb_weight = math.sqrt((1 - state_weight**2) * 24 / 2)
    erf = np.vectorize(math.erf)
    for stage in range(3):
        embedded = t[f"emb.{stage}.weight"][tokens[0, stage]]
        mixed = t[f"proj.{stage}.weight"] @ state * state_weight + emb_weight * embedded
        normed = mixed / np.sqrt((mixed**2).mean() + 1e-6)
        z = normed * t[f"ln.{stage}.weight"] + t[f"ln.{stage}.bias"]
        state = z * 0.5 * (1 + erf(z / math.sqrt(2)))
        logits = t[f"head.{stage}.weight"] @ state
        assert np.allclose(found[stage, 0], logits, atol=1e-5 * np.abs(logits).max())


def test_new_speculators_have_the_papers_spread():
    config = MlpSpeculatorConfig(emb_dim=WIDTH, inner_dim=64, n_predict=3, vocab_size=500)
    torch.manual_seed(0)
    model = MlpSpeculatorReference(config)
    for name, parameter in model.named_parameters():
        if name.startswith("ln"):
            assert torch.equal(parameter, torch.full_like(parameter, float("weight" in name)))
        else:
            assert parameter.std().item() == pytest.approx(64**-0.5, rel=0.05)


def shape(widths=None, **settings):
    return SpeculatorTreeConfig(widths=widths, **settings)


# Trees --------------------------------------------------------------------------------------


def all_paths(model, hidden, root, widths):
    """Every path of the full tree with its log probability, path by path and unbatched."""
    vocab = model.draft_vocab
    found = {}

    def grow(path, score, state, token):
        if len(path) == len(widths):
            return
        state = model.next_state(len(path), state, torch.tensor([token]))
        logprobs = model.head[len(path)](state).log_softmax(-1)[0]
        best = logprobs.topk(widths[len(path)])
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            chosen = place if vocab is None else int(vocab[place])
            edge = min(max(value, MIN_EDGE_LOGPROB), MAX_EDGE_LOGPROB)
            found[(*path, chosen)] = score + edge
            grow((*path, chosen), score + edge, state, chosen)

    with torch.no_grad():
        grow((), 0.0, model.first_state(torch.from_numpy(hidden)), root)
    return found


def token_paths(tree):
    """The tree's nodes below the root, each as the tokens that lead to it."""
    tokens, paths, depths = (np.array(a) for a in (tree.tokens, tree.paths, tree.depths))
    assert depths[0] == 0 and (np.diff(depths) >= 0).all()
    found = []
    for node, (path, depth) in enumerate(zip(paths, depths, strict=True)):
        assert path[0] == 0 and path[depth] == node and (path[depth:] == node).all()
        found.append(tuple(int(token) for token in tokens[path[1 : depth + 1]]))
    assert len(set(found)) == len(found)
    return set(found) - {()}


CASES = [(dict(v), reduced) for v, reduced in product(VARIANTS[:3], (False, True))]


@pytest.mark.parametrize(("changes", "reduced"), CASES)
def test_the_tree_holds_the_best_nodes(backbone, tmp_path, changes, reduced):
    vocab = np.arange(1, VOCAB, 3, dtype=np.int32) if reduced else None
    model = random_speculator(vocab, **changes)
    heads = in_mlx(model, backbone, tmp_path)
    for seed, keep in ((1, 2), (2, 7), (3, 16), (4, 41), (5, 99)):
        hidden, tokens = inputs(1, rows=1, seed=seed)
        root = mx.array(tokens[0])
        every = all_paths(model, hidden, int(tokens[0, 0]), WIDTHS)
        tree = heads.propose_tree(root, mx.array(hidden), shape(WIDTHS, size=keep))
        best = sorted(every, key=lambda path: -every[path])[: keep - 1]
        assert token_paths(tree) == set(best)
        assert int(tree.tokens[0].item()) == tokens[0, 0]
        assert tree.num_nodes == min(keep, 1 + len(every))


@pytest.mark.parametrize("candidates", [1, 3, 8, 24])
def test_the_papers_candidates_are_all_there(backbone, tmp_path, candidates):
    """The k best whole paths, whatever shorter paths promise; what is free goes to the next."""
    model = random_speculator()
    heads = in_mlx(model, backbone, tmp_path)
    shapes = set()
    for seed in range(6):
        hidden, tokens = inputs(1, rows=1, seed=seed)
        every = all_paths(model, hidden, int(tokens[0, 0]), WIDTHS)
        tree = heads.propose_tree(
            mx.array(tokens[0]), mx.array(hidden), shape(WIDTHS, candidates=candidates)
        )
        found = token_paths(tree)
        shapes.add(tree.num_nodes)
        leaves = sorted((p for p in every if len(p) == 3), key=lambda p: -every[p])[:candidates]
        wanted = {path[:depth] for path in leaves for depth in (1, 2, 3)}
        rest = sorted(set(every) - wanted, key=lambda p: -every[p])
        assert found == wanted | set(rest[: tree.num_nodes - 1 - len(wanted)])
    assert shapes == {num_candidate_nodes(WIDTHS, candidates)}


def test_fewer_stages_and_the_settings_own_widths(backbone, tmp_path):
    heads = in_mlx(random_speculator(), backbone, tmp_path)
    hidden, tokens = inputs(1, rows=1)
    root, state = mx.array(tokens[0]), mx.array(hidden)
    assert heads.propose_tree(root, state, shape()).num_nodes == 1 + 4 + 5 + 5
    assert heads.propose_tree(root, state, shape(size=99)).num_nodes == 1 + 4 + 12 + 24
    full = heads.propose_tree(root, state, shape((2, 2)))
    assert full.topology is widths_topology((2, 2)) and full.num_internal == 3
    assert np.array(full.parents).tolist() == [0, 0, 0, 1, 1, 2, 2]
    for widths in ((), (2, 2, 2, 2), (64, 64, 64)):
        with pytest.raises(InputError, match="tree widths"):
            heads.propose_tree(root, state, shape(widths))


def test_the_trees_of_a_batch_are_those_of_its_rows():
    model = random_speculator()
    hidden, tokens = inputs(1, rows=4)
    with torch.no_grad():
        roots = torch.from_numpy(tokens[:, 0]).long()
        found, edges = model.rank_paths(roots, torch.from_numpy(hidden), WIDTHS)
    for row in range(4):
        every = all_paths(model, hidden[row : row + 1], int(tokens[row, 0]), WIDTHS)
        assert found[0][row].tolist() == [path[0] for path in every if len(path) == 1]
        assert found[2][row].tolist() == [path[2] for path in every if len(path) == 3]
        assert edges[0][row].tolist() == pytest.approx(
            [score for path, score in every.items() if len(path) == 1], abs=1e-4
        )


# Files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", VARIANTS)
def test_published_files_come_back(tmp_path, changes):
    model = random_speculator(**changes)
    save_published(model, tmp_path)
    assert detect_kind(tmp_path) == "mlp_speculator"
    again = load_published(tmp_path)
    assert again.config.top_k_tokens_per_head == model.config.widths
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(again.named_parameters())[name])
    names = set(load_file(tmp_path / WEIGHTS))
    stages = model.config.n_predict
    if model.config.tie_weights:
        assert {n for n in names if "proj" in n} == {f"speculator.proj.{i}.weight" for i in (0, 1)}
        assert {n for n in names if "emb" in n} == {"speculator.emb.0.weight"}
    else:
        assert len(names) == 5 * stages and f"speculator.ln.{stages - 1}.bias" in names


def test_tied_files_may_hold_the_duplicates(backbone, tmp_path, refusal):
    model = random_speculator(tie_weights=True)
    save_published(model, tmp_path / "files")
    tensors = load_file(tmp_path / "files" / WEIGHTS)
    for stage in range(3):
        for part in ("emb", "head", "ln"):
            for leaf in ("weight", "bias") if part == "ln" else ("weight",):
                shared = tensors[f"speculator.{part}.0.{leaf}"]
                tensors[f"speculator.{part}.{stage}.{leaf}"] = shared.clone()
    tensors["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"].clone()
    save_file(tensors, tmp_path / "files" / WEIGHTS)
    config, found = read_published(tmp_path / "files")
    assert len(found) == 6 and config.tie_weights
    tensors["speculator.proj.2.weight"] += 1
    save_file(tensors, tmp_path / "files" / WEIGHTS)
    assert "proj.2.weight" in refusal(tmp_path / "files")


def test_shards_and_missing_settings(tmp_path):
    """Settings that a published config leaves out; weights in several files, or pickled."""
    model = random_speculator(inner_dim=0)
    save_published(model, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    few = {n: settings[n] for n in ("model_type", "emb_dim", "n_predict", "vocab_size")}
    (tmp_path / "config.json").write_text(json.dumps(few))
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:6], names[6:]), 1):
        save_file(
            {n: tensors[n] for n in part}, tmp_path / f"model-0000{number}-of-00002.safetensors"
        )
    again = load_published(tmp_path)
    assert again.config.widths == (6, 3, 2) and not again.config.scale_input
    for path in tmp_path.glob("model-*"):
        path.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    pickled = load_published(tmp_path)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(again.named_parameters())[name])
        assert torch.equal(weight, dict(pickled.named_parameters())[name])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_predict": None}, "lacks n_predict"),
        ({"n_predict": 4, "top_k_tokens_per_head": None}, "missing: emb.3.weight"),
        ({"n_predict": 2, "top_k_tokens_per_head": None}, "spare: speculator.emb.2.weight"),
        ({"inner_dim": 16}, "misshapen: emb.0.weight"),
        ({"inner_dim": -1}, "inner_dim is -1"),
        ({"scale_input": "yes"}, "scale_input is 'yes'"),
        ({"top_k_tokens_per_head": [5, 4]}, "3 numbers of 1 or more"),
        ({"vocab_size": 63}, "misshapen: emb.0.weight"),
    ],
)
def test_settings_that_do_not_fit_are_refused(published, refusal, settings, said):
    values = json.loads((published / "config.json").read_text()) | settings
    values = {name: value for name, value in values.items() if value is not None}
    (published / "config.json").write_text(json.dumps(values))
    assert said in refusal(published)


def test_every_tensor_is_accounted_for(published, refusal):
    tensors = load_file(published / WEIGHTS)
    for spoil, said in (
        ({"emb.0.weight": torch.zeros(3)}, None),
        ({"speculator.ln0.weight": torch.zeros(3)}, "spare: speculator.ln0.weight"),
        ({"speculator.ln.1.bias": torch.full((WIDTH,), torch.inf)}, "NaN or infinity: ln.1.bias"),
    ):
        save_file(tensors | spoil, published / WEIGHTS)
        if said is None:  # without its prefix it stands in the place of another
            assert "differs from emb.0.weight" in refusal(published)
        else:
            assert said in refusal(published)


def test_the_command_writes_a_folder_that_loads(base, backbone, tmp_path, capsys):
    vocab = np.arange(0, VOCAB, 4, dtype=np.int32)
    model = random_speculator(vocab, inner_dim=24)
    save_published(model, tmp_path / "published")
    out = tmp_path / "out"
    command = ["--heads", str(tmp_path / "published"), "--base", str(base), "--out", str(out)]
    assert main(command) == 0
    assert capsys.readouterr().err.startswith(f"{out}: mlp_speculator, 3 tokens ahead, ")
    heads = read_heads(out)
    assert heads.config.kind == "mlp_speculator" and heads.config == replace(
        model.config, n_candidates=5
    )
    assert heads.tensors["head.0.weight"].shape == (16, 24)
    assert heads.tensors["emb.0.weight"].shape == (VOCAB, 24)
    hidden, tokens = inputs(1, rows=1)
    tree = load_heads(out, backbone).propose_tree(mx.array(tokens[0]), mx.array(hidden), shape())
    assert set(np.array(tree.tokens)[1:].tolist()) <= set(vocab.tolist())


def test_another_base_is_refused(published, backbone, refusal, tmp_path):
    other = write_base(tmp_path / "other", width=48)
    assert "hidden size 48" in refusal(published, base=other)
    in_mlx(random_speculator(), backbone, tmp_path)
    twin = load_base(write_base(tmp_path / "twin", norm=2.0), "float32")[0]
    with pytest.raises(InputError, match="another base model"):
        load_heads(tmp_path / "mlx", twin)
