"""The loop never waits for itself: evaluations, reads and their order are counted, not timed."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import first_tokens, make_model

import ssmlx
from ssmlx.decoding import loop as decode
from ssmlx.decoding.loop import plain_decode, streaming_decode
from ssmlx.decoding.pace import Pace
from ssmlx.drafters.lookup import PromptLookupDrafter
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.model import shapes
from ssmlx.settings import STREAM_SCHEDULES, PromptLookupConfig, PruneConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
FILL = 40
READERS = ("item", "tolist")
HOT = ("decoding", "drafters", "model")


@pytest.fixture
def events(monkeypatch):
    """What the loop does, in order: "build" a step, "launch" it, "wait" for it, "read"."""
    log = []

    def logged(name, function):
        def call(*args, **kwargs):
            log.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(decode, "step", logged("build", decode.step))
    monkeypatch.setattr(mx, "async_eval", logged("launch", mx.async_eval))
    monkeypatch.setattr(mx, "eval", logged("wait", mx.eval))
    for module in (decode, *_modules_that_read()):
        for name in ("to_int", "to_float", "to_list"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, logged("read", getattr(shapes, name)))
    return log


def _modules_that_read():
    from ssmlx.decoding import accept, prune, sampling
    from ssmlx.decoding import drafter as draft
    from ssmlx.drafters import lookup, streams
    from ssmlx.model import streams as model
    from ssmlx.model import tree

    return accept, draft, model, prune, sampling, tree, lookup, streams


TREE = TreeConfig(kind="best", size=7)


def streaming(model, prune=None, drafter=None, **more):
    drafter = drafter or StreamDrafter(model, TREE, model.num_streams)
    cache = model.make_cache(drafter.max_nodes)
    prune = prune or PruneConfig()
    return streaming_decode(model, PROMPT, cache, drafter=drafter, prune=prune, **more)


def after_start(events, steps):
    """The events of later calls, the prompt's and the one behind it left out."""
    next(steps), next(steps)
    events.clear()
    for _ in range(3):
        next(steps)
        events.append("give")
    return events


def test_the_next_step_is_built_while_one_runs_and_starts_before_its_tokens_are_given(events):
    steps = streaming(make_model())
    assert after_start(events, steps) == ["build", "read", "launch", "give"] * 3


def test_a_budget_of_nodes_needs_no_further_read(events):
    steps = streaming(make_model(), prune=PruneConfig(kind="budget", keep=4))
    assert after_start(events, steps) == ["build", "read", "launch", "give"] * 3


def test_what_has_to_know_the_text_reads_first(events):
    """The drafter reads once; the loop once more, when nothing is left to wait for."""
    drafter = PromptLookupDrafter(PromptLookupConfig())
    steps = streaming(make_model(), drafter=drafter)
    assert after_start(events, steps) == ["build", "read", "launch", "read", "give"] * 3
    steps = streaming(make_model(), prune=PruneConfig(kind="threshold", threshold=0.1))
    assert after_start(events, steps) == ["build", "read", "launch", "read", "give"] * 3


def test_plain_decoding_reads_once_a_token(events):
    model = make_model()
    steps = plain_decode(model, PROMPT, model.make_cache())
    assert after_start(events, steps) == ["launch", "read", "give"] * 3


def test_the_first_token_is_given_before_anything_else_starts(events):
    """`launch` may block while work is queued, which the reader of the first token would feel."""
    steps = streaming(make_model())
    events.clear()
    next(steps)
    assert events == ["wait", "build", "launch", "read"]  # the prompt is waited for
    events.clear()
    next(steps)
    assert events == ["build", "launch", "build", "read", "launch"]


def test_no_step_is_started_for_an_answer_that_has_ended(events):
    steps = streaming(make_model(), ends=lambda tokens: True)
    next(steps)
    events.clear()
    next(steps)
    assert events == ["build", "launch", "build", "read"]


@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_answer_that_ended_can_go_on(after):
    """The step that was built and not run leaves no trace: neither in tokens nor in the cache."""
    model, calls = make_model(), []

    def ends(tokens):
        calls.append(tokens)
        return len(calls) % after == 0

    expected, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache()), FILL)
    _, lengths = first_tokens(streaming(model), FILL)
    assert first_tokens(streaming(model, ends=ends), FILL) == (expected, lengths)


class Pause:
    """A pace that does not draft from call `first` to call `last`, and keeps what it is told."""

    def __init__(self, first, last):
        self.first, self.last, self.told = first, last, []

    @property
    def drafting(self):
        return not self.first <= len(self.told) < self.last

    def observe(self, num_tokens, *, drafted):
        self.told.append((num_tokens, drafted))


def test_drafting_can_pause():
    """A call of a pause is a plain one, and the streams find the cache as it is afterwards."""
    model = make_model()
    expected, _ = first_tokens(plain_decode(model, PROMPT, model.make_cache()), FILL)
    lengths = {}
    for schedule in STREAM_SCHEDULES:
        pause = Pause(4, 9)
        drafter = StreamDrafter(model, TREE, model.num_streams, schedule)
        steps = streaming(model, drafter=drafter, pace=pause)
        tokens, lengths[schedule] = first_tokens(steps, FILL)
        assert tokens == expected
        drafted = [call for _, call in pause.told]
        # The prompt's call verifies no draft. When the pause begins, call 5 is built already.
        assert drafted[:12] == [False] + [True] * 5 + [False] * 5 + [True]
    fused = lengths["fused"]
    assert fused == lengths["second-pass"]
    assert fused[6:11] == [1] * 5 and max(fused[11:]) > 1


def test_a_pace_without_costs_always_drafts():
    _, expected = first_tokens(streaming(make_model()), FILL)
    assert first_tokens(streaming(make_model(), pace=Pace()), FILL)[1] == expected
    _, lengths = first_tokens(streaming(make_model(), pace=Pace(100.0)), FILL)
    assert lengths.count(1) > expected.count(1)


def test_only_one_file_reads_arrays():
    """What waits for the device goes by `shapes.to_int`, `to_float` and `to_list`."""
    package, found = Path(ssmlx.__file__).parent, set()
    for path in [file for room in HOT for file in package.glob(f"{room}/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in READERS:
                found.add(path.name)
    assert found == {"shapes.py", "trie.py"}  # the latter's arrays are numpy's
