"""Text in, text out: what `import ssmlx` gives beside `load`."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import index
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answers import Answer, Prefilled, run, wired
from .bars import Progress
from .decoding.loop import CallCounts, DraftCounts
from .decoding.sampling import TokenLogprobs
from .detokenizer import Detokenizer
from .drafters.registry import DrafterArgument, Loaded, with_drafter
from .drafters.text_index import EarlierAnswers
from .errors import ContextLengthError, InputError, quoted, require
from .generation.memory import Memory, memory_of
from .generation.plan import Decode, decode_plan, make_plan
from .model.cache import TreeCache
from .model.shapes import to_int
from .model.streams import StreamFusedModel
from .prompts import encode
from .settings import GenerateConfig

FinishReason = Literal["stop", "length", "context"]


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
        draft_calls: forward passes of a draft model so far.
        cached_tokens: tokens of the prompt that the cache held already.
        lossy: whether tokens were accepted that the target might not have written.
        memory: where the memory goes; on the last segment alone.
        logprobs: those of each token; None where `GenerateConfig.logprobs` is.
        stop: the text of `GenerateConfig.stop` that ended the answer, if one did.
        drafted_tokens: nodes of the trees that were verified so far, the roots not counted.
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
    draft_calls: int = 0
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


class Text:
    """The text of an answer as its tokens come, up to where a stop string begins.

    What could be the beginning of one is held back until it turns out not to be. `behind` are the
    tokens that the answer goes on from; see `Detokenizer`.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, stop: Sequence[str] = (), behind: Sequence[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, behind)
        self._stop = stop
        self._text = ""  # what was not given out yet
        self._end: int | None = None  # where a stop string begins in it
        self.ended_by: str | None = None  # that stop string

    def add(self, token: int) -> bool:
        """Whether a token, the next one, completes a stop string."""
        self._text += self._detokenizer.add(token)
        if self._stop:
            text = (self._text + self._detokenizer.rest()).rstrip("\N{REPLACEMENT CHARACTER}")
            found = {stop: text.find(stop) for stop in self._stop}
            found = {stop: place for stop, place in found.items() if place >= 0}
            self.ended_by = min(found, key=found.__getitem__, default=None)
            self._end = None if self.ended_by is None else found[self.ended_by]
        return self._end is not None

    def segment(self, *, is_last: bool) -> str:
        """What the tokens since the last segment completed."""
        if is_last:
            self._text += self._detokenizer.rest()
        size = len(self._text) - (0 if is_last else self._held_back())
        size = size if self._end is None else self._end
        given = self._text[:size]
        self._text = self._text[size:]
        return given

    def _held_back(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        sizes = range(min(longest, len(self._text)), 0, -1)
        return next((size for size in sizes if self._is_begun_by(self._text[-size:])), 0)

    def _is_begun_by(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)


@dataclass
class Budget:
    """Where an answer ends: at an end token or a stop string, at `max_tokens`, or at the context's
    end. It is told the tokens of each step once, and maybe asked before."""

    text: Text
    end_tokens: Set[int]
    max_tokens: int
    context_room: int | None = None  # tokens that still fit; None where it has no limit
    # whether there is no room for another step, where steps need more than a token
    is_full: Callable[[], bool] = lambda: False
    generated: int = 0  # tokens so far
    _asked: tuple[list[int], FinishReason | None] | None = None  # what `cut` will tell

    def ends(self, step: list[int]) -> bool:
        """Whether the answer ends with the tokens of `step`, which `cut` will be told."""
        self._asked = self._take(step)
        return self._asked[1] is not None

    def cut(self, step: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of `step` that belongs to the answer, and why it ends if it does."""
        taken = self._asked or self._take(step)
        self._asked = None
        return taken

    def _take(self, step: list[int]) -> tuple[list[int], FinishReason | None]:
        for count, token in enumerate(step, 1):
            self.generated += 1
            if token in self.end_tokens or self.text.add(token):
                return step[:count], "stop"
            if self.generated == self.max_tokens:
                return step[:count], "length"
            if self.generated == self.context_room:
                return step[:count], "context"
        return step, "context" if self.is_full() else None


def token_steps(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    config: GenerateConfig | None = None,
    *,
    context: Sequence[int] = (),
    **more: Any,
) -> Iterator[list[int]]:
    """The tokens of each call of the endless decoding loop that `make_plan` makes of `config` and
    `more`: what is loaded to draft with, and single fields of `GenerateConfig`.

    On the thread that reads them, and no other.
    """
    plan = make_plan(model, config, context=cache.offset + len(prompt), **more)
    return filter(None, decode_plan(plan, model, prompt, cache, context=context))


def check_prompt(model: StreamFusedModel, num_tokens: int) -> None:
    """Raises InputError where a prompt of so many tokens is empty, or leaves no room to answer."""
    limit = model.backbone.context_length
    require(num_tokens > 0, "the prompt is empty", expected="a token or more", do="give a prompt")
    if limit is not None and num_tokens >= limit:
        raise ContextLengthError(num_tokens, limit)


def check_tokens(model: StreamFusedModel, tokens: Sequence[int]) -> None:
    """Raises InputError where one of `tokens` is none of the model's."""
    size = model.backbone.vocab_size
    unknown = next((token for token in tokens if not 0 <= token < size), None)
    found = f"the prompt has the token {unknown}"
    expected = f"ids from 0 to {size - 1}"
    require(unknown is None, found, expected=expected, do="check it, or its tokenizer")


def end_token_ids(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> set[int]:
    """Tokens that end an answer: the tokenizer's and the adapter's."""
    return set(tokenizer.eos_token_ids) | set(model.config.end_token_ids if model.config else ())


def stream_generate(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig | None = None,
    *,
    drafter: DrafterArgument | None = None,
    draft_model: Loaded | None = None,
    heads: Loaded | None = None,
    cache: TreeCache | None = None,
    context: Sequence[int] = (),
    progress: Progress | None = None,
    earlier: EarlierAnswers | None = None,
    **settings: Any,
) -> Answer[GenerationResponse]:
    """Generate an answer, yielding a segment of it for each target call.

    From any thread, and for any; see `Answer`. What `model` and `drafter` hold is only read, so any
    number of answers may be open at once; a `cache` belongs to one of them.

    Args:
        model, tokenizer: as `load` returns them.
        prompt: text (a template, if any, already applied) or token ids.
        config: settings; `GenerateConfig()` unless given.
        drafter: what drafts: a name of `ssmlx.settings.DRAFTERS`; what was loaded to draft with, by
            `ssmlx.load_draft_model` or `ssmlx.load_heads`; or a sequence of these, of which the
            first that was loaded drafts unless one is named here or in `config`.
        draft_model, heads: older names of it.
        cache: holds what comes before the prompt, and is left holding prompt and answer but
            for the last token, or more; a fresh one unless given.
        context: the tokens that `cache` holds; penalties read them, and drafters that look tokens
            up or have a cache of their own (prompt lookup, lookahead, a draft model).
        progress: told (tokens processed, tokens in all) while the prompt is processed.
        earlier: what the session answered before: what this answer repeats of it is drafted, and
            it is added. An `ssmlx.Engine` and its chats keep their own.
        settings: single fields of `GenerateConfig`, such as `max_tokens=100`.

    Raises:
        InputError: the prompt is empty or too long, or the settings do not fit the model.
        TypeError: `GenerateConfig` has no field of such a name.
    """
    config = with_seed(replace(config or GenerateConfig(), **settings))
    config, loaded = with_drafter(config, drafter, draft_model, heads)
    opened = partial(
        segments_of,
        model,
        tokenizer,
        prompt,
        config,
        loaded=loaded,
        cache=cache,
        context=context,
        earlier=earlier,
    )
    return Answer(run(opened), progress)


def with_seed(config: GenerateConfig) -> GenerateConfig:
    """The settings with a seed from MLX's random state, if they sample and have none.

    Every thread has a random state of its own: the caller's counts. Where all is to be
    deterministic, the seed is 0.
    """
    if config.seed is not None or config.temp == 0:
        return config
    if config.deterministic:
        return replace(config, seed=0)
    return replace(config, seed=to_int(mx.random.randint(0, 2**31 - 1)))


def segments_of(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig,
    *,
    cache: TreeCache | None = None,
    context: Sequence[int] = (),
    done: Callable[[list[GenerationResponse]], None] | None = None,
    decode: Decode = decode_plan,
    loaded: Sequence[Loaded] = (),
    earlier: EarlierAnswers | None = None,
    joins_prompt: bool = False,
) -> Iterator[GenerationResponse | Prefilled]:
    """The turns of an answer, for the thread that runs MLX; the arguments are `stream_generate`'s.

    Wherever an answer ends that was begun, `done` is told what was given out of it. The tokens are
    those that `decode` finds, `loaded` is what was loaded to draft with, and `earlier` has the
    session's answers, which this one may repeat, and joins. With `joins_prompt` the text is what
    the prompt's goes on with, its leading space included.
    """
    tokens = encode(prompt, tokenizer) if isinstance(prompt, str) else _ids(prompt)
    context = _ids(context)
    cache = cache if cache is not None else model.make_cache()
    num_cached = cache.offset
    num_prompt = num_cached + len(tokens)
    check_prompt(model, num_prompt if tokens else 0)
    check_tokens(model, [*context, *tokens, *_ids(config.prompt_lookup.reference)])
    limit = model.backbone.context_length
    room = None if limit is None else limit - num_prompt
    text = Text(tokenizer, config.stop, [*context, *tokens] if joins_prompt else ())
    ends = end_token_ids(model, tokenizer)
    budget = Budget(text, ends, config.max_tokens, room)
    thought_ends = (getattr(tokenizer, "think_end_tokens", None) or ())[-1:]
    plan = make_plan(
        model,
        config,
        drafter=loaded,
        context=num_prompt,
        earlier=earlier,
        end_tokens={*ends, *thought_ends},
    )
    logprobs: list[TokenLogprobs] | None = None if config.logprobs is None else []
    counts = CallCounts()
    steps = decode(
        plan,
        model,
        tokens,
        cache,
        context=context,
        stops=budget.ends,
        logprobs=logprobs,
        counts=counts,
    )

    def measured(reason: FinishReason | None) -> dict[str, Any]:
        return {
            "peak_memory": mx.get_peak_memory() / 1e9,
            "draft_calls": plan.draft_calls,
            "lossy": plan.lossy,
            "drafted_tokens": counts.drafted_nodes,
            "drafts": {**counts.drafts},
            "memory": memory_of(model, cache, plan.drafters, plan.loaded) if reason else None,
        }

    def turns() -> Iterator[GenerationResponse | Prefilled]:
        started = time.perf_counter()
        total = len(tokens) - 1
        given: list[GenerationResponse] = []
        said: list[int] = []
        with wired():
            try:
                with closing(cast("Generator[list[int]]", steps)):
                    for first in steps:
                        if first:
                            break
                        yield Prefilled(cache.offset - num_cached, total)
                    whole = chain([first], filter(None, steps))
                    for response in responses_of(
                        whole, budget, num_prompt, num_cached, measured, started, logprobs
                    ):
                        if done is not None:
                            given.append(response)
                        if earlier is not None:
                            said += response.tokens
                        yield response
            finally:
                try:
                    # Whoever uses the cache next must find no work of this answer in it.
                    mx.eval(cache.state)
                    plan.finish()
                    if earlier is not None and said:
                        earlier.add([*context, *tokens], said)
                finally:  # a failed call's work may fail again
                    if done is not None:
                        done(given)

    return turns()


def _ids(tokens: Any) -> list[int]:
    """Token ids in a list, or in an array of NumPy or MLX."""
    try:
        return [index(one) for one in getattr(tokens, "tolist", lambda: tokens)()]
    except TypeError as error:
        found = f"the prompt is {quoted(tokens)}"
        expected = "a text, or token ids"
        raise InputError(found, expected=expected, do="check it") from error


def responses_of(
    steps: Iterator[list[int]],
    budget: Budget,
    num_prompt: int,
    num_cached: int,
    measured: Callable[[FinishReason | None], dict[str, Any]],
    started: float | None = None,
    recorded: list[TokenLogprobs] | None = None,
) -> Iterator[GenerationResponse]:
    """An answer's segments, of the tokens of each target call, up to where `budget` ends it.

    `measured` gives the other fields of a segment, of the reason why it is the last, if it is. The
    answer began when it `started` (of `time.perf_counter`), or begins now. A step's log
    probabilities are taken out of `recorded`.
    """
    started = first_done = time.perf_counter() if started is None else started
    for calls, step in enumerate(steps, 1):
        now = time.perf_counter()
        first_done = now if calls == 1 else first_done
        step, reason = budget.cut(step)
        yield GenerationResponse(
            text=budget.text.segment(is_last=reason is not None),
            tokens=tuple(step),
            finish_reason=reason,
            prompt_tokens=num_prompt,
            generation_tokens=budget.generated,
            target_calls=calls,
            prefill_seconds=first_done - started,
            decode_seconds=now - first_done,
            cached_tokens=num_cached,
            stop=budget.text.ended_by,
            logprobs=None if recorded is None else tuple(recorded[: len(step)]),
            **measured(reason),
        )
        if reason:
            return
        if recorded is not None:
            recorded.clear()


def generate(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig | None = None,
    *,
    verbose: bool = False,
    **more: Any,
) -> str:
    """The whole answer to `prompt`; `verbose` prints it as it comes, with statistics.

    See `stream_generate` for the other arguments, `more` among them, and what is raised.
    """
    text = ""
    last = None
    for last in stream_generate(model, tokenizer, prompt, config, **more):
        text += last.text
        if verbose:
            print(last.text, end="", flush=True)
    if verbose and last is not None:
        print(f"\n{summary(last)}")
        if last.memory is not None:
            print(last.memory.line())
    return text


def summary(response: GenerationResponse) -> str:
    """One quiet line about an answer: tokens, tokens/s, tokens per target call."""
    parts = ["LOSSY (typical acceptance)"] if response.lossy else []
    parts += [
        f"{response.generation_tokens} tokens",
        f"{response.generation_tps:.1f} tokens/s",
        f"{response.tokens_per_call:.2f} tokens per target call",
    ]
    if response.finish_reason == "length":
        parts.append("cut at --max-tokens")
    if response.finish_reason == "context":
        parts.append("the context is full")
    return " · ".join(parts)


def drafts_line(response: GenerationResponse) -> str:
    """One line about what was drafted for an answer, by drafter."""
    parts = [
        f"{name} drafted {one.drafted} tokens in {one.calls} calls, {one.accepted} accepted"
        for name, one in response.drafts.items()
    ]
    return "; ".join(parts) or "nothing was drafted"


def record(prompt: str, responses: list[GenerationResponse]) -> dict[str, Any]:
    last = responses[-1]
    told = [one for response in responses for one in response.logprobs or ()]
    return {
        "prompt": prompt,
        "text": "".join(response.text for response in responses),
        "tokens": [token for response in responses for token in response.tokens],
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "target_calls": last.target_calls,
        "tokens_per_call": round(last.tokens_per_call, 4),
        "prefill_seconds": round(last.prefill_seconds, 6),
        "decode_seconds": round(last.decode_seconds, 6),
        "draft_calls": last.draft_calls,
        "drafts": {name: asdict(one) for name, one in last.drafts.items()},
        "lossy": last.lossy,
        "memory": asdict(last.memory) if last.memory else None,
        **({"logprobs": [asdict(one) for one in told]} if told else {}),
    }
