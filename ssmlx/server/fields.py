"""The fields of a request: how they are checked, and one rule for those that a route may have.

1. A field that the route's reader looks up is followed, or its value is refused.
2. A field of `WITHOUT_EFFECT` changes nothing about what is answered here.
3. A field of `REFUSED` would change the answer, and cannot be followed: it is refused by its name,
   unless its value asks for nothing.
4. Any other field is ignored, and named in the header `X-Ignored-Fields`: unknown ones,
   and hints such as `verbosity` or `context_management`, without which an answer is right as well.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ..errors import quoted
from ..settings import OTHER_NAMES, Allowed
from ..turns import part_text
from .refusals import RequestError

Body = Mapping[str, Any]  # a request's JSON object
# What JSON calls the types that `read_typed` checks.
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def check_field(ok: bool, found: str, expected: str, param: str | None = None) -> None:
    """Raise a `RequestError` for the field `param` if `ok` is false."""
    if not ok:
        raise RequestError(param, found, expected)


def check_value(ok: bool, name: str, value: Any, expected: str) -> None:
    """Raise a `RequestError` for the value of a field, by its name or path, if `ok` is false."""
    if not ok:  # only then, as a value may be most of a body
        raise RequestError(name, f"{name} is {quoted(value)}", expected)


def check_number(name: str, value: Any, allowed: Allowed) -> Any:
    """Return a field's number if it is allowed, or None if it is absent."""
    ok = value is None or allowed.holds(value)
    kind = "a whole number, " if allowed.whole else ""
    check_value(ok, name, value, kind + allowed.in_words())
    return value


def read_whole_number(body: Body, name: str, least: int, most: int) -> Any:
    """Return a field's whole number if it is in that range, or None if it is absent."""
    return check_number(name, body.get(name), Allowed(least=least, most=most, whole=True))


def read_typed(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """Return a field's value of this type, or `default` if the field is absent or null."""
    value = body.get(name)
    check_value(value is None or isinstance(value, kind), name, value, _KINDS[kind])
    return default if value is None else value


def list_parts(content: Any, place: str = "content") -> list[Any]:
    """Return a list of objects: the given one, or a part with the given text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    expected = "a string, or a list of objects"
    check_value(isinstance(parts, list), place, content, expected)
    for number, one in enumerate(parts):
        check_value(isinstance(one, dict), f"{place}[{number}]", one, expected)
    return list(parts)


def content_text(content: Any, place: str = "content") -> str:
    """Return the text of a `content` field; the texts of parts have nothing between them."""
    parts = list_parts(content, place)
    return "".join(part_text(part, f"{place}[{number}]") for number, part in enumerate(parts))


class Fields(Mapping[str, Any]):
    """The fields of a request, which record the names that a reader looked up: those are followed.

    `in` and `get` count too.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.followed = set[str]()  # whether or not the request has them

    def __getitem__(self, name: str) -> Any:
        self.followed.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def ignored(self) -> list[str]:
        """Return the names of fields that no reader looked up; RequestError for one in `REFUSED`
        whose value asks for something."""
        found = []
        for name, value in self._values.items():
            if name in self.followed or name in WITHOUT_EFFECT:
                continue
            if name in REFUSED:
                asks_nothing = value is None or any(_is_same(value, one) for one in REFUSED[name])
                expected = _INSTEAD.get(name, f"no {name}")
                check_value(asks_nothing, name, value, f"{expected}, as it is not supported")
            else:
                found.append(name)
        return found


def with_fields(body: Body, own: Mapping[str, Any]) -> Body:
    """Return `body` with `own` instead of its fields of these names, which are not read then."""
    return ChainMap(dict(own), cast("dict[str, Any]", body))  # a chain writes to its first alone


WITHOUT_EFFECT = {
    # who asks, and notes: an answer does not depend on them
    "user", "metadata", "safety_identifier", "user_profile_id", "workspace_id", "request_id",
    "session_id",
    # prices, places and queues of a hosted service: this server has one of each
    "service_tier", "billing_policy", "fallback_credit_token", "inference_geo", "priority", "speed",
    "access_programs", "background_options", "betas",
    # whether a reply can be fetched later: none can, only prompts are cached
    "store",
    # how fast an answer comes: prompts are cached anyway, and drafting leaves answers as they are
    "cache_control", "cache_prompt", "cache_salt", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "draft_model", "num_draft_tokens", "id_slot",
    # what is reported beside the answer
    "timings_per_token", "diagnostics", "include", "stream_options", "max_tool_calls",
    # models to fall back to when another server refuses to answer
    "fallbacks",
}  # fmt: skip

# Fields that are not followed, each with the values that ask for nothing; null always does.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (), "best_of": (0, 1), "function_call": ("none",),
    "functions": ([],), "image": (), "modalities": (["text"],), "moderation": (),
    "truncation": ("disabled",), "web_search_options": (),
    # Anthropic's
    "compaction": (), "container": (), "mcp_servers": ([],), "prefill": (),
    # vLLM's
    "allowed_token_ids": ([],), "bad_words": ([],), "chat_template": (), "documents": ([],),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "logprob_token_ids": ([],),
    "min_tokens": (0,), "prompt_logprobs": (0,), "repetition_detection": (),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],), "thinking_token_budget": (), "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "add_special_tokens": (False,), "echo": (False,),
    # llama.cpp's
    "adaptive_target": (-1,), "dry_multiplier": (0,), "dynatemp_range": (0,),
    "grammar_lazy": (False,), "grammar_triggers": ([],), "lora": ([],), "min_keep": (0,),
    "mirostat": (0,), "n_indent": (0,), "n_keep": (0, -1), "n_predict": (-1,), "n_probs": (0,),
    "post_sampling_probs": (False,), "repeat_last_n": (0,), "repeat_penalty": (1,),
    "samplers": ([],), "t_max_predict_ms": (0, -1), "tfs_z": (1,), "top_n_sigma": (-1,),
    "typical_p": (0, 1), "xtc_probability": (0,),
    # mlx-lm's
    "adapters": (), "role_mapping": (),
}  # fmt: skip

_INSTEAD = OTHER_NAMES | {
    "adapters": "model as MODEL:ADAPTER",
    "functions": "tools",
    "function_call": "tool_choice",
    "n_probs": "logprobs and top_logprobs",
}


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are the same JSON value: false is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
