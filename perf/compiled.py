"""`python -m perf.compiled`: what `mx.compile` would bring to a step.

A decoder layer's shapes change with every committed token, so compiled it would be compiled anew
at every step. What keeps its shapes is behind the layers: acceptance, ranking of the streams'
guesses, the next tree and who sees whom in it. That part alone is run here as it is and compiled,
on random logits: operations, the host's time to build them, and all of the time.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ssmlx.commands.options import add_counts, make_parser, run
from ssmlx.decoding.accept import accept
from ssmlx.decoding.drafter import rank_candidates
from ssmlx.model.tree import Tree, draft_topology, grow_tree
from ssmlx.settings import TreeConfig
from ssmlx.tuning.report import aligned

from .run.common import check_counts

PROG = "perf.compiled"
WARM_UP = 3
Tail = Callable[..., tuple[mx.array, ...]]
"""Of a tree, tokens [N], depths [N], paths [N, P]; target tokens [N]; logits [G, Vd]."""


@dataclass(frozen=True)
class Measured:
    """One way to run the tail of a step.

    Attributes:
        name: what it is.
        operations: nodes of its graph, views included.
        build_ms: milliseconds in which the host builds the graph, median.
        all_ms: until its results are there, median.
        first_ms: the same of the first time, what compiling takes included.
    """

    name: str
    operations: int
    build_ms: float
    all_ms: float
    first_ms: float


def make_tail(config: TreeConfig, num_streams: int, vocab: mx.array) -> Tail:
    """What a step does behind its layers and heads, for trees of one shape.

    Args:
        config: the trees.
        num_streams: G.
        vocab: [Vd] the draft vocabulary.
    """
    num_candidates = draft_topology(config, num_streams).num_candidates

    def tail(
        tokens: mx.array, depths: mx.array, paths: mx.array, target: mx.array, logits: mx.array
    ) -> tuple[mx.array, ...]:
        accepted = accept(Tree(tokens, depths, paths, depths.shape[0]), target)
        ranked, logprobs = rank_candidates(logits, num_candidates)
        grown = grow_tree(accepted.correction, vocab[ranked], logprobs, config)
        kept = accepted.path, accepted.new_tokens, accepted.num_accepted
        return *kept, grown.tokens, grown.depths, grown.paths, grown.ancestors

    return tail


def random_inputs(config: TreeConfig, num_streams: int, vocab: mx.array) -> list[mx.array]:
    """What a tail takes: a drafted tree, the target's tokens, and logits."""
    logits = mx.random.normal((num_streams, vocab.size), key=mx.random.key(0))
    ranked, logprobs = rank_candidates(logits, draft_topology(config, num_streams).num_candidates)
    tree = grow_tree(vocab[:1], vocab[ranked], logprobs, config)
    return [tree.tokens, tree.depths, tree.paths, tree.tokens[::-1], logits]


def count_operations(arrays: tuple[mx.array, ...]) -> int:
    """Nodes of the graph behind `arrays`."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


def measure(name: str, tail: Tail, inputs: list[mx.array], repeats: int) -> Measured:
    """Run a tail again and again."""
    mx.eval(inputs)
    builds, totals = [], []
    for _ in range(1 + WARM_UP + repeats):
        started = time.perf_counter()
        results = tail(*inputs)
        builds.append(time.perf_counter() - started)
        mx.eval(results)
        totals.append(time.perf_counter() - started)
    build, total = (1e3 * statistics.median(row[1 + WARM_UP :]) for row in (builds, totals))
    return Measured(name, count_operations(tail(*inputs)), build, total, 1e3 * totals[0])


def report(rows: list[Measured]) -> str:
    """The result as text."""
    head = ["behind the layers of a step", "operations", "host, ms", "all, ms", "first time, ms"]
    lines = [
        [
            row.name,
            str(row.operations),
            *(f"{one:.2f}" for one in (row.build_ms, row.all_ms, row.first_ms)),
        ]
        for row in rows
    ]
    return "\n".join(aligned([head, *lines]))


def _main(args: argparse.Namespace) -> int:
    config, vocab = TreeConfig(size=args.tree_size), mx.arange(args.draft_vocab_size)
    tail = make_tail(config, args.num_streams, vocab)
    inputs = random_inputs(config, args.num_streams, vocab)
    ways: dict[str, Any] = {"as it is": tail, "mx.compile": mx.compile(tail)}
    print(report([measure(name, way, inputs, args.repeats) for name, way in ways.items()]))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = make_parser(PROG, *(__doc__ or "").partition(": ")[2].split("\n\n", 1))
    add_counts(
        parser,
        ("tree-size", 16, "nodes of the trees"),
        ("num-streams", 5, "streams"),
        ("draft-vocab-size", 8192, "tokens that streams guess among"),
        ("repeats", 50, "timed runs of each way"),
    )
    args = parser.parse_args(argv)
    check_counts(parser, args, "tree_size", "num_streams", "draft_vocab_size", "repeats")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
