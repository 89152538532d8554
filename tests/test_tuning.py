"""Profiles on disk, what makes one unfit, and what the runtime does with one that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from real import make_adapter, write_adapter, write_base, write_tiny_adapter
from test_cost import COSTS, flat
from tiny import first_tokens, make_model

import ssmlx
from ssmlx.api import token_steps
from ssmlx.commands import chat, generate
from ssmlx.decoding.pace import FIRST_WAIT, PATIENCE, TRIAL_PATIENCE
from ssmlx.errors import InputError
from ssmlx.plan import make_plan
from ssmlx.settings import AcceptanceConfig, GenerateConfig, PruneConfig, TreeConfig
from ssmlx.tuning import machine
from ssmlx.tuning import profile as tuning
from ssmlx.tuning.cost import DraftShape, MeasuredShape, Surface
from ssmlx.tuning.profile import (
    Profile,
    ProfileKey,
    mlx_version,
    profile_of,
    store_profile,
)

SHAPE = DraftShape(tree=TreeConfig(size=7), num_streams=2, stream_schedule="fused")
SMALL = DraftShape(tree=TreeConfig(size=2), num_streams=1)
OPEN = GenerateConfig()


@pytest.fixture(autouse=True)
def forgotten():
    """Profiles are looked up once for a loaded model, and these tests share theirs."""
    tuning._KNOWN.clear()


@pytest.fixture(scope="module")
def model():
    return make_model(seed=2)


def profile(model, **changes) -> Profile:
    """One that says that drafting pays."""
    values = {
        "key": ProfileKey.of(model), "made": "2026-08-02", "mlx": mlx_version(), "context": 100,
        "shapes": (best(),), "costs": COSTS, **changes,
    }  # fmt: skip
    return Profile(**values)


def best(tokens_per_call=9.0, shape=SHAPE) -> MeasuredShape:
    return MeasuredShape(shape=shape, tokens_per_call=tokens_per_call)


def slow(model, **changes) -> Profile:
    """One that says that it does not."""
    return profile(model, shapes=(best(1.01),), **changes)


def test_profiles_lie_in_the_cache_folder(model, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))
    assert store_profile(profile(model)).parent == tmp_path / "cache" / "profiles"


def test_a_profile_is_found_again_as_it_was(model):
    path = store_profile(profile(model))
    assert profile_of(model) == profile(model)
    assert profile_of(make_model(seed=2)) == profile(model), "by what is loaded, not by the object"
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing lies beside it"


def test_a_new_profile_takes_the_place_of_the_old_one(model):
    store_profile(profile(model))
    assert profile_of(model).best() == best(9.0)
    store_profile(profile(model, shapes=(best(8.0),)))
    assert profile_of(model).best() == best(8.0)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 3}, {"seed": 2, "num_streams": 2}, {"seed": 2, "scope": "streams"},
        {"seed": 2, "architecture": "qwen3"},
    ],
    ids=["weights", "streams", "scope", "architecture"],
)  # fmt: skip
def test_another_model_or_adapter_has_no_profile(model, other):
    store_profile(profile(model))
    assert profile_of(make_model(**other)) is None


def test_streams_that_were_trained_anew_have_no_profile_yet(model):
    store_profile(profile(model))
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
    assert tuning._num_cores() == expected


def test_a_quantised_model_and_another_machine_are_other_places(model, monkeypatch):
    import mlx.nn as nn

    packed = make_model(seed=2)
    for layer in packed.backbone.model.layers:
        nn.quantize(layer.self_attn, group_size=32, bits=4)
    here = ProfileKey.of(model)
    assert ProfileKey.of(packed).model != here.model
    monkeypatch.setattr(model, "_draft_head", nn.Linear(2, 2))
    assert ProfileKey.of(model) == here
    monkeypatch.setattr(model.backbone, "draft_bits", 8)
    assert ProfileKey.of(model).adapter != here.adapter
    monkeypatch.undo()
    monkeypatch.setattr(tuning, "this_machine", lambda: ("another chip", "gpu"))
    assert ProfileKey.of(model).path != here.path


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
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    "another format": (lambda path: _edited(path, format="ssmlx-profile/1"), "ssmlx-profile/1"),
    "no ways": (lambda path: _edited(path, ways=[]), "it says nothing to draft"),
    "no costs": (lambda path: _edited(path, costs=None), "NoneType"),
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
def test_a_profile_that_does_not_fit_is_ignored_in_one_line(model, capsys, spoil, reason):
    path = store_profile(profile(model, shapes=(best(), best(2.0, SMALL))))
    spoil(path)
    assert make_plan(model).config == OPEN.with_default_shape()
    assert profile_of(model) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ssmlx: {path} is ignored") and reason in line
    assert line.endswith("python -m ssmlx.calibrate makes a new one")


def test_where_there_is_none_nothing_is_said(model, capsys):
    assert profile_of(model) is None and not make_plan(model).is_tuned
    assert capsys.readouterr().err == ""


def test_a_profile_that_cannot_be_written_leaves_the_old_one(model, monkeypatch):
    path = store_profile(profile(model))
    before = path.read_text()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        store_profile(slow(model))
    assert path.read_text() == before
    assert len(list(path.parent.iterdir())) == 1


def test_what_is_not_asked_for_is_as_the_profile_says(model):
    store_profile(profile(model))
    plan = make_plan(model, max_tokens=5)
    config, drafter = plan.config, plan.drafter
    assert (config.tree, config.num_streams) == (SHAPE.tree, 2)
    assert (config.stream_schedule, config.prune) == ("fused", PruneConfig())
    assert config.max_tokens == 5
    assert (drafter.max_nodes, drafter.num_levels, drafter.num_streams) == (7, 2, 2)


ASKED = {
    "tree": TreeConfig(size=4),
    "prune": PruneConfig(),
    "num_streams": 1,
    "stream_schedule": "second-pass",
}


@pytest.mark.parametrize("name", ASKED)
def test_whoever_asks_for_any_of_it_gets_the_defaults_beside_it(model, name):
    store_profile(profile(model))
    asked = GenerateConfig(**{name: ASKED[name]})
    plan = make_plan(model, asked)
    assert plan.config == asked.with_default_shape()
    assert not plan.is_tuned


def test_the_defaults_are_the_same_on_every_machine():
    config = OPEN.with_default_shape()
    assert (config.tree, config.prune) == (TreeConfig(), PruneConfig())
    assert (config.num_streams, config.stream_schedule) == (None, "second-pass")


def test_a_tuned_pruning_budget_reaches_the_loop(model, monkeypatch):
    budget = PruneConfig(kind="budget", keep=3)
    store_profile(profile(model, shapes=(best(shape=replace(SHAPE, prune=budget)),)))
    seen = []
    monkeypatch.setattr(ssmlx.api, "streaming_decode", lambda *a, **k: seen.append(k["prune"]))
    token_steps(model, [1], model.make_cache(), OPEN)
    assert seen == [budget]


def test_tuned_decoding_says_what_plain_decoding_says(model):
    store_profile(profile(model))
    plain = GenerateConfig(decoding="plain")
    answers = [
        first_tokens(token_steps(model, [3, 1], model.make_cache(), config), 30)[0]
        for config in (OPEN, plain)
    ]
    assert answers[0] == answers[1]


def test_plain_decoding_is_taken_where_it_is_faster(model):
    store_profile(slow(model))
    plan = make_plan(model)
    assert plan.kind is None and plan.drafter is None and plan.is_tuned


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


def test_streaming_that_is_asked_for_is_still_tuned(model):
    store_profile(slow(model))
    assert make_plan(model, decoding="streaming").config.tree == SHAPE.tree


def test_another_drafter_has_nothing_to_do_with_it(model):
    store_profile(slow(model))
    plan = make_plan(model, drafter="prompt-lookup")
    assert plan.kind == "prompt-lookup" and not plan.is_tuned
    assert plan.config.tree == TreeConfig()


def test_the_line_says_what_is_done(model):
    store_profile(profile(model))
    assert make_plan(model).decision == (
        "tuned for this machine: best tree of 7 nodes, 2 streams, fused "
        "(ssmlx.calibrate, 2026-08-02)"
    )
    plain = make_plan(model, decoding="plain")
    assert (plain.decision, plain.is_tuned) == ("plain decoding, as --decoding says", False)
    store_profile(slow(model))
    assert make_plan(model).decision == (
        "tuned for this machine: plain decoding, which is faster (ssmlx.calibrate, 2026-08-02)"
    )


ROW_BY_CONTEXT = Surface.of(
    {
        (rows, context): 6 + rows / 10 + rows * context / 1000
        for rows in (1, 64)
        for context in (0, 1000)
    }
)
"""Milliseconds of rows that cost the more the more they see."""


def by_context(model) -> Profile:
    """A small tree is faster from some 940 tokens on, and plain decoding from some 7,400."""
    costs = replace(COSTS, lower=ROW_BY_CONTEXT)
    return profile(model, shapes=(best(3.0), best(2.4, SMALL)), costs=costs)


def test_the_longer_the_context_the_smaller_the_tree(model):
    found = by_context(model)
    assert found.best() == found.best(0) == found.best(300) == best(3.0)
    assert found.best(2000) == best(2.4, SMALL)
    assert found.drafting_pays() and found.drafting_pays(2000) and not found.drafting_pays(9000)
    for context in (0, 300, 2000, 9000):
        speeds = [
            one.tokens_per_call / found.costs.breakeven(one.shape, context) for one in found.shapes
        ]
        assert found.speedup(context) == max(speeds)


def test_of_equal_ways_the_first_is_taken(model):
    other = replace(SHAPE, stream_schedule="second-pass")
    gain = COSTS.breakeven(other, 50) / COSTS.breakeven(SHAPE, 50)
    for more, expected in ((1.005, SHAPE), (1.02, other)):
        found = profile(model, shapes=(best(3.0), best(3.0 * gain * more, other)))
        assert found.best(50).shape == expected


def test_an_answer_is_drafted_as_its_context_says(model, monkeypatch):
    store_profile(by_context(model))
    seen = []

    def streaming_decode(*args, drafter, pace, **more):
        seen.append((drafter.max_nodes, pace._breakeven))

    monkeypatch.setattr(ssmlx.api, "streaming_decode", streaming_decode)
    monkeypatch.setattr(ssmlx.api, "plain_decode", lambda *args, **more: seen.append("plain"))
    cache = model.make_cache()
    token_steps(model, [1] * 10, cache, OPEN)
    monkeypatch.setattr(type(cache), "offset", 1990)
    token_steps(model, [1] * 10, cache, OPEN)
    token_steps(model, [1] * 10, cache, replace(OPEN, tree=TreeConfig(size=5)))
    monkeypatch.setattr(type(cache), "offset", 9000)
    token_steps(model, [1] * 10, cache, OPEN)
    token_steps(model, [1] * 10, cache, replace(OPEN, decoding="streaming"))
    costs = by_context(model).costs
    asked = DraftShape(tree=TreeConfig(size=5), num_streams=model.num_streams)
    assert seen == [
        (7, costs.breakeven(SHAPE, 10)),
        (2, costs.breakeven(SMALL, 2000)),
        (5, costs.breakeven(asked, 2000)),
        "plain",
        (2, None),
    ]


def test_the_line_says_where_it_depends_on_the_context(model):
    store_profile(by_context(model))
    assert "fused, other trees behind other contexts (ssmlx.calibrate" in make_plan(model).decision


def breakeven(model, **settings) -> float | None:
    return make_plan(model, **settings).pace._breakeven


def test_the_pace_knows_what_a_call_costs(model):
    store_profile(profile(model))
    assert breakeven(model) == pytest.approx(COSTS.breakeven(SHAPE, 100))
    other = DraftShape(tree=TreeConfig(size=4), num_streams=3)
    assert breakeven(model, tree=TreeConfig(size=4)) == pytest.approx(COSTS.breakeven(other, 100))


def test_behind_contexts_that_nobody_measured_streams_are_on_trial(model):
    store_profile(profile(model))
    patience = [make_plan(model, context=c).pace._patience for c in (None, 400, 401)]
    assert patience == [PATIENCE, PATIENCE, TRIAL_PATIENCE]


@pytest.mark.parametrize(
    "asked",
    [{"decoding": "streaming"}, {"drafter": "prompt-lookup"},
     {"prune": PruneConfig(kind="threshold")}],
    ids=["asked for", "another drafter", "no fixed cost"],
)  # fmt: skip
def test_the_pace_never_stops_what_it_cannot_price(model, asked):
    store_profile(profile(model))
    assert breakeven(model, **asked) is None


def test_without_a_profile_the_pace_never_stops(model):
    assert breakeven(model) is None


def test_decoding_falls_back_and_returns_and_says_the_same(model):
    """Drafts of a tiny random model do not pay where a call costs three plain ones."""
    dear = replace(COSTS, lower=flat(27.0, 0.0))
    store_profile(profile(model, costs=dear))
    length = 120
    answers, lengths = {}, {}
    for config in (OPEN, GenerateConfig(decoding="streaming"), GenerateConfig(decoding="plain")):
        steps = token_steps(model, [3, 1], model.make_cache(), config)
        answers[config.decoding], lengths[config.decoding] = first_tokens(steps, length)
    assert answers[None] == answers["streaming"] == answers["plain"]
    paused = lengths[None]
    assert len(lengths["streaming"]) < len(paused) < length
    ones = "".join(str(num) for num in paused).split("1" * (FIRST_WAIT - 2))
    assert len(ones) > 1, "it fell back"
    assert any(num > 1 for num in paused[60:]), "and returned"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("tuning") / "base")


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
    tuned = [line for line in err.splitlines() if "tuned" in line]
    assert tuned == [
        "[tuned for this machine: best tree of 7 nodes, 2 streams, fused "
        "(ssmlx.calibrate, 2026-08-02)]"
    ]
    assert json.loads(out)["tokens"] == before["tokens"]


def test_generate_decodes_plainly_where_that_is_faster(base, adapter, capsys):
    store_for(base, adapter, slow)
    assert ask(base, adapter, "--jsonl") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens_per_call"] == 1
    assert "[tuned for this machine: plain decoding, which is faster" in err
    assert ask(base, adapter, "--tree", "best") == 0
    assert "tuned" not in capsys.readouterr().err


def test_chat_is_tuned_and_says_so(base, adapter, capsys, monkeypatch):
    store_for(base, adapter, slow)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    lines = iter(["/adapter"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
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


# --------------------------------------------------------------------------------- machine

MAC = {
    "sysctl -n machdep.cpu.brand_string": "Apple M2 Pro",
    "sysctl -n hw.memsize": "17179869184",
    "sw_vers": "ProductName:\t\tmacOS\nProductVersion:\t\t15.1\nBuildVersion:\t\t24B83",
    "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0\t87%; discharging",
}


@pytest.fixture
def mac(monkeypatch):
    """A Mac whose tools say what `said` holds."""
    said = dict(MAC)
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine, "output_of", lambda *args: said.get(" ".join(args), ""))
    return said


def test_a_mac_is_described(mac):
    found = machine.machine()
    assert found["machine"] == "Darwin arm64, Apple M2 Pro"
    assert (found["memory"], found["os"]) == ("16 GiB", "macOS 15.1 (24B83)")
    assert found["power"] == "battery"
    mac["pmset -g batt"] = "Now drawing from 'AC Power'"
    assert machine.power_source() == "AC power"
    mac.clear()
    found = machine.machine()
    assert found["machine"] == "Darwin arm64, unknown"
    assert {found[name] for name in ("memory", "os", "power", "commit")} == {"unknown"}


@pytest.fixture
def linux(monkeypatch, tmp_path):
    """A Linux machine whose files are in the folder that this gives."""
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "POWER_SUPPLY", tmp_path / "power")
    monkeypatch.setattr(machine, "OS_RELEASE", tmp_path / "os-release")
    return tmp_path


def supply(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_a_linux_machine_is_described(linux):
    (linux / "cpuinfo").write_text("model name\t: Fast 9000\nflags\t: a\nmodel name\t: Fast 9000\n")
    (linux / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    (linux / "os-release").write_text('ID=x\nPRETTY_NAME="Some Linux 12"\n')
    found = machine.machine()
    assert found["machine"].endswith(", Fast 9000") and found["memory"] == "16 GiB"
    assert found["os"] == "Some Linux 12" and found["power"] == "unknown"
    supply(linux / "power" / "BAT0", type="Battery", status="Discharging")
    assert machine.power_source() == "battery"
    supply(linux / "power" / "AC", type="Mains", online="1")
    assert machine.power_source() == "AC power"


def test_a_machine_that_tells_nothing_is_unknown(linux, monkeypatch):
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    assert (machine.chip(), machine.memory(), machine.power()) == ("unknown",) * 3
    assert machine.os_version() == "Linux"
    assert machine.output_of("no-such-command-here") == machine.output_of("false") == ""


def test_the_commit_says_whether_files_were_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CHECKOUT", tmp_path)
    assert machine.commit() == "unknown"
    (tmp_path / ".git").mkdir()
    said = {"rev-parse": "abc123", "status": " M a.py"}
    monkeypatch.setattr(machine, "output_of", lambda *args: said[args[3]])
    assert machine.commit() == "abc123, changed"
    said["status"] = ""
    assert machine.commit() == "abc123"


def test_versions_of_everything_that_takes_part():
    found = machine.machine()
    assert {"mlx", "mlx-lm", "numpy", "ssmlx", "python", "blas", "device", "commit"} <= set(found)
    assert found["ssmlx"] == ssmlx.__version__
    assert machine.package_version("no-such-package-here") == "unknown"
