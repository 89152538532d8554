"""`python -m examples.recipes.comparison`: trains the drafters that `perf.compare` compares."""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from perf.run.environment import ROOT, describe_machine
from perf.run.results import explain_broken_result
from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main, with_lock_on_out_folder
from ssmlx.errors import require
from ssmlx.json_files import read_json
from ssmlx.loading.files import write_whole

PROG = "examples.recipes.comparison"
EPILOG = """Takes the steps of comparison.json, which says where DATA comes from. You may stop it:
the same command goes on. OUT/comparison.json is a copy that records what is finished, at which
commit, and the SHA-256 of all data; null there accepts any file, and is filled in."""
MANIFEST = Path(__file__).with_suffix(".json")
EQUAL = ("data", "model", "epochs", "batch_size", "max_length", "seed")  # within a task


@dataclass(kw_only=True)
class Step:
    """A command of the recipe, and the commit at which it ran."""

    name: str  # TASK/WHAT
    command: str  # a module and its options; DATA/ and OUT/ stand for folders
    commit: str | None = None  # at which it ran
    finished: bool = False

    def options(self) -> dict[str, Any]:
        """The options by name, parsed by the command's own parser."""
        module, *words = shlex.split(self.command)
        options: dict[str, Any] = vars(import_module(module).parse_args(words))
        return options

    def input_files(self) -> list[str]:
        """The files that the command reads to learn or answer, by their names in the recipe."""
        folder, prompts = map(self.options().get, ("data", "prompts"))
        learnt = [f"{folder}/{name}.jsonl" for name in ("train", "valid")] if folder else []
        return [*learnt, *map(str, prompts or ())]

    def command_words(self, args: argparse.Namespace) -> list[str]:
        words = [path_with_real_folder(word, args) for word in shlex.split(self.command)]
        for name, most in (("max_steps", args.max_steps), ("count", 16 * args.max_steps)):
            if most and name in self.options():
                words += [f"--{name.replace('_', '-')}", str(most)]
        return words


def path_with_real_folder(name: str, args: argparse.Namespace) -> str:
    """Replace a leading DATA or OUT by its folder."""
    first, _, rest = name.partition("/")
    folders = {"DATA": args.data_dir.resolve(), "OUT": args.out.resolve()}
    return str(folders[first] / rest) if first in folders else name


def check_equal_training(steps: Sequence[Step]) -> None:
    """Check that the drafters of one task are trained equally long."""
    rivals: dict[str, tuple[str, str]] = {}
    for step in steps:
        options = step.options()
        if "epochs" in options and options.get("num_streams", True):  # not a task's LoRA
            has = ", ".join(f"{name} {options[name]}" for name in EQUAL)
            name, expected = rivals.setdefault(step.name.split("/")[0], (step.name, has))
            found = f"{step.name} has {has}"
            require(has == expected, found, expected=f"{expected}, as {name}", do="make them equal")


def check_digest(
    name: str,
    digests: dict[str, str | None],  # SHA-256 by file name
    args: argparse.Namespace,
) -> None:
    """Check a file's digest; a digest of None is filled in."""
    path = ROOT / path_with_real_folder(name, args)
    expected = digests[name]
    do = "take the steps before it, or give --data-dir"
    require(path.is_file(), f"{path} does not exist", expected="data to learn from", do=do)
    digests[name] = digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = f"{path} has the SHA-256 {digest}"
    do = f"put that file there, or null into {args.out / MANIFEST.name} to learn from this one"
    require(expected in (None, digest), found, expected=f"{expected}", do=do)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Make the drafters that perf.compare compares.", EPILOG)
    add_options(
        parser,
        ("--data-dir", "DATA", "the tasks' data (default: %(default)s)", Path("data")),
        ("--only", "NAME", "a task, or one step of it, such as sql/medusa", str),
        ("--max-steps", "N", "a replay: N steps of every trainer, on the first prompts", 0),
    )
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="what to write")
    return parser.parse_args(argv)


def run_module(words: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT).returncode


def _run_unfinished_steps(args: argparse.Namespace) -> int:
    """Run the steps, recording finished ones in OUT/comparison.json; the first failure ends it."""
    record = args.out / MANIFEST.name
    source = record if record.is_file() else MANIFEST
    manifest = read_json(source, "a manifest of steps")
    with explain_broken_result(source, PROG):
        files = manifest["files"]
        steps = [Step(**step) for step in manifest["steps"]]
        for step in steps:  # a step runs again if a digest of its inputs is None
            step.finished &= None not in [files[name] for name in step.input_files()]
    check_equal_training(steps)
    before = manifest.setdefault("max_steps", args.max_steps)
    found = f"{args.out} holds a run with --max-steps {before}"
    require(before == args.max_steps, found, expected=f"{args.max_steps}", do="give another --out")
    if before and source is MANIFEST:  # it has fewer prompts and answers than were first made
        files |= {name: None for name in files if name.startswith("OUT/")}
    chosen = [one for one in steps if f"{one.name}/".startswith(f"{args.only or one.name}/")]
    require(bool(chosen), f"--only {args.only}", expected="a task or a step", do="correct it")

    def write_record() -> None:
        told = {**manifest, "steps": [asdict(step) for step in steps]}
        write_whole(record, json.dumps(told, indent=1).encode() + b"\n")

    for number, step in enumerate(chosen, 1):
        for name in files:
            if name in step.input_files() or not name.startswith(("OUT/", "DATA/")):
                check_digest(name, files, args)
        if not step.finished:
            words = step.command_words(args)
            step.commit = describe_machine()["commit"]
            told = f"{number} of {len(chosen)}, {step.name}: python -m {shlex.join(words)}"
            print(told, file=sys.stderr)
            write_record()
            if code := run_module(words):
                return code
            step.finished = True
            write_record()
    print(f"{record}: {len(chosen)} steps are finished", file=sys.stderr)
    return 0


main = make_main(PROG, parse_args, with_lock_on_out_folder(_run_unfinished_steps))

if __name__ == "__main__":
    raise SystemExit(main())
