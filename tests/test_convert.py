"""The converter: every tensor accounted for, nothing half-written, nothing run."""

import json
import shutil

import pytest

import ssmlx

import mlx.core as mx  # isort: skip
from oracle import gap, make_model
from real import STREAMS, WIDTH, answer, snapshot, write_base, write_packed
from refusals import exits, found_in, mentions, one_line

torch = pytest.importorskip("torch")
import mlx_lm
from safetensors.torch import load, save_file

from convert.__main__ import main
from convert.base import load_base
from convert.reference.checkpoint import save_reference

LORA = "adapter_model.safetensors"
TOKENS = [5, 9, 30, 12, 7, 61]


@pytest.fixture(scope="module")
def reference(base):
    """The PyTorch side of the tiny base, with LoRA and streams that do something."""
    torch.manual_seed(0)
    residual = {"stream_init": "residual", "stream_init_rank": 3}
    return make_model(base=load_base(base), **residual)


@pytest.fixture(scope="module")
def trained(base, reference):
    folder = base.parent / "checkpoint"
    save_reference(reference, folder)
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(trained, tmp_path / "checkpoint")


def argv(base, checkpoint, out, *more):
    streams = checkpoint / "streams.safetensors"
    values = {"--base": base, "--lora": checkpoint, "--streams": streams, "--out": out}
    return [str(x) for pair in values.items() for x in pair] + list(more)


@pytest.fixture
def convert(base, tmp_path, capsys):
    """Convert into `out`; gives the folder."""

    def convert(checkpoint, *more, base=base):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        code = main(argv(base, checkpoint, out, *more))
        captured = capsys.readouterr()
        assert (code, captured.out) == (0, ""), captured.err
        assert mentions(captured.err, str(out), "2", "4")
        return out

    return convert


@pytest.fixture
def refusal(base, tmp_path, capsys):
    """The line that a failed conversion prints; nothing may be left behind."""

    def refusal(checkpoint, *more, base=base, out=None):
        out = out or tmp_path / "out"
        before = snapshot(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        code = main(argv(base, checkpoint, out, *more))
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, "")
        assert snapshot(tmp_path) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        return one_line(captured.err, "ssmlx.convert")

    return refusal


def tensors(checkpoint, name=LORA):
    return load((checkpoint / name).read_bytes())


def change(checkpoint, name=LORA, **changed):
    """Rewrite a tensor file; None drops a tensor."""
    new = {**tensors(checkpoint, name), **changed}
    save_file({k: v for k, v in new.items() if v is not None}, checkpoint / name)


def settings(checkpoint, name="adapter_config.json", **changed):
    path = checkpoint / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_logits_are_those_of_pytorch(base, reference, trained, convert):
    model, _ = ssmlx.load(str(base), adapter=convert(trained), dtype="float32")
    found = model.backbone.model(mx.array([TOKENS]))[0]
    expected = reference(torch.tensor([TOKENS])).main_logits[0]
    assert gap(found, expected) < 5e-5


def test_a_bin_file_gives_the_same_adapter(checkpoint, convert):
    """Tensors may have the adapter's name in theirs, and LoRA may have started in three ways."""
    safe = snapshot(convert(checkpoint))
    old = {k: torch.nn.Parameter(v) for k, v in tensors(checkpoint).items()}
    renamed = {k.replace(".weight", ".default.weight"): v for k, v in old.items()}
    torch.save(renamed, checkpoint / "adapter_model.bin")
    (checkpoint / LORA).unlink()
    for way in (True, False, "gaussian"):
        settings(checkpoint, init_lora_weights=way)
        assert snapshot(convert(checkpoint)) == safe
    assert set(safe) == {
        "streams_config.json",
        "streams.safetensors",
        "adapters.safetensors",
        "adapter_config.json",
    }


def test_scope_all_loads_in_mlx_lm_with_the_same_logits(base, trained, convert):
    out = convert(trained)
    theirs, _ = mlx_lm.load(str(base), adapter_path=str(out))
    ours, _ = ssmlx.load(str(base), adapter=out, dtype="float32", merge_lora=False)
    plain, _ = mlx_lm.load(str(base))
    tokens = mx.array([TOKENS])
    assert gap(theirs(tokens), ours.backbone.model(tokens)) < 5e-5
    assert gap(theirs(tokens), plain(tokens)) > 1e-3


def test_scope_streams_does_not_load_in_mlx_lm_and_keeps_the_base(base, trained, convert):
    out = convert(trained, "--scope", "streams")
    assert set(snapshot(out)) == {
        "streams_config.json",
        "streams.safetensors",
        "stream_adapters.safetensors",
    }
    with pytest.raises(FileNotFoundError):
        mlx_lm.load(str(base), adapter_path=str(out))
    plain, tokenizer = mlx_lm.load(str(base))
    ours, _ = ssmlx.load(str(base), adapter=out, dtype="float32")
    tokens = mx.array([TOKENS])
    assert mx.array_equal(ours.backbone.model(tokens), plain(tokens))
    theirs = [r.token for r in mlx_lm.stream_generate(plain, tokenizer, TOKENS, max_tokens=20)]
    assert answer(ours, tokenizer, TOKENS, max_tokens=20)[0] == theirs


def test_a_fused_folder_is_a_model_of_mlx_lm(base, trained, convert, tmp_path):
    beside = shutil.copytree(convert(trained), tmp_path / "beside")
    fused = convert(trained, "--fuse")
    assert not (fused / "adapters.safetensors").exists()
    assert not (fused / "adapter_config.json").exists()
    theirs, tokenizer = mlx_lm.load(str(fused))
    unfused, _ = ssmlx.load(str(base), adapter=beside, dtype="float32", merge_lora=False)
    tokens = mx.array([TOKENS])
    assert gap(theirs(tokens), unfused.backbone.model(tokens)) < 5e-5
    ours, _ = ssmlx.load(str(fused), dtype="float32")
    assert ours.num_streams == STREAMS
    assert mx.array_equal(ours.backbone.model(tokens), theirs(tokens))
    expected = [r.token for r in mlx_lm.stream_generate(theirs, tokenizer, TOKENS, max_tokens=20)]
    found, last = answer(ours, tokenizer, TOKENS, max_tokens=20)
    assert found == expected and last.target_calls <= 20


def test_a_fused_folder_is_sampled_as_its_base(base, trained, convert, tmp_path):
    asking = shutil.copytree(base, tmp_path / "asking")
    (asking / "generation_config.json").write_text('{"temperature": 0.6}')
    fused = convert(trained, "--fuse", base=asking)
    assert (fused / "generation_config.json").read_text() == '{"temperature": 0.6}'


def test_an_adapter_is_replaced_and_an_empty_folder_used(base, trained, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert main(argv(base, trained, out, "--scope", "streams")) == 0
    assert main(["--base", str(base), "--lora", str(trained), "--out", str(out)]) == 0
    assert not (out / "stream_adapters.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Malicious:
    """Unpickled with care it is refused; without, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_malicious_pickle_is_not_run(checkpoint, refusal, tmp_path):
    (checkpoint / LORA).unlink()
    evil = tmp_path / "evil"
    torch.save({"x": Malicious(evil)}, checkpoint / "adapter_model.bin")
    message = refusal(checkpoint)
    assert not evil.exists()
    assert mentions(found_in(message), "adapter_model.bin")
    # The file was armed: read carelessly, it does run.
    torch.load(checkpoint / "adapter_model.bin", weights_only=False)["x"].close()
    assert evil.exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", b"\x80\x02}q\x00."])
def test_a_pickle_that_is_none_is_named(checkpoint, refusal, data):
    (checkpoint / LORA).unlink()
    assert "adapter_model.safetensors" in refusal(checkpoint)
    (checkpoint / "adapter_model.bin").write_bytes(data)
    assert "adapter_model.bin" in refusal(checkpoint)


def test_lora_tensors_are_accounted_for(checkpoint, refusal):
    names = sorted(tensors(checkpoint))
    first, second, third = names[:3]
    nan = tensors(checkpoint)[third].clone()
    nan[0, 0] = torch.nan
    spoiled = {first: None, second: torch.ones(2, 2), third: nan, "spare.weight": torch.ones(1)}
    change(checkpoint, **spoiled)
    message = refusal(checkpoint)
    assert mentions(message, first, "spare.weight", f"{second} (2, 2)", third)


def test_stream_tensors_are_accounted_for(checkpoint, refusal):
    changed = {"stream_embeddings": torch.ones(3, WIDTH), "prune_adapter.lora_A.weight": None}
    change(checkpoint, "streams.safetensors", **changed)
    message = refusal(checkpoint)
    assert mentions(message, "prune_adapter.lora_A.weight", "stream_embeddings (3, 32)")


@pytest.mark.parametrize(
    "name", [LORA, "streams.safetensors", "adapter_config.json", "streams_config.json"]
)
def test_a_truncated_or_missing_file_is_named(checkpoint, refusal, name):
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:-5])
    assert name in refusal(checkpoint)
    path.unlink()
    assert name in refusal(checkpoint)


@pytest.mark.parametrize("changed", [
    {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"peft_type": "LOHA"}, {"bias": "all"},
    {"r": 0}, {"r": True}, {"lora_alpha": "16"}, {"lora_alpha": float("inf")},
    {"lora_alpha": 1e300}, {"alora_invocation_tokens": [1]}, {"kasa_config": {"a": 1}},
    {"use_rslora": "no"}, {"init_lora_weights": "pissa"}, {"target_modules": [1]},
    {"target_modules": []}, {"target_modules": "q_.*"}, {"layers_to_transform": [9]},
    {"layers_to_transform": ["1"]}, {"layers_to_transform": []},
], ids=str)  # fmt: skip
def test_lora_that_is_not_plain_is_refused(checkpoint, refusal, changed):
    settings(checkpoint, **changed)
    ((name, value),) = changed.items()
    shown = () if value == float("inf") else (repr(value),)
    assert mentions(found_in(refusal(checkpoint)), name, *shown)


@pytest.mark.parametrize(("changed", "named"), [
    ({"r": 5}, ".lora_A.weight"),
    ({"target_modules": ["w_proj"]}, "w_proj"),
    ({"target_modules": ["q_proj"]}, ".v_proj.lora_A.weight"),
    ({"layers_to_transform": None}, "layers.0."),
])  # fmt: skip
def test_lora_of_other_modules_or_sizes_is_refused(checkpoint, refusal, changed, named):
    settings(checkpoint, **changed)
    assert named in refusal(checkpoint)


@pytest.mark.parametrize(("changed", "named"), [
    ({"format": "other/2"}, ("format", "'other/2'")),
    ({"stream_position": "node"}, ("stream_position", "'node'")),
    ({"prune_adapter": {"rank": 4, "layer": 1}}, ("prune_adapter.layer", "1")),
    ({"prune_adapter": 8}, ("prune_adapter", "8")),
    ({"prune_adapter": None}, ("prune_adapter.lora_A.weight",)),
    ({"num_msa_layers": 9}, ("num_msa_layers", "9", "4")),
    ({"num_streams": -1}, ("num_streams", "-1")),
    ({"stream_init": "cubic"}, ("stream_init", "'cubic'")),
    ({"stream_init": "identity"}, ("stream_init", "'identity'", "3")),
    ({"adapter_scope": "none"}, ("adapter_scope", "'none'")),
])  # fmt: skip
def test_stream_settings_are_checked(checkpoint, refusal, changed, named):
    settings(checkpoint, "streams_config.json", **changed)
    assert mentions(found_in(refusal(checkpoint)), *named)


def test_fusing_into_quantised_weights_is_refused(
    base, trained, refusal, convert, tmp_path, capsys
):
    packed = write_packed(tmp_path / "packed", base, bits=8)
    capsys.readouterr()
    assert mentions(found_in(refusal(trained, "--fuse", base=packed)), "--fuse")
    fused = convert(trained, "--fuse", "--dtype", "float32", base=packed)
    assert "quantization" not in json.loads((fused / "config.json").read_text())
    mlx_lm.load(str(fused))
    convert(trained, base=packed)


def test_an_adapter_in_half_precision_is_half_the_size(base, trained, tmp_path):
    sizes = {}
    for dtype in ("stored", "float16"):
        out = tmp_path / dtype
        assert main([*argv(base, trained, out), "--dtype", dtype]) == 0
        sizes[dtype] = (out / "adapters.safetensors").stat().st_size
        assert ssmlx.load(str(base), adapter=out, dtype="float32")[0].num_streams == STREAMS
    lora = mx.load(str(tmp_path / "float16" / "adapters.safetensors"))
    assert {tensor.dtype for tensor in lora.values()} == {mx.float16}
    assert sizes["float16"] < 0.7 * sizes["stored"]


def test_what_does_not_go_together_is_refused(trained, refusal, tmp_path):
    for number, size in enumerate(({"layers": 5}, {"width": 64})):
        other = write_base(tmp_path / str(number), **size)
        (own,) = size.values()
        assert mentions(refusal(trained, base=other), str(own), "4", "32")
    assert "nowhere" in refusal(trained, base=tmp_path / "nowhere")
    line = refusal(trained, "--fuse", "--scope", "streams")
    assert mentions(found_in(line), "--fuse", "'streams'")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_foreign_out_is_refused_and_untouched(trained, refusal, tmp_path, kind):
    out = tmp_path / "mine"
    if kind == "folder":
        out.mkdir()
    (out / "thesis.txt" if kind == "folder" else out).write_text("years of work")
    assert str(out) in refusal(trained, out=out)
    # A checkpoint holds a streams_config.json too; writing there would destroy the training.
    checkpoint = shutil.copytree(trained, tmp_path / "checkpoint")
    assert str(checkpoint) in refusal(checkpoint, out=checkpoint)


def test_an_adapter_with_other_files_beside_it_is_not_replaced(trained, convert, refusal):
    out = convert(trained)
    (out / "notes.txt").write_text("years of work")
    assert "notes.txt" in refusal(trained, out=out)
    assert (out / "notes.txt").read_text() == "years of work"


def test_a_stopped_conversion_leaves_nothing(base, trained, tmp_path, monkeypatch):
    def stop(folder, *_):
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("ssmlx.loading.adapter.write_adapter", stop)
    assert main(argv(base, trained, tmp_path / "out")) == 130
    assert list(tmp_path.iterdir()) == []


def test_what_an_adapter_cannot_be_told_again_is_refused(base, checkpoint, convert, capsys):
    whole = convert(checkpoint).rename(checkpoint.parent / "whole")
    values = ["--base", str(base), "--lora", str(whole), "--out", str(checkpoint.parent / "beside")]
    capsys.readouterr()
    assert mentions(found_in(exits(capsys, main, *values, "--scope", "all")), "--scope")
