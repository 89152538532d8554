"""A training run from its options to its last step, whichever trainer takes the steps."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InputError
from ..loading.files import folder_digest
from ..settings import StreamConfig, read_json
from .config import TrainConfig
from .options import RunOptions

if TYPE_CHECKING:
    import numpy as np

    from .batches import Batch
    from .data import Example
    from .record import Record

SETTINGS_FILE = "training.json"
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")

Lower = Callable[["Batch"], Any]
"""A batch to [B, T, D] hidden states before layer N - Ns."""

Validate = Callable[[], dict[str, float]]
"""Figures on the held-out examples, by name."""


class Run(Protocol):
    """The trained weights, their optimiser, and the step that they are at."""

    step: int

    def advance(self, batch: Batch, lower: Any) -> dict[str, float]:
        """One optimiser step; returns the parts of its loss."""
        ...

    def save(self, path: Path, identity: str) -> None:
        """Write the state beside `path`, then put it there."""
        ...

    def resume(self, path: Path, identity: str) -> None:
        """Go on from a saved state, if there is one."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """A run, ready to go."""

    options: RunOptions
    train: TrainConfig
    config: StreamConfig
    examples: Sequence[Example]
    valid: Sequence[Example]
    draft_vocab: np.ndarray | None

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.train.num_steps(len(self.examples))

    def identity(self, *more: Any, init: Path | None = None) -> str:
        """A digest of all that decides the result.

        Args:
            more: further JSON values.
            init: folder of the weights that the run starts from, if any.
        """
        start = [] if init is None else [folder_digest(init)]
        return self._digest(self.train.to_dict(), self.config.to_dict(), *more, *start)

    def lower_identity(self, *more: Any) -> str:
        """A digest of what the frozen layers say: the same for runs that differ above them."""
        config = self.config
        return self._digest(config.base_model, config.num_layers, config.insertion_layer, *more)

    def _digest(self, *values: Any) -> str:
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        for example in self.examples:
            digest.update(example.tokens.tobytes() + bytes([0]))
        return digest.hexdigest()


def bar(items: Iterable[Any], label: str, **settings: Any) -> Any:
    """A progress bar, on a terminal only."""
    from huggingface_hub.utils import tqdm

    return tqdm(items, desc=label, disable=None, **settings)


def read_base(folder: Path) -> dict[str, Any]:
    """The settings of a base model, with its layers, its width and its tokens among them.

    Raises:
        InputError: there are none, or the model names its sizes in another way.
    """
    path = folder / "config.json"
    settings = read_json(path, "a model folder")
    for name in _SIZES:
        if not isinstance(settings.get(name), int):
            raise InputError(
                f"{path} has {settings.get(name)!r} for {name}",
                expected="a decoder of regular layers (such as Llama, Mistral, Qwen, Phi, OPT)",
                do="choose another --model",
            )
    return settings


def prepare(options: RunOptions, train: TrainConfig) -> tuple[Job, Path]:
    """Read the data; returns the job, and the base model's folder.

    Raises:
        InputError: the model, the data and the settings do not fit each other.
    """
    from ..loading.load import load_tokenizer
    from ..loading.names import resolve_model
    from .data import Encoder, read_examples
    from .draft_vocab import choose_draft_vocab

    path = resolve_model(options.model)
    base = read_base(path)
    words = load_tokenizer(path, base)
    config = stream_config(train, base, options, [words.eos_token_id])
    encoder = Encoder(words, options.template, words.eos_token_id, train.max_length)

    def read(name: str) -> list[Example]:
        file = options.data / name
        examples = read_examples(file, encoder, lambda lines: bar(lines, name))
        _check_tokens(examples, base["vocab_size"], file)
        return examples

    examples, valid = read("train.jsonl"), read("valid.jsonl")[: options.valid_count]
    vocab = None
    if train.draft_vocab_size:
        vocab = choose_draft_vocab(examples, train.draft_vocab_size, base["vocab_size"])
    return Job(options, train, config, examples, valid, vocab), path


def stream_config(
    train: TrainConfig, base: dict[str, Any], options: RunOptions, end_tokens: list[int]
) -> StreamConfig:
    """What the checkpoint will say of itself.

    Args:
        train, options: what is asked for.
        base: as `read_base` gives it.
        end_tokens: the model's.

    Raises:
        InputError: the model is too small for the settings.
    """
    for name, most, what in (
        ("num_msa_layers", base["num_hidden_layers"], "layers"),
        ("draft_vocab_size", base["vocab_size"], "tokens"),
    ):
        value = getattr(train, name)
        if value > most:
            raise InputError(
                f"{name} is {value} of {most} {what}",
                expected="at most those that the model has",
                do=f"lower --{name.replace('_', '-')}",
            )
    shared = ("num_streams", "num_msa_layers", "stream_init", "stream_init_rank", "prune_rank",
              "adapter_scope", "stream_design", "rotation_step", "draft_vocab_size")  # fmt: skip
    return StreamConfig.from_dict(
        {
            **{name: getattr(train, name) for name in shared},
            "num_layers": base["num_hidden_layers"],
            "hidden_size": base["hidden_size"],
            "prompt_template": options.template,
            "end_token_ids": end_tokens,
            "base_model": options.model,
        }
    )


def _check_tokens(examples: Sequence[Example], vocab_size: int, path: Path) -> None:
    """Ids that a file gives as they are may be another model's."""
    low = min(int(example.tokens.min()) for example in examples)
    high = max(int(example.tokens.max()) for example in examples)
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"{path} has the token id {low if low < 0 else high}",
            expected=f"0 to {vocab_size - 1}, the model's",
            do="give the data that was made with this model, or another --model",
        )


def run_to_end(
    job: Job,
    state: Run,
    *,
    prog: str,
    dtype: str,
    identity: str,
    state_file: str,
    lower: Callable[[], Lower],
    validation: Callable[[], Validate],
) -> Record:
    """Go on with a run where it was stopped, if it was; returns its record.

    Args:
        job: what to train on. Its folder is there.
        state: as it begins.
        prog: the command.
        dtype: of what is not trained.
        identity: a digest of all that decides the result.
        state_file: where in the run's folder its state is saved.
        lower: makes what the frozen layers say of a batch.
        validation: makes what is measured now and then.

    Raises:
        InputError: the folder holds another run, or a broken state.
    """
    from .record import LOG_FILE, Record

    out = job.options.out
    state.resume(out / state_file, identity)
    record = Record(out / LOG_FILE, state.step)
    write_settings(job, prog, dtype)
    _learn(
        job, state, lower(), validation(), record,
        save=lambda: state.save(out / state_file, identity),
    )  # fmt: skip
    return record


def check_gradient(norm: float, step: int) -> None:
    """Refuse to go on where weights are, or would become, no numbers.

    Raises:
        InputError: the norm of the gradient is not finite.
    """
    if not math.isfinite(norm):
        raise InputError(
            f"the gradient of step {step} is {norm}",
            expected="a finite one",
            do="lower --learning-rate, and start again with another --out",
        )


def finish(job: Job, state: Run, record: Record, result: Path | None = None) -> None:
    """Draw a run's curves, and say how far it is; `result` is what it wrote, its folder if None."""
    from .record import PICTURE_FILE

    out = job.options.out
    record.draw(out / PICTURE_FILE, out.name)
    print(f"{result or out}: step {state.step} of {job.num_steps}", file=sys.stderr)


def _learn(
    job: Job, state: Run, lower: Lower, validation: Validate, record: Record,
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Take the steps that are left, saving and validating as it goes."""
    from .batches import BatchPlan

    options, last = job.options, min(job.options.max_steps or job.num_steps, job.num_steps)
    plan = BatchPlan(job.examples, job.train.batch_size, job.train.seed)
    steps = bar(range(state.step, last), "training", initial=state.step, total=last, unit="step")
    for step in steps:
        batch = plan.batch(step)
        entry = state.advance(batch, lower(batch))
        if state.step % options.valid_every == 0 or state.step == last:
            entry |= validation()
            _say(entry, job.num_steps)
        record.add({k: round(v, 6) for k, v in entry.items()} | {"time": round(time.time(), 1)})
        if state.step % options.save_every == 0 or state.step == last:
            save()


def _say(entry: dict[str, float], num_steps: int) -> None:
    losses = " ".join(
        f"{name.removeprefix('valid_').removesuffix('_loss')} {value:.3f}"
        for name, value in entry.items()
        if name.startswith("valid_")
    )
    rate = f"; {entry['tokens_per_call']:.2f} tokens per call" if "tokens_per_call" in entry else ""
    print(f"step {entry['step']:.0f} of {num_steps}: {losses}{rate}", file=sys.stderr, flush=True)


def write_settings(job: Job, prog: str, dtype: str) -> None:
    """Note beside the state how the run was started, and what its data is like."""
    from .draft_vocab import coverage

    settings = {
        "command": " ".join([f"python -m {prog}", *sys.argv[1:]]),
        "train": job.train.to_dict(),
        "examples": len(job.examples),
        "answer_tokens": sum(example.num_answer for example in job.examples),
        "dtype": dtype,
    }
    if job.draft_vocab is not None:
        settings["draft_vocab_coverage"] = round(coverage(job.valid, job.draft_vocab), 4)
    text = json.dumps(settings, indent=1) + "\n"
    (job.options.out / SETTINGS_FILE).write_text(text, encoding="utf-8")
