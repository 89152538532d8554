"""Streams trained for a fine-tuned model, in PyTorch: from the two trainings to an adapter."""

from __future__ import annotations

import pytest
import torch
from real import one_line

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
from test_trainers import TORCH, base, data  # noqa: F401
from tiny import assert_close

from convert import __main__ as convert_cli
from convert.base import load_base
from convert.export.source import build_reference
from convert.reference.checkpoint import load_fine_tuned, load_reference, merge_lora
from convert.reference.format import TASK_LORA
from convert.train import PROG, main
from ssmlx.loading.adapter import load_adapter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(base, data, tmp_path_factory):  # noqa: F811
    """Folders of a LoRA alone and of streams that draft for its model."""
    folder = tmp_path_factory.mktemp("runs")
    lora, streams = folder / "lora", folder / "streams"
    alone = ("--num-streams", "0", "--prune-rank", "0", "--epochs", "4")
    assert main(TORCH.argv(base, data, lora, *alone)) == 0
    own = ("--adapter-scope", "streams", "--task-lora", str(lora), "--epochs", "2")
    assert main(TORCH.argv(base, data, streams, *own)) == 0
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
    assert_close(ours, theirs.float(), 1e-4)
    exported = build_reference(base, load_adapter(out), model.num_streams)
    with torch.no_grad():
        exported_logits = exported(torch.tensor([tokens])).main_logits[0, -1]
    assert_close(exported_logits, theirs)
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
    assert main(TORCH.argv(base, data, streams, *own)) == 2
    one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], PROG)


def test_a_task_needs_streams_of_their_own(base, data, runs, tmp_path, capsys):  # noqa: F811
    lora, _ = runs
    assert main(TORCH.argv(base, data, tmp_path / "run", "--task-lora", str(lora))) == 2
    assert "--task-lora with --adapter-scope all" in one_line(capsys.readouterr().err, PROG)
