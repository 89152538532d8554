"""What came with a model is data: no code of it runs, whatever stands on standard input."""

import io
import json
import sys
from importlib import import_module

import pytest
from real import one_line, write_base, write_tiny_adapter

import ssmlx
from ssmlx.loading.names import ALLOW_PATTERNS

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from mlx_lm.models.llama import Model, ModelArgs
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
"""
TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "custom.PreTrainedTokenizerFast"]}}
WAYS = {
    "tokenizer": ("tokenizer_config.json", TOKENIZER),
    "old tokenizer": ("tokenizer_config.json", {"auto_map": [None, "custom.Any"]}),
    "unknown tokenizer": ("tokenizer_config.json", {**TOKENIZER, "tokenizer_class": "MyWords"}),
    "model": ("config.json", {"model_file": "custom.py"}),
}
CLASSES = {
    "auto_map": {
        "AutoConfig": "custom.LlamaConfig",
        "AutoModelForCausalLM": "custom.LlamaForCausalLM",
    }
}
COMMANDS = {
    "ssmlx.commands.chat": ("--model", "{evil}"),
    "ssmlx.commands.generate": ("--prompt", "w1", "--model", "{evil}"),
    "ssmlx.commands.train": ("--data", "{data}", "--out", "{out}", "--model", "{evil}"),
    "ssmlx.commands.calibrate": ("--out", "{out}", "--model", "{evil}"),
    "convert.train": ("--data", "{data}", "--out", "{out}", "--model", "{evil}"),
    "convert.train_draft": ("--data", "{data}", "--out", "{out}", "--model", "{evil}"),
    "convert.continuations": ("--prompts", "{prompts}", "--out", "{out}/a", "--model", "{evil}"),
    "convert.__main__": ("--lora", "{data}", "--out", "{out}", "--fuse", "--base", "{evil}"),
}  # fmt: skip


def spoil(folder, name, settings):
    """The model in `folder`, asking for code that leaves a file behind."""
    (folder / "custom.py").write_text(CODE)
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**values, **settings}))
    return folder


@pytest.fixture
def places(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.jsonl", "valid.jsonl", "prompts.jsonl"):
        (data / name).write_text('{"prompt": "w1 w2", "completion": "w3"}\n')
    prompts = data / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n')
    return {"evil": write_base(tmp_path / "evil"), "data": data, "out": tmp_path / "out",
            "prompts": prompts}  # fmt: skip


@pytest.fixture
def stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    return sys.stdin


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", COMMANDS)
def test_code_that_came_with_a_model_is_refused(command, way, places, stdin, capsys):
    if command.startswith("convert"):
        pytest.importorskip("torch")
    spoil(places["evil"], *WAYS[way])
    arguments = [one.format(**places) for one in COMMANDS[command]]
    assert import_module(command).main(arguments) == 2
    out, err = capsys.readouterr()
    line = one_line(err, err.partition(":")[0])
    assert out == "" and "asks to run code that came with the model" in line
    assert not (places["evil"] / "ran").exists()
    assert stdin.read() == "y\n"


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_classes_of_their_own_are_left_aside(name, places, stdin):
    """Phi-3 and others name code of theirs that mlx-lm and transformers have long had."""
    model = spoil(places["evil"], "config.json", CLASSES)
    adapter = write_tiny_adapter(places["out"], model) if name == "adapter" else None
    ssmlx.load(str(model), adapter=adapter)
    if name == "model":
        pytest.importorskip("torch")
        import_module("convert.base").load_base(model)
    assert not (model / "ran").exists()
    assert stdin.read() == "y\n"


def test_a_draft_models_code_is_refused_too(places, base, stdin, capsys):
    draft = spoil(places["evil"], *WAYS["tokenizer"])
    arguments = ["--model", str(base), "--prompt", "w1", "--drafter", f"draft-model model={draft}"]
    assert import_module("ssmlx.commands.generate").main(arguments) == 2
    assert "asks to run code" in capsys.readouterr().err
    assert not (draft / "ran").exists()


def test_no_code_is_downloaded():
    assert not [pattern for pattern in ALLOW_PATTERNS if "py" in pattern]
