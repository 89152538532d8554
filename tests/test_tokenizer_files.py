"""Tokenizers read by their own files, and the file that a chat template stands in."""

import json
import logging
from pathlib import Path

import pytest
import real
from refusals import refusal
from tiny import slow
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as training
from transformers import AutoTokenizer

import ssmlx
from convert.base import copy_settings_and_tokenizer
from ssmlx.loading.load import load_tokenizer
from ssmlx.loading.model_config import explain_errors
from ssmlx.loading.tokenizer_files import read_chat_template

TEXT = "The quick  fox,\n\nfine días </s> <s>hello"
CORPUS = ["the quick brown fox jumps over the lazy dog; hello, fine world"] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
REFUSED = {
    "a class that transformers lacks, with scaled rope": {
        "model_type": "nemotron-nas",
        "rope_scaling": LLAMA3,
    },
    "its yarn": {"model_type": "bailing_moe", "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "a layer type too many": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 3},
    "Phi-3's first name of longrope": {
        "model_type": "phi3",
        "rope_scaling": {"type": "su", **FACTORS},
    },
    "a nested fault": {"model_type": "qwen2_5_vl", "vision_config": 5},
    "a tokenizer's class that nobody has": {
        "model_type": "bailing_moe",
        "tokenizer_class": "BailingTokenizer",
    },
}


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = training.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentence_pieces() -> Tokenizer:
    """As Llama 2 has it: spaces as pieces, unknown bytes, a start token that is added."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    hexes = [f"<0x{number:02X}>" for number in range(256)]
    trainer = training.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL, *hexes], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return made


@pytest.fixture(scope="module")
def tokenizers():
    return {"byte level": byte_level(), "sentence pieces": sentence_pieces()}


def write(folder: Path, tokenizer: Tokenizer, config: dict, **settings) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(folder: Path, **files) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def what_it_does(tokenizer) -> tuple:
    ids = tokenizer.encode(TEXT)
    bare = tokenizer.encode(TEXT, add_special_tokens=False)
    special = tokenizer.bos_token, tokenizer.eos_token, tokenizer.all_special_tokens
    return type(tokenizer).__name__, ids, bare, tokenizer.decode(ids), special


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_settings_that_transformers_refuses_leave_the_tokenizer_alone(tokenizers, tmp_path, config):
    own = tokenizers["byte level"]
    config = {"model_type": "qwen3", "eos_token_id": 2, **config}
    write(tmp_path, own, config)
    with pytest.raises(Exception):  # noqa: B017  # of many kinds
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    found = load_tokenizer(tmp_path, config)
    assert found.encode(TEXT) == own.encode(TEXT).ids
    assert found.eos_token_ids == {2}


CLASSES = (None, "PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "NobodysTokenizer")


@pytest.mark.parametrize(
    "model_type", ["llama", "zzz", *slow("qwen3", "phi3", "mistral", "internlm2")]
)
@pytest.mark.parametrize("kind", ["byte level", "sentence pieces"])
def test_a_tokenizer_is_the_one_that_transformers_makes(tokenizers, tmp_path, kind, model_type):
    for name in CLASSES:
        for adds in ({}, {"add_bos_token": True}, {"add_bos_token": False, "legacy": True}):
            named = {} if name is None else {"tokenizer_class": name}
            config = {"model_type": model_type}
            write(tmp_path, tokenizers[kind], config, **named, **adds)
            expected = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
            found = load_tokenizer(tmp_path, config)._tokenizer
            assert what_it_does(found) == what_it_does(expected), (name, adds)


@pytest.mark.parametrize(("name", "content", "named"), [
    ("tokenizer.json", None, ""),
    ("tokenizer.json", "{", "tokenizer.json"),
    ("tokenizer.json", "{}", ""),
    ("tokenizer_config.json", "{", "tokenizer_config.json"),
    ("chat_template.json", "{", "chat_template.json"),
    ("chat_template.json", '{"chat_template": 5}', "chat_template"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat_template"),
])  # fmt: skip
def test_a_broken_file_is_named(tokenizers, tmp_path, name, content, named):
    write(tmp_path, tokenizers["byte level"], {"model_type": "llama", "rope_scaling": LLAMA3})
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    line = refusal(load_tokenizer, tmp_path, {"model_type": "llama"})
    assert str(tmp_path) in line and named in line.replace(str(tmp_path), "")


LISTED = [{"name": "default", "template": "L"}, {"name": "tool_use", "template": "LT"}]


@pytest.mark.parametrize(("files", "expected"), [
    ({}, None),
    ({"chat_template.json": "J"}, "J"),
    ({"processor_config.json": "P"}, "P"),
    ({"processor_config.json": "P", "chat_template.json": "J"}, "J"),
    ({"chat_template.json": "J", "tokenizer_config.json": "T"}, "T"),
    ({"chat_template.jinja": "F", "tokenizer_config.json": "T"}, "F"),
    ({"chat_template.jinja": "F", "tokenizer_config.json": LISTED}, "F"),
    ({"tokenizer_config.json": LISTED}, {"default": "L", "tool_use": "LT"}),
    ({"tokenizer_config.json": {"default": "L"}}, "L"),
    ({"chat_template.json": LISTED[1:]}, "LT"),
    ({"chat_template.json": {"default": "D", "rag": "R"}}, {"default": "D", "rag": "R"}),
    ({"additional/rag": "R"}, {"rag": "R"}), ({"additional/tool_use": "U"}, "U"),
    ({"additional/rag": "R", "chat_template.jinja": "F"}, {"default": "F", "rag": "R"}),
    ({"additional/rag": "R", "tokenizer_config.json": "T"}, {"default": "T", "rag": "R"}),
    ({"additional/rag": "R", "chat_template.json": "J"}, {"default": "J", "rag": "R"}),
])  # fmt: skip
def test_a_chat_template_is_found_wherever_it_stands(tokenizers, tmp_path, files, expected):
    config = {"model_type": "llama"}
    write(tmp_path, tokenizers["byte level"], config)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        path = tmp_path / name
        if name.startswith("additional/"):
            path = tmp_path / "additional_chat_templates" / f"{Path(name).name}.jinja"
        is_text = path.suffix == ".jinja"
        path.write_text(content if is_text else json.dumps({"chat_template": content}))
    assert read_chat_template(tmp_path) == expected
    found = load_tokenizer(tmp_path, config)
    assert found.has_chat_template == (expected is not None)
    assert found.chat_template == expected
    # What is written of a model keeps it, whatever file it stood in.
    for number, keep in enumerate((found.save_pretrained, lambda to: copy(tmp_path, to))):
        (kept := tmp_path / f"kept {number}").mkdir()
        keep(kept)
        assert read_chat_template(kept) == expected


def copy(source: Path, target: Path) -> None:
    copy_settings_and_tokenizer(source, target)


def test_a_template_in_a_processors_file_frames_prompts(tmp_path):
    folder = real.write_base(tmp_path / "base")
    expected = ssmlx.prompt_tokens("w1", *ssmlx.load(str(folder)))
    (folder / "chat_template.jinja").unlink()
    model, tokenizer = ssmlx.load(str(folder))
    assert tokenizer.decode(ssmlx.prompt_tokens("w1", model, tokenizer)) == "w1"
    put(folder, chat_template={"chat_template": real.CHAT_TEMPLATE})
    assert ssmlx.prompt_tokens("w1", *ssmlx.load(str(folder))) == expected


CODE = {"auto_map": {"AutoTokenizer": ["tokenization_theirs.Theirs", None]}}


@pytest.mark.parametrize(
    "model_type", ["llama", "kimi_k2", *slow("internlm2", "kimi_k25", "qwen2")]
)
@pytest.mark.parametrize("kind", ["byte level", "sentence pieces"])
def test_code_beside_tokenizer_json_is_not_needed(tokenizers, tmp_path, kind, model_type):
    own = tokenizers[kind]
    for name in CLASSES:
        named = {} if name is None else {"tokenizer_class": name}
        write(tmp_path, own, {"model_type": model_type}, **named, **CODE)
        assert (
            load_tokenizer(tmp_path, {"model_type": model_type}).encode(TEXT)
            == own.encode(TEXT).ids
        )


def write_sentence_pieces(folder: Path):
    """A tokenizer.model as InternLM2 has it."""
    trained = pytest.importorskip("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    trained.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=300,
        model_type="bpe", byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    return trained.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_sentence_pieces_beside_code_are_read_if_transformers_has_a_class(tokenizers, tmp_path):
    pieces = write_sentence_pieces(tmp_path)
    write(tmp_path, tokenizers["byte level"], {}, tokenizer_class="InternLM2Tokenizer", **CODE)
    (tmp_path / "tokenizer.json").unlink()
    found = load_tokenizer(tmp_path, {"model_type": "internlm2"})
    text = "the quick brown  fox, fine días"
    assert found.encode(text, add_special_tokens=False) == pieces.encode(text)
    assert str(tmp_path) in refusal(load_tokenizer, tmp_path, {"model_type": "baichuan_m1"})


@pytest.mark.parametrize("model_type", ["kimi_k2", "kimi_k25", "qwen"])
def test_a_vocabulary_of_tiktoken_alone_is_refused(tokenizers, tmp_path, model_type):
    write(tmp_path, tokenizers["byte level"], {"model_type": model_type}, **CODE)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tiktoken.model")
    assert str(tmp_path) in refusal(load_tokenizer, tmp_path, {"model_type": model_type})


@pytest.fixture
def warned():
    """What transformers says in its log."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_a_broken_tokenizer_is_one_line_without_warnings(tmp_path, warned):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"garbage")  # over which transformers warns
    assert str(tmp_path) in refusal(load_tokenizer, tmp_path, {"model_type": "llama"})
    assert warned == []


def test_warnings_over_what_can_be_loaded_are_said_after_it(warned):
    with explain_errors("it", expected="more", do="try"):
        logging.getLogger("transformers.anything").warning("a warning")
        assert warned == []
    assert warned == ["a warning"]
