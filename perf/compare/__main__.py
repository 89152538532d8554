"""Tables 1 and 2 of the paper: every way to decode, side by side on the same target.

Systems take turns prompt by prompt in an order that rotates; mlx-lm's own stream_generate is the
baseline of every speed-up, and plain decoding what every system's tokens must be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ssmlx.commands.options import Parser, add_tree_options, generate_config, make_parser, run
from ssmlx.errors import InputError, require
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import bundled_adapters, resolve_adapter, resolve_model
from ssmlx.settings import GenerateConfig, SamplingConfig, read_json
from ssmlx.tuning.report import publish

from ..run.experiment import Experiment, failures, result_of, task_result
from ..run.options import add_base, add_fresh, add_max_tokens, check_counts
from ..run.results import RESULTS, reading
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
from ..run.tasks import TASKS, add_data_options, data_file, read_examples, scorer_of
from .report import check_markers, draw, markdown, report, rewrite

SYSTEMS = (MLX_LM, PLAIN, STREAMS, *CHECKPOINTS, "lookahead", "prompt-lookup")
_RESERVED = ("model", "heads", "head", "acceptance", "epsilon", "delta", "attention")
PROG = "perf.compare"
EPILOG = """examples:
  python -m perf.compare --task sql --count 20 --systems streams lookahead prompt-lookup
  python -m perf.compare --task e2e --data e2e.jsonl --adapter adapters/e2e \\
      --medusa heads/e2e-medusa --draft-model org/small --out e2e
  python -m perf.compare --task sql --systems "streams --tree full --tree-width 2" \\
      "streams --tree full --tree-width 4" "medusa --tree-size 32"
  python -m perf.compare --from sql/compare.json e2e/compare.json --readme README.md

A system's own options are those of python -m ssmlx.generate, with it in quotes. A system whose
weights are not given is left out, and the report says so. For an adapter of scope "all" the
target of every system is the base with its LoRA merged; for scope "streams" it is the base.

Writes compare.json, .txt and .png. Every answer is kept in compare-TASK-*.part.jsonl as it comes:
the same command goes on where a run was stopped, and another choice of systems is another run.
Exit code 1: an answer that must be plain decoding's, token for token, is not."""
_WHOLE = {"tasks", "machine", "repeats"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", choices=tuple(TASKS), help="what to ask")
    source.add_argument(
        "--from", dest="saved", type=Path, nargs="+", metavar="FILE.json",
        help="measure nothing; show the result of an earlier run again, or of several, each of "
        "another task, as one (with --out, written there as well)",
    )  # fmt: skip
    add_data_options(data)
    _add_weights_options(parser.add_argument_group("weights"))
    _add_run_options(parser.add_argument_group("run"))
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens")
    if args.task and args.out is None:
        args.out = RESULTS
    return args


def _add_weights_options(weights: argparse._ArgumentGroup) -> None:
    add_base(weights)
    weights.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="of all weights; in half precision near ties may part (default: %(default)s)",
    )  # fmt: skip
    weights.add_argument(
        "--adapter", metavar="NAME|FOLDER",
        help="streams and LoRA; `none` for the base alone (default: the bundled adapter of the "
        "task's name, where there is one)",
    )  # fmt: skip
    for kind in CHECKPOINTS:
        metavar = "MODEL" if kind == DRAFT_MODEL else "FOLDER"
        weights.add_argument(f"--{kind}", metavar=metavar, help=f"what `{kind}` drafts with")


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--systems", nargs="+", default=list(SYSTEMS), metavar="SYSTEM",
        help=f"which of {', '.join(SYSTEMS)}; mlx-lm and plain always take part (default: all)",
    )  # fmt: skip
    add_max_tokens(group)
    group.add_argument(
        "--repeats", type=int, default=3, metavar="N",
        help="times that every prompt is answered (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="X",
        help="sampling temperature; 0 is greedy (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens"
    )
    group.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"for the results (default: {RESULTS})"
    )
    group.add_argument(
        "--readme", type=Path, metavar="FILE",
        help="put the table between the marks <!-- perf.compare --> and <!-- /perf.compare -->",
    )  # fmt: skip
    add_fresh(group)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for."""
    experiment = experiment_of(args)
    for name, why in experiment.left_out.items():
        print(f"{args.task}: {name} is left out, {why}", file=sys.stderr)
    return result_of(experiment, args.model, [task_result(experiment.run())])


def read_results(paths: Sequence[Path]) -> dict[str, Any]:
    """One result of the tasks of all files, in their order."""
    first, *others = (_read_result(path) for path in paths)
    tasks = list(first["tasks"])
    for path, result in zip(paths[1:], others, strict=True):
        _check_same_way(paths[0], first, path, result)
        names = {task["task"] for task in tasks}
        twice = [task["task"] for task in result["tasks"] if task["task"] in names]
        require(
            not twice,
            f"{path} holds {', '.join(twice)}, and so does a file before it",
            expected="every task once",
            do="leave one of the files out",
        )
        tasks += result["tasks"]
    return {**first, "tasks": tasks}


def _read_result(path: Path) -> dict[str, Any]:
    result = read_json(path, "a result of perf.compare")
    require(
        set(result) >= _WHOLE,
        f"{path} holds something else",
        expected="the compare.json of python -m perf.compare",
        do="check --from",
    )
    with reading(path, PROG):
        for show in (report, markdown, failures):
            show(result)
    return result


def _check_same_way(
    first_path: Path, first: Mapping[str, Any], path: Path, result: Mapping[str, Any]
) -> None:
    """One line above the tables says how all of them were measured."""
    here, there = _settings(first), _settings(result)
    for key, value in here.items():
        require(
            value == there.get(key),
            f"{key} is {value} in {first_path} and {there.get(key)} in {path}",
            expected="results that were measured in the same way",
            do="show them one by one, or measure again",
        )


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    shared = {key: value for key, value in result.items() if key not in ("tasks", "machine")}
    return {**shared, **result["machine"]}


def experiment_of(args: argparse.Namespace) -> Experiment:
    """Check what can be checked without loading a model."""
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
    return Experiment(
        name=f"compare-{task.name}",
        weights=weights,
        systems=[*taking_part, *alone],
        examples=examples,
        task=task,
        repeats=args.repeats,
        out=args.out,
        fresh=args.fresh,
        data=data.name,
        left_out={one.name: lacking[one.kind] for one in systems if one.kind in lacking},
    )


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
    """The systems to run, mlx-lm and plain decoding always among them."""
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


def _main(args: argparse.Namespace) -> int:
    if args.readme is not None:
        check_markers(args.readme)
    result = measure(args) if args.task else read_results(args.saved)
    if args.out is None:
        print(report(result))
    else:
        make_folder(args.out)
        publish(result, args.out / "compare", report(result), draw)
    if args.readme is not None:
        rewrite(args.readme, result)
        print("rewritten:", args.readme, file=sys.stderr)
    differing = failures(result)
    if differing:
        print(f"tokens differ from plain decoding's: {'; '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
