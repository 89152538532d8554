"""`python -m convert.train`: train streams, LoRA and pruning adapter in PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmlx.commands.options import run
from ssmlx.loading.files import folder_digest, make_folder
from ssmlx.training.config import SCHEDULES
from ssmlx.training.job import SETTINGS_FILE as SETTINGS_FILE
from ssmlx.training.job import Job, bar, finish, prepare, run_to_end
from ssmlx.training.options import (
    add_cache_option,
    add_task_lora_option,
    check_task_lora,
    run_options,
    train_config,
    training_parser,
)

from .installed import check_torch

if TYPE_CHECKING:
    from .training.run import Objective

PROG = "convert.train"
STATE_FILE, STORE_FILE = "state.pt", "lower.states"
EPILOG = """examples:
  python -m convert.train --data data/sql --out runs/sql --num-streams 5
  python -m convert --lora runs/sql --out adapters/sql

  # lossless: LoRA on streams alone, learnt from the model's own continuations
  python -m convert.continuations --prompts prompts.jsonl --out data/chat/train.jsonl
  python -m convert.continuations --prompts others.jsonl --out data/chat/valid.jsonl
  python -m convert.train --adapter-scope streams --data data/chat --out runs/chat

  # a fine-tuned model whose answers stay as they are: its LoRA first, then streams beside it
  python -m convert.train --num-streams 0 --prune-rank 0 --data data/sql --out runs/task
  python -m convert.continuations --lora runs/task --prompts data/sql/train.jsonl \\
      --out own/train.jsonl
  python -m convert.continuations --lora runs/task --prompts data/sql/valid.jsonl \\
      --out own/valid.jsonl
  python -m convert.train --adapter-scope streams --task-lora runs/task --data own --out runs/sql

The run saves its state as it goes. Stop it when you like: the same command goes on, and ends
with the same weights. OUT then holds a checkpoint for `python -m convert`, log.jsonl, and
curves.png."""

OPTIMISATION: dict[str, tuple[type, Any, str]] = {
    "epochs": (float, 3.0, "passes over the data"),
    "batch_size": (int, 16, "examples a step"),
    "learning_rate": (float, 1e-3, "AdamW's peak rate"),
    "warmup": (float, 0.05, "share of the steps in which the rate rises"),
    "weight_decay": (float, 0.0, "AdamW's decay"),
    "clip_norm": (float, 1.0, "largest gradient norm"),
    "max_length": (int, 512, "tokens of an example; longer answers are cut, longer prompts left "
                   "out"),
    "seed": (int, 0, "of the weights and of the order of the data"),
}  # fmt: skip
"""Type, default and help of what trainers other than this one choose of `TrainConfig`."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = training_parser(
        "convert.train", "Train a model to draft for itself, in PyTorch.", EPILOG, "a checkpoint"
    )
    add_task_lora_option(
        parser, "a checkpoint of this command with --num-streams 0: the LoRA of a task"
    )
    add_machine_options(parser, "the frozen lower layers' results")
    return parser.parse_args(argv)


def add_optimisation_options(
    parser: argparse.ArgumentParser, options: Mapping[str, tuple[type, Any, str]]
) -> None:
    """Options such as `OPTIMISATION`, and the schedule. Without a default the help says it."""
    group = parser.add_argument_group("optimisation")
    for name, (kind, default, text) in options.items():
        shown = "" if default is None else " (default: %(default)s)"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=default, metavar="X", help=text + shown)
    group.add_argument(
        "--schedule", choices=SCHEDULES, default="cosine",
        help="course of the rate after its warm-up (default: %(default)s)",
    )  # fmt: skip


def add_machine_options(parser: argparse.ArgumentParser, cached: str | None = None) -> None:
    """What PyTorch runs on, and in; `cached` is what it keeps on disk, if anything."""
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
    if cached is not None:
        add_cache_option(group, cached)


def _base_of(path: Path, task_lora: Path | None) -> Any:
    """The base model, with the LoRA of its task merged into it if there is one.

    Raises:
        InputError: the checkpoint does not change what the model says, or is broken.
    """
    from .base import load_base
    from .reference.checkpoint import load_fine_tuned, merge_lora

    base = load_base(path, attn_implementation="sdpa")
    return base if task_lora is None else merge_lora(load_fine_tuned(base, task_lora))


def _lower_lora(job: Job, task_lora: Path | None) -> list[str]:
    """What of the task's LoRA the layers below the streams depend on: nothing, or its digest."""
    from .reference.format import (
        ADAPTER_CONFIG,
        STREAMS_CONFIG,
        read_lora_settings,
        read_stream_config,
    )

    if task_lora is None:
        return []
    config = read_stream_config(task_lora / STREAMS_CONFIG)
    layers = read_lora_settings(task_lora / ADAPTER_CONFIG, config).layers
    return [folder_digest(task_lora)] if min(layers) < job.config.insertion_layer else []


def _lower_of(
    job: Job, objective: Objective, cache_gb: float, lower_lora: Sequence[str] = ()
) -> Any:
    """What gives the frozen layers' results of a batch: the store, or the layers themselves.

    `lower_lora` is what `_lower_lora` says.
    """
    from .training.lower_store import LowerStore, fits

    width = job.config.hidden_size
    if not fits(job.examples, width, objective.dtype, cache_gb):
        return objective.lower
    path = job.options.out / STORE_FILE
    identity = job.lower_identity(str(objective.dtype), *lower_lora)
    store = LowerStore(path, job.examples, width, objective.dtype, identity)
    store.fill(objective.lower, lambda batches: bar(batches, "frozen layers"))
    return store.get


def _main(args: argparse.Namespace) -> None:
    check_torch()
    import torch

    from ssmlx.training.validation import Validation

    from .reference.checkpoint import copy_task_lora, save_reference, start_from
    from .reference.stream_attention import use_stream_attention
    from .training.run import Objective, Run, build_model, choose_device, freeze_base

    check_task_lora(args)
    options, train = run_options(args), train_config(args)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    job, path = prepare(options, train)
    make_folder(options.out)
    base = _base_of(path, args.task_lora)
    model = build_model(base, job.config, train, job.draft_vocab).to(device)
    if args.init is not None:
        start_from(model, args.init)
    freeze_base(model, dtype)
    if train.num_streams:
        use_stream_attention(base, train.num_streams)
    objective = Objective(model, train, job.draft_vocab, device, dtype)
    state = Run(objective, job.num_steps)
    task = [] if args.task_lora is None else [folder_digest(args.task_lora)]
    identity = job.identity(args.dtype, *task, init=args.init)
    record = run_to_end(
        job, state,
        prog=PROG, dtype=args.dtype, identity=identity, state_file=STATE_FILE,
        lower=lambda: _lower_of(job, objective, args.cache_gb, _lower_lora(job, args.task_lora)),
        validation=lambda: Validation(objective, job.valid, options.tree_size),
    )  # fmt: skip
    save_reference(model, options.out)
    if args.task_lora is not None:
        copy_task_lora(args.task_lora, options.out)
    finish(job, state, record)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
