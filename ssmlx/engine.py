"""One model in memory for a whole app: any number of answers and chats, from any thread."""

import gc
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import mlx.core as mx

from .answers import Answer, Prefilled
from .bars import Progress
from .decoding.batch import Mask
from .decoding.sampling import TokenLogprobs
from .drafters.base import Loaded
from .drafters.registry import DrafterArgument, split_drafter
from .errors import require
from .generation.batching import Batches
from .generation.memory import cache_size_of
from .generation.plan import Decode, decode_plan, within_limit
from .generation.pool import Holding, MemoryPool, check_memory, default_limit
from .generation.scoring import ScoredPrompt, score_in_pieces
from .generation.segments import (
    GenerationResponse,
    GivenAnswer,
    check_prompt,
    plan_answer_segments,
    resolve_sampling,
    token_ids,
)
from .loading.folders import Fetch
from .loading.load import load
from .loading.loaded_adapters import LoadedAdapters
from .loading.names import AUTO_ADAPTER, NO_ADAPTER
from .mlx_thread import on_mlx_thread, run_on_mlx_thread, unless_forked, wired_weights
from .model.ranks import Group
from .model.streams import StreamFusedModel
from .model.text_cache import TextCache
from .prompt_cache import PromptCache, place_for_next_turn
from .prompts import (
    Tools,
    adapter_template,
    encode_turns,
    length_before_answer_opens,
    prompt_tokens,
)
from .session import ChatSession
from .settings import DEFAULT_MODEL, GenerateConfig, with_settings
from .turns import Message

Question = str | Sequence[int] | Sequence[Message]
"""A user's text, the turns of a chat, or the tokens of a prompt."""


class Engine:
    """A base model with its adapters, and the prompts that it has processed.

        with ssmlx.Engine("smollm2-135m") as engine:
            for segment in engine.stream("Why is the sky blue?", max_tokens=100):
                print(segment.text, end="")

    Any thread and any event loop may ask. Answers of `stream` that are open at once take turns,
    call by call, or share calls with a row each, if that should bring more tokens
    (`generation.batching`). Replies of a `chat` take turns with them, and never share calls. Every
    adapter uses the one base, whose weights they share, so each answer may have another one
    and nothing is switched between them.

    Args:
        model: as `ssmlx.load` takes it.
        adapters: bundled adapters, folders or Hub names of others, to load now; any other one is
            loaded when it is first asked for. "none" is the base alone.
        adapter: the adapter of answers that name no other, loaded now too. Unless given it is the
            first of `adapters`; without any it is "auto": what a chat finds for the model, see
            `ssmlx.load`.
        merge_lora: as `ssmlx.load` does. That takes memory for every such adapter, as large as
            the layers that it changes; False, the default, takes a little time a step instead.
        prompt_cache: prompts that were processed, to be shared, also with other engines; one of the
            engine's own, of 1 GiB in memory, unless given. One that is given stays as it is when
            the engine closes, and is only written to its folder.
        memory_gb: GiB beside the weights that the texts of answers may take at once, running ones
            and those that are kept; two thirds of what the weights leave unless given. What is
            kept goes before an answer is refused.
        dtype, draft_head, group, cache_dir, offline, progress: as `ssmlx.load` takes them.

    Raises:
        InputError: something given is missing, broken, or does not fit the rest.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        adapters: Sequence[str | Path] = (),
        *,
        adapter: str | Path | None = None,
        merge_lora: bool = False,
        prompt_cache: PromptCache | None = None,
        memory_gb: float | None = None,
        dtype: str = "auto",
        draft_head: str = "auto",
        group: Group | None = None,
        cache_dir: str | Path | None = None,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> None:
        check_memory(memory_gb)
        loaded, self.tokenizer = load(
            model,
            adapter=None,  # each is put on the one base when it is asked for
            dtype=dtype,
            merge_lora=merge_lora,
            draft_head=draft_head,
            group=group,
            cache_dir=cache_dir,
            offline=offline,
            progress=progress,
        )
        fetch = Fetch(cache_dir=cache_dir, offline=offline, progress=progress)
        self._adapters = LoadedAdapters(loaded, merge_lora=merge_lora, fetch=fetch)
        self._open: weakref.WeakSet[Answer[Any] | ChatSession] = weakref.WeakSet()
        self._is_own_cache = prompt_cache is None
        self.prompt_cache = PromptCache() if prompt_cache is None else prompt_cache
        # Those that count in the memory pool; their owners may drop them.
        self._counted: weakref.WeakSet[PromptCache] = weakref.WeakSet()
        named = [*adapters] if adapter is None else [adapter, *adapters]
        self._default = named[0] if named else AUTO_ADAPTER
        for one in named:
            self.model(one)
        limit = default_limit() if memory_gb is None else int(memory_gb * 2**30)
        self.memory_pool = MemoryPool(limit)
        self.prompt_cache.identify(self.model(NO_ADAPTER))
        self._count_in_pool(self.prompt_cache)
        self._batches = self._new_batches()
        self._wiring = wired_weights()  # last: an engine that was refused leaves no memory wired
        run_on_mlx_thread(self._wiring.__enter__)

    def _new_batches(self) -> Batches:
        batches = Batches(self.memory_pool.make_room)
        self.memory_pool.share(batches)
        return batches

    @on_mlx_thread
    def _count_in_pool(self, prompt_cache: PromptCache) -> None:
        """Count what a prompt cache has, until `close`; it may drop some to fit."""
        if not self.is_closed:
            self._counted.add(prompt_cache)
            prompt_cache.count_in(self.memory_pool)

    def model(self, adapter: str | Path | None = None) -> StreamFusedModel:
        """The base with an adapter, loaded when it is first asked for; the default one if None.

        The same folder gives the same model, under whatever name it is asked for.

        Args:
            adapter: a name or a folder, as `ssmlx.load` takes it; "auto" is what a chat takes by
                itself, "none" the base alone.

        Raises:
            InputError: there is no such adapter, or it belongs to another model; or the engine is
                closed.
        """
        return self._adapters.model(self._default if adapter is None else adapter)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and answers no more."""
        return self._adapters.is_closed

    @property
    def default_adapter(self) -> str | None:
        """The adapter of answers by default: "none" for the base, None for the model's own streams.

        What "auto" means is looked for, and stays what it is found to be; it is not loaded.

        Raises:
            InputError: it has to be looked for, and the engine is closed.
        """
        return self._adapters.name_of(self._default)

    @property
    def adapters(self) -> list[str]:
        """The adapters that are loaded, keyed by the name first used."""
        return self._adapters.names

    def stream(
        self,
        question: Question,
        config: GenerateConfig | None = None,
        *,
        adapter: str | Path | None = None,
        progress: Progress | None = None,
        tools: Tools | None = None,
        template_args: Mapping[str, Any] | None = None,
        drafter: DrafterArgument | None = None,
        prompt_cache: PromptCache | None = None,
        mask: Mask | None = None,
        shares_prompt: bool = False,
        keep_at: int | None = None,
        joins_prompt: bool = False,
        **settings: Any,
    ) -> Answer[GenerationResponse]:
        """Answer a question, segment by segment, computed as they are read.

        What the prompt cache has of the prompt is not processed again, unless `deterministic` is
        set; the memory for the prompt is claimed now.

        Args:
            question: a user's text, under the adapter's or the model's template; the turns of a
                chat; or token ids.
            config, settings: as `ssmlx.stream_generate` takes them.
            adapter: a name or a folder; the engine's default unless given, "auto" for what a chat
                takes by itself, "none" for the base.
            progress: called with (tokens processed, tokens in all) while the prompt is processed.
            tools, template_args: for the chat template, as `ssmlx.chat_tokens` takes them.
            drafter: what drafts, as `ssmlx.stream_generate` takes it.
            prompt_cache: prompts that this answer may begin with and adds to; the engine's own
                unless given.
            mask: called with the answer's tokens so far and the logits [1, V] of the next one;
                returns the logits to decide by, such as those that a grammar allows. Drafting is
                off then.
            shares_prompt: whether the prompt is in the prompt cache as soon as it is processed, for
                other answers to it, and not only when this answer ends; a copy of its keys and
                values. Not with `deterministic`, where each processes its own.
            keep_at: how many tokens of the prompt the next one of its conversation begins with,
                whatever that leaves out of the answer: a model that can only go back to certain
                places can go back to there. Unless given, the tokens of a text or of turns before
                the template opens the answer; of token ids, all but the last.
            joins_prompt: whether the text goes on from the prompt's, as in a completion: it then
                keeps the leading space that some tokenizers give no beginning.

        Raises:
            InputError: the question, the adapter or the settings cannot be followed; or the engine
                is closed.
            NoRoomError: there is no memory for the prompt; or, as the answer is read, for more.
        """
        model = self.model(adapter)
        config = resolve_sampling(with_settings(config, settings), model)
        config, loaded = split_drafter(config, drafter)
        chat_options = {"tools": tools, "template_args": template_args}

        def open_answer() -> Answer[GenerationResponse]:
            prompt = self._encode_question(model, question, chat_options)
            kept = self.prompt_cache if prompt_cache is None else prompt_cache
            self._count_in_pool(kept)
            end = max(0, len(prompt) - 1)
            require(
                keep_at is None or 0 <= keep_at <= end,
                f"keep_at={keep_at} for a prompt of {len(prompt)} tokens",
                expected=f"0 to {end}, as the last token is always processed",
                do="count the tokens of this prompt, or omit keep_at",
            )
            found = partial(self._length_before_answer_opens, model, question, chat_options, prompt)
            length = found if keep_at is None else keep_at
            segments = self._begin_answer(
                model,
                prompt,
                config,
                keep_at=length,
                loaded=loaded,
                prompt_cache=kept,
                mask=mask,
                shares_prompt=shares_prompt,
                joins_prompt=joins_prompt,
            )
            answer = Answer(segments, progress)
            self._track_open(answer)
            return answer

        return run_on_mlx_thread(open_answer)

    def _begin_answer(
        self,
        model: StreamFusedModel,
        prompt: list[int],  # tokens
        config: GenerateConfig,  # with a seed if it samples
        *,
        keep_at: int | Callable[[], int],
        loaded: Sequence[Loaded],  # to draft with
        prompt_cache: PromptCache,
        mask: Mask | None,
        shares_prompt: bool,
        joins_prompt: bool,
    ) -> Generator[GenerationResponse | Prefilled]:
        """The segments of an answer after what `prompt_cache` has of its prompt. MLX thread.

        When the answer is over, or given up after it was begun, its prompt and what was written of
        it join `prompt_cache`.
        """
        cache = model.make_cache()
        known = 0
        if not config.deterministic:  # whose calls are the same on every run, whatever is known
            cache, known = prompt_cache.take(model, prompt)
        # Calls that have to be the same on every run, or on every rank, are not shared.
        is_alone = config.deterministic or model.backbone.group is not None
        decode: Decode = decode_plan
        if mask is not None or not is_alone:
            decode = partial(self._batches.decode, mask=mask)
        place = place_for_next_turn(
            prompt_cache, model, prompt, cache, keep_at, copies=shares_prompt and not is_alone
        )
        decode = partial(decode, place=place)

        def done(given: GivenAnswer) -> None:
            prompt_cache.put(model, [*prompt, *given.tokens], cache)

        return plan_answer_segments(
            model,
            self.tokenizer,
            prompt[known:],
            config,
            cache=cache,
            context=prompt[:known],
            done=done,
            decode=within_limit(self.memory_pool, decode),
            loaded=loaded,
            earlier=prompt_cache.answers(model),
            joins_prompt=joins_prompt,
        )

    def score(
        self,
        question: Question,
        *,
        top: int = 0,
        adapter: str | Path | None = None,
        progress: Progress | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> Answer[ScoredPrompt]:
        """Score a prompt: how likely each token is after those before it, in one segment.

        The whole prompt is processed as the answer is read, whatever is known of it. Its memory is
        claimed now.

        Args:
            question, adapter, progress: as `stream` takes them.
            top: how many of the likeliest tokens are wanted at each position.
            prompt_cache: where the prompt is kept, now that it is processed, for an answer to begin
                with; nowhere unless given.

        Raises:
            InputError: the question or the adapter cannot be followed, or the engine is closed.
            NoRoomError: there is no memory for the prompt.
        """
        model = self.model(adapter)

        def open_scoring() -> Answer[ScoredPrompt]:
            prompt = self._encode_question(model, question, {})
            check_prompt(model, prompt)
            cache = model.make_cache()
            holding = Holding(self.memory_pool, cache, cache_size_of(model))
            self.memory_pool.add_running(holding, len(prompt))
            scored = self._score_in_pieces(model, prompt, cache, top, prompt_cache, holding)
            answer = Answer(scored, progress)
            self._track_open(answer)
            return answer

        return run_on_mlx_thread(open_scoring)

    def _score_in_pieces(
        self,
        model: StreamFusedModel,
        prompt: list[int],
        cache: TextCache,  # an empty one, which is filled
        top: int,
        prompt_cache: PromptCache | None,  # where the prompt is kept in the end
        holding: Holding,  # what counts `cache`
    ) -> Generator[ScoredPrompt | Prefilled]:
        """A `Prefilled` before and after each piece of the prompt, then its scores. MLX thread."""
        found: list[TokenLogprobs] = []
        try:
            with wired_weights():
                for piece in score_in_pieces(model, prompt, cache, top):
                    found += piece
                    yield Prefilled(cache.offset, len(prompt) - 1)
        finally:
            holding.release()
        if prompt_cache is not None:
            self._count_in_pool(prompt_cache)
            prompt_cache.put(model, prompt, cache)
        yield ScoredPrompt(tuple(found))

    def _encode_question(
        self,
        model: StreamFusedModel,
        question: Question,
        chat_options: Mapping[str, Any],  # `tools` and `template_args` of the model's chat template
    ) -> list[int]:
        """The prompt's tokens; a text is put under the adapter's own template or the model's."""
        if isinstance(question, str):
            return prompt_tokens(question, model, self.tokenizer, **chat_options)
        if isinstance(question, Sequence) and question and isinstance(question[0], Mapping):
            turns = cast("Sequence[Message]", question)
            return encode_turns(turns, self.tokenizer, adapter_template(model), **chat_options)
        return token_ids(question)

    def _length_before_answer_opens(
        self,
        model: StreamFusedModel,
        question: Question,
        chat_options: Mapping[str, Any],
        prompt: Sequence[int],  # from `_encode_question`
    ) -> int:
        """The number of first tokens that the conversation's next prompt will share."""
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if not prompt or not isinstance(turns[0], Mapping):
            return len(prompt) - 1
        turns_alone = cast("Sequence[Message]", turns)
        options = {**chat_options, "add_generation_prompt": False}
        return length_before_answer_opens(
            prompt, lambda: self._encode_question(model, turns_alone, options)
        )

    def chat(
        self,
        config: GenerateConfig | None = None,
        *,
        adapter: str | Path | None = None,
        system: str | None = None,
        tools: Tools | None = None,
        template_args: Mapping[str, Any] | None = None,
        drafter: DrafterArgument | None = None,
        **settings: Any,
    ) -> ChatSession:
        """Begin a chat on this model, with the engine's prompt cache and memory limit.

        Nothing is generated yet; the engine's `close` ends the chat.

        Args:
            system: the system prompt; None leaves it to the template.
            config, adapter, tools, template_args, drafter, settings: as `stream` takes them.

        Returns:
            The session: see `ssmlx.ChatSession`.

        Raises:
            InputError: the adapter or the settings cannot be followed.
        """
        chat = ChatSession(
            self.model(adapter),
            self.tokenizer,
            with_settings(config, settings),
            drafter=drafter,
            system=system,
            tools=tools,
            template_args=template_args,
            prompts=self.prompt_cache,
            # None is the base alone, as for `ssmlx.swap_adapter`.
            swap=lambda adapter: self.model(NO_ADAPTER if adapter is None else adapter),
            memory_pool=self.memory_pool,
        )
        run_on_mlx_thread(lambda: self._track_open(chat))
        return chat

    def _track_open(self, opened: Answer[Any] | ChatSession) -> None:
        """Have `close` close `opened`; close it now if the engine is closed. MLX thread."""
        self._open.add(opened)
        if self.is_closed:
            opened.close()

    @unless_forked
    def close(self) -> None:
        """Cancel what is open, wait for its end, and free the memory; chats answer no more.

        The engine's own prompt cache is closed. Prompt caches that were given to the engine or to
        its answers are written to their folders, if they have one, and keep what they have in
        memory; they no longer count in the engine's memory limit. A second time, and in a forked
        process, `close` does nothing.
        """
        if not self._adapters.close():
            return
        self._batches = self._new_batches()  # those that there are know models
        for opened in run_on_mlx_thread(lambda: list(self._open)):
            opened.close()
        if self._is_own_cache:
            self.prompt_cache.close()
        for kept in run_on_mlx_thread(lambda: list(self._counted)):
            kept.flush()
            kept.count_out(self.memory_pool)
        run_on_mlx_thread(lambda: self._wiring.__exit__(None, None, None))
        # What transformers imports late leaves circles that hold the frames of `load`.
        gc.collect()
        run_on_mlx_thread(mx.clear_cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
