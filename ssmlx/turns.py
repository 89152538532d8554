"""The turns of a chat, in whatever form they were given: checked, and made into one form."""

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InputError, quoted
from .json_files import found_in_json, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]
"""One turn of a chat: {"role": one of `ROLES` or the template's own, "content": text}. The content
may be parts, [{"type": "text", "text": ...}, ...]; None is an empty text in a turn of the
assistant's or a tool's. Other fields go to the template as they are, those that are None do not."""

_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "an image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "an audio clip"),
    **dict.fromkeys(("video", "video_url", "input_video"), "a video"),
    **dict.fromkeys(("file", "file_url", "input_file", "container_upload"), "a file"),
    "document": "a document",
}
"""What a part that is no text is called, by its type."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_BETWEEN = "\n\n"  # texts of turns that become one


class TurnError(InputError):
    """A turn of a chat that cannot be taken.

    Args:
        place: of the fault, such as "messages[1].content[0]"; the message begins with it.
        fault: what is wrong there, such as "is an image".
        expected: what was expected in its place.
    """

    def __init__(self, place: str, fault: str, expected: str) -> None:
        super().__init__(f"{place} {fault}", expected=expected, do="correct the turns")
        self.place = place


def _require(ok: bool, place: str, fault: str, expected: str) -> None:
    """Raise `TurnError(place, fault, expected)` unless `ok`."""
    if not ok:
        raise TurnError(place, fault, expected)


def normalise_turns(messages: Any, place: str = "messages") -> list[dict[str, Any]]:
    """Copies of chat turns in one form.

    A content is one text, whatever parts it had; that the assistant thinks stands in
    "reasoning_content". Calls have their arguments as an object: a custom tool's input becomes its
    argument `input`, and OpenAI's older `function_call` and role "function" become a call and a
    tool's turn. Fields that are None are left out. Roles and other fields stay, whatever they are.

    Args:
        messages: what should be turns; no turns give none.
        place: what they are called in messages of errors.

    Raises:
        TurnError: it is no list of turns, or a turn is none; it says which, and what is wrong.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    _require(
        is_list,
        place,
        f"is {found_in_json(messages)}",
        "a list of turns, each with role and content",
    )
    return [_normalise_turn(turn, f"{place}[{n}]") for n, turn in enumerate(messages)]


def _normalise_turn(turn: Any, place: str) -> dict[str, Any]:
    is_object = isinstance(turn, Mapping)
    _require(is_object, place, f"is {found_in_json(turn)}", "an object with role and content")
    own = {name: value for name, value in turn.items() if value is not None}
    for name in ("role", "name", *_REASONING):
        ok = isinstance(own.get(name, ""), str) and (name != "role" or bool(own.get(name)))
        _require(ok, f"{place}.{name}", f"is {found_in_json(turn.get(name))}", "a text")
    if own["role"] == "function":
        own["role"] = "tool"
    calls = own.pop("tool_calls", [])
    is_list = isinstance(calls, list | tuple)
    _require(is_list, f"{place}.tool_calls", f"is {found_in_json(calls)}", "a list of calls")
    made = [_normalise_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if "function_call" in own:
        call = {"type": "function", "function": own.pop("function_call")}
        made.append(_normalise_call(call, f"{place}.function_call"))
    if made:
        own["tool_calls"] = made
    own["content"], thought = read_content(own, f"{place}.content")
    if thought and not any(own.get(name) for name in _REASONING):
        own["reasoning_content"] = thought
    return own


def read_content(turn: Message, place: str) -> tuple[str, str]:
    """The text of a turn's content, and that of its parts that are reasoning.

    Args:
        turn: its role and its content are read.
        place: of the content, for messages of errors.

    Raises:
        TurnError: it is no content of text.
    """
    content = turn.get("content")
    is_assistants = turn["role"] == "assistant"
    if content is None and (is_assistants or turn["role"] == "tool"):
        return "", ""
    if isinstance(content, str):
        return content, ""
    fault = "is null or missing" if content is None else f"is {found_in_json(content)}"
    if not isinstance(content, list | tuple):
        raise TurnError(place, fault, "a text, or parts of type text")
    texts = []
    thoughts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if is_assistants and kind in ("thinking", "reasoning"):
            said = part.get("thinking", part.get("text", part.get("reasoning")))
            thoughts.append(said if isinstance(said, str) else "")
        elif is_assistants and kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            texts.append(part_text(part, f"{place}[{number}]"))
    return "".join(texts), "".join(thoughts)


def is_content_part(kind: Any) -> bool:
    """Whether something of this type is a part of a content: a text, or media."""
    return isinstance(kind, str) and (kind in _TEXT_TYPES or kind in _MEDIA)


def part_text(part: Any, place: str) -> str:
    """The text of a part of a content.

    Args:
        part: an object of a type of text, or a text.
        place: of the part, for the message of an error.

    Raises:
        TurnError: it is an image, a file, or anything else that is no text.
    """
    if isinstance(part, str):
        return part
    _require(isinstance(part, Mapping), place, f"is {found_in_json(part)}", "a part of type text")
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in _TEXT_TYPES:
        expected = "text alone: models are run here without what sees or hears"
        raise TurnError(place, f"is {kind_in_words(kind)}", expected)
    text = part.get("text")
    _require(isinstance(text, str), f"{place}.text", f"is {found_in_json(text)}", "a text")
    return str(text)


def is_text_part(part: Any) -> bool:
    """Whether a part of a content has a text."""
    is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXT_TYPES
    return is_text and isinstance(part.get("text"), str)


def kind_in_words(kind: Any) -> str:
    """What a part is, by its type, such as "an image"."""
    is_known = isinstance(kind, str) and kind in _MEDIA
    return _MEDIA[kind] if is_known else f"of type {quoted(kind)}"


def _normalise_call(call: Any, place: str) -> dict[str, Any]:
    """A copy of a call of a tool, its arguments as an object.

    Its name and arguments stand in its "function", or in the call itself.
    """
    _require(isinstance(call, Mapping), place, f"is {found_in_json(call)}", "a call: an object")
    own = {name: value for name, value in call.items() if value is not None}
    if isinstance(custom := own.pop("custom", None), Mapping):
        own["type"] = "function"
        own["function"] = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    inner = own.get("function", own)
    inside = f"{place}.function" if "function" in own else place
    _require(
        isinstance(inner, Mapping), inside, f"is {found_in_json(inner)}", "an object with a name"
    )
    name = inner.get("name")
    ok = isinstance(name, str) and bool(name)
    _require(ok, f"{inside}.name", f"is {found_in_json(name)}", "the name of a function")
    arguments = parse_arguments(inner.get("arguments"), f"{inside}.arguments")
    made = {**inner, "arguments": arguments}
    return {**own, "function": made} if "function" in own else made


def parse_arguments(arguments: Any, place: str) -> dict[str, Any]:
    """The arguments of a call as an object; None, a blank text and "null" are none.

    Args:
        arguments: an object, or its JSON text.
        place: of the arguments, for the message of an error.

    Raises:
        TurnError: they are neither.
    """
    found = arguments
    if isinstance(arguments, str):
        try:
            found = parse_json(arguments) if arguments.strip() else None
        except ValueError:
            found = arguments
    if found is None:
        return {}
    expected = 'an object such as {"a": 1}, or its JSON text'
    _require(isinstance(found, Mapping), place, f"is {found_in_json(arguments)}", expected)
    return dict(found)


def join_system_turns_in_a_row(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """The same turns, with those of the system in a row as one, a blank line between their texts;
    so with the developer's."""
    return _join_in_a_row(turns, ("system", "developer"), same_role=True)


def other_arrangements(turns: Sequence[Message]) -> list[list[dict[str, Any]]]:
    """What the same turns may become where a template refuses them, or leaves some out.

    Each of these goes further than the one before. Turns of one role in a row become one, the
    developer's behind the system's too. Turns of the system's become the user's: those behind the
    first turn, then all. No word is lost, and none changes its place.

    Args:
        turns: as `normalise_turns` returns them.

    Returns:
        The arrangements that differ from `turns` and from those before.
    """
    found = [list(map(dict, turns))]
    for keeps in (len(turns), 1, 0):  # turns at the beginning whose role stays
        said = [
            {**turn, "role": "user"} if number >= keeps and _is_system(turn) else dict(turn)
            for number, turn in enumerate(_join_in_a_row(turns, ("system", "developer")))
        ]
        joined = _join_in_a_row(said, ("user", "assistant"), same_role=True)
        if joined not in found:
            found.append(joined)
    return found[1:]


def _is_system(turn: Message) -> bool:
    return turn["role"] in ("system", "developer")


def _join_in_a_row(
    turns: Sequence[Message], roles: Sequence[str], same_role: bool = False
) -> list[dict[str, Any]]:
    """Join turns of these roles that follow each other; the first one's role stays.

    A turn with calls is not joined to a later one, as results of the calls may stand between.

    Args:
        turns: normalised.
        roles: whose turns are joined.
        same_role: whether only turns of the same role are.
    """
    joined: list[dict[str, Any]] = []
    for turn in turns:
        last = joined[-1] if joined else {"role": None}
        joins = {last["role"], turn["role"]} <= {*roles} and not last.get("tool_calls")
        if joins and (not same_role or last["role"] == turn["role"]):
            both = {**last, **turn, "role": last["role"]}
            for name in ("content", *_REASONING):
                if texts := [str(one[name]) for one in (last, turn) if one.get(name)]:
                    both[name] = _BETWEEN.join(texts)
            joined[-1] = both
        else:
            joined.append(dict(turn))
    return joined
