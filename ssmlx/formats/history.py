"""What templates are given of earlier answers: ids of calls, and thoughts, as a family has them."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .call_form import Call
from .families import AnswerFormat, find_format
from .reader import AnswerReader, Begins, Text

_LETTERS = string.ascii_letters + string.digits
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_KIMI_ID = re.compile(r"(?:functions\.)?.+:\d+")


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
    function; others are given what the turns have. Harmony's have thoughts as "thinking", and one
    call a turn.

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
        return _for_harmony(found)
    return found


def _with_ids(turns: list[dict[str, Any]], *, in_kimis_form: bool) -> list[dict[str, Any]]:
    """Return the turns with other ids of calls, and of their results alike.

    A call or a result without an id gets that of its place among them.
    """
    id_by_given: dict[str, str] = {}
    unanswered: list[str] = []
    number = 0
    for turn in turns:
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            unanswered = []
            own = []
            for call in calls:
                given = call.get("id") if isinstance(call, Mapping) else None
                id = _kimi_id(call, number) if in_kimis_form else _short_id(given or number)
                id_by_given[str(given)] = id
                unanswered.append(id)
                own.append({**call, "id": id} if isinstance(call, Mapping) else call)
                number += 1
            turn["tool_calls"] = own
        elif turn.get("role") == "tool":
            given = turn.get("tool_call_id")
            answered = id_by_given.get(str(given)) if given else next(iter(unanswered), None)
            turn["tool_call_id"] = answered or _short_id(given or "")
            unanswered = [one for one in unanswered if one != answered]
    return turns


def _short_id(given: Any) -> str:
    """Return an id of nine letters and digits: the given one, or one that belongs to it."""
    text = str(given)
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _kimi_id(call: Any, number: int) -> str:
    """Return the id of a call, which names its function; the given one where it does."""
    id = str(call.get("id")) if isinstance(call, Mapping) else ""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return id if _KIMI_ID.fullmatch(id) else f"functions.{name}:{number}"


def _for_harmony(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with thoughts as "thinking", and each call in a turn, with its result."""
    found: list[dict[str, Any]] = []
    results: dict[Any, list[dict[str, Any]]] = {}
    for turn in turns:
        if turn.get("role") == "tool" and turn.get("tool_call_id") in results:
            results[turn["tool_call_id"]].append(turn)
            continue
        thought = turn.pop("reasoning_content", None) or turn.get("thinking")
        calls = turn.get("tool_calls")
        if thought:
            turn["thinking"] = thought
        if not isinstance(calls, list) or not calls:
            found.append(turn)
            continue
        if thought and turn.get("content"):  # which the template takes one of
            turn["thinking"] = f"{thought}\n\n{turn['content']}"
            turn["content"] = ""
        results = {}
        for place, call in enumerate(calls):
            one = {**turn, "tool_calls": [call]}
            if place:
                one["content"] = ""
                one.pop("thinking", None)
            found.append(one)
            if len(calls) > 1:  # results stand after their calls
                place_of_result: list[dict[str, Any]] = []
                found.append({"results": place_of_result})
                results[call.get("id") if isinstance(call, Mapping) else None] = place_of_result
    return [one for turn in found for one in turn.get("results", [turn])]


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
