"""Which models are the same: no change of a byte is missed where tokens depend on it."""

import json
import os
import platform
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from real import answer, make_adapter, words, write_base, write_packed, write_tiny_adapter
from refusals import exit_code, exits, mentions, refusal
from tiny import make_base, slow

from ssmlx.blas import blas_name
from ssmlx.commands import generate
from ssmlx.loading import folders, identity
from ssmlx.loading.adapter import write_adapter
from ssmlx.loading.attach import attach_adapter, lora_digest, swap_adapter
from ssmlx.loading.identity import (
    CacheKey,
    stamp_model_files,
    stored_shapes_digest,
    stored_weights_digest,
)
from ssmlx.loading.load import load_base
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompt_cache import PromptCache

LENGTH = 10
PROMPT = words(20)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch):
    """Names of the tensors whose stored bytes are read for a digest."""
    names = []
    real = identity._sha256_of_stored
    monkeypatch.setattr(
        identity, "_sha256_of_stored", lambda one: names.append(one.name) or real(one)
    )
    return names


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_value(folder, name, index=0, value=9.0):
    """Write one float32 of a tensor in place, and set the file's time back."""
    path = folder / "model.safetensors"
    (tensor,) = [one for one in identity.read_header(path) if one.name == name]
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(tensor.begin + 4 * index)
        file.write(np.float32(value).tobytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as some copying tools do


# --- the same stored bytes ---


def test_a_copy_has_the_same_digest_whatever_stands_beside_its_weights(base, tmp_path):
    digest = stored_weights_digest(base)
    assert digest.startswith(f"{stored_shapes_digest(base)}-") and len(digest) == 16 + 1 + 64
    copy = shutil.copytree(base, tmp_path / "copy")
    change_config(copy, a_new_field=1, max_position_embeddings=64)
    (copy / "tokenizer_config.json").unlink()
    assert stored_weights_digest(copy) == digest
    # In two files, and in another order.
    tensors = mx.load(str(copy / "model.safetensors"))
    (copy / "model.safetensors").unlink()
    for n in (2, 1):
        part = {name: one for name, one in tensors.items() if len(name) % 2 == n - 1}
        mx.save_safetensors(str(copy / f"model-0000{n}-of-00002.safetensors"), part)
    assert stored_weights_digest(copy) == digest
    moved = copy.rename(tmp_path / "moved")
    assert stored_weights_digest(moved) == digest


def test_every_byte_counts_and_so_do_names_types_and_shapes(tmp_path):
    path = tmp_path / "model.safetensors"
    size = 5 * 2**20  # more than is read at once

    def digest_of(**tensors):
        mx.save_safetensors(str(path), {"b": mx.zeros(3), **tensors})
        return stored_weights_digest(tmp_path)

    def with_one(place):
        values = np.zeros(size, np.uint8)
        values[place] = 1
        return mx.array(values)

    found = [digest_of(a=mx.zeros(size, mx.uint8)), digest_of(c=mx.zeros(size, mx.uint8))]
    found += [digest_of(a=with_one(place)) for place in (0, 1025, 2**22 - 1, 2**22, size - 1)]
    found.append(digest_of(a=mx.zeros((size // 2, 2), mx.uint8)))
    found.append(digest_of(a=mx.zeros(size // 4, mx.uint32)))
    assert len(set(found)) == len(found)
    assert len({one.partition("-")[0] for one in found}) == 4


def test_the_digest_is_remembered_and_a_change_is_noticed(base, tmp_path, reads):
    copy = shutil.copytree(base, tmp_path / "copy")
    before = stored_weights_digest(copy)
    once = len(reads)
    change_config(copy, rope_theta=1.0)
    assert stored_weights_digest(copy) == before and len(reads) == once > 0
    change_value(copy, "lm_head.weight", 1)
    changed = stored_weights_digest(copy)
    assert changed != before and len(reads) == 2 * once
    # The same bytes in another file.
    (copy / "model.safetensors").rename(tmp_path / "old")
    shutil.copy2(tmp_path / "old", copy / "model.safetensors")
    assert stored_weights_digest(copy) == changed and len(reads) == 3 * once
    remembered = folders.cache_dir() / "weights.json"
    # Of an earlier version, too, whose digest was that of samples.
    stat = (copy / "model.safetensors").stat()
    stamp = ["model.safetensors", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    old = {str(copy.resolve()): {"files": [stamp], "digest": "0f" * 16}}
    for broken in ("{", "[]", json.dumps({str(copy.resolve()): 3}), json.dumps(old)):
        remembered.write_text(broken)
        assert stored_weights_digest(copy) == changed
    assert len(reads) == 7 * once


def test_without_a_place_to_remember_it_in_it_is_made_each_time(base, monkeypatch, reads):
    monkeypatch.setenv("SSMLX_CACHE", str(base / "config.json" / "nowhere"))
    assert stored_weights_digest(base) == stored_weights_digest(base)
    assert len(reads) == 2 * len(set(reads))


def test_threads_may_ask_at_once(base, tmp_path):
    copies = [shutil.copytree(base, tmp_path / str(n)) for n in range(4)]
    for n, one in enumerate(copies[1:]):
        change_value(one, "model.norm.weight", n)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(stored_weights_digest, copies * 3))
    assert found == found[:4] * 3 and len(set(found)) == 4
    assert json.loads((folders.cache_dir() / "weights.json").read_text())


def test_weights_that_change_while_they_are_read_have_no_digest(base, tmp_path, monkeypatch):
    copy = shutil.copytree(base, tmp_path / "copy")
    real = identity._sha256_of_stored

    def read_and_change(tensor):
        os.utime(copy / "model.safetensors", (1, 1))
        return real(tensor)

    monkeypatch.setattr(identity, "_sha256_of_stored", read_and_change)
    assert str(copy) in refusal(stored_weights_digest, copy)
    assert not (folders.cache_dir() / "weights.json").exists()


def test_what_are_no_weights_is_one_line(base, tmp_path):
    assert str(tmp_path) in refusal(stored_weights_digest, tmp_path)
    for content in (b"", b"\x00" * 4, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]",
                    b"\x08" + b"\x00" * 7 + b'{"a": 1}'):  # fmt: skip
        (tmp_path / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in refusal(stored_weights_digest, tmp_path)
    whole = (base / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    assert "model.safetensors" in refusal(stored_weights_digest, tmp_path)


def test_a_file_that_was_just_written_is_not_stamped_before_its_clock_ticks(tmp_path):
    """Else one written again within the tick, of the same size, would have the same stamp."""
    path = tmp_path / "model.safetensors"
    stamps = set()
    for n in range(20):
        path.write_bytes(bytes([n]))
        stamps.add(stamp_model_files(tmp_path))
    assert len(stamps) == 20


@pytest.mark.slow
def test_a_clock_of_whole_seconds_is_waited_for(tmp_path, monkeypatch):
    """As some network shares have; no such file system can be mounted for a test."""
    real = Path.stat

    class Coarse:
        def __init__(self, stat):
            self._stat = stat

        def __getattr__(self, name):
            found = getattr(self._stat, name)
            return found // 10**9 * 10**9 if name.endswith("_ns") else found

    monkeypatch.setattr(Path, "stat", lambda path, **how: Coarse(real(path, **how)))
    path = tmp_path / "model.safetensors"
    stamps = set()
    time.sleep(-time.time() % 1)
    for n in range(2):
        path.write_bytes(bytes([n]))
        stamps.add(stamp_model_files(tmp_path))
    assert len(stamps) == 2


def test_a_file_that_is_written_all_the_time_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"0")
    monkeypatch.setattr(time, "sleep", lambda seconds: path.write_bytes(str(seconds).encode()))
    assert stamp_model_files(tmp_path)[0].name == path.name


# --- the same keys and values: what stands in a folder ---


def embedding_row(folder):
    change_value(folder, "model.embed_tokens.weight", 32 * 20)


def embedding_scale(folder):
    change_value(folder, "model.embed_tokens.scales", 20)


CHANGES = {
    "one value of an embedding": ("base", embedding_row),
    "one value of a norm": (
        "base", lambda one: change_value(one, "model.layers.0.input_layernorm.weight")
    ),
    "one scale of packed weights": ("packed", embedding_scale),
    "rope_theta": ("base", lambda one: change_config(one, rope_theta=30.0)),
    "rope_scaling": (
        "base",
        lambda one: change_config(one, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    ),
    "rms_norm_eps": ("base", lambda one: change_config(one, rms_norm_eps=0.9)),
    "bits of packed weights": ("packed", lambda one: write_packed(one, one.parent / "raw", bits=8)),
}  # fmt: skip

SEEN_FIRST = "one value of an embedding"


@pytest.fixture
def shelf(tmp_path):
    """A folder with a model as floats, and one with its weights packed."""
    raw = write_base(tmp_path / "raw")
    shutil.copytree(raw, tmp_path / "base")
    write_packed(tmp_path / "packed", raw)
    return tmp_path


def engine_tokens(folder, kept, prompt=PROMPT, **settings):
    """The tokens of an engine's answer, and how many of the prompt's were known."""
    with ssmlx.Engine(str(folder), prompt_cache=kept, **settings) as engine:
        found = list(engine.stream(prompt, max_tokens=LENGTH))
    return [token for one in found for token in one.tokens], found[-1].cached_tokens


@pytest.mark.parametrize("dtype", ["float32", *slow("stored", mark=pytest.mark.long)])
@pytest.mark.parametrize("place", ["memory", "folder"])
@pytest.mark.parametrize(
    "change", [SEEN_FIRST, *slow(*[one for one in CHANGES if one != SEEN_FIRST])]
)
def test_a_changed_model_takes_no_prompt_of_the_former_one(shelf, change, place, dtype):
    name, apply = CHANGES[change]
    second = shutil.copytree(shelf / name, shelf / "second")
    apply(second)
    alone, _ = engine_tokens(second, None, dtype=dtype)
    with PromptCache(folder=None if place == "memory" else shelf / "prompts") as prompts:
        former, _ = engine_tokens(shelf / name, prompts, dtype=dtype)
        assert former != alone, "the change has to change tokens"
        assert engine_tokens(second, prompts, dtype=dtype) == (alone, 0)
        again, known = engine_tokens(second, prompts, dtype=dtype)
        assert again == alone and known >= 19


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_a_folder_that_is_written_anew_is_another_model(shelf, place):
    folder = shelf / "base"
    kept = None if place == "memory" else shelf / "prompts"
    with PromptCache(folder=kept) as prompts:
        engine_tokens(folder, prompts, dtype="float32")
        embedding_row(folder)
        alone, _ = engine_tokens(folder, None, dtype="float32")
        assert engine_tokens(folder, prompts, dtype="float32") == (alone, 0)


def test_types_that_weights_are_loaded_in_are_told_apart(shelf):
    keys = set()
    for folder, dtypes in (("base", ["float32", "float16"]), ("packed", ["stored", "float32"])):
        for dtype in dtypes:
            model = ssmlx.load(shelf / folder, dtype=dtype)[0]
            again = ssmlx.load(shelf / folder, dtype=dtype)[0]
            assert CacheKey.of(model) == CacheKey.of(again)
            assert CacheKey.in_files(model) == CacheKey.in_files(again)
            keys |= {CacheKey.of(model), CacheKey.in_files(model)}
    assert len(keys) == 8


def test_a_copy_finds_the_prompts_in_a_folder(shelf):
    copy = shutil.copytree(shelf / "base", shelf / "copy")
    for folder, known in ((shelf / "base", 0), (copy, 19)):
        with PromptCache(folder=shelf / "prompts") as prompts:
            assert engine_tokens(folder, prompts, dtype="float32")[1] >= known


def test_weights_are_read_only_for_prompts_in_files(shelf, reads):
    answer(*ssmlx.load(shelf / "base", dtype="float32"), PROMPT, max_tokens=2)
    engine_tokens(shelf / "base", None, dtype="float32")
    with PromptCache() as prompts:
        engine_tokens(shelf / "base", prompts, dtype="float32")
    assert exit_code(generate.main, "--model", shelf / "base", "--prompt", "w1") == 0
    assert reads == []
    with PromptCache(folder=shelf / "prompts") as prompts:
        for _ in range(2):
            engine_tokens(shelf / "base", prompts, dtype="float32")
            assert len(reads) == len(set(reads)) > 0
        with ssmlx.Engine(str(shelf / "packed"), prompt_cache=prompts):
            assert len(reads) > len(set(reads))  # while it is loaded, not while it answers


# --- what was changed after it was loaded ---


def test_a_model_whose_folder_was_changed_since_has_no_key_in_files(shelf, caplog):
    folder = shelf / "base"
    model, tokenizer = ssmlx.load(folder, dtype="float32")
    before, _ = answer(model, tokenizer, PROMPT, max_tokens=LENGTH)
    key = CacheKey.of(model)
    embedding_row(folder)
    assert CacheKey.of(model) == key != CacheKey.of(ssmlx.load(folder, dtype="float32")[0])
    assert str(folder) in refusal(CacheKey.in_files, model)
    with PromptCache(folder=shelf / "prompts") as prompts:
        tokens = list(range(7, 27))
        cache, _ = prompts.take(model, tokens)
        run_on_mlx_thread(lambda: model.backbone.append(mx.array(tokens), cache))
        prompts.put(model, tokens, cache)
        assert prompts.take(model, tokens)[1] == 19
    assert not (shelf / "prompts").exists()
    assert str(folder) in caplog.text
    assert answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0] == before


def test_a_key_that_was_made_before_the_folder_changed_stays(shelf):
    model = ssmlx.load(shelf / "base", dtype="float32")[0]
    key = CacheKey.in_files(model)
    embedding_row(shelf / "base")
    assert CacheKey.in_files(model) == key
    assert CacheKey.in_files(ssmlx.load(shelf / "base", dtype="float32")[0]) != key


def test_layers_are_not_read_again_from_a_changed_folder(shelf):
    """LoRA was merged into them, and taking it off would mix two models."""
    lora = write_tiny_adapter(shelf / "lora", shelf / "base")
    model, _ = ssmlx.load(shelf / "base", adapter=lora, dtype="float32")
    change_value(shelf / "base", "model.layers.1.self_attn.q_proj.weight")
    assert str(shelf / "base") in refusal(swap_adapter, model, None)


def test_a_folder_that_changes_while_it_is_loaded_is_taken_as_unknown(shelf, monkeypatch):
    from ssmlx.loading import load

    real = load.load_weights

    def load_and_change(path, *args, **more):
        found = real(path, *args, **more)
        os.utime(path / "model.safetensors", (1, 1))
        return found

    monkeypatch.setattr(load, "load_weights", load_and_change)
    backbone, _ = load_base(shelf / "base", "float32")
    assert backbone.origin.files is None and backbone.origin.reload is None
    model = StreamFusedModel(backbone)
    again = StreamFusedModel(load_base(shelf / "base", "float32")[0])
    assert CacheKey.of(model) != CacheKey.of(again)
    assert str(shelf / "base") in refusal(CacheKey.in_files, model)


# --- models in memory ---


def in_memory(change=lambda model: None, **sizes):
    model = make_base(**sizes)
    change(model)
    return StreamFusedModel(Backbone(model))


def one_value(model):
    table = np.array(model.model.embed_tokens.weight)
    table[-1, -2] += 1e-3
    model.model.embed_tokens.weight = mx.array(table)


def scale_of_attention(model):
    model.layers[1].self_attn.scale *= 2


def eps_of_a_norm(model):
    model.layers[0].input_layernorm.eps = 0.5


def listed(*values):
    """Give a model settings in a list, a tuple or a dict, which MLX keeps among parameters."""

    def change(model):
        model.layers[1].mlp.settings = list(values)
        model.layers[2].mlp.settings = {"of": ("gate", [*values])}

    return change


def test_a_model_in_memory_is_told_by_all_its_arrays_and_settings():
    key = CacheKey.in_files(in_memory())
    assert CacheKey.in_files(in_memory()) == key
    large = {"vocab": 5000}
    keys = {
        key,
        CacheKey.in_files(in_memory(**large)),
        CacheKey.in_files(in_memory(one_value, **large)),
        CacheKey.in_files(in_memory(rope_theta=999.0)),
        CacheKey.in_files(in_memory(scale_of_attention)),
        CacheKey.in_files(in_memory(eps_of_a_norm)),
        CacheKey.in_files(in_memory(listed(1, 2))),
        CacheKey.in_files(in_memory(listed(1, 3))),
        CacheKey.in_files(in_memory(listed(1, "3"))),
        CacheKey.in_files(in_memory(listed(1, None))),
    }
    assert len(keys) == 10


def test_in_one_process_a_model_in_memory_is_its_own():
    backbone = Backbone(make_base())
    model = StreamFusedModel(backbone)
    assert CacheKey.of(model) == CacheKey.of(StreamFusedModel(backbone.clone_sharing_weights()))
    assert CacheKey.of(model) != CacheKey.of(StreamFusedModel(Backbone(backbone.model)))


# --- LoRA ---


def with_changed_lora(adapter):
    """The same adapter with one value of its LoRA changed."""
    path, one = next(iter(adapter.lora.items()))
    values = np.array(one.b)
    values.flat[values.size // 2 + 1] += 50
    return replace(adapter, lora={**adapter.lora, path: replace(one, b=mx.array(values))})


def test_no_change_of_a_lora_is_missed(base):
    adapter = make_adapter(base)
    digest = lora_digest(adapter.lora)
    assert digest == lora_digest(dict(reversed(adapter.lora.items()))) and len(digest) == 64
    changed = with_changed_lora(adapter)
    assert lora_digest(changed.lora) != digest and lora_digest({}) is None
    backbone, _ = load_base(base, "float32")
    keys = {
        key(attach_adapter(backbone, one, merge_lora=merge))
        for merge in (True, False)
        for one in (adapter, changed)
        for key in (CacheKey.of, CacheKey.in_files)
    }
    assert len(keys) == 4  # merged or not is the same


def test_answers_of_loras_that_differ_in_one_value_share_no_call_and_no_prompt(base, tmp_path):
    adapter = make_adapter(base)
    places = [tmp_path / "one", tmp_path / "other"]
    for folder, one in zip(places, (adapter, with_changed_lora(adapter)), strict=True):
        folder.mkdir()
        write_adapter(folder, one)
    how = {"max_tokens": LENGTH, "decoding": "plain"}
    alone = []
    for folder in places:
        with ssmlx.Engine(str(base), adapter=folder, dtype="float32") as engine:
            alone.append([token for one in engine.stream(PROMPT, **how) for token in one.tokens])
    assert alone[0] != alone[1]
    with ssmlx.Engine(str(base), places, dtype="float32") as engine:
        for _ in range(2):  # the second time with what the first has left
            answers = [engine.stream(PROMPT, adapter=folder, **how) for folder in places]
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(list, answers))
            assert [[token for one in each for token in one.tokens] for each in found] == alone


# --- files of prompts ---


def test_a_prompt_file_of_another_version_is_refused_in_a_line(shelf, capsys, monkeypatch):
    folder = shelf / "base"
    file = shelf / "kept.safetensors"
    given = ("--model", folder, "--dtype", "float32", "--prompt", PROMPT, "--prompt-cache", file)
    assert exit_code(generate.main, *given) == 0 and file.exists()
    assert exit_code(generate.main, *given) == 0
    whole = file.read_bytes()
    capsys.readouterr()
    arrays, metadata = mx.load(str(file), format="safetensors", return_metadata=True)
    old = {name: one for name, one in metadata.items() if name != "computed_by"}
    mx.save_safetensors(str(file), arrays, {**old, "format": "ssmlx-prompt/1", "weights": "0f"})
    assert mentions(exits(capsys, generate.main, *given), str(file), "'ssmlx-prompt/1'")
    file.write_bytes(whole)
    monkeypatch.setattr(identity, "_versions", lambda: "ssmlx 0, mlx-lm 0, MLX 0")
    assert mentions(exits(capsys, generate.main, *given), str(file), "ssmlx 0")
    assert file.read_bytes() == whole
    monkeypatch.undo()
    embedding_row(folder)
    assert mentions(exits(capsys, generate.main, *given), str(file), "weights")


def test_prompts_of_an_earlier_version_are_left_out_in_a_line(shelf, caplog):
    kept = shelf / "prompts"
    for prompt in (words(20), words(20, first=9)):
        with PromptCache(folder=kept) as prompts:
            engine_tokens(shelf / "base", prompts, prompt, dtype="float32")
    for path in kept.iterdir():
        arrays, metadata = mx.load(str(path), return_metadata=True)
        mx.save_safetensors(str(path), arrays, {**metadata, "format": "ssmlx-prompt/1"})
    alone, _ = engine_tokens(shelf / "base", None, dtype="float32")
    caplog.clear()
    with PromptCache(folder=kept) as prompts:
        for known in (False, True):
            tokens, found = engine_tokens(shelf / "base", prompts, dtype="float32")
            assert tokens == alone and (found > 0) == known
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert mentions(line, "'ssmlx-prompt/1'", "1")


def test_prompts_that_another_library_or_chip_has_computed_are_not_taken(base, monkeypatch):
    model, _ = ssmlx.load(base, dtype="float32")
    key = CacheKey.in_files(model)
    assert blas_name() in key.computed_by and platform.machine() in key.computed_by
    monkeypatch.setattr(identity, "blas_name", lambda: "another BLAS")
    other = CacheKey.in_files(model)
    assert other != key == replace(other, computed_by=key.computed_by)
