"""The MLP speculator (arXiv 2404.19124): stages that each guess a token, given the one before.

Stage i takes the state and the last token of every path so far, makes the new state

    s = GELU(rms(proj_i s + c emb_i[token]) * w_i + b_i),     logits = head_i s

and ranks the path's next tokens. It starts from the base model's hidden state and the token that
was decided there. c weighs embeddings so that the first state keeps half of the variance up to
the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import mul

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..decoding.drafter import num_trained, rank_candidates
from ..errors import InputError
from ..model.shapes import expect_shape
from ..model.tree import Topology, Tree, clip_edges, top_nodes
from ..settings import MAX_TREE_NODES, DrafterKind

DEFAULT_WIDTHS = (6, 3, 2)
"""Branches at each stage in the paper's experiments (section 4.1)."""

DEFAULT_CANDIDATES = 5
"""Of the published format."""

MODEL_TYPE, PREFIX = "mlp_speculator", "speculator."
"""Of the published format: what config.json calls it, and what its tensors' names begin with."""

EPSILON = 1e-6
_AHEAD_OF_ALL = 1e4  # added to the scores of nodes that must be in the tree


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig:
    """The settings of a published speculator, under their published names.

    Attributes:
        emb_dim: D, the base model's width.
        inner_dim: width of the states; 0 for emb_dim.
        n_predict: stages.
        vocab_size: V, the base model's.
        tie_weights: stages share embedding, norm and head, and all but the first the projection.
        scale_input: the hidden state is normed and divided by sqrt 2 first.
        top_k_tokens_per_head: branches at each stage, where the settings say.
        n_candidates: k, whole candidates to keep, where the settings say.
        draft_vocab_size: Vd, tokens that the stages guess among; 0 for the whole vocabulary.
    """

    emb_dim: int
    n_predict: int
    vocab_size: int
    inner_dim: int = 0
    tie_weights: bool = False
    scale_input: bool = False
    top_k_tokens_per_head: tuple[int, ...] = ()
    n_candidates: int | None = None
    draft_vocab_size: int = 0

    def __post_init__(self) -> None:
        for name, least in (("emb_dim", 1), ("n_predict", 1), ("vocab_size", 1), ("inner_dim", 0)):
            self._check(name, _is_whole(getattr(self, name), least), f"{least} or more")
        self._check("n_candidates", self.n_candidates is None or _is_whole(self.n_candidates, 1),
                    "1 or more")  # fmt: skip
        for name in ("tie_weights", "scale_input"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        widths = self.top_k_tokens_per_head
        fits = not widths or len(widths) == self.n_predict
        self._check(
            "top_k_tokens_per_head",
            fits and all(_is_whole(width, 1) for width in widths),
            f"{self.n_predict} numbers of 1 or more, one a stage",
        )

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InputError(
                f"{name} is {getattr(self, name)!r} in an MLP speculator's settings",
                expected=expected,
                do="check its config.json",
            )

    @property
    def width(self) -> int:
        """Width of the states."""
        return self.inner_dim or self.emb_dim

    @property
    def num_levels(self) -> int:
        """Levels below the root of the trees that the stages draft."""
        return self.n_predict

    @property
    def widths(self) -> tuple[int, ...]:
        """Branches at each stage: as the settings say, or the paper's, with 1 for later stages."""
        default = (*DEFAULT_WIDTHS, *(1,) * self.n_predict)
        return self.top_k_tokens_per_head or default[: self.n_predict]

    @property
    def candidates(self) -> int:
        """k, whole candidates to keep: as the settings say, or the format's default."""
        return self.n_candidates or DEFAULT_CANDIDATES

    @property
    def state_weight(self) -> float:
        """By which a stage multiplies the state before it."""
        return 0.5 ** (0.5 / self.n_predict)

    @property
    def emb_weight(self) -> float:
        """By which a stage multiplies its token's embedding."""
        return math.sqrt((1 - self.state_weight**2) * self.width / 2)

    def name_of(self, part: str, stage: int) -> str:
        """The tensor that is `part` of `stage`: its own, or the one that it shares."""
        first = 1 if part.startswith("proj") else 0
        kind, _, leaf = part.partition(".")
        return f"{kind}.{min(stage, first) if self.tie_weights else stage}.{leaf}"

    @property
    def matrix_names(self) -> list[str]:
        """The tensors with a row for each token that may be guessed."""
        stages = range(self.n_predict)
        return list(dict.fromkeys(self.name_of("head.weight", stage) for stage in stages))

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of an MLX heads file; shared ones stand once."""
        rows, width = self.draft_vocab_size or self.vocab_size, self.width
        expected: dict[str, tuple[int, ...]] = {}
        for stage in range(self.n_predict):
            shapes: dict[str, tuple[int, ...]] = {
                "emb.weight": (self.vocab_size, width),
                "proj.weight": (width, width if stage else self.emb_dim),
                "ln.weight": (width,),
                "ln.bias": (width,),
                "head.weight": (rows, width),
            }
            expected |= {self.name_of(part, stage): shape for part, shape in shapes.items()}
        if self.draft_vocab_size:
            expected["draft_vocab"] = (self.draft_vocab_size,)
        return expected


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class MlpSpeculator:
    """A speculator, which needs nothing of its base model but hidden states.

    Args:
        config: its settings.
        tensors: `config.expected_tensors()`, in the base model's dtype.

    Attributes:
        config: as given.
        draft_vocab: [Vd] int32, the token of each column of the logits; None for all.
        drafter: the name under which it drafts.
        num_parameters: weights, those that stages share counted once.
    """

    drafter: DrafterKind = "mlp-speculator"

    def __init__(self, config: MlpSpeculatorConfig, tensors: Mapping[str, mx.array]) -> None:
        self.config = config
        self.draft_vocab = tensors.get("draft_vocab")
        self.num_parameters = num_trained(tensors)
        self._tensors = tensors

    @property
    def num_levels(self) -> int:
        """Stages, the levels below the root of the drafted trees."""
        return self.config.n_predict

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, those that stages share counted once."""
        return sum(array.nbytes for array in self._tensors.values())

    @property
    def draft_vocab_size(self) -> int:
        """Vd; V where the stages guess among the whole vocabulary."""
        return self.config.draft_vocab_size or self.config.vocab_size

    def first_state(self, hidden: mx.array) -> mx.array:
        """[B, D] what stage 0 starts from, of final-normed hidden states [B, D]."""
        if not self.config.scale_input:
            return hidden
        return mx.fast.rms_norm(hidden, None, EPSILON) / math.sqrt(2)

    def stage(self, index: int, state: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """The next state and logits of B paths.

        Args:
            index: which stage.
            state: [B, D] of `first_state` for stage 0, [B, inner] of the stage before for others.
            tokens: [B] the last token of each path.

        Returns:
            [B, inner] the new states, and [B, Vd] the logits of each path's next token.
        """
        projected = state @ self._part("proj.weight", index).T
        config = self.config
        embedded = self._part("emb.weight", index)[tokens]
        mixed = projected + (config.emb_weight / config.state_weight) * embedded
        normed = mx.fast.rms_norm(mixed, self._part("ln.weight", index), EPSILON)
        state = nn.gelu(normed + self._part("ln.bias", index))
        return state, state @ self._part("head.weight", index).T

    def _part(self, part: str, stage: int) -> mx.array:
        return self._tensors[self.config.name_of(part, stage)]

    def rank_paths(
        self, root: mx.array, hidden: mx.array, widths: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Tokens and edge log probabilities [N] of the full tree of `widths`, breadth first.

        Level i ranks `widths[i]` tokens for each of the widths[0] * ... * widths[i - 1] paths,
        all of them in one batch.
        """
        expect_shape("hidden state", hidden, 1, self.config.emb_dim)
        expect_shape("root", root, 1)
        state, tokens = self.first_state(hidden), root
        node_tokens, edges = [root], [mx.zeros(1)]
        for index, width in enumerate(widths):
            state, logits = self.stage(index, state, tokens)
            ranked, logprobs = rank_candidates(logits, width)  # [beams, width] both
            if self.draft_vocab is not None:
                ranked = self.draft_vocab[ranked]
            tokens = ranked.flatten()
            state = mx.repeat(state, width, axis=0)
            node_tokens.append(tokens.astype(root.dtype))
            edges.append(logprobs.flatten())
        return mx.concatenate(node_tokens), mx.concatenate(edges)

    def propose_tree(
        self,
        root: mx.array,
        hidden: mx.array,
        widths: Sequence[int] | None = None,
        keep: int | None = None,
        *,
        candidates: int | None = None,
    ) -> Tree:
        """The tree below `root` [1], pruned by confidence (section 4.1) to a fixed shape.

        Args:
            root: the token that the base model decided on at `hidden`.
            hidden: [1, D] the newest accepted node's state, behind the base model's final norm.
            widths: branches at each stage, of as many stages as are given; the settings' own
                unless told.
            keep: N, nodes of the largest path probability, the root included; every node
                unless told.
            candidates: k, in place of `keep`: the paper's rule. The k most probable whole paths
                are in the tree, their prefixes merged, and where that leaves some of the
                `num_candidate_nodes(widths, k)` nodes free, the next best take them.

        Raises:
            InputError: the tree cannot have these widths.
        """
        widths = self.checked_widths(widths)
        if keep is not None and candidates is not None:
            raise ValueError("give keep or candidates, not both")
        if any(count is not None and count < 1 for count in (keep, candidates)):
            raise ValueError(f"keep is {keep}, candidates {candidates}; expected 1 or more")
        topology = widths_topology(widths)
        tokens, edges = self.rank_paths(root, hidden, widths)
        tree = Tree(tokens, topology.depths, topology.paths, topology.num_internal, topology)
        size = topology.num_nodes if keep is None else keep
        if candidates is not None:
            size = num_candidate_nodes(widths, candidates)
        if size >= topology.num_nodes:
            return tree
        scores = tree.path_sums(clip_edges(edges))
        if candidates is not None:
            scores = scores + _AHEAD_OF_ALL * _prefixes_of_best(tree, scores, widths, candidates)
        return tree.select(top_nodes(scores, size))

    def checked_widths(self, widths: Sequence[int] | None) -> tuple[int, ...]:
        """`widths`, or the settings' own, no wider than there are tokens to guess.

        Raises:
            InputError: they are too many, too small, or make too large a tree.
        """
        chosen = tuple(self.config.widths if widths is None else widths)
        fits = 1 <= len(chosen) <= self.num_levels and all(width >= 1 for width in chosen)
        chosen = tuple(min(width, self.draft_vocab_size) for width in chosen)
        if not fits or num_candidate_nodes(chosen, None) > MAX_TREE_NODES:
            raise InputError(
                f"tree widths {' x '.join(map(str, chosen)) or 'of no stage'}",
                expected=f"1 to {self.num_levels} widths of 1 or more, and {MAX_TREE_NODES} nodes "
                "at most",
                do="choose other widths",
            )
        return chosen


def num_candidate_nodes(widths: Sequence[int], candidates: int | None) -> int:
    """Most nodes that `candidates` whole paths can have, the root included; of all if None."""
    levels = accumulate(widths, mul)
    return 1 + sum(count if candidates is None else min(count, candidates) for count in levels)


@lru_cache(maxsize=64)
def widths_topology(widths: tuple[int, ...]) -> Topology:
    """The full tree with `widths[i]` children for every node of depth i, breadth first."""
    ranks = [r for depth in range(len(widths) + 1) for r in product(*map(range, widths[:depth]))]
    index = {path: node for node, path in enumerate(ranks)}
    depths = np.array([len(path) for path in ranks], np.int32)
    paths = [[index[path[:depth]] for depth in range(len(widths) + 1)] for path in ranks]
    return Topology(
        slots=mx.arange(len(ranks) - 1),
        depths=mx.array(depths),
        paths=mx.array(np.array(paths, np.int32)),
        num_candidates=max(widths),
        num_internal=num_candidate_nodes(widths[:-1], None),
    )


def _prefixes_of_best(
    tree: Tree, scores: mx.array, widths: Sequence[int], candidates: int
) -> mx.array:
    """[N] bool: nodes on the `candidates` best paths that go all the way down."""
    num_leaves = math.prod(widths)
    leaves = top_nodes(scores[-num_leaves:], candidates) + tree.num_nodes - num_leaves
    return (tree.paths[leaves][:, :, None] == mx.arange(tree.num_nodes)).any(axis=(0, 1))
