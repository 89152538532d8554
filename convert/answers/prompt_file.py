"""Files of prompts, and the tokens that a model is to answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ssmlx.errors import InputError
from ssmlx.prompts import as_messages, encode, refusing_turns


def distinct(prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompts in their order, each at its first place alone."""
    first: dict[str, dict[str, Any]] = {}
    for prompt in prompts:
        first.setdefault(json.dumps(as_messages(prompt)), prompt)
    return list(first.values())


def encode_prompts(
    prompts: Sequence[dict[str, Any]], tokenizer: Any, longest: int, template: str | None = None
) -> list[list[int]]:
    """Each prompt under a template, up to where the answer starts.

    Args:
        prompts: as `read_prompts` gives them.
        tokenizer: the model's, of transformers.
        longest: the most tokens a prompt may have.
        template: text with `{prompt}`; None for the model's chat template.

    Raises:
        InputError: there is no chat template, a template does not take a prompt, or a prompt is
            too long.
    """
    if template is None and not tokenizer.chat_template:
        raise InputError(
            "the model's tokenizer has no chat template",
            expected="a model made for chat",
            do="choose another --model",
        )
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if template is None:
            tokens = _encode(prompt, tokenizer, number)
        else:
            tokens = encode(template.replace("{prompt}", _one_text(prompt, number)), tokenizer)
        if len(tokens) > longest:
            raise InputError(
                f"prompt {number} has {len(tokens)} tokens",
                expected=f"at most {longest}, the model's context less --max-tokens",
                do="shorten or drop it",
            )
        encoded.append(tokens)
    return encoded


def _one_text(prompt: dict[str, Any], number: int) -> str:
    """The text of a prompt that is a single turn."""
    messages = as_messages(prompt)
    if len(messages) != 1:
        raise InputError(
            f"prompt {number} has {len(messages)} turns",
            expected="one, as the checkpoint's template takes it",
            do="drop that prompt",
        )
    return messages[0]["content"]


def _encode(prompt: dict[str, Any], tokenizer: Any, number: int) -> list[int]:
    with refusing_turns(f"the turns of prompt {number}"):
        return list(
            tokenizer.apply_chat_template(
                as_messages(prompt), add_generation_prompt=True, return_dict=False
            )
        )
