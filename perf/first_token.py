"""`python -m perf.first_token`: how long a prompt's first token takes, cold and warm.

Cold, its keys and values are computed; warm, they are a prompt cache's, in memory or in a file that
was just written. Beside it, reading the file alone, and a plain call behind as many tokens: a warm
start should take no longer than the one and three of the other. Cold, which takes longest, is timed
once, all else in turns; the text is random, as times do not depend on it. Writes JSON and a
table.
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import mlx.core as mx

import ssmlx
from ssmlx.answers import run as on_mlx_thread
from ssmlx.calibration.costs import Calls, medians, plain_call
from ssmlx.commands.machine import machine
from ssmlx.commands.options import add_options, make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.prompt_cache import PromptCache
from ssmlx.tuning.report import Columns, table

from .run.options import add_base, add_out, check_counts
from .run.results import machine_load

PROG = "perf.first_token"
Row = Mapping[str, Any]
Decoding = Literal["plain", "streaming"]
DECODINGS: tuple[Decoding, ...] = ("plain", "streaming")
SIDES = {
    "cold": "cold",
    "memory": "warm from memory",
    "disk": "warm from disk",
    "file": "reading the file",
    "call": "a plain call",
}
CALLS = 3
"""Plain calls that a warm start may take beside reading the file."""
_ALL = 2**50  # bytes


class Prompt:
    def __init__(self, loaded: tuple[Any, Any], count: int, folder: Path) -> None:
        rng, (self.model, self.tokenizer) = random.Random(count), loaded
        self.tokens = [rng.randrange(self.model.backbone.vocab_size) for _ in range(count)]
        self.first_tokens: set[int] = set()  # of every answer
        self.kept, self.folder = PromptCache(_ALL), folder
        self.cold = [self.first_token(decoding, lambda: PromptCache(0)) for decoding in DECODINGS]
        with PromptCache(_ALL, folder, _ALL) as on_disk:
            for prompts in (self.kept, on_disk):
                prompts.put(self.model, self.tokens, self.cache)
        (self.file,) = folder.iterdir()

    def _answer(self, decoding: Decoding, cache: Any, known: int) -> None:
        if not known:
            self.cache = cache
        with ssmlx.stream_generate(
            self.model, self.tokenizer, self.tokens[known:],
            cache=cache, context=self.tokens[:known], decoding=decoding, max_tokens=1,
        ) as answer:  # fmt: skip
            self.first_tokens.update(next(answer).tokens)

    def first_token(self, decoding: Decoding, open_cache: Callable[[], PromptCache]) -> float:
        """Seconds until the first token."""
        started = time.perf_counter()
        self._answer(decoding, *open_cache().take(self.model, self.tokens))
        seconds = time.perf_counter() - started
        on_mlx_thread(mx.synchronize)  # of a step ahead, nothing runs into what is timed next
        return seconds

    def calls(self) -> Calls:
        """What is timed, by side, decoding (a place in `DECODINGS`) and length."""
        opened: dict[str, Callable[[], PromptCache]] = {
            "memory": lambda: self.kept,
            "disk": lambda: PromptCache(_ALL, self.folder),
        }
        count = len(self.tokens)
        found: Any = {
            (side, n, count): partial(self.first_token, decoding, open_cache)
            for side, open_cache in opened.items()
            for n, decoding in enumerate(DECODINGS)
        }
        call = partial(plain_call, self.model, self.cache, time.perf_counter)
        read = partial(on_mlx_thread, lambda: mx.eval(mx.load(str(self.file))))
        return {**found, ("file", 0, count): read, ("call", 0, count): partial(on_mlx_thread, call)}


def measure(
    loaded: tuple[Any, Any], count: int, repeats: int, folder: Path
) -> list[dict[str, Any]]:
    """Median seconds of each of `SIDES` for a prompt of `count` tokens, a row for each decoding."""
    prompt = Prompt(loaded, count, folder)
    seconds, noise = medians(prompt.calls(), repeats)
    size, same = prompt.file.stat().st_size, len(prompt.first_tokens) == 1
    more = {"context": count, "bytes": size, "same": same, "noise": noise}
    both = {side: seconds[side, 0, count] for side in ("file", "call")}
    return [
        {"decoding": decoding, "cold": prompt.cold[n], **both, **more}
        | {side: seconds[side, n, count] for side in ("memory", "disk")}
        for n, decoding in enumerate(DECODINGS)
    ]


def allowed(row: Row) -> float:
    """Seconds that a warm start from disk should take at most."""
    return row["file"] + CALLS * row["call"]


def _seconds(side: str) -> Callable[[Row], str]:
    return lambda row: f"{row[side]:.3f}"


def report(result: Row) -> str:
    columns: Columns = {
        "tokens": lambda row: str(row["context"]),
        "decoding": lambda row: row["decoding"],
        **{text: _seconds(side) for side, text in SIDES.items()},
        "MiB": lambda row: f"{row['bytes'] / 2**20:.1f}",
        "disk / allowed": lambda row: f"{row['disk'] / allowed(row):.2f}",
        "noise": lambda row: f"{row['noise']:.0%}",
        "same token": lambda row: "yes" if row["same"] else "NO",
    }
    where = result["machine"]
    return "\n".join(
        [
            f"seconds to the first token; {result['model']}, adapter {result['adapter']}, "
            f"{result['dtype']}; {where['machine']}, mlx {where['mlx']}; {result['load']}",
            f"cold once, else medians of {result['repeats']}; allowed: reading the file and "
            f"{CALLS} plain calls\n",
            *table(columns, result["rows"]),
        ]
    )


def _main(args: argparse.Namespace) -> int:
    make_folder(args.out)
    loaded = ssmlx.load(args.model, adapter=args.adapter, dtype=args.dtype)
    limit = loaded[0].backbone.context_length
    require(
        limit is None or max(args.contexts) < limit,
        f"--contexts {max(args.contexts)}",
        expected=f"less than the model's context of {limit}",
        do="leave it out",
    )
    list(ssmlx.stream_generate(*loaded, [1, 2, 3], max_tokens=2))  # a model's first takes longer
    rows: list[dict[str, Any]] = []
    for count in sorted(set(args.contexts)):
        with TemporaryDirectory(dir=args.out) as folder:
            rows += measure(loaded, count, args.repeats, Path(folder))
    names = {name: getattr(args, name) for name in ("model", "adapter", "dtype", "repeats")}
    result = {"machine": machine(), "load": machine_load(), **names, "rows": rows}
    write_result(result, args.out / "first-token", report(result))
    return 0 if all(row["same"] for row in rows) else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if a warm answer begins with another token than the cold one."""
    parser = make_parser(PROG, __doc__)
    add_base(parser)
    add_options(
        parser,
        ("--adapter", None, "what streams (default: %(default)s)", "chat"),
        ("--dtype", None, "as ssmlx.generate's (default: float32)", "float32"),
        ("--contexts", "N", "tokens of a prompt (default: 64 512 2000 4000)",
         [64, 512, 2000, 4000]),
        ("--repeats", None, "(default: %(default)s)", 3),
    )  # fmt: skip
    add_out(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "contexts", "repeats")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
