"""What is asked: turns of every form, and what a chat template reads beside them."""

import json
from contextlib import nullcontext
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from refusals import found_in, mentions, refusal
from tiny import make_tokenizer

import ssmlx
from ssmlx import prompts, templates
from ssmlx.errors import InputError
from ssmlx.prompts import (
    chat_tokens,
    encode_prompt,
    find_tokens_between_turns,
    prompt_tokens,
    read_prompts,
)
from ssmlx.training.data import Encoder

END = 12
# w1 to w5 for the roles; the text; w6 and the arguments of a call, w7 for each tool, w8 to think.
TEMPLATE = """{% set roles = {'system': 'w1', 'developer': 'w2', 'user': 'w3', 'assistant': 'w4',
'tool': 'w5'} %}{% for t in tools or [] %}{{ 'w7 ' }}{% endfor %}{% for m in messages %}{{
roles[m.role] + ' ' + m.content + ' ' }}{% for c in m.tool_calls or [] %}{{
'w6 ' + c.function.arguments.word + ' w12 ' }}{% endfor %}{% endfor %}{%
if add_generation_prompt %}{{ 'w4 ' }}{% if enable_thinking %}{{ 'w8' }}{% endif %}{% endif %}"""
CALL = {"type": "function", "function": {"name": "find", "arguments": '{"word": "w9"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "w10", "tool_call_id": "a"}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
TURNS = [
    {"role": "system", "content": "w0"},
    {"role": "developer", "content": [{"type": "text", "text": text} for text in ("w1 ", "w2")]},
    {"role": "user", "content": "w11"},
]  # fmt: skip
ASKED = [1, 0, 2, 1, 2, 3, 11]


class Model:
    config = None


@pytest.fixture
def tokenizer():
    made = make_tokenizer(eos=END)
    made._tokenizer.chat_template = TEMPLATE
    made.has_chat_template = True
    return made


def test_data_is_of_one_day(tokenizer, monkeypatch):
    tokenizer._tokenizer.chat_template = "{{ 'w' ~ strftime_now('%d')|int ~ ' ' }}" + TEMPLATE
    for day in (3, 4):
        monkeypatch.setattr(templates, "datetime", fixed := Mock(wraps=datetime))
        fixed.now.return_value = datetime(2026, 11, day)
        assert chat_tokens(tokenizer, TURNS)[0] == day
        with templates.frozen_at_new_year_2026():
            assert chat_tokens(tokenizer, TURNS)[0] == 1


@pytest.fixture
def read(tmp_path):
    """What is read of lines, each an object."""

    def read(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_prompts(path)

    return read


@pytest.mark.parametrize(("turns", "expected"), [
    (TURNS, [*ASKED, 4]),
    ([*TURNS, {"role": "assistant", "content": "w5"}], [*ASKED, 4]),
    ([*TURNS, CALLING], [*ASKED, 4]),
    ([*TURNS, CALLING, FOUND], [*ASKED, 4, 6, 9, 12, 5, 10, 4]),
    ([*TURNS, CALLING, FOUND, TURNS[2]], [*ASKED, 4, 6, 9, 12, 5, 10, 3, 11, 4]),
])  # fmt: skip
def test_turns_of_every_form_are_asked(read, tokenizer, turns, expected):
    (prompt,) = read({"messages": turns, "other": 1})
    assert encode_prompt(prompt, Model(), tokenizer) == expected
    (prompt,) = read({"messages": turns, "tools": TOOLS * 2})
    assert encode_prompt(prompt, Model(), tokenizer) == [7, 7, *expected]
    asked = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    assert chat_tokens(tokenizer, asked) == expected


@pytest.mark.parametrize("turns", [
    "w1", [3], [{"content": "w1"}], [{"role": "usr", "content": "w1"}, TURNS[2]],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": 3}], [FOUND], [TURNS[2], TURNS[0]],
])  # fmt: skip
def test_bad_turns_are_one_line(read, turns):
    line = found_in(refusal(read, {"messages": TURNS}, {"messages": turns}))
    assert mentions(line, "2") and "messages" in line


def test_turns_that_make_no_prompt_are_one_line(read):
    blank = [{"role": "user", "content": " "}]
    assert mentions(
        found_in(refusal(read, {"messages": TURNS}, {"messages": blank})), "2", "prompt"
    )


def test_a_users_turn_begins_with_what_its_template_says(tokenizer):
    assert find_tokens_between_turns(tokenizer).opening == (3,)
    tokenizer.chat_template = "w8 {% for m in messages %}w5 w9 {{ m.content }} w12 {% endfor %}"
    assert [*vars(find_tokens_between_turns(tokenizer)).values()] == [(12,), (5, 9)]
    for template, found in (
        ("{% for m in messages %}w9 {{ m.content }} w12 w5 {% endfor %}", (5, 9)),
        ("{{ raise_exception('three turns') }}", ()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ()),
    ):
        tokenizer.chat_template = template
        assert find_tokens_between_turns(tokenizer).opening == found


OWN = "w5 w9 {prompt} w12"
PARTS = TURNS[1]["content"]
FIRST = {"role": "user", "content": "w1"}
ANSWER = {"role": "assistant", "content": "w2"}
CHATS = [
    (OWN, [FIRST, ANSWER, {"role": "user", "content": "w3"}], {}, [5, 9, 3, 12]),
    (OWN, [FIRST, {**FIRST, "role": "tool"}], {}, [8, 5, 9, 1, 12, 5, 9, 1, 12]),
    (OWN, [FIRST], {}, [5, 9, 1, 12]), (None, [FIRST], {}, [8, 5, 9, 1, 12]),
    ("chat", [FIRST, ANSWER], {}, [8, 5, 9, 1, 12, 5, 9, 2, 12]),
    ("w4 {prompt}", [FIRST], {}, [4, 1]),
    (OWN, [{"role": "user", "content": PARTS}], {}, [5, 9, 1, 2, 12]),
    (OWN, [TURNS[0], FIRST], {}, [8, 5, 9, 0, 12, 5, 9, 1, 12]),
    (OWN, [FIRST, TURNS[0], FIRST], {}, [8, 5, 9, 1, 12, 5, 9, 0, 12, 5, 9, 1, 12]),
    (OWN, [ANSWER, FIRST], {}, [5, 9, 1, 12]), (OWN, [ANSWER], {}, [8, 5, 9, 2, 12]),
    (OWN, [FIRST, FIRST], {}, [8, 5, 9, 1, 12, 5, 9, 1, 12]),
    (OWN, [FIRST], {"tools": TOOLS}, [8, 6, 5, 9, 1, 12]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "turns", "more", "expected"), CHATS)
def test_an_own_template_asks_the_last_turn_alone(tokenizer, template, turns, more, expected):
    """Unless somebody has a system say something, or tools."""
    said = "{% for m in messages %}w5 w9 {{ m.content }} w12 {% endfor %}"
    tokenizer._tokenizer.chat_template = "w8 {% if tools %}w6 {% endif %}" + said
    assert prompts.encode_turns(turns, tokenizer, template, **more) == expected
    model = Model()
    asked = {"messages": turns, **more}
    model.config = SimpleNamespace(prompt_template=template)
    assert encode_prompt(asked, model, tokenizer) == expected
    refused = len(turns) > 1 and prompts.shows_last_turn_alone(turns, template, **more)
    with pytest.raises(InputError) if refused else nullcontext():
        given = {"messages": [*turns, ANSWER], **more}
        learnt = Encoder(tokenizer, template, END, 50).encode_row(given)
        assert learnt.tokens[: learnt.start].tolist() == expected


@pytest.mark.parametrize("template", ["raw", "w9"])
def test_turns_under_no_template_for_turns_are_refused(tokenizer, template):
    line = refusal(encode_prompt, {"messages": TURNS}, Model(), tokenizer, template)
    assert mentions(found_in(line), "--template", f"'{template}'")


def test_a_chat_is_learnt_from_a_last_turn_that_calls_a_tool(tokenizer):
    encoder = Encoder(tokenizer, None, END, 50)
    said = [*TURNS, CALLING, FOUND, {**TURNS[1], "role": "assistant"}]
    for turns, start, answer in ((said, 15, [1, 2, END]), (said[:4], 9, [6, 9, END])):
        found = encoder.encode_row({"messages": turns, "tools": TOOLS})
        # An assistant's turn begins as the prompt for it ends.
        assert (found.start, found.tokens[found.start :].tolist()) == (start, answer)


def test_a_turn_that_the_answer_continues_is_left_open(tokenizer):
    turns = [TURNS[2], {"role": "assistant", "content": "w5 w6"}]
    assert chat_tokens(tokenizer, turns, continues=True) == [3, 11, 4, 5, 6]


def test_template_arguments_reach_the_template(tokenizer):
    turns = [{"role": "user", "content": "w11"}]
    for thinks in (False, True):
        more = {"template_args": {"enable_thinking": thinks}}
        assert chat_tokens(tokenizer, turns, **more) == [3, 11, 4] + [8] * thinks
        assert prompt_tokens("w11", Model(), tokenizer, **more) == [3, 11, 4] + [8] * thinks
    assert prompt_tokens("w11", Model(), tokenizer, tools=TOOLS) == [7, 3, 11, 4]
    assert turns == [{"role": "user", "content": "w11"}]


def test_turns_may_be_asked_in_place_of_a_text(tokenizer):
    assert prompt_tokens(TURNS, Model(), tokenizer) == [*ASKED, 4]
    text = prompt_tokens("w11", Model(), tokenizer)
    assert prompt_tokens(TURNS[2:], Model(), tokenizer) == text == [3, 11, 4]
    assert prompt_tokens(TURNS[2:], Model(), tokenizer, "raw") == [11]
    more = {"tools": TOOLS, "template_args": {"enable_thinking": True}}
    assert prompt_tokens(TURNS, Model(), tokenizer, **more) == [7, *ASKED, 4, 8]
    said = refusal(prompt_tokens, TURNS, Model(), tokenizer, "raw")
    assert mentions(found_in(said), "--template", "'raw'")
    assert mentions(refusal(prompt_tokens, [{"role": "user"}], Model(), tokenizer), "messages[0]")


def test_arguments_in_another_order_are_named(tokenizer):
    """As attributes that lists do not have, they were once."""
    model = Model()
    for call, *swapped in (
        (chat_tokens, TURNS, tokenizer),
        (chat_tokens, model, TURNS),
        (prompt_tokens, model, tokenizer, "w1"),
        (prompt_tokens, "w1", tokenizer, model),
        (prompt_tokens, tokenizer, TURNS, model),
        (ssmlx.generate, tokenizer, model, "w1"),
        (ssmlx.stream_generate, "w1", model, tokenizer),
        (ssmlx.generate, model, tokenizer, "w1"),  # a model of another package's
    ):
        said = refusal(call, *swapped)
        assert mentions(said, "tokenizer") or mentions(found_in(said), "model")


@pytest.mark.parametrize(("more", "named"), [
    ({"template_args": {"enable_thinkin": True}}, ("enable_thinkin",)),
    ({"template_args": {"chat_template": "w1"}}, ("chat_template",)),
    ({"template_args": {"messages": []}}, ("messages",)),
    ({"template_args": {"tokenize": False}}, ("tokenize",)),
    ({"template_args": {"tools": 3}}, ()),
    ({"template_args": {"roles": {}}, "template": "raw"}, ("arguments",)),
    ({"tools": TOOLS, "template": "w9 {prompt}"}, ("tools",)),
    ({"tools": 5}, ("tools", "5")),
    ({"tools": {"a": 1}}, ("tools", "{'a': 1}")),
    ({"tools": ["find"]}, ()),
])  # fmt: skip
def test_template_arguments_that_do_not_fit_are_one_line(tokenizer, more, named):
    assert mentions(found_in(refusal(prompt_tokens, "w11", Model(), tokenizer, **more)), *named)


def test_tools_without_a_place_for_them_are_refused(tokenizer):
    tokenizer._tokenizer.chat_template = "{{ messages[0].content }}"
    line = refusal(prompt_tokens, "w11", Model(), tokenizer, tools=TOOLS)
    assert mentions(found_in(line), "tools")
