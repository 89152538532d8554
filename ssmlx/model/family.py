"""All that the package must know of a family of mlx-lm: where a model has its parts.

`find_parts` reads them off the model's modules by the names that mlx-lm's classes share. Whether
the parts put together are the model is tried by `capability_checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..errors import InputError

# The names that mlx-lm's classes have for token embedding, final norm, LM head, a layer's
# attention, and a layer's window.
_EMBEDDING_NAMES = ("embed_tokens", "tok_embeddings", "word_embeddings", "embedding")
_NORM_NAMES = ("norm", "final_layernorm", "embedding_norm")
_HEAD_NAMES = ("lm_head", "output")
_ATTENTION_NAMES = ("self_attn", "attention")
WINDOW_NAMES = ("sliding_window", "window_size")


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of an mlx-lm model; names that were not found are ""."""

    # called with tokens, returns logits: the model, or the language model that one of images wraps
    outer: Any
    args: Any
    vocab_size: int  # V
    decoder: Any  # has embedding, layers and final norm; None if there is none
    final_norm: Any  # before the LM head; None if it was not found
    norm_name: str  # in `decoder`
    embedding_name: str  # in `decoder`
    head: Any  # None if it is tied to the embedding
    head_name: str  # in `outer`
    layers: list[Any]
    windows: list[int | None]  # by layer, tokens that a token sees, including itself; None for all
    scales_queries: bool  # layers are given a factor for their queries (`attn_scale`)

    @property
    def embedding(self) -> Any:
        return getattr(self.decoder, self.embedding_name)

    @property
    def embeds_positions(self) -> bool:
        """Whether positions are learned, and added to the embeddings (OPT)."""
        return hasattr(self.decoder, "embed_at")


def find_parts(model: nn.Module) -> Parts:
    """Find a model's parts; nothing is run, and only `check_stages` tells whether they are all."""
    outer = language_model(model)
    decoder = _find_decoder(model)
    norm_name = _find_norm_name(model, decoder)
    head_name = _first_name(outer, _HEAD_NAMES)
    args = settings_of(outer)
    layers = list(model.layers)
    caches = make_caches(model)
    return Parts(
        outer=outer,
        args=args,
        vocab_size=int(args.vocab_size),
        decoder=decoder,
        final_norm=getattr(decoder, norm_name),
        norm_name=norm_name,
        embedding_name=_first_name(decoder, _EMBEDDING_NAMES),
        head=getattr(outer, head_name, None),
        head_name=head_name,
        layers=layers,
        windows=[_window_of_cache(model, layer, cache) for layer, cache in enumerate(caches)],
        scales_queries="attn_scale" in signature(type(layers[0]).__call__).parameters,
    )


def find_available_parts(model: nn.Module, vocab_size: int) -> Parts:
    """The parts of a model that runs by its own call; what it lacks is None or empty, and no window
    is named."""
    any_model: Any = model
    outer = language_model(model)
    args = settings_of(outer)
    final_norm = None
    norm_name = ""
    try:
        decoder = _find_decoder(model)
        norm_name = _find_norm_name(model, decoder)
        int(args.vocab_size)
        final_norm = getattr(decoder, norm_name)
    except (InputError, AttributeError, TypeError, ValueError):
        decoder = None
    layers = list(getattr(any_model, "layers", []))
    head_name = _first_name(outer, _HEAD_NAMES)
    return Parts(
        outer=any_model,
        args=args,
        vocab_size=vocab_size,
        decoder=decoder,
        final_norm=final_norm,
        norm_name=norm_name,
        embedding_name=_first_name(decoder, _EMBEDDING_NAMES),
        head=getattr(outer, head_name, None),
        head_name=head_name,
        layers=layers,
        windows=[None] * len(layers),
        scales_queries=False,
    )


def make_caches(model: nn.Module) -> list[Any]:
    """mlx-lm's empty caches by layer: of the language model, if there is one, since a model that
    wraps it may not pass its windows on (Mistral 3)."""
    outer = language_model(model)
    return list(make_prompt_cache(outer if hasattr(outer, "layers") else model))


def model_type(model: nn.Module) -> str:
    """mlx-lm's name of the model's class, such as "llama"."""
    return str(getattr(model, "model_type", type(model).__name__))


def no_stages_error(
    model: nn.Module,
    why: str,  # its layers cannot be run one by one
) -> InputError:
    return InputError(
        f"the layers of the model type {model_type(model)!r} cannot be run one by one: {why}",
        expected="a decoder whose layers run one by one",
        do="use another model",
    )


def settings_of(model: Any) -> Any:
    """The settings that a model was built from: `args`, or `config` in some classes."""
    return getattr(model, "args", getattr(model, "config", None))


def language_model(model: nn.Module) -> Any:
    """The model that reads text: a model that also sees wraps it."""
    return getattr(model, "language_model", model)


def attention_of(layer: Any) -> Any:
    """The attention of a layer; None if it has none by mlx-lm's usual names."""
    return getattr(layer, _first_name(layer, _ATTENTION_NAMES), None)


def _first_name(module: Any, names: Sequence[str]) -> str:
    """The first that is an attribute; "" for none."""
    return next((name for name in names if hasattr(module, name)), "")


def _find_decoder(model: nn.Module) -> Any:
    """The norm is not looked for."""
    inner = getattr(language_model(model), "model", None)
    decoder = getattr(inner, "decoder", inner)
    if decoder is None or not hasattr(model, "layers"):
        raise no_stages_error(model, "it has no `model.layers`")
    if not _first_name(decoder, _EMBEDDING_NAMES):
        raise no_stages_error(model, "it has no token embedding by a usual name")
    return decoder


def _find_norm_name(model: nn.Module, decoder: Any) -> str:
    name = _first_name(decoder, _NORM_NAMES)
    if not name:
        raise no_stages_error(model, "it has no final norm")
    return name


def _window_of_cache(
    model: nn.Module,
    layer: int,
    cache: Any,  # mlx-lm's empty one of that layer: a rotating one has a window of its size
) -> int | None:
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    if type(cache) is not KVCache:
        raise no_stages_error(
            model,
            f"layer {layer} keeps its state in {type(cache).__name__}, which follows one text "
            "and no branches",
        )
    return None
