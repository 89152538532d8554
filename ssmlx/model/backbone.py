"""The base model as the rest of the package has it: its stages, or only its own call.

What the package must know of a model is small (`family`). When the model is wrapped, it is checked
(`capability_checks`) that the stages put together (`stages`) are the model. If they are not, the
model decodes plainly, by its own call.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from ..errors import InputError, first_line
from ..settings import ModelSampling
from .cache import TreeCache
from .capabilities import Capabilities, Reason
from .capability_checks import (
    CHECK_TOKENS,
    check_stages,
    try_batches,
    try_chains,
    try_last_hidden,
    try_tree_masks,
)
from .family import find_available_parts, model_type, no_stages_error
from .lm_head import HEAD_KINDS, LMHead, head_layer, quantise, row_weights, select_rows
from .modules import Notes, clone_sharing_arrays, module_arrays, note_inputs
from .ranks import Group, from_rank0
from .recurrent import hook_recurrences
from .rope import context_length, keep_positions_in_table
from .shapes import to_float
from .stages import CallOutput, Stages, wrap_ropes
from .state_cache import StateCache
from .text_cache import TextCache

_log = logging.getLogger("ssmlx")
# [1, R, D] what enters the final norm of models that are called as a whole: their last hidden
# states, which stages give as the output of the last layer.
_norm_inputs = Notes()

# Reads modules from the base model's files: their paths, to the modules by path.
Reload = Callable[[Collection[str]], dict[str, nn.Module]]


class FileStamp(NamedTuple):
    """Identifies one version of a file."""

    name: str
    inode: int
    size: int  # bytes
    written_ns: int  # when its content was last changed, which programs may set
    changed_ns: int  # when its state was, which they may not


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of a base model, and what is fetched or read for it later."""

    name: str = "this model"  # a name or a folder, as it was given
    folder: Path | None = None  # of its weights; None if they were read from no folder
    config: Mapping[str, Any] = field(default_factory=dict)  # the content of its config.json
    # of that folder, as they were read; None if they were changed meanwhile
    files: tuple[FileStamp, ...] | None = None
    dtype: str = "stored"  # of the weights, as `load` takes it, except "auto"
    # None: weights that an adapter is merged into are kept beside the merged ones
    reload: Reload | None = None
    cache_dir: str | Path | None = None  # None for the user's cache folder
    offline: bool = False  # nothing may be fetched
    sampling: ModelSampling = field(default_factory=ModelSampling)  # of its generation_config.json


class Backbone(Stages):
    """The base model: an mlx-lm model whose stages were checked, or that runs by its own call.

    Its arrays are computed when it is made, so that any thread may use it. `capabilities` says what
    it can do; the methods of stages may be called only if it has "stages". Layers' rotary
    embeddings are wrapped in place; the model itself works as before.
    """

    _no_stages: Reason = None
    _no_chains: Reason = None
    _no_last_hidden: Reason = None
    # [1, 1, D] zeros of a model without stages: the shape and type of its hidden states. D is 0
    # if neither its final norm nor its settings say it.
    _hidden_like: mx.array

    def __init__(
        self,
        model: nn.Module,
        origin: Origin | None = None,
        # of `draft_head`, if the head itself is not quantised; None leaves it as it is
        draft_bits: int | None = None,
        group: Group | None = None,  # the ranks that the model is split over
    ) -> None:
        self.origin = origin or Origin()
        self.draft_bits = draft_bits
        self.group = group
        # The base model's modules that an attached adapter's LoRA replaces, by path; None for those
        # that `origin.reload` gives.
        self.replaced: Mapping[str, nn.Module | None] = {}
        # What others keep as long as these weights are in memory, such as a head that drafts;
        # shared by all copies of the backbone.
        self.kept_with_weights: dict[str, Any] = {}
        wrapped_ropes: list[tuple[Any, nn.Module]] = []
        try:
            super().__init__(model)
            wrapped_ropes = wrap_ropes(self)
            mx.eval(module_arrays(model))
            check_stages(self)
        except Exception as error:  # of many kinds, since classes differ in how they are built
            _log.debug("the stages of a model cannot be run", exc_info=True)
            for attention, rope in wrapped_ropes:
                attention.rope = rope
            if not isinstance(error, InputError):
                error = no_stages_error(model, first_line(error))
            self._switch_to_own_call(error.found)

    def clone_sharing_weights(self) -> Backbone:
        """A copy whose modules may be exchanged; those of this backbone stay as they are."""
        clone = copy.copy(self)
        clone.model = clone_sharing_arrays(self.model)
        clone.refresh_parts()
        return clone

    def refresh_parts(self) -> None:
        if self._no_stages is None:
            super().refresh_parts()
        else:
            self.parts = find_available_parts(self.model, self.vocab_size)

    def without_adapter(self) -> Backbone:
        """A backbone on the same arrays without the attached LoRA; modules that are no longer in
        memory are read from the model's files. This backbone itself if nothing was replaced."""
        if not self.replaced:
            return self
        dropped = [path for path, module in self.replaced.items() if module is None]
        reload = self.origin.reload
        read = reload(dropped) if dropped and reload is not None else {}
        base = self.clone_sharing_weights()
        base.model.update_modules(tree_unflatten([*self.replaced_in_memory.items(), *read.items()]))
        base.refresh_parts()
        base.replaced = {}
        return base

    @property
    def replaced_in_memory(self) -> dict[str, nn.Module]:
        """The replaced modules that are kept in memory; `origin.reload` reads the others."""
        return {path: module for path, module in self.replaced.items() if module is not None}

    @cached_property
    def context_length(self) -> int | None:
        """Most positions that the model was made for; None if nothing bounds them."""
        return context_length(self.model, self.args, self.origin.config)

    @property
    def final_norm_weight(self) -> mx.array:  # [D]; [0] if it was not found
        weight: mx.array = getattr(self.final_norm, "weight", mx.zeros(0))
        return weight

    def append(
        self,
        tokens: mx.array,  # [R] that follow what the cache holds
        cache: TextCache,
        # layers whose input is wanted; the number of all layers means the final norm, the only one
        # that a model without stages gives
        taps: Sequence[int] = (),
    ) -> CallOutput:
        """Run tokens through the model and commit them; paths that the cache has not counted yet
        are dropped."""
        if isinstance(cache, TreeCache):
            return super().append(tokens, cache, taps)
        assert isinstance(cache, StateCache)
        return self._run_own_call(cache.append, tokens, taps)

    def verify_chain(
        self,
        tokens: mx.array,  # [R], at least two: the newest token and what was drafted after it
        cache: StateCache,  # of the tokens before; its `commit_accepted` says how many stay
        taps: Sequence[int] = (),  # as `append` takes them
    ) -> CallOutput:
        """Run a chain through a model without stages."""
        return self._run_own_call(cache.verify, tokens, taps)

    def _run_own_call(
        self,
        # that method of the cache, which runs the model
        append_or_verify: Callable[[Any, mx.array], mx.array],
        tokens: mx.array,  # [R]
        taps: Sequence[int],
    ) -> CallOutput:
        found: dict[int, mx.array] = {}
        if not taps:
            logits = append_or_verify(self.parts.outer, tokens)
        else:
            last = len(self.layers)
            if set(taps) == {last}:
                self.capabilities.require("last_hidden", "hidden states before the final norm")
            else:
                self.capabilities.require("taps", "hidden states between layers")
            with _norm_inputs.taken() as norm_inputs:
                logits = append_or_verify(self.parts.outer, tokens)
            found = {last: norm_inputs[0]}
        return CallOutput(logits.squeeze(0), taps=found)

    def draft_head(
        self,
        tokens: mx.array,  # [Vd]
    ) -> LMHead:  # normed [1, R, D] to logits [1, R, Vd]
        """An LM head of some tokens, in their order, for drafting: a computed copy of their rows,
        LoRA merged into it. It only guesses, so quantising it to `draft_bits` changes no answer."""
        layer = head_layer(self.lm_head)
        self._require_row_per_token(layer, "a draft vocabulary")
        rows = select_rows(layer, tokens)
        if self.draft_bits is not None:
            rows = quantise(rows, self.draft_bits)
        mx.eval(rows.parameters())
        return self._head_with_layer(rows)

    def head_weights(
        self,
        tokens: mx.array,  # [...]
    ) -> mx.array:  # [..., D]
        """The LM head's rows, dequantised, LoRA merged into them."""
        layer = head_layer(self.lm_head)
        self._require_row_per_token(layer, "a condition")
        return row_weights(layer, tokens)

    @cached_property
    def logit_scale(self) -> float:
        """The factor that the model multiplies its head's logits by, measured with hidden states so
        small that no logit is capped. Waits for the device."""
        if not self._changes_logits:
            return 1.0
        hidden = 1e-3 * mx.ones((1, self.hidden_size), self.dtype)
        layer: Any = head_layer(self.lm_head)
        plain = (layer.as_linear if self.parts.head is None else layer)(hidden)
        scaled = self.lm_head(hidden)
        largest = mx.argmax(mx.abs(plain))
        return to_float(scaled.flatten()[largest]) / to_float(plain.flatten()[largest])

    def broadcast_from_rank0(self, *arrays: mx.array) -> list[mx.array]:
        """Give every rank the values of rank 0, if the model is split over ranks."""
        return from_rank0(arrays, self.group)

    def make_model_cache(self) -> list[Any]:
        """mlx-lm's own caches by layer, for the model's own call; `family.make_caches` makes those
        that know the model's attention windows."""
        return list(make_prompt_cache(self.parts.outer))

    @property
    def capabilities(self) -> Capabilities:
        """The model's abilities; a few calls try whether it can batch when that is first asked."""
        reason = self._no_stages
        return Capabilities(
            stages=reason,
            taps=reason,
            last_hidden=self._no_last_hidden,
            trees=reason,
            chains=self._no_chains,
            try_batches=lambda: self._no_batches,
        )

    @cached_property
    def takes_tree_masks(self) -> bool:
        """Whether every layer's attention takes a `metal.TreeMask`. Its first reading replaces the
        attention function of the layers' modules."""
        return try_tree_masks(self)

    @cached_property
    def _no_batches(self) -> Reason:
        """The reason why texts of different lengths cannot share a call."""
        return try_batches(self) if self._no_stages is None else self._no_stages

    def _embed_one_token(self) -> mx.array:  # [1, 1, D]
        return super()._embed_one_token() if self._no_stages is None else self._hidden_like

    def _switch_to_own_call(
        self,
        why_no_stages: str,  # what keeps the model's layers from running one by one
    ) -> None:
        """Run the model by its own call only, once that was tried on a few tokens."""
        self.parts = find_available_parts(self.model, 0)
        keep_positions_in_table(self.model)
        outer = self.parts.outer
        if self.final_norm is not None:
            note_inputs(self.final_norm, _norm_inputs.add)
        try:
            with _norm_inputs.taken() as norm_inputs:
                logits = outer(mx.array([CHECK_TOKENS]), cache=self.make_model_cache())
            size = getattr(self.args, "hidden_size", 0)
            if norm_inputs:
                size = norm_inputs[0].shape[-1]
            self._hidden_like = mx.zeros((1, 1, size), logits.dtype)
            mx.eval(logits, self._hidden_like, module_arrays(self.model))
        except Exception as error:  # a class of mlx-lm's raises many kinds
            raise InputError(
                f"the model type {model_type(self.model)!r} does not run ({first_line(error)})",
                expected="settings and weights that its class in mlx-lm runs on",
                do="check its config.json against the original, reinstall MLX if it could not "
                "compile a kernel, or use another model",
            ) from error
        self.parts = find_available_parts(self.model, int(logits.shape[-1]))
        self._no_stages = why_no_stages
        self._no_last_hidden = try_last_hidden(self, norm_inputs, logits)
        hook_recurrences(self.model)
        self._no_chains = try_chains(self.model, self.make_model_cache, logits.dtype)

    def _require_row_per_token(
        self,
        layer: Any,
        user: str,  # takes rows of the layer, for the message, such as "a condition"
    ) -> None:
        if not isinstance(layer, HEAD_KINDS):
            kind = type(layer).__name__
            raise InputError(
                f"the LM head of the model type {model_type(self.model)!r} is a {kind}",
                expected=f"a linear layer or an embedding, from which {user} takes rows",
                do="use another model",
            )
