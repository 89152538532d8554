"""A model learns to draft for itself, in a folder where a stopped run goes on.

`adapt` reads the prompts and loads the model, plans by what it measures, has the model answer,
trains streams on the answers in one round or more, and decodes held-out prompts with the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from ..bars import busy
from ..errors import naming
from ..loading.found import Run, runs
from ..loading.names import PLAN_FILE
from ..prompts import read_prompts
from .adapt_check import check_adapter, verdict_line, write_figures
from .adapt_plan import CACHE_BYTES, make_plan, plan_hours, streams_line
from .adapt_rounds import clear_killed_write, make_round
from .adapt_run import (
    AdaptOptions,
    AdaptRun,
    Plan,
    Say,
    joined_log,
    load_source,
    read_rows,
    run_settings,
)
from .answers import Speaker
from .mlx_trainer import MlxTrainer
from .progress import ENDED_FILE, Clock, kept_of_round, minutes
from .record import PICTURE_FILE, draw


def adapt(
    options: AdaptOptions,
    *,
    prog: str,
    say: Say,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Make an adapter for a model in `options.out`, or go on with a run that was stopped there.

    Args:
        options: what is asked for.
        prog: the command, for records.
        say: is given each line for the user.
        wait: is called between steps, and returns once the machine may be used.

    Raises:
        InputError: the model, the data or the folder cannot be used as asked.
    """
    prompts = [row for file in options.data for row in read_prompts(file, "--data")]
    with busy("reading the weights"):
        settings = run_settings(options, prompts)
    plan = Plan.read(options.out / PLAN_FILE, settings)
    if plan is not None:
        stored = _stored_run(options)
        if stored and stored.is_finished and options.hours == plan.rounds[-1].hours:
            took = minutes(plan.spent)
            say(f"{stored.name} is finished, after {took}; more --hours make more of it")
            say(verdict_line(options, stored.figures["figures"]))
            return
        if plan.rounds:
            say(f"goes on with {options.out.name}, where {_kept(options, plan)} are kept")
    clock = Clock(plan.spent if plan else 0.0)
    run = AdaptRun(
        options=options,
        prompts=prompts,
        settings=settings,
        prog=prog,
        say=say,
        wait=clock.without_waiting(wait),
        clock=clock,
    )
    try:
        _make_and_check(run, plan)
    except KeyboardInterrupt:
        _say_what_is_kept(run)
        raise


def _stored_run(options: AdaptOptions) -> Run | None:
    """The run in the folder `options.out`, as it lies on disk; None where there is none yet."""
    return next((run for run in runs() if run.folder == options.out), None)


def _kept(options: AdaptOptions, plan: Plan) -> str:
    """What is kept of a run, in words: of the round that it is at, or of the last."""
    folders = [options.round_folder(number) for number in range(len(plan.rounds))]
    open_rounds = [n for n, folder in enumerate(folders) if not (folder / ENDED_FILE).exists()]
    number = open_rounds[0] if open_rounds else len(folders) - 1
    one = plan.rounds[number]
    before = plan.before(number)
    new = one.answers - (before.answers if before else 0)
    steps = plan.training(one).num_steps(one.answers - options.amounts.held_out)
    kept = kept_of_round(folders[number], new, steps, MlxTrainer.STATE_FILE)
    return f"{kept} of round {number + 1}" if len(folders) > 1 else kept


def _say_what_is_kept(run: AdaptRun) -> None:
    """Say what a stopped run leaves, and write into its plan how long it took."""
    plan = Plan.read(run.options.out / PLAN_FILE, run.settings)
    if plan is None:
        run.say("stopped before anything was planned: nothing is kept")
        return
    run.save_plan(plan)
    run.say(f"stopped: {_kept(run.options, plan)} are kept; the same command goes on from there")


def _make_and_check(run: AdaptRun, plan: Plan | None) -> None:
    """Make every round that has not ended, then decode held-out prompts and write the figures.

    Args:
        run: of this process.
        plan: of the stopped run; None where nothing is planned yet.
    """
    options = run.options
    plan, dtype, bits = _make_adapter(run, plan)
    mx.clear_cache()  # of the base model, which is loaded once more with the adapter
    folders = [options.round_folder(number) for number in range(len(plan.rounds))]
    log = joined_log(folders)
    picture = options.out / PICTURE_FILE
    run.say("decoding held-out prompts with the adapter and without ...")
    with busy("drawing"):
        draw(log, picture, options.out.name)
    held_out = read_rows(options, len(plan.rounds) - 1, "valid")
    measured = check_adapter(run, held_out, log[0]["tokens_per_call"], dtype)
    plan = run.save_plan(plan)
    write_figures(run, plan, measured, bits, log)
    if picture.exists():
        run.say(f"curves: {picture}")
    run.say(verdict_line(options, measured))


def _make_adapter(run: AdaptRun, plan: Plan | None) -> tuple[Plan, str, int | None]:
    """Plan what is not planned yet, and make every round that has not ended.

    Returns:
        The plan; how the weights are held, as `load` takes `dtype`; bits of packed weights, None
        where the model is not quantised.
    """
    options = run.options
    mx.set_cache_limit(CACHE_BYTES)
    run.say(f"loading {options.model} ...")
    with busy("loading"):
        source = load_source(run)
    speaker = Speaker(source.answering, source.tokenizer, 1, options.seed, run.wait)
    if plan is None:
        plan = make_plan(run, source, speaker)
    plan = replace(plan, base={"model": options.model, "folder": str(options.path.resolve())})
    run.say(streams_line(plan, source))
    plan = plan_hours(run, plan, source)
    plan.write(options.out / PLAN_FILE)
    speaker = replace(speaker, batch_size=plan.rates.answers_at_once)
    clear_killed_write(options.adapter_folder)
    for number in range(len(plan.rounds)):
        folder = options.round_folder(number)
        if not (folder / ENDED_FILE).exists():
            plan = make_round(run, plan, number, source, speaker)
            with naming(folder):
                (folder / ENDED_FILE).touch()
            plan = run.save_plan(plan)
    bits = (source.base.get("quantization") or {}).get("bits")
    return plan, source.dtype, bits
