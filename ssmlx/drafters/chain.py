"""Chains that a model beside the target drafts token by token."""

import logging
from collections.abc import Sequence

import mlx.core as mx

from ..decoding.sampling import RowPositions, Sampling, last_tokens
from ..model.shapes import indices

_log = logging.getLogger("ssmlx")
_TRIED = 64  # drafted tokens without one accepted, before the warning


class ChainRanking:
    """Ranks the tokens of a chain level by level, as the target would decide on them: with each
    position's noise, and with penalties that see the text and the chain so far."""

    def __init__(
        self,
        sampling: Sampling,
        text: Sequence[int],  # ends with the chain's root
    ) -> None:
        self._sampling = sampling
        self._position = len(text) - 1
        self._recent = last_tokens(text, sampling.context_size)[None]

    def rank(
        self,
        logits: mx.array,  # [1, V] after the chain so far
        count: int = 1,
    ) -> mx.array:  # [count], best first
        """Rank the next tokens; the best one becomes the chain's next token."""
        places = RowPositions(mx.array([self._position]), indices(1), 1, self._recent)
        ranked = self._sampling.rank_tokens(logits, places, count).tokens[0].astype(mx.int32)
        self._position += 1
        if self._sampling.context_size:
            self._recent = mx.concatenate([self._recent[:, 1:], ranked[None, :1]], axis=1)
        return ranked


class UnacceptedDrafts:
    """Warns once an answer if none of the first `_TRIED` drafted tokens was accepted; its users
    then stop drafting, by `has_warned`."""

    def __init__(
        self,
        who: str,  # drafted them, for the message, such as "the MTP head"
        do: str,  # advice in the message
    ) -> None:
        self._who = who
        self._do = do
        self._drafted = 0
        self._in_chain = 0
        self._has_accepted = False
        self.has_warned = False

    def note_chain(self, num_tokens: int) -> None:
        self._in_chain = num_tokens

    def note_accepted(self, num_tokens: int) -> None:
        """Count the accepted tokens of the last chain; nothing happens if none was drafted."""
        self._drafted += self._in_chain
        self._has_accepted |= self._in_chain > 0 and num_tokens > 0
        self._in_chain = 0
        if self._has_accepted or self.has_warned or self._drafted < _TRIED:
            return
        self.has_warned = True
        _log.warning(
            "none of the %d tokens drafted by %s was accepted, so it drafts no more; expected one "
            "that was made for this model; %s",
            self._drafted,
            self._who,
            self._do,
        )
