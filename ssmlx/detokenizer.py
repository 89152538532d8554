"""The text of tokens as they come, in pieces that join to what the tokenizer makes of them all.

A tokenizer decodes tokens by their neighbours: a first one may lose its space, bytes make one
character together, spaces go where punctuation follows. So each token is decoded behind some that
stand before it, and text that a later token may still change is held back.
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
    """Tokens to text, one by one; an id that the tokenizer lacks has none.

    Args:
        tokenizer: as `ssmlx.load` returns it.
        behind: tokens that stand before the first one. Without any, the text is that of a
            beginning, which some tokenizers give no leading space.
    """

    def __init__(self, tokenizer: TokenizerWrapper, behind: Sequence[int] = ()) -> None:
        """Begin behind `behind`, of which the last tokens are decoded as context; their text is not
        given out.

        Text of a character that they leave unfinished is given out with the tokens that complete
        it.
        """
        self._tokenizer = tokenizer
        self._is_cleaned = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._has_newlines = isinstance(tokenizer._tokenizer, NewlineTokenizer)
        self._context = self._decoding_context(
            behind
        )  # tokens whose text is given out, and stays as it is
        text = self._decode(self._context)
        unfinished = len(text) - len(text.rstrip(_UNFINISHED))
        self._given = len(text) - min(unfinished, _MOST_BYTES - 1)  # characters of what is decoded
        self._tokens: list[int] = []  # those behind the context

    def add(self, token: int) -> str:
        """Take in the next token, and return the text that is certain now and was not given out.

        It may be empty, as behind a token of a single byte, whose text comes with the next other
        token. A token that the tokenizer lacks is left out.
        """
        name = self._token_name(token)
        if name is None:
            return ""
        self._tokens.append(token)
        if _BYTE.fullmatch(name):
            # Bytes are decoded together as far as they go on: one more may make all invalid.
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
        """How many characters of `text`, from its beginning, no later token can change.

        Not certain are unfinished characters at its end, and, where the tokenizer cleans spaces or
        marks line ends, what may become such a place.
        """
        count = len(text.rstrip(_UNFINISHED))
        for is_held_back, pattern in (
            (self._is_cleaned, _TO_BE_CLEANED),
            (self._has_newlines, _NEWLINE_BEGUN),
        ):
            found = pattern.search(text, 0, count) if is_held_back else None
            count = found.start() if found else count
        return count

    def _decoding_context(self, tokens: Sequence[int]) -> list[int]:
        """The last `_CONTEXT` of `tokens` that the tokenizer has; more where these begin amid
        bytes.

        Then they begin where the run of byte tokens does, which may be one character.
        """
        known = [token for token in tokens if self._token_name(token) is not None]
        first = max(0, len(known) - _CONTEXT)
        while first and _BYTE.fullmatch(self._token_name(known[first]) or ""):
            first -= 1
        return known[first:]

    def _decode(self, tokens: Sequence[int]) -> str:
        """What the tokenizer makes of `tokens`; nothing of none."""
        return str(self._tokenizer.decode(tokens)) if tokens else ""

    def _token_name(self, token: int) -> str | None:
        """What the tokenizer calls a token; None if it has no such token, as in padded
        vocabularies."""
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, ValueError, OverflowError):
            return None
        return None if name is None else str(name)
