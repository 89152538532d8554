"""Turns of every form, under templates of every kind: each word arrives, or its place is told."""

import json
from time import process_time

import pytest
from byte_tokenizers import make_tokenizer as make_byte_tokenizer
from byte_tokenizers import tokenizer_of
from mlx_lm.chat_templates import deepseek_v32
from refusals import found_in, line_of, mentions, refusal
from tiny import make_tokenizer

from ssmlx.formats.families import CALL_FORMS, find_format
from ssmlx.formats.history import turns_for_template, write_calls
from ssmlx.formats.reader import AnswerReader
from ssmlx.prompts import chat_tokens, find_tokens_between_turns
from ssmlx.rendering import find_template_form, offers_tools, render_turns
from ssmlx.templates import bounded_rendering
from ssmlx.turns import TurnError, find_answered_calls, normalise_turns

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = (  # as Llama Guard 3, SmolVLM and LLaVA-NeXT read them
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}",
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content']"
    "|selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{{ m['content'][0]['text'] }}{% endfor %}",
)
EITHER = (  # as Qwen2.5-VL and Gemma 3 read them
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content|trim }}"
    "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
MIXED = (  # the system's as a text, the others' as parts
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content + '' }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} SHOWN{% endfor %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Yes."}


@pytest.fixture
def shown():
    """The text of turns under a template, or under some by name."""
    tokenizer = make_tokenizer()

    def show(template, turns, **more):
        tokenizer._tokenizer.chat_template = template
        tokenizer.has_chat_template = True
        return render_turns(tokenizer, turns, **more)

    show.tokenizer = tokenizer
    return show


def calling(arguments, **more):
    function = {"name": "edit", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function, **more}
    result = {"role": "tool", "tool_call_id": "call12345", "content": "ok"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


@pytest.mark.parametrize("template", [CHATML, *PARTS, EITHER, MIXED])
def test_contents_arrive_whatever_form_they_have(template, shown):
    turns = [SYSTEM, USER, ASSISTANT, {**USER, "content": "And now?"}]
    wanted = "<system>Be brief.<user>Hi<assistant>Yes.<user>And now?"
    assert shown(template, turns) == wanted
    in_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in turns]
    assert shown(template, in_parts) == wanted
    kinds = {"user": "input_text", "assistant": "output_text", "system": "text"}
    in_parts = [
        {
            **one,
            "content": [{"type": kinds[one["role"]], "text": letter} for letter in one["content"]],
        }
        for one in turns
    ]
    if "[0]" not in template:
        assert shown(template, in_parts) == wanted
    result = {"role": "tool", "tool_call_id": "call12345", "content": "3"}
    assert shown(template, [USER, calling("{}")[1], result]).endswith("<tool>3")
    assert find_tokens_between_turns(shown.tokenizer).opening


def test_a_template_by_name_has_a_form_of_its_own(shown):
    by_name = {"default": CHATML, "tool_use": PARTS[0] + "{{ tools|length }}"}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {}}}]
    assert shown(by_name, [USER]) == "<user>Hi"
    assert shown(by_name, [USER], tools=tools) == "<user>Hi1"


OBJECT = '{"old": "a", "n": null}'
ARGUMENTS = {  # what a template does with them, and what it shows of OBJECT
    "c.function.arguments|items|list|length": "2",
    "c['function']['name'] + c['function']['arguments']": "edit" + OBJECT,
    "c.function.arguments": OBJECT,
    "c.function.arguments|tojson": OBJECT,
    "(c.function.arguments|tojson if c.function.arguments is mapping else 'text')": OBJECT,
    "c.function.arguments.old": "a",
}


@pytest.mark.parametrize("way", ARGUMENTS)
def test_arguments_are_objects_or_texts_as_the_template_reads_them(way, shown):
    template = CALL.replace("SHOWN", "{{ " + way + " }}")
    for arguments in (OBJECT, {"old": "a", "n": None}):
        found = shown(template, calling(arguments))
        assert found == f"<user>Hi<assistant><call>edit {ARGUMENTS[way]}<tool>ok"
    for nothing in ("{}", {}, "", None, "null", " \n"):
        if "old" not in way:
            found = shown(template, calling(nothing))
            assert found.count("ok") == 1 and "None" not in found and "null" not in found


def test_a_templates_code_gets_arguments_as_it_reads_them():
    def code(messages, tools=None, add_generation_prompt=True):
        return "".join(
            m["content"] + "".join(c["function"]["arguments"] for c in m.get("tool_calls", []))
            for m in messages
        )

    with bounded_rendering("these"):
        assert find_template_form(code).has_text_arguments


def test_older_and_custom_calls_are_calls(shown):
    template = CALL.replace("SHOWN", "{{ c.function.arguments|tojson }}")
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "edit", "arguments": "{}"},
    }
    turns = [USER, older, {"role": "function", "name": "edit", "content": "ok"}]
    assert shown(template, turns) == "<user>Hi<assistant><call>edit {}<tool>ok"
    custom = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [custom]}]
    assert shown(template, turns).endswith('<call>patch {"input": "*** x"}')


FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception("
    "'System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ALTERNATE = (  # as Llama 2, Mistral and Gemma
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "<system>{{ messages[0].content }}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NONE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>"
    "{{ m.content }}{% endif %}{% endfor %}"
)
DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'developer' %}"
    "<dev>{{ m.content }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
A = {"role": "system", "content": "A"}
B = {"role": "system", "content": "B"}
D = {"role": "developer", "content": "D"}


@pytest.mark.parametrize(("template", "turns", "wanted"), [
    (CHATML, [A, B, USER], "<system>A\n\nB<user>Hi"),
    (CHATML, [A, D, USER], "<system>A\n\nD<user>Hi"),
    (CHATML, [D, USER], "<system>D<user>Hi"),
    (CHATML, [A, USER, B, USER], "<system>A<user>Hi<system>B<user>Hi"),
    (CHATML, [USER, USER, ASSISTANT, ASSISTANT], "<user>Hi<user>Hi<assistant>Yes.<assistant>Yes."),
    (DEVELOPER, [D, USER], "<dev>D<user>Hi"),
    (DEVELOPER, [A, USER], "<user>A\n\nHi"),
    (FIRST, [A, B, D, USER], "<system>A\n\nB\n\nD<user>Hi"),
    (FIRST, [A, USER, B, USER], "<system>A<user>Hi\n\nB\n\nHi"),
    (FIRST, [A, USER, ASSISTANT, B], "<system>A<user>Hi<assistant>Yes.<user>B"),
    (ALTERNATE, [A, USER, USER, ASSISTANT, ASSISTANT, USER],
     "<system>A<user>Hi\n\nHi<assistant>Yes.\n\nYes.<user>Hi"),
    (ALTERNATE, [A, USER, ASSISTANT, B, USER], "<system>A<user>Hi<assistant>Yes.<user>B\n\nHi"),
    (NONE, [A, USER], "<user>A\n\nHi"),
    (SILENT, [A, B, USER], "<user>A\n\nB\n\nHi"),
])  # fmt: skip
def test_turns_that_a_template_refuses_or_drops_are_arranged_anew(template, turns, wanted, shown):
    assert shown(template, turns) == wanted


def test_what_a_template_leaves_out_in_every_arrangement_is_named(shown):
    assert mentions(found_in(refusal(shown, SILENT, calling("{}"))), "'tool'", "'ok'")
    turns = [USER, ASSISTANT, {**USER, "content": "And?"}]
    line = refusal(shown, "{{ messages[-1].content }}", turns)
    assert mentions(found_in(line), "'user'", "'Hi'")
    thinks = {**ASSISTANT, "content": "<think>Hm</think>Yes."}
    template = "{% for m in messages %}<{{ m.content.split('</think>')[-1]|upper }}>{% endfor %}"
    assert shown(template, [USER, thinks, USER]) == "<HI><YES.><HI>", "it is shown otherwise"


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TEXT = {"type": "text", "text": "See"}


def of_parts(*parts):
    return [{**USER, "content": [*parts]}]


def of_call(call):
    return [{**ASSISTANT, "tool_calls": [call]}]


WRONG = [
    (3, "messages", "3"),
    ("Hi", "messages", '"Hi"'),
    ([3], "messages[0]", "3"),
    ([{"content": "a"}], "messages[0].role", "null"),
    ([{"role": "", "content": "a"}], "messages[0].role", '""'),
    ([USER, {"role": "usr", "content": "a"}], "messages[1].role", "'usr'"),
    ([{**USER, "name": 3}], "messages[0].name", "3"),
    ([{"role": "user"}], "messages[0].content", "null"),
    ([{**USER, "content": 3}], "messages[0].content", "3"),
    (of_parts(TEXT, IMAGE), "messages[0].content[1]", "image"),
    (of_parts({"type": "input_image"}), "messages[0].content[0]", "image"),
    (of_parts({"type": "input_audio"}), "messages[0].content[0]", "audio"),
    (of_parts({"type": "video_url"}), "messages[0].content[0]", "video"),
    (of_parts({"type": "file"}), "messages[0].content[0]", "file"),
    (of_parts({"type": "refusal", "refusal": "a"}), "messages[0].content[0]", "refusal"),
    (of_parts({"type": "text", "text": 3}), "messages[0].content[0].text", "3"),
    (of_parts(3), "messages[0].content[0]", "3"),
    ([{**ASSISTANT, "reasoning_content": 3}], "messages[0].reasoning_content", "3"),
    ([{**ASSISTANT, "tool_calls": {}}], "messages[0].tool_calls", "{}"),
    (of_call(3), "messages[0].tool_calls[0]", "3"),
    (of_call({"function": {}}), "messages[0].tool_calls[0].function.name", "null"),
    *((calling(one), "messages[1].tool_calls[0].function.arguments", json.dumps(one))
      for one in ("[1]", "abc", 1, [1], True, '{"a": NaN', "{'a': 1}")),
]  # fmt: skip


@pytest.mark.parametrize(("turns", "place", "fault"), WRONG)
def test_what_is_wrong_with_a_turn_is_named_with_its_place(turns, place, fault, shown):
    shown(CHATML, [USER])
    with pytest.raises(TurnError) as refused:
        chat_tokens(shown.tokenizer, turns)
    assert refused.value.place == place
    assert mentions(found_in(line_of(refused.value)), place, fault)


@pytest.mark.parametrize(("turn", "said"), [
    ({"content": None, "reasoning_content": "Hm."}, "<assistant>"),
    ({"content": None}, "<assistant>"), ({}, "<assistant>"), ({"content": ""}, "<assistant>"),
    ({"content": []}, "<assistant>"), ({"content": "a", "tool_calls": None}, "<assistant>a"),
    ({"content": "a", "tool_calls": [], "name": None, "refusal": None}, "<assistant>a"),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "<assistant>No."),
    ({"content": None, "refusal": "No."}, "<assistant>No."),
    ({"content": [{"type": "thinking", "thinking": "Hm."}, TEXT]}, "<assistant>See"),
])  # fmt: skip
def test_an_assistants_turn_may_have_little(turn, said, shown):
    assert shown(CHATML, [USER, {"role": "assistant", **turn}, USER]) == f"<user>Hi{said}<user>Hi"


def test_a_role_of_the_templates_own_passes(shown):
    template = CHATML + "{# 'ipython' #}"
    assert shown(template, [USER, {"role": "ipython", "content": "3"}]) == "<user>Hi<ipython>3"


def test_what_is_given_stays_as_it_is():
    turns = calling('{"a": 1}')
    found = normalise_turns(turns)
    assert turns == calling('{"a": 1}') and normalise_turns(found) == found
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("template", [CHATML, *PARTS])
def test_a_last_turn_may_be_left_open(template, shown):
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    shown(template, [USER])
    turns = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Ye"}]}]
    found = shown(template, turns, continue_final_message=True)
    assert found == "<user>Hi<assistant>Ye"
    assert shown(template, turns[:1], add_generation_prompt=True) == "<user>Hi<assistant>"


def test_what_is_not_unicode_is_refused_wherever_it_stands(shown):
    shown(CALL.replace("SHOWN", "{{ c.function.arguments|tojson }}"), [USER])
    for turns in ([{**USER, "content": "a\ud800"}], calling({"old": "a\ud800"})):
        assert r"'\ud800'" in refusal(chat_tokens, shown.tokenizer, turns)


# Templates of models, without what these tests do not need.
LLAMA = (
    "{% if tools %}Environment: ipython {{ tools|tojson }}{% endif %}{% for m in messages %}"
    "{% if not (m.role == 'tool' or 'tool_calls' in m) %}<{{ m.role }}>{{ m.content }}"
    "{% elif 'tool_calls' in m %}{% if not m.tool_calls|length == 1 %}{{ raise_exception("
    "'This model only supports single tool-calls at once!') }}{% endif %}"
    "<assistant>{{ m.tool_calls[0].function.arguments|tojson }}"
    "{% else %}<ipython>{{ m.content|tojson }}{% endif %}{% endfor %}{# <|python_tag|> #}"
)
GPT_OSS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "<analysis>{{ m.content or m.thinking }}<call>{{ m.tool_calls[0].function.arguments|tojson }}"
    "{% elif m.role == 'assistant' %}<analysis>{{ m.thinking }}<final>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    "{# <|channel|> <|message|> #}"
)
LFM = (
    "{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% set content = m.content %}{% if content is not string %}{% set content = content|tojson %}"
    "{% endif %}{{ content }}{% endfor %}{# <|tool_list_start|> #}"
)
SMOL = (
    "{% if xml_tools is defined %}<tools>{% for t in xml_tools %}{{ t|string }}{% endfor %}</tools>"
    "<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.content is string else '' }}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none"
    " %}{{ '<system>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' }}{% else %}"
    "{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}{# <|/tool_call|> #}"
)
MAGISTRAL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'thinking' %}"
    "{{ '[THINK]' + p.thinking + '[/THINK]' }}{% else %}{{ raise_exception('Only text') }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
FUNCTION_GEMMA = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if 'name' not in m %}{{ raise_exception("
    "'a name must be provided') }}{% endif %}<response:{{ m.name }}>{{ m.content }}{% else %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<call:{{ c.function.name }}>"
    "{% endfor %}{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}]


def call_of(name, id=None, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if id is None else {"id": id, **call}


def result_of(content, id=None):
    turn = {"role": "tool", "content": content}
    return turn if id is None else {**turn, "tool_call_id": id}


def calls_of(*calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_arrives_whatever_it_is_called(name, shown):
    turn = {**ASSISTANT, name: "Hm."}
    assert shown(THOUGHT, [USER, turn, USER]) == "<user>|Hi<assistant>Hm.|Yes.<user>|Hi"
    own = normalise_turns([turn])[0]
    assert own == {**ASSISTANT, "reasoning_content": "Hm."}
    assert normalise_turns([{"reasoning_content": "", **turn}]) == [own]
    shown.tokenizer._chat_template = lambda messages, **more: "".join(
        m.get("reasoning_content", "") + m["content"] for m in messages
    )
    assert render_turns(shown.tokenizer, [USER, turn]) == "HiHm.Yes."
    calling = {**calls_of(call_of("edit", "a"), content="I look."), name: "Hm."}
    (own,) = turns_for_template(normalise_turns([calling]), tokenizer_of("harmony"))
    assert (own["thinking"], own["content"]) == ("Hm.\n\nI look.", "")


def test_a_thought_may_be_parts_of_a_part(shown):
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": one} for one in "Hm"]}]
    turn = {"role": "assistant", "content": [*parts, TEXT]}
    assert shown(THOUGHT, [USER, turn]) == "<user>|Hi<assistant>Hm|See"
    (own,) = normalise_turns([{**turn, "content": [{"type": "reasoning", "text": "Hm"}]}])
    assert (own["reasoning_content"], own["content"]) == ("Hm", "")


def test_thoughts_are_parts_where_the_template_takes_them_so(shown):
    think = {"type": "thinking", "thinking": "A draft"}
    system = {"role": "system", "content": [{"type": "text", "text": "First "}, think, TEXT]}
    turn = {**ASSISTANT, "reasoning_content": "Hm."}
    wanted = "<user>Hi<assistant>[THINK]Hm.[/THINK]Yes.<user>Hi"
    assert shown(MAGISTRAL, [USER, turn, USER]) == wanted
    found = shown(MAGISTRAL, [system, USER])
    assert found == "<system>First [THINK]A draft[/THINK]See<user>Hi"
    alone = {"role": "assistant", "content": None, "reasoning": "Hm."}
    assert shown(MAGISTRAL, [USER, alone]).endswith("<assistant>[THINK]Hm.[/THINK]")
    for template in (CHATML, LFM, EITHER, *PARTS):
        with bounded_rendering("these"):
            assert not find_template_form(template).has_thought_parts


@pytest.mark.parametrize(("template", "written"), [
    (LFM, '<|tool_call_start|>[edit(old="a", n=3)]<|tool_call_end|>'),
    (SMOL, '<tool_call>\n{"name": "edit", "arguments": {"old": "a", "n": 3}}\n</tool_call>'),
    (PHI, '<|tool_call|>[{"name": "edit", "arguments": {"old": "a", "n": 3}}]<|/tool_call|>'),
    (CHATML, '<tool_call>\n{"name": "edit", "arguments": {"old": "a", "n": 3}}\n</tool_call>'),
])  # fmt: skip
def test_calls_that_a_template_does_not_show_are_written(template, written, shown):
    turns = [USER, calls_of(call_of("edit", "a", old="a", n=3)), result_of("4", "a"), USER]
    assert shown(template, turns) == f"<user>Hi<assistant>{written}<tool>4<user>Hi"
    turns[1] = {**turns[1], "content": "I look."}
    wanted = f"<user>Hi<assistant>I look.\n{written}<tool>4<user>Hi"
    assert shown(template, turns) == wanted
    if template != CHATML:  # the form is told by the template that tools are put under
        assert shown({"default": CHATML, "tool_use": template}, turns) == wanted


@pytest.mark.parametrize("name", CALL_FORMS)
def test_written_calls_are_read_as_they_were(name):
    arguments = {"old": 'a\n  "b" \\', "zip": "10001", "n": 3, "all": [1, {"x": None}], "on": True}
    types = {"old": "string", "zip": "string", "n": "number", "all": "array", "on": "boolean"}
    properties = {key: {"type": kind} for key, kind in types.items()}
    tools = [
        {"name": "edit", "parameters": {"type": "object", "properties": properties}},
        {"name": "look", "parameters": {"type": "object", "properties": {}}},
    ]
    format = find_format(tokenizer_of(name))
    for calls in ([("edit", arguments)], [("edit", arguments), ("look", {}), ("edit", arguments)]):
        given = [call_of(tool, **its) for tool, its in calls]
        reader = AnswerReader(format, tools)
        text = write_calls(given, format)
        pieces = [*reader.read(text), *reader.end(is_cut=False)]
        read = [(one.name, one.arguments) for one in pieces if hasattr(one, "arguments")]
        assert read == calls, text
        assert not "".join(getattr(one, "text", "") for one in pieces).strip()


@pytest.mark.parametrize(("template", "wanted"), [
    (PHI, '<system><|tool|>[{"name": "edit", "parameters": {"type": "object"}}]<|/tool|><user>Hi'),
    (SMOL, "<tools>" + str(TOOLS[0]) + "</tools><tool_call><user>Hi"),
    (LFM, json.dumps(TOOLS) + "<user>Hi"),
])  # fmt: skip
def test_tools_stand_where_the_template_reads_them(template, wanted, shown):
    assert shown(template, [USER], tools=TOOLS) == wanted
    assert offers_tools(shown.tokenizer)
    if template == PHI:
        found = shown(template, [SYSTEM, USER], tools=TOOLS)
        assert found.startswith("<system>Be brief.<|tool|>[{")


def test_tools_that_a_template_only_shows_in_a_systems_turn_get_one(shown):
    shown(CHATML, [USER])
    shown.tokenizer._chat_template = deepseek_v32.apply_chat_template
    assert '"name": "edit"' in render_turns(shown.tokenizer, [USER], tools=TOOLS)
    assert "edit" not in render_turns(shown.tokenizer, [USER])


@pytest.mark.parametrize("template", [
    CHATML + "{# tools #}", {"default": CHATML, "rag": CHATML + "{{ tools }}"}, PARTS[0], FIRST,
])  # fmt: skip
def test_tools_that_a_template_does_nothing_with_are_refused(template, shown):
    with pytest.raises(TurnError) as told:
        shown(template, [USER], tools=TOOLS)
    assert told.value.place == "tools" and not offers_tools(shown.tokenizer)


def find(city: str) -> str:
    """Finds.

    Args:
        city: where.
    """
    return city


def test_functions_are_tools_wherever_these_stand(shown):
    for template in (PHI, SMOL, LFM):
        found = shown(template, [USER], tools=[find])
        assert "Finds." in found and "where." in found


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("default", ["is defined and enable_thinking", "is not defined"])
def test_thinking_is_on_or_off_as_the_template_has_it(tokens, default):
    tokenizer = make_byte_tokenizer(tokens=tokens)
    tokenizer._tokenizer.chat_template = (
        f"{{% if enable_thinking {default} %}}on{{% else %}}off{{% endif %}}{CHATML}"
    )
    wanted = "on" if "not" in default else "off"
    assert render_turns(tokenizer, [USER]) == wanted + "<user>Hi"
    for asked in (True, False):
        given = {"enable_thinking": asked}
        text = tokenizer.decode(chat_tokens(tokenizer, [USER], template_args=given))
        assert text == ("on" if asked and "not" not in default else "off") + "<user>Hi"


FIRST_CALL = call_of("edit", "a", n=1)
SECOND_CALL = call_of("look", "b", n=2)


@pytest.mark.parametrize(("turns", "wanted"), [
    ([calls_of(FIRST_CALL, SECOND_CALL), result_of("B", "b"), result_of("A", "a")],
     '<assistant>{"n": 1}<ipython>"A"<assistant>{"n": 2}<ipython>"B"'),
    ([calls_of(call_of("edit", n=1), call_of("look", n=2)), result_of("A"), result_of("B")],
     '<assistant>{"n": 1}<ipython>"A"<assistant>{"n": 2}<ipython>"B"'),
    ([calls_of(call_of("edit", [1], n=1), call_of("look", {}, n=2)), result_of("A", [1]),
      result_of("B", {})], '<assistant>{"n": 1}<ipython>"A"<assistant>{"n": 2}<ipython>"B"'),
    ([calls_of(FIRST_CALL, SECOND_CALL, content="I look."), result_of("B", "b"), USER],
     '<assistant>I look.<assistant>{"n": 1}<assistant>{"n": 2}<ipython>"B"<user>Hi'),
    ([calls_of(FIRST_CALL, content="I look."), result_of("A", "a"), ASSISTANT],
     '<assistant>I look.<assistant>{"n": 1}<ipython>"A"<assistant>Yes.'),
])  # fmt: skip
def test_llamas_template_gets_a_call_a_turn_and_texts_before_them(turns, wanted, shown):
    assert shown(LLAMA, [USER, *turns]) == f"<user>Hi{wanted}"


def test_harmonys_template_gets_a_call_a_turn_and_one_thought(shown):
    both = {**calls_of(FIRST_CALL, SECOND_CALL, content="I look."), "reasoning": "Hm."}
    turns = [USER, both, result_of("B", "b"), result_of("A", "a")]
    first = '<analysis>Hm.\n\nI look.<call>{"n": 1}<tool>A'
    assert shown(GPT_OSS, turns) == f'<user>Hi{first}<analysis><call>{{"n": 2}}<tool>B'


def test_a_result_belongs_to_the_last_call_of_its_id_or_to_the_next_one():
    turns = [
        calls_of(call_of("a", "x"), call_of("b", "x")), result_of("1", "x"), result_of("2", "x"),
        calls_of(call_of("c", "x"), call_of("d")), result_of("3", "?"), result_of("4", "x"),
        result_of("5"), USER, result_of("6", "x"), result_of("7"),
    ]  # fmt: skip
    assert find_answered_calls(turns) == {
        1: (0, 0), 2: (0, 1), 4: (3, 1), 5: (3, 0), 8: (3, 0),
    }  # fmt: skip
    assert find_answered_calls([result_of("1", "x"), USER]) == {}


def test_a_result_has_the_name_of_its_function(shown):
    turns = [USER, calls_of(FIRST_CALL, SECOND_CALL), result_of("B", "b"), result_of("A", "a")]
    wanted = "<user>Hi<assistant><call:edit><call:look><response:look>B<response:edit>A"
    assert shown(FUNCTION_GEMMA, turns) == wanted
    named = normalise_turns([*turns[:2], {**turns[2], "name": "mine"}, {**turns[3], "name": ""}])
    assert [one.get("name") for one in named] == [None, None, "mine", "edit"]


@pytest.mark.parametrize(("turns", "lost"), [
    ([{**SYSTEM, "content": "H"}, USER], "system"),
    ([{**SYSTEM, "content": "user"}, USER], "system"),
    ([USER, calls_of(FIRST_CALL), result_of("4"), {**USER, "content": "Are 4 enough?"}], "tool"),
])  # fmt: skip
def test_a_text_that_stands_elsewhere_by_chance_is_lost_all_the_same(turns, lost, shown):
    loses = "{% for m in messages if m.role != 'LOST' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    if lost == "system":  # which becomes the user's
        wanted = f"<user>{turns[0]['content']}\n\nHi"
        assert shown(loses.replace("LOST", lost), turns) == wanted
    else:
        line = refusal(shown, loses.replace("LOST", lost), turns)
        assert mentions(found_in(line), "'tool'", "'4'")


def test_many_turns_take_as_long_as_they_are(shown):
    begun = process_time()
    turns = [USER, ASSISTANT] * 10_000
    assert shown("{{ messages|map(attribute='content')|join }}", turns) == "HiYes." * 10_000
    refuses = "{% if messages|length > 9 %}{{ raise_exception('many') }}{% endif %}" + CHATML
    text = "x" * 50
    turns = [{"role": role, "content": text} for role in ("system", "user") for _ in range(60_000)]
    joined = "\n\n".join([text] * 60_000)
    assert shown(refuses, turns) == f"<system>{joined}<user>{joined}"
    calls = [call_of("edit", n=n) for n in range(20_000)]
    results = [result_of(str(n)) for n in range(20_000)]
    turns = normalise_turns([calls_of(*calls), *results])
    assert len(find_answered_calls(turns)) == len(calls)
    assert process_time() - begun < 30, "each text is copied for every other one"
