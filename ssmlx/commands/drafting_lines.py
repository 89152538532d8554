"""What drafts for a model and why, what would draft faster, and what was learned of calls' costs
and of acceptance: every command says it alike.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..loading.names import DEFAULT_ADAPTER, NO_ADAPTER, bundled_adapters

if TYPE_CHECKING:
    from ..generation.plan import Plan
    from ..loading.adapt_runs import FoundRuns, StoredRun
    from ..model.streams import StreamFusedModel
    from ..policy.acceptance import AcceptancePrior
    from ..policy.costs import CostTable


def drafting_lines(model: StreamFusedModel, plan: Plan, adapter: str | None) -> tuple[str, str]:
    """Return two lines: what drafts and why; and what would draft faster, with the command for it.

    Where adapters were made on this machine, the model's files are read for their digest.

    Args:
        model: as `ssmlx.load` returns it.
        plan: of the answers to come.
        adapter: what the model's adapter is called; None for its own streams, "none" without one.
    """
    from ..loading.adapt_runs import find_runs_by_weights

    found = find_runs_by_weights(model.backbone.origin.folder, model.backbone.origin.name)
    source = _describe_what_drafts_and_why(model, plan, adapter, found)
    faster = _faster_head_command_or_none(model, plan)
    faster = faster or _faster_command_or_why_none(model, adapter, found)
    return f"{source}: {decision_line(plan)}", f"faster: {faster}"


def decision_line(plan: Plan) -> str:
    """A line for users: what drafts and why, or why nothing does.

    Of a drafter that drafts at every call, nodes and levels of its tree; of one that a
    controller may let draft, the nodes of its largest tree and the speed that is expected now,
    or that plain decoding is expected to be as fast. Of lookup in the text no numbers.
    """
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
        return "what stood in the text before is drafted where it comes again"
    call = plan.expected_fastest_call
    if call.speed <= 1:
        return f"{plan.kind} may draft; plain decoding is expected to be as fast here"
    return (
        f"{plan.kind} draft up to {largest.nodes} nodes a call; {call.speed:.2f} times "
        "plain decoding expected by what calls cost here"
    )


def _describe_what_drafts_and_why(
    model: StreamFusedModel, plan: Plan, adapter: str | None, found: FoundRuns
) -> str:
    """Return words that say what drafts, an adapter, a head or nothing, and why.

    Args:
        model: as `ssmlx.load` returns it.
        plan: of the answers to come.
        adapter: as in `drafting_lines`.
        found: runs of `ssmlx.adapt` on this machine that belong to the model.
    """
    reason = model.backbone.capabilities.reason("chains")
    if reason is not None:
        return f"nothing can draft, {reason}"
    if adapter is None:
        return "the model's own streams"
    head = _describe_head_or_why_unused(model, plan)
    source = _describe_adapter_or_none_and_why(model, adapter, found)
    if head is None:
        return source
    return head if adapter == NO_ADAPTER else f"{source}; {head}"


def _describe_adapter_or_none_and_why(
    model: StreamFusedModel, adapter: str, found: FoundRuns
) -> str:
    """Return words that say which adapter is on the model and why, or that none is and why.

    Args:
        model: as `ssmlx.load` returns it.
        adapter: its name; "none" without one.
        found: runs of `ssmlx.adapt` on this machine that belong to the model.
    """
    if adapter != NO_ADAPTER:
        fitting = {run.name: run for run in (*found.fitting, *found.tuned)}
        outdated = {run.name: run.why_outdated for run in found.outdated}
        why = "as asked for"
        if adapter in fitting:
            why = f"made here from these weights, {fitting[adapter].speed_up_text}"
        elif adapter in outdated:
            why = outdated[adapter]
        elif adapter in bundled_adapters():
            why = "which ships with ssmlx"
        streams = "" if model.num_streams else ", without streams"
        return f"adapter {adapter}{streams}, {why}"
    aside = [run for run in found.fitting if run.has_adapter and not run.pays]
    if aside:
        why = f"brings nothing on this machine ({aside[0].speed_up_text})"
        return f"no adapter, as {aside[0].name} {why}"
    return "no adapter"


def _describe_head_or_why_unused(model: StreamFusedModel, plan: Plan) -> str | None:
    """Return words that say which head drafts, or why one that is on this machine does not; None
    where no head is here, or the plan does without it for another reason.

    Args:
        model: as `ssmlx.load` returns it.
        plan: of the answers to come.
    """
    from ..generation.default_head import default_head
    from ..loading.model_heads import OWN_HEAD

    head = default_head(model)
    if head.found is None:
        return None
    if head.loaded is not None and head.loaded in plan.loaded:
        is_own = head.found.name == OWN_HEAD
        return OWN_HEAD if is_own else f"{head.found.name}, a head for it in the Hub's cache"
    if head.reason is not None:
        return f"{head.found.name} is here and drafts nothing ({head.reason})"
    return None


def _faster_head_command_or_none(model: StreamFusedModel, plan: Plan) -> str | None:
    """Return the command that drafts with a head that is known for the model, or fetches it.

    Args:
        model: as `ssmlx.load` returns it.
        plan: of the answers to come.

    Returns:
        The command; where a head is on this machine, a text that says when it drafts; None where a
        head or streams draft already, nothing can, or no head is known.
    """
    from ..generation.default_head import default_head
    from ..loading.model_heads import find_known_heads

    backbone = model.backbone
    head = default_head(model)
    is_taken = any(one.drafter == "mtp" for one in plan.loaded)
    if is_taken or model.num_streams or not backbone.capabilities.has("chains"):
        return None
    if head.loaded is not None and head.found is not None:
        return f"{head.found.name} drafts where no --drafter and no --decoding is given"
    rows = find_known_heads(backbone)
    commands = [
        f"python -m ssmlx.chat --model {shlex.quote(backbone.origin.name)} "
        f'--drafter "mtp model={row.repositories[0]}"'
        for row in rows
    ]
    if len(rows) == 1:
        row = rows[0]
        return (
            f"{commands[0]}, which fetches a head for {row.model} ({row.licence}); "
            "where it is here, it drafts by itself"
        )
    named = [f"{command} if it is {row.model}" for command, row in zip(commands, rows, strict=True)]
    return ", or ".join(named) or None


def _faster_command_or_why_none(
    model: StreamFusedModel, adapter: str | None, found: FoundRuns
) -> str:
    """Return the option or command that would make drafting faster, or "nothing" and why.

    Args:
        model: as `ssmlx.load` returns it.
        adapter: as in `drafting_lines`.
        found: runs of `ssmlx.adapt` on this machine that belong to the model.
    """
    from ..loading.adapt_runs import PAYS
    from ..loading.attach import find_adapters_of_base
    from ..training.sizing import forecast_speedup_of_adapting

    backbone = model.backbone
    lacking = backbone.capabilities.reason("trees") or backbone.capabilities.reason("stages")
    if lacking is not None:
        return f"nothing, as streams cannot be trained for this model: {lacking}"
    if model.is_fine_tuned:
        return _faster_command_keeping_lora(model, adapter, found)
    if found.chosen is not None and found.chosen.name != adapter:
        run = found.chosen
        return f"--adapter {run.name}, made here from these weights, {run.speed_up_text}"
    if adapter == NO_ADAPTER and DEFAULT_ADAPTER in find_adapters_of_base(model):
        return f"--adapter {DEFAULT_ADAPTER}, which ships with ssmlx and belongs to this model"
    adapt = f"python -m ssmlx.adapt --model {shlex.quote(backbone.origin.name)}"
    begun = next((run for run in found.fitting if not run.is_finished), None)
    if begun is not None:
        speed_so_far = _speed_so_far_of_unfinished_run(begun)
        return f"{adapt} --name {begun.name}{_hours_option(begun.hours)} {speed_so_far}"
    own = next((run for run in found.fitting if adapter in (run.name, NO_ADAPTER)), None)
    if own is not None:
        return f"nothing that is here; more hours may: {adapt}{_hours_option(2 * own.hours)}"
    if model.num_streams:
        return f"nothing that is here; streams for prompts like yours may: {adapt} --data FILE"
    speed = forecast_speedup_of_adapting(model)
    if speed is None:
        return f"{adapt}, which says within minutes what that would bring here"
    if speed < PAYS:
        return f"nothing; streams should bring some {speed:.1f} times plain decoding's speed here"
    return f"{adapt}, which should bring some {speed:.1f} times plain decoding's speed here"


def _faster_command_keeping_lora(
    model: StreamFusedModel, adapter: str | None, found: FoundRuns
) -> str:
    """Return what `_faster_command_or_why_none` does, for a model whose answers a LoRA changes: the
    name of a run that was made with it, the command that makes one, or "nothing ..." where the
    model has streams already.

    Streams that were trained for the base model would guess another model's answers, so only runs
    that were made with this very adapter count. The adapter's files are read for their digest.

    Args:
        model: with the LoRA.
        adapter: as in `drafting_lines`.
        found: runs of `ssmlx.adapt` on this machine that belong to the model.
    """
    from ..loading.folders import Fetch
    from ..loading.identity import folder_digest
    from ..loading.names import resolve_adapter

    backbone = model.backbone
    if model.num_streams or adapter is None:
        return "nothing that is here and answers alike"
    fetch = Fetch(cache_dir=backbone.origin.cache_dir, offline=True)  # it was fetched to load it
    digests = [folder_digest(resolve_adapter(adapter, fetch))]
    made = next(
        (run for run in found.tuned if run.has_adapter and run.settings["adapter"] == digests), None
    )
    if made is not None:
        return f"--adapter {made.name}, made here of this adapter, {made.speed_up_text}"
    asked = f"--model {shlex.quote(backbone.origin.name)} --adapter {shlex.quote(adapter)}"
    return f"python -m ssmlx.adapt {asked}, which says within minutes what that would bring here"


def _hours_option(hours: float) -> str:
    """The option --hours as it has to be typed; empty for its default of 1, and for 0."""
    return f" --hours {hours:g}" if hours not in (0.0, 1.0) else ""


def _speed_so_far_of_unfinished_run(run: StoredRun) -> str:
    """Return words that say that an unfinished run goes on, with the speed that it has reached over
    plain decoding's, if that is known.
    """
    from ..training.sizing import forecast_unfinished_run_speedup

    speed = forecast_unfinished_run_speedup(run)
    if speed is None:
        return "goes on with a run that was begun"
    return f"goes on with a run that came to {speed:.2f} times plain decoding's speed so far"


def cost_table_rows(costs: CostTable) -> list[list[str]]:
    """The known costs of calls as rows of cells, to print.

    Returns:
        First the head: a title, then each known number of nodes (in a batch, of texts). Then a row
        for each drafter and context bucket: one cell that names both, then the plain calls that a
        call takes, with two decimals, or "" where unknown. An empty list where nothing is known.
    """
    found: dict[tuple[str, int], dict[int, str]] = {}
    for bucket, name, count, calls, _ in costs.to_dict()["costs"]:
        found.setdefault((name, bucket), {})[count] = f"{calls:.2f}"
    counts = sorted({count for row in found.values() for count in row})
    rows = [
        [f"{name}, from {bucket} tokens on", *(row.get(count, "") for count in counts)]
        for (name, bucket), row in sorted(found.items())
    ]
    return [["plain calls a call, by nodes", *map(str, counts)], *rows] if rows else []


def costs_line(costs: CostTable, drafter: str, cost_name: str, context: int) -> str:
    """A line for `--verbose`: measured costs of a drafter's calls, in plain calls by nodes.

    They are those of the bucket of `context` tokens, else of the next shorter one that is known,
    with the milliseconds of a plain call if it was timed; or the line says that nothing was timed.

    Args:
        costs: what was measured.
        drafter: its registered name.
        cost_name: the name under which costs of its calls are kept, see `Offer`.
        context: tokens that are committed.
    """
    known = costs.frozen(context).known
    calls = {count: one for (name, count), (one, _) in sorted(known.items()) if name == cost_name}
    if not calls:
        return f"costs: no call of {drafter} was timed here yet"
    shown = ", ".join(f"{count}: {one:.2f}" for count, one in calls.items())
    seconds = costs.plain_seconds(context)
    plain = "" if seconds is None else f" of {1000 * seconds:.1f} ms"
    return f"costs: plain calls{plain} that a call of {drafter} takes, by nodes: {shown}"


def acceptance_line(prior: AcceptancePrior, drafter: str, context: int) -> str:
    """A line for `--verbose`: a drafter's acceptance ratio behind `context` tokens.

    Of a drafter whose ratios are kept by the length of a match (`ChainOffer`), one ratio for each
    known length. Or that no text was drafted with it yet, in this context or a shorter one.
    """
    from ..policy.offers import MATCH_LENGTHS, match_ratio

    known = prior.known_ratios(context)
    if drafter in known:
        return f"acceptance: {known[drafter]:.2f} of the drafted tokens that {drafter} should bring"
    by_length = {
        length: known[name]
        for length in MATCH_LENGTHS
        if (name := match_ratio(drafter, length)[0]) in known
    }
    if not by_length:
        return f"acceptance: no text was drafted with {drafter} here yet"
    shown = ", ".join(f"{length}: {share:.2f}" for length, share in by_length.items())
    return f"acceptance: of the next tokens that {drafter} drafts, by length of the match: {shown}"
