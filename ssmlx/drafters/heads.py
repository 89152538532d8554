"""The MLX folder of drafting heads, whichever their kind: what the converter writes.

heads_config.json    kind, settings, and what identifies the base model
heads.safetensors    the tensors under their published names (without a common prefix);
                     shared ones stand once; `draft_vocab` where the settings name one
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
from ..settings import SpeculatorTreeConfig, TreeConfig
from .head_drafter import DraftingHeads, HeadConfig, HeadDrafter, HeadKind
from .medusa import MedusaConfig, MedusaHeads
from .mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from .registry import DrafterInputs, DrafterLoader, register_drafter

FORMAT = "ssmlx-heads/1"
CONFIG_FILE = "heads_config.json"
WEIGHTS_FILE = "heads.safetensors"
_KINDS: dict[HeadKind, tuple[type[HeadConfig], type[DraftingHeads]]] = {
    "medusa": (MedusaConfig, MedusaHeads),
    "mlp_speculator": (MlpSpeculatorConfig, MlpSpeculator),
}


@dataclass(frozen=True, eq=False)
class Heads:
    """What a heads folder holds: the heads' settings and tensors, and which model they are for.

    Attributes:
        config: their settings, whose class is their kind.
        tensors: those of `config.shapes_of_all_tensors()`.
        base: identifies the model that they belong to.
        base_model: what a message calls that model.
    """

    config: HeadConfig
    tensors: Mapping[str, mx.array]
    base: BaseIdentity
    base_model: str = ""


def overwrite_head_files(existing_folder: Path, heads: Heads) -> None:
    """Write `CONFIG_FILE` and `WEIGHTS_FILE` into a folder, in place over older ones.

    Args:
        existing_folder: which is not made here.
        heads: they are written as they are; whether they fit their settings is not checked.

    Raises:
        InputError: a weight is not finite, by which time the settings are written; or the weights
            file cannot be written.
        OSError: the settings cannot be written.
    """
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
    """Read and check a heads folder; the tensors stay as they are stored, on no model yet.

    Raises:
        InputError: the folder or a file is missing, of another format, or broken; or a tensor is
            missing, superfluous or of another shape than the settings say.
    """
    require(
        folder.is_dir(),
        f"no heads folder {folder}",
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
    require_head_tensors_fit(config, tensors, path)
    return Heads(config, tensors, base, str(values.get("base_model", "")))


def load_heads(folder: str | Path, model: StreamFusedModel | Backbone) -> DraftingHeads:
    """The heads of a folder, ready to draft for `model`, in its dtype.

    Args:
        folder: as `python -m ssmlx.convert --heads` wrote it.
        model: as `ssmlx.load` returns it, or its backbone. Of an adapter on it, the heads know
            nothing: those that were trained with one draft best with it.

    Raises:
        InputError: the folder is broken, or its heads are another model's.
    """
    backbone = model if isinstance(model, Backbone) else model.backbone
    return attach_heads(read_heads(Path(folder)), backbone)


def attach_heads(heads: Heads, backbone: Backbone) -> DraftingHeads:
    """Make heads ready to draft for `backbone`, with copies of their tensors in its dtype,
    computed.

    The backbone is not changed.

    Raises:
        InputError: the heads belong to another model.
    """
    heads.base.require_same(
        BaseIdentity.of(backbone),
        "the heads belong",
        expected=heads.base_model or "the model they were converted for",
        do="choose that model with --model, or other heads",
    )
    tensors = cast_stream_tensors(heads.tensors, backbone.dtype)
    mx.eval(tensors)
    return _KINDS[heads.config.kind][1](heads.config, tensors, backbone)


def require_head_tensors_fit(
    config: HeadConfig, tensors: Mapping[str, mx.array], source: Path
) -> None:
    """Raise InputError unless `tensors` of the file `source` have the names and shapes of the
    settings, and the draft vocabulary's ids are in the vocabulary."""
    check_tensors(tensors, config.shapes_of_all_tensors(), source)
    if size := config.draft_vocab_size:
        check_draft_vocab(tensors["draft_vocab"], size, config.vocab_size, source)


def _load(folder: str, model: StreamFusedModel, tokenizer: object, **how: object) -> DraftingHeads:
    """`load_heads` as `DrafterLoader.load` is called; the tokenizer and `how` are not needed."""
    return load_heads(folder, model)


_LOADER = DrafterLoader("heads", "heads=FOLDER", _load)


@register_drafter("medusa", shaped_by=("tree", "prune"), loader=_LOADER, keeps_to_chains=True)
def build_medusa(inputs: DrafterInputs) -> HeadDrafter:
    """The drafter of an answer, on the Medusa heads that were loaded."""
    assert inputs.config.tree
    return _build_head_drafter(inputs, inputs.config.tree)


@register_drafter(
    "mlp-speculator",
    settings=SpeculatorTreeConfig,
    config_field="speculator_tree",
    loader=_LOADER,
    keeps_to_chains=True,
)
def build_speculator(inputs: DrafterInputs) -> HeadDrafter:
    """The drafter of an answer, on the MLP speculator that was loaded."""
    return _build_head_drafter(inputs, inputs.settings)


def _build_head_drafter(
    inputs: DrafterInputs, tree: TreeConfig | SpeculatorTreeConfig
) -> HeadDrafter:
    """The drafter of an answer, on the heads that were loaded, whose trees have the settings
    `tree`; chains where the target takes no trees."""
    return HeadDrafter(
        inputs.model.backbone,
        inputs.loaded,
        tree,
        inputs.guess_sampling,
        is_chain=inputs.is_chain,
    )
