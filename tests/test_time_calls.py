"""What a call costs is measured in the loop that answers are decoded in."""

from itertools import count

import pytest
from tiny import let_calls_take

from ssmlx.generation.time_calls import measure_costs

TEXT = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]


@pytest.fixture
def model(loaded):
    return loaded[0]


def test_a_slow_tree_is_dear(model, monkeypatch):
    let_calls_take(monkeypatch, lambda nodes: 0.5 if nodes == 4 else 0.1)
    costs = measure_costs(model, TEXT, (4, 2, 3), seconds=0).costs
    assert costs == pytest.approx({2: 1.0, 3: 1.0, 4: 5.0})


def test_nothing_larger_is_timed_than_what_can_pay(model, monkeypatch):
    let_calls_take(monkeypatch, lambda nodes: 0.8 if nodes >= 4 else 0.1)
    costs = measure_costs(model, TEXT, (2, 4, 8, 16), seconds=0).costs
    assert costs == pytest.approx({2: 1.0, 4: 8.0}) and costs[4] > 1 + model.num_streams


def test_the_first_round_ends_where_its_time_does(model, monkeypatch):
    let_calls_take(monkeypatch, lambda nodes: 0.1)
    long = measure_costs(model, TEXT, (2, 4, 8), seconds=0, first_round_seconds=1.5)
    assert long.plain_seconds == pytest.approx([0.1] * 3)
    assert [*long.costs] == [2, 4]  # each size takes half a second
    none = measure_costs(model, TEXT, (2, 4, 8), seconds=0, first_round_seconds=0.05)
    assert not none.costs and not none.plain_seconds


def test_the_least_of_the_rounds_counts(model, monkeypatch):
    """A machine that does something else now and then makes no size dear."""
    number = count()
    # Plain calls in the first round, and those of two nodes in the second.
    disturbed = {*range(7), *range(26, 32)}
    let_calls_take(monkeypatch, lambda nodes: 0.5 if next(number) in disturbed else 0.1)
    timings = measure_costs(model, TEXT, (2, 3), seconds=6.0)
    assert timings.costs == pytest.approx({2: 1.0, 3: 1.0})
    assert timings.plain_seconds == pytest.approx([0.5] * 3 + [0.1] * 3)
    assert max(disturbed) < next(number) < 2 * max(disturbed)
