"""The command that makes a model on this machine draft for itself."""

import argparse
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..bars import busy
from ..errors import quoted, require
from ..loading.folders import Fetch, adapters_home
from ..loading.names import (
    AUTO_ADAPTER,
    NO_ADAPTER,
    bundled_adapters,
    resolve_adapter,
    resolve_model,
)
from .callback_bars import DownloadBar
from .parser import add_options, make_parser
from .running import make_main

PROG = "ssmlx.adapt"
_BUSY_SECONDS = 10
EPILOG = """examples:
  python -m ssmlx.adapt --model mlx-community/Qwen3-4B-4bit
  python -m ssmlx.chat --model mlx-community/Qwen3-4B-4bit     # now uses the adapter
  python -m ssmlx.adapt --model org/name --adapter LORA        # for a model with a LoRA
  python -m ssmlx.chat --model org/name --adapter name-lora

The run has four steps. It times calls of the model, and chooses how many layers get streams. It
lets the model answer prompts: some that ship with ssmlx, some that the model writes itself, and
those of --data. It trains streams to predict these answers; the model's own weights, and so its
answers, do not change. In the end it measures the speed with and without the adapter. Below 1.05
times the speed of plain decoding, the adapter is not used on this machine.

While it trains, it prints the speed to expect, measured on answers that it did not train on. You
may stop it at any time. The same command continues a stopped run; with more --hours it continues a
finished one, with more answers.

It reads none of your files but --data. Streams learn from these answers, and parts of them can be
reconstructed from the adapter, so protect the adapter as you protect the data.

Everything is stored in ~/.cache/ssmlx/adapters/NAME ($SSMLX_CACHE/adapters/NAME if that is set):
the questions, the answers, the adapter, and figures.json, which has the measured speed-up.
`python -m ssmlx.adapters` lists, renames and removes adapters."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG, "Train an adapter that makes a model draft for itself, on this machine.", EPILOG
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="the model: a folder in mlx-lm's or Hugging Face's layout, a Hub name, or an alias",
    )
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="your own prompts, JSON lines with prompt or messages; repeatable",
    )
    add_options(
        parser,
        ("--hours", "H", "hours that the run may take (default: %(default)s)", 1.0),
        (
            "--adapter",
            "LORA",
            "a LoRA or DoRA of mlx-lm or PEFT, a folder or a Hub name, with which the model will "
            "be used; it becomes part of the adapter",
            str,
        ),
        ("--name", "N", "name of the adapter (default: the model's name and the LoRA's)", str),
        (
            "--memory-gb",
            "X",
            "memory to use at most, in GB (default: 70 %% of the machine's)",
            float,
        ),
        ("--seed", "N", "seed of the questions to the model (default: %(default)s)", 0),
        (
            "--give-way",
            None,
            "pause while other programs keep the machine busy, or on battery",
            bool,
        ),
    )
    return parser.parse_args(argv)


def adapter_name(args: argparse.Namespace) -> str:
    """--name, or the last parts of the model's and the LoRA's names, in lower case, joined by a
    dash."""
    model = args.model if Path(args.model).exists() else args.model.partition("@")[0]
    is_tuned = args.adapter not in (None, NO_ADAPTER)
    parts = [model, *([args.adapter.partition("@")[0]] if is_tuned else [])]
    default = "-".join(Path(part).name for part in parts)
    name = re.sub(r"[^\w.-]+", "-", default.lower()) if args.name is None else args.name
    require_allowed_adapter_name(name, "--name")
    return name


def require_allowed_adapter_name(name: str, option: str) -> None:
    """Refuse a name that an adapter made here cannot have; whether a run has it already is not
    checked."""
    taken = (NO_ADAPTER, AUTO_ADAPTER, *bundled_adapters())
    ok = re.fullmatch(r"[\w-][\w.-]*", name) and name not in taken
    require(
        bool(ok),
        f"{option} {name or quoted(name)}",
        expected="letters, digits, dots and dashes, and no name of an adapter that ships",
        do="give another",
    )


def _adapt(args: argparse.Namespace) -> None:
    from ..loading.files import locked_folder
    from ..training.adapt_run import AdaptOptions, find_run_folder
    from ..training.adapt_workflow import adapt

    for flag, value in (("--hours", args.hours), ("--memory-gb", args.memory_gb)):
        ok = value is None or 0 < value < 1e6
        require(ok, f"{flag} {value}", expected="more than 0, and below a million", do="correct it")
    out = adapters_home() / adapter_name(args)
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
            print_line(f"{options.out.name} was made from these weights")
    with locked_folder(options.out):
        adapt(
            options,
            prog=PROG,
            say=print_line,
            wait=make_wait(args.give_way),
        )


def print_line(line: str) -> None:
    """Print a line at once, without waiting for the buffer to fill."""
    print(line, flush=True)


def make_wait(give_way: bool) -> Callable[[], None]:
    """A function that does nothing without `give_way`; with it, it blocks while other processes use
    half of the cores or more, by the load average of a minute, or while the machine is on battery.
    It looks at most every 10 seconds."""
    from .power import power_source_or_unknown

    looked = time.monotonic()
    own = time.process_time()

    def wait() -> None:
        nonlocal looked, own
        while give_way and time.monotonic() - looked > _BUSY_SECONDS:
            used = (time.process_time() - own) / (time.monotonic() - looked)
            others = os.getloadavg()[0] - max(1.0, used)
            looked = time.monotonic()
            own = time.process_time()
            if (
                others < (os.cpu_count() or 1) / 2
                and "battery" not in power_source_or_unknown().lower()
            ):
                return
            time.sleep(_BUSY_SECONDS)

    return wait


main = make_main(PROG, parse_args, _adapt)
