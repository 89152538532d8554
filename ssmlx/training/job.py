"""A training run from its options to its last step, whichever trainer takes the steps."""

import hashlib
import json
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..bars import bar, busy
from ..errors import InputError, require, unwritable_error
from ..json_files import read_json
from ..loading.adapter import StreamAdapter
from ..loading.files import folder_digest, make_folder
from ..loading.load import load_tokenizer
from ..loading.names import resolve_model
from ..loading.weights import weights_digest
from ..prompts import chat_frame
from ..settings import StreamConfig
from .config import RunOptions, TrainConfig
from .data import (
    Batch,
    BatchPlan,
    Encoder,
    Example,
    Packing,
    choose_draft_vocab,
    collate,
    coverage,
    in_order,
    read_examples,
)
from .objective import RECORDED_TREE_SIZES, Lower, LowerStore, Objective, Validation
from .record import LOG_FILE, PICTURE_FILE, Record, draw

logger = logging.getLogger("ssmlx")
SETTINGS_FILE = "training.json"
STORE_FILE = "lower.states"
"""What the frozen layers say, of a run in MLX."""
_VALIDATION_BATCH = 16
_OF_STREAMS = ("stream_init", "stream_init_rank", "stream_design", "rotation_step",
               "num_msa_layers")  # fmt: skip
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


class Trainer(ABC):
    """Trained weights, their optimiser, and the step that they are at."""

    STATE_FILE: ClassVar[str]  # of a run's folder
    objective: Objective
    step: int  # how many were taken
    part: tuple[int, int] = (0, 1)  # which of how many parts of every batch is this process's

    @abstractmethod
    def advance(self, batch: Batch, lower: Any) -> dict[str, float]:
        """One optimiser step; returns the parts of its loss."""

    @abstractmethod
    def write(self, path: Path, identity: str) -> None:
        """Write the state and the run's identity into a file."""

    @abstractmethod
    def read(self, path: Path) -> tuple[str, Any]:
        """The identity in a file, and the state; raises whatever a broken file makes it raise."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on from a state."""

    def save(self, path: Path, identity: str) -> None:
        """Write the state beside `path`, then put it there."""
        work = path.with_name("new." + path.name)
        try:
            self.write(work, identity)
            work.replace(path)
        except (OSError, RuntimeError) as error:  # MLX's and PyTorch's of a full disk
            raise unwritable_error(path, error) from error
        finally:
            work.unlink(missing_ok=True)

    def resume(self, path: Path, identity: str, differs: str = "") -> None:
        """Go on from a saved state, if there is one; `differs` is told of another run's."""
        if not path.exists():
            return
        try:
            found, state = self.read(path)
        except Exception as error:  # readers raise many kinds
            raise InputError(
                f"{path} cannot be read ({type(error).__name__})",
                expected="the state of a stopped run",
                do="delete it to start again",
            ) from error
        differs = differs or "other data or another model to start from"
        require(
            found == identity,
            f"{path.parent} holds a run with {differs}",
            expected="the settings that it was started with",
            do="give those, or another --out",
        )
        self.restore(state)


@dataclass(frozen=True, eq=False)
class Job:
    options: RunOptions
    train: TrainConfig
    config: StreamConfig
    examples: Sequence[Example]
    valid: Sequence[Example]
    draft_vocab: np.ndarray | None
    weights: str  # a digest of the model's stored weights
    packing: Packing | None = None

    @property
    def num_steps(self) -> int:
        return self.train.num_steps(len(self.examples))

    def identity(self, *more: Any, init: Path | None = None) -> str:
        """A digest of all that decides the result; `init` has the weights to start from. What the
        model is called decides nothing."""
        start = [] if init is None else [folder_digest(init)]
        config = replace(self.config, base_model="").to_dict()
        return self._digest(self.train.to_dict(), config, *more, *start)

    def lower_identity(self, *more: Any) -> str:
        """A digest of what the frozen layers say: the same for runs that differ above them."""
        config = self.config
        return self._digest(config.num_layers, config.insertion_layer, *more)

    def stored_lower(
        self, objective: Objective, file: str, identity: str, label: str = "frozen layers"
    ) -> Lower:
        """What gives the frozen layers' results of a batch: a store, or the layers themselves.

        These where examples are packed, as in every epoch others stand before them.
        """
        tokens = sum(len(example.tokens) for example in self.examples)
        size = tokens * objective.state_size * objective.state_bytes
        if size > self.options.cache_gb * 2**30:
            return objective.lower
        store = LowerStore(self.options.out / file, self.examples, objective, identity)
        store.fill(label)
        return lambda batch: (store.get if batch.firsts is None else objective.lower)(batch)

    def _digest(self, *values: Any) -> str:
        digest = hashlib.sha256(json.dumps([self.weights, *values], sort_keys=True).encode())
        for example in self.examples:
            digest.update(example.tokens.tobytes() + example.start.to_bytes(4, "big"))
        return digest.hexdigest()


def read_base(folder: Path) -> dict[str, Any]:
    """The settings of a base model, with its layers, its width and its tokens among them."""
    path = folder / "config.json"
    settings = read_json(path, "a model folder")
    settings = {**settings, **(settings.get("text_config") or {})}  # of a model that also sees
    for name in _SIZES:
        require(
            isinstance(settings.get(name), int),
            f"{path} has {settings.get(name)!r} for {name}",
            expected="a decoder of regular layers (such as Llama, Mistral, Qwen, Phi, OPT)",
            do="choose another --model",
        )
    return settings


def prepare(
    options: RunOptions, train: TrainConfig, start: StreamAdapter | None = None
) -> tuple[Job, Path]:
    """Read the data; returns the job, and the base model's folder.

    `start` is the adapter of which `train` leaves all but a part as it is, if there is one.
    """
    path = resolve_model(options.model)
    base = read_base(path)
    train = train.sized(base["vocab_size"])
    words = load_tokenizer(path, base)
    if start is None:
        config = stream_config(train, base, options, [words.eos_token_id])
    else:
        config = start.config
        options = replace(options, template=config.prompt_template)
    encoder = Encoder(words, options.template, words.eos_token_id, train.max_length)

    def read(name: str) -> list[Example]:
        file = options.data / name
        examples = read_examples(file, encoder, lambda lines: bar(lines, name))
        low = min(int(example.tokens.min()) for example in examples)
        high = max(int(example.tokens.max()) for example in examples)
        require(  # ids that a file gives as they are may be another model's
            low >= 0 and high < base["vocab_size"],
            f"{file} has the token id {low if low < 0 else high}",
            expected=f"0 to {base['vocab_size'] - 1}, the model's",
            do="give the data that was made with this model, or another --model",
        )
        return examples

    examples = read("train.jsonl")
    valid = read("valid.jsonl")[: options.valid_count]
    if start is None:
        longest = max(len(example.tokens) for example in examples)
        config = replace(config, stream_window=max(config.stream_window, longest))
    vocab = None
    if start is not None and start.streams.draft_vocab is not None:
        vocab = np.array(start.streams.draft_vocab)
    elif train.draft_vocab_size:
        vocab = choose_draft_vocab(examples, train.draft_vocab_size, base["vocab_size"])
    packing = None
    if train.pack:
        packing = Packing(train.pack, chat_frame(words), config.stream_window)
    return Job(options, train, config, examples, valid, vocab, weights_digest(path), packing), path


def stream_config(
    train: TrainConfig, base: dict[str, Any], options: RunOptions, end_tokens: list[int]
) -> StreamConfig:
    """What the checkpoint will say of itself; `base` is as `read_base` gives it."""
    for name, most, what in (
        ("num_msa_layers", base["num_hidden_layers"], "layers"),
        ("draft_vocab_size", base["vocab_size"], "tokens"),
    ):
        require(
            getattr(train, name) <= most,
            f"{name} is {getattr(train, name)} of {most} {what}",
            expected="at most those that the model has",
            do=f"lower --{name.replace('_', '-')}",
        )
    return StreamConfig.from_dict(
        {
            **train.to_dict(),
            "num_layers": base["num_hidden_layers"],
            "hidden_size": base["hidden_size"],
            "prompt_template": options.template,
            "end_token_ids": end_tokens,
            "base_model": options.model,
        }
    )


def run_to_end(
    job: Job,
    trainer: Trainer,
    *,
    prog: str,
    dtype: str,
    identity: str,
    lower: Callable[[], Lower],
    write: Callable[[Validation], Path | None],
    keep_best: bool = False,
    wait: Callable[[], None] = lambda: None,
    validated: Callable[[Validation], None] = lambda validate: None,
) -> None:
    """Go on with a run where it was stopped, if it was; write, draw and tell what it came to.

    `lower` makes what the frozen layers, of `dtype`, say of a batch; `write` writes what was
    trained, and returns where, or None for the run's folder. Validations replay the nodes of the
    options' tree. With `keep_best`, what is untrained is validated too, and that
    is written which brought most tokens per call, whenever it does. `wait` is called before steps,
    and `validated` behind every validation.
    """
    out = job.options.out
    options = job.options
    make_folder(out)
    state = out / trainer.STATE_FILE
    settings: dict[str, Any] = {
        "command": " ".join([f"python -m {prog}", *sys.argv[1:]]),
        "model": options.model,
        "template": options.template,
        "train": job.train.to_dict(),
        "examples": len(job.examples),
        "answer_tokens": sum(example.num_answer for example in job.examples),
        "dtype": dtype,
    }
    if job.draft_vocab is not None:
        settings["draft_vocab_coverage"] = round(coverage(job.valid, job.draft_vocab), 4)
    trainer.resume(state, identity, _differences(out / SETTINGS_FILE, settings))
    record = Record(out / LOG_FILE, trainer.step)
    text = json.dumps(settings, indent=1) + "\n"
    (out / SETTINGS_FILE).write_text(text, encoding="utf-8")
    lower_of = lower()
    objective = trainer.objective
    size = options.tree_size
    batches = in_order(job.valid, _VALIDATION_BATCH)
    largest = RECORDED_TREE_SIZES[-1] if keep_best else 0
    texts = [collate(job.valid, one.indices, job.packing) for one in batches if job.packing]
    with busy("reading held-out answers"):
        validate, of_packed = (
            Validation(objective, one, size, largest) for one in (batches, texts)
        )
    last = min(options.max_steps or job.num_steps, job.num_steps)
    rule = job.train.batch_size, job.train.seed, *trainer.part, job.packing
    plan = BatchPlan(job.examples, *rule)
    first = trainer.step
    result = None
    if keep_best and not record.entries:
        record.add({"step": 0, **validate()})
    best = max((entry.get("tokens_per_call", 0.0) for entry in record.entries), default=0.0)
    for step in bar(range(first, last), "training", initial=first, total=last, unit="step"):
        wait()
        batch = plan.batch(step)
        entry = trainer.advance(batch, lower_of(batch))
        if trainer.step % options.valid_every == 0 or trainer.step == last:
            entry |= validate()
            if rate := of_packed().get("tokens_per_call"):
                entry["packed_tokens_per_call"] = rate
            _say(entry, job.num_steps)
            validated(validate)
        record.add({k: round(v, 6) for k, v in entry.items()} | {"time": round(time.time(), 1)})
        if keep_best and entry.get("tokens_per_call", 0.0) > best:
            best = entry["tokens_per_call"]
            result = write(validate)
        if trainer.step % options.save_every == 0 or trainer.step == last:
            trainer.save(state, identity)
    if not keep_best:
        result = write(validate)
    draw(record.entries, out / PICTURE_FILE, out.name)
    logger.info("%s: step %d of %d", result or out, trainer.step, job.num_steps)


def _differences(path: Path, settings: Mapping[str, Any]) -> str:
    """What a stopped run's settings have in place of `settings`, as options."""
    try:
        old = read_json(path, "the settings of a run")
        now = {**settings, **settings["train"]}
        found = {name: value for name, value in {**old, **old["train"]}.items() if name in now}
    except (InputError, KeyError, TypeError):
        return ""
    told = [
        f"--{name.replace('_', '-')} {value} and not {now[name]}"
        for name, value in found.items()
        if name in (*settings["train"], "model", "template", "dtype") and value != now[name]
    ]
    return ", ".join(told)


def check_gradient(norm: float, step: int) -> None:
    """Raises InputError where weights are, or would become, no numbers."""
    require(
        math.isfinite(norm),
        f"the gradient of step {step} is {norm}",
        expected="a finite one",
        do="lower --learning-rate, and start again with another --out",
    )


def _say(entry: dict[str, float], num_steps: int) -> None:
    losses = " ".join(
        f"{name.removeprefix('valid_').removesuffix('_loss')} {value:.3f}"
        for name, value in entry.items()
        if name.startswith("valid_")
    )
    rate = f"; {entry['tokens_per_call']:.2f} tokens per call" if "tokens_per_call" in entry else ""
    logger.info("step %.0f of %d: %s%s", entry["step"], num_steps, losses, rate)


def check_scale(source: Path, found: float, expected: float) -> None:
    """Check that LoRA weights to start from act as strongly in the new run."""
    require(
        math.isclose(found, expected, rel_tol=1e-6),
        f"the LoRA in {source} has the scale alpha / rank {found:g}",
        expected=f"{expected:g}, this run's",
        do="set --lora-alpha to that scale times --lora-rank",
    )


def check_init(
    source: Path, found: StreamConfig, wanted: StreamConfig, *, loses_task: bool
) -> None:
    """Check that the streams in `source` mean in the new run what they meant in theirs."""
    require(
        not loses_task,
        f"the streams in {source} draft beside the LoRA of a task",
        expected="that LoRA on every row",
        do="give --task-lora, or --train-only streams",
    )
    for name in _OF_STREAMS if found.num_streams else ():
        before = getattr(found, name)
        now = getattr(wanted, name)
        require(
            before == now,
            f"the streams in {source} have {name} {before}",
            expected=f"{now}, this run's",
            do=f"give --{name.replace('_', '-')} {before}",
        )


def check_shapes(source: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that every array in `source` has one of its name and shape in the new run."""
    for name, array in found.items():
        here = list(wanted[name].shape) if name in wanted else None
        require(
            list(array.shape) == here,
            f"{source} has {name} of shape {list(array.shape)}",
            expected="none of that name" if here is None else f"{here}",
            do="give this run the settings that it was trained with",
        )
