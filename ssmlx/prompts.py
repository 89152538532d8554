"""Files of prompts, and from a user's text to prompt tokens."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import InputError, require
from .settings import StreamConfig

Message = Mapping[str, str]
"""One turn of a chat: {"role": "system" | "user" | "assistant", "content": text}."""

Prompt = Mapping[str, Any]
"""What is asked, a line of a file: "prompt", a text, or "messages", the turns of a chat."""


class Model(Protocol):
    """What a prompt needs to know of a model: its adapter's settings, if it has one."""

    @property
    def config(self) -> StreamConfig | None: ...


def read_prompts(path: Path, option: str = "--prompts") -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, each with "prompt" or "messages" and whatever it holds.

    A last turn of the assistant's, as training data has it, is left out of "messages".

    Args:
        path: the file.
        option: the command line's name for it, for messages.
    """
    lines = read_lines(path, option)
    require(
        bool(lines),
        f"{path} holds no prompts",
        expected="a JSON object a line",
        do=f"check {option}",
    )
    return [_checked_prompt(line, f"{path}, line {number},") for number, line in lines]


def read_lines(
    path: Path, option: str, expected: str = "a JSON object a line"
) -> list[tuple[int, str]]:
    """The lines of a JSON Lines file that are not blank, each with its number."""
    require(path.is_file(), f"{path} does not exist", expected=expected, do=f"check {option}")
    try:
        # JSON allows line separators inside texts that str.splitlines would cut at.
        numbered = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        return [(number, line) for number, line in numbered if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text", expected="a JSON object a line", do="save it as UTF-8"
        ) from error


def _checked_prompt(line: str, where: str) -> dict[str, Any]:
    expected, do = 'an object such as {"prompt": "..."}', "correct the line"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error})", expected=expected, do=do) from error
    kinds = [kind for kind in ("prompt", "messages") if isinstance(record, dict) and kind in record]
    require(
        len(kinds) == 1,
        f"{where} {'has both a prompt and messages' if kinds else 'has no prompt'}",
        expected='an object with either "prompt" or "messages"',
        do=do,
    )
    messages = as_messages(record)
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        record["messages"] = messages = messages[:-1]
    are_turns = isinstance(messages, list) and all(
        isinstance(turn, dict)
        and turn.get("role") in ("system", "user", "assistant")
        and isinstance(turn.get("content"), str)
        for turn in messages
    )
    require(
        are_turns and bool(messages) and messages[-1]["role"] == "user",
        f'{where} has a bad "{kinds[0]}"',
        expected="a text, or a list of objects with role (system, user, assistant) and "
        "content, the last one from the user, or an answer to it",
        do=do,
    )
    found = f"{where} has an empty prompt"
    require(bool(messages[-1]["content"].strip()), found, expected=expected, do=do)
    return record


def as_messages(prompt: Prompt) -> Any:
    """A prompt as the turns of a chat."""
    if "messages" in prompt:
        return prompt["messages"]
    return [{"role": "user", "content": prompt["prompt"]}]


def user_text(prompt: Prompt) -> str:
    """What the user says last."""
    return str(as_messages(prompt)[-1]["content"])


def encode_prompt(
    prompt: Prompt,
    model: Model,
    tokenizer: TokenizerWrapper,
    template: str | None = None,
) -> list[int]:
    """Under a template as `prompt_tokens`; several turns under the model's own chat template."""
    messages = as_messages(prompt)
    if len(messages) == 1:
        return prompt_tokens(user_text(prompt), model, tokenizer, template)
    return chat_tokens(tokenizer, messages)


def chat_tokens(tokenizer: TokenizerWrapper, messages: Sequence[Message]) -> list[int]:
    """The prompt of a chat under the model's own template, up to where the answer starts.

    Raises:
        InputError: there is no template, or it refuses the turns.
    """
    require(
        tokenizer.has_chat_template,
        "the model's tokenizer has no chat template",
        expected="a model made for chat",
        do="use such a model, or generate with --template raw",
    )
    for message in messages:
        content: object = message.get("content")
        # Training data may hold a turn of tools, without text.
        check_text(content if isinstance(content, str) else "")
    with refusing_turns("these turns"):
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))


@contextmanager
def refusing_turns(turns: str) -> Iterator[None]:
    """Tell in one line what a chat template has against `turns`."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise InputError(
            f"the model's chat template refuses {turns} ({' '.join(str(error).split())})",
            expected="turns that it knows",
            do="change or drop them",
        ) from error


def prompt_tokens(
    text: str, model: Model, tokenizer: TokenizerWrapper, template: str | None = None
) -> list[int]:
    """The tokens of one prompt.

    Args:
        text: what the user asks.
        model: its adapter's template is used where `template` is None.
        tokenizer: the model's tokenizer.
        template: "chat", the model's chat template; "raw", the text as it is; or a text with
            `{prompt}`. None: the adapter's own, then the chat template, then raw.

    Raises:
        InputError: the text is empty or not Unicode, or the template cannot be used.
    """
    own = model.config.prompt_template if model.config else None
    return text_tokens(text, tokenizer, own if template is None else template)


def text_tokens(text: str, tokenizer: TokenizerWrapper, template: str | None) -> list[int]:
    """The tokens of one prompt under a template as `prompt_tokens` takes it."""
    require(bool(text.strip()), "the prompt is empty", expected="some text", do="give a prompt")
    if template is None:
        template = "chat" if tokenizer.has_chat_template else "raw"
    if template == "chat":
        return chat_tokens(tokenizer, [{"role": "user", "content": text}])
    if template == "raw":
        return encode(text, tokenizer)
    require(
        "{prompt}" in template,
        f"--template {template!r}",
        expected="chat, raw, or a text with {prompt} in it",
        do="put {prompt} where the prompt goes",
    )
    return encode(template.replace("{prompt}", text), tokenizer)


def encode(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """Tokens of `text`, with the model's start token unless the text begins with it."""
    check_text(text)
    bos = tokenizer.bos_token
    add_special_tokens = bos is None or not text.startswith(bos)
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def check_text(text: str) -> None:
    """Check that `text` has no stray byte or half of a surrogate pair, which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not Unicode: {text[error.start]!a} at {error.start}",
            expected="UTF-8 text",
            do="correct that character",
        ) from error


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
