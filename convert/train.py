"""`python -m ssmlx.convert.train`: train streams, LoRA and pruning adapter in PyTorch."""

import argparse
from pathlib import Path
from typing import Any

from ssmlx.commands.parser import add_options
from ssmlx.commands.running import make_main, with_lock_on_out_folder
from ssmlx.commands.train_options import (
    add_cache_option,
    make_training_parser,
    read_run_options,
    read_train_config,
)

from . import check_torch

PROG = "ssmlx.convert.train"
EPILOG = """examples:
  python -m ssmlx.convert.train --data data/sql --out runs/sql --num-streams 5
  python -m ssmlx.convert --lora runs/sql --out adapters/sql

  # the model's answers stay as they are: LoRA on streams alone; the data is its own answers
  python -m ssmlx.convert.continuations --prompts prompts.jsonl --out data/chat/train.jsonl
  python -m ssmlx.convert.continuations --prompts others.jsonl --out data/chat/valid.jsonl
  python -m ssmlx.convert.train --adapter-scope streams --data data/chat --out runs/chat

  # for a task's LoRA, which --num-streams 0 trained; the data is the answers of the model with it
  python -m ssmlx.convert.train --adapter-scope streams --task-lora runs/task --data own \\
      --out runs/sql

You may stop a run at any time. The same command continues it from the last saved state, and ends
with the same weights. At the end OUT is a checkpoint for `python -m ssmlx.convert`. It also has
log.jsonl, and curves.png if matplotlib is installed."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    description = "Train streams, with which a model drafts for itself, in PyTorch."
    task_lora = "a task's LoRA: a checkpoint of this command with --num-streams 0"
    parser = make_training_parser(PROG, description, EPILOG, "a checkpoint", task_lora)
    add_machine_options(parser, "results of the frozen lower layers")
    return parser.parse_args(argv)


def add_machine_options(
    parser: argparse.ArgumentParser,
    cached: str,  # what --cache-gb stores on disk, for its help
) -> None:
    group = parser.add_argument_group("machine")
    add_options(
        group,
        (
            "--device",
            None,
            "auto: CUDA, then Apple's GPU, then the CPU (default: %(default)s)",
            "auto",
            ("auto", "cuda", "mps", "cpu"),
        ),
        (
            "--dtype",
            None,
            "of the frozen weights and the arithmetic; what is trained stays in "
            "float32 (default: %(default)s)",
            "bfloat16",
            ("bfloat16", "float32"),
        ),
    )
    add_cache_option(group, cached)


def train_streams(args: argparse.Namespace) -> None:
    check_torch()
    options = read_run_options(args)
    train = read_train_config(args)

    import torch

    from ssmlx.loading.adapter import load_stream_adapter
    from ssmlx.loading.files import require_nothing_else_in
    from ssmlx.loading.folders import ADAPTER_FILES, TRAINED_FOLDER
    from ssmlx.training.job import read_job, run_to_end
    from ssmlx.training.mlx_model import add_condition_and_root_init, measure_and_write_adapter
    from ssmlx.training.objective import Validation

    from .base import load_base
    from .reference.checkpoint import (
        build_frozen,
        copy_checkpoint_weights,
        copy_task_lora,
        load_fine_tuned,
        merge_lora,
        replace_trained_weights,
        save_reference,
        set_trained_part,
    )
    from .training.run import (
        TorchObjective,
        TorchTrainer,
        cast_frozen_parameters,
        choose_device,
        new_streams,
        use_stream_attention,
    )

    trained = options.out / TRAINED_FOLDER
    if train.train_only:
        require_nothing_else_in(trained, ADAPTER_FILES, "choose another --out")
    device = choose_device(args.device)
    dtype = getattr(torch, args.dtype)
    start = (
        add_condition_and_root_init(load_stream_adapter(args.init), train)
        if train.train_only
        else None
    )
    job = read_job(options, train, start)
    base: Any = load_base(job.base_folder, attn_implementation="sdpa")
    frozen_folders: list[Path] = []
    if args.task_lora is not None:
        tuned = load_fine_tuned(base, args.task_lora)
        frozen_folders = [args.task_lora]
        base = merge_lora(tuned)
    if start is None:
        model = new_streams(base, job.config, train, job.draft_vocab).to(device)
    else:
        model = build_frozen(base, start).to(device)
        frozen_folders = [args.init]
        set_trained_part(model, train.train_only)
    if args.init is not None and start is None:
        copy_checkpoint_weights(model, args.init, has_task_lora=args.task_lora is not None)
    cast_frozen_parameters(model, dtype)
    if train.num_streams:
        use_stream_attention(base, train.num_streams)
    objective = TorchObjective(model, train, job.draft_vocab, device, dtype)
    trainer = TorchTrainer(objective, job.num_steps)

    def write_adapter_or_checkpoint(validation: Validation) -> Path:
        if start is not None:
            return measure_and_write_adapter(
                trained, replace_trained_weights(start, model), validation
            )
        save_reference(model, options.out)
        if args.task_lora is not None:
            copy_task_lora(args.task_lora, options.out)
        return options.out

    run_to_end(
        job,
        trainer,
        prog=PROG,
        dtype=args.dtype,
        write_trained=write_adapter_or_checkpoint,
        frozen_folders=frozen_folders,
        start_folders=[args.init] if args.init else [],
    )


main = make_main(PROG, parse_args, with_lock_on_out_folder(train_streams))

if __name__ == "__main__":
    raise SystemExit(main())
