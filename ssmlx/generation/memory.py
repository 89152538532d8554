"""Memory by part: weights, caches, the room for trees; and the most that was in use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..decoding.drafter import Drafter
from ..drafters.base import Loaded
from ..loading.adapter import stream_tensors
from ..model.lm_head import head_bytes
from ..model.lora import LoraLayer
from ..model.shapes import arrays_in
from ..model.streams import StreamFusedModel
from ..model.text_cache import CACHE_STEP, TextCache

MIB = 2**20
LABELS = {"base": "base model", "lora": "LoRA", "streams": "stream weights"}
"""Labels for parts whose field name is not clear enough."""


def _display_name(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that an answer and its model keep in memory, each array counted once."""

    base: int  # weights of the base model, with the LoRA that is merged into them
    lora: int = 0  # LoRA that is not merged, and weights kept to undo a merge
    streams: int = 0  # stream embeddings, f, the pruning adapter and the draft vocabulary's ids
    draft_head: int = 0  # the LM head's rows of the draft vocabulary, once more
    drafter: int = 0  # a draft model with its cache, or drafting heads
    # keys and values of the committed tokens, with the room that is reserved for more
    cache: int = 0
    tree: int = 0  # keys and values of the rows of the step in hand, and masks
    # what drafters keep of the text: keys and values of the top layers, once more
    # (`cache.StreamCache`), and `DraftVocab`; or the index of a lookup
    second_pass: int = 0
    text_index: int = 0  # of the text on the host, to look up in: beside what MLX holds
    peak: int = 0  # most in use at once since `mx.reset_peak_memory`, activations and all

    @property
    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)[:-1]}

    @property
    def weights(self) -> int:
        """Bytes of all that is there before a prompt comes."""
        return self.base + self.lora + self.streams + self.draft_head + self.drafter

    @property
    def held(self) -> int:
        """Bytes that MLX keeps from call to call; the text index is on the host."""
        return sum(self.parts.values()) - self.text_index

    @property
    def passing(self) -> int:
        """Bytes of the peak beyond `held`: activations, logits, and buffers while they grow."""
        return max(0, self.peak - self.held)

    def line(self) -> str:
        parts = {_display_name(name): size for name, size in self.parts.items()}
        shown = [f"{label} {size / MIB:.1f}" for label, size in parts.items() if size]
        if self.passing:
            shown.append(f"passing {self.passing / MIB:.1f}")
        return f"memory: {self.peak / MIB:.1f} MiB at most: {', '.join(shown)}"

    def table(self) -> str:
        rows = [(_display_name(name), size) for name, size in self.parts.items() if size]
        rows += [("passing, at most", self.passing), ("most in use at once", self.peak)]
        return "\n".join(f"{label:20}{size / MIB:9.1f} MiB" for label, size in rows)


def measure_memory(
    model: StreamFusedModel,
    cache: TextCache,
    drafters: Sequence[Drafter] = (),
    loaded: Iterable[Loaded] = (),  # draft models and heads in memory, whether or not they draft
) -> Memory:
    """Count what an answer keeps in memory now; its peak is the process's since it was reset."""
    modules = model.backbone.model.modules()
    lora = [array for one in modules if isinstance(one, LoraLayer) for array in one.added]
    apart = {id(array) for array in lora}
    used = {id(array): array for array in arrays_in(model.backbone.model.parameters())}
    # Weights that merged ones replace.
    kept = arrays_in([module.parameters() for module in model.backbone.replaced_in_memory.values()])
    scratch = cache.scratch * cache.row_bytes
    return Memory(
        base=_total_bytes(array for one, array in used.items() if one not in apart),
        lora=_total_bytes([*lora, *(array for array in kept if id(array) not in used)]),
        streams=_total_bytes(stream_tensors(model.streams).values()) if model.streams else 0,
        draft_head=head_bytes(model.draft_head),
        drafter=sum(one.nbytes for one in loaded),
        cache=cache.nbytes - scratch,
        tree=scratch + cache.mask_bytes,
        second_pass=sum(one.cache_bytes for one in drafters if not one.needs.follows_from_start),
        text_index=sum(one.cache_bytes for one in drafters if one.needs.follows_from_start),
        peak=mx.get_peak_memory(),
    )


@dataclass(frozen=True)
class CacheSize:
    """Bytes that keys and values of a model's texts take."""

    fixed: int  # of a state that does not grow with the text, such as that of recurrent layers
    per_token: int  # of each token that there is room for

    @staticmethod
    def rounded(num_tokens: int) -> int:
        """Tokens that a cache reserves: a multiple of `CACHE_STEP`."""
        return -(-num_tokens // CACHE_STEP) * CACHE_STEP

    def of(self, num_tokens: int, scratch: int = 0) -> int:
        """Bytes of a cache that holds `num_tokens`, beside `scratch` rows for steps."""
        return self.fixed + self.per_token * (scratch + self.rounded(num_tokens))


_SIZES: WeakKeyDictionary[StreamFusedModel, CacheSize] = WeakKeyDictionary()
"""Found sizes. They follow from the model, and go with it, so that no test has to reset them."""


def cache_size_of(model: StreamFusedModel) -> CacheSize:
    """The size of a model's caches; measured once."""
    if model not in _SIZES:
        _SIZES[model] = _measure_cache_size(model)
    return _SIZES[model]


def _measure_cache_size(model: StreamFusedModel) -> CacheSize:
    """Measure by appending tokens to a cache that is never computed."""
    cache = model.make_cache()
    model.backbone.append(mx.array([0]), cache)
    # A cache that reserves room says what a row takes.
    if cache.row_bytes:
        return CacheSize(0, cache.row_bytes)
    before = cache.nbytes
    model.backbone.append(mx.zeros(CACHE_STEP, mx.int32), cache)
    per_token = (cache.nbytes - before) // CACHE_STEP
    return CacheSize(before - per_token, per_token)


def _total_bytes(arrays: Iterable[mx.array]) -> int:
    # An array that comes twice is counted once.
    return sum({id(array): array.nbytes for array in arrays}.values())
