"""Compare ssmlx's server with mlx-lm's own, on the same weights, with one client.

The servers take turns at answering several requests at once, with new prompts in each round; an
engine without a server answers one at a time. Then a long prompt arrives while another answer is
written: reported are the longest time between two tokens of that answer, and the time of a chunk of
the prompt. Writes JSON and a table.
"""

import argparse
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from math import ceil
from pathlib import Path
from statistics import median
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
from mlx_lm.utils import save_config, save_model

import ssmlx
from ssmlx.commands.parser import add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import InputError, require
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import resolve_model
from ssmlx.report import Columns, table
from ssmlx.server.__main__ import served_adapters
from ssmlx.settings import PREFILL_STEP_SIZE

from .run.environment import ROOT, describe_machine, machine_load_text
from .run.options import add_model_option, add_out_option, check_counts
from .run.results import print_and_save
from .run.target import FLOATS, load_weights_as

PROG = "perf.serving"
DATA = ROOT / "examples" / "data" / "chat_test.jsonl"
MODULES = {"ssmlx": "ssmlx.server", "mlx-lm": "mlx_lm.server"}
START = 180.0  # seconds within which a server must start
BEFORE = 6  # number of the answer's tokens before the long prompt arrives
Row = Mapping[str, Any]
Result = Mapping[str, Any]


@dataclass
class ReceivedAnswer:
    """An answer as a client received it; times are `time.perf_counter`'s seconds."""

    asked: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)  # of each chunk of text
    tokens: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked


# Takes a prompt and the most tokens, and for a server also a function that is called with the
# number of chunks so far; returns the answer.
Ask = Callable[..., ReceivedAnswer]


def ask_server(
    address: str,  # http://HOST:PORT
    model: str,  # name for the request
    prompt: str,
    max_tokens: int,
    # called after each chunk of text with the number of chunks so far
    on_chunk: Callable[[int], object] = lambda count: None,
) -> ReceivedAnswer:
    """Ask a server; an answer without text has the time of its end."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
        "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    received = ReceivedAnswer()
    headers = {"Content-Type": "application/json"}
    address = f"{address}/v1/chat/completions"
    data = json.dumps(body).encode()
    try:
        reply = urlopen(Request(address, data, headers), timeout=600)
    except URLError as error:
        found = f"{address} gave no answer ({error})"
        do = "lower --long and --max-tokens"
        raise InputError(found, expected="an answer", do=do) from error
    with reply:
        for line in reply:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": ()}
            received.tokens = (chunk.get("usage") or {}).get("completion_tokens", received.tokens)
            if any(one["delta"].get("content") for one in chunk["choices"]):
                received.times.append(time.perf_counter())
                on_chunk(len(received.times))
    received.times = received.times or [time.perf_counter()]
    return received


def ask_engine(engine: ssmlx.Engine, prompt: str, max_tokens: int) -> ReceivedAnswer:
    """Ask the engine; segments are timed as chunks."""
    received = ReceivedAnswer()
    for segment in engine.stream(
        [{"role": "user", "content": prompt}], max_tokens=max_tokens, temp=0
    ):
        received.times.append(time.perf_counter())
        received.tokens += len(segment.tokens)
    return received


@contextmanager
def running_server(
    name: str,  # a key of `MODULES`
    folder: Path,  # of the weights; the server's log is written there
    adapter: str,  # for ssmlx's server
) -> Iterator[Ask]:
    """Run a server inside the block; yields a function that asks it, as `ask_server`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"import ssmlx, runpy; runpy.run_module({MODULES[name]!r}, run_name='__main__')"
    options = ["--model", str(folder), "--port", str(port)]
    model = str(folder)
    if name == "ssmlx":
        # Absolute, since the server runs in another folder.
        adapter = str(Path(adapter).resolve()) if Path(adapter).exists() else adapter
        options = [*options, "--adapter", adapter]
        *_, model = served_adapters(folder.name, [adapter])
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START
    with (folder / f"{name}.log").open("w") as log:
        process = Popen([sys.executable, "-c", code, *options], stdout=log, stderr=log, cwd=ROOT)
    try:
        while not _is_up(address):
            ok = process.poll() is None and time.monotonic() < deadline
            found = f"{MODULES[name]} did not start"
            do = "pip install 'ssmlx[server]'"
            require(ok, found, expected="a server that answers", do=do)
            time.sleep(0.2)
        yield partial(ask_server, address, model)
    finally:
        process.terminate()
        process.wait(30)


def _is_up(address: str) -> bool:
    with suppress(OSError), urlopen(f"{address}/health", timeout=1) as reply:
        return bool(reply.status == 200)
    return False


def write_float_model(
    model: str,
    dtype: str,  # one of `FLOATS`
    folder: Path,
) -> None:
    """Write a dequantized model folder that both servers can load."""
    base = resolve_model(model)
    modules, settings = load_weights_as(dtype, base)
    save_model(folder, modules)
    own = {name: value for name, value in settings.items() if "quantization" not in name}
    save_config({**own, "torch_dtype": dtype}, folder / "config.json")
    for path in (*base.glob("*token*"), *base.glob("*.jinja"), *base.glob("merges.txt")):
        shutil.copy(path, folder)


class Round(NamedTuple):
    """Answers to simultaneous prompts, and the seconds until the last one ended."""

    seconds: float
    answers: list[ReceivedAnswer]


def ask_all_at_once(ask: Ask, prompts: list[str], max_tokens: int) -> Round:
    """Ask each prompt on its own thread."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        started = time.perf_counter()
        received = list(pool.map(lambda prompt: ask(prompt, max_tokens), prompts))
        return Round(time.perf_counter() - started, received)


def concurrency_row(system: str, num_requests: int, rounds: Sequence[Round]) -> Row:
    """A row; seconds to the first token are percentiles, the speed is of all answers together.

    "each" is the median over answers of the mean seconds between tokens.
    """
    received = [answer for one in rounds for answer in one.answers]
    p50, p95 = np.percentile([one.first for one in received], [50, 95])
    tokens = sum(one.tokens for one in received)
    each = median((one.times[-1] - one.times[0]) / max(1, one.tokens - 1) for one in received)
    speed = tokens / sum(one.seconds for one in rounds)
    row = {"system": system, "open": num_requests, "tokens": tokens, "tokens_per_second": speed}
    return {**row, "first_p50": float(p50), "first_p95": float(p95), "each": each}


def measure_delay(
    system: str,
    ask: Ask,
    prompt: str,  # of the answer that is delayed
    long_prompt_words: int,  # about its tokens
) -> list[Row]:
    """Measure one row; returns none if the answer has `BEFORE` chunks or fewer.

    "usual" is the median seconds between chunks before the long prompt, "longest" the most from
    then on, "first" the seconds to the long prompt's first token, "piece" that for each of its
    pieces.
    """
    pieces = ceil(long_prompt_words / PREFILL_STEP_SIZE)
    others = list[Future[ReceivedAnswer]]()
    with ThreadPoolExecutor(1) as pool:

        def send_long_prompt(chunks: int) -> None:
            if chunks == BEFORE:
                others.append(pool.submit(ask, " word" * long_prompt_words, 1))

        received = ask(prompt, 4 * BEFORE + 2 * pieces, send_long_prompt)
    if len(received.times) <= BEFORE:
        return []
    gaps = [b - a for a, b in pairwise(received.times)]
    first = others[0].result().first
    usual = median(gaps[: BEFORE - 1])
    longest = max(gaps[BEFORE - 1 :])
    times = {"usual": usual, "longest": longest, "first": first, "piece": first / pieces}
    return [{"system": system, "prompt_tokens": long_prompt_words, **times}]


def format_text_report(result: Result) -> str:
    def columns(names: Mapping[str, str]) -> Columns:
        return {head: partial(cell, name) for head, name in names.items()}

    def cell(name: str, row: Row) -> str:
        return f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name])

    rows = columns(
        {
            "open": "open",
            "system": "system",
            "tokens": "tokens",
            "tokens/s": "tokens_per_second",
            "first token p50, s": "first_p50",
            "p95, s": "first_p95",
            "a token, s": "each",
        }
    )
    delays = columns(
        {
            "beside a prompt, tokens": "prompt_tokens",
            "system": "system",
            "usually, s": "usual",
            "longest, s": "longest",
            "its first token, s": "first",
            "a piece, s": "piece",
        }
    )
    where = result["machine"]
    title = f"{result['model']}, adapter {result['adapter']}, {result['dtype']}, greedy"
    return "\n".join(
        [
            f"{title}; {where['machine']}, mlx {where['mlx']}, mlx-lm {where['mlx-lm']}",
            f"{result['load']}; at most {result['max_tokens']} tokens per answer, in turns\n",
            *table(rows, result["rows"]),
            "",
            *table(delays, result["delays"]),
        ]
    )


def _measure(args: argparse.Namespace) -> int:
    make_folder(args.out)
    examples = [json.loads(line) for line in DATA.read_text().splitlines()]
    prompts = cycle(one["prompt"] for one in examples if "prompt" in one)
    upcoming = (f"{number}. {prompt}" for number, prompt in enumerate(prompts))
    load = machine_load_text()
    rows = []
    with ExitStack() as stack:
        # --out temporarily holds a folder with the dequantized model.
        folder = Path(stack.enter_context(TemporaryDirectory(dir=args.out)))
        write_float_model(args.model, args.dtype, folder)
        systems = {n: stack.enter_context(running_server(n, folder, args.adapter)) for n in MODULES}
        engine = stack.enter_context(ssmlx.Engine(folder, [args.adapter]))
        alone: dict[str, Ask] = {**systems, "ssmlx.generate": partial(ask_engine, engine)}
        for ask in alone.values():
            ask("Hello", 4)
        for count in args.open:
            rounds: dict[str, list[Round]] = {
                name: [] for name in (alone if count == 1 else systems)
            }
            for _ in range(args.count):
                asked = [next(upcoming) for _ in range(count)]
                for name, found in rounds.items():
                    found.append(ask_all_at_once(alone[name], asked, args.max_tokens))
            rows += [concurrency_row(name, count, found) for name, found in rounds.items()]
        prompt = next(upcoming)
        delays = [
            row
            for name, ask in systems.items()
            for row in measure_delay(name, ask, prompt, args.long)
        ]
    names = {name: getattr(args, name) for name in ("model", "adapter", "dtype", "max_tokens")}
    result = {"machine": describe_machine(), "load": load, **names, "rows": rows, "delays": delays}
    print_and_save(result, args.out / "serving", format_text_report(result))
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, __doc__)
    add_model_option(parser)
    add_options(
        parser,
        ("--adapter", None, "adapter of ssmlx's server (default: %(default)s)", "chat"),
        ("--dtype", None, "type of the weights (default: %(default)s)", "float32", FLOATS),
        ("--open", "N", "numbers of requests at once (default: 1 2 4 8)", [1, 2, 4, 8]),
        ("--count", None, "rounds for each number (default: %(default)s)", 2),
        ("--max-tokens", None, "tokens of an answer (default: %(default)s)", 32),
        ("--long", None, "tokens of the long prompt (default: %(default)s)", 4000),
    )
    add_out_option(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "open", "count", "max_tokens", "long")
    return args


main = make_main(PROG, parse_args, _measure)


if __name__ == "__main__":
    raise SystemExit(main())
