"""A model learns to draft for itself, in a folder where a stopped run goes on.

`adapt` reads the prompts and loads the model, plans by what it measures, has the model answer,
trains streams on the answers in one round or more, and decodes held-out prompts with the adapter.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import __version__
from ..api import stream_generate
from ..bars import bar, busy
from ..blas import this_machine
from ..errors import InputError, naming, require
from ..json_files import read_json
from ..loading.adapter import Adapter, StreamAdapter, load_adapter, load_streams
from ..loading.attach import attach_adapter, fitted_lora
from ..loading.files import (
    PartFile,
    digest_of_json,
    folder_digest,
    make_folder,
    new_folder,
    write_whole,
)
from ..loading.found import PAYS, Run, has_paid, runs
from ..loading.load import is_quantised, load, load_tokenizer
from ..loading.lora_files import Loras, kind_of
from ..loading.names import FIGURES_FILE, PLAN_FILE, TRAINED_FOLDER
from ..loading.weights import weights_digest
from ..model.backbone import Backbone
from ..model.streams import StreamFusedModel
from ..prompts import encode_with_template, last_user_text, read_prompts
from ..settings import GenerateConfig
from ..templates import frozen_date
from .answers import Speaker, Text
from .config import RunOptions, TrainConfig
from .job import STORE_FILE, prepare, read_base, run_to_end, stream_config
from .mlx_model import TrainedModel, new_adapter, with_new_parts
from .mlx_trainer import MlxObjective, MlxTrainer, load_frozen
from .objective import Validation
from .progress import (
    ANSWERS_FILE,
    ENDED_FILE,
    QUESTIONS_FILE,
    Clock,
    StepPace,
    kept_of_round,
    minutes,
)
from .questions import normalised, opening, written_prompts
from .record import LOG_FILE, PICTURE_FILE, draw, read_record
from .replay import Replay
from .sizing import (
    Rates,
    Round,
    StepCosts,
    best_tree,
    choose_layers,
    fitted_round,
    frozen_dtype,
    measure_rates,
    memory_here,
    plan_round,
    stream_training,
    time_candidates,
)

SAMPLED_EVERY = 4
SAMPLED_TEMP = 0.8
MOST_PROMPT_TOKENS = 1024
FILES = "your files"
SHIPPED = "shipped prompts"
OWN = "own questions"
CACHE_BYTES = 1 << 29
"""Freed memory that MLX may keep."""
_PLAN_FORMAT = 3
_ROUND_SEEDS = 1000
_DATA = "data"  # of a round's folder
_PLAIN = GenerateConfig(decoding="plain")
_DRAFTED = GenerateConfig()
_LOOKUP = GenerateConfig(drafter="prompt-lookup")
_CHECKED = {"plain": _PLAIN, "drafted": _DRAFTED, "lookup": _LOOKUP}
"""How each held-out prompt is answered at the end."""
_WARM_TOKENS = 8

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much of everything a run makes and measures."""

    answer_tokens: int = 160
    question_tokens: int = 110
    held_out: int = 32  # answers that streams never learn
    checked: int = 8  # of these, decoded at the end
    checked_tokens: int = 64
    timing_seconds: float = 3.0  # for each candidate of streams


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """What a run is asked for."""

    model: str  # as it was named
    path: Path  # its folder
    out: Path  # the run's folder
    adapter: Path | None = None  # the folder of the LoRA that the model is to have
    data: tuple[Path, ...] = ()  # files of prompts
    hours: float = 1.0  # in all, those of earlier rounds among them
    memory_gb: float | None = None
    seed: int = 0
    amounts: Amounts = Amounts()

    @property
    def memory(self) -> int:
        """Bytes that may be used."""
        return memory_here() if self.memory_gb is None else int(self.memory_gb * 2**30)

    def round_folder(self, number: int) -> Path:
        return self.out / f"round-{number + 1}"

    @property
    def adapter_folder(self) -> Path:
        return self.out / TRAINED_FOLDER

    @property
    def lora_digests(self) -> list[str]:
        """What tells the LoRA from another; none without one."""
        return [] if self.adapter is None else [folder_digest(self.adapter)]


@dataclass(frozen=True)
class Asked:
    source: str
    text: str  # what the user says last
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The base model, and what it will be asked."""

    base: dict[str, Any]  # its settings
    backbone: Backbone
    lora: Loras  # that the model is to have on every row; may be empty
    answering: nn.Module  # mlx-lm's model with this LoRA
    tokenizer: TokenizerWrapper
    dtype: str  # as `load` takes it
    run: RunOptions
    files: list[Asked]
    shipped: list[Asked]

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(one.tokens) for one in (*self.files, *self.shipped)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run makes; kept in its folder."""

    settings: dict[str, Any]  # must be the same when it goes on
    base: dict[str, str]  # what the model is called, and its folder, as they were given last
    train: TrainConfig
    step_costs: StepCosts
    rates: Rates
    rounds: tuple[Round, ...] = ()
    spent: float = 0.0  # seconds that the run has taken

    @classmethod
    def read(cls, path: Path, settings: dict[str, Any]) -> Plan | None:
        """The plan in a file, which must be of these settings; None where there is no file."""
        if not path.exists():
            return None
        values = read_json(path, "the plan of a run")
        found = values.get("settings")
        old = found if isinstance(found, dict) else {}
        names = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
        name = path.parent.name
        require(
            not names,
            f"{path.parent} holds a run of other settings ({', '.join(names)})",
            expected="those that it was begun with",
            do=f"repeat its command, give another --name, or remove it: "
            f"python -m ssmlx.adapters remove {name}",
        )
        return cls(
            settings=settings,
            base=values["base"],
            train=TrainConfig.from_dict(values["train"]),
            step_costs={int(n): cost for n, cost in values["step_costs"].items()},
            rates=Rates(**values["rates"]),
            rounds=tuple(Round(**one) for one in values["rounds"]),
            spent=values["spent"],
        )

    def write(self, path: Path) -> None:
        values = {**asdict(self), "train": self.train.to_dict()}
        write_whole(path, json.dumps(values, indent=1).encode())

    def training(self, one: Round) -> TrainConfig:
        return replace(self.train, epochs=float(one.epochs))

    def before(self, number: int) -> Round | None:
        """The round before that of a number, counted from 0."""
        return self.rounds[number - 1] if number else None

    def with_round(self, number: int, one: Round) -> Plan:
        return replace(self, rounds=(*self.rounds[:number], one, *self.rounds[number + 1 :]))


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
        run = _run(options)
        if run is not None and run.is_finished and options.hours == plan.rounds[-1].hours:
            say(
                f"{run.name} is finished, after {minutes(plan.spent)}; more --hours make more of it"
            )
            say(verdict_line(options, run.figures["figures"]))
            return
        if plan.rounds:
            say(f"goes on with {options.out.name}, where {_kept(options, plan)} are kept")
    clock = Clock(plan.spent if plan else 0.0)
    try:
        _go_on(options, prompts, settings, plan, prog, say, wait, clock)
    except KeyboardInterrupt:
        _say_kept(options, settings, say, clock)
        raise


def run_settings(options: AdaptOptions, prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What has to be the same when a run goes on; where its model lies, and its name, need not be.

    Args:
        options: what is asked for.
        prompts: of the user's files.
    """
    settings = {
        "seed": options.seed,
        "memory": options.memory_gb,
        "data": digest_of_json(prompts),
        "made by": __version__,
        "format": _PLAN_FORMAT,
        "weights": weights_digest(options.path),
    }
    return settings if options.adapter is None else {**settings, "adapter": options.lora_digests}


def folder_of_same(options: AdaptOptions) -> Path:
    """The folder of a run with these settings, where there is one; else that of the options.

    So a model that was moved or copied goes on with what was begun for it, whatever it is called.
    """
    if (options.out / PLAN_FILE).exists() or not runs():
        return options.out
    settings = run_settings(
        options, [row for file in options.data for row in read_prompts(file, "--data")]
    )
    return next((run.folder for run in runs() if run.settings == settings), options.out)


def _run(options: AdaptOptions) -> Run | None:
    """The run, as it lies on disk."""
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


def _say_kept(options: AdaptOptions, settings: dict[str, Any], say: Say, clock: Clock) -> None:
    """Say what a stopped run leaves, and note how long it took."""
    path = options.out / PLAN_FILE
    plan = Plan.read(path, settings)
    if plan is None:
        say("stopped before anything was planned: nothing is kept")
        return
    replace(plan, spent=clock.spent).write(path)
    say(f"stopped: {_kept(options, plan)} are kept; the same command goes on from there")


def _go_on(
    options: AdaptOptions,
    prompts: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    plan: Plan | None,
    prog: str,
    say: Say,
    wait: Callable[[], None],
    clock: Clock,
) -> None:
    """Plan what is not planned, make it, and say what it brings."""
    plan, dtype, bits = _make_adapter(options, prompts, settings, plan, prog, say, wait, clock)
    mx.clear_cache()  # of the base model, which is loaded once more with the adapter
    folders = [options.round_folder(number) for number in range(len(plan.rounds))]
    log = joined_log(folders)
    picture = options.out / PICTURE_FILE
    say("decoding held-out prompts with the adapter and without ...")
    with busy("drawing"):
        draw(log, picture, options.out.name)
    held_out = read_rows(options, len(plan.rounds) - 1, "valid")
    measured = check_adapter(options, held_out, log[0]["tokens_per_call"], dtype, say)
    plan = replace(plan, spent=clock.spent)
    plan.write(options.out / PLAN_FILE)
    write_figures(plan, options, measured, bits, log, prog)
    if picture.exists():
        say(f"curves: {picture}")
    say(verdict_line(options, measured))


def verdict_line(options: AdaptOptions, measured: Mapping[str, Any]) -> str:
    """What follows from the speed-up that was measured: every command goes by it."""
    if has_paid(measured):
        named = "" if options.adapter is None else f" --adapter {options.out.name}"
        return f"use it: python -m ssmlx.chat --model {options.model}{named}"
    hours = options.hours
    return (
        f"it brings nothing on this machine: nothing drafts with it here unless it is named; "
        f"{hours:g} more hours may change that (--hours {2 * hours:g}), or leave it at that"
    )


def _make_adapter(
    options: AdaptOptions,
    prompts: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    plan: Plan | None,
    prog: str,
    say: Say,
    wait: Callable[[], None],
    clock: Clock,
) -> tuple[Plan, str, int | None]:
    """Every round that has not ended; returns the plan, and the weights' dtype and bits."""
    mx.set_cache_limit(CACHE_BYTES)
    say(f"loading {options.model} ...")
    with busy("loading"):
        source = load_source(options, prompts, say)
    wait = clock.without_waiting(wait)
    speaker = Speaker(source.answering, source.tokenizer, 1, options.seed, wait)
    plan_path = options.out / PLAN_FILE
    if plan is None:
        plan = make_plan(options, settings, source, speaker, say)
    plan = replace(plan, base={"model": options.model, "folder": str(options.path.resolve())})
    say(_streams_line(plan, source))
    plan = plan_hours(plan, options, source, say, clock)
    plan.write(plan_path)
    speaker = replace(speaker, batch_size=plan.rates.answers_at_once)
    clear_killed_write(options.adapter_folder)
    for number in range(len(plan.rounds)):
        folder = options.round_folder(number)
        if not (folder / ENDED_FILE).exists():
            plan = make_round(plan, number, options, source, speaker, prog, say, wait, clock)
            with naming(folder):
                (folder / ENDED_FILE).touch()
            plan = replace(plan, spent=clock.spent)
            plan.write(plan_path)
    bits = (source.base.get("quantization") or {}).get("bits")
    return plan, source.dtype, bits


def make_round(
    plan: Plan,
    number: int,
    options: AdaptOptions,
    source: Source,
    speaker: Speaker,
    prog: str,
    say: Say,
    wait: Callable[[], None],
    clock: Clock,
) -> Plan:
    """Make a round's answers and train on them; the plan, with fewer passes where time is short."""
    folder = options.round_folder(number)
    make_folder(folder / _DATA)
    if not (folder / _DATA / "valid.jsonl").exists():  # which is written last
        began = clock.spent
        make_examples(plan, number, options, source, speaker, say)
        planned = plan.rounds[number]
        fitted = fitted_round(planned, plan.before(number), clock.spent)
        plan = replace(plan.with_round(number, fitted), spent=clock.spent)
        plan.write(options.out / PLAN_FILE)
        less = (
            ""
            if fitted == planned
            else (
                f"; {fitted.epochs:g} passes over them in the place of {planned.epochs:g}, "
                "so that the hours do"
            )
        )
        left = minutes(fitted.train_seconds + fitted.other_seconds)
        say(f"the answers took {minutes(clock.spent - began)}{less}; some {left} to go")
    train_round(plan, number, options, source, prog, say, wait, clock)
    return plan


def load_source(options: AdaptOptions, prompts: Sequence[dict[str, Any]], say: Say) -> Source:
    """Load the model frozen, and the LoRA that it is to have; tokenise `prompts`, of the user's
    files, and those that ship."""
    base = read_base(options.path)
    tokenizer = load_tokenizer(options.path, base)
    dtype = frozen_dtype(options.path, base, options.memory)
    backbone = load_frozen(options.path, dtype)
    backbone.capabilities.require("stages", "streams")
    backbone.name = options.model
    lora: Loras = {} if options.adapter is None else read_lora(options.adapter, backbone)
    tuned = attach_adapter(backbone, Adapter(lora=lora), merge_lora=False) if lora else None
    run = RunOptions(
        data=options.out / _DATA,
        out=options.out,
        model=options.model,
        template=None if tokenizer.has_chat_template else "{prompt}",
        valid_count=options.amounts.held_out,
        tree_size=6,
    )
    source = Source(
        base=base,
        backbone=backbone,
        lora=lora,
        answering=tuned.backbone.model if tuned else backbone.model,
        tokenizer=tokenizer,
        dtype=dtype,
        run=run,
        files=[],
        shipped=[],
    )
    shipped = [{"prompt": text} for text in written_prompts(options.seed)["train"]]
    amounts = options.amounts
    return replace(
        source,
        files=tokenised(FILES, prompts, source, amounts, say),
        shipped=tokenised(SHIPPED, shipped, source, amounts, say),
    )


def read_lora(folder: Path, backbone: Backbone) -> Loras:
    """The LoRA of an adapter that has nothing else."""
    adapter = load_adapter(folder)
    require(
        not isinstance(adapter, StreamAdapter),
        f"{folder} has streams already",
        expected="LoRA or DoRA alone, as mlx-lm and PEFT write it",
        do="check --adapter; to train these streams further, see ssmlx.train --train-only",
    )
    return fitted_lora(adapter, backbone)


@frozen_date()
def tokenised(
    origin: str, prompts: Sequence[dict[str, Any]], source: Source, amounts: Amounts, say: Say
) -> list[Asked]:
    """Prompts as tokens; those that are too long are left out."""
    context = source.backbone.context_length or 2**30
    most = min(MOST_PROMPT_TOKENS, context - amounts.answer_tokens)
    found = []
    for number, one in enumerate(prompts, 1):
        try:
            tokens = encode_with_template(one, source.tokenizer, source.run.template)
        except InputError as error:
            raise error.at(f"prompt {number} of {origin}") from error
        if len(tokens) <= most:
            found.append(Asked(origin, last_user_text(one), tokens))
    if len(found) < len(prompts):
        say(f"{len(prompts) - len(found)} prompts of over {most} tokens are left out")
    return found


def make_plan(
    options: AdaptOptions, settings: dict[str, Any], source: Source, speaker: Speaker, say: Say
) -> Plan:
    """Choose streams and batches by what is timed here; no round is planned yet."""
    say("timing calls with streams in the top layers, some seconds for each number of layers ...")
    base = source.base
    text = [token for one in source.shipped for token in one.tokens]
    text = text[: (source.backbone.context_length or len(text)) // 2]
    with busy("timing calls"):
        costs = time_candidates(
            source.backbone,
            base,
            source.run,
            text,
            seconds=options.amounts.timing_seconds,
            lora=source.lora,
        )
    num_layers = choose_layers(costs, base["num_hidden_layers"])
    longest = max(source.prompt_lengths)
    answer_tokens = options.amounts.answer_tokens
    train = stream_training(num_layers, seed=options.seed, max_length=longest + answer_tokens)
    train = train.sized(base["vocab_size"])
    config = stream_config(train, base, source.run, [source.tokenizer.eos_token_id])
    say("timing some answers, and some steps of training ...")
    with busy("timing answers and steps"):
        rates = measure_rates(
            source.backbone,
            config,
            train,
            speaker,
            longest,
            answer_tokens,
            options.memory,
            source.lora,
        )
    return Plan(
        settings=settings,
        base={},
        train=replace(train, batch_size=rates.batch_size),
        step_costs=costs[num_layers],
        rates=rates,
    )


def plan_hours(plan: Plan, options: AdaptOptions, source: Source, say: Say, clock: Clock) -> Plan:
    """The plan with a round more, where there are hours for one."""
    hours = options.hours
    before = plan.rounds[-1] if plan.rounds else None
    planned = before.hours if before else 0.0
    require(
        hours >= planned,
        f"--hours {hours:g}",
        expected=f"{planned:g} or more, which {options.out} is planned for",
        do="give these, another --name, or delete the folder",
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
                check_seconds=_check_seconds(plan.rates, options.amounts, usual),
                spent=clock.spent,
            )

        new = round_in(hours)
        least = max(before.answers if before else 0, options.amounts.held_out)
        least += plan.rates.batch_size
        enough = hours
        while round_in(enough).answers <= least:
            enough *= 1.2
        require(
            new.answers > least,
            f"--hours {hours:g} is enough for {new.answers} answers",
            expected=f"more than {least}",
            do=f"give --hours {ceil(100 * enough) / 100:g}, or more",
        )
        plan = replace(plan, rounds=(*plan.rounds, new))
    say(_round_line(plan, options.amounts, clock.spent))
    return plan


def _check_seconds(rates: Rates, amounts: Amounts, prompt_tokens: int) -> float:
    """What the figures at the end take."""
    answer = rates.prompt_seconds_per_token * prompt_tokens
    answer += rates.call_seconds * amounts.checked_tokens
    return len(_CHECKED) * amounts.checked * answer


def _streams_line(plan: Plan, source: Source) -> str:
    base = source.base
    train = plan.train
    dtype = str(source.backbone.dtype).removeprefix("mlx.core.")
    held = "quantised" if is_quantised(source.backbone.model) else f"in {dtype}"
    vocab = train.draft_vocab_size or base["vocab_size"]
    sizes = ", ".join(map(str, plan.step_costs))
    costs = ", ".join(f"{cost:.2f}" for cost in plan.step_costs.values())
    lora = f", with {kind_of(source.lora)}" if source.lora else ""
    return (
        f"{source.run.model}: {base['num_hidden_layers']} layers of width {base['hidden_size']}, "
        f"{held}{lora}\n"
        f"streams: {train.num_streams} in the top {train.num_msa_layers} layers, which "
        f"draft from {vocab:,} tokens; here calls with trees of {sizes} nodes take as long as "
        f"{costs} plain calls"
    )


def _round_line(plan: Plan, amounts: Amounts, spent: float) -> str:
    """What the last round makes; `spent` are the run's seconds so far."""
    last = plan.rounds[-1]
    rates = plan.rates
    before = plan.rounds[-2].answers if plan.rounds[1:] else 0
    more = "more " if before else ""
    of_all = f" of all {last.answers:,}" if before else ""
    steps = plan.training(last).num_steps(last.answers - amounts.held_out)
    planned_at = 0.0 if before else last.spent_before
    spent -= last.spent_before - planned_at
    return (
        f"plan: {last.answers - before:,} {more}answers at "
        f"{rates.answer_tokens_per_second:.0f} tokens/s ({minutes(last.answer_seconds)}), "
        f"{steps:,} steps of {rates.batch_size}{of_all} ({minutes(last.train_seconds)}), "
        f"checks ({minutes(last.other_seconds)}): some {minutes(planned_at + last.seconds)} in "
        f"all, {minutes(spent)} of them spent; at most "
        f"{(rates.memory + CACHE_BYTES) / 2**30:.1f} GiB of memory"
    )


def clear_killed_write(best: Path) -> None:
    """Clear what a kill left of an adapter that was being written."""
    for left in sorted(best.parent.glob(f".{best.name}.*"), reverse=True):
        if left.suffix == ".old" and not best.exists():
            left.rename(best)
        else:
            shutil.rmtree(left)


def read_rows(options: AdaptOptions, number: int, name: str) -> list[dict[str, Any]]:
    """The examples of a round; none of one before the first."""
    file = options.round_folder(number) / _DATA / f"{name}.jsonl"
    return [json.loads(line) for line in file.open()] if number >= 0 else []


def make_examples(
    plan: Plan, number: int, options: AdaptOptions, source: Source, speaker: Speaker, say: Say
) -> None:
    """Have the model answer as much more as a round plans, and write the round's examples."""
    amounts = options.amounts
    seed = options.seed + number * _ROUND_SEEDS
    speaker = replace(speaker, seed=seed)
    old = read_rows(options, number - 1, "train")
    valid = read_rows(options, number - 1, "valid")
    known = {tuple(row["prompt_tokens"]) for row in (*old, *valid)}

    def new(asked: Sequence[Asked]) -> list[Asked]:
        return [one for one in asked if tuple(one.tokens) not in known]

    def part_file(name: str) -> closing[PartFile]:
        settings = {**plan.settings, "answers": plan.rounds[number].answers}
        return closing(PartFile(options.round_folder(number) / name, settings))

    wanted = plan.rounds[number].answers - (plan.rounds[number - 1].answers if number else 0)
    files = new(source.files)[:wanted]
    shipped = new(source.shipped)
    left = wanted - len(files)
    num_own = max(left // 3, left - len(shipped)) if source.tokenizer.has_chat_template else 0
    if num_own:
        say(f"making up {num_own:,} questions ...")
    with part_file(QUESTIONS_FILE) as part:
        questions = speaker.questions(num_own, amounts.question_tokens, part)
    prompts = [{"prompt": text} for text in questions]
    say(f"answering {wanted:,} prompts ...")
    own = new(tokenised(OWN, prompts, source, amounts, say))
    asked = [*files, *own, *shipped][:wanted]
    random.Random(seed).shuffle(asked)
    texts = [
        Text(n, one.tokens, SAMPLED_TEMP if n % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0)
        for n, one in enumerate(asked)
    ]
    with part_file(ANSWERS_FILE) as part:
        answers = speaker.answer(texts, amounts.answer_tokens, part)
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
    held = {_likeness(row) for row in valid}
    train = [*old, *(row for row in rows if _likeness(row) not in held)]
    for name, every in (("train", train), ("valid", valid)):
        lines = "".join(json.dumps(row) + "\n" for row in every)
        write_whole(options.round_folder(number) / _DATA / f"{name}.jsonl", lines.encode())


def _likeness(row: Mapping[str, Any]) -> str:
    """What no example shares with one held out: its first words; of your files, the whole text."""
    return (normalised if row["source"] == FILES else opening)(row["asked"])


def train_round(
    plan: Plan,
    number: int,
    options: AdaptOptions,
    source: Source,
    prog: str,
    say: Say,
    wait: Callable[[], None],
    clock: Clock,
) -> None:
    """Train the streams, from those of the rounds before on, and keep the best."""
    folder = options.round_folder(number)
    best = options.adapter_folder
    train = plan.training(plan.rounds[number])
    num_steps = train.num_steps(plan.rounds[number].answers - options.amounts.held_out)
    start_folder = folder / "start"  # the adapter of which this round makes a better one
    start = None
    if number and best.exists():
        if not start_folder.exists():
            with new_folder(start_folder) as work:
                shutil.copytree(best, work, dirs_exist_ok=True)
        train = replace(train, train_only="streams")
        start = with_new_parts(load_streams(start_folder), train)
    run = replace(
        source.run,
        out=folder,
        data=folder / _DATA,
        valid_every=max(1, num_steps // plan.rounds[number].validations),
        save_every=max(1, num_steps // 40),
    )
    say(f"training {num_steps:,} steps ...")
    with busy("reading"):
        job, _ = prepare(run, train, start)
    twin = source.backbone.twin()
    adapter = start or new_adapter(twin, job.config, train, job.draft_vocab, source.lora)
    model = TrainedModel(twin, adapter, train.train_only)
    objective = MlxObjective(model, train, job.draft_vocab)
    dtype = str(twin.dtype)
    lora = options.lora_digests
    lower_identity = job.lower_identity(dtype, *lora)
    trainer = MlxTrainer(objective, job.num_steps)
    pace = StepPace(clock, job.num_steps)

    def before_step() -> None:
        wait()
        pace.begins(trainer.step)

    def validated(validate: Validation) -> None:
        left = pace.seconds_left(trainer.step)
        to_go = f"; some {minutes(left)} of training to go" if left else ""
        say(forecast_line(plan.step_costs, validate) + to_go)

    with wired_limit(twin.model):
        run_to_end(
            job,
            trainer,
            prog=prog,
            dtype=dtype.removeprefix("mlx.core."),
            identity=job.identity(dtype, *lora, init=start_folder if start else None),
            write=lambda validate: model.write(best, validate),
            keep_best=True,
            wait=before_step,
            validated=validated,
            lower=lambda: job.stored_lower(objective, STORE_FILE, lower_identity),
        )
    (folder / STORE_FILE).unlink(missing_ok=True)


def forecast_line(costs: StepCosts, validate: Validation) -> str:
    """What the streams would bring as they are: held-out answers replayed, at the costs timed here.

    Args:
        costs: plain calls that a call with n nodes takes, by n.
        validate: replays the held-out answers.
    """
    tokens = validate.curve(tuple(costs))
    nodes, speedup = best_tree(costs, tokens)
    forecast = (
        f"so far: {tokens[nodes]:.2f} tokens per call with {nodes} nodes on held-out answers, "
        f"{speedup:.2f} times plain decoding's speed at the costs timed here"
    )
    if speedup >= PAYS:
        return forecast
    return f"{forecast} (it is used from {PAYS} on)"


def joined_log(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The log entries of all rounds, their steps counted on."""
    entries: list[dict[str, Any]] = []
    for folder in folders:
        behind = entries[-1]["step"] if entries else 0
        for one in read_record(folder / LOG_FILE):
            entries.append({**one, "step": one["step"] + behind})
    return entries


def check_adapter(
    options: AdaptOptions,
    rows: Sequence[dict[str, Any]],
    untrained_rate: float,
    dtype: str,
    say: Say,
) -> dict[str, Any]:
    """Decode held-out prompts in turns, as will be done from now on; say what was gained.

    Args:
        options: of the run.
        rows: the held-out answers.
        untrained_rate: tokens per call of untrained streams along these, prompts' calls counted.
        dtype: as `load` takes it.
        say: is given each line for the user.

    Returns:
        The speed of its answers over plain decoding's, that of prompt lookup alone, and the
        machine; its tokens per call behind the prompt's, and those of untrained streams and of
        prompt lookup.
    """
    folder = options.adapter_folder
    found = "no training step made better guesses than untrained streams"
    require(folder.exists(), found, expected="more tokens per call", do="give more --hours")
    with busy("loading"):
        model, tokenizer = load(str(options.path), adapter=folder, dtype=dtype)
    amounts = options.amounts
    seconds = dict.fromkeys(_CHECKED, 0.0)
    num_tokens = 0
    num_same = 0
    lookup_calls = 0
    checked = rows[: amounts.checked]
    for how in _CHECKED.values():  # what a first answer takes besides favours none
        timed_answer(model, tokenizer, checked[0]["prompt_tokens"], how, _WARM_TOKENS)
    for number, row in enumerate(bar(checked, "checking")):
        turns = [*_CHECKED.items()][:: 1 if number % 2 else -1]
        found_now = {
            name: timed_answer(model, tokenizer, row["prompt_tokens"], how, amounts.checked_tokens)
            for name, how in turns
        }
        for name, one in found_now.items():
            seconds[name] += one.seconds
        plain = found_now["plain"].tokens
        num_tokens += len(plain)
        num_same += plain == found_now["drafted"].tokens
        lookup_calls += found_now["lookup"].target_calls
    curve = load_streams(folder).config.tokens_per_call or {}
    by_lookup = Replay(num_tokens, lookup_calls).after(len(checked)).tokens_per_call
    held = sum(len(row["completion_tokens"]) for row in rows)
    untrained = Replay(held, round(held / untrained_rate)).after(len(rows)).tokens_per_call
    speed_up = seconds["plain"] / seconds["drafted"]
    text_speed_up = seconds["plain"] / seconds["lookup"]
    say(
        f"{options.out.name}: {curve.get(6, 0.0):.2f} tokens per call with 6 nodes on held-out "
        f"answers (untrained {untrained:.2f}, prompt lookup {by_lookup:.2f}); "
        f"{speed_up:.2f} times plain decoding's speed ({text_speed_up:.2f} by prompt lookup alone) "
        f"on {len(checked)} prompts, {num_same} of {len(checked)} answers the same, token for token"
    )
    return {
        "speed_up": round(speed_up, 3),
        "text_speed_up": round(text_speed_up, 3),
        "machine": ", ".join(this_machine()),
        "tokens_per_call": curve,
        "untrained_tokens_per_call": round(untrained, 3),
        "lookup_tokens_per_call": round(by_lookup, 3),
    }


@dataclass(frozen=True)
class TimedAnswer:
    tokens: list[int]
    target_calls: int  # the prompt's counted as one
    seconds: float  # the whole answer's


def timed_answer(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    config: GenerateConfig,
    max_tokens: int,
) -> TimedAnswer:
    config = replace(config, max_tokens=max_tokens)
    started = time.perf_counter()
    segments = list(stream_generate(model, tokenizer, prompt, config))
    seconds = time.perf_counter() - started
    tokens = [token for one in segments for token in one.tokens]
    return TimedAnswer(tokens, segments[-1].target_calls, seconds)


def write_figures(
    plan: Plan,
    options: AdaptOptions,
    measured: Mapping[str, Any],
    bits: int | None,
    log: Sequence[Mapping[str, Any]],
    prog: str,
) -> None:
    """Write what `ssmlx.upload` makes a card of."""
    rows = read_rows(options, len(plan.rounds) - 1, "train")
    is_snapshot = options.path.parent.name == "snapshots"
    figures = {
        "rounds": len(plan.rounds),
        "base": {
            "model": options.model,
            "revision": options.path.name if is_snapshot else None,
            "bits": bits,
            "weights": plan.settings["weights"],
        },
        "recipe": {
            "command": " ".join([f"python -m {prog}", *sys.argv[1:]]),
            "version": __version__,
            "steps": log[-1]["step"],
            "seconds": round(plan.spent),
            "train": plan.train.to_dict(),
        },
        "data": {
            # A LoRA, which is part of the adapter, may have learned what is nobody else's.
            "private": bool(options.data) or options.adapter is not None,
            "answers": len(rows),
            "tokens": sum(len(row["completion_tokens"]) for row in rows),
            "sources": Counter(row["source"] for row in rows),
            "sha256": digest_of_json(rows),
        },
        "figures": {
            "prompts": options.amounts.held_out,
            "max_tokens": options.amounts.answer_tokens,
            "plain_tokens_per_call": 1.0,
            **measured,
        },
    }
    write_whole(options.adapter_folder / FIGURES_FILE, json.dumps(figures, indent=1).encode())
