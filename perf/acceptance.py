"""`python -m perf.acceptance`: how far trees hold in real answers, once for all machines.

Each bundled adapter answers prompts of its task, greedily and in float32, alone and, but for those
with a template of their own, behind about so many tokens of chats of others, answered by itself.
Kept is the size of the best tree that each answer needs, from which `perf.simulate` replays any
machine. Goes on where it was stopped; to begin anew, delete perf/measured/acceptance.npz. With
--store, adapters learn their `tokens_per_call`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

import ssmlx
from ssmlx.answers import run as on_mlx_thread
from ssmlx.bars import bar
from ssmlx.calibration.timing import ssmlx_answer
from ssmlx.commands.options import add_options, make_parser, run
from ssmlx.errors import require
from ssmlx.loading.files import write_whole
from ssmlx.loading.names import CONFIG_FILE, bundled_adapters
from ssmlx.prompts import as_messages, common_prefix, encode_prompt, read_prompts
from ssmlx.settings import DEFAULT_MODEL, GenerateConfig, TreeConfig, read_json
from ssmlx.training.guesses import guesses_along, most_candidates
from ssmlx.training.replay import Ints, advance, depths_within, needed_sizes
from ssmlx.tuning.ladder import SIZES

from .run.options import check_counts
from .run.results import ROOT, reading
from .run.tasks import TASKS, data_file

PROG = "perf.acceptance"
KEPT = ROOT / "perf" / "measured" / "acceptance.npz"
LARGEST = 32
"""Nodes; what needs more is kept as one more."""
CHATS = 4
"""That the prompts of a context are asked in: models do not write alike in every one."""
_TURN = 160  # most tokens of an answer in a chat before
_LENGTHS = "-lengths"


@dataclass(frozen=True, eq=False)
class Held:
    """An answer, by the nodes of the smallest best tree of `g + 1` streams that holds it."""

    needed: Ints  # [G, A, G], after each token, to each depth

    def depths(self, size: int, streams: int) -> Ints:
        """[A] how far the answer holds in the best tree of `size` nodes."""
        return depths_within(self.needed[streams - 1], size)


Kept = Mapping[tuple[str, int], Sequence[Held]]
"""Answers by adapter and context."""


def read_kept() -> Kept:
    """What was recorded."""
    found = {}
    with reading(KEPT, PROG), np.load(KEPT) as kept:
        for name in (one for one in kept.files if not one.endswith(_LENGTHS)):
            adapter, context = name.split("-")
            ends = np.cumsum(kept[name + _LENGTHS])
            parts = np.split(kept[name].astype(np.int32), ends[:-1], axis=1)
            found[adapter, int(context)] = [Held(part) for part in parts]
    return found


def curve(answers: Sequence[Held]) -> dict[str, float]:
    """Tokens per call by nodes, after the prompts' calls, as adapters tell them."""
    streams = len(answers[0].needed)
    held = {size: [one.depths(size, streams) for one in answers] for size in SIZES}
    return {str(size): round(advance(one).tokens_per_call, 3) for size, one in held.items()}


class Recorder:
    """A loaded adapter, and what it is asked: the first prompts of its task's data."""

    def __init__(self, name: str, data: Path | None, count: int, max_tokens: int) -> None:
        rows = read_prompts(data_file(TASKS[name], data))
        self.name = name
        self.model, self.tokenizer = ssmlx.load(DEFAULT_MODEL, adapter=name, dtype="float32")
        self.asked = rows[:count]
        self.others = rows[count:]
        self.config = GenerateConfig(decoding="streaming", max_tokens=max_tokens, tree=TreeConfig())

    def record(self, context: int) -> list[Held]:
        """What each answer needs behind at least `context` tokens of a chat."""
        found = f"--count {len(self.asked)} of as many prompts"
        do = "lower it, or give more --data"
        require(bool(self.others) or not context, found, expected="others, for chats before", do=do)
        chats = [self._chat(number, context) for number in range(CHATS)]
        turns = [
            [*chats[place * CHATS // len(self.asked)], *as_messages(row)]
            for place, row in enumerate(self.asked)
        ]
        prompts = [encode_prompt({"messages": one}, self.model, self.tokenizer) for one in turns]
        cache = self.model.make_cache()
        known = list[int]()
        answers = list[Held]()
        for prompt in bar(prompts, f"{self.name} behind {context} tokens"):
            answers.append(self._answer(prompt, cache, common_prefix(known, prompt[:-1])))
            known = prompt
        return answers

    def _chat(self, number: int, context: int) -> list[Any]:
        """Turns of other prompts, with the model's own answers."""
        session = ssmlx.ChatSession(self.model, self.tokenizer, GenerateConfig(max_tokens=_TURN))
        others = islice(cycle(self.others), number * len(self.others) // CHATS, None)
        while session.context_tokens < context:
            list(session.reply(as_messages(next(others))[-1]["content"]))
        return session.messages

    def _answer(self, prompt: list[int], cache: Any, shared: int) -> Held:
        model = self.model
        streams = self.model.num_streams
        cache.trim(known := min(cache.offset, shared))
        found = ssmlx_answer(
            model, self.tokenizer, prompt[known:], self.config, cache=cache, context=prompt[:known]
        )
        count = most_candidates(model, LARGEST)
        guesses = on_mlx_thread(partial(guesses_along, model, prompt, found.tokens, count, cache))
        needed = np.full((streams, len(found.tokens), streams), LARGEST + 1, np.int32)
        for levels in range(1, streams + 1):
            sizes = needed_sizes(guesses, levels, LARGEST)
            needed[levels - 1, :, :levels] = np.minimum(sizes, LARGEST + 1)
        return Held(needed)


def _keep(name: str, answers: Sequence[Held], made: str) -> None:
    known = _known()
    arrays = dict(np.load(KEPT)) if KEPT.exists() else {}
    arrays[name] = np.concatenate([one.needed for one in answers], axis=1).astype(np.int8)
    arrays[name + _LENGTHS] = np.array([one.needed.shape[1] for one in answers], np.int16)
    work = KEPT.with_suffix(".new.npz")
    np.savez_compressed(work, **arrays)
    work.replace(KEPT)
    notes = json.dumps({**known, name: made}, indent=1) + "\n"
    write_whole(KEPT.with_suffix(".json"), notes.encode())


def _known() -> dict[str, Any]:
    """How what is kept, and can be read, was made."""
    notes = KEPT.with_suffix(".json")
    is_kept = KEPT.exists() and read_kept()
    return read_json(notes, "how it was made") if is_kept and notes.exists() else {}


def _main(args: argparse.Namespace) -> None:
    count = args.count or 16
    longest = args.max_tokens or 64
    made = f"--count {count} --max-tokens {longest}"
    for name in args.adapter:
        settings = read_json(bundled_adapters()[name] / CONFIG_FILE, "an adapter's settings")
        behind = args.contexts if settings["prompt_template"] is None else (0,)
        wanted = {f"{name}-{one}": one for one in behind}
        known = _known()
        for key in sorted(known.keys() & wanted.keys()) if args.count or args.max_tokens else ():
            do = f"drop --count and --max-tokens, or delete {KEPT} to begin anew"
            require(known[key] == made, f"{key} is kept of {known[key]}", expected=made, do=do)
        if contexts := [one for key, one in wanted.items() if key not in known]:
            recorder = Recorder(name, args.data, count, longest)
            for context in contexts:
                _keep(f"{name}-{context}", recorder.record(context), made)
    kept = read_kept()
    for (name, context), answers in kept.items():
        tokens = sum(one.needed.shape[1] for one in answers)
        print(f"{name} behind {context}: {len(answers)} answers, {tokens} tokens; {curve(answers)}")
    for name in args.adapter if args.store else ():
        path = bundled_adapters()[name] / CONFIG_FILE
        values = read_json(path, "an adapter's settings")
        values["tokens_per_call"] = curve(kept[name, 0])
        path.write_text(json.dumps(values, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROG, __doc__)
    ship = [task.name for task in TASKS.values() if task.test]
    parser.add_argument("--adapter", nargs="+", choices=[*TASKS], default=ship)
    add_options(
        parser,
        ("--data", "FILE", "prompts; of dialogsum none ship", Path),
        ("--contexts", "L", "tokens of the chats before (default: 0 512 2000)", [0, 512, 2000]),
        ("--count", None, "prompts (default: 16, or what is kept)", int),
        ("--max-tokens", None, "longest answer (default: 64, or what is kept)", int),
        ("--store", None, "adapters learn their tokens per call", bool),
    )
    args = parser.parse_args(argv)
    check_counts(parser, args, "count", "max_tokens")
    if min(args.contexts) < 0:
        parser.error(f"--contexts {min(args.contexts)}: expected 0 or more")
    if args.store and 0 not in args.contexts:
        parser.error("--store is of what is asked alone: give 0 among --contexts")
    if args.data and len(args.adapter) > 1:
        parser.error("--data has the prompts of one task: give one --adapter")
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
