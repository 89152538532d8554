"""When drafting does not pay, and when to try again: plain arithmetic, no clock and no arrays."""

import math

FIRST_WAIT, LONGEST_WAIT = 16, 64
PATIENCE, TRIAL_PATIENCE = 8.0, 3.0
_LIVELY = 32
"""Calls of a spell of drafting that pays after which the text counts as predictable again."""


class Pace:
    """Decides from call to call whether to draft.

    A call that verifies a draft takes as long as `breakeven` plain calls, so it gains `tokens -
    breakeven` plain calls' time, or loses it. Drafting stops once it has lost `PATIENCE` of them
    since it was last at its best (a cumulative sum: chance alone rarely goes so far while
    drafting pays, and where it does not, no more is ever lost). Then `FIRST_WAIT` tokens are
    decoded plainly and drafting is tried again, with less patience; each trial that fails
    doubles the wait, up to `LONGEST_WAIT`. That is the hysteresis: what a text can cost is
    bounded, whatever it says.

    Args:
        breakeven: seconds of a drafting call over those of a plain one, for this machine, model
            and tree; None where nobody measured them, and drafting never stops.
        on_trial: whether the first spell has no more patience than a later one: where nobody knows
            how well such text can be guessed.
    """

    def __init__(self, breakeven: float | None = None, *, on_trial: bool = False) -> None:
        if breakeven is not None and not 0 < breakeven < math.inf:
            raise ValueError(f"a breakeven of {breakeven}, expected a number above 0")
        self._breakeven = breakeven
        self._wait, self._left = FIRST_WAIT, 0
        self._patience = TRIAL_PATIENCE if on_trial else PATIENCE
        self._start()

    def _start(self) -> None:
        self.drafting = True
        self._balance, self._calls, self._tokens = 0.0, 0, 0

    @property
    def tokens_per_call(self) -> float | None:
        """Of this spell of drafting, or of the last one; None before a draft was verified."""
        return self._tokens / self._calls if self._calls else None

    def observe(self, num_tokens: int, *, drafted: bool = True) -> None:
        """Tell how many tokens the last call advanced by; `drafting` is then the next one's.

        Args:
            num_tokens: 1 or more.
            drafted: whether that call had a draft to verify. The first calls of a spell have none,
                and say nothing; where a call is built while the one before it runs, a spell's
                last drafts come after its end.
        """
        if self._breakeven is None:
            return
        if not self.drafting:
            self._left -= num_tokens
            if self._left <= 0:
                self._start()
            return
        if not drafted:
            return
        self._calls += 1
        self._tokens += num_tokens
        self._balance = min(0.0, self._balance + num_tokens - self._breakeven)
        if self._calls >= _LIVELY and self._tokens >= self._calls * self._breakeven:
            self._wait, self._patience = FIRST_WAIT, PATIENCE
        if self._balance <= -self._patience:
            self.drafting, self._left = False, self._wait
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self._patience = TRIAL_PATIENCE
