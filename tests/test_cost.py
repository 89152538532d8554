"""The cost of a step, and when drafting pays: arithmetic on made-up costs, no clock."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from ssmlx.decoding.pace import FIRST_WAIT, LONGEST_WAIT, PATIENCE, TRIAL_PATIENCE, Pace
from ssmlx.settings import PruneConfig, TreeConfig, from_json, to_json
from ssmlx.tuning.cost import DraftShape, StepCosts, Surface, interpolate

ROWS = (1, 4, 16, 64)


def flat(base: float, per_row: float, per_token: float = 0.0, rows=ROWS) -> Surface:
    """base + per_row * rows + per_token * context."""
    points = {
        (row, context): base + per_row * row + per_token * context
        for row in rows
        for context in (0, 1000)
    }
    return Surface.of(points)


COSTS = StepCosts(
    plain=flat(10.0, 0.0, 0.001, rows=(1,)),
    lower=flat(6.0, 0.1, 0.002),
    upper=flat(2.0, 0.05, 0.001),
    fused=flat(2.0, 0.04, 0.001, rows=(2, 400)),
    head=flat(1.0, 0.02),
    draft_head=flat(0.5, 0.01),
    early_exit=flat(0.8, 0.03),
    overhead={"fused": flat(0.1, 0.0), "second-pass": flat(0.2, 0.001)},
)
SECOND = DraftShape(tree=TreeConfig(size=16), num_streams=5)
FUSED = replace(SECOND, stream_schedule="fused")
PRUNED = replace(FUSED, prune=PruneConfig(kind="budget", keep=4))


def test_a_step_of_two_passes_is_the_sum_of_its_parts():
    layers = (6 + 1.6 + 0.2) + (2 + 0.8 + 0.1) + (2 + 0.25 + 0.1)
    heads, beside = (1 + 0.32) + (0.5 + 0.05), 0.2 + 0.016
    assert COSTS.step_seconds(SECOND, 100) == pytest.approx(layers + heads + beside)


def test_a_fused_step_pays_for_every_nodes_streams_once():
    layers = (6 + 1.6 + 0.2) + (2 + 0.04 * 96 + 0.1)
    assert COSTS.step_seconds(FUSED, 100) == pytest.approx(layers + 1.32 + 0.55 + 0.1)


def test_pruning_pays_for_the_early_exit_and_spares_rows_above_it():
    layers = (6 + 1.6) + (0.8 + 0.03 * 16) + (2 + 0.04 * 24)
    heads = (1 + 0.02 * 4) + 0.55
    assert COSTS.step_seconds(PRUNED, 0) == pytest.approx(layers + heads + 0.1)


def test_noise_does_not_make_a_step_cheaper_than_its_forwards():
    noisy = replace(COSTS, overhead={"fused": flat(-100.0, 0.0), "second-pass": flat(-0.1, 0.0)})
    assert noisy.step_seconds(FUSED, 0) == 0.75 * noisy.forward_seconds(FUSED, 0)
    assert noisy.step_seconds(SECOND, 0) == noisy.forward_seconds(SECOND, 0) - 0.1


def test_a_budget_that_drops_nothing_costs_nothing():
    whole = replace(FUSED, prune=PruneConfig(kind="budget", keep=16))
    assert not whole.is_pruned
    assert COSTS.step_seconds(whole, 0) == COSTS.step_seconds(FUSED, 0)


def test_pruning_that_nobody_measured_has_no_price():
    with pytest.raises(ValueError, match="pruning"):
        replace(COSTS, early_exit=None).step_seconds(PRUNED, 0)


def test_the_breakeven_is_what_a_call_costs_in_plain_calls():
    assert COSTS.breakeven(SECOND, 500) == pytest.approx(COSTS.step_seconds(SECOND, 500) / 10.5)


@pytest.mark.parametrize(
    ("place", "value"), [(0, 10), (1, 10), (2, 20), (2.5, 25), (4, 40), (5, 50), (0.5, 10)]
)
def test_lines_run_through_what_was_measured_and_on(place, value):
    """Beyond the last point the last line goes on; before the first, nothing gets cheaper."""
    assert interpolate([1, 2, 4], [10, 20, 40], place) == value


def test_no_rows_cost_nothing():
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


@pytest.mark.parametrize("costs", [COSTS, replace(COSTS, early_exit=None, overhead=None)])
def test_costs_survive_json(costs):
    assert from_json(StepCosts, json.loads(json.dumps(to_json(costs)))) == costs


@pytest.mark.parametrize("shape", [SECOND, FUSED, PRUNED], ids=DraftShape.text)
def test_shapes_survive_json(shape):
    assert from_json(DraftShape, json.loads(json.dumps(to_json(shape)))) == shape


def test_shapes_are_told_in_words_and_options():
    full = DraftShape(tree=TreeConfig(kind="full", width=2), num_streams=1)
    assert SECOND.text() == "best tree of 16 nodes, 5 streams, second pass"
    assert PRUNED.text() == "best tree of 16 nodes, pruned to 4, 5 streams, fused"
    assert full.text() == "full tree of 2 a level, 3 nodes, 1 stream, second pass"
    assert full.options() == (
        '--drafter "streams schedule=second-pass" --tree full --tree-width 2 --num-streams 1'
    )
    assert PRUNED.options() == (
        '--drafter "streams schedule=fused" --tree best --tree-size 16 --prune budget --prune-to 4 '
        "--num-streams 5"
    )


BREAKEVEN = 1.5


def decode(pace: Pace, tokens_of_draft, calls: int) -> tuple[int, float, list[bool]]:
    """Tokens, plain calls' time that they took, and whether each call drafted."""
    tokens, time, drafted, fresh = 0, 0.0, [], True
    for _ in range(calls):
        drafted.append(pace.drafting)
        has_draft = pace.drafting and not fresh
        num, cost = (tokens_of_draft(tokens), BREAKEVEN) if has_draft else (1, 1.0)
        fresh = not pace.drafting
        pace.observe(num, drafted=has_draft)
        tokens, time = tokens + num, time + cost
    return tokens, time, drafted


def test_without_a_measurement_drafting_never_stops():
    pace = Pace()
    for _ in range(1000):
        assert pace.drafting
        pace.observe(1)


def test_drafting_goes_on_where_it_pays():
    assert all(decode(Pace(BREAKEVEN), lambda at: 2, 2000)[2])


def test_what_pays_on_average_is_rarely_stopped_by_chance():
    rng = random.Random(0)
    _, _, drafted = decode(Pace(BREAKEVEN), lambda at: rng.choice([1, 1, 2, 4]), 4000)
    assert sum(drafted) / len(drafted) > 0.95


def test_drafting_stops_after_its_patience_is_lost_and_waits_longer_each_time():
    """Each call loses half a plain call: 16 lose `PATIENCE`, and then 6 a trial's."""
    _, _, drafted = decode(Pace(BREAKEVEN), lambda at: 1, 300)
    runs = [(drafted[0], 0)]
    for one in drafted:
        runs = [*runs[:-1], (one, runs[-1][1] + 1)] if one == runs[-1][0] else [*runs, (one, 1)]
    first, trial = 1 + int(PATIENCE / 0.5), 1 + int(TRIAL_PATIENCE / 0.5)
    waits = [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, LONGEST_WAIT]
    expected = [(True, first), (False, waits[0])]
    for wait in waits[1:3]:
        expected += [(True, trial), (False, wait)]
    assert runs[:6] == expected
    assert runs[7] == (False, LONGEST_WAIT), "no longer than that"


def test_on_trial_drafting_stops_sooner_from_the_first_call_on():
    _, _, drafted = decode(Pace(BREAKEVEN, on_trial=True), lambda at: 1, 300)
    assert drafted.index(False) == 1 + int(TRIAL_PATIENCE / 0.5)


def test_a_call_without_a_draft_says_nothing():
    """Such as a spell's first: it always advances by one token."""
    pace = Pace(20.0)
    for _ in range(3):
        pace.observe(1, drafted=False)
    assert pace.drafting and pace.tokens_per_call is None
    pace.observe(1)
    assert not pace.drafting and pace.tokens_per_call == 1


def test_a_draft_that_comes_after_the_end_of_its_spell_shortens_the_wait():
    pace = Pace(20.0)
    pace.observe(1)
    pace.observe(5, drafted=True)
    for _ in range(FIRST_WAIT - 5):
        assert not pace.drafting
        pace.observe(1, drafted=False)
    assert pace.drafting


def test_an_unpredictable_text_costs_little():
    tokens, time, _ = decode(Pace(BREAKEVEN), lambda at: 1, 2000)
    assert time / tokens < 1.06, "where drafting throughout costs 1.5"


def test_drafting_returns_when_the_text_gets_predictable():
    pace = Pace(BREAKEVEN)
    _, _, drafted = decode(pace, lambda at: 1 if at < 100 else 3, 400)
    assert not all(drafted) and all(drafted[-200:])


def test_after_a_long_good_spell_all_patience_is_back():
    pace = Pace(BREAKEVEN)
    decode(pace, lambda at: 1, 200)
    while not pace.drafting:
        pace.observe(1)
    pace.observe(1)
    for _ in range(40):
        pace.observe(3)
    for _ in range(int(PATIENCE / 0.5) - 1):
        pace.observe(1)
    assert pace.drafting
    pace.observe(1)
    assert not pace.drafting
    for _ in range(FIRST_WAIT):
        assert not pace.drafting
        pace.observe(1)
    assert pace.drafting


def test_a_spell_that_does_not_pay_does_not_win_back_patience():
    """However long it is: at a twentieth of a loss a call, a trial takes 60 of them."""
    pace = Pace(1.05)
    for _ in range(1000):
        pace.observe(1)
        if not pace.drafting:
            break
    for _ in range(FIRST_WAIT + 1):
        pace.observe(1)
    calls = 0
    while pace.drafting:
        pace.observe(1)
        calls += 1
    assert calls == pytest.approx(TRIAL_PATIENCE / 0.05, abs=1)


@pytest.mark.parametrize("breakeven", [0.0, -1.0, float("nan"), float("inf")])
def test_a_breakeven_is_a_number_above_zero(breakeven):
    with pytest.raises(ValueError, match="breakeven"):
        Pace(breakeven)
