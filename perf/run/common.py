"""What the measurements share: timed answers, and results on disk."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.api import stream_generate
from ssmlx.errors import InputError
from ssmlx.loading.files import write_whole
from ssmlx.model.streams import StreamFusedModel
from ssmlx.plan import GenerateConfig

from .machine import machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"
BASE = "smollm2-135m-q4_1"


@dataclass(frozen=True)
class Answer:
    """One answer, timed.

    Attributes:
        tokens: ids, the end token included.
        target_calls: forward passes, the prompt's counted as one.
        decode_seconds: from the first token to the last.
        prefill_seconds: until the first token.
        draft_calls: forward passes of a draft model.
        peak_bytes: most memory in use on top of what was there before; 0 where not measured.
    """

    tokens: list[int]
    target_calls: int
    decode_seconds: float
    prefill_seconds: float = 0.0
    draft_calls: int = 0
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        """From the prompt to the last token."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, over the time that they took."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


def ssmlx_answer(
    model: StreamFusedModel, tokenizer: TokenizerWrapper, prompt: list[int], config: GenerateConfig
) -> Answer:
    """Answer with ssmlx."""
    responses = list(stream_generate(model, tokenizer, prompt, config))
    tokens = [token for response in responses for token in response.tokens]
    last = responses[-1]
    return Answer(
        tokens, last.target_calls, last.decode_seconds, last.prefill_seconds, last.draft_calls
    )


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


def in_turns(prompts: Iterable[Any], labels: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Every label for every prompt; the order of labels rotates from prompt to prompt."""
    for index, prompt in enumerate(prompts):
        turn = index % len(labels)
        for label in (*labels[turn:], *labels[:turn]):
            yield prompt, label


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


def add_counts(
    parser: argparse._ActionsContainer, *rows: tuple[str, int, str], metavar: str | None = None
) -> None:
    """Options that are whole numbers: (name without dashes, default, what it is) each."""
    for name, default, text in rows:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar=metavar,
            help=f"{text} (default: %(default)s)",
        )  # fmt: skip


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


def write_result(result: Mapping[str, Any], target: Path, text: str) -> None:
    """Print a result's text, and write `target`.json and .txt."""
    print(text)
    saved = json.dumps(result, indent=1, ensure_ascii=False)
    write_whole(target.with_suffix(".json"), f"{saved}\n".encode())
    write_whole(target.with_suffix(".txt"), f"{text}\n".encode())
    print("saved", target.with_suffix(".json"), file=sys.stderr)


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


def publish(
    result: Mapping[str, Any], target: Path, text: str, draw: Callable[[Any, Path], None]
) -> None:
    """`write_result`, and a picture in `target`.png."""
    write_result(result, target, text)
    try:
        draw(result, target.with_suffix(".png"))
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
