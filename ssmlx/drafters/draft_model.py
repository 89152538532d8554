"""Drafts from a second, smaller model with the same vocabulary."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from ..bars import Progress
from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.sampling import RowPositions, Sampling, last_tokens
from ..errors import require
from ..loading.folders import Fetch
from ..loading.load import load_tokenizer, load_weights
from ..loading.names import resolve_model
from ..model.modules import module_arrays
from ..model.shapes import to_list
from ..model.state_cache import ModelCall, StateCache, flatten_caches
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, chain_with_siblings_topology
from ..prompts import common_prefix_length
from ..settings import PREFILL_STEP_SIZE, DraftModelConfig
from .registry import DrafterInputs, DrafterLoader, register_drafter
from .text_caches import TextCacheOwner


class DraftModel(TextCacheOwner["DraftCache"]):
    """A model that drafts for another: weights, which are only read, and caches to draft with.

    Every drafter has a cache of its own, so answers may be open at once. Caches outlive answers: a
    chat's next turn takes over what the last one left, and processes its new tokens alone.

    Args:
        model: a model as `mlx_lm.load` returns it.
        name: what the user calls it.

    Raises:
        InputError: its cache cannot take tokens back.

    Attributes:
        vocab_size: Vd, tokens of its embedding.
        target_vocab_size: V, those of the target's, padding included.
    """

    drafter = "draft-model"

    def __init__(self, model: nn.Module, name: str = "the draft model") -> None:
        """Compute the model's arrays, and read V off the shape of its logits; it has no caches yet.

        InputError where a layer's cache is none from which tokens can be taken back. The target is
        taken to have the same V until `target_vocab_size` is set.
        """
        super().__init__(lambda: DraftCache(self))
        self.model = model
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
            _call(model)(mx.array([[0]]), cache=_make_trimmable_caches(model)).shape[-1]
        )
        self.target_vocab_size = self.vocab_size

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its caches."""
        return sum(array.nbytes for array in module_arrays(self.model)) + self.cache_bytes


def _call(model: Any) -> ModelCall:
    """A model as what is called with tokens and caches."""
    call: ModelCall = model
    return call


def _make_trimmable_caches(model: nn.Module) -> list[Any]:
    """A cache for each layer of `model`.

    Layers with a sliding window get a plain `KVCache` too, from which tokens can be taken back;
    their mask keeps to the window.
    """
    made: list[Any] = make_prompt_cache(model)
    return [KVCache() if type(cache) is RotatingKVCache else cache for cache in made]


class DraftCache:
    """What a draft model keeps of one text: keys and values, or recurrent states.

    Attributes:
        text: the tokens of the text; the cache holds the first `offset` of them, and maybe drafted
            ones behind.
    """

    def __init__(self, draft: DraftModel) -> None:
        """Begin with an empty text, and caches of the model of `draft`; no drafter has it yet."""
        self._draft = draft
        self._cache = StateCache(lambda: _make_trimmable_caches(draft.model))
        self.text: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers."""
        return self._cache.nbytes

    @property
    def offset(self) -> int:
        """Tokens that the cache holds."""
        return self._cache.offset

    def copy_beginning(self, num_tokens: int) -> "DraftCache":
        """A new cache of the text's first `num_tokens`, 1 or more.

        It holds what this one holds of them, as far as that can be taken back there.
        """
        copied = DraftCache(self._draft)
        copied.text = self.text[:num_tokens]
        num_held = self._cache.longest_keepable(min(num_tokens, self.offset))
        if num_held:
            copied._cache = self._cache.fork(num_held)
            copied._cache.drop_free_room()
        return copied

    def start(self, tokens: Sequence[int]) -> Iterator[None]:
        """Set the text to `tokens`, and make the cache hold all of them but the last.

        Rows of the beginning that the text before shares stay, as far as the cache can be taken
        back to them; the rest is processed in pieces of `PREFILL_STEP_SIZE`. Nothing happens before
        the first step.

        Yields:
            None before each piece, for others to take their turn.
        """
        self._go_back(common_prefix_length(self.text[: self.offset], tokens[:-1]))
        kept = self.offset
        self.text = list(tokens)
        for first in range(kept, len(tokens) - 1, PREFILL_STEP_SIZE):
            yield
            last = min(first + PREFILL_STEP_SIZE, len(tokens) - 1)
            self.append_and_get_last_logits(mx.array(self.text[first:last]))
            mx.eval(self._cache.state)

    def append_and_get_last_logits(self, tokens: mx.array) -> mx.array:
        """[1, V] logits behind the last of `tokens` [R], which are appended to the cache, not to
        `text`.

        V is the target's vocabulary size. Where the draft model's is another, columns that it lacks
        are -inf, its further ones are cut, and tokens that it lacks are read as its last one.
        Uncomputed.
        """
        known = self._draft.vocab_size
        wanted = self._draft.target_vocab_size
        appended = mx.minimum(tokens, known - 1)
        logits = self._cache.append(_call(self._draft.model), appended)[:, -1]
        if known < wanted:
            return mx.pad(logits, [(0, 0), (0, wanted - known)], constant_values=-math.inf)
        return logits[:, :wanted]

    def mark(self) -> None:
        """Keep the states of now, so that what is drafted from here can be taken back."""
        self._cache.mark()

    def extend_text_and_trim_cache(self, new_tokens: Sequence[int], num_new_in_cache: int) -> None:
        """Append tokens to the text, and take back what the cache holds beyond the first of them.

        More is taken back where recurrent states were not marked there. Marks are forgotten. No
        token is processed.

        Args:
            new_tokens: they follow the text.
            num_new_in_cache: how many of them, from the first on, the cache holds already, as
                drafted ones.
        """
        known = len(self.text) + num_new_in_cache
        self.text.extend(new_tokens)
        self._go_back(min(known, self.offset))
        self._cache.forget_marks()

    def _go_back(self, num_tokens: int) -> None:
        """Hold the first `num_tokens` of the text, or as many of them as can be gone back to."""
        self._cache.keep_first(self._cache.longest_keepable(num_tokens))

    def process_all_but_last_piece(self) -> mx.array:
        """Process the text's tokens that the cache lacks, in pieces of `PREFILL_STEP_SIZE`, but the
        last.

        Returns:
            [R] int32 the tokens of that last piece, 1 to `PREFILL_STEP_SIZE` where the cache lacks
            any. The cache does not hold them yet; mostly they are all that it lacks, and nothing is
            processed.
        """
        while len(self.text) - self.offset > PREFILL_STEP_SIZE:
            first = self.offset
            self.append_and_get_last_logits(mx.array(self.text[first : first + PREFILL_STEP_SIZE]))
            mx.eval(self._cache.state)
        return mx.array(self.text[self.offset :], mx.int32)


class DraftModelDrafter:
    """Drafts a chain of K tokens, and optionally the runners-up beside each of them.

    The K forward passes are one graph: no drafted token is read by the host while drafting.
    Where the target samples, so does the draft model, under the same settings and the same noise
    for each position: where both distributions are alike, so are the draws.

    Args:
        model: the draft model.
        config: K, `num_draft_tokens`; W, `width`, candidates of each level.
        sampling: how the target decides.
        is_chain: whether the target takes no trees: W is 1 then.
    """

    name = "draft-model"
    needs = Needs(host_tokens=True)
    cache_bytes = 0

    def __init__(
        self,
        model: DraftModel,
        config: DraftModelConfig,
        sampling: Sampling,
        *,
        is_chain: bool = False,
    ) -> None:
        """Fix the shape of the trees; a cache is claimed by `start`.

        The width is at most the draft model's and the target's vocabulary, and 1 for chains.
        """
        width = min(1 if is_chain else config.width, model.vocab_size, model.target_vocab_size)
        self._model = model
        self._sampling = sampling
        self._width = width
        levels = config.num_draft_tokens
        self._topology = chain_with_siblings_topology(width, levels)
        self.largest = DraftShape(self.name, self._topology.num_nodes, levels)
        self.num_parameters = model.num_parameters
        self.draft_calls = 0

    def start(self, tokens: Sequence[int]) -> Iterator[None]:
        """Claim a cache, and process all of `tokens` but the last with the draft model.

        What the cache holds of them already is not processed again. Nothing happens before the
        first step.

        Yields:
            None before each forward pass; each is counted in `draft_calls`.
        """
        self._cache = self._model.claim_idle_or_new_cache(tokens, self)
        self._chain = mx.zeros(0, mx.int32)
        for turn in self._cache.start(tokens):
            yield turn
            self.draft_calls += 1

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """Append `tokens` to the text, and forget the last chain; waits for it on the device.

        The cache keeps as many of `tokens`, the newest left out, as the chain's tokens equal, the
        chain's last left out, if it can be taken back to there. Nothing is processed, and neither
        `position` nor `taps` is looked at.
        """
        chain = to_list(self._chain) if self._chain.size else []
        # The cache holds the text that the chain was drafted from and all of the chain but its
        # last token. At least the newest token is left to process, whose logits are needed.
        self._cache.extend_text_and_trim_cache(
            tokens, common_prefix_length(chain[:-1], tokens[:-1])
        )
        self._chain = mx.zeros(0, mx.int32)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Draft the chain of the model's likeliest tokens below the root, with its runners-up
        beside it.

        Always of the largest shape: `shape` is not looked at. Processes what the cache lacks of the
        text; makes a forward pass for each level; of `verified` only the root is read.
        """
        rows = self._rank_candidates_by_level(self._cache.process_all_but_last_piece())
        self._chain = mx.concatenate([row[:1] for row in rows])
        topology = self._topology
        tokens = mx.concatenate([verified.root, mx.concatenate(rows)[topology.slots]])
        return Tree(tokens, topology.depths, topology.paths, topology.num_internal, topology)

    def _rank_candidates_by_level(self, newest_tokens: mx.array) -> list[mx.array]:
        """The candidates of each level, [W] int32 each, best first, as the target's sampling ranks
        them.

        The first level is behind `newest_tokens` [R], which the cache lacks of the text; each other
        one behind the best candidate of the level before. A forward pass a level, which
        appends these tokens to the cache, marks its state, and counts in `draft_calls`. Uncomputed.
        """
        sampling = self._sampling
        size = sampling.context_size
        text = self._cache.text
        recent = last_tokens(text, size)[None]
        rows: list[mx.array] = []
        tokens = newest_tokens
        for level in range(self.largest.levels):
            logits = self._cache.append_and_get_last_logits(tokens)
            self._cache.mark()
            self.draft_calls += 1
            first = mx.array([len(text) - 1 + level])
            places = RowPositions(first, mx.zeros(1, mx.int32), 1, recent)
            row = sampling.rank_tokens(logits, places, self._width).tokens[0].astype(mx.int32)
            rows.append(row)
            tokens = row[:1]
            if size:
                recent = mx.concatenate([recent[:, 1:], tokens[None]], axis=1)
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
    """Load a model that drafts for another.

    Args:
        name, dtype, cache_dir, offline, progress: as `ssmlx.load` takes them.
        tokenizer: the target's.
        vocab_size: V, tokens of the target's embedding, padding included.

    Returns:
        The draft model, to be given as `drafter=` to `ssmlx.stream_generate`.

    Raises:
        InputError: it cannot be loaded, its tokenizer has other tokens or ids than the target's, or
            its caches cannot take tokens back.
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
    target_vocab_size: int,
) -> None:
    """Raise InputError unless every token has the same id, and text, in both models.

    Their vocabulary sizes may differ where that is padding alone: where no token of the tokenizers
    has an id beyond the smaller one.

    Args:
        draft: the draft model, for its name and vocabulary size.
        draft_tokenizer: the draft model's.
        target_tokenizer: the target's.
        target_vocab_size: tokens of the target's embedding.
    """
    do = "choose a draft model of the same family"
    ours = draft_tokenizer.get_vocab()
    theirs = target_tokenizer.get_vocab()
    words = [word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word)]
    word = min(words, default="")
    last = max(ours.values(), default=0)
    require(
        not words,
        f"{draft.name} has another token map: {len(words)} tokens differ, such as {word!r} "
        f"({ours.get(word)} there, {theirs.get(word)} in the target)",
        expected="the same tokens under the same ids",
        do=do,
    )
    require(
        draft.vocab_size == target_vocab_size or last < min(draft.vocab_size, target_vocab_size),
        f"{draft.name} has a vocabulary of {draft.vocab_size} tokens",
        expected=f"the target's {target_vocab_size}, or padding alone in which they differ",
        do=do,
    )


def _load(
    name: str, model: StreamFusedModel, tokenizer: TokenizerWrapper, **how: Any
) -> DraftModel:
    """`load_draft_model` as `DrafterLoader.load` is called; `how` are its keyword arguments."""
    return load_draft_model(name, tokenizer, model.backbone.vocab_size, **how)


@register_drafter(
    "draft-model",
    loader=DrafterLoader("a draft model", _load),
    needs_whole_context=True,
    keeps_to_chains=True,
)
def build(inputs: DrafterInputs) -> DraftModelDrafter:
    """The drafter of an answer, on the draft model that was loaded."""
    return DraftModelDrafter(
        inputs.loaded, inputs.settings, inputs.sampling, is_chain=inputs.is_chain
    )
