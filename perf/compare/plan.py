"""A run of `perf.compare`: tasks, the weights for them, and who can answer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssmlx.errors import InputError
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import bundled_adapters, resolve_adapter, resolve_model
from ssmlx.settings import SamplingConfig

from ..run.common import split_name
from ..run.samples import read_own_lora
from ..run.tasks import TASKS, Example, Task, data_file, read_examples, scorer_of
from .systems import CHECKPOINTS, DRAFT_ALONE, DecodingMethod, parse_systems, with_max_tokens


@dataclass(frozen=True)
class TaskPlan:
    """A task and who answers it.

    Attributes:
        adapter: its folder; None leaves the base model as it is.
        checkpoints: what each of `CHECKPOINTS` drafts with, where it is given.
        left_out: why a system does not take part, by its name.
    """

    task: Task
    data: Path
    examples: Sequence[Example]
    adapter: Path | None
    checkpoints: Mapping[str, Path]
    systems: Sequence[DecodingMethod]
    left_out: Mapping[str, str]
    max_tokens: int

    @property
    def timed(self) -> list[DecodingMethod]:
        """The systems, and the draft model by itself where there is one."""
        kinds = [system.kind for system in self.systems]
        alone = [DecodingMethod(DRAFT_ALONE, DRAFT_ALONE)] if "draft-model" in kinds else []
        return [*self.systems, *alone]


@dataclass(frozen=True)
class Plan:
    """A run whose options are checked."""

    model: str
    weights: Path
    dtype: str
    sampling: SamplingConfig
    tasks: Sequence[TaskPlan]
    repeats: int
    warm_up: int
    out: Path


def make_plan(args: argparse.Namespace) -> Plan:
    """Check what can be checked without loading a model.

    Raises:
        InputError: something is missing, broken, or does not fit the rest.
    """
    for name, least in (("repeats", 1), ("warm_up", 0)):
        value = getattr(args, name)
        if value < least:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} {value}", expected=f"{least} or more", do="give a larger value"
            )
    sampling = sampling_of(args)
    systems = parse_systems(args.systems, sampling)
    names = list(dict.fromkeys(args.task))
    flags = ("data", "adapter", "max_tokens", *(kind.replace("-", "_") for kind in CHECKPOINTS))
    given = {flag: by_task(flag, getattr(args, flag), names) for flag in flags}
    tasks = [task_plan(args, TASKS[name], given, systems) for name in names]
    weights = resolve_model(args.model)
    make_folder(args.out)
    return Plan(
        args.model, weights, args.dtype, sampling, tasks, args.repeats, args.warm_up, args.out
    )


def sampling_of(args: argparse.Namespace) -> SamplingConfig:
    """Greedy, or top-k sampling under a seed, so that every drafter must write the same.

    Raises:
        InputError: a value is out of range, or would have no effect.
    """
    if args.temp == 0 and (args.top_k or args.seed):
        flag = "--top-k" if args.top_k else "--seed"
        raise InputError(f"{flag} would do nothing here", expected="--temp", do=f"drop {flag}")
    return SamplingConfig(temp=args.temp, top_k=args.top_k, seed=args.seed if args.temp else None)


def by_task(flag: str, items: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """Values by task, of `TASK=VALUE`, or of a VALUE for every task.

    Raises:
        InputError: a task is not in this run, or a value is missing or given twice.
    """
    flag, found = "--" + flag.replace("_", "-"), dict[str, str]()
    for item in items:
        name, value = split_name(item)
        names = tasks if name is None else [name]
        if not value or not set(names) <= set(tasks) or set(names) & set(found):
            raise InputError(
                f"{flag} {item}",
                expected=f"TASK=VALUE, once for each task of this run ({', '.join(tasks)})",
                do="correct it, or name the task after --task",
            )
        found |= dict.fromkeys(names, value)
    return found


def task_plan(
    args: argparse.Namespace,
    task: Task,
    given: Mapping[str, Mapping[str, str]],
    systems: Sequence[DecodingMethod],
) -> TaskPlan:
    """A task with its data, its checkpoints, and the systems that have what they need.

    Raises:
        InputError: the data or the adapter is missing or broken.
    """
    data = given["data"].get(task.name)
    path = data_file(task, Path(data) if data else None, args.data_dir)
    examples = read_examples(path, task, args.count)
    scorer_of(task)
    adapter = adapter_of(task, given["adapter"].get(task.name))
    checkpoints = checkpoints_of(task, given)
    most = most_tokens(task, given["max_tokens"].get(task.name))
    lacking = left_out(task, adapter, checkpoints)
    return TaskPlan(
        task, path, examples, adapter, checkpoints,
        [with_max_tokens(system, most) for system in systems if system.kind not in lacking],
        {system.name: lacking[system.kind] for system in systems if system.kind in lacking},
        most,
    )  # fmt: skip


def most_tokens(task: Task, given: str | None) -> int:
    """The longest answer of a task: as given, or its own.

    Raises:
        InputError: it is no number of tokens.
    """
    if given is None:
        return task.max_tokens
    if not given.isdecimal() or int(given) < 1:
        raise InputError(
            f"--max-tokens {given}", expected="a number of 1 or more", do="correct the option"
        )
    return int(given)


def adapter_of(task: Task, given: str | None) -> Path | None:
    """The folder of a task's adapter: as given, or the bundled one of the task's name."""
    if given is not None:
        return resolve_adapter(given)
    return bundled_adapters().get(task.name)


def checkpoints_of(task: Task, given: Mapping[str, Mapping[str, str]]) -> dict[str, Path]:
    """The folders that a task's systems draft with, by the kind of system."""
    found = {}
    for kind in CHECKPOINTS:
        value = given[kind.replace("-", "_")].get(task.name)
        if value is not None:
            is_model = kind == "draft-model"
            found[kind] = resolve_model(value) if is_model else Path(value).expanduser()
    return found


def left_out(task: Task, adapter: Path | None, checkpoints: Mapping[str, Path]) -> dict[str, str]:
    """Which kinds of systems lack their weights, and how to give them."""
    lacking = {
        kind: f"no --{kind} {task.name}=FOLDER" for kind in CHECKPOINTS if kind not in checkpoints
    }
    if adapter is None:
        lacking["streams"] = f"no --adapter {task.name}=FOLDER"
    elif not read_own_lora(adapter).config.num_streams:
        lacking["streams"] = "the adapter has no streams"
    return lacking
