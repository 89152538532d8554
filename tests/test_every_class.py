"""Every class of the installed mlx-lm: what it runs decodes plainly at least, with its tokens.

`python tests/test_every_class.py NAME ...` says what classes verify, or why they do not.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from real import answer
from refusals import as_shown, mentions, refusal
from tiny import assert_close, make_tokenizer, mlx_lm_tokens
from tiny_classes import NOT_HERE, PROMPT, VOCAB, write_model
from tiny_lora import mlx_lm_lora

from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.attach import attach_adapter
from ssmlx.loading.load import load_base
from ssmlx.model.streams import StreamFusedModel

LENGTH = 24
LONG = 300  # tokens of an answer that the text drafts for
SAMPLED = {"temp": 1.0, "top_p": 0.9, "seed": 3}


SCALED_BY_LENGTH = {"hunyuan_v1_dense", "internlm3", "llama"}  # their rotary embeddings
IN_THE_DEFAULT_TIER = {*SCALED_BY_LENGTH, "phixtral", "plamo2", "plamo3", "youtu_llm"}


def classes(in_the_default_tier=frozenset(IN_THE_DEFAULT_TIER)):
    """The names of mlx-lm's files that hold a model's class."""
    folder = Path(mlx_lm.models.__file__).parent
    files = sorted(folder.glob("*.py"))
    found = [
        f.stem for f in files if re.search(r"^class Model\b|import Model\b", f.read_text(), re.M)
    ]
    return [
        name if name in in_the_default_tier else pytest.param(name, marks=pytest.mark.long)
        for name in found
    ]


def listed():
    """The classes that the page of families lists as run by their own call, and how."""
    page = Path(__file__).parents[1] / "ssmlx/model/README.md"
    rows = re.findall(r"^\| (chains|plain); [^|]*\|(.*)\|$", page.read_text(), re.MULTILINE)
    return {name: how for how, names in rows for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize("name", classes())
def test_what_mlx_lm_runs_decodes_to_the_same_tokens(name, tmp_path):
    folder = write_model(name, tmp_path)
    if name in NOT_HERE:
        assert NOT_HERE[name] in refusal(load_base, folder, "float32")
        return
    own, config = load_model(folder)
    expected = mlx_lm_tokens(own, PROMPT, LENGTH)
    model = StreamFusedModel(load_base(folder, "float32")[0])
    assert model.backbone.vocab_size == config["vocab_size"]

    def decoded(**settings):
        return answer(model, make_tokenizer(VOCAB), PROMPT, max_tokens=LENGTH, **settings)[0]

    assert decoded(decoding="plain") == expected
    drafting = {"decoding": "speculative", "drafter": "prompt-lookup"}
    capabilities = model.backbone.capabilities
    how = "chains" if capabilities.has("chains") else "plain"
    assert listed().get(name) == (None if capabilities.has("trees") else how)
    if capabilities.has("chains"):
        assert decoded(**drafting) == expected
    else:
        assert name not in SCALED_BY_LENGTH
        assert as_shown(capabilities.chains) in refusal(decoded, **drafting)
    logits = own(mx.array([PROMPT]))[0]
    assert len({*mx.argmax(logits, axis=-1).tolist()}) > 1 and bool(mx.isfinite(logits).any())


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", classes(in_the_default_tier={"llama"}))
def test_the_text_drafts_and_changes_nothing(name, sampling, tmp_path):
    """At every call, and as the controller decides: plain decoding's tokens."""
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    model = StreamFusedModel(load_base(write_model(name, tmp_path), "float32")[0])

    def decoded(**settings):
        tokens, last = answer(
            model, make_tokenizer(VOCAB), PROMPT, max_tokens=LONG, **sampling, **settings
        )
        return tokens, sum(counts.accepted for counts in last.drafts.values())

    expected, _ = decoded(decoding="plain")
    assert len(expected) == LONG
    assert decoded()[0] == expected
    if model.backbone.capabilities.has("chains"):
        tokens, accepted = decoded(decoding="speculative", drafter="prompt-lookup")
        assert tokens == expected and (accepted > 0 or sampling)


def cached_logits(model):
    """[T, V] of `PROMPT`, by mlx-lm's own model with its own cache; 0 for what cannot come."""
    logits = model(mx.array([PROMPT]), cache=make_prompt_cache(model))[0]
    return mx.where(mx.isinf(logits), 0, logits)


@pytest.mark.parametrize("name", classes())
def test_a_lora_of_mlx_lms_changes_it_as_mlx_lm_does(name, tmp_path):
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    folder = write_model(name, tmp_path / "base")
    own, _ = load_model(folder)
    before = cached_logits(own)
    try:
        lora = mlx_lm_lora(tmp_path / "lora", load_model(folder)[0])
        expected = cached_logits(load_adapters(own, str(lora)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        pytest.skip(f"mlx-lm itself runs no LoRA on it: {error}")
    backbone = load_base(folder, "float32")[0]
    model = attach_adapter(backbone, load_adapter(lora), merge_lora=False)
    logits = model.append(mx.array(PROMPT), model.make_cache()).logits
    assert_close(mx.where(mx.isinf(logits), 0, logits), expected, 1e-4)
    assert mx.abs(expected - before).max() > 0.01


@pytest.mark.parametrize(
    "stage",
    [
        "stages.Stages._probe_embedder_and_head",
        "backbone.wrap_ropes",
        "backbone.check_stages",
    ],
)
@pytest.mark.parametrize("kind", [KeyError, RuntimeError, AssertionError])
def test_an_error_of_ours_is_no_fault_of_the_files(stage, kind, tmp_path, monkeypatch):
    folder = write_model("qwen3", tmp_path)
    own, _ = load_model(folder)
    expected = mlx_lm_tokens(own, PROMPT, LENGTH)

    def fails(*_given):
        raise kind("a hole")

    monkeypatch.setattr(f"ssmlx.model.{stage}", fails)
    model = StreamFusedModel(load_base(folder, "float32")[0])
    assert answer(model, make_tokenizer(VOCAB), PROMPT, max_tokens=LENGTH)[0] == expected
    assert "a hole" in model.backbone.capabilities.stages
    ropes = [type(layer.self_attn.rope) for layer in model.backbone.layers]
    assert ropes == [type(layer.self_attn.rope) for layer in own.layers]


def test_what_mlx_lm_cannot_run_either_is_told(tmp_path, monkeypatch):
    folder = write_model("qwen3", tmp_path)

    def fails(*_given, **_more):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("mlx_lm.models.qwen3.Model.__call__", fails)
    said = refusal(load_base, folder, "float32")
    assert mentions(said, "'qwen3'", "no memory") and "at all" not in said


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with TemporaryDirectory() as folder:
            can = load_base(write_model(name, Path(folder)), "float32")[0].capabilities
        print(f"{name}: trees: {can.trees or 'yes'}; chains: {can.chains or 'yes'}")
