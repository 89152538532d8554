"""Latent attention (DeepSeek V3, GLM-4.7-Flash, Mistral 4): a step's rows as plain decoding's.

mlx-lm's modules cache a latent vector and one rotated key a token. The query of a single row is
brought into the latent space. For several rows they unfold keys and values of every head from the
whole text instead: right for a prompt, but a step of a few rows costs more the longer the text is,
and its numbers differ from plain decoding's. So the rows of a step are run as texts of one row
each, all of which read the one cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .family import attention_of
from .layer_state import LayerView, UpdateAndFetch
from .rope import Positions
from .shapes import indices


class RowsAsTexts(nn.Module):
    """A base that marks the classes made by `run_rows_as_texts`."""


def is_latent(layer: Any) -> bool:
    """Whether attention keeps a latent vector instead of values."""
    attention = attention_of(layer)
    return hasattr(attention, "embed_q") and hasattr(attention, "unembed_out")


def run_rows_as_texts(layers: Iterable[Any]) -> None:
    """Give latent attention, in place, a class that runs a step's rows as texts of one row each."""
    for layer in layers:
        attention = attention_of(layer)
        if is_latent(layer) and not isinstance(attention, RowsAsTexts):
            kind = type(attention)
            call = {"__call__": _run_each_row_as_a_text(kind.__call__)}
            attention.__class__ = type(kind.__name__, (kind, RowsAsTexts), call)


def _run_each_row_as_a_text(
    own: Any,  # the `__call__` of the module's class
) -> Callable[..., mx.array]:
    """A `__call__` that runs `own` once, with the R rows of a step as its batch axis."""

    def call(attention: Any, x: mx.array, *given: Any, **named: Any) -> mx.array:
        # As the layers call it: `attn_scale` if there is one, the mask, the cache.
        *scales, mask, cache = given if len(given) > 1 else (None, None)
        if not _are_rows_of_step(x, cache):
            return cast("mx.array", own(attention, x, *given, **named))
        rows = x.shape[1]
        scales = [scale.swapaxes(0, 2) for scale in scales]
        mask = None if mask is None else mask[:, None, None]
        view = LayerView(
            _positions_of_rows(cache.offset, rows), _update_and_fetch_texts(cache, rows)
        )
        texts = own(attention, x.swapaxes(0, 1), *scales, mask, view, **named)
        return cast("mx.array", texts.swapaxes(0, 1))

    return call


def _are_rows_of_step(x: mx.array, cache: Any) -> bool:
    """Whether x [1, R, D] holds several rows of a step, and not appended tokens."""
    # A view for appended tokens has the number of tokens before them as its offset.
    return x.shape[1] > 1 and isinstance(cache, LayerView) and not isinstance(cache.offset, int)


def _positions_of_rows(
    offset: mx.array | Positions,  # a position for each row; or only the first row's
    rows: int,  # R
) -> mx.array:  # [R]
    array = offset.array if isinstance(offset, Positions) else offset
    return array if array.size == rows else array + indices(rows)


def _update_and_fetch_texts(
    view: LayerView,
    rows: int,  # R
) -> UpdateAndFetch:
    """A function by which R texts of one row each write into and read the one cache: it maps
    latents and rotated keys, each [R, 1, 1, width], to latents [R, 1, keys, width], the same for
    every text, and keys [1, 1, keys, width]."""

    def update_and_fetch(latent: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        latent, key = view.update_and_fetch(latent.swapaxes(0, 2), key.swapaxes(0, 2))
        return mx.broadcast_to(latent, (rows, *latent.shape[1:])), key

    return update_and_fetch
