"""Settings by name, and what `help` shows of the package."""

import inspect
import pydoc
import re
import sys
from collections import abc
from dataclasses import fields
from importlib import import_module

import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from refusals import found_in, mentions, refusal
from tiny import make_model, make_tokenizer

import ssmlx
from ssmlx import api
from ssmlx.commands import chat, decoding_options, generate, load_target, prompt_options
from ssmlx.commands.decoding_options import generate_config
from ssmlx.commands.parser import Parser
from ssmlx.commands.setting_options import option_fields
from ssmlx.drafters.option import own_settings, parse_drafter_option, shared_settings
from ssmlx.generation.plan import make_plan
from ssmlx.settings import (
    DRAFTERS,
    INSTEAD,
    WIRE_NAMES,
    AcceptanceConfig,
    Allowed,
    DrafterLoading,
    GenerateConfig,
    PruneConfig,
    TreeConfig,
    allowed_values,
    field_of_drafter_settings,
    key_of,
    setting_types,
    with_settings,
)


def test_a_setting_that_does_not_exist_is_named():
    model = make_model()
    tokenizer = make_tokenizer()
    for ask in (
        lambda **settings: make_plan(model, **settings),
        lambda **settings: ssmlx.stream_generate(model, tokenizer, [1], **settings),
        lambda **settings: ssmlx.generate(model, tokenizer, [1], **settings),
    ):
        assert mentions(refusal(ask, temperatur=3), "temperatur", "temperature")
        assert mentions(refusal(ask, max_new_tokens=3), "max_new_tokens", "max_tokens")
        assert mentions(found_in(refusal(ask, of_no_name=3)), "of_no_name")


def test_settings_have_the_names_of_requests_too():
    given = {"temperature": 0.5, "max_completion_tokens": 3, "top_k": 4}
    config = with_settings(GenerateConfig(stop="x"), given)
    assert config == GenerateConfig(temp=0.5, max_tokens=3, top_k=4, stop="x")
    said = refusal(with_settings, None, {"temp": 0.5, "temperature": 0.5})
    assert mentions(said, "temp", "temperature")


@pytest.mark.parametrize("name", INSTEAD)
def test_what_others_ask_for_is_refused_by_name_or_asks_for_nothing(name):
    assert with_settings(None, {name: None}) == GenerateConfig()
    assert mentions(found_in(refusal(with_settings, None, {name: 3})), name)


def test_no_argument_of_mlx_lm_is_an_error_of_python():
    """Each is one of `stream_generate`, a setting, or named in the table."""
    kinds = inspect.Parameter
    theirs = {
        one.name
        for function in (mlx_lm.generate, mlx_lm.stream_generate, generate_step)
        for one in inspect.signature(function).parameters.values()
        if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    own = {*inspect.signature(ssmlx.stream_generate).parameters, "verbose"}
    known = own | {one.name for one in fields(GenerateConfig)} | {*WIRE_NAMES, *INSTEAD}
    assert {"max_kv_size", "sampler", "prompt_cache"} <= theirs <= known


def test_the_types_of_settings_are_those_of_their_annotations():
    kinds = setting_types(GenerateConfig)
    assert kinds["max_tokens"] == (int, None, False) and kinds["temp"] == (float, None, True)
    assert kinds["stop"] == (str, abc.Sequence, False)
    assert kinds["logit_bias"] == (float, abc.Mapping, True)
    assert kinds["deterministic"] == (bool, None, False)


def test_one_is_no_choice_of_true_and_false():
    allowed = Allowed(choices=(False, True))
    assert allowed.holds(True) and not allowed.holds(1) and not allowed.holds(0.0)


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


PARTS = {"": GenerateConfig, "tree": TreeConfig, "prune": PruneConfig}
"""The settings classes whose fields have options, by the field of `GenerateConfig` for them."""
COMMANDS = {chat: [], generate: ["--prompt", "Hi"]}


def other_value(settings, one):
    """A value of a setting that is not its default: its words in a command, and the value."""
    allowed = allowed_values(settings, one)
    kind = setting_types(settings)[one.name]
    if kind.item is bool:
        return [], True
    if allowed is None:
        return {"stop": (["a\\n"], ("a\n",)), "logit_bias": (["3=1"], {3: 1.0})}[one.name]
    if allowed.choices:
        value = next(word for word in allowed.choices if word != one.default)
        return [value], value
    if kind.is_row:
        return ["3,2"], (3, 2)
    value = 2 if allowed.whole else 0.5
    return [str(value)], value


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", PARTS)
def test_an_option_gives_its_setting(command, part):
    """Whatever option is made of a field comes back into that field."""
    usual = [*COMMANDS[command], "--temp", "0.7", "--prune", "budget"]
    for name, one in option_fields(PARTS[part]).items():
        if one.metadata["needs"] == "--jsonl" and command is chat:
            continue
        words, value = other_value(PARTS[part], one)
        words = [*usual, f"--{name.replace('_', '-')}", *words]
        config = generate_config(command.parse_args(words))
        assert getattr(getattr(config, part) if part else config, one.name) == value, name


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_key_of_a_drafter_gives_its_setting(name):
    for kind, one in [*own_settings(name), *shared_settings()]:
        words, value = other_value(kind, one)
        typical = "" if one.name == "kind" else "acceptance=typical"  # epsilon and delta need it
        option = parse_drafter_option(f"{name} {key_of(one)}={words[0]} {typical}")
        config = GenerateConfig(temp=0.5, **option.generate_arguments())
        held = {
            DrafterLoading: option.loading,
            AcceptanceConfig: config.acceptance,
            GenerateConfig: config,
        }
        if kind not in held:
            held[kind] = getattr(config, field_of_drafter_settings(kind))
        assert getattr(held[kind], one.name) == value, one.name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_other_option_is_read(monkeypatch, command):
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", lambda parser, argv: parser)
        parser = command.parse_args(None)
    modules = (command, decoding_options, load_target, prompt_options)
    sources = "".join(inspect.getsource(module) for module in modules)
    settings = {name for kind in PARTS.values() for name in option_fields(kind)}
    others = {action.dest for action in parser._actions} - settings - {"help"}
    assert {"model", "prompt_cache", "template_args"} <= others
    for name in others - {"penalty", "drafter", "generation_config"}:
        assert re.search(rf"\bargs\.{name}\b", sources), name


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
