"""`python -m perf.long_chat`: a chat of 20 turns and a prompt of 2,000 tokens.

Both are held twice, streaming and plain, and must agree token for token; memory that is neither
weights nor cache must stay flat from turn to turn.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.calibration.timing import ssmlx_answer
from ssmlx.commands.options import add_counts, make_parser, run
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import user_text
from ssmlx.session import ChatSession
from ssmlx.settings import GenerateConfig, TreeConfig

from .run.options import check_counts, sample_weights
from .run.results import save
from .run.target import STREAMS, Target
from .run.tasks import SQL, data_file, read_examples

PROG = "perf.long_chat"
TOPICS = (
    "the sea", "a garden", "music", "winter", "bread", "trains", "a lighthouse", "honey",
    "mountains", "clocks", "rivers", "paper", "glass", "birds", "salt", "bridges", "maps",
    "tea", "wool", "stars",
)  # fmt: skip


def hold_chat(
    model: StreamFusedModel, tokenizer: TokenizerWrapper, config: GenerateConfig, turns: int
) -> tuple[list[list[int]], list[dict[str, float]]]:
    """The tokens of every answer, and the memory after each turn in MiB."""
    session = ChatSession(model, tokenizer, config)
    answers, memory = [], []
    for turn in range(turns):
        tokens: list[int] = []
        for response in session.reply(f"Tell me one thing about {TOPICS[turn % len(TOPICS)]}."):
            tokens.extend(response.tokens)
        mx.clear_cache()
        cache, active = session.cache_bytes, mx.get_active_memory()
        memory.append({"cache": cache / 2**20, "beside_cache": (active - cache) / 2**20})
        answers.append(tokens)
        print(f"turn {turn + 1:2}: {session.context_tokens} tokens of context", file=sys.stderr)
    return answers, memory


def _main(args: argparse.Namespace) -> int:
    target = Target(sample_weights("streams"))
    model, tokenizer = target.drafting(STREAMS).model, target.tokenizer
    tree = TreeConfig(kind="best", size=8)
    streaming = GenerateConfig(decoding="streaming", max_tokens=args.max_tokens, tree=tree)
    plain = replace(streaming, decoding="plain")

    answers, memory = hold_chat(model, tokenizer, streaming, args.turns)
    expected, _ = hold_chat(model, tokenizer, plain, args.turns)
    beside = [turn["beside_cache"] for turn in memory]
    text = "\n".join(user_text(one.asked) for one in read_examples(data_file(SQL, None), SQL))
    prompt = list(tokenizer.encode(text, add_special_tokens=False))[: args.prompt_tokens]
    answer, oracle = (ssmlx_answer(model, tokenizer, prompt, c) for c in (streaming, plain))
    result: dict[str, Any] = {
        "turns": args.turns,
        "same_answers": sum(a == b for a, b in zip(answers, expected, strict=True)),
        "memory_growth_mib": max(beside) - beside[0],
        "cache_mib": memory[-1]["cache"],
        "long_prompt_tokens": len(prompt),
        "long_prompt_same": answer.tokens == oracle.tokens,
        "memory": memory,
    }
    print({key: value for key, value in result.items() if key != "memory"})
    print("saved", save("long_chat", result), file=sys.stderr)
    good = result["same_answers"] == args.turns and result["long_prompt_same"]
    return 0 if good and result["memory_growth_mib"] < 8 else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if an answer differs or memory grows."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_counts(
        parser,
        ("turns", 20, "turns of the chat"),
        ("max-tokens", 24, "longest answer"),
        ("prompt-tokens", 2000, "tokens of the long prompt"),
        metavar="N",
    )
    args = parser.parse_args(argv)
    check_counts(parser, args, "turns", "max_tokens", "prompt_tokens")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
