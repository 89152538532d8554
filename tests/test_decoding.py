"""The decoding loop and its stages: exact tokens and step counts."""

import math
import random
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise

import mlx.core as mx
import numpy as np
import pytest
from guessed import compute_guesses
from loops import (
    Recorder,
    Turns,
    continuation,
    decide_plainly,
    ended_after,
    plain_steps,
    plain_tokens,
    speculative_steps,
)
from mlx_lm.models.cache import make_prompt_cache
from refusals import mentions, refusal
from tiny import (
    ARCHITECTURES,
    LATENT,
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
    tree_from_parents,
)

from ssmlx.api import stream_generate
from ssmlx.decoding.accept import accept
from ssmlx.decoding.draft_shape import Always, DraftShape, Never
from ssmlx.decoding.drafter import Needs
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.prune import (
    may_drop_nodes,
    nodes_over_threshold,
    nodes_within_budget,
    surviving_nodes,
    transition_logprobs,
)
from ssmlx.decoding.sampling import (
    Sampling,
)
from ssmlx.decoding.step import DraftTotals
from ssmlx.drafters.copies import TextOnDevice
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.masks import window_start
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN, grow_tree
from ssmlx.settings import (
    STREAM_SCHEDULES,
    PruneConfig,
    SamplingConfig,
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
OTHERS = [name for name in ARCHITECTURES if name != "llama"]
SCOPES = ["all", "streams"]
TREES = (
    TreeConfig(kind="full", width=1), TreeConfig(kind="full", width=3),
    TreeConfig(kind="best", size=12), TreeConfig(kind="best", size=7, width=2),
    TreeConfig(kind="best", size=1),
)  # fmt: skip
PRUNINGS = (
    PruneConfig(), PruneConfig(kind="budget", keep=4),
    PruneConfig(kind="threshold", threshold=0.05), PruneConfig(kind="threshold", threshold=1.0),
)  # fmt: skip


@lru_cache(maxsize=12)
def model_of(architecture="llama", scope="all", **adapter):
    return make_model(architecture, scope, adapter=adapter)


@lru_cache(maxsize=12)
def mlx_lm_answer(architecture, scope):
    return mlx_lm_tokens(target_of(architecture, scope), PROMPT, 24)


@lru_cache(maxsize=4)
def bare_model(architecture="llama"):
    sizes = LATENT if architecture in LATENT_FAMILIES else {}
    return StreamFusedModel(Backbone(make_base(architecture, **sizes)))


@lru_cache(maxsize=4)
def greedy_tokens(architecture="llama"):
    return plain_tokens(bare_model(architecture), PROMPT, 60)


@lru_cache(maxsize=1)
def greedy_of_shared():
    return plain_tokens(model_of(), PROMPT, 40)


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
    num_parameters = draft_model_calls = cache_bytes = 0

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
    steps = speculative_steps(model, PROMPT, [drafter], cache)
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host_tokens", [False, True])
def test_scripted_mixtures_across_cache_growth(seed, host_tokens):
    rng = random.Random(seed)
    script = [(rng.randint(0, 5), rng.randint(0, 2)) for _ in range(10)]
    run_script(script, step=4, wrong=rng.randint(0, 3), seed=seed, host_tokens=host_tokens)


@pytest.mark.parametrize(
    "architecture, right, host_tokens",
    all_pairs(LATENT_FAMILIES, [[0] * 4, [4] * 4, [4, 0, 2, 0, 1, 4, 3]], [False, True]),
)
def test_scripted_acceptance_with_latent_attention(architecture, right, host_tokens):
    script = [(levels, 1) for levels in right]
    run_script(script, 4, architecture, wrong=1, host_tokens=host_tokens)


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


def streamed(model, count, *, tree=TREES[2], prompt=PROMPT, step=256, **settings):
    """Tokens, and how many each call brought."""
    cache = TreeCache(model.num_layers, step=step)
    drafter = StreamDrafter(model, tree, model.num_streams)
    return first_tokens(speculative_steps(model, prompt, [drafter], cache, **settings), count)


KINDS = {
    "independent": {},
    "conditional": {"condition_rank": 4},
    "rooted": {"condition_rank": 4, "root_init_rank": 3},
}


@pytest.mark.parametrize("architecture, scope, kind, tree, prune", [
    *all_pairs(["llama"], SCOPES, KINDS, TREES, PRUNINGS),
    *slow(*all_pairs(OTHERS, SCOPES, KINDS, TREES, PRUNINGS)),
], ids=str)  # fmt: skip
def test_speculative_equals_plain_and_mlx_lm(architecture, scope, kind, tree, prune):
    model = model_of(architecture, scope, **KINDS[kind])
    tokens, lengths = streamed(model, 24, tree=tree, prune=prune, step=8)
    assert tokens == mlx_lm_answer(architecture, scope)
    assert max(lengths) <= 4
    if prune.threshold == 1.0 or tree.size == 1:
        assert len(lengths) == 24  # nothing is left of the draft
    elif tree.width != 1:
        assert len(lengths) < 24  # something was accepted


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
    model = model_of()
    prompt = [(7 * i + 2) % VOCAB for i in range(length)]
    expected = plain_tokens(model, prompt, 12)
    tokens, _ = streamed(model, 12, prompt=prompt, step=4, prefill_step_size=4)
    assert tokens == expected
    cache = model.make_cache()
    ends = []
    steps = plain_steps(model, prompt, cache, prefill_step_size=4)
    while (step := next(steps)) is None:
        ends.append(cache.offset)
    pieces = list(range(0, length - 1, 4))
    assert ends == ([*pieces, length - 1] if pieces else [])
    rest, _ = first_tokens(steps, 11)
    assert [*step.tokens, *rest] == expected


@pytest.mark.parametrize("settings", [
    {"logprobs": 2}, {"temp": 1.0, "top_p": 0.9, "seed": 3},
    {"temp": 0.7, "seed": 1, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": 0},
], ids=str)  # fmt: skip
def test_plain_decoding_is_the_oracles(settings):
    """Which calls the model itself, on a token at a time, in mlx-lm's caches."""
    model = bare_model()
    sampling = Sampling(SamplingConfig(**settings), VOCAB)
    expected = [*islice(decide_plainly(model, PROMPT, sampling), 20)]
    steps = [*islice(filter(None, plain_steps(model, PROMPT, sampler=sampling)), 20)]
    assert [step.tokens for step in steps] == [(token,) for token, _ in expected]
    for step, (_, wanted) in zip(steps, expected, strict=True):
        assert (step.logprobs is None) == (wanted is None)
        for found in step.logprobs or ():
            assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
            likely = [one.logprob for one in (found, wanted)]
            assert likely[0] == pytest.approx(likely[1], abs=1e-4)


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
    model = model_of()
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
    plain = greedy_of_shared()[:30]
    ends = sorted(set(plain), key=plain.index)
    for end in ends if source == "tokenizer" else ends[1:3]:
        model = model_of() if source == "tokenizer" else model_of(end_token_ids=(end,))
        expected = plain[: plain.index(end) + 1]
        for decoding in ("plain", "speculative"):
            settings = {"decoding": decoding, "max_tokens": 30, **WIDE}
            tokens, found = answer(model, eos=end if source == "tokenizer" else None, **settings)
            assert tokens == expected
            assert found[-1].finish_reason == "stop"
            assert "".join(r.text for r in found).split() == [f"w{t}" for t in expected[:-1]]


def test_the_context_ends_an_answer():
    model = make_model(max_position_embeddings=16)
    expected = greedy_of_shared()[:30]
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
    model = model_of()
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


PAIR = (TreeConfig(kind="full", width=2), TreeConfig(kind="best", size=7))


def drawn(model, schedule, *, count=22, tree=PAIR[0], prune=PRUNINGS[0]):
    """Tokens, how many each call brought, and every tree that was proposed on the way."""
    drafter = Recorder(model, tree, model.num_streams, schedule)
    cache = TreeCache(model.num_layers, step=4)  # grows often
    tokens, lengths = first_tokens(
        speculative_steps(model, PROMPT, [drafter], cache, prune=prune), count
    )
    return tokens, lengths, drafter.drawn(len(lengths))


DRAFTING = {
    "independent": {},
    "conditional": {"condition_rank": 4},
    "in a window": {"stream_window": 6},
}


@pytest.mark.parametrize("architecture, scope, kind, tree, prune", [
    *all_pairs(["llama"], SCOPES, DRAFTING, PAIR, PRUNINGS[:3]),
    *slow(*all_pairs(OTHERS, SCOPES, DRAFTING, PAIR, PRUNINGS[:3])),
], ids=str)  # fmt: skip
def test_both_schedules_draft_the_same_trees(architecture, scope, kind, tree, prune):
    model = model_of(architecture, scope, **DRAFTING[kind])
    fused = drawn(model, "fused", tree=tree, prune=prune)
    assert drawn(model, "second-pass", tree=tree, prune=prune) == fused
    assert max(fused[1]) > 1  # something was accepted


@pytest.mark.parametrize("root", [{}, {"root_init_rank": 3}], ids=["f alone", "rooted"])
def test_a_replay_knows_the_window_at_every_place(root):
    model = model_of(stream_window=4, **root)
    chain = TreeConfig(kind="full", width=1)
    prompt = [3, 1, 7, 7, 5, 9, 2, 6, 5, 7, 7, 3, 5, 8]
    answer = plain_tokens(model, prompt, 12)
    guesses = compute_guesses(model, prompt, answer, 2)
    for place in range(9):
        drafter = Recorder(model, chain, 3)
        first_tokens(speculative_steps(model, [*prompt, *answer[:place]], [drafter]), 1)
        ((_, tokens, _),) = drafter.drawn(1)
        assert tokens == [answer[place], *guesses.tokens[place, :, 0]]
    everything = compute_guesses(model_of(**root), prompt, answer, 2)
    assert (everything.tokens != guesses.tokens).any()


def test_streams_that_start_from_the_root_guess_otherwise_and_by_themselves():
    plain, rooted = (model_of(root_init_rank=rank) for rank in (0, 3))
    answer, lengths, trees = drawn(rooted, "second-pass", tree=PAIR[1])
    guesses = [compute_guesses(model, PROMPT, answer, 6) for model in (plain, rooted)]
    assert (guesses[0].tokens != guesses[1].tokens).any() and max(lengths) > 1
    for place, (_, tokens, _) in zip(np.cumsum(lengths) - 1, trees, strict=True):
        ranked = (mx.array(array[place]) for array in (guesses[1].tokens, guesses[1].logprobs))
        grown = grow_tree(mx.array([answer[place]]), *ranked, PAIR[1])
        assert grown.tokens.tolist() == tokens
    line = refusal(StreamDrafter, rooted, PAIR[0], 3, "fused")
    assert mentions(line, "schedule=fused", "schedule=second-pass")
    with pytest.raises(ValueError):
        rooted.insert(mx.zeros((1, 1, 32)), 3)


def test_streams_that_also_start_without_the_root_do_so_where_they_run_fused():
    rooted = {"condition_rank": 4, "root_init_rank": 3, "starts_without_root": True}
    both, alone = (make_model(adapter=rooted) for _ in range(2))
    alone.streams = replace(alone.streams, root_init=None)
    for tree, prune in zip((*PAIR, PAIR[0]), PRUNINGS[:3], strict=True):
        fused = drawn(both, "fused", tree=tree, prune=prune)
        assert fused == drawn(alone, "second-pass", tree=tree, prune=prune)
        second = drawn(both, "second-pass", tree=tree, prune=prune)
        assert fused[0] == second[0] and fused[2] != second[2]
        assert max(fused[1]) > 1  # something was accepted


def test_a_second_pass_costs_the_same_memory_behind_any_context():
    model = model_of(stream_window=32)
    sizes = []
    for length in (356, 1636):  # as full as each other in the cache, which grows by 256
        drafter = StreamDrafter(model, PAIR[0], 3)
        first_tokens(speculative_steps(model, [5] * length, [drafter]), 40)
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
        fused = drawn(model, "fused", prune=prune)
        assert drawn(model, "second-pass", prune=prune) == fused
    assert drawn(model_of("llama", scope), "second-pass")[2] != fused[2]


def test_a_drafter_starts_anew_with_every_sequence():
    model = model_of()
    trees = {}
    for schedule in STREAM_SCHEDULES:
        drafter = Recorder(model, PAIR[0], 3, schedule)
        trees[schedule] = []
        for prompt in (PROMPT, [9, 2, 6, 5, 3]):
            _, lengths = first_tokens(speculative_steps(model, prompt, [drafter]), 12)
            trees[schedule] += drafter.drawn(len(lengths))
    assert trees["fused"] == trees["second-pass"]


# --- drafts that pause and change, and answers that go on ---


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("pauses", [False, True])
def test_an_answer_that_ended_can_go_on(after, pauses):
    """What was built after its end, and not run, leaves no trace: in neither tokens nor cache."""
    model = model_of()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    shapes = [drafter.largest, drafter.largest, *[None, None] * pauses] * 20

    def decoded(**more):
        return first_tokens(
            speculative_steps(model, PROMPT, [drafter], controller=Turns(shapes), **more), 30
        )

    expected = decoded()
    assert decoded(take=ended_after(*range(after, 30, after))) == expected
    assert expected[0] == greedy_of_shared()[:30]


@pytest.mark.parametrize("first", [0, 4])
def test_drafting_can_pause(first):
    """A pause is plain decoding, and the streams find the cache as it is afterwards."""
    model = model_of()
    lengths = {}
    for schedule in STREAM_SCHEDULES:
        drafter = StreamDrafter(model, PAIR[1], model.num_streams, schedule)
        largest = drafter.largest
        shapes = [*[largest] * first, *[None] * 5, *[largest] * 40]
        controller = Turns(shapes)
        steps = speculative_steps(model, PROMPT, [drafter], controller=controller)
        tokens, lengths[schedule] = first_tokens(steps, 40)
        assert tokens == greedy_of_shared()
        # What is drafted after a call is verified by the next.
        assert controller.verified == [None, *shapes][: len(controller.verified)]
    fused = lengths["fused"]
    assert fused == lengths["second-pass"]
    assert fused[first + 1 : first + 6] == [1] * 5 and max(fused[first + 6 :]) > 1


def test_another_shape_may_be_drafted_at_every_call():
    model = model_of()
    drafter = StreamDrafter(model, TreeConfig(size=12), model.num_streams)
    levels = model.num_streams
    small = [DraftShape("streams", size, min(size - 1, levels)) for size in (2, 3, 6)]
    shapes = [*small, drafter.largest, drafter.largest, None]
    controller = Turns(10 * shapes)
    steps = speculative_steps(model, PROMPT, [drafter], controller=controller)
    tokens, lengths = first_tokens(steps, 40)
    assert tokens == greedy_of_shared() and max(lengths) > 2
    assert controller.verified[1:7] == shapes


def test_what_a_controller_does_not_ask_for_is_the_drafters_largest_tree():
    model = model_of()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    always, never = Always(drafter.largest), Never()
    found = [
        first_tokens(speculative_steps(model, PROMPT, [drafter], controller=one), 30)
        for one in (None, always, never)
    ]
    assert found[0] == found[1] and found[2] == (found[0][0], [1] * 30)
    assert len(found[0][1]) < 30


@pytest.mark.parametrize("context", [PROMPT, ()])
def test_copies_are_of_the_whole_text(context, monkeypatch):
    """Of what plain calls wrote between, and of a cache's tokens if they are known."""
    model = model_of(condition_rank=3)
    seen = []
    look_up = TextOnDevice.find_continuations

    def noted(text, positions, count):
        seen.append((positions, look_up(text, positions, count)))
        return seen[-1][1]

    monkeypatch.setattr(TextOnDevice, "find_continuations", noted)
    cache = model.make_cache()
    drafter = StreamDrafter(model, PAIR[1], model.num_streams)
    prefill(model, PROMPT, cache)
    shape = DraftShape("streams", 5, 2)
    controller = Turns(10 * [shape, shape, None, shape, None, None])
    steps = speculative_steps(
        model, [5, 9], [drafter], cache, controller=controller, context=context
    )
    tokens, _ = first_tokens(steps, 60)
    text = [*(context or [PAD_TOKEN] * len(PROMPT)), 5, 9, *tokens]
    assert len(seen) > 15
    for positions, found in seen:
        ((position, follows),) = zip(positions.tolist(), found.tolist(), strict=True)
        assert follows == continuation(text[: position + 1], len(follows))
