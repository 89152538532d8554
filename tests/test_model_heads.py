"""Heads that draft for a published model: which is a model's, and which is on this machine."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from huggingface_hub import constants
from test_every_class import VOCAB, write_model
from test_families import make_base

from ssmlx.loading import model_heads
from ssmlx.loading.known_heads import KNOWN_HEADS
from ssmlx.loading.load import load_base
from ssmlx.loading.model_heads import OWN_HEAD, known_heads, local_head
from ssmlx.loading.names import HUB_NAME
from ssmlx.model.backbone import Backbone

FIRST = "a" * 40
SECOND = "b" * 40
ROW = replace(
    KNOWN_HEADS[0],
    model="Tiny3.8",
    families=("qwen3_5",),
    hidden_size=32,
    num_layers=4,
    vocab_size=VOCAB,
    generation="",
    repositories=("org/Tiny-MTP-4bit", "org/Tiny-MTP-bf16"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny model with recurrent layers, of a class that heads are made for."""
    return write_model("qwen3_5", tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def backbone(target):
    return load_base(target, "float32")[0]


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """An empty Hub cache; the table has a row for the tiny model, and no connection is made."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", (ROW,))
    return tmp_path / "hub"


def keep(hub, name, files, commit=FIRST, ref="main"):
    """Put files into a Hub cache as the Hub's client does: blobs, links to them, and a ref."""
    root = hub / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    (root / "blobs").mkdir(exist_ok=True)
    for file, content in files.items():
        blob = root / "blobs" / f"{commit[0]}-{file}"
        blob.write_bytes(content)
        (folder / file).symlink_to(blob)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    return folder


WHOLE = {"config.json": b"{}", "model.safetensors": b""}


def named(name, folder=None, **sizes):
    """What `known_heads` asks of a backbone, with Qwen3.8-27B's sizes if none are given."""
    row = KNOWN_HEADS[0]
    found = {"hidden_size": row.hidden_size, "vocab_size": row.vocab_size, **sizes}
    layers = [None] * found.pop("num_layers", row.num_layers)
    family = found.pop("family", "qwen3_5")
    model = type("Model", (), {"__module__": f"mlx_lm.models.{family}"})()
    return SimpleNamespace(model=model, name=name, folder=folder, layers=layers, **found)


# --- whose head it is ---


def test_the_table_is_whole_and_tells_its_rows_apart():
    for row in KNOWN_HEADS:
        assert row.repositories and row.licence and row.families and row.read_at
        assert all(HUB_NAME.fullmatch(name) for name in row.repositories)
        assert all(place.startswith("https://") for place in row.read_at)
    told = [
        (family, row.hidden_size, row.num_layers, row.vocab_size, row.generation)
        for row in KNOWN_HEADS
        for family in row.families
    ]
    assert len(set(told)) == len(told)
    repositories = [name for row in KNOWN_HEADS for name in row.repositories]
    assert len(set(repositories)) == len(repositories)


def test_sizes_and_the_generation_in_a_name_tell_the_row(monkeypatch, tmp_path):
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", KNOWN_HEADS)
    snapshot = tmp_path / "models--lmstudio-community--Qwen3.6-27B-MLX-8bit" / "snapshots" / FIRST
    for backbone, expected in (
        (named("mlx-community/Qwen3.8-27B-4bit"), ["Qwen3.8-27B"]),
        (named("someone/Qwen-3.8-27b-mxfp4"), ["Qwen3.8-27B"]),
        (named("/models/x", tmp_path / "qwen3.6_27b"), ["Qwen3.6-27B"]),
        (named(str(snapshot), snapshot), ["Qwen3.6-27B"]),
        # It has these sizes, and no head that is known.
        (named("mlx-community/Qwen3.5-27B-4bit"), []),
        # Nothing says which.
        (named("mine"), ["Qwen3.8-27B", "Qwen3.6-27B"]),
        (named("Qwen3.8-27B", hidden_size=5121), []),
        (named("Qwen3.8-27B", num_layers=63), []),
        (named("Qwen3.8-27B", vocab_size=248_077), []),
        (named("Qwen3.8-27B", family="qwen3_next"), []),
        # Sizes that one model alone has need no name.
        (named("mine", hidden_size=2560, num_layers=32), ["Qwen3.5-4B"]),
        (
            named("x", hidden_size=2560, num_layers=42, vocab_size=262_144, family="gemma4"),
            ["Gemma 4 E4B"],
        ),
    ):
        assert [row.model for row in known_heads(backbone)] == expected


def test_a_quantised_copy_under_another_name_is_the_same_model(target):
    assert known_heads(load_base(target, "float32")[0]) == (ROW,)
    packed = Backbone(make_base("qwen3_5", bits=4))
    packed.name = "another"
    assert known_heads(packed) == (ROW,)


# --- what is here ---


def test_a_head_is_taken_from_the_cache_where_it_is_whole(hub, backbone, tmp_path):
    second = ROW.repositories[1]
    assert local_head(backbone) is None
    folder = keep(hub, second, WHOLE)
    assert local_head(backbone) == model_heads.LocalHead(second, folder)
    # The first of the row goes before the others.
    first = keep(hub, ROW.repositories[0], WHOLE)
    assert local_head(backbone).folder == first
    # The app's own folder, where the model was loaded with one.
    backbone.cache_dir = tmp_path / "app"
    assert local_head(backbone) is None
    own = keep(tmp_path / "app" / "hub", second, WHOLE)
    assert local_head(backbone).folder == own


def test_half_a_cache_is_none(hub, backbone):
    name = ROW.repositories[0]
    folder = keep(hub, name, {"config.json": b"{}"})  # its weights are not here yet
    assert local_head(backbone) is None
    weights = folder / "model.safetensors"
    weights.symlink_to(hub / "gone")  # another process deletes it
    assert local_head(backbone) is None
    weights.unlink()
    keep(hub, name, {"model.safetensors": b""})
    assert local_head(backbone).folder == folder
    index = {"weight_map": {"fc.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert local_head(backbone) is None
    (folder / "model.safetensors.index.json").write_text("{")
    assert local_head(backbone) is None
    shutil.rmtree(hub)
    assert local_head(backbone) is None


def test_of_two_revisions_it_is_the_one_that_main_meant_last(hub, backbone):
    name = ROW.repositories[0]
    first = keep(hub, name, WHOLE)
    second = keep(hub, name, {"config.json": b"{}"}, SECOND, ref="v2")
    assert local_head(backbone).folder == first
    (second.parents[1] / "refs" / "main").write_text(SECOND)
    assert local_head(backbone) is None  # half of it is here
    keep(hub, name, {"model.safetensors": b""}, SECOND)
    assert local_head(backbone).folder == second


def test_which_of_several_models_it_is_must_be_known(hub, backbone, monkeypatch):
    rows = [
        replace(ROW, model=name, generation=name, repositories=(f"org/{name}",))
        for name in ("qwen3.6", "qwen3.8")
    ]
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", tuple(rows))
    for row in rows:
        keep(hub, row.repositories[0], WHOLE)
    assert local_head(backbone) is None
    backbone.name = "org/Qwen3.6-Tiny"
    assert local_head(backbone).name == "org/qwen3.6"


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
def test_tensors_among_the_model_s_own_come_first(hub, backbone, tmp_path, prefix):
    keep(hub, ROW.repositories[0], WHOLE)
    backbone.folder = folder = tmp_path / "own"
    folder.mkdir()
    file = str(folder / "model-00001-of-00002.safetensors")
    mx.save_safetensors(file, {"model.layers.0.mtp.weight": mx.zeros(1)})
    assert local_head(backbone).name == ROW.repositories[0]
    mx.save_safetensors(str(folder / "mtp.safetensors"), {f"{prefix}fc.weight": mx.zeros(1)})
    assert local_head(backbone) == model_heads.LocalHead(OWN_HEAD, None)
    (folder / "mtp.safetensors").write_bytes(b"12")
    assert local_head(backbone).name == ROW.repositories[0]
