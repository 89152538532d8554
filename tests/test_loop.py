"""The speculative loop with several drafters: what they see, and what changing them costs."""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise

import mlx.core as mx
import numpy as np
import pytest
from device_log import READ, on_clock, peak_growth, rows_by_layer, watched
from loops import Recorder, Turns, ended_after, plain_steps, plain_tokens, speculative_steps
from tiny import (
    LAYERS,
    VOCAB,
    all_pairs,
    assert_close,
    first_tokens,
    make_base,
    make_model,
    target_of,
    tree_from_parents,
)
from tiny_heads import make_heads

from ssmlx.decoding.draft_shape import DraftShape, Never
from ssmlx.decoding.drafter import Needs
from ssmlx.decoding.drafting import scratch_rows
from ssmlx.decoding.loop import PromptPlace, prefill
from ssmlx.decoding.sampling import GREEDY, Sampling
from ssmlx.decoding.step import DraftTotals
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
    earlier.add(PROMPT, plain_answer("greedy"))
    return earlier


@lru_cache(maxsize=8)
def model_with(name):
    return make_model("llama", "streams", adapter=ADAPTERS[name])


@lru_cache(maxsize=1)
def model_of():
    return make_model()


@lru_cache(maxsize=8)
def plain_answer(name):
    model = StreamFusedModel(Backbone(make_base()))
    return plain_tokens(model, PROMPT, 90, Sampling(SamplingConfig(**SAMPLINGS[name]), VOCAB))


# --- Any drafter behind any call ---


@pytest.mark.parametrize(
    "adapter, schedule, sampling, prune",
    all_pairs(ADAPTERS, STREAM_SCHEDULES, SAMPLINGS, PRUNINGS),
)
def test_whoever_drafts_behind_a_call_the_text_is_plain_decodings(
    adapter, schedule, sampling, prune
):
    """Plain calls, several shapes of streams, and drafters of every kind, in a random order."""
    model = model_with(adapter)
    sampler = Sampling(SamplingConfig(**SAMPLINGS[sampling]), VOCAB)
    drafters = [Watched(one) for one in drafters_of(model, schedule, sampler)]
    small = [DraftShape("streams", 2, 1), DraftShape("streams", 5, 2)]
    shapes = [None, None, *small, *(one.largest for one in drafters)]
    drawn = Drawn(shapes, f"{adapter} {prune.kind} {sampling}")
    totals = DraftTotals()
    steps = speculative_steps(
        model, PROMPT, drafters, controller=drawn, prune=prune, sampler=sampler
    )
    tokens, calls = first_tokens(steps, 80, totals)
    assert tokens == plain_answer(sampling)[:80]
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
    first_tokens(speculative_steps(model, PROMPT, drafters, controller=drawn), 200)
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
    controller = Turns(shapes)
    steps = speculative_steps(
        model, PROMPT, drafters, cache, controller=controller, context=context
    )
    tokens, lengths = first_tokens(steps, 40)
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
    streams.seen.clear()
    first_tokens(speculative_steps(model, PROMPT, [streams]), 20)
    assert {kind for kind, *_ in streams.seen} == {"start", "propose"}


def trees_by_position(model, schedule, turns):
    """What streams draft, where `turns` says for each call whether they, lookup or none do."""
    lookup = PromptLookupDrafter(PromptLookupConfig(num_draft_tokens=4, size=8))
    streams = Recorder(model, TreeConfig(size=7), model.num_streams, schedule)
    shapes = {"streams": streams.largest, "lookup": lookup.largest, "": None}
    controller = Turns([shapes[one] for one in turns])
    first_tokens(speculative_steps(model, PROMPT, [streams, lookup], controller=controller), 80)
    return {position: tree for position, *tree in streams.drawn()}


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
    model = model_of()
    expected = plain_tokens(model, text, 60)
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
    steps = speculative_steps(
        model,
        text[cached:],
        drafters,
        cache,
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


def work_of(model, drafter, shapes):
    """Rows times layers of an answer whose calls draft `shapes`, and the target calls."""
    controller = Turns(shapes)
    with rows_by_layer(model) as rows:
        calls = filter(None, speculative_steps(model, PROMPT, [drafter], controller=controller))
        for _ in range(len(shapes)):
            next(calls)
    return sum(rows), controller.calls


@pytest.mark.parametrize("plain_before", [1, 4])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_beginning_and_ending_to_draft_costs_no_call_and_no_draft(plain_before, num_drafts):
    """Every row is one that the same calls have where all are plain, or all verify and draft."""
    model = model_of()
    drafter = StreamDrafter(model, TreeConfig(size=7), model.num_streams)
    shape = drafter.largest
    prompt = (len(PROMPT) - 1) * LAYERS
    plain = LAYERS
    second_pass = model.num_streams * (LAYERS - model.insertion_layer)
    verify = shape.nodes * LAYERS
    # All calls alike: the last call of an answer has launched what follows it.
    work, _ = work_of(model, drafter, [None] * 6)
    assert work == prompt + 7 * plain
    work, _ = work_of(model, drafter, [shape] * 6)
    assert work == prompt + plain + 6 * (second_pass + verify)
    # Drafting begins behind a plain call that is under way anyway, and each draft is verified.
    shapes = [*[None] * plain_before, *[shape] * num_drafts, None, None, None]
    work, calls = work_of(model, drafter, shapes)
    assert [call.shape for call in calls] == [None, *shapes[:-1]]
    num_plain = plain_before + 1 + 3
    assert work == prompt + num_plain * plain + num_drafts * (second_pass + verify)


def test_a_controller_that_drafts_nothing_makes_plain_decodings_calls():
    model = model_of()
    drafter = StreamDrafter(model, TreeConfig(size=7), model.num_streams)
    found = []
    for steps in (
        speculative_steps(model, PROMPT, [drafter], controller=Never()),
        plain_steps(model, PROMPT),
    ):
        with rows_by_layer(model) as rows:
            found.append((first_tokens(steps, 20), rows))
    assert found[0] == found[1]


def test_changing_between_plain_calls_and_drafts_copies_no_cache():
    """A copy of one layer of the cache would show in the peak."""
    model = model_of()
    drafters = drafters_of(model, "second-pass")[1:]
    shapes = [None, drafters[0].largest, drafters[3].largest, None, None, drafters[3].largest] * 20
    cache = model.make_cache(scratch_rows(drafters))
    cache.reserve(more_tokens=20_000)
    steps = speculative_steps(model, PROMPT, drafters, cache, controller=Turns(shapes))
    first_tokens(steps, 24)
    assert peak_growth(filter(None, steps), 24) < cache.nbytes / model.num_layers


@pytest.mark.parametrize("ended", [1, 2, 5])
@pytest.mark.parametrize("host_tokens", [True, False])
def test_whoever_asks_for_no_more_gets_no_more(host_tokens, ended):
    """No draft is begun for an answer that has ended, at whichever call."""
    model = model_of()
    drafter = Watched(drafters_of(model, "second-pass")[1 if host_tokens else 0])
    steps = speculative_steps(model, PROMPT, [drafter], take=ended_after(ended))
    given = [*islice(filter(None, steps), ended)]
    drafts = [kind for kind, *_ in drafter.seen if kind == "propose"]
    # A draft on the device is begun while the call is under way, before its tokens are known.
    assert len(drafts) == (ended - 1 if host_tokens else ended) and len(given) == ended


@pytest.fixture
def small_pieces(monkeypatch):
    """A draft model reads a text in pieces of two tokens."""
    monkeypatch.setattr(draft_model, "PREFILL_STEP_SIZE", 2)


def late_draft_model():
    """A draft model's drafter, and a controller that begins to draft within the answer."""
    config = DraftModelConfig(num_draft_tokens=2)
    drafter = DraftModelDrafter(DraftModel(make_base()), config, GREEDY)
    return drafter, Turns([None, None, None, *[drafter.largest] * 4])


def test_a_draft_models_start_is_no_calls_time(small_pieces):
    """Within an answer, where it reads the text so far before it drafts."""
    model = StreamFusedModel(Backbone(make_base()))
    drafter, controller = late_draft_model()
    num_empty = 0
    with on_clock(read=1.0) as clock:
        steps = speculative_steps(model, PROMPT, [drafter], controller=controller)
        while len(controller.calls) < 7:
            if next(steps) is None:  # before a pass of the draft model, or of the prompt
                clock.spend(10.0)
                num_empty += 1
    assert num_empty > 4 and drafter.draft_model_calls > 4
    prompts, *calls = (one.seconds for one in controller.calls)
    assert prompts is None and max(calls) <= 2.0  # a read of its own, and one of the draft's


def test_drafting_after_a_plain_call_is_no_calls_time():
    """Nothing was read since that drafting began when the call that verifies it has been read."""
    model = model_of()
    (drafter, *_) = drafters_of(model, "second-pass")
    shape = drafter.largest
    controller = Turns([None, None, shape, shape, shape, None, shape, shape])
    with on_clock(launch=1.0):
        first_tokens(speculative_steps(model, PROMPT, [drafter], controller=controller), 30)
    calls = controller.calls
    follows_plain = [b.shape is not None and a.shape is None for a, b in pairwise(calls)]
    assert follows_plain.count(True) == 2
    assert [one.seconds is None for one in calls] == [True, *follows_plain]


def test_what_was_read_is_given_out_before_a_drafter_starts(small_pieces):
    """Starting it may take long, and whoever has to wait for it may close the loop instead."""
    model = model_of()
    drafter, controller = late_draft_model()
    num_given = num_empty_between = 0
    with watched(model) as device:
        steps = speculative_steps(model, PROMPT, [drafter], controller=controller)
        while num_given < 7:
            if next(steps) is not None:
                num_given += 1
            elif num_given:
                assert device.events.count(READ) == num_given
                num_empty_between += 1
    assert num_empty_between > 2


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("known", [0, 3])
def test_a_piece_of_a_prompt_ends_at_its_place(known, drafts):
    """Which is kept once, and not where the cache holds more from the beginning."""
    model = model_of()
    text = [*range(1, 12)]
    expected = plain_tokens(model, text, 8)
    prefilled = len(text) - 1
    for offset in range(prefilled + 1):
        cache = model.make_cache()
        prefill(model, text[:known], cache)
        kept = []
        place = PromptPlace(offset, lambda kept=kept, cache=cache: kept.append(cache.offset))
        more = {"context": text[:known], "prefill_step_size": 4, "place": place}
        steps = plain_steps(model, text[known:], cache, **more)
        if drafts:
            lookup = PromptLookupDrafter(PromptLookupConfig())
            steps = speculative_steps(model, text[known:], [lookup], cache, **more)
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
    model = model_of()
    cache = model.make_cache()
    steps = plain_steps(model, PROMPT, cache, place=PromptPlace(2, lambda: 1 / 0))
    next(steps)
    with pytest.raises(ZeroDivisionError):
        next(steps)
    assert cache.offset == 2 and not list(steps)
