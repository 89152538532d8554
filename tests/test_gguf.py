"""GGUF conversion: small files made here, and every tensor of the real one."""

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from ssmlx.loading.folders import cache_dir
from ssmlx.loading.gguf import convert_trusted_gguf
from ssmlx.loading.names import ALIASES, resolve_model
from ssmlx.loading.wheel import fetch_gguf

LAYERS = 2
WIDTH = 64
HIDDEN = 96
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "th", "the", "ĠĠ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


LAYER = {
    "input_layernorm": ("attn_norm", (WIDTH,)), "post_attention_layernorm": ("ffn_norm", (WIDTH,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, WIDTH)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, WIDTH)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, WIDTH)),
    "self_attn.o_proj": ("attn_output", (WIDTH, HEADS * HEAD_DIM)),
    "mlp.gate_proj": ("ffn_gate", (HIDDEN, WIDTH)), "mlp.up_proj": ("ffn_up", (HIDDEN, WIDTH)),
    "mlp.down_proj": ("ffn_down", (WIDTH, HIDDEN)),
}  # fmt: skip
# Hugging Face's names to those of GGUF files, and shapes.
TENSORS = {
    "model.embed_tokens": ("token_embd", (len(WORDS), WIDTH)),
    "model.norm": ("output_norm", (WIDTH,)),
    **{
        f"model.layers.{layer}.{ours}": (f"blk.{layer}.{theirs}", shape)
        for layer in range(LAYERS)
        for ours, (theirs, shape) in LAYER.items()
    },
}


def make_weights(dtype=mx.float16) -> dict[str, mx.array]:
    """Random weights of a tiny Llama under Hugging Face's names, norms in float32."""
    mx.random.seed(0)
    weights = {}
    for name, (_, shape) in TENSORS.items():
        half = mx.random.normal(shape, scale=0.3).astype(mx.float16)
        weights[f"{name}.weight"] = half.astype(mx.float32 if half.ndim == 1 else dtype)
    return weights


def gguf_name(name: str) -> str:
    return f"{TENSORS[name.removesuffix('.weight')][0]}.weight"


def permute(name: str, weight: mx.array) -> mx.array:
    """What llama.cpp's converter does to the rows of the query and key projections."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    heads = HEADS if "q_proj" in name else KV_HEADS
    halves = weight.reshape(heads, 2, HEAD_DIM // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def make_metadata() -> dict:
    def number(value):
        return mx.array(value, dtype=mx.float32 if isinstance(value, float) else mx.uint32)

    kinds = [3, 3, 3] + [1] * (len(WORDS) - len(SPECIAL))
    return {
        "general.architecture": "llama",
        "general.file_type": number(1),
        "llama.embedding_length": number(WIDTH),
        "llama.feed_forward_length": number(HIDDEN),
        "llama.block_count": number(LAYERS),
        "llama.context_length": number(128),
        "llama.attention.head_count": number(HEADS),
        "llama.attention.head_count_kv": number(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": number(1e-5),
        "llama.rope.freq_base": number(100000.0),
        "llama.rope.dimension_count": number(HEAD_DIM),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": mx.array(kinds, dtype=mx.int32),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.eos_token_id": number(2),
        "tokenizer.ggml.padding_token_id": number(2),
        "tokenizer.ggml.unknown_token_id": number(0),
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(path: Path, weights: dict[str, mx.array], metadata: dict) -> Path:
    # save_gguf writes an array's buffer as it lies, so a transposed view must be copied first.
    stored = {gguf_name(k): mx.contiguous(permute(k, w)) for k, w in weights.items()}
    mx.save_gguf(str(path), stored, metadata)
    return path


def converted(tmp_path: Path) -> Path:
    """The folder that a small file becomes."""
    convert_trusted_gguf(
        write_gguf(tmp_path / "a.gguf", make_weights(), make_metadata()), tmp_path / "out"
    )
    return tmp_path / "out"


def read_folder(folder: Path) -> tuple[dict[str, mx.array], dict]:
    config = json.loads((folder / "config.json").read_text())
    return mx.load(str(folder / "model.safetensors")), config


def unpacked(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a folder in float32, scales multiplied in float32."""
    weights, config = read_folder(folder)
    plain = {}
    for name, weight in weights.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if f"{module}.scales" in weights:
            settings = config["quantization"].get(module, config["quantization"])
            scales = weights[f"{module}.scales"].astype(mx.float32)
            biases = weights[f"{module}.biases"].astype(mx.float32)
            bits = settings["bits"]
            weight = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
        plain[name] = weight.astype(mx.float32)
    return plain


def assert_same(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not mx.array_equal(found[name], expected[name]).item()]
    assert different == []


def test_weights_come_back_under_hugging_face_names_and_row_order(tmp_path):
    found, config = read_folder(converted(tmp_path))
    assert_same(found, make_weights())
    assert config["tie_word_embeddings"] and "quantization" not in config
    assert {tensor.dtype for tensor in found.values()} == {mx.float16}
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    logits = model(mx.array([[1, 5, 9]]))
    assert logits.dtype == mx.float16 and mx.isfinite(logits).all().item()


def test_packed_weights_unpack_to_llama_cpps_own_values(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    add_metadata(writer)
    expected = {}
    for name, weight in make_weights(mx.float32).items():
        # An embedding in 8 bits over layers in 4, as llama.cpp writes them.
        packed = "F32" if weight.ndim == 1 else "Q8_0" if "embed" in name else "Q4_1"
        quant = gguf.GGMLQuantizationType[packed]
        # Quantisation goes by rows, so unpermuted rows give the reference.
        expected[name] = gguf.dequantize(gguf.quantize(np.array(weight), quant), quant)
        stored = gguf.quantize(np.array(permute(name, weight)), quant)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert_trusted_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert_same(unpacked(tmp_path / "out"), {k: mx.array(v) for k, v in expected.items()})
    quantization = read_folder(tmp_path / "out")[1]["quantization"]
    assert quantization["bits"] == 4 and quantization["model.embed_tokens"]["bits"] == 8
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    assert model(mx.array([[1, 5]])).dtype == mx.float16


def add_metadata(writer) -> None:
    for key, value in make_metadata().items():
        if isinstance(value, mx.array):
            value = value.tolist()
        if key == "general.architecture":
            continue  # the writer adds it
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def test_tokens_merge_and_special_tokens_stand_alone(tmp_path):
    tokenizer = Tokenizer.from_file(str(converted(tmp_path) / "tokenizer.json"))
    text = "<|im_start|>the é<|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<|im_start|>", "the", "Ġ", "Ã", "©", "<|im_end|>"]
    assert encoded.ids[:2] == [1, WORDS.index("the")]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == "the é"  # a control token is no text
    # Digits are cut off before spaces are looked at.
    assert tokenizer.encode("the  12").tokens == ["the", "ĠĠ", "1", "2"]


def test_tokenizer_settings(tmp_path):
    folder = converted(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    _, tokenizer = mlx_lm.load(str(folder))
    assert tokenizer.eos_token_ids == {2}
    message = [{"role": "user", "content": "the"}]
    ids = tokenizer.apply_chat_template(message, return_dict=False)
    assert ids == [1, WORDS.index("the"), 2]


# --- The real model, against transformers' own reader ---


@pytest.fixture(scope="module")
def real_folder() -> Path:
    return resolve_model("smollm2-135m-q4_1")


@pytest.fixture(scope="module")
def real_gguf(real_folder) -> Path:
    """The file that `real_folder` was made from, kept beside it for the next run."""
    alias = ALIASES["smollm2-135m"]
    kept = cache_dir() / "tests" / Path(alias.gguf).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            fetch_gguf(alias, Path(work)).replace(kept)
    return kept


@pytest.fixture(scope="module")
def reference(real_gguf):
    pytest.importorskip("gguf", reason="transformers reads GGUF files with it")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        real_gguf.parent, gguf_file=real_gguf.name, dtype=torch.float32
    )
    return model.eval()


@pytest.mark.long
@pytest.mark.real
def test_every_real_tensor_equals_transformers_reading(real_folder, reference):
    found = unpacked(real_folder)
    expected = {k: v for k, v in reference.state_dict().items() if k != "lm_head.weight"}
    assert len(found) == 272
    assert_same(found, {name: mx.array(tensor.numpy()) for name, tensor in expected.items()})


@pytest.mark.long
@pytest.mark.real
def test_real_logits_agree_with_transformers(real_folder, reference):
    torch = pytest.importorskip("torch")
    model, tokenizer = mlx_lm.load(str(real_folder))
    assert model(mx.array([[1]])).dtype == mx.float16
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    tokens = tokenizer.encode("The capital of France is Paris, and 2 + 2 = 4.")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits.numpy()
    found = np.array(model(mx.array([tokens])))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


# No digit here follows a space that it could merge with: see the last test.
TEXTS = [
    "Hello, world! It's John's dog; they'll've said 'no'.",
    "naïve café — “quotes”, Straße, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト、한국어, 中文字符。",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 and z̷͂a͌lgo",
    "x = [i**2 for i in range(1024)]  # 3.14159e-10, 0xFF",
    "def f(a,\n\tb=None):\r\n    return {'k': a[0]}\n\n\n    # end\n",
    "trailing spaces   \n \n\t\t",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>a/b<file_sep> <|im_start",
    "",
    " ",
    "\x00\x01\ufeff\u200b",
]


@pytest.fixture(scope="module")
def tokenizers_pair(real_folder, real_gguf):
    pytest.importorskip("gguf", reason="transformers reads GGUF files with it")
    transformers = pytest.importorskip("transformers")
    ours = transformers.AutoTokenizer.from_pretrained(real_folder)
    return ours, transformers.AutoTokenizer.from_pretrained(
        real_gguf.parent, gguf_file=real_gguf.name
    )


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizer_agrees_with_transformers(tokenizers_pair, text):
    ours, theirs = tokenizers_pair
    ids = ours(text)["input_ids"]
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids) == text
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True
    )


@pytest.mark.long
@pytest.mark.real
def test_real_chat_template_and_special_tokens_agree_with_transformers(tokenizers_pair):
    ours, theirs = tokenizers_pair
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.get_vocab() == theirs.get_vocab()
    chat = [
        {"role": "user", "content": "What is 12 x 7?"},
        {"role": "assistant", "content": "84."},
        {"role": "user", "content": "Sure?\n"},
    ]
    ids = [
        t.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for t in (ours, theirs)
    ]
    assert ids[0] == ids[1]
    assert ids[0][0] == 1 and ids[0].count(2) == 4
