"""The settings of `python -m ssmlx.export`, validated once."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ssmlx.errors import require
from ssmlx.settings import MAX_TREE_NODES, StreamConfig, TreeConfig, check_settings, setting


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """With the model, these decide every shape of both functions; letters as in `graph.py`."""

    num_nodes: int  # N, rows of a decode step; smaller trees are padded
    num_kept: int  # M, nodes that pruning keeps; N if nothing is pruned
    num_parents: int  # I, leading nodes that may have children, for the early exit
    num_streams: int  # G, streams in use
    tree: Any  # `ssmlx.exported.manifest.TreeShape`
    num_slots: int  # S, slots of the cache
    chunk: int  # T, tokens of a prompt chunk

    @property
    def is_pruned(self) -> bool:
        return self.num_kept < self.num_nodes


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """How to export; a field with a help text is an option of the command."""

    target: Literal["coreml", "coreai"] = setting(
        "coreml",
        "coreml: an .mlpackage for iOS 18, macOS 15 and later; coreai: an .aimodel for OS 27",
        choices=("coreml", "coreai"),
    )
    profile: Literal["gpu", "ane"] = setting(
        "gpu",
        "gpu: fused attention, scattered cache writes; ane: for the Neural Engine, channels first, "
        "one-hot cache writes",
        choices=("gpu", "ane"),
    )
    compression: Literal["none", "int8", "int4", "palettised"] = setting(
        "none",
        "weights of layers and LM head: int8 per row; int4 in blocks of 32, for gpu; palettised, 4 "
        "bits, for ane",
        choices=("none", "int8", "int4", "palettised"),
        option="--compress",
    )
    precision: Literal["float16", "float32"] = setting(
        "float16",
        "of weights and arithmetic; float32 is for checking tokens, and in Core ML makes the cache "
        "inputs and outputs, as its state is float16 alone",
        choices=("float16", "float32"),
        option="--dtype",
    )
    tree: TreeConfig = field(default_factory=TreeConfig)
    num_streams: int | None = setting(None, "tokens that streams draft ahead (default: all)")
    prune_to: int | None = setting(
        None,
        "nodes that pass the upper layers, chosen by early exit inside the graph (default: all)",
        least=1,
    )
    context: int = setting(1024, "S, tokens that the cache has room for", least=1)
    chunk: int = setting(64, "T, prompt tokens per call of prefill", least=1, most=MAX_TREE_NODES)

    def __post_init__(self) -> None:
        check_settings(self)
        what = f"--context {self.context} with --chunk {self.chunk}"
        do = "choose a multiple"
        require(self.context % self.chunk == 0, what, expected="whole chunks", do=do)
        require(
            self.compression == "none" or (self.target, self.precision) == ("coreml", "float16"),
            f"--compress {self.compression} with --target {self.target} --dtype {self.precision}",
            expected="--target coreml --dtype float16, where weights can be compressed",
            do="omit --compress, or change the other option",
        )

    def sizes(self, config: StreamConfig, vocab_size: int) -> GraphSizes:
        """Compute the sizes; a tree has at most the nodes of the full tree of its width."""
        from ssmlx.exported.manifest import TreeShape
        from ssmlx.model.tree import count_candidates

        streams = config.checked_num_streams(self.num_streams)
        vocab = config.draft_vocab_size
        vocab = vocab or vocab_size
        given = config.condition_rank > 0
        tree = self.tree.no_wider_than(vocab)
        # The same choice as `StreamDrafter`'s.
        candidates = min(count_candidates(tree, streams, conditional=given), vocab)
        width = min(tree.full_width, candidates)
        full = sum(width**level for level in range(streams + 1))
        count = min(tree.num_nodes(streams), full)
        kept = min(count, self.prune_to or count)
        require(
            kept == count or bool(config.prune_rank),
            f"--prune-to {kept}, but the adapter has no pruning adapter",
            expected="prune_adapter.* among its stream weights",
            do="omit --prune-to, or train one",
        )
        what = f"--context {self.context}"
        do = "choose a larger one"
        require(count <= self.context, what, expected=f"room for a tree of {count} nodes", do=do)
        return GraphSizes(
            num_nodes=count,
            num_kept=kept,
            num_streams=streams,
            tree=TreeShape(candidates, count, width, given),
            num_parents=count if count < full else (full - 1) // width,
            num_slots=self.context,
            chunk=self.chunk,
        )
