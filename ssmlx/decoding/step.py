"""The steps that a decoding loop yields, one for each target call, and totals over an answer."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class AnswerPart:
    """The part of a call's tokens that belongs to the answer, and whether it ends with them."""

    tokens: tuple[int, ...]  # the one that ends the answer included
    text: str = ""  # that is certain now and was not before
    finish_reason: FinishReason | None = None  # see `ssmlx.GenerationResponse`
    stop: str | None = None  # the stop string that ended the answer

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None


Take = Callable[[Sequence[int]], AnswerPart]
"""Takes the tokens of a call for the answer. The loop or batch that reads a call calls it, once for
each call and in order, and puts what it returned into the call's step."""


def take_all(tokens: Sequence[int]) -> AnswerPart:
    """A `Take` for decoding without end."""
    return AnswerPart(tuple(tokens))


@dataclass(frozen=True)
class DraftResult:
    """The result of verifying one draft."""

    drafter: str
    nodes: int  # rows of the call: root and padding (`PAD_TOKEN`) too
    drafted: int  # its tokens; neither root nor padding is drafted
    accepted: int  # of these


@dataclass(frozen=True)
class Step:
    """The tokens that one target call brought to an answer."""

    tokens: tuple[int, ...]  # one or more: the accepted drafted tokens, then the target's own one
    part: AnswerPart  # what of them belongs to the answer
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of `tokens`, if asked for
    draft: DraftResult | None = None  # None if the call verified none


Steps = Generator[Step | None]
"""The steps of a decoding loop: a `Step` for each target call; or None for work that brought this
answer no token (a piece of the prompt, a drafter that starts, a turn for other answers), so that
others may take their turn. It goes on without end: its maker closes it."""


@dataclass(frozen=True)
class DraftCounts:
    """The results of one drafter's trees, summed over calls."""

    calls: int = 0  # target calls that verified one
    drafted: int = 0  # tokens of these trees; neither roots nor padding are drafted
    accepted: int = 0  # of these, tokens that the target accepted
    nodes: int = 0  # rows of these calls: roots and padding (`PAD_TOKEN`) too


@dataclass
class DraftTotals:
    drafts: dict[str, DraftCounts] = field(default_factory=dict)  # by the drafter's name

    @property
    def drafted_tokens(self) -> int:
        return sum(one.drafted for one in self.drafts.values())

    def add_draft_of(self, step: Step) -> None:
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
