"""What the package needs of a model: regular layers, and rotary embeddings with positions."""

from __future__ import annotations

from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from tiny import (
    ARCHITECTURES,
    first_tokens,
    make_base,
    make_model,
    make_tokenizer,
    randomise,
    tree_from_parents,
)

from ssmlx.api import stream_generate
from ssmlx.decoding.loop import plain_decode, streaming_decode
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.errors import InputError
from ssmlx.model.backbone import Backbone, PositionedRope
from ssmlx.model.lora import LoraWeights, RowLora, RowScope, merged
from ssmlx.settings import TreeConfig


def other_model(architecture, **sizes):
    module = import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": architecture, **sizes}))
    randomise(model, 0)
    return model


def make_gpt2():
    return other_model(
        "gpt2",
        n_ctx=32,
        n_embd=16,
        n_head=2,
        n_layer=2,
        n_positions=32,
        layer_norm_epsilon=1e-5,
        vocab_size=13,
    )


def make_mamba():
    return other_model(
        "mamba",
        vocab_size=13,
        hidden_size=16,
        intermediate_size=32,
        state_size=4,
        num_hidden_layers=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=2,
    )


def make_sliding():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return make_base(layer_types=kinds, sliding_window=8)


def make_dynamic():
    return make_base(rope_scaling={"type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: make_base("gemma2"), "differ by"),
        (make_sliding, "layer 0 keeps a RotatingKVCache"),
        (make_gpt2, "embed_tokens"),
        (make_mamba, "'mamba'"),
        (make_dynamic, "DynamicNTKScalingRoPE"),
    ],
    ids=["gemma2", "sliding", "gpt2", "mamba", "dynamic"],
)
def test_irregular_models_are_refused(make, told):
    with pytest.raises(InputError, match=told) as error:
        Backbone(make())
    assert "cannot draft for itself" in error.value.found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_regular_models_are_wrapped_once(architecture):
    model = make_base(architecture)
    tokens = mx.array([[4, 2, 9, 7]])
    before = model(tokens)
    Backbone(model)
    backbone = Backbone(model)
    assert mx.array_equal(model(tokens), before)
    assert not isinstance(backbone.layers[0].self_attn.rope.rope, PositionedRope)
    assert (backbone.hidden_size, backbone.vocab_size, len(backbone.layers)) == (32, 13, 3)
    assert backbone.context_length == 512


ROPES = {
    "plain": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("kind", ROPES)
def test_positions_equal_offsets(kind, traditional):
    rope = initialize_rope(8, 1000.0, traditional, ROPES[kind], 256)
    wrapped = PositionedRope(rope)
    x = mx.random.normal((1, 2, 6, 8), key=mx.random.key(0))
    positions = [9, 10, 10, 40, 3, 0]
    found = wrapped(x, offset=mx.array(positions))
    for row, position in enumerate(positions):
        expected = rope(x[:, :, row : row + 1], offset=position)
        assert np.allclose(found[:, :, row : row + 1], expected, atol=1e-5)
    whole = wrapped(x, offset=mx.arange(6) + 7)
    assert np.allclose(whole, rope(x, offset=7), atol=1e-5)
    assert mx.array_equal(wrapped(x, offset=7), rope(x, offset=7))


SCALED = {"llama3": "llama", "yarn": "qwen2", "linear": "llama", "longrope": "phi3"}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_ropes_decode_the_same(kind):
    model = make_model(SCALED[kind], rope_scaling=ROPES[kind])
    expected = first_tokens(plain_decode(model, [1, 2, 3], model.make_cache()), 12)[0]
    drafter = StreamDrafter(model, TreeConfig(), 3)
    steps = streaming_decode(model, [1, 2, 3], model.make_cache(), drafter=drafter)
    assert first_tokens(steps, 12)[0] == expected


# --- Quantised bases, and LoRA by row ---


def make_quantised():
    model = make_base()
    nn.quantize(model, group_size=32, bits=4, class_predicate=is_packable)
    return model


def is_packable(path, module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize("scope", ["all", "streams"])
def test_quantised_base_with_streams(scope):
    model = make_model(scope=scope, base=make_quantised())
    attention = model.backbone.layers[-1].self_attn
    assert isinstance(attention.q_proj, RowLora)
    assert isinstance(attention.q_proj.linear, nn.QuantizedLinear)
    tokenizer, settings = make_tokenizer(), {"max_tokens": 16, "tree": TreeConfig(kind="full")}
    answers = {}
    for decoding in ("plain", "streaming"):
        found = stream_generate(model, tokenizer, [1, 2, 3], decoding=decoding, **settings)
        answers[decoding] = [token for response in found for token in response.tokens]
    assert answers["streaming"] == answers["plain"]
    if scope == "streams":
        base = make_quantised()
        tokens = [1, 2, 3]
        for _ in range(16):
            tokens.append(int(base(mx.array([tokens]))[0, -1].argmax()))
        assert answers["plain"] == tokens[3:]


def random_lora(seed=0):
    key = mx.random.split(mx.random.key(seed))
    return LoraWeights(
        mx.random.normal((32, 2), key=key[0]), mx.random.normal((2, 32), key=key[1]), 1.5
    )


@pytest.mark.parametrize("quantised", [False, True])
def test_row_lora_acts_on_its_rows_alone(quantised):
    linear = nn.Linear(32, 32)
    linear = nn.QuantizedLinear.from_linear(linear, 32, 4) if quantised else linear
    scope, lora = RowScope(), random_lora()
    layer, x = RowLora(linear, lora, scope), mx.random.normal((1, 7, 32), key=mx.random.key(1))
    plain = linear(x)
    added = plain + 1.5 * (x @ lora.a @ lora.b)
    assert mx.array_equal(layer(x), plain)
    with scope.starting_at(3):
        found = layer(x)
        assert mx.array_equal(found[:, :3], plain[:, :3])  # bit for bit
        assert np.allclose(found[:, 3:], added[:, 3:], atol=1e-4)
        with scope.starting_at(0):
            assert np.allclose(layer(x), added, atol=1e-4)
        assert scope.first == 3
    assert mx.array_equal(layer(x), plain)


def test_merged_lora():
    linear, lora = nn.Linear(32, 32), random_lora()
    x = mx.random.normal((1, 3, 32), key=mx.random.key(2))
    expected = linear(x) + 1.5 * (x @ lora.a @ lora.b)
    assert np.allclose(merged(linear, lora)(x), expected, atol=1e-4)


@pytest.mark.parametrize("quantised", [False, True])
def test_scope_streams_leaves_node_rows_untouched(quantised):
    """The same rows through the upper layers, with this LoRA and with another: equal bits."""
    hidden = mx.random.normal((1, 3, 32), key=mx.random.key(3))
    tree = tree_from_parents([1, 2, 3], [0, 0, 0])
    rows = []
    for factor in (0.0, 5.0):
        base = make_quantised() if quantised else make_base()
        model = make_model(scope="streams", base=base)
        for module in model.backbone.model.modules():
            if isinstance(module, RowLora):
                module.scale = factor
        cache = model.make_cache()
        cache.reserve(tokens=1, scratch=12)
        rows.append(model.upper(model.insert(hidden, 3), tree, cache, 3))
    assert mx.array_equal(rows[0][:, :3], rows[1][:, :3])
    assert not np.allclose(rows[0][:, 3:], rows[1][:, 3:], atol=1e-2)
