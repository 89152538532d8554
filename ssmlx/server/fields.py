"""The fields that a request may have: one rule for all routes.

1. A field of `FOLLOWED` is followed, or its value is refused.
2. A field of `WITHOUT_EFFECT` changes nothing about what is answered here.
3. A field of `REFUSED` would change the answer, and cannot be followed: it is refused by its name,
   unless its value asks for nothing.
4. Any other field is ignored, and named in the header `X-Ignored-Fields`: unknown ones,
   and hints such as `verbosity` or `context_management`, without which an answer is right as well.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import quoted
from .completions import SETTINGS
from .requests import Body, RequestError

_SHARED = {
    *SETTINGS,
    "model", "stream", "seed", "logit_bias", "ignore_eos", "stop", "prediction",
    "grammar", "json_schema", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip
_CHAT = {
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort",
    "add_generation_prompt", "continue_final_message",
}  # fmt: skip
# Fields that all APIs of chats have by the same name.
OF_CHATS = _SHARED | _CHAT
_MESSAGES = OF_CHATS - {"stop"} | {
    "messages", "system", "thinking", "stop_sequences", "output_config", "output_format", "thread",
}  # fmt: skip
# What is followed at each address: those fields that the route's reader reads, and no others.
FOLLOWED = {
    "/v1/chat/completions": OF_CHATS | {
        "messages", "response_format", "n", "logprobs", "top_logprobs", "stream_options",
    },
    "/v1/completions": _SHARED | {
        "prompt", "response_format", "n", "logprobs", "echo", "suffix", "stream_options",
    },
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/responses": OF_CHATS - {"max_tokens"} | {
        "input", "instructions", "max_output_tokens", "text", "reasoning", "metadata",
        "previous_response_id", "conversation", "prompt", "background",
    },
}  # fmt: skip

WITHOUT_EFFECT = {
    # who asks, what it costs, what is kept, and where: nothing is kept or billed here
    "user", "metadata", "store", "service_tier", "safety_identifier", "user_profile_id",
    "workspace_id", "billing_policy", "fallback_credit_token", "inference_geo", "request_id",
    "session_id", "priority", "speed", "access_programs", "background_options", "betas",
    # how fast it is found: prompts are cached anyway, and drafting leaves answers as they are
    "cache_control", "cache_prompt", "cache_salt", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "draft_model", "num_draft_tokens", "id_slot",
    # what else is reported beside the answer
    "timings_per_token", "diagnostics", "include", "stream_options", "max_tool_calls",
    # what would be done where another server declines to answer
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

_INSTEAD = {
    "adapters": "model as MODEL:ADAPTER",
    "functions": "tools",
    "function_call": "tool_choice",
    "n_predict": "max_tokens",
    "n_probs": "logprobs and top_logprobs",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
}


def check_fields(route: str, body: Body) -> Sequence[str]:
    """Return the names that are ignored; raise RequestError for what cannot be followed."""
    ignored = []
    for name, value in body.items():
        if name in FOLLOWED[route] or name in WITHOUT_EFFECT:
            continue
        if name not in REFUSED:
            ignored.append(name)
        elif value is not None and not any(_is_same(value, one) for one in REFUSED[name]):
            found = f"{name} is {quoted(value)}"
            expected = f"{_INSTEAD.get(name, 'none')}: this server does not follow {name}"
            raise RequestError(name, found, expected)
    return ignored


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are the same JSON value: false is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
