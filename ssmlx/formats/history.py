"""Earlier answers as a family's template takes them: ids of calls, thoughts, calls as text."""

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
    """The id that the model wrote if its family has ids, else nine letters and digits, which any
    template accepts."""
    if call.id is not None and (_ID.fullmatch(call.id) or _KIMI_ID.fullmatch(call.id)):
        return call.id
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def turns_for_template(
    turns: Sequence[Mapping[str, Any]],  # normalised, see `turns.normalise_turns`
    tokenizer: TokenizerWrapper,
) -> list[dict[str, Any]]:
    """Copies of turns, with ids of calls and thoughts as the model's template has them."""
    found = [dict(one) for one in turns]
    has_calls = any(one.get("tool_calls") for one in found)
    has_thoughts = any(one.get("reasoning_content") for one in found)
    if not has_calls and not has_thoughts:
        return found
    name = find_format(tokenizer).name
    # Mistral's templates take ids of nine letters and digits only, Kimi's those that name the
    # function.
    if has_calls and name in ("mistral", "mistral_v3", "kimi_k2"):
        return _with_ids(found, in_kimis_form=name == "kimi_k2")
    if name == "harmony":
        return [*map(_with_thinking, found)]
    return found


def _with_ids(turns: Sequence[dict[str, Any]], *, in_kimis_form: bool) -> list[dict[str, Any]]:
    """Calls and results with ids. A call without one gets that of its number among all; results get
    the ids of their calls."""
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
    """Nine letters and digits: the given id, or one derived from it."""
    text = str(given)
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _kimi_id(call: Mapping[str, Any], number: int) -> str:
    """An id that names the call's function."""
    id = str(call.get("id"))
    name = call.get("function", call)["name"]
    return id if _KIMI_ID.fullmatch(id) else f"functions.{name}:{number}"


def _with_thinking(turn: dict[str, Any]) -> dict[str, Any]:
    # Harmony's template reads thoughts as "thinking"; beside calls, it takes either a thought or a
    # text.
    thought = turn.pop("reasoning_content", "")
    if thought and turn.get("tool_calls") and turn.get("content"):
        return {**turn, "thinking": f"{thought}{BETWEEN_TEXTS}{turn['content']}", "content": ""}
    return {**turn, "thinking": thought} if thought else turn


class _OneText(GrammarRules):
    """Rules of a grammar that allows one text, which is the expression itself."""

    def __init__(self) -> None:
        pass  # no rules are kept, and special tokens are texts too

    def literal(self, text: str) -> str:
        return json.dumps(text)

    def json_value(self, schema: Any) -> str:
        if "const" in schema:
            value = schema["const"]
        else:
            value = {name: one["const"] for name, one in schema["properties"].items()}
        return json.dumps(json.dumps(value, ensure_ascii=False))

    def text_up_to(self, mark: str, schema: Any, *, in_lines: bool = False) -> str:
        line = "\n" if in_lines else ""
        return json.dumps(schema["const"] + line + mark)

    def add(self, body: str, options: str = "", *, is_terminal: bool = False) -> str:
        return body


def write_calls(
    calls: Sequence[Mapping[str, Any]],  # of a turn, normalised
    format: AnswerFormat,
) -> str:
    """The text of calls as a model writes them, for a template that does not show calls."""
    # JSON between <tool_call> and </tool_call> if the form is unknown, or given in message headers.
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


def answer_turn(
    text: str,  # with all marks
    format: AnswerFormat,
    begins: Begins,
) -> dict[str, Any]:
    """The assistant's turn of a chat for an answer."""
    if format.channels is None:  # templates find thoughts in the text by their marks
        return {"role": "assistant", "content": text}
    reader = AnswerReader(format, begins=begins)
    pieces = [*reader.read(text), *reader.end(is_cut=False)]
    texts = [one for one in pieces if isinstance(one, Text)]
    thought = "".join(one.text for one in texts if one.is_thought)
    content = "".join(one.text for one in texts if not one.is_thought)
    turn = {"role": "assistant", "content": content}
    return {**turn, "reasoning_content": thought} if thought else turn
