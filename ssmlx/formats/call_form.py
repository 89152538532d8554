"""A format in which models write tool calls: how it is recognised, read and enforced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import InputError, quoted, require
from .arguments import OfferedTools
from .cursor import Cursor, NotACallError, UnfinishedError
from .rules import GrammarRules, Schema
from .schemas import resolved_parameters


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str | None = None  # that the model wrote


# Goes past the calls after an opening mark, and past their end, and returns them; raises
# `NotACallError` if there are none, `UnfinishedError` if more text might complete one.
CallReader = Callable[[Cursor, OfferedTools], list[Call]]
# Returns the grammar expression of one call, by the tool's name and parameters; adds the rules that
# it needs.
CallWriter = Callable[[GrammarRules, str, Schema], str]


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """A format in which a family writes calls."""

    opens: Sequence[str]  # marks that open calls, the usual one first
    # marks after which calls may be complete; if empty, only the answer's end completes them
    ends: Sequence[str]
    read: CallReader  # reads the calls after one of `opens`, or one from one of `begins` on
    # texts in the chat template, or tokens, that identify this form; one suffices, but all of a
    # tuple are needed
    signs: Sequence[str | tuple[str, ...]] = ()
    # marks that are part of a call, by which it is found if nothing opened it; such a call counts
    # only if its tool is offered
    begins: Sequence[str] = ()
    stands_alone: bool = False  # whether calls may be an answer's whole text, without any mark
    call: CallWriter | None = None  # the grammar of one call; None if there is no grammar
    # What a grammar has beside calls; if `between` is None, each call has marks of its own.
    before: str = ""  # after the mark that opens
    between: str | None = None  # two calls
    after: str = ""  # after the last call
    end: str = ""

    def grammar(
        self,
        rules: GrammarRules,
        tools: Sequence[Any],  # all that the request offers
        names: Sequence[str],  # those that may be called
        most: int,
    ) -> str:
        """The expression of one to `most` calls, with their marks; rules are added."""
        open = "" if self.stands_alone or not self.opens else self.opens[0]
        start = rules.literal(open + self.before)
        end = rules.literal(self.after + self.end)
        one = any_call(rules, self.call, tools, names)
        if self.between is None:
            whole = rules.add(" ".join(filter(None, [start, one, end])))
            more = rules.add(f'"\\n"? {whole}')
            return f"{whole} {more}{{0,{most - 1}}}" if most > 1 else whole
        more = rules.add(f"{rules.literal(self.between)} {one}".strip())
        inner = f"{one} {more}{{0,{most - 1}}}" if most > 1 else one
        return " ".join(filter(None, [start, inner, end]))


def read_until_end(cursor: Cursor, end: str, read_call: Callable[[], Call]) -> list[Call]:
    """Go past calls, and past the mark that ends them; past one call if no mark opened it.

    The mark may be missing before other text, or at the end of a whole text. In a text that was
    cut, calls count up to the one that is cut.
    """
    found: list[Call] = []
    while True:
        cursor.skip_space()
        if found and not cursor.is_opened:
            return found
        if found and (cursor.has(end) or cursor.is_over):
            return found
        before = cursor.at
        try:
            found.append(read_call())
        except NotACallError as error:
            is_unfinished = isinstance(error, UnfinishedError)
            if not found or (is_unfinished and not cursor.is_cut):
                raise
            if end.startswith(cursor.text[before:]) and not cursor.is_cut:
                raise UnfinishedError() from None
            cursor.at = before
            return found


def any_call(
    rules: GrammarRules,
    write: CallWriter | None,
    tools: Sequence[Any],  # all that the request offers
    names: Sequence[str],  # those that may be called
) -> str:
    """Add a rule for a call of any of the named tools; return its name."""
    if write is None:
        raise InputError(
            "a forced tool call",
            expected="a model whose tool-call format is known",
            do="let the model choose, or use another model",
        )
    functions = [one.get("function", one) for one in tools]
    named = [
        (one["name"], one.get("parameters") or {}) for one in functions if one.get("name") in names
    ]
    for name, parameters in named:
        require(
            isinstance(parameters, Mapping),
            f"the parameters of {name} are {quoted(parameters)}",
            expected="a JSON schema of an object",
            do="correct them",
        )
    try:
        calls = [
            rules.add(write(rules, name, resolved_parameters(parameters)))
            for name, parameters in named
        ]
    except RecursionError as error:
        raise InputError(
            "tools are nested too deeply", expected="shallower schemas", do="simplify them"
        ) from error
    return rules.add(" | ".join(calls))
