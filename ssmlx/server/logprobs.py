"""Log probabilities of tokens, as OpenAI's chats tell them."""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import GenerationResponse
from ..decoding.sampling import TokenLogprobs

LEAST = -9999.0
"""In the place of minus infinity, which JSON has not; vLLM's number."""


def logprobs_of(
    tokenizer: TokenizerWrapper, said: GenerationResponse, *, with_end: bool = False
) -> Any:
    """Of each token its text with its log probability, and the likeliest in its place.

    An end token, which has no text in the answer, is left out unless it `with_end`.
    """
    if said.logprobs is None:
        return None
    has_ended = said.finish_reason == "stop" and said.stop is None
    return _entries(tokenizer, said.logprobs[: -1 if has_ended and not with_end else None])


def prompt_logprobs(
    tokenizer: TokenizerWrapper, first: int, others: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """The same of a prompt; its `first` token has nothing before it, and no log probability."""
    text = tokenizer.decode([first])
    own = {"token": text, "logprob": None, "bytes": _bytes(text), "top_logprobs": None}
    return [own, *_entries(tokenizer, others)]


def _entries(
    tokenizer: TokenizerWrapper, logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    shape = _shape(tokenizer)
    return [
        {**shape(one.token, one.logprob), "top_logprobs": [shape(*other) for other in one.top]}
        for one in logprobs
    ]


def _shape(tokenizer: TokenizerWrapper) -> Callable[[int, float], dict[str, Any]]:
    """What tells a token with its log probability."""
    (*_, anchor) = tokenizer.encode("a", add_special_tokens=False)
    before = len(tokenizer.decode([anchor]))

    def shape(token: int, logprob: float) -> dict[str, Any]:
        # Behind another one: alone, some would lose a space.
        text = tokenizer.decode([anchor, token])[before:]
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": _bytes(text)}

    return shape


def _bytes(text: str) -> list[int] | None:
    """None of a part of a character, which has no text of its own."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
