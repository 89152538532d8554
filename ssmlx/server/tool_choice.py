"""Which tools a request offers, and whether the answer has to call one of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .fields import Body, check_field, check_value, read_typed


class ToolChoice(NamedTuple):
    """The tools that a request offers, and those of which it forces a call."""

    tools: list[Any] | None  # those that are offered; None if there are none
    forced: tuple[str, ...]  # names of which the answer has to call one; () if it need not
    is_parallel: bool  # whether it may have several calls
    left_out: tuple[str, ...]  # tools that are not functions, such as "tools[1] (custom)"


_EXPECTED = "auto, none, required, any, or the name of one of the tools"


def read_tool_choice(body: Body) -> ToolChoice:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`, by OpenAI's or Anthropic's names."""
    choice = body.get("tool_choice")
    inner: Mapping[str, Any] = choice if isinstance(choice, Mapping) else {"type": choice}
    kind = inner.get("type")
    is_parallel = read_typed(body, "parallel_tool_calls", bool, True)
    is_parallel = is_parallel and inner.get("disable_parallel_tool_use") is not True
    tools, left_out = _split_functions(read_typed(body, "tools", list, []))
    every = [_tool_name(one) for one in tools or ()]
    known = {*every} - {None}
    if kind == "allowed_tools":
        allowed = inner.get("allowed_tools", inner)
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        ok = isinstance(listed, list) and mode in ("auto", "required")
        names = dict.fromkeys(map(_tool_name, listed or ())) if ok else {}
        _check_choice(bool(names) and names.keys() <= known, choice)
        tools = [one for one in tools or () if _tool_name(one) in names]
        forced = _checked_names([*names]) if mode == "required" else ()
        return ToolChoice(tools, forced, is_parallel, left_out)
    if kind in ("function", "tool"):
        name = _tool_name(inner)
        _check_choice(name in known, choice)
        return ToolChoice(tools, _checked_names([name]), False, left_out)  # one call alone
    _check_choice(kind in (None, "auto", "none", "required", "any"), choice)
    is_forced = kind in ("required", "any")
    _check_choice(bool(every) or not is_forced, choice)
    forced = _checked_names(every) if is_forced else ()
    return ToolChoice(None if kind == "none" else tools, forced, is_parallel, left_out)


def _split_functions(tools: Sequence[Any]) -> tuple[list[Any] | None, tuple[str, ...]]:
    """Return the functions among tools, or None if there are none, and what the others are, such as
    "tools[1] (custom)"; RequestError for a tool that is not an object."""
    functions = []
    others = []
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        check_value(isinstance(tool, Mapping), place, tool, "an object")
        kind = tool.get("type", "function")
        # The others are run by a hosted server, or their calls have no JSON.
        if kind == "function":
            functions.append(tool)
        else:
            others.append(f"{place} ({kind})")
    return functions or None, tuple(others)


def _check_choice(ok: bool, choice: Any) -> None:
    check_value(ok, "tool_choice", choice, _EXPECTED)


def _checked_names(names: Sequence[str | None]) -> tuple[str, ...]:
    found = tuple(one for one in names if one is not None)
    check_field(len(found) == len(names), "tools has a function without a name", "names", "tools")
    return found


def _tool_name(tool: Any) -> str | None:
    """Return the name of a tool, or of a choice of one, if it is a text."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
