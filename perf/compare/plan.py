"""A run of `perf.compare`: what is asked, with which weights, and who can answer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ssmlx.commands.options import Parser, add_tree_options, generate_config
from ssmlx.errors import InputError, require
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import bundled_adapters, resolve_adapter, resolve_model
from ssmlx.settings import GenerateConfig, SamplingConfig

from ..run.experiment import Experiment
from ..run.target import (
    CHECKPOINTS,
    DRAFT_ALONE,
    DRAFT_MODEL,
    MLX_LM,
    PLAIN,
    STREAMS,
    System,
    Weights,
    read_own_lora,
)
from ..run.tasks import TASKS, data_file, read_examples, scorer_of

SYSTEMS = (MLX_LM, PLAIN, STREAMS, *CHECKPOINTS, "lookahead", "prompt-lookup")
_RESERVED = ("model", "heads", "head", "acceptance", "epsilon", "delta", "attention")


@dataclass(frozen=True)
class Plan:
    """What is measured, and why a system does not take part, by its name."""

    experiment: Experiment
    data: Path
    left_out: Mapping[str, str]


def make_plan(args: argparse.Namespace) -> Plan:
    """Check what can be checked without loading a model.

    Raises:
        InputError: something is missing, broken, or does not fit the rest.
    """
    task = TASKS[args.task]
    systems = parse_systems(args.systems, _sampling_of(args), args.max_tokens or task.max_tokens)
    data = data_file(task, args.data, args.data_dir)
    examples = read_examples(data, task, args.count)
    scorer_of(task)
    weights = _weights_of(args)
    lacking = _lacking(weights)
    taking_part = [system for system in systems if system.kind not in lacking]
    drafts = [system for system in taking_part if system.kind == DRAFT_MODEL]
    alone = [System(DRAFT_ALONE, DRAFT_ALONE, one.config) for one in drafts[:1]]
    make_folder(args.out)
    experiment = Experiment(
        name=f"compare-{task.name}",
        weights=weights,
        systems=[*taking_part, *alone],
        examples=examples,
        task=task,
        repeats=args.repeats,
        out=args.out,
        fresh=args.fresh,
    )
    left_out = {one.name: lacking[one.kind] for one in systems if one.kind in lacking}
    return Plan(experiment, data, left_out)


def _sampling_of(args: argparse.Namespace) -> SamplingConfig:
    """Greedy, or top-k sampling under a seed, so that every drafter must write the same."""
    for flag, value in (("--top-k", args.top_k), ("--seed", args.seed)):
        require(
            args.temp != 0 or not value,
            f"{flag} would do nothing here", expected="--temp", do=f"drop {flag}",
        )  # fmt: skip
    return SamplingConfig(temp=args.temp, top_k=args.top_k, seed=args.seed if args.temp else None)


def parse_systems(
    texts: Sequence[str], sampling: SamplingConfig, max_tokens: int = 256
) -> list[System]:
    """The systems to run, mlx-lm and plain decoding always among them.

    Raises:
        InputError: one is unknown, named twice, or its options are wrong.
    """
    missing = [kind for kind in (MLX_LM, PLAIN) if kind not in texts]
    systems: dict[str, System] = {}
    for text in (*missing, *texts):
        name, kind, config = _parse_system(text)
        require(
            name not in systems,
            f"--systems names {text!r} twice", expected="each once", do="drop one",
        )  # fmt: skip
        config = replace(
            config, max_tokens=max_tokens,
            temp=sampling.temp, top_k=sampling.top_k, seed=sampling.seed,
        )  # fmt: skip
        systems[name] = System(name, kind, config)
    return list(systems.values())


class _SystemParser(Parser):
    """The drafting options of ssmlx.generate, whose mistakes are told as a system's."""

    def error(self, message: str) -> NoReturn:
        """Tell what was wrong."""
        raise InputError(
            f"--systems: {self.prog} ({message})",
            expected="a system, or in quotes a system and drafting options of ssmlx.generate",
            do="see python -m ssmlx.generate --help",
        )


def _parse_system(text: str) -> tuple[str, str, GenerateConfig]:
    """`streams lookup=8 --tree full`: a drafter with its keys, and options of ssmlx.generate."""
    words = text.split()
    kind, flags = next(iter(words), ""), [n for n, word in enumerate(words) if word[0] == "-"]
    require(
        kind in SYSTEMS and not (kind in (MLX_LM, PLAIN) and words[1:]),
        f"--systems {text!r}",
        expected="one of " + ", ".join(SYSTEMS) + "; those that draft with options, in quotes",
        do='write such as --systems mlx-lm streams "streams --tree full"',
    )
    name = " ".join(words)
    if kind == MLX_LM:
        return name, kind, GenerateConfig(decoding="plain")
    first = next(iter(flags), len(words))
    parser = _SystemParser(prog=name, add_help=False, allow_abbrev=False)
    add_tree_options(parser.add_argument_group())
    for key in words[1:first]:
        if key.partition("=")[0] in _RESERVED:
            parser.error(f"{key} is not a system's to choose here")
    args = parser.parse_args(words[first:])
    args.decoding, args.drafter = PLAIN, None
    if kind != PLAIN:
        args.decoding, args.drafter = "streaming", " ".join(words[:first])
    # What its name says, on every machine: no profile of this one decides.
    return name, kind, generate_config(args).with_default_shape()


def _weights_of(args: argparse.Namespace) -> Weights:
    """The target, by default with the bundled adapter of the task's name, and what drafts."""
    folder = bundled_adapters().get(args.task)
    if args.adapter is not None:
        folder = resolve_adapter(args.adapter)
    given = {kind: getattr(args, kind.replace("-", "_")) for kind in CHECKPOINTS}
    checkpoints = {
        kind: resolve_model(value) if kind == DRAFT_MODEL else Path(value).expanduser()
        for kind, value in given.items()
        if value is not None
    }
    adapter = None if folder is None else read_own_lora(folder)
    base = resolve_model(args.model)
    return Weights(base, args.dtype, adapter=adapter, folder=folder, checkpoints=checkpoints)


def _lacking(weights: Weights) -> dict[str, str]:
    """Which kinds of systems lack their weights, and how to give them."""
    lacking = {
        kind: f"no --{kind} FOLDER" for kind in CHECKPOINTS if kind not in weights.checkpoints
    }
    if weights.adapter is None:
        lacking[STREAMS] = "no --adapter FOLDER"
    elif not weights.adapter.config.num_streams:
        lacking[STREAMS] = "the adapter has no streams"
    return lacking
