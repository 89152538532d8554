"""Speculative Streaming for MLX: language models that draft for themselves.

    import ssmlx

    model, tokenizer = ssmlx.load("smollm2-135m")
    prompt = ssmlx.prompt_tokens("...", model, tokenizer)
    for response in ssmlx.stream_generate(model, tokenizer, prompt):
        print(response.text, end="", flush=True)

`GenerateConfig` has the settings, `GenerationResponse` what a piece of an answer tells, and every
mistake raises `InputError`. Shapes are written against the legend in `ssmlx.model.shapes`.
"""

import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .blas import load_openblas_before_mlx

if TYPE_CHECKING:
    from .answers import Answer as Answer
    from .api import generate as generate
    from .api import stream_generate as stream_generate
    from .decoding.sampling import TokenLogprobs as TokenLogprobs
    from .drafters.draft_model import DraftModel as DraftModel
    from .drafters.draft_model import load_draft_model as load_draft_model
    from .drafters.heads import load_heads as load_heads
    from .drafters.mtp import load_mtp as load_mtp
    from .drafters.text_index import EarlierAnswers as EarlierAnswers
    from .engine import Engine as Engine
    from .errors import InputError as InputError
    from .errors import NoRoomError as NoRoomError
    from .generation.segments import GenerationResponse as GenerationResponse
    from .loading.attach import swap_adapter as swap_adapter
    from .loading.load import load as load
    from .loading.names import bundled_adapters as bundled_adapters
    from .prompt_cache import PromptCache as PromptCache
    from .prompts import chat_tokens as chat_tokens
    from .prompts import prompt_tokens as prompt_tokens
    from .session import ChatSession as ChatSession
    from .settings import AcceptanceConfig as AcceptanceConfig
    from .settings import DraftModelConfig as DraftModelConfig
    from .settings import GenerateConfig as GenerateConfig
    from .settings import LookaheadConfig as LookaheadConfig
    from .settings import MtpConfig as MtpConfig
    from .settings import PromptLookupConfig as PromptLookupConfig
    from .settings import PruneConfig as PruneConfig
    from .settings import SpeculatorTreeConfig as SpeculatorTreeConfig
    from .settings import TreeConfig as TreeConfig

__version__ = "0.1.0"

load_openblas_before_mlx()
logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless an app listens

# Loaded on first use, so that `--help` does not wait for MLX.
_NAMES = {
    "answers": ("Answer",),
    "api": ("generate", "stream_generate"),
    "decoding.sampling": ("TokenLogprobs",),
    "drafters.draft_model": ("DraftModel", "load_draft_model"),
    "drafters.heads": ("load_heads",),
    "drafters.mtp": ("load_mtp",),
    "engine": ("Engine",),
    "drafters.text_index": ("EarlierAnswers",),
    "errors": ("InputError", "NoRoomError"),
    "generation.segments": ("GenerationResponse",),
    "loading.attach": ("swap_adapter",),
    "loading.load": ("load",),
    "loading.names": ("bundled_adapters",),
    "prompt_cache": ("PromptCache",),
    "prompts": ("chat_tokens", "prompt_tokens"),
    "session": ("ChatSession",),
    "settings": (
        "GenerateConfig", "AcceptanceConfig", "DraftModelConfig", "LookaheadConfig",
        "MtpConfig", "PromptLookupConfig", "PruneConfig", "SpeculatorTreeConfig", "TreeConfig",
    ),
}  # fmt: skip
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    """What there is, loaded yet or not: `help(ssmlx)` and completion ask for it."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name from its file when it is first asked for; later it is there at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """This package, whose public names no submodule takes: `ssmlx.generate` is a function, and
    `import ssmlx.generate`, the command's module, would put that module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
