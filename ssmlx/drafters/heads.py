"""The MLX folder of drafting heads of any kind, as the converter writes it.

heads_config.json    kind, settings, and what identifies the base model
heads.safetensors    the tensors under their published names (without a common prefix);
                     shared ones occur once; `draft_vocab` if the settings name one

"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import require
from ..json_files import build_settings, read_json
from ..loading.adapter import cast_stream_tensors, check_draft_vocab
from ..loading.identity import BaseIdentity
from ..loading.tensors import check_tensors, read_tensors, write_tensors
from ..model.backbone import Backbone
from ..model.streams import StreamFusedModel
from .base import DrafterLoader
from .head_drafter import DraftingHeads, HeadConfig, HeadDrafter, HeadKind
from .medusa import MedusaConfig, MedusaHeads
from .mlp_speculator import MlpSpeculator, MlpSpeculatorConfig

FORMAT = "ssmlx-heads/1"
CONFIG_FILE = "heads_config.json"
WEIGHTS_FILE = "heads.safetensors"
_KINDS: dict[HeadKind, tuple[type[HeadConfig], type[DraftingHeads]]] = {
    "medusa": (MedusaConfig, MedusaHeads),
    "mlp_speculator": (MlpSpeculatorConfig, MlpSpeculator),
}


@dataclass(frozen=True, eq=False)
class Heads:
    """The content of a heads folder."""

    config: HeadConfig  # its class is their kind
    tensors: Mapping[str, mx.array]  # of `config.tensor_shapes()`
    base: BaseIdentity  # the model that they belong to
    base_model: str = ""  # what a message calls that model


def save_heads(existing_folder: Path, heads: Heads) -> None:
    """Write heads over older files; whether tensors and settings fit is not checked."""
    values = {
        "format": FORMAT,
        "kind": heads.config.kind,
        **asdict(heads.config),
        "base_model": heads.base_model,
        "base": heads.base.__dict__,
    }
    text = json.dumps(values, indent=1) + "\n"
    (existing_folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    write_tensors(existing_folder / WEIGHTS_FILE, heads.tensors)


def read_heads(folder: Path) -> Heads:
    """The tensors stay as they are stored, on no model yet."""
    require(
        folder.is_dir(),
        f"{folder} is not a folder of drafting heads",
        expected="a folder that `python -m ssmlx.convert --heads` wrote",
        do="check the path, or convert published heads",
    )
    values = read_json(folder / CONFIG_FILE, "the settings of drafting heads")
    kind: Any = values.get("kind")
    require(
        values.get("format") == FORMAT and kind in _KINDS,
        f"{folder} has the format {values.get('format')!r} and kind {kind!r}",
        expected=f"{FORMAT}, {' or '.join(_KINDS)}",
        do="convert the published heads with `python -m ssmlx.convert --heads` first",
    )
    config = build_settings(_KINDS[kind][0], values, folder / CONFIG_FILE)
    base = BaseIdentity.from_settings(folder / CONFIG_FILE, values)
    path = folder / WEIGHTS_FILE
    tensors = read_tensors(path, "drafting heads")
    check_head_tensors(config, tensors, path)
    return Heads(config, tensors, base, str(values.get("base_model", "")))


def load_heads(folder: str | Path, model: StreamFusedModel | Backbone) -> DraftingHeads:
    """The heads of a folder, ready to draft for `model`, in its dtype.

    InputError if the folder is broken, or its heads are another model's.

    Args:
        folder: as `python -m ssmlx.convert --heads` wrote it.
        model: as `ssmlx.load` returns it, or its backbone. Heads do not depend on its
            adapter; those that were trained with one draft best with it.
    """
    backbone = model if isinstance(model, Backbone) else model.backbone
    return attach_heads(read_heads(Path(folder)), backbone)


def attach_heads(heads: Heads, backbone: Backbone) -> DraftingHeads:
    """Attach heads to a backbone, with computed copies of their tensors; it is not changed."""
    heads.base.require_same(
        BaseIdentity.of(backbone),
        "the heads belong",
        expected=heads.base_model or "the model they were converted for",
        do="choose that model with --model, or other heads",
    )
    tensors = cast_stream_tensors(heads.tensors, backbone.dtype)
    mx.eval(tensors)
    return _KINDS[heads.config.kind][1](heads.config, tensors, backbone)


def check_head_tensors(config: HeadConfig, tensors: Mapping[str, mx.array], source: Path) -> None:
    check_tensors(tensors, config.tensor_shapes(), source)
    if size := config.draft_vocab_size:
        check_draft_vocab(tensors["draft_vocab"], size, config.vocab_size, source)


def _load(folder: str, model: StreamFusedModel, tokenizer: object, **how: object) -> DraftingHeads:
    return load_heads(folder, model)


_LOADER = DrafterLoader("heads", _load)


class MedusaDrafter(HeadDrafter):
    name = "medusa"
    shaped_by = ("tree", "prune")
    loader = _LOADER


class SpeculatorDrafter(HeadDrafter):
    name = "mlp-speculator"
    loader = _LOADER
