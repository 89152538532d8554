"""Streams that draft for a fine-tuned model and leave its answers as they are: two LoRAs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from real import one_line

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten
from test_swap import APART, LENGTH, MERGED, PACKED, PROMPT, make, make_backbone, refusal
from test_train import argv, base, data  # noqa: F401
from tiny import first_tokens, make_lora

from convert import __main__ as convert_cli
from convert.base import load_base
from convert.export.source import build_reference
from convert.reference.checkpoint import load_fine_tuned, load_reference, merge_lora
from convert.reference.format import TASK_LORA
from convert.train import PROG, main
from ssmlx.decoding.loop import plain_decode, streaming_decode
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.loading.adapter import load_adapter, read_lora, write_adapter
from ssmlx.loading.attach import fuse_streams, unfuse_streams
from ssmlx.model.tree import root_tree
from ssmlx.settings import STREAM_SCHEDULES, TreeConfig

TREE = TreeConfig(kind="full", width=2)


def with_task(backbone, *, seed=4):
    """An adapter of scope "streams" with the LoRA of a task, on layers above and below."""
    return replace(
        make(backbone, "streams", seed=seed), task_lora=make_lora(backbone.model, 0, seed + 9)
    )


def plain(model, count=LENGTH):
    return first_tokens(plain_decode(model, PROMPT, model.make_cache()), count)[0]


def streamed(model, schedule):
    drafter = StreamDrafter(model, TREE, model.num_streams, schedule)
    steps = streaming_decode(model, PROMPT, model.make_cache(64), drafter=drafter)
    return first_tokens(steps, LENGTH)


@pytest.mark.parametrize("kind", [MERGED, APART, PACKED])
def test_answers_are_those_of_the_tasks_lora_alone(kind):
    backbone = make_backbone(kind)
    adapter = with_task(backbone)
    alone = replace(make(backbone, "all", seed=4), lora=adapter.task_lora)
    expected = plain(fuse_streams(backbone, alone, merge_lora=kind == MERGED))
    unfuse_streams(backbone)
    untouched = plain(fuse_streams(backbone, replace(adapter, task_lora={}), merge_lora=False))
    assert untouched != expected
    model = fuse_streams(backbone, adapter, merge_lora=kind == MERGED)
    assert model.is_fine_tuned
    assert plain(model) == expected
    lengths = {}
    for schedule in STREAM_SCHEDULES:
        tokens, lengths[schedule] = streamed(model, schedule)
        assert tokens == expected
    assert lengths["fused"] == lengths["second-pass"]


@pytest.mark.parametrize("kind", [MERGED, PACKED])
def test_the_streams_own_lora_acts_on_their_rows(kind):
    """Without it the drafts are others, and the answers the same."""
    backbone = make_backbone(kind)
    adapter = with_task(backbone)
    drafts = []
    for lora in (adapter.lora, {path: replace(w, b=w.b * 0) for path, w in adapter.lora.items()}):
        model = fuse_streams(backbone, replace(adapter, lora=lora), merge_lora=kind == MERGED)
        hidden = mx.ones((1, 2, model.backbone.hidden_size))
        cache = model.make_cache(16)
        cache.reserve(tokens=4, scratch=8)
        rows = model.upper(model.insert(hidden[:, :1], 2), root_tree(mx.array([1])), cache, 2)
        drafts.append(np.array(rows))
    assert np.array_equal(drafts[0][:, :1], drafts[1][:, :1])
    assert not np.allclose(drafts[0][:, 1:], drafts[1][:, 1:])


@pytest.mark.parametrize("kind", [MERGED, APART, PACKED])
def test_the_base_comes_back(kind):
    backbone = make_backbone(kind)
    before = dict(tree_flatten(backbone.model.parameters()))
    fuse_streams(backbone, with_task(backbone), merge_lora=kind == MERGED)
    unfuse_streams(backbone)
    after = dict(tree_flatten(backbone.model.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert not any(
        isinstance(m, ssmlx.model.lora.RowLora) for _, m in backbone.model.named_modules()
    )


def test_a_folder_holds_both_and_mlx_lm_finds_the_tasks(tmp_path):
    backbone = make_backbone(MERGED)
    adapter = with_task(backbone)
    write_adapter(tmp_path, adapter)
    again = load_adapter(tmp_path)
    for mine, theirs in ((adapter.lora, again.lora), (adapter.task_lora, again.task_lora)):
        assert mine.keys() == theirs.keys()
        for path, weights in mine.items():
            assert weights.scale == theirs[path].scale
            assert mx.array_equal(weights.a, theirs[path].a)
            assert mx.array_equal(weights.b, theirs[path].b)
    mlx_lm_file = mx.load(str(tmp_path / "adapters.safetensors"))
    path = next(iter(adapter.task_lora))
    assert mx.array_equal(mlx_lm_file[f"{path}.lora_a"], adapter.task_lora[path].a)


def test_a_task_beside_lora_on_every_row_is_refused(tmp_path):
    backbone = make_backbone(MERGED)
    write_adapter(tmp_path, make(backbone, "all", seed=4))
    file = tmp_path / "streams_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_lora_scale": 2.0}))
    assert "task_lora_scale beside LoRA of scope 'all'" in refusal(load_adapter, tmp_path)


@pytest.fixture(scope="module")
def runs(base, data, tmp_path_factory):  # noqa: F811
    """Folders of a LoRA alone and of streams that draft for its model."""
    folder = tmp_path_factory.mktemp("runs")
    lora, streams = folder / "lora", folder / "streams"
    alone = ("--num-streams", "0", "--prune-rank", "0", "--epochs", "4")
    assert main(argv(base, data, lora, *alone)) == 0
    own = ("--adapter-scope", "streams", "--task-lora", str(lora), "--epochs", "2")
    assert main(argv(base, data, streams, *own)) == 0
    return lora, streams


def test_from_training_to_an_adapter(base, runs, tmp_path):  # noqa: F811
    """The checkpoint carries the task's LoRA, and both sides compute the same with it."""
    lora, streams = runs
    assert (streams / TASK_LORA / "adapter_model.safetensors").is_file()
    out = tmp_path / "adapter"
    assert convert_cli.main(["--base", str(base), "--lora", str(streams), "--out", str(out)]) == 0
    model, _ = ssmlx.load(str(base), adapter=out, dtype="float32")
    assert model.is_fine_tuned
    merged = merge_lora(load_fine_tuned(load_base(base), lora))
    tokens = [3, 9, 4, 7]
    with torch.no_grad():
        theirs = load_reference(merged, streams)(torch.tensor([tokens])).main_logits[0, -1]
    hidden = model.backbone.append(mx.array(tokens), model.make_cache())
    ours = model.backbone.logits(hidden)[-1]
    assert np.abs(np.array(ours) - theirs.float().numpy()).max() < 1e-3
    exported = build_reference(base, load_adapter(out), model.num_streams)
    with torch.no_grad():
        exported_logits = exported(torch.tensor([tokens])).main_logits[0, -1]
    assert (exported_logits - theirs).abs().max() < 1e-4
    untouched = load_base(base)(torch.tensor([tokens])).logits[0, -1].detach().numpy()
    assert np.abs(np.array(ours) - untouched).max() > 1e-2


def test_training_leaves_the_task_alone(base, runs):  # noqa: F811
    """The streams' LoRA starts from nothing and moves; that of the task is copied as it was."""
    lora, streams = runs
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (streams / TASK_LORA / name).read_bytes() == (lora / name).read_bytes()
    own = mx.load(str(streams / "adapter_model.safetensors"))
    assert any(mx.abs(w).max() > 0 for name, w in own.items() if "lora_B" in name)


def test_the_streams_of_another_task_go_on_only_as_themselves(base, data, runs, capsys):  # noqa: F811
    _, streams = runs
    own = ("--adapter-scope", "streams", "--epochs", "2")
    assert main(argv(base, data, streams, *own)) == 2
    one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], PROG)


def test_a_task_needs_streams_of_their_own(base, data, runs, tmp_path, capsys):  # noqa: F811
    lora, _ = runs
    assert main(argv(base, data, tmp_path / "run", "--task-lora", str(lora))) == 2
    assert "--task-lora with --adapter-scope all" in one_line(capsys.readouterr().err, PROG)


def test_a_lora_without_weights_is_refused(tmp_path):
    settings = {"fine_tune_type": "lora", "lora_parameters": {"scale": 2.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {})
    said = refusal(read_lora, tmp_path, "--task-lora")
    assert "adapters.safetensors is empty; expected pairs of lora_a and lora_b" in said
