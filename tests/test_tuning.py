"""Costs of steps, profiles on disk, and the plans that settings come to: no clock runs here."""

import json
from dataclasses import replace
from statistics import median

import pytest
from real import make_adapter, write_adapter
from tiny import (
    COSTS,
    first_tokens,
    flat,
    make_base,
    make_model,
    make_profile,
    make_tokenizer,
    measured,
)

import ssmlx
from ssmlx.api import token_steps
from ssmlx.commands import chat, generate
from ssmlx.decoding.pace import Learned, Pace, Rung
from ssmlx.errors import InputError
from ssmlx.json_files import to_json
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import AcceptanceConfig, GenerateConfig, PruneConfig, TreeConfig
from ssmlx.tuning import profile as tuning
from ssmlx.tuning.chips import CHIPS, Decoder, chip_named, costs, left_out, row_costs
from ssmlx.tuning.cost import DraftShape, Surface, interpolate
from ssmlx.tuning.plan import make_plan
from ssmlx.tuning.profile import ProfileKey, profile_of, store_profile

SECOND = DraftShape(tree=TreeConfig(size=16), num_streams=5)
FUSED = replace(SECOND, stream_schedule="fused")
PRUNED = replace(FUSED, prune=PruneConfig(kind="budget", keep=4))


def test_a_step_of_two_passes_is_the_sum_of_its_parts():
    layers = (6 + 1.6 + 0.2) + (2 + 0.8 + 0.1) + (2 + 0.25 + 0.1)
    heads = (1 + 0.32) + (0.5 + 0.05)
    beside = 0.2 + 0.016
    assert COSTS.step_seconds(SECOND, 100) == pytest.approx(layers + heads + beside)
    assert COSTS.breakeven(SECOND, 100) == pytest.approx((layers + heads + beside) / 10.1)


def test_a_fused_step_pays_for_every_nodes_streams_once():
    layers = (6 + 1.6 + 0.2) + (2 + 0.04 * 96 + 0.1)
    assert COSTS.step_seconds(FUSED, 100) == pytest.approx(layers + 1.32 + 0.55 + 0.1)


def test_pruning_pays_for_the_early_exit_and_spares_rows_above_it():
    layers = (6 + 1.6) + (0.8 + 0.03 * 16) + (2 + 0.04 * 24)
    heads = (1 + 0.02 * 4) + 0.55
    assert COSTS.step_seconds(PRUNED, 0) == pytest.approx(layers + heads + 0.1)
    whole = replace(FUSED, prune=PruneConfig(kind="budget", keep=16))
    assert not whole.is_pruned
    assert COSTS.step_seconds(whole, 0) == COSTS.step_seconds(FUSED, 0)


def test_noise_does_not_make_a_step_cheaper_than_its_forwards():
    noisy = replace(COSTS, overhead={"fused": flat(-100.0, 0.0), "second-pass": flat(-0.1, 0.0)})
    assert noisy.step_seconds(FUSED, 0) == 0.75 * noisy.forward_seconds(FUSED, 0)
    assert noisy.step_seconds(SECOND, 0) == noisy.forward_seconds(SECOND, 0) - 0.1


@pytest.mark.parametrize(
    ("place", "value"), [(0, 10), (1, 10), (2, 20), (2.5, 25), (4, 40), (5, 50), (0.5, 10)]
)
def test_lines_run_through_what_was_measured_and_on(place, value):
    """Beyond the last point the last line goes on; before the first, nothing gets cheaper."""
    assert interpolate([1, 2, 4], [10, 20, 40], place) == value
    assert COSTS.lower.at(0, 500) == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"rows": (4, 1)}, {"contexts": (1000, 0)}, {"rows": (1, 1, 16, 64)}, {"rows": ()},
        {"seconds": ((1.0,) * 4,)}, {"seconds": ((1.0,) * 4, (1.0,) * 3)},
    ],
)  # fmt: skip
def test_a_surface_with_holes_is_refused(broken):
    with pytest.raises(ValueError, match="ascending"):
        replace(COSTS.lower, **broken)


def test_shapes_are_told_in_words():
    full = DraftShape(tree=TreeConfig(kind="full", width=2), num_streams=1)
    assert str(SECOND) == "best tree of 16 nodes, 5 streams, second pass"
    assert str(PRUNED) == "best tree of 16 nodes, pruned to 4, 5 streams, fused"
    assert str(full) == "full tree of 2 a level, 3 nodes, 1 stream, second pass"


def ladder_of(costs: dict[int, float], tokens: dict[int, float]):
    """Rungs of some nodes: a call's cost without drafting, and its tokens, by nodes."""
    return [Rung(shape=n, verify=cost, draft=0.2, tokens=tokens[n]) for n, cost in costs.items()]


PLAIN_SECONDS = 0.02
CHEAP = ladder_of({2: 1.05, 4: 1.1, 8: 1.2}, {2: 1.6, 4: 2.2, 8: 2.6})
RISING = ladder_of({4: 1.2, 6: 1.3, 8: 1.5, 16: 1.8}, {4: 2.2, 6: 2.4, 8: 2.5, 16: 2.8})
DEAR = ladder_of({2: 1.3, 4: 2.4, 8: 5.0}, {2: 1.6, 4: 2.2, 8: 2.6})


def decode(ladder, learned, tokens, says, *, worse=1.0, flat=0.0, slower=lambda _: 1.0, timed=True):
    """Plain calls that an answer of so many tokens took; and what was verified by each call.

    `says` tells how many tokens a tree brings that is verified at some token; extra costs are
    `worse` than expected, or `flat`, and everything is `slower`.
    """
    pace = Pace(ladder, learned, plain=PLAIN_SECONDS)
    took = 0.0
    at = 0
    calls = []
    verified = None
    while at < tokens:
        cost = 1.0
        new = 1
        if verified:
            cost = 1 + (flat or worse * verified.extra)
            new = says(at)
        took += cost
        calls.append(verified.shape if verified else 1)
        drafted = pace.rung
        seconds = cost * slower(at) * PLAIN_SECONDS if timed else None
        pace.observe(new, verified=verified, seconds=seconds)
        if verified and drafted and not pace.rung:
            took += worse * drafted.draft
        at = at + new
        verified = drafted if pace.rung else None
    return took, calls


def test_without_anything_to_learn_the_largest_tree_is_always_drafted():
    assert Pace().rung is not None and Pace(CHEAP).rung is CHEAP[-1]
    pace = Pace(CHEAP)
    for _ in range(50):
        pace.observe(1, verified=CHEAP[-1], seconds=9.0)
    assert pace.rung is CHEAP[-1]


def test_plain_calls_are_timed_once_and_then_drafting_starts_where_it_pays():
    learned = Learned()
    took, calls = decode(CHEAP, learned, 60, lambda at: 3)
    assert calls[:4] == [1] * 4 and 8 in calls[4:8] and took < 45
    again, calls = decode(CHEAP, learned, 60, lambda at: 3)
    assert calls[1] > 1 and again < took, "what was learned outlives the answer"


def test_where_nothing_can_be_timed_the_table_decides():
    assert decode(CHEAP, Learned(), 60, lambda at: 2, timed=False)[1].count(1) < 12
    assert decode(DEAR, Learned(), 200, lambda at: 1, timed=False)[1].count(1) > 180
    near = ladder_of({2: 1.0, 4: 1.3}, {2: 1.9, 4: 2.2})
    tries = [decode(near, Learned(), 60, lambda at: 2, timed=t)[1].count(4) for t in (True, False)]
    assert tries == [3, 1], "what is timed is known soon; else nothing more is tried"


@pytest.mark.parametrize("worse", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("ladder", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_a_text_that_cannot_be_guessed_costs_little(ladder, worse):
    learned = Learned()
    total = 0.0
    for _ in range(20):
        took, _ = decode(ladder, learned, 24, lambda at: 1, worse=worse)
        assert took <= 24 / 0.9  # 0.95 on texts that people write: tests/test_simulate.py
        total += took
    assert total <= 20 * 24 / 0.98


def test_drafting_returns_with_a_text_that_can_be_guessed():
    _, calls = decode(CHEAP, Learned(), 400, lambda at: 1 if at < 150 else 3)
    assert calls[100:140].count(1) > 35 and calls[-20:].count(1) == 0


def test_costs_other_than_expected_are_found_out():
    """Cheaper, trees grow; dearer, they shrink or go; of those as dear the largest is found."""
    for ladder, found, least, most in (
        (DEAR, {"worse": 0.3}, 4, 8),
        (DEAR, {"worse": 4.0}, 1, 2),
        (RISING, {}, 6, 6),
        (RISING, {"flat": 1.0}, 16, 16),
    ):
        _, calls = decode(ladder, Learned(), 400, lambda at: 3, **found)
        assert least <= max(set(calls[-30:]), key=calls[-30:].count) <= most


def test_a_chip_that_throttles_goes_on_drafting():
    _, calls = decode(CHEAP, Learned(), 400, lambda at: 3, slower=lambda at: 1 + 0.6 * (at > 200))
    assert calls[-30:].count(8) > 25


SHAPE = DraftShape(tree=TreeConfig(size=7), num_streams=2, stream_schedule="fused")
SMALL = DraftShape(tree=TreeConfig(size=2), num_streams=1)


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


def test_a_model_with_a_cache_folder_of_its_own_has_the_profiles_there(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))
    model = make_model(seed=2)
    other = make_model(seed=2)
    other.backbone.cache_dir = tmp_path / "own"
    path = store_profile(profile(model, 8.0))
    assert profile_of(model) is not None and profile_of(other) is None
    path.parent.rename((tmp_path / "own").mkdir() or tmp_path / "own/profiles")
    assert profile_of(make_model(seed=2)) is None
    again = make_model(seed=2)
    again.backbone.cache_dir = tmp_path / "own"
    assert profile_of(again) is not None


@pytest.mark.parametrize("costs", [COSTS, replace(COSTS, early_exit=None, overhead=None)])
def test_a_profile_is_found_again_as_it_was(model, costs):
    store_profile(profile(model, 8.0))
    assert profile_of(model).best() == measured(SHAPE, 8.0)
    shapes = (measured(SHAPE, 9.0), measured(replace(PRUNED, num_streams=3), 2.0))
    path = store_profile(profile(model, shapes=shapes, costs=costs))
    assert profile_of(model) == profile(model, shapes=shapes, costs=costs)
    assert profile_of(make_model(seed=2)) == profile_of(model), "by what is loaded"
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing lies beside it"


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 3}, {"seed": 2, "adapter": {"num_streams": 2}}, {"seed": 2, "scope": "streams"},
        {"seed": 2, "architecture": "qwen3"},
    ],
    ids=["weights", "streams", "scope", "architecture"],
)  # fmt: skip
def test_another_model_or_adapter_has_no_profile(model, other):
    store_profile(profile(model))
    assert profile_of(make_model(**other)) is None
    trained = make_model(seed=2)
    embeddings = trained.streams.embeddings * 1.001
    trained.streams = replace(trained.streams, embeddings=embeddings)
    assert profile_of(trained) is None


@pytest.mark.parametrize(
    ("cores", "limits", "expected"),
    [(8, {}, 8), (8, {"OMP_NUM_THREADS": "2"}, 2), (2, {"OPENBLAS_NUM_THREADS": "4"}, 2),
     (8, {"OMP_NUM_THREADS": "0"}, 8), (8, {"OMP_NUM_THREADS": "all"}, 8)],
)  # fmt: skip
def test_cores_are_those_that_the_cpu_backend_may_use(monkeypatch, cores, limits, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    for name in tuning._THREADS:
        monkeypatch.delenv(name, raising=False)
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    assert tuning.this_machine.__wrapped__()[0].endswith(f", {expected} cores")


def test_a_quantised_model_and_another_machine_are_other_places(model, monkeypatch):
    import mlx.nn as nn

    packed = make_model(seed=2)
    for layer in packed.backbone.model.layers:
        nn.quantize(layer.self_attn, group_size=32, bits=4)
    here = ProfileKey.of(model)
    assert ProfileKey.of(packed).model != here.model
    monkeypatch.setattr(model, "draft_head", nn.Linear(2, 2))
    assert ProfileKey.of(model) == here
    model.config = replace(model.config, tokens_per_call={4: 2.0})
    assert ProfileKey.of(model) == here, "what is expected of streams tells none apart"
    monkeypatch.setattr(model.backbone, "draft_bits", 8)
    assert ProfileKey.of(model).adapter != here.adapter
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "this_machine", lambda: ("another chip", "gpu"))
    assert ProfileKey.of(model).path() != here.path()


def _edited(path, **changes):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


def _edited_way(path, *, shape=None, **changes):
    """Its last way, spoilt."""
    *before, last = json.loads(path.read_text())["ways"]
    last = {**last, "shape": {**last["shape"], **(shape or {})}, **changes}
    _edited(path, ways=[*before, last])


BROKEN = {
    "no JSON": (lambda path: path.write_text("{"), "is not valid JSON"),
    "half": (lambda path: path.write_text(path.read_text()[:300]), "is not valid JSON"),
    "a list": (lambda path: path.write_text("[]"), "holds a list"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not UTF-8 text"),
    "another format": (lambda path: _edited(path, format="ssmlx-profile/1"), "ssmlx-profile/1"),
    "no ways": (lambda path: _edited(path, ways=[]), "it says nothing to draft"),
    "no costs": (lambda path: _edited(path, costs=None), "NoneType"),
    "no time at all": (
        lambda path: _edited(path, costs=to_json(replace(COSTS, plain=Surface.of({(1, 0): 0.0})))),
        "division by zero",
    ),
    "another place": (
        lambda path: _edited(
            path, place={**json.loads(path.read_text())["place"], "machine": "another"}
        ),
        "it is of another machine, model or adapter",
    ),
    "another mlx": (lambda path: _edited(path, mlx="0.1"), "measured with mlx 0.1, this is"),
    "more streams": (lambda path: _edited_way(path, shape={"num_streams": 9}), "cannot draft"),
    "a tree of no nodes": (
        lambda path: _edited_way(path, shape={"tree": {"size": 0}}), "--tree-size 0"
    ),
    "no tokens": (lambda path: _edited_way(path, tokens_per_call=0), "out of range"),
}  # fmt: skip


@pytest.mark.parametrize("spoil, reason", BROKEN.values(), ids=BROKEN.keys())
def test_a_profile_that_does_not_fit_is_ignored_in_one_line(model, caplog, capfd, spoil, reason):
    path = store_profile(profile(model, shapes=(measured(SHAPE, 9.0), measured(SMALL, 2.0))))
    spoil(path)
    assert not make_plan(model).is_tuned and profile_of(model) is None
    (line,) = caplog.messages
    assert capfd.readouterr() == ("", "") and "\n" not in line
    assert line.startswith(f"{path} is ignored") and reason in line
    assert line.endswith("python -m ssmlx.calibrate makes a new one")


def test_a_profile_that_cannot_be_written_leaves_the_old_one(model, monkeypatch):
    path = store_profile(profile(model))
    before = path.read_text()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        store_profile(profile(model, 2.0, SMALL))
    assert path.read_text() == before
    assert len(list(path.parent.iterdir())) == 1


def slow(model):
    """One that says that it does not."""
    return profile(model, 1.01)


def test_without_a_profile_nothing_is_tuned(model, capsys):
    plan = make_plan(model)
    config = plan.config
    assert not plan.is_tuned and capsys.readouterr().err == ""
    assert plan.decision.startswith(f"streams draft: best tree of {config.tree.size} nodes, ")
    assert plan.decision.endswith(" times plain decoding on CPU by row costs")
    assert (config.prune, config.stream_schedule) == (PruneConfig(), "second-pass")
    for decoding, told in ((None, "plain decoding: drafts, 0."), ("streaming", "streams draft: ")):
        sure = make_plan(model, deterministic=True, decoding=decoding)
        assert sure.decision.startswith(told)
    drafts = make_plan(model, drafter="lookahead", lookahead=ssmlx.LookaheadConfig(window=3))
    assert drafts.decision == "lookahead drafts: at most 32 nodes a call, 5 tokens ahead"
    assert (
        make_plan(make_model(adapter={"num_streams": 0})).decision
        == "plain decoding: nothing drafts"
    )


def test_what_is_not_asked_for_is_as_the_profile_says(model):
    store_profile(profile(model))
    plan = make_plan(model, max_tokens=5)
    config = plan.config
    drafter = plan.drafter
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
        {"num_streams": 2},
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
    for context, settings, nodes in (
        (10, {}, 7),
        (2000, {}, 2),
        (2000, {"tree": TreeConfig(size=5)}, 5),
        (9000, {"decoding": "streaming"}, 2),
    ):
        assert make_plan(model, context=context, **settings).drafter.max_nodes == nodes
    assert make_plan(model, context=9000).drafter is None


def test_only_where_nothing_is_asked_for_the_clock_decides(model, monkeypatch):
    monkeypatch.setattr("ssmlx.tuning.plan.Pace", Pace)
    for profiled in (False, True):
        if profiled:
            store_profile(profile(model))
        plan = make_plan(model)
        assert plan.experience.learned is plan.pace._learned is not None
        for asked in (
            {"decoding": "streaming"},
            {"drafter": "prompt-lookup"},
            {"tree": TreeConfig()},
            {"prune": PruneConfig(kind="threshold")},
            {"deterministic": True},
        ):
            plan = make_plan(model, **asked)
            assert plan.experience is None and plan.pace._learned is None


def test_decoding_falls_back_and_says_the_same(model, monkeypatch):
    """Drafts of a tiny random model do not pay where a call costs three plain ones."""
    monkeypatch.setattr("ssmlx.tuning.plan.Pace", Pace)
    store_profile(profile(model, costs=replace(COSTS, lower=flat(60.0, 0.0))))
    length = 120
    answers = {}
    lengths = {}
    for decoding in (None, "streaming", "plain"):
        steps = token_steps(model, [3, 1], model.make_cache(), decoding=decoding)
        answers[decoding], lengths[decoding] = first_tokens(steps, length)
    assert answers[None] == answers["streaming"] == answers["plain"]
    assert len(lengths["streaming"]) < len(lengths[None]) <= length


def test_deterministic_answers_make_the_same_calls_on_every_machine(model):
    """One machine was not calibrated, one drafts otherwise, one not at all, one falls back."""
    dear = replace(COSTS, lower=flat(60.0, 0.0))
    profiles = (None, profile(model), slow(model), profile(model, costs=dear), by_context(model))
    calls: dict = {True: set(), False: set()}
    for one in profiles:
        if one is not None:
            store_profile(one)
        for sure, settings in ((False, {}), (True, {}), (True, {"temp": 1.0})):
            config = ssmlx.GenerateConfig(deterministic=sure, max_tokens=24, **settings)
            answer = ssmlx.stream_generate(model, make_tokenizer(), [3, 1], config)
            told = tuple(segment.tokens for segment in answer)
            calls[sure].add((str(settings), told))
        plan = make_plan(model, deterministic=True)
        assert not plan.is_tuned and plan.pace._learned is None
    assert len(calls[True]) == 2, "one a setting"
    assert len(calls[False]) > 2


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


def test_chips_are_known_by_name_and_others_by_the_nearest():
    names = {
        "Apple M3 Max": "M3 Max", "Apple M9": "M5", "Apple M4 Ultra": "M3 Ultra",
        "Apple A18 Pro": "M1", "NVIDIA H200": "CUDA", "Intel(R) Xeon(R) Processor": "CPU",
        "Apple M2, 8 cores": "CPU",
    }  # fmt: skip
    assert {name: chip_named(name).name for name in names} == names


def test_more_streams_than_rows_have_a_cost_are_planned():
    assert make_plan(make_model(adapter={"num_streams": 130})).kind == "streams"


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_more_rows_are_never_cheaper_on_any_chip(name, bits):
    low, middle, high = (row_costs(CHIPS[name], bits, one) for one in ("low", "middle", "high"))
    for curve in (low, middle, high):
        assert curve[1] == 1 and list(curve) == sorted(curve)
    assert all(a <= b + 1e-9 and b <= c + 1e-9 for a, b, c in zip(low, middle, high, strict=True))


def test_row_costs_hold_for_authors_whose_figures_were_left_out():
    """The error that perf/README tells of."""
    errors = [abs(error) for of_source in left_out().values() for error in of_source]
    assert len(errors) > 80
    assert median(errors) < 0.16
    assert sum(error < 0.25 for error in errors) > 0.65 * len(errors)


def test_rows_go_through_experts_of_their_own():
    base = make_base("mixtral", num_local_experts=8, num_experts_per_tok=2)
    decoder = Decoder.of(StreamFusedModel(Backbone(base)))
    assert (decoder.experts, decoder.experts_per_row) == (8, 2)
    dense = replace(decoder, experts=0).layer_bytes()
    expert = 4 * 3 * decoder.hidden * decoder.inner
    found = [decoder.layer_bytes(rows, 1.0) - dense for rows in (1, 2, 1000)]
    assert [one / expert for one in found] == pytest.approx([1, 2.5, 7])


def test_a_loaded_model_is_a_decoder_in_numbers():
    model = make_model(num_hidden_layers=4)
    decoder = Decoder.of(model)
    assert decoder == Decoder(
        name="llama",
        hidden=32,
        heads=4,
        kv_heads=2,
        head_size=8,
        inner=48,
        layers=4,
        vocab=13,
        bits=32,
        msa_layers=2,
        num_streams=3,
        draft_vocab=13,
    )
    shape = DraftShape(tree=TreeConfig(size=4), num_streams=3)
    priced = [costs(decoder, CHIPS["M3 Max"], one) for one in ("low", "high")]
    assert 1 < priced[0].breakeven(shape, 100) <= priced[1].breakeven(shape, 100)
