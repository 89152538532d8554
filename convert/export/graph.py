"""The two functions of an exported model, as PyTorch modules of fixed shapes.

What the host gives to "decode", all in slots of the cache and nodes of the tree:

    tokens     [N] int32    token of each node; node 0, the root, is not in the cache yet
    positions  [N] int32    where it stands in the text
    slots      [N] int32    a free slot of the cache for it, all different
    mask       [1, 1, N, S] 0 if the node sees the slot, else `MASKED`: every committed
                            slot, its ancestors' slots and its own
    parents    [N] int32    its parent; the root's is the root
    depths     [N] int32    its depth; -1 for a node that only fills the tree up
    ancestors  [N, N]       1 if the column's node is the row's or above it, else 0

and what it gets, beside the cache:

    target_tokens       [M] int32     the model's greedy choice after each node that was kept
    kept                [M] int32     those nodes, ascending; only if the tree is pruned
    last                [1] int32     the deepest accepted one, as an index into these M
    candidate_tokens    [G, K] int32  what its streams draft, best first
    candidate_logprobs  [G, K]        their log probabilities; or, of streams with a condition,
                        [G, K, K]     given each of the stream before, in all rows of the first
                                      given the target's choice after `last`

"prefill" takes tokens, positions, slots and mask of T prompt tokens, and gives the last slot.

The stages are those of `ssmlx/decoding/loop.py`. Acceptance is part of the graph, so that the
streams of one node alone are computed, after the nodes, and may start from the newest token.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ssmlx.exported.backends import DECODE, PREFILL
from ssmlx.exported.decode import MASKED
from ssmlx.settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB

from ..typed_torch import Module
from .parts import Profile, Rows, renormalise_topk

# Below every real path: less than any depth times the least edge, and within float16.
_IMPOSSIBLE = -1e4


@dataclass(frozen=True)
class Tensor:
    """A named input or output of a graph: "int" is int32, "float" the graph's own precision."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["int", "float"] = "int"

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=torch.int32 if self.kind == "int" else torch.float32)


class Graph(Module):
    """A function of the exported model: `forward(*inputs, *caches) -> outputs`.

    The caches are written in place: keys and values, layer by layer, each of `cache_shape`.
    `caches` are their names: "keys_00", "values_00", "keys_01" and so on.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __init__(self, profile: Profile, num_layers: int) -> None:
        super().__init__()
        self.profile = profile
        self.num_layers = num_layers
        layers = [f"{layer:02}" for layer in range(num_layers)]
        self.caches = [f"{kind}_{layer}" for layer in layers for kind in ("keys", "values")]
        self.cache_shape = profile.cache_shape()


class PrefillGraph(Graph):
    """Writes T tokens of the prompt into their slots; without streams."""

    name = PREFILL

    def __init__(self, profile: Profile, num_layers: int) -> None:
        super().__init__(profile, num_layers)
        count = profile.sizes.chunk
        slots = profile.sizes.num_slots
        names = ("tokens", "positions", "slots")
        mask = Tensor("mask", (1, 1, count, slots), "float")
        self.inputs = (*(Tensor(name, (count,)) for name in names), mask)
        self.outputs = (Tensor("last_slot", (1,)),)

    def forward(
        self,
        # tokens, positions and slots [T], mask [1, 1, T, S], then the caches
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the chunk; the last slot is returned because a converter needs an output."""
        tokens, positions, slots, mask = tensors[:4]
        hidden = self.profile.embed(tokens, positions)
        self.profile.run(hidden, 0, self.num_layers, Rows(positions, slots, mask, tensors[4:]))
        # Only the keys and values of the last layer are needed: the rest is dead code here.
        return (slots[-1:] + 0,)


class DecodeGraph(Graph):
    """Verifies a tree of N nodes, and drafts with the streams of the last accepted one."""

    name = DECODE

    def __init__(
        self,
        profile: Profile,
        num_layers: int,
        split: int,  # the first layer with streams
        vocab: torch.Tensor | None,  # [Vd] the tokens that streams draft from; None for all
    ) -> None:
        super().__init__(profile, num_layers)
        self.split = split
        sizes = profile.sizes
        # Eq. 2 among streams: each sees those before it and itself.
        every = torch.full((sizes.num_streams, sizes.num_streams), MASKED)
        own = every.triu(1)[None, None].to(profile.head.weight.dtype)
        self.own: torch.Tensor
        self.vocab: torch.Tensor | None
        self.ahead: torch.Tensor
        self.register_buffer("own", own, persistent=False)
        self.register_buffer("vocab", vocab, persistent=False)
        ahead = torch.arange(1, sizes.num_streams + 1, dtype=torch.int32)
        self.register_buffer("ahead", ahead, persistent=False)
        count = sizes.num_nodes
        kept = (sizes.num_kept,)
        drafted = (sizes.num_streams, sizes.tree.num_candidates)
        given = drafted[1:] if sizes.tree.is_conditional else ()
        self.inputs = (
            *(Tensor(name, (count,)) for name in ("tokens", "positions", "slots")),
            Tensor("mask", (1, 1, count, sizes.num_slots), "float"),
            *(Tensor(name, (count,)) for name in ("parents", "depths")),
            Tensor("ancestors", (count, count), "float"),
        )
        self.outputs = (
            Tensor("target_tokens", kept),
            *((Tensor("kept", kept),) if sizes.is_pruned else ()),
            Tensor("last", (1,)),
            Tensor("candidate_tokens", drafted),
            Tensor("candidate_logprobs", (*drafted, *given), "float"),
        )

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the step; the module's docstring lists inputs (then come caches) and outputs."""
        profile = self.profile
        sizes = self.profile.sizes
        tokens, positions, slots, mask, parents, depths, ancestors = tensors[:7]
        caches = tensors[7:]
        hidden = profile.embed(tokens, positions)
        hidden = profile.run(hidden, 0, self.split, Rows(positions, slots, mask, caches))
        kept: tuple[torch.Tensor, ...] = ()
        if sizes.is_pruned:
            edges = self._early_exit_edge_logprobs(hidden, tokens, parents)
            keep = surviving_nodes(edges, depths, ancestors, sizes.num_kept)
            kept = (keep,)
            hidden = profile.take_rows(hidden, keep)
            tokens, positions, slots, depths = (x[keep] for x in (tokens, positions, slots, depths))
            mask = mask[:, :, keep]
            ancestors = ancestors[keep][:, keep]
            parents = (parents[keep][:, None] == keep).int().argmax(dim=-1).int()
        # In the upper layers, caches get only the kept nodes.
        nodes = Rows(positions, slots, mask, caches)
        normed = profile.norm(profile.run(hidden, self.split, self.num_layers, nodes))
        targets = profile.head.likeliest(normed)
        last = last_accepted(tokens, targets, parents, depths, ancestors)
        root = targets[last]
        root_inputs = None
        if profile.reference.root_init is not None:
            root_inputs = profile.root_states(root, profile.take_rows(normed, last))
        started = profile.start_streams(profile.take_rows(hidden, last), root_inputs)
        return (
            targets,
            *kept,
            last,
            *self._rank_drafts(self._run_streams(started, nodes, last), root),
        )

    def _early_exit_edge_logprobs(
        self,
        # all nodes before the first layer with streams, in the profile's layout
        hidden: torch.Tensor,
        tokens: torch.Tensor,  # [N]
        parents: torch.Tensor,  # [N]
    ) -> torch.Tensor:
        """Log probability of each node's token given its parent, [N]; the root's is meaningless."""
        profile = self.profile
        inner = profile.take_rows(hidden, torch.arange(profile.sizes.num_parents))
        states = profile.early_exit_states(inner)
        above = torch.minimum(parents, torch.tensor(profile.sizes.num_parents - 1))
        total = profile.head.logsumexp(states)[above]
        return profile.head.token_logits(profile.as_rows(states)[above], tokens) - total

    def _run_streams(
        self,
        started: torch.Tensor,  # G stream rows of `Profile.start_streams`
        nodes: Rows,  # the kept nodes
        last: torch.Tensor,  # [1] index of the streams' node among these
    ) -> torch.Tensor:
        """Run the streams through the top layers and the final norm (eqs. 1 and 2)."""
        profile = self.profile
        streams = self.profile.sizes.num_streams
        seen = nodes.mask[:, :, last].expand(-1, -1, streams, -1)
        mask = torch.cat([seen, self.own], dim=3)
        rows = Rows(nodes.positions[last] + self.ahead, None, mask, nodes.caches)
        with profile.reference.treating_rows_as_streams():
            return profile.norm(profile.run(started, self.split, self.num_layers, rows))

    def _rank_drafts(
        self,
        streams: torch.Tensor,  # final-normed, in the profile's layout
        root: torch.Tensor,  # [1] the token that the target chose after the node
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank tokens [G, K], best first, with log probabilities as `candidate_logprobs`."""
        profile = self.profile
        sizes = self.profile.sizes
        columns, logprobs = profile.draft_head.rank(streams, sizes.tree.num_candidates)
        tokens = columns if self.vocab is None else self.vocab[columns]
        if sizes.tree.is_conditional:
            previous = torch.cat([root.expand_as(tokens[:1]), tokens[:-1]])
            logprobs = renormalise_topk(
                logprobs, profile.condition_logits(streams, previous, tokens)
            )
        return tokens, logprobs


class ConvertibleGraph(Module):
    """A graph to be traced; caches are buffers, or inputs and outputs after the others."""

    def __init__(self, graph: Graph, *, stateful: bool) -> None:
        super().__init__()
        self.function = graph
        self.stateful = stateful
        for name in graph.caches if stateful else ():
            self.register_buffer(name, torch.zeros(graph.cache_shape))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        graph = self.function
        if self.stateful:
            caches = (getattr(self, name) for name in graph.caches)
            outputs: tuple[torch.Tensor, ...] = graph(*tensors, *caches)
            return outputs
        return (*graph(*tensors), *tensors[len(graph.inputs) :])


# --- What a step decides about its tree: the rules of `ssmlx.decoding`, on fixed shapes --------


def surviving_nodes(
    edges: torch.Tensor,  # [N] early-exit log probability of each node given its parent
    # [N]; 0 for the root, -1 for nodes that only fill up, which are kept last
    depths: torch.Tensor,
    ancestors: torch.Tensor,  # [N, N], 1 if the column's node is the row's or above it
    num_kept: int,  # M
) -> torch.Tensor:
    """The nodes [M] int32, ascending, with the most probable paths, the root among them.

    The rule of `ssmlx.decoding.prune.nodes_within_budget`, on fixed shapes.
    """
    below_root = (depths > 0).to(edges.dtype)
    clipped = edges.clamp(MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB) * below_root
    idle = (depths < 0).to(edges.dtype)
    scores = (ancestors * clipped).sum(dim=-1) + _IMPOSSIBLE * idle
    chosen = scores.topk(num_kept).indices.int()
    # Ascending, by a sort of small whole numbers, which float16 holds exactly.
    return -(-chosen.to(edges.dtype)).topk(num_kept).values.int()


def last_accepted(
    tokens: torch.Tensor,  # [M] of the kept nodes
    targets: torch.Tensor,  # [M] the target's token after each
    parents: torch.Tensor,  # [M] as indices into these M
    depths: torch.Tensor,  # [M]; 0 for the root, -1 for nodes that only fill up
    ancestors: torch.Tensor,  # [M, M], 1 if the column's node is the row's or above it
) -> torch.Tensor:
    """The index [1] int32 of the deepest node whose whole path is the target's own tokens."""
    agrees = torch.logical_or(tokens == targets[parents], depths == 0)
    faults = (ancestors * torch.logical_not(agrees).to(ancestors.dtype)).sum(dim=-1)
    reached = (depths + 1).to(ancestors.dtype) * (faults < 0.5).to(ancestors.dtype)
    return reached.argmax(dim=0, keepdim=True).int()
