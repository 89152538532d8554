"""What a decoding loop yields for each target call, and what adds up over an answer's calls."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class AnswerPart:
    """What of a call's tokens belongs to the answer, and whether it ends with them.

    Attributes:
        tokens: those that belong to it, the one that ends it included.
        text: that is certain now and was not before.
        finish_reason: why the answer ends with them, see `ssmlx.GenerationResponse`; None where it
            does not.
        stop: the stop string that ends it; None where none does.
    """

    tokens: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    stop: str | None = None

    @property
    def is_last(self) -> bool:
        """Whether the answer ends with it."""
        return self.finish_reason is not None


Take = Callable[[Sequence[int]], AnswerPart]
"""Takes the tokens of a call for the answer. Whoever reads a call calls it, once for each and in
order, and puts into the call's step what it returned."""


def take_all(tokens: Sequence[int]) -> AnswerPart:
    """All of `tokens`, and no text: decoding without end."""
    return AnswerPart(tuple(tokens))


@dataclass(frozen=True)
class DraftResult:
    """What came of the draft that one target call verified.

    Attributes:
        drafter: name of the drafter that proposed it.
        nodes: all nodes of its tree, root and padding (`PAD_TOKEN`) too: rows of the call.
        drafted: its tokens; neither root nor padding is drafted.
        accepted: of these, tokens that the target accepted.
    """

    drafter: str
    nodes: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Step:
    """What one target call brought to an answer.

    Attributes:
        tokens: ids that the answer goes on by, one or more: the accepted drafted tokens, and the
            target's own one behind them.
        part: what of them belongs to the answer.
        logprobs: an entry for each of `tokens`; None where the sampler's settings ask for none.
        draft: what came of the draft that the call verified; None where it verified none.
    """

    tokens: tuple[int, ...]
    part: AnswerPart
    logprobs: tuple[TokenLogprobs, ...] | None = None
    draft: DraftResult | None = None


Steps = Generator[Step | None]
"""What a decoding loop yields: a `Step` for each target call. None says that it has only come
further with the prompt, or with a drafter that starts; others may take their turn. It goes on
without end: whoever makes one closes it."""


@dataclass(frozen=True)
class DraftCounts:
    """What came of one drafter's trees.

    Attributes:
        calls: target calls that verified one.
        drafted: tokens of these trees; neither roots nor padding (`PAD_TOKEN`) are drafted.
        accepted: of these, tokens that the target accepted.
        nodes: all nodes of these trees, roots and padding too: rows that the calls computed.
    """

    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    nodes: int = 0


@dataclass
class DraftTotals:
    """By drafter, the target calls that verified its trees, and how many tokens of these."""

    drafts: dict[str, DraftCounts] = field(default_factory=dict)  # by the drafter's name

    @property
    def drafted_tokens(self) -> int:
        """Tokens of all verified trees, accepted or not."""
        return sum(one.drafted for one in self.drafts.values())

    def add_draft_of(self, step: Step) -> None:
        """Count the draft that a step's call verified; nothing where it verified none."""
        draft = step.draft
        if draft is None:
            return
        before = self.drafts.get(draft.drafter, DraftCounts())
        self.drafts[draft.drafter] = DraftCounts(
            before.calls + 1,
            before.drafted + draft.drafted,
            before.accepted + draft.accepted,
            before.nodes + draft.nodes,
        )
