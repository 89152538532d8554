"""The decoding loops and their stages: exact tokens and step counts."""

import ast
import math
import random
import sys
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, pairwise, product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from guessed import compute_guesses
from mlx_lm.models.cache import make_prompt_cache
from refusals import mentions, refusal
from tiny import (
    ARCHITECTURES,
    LATENT,
    LAYERS,
    VOCAB,
    all_pairs,
    assert_close,
    first_tokens,
    make_base,
    make_model,
    make_tokenizer,
    mlx_lm_tokens,
    random_tree,
    slow,
    target_of,
    token_steps,
    tree_from_parents,
)

import ssmlx
from ssmlx.api import stream_generate
from ssmlx.decoding import loop as decode
from ssmlx.decoding.accept import accept
from ssmlx.decoding.draft_shape import Always, DraftShape, Never
from ssmlx.decoding.drafter import Needs
from ssmlx.decoding.drafting import DraftingText, scratch_rows
from ssmlx.decoding.loop import plain_decode, prefill, speculative_decode
from ssmlx.decoding.prune import (
    may_drop_nodes,
    nodes_over_threshold,
    nodes_within_budget,
    surviving_nodes,
    transition_logprobs,
)
from ssmlx.decoding.step import AnswerPart, DraftTotals
from ssmlx.drafters.copies import NGRAM, TextOnDevice
from ssmlx.drafters.lookup import PromptLookupDrafter
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.model import shapes
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.masks import window_start
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN, grow_tree
from ssmlx.settings import (
    STREAM_SCHEDULES,
    PromptLookupConfig,
    PruneConfig,
    TreeConfig,
)

# --- acceptance and pruning, against walks and sums in plain Python ---


def naive_walk(tree, target):
    tokens = tree.tokens.tolist()
    parents = tree.parents.tolist()
    path = [0]
    while True:
        after = [
            node
            for node in range(1, len(tokens))
            if parents[node] == path[-1] and tokens[node] == target[path[-1]]
        ]
        if not after:
            return path
        (node,) = after
        path.append(node)


@pytest.mark.parametrize("vocab", [2, 3, 6])
def test_accept_equals_a_walk(vocab):
    rng = random.Random(vocab)
    lengths = set()
    for _ in range(120):
        tree = random_tree(rng, rng.randint(1, 14), vocab)
        target = [rng.randrange(vocab) for _ in range(tree.num_nodes)]
        found = accept(tree, mx.array(target, mx.int32))
        path = naive_walk(tree, target)
        count = int(found.num_accepted.item())
        lengths.add(count)
        assert count == len(path) - 1
        assert found.path.tolist()[: count + 1] == path
        assert set(found.path.tolist()[count:]) == {path[-1]}
        assert found.new_tokens.tolist()[: count + 1] == [target[node] for node in path]
        assert set(found.new_tokens.tolist()[count:]) == {target[path[-1]]}
        assert found.last.tolist() == [path[-1]]
        assert found.correction.tolist() == [target[path[-1]]]
    assert {0, 1, 2} <= lengths


def exit_probs(tree, rng, vocab):
    logits = rng.normal(0, 2, (tree.num_internal, vocab)).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    tokens = tree.tokens.tolist()
    parents = tree.parents.tolist()
    edges = [1.0] + [float(probs[parents[n], tokens[n]]) for n in range(1, len(tokens))]
    return mx.array(logits), edges


def along_paths(tree, edges):
    """The edges of each node's path."""
    depths = tree.depths.tolist()
    return [
        [edges[node] for node in path[1 : depth + 1]]
        for path, depth in zip(tree.paths.tolist(), depths, strict=True)
    ]


def assert_closed(tree, kept):
    parents = tree.parents.tolist()
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert all(parents[node] in kept for node in kept)


@pytest.mark.parametrize("seed", range(8))
def test_pruning_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    draw = random.Random(seed)
    tree = random_tree(draw, 12, 5)
    logits, edges = exit_probs(tree, rng, 5)
    found = transition_logprobs(tree, logits)
    assert_close(found, np.log(edges))
    on_path = along_paths(tree, edges)
    scores = [math.prod(values) for values in on_path]
    for keep in range(1, 15):
        config = PruneConfig(kind="budget", keep=keep)
        kept = surviving_nodes(tree, found, config).tolist()
        best = sorted(range(12), key=lambda node: -scores[node])[:keep]
        if all(1 - edge > 0.001 for edge in edges[1:]):
            assert kept == sorted(best)
        assert len(kept) == min(keep, 12)
        assert_closed(tree, kept)
    for threshold in (0.0, 0.02, 0.1, 0.3, 0.9, 1.0):
        config = PruneConfig(kind="threshold", threshold=threshold)
        kept = surviving_nodes(tree, found, config).tolist()
        assert kept == [n for n in range(12) if all(p >= threshold for p in on_path[n])]
        assert_closed(tree, kept)


def test_padding_has_no_probability():
    tree = tree_from_parents([1, 2, PAD_TOKEN], [0, 0, 0])
    logits = mx.arange(VOCAB, dtype=mx.float32)[None]  # the last is best, which -1 reads
    found = transition_logprobs(tree, logits)
    assert found[2].item() == -math.inf
    assert nodes_within_budget(tree, found, 2).tolist() == [0, 1]


def test_certain_edges_do_not_outlive_their_parents():
    """All path probabilities round to the same number; the nodes nearest the root stay."""
    chain = tree_from_parents([1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4])
    for keep in range(1, 7):
        kept = nodes_within_budget(chain, mx.zeros(6), keep)
        assert kept.tolist() == list(range(keep))


def test_threshold_semantics():
    """The paper's rule is on edges, not on path probabilities; an equal one stays."""
    chain = tree_from_parents([1, 2, 3, 4], [0, 0, 1, 2])
    edges = mx.log(mx.array([1.0, 0.5, 0.25, 0.5]))
    assert nodes_over_threshold(chain, edges, 0.2).tolist() == [0, 1, 2, 3]
    assert nodes_over_threshold(chain, edges, 0.3).tolist() == [0, 1]
    assert nodes_over_threshold(chain, edges, 0.6).tolist() == [0]
    impossible = mx.array([0.0, -math.inf, 0.0, 0.0])
    assert nodes_over_threshold(chain, impossible, 0.0).tolist() == [0, 1, 2, 3]


def test_what_can_be_pruned():
    tree = tree_from_parents([1, 2, 3], [0, 0, 0])
    root = tree_from_parents([1], [0])
    assert not may_drop_nodes(tree, PruneConfig())
    assert may_drop_nodes(tree, PruneConfig(kind="budget", keep=2))
    assert not may_drop_nodes(tree, PruneConfig(kind="budget", keep=3))
    assert may_drop_nodes(tree, PruneConfig(kind="threshold"))
    assert not may_drop_nodes(root, PruneConfig(kind="threshold"))


# --- a scripted drafter; streams of random weights, against plain decoding and mlx-lm ---


PROMPT = [3, 1, 4, 1, 5]
LATENT_FAMILIES = ["deepseek_v3", "glm4_moe_lite"]
FAMILIES = ["llama", *slow(*(name for name in ARCHITECTURES if name != "llama"))]
TREES = (
    TreeConfig(kind="full", width=1), TreeConfig(kind="full", width=3),
    TreeConfig(kind="best", size=12), TreeConfig(kind="best", size=7, width=2),
    TreeConfig(kind="best", size=1),
)  # fmt: skip
PRUNINGS = (
    PruneConfig(), PruneConfig(kind="budget", keep=4),
    PruneConfig(kind="threshold", threshold=0.05), PruneConfig(kind="threshold", threshold=1.0),
)  # fmt: skip


@lru_cache(maxsize=1)
def shared_model():
    return make_model()


@lru_cache(maxsize=4)
def bare_model(architecture="llama"):
    sizes = LATENT if architecture in LATENT_FAMILIES else {}
    return StreamFusedModel(Backbone(make_base(architecture, **sizes)))


@lru_cache(maxsize=16)
def greedy_tokens(architecture="llama", count=60):
    model = bare_model(architecture)
    return first_tokens(plain_decode(model, PROMPT, model.make_cache()), count)[0]


class ScriptedDrafter:
    """Knows what the target will write, and drafts as right or as wrong as the script says.

    Args:
        continuation: the target's own tokens.
        script: right levels of each successive tree, and wrong levels below every leaf; nothing is
            drafted at the end.
        wrong: wrong siblings beside each node of the right path.
        host_tokens: read what the target decided and check it; else the loop runs ahead.
    """

    largest = DraftShape("scripted", 64, 8)
    num_parameters = draft_calls = cache_bytes = 0

    def __init__(self, continuation, script, *, wrong=0, seed=0, host_tokens=True):
        self.needs = Needs(host_tokens=host_tokens)
        self.continuation = continuation
        self.script = list(script)
        self.wrong = wrong
        self.rng = random.Random(seed)
        self.done = self.promised = 0
        self.starts = []

    def start(self, tokens):
        self.starts.append(list(tokens))
        self.text = list(tokens)

    def follow(self, tokens, position, taps=None):
        assert position == len(self.text) and taps is None
        self.text += tokens

    def propose(self, verified, shape):
        assert shape == self.largest
        assert verified.stream_hidden is None and verified.insertion_hidden is None
        self.done += self.promised + 1
        if self.needs.host_tokens:
            assert verified.root.tolist() == self.text[-1:]
            assert self.text[len(PROMPT) :] == self.continuation[: self.done]
        self.promised, below = self.script.pop(0) if self.script else (0, 0)
        return self.draft(self.continuation[self.done - 1 :][: self.promised + 2], below)

    def draft(self, known, below):
        """Breadth first; `True` marks a node on the right path."""
        tokens = [known[0]]
        parents = [0]
        level = [(0, True)]
        for depth in range(self.promised + below):
            following = []
            for parent, on_path in level:
                children = []
                if on_path:
                    right = known[depth + 1]
                    others = [t for t in range(VOCAB) if t != right]
                    wrong = self.wrong if depth < self.promised else max(self.wrong, 1)
                    children = [(t, False) for t in self.rng.sample(others, wrong)]
                    if depth < self.promised:
                        children.append((right, True))
                    self.rng.shuffle(children)
                elif below:
                    children = [(self.rng.randrange(VOCAB), False)]
                for token, right_too in children:
                    following.append((len(tokens), right_too))
                    tokens.append(token)
                    parents.append(parent)
            level = following
        return tree_from_parents(tokens, parents)


def run_script(script, step=256, architecture="llama", **options):
    model = bare_model(architecture)
    continuation = greedy_tokens(architecture)
    cache = TreeCache(model.num_layers, step=step)
    drafter = ScriptedDrafter(continuation, script, **options)
    totals = DraftTotals()
    steps = speculative_decode(model, PROMPT, cache, drafters=[drafter])
    count = 1 + sum(right + 1 for right, _ in script)
    tokens, lengths = first_tokens(steps, count, totals)
    assert tokens == continuation[:count]
    assert lengths == [1, *(right + 1 for right, _ in script)]
    assert cache.offset - (len(PROMPT) + count - 1) in (0, 1)
    assert drafter.starts == [PROMPT]
    assert totals.drafted_tokens >= sum(right + below for right, below in script)


RIGHT = [[0] * 6, [1] * 5, [3] * 5, [4, 0, 2, 0, 1, 4, 3]]


@pytest.mark.parametrize(
    "right, wrong, below, host_tokens", all_pairs(RIGHT, [0, 1, 4], [0, 1, 2], [False, True])
)
def test_scripted_acceptance(right, wrong, below, host_tokens):
    run_script([(levels, below) for levels in right], wrong=wrong, host_tokens=host_tokens)


@pytest.mark.parametrize("step", [4, 256])
@pytest.mark.parametrize("host_tokens", [False, True])
def test_nothing_part_and_all_of_a_tree_is_accepted_in_every_order(host_tokens, step):
    """Each of the nine pairs of successive outcomes."""
    nothing, part, whole = (0, 2), (2, 1), (3, 0)
    orders = [nothing, nothing, part, part, whole, whole, nothing, whole, part, nothing]
    assert len(set(pairwise(orders))) == 9
    run_script(orders, step=step, host_tokens=host_tokens)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("host_tokens", [False, True])
def test_scripted_mixtures_across_cache_growth(seed, host_tokens):
    rng = random.Random(seed)
    script = [(rng.randint(0, 5), rng.randint(0, 2)) for _ in range(10)]
    run_script(script, step=4, wrong=rng.randint(0, 3), seed=seed, host_tokens=host_tokens)


@pytest.mark.parametrize("host_tokens", [False, True])
@pytest.mark.parametrize("right", [[0] * 4, [4] * 4, [4, 0, 2, 0, 1, 4, 3]])
@pytest.mark.parametrize("architecture", LATENT_FAMILIES)
def test_scripted_acceptance_with_latent_attention(architecture, right, host_tokens):
    script = [(levels, 1) for levels in right]
    run_script(script, 4, architecture, wrong=1, host_tokens=host_tokens)


@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("architecture", [LATENT_FAMILIES[0], *slow(*LATENT_FAMILIES[1:])])
def test_prompt_lookup_with_latent_attention(architecture, sampling):
    """A text that comes to repeat itself."""
    model = bare_model(architecture)
    prompt = PROMPT * 3
    plain, drafted = (
        first_tokens(token_steps(model, prompt, model.make_cache(), **settings, **sampling), 300)
        for settings in (
            {"decoding": "plain"},
            {"decoding": "speculative", "drafter": "prompt-lookup"},
        )
    )
    assert drafted[0] == plain[0] and len(drafted[1]) < 300
    if not sampling:
        assert plain[0] == mlx_lm_tokens(model.backbone.model, prompt, 300)


@pytest.mark.parametrize("architecture", LATENT_FAMILIES)
def test_rows_of_latent_attention_are_those_of_plain_decoding(architecture):
    """A tree's in one call, against mlx-lm's one token at a time along each path."""
    base = make_base(architecture, **LATENT)
    text = mx.array(PROMPT * 8)
    tokens = [1, 2, 3, 4, 5, 6]
    parents = [0, 0, 0, 1, 1, 2]
    expected = []
    for node in range(len(tokens)):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        caches = make_prompt_cache(base)
        base(text[None], cache=caches)
        rows = [base(mx.array([[tokens[one]]]), cache=caches) for one in path]
        expected.append(rows[-1][0, 0])
    model = StreamFusedModel(Backbone(base))
    cache = model.make_cache()
    model.backbone.append(text, cache)
    cache.reserve(more_tokens=1, step_rows=len(tokens))
    found = model.backbone.logits(model.lower(tree_from_parents(tokens, parents), cache))
    assert_close(found, mx.stack(expected), 3e-6)


def streamed(model, count, *, tree=TREES[2], prune=PRUNINGS[0], prompt=PROMPT, step=256, **options):
    cache = TreeCache(model.num_layers, step=step)
    drafter = StreamDrafter(model, tree, options.pop("num_streams", model.num_streams))
    steps = speculative_decode(model, prompt, cache, drafters=[drafter], prune=prune, **options)
    return first_tokens(steps, count)


KINDS = {
    "independent": {},
    "conditional": {"condition_rank": 4},
    "rooted": {"condition_rank": 4, "root_init_rank": 3},
}


@pytest.mark.parametrize("adapter", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_speculative_equals_plain_and_mlx_lm(architecture, scope, adapter):
    model = make_model(architecture, scope, adapter=adapter)
    expected = mlx_lm_tokens(target_of(architecture, scope), PROMPT, 24)
    assert first_tokens(plain_decode(model, PROMPT, model.make_cache()), 24)[0] == expected
    fewest = 24
    for tree, prune in zip(2 * TREES, 3 * PRUNINGS, strict=False):
        tokens, lengths = streamed(model, 24, tree=tree, prune=prune, step=8)
        assert tokens == expected, (tree, prune)
        assert max(lengths) <= 4
        fewest = min(fewest, len(lengths))
        if tree.size == 1 and tree.kind == "best":
            assert lengths == [1] * 24
    assert fewest < 24  # something was accepted


def test_every_token_a_candidate():
    """With the whole vocabulary in every level each step advances by 1 + G."""
    model = make_model(vocab=5, adapter={"num_streams": 2})
    expected = mlx_lm_tokens(target_of("llama", "all", vocab=5), [1, 2], 16)
    for kind in ("full", "best"):
        tree = TreeConfig(kind=kind, width=5, size=31)
        tokens, lengths = streamed(model, 16, tree=tree, prompt=[1, 2])
        assert tokens == expected
        if kind == "full":
            assert lengths == [1] + [3] * 5


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 9, 13])
def test_prompts_around_the_prefill_step(length):
    model = shared_model()
    prompt = [(7 * i + 2) % VOCAB for i in range(length)]
    expected = mlx_lm_tokens(target_of("llama", "all"), prompt, 12)
    tokens, _ = streamed(model, 12, prompt=prompt, step=4, prefill_step_size=4)
    assert tokens == expected
    cache = model.make_cache()
    reports = []
    for turn in plain_decode(model, prompt, cache, prefill_step_size=4):
        if turn is not None:
            break
        reports.append(cache.offset)
    ends = list(range(0, length - 1, 4))
    assert reports == ([*ends, length - 1] if ends else [])
    plain = plain_decode(model, prompt, model.make_cache(), prefill_step_size=4)
    assert first_tokens(plain, 12)[0] == expected


WIDE = {"tree": TreeConfig(kind="full", width=4)}


def answer(model, prompt=PROMPT, *, eos=None, cache=None, **settings):
    tokenizer = make_tokenizer(eos=eos)
    found = list(stream_generate(model, tokenizer, prompt, cache=cache, **settings))
    assert all(response.finish_reason is None for response in found[:-1])
    tokens = [token for response in found for token in response.tokens]
    assert found[-1].generation_tokens == len(tokens)
    assert found[-1].target_calls == len(found)
    return tokens, found


def test_max_tokens_cuts_anywhere():
    """Every length, so that some cut falls inside an accepted path."""
    model = shared_model()
    expected, found = answer(model, max_tokens=16, **WIDE)
    assert expected == answer(model, max_tokens=16, decoding="plain")[0]
    assert max(len(response.tokens) for response in found) > 1
    for count in range(1, 16):
        tokens, cut = answer(model, max_tokens=count, **WIDE)
        assert tokens == expected[:count]
        assert cut[-1].finish_reason == "length"
        assert "".join(r.text for r in cut).split() == [f"w{t}" for t in tokens]


@pytest.mark.parametrize("source", ["tokenizer", "adapter"])
def test_an_end_token_stops_anywhere(source):
    plain = greedy_of_shared(30)
    for end in sorted(set(plain)):
        if source == "tokenizer":
            model = shared_model()
            options = {"eos": end}
        else:
            model = make_model(adapter={"end_token_ids": (end,)})
            options = {}
        expected = plain[: plain.index(end) + 1]
        for decoding in ("plain", "speculative"):
            settings = {"decoding": decoding, "max_tokens": 30}
            tokens, found = answer(model, **options, **settings, **WIDE)
            assert tokens == expected
            assert found[-1].finish_reason == "stop"
            assert "".join(r.text for r in found).split() == [f"w{t}" for t in expected[:-1]]


@lru_cache(maxsize=4)
def greedy_of_shared(count):
    model = shared_model()
    return first_tokens(plain_decode(model, PROMPT, model.make_cache()), count)[0]


def test_the_context_ends_an_answer():
    model = make_model(max_position_embeddings=16)
    expected = greedy_of_shared(30)
    for length in (1, 5, 13, 14, 15):
        prompt = (PROMPT + expected)[:length]
        for decoding in ("plain", "speculative"):
            tokens, found = answer(model, prompt, decoding=decoding, **WIDE)
            assert found[-1].finish_reason == "context"
            assert length + len(tokens) == 16
            if length >= 5:
                assert prompt + tokens == (PROMPT + expected)[:16]
    assert mentions(refusal(answer, model, [1] * 16), "16")
    assert mentions(refusal(answer, model, []), "prompt")


@pytest.mark.parametrize("prune", PRUNINGS[:3])
def test_turns_share_a_cache(prune):
    """The cache after a cut answer may hold more than the answer; it is trimmed, then reused.

    It went on without the drafter, whose copy is made anew for every answer.
    """
    model = shared_model()
    calls = {}
    for schedule in STREAM_SCHEDULES:
        cache = TreeCache(3, step=4)
        history = []
        calls[schedule] = []
        settings = {"stream_schedule": schedule, "prune": prune, **WIDE}
        for turn, count in enumerate((3, 9, 7, 2)):
            prompt = [(5 * turn + i) % VOCAB for i in range(turn + 1)]
            history += prompt
            unseen = history[cache.offset :]
            tokens, found = answer(model, unseen, cache=cache, max_tokens=count, **settings)
            assert tokens == answer(model, history, max_tokens=count, decoding="plain")[0]
            assert found[0].prompt_tokens == len(history)
            calls[schedule].append(len(found))
            history += tokens
            assert cache.offset >= len(history) - 1
            cache.keep_first(len(history) - 1)
    assert calls["fused"] == calls["second-pass"]


@pytest.mark.parametrize("decoding", ["plain", "fused", "second-pass"])
def test_neither_loop_copies_the_cache(decoding):
    model = make_model("llama")
    mx.eval(model.backbone.model.parameters())
    cache = model.make_cache(64)
    drafter = None
    cache.reserve(more_tokens=100_000)
    without = mx.get_active_memory()
    if decoding == "plain":
        steps = plain_decode(model, [1, 2, 3], cache)
    else:
        tree = TreeConfig(kind="full", width=2)
        drafter = StreamDrafter(model, tree, model.num_streams, decoding)
        steps = speculative_decode(model, [1, 2, 3], cache, drafters=[drafter])
    steps = filter(None, steps)
    for _ in range(3):
        next(steps)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(5):
        next(steps)
    one_layer = cache.nbytes / model.num_layers
    assert mx.get_peak_memory() - before < one_layer / 4
    second = drafter.cache_bytes if drafter else 0
    kept = cache.nbytes + second + cache.mask_bytes
    assert before - without < kept + one_layer / 4  # no buffer is there twice


PAIR = (TreeConfig(kind="full", width=2), TreeConfig(kind="best", size=7))


class Recorder(StreamDrafter):
    """A drafter that keeps the trees that it proposes."""

    def start(self, tokens):
        super().start(tokens)
        self.trees = []

    def propose(self, verified, shape):
        tree = super().propose(verified, shape)
        self.trees.append((tree.tokens, tree.paths))
        return tree


def drafted(model, schedule, *, count=22, tree=PAIR[0], prune=PRUNINGS[0], num_streams=None):
    """Tokens, and the tokens and paths of every tree that was proposed on the way."""
    drafter = Recorder(model, tree, num_streams or model.num_streams, schedule)
    cache = TreeCache(model.num_layers, step=4)  # grows often
    steps = speculative_decode(model, PROMPT, cache, drafters=[drafter], prune=prune)
    tokens, lengths = first_tokens(steps, count)
    trees = [(tuple(np.array(t)), np.array(p).tolist()) for t, p in drafter.trees[: len(lengths)]]
    return tokens, lengths, trees


DRAFTING = {
    "independent": {},
    "conditional": {"condition_rank": 4},
    "in a window": {"stream_window": 6},
}


@pytest.mark.parametrize("adapter", DRAFTING.values(), ids=DRAFTING)
@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_both_schedules_draft_the_same_trees(architecture, scope, adapter):
    model = make_model(architecture, scope, adapter=adapter)
    for tree, prune in product(PAIR, PRUNINGS[:3]):
        fused = drafted(model, "fused", tree=tree, prune=prune)
        assert drafted(model, "second-pass", tree=tree, prune=prune) == fused
        assert max(fused[1]) > 1  # something was accepted


@pytest.mark.parametrize("root", [{}, {"root_init_rank": 3}], ids=["f alone", "rooted"])
def test_a_replay_knows_the_window_at_every_place(root):
    adapter = {"stream_window": 4, **root}
    model = make_model(adapter=adapter)
    chain = TreeConfig(kind="full", width=1)
    prompt = [3, 1, 7, 7, 5, 9, 2, 6, 5, 7, 7, 3, 5, 8]
    answer = first_tokens(plain_decode(model, prompt, model.make_cache()), 12)[0]
    guesses = compute_guesses(model, prompt, answer, 2)
    for place in range(9):
        drafter = Recorder(model, chain, 3)
        text = [*prompt, *answer[:place]]
        first_tokens(speculative_decode(model, text, model.make_cache(), drafters=[drafter]), 1)
        chain_tokens = drafter.trees[0][0].tolist()
        assert chain_tokens == [answer[place], *guesses.tokens[place, :, 0]]
    everything = compute_guesses(make_model(adapter=root), prompt, answer, 2)
    assert (everything.tokens != guesses.tokens).any()


def test_streams_that_start_from_the_root_guess_otherwise_and_by_themselves():
    plain, rooted = (make_model(adapter={"root_init_rank": rank}) for rank in (0, 3))
    answer, lengths, trees = drafted(rooted, "second-pass", tree=PAIR[1])
    guesses = [compute_guesses(model, PROMPT, answer, 6) for model in (plain, rooted)]
    assert (guesses[0].tokens != guesses[1].tokens).any() and max(lengths) > 1
    for place, (tokens, _) in zip(np.cumsum(lengths) - 1, trees, strict=True):
        ranked = (mx.array(array[place]) for array in (guesses[1].tokens, guesses[1].logprobs))
        grown = grow_tree(mx.array([answer[place]]), *ranked, PAIR[1])
        assert tuple(np.array(grown.tokens)) == tokens
    line = refusal(StreamDrafter, rooted, PAIR[0], 3, "fused")
    assert mentions(line, "schedule=fused", "schedule=second-pass")
    with pytest.raises(ValueError):
        rooted.insert(mx.zeros((1, 1, 32)), 3)


def test_streams_that_also_start_without_the_root_do_so_where_they_run_fused():
    rooted = {"condition_rank": 4, "root_init_rank": 3, "starts_without_root": True}
    both, alone = (make_model(adapter=rooted) for _ in range(2))
    alone.streams = replace(alone.streams, root_init=None)
    for tree, prune in product(PAIR, PRUNINGS[:3]):
        fused = drafted(both, "fused", tree=tree, prune=prune)
        assert fused == drafted(alone, "second-pass", tree=tree, prune=prune)
        second = drafted(both, "second-pass", tree=tree, prune=prune)
        assert fused[0] == second[0] and fused[2] != second[2]
        assert max(fused[1]) > 1  # something was accepted


def test_a_second_pass_costs_the_same_memory_behind_any_context():
    model = make_model(adapter={"stream_window": 32})
    sizes = []
    for length in (356, 1636):  # as full as each other in the cache, which grows by 256
        drafter = StreamDrafter(model, PAIR[0], 3)
        steps = speculative_decode(model, [5] * length, model.make_cache(), drafters=[drafter])
        first_tokens(steps, 40)
        sizes.append(drafter.cache_bytes)
    assert sizes[1] == sizes[0]


def test_a_window_begins_half_a_window_back():
    starts = [window_start(position, 16) for position in (0, 15, 16, 36, 39, 40, 48, 55, 56)]
    assert starts == [0, 0, 8, 24, 24, 32, 40, 40, 48]


@pytest.mark.parametrize("scope", ["all", "streams"])
def test_streams_told_apart_by_their_values(scope):
    rotated = {"stream_design": "value_rotation", "rotation_step": 0.4}
    draft_vocab = range(0, VOCAB, 2)
    adapter = {**rotated, "draft_vocab": draft_vocab}
    model = make_model("llama", scope, adapter=adapter, merge_lora=False)
    for prune in PRUNINGS[:3]:
        fused = drafted(model, "fused", prune=prune)
        assert drafted(model, "second-pass", prune=prune) == fused
    embedded = make_model("llama", scope)
    assert drafted(embedded, "second-pass")[2] != fused[2]


def test_a_drafter_starts_anew_with_every_sequence():
    model = make_model()
    trees = {}
    for schedule in STREAM_SCHEDULES:
        drafter = Recorder(model, PAIR[0], 3, schedule)
        trees[schedule] = []
        for prompt in (PROMPT, [9, 2, 6, 5, 3]):
            steps = speculative_decode(model, prompt, model.make_cache(), drafters=[drafter])
            _, lengths = first_tokens(steps, 12)
            trees[schedule] += [tuple(np.array(t)) for t, _ in drafter.trees[: len(lengths)]]
    assert trees["fused"] == trees["second-pass"]


# --- the loop never waits for itself: evaluations and reads are counted, not timed ---


@pytest.fixture
def events(monkeypatch):
    """What the loop does, in order: "draft", "build" a call, "launch" work, "wait" and "read"."""
    log = []

    def logged(name, function):
        def call(*args, **kwargs):
            log.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("plain_call", "verify"):
        monkeypatch.setattr(decode, name, logged("build", getattr(decode, name)))
    monkeypatch.setattr(DraftingText, "propose", logged("draft", DraftingText.propose))
    monkeypatch.setattr(mx, "async_eval", logged("launch", mx.async_eval))
    monkeypatch.setattr(mx, "eval", logged("wait", mx.eval))
    users = [name for name in sys.modules if name.startswith("ssmlx.") and name != shapes.__name__]
    for module in map(sys.modules.get, users):
        for name in ("to_int", "to_float", "to_list"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, logged("read", getattr(shapes, name)))
    return log


def speculative(model, prune=PRUNINGS[0], drafter=None, **more):
    drafter = drafter or StreamDrafter(model, PAIR[1], model.num_streams)
    cache = model.make_cache(scratch_rows([drafter]))
    return filter(
        None, speculative_decode(model, PROMPT, cache, drafters=[drafter], prune=prune, **more)
    )


def events_of(events, steps, count):
    """The events of the next `count` calls."""
    events.clear()
    for _ in range(count):
        next(steps)
        events.append("give")
    return events


def after_start(events, steps):
    """The events of later calls, the prompt's and the one behind it left out."""
    next(steps), next(steps)
    return events_of(events, steps, 3)


# The next tree is launched while a call runs; the next call once the tokens are read.
CALL = ["draft", "build", "wait", "launch", "read", "launch", "give"]


@pytest.mark.parametrize("prune", PRUNINGS[:2])
def test_the_next_call_is_built_while_one_runs_and_starts_before_tokens_are_given(prune, events):
    """A budget of nodes needs no further read."""
    steps = speculative(make_model(), prune=prune)
    assert after_start(events, steps) == CALL * 3


def test_who_has_to_know_the_text_drafts_when_it_is_read(events):
    steps = speculative(make_model(), drafter=PromptLookupDrafter(PromptLookupConfig()))
    call = ["read", "draft", "build", "wait", "launch", "give"]
    assert after_start(events, steps) == call * 3


def test_pruning_by_threshold_reads_twice(events):
    """How many nodes are left is read while a call is built, and nothing else is under way."""
    threshold = PruneConfig(kind="threshold", threshold=0.1)
    first_tokens(speculative(make_model(), prune=threshold), 12)  # constants are evaluated once
    steps = speculative(make_model(), prune=threshold)
    call = ["draft", "read", "launch", "build", "read", "wait", "launch", "give"]
    assert after_start(events, steps) == call * 3


def test_plain_decoding_reads_once_a_token(events):
    model = make_model()
    steps = filter(None, plain_decode(model, PROMPT, model.make_cache()))
    assert after_start(events, steps) == ["build", "launch", "read", "give"] * 3


def test_plain_calls_among_others_are_plain_decodings(events):
    steps = speculative(make_model(), controller=Never())
    assert after_start(events, steps) == ["build", "launch", "read", "give"] * 3


def test_the_first_token_is_given_before_drafting_is_launched(events):
    """`launch` may block while work is queued, which the reader of the first token would feel."""
    steps = speculative(make_model())
    # The prompt is waited for; then its call is launched.
    assert events_of(events, steps, 1) == ["wait", "build", "launch", "draft", "read", "give"]
    assert events_of(events, steps, 1) == ["launch", "build", "wait", "launch", *CALL]


def take_and_end(tokens):
    """Take the tokens of a call for an answer that ends with them."""
    return AnswerPart(tuple(tokens), finish_reason="stop")


def test_no_call_is_launched_for_an_answer_that_has_ended(events):
    steps = speculative(make_model(), take=take_and_end)
    next(steps)
    behind_first = ["launch", "build", "wait", "launch"]
    ended = [*CALL[: CALL.index("read") + 1], "give"]
    assert events_of(events, steps, 1) == [*behind_first, *ended]


def test_drafting_begins_and_ends_without_a_call_or_a_draft_of_its_own(events):
    """It begins behind the plain call that is under way, and ends with the last draft verified."""
    model = make_model()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    turns = Turns([None, None, None, drafter.largest, drafter.largest, None, None])
    steps = speculative(model, drafter=drafter, controller=turns)
    first_tokens(speculative(model), 12)  # constants are evaluated once
    next(steps), next(steps)
    plain = ["build", "launch", "read", "give"]
    # Launched without a wait for the host: the last two plain calls, and the first tree.
    assert events_of(events, steps, 1) == plain
    begins = ["draft", "build", "wait", "launch", "read", "wait", "launch", "give"]
    assert events_of(events, steps, 1) == begins
    assert events_of(events, steps, 1) == CALL
    ends = ["read", "build", "wait", "launch", "give"]
    assert events_of(events, steps, 1) == ends
    assert events_of(events, steps, 1) == plain
    assert turns.shapes == [None, None, None, None, drafter.largest, drafter.largest, None]


@pytest.mark.parametrize("schedule", STREAM_SCHEDULES)
@pytest.mark.parametrize("someone_holds_it", [False, True])
def test_caches_are_written_in_place(schedule, someone_holds_it):
    """A copy of one layer of the cache would show in the peak, as it does where one is held."""
    model = make_model()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams, schedule)
    cache = model.make_cache(scratch_rows([drafter]))
    cache.reserve(more_tokens=20_000)
    steps = speculative_decode(model, PROMPT, cache, drafters=[drafter])
    first_tokens(steps, 12)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(12):
        next(steps)
        held = cache.snapshot() if someone_holds_it else None
    del held
    layer = cache.nbytes / model.num_layers
    assert (mx.get_peak_memory() - before > layer) == someone_holds_it


def addresses_of(cache):
    """Of the buffers of keys and of values."""
    return [np.asarray(buffer).ctypes.data for buffer in cache.state[: 2 * LAYERS]]


@pytest.mark.parametrize("decoding", ["plain", *STREAM_SCHEDULES])
@pytest.mark.parametrize("someone_holds_it", [False, True])
def test_latent_caches_are_written_in_place(decoding, someone_holds_it):
    model = make_model("glm4_moe_lite", **LATENT)
    cache = model.make_cache(100)
    steps = plain_decode(model, PROMPT, cache)
    if decoding != "plain":
        drafter = StreamDrafter(model, PAIR[1], model.num_streams, decoding)
        steps = speculative_decode(model, PROMPT, cache, drafters=[drafter])
    first_tokens(steps, 6)
    mx.synchronize()
    before = addresses_of(cache)
    assert len(set(before)) == 2 * LAYERS
    held = []  # all of them, or a buffer that was left would be used again
    for _ in range(6):
        held += [cache.snapshot()] if someone_holds_it else []
        next(steps)
    mx.synchronize()
    assert (addresses_of(cache) != before) == someone_holds_it


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("turns", [[True], [True, True, False, False]], ids=["drafts", "pauses"])
def test_an_answer_that_ended_can_go_on(after, turns):
    """The call that was built and not run leaves no trace: neither in tokens nor in the cache."""
    model = make_model()
    calls = []
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    shapes = [drafter.largest if drafts else None for drafts in turns]

    def take(tokens):
        calls.append(tokens)
        ends = len(calls) % after == 0
        return AnswerPart(tuple(tokens), finish_reason="stop" if ends else None)

    def decoded(**more):
        return first_tokens(
            speculative(model, drafter=drafter, controller=Turns(shapes), **more), 40
        )

    expected, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache()), 40)
    _, lengths = decoded()
    assert decoded(take=take) == (expected, lengths)


class Turns:
    """A controller that takes one of `shapes` after the other, and notes what was verified."""

    def __init__(self, shapes):
        self._turns = cycle(shapes)
        self._next = next(self._turns)
        self.shapes = []

    def next(self, *, is_read=False):
        return self._next

    def record(self, call):
        self.shapes.append(call.shape)
        assert call.drafted == self._next
        self._next = next(self._turns)


def test_drafting_can_pause():
    """A pause is plain decoding, and the streams find the cache as it is afterwards."""
    model = make_model()
    expected, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache()), 40)
    lengths = {}
    for first in (0, 4):
        for schedule in STREAM_SCHEDULES:
            drafter = StreamDrafter(model, PAIR[1], model.num_streams, schedule)
            largest = drafter.largest
            turns = Turns([*[largest] * first, *[None] * 5, *[largest] * 40])
            steps = speculative(model, drafter=drafter, controller=turns)
            tokens, lengths[schedule] = first_tokens(steps, 40)
            assert tokens == expected
            # What is drafted behind a call is verified by the next.
            verified = [None, *[largest] * first, *[None] * 5, *[largest] * 40]
            assert turns.shapes == verified[: len(turns.shapes)]
        fused = lengths["fused"]
        assert fused == lengths["second-pass"]
        assert fused[first + 1 : first + 6] == [1] * 5 and max(fused[first + 6 :]) > 1


def test_another_shape_may_be_drafted_at_every_call():
    model = make_model()
    expected, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache()), 60)
    drafter = StreamDrafter(model, TreeConfig(size=12), model.num_streams)
    levels = model.num_streams
    small = [DraftShape("streams", size, min(size - 1, levels)) for size in (2, 3, 6)]
    shapes = [*small, drafter.largest, drafter.largest, None]
    turns = Turns(shapes)
    tokens, lengths = first_tokens(speculative(model, drafter=drafter, controller=turns), 60)
    assert tokens == expected and max(lengths) > 2
    assert turns.shapes[1:7] == shapes


def test_what_a_controller_does_not_ask_for_is_the_drafters_largest_tree():
    model = make_model()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    unasked = first_tokens(speculative(model, drafter=drafter), 30)
    always = Always(drafter.largest)
    assert first_tokens(speculative(model, drafter=drafter, controller=always), 30) == unasked
    never = first_tokens(speculative(model, drafter=drafter, controller=Never()), 30)
    assert never == (unasked[0], [1] * 30) and len(unasked[1]) < 30


@pytest.mark.parametrize("context", [PROMPT, ()])
def test_copies_are_of_the_whole_text(context, monkeypatch):
    """Of what plain calls wrote between, and of a cache's tokens where they are known."""
    model = make_model(adapter={"condition_rank": 3})
    seen = []

    def noted(text, last, count):
        seen.append((text._tokens[NGRAM - 1 :], last))
        return look_up(text, last, count)

    look_up = TextOnDevice.find_continuations
    monkeypatch.setattr(TextOnDevice, "find_continuations", noted)
    cache = model.make_cache()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    prefill(model, PROMPT, cache)
    shape = DraftShape("streams", 5, 2)
    turns = Turns([shape, shape, None, shape, None, None])
    steps = speculative_decode(
        model, [5, 9], cache, drafters=[drafter], controller=turns, context=context
    )
    tokens, _ = first_tokens(steps, 300)
    expected = [*(context or [PAD_TOKEN] * len(PROMPT)), 5, 9, *tokens]
    ends = [int(last.item()) + 1 for _, last in seen]
    assert len(set(ends)) > 20 and max(ends) > 256 + len(expected) - len(tokens)
    for (text, _), end in zip(seen, ends, strict=True):
        assert text.tolist()[:end] == expected[:end]


def test_only_one_file_reads_arrays():
    """What waits for the device goes by `shapes.to_int`, `to_float` and `to_list`."""
    package = Path(ssmlx.__file__).parent
    found = set()
    for path in (
        p for room in ("decoding", "drafters", "model") for p in package.glob(f"{room}/*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist"):
                found.add(path.name)
    assert found == {"shapes.py"}
