"""Draft vocabularies and rotated values: formats, and PyTorch against MLX on tiny weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import first_tokens, make_model, slow
from tiny import make_base as make_mlx_base

from ssmlx.api import token_steps
from ssmlx.decoding.loop import plain_decode
from ssmlx.errors import InputError
from ssmlx.loading.adapter import load_adapter, write_adapter
from ssmlx.loading.attach import fuse_streams
from ssmlx.loading.load import load_base
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel, ValueRotation
from ssmlx.settings import GenerateConfig, StreamConfig, TreeConfig

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from oracle import (
    LAYERS,
    STREAMS,
    WIDTH,
    assert_close,
    gap,
    greedy_streaming,
    make_base,
    mlx_step,
    reference_step,
    some_tokens,
)
from oracle import (
    make_model as make_torch_model,
)
from oracle import stream_config as reference_config
from real import EXAMPLE, refusal
from safetensors.torch import load, save_file

from convert.formats.adapter import read_checkpoint
from convert.reference.checkpoint import load_reference, save_reference
from convert.reference.format import LoraSettings, read_stream_config, stream_settings
from convert.reference.model import StreamFusedReference, rotate_values

PROMPT = [5, 2, 3, 11, 7]
TREE_TOKENS, TREE_PARENTS = [11, 1, 6, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 2, 4]
VOCAB = 13
DRAFT_VOCAB = [1, 4, 5, 8, 12]
ROTATION = {"stream_design": "value_rotation", "rotation_step": 0.4}
DESIGNS = {
    "draft vocabulary": (DRAFT_VOCAB, {}),
    "rotation": ([], ROTATION),
    "both": (DRAFT_VOCAB, {**ROTATION, "stream_init": "residual", "stream_init_rank": 3}),
}


def make_reference(base=None, draft=(), *, vocab=VOCAB, lora_rank=3, **config):
    return make_torch_model(
        base=make_base(vocab=vocab) if base is None else base,
        lora=LoraSettings(lora_rank, 6),
        draft_vocab=torch.tensor(draft, dtype=torch.int32) if draft else None,
        draft_vocab_size=len(draft),
        **config,
    )


def convert(folder, reference):
    """The MLX adapter folder that the converter makes of a reference, and its base's backbone."""
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    save_reference(reference, checkpoint)
    adapter.mkdir()
    backbone, _ = load_base(folder / "base", "float32")
    streams = checkpoint / "streams.safetensors"
    write_adapter(adapter, read_checkpoint(checkpoint, streams, backbone))
    return adapter, backbone


def make_pair(folder, architecture="Llama", design="both", scope="all"):
    draft, config = DESIGNS[design]
    base = make_base(architecture, vocab=VOCAB)
    base.save_pretrained(folder / "base")
    reference = make_reference(base, draft, adapter_scope=scope, **config)
    adapter, backbone = convert(folder, reference)
    return reference, fuse_streams(backbone, load_adapter(adapter), merge_lora=True)


# --- PyTorch against MLX ---


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("design", ["both", *slow("draft vocabulary", "rotation")])
@pytest.mark.parametrize("architecture", ["Llama", *slow("Qwen3")])
def test_parity(architecture, design, scope, tmp_path):
    reference, model = make_pair(tmp_path, architecture, design, scope)
    for step in (
        (PROMPT[:-1], [PROMPT[-1]], [-1]),
        (PROMPT, TREE_TOKENS, TREE_PARENTS),
    ):
        found, expected = mlx_step(model, *step), reference_step(reference, *step)
        assert_close(found, expected)
    drafted = len(DRAFT_VOCAB) if design != "rotation" else VOCAB
    assert found[1].shape == (len(TREE_TOKENS), STREAMS, drafted)
    for width in (1, 2, 3, 7):  # 7 children of a stream that knows 5 tokens
        tokens, calls = greedy_streaming(
            reference, PROMPT, width=width, max_tokens=14, end_token_ids=[]
        )
        config = GenerateConfig(tree=TreeConfig(kind="full", width=width))
        steps = token_steps(model, PROMPT, model.make_cache(), config)
        found_tokens, lengths = first_tokens(steps, 14)
        assert (found_tokens, len(lengths)) == (tokens, calls)


# --- The draft vocabulary ---


def with_draft_vocab(model, draft):
    """The same model, its streams drafting from `draft` alone."""
    config = replace(model.config, draft_vocab_size=len(draft))
    streams = replace(model.streams, draft_vocab=mx.array([*draft], mx.int32))
    return StreamFusedModel(model.backbone, config, streams, model._scope)


@pytest.mark.parametrize("draft", [[2, 5, 7, 9], *slow([3], [0, 12])])
@pytest.mark.parametrize("scope", ["all", "streams"])
def test_drafts_from_few_tokens_lose_nothing(scope, draft):
    """Every tree here wants more candidates than there are tokens to draft."""
    model = with_draft_vocab(make_model("llama", scope), draft)
    expected, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache()), 24)
    for tree in (
        TreeConfig(kind="full", width=5),
        TreeConfig(kind="best", size=16),
        TreeConfig(kind="best", size=40, width=9),
        TreeConfig(kind="best", size=1),
    ):
        steps = token_steps(model, PROMPT, model.make_cache(), GenerateConfig(tree=tree))
        tokens, lengths = first_tokens(steps, 24)
        assert tokens == expected
        if tree.kind == "full" and len(draft) == 4:
            assert len(lengths) < 24  # something was drafted, and accepted


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_draft_head_is_rows_of_the_head(bias, tied, quantised):
    if bias and tied:
        return
    base = make_mlx_base(tie_word_embeddings=tied, intermediate_size=64)
    if bias:
        base.lm_head.bias = mx.random.normal((VOCAB,), key=mx.random.key(4))
    if quantised:
        nn.quantize(base, group_size=32, bits=4)
    backbone, rows = Backbone(base), mx.array(DRAFT_VOCAB)
    hidden = mx.random.normal((1, 6, 32), key=mx.random.key(3))
    found = backbone.logits(hidden, backbone.draft_head(rows))
    assert found.shape == (6, len(DRAFT_VOCAB))
    assert gap(found, backbone.logits(hidden)[:, rows]) < 1e-5
    head = base.model.embed_tokens if tied else base.lm_head
    assert head.weight.shape[0] == VOCAB  # the model's own stays whole
    if quantised:
        packed = (head[name][rows] for name in ("weight", "scales", "biases"))
        weight = mx.dequantize(*packed, group_size=32, bits=4)
        expected = base.model.norm(hidden)[0] @ weight.T + (head.bias[rows] if bias else 0)
        assert gap(found, expected) < 1e-5


def test_draft_head_is_gathered_once():
    model, hidden = with_draft_vocab(make_model("llama"), DRAFT_VOCAB), mx.ones((1, 3, 32))
    before = model.draft_logits(hidden)
    model.backbone.model.lm_head.weight = mx.zeros((VOCAB, 32))
    assert mx.array_equal(model.draft_logits(hidden), before)
    assert not model.backbone.logits(hidden).any()


def test_a_head_without_rows_is_refused():
    class Head(nn.Module):
        def __call__(self, x):
            return x[..., :VOCAB]

    model = make_model("llama")
    model.backbone.model.lm_head = model.backbone._head = Head()
    assert "its LM head is a Head" in refusal(with_draft_vocab, model, DRAFT_VOCAB)


def test_draft_logits_of_the_reference_follow_the_model():
    model, ids = make_reference(draft=DRAFT_VOCAB), some_tokens(6, vocab=VOCAB)
    whole = make_reference()
    whole.load_state_dict({k: v for k, v in model.state_dict().items() if k != "draft_vocab"})
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model, whole = model.to(dtype), whole.to(dtype)
        found, expected = model(ids), whole(ids)
        assert model.draft_vocab.dtype == torch.int32
        assert found.draft_vocab is model.draft_vocab and expected.draft_vocab is None
        assert found.stream_logits.dtype == dtype
        columns = expected.stream_logits[..., DRAFT_VOCAB]
        bound = 1e-5 if dtype != torch.bfloat16 else 0.02
        assert gap(found.stream_logits.float(), columns.float()) < bound
        assert found.early_exit_logits.shape[-1] == VOCAB


# --- Rotated values ---


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_values_turn_as_complex_numbers(num_streams):
    rng, step = np.random.default_rng(0), 0.3
    values = rng.normal(size=(1, 2, 4 * (1 + num_streams), 6)).astype(np.float32)
    angles = step * (1 + np.arange(4 * num_streams) % num_streams)
    streams = values[:, :, 4:]
    turned = (streams[..., :3] + 1j * streams[..., 3:]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    rotation = ValueRotation(3, step)
    found = np.array(rotation(mx.array(values), 4, num_streams))
    assert np.array_equal(found[:, :, :4], values[:, :, :4])
    assert gap(found[:, :, 4:], expected) < 1e-6
    theirs = rotate_values(torch.tensor(streams), num_streams, step)
    assert gap(theirs, expected) < 1e-6
    half = rotation(mx.array(values).astype(mx.float16), 4, num_streams)
    assert half.dtype == mx.float16 and gap(half, found) < 2e-3
    assert rotation(mx.ones((1, 2, 4, 6)), 4, 0).shape == (1, 2, 4, 6)


def test_rotation_tells_streams_apart_and_leaves_nodes_alone():
    ids, base = some_tokens(6, vocab=VOCAB), make_base(vocab=VOCAB)
    model = make_reference(base, **ROTATION)
    before = model(ids)
    model.config = replace(model.config, rotation_step=0.8)
    after = model(ids)
    assert torch.equal(before.main_logits, after.main_logits)
    assert torch.equal(before.early_exit_logits, after.early_exit_logits)
    moved = (before.stream_logits - after.stream_logits).abs().amax(-1)
    assert (moved > 1e-3).all()


def test_first_stream_hardly_turned_is_a_row_of_the_base_one_place_on():
    """Keys and queries stand at p + 1 whatever becomes of the values."""
    base, ids = make_base(vocab=VOCAB), some_tokens(5, vocab=VOCAB)
    config = {**ROTATION, "rotation_step": 1e-6, "num_msa_layers": LAYERS, "num_streams": 1}
    model = make_reference(base, lora_rank=0, **config)
    expected = base(torch.cat([ids, ids[:, -1:]], dim=1)).logits[:, -1]
    assert gap(model(ids).stream_logits[:, -1, 0], expected) < 1e-4
    model.config = replace(model.config, rotation_step=0.5)
    assert gap(model(ids).stream_logits[:, -1, 0], expected) > 1e-2


def test_gradients_pass_through_the_rotation():
    model, ids = make_reference(**ROTATION), some_tokens(6, vocab=VOCAB)
    weight = model.adapters["layers.2.self_attn.v_proj"].adapter.lora_B.weight

    def loss():
        return model(ids).stream_logits.square().mean()

    loss().backward()
    length, step, sides = weight.grad.norm(), 1e-3, []
    with torch.no_grad():
        for distance in (step, -2 * step):  # along the gradient: forth, then back past it
            weight += distance * weight.grad / length
            sides.append(loss())
    assert torch.allclose((sides[0] - sides[1]) / (2 * step), length, rtol=1e-2)


@pytest.mark.parametrize("config", [{}, ROTATION])
def test_a_narrow_base_under_wider_adapters(config):
    """Trained in mixed precision, the base is bfloat16 and what is trained float32."""
    model = make_reference(make_base(vocab=VOCAB).bfloat16(), DRAFT_VOCAB, **config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    ids = some_tokens(6, vocab=VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        nodes = torch.randn(1, 3, WIDTH, dtype=torch.bfloat16)
        assert model.insert_streams(nodes).dtype == torch.bfloat16
        logits = model(ids).stream_logits
    assert logits.shape == (1, 6, STREAMS, len(DRAFT_VOCAB)) and logits.isfinite().all()
    logits.float().square().mean().backward()
    trained = [p for n, p in model.named_parameters() if "layers.2." in n and p.requires_grad]
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in trained)


# --- Settings ---


def stream_config(**changes):
    sizes = {"num_streams": 2, "num_msa_layers": 2, "num_layers": 4, "hidden_size": 32}
    return StreamConfig(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stream_design": "rotation"}, "stream_design is 'rotation'; expected one of embeddings"),
        ({"stream_design": "value_rotation"}, "has rotation_step 0.0; expected more than 0"),
        ({**ROTATION, "rotation_step": -0.1}, "rotation_step is -0.1; expected 0 to 1.57"),
        ({**ROTATION, "rotation_step": 1.6}, "rotation_step is 1.6; expected 0 to 1.57"),
        ({**ROTATION, "rotation_step": math.nan}, "rotation_step is nan"),
        ({**ROTATION, "rotation_step": True}, "rotation_step is True"),
        ({**ROTATION, "rotation_step": "0.1"}, "rotation_step is '0.1'"),
        ({"rotation_step": 0.1}, "'embeddings' has rotation_step 0.1; expected 0"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1; expected 0 or more"),
        ({"draft_vocab_size": 2.0}, "draft_vocab_size is 2.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, said):
    assert said in refusal(stream_config, **changes)


def test_settings_survive_both_files(tmp_path):
    config = stream_config(**ROTATION, draft_vocab_size=5, prune_rank=2)
    assert StreamConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path = tmp_path / "streams_config.json"
    path.write_text(json.dumps(stream_settings(config)))
    assert read_stream_config(path) == config
    assert stream_config(**{**ROTATION, "rotation_step": math.pi / 2}).rotation_step > 1.57


def test_settings_from_before_still_load(tmp_path):
    config = read_stream_config(EXAMPLE / "streams_config.json")
    assert (config.stream_design, config.rotation_step, config.draft_vocab_size) == (
        "embeddings", 0, 0,
    )  # fmt: skip
    make_base(vocab=VOCAB).save_pretrained(tmp_path / "base")
    adapter, backbone = convert(tmp_path, make_reference())
    for folder in (tmp_path / "checkpoint", adapter):
        path = folder / "streams_config.json"
        values = json.loads(path.read_text())
        for name in ("stream_design", "rotation_step", "draft_vocab_size"):
            del values[name]
        path.write_text(json.dumps(values))
    assert load_reference(make_base(vocab=VOCAB), tmp_path / "checkpoint").draft_vocab is None
    model = fuse_streams(backbone, load_adapter(adapter), merge_lora=True)
    assert model.draft_vocab is None and model.draft_vocab_size == VOCAB


# --- Files ---


def tensors_of(path: Path):
    return load(path.read_bytes())


@pytest.mark.parametrize("design", DESIGNS)
def test_round_trip(design, tmp_path):
    reference, model = make_pair(tmp_path, design=design)
    draft, config = DESIGNS[design]
    saved = tensors_of(tmp_path / "checkpoint" / "streams.safetensors")
    written = tensors_of(tmp_path / "adapter" / "streams.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], written[name]) for name in saved)
    assert ("stream_embeddings" in saved) == (not config)
    assert ("draft_vocab" in saved) == bool(draft)
    if draft:
        assert saved["draft_vocab"].dtype == torch.int32
        assert saved["draft_vocab"].tolist() == model.draft_vocab.tolist() == draft
    numbers = sum(tensor.numel() for name, tensor in saved.items() if name != "draft_vocab")
    assert model.streams.num_parameters == numbers
    again = load_reference(make_base(vocab=VOCAB), tmp_path / "checkpoint")
    assert again.config == reference.config
    ids = some_tokens(6, vocab=VOCAB)
    assert torch.equal(again(ids).stream_logits, reference(ids).stream_logits)
    backbone, _ = load_base(tmp_path / "base", "float16")
    half = fuse_streams(backbone, load_adapter(tmp_path / "adapter"), merge_lora=True)
    if draft:
        assert half.draft_vocab.dtype == mx.int32 and half.draft_vocab.tolist() == draft
    tokens, _ = first_tokens(token_steps(half, PROMPT, half.make_cache(), GenerateConfig()), 8)
    assert len(tokens) == 8


def test_streams_without_any_tensor(tmp_path):
    """Rotation, no initial map, no pruning: only the settings remain."""
    make_base(vocab=VOCAB).save_pretrained(tmp_path / "base")
    reference = make_reference(**ROTATION, prune_rank=0)
    adapter, backbone = convert(tmp_path, reference)
    assert tensors_of(adapter / "streams.safetensors") == {}
    loaded = load_adapter(adapter)
    assert loaded.streams.num_parameters == 0
    assert fuse_streams(backbone, loaded, merge_lora=True).num_streams == STREAMS
    assert load_reference(make_base(vocab=VOCAB), tmp_path / "checkpoint").config.num_streams == 2


RULE = "expected int32 [5], token ids strictly ascending from 0 to 12"


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (torch.tensor([1, 4, 8, 5, 12]).int(), "a draft_vocab that is not strictly ascending"),
        (torch.tensor([1, 4, 4, 8, 12]).int(), "a draft_vocab that is not strictly ascending"),
        (torch.tensor([1, 4, 5, 8, 13]).int(), "tokens 1 to 13 in draft_vocab"),
        (torch.tensor([-1, 4, 5, 8, 12]).int(), "tokens -1 to 12 in draft_vocab"),
        (torch.tensor([1.0, 4, 5, 8, 12]), "a draft_vocab of float32 [5]"),
        (torch.tensor([1, 4, 5, 8, 12]), "a draft_vocab of int64 [5]"),
        (torch.tensor([[1, 4, 5, 8, 12]]).int(), "draft_vocab"),
        (torch.tensor([1, 4, 5, 8]).int(), "draft_vocab"),
        (None, "draft_vocab"),
    ],
)
def test_a_faulty_draft_vocabulary_is_told(draft, said, tmp_path):
    make_base(vocab=VOCAB).save_pretrained(tmp_path / "base")
    adapter, backbone = convert(tmp_path, make_reference(draft=DRAFT_VOCAB))
    checkpoint = tmp_path / "checkpoint"
    for folder in (checkpoint, adapter):
        path = folder / "streams.safetensors"
        tensors = {k: v for k, v in tensors_of(path).items() if k != "draft_vocab"}
        save_file(tensors if draft is None else {**tensors, "draft_vocab": draft}, path)
    streams = checkpoint / "streams.safetensors"
    messages = [
        refusal(load_reference, make_base(vocab=VOCAB), checkpoint),
        refusal(read_checkpoint, checkpoint, streams, backbone),
        refusal(load_adapter, adapter),
    ]
    for message, folder in zip(messages, (checkpoint, checkpoint, adapter), strict=True):
        assert said in message and str(folder / "streams.safetensors") in message
        assert said == "draft_vocab" or RULE in message


def test_tensors_of_another_design_are_told(tmp_path):
    make_base(vocab=VOCAB).save_pretrained(tmp_path / "base")
    adapter, _ = convert(tmp_path, make_reference(draft=DRAFT_VOCAB))
    for changes, name in (({"draft_vocab_size": 0}, "draft_vocab"), (ROTATION, "stream_emb")):
        for folder in (tmp_path / "checkpoint", adapter):
            path = folder / "streams_config.json"
            before = path.read_text()
            path.write_text(json.dumps({**json.loads(before), **changes}))
            if folder == adapter:
                assert f"spare: {name}" in refusal(load_adapter, adapter)
            else:
                message = refusal(load_reference, make_base(vocab=VOCAB), folder)
                assert f"streams.safetensors has tensors spare: {name}" in message
            path.write_text(before)


def test_a_draft_vocabulary_must_come_with_its_size():
    ids = torch.tensor(DRAFT_VOCAB, dtype=torch.int32)
    for size, given, said in ((5, None, "has no draft_vocab"), (0, ids, "has a draft_vocab")):
        config = reference_config(draft_vocab_size=size)
        assert said in refusal(
            StreamFusedReference, make_base(vocab=VOCAB), config, draft_vocab=given
        )
    with pytest.raises(InputError, match=r"draft_vocab of int64 \[5\]"):
        config = reference_config(draft_vocab_size=5)
        StreamFusedReference(make_base(vocab=VOCAB), config, draft_vocab=ids.long())
