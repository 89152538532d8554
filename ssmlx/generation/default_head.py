"""The head that drafts where nothing is asked for: the model's own, or one in the Hub's cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..drafters.registry import Loaded, registered_drafter
from ..errors import InputError
from ..loading.model_heads import LocalHead, find_local_head
from ..model.streams import StreamFusedModel

_log = logging.getLogger("ssmlx")
HEAD_DRAFTER = "mtp"
"""The registered name of what drafts with it."""


@dataclass(frozen=True)
class DefaultHead:
    """What was found for a model.

    Attributes:
        found: the head on this machine; None where there is none.
        loaded: what it drafts with; None where none was found, or it cannot draft.
        reason: why a head that was found cannot draft; None otherwise.
    """

    found: LocalHead | None = None
    loaded: Loaded | None = None
    reason: str | None = None


def default_head(model: StreamFusedModel) -> DefaultHead:
    """Find and load the head that drafts for a model where nothing is asked for.

    It is looked for once, and kept beside the model's weights: all adapters on one base share it.
    Models with streams, that cannot verify chains, or that are split over machines have none.

    Args:
        model: as `ssmlx.load` returns it.

    Returns:
        What was found; a head that cannot be loaded is logged, and is not tried again.
    """
    backbone = model.backbone
    if model.num_streams or backbone.group is not None or not backbone.capabilities.has("chains"):
        return DefaultHead()
    kept = backbone.kept_with_weights
    if HEAD_DRAFTER not in kept:
        kept[HEAD_DRAFTER] = _find_head(model)
    found: DefaultHead = kept[HEAD_DRAFTER]
    return found


def loaded_default_head_or_raise(model: StreamFusedModel) -> Loaded | None:
    """The head of `default_head`, for settings that name its drafter.

    One that was found and could not be loaded is tried again, to raise why.

    Returns:
        What it drafts with; None where none is on this machine.

    Raises:
        InputError: there is one that cannot draft.
        OSError: its files cannot be read.
    """
    head = default_head(model)
    if head.found is not None and head.loaded is None:
        return _load_head(head.found, model)  # which says why
    return head.loaded


def _find_head(model: StreamFusedModel) -> DefaultHead:
    """Look for the head of a model, and load it; see `default_head`."""
    found = find_local_head(model.backbone)
    if found is None:
        return DefaultHead()
    try:
        loaded = _load_head(found, model)
    except (InputError, OSError) as error:
        _log.info("%s drafts nothing: %s", found.name, error)
        return DefaultHead(found, None, str(error))
    _log.debug("%s drafts (%s)", found.name, found.folder or model.backbone.origin.folder)
    return DefaultHead(found, loaded)


def _load_head(found: LocalHead, model: StreamFusedModel) -> Loaded:
    """Load a head that was found, from this machine alone; raise what its loader raises."""
    loader = registered_drafter(HEAD_DRAFTER).loader
    assert loader is not None
    return loader.load(str(found.folder or ""), model, None, offline=True)
