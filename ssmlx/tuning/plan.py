"""One answer's plan: what the settings come to on a loaded model and on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from ..decoding.drafter import Drafter
from ..decoding.loop import scratch_rows
from ..decoding.pace import Pace, Rung
from ..decoding.sampling import Sampling
from ..drafters.registry import (
    DrafterArgument,
    Loaded,
    build_drafter,
    registered_drafter,
    with_drafter,
)
from ..drafters.streams import StreamDrafter
from ..errors import require
from ..model.streams import StreamFusedModel
from ..settings import GenerateConfig
from . import ladder
from .cost import DraftShape
from .experience import Experience, experience_of
from .profile import Profile, profile_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    config: GenerateConfig  # the settings, with nothing of the draft's shape left open
    kind: str | None  # the drafter's registered name; None for plain decoding
    drafter: Drafter | None  # it, ready to start; None for plain decoding
    sampling: Sampling  # how the target decides
    loaded: Sequence[Loaded]  # what was loaded to draft with, whether or not it drafts
    decision: str  # what is done and why, in one line
    is_tuned: bool = False  # whether a profile of this machine decided it
    pace: Pace = field(default_factory=Pace)  # what is drafted, from call to call
    experience: Experience | None = None  # what it learns, where it does

    @property
    def scratch(self) -> int:
        """Rows that a step may have, for sizing a cache once; 0 for plain decoding."""
        return scratch_rows(self.drafter) if self.drafter else 0

    @property
    def reads_text(self) -> bool:
        """Whether the tokens before the prompt must be known."""
        if self.sampling.context_size > 0:
            return True
        return self.kind is not None and registered_drafter(self.kind).reads_text

    @property
    def lossy(self) -> bool:
        """Whether tokens may be accepted that the target would not have written."""
        return self.drafter is not None and self.config.acceptance.kind != "exact"


def make_plan(
    model: StreamFusedModel,
    config: GenerateConfig | None = None,
    *,
    drafter: DrafterArgument | None = None,
    draft_model: Loaded | None = None,
    heads: Loaded | None = None,
    context: int | None = None,
    **settings: Any,
) -> Plan:
    """What `config` comes to on `model`; `settings` are single fields of `GenerateConfig`, and
    `drafter`, `draft_model` and `heads` as `ssmlx.stream_generate` takes them.

    Where nothing of the draft's shape is asked for, a profile of this machine decides, if there is
    one; where nothing at all is asked for, even whether to draft. `context` is the number of tokens
    that are committed when the answer begins; of the answers that were measured unless told.
    """
    config = replace(config or GenerateConfig(), **settings)
    config, loaded = with_drafter(config, drafter, draft_model, heads)
    kind = _drafter_kind(model, config, loaded)
    sampling = Sampling(config, model.backbone.vocab_size)
    # Machines that share a model have to draft alike.
    if kind == "streams" and config.leaves_shape_open and model.backbone.group is None:
        return _streams_plan(model, config, sampling, loaded, context)
    done = config.with_default_shape()
    built = None
    if kind is not None:
        built = build_drafter(kind, model, done, sampling, loaded)
    return Plan(
        config=done,
        kind=kind,
        drafter=built,
        sampling=sampling,
        loaded=loaded,
        decision=_decision(model, done, kind, built),
    )


def _streams_plan(
    model: StreamFusedModel,
    config: GenerateConfig,
    sampling: Sampling,
    loaded: Sequence[Loaded],
    context: int | None,
) -> Plan:
    """What streams draft where nobody says: as a profile of this machine has it, or row costs."""
    tuning = None if config.deterministic else profile_of(model)
    usual = tuning.context if tuning else ladder.USUAL_CONTEXT
    behind = usual if context is None else context
    if tuning is None:
        costs = ladder.expected_costs(model)
        rungs = ladder.ladder(model, costs, behind)
        best = max(rungs, key=attrgetter("speed"))
        # Whether drafting pays, the clock tells; but not where calls are to be the same.
        pays = not config.deterministic or best.speed > 1
    else:
        costs = tuning.costs
        measured = tuning.best(context)
        best = ladder.priced(measured.shape, measured.tokens_per_call, costs, behind)
        rungs = [best]
        pays = tuning.drafting_pays(context)
    drafts = pays or not config.leaves_all_open
    paced = drafts and config.leaves_all_open and not config.deterministic
    drafter = None
    pace = Pace()
    experience = None
    if drafts:
        largest = replace(config, **vars((rungs[-1] if paced else best).shape))
        drafter = build_drafter("streams", model, largest, sampling)
    if paced:
        experience = experience_of(model)
        assert isinstance(drafter, StreamDrafter)
        pace = Pace(
            [replace(one, drafter=_beside(drafter, one)) for one in rungs],
            experience.learned,
            plain=costs.plain_seconds(behind),
            context=ladder.text_kind(behind),
        )
    return Plan(
        config=replace(config, **vars(best.shape)),
        kind="streams" if drafts else None,
        drafter=drafter,
        sampling=sampling,
        loaded=loaded,
        decision=_streams_decision(best, tuning, drafts, context),
        is_tuned=tuning is not None,
        pace=pace,
        experience=experience,
    )


def _beside(drafter: StreamDrafter, rung: Rung) -> StreamDrafter:
    shape = rung.shape
    return drafter.beside(shape.tree, shape.num_streams, shape.stream_schedule)


def _drafter_kind(
    model: StreamFusedModel, config: GenerateConfig, loaded: Sequence[Loaded]
) -> str | None:
    """The name of what the settings let draft for `model`; None for plain decoding."""
    if config.decoding == "plain":
        return None
    kind = config.drafter
    if kind is None and loaded:
        kind = loaded[0].drafter
    elif kind is None and (model.num_streams or config.decoding):
        kind = "streams"
    if kind is not None:
        model.backbone.require_stages("drafting")
    require(
        kind != "streams" or model.num_streams > 0,
        f"{'--drafter streams' if config.drafter else 'streaming'} was asked for, but the model "
        "has no streams",
        expected="an adapter",
        do="give --adapter FOLDER, another --drafter, or --decoding plain",
    )
    return kind


def _decision(
    model: StreamFusedModel,
    config: GenerateConfig,
    kind: str | None,
    drafter: Drafter | None,
) -> str:
    if drafter is None:
        asked = config.decoding == "plain"
        return "plain decoding" + (", as --decoding says" if asked else ": nothing drafts")
    if kind == "streams":
        dropped = config.prune is not None and config.prune.kind == "threshold"
        shape = shape_of(config, model)
        return f"streams draft: {shape}" + (", unlikely nodes dropped" if dropped else "")
    nodes = drafter.max_nodes
    levels = drafter.num_levels
    return f"{kind} drafts: at most {nodes} nodes a call, {levels} tokens ahead"


def shape_of(config: GenerateConfig, model: StreamFusedModel) -> DraftShape:
    """What streams draft by settings that leave nothing of it open."""
    assert config.tree and config.prune and config.stream_schedule
    return DraftShape(
        tree=config.tree,
        prune=config.prune,
        num_streams=config.num_streams or model.num_streams,
        stream_schedule=config.stream_schedule,
    )


def _streams_decision(best: Rung, tuning: Profile | None, drafts: bool, context: int | None) -> str:
    if tuning is None:
        why = f"{best.speed:.2f} times plain decoding on {ladder.this_chip().name} by row costs"
        return f"streams draft: {best.shape}; {why}" if drafts else f"plain decoding: drafts, {why}"
    choice = str(best.shape) if drafts else "plain decoding, which is faster"
    if drafts and context is None and len(tuning.shapes) > 1:
        choice += ", other trees behind other contexts"
    return f"tuned for this machine: {choice} (ssmlx.calibrate, {tuning.made})"
