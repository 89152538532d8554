"""Texts that are certainly too long for a model's context, by their bytes: to make them into tokens
takes a second and a hundred megabytes for each megabyte of text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import pre_tokenizers

from ..errors import ContextLengthError

# How many bytes become one at most: U+212A, of three bytes, is the letter K.
_MOST_COMPOSED = {"NFC": 3, "Prepend": 1}
# Pre-tokenizers that leave nothing of a text out, unless their behavior is "Removed".
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")


class LengthCheckedTokenizer:
    """A tokenizer that refuses texts that certainly fill the context."""

    def __init__(self, tokenizer: TokenizerWrapper, bytes_per_token: int, limit: int) -> None:
        self._checked = tokenizer
        self._bytes_per_token = bytes_per_token
        self._limit = limit  # tokens of the context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checked, name)

    def encode(self, text: str, **more: Any) -> list[int]:
        num_bytes = len(text.encode(errors="replace"))
        fewest = -(-num_bytes // self._bytes_per_token)
        if fewest >= self._limit:
            raise ContextLengthError(fewest, self._limit, is_counted=False)
        return list(self._checked.encode(text, **more))


def with_length_check(
    tokenizer: TokenizerWrapper,
    bytes_per_token: int | None,  # by `most_bytes_per_token`
    limit: int | None,  # tokens of the context, if it has a limit
) -> Any:
    """Return a tokenizer that refuses texts that are certainly too long, or the given one if none
    is."""
    if limit is None or bytes_per_token is None:
        return tokenizer
    return LengthCheckedTokenizer(tokenizer, bytes_per_token, limit)


def most_bytes_per_token(tokenizer: TokenizerWrapper) -> int | None:
    """Return the most bytes of a text that one token represents, or None if that is not known."""
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder().values()
    # Such tokens take along any amount of white space beside them.
    if any(one.lstrip or one.rstrip for one in added):
        return None
    steps = _parts(backend.pre_tokenizer, "pretokenizers")
    if not all(_keeps_all(step) for step in steps):
        return None
    is_of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    letters = pre_tokenizers.ByteLevel.alphabet() if is_of_bytes else _byte_tokens()
    falls_back = getattr(backend.model, "byte_fallback", False)
    if not (is_of_bytes or falls_back) or not vocab.keys() >= {*letters}:
        return None
    shrinks = [_most_composed(step) for step in _parts(backend.normalizer, "normalizers")]
    if None in shrinks:
        return None
    longest = max(len(one) if is_of_bytes else len(one.encode()) for one in vocab)
    longest = max([longest, *(len(one.content.encode()) for one in added)])
    return int(longest * max([1, *filter(None, shrinks)]))


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _parts(component: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, or of those that a sequence has."""
    if component is None:
        return ()
    own = json.loads(component.__getstate__())
    return own[name] if own["type"] == "Sequence" else [own]


def _keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _most_composed(step: Mapping[str, Any]) -> int | None:
    """Return the most bytes of a text that a normalizer turns into one, or None if that is not
    known."""
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        is_longer = old is not None and len(old.encode()) <= len(step["content"].encode())
        return 1 if is_longer else None
    return _MOST_COMPOSED.get(step["type"])
