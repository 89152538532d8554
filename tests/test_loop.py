"""The speculative loop with several drafters: what they see, and what changing them costs."""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    LAYERS,
    VOCAB,
    FakeClock,
    all_pairs,
    assert_close,
    first_tokens,
    make_base,
    make_model,
    target_of,
    tree_from_parents,
)
from tiny_heads import make_heads

from ssmlx.decoding import call as target_call
from ssmlx.decoding import stopwatch
from ssmlx.decoding.draft_shape import Always, DraftShape, Never
from ssmlx.decoding.drafter import Needs
from ssmlx.decoding.drafting import scratch_rows
from ssmlx.decoding.loop import PromptPlace, plain_decode, prefill, speculative_decode
from ssmlx.decoding.sampling import GREEDY, Sampling
from ssmlx.decoding.step import AnswerPart, DraftTotals
from ssmlx.drafters import draft_model
from ssmlx.drafters.draft_model import DraftModel, DraftModelDrafter
from ssmlx.drafters.head_drafter import HeadDrafter
from ssmlx.drafters.lookahead import LookaheadDrafter
from ssmlx.drafters.lookup import PromptLookupDrafter
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.drafters.text_index import EarlierAnswers
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import PAD_TOKEN
from ssmlx.settings import (
    STREAM_SCHEDULES,
    DraftModelConfig,
    LookaheadConfig,
    PromptLookupConfig,
    PruneConfig,
    SamplingConfig,
    TreeConfig,
)

PROMPT = [3, 1, 4, 1, 5]
PRUNINGS = (
    PruneConfig(),
    PruneConfig(kind="budget", keep=4),
    PruneConfig(kind="threshold", threshold=0.05),
)
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temp": 1.0, "seed": 3},
    "penalised": {"temp": 0.8, "top_k": 6, "seed": 1, "repetition_penalty": 1.3},
}
ADAPTERS = {
    "independent": {},
    "conditional": {"condition_rank": 4},
    "in a window": {"condition_rank": 4, "stream_window": 6},
}


class Drawn:
    """A controller that draws what is drafted at every call, and anew where the call was read; it
    notes what was verified."""

    def __init__(self, shapes, seed):
        self._shapes = shapes
        self._rng = random.Random(seed)
        self.calls = []
        self._draw()

    def _draw(self):
        self._next = self._rng.choice(self._shapes)
        self._late = self._rng.choice(self._shapes)

    def next(self, *, is_read=False):
        return self._late if is_read else self._next

    def record(self, call):
        self.calls.append(call)
        self._draw()


class Turns:
    """A controller that goes through `shapes`, and drafts nothing behind them."""

    def __init__(self, shapes):
        self._shapes = list(shapes)
        self.calls = []

    def next(self, *, is_read=False):
        done = len(self.calls)
        return self._shapes[done] if done < len(self._shapes) else None

    def record(self, call):
        self.calls.append(call)


class Watched:
    """A drafter, and what it is given in the order in which it is given it."""

    def __init__(self, drafter):
        self._drafter = drafter
        self.seen = []

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def start(self, tokens):
        self.seen.append(("start", 0, list(tokens)))
        return self._drafter.start(tokens)

    def follow(self, tokens, position, taps=None):
        self.seen.append(("follow", position, list(tokens)))
        self._drafter.follow(tokens, position, taps)

    def propose(self, verified, shape):
        accepted = verified.acceptance
        shown = (verified.position, accepted.num_accepted, accepted.new_tokens)
        self.seen.append(("propose", shown, shape))
        return self._drafter.propose(verified, shape)

    def text(self):
        """The text that it knows, where it was given each token once and in its place."""
        kinds = [kind for kind, *_ in self.seen]
        assert kinds.count("start") == (1 if kinds else 0)
        text = []
        for kind, place, given in self.seen:
            if kind == "propose":
                position, count, tokens = (array.tolist() for array in place)
                new_tokens = tokens[: count[0] + 1]
                place = position[0] + 1
                if self.needs.host_tokens:  # it was given them already
                    assert text[place:] == new_tokens
                    continue
                given = new_tokens
            assert place == len(text), kind
            text += given
        return text


def drafters_of(model, schedule, sampling=GREEDY):
    """One of every kind that drafts for `model`; the draft model is the target's own base."""
    ahead = LookaheadConfig(window=3, ngram=3, guesses=3)
    text = PromptLookupConfig(ngram=8, num_draft_tokens=7, size=8)
    return [
        StreamDrafter(model, TreeConfig(size=9), model.num_streams, schedule, sampling),
        PromptLookupDrafter(PromptLookupConfig(num_draft_tokens=4, size=8)),
        LookaheadDrafter(ahead),
        DraftModelDrafter(DraftModel(make_base()), DraftModelConfig(num_draft_tokens=2), sampling),
        HeadDrafter(model.backbone, make_heads("medusa", model.backbone), TreeConfig(size=6)),
        PromptLookupDrafter(text, earlier=earlier_answers()),
        PromptLookupDrafter(replace(text, reference=(3, 1, 4, 1, 5, 9, 2, 6))),
    ]


def earlier_answers():
    """A session in which all of what plain decoding says was said before."""
    earlier = EarlierAnswers()
    earlier.add(PROMPT, plain_tokens("greedy", 90))
    return earlier


@lru_cache(maxsize=8)
def model_with(name):
    return make_model("llama", "streams", adapter=ADAPTERS[name])


@lru_cache(maxsize=8)
def plain_tokens(name, count):
    model = StreamFusedModel(Backbone(make_base()))
    sampler = Sampling(SamplingConfig(**SAMPLINGS[name]), VOCAB)
    steps = plain_decode(model, PROMPT, model.make_cache(), sampler=sampler)
    return first_tokens(steps, count)[0]


def decoded(steps, count, totals=None):
    """How many tokens each call advanced by, and all of them: `count` or a few more.

    `totals` gets what was drafted.
    """
    calls = []
    tokens = []
    for step in filter(None, steps):
        calls.append(len(step.tokens))
        tokens += step.tokens
        if totals is not None:
            totals.add_draft_of(step)
        if len(tokens) >= count:
            return calls, tokens
    raise AssertionError("a decoding loop ended")


# --- Any drafter behind any call ---


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("schedule", STREAM_SCHEDULES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_whoever_drafts_behind_a_call_the_text_is_plain_decodings(adapter, schedule, sampling):
    """Plain calls, several shapes of streams, and drafters of every kind, in a random order."""
    expected = plain_tokens(sampling, 90)
    model = model_with(adapter)
    sampler = Sampling(SamplingConfig(**SAMPLINGS[sampling]), VOCAB)
    for prune in PRUNINGS:
        drafters = [Watched(one) for one in drafters_of(model, schedule, sampler)]
        small = [DraftShape("streams", 2, 1), DraftShape("streams", 5, 2)]
        shapes = [None, None, *small, *(one.largest for one in drafters)]
        drawn = Drawn(shapes, f"{adapter} {prune.kind} {sampling}")
        totals = DraftTotals()
        steps = speculative_decode(
            model,
            PROMPT,
            model.make_cache(),
            drafters=drafters,
            controller=drawn,
            prune=prune,
            sampler=sampler,
        )
        calls, tokens = decoded(steps, 80, totals)
        assert tokens == expected[: len(tokens)]
        assert [call.tokens for call in drawn.calls] == calls and max(calls) > 1
        before = np.cumsum([len(PROMPT) - 1, *calls])[:-1]
        assert [call.context for call in drawn.calls] == before.tolist()
        # What is drafted behind a call is verified by the next, which says how large it was.
        asked = None
        for call in drawn.calls:
            if call.shape is not None:
                assert call.shape.drafter == asked.drafter and call.shape.nodes <= asked.nodes
                assert call.tokens <= 1 + asked.levels
            asked = call.drafted
        verified = [call.shape.nodes for call in drawn.calls if call.shape is not None]
        # Some found less than was asked for, and filled it up.
        brought = totals.drafts.values()
        assert sum(one.nodes for one in brought) <= sum(verified)
        assert sum(one.calls for one in brought) == len(verified)
        assert all(one.accepted <= one.drafted <= one.nodes - one.calls for one in brought)
        for one in drafters:
            known = one.text()
            assert known == [*PROMPT, *tokens][: len(known)]


def test_drafts_of_every_kind_are_accepted_in_such_answers():
    """But for those of random heads."""
    model = model_with("conditional")
    drafters = drafters_of(model, "second-pass")
    drawn = Drawn([None, *(one.largest for one in drafters)], 0)
    steps = speculative_decode(
        model, PROMPT, model.make_cache(), drafters=drafters, controller=drawn
    )
    decoded(steps, 200)
    most = dict.fromkeys((one.largest.drafter for one in drafters), 0)
    for call in drawn.calls:
        if call.shape is not None:
            most[call.shape.drafter] = max(most[call.shape.drafter], call.tokens)
    assert most.pop("medusa") > 0 and most.pop("expected-text") > 0
    assert min(most.values()) > 1, most


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("schedule", STREAM_SCHEDULES)
def test_a_drafter_starts_once_and_follows_the_text(schedule, known):
    """From the call on behind which it first drafts; tokens of a cache that nobody names, too."""
    model = model_with("conditional")
    drafters = [Watched(one) for one in drafters_of(model, schedule)]
    first = [one.largest for one in drafters]
    shapes = [None, first[0], None, None, first[1], first[2], None, first[0], first[3], first[0]]
    cache = model.make_cache()
    prefill(model, [7, 7, 2], cache)
    context = [7, 7, 2] if known else []
    steps = speculative_decode(
        model, PROMPT, cache, drafters=drafters, controller=Turns(shapes), context=context
    )
    lengths, tokens = decoded(steps, 40)
    text = [*(context or [PAD_TOKEN] * 3), *PROMPT, *tokens]
    ends = (np.cumsum([0, *lengths]) + 3 + len(PROMPT)).tolist()
    streams, lookup, lookahead, draft, heads, *_ = drafters
    assert heads.seen == []
    for one in drafters[:4]:
        known_text = one.text()
        assert known_text == text[: len(known_text)]
    # A drafter on the device starts before the call under way is read, others behind it; who
    # offers by what the text says follows it from the start.
    assert len(streams.seen[0][2]) == ends[1]
    assert [len(one.seen[0][2]) for one in (lookup, lookahead, draft)] == [
        ends[0],
        ends[6],
        ends[9],
    ]
    # Who drafts behind every call is shown the text by the calls, and by nothing else.
    steps = speculative_decode(model, PROMPT, model.make_cache(), drafters=[streams])
    streams.seen.clear()
    first_tokens(steps, 20)
    assert {kind for kind, *_ in streams.seen} == {"start", "propose"}


class Recorder(StreamDrafter):
    """Keeps its trees, by the position of their roots."""

    def start(self, tokens):
        super().start(tokens)
        self.trees = []

    def propose(self, verified, shape):
        tree = super().propose(verified, shape)
        self.trees.append((verified.root_position, tree))
        return tree

    def by_position(self):
        return {
            int(position.item()): (tree.tokens.tolist(), tree.paths.tolist())
            for position, tree in self.trees
        }


def trees_by_position(model, schedule, turns):
    """What streams draft, where `turns` says for each call whether they, lookup or none do."""
    lookup = PromptLookupDrafter(PromptLookupConfig(num_draft_tokens=4, size=8))
    streams = Recorder(model, TreeConfig(size=7), model.num_streams, schedule)
    shapes = {"streams": streams.largest, "lookup": lookup.largest, "": None}
    steps = speculative_decode(
        model,
        PROMPT,
        model.make_cache(),
        drafters=[streams, lookup],
        controller=Turns([shapes[one] for one in turns]),
    )
    first_tokens(steps, 80)
    return streams.by_position()


ALWAYS = ["streams"] * 80
HOLES = 8 * ["streams", "streams", "", "streams", "", "", "lookup", "lookup", "streams", ""]


@pytest.mark.parametrize("adapter", [{}, {"root_init_rank": 3}], ids=str)
def test_behind_a_hole_streams_draft_what_they_draft_without_one(adapter):
    """Whoever wrote the tokens between, and however many there are."""
    model = make_model("llama", "streams", adapter=adapter)
    for schedule in model.schedules:
        whole = trees_by_position(model, schedule, ALWAYS)
        found = trees_by_position(model, schedule, HOLES)
        shared = whole.keys() & found.keys()
        assert len(shared) > 10
        assert all(found[position] == whole[position] for position in shared)


@pytest.mark.parametrize("window", [6, 256])
def test_behind_a_hole_both_schedules_draft_the_same_trees(window):
    """A window begins by where the root of the last call stands, a plain one's too."""
    model = make_model("llama", "streams", adapter={"stream_window": window})
    fused, second_pass = (trees_by_position(model, one, HOLES) for one in ("fused", "second-pass"))
    assert fused == second_pass and len(fused) > 15


# --- What layers see ---


class Tapped:
    """Guesses right and wrong, and keeps what it is given of the tapped layers."""

    num_parameters = draft_model_calls = cache_bytes = 0
    largest = DraftShape("tapped", 8, 3)

    def __init__(self, continuation, layers):
        self.needs = Needs(taps=layers)
        self.continuation = continuation
        self.rng = random.Random(5)
        self.rows = []  # positions, and taps of them
        self.holes = []
        self.starts = []

    def start(self, tokens):
        self.starts.append(list(tokens))

    def follow(self, tokens, position, taps=None):
        if taps is None:
            self.holes += range(position - 1, position - 1 + len(tokens))
        else:
            self._keep(position - 1, len(tokens), taps)

    def propose(self, verified, shape):
        count = 1 + verified.acceptance.num_accepted.item()
        first = verified.position.item()
        self._keep(first, count, verified.accepted_taps())
        known = self.continuation[first + count :][: 1 + shape.levels]
        # A chain, which is right for some levels, and wrong tokens beside it.
        right = self.rng.randint(0, shape.levels)
        tokens = [*known[: 1 + right], *((t + 1) % VOCAB for t in known[1 + right :])]
        beside = [(t + 2) % VOCAB for t in tokens[1:]]
        nodes = [tokens[0]]
        parents = [0]
        above = 0
        for own, other in zip(tokens[1:], beside, strict=True):
            nodes += [other, own]
            parents += [above, above]
            above = len(nodes) - 1
        return tree_from_parents(nodes, parents)

    def _keep(self, first, count, taps):
        assert set(taps) == set(self.needs.taps)
        assert all(rows.shape[1] >= count for rows in taps.values())
        self.rows.append((first, count, {n: rows[0, :count] for n, rows in taps.items()}))


def hidden_states(model, tokens):
    """[R, D] what enters each layer of mlx-lm's model, and its final norm, of a whole text."""
    hidden = model.model.embed_tokens(mx.array([tokens]))
    entering = []
    for layer in model.model.layers:
        entering.append(hidden[0])
        hidden = layer(hidden, mask="causal", cache=None)
    return [*entering, hidden[0]]


@pytest.mark.parametrize(
    "schedule, prune, step_size, cached",
    all_pairs([None, *STREAM_SCHEDULES], PRUNINGS, [1, 3, 4, 64], [0, 4]),
)
def test_taps_are_the_hidden_states_of_the_text(step_size, prune, schedule, cached):
    """Of the prompt's pieces, plain calls, and trees, pruned or not, with streams beside or not."""
    text = [2, 9, 9, 6, *PROMPT, 8, 0, 7, 3]
    model = make_model()
    expected = first_tokens(plain_decode(model, text, model.make_cache()), 60)[0]
    tapped = Tapped([*text, *expected], tuple(range(LAYERS + 1)))
    drafters = [tapped]
    shapes = [tapped.largest, tapped.largest, tapped.largest, None, None, tapped.largest] * 4
    if schedule is not None:
        streams = StreamDrafter(model, TreeConfig(size=6), model.num_streams, schedule)
        drafters.append(streams)
        shapes[8] = streams.largest
    turns = Turns(shapes)
    cache = model.make_cache()
    if cached:
        prefill(model, text[:cached], cache)
    steps = speculative_decode(
        model,
        text[cached:],
        cache,
        drafters=drafters,
        controller=turns,
        context=text[:cached],
        prune=prune,
        prefill_step_size=step_size,
    )
    tokens, lengths = first_tokens(steps, 40)
    assert tokens == expected[:40]
    assert {1, 2} < set(lengths)
    assert tapped.starts == [text[: cached + 1]]
    entering = hidden_states(target_of("llama", "all"), [*text, *expected])
    seen = []
    for first, count, taps in tapped.rows:
        seen += range(first, first + count)
        for layer, rows in taps.items():
            assert_close(rows, entering[layer][first : first + count])
    # Each place once: of the calls that it did not draft behind, nobody kept the taps.
    assert sorted([*seen, *tapped.holes]) == list(range(cached, max(seen) + 1))
    assert seen == sorted(seen) and tapped.holes


# --- What changing costs ---


@pytest.fixture
def rows(monkeypatch):
    """Of each run of layers: rows, and layers."""
    found = []
    run = Backbone.run

    def counted(self, hidden, first, last, *more):
        found.append((hidden.shape[1], last - first))
        return run(self, hidden, first, last, *more)

    monkeypatch.setattr(Backbone, "run", counted)
    return found


def work_of(model, drafter, shapes, rows):
    """Rows times layers of an answer whose calls draft `shapes`, and the target calls."""
    rows.clear()
    turns = Turns(shapes)
    steps = speculative_decode(
        model, PROMPT, model.make_cache(), drafters=[drafter], controller=turns
    )
    calls = filter(None, steps)
    for _ in range(len(shapes)):
        next(calls)
    return sum(count * layers for count, layers in rows), turns.calls


@pytest.mark.parametrize("plain_before", [1, 4])
@pytest.mark.parametrize("drafted", [1, 2, 5])
def test_beginning_and_ending_to_draft_costs_no_call_and_no_draft(plain_before, drafted, rows):
    """Every row is one that the same calls have where all are plain, or all verify and draft."""
    model = make_model()
    drafter = StreamDrafter(model, TreeConfig(size=7), model.num_streams)
    shape = drafter.largest
    prompt = (len(PROMPT) - 1) * LAYERS
    plain = LAYERS
    second_pass = model.num_streams * (LAYERS - model.insertion_layer)
    verify = shape.nodes * LAYERS
    # All calls alike: the last call of an answer has launched what follows it.
    work, _ = work_of(model, drafter, [None] * 6, rows)
    assert work == prompt + 7 * plain
    work, _ = work_of(model, drafter, [shape] * 6, rows)
    assert work == prompt + plain + 6 * (second_pass + verify)
    # Drafting begins behind a plain call that is under way anyway, and each draft is verified.
    shapes = [*[None] * plain_before, *[shape] * drafted, None, None, None]
    work, calls = work_of(model, drafter, shapes, rows)
    assert [call.shape for call in calls] == [None, *shapes[:-1]]
    num_plain = plain_before + 1 + 3
    assert work == prompt + num_plain * plain + drafted * (second_pass + verify)


def test_a_controller_that_drafts_nothing_makes_plain_decodings_calls(rows):
    model = make_model()
    drafter = StreamDrafter(model, TreeConfig(size=7), model.num_streams)
    rows.clear()
    steps = speculative_decode(
        model, PROMPT, model.make_cache(), drafters=[drafter], controller=Never()
    )
    speculative = first_tokens(steps, 20)
    made = list(rows)
    rows.clear()
    assert first_tokens(plain_decode(model, PROMPT, model.make_cache()), 20) == speculative
    assert made == rows


def test_changing_between_plain_calls_and_drafts_copies_no_cache():
    """A copy of one layer of the cache would show in the peak."""
    model = make_model()
    drafters = drafters_of(model, "second-pass")[1:]
    shapes = [None, drafters[0].largest, drafters[3].largest, None, None, drafters[3].largest] * 20
    cache = model.make_cache(scratch_rows(drafters))
    cache.reserve(more_tokens=20_000)
    steps = filter(
        None,
        speculative_decode(model, PROMPT, cache, drafters=drafters, controller=Turns(shapes)),
    )
    first_tokens(steps, 24)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(24):
        next(steps)
    assert mx.get_peak_memory() - before < cache.nbytes / model.num_layers


@pytest.mark.parametrize("kind", ["plain", 0, 1, 2])
def test_each_calls_tokens_are_taken_once_before_they_are_given(kind):
    """Whatever drafts, and whether or not anything does; the step has what was returned."""
    model = make_model()
    taken = []

    def take(tokens):
        taken.append(AnswerPart(tuple(tokens), text=str(len(taken))))
        return taken[-1]

    if kind == "plain":
        steps = plain_decode(model, PROMPT, model.make_cache(), take=take)
    else:
        drafter = drafters_of(model, "second-pass")[kind]
        shapes = [None, None, *[drafter.largest] * 4, None, None, drafter.largest, None]
        steps = speculative_decode(
            model,
            PROMPT,
            model.make_cache(),
            drafters=[drafter],
            controller=Turns(shapes),
            take=take,
        )
    for count, step in zip(range(1, 13), filter(None, steps), strict=False):
        assert step.part is taken[-1] and len(taken) == count
        assert step.part.tokens == step.tokens


@pytest.mark.parametrize("host_tokens", [True, False])
def test_whoever_asks_for_no_more_gets_no_more(host_tokens):
    """Neither a call nor a draft is begun for an answer that has ended, at whichever call."""
    model = make_model()
    kinds = drafters_of(model, "second-pass")
    drafter = kinds[1] if host_tokens else kinds[0]
    shape = drafter.largest
    for ended in (1, 2, 5):
        lengths = []

        def take(tokens, lengths=lengths, ended=ended):
            lengths.append(len(tokens))
            reason = "stop" if len(lengths) == ended else None
            return AnswerPart(tuple(tokens), finish_reason=reason)

        watched = Watched(drafter)
        steps = filter(
            None,
            speculative_decode(
                model,
                PROMPT,
                model.make_cache(),
                drafters=[watched],
                controller=Always(shape),
                take=take,
            ),
        )
        launched = []
        for _ in range(ended):
            launched.append(next(steps))
        drafts = [kind for kind, *_ in watched.seen if kind == "propose"]
        # A draft on the device is begun while the call is under way, before its tokens are known.
        assert len(drafts) == (ended - 1 if host_tokens else ended)
        assert [len(one.tokens) for one in launched] == lengths


def test_a_draft_models_start_is_no_calls_time(monkeypatch):
    """Within an answer, where it reads the text so far before it drafts."""
    clock = FakeClock()
    monkeypatch.setattr(stopwatch, "now", clock)
    monkeypatch.setattr(draft_model, "PREFILL_STEP_SIZE", 2)
    read = target_call.to_list
    monkeypatch.setattr(target_call, "to_list", lambda array: clock.spend(1.0) or read(array))
    model = StreamFusedModel(Backbone(make_base()))
    config = DraftModelConfig(num_draft_tokens=2)
    drafter = DraftModelDrafter(DraftModel(make_base()), config, GREEDY)
    turns = Turns([None, None, None, *[drafter.largest] * 4])
    steps = speculative_decode(
        model, PROMPT, model.make_cache(), drafters=[drafter], controller=turns
    )
    num_empty = 0
    while len(turns.calls) < 7:
        if next(steps) is None:  # before a pass of the draft model, or of the prompt
            clock.spend(0.5)
            num_empty += 1
    assert num_empty > 4 and drafter.draft_model_calls > 4
    assert [one.seconds for one in turns.calls] == [None, *[1.0] * 6]


def test_drafting_after_a_plain_call_is_no_calls_time(monkeypatch):
    """Nothing was read since that drafting began when the call that verifies it has been read."""
    clock = FakeClock()
    monkeypatch.setattr(stopwatch, "now", clock)
    # To launch is to compute, as it mostly is on a CPU.
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: clock.spend(1.0) or mx.eval(*arrays))
    model = make_model()
    (drafter, *_) = drafters_of(model, "second-pass")
    turns = Turns([None, None, *[drafter.largest] * 3, None, *[drafter.largest] * 2])
    steps = speculative_decode(
        model, PROMPT, model.make_cache(), drafters=[drafter], controller=turns
    )
    first_tokens(steps, 30)
    follows_plain = [b.shape is not None and a.shape is None for a, b in pairwise(turns.calls)]
    assert follows_plain.count(True) == 2
    assert [one.seconds is None for one in turns.calls] == [True, *follows_plain]


def test_what_was_read_is_given_out_before_a_drafter_starts(monkeypatch):
    """Starting it may take long, and whoever has to wait for it may close the loop instead."""
    monkeypatch.setattr(draft_model, "PREFILL_STEP_SIZE", 2)
    model = make_model()
    config = DraftModelConfig(num_draft_tokens=2)
    drafter = DraftModelDrafter(DraftModel(make_base()), config, GREEDY)
    taken = []

    def take(tokens):
        taken.append(AnswerPart(tuple(tokens)))
        return taken[-1]

    turns = Turns([None, None, None, *[drafter.largest] * 4])
    steps = speculative_decode(
        model, PROMPT, model.make_cache(), drafters=[drafter], controller=turns, take=take
    )
    given = []
    num_empty_behind_steps = 0
    while len(given) < 7:
        step = next(steps)
        if step is not None:
            given.append(step.part)
        elif given:
            assert given == taken
            num_empty_behind_steps += 1
    assert num_empty_behind_steps > 2


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("known", [0, 3])
def test_a_piece_of_a_prompt_ends_at_its_place(known, drafts):
    """Which is kept once, and not where the cache holds more from the beginning."""
    model = make_model()
    text = [*range(1, 12)]
    expected, _ = first_tokens(plain_decode(model, text, model.make_cache()), 8)
    prefilled = len(text) - 1
    for offset in range(prefilled + 1):
        cache = model.make_cache()
        prefill(model, text[:known], cache)
        kept = []
        place = PromptPlace(offset, lambda kept=kept, cache=cache: kept.append(cache.offset))
        more = {"context": text[:known], "prefill_step_size": 4, "place": place}
        if drafts:
            more["drafters"] = [PromptLookupDrafter(PromptLookupConfig())]
        decode = speculative_decode if drafts else plain_decode
        steps = decode(model, text[known:], cache, **more)
        offsets = [known]
        for step in steps:
            if step is not None:
                break
            offsets.append(cache.offset)
        cuts = {*range(known, prefilled, 4)}
        if offset >= known:
            cuts = {*range(known, offset, 4), *range(offset, prefilled, 4)}
        assert {*offsets} == cuts | {known, prefilled}
        assert kept == ([offset] if offset >= known else [])
        rest, _ = first_tokens(steps, 7)
        assert [*step.tokens, *rest][:8] == expected


def test_what_keeping_a_place_raises_ends_the_loop():
    model = make_model()
    cache = model.make_cache()
    steps = plain_decode(model, PROMPT, cache, place=PromptPlace(2, lambda: 1 / 0))
    next(steps)
    with pytest.raises(ZeroDivisionError):
        next(steps)
    assert cache.offset == 2 and not list(steps)
