"""OpenAI's responses, of which nothing is kept: a request brings its whole conversation."""

from dataclasses import replace
from typing import Any

from ..errors import quoted, require
from ..settings import GenerateConfig
from . import openai
from .asks import Ask, Body, End, Event, Part, Reasoning, ToolCall, typed
from .blocks import SHARED, Run, Teller, Turns, event, parts_of, told_by, tools_of

_KEPT = ("previous_response_id", "conversation", "prompt", "background")


def read(body: Body, config: GenerateConfig) -> Ask:
    for name in _KEPT:
        found = f"{name} is given, but nothing is kept here"
        expected = "the whole conversation as input"
        require(not body.get(name), found, expected=expected, do="drop it")
    # What others would run is not offered to the model, so that it calls none of it.
    given = typed(body, "tools", list, [])
    tools = [one for one in given if isinstance(one, dict) and one.get("type") == "function"]
    is_quiet = typed(body, "reasoning", dict, {}).get("effort") == "none"
    chat = {
        **{name: body.get(name) for name in SHARED},
        "messages": [*_turns(body)],
        "tools": tools_of({"tools": tools}, "parameters"),
        "max_tokens": body.get("max_output_tokens"),
        "response_format": typed(body, "text", dict, {}).get("format"),
        "chat_template_kwargs": {"enable_thinking": False} if is_quiet else None,
    }
    return replace(openai.read_chat(chat, config), body=body)


def _turns(body: Body) -> Turns:
    turns = Turns()
    if instructions := typed(body, "instructions", str):
        turns.say("system", instructions)
    for item in parts_of(body.get("input")):
        _add(turns, item)
    require(bool(turns), "input is empty", expected="a text, or items", do="ask something")
    return turns


def _add(turns: Turns, item: Body) -> None:
    match item.get("type", "message"):
        case "text":
            turns.say("user", [item])
        case "message":
            turns.say(item.get("role"), item.get("content"))
        case "function_call":
            turns.call(item.get("call_id"), item.get("name"), item.get("arguments"))
        case "function_call_output":
            turns.result(item.get("call_id"), item.get("output"))
        case "reasoning":
            turns.think(item.get("content") or [])
        case kind:
            expected = "messages, reasoning, function calls and their outputs"
            require(False, f"an item of type {quoted(kind)}", expected=expected, do="drop it")


class _Response(Teller):
    """Runs are the items of its output."""

    _sequence, _thought = 0, 0  # events so far; tokens of reasoning

    def begun(self) -> list[Event]:
        response = self._response("in_progress")
        return [self._event(name, response=response) for name in ("created", "in_progress")]

    def opened(self, part: Run) -> list[Event]:
        item: dict[str, Any] = {"id": f"item_{len(self.runs)}_{self.ids.id}"}
        content: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}
        if isinstance(part, ToolCall):
            item |= {"type": "function_call", "call_id": part.id, "name": part.name}
            self.runs.append({**item, "status": "in_progress", "arguments": ""})
            return [self._of_item("added")]
        if isinstance(part, Reasoning):
            item |= {"type": "reasoning", "summary": []}
            content = {"type": "reasoning_text"}
        else:
            item |= {"type": "message", "role": "assistant"}
        self.runs.append({**item, "status": "in_progress", "content": []})
        added = self._of_item("added")
        self.runs[-1]["content"].append({**content, "text": ""})
        return [added, *self._of_content("added")]

    def added(self, part: Run) -> list[Event]:
        self._thought += part.tokens if isinstance(part, Reasoning) else 0
        delta = part.arguments if isinstance(part, ToolCall) else part.text
        kind, name, inner = self._inner()
        inner[name] += delta
        logprobs = {one: inner[one] for one in inner if one == "logprobs"}
        return [self._inside(f"{kind}.delta", delta=delta, **logprobs)]

    def closed(self, next: Part) -> list[Event]:
        is_cut = isinstance(next, End) and next.reason == "length"
        self.runs[-1]["status"] = "incomplete" if is_cut else "completed"
        kind, name, inner = self._inner()
        told = {one: inner[one] for one in (name, "logprobs") if one in inner}
        done = self._inside(f"{kind}.done", **told)
        return [done, *self._of_content("done"), self._of_item("done")]

    def ended(self, end: End) -> list[Event]:
        response = self.reply(end)
        return [self._event(response["status"], response=response)]

    def reply(self, end: End) -> dict[str, Any]:
        used, is_cut = end.usage, end.reason == "length"
        cached = {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0}
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": cached,
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._thought},
                "total_tokens": used.prompt_tokens + used.completion_tokens,
            },
            "timings": dict(end.timings),
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self.ask.body
        return {
            "id": f"resp_{self.ids.id}",
            "object": "response",
            "created_at": self.ids.created,
            "status": status,
            "model": self.ids.model,
            "output": self.runs,
            "error": None,
            "store": False,
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
        }

    def _inner(self) -> tuple[str, str, dict[str, Any]]:
        """What the last item is made of: its kind, the name of its text, and what has that."""
        item = self.runs[-1]
        if item["type"] == "function_call":
            return "function_call_arguments", "arguments", item
        (content,) = item["content"]
        return content["type"], "text", content

    def _event(self, name: str, **data: Any) -> Event:
        self._sequence += 1
        return event(f"response.{name}", sequence_number=self._sequence - 1, **data)

    def _of_item(self, name: str) -> Event:
        number = len(self.runs) - 1
        return self._event(f"output_item.{name}", output_index=number, item=self.runs[-1])

    def _of_content(self, name: str) -> list[Event]:
        content = self.runs[-1].get("content", ())
        return [self._inside(f"content_part.{name}", part=one) for one in content]

    def _inside(self, name: str, **data: Any) -> Event:
        item = self.runs[-1]
        place = {"content_index": 0} if "content" in item else {}
        where = {"item_id": item["id"], "output_index": len(self.runs) - 1, **place}
        return self._event(name, **where, **data)


def error(status: int, message: str) -> dict[str, Any]:
    """A refusal, which is also the event that ends a reply."""
    told = openai.error(status, message)
    return {**told["error"], **told, "type": "error"}


RESPONSES = told_by(_Response, read, error)
