"""What settings come to: what drafts, as what was measured on this machine says, or as asked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from real import make_adapter, write_adapter, write_base, write_tiny_adapter
from tiny import COSTS, first_tokens, flat, make_model, make_profile, measured

import ssmlx
from ssmlx.api import token_steps
from ssmlx.commands import chat, generate
from ssmlx.decoding.pace import FIRST_WAIT, PATIENCE, TRIAL_PATIENCE
from ssmlx.plan import make_plan
from ssmlx.settings import AcceptanceConfig, GenerateConfig, PruneConfig, TreeConfig
from ssmlx.tuning import profile as tuning
from ssmlx.tuning.cost import DraftShape, Surface
from ssmlx.tuning.profile import profile_of, store_profile

SHAPE = DraftShape(tree=TreeConfig(size=7), num_streams=2, stream_schedule="fused")
SMALL = DraftShape(tree=TreeConfig(size=2), num_streams=1)
OPEN = GenerateConfig()
THRESHOLD = PruneConfig(kind="threshold")


@pytest.fixture(autouse=True)
def forgotten():
    """Profiles are looked up once for a loaded model, and these tests share theirs."""
    tuning._KNOWN.clear()


@pytest.fixture(scope="module")
def model():
    return make_model(seed=2)


def profile(model, tokens_per_call=9.0, shape=SHAPE, **changes):
    """One that says that drafting pays."""
    shapes = changes.pop("shapes", (measured(shape, tokens_per_call),))
    return make_profile(model, shapes=shapes, **changes)


def slow(model):
    """One that says that it does not."""
    return profile(model, 1.01)


def test_without_a_profile_nothing_is_tuned(model, capsys):
    plan = make_plan(model)
    assert plan.config == OPEN.with_default_shape() and not plan.is_tuned
    assert plan.decision == "streams draft: best tree of 16 nodes, 3 streams, second pass"
    assert plan.pace._breakeven is None and capsys.readouterr().err == ""
    config = plan.config
    assert (config.tree, config.prune) == (TreeConfig(), PruneConfig())
    assert (config.num_streams, config.stream_schedule) == (None, "second-pass")
    drafts = make_plan(model, drafter="lookahead", lookahead=ssmlx.LookaheadConfig(window=3))
    assert drafts.decision == "lookahead drafts: at most 32 nodes a call, 5 tokens ahead"
    assert (
        make_plan(make_model(adapter={"num_streams": 0})).decision
        == "plain decoding: nothing drafts"
    )


def test_what_is_not_asked_for_is_as_the_profile_says(model):
    store_profile(profile(model))
    plan = make_plan(model, max_tokens=5)
    config, drafter = plan.config, plan.drafter
    assert (config.tree, config.num_streams) == (SHAPE.tree, 2)
    assert (config.stream_schedule, config.prune) == ("fused", PruneConfig())
    assert config.max_tokens == 5
    assert (drafter.max_nodes, drafter.num_levels, drafter.num_streams) == (7, 2, 2)
    assert plan.decision == (
        "tuned for this machine: best tree of 7 nodes, 2 streams, fused "
        "(ssmlx.calibrate, 2026-08-02)"
    )
    plain = make_plan(model, decoding="plain")
    assert (plain.decision, plain.is_tuned) == ("plain decoding, as --decoding says", False)


@pytest.mark.parametrize(
    "asked",
    [
        {"tree": TreeConfig(size=4)}, {"prune": PruneConfig()}, {"num_streams": 1},
        {"stream_schedule": "second-pass"}, {"drafter": "prompt-lookup"},
    ],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_whoever_asks_for_any_of_it_gets_the_defaults_beside_it(model, asked):
    store_profile(profile(model))
    plan = make_plan(model, **asked)
    assert plan.config == GenerateConfig(**asked).with_default_shape() and not plan.is_tuned


def test_a_tuned_pruning_budget_reaches_the_loop(model, monkeypatch):
    budget = PruneConfig(kind="budget", keep=3)
    store_profile(profile(model, shape=replace(SHAPE, prune=budget)))
    seen = []
    monkeypatch.setattr(ssmlx.api, "streaming_decode", lambda *a, **k: seen.append(k["prune"]))
    token_steps(model, [1], model.make_cache())
    assert seen == [budget]


def test_plain_decoding_is_taken_where_it_is_faster(model):
    store_profile(slow(model))
    plan = make_plan(model)
    assert plan.kind is None and plan.drafter is None and plan.is_tuned
    assert plan.decision == (
        "tuned for this machine: plain decoding, which is faster (ssmlx.calibrate, 2026-08-02)"
    )
    assert make_plan(model, decoding="streaming").config.tree == SHAPE.tree, "it is still tuned"


@pytest.mark.parametrize(
    "asked",
    [
        {"decoding": "streaming"}, {"drafter": "streams"}, {"tree": TreeConfig()},
        {"num_streams": 2}, {"lookup_nodes": 8},
        {"acceptance": AcceptanceConfig(kind="typical"), "temp": 1.0},
    ],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_whoever_asks_for_drafting_gets_it(model, asked):
    store_profile(slow(model))
    assert make_plan(model, **asked).kind == "streams"


def by_context(model):
    """A small tree is faster from some 940 tokens on, and plain decoding from some 7,400."""
    rows = {
        (rows, context): 6 + rows / 10 + rows * context / 1000
        for rows in (1, 64)
        for context in (0, 1000)
    }
    shapes = (measured(SHAPE, 3.0), measured(SMALL, 2.4))
    return profile(model, shapes=shapes, costs=replace(COSTS, lower=Surface.of(rows)))


def test_the_longer_the_context_the_smaller_the_tree(model):
    found = by_context(model)
    assert found.best() == found.best(0) == found.best(300) == measured(SHAPE, 3.0)
    assert found.best(2000) == measured(SMALL, 2.4)
    assert found.drafting_pays() and found.drafting_pays(2000) and not found.drafting_pays(9000)
    for context in (0, 300, 2000, 9000):
        speeds = [
            one.tokens_per_call / found.costs.breakeven(one.shape, context) for one in found.shapes
        ]
        assert found.speedup(context) == max(speeds)
    store_profile(found)
    assert "fused, other trees behind other contexts (" in make_plan(model).decision


def test_of_equal_shapes_the_first_is_taken(model):
    other = replace(SHAPE, stream_schedule="second-pass")
    gain = COSTS.breakeven(other, 50) / COSTS.breakeven(SHAPE, 50)
    for more, expected in ((1.005, SHAPE), (1.02, other)):
        shapes = (measured(SHAPE, 3.0), measured(other, 3.0 * gain * more))
        assert profile(model, shapes=shapes).best(50).shape == expected


def test_an_answer_is_drafted_as_its_context_says(model):
    store_profile(by_context(model))
    costs = by_context(model).costs
    asked = DraftShape(tree=TreeConfig(size=5), num_streams=model.num_streams)
    for context, settings, nodes, breakeven in (
        (10, {}, 7, costs.breakeven(SHAPE, 10)),
        (2000, {}, 2, costs.breakeven(SMALL, 2000)),
        (2000, {"tree": TreeConfig(size=5)}, 5, costs.breakeven(asked, 2000)),
        (9000, {"decoding": "streaming"}, 2, None),
    ):
        plan = make_plan(model, context=context, **settings)
        assert (plan.drafter.max_nodes, plan.pace._breakeven) == (nodes, breakeven)
    assert make_plan(model, context=9000).drafter is None


def test_the_pace_knows_what_a_call_costs(model):
    store_profile(profile(model))
    assert make_plan(model).pace._breakeven == pytest.approx(COSTS.breakeven(SHAPE, 100))
    other = DraftShape(tree=TreeConfig(size=4), num_streams=3)
    found = make_plan(model, tree=TreeConfig(size=4)).pace._breakeven
    assert found == pytest.approx(COSTS.breakeven(other, 100))
    for asked in ({"decoding": "streaming"}, {"drafter": "prompt-lookup"}, {"prune": THRESHOLD}):
        assert make_plan(model, **asked).pace._breakeven is None, "it cannot be priced"


def test_behind_contexts_that_nobody_measured_streams_are_on_trial(model):
    store_profile(profile(model))
    patience = [make_plan(model, context=c).pace._patience for c in (None, 400, 401)]
    assert patience == [PATIENCE, PATIENCE, TRIAL_PATIENCE]


def test_decoding_falls_back_and_returns_and_says_the_same(model):
    """Drafts of a tiny random model do not pay where a call costs three plain ones."""
    store_profile(profile(model, costs=replace(COSTS, lower=flat(27.0, 0.0))))
    length, answers, lengths = 120, {}, {}
    for decoding in (None, "streaming", "plain"):
        steps = token_steps(model, [3, 1], model.make_cache(), decoding=decoding)
        answers[decoding], lengths[decoding] = first_tokens(steps, length)
    assert answers[None] == answers["streaming"] == answers["plain"]
    paused = lengths[None]
    assert len(lengths["streaming"]) < len(paused) < length
    ones = "".join(str(num) for num in paused).split("1" * (FIRST_WAIT - 2))
    assert len(ones) > 1, "it fell back"
    assert any(num > 1 for num in paused[60:]), "and returned"


# --- The commands ---


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("plan") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    return write_tiny_adapter(base.parent / "adapter", base)


def store_for(base, adapter, make=profile):
    loaded, _ = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    store_profile(make(loaded))


def ask(base, adapter, *more):
    common = ("--prompt", "w1 w2 w3", "--max-tokens", "12", "--dtype", "float32")
    return generate.main(["--model", str(base), "--adapter", str(adapter), *common, *more])


def test_generate_is_tuned_and_says_so_in_one_line(base, adapter, capsys):
    assert ask(base, adapter, "--jsonl") == 0
    before = json.loads(capsys.readouterr().out)
    store_for(base, adapter)
    assert ask(base, adapter, "--jsonl") == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "tuned" in line]
    assert line.startswith("[tuned for this machine: best tree of 7 nodes, 2 streams, fused (")
    assert json.loads(out)["tokens"] == before["tokens"]
    store_for(base, adapter, slow)
    assert ask(base, adapter, "--jsonl") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens_per_call"] == 1
    assert "[tuned for this machine: plain decoding, which is faster" in err
    assert ask(base, adapter, "--tree", "best") == 0
    assert "tuned" not in capsys.readouterr().err


def test_chat_is_tuned_and_says_so(base, adapter, capsys, monkeypatch):
    store_for(base, adapter, slow)
    lines = iter(["/adapter", "/quit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    argv = ["--model", str(base), "--adapter", str(adapter), "--dtype", "float32"]
    assert chat.main(argv) == 0
    err = capsys.readouterr().err
    assert "[tuned for this machine: plain decoding, which is faster" in err
    assert "plain decoding, which is faster here" in err
    assert "ships no chat adapter" not in err


def test_an_adapter_that_is_swapped_in_is_looked_up_under_its_own_name(base, adapter):
    """Its profile is asked for before the old adapter's LoRA has left the layers."""
    streams = base.parent / "streams"
    streams.mkdir()
    write_adapter(streams, make_adapter(base, scope="streams"))
    store_for(base, adapter)
    model, tokenizer = ssmlx.load(str(base), adapter=streams, dtype="float32")
    session = ssmlx.ChatSession(model, tokenizer, GenerateConfig(max_tokens=5))
    assert profile_of(session.model) is None
    session.swap_adapter(adapter)
    assert profile_of(session.model).best().shape == SHAPE
