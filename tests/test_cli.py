"""The generate command: bad input, output, --help."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from real import CONTEXT, ROOT, one_line, run_module, words, write_base, write_tiny_adapter

import ssmlx
from perf.quality import __main__ as quality
from ssmlx.commands import chat, generate
from ssmlx.errors import InputError

PROG = "ssmlx.generate"
KEYS = [
    "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens",
    "target_calls", "tokens_per_call", "prefill_seconds", "decode_seconds", "draft_calls", "lossy",
    "memory",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("cli") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    return write_tiny_adapter(base.parent / "adapter", base, template="user: {prompt} | model:")


@pytest.fixture(scope="module")
def loaded(base, adapter):
    """The tiny model, loaded once; the commands below are given it for speed."""
    return {
        None: ssmlx.load(str(base), dtype="float32"),
        str(adapter): ssmlx.load(str(base), adapter=adapter, dtype="float32"),
    }


@pytest.fixture
def run(base, loaded, monkeypatch, capsys):
    """Run the command on the tiny model; gives (exit code, stdout, stderr)."""
    real = ssmlx.load
    from ssmlx.loading import load as loading

    def load(model, *, adapter, **more):
        known = model == str(base) and adapter in loaded
        return loaded[adapter] if known else real(model, adapter=adapter, **more)

    monkeypatch.setattr(loading, "load", load)

    def run(*args, model=str(base), command=generate):
        argv = ["--model", model, *map(str, args)]
        try:
            code = command.main(argv)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def refusal(result) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    return one_line(err, PROG)


ASK = ("--prompt", "w1 w2")
PLAIN = ("--decoding", "plain")

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
        ("--prompt", words(300), "--template", "raw"),
        f"the prompt has 300 tokens; expected less than the model's context of {CONTEXT}",
    ),
    "max-tokens": ((*ASK, "--max-tokens", "0"), "--max-tokens 0; expected 1 or more"),
    "max-tokens word": ((*ASK, "--max-tokens", "many"), "invalid int value: 'many'"),
    "temp": ((*ASK, "--temp", "-1"), "--temp -1.0; expected 0 or more"),
    "temp nan": ((*ASK, "--temp", "nan"), "--temp nan; expected 0 or more"),
    "template": ((*ASK, "--template", "no place"), "--template 'no place'; expected chat, raw"),
    "dtype": ((*ASK, "--dtype", "int3"), "invalid choice: 'int3'"),
    "unknown option": ((*ASK, "--trees", "3"), "unrecognized arguments: --trees 3"),
    "streaming without adapter": (
        (*ASK, "--decoding", "streaming"),
        "the model has no streams; expected an adapter; give --adapter FOLDER",
    ),
}  # fmt: skip

BAD_TREES = {
    "num-streams 0": (("--num-streams", "0"), "--num-streams 0; expected 1 to 2"),
    "num-streams 9": (("--num-streams", "9"), "--num-streams 9; expected 1 to 2"),
    "tree-width": (("--tree-width", "0"), "--tree-width 0; expected 1 or more"),
    "tree-size 0": (("--tree-size", "0"), "--tree-size 0; expected 1 to 1024"),
    "tree-size large": (("--tree-size", "5000"), "--tree-size 5000; expected 1 to 1024"),
    "full tree": (("--tree", "full", "--tree-width", "40"), "has 1641 nodes; expected at most"),
    "tree kind": (("--tree", "oak"), "invalid choice: 'oak'"),
    "threshold": (
        ("--prune", "threshold=2"), "--prune threshold=2.0; expected 0 to 1",
    ),
    "threshold nan": (
        ("--prune", "threshold=nan"), "--prune threshold=nan; expected 0 to 1",
    ),
    "prune-to 0": (("--prune", "budget", "--prune-to", "0"), "--prune-to 0; expected 1 or"),
    "idle size": (("--tree", "full", "--tree-size", "8"), "--tree-size would do nothing here"),
    "idle prune-to": (("--prune-to", "4"), "--prune-to would do nothing here"),
    "idle prune-to 2": (
        ("--prune", "threshold", "--prune-to", "4"), "--prune-to would do nothing here",
    ),
    "threshold word": (("--prune", "threshold=few"), "--prune threshold=few; expected a number"),
    "budget number": (("--prune", "budget=4"), "--prune budget=4; expected keys of --prune"),
    "idle tree": ((*PLAIN, "--tree", "best"), "--tree would do nothing here"),
    "idle streams": ((*PLAIN, "--num-streams", "1"), "--num-streams would do nothing here"),
    "idle prune": ((*PLAIN, "--prune", "budget"), "--prune would do nothing here"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(run, case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, said = BAD[case]
    if "model" in case or case == "missing adapter":
        args = (*ASK, *args)
    message = refusal(run(*args))
    assert said in message


def test_the_fused_attention_needs_metal(run, monkeypatch):
    monkeypatch.setattr("ssmlx.model.metal.hook.is_available", lambda: False)
    assert "MLX has no Metal device here" in refusal(
        run(*ASK, "--drafter", "streams attention=fused")
    )
    assert run(*ASK, "--drafter", "prompt-lookup attention=mlx")[0] == 0


@pytest.mark.parametrize("case", BAD_TREES)
def test_bad_tree_options_are_one_line(run, adapter, case):
    args, said = BAD_TREES[case]
    assert said in refusal(run(*ASK, "--adapter", adapter, *args))


@pytest.mark.parametrize("flag", ["--tree", "--num-streams", "--prune", "--tree-width"])
def test_tree_options_without_an_adapter_are_refused(run, flag):
    value = {"--tree": "best", "--prune": "budget"}.get(flag, "2")
    message = refusal(run(*ASK, flag, value))
    assert f"{flag} would do nothing here; expected a model with streams" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "w1"}\n\n{"question": "w2"}\n', "line 3, has no prompt"),
        ('["prompt"]\n', "line 1, has no prompt"),
        ('{"prompt": "w1"}\nnot JSON\n', "line 2, is not JSON"),
        ('{"prompt": " "}\n', "line 1, has an empty prompt"),
        ('{"prompt": 5}\n', 'line 1, has a bad "prompt"'),
        ("\n", "holds no prompts"),
        (b'{"prompt": "\xff"}\n', "not UTF-8"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_answered(run, tmp_path, text, said):
    path = tmp_path / "p.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refusal(run("--prompts", path, "--jsonl"))
    assert str(path) in message and said in message


def test_a_long_prompt_among_others_stops_the_run_before_it_starts(run, tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "w1"}, {"prompt": words(300)}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "the prompt has 30" in refusal(run("--prompts", path, "--jsonl"))


def test_a_model_without_chat_template_or_tokenizer(run, tmp_path):
    folder = write_base(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    message = refusal(run(*ASK, "--template", "chat", model=str(folder)))
    assert "the model's tokenizer has no chat template" in message
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer that can be loaded" in refusal(run(*ASK, model=str(folder)))


@pytest.mark.parametrize("cut", [0, 20, 2000])
def test_a_broken_model_file_is_one_line(run, tmp_path, cut):
    folder = write_base(tmp_path / "base")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert f"{folder} cannot be loaded as a model (" in refusal(run(*ASK, model=str(folder)))


# --- Output ---


def records(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_jsonl_holds_one_record_a_prompt(run, loaded, adapter, tmp_path):
    tokenizer = loaded[None][1]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w1 w2"}\n{"prompt": "w3", "other": 1}\n')
    args = ("--prompts", path, "--jsonl", "--max-tokens", 12, "--adapter", adapter)
    code, out, err = run(*args)
    assert (code, err) == (0, "")
    streamed = records(out)
    plain = records(run(*args, *PLAIN)[1])
    assert [r["prompt"] for r in streamed] == ["w1 w2", "w3"]
    for one, other in zip(streamed, plain, strict=True):
        assert list(one) == list(other) == KEYS
        assert (one["tokens"], one["text"]) == (other["tokens"], other["text"])
        assert one["generation_tokens"] == len(one["tokens"]) == 12
        assert one["finish_reason"] == "length"
        assert one["tokens_per_call"] == round(12 / one["target_calls"], 4)
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert (other["target_calls"], other["tokens_per_call"]) == (12, 1.0)
        assert one["prefill_seconds"] > 0 and one["decode_seconds"] > 0


def test_text_goes_to_stdout_and_the_quiet_line_to_stderr(run, adapter):
    args = (*ASK, "--adapter", adapter, "--max-tokens", 9)
    (record,) = records(run(*args, "--jsonl")[1])
    code, out, err = run(*args)
    assert (code, out) == (0, record["text"] + "\n")
    assert err.startswith("[9 tokens · ") and err.count("\n") == 1
    assert "tokens per target call" in err and "cut at --max-tokens" in err


def test_an_answer_ends_where_the_context_does(run):
    args = ("--prompt", words(CONTEXT - 5), "--template", "raw", "--jsonl")
    (record,) = records(run(*args)[1])
    assert (record["finish_reason"], record["generation_tokens"]) == ("context", 5)


@pytest.mark.parametrize(
    ("template", "whole"),
    [
        ("raw", "w1 w2"),
        ("chat", "user: w1 w2 | model:"),
        ("w9 {prompt} w8", "w9 w1 w2 w8"),
        (None, "user: w1 w2 | model:"),
    ],
)
@pytest.mark.parametrize("with_adapter", [False, True])
def test_templates(run, loaded, adapter, template, whole, with_adapter):
    tokenizer = loaded[None][1]
    args = [*ASK, "--jsonl", "--max-tokens", 4]
    args += ["--template", template] if template else []
    args += ["--adapter", adapter] if with_adapter else []
    (record,) = records(run(*args)[1])
    expected = tokenizer.encode(whole)
    assert record["prompt_tokens"] == len(expected)
    model = loaded[str(adapter) if with_adapter else None][0]
    tokens = ssmlx.stream_generate(model, tokenizer, expected, max_tokens=4)
    assert record["tokens"] == [token for response in tokens for token in response.tokens]


def test_a_new_line_in_a_template_is_written_as_the_trainers_take_it():
    for command, more in ((generate, ASK), (quality, ("--task", "sql", "--adapter", "x"))):
        args = command.parse_args([*more, "--template", r"Q: {prompt}\nA:"])
        assert args.template == "Q: {prompt}\nA:"


def test_the_adapters_template_comes_before_the_models(run, base, tmp_path):
    own = write_tiny_adapter(tmp_path / "own", base, template="w5 {prompt}")
    (record,) = records(run(*ASK, "--jsonl", "--max-tokens", 1, "--adapter", own)[1])
    assert record["prompt_tokens"] == 3


def test_a_seed_repeats_the_samples(run, adapter):
    args = (*ASK, "--adapter", adapter, "--jsonl", "--max-tokens", 16, "--temp", 1.5)
    tokens = [records(run(*args, "--seed", seed)[1])[0]["tokens"] for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    "options",
    [
        ("--tree", "full", "--tree-width", "2"),
        ("--tree-size", "6", "--tree-width", "3", "--num-streams", "1"),
        ("--prune", "budget", "--prune-to", "3"),
        ("--prune", "threshold=0.02"),
    ],
)
def test_every_tree_option_leaves_the_answer_as_it_is(run, adapter, options):
    args = (*ASK, "--adapter", adapter, "--jsonl", "--max-tokens", 24)
    (plain,) = records(run(*args, *PLAIN)[1])
    (streamed,) = records(run(*args, *options)[1])
    assert streamed["tokens"] == plain["tokens"]
    assert streamed["target_calls"] <= 24


# --- Real processes ---


def test_a_real_process_prints_json_lines_alone(base, adapter):
    result = run_module(
        PROG, "--model", str(base), "--adapter", str(adapter), *ASK, "--jsonl", "--max-tokens", "5"
    )
    assert (result.returncode, result.stderr) == (0, "")
    (record,) = records(result.stdout)
    assert list(record) == KEYS and len(record["tokens"]) == 5


@pytest.mark.parametrize("command", [PROG, "ssmlx.chat"])
def test_a_real_process_fails_in_one_line(base, command):
    ask = ASK if command == PROG else ()
    result = run_module(command, "--model", str(base), *ask, "--decoding", "streaming")
    assert (result.returncode, result.stdout) == (2, "")
    assert "the model has no streams" in one_line(result.stderr, command)


def test_chat_options_fail_in_one_line(run):
    code, out, err = run("--tree-size", "0", command=chat)
    assert (code, out) == (2, "")
    assert "--tree-size 0" in one_line(err, "ssmlx.chat")


@pytest.mark.parametrize("module", ["ssmlx.generate", "ssmlx.chat", "convert.__main__"])
def test_help_does_not_wait_for_mlx(module):
    code = (
        "import sys, importlib\n"
        f"main = importlib.import_module({module!r}).main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "slow = {'mlx', 'mlx.core', 'mlx_lm', 'torch', 'transformers', 'huggingface_hub'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    name = {"convert.__main__": "convert"}.get(module, module.replace("cli.", ""))
    assert result.stdout.startswith(f"usage: python -m {name} ")


@pytest.mark.parametrize("module", [PROG, "ssmlx.chat", "convert"])
def test_help_of_the_modules(module):
    result = run_module(module, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--model" in result.stdout or "--base" in result.stdout


@pytest.mark.parametrize(
    "given, expected", [((), "auto"), (("--drafter", "streams head=8bit"), "8bit")]
)
def test_the_draft_head_is_loaded_as_asked(monkeypatch, given, expected):
    """Its name reaches the loader, which test_quantised.py follows from there."""
    from ssmlx.loading import load as loading

    seen = {}

    def load(model, **settings):
        seen.update(settings)
        raise InputError("enough", expected="nothing more", do="stop")

    monkeypatch.setattr(loading, "load", load)
    assert generate.main(["--prompt", "w1", "--model", "anything", *given]) == 2
    assert seen["draft_head"] == expected
