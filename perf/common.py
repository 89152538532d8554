"""What the measurements share: timed answers, a record of the machine, results on disk."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

import ssmlx
from ssmlx.api import GenerateConfig, stream_generate
from ssmlx.blas import HINT
from ssmlx.model import StreamFusedModel

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "perf" / "results"
BASE = "smollm2-135m-q4_1"


@dataclass(frozen=True)
class Answer:
    """One answer, timed.

    Attributes:
        tokens: ids, the end token included.
        target_calls: forward passes, the prompt's counted as one.
        decode_seconds: from the first token to the last.
    """

    tokens: list[int]
    target_calls: int
    decode_seconds: float

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
    return Answer(tokens, responses[-1].target_calls, responses[-1].decode_seconds)


def mlx_lm_answer(
    model: Any, tokenizer: TokenizerWrapper, prompt: list[int], max_tokens: int
) -> Answer:
    """Answer with mlx-lm's own `stream_generate`, timed from its first token to its last."""
    tokens, first = [], 0.0
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        first = first or time.perf_counter()
        tokens.append(response.token)
    return Answer(tokens, len(tokens), time.perf_counter() - first)


def machine() -> dict[str, str]:
    """Where and with what a figure was measured."""
    names = ("mlx", "mlx-lm", "transformers", "numpy")
    return {
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        "blas": "OpenBLAS or Accelerate" if ssmlx.has_fast_blas else f"reference ({HINT})",
        **{name: version(name) for name in names},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = {
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        }
        return ", ".join(sorted(names)) or platform.processor()
    return platform.processor()


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result as JSON into perf/results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return path
