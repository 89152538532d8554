"""What answers teach of a machine: how calls are timed, and what is kept for later processes."""

import json

import pytest
from tiny import make_model, make_packed_base, make_tokenizer

import ssmlx
from ssmlx.decoding import stopwatch
from ssmlx.decoding.stopwatch import Stopwatch
from ssmlx.generation import learned
from ssmlx.generation.learned import Learned, adapter_digest, geometry_digest, learned_of
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel


class Device:
    """A clock, and a device that takes a second a call: in launching it, or until it is read."""

    def __init__(self, monkeypatch, *, blocks: bool) -> None:
        self.time = 100.0
        self.done = 0.0
        self.blocks = blocks
        monkeypatch.setattr(stopwatch, "now", lambda: self.time)
        monkeypatch.setattr("mlx.core.async_eval", self.launch)

    def launch(self, *arrays) -> None:
        self.done = max(self.done, self.time) + 1.0
        if self.blocks:
            self.time = self.done

    def read(self) -> int:
        self.time = max(self.time, self.done)
        return 7


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("away", [0.0, 0.3, 5.0])
def test_a_call_lasts_from_one_read_to_the_next(monkeypatch, blocks, away):
    """A host that comes late does not know for how long the device was busy."""
    device = Device(monkeypatch, blocks=blocks)
    watch = Stopwatch()
    found = []
    pending = watch.launch()
    for _ in range(4):
        token, seconds = watch.read(pending, device.read)
        found.append(seconds)
        pending = watch.launch()
        for given in watch.yield_untimed(token):
            assert given == 7
            device.time += away
    if away < 1.0:
        assert found == pytest.approx([1.0] * 4)
    else:
        assert found[1:] == [None] * 3


def test_a_call_that_takes_longest_to_build_lasts_as_long_as_that(monkeypatch):
    device = Device(monkeypatch, blocks=False)
    watch = Stopwatch()
    pending = watch.launch()
    watch.read(pending, device.read)
    for _ in range(3):
        pending = watch.launch()
        device.time += 4.0  # building the one behind it
        token, seconds = watch.read(pending, device.read)
        assert seconds == pytest.approx(4.0)
        list(watch.yield_untimed(token))


def test_nothing_is_timed_between_the_calls_of_another_loop(monkeypatch):
    device = Device(monkeypatch, blocks=False)
    one = Stopwatch()
    other = Stopwatch()
    pending = one.launch()
    other.launch()
    assert one.read(pending, device.read) == (7, None)
    assert one.read(one.launch(), device.read)[1] == pytest.approx(1.0)
    pending = one.launch()
    one.note_other_work()
    assert one.read(pending, device.read) == (7, None)
    assert one.read(one.launch(), device.read)[1] == pytest.approx(1.0)


def answer(model, **settings):
    segments = ssmlx.stream_generate(model, make_tokenizer(), [3, 1], max_tokens=60, **settings)
    return [token for segment in segments for token in segment.tokens]


def test_what_is_learned_outlives_answers_and_processes(monkeypatch):
    monkeypatch.setattr(learned, "_SECONDS_BETWEEN_WRITES", -1.0)
    model = make_model()
    expected = answer(model, decoding="plain")
    for _ in range(3):
        assert answer(model) == expected
    known, prior = learned_of(model)
    again = Learned(known.path)
    assert again.costs.to_dict()["costs"] == known.costs.to_dict()["costs"] != []
    assert again.prior(adapter_digest(model)).to_dict() == prior.to_dict() != {"ratios": []}


def test_nothing_is_learned_where_calls_are_to_be_the_same():
    model = make_model()
    found = [answer(model, deterministic=True) for _ in range(2)]
    known, prior = learned_of(model)
    assert found[0] == found[1]
    assert known.costs.to_dict()["costs"] == [] and prior.to_dict() == {"ratios": []}


def test_costs_belong_to_a_geometry_and_acceptance_to_an_adapter():
    """Other weights of the same sizes cost the same; their texts are guessed otherwise."""
    one = make_model()
    two = make_model(seed=5)
    assert geometry_digest(one) == geometry_digest(two)
    assert learned_of(one)[0] is learned_of(two)[0]
    assert learned_of(one)[1] is not learned_of(two)[1]
    plain = StreamFusedModel(Backbone(make_packed_base()))
    others = [make_model(scope="streams"), make_model(adapter={"condition_rank": 4}), plain]
    assert len({geometry_digest(model) for model in [one, *others]}) == 4


def test_another_machine_is_another_place(monkeypatch):
    model = make_model()
    before = geometry_digest(model)
    monkeypatch.setattr(learned, "this_machine", lambda: ("Apple M4 Pro", "gpu"))
    assert geometry_digest(model) != before


@pytest.mark.parametrize(
    ("cores", "limits", "expected"),
    [(8, {}, "8 cores"), (8, {"OMP_NUM_THREADS": "2"}, "2 cores"), (1, {}, "1 core"),
     (8, {"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "x"}, "8 cores")],
)  # fmt: skip
def test_cores_are_those_that_the_cpu_backend_may_use(monkeypatch, cores, limits, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    learned.this_machine.cache_clear()
    name, _ = learned.this_machine()
    learned.this_machine.cache_clear()
    assert name.endswith(f", {expected}")


BROKEN = {
    "half": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "another format": lambda text: text.replace("ssmlx-costs/1", "ssmlx-costs/9"),
    "another MLX": lambda text: text.replace(learned.MLX_VERSION, "0.1"),
    "not a number": lambda text: text.replace("2.25", "NaN"),
    "words": lambda text: text.replace("2.25", '"much"'),
    "below nothing": lambda text: text.replace("2.25", "-2.25"),
    "no acceptance": lambda text: text.replace('"acceptance"', '"acceptances"'),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_believed_is_as_none(tmp_path, spoil, capfd):
    path = tmp_path / "costs.json"
    known = Learned(path)
    known.costs.set_head_start({("streams", 4): 2.25}, 0)
    known.prior("an adapter").learn("streams", 0, 9.0, 12.0)
    known.keep()
    known.write()
    again = Learned(path)
    assert again.costs.frozen(0).calls(("streams", 4)) == 2.25
    assert again.prior("an adapter").to_dict() == known.prior("an adapter").to_dict()
    text = path.read_text()
    assert json.loads(text) and "2.25" in text
    path.write_text(spoil(text))
    broken = Learned(path)
    assert broken.costs.to_dict()["costs"] == []
    assert broken.prior("an adapter").to_dict() == {"ratios": []}
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_written_is_lost_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    known = Learned(tmp_path / "file" / "costs.json")
    known.keep()
    known.write()
    assert (tmp_path / "file").read_text() == ""
