"""`python -m ssmlx.convert.train_heads`: train Medusa heads or an MLP speculator."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssmlx.commands.parser import add_options, make_parser, reject_given_options
from ssmlx.commands.running import make_main, with_lock_on_out_folder
from ssmlx.commands.setting_options import add_setting_options
from ssmlx.commands.train_options import (
    OPTIMISATION,
    add_run_options,
    read_run_options,
)
from ssmlx.errors import require
from ssmlx.loading.names import resolve_model
from ssmlx.settings import MAX_DRAFT_TOKENS, MAX_LAYERS, MAX_TREE_NODES, check_settings, setting
from ssmlx.training.config import TrainConfig

from . import check_torch
from .train import add_machine_options

if TYPE_CHECKING:
    from ssmlx.drafters.head_drafter import HeadConfig
    from ssmlx.training.job import Job
    from ssmlx.training.objective import Validation

    from .reference.heads import HeadReference

PROG = "ssmlx.convert.train_heads"
EPILOG = """examples:
  python -m ssmlx.convert.train_heads --kind medusa --data data/sql --out runs/medusa
  python -m ssmlx.convert --heads runs/medusa --out heads/medusa

  # an MLP speculator in the paper's two stages: on text, then on the model's own answers
  python -m ssmlx.convert.train_heads --kind mlp_speculator --data data/sql --out runs/stage1
  python -m ssmlx.convert.continuations --prompts prompts.jsonl --out data/own/train.jsonl
  python -m ssmlx.convert.continuations --prompts others.jsonl --out data/own/valid.jsonl
  python -m ssmlx.convert.train_heads --kind mlp_speculator --stage 2 --init runs/stage1 \\
      --data data/own --out runs/stage2

You may stop a run at any time. The same command continues it from the last saved state, and ends
with the same weights. At the end OUT has the heads, in the form in which others publish their kind.
It also has log.jsonl, and curves.png if matplotlib is installed."""

_MEDUSA = "medusa"
_SPECULATOR = "mlp_speculator"
_DEFAULT_HEADS = {_MEDUSA: 4, _SPECULATOR: 3}
_OPTIMISATION = {
    **{name: getattr(TrainConfig(), name) for name in OPTIMISATION},
    "learning_rate": 1e-3, "warmup": 0.05, "schedule": "cosine",
}  # fmt: skip
_LATE = {"batch_size": 64, "learning_rate": 1e-4, "max_length": 256}  # in stage 2
# Settings of one kind of heads only.
_ONLY = {
    _MEDUSA: ("num_layers", "share_lm_head", "decay"),
    _SPECULATOR: ("inner_dim", "tie_weights", "scale_input", "widths", "stage"),
}
# Settings that the heads of --init already have.
_SHAPE = ("num_heads", "num_layers", "share_lm_head", "inner_dim", "tie_weights", "scale_input",
          "draft_vocab_size")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Settings of the heads, in addition to those that all trainers share.

    `kind` is "medusa" or "mlp_speculator"; `inner_dim`, `tie_weights`, `scale_input` and `widths`
    are those of `MlpSpeculatorConfig`.
    """

    kind: str
    num_heads: int = setting(
        help="tokens that the heads guess ahead", least=1, most=MAX_DRAFT_TOKENS
    )
    num_layers: int = setting(1, "residual blocks of each head", least=0, most=MAX_LAYERS)
    share_lm_head: bool = setting(
        False, "heads have no matrices of their own: their blocks feed the model's LM head"
    )
    decay: float = setting(
        0.8, "lambda: the loss of head h has the weight lambda ** h", above=0, most=1
    )
    inner_dim: int = setting(0, "width of the states; 0 for the model's", least=0, most=2**16)
    tie_weights: bool = setting(False, "all stages have the same weights")
    scale_input: bool = setting(False, "normalise the hidden state first")
    widths: tuple[int, ...] = setting(
        (), "children of a draft tree's node at each stage", least=1, most=MAX_TREE_NODES
    )
    stage: int = setting(
        1,
        "1: the data is any text; 2: it is the model's own answers, as ssmlx.convert.continuations "
        "writes them",
        least=1,
        most=2,
    )

    def __post_init__(self) -> None:
        check_settings(self, do="correct the option")
        layers = "1 or more with --share-lm-head, or nothing would be trained"
        widths = f"{self.num_heads} numbers of 1 or more, one a head"
        for name, ok, expected in (
            ("num-layers", self.num_layers > 0 or not self.share_lm_head, layers),
            ("widths", len(self.widths) in (0, self.num_heads), widths),
        ):
            value = getattr(self, name.replace("-", "_"))
            said = " ".join(map(str, value)) if isinstance(value, tuple) else value
            require(ok, f"--{name} {said}", expected=expected, do="correct the option")


# An option's default, in words; nothing for a switch.
_DEFAULTS = {one.name: str(one.default or 0) for one in fields(HeadSettings)} | {
    "num_heads": "4 Medusa heads, 3 stages",
    "draft_vocab_size": "0",
    "widths": "6 3 2, then 1",
    "share_lm_head": "",
    "tie_weights": "",
    "scale_input": "",
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse options; those whose default depends on the kind or stage are None unless given."""
    parser = make_parser(PROG, "Train drafting heads on a frozen model, in PyTorch.", EPILOG)
    parser.add_argument(
        "--kind", choices=(_MEDUSA, _SPECULATOR), required=True, help="kind of the heads"
    )
    add_run_options(parser)
    for title, settings, names in (
        ("heads", HeadSettings, ("num_heads",)),
        ("draft vocabulary", TrainConfig, ("draft_vocab_size",)),
    ):
        group = parser.add_argument_group(title)
        add_setting_options(group, settings, names, shown=_DEFAULTS)
    add_options(
        parser.add_argument_group("model"),
        (
            "--lora",
            "FOLDER",
            "LoRA of the model that the heads draft for, as ssmlx.convert.continuations takes it",
            Path,
        ),
        ("--init", "FOLDER", "trained heads to start from, such as those of stage 1", Path),
    )
    for title, kind in (("Medusa heads", _MEDUSA), ("MLP speculator", _SPECULATOR)):
        group = parser.add_argument_group(title)
        add_setting_options(group, HeadSettings, _ONLY[kind], shown=_DEFAULTS)
    shown = {name: f"{_OPTIMISATION[name]}; {late} in stage 2" for name, late in _LATE.items()}
    group = parser.add_argument_group("optimisation")
    add_setting_options(group, TrainConfig, OPTIMISATION, defaults=_OPTIMISATION, shown=shown)
    add_machine_options(parser, "hidden states of the frozen model")
    return parser.parse_args(argv)


def build_head_settings(
    args: argparse.Namespace,
    # heads of --init, which decide number, shape, and widths unless given
    init: HeadReference | None,
) -> HeadSettings:
    for kind in {*_ONLY} - {args.kind}:
        reject_given_options(args, _ONLY[kind], f"--kind {kind}")
    require(
        args.stage != 2 or init is not None,
        "--stage 2 without --init",
        expected="the heads of stage 1",
        do="train stage 1 first, and give its folder",
    )
    given = {name: getattr(args, name) for name in ("num_heads", *_ONLY[args.kind])}
    given = {name: value for name, value in given.items() if value is not None}
    settings = {"num_heads": _DEFAULT_HEADS[args.kind], "widths": (), **given}
    if init is not None:
        reject_given_options(args, _SHAPE, "no --init, which has its own shape")
        settings["num_heads"] = init.config.num_levels
        settings["widths"] = settings["widths"] or getattr(init.config, "widths", ())
    return HeadSettings(kind=args.kind, **{**settings, "widths": tuple(settings["widths"])})


def build_head_config(
    settings: HeadSettings,
    vocab_size: int,  # V, of the base model
    width: int,  # D
    draft_vocab_size: int,  # Vd, how many tokens heads guess among; 0 for all V
) -> HeadConfig:
    from ssmlx.drafters.medusa import MedusaConfig
    from ssmlx.drafters.mlp_speculator import MlpSpeculatorConfig

    both = {"vocab_size": vocab_size, "draft_vocab_size": draft_vocab_size}
    if settings.kind == _MEDUSA:
        return MedusaConfig(
            num_heads=settings.num_heads,
            num_layers=settings.num_layers,
            hidden_size=width,
            shared_heads=tuple(range(settings.num_heads)) if settings.share_lm_head else (),
            **both,
        )
    return MlpSpeculatorConfig(
        emb_dim=width,
        inner_dim=settings.inner_dim,
        n_predict=settings.num_heads,
        tie_weights=settings.tie_weights,
        scale_input=settings.scale_input,
        top_k_tokens_per_head=settings.widths,
        **both,
    )


class _HeadsJob(NamedTuple):
    job: Job  # has the draft vocabulary of `init`, if given
    settings: HeadSettings
    init: HeadReference | None  # the heads of --init, whose training continues


def _read_heads_job(args: argparse.Namespace) -> _HeadsJob:
    """Read the job; batch size, learning rate and longest example differ in stage 2."""
    from ssmlx.json_files import read_json_rows
    from ssmlx.training.job import read_base_settings, read_job

    from .formats.heads import load_published_heads

    options = read_run_options(args)
    init = None
    if args.init is not None:
        init = load_published_heads(
            args.init, read_base_settings(resolve_model(options.model))["vocab_size"]
        )
        kind = init.config.kind
        found = f"--init {args.init} is a {kind}"
        require(kind == args.kind, found, expected=args.kind, do="give heads of one kind")
    settings = build_head_settings(args, init)
    vocab = None if init is None or init.draft_vocab is None else init.draft_vocab.numpy()
    if settings.stage == 2:
        path = options.data / "train.jsonl"
        for where, row in read_json_rows(path, "--data", "an object with completion_tokens"):
            require(
                "completion_tokens" in row,
                f"{where} has no completion_tokens",
                expected="in stage 2, the model's own answers",
                do="make them with `python -m ssmlx.convert.continuations`",
            )
    values = {name: getattr(args, name) for name in OPTIMISATION}
    for name, late in _LATE.items():
        if values[name] is None:
            values[name] = late if settings.stage == 2 else _OPTIMISATION[name]
    rate = settings.decay if settings.kind == _MEDUSA else 1.0
    train = TrainConfig(  # heads take the role of streams
        num_streams=settings.num_heads,
        num_msa_layers=1,
        root_init_rank=0,
        prune_rank=0,
        stream_weights=tuple(rate**head for head in range(settings.num_heads)),
        draft_vocab_size=(args.draft_vocab_size or 0) if vocab is None else len(vocab),
        **values,
    )
    job = read_job(options, train)
    job = job if init is None else replace(job, draft_vocab=vocab)
    return _HeadsJob(job, settings, init)


def train_heads(args: argparse.Namespace) -> None:
    check_torch()
    import torch

    from ssmlx.training.job import run_to_end

    from .formats.heads import check_base_sizes, save_published_heads
    from .training.heads import (
        HeadObjective,
        load_frozen_model,
        new_heads,
    )
    from .training.run import TorchTrainer, choose_device

    device = choose_device(args.device)
    dtype = getattr(torch, args.dtype)
    job, settings, init = _read_heads_job(args)
    out = job.options.out
    train = job.train
    frozen = load_frozen_model(job.base_folder, args.lora)
    lm_head = frozen.base.lm_head.weight.detach().clone()
    if init is None:
        vocab_size, width = lm_head.shape
        config = build_head_config(settings, vocab_size, width, train.draft_vocab_size or 0)
        model = new_heads(config, job.draft_vocab, train.seed, lm_head)
    else:
        model = init
        check_base_sizes(model.config, lm_head.shape[0], lm_head.shape[1], args.init)
    widths = settings.widths or getattr(model.config, "widths", ())
    objective = HeadObjective(model, frozen, train, widths, device, dtype)
    trainer = TorchTrainer(objective, job.num_steps)

    def write_heads(_: Validation) -> Path:
        save_published_heads(model, out, job.options.model, lm_head)
        return out

    run_to_end(
        job,
        trainer,
        prog=PROG,
        dtype=args.dtype,
        write_trained=write_heads,
        frozen_folders=[args.lora],
        start_folders=[args.init],
        other_settings=[asdict(settings)],
    )


main = make_main(PROG, parse_args, with_lock_on_out_folder(train_heads))

if __name__ == "__main__":
    raise SystemExit(main())
