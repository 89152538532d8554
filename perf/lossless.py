"""`python -m perf.lossless`: is streaming the same as plain decoding, token for token?

Answers the sample SQL prompts by mlx-lm's `stream_generate`, by our plain decoding and by
streaming with every kind of tree and pruning, in both adapter scopes, greedy and in float32,
and compares the tokens. Half an hour or more on two CPU cores; `--count 10` for a look.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from .common import (
    Answer,
    check_end_tokens,
    encoded_prompts,
    load_both,
    mlx_lm_answer,
    sample_folders,
    save,
    ssmlx_answer,
)

from huggingface_hub.utils import tqdm  # isort: skip
from ssmlx.api import GenerateConfig  # isort: skip
from ssmlx.config import AdapterScope, PruneConfig, TreeConfig  # isort: skip


@dataclass(frozen=True)
class Variant:
    """One way to decode."""

    name: str
    config: GenerateConfig


def variants(max_tokens: int) -> list[Variant]:
    """Plain decoding, and streaming with each kind of tree and pruning."""

    def streaming(name: str, tree: TreeConfig, **prune: Any) -> Variant:
        config = GenerateConfig(
            decoding="streaming", max_tokens=max_tokens, tree=tree, prune=PruneConfig(**prune)
        )
        return Variant(name, config)

    full, best = TreeConfig(kind="full", width=2), TreeConfig(kind="best", size=16)
    return [
        Variant("plain", GenerateConfig(decoding="plain", max_tokens=max_tokens)),
        streaming("full, 1 a level", TreeConfig(kind="full", width=1)),
        streaming("full, 2 a level", full),
        streaming("best 16", best),
        streaming("full, 2 a level, pruned to 8", full, kind="budget", keep=8),
        streaming("full, 2 a level, threshold 0.05", full, kind="threshold", threshold=0.05),
        streaming("best 16, pruned to 8", best, kind="budget", keep=8),
    ]


def compare(scope: AdapterScope, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """A row for each variant: answers equal to mlx-lm's, tokens, target calls."""
    with sample_folders(scope) as folders:
        model, tokenizer, mlx_model = load_both(*folders)
    check_end_tokens(model, tokenizer)
    prompts = encoded_prompts(model, tokenizer, count)
    label = f"scope {scope}"
    oracle = [
        mlx_lm_answer(mlx_model, tokenizer, prompt, max_tokens)
        for prompt in tqdm(prompts, desc=f"{label}: mlx-lm", disable=None)
    ]
    rows = []
    for variant in variants(max_tokens):
        answers = [
            ssmlx_answer(model, tokenizer, prompt, variant.config)
            for prompt in tqdm(prompts, desc=f"{label}: {variant.name}", disable=None)
        ]
        rows.append(row(scope, variant.name, answers, oracle))
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


def main() -> int:
    """Entry point: exit code 1 if any answer differs."""
    parser = argparse.ArgumentParser(prog="python -m perf.lossless", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="prompts (default: all 100)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--scope", choices=("all", "streams"), help="one scope only")
    args = parser.parse_args()
    scopes: tuple[AdapterScope, ...] = (args.scope,) if args.scope else ("all", "streams")
    rows = []
    for scope in scopes:
        rows += compare(scope, args.count, args.max_tokens)
        saved = save(f"lossless-{scope}", {"rows": [r for r in rows if r["scope"] == scope]})
        print("saved", saved, file=sys.stderr)
    return 0 if all(row["same_as_mlx_lm"] == row["prompts"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
