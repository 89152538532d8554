"""Table 1 of the paper: what the streams cost in quality, and what they save in target calls.

Every system answers the same prompts, greedily and in float32; mlx-lm's own stream_generate too,
on the adapter's weights. An adapter of scope "all" is compared with --baseline, the same LoRA
trained without streams; an adapter of scope "streams" with the untouched base, token for token.
Each figure has a 95 % bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssmlx.commands.options import (
    add_drafting_options,
    generate_config,
    make_parser,
    run,
)
from ssmlx.errors import InputError, require
from ssmlx.loading.adapter import read_lora
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import CONFIG_FILE, resolve_adapter, resolve_model
from ssmlx.settings import GenerateConfig, TreeConfig, read_json
from ssmlx.tuning.report import Columns, publish, table

from .run.experiment import Experiment, failures, result_of, task_result, texts_of
from .run.options import add_base, add_fresh, add_max_tokens, add_out, check_counts
from .run.published import PAPER
from .run.show import (
    TOKENS_PER_CALL,
    Panel,
    Row,
    difference_lines,
    draw_tasks,
    figure,
    metrics,
    notes_of,
    number,
    paper_span,
    same_text,
)
from .run.target import MLX_LM, PLAIN, STREAMS, System, Weights, read_own_lora
from .run.tasks import TASKS, add_data_options, data_file, differences, read_examples, scorer_of

BASELINE = "baseline"
PROG = "perf.quality"
EPILOG = """examples:
  python -m perf.quality --task sql --data-dir data --adapter adapters/sql \\
      --baseline adapters/sql-lora --trees "full:2,full:4,best:16,best:32,best:64"
  python -m perf.quality --task chat --data chat.jsonl --adapter adapters/chat-streams

Exact match: the answer is a reference once every run of white space is one space. ROUGE: F1 by
rouge_score with its stemmer, best over the references; lines are ROUGE-LSum's sentences.
Writes quality-TASK.json, .txt and .png. Every answer is kept in quality-TASK-*.part.jsonl, so that
a run that was stopped goes on; settings or weights that differ have a file of their own.
The tree with the most tokens per call is chosen on the very prompts that it is reported on; give
--trees with valid.jsonl, and --tree with test.jsonl, to keep the two apart.
Exit code 1: answers that must be the same are not."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = make_parser(PROG, (__doc__ or "").partition("\n")[0], EPILOG)
    data = parser.add_argument_group("data")
    data.add_argument("--task", choices=tuple(TASKS), required=True)
    add_data_options(data)
    systems = parser.add_argument_group("systems")
    add_base(systems)
    systems.add_argument(
        "--adapter", required=True, metavar="NAME|FOLDER", help="an adapter with streams"
    )
    systems.add_argument(
        "--baseline", type=Path, metavar="FOLDER",
        help="the same LoRA trained without streams, as mlx-lm reads it (adapters.safetensors and "
        "adapter_config.json); decoded plainly",
    )  # fmt: skip
    add_drafting_options(parser)
    parser.add_argument(
        "--trees", metavar="KIND:N,...",
        help='several trees on the same prompts, such as "full:2,best:16" (K children a level, or '
        "N nodes); the one with the most tokens per call is reported",
    )  # fmt: skip
    add_max_tokens(parser)
    add_out(parser)
    add_fresh(parser)
    parser.set_defaults(decoding="streaming", temp=0.0, seed=None)
    args = parser.parse_args(argv)
    check_counts(parser, args, "max_tokens")
    args.max_tokens = args.max_tokens or TASKS[args.task].max_tokens
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The adapter's figures, and beside them the baseline's."""
    task = TASKS[args.task]
    trees = tree_systems(args)
    folder = resolve_adapter(args.adapter)
    if folder is None:
        raise InputError("--adapter none", expected="an adapter", do="give a folder or its name")
    data = data_file(task, args.data, args.data_dir)
    config = GenerateConfig(decoding="plain", max_tokens=args.max_tokens)
    plain = [System(MLX_LM, MLX_LM, config), System(PLAIN, PLAIN, config)]
    scorer_of(task)
    adapter = read_own_lora(folder)
    own = Experiment(
        name=f"quality-{task.name}",
        weights=Weights(resolve_model(args.model), adapter=adapter, folder=folder),
        systems=[*plain, *trees],
        examples=read_examples(data, task, args.count),
        task=task,
        data=data.name,
        template=adapter.config.prompt_template,
        out=args.out,
        fresh=args.fresh,
    )
    make_folder(args.out)
    baseline = None
    if args.baseline is not None:
        baseline = replace(_baseline(args.baseline.expanduser(), own), systems=plain)
        baseline.load()  # its mistakes are told before the first answer
    measured = own.run()
    parts = [task_result(measured)]
    if baseline is not None:
        other = baseline.run()
        parts.append(task_result(other, adapter=BASELINE))
        texts = [texts_of(one.first(PLAIN)) for one in (measured, other)]
        parts[0]["differences"] = differences(task, own.examples, *texts)
    return result_of(own, args.model, parts)


def _baseline(folder: Path, first: Experiment) -> Experiment:
    """LoRA without streams; template and end tokens are its own where it has them."""
    lora, own = read_lora(folder, "--baseline"), dict[str, Any]()
    if (folder / CONFIG_FILE).exists():
        own = read_json(folder / CONFIG_FILE, "the settings of an ssmlx adapter")
    assert first.weights.adapter is not None
    ends = tuple(own.get("end_token_ids") or first.weights.adapter.config.end_token_ids)
    weights = Weights(first.weights.base, lora=lora, end_tokens=ends, folder=folder)
    return replace(first, weights=weights, template=own.get("prompt_template") or first.template)


def tree_systems(args: argparse.Namespace) -> list[System]:
    """The trees to try, by label."""
    config = generate_config(args).with_default_shape()
    require(
        config.drafter in (None, STREAMS),
        f"--drafter {args.drafter}", expected="streams, alone or with its keys", do="drop it",
    )  # fmt: skip
    looked_up = f" + {config.lookup_nodes} looked up" if config.lookup_nodes else ""
    trees: Sequence[Any] = [config.tree]
    if args.trees is not None:
        for name in ("tree", "tree_width", "tree_size"):
            flag = "--" + name.replace("_", "-")
            require(
                getattr(args, name) is None,
                f"{flag} beside --trees", expected="one of them", do=f"drop {flag}",
            )  # fmt: skip
        trees = parse_trees(args.trees)
    return [
        System(tree_label(tree) + looked_up, STREAMS, replace(config, tree=tree)) for tree in trees
    ]


def parse_trees(text: str) -> list[TreeConfig]:
    """`full:2,best:16` as trees."""
    trees = []
    for item in text.split(","):
        kind, _, number = item.strip().partition(":")
        require(
            kind in ("full", "best") and number.isdigit(),
            f"--trees {item.strip()!r}",
            expected="full:K (children a level) or best:N (nodes), with commas between",
            do='write such as --trees "full:2,best:16"',
        )
        size: Mapping[str, Any] = {"width" if kind == "full" else "size": int(number)}
        trees.append(TreeConfig(kind="full" if kind == "full" else "best", **size))
    return trees


def tree_label(tree: TreeConfig) -> str:
    """`full:2`, `best:16`, or `best:16, 3 a level`."""
    if tree.kind == "full":
        return f"full:{tree.full_width}"
    return f"best:{tree.size}" + (f", {tree.width} a level" if tree.width else "")


def report(result: Row) -> str:
    """The result as text."""
    first, *others = result["tasks"]
    blocks = [
        [
            f"{first['task']}: {first['prompts']} prompts of {first['data']}, {result['model']}, "
            f"greedy, float32, at most {first['max_tokens']} tokens an answer; [95 % intervals "
            "over prompts]"
        ],
        *(table(_columns(task), task["systems"]) for task in result["tasks"]),
        difference_lines(first["adapter"], BASELINE, first["differences"]) if others else [],
        _note_lines(first),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _columns(task: Row) -> Columns:
    return {
        str(task["adapter"]): lambda row: row["name"],
        **metrics(task["figures"]),
        "tokens/call": figure("tokens_per_call"),
        "calls": number("target_calls"),
        "calls/answer": figure("target_calls_per_answer", 1),
        "tokens": number("tokens"),
        "tokens/answer": figure("tokens_per_answer", 1),
        "decode tokens/s": figure("decode_rate", 1),
        "extra parameters": number("extra_parameters"),
        "same tokens as plain": same_text(task["prompts"]),
    }


def _note_lines(task: Row) -> list[str]:
    """What the figures mean."""
    notes, names = (
        ["plain: what the streams draft for, without them", *notes_of(task)],
        task["figures"],
    )
    if names and task["task"] == "sql":
        notes.append("exact match: every run of white space counts as one space")
    elif names:
        notes.append("ROUGE: F1 by rouge_score with stemmer, lines are sentences, best reference")
    cut = next(row["cut_at_max_tokens"] for row in task["systems"] if row["kind"] == "plain")
    notes.append(f"cut at {task['max_tokens']} tokens: {cut} of plain's answers")
    paper = PAPER.get(task["task"])
    if paper:
        low, high = paper.call_reduction
        notes.append(
            f"the paper's table 1, {paper.name}, models of 1.3B to 7B: {low:.2f} to {high:.2f} "
            f"tokens per call, {names[0] if names else 'metric'} {paper.metric[0]:.2f} to "
            f"{paper.metric[1]:.2f}"
        )
    return notes


def draw(result: Row, path: Path) -> None:
    """The picture: the metric beside the tokens per call, each system a line."""
    tasks = result["tasks"]
    metric = [
        Panel(f"{name}, %", _figure_of(name), paper_span(lambda row: row.metrics[0]), 1)
        for name in tasks[0]["figures"][:1]
    ]
    title = (
        f"{result['model']}, greedy, float32, 95 % intervals over prompts; pale bands: the paper's "
        "table 1, models of 1.3B to 7B"
    )
    draw_tasks(tasks, [*metric, TOKENS_PER_CALL], title, path)


def _figure_of(name: str) -> Callable[[Row], Any]:
    return lambda row: row["figures"][name]


def _main(args: argparse.Namespace) -> int:
    result = measure(args)
    publish(result, args.out / f"quality-{args.task}", report(result), draw)
    return 1 if failures(result) else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
