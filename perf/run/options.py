"""Options that the measuring commands share, and what those of a sample name."""

from __future__ import annotations

import argparse
from pathlib import Path

from convert.formats.adapter import read_checkpoint
from ssmlx.errors import require
from ssmlx.loading.adapter import Adapter
from ssmlx.loading.load import load_base
from ssmlx.loading.names import resolve_adapter, resolve_model
from ssmlx.settings import AdapterScope

from .experiment import Experiment
from .results import RESULTS, ROOT
from .target import Weights, read_own_lora
from .tasks import CHAT, SQL, TASKS, read_examples

BASE = "smollm2-135m-q4_1"
CHECKPOINT = ROOT / "examples" / "smollm2-135m-sql"


def add_base(group: argparse._ActionsContainer) -> None:
    """The base model, by default that of the bundled adapters."""
    group.add_argument(
        "--model", default=BASE,
        help="the base model: a local folder, a Hub name or an alias (default: %(default)s)",
    )  # fmt: skip


def add_max_tokens(group: argparse._ActionsContainer) -> None:
    """How long answers may be."""
    most = ", ".join(f"{task.name} {task.max_tokens}" for task in TASKS.values())
    group.add_argument("--max-tokens", type=int, help=f"longest answer (default: {most})")


def add_out(group: argparse._ActionsContainer) -> None:
    """Where results go."""
    group.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: %(default)s"
    )


def add_fresh(group: argparse._ActionsContainer) -> None:
    """Whether kept answers count."""
    group.add_argument("--fresh", action="store_true", help="use no answers of an earlier run")


def split_name(item: str) -> tuple[str | None, str]:
    """`NAME=VALUE` in two; where there is no "=", or the whole is a path, there is no name."""
    name, equals, value = item.partition("=")
    is_whole = not equals or Path(item).expanduser().exists()
    return (None, item) if is_whole else (name, value)


def check_counts(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End with one line where an option is below 1, or one of its numbers is."""
    for name in names:
        value = getattr(args, name)
        least = min(value) if isinstance(value, list) else value
        if least is not None and least < 1:
            parser.error(f"--{name.replace('_', '-')} {least}: expected 1 or more")


def add_sample_options(parser: argparse.ArgumentParser, count: int) -> None:
    """What to measure; `count` prompts by default."""
    group = parser.add_argument_group("sample")
    group.add_argument(
        "--adapter", metavar="NAME|FOLDER",
        help="an adapter that ships with ssmlx, or a folder (default: the sample checkpoint, "
        f"{CHECKPOINT.relative_to(ROOT)})",
    )  # fmt: skip
    group.add_argument(
        "--model", help="the adapter's base model (default: the one that it was trained on)"
    )
    group.add_argument(
        "--prompts", type=Path, default=SQL.test, metavar="FILE",
        help='JSON objects with a "prompt", one a line (default: the SQL prompts of examples/data)',
    )  # fmt: skip
    group.add_argument(
        "--count", type=int, default=count, help="the first N prompts (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=64)


def sample_experiment(args: argparse.Namespace, scope: AdapterScope) -> Experiment:
    """What the options name, without systems; the sample checkpoint is read with `scope`.

    Raises:
        InputError: the adapter, its base or the prompts are missing or broken.
    """
    examples, name = read_examples(args.prompts, CHAT, args.count), CHECKPOINT.name
    if args.adapter is None:
        require(
            args.model is None,
            "--model would do nothing here", expected="--adapter", do="drop --model",
        )  # fmt: skip
        weights = sample_weights(scope)
    else:
        folder = resolve_adapter(args.adapter)
        require(
            folder is not None,
            f"--adapter {args.adapter}",
            expected="streams to measure",
            do="name an adapter or its folder",
        )
        assert folder is not None
        name, adapter = folder.resolve().name, adapter_with_streams(folder)
        base = resolve_model(args.model or adapter.config.base_model or BASE)
        weights = Weights(base, adapter=adapter, folder=folder)
    data = args.prompts.name
    return Experiment(name=name, weights=weights, systems=(), examples=examples, data=data)


def sample_weights(scope: AdapterScope) -> Weights:
    """The sample checkpoint on its base, its LoRA of this scope."""
    base = resolve_model(BASE)
    backbone, _ = load_base(base, "float32")
    adapter = read_checkpoint(
        CHECKPOINT, CHECKPOINT / "streams.safetensors", backbone, scope=scope, base_model=BASE
    )
    return Weights(base, adapter=adapter, folder=CHECKPOINT)


def adapter_with_streams(folder: Path) -> Adapter:
    """An adapter that drafts.

    Raises:
        InputError: it is broken, a fused model, or has no streams.
    """
    adapter = read_own_lora(folder)
    require(
        adapter.config.num_streams > 0,
        f"{folder} has no streams",
        expected="an adapter that drafts",
        do="choose another one",
    )
    return adapter
