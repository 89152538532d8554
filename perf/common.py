"""What the measurements share: models, prompts, a record of the machine, results on disk."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

import ssmlx
from convert.adapter import read_checkpoint, write_adapter, write_fused
from ssmlx.api import GenerateConfig, end_token_ids, stream_generate
from ssmlx.blas import HINT
from ssmlx.cli.generate import read_prompts
from ssmlx.config import AdapterScope
from ssmlx.loading import load, load_base, load_words
from ssmlx.model import StreamFusedModel
from ssmlx.prompts import prompt_tokens
from ssmlx.registry import resolve_model

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "smollm2-135m-sql"
PROMPTS = ROOT / "examples" / "data" / "sql_test_100.jsonl"
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


@contextmanager
def sample_folders(scope: AdapterScope) -> Iterator[tuple[Path, Path | None]]:
    """(model folder, adapter folder) of the sample checkpoint in float32, made for the block.

    For scope "all" the LoRA is merged: mlx-lm and ssmlx load the very same weights. For scope
    "streams" the model is the base itself, and the adapter stands beside it.
    """
    path = resolve_model(BASE)
    backbone, config = load_base(path, "float32")
    adapter = read_checkpoint(
        CHECKPOINT, CHECKPOINT / "streams.safetensors", backbone, scope=scope, base_model=BASE
    )
    with tempfile.TemporaryDirectory() as work:
        model, streams = Path(work, "model"), Path(work, "adapter")
        model.mkdir()
        if scope == "all":
            write_fused(model, adapter, backbone, load_words(path, config), config)
            yield model, None
            return
        streams.mkdir()
        write_adapter(streams, adapter)
        write_base(model, backbone.model, config, load_words(path, config))
        yield model, streams


def write_base(folder: Path, model: Any, config: dict[str, Any], words: TokenizerWrapper) -> None:
    """Write a float model folder that mlx-lm loads."""
    settings = {k: v for k, v in config.items() if not k.startswith("quantization")}
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(settings, folder / "config.json")
    words.save_pretrained(folder)


def load_both(model: Path, adapter: Path | None) -> tuple[StreamFusedModel, TokenizerWrapper, Any]:
    """ssmlx's model, the tokenizer, and mlx-lm's own model of the same weights.

    For scope "all" the two share the arrays themselves: where a copy happens to lie in memory
    alone moved tokens/s by some 3 %.
    """
    fused, tokenizer = load(str(model), adapter=adapter, dtype="float32")
    plain, _ = mlx_lm.load(str(model))
    if adapter is None:
        plain.load_weights(tree_flatten(fused.backbone.model.parameters()))
    return fused, tokenizer, plain


def encoded_prompts(
    model: StreamFusedModel, tokenizer: TokenizerWrapper, count: int, path: Path = PROMPTS
) -> list[list[int]]:
    """The first `count` prompts of a file, under the adapter's template."""
    return [prompt_tokens(text, model, tokenizer) for text in read_prompts(path)[:count]]


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


def check_end_tokens(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> None:
    """Both sides must stop at the same tokens for their answers to be comparable."""
    if end_token_ids(model, tokenizer) != set(tokenizer.eos_token_ids):
        raise ValueError("the adapter ends answers at tokens that the tokenizer does not name")


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
