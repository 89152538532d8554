"""The stream-fused model's parts: layers and ropes, LoRA by row, cache, masks and trees."""

import random
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from loops import plain_tokens
from mlx_lm.models import gpt2, internlm3, llama, mamba
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope
from refusals import as_shown, mentions, refusal

from ssmlx.drafters.stream_drafter import DraftVocab
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.lora import LoraWeights, RowLora, RowScope, copy_with_merged_lora
from ssmlx.model.masks import StepMasks, stream_visibility
from ssmlx.model.rope import PositionedRope, Positions, rope_settings
from ssmlx.model.state_cache import StateCache
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import draft_topology, full_topology, grow_conditional_tree, grow_tree
from ssmlx.settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB, GenerateConfig, TreeConfig

PROMPT = [5, 2, 3, 11, 7]

# --- what is needed of a model: regular layers, and rotary embeddings with positions ---


class Shifted(llama.LlamaModel):
    def __call__(self, *given, **named):
        return super().__call__(*given, **named) + 1


def make_shifted():
    model = tiny.make_base()
    model.model.__class__ = Shifted
    return model


def make_turned_by_length():
    """Its rotary embedding asks how long the text is, which rows do not agree about."""
    model = tiny.make_base()
    for layer in model.layers:
        layer.self_attn.rope = internlm3.DynamicNTKScalingRoPE(8, 64, scale=2.0)
    return model


IRREGULAR = {
    "shifted": make_shifted,
    "positions": lambda: gpt2.Model(gpt2.ModelArgs("gpt2", 32, 16, 2, 2, 32, 1e-5, 13)),
    "mamba": lambda: mamba.Model(mamba.ModelArgs("mamba", 13, 16, 32, 4, 2, 4, False, True, 2)),
    "turned by length": make_turned_by_length,
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_models_decode_plainly(kind):
    backbone = Backbone(IRREGULAR[kind]())
    assert as_shown(backbone.capabilities.trees) in refusal(
        backbone.capabilities.require, "trees", "drafting"
    )
    assert not backbone.capabilities.has("batches")


ROPES = {
    "plain": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5},
    "dynamic": {"type": "dynamic", "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("kind", ROPES)
def test_positions_equal_offsets(kind, traditional, monkeypatch):
    rope = initialize_rope(8, 1000.0, traditional, ROPES[kind], 256)
    wrapped = PositionedRope(rope)
    x = mx.random.normal((1, 2, 6, 8), key=mx.random.key(0))
    positions = [9, 10, 10, 40, 3, 0]
    found = wrapped(x, offset=mx.array(positions))
    for row, position in enumerate(positions):
        expected = rope(x[:, :, row : row + 1], offset=position)
        tiny.assert_close(found[:, :, row : row + 1], expected)
    whole = wrapped(x, offset=mx.arange(6) + 7)
    tiny.assert_close(whole, rope(x, offset=7))
    assert mx.array_equal(wrapped(x, offset=7), rope(x, offset=7))
    for is_one_kernel in (False, True):  # tables of angles, or none
        monkeypatch.setattr("ssmlx.model.rope.is_one_kernel", lambda one=is_one_kernel: one)
        assert mx.array_equal(wrapped(x, offset=Positions(mx.array(positions))), found)
        tiny.assert_close(wrapped(x, offset=Positions(mx.array([7]))), whole)


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
EXTENDED = {  # by what rotary embeddings scale: class, its settings, and the context; 512 is stated
    "yarn": ("qwen3", YARN, 2048),
    "by its older name": ("qwen2", {**YARN, "type": "yarn", "rope_type": None}, 2048),
    "DeepSeek's": ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, 2048),
    "of less than is stated": ("qwen3", {**YARN, "original_max_position_embeddings": 64}, 512),
    "of a fractional factor": ("qwen3", {**YARN, "factor": 1.5}, 768),
    "without an original length": ("qwen3", {"rope_type": "yarn", "factor": 4.0}, 512),
    "yarn that mlx-lm ignores": ("qwen3_moe", YARN, 512),
    "linear": ("llama", {**YARN, "rope_type": "linear"}, 2048),
    "linear, stated": ("llama", {"rope_type": "linear", "factor": 4.0}, 512),
    "linear that mlx-lm ignores": ("qwen3_moe", {**YARN, "rope_type": "linear"}, 512),
    "llama3": ("llama", {**YARN, **LLAMA3_ROPE, "rope_type": "llama3"}, 512),
    "longrope": ("llama", {**YARN, **FACTORS, "rope_type": "longrope"}, 512),
    "su": ("phi3", {**YARN, **FACTORS, "type": "su"}, 512),
    "dynamic": ("llama", {**YARN, "rope_type": "dynamic"}, 512),
    "none": ("qwen3", None, 512),
}


@pytest.mark.parametrize("kind", EXTENDED)
def test_the_context_is_what_rotary_embeddings_reach(kind):
    name, scaling, expected = EXTENDED[kind]
    more = {"qwen3_moe": EXPERTS, "deepseek_v3": tiny.LATENT}.get(name, {})
    base = tiny.make_base(name, rope_scaling=scaling, **more)
    assert Backbone(base).context_length == expected


def test_the_context_of_a_model_that_also_sees():
    inner = {**tiny.make_base("qwen3").args.__dict__, "model_type": "qwen3"}
    wrapper = {"text_config": {**inner, "rope_scaling": YARN}}
    assert Backbone(tiny.make_base("qwen3_vl", **wrapper)).context_length == 2048


def test_rotary_settings_that_a_model_that_also_sees_nests():
    inner = {**tiny.make_base().args.__dict__, "model_type": "llama"}
    del inner["rope_theta"], inner["rope_scaling"]
    config = {"text_config": {**inner, "rope_parameters": {**YARN, "rope_theta": 7000.0}}}
    settings = rope_settings(config)
    made = tiny.make_base("mistral3", **{**config, **settings})
    assert made.language_model.args.rope_theta == 7000.0
    assert Backbone(made).context_length == 2048
    assert "rope_theta" not in config["text_config"]


def random_lora(seed=0):
    key = mx.random.split(mx.random.key(seed))
    return LoraWeights(
        mx.random.normal((32, 2), key=key[0]), mx.random.normal((2, 32), key=key[1]), 1.5
    )


@pytest.mark.parametrize("quantised", [False, True])
def test_row_lora_acts_on_its_rows_alone(quantised):
    linear = nn.Linear(32, 32)
    linear = nn.QuantizedLinear.from_linear(linear, 32, 4) if quantised else linear
    scope = RowScope()
    lora = random_lora()
    layer = RowLora(linear, lora, scope)
    x = mx.random.normal((1, 7, 32), key=mx.random.key(1))
    plain = linear(x)
    added = plain + 1.5 * (x @ lora.a @ lora.b)
    assert mx.array_equal(layer(x), plain)
    with scope.starting_at(3):
        found = layer(x)
        assert mx.array_equal(found[:, :3], plain[:, :3])  # bit for bit
        tiny.assert_close(found[:, 3:], added[:, 3:])
        with scope.starting_at(0):
            tiny.assert_close(layer(x), added)
        assert scope.first == 3
    assert mx.array_equal(layer(x), plain)
    if not quantised:
        tiny.assert_close(copy_with_merged_lora(linear, lora)(x), added)


@pytest.mark.parametrize("quantised", [False, True])
def test_scope_streams_leaves_node_rows_untouched(quantised):
    """The same rows through the upper layers, with this LoRA and with another: equal bits."""
    hidden = mx.random.normal((1, 3, 32), key=mx.random.key(3))
    tree = tiny.tree_from_parents([1, 2, 3], [0, 0, 0])
    rows = []
    for factor in (0.0, 5.0):
        base = tiny.make_packed_base() if quantised else tiny.make_base()
        model = tiny.make_model(scope="streams", base=base)
        for module in model.backbone.model.modules():
            if isinstance(module, RowLora):
                module.scale = factor
        cache = model.make_cache()
        cache.reserve(more_tokens=1, step_rows=12)
        rows.append(model.upper(model.insert(hidden, 3), tree, cache, 3))
    assert mx.array_equal(rows[0][:, :3], rows[1][:, :3])
    apart = mx.abs(rows[0][:, 3:] - rows[1][:, 3:]).max()
    assert apart > 0.01 * mx.abs(rows[0]).max()


DRAFT_VOCAB = [1, 4, 5, 8, 12]


@pytest.mark.parametrize("draft", [[2, 5, 7, 9], *tiny.slow([3], [0, 12])])
@pytest.mark.parametrize("scope", ["all", "streams"])
def test_drafts_from_few_tokens_lose_nothing(scope, draft):
    """Every tree here wants more candidates than there are tokens to draft."""
    model = tiny.make_model("llama", scope, adapter={"draft_vocab": draft})
    expected = plain_tokens(model, PROMPT, 24)
    for tree in (
        TreeConfig(kind="full", width=5),
        TreeConfig(kind="best", size=16),
        TreeConfig(kind="best", size=40, width=9),
        TreeConfig(kind="best", size=1),
    ):
        steps = tiny.token_steps(model, PROMPT, model.make_cache(), GenerateConfig(tree=tree))
        tokens, lengths = tiny.first_tokens(steps, 24)
        assert tokens == expected
        if tree.kind == "full" and len(draft) == 4:
            assert len(lengths) < 24  # something was drafted, and accepted


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_draft_head_is_rows_of_the_head(bias, tied, quantised):
    if bias and tied:
        return
    base = tiny.make_base(tie_word_embeddings=tied, intermediate_size=64)
    if bias:
        base.lm_head.bias = mx.random.normal((tiny.VOCAB,), key=mx.random.key(4))
    if quantised:
        nn.quantize(base, group_size=32, bits=4)
    backbone = Backbone(base)
    rows = mx.array(DRAFT_VOCAB)
    hidden = mx.random.normal((1, 6, 32), key=mx.random.key(3))
    found = backbone.logits(hidden, backbone.draft_head(rows))
    assert found.shape == (6, len(DRAFT_VOCAB))
    tiny.assert_close(found, backbone.logits(hidden)[:, rows])
    head = base.model.embed_tokens if tied else base.lm_head
    assert head.weight.shape[0] == tiny.VOCAB  # the model's own stays whole
    if quantised:
        packed = (head[name][rows] for name in ("weight", "scales", "biases"))
        weight = mx.dequantize(*packed, group_size=32, bits=4)
        expected = base.model.norm(hidden)[0] @ weight.T + (head.bias[rows] if bias else 0)
        tiny.assert_close(found, expected)


def test_a_head_without_rows_is_refused():
    class Head(nn.Module):
        def __call__(self, x):
            return x[..., : tiny.VOCAB]

    base = tiny.make_base()
    base.lm_head = Head()
    line = refusal(tiny.make_model, base=base, adapter={"draft_vocab": DRAFT_VOCAB})
    assert mentions(line, "'llama'", "Head")


def test_latent_attention_has_no_values_to_turn():
    rotation = {"stream_design": "value_rotation", "rotation_step": 0.4}
    base = tiny.make_base("deepseek_v3", **tiny.LATENT)
    assert mentions(refusal(tiny.make_model, base=base, adapter=rotation), "rotation")


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("draft, noisy", [((), False), (DRAFT_VOCAB, False), (DRAFT_VOCAB, True)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_candidates_are_scored_given_those_before(tied, quantised, draft, noisy):
    base = tiny.make_base(tie_word_embeddings=tied, intermediate_size=64)
    if quantised:
        nn.quantize(base, group_size=32, bits=4)
    embeddings = head = np.array(base.model.embed_tokens(mx.arange(tiny.VOCAB)))
    if not tied:
        head = np.array(base.lm_head(mx.eye(32))).T
    model = tiny.make_model(base=base, adapter={"condition_rank": 3, "draft_vocab": draft})
    vocab = np.array(draft or range(tiny.VOCAB))
    hidden = mx.random.normal((1, 6, 32), key=mx.random.key(3))
    noise = mx.random.normal((6, len(vocab)), key=mx.random.key(4)) if noisy else None
    tokens, found = DraftVocab(model).rank_stream_tokens(hidden, mx.array([7, 2]), 4, noise)
    known = np.array(noise if noisy else mx.zeros((6, 1))).reshape(2, 3, -1)
    assert (tokens.shape, found.shape) == ((2, 3, 4), (2, 3, 4, 4))
    maps = model.streams.condition
    embed, gate, out = (np.array(one) for one in (maps.embed, maps.gate, maps.out))
    normed = np.array(base.model.norm(hidden)).reshape(2, 3, 32)
    for place, stream in product(range(2), range(3)):
        own = normed[place, stream]
        before = log_softmax(own @ head[vocab].T + known[place, stream])
        best = np.argsort(-before, kind="stable")[:4]
        assert tokens[place, stream].tolist() == vocab[best].tolist()
        given = tokens[place, stream - 1].tolist() if stream else 4 * [[7, 2][place]]
        for row, token in enumerate(given):
            unit = embeddings[token] / np.sqrt((embeddings[token] ** 2).mean())
            mixed = embed @ unit / (1 + np.exp(-gate @ own))
            scores = before[best] + head[vocab[best]] @ out @ mixed
            expected = log_softmax(scores) + np.log(np.exp(before[best]).sum())
            tiny.assert_close(found[place, stream, row], expected)
            if row == 0:
                corrected = model.streams.condition(mx.array(own), mx.array(embeddings[token]))
                tiny.assert_close(corrected, out @ mixed)


def test_an_untrained_condition_changes_nothing(monkeypatch):
    name = "ssmlx.drafters.copies.Copies.learn_and_mix"
    monkeypatch.setattr(name, lambda self, guesses, *_: guesses)
    model = tiny.make_model(adapter={"condition_rank": 3, "draft_vocab": range(1, 12)})
    streams = model.streams
    blank = replace(streams.condition, out=mx.zeros((32, 3)))
    blank = StreamFusedModel(model.backbone, model.config, replace(streams, condition=blank))
    plain = StreamFusedModel(model.backbone, model.config, replace(streams, condition=None))
    for tree in (TreeConfig(size=6), TreeConfig(kind="full", width=2), TreeConfig(size=4, width=1)):
        steps = [
            tiny.first_tokens(
                tiny.token_steps(one, PROMPT, one.make_cache(), GenerateConfig(tree=tree)), 24
            )
            for one in (plain, blank)
        ]
        assert steps[0] == steps[1]


# --- the cache, against one that concatenates ---


DEPTH = 3
# Heads and width of keys, and of values.
SAME = (2, 3), (2, 3)
UNLIKE = (2, 3), (1, 5)


class NaiveCache:
    """Committed keys and values as lists of rows, [rows, numbers of both] a layer.

    `paths` are those that the host has not counted: (rows a layer, how many count).
    """

    def __init__(self, shapes=SAME):
        self.shapes = shapes
        width = sum(heads * size for heads, size in shapes)
        self.committed = [np.zeros((0, width), np.float32) for _ in range(DEPTH)]
        self.step = [None] * DEPTH
        self.paths = []

    def append(self, layer, rows):
        self.committed[layer] = np.concatenate([self.committed[layer], rows])

    def commit(self, lower, upper, split, count):
        rows = [self.step[i][lower if i < split else upper] for i in range(DEPTH)]
        self.paths.append((rows, count))

    def count(self):
        """The host learns of the oldest path; how many of its rows counted."""
        rows, count = self.paths.pop(0)
        for layer in range(DEPTH):
            self.append(layer, rows[layer][:count])
        return count

    def seen(self, layer, rows):
        """What a step's rows find in the cache, those of the paths that do not count included."""
        paths = [of_layers[layer] for of_layers, _ in self.paths]
        return np.concatenate([rows, *paths, self.committed[layer]])

    @property
    def length(self):
        return len(self.committed[0]) + sum(count for _, count in self.paths)


def as_arrays(rows, shapes=SAME):
    """[R, numbers] to the keys [1, H, R, Dh] and values of a layer."""
    (heads, size), _ = shapes
    parts = np.split(rows, [heads * size], axis=1)
    both = zip(parts, shapes, strict=True)
    return [mx.array(part.reshape(1, -1, *shape).swapaxes(1, 2)) for part, shape in both]


def as_rows(keys, values):
    both = [np.array(part).swapaxes(1, 2) for part in (keys, values)]
    return np.concatenate([part.reshape(part.shape[1], -1) for part in both], axis=1)


def random_rows(rng, count, shapes=SAME):
    width = sum(heads * size for heads, size in shapes)
    return rng.normal(size=(count, width)).astype(np.float32)


def append(cache, naive, rng, count):
    for layer in range(DEPTH):
        rows = random_rows(rng, count, naive.shapes)
        found = cache.append_view(layer).update_and_fetch(*as_arrays(rows, naive.shapes))
        naive.append(layer, rows)
        assert np.array_equal(as_rows(*found), naive.committed[layer])
    cache.commit_appended(count)


def write_tree(cache, naive, rng, lower_rows, upper_rows, split):
    for layer in range(DEPTH):
        rows = random_rows(rng, lower_rows if layer < split else upper_rows, naive.shapes)
        view = cache.view(layer, mx.arange(len(rows)) + cache.root_position)
        assert view.offset.tolist() == list(range(naive.length, naive.length + len(rows)))
        found = view.update_and_fetch(*as_arrays(rows, naive.shapes))
        naive.step[layer] = rows
        assert np.array_equal(as_rows(*found), naive.seen(layer, rows))


def one_step(cache, naive, rng, draw):
    """Verify a tree of N nodes, pruned to M, whose path of P rows has `accepted` real ones.

    The host counts the path at once, or a step later.
    """
    split = draw.randint(0, DEPTH)
    nodes = draw.randint(1, 6)
    streams = draw.randint(0, 3)
    kept = sorted([0, *draw.sample(range(1, nodes), draw.randint(0, nodes - 1))])
    upper_rows = len(kept) * (1 + streams)
    path_length = draw.randint(1, 4)
    accepted = draw.randint(1, min(path_length, len(kept)))
    path = sorted(draw.sample(range(len(kept)), accepted))
    padded = path + [path[-1]] * (path_length - accepted)
    cache.reserve(more_tokens=path_length, step_rows=nodes * (1 + streams))
    write_tree(cache, naive, rng, nodes, upper_rows, split)
    lower = [kept[node] for node in padded]
    cache.hold_accepted_path(mx.array(lower), mx.array(padded), split, mx.array([accepted]))
    naive.commit(lower, padded, split, accepted)
    for _ in range(draw.randint(max(len(naive.paths) - 1, 0), len(naive.paths))):
        cache.commit_accepted(naive.count())


def check_committed(cache, naive, rng):
    """What a next tree would read."""
    cache.reserve(more_tokens=1, step_rows=1)
    write_tree(cache, naive, rng, 1, 1, DEPTH)


@pytest.mark.parametrize("seed, scratch, shapes", tiny.all_pairs(range(6), [0, 24], [SAME, UNLIKE]))
def test_random_sequences_equal_concatenation(seed, scratch, shapes):
    rng = np.random.default_rng(seed)
    draw = random.Random(seed)
    cache = TreeCache(DEPTH, scratch=scratch, step=4)
    naive = NaiveCache(shapes)
    for _ in range(12):
        action = draw.choice(["append", "step", "step", "step", "trim", "fork"])
        if action == "append":
            cache.keep_first(cache.offset)  # a path that nobody counted is forgotten
            naive.paths = []
            count = draw.randint(1, 6)
            cache.reserve(more_tokens=count)
            append(cache, naive, rng, count)
        elif action == "step":
            one_step(cache, naive, rng, draw)
        elif action == "fork" and cache.offset:
            keep = draw.randint(1, cache.offset)
            fork = cache.fork(keep)
            check_committed(cache, naive, rng)  # which is not written into for the fork
            cache = fork
            cache.keep_first(keep)
            cache.reserve(more_tokens=4)
            naive.committed = [rows[:keep] for rows in naive.committed]
            naive.paths = []
        else:
            keep = draw.randint(cache.offset // 2, cache.offset)
            cache.keep_first(keep)
            naive.committed = [rows[:keep] for rows in naive.committed]
            naive.paths = []
        assert cache.offset == len(naive.committed[0])
        check_committed(cache, naive, rng)
        assert cache.capacity % 4 == 0 and cache.nbytes > 0


def test_a_step_that_is_not_run_is_taken_back():
    rng = np.random.default_rng(0)
    naive = NaiveCache()
    cache = TreeCache(DEPTH, scratch=4, step=4)
    cache.reserve(more_tokens=3, step_rows=4)
    append(cache, naive, rng, 3)
    write_tree(cache, naive, rng, 4, 4, 1)
    cache.hold_accepted_path(mx.array([0, 2]), mx.array([0, 2]), 1, mx.array([2]))
    naive.commit([0, 2], [0, 2], 1, 2)
    before = cache.snapshot()
    cache.reserve(more_tokens=2, step_rows=9)  # grows, and writes over the rows of the step before
    for layer in range(DEPTH):
        view = cache.view(layer, mx.arange(9))
        view.update_and_fetch(*as_arrays(random_rows(rng, 9)))
    cache.hold_accepted_path(mx.array([0]), mx.array([0]), 1, mx.array([1]))
    cache.restore(before)
    assert len(cache.paths) == 1 and cache.capacity == 4
    cache.reserve(more_tokens=0)
    cache.commit_accepted(naive.count())
    check_committed(cache, naive, rng)


def test_wrong_use_is_refused():
    cache = TreeCache(1, step=4)
    cache.reserve(more_tokens=2)
    keys = mx.zeros((1, 2, 2, 3))
    cache.append_view(0).update_and_fetch(keys, keys)
    cache.commit_appended(2)
    with pytest.raises(ValueError, match="3"):
        cache.keep_first(3)
    with pytest.raises(ValueError, match="-1"):
        cache.keep_first(-1)
    with pytest.raises(ValueError):
        cache.view(0, mx.arange(2)).update_and_fetch(keys, keys)
    with pytest.raises(ValueError, match="4"):
        cache.commit_appended(3)
    with pytest.raises(ValueError):
        cache.commit_accepted(1)


def test_tokens_are_not_appended_before_a_path_that_is_not_counted():
    """The path is committed, or dropped by a call; asking for a view changes nothing."""
    rng = np.random.default_rng(0)
    naive = NaiveCache()
    cache = TreeCache(DEPTH, scratch=4, step=4)
    cache.reserve(more_tokens=2, step_rows=4)
    append(cache, naive, rng, 2)
    write_tree(cache, naive, rng, 3, 3, 1)
    cache.hold_accepted_path(mx.array([0, 2]), mx.array([0, 2]), 1, mx.array([2]))
    with pytest.raises(ValueError):
        cache.append_view(0)
    assert len(cache.paths) == 1
    cache.drop_paths()
    append(cache, naive, rng, 2)
    check_committed(cache, naive, rng)


def test_a_cache_of_a_model_without_stages_refuses_what_it_cannot_do():
    cache = StateCache(lambda: [RotatingKVCache(4)])
    with pytest.raises(ValueError):
        cache.commit_accepted(3)
    with pytest.raises(ValueError, match="2"):
        cache.fork(2)
    cache.append(lambda tokens, cache: mx.zeros((*tokens.shape, 8)), mx.array([1, 2, 3]))
    for count in (2, 4):  # a window goes back to no other place
        with pytest.raises(ValueError, match=str(count)):
            cache.keep_first(count)
    cache.keep_first(3)
    assert cache.offset == 3
    whole = StateCache(lambda: [KVCache()])  # which goes back to any place of the text
    whole.append(lambda tokens, cache: mx.zeros((*tokens.shape, 8)), mx.array([1, 2, 3]))
    for count in (-1, 4):
        with pytest.raises(ValueError, match=str(count)):
            whole.keep_first(count)


def committed_tree_cache():
    """A `TreeCache` of a text, and what leaves a path of so many rows behind it."""
    rng = np.random.default_rng(0)
    cache = TreeCache(DEPTH, step=4)
    cache.reserve(more_tokens=TEXT)
    append(cache, NaiveCache(), rng, TEXT)

    def leave_call(num_rows):
        cache.reserve(more_tokens=num_rows, step_rows=num_rows)
        path = mx.arange(num_rows)
        for layer in range(DEPTH):
            rows = as_arrays(random_rows(rng, num_rows))
            cache.view(layer, path + cache.root_position).update_and_fetch(*rows)
        cache.hold_accepted_path(path, path, DEPTH, mx.array([num_rows]))

    return cache, leave_call


def committed_state_cache(make_caches):
    """A `StateCache` of a text, and what leaves a chain of so many rows behind it."""

    def model(tokens, cache):
        keys = mx.random.normal((1, 2, tokens.shape[1], 3))
        for one in cache:
            one.update_and_fetch(keys, keys)
        return mx.zeros((*tokens.shape, 8))

    cache = StateCache(make_caches)
    cache.append(model, mx.arange(TEXT))
    return cache, lambda num_rows: cache.verify(model, mx.arange(num_rows))


TEXT = 8
CACHES = {
    "tree": committed_tree_cache,
    "rows": lambda: committed_state_cache(lambda: [KVCache()]),
    "window": lambda: committed_state_cache(lambda: [KVCache(), RotatingKVCache(4)]),
}


def keys_of(cache):
    return np.array(cache.keys_and_values(0)[0])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("num_accepted", [1, 2, 3])
def test_a_text_goes_on_by_the_rows_that_a_call_has(kind, num_accepted):
    """And by no more, whatever there is room for; each call's are committed once."""
    cache, leave_call = CACHES[kind]()
    for start in (TEXT, TEXT + num_accepted):
        with pytest.raises(ValueError):
            cache.commit_accepted(1)
        leave_call(3)
        for count in (-1, 0, 4, 5):
            with pytest.raises(ValueError, match=str(count)):
                cache.commit_accepted(count)
        assert cache.offset == start
        cache.commit_accepted(num_accepted)
        assert cache.offset == start + num_accepted
    assert keys_of(cache).shape[2] == cache.offset


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("in_call", [False, True])
def test_a_text_goes_back_and_is_forked_where_its_cache_says(kind, in_call):
    """0 and all that is committed among these places, and nothing beyond."""
    keepable = set()
    for count in range(-1, TEXT + 8):
        cache, leave_call = CACHES[kind]()
        if in_call:
            leave_call(3)
            cache.commit_accepted(2)
        length = cache.offset
        kept = cache.longest_keepable(max(count, 0))
        assert cache.longest_keepable(kept) == kept <= min(max(count, 0), length)
        expected = keys_of(cache.fork(length))
        if kept != count:
            for go_back in (cache.fork, cache.keep_first):
                with pytest.raises(ValueError, match=str(count)):
                    go_back(count)
            continue
        keepable.add(count)
        fork = cache.fork(count)
        assert fork.offset == count and not fork.has_uncounted_paths
        assert cache.offset == length
        cache.keep_first(count)
        assert cache.offset == count
        for one in (fork, cache):
            if count:
                np.testing.assert_array_equal(keys_of(one), expected[:, :, :count])
    assert keepable >= {0, length}


@pytest.mark.parametrize("kind", CACHES)
def test_a_snapshot_takes_a_call_back(kind):
    """Behind one that waits to be committed too; the call may be run anew then."""
    cache, leave_call = CACHES[kind]()
    leave_call(3)
    if not cache.can_build_ahead:
        cache.commit_accepted(2)
    before = cache.snapshot()
    leave_call(2)
    cache.restore(before)
    if cache.can_build_ahead:
        cache.commit_accepted(2)
    assert cache.offset == TEXT + 2
    with pytest.raises(ValueError):
        cache.commit_accepted(1)
    expected = keys_of(cache)
    leave_call(2)
    cache.commit_accepted(1)
    np.testing.assert_array_equal(keys_of(cache)[:, :, : TEXT + 2], expected)
    assert keys_of(cache).shape[2] == cache.offset == TEXT + 3


# --- masks, against those drawn in docstrings and built anew ---


def naive_visibility(tree, num_streams):
    """Equations 1 and 2, row by row."""
    depths = tree.depths.tolist()
    paths = tree.paths.tolist()
    nodes = tree.num_nodes
    above = [set(path[: depth + 1]) for path, depth in zip(paths, depths, strict=True)]
    owners = [(node, 0) for node in range(nodes)]
    owners += [(node, j) for node in range(nodes) for j in range(1, num_streams + 1)]

    def sees(row, column):
        (node, stream), (other, other_stream) = row, column
        if other_stream == 0:
            return other in above[node]
        return other == node and other_stream <= stream

    return np.array([[sees(row, column) for column in owners] for row in owners])


def test_golden_visibility():
    chain = tiny.tree_from_parents([1, 2], [0, 0])
    expected = ["x.....", "xx....", "x.x...", "x.xx..", "xx..x.", "xx..xx"]
    found = np.array(stream_visibility(chain.ancestors, 2))
    assert ["".join(".x"[int(cell)] for cell in row) for row in found] == expected


@pytest.mark.parametrize("num_streams", [0, 1, 3])
def test_visibility_equals_the_naive_one(num_streams):
    rng = random.Random(0)
    for num_nodes in (1, 2, 5, 9):
        tree = tiny.random_tree(rng, num_nodes, 4)
        found = np.array(stream_visibility(tree.ancestors, num_streams))
        assert np.array_equal(found, naive_visibility(tree, num_streams))


@dataclass
class Seen:
    """What a mask needs to know of a cache, with paths given as (count, length)."""

    offset: int
    capacity: int
    paths: tuple[tuple[int, int], ...] = ()

    def path_masks(self, num_rows):
        rows = [np.arange(length) < count for count, length in self.paths]
        return [mx.array(np.broadcast_to(row, (num_rows, row.size))) for row in rows]


def scratch_mask(visible, committed, paths=()):
    parts = [np.arange(length) < count for count, length in paths]
    columns = np.concatenate([*parts, np.ones(committed, bool)])
    return np.concatenate([visible, np.broadcast_to(columns, (len(visible), columns.size))], axis=1)


def test_mask_buffer_equals_a_mask_built_anew():
    rng = random.Random(1)
    masks = StepMasks(max_sizes=3)
    draw = np.random.default_rng(1)
    keys = [object() for _ in range(12)]
    contents = {}
    committed = 0
    capacity = 4
    for _ in range(300):
        rows = rng.randint(1, 6)
        key = rng.choice([None, *keys])
        if key is None or (id(key), rows) not in contents:
            contents[id(key), rows] = draw.random((rows, rows)) < 0.5
        visible = contents[id(key), rows]
        # An answer grows, is trimmed, or outgrows the cache.
        committed = max(0, committed + rng.choice([-9, 0, 1, 2, 5]))
        capacity = max(capacity, -(-committed // 4) * 4)
        lengths = [rng.randint(1, 3) for _ in range(rng.choice([0, 0, 1, 2]))]
        paths = tuple((rng.randint(1, length), length) for length in lengths)
        found = masks.dense_mask(mx.array(visible), Seen(committed, capacity, paths), key)
        assert np.array_equal(np.array(found), scratch_mask(visible, committed, paths))


def test_a_mask_in_hand_outlives_the_next_write():
    """A step may still be running when the next one's mask is written."""
    masks = StepMasks()
    before = masks.dense_mask(mx.array(np.eye(3, dtype=bool)), Seen(2, 8), None)
    masks.dense_mask(mx.zeros((3, 3), mx.bool_), Seen(2, 8), None)
    assert np.array_equal(np.array(before), scratch_mask(np.eye(3, dtype=bool), 2))


# --- draft trees, against brute force over the full tree ---


def rank_paths(topology):
    """Each node's ranks from the root on, read from slots and paths."""
    slots = topology.slots.tolist()
    depths = topology.depths.tolist()
    ranks = [slot % topology.num_candidates for slot in slots]
    return [
        tuple(ranks[node - 1] for node in path[1 : depth + 1])
        for path, depth in zip(topology.paths.tolist(), depths, strict=True)
    ]


def token_paths(tree):
    """Each node's tokens from the root's children on."""
    tokens = tree.tokens.tolist()
    depths = tree.depths.tolist()
    return [
        tuple(tokens[node] for node in path[1 : depth + 1])
        for path, depth in zip(tree.paths.tolist(), depths, strict=True)
    ]


def distinct_candidates(levels, width):
    """Token of stream j's candidate of rank r: 100 j + r."""
    return mx.array([[100 * (j + 1) + r for r in range(width)] for j in range(levels)], mx.int32)


def random_probs(rng, levels, width, sharpness):
    logits = sharpness * rng.normal(size=(levels, width + 3))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return -np.sort(-probs, axis=1)[:, :width]


@pytest.mark.parametrize(("width", "levels"), [(1, 0), (1, 4), (2, 3), (3, 2), (4, 3)])
def test_full_topology(width, levels):
    topology = full_topology(width, levels)
    expected = [r for depth in range(levels + 1) for r in product(range(width), repeat=depth)]
    assert topology.num_nodes == sum(width**level for level in range(levels + 1))
    assert rank_paths(topology) == expected  # breadth first
    assert topology.depths.tolist() == [len(ranks) for ranks in expected]
    assert topology.num_internal == max(1, sum(width**level for level in range(levels)))
    index = {ranks: node for node, ranks in enumerate(expected)}
    for node, path in enumerate(topology.paths.tolist()):
        assert path == [index[expected[node][:depth]] for depth in range(levels + 1)]
    levels_of_slots = [slot // topology.num_candidates for slot in topology.slots.tolist()]
    assert levels_of_slots == [len(ranks) - 1 for ranks in expected[1:]]


def test_full_tree_tokens_and_parents():
    tokens = mx.array([[10, 11], [20, 21]], mx.int32)
    config = TreeConfig(kind="full", width=2)
    tree = grow_tree(mx.array([7], mx.int32), tokens, mx.zeros((2, 2)), config)
    assert tree.tokens.tolist() == [7, 10, 11, 20, 21, 20, 21]
    assert tree.parents.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert tree.num_internal == 3
    expected = np.eye(7, dtype=bool)
    for node, above in {1: [0], 2: [0], 3: [0, 1], 4: [0, 1], 5: [0, 2], 6: [0, 2]}.items():
        expected[node, above] = True
    assert np.array_equal(np.array(tree.ancestors), expected)
    assert tree.path_sums(mx.array([9.0, 1, 2, 4, 8, 16, 32])).tolist() == [0, 1, 2, 5, 9, 18, 34]


@pytest.mark.parametrize(
    "size, width, levels", tiny.all_pairs([1, 2, 7, 30], [None, 1, 2, 4], [1, 3, 4])
)
def test_best_tree_is_the_brute_force_optimum(size, width, levels):
    config = TreeConfig(kind="best", width=width, size=size)
    topology = draft_topology(config, levels)
    ranks = topology.num_candidates
    contenders = set(rank_paths(topology))
    candidates = distinct_candidates(levels, ranks)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        probs = random_probs(rng, levels, ranks, sharpness=[0.3, 1, 2, 3][seed])
        best = tiny.best_rank_paths(probs, size, ranks) if ranks**levels < 3000 else None
        if best:
            assert best <= contenders
        tree = grow_tree(mx.array([1]), candidates, mx.array(np.log(probs)), config)
        found = [tuple(token % 100 for token in path) for path in token_paths(tree)]
        assert len(found) == len(set(found)) == min(size, topology.num_nodes)
        assert [len(path) for path in found] == tree.depths.tolist() == sorted(map(len, found))
        assert all(path[:-1] in found for path in found if path)
        if best:
            assert set(found) == best


def random_pairs(rng, levels, count, sharpness):
    """[G, K, K] log probabilities of K tokens given each of those before."""
    scores = sharpness * rng.normal(size=(levels, count, count + 3))
    logprobs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return logprobs[:, :, :count].astype(np.float32)


def conditional_scores(logprobs, width):
    """Every path's slots and log probability, of each candidate's `width` best children."""
    paths = {(): 0.0}
    found = {(): 0.0}
    for edges in np.clip(logprobs, MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB):
        paths = {
            (*path, int(slot)): score + edges[path[-1] if path else 0, slot]
            for path, score in paths.items()
            for slot in np.argsort(-edges[path[-1] if path else 0], kind="stable")[:width]
        }
        found |= paths
    return found


def conditional_tree(logprobs, config):
    tokens = distinct_candidates(*logprobs.shape[:2])
    return grow_conditional_tree(mx.array([1]), tokens, mx.array(logprobs), config)


@pytest.mark.parametrize(
    "size, width, levels", tiny.all_pairs([1, 2, 6, 40], [None, 1, 2, 4], [1, 2, 4])
)
def test_a_conditional_tree_is_the_brute_force_optimum(size, width, levels):
    config = TreeConfig(kind="best", width=width, size=size)
    for seed in range(4):
        logprobs = random_pairs(np.random.default_rng(seed), levels, 6, [0.3, 1, 2, 4][seed])
        scores = conditional_scores(logprobs, width or 6)
        tree = conditional_tree(logprobs, config)
        found = [tuple(token % 100 for token in path) for path in token_paths(tree)]
        assert set(found) == set(sorted(scores, key=lambda path: -scores[path])[:size])
        assert len(found) == len(set(found)) == tree.num_nodes == min(size, len(scores))
        assert [len(path) for path in found] == tree.depths.tolist() == sorted(map(len, found))
        parents = [found.index(path[:-1]) for path in found[1:]]
        assert tree.parents.tolist() == [0, *parents]
        assert max(parents, default=0) < tree.num_internal
        again = conditional_tree(logprobs[::-1].copy(), config)  # Its shape follows from settings.
        assert (again.paths.shape, again.num_internal) == (tree.paths.shape, tree.num_internal)


@pytest.mark.parametrize("width", [1, 3, 6])
def test_a_conditional_full_tree_has_the_best_children_of_every_node(width):
    logprobs = random_pairs(np.random.default_rng(0), 3, 6, 1)
    tree = conditional_tree(logprobs, TreeConfig(kind="full", width=width))
    found = [tuple(token % 100 for token in path) for path in token_paths(tree)]
    assert found == list(conditional_scores(logprobs, width))
    assert tree.topology is full_topology(width, 3)


@pytest.mark.parametrize("config", [
    TreeConfig(size=2), TreeConfig(size=7), TreeConfig(size=16), TreeConfig(size=9, width=2),
    TreeConfig(kind="full", width=2), TreeConfig(kind="full", width=1),
], ids=str)  # fmt: skip
def test_what_no_condition_tells_grows_the_same_tree(config):
    for seed in range(4):
        logprobs = np.log(random_probs(np.random.default_rng(seed), 3, 16, 2)).astype(np.float32)
        pairs = np.broadcast_to(logprobs[:, None], (3, 16, 16)).copy()
        count = draft_topology(config, 3).num_candidates
        tokens = distinct_candidates(3, 16)[:, :count]
        given = mx.array(logprobs[:, :count])
        expected = grow_tree(mx.array([1]), tokens, given, config)
        tree = conditional_tree(pairs, config)
        assert set(token_paths(tree)) == set(token_paths(expected))


@pytest.mark.parametrize("size", [4, 6, 9])
def test_certain_streams_keep_the_tree_closed_under_ancestors(size):
    """A probability that rounds to 1 gives a child its parent's score."""
    config = TreeConfig(kind="best", width=3, size=size)
    logprobs = mx.array([[0.0, -30.0, -40.0], [-1e-9, -1e9, -1e9], [0.0, -25.0, -50.0]] * 2)
    pairs = mx.broadcast_to(logprobs[:, None], (6, 3, 3))
    tokens = distinct_candidates(6, 3)
    for tree in (
        grow_tree(mx.array([1]), tokens, logprobs, config),
        grow_conditional_tree(mx.array([1]), tokens, pairs, config),
    ):
        paths = token_paths(tree)
        assert tree.num_nodes == size
        assert all(path[:-1] in paths for path in paths if path)
        assert (100, 200, 300)[: size - 1] in paths


def test_select_renumbers_paths():
    tree = tiny.tree_from_parents([5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 2, 4])
    kept = tree.select(mx.array([0, 2, 4, 5]))
    assert kept.tokens.tolist() == [5, 7, 9, 10]
    assert kept.depths.tolist() == [0, 1, 2, 3]
    assert kept.parents.tolist() == [0, 0, 1, 2]
    assert kept.paths.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
    short = tree.select(mx.array([0, 1, 2]))
    assert short.parents.tolist() == [0, 0, 0]
    assert np.array_equal(np.array(short.ancestors), [[1, 0, 0], [1, 1, 0], [1, 0, 1]])
