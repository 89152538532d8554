"""The generate command: one prompt or a file of them; text, or one JSON object a prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import bars
from ..settings import GenerateConfig
from .answer_lines import sampling_line, with_model_sampling
from .caches import PromptFile
from .callback_bars import PromptBar
from .decoding_options import (
    add_decoding_options,
    add_model_options,
    generate_config,
    reject_options_needing,
)
from .drafting import describe
from .learned_lines import learned_lines
from .load_target import load_for_decoding
from .parser import (
    add_options,
    add_prompt_cache_option,
    add_prompt_options,
    make_parser,
    unescape_newlines,
)
from .running import make_main, print_json
from .setting_options import add_setting_options

if TYPE_CHECKING:
    from ..generation.plan import Plan
    from ..generation.segments import GenerationResponse
    from ..model.streams import StreamFusedModel

PROG = "ssmlx.generate"
EPILOG = """examples:
  python -m ssmlx.generate --prompt "Name three primary colours."
  python -m ssmlx.generate --adapter sql --prompts questions.jsonl --jsonl > answers.jsonl
  python -m ssmlx.generate --drafter "prompt-lookup tokens=5" --temp 0.7 --seed 1 --prompt "..."
  python -m ssmlx.generate --drafter "medusa heads=heads/medusa" --tree-size 24 --prompt "..."

Fields of --jsonl: prompt, text, tokens, finish_reason (stop, length or context), prompt_tokens,
generation_tokens, target_calls (forward passes; the prompt counts as one), tokens_per_call, lossy,
prefill_seconds, decode_seconds, draft_model_calls, drafts (by drafter), memory."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Answer prompts with a language model, sped up by speculative decoding.",
        EPILOG,
        "(--prompt TEXT | --prompts FILE.jsonl) [options]",
    )
    group = parser.add_argument_group("prompts and answers")
    add_prompt_options(group)
    add_options(
        group,
        (
            "--template",
            "TEXT",
            "chat: the model's chat template; raw: none; or a text with {prompt} in it, \\n for "
            "a new line (default: the adapter's, else chat, else raw)",
            unescape_newlines,
        ),
    )
    add_setting_options(group, GenerateConfig, ["logprobs"])
    add_prompt_cache_option(group, "the beginning that all prompts share")
    add_options(
        group.add_mutually_exclusive_group(),
        ("--jsonl", None, "print one JSON object for each prompt", bool),
        (
            "--verbose",
            None,
            "print what drafts and why, costs of calls, and memory",
            bool,
        ),
    )
    add_model_options(parser)
    add_decoding_options(parser, max_tokens=256)
    return parser.parse_args(argv)


def _print_notes(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"[{line}]", file=sys.stderr)


def _answer_prompts(args: argparse.Namespace) -> None:
    from ..prompts import common_prefix_length, encode_prompt, last_user_text, read_prompts

    if not args.jsonl:
        reject_options_needing("--jsonl", args)
    prompts = [{"prompt": args.prompt}] if args.prompts is None else read_prompts(args.prompts)
    kept = PromptFile(args.prompt_cache)
    asked = generate_config(args)
    model, tokenizer, loaded = load_for_decoding(args)
    config = with_model_sampling(args, asked, model)

    import mlx.core as mx

    from ..api import answer_record, stream_generate, summary_line
    from ..drafters.text_index import EarlierAnswers
    from ..generation.plan import make_plan
    from ..generation.segments import check_prompt

    # All prompts are encoded and checked first: a bad one must not stop a run half-way.
    how = (model, tokenizer, args.template, args.template_args)
    encoded = [encode_prompt(prompt, *how) for prompt in prompts]
    for tokens in encoded:
        check_prompt(model, tokens)
    kept.load(model)
    shared = min(common_prefix_length(tokens, encoded[0]) for tokens in encoded)
    mx.reset_peak_memory()  # without loading: the peak is that of the answers
    plan = make_plan(model, config, drafter=loaded)
    if args.verbose:
        _print_notes(describe(model, plan, args.adapter).lines())
    own = model.backbone.origin.sampling
    if own.temp:
        _print_notes([sampling_line(asked, own)])
    earlier = EarlierAnswers()
    show_bar = args.jsonl and len(prompts) > 1
    pairs: Any = zip(prompts, encoded, strict=True)
    for prompt, tokens in bars.bar(list(pairs), "prompts") if show_bar else pairs:
        answer = []
        bar = PromptBar()
        cache, known = kept.fork(model, tokens)
        answering = stream_generate(
            model,
            tokenizer,
            tokens[known:],
            config,
            drafter=loaded,
            cache=cache,
            context=tokens[:known],
            progress=bar,
            earlier=earlier,
        )
        for one in answering:
            answer.append(one)
            if not args.jsonl:
                print(one.text, end="", flush=True)
        kept.keep(tokens[:shared], cache)
        if args.jsonl:
            print_json(answer_record(last_user_text(prompt), answer))
            continue
        print(flush=True)
        _print_notes([summary_line(answer[-1])])
        if args.verbose:
            _print_notes(_detail_lines(answer[-1], model, plan))
    kept.save(model)


def _detail_lines(last: GenerationResponse, model: StreamFusedModel, plan: Plan) -> Iterator[str]:
    from ..api import drafts_line

    yield drafts_line(last)
    if last.memory is not None:
        yield last.memory.line()
    yield from learned_lines(model, plan, last.prompt_tokens)


main = make_main(PROG, parse_args, _answer_prompts)
