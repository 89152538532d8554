"""A training run from its options to its last step, with either trainer."""

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
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..bars import bar, busy
from ..errors import InputError, require, unwritable_error
from ..json_files import build_settings, read_json
from ..loading.adapter import StreamAdapter
from ..loading.files import make_folder
from ..loading.folders import CONFIG_FILE
from ..loading.identity import folder_digest, stored_weights_digest
from ..loading.load import load_tokenizer
from ..loading.names import resolve_model
from ..prompts import find_tokens_between_turns
from ..settings import StreamConfig
from .config import RunOptions, TrainConfig
from .data import (
    Batch,
    BatchPlan,
    Encoder,
    Example,
    Packing,
    batches_by_length,
    choose_draft_vocab,
    collate,
    draft_vocab_coverage,
    read_examples,
)
from .objective import RECORDED_TREE_SIZES, Lower, LowerStore, Objective, Validation
from .record import LOG_FILE, PICTURE_FILE, Record, draw_curves

logger = logging.getLogger("ssmlx")
SETTINGS_FILE = "training.json"
_VALIDATION_BATCH = 16
_OF_STREAMS = ("stream_init", "stream_init_rank", "stream_design", "rotation_step",
               "num_msa_layers")  # fmt: skip
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


class Trainer(ABC):
    """Takes optimiser steps on an objective's weights, and saves and restores its state."""

    STATE_FILE: ClassVar[str]  # of a run's folder
    objective: Objective
    step: int  # how many were taken
    part: tuple[int, int] = (0, 1)  # which of how many parts of every batch is this process's

    @abstractmethod
    def advance(self, batch: Batch, lower: Any) -> dict[str, float]:
        """Take one optimiser step on this process's part of a batch, with clipped gradients.

        The losses are those before the step, in nats per token. If the gradient is not finite, no
        step is taken and InputError raised.
        """

    @abstractmethod
    def write(self, path: Path, identity: str) -> None:
        """Write the state and the run's identity into a file."""

    @abstractmethod
    def read(self, path: Path) -> tuple[str, Any]:
        """Read what `write` has written: identity and state. Broken files raise any exception."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Set weights, optimiser and step to those of a state that `read` returned."""

    def save(self, path: Path, identity: str) -> None:
        """Write the state; if that fails, an older file stays."""
        work = path.with_name("new." + path.name)
        try:
            self.write(work, identity)
            work.replace(path)
        except (OSError, RuntimeError) as error:  # raised by MLX and PyTorch if the disk is full
            raise unwritable_error(path, error) from error
        finally:
            work.unlink(missing_ok=True)

    def resume(
        self,
        path: Path,
        identity: str,
        # what another run has other than this one, for the message; may be empty
        differing_options: str = "",
    ) -> None:
        """Continue from a saved state."""
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
        difference = differing_options or "other data or another model to start from"
        require(
            found == identity,
            f"{path.parent} has a run with {difference}",
            expected="the settings that it was started with",
            do="give those, or another --out",
        )
        self.restore(state)


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that a training run consists of, read and checked by `read_job`."""

    options: RunOptions
    train: TrainConfig
    config: StreamConfig
    examples: Sequence[Example]
    valid: Sequence[Example]
    draft_vocab: np.ndarray | None
    weights_digest: str  # of the base model's, see `stored_weights_digest`
    base_folder: Path  # of the base model
    packing: Packing | None = None

    @property
    def num_steps(self) -> int:
        return self.train.num_steps(len(self.examples))


class Identities(NamedTuple):
    """What distinguishes a run, and its frozen part's states, from others: SHA-256, in hex."""

    run: str
    frozen_part: str


def _make_identities(
    job: Job,
    objective: Objective,
    dtype: str,
    # weights of the frozen part beside the base's, such as a task's LoRA
    frozen_folders: Sequence[Path | None],
    start_folders: Sequence[Path | None],  # weights that training starts from
    other_settings: Sequence[Any],  # JSON values
) -> Identities:
    """Digests of what decides a run's result, and of what decides its frozen part's states.

    Runs share the frozen part's states if they differ only above the insertion layer. The base
    model's name decides nothing.
    """
    frozen = [dtype, *map(folder_digest, frozen_folders)]
    start = map(folder_digest, start_folders)
    config = job.config
    settings = job.train.to_dict(), replace(config, base_model="").to_dict()
    layers = config.num_layers, config.insertion_layer
    return Identities(
        run=_digest(job, *settings, *frozen, *other_settings, *start),
        frozen_part=_digest(job, *layers, *objective.LOWER_KIND, *frozen),
    )


def _digest(job: Job, *values: Any) -> str:
    said = json.dumps([job.weights_digest, *values], sort_keys=True)
    digest = hashlib.sha256(said.encode())
    for example in job.examples:
        digest.update(example.tokens.tobytes() + example.start.to_bytes(4, "big"))
    return digest.hexdigest()


def _make_lower(job: Job, objective: Objective, identity: str) -> Lower:
    """A function for the frozen part's states of a batch, which are stored if `cache_gb` allows."""
    tokens = sum(len(example.tokens) for example in job.examples)
    size = tokens * objective.state_size * objective.state_bytes
    if size > job.options.cache_gb * 2**30:
        return objective.lower
    path = job.options.out / objective.STORE_FILE
    store = LowerStore(path, job.examples, objective, identity)
    store.fill_missing(objective.FROZEN_PART)
    # In packed batches other text stands before an example in each epoch, so they are computed
    # anew.
    return lambda batch: (store.read_batch if batch.firsts is None else objective.lower)(batch)


def read_base_settings(folder: Path) -> dict[str, Any]:
    """Read a base model's config.json; its "text_config" overrides the rest."""
    path = folder / "config.json"
    settings = read_json(path, "a model folder")
    settings = {**settings, **(settings.get("text_config") or {})}  # of a model with vision
    for name in _SIZES:
        require(
            isinstance(settings.get(name), int),
            f"{path} has {settings.get(name)!r} for {name}",
            expected="a decoder of regular layers (such as Llama, Mistral, Qwen, Phi, OPT)",
            do="choose another --model",
        )
    return settings


def read_job(
    options: RunOptions,
    train: TrainConfig,
    # its settings, draft vocabulary and template stay, if `train` trains a part of it
    start: StreamAdapter | None = None,
) -> Job:
    """Read and check a run's inputs; downloads a missing model, whose weights are only digested."""
    path = resolve_model(options.model)
    base = read_base_settings(path)
    train = train.with_default_draft_vocab_size(base["vocab_size"])
    words = load_tokenizer(path, base)
    if start is None:
        config = make_stream_config(train, base, options, [words.eos_token_id])
    else:
        config = start.config
        options = replace(options, template=config.prompt_template)
    encoder = Encoder(words, options.template, words.eos_token_id, train.max_length)

    def read_checked_examples(file_name: str) -> list[Example]:
        file = options.data / file_name
        examples = read_examples(file, encoder, lambda lines: bar(lines, file_name))
        low = min(int(example.tokens.min()) for example in examples)
        high = max(int(example.tokens.max()) for example in examples)
        require(  # token ids in a file may be those of another model
            low >= 0 and high < base["vocab_size"],
            f"{file} has the token id {low if low < 0 else high}",
            expected=f"0 to {base['vocab_size'] - 1}, the model's",
            do="give the data that was made with this model, or another --model",
        )
        return examples

    examples = read_checked_examples("train.jsonl")
    valid = read_checked_examples("valid.jsonl")[: options.valid_count]
    if start is None:
        # A new adapter's stream window holds the longest training example.
        longest = max(len(example.tokens) for example in examples)
        config = replace(config, stream_window=max(config.stream_window, longest))
    vocab = None
    if start is not None and start.streams.draft_vocab is not None:
        vocab = np.array(start.streams.draft_vocab)
    elif train.draft_vocab_size:
        vocab = choose_draft_vocab(examples, train.draft_vocab_size, base["vocab_size"])
    packing = None
    if train.pack:
        packing = Packing(train.pack, find_tokens_between_turns(words), config.stream_window)
    digest = stored_weights_digest(path)
    return Job(options, train, config, examples, valid, vocab, digest, path, packing)


def make_stream_config(
    train: TrainConfig,  # its draft vocabulary's size is filled in
    base: dict[str, Any],  # as `read_base_settings` gives it
    options: RunOptions,
    end_tokens: list[int],  # ids that end an answer
) -> StreamConfig:
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
    return build_settings(
        StreamConfig,
        {
            **train.to_dict(),
            "starts_without_root": train.teaches_rootless_starts,
            "num_layers": base["num_hidden_layers"],
            "hidden_size": base["hidden_size"],
            "prompt_template": options.template,
            "end_token_ids": end_tokens,
            "base_model": options.model,
        },
        Path(CONFIG_FILE),
    )


def run_to_end(
    job: Job,
    trainer: Trainer,
    *,
    prog: str,  # the command's module, for records
    dtype: str,  # of the frozen layers, by PyTorch's name or MLX's
    write_trained: Callable[[Validation], Path],
    # this and the next two decide the result too, see `_make_identities`
    frozen_folders: Sequence[Path | None],
    start_folders: Sequence[Path | None],
    other_settings: Sequence[Any] = (),
    # validate before a new run's first step too, and write whenever tokens per call are the most so
    # far, by the log; otherwise write once, at the end
    keep_best: bool = False,
    before_step: Callable[[], None] = lambda: None,
    # not called for the validation before the first step
    after_validation: Callable[[Validation], None] = lambda validation: None,
) -> None:
    """Take the remaining steps of a run; log, validate, save, and write what was trained.

    The run goes on from the state in its folder. Log entries of steps after the saved state are
    deleted.
    """
    out = job.options.out
    options = job.options
    make_folder(out)
    state = out / trainer.STATE_FILE
    objective = trainer.objective
    identities = _make_identities(
        job, objective, dtype, frozen_folders, start_folders, other_settings
    )
    settings = _settings_for_records(job, prog, dtype)
    trainer.resume(
        state, identities.run, _describe_differing_options(out / SETTINGS_FILE, settings)
    )
    record = Record(out / LOG_FILE, trainer.step)
    text = json.dumps(settings, indent=1) + "\n"
    (out / SETTINGS_FILE).write_text(text, encoding="utf-8")
    lower_of = _make_lower(job, objective, identities.frozen_part)
    size = options.tree_size
    batches = batches_by_length(job.valid, _VALIDATION_BATCH)
    largest = RECORDED_TREE_SIZES[-1] if keep_best else 0
    texts = [collate(job.valid, one.indices, job.packing) for one in batches if job.packing]
    with busy("reading held-out answers"):
        validation, of_packed = (
            Validation(objective, one, size, largest) for one in (batches, texts)
        )
    last = min(options.max_steps or job.num_steps, job.num_steps)
    rank, num_ranks = trainer.part
    plan = BatchPlan(
        job.examples,
        batch_size=job.train.batch_size,
        seed=job.train.seed,
        rank=rank,
        num_ranks=num_ranks,
        half_packing=job.packing,
    )
    first = trainer.step
    written = out
    if keep_best and not record.entries:
        record.add({"step": 0, **validation.measure()})
    best = max((entry.get("tokens_per_call", 0.0) for entry in record.entries), default=0.0)
    for step in bar(range(first, last), "training", initial=first, total=last, unit="step"):
        before_step()
        batch = plan.batch(step)
        entry = trainer.advance(batch, lower_of(batch))
        if trainer.step % options.valid_every == 0 or trainer.step == last:
            entry |= validation.measure()
            packed = of_packed.measure()
            if rate := packed.get("tokens_per_call"):
                entry["packed_tokens_per_call"] = rate
            _log_validation(entry, job.num_steps)
            after_validation(validation)
        record.add({k: round(v, 6) for k, v in entry.items()} | {"time": round(time.time(), 1)})
        if keep_best and entry.get("tokens_per_call", 0.0) > best:
            best = entry["tokens_per_call"]
            written = write_trained(validation)
        if trainer.step % options.save_every == 0 or trainer.step == last:
            trainer.save(state, identities.run)
    if not keep_best:
        written = write_trained(validation)
    draw_curves(record.entries, out / PICTURE_FILE, out.name)
    logger.info("%s: step %d of %d", written, trainer.step, job.num_steps)


def _settings_for_records(job: Job, prog: str, dtype: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "command": " ".join([f"python -m {prog}", *sys.argv[1:]]),
        "model": job.options.model,
        "template": job.options.template,
        "train": job.train.to_dict(),
        "examples": len(job.examples),
        "answer_tokens": sum(example.num_answer for example in job.examples),
        "dtype": dtype.removeprefix("mlx.core."),
    }
    if job.draft_vocab is not None:
        coverage = draft_vocab_coverage(job.valid, job.draft_vocab)
        settings["draft_vocab_coverage"] = round(coverage, 4)
    return settings


def _describe_differing_options(
    path: Path,  # of the settings that the stopped run has written
    settings: Mapping[str, Any],
) -> str:
    """What differs, as "--num-streams 4 and not 5"; empty if old settings are unreadable."""
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


def check_gradient_is_finite(norm: float, step: int) -> None:
    require(
        math.isfinite(norm),
        f"the gradient of step {step} is {norm}",
        expected="a finite one",
        do="lower --learning-rate, and start again with another --out",
    )


def _log_validation(entry: dict[str, float], num_steps: int) -> None:
    losses = " ".join(
        f"{name.removeprefix('valid_').removesuffix('_loss')} {value:.3f}"
        for name, value in entry.items()
        if name.startswith("valid_")
    )
    rate = f"; {entry['tokens_per_call']:.2f} tokens per call" if "tokens_per_call" in entry else ""
    logger.info("step %.0f of %d: %s%s", entry["step"], num_steps, losses, rate)


def require_same_lora_scale(
    source: Path,  # folder of the weights to start from, for messages
    found: float,  # alpha / rank
    expected: float,
) -> None:
    require(
        math.isclose(found, expected, rel_tol=1e-6),
        f"the LoRA in {source} has the scale alpha / rank {found:g}",
        expected=f"{expected:g}, this run's",
        do="set --lora-alpha to that scale times --lora-rank",
    )


def require_task_lora_kept(source: Path, *, start_has_it: bool, run_has_it: bool) -> None:
    """Refuse a task's LoRA of other settings than the start's; their weights are not compared."""
    require(
        run_has_it or not start_has_it,
        f"the streams in {source} draft beside the LoRA of a task",
        expected="that LoRA on every row",
        do="give --task-lora, or --train-only streams",
    )


def require_same_stream_design(source: Path, found: StreamConfig, wanted: StreamConfig) -> None:
    for name in _OF_STREAMS if found.num_streams else ():
        before = getattr(found, name)
        now = getattr(wanted, name)
        require(
            before == now,
            f"the streams in {source} have {name} {before}",
            expected=f"{now}, this run's",
            do=f"give --{name.replace('_', '-')} {before}",
        )


def require_run_has_start_shapes(
    source: Path, start_arrays: Mapping[str, Any], run_arrays: Mapping[str, Any]
) -> None:
    """Check that the run has the start's arrays, in their shapes; it may have more."""
    for name, array in start_arrays.items():
        here = list(run_arrays[name].shape) if name in run_arrays else None
        require(
            list(array.shape) == here,
            f"{source} has {name} of shape {list(array.shape)}",
            expected="none of that name" if here is None else f"{here}",
            do="give this run the settings that it was trained with",
        )
