"""Lookup drafters: what followed an earlier occurrence of the text's last tokens is likely to
follow again.

They look up on the host, in the text itself, in an expected text (`reference`), or in earlier
answers. What streams copy is looked up on the device, see `copies`.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple, Self

import mlx.core as mx

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..model.tree import Tree, chain_tree
from ..policy.offers import ChainOffer
from ..settings import PromptLookupConfig
from .base import BaseDrafter, DrafterInputs
from .text_index import CONTEXT_TOKENS, MAX_MATCH, EarlierAnswers, Match, TextIndex
from .trie import Trie, padded_size

# Names of lookup drafters: in the text itself, in earlier answers, in an expected text (the
# settings' `prompt_lookup.reference`, which is a request's `prediction`).
NAME = "prompt-lookup"
EARLIER_ANSWERS = "earlier-answers"
EXPECTED = "expected-text"


class OwnText:
    """Looks the end of an answer's text up in that same text, including the prompt."""

    def __init__(self) -> None:
        self.index = TextIndex()

    @property
    def end(self) -> Sequence[int]:
        """The text's newest tokens: here, all of it."""
        return self.index.tokens

    @property
    def nbytes(self) -> int:
        """Estimated bytes of what is kept for this answer alone."""
        return self.index.nbytes

    def start(self, tokens: Sequence[int]) -> None:
        """Index a text; only its new tokens if it goes on from the one before."""
        known = len(self.index.tokens)
        if self.index.tokens != list(tokens[:known]):
            self.index = TextIndex()
            known = 0
        self.index.extend(tokens[known:])

    def extend(self, tokens: Sequence[int]) -> None:
        self.index.extend(tokens)

    def tokens_after(self, match: Match, count: int) -> list[int]:
        """The tokens that followed a match; those that reach the text's end repeat up to exactly
        `count`, so that a text with a period is drafted at full length."""
        found = self.index.tokens_after(match, count)
        if len(found) == len(self.index.tokens) - match.end:
            return list(islice(cycle(found), count))
        return found


class OtherText:
    """Looks the end of an answer's text up in another text: earlier answers, or an expected one."""

    def __init__(
        self,
        index: TextIndex,  # only read, except for an expected text
        # the first `start` appends them to `index`, after the prompt's end, so that a match can
        # reach from the prompt into them
        expected_tokens: Sequence[int] = (),
        # tokens of the prompt's end that are put before them
        num_prompt_tokens_before: int = CONTEXT_TOKENS,
    ) -> None:
        self.index = index
        self._expected_tokens = expected_tokens
        self._num_prompt_tokens_before = num_prompt_tokens_before
        self.end: list[int] = []  # the text's newest tokens, as many as a match may have

    @property
    def nbytes(self) -> int:
        """Estimated bytes of an expected text's index, even before it is made; earlier answers are
        shared."""
        num_expected = len(self._expected_tokens)
        num_before = self._num_prompt_tokens_before if num_expected else 0
        return TextIndex.bytes_of(num_before + num_expected)

    def start(self, tokens: Sequence[int]) -> None:
        if self._expected_tokens and not self.index.tokens:
            end = tokens[-self._num_prompt_tokens_before :]
            self.index.extend([*end, *self._expected_tokens])
        self.end = list(tokens[-MAX_MATCH:])

    def extend(self, tokens: Sequence[int]) -> None:
        self.end = [*self.end, *tokens][-MAX_MATCH:]

    def tokens_after(self, match: Match, count: int) -> list[int]:
        return self.index.tokens_after(match, count)


class Continuation(NamedTuple):
    """Up to as many tokens as the largest draft has levels, and the length of the match before
    them."""

    match_length: int
    tokens: Sequence[int]


class PromptLookupDrafter(BaseDrafter):
    """Drafts what followed an earlier occurrence of the text's last tokens (prompt lookup
    decoding).

    Matches are taken longest first, and of equally long ones the newest first. Each match's
    continuation is a chain; chains with a common beginning share its nodes.
    """

    name = NAME
    needs = Needs(host_tokens=True, follows_from_start=True)
    needs_whole_context = True
    keeps_to_chains = True

    def __init__(
        self,
        config: PromptLookupConfig,
        *,
        earlier: EarlierAnswers | None = None,  # looked up in instead of the text
        end_tokens: Collection[int] = (),  # each ends a draft
        is_chain: bool = False,  # the target takes no trees: only the first continuation is drafted
    ) -> None:
        self._is_chain = is_chain
        self.source: OwnText | OtherText = OwnText()
        if earlier is not None:
            self.name = EARLIER_ANSWERS
            self.source = OtherText(earlier.index)
        elif config.reference:
            self.name = EXPECTED
            num_before = min(CONTEXT_TOKENS, config.ngram)
            self.source = OtherText(TextIndex(), config.reference, num_before)
        self.largest = DraftShape(self.name, padded_size(config.size), config.num_draft_tokens)
        self._config = config
        self._end_tokens = frozenset(end_tokens)
        self._best: Continuation | None = None  # None until it is looked up

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Self:
        return cls(inputs.settings, end_tokens=inputs.end_tokens, is_chain=inputs.is_chain)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the index, without earlier answers: many drafters share them."""
        return self.source.nbytes

    def start(self, tokens: Sequence[int]) -> None:
        self.source.start(tokens)
        self._best = None

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        self.source.extend(tokens)
        self._best = None

    def offer(self) -> ChainOffer | None:
        best = self._best_continuation()
        return (
            ChainOffer(self.largest, best.match_length, len(best.tokens)) if best.tokens else None
        )

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Propose all matches' continuations, the best match's first, as far as there is room;
        nothing of `verified` is read."""
        if self._is_chain:
            most = min(shape.levels, self._config.size - 1)
            following = self._best_continuation().tokens[:most]
            return chain_tree(mx.array([self.source.end[-1], *following], mx.int32))
        trie = Trie(self.source.end[-1], min(shape.nodes, self._config.size))
        for match in self._find_matches():
            trie.add(self._continuation_of(match, shape.levels))
            if trie.is_full:
                break
        return trie.to_padded_tree(shape.levels if len(trie.tokens) > 1 else 0)

    def _best_continuation(self) -> Continuation:
        """The continuation of the best match that any token follows, kept until the text goes on;
        of length 0 without one."""
        if self._best is None:
            self._best = Continuation(0, ())
            for match in self._find_matches() if self.source.end else ():
                following = self._continuation_of(match, self.largest.levels)
                if following:
                    self._best = Continuation(match.length, following)
                    break
        return self._best

    def _find_matches(self) -> Iterator[Match]:
        return self.source.index.find_matches(self.source.end, self._config.ngram)

    def _continuation_of(self, match: Match, max_tokens: int) -> list[int]:
        """The tokens after a match, up to the first end token, which is included."""
        found = self.source.tokens_after(match, max_tokens)
        for count, token in enumerate(found, 1):
            if token in self._end_tokens:
                return found[:count]
        return found
