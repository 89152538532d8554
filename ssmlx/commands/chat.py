"""The chat command."""

from __future__ import annotations

import argparse

from ..blas import HINT, has_fast_blas
from ..settings import GenerateConfig, ModelSampling
from .answer_lines import answer_lines, with_model_sampling
from .caches import PromptFile
from .chat_answers import Chat
from .chat_commands import carry_out, complete, help_text
from .chat_screen import Screen, edit_lines
from .check import time_unknown_costs
from .decoding_options import (
    add_decoding_options,
    add_model_options,
    generate_config,
)
from .drafting import describe
from .load_target import load_for_decoding
from .parser import add_prompt_cache_option, make_parser
from .running import make_main

PROG = "ssmlx.chat"
EPILOG = f"""examples:
  python -m ssmlx.chat
  python -m ssmlx.chat --adapter sql --tree best --tree-size 16
  python -m ssmlx.chat --adapter none --drafter prompt-lookup
  python -m ssmlx.chat --drafter "medusa heads=heads/medusa"
  echo "What is a monsoon?" | python -m ssmlx.chat

in the chat:
{help_text()}

Ctrl-C stops an answer, and the chat goes on. Tab completes commands, settings and files. Answers
go to standard output; thoughts and everything else to standard error."""
_MAX_TOKENS = 1024


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Chat with a language model, sped up by speculative decoding.",
        EPILOG,
        "[MODEL] [options]",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    more = ". It does not keep the conversation itself: /save does"
    add_prompt_cache_option(parser, "the conversation", more)
    add_model_options(parser)
    add_decoding_options(parser, max_tokens=_MAX_TOKENS)
    return parser.parse_args(argv)


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
    default = GenerateConfig(max_tokens=_MAX_TOKENS)
    if args.generation_config == "none":
        default = default.following(ModelSampling())
    chat = Chat(
        session,
        screen,
        args.adapter,
        loaded,
        drafter=args.drafter,
        dtype=args.dtype,
        config=asked,
        default=default,
    )
    if screen.interactive:
        dtype = str(model.backbone.dtype).removeprefix("mlx.core.")
        screen.note(f"{args.model}, {dtype}. /help lists the commands.")
        edit_lines(cache_dir() / "chat_history", complete)
    while (line := screen.read()) is not None:
        if not carry_out(line, chat):
            break
    kept.keep(*session.cached)
    if kept.save(session.model):
        screen.note(f"[{len(kept.tokens)} tokens kept in {kept.path}]")


main = make_main(PROG, parse_args, _chat_until_quit)
