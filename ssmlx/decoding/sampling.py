"""The target's decisions on tokens: penalties, filters, temperature, and the noise.

A row's decision is an argmax: of the processed logits if decoding is greedy, otherwise of log
probabilities / temperature + Gumbel noise, which draws from exactly that distribution. The noise
of a position in the text is a function of the seed and the position. A draft tree's nodes at one
depth share it, as only one of them can turn out to be the text; whatever a drafter proposes, the
text is what plain decoding writes under the same noise, token for token.

Filters and penalties are mlx-lm's (`mlx_lm.sample_utils`), in its order: logit bias, penalties,
top-p, min-p, top-k, temperature. What depends on recent tokens sees, for each node of a tree,
the committed tokens and the node's own path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p

from ..errors import InputError
from ..model.shapes import expect_shape, indices, to_int, to_list
from ..model.tree import PAD_TOKEN, Tree
from ..settings import SamplingConfig
from .ranking import Noise, rank_candidates, top_columns

NUM_CANDIDATES = 128  # likeliest tokens of a row, among which top-p and min-p are decided
UNRESOLVED = PAD_TOKEN - 1  # see `Sampling.sample`


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's log probabilities at a token of the answer.

    They include logit bias and penalties, but not temperature and filters.

    Attributes:
        token: the token's id.
        logprob: its log probability.
        top: the likeliest ids, each with its log probability, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class RowPositions:
    """The positions in the text of a call's R rows, and the tokens before each."""

    first: mx.array  # [1] position of the root, the number of tokens before it
    depths: mx.array  # [R] levels of each row below the root
    num_levels: int  # P, one more than the largest depth
    # [R, C] the last C tokens up to and with each row's own; PAD_TOKEN before the text's first
    recent: mx.array

    def tail_at(self, row: mx.array) -> mx.array:
        """[C] the last C tokens up to and with that of row number `row` [1]; [0] if C is 0."""
        return self.recent[row].flatten() if self.recent.size else indices(0)


class RankedTokens(NamedTuple):
    """The best tokens of each of R rows, see `Sampling.rank_tokens`."""

    tokens: mx.array  # [R, count] best first
    # [R] bool, or [] for all: whether filters may keep more tokens than were looked at
    may_keep_more: mx.array


def last_tokens(tokens: Sequence[int], size: int) -> mx.array:
    """[C] int32: the last C = `size` of `tokens`, filled up in front with PAD_TOKEN."""
    known = list(tokens[-size:]) if size else []
    return mx.array([PAD_TOKEN] * (size - len(known)) + known, mx.int32)


def row_positions(
    tree: Tree,
    first: mx.array,  # [1] the root's position
    tail: mx.array,  # [C] the last C tokens before the root; [0] if nothing looks at recent tokens
) -> RowPositions:
    """The positions of a tree's N nodes; the recent tokens of each end with its own path."""
    num_nodes = tree.num_nodes
    num_levels = tree.paths.shape[1]
    size = tail.shape[0]
    if size == 0:
        return RowPositions(first, tree.depths, num_levels, mx.broadcast_to(tail, (num_nodes, 0)))
    before = mx.broadcast_to(tail, (num_nodes, size))
    text = mx.concatenate([before, tree.tokens[tree.paths]], axis=1)
    window = tree.depths[:, None] + 1 + indices(size)
    return RowPositions(first, tree.depths, num_levels, mx.take_along_axis(text, window, axis=1))


class Sampling:
    """The rule by which the target decides on a token, under `SamplingConfig`.

    It is greedy, or without a filter, if `config` leaves that to the model.
    """

    def __init__(self, config: SamplingConfig, vocab_size: int) -> None:
        self.config = config
        self._vocab_size = vocab_size
        self.context_size = config.context_size  # C, recent tokens that it needs of each row
        bias = config.logit_bias or {}
        if bias and max(bias) >= vocab_size:
            raise InputError(
                f"--logit-bias of token {max(bias)}",
                expected=f"an id below {vocab_size}, the size of the model's vocabulary",
                do="check the token id",
            )
        self._bias_tokens = mx.array(list(bias), mx.int32)
        self._bias = mx.array(list(bias.values()), mx.float32)
        numbers = self._numbers = config.numbers()
        # Top-k of 0, or of V or more, is off; so is top-p of 0, or of 1 or more.
        self._top_k = numbers.top_k if 0 < numbers.top_k < vocab_size else 0
        self._has_nucleus = 0 < numbers.top_p < 1
        filters = self._has_nucleus or numbers.min_p > 0 or self._top_k > 0
        self._filters = numbers.temp > 0 and filters
        # Whether `resolve_row` has to follow `sample`.
        self.may_leave_unresolved = (
            self._filters and not self._top_k and vocab_size > NUM_CANDIDATES
        )
        # Whether the likeliest token is all that is asked for.
        wants_logprobs = config.logprobs is not None
        self.is_argmax = not (numbers.temp or bias or self.context_size or wants_logprobs)
        self._scale = mx.array(1 / (numbers.temp or 1))
        lowest = math.log(numbers.min_p) if numbers.min_p > 0 else -math.inf
        self._bounds = mx.array([numbers.top_p, lowest])

    @cached_property
    def _seed(self) -> mx.array:
        """[] uint32 seed of the noise; if none is set it is drawn, which waits for the device."""
        seed = self.config.seed or 0
        if self.config.seed is None and self._numbers.temp > 0:
            seed = to_int(mx.random.randint(0, 2**31 - 1))
        # High bits count too: they are folded onto the low ones.
        return mx.array((seed ^ (seed >> 32)) & 0xFFFFFFFF, mx.uint32)

    def noise(
        self,
        first: mx.array,  # [1] the first position in the text
        count: int,  # G, positions from `first` on
        tokens: mx.array | None = None,  # [Vd] the ids wanted; all V by default
    ) -> Noise:
        """[G, V] or [G, Vd] float32 Gumbel noise times the temperature; None in greedy decoding."""
        # It is known before the logits: a drafter whose softmax(a) guesses the greedy token guesses
        # the sampled one by softmax(a + noise).
        if not self._numbers.temp:
            return None
        uniform = uniform_noise(self._seed, first + indices(count), self._vocab_size)
        return self._numbers.temp * to_gumbel(uniform if tokens is None else uniform[:, tokens])

    def apply_bias_and_penalties(
        self,
        logits: mx.array,  # [R, V]
        positions: RowPositions,
    ) -> mx.array:
        """[R, V] in the dtype of `logits`, and `logits` themselves if there are none."""
        expect_shape("logits", logits, positions.depths.shape[0], None)
        if self._bias.size:
            logits = logits.at[:, self._bias_tokens].add(self._bias.astype(logits.dtype))
        return penalise(logits, positions.recent, self.config) if self.context_size else logits

    def logprobs(
        self,
        logits: mx.array,  # [R, V]
        positions: RowPositions,
    ) -> mx.array:
        """[R, V] float32 of the distribution that is sampled from; -inf if a filter drops it."""
        # In mlx-lm's order: bias and penalties, filters, temperature (1 if greedy).
        logprobs = log_softmax(self.apply_bias_and_penalties(logits, positions).astype(mx.float32))
        return log_softmax(filter_logprobs(logprobs, self.config) * self._scale)

    def add_gumbel_noise(
        self,
        logprobs: mx.array,  # [R, V]
        positions: RowPositions,
    ) -> mx.array:
        """[R, V] float32 whose argmax is a sample from the distribution of `logprobs`."""
        return add_gumbel_noise(
            logprobs, mx.array(1.0), self._seed, positions.first + positions.depths
        )

    def sample(
        self,
        logits: mx.array,  # [R, V]
        positions: RowPositions,
    ) -> mx.array:
        """[R] int32: the token t after each row, or UNRESOLVED - t if it is not sure.

        With filters and without top-k only `NUM_CANDIDATES` likely tokens are looked at, and the
        filters may keep more than these. No drafted token is negative, so an accepted path ends at
        such a row.
        """
        tokens, may_keep_more = self.rank_tokens(logits, positions, 1)
        tokens = tokens[:, 0].astype(mx.int32)
        return (
            mx.where(may_keep_more, UNRESOLVED - tokens, tokens)
            if self.may_leave_unresolved
            else tokens
        )

    def resolve_row(
        self,
        tokens: mx.array,  # [R] from `sample`
        logits: mx.array,  # [R, V]
        positions: RowPositions,
        row: mx.array,  # [1] its number
    ) -> mx.array:
        """[R] int32: `tokens`, with one unresolved row decided among all V tokens."""
        positions = replace(positions, depths=positions.depths[row], recent=positions.recent[row])
        scores = self.add_gumbel_noise(self.logprobs(logits[row], positions), positions)
        found = mx.argmax(scores, axis=-1).astype(mx.int32)
        return mx.where((tokens < 0) & (indices(tokens.shape[0]) == row), found, tokens)

    def rank_tokens(
        self,
        logits: mx.array,  # [R, V]
        positions: RowPositions,
        count: int,
    ) -> RankedTokens:
        """The best tokens of each row by the scores whose argmax is the token decided on.

        With filters only top-k many are looked at or, without top-k, `NUM_CANDIDATES`; tokens that
        a filter drops come last.
        """
        logits = self.apply_bias_and_penalties(logits, positions)
        if self._filters:
            size = logits.shape[1]
            width = min(size, max(count, self._top_k or NUM_CANDIDATES))
            tokens, scores, may_keep_more = rank_filtered(
                logits,
                self._scale,
                self._bounds,
                self._seed,
                positions.first,
                positions.depths,
                positions.num_levels,
                width,
                self._top_k or size,
                self._has_nucleus,
            )
            best = mx.argsort(-scores, axis=-1)[:, :count]
            return RankedTokens(mx.take_along_axis(tokens, best, axis=-1), may_keep_more)
        if self._numbers.temp > 0:
            logits = add_gumbel_noise(
                logits, self._scale, self._seed, positions.first + positions.depths
            )
        if count == 1:
            return RankedTokens(mx.argmax(logits, axis=-1, keepdims=True), mx.array(False))
        return RankedTokens(top_columns(logits, count)[0], mx.array(False))

    def token_logprobs(
        self,
        logits: mx.array,  # [R, V] of a call
        positions: RowPositions,
        rows: mx.array,  # [P] numbers of the rows that the tokens follow
        tokens: mx.array,  # [P] ids
    ) -> mx.array | None:
        """[P, 1 + 2 T] as `own_and_top_logprobs`; None if the settings ask for none."""
        if self.config.logprobs is None:
            return None
        # With bias and penalties, without filters and temperature.
        positions = replace(positions, depths=positions.depths[rows], recent=positions.recent[rows])
        return own_and_top_logprobs(
            self.apply_bias_and_penalties(logits[rows], positions), tokens, self.config.logprobs
        )


def own_and_top_logprobs(
    logits: mx.array,  # [P, V]
    tokens: mx.array,  # [P] ids
    count: int,
) -> mx.array:
    """[P, 1 + 2 T] float32: a token's own, the T likeliest ids, best first, and theirs."""
    logits = logits.astype(mx.float32)
    own = mx.take_along_axis(log_softmax(logits), tokens[:, None], axis=1)
    if count := min(count, logits.shape[1]):
        top, logprobs = rank_candidates(logits, count)
        own = mx.concatenate([own, top.astype(mx.float32), logprobs], axis=1)
    return own


def read_logprobs(
    tokens: Sequence[int],
    rows: mx.array,  # [P, 1 + 2 T] as `own_and_top_logprobs`, P >= len(tokens)
) -> tuple[TokenLogprobs, ...]:
    """Read the log probabilities of `tokens`; waits for the device."""
    found = []
    for token, (logprob, *more) in zip(tokens, to_list(rows), strict=False):
        pairs = zip(more[: len(more) // 2], more[len(more) // 2 :], strict=True)
        # A bias can rule tokens out.
        top = tuple((int(one), value) for one, value in pairs if value > -math.inf)
        found.append(TokenLogprobs(token, logprob, top))
    return tuple(found)


GREEDY = Sampling(SamplingConfig(), 0)


def log_softmax(logits: mx.array) -> mx.array:
    """[R, V] in the dtype of `logits`."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def filter_logprobs(
    logprobs: mx.array,  # [R, V] before the temperature
    config: SamplingConfig,
) -> mx.array:
    """[R, V] `logprobs`, not normalised again: -inf for what top-p, min-p, then top-k drop."""
    numbers = config.numbers()
    if 0.0 < numbers.top_p < 1.0:
        floor = nucleus_floor(logprobs, mx.array(numbers.top_p))
        logprobs = mx.where(logprobs > floor, logprobs, -math.inf)
    if numbers.min_p > 0.0:
        logprobs = apply_min_p(logprobs, numbers.min_p)
    if 0 < numbers.top_k < logprobs.shape[-1]:
        tokens, best = top_columns(logprobs, numbers.top_k)
        none = mx.full(logprobs.shape, -math.inf)
        logprobs = mx.put_along_axis(none, tokens, best, axis=-1)
    return logprobs


@mx.compile
def nucleus_floor(
    logprobs: mx.array,  # [R, V] normalised
    top_p: mx.array,  # [] above 0 and below 1
) -> mx.array:
    """[R, 1] the bound that a token's log probability has to exceed to be among top-p's."""
    # Bisects the range twice a round, to about 1e-6, which is what float32 sums resolve. Tokens of
    # log((1 - p) / V) and less are together too few to be kept.
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
def rank_filtered(
    logits: mx.array,  # [R, V], with bias and penalties
    scale: mx.array,  # [] 1 / temperature
    bounds: mx.array,  # [2] top-p, and the logarithm of min-p
    seed: mx.array,  # [] uint32
    first: mx.array,  # [1] the root's position
    depths: mx.array,  # [R] positions after the root
    num_levels: int,  # one more than the largest depth
    width: int,  # K, tokens looked at
    top_k: int,  # V if it is off
    has_nucleus: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """[R, K] likeliest tokens, [R, K] scores, and [R] whether the last one looked at was kept.

    The argmax of a row's scores is the token drawn (Gumbel-max); -inf if a filter drops it. The
    noise depends on seed, position and token alone, so rows of one depth share it.
    """
    # Filters go by the probabilities before the temperature. Each keeps the likeliest tokens down
    # to some rank: if the last token looked at is dropped, no more are kept.
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
def add_gumbel_noise(
    logits: mx.array,  # [R, V]
    scale: mx.array,  # []
    seed: mx.array,
    positions: mx.array,  # [R] in the text
) -> mx.array:
    """[R, V] float32 `logits` times `scale`, plus the noise of each row's position."""
    noise = to_gumbel(uniform_noise(seed, positions, logits.shape[1]))
    return logits.astype(mx.float32) * scale + noise


def penalise(
    logits: mx.array,  # [R, V]
    recent: mx.array,  # [R, C] each row's last tokens
    config: SamplingConfig,
) -> mx.array:
    """[R, V] after repetition, presence and frequency penalties, in mlx-lm's order."""

    def counts(size: int) -> mx.array:
        return count_tokens(recent[:, -size:], logits.shape[1])

    if (penalty := config.repetition_penalty) not in (None, 0, 1):
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


def count_tokens(
    recent: mx.array,  # [R, C]
    vocab_size: int,
) -> mx.array:
    """[R, V] int32: how often each token occurs in each row; PAD_TOKEN is not counted."""
    rows = indices(recent.shape[0])[:, None]
    column = mx.where(recent == PAD_TOKEN, vocab_size, recent)
    counts = mx.zeros((recent.shape[0], vocab_size + 1), mx.int32)
    return counts.at[rows, column].add(1)[:, :vocab_size]


def uniform_noise(
    seed: mx.array,
    positions: mx.array,  # [R] in the text
    vocab_size: int,
) -> mx.array:
    """[R, V] uniform numbers from 0 to below 1, by seed and position alone."""
    keys = mx.stack([mx.broadcast_to(seed, positions.shape), positions.astype(mx.uint32)], axis=1)
    return mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))(keys)


def to_gumbel(uniform: mx.array) -> mx.array:
    return -mx.log(-mx.log(uniform))
