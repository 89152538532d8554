"""Drafting heads: PyTorch and MLX, the published files, and the trees of a hidden state."""

import json
import math
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import ssmlx  # noqa: F401  first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import refusals
from real import VOCAB, WIDTH, snapshot, write_base
from refusals import found_in, mentions, one_line
from tiny import assert_close, best_rank_paths, make_base
from tiny_heads import HEAD_KINDS, LEVELS, converted, head_config, random_reference, token_paths

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file

from convert.__main__ import main
from convert.base import load_base as load_torch_base
from convert.formats.heads import (
    DRAFT_VOCAB_FILE,
    MEDUSA_FILES,
    load_published_heads,
    read_published_heads,
    save_published_heads,
)
from convert.reference.heads import new_reference
from ssmlx.drafters.heads import CONFIG_FILE, WEIGHTS_FILE, load_heads, read_heads
from ssmlx.drafters.mlp_speculator import full_tree_topology, num_candidate_nodes
from ssmlx.loading.identity import BaseIdentity
from ssmlx.loading.load import load_base
from ssmlx.model.backbone import Backbone
from ssmlx.settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB, SpeculatorTreeConfig, TreeConfig

SAFE, PICKLED = MEDUSA_FILES
FILES = {"medusa": SAFE, "mlp-speculator": "model.safetensors"}
WIDTHS = (4, 3, 2)
EVERY_THIRD = tuple(range(1, VOCAB, 3))
MEDUSAS = [
    ("medusa", changes)
    for changes in (
        {},
        {"num_layers": 2},
        {"num_layers": 0},
        {"num_heads": 1},
        {"shared_heads": (0, 1, 2)},
        {"shared_heads": (0, 2)},
    )
]
SPECULATORS = [
    ("mlp-speculator", changes)
    for changes in (
        {"inner_dim": 0},
        {},
        {"tie_weights": True, "scale_input": True},
        {"n_predict": 1, "top_k_tokens_per_head": (5,)},
        {"n_predict": 4, "tie_weights": True, "top_k_tokens_per_head": (3, 2, 1, 1)},
    )
]


@pytest.fixture(scope="module")
def backbone(base):
    return load_base(base, "float32")[0]


@pytest.fixture
def published(backbone, tmp_path):
    """Writes published heads of a kind; gives their folder."""

    def write(kind, vocab=None, **changes):
        folder = tmp_path / "published"
        save_published_heads(random_reference(kind, backbone, vocab, **changes), folder, "tiny")
        return folder

    return write


@pytest.fixture
def refusal(base, tmp_path, capsys):
    """The line that a failed conversion prints; nothing may be left behind."""

    def refusal(folder, *more, base=base):
        before = snapshot(tmp_path)
        out = tmp_path / "out"
        code = main(["--heads", str(folder), "--base", str(base), "--out", str(out), *more])
        assert code == 2 and snapshot(tmp_path) == before
        return one_line(capsys.readouterr().err, "ssmlx.convert")

    return refusal


def in_mlx(model, backbone, tmp_path):
    return load_heads(converted(model, backbone, tmp_path), backbone)


def inputs(stages=1, rows=1, seed=0):
    """Hidden states [rows, D], and tokens [rows, stages] after each."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return hidden, rng.integers(0, VOCAB, (rows, stages)).astype(np.int32)


def said_by(model, hidden, tokens=None, lm_head=None):
    """[H, rows, Vd] logits of a reference, given tokens [rows, H] and the LM head if need be."""
    text = torch.zeros(len(hidden), LEVELS) if tokens is None else torch.from_numpy(tokens)
    if lm_head is not None:
        vocab = slice(None) if model.draft_vocab is None else model.draft_vocab.long()
        lm_head = lm_head.weight[vocab], None
    with torch.no_grad():
        return model(torch.from_numpy(hidden), text.long(), lm_head)


@pytest.mark.parametrize(("kind", "changes"), [*MEDUSAS, *SPECULATORS])
@pytest.mark.parametrize("vocab", [None, EVERY_THIRD], ids=["whole", "reduced"])
def test_both_sides_say_the_same(backbone, base, tmp_path, kind, changes, vocab):
    model = random_reference(kind, backbone, vocab, **changes)
    heads = in_mlx(model, backbone, tmp_path)
    levels = model.config.num_levels
    hidden, tokens = inputs(levels)
    expected = said_by(model, hidden, tokens, load_torch_base(base).lm_head)[:, 0]
    if kind == "medusa":
        found = heads.medusa_logits(mx.array(hidden))
        assert found.shape == (levels, VOCAB if vocab is None else len(vocab))
        assert_close(found, expected)
        return
    state = heads.first_state(mx.array(hidden))
    for stage in range(levels):
        state, logits = heads.run_stage(stage, state, mx.array(tokens[:, stage]))
        assert_close(logits[0], expected[stage])


def test_a_medusa_head_is_its_blocks_then_its_matrix(backbone):
    """Against the formula, written out."""
    model, (hidden, _) = random_reference("medusa", backbone), inputs()
    t = {name: p.detach().numpy() for name, p in model.heads.named_parameters()}
    x = hidden[0].astype(np.float64)
    found = said_by(model, hidden)[:, 0]
    for head in range(3):
        z = t[f"{head}.0.linear.weight"] @ x + t[f"{head}.0.linear.bias"]
        assert_close(found[head], t[f"{head}.1.weight"] @ (x + z / (1 + np.exp(-z))))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_stage_is_the_published_formula(backbone, scaled):
    """Written out in NumPy, state and embedding weighed as the paper's authors weigh them."""
    model = random_reference("mlp-speculator", backbone, scale_input=scaled)
    hidden, tokens = inputs(3)
    found = said_by(model, hidden, tokens)
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
        assert_close(found[stage, 0], t[f"head.{stage}.weight"] @ state)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("vocab", [None, EVERY_THIRD], ids=["whole", "reduced"])
def test_shared_heads_use_any_lm_head(tmp_path, tied, quantised, vocab):
    """With blocks that do nothing, a shared head is the base model's own head."""
    model = make_base("llama", vocab=VOCAB, intermediate_size=64, tie_word_embeddings=tied)
    if quantised:
        nn.quantize(model, group_size=32, bits=8)
    backbone = Backbone(model)
    config = head_config("medusa", backbone, vocab, num_heads=2, shared_heads=(0, 1))
    heads = new_reference(config, None if vocab is None else torch.tensor(vocab).int())
    hidden = mx.array(inputs()[0])
    normed = backbone.final_norm(hidden)
    expected = backbone.logits(hidden[None])[0]
    assert_close(backbone.lm_head(normed[None])[0, 0], expected)
    if vocab is not None:
        expected = expected[mx.array(vocab)]
    for logits in in_mlx(heads, backbone, tmp_path).medusa_logits(normed):
        assert_close(logits, expected)


@pytest.mark.parametrize("vocab", [None, EVERY_THIRD], ids=["whole", "reduced"])
def test_new_heads_say_what_the_lm_head_says(base, backbone, vocab):
    lm = load_torch_base(base).lm_head
    hidden = inputs()[0]
    tokens = None if vocab is None else torch.tensor(vocab).int()
    model = new_reference(head_config("medusa", backbone, vocab, num_layers=2), tokens)
    model.copy_lm_head(lm.weight)
    with torch.no_grad():
        expected = lm(torch.from_numpy(hidden))
    for logits in said_by(model, hidden):
        assert_close(logits, expected if vocab is None else expected[:, vocab])


def shape(widths=None, **settings):
    return SpeculatorTreeConfig(widths=widths, **settings)


def all_paths(model, hidden, root, widths=WIDTHS):
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


def medusa_paths(model, hidden, count):
    """The `count` best nodes of the full tree of Medusa heads, by brute force."""
    best = said_by(model, hidden)[:, 0].softmax(-1).sort(dim=-1, descending=True)
    vocab = range(VOCAB) if model.draft_vocab is None else model.draft_vocab.tolist()
    ranks = best_rank_paths(best.values.numpy(), count, min(count - 1, len(vocab)))
    names = best.indices.tolist()
    return {tuple(vocab[names[n][rank]] for n, rank in enumerate(path)) for path in ranks} - {()}


@pytest.mark.parametrize("vocab", [None, EVERY_THIRD], ids=["whole", "reduced"])
@pytest.mark.parametrize("size", [4, 14])
def test_medusas_tree_holds_the_best_nodes(backbone, tmp_path, vocab, size):
    model = random_reference("medusa", backbone, vocab)
    heads = in_mlx(model, backbone, tmp_path)
    for seed in range(3):
        hidden, _ = inputs(seed=seed)
        tree = heads.propose_tree(mx.array([5]), mx.array(hidden), TreeConfig(size=size))
        assert token_paths(tree) == medusa_paths(model, hidden, size)
        assert tree.num_nodes == size and int(tree.tokens[0].item()) == 5


def likeliest(paths, scores, count):
    return set(sorted(paths, key=lambda path: -scores[path])[:count])


@pytest.mark.parametrize(("variant", "vocab"), [*product(SPECULATORS[:3], (None, EVERY_THIRD))])
def test_the_tree_holds_the_best_nodes(backbone, tmp_path, variant, vocab):
    model = random_reference(variant[0], backbone, vocab, **variant[1])
    heads = in_mlx(model, backbone, tmp_path)
    for seed, keep in ((1, 2), (2, 7), (3, 16), (4, 41), (5, 99)):
        hidden, tokens = inputs(seed=seed)
        every = all_paths(model, hidden, int(tokens[0, 0]))
        tree = heads.propose_tree(mx.array(tokens[0]), mx.array(hidden), shape(WIDTHS, size=keep))
        assert token_paths(tree) == likeliest(every, every, keep - 1)
        assert int(tree.tokens[0].item()) == tokens[0, 0]
        assert tree.num_nodes == min(keep, 1 + len(every))


@pytest.mark.parametrize("candidates", [1, 3, 8, 24])
def test_the_papers_candidates_are_all_there(backbone, tmp_path, candidates):
    """The k best whole paths, whatever shorter paths promise; what is free goes to the next."""
    model = random_reference("mlp-speculator", backbone)
    heads = in_mlx(model, backbone, tmp_path)
    tree_of = shape(WIDTHS, candidates=candidates)
    for seed in range(6):
        hidden, tokens = inputs(seed=seed)
        every = all_paths(model, hidden, int(tokens[0, 0]))
        tree = heads.propose_tree(mx.array(tokens[0]), mx.array(hidden), tree_of)
        leaves = likeliest((path for path in every if len(path) == 3), every, candidates)
        wanted = {path[:depth] for path in leaves for depth in (1, 2, 3)}
        free = tree.num_nodes - 1 - len(wanted)
        assert token_paths(tree) == wanted | likeliest(set(every) - wanted, every, free)
        assert tree.num_nodes == num_candidate_nodes(WIDTHS, candidates)


def test_fewer_stages_and_the_settings_own_widths(backbone, tmp_path):
    model = random_reference("mlp-speculator", backbone, top_k_tokens_per_head=WIDTHS)
    heads, (hidden, tokens) = in_mlx(model, backbone, tmp_path), inputs()
    root = mx.array(tokens[0])
    state = mx.array(hidden)
    assert heads.propose_tree(root, state, shape()).num_nodes == 1 + 4 + 5 + 5
    assert heads.propose_tree(root, state, shape(size=99)).num_nodes == 1 + 4 + 12 + 24
    full = heads.propose_tree(root, state, shape((2, 2)))
    assert full.topology is full_tree_topology((2, 2)) and full.num_internal == 3
    assert full.parents.tolist() == [0, 0, 0, 1, 1, 2, 2]
    for widths in ((), (2, 2, 2, 2), (64, 64, 64)):
        assert "widths" in refusals.refusal(heads.propose_tree, root, state, shape(widths))


def same_weights(left, right):
    right = dict(right.named_parameters())
    return all(torch.equal(weight, right[name]) for name, weight in left.named_parameters())


@pytest.mark.parametrize("form", ["safetensors", "pt", "medusa-2"])
def test_every_published_form_of_medusa_loads(backbone, base, published, tmp_path, form):
    folder = published("medusa")
    expected = random_reference("medusa", backbone)
    # What the settings say is not believed.
    (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 5}')
    tensors = load_file(folder / SAFE)
    if form == "pt":
        torch.save(tensors, folder / PICKLED)
        (folder / SAFE).unlink()
    elif form == "medusa-2":
        folder = shutil.copytree(base, tmp_path / "medusa2")
        weights = load_file(folder / "model.safetensors")
        weights |= {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_published_heads(folder)[0].kind == "medusa"
    again = load_published_heads(folder)
    assert (again.config.num_heads, again.config.num_layers) == (3, 1)
    assert same_weights(expected, again)


@pytest.mark.parametrize(("kind", "changes"), SPECULATORS)
def test_published_speculators_come_back(backbone, published, kind, changes):
    folder = published(kind, **changes)
    model = random_reference(kind, backbone, **changes)
    assert read_published_heads(folder)[0].kind == "mlp_speculator"
    again = load_published_heads(folder)
    assert again.config.top_k_tokens_per_head == model.config.widths
    assert same_weights(model, again)
    names = set(load_file(folder / FILES[kind]))
    stages = model.config.n_predict
    if model.config.tie_weights:
        assert {n for n in names if "proj" in n} == {f"speculator.proj.{i}.weight" for i in (0, 1)}
        assert {n for n in names if "emb" in n} == {"speculator.emb.0.weight"}
    else:
        assert len(names) == 5 * stages and f"speculator.ln.{stages - 1}.bias" in names


def test_tied_files_may_hold_the_duplicates(published, refusal):
    folder = published("mlp-speculator", tie_weights=True)
    file = folder / FILES["mlp-speculator"]
    tensors = load_file(file)
    for stage, part in product(
        range(3), ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    ):
        shared = tensors[f"speculator.{part.format(0)}"]
        tensors[f"speculator.{part.format(stage)}"] = shared.clone()
    tensors["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"].clone()
    save_file(tensors, file)
    config, found = read_published_heads(folder)
    assert len(found) == 6 and config.tie_weights
    tensors["speculator.proj.2.weight"] += 1
    save_file(tensors, file)
    assert "proj.2.weight" in refusal(folder)


def test_shards_and_missing_settings(backbone, published):
    """Settings that a published config leaves out; weights in several files, or pickled."""
    folder = published("mlp-speculator", inner_dim=0)
    model = random_reference("mlp-speculator", backbone, inner_dim=0)
    settings = json.loads((folder / "config.json").read_text())
    few = {n: settings[n] for n in ("model_type", "emb_dim", "n_predict", "vocab_size")}
    (folder / "config.json").write_text(json.dumps(few))
    tensors = load_file(folder / FILES["mlp-speculator"])
    (folder / FILES["mlp-speculator"]).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:6], names[6:]), 1):
        shard = folder / f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, shard)
    again = load_published_heads(folder)
    assert again.config.widths == (6, 3, 2) and not again.config.scale_input
    assert same_weights(model, again)
    for path in folder.glob("model-*"):
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert same_weights(model, load_published_heads(folder))


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("vocab", [None, EVERY_THIRD], ids=["whole", "reduced"])
def test_the_command_writes_a_folder_that_loads(
    base, backbone, published, tmp_path, capsys, kind, vocab
):
    out = tmp_path / "out"
    config = head_config(kind, backbone, vocab)
    command = ["--heads", str(published(kind, vocab)), "--base", str(base), "--out", str(out)]
    assert main(command) == 0
    written = random_reference(kind, backbone, vocab).parameters()
    size = sum(parameter.numel() for parameter in written)
    assert mentions(capsys.readouterr().err, str(out), config.kind, "3", f"{size:,}")
    if kind != "medusa":  # published files state the defaults
        config = replace(config, n_candidates=5, top_k_tokens_per_head=(6, 3, 2))
    heads = read_heads(out)
    assert heads.config == config and heads.base == BaseIdentity.of(backbone)
    hidden, tokens = inputs()
    tree = TreeConfig() if kind == "medusa" else shape()
    tree = load_heads(out, backbone).propose_tree(mx.array(tokens[0]), mx.array(hidden), tree)
    assert set(tree.tokens.tolist()[1:]) <= set(vocab or range(VOCAB))
    assert main([*command, "--dtype", "float16"]) == 0  # in place of the first
    kept = {n: a.dtype for n, a in read_heads(out).tensors.items() if n != "draft_vocab"}
    assert set(kept.values()) == {mx.float16}


@pytest.mark.parametrize(
    ("kind", "spoil", "named"),
    [
        ("medusa", lambda t: t.pop("1.0.linear.bias"), "1.0.linear.bias"),
        ("medusa", lambda t: t.update({"1.0.norm.weight": torch.zeros(3)}), "1.0.norm"),
        ("medusa", lambda t: t.update({"2.1.weight": torch.zeros(VOCAB, 3)}), "2.1.weight"),
        ("medusa", lambda t: t.update({"2.1.weight": torch.tensor(1.0)}), "2.1.weight"),
        ("medusa", lambda t: t.update({f"{10**16}.0.weight": torch.zeros(3)}), f"{10**16}"),
        ("medusa", lambda t: t.clear() or t.update({"head": torch.zeros(3)}), "0.0.linear.weight"),
        # without its prefix it stands in the place of another
        ("mlp-speculator", lambda t: t.update({"emb.0.weight": torch.zeros(3)}), "emb.0.weight"),
        ("mlp-speculator", lambda t: t["speculator.ln.1.bias"].fill_(torch.inf), "ln.1.bias"),
    ],
)  # fmt: skip
def test_every_tensor_is_accounted_for(published, refusal, kind, spoil, named):
    folder = published(kind)
    tensors = load_file(folder / FILES[kind])
    spoil(tensors)
    save_file(tensors, folder / FILES[kind])
    assert named in refusal(folder)


@pytest.mark.parametrize(("settings", "named"), [
    ({"n_predict": None}, "n_predict"),
    ({"n_predict": 4, "top_k_tokens_per_head": None}, "emb.3.weight"),
    ({"inner_dim": -1}, "inner_dim -1"),
    ({"scale_input": "yes"}, "scale_input 'yes'"),
    ({"top_k_tokens_per_head": [5, 4]}, "top_k_tokens_per_head 3"),
    ({"vocab_size": 63}, "emb.0.weight"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(published, refusal, settings, named):
    config = published("mlp-speculator") / "config.json"
    values = json.loads(config.read_text()) | settings
    values = {name: value for name, value in values.items() if value is not None}
    config.write_text(json.dumps(values))
    assert mentions(refusal(config.parent), *named.split())


def test_what_is_no_published_head_is_refused(base, published, refusal):
    assert str(base) in refusal(base)
    folder = published("medusa")
    (folder / SAFE).write_bytes((folder / SAFE).read_bytes()[:500])
    assert SAFE in refusal(folder)
    for option in (["--fuse"], ["--scope", "all"], ["--streams", "x"]):
        line = refusal(folder, *option)
        assert mentions(found_in(line), option[0]) and mentions(line, "--lora")


def test_a_broken_draft_vocabulary_is_refused(published, refusal):
    folder = published("medusa", (4, 40, 41))
    for tokens, *named in (([4, 4, 7],), ([4, 5, VOCAB], "4", str(VOCAB))):
        vocab = torch.tensor(tokens, dtype=torch.int32)
        save_file({"draft_vocab": vocab}, folder / DRAFT_VOCAB_FILE)
        assert mentions(found_in(refusal(folder)), "draft_vocab", *named)
    for name, vocab, *named in (
        ("vocab", torch.zeros(3), "vocab"),
        ("draft_vocab", torch.zeros(0, dtype=torch.int32), "draft_vocab"),
        ("draft_vocab", torch.ones(3), "draft_vocab", "float32 [3]"),
    ):
        save_file({name: vocab}, folder / DRAFT_VOCAB_FILE)
        assert mentions(found_in(refusal(folder)), *named)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_another_base_is_refused(backbone, published, refusal, tmp_path, kind):
    other = write_base(tmp_path / "other", width=48)
    assert mentions(refusal(published(kind), base=other), "48")
    folder = converted(random_reference(kind, backbone), backbone, tmp_path)
    twin = load_base(write_base(tmp_path / "twin", norm=2.0), "float32")[0]
    assert mentions(refusals.refusal(load_heads, folder, twin), "norm")


def test_a_broken_mlx_folder_is_refused(backbone, tmp_path):
    folder = converted(random_reference("medusa", backbone), backbone, tmp_path)
    settings = json.loads((folder / CONFIG_FILE).read_text())
    for changes, *named in (
        ({"format": "other"}, "format", "'other'"),
        ({"kind": "eagle"}, "kind", "'eagle'"),
        ({"base": {}}, "base"),
        ({"num_heads": "3"}, "num_heads", "'3'"),
        ({"num_layers": None}, "num_layers"),
        ({}, WEIGHTS_FILE),
    ):
        (folder / CONFIG_FILE).write_text(json.dumps(settings | changes))
        if not changes:
            (folder / WEIGHTS_FILE).unlink()
        assert mentions(found_in(refusals.refusal(load_heads, folder, backbone)), *named)
    assert "nowhere" in refusals.refusal(load_heads, tmp_path / "nowhere", backbone)
