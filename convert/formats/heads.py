"""Published drafting heads, Medusa's and MLP speculators': read, written, and converted to MLX.

A folder of either kind may hold `draft_vocab.safetensors` beside its weights: `draft_vocab`,
int32, strictly ascending, the tokens that the heads were trained to guess among. Other programs
pass it over; here, heads are given only the rows of these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from ssmlx.drafters.heads import (
    HeadConfig,
    HeadKind,
    Heads,
    cast_heads,
    check_base_sizes,
    check_heads,
)
from ssmlx.drafters.medusa_heads import MedusaConfig
from ssmlx.drafters.speculator_heads import MODEL_TYPE, MlpSpeculatorConfig
from ssmlx.drafters.speculator_heads import PREFIX as SPECULATOR_PREFIX
from ssmlx.errors import InputError
from ssmlx.loading.adapter import BaseIdentity, check_draft_vocab
from ssmlx.loading.files import read_tensors
from ssmlx.model.architectures import MEDUSA_PREFIX
from ssmlx.model.backbone import Backbone
from ssmlx.settings import read_json

from .checkpoint import read_pickle

if TYPE_CHECKING:
    import torch

    from .medusa import MedusaReference
    from .mlp_speculator import MlpSpeculatorReference

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
_WEIGHTS = "model.safetensors"
_MEDUSA_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_REQUIRED = ("emb_dim", "n_predict", "vocab_size")
_OPTIONAL = ("inner_dim", "tie_weights", "scale_input", "top_k_tokens_per_head", "n_candidates")
_PARTS = ("emb.weight", "proj.weight", "ln.weight", "ln.bias", "head.weight")


def detect_kind(folder: Path) -> HeadKind:
    """What kind of published heads a folder holds.

    Raises:
        InputError: none that is known.
    """
    if any((folder / name).is_file() for name in MEDUSA_FILES):
        return "medusa"
    config = folder / "config.json"
    if config.is_file() and read_json(config, "settings").get("model_type") == MODEL_TYPE:
        return "mlp_speculator"
    if carries_medusa(folder):
        return "medusa"
    raise InputError(
        f"{folder} holds no drafting heads",
        expected="medusa_lm_head.safetensors (or .pt), model weights with medusa_head.*, or a "
        "config.json of the model_type mlp_speculator",
        do="check the path",
    )


def carries_medusa(folder: Path) -> bool:
    """Whether a model's own weights hold Medusa heads, as Medusa-2 models' do."""
    return any(name.startswith(MEDUSA_PREFIX) for name in _lazy_tensors(folder))


def read_published(
    folder: Path, vocab_size: int | None = None
) -> tuple[HeadConfig, dict[str, mx.array]]:
    """Published heads of either kind, every tensor accounted for, rows of the draft vocabulary.

    Args:
        folder: holds them.
        vocab_size: V of the base model; by default as the heads' own matrices have it.

    Raises:
        InputError: something is missing, spare, misshapen or not finite.
    """
    kind = detect_kind(folder)
    config, tensors, source = (
        _read_medusa(folder, vocab_size) if kind == "medusa" else _read_speculator(folder)
    )
    check_heads(config, tensors, source)
    vocab = read_draft_vocab(folder)
    if vocab is None:
        return config, tensors
    whole, config = config, replace(config, draft_vocab_size=vocab.size)
    path = folder / DRAFT_VOCAB_FILE
    check_draft_vocab(vocab, cast("Any", config), config.vocab_size, path)
    taken = {name: tensors[name][vocab] for name in whole.matrix_names}
    return config, {**tensors, **taken, "draft_vocab": vocab}


def convert_heads(folder: Path, backbone: Backbone, base_model: str, dtype: str) -> Heads:
    """Published heads as MLX heads of a base model.

    Args:
        folder: holds them.
        backbone: the model that they draft for.
        base_model: what to call it.
        dtype: of the tensors; "stored" and "auto" leave them as they are.

    Raises:
        InputError: they are broken, or do not fit the model.
    """
    config, tensors = read_published(folder, backbone.vocab_size)
    check_base_sizes(config, backbone, folder)
    if dtype not in ("stored", "auto"):
        tensors = cast_heads(tensors, getattr(mx, dtype))
    return Heads(config, tensors, BaseIdentity.of(backbone), base_model)


def load_published(
    folder: Path, vocab_size: int | None = None
) -> MedusaReference | MlpSpeculatorReference:
    """Published heads in PyTorch, in float32; arguments as for `read_published`."""
    import torch

    from .medusa import MedusaReference
    from .mlp_speculator import MlpSpeculatorReference

    config, tensors = read_published(folder, vocab_size)
    arrays = dict(tensors)
    vocab = arrays.pop("draft_vocab", None)
    draft_vocab = None if vocab is None else torch.from_numpy(np.array(vocab))
    model: Any
    if isinstance(config, MedusaConfig):
        model, prefix = MedusaReference(config, draft_vocab), "heads."
    else:
        model, prefix = MlpSpeculatorReference(config, draft_vocab), ""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            array = arrays[name.removeprefix(prefix)].astype(mx.float32)
            parameter.copy_(torch.from_numpy(np.array(array)))
    return model.eval()


def save_published(
    model: MedusaReference | MlpSpeculatorReference,
    folder: Path,
    base_model: str = "",
    lm_head: torch.Tensor | None = None,
) -> None:
    """Write what `load_published` and the programs that published the formats read.

    Args:
        model: the heads.
        folder: where to write.
        base_model: name of the base model.
        lm_head: [V, D] of the base model: the rows of Medusa matrices that a draft vocabulary
            leaves out.
    """
    from safetensors.torch import save_file

    from .medusa import MedusaReference, medusa_settings, medusa_tensors
    from .mlp_speculator import speculator_settings, speculator_tensors

    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, MedusaReference):
        name, tensors = MEDUSA_FILES[0], medusa_tensors(model, lm_head)
        settings = medusa_settings(model.config, base_model)
    else:
        name, tensors = _WEIGHTS, speculator_tensors(model)
        settings = speculator_settings(model.config, base_model)
    files = {name: tensors}
    if model.draft_vocab is not None:
        files[DRAFT_VOCAB_FILE] = {"draft_vocab": model.draft_vocab.cpu()}
    else:  # an earlier one would be taken for these heads'
        (folder / DRAFT_VOCAB_FILE).unlink(missing_ok=True)
    for file, content in files.items():
        work = folder / (file + ".new")
        save_file(content, work, metadata={"format": "pt"})
        work.replace(folder / file)
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def read_draft_vocab(folder: Path) -> mx.array | None:
    """[Vd] the draft vocabulary beside published heads; None for all tokens.

    Raises:
        InputError: the file holds something else.
    """
    path = folder / DRAFT_VOCAB_FILE
    if not path.exists():
        return None
    tensors = read_tensors(path, "a draft vocabulary")
    if set(tensors) != {"draft_vocab"} or tensors["draft_vocab"].ndim != 1:
        raise InputError(
            f"{path} holds {', '.join(tensors) or 'nothing'}",
            expected="draft_vocab alone, a list of token ids",
            do="use the files that belong together",
        )
    return tensors["draft_vocab"]


def medusa_config(tensors: Mapping[str, mx.array], source: Path, vocab_size: int) -> MedusaConfig:
    """What the tensors' names say of the heads; a head without a matrix shares the LM head.

    Args:
        tensors: under their published names.
        source: where they are from.
        vocab_size: V of the base model.

    Raises:
        InputError: none of them is a Medusa head's.
    """
    found = [match.groups() for match in map(_MEDUSA_NAME.fullmatch, tensors) if match]
    if not found:
        raise InputError(
            f"{source} holds no tensor named as a Medusa head's",
            expected="0.0.linear.weight, 0.0.linear.bias, 0.1.weight and so on",
            do="check the path",
        )
    num_heads = 1 + max(int(head) for head, _, _ in found)
    num_layers = 1 + max((int(n) for _, n, kind in found if kind != "weight"), default=-1)
    first = min(n for n in tensors if _MEDUSA_NAME.fullmatch(n) and n.endswith("weight"))
    own = {int(head) for head, layer, kind in found if kind == "weight"}
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=tensors[first].shape[-1],
        vocab_size=vocab_size,
        shared_heads=tuple(head for head in range(num_heads) if head not in own),
    )


def read_speculator_config(path: Path) -> MlpSpeculatorConfig:
    """The published config.json.

    Raises:
        InputError: it is missing, lacks a setting, or has one out of range.
    """
    values = read_json(path, "an MLP speculator's config.json")
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise InputError(
            f"{path} lacks {', '.join(missing)}",
            expected=", ".join(_REQUIRED),
            do="copy the speculator's config.json again",
        )
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in (*_REQUIRED, *_OPTIONAL) and value is not None
    }
    return MlpSpeculatorConfig(**known)


def without_duplicates(
    tensors: Mapping[str, mx.array], config: MlpSpeculatorConfig, source: Path
) -> dict[str, mx.array]:
    """The tensors without "speculator." before their names, each shared one once.

    What belongs to no speculator of these settings is left in, under its whole name.

    Raises:
        InputError: tensors that the settings call tied differ.
    """
    stages = range(config.n_predict)
    owner = {
        f"{SPECULATOR_PREFIX}{part.replace('.', f'.{stage}.')}": config.name_of(part, stage)
        for part in _PARTS
        for stage in stages
    }
    kept: dict[str, mx.array] = {}
    for name, array in sorted(tensors.items()):
        own = owner.get(name, name)
        if own in kept and not bool(mx.array_equal(kept[own], array).item()):
            raise InputError(
                f"{name} in {source} differs from {own}, which it is tied to",
                expected="tie_weights false in config.json, or equal tensors",
                do="use the files that belong together",
            )
        kept.setdefault(own, array)
    return kept


def _read_medusa(
    folder: Path, vocab_size: int | None
) -> tuple[MedusaConfig, dict[str, mx.array], Path]:
    safe, pickled = (folder / name for name in MEDUSA_FILES)
    if safe.is_file():
        source, tensors = safe, read_tensors(safe, "Medusa heads")
    elif pickled.is_file():
        source, tensors = pickled, read_pickle(pickled)
    else:
        found = _lazy_tensors(folder)
        source = folder
        tensors = {name: a for name, a in found.items() if name.startswith(MEDUSA_PREFIX)}
    tensors = {name.removeprefix(MEDUSA_PREFIX): array for name, array in tensors.items()}
    rows = vocab_size or _largest(tensors)
    return medusa_config(tensors, source, rows), tensors, source


def _read_speculator(folder: Path) -> tuple[MlpSpeculatorConfig, dict[str, mx.array], Path]:
    config = read_speculator_config(folder / "config.json")
    tensors: dict[str, mx.array] = {}
    for path in _weight_files(folder):
        tensors |= read_tensors(path, "an MLP speculator's weights")
    if not tensors:
        path = folder / "pytorch_model.bin"
        tensors = read_pickle(path) if path.is_file() else read_tensors(folder / _WEIGHTS, _WEIGHTS)
    return config, without_duplicates(tensors, config, folder), folder


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _lazy_tensors(folder: Path) -> dict[str, mx.array]:
    """The tensors of a model folder, read only when they are used."""
    tensors: dict[str, mx.array] = {}
    for path in _weight_files(folder):
        try:
            loaded: Any = mx.load(str(path), format="safetensors")
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(
                f"{path} cannot be read ({path.stat().st_size} bytes)",
                expected="a whole safetensors file",
                do="copy it again, it may be truncated",
            ) from error
        tensors |= loaded
    return tensors


def _largest(tensors: Mapping[str, mx.array]) -> int:
    """The most rows of any matrix: V, where a head has a matrix of its own."""
    return max((array.shape[0] for array in tensors.values()), default=1)
