"""Quantised bases in mlx-lm's formats, with streams and LoRA that are not: exact, and untouched."""

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.utils import load_adapters, load_model
from real import ROOT, answer, write_packed
from real import write_base as write_folder
from tiny import VOCAB, make_adapter, make_base, make_tokenizer, mlx_lm_tokens
from tiny_heads import make_heads

from ssmlx.drafters.draft_model import DraftModel
from ssmlx.loading.adapter import load_adapter, write_adapter
from ssmlx.loading.attach import attach_adapter
from ssmlx.loading.load import is_quantised, load_base, load_tokenizer, resolve_draft_bits
from ssmlx.loading.names import resolve_adapter, resolve_model
from ssmlx.model.backbone import Backbone
from ssmlx.model.lm_head import head_bytes
from ssmlx.model.lora import RowLora
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import encode_prompt, read_prompts
from ssmlx.settings import PruneConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
COUNT = 24
WIDTH = 64
SIZES = {"hidden_size": WIDTH, "intermediate_size": 128, "head_dim": 16}
BEST = TreeConfig(kind="best", size=12)
WAYS = (
    {"decoding": "plain"}, {"tree": TreeConfig(kind="full", width=2)},
    {"tree": BEST, "stream_schedule": "fused"},
    {"tree": BEST, "prune": PruneConfig(kind="budget", keep=5)},
)  # fmt: skip
# How far two logits may be apart for rounding to have chosen between them, as a share of the
# larger: a few units in the last place, summed over a row. Rows of a tree and a single row take
# the same products in another order.
NEAR_TIE = 64 * 2**-24


def packed_base(bits: int, group_size: int, **changes) -> nn.Module:
    """Quantised as mlx-lm does: every linear layer and embedding."""
    model = make_base(**{**SIZES, **changes})
    nn.quantize(model, group_size=group_size, bits=bits)
    mx.eval(model.parameters())
    return model


def written(model: StreamFusedModel, **settings) -> list[int]:
    return answer(model, make_tokenizer(), PROMPT, max_tokens=COUNT, **settings)[0]


def assert_same_but_for_a_near_tie(
    found: list[int], expected: list[int], target: nn.Module, prompt: list[int]
) -> None:
    """The same tokens, up to where rounding may have decided, which is shown by the logits."""
    pairs = zip(found, expected, strict=True)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return
    logits = target(mx.array([prompt + expected[:place]]))[0, -1]
    values = np.array(logits.astype(mx.float32))
    first, second = np.sort(values)[::-1][:2]
    assert {values[found[place]], values[expected[place]]} == {first, second}, place
    limit = NEAR_TIE * np.abs(values).max()
    assert first - second <= limit, f"token {place}: the logits are {first - second:.3g} apart"


def drafter_settings(name: str, backbone: Backbone) -> dict:
    if name == "draft-model":
        return {"drafter": DraftModel(packed_base(4, 32, seed=9))}
    if name in ("medusa", "mlp-speculator"):
        return {"drafter": make_heads(name, backbone), "tree": BEST}
    return {"drafter": name}


@pytest.mark.parametrize(("name", "tied"), [
    ("prompt-lookup", True), ("lookahead", False), ("draft-model", False), ("medusa", True),
    ("mlp-speculator", False),
])  # fmt: skip
def test_every_other_drafter_writes_the_same(name, tied):
    make = lambda: packed_base(4, 32, tie_word_embeddings=tied)  # noqa: E731
    model = StreamFusedModel(Backbone(make()))
    target = make()
    expected = mlx_lm_tokens(target, PROMPT, COUNT)
    found = written(model, **drafter_settings(name, model.backbone))
    assert_same_but_for_a_near_tie(found, expected, target, PROMPT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_head_can_be_packed_alone(tied, bias):
    """It guesses all but as the head does; the head itself, and the answer, stay as they are."""
    base = make_base(**SIZES, tie_word_embeddings=tied)
    if bias and tied:
        return
    if bias:
        base.lm_head.bias = mx.random.normal((VOCAB,), key=mx.random.key(4))
    vocab = mx.array([0, 2, 3, 5, 7, 11])
    backbone = Backbone(base, draft_bits=8)
    hidden = mx.random.normal((1, 4, WIDTH), key=mx.random.key(1))
    whole = backbone.logits(hidden)[:, vocab]
    guessed = backbone.logits(hidden, backbone.draft_head(vocab))
    assert 0 < mx.abs(guessed - whole).max() < 0.02 * mx.abs(whole).max()
    assert head_bytes(backbone.draft_head(vocab)) < head_bytes(Backbone(base).draft_head(vocab)) / 2
    assert not is_quantised(base)


@pytest.mark.parametrize("name, on_cpu, on_gpu", [("auto", None, 8), ("stored", None, None),
                                                  ("8bit", 8, 8)])  # fmt: skip
def test_what_the_draft_head_is_packed_to(name, on_cpu, on_gpu, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert resolve_draft_bits(name) == on_cpu
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert resolve_draft_bits(name) == on_gpu


def mixed(path: str, module: nn.Module):
    """4 bits in groups of 32, but 8 for the embedding and for layer 1."""
    is_wide = "embed_tokens" in path or ".1." in path
    return (
        {"bits": 8 if is_wide else 4, "group_size": 32}
        if hasattr(module, "to_quantized")
        else False
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A float folder, its adapters, and mlx-lm's quantised copies of it."""
    root = tmp_path_factory.mktemp("quantised")
    base = write_folder(root / "float", width=64)
    for scope in ("all", "streams"):
        (root / scope).mkdir()
        backbone, _ = load_base(base, "float32")
        write_adapter(root / scope, make_adapter(backbone, scope, lora_scale=1.0))
    for name, options in {
        "4": {"bits": 4, "group_size": 32},
        "8": {"bits": 8, "group_size": 64},
        "mixed": {"bits": 4, "group_size": 32, "quant_predicate": mixed},
    }.items():
        write_packed(root / name, base, **options)
    return root


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("name", ["4", "8", "mixed"])
def test_a_folder_that_mlx_lm_packed_is_used_as_stored(folders, name, scope):
    packed = folders / name
    model, tokenizer = ssmlx.load(str(packed), adapter=folders / scope, dtype="stored")
    assert isinstance(model.backbone.model.model.embed_tokens, nn.QuantizedEmbedding)
    prompt = [9, 10, 11, 12]
    target, _ = mlx_lm.load(str(packed))
    if scope == "all":  # mlx-lm reads the adapter's LoRA by itself
        target, _ = mlx_lm.load(str(packed), adapter_path=str(folders / scope))
    expected = mlx_lm_tokens(target, prompt, COUNT)
    assert len(set(expected)) > 2  # not one word over and over, which any model might write
    for settings in WAYS:
        found, _ = answer(model, tokenizer, prompt, max_tokens=COUNT, **settings)
        assert_same_but_for_a_near_tie(found, expected, target, prompt)


def test_a_mixed_folder_keeps_its_own_bits(folders):
    model = load_base(folders / "mixed", "stored")[0].model
    bits = {path: m.bits for path, m in model.named_modules() if hasattr(m, "bits")}
    assert bits["model.embed_tokens"] == 8 and bits["model.layers.1.mlp.up_proj"] == 8
    assert bits["model.layers.2.mlp.up_proj"] == 4


def test_unpacked_weights_are_the_packed_ones(folders):
    """`--dtype float32` decodes with the same numbers, so LoRA can be merged into them."""
    prompt = [9, 10, 11, 12]
    packed, tokenizer = ssmlx.load(str(folders / "4"), adapter=folders / "all", dtype="stored")
    unpacked, _ = ssmlx.load(str(folders / "4"), adapter=folders / "all", dtype="float32")
    top = unpacked.backbone.layers[-1].self_attn.q_proj
    assert type(top) is nn.Linear  # merged
    found = answer(unpacked, tokenizer, prompt, max_tokens=12, tree=BEST)[0]
    expected = answer(packed, tokenizer, prompt, max_tokens=12, decoding="plain")[0]
    assert_same_but_for_a_near_tie(found, expected, packed.backbone.model, prompt)


def real_packed():
    """SmolLM2-135M's own 4-bit weights, by mlx-lm's loader.

    Their scales become float32: MLX's CPU backend takes half a minute a row in half precision.
    """
    path = resolve_model("smollm2-135m-q4_1")
    model, config = load_model(path, lazy=True)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, load_tokenizer(path, config)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("name", ["sql", pytest.param("chat", marks=pytest.mark.long)])
def test_the_real_model_on_its_packed_weights(name):
    folder = resolve_adapter(name)
    base, tokenizer = real_packed()
    adapter = load_adapter(folder)
    model = attach_adapter(Backbone(base), adapter, merge_lora=True)
    assert isinstance(model.backbone.layers[-1].self_attn.q_proj, RowLora)
    target = real_packed()[0]
    if adapter.lora:
        target = load_adapters(target, str(folder))
    asked = read_prompts(ROOT / "examples" / "data" / "sql_test_100.jsonl")[1]
    prompt = encode_prompt(asked, model, tokenizer)
    expected = mlx_lm_tokens(target, prompt, 12)
    for settings in ({"decoding": "plain"}, {"tree": TreeConfig(size=8)}):
        found, last = answer(model, tokenizer, prompt, max_tokens=12, **settings)
        assert_same_but_for_a_near_tie(found, expected, target, prompt)
    assert last.tokens_per_call > (2.0 if name == "sql" else 1.0)
