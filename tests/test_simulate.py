"""Recorded answers, and the brake that they are replayed against."""

import json
from collections import Counter
from itertools import cycle, islice
from random import Random

import numpy as np
import pytest
from real import exit_code, one_line
from tiny import make_model

from perf import acceptance, simulate
from perf.predict import ON
from perf.simulate import CONVERSATION, SCENARIOS, TABLE, Machine, broken, cases, play, play_fixed
from ssmlx.decoding.loop import streaming_decode
from ssmlx.decoding.pace import Rung
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.errors import InputError
from ssmlx.loading.names import CONFIG_FILE, bundled_adapters
from ssmlx.settings import TreeConfig
from ssmlx.training.replay import advance

RUNGS = [Rung(verify=cost, draft=0.1, tokens=tokens) for cost, tokens in ((1.2, 2.0), (1.5, 2.5))]


def test_adapters_tell_what_was_recorded_of_them_alone():
    kept = acceptance.read_kept()
    assert acceptance.KEPT.stat().st_size < 300_000
    for name, folder in bundled_adapters().items():
        told = json.loads((folder / CONFIG_FILE).read_text())["tokens_per_call"]
        assert told == acceptance.curve(kept[name, 0])
        assert list(told.values()) == sorted(told.values()), "larger trees hold more"


def test_what_is_kept_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "KEPT", tmp_path / "kept.npz")
    rng = np.random.default_rng(0)
    answers = [
        acceptance.Held(rng.integers(2, 34, (3, length, 3), dtype=np.int32)) for length in (5, 9)
    ]
    acceptance._keep("chat-0", answers[1:], "so")
    acceptance._keep("sql-512", answers, "and so")
    read = acceptance.read_kept()
    assert list(read) == [("chat", 0), ("sql", 512)]
    for one, other in zip(read["sql", 512], answers, strict=True):
        assert np.array_equal(one.needed, other.needed)
    notes = json.loads((tmp_path / "kept.json").read_text())
    assert notes == {"chat-0": "so", "sql-512": "and so"}


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    def refused(module, asked, said):
        assert exit_code(module.main, *asked.split()) == 2
        assert said in one_line(capsys.readouterr().err, module.PROG)

    refused(simulate, "--contexts 7", "--contexts 7; expected one of 0, 512, 2000")
    refused(acceptance, "--adapter chat --count 16", "chat-0 is kept of --count 40")
    refused(acceptance, "--adapter chat --count 40", "chat-2000 is kept of --count 16")
    refused(acceptance, "--contexts 0 -5", "--contexts -5: expected 0 or more")
    kept = acceptance.KEPT.read_bytes()
    monkeypatch.setattr(acceptance, "KEPT", tmp_path / "kept.npz")
    for content in (b"", b"junk", kept[:9000]):
        acceptance.KEPT.write_bytes(content)
        refused(simulate, "", "kept.npz is incomplete")
    recorder = object.__new__(acceptance.Recorder)
    recorder.asked = [{}] * 3
    recorder.others = []
    with pytest.raises(InputError, match="--count 3 of as many prompts"):
        recorder.record(512)


class Turns:
    """A pace that takes one rung after the other, and notes what calls verify."""

    num_drafted = 0

    def __init__(self, rungs):
        self.turns = cycle(rungs)
        self.told = []
        self.rung = next(self.turns)

    def observe(self, num_tokens, *, verified=None, seconds=None):
        self.told.append(verified)
        self.rung = next(self.turns)


@pytest.mark.parametrize("seed", range(4))
def test_calls_are_those_of_the_loop(seed):
    """Whatever a pace decides, the simulator's calls verify what those of `streaming_decode` do."""
    model = make_model()
    rng = Random(seed)
    drafter = StreamDrafter(model, TreeConfig(size=4), model.num_streams)
    turns = [rng.choice([None, None, *RUNGS, *RUNGS]) for _ in range(30)]
    real = Turns(turns)
    played = Turns(turns)
    steps = streaming_decode(model, [1, 2, 3], model.make_cache(4), drafter=drafter, pace=real)
    list(islice(filter(None, steps), 25))
    play(dict.fromkeys(RUNGS, [0] * 25), machine(), played)
    assert played.told[:25] == real.told[:25]


def machine(scenario=TABLE, tokens=100):
    return Machine(RUNGS, scenario, tokens, "0")


def test_a_fixed_tree_takes_the_calls_of_a_replay():
    depths = [1, 0, 2, 0, 1, 1, 0, 3, 0, 0, 0]
    found = play_fixed(dict.fromkeys(RUNGS, depths), machine(), RUNGS[1])
    calls = advance([np.array(depths)]).num_calls
    assert found.took == pytest.approx(1.6 * calls)
    assert found.plain == len(depths) - 1, "the prompt's call is the same in both"
    assert found.speed == found.plain / found.took


def test_a_machine_is_as_its_scenario_says():
    assert set(machine().factors.values()) == {1.0}
    assert set(machine("40 % dearer").factors.values()) == {1.4}
    rows = machine("rows cheap, calls dear")
    assert [rows.beyond(one.extra, one) for one in RUNGS] == pytest.approx([0.55, 0.7])
    disturbed = machine("each rung 40 % off")
    costs = [disturbed.beyond(one.extra, one) for one in RUNGS]
    assert costs == sorted(costs) and disturbed.factors == machine("each rung 40 % off").factors
    hot = machine("throttled half-way", 10)
    before = hot.beyond(1.0, RUNGS[0])
    hot.tokens = 5
    assert (hot.plain, hot.beyond(1.0, RUNGS[0])) == (1.5, pytest.approx(1.5 * 1.3 * before))


def test_a_stopped_draft_is_paid_for():
    answer = play(dict.fromkeys(RUNGS, [0] * 6), machine(), Turns([RUNGS[0]] * 3 + [None] * 9))
    spent = 2 * 0.3 + 0.1  # two trees verified, and a third drafted
    assert answer.took == pytest.approx(5 + spent)


def test_broken_promises_are_named():
    fine = {"worst": 0.95, "brake": 1.0, "best": 1.05}
    assert broken(fine) == []
    assert broken({**fine, "worst": 0.94}) == ["answer"]
    assert broken({**fine, "brake": CONVERSATION - 0.01}) == ["conversation", "gap"]
    assert broken({**fine, "brake": 1.1, "best": 1.2}) == ["gap"]


def test_promises_hold_on_chips_drawn_by_lot():
    """Two are not kept everywhere: see `perf.simulate`, and perf/README for how often."""
    rng = Random(17)
    chips = rng.sample([chip.name for chip in ON], 4)
    found = [case.play(rng.choice([*SCENARIOS])) for case in rng.sample([*cases(chips, [0])], 40)]
    counts = Counter(name for row in found for name in broken(row))
    assert not counts["conversation"], "no conversation is slower than plain decoding"
    assert counts["answer"] <= 6 and counts["gap"] <= 5, counts
