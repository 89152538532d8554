"""Turns of a chat under a chat template, in the form that it takes, and none of them left out.

The form is found once a template, by rendering a few turns (`find_template_form`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils import chat_template_utils

from .errors import InputError, quoted
from .formats.history import turns_for_template
from .templates import TemplateBoundsError, bounded_rendering
from .turns import (
    ROLES,
    Message,
    TurnError,
    join_system_turns_in_a_row,
    normalise_turns,
    other_arrangements,
)

Template = str | Callable[..., str]
"""A chat template: Jinja's text, or code of mlx-lm's in its place."""

# What no template has of its own, whatever case it writes in.
_WORD = "73919462"
_KEY = "k5501837"
_VALUE = "v6402859"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}},
}
_ASKED: Message = {"role": "user", "content": "Hi"}
_CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "find", "arguments": {_KEY: _VALUE}},
        }
    ],
}
_FOUND: Message = {"role": "tool", "content": _WORD, "tool_call_id": "call12345", "name": "find"}


@dataclass(frozen=True)
class TemplateForm:
    """What a chat template reads of turns; by default texts, and objects as arguments of calls."""

    roles_with_parts: frozenset[str] = frozenset()  # whose content it reads as parts
    has_text_arguments: bool = False  # whether it reads a call's arguments as their JSON text
    quoted_words: frozenset[str] | None = None  # all that it quotes; None for code

    def require_known_roles(self, turns: Sequence[Message]) -> None:
        """Raise TurnError for a role that is none of `ROLES`, and that the template does not name.

        Args:
            turns: all of them, in the order that messages of errors count them in.
        """
        if self.quoted_words is None:
            return
        for number, turn in enumerate(turns):
            role = turn["role"]
            if role not in ROLES and role not in self.quoted_words:
                place = f"messages[{number}].role"
                raise TurnError(place, f"is {quoted(role)}", f"one of {', '.join(ROLES)}")

    def with_known_roles(self, turns: Sequence[Message]) -> list[dict[str, Any]]:
        """The turns, the developer's as the system's unless the template names a developer.

        Those of the system's in a row become one.
        """
        names_developer = "developer" in (self.quoted_words or ())
        named = [
            {**turn, "role": "system"}
            if turn["role"] == "developer" and not names_developer
            else turn
            for turn in turns
        ]
        return join_system_turns_in_a_row(named)

    def fit(self, turns: Sequence[Message]) -> list[dict[str, Any]]:
        """Copies of normalised turns as the template reads them."""
        return [self._fit_turn(turn) for turn in turns]

    def _fit_turn(self, turn: Message) -> dict[str, Any]:
        own = dict(turn)
        if turn["role"] in self.roles_with_parts:
            own["content"] = [{"type": "text", "text": turn["content"]}]
        if self.has_text_arguments and "tool_calls" in turn:
            own["tool_calls"] = [_with_text_arguments(call) for call in turn["tool_calls"]]
        return own


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
    return {**call, "function": inner} if "function" in call else inner


@lru_cache(maxsize=64)
def find_template_form(template: Template) -> TemplateForm:
    """Find the form of turns that a template takes, inside `bounded_rendering`.

    Text is preferred to parts, and an object to its JSON text, where a template shows both. It
    does not show a text whose letters it goes over as if they were parts, nor an object in
    Python's own spelling, nor JSON inside JSON.

    Raises:
        TemplateBoundsError: the template takes too long, or makes too much.
    """
    if isinstance(template, str):
        chat_template_utils._compile_jinja_template(template)  # once, where it is broken
    words = re.findall(r"""['"](\w+)['"]""", template) if isinstance(template, str) else None
    form = TemplateForm(quoted_words=None if words is None else frozenset(words))

    def render(tried: TemplateForm, turns: Sequence[Message]) -> str:
        """The text of a few turns; "" where the template refuses them."""
        try:
            return _render_with_a_tool(template, tried.fit(turns))
        except TemplateBoundsError:
            raise
        except Exception:  # whatever a template computes
            return ""

    def with_parts_if_texts_are_lost(role: str, turns: Sequence[Message]) -> TemplateForm:
        """The form, with parts for a role of which `_WORD` is shown as a part alone."""
        other = replace(form, roles_with_parts=form.roles_with_parts | {role})
        is_lost = _WORD not in render(form, turns) and _WORD in render(other, turns)
        return other if is_lost else form

    form = with_parts_if_texts_are_lost("user", [{"role": "user", "content": _WORD}])
    for role, around in (("system", ([], [_ASKED])), ("assistant", ([_ASKED], [_ASKED]))):
        before, behind = around
        turns = [*before, {"role": role, "content": _WORD}, *behind]
        form = with_parts_if_texts_are_lost(role, turns)
    calling = [_ASKED, _CALLING, _FOUND]
    other = replace(form, has_text_arguments=True)
    if _score_arguments(render(other, calling)) > _score_arguments(render(form, calling)):
        form = other
    return with_parts_if_texts_are_lost("tool", calling)


def _render_with_a_tool(template: Template, turns: list[dict[str, Any]]) -> str:
    if callable(template):
        return template(turns, tools=[_TOOL], add_generation_prompt=True)
    special = {f"{name}_token": "<s>" for name in ("bos", "eos", "pad", "unk")}
    (text,), _ = chat_template_utils.render_jinja_template(
        [turns], tools=[_TOOL], chat_template=template, add_generation_prompt=True, **special
    )
    return str(text)


def _score_arguments(text: str) -> int:
    """How well a template shows the arguments of `_CALLING`; 0 where it refuses or garbles them."""
    is_garbled = f"'{_KEY}'" in text or f'\\"{_KEY}' in text  # Python's spelling; JSON in JSON
    return 0 if is_garbled or not text else 1 + (_KEY in text) + (_VALUE in text)


def render_turns(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    **more: Any,
) -> str:
    """The text of turns under the model's chat template, with everything that they say in it.

    Where the template refuses the turns, or leaves a text of theirs out, `other_arrangements` of
    them are tried.

    Args:
        tokenizer: the model's; it has a chat template.
        messages: the turns.
        tools, more: other arguments of `apply_chat_template`.

    Raises:
        InputError: a turn is none; the template refuses the turns, leaves some out in every
            arrangement, takes too long or makes too much.
    """
    turns = normalise_turns(messages)
    if tools:
        more["tools"] = tools
    with bounded_rendering("these turns"):
        form = _form_of(tokenizer, tools)
        form.require_known_roles(turns)
        turns = form.with_known_roles(turns)
        refusals: list[Exception] = []
        for arranged in (turns, *other_arrangements(turns)):
            try:
                return _render_all(tokenizer, form, arranged, more)
            except TemplateBoundsError:
                raise
            except Exception as error:  # whatever a template computes
                refusals.append(error)
        raise refusals[0]


def _form_of(tokenizer: TokenizerWrapper, tools: Sequence[Any] | None) -> TemplateForm:
    """The form of the template that such turns are put under: a model may have one for tools."""
    code = getattr(tokenizer, "_chat_template", None)
    if code is None and tokenizer.chat_template is None:  # a tokenizer with a renderer of its own
        return TemplateForm()
    template = code or tokenizer.get_chat_template(tools=tools or None)
    return (
        find_template_form(template)
        if callable(template) or type(template) is str
        else (TemplateForm())
    )


def _render_all(
    tokenizer: TokenizerWrapper,
    form: TemplateForm,
    turns: Sequence[Message],
    more: Mapping[str, Any],
) -> str:
    """The text of normalised turns under the model's template.

    Raises:
        InputError: the template leaves out what a turn says.
        Exception: it refuses the turns, or is broken.
    """

    def render(said: Sequence[Message]) -> str:
        own = form.fit(turns_for_template(said, tokenizer))
        return str(tokenizer.apply_chat_template(own, tokenize=False, **more))

    text = render(turns)
    missing = [
        number
        for number, turn in enumerate(turns)
        # Many templates show what is said beside a call nowhere: such models do not say anything.
        if not turn.get("tool_calls") and turn["content"].strip() not in text
    ]
    if not missing:
        return text
    # A template may write a text otherwise, and leave out what was thought: is a word shown?
    words = {number: f"{_WORD}{number:06}" for number in missing}
    marked = [{**turn, "content": words.get(n, turn["content"])} for n, turn in enumerate(turns)]
    try:
        shown = render(marked)
    except TemplateBoundsError:
        raise
    except Exception:  # the template reads the text
        return text
    for number in missing:
        if words[number] not in shown:
            turn = turns[number]
            raise InputError(
                f"the model's chat template leaves out a turn of {quoted(turn['role'])} "
                f"({quoted(turn['content'])})",
                expected="turns that it shows",
                do="change or drop it",
            )
    return text
