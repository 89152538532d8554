"""What the measurements share: timed answers, and results on disk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.calibration.timing import Answer
from ssmlx.errors import InputError
from ssmlx.loading.files import write_whole
from ssmlx.tuning.machine import machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"
BASE = "smollm2-135m-q4_1"


def mlx_lm_answer(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    max_tokens: int,
    sampler: Callable[[mx.array], mx.array] | None = None,
) -> Answer:
    """Answer with mlx-lm's own `stream_generate`, greedily unless `sampler` is given."""
    tokens, times = [], [time.perf_counter()]
    responses = mlx_lm.stream_generate(
        model, tokenizer, prompt, max_tokens=max_tokens, sampler=sampler
    )
    for response in responses:
        times.append(time.perf_counter())
        tokens.append(response.token)
    started, first, last = times[0], times[1], times[-1]
    return Answer(tokens, len(tokens), last - first, first - started)


def text_of(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """The text of an answer, without its end token."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        if token not in tokenizer.eos_token_ids:
            detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def split_name(item: str) -> tuple[str | None, str]:
    """`NAME=VALUE` in two; where there is no "=", or the whole is a path, there is no name."""
    name, equals, value = item.partition("=")
    is_whole = not equals or Path(item).expanduser().exists()
    return (None, item) if is_whole else (name, value)


def check_counts(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End with one line where an option is below 1, or one of its numbers is."""
    for name in names:
        value = getattr(args, name)
        least = min(value) if isinstance(value, list) else value
        if least < 1:
            parser.error(f"--{name.replace('_', '-')} {least}: expected 1 or more")


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result as JSON into perf/results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    saved = json.dumps({"machine": machine(), **result}, indent=1)
    write_whole(path, f"{saved}\n".encode())
    return path


@contextmanager
def reading(path: Path, command: str) -> Iterator[None]:
    """Tell in one line that a saved result lacks what the block reads of it.

    Raises:
        InputError: it does.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"{path} is incomplete ({what})",
            expected=f"what this version of python -m {command} writes",
            do="measure again",
        ) from error
