"""The options of both training commands, one for each field of `TrainConfig`, and their data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..commands.options import make_parser, template_text
from ..errors import InputError
from ..loading.names import CONFIG_FILE
from ..settings import (
    ADAPTER_SCOPES,
    DEFAULT_MODEL,
    STREAM_DESIGNS,
    STREAM_INITS,
    StreamConfig,
    TreeConfig,
    read_json,
)
from .config import SCHEDULES, STREAM_INIT_RANK, TrainConfig

F = ("stream_init", "stream_init_rank")
_CHOICES = {
    "adapter_scope": ADAPTER_SCOPES,
    "stream_design": STREAM_DESIGNS,
    "stream_init": STREAM_INITS,
    "schedule": SCHEDULES,
}
_GROUPS: dict[str, dict[str, str]] = {
    "streams": {
        "num_streams": "gamma, tokens guessed ahead; 0 trains the LoRA alone",
        "num_msa_layers": "Ns, top layers with multi-stream attention and LoRA",
        "adapter_scope": "all: the model is fine-tuned for the data; streams: LoRA on stream rows "
        "alone, which leaves the model's answers as they are (train on its own continuations)",
        "stream_design": "how streams differ: embeddings (eq. 3) or value_rotation (eq. 7)",
        "rotation_step": "radians that each stream's values are rotated by",
        "stream_init": "f of eq. 3: identity, low_rank B A h, or residual h + B A h. On SmolLM2 "
        "low_rank learned faster than identity, three times at first (default: low_rank; "
        "identity where streams rotate, or where there are none; with --init what that has)",
        "stream_init_rank": f"eta, the rank of f (default: {STREAM_INIT_RANK}; 0 for identity)",
        "prune_rank": "theta, the rank of the pruning adapter; 0 for none",
        "draft_vocab_size": "guess among this many of the data's most frequent tokens; 0 for all",
    },
    "LoRA": {
        "lora_rank": "rank",
        "lora_alpha": "numerator of the scale alpha / rank",
        "lora_modules": "linear modules, such as q_proj v_proj (default: every one)",
    },
    "loss (eq. 5)": {
        "main_weight": "alpha_0, of the next token",
        "stream_weights": "alpha_1 to alpha_gamma, of the speculative tokens; one for all",
        "prune_weight": "of the pruning adapter's own loss",
    },
    "optimisation": {
        "epochs": "passes over the data",
        "batch_size": "examples a step",
        "learning_rate": "AdamW's peak rate",
        "embedding_rate": "rate of the stream embeddings, as a multiple of the peak rate",
        "schedule": "course of the rate after its warm-up",
        "warmup": "share of the steps in which the rate rises",
        "weight_decay": "AdamW's decay",
        "clip_norm": "largest gradient norm",
        "max_length": "tokens of an example; longer answers are cut, longer prompts left out",
        "seed": "of the weights and of the order of the data",
    },
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A training run beside its settings.

    Attributes:
        data: folder with train.jsonl and valid.jsonl.
        out: folder for the checkpoint, the run's state, its log and its picture.
        model: the base model.
        template: text with `{prompt}`; None for the model's chat template.
        save_every, valid_every: steps between saved states, and between validations.
        valid_count: held-out examples that a validation replays.
        tree_size: nodes of the tree that it replays them with.
        max_steps: stop (and save) after this many steps in all; None for the whole run.
    """

    data: Path
    out: Path
    model: str
    template: str | None
    save_every: int
    valid_every: int
    valid_count: int
    tree_size: int
    max_steps: int | None

    def __post_init__(self) -> None:
        for name in ("save_every", "valid_every", "valid_count", "tree_size", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(
                    f"--{name.replace('_', '-')} {value}",
                    expected="1 or more",
                    do="correct the option",
                )
        TreeConfig(size=self.tree_size)


def training_parser(
    module: str, description: str, epilog: str, init: str
) -> argparse.ArgumentParser:
    """A parser with every option that the trainers share; `init` is what --init takes."""
    parser = make_parser(module, description, epilog)
    add_run_options(parser)
    add_init_option(parser, init)
    defaults = TrainConfig()
    for title, options in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, text in options.items():
            _add_option(group, name, text, None if name in F else getattr(defaults, name))
    return parser


def _add_option(group: argparse._ArgumentGroup, name: str, text: str, default: Any) -> None:
    flag, settings = "--" + name.replace("_", "-"), {"default": default, "help": text}
    if isinstance(default, tuple):
        kind = float if name == "stream_weights" else str
        shown = " ".join(map(str, default))
        settings["help"] += f" (default: {shown})" if shown else ""
        group.add_argument(flag, nargs="+", type=kind, metavar="X", **settings)
        return
    if default is not None:
        settings["help"] += " (default: %(default)s)"
    if name in _CHOICES:
        group.add_argument(flag, choices=_CHOICES[name], **settings)
    else:
        number = int if default is None else type(default)
        group.add_argument(flag, type=number, metavar="X", **settings)


def add_run_options(parser: argparse.ArgumentParser, *, with_trees: bool = True) -> None:
    """Data, folder, model, template, and how often to save and to validate.

    Args:
        parser: takes the options.
        with_trees: whether a validation replays trees, whose size is an option then.
    """
    group = parser.add_argument_group("run")
    group.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER",
        help="train.jsonl and valid.jsonl, as mlx-lm's LoRA training takes them",
    )  # fmt: skip
    group.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER",
        help="where checkpoint, log and picture go; the same command again resumes a stopped run",
    )  # fmt: skip
    group.add_argument(
        "--model", default=DEFAULT_MODEL, help="the base model (default: %(default)s)"
    )
    group.add_argument(
        "--template", default="chat",
        help="chat, the model's chat template; raw; or a text with {prompt}, with \\n for a new "
        "line. It travels with the adapter (default: %(default)s)",
    )  # fmt: skip
    trees = ("--tree-size", 16, "nodes of the best tree that a validation replays")
    parser.set_defaults(tree_size=trees[1])
    for flag, default, text in (
        ("--save-every", 50, "steps between saved states"),
        ("--valid-every", 200, "steps between validations"),
        ("--valid-count", 64, "held-out examples that a validation replays"),
        *([trees] if with_trees else []),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--max-steps", type=int, metavar="N", help="stop here, and save (default: the whole run)"
    )


def add_init_option(parser: argparse.ArgumentParser, what: str) -> None:
    """The weights that a run starts from; `what` is the folder that holds them."""
    parser.add_argument(
        "--init", type=Path, metavar="FOLDER",
        help=f"{what} whose weights this run starts from; what it lacks starts anew",
    )  # fmt: skip


def add_task_lora_option(parser: argparse.ArgumentParser, what: str) -> None:
    """The LoRA that the model has already; `what` is the folder that holds it."""
    parser.add_argument(
        "--task-lora", type=Path, metavar="FOLDER",
        help=f"{what}, which the model is to have on every row while streams learn to draft for "
        "it (--adapter-scope streams): its answers stay exactly what they are",
    )  # fmt: skip


def check_task_lora(args: argparse.Namespace) -> None:
    """Check that the LoRA of a task goes with the other options.

    Raises:
        InputError: the run would change what the model says.
    """
    if args.task_lora is not None and args.adapter_scope != "streams":
        raise InputError(
            "--task-lora with --adapter-scope all, whose LoRA would act on every row too",
            expected="--adapter-scope streams",
            do="give that, or --init to train the task's LoRA further",
        )


def check_scale(source: Path, found: float, expected: float) -> None:
    """Check that LoRA weights to start from act as strongly in the new run.

    Raises:
        InputError: their scale alpha / rank is another.
    """
    if not math.isclose(found, expected, rel_tol=1e-6):
        raise InputError(
            f"the LoRA in {source} has the scale alpha / rank {found:g}",
            expected=f"{expected:g}, this run's",
            do="set --lora-alpha to that scale times --lora-rank",
        )


def check_init(source: Path, found: StreamConfig, wanted: StreamConfig) -> None:
    """Check that streams to start from mean in the new run what they meant in theirs.

    Args:
        source: whose they are.
        found: its settings; without streams anything goes.
        wanted: the run's.

    Raises:
        InputError: they start, differ or stand otherwise.
    """
    if not found.num_streams:
        return
    for name in (*F, "stream_design", "rotation_step", "num_msa_layers"):
        before, now = getattr(found, name), getattr(wanted, name)
        if before != now:
            raise InputError(
                f"the streams in {source} have {name} {before}",
                expected=f"{now}, this run's",
                do=f"give --{name.replace('_', '-')} {before}",
            )


def check_shapes(source: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that every array to start from has one of its name and shape in the new run.

    Raises:
        InputError: it has none there, or one of another shape.
    """
    for name, array in found.items():
        here = list(wanted[name].shape) if name in wanted else None
        if list(array.shape) != here:
            raise InputError(
                f"{source} has {name} of shape {list(array.shape)}",
                expected="none of that name" if here is None else f"{here}",
                do="give this run the settings that it was trained with",
            )


def add_cache_option(group: argparse._ArgumentGroup, what: str) -> None:
    """How much of the disk `what` may take."""
    group.add_argument(
        "--cache-gb", type=float, default=8.0, metavar="X",
        help=f"disk that {what} may take; beyond it they are computed anew every step "
        "(default: %(default)s)",
    )  # fmt: skip


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The settings that the options ask for; f is that of --init where they do not name one.

    Raises:
        InputError: one of them makes no sense.
    """
    values = {f.name: getattr(args, f.name) for f in fields(TrainConfig)}
    if all(values[name] is None for name in F):
        values |= _f_of(args.init)
    return TrainConfig.from_dict(values)


def _f_of(folder: Path | None) -> dict[str, Any]:
    """f of eq. 3 in the adapter or checkpoint that a run starts from, if that has streams."""
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return {}
    found = read_json(folder / CONFIG_FILE, "the settings of streams")
    return {name: found[name] for name in F if name in found} if found.get("num_streams") else {}


def run_options(args: argparse.Namespace) -> RunOptions:
    """The rest of the options."""
    templates = {"chat": None, "raw": "{prompt}"}
    text = template_text(args.template)
    values = {f.name: getattr(args, f.name) for f in fields(RunOptions) if f.name != "template"}
    return RunOptions(template=templates.get(text, text), **values)
