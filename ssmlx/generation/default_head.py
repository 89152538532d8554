"""The head that drafts by default: the model's own, or one in the Hub's cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..drafters.base import Loaded
from ..drafters.registry import drafter_class
from ..errors import InputError
from ..loading.model_heads import LocalHead, find_local_head
from ..model.streams import StreamFusedModel

_log = logging.getLogger("ssmlx")
HEAD_DRAFTER = "mtp"
"""The registered name of the drafter that uses it."""


@dataclass(frozen=True)
class DefaultHead:
    """The default head that was found for a model, or none."""

    found: LocalHead | None = None  # the head on this machine
    loaded: Loaded | None = None  # what it drafts with; None if it cannot draft
    reason: str | None = None  # why a head that was found cannot draft


def default_head(model: StreamFusedModel) -> DefaultHead:
    """Find and load the head that drafts for a model by default."""
    # Models with streams, that verify no chains, or that are split over machines have none.
    backbone = model.backbone
    if model.num_streams or backbone.group is not None or not backbone.capabilities.has("chains"):
        return DefaultHead()
    # Looked for once, even if it cannot be loaded; all adapters on one base share it.
    kept = backbone.kept_with_weights
    if HEAD_DRAFTER not in kept:
        kept[HEAD_DRAFTER] = _find_head(model)
    found: DefaultHead = kept[HEAD_DRAFTER]
    return found


def require_default_head(model: StreamFusedModel) -> Loaded | None:
    """The default head, for settings that name its drafter; raises why it cannot draft."""
    head = default_head(model)
    if head.found is not None and head.loaded is None:
        return _load_head(head.found, model)  # which says why
    return head.loaded


def _find_head(model: StreamFusedModel) -> DefaultHead:
    found = find_local_head(model.backbone)
    if found is None:
        return DefaultHead()
    try:
        loaded = _load_head(found, model)
    except (InputError, OSError) as error:
        _log.info("%s is not used for drafting: %s", found.name, error)
        return DefaultHead(found, None, str(error))
    _log.debug(
        "%s is used for drafting (%s)", found.name, found.folder or model.backbone.origin.folder
    )
    return DefaultHead(found, loaded)


def _load_head(found: LocalHead, model: StreamFusedModel) -> Loaded:
    loader = drafter_class(HEAD_DRAFTER).loader
    assert loader is not None
    return loader.load(str(found.folder or ""), model, None, offline=True)
