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
from mlx_lm.sample_utils import apply_min_p

from ..errors import InputError
from ..model.shapes import expect_shape, indices, to_int, to_list
from ..model.tree import PAD_TOKEN, Tree
from ..settings import SamplingConfig
from .drafter import Noise, rank_candidates, top_columns

NUM_CANDIDATES = 128  # likeliest tokens of a row, among which top-p and min-p are decided
OPEN = PAD_TOKEN - 1  # see `Sampling.choose`


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model's distribution was where a token of the answer stands.

    With logit bias and penalties, without temperature and filters.

    Attributes:
        token: the token's id.
        logprob: its log probability.
        top: the likeliest ids, each with its log probability, best first.
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
    num_nodes = tree.num_nodes
    num_levels = tree.paths.shape[1]
    size = tail.shape[0]
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
        self._vocab_size = vocab_size
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
        self._top_k = config.top_k if 0 < config.top_k < vocab_size else 0
        self._has_nucleus = 0 < config.top_p < 1
        filters = self._has_nucleus or config.min_p > 0 or self._top_k > 0
        self._filters = config.temp > 0 and filters
        # Whether `settle` has to follow `choose`.
        self.leaves_open = self._filters and not self._top_k and vocab_size > NUM_CANDIDATES
        # Whether the likeliest token is all that anybody asks for.
        wants_logprobs = config.logprobs is not None
        self.is_argmax = not (config.temp or bias or self.context_size or wants_logprobs)
        self._scale = mx.array(1 / (config.temp or 1))
        lowest = math.log(config.min_p) if config.min_p > 0 else -math.inf
        self._bounds = mx.array([config.top_p, lowest])

    @cached_property
    def _seed(self) -> mx.array:
        """Of the noise; a new one is taken from MLX's random state when it is first needed."""
        seed = self.config.seed or 0
        if self.config.seed is None and self.config.temp > 0:
            seed = to_int(mx.random.randint(0, 2**31 - 1))
        return mx.array((seed ^ (seed >> 32)) & 0xFFFFFFFF, mx.uint32)

    def noise(self, first: mx.array, count: int, tokens: mx.array | None = None) -> Noise:
        """[G, V] what the G = `count` places from `first` [1] on add to the logits that decide; of
        the `tokens` [Vd] alone where they are given. None in greedy decoding.

        It is known before the logits are. Drafters of logits a that guess greedy tokens by
        softmax(a) guess by softmax(a + noise) what is drawn.
        """
        if not self.config.temp:
            return None
        uniform = uniform_noise(self._seed, first + indices(count), self._vocab_size)
        return self.config.temp * to_gumbel(uniform if tokens is None else uniform[:, tokens])

    def process(self, logits: mx.array, places: Places) -> mx.array:
        """[R, V] logits with bias and penalties."""
        expect_shape("logits", logits, places.depths.shape[0], None)
        if self._bias.size:
            logits = logits.at[:, self._bias_tokens].add(self._bias.astype(logits.dtype))
        return penalise(logits, places.recent, self.config) if self.context_size else logits

    def logprobs(self, logits: mx.array, places: Places) -> mx.array:
        """[R, V] float32 log probabilities that the target samples from; needs `temp` above 0."""
        logprobs = log_softmax(self.process(logits, places).astype(mx.float32))
        return log_softmax(filter_logprobs(logprobs, self.config) * self._scale)

    def perturb(self, logprobs: mx.array, places: Places) -> mx.array:
        """[R, V] log probabilities with their place's noise."""
        return perturb(logprobs, mx.array(1.0), self._seed, places.first + places.depths)

    def choose(self, logits: mx.array, places: Places) -> mx.array:
        """[R] the token after each row, of its logits [R, V].

        With `leaves_open`, it is OPEN - t where the filters may keep more than the `NUM_CANDIDATES`
        tokens that are looked at, of which t won. No drafted token equals it, so a path ends there.
        """
        tokens, open_rows = self.rank(logits, places, 1)
        tokens = tokens[:, 0].astype(mx.int32)
        return mx.where(open_rows, OPEN - tokens, tokens) if self.leaves_open else tokens

    def settle(self, tokens: mx.array, logits: mx.array, places: Places, row: mx.array) -> mx.array:
        """`tokens` [R] as `choose` gives them, the one of `row` [1] decided among all tokens."""
        places = replace(places, depths=places.depths[row], recent=places.recent[row])
        scores = self.perturb(self.logprobs(logits[row], places), places)
        found = mx.argmax(scores, axis=-1).astype(mx.int32)
        return mx.where((tokens < 0) & (indices(tokens.shape[0]) == row), found, tokens)

    def rank(self, logits: mx.array, places: Places, count: int) -> tuple[mx.array, mx.array]:
        """[R, count] tokens by what decides, best first, and rows [R] of which the filters may keep
        more tokens than were looked at."""
        logits = self.process(logits, places)
        if self._filters:
            size = logits.shape[1]
            width = min(size, max(count, self._top_k or NUM_CANDIDATES))
            tokens, scores, open_rows = rank_kept(
                logits,
                self._scale,
                self._bounds,
                self._seed,
                places.first,
                places.depths,
                places.num_levels,
                width,
                self._top_k or size,
                self._has_nucleus,
            )
            best = mx.argsort(-scores, axis=-1)[:, :count]
            return mx.take_along_axis(tokens, best, axis=-1), open_rows
        if self.config.temp > 0:
            logits = perturb(logits, self._scale, self._seed, places.first + places.depths)
        if count == 1:
            return mx.argmax(logits, axis=-1, keepdims=True), mx.array(False)
        return top_columns(logits, count)[0], mx.array(False)

    def token_logprobs(
        self, logits: mx.array, places: Places, rows: mx.array, tokens: mx.array
    ) -> mx.array | None:
        """[P, 1 + 2 T] float32 of the `tokens` [P] after `rows` [P] of the logits [R, V].

        A token's own log probability, then the T likeliest tokens, then theirs; None where nobody
        asked for them.
        """
        if self.config.logprobs is None:
            return None
        places = replace(places, depths=places.depths[rows], recent=places.recent[rows])
        return logprob_rows(self.process(logits[rows], places), tokens, self.config.logprobs)


def logprob_rows(logits: mx.array, tokens: mx.array, count: int) -> mx.array:
    """[P, 1 + 2 T] float32 of the `tokens` [P] of the logits [P, V].

    A token's own log probability, then the T = `count` likeliest tokens, or V, then theirs.
    """
    logits = logits.astype(mx.float32)
    own = mx.take_along_axis(log_softmax(logits), tokens[:, None], axis=1)
    if count := min(count, logits.shape[1]):
        top, logprobs = rank_candidates(logits, count)
        own = mx.concatenate([own, top.astype(mx.float32), logprobs], axis=1)
    return own


def record_logprobs(
    recorded: list[TokenLogprobs] | None, tokens: Sequence[int], rows: mx.array | None
) -> None:
    """Add an entry for each token to `recorded`, by the `rows` that `Sampling.token_logprobs` gave.

    Reads the rows, where there are any.
    """
    if recorded is None or rows is None:
        return
    for token, (logprob, *more) in zip(tokens, to_list(rows), strict=False):
        pairs = zip(more[: len(more) // 2], more[len(more) // 2 :], strict=True)
        # A bias can rule tokens out.
        top = tuple((int(one), found) for one, found in pairs if found > -math.inf)
        recorded.append(TokenLogprobs(token, logprob, top))


GREEDY = Sampling(SamplingConfig(), 0)


def log_softmax(logits: mx.array) -> mx.array:
    """[R, V] log probabilities of `logits` [R, V]."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def filter_logprobs(logprobs: mx.array, config: SamplingConfig) -> mx.array:
    """[R, V] `logprobs` with -inf for the tokens that top-p, min-p or top-k leave out."""
    if 0.0 < config.top_p < 1.0:
        floor = nucleus_floor(logprobs, mx.array(config.top_p))
        logprobs = mx.where(logprobs > floor, logprobs, -math.inf)
    if config.min_p > 0.0:
        logprobs = apply_min_p(logprobs, config.min_p)
    if 0 < config.top_k < logprobs.shape[-1]:
        tokens, best = top_columns(logprobs, config.top_k)
        none = mx.full(logprobs.shape, -math.inf)
        logprobs = mx.put_along_axis(none, tokens, best, axis=-1)
    return logprobs


@mx.compile
def nucleus_floor(logprobs: mx.array, top_p: mx.array) -> mx.array:
    """[R, 1] what the log probabilities [R, V] of the tokens that top-p keeps exceed.

    Found by halving twice a round the range in which it is, down to a millionth or two, as near as
    float32 adds up. Tokens of log((1 - p) / V) and less are together too few to be kept.
    """
    probs = mx.exp(logprobs)[:, None]
    low = mx.minimum(logprobs.max(axis=-1, keepdims=True), mx.log((1 - top_p) / probs.shape[-1]))
    low = low - 1
    width = logprobs.max(axis=-1, keepdims=True) - low
    for _ in range(12):
        width = width / 4
        tried = low + width * mx.arange(1, 4)
        above = mx.where(logprobs[:, None] > tried[:, :, None], probs, 0).sum(axis=-1)
        low = low + width * (above >= top_p).sum(axis=-1, keepdims=True)
    return low


@mx.compile
def rank_kept(
    logits: mx.array,
    scale: mx.array,
    bounds: mx.array,
    seed: mx.array,
    first: mx.array,
    depths: mx.array,
    num_levels: int,
    width: int,
    top_k: int,
    has_nucleus: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """The likeliest tokens [R, K] of each row, K = `width`, what decides between them [R, K], -inf
    where a filter leaves one out, and whether the last one was kept [R].

    `bounds` [2] are top-p and the logarithm of min-p.
    """
    size = logits.shape[1]
    tokens, logprobs = top_columns(logits, width)
    kept = logprobs >= logprobs[:, :1] + bounds[1]
    if has_nucleus:
        logprobs = logprobs - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)
        above = mx.cumsum(mx.exp(logprobs), axis=-1, inclusive=False)
        floor = mx.where(above < bounds[0], logprobs, math.inf).min(axis=-1, keepdims=True)
        kept = kept & (logprobs >= floor)
    if top_k < width:
        kept = kept & (mx.arange(width) < top_k)
    noise = uniform_noise(seed, first + mx.arange(num_levels), size)[depths[:, None], tokens]
    scores = mx.where(kept, logprobs * scale + to_gumbel(noise), -math.inf)
    return tokens, scores, kept[:, -1]


@mx.compile
def perturb(logits: mx.array, scale: mx.array, seed: mx.array, at: mx.array) -> mx.array:
    """[R, V] float32 `logits` [R, V] * `scale` with the noise of the places `at` [R]."""
    noise = to_gumbel(uniform_noise(seed, at, logits.shape[1]))
    return logits.astype(mx.float32) * scale + noise


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


def uniform_noise(seed: mx.array, at: mx.array, vocab_size: int) -> mx.array:
    """[R, V] numbers from 0 to 1 that belong to `seed` [] and to the places `at` [R]."""
    keys = mx.stack([mx.broadcast_to(seed, at.shape), at.astype(mx.uint32)], axis=1)
    return mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))(keys)


def to_gumbel(uniform: mx.array) -> mx.array:
    """Standard Gumbel noise of uniform noise."""
    return -mx.log(-mx.log(uniform))
