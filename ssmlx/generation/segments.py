"""An answer from its prompt to its segments: checked, planned, decoded, and put into text."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import index
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..answers import Prefilled
from ..decoding.sampling import TokenLogprobs
from ..decoding.step import DraftCounts, DraftTotals, FinishReason, Step
from ..drafters.base import Loaded
from ..drafters.text_index import EarlierAnswers
from ..errors import ContextLengthError, InputError, quoted, require
from ..mlx_thread import wired_weights
from ..model.shapes import to_int
from ..model.streams import StreamFusedModel
from ..model.text_cache import TextCache
from ..prompts import encode
from ..settings import GenerateConfig
from .answer_end import AnswerText, StopChecker, end_token_ids
from .memory import Memory, measure_memory
from .plan import Decode, decode_plan, make_plan


@dataclass(frozen=True, kw_only=True)
class GenerationResponse:
    """A segment of an answer, with the statistics up to it.

    Attributes:
        text: the text that this call completed; may be empty.
        tokens: ids of the segment; an end token, or those of a stop string, are among them but
            not in the text.
        finish_reason: None before the last segment; then "stop" (an end token or a stop string),
            "length" (`max_tokens`) or "context" (the model's context is full).
        prompt_tokens: tokens of the prompt, those already in the cache included.
        generation_tokens: tokens so far, the end token included.
        target_calls: forward passes of the target so far, the prompt's counted as one.
        prefill_seconds: until the first call's token.
        decode_seconds: from then on.
        peak_memory: GB, as `mx.get_peak_memory`.
        draft_model_calls: forward passes so far of a draft model, MTP head or assistant. Calls of
            the target that verified drafts are counted in `drafts`.
        cached_tokens: tokens of the prompt that the cache held already.
        lossy: whether tokens were accepted that the target might not have written.
        memory: what its parts take; on the last segment alone.
        logprobs: those of each token; None if `GenerateConfig.logprobs` is.
        stop: the text of `GenerateConfig.stop` that ended the answer, if one did.
        drafted_tokens: drafted tokens that were verified so far, accepted or not.
        drafts: what came of each drafter's trees so far, by its name.
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
    draft_model_calls: int = 0
    cached_tokens: int = 0
    lossy: bool = False
    memory: Memory | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop: str | None = None
    drafted_tokens: int = 0
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)

    @property
    def tokens_per_call(self) -> float:
        """Tokens advanced per target call: the paper's call reduction (CR)."""
        return self.generation_tokens / self.target_calls if self.target_calls else 0.0

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second, of those that were processed."""
        processed = self.prompt_tokens - self.cached_tokens
        return processed / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second after the first, which comes with the prompt's call."""
        return (self.generation_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class GivenAnswer:
    """The part of an answer that was yielded so far, only its last segment whole."""

    texts: list[str] = field(default_factory=list)  # of each segment
    tokens: list[int] = field(default_factory=list)
    last: GenerationResponse | None = None  # None before the first segment

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, segment: GenerationResponse) -> None:
        self.texts.append(segment.text)
        self.tokens += segment.tokens
        self.last = segment


def resolve_sampling(config: GenerateConfig, model: StreamFusedModel) -> GenerateConfig:
    """`config` with its open sampling settings filled in from the model, and a seed."""
    config = config.following(model.backbone.origin.sampling)
    if config.seed is not None or config.temp == 0:
        return config
    if config.deterministic:
        return replace(config, seed=0)
    # From MLX's random state of the calling thread, which changes.
    return replace(config, seed=to_int(mx.random.randint(0, 2**31 - 1)))


def check_prompt(
    model: StreamFusedModel,
    tokens: Sequence[int],
    *,
    num_cached: int = 0,  # tokens of the text before them
    others: Sequence[int] = (),  # that belong to the vocabulary too
) -> None:
    """Refuse a prompt that is empty, leaves no room for an answer, or has unknown tokens."""
    num_tokens = num_cached + len(tokens)
    limit = model.backbone.context_length
    require(
        len(tokens) > 0, "the prompt is empty", expected="at least one token", do="enter a prompt"
    )
    if limit is not None and num_tokens >= limit:
        raise ContextLengthError(num_tokens, limit)
    size = model.backbone.vocab_size
    unknown = next((token for token in chain(others, tokens) if not 0 <= token < size), None)
    found = f"the prompt has the token {unknown}"
    expected = f"ids from 0 to {size - 1}"
    require(unknown is None, found, expected=expected, do="check the prompt and its tokenizer")


def plan_answer_segments(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig,
    *,
    cache: TextCache | None = None,
    context: Sequence[int] = (),
    # called once with what was yielded, when the answer has ended, failed or was given up; not if
    # it was never begun
    done: Callable[[GivenAnswer], None] | None = None,
    # decodes under a plan: `decode_plan`, or what counts memory or batches around it
    decode: Decode = decode_plan,
    loaded: Sequence[Loaded] = (),  # to draft with
    earlier: EarlierAnswers | None = None,
    # whether the text goes on from the prompt's, its leading space included
    joins_prompt: bool = False,
) -> Generator[GenerationResponse | Prefilled]:
    """The segments of an answer, computed as they are read, on the MLX thread alone.

    The prompt is checked, and the plan made, when this is called. A `Prefilled` comes before the
    first segment whenever `decode` gives None, as before each piece of the prompt.
    """
    tokens = encode(prompt, tokenizer) if isinstance(prompt, str) else token_ids(prompt)
    context = token_ids(context)
    cache = cache if cache is not None else model.make_cache()
    num_cached = cache.offset
    num_prompt = num_cached + len(tokens)
    others = [*context, *token_ids(config.prompt_lookup.reference)]
    check_prompt(model, tokens, num_cached=num_cached, others=others)
    limit = model.backbone.context_length
    room = None if limit is None else limit - num_prompt
    text = AnswerText(tokenizer, config.stop, [*context, *tokens] if joins_prompt else ())
    ends = end_token_ids(model, tokenizer)
    stop_checker = StopChecker(text, ends, config.max_tokens, room)
    thought_ends = (getattr(tokenizer, "think_end_tokens", None) or ())[-1:]
    plan = make_plan(
        model,
        config,
        drafter=loaded,
        context=num_prompt,
        earlier=earlier,
        end_tokens={*ends, *thought_ends},
    )
    steps = decode(
        plan,
        model,
        tokens,
        cache,
        context=context,
        take=stop_checker.take,
    )

    def measured(reason: FinishReason | None) -> dict[str, Any]:
        """Measure the other fields of a segment; memory only for the last."""
        return {
            "peak_memory": mx.get_peak_memory() / 1e9,
            "draft_model_calls": plan.draft_model_calls,
            "lossy": plan.lossy,
            "memory": measure_memory(model, cache, plan.drafters, plan.loaded) if reason else None,
        }

    def decode_segments() -> Generator[GenerationResponse | Prefilled]:
        """Decode, a segment for each call, with weights wired."""
        started = time.perf_counter()
        total = len(tokens) - 1
        given = GivenAnswer()
        with wired_weights():
            try:
                with closing(steps):
                    for first in steps:
                        if first is not None:
                            break
                        yield Prefilled(cache.offset - num_cached, total)
                    whole = filter(None, chain([first], steps))
                    for response in build_responses(
                        whole, num_prompt, num_cached, measured, started
                    ):
                        given.add(response)
                        yield response
            finally:
                try:
                    # The cache's next user must find no work of this answer in it.
                    mx.eval(cache.state)
                    plan.finish()
                    if earlier is not None and given.tokens:
                        earlier.add([*context, *tokens], given.tokens)
                finally:  # a failed call's work may fail again
                    if done is not None:
                        done(given)

    return decode_segments()


def token_ids(tokens: Any) -> list[int]:
    """Ints of a sequence of token ids, or of an array of NumPy or MLX."""
    is_row = isinstance(tokens, Sequence) or hasattr(tokens, "tolist")
    if is_row and not isinstance(tokens, str | bytes | bytearray | memoryview):
        items = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        with suppress(TypeError):  # items of another type, or a number alone
            if not any(isinstance(one, bool) for one in items):
                return [index(one) for one in items]
    raise InputError(
        f"the prompt is {quoted(tokens)}",
        expected="text, or token ids: a list of integers, or a one-dimensional array",
        do="decode bytes to text, or convert it to a list",
    )


def build_responses(
    steps: Iterator[Step],
    num_prompt: int,  # tokens of the prompt, cached ones included
    num_cached: int,  # tokens of the prompt that were cached
    # other fields of a segment, by its finish reason
    measured: Callable[[FinishReason | None], dict[str, Any]],
    started: float | None = None,  # when the answer began, of `time.perf_counter`; now unless given
) -> Iterator[GenerationResponse]:
    """Build an answer's segments from the step of each target call, up to the answer's end."""
    started = first_done = time.perf_counter() if started is None else started
    totals = DraftTotals()
    num_tokens = 0
    for calls, step in enumerate(steps, 1):
        now = time.perf_counter()
        first_done = now if calls == 1 else first_done
        part = step.part
        num_tokens += len(part.tokens)
        totals.add_draft_of(step)
        yield GenerationResponse(
            text=part.text,
            tokens=part.tokens,
            finish_reason=part.finish_reason,
            prompt_tokens=num_prompt,
            generation_tokens=num_tokens,
            target_calls=calls,
            prefill_seconds=first_done - started,
            decode_seconds=now - first_done,
            cached_tokens=num_cached,
            stop=part.stop,
            logprobs=None if step.logprobs is None else step.logprobs[: len(part.tokens)],
            drafted_tokens=totals.drafted_tokens,
            drafts={**totals.drafts},
            **measured(part.finish_reason),
        )
        if part.is_last:
            return
