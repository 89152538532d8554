"""What others wrote reaches a terminal without what it obeys, and a pipe or a file as it is."""

import io
import json
import logging
import sys

import pytest
from real import on_a_terminal, run_module, write_base

import ssmlx
from ssmlx.commands.running import print_note, run_command
from ssmlx.errors import InputError, one_line, without_controls
from ssmlx.report import align_rows

ATTACKS = {
    "colours": "\x1b[31mred\x1b[0m",
    "the clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "the title": "\x1b]0;mine\x1b\\",
    "one character": "\x9b2J\x9d0;mine\x9c",
    "the line before": "safe\rhidden",
    "a bell": "\a\b\x7f\0\v\f",
    "the direction": "abc\u202e\u2066fed\u2069\u202c",
}
KEPT = "a\tb\nc é 漢字 \u200d\U0001f468\u200d\U0001f469 שלום\u200f"


class Screen(io.StringIO):
    def isatty(self):
        return True


def shown_by(command, monkeypatch):
    """What a terminal is sent of standard output and of standard error while a command runs."""
    out, err = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    run_command(command, "test")
    assert (sys.stdout, sys.stderr) == (out, err)
    return out.getvalue(), err.getvalue()


def is_harmless(text):
    return without_controls(text) == text and all(c.isprintable() or c in "\n\t" for c in text)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_terminal_is_sent_nothing_that_it_obeys(attack, monkeypatch):
    def command():
        print(f"name {attack}")
        print(f"name {attack}", file=sys.stderr)
        for one in attack:  # an answer comes in segments
            print(one, end="")
        sys.stdout.writelines([attack, attack])
        logging.getLogger("ssmlx").warning("of %s", attack)
        print_note("a note")
        raise InputError(f"{attack} of a file", expected=attack, do=attack)

    out, err = shown_by(command, monkeypatch)
    assert is_harmless(out) and out.startswith("name ")
    assert err.count("\x1b[2ma note\x1b[0m\n") == 1
    assert is_harmless(err.replace("\x1b[2ma note\x1b[0m\n", ""))
    assert is_harmless(one_line(attack)) and len(one_line(attack)) > len(attack)
    assert all(map(is_harmless, align_rows([["a", attack], [attack, "b"]])))


def test_what_a_terminal_shows_is_kept(monkeypatch):
    assert shown_by(lambda: print(KEPT), monkeypatch)[0] == KEPT + "\n"
    assert without_controls("a\r\nb") == "a\nb"


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_pipe_is_sent_every_character(attack, capsys):
    run_command(lambda: print(attack, end=""), "test")
    assert capsys.readouterr().out == attack


@pytest.fixture
def hostile(tmp_path):
    """A model whose every word has an escape code in it."""
    folder = write_base(tmp_path / "hostile")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        f"{name}\x1b]52;c;eA==\x07" if name.startswith("w") else name: number
        for name, number in vocab.items()
    }
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
def test_answers_with_codes_are_shown_without(hostile, monkeypatch, capsys):
    prompt = "w1\x1b]52;c;eA==\x07"
    common = ("--model", str(hostile), "--max-tokens", "8", "--adapter", "none")
    code, shown = on_a_terminal("ssmlx.generate", *common, "--prompt", prompt)
    assert code == 0 and "]52;c;eA==" in shown and "\x1b" not in shown and "\a" not in shown
    typed = f"{prompt}\n/quit\n".replace("\x1b", "\x16\x1b").replace("\a", "\x16\a").encode()
    code, shown = on_a_terminal("ssmlx.chat", *common, typed=typed, prompt=b"> ")
    answers = shown.partition("/help")[2]
    for own in ("\x1b[2m", "\x1b[0m", "\x1b[?2004h", "\x1b[?2004l"):  # dimmed lines, readline
        answers = answers.replace(own, "")
    assert code == 0 and "]52;c;eA==" in answers and "\x1b" not in answers
    piped = run_module("ssmlx.generate", *common, "--prompt", prompt).stdout
    model, tokenizer = ssmlx.load(str(hostile), adapter="none")
    tokens = ssmlx.prompt_tokens(prompt, model, tokenizer)
    assert piped == ssmlx.generate(model, tokenizer, tokens, max_tokens=8) + "\n"
    assert "\x1b]52;" in piped
    # Python's own `verbose` likewise.
    assert ssmlx.generate(model, tokenizer, tokens, max_tokens=8, verbose=True) in (
        capsys.readouterr().out
    )
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    ssmlx.generate(model, tokenizer, tokens, max_tokens=8, verbose=True)
    assert is_harmless(screen.getvalue())
