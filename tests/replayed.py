"""Replays the controller on recorded answers: no model, no clock. `python -m tests.replayed` prints
a table.

`perf/measured/acceptance.npz` has, for every place of the answers of four adapters, from which tree
size on the best tree holds each next token. A call with n nodes at a place advances by 1 and the
depth that n nodes hold. Costs are in plain calls, measured on one machine (2 cores, float32) or
published; what the controller believes at first may be wrong, and what it is told of a call's
seconds is noisy.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ssmlx.decoding.draft_shape import CallRecord, DraftShape
from ssmlx.policy.acceptance import AcceptancePrior
from ssmlx.policy.controller import Controller
from ssmlx.policy.costs import CostTable, interpolate
from ssmlx.policy.offers import CurveOffer, OfferSource, SteadySource

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "perf/measured/acceptance.npz"
CURVES = Path(__file__).parent / "data/tokens_per_call.json"
MAX_NODES = 16
FIXED_SIZES = (2, 3, 4, 6, 8, 12, 16)
SEEDED_SIZES = (2, 3, 4, 6, 8, 16)
ENTRY = 0.35
"""Plain calls that a drafting pass takes: the call that begins to draft has it beside a plain one,
and the call that leaves drafting goes without it."""
PLAIN_SECONDS = 0.02
SEED_CALLS = 6
"""Plain calls that a head start times."""
TABLES: dict[str, dict[int, float]] = {
    # Plain calls that a call with n nodes takes, drafting included.
    "measured": {2: 1.70, 3: 1.8, 4: 1.98, 6: 2.0, 8: 2.2, 12: 2.95, 16: 2.12},
    # 4-bit layers on Apple GPUs as published (mlx#3863, #3852, #3839, #3791), and 0.3 for drafting.
    "M3 Max": {2: 1.30, 3: 1.44, 4: 1.58, 6: 2.34, 8: 2.80, 12: 4.24, 16: 4.25},
    "M4 Pro": {2: 1.31, 3: 1.46, 4: 1.76, 6: 2.37, 8: 3.12, 12: 4.80, 16: 4.80},
    "M5 Max": {2: 1.36, 3: 1.41, 4: 1.56, 6: 1.98, 8: 2.50, 12: 3.35, 16: 4.20},
}


@dataclass(frozen=True)
class Condition:
    """The true costs of calls, and errors of the costs that the controller starts with.

    Args:
        table: name of the true costs.
        true: factor on the true costs beyond one plain call.
        throttle: factor on that in the second half of the tokens.
        read: factor on it in the timings before the first answer; None for no such timings.
        noise: standard deviation of a call's seconds, over their mean; the timings before the first
        answer have half of it.
    """

    table: str = "measured"
    true: float = 1.0
    throttle: float = 1.0
    read: float | None = 1.0
    noise: float = 0.08

    def cost(self, nodes: int, is_late: bool = False) -> float:
        """True cost of a call with `nodes` nodes, in plain calls."""
        scale = self.true * (self.throttle if is_late else 1.0)
        return 1 + (_table_cost(self.table, nodes) - 1) * scale


@cache
def _table_cost(table: str, nodes: int) -> float:
    known = TABLES[table]
    return interpolate(sorted(known), [known[n] for n in sorted(known)], nodes)


CONDITIONS = {
    "costs right": Condition(noise=0.0),
    "noise 8 %": Condition(),
    "noise 20 %": Condition(noise=0.2),
    "read 60 % too dear": Condition(read=1.6),
    "read 40 % too cheap": Condition(read=0.6),
    "read 3x too dear": Condition(read=3.0),
    "rows truly twice as dear": Condition(true=2.0),
    "16 rows truly cost 1.11": Condition(true=0.1),
    "throttled 1.6x half-way": Condition(throttle=1.6),
    "M3 Max": Condition(table="M3 Max"),
    "M4 Pro": Condition(table="M4 Pro"),
    "M5 Max": Condition(table="M5 Max"),
    "no head start": Condition(read=None),
    "no head start, M4 Pro": Condition(read=None, table="M4 Pro"),
}
TASKS = {
    "sql": ("sql", 1.0),
    "e2e": ("e2e", 1.0),
    "dialogsum": ("dialogsum", 1.0),
    "chat": ("chat", 1.0),
    "harder chat": ("chat", 0.78),
}
"""The recorded adapter of each task, and the chance that an accepted token is kept."""


@dataclass(frozen=True)
class Answer:
    """A recorded answer: how many tokens a draft of each size has accepted at each place."""

    length: int
    depths: Sequence[Sequence[int]]  # accepted tokens by nodes (0 to MAX_NODES) and place


@cache
def curves() -> dict[str, dict[int, float]]:
    """Expected tokens per call by number of nodes, for each adapter."""
    read = json.loads(CURVES.read_text())
    return {
        task: {int(nodes): tokens for nodes, tokens in curve.items()}
        for task, curve in read["tokens_per_call"].items()
    }


@cache
def num_streams() -> dict[str, int]:
    return json.loads(CURVES.read_text())["num_streams"]


@cache
def recorded_answers(name: str, seed: int = 0) -> list[Answer]:
    """The recorded answers of a task; `seed` decides which accepted tokens a harder task loses."""
    task, kept = TASKS[name]
    recorded = np.load(RECORDED)
    needed = recorded[f"{task}-0"].astype(int)  # [streams, places, levels]
    ends = np.cumsum(recorded[f"{task}-0-lengths"])
    rng = np.random.default_rng(seed)
    survives = rng.random((needed.shape[1], 8)) < kept  # [places, levels]
    unbroken = np.cumprod(survives, axis=1).sum(axis=1)
    depths = np.zeros((MAX_NODES + 1, needed.shape[1]), int)
    for nodes in range(2, MAX_NODES + 1):
        streams = min(needed.shape[0], nodes - 1)
        held = (needed[streams - 1] <= nodes).sum(axis=1)
        depths[nodes] = np.minimum(held, unbroken)
    starts = [0, *ends[:-1]]
    return [
        Answer(int(end - start), depths[:, start:end].tolist())
        for start, end in zip(starts, ends, strict=True)
    ]


def resampled_answers(name: str, seed: int) -> list[Answer]:
    """As many of a task's answers as were recorded, drawn with replacement."""
    answers = recorded_answers(name, seed)
    return random.Random(seed).choices(answers, k=len(answers))


def shuffled_answers(name: str, seed: int) -> list[Answer]:
    """All recorded answers of a task in random order."""
    answers = list(recorded_answers(name))
    random.Random(seed).shuffle(answers)
    return answers


@dataclass(frozen=True)
class Taken:
    """The calls that an answer took."""

    length: int
    calls: float  # plain calls

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return (self.length - 1) / self.calls


@dataclass(frozen=True)
class Replayed:
    """The calls that answers took, and those of the better of plain decoding and a fixed tree."""

    taken: list[Taken]
    best_fixed: list[float]  # plain calls of each answer

    @property
    def share(self) -> float:
        return sum(self.best_fixed) / sum(one.calls for one in self.taken)

    @property
    def late_share(self) -> float:
        """Calls of the best fixed choice over those taken, in the second half of the answers."""
        half = len(self.taken) // 2
        return sum(self.best_fixed[half:]) / sum(one.calls for one in self.taken[half:])

    @property
    def speeds(self) -> list[float]:
        """Of the answers of 24 tokens or more."""
        return [one.speed for one in self.taken if one.length >= 24]


class Loop:
    """A decoding loop without a model: it asks the controller and records the costs of its
    calls."""

    def __init__(
        self, answer: Answer, condition: Condition, rng: random.Random, late_from: float
    ) -> None:
        """Args:
        answer: what is replayed.
        condition: the costs.
        rng: of the noise.
        late_from: the token from which on calls are throttled.
        """
        self._answer = answer
        self._condition = condition
        self._rng = rng
        self._late_from = late_from
        self.took = 0.0
        self.calls: list[CallRecord] = []

    def run(self, controller: Controller) -> None:
        """Decode the answer; the first call is the prompt's."""
        place = 0
        shape: DraftShape | None = None
        while place < self._answer.length:
            drafted = controller.next()
            call = self._call(place, shape, drafted)
            controller.record(call)
            self.calls.append(call)
            place += call.tokens
            shape = drafted

    def _call(self, place: int, shape: DraftShape | None, drafted: DraftShape | None) -> CallRecord:
        """Make a call that verifies `shape` and record its cost.

        Args:
            place: tokens before it.
            shape: the draft that it verifies; None for a plain call.
            drafted: the draft that follows it, if any.
        """
        tokens = 1
        cost = 1.0
        if shape is not None:
            depth = self._answer.depths[shape.nodes][place - 1]
            tokens = min(1 + depth, self._answer.length - place)
            cost = self._condition.cost(shape.nodes, place > self._late_from)
            if drafted is None:
                cost = max(1.0, cost - ENTRY)
        elif drafted is not None:
            cost += ENTRY
        # What the prompt takes is nobody's choice.
        self.took += cost if place else cost - 1
        noise = max(0.5, self._rng.gauss(1, self._condition.noise))
        seconds = cost * noise * PLAIN_SECONDS if place else None
        return CallRecord(shape, tokens, place, seconds, drafted)


def head_start(condition: Condition, rng: random.Random) -> CostTable:
    """The cost table after timings before the first answer."""
    table = CostTable()
    if condition.read is not None:
        extras = {n: condition.cost(n) - 1 for n in SEEDED_SIZES}
        table.set_head_start(
            {
                ("streams", n): 1
                + extra * condition.read * max(0.4, rng.gauss(1, condition.noise / 2))
                for n, extra in extras.items()
            },
            plain_seconds=[
                PLAIN_SECONDS * max(0.5, rng.gauss(1, condition.noise)) for _ in range(SEED_CALLS)
            ],
        )
    return table


def replay(
    name: str,
    answers: Sequence[Answer],
    condition: Condition,
    seed: int,
    more_sources: Sequence[OfferSource] = (),
) -> Replayed:
    """Decode answers one after another with one cost table and one acceptance prior."""
    task, _ = TASKS[name]
    rng = random.Random(seed)
    table = head_start(condition, rng)
    prior = AcceptancePrior()
    largest = DraftShape("streams", MAX_NODES, num_streams()[task])
    source = SteadySource(CurveOffer.of_curve(largest, curves()[task]))
    half = sum(one.length for one in answers) / 2
    done = 0
    taken = []
    for answer in answers:
        controller = Controller(table, prior, [source, *more_sources])
        loop = Loop(answer, condition, rng, half - done)
        loop.run(controller)
        controller.finish()
        done += answer.length
        taken.append(Taken(answer.length, loop.took))
    return Replayed(taken, best_fixed(answers, condition))


def best_fixed(answers: Sequence[Answer], condition: Condition) -> list[float]:
    """Plain calls of each answer, with plain decoding or the best fixed tree over all answers."""
    half = sum(one.length for one in answers) / 2
    best = [one.length - 1.0 for one in answers]
    for size in FIXED_SIZES:
        took = []
        done = 0
        for answer in answers:
            place = 1
            calls = ENTRY
            while place < answer.length:
                calls += condition.cost(size, done + place > half)
                place += 1 + answer.depths[size][place - 1]
            done += answer.length
            took.append(calls)
        if sum(took) < sum(best):
            best = took
    return best


@dataclass(frozen=True)
class Summary:
    """Figures over several seeds, in shares of the best fixed choice."""

    share: float  # mean of the seeds
    late_share: float
    worst: float  # the slowest answer's speed over plain
    below: float  # answers below 0.93 of plain, over all of 24 tokens or more


def summary(name: str, condition: Condition, seeds: Sequence[int], resampled: bool) -> Summary:
    """Replay a task with several seeds; answers are resampled, or else shuffled."""
    draw = resampled_answers if resampled else shuffled_answers
    replayed = [replay(name, draw(name, seed), condition, seed) for seed in seeds]
    speeds = [speed for one in replayed for speed in one.speeds]
    return Summary(
        float(np.mean([one.share for one in replayed])),
        float(np.mean([one.late_share for one in replayed])),
        min(speeds),
        sum(speed < 0.93 for speed in speeds) / len(speeds),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of all conditions and tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(100, 108), help="first and end")
    parser.add_argument("--shuffled", action="store_true", help="recorded answers, not resampled")
    parser.add_argument("--only", nargs="*", help="conditions")
    args = parser.parse_args(arguments)
    print("share of the best / of the second half / worst answer / % of answers below 0.93")
    print("".ljust(28), *(name.ljust(22) for name in TASKS))
    for title, condition in CONDITIONS.items():
        if args.only and title not in args.only:
            continue
        cells = []
        for name in TASKS:
            one = summary(name, condition, range(*args.seeds), not args.shuffled)
            found = f"{one.share:.3f} {one.late_share:.3f} {one.worst:.2f} {one.below:.1%}"
            cells.append(found.ljust(22))
        print(title.ljust(28), *cells, flush=True)


if __name__ == "__main__":
    main()
