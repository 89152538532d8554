"""The generate command: one prompt or a file of them; text, or one JSON object a prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import bars
from ..errors import naming_place
from ..settings import GenerateConfig, with_settings
from .answer_lines import sampling_line
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
    make_parser,
    refuse_option,
    unescape_newlines,
)
from .prompt_options import GivenPrompt, add_prompt_options, read_given_prompts
from .running import make_main, print_json
from .setting_options import add_setting_options

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..drafters.base import Loaded
    from ..generation.plan import Plan
    from ..generation.segments import GenerationResponse
    from ..model.streams import StreamFusedModel

PROG = "ssmlx.generate"
EPILOG = """examples:
  python -m ssmlx.generate --prompt "Name three primary colours."
  python -m ssmlx.generate --adapter sql --prompts questions.jsonl --jsonl > answers.jsonl
  python -m ssmlx.generate --drafter "prompt-lookup tokens=5" --temp 0.7 --seed 1 < question.txt

A line of --prompts may set max_tokens, stop, seed, temp and its like. The object of its answer
keeps the line's other fields, such as an id, and has prompt, text, tokens, finish_reason (stop,
length or context), prompt_tokens, generation_tokens, target_calls (the prompt counts as one),
tokens_per_call, prefill_seconds, decode_seconds, draft_model_calls, drafts, lossy, memory."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Answer prompts with a language model, sped up by speculative decoding.",
        EPILOG,
        "(--prompt TEXT | --prompts FILE.jsonl | < FILE) [options]",
    )
    group = parser.add_argument_group("prompts and answers")
    add_prompt_options(group)
    add_options(
        group,
        ("--system", "TEXT", "a system prompt for prompts that have none", str),
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
    from ..prompts import common_prefix_length

    if not args.jsonl:
        reject_options_needing("--jsonl", args)
    if args.system is not None and args.template not in (None, "chat"):
        refuse_option("--system", "--template chat")
    asked = generate_config(args)
    prompts = read_given_prompts(args)
    kept = PromptFile(args.prompt_cache)
    model, tokenizer, loaded = load_for_decoding(args)
    configs = _config_of_each(args, asked, prompts, model, loaded)

    import mlx.core as mx

    from ..api import answer_record, stream_generate, summary_line
    from ..drafters.text_index import EarlierAnswers
    from ..generation.plan import make_plan

    # All prompts are encoded and checked first: a bad one must not stop a run half-way.
    encoded = [_encode_checked(one, args, model, tokenizer) for one in prompts]
    plan = make_plan(model, configs[0], drafter=loaded)
    kept.load(model)
    shared = min(common_prefix_length(tokens, encoded[0]) for tokens in encoded)
    mx.reset_peak_memory()  # without loading: the peak is that of the answers
    if args.verbose:
        _print_notes(describe(model, plan, args.adapter).lines())
    own = model.backbone.origin.sampling
    if own.temp:
        _print_notes([sampling_line(asked, own)])
    earlier = EarlierAnswers()
    show_bar = args.jsonl and len(prompts) > 1
    rows: Any = zip(prompts, encoded, configs, strict=True)
    for one, tokens, config in bars.bar(list(rows), "prompts") if show_bar else rows:
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
        for segment in answering:
            answer.append(segment)
            if not args.jsonl:
                print(segment.text, end="", flush=True)
        kept.keep(tokens[:shared], cache)
        if args.jsonl:
            print_json(answer_record(one.row, answer))
            continue
        print(flush=True)
        _print_notes([summary_line(answer[-1])])
        if args.verbose:
            _print_notes(_detail_lines(answer[-1], model, plan))
    kept.save(model)


def _encode_checked(
    one: GivenPrompt,
    args: argparse.Namespace,
    model: StreamFusedModel,
    tokenizer: TokenizerWrapper,
) -> list[int]:
    from ..generation.segments import check_prompt
    from ..prompts import encode_prompt, with_system

    prompt = with_system(one.row, args.system)
    tokens = encode_prompt(prompt, model, tokenizer, args.template, args.template_args)
    check_prompt(model, tokens)
    return tokens


def _config_of_each(
    args: argparse.Namespace,
    asked: GenerateConfig,
    prompts: Sequence[GivenPrompt],
    model: StreamFusedModel,
    loaded: Sequence[Loaded],
) -> list[GenerateConfig]:
    """The settings of each prompt, checked: its line's, else those of the options, else the
    model's own."""
    from ..generation.plan import make_plan

    own = model.backbone.origin.sampling
    configs = []
    for one in prompts:
        with naming_place(one.where):
            configs.append(with_settings(asked, one.settings).following(own))
            if one.settings:
                make_plan(model, configs[-1], drafter=loaded)
    if not any(config.temp for config in configs):
        reject_options_needing("--temp above 0", args)
    return configs


def _detail_lines(last: GenerationResponse, model: StreamFusedModel, plan: Plan) -> Iterator[str]:
    from ..api import drafts_line

    yield drafts_line(last)
    if last.memory is not None:
        yield last.memory.line()
    yield from learned_lines(model, plan, last.prompt_tokens)


main = make_main(PROG, parse_args, _answer_prompts)
