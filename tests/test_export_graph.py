"""The graph that is exported, against the MLX runtime and the converter's reference."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from oracle import tree_inputs
from refusals import found_in, mentions, refusal
from tiny import first_tokens, make_lora, tree_from_parents
from tiny_export import CHUNK, CONTEXT, TorchBackend, mlx_steps, torch_steps, write_pair

from convert.base import load_base
from convert.export.ane import rms_norm
from convert.export.export import build_graphs, build_reference, make_partial_manifest
from convert.export.parts import Head
from convert.export.settings import ExportConfig
from ssmlx.exported.decode import SlotCache, build_decode_inputs, prefill
from ssmlx.loading import load as loading
from ssmlx.loading.adapter import write_adapter
from ssmlx.settings import TreeConfig

PROMPT = [5, 2, 3, 11, 7, 9]
FULL = TreeConfig(kind="full", width=2)
BEST = TreeConfig(size=6)
PRUNED = 4
VOCAB = torch.tensor([0, 1, 2, 4, 5, 7, 8, 10], dtype=torch.int32)
TOKENS = 24


@pytest.fixture(autouse=True)
def fixed_vocabulary(monkeypatch):
    """A package cannot guess tokens of the text that its draft vocabulary lacks."""
    monkeypatch.setattr("ssmlx.drafters.stream_drafter.TEXT_TOKENS", 0)


def config(**changes) -> ExportConfig:
    values = {"tree": BEST, "context": CONTEXT, "chunk": CHUNK, "precision": "float32"}
    return ExportConfig(**{**values, **changes})


def assert_same_steps(folders, *configs):
    """Same tokens in the same calls as the MLX runtime; the fewest calls that were taken."""
    calls = []
    for settings in configs:
        expected = first_tokens(mlx_steps(folders, settings, PROMPT), TOKENS)
        assert first_tokens(torch_steps(folders, settings, PROMPT), TOKENS) == expected
        calls.append(len(expected[1]))
    return min(calls)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", "streams"])
def test_steps_are_those_of_mlx(scope, tmp_path):
    folders = write_pair(tmp_path, adapter_scope=scope)
    fewest = assert_same_steps(
        folders,
        *(
            config(profile=profile, tree=tree, prune_to=keep)
            for profile in ("gpu", "ane")
            for tree in (FULL, BEST)
            for keep in (None, PRUNED)
        ),
    )
    assert fewest < TOKENS - 2, "hardly a draft was accepted, so this shows little"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3", "Mistral"])
def test_both_profiles_know_these_architectures(architecture, tmp_path):
    folders = write_pair(tmp_path, architecture, adapter_scope="streams")
    assert_same_steps(folders, config(), config(profile="ane"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Phi3", "Phi", "OPT", "SmolLM3", "Ministral3", "Gemma"])
def test_the_profile_gpu_takes_other_layers(architecture, tmp_path):
    tied = {"ffn_dim": 64, "word_embed_proj_dim": 64, "tie_word_embeddings": True}
    base = tied if architecture in ("OPT", "Gemma") else {}
    folders = write_pair(tmp_path, architecture, base=base)
    assert_same_steps(folders, config())
    given = (folders.base, folders.load_adapter(), config(profile="ane"))
    assert mentions(refusal(build_graphs, *given), "--profile ane")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["gpu", "ane"])
def test_other_designs(profile, tmp_path):
    rotated = write_pair(
        tmp_path / "rotated",
        stream_design="value_rotation",
        rotation_step=0.3,
        stream_init="identity",
        stream_init_rank=0,
    )
    tied = write_pair(tmp_path / "tied", base={"tie_word_embeddings": True}, num_streams=3)
    assert_same_steps(rotated, config(profile=profile))
    assert_same_steps(tied, config(profile=profile, num_streams=2, prune_to=PRUNED))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["gpu", "ane"])
def test_a_draft_vocabulary_limits_the_drafts(profile, tmp_path):
    folders = write_pair(tmp_path, draft_vocab=VOCAB, draft_vocab_size=len(VOCAB))
    assert_same_steps(folders, config(profile=profile))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["gpu", "ane"])
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["", "vocabulary"])
def test_a_condition_scores_the_drafts(profile, vocab, tmp_path):
    changes = {} if vocab is None else {"draft_vocab": vocab, "draft_vocab_size": len(vocab)}
    changes |= {"condition_rank": 4, "num_streams": 3, "adapter_scope": "streams"}
    folders = write_pair(tmp_path, **changes)
    trees = FULL, BEST, TreeConfig(size=6, width=2), TreeConfig(size=9), TreeConfig(width=1)
    settings = [config(profile=profile, tree=tree) for tree in trees]
    assert_same_steps(folders, *settings, replace(settings[1], prune_to=PRUNED))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["gpu", "ane"])
def test_streams_start_from_the_root_too(profile, tmp_path):
    folders = write_pair(tmp_path, condition_rank=4, root_init_rank=3, adapter_scope="streams")
    assert_same_steps(folders, *(config(profile=profile, prune_to=n) for n in (None, PRUNED)))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["gpu", "ane"])
def test_a_tasks_lora_acts_on_every_row_beside_the_streams_own(profile, tmp_path):
    folders = write_pair(tmp_path, adapter_scope="streams")
    before, _ = first_tokens(torch_steps(folders, config(profile=profile), PROMPT), TOKENS)
    backbone = loading.load_base(folders.base, "float32")[0]
    task = make_lora(backbone.model, 0, seed=5)
    task = {path: weights for path, weights in task.items() if "layers" in path}
    write_adapter(folders.adapter, replace(folders.load_adapter(), lora=task))
    assert_same_steps(folders, config(profile=profile, prune_to=PRUNED))
    after, _ = first_tokens(torch_steps(folders, config(profile=profile), PROMPT), TOKENS)
    assert before != after


# --- One step, number by number ---

PARENTS = [-1, 0, 0, 1]
TREE = tree_from_parents([7, 1, 6, 3], PARENTS)


@torch.no_grad()
def expected_step(folders, last):
    """The reference; targets of every node; states of the streams of `last` behind the norm."""
    adapter = folders.load_adapter()
    reference = build_reference(folders.base, adapter, adapter.config.num_streams)
    tokens = TREE.tokens.tolist()
    text = PROMPT[:-1]
    input_ids, positions, visible = tree_inputs(text, tokens, PARENTS)
    where = {"positions": positions, "visible": visible, "stream_rows": torch.arange(0)}
    main = reference.hidden_states(input_ids, **where).main[0, len(text) :]
    targets = reference.base.lm_head(main).argmax(dim=-1)
    path = [node for node in range(4) if TREE.ancestors[last, node]]
    text = torch.tensor([[*text, *(tokens[node] for node in path), targets[last]]])
    found = reference.hidden_states(text, stream_rows=torch.tensor([text.shape[1] - 2]))
    return reference, targets, found.streams[0, 0]


def one_step(folders, profile):
    settings = config(profile=profile)
    adapter = folders.load_adapter()
    graphs = build_graphs(folders.base, adapter, settings)
    manifest = make_partial_manifest(graphs[1], adapter, settings)
    backend = TorchBackend(graphs)
    cache = SlotCache(backend.make_state(), manifest.num_slots)
    prefill(backend, manifest, PROMPT[:-1], cache)
    inputs = build_decode_inputs(TREE, cache.find_free_slots(manifest.num_nodes), cache, manifest)
    return manifest, backend.predict("decode", inputs, cache.state)


@pytest.mark.parametrize("profile", ["gpu", "ane"])
@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("root", [0, 3], ids=["f alone", "rooted"])
def test_a_step_is_the_references(root, scope, profile, tmp_path):
    folders = write_pair(tmp_path, adapter_scope=scope, root_init_rank=root)
    manifest, found = one_step(folders, profile)
    reference, targets, streams = expected_step(folders, int(found["last"][0]))
    assert found["target_tokens"][:4].tolist() == targets.tolist()
    logprobs = reference.draft_logits(streams).log_softmax(dim=-1)
    values, tokens = logprobs.topk(manifest.tree.num_candidates)
    assert found["candidate_tokens"].tolist() == tokens.tolist()
    assert np.allclose(found["candidate_logprobs"], values.detach().numpy(), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("profile", ["gpu", "ane"])
def test_conditional_scores_are_the_references(profile, tmp_path):
    """As its corrected states give them, by the whole head."""
    vocab = {"draft_vocab": VOCAB, "draft_vocab_size": len(VOCAB)}
    folders = write_pair(tmp_path, condition_rank=4, num_streams=4, **vocab)
    manifest, found = one_step(folders, profile)
    last = int(found["last"][0])
    count = manifest.tree.num_candidates
    reference, targets, streams = expected_step(folders, last)
    assert manifest.tree.is_conditional and count == len(VOCAB)
    assert len(np.unique(found["candidate_tokens"], axis=0)) == 4  # no stream's order is another's
    previous = targets[last].expand(count)
    for stream, own in enumerate(streams):
        logits = reference.draft_logits(own)
        before, columns = logits.log_softmax(dim=-1).topk(count)
        assert found["candidate_tokens"][stream].tolist() == VOCAB[columns].tolist()
        corrected = reference.draft_logits(reference.apply_condition(own, previous))[:, columns]
        scores = before + corrected - logits[columns]
        expected = scores.log_softmax(dim=-1) + before.logsumexp(dim=-1)
        assert (expected - before).abs().max() > 0.1, "hardly a difference, so this shows little"
        assert np.allclose(found["candidate_logprobs"][stream], expected.numpy(), atol=1e-4)
        previous = VOCAB[columns]


def test_a_rejected_nodes_slot_can_be_used_again(tmp_path):
    folders = write_pair(tmp_path)
    settings = config()
    adapter = folders.load_adapter()
    graphs = build_graphs(folders.base, adapter, settings)
    manifest = make_partial_manifest(graphs[1], adapter, settings)
    backend = TorchBackend(graphs)
    clean = SlotCache(backend.make_state(), manifest.num_slots)
    dirty = SlotCache(backend.make_state(), manifest.num_slots)
    for tensor in dirty.state:
        tensor.normal_(std=30, generator=torch.Generator().manual_seed(3))
    answers = []
    for cache in (clean, dirty):
        prefill(backend, manifest, PROMPT[:-1], cache)
        slots = cache.find_free_slots(manifest.num_nodes)
        inputs = build_decode_inputs(TREE, slots, cache, manifest)
        answers.append(backend.predict("decode", inputs, cache.state))
    for name, expected in answers[0].items():
        assert np.allclose(answers[1][name], expected, atol=1e-5), name


def test_the_norm_of_the_neural_engine_survives_large_hidden_states(tmp_path):
    """SmolLM2's reach 25,000, whose square is not in float16."""
    base = load_base(write_pair(tmp_path).base)
    norm = base.model.norm
    hidden = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    hidden[..., 5] = 25_000
    expected = norm(hidden)[0]
    found = rms_norm(norm.half(), hidden.half().transpose(1, 2)[:, :, None], 1)
    assert torch.allclose(found[0, :, 0].t().float(), expected, rtol=4e-3, atol=1e-4)


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_head_in_pieces_is_the_whole_head(channels_first):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(50, 8, generator=generator)
    bias = torch.randn(50, generator=generator)
    rows = torch.randn(5, 8, generator=generator)
    hidden = rows.t()[None, :, None] if channels_first else rows[None]
    head = Head(weight, bias, channels_first=channels_first, piece=16)
    logits = rows @ weight.t() + bias
    assert head.likeliest(hidden).tolist() == logits.argmax(dim=-1).tolist()
    assert torch.allclose(head.logsumexp(hidden), logits.logsumexp(dim=-1), atol=1e-5)
    tokens, logprobs = head.rank(hidden, 20)
    expected = logits.log_softmax(dim=-1).topk(20)
    assert torch.equal(tokens.long(), expected.indices)
    assert torch.allclose(logprobs, expected.values, atol=1e-5)
    drafted = torch.tensor([3, 49, 0, 7, 7])
    found = head.token_logits(rows, drafted)
    assert torch.allclose(found, logits[torch.arange(5), drafted], atol=1e-5)


def test_settings_that_do_not_fit_are_refused(tmp_path):
    folders = write_pair(tmp_path)
    adapter = folders.load_adapter()

    def refused(**changes):
        return found_in(refusal(lambda: build_graphs(folders.base, adapter, config(**changes))))

    assert mentions(refused(context=66), "--context", "66")
    assert mentions(refused(context=256), "--context", "256")
    assert mentions(refused(num_streams=3), "--num-streams", "3")
    assert mentions(refused(profile="ane", context=60), "--context", "60")
    assert mentions(refused(context=4), "--context", "4")
    assert mentions(refused(compression="int8"), "--compress int8", "--dtype float32")
    bare = replace(adapter, config=replace(adapter.config, prune_rank=0))
    assert "prun" in refusal(build_graphs, folders.base, bare, config(prune_to=PRUNED))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folders = write_pair(tmp_path / "one")
    adapter = folders.load_adapter()
    other = replace(adapter, base=replace(adapter.base, norm_probe=(math.pi,) * 32))
    assert mentions(refusal(build_graphs, folders.base, other, config()), "norm")
    _, *rest = adapter.lora
    uneven = replace(adapter, lora={path: adapter.lora[path] for path in rest})
    assert mentions(refusal(build_graphs, folders.base, uneven, config()), "LoRA")


def test_a_sliding_window_shorter_than_the_context_is_refused(tmp_path):
    folders = write_pair(tmp_path, "Mistral", base={"sliding_window": 32})
    given = (folders.base, folders.load_adapter(), config())
    assert mentions(refusal(build_graphs, *given), "32")
