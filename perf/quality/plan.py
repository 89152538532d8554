"""A run of `perf.quality`, checked before its first answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.api import check_prompt
from ssmlx.commands.options import generate_config
from ssmlx.errors import InputError
from ssmlx.loading.files import make_folder
from ssmlx.loading.load import load_base, load_tokenizer
from ssmlx.loading.names import resolve_model
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig, TreeConfig

from ..run.systems import (
    ModelUnderTest,
    adapter_system,
    base_systems,
    baseline_system,
    named_adapters,
    with_mlx_lm,
)
from ..run.tasks import TASKS, Example, Task, data_file, read_examples, scorer_of


@dataclass(frozen=True)
class Plan:
    """A checked run: nothing that a user can get wrong comes up after this."""

    task: Task
    model: str
    weights: Path
    data: Path
    out: Path
    examples: Sequence[Example]
    systems: Sequence[ModelUnderTest]
    max_tokens: int


def make_plan(args: argparse.Namespace) -> Plan:
    """Check everything that a user gives, before the first answer.

    Raises:
        InputError: something is missing, broken, or does not fit the rest.
    """
    task = TASKS[args.task]
    data = data_file(task, args.data, args.data_dir)
    streaming = streaming_variants(args)
    folders = named_adapters(args.adapter)
    examples = read_examples(data, task, args.count)
    scorer_of(task)
    path = resolve_model(args.model)
    backbone, settings = load_base(path, "float32")
    tokenizer = load_tokenizer(path, settings)
    adapters = [
        adapter_system(name, folder, backbone, streaming, args.template)
        for name, folder in folders.items()
    ]
    systems = with_mlx_lm(adapters + plain_systems(args, adapters, backbone), args.with_mlx_lm)
    check_prompts(StreamFusedModel(backbone), tokenizer, systems, examples)
    make_folder(args.out)
    return Plan(task, args.model, path, data, args.out, examples, systems, args.max_tokens)


def plain_systems(
    args: argparse.Namespace, adapters: list[ModelUnderTest], backbone: Backbone
) -> list[ModelUnderTest]:
    """What the adapters are compared with."""
    plain = {"plain": GenerateConfig(decoding="plain", max_tokens=args.max_tokens)}
    systems = base_systems(adapters, plain)
    if args.baseline is not None:
        first = adapters[0]
        systems.append(baseline_system(args.baseline, backbone, plain, first, args.template))
    return systems


def check_prompts(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    systems: Iterable[ModelUnderTest],
    examples: Sequence[Example],
) -> None:
    """Check that every system has room for every prompt."""
    for system in systems:
        for example in examples:
            tokens = example.tokens(model, tokenizer, system.template)
            check_prompt(model, len(tokens))


def streaming_variants(args: argparse.Namespace) -> dict[str, GenerateConfig]:
    """The trees to try, by label.

    Raises:
        InputError: an option is out of range, or could have no effect.
    """
    config = generate_config(args).with_default_shape()
    if config.drafter not in (None, "streams"):
        raise InputError(
            f"--drafter {args.drafter}", expected="streams, alone or with its keys", do="drop it"
        )
    if args.trees is None:
        assert config.tree is not None
        return {draft_label(config.tree, config.lookup_nodes): config}
    for name in ("tree", "tree_width", "tree_size"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} beside --trees", expected="one of them", do=f"drop {flag}")
    nodes = config.lookup_nodes
    return {
        draft_label(tree, nodes): replace(config, tree=tree) for tree in parse_trees(args.trees)
    }


def parse_trees(text: str) -> list[TreeConfig]:
    """`full:2,best:16` as trees.

    Raises:
        InputError: a tree is not KIND:N.
    """
    trees = []
    for item in text.split(","):
        kind, _, number = item.strip().partition(":")
        if kind not in ("full", "best") or not number.isdigit():
            raise InputError(
                f"--trees {item.strip()!r}",
                expected="full:K (children a level) or best:N (nodes), with commas between",
                do='write such as --trees "full:2,best:16"',
            )
        size = {"width": int(number)} if kind == "full" else {"size": int(number)}
        trees.append(TreeConfig(kind="full" if kind == "full" else "best", **size))
    return trees


def draft_label(tree: TreeConfig, lookup_nodes: int) -> str:
    """A tree, and the nodes beside it that look up the text, in a few characters."""
    return tree_label(tree) + (f" + {lookup_nodes} looked up" if lookup_nodes else "")


def tree_label(tree: TreeConfig) -> str:
    """`full:2`, `best:16`, or `best:16, 3 a level`."""
    if tree.kind == "full":
        return f"full:{tree.full_width}"
    return f"best:{tree.size}" + (f", {tree.width} a level" if tree.width else "")
