"""`python -m ssmlx.calibrate`: measures this machine, and tells streams how to draft on it.

Seconds of a model's forwards are measured against rows and context, and what an adapter's streams
guess is recorded along some answers. From the two follow the expected tokens/s of every way to
draft: kind and size of the tree, number of streams, schedule, pruning budget. The fastest is kept
for this machine, model and adapter (in the cache folder, see `SSMLX_CACHE`), and with it those
that are faster behind shorter or longer contexts, where a row costs less or more. `ssmlx.generate`,
`ssmlx.chat` and the Python API use them from then on where none of these is asked for, and decode
plainly where nothing pays. At the end the choice and others are timed on prompts that were not
used for it. Takes a few minutes; nothing else should run.

    python -m ssmlx.calibrate --adapter sql
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import check_prompt
from ..calibration.check import Checked, check
from ..calibration.costs import CONTEXTS, CostPlan
from ..calibration.guesses import rank_table
from ..calibration.measure import Measured, answer_prompts, choose, measure_costs
from ..calibration.report import BUSY, RANKS, draw, report, results_dir
from ..errors import InputError
from ..loading.attach import adapters_for
from ..loading.files import make_folder
from ..loading.names import resolve_adapter, resolve_model
from ..model.streams import StreamFusedModel
from ..prompts import encode_prompt, read_prompts
from ..settings import ATTENTIONS, DRAFT_HEADS
from ..tuning.machine import machine
from ..tuning.profile import Place, Profile, mlx_version, store_profile
from ..tuning.report import publish
from .options import add_counts, add_model_options, load_target, make_parser, run

PROG = "ssmlx.calibrate"
DEFAULT_ADAPTER = "chat"
PROMPTS_FILE = "prompts.jsonl"
NOTHING_CHECKED = "nothing was checked: the held-out answers are a single token each"


def bar(items: Iterable[Any], label: str) -> Iterator[Any]:
    """A progress bar, on a terminal."""
    yield from tqdm(list(items), desc=label, disable=None, leave=False)


def read_tokens(
    path: Path, model: StreamFusedModel, tokenizer: TokenizerWrapper
) -> list[list[int]]:
    """The prompts of a file, under the adapter's template.

    Raises:
        InputError: the file or a prompt is bad.
    """
    found = [encode_prompt(prompt, model, tokenizer) for prompt in read_prompts(path, "--data")]
    for tokens in found:
        check_prompt(model, len(tokens))
    return found


def split(
    prompts: Sequence[list[int]], count: int, checked: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The last `count` prompts to learn from, and `checked` before them to check on.

    The first prompts of a file are those that other measurements take.

    Raises:
        InputError: there are too few.
    """
    if count < 1 or checked < 0 or len(prompts) < count + checked:
        raise InputError(
            f"--count {count} --check {checked} of {len(prompts)} prompts",
            expected="1 or more to learn from, others to check on, and no more than there are",
            do="give smaller numbers, or more --data",
        )
    first = len(prompts) - count
    return list(prompts[first:]), list(prompts[first - checked : first])


def profile_from(model: StreamFusedModel, measured: Measured) -> Profile:
    """What is kept for the runtime."""
    return Profile(
        place=Place.of(model),
        made=time.strftime("%Y-%m-%d"),
        mlx=mlx_version(),
        context=int(measured.setting.context),
        ways=measured.ways,
        costs=measured.setting.costs,
    )


def result_of(
    args: argparse.Namespace,
    profile: Profile,
    measured: Measured,
    checks: Sequence[Checked],
    data: Path,
    streams: Mapping[str, Any],
) -> dict[str, Any]:
    """The result as JSON values; `streams` are the adapter's settings."""
    place, guesses = profile.place, measured.setting.guesses
    nodes = {one.shape.text(): one.shape.num_nodes for one in measured.candidates}
    return {
        "machine": machine(),
        "where": f"{place.machine} ({place.backend}), mlx {profile.mlx}, {profile.made}",
        "model": str(args.model),
        "adapter": adapter_name(args),
        "dtype": place.dtype,
        "data": data.name,
        "answers": len(guesses),
        "tokens": sum(len(one.answer) for one in guesses),
        "context": profile.context,
        "streams": streams,
        "ranks": rank_table(guesses, RANKS),
        "costs": profile.costs.to_dict(),
        "candidates": [one.to_dict() for one in measured.candidates],
        "chosen": measured.chosen.to_dict(),
        "by_context": [
            {"context": context, **one.to_dict()} for context, one in measured.by_context.items()
        ],
        "checks": [{**one.to_dict(), "nodes": nodes.get(one.what, 1)} for one in checks],
        "profile": profile.to_dict(),
    }


def adapter_name(args: argparse.Namespace) -> str:
    """What the adapter is called; a fused model's streams have its own name."""
    return Path(args.adapter or args.model).name


def data_of(args: argparse.Namespace) -> Path:
    """The prompts to learn from.

    Raises:
        InputError: none are given, and none ship for this adapter.
    """
    if args.data is not None:
        return Path(args.data)
    folder = resolve_adapter(args.adapter) if args.adapter else resolve_model(args.model)
    shipped = None if folder is None else folder / PROMPTS_FILE
    if shipped is None or not shipped.is_file():
        raise InputError(
            f"no prompts ship with the adapter {adapter_name(args)}",
            expected="prompts such as it will be asked",
            do="give --data FILE.jsonl, a JSON object with `prompt` or `messages` a line",
        )
    return shipped


def load_streams(args: argparse.Namespace) -> tuple[StreamFusedModel, TokenizerWrapper]:
    """The model that the options name, with streams.

    Raises:
        InputError: it has none.
    """
    model, tokenizer = load_target(
        args, DEFAULT_ADAPTER, draft_head=args.draft_head, attention=args.attention
    )
    if model.num_streams == 0:
        fitting = ", ".join(adapters_for(model)) or "none that ships with ssmlx"
        raise InputError(
            "the model has no streams to calibrate",
            expected=f"an adapter; for this model: {fitting}",
            do="give --adapter NAME or FOLDER",
        )
    return model, tokenizer


def _main(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    make_folder(args.out)
    model, tokenizer = load_streams(args)
    data = data_of(args)
    prompts, held_out = split(read_tokens(data, model, tokenizer), args.count, args.check)
    answered = answer_prompts(model, tokenizer, prompts, args.max_tokens, max(plan.rows), bar)
    costs, noise = measure_costs(model, prompts, plan, bar)
    measured = choose(model, answered, costs, [row for row in plan.rows if row > 1], bar)
    profile = profile_from(model, measured)
    # Before the check, which may be stopped.
    print(keep(args, profile, noise))
    checks = []
    if held_out:
        checks = check(model, tokenizer, held_out, measured.chosen, measured.candidates,
                       max_tokens=args.max_tokens, bar=bar)  # fmt: skip
        if not checks:
            print(NOTHING_CHECKED, file=sys.stderr)
    assert model.config is not None
    streams = model.config.to_dict()
    result = {**result_of(args, profile, measured, checks, data, streams), "noise": noise}
    publish(result, args.out / f"calibrate-{result['adapter']}", report(result), draw)
    return 0


def keep(args: argparse.Namespace, profile: Profile, noise: float) -> str:
    """Keep the choice for the runtime, unless it was asked not to be, or is a matter of chance."""
    if args.no_store:
        return "not kept, as --no-store says"
    if noise > BUSY and not args.noisy:
        return "not kept: such timings decide by chance; --noisy keeps the choice all the same"
    return f"kept {store_profile(profile)}; used where nothing else is asked for"


def plan_of(args: argparse.Namespace) -> CostPlan:
    """What to time.

    Raises:
        InputError: a number is out of range.
    """
    for flag, values in (("--repeats", [args.repeats]), ("--contexts", args.contexts),
                         ("--max-tokens", [args.max_tokens])):  # fmt: skip
        if min(values) < 1:
            raise InputError(f"{flag} {min(values)}", expected="1 or more", do="give more")
    plan = CostPlan(contexts=tuple(sorted(set(args.contexts))), repeats=args.repeats)
    largest = args.largest_tree
    rows = tuple(row for row in plan.rows if row <= largest)
    if len(rows) < 2:
        raise InputError(f"--largest-tree {largest}", expected="2 or more nodes", do="give more")
    return replace(plan, rows=rows)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_model_options(parser, DEFAULT_ADAPTER)
    group = parser.add_argument_group("streams, as --drafter tells ssmlx.generate")
    for name, known, what in (
        ("draft-head", DRAFT_HEADS, "weights of the head that guesses: head="),
        ("attention", ATTENTIONS, "what computes it on rows of trees: attention="),
    ):
        group.add_argument(
            f"--{name}", choices=known, default=known[0], help=f"{what} (default: %(default)s)"
        )
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--data", type=Path, metavar="FILE.jsonl",
        help="prompts such as the adapter will be asked: a JSON object with `prompt` or `messages` "
        "a line (default: those that ship for the adapter)",
    )  # fmt: skip
    add_counts(
        group,
        ("count", 24, "prompts to learn from, the last of the data"),
        ("check", 10, "prompts before those to check on; 0 checks nothing"),
        ("max-tokens", 64, "longest answer"),
        ("repeats", 5, "rounds in which every forward is timed"),
        ("largest-tree", 64, "nodes of the largest tree to think about"),
    )
    group.add_argument(
        "--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="L",
        help="committed tokens behind which forwards are timed (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--no-store", action="store_true", help="show the choice, and keep the one that is in use"
    )
    group.add_argument(
        "--noisy", action="store_true",
        help=f"keep it even if timings varied by more than {100 * BUSY:.0f} %%",
    )  # fmt: skip
    group.add_argument(
        "--out", type=Path, default=results_dir(), metavar="FOLDER",
        help="for calibrate-ADAPTER.json, .txt and .png (default: calibration in the cache folder)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
