"""Which heads were trained to draft for a loaded model, and which of them are on this machine.

Nothing is downloaded here, and no weights are read.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..model.backbone import Backbone
from .folders import Fetch
from .hub import find_cached_model
from .known_heads import KNOWN_HEADS, OWN_HEAD_FAMILIES, KnownHead
from .stored_tensors import is_mtp_name, tensor_names

OWN_HEAD = "its own MTP head"
_GENERATION = re.compile(r"(qwen)[-_ ]?(\d+\.\d+)")
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True)
class LocalHead:
    """A head on this machine, complete by the names of its files; it was not loaded yet."""

    name: str  # for users: its name on the Hub, or `OWN_HEAD`
    folder: Path | None  # None for tensors among the model's own files


def find_known_heads(backbone: Backbone) -> tuple[KnownHead, ...]:
    """The rows of `KNOWN_HEADS` for a model: several if its generation cannot be known."""
    # Models of several generations have the same sizes: then the model's name decides.
    family = _family(backbone)
    sizes = (backbone.hidden_size, len(backbone.layers), backbone.vocab_size)
    rows = tuple(
        row
        for row in KNOWN_HEADS
        if family in row.families and (row.hidden_size, row.num_layers, row.vocab_size) == sizes
    )
    said = {
        "".join(found)
        for name in _names_of_model(backbone)
        for found in _GENERATION.findall(name.lower())
    }
    return tuple(row for row in rows if not (row.generation and said) or row.generation in said)


def can_have_head(backbone: Backbone) -> bool:
    """Whether heads are known for models of this class, of whatever size."""
    families = {family for row in KNOWN_HEADS for family in row.families}
    return _family(backbone) in families.union(OWN_HEAD_FAMILIES)


def _family(backbone: Backbone) -> str:
    """The file of mlx-lm that has the model's class, such as "qwen3_5"."""
    modules = [kind.__module__.rpartition(".") for kind in type(backbone.model).__mro__]
    return next((file for package, _, file in modules if package == "mlx_lm.models"), "")


def _names_of_model(backbone: Backbone) -> list[str]:
    """The names of a model: the one it was loaded by, its folder's, and in a Hub cache the
    repository's."""
    names = [Path(backbone.origin.name).name]
    if backbone.origin.folder is not None:
        folder = backbone.origin.folder.resolve()
        names.append(folder.name)
        if folder.parent.name == "snapshots":
            names.append(folder.parent.parent.name)
    return names


def find_local_head(backbone: Backbone) -> LocalHead | None:
    """The head that drafts by default; None if there is none here, or if the model is not known."""
    if _family(backbone) in OWN_HEAD_FAMILIES and has_own_mtp_head(backbone.origin.folder):
        return LocalHead(OWN_HEAD, None)
    rows = find_known_heads(backbone)
    if len(rows) != 1:  # at most one of several is right
        return None
    fetch = Fetch(cache_dir=backbone.origin.cache_dir, offline=True)
    for name in rows[0].repositories:
        folder = find_cached_model(name, fetch)
        if folder is not None:
            return LocalHead(name, folder)
    return None


def has_own_mtp_head(model_folder: Path | None) -> bool:
    """Whether a model's own files have the tensors of an MTP head, by their names."""
    if model_folder is None:
        return False
    try:
        return any(is_mtp_name(name) for name in tensor_names(model_folder))
    except (InputError, OSError) as error:  # the model's own loader says what is wrong
        _log.debug("no MTP head is looked for in %s: %s", model_folder, error)
        return False
