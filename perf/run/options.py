"""Options that the measuring commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from .results import RESULTS
from .tasks import TASKS

BASE = "smollm2-135m-q4_1"


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
