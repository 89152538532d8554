"""A run of `ssmlx.adapt`: its options, its plan on disk, its model and its prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import __version__
from ..errors import InputError, require
from ..json_files import json_digest, read_json
from ..loading.adapt_runs import read_adapt_runs
from ..loading.adapter import Adapter, StreamAdapter, load_adapter
from ..loading.attach import attach_adapter, match_lora
from ..loading.files import write_whole
from ..loading.folders import PLAN_FILE, TRAINED_FOLDER
from ..loading.identity import folder_digest, stored_weights_digest
from ..loading.load import load_tokenizer
from ..loading.lora_files import Loras
from ..model.backbone import Backbone
from ..prompts import encode_with_template, last_user_text, read_prompts
from ..templates import frozen_at_new_year_2026
from .config import RunOptions, TrainConfig
from .job import read_base_settings
from .mlx_trainer import load_trainable_base
from .progress import Clock
from .questions import draw_shipped_prompts
from .record import LOG_FILE, read_log_entries
from .sizing import Rates, Round, StepCosts, choose_frozen_dtype, default_memory_bytes

MOST_PROMPT_TOKENS = 1024
FILES = "your files"
SHIPPED = "shipped prompts"
OWN = "own questions"
DATA_FOLDER = "data"  # of a round's folder
_PLAN_FORMAT = 3
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How many answers a run makes and measures, how long they are, and how long it times calls."""

    answer_tokens: int = 160
    question_tokens: int = 110
    held_out: int = 32  # answers that streams never learn
    checked: int = 8  # of these, decoded at the end
    checked_tokens: int = 64
    timing_seconds: float = 3.0  # for each candidate of streams


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """What the user asks of a run of `ssmlx.adapt`."""

    model: str  # as the user gave it
    path: Path  # its folder
    out: Path  # the run's folder
    adapter: Path | None = None  # the folder of the LoRA that the model is to have
    data: tuple[Path, ...] = ()  # files of prompts
    hours: float = 1.0  # in total, earlier rounds included
    memory_gb: float | None = None
    seed: int = 0
    amounts: Amounts = Amounts()

    @property
    def memory(self) -> int:
        """The memory limit in bytes."""
        return default_memory_bytes() if self.memory_gb is None else int(self.memory_gb * 2**30)

    def round_folder(self, number: int) -> Path:
        """The folder of round `number`; rounds count from 0, their folders from 1."""
        return self.out / f"round-{number + 1}"

    @property
    def adapter_folder(self) -> Path:
        return self.out / TRAINED_FOLDER


@dataclass(frozen=True)
class TokenisedPrompt:
    """A prompt, where it comes from, and its tokens under the model's template."""

    source: str
    text: str  # what the user says last
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The loaded base model, its tokenizer, and the tokenised prompts that it will answer."""

    base: dict[str, Any]  # its settings
    backbone: Backbone
    lora: Loras  # that the model is to have on every row; may be empty
    answering: nn.Module  # mlx-lm's model with this LoRA
    tokenizer: TokenizerWrapper
    dtype: str  # as `load` takes it
    training: RunOptions  # of every round, except its folders and intervals
    files: list[TokenisedPrompt]
    shipped: list[TokenisedPrompt]

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(one.tokens) for one in (*self.files, *self.shipped)]


@dataclass(frozen=True, kw_only=True)
class AdaptPlan:
    """What a run makes, and the timings behind it; stored so that the run can continue."""

    settings: dict[str, Any]  # must be the same when the run continues
    base: dict[str, str]  # the model's name and folder, as last given
    train: TrainConfig  # its `num_msa_layers` is the number of layers with streams, chosen by time
    step_costs: StepCosts
    rates: Rates
    rounds: tuple[Round, ...] = ()
    spent: float = 0.0  # seconds that the run has taken

    @classmethod
    def read(cls, path: Path, settings: dict[str, Any]) -> AdaptPlan | None:
        """Read a plan; KeyError or TypeError if a value is missing or has the wrong type."""
        if not path.exists():
            return None
        values = read_json(path, "the plan of a run")
        found = values.get("settings")
        old = found if isinstance(found, dict) else {}
        names = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
        name = path.parent.name
        require(
            not names,
            f"{path.parent} has a run with other settings ({', '.join(names)})",
            expected="those that it was begun with",
            do=f"repeat its command, give another --name, or remove it: "
            f"python -m ssmlx.adapters remove {name}",
        )
        return cls(
            settings=settings,
            base=values["base"],
            train=TrainConfig.from_dict_ignoring_unknown(values["train"]),
            step_costs={int(n): cost for n, cost in values["step_costs"].items()},
            rates=Rates(**values["rates"]),
            rounds=tuple(Round(**one) for one in values["rounds"]),
            spent=values["spent"],
        )

    def write(self, path: Path) -> None:
        values = {**asdict(self), "train": self.train.to_dict()}
        write_whole(path, json.dumps(values, indent=1).encode())

    def round_before(self, number: int) -> Round | None:
        return self.rounds[number - 1] if number else None

    def new_answers(self, number: int) -> int:
        before = self.round_before(number)
        return self.rounds[number].answers - (before.answers if before else 0)

    def round_train_config(self, number: int) -> TrainConfig:
        return replace(self.train, epochs=float(self.rounds[number].epochs))

    def num_steps(self, number: int, held_out: int) -> int:
        """Training steps of a round, on all answers so far but those held out."""
        num_examples = self.rounds[number].answers - held_out
        return self.round_train_config(number).num_steps(num_examples)

    def replace_round(self, number: int, one: Round) -> AdaptPlan:
        return replace(self, rounds=(*self.rounds[:number], one, *self.rounds[number + 1 :]))


@dataclass(frozen=True, kw_only=True)
class AdaptRun:
    """What stays the same while one process starts or continues an adapter."""

    options: AdaptOptions
    prompts: Sequence[dict[str, Any]]  # rows of the user's files of prompts
    settings: dict[str, Any]  # as `fixed_settings` gives them
    prog: str  # the command, for records
    say: Say  # receives each line for the user
    wait: Callable[[], None]  # called between steps; its time is no part of the run's
    clock: Clock

    def save_plan(self, plan: AdaptPlan) -> AdaptPlan:
        """Write the plan, with the time spent so far."""
        plan = replace(plan, spent=self.clock.spent)
        plan.write(self.options.out / PLAN_FILE)
        return plan


def fixed_settings(options: AdaptOptions, prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that must not change when a run continues; hours, model name and folder may."""
    settings: dict[str, Any] = {
        "seed": options.seed,
        "memory": options.memory_gb,
        "data": json_digest(prompts),
        "made by": __version__,
        "format": _PLAN_FORMAT,
        "weights": stored_weights_digest(options.path),
    }
    if options.adapter is not None:
        settings["adapter"] = [folder_digest(options.adapter)]
    return settings


def find_run_folder(options: AdaptOptions) -> Path:
    """The run's folder; a moved or renamed model continues the run that its weights began."""
    if (options.out / PLAN_FILE).exists() or not read_adapt_runs():
        return options.out
    settings = fixed_settings(
        options, [row for file in options.data for row in read_prompts(file, "--data")]
    )
    return next((run.folder for run in read_adapt_runs() if run.settings == settings), options.out)


def load_source(run: AdaptRun) -> Source:
    options = run.options
    base = read_base_settings(options.path)
    tokenizer = load_tokenizer(options.path, base)
    dtype = choose_frozen_dtype(options.path, base, options.memory)
    backbone = load_trainable_base(options.path, dtype, options.model)
    backbone.capabilities.require("stages", "streams")
    lora: Loras = (
        {} if options.adapter is None else read_lora_without_streams(options.adapter, backbone)
    )
    # `backbone` stays without the LoRA; `answering` has it, over the same weights.
    tuned = attach_adapter(backbone, Adapter(lora=lora), merge_lora=False) if lora else None
    training = RunOptions(
        data=options.out / DATA_FOLDER,
        out=options.out,
        model=options.model,
        template=None if tokenizer.has_chat_template else "{prompt}",
        valid_count=options.amounts.held_out,
        tree_size=6,
    )
    source = Source(
        base=base,
        backbone=backbone,
        lora=lora,
        answering=tuned.backbone.model if tuned else backbone.model,
        tokenizer=tokenizer,
        dtype=dtype,
        training=training,
        files=[],
        shipped=[],
    )
    shipped = [{"prompt": text} for text in draw_shipped_prompts(options.seed)["train"]]
    return replace(
        source,
        files=tokenise_fitting_prompts(run, FILES, run.prompts, source),
        shipped=tokenise_fitting_prompts(run, SHIPPED, shipped, source),
    )


def read_lora_without_streams(folder: Path, backbone: Backbone) -> Loras:
    """Load the LoRA, by the base model's own module paths."""
    adapter = load_adapter(folder)
    require(
        not isinstance(adapter, StreamAdapter),
        f"{folder} has streams already",
        expected="LoRA or DoRA alone, as mlx-lm and PEFT write it",
        do="check --adapter; to train these streams further, see ssmlx.train --train-only",
    )
    return match_lora(adapter, backbone)


@frozen_at_new_year_2026()
def tokenise_fitting_prompts(
    run: AdaptRun,
    origin: str,  # `FILES`, `SHIPPED` or `OWN`
    prompts: Sequence[dict[str, Any]],
    source: Source,
) -> list[TokenisedPrompt]:
    """Tokenise the prompts, without those that are too long; templates get a fixed date."""
    context = source.backbone.context_length or 2**30
    # The context must have room for the longest answer.
    most = min(MOST_PROMPT_TOKENS, context - run.options.amounts.answer_tokens)
    found = []
    for number, one in enumerate(prompts, 1):
        try:
            tokens = encode_with_template(one, source.tokenizer, source.training.template)
        except InputError as error:
            raise error.at(f"prompt {number} of {origin}") from error
        if len(tokens) <= most:
            found.append(TokenisedPrompt(origin, last_user_text(one), tokens))
    if len(found) < len(prompts):
        run.say(f"{len(prompts) - len(found)} prompts of more than {most} tokens are left out")
    return found


def read_round_examples(
    options: AdaptOptions,
    number: int,
    name: str,  # "train" or "valid"
) -> list[dict[str, Any]]:
    """Read a round's examples; round -1, before the first, has none."""
    if number < 0:
        return []
    path = options.round_folder(number) / DATA_FOLDER / f"{name}.jsonl"
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_round_logs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the logs of rounds as one; each continues the step numbers of the one before."""
    entries: list[dict[str, Any]] = []
    for folder in folders:
        behind = entries[-1]["step"] if entries else 0
        for one in read_log_entries(folder / LOG_FILE):
            entries.append({**one, "step": one["step"] + behind})
    return entries
