"""The server in a process of its own; `python tests/served.py '["a text", ...]' --model ...` is one
whose answers are these texts, and `'"ids"'` one that tells the ids of its tokens in their place."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx2 as httpx

ROOT = Path(__file__).parents[1]


class Served(NamedTuple):
    """A running server: its process, port and address."""

    process: subprocess.Popen[str]
    port: int
    url: str

    def gauges(self) -> list[float]:
        """The numbers of open answers and of waiting requests, from /metrics."""
        told = httpx.get(f"{self.url}/metrics", timeout=60).text
        return [float(one) for one in re.findall(r"\nssmlx_(?:open|waiting) (.*)", told)]

    def is_idle(self) -> bool:
        """Wait up to 30 seconds until nothing is open or waiting; whether that came."""
        end = time.monotonic() + 30
        while any(self.gauges()) and time.monotonic() < end:
            time.sleep(0.02)
        return not any(self.gauges())


@contextmanager
def serving(folder: Path, *options: object, answers: Sequence[str] | str = ()) -> Iterator[Served]:
    """Run a server on a free port inside the block, and check that its log has no traceback.

    Args:
        folder: where its log is written.
        options: of the command.
        answers: texts to answer with, one after another, or "ids"; without any, the model answers.
    """
    log = folder / "server.log"
    command = [__file__, json.dumps(answers)] if answers else ["-m", "ssmlx.server"]
    told = map(str, (*options, "--port", 0, "--dtype", "float32"))
    with log.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *command, *told],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    with process:
        try:
            url = process.stdout.readline().split(" ")[0]
            assert url.startswith("http://"), log.read_text()
            yield Served(process, int(url.rpartition(":")[2]), url)
        finally:
            process.kill()
    assert "Traceback" not in log.read_text(), log.read_text()


def scripted_stream(texts: Iterable[str]) -> Callable[..., Iterator[object]]:
    """In the place of `Engine.stream`: answers of these texts, four characters a call."""
    from ssmlx import GenerationResponse
    from ssmlx.answers import Answer

    same = {"tokens": (9,), "prefill_seconds": 1, "decode_seconds": 1, "peak_memory": 0}
    left = iter(texts)

    def segments(text: str) -> Iterator[GenerationResponse]:
        for count, start in enumerate(range(0, len(text), 4), 1):
            own = {"prompt_tokens": 9, "generation_tokens": count, "target_calls": count, **same}
            reason = "stop" if start + 4 >= len(text) else None
            yield GenerationResponse(text=text[start : start + 4], finish_reason=reason, **own)

    return lambda *_, **__: Answer(segments(next(left)))


def script(texts: Iterable[str]) -> None:
    """Replace an engine's answers by these texts, in this process."""
    from ssmlx import Engine

    Engine.stream = scripted_stream(texts)


def spell() -> None:
    """Replace the text of every answer by its token ids, in this process."""
    from ssmlx import engine

    real = engine.plan_answer_segments

    def spelled(*args, **more):
        for one in real(*args, **more):
            ids = "".join(f"{token} " for token in getattr(one, "tokens", ()))
            yield replace(one, text=ids) if ids else one

    engine.plan_answer_segments = spelled


if __name__ == "__main__":
    from ssmlx.server.__main__ import main

    told = json.loads(sys.argv[1])
    spell() if told == "ids" else script(told)
    raise SystemExit(main(sys.argv[2:]))


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def is_well(connection):
    """Read the answer to `GET`; whether it is the right one."""
    told = b""
    while not told.endswith(b"}") and (data := connection.recv(1000)):
        told += data
    return told.startswith(b"HTTP/1.1 200") and told.endswith(b'{"status":"ok"}')


def wait_until(is_so, seconds=30):
    """Wait for what another thread does soon; whether it came."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()
