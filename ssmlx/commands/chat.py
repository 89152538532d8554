"""The chat command."""

from __future__ import annotations

import argparse
import atexit
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..blas import HINT, has_fast_blas
from ..errors import ContextLengthError, InputError
from ..loading.folders import Fetch
from ..loading.names import NO_ADAPTER, bundled_adapters
from .answer_lines import answer_lines, with_model_sampling
from .caches import PromptFile
from .callback_bars import CallbackBar, DownloadBar, PromptBar
from .check import time_unknown_costs
from .decoding_options import (
    add_decoding_options,
    add_model_options,
    generate_config,
)
from .drafting import describe
from .load_target import load_for_decoding
from .parser import add_prompt_cache_option, make_parser
from .running import file_error, make_main, print_note

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..drafters.base import Loaded
    from ..generation.divergence import Divergence
    from ..session import ChatSession

PROG = "ssmlx.chat"
EPILOG = """examples:
  python -m ssmlx.chat
  python -m ssmlx.chat --adapter sql --tree best --tree-size 16
  python -m ssmlx.chat --adapter none --drafter prompt-lookup
  python -m ssmlx.chat --drafter "medusa heads=heads/medusa"
  echo "What is a monsoon?" | python -m ssmlx.chat

Ctrl-C stops an answer, and the chat goes on. Ctrl-D or /quit ends the chat. Answers go to standard
output; thoughts and everything else to standard error. In the chat, /help lists its commands."""
HELP = """/help            show this list
/reset           forget the conversation
/system TEXT     start a new conversation with the system prompt TEXT; without TEXT, the default one
/stats           show tokens, calls of the model and speed of this chat
/memory          show what the memory is used for
/compare         answer the last message with and without drafting, and compare texts and speed
/adapter         show the adapter in use, and those that ship with ssmlx
/adapter NAME    change the adapter (a name, a folder, org/name on the Hub, or none)
/quit            end the chat (as Ctrl-D does)"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Chat with a language model, sped up by speculative decoding.",
        EPILOG,
        "[MODEL] [options]",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_prompt_cache_option(parser, "the conversation")
    add_model_options(parser)
    add_decoding_options(parser, max_tokens=1024)
    return parser.parse_args(argv)


class Screen:
    """The terminal: answers go to standard output, all else, dimmed, to standard error."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            # A stray byte then spoils its message alone.
            sys.stdin.reconfigure(errors="surrogateescape")

    def note(self, text: str) -> None:
        print_note(text)

    def reply(self, text: str) -> None:
        print(text, end="", flush=True)

    def think(self, text: str) -> None:
        print_note(text, end="")

    def read_line(self) -> str | None:
        """A line that the user types; Ctrl-C discards it, prints how to leave, and reads
        another."""
        while True:
            try:
                # Python reads lines that end in CR and LF so on Windows alone.
                return input("> " if self.interactive else "").removesuffix("\r")
            except KeyboardInterrupt:
                print("^C  (/quit leaves)", file=sys.stderr)
            except EOFError:
                if self.interactive:
                    print(file=sys.stderr)
                return None


def keep_line_history(path: Path) -> None:
    """Load the history of lines, and write its last 1,000 when Python ends; do nothing without
    readline or a usable file."""
    try:
        import readline
    except ImportError:
        return
    readline.set_history_length(1000)

    @atexit.register
    def write() -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)

    with suppress(OSError):  # none yet, or another program's
        readline.read_history_file(path)


@contextmanager
def call_on_first_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Inside the block, call `stop` at the first Ctrl-C; a second one raises KeyboardInterrupt. On
    the main thread alone."""

    def on_interrupt(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Chat:
    session: ChatSession
    screen: Screen
    adapter: str | None  # what the user calls it; None for a fused model's own streams
    loaded: Sequence[Loaded] = ()  # what was loaded to draft with


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


def print_answer(session: ChatSession, text: str, screen: Screen) -> None:
    """Show an answer; Ctrl-C stops it, and its text until then stays in the conversation. A second
    one, or the first with a model that is split over processes, raises KeyboardInterrupt."""
    from ..api import summary_line

    last = None
    responses = session.reply(text, progress=PromptBar())
    # Ranks would stop at different calls, and wait for each other: there, Ctrl-C ends them all.
    is_split = session.model.backbone.group is not None
    with nullcontext() if is_split else call_on_first_interrupt(responses.cancel), responses:
        pieces = AnswerPieces(session, screen)
        for last in responses:
            pieces.show(last.text)
        pieces.end()
    print(flush=True)
    if last is not None:
        cut = " · stopped" if last.finish_reason is None else ""
        screen.note(f"[{summary_line(last)}{cut}]")


def totals_text(session: ChatSession) -> str:
    totals = session.totals
    if not totals.answers:
        return "nothing was said yet"
    speed = totals.decode_tokens / totals.decode_seconds if totals.decode_seconds else 0.0
    return (
        f"{totals.answers} answers · {totals.tokens} tokens in {totals.target_calls} target calls "
        f"({totals.tokens / totals.target_calls:.2f} a call) · {speed:.1f} tokens/s\n"
        f"context: {session.context_tokens} tokens, {session.cached[1].nbytes / 2**20:.1f} MiB · "
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
        f"({result.speculative.target_calls} target calls instead of {result.plain.target_calls}; "
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


def list_or_swap_adapter(rest: str, chat: Chat) -> str:
    """List adapters, or change to another; the peak memory is counted anew after a change."""
    import mlx.core as mx

    from ..loading.attach import choose_adapter, find_adapters_of_base

    if not rest:
        fitting = find_adapters_of_base(chat.session.model)
        others = [name for name in bundled_adapters() if name not in fitting]
        names = ", ".join(fitting) or "none for this model"
        names += f" (for other models: {', '.join(others)})" if others else ""
        hint = "change it with /adapter NAME, FOLDER or none"
        return f"{adapter_line(chat)}\navailable: {names}; {hint}"
    fetch = Fetch(progress=DownloadBar())
    name, folder = choose_adapter(rest, chat.session.model, fetch)
    chat.session.swap_adapter(folder)
    mx.reset_peak_memory()
    chat.adapter = name
    goes_on = chat.session.messages and not chat.session.asks_alone
    return adapter_line(chat) + ("; the conversation goes on" if goes_on else "")


def adapter_line(chat: Chat) -> str:
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


def _reset_command(rest: str, chat: Chat) -> str:
    chat.session.reset(chat.session.system)
    return "the conversation is forgotten"


def _system_command(rest: str, chat: Chat) -> str:
    chat.session.reset(rest or None)
    return f"a new conversation with {'that' if rest else 'no'} system prompt"


COMMANDS: dict[str, Callable[[str, Chat], str]] = {
    "/help": lambda rest, chat: HELP,
    "/reset": _reset_command,
    "/system": _system_command,
    "/stats": lambda rest, chat: totals_text(chat.session),
    "/memory": lambda rest, chat: chat.session.memory.table(),
    "/compare": lambda rest, chat: compare_with_plain(chat.session),
    "/adapter": list_or_swap_adapter,
}


def carry_out(line: str, chat: Chat) -> bool:
    """Carry out a line; False for /quit. Bad input, and in a command a file error or Ctrl-C, are
    printed, and the chat continues."""
    name, _, rest = line.partition(" ")
    is_command = line.startswith("/")
    try:
        if name in COMMANDS:
            chat.screen.note(COMMANDS[name](rest.strip(), chat))
        elif is_command and name != "/quit":
            chat.screen.note(f"no command {name}; /help lists them")
        elif line.strip() and not is_command:
            print_answer(chat.session, line, chat.screen)
    except InputError as error:
        overflows = isinstance(error, ContextLengthError) and not is_command
        hint = "; /reset starts anew" if overflows and not chat.session.asks_alone else ""
        chat.screen.note(f"{error}{hint}")
    except OSError as error:  # of a path that the system refuses
        if name not in COMMANDS or isinstance(error, BrokenPipeError):
            raise
        chat.screen.note(str(file_error(error)))
    except KeyboardInterrupt:
        if name not in COMMANDS or chat.session.model.backbone.group is not None:
            raise
        chat.screen.note("stopped")
    return name != "/quit"


def _chat_until_quit(args: argparse.Namespace) -> None:
    asked = generate_config(args)  # a bad option is refused before anything is loaded
    kept = PromptFile(args.prompt_cache)
    screen = Screen()
    if not has_fast_blas():
        screen.note(HINT)
    if screen.interactive:
        screen.note(f"loading {args.model} ...")
    model, tokenizer, loaded = load_for_decoding(args)
    config = with_model_sampling(args, asked, model)

    import mlx.core as mx

    from ..generation.plan import make_plan
    from ..loading.folders import cache_dir
    from ..mlx_thread import run_on_mlx_thread
    from ..session import ChatSession

    session = ChatSession(
        model,
        tokenizer,
        config,
        drafter=loaded,
        system=args.system,
        template_args=args.template_args,
    )
    kept.load(model)
    if kept.cache is not None:
        session.resume(kept.tokens, kept.cache)
        screen.note(f"[{len(kept.tokens)} tokens from {kept.path}]")
    time_unknown_costs(model, tokenizer, config, loaded)
    mx.reset_peak_memory()  # without loading: /memory shows the chat's peak
    plan = run_on_mlx_thread(lambda: make_plan(model, config, drafter=loaded))
    lines = [*describe(model, plan, args.adapter).lines(), *answer_lines(asked, model, tokenizer)]
    screen.note("\n".join(lines))
    chat = Chat(session, screen, args.adapter, loaded)
    if screen.interactive:
        dtype = str(model.backbone.dtype).removeprefix("mlx.core.")
        screen.note(f"{args.model}, {dtype}. /help lists the commands.")
        keep_line_history(cache_dir() / "chat_history")
    while (line := screen.read_line()) is not None:
        if not carry_out(line, chat):
            break
    kept.keep(*session.cached)
    if kept.save(session.model):
        screen.note(f"[{len(kept.tokens)} tokens kept in {kept.path}]")


main = make_main(PROG, parse_args, _chat_until_quit)
