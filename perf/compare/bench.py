"""A task's systems, loaded on one target: all on the very same weights.

For an adapter of scope "all" the target is the base with its LoRA merged, for every system; for
scope "streams" it is the base as it is. mlx-lm answers by its own model, which shares the arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.api import check_prompt
from ssmlx.calibration.timing import Answer, ssmlx_answer
from ssmlx.loading.adapter import Adapter
from ssmlx.loading.attach import check_base, check_lora
from ssmlx.loading.load import load_base, load_tokenizer
from ssmlx.model.lora import RowScope, attach_lora
from ssmlx.model.streams import StreamFusedModel
from ssmlx.plan import make_plan
from ssmlx.settings import SamplingConfig

from ..run.common import mlx_lm_answer
from ..run.samples import read_own_lora
from ..run.systems import MLX_LM
from .drafting import Drafting, load_drafting, loaded_for_one, same_arrays
from .plan import Plan, TaskPlan
from .systems import DRAFT_ALONE, DecodingMethod

Answerer = Callable[[list[int]], Answer]


@dataclass(frozen=True)
class Extra:
    """What a system needs beside the target.

    Attributes:
        parameters: trained numbers.
        weight_bytes: memory that stays in use once they are loaded.
        levels: tokens that it drafts ahead, at most.
        nodes: of its trees, at most.
    """

    parameters: int = 0
    weight_bytes: int = 0
    levels: int = 0
    nodes: int = 1


@dataclass(frozen=True, eq=False)
class Bench:
    """Everything that a task's answers take.

    Attributes:
        model: mlx-lm's own model of the target.
        tokenizer: stops where the adapter's answers end.
        scope: of the adapter, see `scope_of`; None without one.
        target_bytes: memory of the target's weights.
        prompts: tokens.
        answerers: by the name of the system.
        extras: by the name of the system.
    """

    model: Any
    tokenizer: TokenizerWrapper
    scope: str | None
    target_bytes: int
    prompts: list[list[int]]
    answerers: Mapping[str, Answerer]
    extras: Mapping[str, Extra]


def load_bench(plan: Plan, task: TaskPlan) -> Bench:
    """Load a task's systems, and check all that could fail later.

    Raises:
        InputError: weights are broken, belong to another model, or do not fit the settings.
    """
    target, tokenizer, adapter = load_target(plan, task.adapter)
    template = adapter.config.prompt_template if adapter else None
    prompts = [e.tokens(target, tokenizer, template) for e in task.examples]
    for prompt in prompts:
        check_prompt(target, len(prompt))
    gc.collect()  # the memory that each kind of drafting takes is measured from here on
    kinds = dict.fromkeys(system.kind for system in task.systems if system.config)
    drafting = {kind: load_drafting(plan, task, kind, target, tokenizer) for kind in kinds}
    model = same_arrays(target.backbone.model)
    return Bench(
        model,
        tokenizer,
        scope_of(adapter) if adapter else None,
        tree_reduce(lambda size, array: size + array.nbytes, model.parameters(), 0),
        prompts,
        answerers_of(plan, task, model, tokenizer, drafting),
        {system.name: extra_of(system, drafting) for system in task.systems},
    )


def load_target(
    plan: Plan, folder: Path | None
) -> tuple[StreamFusedModel, TokenizerWrapper, Adapter | None]:
    """The model that all systems decode with, its tokenizer, and the adapter."""
    backbone, settings = load_base(plan.weights, plan.dtype)
    tokenizer = load_tokenizer(plan.weights, settings)
    if folder is None:
        return StreamFusedModel(backbone), tokenizer, None
    adapter = read_own_lora(folder)
    check_base(adapter, backbone)
    check_lora(backbone.model, adapter.lora, folder)
    lora = adapter.every_row_lora
    if lora:
        attach_lora(backbone.model, lora, RowScope(0), merge=True, dtype=backbone.dtype)
        mx.eval(backbone.model.parameters())
    tokenizer.eos_token_ids = set(tokenizer.eos_token_ids) | set(adapter.config.end_token_ids)
    return StreamFusedModel(backbone), tokenizer, adapter


def scope_of(adapter: Adapter) -> str:
    """The scope of its streams; "task" where they draft for a fine-tuned model."""
    return "task" if adapter.task_lora else adapter.config.adapter_scope


def extra_of(system: DecodingMethod, drafting: Mapping[str, Drafting]) -> Extra:
    """What a system needs beside the target; its drafter is made once, which checks it.

    Raises:
        InputError: its settings do not fit the model.
    """
    if system.config is None:
        return Extra()
    own = drafting[system.kind]
    drafter = make_plan(own.model, system.config, **own.loaded).drafter
    if drafter is None:
        return Extra()
    parameters = drafter.num_parameters + own.lora_parameters
    return Extra(parameters, own.weight_bytes, drafter.num_levels, drafter.max_nodes)


def answerers_of(
    plan: Plan,
    task: TaskPlan,
    model: Any,
    tokenizer: TokenizerWrapper,
    drafting: Mapping[str, Drafting],
) -> dict[str, Answerer]:
    """How each system answers; `model` is mlx-lm's own of the target."""
    own = {MLX_LM: model}
    if "draft-model" in drafting:
        own[DRAFT_ALONE] = drafting["draft-model"].loaded["draft_model"].model
    return {
        system.name: mlx_lm_answerer(own[system.kind], tokenizer, task.max_tokens, plan.sampling)
        if system.kind in own
        else ssmlx_answerer(drafting[system.kind], tokenizer, system)
        for system in task.timed
    }


def ssmlx_answerer(
    drafting: Drafting, tokenizer: TokenizerWrapper, system: DecodingMethod
) -> Answerer:
    """Answers by ssmlx's loop."""
    assert system.config is not None
    config = system.config
    return lambda prompt: ssmlx_answer(
        drafting.model, tokenizer, prompt, config, **loaded_for_one(drafting)
    )


def mlx_lm_answerer(
    model: Any, tokenizer: TokenizerWrapper, most: int, sampling: SamplingConfig
) -> Answerer:
    """Answers by mlx-lm's own loop; where it samples, it starts each answer from the seed."""
    if sampling.temp == 0:
        return lambda prompt: mlx_lm_answer(model, tokenizer, prompt, most)
    sampler = make_sampler(sampling.temp, top_k=sampling.top_k)

    def answer(prompt: list[int]) -> Answer:
        mx.random.seed(sampling.seed or 0)
        return mlx_lm_answer(model, tokenizer, prompt, most, sampler)

    return answer
