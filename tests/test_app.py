"""The examples of apps: scripts, a notebook, and a window on Toga's backend without a screen."""

import ast
import asyncio
import inspect
import json
import os
import signal
import socket
import sys
import threading
import tomllib

import pytest
from real import ROOT, words, write_base, write_tiny_adapter
from refusals import mentions, refusal

import ssmlx

APP = ROOT / "examples" / "app"
QUESTIONS = [words(5), words(3, 20)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Command-line options of a tiny model with an adapter."""
    folder = tmp_path_factory.mktemp("app")
    base = write_base(folder / "base", context=100_000)
    return base, write_tiny_adapter(folder / "adapter", base)


def test_a_process_hears_nothing_that_it_did_not_ask_for(tiny, capfd, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the library asked, or started a process")

    for name in ("builtins.input", "subprocess.Popen", "os.system", "signal.signal"):
        monkeypatch.setattr(name, refuse)
    environment, base, adapter = dict(os.environ), *map(str, tiny)
    model, tokenizer = ssmlx.load(base, adapter=adapter, offline=True)
    model = ssmlx.swap_adapter(model, "none")
    assert ssmlx.generate(model, tokenizer, words(3), max_tokens=3)
    assert ssmlx.load_draft_model(base, tokenizer, model.backbone.vocab_size, offline=True)
    with ssmlx.Engine(base, (adapter,), offline=True) as engine:
        list(engine.stream(words(3), max_tokens=3, progress=lambda done, total: None))
        next(engine.chat().reply(words(2)))
    with pytest.raises(ssmlx.InputError):
        ssmlx.load("org/name", cache_dir=tiny[0], offline=True)
    assert capfd.readouterr() == ("", "")
    changed = {name for name, _ in dict(os.environ).items() ^ environment.items()}
    assert all(name.startswith("TORCH") for name in changed), "PyTorch's own, where it is installed"


def test_what_is_on_this_machine_connects_to_nobody(tiny, monkeypatch, tmp_path):
    """Also with a vocabulary of more than 100,000 tokens, of which transformers asks the Hub where
    it takes the folder for a name there."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network")

    for name in ("socket.connect", "socket.connect_ex"):
        monkeypatch.setattr(f"socket.{name}", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    base, adapter = map(str, tiny)
    large = write_base(tmp_path / "large", vocab=100_100, layers=1)
    described = json.loads((large / "tokenizer.json").read_text())
    known = described["model"]["vocab"]
    known |= {f"more{number}": number for number in range(len(known), 100_100)}
    (large / "tokenizer.json").write_text(json.dumps(described))
    for model, own in ((base, adapter), (base, "auto"), (str(large), "auto")):
        loaded, tokenizer = ssmlx.load(model, adapter=own)
        assert ssmlx.generate(loaded, tokenizer, words(3), max_tokens=3)
    assert len(tokenizer.get_vocab()) > 100_000
    with ssmlx.Engine(base, (adapter,)) as engine:
        assert list(engine.stream(words(3), max_tokens=3))
        assert next(engine.chat().reply(words(2)))
    assert tried == []


def options(tiny, *more: str) -> list[str]:
    return ["--model", str(tiny[0]), "--adapter", str(tiny[1]), *more]


@pytest.fixture(scope="module")
def ask():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(APP))
        import ask
    return ask


def alone(tiny, question: str, max_tokens: int) -> str:
    model, tokenizer = ssmlx.load(str(tiny[0]), adapter=tiny[1])
    prompt = ssmlx.prompt_tokens(question, model, tokenizer)
    return ssmlx.generate(model, tokenizer, prompt, max_tokens=max_tokens)


def test_the_script_answers_at_once_what_it_answers_alone(tiny, ask, capsys):
    assert ask.main([*options(tiny, "--max-tokens", "20"), *QUESTIONS]) == 0
    expected = "".join(f"\n{question}\n{alone(tiny, question, 20)}\n" for question in QUESTIONS)
    assert capsys.readouterr().out == expected


def test_the_script_shows_both_answers_as_they_grow(ask, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = ask.Screen(["a", "b"])
    screen.append(0, "x" * 500)
    screen.append(1, "the\nend")
    err = capsys.readouterr().err
    assert max(map(len, err.splitlines())) < 100 and err.count("\x1b[2F") == 1
    assert err.splitlines()[-1].endswith("2> the end")


def test_the_scripts_mistakes_are_one_line(ask, capsys):
    assert ask.main(["--model", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert mentions(err, "'nowhere'") and err.count("\n") == 1


def test_a_setting_that_the_script_cannot_follow_is_one_line(tiny, ask, capsys):
    assert ask.main(options(tiny, "--max-tokens", "0")) == 2
    err = capsys.readouterr().err
    assert mentions(err, "--max-tokens", "0") and err.count("\n") == 1


def test_ctrl_c_cancels_what_is_open_and_shows_what_there_is(tiny, ask, capsys, monkeypatch):
    add = ask.Screen.append
    number = iter(range(10**6))

    def interrupt(screen, *values):
        add(screen, *values)
        if next(number) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ask.Screen, "append", interrupt)
    open_before = threading.active_count()
    # Whoever started the tests may have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert ask.main([*options(tiny, "--max-tokens", "400"), *QUESTIONS]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and threading.active_count() <= open_before + 1
    shown = [text for text in out.split("\n") if text and text not in QUESTIONS]
    assert len(shown) == 2 and all(0 < len(text.split()) < 100 for text in shown)


@pytest.fixture(scope="module")
def patterns():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(APP))
        import patterns

        yield patterns


@pytest.fixture
def engine(tiny):
    with ssmlx.Engine(str(tiny[0])) as engine:
        yield engine


def test_a_time_out_cancels_the_answer_and_the_engine_goes_on(engine, patterns):
    text, is_whole = asyncio.run(patterns.answer_within(engine, QUESTIONS[0], 0.5, 99_999))
    assert not is_whole and len(text.split()) < 90_000
    whole = asyncio.run(patterns.answer_within(engine, QUESTIONS[0], 60, 20))
    assert whole[1] and whole[0].startswith(text[: len(whole[0])])
    assert asyncio.run(patterns.answer_within(engine, QUESTIONS[0], 0, 20)) == ("", False)


def test_an_answer_is_cancelled_when_it_is_enough(engine, patterns):
    text = asyncio.run(
        patterns.answer_until_enough(engine, QUESTIONS[0], lambda text: len(text.split()) >= 10)
    )
    assert 10 <= len(text.split()) < 60


def test_an_engine_closed_under_open_answers_ends_them(engine, patterns):
    texts = asyncio.run(patterns.close_engine_during_answers(engine, QUESTIONS))
    assert len(texts) == 2 and all(texts)
    assert engine.adapters == []
    refusal(engine.stream, QUESTIONS[0])


@pytest.mark.slow
def test_a_spawned_process_answers_as_this_one_does(tiny, patterns):
    asked = (str(tiny[0]), QUESTIONS[0], 12)
    expected = patterns.answer_in_this_process(*asked)
    assert expected and patterns.answer_in_another_process(*asked) == expected


def test_the_patterns_mistakes_are_one_line(patterns, capsys):
    assert patterns.main(["--model", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert mentions(err, "'nowhere'") and err.count("\n") == 1


def test_the_cells_of_the_notebook_run_in_order(tiny, capsys):
    notebook = json.loads((APP / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    cells[0] = cells[0].replace('"smollm2-135m"', repr(str(tiny[0])))
    assert str(tiny[0]) in cells[0]
    known: dict[str, object] = {}

    async def run_all() -> None:
        for cell in cells:
            code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            done = eval(code, known)
            if inspect.isawaitable(done):
                await done

    asyncio.run(run_all())
    assert capsys.readouterr().out
    assert known["engine"].adapters == []


def test_the_typed_program_answers(tiny, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    import typed

    assistant = typed.Assistant(str(tiny[0]))
    try:
        text = assistant.ask(QUESTIONS[0])
        assert text and asyncio.run(assistant.ask_async(QUESTIONS[0])) == text
        assert assistant.saved_calls >= 0
        assert next(assistant.chat().reply(QUESTIONS[1])).text is not None
    finally:
        assistant.close()
    assert typed.answer_once(str(tiny[0]), QUESTIONS[0]).text


@pytest.fixture
def window(tiny, monkeypatch):
    """The app's module, on the tiny model."""
    pytest.importorskip("toga")
    pytest.importorskip("toga_dummy")
    monkeypatch.setenv("TOGA_BACKEND", "toga_dummy")
    monkeypatch.syspath_prepend(str(APP / "src"))
    from ssmlx_chat import app
    from toga_dummy.utils import EventLog

    EventLog.reset()
    monkeypatch.setattr(app, "MODEL", str(tiny[0]))
    monkeypatch.setattr(app, "CHAT", str(tiny[1]))
    monkeypatch.setattr(app, "ADAPTERS", (str(tiny[1]), "none"))
    monkeypatch.setattr(app, "MAX_TOKENS", 24)
    return app


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def started(window):
    app = window.main()
    loading = app.status.text
    assert loading and not app.ask_button.enabled
    await until(lambda: app.status.text != loading)
    return app


async def asked(app, question: str):
    app.question.value = question
    app.ask_button._impl.simulate_press()
    await until(lambda: not app.ask_button.enabled)


def in_window(window, act) -> None:
    """Have the window do `act` on its event loop, then close it."""

    async def whole() -> None:
        app = await started(window)
        try:
            await act(app)
        finally:
            await closed(app)
        assert app.engine is None or not app.engine.adapters

    asyncio.run(whole())


async def closed(app) -> None:
    """As a click on the window's corner does."""
    from toga_dummy.utils import EventLog

    app.request_exit()
    await until(lambda: any(entry.context.get("action") == "exit" for entry in EventLog._log))


def test_the_window_streams_answers(window, monkeypatch, tiny):
    seen: list[str] = []

    async def act(app):
        say = app._append_text
        monkeypatch.setattr(app, "_append_text", lambda text: (seen.append(text), say(text)))
        assert (app.status.text, app.ask_button.enabled) == ("Ready", True)
        for adapter in window.ADAPTERS:
            app.adapter.value = adapter
            await asked(app, QUESTIONS[0])
            await until(lambda: app.ask_button.enabled)
            assert "tokens/s" in app.status.text and not app.stop_button.enabled

    in_window(window, act)
    assert len(seen) > 8 and seen[0] == f"> {QUESTIONS[0]}\n"


def test_stop_keeps_what_there_is_and_the_next_question_is_answered(window, monkeypatch):
    monkeypatch.setattr(window, "MAX_TOKENS", 99_999)

    async def act(app):
        for _ in range(2):
            before = len(app.text.value)
            await asked(app, QUESTIONS[0])
            await asyncio.sleep(0)
            app.ask_button._impl.simulate_press()  # nothing is asked, and nothing happens
            await until(lambda start=before: len(app.text.value) > start + 40)
            assert app.stop_button.enabled
            app.stop_button._impl.simulate_press()
            await until(lambda: app.ask_button.enabled)
            assert 40 < len(app.text.value) - before < 600
        assert len(app.chat.messages) == 4

    in_window(window, act)


def test_a_window_closed_while_it_answers_closes_the_engine(window, monkeypatch):
    monkeypatch.setattr(window, "MAX_TOKENS", 99_999)

    async def act(app):
        await asked(app, QUESTIONS[0])
        await until(lambda: app.stop_button.enabled)

    in_window(window, act)


def test_a_model_that_is_not_there_is_told_in_the_window(window, monkeypatch):
    monkeypatch.setattr(window, "MODEL", "nowhere")

    async def whole():
        app = await started(window)
        assert mentions(app.status.text, "'nowhere'")
        app.question.value = "hello"
        await app.ask(app.ask_button)
        assert app.text.value == ""
        await closed(app)

    asyncio.run(whole())


def test_a_window_closed_while_it_downloads_stops_the_download(window, monkeypatch):
    """The window shows how far it is."""
    told = threading.Event()

    def engine(*args, progress, **options):
        for done in range(1000):
            progress(done * 1_000_000, 93_000_000)
            told.wait(0.01)
        raise AssertionError("nobody stopped it")

    monkeypatch.setattr(ssmlx, "Engine", engine)

    async def whole():
        app = window.main()
        await until(lambda: mentions(app.status.text, "93"))
        await closed(app)
        assert app.engine is None and not mentions(app.status.text, "93")

    asyncio.run(whole())


def test_the_package_is_described_as_briefcase_reads_it():
    described = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["briefcase"]
    ((name, app),) = described["app"].items()
    assert name.replace("-", "_") == "ssmlx_chat" and app["sources"] == ["src/ssmlx_chat"]
    assert (APP / app["sources"][0] / "__main__.py").is_file()
    (checkout,) = app["requires"]
    assert (APP / checkout / "pyproject.toml").samefile(ROOT / "pyproject.toml")
    assert "toga-cocoa" in " ".join(app["macOS"]["requires"])
    assert not app["macOS"]["universal_build"]


def test_briefcase_reads_the_description():
    config = pytest.importorskip("briefcase.config")
    console = pytest.importorskip("briefcase.console").Console()
    _, apps = config.parse_config(APP / "pyproject.toml", "macOS", "app", console)
    (app,) = apps.values()
    assert config.AppConfig(**app).bundle_identifier == "com.example.ssmlx-chat"
    assert len(app["requires"]) == 2
