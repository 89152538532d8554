"""The base model as the rest of the package has it: its stages, or its own call alone.

What the package must know of a model is small (`family`). When the model is wrapped, it is checked
(`capability_checks`) that the stages put together (`stages`) are the model. Where they are not, or
a class is built otherwise than `family` takes it to be, the model decodes plainly, by its own call.
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
    hook_and_try_tree_masks,
    try_batches,
    try_chains,
    try_last_hidden,
)
from .family import find_available_parts, model_type, no_stages_error
from .final_norm import hook_final_norm, noting_norm_inputs
from .lm_head import HEAD_KINDS, LMHead, head_layer, quantise_if_possible, row_weights, select_rows
from .modules import clone_sharing_arrays, module_arrays
from .ranks import Group, from_rank0
from .recurrent import hook_recurrences
from .rope import context_length, keep_positions_in_table
from .shapes import to_float
from .stages import CallOutput, Stages, make_ropes_take_positions
from .state_cache import StateCache
from .text_cache import TextCache

_log = logging.getLogger("ssmlx")

Reload = Callable[[Collection[str]], dict[str, nn.Module]]
"""Reads modules from the base model's files: their paths, to the modules by path."""


class FileStamp(NamedTuple):
    """What tells one state of a file from all others."""

    name: str
    inode: int
    size: int  # bytes
    written_ns: int  # when its content was last changed, which programs may set
    changed_ns: int  # when its state was, which they may not


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a base model came from, and what is fetched or read for it later.

    Attributes:
        name: what the model is called: a name or a folder, as it was given.
        folder: where its weights were read; None if they were read from no folder.
        config: the content of its config.json, see `rope.rope_settings`; empty if it was read from
            no folder.
        files: stamps of the files there, as they were read; None where they were changed meanwhile.
        dtype: of the weights, as `load` takes it, but for "auto".
        reload: reads modules once more as the model was loaded. Where it is None, weights that an
            adapter is merged into are kept beside the merged ones.
        cache_dir: the folder that was given to keep things in; None for the user's cache folder.
        offline: whether nothing may be fetched.
        sampling: how its generation_config.json asks for tokens to be sampled.
    """

    name: str = "this model"
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[FileStamp, ...] | None = None
    dtype: str = "stored"
    reload: Reload | None = None
    cache_dir: str | Path | None = None
    offline: bool = False
    sampling: ModelSampling = field(default_factory=ModelSampling)


class Backbone(Stages):
    """The base model: an mlx-lm model whose stages were checked, or that runs by its own call.

    Its arrays are computed when it is made, so that any thread may use it. `capabilities` says
    what it can do; the methods of stages may be called only where it has "stages".

    Args:
        model: as `mlx_lm.load` returns it. Its layers' rotary embeddings are wrapped in place; the
            model itself works as before.
        origin: where it came from; unknown unless given.
        draft_bits: bits to quantise the weights of `draft_head` to, where the head's own are not
            quantised; None leaves them as they are.
        group: the ranks that the model is split over, as `ranks.shard_over_ranks` does it.

    Raises:
        InputError: the model does not run by its own call either.

    Attributes:
        replaced: the base model's modules that an attached adapter's LoRA stands in for, by path;
            None for those that `origin.reload` gives.
        kept_with_weights: what others keep for as long as these weights are in memory, by name,
            such as a head that drafts; shared by all copies of the backbone.
    """

    _no_stages: Reason = None
    _no_chains: Reason = None
    _no_last_hidden: Reason = None
    # [1, 1, D] zeros of a model without stages: the shape and type of its hidden states. D is 0
    # where neither its final norm nor its settings say it.
    _hidden_like: mx.array

    def __init__(
        self,
        model: nn.Module,
        origin: Origin | None = None,
        draft_bits: int | None = None,
        group: Group | None = None,
    ) -> None:
        """Check by a few calls that the stages are the model; else make it one that runs by its own
        call.

        Computes the model's arrays. Rotary embeddings are wrapped, and left as they were where the
        stages fail. InputError where the model does not run by its own call either.
        """
        self.origin = origin or Origin()
        self.draft_bits = draft_bits
        self.group = group
        self.replaced: Mapping[str, nn.Module | None] = {}
        self.kept_with_weights: dict[str, Any] = {}
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
                error = no_stages_error(model, first_line(error))
            self._switch_to_own_call(error.found)

    def clone_sharing_weights(self) -> Backbone:
        """A backbone with copies of the model's modules, on the very same arrays.

        Modules of the copy may be exchanged, and those of this backbone stay as they are.
        """
        clone = copy.copy(self)
        clone.model = clone_sharing_arrays(self.model)
        clone.refresh_parts()
        return clone

    def refresh_parts(self) -> None:
        """Find the parts of `model` again, after some of its modules were exchanged.

        As `Stages.refresh_parts`; of a model without stages, what `find_available_parts`
        finds.

        Raises:
            InputError: a model with stages lacks a part now.
        """
        if self._no_stages is None:
            super().refresh_parts()
        else:
            self.parts = find_available_parts(self.model, self.vocab_size)

    def without_adapter(self) -> Backbone:
        """The base model, without the LoRA of the adapter that is attached.

        Modules that are not in memory any more are read from the model's files.

        Returns:
            A copy on the same arrays that has the replaced modules again, and `replaced` empty;
            this backbone itself where no module was replaced.

        Raises:
            InputError: weights that LoRA was merged into cannot be read again.
        """
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
        """Those of `replaced` that are kept in memory, by path; `origin.reload` reads the
        others.
        """
        return {path: module for path, module in self.replaced.items() if module is not None}

    @cached_property
    def context_length(self) -> int | None:
        """Most positions that the model was made for, see `rope.context_length`; None if nothing
        bounds them."""
        return context_length(self.model, self.args, self.origin.config)

    @property
    def final_norm_weight(self) -> mx.array:
        """[D] weight of the final norm; [0] where it was not found."""
        weight: mx.array = getattr(self.final_norm, "weight", mx.zeros(0))
        return weight

    def append(self, tokens: mx.array, cache: TextCache, taps: Sequence[int] = ()) -> CallOutput:
        """Run tokens through the model and commit them to the cache.

        Args:
            tokens: [R] that follow what the cache holds.
            cache: as `StreamFusedModel.make_cache` makes it for this model; paths that it has not
                counted yet are dropped.
            taps: numbers of the layers whose input is wanted. The number of all layers stands for
                the final norm, the only one that a model without stages gives.

        Returns:
            Logits and taps of the R tokens, and their last hidden states if the model has stages.

        Raises:
            InputError: taps between layers are asked of a model without stages, or the final
                norm's of one that gives none.
            ValueError: a tap is no layer's number, and not the final norm's.
        """
        if isinstance(cache, TreeCache):
            return super().append(tokens, cache, taps)
        assert isinstance(cache, StateCache)
        return self._run_own_call(cache.append, tokens, taps)

    def verify_chain(
        self, tokens: mx.array, cache: StateCache, taps: Sequence[int] = ()
    ) -> CallOutput:
        """Run drafted tokens through a model without stages, one behind the other.

        Args:
            tokens: [R], two or more: the newest token and what was drafted behind it.
            cache: of the tokens before them. `StateCache.commit_accepted` says how many of them
                stay.
            taps: as `append` takes them.

        Returns:
            As `append`.

        Raises:
            InputError: as `append`.
        """
        return self._run_own_call(cache.verify, tokens, taps)

    def _run_own_call(
        self,
        append_or_verify: Callable[[Any, mx.array], mx.array],
        tokens: mx.array,
        taps: Sequence[int],
    ) -> CallOutput:
        """Run tokens through a model without stages, and note what enters its final norm.

        Args:
            append_or_verify: that method of the cache, which runs the model.
            tokens: [R].
            taps: as `append` takes them.

        Returns:
            Logits and taps of the R tokens.
        """
        found: dict[int, mx.array] = {}
        if not taps:
            logits = append_or_verify(self.parts.outer, tokens)
        else:
            last = len(self.layers)
            if set(taps) == {last}:
                self.capabilities.require("last_hidden", "hidden states before the final norm")
            else:
                self.capabilities.require("taps", "hidden states between layers")
            with noting_norm_inputs() as norm_inputs:
                logits = append_or_verify(self.parts.outer, tokens)
            found = {last: norm_inputs[0]}
        return CallOutput(logits.squeeze(0), taps=found)

    def draft_head(self, tokens: mx.array) -> LMHead:
        """Make an LM head of some tokens alone, for drafting.

        It has its own copy of their rows, LoRA merged into it, computed here. It only guesses, so
        weights that are not quantised are quantised to `draft_bits`, unless that is None: no answer
        changes.

        Args:
            tokens: [Vd] ids.

        Returns:
            Normed hidden states [1, R, D] to logits [1, R, Vd], in the order of `tokens`.

        Raises:
            InputError: the model's LM head has no row for each token.
        """
        layer = head_layer(self.lm_head)
        self._require_row_per_token(layer, "a draft vocabulary")
        rows = select_rows(layer, tokens)
        if self.draft_bits is not None:
            rows = quantise_if_possible(rows, self.draft_bits)
        mx.eval(rows.parameters())
        return self._head_with_layer(rows)

    def head_weights(self, tokens: mx.array) -> mx.array:
        """The weights of the LM head's rows for some tokens, dequantised, LoRA merged into them.

        Args:
            tokens: [...] ids.

        Returns:
            [..., D].

        Raises:
            InputError: the model's LM head has no row for each token.
        """
        layer = head_layer(self.lm_head)
        self._require_row_per_token(layer, "a condition")
        return row_weights(layer, tokens)

    @cached_property
    def logit_scale(self) -> float:
        """The factor that the model multiplies its head's logits by.

        It is measured once, by a call with hidden states so small that no logit is capped; 1.0
        where the model changes no logits. Waits for the device.
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
        """mlx-lm's own caches, one for each layer and of the kind that it needs.

        They are for the model's own call; `family.make_caches` makes those that tell its windows.
        """
        return list(make_prompt_cache(self.parts.outer))

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do, each with the reason where it cannot.

        Stages, taps and trees it has all or none. Whether it can batch is tried by a few
        calls when it is first asked for.
        """
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
        """Whether every layer's attention takes a `metal.TreeMask`; tried when first asked for.

        The attention function of the layers' modules is replaced for it, see
        `hook_and_try_tree_masks`.
        """
        return hook_and_try_tree_masks(self)

    @cached_property
    def _no_batches(self) -> Reason:
        """Why texts of different lengths cannot share a call; None where they can."""
        return try_batches(self) if self._no_stages is None else self._no_stages

    def _embed_one_token(self) -> mx.array:
        """[1, 1, D] of the shape and type of hidden states, see `_hidden_like`."""
        return super()._embed_one_token() if self._no_stages is None else self._hidden_like

    def _switch_to_own_call(self, why_no_stages: str) -> None:
        """Make this a backbone without stages, which runs the model by its own call alone.

        The call is tried on a few tokens. Sets `parts`, the shape and dtype of hidden states, and
        the reasons that `capabilities` gives.

        Args:
            why_no_stages: what keeps the model's layers from running one by one.

        Raises:
            InputError: the model does not run by its own call either.
        """
        self.parts = find_available_parts(self.model, 0)
        keep_positions_in_table(self.model)
        outer = self.parts.outer
        if self.final_norm is not None:
            hook_final_norm(self.final_norm)
        try:
            with noting_norm_inputs() as norm_inputs:
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
                do="compare its config.json with the original's, mend MLX's installation where it "
                "could not compile a kernel, or use another model",
            ) from error
        self.parts = find_available_parts(self.model, int(logits.shape[-1]))
        self._no_stages = why_no_stages
        self._no_last_hidden = try_last_hidden(self, norm_inputs, logits)
        hook_recurrences(self.model)
        self._no_chains = try_chains(self.model, self.make_model_cache, logits.dtype)

    def _require_row_per_token(self, layer: Any, user: str) -> None:
        """Check that an LM head's layer is of `HEAD_KINDS`, which have a row for each token.

        Args:
            layer: the head's, as `head_layer` gives it.
            user: who takes rows of it, for the message, such as "a condition".

        Raises:
            InputError: a layer of another class, which the message names.
        """
        if not isinstance(layer, HEAD_KINDS):
            kind = type(layer).__name__
            raise InputError(
                f"the LM head of the model type {model_type(self.model)!r} is a {kind}",
                expected=f"a linear layer or an embedding, of which {user} takes rows",
                do="use another model",
            )
