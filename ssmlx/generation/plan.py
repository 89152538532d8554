"""One answer's plan: the settings applied to a loaded model and this machine."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..decoding.draft_shape import Always, DraftController, Never
from ..decoding.drafter import Drafter
from ..decoding.drafting import scratch_rows
from ..decoding.loop import PromptPlace, StepSize, plain_decode, speculative_decode
from ..decoding.sampling import Sampling
from ..decoding.step import Steps, Take, take_all
from ..drafters.base import Loaded
from ..drafters.lookup import NAME, PromptLookupDrafter
from ..drafters.registry import (
    DrafterArgument,
    build_drafter,
    drafter_class,
    needed_capability,
    split_drafter,
)
from ..drafters.text_index import MAX_MATCH, EarlierAnswers
from ..errors import InputError, require
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..policy.controller import PLAIN_CALL, Controller, ExpectedCall
from ..policy.offers import CHAIN_NODES, CurveOffer, OfferSource, SteadySource
from ..settings import GenerateConfig, PromptLookupConfig, PruneConfig, with_settings
from .default_head import HEAD_DRAFTER, default_head, require_default_head
from .learned import Learned, learned_of
from .memory import cache_size_of
from .pool import Holding, MemoryPool, Shared

TYPICAL_TOKENS = {2: 1.5, 3: 1.8, 4: 2.05, 6: 2.4, 8: 2.55, 12: 2.7, 16: 2.8}
"""Tokens per call by nodes, of adapters that do not say: about the middle of those that ship."""
TYPICAL_CHAIN = 2.0
"""Tokens per call of drafters that propose trees of one shape alone; what a text really accepts
replaces it within an answer or two."""
TEXT_CONFIG = PromptLookupConfig(
    ngram=MAX_MATCH, num_draft_tokens=CHAIN_NODES[-1] - 1, size=CHAIN_NODES[-1]
)
"""The most that is drafted of the text by default: a controller finds what pays."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Everything that an answer decodes with; made once for each answer."""

    config: GenerateConfig  # with nothing of the draft's shape and of sampling left open
    # registered name of what drafts, of the first of several; None for plain decoding
    kind: str | None
    drafters: Sequence[Drafter]
    controller: DraftController  # decides what each call drafts
    sampling: Sampling
    loaded: Sequence[Loaded]  # to draft with, whether or not it drafts
    learned: Learned | None = None  # what the answer will teach, if anything

    @property
    def scratch(self) -> int:
        """Rows that a call may have, for sizing a cache once."""
        return scratch_rows(self.drafters)

    @property
    def draft_model_calls(self) -> int:
        """Forward passes so far of what drafts beside the target."""
        return sum(drafter.draft_model_calls for drafter in self.drafters)

    @property
    def needs_context_tokens(self) -> bool:
        """Whether the tokens that the cache holds before the prompt must be given."""
        if self.sampling.context_size > 0:
            return True
        # A controller looks up in the text by itself; unknown text is not looked up in.
        if self.kind is None or (self.kind == NAME and self.config.drafter is None):
            return False
        return drafter_class(self.kind).needs_whole_context

    @property
    def lossy(self) -> bool:
        """Whether tokens may be accepted that the target would not have written."""
        return bool(self.drafters) and self.config.acceptance.kind != "exact"

    @property
    def expected_fastest_call(self) -> ExpectedCall:
        """The fastest call as expected now; `PLAIN_CALL` if no controller weighs calls."""
        if isinstance(self.controller, Controller):
            return self.controller.expected_fastest_call()
        return PLAIN_CALL

    def finish(self) -> None:
        """Keep what an answer that ended, or was given up, has taught; once."""
        if self.learned is not None and isinstance(self.controller, Controller):
            self.controller.finish()
            self.learned.keep()


def make_plan(
    model: StreamFusedModel,
    config: GenerateConfig | None = None,
    *,
    drafter: DrafterArgument | None = None,  # as `ssmlx.stream_generate` takes it
    context: int = 0,  # tokens that are committed when the answer begins
    earlier: EarlierAnswers | None = None,  # answers of the session, which this one may repeat
    end_tokens: Collection[int] = (),  # of an answer, or of a part of it: text drafts end with them
    **settings: Any,  # single fields of `GenerateConfig`, see `with_settings`
) -> Plan:
    """Make the plan of one answer: what `config` comes to on `model`. Nothing is decoded.

    If the settings ask for a shape of the draft or a way of decoding, that is drafted at every
    call. Otherwise a controller decides from call to call what is drafted, if anything; it may then
    also look up in the text, in `earlier` and in an expected text. The first plan for a model may
    load its default head, and read what was learned of this machine.
    """
    config = with_settings(config, settings)
    config = config.following(model.backbone.origin.sampling)
    config, given = split_drafter(config, drafter)
    kind, loaded = choose_drafter(model, config, given)
    sampling = Sampling(config, model.backbone.vocab_size)
    complete = config.with_default_shape()
    drafters: list[Drafter] = []
    controller: DraftController = Never()
    learned = None
    if kind is not None:
        drafters = [build_drafter(kind, model, complete, sampling, loaded, end_tokens)]
        controller = Always(drafters[0].largest)
        if _is_controlled(model, config):
            if config.drafter is None or drafter_class(kind).joins_text_drafts:
                is_chain = not model.backbone.capabilities.has("trees")
                drafters = _with_text_drafters(
                    drafters, config, earlier, end_tokens, is_chain=is_chain
                )
            sources = [offer_source_of(model, drafter) for drafter in drafters]
            if config.deterministic:
                controller = Controller.deterministic(sources, context)
            else:
                learned, prior = learned_of(model)
                controller = Controller(learned.costs, prior, sources, context=context)
    return Plan(
        config=complete,
        kind=kind,
        drafters=drafters,
        controller=controller,
        sampling=sampling,
        loaded=loaded,
        learned=learned,
    )


def _is_controlled(model: StreamFusedModel, config: GenerateConfig) -> bool:
    """Whether a controller decides what is drafted: the settings leave it open."""
    # The machines of a split model would each decide by seconds of their own.
    return config.is_controlled and model.backbone.group is None


def _with_text_drafters(
    drafters: Sequence[Drafter],
    config: GenerateConfig,
    earlier: EarlierAnswers | None,
    end_tokens: Collection[int],
    *,
    is_chain: bool,
) -> list[Drafter]:
    """`drafters`, then text drafters; these replace a lookup that was built."""
    found = [one for one in drafters if not isinstance(one, PromptLookupDrafter)]
    lookup = partial(PromptLookupDrafter, end_tokens=end_tokens, is_chain=is_chain)
    found.append(lookup(TEXT_CONFIG))
    # Calls that have to be the same on every run know nothing of other answers.
    if earlier is not None and not config.deterministic:
        found.append(lookup(TEXT_CONFIG, earlier=earlier))
    if reference := config.prompt_lookup.reference:
        found.append(lookup(replace(TEXT_CONFIG, reference=reference)))
    return found


def offer_source_of(model: StreamFusedModel, drafter: Drafter) -> OfferSource:
    """The source of a drafter's offers: the drafter itself, if it makes them."""
    if isinstance(drafter, OfferSource):
        return drafter
    largest = drafter.largest
    if largest.drafter != "streams":
        shape_offer = CurveOffer.of_shape(
            largest, TYPICAL_CHAIN, needs_host_tokens=drafter.needs.host_tokens
        )
        return SteadySource(shape_offer)
    assert model.config is not None
    curve = model.config.tokens_per_call or TYPICAL_TOKENS
    return SteadySource(CurveOffer.of_curve(largest, curve))


class ChosenDrafter(NamedTuple):
    """The drafter that the settings choose for a model, see `choose_drafter`."""

    name: str | None  # registered name of the drafter
    loaded: Sequence[Loaded]  # to draft with, whether or not it drafts


def choose_drafter(
    model: StreamFusedModel,
    config: GenerateConfig,
    given: Sequence[Loaded],  # by the user; if empty, the default head is used
) -> ChosenDrafter:
    """Choose what drafts for a model: the first of these that there is.

    The drafter of the settings; that of the first of what was loaded; streams, if the model has any
    or `decoding` asks for speculation; lookup in the text, if a controller decides.
    """
    if config.decoding == "plain":
        return ChosenDrafter(None, given)
    loaded = given or _load_default_head(model, config)
    name = config.drafter
    if name is None and loaded:
        name = loaded[0].drafter
    elif name is None and (model.num_streams or config.decoding):
        name = "streams"
    elif name is None and _is_controlled(model, config):
        return ChosenDrafter(NAME if model.backbone.capabilities.has("chains") else None, loaded)
    if name is not None:
        _require_verifiable(model, name)
    cause = "--drafter streams" if config.drafter else "speculative decoding"
    require(
        name != "streams" or model.num_streams > 0,
        f"{cause} was asked for, but the model has no streams",
        expected="an adapter with streams",
        do="use --adapter FOLDER, another --drafter, or --decoding plain",
    )
    return ChosenDrafter(name, loaded)


def _load_default_head(model: StreamFusedModel, config: GenerateConfig) -> list[Loaded]:
    """The default head, if the settings name its drafter, or let a controller choose."""
    head = None
    if config.drafter == HEAD_DRAFTER:
        head = require_default_head(model)
    elif config.drafter is None and _is_controlled(model, config):
        head = default_head(model).loaded
    return [] if head is None else [head]


def _require_verifiable(model: StreamFusedModel, drafter: str) -> None:
    capabilities = model.backbone.capabilities
    needed = needed_capability(drafter)
    reason = capabilities.reason(needed)
    if reason is None:
        return
    if needed == "trees" and capabilities.has("chains"):
        raise InputError(
            f"{drafter} proposes trees, and {reason}",
            expected="a drafter that proposes chains",
            do="use --drafter prompt-lookup or a draft model, or omit --drafter",
        )
    capabilities.require(needed, "drafting")


class Decode(Protocol):
    """A decoding loop under a plan: `decode_plan`, or beside other answers `Batches.decode`."""

    def __call__(
        self,
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TextCache,
        *,
        context: Sequence[int] = (),
        take: Take = take_all,
        place: PromptPlace | None = None,
    ) -> Steps: ...


def decode_plan(
    plan: Plan,
    model: StreamFusedModel,
    prompt: list[int],  # tokens after those in the cache, one or more
    cache: TextCache,
    *,
    context: Sequence[int] = (),  # the tokens in the cache; optional if nothing reads them
    take: Take = take_all,  # called once with the tokens of each call, before they are yielded
    place: PromptPlace | None = None,
    prefill_step_size: StepSize | None = None,  # the plan's unless given
) -> Steps:
    """Decode under a plan: without end, until the generator is closed.

    The check, and the room for trees, are made when this is called; tokens are computed as they are
    asked for. Yields a step for each call; None before each piece of the prompt and after the last,
    and while a drafter starts.
    """
    if context or plan.needs_context_tokens:
        require_context(context, cache)
    shared: dict[str, Any] = {
        "context": context,
        "sampler": plan.sampling,
        "prefill_step_size": prefill_step_size or plan.config.prefill_step_size,
        "take": take,
        "place": place,
    }
    if not plan.drafters:
        return plain_decode(model, prompt, cache, **shared)
    # Now, while the cache may be empty: its buffers would be copied as trees grow.
    cache.reserve(more_tokens=0, step_rows=plan.scratch)
    return speculative_decode(
        model,
        prompt,
        cache,
        drafters=plan.drafters,
        prune=plan.config.prune or PruneConfig(),
        acceptance=plan.config.acceptance,
        controller=plan.controller,
        **shared,
    )


def require_context(context: Sequence[int], cache: TextCache) -> None:
    """Require the tokens of all that a cache holds."""
    require(
        len(context) == cache.offset,
        f"{len(context)} tokens of context for a cache of {cache.offset} tokens",
        expected="the whole text, which is read",
        do="pass context=, the tokens in the cache",
    )


def within_limit(pool: MemoryPool, decode: Decode) -> Decode:
    """Wrap `decode` so that each answer is counted in `pool`, and refused if there is no room.

    Called, it raises NoRoomError if there is no room for the prompt; its generator does if there is
    none for more tokens. An answer is counted until its generator ends or is closed.
    """

    def decode_claiming_memory(
        plan: Plan,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TextCache,
        *,
        context: Sequence[int] = (),
        **more: Any,
    ) -> Steps:
        for one in plan.loaded:
            if isinstance(one, Shared):
                pool.share(one)
        holding = Holding(pool, cache, cache_size_of(model), plan.scratch, plan.drafters)
        num_tokens = cache.offset + len(prompt)
        pool.add_running(holding, num_tokens)
        steps = decode(plan, model, prompt, cache, context=context, **more)
        return holding.follow(steps, num_tokens)

    return decode_claiming_memory
