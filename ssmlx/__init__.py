"""Speculative Streaming for MLX: language models that draft for themselves.

    import ssmlx

    model, tokenizer = ssmlx.load("smollm2-135m", adapter="sql")
    prompt = ssmlx.prompt_tokens("...", model, tokenizer)
    for response in ssmlx.stream_generate(model, tokenizer, prompt):
        print(response.text, end="", flush=True)

Shapes are written against the legend in `ssmlx.shapes`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .blas import prefer_openblas

if TYPE_CHECKING:
    from .api import generate as generate
    from .api import stream_generate as stream_generate
    from .bundled import bundled_adapters as bundled_adapters
    from .chat_session import ChatSession as ChatSession
    from .config import AcceptanceConfig as AcceptanceConfig
    from .config import DraftModelConfig as DraftModelConfig
    from .config import LookaheadConfig as LookaheadConfig
    from .config import PromptLookupConfig as PromptLookupConfig
    from .config import PruneConfig as PruneConfig
    from .config import SpeculatorTreeConfig as SpeculatorTreeConfig
    from .config import TreeConfig as TreeConfig
    from .drafters.draft_model import DraftModel as DraftModel
    from .drafters.draft_model import load_draft_model as load_draft_model
    from .errors import InputError as InputError
    from .heads import load_heads as load_heads
    from .loading import load as load
    from .loading import swap_adapter as swap_adapter
    from .prompts import chat_tokens as chat_tokens
    from .prompts import prompt_tokens as prompt_tokens
    from .response import GenerationResponse as GenerationResponse
    from .settings import GenerateConfig as GenerateConfig

__version__ = "0.1.0"

has_fast_blas = prefer_openblas()

# Loaded on first use, so that `--help` does not wait for MLX.
_HOMES = {
    "load": "loading",
    "swap_adapter": "loading",
    "bundled_adapters": "bundled",
    "generate": "api",
    "stream_generate": "api",
    "GenerateConfig": "settings",
    "GenerationResponse": "response",
    "ChatSession": "chat_session",
    "DraftModel": "drafters.draft_model",
    "load_draft_model": "drafters.draft_model",
    "load_heads": "heads",
    "AcceptanceConfig": "config",
    "DraftModelConfig": "config",
    "LookaheadConfig": "config",
    "PromptLookupConfig": "config",
    "SpeculatorTreeConfig": "config",
    "TreeConfig": "config",
    "PruneConfig": "config",
    "chat_tokens": "prompts",
    "prompt_tokens": "prompts",
    "InputError": "errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
