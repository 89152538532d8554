"""Forms that an answer is held to by llguidance: JSON schemas, regular expressions, grammars."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from, hf
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.batch import Mask
from ..errors import first_line, quoted
from . import asks
from .asks import Body, RequestError
from .schemas import closed

# JSON stands in one line, as templates write it: white space between its parts may otherwise be
# repeated without end, in which small models get lost.
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Of JSON that follows a schema, {} for any object.

    Raises:
        ValueError: it is no JSON.
    """
    wanted = closed(schema or {"type": "object"})
    return LLMatcher.grammar_from_json_schema(dict(wanted), None, STYLE)


def _of_json(value: Any) -> str:
    return json_grammar(json.loads(value) if isinstance(value, str) else value)


def _of_choices(value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("it is no list of texts")
    return grammar_from("choice", json.dumps(value))


_KINDS: Mapping[str, Callable[[Any], str]] = {
    "json": _of_json,
    "json_object": lambda wanted: json_grammar({}),
    "regex": lambda pattern: grammar_from("regex", pattern),
    "choice": _of_choices,
    "grammar": lambda text: grammar_from("grammar", text),
}
"""How forms are told, by the names that vLLM has for them."""
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Fields of a request that ask for one of these forms: vLLM's older ones, and llama.cpp's."""


def grammar_of(body: Body) -> str | None:
    """The grammar that a request's fields ask for; None where there is none.

    They are `response_format`, `structured_outputs` and those of `_FIELDS`; one of them at most.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, kind in _FIELDS.items():
        if body.get(name) not in (None, "", {}):
            found[name] = kind, body[name]
    for kind, value in asks.typed(body, "structured_outputs", dict, {}).items():
        if value is not None and value is not False:
            name = f"structured_outputs.{kind}"
            known = ", ".join(_KINDS)
            asks.check(kind in _KINDS, name, f"one of {known}", "structured_outputs")
            found[name] = kind, value
    schema = _schema(asks.typed(body, "response_format", dict, {}))
    if schema is not None:
        found["response_format"] = "json", schema
    asks.check(
        len(found) < 2, " and ".join(found), "one form of an answer", next(iter(found), None)
    )
    for name, (kind, value) in found.items():
        try:
            return _KINDS[kind](value)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _unknown(name, f"{quoted(value)} ({first_line(error)[:200]})") from error
    return None


def _schema(form: Body) -> Body | None:
    """A format's, which may be a level down; {} for any object, None for text."""
    kind = form.get("type", "text")
    named = form.get("json_schema", form)
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "text" or (kind == "json_object" and schema is None):
        return None if kind == "text" else {}
    ok = kind in ("json_object", "json_schema") and isinstance(schema, dict)
    expected = "type text, json_object, or json_schema with a schema"
    asks.check(ok, f"response_format is {quoted(form)}", expected, "response_format")
    return schema


def _unknown(name: str | None, why: str) -> RequestError:
    found = f"{name or 'the form of the answer'} cannot be followed: {why}"
    return RequestError(name, found, "one that llguidance knows", "simplify it")


def processor(tokenizer: TokenizerWrapper, grammar: str) -> Mask:
    """What holds an answer to a grammar of llguidance.

    Logits are -inf where a token would leave the grammar. Behind a whole text end tokens alone are
    left.

    Raises:
        RequestError: it cannot be followed.
    """
    matcher = LLMatcher(_tokens_of(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise _unknown(None, first_line(ValueError(matcher.get_error()))[:200])
    num_known = 0

    def constrained(tokens: Sequence[int], logits: mx.array) -> mx.array:
        nonlocal num_known
        matcher.rollback(max(0, num_known - len(tokens)))
        matcher.consume_tokens([*tokens[num_known:]])
        num_known = len(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits.shape[-1])
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)

    return constrained


@lru_cache(maxsize=1)
def _tokens_of(tokenizer: TokenizerWrapper) -> LLTokenizer:
    """What llguidance knows of a tokenizer's tokens; takes a second."""
    return hf.from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
