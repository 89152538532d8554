"""The MLP speculator (arXiv 2404.19124): stages that each guess a token, given the one before.

Stage i takes the state and the last token of every path so far, makes the new state

    s = GELU(rms(proj_i s + c emb_i[token]) * w_i + b_i),     logits = head_i s

and ranks the path's next tokens. It starts from the base model's hidden state and the token that
was decided there. c weighs embeddings so that the first state keeps half of the variance up to
the last stage.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from operator import mul

import mlx.core as mx
import mlx.nn as nn

from ..decoding.ranking import Noise, rank_candidates, with_noise
from ..errors import require
from ..model.backbone import Backbone
from ..model.shapes import expect_shape, indices
from ..model.tree import Topology, Tree, clip_logprobs, top_nodes, topology_of_paths
from ..settings import MAX_DRAFT_TOKENS, MAX_TREE_NODES, SpeculatorTreeConfig, setting
from .head_drafter import DraftingHeads, HeadConfig

DEFAULT_WIDTHS = (6, 3, 2)  # branches at each stage in the paper's experiments (section 4.1)
DEFAULT_CANDIDATES = 5  # the published format's
EPSILON = 1e-6
_AHEAD_OF_ALL = 1e4  # added to the scores of nodes that must be in the tree


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """The settings of a published speculator, under their published names."""

    kind = "mlp_speculator"
    emb_dim: int = setting(least=1)  # D, the base model's width
    n_predict: int = setting(least=1, most=MAX_DRAFT_TOKENS)  # stages
    inner_dim: int = setting(0, least=0)  # width of the states; 0 for emb_dim
    # stages share embedding, norm and head, and all but the first the projection
    tie_weights: bool = setting(False, choices=(True, False))
    # the hidden state is normed and divided by sqrt 2 first
    scale_input: bool = setting(False, choices=(True, False))
    # branches at each stage, if the settings say
    top_k_tokens_per_head: tuple[int, ...] = setting((), least=1)
    # k, whole candidates to keep, if the settings say
    n_candidates: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.top_k_tokens_per_head) in (0, self.n_predict),
            f"top_k_tokens_per_head is {self.top_k_tokens_per_head} in the settings of heads",
            expected=f"{self.n_predict} numbers of at least 1, one for each stage",
            do="check the heads, or convert them again",
        )

    @property
    def width(self) -> int:
        return self.inner_dim or self.emb_dim

    @property
    def base_width(self) -> int:
        return self.emb_dim

    @property
    def num_levels(self) -> int:
        return self.n_predict

    @property
    def widths(self) -> tuple[int, ...]:
        """Branches at each stage: as the settings say, or the paper's, with 1 for later stages."""
        default = (*DEFAULT_WIDTHS, *(1,) * self.n_predict)
        return self.top_k_tokens_per_head or default[: self.n_predict]

    @property
    def candidates(self) -> int:
        """k, whole candidates to keep."""
        return self.n_candidates or DEFAULT_CANDIDATES

    @property
    def emb_weight(self) -> float:
        """c, by which a stage multiplies its token's embedding, over the state's own weight."""
        state_weight: float = 0.5 ** (0.5 / self.n_predict)
        return math.sqrt((1 - state_weight**2) * self.width / 2) / state_weight

    def tensor_name(self, part: str, stage: int) -> str:
        """The published name of the tensor `part`, such as "ln.bias"; with `tie_weights` that of
        the first stage that shares it."""
        first = 1 if part.startswith("proj") else 0
        kind, _, leaf = part.partition(".")
        return f"{kind}.{min(stage, first) if self.tie_weights else stage}.{leaf}"

    @property
    def matrix_names(self) -> list[str]:
        stages = range(self.n_predict)
        return list(dict.fromkeys(self.tensor_name("head.weight", stage) for stage in stages))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for stage in range(self.n_predict):
            shapes: dict[str, tuple[int, ...]] = {
                "emb.weight": (self.vocab_size, self.width),
                "proj.weight": (self.width, self.width if stage else self.emb_dim),
                "ln.weight": (self.width,),
                "ln.bias": (self.width,),
                "head.weight": (self.num_guessed, self.width),
            }
            found |= {self.tensor_name(part, stage): shape for part, shape in shapes.items()}
        return found


class MlpSpeculator(DraftingHeads):
    """A speculator, which needs nothing of its base model but hidden states.

    Trees are pruned by confidence (section 4.1) to a fixed shape: of the full tree of the widths
    the `size` nodes of the largest path probability; or, the paper's rule, the `candidates` most
    probable whole paths, their prefixes merged, and the next best nodes as far as these leave room.
    """

    drafter = "mlp-speculator"

    def __init__(
        self, config: MlpSpeculatorConfig, tensors: Mapping[str, mx.array], backbone: Backbone
    ) -> None:
        super().__init__(config, tensors, backbone)
        self._tensors = tensors
        self.nbytes = sum(array.nbytes for array in tensors.values())

    def first_state(
        self,
        hidden: mx.array,  # [B, D] after the final norm
    ) -> mx.array:  # [B, D]
        if not self.config.scale_input:
            return hidden
        return mx.fast.rms_norm(hidden, None, EPSILON) / math.sqrt(2)

    def run_stage(
        self,
        stage: int,  # from 0
        states: mx.array,  # [B, D] for stage 0; [B, inner] for others
        last_tokens: mx.array,  # [B] the last token of each path
    ) -> tuple[mx.array, mx.array]:
        """One stage on B paths: [B, inner] next states, and [B, Vd] logits of their next tokens."""
        projected = states @ self._tensor("proj.weight", stage).T
        embedded = self._tensor("emb.weight", stage)[last_tokens]
        mixed = projected + self.config.emb_weight * embedded
        normed = mx.fast.rms_norm(mixed, self._tensor("ln.weight", stage), EPSILON)
        states = nn.gelu(normed + self._tensor("ln.bias", stage))
        return states, states @ self._tensor("head.weight", stage).T

    def _tensor(self, part: str, stage: int) -> mx.array:
        return self._tensors[self.config.tensor_name(part, stage)]

    def guess_full_tree(
        self,
        root: mx.array,  # [1]
        hidden: mx.array,  # [1, D]
        widths: Sequence[int],  # children of each node, by level
        noise: Noise = None,  # [H, Vd]
    ) -> tuple[mx.array, mx.array]:
        """Tokens [N] and log probabilities [N] of all nodes, each given its parent's path, breadth
        first; the root first, with 0. All paths of a level are one batch."""
        expect_shape("hidden state", hidden, 1, self.config.emb_dim)
        expect_shape("root", root, 1)
        state = self.first_state(hidden)
        tokens = root
        node_tokens = [root]
        edges = [mx.zeros(1)]
        for index, width in enumerate(widths):
            state, logits = self.run_stage(index, state, tokens)
            logits = with_noise(logits, None if noise is None else noise[index])
            ranked, logprobs = rank_candidates(logits, width, self.draft_vocab)  # [beams, width]
            tokens = ranked.flatten()
            state = mx.repeat(state, width, axis=0)
            node_tokens.append(tokens.astype(root.dtype))
            edges.append(logprobs.flatten())
        return mx.concatenate(node_tokens), mx.concatenate(edges)

    def tree_settings(self, tree: SpeculatorTreeConfig) -> SpeculatorTreeConfig:
        """`tree` with widths and `candidates` from the published settings, unless it has them."""
        asked = tree.widths
        stages = self.config.n_predict
        widths = tuple(self.config.widths if asked is None else asked)
        fits = 1 <= len(widths) <= stages
        widths = tuple(min(width, self.config.num_guessed) for width in widths)
        require(
            fits and num_candidate_nodes(widths, None) <= MAX_TREE_NODES,
            f"tree widths {' x '.join(map(str, widths)) or 'of no stage'}",
            expected=f"1 to {stages} widths of at least 1, and at most {MAX_TREE_NODES} nodes",
            do="choose other widths",
        )
        candidates = tree.candidates
        if tree.size is None and candidates is None:
            candidates = self.config.candidates
        return replace(tree, widths=widths, candidates=candidates)

    def chain_settings(self, tree: SpeculatorTreeConfig) -> SpeculatorTreeConfig:
        stages = self.config.n_predict if tree.widths is None else len(tree.widths)
        return SpeculatorTreeConfig(widths=(1,) * stages)

    def tree_size(self, tree: SpeculatorTreeConfig) -> tuple[int, int]:
        assert tree.widths is not None
        most = num_candidate_nodes(tree.widths, tree.candidates)
        return len(tree.widths), min(most, tree.size or most)

    def propose_tree(
        self, root: mx.array, hidden: mx.array, tree: SpeculatorTreeConfig, noise: Noise = None
    ) -> Tree:
        tree = self.tree_settings(tree)
        widths = tuple(tree.widths or ())
        size = self.tree_size(tree)[1]
        topology = full_tree_topology(widths)
        tokens, edges = self.guess_full_tree(root, hidden, widths, noise)
        full = Tree(tokens, topology.depths, topology.paths, topology.num_internal, topology)
        if size == topology.num_nodes:
            return full
        scores = full.path_sums(clip_logprobs(edges))
        if tree.candidates is not None:
            # First come the nodes on the best paths that go all the way down.
            first_leaf = full.num_nodes - math.prod(widths)
            leaves = top_nodes(scores[first_leaf:], tree.candidates) + first_leaf
            on_path = full.paths[leaves][:, :, None] == mx.arange(full.num_nodes)
            scores = scores + _AHEAD_OF_ALL * on_path.any(axis=(0, 1))
        return full.select(top_nodes(scores, size))


def num_candidate_nodes(widths: Sequence[int], candidates: int | None) -> int:
    """The number of nodes, including the root, of the full tree of `widths`; or the most that so
    many whole paths of it can have."""
    levels: Iterator[int] = accumulate(widths, mul)
    return 1 + sum(count if candidates is None else min(count, candidates) for count in levels)


@lru_cache(maxsize=64)
def full_tree_topology(
    widths: tuple[int, ...],  # children of each node, by depth
) -> Topology:
    """The full tree of `widths`, breadth first."""
    ranks = [r for depth in range(len(widths) + 1) for r in product(*map(range, widths[:depth]))]
    # A node's candidates depend on its path: each has one of its own.
    return replace(topology_of_paths(ranks, max(widths)), slots=indices(len(ranks) - 1))
