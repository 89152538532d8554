"""A schedule by which prompts and decoding calls share the time."""

PIECE_SECONDS = 0.5
"""Most seconds of a prompt's piece, about: so long a turn may have to be waited for."""
PIECES_ALONE = 2
"""How many times as long a piece may take if no other answer is open."""
LEAST_PIECE = 64
"""Fewest tokens of a piece, unless the settings say less. On two cores of a CPU, 1,536 tokens of
SmolLM2-135M take 1.1 times as long in such pieces as in those of 512, and 1.7 times in those of 32.
"""
UNTIMED_PIECE = 128
"""Most tokens of a piece before any was timed."""


class PieceSchedule:
    """Decides how many tokens of a prompt are processed next, and whether calls come first.

    While answers are decoded, prompts get half of the time: what pieces took, calls get.
    """

    def __init__(self) -> None:
        self._tokens_per_second: float | None = None  # of the last piece that was long enough
        # seconds that pieces took while answers were decoded, and calls did not take since
        self._owed_seconds = 0.0

    def next_piece_length(
        self,
        num_left: int,  # tokens of the prompt that are not processed yet
        step_size: int,  # the settings' `prefill_step_size`
        *,
        is_alone: bool,  # no other prompt waits and no answer is decoded
    ) -> int:
        """Tokens of the next piece: about as many as take `PIECE_SECONDS` by the last rate."""
        most = UNTIMED_PIECE
        if self._tokens_per_second is not None:
            seconds = PIECE_SECONDS * (PIECES_ALONE if is_alone else 1)
            most = int(self._tokens_per_second * seconds) // LEAST_PIECE * LEAST_PIECE
        return min(num_left, step_size, max(LEAST_PIECE, most))

    def are_calls_first(self, piece_length: int) -> bool:
        """Whether calls have to come before a piece; to be asked while some answer is decoded."""
        rate = self._tokens_per_second
        # Before any piece was timed, one counts as the longest.
        seconds = PIECE_SECONDS if rate is None else piece_length / rate
        return self._owed_seconds > 0 and self._owed_seconds + seconds > PIECE_SECONDS

    def record_piece(self, num_tokens: int, seconds: float) -> None:
        # The rate of a short piece says little.
        if self._tokens_per_second is None or num_tokens >= LEAST_PIECE:
            self._tokens_per_second = num_tokens / max(seconds, 1e-6)

    def owe_seconds(self, seconds: float, *, is_decoding: bool) -> None:
        """Owe a piece's seconds to calls, if any answer is decoded."""
        self._owed_seconds = self._owed_seconds + seconds if is_decoding else 0.0

    def record_call(self, seconds: float) -> None:
        self._owed_seconds = max(0.0, self._owed_seconds - seconds)
