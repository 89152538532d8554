"""What a model can do beside decoding plainly, and why not where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import require

Reason = str | None
"""Why a model lacks a capability; None where it has it."""

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
    """What a model can do, each with the reason where it cannot.

    Attributes:
        stages: embedding, layers, final norm and head can be run one after the other, as streams
            and their training need it.
        taps: hidden states between layers can be returned.
        last_hidden: what enters the final norm can be returned, and final norm and head be run.
        trees: the nodes of a tree can be verified in one call, and all but one path dropped.
        chains: several tokens, one behind the other, can be verified in one call, and the last of
            them dropped.
        try_batches: runs the model to find out why texts of different lengths cannot share a call;
            None where they can.
    """

    stages: Reason
    taps: Reason
    last_hidden: Reason
    trees: Reason
    chains: Reason
    try_batches: Callable[[], Reason]

    @property
    def batches(self) -> Reason:
        """Why texts of different lengths cannot share a call; None where they can.

        The model may be run to find out, see `try_batches`; so in `has`, `reason` and `require`.
        """
        return self.try_batches()

    def has(self, capability: Capability) -> bool:
        """Whether the model has the capability."""
        return self.reason(capability) is None

    def reason(self, capability: Capability) -> Reason:
        """Why the model lacks the capability; None where it has it."""
        reason: Reason = getattr(self, capability)
        return reason

    def require(self, capability: Capability, taker: str) -> None:
        """Refuse what needs a capability that the model lacks.

        Args:
            capability: what is needed.
            taker: who needs it, for the message, such as "drafting".

        Raises:
            InputError: with the reason; nothing is raised where the model has the capability.
        """
        reason = self.reason(capability)
        require(
            reason is None,
            reason or "",
            expected=f"{_EXPECTED[capability]}, for {taker}",
            do="decode plainly, or use another model",
        )
