"""Earlier occurrences of the last tokens of a text, in it or in other texts.

Appending a token and a look-up take constant time, whatever the length of the texts: for n-grams of
a few lengths the index knows each one's newest end, and from there the end before that (as in the
hash chains of LZ77 compressors). What is found is compared token by token, backwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# Tokens of the n-grams that are hashed; a match of another length is found by the next shorter one.
NGRAM_LENGTHS = (1, 2, 4, 8)
MAX_MATCHES = 8  # newest earlier ends of an n-gram that are compared: bounds a look-up's time
MAX_MATCH = 64  # most tokens of a match that are compared; longer ones count as this long
BOUNDARY = -1  # a token id between texts, and for unknown tokens: it matches nothing
# Tokens of a prompt's end that are put before a text in an index, so that the text's beginning is
# found by what came before it.
CONTEXT_TOKENS = 8
# Tokens of earlier answers that are kept, some 8 MB: beyond, the older half is forgotten.
EARLIER_TOKENS = 2**14
# About: 8 in the list of tokens; per n-gram length 8 in a list and 110 in a dictionary.
_BYTES_PER_TOKEN = 8 + len(NGRAM_LENGTHS) * (8 + 110)


@dataclass(frozen=True)
class Match:
    """An earlier occurrence, in an index, of the last tokens of a text."""

    end: int  # tokens of the index up to the match's last one, that one included
    length: int  # tokens before `end` that agree with the end of the text


@dataclass
class _Chain:
    """The ends of the n-grams of one length in an index; an end is the number of tokens up to it, 0
    for none."""

    length: int  # tokens of each n-gram
    last_ends: dict[int, int] = field(default_factory=dict)  # the newest end, by the n-gram's hash
    previous_ends: list[int] = field(default_factory=list)  # by end - 1: the end before that


class TextIndex:
    """An index of one text or of several, in the order in which their tokens are appended; `tokens`
    includes boundaries."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._rebuild(tokens)

    def _rebuild(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._run = 0  # tokens since the last boundary
        self._chains = [_Chain(length) for length in NGRAM_LENGTHS]
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        """An upper estimate, as if all n-grams differed."""
        return self.bytes_of(len(self.tokens))

    @staticmethod
    def bytes_of(num_tokens: int) -> int:
        return _BYTES_PER_TOKEN * num_tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """A token below zero, such as `BOUNDARY`, is appended too and ends a text: no n-gram spans
        it."""
        text = self.tokens
        for token in tokens:
            text.append(token)
            end = len(text)
            self._run = self._run + 1 if token >= 0 else 0
            for chain in self._chains:
                if chain.length > self._run:
                    chain.previous_ends.append(0)
                    continue
                key = hash(tuple(text[end - chain.length :]))
                chain.previous_ends.append(chain.last_ends.get(key, 0))
                chain.last_ends[key] = end

    def keep_last(self, count: int) -> None:
        self._rebuild(self.tokens[-count:] if count else ())

    def find_matches(
        self,
        text: Sequence[int],  # another text, or `tokens` itself, whose own end is no match
        max_length: int = MAX_MATCH,  # compared tokens of a match; at most `MAX_MATCH`
    ) -> Iterator[Match]:
        """The best matches first: by the n-gram length that found them, the longest first; within
        it by length, then the newest. No end comes twice, and at most `MAX_MATCHES` + 1 are
        compared per n-gram length."""
        longest = self._count_tokens_since_boundary(text, min(max_length, MAX_MATCH))
        found: set[int] = set()
        for chain in reversed(self._chains):
            if chain.length > longest:
                continue
            end = chain.last_ends.get(hash(tuple(text[len(text) - chain.length :])), 0)
            matches: list[Match] = []
            for _ in range(MAX_MATCHES + 1):
                if not end:
                    break
                is_own = end == len(text) and text is self.tokens
                if not is_own and end not in found:
                    length = self._match_length(text, end, longest)
                    if length >= chain.length:  # less if other tokens have the same hash
                        matches.append(Match(end, length))
                        found.add(end)
                end = chain.previous_ends[end - 1]
            yield from sorted(matches, key=lambda one: (-one.length, -one.end))

    def tokens_after(self, match: Match, count: int) -> list[int]:
        """The tokens after a match, up to the next boundary."""
        tokens = self.tokens[match.end : match.end + count]
        return tokens[: tokens.index(BOUNDARY)] if BOUNDARY in tokens else tokens

    @staticmethod
    def _count_tokens_since_boundary(text: Sequence[int], at_most: int) -> int:
        count = 0
        for token in reversed(text[-at_most:] if at_most else ()):
            if token < 0:
                break
            count += 1
        return count

    def _match_length(self, text: Sequence[int], end: int, max_length: int) -> int:
        tokens = self.tokens
        size = len(text)
        count = 0
        while count < min(max_length, end) and tokens[end - 1 - count] == text[size - 1 - count]:
            count += 1
        return count


class EarlierAnswers:
    """The tokens of a session's earlier answers, which later ones may repeat.

    One for all answers of one model in a session: a chat, an app's engine, one key of a server.
    Pass it as `earlier=` to `ssmlx.stream_generate`, which drafts from it and adds the answer to
    it. It is used only on the thread that runs MLX.
    """

    def __init__(self) -> None:
        self.index = TextIndex()

    @property
    def nbytes(self) -> int:
        """Estimated bytes of host memory."""
        return self.index.nbytes

    def free_memory(self) -> None:
        """Forget all answers, to free their memory."""
        self.index.keep_last(0)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Append the tokens of an `answer`, after the last `CONTEXT_TOKENS` of its `prompt`; beyond
        `EARLIER_TOKENS` in all, the last half of so many are kept."""
        self.index.extend([BOUNDARY, *prompt[-CONTEXT_TOKENS:], *answer])
        if len(self.index.tokens) > EARLIER_TOKENS:
            self.index.keep_last(EARLIER_TOKENS // 2)
