"""ssmlx.calibrate: what is timed and chosen, and the command, with clocks and costs made up."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from real import exit_code, one_line, write_base, write_tiny_adapter
from tiny import COSTS, FakeClock, first_tokens, flat, make_model

from ssmlx.api import token_steps
from ssmlx.calibration import choice
from ssmlx.calibration import choice as calibrate_choice
from ssmlx.calibration import costs as calibrate_costs
from ssmlx.calibration.costs import (
    CostPlan,
    config_of,
    forward_costs,
    head_calls,
    layer_calls,
    medians,
    spread,
    with_whole_steps,
)
from ssmlx.calibration.recorded import split_prompts
from ssmlx.calibration.timing import TimedAnswer
from ssmlx.commands import calibrate
from ssmlx.errors import InputError
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import STREAM_SCHEDULES, GenerateConfig, TreeConfig
from ssmlx.training import replay
from ssmlx.training.guesses import guesses_along
from ssmlx.tuning import profile as tuning
from ssmlx.tuning.cost import DraftShape, Surface

PLAN = CostPlan(rows=(1, 2, 5), fused_nodes=(1, 3), contexts=(8, 20), repeats=2)
PROG = "ssmlx.calibrate"


@pytest.fixture(scope="module", autouse=True)
def steady_copies():
    """Replays trust them as if every token had been a call's, which is near but not the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmlx.drafters.copies.DOUBT", 1e9)
        yield


@pytest.fixture(scope="module")
def model():
    return make_model(seed=1)


def test_a_median_is_taken_over_rounds_in_turn_but_the_first():
    clock = FakeClock()
    order = []
    slow = iter([100.0, 3.0, 1.0, 2.0])

    def call(name, seconds):
        order.append(name)
        clock.spend(seconds)

    calls = {
        ("lower", 1, 0): lambda: call("a", next(slow)),
        ("upper", 1, 0): lambda: call("b", 5.0),
        ("plain", 1, 0): lambda: 0.25,
    }
    found, noise = medians(calls, 3, clock)
    assert noise == 0.0, "of the three, two are steady"
    assert found == {("lower", 1, 0): 2.0, ("upper", 1, 0): 5.0, ("plain", 1, 0): 0.25}
    assert order == ["a", "b"] * 4
    assert [spread(one) for one in ([1.0], [2.0, 2.0], [1.0, 2.0, 3.0, 4.0])] == [0.0, 0.0, 0.6]


def test_every_forward_is_timed_on_every_row_behind_every_context(model):
    costs, _ = forward_costs(model, [1, 2, 3], PLAN, clock=FakeClock(1.0))
    assert costs.lower.rows == costs.upper.rows == costs.head.rows == (1, 2, 5)
    assert costs.lower.contexts == costs.fused.contexts == costs.plain.contexts == (8, 20)
    assert costs.fused.rows == (4, 12), "nodes with three streams each"
    assert costs.draft_head.rows == (1, 2, 3)
    assert costs.early_exit is not None and costs.early_exit.rows == (1, 2, 5)
    # The clock is read twice a call; every call's share of handing over work is taken off.
    assert {one for line in costs.lower.seconds for one in line} == {0.0}
    assert costs.plain_seconds(8) == pytest.approx(1 / calibrate_costs.PLAIN_CALLS)


def test_the_calls_run_what_they_are_called(model, monkeypatch):
    """The layers and rows that each stage really sees."""
    seen = []
    real = model.backbone.run

    def run(hidden, first, last, mask, views):
        places = getattr(views[0].offset, "array", views[0].offset)
        first_place = int(mx.array(places).min().item())
        seen.append((hidden.shape[1], first, last, first_place))
        return real(hidden, first, last, mask, views)

    monkeypatch.setattr(model.backbone, "run", run)
    cache = calibrate_costs.filled_cache(model, [1, 2, 3], 20, 64)
    seen.clear()
    for (name, rows, context), call in layer_calls(model, cache, 20, PLAN).items():
        call()
        layers = (0, 1) if name == "lower" else (1, 3)
        assert (seen.pop(), seen, context) == ((rows, *layers, 20), [], 20)
    for call in head_calls(model, PLAN).values():
        call()
    assert seen == [] and cache.offset == 20
    assert (
        calibrate_costs.plain_call(model, cache, FakeClock(6.0)) == 6 / calibrate_costs.PLAIN_CALLS
    )
    assert cache.offset == 20, "as it was"
    bare = make_model(seed=1)
    bare.streams = replace(bare.streams, prune=None)
    assert not any(name == "early_exit" for name, _, _ in head_calls(bare, PLAN))


def test_what_lies_beside_the_forwards_is_what_steps_take_beyond_them(model):
    shapes = [
        DraftShape(tree=TreeConfig(size=size), num_streams=3, stream_schedule=schedule)
        for size in (2, 6)
        for schedule in ("fused", "second-pass")
    ]
    bare = replace(COSTS, overhead=None)
    costs = with_whole_steps(model, bare, [[1, 2, 3]], shapes, steps=3, clock=FakeClock(50.0))
    for shape in shapes:
        # The context moves a little from step to step, and with it the forwards.
        assert costs.step_seconds(shape, 8) == pytest.approx(50.0, abs=0.1)
    assert costs.overhead["fused"].rows == (2, 6)


def candidate(size, tokens, seconds, **changes) -> choice.PricedShape:
    shape = DraftShape(tree=TreeConfig(size=size), num_streams=3, **changes)
    return choice.PricedShape(
        shape=shape, tokens_per_call=tokens, step_seconds=seconds, plain_seconds=1.0
    )


def test_the_fastest_is_chosen_and_of_equals_the_cheapest_step():
    slow = candidate(4, 1.5, 1.2)
    fast = candidate(16, 3.0, 1.5)
    almost = candidate(8, 2.39, 1.2)
    less = candidate(6, 1.9, 1.0)
    assert choice.best([slow, fast]) == fast
    assert fast.speedup == 2.0
    assert fast.to_dict()["options"] == (
        '--drafter "streams schedule=second-pass" --tree best --tree-size 16 --num-streams 3'
    )
    assert choice.best([slow, fast, almost, less]) == almost, "within a hundredth, at less a call"


def at(costs, context):
    """Prices behind a context."""
    return partial(choice.PricedShape.of, costs=costs, context=context)


priced = partial(choice.priced_trees, schedules=STREAM_SCHEDULES)


def certain(tokens: list[int], rank: list[list[int]]) -> replay.Guesses:
    """Streams that have the answer's token at the rank given for each place; -1 is nowhere."""
    length = len(tokens)
    streams = 2
    count = 4
    guesses = np.full((length, streams, count), 99, np.int32)
    for place in range(length):
        for stream in range(streams):
            at = rank[place][stream]
            following = place + 1 + stream
            if at >= 0 and following < length:
                guesses[place, stream, at] = tokens[following]
    logprobs = np.broadcast_to(-np.arange(1.0, count + 1), guesses.shape)
    return replay.Guesses(guesses, logprobs.astype(np.float32), np.array(tokens))


def test_more_streams_and_larger_trees_are_worth_what_they_say():
    """Both streams are right first: a chain takes three tokens a call."""
    guesses = certain(list(range(10, 20)), [[0, 0]] * 10)
    found = {one.shape: one for one in priced([guesses], [2, 3, 4], at(COSTS, 50))}
    chain = DraftShape(tree=TreeConfig(size=3), num_streams=2)
    assert found[chain].tokens_per_call == 3.0
    assert found[chain].step_seconds == COSTS.step_seconds(chain, 50)
    one = DraftShape(tree=TreeConfig(size=4), num_streams=1)
    assert found[one].tokens_per_call == pytest.approx(9 / 5)
    assert max(found.values(), key=lambda one: one.tokens_per_second).shape.num_streams == 2
    # Fused pays where reading the upper layers again costs more than rows do.
    rows_cheap = replace(COSTS, fused=flat(2.0, 0.0, rows=(2, 400)))
    reads_cheap = replace(COSTS, upper=flat(0.1, 0.0))
    for costs, schedule in ((rows_cheap, "fused"), (reads_cheap, "second-pass")):
        assert choice.best(priced([guesses], [4], at(costs, 50))).shape.stream_schedule == schedule


def test_rows_that_grow_dearer_with_the_context_make_trees_smaller():
    rng = np.random.default_rng(0)
    ranks = [[int(rng.choice([0, 1, 2, 3])), int(rng.choice([0, 1, -1]))] for _ in range(60)]
    lower = Surface.of(
        {(rows, context): 6 + rows * context / 500 for rows in (1, 64) for context in (0, 1000)}
    )
    costs = replace(COSTS, lower=lower)
    guesses = certain(list(range(100, 160)), ranks)
    candidates = priced([guesses], [2, 3, 4, 6, 8, 12], at(costs, 0))
    found = choice.best_by_context(candidates, costs, [0, 500, 4000])
    sizes = [one.shape.num_nodes for one in found.values()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2]
    assert found[0] == choice.best(candidates)
    assert found[500].step_seconds == costs.step_seconds(found[500].shape, 500)


def test_the_choice_is_checked_against_the_default_a_small_tree_and_the_other_schedule():
    trees = [
        candidate(size, 2.0, 1.0, stream_schedule=schedule)
        for size in (4, 16, 24)
        for schedule in ("fused", "second-pass")
    ]
    found = {name: str(one.shape) for name, one in choice.shapes_to_check(trees[-1], trees).items()}
    assert found == {
        choice.CHOSEN: "best tree of 24 nodes, 3 streams, second pass",
        "default": "best tree of 16 nodes, 3 streams, second pass",
        "small": "best tree of 4 nodes, 3 streams, second pass",
        "other schedule": "best tree of 24 nodes, 3 streams, fused",
    }
    found = choice.shapes_to_check(trees[3], trees)
    assert set(found) == {choice.CHOSEN, "small", "other schedule"}


def test_prompts_to_learn_from_are_the_last_and_those_to_check_on_before_them():
    prompts = [[number] for number in range(10)]
    assert split_prompts(prompts, 2, 3) == ([[8], [9]], [[5], [6], [7]])
    assert split_prompts(prompts, 10, 0) == (prompts, [])
    for count, check in ((0, 1), (1, -1), (6, 5)):
        with pytest.raises(InputError, match=f"--count {count} --check {check} of 10 prompts"):
            split_prompts(prompts, count, check)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = write_base(tmp_path_factory.mktemp("calibrate") / "base")
    adapter = write_tiny_adapter(base.parent / "adapter", base)
    data = base.parent / "data.jsonl"
    lines = [json.dumps({"prompt": f"w{n} w{n + 1} w{n + 2}"}) for n in range(8)]
    data.write_text("\n".join(lines))
    return base, adapter, data


@pytest.fixture
def calibrated(folders, tmp_path, capsys):
    """Run the command on a tiny model; gives (exit code, stdout, stderr)."""
    base, adapter, data = folders
    tuning._KNOWN.clear()

    def run(*args, adapter=str(adapter), data=("--data", str(data))):
        argv = ["--model", base, "--adapter", adapter, "--dtype", "float32", *data]
        argv += ["--count", 4, "--check", 2, "--max-tokens", 24, "--repeats", 1]
        argv += ["--contexts", 16, 64, "--largest-tree", 8, "--out", tmp_path / "out"]
        return exit_code(calibrate.main, *argv, *args), *capsys.readouterr()

    return run


def test_the_command_measures_chooses_checks_and_keeps(calibrated, tmp_path):
    code, out, _ = calibrated("--noisy")
    assert code == 0
    result = json.loads((tmp_path / "out" / "calibrate-adapter.json").read_text())
    assert (tmp_path / "out" / "calibrate-adapter.txt").read_text().strip() in out
    (kept,) = (tmp_path / "profiles").iterdir()
    assert json.loads(kept.read_text()) == result["profile"]
    ways = [one["shape"] for one in result["profile"]["ways"]]
    assert ways[0] == result["chosen"]["shape"]
    assert [one["context"] for one in result["by_context"]] == [16, 64]
    assert all(one["shape"] in ways for one in result["by_context"])
    assert "the fastest way behind other contexts" in out
    speeds = [one["tokens_per_second"] for one in result["candidates"]]
    assert result["chosen"]["tokens_per_second"] >= 0.99 * max(speeds)
    assert {one["name"] for one in result["checks"]} >= {"chosen", "plain"}
    assert all(one["same_tokens"] and one["measured"] > 0 for one in result["checks"])
    assert f"kept {kept}" in out and "all ways gave the same tokens" in out


@pytest.mark.slow
def test_the_choice_of_a_busy_machine_is_told_and_not_kept(calibrated, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate_costs, "spread", lambda times: 0.34)
    code, out, _ = calibrated("--check", "0")
    assert code == 0 and "held-out" not in out
    assert "timings varied by 34 %: something else was running, calibrate again" in out
    assert "not kept: such timings decide by chance" in out
    assert not (tmp_path / "profiles").exists()


@pytest.mark.slow
def test_a_check_that_has_nothing_to_time_is_told_and_one_that_stops_leaves_the_choice(
    calibrated, monkeypatch, tmp_path
):
    monkeypatch.setattr(calibrate_choice, "ssmlx_answer", lambda *_: TimedAnswer([1], 1, 0.0))
    code, out, err = calibrated("--no-store", "--check", "1")
    assert code == 0 and calibrate.NOTHING_CHECKED in err
    assert "not kept, as --no-store says" in out and not (tmp_path / "profiles").exists()
    result = json.loads((tmp_path / "out" / "calibrate-adapter.json").read_text())
    assert result["checks"] == []

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_choice, "ssmlx_answer", stop)
    code, out, _ = calibrated("--noisy")
    (kept,) = (tmp_path / "profiles").iterdir()
    assert code == 130 and f"kept {kept}" in out


BAD = {
    "no streams": ({"adapter": "none"}, (), "the model has no streams to calibrate"),
    "no data": ({"data": ()}, (), "no prompts ship with the adapter adapter"),
    "missing data": ({"data": ("--data", "nowhere.jsonl")}, (), "nowhere.jsonl does not exist"),
    "too few": ({}, ("--count", "7"), "--count 7 --check 2 of 8 prompts"),
    "short answers": ({}, ("--max-tokens", "2"), "the answers have 8 tokens in all"),
    "contexts": ({}, ("--contexts", "0", "5"), "--contexts 0; expected 1 or more"),
    "tree": ({}, ("--largest-tree", "1"), "--largest-tree 1; expected 2 or more nodes"),
    "word": ({}, ("--count", "many"), "invalid int value: 'many'"),
}


@pytest.mark.parametrize("changes, args, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_leaves_nothing(calibrated, tmp_path, changes, args, message):
    code, out, err = calibrated(*args, **changes)
    assert (code, out) == (2, "")
    assert message in one_line(err, PROG)
    assert not (tmp_path / "profiles").exists()
    assert not list(Path(tmp_path / "out").glob("*"))


# --- replays of recorded guesses against real decoding: the same calls, tree for tree ---

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 60
LARGEST = 24
DRAFT_VOCAB = (0, 2, 3, 5, 6, 8, 9, 11, 12)


@pytest.fixture(
    scope="module",
    params=["all", "streams", "draft vocabulary", "condition", "condition, vocabulary"],
)
def guesser(request):
    """A tiny model whose streams are right often enough: few tokens, wide trees."""
    if request.param in ("all", "streams"):
        return make_model(scope=request.param, seed=4)
    rank = 4 if request.param.startswith("condition") else 0
    model = make_model(seed=4, adapter={"condition_rank": rank})
    if request.param == "condition":
        return model
    config = replace(model.config, draft_vocab_size=len(DRAFT_VOCAB))
    streams = replace(model.streams, draft_vocab=mx.array(DRAFT_VOCAB, mx.int32))
    return StreamFusedModel(model.backbone, config, streams)


@pytest.fixture(scope="module")
def guesses(guesser):
    config = GenerateConfig(decoding="plain")
    steps = token_steps(guesser, PROMPT, guesser.make_cache(), config)
    return guesses_along(guesser, PROMPT, first_tokens(steps, LENGTH)[0], 64)


def real_calls(guesser, shape: DraftShape) -> tuple[list[int], int]:
    """The answer, and the calls that really decoding it takes, after the prompt's."""
    steps = token_steps(guesser, PROMPT, guesser.make_cache(), config_of(shape))
    tokens, lengths = first_tokens(steps, LENGTH)
    return tokens, len(lengths) - 1


BEST = [TreeConfig(size=size) for size in (2, 7, LARGEST)]
SHAPES = [
    DraftShape(tree=tree, num_streams=streams, stream_schedule=schedule)
    for streams, schedule, trees in (
        (3, "second-pass", BEST),
        (3, "fused", BEST[1:2]),
        (2, "second-pass", BEST[2:]),
        (1, "fused", BEST[1:2]),
    )
    for tree in trees
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_replay_takes_the_calls_that_decoding_takes(guesser, guesses, shape):
    tokens, calls = real_calls(guesser, shape)
    needed = replay.needed_sizes(guesses, shape.num_streams, LARGEST)
    replayed = replay.advance([replay.depths_within(needed, shape.tree.size)])
    assert tokens == guesses.answer.tolist()
    assert (replayed.num_tokens, replayed.num_calls) == (LENGTH - 1, calls)
