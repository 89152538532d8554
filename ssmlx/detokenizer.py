"""The text of tokens as they come, in pieces that join to what the tokenizer makes of them all.

A tokenizer decodes tokens by their neighbours: a first one may lose its space, bytes make one
character together, spaces go before punctuation. So each token is decoded after some that precede
it, and text that a later token may still change is held back.
"""

import re
from collections.abc import Sequence

from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# What begins one of the replacements of transformers' `clean_up_tokenization`, such as " n't".
_TO_BE_CLEANED = re.compile("[ ']+(?:[nvr][ ']*)?$")
# What begins mlx-lm's mark of a line's end, "<n>".
_NEWLINE_BEGUN = re.compile("<n?$")
_MOST_BYTES = 4  # of a character
_CONTEXT = 16


class Detokenizer:
    """Tokens to text, one by one; an id that the tokenizer lacks has none."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        behind: Sequence[int] = (),  # the text before; without any, a leading space may go
    ) -> None:
        self._tokenizer = tokenizer
        self._is_cleaned = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._has_newlines = isinstance(tokenizer._tokenizer, NewlineTokenizer)
        # Tokens whose text is given out, and stays as it is.
        self._context = self._decoding_context(behind)
        text = self._decode(self._context)
        unfinished = len(text) - len(text.rstrip(_UNFINISHED))
        # Characters of the decoded text that were given out.
        self._given = len(text) - min(unfinished, _MOST_BYTES - 1)
        self._tokens: list[int] = []  # after the context

    def add(self, token: int) -> str:
        """The text that is certain now and was not given out; empty if `token` completes none."""
        name = self._token_name(token)
        if name is None:
            return ""
        self._tokens.append(token)
        if _BYTE.fullmatch(name):
            # Bytes are decoded together up to the next other token: one more may make all invalid.
            return ""
        text = self._decode([*self._context, *self._tokens])
        certain = text[: self._num_certain(text)]
        piece = certain[self._given :]
        self._given += len(piece)
        if certain == text and (own := self._decode(self._tokens)):
            self._context = self._tokens
            self._tokens = []
            self._given = len(own)
        return piece

    def held_back_text(self) -> str:
        """The text that is held back, as it is if no token follows; it stays held back."""
        return self._decode([*self._context, *self._tokens])[self._given :]

    def _num_certain(self, text: str) -> int:
        """How many characters at the beginning of `text` no later token can change."""
        # A character may be unfinished; some tokenizers clean spaces, or mark line ends.
        count = len(text.rstrip(_UNFINISHED))
        for is_held_back, pattern in (
            (self._is_cleaned, _TO_BE_CLEANED),
            (self._has_newlines, _NEWLINE_BEGUN),
        ):
            found = pattern.search(text, 0, count) if is_held_back else None
            count = found.start() if found else count
        return count

    def _decoding_context(self, tokens: Sequence[int]) -> list[int]:
        """The last `_CONTEXT` tokens that the tokenizer has; more if these begin amid bytes."""
        known = [token for token in tokens if self._token_name(token) is not None]
        first = max(0, len(known) - _CONTEXT)
        while first and _BYTE.fullmatch(self._token_name(known[first]) or ""):
            first -= 1
        return known[first:]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens)) if tokens else ""

    def _token_name(self, token: int) -> str | None:
        """The tokenizer's name for a token; None if it has no such token, as in padded
        vocabularies."""
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, ValueError, OverflowError):
            return None
        return None if name is None else str(name)
