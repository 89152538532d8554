"""The command that makes a model on this machine draft for itself."""

import argparse
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..bars import busy
from ..errors import require
from ..loading.names import (
    AUTO_ADAPTER,
    NO_ADAPTER,
    Fetch,
    adapters_home,
    bundled_adapters,
    resolve_adapter,
    resolve_model,
)
from .options import DownloadBar, add_options, command, make_parser

PROG = "ssmlx.adapt"
_BUSY_SECONDS = 10
EPILOG = """examples:
  python -m ssmlx.adapt --model mlx-community/Qwen3-4B-4bit
  python -m ssmlx.chat --model mlx-community/Qwen3-4B-4bit     # drafts from then on
  python -m ssmlx.adapt --model org/name --adapter LORA        # the model as that LoRA tunes it
  python -m ssmlx.chat --model org/name --adapter name-lora

The model answers prompts that ship with ssmlx, and questions that it asks itself; streams learn to
guess these answers, which stay what they are, token for token. With --data it answers your prompts
too (JSON lines with "prompt" or "messages"), and nothing else of yours is read; what streams have
learnt of them can be guessed from the adapter, so keep it as you keep the data.

First it times what drafting costs here, and chooses how many layers get streams. As training goes
on, held-out answers say what speed that comes to: stop it where that is not worth the hours.

The same command again goes on where it was stopped, at whatever moment, also for a copy of the
model; with more hours, it goes on from what they made, with more answers. At last it decodes with
the adapter and without: where that brings less than 1.05 times the speed, nothing uses it here.

All is kept in ~/.cache/ssmlx/adapters/NAME ($SSMLX_CACHE/adapters/NAME where that is set): the
questions, the answers, the adapter, and `figures.json`, which says what it brings.
`python -m ssmlx.adapters` lists and removes what there is; removed, it is begun anew."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Let a model learn to draft for itself, on this machine.", EPILOG)
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a folder (mlx-lm or Hugging Face layout), a Hub name, or an alias",
    )
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="prompts such as it will be asked; repeatable",
    )
    add_options(
        parser,
        ("--hours", "H", "how long this may take (default: %(default)s)", 1.0),
        (
            "--adapter",
            "LORA",
            "LoRA or DoRA of mlx-lm's or PEFT's, a folder or a Hub name, that the model is to "
            "have; it becomes part of what is made",
            str,
        ),
        ("--name", "N", "what is made is called (default: the model's name, and the LoRA's)", str),
        ("--memory-gb", "X", "memory that this may take (default: 70 %% of the machine's)", float),
        ("--seed", "N", "another one, other questions (default: %(default)s)", 0),
        ("--give-way", None, "wait while others keep the machine busy, or on battery", bool),
    )
    return parser.parse_args(argv)


def name_of(args: argparse.Namespace) -> str:
    told = args.model if Path(args.model).exists() else args.model.partition("@")[0]
    is_tuned = args.adapter not in (None, NO_ADAPTER)
    parts = [told, *([args.adapter.partition("@")[0]] if is_tuned else [])]
    default = "-".join(Path(part).name for part in parts)
    name = args.name or re.sub(r"[^\w.-]+", "-", default.lower())
    check_name(name, "--name")
    return name


def check_name(name: str, option: str) -> None:
    """Raises InputError where an adapter cannot have this name, which `option` gave."""
    taken = (NO_ADAPTER, AUTO_ADAPTER, *bundled_adapters())
    ok = re.fullmatch(r"[\w-][\w.-]*", name) and name not in taken
    require(
        bool(ok),
        f"{option} {name}",
        expected="letters, digits, dots and dashes, and no name of an adapter that ships",
        do="give another",
    )


def _main(args: argparse.Namespace) -> None:
    from ..loading.files import exclusive_folder
    from ..training.adapt import adapt
    from ..training.adapt_run import AdaptOptions, find_run_folder

    for flag, value in (("--hours", args.hours), ("--memory-gb", args.memory_gb)):
        ok = value is None or 0 < value < 1e6
        require(ok, f"{flag} {value}", expected="more than 0, and below a million", do="correct it")
    out = adapters_home() / name_of(args)
    fetch = Fetch(progress=DownloadBar())
    options = AdaptOptions(
        model=args.model,
        path=resolve_model(args.model, fetch),
        out=out,
        adapter=None if args.adapter is None else resolve_adapter(args.adapter, fetch),
        data=tuple(args.data),
        hours=args.hours,
        memory_gb=args.memory_gb,
        seed=args.seed,
    )
    if args.name is None:
        with busy("reading the weights"):
            options = replace(options, out=find_run_folder(options))
        if options.out != out:
            say(f"{options.out.name} was made from these weights")
    with exclusive_folder(options.out):
        adapt(options, prog=PROG, say=say, wait=waiting(args.give_way))


def say(line: str) -> None:
    print(line, flush=True)


def waiting(give_way: bool) -> Callable[[], None]:
    """What waits until others leave the machine free, and it is not on battery, where `give_way`
    asks for that."""
    from .machine import power_source

    looked = time.monotonic()
    own = time.process_time()

    def wait() -> None:
        nonlocal looked, own
        while give_way and time.monotonic() - looked > _BUSY_SECONDS:
            used = (time.process_time() - own) / (time.monotonic() - looked)
            others = os.getloadavg()[0] - max(1.0, used)
            looked = time.monotonic()
            own = time.process_time()
            if others < (os.cpu_count() or 1) / 2 and "battery" not in power_source().lower():
                return
            time.sleep(_BUSY_SECONDS)

    return wait


main = command(PROG, parse_args, _main)
