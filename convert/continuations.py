"""`python -m convert.continuations`: a model's own answers to a file of prompts."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssmlx.commands.options import add_counts, make_parser, run
from ssmlx.errors import InputError, require
from ssmlx.loading.files import folder_digest, make_folder, write_whole
from ssmlx.prompts import as_messages, encode, read_prompts, refusing_turns
from ssmlx.settings import DEFAULT_MODEL

from . import check_torch
from .generation import Answer, Sampling, end_tokens, generate_batch, load_generator

PROG = "convert.continuations"
EPILOG = """examples:
  python -m convert.continuations --prompts prompts.jsonl --out train.jsonl
  python -m convert.continuations --prompts prompts.jsonl --out train.jsonl \\
      --model org/name --max-tokens 256 --dtype float32
  # what a fine-tuned model says: streams then learn to guess its own words, not its teachers'
  python -m convert.continuations --lora runs/sql --prompts data/sql/train.jsonl \\
      --out data/sql-own/train.jsonl

A line of the prompts file is a JSON object with "prompt" (a text) or "messages" (a list of role
and content, the last one from the user; an answer behind it, as training data has, is left out).
The answers come in the order of the prompts, one JSON object a line: the prompt, "completion",
"prompt_tokens", "completion_tokens" (with the end token where the model gave one) and
"finish_reason" ("stop" or "length"). A greedy model has one answer to a prompt, so a prompt that
comes again is left out unless --temp is above 0.

Finished batches are kept in OUT.part, and the same command goes on from there. On a machine
whose cores are shared, OMP_NUM_THREADS=1 can be many times faster than the default."""


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Prompts of similar length together, the longest first: indices of each batch."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class PartFile:
    """Finished batches on disk: a line of settings, then a line a batch.

    Args:
        path: the file; it is made where it does not exist.
        settings: what the answers depend on.

    Attributes:
        done: answers of the batches that were there already.

    Raises:
        InputError: the file was made with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.done: list[list[Answer]] = []
        whole = self._read(settings) if path.exists() else 0
        try:
            self._file = path.open("r+b" if whole else "wb")
        except OSError as error:
            raise _unwritable(path, error) from error
        self._file.truncate(whole)  # a line that a kill cut short
        self._file.seek(whole)
        if not whole:
            self._write(settings)

    def append(self, answers: Sequence[Answer]) -> None:
        """Keep a batch; once this returns, a kill does not lose it."""
        self._write([list(answer) for answer in answers])

    def close(self) -> None:
        """Leave the file as it is."""
        self._file.close()

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, settings: dict[str, Any]) -> int:
        """Fill `done`; the number of bytes that hold whole lines."""
        data = self.path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        try:
            values = [json.loads(line) for line in lines]
            if values and values[0] != settings:
                raise self._refusal(values[0], settings)
            self.done = [[Answer(*answer) for answer in batch] for batch in values[1:]]
        except (ValueError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self.path} cannot be read",
                expected="the finished batches of an earlier run",
                do="delete it to start again",
            ) from error
        return sum(len(line) + 1 for line in lines)

    def _refusal(self, found: Any, settings: dict[str, Any]) -> InputError:
        old = found if isinstance(found, dict) else {}
        names = [name for name in settings if old.get(name) != settings[name]]
        return InputError(
            f"{self.path} was made with another {', '.join(names) or 'command'}",
            expected="the command that began it",
            do="repeat that command, choose another --out, or delete the file to start again",
        )


def generate_all(
    encoded: Sequence[Sequence[int]],
    generate: Callable[[Sequence[Sequence[int]], int], list[Answer]],
    batch_size: int,
    part: PartFile,
) -> list[Answer]:
    """Answer every prompt, keeping each finished batch in `part`.

    Args:
        encoded: P prompts.
        generate: answers a batch, given the prompts and the number of the batch.
        batch_size: the most prompts of a batch.
        part: where finished batches are kept.

    Returns:
        P answers, in the order of the prompts.
    """
    batches = plan_batches([len(tokens) for tokens in encoded], batch_size)
    answers: list[Answer | None] = [None] * len(encoded)
    for indices, batch in zip(batches, part.done, strict=False):
        _place(answers, indices, batch)
    from huggingface_hub.utils import tqdm

    done = sum(map(len, part.done))
    with tqdm(total=len(encoded), initial=done, unit="prompt", disable=None, leave=False) as bar:
        for number in range(len(part.done), len(batches)):
            indices = batches[number]
            batch = generate([encoded[index] for index in indices], number)
            part.append(batch)
            _place(answers, indices, batch)
            bar.update(len(batch))
    return [answer for answer in answers if answer is not None]


def _place(answers: list[Answer | None], indices: Sequence[int], batch: Sequence[Answer]) -> None:
    for index, answer in zip(indices, batch, strict=True):
        answers[index] = answer


def distinct(prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompts in their order, each at its first place alone."""
    first: dict[str, dict[str, Any]] = {}
    for prompt in prompts:
        first.setdefault(json.dumps(as_messages(prompt)), prompt)
    return list(first.values())


def encode_prompts(
    prompts: Sequence[dict[str, Any]], tokenizer: Any, longest: int, template: str | None = None
) -> list[list[int]]:
    """Each prompt under a template, up to where the answer starts.

    Args:
        prompts: as `read_prompts` gives them.
        tokenizer: the model's, of transformers.
        longest: the most tokens a prompt may have.
        template: text with `{prompt}`; None for the model's chat template.

    Raises:
        InputError: there is no chat template, a template does not take a prompt, or a prompt is
            too long.
    """
    if template is None and not tokenizer.chat_template:
        raise InputError(
            "the model's tokenizer has no chat template",
            expected="a model made for chat",
            do="choose another --model",
        )
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if template is None:
            tokens = _encode(prompt, tokenizer, number)
        else:
            tokens = encode(template.replace("{prompt}", _one_text(prompt, number)), tokenizer)
        if len(tokens) > longest:
            raise InputError(
                f"prompt {number} has {len(tokens)} tokens",
                expected=f"at most {longest}, the model's context less --max-tokens",
                do="shorten or drop it",
            )
        encoded.append(tokens)
    return encoded


def _one_text(prompt: dict[str, Any], number: int) -> str:
    """The text of a prompt that is a single turn."""
    messages = as_messages(prompt)
    if len(messages) != 1:
        raise InputError(
            f"prompt {number} has {len(messages)} turns",
            expected="one, as the checkpoint's template takes it",
            do="drop that prompt",
        )
    return messages[0]["content"]


def _encode(prompt: dict[str, Any], tokenizer: Any, number: int) -> list[int]:
    with refusing_turns(f"the turns of prompt {number}"):
        return list(
            tokenizer.apply_chat_template(
                as_messages(prompt), add_generation_prompt=True, return_dict=False
            )
        )


def records(
    prompts: Sequence[dict[str, Any]],
    encoded: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    tokenizer: Any,
) -> Iterator[dict[str, Any]]:
    """What the output file holds, a dictionary a line."""
    for prompt, tokens, answer in zip(prompts, encoded, answers, strict=True):
        yield {
            **prompt,
            "completion": tokenizer.decode(answer.tokens, skip_special_tokens=True),
            "prompt_tokens": list(tokens),
            "completion_tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
        }


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of JSON lines whole or not at all."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write {path} ({error.strerror})",
        expected="a file that can be written",
        do="choose another --out",
    )


# --- The command ------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, "Let a model answer a file of prompts, in batches.", EPILOG)
    for flag, text in (("--prompts", "prompts"), ("--out", "what to write")):
        parser.add_argument(
            flag, type=Path, required=True, metavar="FILE", help=f"{text}, JSON lines"
        )
    add_generator_options(parser)
    parser.add_argument(
        "--lora", type=Path, metavar="FOLDER",
        help="LoRA that the model answers with, under the template that came with it: a PyTorch "
        "checkpoint of scope all, or what mlx-lm or ssmlx.train wrote",
    )  # fmt: skip
    parser.add_argument(
        "--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)"
    )
    add_counts(parser, ("max-tokens", 160, "longest answer"), ("seed", 0, "seed of the sampler"))
    return parser.parse_args(argv)


def add_generator_options(parser: argparse.ArgumentParser) -> None:
    """Which model answers, and how it runs."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a folder, a Hub name or an alias (default: %(default)s)",
    )
    add_counts(parser, ("batch-size", 64, "prompts that are answered together"), metavar="B")
    for flag, choices, text in (
        ("--dtype", ("bfloat16", "float32"), "what the model computes in"),
        ("--device", ("auto", "cpu", "cuda", "mps"), "auto: a GPU where PyTorch finds one"),
    ):
        parser.add_argument(
            flag, choices=choices, default=choices[0], help=f"{text} (default: %(default)s)"
        )


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch of nothing."""
    require(batch_size >= 1, f"--batch-size {batch_size}", expected="1 or more", do="raise it")


def _main(args: argparse.Namespace) -> None:
    from ssmlx.loading.names import resolve_model

    check_torch()
    from .reference.checkpoint import template_of

    check_batch_size(args.batch_size)
    sampling = Sampling(max_tokens=args.max_tokens, temp=args.temp, seed=args.seed)
    kinds = ("prompt", "messages")
    prompts = [{k: row[k] for k in kinds if k in row} for row in read_prompts(args.prompts)]
    if not args.temp:
        prompts = distinct(prompts)
    make_folder(args.out.parent)
    template = None if args.lora is None else template_of(args.lora)
    model, tokenizer = load_generator(resolve_model(args.model), args.dtype, args.device, args.lora)
    longest = _longest_prompt(model, args.max_tokens)
    encoded = encode_prompts(prompts, tokenizer, longest, template)
    stop = end_tokens(model, tokenizer)
    part = PartFile(
        args.out.with_name(args.out.name + ".part"),
        {
            "prompts": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
            "model": args.model,
            "lora": folder_digest(args.lora),
            "batch_size": args.batch_size,
            "dtype": args.dtype,
            "device": model.device.type,
            **asdict(sampling),
        },
    )
    answers = generate_all(
        encoded,
        lambda batch, number: generate_batch(model, batch, sampling, stop, number),
        args.batch_size,
        part,
    )
    part.close()
    write_jsonl(args.out, records(prompts, encoded, answers, tokenizer))
    part.path.unlink()
    print(_report(args.out, answers), file=sys.stderr)


def _longest_prompt(model: Any, max_tokens: int) -> int:
    """Tokens that the model's context leaves for a prompt."""
    context = int(model.config.max_position_embeddings)
    if max_tokens >= context:
        raise InputError(
            f"--max-tokens {max_tokens}",
            expected=f"less than the model's context, {context}",
            do="lower --max-tokens",
        )
    return context - max_tokens


def _report(out: Path, answers: Sequence[Answer]) -> str:
    count = sum(len(answer.tokens) for answer in answers)
    cut = sum(answer.finish_reason == "length" for answer in answers)
    return f"{out}: {len(answers):,} answers of {count:,} tokens, {cut:,} of them cut at the limit"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
