"""`python -m examples.recipes.chat_streams --out OUT`: own answers, or streams, by the minute.

From the checkout, with the extra `torch`.
"""

import argparse
import io
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert import check_torch, continuations
from convert import train as train_command
from convert.continuations import Sampling
from ssmlx.commands.parser import add_int_options, add_options, make_parser
from ssmlx.commands.running import make_main
from ssmlx.errors import require
from ssmlx.loading.files import make_folder, write_whole
from ssmlx.loading.folders import TRAINED_FOLDER
from ssmlx.prompts import read_prompts
from ssmlx.training.adapt_rounds import SAMPLED_EVERY, SAMPLED_TEMP
from ssmlx.training.questions import (
    draw_shipped_prompts,
    normalise_prompt,
    opening_words,
    split_question_lists,
)
from ssmlx.training.record import LOG_FILE, read_log_entries

from .chat_prompts import cut_to_whole_sentences, sample_user_turns

PROG = "examples.recipes.chat_streams"
EPILOG = """examples:
  python -m examples.recipes.chat_streams --out answers --tokens 20000000 --minutes 8
  python -m examples.recipes.chat_streams --out run --answers answers --minutes 8 \\
      -- --num-msa-layers 3 --draft-vocab-size 8192

Without --answers it makes answers: to prompts that ship, to the model's own, to second turns, and
to tasks about its earlier answers; a fourth of the batches is sampled. With --answers it trains:
what follows `--` goes to `convert.train`. Either way it begins with a forecast,
keeps what is done at least once a minute, and ends before --minutes. The same command goes on.

OUT gets at most eight files of at most 15 MB. A run's state comes in pieces:
cat OUT/state-* > WORK/run/state.pt."""

HELD_OUT = [Path(__file__).parents[1] / f"data/chat_{split}.jsonl" for split in ("valid", "test")]
SEEDS = 400  # for the prompts that ship
FILE_TOKENS = 3_000_000  # of answers per file
PIECE_BYTES = 15 * 2**20
FIRST_ANSWER_TOKENS = 100
PROBE_STEPS = 5
RESERVE = 45.0  # seconds for the last validation and for writing the results
TASKS = (
    "Summarize this text in two sentences:\n\n{text}",
    "What are the main points of this text?\n\n{text}",
    "Rewrite this so that a child understands it:\n\n{text}",
    "Translate this into French: {sentence}",
    "Answer the question by these passages alone.\n\n{passages}\n\nQuestion: {question}",
)


class OwnAnswer(NamedTuple):
    """Token ids of a prompt under the chat template, and of what the model said."""

    prompt: Sequence[int]
    answer: Sequence[int]


def pack(answers: Sequence[OwnAnswer]) -> dict[str, np.ndarray]:
    """Pack answers into arrays: all tokens in a row; [N, 2] tokens of prompt and answer."""
    tokens = [token for one in answers for token in (*one.prompt, *one.answer)]
    lengths = [(len(one.prompt), len(one.answer)) for one in answers]
    return {"tokens": np.array(tokens, np.uint16), "lengths": np.array(lengths, np.uint16)}


def unpack(path: Path) -> Iterator[OwnAnswer]:
    """Yield the answers of a file, in order."""
    with np.load(path) as found:
        tokens = found["tokens"].tolist()
        place = 0
        for prompt, answer in found["lengths"].tolist():
            end = place + prompt
            yield OwnAnswer(tokens[place:end], tokens[end : end + answer])
            place = end + answer


class AnswerFolder:
    """The answers of a folder, in files of `FILE_TOKENS` tokens."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._folder = folder
        self.files = sorted(folder.glob("answers-*.npz"))
        self.num_tokens = 0
        self._last: list[OwnAnswer] = []
        for path in self.files:
            self._last = list(unpack(path))
            self.num_tokens += sum(len(one.answer) for one in self._last)

    def add(self, answers: Sequence[OwnAnswer]) -> None:
        """Write answers into the last file, or into a new one if that is full."""
        if not self.files or sum(len(a) + len(b) for a, b in self._last) >= FILE_TOKENS:
            self.files.append(self._folder / f"answers-{len(self.files):02}.npz")
            self._last = []
        self._last += answers
        self.num_tokens += sum(len(one.answer) for one in answers)
        save(self.files[-1], self._last)


def save(path: Path, answers: Sequence[OwnAnswer]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **pack(answers))  # type: ignore[arg-type]
    write_whole(path, content.getvalue())


class Prompts:
    """What the model is asked, batch by batch; nothing of `HELD_OUT`, nor of the lists' held-out
    parts.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._follow_ups = split_question_lists()["train"]["follow-ups"]
        self._seen: set[str] = set()
        self._openings: set[str] = set()
        for row in (row for path in HELD_OUT for row in read_prompts(path)):
            text = row.get("prompt") or row["messages"][0]["content"]
            self._seen.add(normalise_prompt(text))
            self._openings.add(opening_words(text))
        shipped = (draw_shipped_prompts(seed)["train"] for seed in range(SEEDS))
        self._shipped = (text for texts in shipped for text in texts if self._is_new(text))
        self._last: list[tuple[str, str]] = []  # earlier questions and answers

    def _is_new(self, text: str) -> bool:
        key = normalise_prompt(text)
        if key in self._seen or opening_words(text) in self._openings:
            return False
        self._seen.add(key)
        return True

    def draw(self, count: int, number: int) -> list[dict[str, Any]]:
        """Draw `count` prompts for batch `number`: half that ship, as long as there are any, then
        second turns and tasks about the answers of the batch before, an eighth each, and the
        model's own questions.
        """
        rng = random.Random(number)
        rows = [{"prompt": text} for text, _ in zip(self._shipped, range(count // 2), strict=False)]
        if self._last:
            rows += [self._second_turn(rng) for _ in range(count // 8)]
            rows += [{"prompt": self._task(rng)} for _ in range(count // 8)]
        own = count - len(rows)
        asked = sample_user_turns(
            self._model, self._tokenizer, own, batch_size=max(8, 2 * own), seed=number
        )
        return rows + [{"prompt": text} for text in asked if self._is_new(text)]

    def learn(self, rows: Sequence[dict[str, Any]], answers: Sequence[OwnAnswer]) -> None:
        """Take the answers to first turns, for second turns and tasks."""
        texts = [self._tokenizer.decode(a, skip_special_tokens=True) for _, a in answers]
        pairs = zip(rows, texts, strict=True)
        self._last = [(row["prompt"], text) for row, text in pairs if "prompt" in row and text]

    def _second_turn(self, rng: random.Random) -> dict[str, Any]:
        question, answer = rng.choice(self._last)
        said = self._tokenizer.encode(answer, add_special_tokens=False)[:FIRST_ANSWER_TOKENS]
        said = cut_to_whole_sentences(self._tokenizer.decode(said))
        turns = ("user", question), ("assistant", said), ("user", rng.choice(self._follow_ups))
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    def _task(self, rng: random.Random) -> str:
        question, text = rng.choice(self._last)
        others = [one for _, one in rng.choices(self._last, k=2)]
        passages = "\n\n".join(rng.sample([text, *others], 3))
        sentence = text.split(". ")[0]
        return rng.choice(TASKS).format(
            text=text, sentence=sentence, passages=passages, question=question
        )


def make_answers(args: argparse.Namespace) -> None:
    """Answer batches, until --tokens tokens are there or the next one would exceed --minutes."""
    from ssmlx.loading.names import resolve_model

    deadline = time.monotonic() + 60 * args.minutes
    model, tokenizer = continuations.load_answering_model(
        resolve_model(args.model), args.dtype, args.device
    )
    require(
        model.config.vocab_size <= 2**16,
        f"--model {args.model} has {model.config.vocab_size} tokens",
        expected=f"at most {2**16}, which 16 bits hold",
        do="choose another",
    )
    stop = continuations.find_end_tokens(model, tokenizer)
    most = model.config.max_position_embeddings - args.max_tokens

    def answer(rows: Sequence[dict[str, Any]], number: int) -> list[OwnAnswer]:
        encoded = continuations.encode_prompts(rows, tokenizer, most)
        temp = SAMPLED_TEMP if number % SAMPLED_EVERY == SAMPLED_EVERY - 1 else 0.0
        sampling = Sampling(max_tokens=args.max_tokens, temp=temp)
        found = continuations.generate_batch(model, encoded, sampling, stop, number)
        return [OwnAnswer(a, b.tokens) for a, b in zip(encoded, found, strict=True)]

    answers = AnswerFolder(args.out)
    if not (valid := args.out / "valid.npz").exists():
        save(valid, answer(read_prompts(HELD_OUT[0])[: args.valid_count], 0))
    prompts = Prompts(model, tokenizer)
    slowest = 0.0
    number = answers.num_tokens  # of other batches than an earlier run's
    while answers.num_tokens < args.tokens and time.monotonic() + 1.2 * slowest < deadline:
        started = time.monotonic()
        rows = prompts.draw(args.batch_size, number)
        found = answer(rows, number)
        prompts.learn(rows, found)
        answers.add(found)
        seconds = time.monotonic() - started
        if not slowest:
            made = sum(len(one.answer) for one in found)
            fits = answers.num_tokens + int(made / seconds * max(0.0, deadline - time.monotonic()))
            told = f"{made / seconds:,.0f} tokens a second: {min(fits, args.tokens):,} tokens"
            print(f"{told} in {args.minutes:g} minutes", file=sys.stderr, flush=True)
        slowest = max(slowest, seconds)
        number += 1
    print(f"{args.out}: {answers.num_tokens:,} tokens", file=sys.stderr)


def train(args: argparse.Namespace, more: Sequence[str]) -> None:
    """Time a few steps, and train as many as fit into --minutes, in a folder of its own."""
    deadline = time.monotonic() + 60 * args.minutes
    work = args.work or args.out / "work"
    make_folder(args.out)
    files = sorted(args.answers.glob("answers-*.npz"))
    require(
        bool(files),
        f"{args.answers} has no answers",
        expected="a folder that this command made without --answers",
        do="make them first",
    )
    rows = [one for path in files for one in unpack(path)]
    held_out = list(unpack(args.answers / "valid.npz"))

    def run(out: Path, answers: Sequence[OwnAnswer], *options: Any) -> None:
        data = out.with_name(f"{out.name}-data")
        for name, some in (("train", answers), ("valid", held_out)):
            lines = ({"prompt_tokens": a, "completion_tokens": b} for a, b in some)
            continuations.write_jsonl(data / f"{name}.jsonl", lines)
        words = ["--data", data, "--out", out, "--model", args.model, "--device", args.device,
                 "--dtype", args.dtype, "--batch-size", args.batch_size, "--cache-gb", 0,
                 "--stream-weights", 1, "--adapter-scope", "streams", "--schedule", "cosine",
                 "--valid-count", args.valid_count, *more, *options]  # fmt: skip
        train_command.train_streams(train_command.parse_args([str(word) for word in words]))

    plan = work / "plan.json"
    if not plan.exists():
        few = rows[: 2 * PROBE_STEPS * args.batch_size]
        run(work / "probe", few, "--max-steps", PROBE_STEPS, "--valid-every", 10**6)
        log = read_log_entries(work / "probe" / LOG_FILE)
        # The first step is slower, the last one validates.
        seconds = max(1e-3, (log[-2]["time"] - log[0]["time"]) / (PROBE_STEPS - 2))
        left = deadline - time.monotonic() - RESERVE
        an_epoch = -(-len(rows) // args.batch_size)
        steps = max(1, min(int(0.9 * left / seconds), round(args.epochs * an_epoch)))
        said = {"steps": steps, "seconds_a_step": seconds, "epochs": steps / an_epoch}
        write_whole(plan, json.dumps(said).encode())
    said = json.loads(plan.read_text())
    steps = said["steps"]
    print(
        f"{said['seconds_a_step']:.2f} s a step: {steps:,} steps of {args.batch_size}, "
        f"{said['epochs']:.2f} epochs",
        file=sys.stderr,
        flush=True,
    )
    a_minute = max(1, int(60 / said["seconds_a_step"]))
    with copying_what_changes(work / "run", args.out):
        run(
            work / "run",
            rows,
            *("--epochs", said["epochs"], "--save-every", a_minute),
            *("--valid-every", max(1, steps // 8), "--tree-size", 6),
        )


@contextmanager
def copying_what_changes(run: Path, out: Path) -> Iterator[None]:
    """Copy what changes of a run's files into `out`, inside the block and at its end."""
    ended = threading.Event()
    copied: dict[Path, int] = {}  # their times of change

    def copy() -> None:
        for path in (*run.glob("*.*"), *(run / TRAINED_FOLDER).glob("*.*")):
            if path.suffix not in (".json", ".jsonl", ".safetensors", ".pt"):
                continue  # a file that is being written, among others
            changed = path.stat().st_mtime_ns
            if copied.get(path) == changed:
                continue
            copied[path] = changed
            if path.suffix != ".pt":
                shutil.copy(path, out)
                continue
            content = path.read_bytes()
            for number, start in enumerate(range(0, len(content), PIECE_BYTES)):
                write_whole(out / f"state-{number}", content[start : start + PIECE_BYTES])

    def watch() -> None:
        while not ended.wait(20):
            copy()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        copy()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Make a model's own answers, or train streams on them.", EPILOG)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="what to write")
    add_options(
        parser,
        ("--answers", "FOLDER", "train on the answers of this folder", Path),
        ("--work", "FOLDER", "what need not be kept, of training (default: OUT/work)", Path),
        ("--minutes", "X", "end before (default: %(default)s)", 8.0),
        ("--epochs", "X", "most passes over the answers (default: %(default)s)", 2.0),
    )
    continuations.add_model_and_batch_options(parser)
    add_int_options(
        parser,
        ("tokens", 20_000_000, "of all answers"),
        ("max-tokens", 160, "longest answer"),
        ("valid-count", 64, "held-out answers"),
    )
    parser.add_argument(
        "more", nargs="*", metavar="-- OPTIONS", help="of training: options of `convert.train`"
    )
    return parser.parse_args(argv)


def _make_answers_or_train(args: argparse.Namespace) -> None:
    check_torch()
    continuations.check_batch_size(args.batch_size)
    if args.answers is None:
        make_answers(args)
    else:
        train(args, args.more)


main = make_main(PROG, parse_args, _make_answers_or_train)

if __name__ == "__main__":
    raise SystemExit(main())
