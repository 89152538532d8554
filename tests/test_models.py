"""The paper's architectures and the designs of streams: formats, and PyTorch against MLX."""

import json
import math
from dataclasses import replace

import ssmlx

import mlx.core as mx  # isort: skip
import mlx_lm
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import oracle
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model, save_config, save_model
from real import EXAMPLE, answer, snapshot
from refusals import exits, found_in, mentions, refusal
from safetensors.torch import load, save_file
from tiny import assert_close, first_tokens, slow, token_steps
from tiny_models import BASES, CONTEXT, OPT, VOCAB, make_base, write_base

from convert import base as convert_base
from convert.formats.adapter import read_checkpoint
from convert.reference.checkpoint import load_reference
from convert.reference.format import LoraSettings, read_stream_config, stream_settings_json
from convert.reference.model import StreamFusedReference, rotate_values
from ssmlx.json_files import build_settings
from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.attach import attach_adapter
from ssmlx.loading.load import load_base
from ssmlx.model import opt
from ssmlx.model.streams import StreamFusedModel, ValueRotation
from ssmlx.settings import GenerateConfig, StreamConfig, TreeConfig

PROMPT = [5, 2, 3, 11, 7]
TREE_TOKENS = [11, 1, 6, 3, 4, 5, 6]
TREE_PARENTS = [-1, 0, 0, 1, 2, 2, 4]
SOME = ["opt", *slow(*(name for name in BASES if name != "opt"))]
DRAFT_VOCAB = [1, 4, 5, 8, 12]
DRAFTING = {"draft_vocab": DRAFT_VOCAB}
RESIDUAL = {"stream_init": "residual", "stream_init_rank": 3}
ROTATION = {"stream_design": "value_rotation", "rotation_step": 0.4}
BOTH = {**DRAFTING, **ROTATION, **RESIDUAL}
PAIRS = [
    ("opt", RESIDUAL),
    # Nothing but its embedding, or the rotation of its values, tells a stream its place.
    ("opt", {}),
    ("opt", ROTATION),
    ("llama", BOTH),
    *slow(*((name, RESIDUAL) for name in BASES if name != "opt")),
    *slow(("llama", DRAFTING), ("llama", ROTATION), ("qwen3", BOTH)),
]


def make_reference(base=None, *, draft_vocab=(), lora_rank=3, **changes):
    """Streams, LoRA and a pruning adapter that all do something."""
    base = make_base("llama") if base is None else base
    return oracle.make_model(
        base=base,
        lora=LoraSettings(lora_rank, 6),
        draft_vocab=torch.tensor(draft_vocab, dtype=torch.int32) if draft_vocab else None,
        hidden_size=base.config.hidden_size,
        draft_vocab_size=len(draft_vocab),
        **changes,
    )


def make_pair(folder, name="llama", **changes):
    """A reference, the folder of an MLX adapter with its weights, and their base in MLX."""
    reference = make_reference(write_base(folder / "base", name), **changes)
    return reference, *oracle.convert(folder, reference)


def load_pair(folder, name="llama", merge_lora=True, **changes):
    reference, adapter, backbone = make_pair(folder, name, **changes)
    return reference, attach_adapter(backbone, load_adapter(adapter), merge_lora=merge_lora)


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("name", BASES)
def test_plain_model_is_transformers(name, tmp_path):
    base = write_base(tmp_path, name)
    model = load_base(tmp_path, "float32")[0].model
    tokens = [5, 2, 3, 11, 7, 63, 1, 0, 44]
    expected = torch_logits(base, tokens)
    assert_close(model(mx.array([tokens]))[0], expected)
    cache = make_prompt_cache(model)
    parts = [model(mx.array([part]), cache=cache)[0] for part in (tokens[:4], [7], tokens[5:])]
    assert_close(mx.concatenate(parts), expected)


def test_opt_of_a_checkpoint_without_its_head(tmp_path):
    """Published OPT weights have names from before the head was part of the model."""
    model = opt.Model(opt.ModelArgs.from_dict(OPT))
    names = {"decoder.layers.0.fc1.bias", "lm_head.weight"}
    weights = dict.fromkeys(names, mx.zeros(1))
    assert model.sanitize(weights).keys() == {"model.decoder.layers.0.fc1.bias"}


def test_batches_of_opt_have_positions_of_their_own(tmp_path):
    base = write_base(tmp_path, "opt")
    model = load_base(tmp_path, "float32")[0].model
    tokenizer = mlx_lm.utils.load_tokenizer(tmp_path, eos_token_ids=[])
    prompts = [[5, 2, 3, 11, 7], [9, 4]]
    texts = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=8).texts
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(int(torch_logits(base, tokens)[-1].argmax()))
        assert text.split() == tokenizer.decode(tokens[len(prompt) :]).split()


@pytest.mark.parametrize(("changes", "named"), [
    ({"activation_function": "gelu"}, "activation_function 'gelu' 'relu'"),
    ({"do_layer_norm_before": False}, "do_layer_norm_before False True"),
    ({"num_attention_heads": 5}, "hidden_size 32"),
    ({"word_embed_proj_dim": 24}, "word_embed_proj_dim 24 32"),
])  # fmt: skip
def test_opt_folders_that_cannot_be(changes, named, tmp_path):
    write_base(tmp_path, "opt")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert mentions(refusal(load_base, tmp_path), *named.split())


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("name, changes", PAIRS)
def test_parity(name, changes, scope, tmp_path):
    reference, model = load_pair(tmp_path, name, adapter_scope=scope, **changes)
    for step in ((PROMPT[:-1], PROMPT[-1:], [-1]), (PROMPT, TREE_TOKENS, TREE_PARENTS)):
        oracle.assert_close(oracle.mlx_step(model, *step), oracle.reference_step(reference, *step))
    whole = model.backbone.append(mx.array(PROMPT), model.make_cache()).logits
    assert_close(whole, torch_logits(reference.base, PROMPT), 1e-4)
    if scope == "all":
        settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        layer = dict(model.backbone.layers[-1].named_modules())
        assert set(settings["lora_parameters"]["keys"]) <= layer.keys()


@pytest.mark.parametrize("name, changes", PAIRS)
def test_oracle_takes_the_same_steps(name, changes, tmp_path, monkeypatch):
    monkeypatch.setattr("ssmlx.drafters.stream_drafter.TEXT_TOKENS", 0)
    reference, model = load_pair(tmp_path, name, merge_lora=False, **changes)
    for width in (1, 3, 7):  # 7 children of a stream that may know 5 tokens
        oracle.assert_same_steps(reference, model, PROMPT, width)


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("name", SOME)
def test_decoding_is_mlx_lms(name, scope, tmp_path):
    """From folders, as users have them; mlx-lm runs the very model that was loaded."""
    _, adapter, _ = make_pair(tmp_path, name, adapter_scope=scope)
    model, tokenizer = ssmlx.load(str(tmp_path / "base"), adapter=adapter, dtype="float32")
    found = mlx_lm.stream_generate(model.backbone.model, tokenizer, PROMPT, max_tokens=16)
    expected = [response.token for response in found]
    plain, _ = ssmlx.load(str(tmp_path / "base"), adapter="none", dtype="float32")
    assert answer(model, tokenizer, PROMPT, max_tokens=16, decoding="plain")[0] == expected
    for tree in (TreeConfig(kind="full", width=3), TreeConfig(size=12)):
        assert answer(model, tokenizer, PROMPT, max_tokens=16, tree=tree)[0] == expected
    if scope == "streams":
        assert answer(plain, tokenizer, PROMPT, max_tokens=16)[0] == expected


def test_context_of_opt(tmp_path):
    """Trees reach beyond the last learned position; answers end there."""
    _, adapter, _ = make_pair(tmp_path, "opt")
    model, tokenizer = ssmlx.load(str(tmp_path / "base"), adapter=adapter, dtype="float32")
    tokenizer._eos_token_ids = set()
    assert model.backbone.context_length == CONTEXT
    prompt = [3 + index % 50 for index in range(CONTEXT - 6)]
    answers = {}
    for decoding in ("plain", "speculative"):
        tree = {} if decoding == "plain" else {"tree": TreeConfig(kind="full", width=2)}
        answers[decoding], last = answer(model, tokenizer, prompt, decoding=decoding, **tree)
        assert (len(answers[decoding]), last.finish_reason) == (6, "context")
    assert answers["speculative"] == answers["plain"]
    found = mlx_lm.stream_generate(model.backbone.model, tokenizer, prompt, max_tokens=6)
    assert [response.token for response in found] == answers["plain"]
    assert mentions(refusal(answer, model, tokenizer, [3] * CONTEXT), "48")


@pytest.mark.parametrize("name", SOME)
def test_peft_reads_the_lora(name, tmp_path):
    peft = pytest.importorskip("peft")
    reference, *_ = make_pair(tmp_path, name)
    adapted = peft.PeftModel.from_pretrained(make_base(name), tmp_path / "checkpoint")
    expected = torch_logits(adapted, PROMPT)
    assert_close(torch_logits(reference.base, PROMPT), expected)
    assert np.abs(torch_logits(make_base(name), PROMPT) - expected).max() > 1e-2
    again = load_reference(make_base(name), tmp_path / "checkpoint")
    ids = torch.tensor([PROMPT])
    assert torch.equal(again(ids).stream_logits, reference(ids).stream_logits)


@pytest.mark.parametrize("name", ["opt", "phi"])
def test_packed_weights(name, tmp_path):
    """A folder that mlx-lm packed decodes, and is the reference's base as well."""
    inner = {"opt": "ffn_dim", "phi": "intermediate_size"}[name]
    write_base(tmp_path / "base", name, **{"hidden_size": 64, inner: 64})
    backbone, config = load_base(tmp_path / "base", "float32")
    model, config = quantize_model(backbone.model, config, group_size=32, bits=4)
    (tmp_path / "packed").mkdir()
    save_model(tmp_path / "packed", model)
    save_config(config, tmp_path / "packed" / "config.json")
    packed, _ = load_base(tmp_path / "packed", "stored")
    reference = convert_base.load_base(tmp_path / "packed")
    cache = StreamFusedModel(packed).make_cache()
    found = packed.append(mx.array(PROMPT), cache).logits
    assert_close(found, torch_logits(reference, PROMPT), 1e-3)
    unpacked, _ = load_base(tmp_path / "packed", "float32")
    assert_close(unpacked.model(mx.array([PROMPT]))[0], torch_logits(reference, PROMPT), 1e-4)


@pytest.fixture
def pickled(tmp_path):
    """A folder with two .bin files, in half precision, the tied head beside the embedding."""
    folder = tmp_path / "pickled"
    base = write_base(folder, "opt")
    (folder / "model.safetensors").unlink()
    weights = {name: tensor.half() for name, tensor in base.state_dict().items()}
    weights["lm_head.weight"] = weights["model.decoder.embed_tokens.weight"]
    names = sorted(weights)
    for number, part in enumerate((names[:20], names[20:]), 1):
        tensors = {name: weights[name] for name in part}
        torch.save(tensors, folder / f"pytorch_model-{number:05}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


def test_bin_files_become_safetensors(pickled, tmp_path, capsys):
    assert mentions(refusal(ssmlx.load, str(pickled)), "python -m ssmlx.convert.base")
    out = tmp_path / "out"
    assert convert_base.main([str(pickled), str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert not list(out.glob("pytorch*"))
    model, tokenizer = ssmlx.load(str(out), adapter="none", dtype="stored")
    assert model.backbone.dtype == mx.float16
    assert_close(
        load_base(out, "float32")[0].model(mx.array([PROMPT]))[0],
        torch_logits(convert_base.load_base(out), PROMPT),
    )
    assert len(answer(model, tokenizer, PROMPT, max_tokens=4)[0]) <= 4


class Call:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("fault", ["code", "cut", "none", "exists", "config"])
def test_bin_files_that_cannot_be_read(fault, pickled, tmp_path, capsys):
    first = pickled / "pytorch_model-00001-of-00002.bin"
    out = tmp_path / "out"
    if fault == "code":
        torch.save({"w": Call(tmp_path / "ran")}, first)
    elif fault == "cut":
        first.write_bytes(first.read_bytes()[:100])
    elif fault == "none":
        for file in pickled.glob("*.bin"):
            file.unlink()
    elif fault == "exists":
        out.mkdir()
    else:
        (pickled / "config.json").unlink()
    before = snapshot(tmp_path)
    exits(capsys, convert_base.main, pickled, out)
    assert snapshot(tmp_path) == before


def test_draft_logits_of_the_reference_follow_the_model():
    model = make_reference(draft_vocab=DRAFT_VOCAB)
    ids = oracle.some_tokens(6, vocab=VOCAB)
    whole = make_reference()
    whole.load_state_dict({k: v for k, v in model.state_dict().items() if k != "draft_vocab"})
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = model.to(dtype)
        whole = whole.to(dtype)
        found = model(ids)
        expected = whole(ids)
        assert model.draft_vocab.dtype == torch.int32
        assert found.draft_vocab is model.draft_vocab and expected.draft_vocab is None
        assert found.stream_logits.dtype == dtype
        columns = expected.stream_logits[..., DRAFT_VOCAB]
        bound = 1e-5 if dtype != torch.bfloat16 else 0.02
        assert oracle.gap(found.stream_logits.float(), columns.float()) < bound
        assert found.early_exit_logits.shape[-1] == VOCAB


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_values_turn_as_complex_numbers(num_streams):
    rng = np.random.default_rng(0)
    step = 0.3
    values = rng.normal(size=(1, 2, 4 * (1 + num_streams), 6)).astype(np.float32)
    angles = step * (1 + np.arange(4 * num_streams) % num_streams)
    streams = values[:, :, 4:]
    turned = (streams[..., :3] + 1j * streams[..., 3:]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    rotation = ValueRotation(3, step)
    found = np.array(rotation(mx.array(values), 4, num_streams))
    assert np.array_equal(found[:, :, :4], values[:, :, :4])
    assert oracle.gap(found[:, :, 4:], expected) < 1e-6
    theirs = rotate_values(torch.tensor(streams), num_streams, step)
    assert oracle.gap(theirs, expected) < 1e-6
    half = rotation(mx.array(values).astype(mx.float16), 4, num_streams)
    assert half.dtype == mx.float16 and oracle.gap(half, found) < 2e-3
    assert rotation(mx.ones((1, 2, 4, 6)), 4, 0).shape == (1, 2, 4, 6)


def test_first_stream_hardly_turned_is_a_row_of_the_base_one_place_on():
    """Keys and queries stand at p + 1 whatever becomes of the values."""
    base = make_base("llama")
    ids = oracle.some_tokens(5, vocab=VOCAB)
    config = {**ROTATION, "rotation_step": 1e-6, "num_msa_layers": oracle.LAYERS, "num_streams": 1}
    model = make_reference(base, lora_rank=0, **config)
    expected = base(torch.cat([ids, ids[:, -1:]], dim=1)).logits[:, -1]
    assert oracle.gap(model(ids).stream_logits[:, -1, 0], expected) < 1e-4
    model.config = replace(model.config, rotation_step=0.5)
    assert oracle.gap(model(ids).stream_logits[:, -1, 0], expected) > 1e-2


@pytest.mark.parametrize("config", [{}, ROTATION])
def test_a_narrow_base_under_wider_adapters(config):
    """Trained in mixed precision, the base is bfloat16 and what is trained float32."""
    model = make_reference(make_base("llama").bfloat16(), **DRAFTING, **config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    ids = oracle.some_tokens(6, vocab=VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        nodes = torch.randn(1, 3, oracle.WIDTH, dtype=torch.bfloat16)
        assert model.insert_streams(nodes).dtype == torch.bfloat16
        logits = model(ids).stream_logits
    assert logits.shape == (1, 6, oracle.STREAMS, len(DRAFT_VOCAB)) and logits.isfinite().all()
    logits.float().square().mean().backward()
    trained = [p for n, p in model.named_parameters() if "layers.2." in n and p.requires_grad]
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in trained)


@pytest.mark.parametrize(("changes", "named"), [
    ({"stream_design": "rotation"}, ("stream_design", "'rotation'")),
    ({"stream_design": "value_rotation"}, ("rotation_step", "0.0")),
    ({**ROTATION, "rotation_step": -0.1}, ("rotation_step", "-0.1")),
    ({**ROTATION, "rotation_step": 1.6}, ("rotation_step", "1.6")),
    ({**ROTATION, "rotation_step": math.nan}, ("rotation_step", "nan")),
    ({**ROTATION, "rotation_step": True}, ("rotation_step", "True")),
    ({**ROTATION, "rotation_step": "0.1"}, ("rotation_step", "'0.1'")),
    ({"rotation_step": 0.1}, ("rotation_step", "0.1", "'embeddings'")),
    ({"draft_vocab_size": -1}, ("draft_vocab_size", "-1")),
    ({"draft_vocab_size": 2.0}, ("draft_vocab_size", "2.0")),
    ({"tokens_per_call": {"1": 1.5}}, ("tokens_per_call", "{'1': 1.5}")),
    ({"tokens_per_call": {"2": 0.5}}, ("tokens_per_call", "{'2': 0.5}")),
    ({"tokens_per_call": {"x": 2.0}}, ("tokens_per_call", "{'x': 2.0}")),
    ({"tokens_per_call": [2.0]}, ("tokens_per_call", "[2.0]")),
    ({"tokens_per_call": {}}, ("tokens_per_call", "{}")),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(changes, named):
    assert mentions(found_in(refusal(oracle.stream_config, **changes)), *named)


def test_settings_survive_both_files(tmp_path):
    curve = {2: 1.5, 16: 3.0}
    config = oracle.stream_config(
        **ROTATION, draft_vocab_size=5, prune_rank=2, tokens_per_call=curve
    )
    values = json.loads(json.dumps(config.to_dict()))
    read = build_settings(StreamConfig, values, tmp_path)
    assert (read, read.tokens_per_call) == (config, curve)
    path = tmp_path / "streams_config.json"
    path.write_text(json.dumps(stream_settings_json(config)))
    assert read_stream_config(path) == config
    assert read_stream_config(path).tokens_per_call == curve
    assert "tokens_per_call" not in oracle.stream_config(**ROTATION).to_dict()
    assert oracle.stream_config(**{**ROTATION, "rotation_step": math.pi / 2}).rotation_step > 1.57


def test_settings_from_before_still_load(tmp_path):
    config = read_stream_config(EXAMPLE / "streams_config.json")
    new = {"stream_design": "embeddings", "rotation_step": 0, "draft_vocab_size": 0}
    new["condition_rank"] = 0
    assert new.items() <= vars(config).items()
    _, adapter, backbone = make_pair(tmp_path)
    for folder in (tmp_path / "checkpoint", adapter):
        change_settings(folder, dict.fromkeys(new))
    assert load_reference(make_base("llama"), tmp_path / "checkpoint").draft_vocab is None
    model = attach_adapter(backbone, load_adapter(adapter), merge_lora=True)
    assert model.draft_vocab is None and model.draft_vocab_size == VOCAB


def change_settings(folder, changes):
    """Changes settings of a folder; those that become None are taken out."""
    path = folder / "streams_config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def tensors_of(folder):
    return load((folder / "streams.safetensors").read_bytes())


@pytest.mark.parametrize("design", [DRAFTING, ROTATION, BOTH], ids=["draft", "rotation", "both"])
def test_round_trip(design, tmp_path):
    reference, adapter, _ = make_pair(tmp_path, **design)
    saved = tensors_of(tmp_path / "checkpoint")
    written = tensors_of(adapter)
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], written[name]) for name in saved)
    assert ("stream_embeddings" in saved) == ("stream_design" not in design)
    numbers = sum(tensor.numel() for name, tensor in saved.items() if name != "draft_vocab")
    assert load_adapter(adapter).streams.num_parameters == numbers
    again = load_reference(make_base("llama"), tmp_path / "checkpoint")
    assert again.config == reference.config
    ids = oracle.some_tokens(6, vocab=VOCAB)
    assert torch.equal(again(ids).stream_logits, reference(ids).stream_logits)
    backbone, _ = load_base(tmp_path / "base", "float16")
    half = attach_adapter(backbone, load_adapter(adapter), merge_lora=True)
    if draft := design.get("draft_vocab"):
        assert saved["draft_vocab"].dtype == torch.int32 and half.draft_vocab.dtype == mx.int32
        assert saved["draft_vocab"].tolist() == half.draft_vocab.tolist() == draft
    tokens, _ = first_tokens(token_steps(half, PROMPT, half.make_cache(), GenerateConfig()), 8)
    assert len(tokens) == 8


def test_streams_without_any_tensor(tmp_path):
    """Rotation, no initial map, no pruning: only the settings remain."""
    _, adapter, backbone = make_pair(tmp_path, **ROTATION, prune_rank=0)
    assert tensors_of(adapter) == {}
    loaded = load_adapter(adapter)
    assert loaded.streams.num_parameters == 0
    assert attach_adapter(backbone, loaded, merge_lora=True).num_streams == oracle.STREAMS
    assert load_reference(make_base("llama"), tmp_path / "checkpoint").config.num_streams == 2


@pytest.mark.parametrize(("draft", "named"), [
    ([1, 4, 8, 5, 12], ()),
    ([1, 4, 4, 8, 12], ()),
    ([1, 4, 5, 8, 64], ("1", "64")),
    ([-1, 4, 5, 8, 12], ("-1", "12")),
    (torch.tensor([1.0, 4, 5, 8, 12]), ("float32",)),
    (torch.tensor([1, 4, 5, 8, 12]), ("int64",)),
    ([[1, 4, 5, 8, 12]], ()),
    ([1, 4, 5, 8], ()),
    (None, ()),
])  # fmt: skip
def test_a_faulty_draft_vocabulary_is_refused(draft, named, tmp_path):
    _, adapter, backbone = make_pair(tmp_path, **DRAFTING)
    draft = torch.tensor(draft, dtype=torch.int32) if isinstance(draft, list) else draft
    checkpoint = tmp_path / "checkpoint"
    for folder in (checkpoint, adapter):
        tensors = {**tensors_of(folder), "draft_vocab": draft}
        kept = {k: v for k, v in tensors.items() if v is not None}
        save_file(kept, folder / "streams.safetensors")
    streams = checkpoint / "streams.safetensors"
    messages = [
        refusal(load_reference, make_base("llama"), checkpoint),
        refusal(read_checkpoint, checkpoint, streams, backbone),
        refusal(load_adapter, adapter),
    ]
    for message, folder in zip(messages, (checkpoint, checkpoint, adapter), strict=True):
        file = str(folder / "streams.safetensors")
        assert mentions(found_in(message), file, "draft_vocab", *named)


@pytest.mark.parametrize(
    ("changes", "name"), [({"draft_vocab_size": 0}, "draft_vocab"), (ROTATION, "stream_emb")]
)
def test_tensors_of_another_design_are_refused(changes, name, tmp_path):
    _, adapter, _ = make_pair(tmp_path, **DRAFTING)
    for folder in (tmp_path / "checkpoint", adapter):
        change_settings(folder, changes)
    assert name in found_in(refusal(load_adapter, adapter))
    message = refusal(load_reference, make_base("llama"), tmp_path / "checkpoint")
    assert "streams.safetensors" in message and name in message


def test_a_draft_vocabulary_must_come_with_its_size():
    ids = torch.tensor(DRAFT_VOCAB, dtype=torch.int32)
    for size, given, *named in ((5, None), (0, ids), (5, ids.long(), "int64")):
        config = oracle.stream_config(draft_vocab_size=size)
        line = refusal(StreamFusedReference, make_base("llama"), config, draft_vocab=given)
        assert mentions(found_in(line), "draft_vocab", *named)
