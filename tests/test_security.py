"""What came with a model is data: no code of it runs, whatever stands on standard input."""

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import tiny
from real import write_base, write_tiny_adapter
from refusals import exits, refusal

import ssmlx
from ssmlx import templates
from ssmlx.errors import InputError
from ssmlx.loading.hub import ALLOW_PATTERNS
from ssmlx.prompts import chat_tokens
from ssmlx.templates import TemplateBoundsError

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from mlx_lm.models.llama import Model, ModelArgs
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
"""
TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "custom.PreTrainedTokenizerFast"]}}
TOKENIZERS = {
    "tokenizer": ("tokenizer_config.json", TOKENIZER),
    "old tokenizer": ("tokenizer_config.json", {"auto_map": [None, "custom.Any"]}),
    "unknown tokenizer": ("tokenizer_config.json", {**TOKENIZER, "tokenizer_class": "MyWords"}),
}
WAYS = {**TOKENIZERS, "model": ("config.json", {"model_file": "custom.py"})}
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
    "convert.train": ("--data", "{data}", "--out", "{out}", "--model", "{evil}"),
    "convert.continuations": ("--prompts", "{prompts}", "--out", "{out}/a", "--model", "{evil}"),
    "convert.__main__": ("--lora", "{data}", "--out", "{out}", "--fuse", "--base", "{evil}"),
}  # fmt: skip


def spoil(folder, name, settings):
    """The model in `folder`, asking for code that leaves a file behind."""
    (folder / "custom.py").write_text(CODE)
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**values, **settings}))
    return folder


def leave_tokenizer_to_code(folder):
    """Have the words of a model in a file that only its own code reads, as Kimi K2 has."""
    (folder / "tokenizer.json").rename(folder / "tiktoken.model")


@pytest.fixture
def places(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.jsonl", "valid.jsonl", "prompts.jsonl"):
        (data / name).write_text('{"prompt": "w1 w2", "completion": "w3"}\n')
    prompts = data / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n')
    return {
        "evil": write_base(tmp_path / "evil"),
        "data": data,
        "out": tmp_path / "out",
        "prompts": prompts,
    }


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
    leave_tokenizer_to_code(places["evil"])
    arguments = [one.format(**places) for one in COMMANDS[command]]
    line = exits(capsys, import_module(command).main, *arguments)
    assert str(places["evil"]) in line
    assert not (places["evil"] / "ran").exists()
    assert stdin.read() == "y\n"


@pytest.mark.parametrize("model_type", ["llama", "xverse"])  # transformers lacks the latter
@pytest.mark.parametrize("way", TOKENIZERS)
def test_code_beside_a_whole_tokenizer_is_left_aside(way, model_type, places, stdin):
    evil = places["evil"]
    expected = ssmlx.generate(*ssmlx.load(str(evil)), "w1 w2", max_tokens=4)
    spoil(evil, *WAYS[way])
    spoil(evil, "config.json", {"model_type": model_type, **CLASSES})
    assert ssmlx.generate(*ssmlx.load(str(evil)), "w1 w2", max_tokens=4) == expected
    assert not (evil / "ran").exists() and not list(evil.rglob("*.pyc"))
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
    leave_tokenizer_to_code(draft)
    arguments = ["--model", str(base), "--prompt", "w1", "--drafter", f"draft-model model={draft}"]
    line = exits(capsys, import_module("ssmlx.commands.generate").main, *arguments)
    assert str(draft) in line
    assert not (draft / "ran").exists()


def test_no_code_is_downloaded():
    assert not [pattern for pattern in ALLOW_PATTERNS if "py" in pattern]


FAIR = """
{%- macro shown(m) %}{% set text %}{{ m.content|trim }}{% endset %}{{ text ~ ' | ' }}{% endmacro %}
{%- set ns = namespace(found=false, all=[]) %}
{%- for m in messages recursive %}
{%- if loop.first and m.role == 'system' %}{{ m.content }}{% continue %}{% endif %}
{%- set ns.all = ns.all + [m.role] %}
{{- '%s of %d: ' % (loop.index, loop.length) + m['role'].upper() }}
{%- if m.role == 'assistant' %}{% generation %}{{ shown(m) }}{% endgeneration %}
{%- elif loop.last %}{{ shown(m).replace('w', 'W') }}{% else %}{{ shown(m) }}{% endif %}
{%- endfor %}
{{- ns.all|join(' ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|tojson(indent=2) }}
{{- '{:>4}'.format(loops|default(2 * 3)) }} {{ [1, (2, 3), {'a': 4}] }}
{{- ' ' ~ '-' * 3 }} {{ 2 ** 5 % 7 }}"""
LONG = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "literal loops": "{% for a in [1, 2, 3] %}" * 19 + "{% endfor %}" * 19,
    "macros": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "calls": "{% macro m(n) %}{{ m(n-1) if n }}{{ m(n-1) if n }}{% endmacro %}{{ m(60) }}",
    "sums": "{{ ([range(99999)]*99999)|map('sum')|list }}",
    "sorts": "{% set l = range(99999)|list %}{{ ([l]*9)|map('sort')|list }}" * 99,
    "tests": "{% set l = range(9999)|list %}{% for i in range(99999) %}"
    "{{ ([l]*9)|select('eq', l+[1])|list }}{% endfor %}",
    "compares": "{% set x = range(99999)|list %}{% set y = x + [1] %}{{ ["
    + "x < y," * 9000
    + "] }}",
    "keys": "{% set k = (0,)*99999 %}{{ [" + "{1: 2}[k]," * 9000 + "] }}",
    "nested calls": "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
}
GROWS = (
    "{{% set n = namespace(a={}) %}}{{% for i in range(99) %}}{{% set n.a = {} %}}{{% endfor %}}"
)
LARGE = {
    "text": "{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}",
    "set": "{% set a %}{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "prompt": "{{ 'x' * 12000000 }}",
    "product": "{{ 'x' * 10**10 }}",
    "product of lists": "{{ 10**10 * [0] }}",
    "doubled": GROWS.format("'x'", "n.a + n.a"),
    "joined": GROWS.format("'x'", "n.a ~ n.a"),
    "escaped": "{% autoescape true %}"
    + GROWS.format("'<'", "n.a ~ '<' ~ n.a")
    + "{% endautoescape %}",
    "nested": GROWS.format("[0]", "[n.a, n.a]") + "{{ n.a }}",
    "nested objects": GROWS.format("[0]", "{'a': n.a, 'b': n.a}") + "{{ n.a|tojson }}",
    "nested keys": GROWS.format("(0,)", "(n.a, n.a)") + "{{ {n.a: 1} }}",
    "held": "{% macro m(n) %}{% set a = 'x' * 9999999 ~ n %}{{ m(n+1) }}{{ a }}{% endmacro %}"
    "{{ m(0) }}",
    "names": "".join(f"{{% set a{n} = 'x' * 9999999 %}}" for n in range(99)),
    "lists": "{{ [1]|batch(10**10, 0)|list }}",
    "width": "{{ 'x'|center(10**10) }}",
    "width by name": "{{ 'x'.zfill(10**10) }}",
    "format": "{{ '%9999999999d' % 1 }}",
    "format star": "{{ '%*d' % (10**10, 1) }}",
    "format braces": "{{ '{:{}}'.format(1, 10**10) }}",
    "format again": "{{ ('%(a)s' * 9999) % {'a': 'x' * 9999} }}",
    "join": "{{ ('x'*9999).join(range(9999)|map('string')) }}",
    "join filter": "{{ range(9999)|join('x'*9999) }}",
    "join items": "{{ ([['x'*9999]]*9999)|map('first')|join }}",
    "replace": "{{ ('x'*9999).replace('', 'y'*9999) }}",
    "indent": "{{ ('\n'*9999)|indent(9999) }}",
    "json": "{{ [[1]]|tojson(indent=10**10) }}",
    "sum": "{{ ([[1]*999]*99999)|sum(start=[]) }}",
    "letters": "{{ ('é'*9999999)|list }}",
    "strip": "{{ ('x'*9999999).strip('abcx'*99999) }}",
    "round": "{{ 2.5|round(10**9, 'floor') }}",
}
WRONG = {
    "include": ("{% include 'config.json' %}", ""),
    "import": ("{% import 'config.json' as c %}", ""),
    "no text": (5, ""),
    "a list": (["a"], ""),
    "broken": ("{{ ((", ""),
    "deep": ("{{ " + "(" * 3000, ""),
    "nested": ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, ""),
    "inner life": ("{{ messages.__class__.__mro__ }}", "__class__"),
    "absurd number": ("{{ " + "9" * 5000 + " }}", ""),
    "power": ("{{ 9 ** (9 ** 9) }}", ""),
    "product": (GROWS.format("3", "n.a * n.a"), ""),
    "source": ("{{ a }}" * 99999, "100,000"),
    "bytes": ("{{ 'x'.encode('punycode') }}", "encode"),
    "tags": ("{{ ('<!--'|safe).striptags() }}", "striptags"),
    "much said": ("{{ raise_exception('x ' * 9999) }}", "x x"),
}
TURNS = [
    {"role": "system", "content": "w1"}, {"role": "user", "content": " w2 w3"},
    {"role": "assistant", "content": "w4"}, {"role": "user", "content": "w5"},
]  # fmt: skip


@pytest.fixture
def words():
    return tiny.make_tokenizer(64)


def template_refusal(tokenizer, template, kind=InputError) -> str:
    tokenizer._tokenizer.chat_template = template
    tokenizer.has_chat_template = True
    return refusal(chat_tokens, tokenizer, TURNS, kind=kind)


def test_a_fair_template_says_what_transformers_says(words):
    words._tokenizer.chat_template = FAIR
    words.has_chat_template = True
    expected = words.apply_chat_template(TURNS, tokenize=False)
    with templates.bounded_rendering("these"):
        assert words.apply_chat_template(TURNS, tokenize=False) == expected
    assert expected.endswith("   6 [1, (2, 3), {'a': 4}] --- 4")
    assert chat_tokens(words, TURNS) == words.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("case", LONG)
def test_a_template_ends(case, words, monkeypatch):
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    template_refusal(words, LONG[case])


@pytest.mark.parametrize("case", LARGE)
def test_a_template_stays_small(case, words):
    assert "10,000,000" in template_refusal(words, LARGE[case], TemplateBoundsError)


@pytest.mark.parametrize("case", WRONG)
def test_a_template_that_is_none_is_refused(case, words):
    template, named = WRONG[case]
    line = template_refusal(words, template)
    assert named in line and len(line) < 1000


def test_a_namespace_does_not_show_what_it_holds(words):
    """Namespaces that hold each other would show each other without end."""
    names = [f"{{% set n{i + 1} = namespace(a=n{i}, b=n{i}) %}}" for i in range(60)]
    words._tokenizer.chat_template = "".join(names) + "{{ n60 }}"
    with templates.bounded_rendering("these"):
        assert words.apply_chat_template(TURNS, tokenize=False) == "<Namespace>"


def test_another_template_is_rendered_meanwhile(words, monkeypatch):
    monkeypatch.setattr(templates, "MAX_SECONDS", 1.0)
    fair = tiny.make_tokenizer(64)
    fair._tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    fair.has_chat_template = True
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(template_refusal, words, LONG["sums"], TemplateBoundsError)
        rendered = 0
        while not refused.done():
            chat_tokens(fair, TURNS)
            rendered += 1
    assert refused.result() and rendered > 20


def test_templates_rendered_by_others_keep_their_freedom(words, monkeypatch):
    words._tokenizer.chat_template = "{{ 'w1 ' * 100 }}"
    monkeypatch.setattr(templates, "MAX_CHARS", 200)
    words.apply_chat_template(TURNS)
    template_refusal(words, words.chat_template, TemplateBoundsError)
    words.apply_chat_template(TURNS)
