"""Drafts of which no token is ever accepted: that is said, once an answer."""

import logging

_log = logging.getLogger("ssmlx")
_TRIED = 64  # drafted tokens of which none was accepted, until that is told


class UnacceptedDrafts:
    """Counts an answer's drafted tokens, until one is accepted or it was said that none is.

    Args:
        who: drafted them, for the message, such as "the MTP head".
        do: what to do about it.

    Attributes:
        is_told: whether it was said.
    """

    def __init__(self, who: str, do: str) -> None:
        self._who = who
        self._do = do
        self._drafted = 0
        self._in_chain = 0
        self._has_accepted = False
        self.is_told = False

    def note_chain(self, num_tokens: int) -> None:
        """Note that a chain of so many tokens was drafted."""
        self._in_chain = num_tokens

    def note_accepted_and_warn_once(self, num_tokens: int) -> None:
        """Note how many tokens of that chain were accepted; nothing without a chain before.

        Logs a warning where it is the last of `_TRIED` or more tokens of which none was.
        """
        self._drafted += self._in_chain
        self._has_accepted |= self._in_chain > 0 and num_tokens > 0
        self._in_chain = 0
        if self._has_accepted or self.is_told or self._drafted < _TRIED:
            return
        self.is_told = True
        _log.warning(
            "none of the %d tokens that %s drafted was accepted; expected some of one that was "
            "made for this model; %s",
            self._drafted,
            self._who,
            self._do,
        )
