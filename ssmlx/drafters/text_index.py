"""Where the last tokens of a text stood before, in it or in other texts.

Appending a token takes constant time, and so does a look-up, whatever the length of the texts: for
runs of a few lengths the index knows where each ended last, and from there where it ended before
that (as in the hash chains of LZ77 compressors). A place that is found is compared backwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

RUNS = (1, 2, 4, 8)
"""Tokens of the runs that are looked up; a match of another length is found by the next shorter
one."""
PLACES = 8
"""Places of a run that are looked at, the newest ones."""
LONGEST = 64
"""Tokens of a match that are compared at most."""
BOUNDARY = -1
"""Stands between texts, and for tokens that nobody knows: it matches nothing."""
TAIL = 8
"""Tokens before a text that stand before it in an index too, so that its beginning is found."""
EARLIER_TOKENS = 2**14
"""Tokens of earlier answers that are kept, some 8 MB: where there would be more, the older half of
them goes."""
_BYTES_PER_TOKEN = 8 + len(RUNS) * (8 + 110)
"""Of the list of tokens, and for each run of its chain and its entry in a dictionary."""


@dataclass(frozen=True)
class Match:
    """A place where the last tokens of a text stood before."""

    end: int  # of the tokens up to there in the index
    length: int  # tokens that agree


class TextIndex:
    """The tokens of one text or of several, in the order in which they are appended."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._begin(tokens)

    def _begin(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._run = 0  # tokens since the last boundary
        # by run length: where each run, by its hash, ended last; and before that, by the end
        self._last: list[dict[int, int]] = [{} for _ in RUNS]
        self._before: list[list[int]] = [[] for _ in RUNS]
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, about: no two runs are taken to be alike."""
        return _BYTES_PER_TOKEN * len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; one below zero ends a text."""
        text = self.tokens
        chains = list(zip(RUNS, self._last, self._before, strict=True))
        for token in tokens:
            text.append(token)
            end = len(text)
            self._run = self._run + 1 if token >= 0 else 0
            for length, last, before in chains:
                if length > self._run:
                    before.append(0)
                    continue
                key = hash(tuple(text[end - length :]))
                before.append(last.get(key, 0))
                last[key] = end

    def keep_last(self, count: int) -> None:
        """Forget all but the last `count` tokens."""
        self._begin(self.tokens[-count:] if count else ())

    def matches(self, text: Sequence[int], most: int = LONGEST) -> Iterator[Match]:
        """Where the last tokens of `text` stand in the index, but for its own end.

        Those that agree in most tokens come first, of equally long ones the newest; all that are
        found by a longer run come before those of a shorter one.

        Args:
            text: another text, or `tokens` themselves.
            most: tokens that are compared.
        """
        longest = min(most, self._known_run(text))
        found: set[int] = set()
        for length, last, before in reversed(
            list(zip(RUNS, self._last, self._before, strict=True))
        ):
            if length > longest:
                continue
            end = last.get(hash(tuple(text[len(text) - length :])), 0)
            places: list[Match] = []
            for _ in range(PLACES + 1):
                if not end:
                    break
                is_own = end == len(text) and text is self.tokens
                if not is_own and end not in found:
                    agrees = self._agreement(text, end, longest)
                    if agrees >= length:  # else the hashes of other tokens are the same
                        places.append(Match(end, agrees))
                        found.add(end)
                end = before[end - 1]
            yield from sorted(places, key=lambda one: (-one.length, -one.end))

    def following(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens that followed a match, within its text."""
        tokens = self.tokens[match.end : match.end + count]
        return tokens[: tokens.index(BOUNDARY)] if BOUNDARY in tokens else tokens

    @staticmethod
    def _known_run(text: Sequence[int]) -> int:
        """Tokens at the end of `text` behind its last boundary, `LONGEST` at most."""
        run = 0
        for token in reversed(text[-LONGEST:]):
            if token < 0:
                break
            run += 1
        return run

    def _agreement(self, text: Sequence[int], end: int, most: int) -> int:
        """Tokens in which the end of `text` and those up to `end` in the index agree."""
        tokens = self.tokens
        size = len(text)
        count = 0
        while count < min(most, end) and tokens[end - 1 - count] == text[size - 1 - count]:
            count += 1
        return count


class EarlierAnswers:
    """The tokens of a session's answers, of one model, which later ones may repeat.

    For whoever asks in one session: a chat, an app's engine, one key of a server. On the thread
    that runs MLX alone.
    """

    def __init__(self) -> None:
        self.index = TextIndex()

    @property
    def nbytes(self) -> int:
        """Bytes that they take, about."""
        return self.index.nbytes

    def let_go(self) -> None:
        """Forget them: others need the memory."""
        self.index.keep_last(0)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer's tokens, behind the end of what it answers."""
        self.index.extend([BOUNDARY, *prompt[-TAIL:], *answer])
        if len(self.index.tokens) > EARLIER_TOKENS:
            self.index.keep_last(EARLIER_TOKENS // 2)
