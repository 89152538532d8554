"""Medusa heads and the MLP speculator in the loop: their trees, what is accepted, the commands."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
from real import VOCAB as WORDS
from real import one_line, words, write_base, write_tiny_adapter
from test_drafters import FEW_TOKENS, bare_model, cycle_model, written
from tiny import VOCAB, best_rank_paths, first_tokens, make_model, make_tokenizer, target_of
from tiny_heads import (
    HEAD_KINDS,
    LEVELS,
    converted,
    cycle_heads,
    make_heads,
    random_heads,
    random_reference,
    token_paths,
)

from ssmlx.api import stream_generate
from ssmlx.commands import chat, generate
from ssmlx.decoding.accept import Acceptance
from ssmlx.decoding.loop import streaming_decode
from ssmlx.drafters.heads import attach_heads, write_heads
from ssmlx.errors import InputError
from ssmlx.model.architectures import carries_heads
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import RowLora
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import root_tree
from ssmlx.plan import make_plan
from ssmlx.settings import GenerateConfig, PruneConfig, SpeculatorTreeConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
WIDTHS = (4, 3, 2)


def plain(model, prompt, count, **settings):
    return written(model, prompt, count, decoding="plain", **settings)[0]


def drafted(model, settings, prompt, count):
    """The text that is written, and the tree of each call with the text that it continues."""
    drafter, trees = make_plan(model, **settings).drafter, []
    propose = drafter.propose
    drafter.propose = lambda verified: trees.append(propose(verified)) or trees[-1]
    steps = streaming_decode(model, prompt, model.make_cache(), drafter=drafter)
    tokens, lengths = first_tokens(steps, count)
    text, seen = list(prompt), []
    assert len(trees) == len(lengths) + 1  # the next step is built ahead
    for tree, end in zip(trees, np.cumsum(lengths).tolist(), strict=False):
        if end <= count:
            text = [*prompt, *tokens[:end]]
            seen.append((text, tree))
    return tokens, seen


def own_tree(heads, model, text):
    """The tree that heads grow from mlx-lm's own hidden state of a text but its last token."""
    state = model.backbone.model.model(mx.array(text[:-1])[None])[0, -1:]
    shape = TreeConfig() if heads.drafter == "medusa" else SpeculatorTreeConfig()
    return heads.propose_tree(mx.array(text[-1:], mx.int32), state, shape)


# --- The trees ---


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("medusa", {}),
        ("medusa", {"num_layers": 2, "shared_heads": (0, 2)}),
        ("medusa", {"shared_heads": (0, 1, 2), "vocab": FEW_TOKENS}),
        ("mlp-speculator", {"scale_input": True}),
        ("mlp-speculator", {"tie_weights": True, "vocab": FEW_TOKENS}),
    ],
)
def test_every_tree_is_the_heads_own(architecture, kind, settings):
    """At every call, from mlx-lm's own hidden state of the text so far."""
    model = bare_model(architecture)
    heads = make_heads(kind, model.backbone, **settings)
    tokens, seen = drafted(model, {"heads": heads}, PROMPT, 16)
    assert tokens == plain(model, PROMPT, 16) and len(seen) > 3
    for text, tree in seen:
        expected = own_tree(heads, model, text)
        assert tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.paths.tolist() == expected.paths.tolist()
        assert tree.depths.tolist() == expected.depths.tolist()
        assert set(tree.tokens.tolist()[1:]) <= set(settings.get("vocab", range(VOCAB)))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_drafting_waits_for_nothing(kind):
    """MLX refuses to read a value while it traces a function."""
    model = bare_model()
    heads = make_heads(kind, model.backbone, vocab=FEW_TOKENS)

    seen = []
    drafter = make_plan(model, heads=heads).drafter
    drafter.propose = lambda verified: seen.append(verified) or root_tree(verified.root)
    steps = streaming_decode(model, PROMPT, model.make_cache(), drafter=drafter)
    next(steps)

    def draft(drafter, root, hidden):
        accepted = Acceptance(mx.array([0]), root, mx.array([0]))
        tree = drafter.propose(replace(seen[0], acceptance=accepted, node_hidden=hidden))
        return tree.tokens, tree.depths, tree.paths

    def compiled(drafter):
        return mx.compile(lambda root, hidden: draft(drafter, root, hidden))

    state = mx.random.normal((1, 1, model.backbone.hidden_size), key=mx.random.key(0))
    given = mx.array([7], mx.int32), state
    drafter = make_plan(model, heads=heads).drafter
    for found, expected in zip(compiled(drafter)(*given), draft(drafter, *given), strict=True):
        assert found.tolist() == expected.tolist()
    reader = make_plan(model, drafter="prompt-lookup").drafter
    with pytest.raises(ValueError, match="eval"):
        compiled(reader)(*given)


def test_what_the_drafters_say_of_themselves():
    model = bare_model()
    size, inner = model.backbone.hidden_size, 24
    blocks, matrix = size * size + size, VOCAB * size
    medusa = make_heads("medusa", model.backbone, num_layers=2, shared_heads=(1,))
    tied = make_heads("mlp-speculator", model.backbone, tie_weights=True, vocab=FEW_TOKENS)
    wide = make_heads(
        "mlp-speculator", model.backbone, tie_weights=True, vocab=FEW_TOKENS,
        top_k_tokens_per_head=WIDTHS, n_candidates=8,
    )  # fmt: skip
    once = 2 * inner + (VOCAB + len(FEW_TOKENS) + size + inner) * inner
    full = TreeConfig(kind="full", width=2)
    for settings, levels, nodes, parameters in (
        ({"heads": medusa}, 3, 16, 6 * blocks + 2 * matrix),
        ({"heads": medusa, "tree": full}, 3, 15, 6 * blocks + 2 * matrix),
        ({"heads": tied}, 3, 16, once),  # 1 + 5 + 5 + 5 of 6 x 3 x 2
        ({"heads": wide}, 3, 1 + 4 + 8 + 8, once),  # as published, of 4 x 3 x 2
        (speculator(tied, widths=[2, 2]), 2, 7, once),
        (speculator(tied, widths=[3, 3], candidates=2), 2, 5, once),
        (speculator(tied, size=9), 3, 9, once),
        (speculator(tied, widths=(1,), size=9), 1, 2, once),
    ):
        plan = make_plan(model, **settings)
        drafter = plan.drafter
        assert (drafter.num_levels, drafter.max_nodes) == (levels, nodes)
        assert (drafter.num_parameters, drafter.num_streams) == (parameters, 0)
        assert plan.scratch == nodes + levels + 1  # the path before it
        *_, last = stream_generate(model, make_tokenizer(), PROMPT, max_tokens=5, **settings)
        assert drafter.draft_calls == last.draft_calls == 0
        for _, tree in drafted(model, settings, PROMPT, 8)[1]:
            assert tree.num_nodes == nodes and int(tree.depths.max().item()) <= levels


def speculator(heads, **tree):
    return {"heads": heads, "speculator_tree": SpeculatorTreeConfig(**tree)}


# --- Constructed acceptance ---


CHAIN = {"tree": TreeConfig(kind="full", width=1), **speculator(None, widths=(1,) * LEVELS)}


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("chain", [False, True])
def test_heads_that_know_the_target_are_accepted_whole(kind, chain):
    model = cycle_model()
    heads = cycle_heads(kind, model.backbone)
    settings = {**(CHAIN if chain else {}), "heads": heads}
    count = 1 + 6 * (LEVELS + 1)
    responses = list(stream_generate(model, make_tokenizer(), [4], max_tokens=count, **settings))
    assert [len(response.tokens) for response in responses] == [1] + [LEVELS + 1] * 6
    tokens = [token for response in responses for token in response.tokens]
    assert tokens == [(5 + index) % VOCAB for index in range(count)]
    assert responses[-1].tokens_per_call == pytest.approx(count / 7)


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("num_right", range(LEVELS))
def test_acceptance_ends_where_the_heads_go_wrong(kind, num_right):
    model = cycle_model()
    heads = cycle_heads(kind, model.backbone, num_right=num_right)
    settings = {**CHAIN, "heads": heads}
    _, lengths = written(model, [4], 1 + 6 * (num_right + 1), **settings)
    assert lengths == [1] + [num_right + 1] * 6


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_acceptance_ends_where_the_draft_vocabulary_does(kind):
    model = cycle_model()
    heads = cycle_heads(kind, model.backbone, vocab=FEW_TOKENS)
    settings = {**CHAIN, "heads": heads}
    lengths, token = [1], 5
    while sum(lengths) < 40:
        ahead = [(token + 1 + level) % VOCAB for level in range(LEVELS)]
        right = next((n for n, t in enumerate(ahead) if t not in FEW_TOKENS), LEVELS)
        lengths.append(right + 1)
        token = (token + right + 1) % VOCAB
    assert len(set(lengths[1:])) > 2
    assert written(model, [4], sum(lengths), **settings)[1] == lengths


# --- Long contexts, adapters ---


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0, "seed": 5, "repetition_penalty": 1.3}])
def test_a_long_prompt(kind, sampling):
    model = bare_model()
    heads = make_heads(kind, model.backbone)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
    settings = {**sampling, "prefill_step_size": 64}
    tokens, _ = written(model, prompt, 60, heads=heads, **settings)
    assert tokens == plain(model, prompt, 60, **settings)


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("merge", [False, True])
def test_heads_of_an_adapted_model(kind, merge):
    """LoRA of scope "all": the heads see the adapted model's states, and fit the base's name."""
    heads = random_heads(kind, bare_model().backbone)
    model = make_model("llama", "all", merge_lora=merge)
    kinds = {type(module) for module in model.backbone.model.modules()}
    assert model.backbone.replaced and (RowLora in kinds) != merge
    attached = attach_heads(heads, model.backbone)
    settings = {"heads": attached, "prune": PruneConfig(kind="budget", keep=6)}
    assert make_plan(model, **settings).kind == attached.drafter == kind
    oracle = StreamFusedModel(Backbone(target_of("llama", "all")))
    expected = plain(oracle, PROMPT, 20)
    tokens, seen = drafted(model, settings, PROMPT, 20)
    assert tokens == expected == plain(model, PROMPT, 20) != plain(bare_model(), PROMPT, 20)
    for text, tree in seen:
        assert token_paths(tree) == token_paths(own_tree(attached, oracle, text))


# --- PyTorch, end to end ---


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("heads") / "base")


@pytest.fixture(scope="module")
def loaded(base):
    return ssmlx.load(str(base), adapter="none", dtype="float32")


@pytest.fixture(scope="module")
def folders(loaded, tmp_path_factory):
    """A folder of random heads by kind."""
    found = {}
    for kind in HEAD_KINDS:
        found[kind] = tmp_path_factory.mktemp("heads") / kind
        found[kind].mkdir()
        write_heads(found[kind], random_heads(kind, loaded[0].backbone))
    return found


def reference_state(model, text):
    """[1, D] PyTorch's hidden state of the text's last token but one, behind the final norm."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model.model(torch.tensor([text[:-1]])).last_hidden_state[:, -1]


def medusa_paths(model, state, size, vocab):
    """The `size` - 1 likeliest nodes below the root, by brute force."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        best = model(state[0]).softmax(-1).sort(dim=-1, descending=True)
    tokens = best.indices.numpy() if vocab is None else np.array(vocab)[best.indices.numpy()]
    ranks = best_rank_paths(best.values.numpy(), size, min(size - 1, tokens.shape[1]))
    return {tuple(int(tokens[n, rank]) for n, rank in enumerate(path)) for path in ranks} - {()}


def speculator_paths(model, state, root, size):
    """The same of the full tree of WIDTHS, of its scores path by path."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        tokens, edges = model.rank_paths(torch.tensor([root]), state, WIDTHS)
    level, scores = [((), 0.0)], {}
    for width, row, logprobs in zip(WIDTHS, tokens, edges, strict=True):
        values = zip(row[0].tolist(), logprobs[0].tolist(), strict=True)
        level = [
            ((*level[place // width][0], token), level[place // width][1] + logprob)
            for place, (token, logprob) in enumerate(values)
        ]
        scores |= dict(level)
    return set(sorted(scores, key=lambda path: -scores[path])[: size - 1])


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("size", [4, 14])
def test_every_tree_is_the_references(base, loaded, tmp_path, kind, reduced, size):
    """From PyTorch's own hidden states, through published files, at every call of an answer."""
    pytest.importorskip("torch")
    from convert.base import load_base

    model, (backbone, torch_base) = loaded[0], (loaded[0].backbone, load_base(base))
    vocab = tuple(range(1, WORDS, 3)) if reduced else None
    reference = random_reference(kind, backbone, vocab, seed=1)
    heads = ssmlx.load_heads(str(converted(reference, backbone, tmp_path)), model)
    settings = {
        "heads": heads,
        "tree": TreeConfig(size=size),
        "speculator_tree": SpeculatorTreeConfig(widths=WIDTHS, size=size),
    }
    _, seen = drafted(model, settings, [9, 30, 21, 45], 14)
    assert len(seen) > 3
    for text, tree in seen:
        state = reference_state(torch_base, text)
        if kind == "medusa":
            expected = medusa_paths(reference, state, size, vocab)
        else:
            expected = speculator_paths(reference, state, text[-1], size)
        assert int(tree.tokens[0].item()) == text[-1]
        assert token_paths(tree) == expected


# --- Medusa-2: heads among the model's own weights ---


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_carries_heads_loads_without_them(base, loaded, tmp_path, sharded, capsys):
    folder = shutil.copytree(base, tmp_path / "medusa2")
    assert not carries_heads(folder)
    heads = random_heads("medusa", loaded[0].backbone)
    carried = {f"medusa_head.{name}": array for name, array in heads.tensors.items()}
    weights = mx.load(str(base / "model.safetensors"))
    if sharded:
        (folder / "model.safetensors").unlink()
        files = {"model-1-of-2.safetensors": weights, "model-2-of-2.safetensors": carried}
        index = {name: file for file, tensors in files.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        files = {"model.safetensors": weights | carried}
    for file, tensors in files.items():
        mx.save_safetensors(str(folder / file), tensors)
    assert carries_heads(folder)
    model, _ = ssmlx.load(str(folder), adapter="none", dtype="float32")
    prompt = [9, 30, 21]
    assert plain(model, prompt, 12) == plain(loaded[0], prompt, 12)
    pytest.importorskip("torch")
    from convert.__main__ import main

    out = tmp_path / "heads"
    command = ["--heads", str(folder), "--base", str(folder), "--out", str(out)]
    assert main([*command, "--dtype", "float32"]) == 0
    ask = ["--prompt", words(3), "--jsonl", "--max-tokens", "12", "--adapter", "none"]
    capsys.readouterr()
    answers = []
    for more in (
        ["--model", str(folder), "--drafter", f"medusa heads={out}"],
        ["--model", str(base)],
    ):
        assert generate.main([*ask, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
    assert answers[0] == answers[1]


# --- What is refused ---


def test_what_does_not_fit_is_refused():
    model = bare_model()
    medusa, other = (make_heads(kind, model.backbone) for kind in HEAD_KINDS)
    cases = {
        "--drafter mlp-speculator without heads": {"drafter": "mlp-speculator"},
        "with heads for another drafter; expected --drafter medusa": {
            "drafter": "mlp-speculator", "heads": medusa,
        },
        "with heads for another drafter; expected --drafter mlp-speculator": {
            "drafter": "medusa", "heads": other,
        },
        "no pruning adapter": {"heads": other, "prune": PruneConfig(kind="budget")},
        "2380 nodes": {"heads": medusa, "tree": TreeConfig(kind="full", width=13)},
        "tree widths 2 x 2 x 2 x 2; expected 1 to 3": speculator(other, widths=[2] * 4),
        "tree widths of no stage": speculator(other, widths=()),
    }  # fmt: skip
    for said, settings in cases.items():
        with pytest.raises(InputError, match=said) as caught:
            make_plan(model, **settings)
        assert "\n" not in str(caught.value)
    for tree, said in (
        ({"widths": (3, 0)}, '--drafter "mlp-speculator widths=0"; expected 1 or more'),
        ({"candidates": 0}, 'candidates=0"'),
        ({"size": 2000}, 'size=2000"; expected 1 to 1024'),
        ({"size": 8, "candidates": 3}, "size=8 candidates=3"),
    ):
        with pytest.raises(InputError, match=said):
            SpeculatorTreeConfig(**tree)


def test_the_drafter_follows_from_what_is_loaded():
    model = bare_model()
    heads = make_heads("medusa", model.backbone)
    for target in (model, make_model("llama", "streams")):
        for asked, kind in (
            ({}, "medusa"),
            ({"decoding": "plain"}, None),
            ({"drafter": "prompt-lookup"}, "prompt-lookup"),
        ):
            assert make_plan(target, heads=heads, **asked).kind == kind


# --- The commands ---


@pytest.fixture
def run(base, capsys):
    """Answer a prompt; gives the record, or the line of a refusal."""

    def run(*args, model=base, prompt="w1 w2"):
        ask = ["--model", str(model), "--prompt", prompt, "--jsonl", "--max-tokens", "10"]
        code = generate.main([*ask, *map(str, args)])
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else (code, one_line(err, "ssmlx.generate"))

    return run


def test_the_command_drafts_with_heads(run, folders, base, tmp_path):
    expected = run("--decoding", "plain")["tokens"]
    for kind, keys, *options in (
        ("medusa", "", "--tree", "full", "--tree-width", 2),
        ("medusa", "lookup=2", "--tree-size", 9),
        ("mlp-speculator", "widths=3,2 candidates=4"),
        ("mlp-speculator", "size=7"),
    ):
        record = run("--drafter", f"{kind} heads={folders[kind]} {keys}", *options)
        assert record["tokens"] == expected and record["draft_calls"] == 0
        assert record["target_calls"] <= 10
    adapter = write_tiny_adapter(tmp_path / "adapter", base)
    adapted = run("--adapter", adapter, "--decoding", "plain")["tokens"]
    assert adapted != expected
    for kind, folder in folders.items():
        drafter = f"{kind} heads={folder}"
        record = run("--adapter", adapter, "--drafter", drafter, "--prune", "budget")
        assert record["tokens"] == adapted


def test_wrong_heads_are_refused(run, folders, tmp_path):
    other = write_base(tmp_path / "other", norm=1.5)
    speculators = f"mlp-speculator heads={folders['mlp-speculator']}"
    medusa = f"medusa heads={folders['medusa']}"
    for drafter, more, expected in (
        (medusa, ("--decoding", "plain"), "--drafter would do nothing here; expected streaming"),
        (medusa, ("--num-streams", 2), "--num-streams would do nothing here; expected --drafter"),
        (medusa, ("--prune", "budget"), "--prune would do nothing here; expected a model with"),
        ("medusa", (), "--drafter medusa without heads; expected heads=FOLDER"),
        (f"medusa heads={tmp_path / 'nowhere'}", (), "no heads folder"),
        (f"medusa heads={other}", (), "heads_config.json does not exist"),
        (speculators, ("--tree-size", 4), "--tree-size would do nothing here"),
        (f"medusa heads={folders['mlp-speculator']}", (), "with heads for another drafter"),
        (f"{speculators} size=0", (), "mlp-speculator size=0"),
        (f"{speculators} widths=9,9,9,9", (), "tree widths 9 x 9 x 9 x 9; expected 1 to 3 widths"),
    ):
        code, said = run("--drafter", drafter, *more)
        assert code == 2 and expected in said, said
    code, said = run("--drafter", speculators, model=other)
    assert code == 2 and "the heads belong to another base model: " in said


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_chat_with_heads(base, folders, kind, tmp_path, monkeypatch, capsys):
    adapter = write_tiny_adapter(tmp_path / "adapter", base)

    def chatted(*more):
        lines = ["w1 w2", "/compare", f"/adapter {adapter}", "w3", "/adapter", "/stats"]
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        command = ["--model", str(base), "--max-tokens", "9", "--dtype", "float32"]
        assert chat.main([*command, *more]) == 0
        return capsys.readouterr()

    out, err = chatted("--drafter", f"{kind} heads={folders[kind]}")
    assert out == chatted("--drafter", "prompt-lookup")[0] and out.count("\n") == 2
    first, compared, swapped, _, current, _, stats, _ = err.splitlines()
    assert first.startswith("[9 tokens · ") and "tokens per target call" in first
    assert "the same tokens" in compared
    assert swapped.startswith(f"adapter {adapter}: {kind} drafts; ") and current in swapped
    assert stats.startswith("2 answers · 18 tokens in ")


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_session_reuses_its_cache(loaded, folders, kind):
    model, tokenizer = loaded
    heads = ssmlx.load_heads(folders[kind], model)
    config = GenerateConfig(max_tokens=8, temp=1.0, seed=1)
    session = ssmlx.ChatSession(model, tokenizer, config, heads=heads)
    bare = ssmlx.ChatSession(model, tokenizer, config)
    for text in ("w1 w2", "w3", "w4 w5"):
        *_, last = session.reply(text)
        *_, same = bare.reply(text)
        assert session.messages == bare.messages
        assert last.target_calls <= same.target_calls == 8
    assert session.totals.reused_tokens > 0 and math.isfinite(session.compare().speed_up)
    assert session.compare().same_tokens
