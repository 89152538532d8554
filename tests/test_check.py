"""`python -m ssmlx.check`, and what chat and server time before their first answer."""

import io
import json
import sys

import pytest
from real import words, write_tiny_adapter, write_tokenizer
from refusals import exit_code, mentions, one_line
from tiny import let_calls_take
from tiny_adapt import write_family
from tiny_classes import write_model

import ssmlx
from ssmlx.commands import chat, check, generate
from ssmlx.generation import head_start, learned
from ssmlx.generation.learned import Learned
from ssmlx.generation.time_calls import CallTimings

COSTS = {2: 1.25, 4: 1.5, 8: 2.0, 16: 8.0}
CURVE = {2: 1.5, 4: 2.0, 8: 3.0, 16: 4.0}


@pytest.fixture
def adapter(base):
    """An adapter that says how many tokens its calls bring."""
    folder = base.parent / "measured"
    if not folder.exists():
        write_tiny_adapter(folder, base, scope="streams")
        path = folder / "streams_config.json"
        settings = json.loads(path.read_text())
        settings["tokens_per_call"] = {str(n): tokens for n, tokens in CURVE.items()}
        path.write_text(json.dumps(settings))
    return folder


@pytest.fixture
def timed(monkeypatch):
    """Let every call cost what `COSTS` says; the sizes that were timed so far."""
    asked = []

    def measure(model, tokens, sizes, **more):
        asked.append([*sizes])
        return CallTimings({n: COSTS[n] for n in sizes if n in COSTS}, [0.02] * 3)

    monkeypatch.setattr(head_start, "measure_costs", measure)
    return asked


@pytest.fixture
def run(base, capsys):
    """Check the tiny model; gives (exit code, stdout, stderr)."""

    def run(*args, model=base):
        given = ("--model", model, "--dtype", "float32", "--seconds", "0.1", *args)
        return exit_code(check.main, *given), *capsys.readouterr()

    return run


@pytest.fixture
def kept(monkeypatch):
    """A file of what was learned is read anew by each command, as by another process."""

    def forget():
        monkeypatch.setattr(learned, "_BY_PATH", {})

    forget()
    return forget


def table_of(lines):
    """Rows of the table of costs, by nodes."""
    start = next(n for n, line in enumerate(lines) if line.startswith("nodes "))
    rows = [line.split() for line in lines[start + 1 :]]
    return {
        int(row[0]): [float(one) for one in row[1:]] for row in rows if row and row[0].isdigit()
    }


def test_what_drafting_brings_is_said_and_kept(run, adapter, timed, kept):
    code, out, err = run("--adapter", adapter, "--details")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert mentions(out, "mlx_lm.models.llama", "4", "32", "float32")
    # Nine tenths of the drafted tokens are expected before any were.
    expected = {
        n: [cost, CURVE[n], round((1 + 0.9 * (CURVE[n] - 1)) / cost, 2)]
        for n, cost in COSTS.items()
    }
    assert table_of(lines) == expected
    assert mentions(out, "20.0", "2 '</s>'", "chat template")
    # 4 layers of keys and values, 2 heads of 8 numbers of 4 bytes each.
    assert mentions(lines[-1], f"{4 * 2 * 2 * 8 * 4 * 1000 / 2**20:.1f}", "1,000")
    kept()
    model, _ = ssmlx.load(str(base_of(adapter)), adapter=adapter, dtype="float32")
    known = learned.learned_of(model)[0].costs.frozen(0)
    assert {n: known.calls(("streams", n)) for n in COSTS} == COSTS
    _, again, _ = run("--adapter", adapter, "--details")
    assert len(again.splitlines()) > len(lines)  # by what was known before
    # The verdict comes first, and without --details no table after it.
    code, short, err = run("--adapter", adapter)
    assert (code, err) == (0, "") and short.splitlines()[:3] == again.splitlines()[:3]
    best, which, faster = short.splitlines()[:3]
    fastest = max((1 + 0.9 * (CURVE[n] - 1)) / cost for n, cost in COSTS.items())
    assert mentions(best, str(base_of(adapter)), f"{fastest:.2f}")
    assert mentions(which, str(adapter)) and "python -m ssmlx.adapt" in faster
    assert {*short.splitlines()} < {*again.splitlines()}
    assert not any(line.startswith("nodes ") for line in short.splitlines())


def base_of(adapter):
    return adapter.parent / "base"


def test_real_calls_are_timed(run, adapter, kept, monkeypatch):
    let_calls_take(monkeypatch, lambda nodes: 1e-4 * (1 + nodes))
    code, out, _ = run("--adapter", adapter, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["plain_seconds"] == pytest.approx(2e-4)
    calls = {row["nodes"]: row["plain_calls"] for row in found["costs"]}
    assert calls[2] == pytest.approx(1.5) and list(calls) == sorted(calls)
    assert found["drafters"]["streams"] is None and found["lacks"] == {}
    assert found["memory"]["weights"] > 0 and found["end_tokens"] == {"2": "</s>"}


def test_what_answers_taught_is_said(run, adapter, timed, kept):
    model, _ = ssmlx.load(str(base_of(adapter)), adapter=adapter, dtype="float32")
    known, prior = learned.learned_of(model)
    known.costs.learn(("streams", 4), 0, 1.7)
    prior.learn("streams", 0, 50.0, 100.0)
    taught = known.costs.frozen(0).calls(("streams", 4))
    share = prior.ratio("streams", 0)
    known.keep()
    known.write()
    kept()
    lines = run("--adapter", adapter, "--details")[1].splitlines()
    assert any(mentions(line, f"{share:.2f}", "streams") for line in lines)
    cost, tokens, speed = table_of(lines)[4]  # what is timed now does not replace it
    assert (cost, tokens) == (round(taught, 2), CURVE[4])
    assert speed == round((1 + share * (CURVE[4] - 1)) / taught, 2)


def test_a_model_without_streams_drafts_by_others(run, timed):
    code, out, _ = run("--adapter", "none")
    lines = out.splitlines()
    assert code == 0 and timed == [[2, 4, 8, 16]]  # of the streams that it could have
    assert any("python -m ssmlx.ad" in line for line in lines[:5])
    assert '--drafter "medusa heads=FOLDER"' in out
    assert any(line.startswith("streams ") and mentions(line, "--adapter") for line in lines)
    reasons = json.loads(run("--adapter", "none", "--json")[1])["drafters"]
    assert reasons["prompt-lookup"] is None and mentions(reasons["streams"], "--adapter")


def test_a_model_that_takes_chains_alone_says_what_can_draft(run, tmp_path, timed):
    recurrent = write_family(tmp_path / "lfm2", "lfm2")
    code, out, _ = run(model=recurrent)
    assert code == 0 and timed == []
    assert mentions(out, "lfm2", "stages", "taps", "trees", "batches")
    found = json.loads(run("--json", model=recurrent)[1])
    assert found["drafters"]["prompt-lookup"] is None and found["drafters"]["lookahead"]
    assert (
        "trees" in found["lacks"]
        and "chains" not in found["lacks"]
        and found["memory"]["cache"] > 0
    )


@pytest.mark.parametrize("name, width", [("lfm2", 32), ("gpt2", None)])
def test_a_width_that_no_part_says_is_left_out(run, tmp_path, timed, name, width):
    folder = write_model(name, tmp_path / name)
    write_tokenizer(folder)
    lines = run(model=folder)[1].splitlines()
    (about,) = [line for line in lines if mentions(line, "float32")]
    assert mentions(about, "32") == (width == 32)
    assert json.loads(run("--json", model=folder)[1])["width"] == width


def test_a_model_that_decodes_plainly_alone_is_fine(run, tmp_path, timed):
    recurrent = write_model("rwkv7", tmp_path / "rwkv7")
    write_tokenizer(recurrent)
    code, out, _ = run(model=recurrent)
    assert code == 0 and timed == []
    assert not mentions(out, "prompt-lookup")
    found = json.loads(run("--json", model=recurrent)[1])
    assert all(found["drafters"].values()) and "chains" in found["lacks"]


@pytest.mark.parametrize(
    "args",
    [
        ("--model", "no-such-model"),
        ("--adapter", "no-such-adapter"),
        ("--seconds", "0"),
        ("--seconds", "nan"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "") and mentions(one_line(err, "ssmlx.check"), *args[1:])


@pytest.fixture
def talk(base, adapter, monkeypatch, capsys):
    """A chat that is asked one thing, as in a process of its own."""

    def talk(*args):
        monkeypatch.setattr(learned, "_BY_PATH", {})
        monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n"))
        given = ("--model", base, "--adapter", adapter, "--dtype", "float32", "--max-tokens", 4)
        assert exit_code(chat.main, *given, *args) == 0
        return capsys.readouterr()

    return talk


def test_a_chat_times_a_few_sizes_once(talk, timed):
    for _ in range(2):
        talk()
    assert timed == [[*head_start.SIZES]]


@pytest.mark.parametrize(
    "args",
    [("--decoding", "plain"), ("--decoding", "speculative"), ("--tree-size", 4),
     ("--deterministic",), ("--drafter", "lookahead")],
    ids=lambda args: " ".join(map(str, args)),
)  # fmt: skip
def test_nothing_is_timed_where_no_controller_decides_on_its_cost(talk, timed, args):
    talk(*args)
    assert timed == []


def test_rows_alone_are_timed_where_only_the_text_drafts(talk, timed, base):
    for _ in range(2):
        talk("--adapter", "none")
    assert timed == [[*head_start.SIZES]]
    model, _ = ssmlx.load(str(base), dtype="float32")
    assert ("rows", 4) in learned.learned_of(model)[0].costs.frozen(0).known


def test_a_server_times_a_few_sizes_once_for_each_geometry(base, adapter, timed, monkeypatch):
    pytest.importorskip("uvicorn")
    from ssmlx.server import __main__ as server

    wide = base.parent / "wide"
    if not wide.exists():
        write_tiny_adapter(wide, base, scope="streams", condition_rank=4)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    options = ("--model", base, "--dtype", "float32", "--port", "0")
    for folder in (adapter, adapter, wide):
        monkeypatch.setattr(learned, "_BY_PATH", {})
        assert exit_code(server.main, *options, "--adapter", folder) == 0
    assert timed == [[*head_start.SIZES]] * 3  # the base, and twice with streams


def test_what_waits_for_an_answer_times_nothing(base, adapter, timed, capsys):
    options = ("--model", base, "--adapter", adapter, "--dtype", "float32", "--max-tokens", "4")
    assert exit_code(generate.main, *options, "--prompt", "w1 w2") == 0
    model, tokenizer = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    ssmlx.generate(model, tokenizer, words(3), max_tokens=4)
    with ssmlx.Engine(str(base), [adapter], dtype="float32") as engine:
        list(engine.stream(words(3), max_tokens=4))
    assert timed == []


def test_a_head_start_is_worth_less_than_what_answers_taught(base, adapter, timed):
    model, tokenizer = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    known, _ = learned.learned_of(model)
    plan = ssmlx.generation.plan.make_plan(model)
    head_start.time_head_start(model, tokenizer, plan)
    assert known.costs.frozen(0).known[("streams", 4)] == (1.5, 0.5)
    assert known.costs.plain_seconds(0) == 0.02
    assert Learned(known.path).costs.frozen(0).known[("streams", 4)] == (1.5, 0.5)
    known.costs.learn(("streams", 4), 0, 1.7)
    found = head_start.time_costs(model, [3, 4, 5], (2, 4), seconds=0)
    assert found == {2: 1.25, 4: known.costs.frozen(0).calls(("streams", 4))}
    assert found[4] > COSTS[4]
