"""`python -m convert.train`: train streams, LoRA and pruning adapter in PyTorch."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmlx.cli.options import run
from ssmlx.training.options import RunOptions, run_options, train_config, training_parser

if TYPE_CHECKING:
    import numpy as np

    from ssmlx.config import StreamConfig
    from ssmlx.training.config import TrainConfig
    from ssmlx.training.data import Example

    from .training import Objective, Run

PROG = "convert.train"
STATE_FILE, STORE_FILE, SETTINGS_FILE = "state.pt", "lower.states", "training.json"
EPILOG = """examples:
  python -m convert.train --data data/sql --out runs/sql --num-streams 5
  python -m convert --lora runs/sql --out adapters/sql

  # lossless: LoRA on streams alone, learnt from the model's own continuations
  python -m convert.continuations --prompts prompts.jsonl --out data/chat/train.jsonl
  python -m convert.train --adapter-scope streams --data data/chat --out runs/chat

The run saves its state as it goes. Stop it when you like: the same command goes on, and ends
with the same weights. OUT then holds a checkpoint for `python -m convert`, log.jsonl, and
curves.png."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = training_parser(
        "convert.train", "Train a model to draft for itself, in PyTorch.", EPILOG
    )
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--device", choices=("auto", "cuda", "mps", "cpu"), default="auto",
        help="auto: CUDA, then Apple's GPU, then the CPU (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="of the frozen weights and the arithmetic; what is trained stays in float32 "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--cache-gb", type=float, default=8.0, metavar="X",
        help="disk that the frozen lower layers' results may take; beyond it they are computed "
        "anew every step (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(argv)


@dataclass(frozen=True, eq=False)
class Job:
    """A run, ready to go."""

    options: RunOptions
    train: TrainConfig
    config: StreamConfig
    examples: Sequence[Example]
    valid: Sequence[Example]
    draft_vocab: np.ndarray | None

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.train.num_steps(len(self.examples))

    @property
    def identity(self) -> str:
        """A digest of all that decides the result."""
        digest = hashlib.sha256(json.dumps(self.train.to_dict(), sort_keys=True).encode())
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        for example in self.examples:
            digest.update(example.tokens.tobytes() + bytes([0]))
        return digest.hexdigest()


def bar(items: Iterable[Any], label: str, **settings: Any) -> Any:
    """A progress bar, on a terminal only."""
    from huggingface_hub.utils import tqdm

    return tqdm(items, desc=label, disable=None, **settings)


def prepare(options: RunOptions, train: TrainConfig) -> tuple[Job, Path]:
    """Read the data; returns the job, and the base model's folder."""
    from ssmlx.config import read_json
    from ssmlx.loading import load_words
    from ssmlx.registry import resolve_model
    from ssmlx.training.data import Encoder, read_examples
    from ssmlx.training.draft_vocab import choose_draft_vocab

    path = resolve_model(options.model)
    base = read_json(path / "config.json", "a model folder")
    words = load_words(path, base)
    encoder = Encoder(words, options.template, words.eos_token_id, train.max_length)

    def read(name: str) -> list[Example]:
        return read_examples(options.data / name, encoder, lambda lines: bar(lines, name))

    examples, valid = read("train.jsonl"), read("valid.jsonl")[: options.valid_count]
    vocab = None
    if train.draft_vocab_size:
        vocab = choose_draft_vocab(examples, train.draft_vocab_size, base["vocab_size"])
    config = stream_config(train, base, options, [words.eos_token_id])
    return Job(options, train, config, examples, valid, vocab), path


def stream_config(
    train: TrainConfig, base: dict[str, Any], options: RunOptions, end_tokens: list[int]
) -> StreamConfig:
    """What the checkpoint will say of itself."""
    from ssmlx.config import StreamConfig

    shared = ("num_streams", "num_msa_layers", "stream_init", "stream_init_rank", "prune_rank",
              "adapter_scope", "stream_design", "rotation_step", "draft_vocab_size")  # fmt: skip
    return StreamConfig.from_dict(
        {
            **{name: getattr(train, name) for name in shared},
            "num_layers": base["num_hidden_layers"],
            "hidden_size": base["hidden_size"],
            "prompt_template": options.template,
            "end_token_ids": end_tokens,
            "base_model": options.model,
        }
    )


def _lower_of(job: Job, objective: Objective, cache_gb: float) -> Any:
    """What gives the frozen layers' results of a batch: the store, or the layers themselves."""
    from .lower_store import LowerStore, fits

    width = job.config.hidden_size
    if not fits(job.examples, width, objective.dtype, cache_gb):
        return objective.lower
    store = LowerStore(job.options.out / STORE_FILE, job.examples, width, objective.dtype)
    store.fill(objective.lower, lambda batches: bar(batches, "frozen layers"))
    return store.get


def learn(job: Job, state: Run, lower: Any, record: Any) -> None:
    """Take the steps that are left, saving and validating as it goes."""
    from ssmlx.training.batches import BatchPlan

    from .training import Validation

    options, last = job.options, min(job.options.max_steps or job.num_steps, job.num_steps)
    plan = BatchPlan(job.examples, job.train.batch_size, job.train.seed)
    validation = Validation(state.objective, job.valid, options.tree_size)
    steps = bar(range(state.step, last), "training", initial=state.step, total=last, unit="step")
    for step in steps:
        batch = plan.batch(step)
        entry = state.advance(batch, lower(batch))
        if state.step % options.valid_every == 0 or state.step == last:
            entry |= validation()
            _say(entry, job.num_steps)
        record.add({k: round(v, 6) for k, v in entry.items()} | {"time": round(time.time(), 1)})
        if state.step % options.save_every == 0 or state.step == last:
            state.save(options.out / STATE_FILE, job.identity)


def _say(entry: dict[str, float], num_steps: int) -> None:
    losses = " ".join(
        f"{name.removeprefix('valid_').removesuffix('_loss')} {value:.3f}"
        for name, value in entry.items()
        if name.startswith("valid_")
    )
    rate = f"; {entry['tokens_per_call']:.2f} tokens per call" if "tokens_per_call" in entry else ""
    print(f"step {entry['step']:.0f} of {num_steps}: {losses}{rate}", file=sys.stderr, flush=True)


def _main(args: argparse.Namespace) -> None:
    import torch

    from ssmlx.training.record import LOG_FILE, PICTURE_FILE, Record, draw_curves, read_record

    from .base import load_base
    from .reference import save_reference
    from .training import Objective, Run, build_model, choose_device, freeze_base

    options, train = run_options(args), train_config(args)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    job, path = prepare(options, train)
    options.out.mkdir(parents=True, exist_ok=True)
    base = load_base(path, attn_implementation="sdpa")
    model = build_model(base, job.config, train, job.draft_vocab).to(device)
    freeze_base(model, dtype)
    objective = Objective(model, train, job.draft_vocab, device, dtype)
    state = Run(objective, job.num_steps)
    state.resume(options.out / STATE_FILE, job.identity)
    record = Record(options.out / LOG_FILE, state.step)
    _write_settings(job, args)
    learn(job, state, _lower_of(job, objective, args.cache_gb), record)
    save_reference(model, options.out)
    entries = read_record(options.out / LOG_FILE)
    draw_curves(entries, options.out / PICTURE_FILE, options.out.name)
    print(f"{options.out}: step {state.step} of {job.num_steps}", file=sys.stderr)


def _write_settings(job: Job, args: argparse.Namespace) -> None:
    from ssmlx.training.draft_vocab import coverage

    settings = {
        "command": " ".join([f"python -m {PROG}", *sys.argv[1:]]),
        "train": job.train.to_dict(),
        "examples": len(job.examples),
        "answer_tokens": sum(example.num_answer for example in job.examples),
        "dtype": args.dtype,
    }
    if job.draft_vocab is not None:
        settings["draft_vocab_coverage"] = round(coverage(job.valid, job.draft_vocab), 4)
    text = json.dumps(settings, indent=1) + "\n"
    (job.options.out / SETTINGS_FILE).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
