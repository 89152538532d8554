"""A model's abilities beside plain decoding, or the reasons why it lacks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import require

Reason = str | None  # why a model lacks a capability; None if it has it

Capability = Literal["stages", "taps", "last_hidden", "trees", "chains", "batches"]

_EXPECTED: dict[Capability, str] = {
    "stages": "a decoder whose layers run one by one",
    "taps": "a decoder whose layers run one by one",
    "last_hidden": "a decoder whose final norm and head give its logits",
    "trees": "a decoder whose layers run one by one",
    "chains": "a decoder whose last tokens can be taken back",
    "batches": "a decoder that keeps the rows of a batch apart",
}


@dataclass(frozen=True)
class Capabilities:
    """A model's abilities: each is None if it can, or the reason in words if it cannot."""

    stages: Reason  # embedding, layers, norm and head run one after the other, as streams need it
    taps: Reason  # hidden states between layers
    last_hidden: Reason  # what enters the final norm, and running final norm and head
    trees: Reason  # verify a tree's nodes in one call, and drop all but one path
    chains: Reason  # verify tokens that follow each other in one call, and drop the last ones
    try_batches: Callable[[], Reason]  # may run the model

    @property
    def batches(self) -> Reason:
        """Whether texts of different lengths can share a call. The model may be run to find out,
        also by `has`, `reason` and `require`."""
        return self.try_batches()

    def has(self, capability: Capability) -> bool:
        return self.reason(capability) is None

    def reason(self, capability: Capability) -> Reason:
        reason: Reason = getattr(self, capability)
        return reason

    def require(
        self,
        capability: Capability,
        taker: str,  # needs it, for the message, such as "drafting"
    ) -> None:
        reason = self.reason(capability)
        require(
            reason is None,
            reason or "",
            expected=f"{_EXPECTED[capability]}, for {taker}",
            do="decode plainly, or use another model",
        )
