"""From a user's text to prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import InputError
from .model.streams import StreamFusedModel

Message = Mapping[str, str]
"""One turn of a chat: {"role": "system" | "user" | "assistant", "content": text}."""


def chat_tokens(tokenizer: TokenizerWrapper, messages: Sequence[Message]) -> list[int]:
    """The prompt of a chat under the model's own template, up to where the answer starts.

    Raises:
        InputError: there is no template, or it refuses the turns.
    """
    _require_template(tokenizer)
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
    text: str, model: StreamFusedModel, tokenizer: TokenizerWrapper, template: str | None = None
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
    if not text.strip():
        raise InputError("the prompt is empty", expected="some text", do="give a prompt")
    if template is None:
        own = model.config.prompt_template if model.config else None
        template = own or ("chat" if tokenizer.has_chat_template else "raw")
    if template == "chat":
        return chat_tokens(tokenizer, [{"role": "user", "content": text}])
    if template == "raw":
        return encode(text, tokenizer)
    if "{prompt}" not in template:
        raise InputError(
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
    """Check that `text` has no stray byte or half of a surrogate pair, which tokenizers refuse.

    Raises:
        InputError: it has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not Unicode: {text[error.start]!a} at {error.start}",
            expected="UTF-8 text",
            do="correct that character",
        ) from error


def _require_template(tokenizer: TokenizerWrapper) -> None:
    if not tokenizer.has_chat_template:
        raise InputError(
            "the model's tokenizer has no chat template",
            expected="a model made for chat",
            do="use such a model, or generate with --template raw",
        )
