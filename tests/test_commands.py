"""The commands: options, bad input, output, `--help`; and the chat's lines."""

import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import real
from huggingface_hub.utils import enable_progress_bars

import ssmlx
from ssmlx import bars
from ssmlx.commands import adapt, adapters, chat, generate
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
from ssmlx.settings import DRAFTERS

PROG = "ssmlx.generate"
KEYS = [
    "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens",
    "target_calls", "tokens_per_call", "prefill_seconds", "decode_seconds", "draft_calls", "drafts",
    "lossy", "memory",
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
        known = model == str(base) and adapter in loaded
        return loaded[adapter] if known else load_any(model, adapter=adapter, **more)

    monkeypatch.setattr(loading, "load", load)

    def run(*args, model=str(base), command=generate):
        return real.exit_code(command.main, "--model", model, *args), *capsys.readouterr()

    return run


def refusal(result, prog=PROG) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    return real.one_line(err, prog)


def records(result) -> list[dict]:
    code, out, _ = result
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


BAD = {
    "unknown model": (("--model", "no-such-model"), "no model is called 'no-such-model'"),
    "missing model folder": (("--model", "./no/such/folder"), "no/such/folder does not exist"),
    "missing adapter": (("--adapter", "nowhere"), "no adapter folder nowhere"),
    "missing prompts": (("--prompts", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
    "both prompts": ((*ASK, "--prompts", "x"), "not allowed with argument"),
    "neither": ((), "one of the arguments --prompt --prompts is required"),
    "stray byte": (("--prompt", "w1 \udcff"), "the text is not Unicode: '\\udcff' at 3"),
    "stray byte as it is": (
        ("--prompt", "\ud800", "--template", "raw"), "the text is not Unicode: '\\ud800' at 0",
    ),
    "empty prompt": (("--prompt", " "), "the prompt is empty"),
    "long prompt": (
        ("--prompt", real.words(300), "--template", "raw"),
        f"the prompt has 300 tokens; expected less than the model's context of {real.CONTEXT}",
    ),
    "max-tokens": ((*ASK, "--max-tokens", "0"), "--max-tokens 0; expected 1 or more"),
    "max-tokens word": ((*ASK, "--max-tokens", "many"), "invalid int value: 'many'"),
    "stop": ((*ASK, "--stop", ""), "--stop ''; expected some text; give some, or drop it"),
    "logprobs": ((*ASK, "--jsonl", "--logprobs", "-1"), "--logprobs -1; expected 0 to 100"),
    "idle logprobs": ((*ASK, "--logprobs", "2"), "--logprobs would do nothing here; expected --js"),
    "temp nan": ((*ASK, "--temp", "nan"), "--temp nan; expected 0, or 1e-05 to"),
    "template": ((*ASK, "--template", "no place"), "--template 'no place'; expected chat, raw"),
    "template args": ((*ASK, "--template-args", "[1]"), "'[1]' is not a JSON object"),
    "unread template args": (
        (*ASK, "--template-args", '{"think": 1}'), "the template argument think; expected what",
    ),
    "dtype": ((*ASK, "--dtype", "int3"), "invalid choice: 'int3'"),
    "unknown option": ((*ASK, "--trees", "3"), "unrecognized arguments: --trees 3"),
    "speculative without adapter": (
        (*ASK, "--decoding", "speculative"),
        "the model has no streams; expected an adapter with streams; give --adapter FOLDER",
    ),
    "drafter": ((*ASK, "--drafter", "oak"), "--drafter oak; expected one of streams, prompt-"),
    "drafter key": (
        (*ASK, "--drafter", "lookahead size=4"),
        "--drafter lookahead size=4; expected keys of --drafter lookahead, each once: window=5 "
        "ngram=4 guesses=5 acceptance=exact|typical",
    ),
    "drafter key twice": ((*ASK, "--drafter", "lookahead window=4 window=5"), "window=5; expected"),
    "drafter number": (
        (*ASK, "--drafter", "lookahead window=five"), "window=five; expected a whole number",
    ),
    "drafter range": (
        (*ASK, "--drafter", "lookahead window=0"),
        '--drafter "lookahead window=0"; expected 1 to 128; choose a whole number in that range',
    ),
    "drafter word": (
        (*ASK, "--drafter", "streams schedule=late"),
        "--drafter streams schedule=late; expected one of second-pass|fused",
    ),
    "drafter quotes": ((*ASK, "--drafter", 'medusa heads="a'), "close the quotation mark"),
    "penalty": ((*ASK, "--penalty", "presence=much"), "presence=much; expected a number"),
    "penalty twice": (
        (*ASK, "--penalty", "presence=1", "--penalty", "presence=2"), "presence= twice; expected",
    ),
}  # fmt: skip

BAD_TREES = {
    "num-streams 0": (("--num-streams", "0"), "--num-streams 0; expected 1 to 2"),
    "num-streams 9": (("--num-streams", "9"), "--num-streams 9; expected 1 to 2"),
    "tree-width": (("--tree-width", "0"), "--tree-width 0; expected 1 or more"),
    "tree-size": (("--tree-size", "5000"), "--tree-size 5000; expected 1 to 1024"),
    "full tree": (("--tree", "full", "--tree-width", "40"), "has 1641 nodes; expected at most"),
    "tree kind": (("--tree", "oak"), "invalid choice: 'oak'"),
    "prune kind": (("--prune", "oak"), "--prune oak; expected one of off, budget, threshold"),
    "threshold": (("--prune", "threshold=2"), "--prune threshold=2.0; expected 0 to 1"),
    "threshold nan": (("--prune", "threshold=nan"), "--prune threshold=nan; expected 0 to 1"),
    "threshold word": (("--prune", "threshold=few"), "--prune threshold=few; expected a number"),
    "budget number": (("--prune", "budget=4"), "--prune budget=4; expected keys of --prune"),
    "prune-to 0": (("--prune", "budget", "--prune-to", "0"), "--prune-to 0; expected 1 or"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *BAD_TREES])
def test_bad_input_is_one_line(run, adapter, case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, said = {**BAD, **BAD_TREES}[case]
    if case in BAD_TREES:
        args = ("--adapter", adapter, *args)
    if case in BAD_TREES or "model" in case or case == "missing adapter":
        args = (*ASK, *args)
    assert said in refusal(run(*args))


def test_the_fused_attention_needs_metal(run, monkeypatch):
    monkeypatch.setattr("ssmlx.model.metal.hook.is_available", lambda: False)
    asked = (*ASK, "--drafter", "prompt-lookup attention=fused")
    assert "MLX has no Metal device here" in refusal(run(*asked))
    assert run(*ASK, "--drafter", "prompt-lookup attention=mlx")[0] == 0


@pytest.mark.parametrize("flag", ["--tree", "--num-streams", "--prune", "--tree-width"])
def test_tree_options_without_an_adapter_are_refused(run, flag):
    value = {"--tree": "best", "--prune": "budget"}.get(flag, "2")
    message = refusal(run(*ASK, flag, value))
    assert f"{flag} would do nothing here; expected a model with streams" in message


def drafters_shaped_by(field):
    """What a message lists of the drafters whose trees a field of `GenerateConfig` shapes."""
    able = [name for name in DRAFTERS if field in drafter_class(name).shaped_by]
    return "--drafter " + " or ".join(able)


IDLE = (
    ("--seed 1 --temp 0", "--temp above 0"),
    ("--top-k 5 --generation-config none", "--temp above 0"),
    ("--top-p 0.5 --temp 0", "--temp above 0"),
    ("--deterministic --prompt-cache x", "no --deterministic"),
    ("--penalty context=9", "repetition=X, presence=X or frequency=X in it"),
    ("--drafter 'streams epsilon=0.1' --temp 1", "acceptance=typical beside it"),
    ("--drafter lookahead --tree full", drafters_shaped_by("tree")),
    ("--drafter 'draft-model model=x' --tree-size 4", drafters_shaped_by("tree")),
    ("--drafter lookahead --num-streams 1", drafters_shaped_by("num_streams")),
    ("--drafter lookahead --prune budget", drafters_shaped_by("prune")),
    ("--tree full --tree-size 8", "--tree best"),
    ("--prune-to 4", "--prune budget"),
    ("--prune threshold --prune-to 4", "--prune budget"),
    *((f"--decoding plain {option}", "speculative decoding") for option in (
        "--drafter lookahead", "--tree best", "--num-streams 1", "--prune budget",
    )),
)  # fmt: skip


@pytest.mark.parametrize(("options", "needs"), IDLE)
@pytest.mark.parametrize("command", [generate, chat])
def test_an_option_that_could_change_nothing_is_refused(command, options, needs):
    ask = ["--prompt", "w1"] if command is generate else []
    with pytest.raises(InputError, match="would do nothing here") as caught:
        generate_config(command.parse_args([*ask, *shlex.split(options)]))
    assert caught.value.expected == needs


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
    assert f"--drafter {name} without {what}; expected {DRAFTERS[name].loads} with it" in said


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


@pytest.mark.parametrize(("text", "said"), [
    ('{"prompt": "w1"}\n\n{"question": "w2"}\n', "line 3, has question"),
    ('{"prompt": "w1"}\nnot JSON\n', "line 2: it is not JSON"),
    ("\n", "is empty"),
    (json.dumps({"prompt": "w1"}) + "\n" + json.dumps({"prompt": real.words(300)}), "has 30"),
])  # fmt: skip
def test_a_bad_line_is_told_before_anything_is_answered(run, tmp_path, text, said):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    assert said in refusal(run("--prompts", path, "--jsonl"))


def test_a_model_without_chat_template_or_tokenizer(run, tmp_path):
    folder = real.write_base(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    message = refusal(run(*ASK, "--template", "chat", model=str(folder)))
    assert "the model's tokenizer has no chat template" in message
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer that can be loaded" in refusal(run(*ASK, model=str(folder)))
    path = folder / "model.safetensors"
    for cut in (2000, 20, 0):
        path.write_bytes(path.read_bytes()[:cut])
        assert f"{folder} cannot be loaded as a model (" in refusal(run(*ASK, model=str(folder)))


def test_jsonl_holds_one_record_a_prompt(run, loaded, adapter, tmp_path):
    tokenizer = loaded[None][1]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w1 w2"}\n{"prompt": "w3", "other": 1}\n')
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


def test_text_goes_to_stdout_and_the_quiet_line_to_stderr(run, adapter):
    args = (*ASK, "--adapter", adapter, "--max-tokens", 9)
    (record,) = records(run(*args, "--jsonl"))
    code, out, err = run(*args)
    assert (code, out) == (0, record["text"] + "\n")
    assert err.startswith("[9 tokens · ") and err.count("\n") == 1
    assert "tokens per target call" in err and "cut at --max-tokens" in err
    how, faster, quiet, drafted, memory, costs, accepted = run(*args, "--verbose")[2].splitlines()
    assert re.fullmatch(r"\[adapter .*: streams (may )?draft.* plain decoding .*\]", how)
    assert faster.startswith("[faster: ")
    assert quiet.startswith("[9 tokens") and memory.startswith("[memory: ")
    assert "drafted" in drafted
    assert costs.startswith("[costs: ") and accepted.startswith("[acceptance: ")


def test_verbose_shows_what_was_learned(run, loaded, adapter):
    model, _ = loaded[str(adapter)]
    known, prior = learned_of(model)
    known.costs.set_head_start({("streams", 2): 1.25, ("streams", 4): 1.75})
    known.costs.learn_plain_seconds(0, [0.5] * 3)
    prior.learn("streams", 0, 50.0, 100.0)
    share = prior.ratio("streams", 0)
    args = (*ASK, "--adapter", adapter, "--max-tokens", 1, "--verbose")
    *_, costs, accepted = run(*args)[2].splitlines()
    assert costs == (
        "[costs: plain calls of 500.0 ms that a call of streams takes, by nodes: 2: 1.25, 4: 1.75]"
    )
    assert accepted == (
        f"[acceptance: {share:.2f} of the drafted tokens that streams should bring]"
    )
    *_, last = run(*args, "--tree-size", 4)[2].splitlines()
    assert last.startswith("[memory: ")  # which no controller decided


def test_verbose_shows_what_was_learned_of_text_drafts(run, loaded):
    """Their costs are those of rows, and their ratios are kept by length of match."""
    args = (*ASK, "--adapter", "none", "--max-tokens", 1, "--verbose")
    *_, costs, accepted = run(*args)[2].splitlines()
    assert costs == "[costs: no call of prompt-lookup was timed here yet]"
    assert accepted == "[acceptance: no text was drafted with prompt-lookup here yet]"
    known, prior = learned_of(loaded[None][0])
    known.costs.learn(("rows", 4), 0, known.costs.frozen(0).calls(("rows", 4)))
    known.costs.learn_plain_seconds(0, [0.5] * 3)
    prior.learn("prompt-lookup 1", 0, 3.0, 10.0)
    prior.learn("prompt-lookup 9", 0, 9.0, 10.0)
    shares = [prior.ratio(f"prompt-lookup {length}", 0) for length in (1, 9)]
    calls = known.costs.frozen(0).calls(("rows", 4))
    *_, costs, accepted = run(*args)[2].splitlines()
    assert costs == (
        "[costs: plain calls of 500.0 ms that a call of prompt-lookup takes, by nodes: "
        f"4: {calls:.2f}]"
    )
    assert accepted == (
        "[acceptance: of the next tokens that prompt-lookup drafts, by length of the match: "
        f"1: {shares[0]:.2f}, 9: {shares[1]:.2f}]"
    )


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


@pytest.fixture
def talk(base, loaded, monkeypatch, capsys):
    """Pipe lines through the chat command with the adapter; gives (code, stdout, stderr)."""
    pair = next(pair for name, pair in loaded.items() if name)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pair)

    def talk(lines, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = chat.main(["--model", str(base), "--max-tokens", str(LENGTH), *args])
        out, err = capsys.readouterr()
        # A busy machine may need a while to time calls, and is told so.
        told = [line for line in err.splitlines(True) if not line.startswith("timing what draft")]
        return code, out, "".join(told)

    return talk


def replies(loaded, *texts):
    """What a session says to `texts`, a line each."""
    pair = next(pair for name, pair in loaded.items() if name)
    session = ssmlx.ChatSession(*pair, ssmlx.GenerateConfig(max_tokens=LENGTH))
    return "".join("".join(r.text for r in session.reply(text)) + "\n" for text in texts)


def test_replies_on_stdout_the_rest_on_stderr(talk, loaded):
    code, out, err = talk("w1 w2\n\n/stats\nw3\n/quit\nw4\n")
    assert (code, out) == (0, replies(loaded, "w1 w2", "w3"))
    quiet, stats, context, last = real.said_later(err)
    for line in (quiet, last):
        assert line.startswith(f"[{LENGTH} tokens · ") and "tokens per target call" in line
    assert stats.startswith(f"1 answers · {LENGTH} tokens in ")
    assert context.startswith("context: ") and "prompt tokens came from the cache" in context
    code, out, err = talk("")  # the end of input leaves
    assert (code, out, real.said_later(err)) == (0, "", [])


def test_slash_commands(talk):
    lines = ["/stats", "/compare", "/help", "/nonsense", "w1", "/reset", "w1", "/system w9"]
    more = ["w1", "/system", "w1", "/compare", "/memory", "/adapter"]
    code, out, err = talk("\n".join([*lines, *more]) + "\n")
    assert code == 0
    one, again, system, none = out.splitlines()
    assert one == again == none != system
    for said in (
        "nothing was said yet\n",
        "nothing was said yet; expected a message",
        "/reset",
        "no command /nonsense; /help lists them",
        "the conversation is forgotten",
        "a new conversation with that system prompt",
        "a new conversation with no system prompt",
        "the same tokens",
        "base model",
        "that are here: ",
    ):
        assert said in err


def test_ctrl_c_stops_a_comparison_and_not_the_chat(talk, monkeypatch):
    def interrupted(session, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(ssmlx.ChatSession, "compare", interrupted)
    code, out, err = talk("w1\n/compare\nw2\n")
    assert (code, out.count("\n")) == (0, 2) and "\nstopped\n" in err


def test_an_overflow_is_told_and_the_chat_goes_on(talk, loaded):
    code, out, err = talk(f"{real.words(300)}\nw1\n/system w9\n{real.words(300)}\n")
    assert (code, out) == (0, replies(loaded, "w1"))
    alone, *_, chatting = real.said_later(err)
    full = "expected less than the model's context of 256; shorten it"
    assert alone.endswith(full) and chatting.endswith(f"{full}; /reset starts anew")


def test_a_template_without_a_system_role_has_the_user_say_it(talk, loaded, monkeypatch):
    refusal = "{{ raise_exception('System role not supported') }}"
    template = f"{{% if messages[0].role == 'system' %}}{refusal}{{% endif %}}{real.CHAT_TEMPLATE}"
    for _, tokenizer in loaded.values():
        monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    code, out, _ = talk("w1\n/system\nw1\n", "--system", "w9")
    assert (code, out) == (0, replies(loaded, "w9\n\nw1") + replies(loaded, "w1"))


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
    assert name != PROG or (len(lines) - len(DRAFTERS) <= 73 and len(options) <= 30)


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
    assert "the model has no streams" in said


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
    assert "the text is not Unicode" in stray
    assert quiet.startswith("[8 tokens · ") and quiet.endswith(" · cut at --max-tokens]")
    assert stats.startswith("1 answers · 8 tokens in 8 target calls (1.00 a call)")
    assert "context: " in context


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
    assert quiet.startswith("[8 tokens · ") and stats.startswith("1 answers · 8 tokens")


def test_a_chat_asks_without_the_line_s_end(monkeypatch):
    lines = io.StringIO("Hello\r\n a\rb \n\r\nlast\r", newline="\n")
    monkeypatch.setattr(sys, "stdin", lines)
    screen = chat.Screen()
    heard = list(iter(screen.read_line_or_none_at_end, None))
    assert heard == ["Hello", " a\rb ", "", "last"]


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
            out, err = process.communicate(b"/stats\n/quit\n", timeout=60)
        finally:
            process.kill()
    quiet, stats, _ = real.said_later(err.decode())
    assert process.returncode == 0
    assert quiet.endswith(" · stopped]")
    assert stats.startswith("1 answers · ")
    assert out.endswith(b"\n") and out.count(b"\n") == 1


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
    assert out.strip() and "Traceback" not in err and "cannot" not in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n/compare\n/quit\n"))
    assert chat.main(common) == 0
    assert capsys.readouterr().out == out
    with ssmlx.Engine(str(base)) as engine:
        assert len(list(engine.stream("w1 w2", max_tokens=6))) > 1
    assert adapters.main([]) == 0 and "0 adapters" in capsys.readouterr().out
    # What has to be written somewhere says where it would be.
    assert adapt.main(["--model", str(base)]) == 2
    assert "cannot write" in real.one_line(capsys.readouterr().err, adapt.PROG)


@pytest.mark.parametrize("module", ["ssmlx.generate", "ssmlx.adapters"])
def test_a_process_without_a_home_runs(module, base, monkeypatch):
    monkeypatch.delenv("SSMLX_CACHE")
    monkeypatch.setenv("HOME", str(base / "config.json"))
    given = ("--model", str(base), "--prompt", "w1", "--max-tokens", "4")
    done = real.run_module(module, *(given if module == "ssmlx.generate" else ()))
    assert done.returncode == 0 and "Traceback" not in done.stderr
