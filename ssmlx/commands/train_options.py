"""The options of the training commands, one for each field of their settings."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import require
from ..json_files import read_json
from ..loading.folders import CONFIG_FILE
from ..loading.names import resolve_adapter
from ..settings import DEFAULT_MODEL
from ..training.config import (
    DRAFT_VOCAB_SIZE,
    ROOT_INIT_RANK,
    STREAM_INIT_RANK,
    RunOptions,
    TrainConfig,
)
from .parser import add_options, make_parser, reject_given_options, unescape_newlines
from .setting_options import add_setting_options

OPTIMISATION = ("epochs", "batch_size", "learning_rate", "schedule", "warmup", "weight_decay",
                "clip_norm", "max_length", "seed")  # fmt: skip
_F = {
    "stream_init": "low_rank; identity for value_rotation and without streams; with --init, what "
    "that has",
    "stream_init_rank": f"{STREAM_INIT_RANK}; 0 for identity",
}
_SHOWN = _F | {
    "draft_vocab_size": f"{DRAFT_VOCAB_SIZE}, or 0 if the model has fewer than twice as many",
    "root_init_rank": f"{ROOT_INIT_RANK}; 0 without streams; with --train-only, what --init has",
    "train_only": "everything",
}
_GROUPS: dict[str, tuple[str, ...]] = {
    "streams": ("num_streams", "num_msa_layers", "adapter_scope", "stream_design", "rotation_step",
                *_F, "root_init_rank", "prune_rank", "condition_rank",
                "draft_vocab_size"),
    "LoRA": ("lora_rank", "lora_alpha", "lora_modules"),
    "loss (eq. 5)": ("main_weight", "stream_weights", "prune_weight"),
    "optimisation": ("train_only", *OPTIMISATION[:3], "embedding_rate", *OPTIMISATION[3:], "pack",
                     "root_dropout"),
}  # fmt: skip


_NEW = {"streams": ("root_init_rank", "condition_rank"), "condition": ("condition_rank",)}
"""What an adapter may get that it was trained without, by the part that is trained."""


def make_training_parser(
    module: str, description: str, epilog: str, init_help: str, task_lora_help: str
) -> argparse.ArgumentParser:
    """The parser with the options that the MLX and PyTorch trainers share."""
    parser = make_parser(module, description, epilog)
    add_run_options(parser)
    add_options(
        parser,
        (
            "--init",
            "FOLDER",
            f"{init_help} whose weights the run starts from; what it lacks starts anew. With "
            "--train-only: an adapter, by its name or folder",
            Path,
        ),
        (
            "--task-lora",
            "FOLDER",
            f"{task_lora_help}. The model has it on every row, and streams are trained to draft "
            "for that model (with --adapter-scope streams); the LoRA does not change",
            Path,
        ),
    )
    for title, names in _GROUPS.items():
        add_setting_options(parser.add_argument_group(title), TrainConfig, names, shown=_SHOWN)
    return parser


def add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="a folder with train.jsonl and valid.jsonl, as mlx-lm's LoRA training takes it",
    )
    group.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where the run is written; the same command continues a stopped run",
    )
    add_options(
        group,
        ("--model", None, "the base model (default: %(default)s)", DEFAULT_MODEL),
        (
            "--template",
            None,
            "chat: the model's chat template; raw: none; or a text with {prompt} in it, \\n for a "
            "new line (default: %(default)s)",
            "chat",
        ),
    )
    add_setting_options(group, RunOptions)


def add_cache_option(group: argparse._ArgumentGroup, what: str) -> None:
    text = f"GB of disk for {what}; those that do not fit are computed anew at each step"
    default = float(RunOptions.cache_gb)
    add_options(group, ("--cache-gb", "X", f"{text} (default: %(default)s)", default))


def read_train_config(args: argparse.Namespace) -> TrainConfig:
    """The settings that the options give. With --train-only, those of streams and LoRA are taken
    from --init, but for the ranks of what is trained, and `args.init` becomes its folder; otherwise
    --init gives the form of f (eq. 3) alone."""
    values = {f.name: getattr(args, f.name) for f in fields(TrainConfig)}
    if args.train_only:
        return TrainConfig.from_dict_ignoring_unknown(values | _settings_kept_of_init(args))
    start = None if args.init is None else args.init / CONFIG_FILE
    if start and start.is_file() and all(values[name] is None for name in _F):
        found = read_json(start, "the settings of streams")
        if found.get("num_streams"):
            values |= {name: found[name] for name in _F if name in found}
    require(
        args.task_lora is None or args.adapter_scope == "streams",
        "--task-lora with --adapter-scope all, whose LoRA would act on every row too",
        expected="--adapter-scope streams",
        do="give that, or --init to train the task's LoRA further",
    )
    return TrainConfig.from_dict_ignoring_unknown(values)


def _settings_kept_of_init(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of --init, with ranks of parts that may be new; a rank that --init has precedes
    the option's."""
    folder = None if args.init is None else resolve_adapter(str(args.init))
    require(
        folder is not None,
        f"--train-only {args.train_only} without --init",
        expected="an adapter with streams",
        do="give its name or its folder",
    )
    assert folder is not None
    args.init = folder
    found = read_json(folder / CONFIG_FILE, "the settings of an adapter")
    defaults = {
        one.name: None if one.name in _SHOWN else one.default for one in fields(TrainConfig)
    }
    new = _NEW[args.train_only]
    names = {name for title in ("streams", "LoRA") for name in _GROUPS[title]} - {*new}
    given = (name for name in sorted(names) if getattr(args, name) != defaults[name])
    own = [name for name in given if getattr(args, name) != found.get(name)]
    own += ["template"] * (args.template not in ("chat", found.get("prompt_template")))
    reject_given_options(args, ("task_lora", *own), "the settings that --init has")
    ranks = {name: found.get(name, 0) or getattr(args, name) or 0 for name in new}
    for name, rank in ranks.items():
        asked = getattr(args, name)
        what = f"--{name.replace('_', '-')} {asked}"
        expected = f"{rank}, as {folder} has it"
        require(asked in (None, 0, rank), what, expected=expected, do="give that")
    return {name: found[name] for name in names if name in found} | ranks


def read_run_options(args: argparse.Namespace) -> RunOptions:
    """The options of a run; --template "chat" becomes None, "raw" becomes "{prompt}"."""
    templates = {"chat": None, "raw": "{prompt}"}
    text = unescape_newlines(args.template)
    given = {f.name: vars(args)[f.name] for f in fields(RunOptions) if f.name in vars(args)}
    return RunOptions(**{**given, "template": templates.get(text, text)})
