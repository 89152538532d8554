"""How prompts and decoding calls share the time: how long a piece of a prompt is, and when it runs.

Nothing is computed here: the schedule is told what pieces and calls took, and says what is next.
"""

PIECE_SECONDS = 0.5
"""What a piece of a prompt takes at most, about: so long a turn may have to be waited for."""
PIECES_ALONE = 2
"""How many times as long a piece may take where nobody else is answered."""
LEAST_PIECE = 64
"""Tokens of a piece at least, unless the settings say less. On two cores of a CPU, 1,536 tokens of
SmolLM2-135M take 1.1 times as long in such pieces as in those of 512, and 1.7 times in those of 32.
"""
UNTIMED_PIECE = 128
"""Tokens of a piece at most while nobody knows what one takes."""


class PieceSchedule:
    """Says how many tokens of a prompt are processed next, and whether calls come before them.

    While answers are decoded, prompts get half of the time: what pieces took, calls get.
    """

    def __init__(self) -> None:
        """Begin without anything timed."""
        self._tokens_per_second: float | None = None  # of the last piece that was long enough
        # seconds that pieces took while answers were decoded, and calls did not take since
        self._owed_seconds = 0.0

    def next_piece_length(self, num_left: int, step_size: int, *, is_alone: bool) -> int:
        """Tokens of the next piece of a prompt.

        As many as take `PIECE_SECONDS` by the last rate, or `PIECES_ALONE` times that with
        `is_alone`, rounded down to a multiple of `LEAST_PIECE`, but that at least; `UNTIMED_PIECE`
        before any piece was timed. `num_left` and `step_size` bound all of these.

        Args:
            num_left: tokens of the prompt that are not processed yet; no more are returned.
            step_size: the settings' `prefill_step_size`; no more are returned.
            is_alone: whether no other prompt waits and no answer is decoded.
        """
        most = UNTIMED_PIECE
        if self._tokens_per_second is not None:
            seconds = PIECE_SECONDS * (PIECES_ALONE if is_alone else 1)
            most = int(self._tokens_per_second * seconds) // LEAST_PIECE * LEAST_PIECE
        return min(num_left, step_size, max(LEAST_PIECE, most))

    def are_calls_first(self, piece_length: int) -> bool:
        """Whether decoding calls have to come before a piece of so many tokens.

        True where pieces have taken longer than calls since, so much that with this piece that
        would be more than `PIECE_SECONDS`; while nothing is known of pieces, one counts as that
        long. To be asked where some answer is decoded.
        """
        rate = self._tokens_per_second
        seconds = PIECE_SECONDS if rate is None else piece_length / rate
        return self._owed_seconds > 0 and self._owed_seconds + seconds > PIECE_SECONDS

    def record_piece(self, num_tokens: int, seconds: float) -> None:
        """Take the rate of a piece that was processed; of one shorter than `LEAST_PIECE` only where
        none is known."""
        if self._tokens_per_second is None or num_tokens >= LEAST_PIECE:
            self._tokens_per_second = num_tokens / max(seconds, 1e-6)

    def owe_seconds(self, seconds: float, *, is_decoding: bool) -> None:
        """Owe a piece's seconds to calls; where no answer is decoded, nothing is owed any more."""
        self._owed_seconds = self._owed_seconds + seconds if is_decoding else 0.0

    def record_call(self, seconds: float) -> None:
        """Take a decoding call's seconds from what is owed."""
        self._owed_seconds = max(0.0, self._owed_seconds - seconds)
