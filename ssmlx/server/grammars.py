"""Forms that an answer is held to by llguidance: JSON schemas, regular expressions, grammars."""

import json
import math
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
from .fields import Body, check_field, check_value, read_typed
from .refusals import AGAIN, RequestError

# Nothing interrupts llguidance, so its input is bounded: what passes compiles in a second or two.
MOST_CHARS = 256 * 2**10  # characters of a grammar, of any form
_MOST_CHOICES = 10_000
_MOST_REGEX = 8192  # characters of regular expressions
_MOST_SPELT = 16 * 2**10  # characters of a grammar that a request spells out
_MOST_PROPERTIES = 1000  # of one object; their cost is that of all pairs
_LIMITS = LLParserLimits(initial_lexer_fuel=500_000, max_grammar_size=100_000)
# Bytes for llguidance's recursion, some 80,000 rules deep; an overflow would end the process.
_STACK = 256 * 2**20
_starting = threading.Lock()  # the stack's size is set for all threads that start


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of one line of JSON that follows `schema`; {} allows any
    object."""
    check_schema_size(schema)
    # Objects may have only the properties that the schema names, unless it says otherwise.
    wanted = with_closed_objects(schema or {"type": "object"})
    return LLMatcher.grammar_from_json_schema(dict(wanted), None, STYLE)


class SchemaTooLargeError(ValueError):
    """A schema that takes too long to compile."""


def check_schema_size(schema: Any) -> None:
    """Raise SchemaTooLargeError if a schema takes too long to compile."""
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


def _grammar_of_json(value: Any) -> str:
    """Return the grammar for a JSON schema, given as an object or as its text."""
    return json_grammar(json.loads(value) if isinstance(value, str) else value)


def _grammar_of_choice(value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("it is not a list of strings")
    if len(value) > _MOST_CHOICES:
        raise ValueError(f"it has more than {_MOST_CHOICES:,} strings")
    # One terminal: of alternatives of a rule, llguidance follows at most 2,000.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}"


def _grammar_of_regex(pattern: Any) -> str:
    if isinstance(pattern, str) and len(pattern) > _MOST_REGEX:
        raise ValueError(f"it has more than {_MOST_REGEX:,} characters")
    return grammar_from("regex", pattern)


def _grammar_of_text(text: Any) -> str:
    """Return the grammar that a request spells out, in the form that llguidance compiles."""
    if isinstance(text, str) and len(text) > _MOST_SPELT:
        raise ValueError(f"it has more than {_MOST_SPELT:,} characters")
    return grammar_from("grammar", text)


# Functions that make the grammar of a form, by vLLM's name for its kind; ValueError if the form is
# too long or invalid.
_KINDS: Mapping[str, Callable[[Any], str]] = {
    "json": _grammar_of_json,
    "json_object": lambda wanted: json_grammar({}),
    "regex": _grammar_of_regex,
    "choice": _grammar_of_choice,
    "grammar": _grammar_of_text,
}
# Fields of a request that ask for one of these forms: vLLM's older ones, and llama.cpp's.
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


def read_grammar(body: Body) -> str | None:
    """Return the grammar that a request asks for; `compiled_matcher` says if it can be followed."""
    found: dict[str, tuple[str, Any]] = {}
    for name, kind in _FIELDS.items():
        if body.get(name) not in (None, "", {}):
            found[name] = kind, body[name]
    for kind, value in read_typed(body, "structured_outputs", dict, {}).items():
        if value is not None and value is not False:
            name = f"structured_outputs.{kind}"
            known = ", ".join(_KINDS)
            check_field(kind in _KINDS, name, f"one of {known}", "structured_outputs")
            found[name] = kind, value
    schema = _response_format_schema(read_typed(body, "response_format", dict, {}))
    if schema is not None:
        found["response_format"] = "json", schema
    check_field(
        len(found) < 2, " and ".join(found), "only one form of the answer", next(iter(found), None)
    )
    for name, (kind, value) in found.items():
        try:
            return _KINDS[kind](value)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"{quoted(value)} ({first_line(error)[:200]})"
            raise unsupported_form_error(name, why) from error
    return None


def _response_format_schema(form: Body) -> Body | None:
    """Return the JSON schema of a `response_format`: {} for any object, None for text."""
    kind = form.get("type", "text")
    named = form.get("json_schema", form)
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "text" or (kind == "json_object" and schema is None):
        return None if kind == "text" else {}
    ok = kind in ("json_object", "json_schema") and isinstance(schema, dict)
    expected = "type text, json_object, or json_schema with a schema"
    check_value(ok, "response_format", form, expected)
    return schema


def unsupported_form_error(
    name: str | None,  # the request's field, if it is known
    why: str,  # llguidance's message
) -> RequestError:
    """Make the error for a form that llguidance cannot follow."""
    found = f"{name or 'the form of the answer'} cannot be followed: {why}"
    return RequestError(name, found, "one that llguidance supports", "simplify it")


def llguidance_tokenizer(tokenizer: TokenizerWrapper) -> LLTokenizer:
    """Return a model's tokenizer as llguidance needs it; takes a second for a large vocabulary."""
    try:
        return hf.from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
    except ValueError as error:
        found = f"this model's answers cannot be constrained to a form ({first_line(error)[:200]})"
        expected = "a tokenizer that llguidance can read"
        do = "ask for a free answer, or use another model"
        raise RequestError(None, found, expected, do) from error


class GrammarMask:
    """Masks logits so that one answer follows a grammar; after it only end tokens are allowed."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher.deep_copy()
        self._num_known = 0

    @property
    def error(self) -> str:
        """Why llguidance could not follow the grammar to its end, or ""."""
        # From then on only end tokens are allowed: such an answer is broken off, however it ends.
        return str(self._matcher.get_error())

    def __call__(
        self,
        tokens: Sequence[int],  # the answer so far; fewer than before take the rest back
        logits: mx.array,  # [1, V] of the token after them
    ) -> mx.array:
        self._matcher.rollback(max(0, self._num_known - len(tokens)))
        self._matcher.consume_tokens([*tokens[self._num_known :]])
        self._num_known = len(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits.shape[-1])
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)


class ThoughtLimit:
    """A mask that ends a thought after so many tokens of an answer, unless it is over."""

    def __init__(
        self,
        mask: GrammarMask,  # of the whole answer, which allows any thought up to the mark
        tokenizer: TokenizerWrapper,
        end_mark: str,  # the text that ends the thought
        max_thought_tokens: int,  # of the answer, before the mark has to come
    ) -> None:
        self._mask = mask
        self._tokenizer = tokenizer
        self._end_mark = end_mark
        self._ending = list(tokenizer.encode(end_mark, add_special_tokens=False))
        self._max_thought_tokens = max_thought_tokens
        self._over_at = math.inf  # tokens with which the thought is over, once that is known

    @property
    def error(self) -> str:
        return self._mask.error

    def __call__(
        self,
        tokens: Sequence[int],  # the whole answer so far
        logits: mx.array,  # [1, V] of the token after them
    ) -> mx.array:
        masked = self._mask(tokens, logits)
        if len(tokens) < self._max_thought_tokens or len(tokens) >= self._over_at:
            return masked
        if self._end_mark in self._tokenizer.decode([*tokens]):
            self._over_at = len(tokens)
            return masked
        self._over_at = math.inf
        ending = self._ending
        begun = next(n for n in range(len(ending) - 1, -1, -1) if _ends_with(tokens, ending[:n]))
        is_next = mx.arange(masked.shape[-1]) == ending[begun]
        forced = mx.where(is_next, masked, -mx.inf)
        # The mask forbids the mark inside a character, and if the answer has no thought.
        return masked if forced.max().item() == -mx.inf else forced


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return [*tokens[len(tokens) - len(end) :]] == [*end]


@lru_cache(maxsize=8)
def compiled_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the matcher of a grammar at its beginning, of which each answer takes a copy."""
    if len(grammar) > MOST_CHARS:
        raise unsupported_form_error(None, f"it has more than {MOST_CHARS:,} characters")
    compiled: Future[LLMatcher] = Future()

    def compile_into_future() -> None:
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
