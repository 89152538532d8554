"""Grammars of whole answers: forced calls, or a given form, each after an unconstrained thought."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InputError
from .call_form import any_call
from .families import AnswerFormat, find_format
from .json_calls import write_arguments
from .reader import Begins
from .rules import GrammarRules

MAX_CALLS = 8  # in one answer, where several are allowed
_NEW_LINES = r"/\n{0,2}/"  # which models write after a thought


def tool_call_grammar(
    tokenizer: TokenizerWrapper,
    tools: Sequence[Any],  # all that the request offers
    names: Sequence[str],  # those that may be called
    max_calls: int,
    begins: Begins = "text",
) -> str:
    """The grammar of one to `max_calls` tool calls in the model's own form, with its marks.

    A thought that the prompt opened, or that has a channel of its own, is unconstrained.
    """
    format = find_format(tokenizer)
    rules = GrammarRules(tokenizer)
    if format.channels is not None and format.channels.calls_in_header:
        before = _before_text(rules, format, begins, format.channels.call_header)
        return rules.source(f"{before} {any_call(rules, write_arguments, tools, names)}")
    if format.name is None:
        raise InputError(
            "tool_choice asks for a call",
            expected="auto or none, as this model's tool-call format is unknown",
            do="use one of these",
        )
    (form,) = format.calls
    before = "" if format.channels else _before_text(rules, format, begins)
    return rules.source(f"{before} {form.grammar(rules, tools, names, max_calls)}".strip())


def form_grammar(
    grammar: str,  # of llguidance
    tokenizer: TokenizerWrapper,
    begins: Begins,
) -> str:
    """The grammar of an answer whose text follows `grammar`, after an unconstrained thought."""
    rules = GrammarRules(tokenizer)
    format = find_format(tokenizer)
    header = format.channels.text_header if format.channels else ""
    before = _before_text(rules, format, begins, header)
    if not before:
        return grammar
    try:
        inner = json.loads(grammar)["grammars"]
    except ValueError:
        inner = [{"lark_grammar": grammar}]
    whole = {"lark_grammar": rules.source(f"{before} @form")}
    return json.dumps({"grammars": [whole, {**inner[0], "name": "form"}, *inner[1:]]})


def _before_text(
    rules: GrammarRules,
    format: AnswerFormat,
    begins: Begins,
    header: str = "",  # of the message that has the text, in a format with channels
) -> str:
    """The expression of what comes before the text of an answer; empty for nothing."""
    channels = format.channels
    if channels is None:
        if begins != "thought" or format.thought is None:
            return ""
        return f"{rules.text_up_to(format.thought[1], {})} {_NEW_LINES}"
    end = channels.ends[0]
    opens = channels.message_opens
    if begins == "text":
        return "" if header == channels.text_header else rules.literal(end + opens + header)
    ended = f"{rules.text_up_to(end, {})} {rules.literal(opens)}"
    if begins == "thought":
        return f"{ended} {rules.literal(header)}"
    whole = rules.add(f"{rules.literal(channels.thought_header)} {ended}")
    return f"{whole}? {rules.literal(header)}"


def thought_end(format: AnswerFormat) -> str:
    """The mark that ends a thought; empty if the model has none."""
    if format.channels is not None:
        return format.channels.ends[0]
    return format.thought[1] if format.thought else ""
