"""What this machine charges, whatever is asked: rows, launches, reads, and where caches go."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from ssmlx.tuning.chips import Decoder
from ssmlx.tuning.ladder import USUAL_CONTEXT, expected_costs, this_chip

from ssmlx.calibration.costs import filled_cache, likely_tree, medians
from ssmlx.decoding.loop import streaming_decode
from ssmlx.generation.plan import make_plan
from ssmlx.model import metal
from ssmlx.model.streams import StreamFusedModel
from ssmlx.model.tree import Tree
from ssmlx.settings import GenerateConfig

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
TURNS = (3, 40)  # of all numbers of rows: at least and at most
# tiny kernels that wait for each other
CHAINS = (200, 3200)
CHAIN_TURNS = 5
# steps, tokens of a cache, seconds
LAUNCH_STEPS = 16
LAUNCH_ROOM = 4096
PAUSE = 0.02


def machine_result(model: StreamFusedModel, prompt: list[int], deadline: float) -> dict[str, Any]:
    """T(n) / T(1) of whole forwards of a tree's rows, in turns until the deadline, and seconds of a
    launch, beside what was predicted for this chip; and `launches_result`."""
    context = USUAL_CONTEXT
    chip = this_chip()
    cache = filled_cache(model, prompt, context, max(ROWS))

    def forward(tree: Tree) -> mx.array:
        hidden = model.insert(model.lower(tree, cache), 0)
        return mx.argmax(model.backbone.logits(model.upper(hidden, tree, cache, 0)), axis=-1)

    calls: Any = {
        ("rows", row, context): partial(forward, likely_tree(model, row)[0]) for row in ROWS
    }
    once = sum(medians(calls, 1)[0].values())
    turns = min(max(int((deadline - time.perf_counter()) / once), TURNS[0]), TURNS[1])
    found, noise = medians(calls, turns)
    costs = expected_costs(model)
    seconds = list(found.values())
    forwards = (costs.lower, costs.upper, costs.head)
    predicted = [sum(one.at(row, context) for one in forwards) for row in ROWS]
    rows = {
        "chip": chip.name,
        "bits": Decoder.of(model).bits,
        "context": context,
        "turns": turns,
        "noise": noise,
        "rows": ROWS,
        "seconds": seconds,
        "one_over_predicted": seconds[0] / predicted[0],
        "ratios": [one / seconds[0] for one in seconds],
        "predicted": [one / predicted[0] for one in predicted],
        "launch": launch_seconds(),
        "launch_predicted": chip.launch(),
    }
    return {"rows": rows, "launches": launches_result(model, prompt)}


def launch_seconds() -> float:
    """What a tiny kernel takes that waits for the one before it."""

    def seconds(length: int) -> float:
        found = mx.array(1.0)
        for _ in range(length):
            found = found + 1
        started = time.perf_counter()
        mx.eval(found)
        return time.perf_counter() - started

    short, long = (min(seconds(one) for _ in range(CHAIN_TURNS)) for one in CHAINS)
    return (long - short) / (CHAINS[1] - CHAINS[0])


def trials_result() -> list[dict[str, Any]]:
    """The attention kernel beside MLX's own, at the shapes that it was tried at so far."""
    return [
        {
            "rows": one.largest.rows,
            "keys": one.largest.keys,
            **vars(trial),
            "taken": trial.takes_kernel,
        }
        for one, trial in metal.trials().items()
    ]


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """An entry for each time that the host reads an array inside the block."""
    reads: list[int] = []

    def counting(own: Callable[[mx.array], Any]) -> Callable[[mx.array], Any]:
        return lambda array: (reads.append(1), own(array))[1]  # type: ignore[func-returns-value]

    names: Any = {name: counting(getattr(mx.array, name)) for name in ("item", "tolist")}
    with patch.multiple(mx.array, **names):
        yield reads


def paused(seconds: float, tokens: list[int]) -> bool:
    """Asked whether an answer ends, wait; it does not."""
    time.sleep(seconds)
    return False


def launches_result(model: StreamFusedModel, prompt: list[int]) -> dict[str, float]:
    """Seconds and peak bytes of steps, with a pause between the read of each and its successor's
    launch and without; the bytes of a layer's cache; and the host's reads a step.

    MLX copies a layer's cache where the GPU has not let go of it when the next step is launched:
    then a straight peak is higher by a layer or more, and a straight step takes longer.
    """
    drafter = make_plan(model, GenerateConfig(decoding="streaming")).drafter
    assert drafter is not None
    found: dict[str, float] = {}
    for name, pause in [("straight", 0.0), ("paused", PAUSE)] * 2:
        cache = model.make_cache()
        cache.reserve(tokens=LAUNCH_ROOM)
        ends = partial(paused, pause)
        calls = filter(None, streaming_decode(model, prompt, cache, drafter=drafter, ends=ends))
        for _ in range(LAUNCH_STEPS // 2):
            next(calls)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        with counted_reads() as reads:
            for _ in range(LAUNCH_STEPS):
                next(calls)
        seconds = (time.perf_counter() - started) / LAUNCH_STEPS - pause
        found[f"{name}_seconds"] = min(seconds, found.get(f"{name}_seconds", seconds))
        found[f"{name}_peak"] = mx.get_peak_memory() - before
        found |= {"layer": cache.nbytes / model.num_layers, "reads": len(reads) / LAUNCH_STEPS}
    return found
