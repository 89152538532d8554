"""`python -m perf.simulate`: the brake on every chip of the table, with real answers replayed.

What `perf.acceptance` recorded is decoded again, call for call, on chips whose calls take what the
table of row costs says, or something else: every chip, precision, size of model, adapter and
context, in each of `SCENARIOS`. The brake decides as in the loop, from noisy times, and begins a
conversation of all answers knowing nothing; `again` is one more, with what it learned. Beside it
stand the tree of 16 nodes always, and the best fixed tree in hindsight. What streams guess is that
of a model of 135M parameters, an ASSUMPTION for larger ones.

The promises: an answer of 24 tokens or more at 0.95 of plain decoding's speed, a conversation at
0.98, and at most 5 % below the best fixed tree wherever that gains 5 %. Exit code 1: one is broken.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from random import Random
from statistics import mean
from typing import Any

from ssmlx.decoding.pace import Learned, Pace, Rung
from ssmlx.tuning.chips import CHIPS, costs
from ssmlx.tuning.ladder import priced, shapes, text_kind, tokens_of

from ssmlx.bars import bar
from ssmlx.commands.options import make_parser, run
from ssmlx.commands.results import write_result
from ssmlx.errors import check_choice
from ssmlx.json_files import read_json
from ssmlx.loading.files import make_folder
from ssmlx.loading.names import CONFIG_FILE, bundled_adapters
from ssmlx.report import Columns, table
from ssmlx.settings import StreamConfig

from .acceptance import read_kept
from .predict import LABEL, MODELS, ON, drafting
from .run.options import add_out

PROG = "perf.simulate"
BITS = (4, 8, 16)
TABLE = "as the table"
SCENARIOS = {
    TABLE: (0.0, 1.0, 1.0, inf),
    "each rung 40 % off": (0.0, 0.6, 1.4, inf),
    "40 % cheaper": (0.0, 0.6, 0.6, inf),
    "40 % dearer": (0.0, 1.4, 1.4, inf),
    "rows cheap, calls dear": (0.4, 0.5, 0.5, inf),
    "throttled half-way": (0.0, 0.6, 1.4, 0.5),
}
"""Plain calls that every drafted one takes more; least and most times what its rung costs beyond a
plain call; when the chip throttles."""
NOISE = 0.1  # standard deviation of what a clock says of a call
# all seconds of a throttled chip, and once more what rows cost
SLOWER = 1.5
DEARER = 1.3
ANSWER = 0.95
CONVERSATION = 0.98
GAP = 0.95
GAIN = 1.05
LENGTH = 24
Row = Mapping[str, Any]
Depths = Mapping[Rung, Sequence[int]]
"""How far an answer holds in the tree of a rung, after each token."""


class Machine:
    """What calls really take, in plain calls of the chip as it begins.

    Extra costs of `rungs`, the smallest first, are disturbed by the bounds of a scenario.
    """

    def __init__(self, rungs: Sequence[Rung], scenario: str, tokens: int, seed: str) -> None:
        own, least, most, when = SCENARIOS[scenario]
        self.rng = Random(f"{scenario} {seed}")
        self.throttles_at = when * tokens
        self.tokens = 0
        self.factors = {}
        dearest = 0.0
        for one in rungs:  # more nodes never cost less
            dearest = max(dearest, one.extra * self.rng.uniform(least, most))
            self.factors[one] = (own + dearest) / one.extra

    @property
    def plain(self) -> float:
        """A plain call, now."""
        return SLOWER if self.tokens >= self.throttles_at else 1.0

    def beyond(self, extra: float, rung: Rung) -> float:
        """What takes `extra` plain calls by the table."""
        return self.plain * extra * self.factors[rung] * (DEARER if self.plain > 1 else 1.0)


class Playing:
    """An answer that is being decoded, and what it took beyond the prompt's plain call."""

    def __init__(self, depths: Depths, machine: Machine) -> None:
        self.depths = depths
        self.machine = machine
        self.length = len(next(iter(depths.values())))
        self.done = 0
        self.took = 0.0
        self.plain = 0.0

    @property
    def speed(self) -> float:
        """Over plain decoding's."""
        return self.plain / self.took

    def call(self, rung: Rung | None, pace: Pace | None = None, *, is_timed: bool = True) -> bool:
        """Draft as `rung` says and verify; whether the answer goes on. `pace` is told."""
        machine = self.machine
        is_first = not self.done
        held = self.depths[rung][self.done - 1] if rung else 0
        tokens = min(1 + held, self.length - self.done)
        seconds = machine.plain + (machine.beyond(rung.extra, rung) if rung else 0.0)
        self.took += 0.0 if is_first else seconds
        told = seconds * max(0.5, machine.rng.gauss(1, NOISE)) if is_timed else None
        if pace is not None:
            pace.observe(tokens, verified=rung, seconds=told)
        for _ in range(tokens):
            self.plain += 0.0 if is_first else machine.plain
            machine.tokens += 1
        self.done += tokens
        return self.done < self.length


def play(depths: Depths, machine: Machine, pace: Pace) -> Playing:
    """Decode an answer as `streaming_decode` does, its calls built, and drafted for, ahead."""
    answer = Playing(depths, machine)
    while True:
        is_first = True
        is_last = pace.rung is not None
        while not is_last:  # plain calls, until one began after the decision to draft
            is_last = pace.rung is not None
            if not answer.call(None, pace, is_timed=not (is_first or is_last)):
                return answer
            is_first = False
        verified = None
        rung = pace.rung
        while rung is not None:
            ahead = pace.rung
            if not answer.call(verified, pace):
                return answer
            if pace.rung is None and verified is not None:  # its drafting had begun
                answer.took += machine.beyond(rung.draft, rung)
            verified, rung = rung, pace.rung if verified is None or pace.rung is None else ahead


def play_fixed(depths: Depths, machine: Machine, rung: Rung) -> Playing:
    """Decode an answer with one tree always."""
    answer = Playing(depths, machine)
    goes_on = answer.call(None)
    while goes_on:
        goes_on = answer.call(rung)
    return answer


@dataclass(frozen=True, eq=False)
class Case:
    """A chip, a model, an adapter and a context: what may be drafted, and the answers."""

    names: Row
    rungs: Sequence[Rung]
    answers: Sequence[Depths]

    def machine(self, scenario: str) -> Machine:
        """The chip as a scenario has it, the same each time."""
        tokens = sum(len(one[self.rungs[0]]) for one in self.answers)
        return Machine(self.rungs, scenario, tokens, str(self.names))

    def answer(self, depths: Depths, machine: Machine, learned: Learned) -> Playing:
        """One of the answers, as the brake has it."""
        pace = Pace(self.rungs, learned, context=text_kind(self.names["context"]))
        return play(depths, machine, pace)

    def play(self, scenario: str) -> dict[str, Any]:
        """Speeds over plain decoding's, and what the promises ask for."""

        def conversation(learned: Learned) -> list[Playing]:
            machine = self.machine(scenario)
            return [self.answer(one, machine, learned) for one in self.answers]

        def always(rung: Rung) -> list[Playing]:
            machine = self.machine(scenario)
            return [play_fixed(one, machine, rung) for one in self.answers]

        learned = Learned()
        brake = conversation(learned)
        again = conversation(learned)
        firsts = [self.answer(one, self.machine(scenario), Learned()) for one in self.answers]
        every = {rung.shape.num_nodes: always(rung) for rung in self.rungs}
        fixed = {1: 1.0, **{nodes: speed_of(played) for nodes, played in every.items()}}
        best = max(fixed, key=lambda nodes: fixed[nodes])
        worst = speeds_of([*brake, *again, *firsts])
        return {
            **self.names,
            "scenario": scenario,
            "always 16": fixed[16],
            "brake": speed_of(brake),
            "again": speed_of(again),
            "best": fixed[best],
            "best nodes": best,
            "worst": min(worst, default=1.0),
            "slow": share_of_slow(worst),
            "best's slow": share_of_slow(speeds_of(every.get(best, []))),
        }


def speed_of(played: Sequence[Playing]) -> float:
    """Of all answers together, over plain decoding's."""
    return sum(one.plain for one in played) / sum(one.took for one in played)


def speeds_of(played: Sequence[Playing]) -> list[float]:
    """Of each answer that the promise is about."""
    return [one.speed for one in played if one.length >= LENGTH]


def share_of_slow(speeds: Sequence[float]) -> float:
    return sum(one < ANSWER for one in speeds) / max(1, len(speeds))


def broken(row: Row) -> list[str]:
    """The promises that a row breaks."""
    found = {
        "answer": row["worst"] < ANSWER,
        "conversation": row["brake"] < CONVERSATION,
        "gap": row["best"] >= GAIN and row["brake"] < GAP * row["best"],
    }
    return [name for name, is_broken in found.items() if is_broken]


def cases(chips: Sequence[str], contexts: Sequence[int]) -> Iterator[Case]:
    """Every model in every precision with every adapter on these chips, behind each context."""
    for (adapter, context), answers in read_kept().items():
        path = bundled_adapters()[adapter] / CONFIG_FILE
        config = StreamConfig.from_dict(read_json(path, "an adapter's settings"))
        trees = shapes(config.num_streams)
        depths = [
            [one.depths(tree.num_nodes, tree.num_streams).tolist() for tree in trees]
            for one in answers
        ]
        for chip, model, bits in product(chips if context in contexts else (), MODELS, BITS):
            prices = costs(drafting(replace(model, bits=bits), config), CHIPS[chip])
            rungs = [priced(one, tokens_of(one, config), prices, context) for one in trees]
            names = {"chip": chip, "bits": bits, "model": model.name,
                     "adapter": adapter, "context": context}  # fmt: skip
            yield Case(names, rungs, [dict(zip(rungs, one, strict=True)) for one in depths])


def place_of(row: Row) -> str:
    """Which case a row is."""
    return ", ".join(str(row[name]) for name in ("chip", "bits", "model", "adapter", "context"))


def summary(rows: Sequence[Row]) -> str:
    """How bad the worst of rows are, and how many break a promise."""
    gains = [row for row in rows if row["best"] >= GAIN]
    least = {
        name: min((row[name] / row["best"] for row in gains), default=1.0)
        for name in ("brake", "again")
    }
    counts = [
        sum(name in broken(row) for row in rows) for name in ("answer", "conversation", "gap")
    ]
    slow, own = (mean([row[name] for row in gains] or [0.0]) for name in ("slow", "best's slow"))
    return (
        f"{len(rows)} cases; worst answer {min(row['worst'] for row in rows):.3f} ({counts[0]} "
        f"broken), worst conversation {min(row['brake'] for row in rows):.3f} ({counts[1]}); where "
        f"the best fixed tree gains 5 % ({len(gains)}), {least['brake']:.3f} of its speed at least "
        f"({counts[2]}), {least['again']:.3f} the second time, and {slow:.1%} of answers are below "
        f"{ANSWER}, {own:.1%} with that tree"
    )


def report(rows: Sequence[Row]) -> str:
    """The table, a summary by scenario, and every case that breaks a promise."""
    columns: Columns = {
        "chip, bits, model, adapter, context": place_of,
        "16 nodes always": lambda row: f"{row['always 16']:.2f}",
        "brake": lambda row: f"{row['brake']:.2f}",
        "best fixed tree (nodes)": lambda row: f"{row['best']:.2f} ({row['best nodes']})",
    }
    by_scenario = {name: [row for row in rows if row["scenario"] == name] for name in SCENARIOS}
    summaries = [f"{name}: {summary(own)}" for name, own in by_scenario.items() if own]
    failures = [
        f"{place_of(row)}, {row['scenario']}: {', '.join(broken(row))}; worst answer "
        f"{row['worst']:.3f}, conversation {row['brake']:.3f}, best fixed tree {row['best']:.3f}"
        for row in rows
        if broken(row)
    ]
    title = f"{LABEL}\n\ntokens/s over plain decoding's, rows costing what the table says"
    return "\n".join([title, *table(columns, by_scenario[TABLE]), "", *summaries, *failures])


def _main(args: argparse.Namespace) -> int:
    behind = sorted({context for _, context in read_kept()})
    for context in args.contexts or ():
        check_choice("--contexts", str(context), [*map(str, behind)])
    make_folder(args.out)
    todo = list(product(cases(args.chips, args.contexts or behind), args.scenarios))
    rows = [case.play(scenario) for case, scenario in bar(todo, "conversations")]
    write_result({"label": LABEL, "rows": rows}, args.out / "simulate", report(rows))
    return int(any(broken(row) for row in rows))


def main(argv: list[str] | None = None) -> int:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    for option, choices in (("--chips", [chip.name for chip in ON]), ("--scenarios", [*SCENARIOS])):
        parser.add_argument(option, nargs="+", choices=choices, default=choices)
    parser.add_argument("--contexts", nargs="+", type=int, help="of those kept (default: all)")
    add_out(parser)
    args = parser.parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
