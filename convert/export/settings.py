"""What to export: the settings of `python -m ssmlx.export`, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ssmlx.errors import require
from ssmlx.settings import (
    MAX_TREE_NODES,
    PruneConfig,
    StreamConfig,
    TreeConfig,
    check_settings,
    setting,
)

Compression = Literal["none", "int8", "int4", "palettised"]


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """Every shape of both functions follows from these and the model.

    Attributes:
        num_nodes: N, rows of a decode step; trees of fewer nodes are filled up.
        num_kept: M, nodes that pruning keeps; N where nothing is pruned.
        num_parents: I, leading nodes that may have children, for the early exit.
        num_streams: G, streams in use.
        num_candidates: K, ranked candidates of each stream.
        num_slots: S, slots of the cache.
        chunk: T, tokens of a prompt chunk.
    """

    num_nodes: int
    num_kept: int
    num_parents: int
    num_streams: int
    num_candidates: int
    num_slots: int
    chunk: int

    @property
    def is_pruned(self) -> bool:
        """Whether nodes are dropped half-way up."""
        return self.num_kept < self.num_nodes

    @property
    def num_positions(self) -> int:
        """Positions that a row may stand at: a stream looks G ahead of the last slot."""
        return self.num_slots + self.num_streams


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """How to export; what has a help is an option of the command.

    Attributes:
        tree: the trees that the streams draft.
        prune: off or by budget; a threshold has no fixed shape.
    """

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
    compression: Compression = setting(
        "none",
        "weights of layers and LM head: int8 a row; int4 in blocks of 32, for gpu; palettised, 4 "
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
    prune: PruneConfig = field(default_factory=PruneConfig)
    num_streams: int | None = setting(None, "tokens that streams draft ahead (default: all)")
    context: int = setting(1024, "S, tokens that the cache has room for", least=1)
    chunk: int = setting(64, "T, prompt tokens a call of prefill", least=1, most=MAX_TREE_NODES)

    def __post_init__(self) -> None:
        check_settings(self)
        require(
            self.context % self.chunk == 0,
            f"--context {self.context} with --chunk {self.chunk}",
            expected="whole chunks",
            do="choose a multiple",
        )
        require(
            self.prune.kind != "threshold",
            "--prune threshold, which keeps another number of nodes every time",
            expected="--prune budget, or off: an exported graph has fixed shapes",
            do="choose one of these",
        )
        compressed, found = self.compression != "none", f"--compress {self.compression} with"
        require(
            not (compressed and self.target == "coreai"),
            f"{found} --target coreai, where nothing is compressed",
            expected="--compress none",
            do="drop --compress, or use --target coreml",
        )
        require(
            not (compressed and self.precision != "float16"),
            f"{found} --dtype {self.precision}",
            expected="--dtype float16: float32 is for checking the graph itself",
            do="drop one of them",
        )

    def topology(self, config: StreamConfig, vocab_size: int) -> Any:
        """All nodes that the drafted trees can have; as `StreamDrafter` chooses it."""
        from ssmlx.model.tree import draft_topology

        most = config.draft_vocab_size or vocab_size
        streams = config.usable_streams(self.num_streams)
        return draft_topology(self.tree.no_wider_than(most), streams)

    def sizes(self, config: StreamConfig, vocab_size: int) -> GraphSizes:
        """The sizes of the graph for an adapter.

        Raises:
            InputError: the settings do not fit the adapter.
        """
        topology = self.topology(config, vocab_size)
        nodes = topology.num_nodes
        chosen = self.tree.kind == "best" and nodes > self.tree.size
        count = self.tree.size if chosen else nodes
        pruned = self.prune.kind == "budget" and self.prune.keep < count
        require(
            not pruned or bool(config.prune_rank),
            "--prune budget, but the adapter has no pruning adapter",
            expected="prune_adapter.* among its stream weights",
            do="use --prune off, or train one",
        )
        require(
            count <= self.context,
            f"--context {self.context}",
            expected=f"room for a tree of {count} nodes",
            do="choose a larger one",
        )
        return GraphSizes(
            num_nodes=count,
            num_kept=self.prune.keep if pruned else count,
            num_parents=count if chosen else topology.num_internal,
            num_streams=config.usable_streams(self.num_streams),
            num_candidates=topology.num_candidates,
            num_slots=self.context,
            chunk=self.chunk,
        )
