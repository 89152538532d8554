"""`python -m perf.acceptance`: how far trees hold in real answers, once and for all machines.

Each bundled adapter answers prompts of its task, greedily and in float32, alone and behind other
prompts and answers of the task as turns of a chat. Kept is what a tree would have needed to hold
each answer: perf.simulate and the adapters' own `tokens_per_call` rest on it. Goes on where it was
stopped.

    python -m perf.acceptance --count 16

Writes acceptance.npz and .json; with --store, each adapter's `tokens_per_call` into its settings.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ssmlx
from ssmlx.answers import run as on_mlx_thread
from ssmlx.bars import bar
from ssmlx.calibration.guesses import guesses_along
from ssmlx.calibration.timing import ssmlx_answer
from ssmlx.commands.options import add_counts, make_parser, run
from ssmlx.loading.names import CONFIG_FILE, bundled_adapters
from ssmlx.prompts import as_messages, common_prefix, encode_prompt, read_prompts
from ssmlx.settings import DEFAULT_MODEL, GenerateConfig, TreeConfig, read_json
from ssmlx.tuning.replay import Ints, advance, contenders, depths_within, needed_sizes

from .run.options import check_counts
from .run.results import ROOT
from .run.tasks import TASKS

PROG = "perf.acceptance"
KEPT = ROOT / "perf" / "measured" / "acceptance.npz"
CONTEXTS = (0, 512, 2000, 4000)
"""Tokens of other turns, about."""
LARGEST = 32
"""Nodes; needs of more are kept as `MORE`."""
MORE = LARGEST + 1
SIZES = (2, 3, 4, 6, 8, 12, 16)
_TURN = 160  # tokens of an answer among the turns, where the data holds none


@dataclass(frozen=True, eq=False)
class Held:
    """An answer, by the nodes of the smallest best tree that holds it."""

    needed: Ints  # [G, A, G] of `g + 1` streams, after each token, to each depth; `MORE` if none

    def depths(self, size: int, streams: int) -> Ints:
        """[A] how far the answer holds in the best tree of `size` nodes of so many streams."""
        return depths_within(self.needed[streams - 1], size)


def read_kept(path: Path = KEPT) -> dict[tuple[str, int], list[Held]]:
    """What was recorded, by adapter and context."""
    found: dict[tuple[str, int], list[Held]] = {}
    with np.load(path) as kept:
        for name in (one for one in kept.files if not one.endswith("lengths")):
            adapter, context = name.split("-")
            ends = np.cumsum(kept[f"{name}-lengths"])
            parts = np.split(kept[name].astype(np.int32), ends[:-1], axis=1)
            found[adapter, int(context)] = [Held(part) for part in parts]
    return found


def tokens_per_call(answers: Sequence[Held], size: int, streams: int) -> float:
    """Of a best tree, after the prompts' calls."""
    return advance([one.depths(size, streams) for one in answers]).tokens_per_call


def curve(answers: Sequence[Held], streams: int | None = None) -> dict[str, float]:
    """Tokens per call by nodes; of all streams unless told."""
    streams = streams or len(answers[0].needed)
    return {str(size): round(tokens_per_call(answers, size, streams), 3) for size in SIZES}


class Recorder:
    """A loaded adapter, and what it is asked."""

    def __init__(self, name: str, count: int, max_tokens: int) -> None:
        self.model, self.tokenizer = ssmlx.load(DEFAULT_MODEL, adapter=name, dtype="float32")
        self.name, self.max_tokens = name, max_tokens
        data = TASKS[name].test
        assert data is not None
        rows = read_prompts(data)
        self.asked, self.others = rows[:count], rows[count:]
        self._turns: list[dict[str, str]] = []

    def record(self, context: int) -> list[Held]:
        """What each prompt's answer needs, behind at least `context` tokens of other turns."""
        turns: list[dict[str, str]] = []
        while context > len(self._encoded(turns)):
            turns = self._first_turns(len(turns) + 2)
        prompts = [self._encoded([*turns, *as_messages(row)]) for row in self.asked]
        shared = min(common_prefix(prompts[0], one) for one in prompts) if turns else 0
        return list(self._answers(prompts, shared))

    def _encoded(self, turns: Sequence[Any]) -> list[int]:
        return encode_prompt({"messages": turns}, self.model, self.tokenizer) if turns else []

    def _first_turns(self, count: int) -> list[dict[str, str]]:
        """The first turns of a chat of the task's other prompts, answered by the data or here."""
        while len(self._turns) < count:
            row = self.others[len(self._turns) // 2]
            answer = row.get("completion") or (row.get("references") or [None])[0]
            asked = as_messages(row)[-1:]
            answer = answer or ssmlx.generate(
                self.model, self.tokenizer, self._encoded(asked), max_tokens=_TURN
            )
            self._turns += [*asked, {"role": "assistant", "content": answer}]
        return self._turns[:count]

    def _answers(self, prompts: Sequence[list[int]], shared: int) -> Iterator[Held]:
        model, cache = self.model, self.model.make_cache()
        config = GenerateConfig(decoding="streaming", max_tokens=self.max_tokens, tree=TreeConfig())
        most = contenders(LARGEST, model.draft_vocab_size, model.num_streams)
        for prompt in bar(prompts, f"{self.name}, {shared} tokens shared"):
            cache.trim(min(cache.offset, shared))
            known = cache.offset
            answer = ssmlx_answer(
                model, self.tokenizer, prompt[known:], config, cache=cache, context=prompt[:known]
            ).tokens
            asked = model, prompt, answer, most.topology.num_candidates, cache
            guesses = on_mlx_thread(partial(guesses_along, *asked))
            streams = model.num_streams
            needed = np.full((streams, len(answer), streams), MORE, np.int32)
            for levels in range(1, streams + 1):
                found = needed_sizes(guesses, levels, LARGEST)
                needed[levels - 1, :, :levels] = np.minimum(found, MORE)
            yield Held(needed)


def _keep(name: str, answers: Sequence[Held], made: dict[str, Any]) -> None:
    old = dict(np.load(KEPT)) if KEPT.exists() else {}
    old[name] = np.concatenate([one.needed for one in answers], axis=1).astype(np.int8)
    old[f"{name}-lengths"] = np.array([one.needed.shape[1] for one in answers], np.int16)
    work = KEPT.with_suffix(".new.npz")
    np.savez_compressed(work, **old)
    work.replace(KEPT)
    KEPT.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


def _store(kept: dict[tuple[str, int], list[Held]]) -> None:
    """Tell every adapter's settings what its trees came to, alone."""
    for name, folder in bundled_adapters().items():
        values = read_json(folder / CONFIG_FILE, "an adapter's settings")
        values["tokens_per_call"] = curve(kept[name, 0])
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=1) + "\n")


def _main(args: argparse.Namespace) -> None:
    known = read_kept() if KEPT.exists() and not args.fresh else {}
    made = {
        "command": f"python -m {PROG} --count {args.count} --max-tokens {args.max_tokens}",
        "model": f"{DEFAULT_MODEL}, float32, greedy",
    }
    for name in args.adapter:
        contexts = [one for one in args.contexts if (name, one) not in known]
        recorder = Recorder(name, args.count, args.max_tokens) if contexts else None
        for context in contexts:
            assert recorder is not None
            _keep(f"{name}-{context}", recorder.record(context), made)
    kept = read_kept()
    for (name, context), answers in kept.items():
        tokens = sum(one.needed.shape[1] for one in answers)
        print(f"{name} behind {context}: {len(answers)} answers, {tokens} tokens; {curve(answers)}")
    if args.store:
        _store(kept)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = make_parser(PROG, description, more)
    names = list(bundled_adapters())
    parser.add_argument("--adapter", nargs="+", choices=names, default=names)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="L")
    add_counts(parser, ("count", 16, "prompts"), ("max-tokens", 64, "longest answer"))
    parser.add_argument("--fresh", action="store_true", help="record all of it again")
    parser.add_argument("--store", action="store_true", help="write `tokens_per_call`")
    args = parser.parse_args(argv)
    check_counts(parser, args, "count", "max_tokens")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
