"""`python -m convert.continuations`: a model's own answers to a file of prompts."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssmlx.cli.options import make_parser, run
from ssmlx.config import DEFAULT_MODEL
from ssmlx.errors import InputError

if TYPE_CHECKING:
    import torch

PROG = "convert.continuations"
EPILOG = """examples:
  python -m convert.continuations --prompts prompts.jsonl --out train.jsonl
  python -m convert.continuations --prompts prompts.jsonl --out train.jsonl \\
      --model org/name --max-tokens 256 --dtype float32

A line of the prompts file is a JSON object with "prompt" (a text) or "messages" (a list of role
and content, the last one from the user). The answers come in the order of the prompts, one JSON
object a line: the prompt as it was, "completion", "prompt_tokens", "completion_tokens" (with the
end token where the model gave one) and "finish_reason" ("stop" or "length").

Finished batches are kept in OUT.part, and the same command goes on from there. On a machine
whose cores are shared, OMP_NUM_THREADS=1 can be many times faster than the default."""

ROLES = ("system", "user", "assistant")
COMPACT_AT = 0.125  # drop finished rows once they are this share of the batch


class Answer(NamedTuple):
    """What the model said to one prompt.

    Attributes:
        tokens: the tokens, with the end token where there is one.
        finish_reason: "stop" at an end token, "length" where max_tokens came first.
    """

    tokens: list[int]
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when to stop.

    Attributes:
        max_tokens: longest answer.
        temp: temperature; 0 is greedy.
        top_p: sample among the likeliest tokens that hold this much probability together.
        seed: of the sampler.
    """

    max_tokens: int = 160
    temp: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "1 or more"),
            ("--temp", self.temp, 0 <= self.temp < float("inf"), "0 or more"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not good:
                raise InputError(f"{name} {value}", expected=expected, do=f"change {name}")


# --- Generating -------------------------------------------------------------------------------


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end_tokens: Sequence[int],
    stream: int = 0,
) -> list[Answer]:
    """Answer B prompts together.

    Args:
        model: a causal LM of transformers.
        prompts: B lists of tokens; they are padded on the left to the longest.
        sampling: how to choose tokens.
        end_tokens: tokens that end an answer.
        stream: with `sampling.seed` the seed of this batch, so that batches do not depend on
            which ones ran before.
    """
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    tokens, mask = (part.to(device) for part in left_pad(prompts))  # [B, L] both
    generator = torch.Generator(device).manual_seed(sampling.seed * 1_000_003 + stream)
    ends = torch.tensor(list(end_tokens), device=device)
    positions, cache = mask.cumsum(1).sub(1).clamp(min=0), DynamicCache()
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt that each row of the batch answers
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for _ in range(sampling.max_tokens):
        logits = _forward(model, tokens, mask, positions, cache)  # [B, V]
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
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    stop = set(end_tokens)
    return [Answer(answer, "stop" if answer[-1] in stop else "length") for answer in answers]


def _forward(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
) -> torch.Tensor:
    """[B, L] new tokens -> [B, V] float32 logits after the last one."""
    import torch

    with torch.inference_mode():
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return output.logits[:, -1].float()


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """B lists of tokens -> [B, L] tokens and [B, L] 0/1 mask, padding first."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    tokens = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def choose_tokens(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> torch.Tensor:
    """[B, V] float32 logits -> [B] tokens."""
    import torch

    if sampling.temp == 0:
        return logits.argmax(dim=1)
    probs, order = (logits / sampling.temp).softmax(dim=1).sort(dim=1, descending=True)
    before = probs.cumsum(dim=1) - probs
    probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token a row, without a copy of the keys for every query head.

    On the CPU several times as fast as PyTorch's kernel there, which takes over for prompts.

    Args:
        query: [B, H, L, Dh].
        key: [B, Hkv, S, Dh]; `value` alike.
        attention_mask: [B, 1, L, S], True or 0 where visible, or None where everything is.

    Returns:
        [B, L, H, Dh], and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype is not scores.dtype:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.float().softmax(dim=-1).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, width), None


def load_generator(path: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder, ready for `generate_batch`.

    Args:
        path: a model folder.
        dtype: "float32" or "bfloat16".
        device: "cpu", "cuda", "mps", or "auto" for the first GPU there is.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer
    from transformers.masking_utils import sdpa_mask

    from .base import load_base

    device = _resolve_device(device)
    model = load_base(path, attn_implementation="sdpa").to(device, getattr(torch, dtype)).eval()
    if device == "cpu":
        AttentionInterface.register("grouped", grouped_attention)
        AttentionMaskInterface.register("grouped", sdpa_mask)
        model.set_attn_implementation("grouped")
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def _resolve_device(name: str) -> str:
    import torch

    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next((device for device in found if found[device]), "cpu")
    if name != "cpu" and not found[name]:
        raise InputError(
            f"--device {name}, which PyTorch does not find here",
            expected="auto, cpu" + "".join(f", {device}" for device in found if found[device]),
            do="choose another --device",
        )
    return name


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's settings."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    own = own if isinstance(own, list) else [own]
    return sorted({token for token in (tokenizer.eos_token_id, *own) if token is not None})


# --- Prompts ----------------------------------------------------------------------------------


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file, each with "prompt" or "messages" and nothing else.

    Raises:
        InputError: the file is missing or empty, or names the first bad line.
    """
    if not path.is_file():
        raise InputError(
            f"{path} does not exist", expected="a file of prompts", do="check --prompts"
        )
    prompts = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                prompts.append(_checked_prompt(line, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text", expected="UTF-8", do="check --prompts") from error
    if not prompts:
        raise InputError(f"{path} is empty", expected="one prompt a line", do="check --prompts")
    return prompts


def _checked_prompt(line: str, where: str) -> dict[str, Any]:
    do = "correct the line"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(
            f"{where} is no JSON ({error})", expected="a JSON object", do=do
        ) from error
    kinds = [kind for kind in ("prompt", "messages") if isinstance(record, dict) and kind in record]
    if len(kinds) != 1:
        found = "has both" if kinds else "has neither"
        raise InputError(f"{where} {found}", expected='either "prompt" or "messages"', do=do)
    prompt = record[kinds[0]]
    messages = as_messages({kinds[0]: prompt})
    if not _are_messages(messages):
        raise InputError(
            f'{where} has a bad "{kinds[0]}"',
            expected="a text, or a list of objects with role (system, user, assistant) and "
            "content, the last one from the user",
            do=do,
        )
    if not messages[-1]["content"].strip():
        raise InputError(f"{where} has an empty prompt", expected="some text", do=do)
    return {kinds[0]: prompt}


def as_messages(prompt: dict[str, Any]) -> Any:
    """A prompt as the turns of a chat."""
    if "messages" in prompt:
        return prompt["messages"]
    return [{"role": "user", "content": prompt["prompt"]}]


def _are_messages(messages: Any) -> bool:
    """Whether these are turns of a chat that the model has to answer now."""
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(turn, dict)
            and turn.get("role") in ROLES
            and isinstance(turn.get("content"), str)
            for turn in messages
        )
        and messages[-1]["role"] == "user"
    )


def encode_prompts(
    prompts: Sequence[dict[str, Any]], tokenizer: Any, longest: int
) -> list[list[int]]:
    """Each prompt under the chat template, up to where the answer starts.

    Args:
        prompts: as `read_prompts` gives them.
        tokenizer: the model's, of transformers.
        longest: the most tokens a prompt may have.

    Raises:
        InputError: there is no chat template, it refuses a prompt, or a prompt is too long.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "the model's tokenizer has no chat template",
            expected="a model made for chat",
            do="choose another --model",
        )
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        tokens = _encode(prompt, tokenizer, number)
        if len(tokens) > longest:
            raise InputError(
                f"prompt {number} has {len(tokens)} tokens",
                expected=f"at most {longest}, the model's context less --max-tokens",
                do="shorten or drop it",
            )
        encoded.append(tokens)
    return encoded


def _encode(prompt: dict[str, Any], tokenizer: Any, number: int) -> list[int]:
    from jinja2 import TemplateError

    try:
        return list(
            tokenizer.apply_chat_template(
                as_messages(prompt), add_generation_prompt=True, return_dict=False
            )
        )
    except TemplateError as error:
        raise InputError(
            f"the model's chat template refuses prompt {number} ({error})",
            expected="turns that it knows",
            do="change or drop that prompt",
        ) from error


# --- The run ----------------------------------------------------------------------------------


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
    with _Progress(len(encoded), sum(map(len, part.done))) as progress:
        for number in range(len(part.done), len(batches)):
            indices = batches[number]
            batch = generate([encoded[index] for index in indices], number)
            part.append(batch)
            _place(answers, indices, batch)
            progress.add(batch)
    return [answer for answer in answers if answer is not None]


def _place(answers: list[Answer | None], indices: Sequence[int], batch: Sequence[Answer]) -> None:
    for index, answer in zip(indices, batch, strict=True):
        answers[index] = answer


class _Progress:
    """A bar of prompts with the rate of tokens, shown on a terminal only."""

    def __init__(self, total: int, done: int) -> None:
        from huggingface_hub.utils import tqdm

        self._tokens = 0
        self._bar = tqdm(total=total, initial=done, unit="prompt", disable=None, leave=False)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, batch: Sequence[Answer]) -> None:
        """Count a finished batch."""
        self._tokens += sum(len(answer.tokens) for answer in batch)
        if not self._bar.disable:
            rate = self._tokens / max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(len(batch))


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


def write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write a file of JSON lines whole or not at all."""
    work = path.with_name(path.name + ".new")
    try:
        with work.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        work.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        work.unlink(missing_ok=True)


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
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="prompts, JSON lines"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="what to write, JSON lines"
    )
    add_generator_options(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=160, help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sampler (default: %(default)s)"
    )
    return parser.parse_args(argv)


def add_generator_options(parser: argparse.ArgumentParser) -> None:
    """Which model answers, and how it runs."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a folder, a Hub name or an alias (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="B",
        help="prompts that are answered together (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what the model computes in (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="auto: a GPU where PyTorch finds one (default: %(default)s)",
    )


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch of nothing."""
    if batch_size < 1:
        raise InputError(f"--batch-size {batch_size}", expected="1 or more", do="raise it")


def _main(args: argparse.Namespace) -> None:
    from ssmlx.registry import resolve_model

    check_batch_size(args.batch_size)
    sampling = Sampling(max_tokens=args.max_tokens, temp=args.temp, seed=args.seed)
    prompts = read_prompts(args.prompts)
    model, tokenizer = load_generator(resolve_model(args.model), args.dtype, args.device)
    encoded = encode_prompts(prompts, tokenizer, _longest_prompt(model, args.max_tokens))
    stop = end_tokens(model, tokenizer)
    part = PartFile(
        args.out.with_name(args.out.name + ".part"),
        {
            "prompts": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
            "model": args.model,
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
