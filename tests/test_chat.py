"""The chat in the terminal: what is typed, its commands and settings, what is kept."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import real
from refusals import exit_code, mentions

import ssmlx
from ssmlx.commands import chat, chat_answers
from ssmlx.commands.answer_lines import repeats_itself
from ssmlx.commands.chat_answers import Chat
from ssmlx.commands.chat_commands import COMMANDS, carry_out, complete
from ssmlx.commands.chat_screen import Screen
from ssmlx.commands.chat_settings import settings_of_chat
from ssmlx.commands.setting_options import settable_fields, values_in_words
from ssmlx.loading import load as loading
from ssmlx.settings import DRAFTERS, GenerateConfig

LENGTH = 12
PLAIN = ("--decoding", "plain")


@pytest.fixture
def talk(base, loaded, monkeypatch, capsys):
    """Pipe lines through the chat command with the adapter; gives (code, stdout, stderr)."""
    monkeypatch.setattr(loading, "load", lambda *_, **__: loaded)

    def talk(lines, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = chat.main(["--model", str(base), "--max-tokens", str(LENGTH), *args])
        return code, *capsys.readouterr()

    return talk


def replies(loaded, *texts, **of_session):
    """What a session says to `texts`, a line each."""
    session = ssmlx.ChatSession(*loaded, GenerateConfig(max_tokens=LENGTH), **of_session)
    return "".join("".join(r.text for r in session.reply(text)) + "\n" for text in texts)


def test_replies_on_stdout_the_rest_on_stderr(talk, loaded):
    code, out, err = talk("w1 w2\n\n/stats\nw3\n/quit\nw4\n")
    assert (code, out) == (0, replies(loaded, "w1 w2", "w3"))
    quiet, stats, context, last = real.said_later(err)
    for line in (quiet, last):
        assert line[0] + line[-1] == "[]" and mentions(line, str(LENGTH), "256")
    assert mentions(stats, "1", str(LENGTH)) and re.search(r"\d", context)
    code, out, err = talk("")  # the end of input leaves
    assert (code, out, real.said_later(err)) == (0, "", [])


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit", "exit", "quit", " exit "])
def test_a_word_leaves(talk, loaded, word):
    assert talk(f"w1\n{word}\nw2\n")[:2] == (0, replies(loaded, "w1"))


def test_commands_are_carried_out(talk, loaded):
    begin = ["/stats", "/compare", "/help", "/nonsense"]
    lines = ["w1", "/clear", "w1", "/set system w9", "/clear", "w1", "/compare", "/memory"]
    code, out, err = talk("\n".join([*begin, *lines]) + "\n")
    assert code == 0
    assert out == 2 * replies(loaded, "w1") + replies(loaded, "w1", system="w9")
    stats, compare, *more = real.said_later(err)
    assert stats and compare and mentions("\n".join(more), *COMMANDS, '"""')
    assert mentions(next(line for line in more if mentions(line, "/nonsense")), "/help")


def test_help_of_the_command_teaches_those_of_the_chat(capsys):
    assert exit_code(chat.main, "--help") == 0
    out = capsys.readouterr().out
    assert mentions(out, *(f"{name} {one.takes}".strip() for name, one in COMMANDS.items()))
    assert max(len(line) for line in out.partition("examples:")[2].splitlines()) <= 100


def test_ctrl_c_stops_a_comparison_and_not_the_chat(talk, monkeypatch):
    def interrupted(session, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(ssmlx.ChatSession, "compare", interrupted)
    code, out, err = talk("w1\n/compare\nw2\n")
    assert (code, out.count("\n")) == (0, 2)
    first, stopped, last = real.said_later(err)
    assert mentions(first, str(LENGTH)) and mentions(last, str(LENGTH))
    assert stopped and not mentions(stopped, str(LENGTH))


def test_an_overflow_is_told_and_the_chat_goes_on(talk, loaded, monkeypatch):
    code, out, err = talk(f"{real.words(300)}\nw1\n")
    assert (code, out) == (0, replies(loaded, "w1"))
    assert mentions(real.said_later(err)[0], "303", "256", "/clear")
    own = replace(loaded[0].config, prompt_template="user: {prompt} | model:")
    monkeypatch.setattr(loaded[0], "config", own)  # each message is asked alone
    (alone,) = real.said_later(talk(f"{real.words(300)}\n")[2])
    assert mentions(alone, "256") and not mentions(alone, "/clear")


def test_a_template_without_a_system_role_has_the_user_say_it(talk, loaded, monkeypatch):
    refusal = "{{ raise_exception('System role not supported') }}"
    template = f"{{% if messages[0].role == 'system' %}}{refusal}{{% endif %}}{real.CHAT_TEMPLATE}"
    monkeypatch.setattr(loaded[1]._tokenizer, "chat_template", template)
    code, out, _ = talk("w1\n/clear\n/set system default\nw1\n", "--system", "w9")
    assert (code, out) == (0, replies(loaded, "w9\n\nw1") + replies(loaded, "w1"))


class Talk:
    """A chat on the tiny model, line by line; each line gives (answer, notes)."""

    def __init__(self, loaded, capsys):
        self._capsys = capsys
        config = GenerateConfig(max_tokens=LENGTH)
        session = ssmlx.ChatSession(*loaded, config)
        self.chat = Chat(session, Screen(), "mine", config=config, default=config)

    @property
    def messages(self):
        return list(self.chat.session.messages)

    def __call__(self, *lines):
        self._capsys.readouterr()
        for line in lines:
            assert carry_out(line, self.chat)
        out, err = self._capsys.readouterr()
        return out, err

    def note(self, *lines):
        """The one line that is printed, and no answer."""
        out, err = self(*lines)
        assert out == "" and err.count("\n") == 1 and "Traceback" not in err
        return err.strip()


@pytest.fixture
def typed(loaded, capsys):
    return Talk(loaded, capsys)


VALUES = {
    "temp": (0.7, "-1"), "top_p": (0.5, "1.5"), "min_p": (0.1, "x"), "top_k": (3, "1.5"),
    "seed": (7, "-1"), "repetition_penalty": (1.5, "0"), "repetition_context_size": (5, "0"),
    "presence_penalty": (0.5, "inf"), "presence_context_size": (5, "1e9"),
    "frequency_penalty": (0.5, "nan"), "frequency_context_size": (5, ""),
    "logit_bias": ({3: 2.0, 4: -1.5}, "3"), "decoding": ("plain", "fast"),
    "max_tokens": (3, "none"), "stop": (("w1\nw2",), ""), "num_streams": (1, "9"),
    "deterministic": (True, "1"),
}  # fmt: skip
"""A value that each setting may have, and what it may not."""


def test_all_settings_of_the_registry_are_here():
    fields = settable_fields(GenerateConfig)
    assert VALUES.keys() == fields.keys()
    assert {*settings_of_chat()} == {*fields, "system", "drafter", "adapter"}
    assert all(one.help for one in settings_of_chat().values())


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_is_changed_shown_and_put_back(typed, name):
    value, bad = VALUES[name]
    text = {
        "logit_bias": "3=2 4=-1.5", "stop": r"w1\nw2", "deterministic": "on"
    }.get(name, str(value))  # fmt: skip
    before = typed.chat.session.config
    spelled = name.replace("_", "-") if len(name) % 2 else name
    assert mentions(typed.note(f"/set {spelled} {text}"), name)
    assert getattr(typed.chat.session.config, name) == value
    _, shown = typed(f"/set {name}")
    assert values_in_words(GenerateConfig, settable_fields(GenerateConfig)[name]) in shown
    assert mentions(typed("/set")[1], *settings_of_chat())
    if bad:
        named = {"num_streams": "--num-streams"}.get(name, name)
        assert mentions(typed.note(f"/set {name} {bad}"), named, bad)
        assert getattr(typed.chat.session.config, name) == value
    typed.note(f"/set {name} default")
    assert typed.chat.session.config == before


def test_settings_come_in_any_order(typed, loaded):
    idle = typed.note("/set top_p 0.5")
    assert mentions(idle, "top_p", "0.5", "temp")  # what it needs
    typed("/set seed 3", "/set temperature 0.8", "/set max_completion_tokens 5")
    config = GenerateConfig(max_tokens=5, temp=0.8, top_p=0.5, seed=3)
    session = ssmlx.ChatSession(*loaded, config)
    assert typed("w1")[0] == "".join(r.text for r in session.reply("w1")) + "\n"
    typed("/set temp 0", "/undo", "/set max_tokens default")
    assert typed("w1")[0] == replies(loaded, "w1")
    assert not mentions(typed.note("/set temp 0.8"), "top_p")
    assert mentions(typed.note("/set heat 1"), "heat", "temp")
    assert typed.note("/set num_predict 1").endswith("max_tokens")
    assert typed.note("/set top_pp 1").endswith("top_p")


def test_the_system_prompt_changes_and_the_conversation_goes_on(typed, loaded):
    typed("w1", "/set system w8 w9")
    given = typed.messages
    assert given[0] == {"role": "system", "content": "w8 w9"} and len(given) == 3
    assert typed("w2")[0] == replies(loaded, "w2", messages=given)
    typed("/set system w7")
    assert [turn["role"] for turn in typed.messages[:2]] == ["system", "user"]
    typed("/clear")
    assert typed.messages == [{"role": "system", "content": "w7"}]
    typed("/set system default")
    assert typed.messages == [] and typed("w1")[0] == replies(loaded, "w1")


def test_the_drafter_changes_and_the_answers_do_not(typed, loaded):
    plain = replies(loaded, "w1", "w2", "w3", "w4")
    said = typed("w1", "/set drafter lookahead window=3", "w2")[0]
    assert typed.chat.session.drafter == "lookahead"
    assert typed.chat.session.config.lookahead.window == 3
    said += typed("/set drafter prompt-lookup", "w3")[0]
    assert typed.chat.session.config.lookahead == GenerateConfig().lookahead
    kept = typed.chat.session.config
    for bad, named in {
        "nonsense": "nonsense",
        "lookahead window=0": "window=0",
        "lookahead foo=1": "foo=1",
        "streams head=8bit": "head=",
        "medusa": "heads=FOLDER",
        "lookahead 'window": "'window",
        "streams acceptance=typical": "acceptance=typical",  # with greedy decoding
    }.items():
        assert named in typed.note(f"/set drafter {bad}")
    assert typed.chat.session.config == kept
    assert mentions(typed("/set drafter")[1], *DRAFTERS)
    said += typed("/set drafter default", "w4")[0]
    assert typed.chat.session.config.drafter is None and said == plain


def test_a_message_is_answered_again_or_taken_back(typed, loaded):
    assert typed.note("/retry") and typed.note("/undo")  # nothing was said
    first, _ = typed("w1")
    second, _ = typed("w2")
    kept = typed.messages
    assert typed("/retry")[0] == second and typed.messages == kept
    assert mentions(typed.note("/undo"), "'w2'") and len(typed.messages) == 2
    assert typed("/retry")[0] == first and typed("w2")[0] == second
    typed("/undo", "/undo", "/set max_tokens 3", "w1")
    assert len(typed.messages) == 2 and first.startswith(typed.messages[-1]["content"])


@contextmanager
def interrupting(monkeypatch, after):
    """Inside the block, Ctrl-C is typed after so many segments of each answer."""
    stops = []

    @contextmanager
    def call_on_first_interrupt(stop):
        stops.append(stop)
        if after == 0:
            stop()
        yield

    show = chat_answers.AnswerPieces.show

    def show_and_stop(self, text):
        show(self, text)
        stops[-1]()

    with monkeypatch.context() as patch:
        patch.setattr(chat_answers, "call_on_first_interrupt", call_on_first_interrupt)
        patch.setattr(chat_answers.AnswerPieces, "show", show_and_stop if after else show)
        yield


def test_a_reply_that_is_stopped_stays_and_is_taken_back(typed, monkeypatch):
    typed("w1")
    with interrupting(monkeypatch, after=1):
        half, _ = typed("w2")
    assert typed.messages[-1]["content"] == half.strip() != ""
    after, _ = typed("w3")
    typed("/undo")
    assert mentions(typed.note("/undo"), "'w2'") and len(typed.messages) == 2
    full, _ = typed("w2")
    assert full.startswith(half.strip()) and len(full) > len(half)
    with interrupting(monkeypatch, after=1):
        assert typed("/retry")[0] == half
    assert typed("/retry")[0] == full and typed("w3")[0] != after


@pytest.mark.parametrize("place", ["reply", "show", "second"])
def test_ctrl_c_at_any_time_keeps_the_chat(typed, monkeypatch, place):
    first, _ = typed("w1")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "reply":
            patch.setattr(ssmlx.ChatSession, "reply", interrupted)
        else:
            patch.setattr(chat_answers.AnswerPieces, "show", interrupted)
        if place == "second":
            patch.setattr(ssmlx.Answer, "close", interrupted)
        _, err = typed("w2")
    assert err.count("\n") == 1 and mentions(err, "/retry") == (place == "reply")
    assert mentions(typed.note("/undo"), "'w2'") and len(typed.messages) == 2
    assert typed("/retry")[0] == first


def test_a_message_whose_answer_never_began_is_the_last_one(typed, monkeypatch):
    typed("w1")
    kept = typed.messages
    with interrupting(monkeypatch, after=0):
        out, err = typed("w2")
        assert out == "" and mentions(err, "/retry") and typed.messages == kept
    assert mentions(typed.note("/undo"), "'w2'") and typed.messages == kept
    with interrupting(monkeypatch, after=0):
        typed("w2")
    answer, _ = typed("/retry")
    assert [turn["content"] for turn in typed.messages[2:]] == ["w2", answer.strip()]
    typed(real.words(300))  # refused
    assert typed.note("/undo") and len(typed.messages) == 4
    assert mentions(typed.note("/undo"), "'w2'") and typed.messages == kept


@pytest.mark.parametrize("system", [None, "w8 w9"])
def test_a_conversation_that_is_loaded_answers_like_one_that_was_typed(
    typed, loaded, tmp_path, capsys, system
):
    path = tmp_path / "my chat.json"
    if system:
        typed(f"/set system {system}")
    typed("w1 w2", "w3")
    assert mentions(typed.note(f"/save {path}"), str(path), str(len(typed.messages)))
    assert json.loads(path.read_text())["messages"] == typed.messages
    after, _ = typed("w4")
    typed.note(f"/save {path}")  # its own file is replaced
    kept = typed.messages
    other = Talk(loaded, capsys)
    other("w5")
    assert mentions(other.note(f"/load {path}"), str(path), str(len(kept)))
    assert other.messages == kept
    other("/undo")
    assert other("w4")[0] == after and other.messages == kept
    assert other("/retry")[0] == after


def test_turns_of_others_are_loaded(typed, loaded, tmp_path):
    path = tmp_path / "turns.json"
    path.write_text(json.dumps([{"role": "user", "content": [{"type": "text", "text": "w1"}]}]))
    assert mentions(typed.note(f"/load {path}"), "1", "/retry")
    assert typed("/retry")[0] == replies(loaded, "w1") and len(typed.messages) == 2


BAD_FILES = {
    "nothing": b"", "text": b"hello", "bytes": b"\xff\xfe\x00", "number": b"3", "rows": b"[3]",
    "other": b'{"turns": []}', "no role": b'{"messages": [{"content": "w1"}]}',
    "image": b'[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]',
    "surrogate": b'[{"role": "user", "content": "\\ud800"}]',
    "role": b'[{"role": "friend", "content": "w1"}]', "deep": b"[" * 99_999,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_the_chat_stays(typed, tmp_path, name):
    path = tmp_path / "file"
    path.write_bytes(BAD_FILES[name])
    typed("w1")
    kept = typed.messages
    assert mentions(typed.note(f"/load {path}"), str(path))
    assert typed.messages == kept
    if name not in ("number", "role", "surrogate", "image", "no role", "rows"):
        assert mentions(typed.note(f"/save {path}"), str(path))  # it is something else
        assert path.read_bytes() == BAD_FILES[name]


@pytest.mark.parametrize("command", ["/load", "/save"])
def test_a_place_that_cannot_be_used_is_one_line(typed, tmp_path, command):
    typed("w1")
    for place in (tmp_path, tmp_path / "no" / "where", "/dev/null/x", "x" * 300):
        assert mentions(typed.note(f"{command} {place}"), str(place))
    assert mentions(typed.note(command), command, "FILE")
    assert len(typed.messages) == 2
    typed("/clear")
    assert typed.note(f"/save {tmp_path / 'empty'}") and not (tmp_path / "empty").exists()


def test_a_setting_is_no_command(typed):
    assert mentions(typed.note("/adapter sql"), "/adapter", "/set adapter")


def test_words_after_a_command_that_takes_none_are_refused(typed):
    typed("w1")
    assert mentions(typed.note("/undo all"), "/undo", "'all'") and len(typed.messages) == 2


TYPED = {
    "one\ntwo": ["one", "two"],
    '"""one\ntwo"""\nthree': ['"""one\ntwo', "three"],
    '"""\none\n\n two \n"""\nthree': ['"""one\n\n two ', "three"],
    '"""one"""': ['"""one'],
    '"""/bye"""': ['"""/bye'],
    '"""one\ntwo': ['"""one\ntwo'],  # to the end of input
    '"""\n"""\none': ['"""', "one"],
    "Hello\r\n a\rb \n\r\nlast\r": ["Hello", " a\rb ", "", "last"],
}


@pytest.mark.parametrize("text", TYPED, ids=range(len(TYPED)))
def test_lines_and_messages_of_several_are_read(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text, newline="\n"))
    assert list(iter(Screen().read, None)) == TYPED[text]


def test_a_message_of_several_lines_is_asked_as_it_is(typed, loaded):
    typed('"""w1\n/clear\nw2')
    assert typed.messages[0]["content"] == "w1\n/clear\nw2"
    assert carry_out('"""', typed.chat) and carry_out('""" \n', typed.chat)
    typed('"""exit')
    assert len(typed.messages) == 4


def test_ctrl_c_discards_a_message_of_several_lines(monkeypatch, capsys):
    lines = iter(['"""one', KeyboardInterrupt, "two"])

    def read(prompt):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    assert Screen().read() == "two" and mentions(capsys.readouterr().err, "/bye")


def test_tab_completes_commands_settings_and_files(tmp_path, monkeypatch):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "one.json").touch()
    monkeypatch.chdir(tmp_path)
    assert complete("/s") == ["/set ", "/save ", "/stats "]
    assert complete("/set top") == ["top_p ", "top_k "]
    assert complete("/set decoding p") == ["plain "]
    assert complete("/set adapter ch") == ["chat "] and "mtp " in complete("/set drafter m")
    assert complete("/load c") == ["chats/"] and complete("/load chats/") == ["chats/one.json"]
    assert complete(f"/save {tmp_path}/ch") == [f"{tmp_path}/chats/"]
    for nothing in ("", "w", "w1 /s", "/load no/where", "/set heat ", "/nonsense "):
        assert complete(nothing) == []


def segments(tokens, reason):
    class Segment:
        finish_reason = reason

    Segment.tokens = tuple(tokens)
    return [Segment]


def test_an_answer_that_goes_in_a_circle_is_found():
    assert repeats_itself(segments([1, 2] * 12, "length"))
    assert repeats_itself(segments([5, *range(40), *range(40), *range(40)], None))
    assert not repeats_itself(segments([1, 2] * 12, "stop"))
    assert not repeats_itself(segments([1, 2] * 11, "length"))
    assert not repeats_itself(segments([*range(40), *range(40)], "length"))


def test_greedy_answers_that_repeat_themselves_get_a_hint(typed, monkeypatch):
    monkeypatch.setattr(chat_answers, "repeats_itself", lambda answer: True)
    assert mentions(typed("w1")[1], "/set", "temp")
    assert not mentions(typed("/set temp 0.7", "w1")[1], "/set")


def test_a_chat_is_piped_and_a_stray_byte_does_not_end_it(base):
    command = [sys.executable, "-m", "ssmlx.chat", "--model", str(base), *PLAIN]
    done = subprocess.run(
        [*command, "--max-tokens", "8"],
        input=b"w1 \xff\nw1\n/stats\n/quit\n",
        cwd=real.ROOT,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    assert (done.returncode, len(done.stdout.split()), done.stdout.count(b"\n")) == (0, 8, 1)
    stray, quiet, stats, context = real.said_later(done.stderr.decode())
    assert mentions(stray, r"'\udcff'") and mentions(quiet, "8", "--max-tokens")
    assert mentions(stats, "1", "8", "1.00") and context


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_stops_the_reply_and_not_the_chat(tmp_path):
    endless = real.write_base(tmp_path / "base", context=10**6)
    command = [sys.executable, "-m", "ssmlx.chat", "--model", str(endless), "--adapter", "none"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--max-tokens", "1000000"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=real.ROOT,
        bufsize=0,
    ) as process:
        try:
            process.stdin.write(b"w1 w2\n")
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(b"/stats\n/undo\n/quit\n", timeout=60)
        finally:
            process.kill()
    quiet, *hint, stats, _, undone = real.said_later(err.decode())
    assert process.returncode == 0 and len(hint) < 2
    assert quiet[0] + quiet[-1] == "[]" and not mentions(quiet, "--max-tokens")
    assert mentions(stats, "1") and mentions(undone, "'w1 w2'")
    assert out.endswith(b"\n") and out.count(b"\n") == 1


@pytest.mark.slow
def test_a_terminal_completes_and_remembers(base):
    given = ("--model", base, "--adapter", "none", "--max-tokens", "4")
    typed = b'/hel\t\n/set tem\t0.7\n"""w1\nw2"""\n/bye\n'
    code, shown = real.on_a_terminal("ssmlx.chat", *given, typed=typed, prompt=b"> ")
    shown = re.sub(r"\x1b\[\d*m", "", shown)  # colours
    assert code == 0 and mentions(shown, *COMMANDS) and mentions(shown, "temp is 0.7")
    assert "... w2" in shown
    # The arrow gives the last line of the chat before.
    code, shown = real.on_a_terminal("ssmlx.chat", *given, typed=b"\x1b[A\n", prompt=b"> ")
    assert code == 0 and "/bye" in shown.partition("/help")[2]
