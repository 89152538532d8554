"""LoRA and DoRA of PEFT's: the model computes what PEFT's does, and the rest is refused."""

import json
import time
import warnings
from dataclasses import replace

import ssmlx

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
import tiny_models
from mlx_lm.utils import dequantize_model, save_config, save_model
from peft.utils import save_and_load
from peft.utils.other import get_pattern_key
from real import answer, write_tokenizer
from refusals import exits, found_in, line_of, mentions, refusal
from tiny import _is_packable, all_pairs, assert_close, make_adapter
from tiny_lora import logits

from ssmlx.commands import generate
from ssmlx.errors import InputError
from ssmlx.json_files import read_json
from ssmlx.loading.adapter import load_adapter, write_adapter
from ssmlx.loading.load import load_base
from ssmlx.loading.lora_files import read_lora_folder
from ssmlx.loading.module_patterns import ModulePatterns

TOKENS = [5, 2, 3, 11, 7, 1, 40, 9]
TOLERANCE = 3e-5
"""Of logits, relative to the largest: MLX and PyTorch sum in another order."""
FAMILIES = ["llama", "qwen3", "phi", "stablelm", "opt"]
FILE = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Nothing is asked whether the vocabulary is the Hub's."""
    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", lambda *given: None)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Gives a family's folders: the model, and the one whose weights PyTorch is given, which of a
    packed model are its unpacked ones."""
    root = tmp_path_factory.mktemp("families")

    def give(name, bits=None, **changes):
        whole = root / "-".join([name, *changes])
        if not whole.exists():
            tiny_models.write_base(whole, name, **changes)
        if bits is None:
            return whole, whole
        packed, unpacked = (root / f"{name}-{kind}" for kind in ("packed", "unpacked"))
        if not packed.exists():
            settings = read_json(whole / "config.json", "settings")
            form = {"group_size": 32, "bits": bits}
            model = load_base(whole, "float32")[0].model
            nn.quantize(model, **form, class_predicate=_is_packable)
            for folder, more in ((packed, {"quantization": form}), (unpacked, {})):
                folder.mkdir()
                save_model(folder, model if more else dequantize_model(model))
                save_config({**settings, **more}, folder / "config.json")
                write_tokenizer(folder)
        return packed, unpacked

    return give


def tuned(folder, out, *, seed=0, **settings):
    """A model of PEFT's with random LoRA, which is saved in `out`; its logits."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
                elif "lora_" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(str(out))
    return logits_of(model)


@torch.no_grad()
def logits_of(model):
    return model.eval()(torch.tensor([TOKENS])).logits[0].numpy()


def own(folder, adapter, **more):
    return np.array(logits(ssmlx.load(folder, adapter=adapter, dtype="stored", **more)[0]))


@pytest.mark.parametrize("name, dora, bits", all_pairs(FAMILIES, [False, True], [None, 4]))
def test_logits_are_pefts(family, tmp_path, name, dora, bits):
    """On every linear layer, with biases and without."""
    folder, unpacked = family(name, bits)
    expected = tuned(unpacked, tmp_path / "lora", target_modules="all-linear", use_dora=dora)
    for merge in (True, False):
        assert_close(own(folder, tmp_path / "lora", merge_lora=merge), expected, TOLERANCE)
    assert np.abs(own(folder, None) - expected).max() > 0.1


CASES = {
    "a list, rank-stabilised": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    # Transposed, the factors would fit, and compute something else.
    "square factors": {"target_modules": ["q_proj", "o_proj"], "r": 32},
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ["v_proj"], "layers_to_transform": 1},
    "an expression": {"target_modules": r".*\.(0|3)\.(self_attn\.[qk]_proj|mlp\.up_proj)"},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers\.(0|2)\..*_proj": 8},
        "alpha_pattern": {"k_proj": 20, r"model\.layers\.\d.mlp.up_proj": 1},
    },
    "patterns, rank-stabilised": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 9},
    },
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "embedding and head, dora": {
        "target_modules": ["embed_tokens", "lm_head", "k_proj"], "use_dora": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_settings_are_followed(family, tmp_path, case):
    folder, _ = family("llama")
    expected = tuned(folder, tmp_path / "lora", **CASES[case])
    for merge in (True, False):
        assert_close(own(folder, tmp_path / "lora", merge_lora=merge), expected, TOLERANCE)
    assert np.abs(own(folder, None) - expected).max() > 0.01


@pytest.mark.parametrize("dora", [False, True])
def test_an_embedding_that_is_the_head_has_it_where_it_embeds_alone(family, tmp_path, dora):
    folder, _ = family("llama", tie_word_embeddings=True)
    settings = {"target_modules": ["embed_tokens", "v_proj"], "use_dora": dora}
    expected = tuned(folder, tmp_path / "lora", **settings)
    for merge in (True, False):
        assert_close(own(folder, tmp_path / "lora", merge_lora=merge), expected, TOLERANCE)
    again = load_adapter(tmp_path / "lora").lora["model.embed_tokens"]
    assert not again.acts_on_head


def test_it_goes_beside_streams_and_is_written_with_them(family, tmp_path):
    folder, _ = family("llama", tie_word_embeddings=True)
    settings = {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True}
    expected = tuned(folder, tmp_path / "lora", rank_pattern={"v_proj": 2}, **settings)
    backbone, _ = load_base(folder, "float32")
    streams = make_adapter(backbone, "streams", draft_vocab=[1, 5, 9, 30])
    (tmp_path / "both").mkdir()
    both = replace(streams, lora=load_adapter(tmp_path / "lora").lora)
    write_adapter(tmp_path / "both", both)
    assert_close(own(folder, tmp_path / "both"), expected, TOLERANCE)
    model, tokenizer = ssmlx.load(folder, adapter=tmp_path / "both")
    plain, _ = ssmlx.load(folder, adapter=tmp_path / "lora")
    wanted, _ = answer(plain, tokenizer, TOKENS, max_tokens=9)
    found, last = answer(model, tokenizer, TOKENS, max_tokens=9, decoding="speculative")
    assert found == wanted and last.drafted_tokens > 0


BAD = {
    "modules_to_save": (["lm_head"], "modules_to_save ['lm_head']"),
    "bias": ("all", "bias 'all'"),
    "lora_bias": (True, "lora_bias True"),
    "peft_type": ("LOHA", "peft_type 'LOHA'"),
    "fan_in_fan_out": (True, "fan_in_fan_out True"),
    "layer_replication": ([[0, 2], [1, 3]], "layer_replication"),
    "target_parameters": (["mlp.experts.gate_up_proj"], "target_parameters"),
    "trainable_token_indices": ([1, 2], "trainable_token_indices"),
    "init_lora_weights": ("pissa_niter_4", "init_lora_weights 'pissa_niter_4'"),
    "ensure_weight_tying": (True, "ensure_weight_tying True"),
    "of_another_day": ({"a": 1}, "of_another_day"),
    "r": (5, "rank 4 5 model.layers.0.self_attn.k_proj"),
    "use_rslora": ("yes", "use_rslora 'yes'"),
    "lora_alpha": (None, "lora_alpha None"),
    "rank_pattern": ({"k_proj": 0}, "rank_pattern"),
    "alpha_pattern": ({"(a": 2}, "alpha_pattern '(a'"),
    "target_modules": (["q_proj"], "model.layers.0.self_attn.k_proj target_modules"),
    "layers_to_transform": ([1], "model.layers.0.self_attn.k_proj"),
    "use_dora": (True, "model.layers.0.self_attn.k_proj.m"),
}


@pytest.fixture
def trained(family, tmp_path):
    """The folders of a model, and of LoRA for it."""
    folder, _ = family("llama")
    tuned(folder, tmp_path / "lora", target_modules=["k_proj"])
    return folder, tmp_path / "lora"


@pytest.mark.parametrize("name", BAD)
def test_what_peft_computes_otherwise_is_refused(trained, name, capsys):
    folder, adapter = trained
    value, named = BAD[name]
    path = adapter / SETTINGS
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    given = ("--model", folder, "--adapter", adapter, "--prompt", "w1")
    assert mentions(exits(capsys, generate.main, *given), *named.split())


PATTERNS = {
    "k_proj": True,
    r"model\.layers\.0\.self_attn\.k_proj": True,
    r"^model\.layers\.(\d+)\.self_attn\.(q|k|v)_proj$": True,
    r"layers.[02].*_proj": True,
    r"(?:.*\.)?self_attn\..+?": True,
    r"\w{2,6}": True,
    r"[^qv]_proj": True,
    r"\bk_\D\S+": True,
    "proj": False,
    "q_proj|v_proj": False,
    r"layers\.1\..*": False,
    r"^k_proj": False,
    "": False,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_the_modules_that_it_names_in_peft(pattern):
    path = "model.layers.0.self_attn.k_proj"
    assert (get_pattern_key([pattern], path) == pattern) == PATTERNS[pattern]
    assert ModulePatterns("a", {pattern: 3}).find(path, 8) == (3 if PATTERNS[pattern] else 8)


def test_the_first_of_several_patterns_counts():
    patterns = ModulePatterns("a", {"q_proj": 1, r".*_proj": 2, "k_proj": 3})
    found = [patterns.find(f"layers.0.{name}", 8) for name in ("q_proj", "k_proj", "norm")]
    assert found == [1, 2, 8]


ENDLESS = (
    "a?" * 60 + "a" * 60, "(a+)+", "(a|a)" * 60 + "c", "(a|aa)+z", "(.*)*z", "(.*)*" * 40 + "z",
    "((a{1,900}){1,900}){1,900}z", "a{100000000}", "(|a){100000000}z", "(a?b?){50,60}" * 20 + "z",
    "(" * 30 + "a" + "{1,50})" * 30 + "z", "(" * 499 + ")" * 499, "(" * 5000 + "a" + ")" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("pattern", ENDLESS)
def test_no_pattern_takes_for_ever(pattern):
    """Python's own matcher does, of the first six; it is refused, or ends at once."""
    path = f"model.layers.0.{'a' * 60}b"
    begun = time.monotonic()
    try:
        assert ModulePatterns("a", {pattern: 3}).find(path, 8) == 8
    except InputError as error:
        assert mentions(line_of(error), "a")
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("pattern", ["(?i)K_PROJ", "(?x)k _ proj", "(?m)k_proj", "(?a)k", "(?s)."])
def test_flags_of_a_pattern_are_refused(pattern):
    assert mentions(found_in(refusal(ModulePatterns, "a", {pattern: 3})), f"{pattern!r}")


@pytest.mark.parametrize("pattern", ["(?=k)k_proj", r"(\w)\1", "(?i:K_PROJ)", "(?>k)_proj", "k*+"])
def test_what_is_not_followed_is_refused_by_name(pattern):
    line = refusal(ModulePatterns("a", {pattern: 3}).find, "layers.0.k_proj", 8)
    assert mentions(found_in(line), f"{pattern!r}")
    assert len(refusal(ModulePatterns("a", {"a": 3}).find, "a" * 10**6, 8)) < 1000


def write_lora_of_an_expert(folder, **settings):
    """LoRA of expert 1 in layer 5, as PEFT writes it."""
    folder.mkdir(exist_ok=True)
    name = "base_model.model.model.layers.5.mlp.experts.1.w1.lora_{}.weight"
    factors = {name.format("A"): mx.ones((8, 32)), name.format("B"): mx.ones((48, 8))}
    mx.save_safetensors(str(folder / FILE), factors)
    own = {"peft_type": "LORA", "target_modules": ["w1"], **settings}
    (folder / SETTINGS).write_text(json.dumps(own))
    return folder


@pytest.mark.parametrize("settings", [
    {"layers_to_transform": [5]}, {"layers_to_transform": 5}, {"layers_to_transform": [0, 1]},
    {"layers_to_transform": [1], "layers_pattern": "experts"}, {"layers_to_transform": []},
])  # fmt: skip
def test_layers_are_named_by_the_rule_of_any_version_of_pefts(tmp_path, settings):
    """By the first number in a path, the last, or the one that a pattern stands before."""
    found = read_lora_folder(write_lora_of_an_expert(tmp_path / "lora", **settings))
    assert list(found.lora) == ["model.layers.5.mlp.experts.1.w1"]


def test_layers_that_the_settings_do_not_name_are_refused(tmp_path):
    folder = write_lora_of_an_expert(tmp_path / "lora", layers_to_transform=[2, 51])
    assert mentions(refusal(read_lora_folder, folder), "model.layers.5.mlp.experts.1.w1")


def test_pickles_and_foreign_tensors_are_refused(trained):
    _, adapter = trained
    tensors = dict(mx.load(str(adapter / FILE)))
    extra = "base_model.model.model.norm.weight"
    mx.save_safetensors(str(adapter / FILE), {**tensors, extra: mx.ones(32)})
    assert extra in refusal(load_adapter, adapter)
    (adapter / FILE).rename(adapter / "adapter_model.bin")
    said = refusal(load_adapter, adapter)
    assert mentions(said, "adapter_model.bin") and "save_pretrained" in said


def test_a_wrapped_model_finds_the_paths_of_the_text_model(family, tmp_path):
    """As where LoRA was trained on the text model alone, or on one that also sees."""
    folder, adapter = family("llama")[0], tmp_path / "lora"
    expected = tuned(folder, adapter, target_modules=["k_proj"])
    tensors = dict(mx.load(str(adapter / FILE)))
    moved = {
        name.replace("model.model.layers", "model.model.language_model.layers"): array
        for name, array in tensors.items()
    }
    assert moved.keys() != tensors.keys()
    mx.save_safetensors(str(adapter / FILE), moved)
    assert_close(own(folder, adapter), expected, TOLERANCE)
    # What sees is not what reads.
    seeing = {name.replace("language_model.", "vision_tower."): a for name, a in moved.items()}
    mx.save_safetensors(str(adapter / FILE), seeing)
    assert "model.vision_tower." in refusal(ssmlx.load, folder, adapter=adapter)
