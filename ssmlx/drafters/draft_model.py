"""Drafts from a second, smaller model with the same vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from ..decoding.drafter import Verified
from ..decoding.sampling import Places, Sampling, last_tokens
from ..errors import require
from ..loading.load import load_tokenizer, load_weights
from ..loading.names import Fetch, resolve_model
from ..loading.wheel import Progress
from ..model.shapes import arrays_in
from ..model.tree import Tree, comb_topology
from ..prompts import common_prefix
from ..settings import PREFILL_STEP_SIZE, DraftModelConfig


class DraftModel:
    """A model that drafts for another, with the cache of the text that it drafts for.

    The cache outlives an answer, so a chat's next turn processes its new tokens alone. It belongs
    to one drafter at a time; another one that starts takes it over.

    Args:
        model: a model as `mlx_lm.load` returns it.
        name: what the user calls it.

    Raises:
        InputError: its cache cannot take tokens back.

    Attributes:
        vocab_size: Vd, tokens of its embedding.
        owner: the drafter that the cache follows.
    """

    def __init__(self, model: nn.Module, name: str = "the draft model") -> None:
        self.model, self.name = model, name
        self._cache: list[Any] = make_prompt_cache(model)
        for layer, cache in enumerate(self._cache):
            require(
                type(cache) is KVCache,
                f"{name} keeps a {type(cache).__name__} in layer {layer}, from which rejected "
                "tokens cannot be taken back",
                expected="a model with plain key/value caches",
                do="choose another draft model",
            )
        self.num_parameters: int = get_total_parameters(model)
        self.vocab_size: int = model.args.vocab_size
        self._text: list[int] = []
        self.owner: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its cache."""
        weights = sum(array.nbytes for array in arrays_in(self.model.parameters()))
        return weights + sum(cache.nbytes for cache in self._cache)

    @property
    def offset(self) -> int:
        """Tokens in the cache."""
        return int(self._cache[0].offset)

    def start(self, tokens: Sequence[int], owner: object) -> int:
        """Make the cache hold `tokens`, as much of it as it can keep; the forward passes taken."""
        common = common_prefix(self._text[: self.offset], tokens)
        self.note((), common)
        calls = 0
        for first in range(common, len(tokens), PREFILL_STEP_SIZE):
            self.logits(mx.array(list(tokens[first : first + PREFILL_STEP_SIZE])))
            mx.eval([cache.state for cache in self._cache])
            calls += 1
        self._text, self.owner = list(tokens), owner
        return calls

    def logits(self, tokens: mx.array) -> mx.array:
        """[1, V] logits after the last of `tokens` [R], which join the cache."""
        return self.model(tokens[None], cache=self._cache)[:, -1]

    def note(self, tokens: Sequence[int], held: int) -> None:
        """The text has gone on by `tokens`; keep `held` of all its tokens in the cache."""
        self._text.extend(tokens)
        trim_prompt_cache(self._cache, self.offset - held)


class DraftModelDrafter:
    """Drafts a chain of K tokens, and optionally the runners-up beside each of them.

    The K forward passes are one graph: no drafted token is read by the host while drafting.
    Where the target samples, so does the draft model, under the same settings and the same noise
    of each place: where both distributions are alike, so are the draws. Without `sampling`, the
    likeliest tokens are drafted.
    """

    num_streams, cache_bytes = 0, 0
    waits = True

    def __init__(
        self, model: DraftModel, config: DraftModelConfig, sampling: Sampling | None = None
    ) -> None:
        width, levels = min(config.width, model.vocab_size), config.num_draft_tokens
        self._model, self._sampling = model, sampling
        self._width, self.num_levels = width, levels
        self._topology = comb_topology(width, levels)
        self.max_nodes = self._topology.num_nodes
        self.num_parameters = model.num_parameters
        self.draft_calls = 0

    def start(self, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        self._chain = mx.zeros(0, mx.int32)
        self.draft_calls = self._model.start(tokens, self)

    def propose(self, verified: Verified) -> Tree:
        """See `Drafter.propose`. Waits for the target, to know how much of the cache holds."""
        new_tokens, chain = verified.read(self._chain)
        if self._model.owner is not self:
            self.draft_calls += self._model.start(self._text, self)
            chain = []
        # The cache holds the text that it last drafted from and all of its chain but the last
        # token. At least the newest token is left to process, whose logits are needed.
        common = common_prefix(chain[:-1], new_tokens[:-1])
        self._model.note(new_tokens, len(self._text) + common)
        self._text.extend(new_tokens)
        rows = self._draft(mx.array(new_tokens[common:]))
        self._chain = mx.concatenate([row[:1] for row in rows])
        topology = self._topology
        tokens = mx.concatenate([verified.root, mx.concatenate(rows)[topology.slots]])
        return Tree(tokens, topology.depths, topology.paths, topology.num_internal, topology)

    def _draft(self, tokens: mx.array) -> list[mx.array]:
        """The candidates [W] of each level, best first, after `tokens` [R]."""
        size = self._sampling.context_size if self._sampling else 0
        recent = last_tokens(self._text, size)[None]
        rows: list[mx.array] = []
        for level in range(self.num_levels):
            logits = self._model.logits(tokens)
            self.draft_calls += 1
            first = mx.array([len(self._text) - 1 + level])
            places = Places(first, mx.zeros(1, mx.int32), 1, recent)
            scores = self._sampling.scores(logits, places) if self._sampling else logits
            row = _best(scores[0], self._width)
            rows.append(row)
            tokens = row[:1]
            if size:
                recent = mx.concatenate([recent[:, 1:], tokens[None]], axis=1)
        return rows


def _best(scores: mx.array, count: int) -> mx.array:
    """[count] the largest of `scores` [V], best first."""
    if count == 1:
        return mx.argmax(scores, keepdims=True).astype(mx.int32)
    found = mx.argpartition(-scores, count - 1)[:count]
    return found[mx.argsort(-scores[found])].astype(mx.int32)


def load_draft_model(
    name: str | Path,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    *,
    dtype: str = "auto",
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> DraftModel:
    """Load a model that drafts for another.

    Args:
        tokenizer, vocab_size: those of the target.
        name, dtype, cache_dir, offline, progress: as `ssmlx.load` takes them.

    Raises:
        InputError: it cannot be loaded, or its vocabulary is another than the target's.
    """
    path = resolve_model(name, Fetch(cache_dir=cache_dir, offline=offline, progress=progress))
    model, config = load_weights(path, dtype, f"the draft model {name} cannot be loaded")
    draft = DraftModel(model, f"the draft model {name}")
    check_vocabulary(draft, load_tokenizer(path, config), tokenizer, vocab_size)
    return draft


def check_vocabulary(
    draft: DraftModel, own: TokenizerWrapper, tokenizer: TokenizerWrapper, vocab_size: int
) -> None:
    """Check that a drafted token means to the target what it means to the draft model."""
    do = "choose a draft model of the same family"
    require(
        draft.vocab_size == vocab_size,
        f"{draft.name} has a vocabulary of {draft.vocab_size} tokens",
        expected=f"the target's {vocab_size}",
        do=do,
    )
    ours, theirs = own.get_vocab(), tokenizer.get_vocab()
    words = [word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word)]
    word = min(words, default="")
    require(
        not words,
        f"{draft.name} has another token map: {len(words)} tokens differ, such as {word!r} "
        f"({ours.get(word)} there, {theirs.get(word)} in the target)",
        expected="the same tokens under the same ids",
        do=do,
    )
