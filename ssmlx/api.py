"""Text in, text out: what `import ssmlx` gives beside `load`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import wired_limit
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .cache import TreeCache
from .config import PruneConfig, TreeConfig
from .decode import PREFILL_STEP_SIZE, Progress, Sampler, greedy, plain_decode, streaming_decode
from .draft import StreamDrafter
from .errors import InputError
from .model import StreamFusedModel
from .prompts import encode

Decoding = Literal["streaming", "plain"]
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How to generate; the same settings for every command.

    Attributes:
        decoding: "streaming" or "plain"; None streams where the model has streams.
        max_tokens: most tokens to generate.
        tree, prune: the draft tree and its pruning.
        num_streams: streams to use, at most as many as were trained; None for all.
        temp: sampling temperature; 0 is greedy.
        seed: of the sampler; None leaves MLX's random state as it is.
        prefill_step_size: prompt tokens per forward pass.
    """

    decoding: Decoding | None = None
    max_tokens: int = 256
    tree: TreeConfig = field(default_factory=TreeConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    num_streams: int | None = None
    temp: float = 0.0
    seed: int | None = None
    prefill_step_size: int = PREFILL_STEP_SIZE

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "prefill_step_size": 1, "temp": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not value >= minimum:
                raise InputError(
                    f"--{name.replace('_', '-')} {value}",
                    expected=f"{minimum} or more",
                    do="give a larger value",
                )

    def resolved_decoding(self, model: StreamFusedModel) -> Decoding:
        """The decoding that `model` gets.

        Raises:
            InputError: streaming is asked of a model without streams.
        """
        if self.decoding == "streaming" and model.num_streams == 0:
            raise InputError(
                "streaming was asked for, but the model has no streams",
                expected="an adapter",
                do="give --adapter FOLDER, or --decoding plain",
            )
        return self.decoding or ("streaming" if model.num_streams else "plain")


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
    """Rows that a step may have, for sizing a cache once."""
    streams = check_streams(model, config)
    return config.tree.num_nodes(streams) * (1 + streams)


def check_streams(model: StreamFusedModel, config: GenerateConfig) -> int:
    """G, the streams to use.

    Raises:
        InputError: more than were trained, none, or pruning without a pruning adapter.
    """
    streams = model.num_streams if config.num_streams is None else config.num_streams
    if not 1 <= streams <= model.num_streams:
        raise InputError(
            f"--num-streams {streams}",
            expected=f"1 to {model.num_streams}, as many as the adapter was trained with",
            do="choose a number in that range",
        )
    if config.prune.kind != "off" and (model.streams is None or model.streams.prune is None):
        raise InputError(
            f"--prune {config.prune.kind}, but the adapter has no pruning adapter",
            expected="prune_adapter.* among its stream weights",
            do="use --prune off, or train one",
        )
    return streams


def _sampler(config: GenerateConfig) -> Sampler:
    if config.seed is not None:
        mx.random.seed(config.seed)
    return greedy if config.temp == 0 else make_sampler(temp=config.temp)


def token_steps(
    model: StreamFusedModel,
    prompt: list[int],
    cache: TreeCache,
    config: GenerateConfig,
    progress: Progress | None = None,
) -> Iterator[list[int]]:
    """The endless decoding loop that `config` asks for; see `decode`."""
    sampler, step_size = _sampler(config), config.prefill_step_size
    if config.resolved_decoding(model) == "plain":
        return plain_decode(
            model, prompt, cache, sampler=sampler, prefill_step_size=step_size, progress=progress
        )
    return streaming_decode(
        model,
        prompt,
        cache,
        drafter=StreamDrafter(model, config.tree, check_streams(model, config)),
        prune=config.prune,
        sampler=sampler,
        prefill_step_size=step_size,
        progress=progress,
    )


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
class _Budget:
    """Where an answer ends: at an end token, at `max_tokens`, or at the context's end."""

    end_tokens: set[int]
    max_tokens: int
    context_room: int | None

    def cut(self, step: list[int], generated: int) -> tuple[list[int], FinishReason | None]:
        """The part of `step` that belongs to the answer, and why it ends if it does."""
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
    budget = _Budget(end_token_ids(model, tokenizer), config.max_tokens, room)
    steps = token_steps(model, tokens, cache, config, progress)
    return _responses(model, tokenizer, steps, budget, num_prompt)


def _responses(
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
    steps: Iterator[list[int]],
    budget: _Budget,
    num_prompt: int,
) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer
    generated = 0
    started = first_done = time.perf_counter()
    with wired_memory(model):
        for calls, step in enumerate(steps, 1):
            now = time.perf_counter()
            first_done = now if calls == 1 else first_done
            step, reason = budget.cut(step, generated)
            generated += len(step)
            for token in step[:-1] if reason == "stop" else step:
                detokenizer.add_token(token)
            if reason:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                tokens=tuple(step),
                finish_reason=reason,
                prompt_tokens=num_prompt,
                generation_tokens=generated,
                target_calls=calls,
                prefill_seconds=first_done - started,
                decode_seconds=now - first_done,
                peak_memory=mx.get_peak_memory() / 1e9,
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
    return text


def summary(response: GenerationResponse, plain_tps: float | None = None) -> str:
    """One quiet line about an answer: tokens/s, tokens per target call, speed-up if known."""
    parts = [
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
