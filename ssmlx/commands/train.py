"""The training command: from a data folder to an adapter, on this machine, without PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..training.options import (
    add_cache_option,
    add_task_lora_option,
    check_task_lora,
    run_options,
    train_config,
    training_parser,
)
from .options import run

if TYPE_CHECKING:
    from ..training.job import Job
    from ..training.mlx_run import Objective, Run

PROG = "ssmlx.train"
STATE_FILE, STORE_FILE, ADAPTER_FOLDER = "state.safetensors", "lower.states", "adapter"
DTYPES = ("auto", "stored", "bfloat16", "float32")
EPILOG = """examples:
  # fine-tune for a task, streams included
  python -m ssmlx.train --data data/sql --out runs/sql --num-streams 5
  python -m ssmlx.chat --adapter runs/sql/adapter

  # lossless: LoRA on streams alone; the data is the model's own answers
  python -m ssmlx.train --adapter-scope streams --data data/chat --out runs/chat

  # the LoRA that you trained with mlx-lm, faster: its answers stay as they are; the data is
  # the fine-tuned model's own answers
  python -m ssmlx.train --task-lora adapters --adapter-scope streams --data data/own --out runs/own

  # a large model on a small Mac: 4-bit base, short examples, streams that guess 8000 tokens
  python -m ssmlx.train --model mlx-community/Llama-3.2-3B-Instruct-4bit --data data/sql \\
      --out runs/llama --batch-size 4 --max-length 256 --draft-vocab-size 8000

DATA holds train.jsonl and valid.jsonl, as for mlx-lm's LoRA training; a line is an object with
prompt and completion, or messages, or text, or prompt_tokens and completion_tokens.

The run saves its state as it goes. Stop it when you like: the same command goes on, and ends
with the same weights. OUT/adapter is then what --adapter takes; OUT also holds log.jsonl, and
curves.png where matplotlib is installed. In these, tokens_per_call says how many tokens a target
call would advance on held-out text; training pays where that is well above 1."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    description = "Train a model to draft for itself, with MLX."
    parser = training_parser(PROG, description, EPILOG, "an adapter")
    add_task_lora_option(parser, "the LoRA of a task, as mlx-lm or this command wrote it")
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="of the frozen weights and the arithmetic; what is trained stays in float32. stored: "
        "as they are, 4-bit weights packed. auto: on a GPU, packed weights as stored and others in "
        "bfloat16; on the CPU float32 (default: %(default)s)",
    )  # fmt: skip
    add_cache_option(group, "the frozen lower layers' results")
    return parser.parse_args(argv)


def _lower_of(job: Job, objective: Objective, cache_gb: float, task: Sequence[str]) -> Any:
    """What gives the frozen layers' results of a batch: the store, or the layers themselves.

    `task` tells what of the task's LoRA these layers depend on from others.
    """
    from ..training.job import bar
    from ..training.lower_store import LowerStore, fits
    from ..training.mlx_run import MlxLowerStore

    width, dtype = job.config.hidden_size, objective.model.backbone.dtype
    if not fits(job.examples, width, dtype.size, cache_gb):
        return objective.lower
    path = job.options.out / STORE_FILE
    identity = job.lower_identity(*_base_of(objective), *task)
    files = LowerStore(path, job.examples, width, dtype.size, identity)
    store = MlxLowerStore(files, dtype)
    store.fill(objective, lambda batches: bar(batches, "frozen layers"))
    return store.get


def _base_of(objective: Objective) -> list[Any]:
    """What tells the frozen model from others."""
    return [objective.model.adapter.base.__dict__, str(objective.model.backbone.dtype)]


def _task_digests(folder: Path | None, objective: Objective) -> tuple[list[str], list[str]]:
    """The task's LoRA as the run depends on it, and as the layers below the streams do."""
    from ..loading.files import folder_digest
    from ..model.lora import layer_of

    if folder is None:
        return [], []
    adapter, digest = objective.model.adapter, [folder_digest(folder)]
    lowest = min(layer_of(path)[0] for path in adapter.task_lora)
    return digest, digest if lowest < adapter.config.insertion_layer else []


def _write_adapter(folder: Path, state: Run) -> None:
    from ..loading.adapter import write_adapter
    from ..loading.files import new_folder

    with new_folder(folder) as work:
        write_adapter(work, state.objective.model.adapter)


def _main(args: argparse.Namespace) -> None:
    check_task_lora(args)
    options, train = run_options(args), train_config(args)
    if not args.cache_gb >= 0:
        raise InputError(
            f"--cache-gb {args.cache_gb}", expected="0 or more", do="correct the option"
        )

    from mlx_lm.generate import wired_limit

    from ..loading.adapter import load_adapter
    from ..loading.attach import read_task_lora
    from ..loading.files import make_folder
    from ..training.job import finish, prepare, run_to_end
    from ..training.mlx_model import TrainedModel, new_adapter, start_from
    from ..training.mlx_run import Objective, Run, load_frozen
    from ..training.validation import Validation

    job, path = prepare(options, train)
    backbone = load_frozen(path, args.dtype)
    adapter = new_adapter(backbone, job.config, train, job.draft_vocab)
    if args.task_lora is not None:
        adapter = replace(adapter, task_lora=read_task_lora(args.task_lora, backbone))
    model = TrainedModel(backbone, adapter)
    if args.init is not None:
        start_from(model, load_adapter(args.init), args.init)
    objective = Objective(model, train, job.draft_vocab)
    state = Run(objective, job.num_steps)
    task, lower_task = _task_digests(args.task_lora, objective)
    identity = job.identity(*_base_of(objective), *task, init=args.init)
    make_folder(options.out)
    with wired_limit(backbone.model):
        record = run_to_end(
            job, state,
            prog=PROG, dtype=str(backbone.dtype).removeprefix("mlx.core."),
            identity=identity, state_file=STATE_FILE,
            lower=lambda: _lower_of(job, objective, args.cache_gb, lower_task),
            validation=lambda: Validation(objective, job.valid, options.tree_size),
        )  # fmt: skip
    _write_adapter(options.out / ADAPTER_FOLDER, state)
    finish(job, state, record, options.out / ADAPTER_FOLDER)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)
