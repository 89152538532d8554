"""Folders and files: written whole or not at all, read strictly; and the adapter folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import ssmlx

import mlx.core as mx  # isort: skip
from real import EXAMPLE, WIDTH, make_adapter, snapshot, without_prune, write_base

from ssmlx.errors import InputError
from ssmlx.loading.adapter import load_adapter, write_adapter
from ssmlx.loading.files import account_for, new_folder, read_tensors, write_whole


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- files ---


def test_a_new_folder_appears_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_folder(target) as work:
        (work / "a").write_text("new")
        assert not target.exists() and work.parent == target.parent
    assert snapshot(target) == {"a": b"new"}
    assert target.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("old", [False, True])
def test_a_failed_folder_leaves_nothing_and_keeps_the_old(tmp_path, error, old):
    target = tmp_path / "out"
    if old:
        target.mkdir()
        (target / "kept").write_text("old")
    before = snapshot(tmp_path)
    with pytest.raises(type(error)), new_folder(target) as work:
        (work / "half").write_text("x")
        raise error
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if old else [])


def test_a_new_folder_replaces_an_older_one(tmp_path):
    target = tmp_path / "out"
    for name in ("old", "new"):
        with new_folder(target) as work:
            (work / name).touch()
    assert list(snapshot(tmp_path)) == ["out/new"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_to_a_folder_stays_one(tmp_path, exists):
    real, link = tmp_path / "real", tmp_path / "link"
    if exists:
        real.mkdir()
    link.symlink_to(real, target_is_directory=True)
    with new_folder(link) as work:
        (work / "new").touch()
    assert link.is_symlink() and (real / "new").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    write_whole(path, b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "x"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()

    def make():
        with new_folder(tmp_path / "file" / "out"):
            raise AssertionError("not reached")

    assert "out (" in refusal(make)


def test_missing_truncated_and_foreign_tensor_files_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    assert "does not exist; expected tensors" in refusal(read_tensors, path, "tensors")
    mx.save_safetensors(str(path), {"x": mx.arange(64)})
    assert mx.array_equal(read_tensors(path, "tensors")["x"], mx.arange(64))
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:40], whole[:3], b"", b"garbage" * 20, b"\x80\x02}q\x00."):
        path.write_bytes(data)
        message = refusal(read_tensors, path, "tensors")
        assert f"{path} cannot be read (" in message and f"{len(data)} bytes" in message


def test_account_for_names_every_fault(tmp_path):
    found = {"a": mx.ones((2, 3)), "b": mx.ones(2), "c": mx.array([1.0, mx.nan]), "x": mx.ones(1)}
    found["d"] = mx.array([mx.inf])
    expected = {"a": (3, 2), "b": (2,), "c": (2,), "d": (1,), "m": (1,)}
    message = refusal(account_for, found, expected, tmp_path)
    assert "missing: m;" in message and "spare: x;" in message
    assert "misshapen: a (2, 3) instead of (3, 2);" in message
    assert "with NaN or infinity: c, d;" in message
    account_for({"b": mx.ones(2)}, {"b": (2,)}, tmp_path)
    many = {f"n{i}": (1,) for i in range(9)}
    assert "missing: n0, n1, n2 and 6 more" in refusal(account_for, {}, many, tmp_path)


# --- adapter folders ---


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("adapter") / "base")


@pytest.fixture
def folder(base, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(folder, make_adapter(base))
    return folder


def load(base: Path, folder: Path):
    return ssmlx.load(str(base), adapter=folder, dtype="float32")


@pytest.mark.parametrize("scope", ["all", "streams"])
def test_an_adapter_is_read_as_it_was_written(base, tmp_path, scope):
    adapter = make_adapter(base, scope=scope, template="Q: {prompt}")
    write_adapter(tmp_path, adapter)
    read = load_adapter(tmp_path)
    assert (read.config, read.base) == (adapter.config, adapter.base)
    assert mx.array_equal(read.streams.embeddings, adapter.streams.embeddings)
    assert mx.array_equal(read.streams.prune.a, adapter.streams.prune.a)
    assert read.lora.keys() == adapter.lora.keys()
    for path, weights in adapter.lora.items():
        assert mx.array_equal(read.lora[path].b, weights.b)
        assert read.lora[path].scale == weights.scale
    assert (tmp_path / "adapter_config.json").exists() == (scope == "all")
    assert (tmp_path / "adapters.safetensors").exists() == (scope == "all")


def test_a_missing_folder_is_told(base, tmp_path):
    message = refusal(load, base, tmp_path / "nowhere")
    assert f"no adapter folder {tmp_path / 'nowhere'}; expected" in message


def test_an_empty_folder_is_told(base, tmp_path):
    assert "streams_config.json does not exist" in refusal(load, base, tmp_path)


def test_a_pytorch_checkpoint_must_be_converted_first(base):
    message = refusal(load, base, EXAMPLE)
    assert "has the format 'speculative-streaming-pytorch/1'" in message
    assert "`python -m convert`" in message


@pytest.mark.parametrize("file", ["streams.safetensors", "adapters.safetensors"])
def test_a_truncated_file_is_told(base, folder, file):
    path = folder / file
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path} cannot be read (" in refusal(load, base, folder)
    path.unlink()
    assert f"{path} does not exist" in refusal(load, base, folder)


def test_lora_of_the_other_scope_is_not_taken(base, folder):
    (folder / "adapters.safetensors").rename(folder / "stream_adapters.safetensors")
    assert "adapters.safetensors does not exist" in refusal(load, base, folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "ssmlx-adapter/9"}, "has the format 'ssmlx-adapter/9'"),
        ({"num_streams": 3}, "misshapen: stream_embeddings (2, 32) instead of (3, 32)"),
        ({"num_streams": "2"}, "num_streams is '2'"),
        ({"prune_rank": 0}, "spare: prune_adapter.lora_"),
        ({"lora_scale": None}, "has lora_scale None"),
        ({"base": {}}, "does not say which base model"),
        ({"base": None}, "does not say which base model"),
        ({"prompt_template": "no place"}, "prompt_template is"),
    ],
)
def test_settings_that_do_not_fit_are_told(base, folder, change, said):
    path = folder / "streams_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert said in refusal(load, base, folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_settings_that_are_not_json_are_told(base, folder, text):
    (folder / "streams_config.json").write_bytes(text.encode("latin-1"))
    message = refusal(load, base, folder)
    assert "streams_config.json is not valid JSON" in message or "holds a list" in message


def test_another_base_of_the_same_shape_is_refused(folder, tmp_path):
    other = write_base(tmp_path / "other", seed=1, norm=1.5)
    message = refusal(load, other, folder)
    assert "another base model: this one has other weights (its final norm differs)" in message
    assert "expected tiny" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [({"layers": 5}, "num_layers 5 instead of 4"), ({"width": 64}, "hidden_size 64 instead of 32")],
)
def test_a_base_of_another_shape_is_refused(folder, tmp_path, change, said):
    assert said in refusal(load, write_base(tmp_path / "other", **change), folder)


def test_lora_on_a_module_that_is_not_there_is_refused(base, tmp_path):
    adapter = make_adapter(base)
    weights = next(iter(adapter.lora.values()))
    lora = {**adapter.lora, "model.layers.2.mlp.no_proj": weights}
    write_adapter(tmp_path, replace(adapter, lora=lora))
    assert "spare: model.layers.2.mlp.no_proj.lora_a" in refusal(load, base, tmp_path)


def test_pruning_without_a_prune_adapter_is_refused(base, tmp_path):
    write_adapter(tmp_path, without_prune(make_adapter(base)))
    model, tokenizer = load(base, tmp_path)
    prune = ssmlx.PruneConfig(kind="budget")
    message = refusal(ssmlx.stream_generate, model, tokenizer, [5], prune=prune)
    assert "the adapter has no pruning adapter" in message


def test_lora_of_scope_all_merged_or_not_gives_the_same_logits(base, folder):
    tokens = mx.arange(5, 13)
    logits = []
    for merge in (True, False):
        model, _ = ssmlx.load(str(base), adapter=folder, dtype="float32", merge_lora=merge)
        logits.append(model.backbone.model(tokens[None]))
    plain = ssmlx.load(str(base), dtype="float32")[0].backbone.model(tokens[None])
    assert mx.allclose(*logits, atol=1e-4)
    assert not mx.allclose(logits[0], plain, atol=1e-2)
    assert model.backbone.hidden_size == WIDTH
