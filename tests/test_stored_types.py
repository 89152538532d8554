"""Weights in types that mlx-lm does not read as the numbers they are: refused by name."""

import json
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import real
import tiny
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config, save_model
from refusals import mentions, refusal

import ssmlx
from ssmlx.errors import InputError
from ssmlx.loading.load import load_base
from ssmlx.loading.stored_tensors import read_header

BYTES = {
    "F8_E4M3": 1, "F8_E5M2": 1, "F4": 1, "F6_E2M3": 1, "I8": 1, "U8": 1, "BOOL": 1, "I16": 2,
    "I32": 4, "U32": 4, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
UP = "model.layers.1.mlp.up_proj"


def rewrite(folder: Path, types: dict[str, str], **more: mx.array) -> Path:
    """Write a folder's weights anew, by hand: tensors whose names end so get that type and zeros
    for bytes; the tensors `more` stand beside them, "_in_" for ".".
    """
    path = folder / "model.safetensors"
    tensors = {**mx.load(str(path)), **{n.replace("_in_", "."): one for n, one in more.items()}}
    mx.save_safetensors(str(path), tensors)
    blob = path.read_bytes()
    header, parts, size = {}, [], 0
    for one in read_header(path):
        part = blob[one.begin : one.end]
        dtype = next((types[end] for end in types if one.name.endswith(end)), one.dtype)
        shape = list(tensors[one.name].shape)
        if dtype != one.dtype:
            part = bytes(BYTES[dtype] * int(np.prod(shape)))
        header[one.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [size, size + len(part)],
        }
        size += len(part)
        parts.append(part)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return folder


def configure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def copy(base: Path, folder: Path, **changes) -> Path:
    shutil.copytree(base, folder)
    configure(folder, **changes)
    return folder


ALONE = ("F8_E4M3", "F8_E5M2", "F4", "F6_E2M3", "I8", "U8", "BOOL", "I16", "I32", "U32", "F64")


@pytest.mark.parametrize("dtype", [*ALONE, "C64"])
@pytest.mark.parametrize("end", ["_proj.weight", f"{UP}.weight", "norm.weight"])
def test_weights_that_are_no_floats_are_refused(base, tmp_path, dtype, end):
    folder = rewrite(copy(base, tmp_path / "model"), {end: dtype})
    said = refusal(ssmlx.load, str(folder))
    assert mentions(said, str(folder), dtype) and end in said


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "U32"])
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scales"])
def test_scales_of_which_config_says_nothing(base, tmp_path, dtype, scale):
    beside = {f"{UP.replace('.', '_in_')}_in_{scale}": mx.ones((1, 1))}
    folder = rewrite(copy(base, tmp_path / "model"), {f"{UP}.weight": dtype}, **beside)
    said = refusal(ssmlx.load, str(folder))
    kept = {"F8_E4M3": "F8_E4M3", "I8": "int8", "U8": "uint8", "U32": "uint32"}[dtype]
    assert mentions(said, str(folder), kept) and UP in said
    # Half of them have none.
    rewrite(folder, {"down_proj.weight": dtype})
    assert "scales" in refusal(ssmlx.load, str(folder))


UNKNOWN = (
    "quark", "hqq", "torchao", "bitsandbytes", "eetq", "aqlm", "vptq", "spqr", "higgs", "quanto",
    "fbgemm_fp8", "auto-round", "intel/auto-round", "compressed_tensors", "", 5, None,
)  # fmt: skip


@pytest.mark.parametrize("method", UNKNOWN)
def test_an_unknown_method_is_refused_by_its_name(base, tmp_path, method):
    found = {"quant_method": method, "bits": 4}
    folder = copy(base, tmp_path / "model", quantization_config=found)
    said = refusal(ssmlx.load, str(folder))
    assert repr(method) in said
    of_text = copy(base, tmp_path / "of text", text_config={"quantization_config": found})
    assert refusal(ssmlx.load, str(of_text)).replace(str(of_text), str(folder)) == said
    beside = copy(base, tmp_path / "beside")
    (beside / "hf_quant_config.json").write_text(json.dumps(found))
    with pytest.raises(InputError):
        ssmlx.load(str(beside))


def test_settings_that_say_nothing_are_passed_over(base, tmp_path):
    for number, nothing in enumerate((None, {}, False)):
        folder = copy(base, tmp_path / str(number), quantization_config=nothing)
        # A table that the class drops may be of any type.
        table = {"model_in_layers_in_0_in_self_attn_in_rotary_emb_in_inv_freq": mx.arange(4)}
        rewrite(folder, {}, **table)
        model, tokenizer = ssmlx.load(str(folder))
        expected = ssmlx.generate(*ssmlx.load(str(base)), "w1 w2", max_tokens=4)
        assert ssmlx.generate(model, tokenizer, "w1 w2", max_tokens=4) == expected


def write_tiny(folder: Path, name: str, **settings) -> dict[str, mx.array]:
    """Write the folder of a tiny model of a class of mlx-lm's; its tensors as they are stored."""
    model = tiny.make_base(name, vocab=64, **settings)
    folder.mkdir()
    save_model(folder, model)
    config = {k: v for k, v in model.args.__dict__.items() if v is not None}
    save_config({**config, "model_type": name}, folder / "config.json")
    return mx.load(str(folder / "model.safetensors"))


def pack_fp8(folder: Path, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Store a folder's projections as FP8 in blocks of 128, with the scales that DeepSeek has; what
    they stand for.
    """
    stored, meant = {}, {}
    for name, one in tensors.items():
        meant[name] = stored[name] = one
        if name.endswith("_proj.weight") and one.ndim == 2:
            stored[name] = mx.to_fp8(one * 16)
            stored[f"{name}_scale_inv"] = mx.full((1, 1), 1 / 16)
            meant[name] = mx.from_fp8(stored[name], mx.bfloat16) * mx.array(1 / 16, mx.bfloat16)
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), stored)
    blob = path.read_bytes()
    head = blob.replace(b'"U8"', b'"F8_E4M3"')
    size = struct.unpack("<Q", blob[:8])[0] + len(head) - len(blob)
    path.write_bytes(struct.pack("<Q", size) + head[8:])
    return meant


@pytest.mark.parametrize("says", [True, False])
def test_fp8_is_loaded_where_the_class_decodes_it(tmp_path, says):
    folder = tmp_path / "model"
    settings = {**tiny.LATENT, "first_k_dense_replace": 9}
    tensors = write_tiny(folder, "deepseek_v3", **settings)
    meant = pack_fp8(folder, tensors)
    assert any(one.dtype == "F8_E4M3" for one in read_header(folder / "model.safetensors"))
    if says:
        block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        configure(folder, quantization_config=block)
    backbone, _ = load_base(folder, "float32")
    loaded = dict(tree_flatten(backbone.model.parameters()))
    shared = [name for name in meant if name.endswith("mlp.up_proj.weight")]
    assert len(shared) == tiny.LAYERS
    for name in shared:
        assert mx.array_equal(loaded[name], meant[name].astype(mx.float32)), name


@pytest.mark.parametrize("name", ["qwen3", "ministral3"])
def test_fp8_is_refused_where_the_class_does_not(tmp_path, name):
    folder = tmp_path / "model"
    rope = {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.1, "rope_type": "default",
            "original_max_position_embeddings": 64}  # fmt: skip
    more = {"layer_types": ["full_attention"] * tiny.LAYERS, "rope_parameters": rope}
    pack_fp8(folder, write_tiny(folder, name, **(more if name == "ministral3" else {})))
    for says in ({}, {"quant_method": "fp8", "weight_block_size": [128, 128]}):
        configure(folder, quantization_config=says)
        said = refusal(load_base, folder, "float32")
        assert "F8_E4M3" in said and name in said


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_what_mlx_lm_packed_is_loaded(base, tmp_path, mode):
    bits, size = {"affine": (4, 32), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    packed = real.write_packed(tmp_path / "packed", base, group_size=size, bits=bits, mode=mode)
    load_base(packed, "stored")
    # The same scales as bytes of something else are refused.
    rewrite(packed, {".scales": "I32"})
    line = refusal(load_base, packed, "stored")
    assert mentions(line, "scales", "int32") or mode != "affine"


def test_awq_is_loaded_as_the_numbers_that_it_stands_for(base, tmp_path):
    folder = copy(base, tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = mx.load(str(path))
    meant = {}
    rng = np.random.default_rng(0)
    fitting = [name for name, one in tensors.items() if one.ndim == 2 and one.shape[1] % 32 == 0]
    for name in [name for name in fitting if name.endswith("_proj.weight")]:
        out, width = tensors.pop(name).shape
        values = rng.integers(0, 16, (width, out), np.uint32)
        scales = rng.random((width // 32, out)).astype(np.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # of AutoAWQ: which column stands in which four bits
        shifted = values.reshape(width, -1, 8)[:, :, order] << (4 * np.arange(8, dtype=np.uint32))
        layer = name.removesuffix(".weight")
        tensors[f"{layer}.qweight"] = mx.array(shifted.sum(-1, dtype=np.uint32).view(np.int32))
        tensors[f"{layer}.scales"] = mx.array(scales)
        expected = (values.astype(np.float32) - 8) * np.repeat(scales, 32, axis=0)
        meant[name] = mx.array(expected.T)
    mx.save_safetensors(str(path), tensors)
    configure(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    backbone, _ = load_base(folder, "float32")
    loaded = dict(tree_flatten(backbone.model.parameters()))
    for name, expected in meant.items():
        tiny.assert_close(loaded[name], expected, 1e-2)


FOUR = {"num_bits": 4, "symmetric": True, "type": "int", "group_size": 32, "strategy": "group"}


def packing(*weights, **more) -> dict:
    """quantization_config of compressed-tensors, with a group of layers for each."""
    groups = {f"group_{n}": {"targets": ["Linear"], "weights": w} for n, w in enumerate(weights)}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
            **more,
        }
    }


def pack_integers(folder: Path, tensors: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    """Store MLPs' layers as compressed-tensors packs integers, around half of what their bits
    hold; what they stand for."""
    stored, meant = {}, {}
    rng = np.random.default_rng(0)
    for name, one in tensors.items():
        if ".mlp." not in name or one.ndim != 2 or one.shape[1] % 32:
            stored[name] = one
            continue
        values = rng.integers(0, 2**bits, one.shape, np.uint32)
        shifts = bits * np.arange(32 // bits, dtype=np.uint32)
        packed = (values.reshape(len(values), -1, 32 // bits) << shifts).sum(-1, dtype=np.uint32)
        scales = rng.random((one.shape[0], one.shape[1] // 32)).astype(np.float32)
        stored[f"{name}_packed"] = mx.array(packed.view(np.int32))
        stored[f"{name}_scale"] = mx.array(scales)
        stored[f"{name}_shape"] = mx.array(one.shape)
        centred = values.astype(np.float32) - 2 ** (bits - 1)
        meant[name] = mx.array(centred * np.repeat(scales, 32, axis=1))
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    return meant


def write_latent(folder: Path) -> dict[str, mx.array]:
    return write_tiny(folder, "deepseek_v3", **{**tiny.LATENT, "first_k_dense_replace": 9})


def test_integers_of_four_bits_are_loaded_as_the_numbers_that_they_stand_for(tmp_path):
    folder = tmp_path / "model"
    meant = pack_integers(folder, write_latent(folder), 4)
    assert len(meant) >= tiny.LAYERS
    for settings in (packing(FOUR), packing({"num_bits": 4}), packing(FOUR, None, FOUR)):
        configure(folder, **settings)
        loaded = dict(tree_flatten(load_base(folder, "float32")[0].model.parameters()))
        for name, expected in meant.items():
            tiny.assert_close(loaded[name], expected, 1e-5)


@pytest.mark.parametrize("settings", [
    packing({**FOUR, "num_bits": 8}), packing(FOUR, {**FOUR, "num_bits": 8}),
    packing({**FOUR, "symmetric": False}), packing({**FOUR, "type": "float"}),
    packing({"group_size": 32}), packing(), packing(None), packing(5),
    packing(FOUR, config_groups=None), packing(FOUR, config_groups=[FOUR]),
])  # fmt: skip
def test_other_integers_would_be_read_as_those_and_are_refused(tmp_path, settings):
    folder = tmp_path / "model"
    pack_integers(folder, write_latent(folder), 8)
    configure(folder, **settings)
    said = refusal(load_base, folder, "float32")
    assert mentions(said, "compressed-tensors", "num_bits")
