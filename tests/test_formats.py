"""The forms in which families write calls: each is read as it was written, and its grammar writes
what its reader reads."""

# ruff: noqa: RUF001  (the bars of DeepSeek's marks are wide)

import json
import time
from enum import Enum
from typing import Annotated, Literal

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

from byte_tokenizers import NS, drawn, make_tokenizer, tokenizer_of
from llguidance import LLMatcher
from pydantic import BaseModel, Field
from refusals import refusal
from tiny import slow

from ssmlx.formats.answer_grammars import form_grammar, tool_call_grammar
from ssmlx.formats.arguments import ANYTHING, OfferedTools, allowed_types, argument_value
from ssmlx.formats.call_form import Call
from ssmlx.formats.channels import HARMONY
from ssmlx.formats.families import CALL_FORMS, find_format, message_end_ids
from ssmlx.formats.history import answer_turn, call_id, turns_for_template
from ssmlx.formats.reader import AnswerReader, Text, answer_begins
from ssmlx.rendering import has_unknown_calls

FORMS = [*CALL_FORMS, "harmony"]
SIGNS = {"laguna": None, "harmony": " ".join(HARMONY.signs)}


def raw(value):
    """A value between tags: a text as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_tags(head, before, after, foot=""):
    def call(name, arguments):
        inner = "".join(before.format(k) + raw(v) + after for k, v in arguments.items())
        return head.format(name) + inner + foot

    return call


def typed(before, after, kinds):
    def inner(arguments):
        return "".join(before.format(k, kinds(v)) + raw(v) + after for k, v in arguments.items())

    return inner


def gemma_value(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(one, quote) for one in value) + "]"
    return json.dumps(value)


def in_gemmas(quote):
    def call(name, arguments):
        inner = ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in arguments.items())
        return f"call:{name}{{{inner}}}"

    return call


def in_python(name, arguments):
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def in_json(name_key="name", arguments_key="arguments", **dumps):
    def call(name, arguments):
        return json.dumps({name_key: name, arguments_key: arguments}, **dumps)

    return call


def one_by_one(call, before, after):
    return lambda calls: "\n".join(before + call(*one) + after for one in calls)


def listed(call, before, after, between=", "):
    return lambda calls: before + between.join(call(*one) for one in calls) + after


def deepseek_types(value):
    return "true" if isinstance(value, str) else "false"


def kimi_types(value):
    names = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}
    return names.get(type(value), "number")


QWEN = in_tags("<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>")
GLM = one_by_one(
    in_tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
    "<tool_call>", "</tool_call>",
)  # fmt: skip


def in_m3s_tags(value):
    if isinstance(value, dict):
        return "".join(f"{NS}<{k}>{in_m3s_tags(v)}{NS}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{in_m3s_tags(one)}{NS}</item>" for one in value)
    return raw(value)


def in_m3(name, arguments):
    inner = "".join(f"{NS}<{k}>{in_m3s_tags(v)}{NS}</{k}>\n" for k, v in arguments.items())
    return f'{NS}<invoke name="{name}">\n{inner}{NS}</invoke>'


V32 = typed('<｜DSML｜parameter name="{}" string="{}">', "</｜DSML｜parameter>\n", deepseek_types)
K3 = typed(
    '<|open|>argument key="{}" type="{}"<|sep|>', "<|close|>argument<|sep|>", kimi_types
)  # fmt: skip


def in_dsml(name, arguments):
    return f'<｜DSML｜invoke name="{name}">\n{V32(arguments)}</｜DSML｜invoke>'


def in_kimi_k3(name, arguments):
    head = f'<|open|>call tool="{name}" index="1"<|sep|>'
    return f"{head}{K3(arguments)}<|close|>call<|sep|>"


WRITERS = {
    "deepseek_v4": listed(in_dsml, "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>", "\n"),
    "deepseek_v32": listed(
        in_dsml, "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>", "\n"
    ),
    "deepseek_v3": listed(
        lambda name, own: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(own)}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n",
    ),
    "deepseek_v31": listed(
        lambda name, own: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(own)}"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "",
    ),
    "step_3": listed(
        in_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">',
            '<steptml:parameter name="{}">', "</steptml:parameter>",
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "",
    ),
    "minimax_m3": listed(in_m3, f"{NS}<tool_call>\n", f"\n{NS}</tool_call>", "\n"),
    "minimax_m2": listed(
        in_tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>"),
        "<minimax:tool_call>\n", "\n</minimax:tool_call>", "\n",
    ),
    "seed_oss": one_by_one(
        in_tags("<function={}>\n", "<parameter={}>", "</parameter>\n", "</function>"),
        "<seed:tool_call>\n", "\n</seed:tool_call>",
    ),
    "muse_spark": listed(
        in_tags(
            '<atem:invoke name="{}">\n', '<atem:parameter name="{}">', "</atem:parameter>\n",
            "</atem:invoke>",
        ),
        "<atem:function_calls>\n", "\n</atem:function_calls>", "\n",
    ),
    "longcat": one_by_one(
        in_tags(
            "{}\n", "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
        ),
        "<longcat_tool_call>", "</longcat_tool_call>",
    ),
    "kimi_k2": listed(
        lambda name, own: f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(own)}<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "",
    ),
    "kimi_k3": listed(in_kimi_k3, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", ""),
    "gemma4": one_by_one(in_gemmas('<|"|>'), "<|tool_call>", "<tool_call|>"),
    "function_gemma": one_by_one(
        in_gemmas("<escape>"), "<start_function_call>", "<end_function_call>"
    ),
    "pythonic": listed(in_python, "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "apertus": listed(
        lambda name, own: json.dumps({name: own}), "<|tools_prefix|>[", "]<|tools_suffix|>"
    ),
    "mistral": listed(
        lambda name, own: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(own)}", "", "", ""
    ),
    "mistral_v3": listed(in_json(), "[TOOL_CALLS][", "]"),
    "command_a": listed(
        in_json("tool_name", "parameters"),
        "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", ",\n    ",
    ),
    "internlm": one_by_one(
        in_json("name", "parameters"), "<|action_start|><|plugin|>\n", "\n<|action_end|>"
    ),
    "nemotron": listed(in_json(), "<TOOLCALL>[", "]</TOOLCALL>"),
    "hunyuan": listed(in_json(), "<tool_calls>[", "]</tool_calls>"),
    "olmo3": listed(in_python, "<function_calls>\n", "\n</function_calls>", "\n"),
    "minicpm5": one_by_one(
        in_tags('<function name="{}">', '<param name="{}">', "</param>", "</function>"), "", ""
    ),
    "qwen3_coder": one_by_one(QWEN, "<tool_call>\n", "\n</tool_call>"),
    "glm47": GLM,
    "laguna": GLM,
    "phi4_mini": listed(in_json(), "<|tool_call|>[", "]<|/tool_call|>"),
    "granite": listed(in_json(), "<|tool_call|>[", "]"),
    "command_r": listed(
        in_json("tool_name", "parameters", indent=4), "Action: ```json\n[", "]\n```", ",\n"
    ),
    "json_tools": one_by_one(
        in_json(ensure_ascii=False), "<tool_call>\n", "\n</tool_call>"
    ),
    "llama": listed(in_json("name", "parameters"), "", "", "; "),
    "harmony": listed(
        lambda name, own: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(own)}<|call|>",
        "", "", "<|start|>assistant",
    ),
}  # fmt: skip
TEXTS = {
    "indentation": "    if x:\n        return 1\n",
    "line ends": "\n\na\r\n\n",
    "spaces": "  a  ",
    "quotes": '"a" \'b\' `c` \\n \\ """',
    "braces": "{a: [1, 2]}}, ]{",
    "less": "if a < b && c > d: <b>x</b> <",
    "unicode": "é 漢字 😀\u2028",
    "empty": "",
    "number": "01234",
    "integer": "10001",
    "true": "true",
    "none": "None",
    "tags": "</tool_call> <tool_call> </function> </invoke>\n[TOOL_CALLS] <think>",
    "JSON": '{"a": "b"}',
}
STRING = {"type": "string"}
VALUES = {
    "integer": (3, {"type": "integer"}),
    "number": (-1.5e3, {"type": "number"}),
    "true": (True, {"type": "boolean"}),
    "null": (None, {"anyOf": [STRING, {"type": "null"}]}),
    "nothing": (None, {"type": ["integer", "null"]}),
    "optional number": (7, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    "list": (["a", " b\n", 1], {"type": "array"}),
    "optional list": (["a"], {"anyOf": [{"type": "array"}, {"type": "null"}]}),
    "text or list": (["a"], {"anyOf": [STRING, {"type": "array", "items": STRING}]}),
    "object": ({"x": {"y": [True, None]}, "z": "{"}, {"type": "object"}),
    "untyped object": ({"x": 1}, {}),
    "enum": ("b c", {"enum": ["a", "b c"]}),
    "numbers and texts": (2, {"enum": ["2nd", 2]}),
    "referenced": ("12", {"$ref": "#/$defs/Code"}),
}
CODE = {"Code": STRING}
OPTIONAL = ({"anyOf": [STRING, {"type": "null"}]}, {"type": ["string", "null"]})
ALL = [
    *((f"text: {label}", text, STRING) for label, text in TEXTS.items()),
    *((f"optional: {label}", text, one) for label, text in TEXTS.items() for one in OPTIONAL),
    *((label, value, schema) for label, (value, schema) in VALUES.items()),
]


def tools_of(**properties):
    parameters = {"type": "object", "properties": properties, "$defs": CODE}
    return [{"type": "function", "function": {"name": "edit", "parameters": parameters}}]


def read(name, text, tools, size=None, *, is_cut=False, thought=None):
    """What a reader tells of a text that comes in pieces; neighbours of one kind joined."""
    format = find_format(tokenizer_of(name))
    assert format.name == ("glm47" if name == "laguna" else name)
    reader = AnswerReader(format, tools, answer_begins(format, ""))
    return read_in_pieces(reader, text, size, is_cut=is_cut)


def read_in_pieces(reader, text, size, *, is_cut=False):
    size = size or len(text) or 1
    found = [
        one for at in range(0, len(text), size) for one in reader.read(text[at : at + size])
    ] + reader.end(is_cut=is_cut)
    return joined(found)


def joined(pieces):
    said = []
    for one in pieces:
        last = said[-1] if said else None
        both = isinstance(one, Text) and isinstance(last, Text)
        if both and last.is_thought == one.is_thought:
            said[-1] = Text(last.text + one.text, one.is_thought)
        else:
            said.append(one)
    return said


def arguments_in(pieces):
    """The arguments of calls; nothing else was said."""
    assert all(isinstance(one, Call) for one in pieces), pieces
    return [(one.name, one.arguments) for one in pieces]


@pytest.mark.parametrize("name", FORMS)
def test_an_argument_is_what_was_written(name):
    for label, value, schema in ALL:
        tools = tools_of(old=schema, new=STRING)
        arguments = {"old": value, "new": " x\n"}
        text = WRITERS[name]([("edit", arguments)])
        for size in (1, None):
            found = read(name, text, tools, size)
            assert arguments_in(found) == [("edit", arguments)], (label, text, size)
            (call,) = found
            types = [type(one) for one in call.arguments.values()]
            assert types == [type(value), str], (label, text, size)


@pytest.mark.parametrize("name", FORMS)
def test_calls_stand_beside_text_and_each_other(name):
    tools = tools_of(old=STRING)
    two = [("edit", {"old": "a"}), ("edit", {"old": "b", "new": "{"})]
    text = WRITERS[name](two)
    for size in (1, 5, None):
        assert arguments_in(read(name, text, tools, size)) == two
    if name in ("harmony", "llama"):  # which say nothing before a call without a mark
        return
    for size in (1, 5, None):
        said, *calls = read(name, f"I edit <b.\n{text}", tools, size)
        assert said == Text("I edit <b.\n") and arguments_in(calls) == two


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_or_not_offered_is_text(name):
    tools = tools_of(old=STRING)
    text = WRITERS[name]([("edit", {"old": "abc"})])
    for size in (1, 7, None):
        whole = read(name, text, None, size)
        assert whole == [Text(text)] or (name == "harmony" and "abc" in whole[0].text)
        cut = text[: text.index("abc") + 2]
        (said,) = read(name, cut, tools, size, is_cut=True)
        assert isinstance(said, Text) and "ab" in said.text


A = ("edit", {"old": "a"})
B = ("edit", {"old": "b"})
CUTS = {
    "qwen3_coder": "<tool_call>\n<function=edit>\n<parameter=old>\na",
    "glm47": "<tool_call>edit\n<arg_key>old</arg_key>\n<arg_value>a</arg_value>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="old">a</parameter>',
    "json_tools": '<tool_call>\n{"name": "edit", "arguments": {"old": "a"}}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0"
    '<|tool_call_argument_begin|>{"old": "a"}',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{"old": "a"}',
    "gemma4": '<|tool_call>call:edit{old:<|"|>a<|"|>}',
    "pythonic": '<|tool_call_start|>[edit(old="a")]',
}


@pytest.mark.parametrize("name", CUTS)
def test_marks_may_be_missing_at_an_answers_end(name):
    found = read(name, CUTS[name], tools_of(old=STRING), 1)
    assert arguments_in(found) == [("edit", {"old": "a"})]


SEVERAL = ("mistral", "minimax_m2", "minimax_m3", "deepseek_v32", "seed_oss", "kimi_k2", "olmo3")


@pytest.mark.parametrize("name", SEVERAL)
def test_calls_before_one_that_is_cut_count(name):
    text = WRITERS[name]([A, ("edit", {"old": "long"})])
    text = text[: text.rindex("long") + 2]
    for size in (1, None):
        call, *said = read(name, text, tools_of(old=STRING), size, is_cut=True)
        assert call[:2] == A and "lo" in "".join(one.text for one in said)


def test_a_call_is_read_however_many_ends_its_arguments_hold():
    page = "<x></function>\n" * 300 + "A page" + "</tool_call>" * 300
    for name in ("json_tools", "qwen3_coder", "minimax_m2", "command_r"):
        value = page.replace("x", "</invoke>") + "```\n" * 200
        text = WRITERS[name]([("edit", {"old": value})])
        for size in (40, None):
            found = read(name, text, tools_of(old=STRING), size)
            assert arguments_in(found) == [("edit", {"old": value})]


ONE = "<function=edit>\n<parameter=old>\n{}\n</parameter>\n</function>\n"


@pytest.mark.parametrize(("name", "text", "wanted"), [
    ("qwen3_coder", "<tool_call>\n" + ONE.format("a") + ONE.format("b") + "</tool_call>", [A, B]),
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=old>\na\n</function>\n</tool_call>",
     [A]),
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=old>\na\n</function>\n"
     + ONE.format("b") + "</tool_call>", [A, B]),
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=old>\na\n<parameter=new>\nb\n"
     "</parameter>\n</function>\n</tool_call>", [("edit", {"old": "a", "new": "b"})]),
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=old>\na\n</parameter>\n</tool_call>",
     [A]),
    ("qwen3_coder", ONE.format("a") + "</tool_call>", [A]),
    ("qwen3_coder", ONE.format("a"), [A]),
    ("qwen3_coder", "<tool_call>\n<function=edit><parameter=old>a</parameter></function>"
     "</tool_call>", [A]),
    ("json_tools", '<tool_call>{"name": "edit", "parameters": {"old": "a"}}</tool_call>', [A]),
    ("json_tools", '<tool_call>{"name": "edit", "arguments": "{\\"old\\": \\"a\\"}"}</tool_call>',
     [A]),
    ("json_tools", '<tool_call>{"name": "edit", "arguments": {"old": "a\nb"}}</tool_call>',
     [("edit", {"old": "a\nb"})]),
    ("json_tools", '<tool_call>{"name": "edit"}</tool_call>', [("edit", {})]),
    ("json_tools", '<tool_call>{"function": {"name": "edit", "arguments": {"old": "a"}}}'
     "</tool_call>", [A]),
    ("json_tools", '<tool_call>[{"name": "edit", "arguments": {"old": "a"}}]', [A]),
    ("json_tools", "<tool_call>\n" + ONE.format("a") + "</tool_call>", [A]),
    ("glm47", '<tool_call>{"name": "edit", "arguments": {"old": "a"}}</tool_call>', [A]),
    ("glm47", '<tool_call>edit\n{"old": "a"}\n</tool_call>', [A]),
    ("glm47", "<tool_call>edit</tool_call>", [("edit", {})]),
    ("glm47", "<tool_call>edit<arg_key>old</arg_key><arg_value>a</arg_value></tool_call>", [A]),
    ("mistral", '[TOOL_CALLS] [{"name": "edit", "arguments": {"old": "a"}}]', [A]),
    ("mistral", '[TOOL_CALLS]edit[CALL_ID]abcdefghi[ARGS]{"old": "a"}', [A]),
    ("mistral", '[TOOL_CALLS]edit{"old": "a"}', [A]),
    ("mistral", '[TOOL_CALLS]edit[ARGS]{"old": "a"}edit[ARGS]{"old": "b"}', [A, B]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n"
     '{"old": "a"}\n```<｜tool▁call▁end｜>', [A]),
    ("kimi_k2", '<|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{"old": "a"}'
     "<|tool_call_end|>", [A]),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="edit"<|sep|><|open|>json type="object"'
     '<|sep|>{"old": "a"}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', [A]),
    ("json_tools", '<tool_call>{"name": "edit", "arguments": {"old": "a"}}}</tool_call>', [A]),
    ("json_tools", '<tool_call>{"name": "edit", "arguments": {"old": "a"}}\n<tool_call>'
     '{"name": "edit", "arguments": {"old": "b"}}</tool_call>', [A, B]),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="edit">{"old": "a"}'
     "</｜DSML｜invoke></｜DSML｜function_calls>", [A]),
    ("qwen3_coder", '<tool_call><function=edit>{"old": "a"}</function></tool_call>', [A]),
    ("pythonic", '<|tool_call_start|>[{"name": "edit", "arguments": {"old": "a"}}]'
     "<|tool_call_end|>", [A]),
    ("pythonic", '<|tool_call_start|>\n```python\nedit(old="a")\nedit(old="b")\n```\n'
     "<|tool_call_end|>", [A, B]),
    ("hunyuan", '<tool_calls>\n<tool_call>edit\n```json\n{"old": "a"}\n```</tool_call>\n'
     '<tool_call>edit\n```json\n{"old": "b"}\n```</tool_call>\n</tool_calls>', [A, B]),
    ("hunyuan", "<tool_calls>\n<tool_call>edit<tool_sep>\n<arg_key>old</arg_key>\n"
     "<arg_value>a</arg_value>\n</tool_call>\n</tool_calls>", [A]),
    ("llama", 'edit\n{"old": "a"}', [A]),
    ("llama", '{"name": "edit"}', [("edit", {})]),
    ("llama", '<|python_tag|>{"name": "edit", "parameters": null}', [("edit", {})]),
    ("gemma4", "<|tool_call>call:edit{old:see (this), new:b}<tool_call|>",
     [("edit", {"old": "see (this)", "new": "b"})]),
    ("minimax_m3", f'{NS}<tool_call>{NS}<invoke name="edit">{NS}<old>a{NS}</old>{NS}</invoke>'
     f"{NS}</tool_call>", [A]),
    ("phi4_mini", 'functools[{"name": "edit", "arguments": {"old": "a"}}]', [A]),
    ("llama", '<|python_tag|>{"name": "edit", "parameters": {"old": "a"}}', [A]),
    ("llama", '{"type": "function", "name": "edit", "parameters": {"old": "a"}}', [A]),
    ("llama", '[{"name": "edit", "arguments": {"old": "a"}}]', [A]),
    ("llama", '[edit(old="a"), edit(old="b")]', [A, B]),
    ("llama", '<|python_start|>[edit(old="a")]<|python_end|>', [A]),
    ("llama", '<|python_tag|>edit.call(old="a")', [A]),
    ("pythonic", "<|tool_call_start|>[edit(old='a\\'\\u00e9\\n')]<|tool_call_end|>",
     [("edit", {"old": "a'é\n"})]),
    ("gemma4", "<|tool_call>call:edit{old:a}<tool_call|>", [A]),
    ("gemma4", "<|tool_call>call:edit{old:10001}<tool_call|>", [("edit", {"old": "10001"})]),
    ("minicpm5", '<function name="edit"><param name="old"><![CDATA[a<\n]]></param></function>',
     [("edit", {"old": "a<\n"})]),
    ("minimax_m2", "<minimax:tool_call><invoke name=edit><parameter name='old'>a</parameter>"
     "</invoke></minimax:tool_call>", [A]),
    ("harmony", ' to=functions.edit<|channel|>commentary json<|message|>{"old": "a"}', [A]),
    ("harmony", '<|channel|>analysis to=functions.edit code<|message|>{"old": "a"}<|call|>', [A]),
    ("harmony", '<|channel|>commentary to=edit<|message|>{"old": "a"}', [A]),
    ("harmony", "<|channel|>commentary to=functions.edit<|message|>", [("edit", {})]),
])  # fmt: skip
def test_calls_that_are_nearly_right_are_read(name, text, wanted):
    for size in (1, 6, None):
        assert arguments_in(read(name, text, tools_of(old=STRING, new=STRING), size)) == wanted


@pytest.mark.parametrize(("name", "text"), [
    ("qwen3_coder", "Write <tool_call> so, and </tool_call>."),
    ("qwen3_coder", "A `<function=name>` opens it, `</function>` ends it."),
    ("qwen3_coder", "<function=other>\n<parameter=old>\na\n</parameter>\n</function>"),
    ("json_tools", '{"name": "edit", "arguments": {"old": "a"}}'),
    ("json_tools", "```\n<tool_call>\n{broken}\n</tool_call>\n```"),
    ("llama", '{"name": "other", "parameters": {"old": "a"}}'),
    ("llama", '{"name": "edit", "colour": "red"} is what I found'),
    ("llama", '{"name": "edit", "description": "Edits a file"}'),
    ("llama", '{"name": "edit", "parameters": {"old": "a"}} is a call'),
    ("llama", "[edit the file](a.md)"),
    ("llama", "edit\n{a} and {b}"),
    ("llama", '{"x": 1}'),
    ("glm47", "The <tool_call> tag"),
    ("minicpm5", 'A <function name="x"> tag'),
    ("harmony", "Red, to=you."),
    ("mistral", "[TOOL_CALLS] is a mark"),
])  # fmt: skip
def test_what_is_no_call_stays_text(name, text):
    for size in (1, 6, None):
        assert read(name, text, tools_of(old=STRING), size) == [Text(text)]


def test_marks_that_a_text_names_are_text():
    """Of thoughts amid a text, and of calls where no tools are offered."""
    format = find_format(make_tokenizer("<tool_call> <think> </think>"))
    for text, tools in (
        ("The `<think>` tag opens a thought, `</think>` ends it.", tools_of(old=STRING)),
        (f"```\n{WRITERS['json_tools']([A])}\n```", None),
    ):
        for size in (1, 99):
            reader = AnswerReader(format, tools)
            found = read_in_pieces(reader, text, size)
            assert found == [Text(text)]


def test_the_tool_of_command_r_that_does_nothing_says_nothing():
    text = WRITERS["command_r"]([("directly_answer", {})])
    assert read("command_r", f"{text}", tools_of(old=STRING), 3) == []


def test_the_forms_of_templates_with_names_are_known():
    both = make_tokenizer()
    templates = {"default": "{{ messages }}", "tool_use": "{# tools directly_answer #}"}
    templates = {"default": "{{ messages }}", "tool_use": "{# tools directly_answer #}"}
    both._tokenizer.chat_template = templates
    assert find_format(both).name == "command_r" and not has_unknown_calls(both)
    older, newer = make_tokenizer("[TOOL_CALLS]"), make_tokenizer("[TOOL_CALLS] [ARGS]")
    assert [find_format(one).name for one in (older, newer)] == ["mistral_v3", "mistral"]
    by_code = make_tokenizer("", ["｜DSML｜", "<｜tool▁calls▁begin｜>"])
    assert find_format(by_code).name == "deepseek_v32"
    on_others_vocabulary = make_tokenizer("<tool_call> tool_call.name", ["[TOOL_CALLS]"])
    assert find_format(on_others_vocabulary).name == "json_tools"


def test_tools_that_are_broken_are_refused():
    broken = {"type": "function", "function": {"description": "has no name"}}
    tokenizer = tokenizer_of("json_tools")
    tool_call_grammar(tokenizer, [*tools_of(old=STRING), broken], ["edit"], 1)
    for parameters in ("none", True, [3]):
        tools = [{"type": "function", "function": {"name": "edit", "parameters": parameters}}]
        assert "edit" in refusal(tool_call_grammar, tokenizer, tools, ["edit"], 1)


def test_a_call_after_a_mark_without_one_is_found():
    text = "Use <tool_call> so: " + WRITERS["json_tools"]([A])
    assert read("json_tools", text, tools_of(old=STRING), 3)[-1][:2] == A
    text = '<tool_call>{"a": "</tool_call> and ' + WRITERS["json_tools"]([A])
    assert read("json_tools", text, tools_of(old=STRING), 3)[-1][:2] == A


@pytest.mark.parametrize(("text", "wanted"), [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Red.",
     [Text("Hm.", True), Text("Red.")]),
    ("<|channel|>final<|message|> Red.\n<|return|>", [Text(" Red.\n")]),
    ("<|channel|>final Red is the answer.", [Text("Red is the answer.")]),
    ("<|channel|>analysis<|message|>Hm", [Text("Hm", True)]),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|message|>Red.",
     [Text("Hm.", True), Text("Red.")]),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.edit <|constrain|>json<|message|>{"old": "a"}<|call|>',
     [Text("I look."), Call(*A)]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Text("1 + 1", True)]),
    ("<|channel|>commentary to=functions.edit json<|message|>{broken<|call|>", [Text("{broken")]),
    ("<|channel|>anal", []),
])  # fmt: skip
def test_channels_are_told_apart(text, wanted):
    for size in (1, 3, 8, None):
        assert read("harmony", text, tools_of(old=STRING), size) == wanted


@pytest.mark.parametrize(("marks", "text"), [
    (("<think>", "</think>"), "<think>Hm.</think>\n\nRed."),
    (("[THINK]", "[/THINK]"), "[THINK]Hm.[/THINK]Red."),
    (("<seed:think>", "</seed:think>"), "<seed:think>Hm.</seed:think>Red."),
    (("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
     "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Red.<|END_RESPONSE|>"),
    (("<|inner_prefix|>", "<|inner_suffix|>"), "<|inner_prefix|>Hm.<|inner_suffix|>Red."),
    (("<think>", "</think>", "<answer>", "</answer>"),
     "<think>Hm.</think>\n<answer>Red.</answer>"),
])  # fmt: skip
@pytest.mark.parametrize("are_tokens", [False, True])
def test_thoughts_are_told_from_text(marks, text, are_tokens):
    told = {"tokens": marks} if are_tokens else {"template": " ".join(marks)}
    format = find_format(make_tokenizer(**told))
    for size in (1, 4, 99):
        reader = AnswerReader(format)
        assert read_in_pieces(reader, text, size) == [Text("Hm.", True), Text("Red.")]
    begun = AnswerReader(format, begins=answer_begins(format, f"assistant\n{marks[0]}\n"))
    assert joined(begun.read(text.removeprefix(marks[0]) + " "))[0] == Text("Hm.", True)
    assert answer_begins(format, "assistant\n") == "text"
    assert answer_begins(format, "", f"{marks[0]}I see") == "thought"
    assert answer_begins(format, "", f"{marks[0]}I see{marks[1]}So") == "text"


def test_a_call_in_a_thought_ends_it_and_what_is_none_stays_in_it():
    format = find_format(make_tokenizer("<tool_call> <think> </think>"))
    call = WRITERS["json_tools"]([A])
    for text, wanted in (
        (f"<think>Hm.{call}", [Text("Hm.", True), Call(*A)]),
        (f"<think>Hm.{call}</think>\nRed.", [Text("Hm.", True), Call(*A), Text("Red.")]),
        ("<think>A <tool_call> b</think>c", [Text("A <tool_call> b", True), Text("c")]),
    ):
        for size in (1, 99):
            reader = AnswerReader(format, tools_of(old=STRING))
            found = read_in_pieces(reader, text, size)
            assert found == wanted


def test_a_model_of_an_unknown_form_has_the_calls_of_every_other():
    unknown = make_tokenizer("no marks")
    assert has_unknown_calls(unknown) and not has_unknown_calls(tokenizer_of("llama"))
    assert "tool_choice" in refusal(tool_call_grammar, unknown, tools_of(old=STRING), ["edit"], 1)
    tools = tools_of(old=STRING)
    for name in CALL_FORMS:
        for size in (1, 99):
            text = WRITERS[name]([A])
            reader = AnswerReader(find_format(unknown), tools)
            found = read_in_pieces(reader, text, size)
            assert arguments_in(found) == [A], name


def test_text_is_told_at_once():
    reader = AnswerReader(find_format(tokenizer_of("json_tools")), tools_of(old=STRING))
    assert reader.read("I edit <to") == [Text("I edit ")]
    assert reader.read("o many") == [Text("<too many")]
    lone = AnswerReader(find_format(tokenizer_of("llama")), tools_of(old=STRING))
    assert lone.read('{"nam') == [] and lone.read('ed": 3') == [Text('{"named": 3')]


def test_no_answer_takes_long_to_read():
    tools = tools_of(old=STRING)
    for name, text in (
        ("json_tools", '<tool_call>{"a": "' + "</tool_call>" * 3000),
        ("json_tools", "<tool_call>" * 3000),
        ("json_tools", "<tool_call>" + "[" * 30_000),
        ("qwen3_coder", "<tool_call><function=edit><parameter=old>" + "<parameter=old>" * 3000),
        ("llama", "[" * 30_000),
        ("pythonic", "<|tool_call_start|>[edit(old=" + "[" * 30_000),
        ("gemma4", "<|tool_call>call:edit{old:" + "{a:" * 30_000),
        ("harmony", "<|start|>" * 3000),
    ):
        started = time.monotonic()
        read(name, text, tools, 50)
        assert time.monotonic() - started < 10, name


@pytest.mark.parametrize(("text", "schema", "wanted"), [
    ("5.0", {"type": "integer"}, 5), ("True", {"type": "boolean"}, True),
    ("None", {"type": ["integer", "null"]}, None), ("none", OPTIONAL[0], "none"),
    ("['a', 'b']", {"type": "array"}, ["a", "b"]), ("abc", {"type": "integer"}, "abc"),
    ("null", STRING, "null"), ("null", {}, "null"), ("5", None, "5"), ("5", {}, "5"),
    ("1", {"const": 1}, 1), ("null", {"type": "string", "nullable": True}, None),
    ("5", {"allOf": [{"type": "integer"}]}, 5), ("5", {"oneOf": [{"type": "integer"}]}, 5),
    ("9" * 5000, {"type": "integer"}, "9" * 5000),
])  # fmt: skip
def test_the_schema_decides_what_is_meant(text, schema, wanted):
    found = argument_value(text, schema)
    assert found == wanted and type(found) is type(wanted)


def test_schemas_that_are_none_or_refer_to_themselves_do_no_harm():
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 200}, "b": 3}}
    for schema in (None, 3, [], {"type": 3}, {"type": [3]}, {"anyOf": 3}, {"enum": 3}, loop,
                   {"$ref": 3}, {"$ref": "#/"}, {"properties": 3, "type": "no such"}):  # fmt: skip
        tools = OfferedTools([{"function": {"name": "f", "parameters": {"properties": schema}}}, 3])
        assert argument_value("a", tools.schema("f", "x")) == "a" == argument_value("a", schema)
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 200} for n in range(50)}
    assert allowed_types({"$ref": "#/$defs/d0", "$defs": chain}) == ANYTHING


class Colour(Enum):
    RED = "red"
    BLUE = "light blue"


class Point(BaseModel):
    x: bool
    colour: Colour


class Wanted(BaseModel):
    """What agents' tools take: schemas that refer to others, and values that may be null."""

    colour: Colour
    count: int | None
    note: Annotated[str, Field(max_length=4)] | None
    kind: Literal["a", "b c"]
    name: Annotated[str, Field(min_length=1, max_length=3)]
    ok: bool
    size: Annotated[int, Field(ge=1, le=2)]
    point: Point
    other: Colour | None = None
    points: Annotated[list[Point], Field(max_length=2)] | None = None


WANTED = {"name": "wanted", "parameters": Wanted.model_json_schema()}
OFTEN = ("json_tools", "qwen3_coder", "glm47", "mistral", "harmony")
WRITTEN = [*OFTEN, *slow(*[one for one in FORMS if one not in OFTEN])]
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("has_tokens", [True, *slow(False)])
def test_a_grammar_writes_calls_that_are_read(name, has_tokens):
    tokenizer = tokenizer_of(name, has_tokens=has_tokens)
    tools = [{"type": "function", "function": one} for one in (WANTED, NOW)]
    format = find_format(tokenizer)
    begins = "text"  # noise would never end a thought
    for seed in range(2):
        for names, most in ((("wanted",), 1), (("now",), 1), (("wanted", "now"), 3)):
            grammar = tool_call_grammar(tokenizer, tools, names, most)
            text = drawn(tokenizer, grammar, seed, '"<,}>/\n')
            reader = AnswerReader(format, tools, begins)
            found = [one for one in reader.read(text) + reader.end(is_cut=False)]
            calls = [one for one in found if isinstance(one, Call)]
            said = [one.text for one in found if isinstance(one, Text) and not one.is_thought]
            assert 1 <= len(calls) <= most and not "".join(said).strip(), text
            for call in calls:
                assert call.name in names, text
                kept = json.dumps(call.arguments)
                if call.name == "wanted":
                    Wanted.model_validate_json(kept, strict=True)
                else:
                    assert kept == "{}"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_grammar_takes_calls_as_models_write_them(name):
    """A text with `<` and line ends among the arguments."""
    from ssmlx.server.grammars import llguidance_tokenizer

    if name == "command_r":
        pytest.skip("its template writes JSON over several lines, the grammar in one")
    tokenizer = tokenizer_of(name, has_tokens=True)
    tools = tools_of(old=STRING)
    tools[0]["function"]["parameters"]["required"] = ["old"]
    begins = answer_begins(find_format(tokenizer), "")
    text = WRITERS[name]([("edit", {"old": "if a < b:\n    c > d"})])
    if name in ("olmo3", "pythonic"):
        text = text.replace("'", '"')
    grammar = tool_call_grammar(tokenizer, tools, ["edit"], 1, begins)
    matcher = LLMatcher(llguidance_tokenizer(tokenizer), grammar, log_level=0)
    ids = tokenizer.encode(text, add_special_tokens=False)
    taken = matcher.validate_tokens(ids)
    assert tokenizer.decode(ids[:taken]).strip() in text and taken >= len(ids) - 1, (
        tokenizer.decode(ids[:taken]),
        grammar,
    )


JSON_FORM = LLMatcher.grammar_from_json_schema({"const": 7})
CHOICE = 'start: "yes" | "no"'


def is_taken(tokenizer, grammar, text):
    """How much of a text a grammar takes, and whether it may end there."""
    from ssmlx.server.grammars import llguidance_tokenizer

    matcher = LLMatcher(llguidance_tokenizer(tokenizer), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    taken = matcher.validate_tokens(ids)
    matcher.consume_tokens(ids[:taken])
    return taken == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("are_tokens", [False, True])
def test_a_form_begins_after_a_free_thought(are_tokens):
    marks = ("<think>", "</think>")
    told = {"tokens": marks} if are_tokens else {"template": " ".join(marks)}
    tokenizer = make_tokenizer(**told)
    for form, text in ((JSON_FORM, "7"), (CHOICE, "yes")):
        assert form_grammar(form, tokenizer, "text") == form
        own = form_grammar(form, tokenizer, "thought")
        for said in (f"Hm {{.\n</think>\n\n{text}", f"</think>{text}"):
            assert is_taken(tokenizer, own, said), said
        for said in (text, f"Hm</think>so {text}", "Hm", f"Hm</think>{text}{text}"):
            assert not is_taken(tokenizer, own, said), said
    tokenizer = make_tokenizer("<tool_call>", marks)
    own = tool_call_grammar(tokenizer, tools_of(old=STRING), ["edit"], 1, "thought")
    call = '<tool_call>\n{"name": "edit", "arguments": {"old": "a"}}\n</tool_call>'
    assert is_taken(tokenizer, own, f"Hm.</think>\n\n{call}")
    assert not is_taken(tokenizer, own, call)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_form_is_the_final_channels(has_tokens):
    tokenizer = tokenizer_of("harmony", has_tokens=has_tokens)
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    own = form_grammar(CHOICE, tokenizer, "message")
    assert is_taken(tokenizer, own, f"{thought}{final}yes")
    assert is_taken(tokenizer, own, f"{final}no")
    assert not is_taken(tokenizer, own, "yes") and not is_taken(tokenizer, own, f"{thought}yes")
    assert form_grammar(CHOICE, tokenizer, "text") == CHOICE
    own = tool_call_grammar(tokenizer, tools_of(old=STRING), ["edit"], 1, "message")
    call = '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"old": "a"}'
    assert is_taken(tokenizer, own, call) and is_taken(tokenizer, own, thought + call)
    ids = message_end_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == (["<|call|>", "<|return|>"] * has_tokens)


def test_ids_are_as_every_template_takes_them():
    ids = {call_id(Call("f", {}, given)) for given in (None, "", "call_0", "0")}
    assert len(ids) == 4 and all(len(one) == 9 and one.isalnum() for one in ids)
    assert call_id(Call("f", {}, "abcDEF123")) == "abcDEF123"
    assert call_id(Call("f", {}, "functions.f:0")) == "functions.f:0"


def call_turn(*ids, **more):
    calls = [
        {**({"id": id} if id else {}), "type": "function",
         "function": {"name": "edit", "arguments": {}}} for id in ids
    ]  # fmt: skip
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def result(id):
    return {"role": "tool", "content": "done", **({"tool_call_id": id} if id else {})}


@pytest.mark.parametrize(("name", "is_right"), [
    ("mistral", lambda id: len(id) == 9 and id.isalnum()),
    ("kimi_k2", lambda id: id in ("functions.edit:0", "functions.edit:1")),
])  # fmt: skip
def test_ids_of_other_servers_become_the_templates_own_in_call_and_result(name, is_right):
    tokenizer = tokenizer_of(name)
    for first, second in (("call_abc", "toolu_01x"), ("a", "b"), (None, None)):
        turns = [call_turn(first, second), result(first), result(second)]
        found = turns_for_template(turns, tokenizer)
        ids = [one["id"] for one in found[0]["tool_calls"]]
        assert ids == [one["tool_call_id"] for one in found[1:]] and len({*ids}) == 2
        assert all(map(is_right, ids)) and turns[0]["tool_calls"][0].get("id") == first
    known = "functions.edit:1" if name == "kimi_k2" else "abcDEF123"
    (found, answer) = turns_for_template([call_turn(known), result(known)], tokenizer)
    assert found["tool_calls"][0]["id"] == known == answer["tool_call_id"]
    other = [call_turn("call_abc"), result("call_abc")]
    assert turns_for_template(other, tokenizer_of("json_tools")) == other


def test_harmonys_template_gets_thoughts_in_its_field():
    tokenizer = tokenizer_of("harmony")
    both = call_turn("a", "b", content="I look.", reasoning_content="Hm.")
    found = turns_for_template([both, result("b"), result("a")], tokenizer)
    assert (found[0]["thinking"], found[0]["content"]) == ("Hm.\n\nI look.", "")
    assert "reasoning_content" not in found[0] and len(found[0]["tool_calls"]) == 2
    said = {"role": "assistant", "content": "Red.", "reasoning_content": "Hm."}
    (found,) = turns_for_template([said], tokenizer)
    assert found == {"role": "assistant", "content": "Red.", "thinking": "Hm."}
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A"
    turn = answer_turn(text, find_format(tokenizer), "message")
    assert turn == {"role": "assistant", "content": "A", "reasoning_content": "Hm."}
    plain = answer_turn("<think>Hm</think>A", find_format(make_tokenizer("<think>")), "text")
    assert plain["content"] == "<think>Hm</think>A"
