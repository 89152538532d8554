"""The base model as the rest of the package has it: its stages, or its own call alone.

What the package must know of a model is small (`family`). When the model is wrapped, it is checked
(`capability_checks`) that the stages put together (`stages`) are the model. Where they are not, or
a class is built otherwise than `family` takes it to be, the model decodes plainly, by its own call.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from ..errors import InputError, first_line
from .cache import TreeCache
from .capabilities import Capabilities, Reason
from .capability_checks import (
    CHECK_TOKENS,
    check_stages,
    try_batches,
    try_chains,
    try_tree_masks,
)
from .family import cannot_draft, model_type, whole_parts
from .identity import NORM_PROBE_LENGTH, BaseIdentity, digest_tensors
from .lm_head import HEAD_KINDS, LMHead, head_layer, pack_rows, row_weights, select_rows
from .modules import clone_sharing_arrays, module_arrays
from .ranks import Group, from_rank0
from .recurrent import hook_recurrences
from .shapes import to_float, to_list
from .stages import Stages, Tapped, make_ropes_take_positions
from .state_cache import StateCache

_log = logging.getLogger("ssmlx")

Reload = Callable[[Collection[str]], dict[str, nn.Module]]
"""Reads modules from the base model's files: their paths, to the modules by path."""


class Backbone(Stages):
    """The base model: an mlx-lm model whose stages were checked, or that runs by its own call.

    Its arrays are computed when it is made, so that any thread may use it. `capabilities` says
    what it can do; the methods of stages may be called only where it has "stages".

    Args:
        model: as `mlx_lm.load` returns it. Its layers' rotary embeddings are wrapped in place; the
            model itself works as before.
        reload: reads modules, given by path, once more as the model was loaded. Without it,
            weights that an adapter is merged into are kept beside the merged ones.
        draft_bits: bits to quantise the weights of `draft_head` to, where the head's own are not
            quantised; None leaves them as they are.
        group: the ranks that the model is split over, as `ranks.shard` does it.

    Raises:
        InputError: the model does not run by its own call either.

    Attributes:
        replaced: the base model's modules that an attached adapter's LoRA stands in for, by path;
            None for those that `reload` gives.
        name: what the model is called: a name or a folder, as it was given.
        cache_dir: the folder that was given to keep things in; None for the user's cache folder.
        offline: whether nothing may be fetched.
        folder: where its weights were read, if they were.
    """

    name: str = "this model"
    cache_dir: str | Path | None = None
    offline: bool = False
    folder: Path | None = None
    _no_stages: Reason = None
    _no_chains: Reason = None
    # [1, 1, D] zeros of a model without stages: the shape and type of its hidden states.
    _hidden_like: mx.array

    def __init__(
        self,
        model: nn.Module,
        reload: Reload | None = None,
        draft_bits: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.reload = reload
        self.draft_bits = draft_bits
        self.group = group
        self.replaced: Mapping[str, nn.Module | None] = {}
        wrapped_ropes: list[tuple[Any, nn.Module]] = []
        try:
            super().__init__(model)
            wrapped_ropes = make_ropes_take_positions(self)
            mx.eval(module_arrays(model))
            check_stages(self)
        except Exception as error:  # of many kinds, where a class is built in a way of its own
            _log.debug("the stages of a model cannot be run", exc_info=True)
            for attention, rope in wrapped_ropes:
                attention.rope = rope
            if not isinstance(error, InputError):
                error = cannot_draft(
                    model, f"its layers cannot be run one by one ({first_line(error)})"
                )
            self._run_whole(error.found)

    def clone_sharing_weights(self) -> Backbone:
        """The same model with modules of its own, to be exchanged, on the very same arrays."""
        clone = copy.copy(self)
        clone.model = clone_sharing_arrays(self.model)
        clone.refresh_parts()
        return clone

    def refresh_parts(self) -> None:
        """Find the parts of `model` again, after some of its modules were exchanged."""
        if self._no_stages is None:
            super().refresh_parts()
        else:
            self.parts = whole_parts(self.model, self.vocab_size)

    def base(self) -> Backbone:
        """The base model alone, of one that an adapter is attached to.

        Returns:
            A copy on the same arrays that has the replaced modules again; this backbone itself
            where no module was replaced.

        Raises:
            InputError: weights that LoRA was merged into cannot be read again.
        """
        if not self.replaced:
            return self
        dropped = [path for path, module in self.replaced.items() if module is None]
        read = self.reload(dropped) if dropped and self.reload is not None else {}
        base = self.clone_sharing_weights()
        base.model.update_modules(tree_unflatten([*self.replaced_in_memory.items(), *read.items()]))
        base.refresh_parts()
        base.replaced = {}
        return base

    @property
    def replaced_in_memory(self) -> dict[str, nn.Module]:
        """Those of `replaced` that are kept in memory, by path; `reload` reads the others."""
        return {path: module for path, module in self.replaced.items() if module is not None}

    @property
    def identity(self) -> BaseIdentity:
        """Class, sizes and first norm weights: what tells this base model from another, in any
        precision.
        """
        probe = self.final_norm_weight[:NORM_PROBE_LENGTH].astype(mx.float32)
        return BaseIdentity(
            str(getattr(self.model, "model_type", "")),
            len(self.layers),
            self.hidden_size,
            self.vocab_size,
            tuple(round(value, 6) for value in to_list(probe)),
        )

    @cached_property
    def digest(self) -> str:
        """A digest of settings and weights, in hexadecimal: keys and values are reused under it.

        Of the base model: it has to be asked for before an adapter changes layers.
        """
        settings = json.dumps(getattr(self.args, "__dict__", {}), sort_keys=True, default=str)
        return digest_tensors([(settings, mx.array(0)), *tree_flatten(self.model.parameters())])

    @property
    def context_length(self) -> int | None:
        """Most positions that the model was made for, where its settings say; else None."""
        return getattr(self.args, "max_position_embeddings", None)

    @property
    def final_norm_weight(self) -> mx.array:
        """[D] weight of the final norm; [0] where it was not found."""
        weight: mx.array = getattr(self.final_norm, "weight", mx.zeros(0))
        return weight

    def append(self, tokens: mx.array, cache: TreeCache, tapped: Tapped | None = None) -> mx.array:
        """Run tokens through the model and commit them to the cache, as `Stages.append`.

        Of a model without stages the cache is a `StateCache`, and what is returned are logits
        [1, R, V], which `logits` gives back as they are.

        Raises:
            InputError: taps are asked of a model without stages.
        """
        if not isinstance(cache, StateCache):
            return super().append(tokens, cache, tapped)
        if tapped:
            self.capabilities.require("taps", "hidden states between layers")
        return cache.append(self.parts.outer, tokens)

    def verify_chain(self, tokens: mx.array, cache: StateCache) -> mx.array:
        """Run drafted tokens through a model without stages, one behind the other.

        Args:
            tokens: [R], two or more: the newest token and what was drafted behind it.
            cache: of the tokens before them. `StateCache.advance` says how many of them stay.

        Returns:
            [1, R, V] logits, which `logits` gives back as they are.
        """
        return cache.verify(self.parts.outer, tokens)

    def logits(self, hidden: mx.array, head: LMHead | None = None) -> mx.array:
        """Next-token logits [R, V] of what `append` or `run` returned, as `Stages.logits`."""
        if self._no_stages is not None:
            return hidden.squeeze(0)
        return super().logits(hidden, head)

    def draft_head(self, tokens: mx.array) -> LMHead:
        """The LM head of some tokens alone, for drafting; it has its own copy of their rows.

        It only guesses, so its weights are quantised to `draft_bits`: no answer changes.

        Args:
            tokens: [Vd] ids, whose logits it returns in this order.

        Raises:
            InputError: the model's LM head has no row for each token.
        """
        layer = head_layer(self.lm_head)
        self._require_rows(layer, "a draft vocabulary")
        rows = select_rows(layer, tokens)
        if self.draft_bits is not None:
            rows = pack_rows(rows, self.draft_bits)
        mx.eval(rows.parameters())
        return self._head_with_rows(rows)

    def head_weights(self, tokens: mx.array) -> mx.array:
        """[..., D] unquantised weights of the LM head's rows for `tokens` [...].

        Raises:
            InputError: the model's LM head has no row for each token.
        """
        layer = head_layer(self.lm_head)
        self._require_rows(layer, "a condition")
        return row_weights(layer, tokens)

    @cached_property
    def logit_scale(self) -> float:
        """What the model multiplies logits by, where they are small enough not to be capped.

        It is measured by a call with small hidden states; 1.0 where the model changes no logits.
        """
        if not self._changes_logits:
            return 1.0
        hidden = 1e-3 * mx.ones((1, self.hidden_size), self.dtype)
        layer: Any = head_layer(self.lm_head)
        plain = (layer.as_linear if self.parts.head is None else layer)(hidden)
        scaled = self.lm_head(hidden)
        largest = mx.argmax(mx.abs(plain))
        return to_float(scaled.flatten()[largest]) / to_float(plain.flatten()[largest])

    def broadcast_from_rank0(self, *arrays: mx.array) -> list[mx.array]:
        """Rank 0's values of `arrays`, where the model is split over ranks; else `arrays`."""
        return from_rank0(arrays, self.group)

    def make_model_cache(self) -> list[Any]:
        """mlx-lm's own caches for the model, one for each layer and of the kind that it needs."""
        return list(make_prompt_cache(self.parts.outer))

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do.

        Whether it can batch is tried by a few calls when it is first asked for.
        """
        reason = self._no_stages
        return Capabilities(
            stages=reason,
            taps=reason,
            trees=reason,
            chains=self._no_chains,
            try_batches=lambda: self._no_batches,
        )

    @cached_property
    def takes_tree_masks(self) -> bool:
        """Whether every layer's attention takes a `metal.TreeMask`; tried when first asked for."""
        return try_tree_masks(self)

    @cached_property
    def _no_batches(self) -> Reason:
        """Why texts of different lengths cannot share a call; None where they can."""
        return try_batches(self) if self._no_stages is None else self._no_stages

    def _embed_one_token(self) -> mx.array:
        """[1, 1, D] of the shape and type of hidden states; zeros of a model without stages."""
        return super()._embed_one_token() if self._no_stages is None else self._hidden_like

    def _run_whole(self, why: str) -> None:
        """Keep to the model's own call; `why` says what keeps its layers from running one by one.

        Raises:
            InputError: the model does not run by its own call either.
        """
        self.parts = whole_parts(self.model, 0)
        outer = self.parts.outer
        try:
            logits = outer(mx.array([CHECK_TOKENS]), cache=self.make_model_cache())
            size = getattr(self.args, "hidden_size", 1)
            self._hidden_like = mx.zeros((1, 1, size), logits.dtype)
            mx.eval(logits, self._hidden_like, module_arrays(self.model))
        except Exception as error:  # a class of mlx-lm's raises many kinds
            raise InputError(
                f"the model type {model_type(self.model)!r} does not run ({first_line(error)})",
                expected="settings and weights that its class in mlx-lm runs on",
                do="compare its config.json with the original's, mend MLX's installation where it "
                "could not compile a kernel, or use another model",
            ) from error
        self.parts = whole_parts(self.model, int(logits.shape[-1]))
        self._no_stages = why
        hook_recurrences(self.model)
        self._no_chains = try_chains(self.model, self.make_model_cache, logits.dtype)

    def _require_rows(self, layer: Any, user: str) -> None:
        """Refuse an LM head whose `layer` has no row for each token, which `user` needs.

        Raises:
            InputError: with the layer's class and `user`, such as "a condition".
        """
        if not isinstance(layer, HEAD_KINDS):
            kind = type(layer).__name__
            raise cannot_draft(self.model, f"its LM head is a {kind}, of which {user} takes rows")
