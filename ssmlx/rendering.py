"""Turns of a chat under a chat template, in the form that it takes, without losing any of them.

The form is found once a template, by rendering a few turns (`find_template_form`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, cast, get_args

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils import chat_template_utils, get_json_schema

from .errors import InputError, quoted
from .formats.families import AnswerFormat, find_format
from .formats.history import turns_for_template, write_calls
from .templates import TemplateBoundsError, bounded_rendering
from .turns import (
    ROLES,
    Message,
    TurnError,
    is_systems,
    join_system_turns,
    normalise_turns,
    other_arrangements,
    with_one_call_a_turn,
    with_texts_before_calls,
)

Template = str | Callable[..., str]  # Jinja's text, or code of mlx-lm's in its place

# Where a template reads tools: in its variable `tools`; in the field `tools` of the system's first
# turn, as JSON (or in the variable, beside such a turn); in `xml_tools`.
ToolsPlace = Literal["variable", "system turn", "xml_tools"]

# Words that no template has, in whatever case it writes.
_WORD = "73919462"
_LONG = 12  # characters of a text that is not found in a prompt by chance
_KEY = "k5501837"
_VALUE = "v6402859"
_TOOL_NAME = "tool28046173"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}
_ASKED: Message = {"role": "user", "content": "Hi"}
_ANSWERED: Message = {"role": "assistant", "content": "Yes."}


def _call(number: int, **arguments: Any) -> Mapping[str, Any]:
    """A message's call that shares no word with anything else."""
    function = {"name": f"find{number}640215", "arguments": arguments}
    return {"id": f"call1234{number}", "type": "function", "function": function}


_FIRST = _call(1, **{_KEY: _VALUE})
_SECOND = _call(2, k9037214="v1846350")


def _calling(*calls: Mapping[str, Any], content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def _found(call: Mapping[str, Any], content: str) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": name}


@dataclass(frozen=True)
class TemplateForm:
    """What a chat template reads of turns; by default all that they have, as it is."""

    roles_with_parts: frozenset[str] = frozenset()  # whose content it reads as parts
    has_thought_parts: bool = False  # whether it reads thoughts as parts of type "thinking" alone
    has_text_arguments: bool = False  # whether it reads a call's arguments as their JSON text
    shows_calls: bool = True
    has_one_call_a_turn: bool = False  # whether it refuses several, or leaves some out
    has_texts_before_calls: bool = False  # whether it shows no text beside calls, but before them
    tools_place: ToolsPlace | None = "variable"  # None if it reads no tools
    quoted_words: frozenset[str] | None = None  # all that it quotes; None for code

    def require_known_roles(
        self,
        turns: Sequence[Message],  # all of them, as messages number them
    ) -> None:
        """Refuse a role that is not in `ROLES` and that the template does not name."""
        if self.quoted_words is None:
            return
        for number, turn in enumerate(turns):
            role = turn["role"]
            if role not in ROLES and role not in self.quoted_words:
                place = f"messages[{number}].role"
                raise TurnError(place, f"is {quoted(role)}", f"one of {', '.join(ROLES)}")

    def with_known_roles(self, turns: Sequence[Message]) -> list[dict[str, Any]]:
        """Turns in which the developer's are the system's, unless the template names a
        developer."""
        names_developer = "developer" in (self.quoted_words or ())
        named = [
            {**turn, "role": "system"}
            if turn["role"] == "developer" and not names_developer
            else turn
            for turn in turns
        ]
        return join_system_turns(named)

    def fit(
        self,
        turns: Sequence[Message],
        format: AnswerFormat | None,  # to write calls in; None if nothing is to be written
    ) -> list[dict[str, Any]]:
        """Copies of normalised turns as the template reads them."""
        fitted = list(map(dict, turns))
        if not self.shows_calls and format is not None:
            fitted = [_with_written_calls(turn, format) for turn in fitted]
        if self.has_texts_before_calls:
            fitted = with_texts_before_calls(fitted)
        if self.has_one_call_a_turn:
            fitted = with_one_call_a_turn(fitted)
        return [self._fit_turn(turn) for turn in fitted]

    def _fit_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        thinks = self.has_thought_parts and bool(turn.get("reasoning_content"))
        if thinks or turn["role"] in self.roles_with_parts:
            text = turn["content"]
            parts = [{"type": "text", "text": text}] if text or not thinks else []
            if thinks:
                parts.insert(0, {"type": "thinking", "thinking": turn.pop("reasoning_content")})
            turn["content"] = parts
        if self.has_text_arguments and "tool_calls" in turn:
            turn["tool_calls"] = [_with_text_arguments(call) for call in turn["tool_calls"]]
        return turn

    def place_tools(
        self, turns: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        """The turns and the template's variables, with tools where the template reads them."""
        variables: dict[str, Any] = {"tools": tools}
        if self.tools_place == "xml_tools":
            variables["xml_tools"] = tools
        elif self.tools_place == "system turn":
            functions = [tool.get("function", tool) for tool in tools]
            has_system = bool(turns) and is_systems(turns[0])
            first = turns[0] if has_system else {"role": "system", "content": ""}
            first = {**first, "tools": json.dumps(functions, ensure_ascii=False)}
            turns = [first, *turns[1 if has_system else 0 :]]
        return turns, variables


def _with_written_calls(turn: dict[str, Any], format: AnswerFormat) -> dict[str, Any]:
    """Turns whose calls are written into the text, after what is said beside them."""
    calls = turn.pop("tool_calls", None)
    if not calls:
        return turn
    texts = filter(None, [turn["content"], write_calls(calls, format)])
    return {**turn, "content": "\n".join(texts)}


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
    return {**call, "function": inner} if "function" in call else inner


@lru_cache(maxsize=64)
def find_template_form(template: Template) -> TemplateForm:
    """The form of turns that a template takes; called inside `bounded_rendering`.

    What a template refuses in every form keeps the default. Text is preferred to parts, and an
    object to its JSON text, if a template shows both.
    """
    # A text is not shown if its letters are read as parts, nor an object in Python's spelling, nor
    # JSON inside JSON.
    if isinstance(template, str):
        chat_template_utils._compile_jinja_template(template)  # raises once, if it is broken
    words = re.findall(r"""['"](\w+)['"]""", template) if isinstance(template, str) else None
    form = TemplateForm(quoted_words=None if words is None else frozenset(words))
    said: Message = {"role": "user", "content": _WORD}
    form = _with_parts_if_needed(template, form, "user", [said])
    turns: list[Message] = [{**said, "role": "system"}, _ASKED]
    form = _with_parts_if_needed(template, form, "system", turns)
    turns = [_ASKED, {**said, "role": "assistant"}, _ASKED]
    form = _with_parts_if_needed(template, form, "assistant", turns)
    turns = [_ASKED, _calling(_FIRST), _found(_FIRST, _WORD)]
    other = replace(form, has_text_arguments=True)
    shown = [_score_arguments(_try(template, one, turns)) for one in (form, other)]
    form = other if shown[1] > shown[0] else form
    form = _with_parts_if_needed(template, form, "tool", turns)
    form = _with_form_of_calls(template, form)
    form = _with_form_of_thoughts(template, form)
    return replace(form, tools_place=_find_tools_place(template, form))


def _try(
    template: Template,
    form: TemplateForm,
    turns: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
) -> str:
    """What the template renders; empty if it refuses the turns."""
    own = form.fit(turns, None)
    given: Any = {"tools": [_TOOL]} if variables is None else variables
    try:
        if callable(template):
            return template(own, add_generation_prompt=True, **given)
        special = {f"{name}_token": "<s>" for name in ("bos", "eos", "pad", "unk")}
        (text,), _ = chat_template_utils.render_jinja_template(
            [own], chat_template=template, add_generation_prompt=True, **given, **special
        )
        return str(text)
    except TemplateBoundsError:
        raise
    except Exception:  # whatever a template computes
        return ""


def _with_parts_if_needed(
    template: Template, form: TemplateForm, role: str, turns: Sequence[Message]
) -> TemplateForm:
    """The form with parts for `role`, if `_WORD` is shown only as a part."""
    other = replace(form, roles_with_parts=form.roles_with_parts | {role})
    is_lost = _WORD not in _try(template, form, turns) and _WORD in _try(template, other, turns)
    return other if is_lost else form


def _score_arguments(text: str) -> int:
    """How well a template shows the arguments of `_FIRST`; 0 if it refuses or garbles them."""
    is_garbled = f"'{_KEY}'" in text or f'\\"{_KEY}' in text  # Python's spelling; JSON in JSON
    return 0 if is_garbled or not text else 1 + (_KEY in text) + (_VALUE in text)


def _with_form_of_calls(template: Template, form: TemplateForm) -> TemplateForm:
    """The form with how the template shows calls, two in a turn, and texts beside them."""

    def shows(turns: Sequence[Message], *calls: Mapping[str, Any]) -> bool:
        text = _try(template, form, turns).lower()
        return all(any(word in text for word in _words_of(call)) for call in calls)

    one = [_ASKED, _calling(_FIRST)]
    if _try(template, form, one) and not shows(one, _FIRST):
        return replace(form, shows_calls=False)
    in_turns = [*one, _found(_FIRST, "Yes."), _calling(_SECOND)]
    both = [_ASKED, _calling(_FIRST, _SECOND)]
    if not shows(both, _FIRST, _SECOND) and shows(in_turns, _FIRST, _SECOND):
        form = replace(form, has_one_call_a_turn=True)
    beside = _try(template, form, [_ASKED, _calling(_FIRST, content=_WORD)])
    before: list[Message] = [_ASKED, {**_ANSWERED, "content": _WORD}, _calling(_FIRST)]
    before += [_found(_FIRST, "Yes."), _ANSWERED, _ASKED]
    if beside and _WORD not in beside and _WORD in _try(template, form, before):
        form = replace(form, has_texts_before_calls=True)
    return form


def _words_of(call: Mapping[str, Any]) -> list[str]:
    """The words any of which shows that a call is shown, if only in part."""
    arguments = call["function"]["arguments"]
    return [call["function"]["name"], *arguments, *arguments.values()]


def _with_form_of_thoughts(template: Template, form: TemplateForm) -> TemplateForm:
    """The form with thoughts as parts, if the template shows them so and in no field."""
    turns = [_ASKED, {**_ANSWERED, "reasoning_content": _WORD}, _ASKED]
    if _WORD in _try(template, form, turns):
        return form
    other = replace(form, has_thought_parts=True)
    # In quotes it is a part that was written as a whole, in Python's spelling or JSON's.
    is_read = re.search(rf"(?<!['\"]){_WORD}", _try(template, other, turns))
    return other if is_read else form


def _find_tools_place(template: Template, form: TemplateForm) -> ToolsPlace | None:
    """Where the template shows tools' names, or else writes anything because of them."""
    tried = []
    for place in get_args(ToolsPlace):
        own = replace(form, tools_place=place)
        tried.append(_try(template, own, *own.place_tools([_ASKED], [_TOOL])))
        if _TOOL_NAME in tried[-1]:
            return cast("ToolsPlace", place)
    is_read = tried[0] != _try(template, form, [_ASKED], {})
    return "variable" if is_read or not any(tried) else None


def render_turns(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    **more: Any,  # of `apply_chat_template`; the template has its own defaults for the rest
) -> str:
    """The text of turns under the model's chat template, with everything that they say in it.

    If the template refuses the turns, or leaves a text of theirs out, `other_arrangements` of them
    are tried. Calls that it does not show are written into the content, in the model's own form.
    """
    turns = normalise_turns(messages)
    with bounded_rendering("these turns"):
        schemas = [get_json_schema(one) if callable(one) else one for one in tools or ()]
        form = _form_of(tokenizer, schemas)
        form.require_known_roles(turns)
        _require_place_for_tools(form, schemas)
        are_lost = not form.shows_calls and any(turn.get("tool_calls") for turn in turns)
        format = find_format(tokenizer) if are_lost else None

        def render(said: Sequence[Message]) -> str:
            variables: dict[str, Any] = {}
            if schemas:
                said, variables = form.place_tools(said, schemas)
            own = form.fit(turns_for_template(said, tokenizer), format)
            return _apply_template(tokenizer, own, {**more, **variables})

        turns = form.with_known_roles(turns)
        refusals: list[Exception] = []
        for arranged in chain([turns], other_arrangements(turns)):
            try:
                text = render(arranged)
                if not _are_in_order(arranged, text):
                    _require_all_shown(arranged, form, render)
                return text
            except TemplateBoundsError:
                raise
            except Exception as error:  # whatever a template computes
                refusals.append(error)
        raise refusals[0]


def offers_tools(tokenizer: TokenizerWrapper) -> bool:
    """Whether a model's chat template has a place for tools; False if the template is broken."""
    if not tokenizer.has_chat_template:
        return False
    try:
        with bounded_rendering("a question"):
            return _form_of(tokenizer, [_TOOL]).tools_place is not None
    except InputError:
        return False


def has_unknown_calls(tokenizer: TokenizerWrapper) -> bool:
    """Whether a model's chat template offers tools, while the form of its calls is not known."""
    return offers_tools(tokenizer) and find_format(tokenizer).name is None


def _form_of(tokenizer: TokenizerWrapper, tools: Sequence[Any]) -> TemplateForm:
    """The form of the model's template; a model may have another one for turns with tools."""
    code = tokenizer._chat_template
    if code is None and tokenizer.chat_template is None:  # a tokenizer with a renderer of its own
        return TemplateForm()
    template = code or tokenizer.get_chat_template(tools=tools or None)
    is_known = callable(template) or type(template) is str
    return find_template_form(template) if is_known else TemplateForm()


def _require_place_for_tools(form: TemplateForm, tools: Sequence[Any]) -> None:
    if tools and form.tools_place is None:
        expected = "no tools: this model's chat template does not support them"
        do = "omit them, or use a model made for tools"
        raise TurnError("tools", "are offered", expected, do)


def _apply_template(
    tokenizer: TokenizerWrapper, turns: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The text that the template renders; raises whatever the template raises. It is called on
    mlx-lm's private fields, since mlx-lm's wrapper sets `enable_thinking` in every prompt."""
    if tokenizer._chat_template is not None:
        return str(tokenizer._chat_template(turns, **variables))
    return str(tokenizer._tokenizer.apply_chat_template(turns, tokenize=False, **variables))


def _are_in_order(turns: Sequence[Message], text: str) -> bool:
    """Whether a text has what all turns say, in order, and too long to be there by chance."""
    at = 0
    for said in (turn["content"].strip() for turn in turns):
        at = text.find(said, at) + len(said)
        if len(said) < _LONG or at < len(said):
            return False
    return True


def _require_all_shown(
    turns: Sequence[Message],  # normalised
    form: TemplateForm,
    render: Callable[[Sequence[Message]], str],
) -> None:
    """Refuse turns of which the template leaves out what one says."""
    # Each text is replaced by a mark, which is looked for: a text may be there by chance, or be
    # written in another way. Beside calls that the template shows, it may have no place for a text:
    # `TemplateForm` has found one if there is any.
    checked = {
        number
        for number, turn in enumerate(turns)
        if turn["content"].strip() and not (form.shows_calls and turn.get("tool_calls"))
    }
    marked = [
        {**turn, "content": f"{_WORD}n{n}n"} if n in checked else turn
        for n, turn in enumerate(turns)
    ]
    try:
        text = render(marked)
    except TemplateBoundsError:
        raise
    except Exception:  # the template reads what the texts say, and refuses the marks
        return
    shown = {*map(int, re.findall(rf"{_WORD}n(\d+)n", text, re.IGNORECASE))}
    if missing := checked - shown:
        turn = turns[min(missing)]
        raise InputError(
            f"the model's chat template leaves out a turn of {quoted(turn['role'])} "
            f"({quoted(turn['content'])})",
            expected="turns that the template renders",
            do="change or remove it",
        )
