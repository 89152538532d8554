"""The turns of a chat, in whatever form they were given: checked, and made into one form."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import InputError, quoted
from .json_files import found_in_json, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")

# One turn of a chat: {"role": one of `ROLES` or the template's own, "content": text}. The content
# may be parts, [{"type": "text", "text": ...}, ...]; None is an empty text in a turn of the
# assistant's or a tool's. Other fields go to the template as they are, unless they are None.
Message = Mapping[str, Any]

BETWEEN_TEXTS = "\n\n"  # between texts of turns, or of blocks, that become one turn

_TEXT_TYPES = ("text", "input_text", "output_text")
# what a part that is not a text is called, by its type
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "an image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "an audio clip"),
    **dict.fromkeys(("video", "video_url", "input_video"), "a video"),
    **dict.fromkeys(("file", "file_url", "input_file", "container_upload"), "a file"),
    "document": "a document",
}
# Where clients put what the assistant thought; the first name stays.
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SYSTEM_ROLES = ("system", "developer")


class TurnError(InputError):
    """A turn of a chat, or what is offered beside the turns, that cannot be taken."""

    def __init__(
        self,
        place: str,  # of the fault, such as "messages[1].content[0]"
        fault: str,  # such as "is an image"
        expected: str,
        do: str = "correct the turns",
    ) -> None:
        super().__init__(f"{place} {fault}", expected=expected, do=do)
        self.place = place


def _require(ok: bool, place: str, found: Any, expected: str) -> None:
    if not ok:
        raise TurnError(place, f"is {found_in_json(found)}", expected)


def normalise_turns(
    messages: Any,
    place: str = "messages",  # what they are called in messages
) -> list[dict[str, Any]]:
    """Copies of chat turns in one form.

    Content is one text; what the assistant thought is its "reasoning_content"; calls have their
    arguments as an object, OpenAI's custom tools and older `function_call` too; a tool's turn has
    the "name" of the function that it answers. Fields that are None are left out, others stay.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    _require(is_list, place, messages, "a list of turns, each with role and content")
    turns = [_normalise_turn(turn, f"{place}[{n}]") for n, turn in enumerate(messages)]
    for number, (calling, at) in find_answered_calls(turns).items():
        if not turns[number].get("name"):
            call = turns[calling]["tool_calls"][at]
            turns[number]["name"] = call.get("function", call)["name"]
    return turns


def _normalise_turn(turn: Any, place: str) -> dict[str, Any]:
    is_object = isinstance(turn, Mapping)
    _require(is_object, place, turn, "an object with role and content")
    own = {name: value for name, value in turn.items() if value is not None}
    for name in ("role", "name", *_THOUGHT_FIELDS):
        ok = isinstance(own.get(name, ""), str) and (name != "role" or bool(own.get(name)))
        _require(ok, f"{place}.{name}", turn.get(name), "a text")
    if own["role"] == "function":
        own["role"] = "tool"
    calls = own.pop("tool_calls", [])
    is_list = isinstance(calls, list | tuple)
    _require(is_list, f"{place}.tool_calls", calls, "a list of calls")
    made = [_normalise_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if "function_call" in own:
        call = {"type": "function", "function": own.pop("function_call")}
        made.append(_normalise_call(call, f"{place}.function_call"))
    if made:
        own["tool_calls"] = made
    own["content"], thought_in_parts = read_content(own, f"{place}.content")
    thoughts = [own.pop(name, "") for name in _THOUGHT_FIELDS]
    if thought := next(filter(None, [*thoughts, thought_in_parts]), ""):
        own["reasoning_content"] = thought
    return own


def read_content(
    turn: Message,
    place: str,  # of the content, for messages
) -> tuple[str, str]:
    """The text of a turn's content, and that of its parts that are reasoning."""
    content = turn.get("content")
    is_assistants = turn["role"] == "assistant"
    if content is None and (is_assistants or turn["role"] == "tool"):
        said = turn.get("refusal")  # the assistant refused, and said nothing else
        content = said if isinstance(said, str) else ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list | tuple):
        fault = "is null or missing" if content is None else f"is {found_in_json(content)}"
        raise TurnError(place, fault, "a text, or parts of type text")
    texts = []
    thoughts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if is_assistants and kind in ("thinking", "reasoning"):
            thoughts.append(thought_text(part))
        # Mistral's models have an example of reasoning in the system's turn, between these marks.
        elif turn["role"] in _SYSTEM_ROLES and kind == "thinking":
            texts.append(f"[THINK]{thought_text(part)}[/THINK]")
        elif is_assistants and kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            texts.append(part_text(part, f"{place}[{number}]"))
    return "".join(texts), "".join(thoughts)


def thought_text(part: Mapping[str, Any]) -> str:
    """The text of a part or block of type thinking or reasoning: its own, its parts', or its
    summary's."""
    for name in ("thinking", "text", "reasoning", "content", "summary"):
        said = part.get(name)
        inner = said if isinstance(said, list | tuple) else [{"text": said}]
        texts = [one.get("text") for one in inner if isinstance(one, Mapping)]
        if found := "".join(one for one in texts if isinstance(one, str)):
            return found
    return ""


def is_content_part(kind: Any) -> bool:
    """Whether a part of this type belongs to a content: a text, or media."""
    return isinstance(kind, str) and (kind in _TEXT_TYPES or kind in _MEDIA)


def part_text(
    part: Any,
    place: str,  # for messages
) -> str:
    """The text of a part; images, files and all else that is not text are refused."""
    if isinstance(part, str):
        return part
    _require(isinstance(part, Mapping), place, part, "a part of type text")
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in _TEXT_TYPES:
        expected = "text: only text is supported; image and audio encoders are not run"
        raise TurnError(place, f"is {kind_in_words(kind)}", expected)
    text = part.get("text")
    _require(isinstance(text, str), f"{place}.text", text, "a text")
    return str(text)


def is_text_part(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXT_TYPES
    return is_text and isinstance(part.get("text"), str)


def kind_in_words(kind: Any) -> str:
    """What a part is, by its type, such as "an image"."""
    is_known = isinstance(kind, str) and kind in _MEDIA
    return _MEDIA[kind] if is_known else f"of type {quoted(kind)}"


def _normalise_call(call: Any, place: str) -> dict[str, Any]:
    """A copy of a call, whose name and arguments are in its "function" or in the call itself."""
    _require(isinstance(call, Mapping), place, call, "a call: an object")
    own = {name: value for name, value in call.items() if value is not None}
    if isinstance(custom := own.pop("custom", None), Mapping):
        own["type"] = "function"
        own["function"] = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    inner = own.get("function", own)
    inside = f"{place}.function" if "function" in own else place
    _require(isinstance(inner, Mapping), inside, inner, "an object with a name")
    name = inner.get("name")
    ok = isinstance(name, str) and bool(name)
    _require(ok, f"{inside}.name", name, "the name of a function")
    arguments = parse_arguments(inner.get("arguments"), f"{inside}.arguments")
    made = {**inner, "arguments": arguments}
    return {**own, "function": made} if "function" in own else made


def parse_arguments(
    arguments: Any,  # an object, or its JSON text
    place: str,  # for messages
) -> dict[str, Any]:
    """The arguments of a call as an object, empty for None, a blank text and "null"."""
    found = arguments
    if isinstance(arguments, str):
        try:
            found = parse_json(arguments) if arguments.strip() else None
        except ValueError:
            found = arguments
    if found is None:
        return {}
    expected = 'an object such as {"a": 1}, or its JSON text'
    _require(isinstance(found, Mapping), place, arguments, expected)
    return dict(found)


def find_answered_calls(
    turns: Sequence[Message],  # their calls are objects
) -> dict[int, tuple[int, int]]:
    """The turn and place of the call that each result belongs to, by the number of the tool's turn.

    That is the last call before it with the result's id; of several in a turn, the next one.
    Results without such a call belong to those calls of the last turn with calls that have none, in
    order; results that no call is left for are missing.
    """
    found: dict[int, tuple[int, int]] = {}
    by_id: dict[str, deque[tuple[int, int]]] = {}
    unmatched: dict[int, list[int]] = {}  # results, by the last turn with calls
    calling = -1
    for number, turn in enumerate(turns):
        if calls := turn.get("tool_calls"):
            calling = number
            own: dict[str, deque[tuple[int, int]]] = {}
            for place, call in enumerate(calls):
                if id := call.get("id"):
                    own.setdefault(str(id), deque()).append((number, place))
            by_id |= own
        elif turn["role"] == "tool":
            if of_id := by_id.get(str(turn.get("tool_call_id"))):
                found[number] = of_id[0]
                if len(of_id) > 1:
                    of_id.popleft()
            elif calling >= 0:
                unmatched.setdefault(calling, []).append(number)
    answered = {*found.values()}
    for number, results in unmatched.items():
        places = ((number, n) for n in range(len(turns[number]["tool_calls"])))
        left = [place for place in places if place not in answered]
        found |= zip(results, left, strict=False)
    return found


def with_one_call_a_turn(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns with at most one call each, followed by the results of that call."""
    several = {n for n, turn in enumerate(turns) if len(turn.get("tool_calls") or ()) > 1}
    results: dict[tuple[int, int], list[Message]] = {}
    moved = set[int]()
    for number, call in find_answered_calls(turns).items():
        if call[0] in several:
            results.setdefault(call, []).append(turns[number])
            moved.add(number)
    found: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if number in several:
            for place, call in enumerate(turn["tool_calls"]):
                rest = {"role": turn["role"], "content": ""} if place else turn
                found.append({**rest, "tool_calls": [call]})
                found += map(dict, results.get((number, place), ()))
        elif number not in moved:
            found.append(dict(turn))
    return found


def with_texts_before_calls(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns in which what is said beside calls is a turn of its own before them."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        own = dict(turn)
        if turn.get("tool_calls") and turn["content"].strip():
            calls = own.pop("tool_calls")
            found.append(own)
            own = {"role": turn["role"], "content": "", "tool_calls": calls}
        found.append(own)
    return found


def join_system_turns(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns in which the system's in a row are one, and so are the developer's."""
    return _join_neighbours(turns, _SYSTEM_ROLES, same_role=True)


def other_arrangements(
    turns: Sequence[Message],  # normalised
) -> Iterator[list[dict[str, Any]]]:
    """What the turns may become if a template refuses them, each going further than the one before.

    Turns of one role in a row become one, the developer's after the system's too. Turns of the
    system's become the user's: those after the first turn, then all. No word is lost, and none
    changes its place.
    """
    found = [list(map(dict, turns))]
    for keeps in (len(turns), 1, 0):  # turns at the beginning whose role stays
        said = [
            {**turn, "role": "user"} if number >= keeps and is_systems(turn) else dict(turn)
            for number, turn in enumerate(_join_neighbours(turns, _SYSTEM_ROLES))
        ]
        joined = _join_neighbours(said, ("user", "assistant"), same_role=True)
        if joined not in found:
            found.append(joined)
            yield joined


def is_systems(turn: Message) -> bool:
    """Whether a turn is the system's or the developer's."""
    return turn["role"] in _SYSTEM_ROLES


def _join_neighbours(
    turns: Sequence[Message],  # normalised
    roles: Sequence[str],
    same_role: bool = False,  # join only turns of the same role
) -> list[dict[str, Any]]:
    """Join turns of these roles that follow each other; the first one's role stays."""
    rows: list[list[Message]] = []
    for turn in turns:
        row = rows[-1] if rows else []
        joins = bool(row) and {row[0]["role"], turn["role"]} <= {*roles}
        joins = joins and not row[-1].get("tool_calls")  # results of the calls may come between
        if joins and (not same_role or row[0]["role"] == turn["role"]):
            row.append(turn)
        else:
            rows.append([turn])
    return [_join(row) for row in rows]


def _join(row: Sequence[Message]) -> dict[str, Any]:
    """One turn with all texts, otherwise what the last one says."""
    both: dict[str, Any] = {}
    for turn in row:
        both |= turn
    both["role"] = row[0]["role"]
    for name in ("content", "reasoning_content"):
        if len(row) > 1 and (texts := [one[name] for one in row if one.get(name)]):
            both[name] = BETWEEN_TEXTS.join(texts)
    return both
