"""Tiny models for the tests of the export: on disk, and run without a converter."""

from dataclasses import dataclass
from pathlib import Path

import torch
from oracle import convert, make_base
from oracle import make_model as make_reference
from real import write_tokenizer
from tiny import token_steps

from convert.export.export import build_graphs, make_partial_manifest
from convert.export.graph import DECODE, Graph
from convert.export.settings import ExportConfig
from ssmlx.exported.decode import SlotCache, speculative_decode
from ssmlx.loading.adapter import StreamAdapter, load_adapter
from ssmlx.loading.load import load
from ssmlx.settings import GenerateConfig, PruneConfig

WORDS = 64  # the tokenizer's
CONTEXT = 64
CHUNK = 4
# Sizes that the Neural Engine's state takes, and matrices large enough to be compressed.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Folders:
    """A base model and an adapter of it."""

    base: Path
    adapter: Path

    def load_adapter(self) -> StreamAdapter:
        return load_adapter(self.adapter)

    def mlx(self):
        """The MLX model and its tokenizer."""
        return load(str(self.base), adapter=self.adapter, dtype="float32")


def write_pair(
    folder: Path, architecture: str = "Llama", *, vocab: int = 13, base=None, **changes
) -> Folders:
    """A random base with a tokenizer, and an adapter whose every part does something."""
    base = make_base(architecture, vocab=vocab, **{**SIZES, **(base or {})})
    base.save_pretrained(folder / "base")
    write_tokenizer(folder / "base")
    settings = {"hidden_size": 64, "stream_init": "residual", "stream_init_rank": 3, **changes}
    reference = make_reference(base=base, **settings)
    return Folders(folder / "base", convert(folder, reference)[0])


class TorchBackend:
    """Runs the graphs themselves."""

    def __init__(self, graphs: tuple[Graph, Graph]) -> None:
        self._graphs = {graph.name: graph for graph in graphs}

    def make_state(self) -> list[torch.Tensor]:
        graph = self._graphs[DECODE]
        return [torch.zeros(graph.cache_shape) for _ in graph.caches]

    @torch.no_grad()
    def predict(self, function, inputs, state):
        graph = self._graphs[function]
        found = graph(*(torch.from_numpy(inputs[t.name]) for t in graph.inputs), *state)
        return {t.name: x.numpy() for t, x in zip(graph.outputs, found, strict=True)}


def torch_steps(folders: Folders, config: ExportConfig, prompt: list[int]):
    """The decoding loop of the host around the PyTorch graphs."""
    adapter = folders.load_adapter()
    graphs = build_graphs(folders.base, adapter, config)
    manifest = make_partial_manifest(graphs[1], adapter, config)
    backend = TorchBackend(graphs)
    cache = SlotCache(backend.make_state(), manifest.num_slots)
    return speculative_decode(backend, manifest, prompt, cache)


def mlx_steps(folders: Folders, config: ExportConfig, prompt: list[int]):
    """The decoding loop of the MLX runtime with the same tree."""
    model, _ = folders.mlx()
    keep = config.prune_to
    prune = PruneConfig() if keep is None else PruneConfig(kind="budget", keep=keep)
    settings = GenerateConfig(tree=config.tree, prune=prune, num_streams=config.num_streams)
    return token_steps(model, prompt, model.make_cache(), settings)
