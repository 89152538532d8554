"""How the target decides on a token: penalties, filters, temperature, and the noise.

A row's decision is an argmax: of the processed logits where decoding is greedy, else of log
probabilities / temperature + Gumbel noise, which draws from exactly that distribution. The noise
of a place in the text is a function of the seed and the place. A draft tree's nodes at one depth
share it, as only one of them can turn out to be the text; whatever a drafter proposes, the text
is what plain decoding writes under the same noise, token for token.

Filters and penalties are mlx-lm's (`mlx_lm.sample_utils`), in its order: logit bias, penalties,
top-p, min-p, top-k, temperature. What depends on recent tokens sees, for each node of a tree,
the committed tokens and the node's own path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..errors import InputError
from ..model.shapes import expect_shape, indices, to_int, to_list
from ..model.tree import PAD_TOKEN, Tree
from ..settings import SamplingConfig
from .drafter import rank_candidates


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model made of a token's place in the text.

    Its own distribution, with bias and penalties, without temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs, best first


@dataclass(frozen=True, eq=False)
class Places:
    """Where in the text rows stand."""

    first: mx.array  # [1] place of the root, the number of tokens before it
    depths: mx.array  # [R] how far below the root each row stands
    num_levels: int  # P, one more than the largest depth
    # [R, C] the last C tokens up to and with each row's own; PAD_TOKEN where the text has not
    # so many
    recent: mx.array

    def tail_at(self, row: mx.array) -> mx.array:
        """[C] the recent tokens of one `row` [1]."""
        return self.recent[row].flatten() if self.recent.size else indices(0)


def last_tokens(tokens: Sequence[int], size: int) -> mx.array:
    """[C] the last C = `size` of `tokens`, PAD_TOKEN before them where there are fewer."""
    known = list(tokens[-size:]) if size else []
    return mx.array([PAD_TOKEN] * (size - len(known)) + known, mx.int32)


def places_of(tree: Tree, first: mx.array, tail: mx.array) -> Places:
    """The places of a tree's nodes: its root's is `first` [1], after the tokens `tail` [C]."""
    num_nodes, num_levels, size = tree.num_nodes, tree.paths.shape[1], tail.shape[0]
    if size == 0:
        return Places(first, tree.depths, num_levels, mx.broadcast_to(tail, (num_nodes, 0)))
    before = mx.broadcast_to(tail, (num_nodes, size))
    text = mx.concatenate([before, tree.tokens[tree.paths]], axis=1)
    window = tree.depths[:, None] + 1 + indices(size)
    return Places(first, tree.depths, num_levels, mx.take_along_axis(text, window, axis=1))


class Sampling:
    """The target's decisions under `SamplingConfig`, whose logit bias must keep to `vocab_size`."""

    def __init__(self, config: SamplingConfig, vocab_size: int) -> None:
        self.config = config
        self.context_size = config.context_size  # C, recent tokens that it needs of each row
        bias = config.logit_bias or {}
        if bias and max(bias) >= vocab_size:
            raise InputError(
                f"--logit-bias of token {max(bias)}",
                expected=f"ids below the model's {vocab_size} tokens",
                do="check the id",
            )
        self._bias_tokens = mx.array(list(bias), mx.int32)
        self._bias = mx.array(list(bias.values()), mx.float32)

    @cached_property
    def _seed(self) -> int:
        """Of the noise; a new one is taken from MLX's random state when it is first needed."""
        if self.config.seed is None and self.config.temp > 0:
            return to_int(mx.random.randint(0, 2**31 - 1))
        return self.config.seed or 0

    def process(self, logits: mx.array, places: Places) -> mx.array:
        """[R, V] logits with bias and penalties."""
        expect_shape("logits", logits, places.depths.shape[0], None)
        if self._bias.size:
            logits = logits.at[:, self._bias_tokens].add(self._bias.astype(logits.dtype))
        return penalise(logits, places.recent, self.config) if self.context_size else logits

    def logprobs(self, logits: mx.array, places: Places) -> mx.array:
        """[R, V] float32 log probabilities that the target samples from; needs `temp` above 0."""
        logits = self.process(logits, places).astype(mx.float32)
        kept = filter_logprobs(log_softmax(logits), self.config)
        return log_softmax(kept * (1.0 / self.config.temp))

    def scores(self, logits: mx.array, places: Places) -> mx.array:
        """[R, V] what decides: each row's largest is its token."""
        if self.config.temp == 0:
            return self.process(logits, places)
        return self.perturb(self.logprobs(logits, places), places)

    def perturb(self, logprobs: mx.array, places: Places) -> mx.array:
        """[R, V] log probabilities with their place's noise."""
        noise = gumbel_noise(self._seed, places.first, places.num_levels, logprobs.shape[1])
        return logprobs + noise[places.depths]

    def choose(self, logits: mx.array, places: Places) -> mx.array:
        """[R] the token after each row, of its logits [R, V]."""
        return mx.argmax(self.scores(logits, places), axis=-1).astype(mx.int32)

    def told(
        self, logits: mx.array, places: Places, rows: mx.array, tokens: mx.array
    ) -> mx.array | None:
        """[P, 1 + 2 T] float32 of the `tokens` [P] after `rows` [P] of the logits [R, V].

        A token's own log probability, then the T likeliest tokens, then theirs; None where nobody
        asked for them.
        """
        if self.config.logprobs is None:
            return None
        places = replace(places, depths=places.depths[rows], recent=places.recent[rows])
        logits = self.process(logits[rows], places).astype(mx.float32)
        own = mx.take_along_axis(log_softmax(logits), tokens[:, None], axis=1)
        if count := min(self.config.logprobs, logits.shape[1]):
            top, logprobs = rank_candidates(logits, count)
            own = mx.concatenate([own, top.astype(mx.float32), logprobs], axis=1)
        return own


def tell_logprobs(
    told: list[TokenLogprobs] | None, tokens: Sequence[int], rows: mx.array | None
) -> None:
    """Add an entry for each token to `told`, of the `rows` of `Sampling.told`, which are read."""
    if told is None or rows is None:
        return
    for token, (logprob, *more) in zip(tokens, to_list(rows), strict=False):
        pairs = zip(more[: len(more) // 2], more[len(more) // 2 :], strict=True)
        # A bias can rule tokens out.
        top = tuple((int(one), found) for one, found in pairs if found > -math.inf)
        told.append(TokenLogprobs(token, logprob, top))


GREEDY = Sampling(SamplingConfig(), 0)


def log_softmax(logits: mx.array) -> mx.array:
    """[R, V] log probabilities of `logits` [R, V]."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def filter_logprobs(logprobs: mx.array, config: SamplingConfig) -> mx.array:
    """[R, V] `logprobs` with -inf for the tokens that top-p, min-p or top-k leave out."""
    if 0.0 < config.top_p < 1.0:
        logprobs = apply_top_p(logprobs, config.top_p)
    if config.min_p > 0.0:
        logprobs = apply_min_p(logprobs, config.min_p)
    if 0 < config.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, config.top_k)
    return logprobs


def penalise(logits: mx.array, recent: mx.array, config: SamplingConfig) -> mx.array:
    """[R, V] logits with the penalties of each row's own recent tokens [R, C]."""

    def counts(size: int) -> mx.array:
        return count_tokens(recent[:, -size:], logits.shape[1])

    if penalty := config.repetition_penalty:
        seen = counts(config.repetition_context_size) > 0
        weaker = mx.where(logits < 0, logits * penalty, logits / penalty)
        logits = mx.where(seen, weaker, logits)
    if config.presence_penalty:
        seen = counts(config.presence_context_size) > 0
        logits = mx.where(seen, logits - config.presence_penalty, logits)
    if config.frequency_penalty:
        times = counts(config.frequency_context_size).astype(logits.dtype)
        logits = logits - config.frequency_penalty * times
    return logits


def count_tokens(recent: mx.array, vocab_size: int) -> mx.array:
    """[R, V] how often each token stands in each row of `recent` [R, C]; PAD_TOKEN is none."""
    rows = indices(recent.shape[0])[:, None]
    column = mx.where(recent == PAD_TOKEN, vocab_size, recent)
    counts = mx.zeros((recent.shape[0], vocab_size + 1), mx.int32)
    return counts.at[rows, column].add(1)[:, :vocab_size]


def gumbel_noise(seed: int, first: mx.array, count: int, vocab_size: int) -> mx.array:
    """[count, V] standard Gumbel noise of the `count` places from `first` [1] on."""
    word = mx.full((count,), (seed ^ (seed >> 32)) & 0xFFFFFFFF, mx.uint32)
    keys = mx.stack([word, (first + indices(count)).astype(mx.uint32)], axis=1)
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
