"""Loads what a command's options name: the model, its adapter, and what it drafts with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..drafters.option import DrafterOption
from ..loading.names import AUTO_ADAPTER, NO_ADAPTER
from ..settings import DrafterLoading
from .callback_bars import DownloadBar
from .decoding_options import PRUNE_OPTIONS, TREE_OPTIONS, drafters_shaped_by
from .parser import refuse_option, reject_given_options

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..drafters.base import Loaded
    from ..model.streams import StreamFusedModel


def load_for_decoding(
    args: argparse.Namespace,
) -> tuple[StreamFusedModel, TokenizerWrapper, list[Loaded]]:
    """Load what the options name for decoding.

    Where --drafter names another drafter than streams, no adapter is looked for. `args.adapter`
    becomes the name of what was loaded; see `load_target_and_note_adapter`.

    Args:
        args: options of `add_model_adapter_dtype_options` and `add_decoding_and_drafting_options`.

    Returns:
        (model, tokenizer, list of the draft model or heads, or empty), as `ssmlx.stream_generate`
        takes them.

    Raises:
        InputError: something cannot be loaded, or a tree option has no effect on this model; before
            anything is loaded, --drafter names a drafter without the key that it needs, or
            --prompt-cache is given with a model that is split over processes.
    """
    from ..model.ranks import launched_group

    drafter: DrafterOption = args.drafter
    require_drafter_key(drafter)
    group = launched_group()
    if group is not None and getattr(args, "prompt_cache", None) is not None:
        refuse_option("--prompt-cache", "a model that is not split over processes")
    model, tokenizer = load_target_and_note_adapter(
        args,
        finds_adapter=drafter.name in (None, "streams"),
        loading=drafter.loading,
        group=group,
    )
    if model.num_streams == 0:
        streams = "a model with streams, that is an --adapter with some"
        reject_given_options(args, ("num_streams", *PRUNE_OPTIONS), streams)
        if drafter.name is None or drafter.name == "streams":
            others = [one for one in drafters_shaped_by("tree") if one != "streams"]
            reject_given_options(
                args, TREE_OPTIONS, f"{streams}, or --drafter {' or '.join(others)}"
            )
    return model, tokenizer, load_what_drafter_needs(args, model, tokenizer)


def require_drafter_key(option: DrafterOption) -> None:
    """Raise InputError where a drafter is named without the key that it needs, such as `model=`."""
    from ..drafters.registry import require_name_to_load

    if option.name is not None:
        require_name_to_load(option.name, option.values)


def load_what_drafter_needs(
    args: argparse.Namespace, model: StreamFusedModel, tokenizer: TokenizerWrapper
) -> list[Loaded]:
    """Load what the drafter of --drafter drafts with, such as a draft model or heads.

    Args:
        args: its `drafter` and `dtype` are read.
        model: the target, as `ssmlx.load` returns it.
        tokenizer: likewise.

    Returns:
        A list of what was loaded; empty if --drafter names no drafter, or one that needs nothing.

    Raises:
        InputError: it cannot be loaded, or does not fit the model.
    """
    from ..drafters.registry import drafter_class, name_to_load

    drafter: DrafterOption = args.drafter
    if drafter.name is None:
        return []
    loader = drafter_class(drafter.name).loader
    name = name_to_load(drafter.name, drafter.values)
    if loader is None or name is None:
        return []
    how = {"dtype": args.dtype, "progress": DownloadBar()}
    return [loader.load(name, model, tokenizer, **how)]


def load_target_and_note_adapter(
    args: argparse.Namespace,
    *,
    finds_adapter: bool = True,
    loading: DrafterLoading | None = None,
    group: Any = None,
) -> tuple[StreamFusedModel, TokenizerWrapper]:
    """Load the model and tokenizer that the options of `add_model_adapter_dtype_options` name.

    The attention of the whole process is set.

    Args:
        args: parsed options. `adapter` is set to the name of the adapter that was loaded: "none"
            for the base alone, None for streams that are part of the model.
        finds_adapter: whether to look for a fitting adapter where none is named.
        loading: what --drafter says of it; None for the defaults.
        group: MLX's distributed group, for a model that is split over processes; None for one
            process.

    Returns:
        The model and its tokenizer.

    Raises:
        InputError: the model or the adapter cannot be loaded.
    """
    from ..loading.attach import choose_adapter, swap_adapter
    from ..loading.load import load
    from ..model import metal

    if args.adapter == AUTO_ADAPTER:
        args.adapter = None
    how = loading or DrafterLoading()
    metal.choose_attention(how.attention)
    model, tokenizer = load(
        args.model,
        adapter=args.adapter,
        dtype=args.dtype,
        draft_head=how.draft_head,
        progress=DownloadBar(),
        group=group,
    )
    if args.adapter is None and model.config is None:
        asked = AUTO_ADAPTER if finds_adapter else NO_ADAPTER
        args.adapter, folder = choose_adapter(asked, model)
        if folder is not None:
            model = swap_adapter(model, folder)
    return model, tokenizer
