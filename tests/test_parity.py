"""The MLX model against the PyTorch reference, on the same tiny random weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from oracle import greedy_streaming, tree_inputs
from test_reference import ARCHITECTURES, make_base
from test_reference import make_model as make_reference
from tiny import first_tokens, tree_from_parents

from convert.formats.adapter import read_checkpoint, write_adapter
from convert.reference.checkpoint import save_reference
from ssmlx.api import token_steps
from ssmlx.decoding.loop import prefill
from ssmlx.loading.adapter import load_adapter
from ssmlx.loading.attach import fuse_streams
from ssmlx.loading.load import load_base
from ssmlx.settings import GenerateConfig, TreeConfig

PROMPT = [5, 2, 3, 11, 7]
TREE_TOKENS, TREE_PARENTS = [11, 1, 6, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 2, 4]
TINY_VOCAB = 13
STREAMS = 2


def make_pair(folder, architecture, scope, kind):
    """A reference, and the MLX model that the converter makes of its checkpoint."""
    base = make_base(architecture, vocab=TINY_VOCAB)
    base.save_pretrained(folder / "base")
    rank = 0 if kind == "identity" else 3
    reference = make_reference(
        base=base, adapter_scope=scope, stream_init=kind, stream_init_rank=rank
    )
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    save_reference(reference, checkpoint)
    adapter.mkdir()
    backbone, _ = load_base(folder / "base", "float32")
    write_adapter(
        adapter, read_checkpoint(checkpoint, checkpoint / "streams.safetensors", backbone)
    )
    model = fuse_streams(backbone, load_adapter(adapter), merge_lora=kind != "low_rank")
    return reference, model


def mlx_step(model, prompt, tokens, parents):
    """Main, stream and early-exit logits of a tree after a prompt."""
    tree = tree_from_parents(tokens, parents)
    cache = model.make_cache()
    prefill(model, prompt, cache)
    cache.reserve(tokens=1, scratch=tree.num_nodes * (1 + STREAMS))
    hidden = model.lower(tree, cache)
    early = model.early_exit_logits(hidden)
    rows = model.upper(model.insert(hidden, STREAMS), tree, cache, STREAMS)
    logits = model.backbone.logits(rows)
    nodes = tree.num_nodes
    return logits[:nodes], logits[nodes:].reshape(nodes, STREAMS, -1), early


@torch.no_grad()
def reference_step(reference, prompt, tokens, parents):
    input_ids, positions, visible = tree_inputs(prompt, tokens, parents)
    nodes = torch.arange(len(prompt), input_ids.shape[1])
    found = reference(input_ids, positions=positions, visible=visible, stream_rows=nodes)
    return found.main_logits[0, nodes], found.stream_logits[0], found.early_exit_logits[0, nodes]


def assert_close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == tuple(theirs.shape)
        # Random weights make logits of up to tens; the bound is relative to those.
        scale = max(1.0, float(theirs.abs().max()))
        assert np.abs(np.array(mine) - theirs.numpy()).max() <= 1e-4 * scale


@pytest.mark.parametrize("kind", ["identity", "low_rank", "residual"])
@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parity(architecture, scope, kind, tmp_path):
    reference, model = make_pair(tmp_path, architecture, scope, kind)
    root = ([PROMPT[-1]], [-1])
    assert_close(mlx_step(model, PROMPT[:-1], *root), reference_step(reference, PROMPT[:-1], *root))
    assert_close(
        mlx_step(model, PROMPT, TREE_TOKENS, TREE_PARENTS),
        reference_step(reference, PROMPT, TREE_TOKENS, TREE_PARENTS),
    )
    whole = model.backbone.logits(model.backbone.append(mx.array(PROMPT), model.make_cache()))
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT]), stream_rows=torch.zeros(0, dtype=torch.long))
    assert_close([whole], [expected.main_logits[0]])


@pytest.mark.parametrize("kind", ["identity", "low_rank", "residual"])
@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_oracle_takes_the_same_steps(architecture, scope, kind, tmp_path):
    reference, model = make_pair(tmp_path, architecture, scope, kind)
    for width in (1, 2, 3):
        tokens, calls = greedy_streaming(
            reference, PROMPT, width=width, max_tokens=14, end_token_ids=[]
        )
        config = GenerateConfig(tree=TreeConfig(kind="full", width=width))
        steps = token_steps(model, PROMPT, model.make_cache(), config)
        found, lengths = first_tokens(steps, 14)
        assert (found, len(lengths)) == (tokens, calls)
