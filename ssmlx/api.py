"""Text in, text out: what `import ssmlx` gives beside `load`."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import index
from typing import Any, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answers import Answer, Prefilled, run_on_mlx_thread, wired_weights
from .bars import Progress
from .decoding.sampling import TokenLogprobs
from .decoding.step import AnswerPart, DraftCounts, DraftTotals, FinishReason, Step
from .detokenizer import Detokenizer
from .drafters.registry import DrafterArgument, Loaded, split_drafter_arguments
from .drafters.text_index import EarlierAnswers
from .errors import ContextLengthError, InputError, quoted, require
from .generation.memory import Memory, measure_memory
from .generation.plan import Decode, decode_plan, make_plan
from .model.cache import TreeCache
from .model.shapes import to_int
from .model.streams import StreamFusedModel
from .prompts import encode
from .settings import GenerateConfig


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


@dataclass
class GivenAnswer:
    """What was given out of an answer so far, its last segment alone kept whole."""

    texts: list[str] = field(default_factory=list)  # of each segment
    tokens: list[int] = field(default_factory=list)
    last: GenerationResponse | None = None  # None before the first segment

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.texts)

    def add(self, segment: GenerationResponse) -> None:
        """Append the text and the tokens of `segment`, which is the last one now."""
        self.texts.append(segment.text)
        self.tokens += segment.tokens
        self.last = segment


class AnswerText:
    """The text of an answer as its tokens come, up to where a stop string begins.

    What could be the beginning of a stop string is held back until it turns out not to be.

    Args:
        tokenizer: as `load` returns it.
        stop: the stop strings.
        behind: tokens that the answer's text goes on from; without any it is that of a beginning.

    Attributes:
        ended_by: the stop string that was found, None before.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, stop: Sequence[str] = (), behind: Sequence[int] = ()
    ) -> None:
        """Begin without tokens: no text, and no stop string found.

        The arguments are explained at the class.
        """
        self._detokenizer = Detokenizer(tokenizer, behind)
        self._stop = stop
        self._text = ""  # what was not given out yet
        self._end: int | None = None  # where a stop string begins in it
        self.ended_by: str | None = None

    def add(self, token: int) -> bool:
        """Append the next token; returns whether a stop string begins in the text that is not given
        out.

        Of several the one that begins first counts, and is kept in `ended_by`. Text that the
        tokenizer may still change counts as it would be now.
        """
        self._text += self._detokenizer.add(token)
        if self._stop:
            text = (self._text + self._detokenizer.held_back_text()).rstrip(
                "\N{REPLACEMENT CHARACTER}"
            )
            found = {stop: text.find(stop) for stop in self._stop}
            found = {stop: place for stop, place in found.items() if place >= 0}
            self.ended_by = min(found, key=found.__getitem__, default=None)
            self._end = None if self.ended_by is None else found[self.ended_by]
        return self._end is not None

    def take_segment(self, *, is_last: bool) -> str:
        """Take out and return the text that is certain since the last segment; with `is_last`, all
        of it.

        Text that may begin a stop string, or that the tokenizer may still change, is held back
        until then. The text ends where a stop string begins, which is never given out.
        """
        if is_last:
            self._text += self._detokenizer.held_back_text()
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
        """Whether any stop string begins with `end`."""
        return any(stop.startswith(end) for stop in self._stop)


@dataclass
class StopChecker:
    """Takes the tokens of an answer's calls, and decides where it ends.

    An answer ends with an end token or a stop string, after `max_tokens`, or where the model's
    context is full.

    Attributes:
        text: gets every token of the answer.
        end_tokens: tokens that end it.
        max_tokens: tokens of the answer at most.
        context_room: tokens that still fit into the context; None where that has no limit.
        is_full: whether there is no room for another call, where calls need more than a token.
        generated: tokens of the answer so far.
    """

    text: AnswerText
    end_tokens: Set[int]
    max_tokens: int
    context_room: int | None = None
    is_full: Callable[[], bool] = lambda: False
    generated: int = 0

    def take(self, tokens: Sequence[int]) -> AnswerPart:
        """Append the tokens of a call to the answer, up to where it ends.

        To be called once for each call, in order.

        Returns:
            What of them belongs to the answer. Of reasons why it ends, "stop" goes before "length",
            that before "context".
        """
        count, reason = self._count_until_end(tokens)
        text = self.text.take_segment(is_last=reason is not None)
        return AnswerPart(tuple(tokens[:count]), text, reason, self.text.ended_by)

    def _count_until_end(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Count the next tokens, and add them to the text, up to the one that ends the answer.

        Returns:
            How many these are, and why the answer ends with them; None where it does not.
        """
        for count, token in enumerate(tokens, 1):
            self.generated += 1
            if token in self.end_tokens or self.text.add(token):
                return count, "stop"
            if self.generated == self.max_tokens:
                return count, "length"
            if self.generated == self.context_room:
                return count, "context"
        return len(tokens), "context" if self.is_full() else None


def token_steps(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    config: GenerateConfig | None = None,
    *,
    context: Sequence[int] = (),
    **more: Any,
) -> Iterator[Step]:
    """Decode `prompt` without end, yielding a step for each call; nothing stops it.

    MLX runs on the thread that reads, which has to be one and the same. The plan is made now.

    Args:
        model, prompt, cache, context: see `decode_plan`.
        config, more: the settings, as `make_plan` takes them.
    """
    plan = make_plan(model, config, context=cache.offset + len(prompt), **more)
    return filter(None, decode_plan(plan, model, prompt, cache, context=context))


def check_prompt_length(model: StreamFusedModel, num_tokens: int) -> None:
    """Raise InputError where `num_tokens` is 0, and ContextLengthError where a prompt of so many
    leaves no room for a token of an answer in the model's context, if that has a limit."""
    limit = model.backbone.context_length
    require(num_tokens > 0, "the prompt is empty", expected="a token or more", do="give a prompt")
    if limit is not None and num_tokens >= limit:
        raise ContextLengthError(num_tokens, limit)


def check_tokens(model: StreamFusedModel, tokens: Sequence[int]) -> None:
    """Raise InputError where `tokens` has an id outside the vocabulary; the message names the first
    of them.
    """
    size = model.backbone.vocab_size
    unknown = next((token for token in tokens if not 0 <= token < size), None)
    found = f"the prompt has the token {unknown}"
    expected = f"ids from 0 to {size - 1}"
    require(unknown is None, found, expected=expected, do="check it, or its tokenizer")


def end_token_ids(model: StreamFusedModel, tokenizer: TokenizerWrapper) -> set[int]:
    """Ids of tokens that end an answer: the tokenizer's end tokens and the adapter's."""
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

    It may be called, and read, on any thread; see `Answer`. What `model` and `drafter` hold is only
    read, so any number of answers may be open at once; a `cache` belongs to one of them.

    Args:
        model, tokenizer: as `load` returns them.
        prompt: text (a template, if any, already applied) or token ids.
        config: settings; `GenerateConfig()` unless given.
        drafter: what drafts: a name of `ssmlx.settings.DRAFTERS`; what was loaded to draft with, by
            `ssmlx.load_draft_model`, `ssmlx.load_heads` or `ssmlx.load_mtp`; or a sequence of
            these, of which the first that was loaded drafts unless one is named here or in
            `config`. Unless given, the model's streams, or the head that it brings along or that is
            in the Hub's cache, and the text.
        draft_model, heads: older names of it.
        cache: holds what comes before the prompt; a fresh one unless given. It is left holding
            prompt and answer but for the last token, and maybe rows of tokens behind the answer,
            which `keep_first` takes back.
        context: the tokens that `cache` holds; penalties read them, and drafters that look tokens
            up or have a cache of their own (prompt lookup, lookahead, a draft model).
        progress: called with (tokens processed, tokens in all) while the prompt is processed.
        earlier: what the session answered before: what this answer repeats of it is drafted, and
            it is added. An `ssmlx.Engine` and its chats keep their own.
        settings: single fields of `GenerateConfig`, such as `max_tokens=100`.

    Returns:
        The answer: iterate over it, or `async` over it; `cancel` stops it.

    Raises:
        InputError: the prompt is empty or too long, or the settings do not fit the model.
        TypeError: `GenerateConfig` has no field of such a name.
    """
    config = with_seed_if_sampling(replace(config or GenerateConfig(), **settings))
    config, loaded = split_drafter_arguments(config, drafter, draft_model, heads)
    opened = partial(
        plan_answer_segments,
        model,
        tokenizer,
        prompt,
        config,
        loaded=loaded,
        cache=cache,
        context=context,
        earlier=earlier,
    )
    return Answer(run_on_mlx_thread(opened), progress)


def with_seed_if_sampling(config: GenerateConfig) -> GenerateConfig:
    """`config` with a seed, if it samples (`temp` above 0) and has none; else as it is.

    The seed is drawn from MLX's random state of the calling thread, which changes; with
    `deterministic` it is 0.
    """
    if config.seed is not None or config.temp == 0:
        return config
    if config.deterministic:
        return replace(config, seed=0)
    return replace(config, seed=to_int(mx.random.randint(0, 2**31 - 1)))


def plan_answer_segments(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig,
    *,
    cache: TreeCache | None = None,
    context: Sequence[int] = (),
    done: Callable[[GivenAnswer], None] | None = None,
    decode: Decode = decode_plan,
    loaded: Sequence[Loaded] = (),
    earlier: EarlierAnswers | None = None,
    joins_prompt: bool = False,
) -> Iterator[GenerationResponse | Prefilled]:
    """The segments of an answer, computed as they are read, on the MLX thread alone.

    The prompt is checked, and the plan made, when this is called.

    Args:
        model, tokenizer, prompt, config, cache, context, earlier: as `stream_generate` takes them.
        done: called once with what was given out, when the answer has ended, failed or was given
            up; not where it was never begun.
        decode: decodes under a plan: `decode_plan`, or what counts memory or batches around it.
        loaded: what was loaded to draft with.
        joins_prompt: whether the text goes on from the prompt's, its leading space included.

    Returns:
        An iterator of segments, with a `Prefilled` in the place of one before the first, for each
        piece of the prompt.

    Raises:
        InputError: the prompt or the settings cannot be followed.
    """
    tokens = encode(prompt, tokenizer) if isinstance(prompt, str) else _token_ids(prompt)
    context = _token_ids(context)
    cache = cache if cache is not None else model.make_cache()
    num_cached = cache.offset
    num_prompt = num_cached + len(tokens)
    check_prompt_length(model, num_prompt if tokens else 0)
    check_tokens(model, [*context, *tokens, *_token_ids(config.prompt_lookup.reference)])
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
        """Fields of a segment that its tokens do not say; memory only where `reason` says that it
        is the last."""
        return {
            "peak_memory": mx.get_peak_memory() / 1e9,
            "draft_calls": plan.draft_calls,
            "lossy": plan.lossy,
            "memory": measure_memory(model, cache, plan.drafters, plan.loaded) if reason else None,
        }

    def decode_segments() -> Iterator[GenerationResponse | Prefilled]:
        """Decode, a segment for each call, with weights wired.

        In the end, also where it fails or is closed: compute the cache, keep what was learned, add
        the answer to `earlier`, and call `done`.
        """
        started = time.perf_counter()
        total = len(tokens) - 1
        given = GivenAnswer()
        with wired_weights():
            try:
                with closing(cast("Generator[Step | None]", steps)):
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
                    # Whoever uses the cache next must find no work of this answer in it.
                    mx.eval(cache.state)
                    plan.finish()
                    if earlier is not None and given.tokens:
                        earlier.add([*context, *tokens], given.tokens)
                finally:  # a failed call's work may fail again
                    if done is not None:
                        done(given)

    return decode_segments()


def _token_ids(tokens: Any) -> list[int]:
    """A list of ints of a sequence of token ids, or of an array of NumPy or MLX.

    Raises:
        InputError: it is no such thing; the message calls it the prompt.
    """
    try:
        return [index(one) for one in getattr(tokens, "tolist", lambda: tokens)()]
    except TypeError as error:
        found = f"the prompt is {quoted(tokens)}"
        expected = "a text, or token ids"
        raise InputError(found, expected=expected, do="check it") from error


def build_responses(
    steps: Iterator[Step],
    num_prompt: int,
    num_cached: int,
    measured: Callable[[FinishReason | None], dict[str, Any]],
    started: float | None = None,
) -> Iterator[GenerationResponse]:
    """Make an answer's segments from the step of each target call, up to where the answer ends.

    Args:
        steps: one for each call.
        num_prompt: tokens of the prompt, cached ones included.
        num_cached: tokens of the prompt that were cached.
        measured: called with a segment's finish reason, None before the last: its other fields.
        started: when the answer began, of `time.perf_counter`; now unless given.
    """
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


def generate(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig | None = None,
    *,
    verbose: bool = False,
    **more: Any,
) -> str:
    """Generate an answer, wait for it, and return its whole text.

    Args:
        model, tokenizer, prompt, config, more: as `stream_generate` takes them.
        verbose: print the text as it comes, then a line of statistics and one of memory.

    Raises:
        InputError: see `stream_generate`.
    """
    text = ""
    last = None
    for last in stream_generate(model, tokenizer, prompt, config, **more):
        text += last.text
        if verbose:
            print(last.text, end="", flush=True)
    if verbose and last is not None:
        print(f"\n{summary_line(last)}")
        if last.memory is not None:
            print(last.memory.line())
    return text


def summary_line(response: GenerationResponse) -> str:
    """One line about an answer, of its last segment: tokens, tokens/s, tokens per target call.

    Before these, whether typical acceptance made it lossy; behind them, whether `max_tokens` or the
    model's context has cut it. Nothing of a stop by an end token or a stop string.
    """
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
    """One line about what was drafted for an answer: for each drafter its tokens, calls, and
    accepted tokens; or that nothing was."""
    parts = [
        f"{name} drafted {one.drafted} tokens in {one.calls} calls, {one.accepted} accepted"
        for name, one in response.drafts.items()
    ]
    return "; ".join(parts) or "nothing was drafted"


def answer_record(prompt: str, responses: list[GenerationResponse]) -> dict[str, Any]:
    """JSON values of a whole answer: its prompt, text, tokens and statistics.

    Args:
        prompt: as the user gave it.
        responses: all segments of the answer, one or more.

    Returns:
        An object for `--json`; "logprobs" only where there are any, "memory" None where the last
        segment has none.
    """
    last = responses[-1]
    logprobs = [one for response in responses for one in response.logprobs or ()]
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
        **({"logprobs": [asdict(one) for one in logprobs]} if logprobs else {}),
    }
