"""Drafts from a second, smaller model with the same vocabulary."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from ..bars import Progress
from ..decoding.controller import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.sampling import RowPositions, Sampling, last_tokens
from ..errors import require
from ..loading.load import load_tokenizer, load_weights
from ..loading.names import Fetch, resolve_model
from ..model.modules import module_arrays
from ..model.shapes import to_list
from ..model.streams import StreamFusedModel
from ..model.tree import Tree, comb_topology
from ..prompts import common_prefix
from ..settings import PREFILL_STEP_SIZE, DraftModelConfig
from .registry import DrafterInputs, DrafterWeights, register_drafter

_MOST_IDLE = 2


class DraftModel:
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
        self.model = model
        self.name = name
        mx.eval(module_arrays(model))
        for layer, cache in enumerate(_make_cache(model)):
            require(
                type(cache) is KVCache,
                f"{name} keeps a {type(cache).__name__} in layer {layer}, from which rejected "
                "tokens cannot be taken back",
                expected="a model with plain key/value caches",
                do="choose another draft model",
            )
        self.num_parameters: int = get_total_parameters(model)
        wrapped: Any = model
        self.vocab_size: int = getattr(wrapped, "language_model", wrapped).args.vocab_size
        self.target_vocab_size = self.vocab_size
        self._caches: list[DraftCache] = []  # the one that was taken last stands first

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its caches."""
        return sum(array.nbytes for array in module_arrays(self.model)) + self.cache_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of its caches, those that wait for a next answer included."""
        return sum(cache.nbytes for cache in self._caches)

    def drop_idle(self) -> None:
        """Free the caches that wait for a next answer."""
        self._caches = [cache for cache in self._caches if cache.drafter() is not None]

    def take_cache(self, tokens: Sequence[int], drafter: object) -> "DraftCache":
        """A cache for `drafter` as long as it lives: of those that nobody has, the one that holds
        most of `tokens`. At most `_MOST_IDLE` of the others are kept."""
        idle = [cache for cache in self._caches if cache.drafter() is None]
        shared = {id(cache): common_prefix(cache.text, tokens) for cache in idle}
        cache = max(idle, key=lambda one: shared[id(one)], default=DraftCache(self))
        spare = [one for one in idle if one is not cache][_MOST_IDLE:]
        dropped = {id(one) for one in (cache, *spare)}
        self._caches = [cache, *(one for one in self._caches if id(one) not in dropped)]
        cache.drafter = weakref.ref(drafter)
        return cache


def _make_cache(model: nn.Module) -> list[Any]:
    """By layer; where it sees a window, which its mask says too, one that tokens can leave."""
    made: list[Any] = make_prompt_cache(model)
    return [KVCache() if type(cache) is RotatingKVCache else cache for cache in made]


class DraftCache:
    """A draft model's keys and values of one text."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._layers = _make_cache(draft.model)
        self.text: list[int] = []
        self.drafter: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    @property
    def offset(self) -> int:
        return int(self._layers[0].offset)

    def start(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Make the cache hold all of `tokens` but the newest; an empty list before each pass."""
        kept = common_prefix(self.text[: self.offset], tokens[:-1])
        trim_prompt_cache(self._layers, self.offset - kept)
        self.text = list(tokens)
        for first in range(kept, len(tokens) - 1, PREFILL_STEP_SIZE):
            yield []
            last = min(first + PREFILL_STEP_SIZE, len(tokens) - 1)
            self.logits(mx.array(self.text[first:last]))
            mx.eval([layer.state for layer in self._layers])

    def logits(self, tokens: mx.array) -> mx.array:
        """[1, V] logits after the last of `tokens` [R], which join the cache.

        Two embeddings of one vocabulary may be padded to sizes of their own: what one lacks is
        never drafted.
        """
        known = self._draft.vocab_size
        wanted = self._draft.target_vocab_size
        logits = self._draft.model(mx.minimum(tokens, known - 1)[None], cache=self._layers)[:, -1]
        if known < wanted:
            return mx.pad(logits, [(0, 0), (0, wanted - known)], constant_values=-math.inf)
        return logits[:, :wanted]

    def go_on(self, tokens: Sequence[int], held: int) -> None:
        """The text has gone on by `tokens`, of which the cache holds the first `held` already."""
        known = len(self.text) + held
        self.text.extend(tokens)
        trim_prompt_cache(self._layers, max(0, self.offset - known))

    def unprocessed(self) -> mx.array:
        """[R] the newest tokens of the text, which the cache does not hold; long runs of others
        are processed."""
        while len(self.text) - self.offset > PREFILL_STEP_SIZE:
            first = self.offset
            self.logits(mx.array(self.text[first : first + PREFILL_STEP_SIZE]))
            mx.eval([layer.state for layer in self._layers])
        return mx.array(self.text[self.offset :], mx.int32)


class DraftModelDrafter:
    """Drafts a chain of K tokens, and optionally the runners-up beside each of them.

    The K forward passes are one graph: no drafted token is read by the host while drafting.
    Where the target samples, so does the draft model, under the same settings and the same noise
    of each place: where both distributions are alike, so are the draws.
    """

    name = "draft-model"
    needs = Needs(host_tokens=True)
    cache_bytes = 0

    def __init__(self, model: DraftModel, config: DraftModelConfig, sampling: Sampling) -> None:
        width = min(config.width, model.vocab_size, model.target_vocab_size)
        self._model = model
        self._sampling = sampling
        self._width = width
        levels = config.num_draft_tokens
        self._topology = comb_topology(width, levels)
        self.largest = DraftShape(self.name, self._topology.num_nodes, levels)
        self.num_parameters = model.num_parameters
        self.draft_calls = 0

    def start(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """See `Drafter.start`."""
        self._cache = self._model.take_cache(tokens, self)
        self._chain = mx.zeros(0, mx.int32)
        self.draft_calls = 0
        for turn in self._cache.start(tokens):
            yield turn
            self.draft_calls += 1

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        """See `Drafter.follow`. What the text has of the last chain stays in the cache."""
        chain = to_list(self._chain) if self._chain.size else []
        # The cache holds the text that the chain was drafted from and all of the chain but its
        # last token. At least the newest token is left to process, whose logits are needed.
        self._cache.go_on(tokens, common_prefix(chain[:-1], tokens[:-1]))
        self._chain = mx.zeros(0, mx.int32)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """See `Drafter.propose`."""
        rows = self._draft(self._cache.unprocessed())
        self._chain = mx.concatenate([row[:1] for row in rows])
        topology = self._topology
        tokens = mx.concatenate([verified.root, mx.concatenate(rows)[topology.slots]])
        return Tree(tokens, topology.depths, topology.paths, topology.num_internal, topology)

    def _draft(self, tokens: mx.array) -> list[mx.array]:
        """The candidates [W] of each level, best first, after `tokens` [R], the newest ones."""
        sampling = self._sampling
        size = sampling.context_size
        text = self._cache.text
        recent = last_tokens(text, size)[None]
        rows: list[mx.array] = []
        for level in range(self.largest.levels):
            logits = self._cache.logits(tokens)
            self.draft_calls += 1
            first = mx.array([len(text) - 1 + level])
            places = RowPositions(first, mx.zeros(1, mx.int32), 1, recent)
            row = sampling.rank_tokens(logits, places, self._width)[0][0].astype(mx.int32)
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
        tokenizer, vocab_size: those of the target.
        name, dtype, cache_dir, offline, progress: as `ssmlx.load` takes them.

    Raises:
        InputError: it cannot be loaded, or its vocabulary is another than the target's.
    """
    path = resolve_model(name, Fetch(cache_dir=cache_dir, offline=offline, progress=progress))
    model, config = load_weights(path, dtype, f"the draft model {name} cannot be loaded")
    draft = DraftModel(model, f"the draft model {name}")
    draft.target_vocab_size = vocab_size
    check_vocabulary(draft, load_tokenizer(path, config), tokenizer, vocab_size)
    return draft


def check_vocabulary(
    draft: DraftModel, own: TokenizerWrapper, tokenizer: TokenizerWrapper, vocab_size: int
) -> None:
    """Check that a drafted token means to the target what it means to the draft model."""
    do = "choose a draft model of the same family"
    ours = own.get_vocab()
    theirs = tokenizer.get_vocab()
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
        draft.vocab_size == vocab_size or last < min(draft.vocab_size, vocab_size),
        f"{draft.name} has a vocabulary of {draft.vocab_size} tokens",
        expected=f"the target's {vocab_size}, or padding alone in which they differ",
        do=do,
    )


def _load(
    name: str, model: StreamFusedModel, tokenizer: TokenizerWrapper, **how: Any
) -> DraftModel:
    return load_draft_model(name, tokenizer, model.backbone.vocab_size, **how)


@register_drafter(
    "draft-model",
    settings=DraftModelConfig,
    config_field="draft",
    weights=DrafterWeights("a draft model", "model=MODEL", _load),
    reads_text=True,
)
def build(inputs: DrafterInputs) -> DraftModelDrafter:
    return DraftModelDrafter(inputs.loaded, inputs.settings, inputs.sampling)
