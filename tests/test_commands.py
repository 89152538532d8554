"""The commands: options, bad input, output, `--help`; and the chat's lines."""

import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import real
import refusals
from huggingface_hub.utils import enable_progress_bars
from refusals import exits, found_in, mentions

import ssmlx
from ssmlx import bars
from ssmlx.commands import adapt, adapters, chat, check, generate
from ssmlx.commands.callback_bars import DownloadBar
from ssmlx.commands.decoding_options import generate_config
from ssmlx.commands.running import logging_to_stderr
from ssmlx.drafters.option import own_keys, shared_keys
from ssmlx.drafters.registry import drafter_class
from ssmlx.errors import InputError
from ssmlx.generation import learned
from ssmlx.generation.learned import learned_of
from ssmlx.loading import load as loading
from ssmlx.pairs import Key, parse_pairs
from ssmlx.server import __main__ as server
from ssmlx.settings import DEFAULT_MODEL, DRAFTERS

PROG = "ssmlx.generate"
KEYS = [
    "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens",
    "target_calls", "tokens_per_call", "prefill_seconds", "decode_seconds", "draft_model_calls",
    "drafts", "lossy", "memory",
]  # fmt: skip
ASK = ("--prompt", "w1 w2")
PLAIN = ("--decoding", "plain")
LENGTH = 12


@pytest.fixture(scope="module")
def adapter(base):
    return real.write_tiny_adapter(
        base.parent / "adapter", base, template="user: {prompt} | model:"
    )


@pytest.fixture(scope="module")
def loaded(base, adapter):
    """The tiny model, loaded once; the commands below are given it for speed."""
    return {
        None: ssmlx.load(str(base), dtype="float32"),
        str(adapter): ssmlx.load(str(base), adapter=adapter, dtype="float32"),
    }


@pytest.fixture
def run(base, loaded, monkeypatch, capsys):
    """Run a command on the tiny model; gives (exit code, stdout, stderr)."""
    load_any = loading.load

    def load(model, *, adapter, **more):
        named = None if adapter == "auto" else adapter  # none fits the tiny model
        known = model == str(base) and named in loaded
        return loaded[named] if known else load_any(model, adapter=adapter, **more)

    monkeypatch.setattr(loading, "load", load)

    def run(*args, model=str(base), command=generate):
        return refusals.exit_code(command.main, "--model", model, *args), *capsys.readouterr()

    return run


def refusal(result, prog=PROG) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    return refusals.one_line(err, prog)


def records(result) -> list[dict]:
    code, out, _ = result
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


BAD = {
    "unknown model": (("--model", "no-such-model"), "no-such-model"),
    "missing model folder": (("--model", "./no/such/folder"), "no/such/folder"),
    "missing adapter": (("--adapter", "nowhere"), "nowhere"),
    "missing prompts": (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    "both prompts": ((*ASK, "--prompts", "x"), "--prompts --prompt"),
    "stray byte": (("--prompt", "w1 \udcff"), r"'\udcff' 3"),
    "stray byte as it is": (("--prompt", "\ud800", "--template", "raw"), r"'\ud800' 0"),
    "empty prompt": (("--prompt", " "), "prompt"),
    "long prompt": (
        ("--prompt", real.words(300), "--template", "raw"), f"prompt 300 {real.CONTEXT}",
    ),
    "max-tokens": ((*ASK, "--max-tokens", "0"), "--max-tokens 0"),
    "max-tokens word": ((*ASK, "--max-tokens", "many"), "--max-tokens 'many'"),
    "stop": ((*ASK, "--stop", ""), "--stop ''"),
    "logprobs": ((*ASK, "--jsonl", "--logprobs", "-1"), "--logprobs -1 100"),
    "idle logprobs": ((*ASK, "--logprobs", "2"), "--logprobs --jsonl"),
    "temp nan": ((*ASK, "--temp", "nan"), "--temp nan 1e-05"),
    "template": ((*ASK, "--template", "no place"), "--template 'no place' chat raw"),
    "template args": ((*ASK, "--template-args", "[1]"), "--template-args '[1]'"),
    "unread template args": ((*ASK, "--template-args", '{"think": 1}'), "think"),
    "dtype": ((*ASK, "--dtype", "int3"), "--dtype 'int3'"),
    "unknown option": ((*ASK, "--trees", "3"), "--trees 3"),
    "option of mlx-lm": ((*ASK, "--adapter-path", "x"), "--adapter-path x --adapter"),
    "other option of mlx-lm": ((*ASK, "--system-prompt", "x"), "--system-prompt --system"),
    "speculative without adapter": (
        (*ASK, "--decoding", "speculative"), "streams --adapter --drafter --decoding",
    ),
    "drafter": ((*ASK, "--drafter", "oak"), "--drafter oak streams prompt-lookup"),
    "drafter key": (
        (*ASK, "--drafter", "lookahead size=4"),
        "--drafter lookahead size=4 window=5 ngram=4 guesses=5 acceptance=exact|typical",
    ),
    "drafter key twice": (
        (*ASK, "--drafter", "lookahead window=4 window=5"), "--drafter lookahead window=5",
    ),
    "drafter number": ((*ASK, "--drafter", "lookahead window=five"), "--drafter window=five"),
    "drafter range": ((*ASK, "--drafter", "lookahead window=0"), "--drafter window=0 1 128"),
    "drafter word": (
        (*ASK, "--drafter", "streams schedule=late"), "--drafter schedule=late second-pass|fused",
    ),
    "drafter quotes": ((*ASK, "--drafter", 'medusa heads="a'), "--drafter medusa heads"),
    "penalty": ((*ASK, "--penalty", "presence=much"), "--penalty presence=much"),
    "penalty twice": (
        (*ASK, "--penalty", "presence=1", "--penalty", "presence=2"), "--penalty presence",
    ),
}  # fmt: skip
"""Arguments, and what the line that refuses them names."""

BAD_TREES = {
    "num-streams": (("--num-streams", "9"), "--num-streams 9 1 2"),
    "tree-width": (("--tree-width", "0"), "--tree-width 0"),
    "tree-size": (("--tree-size", "5000"), "--tree-size 5000 1024"),
    "full tree": (("--tree", "full", "--tree-width", "40"), "1641 1024 --tree-width"),
    "tree kind": (("--tree", "oak"), "--tree 'oak'"),
    "prune kind": (("--prune", "oak"), "--prune oak off budget threshold"),
    "threshold": (("--prune", "threshold=2"), "--prune threshold=2.0"),
    "threshold nan": (("--prune", "threshold=nan"), "--prune threshold=nan"),
    "threshold word": (("--prune", "threshold=few"), "--prune threshold=few"),
    "budget number": (("--prune", "budget=4"), "--prune budget=4 threshold"),
    "prune-to 0": (("--prune", "budget", "--prune-to", "0"), "--prune-to 0"),
}


@pytest.mark.parametrize("case", [*BAD, *BAD_TREES])
def test_bad_input_is_one_line(run, adapter, case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, named = {**BAD, **BAD_TREES}[case]
    if case in BAD_TREES:
        args = ("--adapter", adapter, *args)
    if case in BAD_TREES or "model" in case or case == "missing adapter":
        args = (*ASK, *args)
    assert mentions(refusal(run(*args)), *named.split())


def test_the_fused_attention_needs_metal(run, monkeypatch):
    monkeypatch.setattr("ssmlx.model.metal.hook.is_available", lambda: False)
    asked = (*ASK, "--drafter", "prompt-lookup attention=fused")
    assert mentions(refusal(run(*asked)), "attention=fused")
    assert run(*ASK, "--drafter", "prompt-lookup attention=mlx")[0] == 0


@pytest.mark.parametrize("flag", ["--tree", "--num-streams", "--prune", "--tree-width"])
def test_tree_options_without_an_adapter_are_refused(run, flag):
    value = {"--tree": "best", "--prune": "budget"}.get(flag, "2")
    line = refusal(run(*ASK, flag, value))
    assert mentions(found_in(line), flag) and mentions(line, "--adapter")


def drafters_shaped_by(field):
    """The drafters whose trees a field of `GenerateConfig` shapes."""
    return " ".join(name for name in DRAFTERS if field in drafter_class(name).shaped_by)


IDLE = (
    ("--seed 1 --temp 0", "--seed", "--temp"),
    ("--top-k 5 --generation-config none", "--top-k", "--temp"),
    ("--top-p 0.5 --temp 0", "--top-p", "--temp"),
    ("--deterministic --prompt-cache x", "--prompt-cache", "--deterministic"),
    ("--penalty context=9", "--penalty context=9", "repetition presence frequency"),
    ("--drafter 'streams epsilon=0.1' --temp 1", "epsilon", "acceptance=typical"),
    ("--drafter lookahead --tree full", "--tree", drafters_shaped_by("tree")),
    ("--drafter 'draft-model model=x' --tree-size 4", "--tree-size", drafters_shaped_by("tree")),
    ("--drafter lookahead --num-streams 1", "--num-streams", drafters_shaped_by("num_streams")),
    ("--drafter lookahead --prune budget", "--prune", drafters_shaped_by("prune")),
    ("--tree full --tree-size 8", "--tree-size", "--tree best"),
    ("--prune-to 4", "--prune-to", "--prune budget"),
    ("--prune threshold --prune-to 4", "--prune-to", "--prune budget"),
    ("--decoding plain --drafter lookahead", "--drafter", ""),
    ("--decoding plain --tree best", "--tree", ""),
    ("--decoding plain --num-streams 1", "--num-streams", ""),
    ("--decoding plain --prune budget", "--prune", ""),
)
"""Options, that of them which could change nothing, and the words that would let it."""


@pytest.mark.parametrize(("options", "idle", "needs"), IDLE)
@pytest.mark.parametrize("command", [generate, chat])
def test_an_option_that_could_change_nothing_is_refused(command, options, idle, needs):
    ask = ["--prompt", "w1"] if command is generate else []
    argv = [*ask, *shlex.split(options)]
    line = refusals.refusal(lambda: generate_config(command.parse_args(argv)))
    assert mentions(found_in(line), *idle.split()) and mentions(line, *needs.split())


MANY_OPTIONS = """
    --drafter "prompt-lookup tokens=5 ngram=4 size=9 acceptance=typical delta=0.2"
    --temp 0.7 --top-k 10 --top-p 0.9 --min-p 0.05 --seed 3 --logit-bias 5=-2 --logit-bias 6=1.5
    --penalty "repetition=1.1 context=30" --penalty presence=0.5
"""


@pytest.mark.parametrize(("prog", "command", "args"), [
    ("ssmlx.generate", generate, ASK), ("ssmlx.chat", chat, ()),
    ("ssmlx.server", server, ("--port", 0)),
])  # fmt: skip
@pytest.mark.parametrize("name", [
    name for name in DRAFTERS
    if (loader := drafter_class(name).loader) and loader.default is None
])  # fmt: skip
def test_a_drafter_without_what_it_needs_loads_nothing(run, name, prog, command, args):
    """The model, which is not there either, is not looked for."""
    what = drafter_class(name).loader.what
    said = refusal(run(*args, "--drafter", name, model="./nowhere", command=command), prog)
    assert mentions(said, "--drafter", name, what, str(DRAFTERS[name].loads))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_value_that_help_shows_is_parsed(name):
    """By what stands for it: a word, a name, or a number of the default's kind."""
    for key in (*own_keys(name), *shared_keys()):
        for word in key.shown.split("|"):
            text = {"N": "3", "N,N,...": "4,3", "X": "0.5"}.get(word, word)
            found = parse_pairs("--drafter", [f"{key.name}={text}"], [key])[key.name]
            is_number = "|" not in key.shown and text[0].isdigit()
            expected = literal_eval(text) if is_number else text
            assert found == expected and type(found) is type(expected)


def test_a_file_is_a_name():
    home = str(Path.home() / "a b.txt")
    key = Key.of_path("key=FILE")
    assert parse_pairs("-", ["key=~/a b.txt"], [key]) == {"key": home}
    assert parse_pairs("-", ["key=3"], [key]) == {"key": "3"}


def test_options_become_settings():
    config = generate_config(chat.parse_args(shlex.split(MANY_OPTIONS)))
    acceptance = config.acceptance
    lookup = config.prompt_lookup
    assert (config.drafter, acceptance.kind, acceptance.delta) == ("prompt-lookup", "typical", 0.2)
    assert (lookup.num_draft_tokens, lookup.ngram, lookup.size) == (5, 4, 9)
    assert config.logit_bias == {5: -2.0, 6: 1.5}
    assert (config.temp, config.top_k, config.top_p, config.min_p) == (0.7, 10, 0.9, 0.05)
    assert (config.seed, config.repetition_penalty, config.context_size) == (3, 1.1, 30)
    assert (config.presence_penalty, config.presence_context_size) == (0.5, 20)
    lookahead = generate_config(chat.parse_args(["--drafter", "lookahead ngram=3"])).lookahead
    assert (lookahead.ngram, lookahead.window) == (3, 5)
    asked = [
        "--drafter", "mlp-speculator heads='a b' widths=4,3", "--prune", "threshold=.1",
    ]  # fmt: skip
    config = generate_config(chat.parse_args(asked))
    assert config.speculator_tree.widths == (4, 3)
    assert (config.prune.kind, config.prune.threshold) == ("threshold", 0.1)


@pytest.mark.parametrize(("text", "named"), [
    ('{"prompt": "w1"}\n\n{"question": "w2"}\n', "3 question"),
    ('{"prompt": "w1"}\nnot JSON\n', "2"),
    ("\n", "--prompts"),
    (json.dumps({"prompt": "w1"}) + "\n" + json.dumps({"prompt": real.words(300)}), "303 256"),
])  # fmt: skip
def test_a_bad_line_is_named_before_anything_is_answered(run, tmp_path, text, named):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    said = refusal(run("--prompts", path, "--jsonl")).replace(str(path), "p.jsonl")
    assert mentions(said, *named.split())
    assert mentions(said, "p.jsonl") or named == "303 256"


def test_a_model_without_chat_template_or_tokenizer(run, tmp_path):
    folder = real.write_base(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    assert mentions(
        refusal(run(*ASK, "--template", "chat", model=str(folder))), "--template", "raw"
    )
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in refusal(run(*ASK, model=str(folder)))
    path = folder / "model.safetensors"
    for cut in (2000, 20, 0):
        path.write_bytes(path.read_bytes()[:cut])
        assert str(folder) in refusal(run(*ASK, model=str(folder)))


def test_jsonl_holds_one_record_a_prompt(run, loaded, adapter, tmp_path):
    tokenizer = loaded[None][1]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w1 w2"}\n{"prompt": "w3", "tools": []}\n')
    args = ("--prompts", path, "--jsonl", "--max-tokens", LENGTH, "--adapter", adapter)
    streamed = records(run(*args))
    plain = records(run(*args, *PLAIN))
    assert [r["prompt"] for r in streamed] == ["w1 w2", "w3"]
    for one, other in zip(streamed, plain, strict=True):
        assert list(one) == list(other) == KEYS
        assert (one["tokens"], one["text"]) == (other["tokens"], other["text"])
        assert one["generation_tokens"] == len(one["tokens"]) == LENGTH
        assert one["finish_reason"] == "length"
        assert one["tokens_per_call"] == round(LENGTH / one["target_calls"], 4)
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert (other["target_calls"], other["tokens_per_call"]) == (LENGTH, 1.0)
        assert one["prefill_seconds"] > 0 and one["decode_seconds"] > 0


def test_an_answer_keeps_the_fields_of_its_line(run, tmp_path):
    turns = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    lines = [
        {"id": "a-1", "prompt": "w1 w2", "label": {"is": [1, None]}},
        {"messages": turns, "custom_id": 7, "text": "is the answer's"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    first, second = records(run("--prompts", path, "--jsonl", "--max-tokens", 3))
    assert {*first} == {*KEYS, "id", "label"} and {*second} == {*KEYS, "custom_id"}
    assert (first["id"], first["label"], second["custom_id"]) == ("a-1", {"is": [1, None]}, 7)
    assert (first["prompt"], second["prompt"]) == ("w1 w2", "w3")
    assert second["text"] != lines[1]["text"]
    again = tmp_path / "again.jsonl"  # what was answered may be asked again
    again.write_text(json.dumps(first))
    (asked,) = records(run("--prompts", again, "--jsonl", "--max-tokens", 3))
    assert (asked["tokens"], asked["id"]) == (first["tokens"], "a-1")


def test_a_line_has_settings_of_its_own(run, tmp_path):
    path = tmp_path / "p.jsonl"

    def answered(*lines, options=()):
        path.write_text("".join(json.dumps({"prompt": "w1 w2", **one}) + "\n" for one in lines))
        return records(run("--prompts", path, "--jsonl", "--max-tokens", LENGTH, *options))

    sampled = ("--temp", 1.5, "--seed", 3)
    (greedy,), (drawn,) = answered({}), answered({}, options=sampled)
    assert greedy["tokens"] != drawn["tokens"]
    word = greedy["text"].split()[4]
    found = answered(
        {},
        {"max_tokens": 5},
        {"temperature": 1.5, "seed": 3},
        {"stop": word, "max_tokens": None, "drafter": None},
        {"logit_bias": {"9": 100}, "max_completion_tokens": 2, "logprobs": 1},
    )
    assert found[0]["tokens"] == greedy["tokens"] and found[2]["tokens"] == drawn["tokens"]
    assert found[1]["tokens"] == greedy["tokens"][:5] and found[1]["max_tokens"] == 5
    assert found[3]["finish_reason"] == "stop"
    assert found[4]["tokens"] == [9, 9] and [len(one["top"]) for one in found[4]["logprobs"]] == [
        1, 1,
    ]  # fmt: skip
    one, other = answered({"temp": 0}, {}, options=sampled)
    assert (one["tokens"], other["tokens"]) == (greedy["tokens"], drawn["tokens"])


@pytest.mark.parametrize(("line", "named"), [
    ({"max_tokens": 0}, "max_tokens 0"), ({"temp": "hot"}, 'temp "hot"'),
    ({"seed": -1}, "seed -1"), ({"stop": 5}, "stop 5"), ({"top_p": 2}, "top_p 2"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"99": 1}}, "99"),
    ({"temp": 1, "temperature": 1}, "temp temperature"), ({"drafter": "streams"}, "drafter"),
    ({"decoding": "plain"}, "decoding"), ({"max_new_tokens": 3}, "max_new_tokens max_tokens"),
    ({"system": "w3"}, "system messages"), ({"logprobs": True}, "logprobs true"),
])  # fmt: skip
def test_a_setting_that_a_line_cannot_have_is_named(run, tmp_path, monkeypatch, line, named):
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": "w1"}, {"prompt": "w2", **line}]
    Path("p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    said = refusal(run("--prompts", "p.jsonl", "--jsonl"))
    assert mentions(said, "p.jsonl", "2", *named.split())


def test_a_prompt_comes_by_standard_input(run, monkeypatch):
    more = ("--jsonl", "--max-tokens", 3)
    (expected,) = records(run(*ASK, *more))
    for args in ((), ("--prompt", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\n"))
        (found,) = records(run(*args, *more))
        assert (found["prompt"], found["tokens"]) == ("w1 w2", expected["tokens"])
        monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
        assert mentions(refusal(run(*args)), "--prompt", "--prompts")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w1 \xff"), "utf-8"))
        assert mentions(refusal(run(*args)), "UTF-8")
    terminal = io.StringIO("what is typed is not waited for")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert mentions(refusal(run()), "--prompt", "--prompts") and terminal.tell() == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("unread"))
    (found,) = records(run(*ASK, *more))
    assert found["tokens"] == expected["tokens"] and sys.stdin.read() == "unread"


@pytest.mark.parametrize("command", [chat, check, server])
def test_a_word_names_the_model(command, capsys):
    """As in other programs; a word that generate does not know might be a prompt."""
    for words in (["org/x"], ["--model", "org/x"], ["--adapter", "sql", "org/x"]):
        assert command.parse_args(words).model == "org/x"
    assert command.parse_args(["org/x", "--adapter", "sql"]).model == "org/x"
    assert command.parse_args([]).model == DEFAULT_MODEL
    for words in (["org/x", "--model", "org/y"], ["--model", "org/x", "org/x"], ["x", "y"]):
        exits(capsys, command.main, *words)
    assert mentions(exits(capsys, generate.main, "org/x", *ASK), "org/x")


def test_a_system_prompt_is_for_prompts_without_one(run, adapter, loaded, tmp_path):
    path = tmp_path / "p.jsonl"
    own = [{"role": "system", "content": "w7 w8"}, {"role": "user", "content": "w1"}]
    path.write_text(json.dumps({"prompt": "w1"}) + "\n" + json.dumps({"messages": own}))
    args = ("--prompts", path, "--jsonl", "--max-tokens", 2, "--adapter", adapter)
    given, kept = records(run(*args, "--system", "w9"))
    tokenizer = loaded[None][1]
    for record, system in ((given, "w9"), (kept, "w7 w8")):
        whole = tokenizer.encode(f"system: {system} | user: w1 | model:")
        assert record["prompt_tokens"] == len(whole) and record["prompt"] == "w1"
    said = refusal(run(*ASK, "--system", "w9", "--template", "raw"))
    assert mentions(said, "--system", "--template chat")


def test_text_goes_to_stdout_and_the_quiet_line_to_stderr(run, adapter):
    args = (*ASK, "--adapter", adapter, "--max-tokens", 9)
    (record,) = records(run(*args, "--jsonl"))
    code, out, err = run(*args)
    assert (code, out) == (0, record["text"] + "\n")
    assert mentions(err, "9", f"{record['tokens_per_call']:.2f}", "--max-tokens")
    assert err.count("\n") == 1
    how, _, quiet, *_, costs, accepted = lines = run(*args, "--verbose")[2].splitlines()
    assert len(lines) == 7 and all(line[0] + line[-1] == "[]" for line in lines)
    assert mentions(how, str(adapter), "streams") and mentions(quiet, "9", "--max-tokens")
    assert mentions(costs, "streams") and mentions(accepted, "streams")


def test_verbose_shows_what_was_learned(run, loaded, adapter):
    model, _ = loaded[str(adapter)]
    known, prior = learned_of(model)
    known.costs.set_head_start({("streams", 2): 1.25, ("streams", 4): 1.75})
    known.costs.learn_plain_seconds(0, [0.5] * 3)
    prior.learn("streams", 0, 50.0, 100.0)
    share = prior.ratio("streams", 0)
    args = (*ASK, "--adapter", adapter, "--max-tokens", 1, "--verbose")
    *_, costs, accepted = run(*args)[2].splitlines()
    assert mentions(costs, "500.0", "streams", "2: 1.25", "4: 1.75")
    assert mentions(accepted, "streams", f"{share:.2f}")
    uncontrolled = run(*args, "--tree-size", 4)[2].splitlines()  # nothing was learned for it
    assert not any(mentions(line, "4: 1.75") for line in uncontrolled)


def test_verbose_shows_what_was_learned_of_text_drafts(run, loaded):
    """Their costs are those of rows, and their ratios are kept by length of match."""
    args = (*ASK, "--adapter", "none", "--max-tokens", 1, "--verbose")
    *_, costs, accepted = run(*args)[2].splitlines()
    for line in (costs, accepted):
        assert mentions(line, "prompt-lookup") and not re.search(r"\d", line)
    known, prior = learned_of(loaded[None][0])
    known.costs.learn(("rows", 4), 0, known.costs.frozen(0).calls(("rows", 4)))
    known.costs.learn_plain_seconds(0, [0.5] * 3)
    prior.learn("prompt-lookup 1", 0, 3.0, 10.0)
    prior.learn("prompt-lookup 9", 0, 9.0, 10.0)
    shares = [prior.ratio(f"prompt-lookup {length}", 0) for length in (1, 9)]
    calls = known.costs.frozen(0).calls(("rows", 4))
    *_, costs, accepted = run(*args)[2].splitlines()
    assert mentions(costs, "500.0", "prompt-lookup", f"4: {calls:.2f}")
    assert mentions(accepted, "prompt-lookup", f"1: {shares[0]:.2f}", f"9: {shares[1]:.2f}")


def test_an_answer_ends_where_the_context_does(run):
    args = ("--prompt", real.words(real.CONTEXT - 5), "--template", "raw", "--jsonl")
    (record,) = records(run(*args))
    assert (record["finish_reason"], record["generation_tokens"]) == ("context", 5)


@pytest.mark.parametrize(("template", "whole"), [
    ("raw", "w1 w2"), ("chat", "user: w1 w2 | model:"), ("w9 {prompt} w8", "w9 w1 w2 w8"),
    (None, "user: w1 w2 | model:"),
])  # fmt: skip
@pytest.mark.parametrize("with_adapter", [False, True])
def test_templates(run, loaded, adapter, template, whole, with_adapter):
    tokenizer = loaded[None][1]
    args = [*ASK, "--jsonl", "--max-tokens", 4]
    args += ["--template", template] if template else []
    args += ["--adapter", adapter] if with_adapter else []
    (record,) = records(run(*args))
    expected = tokenizer.encode(whole)
    assert record["prompt_tokens"] == len(expected)
    model = loaded[str(adapter) if with_adapter else None][0]
    tokens = ssmlx.stream_generate(model, tokenizer, expected, max_tokens=4)
    assert record["tokens"] == [token for response in tokens for token in response.tokens]


def test_the_adapters_template_comes_before_the_models(run, base, tmp_path):
    args = generate.parse_args([*ASK, "--template", r"Q: {prompt}\nA:"])
    assert args.template == "Q: {prompt}\nA:", "a new line as the trainers take it"
    own = real.write_tiny_adapter(tmp_path / "own", base, template="w5 {prompt}")
    (record,) = records(run(*ASK, "--jsonl", "--max-tokens", 1, "--adapter", own))
    assert record["prompt_tokens"] == 3


def test_more_is_told_and_fixed_where_asked(run, adapter):
    args = (*ASK, "--adapter", adapter, "--jsonl", "--max-tokens", 9, "--temp", 1.5)
    (free,) = records(run(*args, "--deterministic"))
    (seeded,) = records(run(*args, "--seed", 0, "--logprobs", 2))
    assert free["tokens"] == seeded["tokens"] and list(seeded) == [*KEYS, "logprobs"]
    assert [len(one["top"]) for one in seeded["logprobs"]] == [2] * 9
    word = seeded["text"].split()[4]
    (stopped,) = records(run(*args, "--seed", 0, "--stop", word, "--stop", "w1 nothing"))
    assert stopped["text"].strip() == seeded["text"].partition(word)[0].strip()
    assert stopped["finish_reason"] == "stop"
    assert stopped["generation_tokens"] == len(stopped["tokens"]) < 9


def test_every_tree_option_leaves_the_answer_as_it_is(run, adapter):
    args = (*ASK, "--adapter", adapter, "--jsonl", "--max-tokens", 24)
    (plain,) = records(run(*args, *PLAIN))
    for options in (
        "--tree full --tree-width 2",
        "--tree-size 6 --tree-width 3 --num-streams 1",
        "--prune budget --prune-to 3",
        "--prune threshold=0.02",
        "--drafter 'streams schedule=fused'",
    ):
        (streamed,) = records(run(*args, *shlex.split(options)))
        assert streamed["tokens"] == plain["tokens"] and streamed["target_calls"] <= 24, options


@pytest.mark.parametrize(
    "given, expected", [((), "auto"), (("--drafter", "streams head=8bit"), "8bit")]
)
def test_the_draft_head_is_loaded_as_asked(monkeypatch, given, expected):
    """Its name reaches the loader, which is followed from there elsewhere."""
    seen = {}

    def load(model, **settings):
        seen.update(settings)
        raise InputError("enough", expected="nothing more", do="stop")

    monkeypatch.setattr(loading, "load", load)
    assert generate.main(["--prompt", "w1", "--model", "anything", *given]) == 2
    assert seen["draft_head"] == expected


HELP = """
import sys, importlib
main = importlib.import_module({module!r}).main
try: main(['--help'])
except SystemExit as stop: assert stop.code == 0, stop.code
slow = {{'mlx', 'mlx.core', 'mlx_lm', 'torch', 'transformers', 'huggingface_hub'}}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


HELPED = [
    PROG,
    "ssmlx.adapt",
    "ssmlx.adapters",
    "ssmlx.chat",
    "ssmlx.check",
    "ssmlx.server.__main__",
    "ssmlx.train",
    "ssmlx.upload",
    "convert.__main__",
]


@pytest.mark.parametrize("module", HELPED)
def test_help_does_not_wait_for_mlx_and_fits_two_screens(module):
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(module=module)],
        capture_output=True,
        text=True,
        cwd=real.ROOT,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    name = module.removesuffix(".__main__").replace("convert", "ssmlx.convert")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"usage: python -m {name} ")
    options = [line for line in lines if line.startswith("  --")]
    # A drafter has a line of its own, and may be added.
    assert name != PROG or (len(lines) - len(DRAFTERS) <= 73 and len(options) <= 31)


@pytest.mark.slow
def test_a_real_process_prints_json_lines_alone(base, adapter):
    more = ("--jsonl", "--max-tokens", "5")
    done = real.run_module(PROG, "--model", str(base), "--adapter", str(adapter), *ASK, *more)
    assert done.stderr == ""
    (record,) = records((done.returncode, done.stdout, done.stderr))
    assert list(record) == KEYS and len(record["tokens"]) == 5


def test_a_real_process_fails_in_one_line(base):
    done = real.run_module("ssmlx.chat", "--model", str(base), "--decoding", "speculative")
    said = refusal((done.returncode, done.stdout, done.stderr), "ssmlx.chat")
    assert mentions(found_in(said), "streams")


@pytest.fixture(scope="module")
def smiling(base, tmp_path_factory):
    """The tiny model, in whose answers words end in an emoji."""
    folder = tmp_path_factory.mktemp("smiling") / "base"
    shutil.copytree(base, folder)
    path = folder / "tokenizer.json"
    path.write_text(re.sub(r'"w(\d+)"', '"é\\1🙂"', path.read_text("utf-8")), "utf-8")
    return folder


@pytest.mark.parametrize("encoding", ["latin-1", "ascii:surrogateescape", "utf-8"])
def test_an_answer_is_whole_where_standard_output_lacks_its_characters(
    monkeypatch, smiling, encoding
):
    name, _, errors = encoding.partition(":")

    def said(*more):
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding=name, errors=errors or "strict")
        monkeypatch.setattr(sys, "stdout", out)
        asked = ("--model", str(smiling), "--prompt", "é1🙂", "--template", "raw", *PLAIN)
        assert generate.main([*asked, "--max-tokens", "6", "--dtype", "float32", *more]) == 0
        assert out.errors == (errors or "strict"), "it is as it was"
        out.flush()
        return raw.getvalue().decode(name)

    (line,) = said("--jsonl").splitlines()
    whole = json.loads(line)
    assert whole["prompt"] == "é1🙂" and whole["text"].count("🙂") > 3
    assert said().encode(name).decode(name) == (
        whole["text"].encode(name, "backslashreplace").decode(name) + "\n"
    )


@pytest.mark.slow
def test_a_chat_takes_lines_that_end_as_on_windows(smiling):
    command = [sys.executable, "-m", "ssmlx.chat", "--model", str(smiling), *PLAIN]
    done = subprocess.run(
        [*command, "--max-tokens", "8"],
        input="é1\r\n/stats\r\n/quit\r\né2\r\n".encode("latin-1"),
        cwd=real.ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 1)
    assert len(done.stdout.split()) == 8 and done.stdout.count(b"\\U0001f642") > 5
    quiet, stats, _ = real.said_later(done.stderr.decode("latin-1"))
    assert mentions(quiet, "8") and mentions(stats, "1", "8")


@pytest.mark.parametrize("patience", [0, 60])
def test_a_bar_appears_on_a_terminal_after_a_while_and_leaves(monkeypatch, capsys, patience):
    enable_progress_bars()  # transformers, told to be quiet elsewhere, switches them off for all
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("ssmlx.commands.callback_bars.PATIENCE_SECONDS", patience)
    monkeypatch.setattr("ssmlx.bars.PATIENCE_SECONDS", patience)
    told = DownloadBar(mininterval=0)
    for done in (1_000_000, 2_000_000, 4_000_000):
        told(done, 4_000_000)
    err = capsys.readouterr().err
    assert ("2.00M/4.00M" in err) == (patience == 0)
    assert err == "" or not err.split("\r")[-2].strip(), "nothing stays"
    assert list(bars.bar([1, 2], "numbers")) == [1, 2] and capsys.readouterr().err == ""
    with logging_to_stderr():
        assert list(bars.bar([1, 2], "numbers", mininterval=0)) == [1, 2]
    assert ("numbers" in capsys.readouterr().err) == (patience == 0)


def test_a_line_is_said_once_where_a_library_listens_too(capsys, caplog):
    with logging_to_stderr():
        logging.getLogger("ssmlx").info("a line")
    assert capsys.readouterr().err == "ssmlx: a line\n" and not caplog.records


@pytest.fixture(params=["a file", "no folder", "no account"])
def no_home(request, monkeypatch, tmp_path):
    """A home in which nothing can be made; of a user without an account, none at all."""
    monkeypatch.delenv("SSMLX_CACHE")
    (tmp_path / "home").write_text("a file is in the way")
    monkeypatch.setenv(
        "HOME", "/dev/null/me" if request.param == "no folder" else str(tmp_path / "home")
    )
    if request.param == "no account":
        monkeypatch.setattr(Path, "home", lambda: Path("~").expanduser())
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(learned, "_SECONDS_BETWEEN_WRITES", 0.0)


def test_without_a_home_all_works_and_nothing_is_kept(base, no_home, capsys, monkeypatch):
    common = ["--model", str(base), "--max-tokens", "6"]
    assert generate.main([*common, "--prompt", "w1 w2"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and err.count("\n") == 1  # the line about the answer
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n/compare\n/quit\n"))
    assert chat.main(common) == 0
    assert capsys.readouterr().out == out
    with ssmlx.Engine(str(base)) as engine:
        assert len(list(engine.stream("w1 w2", max_tokens=6))) > 1
    assert adapters.main([]) == 0 and mentions(capsys.readouterr().out, "0")
    # What has to be written somewhere says where it would be.
    assert "adapt" in found_in(exits(capsys, adapt.main, "--model", base))


@pytest.mark.parametrize("module", ["ssmlx.generate", "ssmlx.adapters"])
def test_a_process_without_a_home_runs(module, base, monkeypatch):
    monkeypatch.delenv("SSMLX_CACHE")
    monkeypatch.setenv("HOME", str(base / "config.json"))
    given = ("--model", str(base), "--prompt", "w1", "--max-tokens", "4")
    done = real.run_module(module, *(given if module == "ssmlx.generate" else ()))
    assert done.returncode == 0 and "Traceback" not in done.stderr
