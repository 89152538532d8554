"""The two functions of an exported model, as PyTorch modules of fixed shapes.

What the host gives to "decode", all in slots of the cache and nodes of the tree:

    tokens     [N] int32    token of each node; node 0, the root, is not in the cache yet
    positions  [N] int32    where it stands in the text
    slots      [N] int32    a free slot of the cache for it, all different
    mask       [1, 1, N, S] 0 where the node sees the slot, else `MASKED`: every committed
                            slot, its ancestors' slots and its own
    parents    [N] int32    its parent; the root's is the root
    depths     [N] int32    its depth; -1 for a node that only fills the tree up
    ancestors  [N, N]       1 where the column's node is the row's or above it, else 0

and what it gets, beside the cache:

    target_tokens       [M] int32     the model's greedy choice after each node that was kept
    kept                [M] int32     those nodes, ascending; only where the tree is pruned
    last                [1] int32     the deepest accepted one, as an index into these M
    candidate_tokens    [G, K] int32  what its streams draft, best first
    candidate_logprobs  [G, K]        their log probabilities; or, of streams with a condition,
                        [G, K, K]     given each of the stream before, in all rows of the first
                                      given the target's choice after `last`

"prefill" takes tokens, positions, slots and mask of T prompt tokens, and gives the last slot.

The stages are those of `ssmlx/decoding/loop.py`. Acceptance is part of the graph, so that the
streams of one node alone are computed, behind the nodes, and may start from the newest token.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ssmlx.exported.backends import DECODE, PREFILL
from ssmlx.exported.decode import MASKED
from ssmlx.settings import MAX_EDGE_LOGPROB, MIN_EDGE_LOGPROB

from ..typed_torch import Module
from .parts import Profile, Rows, renormalise_topk

# Below every path that exists: less than any depth times the least edge, and a float16.
_IMPOSSIBLE = -1e4


@dataclass(frozen=True)
class Tensor:
    """A named input or output of a graph: "int" is int32, "float" the graph's own precision."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["int", "float"] = "int"

    def zeros(self) -> torch.Tensor:
        """Return zeros of the tensor's shape, int32 or float32."""
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
        """Take the profile, and name the caches of `num_layers` layers: of each its keys, then its
        values.
        """
        super().__init__()
        self.profile = profile
        self.num_layers = num_layers
        layers = [f"{layer:02}" for layer in range(num_layers)]
        self.caches = [f"{kind}_{layer}" for layer in layers for kind in ("keys", "values")]
        self.cache_shape = profile.cache_shape()


class PrefillGraph(Graph):
    """Puts T tokens of the prompt into their slots; without streams."""

    name = PREFILL

    def __init__(self, profile: Profile, num_layers: int) -> None:
        """Describe inputs and outputs of a chunk of T tokens."""
        super().__init__(profile, num_layers)
        count = profile.sizes.chunk
        slots = profile.sizes.num_slots
        names = ("tokens", "positions", "slots")
        mask = Tensor("mask", (1, 1, count, slots), "float")
        self.inputs = (*(Tensor(name, (count,)) for name in names), mask)
        self.outputs = (Tensor("last_slot", (1,)),)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write the tokens' keys and values into the caches; nothing is predicted.

        Args:
            tensors: tokens, positions and slots [T], mask [1, 1, T, S], then the caches.

        Returns:
            The last token's slot [1], alone: a converter wants an output.
        """
        tokens, positions, slots, mask = tensors[:4]
        hidden = self.profile.embed(tokens, positions)
        self.profile.run(hidden, 0, self.num_layers, Rows(positions, slots, mask, tensors[4:]))
        # Of the last layer, only its keys and values are needed: the rest is dead code here.
        return (slots[-1:] + 0,)


class DecodeGraph(Graph):
    """Verifies a tree of N nodes, and drafts from the streams of the last accepted one.

    The head of this file describes inputs and outputs.
    """

    name = DECODE

    def __init__(
        self, profile: Profile, num_layers: int, split: int, vocab: torch.Tensor | None
    ) -> None:
        """Describe inputs and outputs, and make the mask among streams and their distances.

        Args:
            profile: layers, heads and sizes.
            num_layers: of the model, all of which run.
            split: the first layer with streams.
            vocab: [Vd] the tokens that streams draft from; None for all.
        """
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
        """Verify the tree, prune it where asked for, and draft behind the last accepted node.

        Inputs, then the caches, and outputs are as the head of this file says. Keys and values of
        all nodes are written into the caches, in the upper layers those of the kept nodes alone.
        """
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
        self, hidden: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
    ) -> torch.Tensor:
        """Return [N], the early-exit log probability of each node's token given its parent.

        The root's own is without meaning.

        Args:
            hidden: of all nodes before the first layer with streams, in the profile's layout.
            tokens: [N].
            parents: [N].
        """
        profile = self.profile
        inner = profile.take_rows(hidden, torch.arange(profile.sizes.num_parents))
        states = profile.early_exit_states(inner)
        above = torch.minimum(parents, torch.tensor(profile.sizes.num_parents - 1))
        total = profile.head.logsumexp(states)[above]
        return profile.head.token_logits(profile.as_rows(states)[above], tokens) - total

    def _run_streams(self, started: torch.Tensor, nodes: Rows, last: torch.Tensor) -> torch.Tensor:
        """Run the streams of node `last` through the top layers and the final norm (eqs. 1 and 2).

        Args:
            started: G stream rows, as `Profile.start_streams` gives them.
            nodes: rows of the nodes that were kept.
            last: [1] index of the node among these.

        Returns:
            The G streams' final-normed states, in the profile's layout.
        """
        profile = self.profile
        streams = self.profile.sizes.num_streams
        seen = nodes.mask[:, :, last].expand(-1, -1, streams, -1)
        mask = torch.cat([seen, self.own], dim=3)
        rows = Rows(nodes.positions[last] + self.ahead, None, mask, nodes.caches)
        with profile.reference.treating_rows_as_streams():
            return profile.norm(profile.run(started, self.split, self.num_layers, rows))

    def _rank_drafts(
        self, streams: torch.Tensor, root: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank what a node's streams draft.

        Args:
            streams: final-normed states of its G streams, in the profile's layout.
            root: [1] the token that the target chose behind the node.

        Returns:
            [G, K] tokens, best first; and their log probabilities [G, K], or with a condition
            [G, K, K] given each candidate of the stream before, all the first stream's given
            `root`.
        """
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
    """A graph in the form that a converter traces: its caches are buffers of its own, which are
    state to a converter, or else inputs and outputs behind the others.
    """

    def __init__(self, graph: Graph, *, stateful: bool) -> None:
        """Wrap a graph; where `stateful`, its caches become buffers of zeros."""
        super().__init__()
        self.function = graph
        self.stateful = stateful
        for name in graph.caches if stateful else ():
            self.register_buffer(name, torch.zeros(graph.cache_shape))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the graph on its inputs.

        Args:
            tensors: the graph's inputs; then, unless the caches are buffers, the caches.

        Returns:
            The graph's outputs; then, unless the caches are buffers, the caches, which were written
            in place.
        """
        graph = self.function
        if self.stateful:
            caches = (getattr(self, name) for name in graph.caches)
            outputs: tuple[torch.Tensor, ...] = graph(*tensors, *caches)
            return outputs
        return (*graph(*tensors), *tensors[len(graph.inputs) :])


# --- What a step decides about its tree: the rules of `ssmlx.decoding`, on fixed shapes --------


def surviving_nodes(
    edges: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor, num_kept: int
) -> torch.Tensor:
    """Return [M] int32, the `num_kept` nodes of the largest path probability, by ascending number.

    The root's path is the likeliest, so it is kept. An edge's log probability is cut to the bounds
    that all drafting has (`MIN_EDGE_LOGPROB` to `MAX_EDGE_LOGPROB`).

    The rule of `ssmlx.decoding.prune.nodes_within_budget`, on fixed shapes.

    Args:
        edges: [N] early-exit log probability of each node given its parent.
        depths: [N]; 0 for the root, -1 for nodes that only fill up, which are kept last.
        ancestors: [N, N], 1 where the column's node is the row's or above it.
        num_kept: M.
    """
    below_root = (depths > 0).to(edges.dtype)
    clipped = edges.clamp(MIN_EDGE_LOGPROB, MAX_EDGE_LOGPROB) * below_root
    idle = (depths < 0).to(edges.dtype)
    scores = (ancestors * clipped).sum(dim=-1) + _IMPOSSIBLE * idle
    chosen = scores.topk(num_kept).indices.int()
    # Ascending, by a sort of small whole numbers, which float16 holds exactly.
    return -(-chosen.to(edges.dtype)).topk(num_kept).values.int()


def last_accepted(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
) -> torch.Tensor:
    """Return [1] int32, the index of the deepest node whose whole path has the target's own tokens.

    It is the root's where no draft is accepted.

    Args:
        tokens: [M] of the kept nodes.
        targets: [M] the target's token after each.
        parents: [M] each one's parent, as an index into these M.
        depths: [M]; 0 for the root, -1 for nodes that only fill up.
        ancestors: [M, M], 1 where the column's node is the row's or above it.
    """
    agrees = torch.logical_or(tokens == targets[parents], depths == 0)
    faults = (ancestors * torch.logical_not(agrees).to(ancestors.dtype)).sum(dim=-1)
    reached = (depths + 1).to(ancestors.dtype) * (faults < 0.5).to(ancestors.dtype)
    return reached.argmax(dim=0, keepdim=True).int()
