"""`python -m perf.speed`: tokens/s of streaming, of plain decoding, and of mlx-lm, in one run.

Every prompt is answered by each in turn, in an order that rotates, after a warm-up; the speed-up
is the ratio of medians over prompts, with a 95 % bootstrap interval. Then steps are taken apart:
the model's forward alone, and all else that a step does. Writes JSON and a picture.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm

from ssmlx.calibration.timing import Answer, in_turns, ssmlx_answer
from ssmlx.commands.options import make_parser, run
from ssmlx.settings import GenerateConfig, TreeConfig
from ssmlx.tuning.machine import machine

from ..run.common import RESULTS, check_counts, mlx_lm_answer, save
from ..run.metrics import ratio_interval
from ..run.samples import Sample, add_sample_options, load_sample
from .step_cost import step_cost

PROG = "perf.speed"
Answerer = Callable[[list[int]], Answer]
COLOURS = {"streaming": "#0b6e4f", "plain": "#8d99ae", "mlx-lm": "#2b2d42"}


def answerers(sample: Sample, max_tokens: int, tree_size: int) -> dict[str, Answerer]:
    """The systems to time, each greedy and with the same `max_tokens`."""
    model, tokenizer = sample.model, sample.tokenizer
    tree = TreeConfig(kind="best", size=tree_size)
    streaming = GenerateConfig(decoding="streaming", max_tokens=max_tokens, tree=tree)
    plain = GenerateConfig(decoding="plain", max_tokens=max_tokens)
    return {
        "streaming": lambda prompt: ssmlx_answer(model, tokenizer, prompt, streaming),
        "plain": lambda prompt: ssmlx_answer(model, tokenizer, prompt, plain),
        "mlx-lm": lambda prompt: mlx_lm_answer(sample.mlx_model, tokenizer, prompt, max_tokens),
    }


def time_all(systems: dict[str, Answerer], prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """Each system's answers; the order of systems rotates from prompt to prompt."""
    names = list(systems)
    for name in names:
        systems[name](prompts[0])
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for prompt, name in in_turns(tqdm(prompts, desc="prompts", disable=None), names):
        answers[name].append(systems[name](prompt))
    return answers


def draw(summary: dict[str, Any], path: Path) -> None:
    """A picture of the tokens/s."""
    import matplotlib.pyplot as plt

    names = list(COLOURS)
    figure, axes = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    speeds = [summary["tokens_per_second"][name] for name in names]
    bars = axes.barh(names, speeds, color=[COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("decode tokens/s (median over prompts)")
    axes.set_title(
        f"{summary['prompts']} prompts of {summary['data']}, {summary['adapter']}, float32, "
        f"{summary['tokens_per_call']:.2f} tokens a call\n{machine()['machine']}",
        fontsize=8,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)


def summarise(answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """Speeds, ratios, and whether all systems gave the same tokens."""
    speeds = {name: [a.tokens_per_second for a in row] for name, row in answers.items()}
    streaming = answers["streaming"]
    tokens = [[a.tokens for a in row] for row in answers.values()]
    return {
        "prompts": len(streaming),
        "same_tokens": all(row == tokens[0] for row in tokens),
        "tokens_per_second": {name: statistics.median(row) for name, row in speeds.items()},
        "tokens_per_call": sum(len(a.tokens) for a in streaming)
        / sum(a.target_calls for a in streaming),
        "streaming_over_mlx_lm": ratio_interval(speeds["streaming"], speeds["mlx-lm"]),
        "streaming_over_plain": ratio_interval(speeds["streaming"], speeds["plain"]),
        "plain_over_mlx_lm": ratio_interval(speeds["plain"], speeds["mlx-lm"]),
    }


def report(summary: dict[str, Any], cost: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{name:10} {v:6.1f} tokens/s" for name, v in summary["tokens_per_second"].items()]
    lines.append(f"tokens per target call {summary['tokens_per_call']:.2f}")
    for name in ("streaming_over_mlx_lm", "streaming_over_plain", "plain_over_mlx_lm"):
        ratio, low, high = summary[name]
        lines.append(f"{name.replace('_', ' '):22} {ratio:.2f}x  [{low:.2f}, {high:.2f}]")
    lines.append(f"same tokens everywhere: {summary['same_tokens']}")
    low, high = cost["interval"]
    allowed = summary["tokens_per_call"] * cost["one_row"] / cost["forward"]
    reached = summary["streaming_over_mlx_lm"][0] / allowed
    lines.append(
        f"one row takes {cost['one_row'] * 1e3:.1f} ms: the forward allows {allowed:.2f}x, "
        f"of which {reached:.2f} was reached"
    )
    forward, rest = (f"{cost[name] * 1e3:.1f} ms" for name in ("forward", "rest"))
    lines.append(
        f"a step of {cost['tree_size']} nodes: its forward {forward}, all else {rest}: "
        f"{cost['beside_forward']:.1%} [{low:.1%}, {high:.1%}] beside it"
    )
    return "\n".join(lines)


def _main(args: argparse.Namespace) -> int:
    # Nonsense is refused before anything is loaded.
    GenerateConfig(max_tokens=args.max_tokens, tree=TreeConfig(size=args.tree_size))
    sample = load_sample(args, "all")
    systems = answerers(sample, args.max_tokens, args.tree_size)
    cost = step_cost(sample.model, sample.prompts[0], args.tree_size, args.repeats)
    what = {"adapter": sample.name, "scope": sample.scope, "data": args.prompts.name}
    summary = {**what, **summarise(time_all(systems, sample.prompts))}
    print(report(summary, cost))
    name = f"speed-{sample.name}" if args.adapter else "speed"
    print("saved", save(name, {"summary": summary, "step": cost}), file=sys.stderr)
    try:
        draw(summary, RESULTS / f"{name}.png")
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_sample_options(parser, count=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tree-size", type=int, default=TreeConfig().size, metavar="N")
    parser.add_argument("--repeats", type=int, default=40, help="steps that are taken apart")
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
