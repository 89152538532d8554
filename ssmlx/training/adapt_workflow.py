"""`ssmlx.adapt`: a model learns to draft for itself; a stopped run continues in its folder.

`adapt` reads the prompts and loads the model, plans by what it measures, has the model answer,
trains streams on the answers in one round or more, and decodes held-out prompts with the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from ..bars import busy
from ..errors import naming_file
from ..loading.adapt_runs import StoredRun, read_adapt_runs
from ..loading.folders import PLAN_FILE
from ..prompts import read_prompts
from .adapt_check import measure_adapter, verdict_line, write_figures_json
from .adapt_plan import (
    CACHE_BYTES,
    describe_streams,
    extend_plan,
    make_timed_plan,
)
from .adapt_rounds import mend_interrupted_write, run_round
from .adapt_run import (
    AdaptOptions,
    AdaptPlan,
    AdaptRun,
    Say,
    fixed_settings,
    load_source,
    read_round_examples,
    read_round_logs,
)
from .batch_responder import BatchResponder
from .mlx_trainer import MlxTrainer
from .progress import ENDED_FILE, Clock, describe_round_progress, format_duration
from .record import PICTURE_FILE, draw_curves


def adapt(
    options: AdaptOptions,
    *,
    prog: str,  # the command's module, for records
    say: Say,  # receives each line for the user
    # called between steps; returns once the machine may be used; its time does not count
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Make an adapter in `options.out`, or continue a stopped run there.

    A finished run with the same hours is left as it is, and its verdict printed again; with more
    hours it gets another round. An interrupt (KeyboardInterrupt) writes the time spent into the
    plan and is raised again.
    """
    prompts = [row for file in options.data for row in read_prompts(file, "--data")]
    with busy("reading the weights"):
        settings = fixed_settings(options, prompts)
    plan = AdaptPlan.read(options.out / PLAN_FILE, settings)
    if plan is not None:
        stored = _stored_run(options)
        if stored and stored.is_finished and options.hours == plan.rounds[-1].hours:
            took = format_duration(plan.spent)
            say(f"{stored.name} is finished, after {took}; with more --hours it goes on")
            say(verdict_line(options, stored.figures["figures"]))
            return
        if plan.rounds:
            kept = _describe_progress(options, plan)
            say(f"continues {options.out.name}: {kept} are kept")
    clock = Clock(plan.spent if plan else 0.0)
    run = AdaptRun(
        options=options,
        prompts=prompts,
        settings=settings,
        prog=prog,
        say=say,
        wait=clock.exclude_waiting(wait),
        clock=clock,
    )
    try:
        _make_adapter(run, plan)
    except KeyboardInterrupt:
        _save_progress(run)
        raise


def _stored_run(options: AdaptOptions) -> StoredRun | None:
    """The stored plan; None if there is none, or if the folder is not in `adapters_home`."""
    return next((run for run in read_adapt_runs() if run.folder == options.out), None)


def _describe_progress(options: AdaptOptions, plan: AdaptPlan) -> str:
    """Describe a run's unfinished round, or its last one if all are finished."""
    folders = [options.round_folder(number) for number in range(len(plan.rounds))]
    open_rounds = [n for n, folder in enumerate(folders) if not (folder / ENDED_FILE).exists()]
    number = open_rounds[0] if open_rounds else len(folders) - 1
    steps = plan.num_steps(number, options.amounts.held_out)
    new = plan.new_answers(number)
    kept = describe_round_progress(folders[number], new, steps, MlxTrainer.STATE_FILE)
    return f"{kept} of round {number + 1}" if len(folders) > 1 else kept


def _save_progress(run: AdaptRun) -> None:
    plan = AdaptPlan.read(run.options.out / PLAN_FILE, run.settings)
    if plan is None:
        run.say("stopped before anything was planned: nothing was kept")
        return
    run.save_plan(plan)
    kept = _describe_progress(run.options, plan)
    run.say(f"stopped: {kept} are kept; the same command goes on from there")


def _make_adapter(run: AdaptRun, plan: AdaptPlan | None) -> None:
    options = run.options
    plan, base_dtype, base_bits = _make_rounds(run, plan)
    mx.clear_cache()  # the base model is loaded again with the adapter
    folders = [options.round_folder(number) for number in range(len(plan.rounds))]
    log = read_round_logs(folders)
    picture = options.out / PICTURE_FILE
    run.say("decoding held-out prompts with the adapter and without ...")
    with busy("drawing"):
        draw_curves(log, picture, options.out.name)
    held_out = read_round_examples(options, len(plan.rounds) - 1, "valid")
    measured = measure_adapter(run, held_out, log[0]["tokens_per_call"], base_dtype)
    plan = run.save_plan(plan)
    write_figures_json(run, plan, measured, base_bits, log)
    if picture.exists():
        run.say(f"curves: {picture}")
    run.say(verdict_line(options, measured))


class _MadeRounds(NamedTuple):
    plan: AdaptPlan
    base_dtype: str  # how the base's weights were held, as `load` takes `dtype`
    base_bits: int | None  # of the base's weights, if quantized


def _make_rounds(run: AdaptRun, plan: AdaptPlan | None) -> _MadeRounds:
    """Run the rounds; from here on MLX's cache of freed memory is limited to `CACHE_BYTES`."""
    options = run.options
    mx.set_cache_limit(CACHE_BYTES)
    run.say(f"loading {options.model} ...")
    with busy("loading"):
        source = load_source(run)
    responder = BatchResponder(source.answering, source.tokenizer, 1, options.seed, run.wait)
    if plan is None:
        plan = make_timed_plan(run, source, responder)
    plan = replace(plan, base={"model": options.model, "folder": str(options.path.resolve())})
    run.say(describe_streams(plan, source))
    plan = extend_plan(run, plan, source)
    plan.write(options.out / PLAN_FILE)
    responder = replace(responder, batch_size=plan.rates.answers_at_once)
    mend_interrupted_write(options.adapter_folder)
    for number in range(len(plan.rounds)):
        folder = options.round_folder(number)
        if not (folder / ENDED_FILE).exists():
            plan = run_round(run, plan, number, source, responder)
            with naming_file(folder):
                (folder / ENDED_FILE).touch()
            plan = run.save_plan(plan)
    base_bits = (source.base.get("quantization") or {}).get("bits")
    return _MadeRounds(plan, source.dtype, base_bits)
