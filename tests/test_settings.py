"""Settings by name, and what `help` shows of the package."""

import inspect
import pydoc
import re
import sys
from importlib import import_module

import pytest
from tiny import make_model, make_tokenizer

import ssmlx
from ssmlx import api
from ssmlx.commands import chat, decoding_options, generate, load_target
from ssmlx.commands.decoding_options import generate_config
from ssmlx.commands.parser import Parser
from ssmlx.generation.plan import make_plan


def test_a_setting_that_does_not_exist_is_named():
    model = make_model()
    tokenizer = make_tokenizer()
    for ask in (
        lambda **settings: make_plan(model, **settings),
        lambda **settings: ssmlx.stream_generate(model, tokenizer, [1], **settings),
        lambda **settings: ssmlx.generate(model, tokenizer, [1], **settings),
    ):
        with pytest.raises(TypeError, match="'temperatur'"):
            ask(temperatur=3)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_generate_is_a_function_whoever_imports_the_command(monkeypatch, is_loaded):
    """The command's module has the function's name; in either order, the function keeps it."""
    assert callable(ssmlx.generate)
    monkeypatch.delitem(sys.modules, "ssmlx.generate", raising=False)
    if not is_loaded:
        monkeypatch.delitem(vars(ssmlx), "generate")
    command = import_module("ssmlx.generate")
    assert command.main is generate.main
    assert ssmlx.generate is api.generate


SAMPLES = {
    "--decoding": ["speculative"],
    "--max-tokens": ["7"],
    "--stop": ["x"],
    "--temp": ["0.9"],
    "--generation-config": ["none"],
    "--top-p": ["0.5"],
    "--min-p": ["0.1"],
    "--top-k": ["5"],
    "--seed": ["3"],
    "--penalty": ["repetition=1.2"],
    "--deterministic": [],
    "--logit-bias": ["3=1"],
    "--logprobs": ["2"],
    "--drafter": ["streams"],
    "--num-streams": ["2"],
    "--tree": ["full"],
    "--tree-width": ["2"],
    "--tree-size": ["5"],
    "--prune": ["threshold=0.2"],
    "--prune-to": ["3"],
}
"""Options of decoding, each with a value that is not its default."""


@pytest.mark.parametrize("command", [chat, generate])
def test_every_option_is_read(monkeypatch, command):
    """An option of decoding changes the settings; any other is read as `args.NAME`."""
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", lambda parser, argv: parser)
        parser = command.parse_args(None)
    needed = ["--prompt", "Hi"] if command is generate else []
    usual = [*needed, "--temp", "0.7", "--prune", "budget"]
    modules = (command, decoding_options, load_target)
    sources = "".join(inspect.getsource(module) for module in modules)
    flags = [action.option_strings[-1] for action in parser._actions]
    assert {"--model", "--prompt-cache", "--tree-size"} <= {*flags}
    for flag in {*flags} - {"--help"}:
        if flag in SAMPLES:
            words = [*usual, flag, *SAMPLES[flag]]
            assert config_of(command, words) != config_of(command, usual), flag
        else:
            name = flag.removeprefix("--").replace("-", "_")
            assert re.search(rf"\bargs\.{name}\b", sources), flag


def config_of(command, words):
    return generate_config(command.parse_args(words))


def test_help_shows_what_there_is():
    text = pydoc.render_doc(ssmlx, renderer=pydoc.plaintext)
    assert set(dir(ssmlx)) == set(ssmlx.__all__)
    for name in set(ssmlx.__all__) - {"__version__"}:
        value = getattr(ssmlx, name)
        told = inspect.getdoc(value)
        assert told and told.splitlines()[0] in text, name
        head = f"class {name}(" if inspect.isclass(value) else f"\n    {name}("
        assert head in text, name
    for said in ("ssmlx.load(", "temp: 'float | None' = None"):
        assert said in text
