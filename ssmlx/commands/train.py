"""The training command: from a data folder to an adapter, on this machine, without PyTorch."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from ..loading.folders import ADAPTER_FILES, TRAINED_FOLDER
from .running import launched_rank, make_main, with_lock_on_out_folder
from .train_options import (
    add_cache_option,
    make_training_parser,
    read_run_options,
    read_train_config,
)

PROG = "ssmlx.train"
DTYPES = ("auto", "stored", "bfloat16", "float32")
EPILOG = """examples:
  # fine-tune for a task, streams included
  python -m ssmlx.train --data data/sql --out runs/sql --num-streams 5
  python -m ssmlx.chat --adapter runs/sql/adapter

  # the model's answers stay as they are: LoRA on streams alone; the data is its own answers
  python -m ssmlx.train --adapter-scope streams --data data/chat --out runs/chat

  # for a LoRA that you trained with mlx-lm, which stays as it is; the data is the answers of the
  # model with it
  python -m ssmlx.train --task-lora adapters --adapter-scope streams --data data/own --out runs/own

  # a large model on a small Mac: 4-bit base, short examples
  python -m ssmlx.train --model mlx-community/Llama-3.2-3B-Instruct-4bit --data data/sql \\
      --out runs/llama --batch-size 4 --max-length 256

Each line of train.jsonl and valid.jsonl is a JSON object with prompt and completion, or messages,
or text, or prompt_tokens and completion_tokens.

You may stop a run at any time. The same command continues it from the last saved state, and ends
with the same weights. At the end OUT/adapter is the adapter, for --adapter. OUT also has log.jsonl,
and curves.png if matplotlib is installed. Their tokens_per_call is the number of tokens that a call
of the model yields on valid.jsonl: with 1, drafting gains nothing."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    description = "Train an adapter that makes a model draft for itself, with MLX."
    task_lora = "a task's LoRA, as mlx-lm, PEFT or this command wrote it"
    parser = make_training_parser(PROG, description, EPILOG, "an adapter", task_lora)
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the frozen weights and of the arithmetic; trained weights are float32. "
        "stored: as in the model's files, 4-bit weights packed. auto: on a GPU, packed weights as "
        "stored and others in bfloat16; on a CPU float32 (default: %(default)s)",
    )
    add_cache_option(group, "results of the frozen lower layers")
    return parser.parse_args(argv)


def _train_with_lock(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        # Only the first rank's files are of use.
        if launched_rank() > 0:
            args.out = Path(folder, "run")
        with_lock_on_out_folder(_train)(args)


def _train(args: argparse.Namespace) -> None:
    options = read_run_options(args)
    train = read_train_config(args)

    from mlx_lm.generate import wired_limit

    from ..loading.adapter import load_stream_adapter
    from ..loading.attach import read_task_lora
    from ..loading.files import require_nothing_else_in
    from ..model.ranks import launched_group
    from ..training.job import read_job, run_to_end
    from ..training.mlx_model import (
        TrainedModel,
        add_condition_and_root_init,
        bind_adapter,
        new_adapter,
    )
    from ..training.mlx_trainer import MlxObjective, MlxTrainer, load_trainable_base

    trained = options.out / TRAINED_FOLDER
    require_nothing_else_in(trained, ADAPTER_FILES, "choose another --out")
    start = (
        add_condition_and_root_init(load_stream_adapter(args.init), train)
        if train.train_only
        else None
    )
    job = read_job(options, train, start)
    backbone = load_trainable_base(job.base_folder, args.dtype)
    lora = {} if args.task_lora is None else read_task_lora(args.task_lora, backbone)
    adapter = start or new_adapter(backbone, job.config, train, job.draft_vocab, lora)
    model = TrainedModel(backbone, adapter, train.train_only)
    if args.init is not None and start is None:
        bind_adapter(model, load_stream_adapter(args.init), args.init)
    objective = MlxObjective(model, train, job.draft_vocab)
    trainer = MlxTrainer(objective, job.num_steps, launched_group())
    init = [args.init] if args.init else []
    task = [args.task_lora] if args.task_lora else []
    with wired_limit(backbone.model):
        run_to_end(
            job,
            trainer,
            prog=PROG,
            dtype=str(backbone.dtype),
            write_trained=lambda validation: model.measure_and_write(trained, validation),
            # An adapter of which a part is trained is frozen but for that; it goes without a task.
            frozen_folders=init if start else task,
            start_folders=[] if start else init,
        )


main = make_main(PROG, parse_args, _train_with_lock)
