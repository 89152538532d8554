"""The PyTorch reference: exact against plain decoding, transformers and PEFT."""

import json
from itertools import cycle

import mlx.core as mx
import pytest
from refusals import found_in, mentions, refusal

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import oracle
from safetensors.torch import load, save_file
from tiny import all_pairs

from convert.base import load_base
from convert.reference.checkpoint import load_reference, save_reference
from convert.reference.format import LoraSettings
from convert.reference.model import StreamFusedReference, stream_visibility
from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.attach import attach_adapter


def read_tensors(path):
    """Tensors that outlive their file; `load_file` would map it."""
    return load(path.read_bytes())


SCOPED = pytest.mark.parametrize(
    ("architecture", "scope"), [*zip(oracle.ARCHITECTURES, cycle(("all", "streams")))]
)


@SCOPED
def test_speculative_decoding_writes_what_plain_decoding_writes(architecture, scope):
    model = oracle.make_model(base=oracle.make_base(architecture, vocab=7), adapter_scope=scope)
    plain = oracle.greedy_plain(model, [3, 1, 4], 20)
    calls = {}
    for width in (1, 2, 4, 7):
        tokens, calls[width] = oracle.greedy_speculative(
            model, [3, 1, 4], width=width, max_tokens=20
        )
        assert tokens == plain
    # With every token a candidate, each call after the prompt's advances G + 1 tokens.
    assert calls[7] == 1 + -(-19 // (oracle.STREAMS + 1))
    assert calls[7] <= calls[4] <= calls[1] <= 20


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", oracle.ARCHITECTURES)
def test_scope_streams_leaves_the_base_bit_for_bit(architecture, attention):
    base = oracle.make_base(architecture, attention=attention)
    ids = oracle.some_tokens(11, batch=2)
    causal = torch.full((11, 11), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 11, 11)
    expected = base(ids, attention_mask=causal).logits
    own = base(ids).logits
    model = oracle.make_model(base=base, adapter_scope="streams")
    output = model(ids)
    assert torch.equal(output.main_logits, expected)
    assert oracle.gap(output.main_logits, own) < 5e-5
    assert attention != "eager" or torch.equal(output.main_logits, own)
    # Not for want of an adapter: the streams do feel it.
    with torch.no_grad():
        for adapter in model.adapters.values():
            adapter.scale = 0.0
    assert oracle.gap(model(ids).stream_logits, output.stream_logits) > 1e-3


@pytest.mark.parametrize(
    ("architecture", "rank_stabilised"), [*zip(oracle.ARCHITECTURES, cycle((False, True)))]
)
def test_scope_all_is_what_peft_computes(architecture, rank_stabilised, tmp_path):
    peft = pytest.importorskip("peft")
    lora = LoraSettings(3, 5, layers=(1, 3), rank_stabilised=rank_stabilised)
    model = oracle.make_model(architecture, lora=lora)
    save_reference(model, tmp_path)
    adapted = peft.PeftModel.from_pretrained(oracle.make_base(architecture), tmp_path)
    ids = oracle.some_tokens(9, batch=2)
    plain = oracle.make_base(architecture)(ids).logits
    expected = adapted(ids).logits
    assert oracle.gap(model(ids).main_logits, expected) < 5e-5
    assert oracle.gap(model.base(ids).logits, expected) < 5e-5
    assert oracle.gap(plain, expected) > 1e-3


@pytest.mark.parametrize("architecture", ["Mistral", "Qwen2", "Phi3"])
def test_sliding_window(architecture):
    window = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
    base = oracle.make_base(architecture, **window)
    ids = oracle.some_tokens(14)
    expected = base(ids).logits
    model = oracle.make_model(base=base, adapter_scope="streams")
    assert torch.equal(model(ids).main_logits, expected)
    if architecture == "Qwen2":  # there the first layer sees everything
        return
    # Four layers of window 4 reach 12 tokens back; stream j, j places ahead, j tokens less.
    moved = torch.cat([(ids[:, :1] + 1) % oracle.VOCAB, ids[:, 1:]], dim=1)
    before = model(ids)
    after = model(moved)
    main = (before.main_logits != after.main_logits).any(-1)[0]
    streams = (before.stream_logits != after.stream_logits).any(-1)[0]
    assert main.tolist() == [True] * 13 + [False]
    assert streams[:, 0].tolist() == [True] * 12 + [False] * 2
    assert streams[:, 1].tolist() == [True] * 11 + [False] * 3


def test_early_exit_is_the_head_on_the_insertion_layer():
    base = oracle.make_base()
    ids = oracle.some_tokens(6)
    states = base(ids, output_hidden_states=True).hidden_states[2]
    model = oracle.make_model(base=base, adapter_scope="streams")
    pair = model.prune_adapter
    adapted = states + states @ (pair.lora_B.weight @ pair.lora_A.weight).T
    expected = base.lm_head(base.model.norm(adapted))
    assert oracle.gap(model(ids).early_exit_logits, expected) < 5e-5
    assert oracle.make_model(prune_rank=0)(ids).early_exit_logits is None


def test_stream_visibility_golden():
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    found = stream_visibility(visible, torch.tensor([0, 2]), 2)
    assert found[0].int().tolist() == [
        [1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_stream_sees_only_earlier_streams(stream):
    model = oracle.make_model(num_streams=3)
    ids = oracle.some_tokens(7)
    before = model(ids)
    with torch.no_grad():
        model.stream_embeddings[stream] += 0.5
    after = model(ids)
    assert torch.equal(before.main_logits, after.main_logits)
    assert torch.equal(before.early_exit_logits, after.early_exit_logits)
    scale = before.stream_logits.abs().max()
    moved = (before.stream_logits - after.stream_logits).abs().amax(-1)[0] / scale
    assert (moved[:, :stream] < 1e-6).all()
    assert (moved[:, stream:] > 1e-4).all()


def test_stream_sees_no_other_nodes_streams():
    model = oracle.make_model()
    ids = oracle.some_tokens(7)
    everywhere = model(ids)
    for row in range(7):
        alone = model(ids, stream_rows=torch.tensor([row])).stream_logits
        assert oracle.gap(alone[:, 0], everywhere.stream_logits[:, row]) < 5e-5
    none = model(ids, stream_rows=torch.zeros(0, dtype=torch.long))
    assert none.stream_logits.shape == (1, 0, oracle.STREAMS, oracle.VOCAB)
    assert torch.equal(none.main_logits, everywhere.main_logits)


def test_first_stream_is_a_row_of_the_base_one_place_on():
    """With f = identity, P_1 = 0 and no LoRA, stream 1 equals the same token placed at p + 1."""
    base = oracle.make_base()
    ids = oracle.some_tokens(5)
    model = oracle.make_model(
        base=base, lora=LoraSettings(), num_msa_layers=oracle.LAYERS, num_streams=1
    )
    with torch.no_grad():
        model.stream_embeddings.zero_()
    expected = base(torch.cat([ids, ids[:, -1:]], dim=1)).logits[:, -1]
    assert oracle.gap(model(ids).stream_logits[:, -1, 0], expected) < 5e-5


@pytest.mark.parametrize("kind", ["identity", "low_rank", "residual"])
def test_stream_start(kind):
    rank = 0 if kind == "identity" else 3
    model = oracle.make_model(stream_init=kind, stream_init_rank=rank)
    nodes = torch.randn(2, 3, oracle.WIDTH)
    started = nodes
    if kind != "identity":
        pair = model.stream_init
        low_rank = nodes @ (pair.lora_B.weight @ pair.lora_A.weight).T
        started = low_rank if kind == "low_rank" else nodes + low_rank
    found = model.insert_streams(nodes).unflatten(1, (3, oracle.STREAMS))
    for stream in range(oracle.STREAMS):
        expected = started + model.stream_embeddings[stream]
        assert oracle.gap(found[:, :, stream], expected) < 5e-5


@SCOPED
def test_training_forward_equals_tree_step(architecture, scope):
    """Every path through a branching tree is a causal sequence of its own."""
    model = oracle.make_model(architecture, adapter_scope=scope)
    prompt = [5, 17, 3]
    tokens = [11, 20, 30, 40, 50, 60]
    parents = [-1, 0, 0, 1, 2, 2]
    input_ids, positions, visible = oracle.tree_inputs(prompt, tokens, parents)
    rows = torch.arange(3, 9)
    step = model(input_ids, positions=positions, visible=visible, stream_rows=rows)
    for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5]):
        sequence = model(torch.tensor([[*prompt, *(tokens[node] for node in path)]]))
        nodes = torch.tensor(path)
        for found, expected in (
            (step.main_logits[:, 3 + nodes], sequence.main_logits[:, 3:]),
            (step.stream_logits[:, nodes], sequence.stream_logits[:, 3:]),
            (step.early_exit_logits[:, 3 + nodes], sequence.early_exit_logits[:, 3:]),
        ):
            assert oracle.gap(found, expected) < 5e-5


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("kind", ["low_rank", "residual"])
def test_gradients_reach_what_is_trained_and_nothing_else(kind, scope):
    model = oracle.make_model(stream_init=kind, stream_init_rank=3, adapter_scope=scope).train()
    ids = oracle.some_tokens(8)
    output = model(ids)
    logits = output.main_logits, output.stream_logits, output.early_exit_logits
    sum(found.sin().sum() for found in logits).backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum()}
    assert trained == moved
    assert len(trained) == 1 + 2 + 2 + 2 * 2 * 7
    assert not any(name.endswith("linear.weight") for name in trained)


def test_new_model_starts_as_the_base():
    base = oracle.make_base()
    ids = oracle.some_tokens(6)
    expected = base(ids).logits
    model = StreamFusedReference(base, oracle.stream_config(), lora=oracle.LORA)
    assert torch.equal(model(ids).main_logits, expected)
    assert model.lora.layers == (2, 3)
    assert 0.005 < model.stream_embeddings.std().item() < 0.05


def test_gradient_checkpointing_is_refused():
    """It would drop the node keys, so that streams see nothing of the text."""
    model = oracle.make_model().train()
    model.base.gradient_checkpointing_enable()
    refusal(model, oracle.some_tokens(4))


@pytest.mark.parametrize(("architecture", "scope", "lora"), [
    ("Llama", "all", oracle.LORA),
    ("Phi3", "streams", oracle.LORA),
    ("Llama", "all", LoraSettings()),
])  # fmt: skip
def test_save_load_round_trip(architecture, scope, lora, tmp_path):
    model = oracle.make_model(
        architecture,
        lora=lora,
        adapter_scope=scope,
        stream_init="residual",
        stream_init_rank=2,
        prompt_template="say {prompt}",
        end_token_ids=(2, 5),
        base_model="tiny",
    )
    save_reference(model, tmp_path / "saved")
    again = load_reference(oracle.make_base(architecture), tmp_path / "saved")
    assert again.config == model.config
    assert (tmp_path / "saved" / "adapter_config.json").exists() == (lora is oracle.LORA)
    assert again.adapters.keys() == model.adapters.keys()
    assert again.lora.alpha == model.lora.alpha
    ids = oracle.some_tokens(6)
    for name in ("main_logits", "stream_logits", "early_exit_logits"):
        assert torch.equal(getattr(again(ids), name), getattr(model(ids), name))
    save_reference(again, tmp_path / "again")
    for file in (tmp_path / "saved").iterdir():
        if file.suffix == ".safetensors":
            first = read_tensors(file)
            second = read_tensors(tmp_path / "again" / file.name)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def checkpoint(tmp_path):
    save_reference(oracle.make_model(stream_init="low_rank", stream_init_rank=2), tmp_path)
    return tmp_path


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "streams.safetensors"])
def test_a_faulty_or_missing_file_is_named(checkpoint, file):
    tensors = read_tensors(checkpoint / file)
    name = next(iter(tensors))
    for changed in ({name: tensors[name][:-1].clone()}, {"spare": torch.zeros(2)}):
        save_file({**tensors, **changed}, checkpoint / file)
        line = refusal(load_reference, oracle.make_base(), checkpoint)
        assert mentions(line, file, *changed)
    (checkpoint / file).unlink()
    assert mentions(refusal(load_reference, oracle.make_base(), checkpoint), file)


def test_bases_that_cannot_be_driven_are_refused():
    granites = [{"embedding_multiplier": 3.0}, {"logits_scaling": 2.0}]
    for name, changes in (*(("Granite", one) for one in granites), ("Olmo3", {})):
        base = oracle.make_base(name, **changes)
        assert name in refusal(StreamFusedReference, base, oracle.stream_config())
    for base, *named in ((torch.nn.Linear(2, 2), "Linear"), (oracle.make_model().base, "LoRA")):
        line = refusal(StreamFusedReference, base, oracle.stream_config())
        assert mentions(found_in(line), *named)
    below = {"lora": LoraSettings(2, layers=(1, 2)), "adapter_scope": "streams"}
    assert mentions(refusal(oracle.make_model, **below), "1")


def test_wrong_shapes_are_refused():
    model = oracle.make_model()
    ids = oracle.some_tokens(4)
    with pytest.raises(ValueError, match="positions"):
        model(ids, positions=torch.arange(4))
    with pytest.raises(ValueError, match="visible"):
        model(ids, visible=torch.ones(4, 4, dtype=torch.bool))


@pytest.mark.parametrize("tied", [False, True])
def test_load_base_of_hugging_face(tied, tmp_path):
    base = oracle.make_base(tie_word_embeddings=tied)
    ids = oracle.some_tokens(5)
    base.save_pretrained(tmp_path)
    assert torch.equal(load_base(tmp_path)(ids).logits, base(ids).logits)


def write_mlx_folder(folder, base):
    """Pack a model as mlx-lm does: 4 bits, one module in 8, norms as they are."""
    base.save_pretrained(folder)
    special = "model.layers.1.mlp.down_proj"
    packed = {}
    expected = {}
    for name, tensor in read_tensors(folder / "model.safetensors").items():
        array = mx.array(tensor.numpy())
        module = name.removesuffix(".weight")
        if tensor.ndim == 1:
            packed[name] = array
            expected[name] = tensor
            continue
        options = {"group_size": 32, "bits": 8 if module == special else 4}
        weight, scales, biases = mx.quantize(array, **options)
        for kind, part in (("weight", weight), ("scales", scales), ("biases", biases)):
            packed[f"{module}.{kind}"] = part
        unpacked = mx.dequantize(weight, scales, biases, **options)
        expected[name] = torch.tensor(unpacked.tolist())
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"group_size": 32, "bits": 4, special: {"group_size": 32, "bits": 8}}
    config |= {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("tied", [False, True])
def test_load_base_of_mlx(tied, tmp_path):
    changes = {"tie_word_embeddings": tied, "intermediate_size": 64}
    base = oracle.make_base(**changes)
    ids = oracle.some_tokens(5)
    expected = write_mlx_folder(tmp_path, base)
    loaded = load_base(tmp_path, attn_implementation="sdpa")
    state = loaded.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in expected.items())
    if tied:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    base.load_state_dict(expected, strict=False)
    assert oracle.gap(loaded(ids).logits, base(ids).logits) < 5e-5


@pytest.mark.parametrize("packed", [False, True])
def test_load_base_draws_no_weights_of_its_own(packed, tmp_path):
    base = oracle.make_base(intermediate_size=64)
    file = tmp_path / "model.safetensors"
    base.save_pretrained(tmp_path)
    if packed:
        write_mlx_folder(tmp_path, base)
    tensors = read_tensors(file)
    del tensors["model.norm.weight"]
    misshapen = () if packed else ({"model.norm.weight": torch.ones(7)},)
    for more in ({}, *misshapen):
        save_file({**tensors, **more}, file, metadata={"format": "pt"})
        assert mentions(refusal(load_base, tmp_path), "model.norm.weight")


def test_load_base_refuses_a_broken_folder_in_one_line(tmp_path):
    assert "nowhere" in refusal(load_base, tmp_path / "nowhere")
    oracle.make_base().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    (tmp_path / "adapter_config.json").touch()
    assert mentions(refusal(load_base, tmp_path), "LoRA")
    (tmp_path / "adapter_config.json").unlink()
    for settings, *named in (({},), ({"model_type": "nope"},), ({"hidden_size": "x"}, "'x'")):
        values = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**values, **settings}))
        assert mentions(refusal(load_base, tmp_path), str(tmp_path), *named)


PROMPT = [5, 2, 3, 11, 7]
TREE_TOKENS = [11, 1, 6, 3, 4, 5, 6]
TREE_PARENTS = [-1, 0, 0, 1, 2, 2, 4]
TINY_VOCAB = 13


def make_pair(folder, architecture, scope, kind):
    """A reference, and the MLX model that the converter makes of its checkpoint."""
    base = oracle.make_base(architecture, vocab=TINY_VOCAB)
    base.save_pretrained(folder / "base")
    rank = 0 if kind == "identity" else 3
    reference = oracle.make_model(
        base=base, adapter_scope=scope, stream_init=kind, stream_init_rank=rank
    )
    adapter, backbone = oracle.convert(folder, reference)
    model = attach_adapter(backbone, load_adapter(adapter), merge_lora=kind != "low_rank")
    return reference, model


@pytest.mark.parametrize(
    "architecture, scope, kind",
    all_pairs(oracle.ARCHITECTURES, ["all", "streams"], ["identity", "low_rank", "residual"]),
)
def test_mlx_computes_the_same_and_takes_the_same_steps(architecture, scope, kind, tmp_path):
    reference, model = make_pair(tmp_path, architecture, scope, kind)
    for step in ((PROMPT[:-1], [PROMPT[-1]], [-1]), (PROMPT, TREE_TOKENS, TREE_PARENTS)):
        oracle.assert_close(oracle.mlx_step(model, *step), oracle.reference_step(reference, *step))
    whole = model.backbone.append(mx.array(PROMPT), model.make_cache()).logits
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT]), stream_rows=torch.zeros(0, dtype=torch.long))
    oracle.assert_close([whole], [expected.main_logits[0]])
    for width in (1, 3):
        oracle.assert_same_steps(reference, model, PROMPT, width)
