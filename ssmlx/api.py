"""Text in, text out: what `import ssmlx` gives beside `load`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .cache import TreeCache
from .config import (
    DRAFTERS,
    HEAD_DRAFTERS,
    MAX_DRAFT_TOKENS,
    STREAM_SCHEDULES,
    TEXT_DRAFTERS,
    AcceptanceConfig,
    DrafterKind,
    DraftModelConfig,
    LookaheadConfig,
    PromptLookupConfig,
    PruneConfig,
    SamplingConfig,
    SpeculatorTreeConfig,
    StreamSchedule,
    TreeConfig,
)
from .decode import (
    PREFILL_STEP_SIZE,
    Ends,
    Progress,
    never,
    plain_decode,
    scratch_rows,
    streaming_decode,
)
from .draft import Drafter
from .drafters.draft_model import DraftModel, DraftModelDrafter
from .drafters.lookahead import LookaheadDrafter
from .drafters.medusa import MedusaDrafter
from .drafters.mlp_speculator import MlpSpeculatorDrafter
from .drafters.prompt_lookup import PromptLookupDrafter
from .drafters.streams import StreamDrafter
from .drafters.with_lookup import WithLookup
from .errors import InputError
from .heads import DraftingHeads
from .medusa import MedusaHeads
from .memory import Memory, memory_of
from .model import StreamFusedModel
from .prompts import encode
from .sampling import Sampling
from .tuning import pace_of, prefers_plain, settled

Decoding = Literal["streaming", "plain"]
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """How to generate; the same settings for every command. Those of sampling are inherited.

    Where tree, prune, num_streams and stream_schedule are all None, streams draft as was found
    fastest on this machine, if `python -m perf.calibrate` was run on it; see `ssmlx.tuning`.

    Attributes:
        decoding: "streaming", verify what a drafter proposes, or "plain"; None streams where
            there is a drafter, unless plain decoding was found faster here.
        max_tokens: most tokens to generate.
        drafter: one of `ssmlx.config.DRAFTERS`; None takes the draft model where one is given,
            else the heads, else the model's streams where it has any.
        tree: the tree that streams and Medusa heads draft; None for `TreeConfig()`.
        prune: the pruning of any drafter's tree but lookahead's; needs a pruning adapter. None
            for off.
        num_streams: streams to use, at most as many as were trained; None for all.
        stream_schedule: when they run, see `StreamDrafter`: "fused" or "second-pass"; None for
            "second-pass".
        lookup_nodes: nodes that streams' trees, or those of heads, have besides, for what followed
            the same words earlier in the text.
        prompt_lookup, lookahead, draft, speculator_tree: settings of the other drafters.
        draft_model: the loaded draft model, see `ssmlx.load_draft_model`.
        heads: the loaded Medusa heads or MLP speculator, see `ssmlx.load_heads`.
        acceptance: when a drafted token counts; all but the default is lossy.
        prefill_step_size: prompt tokens per forward pass.
    """

    decoding: Decoding | None = None
    max_tokens: int = 256
    drafter: DrafterKind | None = None
    tree: TreeConfig | None = None
    prune: PruneConfig | None = None
    num_streams: int | None = None
    stream_schedule: StreamSchedule | None = None
    lookup_nodes: int = 0
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    draft: DraftModelConfig = field(default_factory=DraftModelConfig)
    draft_model: DraftModel | None = None
    speculator_tree: SpeculatorTreeConfig = field(default_factory=SpeculatorTreeConfig)
    heads: DraftingHeads | None = None
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    prefill_step_size: int = PREFILL_STEP_SIZE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_tokens", "prefill_step_size"):
            value = getattr(self, name)
            if not value >= 1:
                raise InputError(
                    f"--{name.replace('_', '-')} {value}",
                    expected="1 or more",
                    do="give a larger value",
                )
        if not 0 <= self.lookup_nodes <= MAX_DRAFT_TOKENS:
            raise InputError(
                f"--lookup-nodes {self.lookup_nodes}",
                expected=f"0 to {MAX_DRAFT_TOKENS}",
                do="choose a number in that range",
            )
        for name, known in (("drafter", DRAFTERS), ("stream_schedule", STREAM_SCHEDULES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(
                    f"--{name.replace('_', '-')} {value}",
                    expected="one of " + ", ".join(known),
                    do="choose one of them",
                )
        if self.acceptance.kind == "typical" and self.temp == 0:
            raise InputError(
                "--acceptance typical, which greedy decoding has no use for",
                expected="--temp above 0",
                do="give --temp, or --acceptance exact",
            )

    def resolved_drafter(self, model: StreamFusedModel) -> DrafterKind | None:
        """What drafts for `model`; None for plain decoding.

        Raises:
            InputError: a drafter is asked for, and what it drafts with is missing.
        """
        if self.decoding == "plain":
            return None
        own: DrafterKind | None = "streams" if model.num_streams else None
        drafter = self.drafter or self._loaded_drafter() or own
        if drafter == "draft-model" and self.draft_model is None:
            raise InputError(
                "--drafter draft-model without a draft model",
                expected="--draft-model",
                do="give --draft-model MODEL, or choose another --drafter",
            )
        if drafter in HEAD_DRAFTERS:
            self._check_heads(drafter)
        if (drafter == "streams" and own is None) or (drafter is None and self.decoding):
            asked = f"--drafter {drafter}" if drafter else "streaming"
            raise InputError(
                f"{asked} was asked for, but the model has no streams",
                expected="an adapter",
                do="give --adapter FOLDER, another --drafter, or --decoding plain",
            )
        if drafter == "streams" and prefers_plain(self, model):
            return None
        return drafter

    def _loaded_drafter(self) -> DrafterKind | None:
        """What the draft model or the heads are for, where either is given."""
        if self.draft_model is not None:
            return "draft-model"
        return None if self.heads is None else self.heads.drafter

    def _check_heads(self, drafter: str) -> None:
        if self.heads is None:
            raise InputError(
                f"--drafter {drafter} without heads",
                expected="--heads",
                do="give --heads FOLDER, or choose another --drafter",
            )
        if self.heads.drafter != drafter:
            raise InputError(
                f"--drafter {drafter} with heads for another drafter",
                expected=f"--drafter {self.heads.drafter} with them",
                do="drop --drafter, or give other --heads",
            )

    def resolved_decoding(self, model: StreamFusedModel) -> Decoding:
        """The decoding that `model` gets.

        Raises:
            InputError: as `resolved_drafter`.
        """
        return "plain" if self.resolved_drafter(model) is None else "streaming"


@dataclass(frozen=True, kw_only=True)
class GenerationResponse:
    """A segment of an answer, with the statistics up to it.

    Attributes:
        text: the text that this call completed; may be empty.
        tokens: ids of the segment; an end token is among them but not in the text.
        finish_reason: None before the last segment; then "stop" (an end token), "length"
            (`max_tokens`) or "context" (the model's context is full).
        prompt_tokens: tokens of the prompt, those already in the cache included.
        generation_tokens: tokens so far, the end token included.
        target_calls: forward passes of the target so far, the prompt's counted as one.
        prefill_seconds: until the first call's token.
        decode_seconds: from then on.
        peak_memory: GB, as `mx.get_peak_memory`.
        draft_calls: forward passes of a draft model so far.
        lossy: whether tokens were accepted that the target might not have written.
        memory: where the memory goes; on the last segment alone.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    generation_tokens: int
    target_calls: int
    prefill_seconds: float
    decode_seconds: float
    peak_memory: float
    draft_calls: int = 0
    lossy: bool = False
    memory: Memory | None = None

    @property
    def tokens_per_call(self) -> float:
        """Tokens advanced per target call: the paper's call reduction (CR)."""
        return self.generation_tokens / self.target_calls

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second after the first, which comes with the prompt's call."""
        return (self.generation_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


def required_scratch(model: StreamFusedModel, config: GenerateConfig) -> int:
    """Rows that a step may have, for sizing a cache once; 0 for plain decoding.

    Raises:
        InputError: the settings do not fit the model.
    """
    drafter = make_drafter(model, config)
    return scratch_rows(drafter) if drafter else 0


def _check_prune(model: StreamFusedModel, config: GenerateConfig, drafter: DrafterKind) -> None:
    kind = config.prune.kind if config.prune else "off"
    if kind != "off" and drafter == "lookahead":
        raise InputError(
            f"--prune {kind} with --drafter lookahead, whose window must reach the target whole",
            expected="--prune off",
            do="drop --prune",
        )
    if kind != "off" and (model.streams is None or model.streams.prune is None):
        raise InputError(
            f"--prune {kind}, but the adapter has no pruning adapter",
            expected="prune_adapter.* among its stream weights",
            do="use --prune off, or train one",
        )


def make_drafter(
    model: StreamFusedModel, config: GenerateConfig, sampling: Sampling | None = None
) -> Drafter | None:
    """The drafter that `config` asks for; None for plain decoding.

    Args:
        model: the target.
        config: the settings.
        sampling: how the target decides, for drafters that follow it.

    Raises:
        InputError: the settings do not fit the model.
    """
    kind = config.resolved_drafter(model)
    if kind is None:
        return None
    config = settled(config, model)
    _check_prune(model, config, kind)
    if config.lookup_nodes and kind in TEXT_DRAFTERS:
        raise InputError(
            f"--lookup-nodes with --drafter {kind}",
            expected="streams or heads, whose trees they go into",
            do="drop one of the two",
        )
    if kind == "prompt-lookup":
        return PromptLookupDrafter(config.prompt_lookup)
    if kind == "lookahead":
        return LookaheadDrafter(config.lookahead)
    if kind == "draft-model":
        assert config.draft_model is not None
        return DraftModelDrafter(config.draft_model, config.draft, sampling)
    if kind in HEAD_DRAFTERS:
        drafter = _head_drafter(model, config)
    else:
        assert model.config is not None
        assert config.tree is not None and config.stream_schedule is not None
        streams = model.config.usable_streams(config.num_streams)
        more, schedule = config.lookup_nodes, config.stream_schedule
        drafter = StreamDrafter(model, config.tree, streams, schedule, more_levels=more)
    return WithLookup(drafter, config.lookup_nodes) if config.lookup_nodes else drafter


def _head_drafter(model: StreamFusedModel, config: GenerateConfig) -> Drafter:
    heads = config.heads
    if isinstance(heads, MedusaHeads):
        assert config.tree is not None
        return MedusaDrafter(model.backbone, heads, config.tree)
    assert heads is not None
    return MlpSpeculatorDrafter(model.backbone, heads, config.speculator_tree)


def token_steps(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    config: GenerateConfig,
    progress: Progress | None = None,
    *,
    context: Sequence[int] = (),
) -> Iterator[list[int]]:
    """The endless decoding loop that `config` asks for; see `decode`."""
    return _token_steps(model, prompt, cache, config, progress, context, never)[0]


def _token_steps(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    config: GenerateConfig,
    progress: Progress | None,
    context: Sequence[int],
    ends: Ends,
) -> tuple[Iterator[list[int]], Drafter | None]:
    """The decoding loop, and its drafter if it has one."""
    sampling = Sampling(config, model.backbone.vocab_size)
    drafter = make_drafter(model, config, sampling)
    from_text = config.lookup_nodes > 0 or config.resolved_drafter(model) in TEXT_DRAFTERS
    reads_text = sampling.context_size > 0 or (from_text and drafter is not None)
    if len(context) != cache.offset and (context or reads_text):
        raise ValueError(
            f"{len(context)} tokens of context for a cache of {cache.offset}: "
            "drafters and penalties read the whole text"
        )
    size = config.prefill_step_size
    if drafter is None:
        steps = plain_decode(
            model,
            prompt,
            cache,
            context=context,
            sampler=sampling,
            prefill_step_size=size,
            progress=progress,
        )
        return steps, None
    # Now, while the cache may be empty: its buffers would be copied as trees grow.
    cache.reserve(tokens=0, scratch=scratch_rows(drafter))
    steps = streaming_decode(
        model,
        prompt,
        cache,
        drafter=drafter,
        context=context,
        prune=settled(config, model).prune,
        sampler=sampling,
        acceptance=config.acceptance,
        prefill_step_size=size,
        progress=progress,
        ends=ends,
        pace=pace_of(config, model),
    )
    return steps, drafter


def check_prompt(model: StreamFusedModel, num_tokens: int) -> None:
    """Check that a prompt of `num_tokens` leaves room for an answer.

    Raises:
        InputError: it is empty, or fills the context.
    """
    limit = model.backbone.context_length
    if num_tokens == 0:
        raise InputError("the prompt is empty", expected="a token or more", do="give a prompt")
    if limit is not None and num_tokens >= limit:
        raise InputError(
            f"the prompt has {num_tokens} tokens",
            expected=f"less than the model's context of {limit}",
            do="shorten it",
        )


@dataclass
class Budget:
    """Where an answer ends: at an end token, at `max_tokens`, or at the context's end."""

    end_tokens: Set[int]
    max_tokens: int
    context_room: int | None
    generated: int = 0

    def ends(self, step: list[int]) -> bool:
        """Whether the answer ends with the tokens of `step`."""
        return self.cut(step)[1] is not None

    def cut(self, step: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of `step` that belongs to the answer, and why it ends if it does."""
        generated = self.generated
        for index, token in enumerate(step, 1):
            if token in self.end_tokens:
                return step[:index], "stop"
            if generated + index == self.max_tokens:
                return step[:index], "length"
            if generated + index == self.context_room:
                return step[:index], "context"
        return step, None


def end_token_ids(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> set[int]:
    """Tokens that end an answer: the tokenizer's and the adapter's."""
    return set(tokenizer.eos_token_ids) | set(model.config.end_token_ids if model.config else ())


def stream_generate(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig | None = None,
    *,
    cache: TreeCache | None = None,
    context: Sequence[int] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> Iterator[GenerationResponse]:
    """Generate an answer, yielding a segment of it for each target call.

    Args:
        model, tokenizer: as `load` returns them.
        prompt: text (a template, if any, already applied) or token ids.
        config: settings; `GenerateConfig()` unless given.
        cache: holds what comes before the prompt, and is left holding prompt and answer but
            for the last token, or more; a fresh one unless given.
        context: the tokens that `cache` holds; penalties and some drafters read them
            (`ssmlx.config.TEXT_DRAFTERS`).
        progress: told (tokens processed, tokens in all) while the prompt is processed.
        settings: single fields of `GenerateConfig`, such as `max_tokens=100`.

    Raises:
        InputError: the prompt is empty or too long, or the settings do not fit the model.
    """
    config = replace(config or GenerateConfig(), **settings)
    tokens = encode(prompt, tokenizer) if isinstance(prompt, str) else [int(t) for t in prompt]
    cache = cache if cache is not None else model.make_cache()
    num_prompt = cache.offset + len(tokens)
    check_prompt(model, num_prompt if tokens else 0)
    limit = model.backbone.context_length
    room = None if limit is None else limit - num_prompt
    budget = Budget(end_token_ids(model, tokenizer), config.max_tokens, room)
    steps, drafter = _token_steps(model, tokens, cache, config, progress, context, budget.ends)
    lossy = drafter is not None and config.acceptance.kind != "exact"
    measure = partial(memory_of, model, cache, config, drafter)
    return _responses(model, tokenizer, steps, budget, num_prompt, drafter, lossy, measure)


def _responses(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    steps: Iterator[list[int]],
    budget: Budget,
    num_prompt: int,
    drafter: Drafter | None,
    lossy: bool,
    measure: Callable[[], Memory],
) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer
    started = first_done = time.perf_counter()
    with wired_memory(model):
        for calls, step in enumerate(steps, 1):
            now = time.perf_counter()
            first_done = now if calls == 1 else first_done
            step, reason = budget.cut(step)
            budget.generated += len(step)
            for token in step[:-1] if reason == "stop" else step:
                detokenizer.add_token(token)
            if reason:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                tokens=tuple(step),
                finish_reason=reason,
                prompt_tokens=num_prompt,
                generation_tokens=budget.generated,
                target_calls=calls,
                prefill_seconds=first_done - started,
                decode_seconds=now - first_done,
                peak_memory=mx.get_peak_memory() / 1e9,
                draft_calls=drafter.draft_calls if drafter else 0,
                lossy=lossy,
                memory=measure() if reason else None,
            )
            if reason:
                return


@contextmanager
def wired_memory(model: StreamFusedModel) -> Iterator[None]:
    """Keep the weights wired while generating, as mlx-lm does on macOS."""
    with wired_limit(model.backbone.model):
        yield


def generate(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig | None = None,
    *,
    verbose: bool = False,
    **settings: Any,
) -> str:
    """The whole answer to `prompt`; `verbose` prints it as it comes, with statistics.

    See `stream_generate` for the arguments and what is raised.
    """
    text, last = "", None
    for last in stream_generate(model, tokenizer, prompt, config, **settings):
        text += last.text
        if verbose:
            print(last.text, end="", flush=True)
    if verbose and last is not None:
        print(f"\n{summary(last)}")
        if last.memory is not None:
            print(last.memory.line())
    return text


def summary(response: GenerationResponse, plain_tps: float | None = None) -> str:
    """One quiet line about an answer: tokens/s, tokens per target call, speed-up if known."""
    parts = ["LOSSY (typical acceptance)"] if response.lossy else []
    parts += [
        f"{response.generation_tokens} tokens",
        f"{response.generation_tps:.1f} tokens/s",
        f"{response.tokens_per_call:.2f} tokens per target call",
    ]
    if plain_tps:
        parts.append(f"{response.generation_tps / plain_tps:.2f}x plain decoding")
    if response.finish_reason == "length":
        parts.append("cut at --max-tokens")
    if response.finish_reason == "context":
        parts.append("the context is full")
    return " · ".join(parts)
