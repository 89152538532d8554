"""The check command, which times what drafting costs here; and the head start of chat and server,
which times less of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf
from threading import Timer
from typing import TYPE_CHECKING, Any, get_args

from ..bars import PATIENCE_SECONDS
from ..errors import require
from ..loading.names import NO_ADAPTER
from ..settings import DRAFTERS, GenerateConfig
from .answer_lines import sampling_line
from .decoding_options import add_model_options
from .drafting import describe
from .learned_lines import cost_table_rows
from .load_target import load_target
from .parser import add_options, make_parser
from .running import make_main, print_json

if TYPE_CHECKING:
    from ..model.streams import StreamFusedModel

PROG = "ssmlx.check"
SIZES = (2, 3, 4, 6, 8, 16)
"""Nodes of the trees that are timed."""
SHOWN_TOKENS = 1000
EPILOG = """examples:
  python -m ssmlx.check
  python -m ssmlx.check mlx-community/Qwen3-4B-4bit --adapter runs/mine
  python -m ssmlx.check --adapter sql --seconds 20 --details

The first three lines say whether drafting is faster here, what drafts, and what would draft faster.

Columns of the table of --details:
  nodes         tokens that one call of the model verifies: the newest one, and the drafted ones
  plain calls   time of such a call, divided by the time of a call that decodes one token
  tokens        tokens that such a call yields on the adapter's own test prompts
  speed-up      over plain decoding, if as many drafted tokens are accepted as in earlier answers
                on this machine (9 in 10 before the first answer). Below 1, drafting is slower.
For a model without streams, the command times what streams would cost; ssmlx.adapt uses that.

Costs depend on the machine and the model's shapes, not on its weights. They are stored, and later
answers use them.

Exit code 0: the model works, with or without drafting. 2: it does not, and a line says why."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Show which drafters work with a model, and the speed-up to expect on this machine.",
        EPILOG,
        "[MODEL] [options]",
    )
    add_model_options(parser)
    add_options(
        parser.add_argument_group("check"),
        ("--seconds", "S", "seconds to spend on timing (default: %(default)g)", 5.0),
    )
    add_options(
        parser.add_argument_group("output").add_mutually_exclusive_group(),
        ("--details", None, "print costs of calls and shares of accepted drafts too", bool),
        ("--json", None, "print one JSON object instead of text", bool),
    )
    return parser.parse_args(argv)


def time_unknown_costs(
    model: StreamFusedModel, tokenizer: Any, config: GenerateConfig, loaded: Sequence[Any]
) -> None:
    """Time calls whose costs are unknown, for about two seconds; none if nothing is learned."""
    from ..generation.head_start import time_head_start
    from ..generation.plan import make_plan
    from ..mlx_thread import run_on_mlx_thread

    text = "timing what drafting costs here ..."
    note = Timer(PATIENCE_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    note.daemon = True
    note.start()
    try:
        run_on_mlx_thread(
            lambda: time_head_start(model, tokenizer, make_plan(model, config, drafter=loaded))
        )
    finally:
        note.cancel()


def reasons_not_to_draft(model: StreamFusedModel) -> dict[str, str | None]:
    """Why each drafter cannot draft, by its name; None if one can."""
    from ..drafters.registry import drafter_class, needed_capability

    reasons: dict[str, str | None] = {}
    for name in DRAFTERS:
        reasons[name] = model.backbone.capabilities.reason(needed_capability(name))
        loader = drafter_class(name).loader
        if reasons[name] is not None:
            continue
        if name == "streams" and not model.num_streams:
            lora = " --adapter LORA" if model.is_fine_tuned else ""
            reasons[name] = (
                f"the model has no streams: give --adapter, or train some (ssmlx.adapt{lora})"
            )
        elif name == "mtp":
            reasons[name] = _reason_that_no_head_drafts(model)
        elif loader is not None:
            reasons[name] = f'it needs {loader.what}: --drafter "{name} {DRAFTERS[name].loads}"'
    return reasons


def _reason_that_no_head_drafts(model: StreamFusedModel) -> str | None:
    """Why no head drafts; a head that is on this machine is loaded for this, if it was not yet."""
    from ..generation.default_head import default_head
    from ..loading.model_heads import can_have_head, find_known_heads

    head = default_head(model)
    if head.loaded is not None:
        return None
    if head.found is not None:
        return f"{head.found.name} is here, but {head.reason}"
    if not can_have_head(model.backbone):
        return "no heads are known for models of this class"
    rows = find_known_heads(model.backbone)
    names = [row.repositories[0] for row in rows] or ["MODEL"]
    options = " or ".join(f'--drafter "mtp model={name}"' for name in names)
    return f"it needs a head, which is not on this machine: {options}"


def describe_adapter(adapter: str | None, model: StreamFusedModel) -> str | None:
    """The adapter, read anew from its files; None without an adapter."""
    from ..loading.adapter import load_adapter
    from ..loading.folders import Fetch
    from ..loading.names import resolve_adapter

    origin = model.backbone.origin
    fetch = Fetch(cache_dir=origin.cache_dir, offline=True)  # it was fetched to load it
    folder = resolve_adapter(adapter, fetch) if adapter else None
    if adapter is None and model.num_streams:
        folder = origin.folder
    return None if folder is None else load_adapter(folder).describe()


def describe_model(
    args: argparse.Namespace, model: StreamFusedModel, tokenizer: Any
) -> dict[str, Any]:
    """What `report_lines` prints, as JSON values; "learned" is what was known before the timing.
    Runs on the MLX thread."""
    from ..blas import this_machine
    from ..generation.answer_end import end_token_ids
    from ..generation.head_start import sample_text
    from ..generation.learned import learned_of
    from ..generation.memory import cache_size_of, measure_memory
    from ..generation.plan import make_plan
    from ..model.capabilities import Capability
    from ..prompts import adapter_template

    backbone = model.backbone
    learned, prior = learned_of(model)
    # Before anything is timed: what earlier answers have taught.
    known = cost_table_rows(learned.costs)
    text = sample_text(model, tokenizer)
    template = adapter_template(model)
    if template is None and tokenizer.has_chat_template:
        source = "the model's chat template"
    elif template is None:
        source = "none: prompts are taken as they are"
    else:
        source = f"the adapter's own, {template!r}"
    costs = []
    if model.num_streams:
        costs = time_tree_sizes(model, text, args.seconds)
    else:
        time_untrained_streams(model, args.model, text, args.seconds)
    drafting = describe(model, make_plan(model), args.adapter)
    verdict = [f"{args.model} works here: {drafting.decision}", drafting.source, drafting.faster]
    return {
        "verdict": verdict,
        "model": args.model,
        "adapter": args.adapter,
        "adapter_is": describe_adapter(args.adapter, model),
        "drafting": list(drafting.lines()),
        "class": type(backbone.model).__module__,
        "family": str(getattr(backbone.model, "model_type", "unknown")),
        "layers": len(backbone.layers),
        "width": backbone.hidden_size or None,
        "dtype": str(backbone.dtype).removeprefix("mlx.core."),
        "streams": model.num_streams,
        "machine": ", ".join(this_machine()),
        "lacks": {
            name: reason
            for name in get_args(Capability)
            if (reason := backbone.capabilities.reason(name)) is not None
        },
        "drafters": reasons_not_to_draft(model),
        "costs": costs,
        "tokens_are_known": bool(model.config and model.config.tokens_per_call),
        "plain_seconds": learned.costs.plain_seconds(len(text)),
        "learned": {"costs": known, "acceptance": prior.to_dict()["ratios"]},
        "template": source,
        "sampling": sampling_line(GenerateConfig(), backbone.origin.sampling),
        "tool_calls": _tool_calls_line(tokenizer),
        "end_tokens": {
            token: tokenizer.decode([token]) for token in sorted(end_token_ids(model, tokenizer))
        },
        "memory": {
            "weights": measure_memory(model, model.make_cache()).weights,
            "cache": cache_size_of(model).per_token * SHOWN_TOKENS,
        },
    }


def _tool_calls_line(tokenizer: Any) -> str:
    from ..formats.families import UNKNOWN_CALLS, find_format
    from ..rendering import has_unknown_calls, offers_tools

    if has_unknown_calls(tokenizer):
        return UNKNOWN_CALLS
    if not offers_tools(tokenizer):
        return "none: the chat template does not support tools"
    return f"read in the form {find_format(tokenizer).name}"


def time_tree_sizes(
    model: StreamFusedModel, text: Sequence[int], seconds: float
) -> list[dict[str, float]]:
    """A row for each number of nodes whose cost is known: plain calls, tokens on the adapter's test
    prompts, and the speed-up by what earlier answers here accepted."""
    from ..decoding.draft_shape import DraftShape
    from ..generation.head_start import STREAMS, time_costs
    from ..generation.learned import learned_of
    from ..generation.plan import TYPICAL_TOKENS
    from ..policy.offers import CurveOffer

    time_costs(model, text, SIZES, seconds=seconds, first_round_seconds=seconds)
    learned, prior = learned_of(model)
    costs = learned.costs.frozen(len(text)).known
    share = prior.ratio(STREAMS, len(text))
    assert model.config is not None
    curve = model.config.tokens_per_call or TYPICAL_TOKENS
    largest = DraftShape(STREAMS, SIZES[-1], model.num_streams)
    offer = CurveOffer.of_curve(largest, curve)
    drafted = {shape.nodes: tokens for shape, tokens in offer.accepted.items()}
    return [
        {
            "nodes": nodes,
            "plain_calls": cost,
            "tokens": 1 + drafted[nodes],
            "speed_up": (1 + share * drafted[nodes]) / cost,
        }
        for (name, nodes), (cost, _) in sorted(costs.items())
        if name == STREAMS and nodes in drafted
    ]


def time_untrained_streams(
    model: StreamFusedModel, name: str, text: Sequence[int], seconds: float
) -> None:
    """Time random streams of every size, for the forecast of `ssmlx.adapt`; nothing for a model
    that cannot have streams, is split over machines or was made in memory."""
    from ..training.config import RunOptions
    from ..training.job import read_base_settings
    from ..training.sizing import candidate_layers, time_candidate_streams

    backbone = model.backbone.without_adapter()
    can_have = backbone.capabilities.has("trees") and backbone.capabilities.has("stages")
    folder = backbone.origin.folder
    if folder is None or backbone.group is not None or not can_have or len(text) < 2:
        return
    base = read_base_settings(folder)
    each = seconds / len(candidate_layers(base["num_hidden_layers"]))
    options = RunOptions(data=folder, out=folder, model=name, template=None)
    time_candidate_streams(backbone, base, options, text, seconds=each)


def report_lines(
    found: dict[str, Any],
    has_details: bool,  # tables of costs and of acceptance
) -> list[str]:
    from ..generation.memory import MIB

    has_adapter = found["adapter"] not in (None, NO_ADAPTER)
    adapter = f"adapter {found['adapter']}" if has_adapter else "no adapter"
    width = f" of width {found['width']}" if found["width"] else ""
    ends = ", ".join(f"{token} {text!r}" for token, text in found["end_tokens"].items())
    memory = found["memory"]
    details = [*_cost_lines(found), *_learned_lines(found)]
    return [
        *found["verdict"],
        "",
        *_drafter_lines(found),
        "",
        *(details if has_details else []),
        f"{found['model']}, {adapter}: class {found['class']}, family {found['family']}; "
        f"{found['layers']} layers{width}, {found['dtype']}",
        *([f"the adapter is {found['adapter_is']}"] if found["adapter_is"] else []),
        f"machine: {found['machine']}",
        f"prompt template: {found['template']}",
        f"without options: {found['sampling']}",
        f"tool calls: {found['tool_calls']}",
        f"end tokens: {ends or 'none'}",
        f"memory: {memory['weights'] / MIB:.1f} MiB of weights, and a cache of "
        f"{memory['cache'] / MIB:.1f} MiB for {SHOWN_TOKENS:,} tokens",
    ]


def _drafter_lines(found: dict[str, Any]) -> list[str]:
    """A line for each drafter that cannot draft; one line alone if a reason excludes all."""
    lacks = found["lacks"]
    if "chains" in lacks:
        return [f"decodes plainly, nothing can draft: {lacks['chains']}"]
    width = max(map(len, found["drafters"]))
    lines = [
        f"{name:{width}}  {'can draft' if reason is None else f'cannot draft yet: {reason}'}"
        for name, reason in found["drafters"].items()
    ]
    alike = {reason: [name for name in lacks if lacks[name] == reason] for reason in lacks.values()}
    return lines + [f"lacks {', '.join(names)}: {reason}" for reason, names in alike.items()]


def _cost_lines(found: dict[str, Any]) -> list[str]:
    from ..report import table

    if not found["streams"]:
        return []
    costs = found["costs"]
    columns = {
        "nodes": lambda row: str(row["nodes"]),
        "plain calls": lambda row: f"{row['plain_calls']:.2f}",
        "tokens": lambda row: f"{row['tokens']:.2f}",
        "speed-up": lambda row: f"{row['speed_up']:.2f}",
    }
    lines = table(columns, costs)
    if not costs or costs[-1]["nodes"] < SIZES[-1]:
        lines.append("larger trees cost more than they gain, or need more --seconds to be timed")
    if found["plain_seconds"] is not None:
        lines.append(f"a plain call takes {1000 * found['plain_seconds']:.1f} ms")
    if not found["tokens_are_known"]:
        lines.append("the adapter does not state its tokens; these are typical ones")
    return [*lines, ""]


def _learned_lines(found: dict[str, Any]) -> list[str]:
    from ..report import align_rows

    rows = found["learned"]["costs"]
    lines = ["known before this check:", *align_rows(rows), ""] if rows else []
    accepted = [
        f"accepted before: {share:.2f} of the drafted tokens that {name} should bring, "
        f"from {bucket} tokens on"
        for name, bucket, share, _ in found["learned"]["acceptance"]
    ]
    return [*lines, *accepted, ""] if accepted else lines


def _time_and_print(args: argparse.Namespace) -> None:
    require(
        0 < args.seconds < inf,
        f"--seconds {args.seconds:g}",
        expected="a number above 0",
        do="choose one, such as 5",
    )
    model, tokenizer = load_target(args)

    from ..mlx_thread import run_on_mlx_thread

    found = run_on_mlx_thread(lambda: describe_model(args, model, tokenizer))
    if args.json:
        print_json(found)
    else:
        print("\n".join(report_lines(found, args.details)))


main = make_main(PROG, parse_args, _time_and_print)
