"""Chat templates, which came with a model, in Jinja's sandbox with bounds on time and size.

The sandbox keeps a template from files and from Python's inner life, not from taking for ever.
Here whatever it loops over, calls, joins or computes is counted against a budget, and what may
multiply sizes is estimated before it is done. transformers compiles its templates so, as long as
one is rendered under `refusing_turns`.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from math import prod
from typing import Any

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from .errors import InputError, require

MAX_SECONDS = 5.0
MAX_CHARS = 10_000_000
_WORK = 2 * MAX_CHARS  # what is made on the way to a prompt
_ITEM = 10  # characters that an item of a list counts for
_MAX_BITS = 4096
_MAX_WIDTH = 10_000
# Of methods and filters: what they make may be as long as their arguments' sizes, multiplied.
_MULTIPLYING = (
    "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace",
    "rjust", "round", "slice", "to_bytes", "tojson", "translate", "truncate", "xmlattr", "zfill",
)  # fmt: skip
_WIDE = re.compile(r"%[^a-zA-Z%]*\*|\d{5}|:[^}]*\{")  # widths in a text to format


class _Budget:
    def __init__(self) -> None:
        self.left = _WORK
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, count: int = 1) -> None:
        self.left -= count
        _bound(self.left >= 0, "makes too much text")
        _bound(time.monotonic() < self.deadline, f"takes more than {MAX_SECONDS:.0f} s")


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)
_day: ContextVar[datetime | None] = ContextVar("day", default=None)


def _bound(ok: bool, what: str) -> None:
    require(
        ok,
        f"the model's chat template {what}",
        expected=f"at most {MAX_SECONDS:.0f} s and {MAX_CHARS:,} characters for a prompt",
        do="use another model, or a shorter conversation",
    )


def _spend(count: int = 1) -> None:
    if budget := _budget.get():
        budget.spend(count)


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * (1 + len(value)) if isinstance(value, list | tuple | dict) else 1


def _made(value: Any) -> Any:
    """A new value, paid for; one that holds others may hold one a thousand times over."""
    _spend(_length(value))
    found = 0
    waiting = [value] if isinstance(value, list | tuple | dict) else []
    while waiting:
        held: Any = waiting.pop()
        inner = [*held, *held.values()] if isinstance(held, dict) else held
        found += sum(map(_length, inner))
        waiting += [one for one in inner if isinstance(one, list | tuple | dict)]
        _spend(0)
        _bound(found <= _WORK, "makes too much text")
    return value


def _each(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend()
        yield item


def _check_multiplied(name: str, given: list[Any]) -> None:
    """Refuse a call whose result would be too long."""
    if name not in _MULTIPLYING:
        return
    widths = [value for value in given[1:] if isinstance(value, int)]
    _bound(all(abs(width) <= _MAX_WIDTH for width in widths), f"asks for much of {name}")
    _bound("format" not in name or not _WIDE.search(str(given[0])), f"asks for much of {name}")
    sizes = [max(1, *map(abs, widths), _length(given[0])), *map(_length, given[1:])]
    if name == "replace" and len(given) > 2 and all(isinstance(one, str) for one in given[:3]):
        sizes = [given[0].count(given[1]), len(given[2])]
    _bound(prod(sizes) <= _WORK, f"asks for much of {name}")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too long."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        _bound(operator not in ("*", "**") or bits <= _MAX_BITS, "computes with huge numbers")
    elif operator == "*":
        sizes = [one if isinstance(one, int) else _length(one) for one in (left, right)]
        _bound(prod(sizes) <= _WORK, "makes too much text")
    elif operator == "%" and isinstance(left, str):
        _check_multiplied("format", [left])


class _Counting(NodeTransformer):
    """Puts what counts around loops' items, and around what holds or joins other values."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "ssmlx_each")
        is_read = isinstance(node, nodes.Tuple) and node.ctx == "load"
        if is_read or isinstance(node, nodes.Concat | nodes.List | nodes.Dict):
            return _filtered(node, "ssmlx_made")
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Filters(dict[str, Callable[..., Any]]):
    def __getitem__(self, name: str) -> Callable[..., Any]:
        found = super().__getitem__(name)

        @wraps(found)
        def counted(*args: Any, **kwargs: Any) -> Any:
            own = args[1:] if hasattr(found, "jinja_pass_arg") else args
            _check_multiplied(name, [*own, *kwargs.values()])
            return _made(found(*args, **kwargs))

        return found if name == "ssmlx_each" else counted

    def get(self, name: str, default: Any = None) -> Any:
        with suppress(KeyError):
            return self[name]
        return default


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        text = super().render(*args, **kwargs)
        _bound(len(text) <= MAX_CHARS, f"makes a prompt of {len(text):,} characters")
        return text


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    template_class = _Template

    @classmethod
    def like(cls, other: ImmutableSandboxedEnvironment) -> "_Sandbox":
        own = object.__new__(cls)
        own.__dict__.update(other.__dict__, globals={**other.globals})
        own.globals.pop("lipsum", None)
        own.globals["strftime_now"] = lambda form: (_day.get() or datetime.now()).strftime(form)
        own.filters = _Filters({**other.filters, "ssmlx_each": _each, "ssmlx_made": lambda x: x})
        own.filters.pop("wordwrap", None)
        return own

    def _parse(self, *args: Any) -> nodes.Template:
        return _Counting().visit(super()._parse(*args))

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        kept = []
        for piece in pieces:
            _spend(len(piece))
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        given = [getattr(method, "__self__", ""), *args, *kwargs.values()]
        _check_multiplied(getattr(function, "__name__", ""), given)
        return _made(super().call(context, function, *args, **kwargs))


_theirs = chat_template_utils._compile_jinja_template


@lru_cache
def _counting(template: str) -> Template:
    return _Sandbox.like(_theirs("").environment).from_string(template)


def _compile(template: str) -> Template:
    return _counting(template) if _budget.get() else _theirs(template)


chat_template_utils._compile_jinja_template = _compile


@contextmanager
def on_one_day() -> Iterator[None]:
    """Tell templates that ask for it always the same date: a run goes on the day after."""
    token = _day.set(datetime(2026, 1, 1))
    try:
        yield
    finally:
        _day.reset(token)


@contextmanager
def refusing_turns(turns: str) -> Iterator[None]:
    """Tell in one line what a chat template has against `turns`, and when it takes too much."""
    token = _budget.set(_Budget())
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a template computes
        raise InputError(
            f"the model's chat template refuses {turns} ({' '.join(str(error).split())})",
            expected="turns that it knows",
            do="change or drop them",
        ) from error
    finally:
        _budget.reset(token)
