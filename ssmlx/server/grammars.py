"""Forms that an answer is held to by llguidance: JSON schemas, regular expressions, grammars."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, hf
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.exceptions import HTTPException

from ..errors import first_line, quoted
from ..formats.rules import STYLE
from ..formats.schemas import with_closed_objects
from . import requests
from .requests import AGAIN, Body, RequestError

# Nothing interrupts llguidance, so its input is bounded: what passes compiles in a second or two.
MOST_CHARS = 256 * 2**10
"""Characters of a grammar, of any form."""
_MOST_CHOICES = 10_000
_MOST_REGEX = 8192  # characters of regular expressions
_MOST_SPELT = 16 * 2**10  # characters of a grammar that a request spells out
_MOST_PROPERTIES = 1000  # of one object; their cost is that of all pairs
_LIMITS = LLParserLimits(initial_lexer_fuel=500_000, max_grammar_size=100_000)
_STACK = 256 * 2**20
"""Bytes for llguidance's recursion, which would else end the process: some 80,000 rules deep."""
_starting = threading.Lock()  # the stack's size is set for all threads that start


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of JSON in one line that follows a schema; {} stands for any
    object.

    Objects may have only the properties that the schema names, unless it says otherwise.

    Raises:
        ValueError: the schema is no JSON, or too large.
    """
    check_schema_size(schema)
    wanted = with_closed_objects(schema or {"type": "object"})
    return LLMatcher.grammar_from_json_schema(dict(wanted), None, STYLE)


class SchemaTooLargeError(ValueError):
    """A schema that takes too long to compile."""


def check_schema_size(schema: Any) -> None:
    """Raise SchemaTooLargeError where a schema takes too long to compile: by an object of more than
    `_MOST_PROPERTIES`, or by expressions of more than `_MOST_REGEX` characters in all.
    """
    num_chars = 0
    for one in _objects(schema):
        properties = one.get("properties")
        if isinstance(properties, Mapping) and len(properties) > _MOST_PROPERTIES:
            raise SchemaTooLargeError(f"an object has more than {_MOST_PROPERTIES:,} properties")
        named = one.get("patternProperties")
        patterns = [one.get("pattern"), *(named if isinstance(named, Mapping) else ())]
        num_chars += sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
    if num_chars > _MOST_REGEX:
        raise SchemaTooLargeError(f"its patterns have more than {_MOST_REGEX:,} characters")


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a JSON value's objects, those inside of others too, however deep."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def _json_form(value: Any) -> str:
    """The grammar for a JSON schema, given as an object or as its text."""
    return json_grammar(json.loads(value) if isinstance(value, str) else value)


def _choice_form(value: Any) -> str:
    """Return the grammar of one of several texts.

    They are one terminal: as alternatives of a rule, llguidance follows 2,000 at most.

    Raises:
        ValueError: it is no list of texts, one is empty, or there are too many.
    """
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("it is no list of texts")
    if len(value) > _MOST_CHOICES:
        raise ValueError(f"it has more than {_MOST_CHOICES:,} texts")
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}"


def _regex_form(pattern: Any) -> str:
    """The grammar of a regular expression; ValueError where that is too long."""
    if isinstance(pattern, str) and len(pattern) > _MOST_REGEX:
        raise ValueError(f"it has more than {_MOST_REGEX:,} characters")
    return grammar_from("regex", pattern)


def _grammar_form(text: Any) -> str:
    """The grammar that a request spells out; ValueError where that is too long."""
    if isinstance(text, str) and len(text) > _MOST_SPELT:
        raise ValueError(f"it has more than {_MOST_SPELT:,} characters")
    return grammar_from("grammar", text)


_KINDS: Mapping[str, Callable[[Any], str]] = {
    "json": _json_form,
    "json_object": lambda wanted: json_grammar({}),
    "regex": _regex_form,
    "choice": _choice_form,
    "grammar": _grammar_form,
}
"""Makes the grammar of each kind of form, by the name that vLLM has for it."""
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Fields of a request that ask for one of these forms: vLLM's older ones, and llama.cpp's."""


def read_grammar(body: Body) -> str | None:
    """Return the llguidance grammar that a request asks for, or None.

    The fields are `response_format`, vLLM's `structured_outputs` and `guided_...`, and llama.cpp's
    `json_schema` and `grammar`. Whether llguidance can follow the grammar is not checked here;
    `compiled_matcher` does.

    Raises:
        RequestError: there are several forms, or one is of an unknown kind or broken.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, kind in _FIELDS.items():
        if body.get(name) not in (None, "", {}):
            found[name] = kind, body[name]
    for kind, value in requests.read_typed_or_default(body, "structured_outputs", dict, {}).items():
        if value is not None and value is not False:
            name = f"structured_outputs.{kind}"
            known = ", ".join(_KINDS)
            requests.check_field(kind in _KINDS, name, f"one of {known}", "structured_outputs")
            found[name] = kind, value
    schema = _response_format_schema(
        requests.read_typed_or_default(body, "response_format", dict, {})
    )
    if schema is not None:
        found["response_format"] = "json", schema
    requests.check_field(
        len(found) < 2, " and ".join(found), "one form of an answer", next(iter(found), None)
    )
    for name, (kind, value) in found.items():
        try:
            return _KINDS[kind](value)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"{quoted(value)} ({first_line(error)[:200]})"
            raise unsupported_form_error(name, why) from error
    return None


def _response_format_schema(form: Body) -> Body | None:
    """Return the JSON schema of a `response_format`: {} for any object, None for text or no format.

    Raises:
        RequestError: its type is unknown, or `json_schema` has no schema.
    """
    kind = form.get("type", "text")
    named = form.get("json_schema", form)
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "text" or (kind == "json_object" and schema is None):
        return None if kind == "text" else {}
    ok = kind in ("json_object", "json_schema") and isinstance(schema, dict)
    expected = "type text, json_object, or json_schema with a schema"
    requests.check_field(ok, f"response_format is {quoted(form)}", expected, "response_format")
    return schema


def unsupported_form_error(name: str | None, why: str) -> RequestError:
    """Make the error for a form that llguidance cannot follow.

    Args:
        name: the request's field; None where it is not known.
        why: llguidance's message.
    """
    found = f"{name or 'the form of the answer'} cannot be followed: {why}"
    return RequestError(name, found, "one that llguidance knows", "simplify it")


def llguidance_tokenizer(tokenizer: TokenizerWrapper) -> LLTokenizer:
    """Return a model's tokenizer as llguidance needs it; takes a second for a large vocabulary.

    Raises:
        RequestError: it is of a kind that llguidance cannot read.
    """
    try:
        return hf.from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
    except ValueError as error:
        found = f"this model's answers cannot be kept to a form ({first_line(error)[:200]})"
        expected = "a tokenizer that llguidance knows"
        raise RequestError(None, found, expected, "ask without it, or another model") from error


class GrammarMask:
    """Masks logits so that an answer follows a grammar; it has a state, so each answer has its own.

    Given an answer's tokens so far and the logits [1, V] of the next one, it returns these with
    -inf for tokens that would leave the grammar. After a complete text only end tokens are allowed.
    It may be called again with fewer tokens, which takes the rest back.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        """Begin an answer.

        Args:
            matcher: by `compiled_matcher`; it is copied.
        """
        self._matcher = matcher.deep_copy()
        self._num_known = 0

    @property
    def error(self) -> str:
        """Why llguidance could not follow the grammar to its end, or "". From then on only end
        tokens are allowed, so an answer that has an error is broken off, however it ends.
        """
        return str(self._matcher.get_error())

    def __call__(self, tokens: Sequence[int], logits: mx.array) -> mx.array:
        """Return the logits [1, V] of the token after `tokens`, the whole answer so far, masked."""
        self._matcher.rollback(max(0, self._num_known - len(tokens)))
        self._matcher.consume_tokens([*tokens[self._num_known :]])
        self._num_known = len(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits.shape[-1])
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)


def grammar_mask(tokenizer: LLTokenizer, grammar: str) -> GrammarMask:
    """Return the mask of one answer that follows a grammar.

    Args:
        tokenizer: of the model, by `llguidance_tokenizer`.
        grammar: of llguidance.

    Raises:
        RequestError, HTTPException: as `compiled_matcher` does.
    """
    return GrammarMask(compiled_matcher(tokenizer, grammar))


@lru_cache(maxsize=8)
def compiled_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the matcher of a grammar at its beginning, which is to be copied.

    It is kept for the next requests.

    Args:
        tokenizer: of the model, by `llguidance_tokenizer`.
        grammar: of llguidance.

    Raises:
        RequestError: llguidance cannot follow the grammar, or it is too large.
        HTTPException: no thread can be started for it now (503).
    """
    if len(grammar) > MOST_CHARS:
        raise unsupported_form_error(None, f"it has more than {MOST_CHARS:,} characters")
    compiled: Future[LLMatcher] = Future()

    def compile_into_future() -> None:
        """Set the matcher, or what llguidance has raised."""
        try:
            compiled.set_result(LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS))
        except BaseException as error:  # a panic of llguidance is no Exception
            compiled.set_exception(error)

    thread = threading.Thread(target=compile_into_future)
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        except RuntimeError as error:
            detail = "the form of the answer cannot be compiled now; try again later"
            raise HTTPException(503, detail, AGAIN) from error
        finally:
            threading.stack_size(before)
    thread.join()
    failure = compiled.exception()
    why = compiled.result().get_error() if failure is None else first_line(failure)
    if why:
        raise unsupported_form_error(None, first_line(ValueError(why))[:200]) from failure
    return compiled.result()
