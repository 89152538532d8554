"""What the package must know of a family of mlx-lm: where a model has its parts.

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
    """The parts of an mlx-lm model.

    Attributes:
        outer: the module that is called with tokens and returns logits: the model, or the language
            model that a model of images and text wraps.
        args: the settings that it was built from.
        vocab_size: V.
        decoder: the module with embedding, layers and final norm; None where it has none such.
        final_norm: what last hidden states pass before the LM head; None where it was not found.
        norm_name: its attribute in `decoder`; "" where it was not found.
        embedding_name: the token embedding's attribute in `decoder`; "" where it was not found.
        head: the LM head; None where it is tied to the embedding.
        head_name: its attribute in `outer`; "" where it is tied.
        layers: the decoder layers, from the first.
        windows: by layer, how many tokens a token sees, itself among them; None for all.
        scales_queries: whether layers are given a factor for their queries (`attn_scale`).
    """

    outer: Any
    args: Any
    vocab_size: int
    decoder: Any
    final_norm: Any
    norm_name: str
    embedding_name: str
    head: Any
    head_name: str
    layers: list[Any]
    windows: list[int | None]
    scales_queries: bool

    @property
    def embedding(self) -> Any:
        """The token embedding."""
        return getattr(self.decoder, self.embedding_name)

    @property
    def embeds_positions(self) -> bool:
        """Whether positions are learned, and added to the embeddings (OPT)."""
        return hasattr(self.decoder, "embed_at")


def find_parts(model: nn.Module) -> Parts:
    """Find embedding, layers, windows, norm and head of a model, by the names of mlx-lm's classes.

    Nothing is run: whether the parts put together are the model is for `check_stages` to say.

    Args:
        model: as `mlx_lm.load` returns it.

    Raises:
        InputError: it has no layers, no token embedding or no final norm by the usual names, or a
            layer keeps a state from which rejected tokens cannot be taken back.
    """
    outer = language_model(model)
    decoder = _find_decoder_or_raise(model)
    norm_name = _find_norm_name_or_raise(model, decoder)
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
    """Find the parts that a model which runs by its own call has; what it lacks is None or empty.

    Args:
        model: as `mlx_lm.load` returns it.
        vocab_size: V, which the parts are to have.

    Returns:
        Parts whose `outer` is the model itself, and whose `layers` are [] where it has none by that
        name. No window is named. `decoder` and `final_norm` are None unless both are found and the
        model's settings say its vocabulary size.
    """
    any_model: Any = model
    outer = language_model(model)
    args = settings_of(outer)
    final_norm = None
    norm_name = ""
    try:
        decoder = _find_decoder_or_raise(model)
        norm_name = _find_norm_name_or_raise(model, decoder)
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
    """mlx-lm's empty caches for a model, by layer.

    They are those of the language model where it has layers by that name: a model that wraps it
    may not pass its windows on (Mistral 3).
    """
    outer = language_model(model)
    return list(make_prompt_cache(outer if hasattr(outer, "layers") else model))


def model_type(model: nn.Module) -> str:
    """mlx-lm's name of the model's class, such as "llama"; the Python class's where it has none."""
    return str(getattr(model, "model_type", type(model).__name__))


def no_stages_error(model: nn.Module, why: str) -> InputError:
    """Make the error that says `why` a model's layers cannot be run one by one.

    It names the model's type. The caller raises it.
    """
    return InputError(
        f"the layers of the model type {model_type(model)!r} cannot be run one by one: {why}",
        expected="a decoder whose layers run one by one",
        do="use such a model",
    )


def settings_of(model: Any) -> Any:
    """What a model was built from: its `args`, or `config` where its class calls them so; None
    where it has neither."""
    return getattr(model, "args", getattr(model, "config", None))


def language_model(model: nn.Module) -> Any:
    """The model that reads text: a model that also sees wraps it."""
    return getattr(model, "language_model", model)


def attention_of(layer: Any) -> Any:
    """The attention module of a decoder layer; None where it has none by mlx-lm's usual names."""
    return getattr(layer, _first_name(layer, _ATTENTION_NAMES), None)


def _first_name(module: Any, names: Sequence[str]) -> str:
    """The first of `names` that is an attribute of `module`; "" where none is."""
    return next((name for name in names if hasattr(module, name)), "")


def _find_decoder_or_raise(model: nn.Module) -> Any:
    """Find the module of a model that has token embedding, layers and final norm.

    Raises:
        InputError: there is none by mlx-lm's usual names, or no embedding in it, or the model
            has no `layers`. The norm is not looked for.
    """
    inner = getattr(language_model(model), "model", None)
    decoder = getattr(inner, "decoder", inner)
    if decoder is None or not hasattr(model, "layers"):
        raise no_stages_error(model, "it has no `model.layers`")
    if not _first_name(decoder, _EMBEDDING_NAMES):
        raise no_stages_error(model, "it has no token embedding by a usual name")
    return decoder


def _find_norm_name_or_raise(model: nn.Module, decoder: Any) -> str:
    """The name of the attribute of `decoder` that is its final norm.

    Args:
        model: named in the error.
        decoder: as `_find_decoder_or_raise` returns it.

    Raises:
        InputError: it has none of the usual names.
    """
    name = _first_name(decoder, _NORM_NAMES)
    if not name:
        raise no_stages_error(model, "it has no final norm")
    return name


def _window_of_cache(model: nn.Module, layer: int, cache: Any) -> int | None:
    """How many tokens a layer's rows see, a row's own among them; None where they see all.

    Args:
        model: named in the error.
        layer: the layer's number, for the error.
        cache: mlx-lm's empty cache of that layer: a rotating one tells of a window of its size.

    Raises:
        InputError: the cache is of a kind that follows no branches of a draft tree.
    """
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    if type(cache) is not KVCache:
        raise no_stages_error(
            model,
            f"layer {layer} keeps its state in {type(cache).__name__}, which follows one text "
            "and no branches",
        )
    return None
