"""Warns once an answer if no drafted token is ever accepted."""

import logging

_log = logging.getLogger("ssmlx")
_TRIED = 64  # drafted tokens without one accepted, before the warning


class UnacceptedDrafts:
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
        self.is_told = False

    def note_chain(self, num_tokens: int) -> None:
        self._in_chain = num_tokens

    def note_accepted_and_warn_once(self, num_tokens: int) -> None:
        """Of the last chain; nothing happens if none was drafted."""
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
