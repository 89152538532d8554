"""`python -m examples.recipes.chat_prompts`: prompts to train and evaluate chat adapters.

From the checkout, with the extra `torch`.
"""

import argparse
import hashlib
import itertools
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from convert import check_torch, continuations
from convert.continuations import Sampling
from ssmlx.commands.parser import add_int_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import require
from ssmlx.loading.files import make_folder
from ssmlx.prompts import read_prompts
from ssmlx.training.questions import (
    Split,
    draw_shipped_prompts,
    is_good_prompt,
    normalise_prompt,
    opening_words,
    split_question_lists,
    user_turn_prefix,
)

PROG = "examples.recipes.chat_prompts"
EPILOG = """examples:
  python -m examples.recipes.chat_prompts --out prompts --model smollm2-135m-q4_1

Writes chat_train.jsonl, chat_valid.jsonl and chat_test.jsonl. A prompt comes from one of three
sources: written templates (ssmlx/training/questions.txt); the model itself, which continues its
chat template's user turn (Magpie, Xu et al. 2024); and two-turn chats, where the model answers a
prompt and a follow-up comes from the lists. The three files share no prompt, and no template,
topic or follow-up of the lists."""

FIRST_ANSWER_TOKENS = 100
SAMPLED = 2700  # prompts of the model's own, near copies included
SAMPLING: dict[str, Any] = {"max_tokens": 110, "temp": 1.0, "top_p": 0.95}


class Counts(NamedTuple):
    """How many prompts of a split the model wrote, and how many have two turns."""

    sampled: int
    two_turn: int


COUNTS = {"train": Counts(2350, 600), "valid": Counts(80, 20), "test": Counts(80, 20)}


def make_two_turn_chats(
    model: Any,  # of transformers
    tokenizer: Any,
    firsts: Sequence[str],
    follow_ups: Sequence[str],  # one for each prompt
    batch_size: int,
) -> list[dict[str, Any]]:
    """Make chats of a prompt, the model's greedy answer in whole sentences, and a question."""
    encoded = continuations.encode_prompts(
        [{"prompt": text} for text in firsts], tokenizer, model.config.max_position_embeddings
    )
    sampling = Sampling(max_tokens=FIRST_ANSWER_TOKENS)
    stop = continuations.find_end_tokens(model, tokenizer)
    chats: list[dict[str, Any]] = [{}] * len(firsts)
    for batch in continuations.plan_batches([len(tokens) for tokens in encoded], batch_size):
        answers = continuations.generate_batch(
            model, [encoded[index] for index in batch], sampling, stop
        )
        for index, answer in zip(batch, answers, strict=True):
            said = cut_to_whole_sentences(tokenizer.decode(answer.tokens, skip_special_tokens=True))
            turns = (("user", firsts[index]), ("assistant", said), ("user", follow_ups[index]))
            chats[index] = {"messages": [{"role": r, "content": text} for r, text in turns]}
    return chats


def cut_to_whole_sentences(text: str) -> str:
    """Cut after the last sentence or line; the text stays if no sentence ends."""
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s|$)|(?=\n)", text)]
    return (text[: ends[-1]] if ends and text[: ends[-1]].strip() else text).strip()


def split_without_near_copies(
    sampled: Sequence[str],  # the model's own prompts
    hand_written: Mapping[Split, list[str]],
) -> dict[str, list[str]]:
    """Split prompts, leaving out those that begin like a hand-written or an earlier one."""
    seen = {opening_words(text) for texts in hand_written.values() for text in texts}
    fresh = []
    for text in sampled:
        if (key := opening_words(text)) not in seen:
            seen.add(key)
            fresh.append(text)
    splits = {}
    start = 0
    for split in ("test", "valid", "train"):
        splits[split] = fresh[start : start + COUNTS[split].sampled]
        start += COUNTS[split].sampled
    require(
        len(fresh) >= start,
        f"{len(fresh)} of {len(sampled)} sampled prompts are left without near copies",
        expected=f"{start}",
        do="raise SAMPLED",
    )
    return splits


def sample_user_turns(
    model: Any, tokenizer: Any, count: int, *, batch_size: int, seed: int
) -> list[str]:
    """Sample user turns in as many batches as needed, in the order of their generation."""
    from huggingface_hub.utils import tqdm

    sampling = Sampling(seed=seed, **SAMPLING)
    prefix = user_turn_prefix(tokenizer)
    stop = continuations.find_end_tokens(model, tokenizer)
    found: dict[str, str] = {}
    with tqdm(total=count, unit="prompt", desc="sampling", disable=None, leave=False) as bar:
        for batch in itertools.count():
            for answer in continuations.generate_batch(
                model, [prefix] * batch_size, sampling, stop, batch
            ):
                text = tokenizer.decode(answer.tokens[:-1]).strip()
                # Only turns that the model itself ended.
                if answer.finish_reason == "stop" and is_good_prompt(text):
                    found.setdefault(normalise_prompt(text), text)
            bar.update(min(len(found), count) - bar.n)
            if len(found) >= count:
                break
    return list(found.values())[:count]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Make the prompts of a chat data set.", EPILOG)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="what to write")
    continuations.add_model_and_batch_options(parser)
    add_int_options(parser, ("seed", 0, "another one, other prompts"))
    return parser.parse_args(argv)


def _write_prompts(args: argparse.Namespace) -> None:
    from ssmlx.loading.names import resolve_model

    check_torch()
    continuations.check_batch_size(args.batch_size)
    written = draw_shipped_prompts(args.seed)
    make_folder(args.out)
    model, tokenizer = continuations.load_answering_model(
        resolve_model(args.model), args.dtype, args.device
    )
    sampled = split_without_near_copies(_sampled_prompts(args, model, tokenizer), written)
    for split, lists in split_question_lists().items():
        rng = random.Random(f"{args.seed} {split} chats")
        texts = [*written[split], *sampled[split]]
        firsts = rng.sample(texts, COUNTS[split].two_turn)
        follow_ups = [rng.choice(lists["follow-ups"]) for _ in firsts]
        rows = [{"prompt": text} for text in texts]
        rows += make_two_turn_chats(model, tokenizer, firsts, follow_ups, args.batch_size)
        if split != "train":
            rows = rng.sample(rows, len(rows))
        continuations.write_jsonl(args.out / f"chat_{split}.jsonl", rows)
        print(f"{args.out}/chat_{split}.jsonl: {len(rows):,} prompts", file=sys.stderr)


def _sampled_prompts(args: argparse.Namespace, model: Any, tokenizer: Any) -> list[str]:
    """Sample prompts, or read those of an earlier run with the same settings in --out."""
    of = hashlib.sha256(args.model.encode()).hexdigest()[:8]
    kept = args.out / f"sampled_{of}_{args.seed}_{args.batch_size}_{args.dtype}.jsonl"
    if kept.is_file():
        return [prompt["prompt"] for prompt in read_prompts(kept)]
    found = sample_user_turns(model, tokenizer, SAMPLED, batch_size=args.batch_size, seed=args.seed)
    continuations.write_jsonl(kept, ({"prompt": text} for text in found))
    return found


main = make_main(PROG, parse_args, _write_prompts)

if __name__ == "__main__":
    raise SystemExit(main())
