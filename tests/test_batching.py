"""Answers that are open at once: each its own, whoever comes, goes, stalls or fails beside it.

What they cost each other is read off the model's forward calls: the rows of each, and its tokens.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from weakref import WeakSet

import mlx.core as mx
import pytest
from forwards import let_forwards_take, watch_engine
from real import tokens_of, words, write_base
from tiny import cost_shared_calls

import ssmlx
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.generation.batching import is_sharing_faster
from ssmlx.generation.prompt_pieces import PIECE_SECONDS, PieceSchedule
from ssmlx.loading.load import load_base
from ssmlx.policy.controller import ExpectedCall
from ssmlx.settings import PromptLookupConfig

LENGTH = 12
MOST_UNREAD = 32  # tokens that are computed for a reader who stays away
ADAPTERS = ("streams", "all", "none")
QUESTIONS = [words(3, i) for i in range(4)]
PLAIN = {"decoding": "plain"}
LOOKUP = {"decoding": "speculative", "drafter": "prompt-lookup"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Texts of it may have 4,096 tokens."""
    return write_base(tmp_path_factory.mktemp("roomy") / "base", context=4096)


@pytest.fixture(scope="module")
def engine(base, folders):
    with ssmlx.Engine(str(base), (folders["streams"],), dtype="float32") as engine:
        yield engine


@pytest.fixture
def forwards(engine, monkeypatch):
    return watch_engine(monkeypatch, engine)


@pytest.fixture
def sharing(forwards, monkeypatch):
    """Answers that are read at once share calls, whatever rows cost; the model's forward calls."""
    cost_shared_calls(monkeypatch, lambda rows: 0.01)
    return forwards


@pytest.fixture(scope="module")
def alone(engine, folders):
    """The first tokens that plain decoding, without others, answers a question with."""
    known = {}

    def alone(question, count=LENGTH, adapter="streams"):
        key = (adapter, str(question))
        if len(known.get(key, ())) < count:
            settings = {"max_tokens": count, "deterministic": True, **PLAIN}
            known[key] = tokens_of(engine.stream(question, adapter=folders[adapter], **settings))
        return known[key][:count]

    return alone


@pytest.fixture
def ask(engine, folders):
    """Ask, with prompts that are known in this test alone."""
    prompts = ssmlx.PromptCache()
    opened = WeakSet()

    def ask(question, adapter="streams", **settings):
        own = {"max_tokens": LENGTH, "prefill_step_size": 8, "prompt_cache": prompts}
        answer = engine.stream(question, adapter=folders[adapter], **{**own, **settings})
        opened.add(answer)
        return answer

    yield ask
    for answer in opened:  # of a test that failed
        answer.close()


class TurnEndedError(Exception):
    """Raised to a reader whose turn brought no segment, see `end_turn`."""


def end_turn(done, total):
    """As `progress` of an answer: its reader gets the error, and may take another turn."""
    raise TurnEndedError


def take_turn(answer):
    """One turn of a reader: the segment that it brought, or None."""
    try:
        return next(answer, None)
    except TurnEndedError:
        return None


def read_on(answer):
    """The segments that are left, however many turns each takes."""
    found = []
    while not answer.is_over:
        found.append(take_turn(answer))
    return [one for one in found if one]


def told(segments):
    """Each token with the log probability that was told of it."""
    return [
        (token, one.token, round(one.logprob, 3), len(one.top))
        for segment in segments
        for token, one in zip(segment.tokens, segment.logprobs, strict=True)
    ]


def most_rows(forwards, *readers):
    """The most rows of the calls that a few more segments take; `readers` are pairs of an answer
    and what was heard of it."""
    del forwards[:]
    for _ in range(3):
        for answer, heard in readers:
            heard.append(next(answer))
    return max(one.rows for one in forwards)


SAMPLED = {"temp": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_threads_hear_what_each_would_hear_alone(ask, sharing, settings):
    alone = {
        (adapter, text): tokens_of(ask(text, adapter, deterministic=True, **settings))
        for adapter in ADAPTERS
        for text in QUESTIONS
    }

    def some(seed):
        chance = random.Random(seed)
        wrong = []
        for _ in range(3):
            asked = chance.choice(list(alone))
            stop_at = chance.choice([None, None, 0, 1, 3])
            with ask(asked[1], asked[0], **settings) as segments:
                found = []
                for number, segment in enumerate(segments):
                    found.append(segment)
                    if number == stop_at:
                        break
            whole = alone[asked]
            expected = whole if stop_at is None else whole[: len(tokens_of(found))]
            wrong += [] if tokens_of(found) == expected else [asked]
            if stop_at is None and segment.finish_reason != "length":
                wrong.append(segment)
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert [one for found in pool.map(some, range(8)) for one in found] == []
    assert sharing.num_shared > LENGTH


def test_answers_come_and_go_in_any_order(engine, ask, sharing):
    whole = {text: list(ask(text, deterministic=True, logprobs=1)) for text in QUESTIONS}
    chance = random.Random(0)
    open_ones = []
    done = 0
    while done < 20:
        if len(open_ones) < 5 and chance.random() < 0.4:
            text = chance.choice(QUESTIONS)
            open_ones.append((text, ask(text, logprobs=1), []))
        elif open_ones:
            text, answer, found = one = chance.choice(open_ones)
            found += [part for part in [next(answer, None)] if part]
            if answer.is_over or chance.random() < 0.05:
                answer.close()
                open_ones.remove(one)
                done += 1
            assert told(found) == told(whole[text])[: len(tokens_of(found))]
    for _, answer, _ in open_ones:
        answer.close()
    assert sharing.num_shared > LENGTH and engine.memory_pool.running == 0
    del sharing[:]
    assert tokens_of(ask(QUESTIONS[0])) == tokens_of(whole[QUESTIONS[0]])
    assert sharing.num_shared == 0, "nobody is left to share calls with"


def test_an_answer_drafts_again_when_it_is_alone(ask, alone, sharing):
    right = PromptLookupConfig(reference=alone(QUESTIONS[0], 40))
    answer = ask(QUESTIONS[0], max_tokens=40, prompt_lookup=right, **LOOKUP)
    found = [next(answer)]
    other = ask(QUESTIONS[1])
    for _ in range(4):
        assert len(next(other).tokens) == len(found.append(next(answer)) or found[-1].tokens) == 1
    other.close()
    found += list(answer)
    assert tokens_of(found) == alone(QUESTIONS[0], 40) and len(found) < 20


def test_an_answer_that_comes_back_from_shared_calls_has_the_draft_cache_it_had(
    ask, alone, sharing, base
):
    draft = DraftModel(load_base(base, "float32")[0].model)
    settings = {"max_tokens": 60, "drafter": draft, "decoding": "speculative"}
    answer = ask(QUESTIONS[0], **settings)
    found = [next(answer), next(answer)]
    before = draft.cache_bytes
    for count in range(3):
        other = ask(QUESTIONS[1])
        for _ in range(4):
            next(other)
            found.append(next(answer))
        other.close()
        found += [next(answer), next(answer)]
        assert draft.cache_bytes == before > 0, count
    found += list(answer)
    assert tokens_of(found) == alone(QUESTIONS[0], 60)
    calls = [one.draft_model_calls for one in found]
    assert calls == sorted(calls) and calls[-1] > 12


@pytest.mark.parametrize("others", [[[8]], [[9, 10, 11]], []])
def test_a_prompt_of_one_token_has_a_row(ask, alone, sharing, others):
    """First of all, beside another one, or beside a longer one; or before any comes."""
    wanted = [alone(one) for one in ([7], *others)]
    open_ones = [ask(one, "none") for one in ([7], *others)]
    steps = zip(*open_ones, strict=True)
    assert [*map(tokens_of, zip(*steps, strict=True))] == wanted
    assert (sharing.num_shared > 0) == bool(others)


def test_an_end_in_the_middle_is_heard(ask, sharing):
    whole = list(ask(QUESTIONS[0], deterministic=True, **PLAIN))
    settings = {"stop": (whole[5].text.strip(),)}
    alone = list(ask(QUESTIONS[0], deterministic=True, **PLAIN, **settings))
    with ask(QUESTIONS[1], max_tokens=100) as other:
        next(other)
        segments = list(ask(QUESTIONS[0], **settings))
    assert [one.text for one in segments] == [one.text for one in alone]
    assert segments[-1].finish_reason == "stop" and len(segments) < LENGTH


@pytest.mark.parametrize("length", [50, LENGTH])
def test_a_slow_reader_stops_nobody(ask, alone, sharing, length):
    """It gets no more than so many tokens ahead, nor any after its answer's end."""
    expected = alone(QUESTIONS[0], length)
    slow = ask(QUESTIONS[0], max_tokens=length), []
    quick = [(ask(text, max_tokens=50), []) for text in QUESTIONS[1:3]]
    assert most_rows(sharing, slow, *quick) == 3
    del sharing[:]
    for _ in range(MOST_UNREAD + 6):
        for answer, heard in quick:
            heard.append(next(answer))
    rest, found = slow
    ahead = min(MOST_UNREAD, length - len(found))
    assert ahead <= sum(one.rows == 3 for one in sharing) <= ahead + 2, "some may run in vain"
    assert most_rows(sharing, *quick) == 2
    del sharing[:]
    found += [next(rest) for _ in range(ahead)]
    assert not sharing, "these were there"
    assert tokens_of([*found, *rest]) == expected
    assert bool(sharing) == (length > LENGTH)
    for text, (answer, heard) in zip(QUESTIONS[1:], quick, strict=False):
        assert tokens_of([*heard, *answer]) == alone(text, 50)


def test_a_reader_that_has_caught_up_shares_calls_again(ask, alone, sharing):
    slow, quick = readers = [(ask(text, max_tokens=60), []) for text in QUESTIONS[:2]]
    assert most_rows(sharing, *readers) == 2
    quick[1].extend(next(quick[0]) for _ in range(MOST_UNREAD + 2))
    assert most_rows(sharing, quick) == 1
    slow[1].extend(next(slow[0]) for _ in range(MOST_UNREAD + 2))
    assert most_rows(sharing, *readers) == 2
    for text, (rest, heard) in zip(QUESTIONS, readers, strict=False):
        assert tokens_of([*heard, *rest]) == alone(text, 60)


@pytest.mark.parametrize("begins, goes_on, rows", [(0.6, 1.02, 2), (9.0, 0.98, 1)])
def test_answers_stay_in_their_mode_if_both_are_as_fast(
    ask, forwards, monkeypatch, begins, goes_on, rows
):
    """A shared call takes as many plain calls as it has rows, but for 2 %."""
    calls_a_row = begins
    cost_shared_calls(monkeypatch, lambda rows: calls_a_row * rows)
    readers = [(ask(text, max_tokens=60, **PLAIN), []) for text in QUESTIONS[:2]]
    assert most_rows(forwards, *readers) == rows
    calls_a_row = goes_on
    with ask(QUESTIONS[2], **PLAIN) as other:
        next(other)
    for _ in range(3):
        assert most_rows(forwards, *readers) == rows


@pytest.mark.parametrize(
    ("expected", "cost", "is_faster"),
    [
        ([(3.0, 1.5), (3.0, 1.5)], 1.2, False),  # 2 in turns, 1.67 in shared calls
        ([(3.0, 1.5)] * 3, 1.3, True),  # 2.31 in shared calls
        ([(1.5, 1.5), (3.0, 1.5)], 1.2, True),  # 1.5 in turns
    ],
)
def test_calls_are_shared_if_that_brings_more_tokens(expected, cost, is_faster):
    calls = [ExpectedCall(*one) for one in expected]
    assert is_sharing_faster(calls, cost, is_shared_now=False) == is_faster


def test_an_answer_that_is_held_leaves_others_their_drafts(ask, alone, sharing, monkeypatch):
    """It is open, and not read on: others wait for it in vain for a call each, and only once."""
    right = PromptLookupConfig(reference=alone(QUESTIONS[0], 40))
    settings = {"max_tokens": 40, **LOOKUP}
    *_, undisturbed = ask(QUESTIONS[0], deterministic=True, prompt_lookup=right, **settings)
    with monkeypatch.context() as patch:
        cost_shared_calls(patch, lambda rows: 100.0)
        held = [(ask(text, **settings), []) for text in QUESTIONS[1:3]]
        assert most_rows(sharing, *held) == 1
    for vain in (3, 0):
        found = list(ask(QUESTIONS[0], prompt_lookup=right, **settings))
        assert tokens_of(found) == alone(QUESTIONS[0], 40)
        assert found[-1].target_calls <= undisturbed.target_calls + vain < 20
    for text, (rest, heard) in zip(QUESTIONS[1:], held, strict=False):
        assert tokens_of([*heard, *rest]) == alone(text, 40)


# --- prompts and calls ---


LONG = [30, 2] * 160
IN_FIVE_PIECES = {"prefill_step_size": 64, **PLAIN}


@pytest.fixture
def timed(engine, monkeypatch):
    """Each forward call takes 0.3 s: of a piece, or of all that share it."""
    forwards, _ = let_forwards_take(monkeypatch, engine, lambda forward: 0.3)
    return forwards


@pytest.fixture
def quick_and_prompt(ask, timed):
    """A plain answer, of which a step was read; and another, whose prompt has five pieces."""
    quick = ask(QUESTIONS[0], max_tokens=30, **PLAIN)
    heard = [next(quick)]
    del timed[:]
    return quick, heard, ask(LONG, progress=end_turn, **IN_FIVE_PIECES)


def test_a_prompts_reader_makes_one_call_for_an_answer_alone(alone, timed, quick_and_prompt):
    """Of an answer that is not read on, no more: the prompt goes on without it."""
    quick, heard, prompt = quick_and_prompt
    while not timed.calls:
        assert take_turn(prompt) is None
    assert len(timed.pieces) < 3, "it came soon"
    while len(timed.pieces) < 5:
        assert take_turn(prompt) is None
    assert len(timed.calls) == 1
    del timed[:]
    heard.append(next(quick))
    assert not timed, "it was there"
    assert tokens_of(read_on(prompt)) == alone(LONG)
    assert tokens_of([*heard, *quick]) == alone(QUESTIONS[0], 30)


def test_an_error_of_a_call_made_for_another_is_its_own(ask, alone, timed, quick_and_prompt):
    quick, heard, prompt = quick_and_prompt
    take_time = timed.before

    def fail_in_calls(forward):
        take_time(forward)
        return 1 / 0 if forward.tokens == 1 else None

    timed.before = fail_in_calls
    while not timed.calls:
        assert take_turn(prompt) is None
    timed.before = take_time
    with pytest.raises(ZeroDivisionError):
        heard += list(quick)
    assert quick.is_over
    assert tokens_of(read_on(prompt)) == alone(LONG)
    assert tokens_of(heard) == alone(QUESTIONS[0], len(heard))
    assert tokens_of(ask(QUESTIONS[0], max_tokens=30)) == alone(QUESTIONS[0], 30)


@pytest.mark.parametrize("where", ["in line", "alone", "in shared calls", "paused"])
def test_an_answer_may_be_closed_wherever_it_is(engine, ask, alone, sharing, monkeypatch, where):
    """Others go on, and what was computed of it is used again."""
    asked = {"question": [9, 2] * 40, "max_tokens": 40}
    other = ask(QUESTIONS[0], max_tokens=60), []
    other[1].append(next(other[0]))
    if where == "alone":
        cost_shared_calls(monkeypatch, lambda rows: 100.0)
    closed = ask(**asked, progress=end_turn), []
    if where == "in line":
        assert [take_turn(closed[0]) for _ in range(3)] == [None] * 3
    else:
        closed[1].append(next(filter(None, iter(lambda: take_turn(closed[0]), 0))))
        rows = most_rows(sharing, closed, other)
        assert rows == (1 if where == "alone" else 2)
    if where == "paused":
        other[1].extend(next(other[0]) for _ in range(MOST_UNREAD + 2))
        assert most_rows(sharing, other) == 1
    running = engine.memory_pool.running
    closed[0].close()
    assert 0 < engine.memory_pool.running < running
    again = list(ask(**asked))
    assert again[0].cached_tokens > 0
    assert tokens_of(again) == alone(asked["question"], 40)
    assert tokens_of([*other[1], *other[0]]) == alone(QUESTIONS[0], 60)
    assert engine.memory_pool.running == 0


def test_a_failed_call_ends_those_in_it_alone(ask, alone, sharing):
    def fail_if_shared(forward):
        return 1 / 0 if forward.rows > 1 else None

    first = ask(QUESTIONS[0])
    second = ask(QUESTIONS[1])
    next(first), next(second), next(first)
    sharing.before = fail_if_shared
    for answer in (first, second):
        with pytest.raises(RuntimeError):
            list(answer)
    sharing.before = lambda forward: None
    assert first.is_over and second.is_over
    assert [tokens_of(ask(QUESTIONS[2])) for _ in range(2)] == [alone(QUESTIONS[2])] * 2


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_prompt_lets_a_call_go_before_each_piece(ask, alone, timed, monkeypatch, is_shared):
    """However many prompts wait; a call takes as long as a piece here."""
    cost_shared_calls(monkeypatch, lambda rows: 0.01 if is_shared else 100.0)
    quick = [(ask(text, max_tokens=100, **PLAIN), []) for text in QUESTIONS[:2]]
    assert most_rows(timed, *quick) == (2 if is_shared else 1)
    more = {"max_tokens": 2, "progress": end_turn, **IN_FIVE_PIECES}
    prompts = [(ask([first, *LONG[1:]], **more), []) for first in (3, 4)]
    del timed[:]
    while not all(prompt.is_over for prompt, _ in prompts):
        for prompt, heard in prompts:
            heard += filter(None, [take_turn(prompt)])
        for answer, heard in quick:
            heard.append(next(answer))
    pieces = [number for number, one in enumerate(timed) if one.tokens > 1]
    assert len(pieces) == 10 and all(after - before > 1 for before, after in pairwise(pieces))
    assert [len(tokens_of(heard)) for _, heard in prompts] == [2, 2]
    for text, (_, heard) in zip(QUESTIONS, quick, strict=False):
        assert tokens_of(heard) == alone(text, len(heard))


@pytest.mark.parametrize("settings", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_a_short_question_does_not_wait_out_a_long_prompt(engine, ask, monkeypatch, settings):
    """Pieces are bounded in time, and calls get as much of it."""

    def seconds(tokens):
        return 0.05 + 0.004 * tokens

    forwards, clock = let_forwards_take(monkeypatch, engine, lambda one: seconds(one.tokens))
    prompt = ask([40, 2] * 1000, prefill_step_size=512, progress=end_turn, **settings)
    while len(forwards) < 3:
        assert take_turn(prompt) is None
    assert max(forwards.pieces) > 128, "alone it has longer pieces"
    quick = ask(QUESTIONS[1], progress=end_turn, **settings)
    heard = [take_turn(quick)]
    del forwards[:]
    started = clock.now
    while not quick.is_over:
        assert take_turn(prompt) is None
        heard.append(take_turn(quick))
    assert len(tokens_of(filter(None, heard))) == LENGTH
    pieces = [seconds(tokens) for tokens in forwards.pieces if tokens > 32]  # not drafts
    assert len(pieces) > 1 and max(pieces) < PIECE_SECONDS
    calls = clock.now - started - sum(pieces)
    assert sum(pieces) <= calls + 2 * PIECE_SECONDS
    prompt.close()


@pytest.mark.parametrize(
    ("num_at_once", "order"),
    [
        (1, [1, 0, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9]),
        (3, [1, 0, 2, 3, 0, 0]),
    ],
)
def test_first_pieces_overtake_every_second_time(ask, forwards, num_at_once, order):
    """One long prompt, and others of one piece that come before each turn, or at once: they are
    begun in the order in which they came, and the long one goes on."""
    settings = {"prefill_step_size": 16, "progress": end_turn, **PLAIN}
    answers = [ask([3] * 180, **settings)]
    while not forwards:
        take_turn(answers[0])
    for _ in order:
        while len(answers) <= max(order) and len(answers) <= num_at_once * len(forwards.pieces):
            # The n-th of them has a piece of n + 1 tokens.
            answers.append(ask([4 + len(answers)] * (2 + len(answers)), **settings))
            take_turn(answers[-1])
        take_turn(answers[0])
    assert [0 if tokens == 16 else tokens - 1 for tokens in forwards.pieces[1:]] == order


def test_a_prompt_may_be_given_up(engine, ask):
    answer = ask([45, 2] * 40, progress=end_turn)
    assert [take_turn(answer) for _ in range(3)] == [None] * 3
    answer.close()
    assert engine.memory_pool.running == 0
    assert 0 < next(ask([45, 2] * 40)).cached_tokens < 79


def test_what_keeping_a_prompt_raises_is_its_answers_error(engine, ask, alone, monkeypatch):
    put = ssmlx.PromptCache.put
    lengths = []

    def failing_once(self, model, tokens, cache):
        lengths.append(len(tokens))
        return put(self, model, tokens, cache) if len(lengths) > 1 else 1 / 0

    with monkeypatch.context() as broken:
        broken.setattr(ssmlx.PromptCache, "put", failing_once)
        answer = ask([46, 2] * 20, shares_prompt=True)
        with pytest.raises(ZeroDivisionError):
            list(answer)
    assert answer.is_over and engine.memory_pool.running == 0 and lengths[0] == 40
    assert tokens_of(ask(QUESTIONS[1])) == alone(QUESTIONS[1])


def test_a_mask_is_told_the_tokens_before(ask):
    def only(told, logits):
        before.append(list(told))
        return mx.where(mx.arange(logits.shape[1]) == 7 + len(told) % 2, logits, -mx.inf)

    before = []
    assert tokens_of(ask(QUESTIONS[0], mask=only, max_tokens=3)) == [7, 8, 7]
    assert before[:3] == [[], [7], [7, 8]]


def test_a_row_that_others_began_goes_on_when_they_are_gone(ask, alone, sharing):
    """Its prompt was read, and a call made, for readers that left before its own came again."""
    unknown = words(6, 33)
    others = [ask(text, max_tokens=100) for text in QUESTIONS[:2]]
    late = ask(unknown, progress=end_turn)
    for one in others:
        next(one)
    assert take_turn(late) is None
    for one in others:
        next(one)
    for one in others:
        one.close()
    assert tokens_of(read_on(late)) == alone(unknown)


def test_pieces_are_as_long_as_they_may_take():
    schedule = PieceSchedule()
    assert schedule.next_piece_length(5000, 2048, is_alone=False) == 128, "nothing was timed"
    schedule.record_piece(128, 0.1)  # 1,280 tokens a second
    assert schedule.next_piece_length(5000, 2048, is_alone=False) == 640
    assert schedule.next_piece_length(5000, 2048, is_alone=True) == 1280
    assert schedule.next_piece_length(5000, 100, is_alone=True) == 100, "the settings say less"
    assert schedule.next_piece_length(7, 2048, is_alone=True) == 7, "no more are left"
    schedule.record_piece(10, 10.0)
    assert schedule.next_piece_length(5000, 2048, is_alone=False) == 640, "too short to count"
    schedule.record_piece(64, 64.0)
    assert schedule.next_piece_length(5000, 2048, is_alone=False) == 64


def test_calls_get_the_time_that_pieces_took():
    schedule = PieceSchedule()
    schedule.record_piece(640, 0.5)
    assert not schedule.are_calls_first(640), "nothing is owed"
    schedule.owe_seconds(0.5, is_decoding=True)
    assert schedule.are_calls_first(640)
    schedule.record_call(0.3)
    assert schedule.are_calls_first(640) and not schedule.are_calls_first(64)
    schedule.record_call(0.3)
    assert not schedule.are_calls_first(10_000)
    schedule.owe_seconds(3.0, is_decoding=True)
    schedule.owe_seconds(1.0, is_decoding=False)
    assert not schedule.are_calls_first(640), "nobody is decoded any more"
