"""An experiment: systems answer the same prompts on the same weights, in turns.

    what is asked (tasks) x who answers (target) -> answers (store) -> figures (statistics)

What a command asks, and how it shows the figures, is in the command's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import tqdm

from ssmlx.api import check_prompt
from ssmlx.calibration.timing import in_turns
from ssmlx.loading.files import folder_digest
from ssmlx.prompts import encode_prompt

from .results import machine_load
from .store import AnswerStore, Kept, code_version, files_version, tell_kept, timed_on
from .target import DRAFT_ALONE, DRAFT_MODEL, System, Target, Weights
from .tasks import Example, Scores, Task, score_texts

Answers = Mapping[str, Sequence[Sequence[Kept]]]
"""By the name of the system: for every prompt, its repeats."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is measured.

    Attributes:
        name: of what is measured; the names of its files begin with it.
        weights: the target, and what drafts for it.
        systems: who answers.
        examples: what is asked.
        task: how answers are judged; None where they are only timed or compared.
        template: of all prompts; None for the adapter's own.
        repeats: times that every prompt is answered.
        warm_up: answers of each system before the first that counts.
        out: where answers are kept as they come; None keeps none.
        fresh: whether answers of an earlier run are forgotten.
    """

    name: str
    weights: Weights
    systems: Sequence[System]
    examples: Sequence[Example]
    task: Task | None = None
    template: str | None = None
    repeats: int = 1
    warm_up: int = 1
    out: Path | None = None
    fresh: bool = False

    @property
    def max_tokens(self) -> int:
        """The longest answer."""
        return self.systems[0].config.max_tokens

    def load(self) -> tuple[Target, list[list[int]]]:
        """The target and the prompts' tokens, and all that could fail later checked.

        Raises:
            InputError: weights are broken, belong to another model, or do not fit the settings.
        """
        target = Target(self.weights)
        adapter = self.weights.adapter
        template = self.template or (adapter.config.prompt_template if adapter else None)
        plain, tokenizer = target.plain, target.tokenizer
        prompts = [encode_prompt(one.asked, plain, tokenizer, template) for one in self.examples]
        for prompt in prompts:
            check_prompt(plain, len(prompt))
        for system in self.systems:
            target.drafter(system)
        return target, prompts

    def run(self) -> Measured:
        """Answer what is not answered yet, each system in its turn."""
        mx.clear_cache()
        load, code = machine_load(), code_version()
        target, prompts = self.load()
        systems = {system.name: system for system in self.systems}
        stores = {name: self._store(system) for name, system in systems.items()}
        keys = [[repeat, *prompt] for repeat in range(self.repeats) for prompt in prompts]
        for name, store in stores.items():
            kept = [store[key] for key in keys if key in store]
            tell_kept(f"{self.name}, {name}", kept, code)
            for _ in range(self.warm_up if len(kept) < len(keys) else 0):
                target.answer(systems[name], prompts[0])
        progress = tqdm(keys, desc=self.name, unit="prompt", disable=None)
        for key, name in in_turns(progress, list(stores)):
            if key not in stores[name]:
                answer = target.answer(systems[name], key[1:])
                stores[name].keep(key, Kept(answer, target.text_of(answer.tokens), code))
        answers = {
            name: [[store[[r, *prompt]] for r in range(self.repeats)] for prompt in prompts]
            for name, store in stores.items()
        }
        return Measured(self, target, prompts, answers, load)

    def scores(self, kept: Sequence[Kept]) -> Scores | None:
        """[figures, prompts] what answers are worth; None where there are no references."""
        if self.task is None:
            return None
        return score_texts(self.task, self.examples, [one.text for one in kept])

    def settings(self, system: System) -> dict[str, Any]:
        """Everything that an answer and its time depend on, beside the prompt's tokens."""
        weights = self.weights
        kind = DRAFT_MODEL if system.kind == DRAFT_ALONE else system.kind
        return {
            "format": 2,
            "base": files_version(weights.base),
            "folder": folder_digest(weights.folder),
            "end_tokens": sorted(weights.end_tokens),
            "checkpoint": files_version(weights.checkpoints.get(kind)),
            "dtype": weights.dtype,
            "system": system.name,
            # Speeds compare where systems took turns: other systems beside it are another run.
            "systems": [other.name for other in self.systems],
            "kind": system.kind,
            "config": asdict(system.config),
            "machine": timed_on(),
        }

    def _store(self, system: System) -> AnswerStore:
        store = AnswerStore(self.out, self.name, self.settings(system))
        if self.fresh:
            store.forget()
        return store


@dataclass(frozen=True, eq=False)
class Measured:
    """An experiment's answers.

    Attributes:
        target, prompts: what was loaded for it.
        load: how busy the machine was when it began.
    """

    experiment: Experiment
    target: Target
    prompts: Sequence[list[int]]
    answers: Answers
    load: str

    def first(self, name: str) -> list[Kept]:
        """[prompts] a system's answers, of the first repeat."""
        return [repeats[0] for repeats in self.answers[name]]


def same_answers(ours: Sequence[Kept], theirs: Sequence[Kept]) -> int:
    """How many answers are the same, token for token."""
    return sum(a.answer.tokens == b.answer.tokens for a, b in zip(ours, theirs, strict=True))
