"""perf.speed and perf.lossless on tiny adapters: each scope, value rotation."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from real import exit_code, make_adapter, one_line, without_prune, words, write_base

from perf import first_token, lossless, speed
from ssmlx.loading.adapter import Adapter, write_adapter


def with_rotation(adapter: Adapter) -> Adapter:
    """The adapter with values turned in place of embeddings, and 20 tokens to draft from."""
    config = replace(
        adapter.config, stream_design="value_rotation", rotation_step=0.4, draft_vocab_size=20
    )
    vocab = mx.arange(3, 63, 3).astype(mx.int32)
    return replace(
        adapter, config=config, streams=replace(adapter.streams, embeddings=None, draft_vocab=vocab)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, adapters, and prompts."""
    root = tmp_path_factory.mktemp("perf")
    base = write_base(root / "base")
    tuned, light = (make_adapter(base, scope=scope) for scope in ("all", "streams"))
    adapters = {"tuned": tuned, "light": light, "turned": with_rotation(without_prune(tuned))}
    for name, adapter in adapters.items():
        (root / name).mkdir()
        write_adapter(root / name, adapter)
    rows = [json.dumps({"prompt": words(5, first), "completion": "w1"}) for first in (1, 9, 17)]
    (root / "prompts.jsonl").write_text("\n".join(rows))
    return root


@pytest.fixture
def measure(folders, tmp_path):
    """Run a command on a tiny adapter; gives its exit code."""

    def run(command, name, *more):
        argv = ["--adapter", folders / name, "--model", folders / "base", "--max-tokens", 6]
        argv += ["--data", folders / "prompts.jsonl", "--count", 2]
        argv += ["--out", tmp_path / "results"]
        return command.main([*map(str, argv), *more])

    return run


def result(tmp_path, name):
    return json.loads((tmp_path / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["tuned", "light", "turned"])
def test_the_speed_of_an_adapter(measure, tmp_path, name):
    assert measure(speed, name, "--steps", "2", "--tree-size", "6") == 0
    found = result(tmp_path, "speed-sql")
    summary = found["summary"]
    assert [row["kind"] for row in summary["systems"]] == ["mlx-lm", "plain", "streams"]
    assert [row["same_as_plain"] for row in summary["systems"]] == [2, 2, 2]
    assert (summary["adapter"], summary["data"]) == (name, "prompts.jsonl")
    assert summary["scope"] == ("streams" if name == "light" else "all")
    assert found["step"]["tree_size"] == 6 and found["step"]["forward"] > 0
    assert (tmp_path / "results" / "speed-sql.png").exists()


@pytest.mark.parametrize(("name", "variants"), [("tuned", 8), ("light", 8), ("turned", 5)])
def test_an_adapter_is_lossless(measure, tmp_path, name, variants, capsys):
    assert measure(lossless, name) == 0
    rows = result(tmp_path, "lossless-sql")["tasks"][0]["systems"]
    assert [row["same_as_plain"] for row in rows] == [2] * variants
    assert "2 of 2" in capsys.readouterr().out


BAD = {
    "none": (("--adapter", "none"), "expected streams to measure"),
    "missing": (("--adapter", "nowhere"), "no adapter folder nowhere"),
    "data": (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
    "count": (("--count", "0"), "--count 0"),
    "length": (("--max-tokens", "0"), "--max-tokens 0: expected 1 or more"),
}


@pytest.mark.parametrize(("argv", "said"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("command", [speed, lossless])
def test_bad_input_is_one_line(command, argv, said, capsys):
    assert exit_code(command.main, *argv) == 2
    assert said in one_line(capsys.readouterr().err, command.PROG)


def test_the_first_token_is_timed_cold_and_warm(folders, tmp_path, capsys):
    argv = ["--model", str(folders / "base"), "--adapter", str(folders / "light")]
    argv += ["--contexts", "40", "8", "--repeats", "2", "--out", str(tmp_path / "results")]
    assert first_token.main(argv) == 0
    found = result(tmp_path, "first-token")
    rows = [(row["context"], row["decoding"], row["same"]) for row in found["rows"]]
    assert rows == [(n, how, True) for n in (8, 40) for how in ("plain", "streaming")]
    assert all(row[side] > 0 for row in found["rows"] for side in first_token.SIDES)
    assert "disk / allowed" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        f"first-token.{kind}" for kind in ("json", "txt")
    ]
    assert first_token.main([*argv, "--contexts", "256"]) == 2
    assert "less than the model's context of 256" in one_line(
        capsys.readouterr().err, "perf.first_token"
    )
