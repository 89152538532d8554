"""Options that the measuring commands share, and the experiment that they describe."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ssmlx.commands.decoding_options import add_tree_options, generate_config
from ssmlx.commands.parser import Parser, add_int_options, add_options
from ssmlx.drafters.option import parse_drafter_option
from ssmlx.errors import InputError, require
from ssmlx.loading.adapter import StreamAdapter
from ssmlx.loading.files import make_folder
from ssmlx.loading.model_heads import has_own_mtp_head
from ssmlx.loading.names import bundled_adapters, resolve_adapter, resolve_model
from ssmlx.settings import GenerateConfig, SamplingConfig

from . import target
from .experiment import Experiment
from .results import RESULTS
from .target import DRAFT_MODEL, MLX_LM, MTP, PLAIN, STREAMS, TEXT, System, Weights
from .tasks import TASKS, find_data_file, make_scorer, read_examples

BASE = "smollm2-135m-q4_1"
DEFAULT = "default"  # the default for users; with `TEXT`, on the target without streams
CONTROLLED = {DEFAULT: STREAMS, TEXT: TEXT}  # systems without settings, and their kinds
# the systems that `trees` stands for
TREES = (
    "streams --tree full --tree-width 1",
    "streams --tree full --tree-width 2",
    "streams --tree best --tree-size 16",
    "streams --tree full --tree-width 2 --prune budget --prune-to 8",
    "streams --tree full --tree-width 2 --prune threshold=0.05",
    "streams --tree best --tree-size 16 --prune budget --prune-to 8",
)
SYSTEMS = (MLX_LM, PLAIN, STREAMS, *target.CHECKPOINTS, "lookahead", "prompt-lookup")
_RESERVED = ("model", "heads", "head", "acceptance", "epsilon", "delta", "attention")


def add_model_option(group: argparse._ActionsContainer) -> None:
    text = "the base model: a local folder, a Hub name or an alias (default: %(default)s)"
    add_options(group, ("--model", None, text, BASE))


def add_out_option(group: argparse._ActionsContainer) -> None:
    add_options(group, ("--out", "FOLDER", "folder of the results (default: %(default)s)", RESULTS))


def split_name_and_value(item: str) -> tuple[str | None, str]:
    """Split at the first "="; the name is None without "=", or if the whole is an existing path."""
    name, equals, value = item.partition("=")
    is_whole = not equals or Path(item).expanduser().exists()
    return (None, item) if is_whole else (name, value)


def check_counts(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *names: str,  # with underscores; a value is a number, a list of numbers or None
) -> None:
    """Check that counts are positive; else exit code 2 with one line."""
    for name in names:
        value = getattr(args, name)
        least = min(value) if isinstance(value, list) else value
        if least is not None and least < 1:
            parser.error(f"--{name.replace('_', '-')} {least}: expected 1 or more")


def add_experiment_options(
    parser: argparse.ArgumentParser,
    # receives --task, which is required without it
    alternatives: argparse._MutuallyExclusiveGroup | None = None,
    *,
    tasks: Sequence[str] = (),  # defaults of --task, which then takes several
    systems: Sequence[str] = SYSTEMS,
    repeats: int = 1,
    dtypes: Sequence[str] = (),  # defaults of --dtype, which then takes several
) -> None:
    """Add the options that `build_task_experiment` reads, except --out."""
    data = parser.add_argument_group("data")
    shown = f" (default: {' '.join(tasks)})" if tasks else ""
    task = (alternatives or data).add_argument(
        "--task",
        choices=tuple(TASKS),
        default=tasks or None,
        nargs="+" if tasks else None,
        help=f"task whose prompts are answered{shown}",
    )
    task.required = alternatives is None and not tasks
    add_options(
        data,
        (
            "--data",
            "FILE.jsonl",
            "data of the task, a JSON object per line: prompt, and completion or references; for "
            "spec_bench its question.jsonl (default: the task's file in --data-dir, else the one "
            "in examples/data)",
            Path,
        ),
        ("--data-dir", "FOLDER", "folder with TASK/test.jsonl and spec_bench/question.jsonl", Path),
        ("--count", "N", "use the first N prompts (default: all)", int),
    )
    weights = parser.add_argument_group("weights")
    add_model_option(weights)
    weights.add_argument(
        "--dtype",
        choices=(*target.FLOATS, *target.PACKED),
        nargs="+" if dtypes else None,
        default=dtypes or "float32",
        help="type of all weights; 8bit and 4bit have float16 activations "
        f"(default: {' '.join(dtypes) or 'float32'})",
    )
    add_options(
        weights,
        (
            "--adapter",
            "NAME|FOLDER",
            "adapter, or `none` (default: the bundled one with the task's name if there is one; "
            "chat for spec_bench)",
            str,
        ),
        *(
            (
                f"--{kind}",
                _checkpoint_metavar(kind),
                f"weights of the drafter {kind}"
                + (" (default: the base model's own, if it has them)" if kind == MTP else ""),
                str,
            )
            for kind in target.CHECKPOINTS
        ),
    )
    group = parser.add_argument_group("run")
    most = ", ".join(f"{task.name} {task.max_tokens}" for task in TASKS.values())
    add_options(
        group,
        (
            "--systems",
            "SYSTEM",
            f"ways to decode: {', '.join(SYSTEMS)}; {DEFAULT}: what users get without options; "
            f"{TEXT}: the same without streams; trees: streams with every kind of tree and "
            "pruning. mlx-lm and plain always take part (default: "
            f"{'all' if systems == SYSTEMS else ', '.join(systems)})",
            list(systems),
        ),
        ("--max-tokens", None, f"maximum tokens of an answer (default: {most})", int),
        ("--temp", None, "sampling temperature; 0 is greedy (default: 0)", 0.0),
        (
            "--costs",
            "FOLDER",
            f"folder where {DEFAULT} keeps measured costs of calls; an empty one starts "
            "without those of earlier runs (default: costs in --out)",
            Path,
        ),
        ("--fresh", None, "ignore answers of an earlier run", bool),
    )
    add_int_options(
        group,
        ("repeats", repeats, "how often every prompt is answered"),
        ("top-k", 0, "sample from the K likeliest tokens; 0 for all"),
        ("seed", 0, "seed of sampling"),
    )


def _checkpoint_metavar(kind: str) -> str:
    """The metavar, MODEL if a Hub name is accepted."""
    return "MODEL" if kind in (DRAFT_MODEL, MTP) else "FOLDER"


def build_task_experiment(
    args: argparse.Namespace,  # with one --task and one --dtype
    measurement: str,  # begins the names of files, such as "compare"
) -> Experiment:
    """Build the experiment; loads no model, but a named one may be downloaded.

    Systems that lack weights, or the pruning adapter that they ask for, are left out, and named on
    standard error. If a draft model drafts, it also takes part alone.
    """
    task = TASKS[args.task]
    for flag, value in (("--top-k", args.top_k), ("--seed", args.seed)):
        require(
            args.temp != 0 or not value,
            f"{flag} would do nothing here",
            expected="--temp above 0",
            do=f"omit {flag}",
        )
    # Seeded, so that every drafter must write the same answer.
    seed = args.seed if args.temp else None
    sampling = SamplingConfig(temp=args.temp, top_k=args.top_k, seed=seed)
    max_tokens = args.max_tokens or task.max_tokens
    systems = parse_systems_with_baselines(args.systems, sampling, max_tokens)
    data = find_data_file(task, args.data, args.data_dir)
    examples = read_examples(data, task, args.count)
    make_scorer(task)
    require(
        args.costs is None or any(one.config.is_controlled for one in systems),
        "--costs would do nothing here",
        expected=f"{DEFAULT} or {TEXT} among --systems",
        do="omit --costs",
    )
    weights = _find_weights(args)
    # Which kinds of systems lack their weights, and how to give them.
    lacking = {
        kind: f"no --{kind} {_checkpoint_metavar(kind)}"
        for kind in target.CHECKPOINTS
        if kind not in weights.checkpoints
    }
    if MTP in lacking:
        lacking[MTP] += ", and the base model has no MTP head of its own"
    if weights.adapter is None:
        lacking[STREAMS] = "no --adapter FOLDER"
    elif not weights.adapter.config.num_streams:
        lacking[STREAMS] = "the adapter has no streams"
    left_out = {one.name: lacking[one.kind] for one in systems if one.kind in lacking}
    if weights.adapter and STREAMS not in lacking and weights.adapter.streams.prune is None:
        prunes = {one.name: one.config.prune for one in systems if one.kind == STREAMS}
        pruned = [name for name, prune in prunes.items() if prune and prune.kind != "off"]
        left_out |= dict.fromkeys(pruned, "the adapter has no pruning adapter")
    for system, why in left_out.items():
        print(f"{task.name}: {system} is left out, {why}", file=sys.stderr)
    taking_part = [system for system in systems if system.name not in left_out]
    drafts = [system for system in taking_part if system.kind == DRAFT_MODEL]
    alone = [System(target.DRAFT_ALONE, target.DRAFT_ALONE, one.config) for one in drafts[:1]]
    make_folder(args.out)
    return Experiment(
        name=f"{measurement}-{task.name}",
        weights=weights,
        systems=[*taking_part, *alone],
        examples=examples,
        task=task,
        repeats=args.repeats,
        out=args.out,
        fresh=args.fresh,
        data=data.name,
        left_out=left_out,
    )


class _SystemParser(Parser):
    """A parser that raises its errors as an `InputError` about --systems."""

    def error(self, message: str) -> NoReturn:
        raise InputError(
            f"--systems: {self.prog} ({message})",
            expected="a system, or in quotes a system and drafting options of ssmlx.generate",
            do="see python -m ssmlx.generate --help",
        )


def parse_systems_with_baselines(
    # a system's name, or a drafter with options of ssmlx.generate, or "trees"
    texts: Sequence[str],
    sampling: SamplingConfig,
    max_tokens: int = 256,
) -> list[System]:
    """Parse systems; mlx-lm and plain decoding are put first if they are missing."""
    texts = [name for text in texts for name in (TREES if text == "trees" else (text,))]
    missing = [kind for kind in (MLX_LM, PLAIN) if kind not in texts]
    systems: dict[str, System] = {}
    for text in (*missing, *texts):
        system = _parse_system(text)
        require(
            system.name not in systems,
            f"--systems names {text!r} twice",
            expected="each once",
            do="omit one",
        )
        config = replace(
            system.config,
            max_tokens=max_tokens,
            seed=sampling.seed,
            **vars(sampling.numbers()),  # overrides the model's generation_config.json
        )
        systems[system.name] = replace(system, config=config)
    return list(systems.values())


def _parse_system(
    text: str,  # such as `draft-model width=2 --tree full`
) -> System:
    """Parse a system; all but mlx-lm, plain decoding, `CONTROLLED` draft at every call."""
    words = text.split()
    kind = next(iter(words), "")
    flags = [n for n, word in enumerate(words) if word[0] == "-"]
    require(
        kind in (*SYSTEMS, *CONTROLLED)
        and not (kind in (MLX_LM, PLAIN, *CONTROLLED) and words[1:]),
        f"--systems {text!r}",
        expected=f"one of {', '.join((*SYSTEMS, *CONTROLLED))}; those that draft with options, in "
        "quotes",
        do='for example: --systems mlx-lm streams "streams --tree full"',
    )
    name = " ".join(words)
    if kind in (MLX_LM, PLAIN):
        return System(name, kind, GenerateConfig(decoding="plain"))
    if kind in CONTROLLED:
        return System(name, CONTROLLED[kind], GenerateConfig())
    first = next(iter(flags), len(words))
    parser = _SystemParser(prog=name, add_help=False, allow_abbrev=False)
    add_tree_options(parser.add_argument_group())
    for key in words[1:first]:
        if key.partition("=")[0] in _RESERVED:
            parser.error(f"{key} cannot be set for a system")
    args = parser.parse_args(words[first:])
    args.decoding = "speculative"
    args.drafter = parse_drafter_option(" ".join(words[:first]))
    # Draft at every call, so that a system is the same on every machine.
    return System(name, kind, generate_config(args).with_default_shape())


def _find_weights(args: argparse.Namespace) -> Weights:
    """Find the weights that are named, which may be downloaded; loads only the adapter."""
    folder = bundled_adapters().get(TASKS[args.task].adapter or args.task)
    if args.adapter is not None:
        folder = resolve_adapter(args.adapter)
    given = {kind: getattr(args, kind.replace("-", "_")) for kind in target.CHECKPOINTS}
    checkpoints = {
        kind: resolve_model(value) if kind in (DRAFT_MODEL, MTP) else Path(value).expanduser()
        for kind, value in given.items()
        if value is not None
    }
    adapter = None if folder is None else target.read_adapter_with_own_lora(folder)
    base = resolve_model(args.model)
    if MTP not in checkpoints and has_own_mtp_head(base):
        checkpoints[MTP] = base
    costs = (args.costs or args.out / "costs").expanduser().resolve()
    return Weights(
        base, args.dtype, adapter=adapter, folder=folder, checkpoints=checkpoints, costs=costs
    )


def read_adapter_with_streams(
    name: str,  # as `resolve_adapter` takes it; may be downloaded
) -> tuple[Path, StreamAdapter]:
    folder = resolve_adapter(name)
    adapter = None if folder is None else target.read_adapter_with_own_lora(folder)
    if folder is None or adapter is None or not adapter.config.num_streams:
        raise InputError(
            f"--adapter {name} has no streams",
            expected="streams to measure",
            do="name an adapter that drafts, or its folder",
        )
    return folder, adapter
