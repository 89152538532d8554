"""What to export: the settings of `python -m ssmlx.export`, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ssmlx.errors import InputError
from ssmlx.model.tree import Topology, draft_topology
from ssmlx.settings import MAX_TREE_NODES, PruneConfig, StreamConfig, TreeConfig

from .sizes import GraphSizes

Target = Literal["coreml", "coreai"]
ProfileName = Literal["gpu", "ane"]
Compression = Literal["none", "int8", "int4", "palettised"]
Precision = Literal["float32", "float16"]
TARGETS: tuple[Target, ...] = ("coreml", "coreai")
PROFILES: tuple[ProfileName, ...] = ("gpu", "ane")
COMPRESSIONS: tuple[Compression, ...] = ("none", "int8", "int4", "palettised")
PRECISIONS: tuple[Precision, ...] = ("float16", "float32")


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
            if value not in known:
                raise InputError(
                    f"{flag} {value}", expected="one of " + ", ".join(known), do="choose one"
                )
        if not 1 <= self.chunk <= MAX_TREE_NODES or self.context % self.chunk or self.context < 1:
            raise InputError(
                f"--context {self.context} with --chunk {self.chunk}",
                expected=f"whole chunks of 1 to {MAX_TREE_NODES} tokens",
                do="choose a multiple",
            )
        if self.prune.kind == "threshold":
            raise InputError(
                "--prune threshold, which keeps another number of nodes every time",
                expected="--prune budget, or off: an exported graph has fixed shapes",
                do="choose one of these",
            )
        if self.compression != "none" and self.target == "coreai":
            raise InputError(
                f"--compress {self.compression} with --target coreai, where nothing is compressed",
                expected="--compress none",
                do="drop --compress, or use --target coreml",
            )
        if self.compression != "none" and self.precision != "float16":
            raise InputError(
                f"--compress {self.compression} with --dtype {self.precision}",
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
        if pruned and not config.prune_rank:
            raise InputError(
                "--prune budget, but the adapter has no pruning adapter",
                expected="prune_adapter.* among its stream weights",
                do="use --prune off, or train one",
            )
        if count > self.context:
            raise InputError(
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
