"""`python -m perf.lossless`: is streaming the same as plain decoding, token for token?

Answers prompts by mlx-lm's `stream_generate`, by our plain decoding and by streaming with every
kind of tree and pruning, greedy and in float32, and compares the tokens. The sample checkpoint is
read in both adapter scopes. Half an hour or more on two CPU cores; `--count 10` for a look.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from huggingface_hub.utils import tqdm

from ssmlx.calibration.timing import Answer, ssmlx_answer
from ssmlx.commands.options import make_parser, run
from ssmlx.errors import InputError
from ssmlx.settings import AdapterScope, GenerateConfig, PruneConfig, TreeConfig

from .run.common import mlx_lm_answer, save
from .run.samples import Sample, add_sample_options, load_sample

PROG = "perf.lossless"


@dataclass(frozen=True)
class Variant:
    """One way to decode."""

    name: str
    config: GenerateConfig


def variants(max_tokens: int, *, can_prune: bool = True) -> list[Variant]:
    """Plain decoding, and streaming with each kind of tree and pruning."""

    def streaming(name: str, tree: TreeConfig, **prune: Any) -> Variant:
        config = GenerateConfig(
            decoding="streaming", max_tokens=max_tokens, tree=tree, prune=PruneConfig(**prune)
        )
        return Variant(name, config)

    full, best = TreeConfig(kind="full", width=2), TreeConfig(kind="best", size=16)
    whole = [
        Variant("plain", GenerateConfig(decoding="plain", max_tokens=max_tokens)),
        streaming("full, 1 a level", TreeConfig(kind="full", width=1)),
        streaming("full, 2 a level", full),
        streaming("best 16", best),
    ]
    pruned = [
        streaming("full, 2 a level, pruned to 8", full, kind="budget", keep=8),
        streaming("full, 2 a level, threshold 0.05", full, kind="threshold", threshold=0.05),
        streaming("best 16, pruned to 8", best, kind="budget", keep=8),
    ]
    return whole + pruned if can_prune else whole


def compare(sample: Sample, max_tokens: int) -> list[dict[str, Any]]:
    """A row for each variant: answers equal to mlx-lm's, tokens, target calls."""
    label = f"{sample.name}, scope {sample.scope}"
    oracle = [
        mlx_lm_answer(sample.mlx_model, sample.tokenizer, prompt, max_tokens)
        for prompt in tqdm(sample.prompts, desc=f"{label}: mlx-lm", disable=None)
    ]
    rows = []
    for variant in variants(max_tokens, can_prune=sample.can_prune):
        answers = [
            ssmlx_answer(sample.model, sample.tokenizer, prompt, variant.config)
            for prompt in tqdm(sample.prompts, desc=f"{label}: {variant.name}", disable=None)
        ]
        rows.append(row(sample.scope, variant.name, answers, oracle))
        print(line(rows[-1]), flush=True)
    return rows


def row(scope: str, name: str, answers: list[Answer], oracle: list[Answer]) -> dict[str, Any]:
    """What one variant's answers come to."""
    tokens = sum(len(answer.tokens) for answer in answers)
    calls = sum(answer.target_calls for answer in answers)
    pairs = zip(answers, oracle, strict=True)
    return {
        "scope": scope,
        "decoding": name,
        "same_as_mlx_lm": sum(a.tokens == b.tokens for a, b in pairs),
        "prompts": len(answers),
        "tokens": tokens,
        "target_calls": calls,
        "tokens_per_call": round(tokens / calls, 3),
    }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['scope']:8} {row['decoding']:34} same as mlx-lm {row['same_as_mlx_lm']:3}/"
        f"{row['prompts']:<4} {row['tokens']:5} tokens {row['target_calls']:5} calls "
        f"{row['tokens_per_call']:5.2f} a call"
    )


def scopes_of(args: argparse.Namespace) -> tuple[AdapterScope, ...]:
    """The scopes to read the sample checkpoint with; another adapter has its own.

    Raises:
        InputError: a scope is given beside an adapter.
    """
    if args.adapter is None:
        return (args.scope,) if args.scope else ("all", "streams")
    if args.scope is not None:
        raise InputError(
            "--scope beside --adapter", expected="the adapter's own scope", do="drop --scope"
        )
    return ("all",)


def _main(args: argparse.Namespace) -> int:
    variants(args.max_tokens)  # nonsense is refused before anything is loaded
    rows = []
    for scope in scopes_of(args):
        sample = load_sample(args, scope)
        found = compare(sample, args.max_tokens)
        name = sample.name if args.adapter else scope
        print("saved", save(f"lossless-{name}", {"rows": found}), file=sys.stderr)
        rows += found
    return 0 if all(row["same_as_mlx_lm"] == row["prompts"] for row in rows) else 1


def main(argv: list[str] | None = None) -> int:
    """Entry point: exit code 1 if any answer differs."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_sample_options(parser, count=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--scope", choices=("all", "streams"), help="one scope of the sample checkpoint only"
    )
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
