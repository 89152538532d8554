"""`/set` of the chat: every setting of answers, the system prompt, the drafter, the adapter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, replace
from functools import partial
from typing import Any

from ..drafters.option import DrafterOption, parse_drafter_option
from ..errors import quoted, require
from ..loading.folders import Fetch
from ..loading.names import AUTO_ADAPTER, bundled_adapters
from ..settings import DRAFTERS, WIRE_NAMES, GenerateConfig
from .callback_bars import DownloadBar
from .chat_answers import Chat, drafting_line
from .load_target import load_drafter, require_drafter_key
from .setting_options import parse_setting, settable_fields, values_in_words

DEFAULT = "default"
_MOST_SHOWN = 24  # letters of a value, in the list


@dataclass(frozen=True)
class Setting:
    help: str
    values: str  # which it may have
    show: Callable[[Chat], str]
    change: Callable[[str, Chat], str]  # what it is now; InputError leaves everything as it was
    choices: Sequence[str] = ()  # for completion


def settings_of_chat() -> dict[str, Setting]:
    """All that `/set` changes, by name: fields of the settings' registry, and three of a chat."""
    found = {
        name: Setting(
            one.metadata["help"],
            values_in_words(GenerateConfig, one),
            partial(_show_field, one),
            partial(_change_field, one),
            tuple(map(str, one.metadata["allowed"].choices)),
        )
        for name, one in settable_fields(GenerateConfig).items()
    }
    found["system"] = Setting(
        "the system prompt; the conversation goes on", "a text", _show_system, _change_system
    )
    found["drafter"] = Setting(
        "what drafts, as --drafter takes it",
        f"one of {', '.join(DRAFTERS)}, with its settings, such as lookahead window=7",
        lambda chat: " ".join([chat.drafter.name or DEFAULT, *_words(chat.drafter)]),
        _change_drafter,
        tuple(DRAFTERS),
    )
    found["adapter"] = Setting(
        "the adapter; the conversation goes on",
        "a name, a folder, org/name on the Hub, or none",
        lambda chat: chat.adapter or "the model's own streams",
        change_adapter,
        ("none", *bundled_adapters()),
    )
    return found


def list_or_change_setting(rest: str, chat: Chat) -> str:
    """What `/set`, `/set NAME` and `/set NAME VALUE` print."""
    settings = settings_of_chat()
    if not rest:
        return "\n".join(_list_lines(settings, chat))
    asked, _, value = rest.partition(" ")
    name = asked.replace("-", "_")
    name = WIRE_NAMES.get(name, name)
    require(
        name in settings,
        f"/set {quoted(asked)}",
        expected=f"one of {', '.join(settings)}",
        do="correct the name",
    )
    one = settings[name]
    if value := value.strip():
        return one.change(value, chat)
    lines = [f"{name} is {one.show(chat)}", one.help, f"values: {one.values}; {DEFAULT}"]
    if name in ("drafter", "adapter"):
        lines[1] = drafting_line(chat)
    if name == "adapter":
        lines[2] = _available_line(chat)
    return "\n".join(lines)


def _list_lines(settings: dict[str, Setting], chat: Chat) -> list[str]:
    rows = [(name, one.show(chat), one.help) for name, one in settings.items()]
    cut = [(name, f"{value:.{_MOST_SHOWN}}", help) for name, value, help in rows]
    width, other, _ = (max(map(len, column)) for column in zip(*cut, strict=True))
    return [f"{name:{width}}  {value:{other}}  {help}" for name, value, help in cut]


def _show_field(one: Field[Any], chat: Chat) -> str:
    own = chat.session.model.backbone.origin.sampling
    value = getattr(chat.config.following(own), one.name)
    if value is None or value == ():
        return DEFAULT
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    if isinstance(value, dict):
        return " ".join(f"{token}={bias:g}" for token, bias in value.items())
    return str(value)


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


def _words(option: DrafterOption) -> list[str]:
    return [f"{key}={value}" for key, value in option.values.items()]


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
