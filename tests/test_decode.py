"""The decoding loops: exact tokens and step counts, against plain decoding and mlx-lm."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import pairwise, product

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from tiny import (
    ARCHITECTURES,
    VOCAB,
    first_tokens,
    make_base,
    make_model,
    make_tokenizer,
    target_of,
    tree_from_parents,
)

from ssmlx.api import stream_generate
from ssmlx.decoding import loop as decode
from ssmlx.decoding.accept import Acceptance
from ssmlx.decoding.loop import plain_decode, streaming_decode
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.errors import InputError
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import PruneConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
TREES = (
    TreeConfig(kind="full", width=1),
    TreeConfig(kind="full", width=3),
    TreeConfig(kind="best", size=12),
    TreeConfig(kind="best", size=7, width=2),
    TreeConfig(kind="best", size=1),
)
PRUNINGS = (
    PruneConfig(),
    PruneConfig(kind="budget", keep=4),
    PruneConfig(kind="threshold", threshold=0.05),
    PruneConfig(kind="threshold", threshold=1.0),
)


@lru_cache(maxsize=1)
def shared_model():
    return make_model()


@lru_cache(maxsize=4)
def bare_model(architecture="llama"):
    return StreamFusedModel(Backbone(make_base(architecture)))


@lru_cache(maxsize=16)
def greedy_tokens(architecture="llama", count=60):
    model = bare_model(architecture)
    return first_tokens(plain_decode(model, PROMPT, model.make_cache()), count)[0]


# --- A scripted drafter ---


class ScriptedDrafter:
    """Knows what the target will write, and drafts as right or as wrong as it is told.

    Args:
        continuation: the target's own tokens.
        right: right levels of each successive tree; nothing is drafted at the end.
        wrong: wrong siblings beside each node of the right path.
        below: wrong levels below every leaf.
        waits: read what the target decided and check it; else the loop runs ahead.
    """

    num_streams, num_levels = 0, 8

    def __init__(self, continuation, right, *, wrong=0, below=0, seed=0, waits=True):
        self.waits = waits
        self.continuation, self.right = continuation, list(right)
        self.wrong, self.below, self.rng = wrong, below, random.Random(seed)
        self.done = self.promised = 0

    def start(self, tokens):
        self.started = list(tokens)

    def propose(self, verified):
        assert verified.stream_hidden.shape[:2] == (1, 0)
        self.done += self.promised + 1
        if self.waits:
            assert verified.root.tolist() == [self.continuation[self.done - 1]]
        self.promised = self.right.pop(0) if self.right else 0
        return self.draft(self.continuation[self.done - 1 :][: self.promised + 2])

    def draft(self, known):
        """Breadth first; `True` marks a node on the right path."""
        tokens, parents, level = [known[0]], [0], [(0, True)]
        for depth in range(self.promised + self.below):
            following = []
            for parent, on_path in level:
                children = []
                if on_path:
                    right, wrong = known[depth + 1], self.wrong if self.below or self.wrong else 0
                    others = [t for t in range(VOCAB) if t != right]
                    children = [(t, False) for t in self.rng.sample(others, max(wrong, 1))]
                    children = children[:wrong] if depth < self.promised else children
                    if depth < self.promised:
                        children.append((right, True))
                    self.rng.shuffle(children)
                elif self.below:
                    children = [(self.rng.randrange(VOCAB), False)]
                for token, right_too in children:
                    following.append((len(tokens), right_too))
                    tokens.append(token)
                    parents.append(parent)
            level = following
        return tree_from_parents(tokens, parents)


def run_script(right, step=256, **options):
    model, continuation = bare_model(), greedy_tokens()
    cache = TreeCache(model.num_layers, step=step)
    drafter = ScriptedDrafter(continuation, right, **options)
    steps = streaming_decode(model, PROMPT, cache, drafter=drafter)
    count = 1 + sum(r + 1 for r in right)
    tokens, lengths = first_tokens(steps, count)
    assert tokens == continuation[:count]
    assert lengths == [1, *(r + 1 for r in right)]
    assert cache.offset == len(PROMPT) + count - 1
    assert drafter.started == PROMPT


@pytest.mark.parametrize("wrong", [0, 1, 4])
@pytest.mark.parametrize("below", [0, 1, 2])
@pytest.mark.parametrize("right", [[0] * 6, [1] * 5, [3] * 5, [4, 0, 2, 0, 1, 4, 3]])
@pytest.mark.parametrize("waits", [False, True])
def test_scripted_acceptance(right, wrong, below, waits):
    run_script(right, wrong=wrong, below=below, waits=waits)


@pytest.mark.parametrize("seed", range(6))
def test_scripted_mixtures_across_cache_growth(seed):
    rng = random.Random(seed)
    right = [rng.randint(0, 5) for _ in range(10)]
    run_script(right, step=4, wrong=rng.randint(0, 3), below=rng.randint(0, 2), seed=seed)


# --- Streams of random weights ---


def mlx_lm_tokens(model, prompt, count):
    found = mlx_lm.stream_generate(model, make_tokenizer(), prompt, max_tokens=count)
    return [response.token for response in found]


def streamed(model, count, *, tree=TREES[2], prune=PRUNINGS[0], prompt=PROMPT, step=256, **options):
    cache = TreeCache(model.num_layers, step=step)
    drafter = StreamDrafter(model, tree, options.pop("num_streams", model.num_streams))
    steps = streaming_decode(model, prompt, cache, drafter=drafter, prune=prune, **options)
    return first_tokens(steps, count)


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streaming_equals_plain_and_mlx_lm(architecture, scope):
    model = make_model(architecture, scope)
    expected = mlx_lm_tokens(target_of(architecture, scope), PROMPT, 24)
    assert first_tokens(plain_decode(model, PROMPT, model.make_cache()), 24)[0] == expected
    fewest = 24
    for tree, prune in product(TREES, PRUNINGS):
        tokens, lengths = streamed(model, 24, tree=tree, prune=prune, step=8)
        assert tokens == expected, (tree, prune)
        assert max(lengths) <= 4
        fewest = min(fewest, len(lengths))
        if tree.size == 1 and tree.kind == "best":
            assert lengths == [1] * 24
    assert fewest < 24  # something was accepted


def test_every_token_a_candidate():
    """With the whole vocabulary in every level each step advances by 1 + G."""
    model = make_model(vocab=5, num_streams=2)
    expected = mlx_lm_tokens(target_of("llama", "all", vocab=5), [1, 2], 16)
    for kind in ("full", "best"):
        tree = TreeConfig(kind=kind, width=5, size=31)
        tokens, lengths = streamed(model, 16, tree=tree, prompt=[1, 2])
        assert tokens == expected
        if kind == "full":
            assert lengths == [1] + [3] * 5


@pytest.mark.parametrize("num_streams", [1, 2])
def test_fewer_streams_than_trained(num_streams):
    model = shared_model()
    expected = first_tokens(plain_decode(model, PROMPT, model.make_cache()), 20)[0]
    tokens, lengths = streamed(model, 20, tree=TreeConfig(kind="full"), num_streams=num_streams)
    assert tokens == expected
    assert max(lengths) <= num_streams + 1


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 9, 13])
def test_prompts_around_the_prefill_step(length):
    model, prompt = shared_model(), [(7 * i + 2) % VOCAB for i in range(length)]
    expected = mlx_lm_tokens(target_of("llama", "all"), prompt, 12)
    reports = []
    tokens, _ = streamed(
        model,
        12,
        prompt=prompt,
        step=4,
        prefill_step_size=4,
        progress=lambda done, total: reports.append((done, total)),
    )
    assert tokens == expected
    assert reports[0] == (0, length - 1)
    assert reports[-1] == (length - 1, length - 1)
    assert all(after[0] - before[0] <= 4 for before, after in pairwise(reports))
    plain = plain_decode(model, prompt, model.make_cache(), prefill_step_size=4)
    assert first_tokens(plain, 12)[0] == expected


# --- The public loop ---

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
            model, options = shared_model(), {"eos": end}
        else:
            model, options = make_model(end_token_ids=(end,)), {}
        expected = plain[: plain.index(end) + 1]
        for decoding in ("plain", "streaming"):
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
        for decoding in ("plain", "streaming"):
            tokens, found = answer(model, prompt, decoding=decoding, **WIDE)
            assert found[-1].finish_reason == "context"
            assert length + len(tokens) == 16
            if length >= 5:
                assert prompt + tokens == (PROMPT + expected)[:16]
    with pytest.raises(InputError, match="16 tokens"):
        answer(model, [1] * 16)
    with pytest.raises(InputError, match="empty"):
        answer(model, [])


@pytest.mark.parametrize("prune", PRUNINGS[:3])
def test_turns_share_a_cache(prune):
    """The cache after a cut answer may hold more than the answer; it is trimmed, then reused."""
    model, cache, history = shared_model(), TreeCache(3, step=4), []
    for turn, count in enumerate((3, 4, 7, 2)):
        prompt = [(5 * turn + i) % VOCAB for i in range(turn + 1)]
        history += prompt
        unseen = history[cache.offset :]
        tokens, found = answer(model, unseen, cache=cache, max_tokens=count, prune=prune, **WIDE)
        assert tokens == answer(model, history, max_tokens=count, decoding="plain")[0]
        assert found[0].prompt_tokens == len(history)
        history += tokens
        assert cache.offset >= len(history) - 1
        cache.trim(len(history) - 1)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="num-streams 4"):
        answer(shared_model(), num_streams=4)
    with pytest.raises(InputError, match="no streams"):
        answer(bare_model(), decoding="streaming")
    assert answer(bare_model(), max_tokens=9)[0] == greedy_tokens()[:9]


# --- Sampling ---

SMALL, DRAWS, LENGTH = 5, 900, 3


def p_value(counts, probs):
    """Chi-square of `counts` against `probs`, outcomes of fewer than 5 expected put together."""
    torch = pytest.importorskip("torch")
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(observed) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def exact_distribution(prompt):
    """[V^3] probability of every continuation of 3 tokens, one sequence each."""
    model = target_of("llama", "all", vocab=SMALL)
    starts = list(product(range(SMALL), repeat=LENGTH - 1))
    logits = model(mx.array([[*prompt, *start] for start in starts]))[:, len(prompt) - 1 :]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    probs = []
    for start, rows in zip(starts, logprobs, strict=True):
        before = sum(float(rows[i, token]) for i, token in enumerate(start))
        probs += np.exp(before + rows[LENGTH - 1]).tolist()
    return np.array(probs)


def sampled_counts(seed, draws=DRAWS):
    model, cache = make_model(vocab=SMALL, num_streams=2), TreeCache(3, scratch=21)
    drafter = StreamDrafter(model, TreeConfig(kind="full", width=2), 2)
    sampler = mlx_lm.sample_utils.make_sampler(temp=1.0)
    counts, steps_taken = np.zeros(SMALL**LENGTH), 0
    mx.random.seed(seed)
    for _ in range(draws):
        cache.trim(0)
        steps = streaming_decode(model, [1], cache, drafter=drafter, sampler=sampler)
        tokens, lengths = first_tokens(steps, LENGTH)
        steps_taken += len(lengths)
        counts[np.ravel_multi_index(tokens, (SMALL,) * LENGTH)] += 1
    return counts, steps_taken


def accept_first_child(tree, target_tokens):
    """Wrong: takes the likeliest draft whatever the target says."""
    if tree.num_nodes == 1:
        path = mx.array([0])
    else:
        path = mx.array([0, 1] + [1] * (tree.paths.shape[1] - 2))
    tokens = mx.concatenate([tree.tokens[1:2], target_tokens[path[1:]]])
    new_tokens = tokens if tree.num_nodes > 1 else target_tokens
    return Acceptance(path, new_tokens, tree.depths[path[-1:]])


def test_sampling_draws_from_the_target(monkeypatch):
    probs = exact_distribution([1])
    assert probs.sum() == pytest.approx(1, abs=1e-4)
    counts, steps_taken = sampled_counts(seed=0)
    assert steps_taken < LENGTH * DRAWS  # drafts were accepted
    assert p_value(counts, probs) > 1e-3
    monkeypatch.setattr(decode, "accept", accept_first_child)
    assert p_value(sampled_counts(seed=0, draws=150)[0], probs) < 1e-6


@pytest.mark.parametrize("decoding", ["plain", "fused", "second-pass"])
def test_neither_loop_copies_the_cache(decoding):
    model = make_model("llama")
    mx.eval(model.backbone.model.parameters())
    cache, drafter = model.make_cache(64), None
    cache.reserve(tokens=100_000)
    without = mx.get_active_memory()
    if decoding == "plain":
        steps = plain_decode(model, [1, 2, 3], cache)
    else:
        tree = TreeConfig(kind="full", width=2)
        drafter = StreamDrafter(model, tree, model.num_streams, decoding)
        steps = streaming_decode(model, [1, 2, 3], cache, drafter=drafter)
    for _ in range(3):
        next(steps)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(5):
        next(steps)
    one_layer = cache.nbytes / model.num_layers
    assert mx.get_peak_memory() - before < one_layer / 4
    second = drafter._cache.nbytes if drafter else 0
    kept = cache.nbytes + second + model.mask_bytes
    assert before - without < kept + one_layer / 4  # no buffer is there twice
