"""A chat in the terminal: its state, and how a message is answered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..drafters.option import DrafterOption
from ..loading.names import NO_ADAPTER
from ..report import counted
from ..settings import GenerateConfig
from .answer_lines import repeats_itself
from .callback_bars import CallbackBar, PromptBar
from .chat_screen import Screen, call_on_first_interrupt
from .drafting import describe

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..drafters.base import Loaded
    from ..generation.divergence import Divergence
    from ..generation.segments import GenerationResponse
    from ..session import ChatSession


STOPPED = "[stopped before the answer began; /retry asks again]"


@dataclass
class Chat:
    session: ChatSession
    screen: Screen
    adapter: str | None  # what the user calls it; None for a fused model's own streams
    loaded: Sequence[Loaded] = ()  # what was loaded to draft with
    drafter: DrafterOption = field(default_factory=DrafterOption)
    dtype: str = "auto"
    # what is None is the model's to decide
    config: GenerateConfig = field(default_factory=GenerateConfig)
    default: GenerateConfig = field(default_factory=GenerateConfig)  # without options
    unanswered: str | None = None  # the last message, if it was stopped or refused


def ask(text: str, chat: Chat) -> None:
    """Show an answer; Ctrl-C stops it, and its text until then stays in the conversation. Before
    and after that, or if the model is split over processes, it raises KeyboardInterrupt."""
    session = chat.session
    chat.unanswered = text
    answer = []
    responses = session.reply(text, progress=PromptBar())
    # Ranks would stop at different calls, and wait for each other: there, Ctrl-C ends them all.
    is_split = session.model.backbone.group is not None
    with nullcontext() if is_split else call_on_first_interrupt(responses.cancel), responses:
        pieces = AnswerPieces(session, chat.screen)
        try:
            for response in responses:
                answer.append(response)
                chat.unanswered = None
                pieces.show(response.text)
            pieces.end()
        finally:
            if answer:
                print(flush=True)
    if not answer:
        chat.screen.note(STOPPED)
        return
    chat.screen.note(f"[{status_line(answer[-1], session)}]")
    numbers = session.config.numbers(session.model.backbone.origin.sampling)
    if not numbers.temp and repeats_itself(answer):
        chat.screen.note(
            "the answer repeats itself, as greedy decoding of small models does; "
            "/set temp 0.7 samples instead"
        )


class AnswerPieces:
    """Shows an answer as it comes, with the model's thoughts set apart and without marks."""

    def __init__(self, session: ChatSession, screen: Screen) -> None:
        from ..formats.families import find_format
        from ..formats.reader import AnswerReader

        format = find_format(session.tokenizer)
        self._reader = AnswerReader(format, begins=session.begins, reads_calls=False)
        self._screen = screen
        self._is_thinking = False

    def show(self, text: str) -> None:
        self._show_pieces(self._reader.read(text))

    def end(self) -> None:
        self._show_pieces(self._reader.end(is_cut=False))

    def _show_pieces(self, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            if self._is_thinking and not piece.is_thought:
                self._screen.note("\n")
            self._is_thinking = piece.is_thought
            (self._screen.think if piece.is_thought else self._screen.reply)(piece.text)


def status_line(last: GenerationResponse, session: ChatSession) -> str:
    from ..api import summary_line

    most = session.model.backbone.context_length
    context = f"context {session.context_tokens:,}" + (f" of {most:,}" if most else "")
    stopped = ["stopped"] if last.finish_reason is None else []
    return " · ".join([summary_line(last), context, *stopped])


def totals_text(session: ChatSession) -> str:
    totals = session.totals
    if not totals.answers:
        return "nothing was said yet"
    speed = totals.decode_tokens / totals.decode_seconds if totals.decode_seconds else 0.0
    return (
        f"{counted(totals.answers, 'answer')} · {counted(totals.tokens, 'token')} in "
        f"{counted(totals.target_calls, 'target call')} "
        f"({totals.tokens / totals.target_calls:.2f} a call) · {speed:.1f} tokens/s\n"
        f"context: {counted(session.context_tokens, 'token')}, "
        f"{session.cached[1].nbytes / 2**20:.1f} MiB · "
        f"{totals.reused_tokens} of {totals.prompt_tokens} prompt tokens came from the cache"
    )


def compare_with_plain(session: ChatSession) -> str:
    """Answer again with and without drafting; the conversation stays as it is."""
    bar = CallbackBar("comparing", "answer")
    result = session.compare(progress=bar)
    low, high = result.interval
    verdict = "the same tokens"
    explained = ""
    if result.divergence is not None:
        verdict = "DIFFERENT tokens"
        explained = "\n" + divergence_text(result.divergence, session.tokenizer)
    return (
        f"whole answers are {result.speed_up:.2f} times as fast as plain decoding "
        f"[{low:.2f}, {high:.2f}], {verdict} "
        f"({counted(result.speculative.target_calls, 'target call')} instead of "
        f"{result.plain.target_calls}; "
        f"{len(result.ratios)} pairs in turns, 95 % interval){explained}"
    )


def divergence_text(one: Divergence, tokenizer: TokenizerWrapper) -> str:
    """Where two answers part, and whether rounding may have decided it."""
    plain, other = (repr(tokenizer.decode([token])) for token in (one.plain, one.other))
    place = f"after token {one.place}: {plain} is plain decoding's, {other} the other"
    gap = f"the model's logits of these two are {one.gap:.2g} apart"
    if one.is_near_tie:
        return f"{place}. A near tie: {gap}, and rounding reaches {one.limit:.2g} here"
    return f"{place}. {gap}, more than rounding explains ({one.limit:.2g}): please report it"


def drafting_line(chat: Chat) -> str:
    """What drafts in the chat as it is now, and what its adapter does."""
    from ..generation.plan import make_plan
    from ..mlx_thread import run_on_mlx_thread

    session = chat.session
    plan = run_on_mlx_thread(lambda: make_plan(session.model, session.config, drafter=chat.loaded))
    adapter = chat.adapter
    if session.model.config is None and not session.model.is_fine_tuned:
        adapter = NO_ADAPTER
    found = describe(session.model, plan, adapter)
    alone = "each message is asked alone" if session.asks_alone else ""
    return "; ".join(filter(None, [found.lines()[0], found.effect, alone]))
