"""Chat templates, which come with models, in Jinja's sandbox, with a deadline and bounds on size.

The sandbox, transformers' own, keeps a template from files and from Python's inner life, but not
from looping for ever or filling the memory. Under `bounded_rendering` every operation looks at a
deadline, and the size of its result is known before it is computed.
"""

import json
import re
import sys
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from itertools import chain
from types import GeneratorType
from typing import Any

from jinja2 import Template, nodes, pass_environment, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.filters import do_join, make_attrgetter
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from .errors import InputError

MAX_SECONDS = 5.0  # of rendering a prompt
MAX_CHARS = 10_000_000  # that a rendering may write, or have in one value
_MAX_MADE = 30 * MAX_CHARS  # bytes of all values that a rendering makes
_MAX_SOURCE = 100_000  # characters of a template
_MAX_BITS = 100_000  # of a whole number
_MAX_LETTERS = 300  # of a template's own message
_ITEM = 10  # characters that an item of a list or an object counts for, beside its own
_CHECK = "ssmlx_check"
_CONCAT = "ssmlx_concat"
_LOOP = "ssmlx_until_deadline"
# Chat templates need none of these, and they take more than the size of their result.
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = {
    "encode", "expandtabs", "from_bytes", "fromhex", "maketrans", "striptags", "to_bytes",
    "translate", "unescape",
}  # fmt: skip
_JINJAS = ("_loop_vars", "_block_vars")  # arguments that compiled templates give to calls

_day: ContextVar[datetime | None] = ContextVar("day", default=None)


class TemplateBoundsError(InputError):
    """A chat template takes too long, or makes too much."""

    def __init__(
        self,
        template_does: str,  # such as "makes too much text"
    ) -> None:
        super().__init__(
            f"the model's chat template {template_does}",
            expected=f"at most {MAX_SECONDS:.0f} s and {MAX_CHARS:,} characters for a prompt",
            do="use another model, or a shorter conversation",
        )


class _Bounds:
    """What templates may still take in a block."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.begin_rendering()

    def begin_rendering(self) -> None:
        self._made = 0
        # By the id of a list or an object: its size, and the value, so that the id stays its own.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise TemplateBoundsError(f"takes more than {MAX_SECONDS:.0f} s")

    def size(self, value: Any) -> int:
        """Characters of a value as it would be written, or a little more."""
        # A list that is in other lists many times counts each time.
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return _ITEM + value.bit_length() // 3
        if not isinstance(value, list | tuple | Mapping | Set | KeysView | ItemsView | ValuesView):
            return _ITEM
        known = self._sizes.get(id(value))
        if known is None and len(value) * _ITEM > MAX_CHARS:
            return len(value) * _ITEM
        if known is None:
            items = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
            size = _ITEM + sum(_ITEM + self.size(item) for item in items)
            known = self._sizes[id(value)] = (value, size)
        return known[1]

    def check_size(self, size: int) -> None:
        """Raise if a value of this many characters, or equal work, is too large."""
        if size > MAX_CHARS:
            raise TemplateBoundsError("makes too much text")

    def check_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise TemplateBoundsError("makes a number that is too large")

    def check(self, value: Any) -> Any:
        """The given value, checked and counted; a generator counts as it is read."""
        self.check_time()
        if isinstance(value, GeneratorType):
            return self._check_items(value)
        if isinstance(value, bool | float) or value is None:
            return value
        if isinstance(value, int):
            self.check_bits(value.bit_length())
            return value
        self.check_size(self.size(value))
        self.count(sys.getsizeof(value, 0))
        if isinstance(value, list | tuple | dict):
            self.count(300)  # of `_sizes`
        return value

    def count(self, num_bytes: int) -> None:
        """Count the bytes that a value holds; raise if all together are too many."""
        self._made += num_bytes
        if self._made > _MAX_MADE:
            raise TemplateBoundsError("makes too much text")

    def _check_items(self, items: Iterable[Any]) -> Iterator[Any]:
        size = 0
        for item in items:
            self.check_time()
            size += _ITEM + self.size(item)
            self.check_size(size)
            yield item


_bounds: ContextVar[_Bounds | None] = ContextVar("bounds", default=None)


def _current() -> _Bounds:
    """The bounds of the block around; outside of one, new bounds."""
    return _bounds.get() or _Bounds(time.monotonic() + MAX_SECONDS)


def _check(value: Any) -> Any:
    return _current().check(value)


def _until_deadline(items: Iterable[Any]) -> Iterator[Any]:
    bounds = _current()
    for item in items:
        bounds.check_time()
        yield item


@pass_eval_context
def _concat(context: nodes.EvalContext, texts: Sequence[Any]) -> str:
    """The value of `~`."""
    bounds = _current()
    bounds.check_size(bounds.size(texts))
    return str(bounds.check((markup_join if context.autoescape else str_join)(texts)))


class _CheckedNodes(NodeTransformer):
    """Puts filters on what a template computes by itself, without calling the environment."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        _current().check_time()
        super().generic_visit(node, *args, **kwargs)
        given: Any = node
        match node:
            case nodes.For():
                node.iter = _filtered(given.iter, _LOOP)
            case nodes.Concat():
                return _filtered(nodes.Tuple(given.nodes, "load", lineno=node.lineno), _CONCAT)
            case nodes.Compare() | nodes.List() | nodes.Dict():
                return _filtered(given, _CHECK)
            case nodes.Tuple(ctx="load") | nodes.Getitem(arg=nodes.Slice()):
                return _filtered(given, _CHECK)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _padded(bounds: _Bounds, text: Any, width: int = 80, *_: Any) -> int:
    return max(bounds.size(text), width)


def _replaced(bounds: _Bounds, text: Any, old: Any, new: Any, *_: Any) -> int:
    return bounds.size(text) + str(text).count(str(old)) * len(str(new))


def _stripped(bounds: _Bounds, text: Any, letters: Any = None) -> int:
    """Check a strip: each letter may be looked up among all letters to be stripped."""
    return 0 if letters is None else bounds.size(text) * len(str(letters)) // 100


def _formatted(bounds: _Bounds, text: Any, *values: Any, **named: Any) -> int:
    """Check a format: a width may be in the text, or be one of the values; a value may be used many
    times."""
    form = str(text)
    num_fields = form.count("%") + form.count("{")
    if not num_fields:
        return len(form)
    given = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
    used = [*given, *named.values()]
    width = max((int(one[0][:9]) for one in re.finditer(r"\d+", form)), default=0)
    if "*" in form or re.search(r"\{[^}]*\{", form):
        width = max(width, *(abs(one) for one in used if isinstance(one, int)), 0)
    size = bounds.size(used)
    is_used_once = not named and not re.search(r"%\(|\{\w", form)
    return len(form) + num_fields * (20 + width) + (size if is_used_once else num_fields * size)


def _indented(bounds: _Bounds, text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    own = width if isinstance(width, int) else len(str(width))
    return bounds.size(text) + (1 + str(text).count("\n")) * own


def _letters(bounds: _Bounds, value: Any, *_: Any, **__: Any) -> int:
    return _ITEM * len(value) if isinstance(value, str) else 0


def _joined(bounds: _Bounds, between: Any, items: Any) -> int:
    return bounds.size(items) + len(items) * len(str(between))


_Size = Callable[..., int]
# Characters that a method of texts may make, beside its input's, or steps that it may take.
_SIZES_OF_METHODS: Mapping[str, _Size] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _stripped),
    "replace": _replaced,
    "format": _formatted,
    "format_map": lambda bounds, text, values: _formatted(bounds, text, **values),
    "join": _joined,
}
_SIZES_OF_FILTERS: Mapping[str, _Size] = {
    "center": _padded,
    "replace": _replaced,
    "trim": _stripped,
    "format": _formatted,
    "indent": _indented,
    **dict.fromkeys(("groupby", "list", "sort", "title", "urlencode", "wordcount"), _letters),
    "batch": lambda bounds, value, count, *_, **__: _ITEM * count,
    "slice": lambda bounds, value, count, *_, **__: _ITEM * count + _letters(bounds, value),
    "round": lambda bounds, value, precision=0, *_: abs(precision) * MAX_CHARS // 1000,
}


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test whose result is checked, and its size beforehand if it may be large."""
    size = _SIZES_OF_FILTERS.get(name)
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        bounds = _current()
        bounds.check_time()
        if size is not None:
            bounds.check_size(size(bounds, *args[first:], **kwargs))
        return bounds.check(function(*args, **kwargs))

    return bounded


@pass_environment
def _sum(environment: Any, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    total = start
    for item in items:
        total = environment.call_binop(None, "+", total, item)
    return total


@pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    bounds = _current()
    bounds.check_size(_letters(bounds, value))
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    items = list(bounds._check_items(value))
    bounds.check_size(_joined(bounds, d, items))
    return str(do_join(context, items, d))


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """A value as JSON, as transformers' `tojson` writes it; piece by piece if its form is a
    template's own."""
    bounds = _current()
    bounds.check_size(bounds.size(x))
    for text in (indent, *(separators or ())):
        own = text if isinstance(text, int) else len(str(text))
        bounds.check_size(own * MAX_CHARS // 100)
    how: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return json.dumps(x, **how)
    return _bounded_join(json.JSONEncoder(separators=separators, **how).iterencode(x))


def _bounded_join(pieces: Iterable[str]) -> str:
    """The joined texts, at most `MAX_CHARS` in all, until the deadline."""
    bounds = _current()
    kept = []
    size = 0
    for piece in _until_deadline(pieces):
        size += len(piece)
        bounds.check_size(size)
        kept.append(piece)
    return "".join(kept)


class _DeadlineCompiler(CodeGenerator):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        _current().check_time()
        return super().visit(node, *args, **kwargs)


class _Sandbox(ImmutableSandboxedEnvironment):
    """transformers' sandbox, whose operations and values are bounded."""

    code_generator_class = _DeadlineCompiler
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    @classmethod
    def like(cls, other: ImmutableSandboxedEnvironment) -> "_Sandbox":
        """A bounded copy of `other`, with its globals and filters."""
        own = object.__new__(cls)
        own.__dict__.update(other.__dict__, globals={**other.globals})
        own.optimized = False  # nothing is computed at compile time
        own.finalize = own.as_text
        own.globals["strftime_now"] = lambda form: (_day.get() or datetime.now()).strftime(
            str(form)[:_MAX_LETTERS]
        )
        namespace: Any = own.globals["namespace"]
        plain = {"__repr__": lambda self: "<Namespace>"}  # not all that it holds
        own.globals["namespace"] = type("Namespace", (namespace,), plain)
        del own.globals["lipsum"]
        filters: dict[str, Any] = {**other.filters, "join": _join, "sum": _sum, "tojson": _to_json}
        own.filters = {
            name: _bounded_filter(name, function)
            for name, function in filters.items()
            if name not in _NO_FILTERS
        }
        own.filters |= {_LOOP: _until_deadline, _CHECK: _check, _CONCAT: _concat}
        tests: dict[str, Any] = {**other.tests}
        own.tests = {name: _bounded_filter("", test) for name, test in tests.items()}
        return own

    def _parse(self, source: str, *args: Any) -> nodes.Template:
        if len(source) > _MAX_SOURCE:
            raise TemplateBoundsError(f"has more than {_MAX_SOURCE:,} characters")
        bounded: nodes.Template = _CheckedNodes().visit(super()._parse(source, *args))
        return bounded

    @staticmethod
    def as_text(value: Any) -> str:
        text = value if isinstance(value, str) else str(value)
        return str(_check(text))

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        return str(_check(_bounded_join(pieces)))

    def getattr(self, obj: Any, attribute: str) -> Any:
        _current().check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _current().check_time()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        bounds = _current()
        bounds.check_time()
        # The sandbox puts a function around `str.format`.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        is_texts = isinstance(owner, str)
        if is_texts:
            args = tuple(list(one) if isinstance(one, GeneratorType) else one for one in args)
            size = _SIZES_OF_METHODS.get(getattr(method, "__name__", ""))
            if size is not None:
                named = {name: one for name, one in kwargs.items() if name not in _JINJAS}
                bounds.check_size(size(bounds, owner, *args, **named))
        made = bounds.check(super().call(context, function, *args, **kwargs))
        if is_texts and isinstance(made, list):
            bounds.count(bounds.size(made))  # the texts in it are new
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        bounds = _current()
        bounds.check_time()
        sizes = bounds.size(left), bounds.size(right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            if operator == "**":
                bounds.check_bits(bits[0] * max(right, 0))
            elif operator == "*":
                bounds.check_bits(sum(bits))
        elif operator == "+" and not isinstance(left, int | float):
            bounds.check_size(sum(sizes))
        elif operator == "*" and isinstance(right, int):
            bounds.check_size(sizes[0] * right)
        elif operator == "*" and isinstance(left, int):
            bounds.check_size(sizes[1] * left)
        elif operator == "%" and isinstance(left, str):
            values = (right,) if not isinstance(right, Mapping) else ()
            named = right if isinstance(right, Mapping) else {}
            bounds.check_size(_formatted(bounds, left, *values, **named))
        return bounds.check(super().call_binop(context, operator, left, right))


_transformers_compile = chat_template_utils._compile_jinja_template


@lru_cache
def _compile_bounded(template: str) -> Template:
    sandbox = _Sandbox.like(_transformers_compile("").environment)
    compiled: Template = sandbox.from_string(template)
    return compiled


def _compile(template: str) -> Template:
    """Compile a template in place of transformers' compiler: bounded inside `bounded_rendering`."""
    bounds = _bounds.get()
    compile_ = _transformers_compile if bounds is None else _compile_bounded
    compiled: Template = compile_(template)
    if bounds is not None:
        bounds.begin_rendering()
    return compiled


chat_template_utils._compile_jinja_template = _compile


@contextmanager
def frozen_at_new_year_2026() -> Iterator[None]:
    """Inside the block, give templates this date, so that resumed runs have the same prompts."""
    token = _day.set(datetime(2026, 1, 1))
    try:
        yield
    finally:
        _day.reset(token)


@contextmanager
def bounded_rendering(
    turns: str,  # what is rendered, for messages, such as "these turns"
) -> Iterator[None]:
    """Bound what templates take: `MAX_SECONDS` for the block, `MAX_CHARS` for each rendering."""
    token = _bounds.set(_Bounds(time.monotonic() + MAX_SECONDS))
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a template computes
        said = " ".join(str(error)[:_MAX_LETTERS].split())
        raise InputError(
            f"the model's chat template refuses {turns} ({said})",
            expected="turns that it accepts",
            do="change or remove them",
        ) from error
    finally:
        _bounds.reset(token)
