"""Bad input as a new user gives it: one line that says what was found, and what to do."""

import errno
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from real import ROOT, run_module, words
from refusals import exits, found_in, line_of, mentions, one_line, refusal
from tiny import make_tokenizer

import ssmlx
from convert.__main__ import main as convert
from ssmlx import GenerateConfig
from ssmlx.commands import train
from ssmlx.commands.running import run_command
from ssmlx.drafters.medusa import MedusaConfig
from ssmlx.drafters.mlp_speculator import MlpSpeculatorConfig
from ssmlx.errors import ContextLengthError, InputError, quoted
from ssmlx.json_files import found_in_json, read_json
from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.files import locked_folder
from ssmlx.loading.lora_files import LORA_FILE
from ssmlx.loading.tensors import write_tensors
from ssmlx.model.ranks import launched_group
from ssmlx.prompts import read_prompts
from ssmlx.server.refusals import RequestError
from ssmlx.settings import StreamConfig
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Encoder, read_examples

CONFIGS = {
    "max_position_embeddings": ("big", -1, 0, True, float("nan"), 10**400),
    "eos_token_id": ("two", [2, "three"], {"a": 1}),
    "num_attention_heads": (0, -1, "4", None, [4], 3),
    "num_key_value_heads": (0, 3, "2"),
    "num_hidden_layers": (10**9, 0, -4, "four", 3.5, None),
    "hidden_size": (0, 10**12, "wide", [32], 16),
    "vocab_size": (0, 10**12, "many", 63),
    "head_dim": (0, "8", 10**12),
    "rms_norm_eps": ("small", None, {}),
    "rope_theta": ("far", {}),
    "rope_scaling": (5, {"type": 5}, {"rope_type": "yarn"}, [1]),
    "rope_parameters": ({"rope_theta": "x"}, {"rope_theta": 1.0, "rope_type": "odd"}),
    "model_type": (None, 5, ["llama"], {}, "", "..", "no such", "llama.llama"),
    "quantization": (5, {}, {"bits": 3}),
    "quantization_config": (5, {"quant_method": "awq"}),
    "tie_word_embeddings": ({},),
}


def spoilt(source, folder, file="config.json", **changes):
    """A copy of a model's folder with other settings."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**values, **changes}))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_of_a_model_that_are_none(name, base, tmp_path):
    for number, value in enumerate(CONFIGS[name]):
        folder = spoilt(base, tmp_path / str(number), **{name: value})
        try:
            model, tokenizer = ssmlx.load(str(folder))
            ssmlx.generate(model, tokenizer, "w1 w2", max_tokens=2)
        except InputError as error:
            line = line_of(error)
            assert len(line) < 500
            assert str(folder) in line or "llama" in line or name == "model_type"
        else:
            assert name in ("tie_word_embeddings", "rope_parameters", "rope_scaling"), value


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("kind", ["missing", "to spare"])
def test_tensors_that_a_model_lacks_or_has_to_spare_are_named(kind, count, base, tmp_path):
    """The first three, and how many there are."""
    folder = spoilt(base, tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = mx.load(str(path))
    others = sorted(name for name in tensors if ".mlp." in name)[:count]
    if kind == "missing":
        tensors = {name: one for name, one in tensors.items() if name not in others}
    else:
        others = [name.replace("mlp", "other") for name in others]
        tensors |= {name: mx.ones(2) for name in others}
    mx.save_safetensors(str(path), tensors)
    said = refusal(ssmlx.load, str(folder))
    assert mentions(said, str(folder), str(count), *others[:3])
    assert not any(name in said for name in others[3:])


TOKENIZERS = (
    {"tool_parser_type": "no such"}, {"chat_template_type": "no such"}, {"tokenizer_class": 5},
    {"tool_parser_type": 5}, {"eos_token": 5}, {"added_tokens_decoder": {"x": {}}},
    {"extra_special_tokens": 5}, {"model_max_length": "far"}, {"bos_token": {"content": 5}},
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(TOKENIZERS)))
def test_settings_of_a_tokenizer_that_are_none(number, base, tmp_path):
    folder = spoilt(base, tmp_path / "model", "tokenizer_config.json", **TOKENIZERS[number])
    try:
        assert isinstance(ssmlx.load(str(folder))[1], TokenizerWrapper)
    except InputError as error:
        assert str(folder) in line_of(error)


def test_an_unknown_end_in_generation_config(base, tmp_path):
    folder = spoilt(base, tmp_path / "model", "generation_config.json", eos_token_id="two")
    said = refusal(ssmlx.load, str(folder))
    assert mentions(found_in(said), str(folder), "'two'", "eos_token_id")


DEEP = "[" * 100_000
LONG = "9" * 5000
LINES = {
    f'{{"prompt": {DEEP}': (),
    f'{{"prompt": "w1", "id": {LONG}}}': ("4300",),
    '{"prompt": "w1"': ("','", "16"),
    "w1 w2": ("1",),
    "null": ("null",),
    "[1, 2]": ("[1, 2]",),
    '"w1"': ('"w1"',),
    '{"prompt": "w1", "completion": "w2", "prompt": "w3"}': ("prompt",),
    '{"messages": [{"role": "user", "role": "user", "content": "w1"}]}': ("role",),
    "{}": (),
    '{"promt": "w1", "answer": "w2"}': ("promt", "answer"),
    '{"messages": {"role": "user"}}': ("messages", '{"role": "user"}'),
    '{"messages": null}': ("messages", "null"),
    '{"messages": []}': ("messages",),
    '{"messages": [null]}': ("messages[0]", "null"),
    '{"messages": [["user", "w1"]]}': ("messages[0]",),
    '{"messages": [{"content": "w1"}, {"role": "assistant", "content": "w2"}]}': (
        "messages[0].role",
    ),
    '{"messages": [{"role": 5, "content": "w1"}]}': ("messages[0].role", "5"),
    '{"messages": [{"role": "user"}, {"role": "assistant", "content": "w2"}]}': (
        "messages[0].content",
    ),
    '{"messages": [{"role": "user", "content": 5}]}': ("messages[0].content", "5"),
}  # fmt: skip
"""What is neither a prompt nor an example, and what is named of it."""
PYTHONS_WORDS = ("None", "True", "dict", "NoneType", "attribute", "object has", "sequence", "str",
                 "int", "TextEncodeInput", "subscript", "iterable", "Traceback")  # fmt: skip


def bad_line(read, path, line):
    """What is said to be wrong with the third line of a file."""
    path.write_text(f'{{"prompt": "w1", "completion": "w2"}}\n\n{line}\n')
    said = refusal(read, path)
    assert mentions(said, str(path), "3") and len(said) < 500
    of_python = [word for word in PYTHONS_WORDS if re.search(rf"\b{word}\b", said)]
    assert not of_python, said
    return found_in(said).removeprefix(str(path))


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_neither_a_prompt_nor_an_example(line, tmp_path):
    path = tmp_path / "lines.jsonl"
    encoder = Encoder(make_tokenizer(), "{prompt}", None, 64)
    for read in (read_prompts, lambda path: read_examples(path, encoder)):
        assert mentions(bad_line(read, path, line), *LINES[line])


TEXTS = {one: one for one in ("null", "5", "[1]", '{"a": 1}', "true", "NaN")}
TEXTS |= {f"[{'9' * 400}]": "[999", r'"a\ud800"': r"'\ud800'"}


@pytest.mark.parametrize("value", TEXTS, ids=range(len(TEXTS)))
def test_where_a_text_belongs_a_line_has_one(value, tmp_path):
    path = tmp_path / "lines.jsonl"
    encoder = Encoder(make_tokenizer(), "{prompt}", None, 64)

    def read(path):
        return read_examples(path, encoder)

    for line, name in (
        (f'{{"prompt": {value}, "completion": "w1"}}', "prompt"),
        (f'{{"prompt": "w1", "completion": {value}}}', "completion"),
        (f'{{"text": {value}}}', "text"),
    ):
        said = bad_line(read, path, line)
        assert mentions(said, name) and TEXTS[value] in said
    for blank in ('""', '" "'):
        for line in (f'{{"prompt": {blank}, "completion": "w1"}}', f'{{"text": {blank}}}'):
            assert blank in bad_line(read, path, line)
        bad_line(read_prompts, path, f'{{"prompt": {blank}}}')
    assert mentions(bad_line(read, path, '{"completion": "w1"}'), "prompt")
    assert mentions(bad_line(read_prompts, path, f'{{"prompt": {value}}}'), "prompt")
    turns = f'[{{"role": "user", "content": "w1"}}, {{"role": "assistant", "content": {value}}}]'
    bad_line(read, path, f'{{"messages": {turns}}}')


@pytest.mark.parametrize(
    "tokens", ["[1e400]", "[1.5]", '["1"]', f"[{2**40}]", "5", "[null]", "[true]", "[-1]", "[]"]
)
def test_token_ids_that_are_none(tokens, tmp_path):
    path = tmp_path / "lines.jsonl"
    encoder = Encoder(make_tokenizer(), "{prompt}", None, 64)
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        line = f'{{"{other}_tokens": [1], "{name}_tokens": {tokens}}}'
        said = bad_line(lambda path: read_examples(path, encoder), path, line)
        assert tokens == "[]" or mentions(said, f"{name}_tokens")


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    for content in (b'{"prompt": "w1"}\n\n{"prompt": "\xe9"}\n', b"\n\n\xff\xfe{\x00"):
        path.write_bytes(content)
        assert mentions(refusal(read_prompts, path), str(path), "3")


def test_files_of_other_systems_are_read(tmp_path):
    """With a byte-order mark, also inside where files were put together, and CR and LF."""
    path = tmp_path / "lines.jsonl"
    row = b'\xef\xbb\xbf{"prompt": "w1", "completion": "w2", "id": 1}\r\n'
    path.write_bytes(row + b"\r\n" + row)
    assert [one["prompt"] for one in read_prompts(path)] == ["w1", "w1"]
    assert len(read_examples(path, Encoder(make_tokenizer(), "{prompt}", None, 64))) == 2


def test_rows_that_are_cut_or_left_out_are_counted(tmp_path, caplog):
    path = tmp_path / "train.jsonl"
    encoder = Encoder(make_tokenizer(), "{prompt}", 2, 6)
    rows = [("w1", "w2"), ("w1", words(9)), (words(3), words(5)), (words(6), "w2"), ("w3", "w4 w5")]
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in rows))
    with caplog.at_level("INFO", "ssmlx"):
        examples = read_examples(path, encoder)
    assert [len(one.tokens) for one in examples] == [3, 6, 6, 4]
    cut, left_out = caplog.messages
    assert mentions(cut, str(path), "2", "5", "6") and mentions(left_out, str(path), "1", "5", "6")
    caplog.clear()
    path.write_text(json.dumps({"prompt": "w1", "completion": "w2"}))
    read_examples(path, encoder)
    assert not caplog.messages
    path.write_text(json.dumps({"prompt": words(8), "completion": "w2"}))
    assert "--max-length" in refusal(read_examples, path, encoder)
    path.write_text("\n")
    assert str(path) in refusal(read_examples, path, encoder)


def test_a_byte_order_mark_is_none_of_the_text(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "w1"}\n')
    assert read_prompts(path) == [{"prompt": "w1"}]
    assert read_json(path, "an object") == {"prompt": "w1"}


def test_prompts_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "w1"}\n',))
    writer.start()
    assert read_prompts(pipe) == [{"prompt": "w1"}]
    writer.join()


def test_what_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / ("a" * 300)):
        assert str(path) in refusal(read_prompts, path)


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Full())
    assert run_command(lambda: print("answer"), "prog") == 2
    one_line(capsys.readouterr().err, "prog")


def test_streams_that_a_shell_closed(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert (
        run_command(lambda: sys.stdin.read() + print("a") if sys.stdin.isatty() else None, "prog")
        == 0
    )
    assert sys.stdout is None


@pytest.mark.slow
@pytest.mark.parametrize("fd", [0, 1, 2])
def test_commands_do_without_a_stream(fd, base):
    arguments = ("ssmlx.chat", "--model", str(base), "--max-tokens", "2")
    done = run_module(*arguments, stdin="w1\n", preexec_fn=lambda: os.close(fd))
    assert done.returncode == 0 and "Traceback" not in done.stderr


HUGE = 10**11
FAR = 10**400
ABSURD = {
    "--temp": [{"temp": 1e-300}, {"temp": float("inf")}, {"temp": 1e300}, {"temp": FAR}],
    "--penalty repetition": [{"repetition_penalty": 1e300}, {"repetition_penalty": 0.0}],
    "--penalty presence": [{"presence_penalty": float("inf")}],
    "--penalty frequency": [{"frequency_penalty": -1e9}],
    "--penalty context": [
        {"repetition_penalty": 1.2, "repetition_context_size": HUGE},
        {"presence_penalty": 1.0, "presence_context_size": FAR},
        {"frequency_penalty": 1.0, "frequency_context_size": HUGE},
    ],
    "--logit-bias": [
        {"logit_bias": one} for one in ({1: float("inf")}, {1: 1e300}, {-1: 1.0}, {"3": 1.0})
    ],
    "--prefill-step-size": [{"prefill_step_size": HUGE}],
    "--seed": [{"seed": FAR}, {"seed": -1}],
    "--top-p": [{"top_p": 2.0}],
    "--min-p": [{"min_p": float("nan")}],
    "--top-k": [{"top_k": -1}],
}


@pytest.mark.parametrize("option", ABSURD)
def test_settings_without_measure_are_refused(option):
    for settings in ABSURD[option]:
        assert mentions(found_in(refusal(GenerateConfig, **settings)), *option.split()), settings


@pytest.mark.parametrize("name", ["num_streams", "lora_rank", "prune_rank", "stream_init_rank",
                                  "batch_size", "max_length", "epochs", "seed"])  # fmt: skip
def test_a_training_without_measure_is_refused(name):
    for value in (10**10, FAR):
        said = refusal(TrainConfig, **{name: value})
        assert mentions(said, f"--{name.replace('_', '-')}", str(value))


def test_a_long_answer_takes_no_memory_before_it_is_there(base):
    model, tokenizer = ssmlx.load(str(base))
    for most in (10**12, FAR):
        steps = ssmlx.stream_generate(model, tokenizer, "w1", max_tokens=most, top_k=most, temp=1.0)
        assert next(steps).generation_tokens == 1


def test_tokens_outside_the_vocabulary_are_refused(base):
    given = ssmlx.load(str(base))
    for prompt in ([99999], [1, -7, 2], [2**40]):
        said = refusal(ssmlx.generate, *given, prompt, stop=None)
        assert mentions(said, str(max(prompt, key=abs)))
    more = {"prompt_lookup": ssmlx.PromptLookupConfig(reference=(3, 10**7))}
    assert "10000000" in refusal(ssmlx.generate, *given, [1], drafter="prompt-lookup", **more)


def test_sizes_of_a_models_text_are_bounded_too(base, tmp_path):
    """Before any of it is built: a little more than there may be is refused as 10**12 is."""
    settings = json.loads((base / "config.json").read_text())
    folder = spoilt(base, tmp_path / "layers", text_config={**settings, "num_hidden_layers": 1001})
    assert "num_hidden_layers" in refusal(ssmlx.load, str(folder))


SIZES = {"num_streams": 1, "num_msa_layers": 1, "num_layers": 2, "hidden_size": 8}

ADAPTERS = [
    {"lora_scale": float("nan")}, {"lora_scale": float("inf")}, {"lora_scale": FAR},
    {"lora_scale": True}, {"lora_scale": None}, {"base": None}, {"base": []}, {"base": {}},
    {"num_streams": 10**9}, {"num_streams": FAR}, {"hidden_size": "wide"}, {"prompt_template": 5},
    {"rotation_step": float("nan")}, {"end_token_ids": [float("nan")]}, {"end_token_ids": 5},
    {"stream_init": ["low_rank"]}, {"adapter_scope": {}}, {"format": None}, {"task_lora_scale": 1},
    {"fused": "false"}, {"fused": None}, {"fused": 1},
]  # fmt: skip
BASES = [
    {"norm_probe": [float("nan")] * 32}, {"norm_probe": 5}, {"norm_probe": ["a"]},
    {"norm_probe": [FAR]}, {"num_layers": "four"}, {"vocab_size": 1e300}, {"hidden_size": None},
    {"vocab_size": True}, {"spare": 1},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ADAPTERS) + len(BASES)))
def test_settings_of_an_adapter_that_are_none(number, adapter, tmp_path):
    changes = [*ADAPTERS, *({"base": one} for one in BASES)][number]
    if number >= len(ADAPTERS):
        own = json.loads((adapter / "streams_config.json").read_text())["base"]
        changes = {"base": {**own, **changes["base"]}}
    folder = spoilt(adapter, tmp_path / "adapter", "streams_config.json", **changes)
    assert len(refusal(load_adapter, folder)) < 1200


@pytest.mark.parametrize("kind", ["nan", "int32", "bool", "scalar", "vector", "lm_head"])
def test_weights_of_an_adapter_that_are_none(kind, adapter, tmp_path):
    folder = spoilt(adapter, tmp_path / "adapter", "streams_config.json")
    tensors = mx.load(str(folder / LORA_FILE))
    name = next(iter(tensors))
    own = tensors.pop(name)
    name = name if kind != "lm_head" else "lm_head.lora_a"
    tensors[name] = {
        "nan": own * mx.nan,
        "int32": own.astype(mx.int32),
        "bool": own.astype(mx.bool_),
        "scalar": own[0, 0],
        "vector": own[0],
        "lm_head": own,
    }[kind]
    mx.save_safetensors(str(folder / LORA_FILE), tensors)
    name = name if kind != "lm_head" else "missing: lm_head.lora_b"
    assert name in refusal(load_adapter, folder)


@pytest.fixture
def loads_nothing(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("ssmlx.loading.load.load_weights", fail)


@pytest.mark.parametrize("option", ["--lora", "--heads", "--base", "--streams", "--out"])
def test_convert_sees_at_once_that_a_folder_is_missing(
    option, base, adapter, loads_nothing, capsys
):
    given = {"--lora": adapter, "--base": base, "--out": base.parent / "converted"}
    if option == "--heads":
        del given["--lora"]
    given[option] = "/dev/null/none" if option == "--out" else base.parent / "nowhere"
    arguments = [word for pair in given.items() for word in pair]
    assert str(given[option]) in exits(capsys, convert, *arguments)
    assert not (base.parent / "converted").exists()


def test_a_folder_has_one_run_at_a_time(tmp_path):
    out = tmp_path / "run"
    with locked_folder(out):
        assert str(out) in refusal(locked_folder(out).__enter__)
        (out / "state").touch()
    with locked_folder(out):
        pass
    with locked_folder(tmp_path / "other"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


HOLD = """
import sys, time
from pathlib import Path
from ssmlx.loading.files import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_killed_runs_lock_is_no_obstacle(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    assert str(tmp_path) in refusal(locked_folder(tmp_path).__enter__)
    process.kill()
    process.communicate()
    with locked_folder(tmp_path):
        pass


def test_what_differs_from_a_stopped_run_is_named(base, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "w1", "completion": "w2"}\n')
    given = ("--model", base, "--data", tmp_path / "data", "--num-msa-layers", 2, "--epochs", 1)
    given = [*map(str, given), "--out", str(tmp_path / "run"), "--lora-rank"]
    assert train.main([*given, "2"]) == 0
    run = str(tmp_path / "run")
    with locked_folder(tmp_path / "run"):
        assert run in exits(capsys, train.main, *given, "2")
    said = found_in(exits(capsys, train.main, *given, "3", "--seed", "1"))
    assert mentions(said, run, "--lora-rank", "2", "3", "--seed", "0", "1")
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "w1", "completion": "w3"}\n')
    said = found_in(exits(capsys, train.main, *given, "2"))
    assert run in said and not mentions(said, "--lora-rank")


@pytest.mark.parametrize("bad", [64, -7, "x", 1.5, 2**40, None])
def test_ids_are_the_models(loaded, bad):
    model, tokenizer = loaded
    cache = model.make_cache()
    list(ssmlx.stream_generate(model, tokenizer, [7, 8], max_tokens=3, cache=cache))
    context = [7, bad, *[9] * (cache.offset - 2)]
    for prompt, more in (([7], {"cache": cache, "context": context}), ([7, bad], {})):
        said = refusal(ssmlx.stream_generate, model, tokenizer, prompt, **more)
        assert str(bad) in found_in(said)


def test_settings_of_another_type_are_refused():
    bad = {"stop": 5, "logit_bias": [1], "tree": 7, "prune": "budget", "acceptance": "typical"}
    for name, value in {**bad, "prompt_lookup": None, "num_streams": "2"}.items():
        assert str(value) in found_in(refusal(GenerateConfig, **{name: value}))


def test_what_a_file_says_stays_on_its_line():
    error = InputError("a\nb\x1b[2J\r\ud800 é", expected="c", do="d")
    assert line_of(error) == r"a\nb\x1b[2J\r\ud800 é; expected c; d"
    said = refusal(StreamConfig, **{**SIZES, "num_streams": []})
    assert mentions(found_in(said), "num_streams", "[]")


@pytest.mark.parametrize("kind", [InputError, ContextLengthError, RequestError])
def test_a_refusal_goes_from_process_to_process(kind):
    made = {
        InputError: InputError("a\nb", expected="c", do="d"),
        ContextLengthError: ContextLengthError(9, 8),
        RequestError: RequestError("top_p", "top_p is 2", "1 or less"),
    }
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        read = pickle.loads(pickle.dumps(made[kind], protocol))
        assert type(read) is kind
        assert str(read) == str(made[kind])
        assert vars(read) == vars(made[kind])


def test_what_half_precision_cannot_hold_is_not_written(tmp_path):
    wide = {"a": mx.array([7e4]).astype(mx.float16)}
    said = refusal(write_tensors, tmp_path / "x", wide)
    assert mentions(found_in(said), "a", "x")


def test_heads_without_measure_are_refused():
    base = {"hidden_size": 8, "vocab_size": 9}
    assert "num_heads" in refusal(MedusaConfig, num_heads=10**9, num_layers=1, **base)
    assert "n_predict" in refusal(MlpSpeculatorConfig, n_predict=10**9, emb_dim=8, vocab_size=9)
    assert mentions(refusal(GenerateConfig, stop="a" * 10**6), "--stop")


class Failing:
    """An object that cannot be shown, as others' may be."""

    def __repr__(self):
        raise KeyError("no words")


def deep():
    made: list = []
    for _ in range(100_000):
        made = [made]
    return made


def circle():
    made: dict = {}
    made["own"] = made
    return made


ODD = {
    "keys of other types": ({(1, 2): 3, b"k": 4}, "{(1, 2): 3, b'k': 4}"),
    "a circle": (circle(), "{'own': {...}}"),
    "too deep": (deep(), "a value of type list"),
    "a number of too many digits": (10**5000, "a value of type int"),
    "an object that fails": (Failing(), "a value of type Failing"),
    "one of Python's own": ({1, 2}, '"{1, 2}"'),
    "one that fails inside": ([Failing()], "Failing"),
    "JSON": ({"a": [None, "é"]}, '{"a": [null, "é"]}'),
}


@pytest.mark.parametrize("kind", ODD)
def test_any_value_is_shown_in_a_message(kind):
    value, expected = ODD[kind]
    shown = found_in_json(value)
    assert expected in shown and len(shown) <= 80
    assert 0 < len(quoted(value)) <= 80


def test_messages_of_a_chat_may_be_anything(base):
    _, tokenizer = ssmlx.load(str(base))
    for content in (value for value, _ in ODD.values()):
        for turns in ([{"role": "user", "content": content}], [content], content):
            with pytest.raises(InputError):
                ssmlx.chat_tokens(tokenizer, turns)


@pytest.mark.parametrize("rank", ["x", "-1", "1.5", " 1", "٣", "9" * 5000])
def test_a_process_number_that_is_none_is_named_in_a_line(rank, monkeypatch, capsys):
    monkeypatch.setenv("MLX_RANK", rank)
    assert run_command(lambda: print("answer"), "prog") == 2
    out, err = capsys.readouterr()
    assert out == "" and mentions(one_line(err, "prog"), "MLX_RANK")


def test_an_empty_process_number_is_none(monkeypatch, capsys):
    monkeypatch.setenv("MLX_RANK", "")
    assert launched_group() is None
    assert run_command(lambda: print("answer"), "prog") == 0
    assert capsys.readouterr().out == "answer\n"
