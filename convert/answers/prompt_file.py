"""Files of prompts, and the tokens that a model is to answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssmlx.errors import InputError
from ssmlx.prompts import encode, refusing_turns

ROLES = ("system", "user", "assistant")
KINDS = ("prompt", "messages")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file, each with "prompt" or "messages" and nothing else.

    Raises:
        InputError: as `read_records`.
    """
    return [{kind: row[kind] for kind in KINDS if kind in row} for row in read_records(path)]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, each with "prompt" or "messages", and whatever else it holds.

    A last turn of the assistant's, as training data has it, is left out of "messages".

    Raises:
        InputError: the file is missing or empty, or names the first bad line.
    """
    if not path.is_file():
        raise InputError(
            f"{path} does not exist", expected="a file of prompts", do="check --prompts"
        )
    records = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                records.append(_checked_record(line, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text", expected="UTF-8", do="check --prompts") from error
    if not records:
        raise InputError(f"{path} is empty", expected="one prompt a line", do="check --prompts")
    return records


def _checked_record(line: str, where: str) -> dict[str, Any]:
    do = "correct the line"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(
            f"{where} is no JSON ({error})", expected="a JSON object", do=do
        ) from error
    kinds = [kind for kind in KINDS if isinstance(record, dict) and kind in record]
    if len(kinds) != 1:
        found = "has both" if kinds else "has neither"
        raise InputError(
            f"{where} {found}",
            expected='either "prompt" or "messages" ("text" and token ids tell no prompt)',
            do=do,
        )
    if kinds == ["messages"]:
        record["messages"] = _unanswered(record["messages"])
    messages = as_messages(record)
    if not _are_messages(messages):
        raise InputError(
            f'{where} has a bad "{kinds[0]}"',
            expected="a text, or a list of objects with role (system, user, assistant) and "
            "content, the last one from the user, or an answer to it",
            do=do,
        )
    if not messages[-1]["content"].strip():
        raise InputError(f"{where} has an empty prompt", expected="some text", do=do)
    return record


def as_messages(prompt: dict[str, Any]) -> Any:
    """A prompt as the turns of a chat."""
    if "messages" in prompt:
        return prompt["messages"]
    return [{"role": "user", "content": prompt["prompt"]}]


def _unanswered(messages: Any) -> Any:
    """Turns of a chat without the answer at their end, if there is one."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    return messages[:-1] if is_answer else messages


def _are_messages(messages: Any) -> bool:
    """Whether these are turns of a chat that the model has to answer now."""
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(turn, dict)
            and turn.get("role") in ROLES
            and isinstance(turn.get("content"), str)
            for turn in messages
        )
        and messages[-1]["role"] == "user"
    )


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
