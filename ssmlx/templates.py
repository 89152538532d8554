"""Chat templates, which came with a model, in Jinja's sandbox, with a deadline and a bound on size.

The sandbox, transformers' own, keeps a template from files and from Python's inner life, not from
looping for ever. Here loops, calls and pieces of output look at a deadline, and what is written has
at most so many characters. What a single expression computes is not bounded. transformers compiles
its templates so, as long as one is rendered under `bounded_rendering`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from .errors import InputError

MAX_SECONDS = 5.0
MAX_CHARS = 10_000_000
"""What rendering a prompt may take, and characters that it may write."""
_LOOP_FILTER = "ssmlx_until_deadline"

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
_day: ContextVar[datetime | None] = ContextVar("day", default=None)


class TemplateBoundsError(InputError):
    """A chat template takes too long, or makes too much."""


def _require_within_bounds(ok: bool, template_does: str) -> None:
    """Raise an InputError unless `ok`.

    It says what the template does, such as "makes too much text", and what the bounds are.
    """
    if not ok:
        raise TemplateBoundsError(
            f"the model's chat template {template_does}",
            expected=f"at most {MAX_SECONDS:.0f} s and {MAX_CHARS:,} characters for a prompt",
            do="use another model, or a shorter conversation",
        )


def _check_deadline() -> None:
    """Raise InputError if there is a `bounded_rendering` around whose deadline has passed."""
    deadline = _deadline.get()
    is_in_time = deadline is None or time.monotonic() < deadline
    _require_within_bounds(is_in_time, f"takes more than {MAX_SECONDS:.0f} s")


def _until_deadline(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`; InputError where the deadline has passed before one of them."""
    for item in items:
        _check_deadline()
        yield item


class _DeadlineLoops(NodeTransformer):
    """Puts a filter on what every loop of a template goes over, which looks at the deadline."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Put the filter on what a loop goes over, here and in all nodes below; returns `node`,
        changed."""
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            given: Any = node.iter
            node.iter = nodes.Filter(given, _LOOP_FILTER, [], [], None, None, lineno=node.lineno)
        return node


class _Sandbox(ImmutableSandboxedEnvironment):
    """transformers' sandbox, whose loops, calls and output are bounded."""

    @classmethod
    def like(cls, other: ImmutableSandboxedEnvironment) -> "_Sandbox":
        """A bounded copy of `other`, with its globals and filters, and `strftime_now`; `other`
        stays.

        `strftime_now` gives the day of `frozen_at_new_year_2026` inside its block, else now.
        """
        own = object.__new__(cls)
        own.__dict__.update(other.__dict__, globals={**other.globals})
        own.globals["strftime_now"] = lambda form: (_day.get() or datetime.now()).strftime(form)
        own.filters = {**other.filters, _LOOP_FILTER: _until_deadline}
        return own

    def _parse(self, *args: Any) -> nodes.Template:
        bounded: nodes.Template = _DeadlineLoops().visit(super()._parse(*args))
        return bounded

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Join what a template writes, `pieces`, into one text.

        Raises:
            InputError: it has more than `MAX_CHARS`, or the deadline passes meanwhile.
        """
        kept = []
        size = 0
        for piece in _until_deadline(pieces):
            size += len(piece)
            _require_within_bounds(size <= MAX_CHARS, "makes too much text")
            kept.append(piece)
        return "".join(kept)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(context, function, *args, **kwargs)


_transformers_compile = chat_template_utils._compile_jinja_template


@lru_cache
def _compile_bounded(template: str) -> Template:
    return _Sandbox.like(_transformers_compile("").environment).from_string(template)


def _compile(template: str) -> Template:
    """transformers' compiler of templates, replaced: bounded inside `bounded_rendering`."""
    return (
        _transformers_compile(template) if _deadline.get() is None else _compile_bounded(template)
    )


chat_template_utils._compile_jinja_template = _compile


@contextmanager
def frozen_at_new_year_2026() -> Iterator[None]:
    """Give templates that ask for the date 1 January 2026 inside the block.

    So that a run that goes on another day has the same prompts. Only templates that are rendered
    under `bounded_rendering` are told so.
    """
    token = _day.set(datetime(2026, 1, 1))
    try:
        yield
    finally:
        _day.reset(token)


@contextmanager
def bounded_rendering(turns: str) -> Iterator[None]:
    """Bound what chat templates that are rendered inside the block may take.

    In the block transformers compiles templates for the bounded sandbox. There are `MAX_SECONDS`
    for the whole block, from now on; the characters are counted for each rendering.

    Args:
        turns: a message's words for what is rendered, such as "these turns".

    Raises:
        InputError: a template takes more than `MAX_SECONDS` or `MAX_CHARS`, or the block raises any
            other Exception; an InputError goes on as it is.
    """
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
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
        _deadline.reset(token)
