"""Every command that a document, a help text or a message names is there, and its options parse."""

import re

import pytest
from named_commands import (
    ROOT,
    SOURCES,
    NamedCommand,
    all_commands,
    commands_of_shell,
    options_of_source,
    parse,
    script_modules,
)

from perf.run.options import parse_systems_with_baselines
from ssmlx.commands.decoding_options import generate_config
from ssmlx.errors import InputError
from ssmlx.settings import SamplingConfig

COMMANDS = all_commands()


def check_values(command):
    """Check what a command makes of its options before it loads anything."""
    options = parse(command)
    if hasattr(options, "decoding"):
        generate_config(options)
    if command.module == "perf.compare" and options is not None:
        parse_systems_with_baselines(options.systems, SamplingConfig())


def test_options_parse():
    wrong = []
    for command in COMMANDS:
        try:
            check_values(command)
        except (ValueError, InputError, ImportError) as error:
            wrong.append(f"{command}: {error}")
    assert wrong == []


def test_commands_of_all_kinds_are_found():
    found = {(one.place, one.module, one.is_whole) for one in COMMANDS}
    assert {
        ("README.md", "ssmlx.chat", True),
        ("docs/apps.md", "ssmlx.caches", False),
        ("perf/README.md", "perf.compare", True),
        ("convert/README.md", "convert.train", True),
        ("examples/adapters/e2e/README.md", "convert.continuations", True),
        ("ssmlx/adapters/sql/README.md", "convert.train", True),
        ("ssmlx/commands/generate.py", "ssmlx.generate", True),
        ("ssmlx/commands/drafting.py", "ssmlx.adapt", False),
        ("ssmlx/loading/folders.py", "ssmlx.convert.base", False),
    } <= found
    assert len(COMMANDS) > 150


def test_options_that_texts_name_are_some_command_s():
    """Also alone, as in "give --adapter"; but for options of git, mlx-lm and mypy."""
    known = {"--adapter-path", "--save-path", "--porcelain", "--short", "--untracked-files"}
    known.add("--strict")
    for module in {one.module for one in COMMANDS}:
        parse(NamedCommand("", module), known)
    paths = [path for pattern in SOURCES for path in ROOT.glob(pattern)]
    named = {(path.name, option) for path in paths for option in options_of_source(path)}
    assert len(named) > 300
    assert sorted(one for one in named if one[1] not in known) == []


def test_a_wheel_has_what_its_texts_name():
    """A wheel has `ssmlx`, the converter as `ssmlx.convert`, and neither `perf` nor `examples`."""
    sources = [one for one in COMMANDS if re.match(r"(ssmlx|convert)/.*\.py", one.place)]
    assert len(sources) > 50
    assert [str(one) for one in sources if not one.module.startswith("ssmlx.")] == []


def test_documents_say_that_the_rest_needs_the_checkout():
    places = {
        one.place
        for one in COMMANDS
        if one.place.endswith(".md") and not one.module.startswith("ssmlx.")
    }
    texts = {place: (ROOT / place).read_text() for place in places}
    says = r"checkout|clone of this repository"
    assert sorted(place for place, text in texts.items() if not re.search(says, text)) == []


def test_scripts_are_there():
    modules = script_modules()
    assert len(modules) >= 10
    for name, module in modules.items():
        assert parse(NamedCommand("pyproject.toml", module, ("--help",), True)) is None, name


def test_extras_are_there():
    """Messages name extras by `pip install "ssmlx[...]"`, which a checkout's installation takes."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"(?m)^(\w+) = \[\"", text))
    named = set()
    for path in (*ROOT.glob("ssmlx/**/*.py"), *ROOT.glob("convert/**/*.py")):
        source = path.read_text()
        assert "pip install -e" not in source, path
        named |= set(re.findall(r"pip install .?ssmlx\[(\w+)\]", source))
    assert {"torch", "coreml"} <= named <= extras


@pytest.mark.parametrize(
    "words",
    [["--adaptor", "sql"], ["--prompt"], ["--prompt", "x", "--decoding", "slow"]],
    ids=" ".join,
)
def test_a_wrong_option_is_found(words):
    with pytest.raises(ValueError, match="generate"):
        parse(NamedCommand("x", "ssmlx.generate", tuple(words), True))


def test_a_module_that_is_no_command_is_found():
    with pytest.raises(ValueError, match="settings"):
        parse(NamedCommand("x", "ssmlx.settings", (), True))
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        parse(NamedCommand("x", "ssmlx.no_such", (), True))


def test_shell_is_read_as_bash_reads_it():
    text = """A='--x 1
  --y'
for k in 2 3; do
  python -m a $A --z "$k b" > out.txt && python -m b   # it's a comment
done"""
    found = [words for words in commands_of_shell(text, {}) if words[1:2] == ["-m"]]
    assert found == [
        ["python", "-m", "a", "--x", "1", "--y", "--z", "2 b"],
        ["python", "-m", "b"],
    ]
