"""How answers are sampled on the loaded model, and the lines that say so."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..settings import GenerateConfig, ModelSampling
from .decoding_options import reject_options_needing

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..generation.segments import GenerationResponse
    from ..model.streams import StreamFusedModel

_LOOP_TIMES = 3  # how often an answer says the same in the end, if it repeats itself
_LOOP_TOKENS = 24  # at least, these times together
_MOST_IN_LOOP = 200  # tokens, each time


def with_model_sampling(
    args: argparse.Namespace, config: GenerateConfig, model: StreamFusedModel
) -> GenerateConfig:
    """The settings with the model's own sampling where options leave it open; InputError if
    decoding is then greedy, and an option of sampling has no effect."""
    config = config.following(model.backbone.origin.sampling)
    if not config.temp:
        reject_options_needing("--temp above 0", args)
    return config


def answer_lines(
    config: GenerateConfig,  # as options give it, before it is resolved
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
) -> list[str]:
    """What a user would not expect of the answers; empty if there is nothing to report."""
    from ..prompts import adapter_template

    own = model.backbone.origin.sampling
    lines = [sampling_line(config, own)] if own.temp else []
    if not tokenizer.has_chat_template and adapter_template(model) is None:
        lines.append("the model has no chat template: a prompt goes to it as it is")
    return lines


def sampling_line(config: GenerateConfig, own: ModelSampling) -> str:
    """How tokens are chosen, and which source set this."""
    if config.numbers(own).temp == 0:
        why = "; the model's generation_config.json asks for sampling" if own.temp else ""
        return f"greedy decoding, {'as asked for' if config.temp == 0 else 'the default'}{why}"
    off = vars(ModelSampling())
    used = {name: one for name, one in vars(config.numbers(own)).items() if one != off[name]}
    given = {name: one for name, one in used.items() if getattr(config, name) is not None}
    followed = {name: one for name, one in used.items() if name not in given}
    if not followed:
        return f"sampling with {_in_words(given)}, as asked for"
    asked = f"{_in_words(given)} as asked for, " if given else ""
    says = "as the model's generation_config.json says"
    return f"sampling with {asked}{_in_words(followed)} {says}; --temp 0 is greedy"


def repeats_itself(
    answer: Sequence[GenerationResponse],  # all its segments
) -> bool:
    """Whether an answer that did not end by itself went in a circle."""
    tokens = [token for one in answer for token in one.tokens]
    if answer[-1].finish_reason == "stop":
        return False
    for period in range(1, min(_MOST_IN_LOOP, len(tokens) // _LOOP_TIMES) + 1):
        tail = tokens[-max(_LOOP_TOKENS, _LOOP_TIMES * period) :]
        if len(tail) >= _LOOP_TOKENS and tail[period:] == tail[:-period]:
            return True
    return False


def _in_words(numbers: dict[str, float]) -> str:
    """Settings in words, such as "temp 0.6, top-p 0.95, repetition penalty 1.05"."""
    words = {name: name.replace("_penalty", " penalty").replace("_", "-") for name in numbers}
    return ", ".join(f"{words[name]} {value:g}" for name, value in numbers.items())
