"""A chat of many turns that keeps the cache of the turns before."""

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answers import Answer, Prefilled
from .api import stream_generate
from .bars import Progress
from .drafters.registry import DrafterArgument, split_drafter
from .drafters.text_index import EarlierAnswers
from .errors import require
from .formats.families import find_format
from .formats.history import answer_turn
from .formats.reader import Begins, begins_after
from .generation.answer_end import end_token_ids
from .generation.divergence import Divergence, find_divergence
from .generation.memory import Memory, measure_memory
from .generation.plan import Decode, choose_drafter, decode_plan, make_plan, within_limit
from .generation.pool import MemoryPool
from .generation.segments import (
    GenerationResponse,
    GivenAnswer,
    plan_answer_segments,
    resolve_sampling,
)
from .loading.attach import swap_adapter
from .mlx_thread import on_mlx_thread, run_on_mlx_thread, unless_forked
from .model.streams import StreamFusedModel
from .model.text_cache import TextCache
from .prompt_cache import PromptCache, place_for_next_turn
from .prompts import (
    Tools,
    adapter_template,
    check_text,
    common_prefix_length,
    encode_turns,
    length_before_answer_opens,
    shows_last_turn_alone,
)
from .settings import GenerateConfig
from .turns import Message, normalise_turns

_TURNS = "ABBAABBA"
"""A: drafting, B: plain. A machine that becomes slower or faster meanwhile favours neither."""
_T_OF_PAIRS = 3.18
"""Student's t for 95 % of four pairs."""


@dataclass
class ChatTotals:
    """Sums over a chat's answers."""

    answers: int = 0
    tokens: int = 0
    target_calls: int = 0
    decode_tokens: int = 0  # tokens after each answer's first
    decode_seconds: float = 0.0  # the time that those took
    reused_tokens: int = 0  # prompt tokens that came from the cache
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Comparison:
    """One answer given several times, drafting and plain in turns."""

    same_tokens: bool  # whether all of them are the same, token for token
    speculative: GenerationResponse  # last response of the last drafting answer
    plain: GenerationResponse  # last response of the last plain one
    # seconds of a plain answer over those of the drafting one next to it, by pair
    ratios: Sequence[float]
    # where an answer parts from the first plain one, if any does
    divergence: Divergence | None = None

    @property
    def speed_up(self) -> float:
        """Whole answers, prompt and all: how many times as fast as plain decoding."""
        return exp(fmean(map(log, self.ratios)))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `speed_up`, of the pairs' logarithms by Student's t."""
        logs = [log(ratio) for ratio in self.ratios]
        half = _T_OF_PAIRS * stdev(logs) / len(logs) ** 0.5
        return exp(fmean(logs) - half), exp(fmean(logs) + half)


class ChatSession:
    """A conversation under the model's chat template; under an adapter's own, single prompts.

    Its replies take turns with other answers, call by call, and never share a call with them.

    Args:
        model, tokenizer: as `ssmlx.load` returns them.
        config: settings of every answer.
        drafter: what drafts, as `ssmlx.stream_generate` takes it.
        system: the system prompt; None leaves it to the template.
        messages: the turns of a conversation to go on with, as `reset` takes them.
        tools, template_args: for the chat template, as `ssmlx.chat_tokens` takes them.
        prompts: prompts that were processed before, to begin with and to add to.
        swap: gives the model with another adapter; `ssmlx.swap_adapter` unless given.
        memory_pool: where its cache counts, with what others hold; nowhere unless given.

    Attributes:
        messages: the conversation so far, with the system prompt: {"role": ..., "content": ...},
            values that JSON can hold. `reset` and `undo` change it.
        begins: what the last reply begins with, as its prompt has it; see `formats/reader.py`.
    """

    def __init__(
        self,
        model: StreamFusedModel,
        tokenizer: TokenizerWrapper,
        config: GenerateConfig | None = None,
        *,
        drafter: DrafterArgument | None = None,
        system: str | None = None,
        messages: Sequence[Message] = (),
        tools: Tools | None = None,
        template_args: Mapping[str, Any] | None = None,
        prompts: PromptCache | None = None,
        swap: Callable[[str | Path | None], StreamFusedModel] | None = None,
        memory_pool: MemoryPool | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._prompts = prompts
        self._swap = swap
        self._pool = memory_pool
        self._is_closed = False
        self._reply: Callable[[], Answer[GenerationResponse] | None] = lambda: None
        self.begins: Begins = "text"
        self._template: dict[str, Any] = {"tools": tools, "template_args": template_args}
        self.config, self._loaded = split_drafter(config or GenerateConfig(), drafter)
        self.totals = ChatTotals()
        self._cached_tokens: list[int] = []
        self.reset(system, messages)

    @on_mlx_thread
    def reset(self, system: str | None = None, messages: Sequence[Message] = ()) -> None:
        """Forget the conversation, and empty its cache; go on with another one if it is given.

        The cache keeps what the other one begins with. The totals, the settings and what a shared
        prompt cache has stay.

        Args:
            system: the system prompt; None leaves it to `messages`, or else to the template.
            messages: the turns of the other conversation, {"role": ..., "content": ...}, such as
                `messages` of a session.

        Raises:
            InputError: `system` is not Unicode text, the chat template cannot show `messages`, the
                system's turn is given twice, a reply is still open, or the session is closed; the
                conversation stays.
        """
        check_text("" if system is None else system)
        self._require_idle()
        turns: list[Message] = [*normalise_turns(messages)]
        told = turns[0]["content"] if turns and turns[0]["role"] == "system" else None
        require(
            not system or told is None,
            'system= beside messages that begin with a turn of "system"',
            expected="one system prompt",
            do="remove one of them",
        )
        if system:
            turns.insert(0, {"role": "system", "content": system})
        shared = 0
        if messages:  # what the template says of them is said now
            prompt = self._encode_turns([*turns, {"role": "user", "content": "Hello"}])
            shared = common_prefix_length(self._cached_tokens, prompt)
        self.system = system if told is None else told
        self.messages: list[Message] = turns
        if shared:
            self._keep_first(shared)
        else:
            self.free_memory()
        self._forget_answers()

    @on_mlx_thread
    def undo(self) -> str:
        """Take back the user's last message, with the answer to it, and return its text.

        Raises:
            InputError: there is no such message, a reply is still open, or the session is closed.
        """
        self._require_idle()
        last = self._last_question()
        text = str(self.messages[last]["content"])
        del self.messages[last:]
        return text

    def _last_question(self) -> int:
        """The place of the user's last message in `messages`."""
        found = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        said = "this chat has no message yet"
        require(bool(found), said, expected="a message of the user's", do="send a message first")
        return found[-1]

    @on_mlx_thread
    def configure(self, config: GenerateConfig, drafter: DrafterArgument | None = None) -> None:
        """Change the settings of the replies to come.

        Args:
            config: the settings, in place of all that there are.
            drafter: what drafts, as `ssmlx.stream_generate` takes it.

        Raises:
            InputError: they do not fit the model, a reply is still open, or the session is closed;
                the settings stay.
        """
        self._require_idle()
        config, loaded = split_drafter(config, drafter)
        make_plan(self.model, config, drafter=loaded)
        self.config = config
        self._loaded = loaded

    def _keep_first(self, count: int) -> int:
        """Cut the cache to its first tokens, at most `count`; returns how many it could keep."""
        kept = self._cache.longest_keepable(count)
        self._cache.keep_first(kept)
        del self._cached_tokens[kept:]
        return kept

    def _forget_answers(self) -> None:
        # Those of a shared prompt cache stay, and are reused for the current model.
        shared = self._prompts
        self._earlier = EarlierAnswers() if shared is None else shared.answers(self.model)
        self._memory: Memory | None = None

    def free_memory(self) -> None:
        """Drop the key/value cache, to free its memory, and count it in the pool no longer.

        Not to be called while a reply is open. The next reply processes the conversation anew, but
        for what the prompt cache has of it.
        """
        self._cache = self.model.make_cache()
        self._cached_tokens = []
        if self._pool is not None:
            self._pool.forget(self)

    @property
    def drafter(self) -> str | None:
        """The name of what may draft in this chat; None if it decodes plainly.

        Raises:
            InputError: the session is closed, or the model cannot draft as the settings ask.
        """
        self._check_open()
        return choose_drafter(self.model, self.config, self._loaded).name

    def swap_adapter(self, adapter: str | Path | None) -> None:
        """Go on with the same base model and conversation under another adapter.

        The cache starts anew, as another adapter's keys and values are others: the next answer
        processes the whole conversation.

        Args:
            adapter: as `ssmlx.swap_adapter` takes it.

        Raises:
            InputError: there is no such adapter, it does not fit the model or the chat's settings,
                a reply is still open, or the session is closed; everything is as it was.
        """
        run_on_mlx_thread(self._require_idle)
        swapped = (self._swap or partial(swap_adapter, self.model))(adapter)

        def take_over() -> None:
            self._require_idle()
            # The chat's settings have to fit.
            make_plan(swapped, self.config, drafter=self._loaded)
            self.model = swapped
            self.free_memory()
            self._forget_answers()

        run_on_mlx_thread(take_over)

    @property
    def memory(self) -> Memory:
        """Memory by part: at the end of the last answer that was read to its end, or now.

        Raises:
            InputError: the session is closed.
        """
        self._check_open()
        return self._memory or measure_memory(self.model, self._cache, loaded=self._loaded)

    @property
    def cached(self) -> tuple[list[int], TextCache]:
        """The tokens in the key/value cache, and the cache: the session's own, no copies."""
        return self._cached_tokens, self._cache

    def resume(self, tokens: Sequence[int], cache: TextCache) -> None:
        """Replace the session's cache by `cache`, which holds `tokens`; nothing is checked or
        copied.

        The next reply reuses as many of these as its prompt begins with.
        """
        self._cached_tokens = list(tokens)
        self._cache = cache

    @property
    def context_tokens(self) -> int:
        """Tokens in the key/value cache."""
        return self._cache.offset

    def reply(self, text: str, progress: Progress | None = None) -> Answer[GenerationResponse]:
        """Answer the user's next message, segment by segment.

        The message joins `messages` when the first segment is asked for, the answer when it is
        over. Of one that is cancelled or fails, what was read is kept; if that is nothing, the
        message is taken out again.

        Args:
            text: the user's message.
            progress: called with (tokens processed, tokens in all) while the prompt is processed.

        Raises:
            InputError: the message is no Unicode text, the conversation no longer fits the context,
                the last reply is still open, or the session is closed; the turn does not count.
            NoRoomError: there is no memory for the prompt; or, as the answer is read, for more.
        """
        check_text(text)
        self._check_open()
        config = resolve_sampling(self.config, self.model)

        def open_reply() -> Answer[GenerationResponse]:
            self._require_idle()
            answer = Answer(self._begin_reply(text, config), progress)
            self._reply = weakref.ref(answer)
            return answer

        return run_on_mlx_thread(open_reply)

    @unless_forked
    @on_mlx_thread
    def close(self) -> None:
        """Cancel the reply that is open, wait for its end, and free the cache; no more is answered.

        A second time, and in a forked process, it does nothing.
        """
        reply = self._reply()
        if reply is not None:
            reply.close()
        if not self._is_closed:
            self._is_closed = True
            self.free_memory()
            del self.model, self._loaded

    def _check_open(self) -> None:
        require(
            not self._is_closed,
            "this chat is closed",
            expected="an open one",
            do="start a new session",
        )

    def _require_idle(self) -> None:
        """Require that no reply is open: two would write the same cache and history. MLX thread."""
        self._check_open()
        reply = self._reply()
        require(
            reply is None or reply.is_over,
            "a reply of this session is still open",
            expected="one reply at a time",
            do="read it to its end or close it, or use another session",
        )

    def _begin_reply(
        self,
        text: str,
        config: GenerateConfig,  # with a seed if it samples
    ) -> Generator[GenerationResponse | Prefilled]:
        """The segments of the answer to `text`, after the longer of two caches. MLX thread.

        The message joins `messages` when the first segment is asked for.
        """
        question: Message = {"role": "user", "content": text}
        prompt = self._encode_turns([*self.messages, question])
        format = find_format(self.tokenizer)
        self.begins = begins_after(prompt, self.tokenizer)
        # At least one token is left to process.
        shared = common_prefix_length(self._cached_tokens, prompt[:-1])
        reused = self._cache.longest_keepable(shared)
        if self._prompts is not None and not config.deterministic:
            cache, known = self._prompts.take(self.model, prompt, self._cache.scratch)
            if known > reused:
                self._cache = cache
                self._cached_tokens = prompt[:known]
                reused = known
        self._keep_first(reused)
        turns_alone = partial(
            self._encode_turns, [*self.messages, question], add_generation_prompt=False
        )
        length = partial(length_before_answer_opens, prompt, turns_alone)
        place = place_for_next_turn(self._prompts, self.model, prompt, self._cache, length)
        decode: Decode = partial(decode_plan, place=place)
        if self._pool is not None:
            self._pool.forget(self)  # it runs, until it is over
            decode = within_limit(self._pool, decode)

        def keep_answer(given: GivenAnswer) -> None:
            """Keep what was yielded of the answer, and its cache."""
            if given.last is not None:
                self.messages.append(answer_turn(given.text, format, self.begins))
                self._add_to_totals(given.last, reused)
            else:  # stopped before the first token: the turn does not count
                self.messages.pop()
            # What was written is in the cache, as far as it got.
            self._cached_tokens = [*prompt, *given.tokens]
            self._keep_first(min(self._cache.offset, len(self._cached_tokens)))
            if self._pool is not None:
                self._pool.keep_or_free(self, self._cache.nbytes)
            if self._prompts is not None:
                self._prompts.put(self.model, self._cached_tokens, self._cache)

        segments = plan_answer_segments(
            self.model,
            self.tokenizer,
            prompt[reused:],
            config,
            cache=self._cache,
            context=prompt[:reused],
            done=keep_answer,
            decode=decode,
            loaded=self._loaded,
            earlier=self._earlier,
        )

        def segments_after_question() -> Generator[GenerationResponse | Prefilled]:
            self.messages.append(question)
            yield from segments

        return segments_after_question()

    @property
    def asks_alone(self) -> bool:
        """Whether the next message will be asked alone, under its adapter's own template.

        Not if there is a system prompt, tools or template arguments.
        """
        others = [turn for turn in self.messages if turn["role"] != "user"]
        turns = [*others, {"role": "user", "content": ""}]
        return shows_last_turn_alone(turns, adapter_template(self.model), **self._template)

    def _encode_turns(self, turns: Sequence[Message], **more: Any) -> list[int]:
        """The tokens of `turns`, or of the last one alone, as `encode_turns` says."""
        return encode_turns(
            turns, self.tokenizer, adapter_template(self.model), **self._template, **more
        )

    def _add_to_totals(
        self,
        last: GenerationResponse,
        reused: int,  # cached tokens of its prompt
    ) -> None:
        totals = self.totals
        totals.reused_tokens += reused
        totals.answers += 1
        totals.tokens += last.generation_tokens
        totals.target_calls += last.target_calls
        totals.decode_tokens += last.generation_tokens - 1
        totals.decode_seconds += last.decode_seconds
        totals.prompt_tokens += last.prompt_tokens
        self._memory = last.memory

    def compare(self, progress: Progress | None = None) -> Comparison:
        """Answer the last user's message again, drafting (A) and plain (B): A B B A A B B A.

        It waits for all eight answers. If the chat decodes plainly by its settings, A asks for
        speculation. Sampled answers get the same seed. Each processes the whole prompt anew.

        Args:
            progress: called with (answers done, answers in all).

        Returns:
            Whether all answers are the same, and how much faster drafting was. The conversation and
            its cache stay as they are.

        Raises:
            InputError: nothing was said yet, the chat is closed, or drafting is asked for and
                nothing can draft.
        """
        self._check_open()
        prompt = self._encode_turns(self.messages[: self._last_question() + 1])
        # The same seed for both, or two samples would be compared.
        config = resolve_sampling(self.config, self.model)
        drafting = replace(config, decoding="speculative") if config.decoding == "plain" else config
        configs = {"A": drafting, "B": replace(config, decoding="plain")}
        lasts: dict[str, list[GenerationResponse]] = {"A": [], "B": []}
        answers: dict[str, list[list[int]]] = {"A": [], "B": []}
        for number, which in enumerate(_TURNS):
            if progress is not None:
                progress(number, len(_TURNS))
            segments = list(
                stream_generate(
                    self.model, self.tokenizer, prompt, configs[which], drafter=self._loaded
                )
            )
            answers[which].append([token for segment in segments for token in segment.tokens])
            lasts[which].append(segments[-1])
        if progress is not None:
            progress(len(_TURNS), len(_TURNS))
        ratios = [
            _seconds(slow) / _seconds(fast)
            for fast, slow in zip(lasts["A"], lasts["B"], strict=True)
        ]
        plain = answers["B"][0]
        other = next((one for one in (*answers["A"], *answers["B"]) if one != plain), plain)
        ends = end_token_ids(self.model, self.tokenizer)
        parting = run_on_mlx_thread(
            lambda: find_divergence(self.model, prompt, plain, other, config, ends)
        )
        return Comparison(parting is None, lasts["A"][-1], lasts["B"][-1], ratios, parting)


def _seconds(last: GenerationResponse) -> float:
    """Seconds of a whole answer, its prompt included."""
    return max(last.prefill_seconds + last.decode_seconds, 1e-9)
