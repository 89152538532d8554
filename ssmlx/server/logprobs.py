"""Log probabilities of tokens in the form of OpenAI's chat completions."""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.sampling import TokenLogprobs
from ..generation.segments import GenerationResponse

LEAST = -9999.0
"""In the place of minus infinity, which JSON has not; vLLM's number."""


def segment_logprobs(
    tokenizer: TokenizerWrapper, response: GenerationResponse, *, with_end_token: bool = False
) -> Any:
    """Return the log probabilities of a response's tokens, as OpenAI's chats have them.

    Args:
        tokenizer: of the model.
        response: of an answer.
        with_end_token: whether an end token, which is not in the text, has an entry too.

    Returns:
        An entry for each token, with the likeliest tokens at the same position; None where the
        response has no log probabilities.
    """
    if response.logprobs is None:
        return None
    has_ended = response.finish_reason == "stop" and response.stop is None
    return _logprob_entries(
        tokenizer, response.logprobs[: -1 if has_ended and not with_end_token else None]
    )


def prompt_logprobs(
    tokenizer: TokenizerWrapper, first: int, others: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """Return an entry for each of a prompt's tokens.

    Args:
        tokenizer: of the model.
        first: the id of the first token, whose entry has no log probability.
        others: the log probabilities of the other tokens, in their order.
    """
    text = tokenizer.decode([first])
    own = {"token": text, "logprob": None, "bytes": _utf8_bytes(text), "top_logprobs": None}
    return [own, *_logprob_entries(tokenizer, others)]


def _logprob_entries(
    tokenizer: TokenizerWrapper, logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """Return an entry for each token, with those of the likeliest tokens at the same position."""
    make_entry = _make_token_entry_function(tokenizer)
    return [
        {
            **make_entry(one.token, one.logprob),
            "top_logprobs": [make_entry(*other) for other in one.top],
        }
        for one in logprobs
    ]


def _make_token_entry_function(
    tokenizer: TokenizerWrapper,
) -> Callable[[int, float], dict[str, Any]]:
    """Return a function from (token id, log probability) to an entry with "token", "logprob" and
    "bytes".

    A text that is no whole character has no bytes. Minus infinity becomes `LEAST`.
    """
    (*_, anchor) = tokenizer.encode("a", add_special_tokens=False)
    before = len(tokenizer.decode([anchor]))

    def make_entry(token: int, logprob: float) -> dict[str, Any]:
        # Behind another one: alone, some would lose a space.
        text = tokenizer.decode([anchor, token])[before:]
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": _utf8_bytes(text)}

    return make_entry


def _utf8_bytes(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token's text; None for a part of a character, which has no
    text.
    """
    return None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
