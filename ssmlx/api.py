"""Text in, text out: what `import ssmlx` gives beside `load`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoding.drafter import Drafter
from .decoding.loop import Ends, Progress, never, plain_decode, scratch_rows, streaming_decode
from .decoding.sampling import Sampling
from .drafters.choice import make_drafter
from .errors import InputError
from .memory import Memory, memory_of
from .model.cache import TreeCache
from .model.streams import StreamFusedModel
from .plan import GenerateConfig
from .prompts import encode
from .response import Budget, GenerationResponse, summary
from .settings import TEXT_DRAFTERS
from .tuning.profile import pace_of, settled, settled_behind


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
    num_tokens = cache.offset + len(prompt)
    config = settled_behind(config, model, num_tokens)
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
        pace=pace_of(config, model, num_tokens),
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
            (`ssmlx.settings.TEXT_DRAFTERS`).
        progress: told (tokens processed, tokens in all) while the prompt is processed.
        settings: single fields of `GenerateConfig`, such as `max_tokens=100`.

    Raises:
        InputError: the prompt is empty or too long, or the settings do not fit the model.
    """
    config = replace(config or GenerateConfig(), **settings)
    tokens = encode(prompt, tokenizer) if isinstance(prompt, str) else [int(t) for t in prompt]
    cache = cache if cache is not None else model.make_cache()
    num_cached = cache.offset
    num_prompt = num_cached + len(tokens)
    check_prompt(model, num_prompt if tokens else 0)
    limit = model.backbone.context_length
    room = None if limit is None else limit - num_prompt
    budget = Budget(end_token_ids(model, tokenizer), config.max_tokens, room)
    steps, drafter = _token_steps(model, tokens, cache, config, progress, context, budget.ends)
    lossy = drafter is not None and config.acceptance.kind != "exact"
    measure = partial(memory_of, model, cache, config, drafter)
    return _responses(
        model, tokenizer, steps, budget, num_prompt, num_cached, drafter, lossy, measure
    )


def _responses(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    steps: Iterator[list[int]],
    budget: Budget,
    num_prompt: int,
    num_cached: int,
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
                cached_tokens=num_cached,
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
