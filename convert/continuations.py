"""`python -m ssmlx.convert.continuations`: a model's own answers to a file of prompts."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssmlx.commands.parser import add_int_options, add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import InputError, require
from ssmlx.loading.files import make_folder, write_whole
from ssmlx.loading.identity import folder_digest
from ssmlx.prompts import Prompt, as_messages, encode_with_template, read_prompts
from ssmlx.settings import DEFAULT_MODEL, MAX_TEMP, MIN_TEMP, check_settings, setting
from ssmlx.templates import frozen_at_new_year_2026
from ssmlx.training.part_file import PartFile

from . import check_torch

if TYPE_CHECKING:
    import torch

PROG = "ssmlx.convert.continuations"
EPILOG = """examples:
  python -m ssmlx.convert.continuations --prompts prompts.jsonl --out train.jsonl --max-tokens 256
  python -m ssmlx.convert.continuations --lora runs/sql --prompts data/sql/train.jsonl \\
      --out data/sql-own/train.jsonl

A line of the prompts file is a JSON object with "prompt" (a text) or "messages" (a list of role
and content, the last one from the user; an answer after it, as in training data, is ignored).
The answers come in the order of the prompts, one JSON object per line: the prompt, "completion",
"prompt_tokens", "completion_tokens" (with the end token if the model gave one) and
"finish_reason" ("stop" or "length"). A greedy model has one answer to a prompt, so repeated
prompts are left out unless --temp is above 0.

Finished batches are kept in OUT.part, and the same command goes on from there. On a machine
whose cores are shared, OMP_NUM_THREADS=1 can be many times faster than the default."""
COMPACT_AT = 0.125  # drop finished rows once they are this share of the batch


class Continuation(NamedTuple):
    tokens: list[int]  # with the end token if there is one
    finish_reason: str  # "stop" at an end token, "length" if max_tokens came first


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, as in `ssmlx.settings.SamplingConfig`."""

    max_tokens: int = setting(160, least=1)
    temp: float = setting(0.0, least=0, smallest=MIN_TEMP, most=MAX_TEMP)
    top_p: float = setting(1.0, above=0, most=1)
    seed: int = setting(0, least=0, most=2**32 - 1)

    def __post_init__(self) -> None:
        check_settings(self)


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end_tokens: Sequence[int],  # the last of an answer's tokens is one of them
    # with the seed it decides the noise, so that a batch does not depend on earlier ones
    batch_number: int = 0,
) -> list[Continuation]:
    """Answer B prompts together, padded on the left, with a model of transformers."""
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    gaps = [[0] * (longest - len(prompt)) for prompt in prompts]
    padded = [[*gap, *prompt] for gap, prompt in zip(gaps, prompts, strict=True)]
    tokens = torch.tensor(padded, device=device)  # [B, L]
    mask = torch.tensor([[*gap, *[1] * (longest - len(gap))] for gap in gaps], device=device)
    generator = torch.Generator(device).manual_seed(sampling.seed * 1_000_003 + batch_number)
    ends = torch.tensor(list(end_tokens), device=device)
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    cache = DynamicCache()
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt that each row of the batch answers
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for _ in range(sampling.max_tokens):
        with torch.inference_mode():
            output = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits = output.logits[:, -1].float()
        require(
            not logits.isnan().any(),
            "some of the model's logits are NaN",
            expected="numbers",
            do="check its weights, or give --dtype float32",
        )
        chosen = choose_tokens(logits, sampling, generator)  # [B]
        for row, token, done in zip(rows, chosen.tolist(), ended.tolist(), strict=True):
            if not done:
                answers[row].append(token)
        ended |= torch.isin(chosen, ends)
        if ended.all():
            break
        if ended.float().mean() >= COMPACT_AT:
            kept = (~ended).nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows = [rows[index] for index in kept.tolist()]
            chosen, mask, positions, ended = (x[kept] for x in (chosen, mask, positions, ended))
        tokens = chosen[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    stop = set(end_tokens)
    return [Continuation(answer, "stop" if answer[-1] in stop else "length") for answer in answers]


def choose_tokens(
    logits: torch.Tensor,  # [B, V] float32
    sampling: Sampling,
    generator: torch.Generator,
) -> torch.Tensor:  # [B]
    """Choose the likeliest tokens at temperature 0; otherwise draw by temperature and top-p."""
    import torch

    if sampling.temp == 0:
        return logits.argmax(dim=1)
    probs, order = (logits / sampling.temp).softmax(dim=1).sort(dim=1, descending=True)
    before = probs.cumsum(dim=1) - probs
    probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def grouped_attention(
    module: Any,
    query: torch.Tensor,  # [B, H, L, Dh]
    key: torch.Tensor,  # [B, Hkv, S, Dh]
    value: torch.Tensor,  # [B, Hkv, S, Dh]
    attention_mask: torch.Tensor | None,  # [B, 1, L, S], True or 0 if visible
    scaling: float | None = None,  # of the scores; None for 1 over the root of Dh
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [B, L, H, Dh]
    """Attention for one new token per row, which does not copy keys for every query head.

    On the CPU this is several times as fast as PyTorch's kernel, which still computes prompts. It
    has the form that transformers' `AttentionInterface` takes.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, length, width = query.shape
    if length > 1:
        of_prompt: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return of_prompt
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype is not scores.dtype:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.float().softmax(dim=-1).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, width), None


def load_answering_model(
    path: Path,
    dtype: str,  # of the computation, such as "bfloat16"
    device: str,  # "auto", "cpu", "cuda" or "mps"
    lora: Path | None = None,  # merged into the weights, see `merge_fine_tuning`
) -> tuple[Any, Any]:
    """Load the model; on the CPU, register `grouped_attention` as "grouped" in the process."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from ssmlx.loading.load import load_tokenizer

    from .base import load_base
    from .reference.checkpoint import merge_fine_tuning
    from .training.run import choose_device

    place = choose_device(device)
    model = load_base(path, attn_implementation="sdpa")
    if lora is not None:
        model = merge_fine_tuning(model, lora)
    model = model.to(place, getattr(torch, dtype)).eval()
    if place.type == "cpu":
        AttentionInterface.register("grouped", grouped_attention)
        AttentionMaskInterface.register("grouped", sdpa_mask)
        model.set_attn_implementation("grouped")
    return model, load_tokenizer(path, {})


def find_end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The end tokens of the tokenizer and of the model's generation settings, ascending."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    own = own if isinstance(own, list) else [own]
    return sorted({token for token in (tokenizer.eos_token_id, *own) if token is not None})


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group prompts of similar length, as indices; the longest come first."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def answer_all_in_batches(
    encoded: Sequence[Sequence[int]],  # the prompts' tokens
    # takes the prompts of a batch and its number
    generate: Callable[[Sequence[Sequence[int]], int], list[Continuation]],
    batch_size: int,
    part: PartFile,
) -> list[Continuation]:
    """Answer prompts, in their order; each finished batch is stored in `part`."""
    from huggingface_hub.utils import tqdm

    batches = plan_batches([len(tokens) for tokens in encoded], batch_size)
    done = sum(map(len, part.done))
    with tqdm(total=len(encoded), initial=done, unit="prompt", disable=None, leave=False) as bar:
        for number in range(len(part.done), len(batches)):
            answers = generate([encoded[index] for index in batches[number]], number)
            part.append([list(answer) for answer in answers])
            bar.update(len(batches[number]))
    order = [index for batch in batches for index in batch]
    answers = [Continuation(*answer) for batch in part.done for answer in batch]
    return [answer for _, answer in sorted(zip(order, answers, strict=True))]


def prompt_key(prompt: Prompt) -> str:
    """A text that two prompts share only if their turns and tools are equal."""
    return json.dumps([as_messages(prompt), prompt.get("tools")])


def drop_repeated_prompts(prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep each prompt once, since a greedy model always answers it alike."""
    first: dict[str, dict[str, Any]] = {}
    for prompt in prompts:
        first.setdefault(prompt_key(prompt), prompt)
    return list(first.values())


@frozen_at_new_year_2026()
def encode_prompts(
    prompts: Sequence[dict[str, Any]],
    tokenizer: Any,
    most_tokens: int,  # per prompt
    template: str | None = None,
) -> list[list[int]]:
    """Encode prompts; templates that ask for the date get a fixed one, for repeatability."""
    require(
        template is not None or bool(tokenizer.chat_template),
        "the model's tokenizer has no chat template",
        expected="a model made for chat",
        do="choose another --model",
    )
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            tokens = encode_with_template(prompt, tokenizer, template)
        except InputError as error:
            raise error.at(f"prompt {number}") from error
        require(
            len(tokens) <= most_tokens,
            f"prompt {number} has {len(tokens)} tokens",
            expected=f"at most {most_tokens}, the model's context less --max-tokens",
            do="shorten or remove it",
        )
        encoded.append(tokens)
    return encoded


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines, as a whole file or not at all."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    make_folder(path.parent)
    write_whole(path, text.encode())


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Let a model answer a file of prompts, in batches.", EPILOG)
    for flag, count in (("--prompts", "+"), ("--out", None)):
        told = {"metavar": "FILE", "help": "JSON lines"}
        parser.add_argument(flag, type=Path, required=True, nargs=count, **told)
    add_model_and_batch_options(parser)
    add_options(
        parser,
        (
            "--lora",
            "FOLDER",
            "LoRA that the model answers with, under the template that came with "
            "it: a PyTorch checkpoint of scope all, or what mlx-lm or ssmlx.train wrote",
            Path,
        ),
        ("--temp", None, "sampling temperature; 0 is greedy (default: 0)", 0.0),
    )
    add_int_options(
        parser,
        ("max-tokens", 160, "longest answer"),
        ("seed", 0, "seed of the sampler"),
        ("count", 0, "prompts to answer, the first ones; 0 for all"),
    )
    return parser.parse_args(argv)


def add_model_and_batch_options(parser: argparse.ArgumentParser) -> None:
    told = "(default: %(default)s)"
    add_options(
        parser,
        ("--model", None, f"a folder, a Hub name or an alias {told}", DEFAULT_MODEL),
        ("--batch-size", "B", f"prompts that are answered together {told}", 64),
        (
            "--dtype",
            None,
            f"what the model computes in {told}",
            "bfloat16",
            ("bfloat16", "float32"),
        ),
        (
            "--device",
            None,
            f"auto: a GPU if PyTorch finds one {told}",
            "auto",
            ("auto", "cpu", "cuda", "mps"),
        ),
    )


def check_batch_size(batch_size: int) -> None:
    require(batch_size >= 1, f"--batch-size {batch_size}", expected="1 or more", do="raise it")


def write_continuations(args: argparse.Namespace) -> None:
    from ssmlx.loading.names import resolve_model

    check_torch()
    from .reference.checkpoint import read_prompt_template

    check_batch_size(args.batch_size)
    require(args.count >= 0, f"--count {args.count}", expected="0 or more", do="raise it")
    sampling = Sampling(max_tokens=args.max_tokens, temp=args.temp, seed=args.seed)
    kinds = ("prompt", "messages", "tools")
    rows = [row for path in args.prompts for row in read_prompts(path)]
    prompts = [{k: row[k] for k in kinds if k in row} for row in rows]
    prompts = (prompts if args.temp else drop_repeated_prompts(prompts))[: args.count or None]
    found = f"--out {args.out} is a folder"
    require(not args.out.is_dir(), found, expected="a file", do="give the name of one in it")
    make_folder(args.out.parent)
    template = None if args.lora is None else read_prompt_template(args.lora)
    path = resolve_model(args.model)
    model, tokenizer = load_answering_model(path, args.dtype, args.device, args.lora)
    context = int(model.config.max_position_embeddings)
    require(
        args.max_tokens < context,
        f"--max-tokens {args.max_tokens}",
        expected=f"less than the model's context, {context}",
        do="lower --max-tokens",
    )
    encoded = encode_prompts(prompts, tokenizer, context - args.max_tokens, template)
    stop = find_end_tokens(model, tokenizer)
    part = PartFile(
        args.out.with_name(args.out.name + ".part"),
        {
            "prompts": hashlib.sha256(json.dumps([prompts, encoded]).encode()).hexdigest(),
            "model": folder_digest(path),
            "lora": folder_digest(args.lora),
            "batch_size": args.batch_size,
            "dtype": args.dtype,
            "device": model.device.type,
            **asdict(sampling),
        },
    )
    answers = answer_all_in_batches(
        encoded,
        lambda batch, number: generate_batch(model, batch, sampling, stop, number),
        args.batch_size,
        part,
    )
    part.close()
    rows = [
        {
            **prompt,
            "completion": tokenizer.decode(answer.tokens, skip_special_tokens=True),
            "prompt_tokens": tokens,
            "completion_tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
        }
        for prompt, tokens, answer in zip(prompts, encoded, answers, strict=True)
    ]
    write_jsonl(args.out, rows)
    part.path.unlink()
    count = sum(len(answer.tokens) for answer in answers)
    cut = sum(answer.finish_reason == "length" for answer in answers)
    told = f"{len(answers):,} answers of {count:,} tokens, {cut:,} of them cut at the limit"
    print(f"{args.out}: {told}", file=sys.stderr)


main = make_main(PROG, parse_args, write_continuations)

if __name__ == "__main__":
    raise SystemExit(main())
