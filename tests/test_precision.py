"""perf.precision: where drafting parts from plain decoding in 16 bits, and by how little."""

import json

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest
from real import answer, make_adapter, words, write_base, write_packed
from tiny import make_base, make_model, make_tokenizer, slow

from perf import precision
from perf.run import target
from perf.run.rounding import RoundedEmbedding, RoundedLinear, replace_by_rounding_layers
from perf.run.target import PACKED, load_weights_as
from ssmlx.loading.adapter import write_adapter
from ssmlx.settings import TreeConfig

TOKENS = 6
CHAIN = TreeConfig(kind="full", width=1)
BEST = TreeConfig(kind="best", size=12)
# 8 times what rounding may be off by, as a share of the larger of two logits.
NEAR_TIE = {"float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, an adapter, and prompts."""
    root = tmp_path_factory.mktemp("precision")
    base = write_base(root / "base")
    (root / "tuned").mkdir()
    write_adapter(root / "tuned", make_adapter(base))
    rows = [json.dumps({"prompt": words(5, first), "completion": "w1"}) for first in (1, 9, 17)]
    (root / "prompts.jsonl").write_text("\n".join(rows))
    return root


@pytest.fixture
def measure(folders, tmp_path):
    """Run the command; gives its exit code."""

    def run(*more):
        argv = ["--adapter", folders / "tuned", "--model", folders / "base", "--out", tmp_path]
        argv += ["--data", folders / "prompts.jsonl", "--max-tokens", TOKENS, "--task", "sql"]
        return precision.main([*map(str, argv), *more])

    return run


def parts(tmp_path):
    return json.loads((tmp_path / "precision.json").read_text())["tasks"]


@pytest.mark.parametrize("dtypes", [["bfloat16", "4bit"], *slow(["float16", "8bit"])])
def test_every_precision_is_measured(measure, tmp_path, capsys, dtypes):
    assert measure("--count", "2", "--dtype", *dtypes) == 0
    found = parts(tmp_path)
    assert [part["dtype"] for part in found] == dtypes
    assert {part["products"] for part in found} == {"float32, rounded"}
    for part in found:
        plain, *speculative = part["systems"]
        assert 0 <= part["one_pass"]["value"] < 500
        assert (plain["name"], plain["differences"]) == ("plain", [])
        assert [row["name"] for row in speculative] == list(precision.VARIANTS)
        for row in speculative:
            assert row["compared"] <= 2 * TOKENS and row["metric"] and row["metric_less_plain"]
            assert row["same_as_plain"] == 2 - len(row["differences"])
            assert all(one["near_tie"] for one in row["differences"])
    assert capsys.readouterr().out.count(f"| sql, {dtypes[1]} | `streams") == 2


def test_a_run_goes_on(measure, tmp_path, monkeypatch):
    assert measure("--count", "1", "--dtype", "bfloat16") == 0
    real = target.Target.answer
    asked = []
    monkeypatch.setattr(target.Target, "answer", lambda *a: asked.append(a) or real(*a))
    assert measure("--dtype", "bfloat16") == 0
    assert len(asked) == 2 * 3 and parts(tmp_path)[0]["prompts"] == 3


def test_a_divergence_counts_with_the_tokens_before_it(measure, tmp_path, monkeypatch, capsys):
    """Two of three answers, parted on purpose at their third token by more than rounding."""
    real = target.answer_with_ssmlx
    calls = []

    def other(model, tokenizer, prompt, config, **loaded):
        found = real(model, tokenizer, prompt, config, **loaded)
        if config.decoding == "speculative":
            calls.append(prompt)
            found.tokens[2] = 0 if len(calls) < 3 else found.tokens[2]
        return found

    monkeypatch.setattr(target, "answer_with_ssmlx", other)
    assert measure("--dtype", "bfloat16", "--systems", "streams") == 1
    row = parts(tmp_path)[0]["systems"][1]
    assert [one["token"] for one in row["differences"]] == [2, 2]
    assert row["compared"] == 3 + 3 + TOKENS and row["same_as_plain"] == 1
    assert row["per_thousand"]["value"] == pytest.approx(1000 * 2 / row["compared"])
    one = row["differences"][0]
    assert one["gap"] > NEAR_TIE["bfloat16"] * one["logit"] and not one["near_tie"]
    assert capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_product_is_rounded_once(dtype, bits):
    kind = getattr(mx, dtype)
    layers = nn.Linear(64, 24), nn.Embedding(24, 64)
    for layer in layers:
        layer.set_dtype(kind)
    own = [one if bits is None else one.to_quantized(32, bits) for one in layers]
    rounded = RoundedLinear(own[0]), RoundedEmbedding(own[1], dtype)
    x = mx.random.normal((1, 5, 64), key=mx.random.key(1)).astype(kind)
    for layer, product in ((rounded[0], rounded[0](x)), (rounded[1], rounded[1].as_linear(x))):
        exact = np.array(x.astype(mx.float32), np.float64) @ np.array(layer.weight, np.float64).T
        exact += np.array(layer.bias, np.float64) if "bias" in layer else 0.0
        assert product.dtype == kind
        # Half a unit in the last place, and what float32's sum is off by.
        off = np.abs(np.array(product.astype(mx.float32)) - exact)
        assert (off <= (NEAR_TIE[dtype] / 8 + 1e-5) * np.abs(exact).max()).all()
    tokens = mx.array([3, 0, 23])
    ours = rounded[1](tokens)
    theirs = own[1](tokens)
    assert mx.array_equal(ours, theirs) or bits
    # MLX unpacks in the type itself: a product and a sum, each rounded to the size of a group.
    assert mx.abs(ours - theirs).max() <= 2 * NEAR_TIE[dtype] / 8 * mx.abs(theirs).max()


def test_a_base_that_is_stored_in_as_many_bits_keeps_them(folders, tmp_path):
    stored = mx.load(str(write_packed(tmp_path, folders / "base") / "model.safetensors"))
    name = "model.layers.0.self_attn.q_proj"
    for dtype, bits in PACKED.items():
        layer = dict(load_weights_as(dtype, tmp_path)[0].named_modules())[name]
        assert (layer.bits, layer.scales.dtype) == (bits, mx.float16)
        assert mx.array_equal(layer.weight, stored[f"{name}.weight"]) == (bits == 4)


def written(model, **settings):
    """64 tokens."""
    return answer(model, make_tokenizer(), [3, 1, 4, 1, 5], max_tokens=64, **settings)[0]


def assert_near_tie(base, dtype, found, plain):
    """How many tokens are the same; where they part, rounding may have decided."""
    pairs = zip(found, plain, strict=True)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return len(plain)
    logits = base(mx.array([[3, 1, 4, 1, 5, *plain[:place]]]))[0, -1].astype(mx.float32)
    ours = float(logits[found[place]])
    theirs = float(logits[plain[place]])
    assert abs(ours - theirs) <= NEAR_TIE[dtype] * max(abs(ours), abs(theirs)), place
    return place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rounds", "bits", "width"),
    [(True, None, 256), (True, 8, 256), (True, 4, 256), (False, None, 64), (False, 4, 64)],
)
def test_answers_part_at_near_ties_alone(rounds, bits, width, dtype):
    """By sums that depend on the number of rows, as a GPU's, and by MLX's own."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    same = 0
    seeds = range(3 if rounds else 1)
    for seed in seeds:
        base = make_base(seed=seed, vocab=997, **sizes)
        base.set_dtype(getattr(mx, dtype))
        if bits:
            nn.quantize(base, 32, bits)
        if rounds:
            replace_by_rounding_layers(base, dtype)
        model = make_model(base=base, scope="streams", adapter={"lora_scale": 1.0})
        plain = written(model, decoding="plain")
        for tree in (BEST, CHAIN):
            same += assert_near_tie(base, dtype, written(model, tree=tree), plain)
        with pytest.raises(AssertionError):
            assert_near_tie(base, dtype, [*plain[:9], (plain[9] + 1) % 997, *plain[10:]], plain)
    assert same >= len(seeds) * 64  # of twice as many
