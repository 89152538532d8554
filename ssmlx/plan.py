"""How to generate: one config for every command, and which drafter it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .decoding.loop import PREFILL_STEP_SIZE
from .drafters.draft_model import DraftModel
from .drafters.heads import DraftingHeads
from .errors import InputError, check_choice
from .model.streams import StreamFusedModel
from .settings import (
    DECODINGS,
    DRAFTERS,
    HEAD_DRAFTERS,
    MAX_DRAFT_TOKENS,
    STREAM_SCHEDULES,
    AcceptanceConfig,
    DrafterKind,
    DraftModelConfig,
    LookaheadConfig,
    PromptLookupConfig,
    PruneConfig,
    SamplingConfig,
    SpeculatorTreeConfig,
    StreamSchedule,
    TreeConfig,
)
from .tuning.profile import prefers_plain

Decoding = Literal["streaming", "plain"]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """How to generate; the same settings for every command. Those of sampling are inherited.

    Where tree, prune, num_streams and stream_schedule are all None, streams draft as was found
    fastest on this machine, if `python -m ssmlx.calibrate` was run on it; see
    `ssmlx.tuning.profile`.

    Attributes:
        decoding: "streaming", verify what a drafter proposes, or "plain"; None streams where
            there is a drafter, unless plain decoding was found faster here.
        max_tokens: most tokens to generate.
        drafter: one of `ssmlx.settings.DRAFTERS`; None takes the draft model where one is given,
            else the heads, else the model's streams where it has any.
        tree: the tree that streams and Medusa heads draft; None for `TreeConfig()`.
        prune: the pruning of any drafter's tree but lookahead's; needs a pruning adapter. None
            for off.
        num_streams: streams to use, at most as many as were trained; None for all.
        stream_schedule: when they run, see `StreamDrafter`: "fused" or "second-pass"; None for
            "second-pass".
        lookup_nodes: nodes that streams' trees, or those of heads, have besides, for what followed
            the same words earlier in the text.
        prompt_lookup, lookahead, draft, speculator_tree: settings of the other drafters.
        draft_model: the loaded draft model, see `ssmlx.load_draft_model`.
        heads: the loaded Medusa heads or MLP speculator, see `ssmlx.load_heads`.
        acceptance: when a drafted token counts; all but the default is lossy.
        prefill_step_size: prompt tokens per forward pass.
    """

    decoding: Decoding | None = None
    max_tokens: int = 256
    drafter: DrafterKind | None = None
    tree: TreeConfig | None = None
    prune: PruneConfig | None = None
    num_streams: int | None = None
    stream_schedule: StreamSchedule | None = None
    lookup_nodes: int = 0
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    draft: DraftModelConfig = field(default_factory=DraftModelConfig)
    draft_model: DraftModel | None = None
    speculator_tree: SpeculatorTreeConfig = field(default_factory=SpeculatorTreeConfig)
    heads: DraftingHeads | None = None
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    prefill_step_size: int = PREFILL_STEP_SIZE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_tokens", "prefill_step_size"):
            value = getattr(self, name)
            if not value >= 1:
                raise InputError(
                    f"--{name.replace('_', '-')} {value}",
                    expected="1 or more",
                    do="give a larger value",
                )
        if not 0 <= self.lookup_nodes <= MAX_DRAFT_TOKENS:
            raise InputError(
                f"--lookup-nodes {self.lookup_nodes}",
                expected=f"0 to {MAX_DRAFT_TOKENS}",
                do="choose a number in that range",
            )
        choices = {"decoding": DECODINGS, "drafter": DRAFTERS, "stream_schedule": STREAM_SCHEDULES}
        for name, known in choices.items():
            value = getattr(self, name)
            if value is not None:
                check_choice(f"--{name.replace('_', '-')}", value, known)
        if self.acceptance.kind == "typical" and self.temp == 0:
            raise InputError(
                "--acceptance typical, which greedy decoding has no use for",
                expected="--temp above 0",
                do="give --temp, or --acceptance exact",
            )

    def resolved_drafter(self, model: StreamFusedModel) -> DrafterKind | None:
        """What drafts for `model`; None for plain decoding.

        Raises:
            InputError: a drafter is asked for, and what it drafts with is missing.
        """
        if self.decoding == "plain":
            return None
        own: DrafterKind | None = "streams" if model.num_streams else None
        drafter = self.drafter or self._loaded_drafter() or own
        if drafter == "draft-model" and self.draft_model is None:
            raise InputError(
                "--drafter draft-model without a draft model",
                expected="--draft-model",
                do="give --draft-model MODEL, or choose another --drafter",
            )
        if drafter in HEAD_DRAFTERS:
            self._check_heads(drafter)
        if (drafter == "streams" and own is None) or (drafter is None and self.decoding):
            asked = f"--drafter {drafter}" if drafter else "streaming"
            raise InputError(
                f"{asked} was asked for, but the model has no streams",
                expected="an adapter",
                do="give --adapter FOLDER, another --drafter, or --decoding plain",
            )
        if drafter == "streams" and prefers_plain(self, model):
            return None
        return drafter

    def _loaded_drafter(self) -> DrafterKind | None:
        """What the draft model or the heads are for, where either is given."""
        if self.draft_model is not None:
            return "draft-model"
        return None if self.heads is None else self.heads.drafter

    def _check_heads(self, drafter: str) -> None:
        if self.heads is None:
            raise InputError(
                f"--drafter {drafter} without heads",
                expected="--heads",
                do="give --heads FOLDER, or choose another --drafter",
            )
        if self.heads.drafter != drafter:
            raise InputError(
                f"--drafter {drafter} with heads for another drafter",
                expected=f"--drafter {self.heads.drafter} with them",
                do="drop --drafter, or give other --heads",
            )

    def resolved_decoding(self, model: StreamFusedModel) -> Decoding:
        """The decoding that `model` gets.

        Raises:
            InputError: as `resolved_drafter`.
        """
        return "plain" if self.resolved_drafter(model) is None else "streaming"
