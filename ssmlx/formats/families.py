"""The forms in which families of models answer, by name, and which of them a model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import regex  # type: ignore[import-untyped]
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .arguments import OfferedTools
from .bracketed_calls import (
    FUNCTION_GEMMA,
    GEMMA,
    JSON_BEGINS,
    LFM,
    OLMO,
    read_python_calls,
)
from .call_form import Call, CallForm
from .channels import HARMONY, MUSE, Channels
from .cursor import Cursor
from .json_calls import (
    APERTUS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI,
    MISTRAL,
    MISTRAL_V3,
    calls_in_json,
    make_json_form,
    read_json_calls,
    write_json_call,
)
from .tagged_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM_4,
    HERMES,
    HUNYUAN,
    KIMI_K3,
    LONGCAT,
    MINICPM,
    MINIMAX,
    MINIMAX_M3,
    MUSE_SPARK,
    QWEN_CODER,
    SEED,
    STEP_3,
)

_LLAMA_END = "<|python_end|>"


def _read_llama_calls(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read what models write without marks: JSON, Python's form, or a name and JSON, as GLM-4."""
    if JSON_BEGINS.match(cursor.text, cursor.at):
        return read_json_calls(cursor, tools, _LLAMA_END, needs_arguments=True)
    if head := _NAME_BEFORE_JSON.match(cursor.text, cursor.at):
        cursor.at = head.end()
        return calls_in_json({"name": head["name"], "arguments": cursor.json()})
    return read_python_calls(cursor, tools, _LLAMA_END)


_NAME_BEFORE_JSON = regex.compile(r"\s*(?P<name>[^\s<>{}()\[\]\"']+)[ \t]*\n\s*(?=\{)")
_ACTION = regex.compile(r"\s*Action:\s*```json\s*")


def _read_action(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read the calls of Command R, a JSON list in a fence."""
    cursor.match(_ACTION)
    found = read_json_calls(cursor, tools, "```")
    # The template itself offers a tool that does nothing.
    return [one for one in found if one.name in tools.names or one.name not in _NO_ACTION]


def _read_functools(cursor: Cursor, tools: OfferedTools) -> list[Call]:
    """Read the calls of Phi-4 mini, a JSON list after a mark, or after a word."""
    cursor.has("functools")
    return read_json_calls(cursor, tools, "<|/tool_call|>")


LLAMA = CallForm(
    opens=("<|python_tag|>", "<|python_start|>"),
    ends=(_LLAMA_END,),
    read=_read_llama_calls,
    signs=("<|python_tag|>", "<|python_start|>", '"parameters": dictionary of argument name'),
    stands_alone=True,
    call=write_json_call(arguments_key="parameters"),
    between="; ",
)
_TOOL_KEYS = ("tool_name", "parameters")
_NO_ACTION = ("directly_answer", "directly-answer")
_PHI = make_json_form(
    "<|tool_call|>",
    "<|/tool_call|>",
    signs=("<|/tool_call|>",),
    begins=("functools[",),
    read=_read_functools,
)
_COMMAND_R = make_json_form(
    "Action: ```json\n",
    "\n```",
    opens=(),
    begins=("Action: ```json", "Action:```json"),
    ends=("```",),
    signs=_NO_ACTION,
    read=_read_action,
    call=write_json_call(*_TOOL_KEYS),
    before="Action: ```json\n[",
)

CALL_FORMS: Mapping[str, CallForm] = {
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "step_3": STEP_3,
    "minimax_m3": MINIMAX_M3,
    "minimax_m2": MINIMAX,
    "seed_oss": SEED,
    "muse_spark": MUSE_SPARK,
    "longcat": LONGCAT,
    "kimi_k2": KIMI,
    "kimi_k3": KIMI_K3,
    "gemma4": GEMMA,
    "function_gemma": FUNCTION_GEMMA,
    "pythonic": LFM,
    "apertus": APERTUS,
    "mistral": MISTRAL,
    "mistral_v3": MISTRAL_V3,
    "command_a": make_json_form(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        call=write_json_call(*_TOOL_KEYS),
        before="[\n    ",
        between=",\n    ",
        after="\n]",
    ),
    "internlm": make_json_form(
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        call=write_json_call(arguments_key="parameters"),
        before="\n",
        after="\n",
        between=None,
    ),
    "nemotron": make_json_form("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": HUNYUAN,  # and Jamba, MiniMax M1
    "olmo3": OLMO,
    "minicpm5": MINICPM,
    "qwen3_coder": QWEN_CODER,
    "glm47": GLM_4,
    "laguna": GLM_4,
    "phi4_mini": _PHI,
    "granite": replace(_PHI, signs=("<|tool_call|>",), end=""),
    "command_r": _COMMAND_R,
    "json_tools": HERMES,
    "llama": LLAMA,
}

_THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<mm:think>", "</mm:think>"),
    ("<|thought_start|>", "<|thought_end|>"),
)
# Marks that some families put around the text of an answer.
_TEXT_MARKS = (
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<answer>",
    "</answer>",
    "<response>",
    "</response>",
)


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers."""

    # of the form of its calls, in `CALL_FORMS`, or of its channels; None if unknown
    name: str | None
    calls: Sequence[CallForm]  # forms to look for: its own, or all if that is unknown
    thought: tuple[str, str] | None  # the marks around what it thinks
    text_marks: Sequence[str] = ()  # other marks to strip from text
    # the marks of an answer's messages; None if an answer is a single message
    channels: Channels | None = None

    @property
    def stands_alone(self) -> bool:
        """Whether calls may be an answer's whole text, without any mark; True for unknown
        families."""
        return self.name is None or any(one.stands_alone for one in self.calls)


def find_format(tokenizer: TokenizerWrapper) -> AnswerFormat:
    """The format of a model's answers: that of its chat templates, else as its configuration or
    mlx-lm names its calls, else that of its tokens."""
    template = tokenizer.chat_template
    by_name = template if isinstance(template, dict) else {"default": template}
    template = "\n".join(one for one in by_name.values() if isinstance(one, str))

    def is_told(sign: str | tuple[str, ...], *, by_tokens: bool = True) -> bool:
        texts = (sign,) if isinstance(sign, str) else sign
        return all(one in template or (by_tokens and _is_token(one, tokenizer)) for one in texts)

    def first_told(*, by_tokens: bool) -> str | None:
        is_sign = partial(is_told, by_tokens=by_tokens)
        return next(
            (name for name, form in CALL_FORMS.items() if any(map(is_sign, form.signs))), None
        )

    if is_told(HARMONY.signs):
        return AnswerFormat("harmony", (), None, channels=HARMONY)
    parser: Any = tokenizer.tool_parser
    named = str(getattr(parser, "__module__", "")).rpartition(".")[2]
    # Tokens are the weakest evidence: a vocabulary may be another family's.
    name = first_told(by_tokens=False)
    name = name or (named if named in CALL_FORMS else first_told(by_tokens=True))
    known = tokenizer.think_start, tokenizer.think_end
    thought = known if tokenizer.has_thinking else next(filter(is_told, _THOUGHT_MARKS), None)
    return AnswerFormat(
        name,
        tuple(CALL_FORMS.values()) if name is None else (CALL_FORMS[name],),
        thought,
        (*filter(is_told, _TEXT_MARKS), *tokenizer.structural_markers),
        MUSE if name == "muse_spark" else None,
    )


def _is_token(text: str, tokenizer: TokenizerWrapper) -> bool:
    """Whether a text is a token by itself."""
    token = tokenizer.convert_tokens_to_ids(text)
    return token is not None and tokenizer.convert_ids_to_tokens(token) == text


def message_end_ids(tokenizer: TokenizerWrapper) -> list[int]:
    """The tokens that end an answer in channels; none for other models."""
    # A call's end is one of them, whatever the model's configuration says.
    channels = find_format(tokenizer).channels
    marks = channels.end_tokens if channels else ()
    return [tokenizer.convert_tokens_to_ids(one) for one in marks if _is_token(one, tokenizer)]


UNKNOWN_CALLS = (
    "this model's tool-call format is unknown: calls in a known family's format are recognised, "
    "anything else stays text, and calls cannot be forced"
)
