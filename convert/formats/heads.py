"""Published drafting heads, Medusa's and MLP speculators': read, written, and converted to MLX.

Medusa heads:
    medusa_lm_head.safetensors (or .pt)    {h}.{l}.linear.{weight,bias} of residual block l of
                                           head h, and {h}.{L}.weight, its matrix
    config.json                            medusa_num_heads and more, often wrong: not read
    Medusa-2 models carry the same tensors as `medusa_head.*` among their own weights.

MLP speculators:
    config.json           model_type "mlp_speculator" and the settings of `MlpSpeculatorConfig`
    model*.safetensors    speculator.{emb,proj,head}.{i}.weight, speculator.ln.{i}.{weight,bias};
                          of tied weights, the duplicates may be left out

A folder of either kind may hold `draft_vocab.safetensors` beside its weights: `draft_vocab`, int32,
strictly ascending, the tokens that the heads were trained to guess among. Other programs ignore it;
here, heads have only the rows of these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from ssmlx.drafters.head_drafter import HeadConfig
from ssmlx.drafters.heads import Heads, check_head_tensors
from ssmlx.drafters.medusa import MedusaConfig
from ssmlx.drafters.mlp_speculator import MlpSpeculatorConfig
from ssmlx.errors import require
from ssmlx.json_files import build_settings, read_json
from ssmlx.loading.adapter import cast_stream_tensors, check_draft_vocab
from ssmlx.loading.files import write_whole
from ssmlx.loading.identity import BaseIdentity
from ssmlx.loading.stored_tensors import MEDUSA_PREFIX
from ssmlx.loading.tensors import read_tensors
from ssmlx.model.backbone import Backbone

from ..reference.format import read_pickle

if TYPE_CHECKING:
    import torch

    from ..reference.heads import HeadReference

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
_SPECULATOR = "mlp_speculator"
_SPECULATOR_PREFIX = "speculator."
_WEIGHTS = "model.safetensors"
_MEDUSA_NAME = re.compile(r"(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")
_SPECULATOR_SETTINGS = ("emb_dim", "inner_dim", "n_predict", "vocab_size", "tie_weights",
                        "scale_input")  # fmt: skip
_PARTS = ("emb.weight", "proj.weight", "ln.weight", "ln.bias", "head.weight")


def read_published_heads(
    folder: Path,  # of the heads, or of a Medusa-2 model
    vocab_size: int | None = None,  # V, for Medusa heads; None for the most rows of a tensor
) -> tuple[HeadConfig, dict[str, mx.array]]:
    """Settings, and tensors by published name without "medusa_head." or "speculator.".

    A draft vocabulary is among the tensors as "draft_vocab"; matrices then have its rows alone.
    """
    path = folder / "config.json"
    config: HeadConfig
    found, source = _read_medusa(folder)
    if found:
        tensors = {n.removeprefix(MEDUSA_PREFIX): a.reshape(a.shape or 1) for n, a in found.items()}
        most_rows = max(array.shape[0] for array in tensors.values())
        config = _medusa_config_of_tensors(tensors, source, vocab_size or most_rows)
    else:
        values = read_json(path, "the settings of a speculator") if path.is_file() else {}
        require(
            values.get("model_type") == _SPECULATOR,
            f"{folder} has no drafting heads",
            expected="medusa_lm_head.safetensors (or .pt), model weights with medusa_head.*, or a "
            "config.json of the model_type mlp_speculator",
            do="check the path",
        )
        config = build_settings(MlpSpeculatorConfig, values, path)
        tensors = _read_speculator(folder, config)
    check_head_tensors(config, tensors, source)
    path = folder / DRAFT_VOCAB_FILE
    if not path.exists():
        return config, tensors
    beside = read_tensors(path, "a draft vocabulary")
    vocab = beside.get("draft_vocab", mx.array([]))
    require(
        set(beside) == {"draft_vocab"} and vocab.ndim == 1 and vocab.size > 0,
        f"{path} has {', '.join(beside) or 'nothing'}",
        expected="draft_vocab alone, a list of at least one token id",
        do="use the files that belong together",
    )
    config = replace(config, draft_vocab_size=vocab.size)
    check_draft_vocab(vocab, vocab.size, config.vocab_size, path)
    taken = {name: tensors[name][vocab] for name in config.matrix_names}
    return config, {**tensors, **taken, "draft_vocab": vocab}


def convert_heads(
    folder: Path,
    backbone: Backbone,
    base_model: str,  # its name, which the heads keep
    dtype: str,
) -> Heads:
    config, tensors = read_published_heads(folder, backbone.vocab_size)
    check_base_sizes(config, backbone.vocab_size, backbone.hidden_size, folder)
    if dtype not in ("stored", "auto"):
        tensors = cast_stream_tensors(tensors, getattr(mx, dtype))
    return Heads(config, tensors, BaseIdentity.of(backbone), base_model)


def check_base_sizes(
    config: HeadConfig,
    vocab_size: int,
    hidden_size: int,
    source: Path | None,  # the heads' folder, for the message
) -> None:
    for what, found, expected in (
        ("hidden size", hidden_size, config.base_width),
        ("vocabulary", vocab_size, config.vocab_size),
    ):
        require(
            found == expected,
            f"the base model has {what} {found}",
            expected=f"{expected}, that of the heads in {source}",
            do="give the base model that they were trained on",
        )


def load_published_heads(
    folder: Path,
    vocab_size: int | None = None,  # as in `read_published_heads`
) -> HeadReference:
    """Load heads in PyTorch, in float32 and evaluation mode."""
    import torch

    from ..reference.heads import new_reference

    config, tensors = read_published_heads(folder, vocab_size)
    vocab = tensors.get("draft_vocab")
    model = new_reference(config, None if vocab is None else torch.from_numpy(np.array(vocab)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            array = tensors[name.removeprefix("heads.")].astype(mx.float32)
            parameter.copy_(torch.from_numpy(np.array(array)))
    loaded: HeadReference = model.eval()
    return loaded


def save_published_heads(
    model: HeadReference,
    folder: Path,
    base_model: str = "",
    # [V, D], Medusa's rows of tokens outside the draft vocabulary; None for zeros
    lm_head: torch.Tensor | None = None,
) -> None:
    """Save heads in their published format, which other programs read."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    config: HeadConfig = model.config
    if isinstance(config, MedusaConfig):
        files = {MEDUSA_FILES[0]: _tensors_over_whole_vocab(model, lm_head)}
        settings: dict[str, Any] = {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
        }
    else:  # A speculator's heads have zeros for tokens outside its draft vocabulary.
        tensors = _tensors_over_whole_vocab(model, None)
        files = {_WEIGHTS: {_SPECULATOR_PREFIX + name: own for name, own in tensors.items()}}
        assert isinstance(config, MlpSpeculatorConfig)
        settings = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": _SPECULATOR,
            **{name: getattr(config, name) for name in _SPECULATOR_SETTINGS},
            "top_k_tokens_per_head": list(config.widths),
            "n_candidates": config.candidates,
        }
    if model.draft_vocab is not None:
        files[DRAFT_VOCAB_FILE] = {"draft_vocab": model.draft_vocab.cpu()}
    else:  # an earlier file would seem to belong to these heads
        (folder / DRAFT_VOCAB_FILE).unlink(missing_ok=True)
    for file, content in files.items():
        write_whole(folder / file, save(content, metadata={"format": "pt"}))
    settings["base_model_name_or_path"] = base_model
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _tensors_over_whole_vocab(
    model: HeadReference,
    other_rows: torch.Tensor | None,  # [V, D]; None for zeros
) -> dict[str, torch.Tensor]:
    """Tensors by published name, on the CPU; matrices have all V rows."""
    tensors = {
        name.removeprefix("heads."): weight.detach().cpu().contiguous()
        for name, weight in model.named_parameters()
    }
    if model.draft_vocab is not None:
        tokens = model.draft_vocab.long().cpu()
        for name in model.config.matrix_names:
            own = tensors[name].float()
            whole = own.new_zeros(model.config.vocab_size, own.shape[1])
            if other_rows is not None:
                whole.copy_(other_rows.detach())
            whole[tokens] = own
            tensors[name] = whole
    return tensors


def _medusa_config_of_tensors(
    tensors: Mapping[str, mx.array], source: Path, vocab_size: int
) -> MedusaConfig:
    """Settings by the tensors' names and shapes; a head without a matrix shares the LM head."""
    found = [match.groups() for match in map(_MEDUSA_NAME.fullmatch, tensors) if match]
    require(
        bool(found),
        f"{source} has no tensor with the name of a Medusa head's",
        expected="0.0.linear.weight, 0.0.linear.bias, 0.1.weight and so on",
        do="check the path",
    )
    num_heads = 1 + max(int(head) for head, _, _ in found)
    first = min(n for n in tensors if _MEDUSA_NAME.fullmatch(n) and n.endswith("weight"))
    own = {int(head) for head, _, part in found if part == "weight"}
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=1 + max((int(n) for _, n, part in found if part != "weight"), default=-1),
        hidden_size=tensors[first].shape[-1],
        vocab_size=vocab_size,
        shared_heads=tuple(head for head in range(num_heads) if head not in own),
    )


class _SourceTensors(NamedTuple):
    tensors: dict[str, mx.array]  # by their names in the file
    source: Path


def _read_medusa(folder: Path) -> _SourceTensors:
    """Read Medusa heads from the first of their files that exists, else from a model's weights."""
    source, pickled = (folder / name for name in MEDUSA_FILES)
    if source.is_file():
        return _SourceTensors(read_tensors(source, "Medusa heads"), source)
    if pickled.is_file():
        return _SourceTensors(read_pickle(pickled), pickled)
    tensors: dict[str, mx.array] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= read_tensors(path, "a model's weights", MEDUSA_PREFIX)
    return _SourceTensors(tensors, folder)


def _read_speculator(folder: Path, config: MlpSpeculatorConfig) -> dict[str, mx.array]:
    """Read tensors by name without "speculator."; tied tensors occur once for all stages."""
    pickled = folder / "pytorch_model.bin"
    paths = sorted(folder.glob("model*.safetensors"))
    tensors: dict[str, mx.array] = {}
    if not paths and pickled.is_file():
        tensors = read_pickle(pickled)
    else:
        for path in paths or [folder / _WEIGHTS]:
            tensors |= read_tensors(path, "an MLP speculator's weights")
    owner = {
        f"{_SPECULATOR_PREFIX}{part.replace('.', f'.{stage}.')}": config.tensor_name(part, stage)
        for part in _PARTS
        for stage in range(config.n_predict)
    }
    kept: dict[str, mx.array] = {}
    for name, array in sorted(tensors.items()):
        own = owner.get(name, name)
        require(
            own not in kept or bool(mx.array_equal(kept[own], array).item()),
            f"{name} in {folder} differs from {own}, which it is tied to",
            expected="tie_weights false in config.json, or equal tensors",
            do="use the files that belong together",
        )
        kept.setdefault(own, array)
    return kept
