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
from .text_index import LONGEST, TAIL, EarlierAnswers, Match, TextIndex
from .trie import Trie, padded_size

NAME = "prompt-lookup"
EARLIER_ANSWERS = "earlier-answers"
EXPECTED = "expected-text"
"""Names of such drafters: that of the text itself, and of those that look up elsewhere."""


class PromptLookupDrafter:
    """Drafts what followed the text's last tokens where they stood before.

    The longest match first, and of equally long ones the newest; every match's continuation is a
    chain, and chains with a common beginning share its nodes. A continuation that reaches the end
    of the text itself goes on in itself, so a text with a period is drafted at full length.

    Args:
        config: how much is drafted, and the text that is expected, if one is: continuations are
            its own alone then, and it follows the prompt as the answer does.
        earlier: answers to look up in, in place of this text.
        end_tokens: a draft ends with each of them.
        name: what the drafter is called.
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
        name: str = NAME,
    ) -> None:
        self.name = name
        self.largest = DraftShape(name, padded_size(config.size), config.num_draft_tokens)
        self._config = config
        self._end_tokens = frozenset(end_tokens)
        self._index = TextIndex() if earlier is None else earlier.index
        self._is_own = earlier is None and not config.reference
        # the end of it is enough, where it is not what is looked up in
        self._text: list[int] = self._index.tokens if self._is_own else []
        self._offer: ChainOffer | None = None
        self._is_offer_known = False

    @property
    def cache_bytes(self) -> int:
        """See `Drafter`; earlier answers are nobody's own."""
        return self._index.nbytes if self._is_own else 0

    def start(self, tokens: Sequence[int]) -> None:
        """See `Drafter.start`. Begun again on a text that has gone on, it follows that."""
        if not self._is_own:
            if self._config.reference and not self._index.tokens:
                tail = min(TAIL, self._config.ngram)
                self._index.extend([*tokens[-tail:], *self._config.reference])
            self._text = []
        elif self._text != list(tokens[: len(self._text)]):
            self._index = TextIndex()
            self._text = self._index.tokens
        self._extend(tokens[len(self._text) :])

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """See `Drafter.follow`."""
        self._extend(tokens)

    def offer(self) -> ChainOffer | None:
        """See `OfferSource`."""
        if not self._is_offer_known:
            self._is_offer_known = True
            self._offer = self._new_offer()
        return self._offer

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """See `Drafter.propose`."""
        trie = Trie(self._text[-1], min(shape.nodes, self._config.size))
        for match in self._matches():
            trie.add(self._following(match, shape.levels))
            if trie.is_full:
                break
        tree, _ = trie.tree(shape.levels if len(trie.tokens) > 1 else 0)
        return tree

    def _new_offer(self) -> ChainOffer | None:
        if not self._text:
            return None
        for match in self._matches():
            following = self._following(match, self.largest.levels)
            if following:
                return ChainOffer(self.largest, match.length, len(following))
        return None

    def _extend(self, tokens: Sequence[int]) -> None:
        self._is_offer_known = False
        if self._is_own:
            self._index.extend(tokens)
        else:
            self._text = [*self._text, *tokens][-LONGEST:]

    def _matches(self) -> Iterator[Match]:
        return self._index.matches(self._text, self._config.ngram)

    def _following(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens that are likely to follow, as a match says."""
        found = self._index.following(match, count)
        if self._is_own and len(found) == len(self._text) - match.end:
            found = list(islice(cycle(found), count))
        for place, token in enumerate(found, 1):
            if token in self._end_tokens:
                return found[:place]
        return found


@register_drafter(
    NAME,
    settings=PromptLookupConfig,
    config_field="prompt_lookup",
    reads_text=True,
)
def build(inputs: DrafterInputs) -> PromptLookupDrafter:
    return PromptLookupDrafter(inputs.settings, end_tokens=inputs.end_tokens)
