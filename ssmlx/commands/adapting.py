"""A model's way from prompts to an adapter of its own, in a folder where a stopped run goes on."""

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
from mlx_lm.generate import wired_limit

from .. import __version__
from ..api import stream_generate
from ..bars import bar
from ..errors import require
from ..loading.adapter import load_adapter, write_adapter
from ..loading.attach import fuse_streams
from ..loading.files import PartFile, make_folder, new_folder, write_whole
from ..loading.load import is_quantised, load_tokenizer
from ..loading.names import FIGURES_FILE, PLAN_FILE, TRAINED_FOLDER, Fetch, resolve_model
from ..model.streams import StreamFusedModel
from ..prompts import asked_tokens, read_prompts, user_text
from ..settings import read_json
from ..training.answers import Speaker, Text
from ..training.config import RunOptions
from ..training.job import prepare, read_base, run_to_end, stream_config
from ..training.mlx_model import TrainedModel, new_adapter, told
from ..training.mlx_trainer import MlxObjective, MlxTrainer, load_frozen
from ..training.objective import Validation
from ..training.questions import opening, written_prompts
from ..training.record import LOG_FILE, PICTURE_FILE, read_record
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
from .machine import power_source
from .options import DownloadBar
from .train import STORE_FILE

PAYS = 1.1
"""The predicted speed-up from which on the training is worth its time."""
SAMPLED_EVERY, SAMPLED_TEMP = 4, 0.8
HELD_OUT, CHECKED, CHECKED_TOKENS = 32, 8, 64
MOST_PROMPT = 1024  # tokens
FILES, SHIPPED, OWN = "your files", "shipped prompts", "own questions"
CACHE_BYTES = 1 << 29
"""Freed memory that MLX may keep."""
_BUSY_SECONDS = 10
PLAIN, DRAFTED, LOOKUP = "plain", "drafted", "lookup"
WAYS: dict[str, Any] = {
    PLAIN: {"decoding": "plain"},
    DRAFTED: {},
    LOOKUP: {"drafter": "prompt-lookup"},
}


@dataclass(frozen=True)
class Asked:
    source: str
    text: str  # what the user says last
    tokens: list[int]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def waiting(give_way: bool) -> Callable[[], None]:
    """What waits until the machine is free, where that is asked for."""
    looked, own = time.monotonic(), time.process_time()

    def wait() -> None:
        nonlocal looked, own
        while give_way and time.monotonic() - looked > _BUSY_SECONDS:
            used = (time.process_time() - own) / (time.monotonic() - looked)
            others = os.getloadavg()[0] - max(1.0, used)
            looked, own = time.monotonic(), time.process_time()
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


class Run:
    """The stages, to be called in this order."""

    def __init__(self, args: argparse.Namespace, folder: Path, prog: str) -> None:
        self.prog, self.args, self.folder = prog, args, folder
        self.wait = waiting(args.give_way)
        files = [row for file in args.data for row in read_prompts(file, "--data")]
        path = resolve_model(args.model, Fetch(progress=DownloadBar()))
        self.revision = path.name if path.parent.name == "snapshots" else None
        self.settings = {
            "model": str(path.resolve()), "hours": args.hours, "seed": args.seed,
            "memory": args.memory_gb, "data": _digest(files), "made by": __version__,
        }  # fmt: skip
        self.base = read_base(path)
        self.words = load_tokenizer(path, self.base)
        mx.set_cache_limit(CACHE_BYTES)
        self.most = int((args.memory_gb or memory_here() / 2**30) * 2**30)
        self.backbone = load_frozen(path, frozen_dtype(path, self.base, self.most))
        self.backbone.require_stages("streams")
        self.speaker = Speaker(self.backbone.model, self.words, 1, args.seed, self.wait)
        template = None if self.words.has_chat_template else "{prompt}"
        self.options = RunOptions(
            data=folder / "data", out=folder, model=args.model, template=template,
            valid_count=HELD_OUT, tree_size=6,
        )  # fmt: skip
        self.files = self._asked(FILES, files)
        shipped = [{"prompt": text} for text in written_prompts(args.seed)["train"]]
        self.shipped = self._asked(SHIPPED, shipped)
        self.longest = max(len(one.tokens) for one in (*self.files, *self.shipped))

    def _asked(self, source: str, prompts: Sequence[dict[str, Any]]) -> list[Asked]:
        """Prompts as tokens; those that are too long are left out."""
        most = min(MOST_PROMPT, (self.backbone.context_length or 2**30) - ANSWER_TOKENS)
        encoded = ((one, asked_tokens(one, self.words, self.options.template)) for one in prompts)
        found = [Asked(source, user_text(one), t) for one, t in encoded if len(t) <= most]
        if len(found) < len(prompts):
            print(f"{len(prompts) - len(found)} prompts of over {most} tokens are left out")
        return found

    def prepare(self) -> None:
        """Choose sizes, measure and plan; or go on with what was planned, and say either."""
        decoder, chip = Decoder.of(StreamFusedModel(self.backbone)), ladder.this_chip()
        sizes = choose_sizes(decoder, chip)
        train = sizes.train(seed=self.args.seed, max_length=self.longest + ANSWER_TOKENS)
        train = train.sized(self.base["vocab_size"])
        print(self._sizes_told(sizes, train.draft_vocab_size or 0))
        path = self.folder / PLAN_FILE
        if path.exists():
            known = read_json(path, "the plan of a run")
            require(
                known.get("settings") == self.settings,
                f"{self.folder} holds a run of other settings: {known.get('settings')}"[:200],
                expected=f"{self.settings}"[:200],
                do="repeat its command, give another --name, or delete the folder",
            )
            print("goes on with what was planned")
        else:
            print("measuring, some seconds ...", flush=True)
            config = stream_config(train, self.base, self.options, [self.words.eos_token_id])
            rates = measure(self.backbone, config, train, self.speaker, self.longest, self.most)
            usual = int(fmean(len(one.tokens) for one in (*self.files, *self.shipped)))
            plan = Plan.within(3600 * self.args.hours, rates, usual)
            known = {
                "settings": self.settings,
                "rates": asdict(rates),
                "plan": asdict(plan),
                "began": time.time(),
            }
            write_whole(path, json.dumps(known, indent=1).encode())
        self.known = known
        self.rates, self.plan = Rates(**known["rates"]), Plan(**known["plan"])
        self.train = replace(
            train, batch_size=self.rates.batch_size, epochs=float(self.plan.epochs)
        )
        self.speaker = replace(self.speaker, batch_size=self.rates.together)
        least = HELD_OUT + self.rates.batch_size
        require(
            self.plan.answers > least,
            f"--hours {self.args.hours} is enough for {self.plan.answers} answers",
            expected=f"more than {least}", do="give more",
        )  # fmt: skip
        print(self._plan_told())
        learnt = self.plan.answers * self.plan.epochs
        print(_gain_told(predicted(decoder, chip, sizes.num_layers, sizes.num_streams, learnt)))

    def _sizes_told(self, sizes: Sizes, vocab: int) -> str:
        layers = self.base["num_hidden_layers"]
        held = f"held as {self.backbone.dtype}".replace("mlx.core.", "")
        held = "packed as they are" if is_quantised(self.backbone.model) else held
        return (
            f"{self.args.model}: {layers} layers of width {self.base['hidden_size']}, {held}\n"
            f"streams: {sizes.num_streams} in the top {sizes.num_layers} layers, which draft from "
            f"{vocab or self.base['vocab_size']:,} tokens"
        )

    def _plan_told(self) -> str:
        plan, rates = self.plan, self.rates
        steps = self.train.num_steps(plan.answers - HELD_OUT)
        minutes = (plan.answer_seconds + plan.train_seconds) / 60
        return (
            f"plan: {plan.answers:,} answers at {rates.answer:.0f} tokens/s "
            f"({plan.answer_seconds / 60:.0f} min), {steps:,} steps of {rates.batch_size} "
            f"({plan.train_seconds / 60:.0f} min), checks: some {minutes / (1 - RESERVE):.0f} min "
            f"in all; at most {(rates.memory + CACHE_BYTES) / 2**30:.1f} GiB of memory"
        )

    def answer(self) -> None:
        """Have the model answer everything, and write the examples."""
        wanted, files = self.plan.answers, self.files[: self.plan.answers]
        left = wanted - len(files)
        own = max(left // 3, left - len(self.shipped)) if self.words.has_chat_template else 0
        with self._part("questions.part", own) as part:
            questions = [{"prompt": text} for text in self.speaker.questions(own, part)]
        mixed = [*files, *self._asked(OWN, questions), *self.shipped][:wanted]
        random.Random(self.args.seed).shuffle(mixed)
        texts = [
            Text(n, one.tokens, SAMPLED_TEMP if n % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0)
            for n, one in enumerate(mixed)
        ]
        with self._part("answers.part", len(texts)) as part:
            answers = self.speaker.answer(texts, ANSWER_TOKENS, part)
        rows = [
            {"source": one.source, "prompt_tokens": text.prompt, "completion_tokens": tokens}
            for one, text, tokens in zip(mixed, texts, answers, strict=True)
        ]
        # Greedy ones, whose beginnings no example shares.
        held = [n for n, text in enumerate(texts) if not text.temp][:HELD_OUT]
        seen = {opening(mixed[n].text) for n in held}
        kept = [n for n, one in enumerate(mixed) if opening(one.text) not in seen]
        make_folder(self.options.data)
        for name, numbers in (("train", kept), ("valid", held)):
            lines = "".join(json.dumps(rows[n]) + "\n" for n in numbers)
            write_whole(self.options.data / f"{name}.jsonl", lines.encode())

    @contextmanager
    def _part(self, name: str, count: int) -> Iterator[PartFile]:
        part = PartFile(self.folder / name, {**self.settings, "count": count})
        try:
            yield part
        finally:
            part.close()

    def learn(self) -> None:
        """Train the streams, and keep the best."""
        every = self.train.num_steps(self.plan.answers - HELD_OUT)
        options = replace(
            self.options, valid_every=max(1, every // 5), save_every=max(1, every // 40)
        )
        job, _ = prepare(options, self.train)
        twin = self.backbone.twin()
        model = TrainedModel(twin, new_adapter(twin, job.config, self.train, job.draft_vocab))
        objective = MlxObjective(model, self.train, job.draft_vocab)
        frozen = [str(twin.dtype), self.settings["model"]]

        def write(validate: Validation) -> Path:
            with new_folder(self.folder / TRAINED_FOLDER) as work:
                write_adapter(work, told(model.adapter, validate))
            return self.folder / TRAINED_FOLDER

        with wired_limit(twin.model):
            run_to_end(
                job, MlxTrainer(objective, job.num_steps),
                prog=self.prog, dtype=str(twin.dtype).removeprefix("mlx.core."),
                identity=job.identity(*frozen), write=write, keep_best=True, wait=self.wait,
                lower=lambda: job.stored_lower(objective, STORE_FILE, job.lower_identity(*frozen)),
            )  # fmt: skip
        (self.folder / STORE_FILE).unlink(missing_ok=True)

    def check(self) -> None:
        """Decode held-out prompts in turns, plain and drafted; write and say what was gained."""
        folder = self.folder / TRAINED_FOLDER
        require(
            folder.exists(),
            "no training step made better guesses than untrained streams",
            expected="more tokens per call",
            do="give more --hours",
        )
        model = fuse_streams(self.backbone, load_adapter(folder), merge_lora=False)
        rows = [json.loads(line) for line in (self.options.data / "valid.jsonl").open()]
        seconds, calls = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
        tokens = same = 0
        for row in bar(rows[:CHECKED], "checking"):
            said = {}
            for way, settings in WAYS.items():
                own = model if way == DRAFTED else StreamFusedModel(self.backbone)
                start = time.perf_counter()
                every = [
                    *stream_generate(
                        own, self.words, row["prompt_tokens"],
                        max_tokens=CHECKED_TOKENS, **settings,
                    )
                ]  # fmt: skip
                seconds[way] += time.perf_counter() - start
                calls[way] += every[-1].target_calls
                said[way] = [token for one in every for token in one.tokens]
            tokens += len(said[PLAIN])
            same += said[PLAIN] == said[DRAFTED]
        self._write_figures(folder, {way: tokens / count for way, count in calls.items()})
        curve = load_adapter(folder).config.tokens_per_call or {}
        untrained = read_record(self.folder / LOG_FILE)[0]["tokens_per_call"]
        speedup = seconds[PLAIN] / seconds[DRAFTED]
        print(
            f"{self.folder.name}: {curve.get(6, 0.0):.2f} tokens per call with 6 nodes on held-out "
            f"answers (untrained {untrained:.2f}, prompt lookup {tokens / calls[LOOKUP]:.2f}); "
            f"{speedup:.2f} times plain decoding's speed on {CHECKED} prompts, {same} of {CHECKED} "
            "answers the same, token for token"
        )
        picture = self.folder / PICTURE_FILE
        if picture.exists():
            print(f"curves: {picture}")
        print(f"use it: python -m ssmlx.chat --model {self.args.model}")

    def _write_figures(self, folder: Path, per_call: dict[str, float]) -> None:
        """What `ssmlx.upload` makes a card of."""
        adapter = load_adapter(folder)
        entries = read_record(self.folder / LOG_FILE)
        rows = [json.loads(line) for line in (self.options.data / "train.jsonl").open()]
        untrained = entries[0]["tokens_per_call"]
        figures = {
            "base": {
                "model": self.args.model, "revision": self.revision,
                "bits": self.base.get("quantization", {}).get("bits"),
            },
            "recipe": {
                "command": " ".join([f"python -m {self.prog}", *sys.argv[1:]]),
                "version": __version__,
                "steps": entries[-1]["step"], "seconds": round(time.time() - self.known["began"]),
                "train": self.train.to_dict(),
            },
            "data": {
                "private": bool(self.files), "answers": len(rows),
                "tokens": sum(len(row["completion_tokens"]) for row in rows),
                "sources": Counter(row["source"] for row in rows), "sha256": _digest(rows),
            },
            "figures": {
                "prompts": HELD_OUT, "max_tokens": ANSWER_TOKENS, "plain_tokens_per_call": 1.0,
                "tokens_per_call": adapter.config.tokens_per_call,
                "lookup_tokens_per_call": round(per_call[LOOKUP], 3),
                "untrained_tokens_per_call": untrained,
            },
        }  # fmt: skip
        write_whole(folder / FIGURES_FILE, json.dumps(figures, indent=1).encode())
