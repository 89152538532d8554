"""Files of prompts, and from a user's text to prompt tokens."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from .errors import InputError, quoted, require
from .json_files import found_in_json, read_json_rows
from .rendering import render_turns
from .settings import StreamConfig
from .turns import ROLES, Message, is_systems, normalise_turns

_APPLY = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
_NO_TEMPLATE_ARGS = {*_APPLY, "messages"} - {"tools", "documents"}

# What the model may call, as chat templates read it: JSON schemas of functions.
Tools = Sequence[Any]

# A line of a file: "prompt", a text, or "messages", the turns of a chat; and "tools", if there are
# any.
Prompt = Mapping[str, Any]


class Model(Protocol):
    """What a prompt needs to know of a model: its adapter's settings, if it has one."""

    @property
    def config(self) -> StreamConfig | None: ...


def read_prompts(
    path: Path,
    option: str = "--prompts",  # the command line's name for the file
) -> list[dict[str, Any]]:
    """The checked prompts of a JSON Lines file, each with whatever else its line holds.

    "messages" are normalised; a last turn of the assistant's, as training data has it, is left out.
    """
    return [row for _, row in read_prompt_rows(path, option)]


def read_prompt_rows(path: Path, option: str = "--prompts") -> list[tuple[str, dict[str, Any]]]:
    """What `read_prompts` does, each with where it is: "FILE, line N"."""
    rows = read_json_rows(path, option, 'an object such as {"prompt": "..."}')
    return [(where, _check_prompt_row(row, where)) for where, row in rows]


def _check_prompt_row(
    row: dict[str, Any],
    where: str,  # the file and the line, which begin each message
) -> dict[str, Any]:
    do = "correct the line"
    kinds = [kind for kind in ("prompt", "messages") if kind in row]
    names = ", ".join(row) or "no fields"
    require(
        len(kinds) == 1,
        f"{where}, has {'both a prompt and messages' if kinds else names}",
        expected='an object with either "prompt" or "messages"',
        do=do,
    )
    if kinds == ["prompt"]:
        require_text_field(row, "prompt", where)
        return row
    found = f'{where}, has invalid "messages"'
    messages = normalise_turns(row["messages"], f"{where}, messages")
    if messages and messages[-1]["role"] == "assistant":
        del messages[-1]
    require(
        bool(messages)
        and messages[-1]["role"] in ("user", "tool")
        and all(turn["role"] in ROLES for turn in messages),
        found,
        expected=f"turns of {', '.join(ROLES)}; the last one the user's or a tool's, or an answer "
        "to it",
        do=do,
    )
    found = f'{where}, has an empty prompt: the user\'s last text in "messages"'
    is_asked = bool(last_user_text({"messages": messages}).strip())
    require(is_asked, found, expected="a text", do=do)
    return {**row, "messages": messages}


def require_text_field(
    row: Mapping[str, Any],
    name: str,
    where: str,  # the file and the line, which begin each message
    *,
    may_be_blank: bool = False,
) -> str:
    value = row.get(name)
    is_text = isinstance(value, str) and (may_be_blank or bool(value.strip()))
    has = f'has {found_in_json(value)} for "{name}"' if name in row else f'lacks "{name}"'
    expected = "a text" if may_be_blank else "a text that is not blank"
    require(is_text, f"{where}, {has}", expected=expected, do="correct the line")
    text = str(value)
    try:
        check_text(text)
    except InputError as error:
        raise error.at(f'{where}, "{name}"') from error
    return text


def as_messages(prompt: Prompt) -> Any:
    """The turns of a prompt, unchecked."""
    if "messages" in prompt:
        return prompt["messages"]
    return [{"role": "user", "content": prompt["prompt"]}]


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """A prompt with a system prompt, unless there is none or it has one of its own."""
    turns = as_messages(prompt)
    if system is None or is_systems(turns[0]):
        return prompt
    return {**prompt, "messages": [{"role": "system", "content": system}, *turns]}


def last_user_text(prompt: Prompt) -> str:
    """The text of the user's last turn; empty without one."""
    said = [turn["content"] for turn in as_messages(prompt) if turn["role"] == "user"]
    return str(said[-1]) if said else ""


def encode_prompt(
    prompt: Prompt,
    model: Model,
    tokenizer: TokenizerWrapper,
    template: str | None = None,  # see `prompt_tokens`
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a prompt up to where the answer starts."""
    # Tools and arguments need a chat template.
    if template is None and not (prompt.get("tools") or template_args):
        template = adapter_template(model)
    return encode_with_template(prompt, tokenizer, template, template_args)


def adapter_template(model: Model) -> str | None:
    """The template that the model's adapter was trained with."""
    return model.config.prompt_template if model.config else None


def encode_with_template(
    prompt: Prompt,
    tokenizer: TokenizerWrapper,
    template: str | None,  # as `prompt_tokens` takes it, but never an adapter's own
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a prompt under a given template, up to where the answer starts."""
    messages = normalise_turns(as_messages(prompt))
    more: Any = {"tools": prompt.get("tools"), "template_args": template_args}
    if [turn["role"] for turn in messages] == ["user"]:
        return encode_user_text(messages[0]["content"], tokenizer, template, **more)
    require(
        template in (None, "chat") or "{prompt}" in template,
        f"--template {template!r} for turns of a chat",
        expected="chat, or a text with {prompt} in it",
        do="choose another",
    )
    return encode_turns(messages, tokenizer, template, **more)


def encode_turns(
    messages: Sequence[Message],
    tokenizer: TokenizerWrapper,
    own_template: str | None,  # the adapter's, which is used if it has `{prompt}`
    **chat_options: Any,  # of `chat_tokens`
) -> list[int]:
    """The tokens of chat turns, or of the last one alone, up to where the answer starts."""
    # An adapter with such a template was trained on single prompts, and answers worse after other
    # turns.
    if own_template is not None and shows_last_turn_alone(messages, own_template, **chat_options):
        asked = normalise_turns(messages[-1:])[0]["content"]
        return encode(own_template.replace("{prompt}", asked), tokenizer)
    return chat_tokens(tokenizer, messages, **chat_options)


def length_before_answer_opens(
    prompt: Sequence[int],
    encode_without_opening: Callable[[], list[int]],
) -> int:
    """How many tokens of a prompt the next turn's prompt begins with as well.

    That is up to where the template opens the answer: with a thought, for instance, which it does
    not show later.
    """
    most = len(prompt) - 1
    try:
        return min(most, common_prefix_length(encode_without_opening(), prompt))
    except InputError:  # some templates take these turns only with an answer after them
        return most


def shows_last_turn_alone(
    messages: Sequence[Message],
    own_template: str | None,
    **chat_options: Any,  # tools and template arguments, which need a chat template
) -> bool:
    """Whether a model sees the user's last turn alone, under an adapter's own template."""
    if own_template is None or "{prompt}" not in own_template or any(chat_options.values()):
        return False
    roles = [turn["role"] for turn in normalise_turns(messages)]
    # Two turns of the user's in a row are one question.
    return roles[-2:] in (["user"], ["assistant", "user"]) and {*roles} <= {"user", "assistant"}


def chat_tokens(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    template_args: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continues: bool = False,
) -> list[int]:
    """The prompt of a chat under the model's own template, up to where the answer starts.

    The template gets the turns in the form that it takes. If it refuses them, or would leave out
    what they say, turns of one role in a row become one, and the system's become the user's. What
    `template_args` does not name, thinking for example, has the template's own default.

    Args:
        tokenizer: the model's.
        messages: the turns, {"role": ..., "content": ...}, the content a text or parts of type
            text.
        tools: what the model may call: JSON schemas, or functions with types and docstrings.
        template_args: what else the template reads, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt opens an assistant's turn after them.
        continues: whether the last turn is left open for the answer to continue; then no other is
            opened.

    Returns:
        Token ids, including the template's special ones.

    Raises:
        InputError: there is no template; it refuses the turns, leaves one out, takes too long, has
            no place for tools, or reads no such arguments; or a turn is invalid, or is not Unicode.
    """
    call = "chat_tokens(tokenizer, messages)"
    require_tokenizer(tokenizer, call)
    require(
        tokenizer.has_chat_template,
        "the model's tokenizer has no chat template",
        expected="a model made for chat",
        do="use such a model, or generate with --template raw",
    )
    require(
        tools is None or isinstance(tools, list | tuple),
        f"tools are {tools!r}"[:80],
        expected="a list of JSON schemas",
        do="correct or omit them",
    )
    more = dict(template_args or {})
    _check_template_args(tokenizer, more)
    more |= {"tools": list(tools)} if tools else {}
    more["add_generation_prompt"] = add_generation_prompt and not continues
    if continues:
        more["continue_final_message"] = True
    text = render_turns(tokenizer, messages, **more)
    check_text(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class TokensBetweenTurns:
    """Tokens that a chat template puts around what is said; none without a template."""

    closing: tuple[int, ...] = ()  # between an answer's last token and the user's next turn
    opening: tuple[int, ...] = ()  # begin a later turn of the user's


def find_tokens_between_turns(tokenizer: TokenizerWrapper) -> TokensBetweenTurns:
    """The tokens between turns; none if the template refuses a user's, an assistant's and a user's
    turn."""
    # Tokens are split after the last end token and the blank tokens that follow it.
    if not tokenizer.has_chat_template:
        return TokensBetweenTurns()
    first = "Hello"
    answer = "Welcome"
    second = "Goodbye"
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", first), ("assistant", answer), ("user", second))
    ]
    try:
        text = render_turns(tokenizer, turns)
    except InputError:
        return TokensBetweenTurns()

    between = text.partition(answer)[2].partition(second)[0].rstrip()
    tokens = list(tokenizer.encode(between, add_special_tokens=False))
    ends = [n for n, token in enumerate(tokens, 1) if token in tokenizer.eos_token_ids]
    at = max(ends, default=0)
    while at < len(tokens) and not tokenizer.decode(tokens[at : at + 1]).strip():
        at += 1
    return TokensBetweenTurns(tuple(tokens[:at]), tuple(tokens[at:]))


def _check_template_args(tokenizer: TokenizerWrapper, given: Mapping[str, Any]) -> None:
    """Refuse names that do not occur as a word in the chat template, since Jinja ignores them
    silently, and those that `apply_chat_template` itself takes."""
    text = getattr(tokenizer, "chat_template", None)
    for name in given:
        # What a template reads that is code is not known.
        is_read = not isinstance(text, str) or re.search(rf"\b{re.escape(name)}\b", text)
        require(
            bool(is_read) and name not in _NO_TEMPLATE_ARGS,
            f"the template argument {name}",
            expected="one that the model's chat template reads",
            do="omit it, or use another model",
        )


def prompt_tokens(
    question: str | Sequence[Message],
    model: Model,
    tokenizer: TokenizerWrapper,
    template: str | None = None,
    *,
    tools: Tools | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a question, or of a chat's turns, up to where the answer starts.

    Args:
        question: a user's text, or the turns of a chat, {"role": ..., "content": ...}.
        model: its adapter's template is used if `template` is None.
        tokenizer: the model's tokenizer.
        template: "chat", the model's chat template; "raw", the text as it is; or a text with
            `{prompt}`. None: the adapter's own, then the chat template, then raw. Turns need the
            chat template, but for a user's alone.
        tools, template_args: for the chat template, which is used with them, as `chat_tokens`
            takes them.

    Raises:
        InputError: the question is empty, invalid or not Unicode, or the template cannot be used.
    """
    call = "prompt_tokens(question, model, tokenizer)"
    require_tokenizer(tokenizer, call)
    is_text = isinstance(question, str)
    is_row = isinstance(question, Sequence) and len(question) > 0
    require(
        is_text or (is_row and isinstance(question[0], Mapping)),
        f"the question is {quoted(question)}",
        expected="a text, or the turns of a chat, each with role and content",
        do="decode bytes to text, or put the text into a turn",
    )
    prompt = {"prompt" if is_text else "messages": question, "tools": tools}
    return encode_prompt(prompt, model, tokenizer, template, template_args)


def encode_user_text(
    text: str,
    tokenizer: TokenizerWrapper,
    template: str | None,  # as `prompt_tokens` takes it, but never an adapter's own
    **more: Any,  # `tools` and `template_args`, for the chat template
) -> list[int]:
    """The tokens of one question, up to where the answer starts."""
    require(bool(text.strip()), "the prompt is empty", expected="some text", do="give a prompt")
    check_text(text)  # before a template moves the position that the message names
    if template is None:
        template = "chat" if tokenizer.has_chat_template else "raw"
    if template == "chat":
        return chat_tokens(tokenizer, [{"role": "user", "content": text}], **more)
    require(
        not any(more.values()),
        "tools or template arguments without a chat template",
        expected="--template chat with them",
        do="choose it, or omit them",
    )
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
    """The tokens of a text, with the tokenizer's special tokens unless the text begins with the
    start token's text."""
    check_text(text)
    bos = tokenizer.bos_token
    add_special_tokens = bos is None or not text.startswith(bos)
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def require_tokenizer(
    value: Any,
    call: str,  # the function that it was given to, with its arguments in order
) -> None:
    """Require a tokenizer as `ssmlx.load` returns it, or one that does what that does."""
    require_loaded(hasattr(value, "has_chat_template"), value, "tokenizer", call)


def require_loaded(
    ok: bool,
    value: Any,
    name: str,  # of the argument
    call: str,
) -> None:
    require(
        ok,
        f"the {name} is of type {type(value).__name__}",
        expected=f"{call}, with the {name} that ssmlx.load returns",
        do="give the arguments in this order, or by name",
    )


def check_text(text: str) -> None:
    """Refuse lone surrogates, which invalid UTF-8 can decode to, as tokenizers do."""
    found = f"the text is {quoted(text)}"
    require(isinstance(text, str), found, expected="a str", do="decode the bytes to text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not Unicode: {text[error.start]!a} at {error.start}",
            expected="UTF-8 text",
            do="correct that character",
        ) from error


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
