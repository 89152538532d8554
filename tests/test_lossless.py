"""Whoever drafts, in whatever cache, under any sampling, by any way in: plain decoding's tokens.

Any two values of different axes meet in two cases. A case also compares its target calls with
those of `data/target_calls.json`, since tokens are right for a drafter that never drafts, too.
`python tests/test_lossless.py` writes that file anew, after a change that is to draft otherwise.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from mlx_lm.utils import load_model
from real import tokens_of, write_tokenizer
from tiny import (
    all_pairs,
    cost_shared_calls,
    first_tokens,
    make_adapter,
    make_base,
    mlx_lm_tokens,
    token_steps,
)
from tiny_classes import write_model
from tiny_heads import HEAD_KINDS, make_heads

import ssmlx
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.loading.adapter import write_adapter
from ssmlx.loading.load import load_base
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.settings import PruneConfig

COUNTS = Path(__file__).parent / "data" / "target_calls.json"
LENGTH = 24
PROMPT = [(7 * i * i + 3 * i) % 50 + 10 for i in range(9)] * 2  # past every window

CACHES = {  # a class of mlx-lm for each kind
    "rows": "llama",
    "windows": "gemma3_text",
    "latent": "deepseek_v3",
    "states": "mamba2",
    "hybrid": "lfm2",
}
WITH_TREES = ("rows", "windows", "latent")
LORAS = {  # scope of the adapter, and whether its LoRA is merged
    "streams": ("streams", False),
    "merged": ("all", True),
    "beside": ("all", False),
    "none": (None, False),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "sampled": {"temp": 1.0, "top_p": 0.9, "seed": 3},
    "penalized": {
        "temp": 0.8, "top_k": 20, "seed": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.2,
        "logit_bias": {12: 2.0},
    },
}  # fmt: skip
ALWAYS = {"decoding": "speculative"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"decoding": "plain"},
    "controlled": {},
    "second-pass": {"drafter": "streams", **ALWAYS},
    "fused": {"drafter": "streams schedule=fused"},
    "pruned": {"drafter": "streams", "prune": PruneConfig(kind="budget", keep=6)},
    "prompt-lookup": {"drafter": "prompt-lookup", **ALWAYS},
    "lookahead": {"drafter": "lookahead", **ALWAYS},
    "draft-model": ALWAYS,
    **dict.fromkeys(HEAD_KINDS, ALWAYS),
}
OF_STREAMS = ("second-pass", "fused", "pruned")


class Case(NamedTuple):
    cache: str
    lora: str
    drafter: str
    sampling: str
    path: str

    @property
    def settings(self) -> dict[str, Any]:
        found = {**SAMPLINGS[self.sampling], **DRAFTERS[self.drafter], "max_tokens": LENGTH}
        loaded = loaded_drafter(self)
        return found if loaded is None else {**found, "drafter": loaded}

    @property
    def adapter(self) -> str:
        return "none" if self.lora == "none" else str(folder(self.cache) / LORAS[self.lora][0])


# --- Models, made once ---


@cache
def home() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="ssmlx-lossless-")


@cache
def folder(kind: str) -> Path:
    """A random model of the kind, with a tokenizer, and adapters if it has stages."""
    path = write_model(CACHES[kind], Path(home().name, kind))
    write_tokenizer(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["eos_token"]  # no answer ends early
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind in WITH_TREES:
        backbone, _ = load_base(path, "float32")
        for scope in ("streams", "all"):
            (path / scope).mkdir()
            write_adapter(path / scope, make_adapter(backbone, scope))
    return path


@cache
def loaded(kind: str, lora: str):
    _, merge = LORAS[lora]
    adapter = Case(kind, lora, "plain", "greedy", "loop").adapter
    return ssmlx.load(str(folder(kind)), adapter=adapter, merge_lora=merge, dtype="float32")


@cache
def engine_of(kind: str, merge: bool) -> ssmlx.Engine:
    return ssmlx.Engine(str(folder(kind)), adapter="none", merge_lora=merge, dtype="float32")


@cache
def draft_model() -> DraftModel:
    return DraftModel(make_base(seed=50, vocab=64))


@cache
def heads_of(kind: str, lora: str, name: str):
    return make_heads(name, loaded(kind, lora)[0].backbone)


def loaded_drafter(case: Case):
    if case.drafter == "draft-model":
        return draft_model()
    is_head = case.drafter in HEAD_KINDS
    return heads_of(case.cache, case.lora, case.drafter) if is_head else None


# --- Ways in: each gives an answer's tokens and its number of target calls ---


def by_loop(case: Case, settings: dict[str, Any]) -> tuple[list[int], int]:
    model, _ = loaded(case.cache, case.lora)
    steps = token_steps(model, PROMPT, model.make_cache(), **settings)
    tokens, calls = run_on_mlx_thread(lambda: first_tokens(steps, LENGTH))
    return tokens, len(calls)


def by_api(case: Case, settings: dict[str, Any]) -> tuple[list[int], int]:
    return heard(ssmlx.stream_generate(*loaded(case.cache, case.lora), PROMPT, **settings))


def by_engine(case: Case, settings: dict[str, Any]) -> tuple[list[int], int]:
    return heard(ask(case, PROMPT, **settings))


def by_prompt_cache(case: Case, settings: dict[str, Any]) -> tuple[list[int], int]:
    prompts = ssmlx.PromptCache()
    heard(ask(case, PROMPT, prompts, **settings))
    segments = [*ask(case, PROMPT, prompts, **settings)]
    assert segments[-1].cached_tokens == len(PROMPT) - 1
    return heard(segments)


def in_shared_calls(case: Case, settings: dict[str, Any]) -> tuple[list[int], int]:
    with pytest.MonkeyPatch.context() as patch:
        cost_shared_calls(patch, lambda rows: 0.01)
        with ask(case, PROMPT[::-1], max_tokens=2 * LENGTH) as other:
            return heard(segment for segment in ask(case, PROMPT, **settings) if next(other))


def ask(case: Case, prompt: list[int], prompts: ssmlx.PromptCache | None = None, **settings):
    engine = engine_of(case.cache, LORAS[case.lora][1])
    prompts = ssmlx.PromptCache() if prompts is None else prompts
    return engine.stream(prompt, adapter=case.adapter, prompt_cache=prompts, **settings)


def by_chat(case: Case, settings: dict[str, Any]) -> tuple[list[int], int]:
    drafter = settings.pop("drafter", None)
    config = ssmlx.GenerateConfig(**settings)
    chat = ssmlx.ChatSession(*loaded(case.cache, case.lora), config, drafter=drafter)
    return heard(chat.reply("w1 w2 w3 w1 w2"))


def heard(segments) -> tuple[list[int], int]:
    segments = [*segments]
    return tokens_of(segments), segments[-1].target_calls


PATHS: dict[str, Callable[[Case, dict[str, Any]], tuple[list[int], int]]] = {
    "loop": by_loop,
    "api": by_api,
    "engine": by_engine,
    "prompt cache": by_prompt_cache,
    "shared calls": in_shared_calls,
    "chat": by_chat,
}


# --- Cases ---


def is_possible(*values: str) -> bool:
    case = Case(*values)
    if case.cache not in WITH_TREES and (case.lora != "none" or case.drafter == "lookahead"):
        return False
    if case.drafter in OF_STREAMS and case.lora == "none":
        return False
    has_heads = case.drafter in HEAD_KINDS
    return case.cache != "states" or (case.path != "shared calls" and not has_heads)


AXES = (CACHES, LORAS, DRAFTERS, SAMPLINGS, PATHS)
CASES = sorted(Case(*values) for values in all_pairs(*AXES, times=2, where=is_possible))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_tokens_and_target_calls(case):
    expected, _ = PATHS[case.path if case.path == "chat" else "loop"](
        case._replace(drafter="plain"), case._replace(drafter="plain").settings
    )
    found, calls = PATHS[case.path](case, case.settings)
    assert found == expected
    if case.drafter != "controlled" and case.path != "shared calls":  # which follow the clock
        assert calls == pytest.approx(json.loads(COUNTS.read_text())["-".join(case)], abs=1)


@pytest.mark.parametrize("kind", CACHES)
def test_plain_decoding_is_mlx_lms(kind):
    model, _ = load_model(folder(kind))
    case = Case(kind, "none", "plain", "greedy", "loop")
    assert by_loop(case, case.settings)[0] == mlx_lm_tokens(model, PROMPT, LENGTH)


if __name__ == "__main__":
    counts = {"-".join(case): PATHS[case.path](case, case.settings)[1] for case in CASES}
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
