"""A model's way from prompts to an adapter of its own, in a folder where a stopped run goes on."""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
from mlx_lm.generate import wired_limit

from .. import __version__
from ..bars import bar
from ..calibration import BUSY, CONTEXTS
from ..calibration.choice import choose
from ..calibration.costs import ROWS, CostPlan, measure_costs
from ..calibration.recorded import RecordedAnswer
from ..calibration.timing import ssmlx_answer
from ..errors import InputError, require
from ..loading.adapter import load_adapter
from ..loading.files import PartFile, folder_digest, make_folder, new_folder, write_whole
from ..loading.load import is_quantised, load, load_tokenizer
from ..loading.names import FIGURES_FILE, PLAN_FILE, TRAINED_FOLDER, Fetch, resolve_model
from ..model.streams import StreamFusedModel
from ..prompts import asked_tokens, read_prompts, user_text
from ..settings import GenerateConfig, read_json
from ..templates import on_one_day
from ..training.answers import Speaker, Text
from ..training.config import RunOptions, TrainConfig
from ..training.guesses import guesses_along, most_candidates
from ..training.job import prepare, read_base, run_to_end, stream_config
from ..training.mlx_model import TrainedModel, new_adapter, with_new_parts
from ..training.mlx_trainer import MlxObjective, MlxTrainer, load_frozen
from ..training.questions import normalised, opening, written_prompts
from ..training.record import LOG_FILE, PICTURE_FILE, draw, read_record
from ..training.replay import Replay
from ..training.sizing import (
    ANSWER_TOKENS,
    RESERVE,
    Plan,
    Rates,
    Sizes,
    choose_sizes,
    frozen_dtype,
    measure,
    memory_here,
    predicted,
)
from ..tuning import ladder
from ..tuning.chips import Decoder
from ..tuning.profile import digest_of, store_profile
from .machine import power_source
from .options import DownloadBar
from .train import STORE_FILE

PAYS = 1.1
"""The predicted speed-up from which on the training is worth its time."""
SAMPLED_EVERY = 4
SAMPLED_TEMP = 0.8
HELD_OUT = 32
CHECKED = 8
CHECKED_TOKENS = 64
MOST_PROMPT = 1024  # tokens
FILES = "your files"
SHIPPED = "shipped prompts"
OWN = "own questions"
# of a round's folder
_DATA = "data"
_ENDED = "ended"
_ROUND_SEEDS = 1000
CACHE_BYTES = 1 << 29
"""Freed memory that MLX may keep."""
_BUSY_SECONDS = 10
CALIBRATED = CostPlan(rows=ROWS[:9], fused_nodes=(1, 2), contexts=CONTEXTS[:2], repeats=3)
"""What is timed at the end: trees of up to 16 nodes, not far into a text."""
PLAIN = "plain"
DRAFTED = "drafted"
LOOKUP = "lookup"
WAYS = {
    PLAIN: GenerateConfig(decoding="plain"),
    DRAFTED: GenerateConfig(),
    LOOKUP: GenerateConfig(drafter="prompt-lookup"),
}


@dataclass(frozen=True)
class Asked:
    source: str
    text: str  # what the user says last
    tokens: list[int]


def waiting(give_way: bool) -> Callable[[], None]:
    """What waits until the machine is free, where that is asked for."""
    looked = time.monotonic()
    own = time.process_time()

    def wait() -> None:
        nonlocal looked, own
        while give_way and time.monotonic() - looked > _BUSY_SECONDS:
            used = (time.process_time() - own) / (time.monotonic() - looked)
            others = os.getloadavg()[0] - max(1.0, used)
            looked = time.monotonic()
            own = time.process_time()
            if others < (os.cpu_count() or 1) / 2 and "battery" not in power_source().lower():
                return
            time.sleep(_BUSY_SECONDS)

    return wait


def _gain_told(sizes: Sizes) -> str:
    told = (
        f"should bring {sizes.middle:.2f}x ({sizes.low:.2f} to {sizes.high:.2f}) plain decoding's "
        f"speed here, in trees of {sizes.nodes} nodes: a prediction, from what others published of "
        "such chips and what one small model learnt"
    )
    if sizes.middle >= PAYS:
        return told
    return (
        f"{told}\nthat is less than {PAYS}x: on this chip the hours may not be worth it. What does "
        "not pay is never drafted, so nothing gets slower"
    )


def _likeness(row: Mapping[str, Any]) -> str:
    """What no example shares with one held out: its first words; of your files, the whole text."""
    return (normalised if row["source"] == FILES else opening)(row["asked"])


class Run:
    """The stages, to be called in this order."""

    def __init__(self, args: argparse.Namespace, folder: Path, prog: str) -> None:
        self.prog = prog
        self.args = args
        self.folder = folder
        self.wait = waiting(args.give_way)
        files = [row for file in args.data for row in read_prompts(file, "--data")]
        path = resolve_model(args.model, Fetch(progress=DownloadBar()))
        self.revision = path.name if path.parent.name == "snapshots" else None
        self.settings = {
            "model": str(path.resolve()), "seed": args.seed, "memory": args.memory_gb,
            "data": digest_of(files), "made by": __version__, "weights": folder_digest(path),
        }  # fmt: skip
        self.base = read_base(path)
        self.words = load_tokenizer(path, self.base)
        mx.set_cache_limit(CACHE_BYTES)
        self.most = int((args.memory_gb or memory_here() / 2**30) * 2**30)
        self.dtype = frozen_dtype(path, self.base, self.most)
        self.backbone = load_frozen(path, self.dtype)
        self.backbone.require_stages("streams")
        self.speaker = Speaker(self.backbone.model, self.words, 1, args.seed, self.wait)
        template = None if self.words.has_chat_template else "{prompt}"
        self.options = RunOptions(
            data=folder / _DATA,
            out=folder,
            model=args.model,
            template=template,
            valid_count=HELD_OUT,
            tree_size=6,
        )
        self.files = self._asked(FILES, files)
        shipped = [{"prompt": text} for text in written_prompts(args.seed)["train"]]
        self.shipped = self._asked(SHIPPED, shipped)
        self.longest = max(len(one.tokens) for one in (*self.files, *self.shipped))

    @on_one_day()
    def _asked(self, source: str, prompts: Sequence[dict[str, Any]]) -> list[Asked]:
        """Prompts as tokens; those that are too long are left out."""
        most = min(MOST_PROMPT, (self.backbone.context_length or 2**30) - ANSWER_TOKENS)
        found = []
        for number, one in enumerate(prompts, 1):
            try:
                tokens = asked_tokens(one, self.words, self.options.template)
            except InputError as error:
                raise error.at(f"prompt {number} of {source}") from error
            if len(tokens) <= most:
                found.append(Asked(source, user_text(one), tokens))
        if len(found) < len(prompts):
            print(f"{len(prompts) - len(found)} prompts of over {most} tokens are left out")
        return found

    def prepare(self) -> None:
        """Choose sizes, measure and plan; or go on with what was planned, and say either."""
        decoder = Decoder.of(StreamFusedModel(self.backbone))
        chip = ladder.this_chip()
        path = self.folder / PLAN_FILE
        is_known = path.exists()
        if is_known:
            known = read_json(path, "the plan of a run")
            require(
                known.get("settings") == self.settings,
                f"{self.folder} holds a run of other settings: {known.get('settings')}"[:200],
                expected=f"{self.settings}"[:200],
                do="repeat its command, give another --name, or delete the folder",
            )
            train = TrainConfig.from_dict(known["train"])
        else:
            train = choose_sizes(decoder, chip).train(
                seed=self.args.seed, max_length=self.longest + ANSWER_TOKENS
            )
            train = train.sized(self.base["vocab_size"])
        print(self._sizes_told(train))
        if not is_known:
            print("measuring, some seconds ...", flush=True)
            config = stream_config(train, self.base, self.options, [self.words.eos_token_id])
            rates = measure(self.backbone, config, train, self.speaker, self.longest, self.most)
            train = replace(train, batch_size=rates.batch_size)
            known = {
                "settings": self.settings, "train": train.to_dict(), "rates": asdict(rates),
                "began": time.time(),
            }  # fmt: skip
        self.known = known
        self.train = train
        self.rates = Rates(**known["rates"])
        self.speaker = replace(self.speaker, batch_size=self.rates.together)
        self.rounds = [Plan(**one) for one in known.get("rounds", [])]
        self._plan()
        known["rounds"] = [asdict(one) for one in self.rounds]
        write_whole(path, json.dumps(known, indent=1).encode())
        learnt = sum(one.answers * one.epochs for one in self.rounds)
        print(_gain_told(predicted(decoder, chip, train.num_msa_layers, train.num_streams, learnt)))

    def _plan(self) -> None:
        """A round more where there are hours for it."""
        hours = self.args.hours
        planned = self.rounds[-1].hours if self.rounds else 0.0
        require(
            hours >= planned,
            f"--hours {hours:g}",
            expected=f"{planned:g} or more, which {self.folder} is planned for",
            do="give these, another --name, or delete the folder",
        )
        if hours == planned:
            print("goes on with what was planned")
        else:
            usual = int(fmean(len(one.tokens) for one in (*self.files, *self.shipped)))
            before = self.rounds[-1].answers if self.rounds else 0
            plan = Plan.within(hours - planned, self.rates, usual, before)
            least = max(before, HELD_OUT) + self.rates.batch_size
            require(
                plan.answers > least,
                f"--hours {hours:g} is enough for {plan.answers} answers",
                expected=f"more than {least}",
                do="give more",
            )
            self.rounds.append(replace(plan, hours=hours))
        print(self._plan_told())

    def _sizes_told(self, train: TrainConfig) -> str:
        layers = self.base["num_hidden_layers"]
        held = f"held as {self.backbone.dtype}".replace("mlx.core.", "")
        held = "packed as they are" if is_quantised(self.backbone.model) else held
        return (
            f"{self.args.model}: {layers} layers of width {self.base['hidden_size']}, {held}\n"
            f"streams: {train.num_streams} in the top {train.num_msa_layers} layers, which draft "
            f"from {train.draft_vocab_size or self.base['vocab_size']:,} tokens"
        )

    def _plan_told(self) -> str:
        plan = self.rounds[-1]
        rates = self.rates
        before = self.rounds[-2].answers if self.rounds[1:] else 0
        more, beside = ("more ", f" of all {plan.answers:,}") if before else ("", "")
        minutes = (plan.answer_seconds + plan.train_seconds) / 60
        return (
            f"plan: {plan.answers - before:,} {more}answers at {rates.answer:.0f} tokens/s "
            f"({plan.answer_seconds / 60:.0f} min), {self._steps(plan):,} steps of "
            f"{rates.batch_size}{beside} ({plan.train_seconds / 60:.0f} min), checks: some "
            f"{minutes / (1 - RESERVE):.0f} min in all; at most "
            f"{(rates.memory + CACHE_BYTES) / 2**30:.1f} GiB of memory"
        )

    def _steps(self, plan: Plan) -> int:
        train = replace(self.train, epochs=float(plan.epochs))
        return train.num_steps(plan.answers - HELD_OUT)

    def go(self) -> None:
        """Every round that has not ended: answers of all before it and more, then training."""
        self._mend()
        for number, plan in enumerate(self.rounds):
            if not (self._round(number) / _ENDED).exists():
                make_folder(self._round(number) / _DATA)
                self._answer(number, plan)
                self._learn(number, plan)
                (self._round(number) / _ENDED).touch()
        entries: list[dict[str, Any]] = []
        for number in range(len(self.rounds)):
            behind = entries[-1]["step"] if entries else 0
            log = read_record(self._round(number) / LOG_FILE)
            entries += [{**one, "step": one["step"] + behind} for one in log]
        self.log = entries
        draw(entries, self.folder / PICTURE_FILE, self.folder.name)

    def _mend(self) -> None:
        """Clear what a kill left of an adapter that was being written."""
        best = self.folder / TRAINED_FOLDER
        for left in sorted(self.folder.glob(f".{TRAINED_FOLDER}.*"), reverse=True):
            if left.suffix == ".old" and not best.exists():
                left.rename(best)
            else:
                shutil.rmtree(left)

    def _round(self, number: int) -> Path:
        return self.folder / f"round-{number + 1}"

    def _rows(self, number: int, name: str) -> list[dict[str, Any]]:
        """The examples of a round; none of one before the first."""
        file = self._round(number) / _DATA / f"{name}.jsonl"
        return [json.loads(line) for line in file.open()] if number >= 0 else []

    def _answer(self, number: int, plan: Plan) -> None:
        """Have the model answer as much more as is planned, and write the examples."""
        seed = self.args.seed + number * _ROUND_SEEDS
        speaker = replace(self.speaker, seed=seed)
        old = self._rows(number - 1, "train")
        valid = self._rows(number - 1, "valid")
        known = {tuple(row["prompt_tokens"]) for row in (*old, *valid)}

        def new(asked: Sequence[Asked]) -> list[Asked]:
            return [one for one in asked if tuple(one.tokens) not in known]

        wanted = plan.answers - (self.rounds[number - 1].answers if number else 0)
        files = new(self.files)[:wanted]
        shipped = new(self.shipped)
        left = wanted - len(files)
        own = max(left // 3, left - len(shipped)) if self.words.has_chat_template else 0
        with self._part(number, "questions.part", plan) as part:
            questions = [{"prompt": text} for text in speaker.questions(own, part)]
        mixed = [*files, *new(self._asked(OWN, questions)), *shipped][:wanted]
        random.Random(seed).shuffle(mixed)
        texts = [
            Text(n, one.tokens, SAMPLED_TEMP if n % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0)
            for n, one in enumerate(mixed)
        ]
        with self._part(number, "answers.part", plan) as part:
            answers = speaker.answer(texts, ANSWER_TOKENS, part)
        rows: list[dict[str, Any]] = [
            {
                "source": one.source,
                "asked": one.text,
                "prompt_tokens": text.prompt,
                "completion_tokens": tokens,
            }
            for one, text, tokens in zip(mixed, texts, answers, strict=True)
        ]
        if not valid:  # greedy ones
            valid = [row for row, text in zip(rows, texts, strict=True) if not text.temp]
            valid = valid[:HELD_OUT]
        held = {_likeness(row) for row in valid}
        train = [*old, *(row for row in rows if _likeness(row) not in held)]
        for name, every in (("train", train), ("valid", valid)):
            lines = "".join(json.dumps(row) + "\n" for row in every)
            write_whole(self._round(number) / _DATA / f"{name}.jsonl", lines.encode())

    def _part(self, number: int, name: str, plan: Plan) -> closing[PartFile]:
        settings = {**self.settings, "answers": plan.answers}
        return closing(PartFile(self._round(number) / name, settings))

    def _learn(self, number: int, plan: Plan) -> None:
        """Train the streams, from those of the rounds before on, and keep the best."""
        folder = self._round(number)
        best = self.folder / TRAINED_FOLDER
        before = folder / "start"  # the adapter of which this round makes a better one
        every = self._steps(plan)
        start = None
        train = replace(self.train, epochs=float(plan.epochs))
        if number and best.exists():
            if not before.exists():
                with new_folder(before) as work:
                    shutil.copytree(best, work, dirs_exist_ok=True)
            train = replace(train, train_only="streams")
            start = with_new_parts(load_adapter(before), train)
        options = replace(
            self.options,
            out=folder,
            data=folder / _DATA,
            valid_every=max(1, every // 5),
            save_every=max(1, every // 40),
        )
        job, _ = prepare(options, train, start)
        twin = self.backbone.twin()
        adapter = start or new_adapter(twin, job.config, train, job.draft_vocab)
        model = TrainedModel(twin, adapter, train.train_only)
        objective = MlxObjective(model, train, job.draft_vocab)
        with wired_limit(twin.model):
            run_to_end(
                job,
                MlxTrainer(objective, job.num_steps),
                prog=self.prog,
                dtype=str(twin.dtype).removeprefix("mlx.core."),
                identity=job.identity(str(twin.dtype), init=before if start else None),
                write=lambda validate: model.write(best, validate),
                keep_best=True,
                wait=self.wait,
                lower=lambda: job.stored_lower(
                    objective, STORE_FILE, job.lower_identity(str(twin.dtype))
                ),
            )
        (folder / STORE_FILE).unlink(missing_ok=True)

    def check(self) -> None:
        """Decode held-out prompts in turns, as will be done from now on; say what was gained."""
        folder = self.folder / TRAINED_FOLDER
        found = "no training step made better guesses than untrained streams"
        require(folder.exists(), found, expected="more tokens per call", do="give more --hours")
        del self.speaker, self.backbone
        mx.clear_cache()
        model, _ = load(self.settings["model"], adapter=folder, dtype=self.dtype)
        rows = self._rows(len(self.rounds) - 1, "valid")
        self._calibrate(model, rows)
        seconds = dict.fromkeys(WAYS, 0.0)
        calls = dict.fromkeys(WAYS, 0)
        tokens = same = 0
        for row in bar(rows[:CHECKED], "checking"):
            said = {}
            for way, config in WAYS.items():
                own = replace(config, max_tokens=CHECKED_TOKENS)
                answer = ssmlx_answer(model, self.words, row["prompt_tokens"], own)
                seconds[way] += answer.seconds
                calls[way] += answer.target_calls
                said[way] = answer.tokens
            tokens += len(said[PLAIN])
            same += said[PLAIN] == said[DRAFTED]
        curve = load_adapter(folder).config.tokens_per_call or {}
        lookup = Replay(tokens, calls[LOOKUP]).after(CHECKED).tokens_per_call
        held = sum(len(row["completion_tokens"]) for row in rows)
        untrained = Replay(held, round(held / self.log[0]["tokens_per_call"])).after(len(rows))
        figures = {
            "tokens_per_call": curve, "lookup_tokens_per_call": round(lookup, 3),
            "untrained_tokens_per_call": round(untrained.tokens_per_call, 3),
        }  # fmt: skip
        self._write_figures(folder, figures)
        speedup = seconds[PLAIN] / seconds[DRAFTED]
        print(
            f"{self.folder.name}: {curve.get(6, 0.0):.2f} tokens per call with 6 nodes on held-out "
            f"answers (untrained {untrained.tokens_per_call:.2f}, prompt lookup {lookup:.2f}); "
            f"{speedup:.2f} times plain decoding's speed on {CHECKED} prompts, {same} of {CHECKED} "
            "answers the same, token for token"
        )
        picture = self.folder / PICTURE_FILE
        if picture.exists():
            print(f"curves: {picture}")
        print(f"use it: python -m ssmlx.chat --model {self.args.model}")

    def _calibrate(self, model: StreamFusedModel, rows: Sequence[dict[str, Any]]) -> None:
        """Keep what is fastest on this machine, as `ssmlx.calibrate` does, from known answers."""
        texts = [(row["prompt_tokens"], row["completion_tokens"]) for row in rows]
        costs, noise = measure_costs(model, [prompt for prompt, _ in texts], CALIBRATED)
        if noise > BUSY:
            print("not calibrated, others kept the machine busy: what is drafted follows the clock")
            return
        most = most_candidates(model, max(CALIBRATED.rows))
        answers = [
            RecordedAnswer(prompt, guesses_along(model, prompt, answer, most))
            for prompt, answer in bar(texts, "guesses")
        ]
        choice = choose(model, answers, costs, CALIBRATED.rows[1:])
        store_profile(choice.profile(model))
        print(f"calibrated: fastest here is a {choice.chosen.shape}")

    def _write_figures(self, folder: Path, measured: Mapping[str, Any]) -> None:
        """What `ssmlx.upload` makes a card of."""
        rows = self._rows(len(self.rounds) - 1, "train")
        figures = {
            "base": {
                "model": self.args.model, "revision": self.revision,
                "bits": (self.base.get("quantization") or {}).get("bits"),
            },
            "recipe": {
                "command": " ".join([f"python -m {self.prog}", *sys.argv[1:]]),
                "version": __version__,
                "steps": self.log[-1]["step"], "seconds": round(time.time() - self.known["began"]),
                "train": self.train.to_dict(),
            },
            "data": {
                "private": bool(self.files), "answers": len(rows),
                "tokens": sum(len(row["completion_tokens"]) for row in rows),
                "sources": Counter(row["source"] for row in rows), "sha256": digest_of(rows),
            },
            "figures": {
                "prompts": HELD_OUT, "max_tokens": ANSWER_TOKENS, "plain_tokens_per_call": 1.0,
                **measured,
            },
        }  # fmt: skip
        write_whole(folder / FIGURES_FILE, json.dumps(figures, indent=1).encode())
