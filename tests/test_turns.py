"""Turns of every form, under templates of every kind: each word arrives, or its place is told."""

import json

import pytest
from tiny import make_tokenizer

from ssmlx.errors import InputError
from ssmlx.prompts import chat_tokens, find_tokens_between_turns
from ssmlx.rendering import find_template_form, render_turns
from ssmlx.templates import bounded_rendering
from ssmlx.turns import TurnError, normalise_turns

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


def test_what_a_template_leaves_out_in_every_arrangement_is_told(shown):
    with pytest.raises(InputError, match=r"leaves out a turn of 'tool' \('ok'\)"):
        shown(SILENT, calling("{}"))
    with pytest.raises(InputError, match=r"leaves out a turn of 'user' \('Hi'\)"):
        shown("{{ messages[-1].content }}", [USER, ASSISTANT, {**USER, "content": "And?"}])
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
    (3, "messages", "is 3"),
    ("Hi", "messages", 'is "Hi"'),
    ([3], "messages[0]", "is 3"),
    ([{"content": "a"}], "messages[0].role", "is null"),
    ([{"role": "", "content": "a"}], 'messages[0].role', 'is ""'),
    ([USER, {"role": "usr", "content": "a"}], "messages[1].role", "is 'usr'"),
    ([{**USER, "name": 3}], "messages[0].name", "is 3"),
    ([{"role": "user"}], "messages[0].content", "is null or missing"),
    ([{**USER, "content": None}], "messages[0].content", "is null or missing"),
    ([{**USER, "content": 3}], "messages[0].content", "is 3"),
    (of_parts(TEXT, IMAGE), "messages[0].content[1]", "is an image"),
    (of_parts({"type": "input_image"}), "messages[0].content[0]", "is an image"),
    (of_parts({"type": "input_audio"}), "messages[0].content[0]", "is an audio clip"),
    (of_parts({"type": "video_url"}), "messages[0].content[0]", "is a video"),
    (of_parts({"type": "file"}), "messages[0].content[0]", "is a file"),
    (of_parts({"type": "refusal", "refusal": "a"}), "messages[0].content[0]", "is of type"),
    (of_parts({"type": "text", "text": 3}), "messages[0].content[0].text", "is 3"),
    (of_parts(3), "messages[0].content[0]", "is 3"),
    ([{**ASSISTANT, "reasoning_content": 3}], "messages[0].reasoning_content", "is 3"),
    ([{**ASSISTANT, "tool_calls": {}}], "messages[0].tool_calls", "is {}"),
    (of_call(3), "messages[0].tool_calls[0]", "is 3"),
    (of_call({"function": {}}), "messages[0].tool_calls[0].function.name", "is null"),
    *((calling(one), "messages[1].tool_calls[0].function.arguments", f"is {json.dumps(one)}")
      for one in ("[1]", "abc", '"abc"', "1", 1, [1], True, '{"a": NaN', "{'a': 1}")),
]  # fmt: skip


@pytest.mark.parametrize(("turns", "place", "fault"), WRONG)
def test_what_is_wrong_with_a_turn_is_told_with_its_place(turns, place, fault, shown):
    shown(CHATML, [USER])
    with pytest.raises(TurnError) as told:
        chat_tokens(shown.tokenizer, turns)
    assert (told.value.place, told.value.found[: len(f"{place} {fault}")]) == (
        place,
        f"{place} {fault}",
    )


@pytest.mark.parametrize(("turn", "said"), [
    ({"content": None, "reasoning_content": "Hm."}, "<assistant>"),
    ({"content": None}, "<assistant>"), ({}, "<assistant>"), ({"content": ""}, "<assistant>"),
    ({"content": []}, "<assistant>"), ({"content": "a", "tool_calls": None}, "<assistant>a"),
    ({"content": "a", "tool_calls": [], "name": None, "refusal": None}, "<assistant>a"),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "<assistant>No."),
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


def test_what_is_not_unicode_is_told_wherever_it_stands(shown):
    shown(CALL.replace("SHOWN", "{{ c.function.arguments|tojson }}"), [USER])
    for turns in ([{**USER, "content": "a\ud800"}], calling({"old": "a\ud800"})):
        with pytest.raises(InputError, match="the text is not Unicode"):
            chat_tokens(shown.tokenizer, turns)
