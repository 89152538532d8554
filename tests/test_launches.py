"""What the decoding loop launches, waits for and reads, and when it gives tokens out; nothing is
timed. Caches are written in place."""

from functools import cache

import mlx.core as mx
import pytest
from device_log import IDLE, LAUNCH, READ, RUN, Turn, peak_growth, watched
from loops import Turns, ended_after, plain_steps, speculative_steps
from tiny import LATENT, first_tokens, make_model

from ssmlx.decoding.draft_shape import Never
from ssmlx.drafters.lookup import PromptLookupDrafter
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.settings import STREAM_SCHEDULES, PromptLookupConfig, PruneConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
TREE = TreeConfig(size=7)
BUDGET = PruneConfig(kind="budget", keep=4)
THRESHOLD = PruneConfig(kind="threshold", threshold=0.1)


@cache
def model_of(architecture="llama"):
    return make_model(architecture, **(LATENT if architecture == "glm4_moe_lite" else {}))


def streams(model, schedule="second-pass"):
    return StreamDrafter(model, TREE, model.num_streams, schedule)


def lookup(*_):
    return PromptLookupDrafter(PromptLookupConfig())


KINDS = {  # who drafts, and what else the loop is given
    "plain": (None, {}),
    "paused": (streams, {"controller": Never()}),
    "second-pass": (streams, {}),
    "fused": (lambda model: streams(model, "fused"), {}),
    "budget": (streams, {"prune": BUDGET}),
    "threshold": (streams, {"prune": THRESHOLD}),
    "lookup": (lookup, {}),
}
DRAWN_ON_DEVICE = ["second-pass", "fused", "budget"]
DRAFTING = [*DRAWN_ON_DEVICE, "threshold", "lookup"]


def decoded(kind, **more):
    make, settings = KINDS[kind]
    model = model_of()
    if make is None:
        return plain_steps(model, PROMPT, **more)
    return speculative_steps(model, PROMPT, [make(model)], **{**settings, **more})


@cache
def turns_of(kind: str, ended: int = 0) -> tuple[list[Turn], list[str]]:
    """The turns of five calls, or of an answer that ends with one; and what its closing does."""
    first_tokens(decoded(kind), 20)  # constants are computed once
    with watched(model_of()) as device:
        steps = decoded(kind, take=ended_after(ended))
        turns = device.turns(steps, ended or 5)
        device.events.clear()
        steps.close()
        return turns, list(device.events)


def steady(kind):
    """Turns after those in which drafting begins."""
    return turns_of(kind)[0][2:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_call_is_under_way_before_tokens_are_given_out(kind):
    """One call for each step, and no more."""
    for turn in steady(kind):
        assert turn.calls_under_way == turn.count(RUN) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_once_a_call(kind):
    """Twice if pruning is by a threshold: how many nodes are left decides what is built."""
    for turn in steady(kind):
        assert turn.count(READ) == (2 if kind == "threshold" else 1)


@pytest.mark.parametrize("kind", ["plain", "paused", *DRAWN_ON_DEVICE])
def test_the_device_never_waits_for_the_host(kind):
    """The next call is built while one runs. When that is read, more work is queued; then the next
    call, unless it is queued already."""
    for turn in steady(kind):
        assert IDLE not in turn.events and RUN not in turn.after_read
        assert turn.after_read == (() if kind in ("plain", "paused") else (LAUNCH,))


@pytest.mark.parametrize("kind", DRAFTING)
def test_the_first_token_is_given_out_before_drafting_is_launched(kind):
    """To launch may block while work is queued, which the reader of the first token would feel."""
    first, second, *_ = turns_of(kind)[0]
    last_run = len(first.events) - 1 - first.events[::-1].index(RUN)
    assert first.events[last_run:].count(LAUNCH) == 1  # the prompt's call
    assert first.calls_under_way == 0 and second.calls_under_way == 1


@pytest.mark.parametrize("calls", [1, 2, 4])
@pytest.mark.parametrize("kind", DRAFTING)
def test_nothing_is_launched_for_an_answer_that_has_ended(kind, calls):
    """What was drafted while its last call ran is not verified."""
    (*_, last), at_close = turns_of(kind, calls)
    assert last.calls_under_way == 0 and not at_close
    assert LAUNCH not in last.after_read and RUN not in last.after_read


@pytest.mark.parametrize("kind", ["plain", "paused"])
def test_an_answer_without_drafts_ends_with_one_call_under_way(kind):
    (*_, last), at_close = turns_of(kind, 3)
    assert last.calls_under_way == 1 and not last.after_read and not at_close


def test_drafting_begins_and_ends_without_a_call_of_its_own():
    """It begins after the plain call that is under way, and ends with the last draft verified."""
    model = model_of()
    drafter = streams(model)
    shape = drafter.largest
    controller = Turns([None, None, None, shape, shape])
    first_tokens(decoded("second-pass"), 20)
    with watched(model) as device:
        turns = device.turns(speculative_steps(model, PROMPT, [drafter], controller=controller), 8)[
            1:
        ]
    for turn in turns:
        assert turn.calls_under_way == turn.count(RUN) == turn.count(READ) == 1
    # The device has nothing to do only where drafting begins and where it ends.
    assert [turn.count(IDLE) for turn in turns] == [0, 0, 1, 0, 1, 0, 0]
    assert controller.verified == [*[None] * 4, shape, shape, None, None]


# --- Memory ---


@pytest.mark.parametrize("architecture", ["llama", "glm4_moe_lite"])
@pytest.mark.parametrize("kind", ["plain", *STREAM_SCHEDULES])
@pytest.mark.parametrize("someone_holds_it", [False, True])
def test_caches_are_written_in_place(architecture, kind, someone_holds_it):
    """A copy of one layer would show in the peak, as it does where one is held; no buffer is there
    twice."""
    model = model_of(architecture)
    make, _ = KINDS[kind]
    drafter = make(model) if make else None
    cache = model.make_cache(64)
    cache.reserve(more_tokens=20_000)
    mx.clear_cache()
    without = mx.get_active_memory()
    steps = plain_steps(model, PROMPT, cache)
    if drafter:
        steps = speculative_steps(model, PROMPT, [drafter], cache)
    first_tokens(steps, 12)
    layer = cache.nbytes / model.num_layers
    kept = cache.nbytes + cache.mask_bytes + (drafter.cache_bytes if drafter else 0)
    assert mx.get_active_memory() - without < kept + layer / 4
    hold = cache.snapshot if someone_holds_it else lambda: None
    grown = peak_growth(filter(None, steps), 12, hold)
    assert grown > layer if someone_holds_it else grown < layer / 4
