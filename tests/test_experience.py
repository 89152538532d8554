"""What answers teach of a machine: how calls are timed, and what is kept for later processes."""

import json

import pytest
from tiny import make_model, make_tokenizer

import ssmlx
from ssmlx.decoding import stopwatch
from ssmlx.decoding.pace import Learned, Mean, Pace
from ssmlx.decoding.stopwatch import Stopwatch
from ssmlx.tuning import experience
from ssmlx.tuning.experience import Experience, experience_of


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
    launch = watch.launch()
    for _ in range(4):
        token, seconds = watch.read(launch, device.read)
        found.append(seconds)
        launch = watch.launch()
        for given in watch.away(token):
            assert given == 7
            device.time += away
    if away < 1.0:
        assert found == pytest.approx([1.0] * 4)
    else:
        assert found[1:] == [None] * 3


def test_nothing_is_timed_between_the_calls_of_another_loop(monkeypatch):
    device = Device(monkeypatch, blocks=False)
    one = Stopwatch()
    other = Stopwatch()
    launch = one.launch()
    other.launch()
    assert one.read(launch, device.read) == (7, None)
    assert one.read(one.launch(), device.read)[1] == pytest.approx(1.0)


@pytest.fixture
def model():
    return make_model()


def answer(model, **settings):
    segments = ssmlx.stream_generate(model, make_tokenizer(), [3, 1], max_tokens=20, **settings)
    return [token for segment in segments for token in segment.tokens]


def test_what_is_learned_outlives_answers_and_processes(model, monkeypatch, tmp_path):
    monkeypatch.setattr("ssmlx.tuning.plan.Pace", Pace)
    monkeypatch.setattr(experience, "_EVERY", -1.0)
    expected = answer(model, decoding="plain")
    for _ in range(3):
        assert answer(model) == expected
    known = experience_of(model)
    values = json.loads(known.path.read_text())
    assert set(values) == {"format", "mlx", "costs", "texts", "saved"} and known.learned.seen
    again = Experience(known.path).learned
    assert (again.costs, again.texts) == (known.learned.costs, known.learned.texts)
    assert not again.seen and not again.speed.weight, "a process times its own plain calls"
    other = make_model(seed=5)
    assert experience_of(other).learned is not known.learned


BROKEN = {
    "half": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "another format": lambda text: text.replace("experience/1", "experience/9"),
    "not a number": lambda text: text.replace('"saved": -1.5', '"saved": NaN'),
    "words": lambda text: text.replace('"saved": -1.5', '"saved": "much"'),
    "endless": lambda text: text.replace('"saved": -1.5', f'"saved": {"9" * 400}'),
    "below nothing": lambda text: text.replace("0.75", "-0.75"),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_believed_is_as_none(tmp_path, spoil, capfd):
    path = tmp_path / "known.json"
    known = Experience(path)
    known.learned = Learned({"a": Mean(0.75, 3.0)}, {"0": Mean(1.25, 9.0)}, -1.5)
    known.keep(), known.write()
    assert Experience(path).learned == known.learned
    path.write_text(spoil(path.read_text()))
    assert Experience(path).learned == Learned()
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_written_is_lost_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    known = Experience(tmp_path / "file" / "known.json")
    known.keep(), known.write()
    assert (tmp_path / "file").read_text() == ""
