"""Medusa heads: PyTorch and MLX, the published files, and the trees that ranks give."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import ssmlx  # noqa: F401  first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from real import VOCAB, WIDTH, one_line, snapshot, write_base
from tiny import best_rank_paths, make_base

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file

from convert.__main__ import main
from convert.base import load_base as load_torch_base
from convert.formats.heads import (
    DRAFT_VOCAB_FILE,
    MEDUSA_FILES,
    convert_heads,
    detect_kind,
    load_published,
    save_published,
)
from convert.reference.heads import MedusaReference
from ssmlx.drafters.heads import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    is_heads_folder,
    load_heads,
    read_heads,
    write_heads,
)
from ssmlx.drafters.medusa import MedusaConfig
from ssmlx.errors import InputError
from ssmlx.loading.adapter import BaseIdentity
from ssmlx.loading.load import load_base
from ssmlx.model.backbone import Backbone
from ssmlx.settings import TreeConfig

SAFE, PICKLED = MEDUSA_FILES


def random_heads(config=None, vocab=None, seed=0, **changes):
    """Heads of which every number does something."""
    settings = {"num_heads": 3, "num_layers": 1, "hidden_size": WIDTH, "vocab_size": VOCAB}
    size = 0 if vocab is None else len(vocab)
    config = config or MedusaConfig(**{**settings, "draft_vocab_size": size, **changes})
    model = MedusaReference(config, None if vocab is None else torch.from_numpy(vocab))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("medusa") / "base")


@pytest.fixture(scope="module")
def backbone(base):
    return load_base(base, "float32")[0]


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "published"
    save_published(random_heads(), folder, "tiny")
    return folder


@pytest.fixture
def refusal(base, tmp_path, capsys):
    """The line that a failed conversion prints; nothing may be left behind."""

    def refusal(folder, *more, base=base):
        before = snapshot(tmp_path)
        out = tmp_path / "out"
        code = main(["--heads", str(folder), "--base", str(base), "--out", str(out), *more])
        assert code == 2 and snapshot(tmp_path) == before
        return one_line(capsys.readouterr().err, "convert")

    return refusal


def in_mlx(folder, backbone, tmp_path, dtype="stored"):
    """Published heads through the converter's and the loader's hands."""
    out = tmp_path / "mlx"
    out.mkdir(exist_ok=True)
    write_heads(out, convert_heads(folder, backbone, "tiny", dtype))
    return load_heads(out, backbone)


def hidden_state(seed=0):
    return np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)


def agree(found, expected):
    """To 1e-5 of the largest number."""
    expected = expected.detach().numpy()
    assert np.abs(np.array(found) - expected).max() <= 1e-5 * np.abs(expected).max()


# The modules --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 2},
        {"num_layers": 0},
        {"num_heads": 1},
        {"shared_heads": (0, 1, 2)},
        {"shared_heads": (0, 2)},
    ],
)
@pytest.mark.parametrize("reduced", [False, True])
def test_both_sides_say_the_same(backbone, base, tmp_path, changes, reduced):
    vocab = np.arange(1, VOCAB, 3, dtype=np.int32) if reduced else None
    model = random_heads(vocab=vocab, **changes)
    save_published(model, tmp_path / "published")
    heads = in_mlx(tmp_path / "published", backbone, tmp_path)
    hidden = hidden_state()
    with torch.no_grad():
        expected = model(torch.from_numpy(hidden)[0], load_torch_base(base).lm_head)
    found = heads.medusa_logits(mx.array(hidden))
    assert found.shape == (model.config.num_heads, VOCAB if vocab is None else len(vocab))
    agree(found, expected)


def test_a_head_is_its_blocks_then_its_matrix(backbone, tmp_path):
    """Against the formula, written out."""
    model = random_heads()
    save_published(model, tmp_path / "published")
    t = {n: a.numpy() for n, a in load_file(tmp_path / "published" / SAFE).items()}
    found = np.array(
        in_mlx(tmp_path / "published", backbone, tmp_path).medusa_logits(mx.array(hidden_state()))
    )
    x = hidden_state()[0].astype(np.float64)
    for head in range(3):
        z = t[f"{head}.0.linear.weight"] @ x + t[f"{head}.0.linear.bias"]
        logits = t[f"{head}.1.weight"] @ (x + z / (1 + np.exp(-z)))
        assert np.allclose(found[head], logits, atol=1e-5 * np.abs(logits).max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_shared_heads_use_any_lm_head(tmp_path, tied, quantised, reduced):
    """With blocks that do nothing, a shared head is the base model's own head."""
    model = make_base("llama", vocab=VOCAB, intermediate_size=64, tie_word_embeddings=tied)
    if quantised:
        nn.quantize(model, group_size=32, bits=8)
    backbone = Backbone(model)
    config = MedusaConfig(
        num_heads=2, num_layers=1, hidden_size=WIDTH, vocab_size=VOCAB, shared_heads=(0, 1),
        draft_vocab_size=20 if reduced else 0,
    )  # fmt: skip
    vocab = np.arange(3, 63, 3, dtype=np.int32)
    heads = MedusaReference(config, torch.from_numpy(vocab) if reduced else None)
    save_published(heads, tmp_path / "published")
    found = in_mlx(tmp_path / "published", backbone, tmp_path)
    hidden = mx.array(hidden_state())
    expected = backbone.logits(hidden[None])
    if reduced:
        expected = expected[:, mx.array(vocab)]
    logits = found.medusa_logits(backbone.final_norm(hidden))
    for head in range(2):
        assert mx.allclose(logits[head], expected[0], atol=1e-5)
    assert mx.allclose(backbone.lm_head(backbone.final_norm(hidden)[None])[0],
                       backbone.logits(hidden[None]), atol=1e-5)  # fmt: skip


def test_new_heads_say_what_the_lm_head_says(base):
    lm = load_torch_base(base).lm_head
    for vocab in (None, np.arange(0, VOCAB, 2, dtype=np.int32)):
        size = 0 if vocab is None else len(vocab)
        config = MedusaConfig(num_heads=2, num_layers=2, hidden_size=WIDTH, vocab_size=VOCAB,
                              draft_vocab_size=size)  # fmt: skip
        model = MedusaReference(config, None if vocab is None else torch.from_numpy(vocab))
        model.start_from(lm.weight)
        hidden = torch.from_numpy(hidden_state())
        expected = lm(hidden) if vocab is None else lm(hidden)[:, vocab]
        for logits in model(hidden):
            assert torch.allclose(logits, expected, atol=1e-6)


# Trees --------------------------------------------------------------------------------------


def token_paths(tree):
    tokens, paths, depths = (np.array(a) for a in (tree.tokens, tree.paths, tree.depths))
    return {
        tuple(int(t) for t in tokens[path[1 : depth + 1]])
        for path, depth in zip(paths, depths, strict=True)
    }


@pytest.mark.parametrize("reduced", [False, True])
def test_the_best_tree_holds_the_likeliest_paths(backbone, tmp_path, reduced):
    vocab = np.arange(2, VOCAB, 7, dtype=np.int32) if reduced else None
    model = random_heads(vocab=vocab)
    save_published(model, tmp_path / "published")
    heads = in_mlx(tmp_path / "published", backbone, tmp_path)
    hidden = hidden_state(1)
    tree = heads.propose_tree(
        mx.array([5], mx.int32), mx.array(hidden), TreeConfig(kind="best", size=12)
    )
    with torch.no_grad():
        probs = model(torch.from_numpy(hidden)[0]).softmax(-1)
    best = probs.sort(dim=-1, descending=True)
    width = min(11, probs.shape[1])
    ids = best.indices.numpy() if vocab is None else vocab[best.indices.numpy()]
    ranks = best_rank_paths(best.values.numpy(), 12, width)
    expected = {tuple(int(ids[level, r]) for level, r in enumerate(path)) for path in ranks}
    assert token_paths(tree) == expected
    assert tree.num_nodes == 12 and int(tree.tokens[0].item()) == 5


def test_the_full_tree_is_no_wider_than_the_draft_vocabulary(backbone, tmp_path):
    vocab = np.array([4, 40], np.int32)
    save_published(random_heads(vocab=vocab, num_heads=2), tmp_path / "published")
    heads = in_mlx(tmp_path / "published", backbone, tmp_path)
    tree = heads.propose_tree(
        mx.array([5], mx.int32), mx.array(hidden_state()), TreeConfig(kind="full", width=3)
    )
    assert tree.num_nodes == 1 + 2 + 4
    assert set(np.array(tree.tokens)[1:].tolist()) == {4, 40}


# Files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "pt", "medusa-2"])
def test_every_published_form_loads(backbone, base, published, tmp_path, form):
    expected = random_heads()
    if form == "pt":
        torch.save(load_file(published / SAFE), published / PICKLED)
        (published / SAFE).unlink()
    elif form == "medusa-2":
        tensors = {f"medusa_head.{n}": t for n, t in load_file(published / SAFE).items()}
        published = shutil.copytree(base, tmp_path / "medusa2")
        weights = load_file(published / "model.safetensors")
        save_file(weights | tensors, published / "model.safetensors", metadata={"format": "pt"})
    assert detect_kind(published) == "medusa"
    heads = in_mlx(published, backbone, tmp_path)
    hidden = hidden_state()
    agree(heads.medusa_logits(mx.array(hidden)), expected(torch.from_numpy(hidden)[0]))
    again = load_published(published)
    for name, weight in expected.named_parameters():
        assert torch.equal(weight, dict(again.named_parameters())[name])


def test_the_config_is_not_believed(published, backbone, tmp_path):
    settings = {"medusa_num_heads": 2, "medusa_num_layers": 5}
    (published / "config.json").write_text(json.dumps(settings))
    config = in_mlx(published, backbone, tmp_path).config
    assert (config.num_heads, config.num_layers) == (3, 1)


def test_the_command_writes_a_folder_that_loads(base, backbone, published, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["--heads", str(published), "--base", str(base), "--out", str(out)]
    assert main(command) == 0
    expected = 3 * (WIDTH * WIDTH + WIDTH + VOCAB * WIDTH)
    err = capsys.readouterr().err
    assert err == f"{out}: medusa, 3 tokens ahead, {expected:,} parameters\n"
    assert is_heads_folder(out)
    heads = read_heads(out)
    assert heads.config.kind == "medusa" and heads.base == BaseIdentity.of(backbone)
    assert load_heads(out, backbone).medusa_logits(mx.array(hidden_state())).shape == (3, VOCAB)
    assert main([*command, "--dtype", "float16"]) == 0  # in place of the first
    assert {a.dtype for a in read_heads(out).tensors.values()} == {mx.float16}


def test_a_medusa_2_model_is_its_own_base(base, published, tmp_path, capsys):
    model, out = shutil.copytree(base, tmp_path / "medusa2"), tmp_path / "out"
    tensors = {f"medusa_head.{n}": t for n, t in load_file(published / SAFE).items()}
    weights = load_file(model / "model.safetensors")
    save_file(weights | tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main(["--heads", str(model), "--base", str(model), "--out", str(out)]) == 0
    assert capsys.readouterr().err.startswith(f"{out}: medusa, 3 tokens ahead")


def test_pickled_code_is_not_run(published, refusal, tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'evil')!r}, 'w')",))

    (published / SAFE).unlink()
    torch.save({"0.0.linear.weight": Evil()}, published / PICKLED)
    assert "cannot be read without running code" in refusal(published)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "missing: 1.0.linear.bias"),
        (lambda t: t.update({"1.0.norm.weight": torch.zeros(3)}), "spare: 1.0.norm.weight"),
        (lambda t: t.update({"2.1.weight": torch.zeros(VOCAB, 3)}), "misshapen: 2.1.weight"),
        (lambda t: t["0.1.weight"].fill_(torch.nan), "NaN or infinity: 0.1.weight"),
        (lambda t: t.clear() or t.update({"head": torch.zeros(3)}), "no tensor named as a Medusa"),
    ],
)
def test_every_tensor_is_accounted_for(published, refusal, spoil, said):
    tensors = load_file(published / SAFE)
    spoil(tensors)
    save_file(tensors, published / SAFE)
    assert said in refusal(published)


def test_what_is_no_published_head_is_refused(base, published, refusal, tmp_path):
    assert "holds no drafting heads" in refusal(base)
    (published / SAFE).write_bytes((published / SAFE).read_bytes()[:500])
    assert "cannot be read" in refusal(published)
    for option in (["--fuse"], ["--scope", "all"], ["--streams", "x"]):
        assert "would do nothing with --heads" in refusal(published, *option)


def test_a_broken_draft_vocabulary_is_refused(tmp_path, refusal):
    vocab = np.array([4, 40, 41], np.int32)
    folder = tmp_path / "published"
    save_published(random_heads(vocab=vocab), folder)
    for tokens, said in (
        ([4, 4, 7], "not strictly ascending"),
        ([4, 5, VOCAB], f"tokens 4 to {VOCAB}"),
    ):
        save_file(
            {"draft_vocab": torch.tensor(tokens, dtype=torch.int32)}, folder / DRAFT_VOCAB_FILE
        )
        assert said in refusal(folder)
    save_file({"vocab": torch.zeros(3)}, folder / DRAFT_VOCAB_FILE)
    assert "holds vocab" in refusal(folder)


def test_another_base_is_refused(published, backbone, refusal, tmp_path):
    other = write_base(tmp_path / "other", width=48)
    assert "hidden size 48" in refusal(published, base=other)
    in_mlx(published, backbone, tmp_path)
    twin = load_base(write_base(tmp_path / "twin", norm=2.0), "float32")[0]
    with pytest.raises(InputError, match=r"another base model.*norm differs"):
        load_heads(tmp_path / "mlx", twin)


def test_a_broken_mlx_folder_is_refused(published, backbone, tmp_path):
    in_mlx(published, backbone, tmp_path)
    folder = tmp_path / "mlx"
    settings = json.loads((folder / CONFIG_FILE).read_text())
    for changes, said in (
        ({"format": "other"}, "format 'other'"),
        ({"kind": "eagle"}, "kind 'eagle'"),
        ({"base": {}}, "does not say which base"),
        ({"num_heads": 4}, "missing: 3.0.linear.weight"),
        ({"num_heads": "3"}, "num_heads is '3'"),
    ):
        (folder / CONFIG_FILE).write_text(json.dumps(settings | changes))
        with pytest.raises(InputError, match=said):
            load_heads(folder, backbone)
    (folder / CONFIG_FILE).write_text(
        json.dumps({n: v for n, v in settings.items() if n != "num_layers"})
    )
    with pytest.raises(InputError, match="lacks num_layers"):
        load_heads(folder, backbone)
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(InputError, match="does not exist"):
        load_heads(folder, backbone)
    with pytest.raises(InputError, match="no heads folder"):
        load_heads(tmp_path / "nowhere", backbone)
