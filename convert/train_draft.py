"""`python -m convert.train_draft`: make a draft model of a base model's first layers."""

import argparse

from ssmlx.commands.options import add_options, alone, command, make_parser
from ssmlx.commands.train_options import OPTIMISATION, add_run_options, add_settings, run_options
from ssmlx.errors import require
from ssmlx.loading.names import resolve_model
from ssmlx.settings import MAX_DRAFT_TOKENS, DraftModelConfig
from ssmlx.training.config import TrainConfig

from . import check_torch
from .train import DEFAULTS, add_machine_options

PROG = "convert.train_draft"
MODEL_FOLDER = "model"
EPILOG = """examples:
  python -m convert.continuations --prompts prompts.jsonl --out data/own/train.jsonl
  python -m convert.train_draft --data data/own --out runs/draft
  python -m ssmlx.generate --drafter "draft-model model=runs/draft/model" --prompt "..."

The draft model has the base model's embedding and LM head, and its first layers and final norm,
which are trained. The run saves its state as it goes. Stop it when you like: the same command
goes on, and ends with the same weights. OUT then holds the folder `model`, log.jsonl and
curves.png."""

_DEFAULTS = {**DEFAULTS, "learning_rate": 5e-4}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    description = "Make a small model that drafts for a model of the same vocabulary, in PyTorch."
    parser = make_parser(PROG, description, EPILOG)
    add_run_options(parser, with_trees=False)
    add_options(
        parser.add_argument_group("draft model"),
        ("--layers", "K", "its layers, the first of the base model (default: %(default)s)", 4),
        (
            "--num-draft-tokens",
            "N",
            "tokens of the chains that a validation replays (default: %(default)s)",
            DraftModelConfig().num_draft_tokens,
        ),
    )
    add_settings(parser, "optimisation", OPTIMISATION, _DEFAULTS)
    add_machine_options(parser)
    return parser.parse_args(argv)


def _main(args: argparse.Namespace) -> None:
    check_torch()
    import torch

    from ssmlx.training.job import prepare, read_base, run_to_end

    from .training.drafters import DraftObjective, build_draft, trained_weights, write_draft
    from .training.run import TorchTrainer, choose_device, freeze_base

    device = choose_device(args.device)
    dtype = getattr(torch, args.dtype)
    most = read_base(resolve_model(args.model))["num_hidden_layers"]
    for flag, value, limit, of in (
        ("--layers", args.layers, most, f", the layers of {args.model}"),
        ("--num-draft-tokens", args.num_draft_tokens, MAX_DRAFT_TOKENS, ""),
    ):
        fits = 1 <= value <= limit
        expected = f"1 to {limit}{of}"
        require(fits, f"{flag} {value}", expected=expected, do="correct the option")
    values = {name: getattr(args, name) for name in OPTIMISATION}
    # No streams, and every layer is trained.
    train = TrainConfig(num_streams=0, num_msa_layers=args.layers, prune_rank=0, **values)
    job, path = prepare(run_options(args), train)
    out = job.options.out
    folder = out / MODEL_FOLDER
    state = TorchTrainer.STATE_FILE
    require(  # not to replace a model that no run in this folder wrote
        (out / state).exists() or not folder.exists(),
        f"{folder} exists, and {state} beside it does not",
        expected="a new folder, or one of a stopped run",
        do="choose another --out",
    )
    model = build_draft(path, job.config, args.layers).to(device)
    freeze_base(model, dtype)
    identity = job.identity(args.dtype, PROG)
    objective = DraftObjective(model, job.train, None, device, dtype)
    trainer = TorchTrainer(objective, job.num_steps)
    run_to_end(
        job,
        trainer,
        prog=PROG,
        dtype=args.dtype,
        identity=identity,
        write=lambda _: write_draft(trained_weights(model), path, args.layers, folder),
        lower=lambda: objective.lower,
        replay_size=args.num_draft_tokens,
    )


main = command(PROG, parse_args, alone(_main))

if __name__ == "__main__":
    raise SystemExit(main())
