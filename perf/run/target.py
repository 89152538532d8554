"""One model, and everything that decodes it: mlx-lm's own loop, plain decoding, every drafter.

All run on the very same arrays: where a copy happened to be in memory alone moved tokens/s by some
3 %. The target is the base with the LoRA that acts on every row: for an adapter of scope "all" its
own, for scope "streams" that of a task, or none.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.decoding.drafter import Drafter
from ssmlx.drafters.base import Loaded
from ssmlx.drafters.draft_model import DraftModel, load_draft_model
from ssmlx.drafters.heads import load_heads
from ssmlx.drafters.mtp import load_mtp
from ssmlx.drafters.text_index import EarlierAnswers
from ssmlx.errors import require
from ssmlx.generation.learned import learned_of
from ssmlx.generation.memory import Memory, measure_memory
from ssmlx.generation.plan import make_plan
from ssmlx.loading.adapter import StreamAdapter, cast_streams, load_stream_adapter
from ssmlx.loading.attach import check_lora, require_same_base
from ssmlx.loading.load import (
    cast_model,
    load_tokenizer,
    load_weights,
    resolve_draft_bits,
)
from ssmlx.model.backbone import Backbone, Origin
from ssmlx.model.lora import RowScope, attach_lora
from ssmlx.model.modules import clone_sharing_arrays
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig

from .rounding import replace_by_rounding_layers
from .timing import TimedAnswer, TimedCall, answer_with_ssmlx

MLX_LM = "mlx-lm"
PLAIN = "plain"
STREAMS = "streams"
TEXT = "text"
DRAFT_MODEL = "draft-model"
MTP = "mtp"
DRAFT_ALONE = "draft model alone"
# Kinds of systems that draft with weights of their own; an MTP head may be among the base's.
CHECKPOINTS = ("medusa", "mlp-speculator", MTP, DRAFT_MODEL)
FLOATS = ("float32", "float16", "bfloat16")
PACKED = {"8bit": 8, "4bit": 4}  # precisions of quantized weights, with activations in float16
GROUP_SIZE = 32  # weights that share a scale


@dataclass(frozen=True)
class System:
    """One way to decode that takes part: its name, kind and settings."""

    name: str  # as in the tables
    # `MLX_LM`, its own stream_generate; `PLAIN`; a drafter; or `DRAFT_ALONE`, the draft model by
    # itself in mlx-lm's loop, to time its calls
    kind: str
    # mlx-lm's loop follows only max_tokens, temp, top_k and seed
    config: GenerateConfig


@dataclass(frozen=True)
class Weights:
    """The weights of an experiment: base, adapter, drafters, and their precision."""

    base: Path  # the base model's folder
    dtype: str = "float32"  # one of `FLOATS` or `PACKED`
    rounds: bool = False  # whether products are `replace_by_rounding_layers`'s, in 16 bits
    draft_head: str = "stored"  # as `ssmlx.load` takes it
    adapter: StreamAdapter | None = None  # streams and LoRA; None for the base alone
    folder: Path | None = None  # the adapter's folder
    # the weights of each of `CHECKPOINTS`, if given
    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    # stores learned costs of calls; None for the user's cache folder
    costs: Path | None = None

    @property
    def activations(self) -> str:
        """The dtype of activations."""
        return "float16" if self.dtype in PACKED else self.dtype

    @property
    def scope(self) -> str | None:
        """The adapter's scope; "task" for streams beside a task's LoRA; None without an adapter."""
        if self.adapter is None:
            return None
        return "task" if self.adapter.task_lora else self.adapter.config.adapter_scope


@dataclass(frozen=True, eq=False)
class Drafting:
    """The model with which systems of one kind decode, and the draft model or heads beside it."""

    model: StreamFusedModel
    loaded: Sequence[Loaded] = ()


class Target:
    """A loaded model and everything that decodes it, on the same arrays.

    `mlx_model` is mlx-lm's, with the LoRA of every row merged; `plain` is ssmlx's on its arrays,
    without streams.
    """

    def __init__(self, weights: Weights) -> None:
        """Load the target; streams, heads and draft models are not loaded yet."""
        self.weights = weights
        adapter = weights.adapter
        model, settings = load_weights_as(weights.dtype, weights.base)
        self.tokenizer = load_tokenizer(weights.base, settings)
        backbone = Backbone(self._round_products_if_asked(clone_sharing_arrays(model)))
        if adapter is not None:
            require_same_base(adapter, backbone)
        lora = {} if adapter is None else adapter.lora
        source = weights.folder or Path("the adapter")
        for every in (lora, adapter.stream_lora if adapter else {}):
            check_lora(model, every, source)
        attach_lora(model, lora, RowScope(0), merge=True, dtype=backbone.dtype)
        computing: Any = self._round_products_if_asked(model)
        mx.eval(computing.parameters())
        # The adapter's end tokens end every system's answers.
        ends = adapter.config.end_token_ids if adapter else ()
        self.tokenizer.eos_token_ids = {*self.tokenizer.eos_token_ids, *ends}
        self.mlx_model = model
        self.plain = StreamFusedModel(self._new_backbone())
        self._drafting: dict[str, Drafting] = {}
        # earlier answers by system and repeat: each of these is a session
        self._earlier: dict[tuple[str, int], EarlierAnswers] = {}

    def load_drafting_once(self, kind: str) -> Drafting:
        if kind not in self._drafting:
            self._drafting[kind] = self._load_drafting(kind)
        return self._drafting[kind]

    def measure_memory(self, kind: str = PLAIN) -> Memory:
        """Bytes of what systems of a kind decode with, beside an empty cache."""
        own = self.load_drafting_once(kind)
        return measure_memory(own.model, own.model.make_cache(), loaded=own.loaded)

    def make_new_drafters(self, system: System) -> Sequence[Drafter]:
        """Make drafters; None for plain decoding, mlx-lm and the draft model alone."""
        if system.kind in (MLX_LM, DRAFT_ALONE):
            return ()
        own = self.load_drafting_once(system.kind)
        return make_plan(own.model, system.config, drafter=own.loaded).drafters

    def count_learned_call_costs(self, system: System) -> int | None:
        """Count learned costs; None if no controller decides, since then none are used."""
        if not system.config.is_controlled:
            return None
        learned, _ = learned_of(self.load_drafting_once(system.kind).model)
        return len(learned.costs.to_dict()["costs"])

    def count_added_parameters(self, system: System) -> int:
        """Count trained numbers."""
        if system.kind == STREAMS and self.weights.adapter is not None:
            return count_parameters_of_streams(self.weights.adapter)
        return sum(drafter.num_parameters for drafter in self.make_new_drafters(system))

    def answer(
        self,
        system: System,
        prompt: list[int],
        # a controlled system also drafts from its own earlier answers of the same repeat
        repeat: int = 0,
    ) -> TimedAnswer:
        """Answer a prompt; the result's peak memory excludes what was in use before."""
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        found = self._answer_by_kind(system, prompt, repeat)
        return replace(found, peak_bytes=max(0, mx.get_peak_memory() - before))

    def decode_text(self, tokens: Sequence[int]) -> str:
        """Decode tokens, without end tokens."""
        ends = self.tokenizer.eos_token_ids
        return str(self.tokenizer.decode([token for token in tokens if token not in ends]))

    @contextmanager
    def without_end_tokens(self) -> Iterator[None]:
        """Ignore end tokens inside the block, so that answers are equally long; needs streams."""
        streams = self.load_drafting_once(STREAMS).model
        ends = self.tokenizer.eos_token_ids
        config = streams.config
        assert config is not None
        streams.config = replace(config, end_token_ids=())
        self.tokenizer.eos_token_ids = set()
        try:
            yield
        finally:
            streams.config = config
            self.tokenizer.eos_token_ids = ends

    def _answer_by_kind(self, system: System, prompt: list[int], repeat: int) -> TimedAnswer:
        """Answer a prompt, without measuring peak memory."""
        if system.kind == MLX_LM:
            return answer_with_mlx_lm(self.mlx_model, self.tokenizer, prompt, system.config)
        if system.kind == DRAFT_ALONE:
            (draft,) = self.load_drafting_once(DRAFT_MODEL).loaded
            assert isinstance(draft, DraftModel)
            return answer_with_mlx_lm(draft.model, self.tokenizer, prompt, system.config)
        own = self.load_drafting_once(system.kind)
        # A draft model starts every answer with an empty cache.
        drafter = [
            DraftModel(one.model, one.name) if isinstance(one, DraftModel) else one
            for one in own.loaded
        ]
        earlier = None
        if system.config.is_controlled and not system.config.deterministic:
            session = system.name, repeat
            earlier = self._earlier.setdefault(session, EarlierAnswers())
        how = {"drafter": drafter, "earlier": earlier}
        return answer_with_ssmlx(own.model, self.tokenizer, prompt, system.config, **how)

    def _round_products_if_asked(self, model: Module) -> Module:
        """Replace products by rounding layers if the weights ask for it, in place."""
        if self.weights.rounds:
            replace_by_rounding_layers(model, self.weights.activations)
        return model

    def _new_backbone(self) -> Backbone:
        """Make a backbone on the target's arrays."""
        bits = resolve_draft_bits(self.weights.draft_head)
        origin = Origin(cache_dir=self.weights.costs)
        return Backbone(clone_sharing_arrays(self.mlx_model), origin, bits)

    def _load_drafting(self, kind: str) -> Drafting:
        """Load what a kind drafts with; for kinds without own weights it is the target alone."""
        if kind == STREAMS:
            return self._make_target_with_streams()
        if kind not in CHECKPOINTS:
            return Drafting(self.plain)
        folder = self.weights.checkpoints[kind]
        if kind == DRAFT_MODEL:
            size = self.plain.backbone.vocab_size
            dtype = self.weights.activations
            draft = load_draft_model(str(folder), self.tokenizer, size, dtype=dtype)
            return Drafting(self.plain, [draft])
        if kind == MTP:
            return Drafting(self.plain, [load_mtp(self.plain, folder)])
        heads = load_heads(folder, self.plain)
        what = f"--{kind} {folder} has heads for {heads.drafter}"
        expected = f"heads for {kind}"
        require(heads.drafter == kind, what, expected=expected, do=f"give it as --{heads.drafter}")
        return Drafting(self.plain, [heads])

    def _make_target_with_streams(self) -> Drafting:
        """Make a target with streams, which shares the target's arrays."""
        adapter = self.weights.adapter
        backbone = self._new_backbone()
        assert adapter is not None
        streams = cast_streams(adapter.streams, backbone.dtype)
        scope = RowScope(0) if adapter.config.adapter_scope == "all" else RowScope()
        fused = StreamFusedModel(backbone, adapter.config, streams, scope)
        own = adapter.stream_lora
        attach_lora(backbone.model, own, scope, merge=False, dtype=backbone.dtype)
        mx.eval(backbone.model.parameters(), streams.trainable_arrays)
        return Drafting(fused)


def load_weights_as(dtype: str, base: Path) -> tuple[Module, dict[str, Any]]:
    """Load the model in one of `FLOATS` or `PACKED`, with its unchanged config.json.

    For a quantized precision, weights of other bits are dequantized first; layers whose width is
    not a multiple of `GROUP_SIZE` stay in float16.
    """
    bits = PACKED.get(dtype)
    failure = f"{base} cannot be loaded as a model"
    model, settings = load_weights(base, "stored" if bits else dtype, failure)
    if bits and settings.get("quantization", {}).get("bits") != bits:
        model = cast_model(model, "float32")
        quantize(model, GROUP_SIZE, bits, class_predicate=_is_packable)
    if bits:
        model.set_dtype(mx.float16)
    return model, settings


def _is_packable(_: str, module: Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0


def count_parameters_of_streams(adapter: StreamAdapter) -> int:
    """Count trained numbers, with the LoRA if it acts on stream rows alone."""
    lora = adapter.stream_lora.values()
    return adapter.streams.num_parameters + sum(one.a.size + one.b.size for one in lora)


def read_adapter_with_own_lora(folder: Path) -> StreamAdapter:
    adapter = load_stream_adapter(folder)
    what = f"{folder} has no LoRA of its own: it is a fused model"
    do = "convert without --fuse"
    require(bool(adapter.trained_lora), what, expected="an adapter folder", do=do)
    return adapter


def answer_with_mlx_lm(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    config: GenerateConfig,  # only max_tokens, temp, top_k and seed are used
) -> TimedAnswer:
    """Answer by mlx-lm's `stream_generate`; each token is timed as a call; peak memory is 0."""
    sampler = None
    if config.temp:
        mx.random.seed(config.seed or 0)
        sampler = make_sampler(config.temp, top_k=config.top_k)
    tokens = []
    times = [time.perf_counter()]
    responses = mlx_lm.stream_generate(
        model, tokenizer, prompt, max_tokens=config.max_tokens, sampler=sampler
    )
    for response in responses:
        times.append(time.perf_counter())
        tokens.append(response.token)
    started = times[0]
    first = times[1]
    last = times[-1]
    calls = [
        TimedCall(1, 1, len(prompt) + index, after - before)
        for index, (before, after) in enumerate(pairwise(times[1:]))
    ]
    return TimedAnswer(tokens, len(tokens), last - first, first - started, calls=calls)
