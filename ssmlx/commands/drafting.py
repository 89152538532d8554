"""What drafts for a model and why, and what would draft faster, in the words of every command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..loading.names import DEFAULT_ADAPTER, NO_ADAPTER, bundled_adapters

if TYPE_CHECKING:
    from ..generation.plan import Plan
    from ..loading.adapt_runs import FoundRuns
    from ..model.streams import StreamFusedModel


_TO_TRAIN = "Nothing faster is installed. To train streams for this model"


@dataclass(frozen=True)
class Drafting:
    source: str  # which adapter or head may draft, or that none does, and why
    decision: str  # what comes of it: at every call, by what calls cost here, or plainly
    faster: str  # a sentence: the command or option that would draft faster, or that none would
    effect: str  # what the adapter does to answers; empty without one

    def lines(self) -> tuple[str, str]:
        return f"{self.source}: {self.decision}", self.faster


def describe(
    model: StreamFusedModel,
    plan: Plan,  # of the answers to come
    adapter: str | None,  # its name; None for the model's own streams, "none" without one
) -> Drafting:
    """What drafts, and what would be faster. If adapters were made on this machine, the model's
    files are read for their digest."""
    from ..loading.adapt_runs import find_runs_by_weights

    found = find_runs_by_weights(model.backbone.origin.folder, model.backbone.origin.name)
    return Drafting(
        _source(model, plan, adapter, found),
        decision(plan),
        _faster_if_plain_was_asked(model, plan)
        or _faster_by_head(model, plan)
        or _faster_by_adapter(model, adapter, found),
        _effect(model, adapter),
    )


def decision(plan: Plan) -> str:
    from ..decoding.draft_shape import Always
    from ..drafters.lookup import NAME

    if not plan.drafters:
        asked = plan.config.decoding == "plain"
        return "plain decoding" + (", as --decoding says" if asked else ": nothing drafts")
    largest = plan.drafters[0].largest
    if isinstance(plan.controller, Always):
        size = f"{largest.nodes} nodes a call, {largest.levels} tokens ahead"
        return f"{plan.kind} draft at every call, as asked for: {size}"
    if plan.kind == NAME:
        return "repeats of earlier text are drafted"
    call = plan.expected_fastest_call
    if call.speed <= 1:
        return f"{plan.kind} may draft; plain decoding is expected to be as fast here"
    return (
        f"{plan.kind} draft up to {largest.nodes} nodes a call; {call.speed:.2f} times "
        "plain decoding expected, by the costs of calls here"
    )


def _source(model: StreamFusedModel, plan: Plan, adapter: str | None, found: FoundRuns) -> str:
    reason = model.backbone.capabilities.reason("chains")
    if reason is not None:
        return f"nothing can draft, {reason}"
    if adapter is None:
        return f"the model's own {model.num_streams} streams"
    head = _head(model, plan)
    if head and adapter == NO_ADAPTER:
        return head
    return "; ".join(filter(None, [_adapter(model, adapter, found), head]))


def _adapter(model: StreamFusedModel, adapter: str, found: FoundRuns) -> str:
    if adapter == NO_ADAPTER:
        aside = [run for run in found.fitting if run.has_adapter and not run.pays]
        if not aside:
            return "no adapter"
        speed = aside[0].speed_up_text
        return f"no adapter, as {aside[0].name} is not faster on this machine ({speed})"
    why = "which ships with ssmlx" if adapter in bundled_adapters() else "as asked for"
    for run in found.outdated:
        if run.name == adapter:
            why = run.why_outdated
    for run in (*found.fitting, *found.tuned):
        if run.name == adapter:
            why = f"made here from these weights, {run.speed_up_text}"
    return f"adapter {adapter} ({model.num_streams or 'no'} streams), {why}"


def _head(model: StreamFusedModel, plan: Plan) -> str:
    """Which head drafts, or why one on this machine does not; empty if there is nothing to
    report."""
    from ..generation.default_head import default_head
    from ..loading.model_heads import OWN_HEAD

    head = default_head(model)
    if head.found is None:
        return ""
    if head.loaded is not None and head.loaded in plan.loaded:
        is_own = head.found.name == OWN_HEAD
        return OWN_HEAD if is_own else f"{head.found.name}, a head for it in the Hub's cache"
    return (
        f"{head.found.name} is on this machine but cannot draft ({head.reason})"
        if head.reason
        else ""
    )


def _effect(model: StreamFusedModel, adapter: str | None) -> str:
    config = model.config
    if config is None:
        return "its LoRA changes the answers" if model.is_fine_tuned else ""
    if config.adapter_scope == "streams":
        kind = "fine-tuned" if model.is_fine_tuned else "base"
        return f"the {kind} model's answers are untouched"
    own = "the model was fine-tuned with them"
    return own if adapter is None else "the adapter is part of the model"


def _faster_if_plain_was_asked(model: StreamFusedModel, plan: Plan) -> str:
    could_draft = model.backbone.capabilities.has("chains") and plan.config.decoding == "plain"
    return "Faster: without --decoding plain" if could_draft else ""


def _faster_by_head(model: StreamFusedModel, plan: Plan) -> str:
    """The head that would draft faster; empty if a head or streams draft already, nothing can, or
    no head is known."""
    from ..generation.default_head import default_head
    from ..loading.model_heads import find_known_heads

    backbone = model.backbone
    is_taken = any(one.drafter == "mtp" for one in plan.loaded)
    if is_taken or model.num_streams or not backbone.capabilities.has("chains"):
        return ""
    head = default_head(model)
    if head.loaded is not None and head.found is not None:
        return f"Faster: {head.found.name} drafts if neither --drafter nor --decoding is given"
    rows = find_known_heads(backbone)
    chat = f"python -m ssmlx.chat --model {shlex.quote(backbone.origin.name)}"
    commands = {row: f'{chat} --drafter "mtp model={row.repositories[0]}"' for row in rows}
    if len(rows) == 1:
        row = rows[0]
        return (
            f"Faster: {commands[row]}, which fetches a head for {row.model} ({row.licence}); "
            "once it is on this machine, it drafts by default"
        )
    known = [f"{command} if it is {row.model}" for row, command in commands.items()]
    return f"Faster: {', or '.join(known)}" if known else ""


def _faster_by_adapter(model: StreamFusedModel, adapter: str | None, found: FoundRuns) -> str:
    from ..loading.attach import find_adapters_of_base
    from ..training.sizing import forecast_unfinished_run_speedup

    backbone = model.backbone
    lacking = backbone.capabilities.reason("trees") or backbone.capabilities.reason("stages")
    if lacking is not None:
        return f"Nothing would be faster: streams cannot be trained for this model: {lacking}"
    if model.is_fine_tuned:
        return _faster_with_lora(model, adapter, found)
    if found.chosen is not None and found.chosen.name != adapter:
        run = found.chosen
        return f"Faster: --adapter {run.name}, made here from these weights, {run.speed_up_text}"
    if adapter == NO_ADAPTER and DEFAULT_ADAPTER in find_adapters_of_base(model):
        return f"Faster: --adapter {DEFAULT_ADAPTER}, which ships with ssmlx for this model"
    begun = next((run for run in found.fitting if not run.is_finished), None)
    if begun is not None:
        speed = forecast_unfinished_run_speedup(begun)
        came = f"came to {speed:.2f} times plain decoding's speed so far" if speed else "was begun"
        command = _adapt_command(model, f"--name {begun.name}", begun.hours)
        return f"Nothing faster is installed. To go on with a run that {came}: {command}"
    own = next((run for run in found.fitting if adapter in (run.name, NO_ADAPTER)), None)
    if own is not None:
        command = _adapt_command(model, hours=2 * own.hours)
        return f"Nothing faster is installed. To train for more hours: {command}"
    if model.num_streams:
        command = _adapt_command(model, "--data FILE")
        return f"Nothing faster is installed. To train on your prompts: {command}"
    return _faster_by_training(model)


def _faster_by_training(model: StreamFusedModel) -> str:
    from ..loading.adapt_runs import PAYS
    from ..training.sizing import forecast_speedup_of_adapting

    speed = forecast_speedup_of_adapting(model)
    command = _adapt_command(model)
    if speed is None:
        return f"{_TO_TRAIN}: {command}, which measures within minutes what to expect here"
    expected = f"should reach about {speed:.1f} times plain decoding's speed here"
    if speed < PAYS:
        return f"Nothing would be faster: streams {expected}"
    return f"{_TO_TRAIN}: {command}, which {expected}"


def _faster_with_lora(model: StreamFusedModel, adapter: str | None, found: FoundRuns) -> str:
    """The adapter or command that would draft faster for a model with a LoRA. Only runs made with
    this very adapter count, since streams trained for the base would guess another model's answers;
    its files are read for their digest."""
    from ..loading.folders import Fetch
    from ..loading.identity import folder_digest
    from ..loading.names import resolve_adapter

    if model.num_streams or adapter is None:
        return "Nothing faster is installed that keeps these answers"
    # It was fetched to load it.
    fetch = Fetch(cache_dir=model.backbone.origin.cache_dir, offline=True)
    digests = [folder_digest(resolve_adapter(adapter, fetch))]
    for run in found.tuned:
        if run.has_adapter and run.settings["adapter"] == digests:
            return f"Faster: --adapter {run.name}, made here for this adapter, {run.speed_up_text}"
    command = _adapt_command(model, f"--adapter {shlex.quote(adapter)}")
    return f"{_TO_TRAIN}: {command}, which measures within minutes what to expect here"


def _adapt_command(model: StreamFusedModel, option: str = "", hours: float = 0.0) -> str:
    words = [f"python -m ssmlx.adapt --model {shlex.quote(model.backbone.origin.name)}", option]
    if hours not in (0.0, 1.0):  # 1 is the default
        words.append(f"--hours {hours:g}")
    return " ".join(filter(None, words))
