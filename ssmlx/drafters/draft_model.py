"""Drafts from a second, smaller model with the same vocabulary."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from ..bars import Progress
from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.sampling import Sampling
from ..errors import require
from ..loading.folders import Fetch
from ..loading.load import load_tokenizer, load_weights
from ..loading.names import resolve_model
from ..model.modules import module_arrays
from ..model.shapes import to_list
from ..model.state_cache import StateCache, flatten_caches
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, chain_with_siblings_topology
from ..prompts import common_prefix_length
from ..settings import PREFILL_STEP_SIZE, DraftModelConfig
from .base import BaseDrafter, DrafterInputs, DrafterLoader
from .chain import ChainRanking
from .text_caches import TextCacheOwner


class DraftModel(TextCacheOwner["DraftCache"]):
    """A model that drafts for another: weights, which are only read, and caches to draft with.

    Every drafter has a cache of its own, so answers may be open at once. Caches outlive answers: a
    chat's next turn takes over what the last one left, and processes only its new tokens.

    Args:
        model: a model as `mlx_lm.load` returns it. InputError if tokens cannot be taken back from
            its cache.
        name: what the user calls it, for messages.
    """

    drafter = "draft-model"

    def __init__(self, model: nn.Module, name: str = "the draft model") -> None:
        super().__init__(lambda: DraftCache(self))
        self.model: Any = model
        self.name = name
        mx.eval(module_arrays(model))
        for cache in flatten_caches(_make_trimmable_caches(model)):
            require(
                type(cache) in (KVCache, ArraysCache),
                f"{name} keeps a {type(cache).__name__}, from which rejected tokens cannot be "
                "taken back",
                expected="a model with plain key/value caches, or recurrent states",
                do="choose another draft model",
            )
        self.num_parameters: int = get_total_parameters(model)
        # Of its logits' shape alone: nothing is computed.
        self.vocab_size = int(
            self.model(mx.array([[0]]), cache=_make_trimmable_caches(model)).shape[-1]
        )
        self.target_vocab_size = self.vocab_size  # V, set by `load_draft_model`

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its caches."""
        return sum(array.nbytes for array in module_arrays(self.model)) + self.cache_bytes


def _make_trimmable_caches(model: nn.Module) -> list[Any]:
    """Make caches from which tokens can be taken back: a plain `KVCache` also for layers with a
    sliding window, whose mask keeps to the window."""
    made: list[Any] = make_prompt_cache(model)
    return [KVCache() if type(cache) is RotatingKVCache else cache for cache in made]


class DraftCache:
    """A draft model's cache of one text: keys and values, or recurrent states, of its first
    `offset` tokens, and maybe of drafted ones after these."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._cache = StateCache(lambda: _make_trimmable_caches(draft.model))
        self.text: list[int] = []

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def offset(self) -> int:
        return self._cache.offset

    def copy_beginning(self, num_tokens: int) -> "DraftCache":
        """A cache with what this one holds of the first `num_tokens`, as far as it can go back."""
        copied = DraftCache(self._draft)
        copied.text = self.text[:num_tokens]
        num_held = self._cache.longest_keepable(min(num_tokens, self.offset))
        if num_held:
            copied._cache = self._cache.fork(num_held)
            copied._cache.drop_free_room()
        return copied

    def start(self, tokens: Sequence[int]) -> Iterator[None]:
        """Set the text, and process all of it but the last token, except for what the text before
        shares. Yields before each piece, so that other answers can take their turn."""
        self._go_back(common_prefix_length(self.text[: self.offset], tokens[:-1]))
        kept = self.offset
        self.text = list(tokens)
        for first in range(kept, len(tokens) - 1, PREFILL_STEP_SIZE):
            yield
            last = min(first + PREFILL_STEP_SIZE, len(tokens) - 1)
            self.append(mx.array(self.text[first:last]))
            mx.eval(self._cache.state)

    def append(
        self,
        tokens: mx.array,  # [R]
    ) -> mx.array:  # [1, V], uncomputed
        """Append tokens to the cache, not to `text`; returns the logits after them. V is the
        target's: columns that the draft model lacks are -inf, its further ones are cut, and tokens
        that it lacks are read as its last one."""
        known = self._draft.vocab_size
        wanted = self._draft.target_vocab_size
        appended = mx.minimum(tokens, known - 1)
        logits = self._cache.append(self._draft.model, appended)[:, -1]
        if known < wanted:
            return mx.pad(logits, [(0, 0), (0, wanted - known)], constant_values=-math.inf)
        return logits[:, :wanted]

    def mark(self) -> None:
        """Mark the cache's end, so that what is drafted from here can be taken back."""
        self._cache.mark()

    def extend(
        self,
        new_tokens: Sequence[int],  # they follow the text
        # how many of them, from the first on, the cache holds already, as drafted ones
        num_new_in_cache: int,
    ) -> None:
        """Extend the text, and take back rejected tokens; more of them if recurrent states were not
        marked there. No token is processed."""
        known = len(self.text) + num_new_in_cache
        self.text.extend(new_tokens)
        self._go_back(min(known, self.offset))
        self._cache.forget_marks()

    def _go_back(self, num_tokens: int) -> None:
        """Go back to `num_tokens`, or to fewer if recurrent states were not marked there."""
        self._cache.keep_first(self._cache.longest_keepable(num_tokens))

    def prefill(self) -> mx.array:  # [R], 1 to `PREFILL_STEP_SIZE`
        """Process what the cache lacks of the text but for a last piece, which is returned; mostly
        that is all of it, and nothing is processed."""
        while len(self.text) - self.offset > PREFILL_STEP_SIZE:
            first = self.offset
            self.append(mx.array(self.text[first : first + PREFILL_STEP_SIZE]))
            mx.eval(self._cache.state)
        return mx.array(self.text[self.offset :], mx.int32)


def _load(
    name: str, model: StreamFusedModel, tokenizer: TokenizerWrapper, **how: Any
) -> DraftModel:
    return load_draft_model(name, tokenizer, model.backbone.vocab_size, **how)


class DraftModelDrafter(BaseDrafter):
    """Drafts a chain of K tokens, and optionally the runners-up beside each of them.

    The K forward passes are one graph: no drafted token is read by the host while drafting. If the
    target samples, so does the draft model, under the same settings and the same noise for each
    position: where both distributions are alike, so are the draws.
    """

    name = "draft-model"
    needs = Needs(host_tokens=True)
    loader = DrafterLoader("a draft model", _load)
    needs_whole_context = True
    keeps_to_chains = True

    def __init__(
        self,
        model: DraftModel,
        config: DraftModelConfig,  # K, `num_draft_tokens`; W, `width`, candidates of each level
        sampling: Sampling,
        *,
        is_chain: bool = False,  # the target takes no trees: W is 1
    ) -> None:
        width = min(1 if is_chain else config.width, model.vocab_size, model.target_vocab_size)
        self._model = model
        self._sampling = sampling
        self._width = width
        levels = config.num_draft_tokens
        self._topology = chain_with_siblings_topology(width, levels)
        self.largest = DraftShape(self.name, self._topology.num_nodes, levels)
        self.num_parameters = model.num_parameters
        self.draft_model_calls = 0

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Self:
        return cls(inputs.loaded, inputs.settings, inputs.sampling, is_chain=inputs.is_chain)

    def start(self, tokens: Sequence[int]) -> Iterator[None]:
        self._cache = self._model.claim_idle_or_new_cache(tokens, self)
        self._chain = mx.zeros(0, mx.int32)
        for turn in self._cache.start(tokens):
            yield turn
            self.draft_model_calls += 1

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Waits for the last chain on the device: the cache keeps what the text and the chain
        share."""
        chain = to_list(self._chain) if self._chain.size else []
        # The cache holds the text that the chain was drafted from and all of the chain but its
        # last token. At least the newest token is left to process, whose logits are needed.
        self._cache.extend(tokens, common_prefix_length(chain[:-1], tokens[:-1]))
        self._chain = mx.zeros(0, mx.int32)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Draft the largest shape, always: the chain of the model's likeliest tokens, with its
        runners-up beside it."""
        rows = self._rank_levels(self._cache.prefill())
        self._chain = mx.concatenate([row[:1] for row in rows])
        topology = self._topology
        tokens = mx.concatenate([verified.root, mx.concatenate(rows)[topology.slots]])
        return Tree(tokens, topology.depths, topology.paths, topology.num_internal, topology)

    def _rank_levels(
        self,
        newest_tokens: mx.array,  # [R], which the cache lacks
    ) -> list[mx.array]:
        """The candidates of each level, [W] each, best first, as the target's sampling ranks them;
        uncomputed. A forward pass a level, each after the best candidate of the level before."""
        ranking = ChainRanking(self._sampling, self._cache.text)
        rows: list[mx.array] = []
        tokens = newest_tokens
        for _ in range(self.largest.levels):
            logits = self._cache.append(tokens)
            self._cache.mark()
            self.draft_model_calls += 1
            rows.append(ranking.rank(logits, self._width))
            tokens = rows[-1][:1]
        return rows


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
    """Load a model that drafts for another, to be given as `drafter=` to `ssmlx.stream_generate`.

    InputError if it cannot be loaded, its tokenizer has other tokens or ids than the target's, or
    its caches cannot take tokens back.

    Args:
        name, dtype, cache_dir, offline, progress: as `ssmlx.load` takes them.
        tokenizer: the target's.
        vocab_size: V, tokens of the target's embedding, including padding.
    """
    path = resolve_model(name, Fetch(cache_dir=cache_dir, offline=offline, progress=progress))
    model, config = load_weights(path, dtype, f"the draft model {name} cannot be loaded")
    draft = DraftModel(model, f"the draft model {name}")
    draft.target_vocab_size = vocab_size
    require_same_vocabulary(draft, load_tokenizer(path, config), tokenizer, vocab_size)
    return draft


def require_same_vocabulary(
    draft: DraftModel,
    draft_tokenizer: TokenizerWrapper,
    target_tokenizer: TokenizerWrapper,
    target_vocab_size: int,  # tokens of the target's embedding
) -> None:
    """Require that every token has the same id and text in both models. Vocabulary sizes may differ
    by padding alone: if no token of the tokenizers has an id beyond the smaller one."""
    do = "choose a draft model of the same family"
    ours = draft_tokenizer.get_vocab()
    theirs = target_tokenizer.get_vocab()
    words = [word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word)]
    word = min(words, default="")
    last = max(ours.values(), default=0)
    require(
        not words,
        f"{draft.name} has a different vocabulary: {len(words)} tokens differ, for example "
        f"{word!r} ({ours.get(word)} there, {theirs.get(word)} in the target)",
        expected="the same tokens with the same ids",
        do=do,
    )
    require(
        draft.vocab_size == target_vocab_size or last < min(draft.vocab_size, target_vocab_size),
        f"{draft.name} has a vocabulary of {draft.vocab_size} tokens",
        expected=f"{target_vocab_size}, as in the target, or a difference in padding only",
        do=do,
    )
