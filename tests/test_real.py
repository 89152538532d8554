"""The sample checkpoint on SmolLM2-135M: the tokens and calls of PyTorch, the text of mlx-lm."""

import json
import re
from ast import literal_eval
from functools import cache
from html import unescape

import pytest

import ssmlx

import mlx.core as mx  # isort: skip
import mlx_lm
import numpy as np
from mlx_lm.tuner.utils import load_adapters
from real import EXAMPLE, ROOT, answer, run_module, said_later
from refusals import mentions
from tiny import make_condition

from convert.__main__ import main as convert
from ssmlx.loading.load import load_base
from ssmlx.loading.names import resolve_model
from ssmlx.model.tree import Tree
from ssmlx.prompts import encode, prompt_tokens, read_prompts
from ssmlx.settings import PruneConfig, TreeConfig

pytestmark = pytest.mark.real

BASE = "smollm2-135m-q4_1"
EXPECTED = [json.loads(line) for line in (EXAMPLE / "expected.jsonl").read_text().splitlines()]
LENGTH = 24
VARIANTS = {
    "plain": {"decoding": "plain"},
    "full": {"tree": TreeConfig(kind="full", width=2)},
    "best 16": {"tree": TreeConfig(size=16)},
    "best 16 to 8": {"tree": TreeConfig(size=16), "prune": PruneConfig(kind="budget", keep=8)},
    "full, threshold": {
        "tree": TreeConfig(kind="full", width=2),
        "prune": PruneConfig(kind="threshold", threshold=0.05),
    },
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Makes a folder once: the sample's adapter of a scope, or the fused model."""
    root = tmp_path_factory.mktemp("real")
    options = {
        "all": [],
        "streams": ["--scope", "streams"],
        "fused": ["--fuse", "--dtype", "float32"],
    }

    @cache
    def make(name):
        checkpoint = ["--base", BASE, "--lora", str(EXAMPLE)]
        checkpoint += ["--streams", str(EXAMPLE / "streams.safetensors")]
        assert convert([*checkpoint, "--out", str(root / name), *options[name]]) == 0
        return root / name

    return make


@pytest.fixture(scope="session")
def model_of(made):
    """Loads (our model, tokenizer) once, in float32: the sample fused, or beside the base."""

    @cache
    def load(name):
        if name == "fused":
            return ssmlx.load(str(made(name)), dtype="float32")
        return ssmlx.load(BASE, adapter=made(name), dtype="float32")

    return load


@pytest.fixture(scope="session")
def base():
    """mlx-lm's own model, in float32."""
    return load_base(resolve_model(BASE), "float32")[0].model


def check(model_of, name, index, width):
    """Tokens and target calls of full trees against PyTorch's."""
    (model, tokenizer), entry = model_of(name), EXPECTED[index]
    tokens, last = answer(
        model,
        tokenizer,
        prompt_tokens(entry["prompt"], model, tokenizer),
        tree=TreeConfig(kind="full", width=width),
        max_tokens=64,
    )
    assert tokens == entry["tokens"]
    assert last.target_calls == entry["tree_calls"][str(width)]
    assert last.generation_tokens == len(tokens)


def check_against(oracle, model, tokenizer, entry, variants, length=LENGTH):
    """Every variant writes what mlx-lm does; returns its target calls."""
    prompt = prompt_tokens(entry["prompt"], model, tokenizer)
    theirs = mlx_lm.stream_generate(oracle, tokenizer, prompt, max_tokens=length)
    expected = [response.token for response in theirs]
    calls = {}
    for name in variants:
        tokens, last = answer(model, tokenizer, prompt, max_tokens=length, **VARIANTS[name])
        assert tokens == expected, name
        calls[name] = last.target_calls / len(expected)
    assert calls["plain"] == 1
    return calls


# --- What a user does, end to end ---


def test_streams_write_plain_decodings_tokens_in_fewer_calls():
    model, tokenizer = ssmlx.load(BASE, adapter="sql", dtype="float32")
    asked = read_prompts(ROOT / "examples/data/sql_test_100.jsonl")[0]
    prompt = prompt_tokens(asked["prompt"], model, tokenizer)
    plain, _ = answer(model, tokenizer, prompt, max_tokens=20, decoding="plain")
    tokens, last = answer(model, tokenizer, prompt, max_tokens=20, tree=TreeConfig(size=8))
    assert tokens == plain and last.target_calls < len(plain) / 2


@pytest.mark.slow
def test_a_bundled_adapter_writes_what_mlx_lm_writes(base):
    model, tokenizer = ssmlx.load(BASE, adapter="chat", dtype="float32")
    entry = {"prompt": "Name three colours of the rainbow."}
    calls = check_against(base, model, tokenizer, entry, ["plain", "best 16"])
    assert calls["best 16"] < 1


@pytest.mark.slow
def test_the_examples_of_the_documents(capsys):
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/apps.md"))
    said = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, {})
        said.append(capsys.readouterr().out)
    text, told = said[0].rstrip("\n").rsplit("\n", 1)
    calls, reason = told.split()
    assert float(calls) >= 1 and reason in ("stop", "length")
    answer, count = said[1].rsplit("\n", 2)[:2]
    assert text.startswith(answer)  # of the same adapter, found both ways
    assert "red" in answer.lower() and re.fullmatch(r"\d+ tokens in \d+ calls", count)
    first, second = literal_eval(said[2])
    assert first == answer and "rain" in second.lower()


@pytest.mark.slow
def test_the_picture_of_the_readme():
    """Its rows are plain decoding and what `ssmlx.generate --adapter sql --deterministic` does."""
    _, *rows = unescape((ROOT / "perf/figures/passes.svg").read_text()).split('class="label"')
    model, tokenizer = ssmlx.load(BASE, adapter="sql", dtype="float32")
    prompt = prompt_tokens(EXPECTED[1]["prompt"], model, tokenizer)
    for row, decoding in zip(rows, ("plain", None), strict=True):
        settings = {"deterministic": True, "decoding": decoding, "max_tokens": 64}
        tokens, last = answer(model, tokenizer, prompt, **settings)
        shown = [tokenizer.decode([token]).strip() for token in tokens[:-1]]
        assert re.findall(r'(?:token|end)"[^>]*>([^<]+)<', row) == [*shown, "end"]
        assert row.count('class="pass"') == last.target_calls


@pytest.mark.slow
def test_generate_as_a_user_runs_it(model_of, made):
    entry = EXPECTED[0]
    more = ("--tree", "full", "--tree-width", "2", "--jsonl", "--dtype", "float32")
    result = run_module(
        "ssmlx.generate", "--model", str(made("fused")), "--prompt", entry["prompt"], *more
    )
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["tokens"], record["text"]) == (entry["tokens"], entry["text"])
    assert record["target_calls"] == entry["tree_calls"]["2"]
    assert record["finish_reason"] == "stop"
    model, tokenizer = model_of("fused")
    text = model.config.prompt_template.format(prompt=entry["prompt"])
    assert record["prompt_tokens"] == len(encode(text, tokenizer))


@pytest.mark.slow
def test_chat_as_a_user_runs_it():
    asked = ("--decoding", "plain", "--max-tokens", "8")
    chat = run_module("ssmlx.chat", "--model", BASE, *asked, stdin="hi\n/stats\n/quit\n")
    assert chat.returncode == 0 and chat.stdout.strip()
    drafting = chat.stderr.splitlines()[:2]
    quiet, *_ = said_later(chat.stderr)
    assert mentions("\n".join(drafting), "chat", "--decoding") and mentions(quiet, "8")


@pytest.mark.slow
@pytest.mark.parametrize("index, width", [(0, 1), (0, 2), (1, 2), (1, 3), (2, 1), (2, 2), (3, 4)])
def test_tokens_and_calls_are_those_of_pytorch(model_of, index, width):
    check(model_of, "fused" if (index, width) == (1, 2) else "all", index, width)


@pytest.mark.long
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("index", range(len(EXPECTED)))
def test_all_expected_tokens_and_calls(model_of, index, width):
    check(model_of, "all", index, width)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", "streams"])
def test_every_decoding_writes_what_mlx_lm_writes(model_of, made, base, scope):
    oracle = base if scope == "streams" else mlx_lm.load(str(made("fused")))[0]
    calls = check_against(oracle, *model_of(scope), EXPECTED[6], VARIANTS)
    if scope == "all":  # with scope streams, untrained for it, drafts may all fail
        assert max(value for name, value in calls.items() if name != "plain") < 1


@pytest.mark.slow
def test_a_long_dialogue_is_summed_up_as_by_mlx_lm():
    """`dialogsum`'s prompts are the long ones: this is read in two pieces."""
    oracle = load_base(resolve_model(BASE), "float32")[0].model
    load_adapters(oracle, str(ROOT / "examples/adapters/dialogsum"))
    model, tokenizer = ssmlx.load(BASE, adapter="dialogsum", dtype="float32")
    lines = [f"#Person{n % 2 + 1}#: Did the plumber call? It is {n} o'clock." for n in range(36)]
    entry = {"prompt": "\n".join(lines)}
    assert len(prompt_tokens(entry["prompt"], model, tokenizer)) > 512
    assert check_against(oracle, model, tokenizer, entry, VARIANTS)["best 16"] < 0.6


@pytest.fixture(scope="session")
def reference():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from convert.base import load_base
    from convert.reference.checkpoint import load_reference

    return load_reference(load_base(resolve_model(BASE)), EXAMPLE)


def paths_of(parents):
    """Depth of every node, and the path to it, repeating the node beyond its own depth."""
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    deepest = max(map(len, paths))
    return [len(p) - 1 for p in paths], [p + [p[-1]] * (deepest - len(p)) for p in paths]


def fused_step(model, prompt, tokens, parents):
    """[N, V] main and [N, G, V] stream logits of a tree after `prompt`."""
    cache = model.make_cache()
    count = len(tokens)
    streams = model.num_streams
    cache.reserve(more_tokens=len(prompt) + 8, step_rows=count * (1 + streams))
    model.backbone.append(mx.array(prompt), cache)
    depths, paths = paths_of(parents)
    tree = Tree(mx.array(tokens), mx.array(depths), mx.array(paths), count)
    hidden = model.lower(tree, cache)
    rows = model.upper(model.insert(hidden, streams), tree, cache, streams)
    logits = np.array(model.backbone.logits(rows)).reshape(count * (1 + streams), -1)
    early = np.array(model.early_exit_logits(hidden)).reshape(count, -1)
    return logits[:count], logits[count:].reshape(count, streams, -1), early


def close(found, expected):
    assert found.shape == tuple(expected.shape)
    expected = expected.detach().numpy()
    assert np.abs(found - expected).max() < 3e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_logits_of_a_prompt_are_those_of_pytorch(model_of, reference):
    import torch

    model, tokenizer = model_of("all")
    prompt = prompt_tokens(EXPECTED[0]["prompt"], model, tokenizer)
    main, streams, early = fused_step(model, prompt[:-1], prompt[-1:], [-1])
    with torch.no_grad():
        output = reference(torch.tensor([prompt]), stream_rows=torch.tensor([len(prompt) - 1]))
    close(main[0], output.main_logits[0, -1])
    close(streams[0], output.stream_logits[0, 0])
    close(early[0], output.early_exit_logits[0, -1])
    close(np.array(model.backbone.model(mx.array([prompt]))[0]), output.main_logits[0])


@pytest.mark.slow
def test_logits_of_a_tree_are_those_of_pytorch(model_of, reference):
    import torch
    from oracle import full_tree, tree_inputs

    model, tokenizer = model_of("all")
    prompt = prompt_tokens(EXPECTED[1]["prompt"], model, tokenizer)
    answer = EXPECTED[1]["tokens"]
    tokens, parents = full_tree(answer[0], [[answer[1], 50], [answer[2], 60], [answer[3], 70]])
    input_ids, positions, visible = tree_inputs(prompt, tokens, parents)
    nodes = torch.arange(len(prompt), len(prompt) + len(tokens))
    with torch.no_grad():
        output = reference(input_ids, positions=positions, visible=visible, stream_rows=nodes)
    main, streams, early = fused_step(model, prompt, tokens, parents)
    close(main, output.main_logits[0, nodes])
    close(streams, output.stream_logits[0])
    close(early, output.early_exit_logits[0, nodes])


@pytest.mark.slow
def test_states_given_a_token_are_those_of_pytorch(model_of, reference):
    import torch

    from convert.reference.model import Condition

    model = model_of("all")[0]
    rows = np.random.default_rng(0).normal(0, 2, (5, 576))
    tokens = [3, 400, 7, 9000, 40000]
    hidden = rows.astype(np.float32)
    maps = make_condition(8, 576, std=0.1)
    reference.condition = Condition(576, 8, torch.zeros(1))
    for name, array in vars(maps).items():
        weight = getattr(reference.condition, name).weight
        weight.data = torch.from_numpy(np.array(array))
    with torch.no_grad():
        expected = reference.apply_condition(torch.from_numpy(hidden), torch.tensor(tokens))
    before = model.backbone.token_embeddings(mx.array(tokens))
    close(np.array(hidden + maps(mx.array(hidden), before)), expected)
