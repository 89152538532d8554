"""perf.compare on tiny adapters, each scope and value rotation; perf.first_token."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from real import make_adapter, one_line, without_prune, words, write_base

from perf import compare, first_token
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


def result(tmp_path, name):
    return json.loads((tmp_path / "results" / f"{name}.json").read_text())


SYSTEMS = {"tuned": 6, "light": 6, "turned": 3}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_tree_of_an_adapter_is_lossless(folders, tmp_path, name, capsys):
    argv = ["--task", "sql", "--adapter", folders / name, "--model", folders / "base"]
    argv += ["--data", folders / "prompts.jsonl", "--count", 2, "--max-tokens", 6]
    argv += ["--systems", "trees", "--steps", 2, "--repeats", 1, "--out", tmp_path / "results"]
    assert compare.main(list(map(str, argv))) == 0
    (task,) = result(tmp_path, "compare")["tasks"]
    rows = task["systems"]
    assert [row["kind"] for row in rows] == ["mlx-lm", "plain", *["streams"] * SYSTEMS[name]]
    assert {row["same_as_plain"] for row in rows} == {2}
    assert set(task["left_out"].values()) <= {"the adapter has no pruning adapter"}
    assert len(task["left_out"]) == 6 - SYSTEMS[name]
    assert (task["adapter"], task["data"]) == (name, "prompts.jsonl")
    assert task["scope"] == ("streams" if name == "light" else "all")
    step = task["step"]
    assert step["name"] == rows[2]["name"] and step["nodes"] == 3
    assert 0 < step["one_row"] < 1 and step["forward"] > 0 and step["allowed"] > 0
    out = capsys.readouterr().out
    assert "2 of 2" in out and "a step of its 3 nodes: its forward" in out


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
