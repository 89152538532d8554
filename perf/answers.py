"""Answers of `perf.quality`, kept on disk as they come: a run that is stopped goes on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.adapter import CONFIG_FILE, LORA_FILES, STREAMS_FILE
from ssmlx.api import GenerateConfig
from ssmlx.model import StreamFusedModel
from ssmlx.prompts import prompt_tokens

from .common import ROOT, Answer, machine, mlx_lm_answer, ssmlx_answer
from .quality_plan import Plan
from .systems import LORA_SETTINGS, MLX_LM, System, load_system


@dataclass(frozen=True)
class Kept:
    """An answer as it is kept on disk; `code` tells which version of the package gave it."""

    answer: Answer
    text: str
    code: str


class AnswerStore:
    """Answers on disk, one line each as they come: a run that is stopped goes on from there."""

    def __init__(self, folder: Path, task: str, settings: Mapping[str, Any]) -> None:
        # As it will be read again: JSON has no tuples.
        self._settings = json.loads(json.dumps(settings))
        self.path = folder / f"quality-{task}-{digest(self._settings)}.part.jsonl"
        self._kept: dict[str, Kept] = {}
        self._read()

    def __contains__(self, prompt: list[int]) -> bool:
        return digest(prompt) in self._kept

    def __getitem__(self, prompt: list[int]) -> Kept:
        return self._kept[digest(prompt)]

    def forget(self) -> None:
        """Forget every answer."""
        self._kept = {}
        self.path.unlink(missing_ok=True)

    def keep(self, prompt: list[int], kept: Kept) -> None:
        """Add an answer; it is on disk when this returns."""
        if not self.path.exists():
            self.path.write_text(json.dumps({"settings": self._settings}) + "\n")
        self._kept[digest(prompt)] = kept
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(digest(prompt), kept))

    @staticmethod
    def _line(prompt: str, kept: Kept) -> str:
        values = {"prompt": prompt, "text": kept.text, "code": kept.code, **asdict(kept.answer)}
        return json.dumps(values, ensure_ascii=False) + "\n"

    def _read(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        first, *lines = text.split("\n")
        for line in lines if self._are_ours(first) else ():
            # A run that was killed while it wrote leaves half a line.
            try:
                row = json.loads(line)
                answer = Answer(row["tokens"], row["target_calls"], row["decode_seconds"])
                self._kept[row["prompt"]] = Kept(answer, row["text"], row["code"])
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
        self._write_again()

    def _are_ours(self, first_line: str) -> bool:
        try:
            return json.loads(first_line) == {"settings": self._settings}
        except json.JSONDecodeError:
            return False

    def _write_again(self) -> None:
        lines = [self._line(prompt, kept) for prompt, kept in self._kept.items()]
        work = self.path.with_suffix(f".{os.getpid()}.new")
        work.write_text(json.dumps({"settings": self._settings}) + "\n" + "".join(lines))
        work.replace(self.path)


def answer_system(plan: Plan, system: System, *, fresh: bool) -> dict[str, list[Kept]]:
    """A system's answers by variant; variants take turns, so that their speeds compare."""
    stores = open_stores(plan, system, fresh=fresh)
    model, tokenizer = load_system(plan.weights, system)
    prompts = [prompt_tokens(e.prompt, model, tokenizer, system.template) for e in plan.examples]
    answerers = {
        label: answerer(model, tokenizer, config, plan.max_tokens)
        for label, config in system.variants.items()
    }
    code = code_version()
    for label, store in stores.items():
        tell_kept(f"{system.name}, {label}", [store[p] for p in prompts if p in store], code)
        if any(prompt not in store for prompt in prompts):
            answerers[label](prompts[0])  # a warm-up, for the speed of the first answer
    progress = tqdm(prompts, desc=system.name, unit="prompt", disable=None)
    for prompt, label in in_turns(progress, list(stores)):
        if prompt not in stores[label]:
            answer = answerers[label](prompt)
            stores[label].keep(prompt, Kept(answer, text_of(tokenizer, answer.tokens), code))
    return {label: [store[prompt] for prompt in prompts] for label, store in stores.items()}


def in_turns(prompts: Iterable[Any], labels: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Every label for every prompt; the order of labels rotates from prompt to prompt."""
    for index, prompt in enumerate(prompts):
        turn = index % len(labels)
        for label in (*labels[turn:], *labels[:turn]):
            yield prompt, label


def open_stores(plan: Plan, system: System, *, fresh: bool) -> dict[str, AnswerStore]:
    """Where each variant's answers are kept."""
    stores = {
        label: AnswerStore(plan.out, plan.task.name, settings_of(plan, system, label))
        for label in system.variants
    }
    for store in stores.values():
        if fresh:
            store.forget()
    return stores


def tell_kept(name: str, kept: Sequence[Kept], code: str) -> None:
    """Say what is taken over from an earlier run, and whether by other code."""
    if not kept:
        return
    other = sum(answer.code != code for answer in kept)
    note = f", {other} of them by other code (--fresh answers again)" if other else ""
    print(f"{name}: {len(kept)} answers of an earlier run{note}", file=sys.stderr)


def answerer(
    model: StreamFusedModel, tokenizer: TokenizerWrapper, config: GenerateConfig | None, most: int
) -> Callable[[list[int]], Answer]:
    """How a variant answers; None is mlx-lm's own loop, on the very arrays that ssmlx uses."""
    if config is None:
        return lambda prompt: mlx_lm_answer(model.backbone.model, tokenizer, prompt, most)
    return lambda prompt: ssmlx_answer(model, tokenizer, prompt, config)


def text_of(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """The text of an answer, without its end token."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        if token not in tokenizer.eos_token_ids:
            detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def settings_of(plan: Plan, system: System, label: str) -> dict[str, Any]:
    """Everything that an answer depends on, beside its prompt's tokens."""
    config = system.variants[label]
    return {
        "format": 1,
        "weights": weights_version(plan.weights, system.folder),
        "role": system.role,
        "end_tokens": sorted(system.end_tokens),
        "max_tokens": plan.max_tokens,
        "decoding": asdict(config) if config else MLX_LM,
        "machine": {k: v for k, v in machine().items() if k not in ("python", "numpy")},
    }


def weights_version(path: Path, folder: Path | None) -> list[Any]:
    """Tells one base model and adapter from another: a model by its files, LoRA by its bytes."""
    stats = [(file.name, file.stat()) for file in sorted(path.iterdir()) if file.is_file()]
    base = digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    names = (CONFIG_FILE, STREAMS_FILE, LORA_SETTINGS, *LORA_FILES.values())
    files = [folder / name for name in names if (folder / name).is_file()] if folder else []
    return [base, digest([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])]


def code_version() -> str:
    """Tells one state of the package's sources from another."""
    files = sorted((ROOT / "ssmlx").rglob("*.py"))
    return digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])


def digest(value: Any) -> str:
    """A short name of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
