"""`/set` of the chat: every setting of answers, the system prompt, the drafter, the adapter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from ..drafters.option import DrafterOption, parse_drafter_option
from ..errors import quoted, require
from ..loading.folders import Fetch
from ..loading.names import AUTO_ADAPTER, bundled_adapters
from ..settings import DRAFTERS, OTHER_NAMES, WIRE_NAMES, GenerateConfig
from .callback_bars import DownloadBar
from .chat_answers import Chat, drafting_line
from .load_target import load_drafter, require_drafter_key
from .setting_options import parse_setting, settable_fields, value_in_words, values_in_words

DEFAULT = "default"
_MOST_SHOWN = 24  # letters of a value, in the list


@dataclass(frozen=True)
class Setting:
    help: str
    show: Callable[[Chat], str]  # its value
    change: Callable[[str, Chat], str]  # what it is now; InputError leaves everything as it was
    explain: Callable[[Chat], list[str]]  # which values it may have, and what it does now
    choices: Sequence[str] = ()  # for completion


def settings_of_chat() -> dict[str, Setting]:
    """All that `/set` changes, by name: fields of the settings' registry, and three of a chat."""
    found = {
        name: Setting(
            one.metadata["help"],
            partial(_show_field, one),
            partial(_change_field, one),
            partial(_explain_field, one),
            tuple(map(str, one.metadata["allowed"].choices)),
        )
        for name, one in settable_fields(GenerateConfig).items()
    }
    found["system"] = Setting(
        "the system prompt; the conversation goes on",
        _show_system,
        _change_system,
        lambda chat: [_values_line("a text")],
    )
    found["drafter"] = Setting(
        "what drafts, as --drafter takes it",
        _show_drafter,
        _change_drafter,
        lambda chat: [
            drafting_line(chat),
            _values_line(f"one of {', '.join(DRAFTERS)}, as in lookahead window=7"),
        ],
        tuple(DRAFTERS),
    )
    found["adapter"] = Setting(
        "the adapter; the conversation goes on",
        lambda chat: chat.adapter or "the model's own streams",
        change_adapter,
        lambda chat: [drafting_line(chat), _available_line(chat)],
        ("none", *bundled_adapters()),
    )
    return found


def _values_line(values: str) -> str:
    return f"values: {values}; {DEFAULT}"


def list_or_change_setting(rest: str, chat: Chat) -> str:
    """What `/set`, `/set NAME` and `/set NAME VALUE` print."""
    settings = settings_of_chat()
    if not rest:
        return "\n".join(_list_lines(settings, chat))
    asked, _, value = rest.partition(" ")
    name = asked.replace("-", "_")
    name = WIRE_NAMES.get(name, name)
    close = get_close_matches(OTHER_NAMES.get(name, name), settings, n=1)
    require(
        name in settings,
        f"/set {quoted(asked)}",
        expected=f"one of {', '.join(settings)}",
        do=f"use {close[0]}" if close else "correct the name",
    )
    one = settings[name]
    if value := value.strip():
        return one.change(value, chat)
    return "\n".join([f"{name} is {one.show(chat)}", *one.explain(chat)])


def _list_lines(settings: dict[str, Setting], chat: Chat) -> list[str]:
    rows = [(name, one.show(chat), one.help) for name, one in settings.items()]
    cut = [(name, f"{value:.{_MOST_SHOWN}}", help) for name, value, help in rows]
    width, other, _ = (max(map(len, column)) for column in zip(*cut, strict=True))
    return [f"{name:{width}}  {value:{other}}  {help}" for name, value, help in cut]


def _show_field(one: Field[Any], chat: Chat) -> str:
    own = chat.session.model.backbone.origin.sampling
    value = getattr(chat.config.following(own), one.name)
    return DEFAULT if value in (None, ()) else value_in_words(value)


def _explain_field(one: Field[Any], chat: Chat) -> list[str]:
    return [one.metadata["help"], _values_line(values_in_words(GenerateConfig, one))]


def _change_field(one: Field[Any], text: str, chat: Chat) -> str:
    value = getattr(chat.default, one.name)
    if text != DEFAULT:
        value = parse_setting(GenerateConfig, one, text)
    config = replace(chat.config, **{one.name: value})
    chat.session.configure(config, [*chat.loaded])
    chat.config = config
    now = f"{one.name} is {_show_field(one, chat)}"
    own = chat.session.model.backbone.origin.sampling
    # Of these settings, only sampling ones need another: a temperature.
    needs = "" if config.numbers(own).temp else one.metadata["needs"].removeprefix("--")
    return f"{now}; it has no effect without {needs}" if needs and value is not None else now


def _show_system(chat: Chat) -> str:
    return quoted(chat.session.system) if chat.session.system else DEFAULT


def _change_system(text: str, chat: Chat) -> str:
    session = chat.session
    turns = [*session.messages]
    if turns and turns[0]["role"] == "system":
        del turns[0]
    session.reset(None if text == DEFAULT else text, turns)
    return f"system is {_show_system(chat)}"


def _show_drafter(chat: Chat) -> str:
    words = [f"{key}={value}" for key, value in chat.drafter.values.items()]
    return " ".join([chat.drafter.name or DEFAULT, *words])


def _change_drafter(text: str, chat: Chat) -> str:
    option = DrafterOption() if text == DEFAULT else parse_drafter_option(text)
    require_drafter_key(option)
    loads = DRAFTERS[option.name].loads.partition("=")[0] if option.name else ""
    late = sorted(option.keys_of_loading & option.values.keys() - {loads})
    require(
        not late,
        f"/set drafter {text}",
        expected=f"no {'=, '.join(late)}=, which acts when the model is loaded",
        do="start the chat with it: --drafter",
    )
    session = chat.session
    args = argparse.Namespace(drafter=option, dtype=chat.dtype)
    loaded = load_drafter(args, session.model, session.tokenizer)
    cleared = {name: getattr(chat.default, name) for name in chat.drafter.generate_arguments()}
    config = replace(chat.config, **{**cleared, **option.generate_arguments()})
    session.configure(config, loaded)
    chat.config = config
    chat.loaded = loaded
    chat.drafter = option
    return drafting_line(chat)


def change_adapter(text: str, chat: Chat) -> str:
    """Change to another adapter; the peak memory is counted anew."""
    import mlx.core as mx

    from ..loading.attach import choose_adapter

    fetch = Fetch(progress=DownloadBar())
    asked = AUTO_ADAPTER if text == DEFAULT else text
    name, folder = choose_adapter(asked, chat.session.model, fetch)
    chat.session.swap_adapter(folder)
    mx.reset_peak_memory()
    chat.adapter = name
    goes_on = chat.session.messages and not chat.session.asks_alone
    return drafting_line(chat) + ("; the conversation goes on" if goes_on else "")


def _available_line(chat: Chat) -> str:
    from ..loading.attach import find_adapters_of_base

    fitting = find_adapters_of_base(chat.session.model)
    others = [name for name in bundled_adapters() if name not in fitting]
    names = ", ".join(fitting) or "none for this model"
    names += f" (for other models: {', '.join(others)})" if others else ""
    return f"available: {names}; change it with /set adapter NAME, FOLDER or none"
