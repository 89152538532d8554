"""The answers of `perf.quality`, each kept as it comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from huggingface_hub.utils import tqdm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.calibration.timing import Answer, in_turns, ssmlx_answer
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig

from ..run.common import mlx_lm_answer, text_of
from ..run.store import AnswerStore, Kept, code_version, tell_kept, timed_on, weights_version
from ..run.systems import MLX_LM, ModelUnderTest, load_system
from .plan import Plan


def answer_system(plan: Plan, system: ModelUnderTest, *, fresh: bool) -> dict[str, list[Kept]]:
    """A system's answers by variant; variants take turns, so that their speeds compare."""
    stores = open_stores(plan, system, fresh=fresh)
    model, tokenizer = load_system(plan.weights, system)
    prompts = [e.tokens(model, tokenizer, system.template) for e in plan.examples]
    answerers = {
        label: answerer(model, tokenizer, config, plan.max_tokens)
        for label, config in system.variants.items()
    }
    code = code_version()
    for label, store in stores.items():
        tell_kept(f"{system.name}, {label}", [store[p] for p in prompts if p in store], code)
        if any(prompt not in store for prompt in prompts):
            answerers[label](prompts[0])  # a warm-up, for the speed of the first answer
    progress = tqdm(prompts, desc=system.name, unit="prompt", disable=None)
    for prompt, label in in_turns(progress, list(stores)):
        if prompt not in stores[label]:
            answer = answerers[label](prompt)
            stores[label].keep(prompt, Kept(answer, text_of(tokenizer, answer.tokens), code))
    return {label: [store[prompt] for prompt in prompts] for label, store in stores.items()}


def open_stores(plan: Plan, system: ModelUnderTest, *, fresh: bool) -> dict[str, AnswerStore]:
    """Where each variant's answers are kept."""
    stores = {
        label: AnswerStore(plan.out, f"quality-{plan.task.name}", settings_of(plan, system, label))
        for label in system.variants
    }
    for store in stores.values():
        if fresh:
            store.forget()
    return stores


def answerer(
    model: StreamFusedModel, tokenizer: TokenizerWrapper, config: GenerateConfig | None, most: int
) -> Callable[[list[int]], Answer]:
    """How a variant answers; None is mlx-lm's own loop, on the very arrays that ssmlx uses."""
    if config is None:
        return lambda prompt: mlx_lm_answer(model.backbone.model, tokenizer, prompt, most)
    return lambda prompt: ssmlx_answer(model, tokenizer, prompt, config)


def settings_of(plan: Plan, system: ModelUnderTest, label: str) -> dict[str, Any]:
    """Everything that an answer depends on, beside its prompt's tokens."""
    config = system.variants[label]
    return {
        "format": 1,
        "weights": weights_version(plan.weights, system.folder),
        "role": system.role,
        "end_tokens": sorted(system.end_tokens),
        "max_tokens": plan.max_tokens,
        "decoding": asdict(config) if config else MLX_LM,
        "machine": timed_on(),
    }
