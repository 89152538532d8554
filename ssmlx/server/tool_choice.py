"""Which tools a request offers, and whether the answer has to call one of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import quoted
from . import asks
from .asks import Body


class ToolChoice(NamedTuple):
    tools: list[Any] | None  # those that are offered
    forced: tuple[str, ...]  # names of which the answer has to call one; () where it need not
    is_parallel: bool  # whether it may have several calls


_EXPECTED = "auto, none, required or any, or the name of one of the tools"


def read_tool_choice(body: Body) -> ToolChoice:
    """Of a request's `tools`, `tool_choice` and `parallel_tool_calls`, by OpenAI's or Anthropic's
    names: `required` and `any` are one, and so are a named `function` and a `tool`."""
    choice = body.get("tool_choice")
    inner: Mapping[str, Any] = choice if isinstance(choice, Mapping) else {"type": choice}
    kind = inner.get("type")
    tools = asks.typed(body, "tools", list) or None
    is_parallel = asks.typed(body, "parallel_tool_calls", bool, True)
    is_parallel = is_parallel and inner.get("disable_parallel_tool_use") is not True
    for tool in tools or ():
        what = tool.get("type") if isinstance(tool, Mapping) else None
        expected = "functions, which the client runs: this server runs no tools"
        asks.check(what in (None, "function"), f"tools has {quoted(what)}", expected, "tools")
    known = [_name_of(one) for one in tools or ()]
    if kind == "allowed_tools":
        allowed = inner.get("allowed_tools", inner)
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        ok = isinstance(listed, list) and mode in ("auto", "required")
        names = [_name_of(one) for one in listed or ()] if ok else []
        _check(ok and bool(names) and all(one in known for one in names), choice)
        tools = [one for one in tools or () if _name_of(one) in names]
        return ToolChoice(tools, _texts(names) if mode == "required" else (), is_parallel)
    if kind in ("function", "tool"):
        name = _name_of(inner)
        _check(isinstance(name, str) and name in known, choice)
        return ToolChoice(tools, _texts([name]), False)
    _check(kind in (None, "auto", "none", "required", "any"), choice)
    is_forced = kind in ("required", "any")
    _check(bool(known) or not is_forced, choice)
    forced = _texts(known) if is_forced else ()
    return ToolChoice(None if kind == "none" else tools, forced, is_parallel)


def _check(ok: bool, choice: Any) -> None:
    asks.check(ok, f"tool_choice is {quoted(choice)}", _EXPECTED, "tool_choice")


def _texts(names: Sequence[Any]) -> tuple[str, ...]:
    found = tuple(one for one in names if isinstance(one, str))
    asks.check(len(found) == len(names), "tools", "a name for each", "tools")
    return found


def _name_of(tool: Any) -> Any:
    """The name of a tool, or of what a choice says of one; None where it has none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None
