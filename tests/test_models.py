"""The paper's architectures: OPT, in a file of ours, and Phi and OpenLLaMA through mlx-lm."""

from __future__ import annotations

import json

import ssmlx

import mlx.core as mx  # isort: skip
import mlx_lm
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model, save_config, save_model
from oracle import greedy_streaming, mlx_step, reference_step
from real import answer, one_line, snapshot, write_tokenizer
from tiny import assert_close, first_tokens, slow

from convert import base as convert_base
from convert.formats.adapter import read_checkpoint
from convert.reference.checkpoint import load_reference, save_reference
from convert.reference.format import LoraSettings
from convert.reference.model import StreamFusedReference
from ssmlx.api import token_steps
from ssmlx.errors import InputError
from ssmlx.loading.adapter import Adapter, BaseIdentity, load_adapter, read_streams, write_adapter
from ssmlx.loading.attach import fuse_streams
from ssmlx.loading.load import load_base
from ssmlx.model.architectures import model_classes
from ssmlx.model.backbone import decoder_path
from ssmlx.model.lora import LoraWeights
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig, StreamConfig, TreeConfig

LAYERS, STREAMS, VOCAB, CONTEXT = 4, 2, 64, 48
PROMPT = [5, 2, 3, 11, 7]
TREE_TOKENS, TREE_PARENTS = [11, 1, 6, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 2, 4]
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {**COMMON, "ffn_dim": 48}
MLP = {**COMMON, "intermediate_size": 48}
BARE = {
    "enable_bias": False,
    "layer_norm_elementwise_affine": False,
    "_remove_final_layer_norm": True,
    "tie_word_embeddings": False,
    "activation_function": "gelu",
}
BASES = {
    "opt": ("OPT", OPT),
    # OPT-350m's way: the norms behind, and narrower embeddings.
    "opt-350m": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-bare": ("OPT", {**OPT, **BARE}),
    # Not the share of turned features that mlx-lm takes for granted.
    "phi": ("Phi", {**MLP, "rope_parameters": {"partial_rotary_factor": 0.25}}),
    # OpenLLaMA 3B's odd heads of 100 features.
    "open-llama": (
        "Llama",
        {**MLP, "hidden_size": 200, "num_attention_heads": 2, "rms_norm_eps": 1e-6},
    ),
    "stablelm": ("StableLm", {**MLP, "num_key_value_heads": 2, "use_qkv_bias": True}),
}
OTHERS = [name for name in BASES if name != "opt"]
OPTS = [name for name in BASES if name.startswith("opt")]


def make_base(name, *, seed=0, **changes):
    """A random model of transformers, no norm and no bias of which is as it begins."""
    family, sizes = BASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(parameter.shape[1] ** -0.5 * 1.2 * noise)
            else:
                parameter.add_(0.2 * noise)
    return model


def write_base(folder, name, **changes):
    base = make_base(name, **changes)
    base.save_pretrained(folder)
    write_tokenizer(folder)
    return base


def make_reference(base, **changes):
    """Streams, LoRA and a pruning adapter that all do something."""
    values = {"num_streams": STREAMS, "num_msa_layers": 2, "prune_rank": 4, "stream_init_rank": 3}
    values |= {"num_layers": LAYERS, "hidden_size": base.config.hidden_size}
    config = StreamConfig(**{**values, "stream_init": "residual", **changes})
    model = StreamFusedReference(base, config, lora=LoraSettings(3, 6)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.15)
    return model


def lora_of(reference, path):
    """The reference's LoRA as MLX has it, below `path`, without the converter."""

    def array(linear):
        return mx.array(linear.weight.detach().numpy()).T

    return {
        f"{path}.{name}": LoraWeights(
            array(module.adapter.lora_A), array(module.adapter.lora_B), module.scale
        )
        for name, module in reference.adapters.items()
    }


def make_pair(folder, name, **changes):
    """A reference, and the folder of an MLX adapter with its weights; base in folder/"base"."""
    reference = make_reference(write_base(folder / "base", name), **changes)
    save_reference(reference, folder / "checkpoint")
    backbone, _ = load_base(folder / "base", "float32")
    config, identity = reference.config, BaseIdentity.of(backbone)
    streams = read_streams(folder / "checkpoint" / "streams.safetensors", config, VOCAB)
    lora = lora_of(reference, decoder_path(backbone.model))
    (folder / "adapter").mkdir()
    write_adapter(folder / "adapter", Adapter(config, streams, identity, lora))
    return reference, folder / "adapter"


def load_pair(folder, name, merge_lora=True, **changes):
    reference, adapter = make_pair(folder, name, **changes)
    backbone, _ = load_base(folder / "base", "float32")
    return reference, fuse_streams(backbone, load_adapter(adapter), merge_lora=merge_lora)


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


# --- The base models ---


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


@pytest.mark.parametrize("name", ["opt", *slow(*OTHERS)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(name, dtype, tmp_path):
    base = write_base(tmp_path, name)
    backbone, _ = load_base(tmp_path, dtype)
    assert backbone.dtype == getattr(mx, dtype)
    cache = StreamFusedModel(backbone).make_cache()
    found = backbone.logits(backbone.append(mx.array(PROMPT), cache)).astype(mx.float32)
    assert_close(found, torch_logits(base, PROMPT), 0.1)


def test_opt_of_a_checkpoint_without_its_head(tmp_path):
    """Published OPT weights have names from before the head was part of the model."""
    model_class, args_class = model_classes("opt")
    model = model_class(args_class.from_dict(OPT))
    names = {"decoder.layers.0.fc1.bias", "lm_head.weight"}
    weights = dict.fromkeys(names, mx.zeros(1))
    assert model.sanitize(weights).keys() == {"model.decoder.layers.0.fc1.bias"}
    untied = model_class(args_class.from_dict({**OPT, "tie_word_embeddings": False}))
    assert "lm_head.weight" in untied.sanitize(weights)
    assert (model.head_dim, model.n_kv_heads) == (8, 4)
    assert model_classes("llama") is None


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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"activation_function": "mish"}, "activation_function 'mish' is none of relu"),
        ({"num_attention_heads": 5}, "hidden_size 32 is no multiple"),
        ({"word_embed_proj_dim": 24}, "Missing 2 parameters"),
    ],
)
def test_opt_folders_that_cannot_be(changes, told, tmp_path):
    write_base(tmp_path, "opt")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(InputError, match=told):
        load_base(tmp_path)


def test_opt_identities(tmp_path):
    found = []
    for number, name in enumerate([*OPTS, "opt"]):
        write_base(tmp_path / str(number), name, seed=number // len(OPTS))
        found.append(BaseIdentity.of(load_base(tmp_path / str(number), "float32")[0]))
    assert found[0].difference(found[0]) is None
    assert found[0].difference(found[-1]) == "other weights (its final norm differs)"
    assert set(found[OPTS.index("opt-bare")].norm_probe) == {1.0}


def test_embeddings_of_opt_need_positions(tmp_path):
    write_base(tmp_path / "opt", "opt")
    write_base(tmp_path / "phi", "phi")
    opt, phi = (load_base(tmp_path / name, "float32")[0] for name in ("opt", "phi"))
    tokens = mx.array([4, 4])
    assert opt.embeds_positions and not phi.embeds_positions
    with pytest.raises(ValueError, match="give them to `embed`"):
        opt.embed(tokens)
    first, second = opt.embed(tokens, mx.array([3, 9]))[0]
    assert not mx.allclose(first, second)
    table = opt.model.model.decoder.embed_positions.weight
    assert_close(second - first, table[11] - table[5])
    first, second = phi.embed(tokens)[0]
    assert mx.array_equal(first, second)
    beyond = opt.embed(mx.array([4] * 3), mx.array([CONTEXT - 1, CONTEXT, 10**6]))[0]
    assert mx.isfinite(beyond).all() and mx.array_equal(beyond[0], beyond[2])


# --- With streams ---


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("name", BASES)
def test_parity(name, scope, tmp_path):
    reference, model = load_pair(tmp_path, name, adapter_scope=scope)
    for prompt, *tree in (
        (PROMPT[:-1], PROMPT[-1:], [-1]),
        (PROMPT, TREE_TOKENS, TREE_PARENTS),
    ):
        steps = mlx_step(model, prompt, *tree), reference_step(reference, prompt, *tree)
        for found, expected in zip(*steps, strict=True):
            assert_close(found, expected, 1e-4)
    whole = model.backbone.logits(model.backbone.append(mx.array(PROMPT), model.make_cache()))
    assert_close(whole, torch_logits(reference.base, PROMPT), 1e-4)


@pytest.mark.parametrize("name", ["opt", *slow(*OTHERS)])
def test_oracle_takes_the_same_steps(name, tmp_path):
    reference, model = load_pair(tmp_path, name, merge_lora=False)
    for width in (1, 3):
        tokens, calls = greedy_streaming(
            reference, PROMPT, width=width, max_tokens=14, end_token_ids=[]
        )
        config = GenerateConfig(tree=TreeConfig(kind="full", width=width))
        steps = token_steps(model, PROMPT, model.make_cache(), config)
        found, lengths = first_tokens(steps, 14)
        assert (found, len(lengths)) == (tokens, calls)


@pytest.mark.parametrize("design", [{}, {"stream_design": "value_rotation", "rotation_step": 0.3}])
def test_streams_of_opt_stand_where_their_node_stands(design, tmp_path):
    """Nothing but its embedding, or the rotation of its values, tells a stream its place."""
    reference, model = load_pair(
        tmp_path, "opt", stream_init="identity", stream_init_rank=0, **design
    )
    main, streams, _ = mlx_step(model, PROMPT, TREE_TOKENS, TREE_PARENTS)
    expected = reference_step(reference, PROMPT, TREE_TOKENS, TREE_PARENTS)
    assert_close(main, expected[0], 1e-4)
    assert_close(streams, expected[1], 1e-4)
    apart = mx.abs(streams[:, 0] - streams[:, 1]).max()
    assert apart > 0.01 * mx.abs(streams).max()


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("name", ["opt", *slow(*OTHERS)])
def test_decoding_is_mlx_lms(name, scope, tmp_path):
    """From folders, as users have them; mlx-lm runs the very model that was loaded."""
    _, adapter = make_pair(tmp_path, name, adapter_scope=scope)
    model, tokenizer = ssmlx.load(str(tmp_path / "base"), adapter=adapter, dtype="float32")
    found = mlx_lm.stream_generate(model.backbone.model, tokenizer, PROMPT, max_tokens=16)
    expected = [response.token for response in found]
    plain, _ = ssmlx.load(str(tmp_path / "base"), adapter="none", dtype="float32")
    assert answer(model, tokenizer, PROMPT, max_tokens=16, decoding="plain")[0] == expected
    for tree in (TreeConfig(kind="full", width=3), TreeConfig(size=12)):
        assert answer(model, tokenizer, PROMPT, max_tokens=16, tree=tree)[0] == expected
    if scope == "streams":
        assert answer(plain, tokenizer, PROMPT, max_tokens=16)[0] == expected


@pytest.mark.parametrize("name", OPTS)
def test_context_of_opt(name, tmp_path):
    """Trees reach beyond the last learned position; answers end there."""
    _, adapter = make_pair(tmp_path, name)
    model, tokenizer = ssmlx.load(str(tmp_path / "base"), adapter=adapter, dtype="float32")
    tokenizer._eos_token_ids = set()
    assert model.backbone.context_length == CONTEXT
    prompt = [3 + index % 50 for index in range(CONTEXT - 6)]
    answers = {}
    for decoding in ("plain", "streaming"):
        tree = {} if decoding == "plain" else {"tree": TreeConfig(kind="full", width=2)}
        answers[decoding], last = answer(model, tokenizer, prompt, decoding=decoding, **tree)
        assert (len(answers[decoding]), last.finish_reason) == (6, "context")
    assert answers["streaming"] == answers["plain"]
    found = mlx_lm.stream_generate(model.backbone.model, tokenizer, prompt, max_tokens=6)
    assert [response.token for response in found] == answers["plain"]
    with pytest.raises(InputError, match="48 tokens"):
        answer(model, tokenizer, [3] * CONTEXT)


# --- Converter, PEFT and packed weights ---


@pytest.mark.parametrize("name", ["opt", *slow(*OTHERS)])
def test_converter_round_trip(name, tmp_path):
    reference, adapter = make_pair(tmp_path, name)
    backbone, _ = load_base(tmp_path / "base", "float32")
    checkpoint = tmp_path / "checkpoint"
    found = read_checkpoint(checkpoint, checkpoint / "streams.safetensors", backbone)
    expected = load_adapter(adapter)
    assert (found.config, found.base) == (expected.config, expected.base)
    settings = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    layer = dict(backbone.layers[-1].named_modules())
    assert set(settings["keys"]) <= layer.keys()
    assert found.lora.keys() == expected.lora.keys()
    for path, lora in found.lora.items():
        assert mx.array_equal(lora.a, expected.lora[path].a)
        assert mx.array_equal(lora.b, expected.lora[path].b)
        assert lora.scale == expected.lora[path].scale
    model = fuse_streams(backbone, found, merge_lora=True)
    steps = mlx_step(model, PROMPT, TREE_TOKENS, TREE_PARENTS)
    assert_close(steps[1], reference_step(reference, PROMPT, TREE_TOKENS, TREE_PARENTS)[1], 1e-4)


@pytest.mark.parametrize("name", ["opt", *slow(*OTHERS)])
def test_peft_reads_the_lora(name, tmp_path):
    peft = pytest.importorskip("peft")
    reference, _ = make_pair(tmp_path, name)
    adapted = peft.PeftModel.from_pretrained(make_base(name), tmp_path / "checkpoint")
    expected = torch_logits(adapted, PROMPT)
    assert_close(torch_logits(reference.base, PROMPT), expected)
    assert np.abs(torch_logits(make_base(name), PROMPT) - expected).max() > 1e-2
    again = load_reference(make_base(name), tmp_path / "checkpoint")
    ids = torch.tensor([PROMPT])
    assert torch.equal(again(ids).stream_logits, reference(ids).stream_logits)


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("name", ["opt", *slow(*OTHERS)])
def test_reference_is_trained(name, scope):
    """Every weight that is to learn gets a gradient, and the base gets none."""
    model = make_reference(make_base(name), adapter_scope=scope)
    output = model(torch.tensor([PROMPT]))
    scores = (output.main_logits, output.stream_logits, output.early_exit_logits)
    sum(part.logsumexp(-1).sum() - part[..., 3].sum() for part in scores).backward()
    for parameter_name, parameter in model.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.abs().sum())
        assert learns == parameter.requires_grad, parameter_name


@pytest.mark.parametrize("name", ["opt", "opt-350m", "phi"])
def test_packed_weights(name, tmp_path):
    """A folder that mlx-lm packed decodes, and is the reference's base as well."""
    wide = {"hidden_size": 64, "ffn_dim": 64} if name in OPTS else {"hidden_size": 64}
    wide |= {"intermediate_size": 64} if name == "phi" else {}
    wide |= {"word_embed_proj_dim": 32} if name == "opt-350m" else {}
    write_base(tmp_path / "base", name, **wide)
    backbone, config = load_base(tmp_path / "base", "float32")
    model, config = quantize_model(backbone.model, config, group_size=32, bits=4)
    (tmp_path / "packed").mkdir()
    save_model(tmp_path / "packed", model)
    save_config(config, tmp_path / "packed" / "config.json")
    packed, _ = load_base(tmp_path / "packed", "stored")
    reference = convert_base.load_base(tmp_path / "packed")
    cache = StreamFusedModel(packed).make_cache()
    found = packed.logits(packed.append(mx.array(PROMPT), cache))
    assert_close(found, torch_logits(reference, PROMPT), 1e-3)
    unpacked, _ = load_base(tmp_path / "packed", "float32")
    assert_close(unpacked.model(mx.array([PROMPT]))[0], torch_logits(reference, PROMPT), 1e-4)


# --- Weights as OPT is published ---


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
    with pytest.raises(InputError, match=r"python -m convert\.base"):
        ssmlx.load(str(pickled))
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
    assert convert_base.main([str(pickled), str(out)]) == 2
    one_line(capsys.readouterr().err, "convert.base")
    assert snapshot(tmp_path) == before
