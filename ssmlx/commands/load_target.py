"""Loads what a command's options name: the model, its adapter, and what it drafts with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..drafters.option import DrafterOption
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
    """(model, tokenizer, what was loaded to draft with). Sets `args.adapter` to the name of the
    adapter that was loaded."""
    from ..model.ranks import launched_group

    drafter: DrafterOption = args.drafter
    require_drafter_key(drafter)
    group = launched_group()
    if group is not None and getattr(args, "prompt_cache", None) is not None:
        refuse_option("--prompt-cache", "a model that is not split over processes")
    model, tokenizer = load_target(args, loading=drafter.loading, group=group)
    if model.num_streams == 0:
        streams = "a model with streams, that is an --adapter with some"
        reject_given_options(args, ("num_streams", *PRUNE_OPTIONS), streams)
        if drafter.name is None or drafter.name == "streams":
            others = [one for one in drafters_shaped_by("tree") if one != "streams"]
            reject_given_options(
                args, TREE_OPTIONS, f"{streams}, or --drafter {' or '.join(others)}"
            )
    return model, tokenizer, load_drafter(args, model, tokenizer)


def require_drafter_key(option: DrafterOption) -> None:
    from ..drafters.registry import require_name_to_load

    if option.name is not None:
        require_name_to_load(option.name, option.values)


def load_drafter(
    args: argparse.Namespace, model: StreamFusedModel, tokenizer: TokenizerWrapper
) -> list[Loaded]:
    """What --drafter drafts with, loaded; empty if it names no drafter, or one that needs
    nothing."""
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


def load_target(
    args: argparse.Namespace,
    *,
    loading: DrafterLoading | None = None,  # what --drafter says of it; its defaults
    group: Any = None,
) -> tuple[StreamFusedModel, TokenizerWrapper]:
    """Load the model and its adapter. Sets `args.adapter` to the model's `adapter_name`, and the
    attention for the whole process."""
    from ..loading.load import load
    from ..model import metal

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
    args.adapter = model.adapter_name
    return model, tokenizer
