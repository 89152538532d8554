"""A chat of many turns that keeps the cache of the turns before."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .api import GenerationResponse, stream_generate
from .decoding.loop import Progress
from .drafters.draft_model import DraftModel
from .drafters.head_drafter import DraftingHeads
from .errors import require
from .loading.attach import swap_adapter
from .memory import Memory, memory_of
from .model.shapes import to_int
from .model.streams import StreamFusedModel
from .plan import Plan, make_plan
from .prompts import Message, chat_tokens, check_text, common_prefix
from .settings import GenerateConfig


@dataclass
class ChatTotals:
    """What a chat's answers add up to."""

    # answers, tokens, target_calls: counts
    answers: int = 0
    tokens: int = 0
    target_calls: int = 0
    decode_tokens: int = 0  # tokens after each answer's first
    decode_seconds: float = 0.0  # the time that those took
    reused_tokens: int = 0  # prompt tokens that came from the cache
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Comparison:
    """One answer given twice, and the last response of each."""

    same_tokens: bool  # token for token
    streaming: GenerationResponse
    plain: GenerationResponse

    @property
    def speed_up(self) -> float:
        """Tokens/s of streaming over those of plain decoding."""
        return self.streaming.generation_tps / max(self.plain.generation_tps, 1e-9)


class ChatSession:
    """A conversation under the model's chat template, whatever template an adapter brings.

    Args:
        model, tokenizer: as `ssmlx.load` returns them.
        config: settings of every answer.
        draft_model, heads: what is loaded to draft with, as `ssmlx.stream_generate` takes it.
        system: the system prompt; None leaves it to the template.
    """

    def __init__(
        self,
        model: StreamFusedModel,
        tokenizer: TokenizerWrapper,
        config: GenerateConfig | None = None,
        *,
        draft_model: DraftModel | None = None,
        heads: DraftingHeads | None = None,
        system: str | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._drafts: dict[str, Any] = {"draft_model": draft_model, "heads": heads}
        self.config = config or GenerateConfig()
        self.totals = ChatTotals()
        self.plain_tps: float | None = None
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation; `system` becomes the system prompt.

        Raises:
            InputError: `system` is not Unicode text; the conversation stays.
        """
        check_text(system or "")
        self.system = system
        self.messages: list[Message] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self._empty_cache()

    def _empty_cache(self) -> None:
        self._cache = self.model.make_cache(self.plan.scratch)
        self._cached_tokens: list[int] = []
        self._memory: Memory | None = None

    @property
    def plan(self) -> Plan:
        """How answers are decoded; behind a long context, a profile may decide otherwise."""
        return make_plan(self.model, self.config, **self._drafts)

    def swap_adapter(self, adapter: str | Path | None) -> None:
        """Go on with the same base model and conversation under another adapter.

        The cache starts anew, as another adapter's keys and values are others: the next answer
        processes the whole conversation. The model that the session was made with is used up.

        Args:
            adapter: as `ssmlx.swap_adapter` takes it.

        Raises:
            InputError: the adapter cannot be had, or does not fit the model or the settings;
                everything is as it was.
        """
        self.model = swap_adapter(
            self.model, adapter, check=lambda model: make_plan(model, self.config, **self._drafts)
        )
        self.plain_tps = None
        self._empty_cache()

    @property
    def memory(self) -> Memory:
        """Where the memory goes: at the end of the last whole answer, or now if there is none."""
        return self._memory or memory_of(self.model, self._cache, loaded=self.plan.loaded)

    @property
    def cache_bytes(self) -> int:
        """Size of the key/value cache."""
        return self._cache.nbytes

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache."""
        return self._cache.offset

    def reply(self, text: str, progress: Progress | None = None) -> Iterator[GenerationResponse]:
        """Answer `text`, segment by segment. Closing the iterator stops the answer and keeps it.

        Raises:
            InputError: the conversation no longer fits the context; the turn does not count.
        """
        question: Message = {"role": "user", "content": text}
        prompt = chat_tokens(self.tokenizer, [*self.messages, question])
        # At least one token is left to process.
        reused = common_prefix(self._cached_tokens, prompt[:-1])
        self._cache.trim(reused)
        del self._cached_tokens[reused:]
        responses = stream_generate(
            self.model,
            self.tokenizer,
            prompt[reused:],
            self.config,
            cache=self._cache,
            context=prompt[:reused],
            progress=progress,
            **self._drafts,
        )
        return self._answer(question, prompt, reused, responses)

    def _answer(
        self,
        question: Message,
        prompt: list[int],
        reused: int,
        responses: Iterator[GenerationResponse],
    ) -> Iterator[GenerationResponse]:
        text, last, written = "", None, list(prompt)
        self.messages.append(question)
        try:
            for last in responses:
                text += last.text
                written.extend(last.tokens)
                yield last
        finally:
            self.messages.append({"role": "assistant", "content": text})
            # What was written is in the cache, as far as it got.
            self._cache.trim(min(self._cache.offset, len(written)))
            self._cached_tokens = written[: self._cache.offset]
            totals = self.totals
            totals.reused_tokens += reused
            if last is not None:
                totals.answers += 1
                totals.tokens += last.generation_tokens
                totals.target_calls += last.target_calls
                totals.decode_tokens += last.generation_tokens - 1
                totals.decode_seconds += last.decode_seconds
                totals.prompt_tokens += last.prompt_tokens
                self._memory = last.memory

    def compare(self) -> Comparison:
        """Answer the last message twice more, streaming and plain, beside the conversation.

        Sampled answers get the same seed.

        Raises:
            InputError: nothing was said yet.
        """
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        found, do = "nothing was said yet", "say something first"
        require(bool(users), found, expected="a message to answer", do=do)
        prompt = chat_tokens(self.tokenizer, self.messages[: users[-1] + 1])
        # The same noise for both, or two samples would be compared.
        seed = self.config.seed
        if seed is None and self.config.temp > 0:
            seed = to_int(mx.random.randint(0, 2**31 - 1))
        config = replace(self.config, seed=seed)
        model, tokenizer = self.model, self.tokenizer
        streaming, plain = (
            list(stream_generate(model, tokenizer, prompt, one, **self._drafts))
            for one in (replace(config, decoding="streaming"), replace(config, decoding="plain"))
        )
        streamed, expected = (
            [token for response in answer for token in response.tokens]
            for answer in (streaming, plain)
        )
        self.plain_tps = plain[-1].generation_tps
        return Comparison(streamed == expected, streaming[-1], plain[-1])
