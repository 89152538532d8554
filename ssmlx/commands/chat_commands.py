"""The chat's commands: one table, which help prints, Tab completes and `carry_out` obeys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ContextLengthError, InputError, quoted, require, unwritable_error
from ..json_files import parse_json, read_text
from ..loading.files import write_whole
from ..loading.folders import expand_user
from ..report import counted
from .chat_answers import STOPPED, Chat, ask, compare_with_plain, totals_text
from .chat_screen import MARK
from .chat_settings import list_or_change_setting, settings_of_chat
from .running import file_error

_LEAVING = ("/bye", "/exit", "/quit", "exit", "quit")
_SAVED = 'a conversation as /save writes it: {"messages": [...]}'


@dataclass(frozen=True)
class Command:
    help: str
    act: Callable[[str, Chat], str | None]  # gets what follows the name; returns what to print
    takes: str = ""  # what follows the name; in brackets if it may be left out

    def require_what_it_takes(self, name: str, rest: str) -> None:
        needs_it = bool(self.takes) and "[" not in self.takes
        require(
            bool(rest) if needs_it else not rest or bool(self.takes),
            " ".join([name, *([quoted(rest)] if rest else [])]),
            expected=f"{name} {self.takes}" if needs_it else f"{name} alone",
            do="correct it",
        )


def _retry(rest: str, chat: Chat) -> None:
    ask(chat.session.undo() if chat.unanswered is None else chat.unanswered, chat)


def _undo(rest: str, chat: Chat) -> str:
    text = chat.session.undo() if chat.unanswered is None else chat.unanswered
    chat.unanswered = None
    return f"taken back: {quoted(text)}"


def _clear(rest: str, chat: Chat) -> str:
    chat.session.reset(chat.session.system)
    chat.unanswered = None
    return "the conversation is forgotten"


def _save(rest: str, chat: Chat) -> str:
    turns = chat.session.messages
    path = expand_user(rest)
    do = "send a message first"
    require(bool(turns), "this chat has no message yet", expected="one", do=do)
    if path.exists():
        try:
            read_conversation(path)
        except InputError as error:
            raise InputError(
                f"{path} is there already, and is something else",
                expected="a new file, or one that /save wrote",
                do="give another name",
            ) from error
    text = json.dumps({"messages": turns}, ensure_ascii=False, indent=1)
    try:
        write_whole(path, f"{text}\n".encode())
    except OSError as error:
        raise unwritable_error(path, error) from error
    return f"{counted(len(turns), 'message')} saved in {path}"


def read_conversation(path: Path) -> Any:
    """The turns in a file, unchecked: a list, or the field "messages" of an object."""
    do = "check the name"
    try:
        found = parse_json(read_text(path, expected=_SAVED, do=do))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error})", expected=_SAVED, do=do) from error
    turns = found.get("messages") if isinstance(found, dict) else found
    require(isinstance(turns, list), f"{path} has no messages", expected=_SAVED, do=do)
    return turns


def _load(rest: str, chat: Chat) -> str:
    path = expand_user(rest)
    turns = read_conversation(path)
    try:
        chat.session.reset(messages=turns)
    except InputError as error:
        raise error.at(str(path)) from error
    chat.unanswered = None
    is_open = turns and turns[-1]["role"] == "user"
    then = "/retry answers the last one" if is_open else "the conversation goes on"
    return f"{counted(len(turns), 'message')} from {path}; {then}"


COMMANDS = {
    "/set": Command(
        "change a setting, as in /set temp 0.7 and /set temp default; /set lists all",
        list_or_change_setting,
        "[NAME [VALUE]]",
    ),
    "/retry": Command("answer the last message again", _retry),
    "/undo": Command("take back the last message and its answer", _undo),
    "/clear": Command("forget the conversation; settings and the system prompt stay", _clear),
    "/save": Command("save the conversation, as JSON", _save, "FILE"),
    "/load": Command("go on with a saved conversation", _load, "FILE"),
    "/compare": Command(
        "answer the last message with and without drafting, and compare texts and speed",
        lambda rest, chat: compare_with_plain(chat.session),
    ),
    "/stats": Command(
        "show tokens, calls of the model and speed of this chat",
        lambda rest, chat: totals_text(chat.session),
    ),
    "/memory": Command(
        "show what the memory is used for", lambda rest, chat: chat.session.memory.table()
    ),
    "/help": Command("show this list", lambda rest, chat: help_text()),
    "/bye": Command("end the chat, as exit, quit and Ctrl-D do", lambda rest, chat: None),
}


def help_text() -> str:
    rows = {f"{name} {one.takes}".strip(): one.help for name, one in COMMANDS.items()}
    rows[MARK] = "begin a message of several lines, and end it"
    return "\n".join(f"{usage:20} {help}" for usage, help in rows.items())


def complete(line: str) -> list[str]:
    """What the last word of a line may become; empty for a message."""
    *before, word = line.split(" ")
    match before:
        case [] if word.startswith("/"):
            return _beginning_with(word, COMMANDS)
        case ["/set"]:
            return _beginning_with(word, settings_of_chat())
        case ["/set", name] if found := settings_of_chat().get(name):
            return _beginning_with(word, found.choices)
        case ["/save" | "/load"]:
            return _paths_beginning_with(word)
    return []


def _beginning_with(word: str, names: Iterable[str]) -> list[str]:
    return [f"{name} " for name in names if name.startswith(word)]


def _paths_beginning_with(word: str) -> list[str]:
    folder, slash, name = word.rpartition("/")
    with suppress(OSError):
        inside = sorted(expand_user(folder + slash or ".").iterdir())
        return [
            f"{folder}{slash}{path.name}{'/' * path.is_dir()}"
            for path in inside
            if path.name.startswith(name)
        ]
    return []


def carry_out(line: str, chat: Chat) -> bool:
    """Carry out what was typed; False to leave. Bad input, Ctrl-C, and in a command a file error
    are printed, and the chat continues."""
    if line.strip() in _LEAVING:
        return False
    name, _, rest = line.partition(" ")
    is_command = line.startswith("/")
    try:
        if is_command:
            _carry_out_command(name, rest.strip(), chat)
        elif (text := line.removeprefix(MARK)).strip():
            ask(text, chat)
    except InputError as error:
        overflows = isinstance(error, ContextLengthError)
        hint = "; /clear starts anew" if overflows and not chat.session.asks_alone else ""
        chat.screen.note(f"{error}{hint}")
    except OSError as error:  # of a path that the system refuses
        if not is_command or isinstance(error, BrokenPipeError):
            raise
        chat.screen.note(str(file_error(error)))
    except KeyboardInterrupt:
        if chat.session.model.backbone.group is not None:  # its processes would wait for each other
            raise
        chat.screen.note("[stopped]" if chat.unanswered is None else STOPPED)
    return True


def _carry_out_command(name: str, rest: str, chat: Chat) -> None:
    command = COMMANDS.get(name)
    if command is None:
        setting = name.removeprefix("/")
        is_setting = setting in settings_of_chat()
        hint = f"/set {setting} VALUE changes it" if is_setting else "/help lists them"
        chat.screen.note(f"no command {name}; {hint}")
        return
    command.require_what_it_takes(name, rest)
    if (note := command.act(rest, chat)) is not None:
        chat.screen.note(note)
