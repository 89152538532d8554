"""What to export: the settings of `python -m ssmlx.export`, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ssmlx.errors import check_choice, require
from ssmlx.exported.manifest import TARGETS
from ssmlx.model.tree import Topology, draft_topology
from ssmlx.settings import MAX_TREE_NODES, PruneConfig, StreamConfig, TreeConfig

Target = Literal["coreml", "coreai"]
ProfileName = Literal["gpu", "ane"]
Compression = Literal["none", "int8", "int4", "palettised"]
Precision = Literal["float32", "float16"]
PROFILES: tuple[ProfileName, ...] = ("gpu", "ane")
COMPRESSIONS: tuple[Compression, ...] = ("none", "int8", "int4", "palettised")
PRECISIONS: tuple[Precision, ...] = ("float16", "float32")


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
    """How to export.

    Attributes:
        target: "coreml" or "coreai".
        profile: "gpu" or "ane".
        compression: how weights are stored.
        precision: of weights and arithmetic.
        tree: the trees that the streams draft.
        prune: off or by budget; a threshold has no fixed shape.
        num_streams: G, the streams to use; None for all that were trained.
        context: S, tokens that the cache has room for.
        chunk: T, tokens of a prompt chunk; it divides `context`.
    """

    target: Target = "coreml"
    profile: ProfileName = "gpu"
    compression: Compression = "none"
    precision: Precision = "float16"
    tree: TreeConfig = field(default_factory=TreeConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    num_streams: int | None = None
    context: int = 1024
    chunk: int = 64

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--target", self.target, TARGETS),
            ("--profile", self.profile, PROFILES),
            ("--compress", self.compression, COMPRESSIONS),
            ("--dtype", self.precision, PRECISIONS),
        ):
            check_choice(flag, value, known)
        require(
            self.context >= self.chunk >= 1
            and self.chunk <= MAX_TREE_NODES
            and not self.context % self.chunk,
            f"--context {self.context} with --chunk {self.chunk}",
            expected=f"whole chunks of 1 to {MAX_TREE_NODES} tokens",
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

    def topology(self, config: StreamConfig, vocab_size: int) -> Topology:
        """All nodes that the drafted trees can have; as `StreamDrafter` chooses it."""
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
