"""What templates are given of earlier answers, as a family has it: ids of calls, thoughts, calls as
text."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..turns import BETWEEN_TEXTS, find_answered_calls
from .call_form import Call
from .families import CALL_FORMS, AnswerFormat, find_format
from .json_calls import write_json_call
from .reader import AnswerReader, Begins, Text
from .rules import GrammarRules
from .tagged_calls import HERMES

_LETTERS = string.ascii_letters + string.digits
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_KIMI_ID = re.compile(r"(?:functions\.)?.+:\d+")
_WRITTEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\[0-9\][^/]*/')  # literals; the number of Kimi's calls


def call_id(call: Call) -> str:
    """Return an id for a call: nine letters and digits, which every family's template takes.

    Of a model whose template tells a call's function by its id, that which the model wrote.
    """
    if call.id is not None and (_ID.fullmatch(call.id) or _KIMI_ID.fullmatch(call.id)):
        return call.id
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def turns_for_template(
    turns: Sequence[Mapping[str, Any]], tokenizer: TokenizerWrapper
) -> list[dict[str, Any]]:
    """Return copies of turns, with ids of calls and thoughts as the model's template has them.

    Mistral's templates take ids of nine letters and digits alone, Kimi's those that name the
    function; others are given what the turns have. Harmony's have thoughts as "thinking".

    Args:
        turns: normalised, see `turns.normalise_turns`.
        tokenizer: whose template it is.
    """
    found = [dict(one) for one in turns]
    has_calls = any(one.get("tool_calls") for one in found)
    has_thoughts = any(one.get("reasoning_content") for one in found)
    if not has_calls and not has_thoughts:
        return found
    name = find_format(tokenizer).name
    if has_calls and name in ("mistral", "mistral_v3", "kimi_k2"):
        return _with_ids(found, in_kimis_form=name == "kimi_k2")
    if name == "harmony":
        return [*map(_with_thinking, found)]
    return found


def _with_ids(turns: Sequence[dict[str, Any]], *, in_kimis_form: bool) -> list[dict[str, Any]]:
    """Return the turns with other ids of calls, and of their results alike.

    A call without an id gets that of its place among all.
    """
    answered = find_answered_calls(turns)
    ids: dict[tuple[int, int], str] = {}
    found = []
    for number, turn in enumerate(turns):
        own = dict(turn)
        if calls := turn.get("tool_calls"):
            for place, call in enumerate(calls):
                given = call.get("id") or len(ids)
                id = _kimi_id(call, len(ids)) if in_kimis_form else _short_id(given)
                ids[number, place] = id
            own["tool_calls"] = [{**call, "id": ids[number, n]} for n, call in enumerate(calls)]
        elif turn["role"] == "tool":
            given = turn.get("tool_call_id") or ""
            own["tool_call_id"] = ids.get(answered.get(number, (-1, -1))) or _short_id(given)
        found.append(own)
    return found


def _short_id(given: Any) -> str:
    """Return an id of nine letters and digits: the given one, or one that belongs to it."""
    text = str(given)
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _kimi_id(call: Mapping[str, Any], number: int) -> str:
    """Return the id of a call, which names its function; the given one if it does."""
    id = str(call.get("id"))
    name = call.get("function", call)["name"]
    return id if _KIMI_ID.fullmatch(id) else f"functions.{name}:{number}"


def _with_thinking(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with its thought as Harmony's template reads it: beside calls, the template
    takes either a thought or a text."""
    thought = turn.pop("reasoning_content", "")
    if thought and turn.get("tool_calls") and turn.get("content"):
        return {**turn, "thinking": f"{thought}{BETWEEN_TEXTS}{turn['content']}", "content": ""}
    return {**turn, "thinking": thought} if thought else turn


class _OneText(GrammarRules):
    """Writes out a grammar that allows one text: as the expression of that text alone."""

    def __init__(self) -> None:
        """Begin with nothing: no rules are kept, and special tokens are texts too."""

    def literal(self, text: str) -> str:
        """Return a text as a JSON text."""
        return json.dumps(text)

    def json_value(self, schema: Any) -> str:
        """Return the JSON of the schema's only value as a JSON text."""
        if "const" in schema:
            value = schema["const"]
        else:
            value = {name: one["const"] for name, one in schema["properties"].items()}
        return json.dumps(json.dumps(value, ensure_ascii=False))

    def text_up_to(self, mark: str, schema: Any, *, in_lines: bool = False) -> str:
        """Return the schema's only text with the mark as a JSON text."""
        line = "\n" if in_lines else ""
        return json.dumps(schema["const"] + line + mark)

    def add(self, body: str, options: str = "", *, is_terminal: bool = False) -> str:
        """Return the body."""
        return body


def write_calls(calls: Sequence[Mapping[str, Any]], format: AnswerFormat) -> str:
    """Return the text of calls as a model writes them, for a template that does not show calls.

    It is what the grammar of the family's calls allows, if the arguments are given. Of a model
    whose form of calls is unknown, or is told by headers of messages, it is Hermes's, JSON between
    `<tool_call>` and `</tool_call>`.

    Args:
        calls: of a turn, normalised.
        format: of the model's answers.
    """
    form = CALL_FORMS.get(format.name or "", HERMES)
    rules = _OneText()
    write = form.call or write_json_call()
    texts = []
    for number, call in enumerate(calls):
        function = call.get("function", call)
        arguments = {name: {"const": value} for name, value in function["arguments"].items()}
        schema = {"type": "object", "properties": arguments, "required": [*arguments]}
        expression = write(rules, function["name"], schema)
        found = _WRITTEN.findall(expression)
        texts.append("".join(json.loads(one) if one[0] == '"' else f"{number}" for one in found))
    open = "" if form.stands_alone or not form.opens else form.opens[0]
    groups = [texts] if form.between is not None else [[text] for text in texts]
    return "\n".join(
        f"{open}{form.before}{(form.between or '').join(group)}{form.after}{form.end}"
        for group in groups
    )


def answer_turn(text: str, format: AnswerFormat, begins: Begins) -> dict[str, Any]:
    """Return the assistant's turn of a chat for an answer.

    Templates tell thoughts from text by their marks, but for those of answers in channels, which
    take no marks: the turn then has the text alone, and the thoughts beside it.

    Args:
        text: of the answer, with all marks.
        format: the model's.
        begins: what the answer begins with.
    """
    if format.channels is None:
        return {"role": "assistant", "content": text}
    reader = AnswerReader(format, begins=begins)
    pieces = [*reader.read(text), *reader.end(is_cut=False)]
    texts = [one for one in pieces if isinstance(one, Text)]
    thought = "".join(one.text for one in texts if one.is_thought)
    content = "".join(one.text for one in texts if not one.is_thought)
    turn = {"role": "assistant", "content": content}
    return {**turn, "reasoning_content": thought} if thought else turn
