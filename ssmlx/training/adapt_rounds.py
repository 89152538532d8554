"""A round of `ssmlx.adapt`: the model answers prompts, and streams are trained on the answers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.generate import wired_limit

from ..bars import busy
from ..loading.adapt_runs import PAYS
from ..loading.adapter import load_stream_adapter
from ..loading.files import atomic_folder, make_folder, write_whole
from .adapt_run import (
    DATA_FOLDER,
    FILES,
    OWN,
    AdaptPlan,
    AdaptRun,
    Source,
    TokenisedPrompt,
    read_round_examples,
    tokenise_fitting_prompts,
)
from .batch_responder import BatchResponder, NumberedPrompt
from .job import read_job, run_to_end
from .mlx_model import TrainedModel, add_condition_and_root_init, new_adapter
from .mlx_trainer import MlxObjective, MlxTrainer
from .objective import Validation
from .part_file import PartFile
from .progress import ANSWERS_FILE, QUESTIONS_FILE, StepPace, format_duration
from .questions import normalise_prompt, opening_words
from .sizing import StepCosts, cut_passes_to_hours, fastest_tree

SAMPLED_EVERY = 4
SAMPLED_TEMP = 0.8
_ROUND_SEEDS = 1000


def mend_interrupted_write(adapter_folder: Path) -> None:
    """Clean up what `atomic_folder` left beside the adapter when its process was killed."""
    for left in sorted(adapter_folder.parent.glob(f".{adapter_folder.name}.*"), reverse=True):
        # The old adapter had been moved aside, and the new one had not taken its place.
        if left.suffix == ".old" and not adapter_folder.exists():
            left.rename(adapter_folder)
        else:
            shutil.rmtree(left)


def run_round(
    run: AdaptRun,
    plan: AdaptPlan,
    number: int,  # counted from 0
    source: Source,
    responder: BatchResponder,
) -> AdaptPlan:
    """Run one round; returns the plan, with fewer passes if the answers took too long."""
    folder = run.options.round_folder(number)
    make_folder(folder / DATA_FOLDER)
    if not (folder / DATA_FOLDER / "valid.jsonl").exists():  # which is written last
        began = run.clock.spent
        write_round_examples(run, plan, number, source, responder)
        planned = plan.rounds[number]
        fitted = cut_passes_to_hours(planned, plan.round_before(number), run.clock.spent)
        plan = run.save_plan(plan.replace_round(number, fitted))
        less = (
            ""
            if fitted == planned
            else (
                f"; {fitted.epochs:g} passes over them instead of {planned.epochs:g}, "
                "to keep to the hours"
            )
        )
        left = format_duration(fitted.train_seconds + fitted.other_seconds)
        took = format_duration(run.clock.spent - began)
        run.say(f"the answers took {took}{less}; some {left} to go")
    train_round(run, plan, number, source)
    return plan


def write_round_examples(
    run: AdaptRun,
    plan: AdaptPlan,
    number: int,  # of the round, counted from 0
    source: Source,
    responder: BatchResponder,
) -> None:
    """Have the model answer the round's new prompts, and write the examples of all rounds.

    Prompts are the user's first; of the rest at least a third are questions that the model makes
    up, if it has a chat template, and the others ship. The first round holds out its first greedy
    answers. What a stopped process has asked and answered is read from the folder, not made again.
    """
    options = run.options
    amounts = options.amounts
    seed = options.seed + number * _ROUND_SEEDS
    responder = replace(responder, seed=seed)
    old = read_round_examples(options, number - 1, "train")
    valid = read_round_examples(options, number - 1, "valid")
    known = {tuple(row["prompt_tokens"]) for row in (*old, *valid)}

    def new(asked: Sequence[TokenisedPrompt]) -> list[TokenisedPrompt]:
        """The prompts, in order, that no earlier round has asked."""
        return [one for one in asked if tuple(one.tokens) not in known]

    def part_file(name: str) -> closing[PartFile]:
        settings = {**plan.settings, "answers": plan.rounds[number].answers}
        return closing(PartFile(options.round_folder(number) / name, settings))

    wanted = plan.new_answers(number)
    files = new(source.files)[:wanted]
    shipped = new(source.shipped)
    left = wanted - len(files)
    num_own = max(left // 3, left - len(shipped)) if source.tokenizer.has_chat_template else 0
    if num_own:
        run.say(f"making up {num_own:,} questions ...")
    with part_file(QUESTIONS_FILE) as part:
        questions = responder.make_up_questions(num_own, amounts.question_tokens, part)
    prompts = [{"prompt": text} for text in questions]
    run.say(f"answering {wanted:,} prompts ...")
    own = new(tokenise_fitting_prompts(run, OWN, prompts, source))
    asked = [*files, *own, *shipped][:wanted]
    random.Random(seed).shuffle(asked)
    texts = [
        NumberedPrompt(
            n, one.tokens, SAMPLED_TEMP if n % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0
        )
        for n, one in enumerate(asked)
    ]
    with part_file(ANSWERS_FILE) as part:
        answers = responder.answer_missing(texts, amounts.answer_tokens, part)
    rows: list[dict[str, Any]] = [
        {
            "source": one.source,
            "asked": one.text,
            "prompt_tokens": text.prompt,
            "completion_tokens": tokens,
        }
        for one, text, tokens in zip(asked, texts, answers, strict=True)
    ]
    if not valid:
        greedy = [row for row, text in zip(rows, texts, strict=True) if not text.temp]
        valid = greedy[: amounts.held_out]
    held = {_duplicate_key(row) for row in valid}
    train = [*old, *(row for row in rows if _duplicate_key(row) not in held)]
    for name, every in (("train", train), ("valid", valid)):
        lines = "".join(json.dumps(row) + "\n" for row in every)
        write_whole(options.round_folder(number) / DATA_FOLDER / f"{name}.jsonl", lines.encode())


def _duplicate_key(row: Mapping[str, Any]) -> str:
    """A key that no training example may share with a held-out one."""
    return (normalise_prompt if row["source"] == FILES else opening_words)(row["asked"])


def train_round(
    run: AdaptRun,
    plan: AdaptPlan,
    number: int,  # of the round, counted from 0
    source: Source,
) -> None:
    """Train and write the streams with the most tokens per call; none if none beats the start.

    A later round starts from the adapter that is there, the first one from new weights.
    """
    options = run.options
    folder = options.round_folder(number)
    best = options.adapter_folder
    train = plan.round_train_config(number)
    num_steps = plan.num_steps(number, options.amounts.held_out)
    start_folder = folder / "start"  # the adapter of which this round makes a better one
    start = None
    if number and best.exists():
        if not start_folder.exists():
            with atomic_folder(start_folder) as work:
                shutil.copytree(best, work, dirs_exist_ok=True)
        train = replace(train, train_only="streams")
        start = add_condition_and_root_init(load_stream_adapter(start_folder), train)
    training = replace(
        source.training,
        out=folder,
        data=folder / DATA_FOLDER,
        valid_every=max(1, num_steps // plan.rounds[number].validations),
        save_every=max(1, num_steps // 40),
    )
    run.say(f"training {num_steps:,} steps ...")
    with busy("reading"):
        job = read_job(training, train, start)
    twin = source.backbone.clone_sharing_weights()
    adapter = start or new_adapter(twin, job.config, train, job.draft_vocab, source.lora)
    model = TrainedModel(twin, adapter, train.train_only)
    objective = MlxObjective(model, train, job.draft_vocab)
    trainer = MlxTrainer(objective, job.num_steps)
    pace = StepPace(run.clock, job.num_steps)

    def before_step() -> None:
        run.wait()
        pace.start(trainer.step)

    def after_validation(validation: Validation) -> None:
        left = pace.seconds_left(trainer.step)
        to_go = f"; some {format_duration(left)} of training to go" if left else ""
        run.say(forecast_line(plan.step_costs, validation) + to_go)

    with wired_limit(twin.model):
        run_to_end(
            job,
            trainer,
            prog=run.prog,
            dtype=str(twin.dtype),
            write_trained=lambda validation: model.measure_and_write(best, validation),
            frozen_folders=[options.adapter] if options.adapter else [],
            start_folders=[start_folder] if start else [],
            keep_best=True,
            before_step=before_step,
            after_validation=after_validation,
        )
    (folder / objective.STORE_FILE).unlink(missing_ok=True)


def forecast_line(costs: StepCosts, validation: Validation) -> str:
    """Forecast the present streams with the fastest tree, by replayed held-out answers."""
    tokens = validation.tokens_per_call_by_tree_size(tuple(costs))
    nodes, speedup = fastest_tree(costs, tokens)
    forecast = (
        f"so far: {tokens[nodes]:.2f} tokens per call with {nodes} nodes on held-out answers, "
        f"{speedup:.2f} times plain decoding's speed at the costs timed here"
    )
    if speedup >= PAYS:
        return forecast
    return f"{forecast} (used only from {PAYS} on)"
