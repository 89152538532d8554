"""Plans a run of `ssmlx.adapt`: streams and batches by measured times, rounds by the hours."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import fmean

from ..bars import busy
from ..errors import require
from ..loading.load import is_quantised
from ..loading.lora_files import describe_lora
from .adapt_check import estimate_check_seconds
from .adapt_run import AdaptPlan, AdaptRun, Amounts, Source
from .batch_responder import BatchResponder
from .job import make_stream_config
from .progress import format_duration
from .sizing import (
    Round,
    choose_layers,
    measure_rates,
    plan_round,
    stream_train_config,
    time_candidate_streams,
)

CACHE_BYTES = 1 << 29  # freed memory that MLX may keep


def make_timed_plan(run: AdaptRun, source: Source, responder: BatchResponder) -> AdaptPlan:
    """Time candidates, plan the run with an empty `base`; step costs also go into cost tables."""
    options = run.options
    run.say(
        "timing calls with streams in the top layers, some seconds for each number of layers ..."
    )
    base = source.base
    text = [token for one in source.shipped for token in one.tokens]
    text = text[: (source.backbone.context_length or len(text)) // 2]
    with busy("timing calls"):
        costs = time_candidate_streams(
            source.backbone,
            base,
            source.training,
            text,
            seconds=options.amounts.timing_seconds,
            lora=source.lora,
        )
    num_layers = choose_layers(costs, base["num_hidden_layers"])
    longest = max(source.prompt_lengths)
    answer_tokens = options.amounts.answer_tokens
    train = stream_train_config(num_layers, seed=options.seed, max_length=longest + answer_tokens)
    train = train.with_default_draft_vocab_size(base["vocab_size"])
    config = make_stream_config(train, base, source.training, [source.tokenizer.eos_token_id])
    run.say("timing some answers, and some steps of training ...")
    with busy("timing answers and steps"):
        rates = measure_rates(
            source.backbone,
            config,
            train,
            responder,
            longest,
            answer_tokens,
            options.memory,
            source.lora,
        )
    return AdaptPlan(
        settings=run.settings,
        base={},
        train=replace(train, batch_size=rates.batch_size),
        step_costs=costs[num_layers],
        rates=rates,
    )


def extend_plan(run: AdaptRun, plan: AdaptPlan, source: Source) -> AdaptPlan:
    options = run.options
    hours = options.hours
    before = plan.rounds[-1] if plan.rounds else None
    planned = before.hours if before else 0.0
    require(
        hours >= planned,
        f"--hours {hours:g}",
        expected=f"at least {planned:g}, as {options.out} is planned for",
        do="give at least these, another --name, or delete the folder",
    )
    if hours > planned:
        usual = int(fmean(source.prompt_lengths))
        answer_tokens = options.amounts.answer_tokens

        def round_in(in_hours: float) -> Round:
            return plan_round(
                in_hours,
                plan.rates,
                usual,
                answer_tokens,
                before,
                held_out=options.amounts.held_out,
                check_seconds=estimate_check_seconds(plan.rates, options.amounts, usual),
                spent_seconds=run.clock.spent,
            )

        new = round_in(hours)
        least = max(before.answers if before else 0, options.amounts.held_out)
        least += plan.rates.batch_size
        # For the message: hours that would be enough.
        enough = hours
        while round_in(enough).answers <= least:
            enough *= 1.2
        require(
            new.answers > least,
            f"--hours {hours:g} is enough for only {new.answers} answers",
            expected=f"more than {least}",
            do=f"give --hours {ceil(100 * enough) / 100:g}, or more",
        )
        plan = replace(plan, rounds=(*plan.rounds, new))
    run.say(_last_round_line(plan, options.amounts, run.clock.spent))
    return plan


def describe_streams(plan: AdaptPlan, source: Source) -> str:
    base = source.base
    train = plan.train
    dtype = str(source.backbone.dtype).removeprefix("mlx.core.")
    held = "quantized" if is_quantised(source.backbone.model) else f"in {dtype}"
    vocab = train.draft_vocab_size or base["vocab_size"]
    sizes = ", ".join(map(str, plan.step_costs))
    costs = ", ".join(f"{cost:.2f}" for cost in plan.step_costs.values())
    lora = f", with {describe_lora(source.lora)}" if source.lora else ""
    return (
        f"{source.training.model}: {base['num_hidden_layers']} layers of width "
        f"{base['hidden_size']}, {held}{lora}\n"
        f"streams: {train.num_streams} in the top {train.num_msa_layers} layers, which "
        f"draft from {vocab:,} tokens; here calls with trees of {sizes} nodes take as long as "
        f"{costs} plain calls"
    )


def _last_round_line(plan: AdaptPlan, amounts: Amounts, spent_seconds: float) -> str:
    number = len(plan.rounds) - 1
    last = plan.rounds[number]
    rates = plan.rates
    more = "more " if number else ""
    of_all = f" of all {last.answers:,}" if number else ""
    steps = plan.num_steps(number, amounts.held_out)
    planned_at = 0.0 if number else last.spent_before
    spent = spent_seconds - (last.spent_before - planned_at)
    answering = format_duration(last.answer_seconds)
    training = format_duration(last.train_seconds)
    checking = format_duration(last.other_seconds)
    in_all = format_duration(planned_at + last.seconds)
    return (
        f"plan: {plan.new_answers(number):,} {more}answers at "
        f"{rates.answer_tokens_per_second:.0f} tokens/s ({answering}), "
        f"{steps:,} steps of {rates.batch_size}{of_all} ({training}), "
        f"checks ({checking}): some {in_all} in all, {format_duration(spent)} of them spent; "
        f"at most {(rates.memory + CACHE_BYTES) / 2**30:.1f} GiB of memory"
    )
