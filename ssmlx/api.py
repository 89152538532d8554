"""Text in, text out: what `import ssmlx` gives beside `load`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answers import Answer
from .bars import Progress
from .drafters.registry import DrafterArgument, split_drafter
from .drafters.text_index import EarlierAnswers
from .errors import without_controls
from .generation.plan import Decode, decode_plan
from .generation.samplers import LogitsProcessor, Sampler, decode_with, with_plain_decoding
from .generation.segments import GenerationResponse, plan_answer_segments, resolve_sampling
from .mlx_thread import run_on_mlx_thread
from .model.streams import StreamFusedModel
from .model.text_cache import TextCache
from .prompts import Prompt, last_user_text, require_loaded, require_tokenizer
from .report import counted
from .settings import GenerateConfig, with_settings


def stream_generate(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    config: GenerateConfig | None = None,
    *,
    drafter: DrafterArgument | None = None,
    cache: TextCache | None = None,
    context: Sequence[int] = (),
    progress: Progress | None = None,
    earlier: EarlierAnswers | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    **settings: Any,
) -> Answer[GenerationResponse]:
    """Generate an answer, yielding a segment of it for each target call.

    The prompt and the settings are checked now; all else is computed as the answer is read. It may
    be called, and read, on any thread; see `Answer`. What `model` and `drafter` hold is only read,
    so any number of answers may be open at once; a `cache` belongs to one of them.

    Args:
        model, tokenizer: as `load` returns them.
        prompt: text (a template, if any, already applied) or token ids.
        config: settings; `GenerateConfig()` unless given: tokens are sampled as the model's own
            generation_config.json asks for, and greedily if it says nothing; `temp=0` is greedy.
        drafter: what drafts: a name of `ssmlx.settings.DRAFTERS`, followed by settings as
            `--drafter` takes them, such as "prompt-lookup tokens=3"; what was loaded to draft
            with, by `ssmlx.load_draft_model`, `ssmlx.load_heads` or `ssmlx.load_mtp`; or a sequence
            of these, of which the first that was loaded drafts unless one is named here or in
            `config`. Unless given, the model's streams, or the head that it brings along or that is
            in the Hub's cache, and the text.
        cache: holds what comes before the prompt; a fresh one unless given. It is left holding
            prompt and answer but for the last token, and maybe rows of tokens after the answer,
            which `keep_first` takes back.
        context: the tokens that `cache` holds; penalties read them, and drafters that look tokens
            up or have a cache of their own (prompt lookup, lookahead, a draft model).
        progress: called with (tokens processed, tokens in all) while the prompt is processed.
        earlier: what the session answered before: what this answer repeats of it is drafted, and
            it is added. An `ssmlx.Engine` and its chats keep their own.
        sampler: a function of mlx-lm's kind: of the log probabilities [1, V] of the next token it
            chooses that token, in place of the settings of sampling. Decoding is plain then, and
            so it is with `logits_processors`. Both are called on the thread that runs MLX, whose
            random state then depends on the caller's.
        logits_processors: functions of mlx-lm's kind, called in order with all tokens [T] so far,
            the prompt's too, and the logits [1, V] of the next one; they return the logits to
            decide by.
        settings: single fields of `GenerateConfig`, such as `max_tokens=100`; `temperature` is
            `temp`. Arguments of mlx-lm that are not followed are refused, with what to use instead.

    Returns:
        The answer: iterate over it, or `async` over it; `cancel` stops it.

    Raises:
        InputError: the prompt is empty or too long, or there is no such setting, or the settings do
            not fit the model.
    """
    call = "generate(model, tokenizer, prompt)"
    require_loaded(isinstance(model, StreamFusedModel), model, "model", call)
    require_tokenizer(tokenizer, call)
    config = with_settings(config, settings)
    decode: Decode = decode_plan
    if sampler is not None or logits_processors:
        config = with_plain_decoding(config, sampler)
        decode = decode_with(sampler, logits_processors or ())
    config, loaded = split_drafter(resolve_sampling(config, model), drafter)
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
        decode=decode,
    )
    return Answer(run_on_mlx_thread(opened), progress)


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
        verbose: print the text as it comes, on a terminal without control characters; then a line
            of statistics and one of memory.

    Raises:
        InputError: see `stream_generate`.
    """
    text = ""
    last = None
    for last in stream_generate(model, tokenizer, prompt, config, **more):
        text += last.text
        if verbose:
            is_terminal = sys.stdout.isatty()
            print(without_controls(last.text) if is_terminal else last.text, end="", flush=True)
    if verbose and last is not None:
        print(f"\n{summary_line(last)}")
        if last.memory is not None:
            print(last.memory.line())
    return text


def summary_line(response: GenerationResponse) -> str:
    """One line about an answer, of its last segment: tokens, tokens/s, tokens per target call."""
    parts = ["LOSSY (typical acceptance)"] if response.lossy else []
    parts += [
        counted(response.generation_tokens, "token"),
        f"{response.generation_tps:.1f} tokens/s",
        f"{response.tokens_per_call:.2f} tokens per target call",
    ]
    if response.finish_reason == "length":
        parts.append("cut at --max-tokens")
    if response.finish_reason == "context":
        parts.append("the context is full")
    return " · ".join(parts)


def drafts_line(response: GenerationResponse) -> str:
    parts = [
        f"{name} drafted {one.drafted} tokens in {one.calls} calls, {one.accepted} accepted"
        for name, one in response.drafts.items()
    ]
    return "; ".join(parts) or "nothing was drafted"


def answer_record(
    prompt: Prompt,  # with whatever else its line holds
    responses: list[GenerationResponse],  # all segments of the answer, one or more
) -> dict[str, Any]:
    """JSON values of a whole answer, for `--jsonl`, with other fields of its prompt's line."""
    last = responses[-1]
    logprobs = [one for response in responses for one in response.logprobs or ()]
    return {
        **{name: value for name, value in prompt.items() if name not in ("messages", "tools")},
        "prompt": last_user_text(prompt),
        "text": "".join(response.text for response in responses),
        "tokens": [token for response in responses for token in response.tokens],
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "target_calls": last.target_calls,
        "tokens_per_call": round(last.tokens_per_call, 4),
        "prefill_seconds": round(last.prefill_seconds, 6),
        "decode_seconds": round(last.decode_seconds, 6),
        "draft_model_calls": last.draft_model_calls,
        "drafts": {name: asdict(one) for name, one in last.drafts.items()},
        "lossy": last.lossy,
        "memory": asdict(last.memory) if last.memory else None,
        **({"logprobs": [asdict(one) for one in logprobs]} if logprobs else {}),
    }
