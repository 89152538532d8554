"""What `perf.bench` measures: an adapter on its base, and mlx-lm's model of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.api import check_prompt, end_token_ids
from ssmlx.calibration.timing import Answer, ssmlx_answer
from ssmlx.errors import InputError
from ssmlx.loading.adapter import Adapter
from ssmlx.loading.attach import fuse_streams
from ssmlx.loading.load import load_base, load_tokenizer, load_weights
from ssmlx.loading.names import resolve_adapter
from ssmlx.memory import Memory, memory_of, total_bytes
from ssmlx.model.lora import RowScope, attach_lora
from ssmlx.model.shapes import arrays_in
from ssmlx.model.streams import StreamFusedModel
from ssmlx.plan import make_plan
from ssmlx.settings import GenerateConfig

from ..compare.bench import scope_of
from ..run.common import mlx_lm_answer
from ..run.samples import read_own_lora
from ..run.tasks import Example, Task, read_examples

SYSTEMS = ("mlx-lm", "plain", "streaming")
Answerer = Callable[[list[int]], Answer]


@dataclass(frozen=True, eq=False)
class Target:
    """An adapter on its base: plain decoding, streaming and mlx-lm decode with the same arrays.

    Attributes:
        name: of the adapter.
        scope: of its streams, see `compare_bench.scope_of`.
        model, tokenizer: ssmlx's; the tokenizer stops where the adapter's answers end.
        mlx_model: mlx-lm's own.
        prompts: tokens, under the adapter's template.
        answers: tokens of a right answer to each, with its end; none where none is known.
    """

    name: str
    scope: str
    model: StreamFusedModel
    tokenizer: TokenizerWrapper
    mlx_model: Any
    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]

    @property
    def drafting(self) -> str:
        """The trees that streaming drafts here, in words."""
        drafter = make_plan(self.model, GenerateConfig(decoding="streaming")).drafter
        assert drafter is not None
        return f"trees of {drafter.max_nodes} nodes, {drafter.num_levels} levels"

    @property
    def memory(self) -> Memory:
        """The weights, part by part."""
        return memory_of(self.model, self.model.make_cache())

    def weight_bytes(self, system: str) -> int:
        """Bytes of the weights that a system needs."""
        if system == "streaming":
            return self.memory.weights
        return total_bytes(arrays_in(self.mlx_model.parameters()))

    def answerers(self, max_tokens: int) -> dict[str, Answerer]:
        """How each of `SYSTEMS` answers, greedily, at most `max_tokens`; streaming as by default:
        where a profile says that drafting does not pay, it stops."""
        streaming = GenerateConfig(max_tokens=max_tokens)
        plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
        model, words = self.model, self.tokenizer
        return {
            "mlx-lm": lambda prompt: mlx_lm_answer(self.mlx_model, words, prompt, max_tokens),
            "plain": lambda prompt: ssmlx_answer(model, words, prompt, plain),
            "streaming": lambda prompt: ssmlx_answer(model, words, prompt, streaming),
        }


def load_target(name: str, path: Path, dtype: str, task: Task, data: Path) -> Target:
    """Load an adapter and its base.

    Args:
        name: of a bundled adapter, or a folder.
        path: the base model's folder.
        dtype: as `ssmlx.load` takes it.
        task, data: what to ask.

    Raises:
        InputError: something is missing, broken, or does not fit the rest.
    """
    adapter = adapter_with_streams(name)
    backbone, settings = load_base(path, dtype, "auto")
    tokenizer = load_tokenizer(path, settings)
    mlx_model = load_weights(path, dtype, f"{path} cannot be loaded")[0]
    model = fuse_streams(backbone, adapter, merge_lora=True)
    # Merged, or beside packed weights: in both models the same way.
    lora, whole = adapter.every_row_lora, RowScope(0)
    attach_lora(mlx_model, lora, whole, merge=True, dtype=backbone.dtype)
    mlx_model.load_weights(arrays_without(backbone.model, adapter.stream_lora))
    mx.eval(backbone.model.parameters())
    tokenizer.eos_token_ids = end_token_ids(model, tokenizer)
    template = adapter.config.prompt_template
    examples = read_examples(data, task, None)
    prompts = [one.tokens(model, tokenizer, template) for one in examples]
    for prompt in prompts:
        check_prompt(model, len(prompt))
    answers = [answer_tokens(one, tokenizer) for one in examples]
    return Target(Path(name).name, scope_of(adapter), model, tokenizer, mlx_model, prompts, answers)


def answer_tokens(example: Example, tokenizer: TokenizerWrapper) -> list[int]:
    """The first right answer with its end; nothing where none is known."""
    if not example.references:
        return []
    text = tokenizer.encode(example.references[0], add_special_tokens=False)
    return [*text, tokenizer.eos_token_id]


def arrays_without(model: nn.Module, paths: Iterable[str]) -> list[tuple[str, mx.array]]:
    """The arrays of `model` by name, as if there were no LoRA on the modules at `paths`."""
    pairs: Any = tree_flatten(model.parameters())
    arrays = dict(pairs)
    for path in paths:
        del arrays[f"{path}.lora_a"], arrays[f"{path}.lora_b"]
        inner = [name for name in arrays if name.startswith(f"{path}.linear.")]
        for name in inner:
            arrays[name.replace(f"{path}.linear.", f"{path}.", 1)] = arrays.pop(name)
    return list(arrays.items())


def adapter_with_streams(name: str) -> Adapter:
    """An adapter by its name or folder.

    Raises:
        InputError: there is none, or it drafts nothing.
    """
    folder = resolve_adapter(name)
    if folder is None or not (adapter := read_own_lora(folder)).config.num_streams:
        raise InputError(f"{name} has no streams", expected="an adapter", do="choose another one")
    return adapter


@contextmanager
def endless(target: Target) -> Iterator[None]:
    """No token ends an answer inside the block, so that all answers are equally long."""
    model, tokenizer = target.model, target.tokenizer
    config, ends = model.config, tokenizer.eos_token_ids
    assert config is not None
    model.config, tokenizer.eos_token_ids = replace(config, end_token_ids=()), set()
    try:
        yield
    finally:
        model.config, tokenizer.eos_token_ids = config, ends


def text_of_length(target: Target, length: int, turn: int) -> list[int]:
    """`length` tokens that end with a prompt, the one of that number: prompts with their answers
    stand before it, as far as there is room."""
    prompts, answers = target.prompts, target.answers
    text = list(prompts[turn % len(prompts)])
    while len(text) < length:
        turn -= 1
        before = turn % len(prompts)
        text = [*prompts[before], *answers[before], *text]
    return text[-length:]
