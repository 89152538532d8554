"""Drafts from the model's own speculative streams (section 3.2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import mlx.core as mx
import numpy as np

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.ranking import Noise, rank_candidates, with_noise
from ..decoding.sampling import GREEDY, Sampling
from ..errors import require
from ..model.cache import StreamCache, TreeCache
from ..model.lm_head import head_bytes
from ..model.shapes import expect_shape
from ..model.streams import StreamFusedModel
from ..model.tree import PAD_TOKEN, Tree, count_candidates, grow_tree
from ..settings import StreamSchedule, TreeConfig
from .base import BaseDrafter, DrafterInputs
from .copies import Copies

# Tokens of the text that streams may guess beside the draft vocabulary: each is another row of the
# LM head, and an answer repeats few names.
TEXT_TOKENS = 256


class DraftVocab:
    """The tokens that streams may guess in one answer, and the heads that score them: the draft
    vocabulary and the text's newest `TEXT_TOKENS` others, such as its names, which answers repeat.

    If the text has fewer, those of the lowest ids fill up. Without a text they are the draft
    vocabulary; if the model has none, all tokens.
    """

    def __init__(
        self,
        model: StreamFusedModel,
        text: Sequence[int] = (),  # before the answer
    ) -> None:
        self._model = model
        self.tokens = model.draft_vocab  # [Vd] int32; None for all tokens
        self.nbytes = 0  # of what was added for the text
        self._heads = [model.draft_head or model.backbone.lm_head]
        if not text or self.tokens is None:
            return
        is_other = np.ones(model.backbone.vocab_size + 1, bool)
        is_other[np.array(self.tokens)] = is_other[PAD_TOKEN] = False
        others = np.concatenate([text[::-1], np.arange(len(is_other) - 1)]).astype(int)
        others = others[is_other[others]][: len(text) + TEXT_TOKENS]
        own = list(dict.fromkeys(others))[:TEXT_TOKENS]
        if own:
            more = mx.array(np.array(own), mx.int32)
            self.tokens = mx.concatenate([self.tokens, more])
            self._heads.append(model.backbone.draft_head(more))
            self.nbytes = self.tokens.nbytes + head_bytes(self._heads[1])

    def rank_stream_tokens(
        self,
        # [1, A * G, D] rows of G streams beside each of A nodes, before the final norm
        hidden: mx.array,
        roots: mx.array,  # [A] the token that each node's streams start after
        count: int,  # K, tokens of each stream
        # [A * G, Vd] what `Sampling.noise` knows of the decisions that are guessed
        noise: Noise = None,
    ) -> tuple[mx.array, mx.array]:
        """[A, G, K] tokens, best first, and their log probabilities: [A, G, K]; of conditional
        streams [A, G, K, K], of each token (last axis) given each of the stream before (in all rows
        of a first stream, given the root), scaled to the mass that the K tokens have
        unconditionally."""
        model = self._model
        num_nodes = roots.shape[0]
        normed = model.backbone.final_norm(hidden).squeeze(0)
        parts = [head(normed) for head in self._heads]
        logits = mx.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        ranked = rank_candidates(with_noise(logits, noise), count, self.tokens)
        tokens, logprobs = (a.reshape(num_nodes, -1, count) for a in ranked)
        if not model.is_conditional:
            return tokens, logprobs
        first = mx.broadcast_to(roots[:, None, None], (num_nodes, 1, count))
        previous = mx.concatenate([first, tokens[:, :-1]], axis=1)
        more = model.condition_logits(normed.reshape(*tokens.shape[:2], -1), previous, tokens)
        return tokens, renormalise_topk(logprobs, more)


@mx.compile
def renormalise_topk(
    logprobs: mx.array,  # [..., K] of the likeliest tokens; probabilities sum to at most 1
    added_logits: mx.array,  # [..., C, K] for each of C conditions
) -> mx.array:  # [..., C, K] log probabilities
    """Add logits, and scale each row to the mass that the log probabilities had."""
    scores = logprobs[..., None, :] + added_logits
    mass = mx.logsumexp(logprobs, axis=-1)[..., None, None]
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True) + mass


class StreamDrafter(BaseDrafter):
    """Drafts from the first `num_streams` (G) of the streams that the model was trained with.

    The schedule "fused" runs streams of every node inside the verifying pass (the paper's);
    "second-pass" those of the accepted node alone, in a pass of the upper layers after it: it reads
    the upper layers' weights once more, and spares M * G rows there. Both draft the same, unless
    streams start from the root, which the fused pass leaves out. Conditional streams have what
    followed the text's last tokens before to copy as well.

    Streams guess greedy text. If the target samples, they guess what `sampling` makes of it.
    """

    name = "streams"
    shaped_by = ("num_streams", "tree", "prune")

    def __init__(
        self,
        model: StreamFusedModel,
        tree: TreeConfig,  # the largest; smaller best trees may be asked for
        num_streams: int,  # G, levels of that tree
        schedule: StreamSchedule = "second-pass",
        sampling: Sampling = GREEDY,  # how the target decides
    ) -> None:
        require(
            schedule in model.schedules,
            f"--drafter streams schedule={schedule}, but these streams start from the newest token",
            expected=f"schedule={model.schedules[0]}, after it is decided",
            do="give that, or another --adapter",
        )
        self.needs = Needs(streams=num_streams if schedule == "fused" else 0)
        # A stream cannot rank more candidates than there are tokens that it may draft.
        self._tree = tree.no_wider_than(model.draft_vocab_size)
        self.largest = DraftShape(self.name, self._tree.num_nodes(num_streams), num_streams)
        self._model = model
        self._sampling = sampling
        self.num_parameters = model.streams.num_parameters if model.streams else 0
        self._num_candidates: dict[DraftShape, int] = {}
        self.start(())

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Self:
        model = inputs.model
        config = inputs.config
        assert model.config and config.tree and config.stream_schedule
        streams = model.config.checked_num_streams(config.num_streams)
        return cls(model, config.tree, streams, config.stream_schedule, inputs.guess_sampling)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes + self._cache.mask_bytes + self._vocab.nbytes

    def start(self, tokens: Sequence[int]) -> None:
        layers = range(self._model.insertion_layer, self._model.num_layers)
        levels = self.largest.levels
        self._cache = StreamCache(layers, scratch=levels + 2 * (1 + levels))
        self._copies = Copies(tokens)
        self._vocab = DraftVocab(self._model, tokens)

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Extend the text to copy from; keys and values are the target's."""
        self._copies.follow(tokens, position)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """The tree of the settings for `largest`; for another shape, its most probable nodes."""
        if verified.stream_hidden is not None:
            stream_hidden = verified.stream_hidden[:, : shape.levels]
        else:
            stream_hidden = self._run_second_pass(verified, shape.levels)
        expect_shape("stream hidden states", stream_hidden, 1, shape.levels, None)
        tree = self._tree
        if shape != self.largest:
            tree = replace(tree, kind="best", size=shape.nodes)
        root = verified.root
        noise = self._sampling.noise(verified.root_position, shape.levels, self._vocab.tokens)
        count = self._candidates_per_stream(shape, tree)
        tokens, logprobs = self._vocab.rank_stream_tokens(stream_hidden, root, count, noise)
        guesses = tokens.squeeze(0), logprobs.squeeze(0)
        if self._model.is_conditional:
            accepted = verified.acceptance
            position = verified.position + 1
            guesses = self._copies.learn_and_mix(
                guesses, accepted.new_tokens, accepted.num_accepted, position
            )
        return grow_tree(root, *guesses, tree)

    def _candidates_per_stream(self, shape: DraftShape, tree: TreeConfig) -> int:
        """K, how many of each stream's tokens a tree of `shape` may need."""
        if shape not in self._num_candidates:
            count = count_candidates(tree, shape.levels, conditional=self._model.is_conditional)
            self._num_candidates[shape] = min(count, self._model.draft_vocab_size)
        return self._num_candidates[shape]

    def _run_second_pass(
        self,
        verified: Verified,
        num_streams: int,  # G
    ) -> mx.array:  # [1, G, D]
        """Last hidden states of the last accepted node's streams."""
        cache = self._cache
        target_cache = verified.cache
        # A model with streams has stages.
        assert isinstance(target_cache, TreeCache) and verified.insertion_hidden is not None
        # The root's position, as far as the host knows: a plain call has committed the root's row.
        known_position = target_cache.offset - (0 if target_cache.paths else 1)
        window_start = self._model.window_start(target_cache, known_position)
        cache.catch_up_with_tree_cache(target_cache, num_streams, window_start)
        last = verified.acceptance.last
        known = None
        if self._model.starts_from_root:
            known = self._model.root_states(verified.root[None], verified.last_hidden)
        position = verified.position + verified.acceptance.num_accepted
        return self._model.second_pass(
            verified.insertion_hidden, last, position, cache, num_streams, known
        )
