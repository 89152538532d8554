"""Lookup: what followed the text's last tokens where they stood before is likely to follow.

Drafts from nothing else, and looks up on the host; what streams copy is looked up on the device,
see `copies`. A drafter looks up in the text itself, in a text that is expected (`reference`), or in
earlier answers.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import mlx.core as mx

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..model.tree import Tree, chain_tree
from ..policy.offers import ChainOffer
from ..settings import PromptLookupConfig
from .registry import DrafterInputs, register_drafter
from .text_index import CONTEXT_TOKENS, MAX_MATCH, EarlierAnswers, Match, TextIndex
from .trie import Trie, padded_size

NAME = "prompt-lookup"
EARLIER_ANSWERS = "earlier-answers"
EXPECTED = "expected-text"
"""Names of lookup drafters: in the text itself, in earlier answers, in an expected text (the
settings' `prompt_lookup.reference`, which is a request's `prediction`)."""


class OwnText:
    """Looks the end of an answer's text up in that same text, prompt included."""

    def __init__(self) -> None:
        self.index = TextIndex()

    @property
    def end(self) -> Sequence[int]:
        """The text's newest tokens: here, all of it."""
        return self.index.tokens

    @property
    def nbytes(self) -> int:
        """Bytes, about, that are kept for this answer alone."""
        return self.index.nbytes

    def start(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text. Where they go on from the text before, only the new ones are
        indexed.

        Else the index is built anew of all of them.
        """
        known = len(self.index.tokens)
        if self.index.tokens != list(tokens[:known]):
            self.index = TextIndex()
            known = 0
        self.index.extend(tokens[known:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        self.index.extend(tokens)

    def tokens_after(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens behind a match.

        Where these reach the text's end they are repeated to exactly `count`, so that a text with a
        period is drafted at full length.
        """
        found = self.index.tokens_after(match, count)
        if len(found) == len(self.index.tokens) - match.end:
            return list(islice(cycle(found), count))
        return found


class OtherText:
    """Looks the end of an answer's text up in another text: earlier answers, or an expected one.

    Args:
        index: what is looked up in; only read, but for the expected text.
        expected_tokens: a text that the first `start` appends to `index`, behind the end of the
            prompt, so that a match can reach from the prompt into it.
        num_prompt_tokens_before: how many of the prompt's last tokens are put before that text.
    """

    def __init__(
        self,
        index: TextIndex,
        expected_tokens: Sequence[int] = (),
        num_prompt_tokens_before: int = CONTEXT_TOKENS,
    ) -> None:
        """Keep `index`, which is not copied, and begin with an empty text."""
        self.index = index
        self._expected_tokens = expected_tokens
        self._num_prompt_tokens_before = num_prompt_tokens_before
        self.end: list[int] = []  # the text's newest tokens, as many as a match may have

    @property
    def nbytes(self) -> int:
        """Bytes, about, that are kept for this answer alone: of the index of an expected text, also
        before it is made. Earlier answers are shared.
        """
        num_expected = len(self._expected_tokens)
        num_before = self._num_prompt_tokens_before if num_expected else 0
        return TextIndex.bytes_of(num_before + num_expected)

    def start(self, tokens: Sequence[int]) -> None:
        """Begin with the text `tokens`, whose end will be looked up.

        The expected text, if there is one, is put into the index if that is empty, after the last
        `num_prompt_tokens_before` of `tokens`.
        """
        if self._expected_tokens and not self.index.tokens:
            end = tokens[-self._num_prompt_tokens_before :]
            self.index.extend([*end, *self._expected_tokens])
        self.end = list(tokens[-MAX_MATCH:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        self.end = [*self.end, *tokens][-MAX_MATCH:]

    def tokens_after(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens that follow a match in the other text, up to a boundary."""
        return self.index.tokens_after(match, count)


class Continuation(NamedTuple):
    """Tokens that followed a match, and how long the match is; as many as the largest draft has
    levels."""

    match_length: int
    tokens: Sequence[int]


class PromptLookupDrafter:
    """Drafts what followed the text's last tokens where they stood before (prompt lookup decoding).

    Matches are taken longest first, and of equally long ones the newest first. Each match's
    continuation is a chain; chains with a common beginning share its nodes.

    Args:
        config: how much is drafted. With `reference` tokens, continuations are looked up in these
            alone, which are expected to follow the prompt as the answer does.
        earlier: look up in these earlier answers in place of the text itself.
        end_tokens: each of them ends a draft.
        is_chain: whether the target takes no trees: the first continuation alone is drafted then.

    Attributes:
        name: the drafter's name in draft shapes and statistics, by what it looks up in.
    """

    needs = Needs(host_tokens=True, follows_from_start=True)
    num_parameters = 0
    draft_calls = 0

    def __init__(
        self,
        config: PromptLookupConfig,
        *,
        earlier: EarlierAnswers | None = None,
        end_tokens: Collection[int] = (),
        is_chain: bool = False,
    ) -> None:
        """Choose what is looked up in: `earlier` where given, else the settings' reference, else
        the text.

        That gives the drafter's `name`. Nothing is indexed before `start`.
        """
        self.name = NAME
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
        self._best: Continuation | None = None  # None until it is looked up behind the newest token

    @property
    def cache_bytes(self) -> int:
        """Bytes of the text's index. Earlier answers are not counted: many drafters share them."""
        return self.source.nbytes

    def start(self, tokens: Sequence[int]) -> None:
        """Begin an answer behind `tokens`; of a text that goes on, only the new part is indexed."""
        self.source.start(tokens)
        self._best = None

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Append `tokens` to the text; the offer is found anew when it is asked for."""
        self.source.extend(tokens)
        self._best = None

    def offer(self) -> ChainOffer | None:
        """What the best match's continuation offers: its length, and how many tokens follow it.

        None where nothing matches, or nothing follows what does, and before `start`.
        """
        best = self._look_up_best_once()
        return (
            ChainOffer(self.largest, best.match_length, len(best.tokens)) if best.tokens else None
        )

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """The tree of all matches' continuations, the best match's first, as far as there is room.

        Room is for the nodes and levels of `shape`, and for no more nodes than the settings say;
        nodes are then padded to a usual size. For a target that takes no trees it is the chain of
        the first continuation that has a token, without padding. The root alone where nothing
        matches. Of `verified` nothing is read: the root is the text's newest token.
        """
        if self._is_chain:
            most = min(shape.levels, self._config.size - 1)
            following = self._look_up_best_once().tokens[:most]
            return chain_tree(mx.array([self.source.end[-1], *following], mx.int32))
        trie = Trie(self.source.end[-1], min(shape.nodes, self._config.size))
        for match in self._find_matches():
            trie.add(self._continuation_of(match, shape.levels))
            if trie.is_full:
                break
        return trie.to_padded_tree(shape.levels if len(trie.tokens) > 1 else 0)

    def _look_up_best_once(self) -> Continuation:
        """The continuation of the best match that any token follows, looked up at the first
        question and kept until the text goes on.

        Without tokens, and of a match of length 0, before `start` and where there is no such match.
        """
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
        """Up to `max_tokens` that followed a match, cut behind the first end token among them."""
        found = self.source.tokens_after(match, max_tokens)
        for count, token in enumerate(found, 1):
            if token in self._end_tokens:
                return found[:count]
        return found


@register_drafter(NAME, needs_whole_context=True, keeps_to_chains=True)
def build(inputs: DrafterInputs) -> PromptLookupDrafter:
    return PromptLookupDrafter(
        inputs.settings, end_tokens=inputs.end_tokens, is_chain=inputs.is_chain
    )
