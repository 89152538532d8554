"""Log probabilities of tokens in the form of OpenAI's chat completions."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.sampling import TokenLogprobs
from ..generation.segments import GenerationResponse

LEAST = -9999.0  # instead of minus infinity, which JSON lacks; vLLM's number


class TokenEntries:
    """Makes the entries of tokens with one tokenizer."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}  # as many as the vocabulary has

    def of_segment(
        self, response: GenerationResponse, *, with_end_token: bool = False
    ) -> list[dict[str, Any]] | None:
        """Return an entry for each token of a response; None if it has no log probabilities."""
        if response.logprobs is None:
            return None
        # An end token is not in the text.
        has_ended = response.finish_reason == "stop" and response.stop is None
        return self._with_likeliest(
            response.logprobs[: -1 if has_ended and not with_end_token else None]
        )

    def of_prompt(self, first: int, others: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return an entry for each of a prompt's tokens; the first one has no log probability."""
        text = self._tokenizer.decode([first])
        own = {"token": text, "logprob": None, "bytes": _utf8_bytes(text), "top_logprobs": None}
        return [own, *self._with_likeliest(others)]

    def _with_likeliest(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return an entry for each token, with those of the likeliest at the same position."""
        return [
            {
                **self._entry(one.token, one.logprob),
                "top_logprobs": [self._entry(*other) for other in one.top],
            }
            for one in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, utf8 = self._text_and_bytes(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": utf8}

    def _text_and_bytes(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and its UTF-8 bytes, None for a part of a character."""
        # Each is decoded once: an answer's tokens are made into entries on the event loop.
        if token not in self._known:
            before, length = self._token_before
            text = self._tokenizer.decode([before, token])[length:]
            self._known[token] = text, _utf8_bytes(text)
        return self._known[token]

    @cached_property
    def _token_before(self) -> tuple[int, int]:
        """The token after which each other one is decoded, and the length of its text."""
        # Decoded alone, some tokens would lose a space.
        (*_, before) = self._tokenizer.encode("a", add_special_tokens=False)
        return before, len(self._tokenizer.decode([before]))


def _utf8_bytes(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token's text; a part of a character has none."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
