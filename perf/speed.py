"""`python -m perf.speed`: tokens/s of streaming, of plain decoding, and of mlx-lm, in one run.

Every prompt is answered by each in turn, in an order that rotates, after a warm-up; the speed-up
is the ratio of medians over prompts, with a 95 % bootstrap interval. Then steps are taken apart:
the model's forward alone, and all else that a step does. Writes JSON and a picture; `--count 20`
is enough for a look.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ssmlx.commands.machine import machine
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import publish
from ssmlx.decoding.loop import prefill, step
from ssmlx.drafters.streams import StreamDrafter
from ssmlx.model.cache import StreamCache, TreeCache
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import Tree, root_tree
from ssmlx.settings import PruneConfig, TreeConfig
from ssmlx.tuning.report import Columns, table

from .run.experiment import task_result
from .run.options import (
    adapter_with_streams,
    add_experiment_options,
    add_out,
    check_counts,
    experiment_of,
)
from .run.show import TOKENS_PER_CALL, Panel, Row, draw_tasks, figure, notes_of, same_text
from .run.statistics import median_ratio
from .run.target import STREAMS

PROG = "perf.speed"
WARM_UP = 3
"""Steps before those that are timed."""
FORWARDS = ("lower", "upper", "second_pass", "logits", "draft_logits")
"""What the model computes in a step."""


def report(result: Row) -> str:
    summary, cost = result["summary"], result["step"]
    columns: Columns = {
        "system": lambda row: row["name"],
        "decode tokens/s": figure("decode_rate", 1),
        "over mlx-lm": figure("speedup"),
        "tokens/call": figure("tokens_per_call"),
        "same tokens as plain": same_text(summary["prompts"]),
    }
    streams = summary["systems"][-1]
    low, high = cost["interval"]
    allowed = streams["tokens_per_call"]["value"] * cost["one_row"] / cost["forward"]
    found = streams["speedup"]
    reached = f", {found['value'] / allowed:.2f} of it reached" if found else ""
    one_row, forward, rest = (f"{cost[one] * 1e3:.1f} ms" for one in ("one_row", "forward", "rest"))
    lines = [
        *table(columns, summary["systems"]),
        *notes_of(summary),
        f"one row takes {one_row}: the forward allows {allowed:.2f}x{reached}",
        f"a step of {cost['tree_size']} nodes: its forward {forward}, all else {rest}: "
        f"{cost['beside_forward']:.1%} [{low:.1%}, {high:.1%}] beside it",
    ]
    return "\n".join(lines)


def draw(result: Row, path: Path) -> None:
    """A picture of the tokens/s."""
    task = {**result["summary"], "adapter": None}
    panel = Panel("decode tokens/s (median over prompts)", lambda row: row["decode_rate"], digits=1)
    title = f"{task['data']}, {result['dtype']}, {result['machine']['machine']}"
    draw_tasks([task], [panel, TOKENS_PER_CALL], title, path)


class ForwardDone:
    """A model whose forward was run before: it gives what that gave, and computes nothing."""

    def __init__(self, model: StreamFusedModel) -> None:
        self._model = model
        self._found: dict[str, mx.array] = {}
        self.backbone = self

    def forget(self) -> None:
        """Run what is asked for next, and keep that."""
        self._found = {}

    def _once(self, name: str, run: Callable[[], mx.array]) -> mx.array:
        if name not in self._found:
            self._found[name] = run()
            mx.eval(self._found[name])
        return self._found[name]

    def __getattr__(self, name: str) -> Any:
        own: Any = self._model if hasattr(self._model, name) else self._model.backbone
        if name not in FORWARDS:
            return getattr(own, name)
        return lambda *given: self._once(name, lambda: getattr(own, name)(*given))


def bare_forward(
    model: StreamFusedModel, tree: Tree, cache: TreeCache, num_streams: int
) -> Callable[[], None]:
    """The forward of a step alone: layers, second pass and both heads, on the same rows."""
    streams = StreamCache(range(model.insertion_layer, model.num_layers))
    path, split = tree.paths[-1], model.insertion_layer
    last, position = path[-1:], cache.length + tree.depths[-1:]

    def forward() -> None:
        hidden = model.lower(tree, cache)
        nodes = model.upper(hidden, tree, cache, 0)
        if not streams.capacity:
            cache.commit(path, path, split, tree.depths[-1:] + 1)
            streams.follow(cache, num_streams)
            cache.trim(cache.offset)
        own = model.second_pass(hidden, last, position, streams, num_streams)
        mx.eval(model.backbone.logits(nodes), model.draft_logits(own))

    cache.reserve(tokens=tree.paths.shape[1], scratch=tree.num_nodes)
    forward()  # `streams` follows the cache, once
    return forward


def one_row(model: StreamFusedModel, tree: Tree, cache: TreeCache) -> Callable[[], None]:
    """The forward of plain decoding alone, T(1): the root of `tree` through all layers."""
    root = root_tree(tree.tokens[:1])
    cache.reserve(tokens=1, scratch=1)

    def forward() -> None:
        hidden = model.upper(model.lower(root, cache), root, cache, 0)
        mx.eval(model.backbone.logits(hidden))

    return forward


def seconds_of(call: Callable[[], None]) -> float:
    """Seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Steps:
    """The steps of one answer, each taken on a forward that was run before: streams in a second
    pass, trees of the `size` likeliest nodes."""

    def __init__(self, model: StreamFusedModel, prompt: list[int], size: int) -> None:
        self.cache = model.make_cache()
        self._done = cast("Any", ForwardDone(model))
        tree = TreeConfig(kind="best", size=size)
        self._drafter = StreamDrafter(self._done, tree, model.num_streams)
        prefill(model, prompt[:-1], self.cache)
        self.tree = root_tree(mx.array(prompt[-1:], mx.int32))

    def rest(self) -> None:
        """All that a step does beside the model's forward; the text goes on by it."""
        num_tokens, tree = self._take()
        self.cache.advance(num_tokens)
        mx.eval(self.cache.state)
        self.tree = tree

    def run_forward(self) -> None:
        """Run the forward that `rest` does without."""
        self._done.forget()
        self._take()
        self.cache.trim(self.cache.offset)

    def _take(self) -> tuple[int, Tree]:
        result = step(self._done, self.tree, self.cache, self._drafter, PruneConfig())
        mx.eval(result.decided(), result.drafted(), self.cache.state)
        return len(result.read()), result.next_tree


def step_cost(
    model: StreamFusedModel, prompt: list[int], size: int, repeats: int
) -> dict[str, Any]:
    """Steps of one answer, taken apart in turns.

    Returns:
        Median seconds of a step's "forward" alone, the model's layers with their masks, second
        pass and heads; of the "rest", all else that it does; and of "one_row" through the model.
        "beside_forward" is the rest over the forward, with its "interval" over steps.
    """
    steps = Steps(model, prompt, size)
    cache = steps.cache
    times: dict[str, list[float]] = {"one_row": [], "forward": [], "rest": []}
    for _ in range(WARM_UP + repeats):
        tree = steps.tree
        times["one_row"].append(seconds_of(one_row(model, tree, cache)))
        times["forward"].append(seconds_of(bare_forward(model, tree, cache, model.num_streams)))
        steps.run_forward()
        times["rest"].append(seconds_of(steps.rest))
    seconds = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    share = median_ratio(times["rest"][WARM_UP:], times["forward"][WARM_UP:])
    beside = {"beside_forward": share.value, "interval": [share.low, share.high]}
    return {**seconds, **beside, "tree_size": steps.tree.num_nodes, "repeats": repeats}


def _main(args: argparse.Namespace) -> int:
    adapter_with_streams(args.adapter or args.task)
    args.systems = [f"streams --tree best --tree-size {args.tree_size}"]
    measured = experiment_of(args, "speed").run()
    model = measured.target.drafting(STREAMS).model
    cost = step_cost(model, measured.prompts[0], args.tree_size, args.steps)
    result = {
        "machine": machine(),
        "dtype": args.dtype,
        "summary": task_result(measured),
        "step": cost,
    }
    publish(result, args.out / measured.experiment.name, report(result), draw)
    return 0


def main(argv: list[str] | None = None) -> int:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    add_experiment_options(parser, task="sql", systems=())
    parser.add_argument("--tree-size", type=int, default=TreeConfig().size, metavar="N")
    parser.add_argument("--steps", type=int, default=40, help="that are taken apart (default: 40)")
    add_out(parser)
    args = parser.parse_args(argv)
    check_counts(parser, args, "repeats", "max_tokens", "steps")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
