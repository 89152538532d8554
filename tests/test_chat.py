"""Chats of many turns: the cache that is kept, what may go wrong, and the chat command."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import pytest
from real import (
    CHAT_TEMPLATE,
    ROOT,
    answer,
    one_line,
    run_module,
    words,
    write_base,
    write_tiny_adapter,
)

import ssmlx
from ssmlx.commands import chat
from ssmlx.errors import InputError
from ssmlx.loading import load as loading
from ssmlx.prompts import chat_tokens

LENGTH = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("chat") / "base")


@pytest.fixture(scope="module")
def loaded(base):
    adapter = write_tiny_adapter(base.parent / "adapter", base)
    return ssmlx.load(str(base), adapter=adapter, dtype="float32")


@pytest.fixture
def make_session(loaded):
    def make_session(decoding="streaming", system=None):
        config = ssmlx.GenerateConfig(decoding=decoding, max_tokens=LENGTH)
        return ssmlx.ChatSession(*loaded, config, system=system)

    return make_session


@pytest.fixture
def processed(loaded, monkeypatch):
    """Lengths of what is put into the cache outside of trees."""
    backbone, lengths = loaded[0].backbone, []
    append = backbone.append

    def spy(tokens, cache):
        lengths.append(tokens.shape[0])
        return append(tokens, cache)

    monkeypatch.setattr(backbone, "append", spy)
    return lengths


def tokens_of(responses):
    return [token for response in responses for token in response.tokens]


def expected(session, decoding):
    """The answer to the last message by a model that starts from nothing."""
    last = max(i for i, m in enumerate(session.messages) if m["role"] == "user")
    prompt = chat_tokens(session.tokenizer, session.messages[: last + 1])
    model, tokenizer = session.model, session.tokenizer
    return answer(model, tokenizer, prompt, decoding=decoding, max_tokens=LENGTH)[0]


@pytest.mark.parametrize("decoding", ["streaming", "plain"])
def test_turns_reuse_the_cache_and_answer_as_if_they_did_not(make_session, processed, decoding):
    session = make_session(decoding)
    reused = []
    for text in ("w1 w2", words(9, 20), "w5"):
        before = session.totals.reused_tokens
        tokens = tokens_of(session.reply(text))
        reused.append(session.totals.reused_tokens - before)
        assert tokens == expected(session, "plain") == expected(session, "streaming")
        assert session.messages[-1] == {
            "role": "assistant",
            "content": session.tokenizer.decode(tokens),
        }
    # user: w1 w2 | model:  -> 5 tokens, then the answer but for its last token or so
    assert reused[0] == 0
    assert reused[1] >= 5 + LENGTH - 1
    assert reused[2] >= reused[1] + 9 + LENGTH
    processed.clear()
    turn = list(session.reply("w6 w7"))
    new = turn[-1].prompt_tokens - (session.totals.reused_tokens - sum(reused))
    assert new <= 8  # the end of the last answer, | user: w6 w7 | model:
    prompt_part = processed[: len(processed) - (LENGTH + 1 if decoding == "plain" else 0)]
    assert sum(prompt_part) == new - 1
    assert turn[-1].prompt_tokens == len(chat_tokens(session.tokenizer, session.messages[:-1]))
    # What came from the cache took no time.
    assert turn[-1].prompt_tps == pytest.approx(new / turn[-1].prefill_seconds)


def test_progress_tells_only_what_is_processed(make_session):
    session, told = make_session(), []
    list(session.reply(words(40)))
    list(session.reply("w3", progress=lambda done, total: told.append((done, total))))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] < 10


@pytest.mark.parametrize("decoding", ["streaming", "plain"])
@pytest.mark.parametrize("segments", [1, 3])
def test_a_reply_closed_halfway_is_kept(make_session, decoding, segments):
    session = make_session(decoding)
    list(session.reply("w1 w2"))
    responses = session.reply("w8")
    heard = [next(responses) for _ in range(segments)]
    responses.close()
    assert session.messages[-1]["content"] == "".join(r.text for r in heard)
    assert session.totals.answers == 2
    assert tokens_of(session.reply("w9")) == expected(session, "plain")


def test_an_overflowing_turn_is_taken_back(make_session):
    session = make_session()
    list(session.reply("w1 w2"))
    messages = list(session.messages)
    with pytest.raises(InputError, match="less than the model's context of 256") as caught:
        list(session.reply(words(300)))
    assert "\n" not in str(caught.value)
    assert session.messages == messages and session.totals.answers == 1
    assert tokens_of(session.reply("w5")) == expected(session, "plain")


def test_a_chat_goes_on_until_the_context_is_full(make_session):
    session, reasons = make_session(), []
    with pytest.raises(InputError, match="context"):
        for turn in range(40):
            reasons.append(list(session.reply(words(9, turn)))[-1].finish_reason)
    assert set(reasons) <= {"length", "context"} and len(reasons) > 8
    session.reset()
    assert tokens_of(session.reply("w1")) == expected(session, "plain")


def test_reset_and_system_start_anew(make_session):
    session = make_session()
    first = tokens_of(session.reply("w1 w2"))
    session.reset()
    assert (session.messages, session.context_tokens) == ([], 0)
    assert tokens_of(session.reply("w1 w2")) == first
    session.reset("w30 w31 w32")
    assert session.messages == [{"role": "system", "content": "w30 w31 w32"}]
    told = tokens_of(session.reply("w1 w2"))
    assert told == expected(session, "plain") != first
    assert told == tokens_of(make_session(system="w30 w31 w32").reply("w1 w2"))


def test_compare_answers_twice_beside_the_chat(make_session):
    session = make_session()
    with pytest.raises(InputError, match="nothing was said yet"):
        session.compare()
    list(session.reply("w1 w2"))
    held, messages = session.context_tokens, list(session.messages)
    result = session.compare()
    assert result.same_tokens
    assert result.plain.target_calls == LENGTH >= result.streaming.target_calls
    assert (session.context_tokens, session.messages) == (held, messages)
    assert session.plain_tps == result.plain.generation_tps


def test_totals_add_up(make_session):
    session = make_session("plain")
    for text in ("w1", "w2"):
        list(session.reply(text))
    totals = session.totals
    assert (totals.answers, totals.tokens, totals.target_calls) == (2, 2 * LENGTH, 2 * LENGTH)
    assert totals.decode_tokens == 2 * (LENGTH - 1) and totals.decode_seconds > 0
    assert session.cache_bytes > 0


# --- The command ---


@pytest.fixture
def run(base, loaded, monkeypatch, capsys):
    """Pipe lines through the chat command with the adapter; gives (code, stdout, stderr)."""
    monkeypatch.setattr(loading, "load", lambda *_, **__: loaded)

    def run(lines, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = chat.main(["--model", str(base), "--max-tokens", str(LENGTH), *args])
        return code, *capsys.readouterr()

    return run


def test_replies_on_stdout_the_rest_on_stderr(run, make_session):
    code, out, err = run("w1 w2\n\n/stats\nw3\n/quit\nw4\n")
    session = make_session()
    texts = ["".join(r.text for r in session.reply(text)) for text in ("w1 w2", "w3")]
    assert (code, out) == (0, "".join(text + "\n" for text in texts))
    quiet, stats, context, last = err.splitlines()
    for line in (quiet, last):
        assert line.startswith(f"[{LENGTH} tokens · ") and "tokens per target call" in line
    assert stats.startswith(f"1 answers · {LENGTH} tokens in ")
    assert context.startswith("context: ") and "prompt tokens came from the cache" in context


def test_the_end_of_input_leaves(run):
    code, out, err = run("")
    assert (code, out, err) == (0, "", "")


def test_slash_commands(run):
    lines = ["/stats", "/compare", "/help", "/nonsense", "w1", "/reset", "w1", "/system w9"]
    code, out, err = run("\n".join([*lines, "w1", "/system", "w1", "/compare"]) + "\n")
    assert code == 0
    one, again, system, none = out.splitlines()
    assert one == again == none != system
    for said in (
        "nothing was said yet\n", "nothing was said yet; expected a message", "/reset",
        "no command /nonsense; /help lists them", "the conversation is forgotten",
        "a new conversation with that system prompt", "a new conversation with no system prompt",
        "the same tokens",
    ):  # fmt: skip
        assert said in err


def test_an_overflow_is_told_and_the_chat_goes_on(run, make_session):
    code, out, err = run(f"{words(300)}\nw1\n")
    assert code == 0
    assert out == "".join(r.text for r in make_session().reply("w1")) + "\n"
    first = err.splitlines()[0]
    assert "expected less than the model's context of 256" in first
    assert first.endswith("; /reset starts anew")


def test_a_stray_byte_spoils_its_message_alone(run, make_session):
    code, out, err = run("w1 \udcff\n/system \udcff\nw1\n")
    assert code == 0
    assert out == "".join(r.text for r in make_session().reply("w1")) + "\n"
    first, second, _ = err.splitlines()
    assert first.startswith("the text is not Unicode: '\\udcff' at 3; expected UTF-8 text; ")
    assert second.startswith("the text is not Unicode")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_stray_byte_in_a_pipe_does_not_end_the_chat(base, locale):
    command = [sys.executable, "-m", "ssmlx.chat", "--model", str(base), "--decoding", "plain"]
    done = subprocess.run(
        [*command, "--max-tokens", "4"], input=b"w1 \xff\nw1\n", cwd=ROOT, capture_output=True,
        env={**os.environ, "LC_ALL": locale}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and len(done.stdout.split()) == 4
    assert b"the text is not Unicode" in done.stderr.splitlines()[0]


def test_a_template_without_a_system_role_is_told(run, loaded, monkeypatch):
    refusal = "{{ raise_exception('System role not supported') }}"
    template = f"{{% if messages[0].role == 'system' %}}{refusal}{{% endif %}}{CHAT_TEMPLATE}"
    monkeypatch.setattr(loaded[1]._tokenizer, "chat_template", template)
    code, out, err = run("w1\n/system\nw1\n", "--system", "w9")
    assert (code, out.count("\n")) == (0, 1)
    told = "the model's chat template refuses these turns (System role not supported); expected"
    assert err.startswith(told) and "Traceback" not in err


def test_a_model_without_chat_template_is_told(tmp_path):
    folder = write_base(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    args = ("--model", str(folder), "--adapter", "none")
    result = run_module("ssmlx.chat", *args, stdin="w1\n/quit\n")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.startswith("the model's tokenizer has no chat template; expected")
    assert result.stderr.count("\n") == 1


def test_a_real_process_is_piped(base):
    plain = ("--decoding", "plain", "--max-tokens", "8")
    result = run_module("ssmlx.chat", "--model", str(base), *plain, stdin="w1\n/stats\n/quit\n")
    assert result.returncode == 0
    assert len(result.stdout.split()) == 8 and result.stdout.count("\n") == 1
    quiet, stats, context = result.stderr.splitlines()
    assert quiet.startswith("[8 tokens · ") and quiet.endswith(" · cut at --max-tokens]")
    assert "1.00 tokens per target call" in quiet
    assert stats.startswith("1 answers · 8 tokens in 8 target calls (1.00 a call)")
    assert "context: " in context


def test_a_missing_model_ends_the_command_in_one_line(tmp_path):
    result = run_module("ssmlx.chat", "--model", str(tmp_path / "nowhere"), stdin="w1\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert "nowhere does not exist" in one_line(result.stderr, "ssmlx.chat")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_stops_the_reply_and_not_the_chat(tmp_path):
    endless = write_base(tmp_path / "base", context=10**6)
    command = [sys.executable, "-m", "ssmlx.chat", "--model", str(endless), "--adapter", "none"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--max-tokens", "1000000"],
        stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, bufsize=0,
    ) as process:  # fmt: skip
        try:
            process.stdin.write(b"w1 w2\n")
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(b"/stats\n/quit\n", timeout=60)
        finally:
            process.kill()
    quiet, stats, _ = err.decode().splitlines()
    assert process.returncode == 0
    assert quiet.endswith(" · stopped]")
    assert stats.startswith("1 answers · ")
    assert out.endswith(b"\n") and out.count(b"\n") == 1
