"""Answers in one batch: each its own, whoever comes, goes, stalls or fails beside it."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import mlx.core as mx
import pytest
from real import tokens_of, words
from tiny import cost_shared_calls

import ssmlx
from ssmlx.answers import Prefilled
from ssmlx.decoding import loop
from ssmlx.decoding.batch import MOST_UNREAD, Batch
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.generation import batching, prompt_pieces
from ssmlx.generation.plan import Plan
from ssmlx.loading.load import load_base
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.policy.controller import PLAIN_CALL, ExpectedCall

LENGTH = 12
ADAPTERS = ("streams", "all", "none")
QUESTIONS = [words(3, i) for i in range(4)]
SETTINGS = {
    "greedy": {},
    "sampled": {"temp": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
    "told": {"logprobs": 2},
}


@pytest.fixture(scope="module")
def engine(base, folders):
    with ssmlx.Engine(str(base), (folders["streams"],), dtype="float32") as engine:
        yield engine


@pytest.fixture
def batches(engine, monkeypatch):
    monkeypatch.setattr(engine, "_batches", batching.Batches())
    return engine._batches


def cost_batches(monkeypatch, cost):
    """A call for several texts costs so many plain calls."""
    cost_shared_calls(monkeypatch, lambda rows: cost)


@pytest.fixture
def together(monkeypatch):
    """Two answers go together at once, whatever rows cost; and what calls were made."""
    made = []
    read = loop.append_piece
    step = Batch.step
    monkeypatch.setattr(Plan, "expected_fastest_call", PLAIN_CALL)
    cost_batches(monkeypatch, 1.001)
    monkeypatch.setattr(loop, "append_piece", lambda *a: made.append("piece") or read(*a))
    monkeypatch.setattr(Batch, "step", lambda self: made.append("call") or step(self))
    return made


@pytest.fixture
def ask(engine, folders, batches):
    """Ask beside others; or alone, where a question is to be answered as by `ssmlx.generate`."""

    def asked(question, adapter="streams", *, alone=False, mask=None, **settings):
        more = {"deterministic": True} if alone else {"mask": mask}
        settings = {"max_tokens": LENGTH, "prefill_step_size": 8, **settings}
        return engine.stream(question, adapter=folders[adapter], **more, **settings)

    return asked


def told(segments):
    """Each token with the log probability that was told of it."""
    return [
        (token, one.token, round(one.logprob, 3), len(one.top))
        for segment in segments
        for token, one in zip(segment.tokens, segment.logprobs, strict=True)
    ]


@pytest.mark.parametrize("kind", SETTINGS)
def test_threads_hear_what_each_would_hear_alone(ask, together, kind):
    settings = SETTINGS[kind]
    alone = {
        (adapter, text): list(ask(text, adapter, alone=True, **settings))
        for adapter in ADAPTERS
        for text in QUESTIONS
    }

    def some(seed):
        chance = random.Random(seed)
        wrong = []
        for _ in range(4):
            asked = chance.choice(list(alone))
            stop_at = chance.choice([None, None, 0, 1, 3])
            with ask(asked[1], asked[0], **settings) as segments:
                found = []
                for number, segment in enumerate(segments):
                    found.append(segment)
                    if number == stop_at:
                        break
            whole = tokens_of(alone[asked])
            expected = whole if stop_at is None else whole[: len(tokens_of(found))]
            wrong += [] if tokens_of(found) == expected else [asked]
            if stop_at is None and segment.finish_reason != "length":
                wrong.append(segment)
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert [one for found in pool.map(some, range(8)) for one in found] == []
    assert together.count("call") > LENGTH


def test_answers_come_and_go_in_any_order(ask, together, batches):
    alone = {text: list(ask(text, alone=True, logprobs=1)) for text in QUESTIONS}
    chance = random.Random(0)
    open_ones = []
    done = 0
    while done < 30:
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
            assert told(found) == told(alone[text])[: len(tokens_of(found))]
    for _, answer, _ in open_ones:
        answer.close()
    assert not batches._waiting
    assert not any(one.answers or one.batch.members for one in batches._groups.values())


def test_an_answer_drafts_again_when_it_is_alone(ask, together):
    settings = {"max_tokens": 60, "drafter": "prompt-lookup", "decoding": "speculative"}
    expected = tokens_of(ask(QUESTIONS[0], alone=True, **settings))
    answer = ask(QUESTIONS[0], **settings)
    found = []
    found.append(next(answer))
    other = ask(QUESTIONS[1])
    for _ in range(4):
        assert len(next(other).tokens) == len(found.append(next(answer)) or found[-1].tokens) == 1
    other.close()
    found += list(answer)
    assert tokens_of(found) == expected and max(len(one.tokens) for one in found) > 1


def test_an_answer_that_comes_back_from_a_batch_has_the_draft_cache_it_had(ask, together, base):
    draft = DraftModel(load_base(base, "float32")[0].model)
    settings = {"max_tokens": 60, "drafter": draft, "decoding": "speculative"}
    answer = ask(QUESTIONS[0], **settings)
    found = [next(answer), next(answer)]
    for count in range(3):
        other = ask(QUESTIONS[1])
        for _ in range(4):
            next(other)
            found.append(next(answer))
        other.close()
        found += [next(answer), next(answer)]
        assert len(draft._caches) == 1, count
    found += list(answer)
    assert tokens_of(found) == tokens_of(ask(QUESTIONS[0], alone=True, max_tokens=60))
    calls = [one.draft_model_calls for one in found]
    assert calls == sorted(calls) and calls[-1] > 12


@pytest.mark.parametrize("others", [[[8]], [[9, 10, 11]], []])
def test_a_prompt_of_one_token_has_a_row(ask, together, others):
    """First of all, beside another one, or beside a longer one; or before any comes."""
    wanted = [tokens_of(ask(one, "none", alone=True)) for one in ([7], *others)]
    open_ones = [ask(one, "none") for one in ([7], *others)]
    steps = zip(*open_ones, strict=True)
    assert [*map(tokens_of, zip(*steps, strict=True))] == wanted
    assert (together.count("call") > 0) == bool(others)


def test_an_end_in_the_middle_is_heard(ask, together):
    whole = list(ask(QUESTIONS[0], alone=True))
    settings = {"stop": (whole[5].text.strip(),)}
    alone = list(ask(QUESTIONS[0], alone=True, **settings))
    with ask(QUESTIONS[1], max_tokens=100) as other:
        next(other)
        segments = list(ask(QUESTIONS[0], **settings))
    assert [one.text for one in segments] == [one.text for one in alone]
    assert segments[-1].finish_reason == "stop" and len(segments) < LENGTH


@pytest.mark.parametrize("length", [100, LENGTH])
def test_a_slow_reader_stops_nobody(ask, together, batches, length):
    """It gets no more than so many tokens ahead, nor any behind its answer's end."""
    expected = tokens_of(ask(QUESTIONS[0], alone=True, max_tokens=length))
    slow = ask(QUESTIONS[0], max_tokens=length)
    found = [next(slow)]
    with ask(QUESTIONS[1], max_tokens=150) as quick:
        first = next(quick)
        found.append(next(slow))  # it has a row now
        assert len(tokens_of([first, *quick])) == 150
    (group,) = batches._groups.values()
    (row,) = group.answers
    assert len(row.unread) == min(MOST_UNREAD, length - 2) and row not in group.batch.members
    assert tokens_of([*found, *slow]) == expected


def statuses(batches):
    """How many open answers have which status."""
    rows = [row for group in batches._groups.values() for row in group.answers]
    return Counter(row.status.name for row in (*batches._waiting, *rows))


def test_a_reader_that_has_caught_up_shares_calls_again(ask, together, batches):
    settings = {"max_tokens": 90}
    slow, quick = (ask(text, **settings) for text in QUESTIONS[:2])
    heard = [[next(slow)], [next(quick), next(quick)]]
    heard[0].append(next(slow))
    while statuses(batches)["PAUSED"] == 0:
        assert statuses(batches)["BATCHED"] == 2
        heard[1].append(next(quick))
    heard[1] += [next(quick) for _ in range(3)]
    assert statuses(batches) == {"PAUSED": 1, "ALONE": 1}
    heard[0] += [next(slow) for _ in range(MOST_UNREAD + 1)]
    heard[1].append(next(quick))
    assert statuses(batches) == {"BATCHED": 2}
    for text, own, rest in zip(QUESTIONS, heard, (slow, quick), strict=False):
        assert tokens_of([*own, *rest]) == tokens_of(ask(text, alone=True, **settings))


@pytest.mark.parametrize("mode, begins, goes_on", [("BATCHED", 0.6, 1.02), ("ALONE", 9.0, 0.98)])
def test_answers_stay_in_their_mode_if_both_are_as_fast(
    ask, together, batches, monkeypatch, mode, begins, goes_on
):
    """A shared call takes as many plain calls as it has rows, but for 2 %."""
    calls_a_row = begins
    cost_shared_calls(monkeypatch, lambda rows: calls_a_row * rows)
    answers = [ask(text, max_tokens=60) for text in QUESTIONS[:2]]
    for _ in range(3):
        next(answers[0]), next(answers[1])
    assert statuses(batches) == {mode: 2}
    calls_a_row = goes_on
    with ask(QUESTIONS[2]) as other:
        next(other)
    for _ in range(3):
        next(answers[0]), next(answers[1])
        assert statuses(batches) == {mode: 2}


HELD = {"max_tokens": 60, "drafter": "prompt-lookup", "decoding": "speculative"}


def test_an_answer_that_is_held_leaves_others_their_drafts(ask, together, batches, monkeypatch):
    """It is open, and not read on: others wait for it in vain for a call each, and only once."""
    expected = tokens_of(ask(QUESTIONS[0], alone=True, **HELD))
    cost_batches(monkeypatch, 100.0)
    held = [ask(text, **HELD) for text in QUESTIONS[1:3]]
    held_heard = [[next(one)] for one in held]
    assert statuses(batches) == {"ALONE": 2}
    cost_batches(monkeypatch, 1.001)
    for _ in range(2):
        found = list(ask(QUESTIONS[0], **HELD))
        assert tokens_of(found) == expected and max(len(one.tokens) for one in found) > 1
        assert together.count("call") == 3 and statuses(batches) == {"PAUSED": 2}
    for text, heard, rest in zip(QUESTIONS[1:], held_heard, held, strict=False):
        assert tokens_of([*heard, *rest]) == tokens_of(ask(text, alone=True, **HELD))


def test_an_error_of_an_answer_that_is_held_is_its_own(ask, together, batches, monkeypatch):
    """Its own call, which was under way, is waited for in the turn of another reader."""
    expected = tokens_of(ask(QUESTIONS[0], alone=True, **HELD))
    held = ask(QUESTIONS[1], **HELD)
    next(held)
    ((row,),) = (group.answers for group in batches._groups.values())
    monkeypatch.setattr(row, "sync_cache", lambda: 1 / 0)
    assert tokens_of(ask(QUESTIONS[0], **HELD)) == expected and not statuses(batches)
    with pytest.raises(ZeroDivisionError):
        next(held)


QUICK = {"max_tokens": 30}


@pytest.fixture
def quick_and_prompt(ask, batches, monkeypatch, request):
    """An answer that decodes alone, a step of it read; and one whose prompt waits for its calls.

    Also its open answer, and a function that has the prompt's reader take turns until something is
    so, however long the other's reader stays away.
    """
    monkeypatch.setattr(prompt_pieces, "PIECE_SECONDS", 0.0)
    cost_batches(monkeypatch, 100.0)
    quick = ask(QUESTIONS[0], **QUICK)
    quick_heard = [next(quick)]
    prompt = ask([request.param, 2] * 40)
    ((row,),) = (group.answers for group in batches._groups.values())

    def take_turns_until(is_so):
        while not is_so():
            assert isinstance(run_on_mlx_thread(prompt._source.compute_next), Prefilled)

    return quick, quick_heard, prompt, row, take_turns_until


@pytest.mark.parametrize("quick_and_prompt", [30], indirect=True)
def test_a_prompts_reader_makes_one_call_for_an_answer_alone(ask, batches, quick_and_prompt):
    """Of an answer that is not read on, no more: the prompt goes on without it."""
    quick, quick_heard, prompt, row, take_turns_until = quick_and_prompt
    take_turns_until(lambda: row.unread)
    assert statuses(batches) == {"ALONE": 1, "WAITING": 1}
    assert 0 < batches._waiting[0].num_prompt_tokens_left < 79
    length = len(row.text)
    assert tokens_of(prompt) == tokens_of(ask([30, 2] * 40, alone=True))
    assert len(row.text) == length and len(row.unread) == 1
    expected = tokens_of(ask(QUESTIONS[0], alone=True, **QUICK))
    assert tokens_of([*quick_heard, *quick]) == expected


@pytest.mark.parametrize("quick_and_prompt", [31], indirect=True)
def test_an_error_of_a_call_made_for_another_is_its_own(ask, batches, quick_and_prompt):
    quick, quick_heard, prompt, row, take_turns_until = quick_and_prompt
    take_turns_until(lambda: row.unread)
    row.steps.close()
    row.steps = (1 / 0 for _ in "x")
    quick_heard.append(next(quick))  # of the call that was made before
    take_turns_until(lambda: row.error)
    assert statuses(batches) == {"WAITING": 1}
    with pytest.raises(ZeroDivisionError):
        next(quick)
    assert quick.is_over and tokens_of(prompt) == tokens_of(ask([31, 2] * 40, alone=True))
    expected = tokens_of(ask(QUESTIONS[0], alone=True, **QUICK))
    found = tokens_of(quick_heard)
    assert found == expected[: len(found)] and tokens_of(ask(QUESTIONS[0], **QUICK)) == expected


@pytest.mark.parametrize(
    "first, status", [(32, "WAITING"), (33, "ALONE"), (34, "BATCHED"), (35, "PAUSED")]
)
def test_an_answer_may_be_closed_wherever_it_is(ask, together, batches, monkeypatch, first, status):
    """Others go on, and what was computed of it is used again."""
    settings = {"max_tokens": 40}
    other = ask(QUESTIONS[0], max_tokens=60)
    heard = [next(other)]
    if status == "ALONE":
        cost_batches(monkeypatch, 100.0)
    closed = ask([first, 2] * 40, **settings)
    if status == "WAITING":
        run_on_mlx_thread(lambda: [closed._source.compute_next() for _ in range(3)])
        assert statuses(batches)["WAITING"] == 1
    else:
        next(closed)
    while status == "PAUSED" and not statuses(batches)[status]:
        heard.append(next(other))
    assert statuses(batches)[status] >= 1
    closed.close()
    assert sum(statuses(batches).values()) == 1
    again = list(ask([first, 2] * 40, **settings))
    assert again[0].cached_tokens > 0
    assert tokens_of(again) == tokens_of(ask([first, 2] * 40, alone=True, **settings))
    expected = tokens_of(ask(QUESTIONS[0], alone=True, max_tokens=60))
    assert tokens_of([*heard, *other]) == expected and not statuses(batches)


def test_a_failed_call_ends_those_in_it_alone(ask, together, monkeypatch):
    expected = tokens_of(ask(QUESTIONS[2], alone=True))
    first = ask(QUESTIONS[0])
    second = ask(QUESTIONS[1])
    next(first), next(second), next(first)
    with monkeypatch.context() as broken:
        broken.setattr(Batch, "_launch", lambda self: 1 / 0)
        for answer in (first, second):
            with pytest.raises(RuntimeError):
                list(answer)
    assert first.is_over and second.is_over
    assert [tokens_of(one) for one in (ask(QUESTIONS[2]), ask(QUESTIONS[2]))] == [expected] * 2


def test_a_prompt_lets_a_call_go_before_each_piece(ask, together, monkeypatch):
    # Whatever a piece took, a call is next.
    monkeypatch.setattr(prompt_pieces, "PIECE_SECONDS", 0.0)
    quick = [ask(text, max_tokens=100) for text in QUESTIONS[:2]]
    are_read = Barrier(3)

    def read(answer):
        first = [next(answer), next(answer)]
        are_read.wait(60)  # who is not read keeps no prompt waiting
        return [*first, *answer]

    with ThreadPoolExecutor(4) as pool:
        heard = [pool.submit(read, one) for one in quick]
        are_read.wait(60)
        del together[:]
        heard += [pool.submit(list, ask([1, 2 + n] * 40, max_tokens=2)) for n in range(2)]
        assert [len(tokens_of(one.result(60))) for one in heard] == [100, 100, 2, 2]
    pieces = [n for n, what in enumerate(together) if what == "piece"]
    assert len(pieces) == 20 and all(b - a > 1 for a, b in pairwise(pieces))


def take_turn(answer):
    """One turn of a reader: the segment that it brought, or None."""
    part = run_on_mlx_thread(answer._source.compute_next)
    return None if isinstance(part, Prefilled) else part


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_a_short_question_does_not_wait_out_a_long_prompt(ask, batches, monkeypatch, drafter):
    """Pieces are bounded in time, and calls get as much of it: 10 tokens here, and 5 calls."""
    sizes = []
    read = loop.append_piece
    now = 0.0

    def clock():
        nonlocal now
        now += 0.004  # a call, between two looks
        return now

    def slowly(model, tokens, cache, taps):
        nonlocal now
        now += 0.002 * len(tokens)
        sizes.append(len(tokens))
        return read(model, tokens, cache, taps)

    monkeypatch.setattr(batches, "_clock", clock)
    monkeypatch.setattr(loop, "append_piece", slowly)
    monkeypatch.setattr(prompt_pieces, "PIECE_SECONDS", 0.02)
    monkeypatch.setattr(prompt_pieces, "LEAST_PIECE", 2)
    monkeypatch.setattr(prompt_pieces, "UNTIMED_PIECE", 4)
    settings = {"prefill_step_size": 512, "drafter": drafter}
    settings |= {"decoding": "speculative"} if drafter else {}
    prompt = ask([40 if drafter else 41, 2] * 110, **settings)
    while len(sizes) < 3:
        assert take_turn(prompt) is None
    before = len(sizes)
    quick = ask(QUESTIONS[1], **settings)
    heard = [take_turn(quick)]
    while not quick.is_over:
        assert take_turn(prompt) is None
        heard.append(take_turn(quick))
    assert len(tokens_of(filter(None, heard))) == LENGTH
    assert max(sizes) <= 10 * prompt_pieces.PIECES_ALONE
    assert max(sizes[before:]) <= 10 and sum(sizes[before:]) <= 30
    assert len(tokens_of(prompt)) == LENGTH


@pytest.mark.parametrize(
    ("old", "num_at_once", "order"),
    [
        (47, 1, [1, 0, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9]),
        (60, 3, [1, 0, 2, 3, 0, 0]),
    ],
)
def test_first_pieces_overtake_every_second_time(ask, monkeypatch, old, num_at_once, order):
    """One long prompt, and others of one piece that come before each turn, or at once: they are
    begun in the order in which they came, and the long one goes on."""
    pieces = []
    read = loop.append_piece
    monkeypatch.setattr(
        loop, "append_piece", lambda *given: pieces.append(given[1][0]) or read(*given)
    )
    answers = [ask([old, 3] * 90)]
    while not pieces:
        take_turn(answers[0])
    for _ in order:
        while len(answers) <= max(order) and len(answers) <= num_at_once * len(pieces):
            answers.append(ask([old + len(answers), 3] * 4 + [1]))
            take_turn(answers[-1])
        take_turn(answers[0])
    assert [piece - old for piece in pieces[1:]] == order


def test_a_prompt_may_be_given_up(ask, together, batches):
    answer = ask([45, 2] * 40)
    run_on_mlx_thread(lambda: [answer._source.compute_next() for _ in range(3)])
    answer.close()
    assert not batches._waiting
    assert next(ask([45, 2] * 40)).cached_tokens == 16


def test_what_keeping_a_prompt_raises_is_its_answers_error(ask, batches, monkeypatch):
    expected = tokens_of(ask(QUESTIONS[1], alone=True))
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
    assert answer.is_over and not batches._waiting and lengths[0] == 40
    assert tokens_of(ask(QUESTIONS[1])) == expected


def test_a_mask_is_told_the_tokens_before(ask, together):
    def only(told, logits):
        before.append(list(told))
        return mx.where(mx.arange(logits.shape[1]) == 7 + len(told) % 2, logits, -mx.inf)

    before = []
    assert tokens_of(ask(QUESTIONS[0], mask=only, max_tokens=3)) == [7, 8, 7]
    assert before[:3] == [[], [7], [7, 8]]


@pytest.mark.parametrize(
    ("outlooks", "cost", "goes"),
    [
        ([(3.0, 1.5), (3.0, 1.5)], 1.2, False),  # 2 in turns, 1.67 together
        ([(3.0, 1.5)] * 3, 1.3, True),  # 2.31 together
        ([(1.5, 1.5), (3.0, 1.5)], 1.2, True),  # 1.5 in turns
        ([(1.0, 1.0)], 1.0, False),
    ],
)
def test_rows_go_to_requests_where_they_bring_more(engine, monkeypatch, outlooks, cost, goes):
    class Open:
        def __init__(self, expected_fastest_call):
            self.is_decoding = True
            self.text = [1]
            self.plan = type("Plan", (), {"expected_fastest_call": expected_fastest_call})

    cost_batches(monkeypatch, cost)
    group = batching._Group(engine.model())
    group.answers = [Open(ExpectedCall(*outlook)) for outlook in outlooks]
    group.update_is_batched()
    assert group.is_batched == goes


def test_a_row_that_others_began_goes_on_when_they_are_gone(ask, together):
    """Its prompt was read, and a call made, for readers that left before its own came again."""
    unknown = words(6, 33)
    others = [ask(text, max_tokens=100) for text in QUESTIONS[:2]]
    late = ask(unknown)
    for one in others:
        next(one)
    run_on_mlx_thread(late._source.compute_next)
    for one in others:
        next(one)
    for one in others:
        one.close()
    assert tokens_of(late) == tokens_of(ask(unknown, alone=True))


def test_pieces_are_as_long_as_they_may_take():
    schedule = prompt_pieces.PieceSchedule()
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
    schedule = prompt_pieces.PieceSchedule()
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
