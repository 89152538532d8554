"""Rotary settings of config.json as mlx-lm's classes read them, and how far a model reaches."""

import json
from copy import deepcopy
from dataclasses import fields
from importlib import import_module

import mlx.core as mx
import pytest
import tiny
from real import answer
from refusals import mentions, refusal
from tiny import assert_close, make_tokenizer, slow
from tiny_classes import write_model

from ssmlx.loading.load import load_base
from ssmlx.model.rope import context_length, rope_settings
from ssmlx.model.streams import StreamFusedModel

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BY_KIND = {
    "full_attention": {**LINEAR, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}
ONE_BASE = {kind: {**one, "rope_theta": 5000.0} for kind, one in BY_KIND.items()}
SAVED = {
    "gemma3_text": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 64,
        "rope_parameters": BY_KIND,
    },
    # mlx-lm's class has one base for both kinds, as all published models do.
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 64, "rope_parameters": ONE_BASE},
    "gpt_neox": {
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5},
    },
}


def save_as_transformers_does(folder, name, settings):
    """A random model of transformers, and its folder."""
    torch = pytest.importorskip("torch")
    import transformers

    config = transformers.CONFIG_MAPPING[name](**deepcopy({**SIZES, **settings}))
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else noise)
    model.save_pretrained(folder)
    return model, torch


@pytest.mark.parametrize("name", SAVED)
def test_a_model_that_transformers_saved_turns_by_the_same_angles(name, tmp_path):
    model, torch = save_as_transformers_does(tmp_path, name, SAVED[name])
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())
    tokens = [(7 * n * n + 3 * n) % 60 + 3 for n in range(40)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    found = load_base(tmp_path, "float32")[0].model(mx.array([tokens]))[0]
    assert_close(found, expected, 1e-3)


WRAPPED = {"gemma3": ("gemma3_text", "ModelArgs"), "gemma3n": ("gemma3n", "TextConfig")}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_of_one_that_also_sees(name):
    import transformers

    module, args = WRAPPED[name]
    kind = transformers.CONFIG_MAPPING[name]
    config = kind(text_config={"rope_parameters": deepcopy(BY_KIND)}).to_dict()
    assert "rope_theta" not in config["text_config"]
    own = {**config, **rope_settings(config)}["text_config"]
    made = getattr(import_module(f"mlx_lm.models.{module}"), args).from_dict(own)
    assert (made.rope_theta, made.rope_local_base_freq) == (5000.0, 70.0)
    assert made.rope_scaling == {**LINEAR, "type": "linear"}


SCALING = {**YARN, "type": "yarn"}


@pytest.mark.parametrize(("config", "expected"), [
    ({}, {}),
    ({"rope_theta": 5.0}, {}),
    ({"rope_parameters": None, "rope_scaling": None}, {}),
    ({"rope_parameters": {"rope_theta": 7.0}}, {"rope_theta": 7.0, "rope_scaling": None}),
    (
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
        {"rope_theta": 7.0, "rope_scaling": None},
    ),
    # transformers leaves the base out that is its class's own.
    ({"rope_theta": 5.0, "rope_parameters": YARN}, {"rope_scaling": SCALING}),
    ({"rope_parameters": {**YARN, "rope_theta": None}}, {"rope_scaling": SCALING}),
    # As Qwen's instructions have it, added to what transformers saved.
    (
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
        {"rope_theta": 7.0, "rope_scaling": SCALING},
    ),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}},
     {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}),
    ({"rope_parameters": BY_KIND, "rope_scaling": YARN},
     {"rope_theta": 5000.0, "rope_local_base_freq": 70.0, "rope_scaling": SCALING}),
    ({"rope_parameters": {**BY_KIND, "full_attention": None}}, {"rope_local_base_freq": 70.0}),
    ({"rope_parameters": {"full_attention": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}},
     {"rope_theta": 9.0, "rope_scaling": None}),
])  # fmt: skip
def test_the_settings_that_mlx_lm_reads(config, expected):
    before = json.dumps(config)
    assert rope_settings(config) == expected
    inner = {"text_config": {**config, **expected}} if expected else {}
    assert rope_settings({"text_config": config}) == inner
    assert json.dumps(config) == before


@pytest.mark.parametrize("name", ["gemma4_text", "laguna", "mellum", "spark2_5"])
def test_classes_that_read_them_by_kind_are_told_nothing_else(name):
    names = {one.name for one in fields(import_module(f"mlx_lm.models.{name}").ModelArgs)}
    assert "rope_parameters" in names
    assert not names & rope_settings({"rope_parameters": BY_KIND}).keys()


# --- how far a model reaches ---

LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_sequence_length",
    "max_seq_len", "max_context_length",
)  # fmt: skip
FAR = {"max_position_embeddings": 4096}
REACH = {  # what config.json says, and the context: of classes that do not read it, but two
    "gpt_oss": ({**FAR, "rope_scaling": YARN}, 4096),
    "mixtral": (FAR, 4096),
    "gemma": (FAR, 4096),
    "gemma2": (FAR, 4096),
    "cohere": ({**FAR, "model_max_length": 131072}, 131072),
    "cohere2": (FAR, 4096),
    "qwen2_moe": (FAR, 4096),
    "starcoder2": (FAR, 4096),
    "stablelm": (FAR, 4096),
    "hunyuan": (FAR, 4096),
    "dbrx": ({"max_seq_len": 4096}, 4096),
    "openelm": ({"max_context_length": 4096}, 4096),
    "kimi_linear": ({"model_max_length": 8192}, 8192),
    "phixtral": ({"n_positions": 4096}, 4096),
    "gemma3": ({}, 131072),
    "internlm2": ({}, 32768),
    "mamba2": ({}, None),
    "mamba": (FAR, None),
    "rwkv7": (FAR, None),
}


FIRST = {"cohere", "gemma3", "internlm2", "mamba2"}


@pytest.mark.parametrize("name", [*sorted(FIRST), *slow(*sorted(REACH.keys() - FIRST))])
def test_the_context_is_what_config_json_says(name, tmp_path):
    folder = write_model(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    said, expected = REACH[name]
    for settings in (config, config.get("text_config", {})):
        for one in LENGTHS:
            settings.pop(one, None)
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    assert load_base(folder, "float32")[0].context_length == expected


@pytest.mark.parametrize(("said", "expected"), [
    ({"model_type": "gpt2", "n_positions": 64, "max_position_embeddings": 10**6}, 64),
    ({"max_sequence_length": 2048}, 2048),
    ({"max_position_embeddings": 1e4, "model_max_length": 2.0**20}, 2**20),
    ({"max_position_embeddings": None, "model_max_length": "far"}, 512),
    ({"model_type": "gemma3_text"}, 131072),
    ({"model_type": "nobodys"}, 512),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 131072),
    ({"model_type": "gemma3_text", "max_position_embeddings": 300}, 300),
    ({"max_position_embeddings": 99, "text_config": {"max_position_embeddings": 300}}, 300),
])  # fmt: skip
def test_which_length_counts(said, expected):
    base = tiny.make_base()
    assert context_length(base, base.args, said) == expected


@pytest.mark.parametrize("name", ["gpt2", *slow("gpt_bigcode")])
def test_no_position_past_a_learned_table_is_looked_up(name, tmp_path):
    model = StreamFusedModel(load_base(write_model(name, tmp_path), "float32")[0])
    tokenizer = make_tokenizer(64)
    (table,) = [one["wpe"] for one in model.backbone.model.modules() if "wpe" in one]
    past = table(mx.array([511, 512, 10**6]))
    assert mx.array_equal(past, mx.repeat(table.weight[511:], 3, axis=0))
    prompt = [3 + index % 7 for index in range(508)]
    answers = {}
    for drafter in (None, "prompt-lookup"):
        how = {"decoding": "plain"} if drafter is None else {"drafter": drafter}
        answers[drafter], last = answer(model, tokenizer, prompt, max_tokens=16, temp=0, **how)
        assert (len(answers[drafter]), last.finish_reason) == (4, "context")
    assert answers[None] == answers["prompt-lookup"]
    assert mentions(refusal(answer, model, tokenizer, [3] * 512, max_tokens=1), "512")
