"""Lookup: what followed the text's last tokens where they stood before is likely to follow.

Drafts from nothing else, and looks up on the host; what streams copy is looked up on the device,
see `copies`. A drafter looks up in the text itself, in a text that is expected (`reference`), or in
earlier answers.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice

from ..decoding.controller import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..model.tree import Tree
from ..policy.offers import ChainOffer
from ..settings import PromptLookupConfig
from .registry import DrafterInputs, register_drafter
from .text_index import CONTEXT_TOKENS, MAX_MATCH, EarlierAnswers, Match, TextIndex
from .trie import Trie, padded_size

NAME = "prompt-lookup"
EARLIER_ANSWERS = "earlier-answers"
EXPECTED = "expected-text"
"""Names of lookup drafters: in the text itself, in earlier answers, in an expected text."""


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
        """Begin with the text `tokens`; where it goes on from the last one, that is kept."""
        known = len(self.index.tokens)
        if self.index.tokens != list(tokens[:known]):
            self.index = TextIndex()
            known = 0
        self.index.extend(tokens[known:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        self.index.extend(tokens)

    def following(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens behind a match. What reaches the text's end repeats itself, so that
        a text with a period is drafted at full length."""
        found = self.index.following(match, count)
        if len(found) == len(self.index.tokens) - match.end:
            return list(islice(cycle(found), count))
        return found


class OtherText:
    """Looks the end of an answer's text up in another text: earlier answers, or an expected one.

    Args:
        index: what is looked up in; only read, but for the expected text.
        expected: a text that is appended to `index` at the first `start`, behind the end of the
            prompt, so that a match can reach from the prompt into it.
        overlap: tokens of the prompt's end that are put before `expected`.
    """

    nbytes = 0  # of the answer's own: earlier answers are shared

    def __init__(
        self, index: TextIndex, expected: Sequence[int] = (), overlap: int = CONTEXT_TOKENS
    ) -> None:
        self.index = index
        self._expected = expected
        self._overlap = overlap
        self.end: list[int] = []  # the text's newest tokens, as many as a match may have

    def start(self, tokens: Sequence[int]) -> None:
        """Begin with the text `tokens`."""
        if self._expected and not self.index.tokens:
            self.index.extend([*tokens[-self._overlap :], *self._expected])
        self.end = list(tokens[-MAX_MATCH:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        self.end = [*self.end, *tokens][-MAX_MATCH:]

    def following(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens that follow a match there."""
        return self.index.following(match, count)


class PromptLookupDrafter:
    """Drafts what followed the text's last tokens where they stood before (prompt lookup decoding).

    Matches are taken longest first, and of equally long ones the newest first. Each match's
    continuation is a chain; chains with a common beginning share its nodes.

    Args:
        config: how much is drafted. With `reference` tokens, continuations are looked up in these
            alone, which are expected to follow the prompt as the answer does.
        earlier: look up in these earlier answers in place of the text itself.
        end_tokens: each of them ends a draft.

    Attributes:
        name: the drafter's name in draft shapes and statistics, by what it looks up in.
    """

    needs = Needs(host_tokens=True, text=True)
    num_parameters = 0
    draft_calls = 0

    def __init__(
        self,
        config: PromptLookupConfig,
        *,
        earlier: EarlierAnswers | None = None,
        end_tokens: Collection[int] = (),
    ) -> None:
        self.name = NAME
        self.source: OwnText | OtherText = OwnText()
        if earlier is not None:
            self.name = EARLIER_ANSWERS
            self.source = OtherText(earlier.index)
        elif config.reference:
            self.name = EXPECTED
            overlap = min(CONTEXT_TOKENS, config.ngram)
            self.source = OtherText(TextIndex(), config.reference, overlap)
        self.largest = DraftShape(self.name, padded_size(config.size), config.num_draft_tokens)
        self._config = config
        self._end_tokens = frozenset(end_tokens)
        self._offer: ChainOffer | None = None
        self._is_offer_known = False  # until the text goes on

    @property
    def cache_bytes(self) -> int:
        """Bytes of the text's index. Earlier answers are not counted: many drafters share them."""
        return self.source.nbytes

    def start(self, tokens: Sequence[int]) -> None:
        """Begin an answer behind `tokens`; of a text that goes on, only the new part is indexed."""
        self.source.start(tokens)
        self._is_offer_known = False

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Append `tokens` to the text; the offer is found anew when it is asked for."""
        self.source.extend(tokens)
        self._is_offer_known = False

    def offer(self) -> ChainOffer | None:
        """The best match's continuation as an offer; None where nothing matches."""
        if not self._is_offer_known:
            self._is_offer_known = True
            self._offer = self._find_offer()
        return self._offer

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """The tree of the continuations of all matches, as far as `shape` has nodes for them.

        It has the root alone where nothing matches.
        """
        trie = Trie(self.source.end[-1], min(shape.nodes, self._config.size))
        for match in self._matches():
            trie.add(self._continuation(match, shape.levels))
            if trie.is_full:
                break
        tree, _ = trie.tree(shape.levels if len(trie.tokens) > 1 else 0)
        return tree

    def _find_offer(self) -> ChainOffer | None:
        """The offer of the first match that anything follows; None before a text or without one."""
        if not self.source.end:
            return None
        for match in self._matches():
            following = self._continuation(match, self.largest.levels)
            if following:
                return ChainOffer(self.largest, match.length, len(following))
        return None

    def _matches(self) -> Iterator[Match]:
        return self.source.index.matches(self.source.end, self._config.ngram)

    def _continuation(self, match: Match, max_tokens: int) -> list[int]:
        """Up to `max_tokens` that followed a match, the first end token being the last of them."""
        found = self.source.following(match, max_tokens)
        for count, token in enumerate(found, 1):
            if token in self._end_tokens:
                return found[:count]
        return found


@register_drafter(
    NAME,
    settings=PromptLookupConfig,
    config_field="prompt_lookup",
    reads_text=True,
)
def build(inputs: DrafterInputs) -> PromptLookupDrafter:
    return PromptLookupDrafter(inputs.settings, end_tokens=inputs.end_tokens)
