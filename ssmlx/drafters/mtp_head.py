"""The head for multi-token prediction (MTP) that Qwen3-Next and Qwen3.5 ship with, and its files.

With e the embedding of token i + 1, and h_i the hidden state that predicted it:

    x = fc([norm_e(e); norm_h(h_i)])    one row for each pair of a hidden state and the next token
    x = layer(x)                        a decoder layer of the target's kind, with full attention
    y = norm(x)                         replaces h_(i + 1): with token i + 2 it makes the next row
    logits = target's LM head(y)        of token i + 2

A checkpoint names its tensors `mtp.*`, which mlx-lm drops. They are read here from its files, or
from those of a folder beside it, where the names may also lack `mtp.`.
"""

import copy
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_next

from ..errors import join_first, quoted, require
from ..loading.model_config import open_config
from ..loading.stored_tensors import MTP_PREFIX, is_mtp_name, tensor_names
from ..loading.tensors import check_tensors
from ..model.backbone import Backbone
from ..model.lm_head import PACKED_KINDS
from ..model.modules import clone_sharing_arrays, module_arrays
from ..model.shapes import to_float
from ..model.streams import StreamFusedModel
from ..settings import MtpNorms

_log = logging.getLogger("ssmlx")

_LAYER_KINDS = (qwen3_next.Qwen3NextDecoderLayer, qwen3_5.DecoderLayer)
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")
_OTHERS = ("embed_tokens.", "lm_head.")  # copies of the target's, which are not read
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)")
# Settings that the head's folder must share with the target, if both name them.
_SHARED_SETTINGS = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_experts_per_tok",
)  # fmt: skip
_MATRIX = re.compile(r"(?:fc|layers\.0\..*(?:proj|gate))(?:\.(?:weight|scales|biases))?")
_ONE = "one MTP head, of one layer: fc, pre_fc_norm_embedding, pre_fc_norm_hidden, layers.0, norm"
_OTHER = "choose the head of this very model"


class MtpModule(nn.Module):
    """The head's own weights: all but the target's embedding, final norm and LM head."""

    def __init__(
        self,
        args: Any,  # the settings of its layer, as mlx-lm's class of the target takes them
        layer_class: type[nn.Module],  # that model's class of decoder layers
    ) -> None:
        super().__init__()
        size = args.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        for name in _NORMS:
            self[name] = nn.RMSNorm(size, eps=args.rms_norm_eps)
        make_layer: Any = layer_class
        # Of every so many layers the last has full attention.
        self.layers = [make_layer(args, layer_idx=args.full_attention_interval - 1)]

    def run_pairs(
        self,
        token_embeddings: mx.array,  # [1, R, D]
        hidden: mx.array,  # [1, R, D] the hidden states before these tokens
        cache: Any,  # of the layer; its `offset` is the first row's position
    ) -> mx.array:  # [1, R, D] the layer's output, before `norm`
        both = [self.pre_fc_norm_embedding(token_embeddings), self.pre_fc_norm_hidden(hidden)]
        rows = self.fc(mx.concatenate(both, axis=-1))
        mask = "causal" if rows.shape[1] > 1 else None
        out: mx.array = self.layers[0](rows, mask=mask, cache=cache)
        return out

    def norm_paths(self) -> list[str]:
        """Paths of all norms, also those of attention's heads."""
        own = [f"layers.0.{name}" for name in _LAYER_NORMS]
        return [*_NORMS, *own, *(f"layers.0.self_attn.{name}" for name in _HEAD_NORMS)]


def load_mtp_module(
    model: StreamFusedModel,  # the target, whose last hidden states can be had
    folder: Path | None = None,  # holds the head, or a whole model; the target's own unless given
    config: Mapping[str, Any] | None = None,  # the content of its config.json; read unless given
) -> MtpModule:
    """Load the head in the target's dtype, computed; its norms' weights are as stored. If the
    target is quantised and the head is not, it is quantised as the target's layer of the same name
    is."""
    backbone = model.backbone
    layer_class = _layer_class(backbone)
    is_beside = folder is not None
    folder = folder or backbone.origin.folder
    require(
        folder is not None,
        "an MTP head of a model that was not read from a folder",
        expected="the folder that holds the head",
        do='give --drafter "mtp model=FOLDER"',
    )
    assert folder is not None
    with open_config(
        folder,
        f"{folder} cannot be read as an MTP head",
        expected="whole safetensors files",
        do="download them again",
        config=config,
    ) as settings:
        if is_beside:
            _require_same_settings(settings, folder, backbone)
        tensors = _stack_experts(_find_head_tensors(folder, may_be_head_alone=is_beside))
        module = _build_module(tensors, backbone.args, layer_class, folder)
        _require_tensors_fit(tensors, module, folder)
        module.load_weights(list(tensors.items()))
        module.set_dtype(backbone.dtype)
        if not any(isinstance(one, PACKED_KINDS) for one in module.modules()):
            quantise_like(backbone.model, module)
        mx.eval(module_arrays(module))
    return module


def resolve_norms(
    module: MtpModule,  # its norms' weights as they are stored
    # "auto" decides by the norms of its layer: "raw" if their weights are below 0.5 on average
    stored_norms: MtpNorms,
) -> MtpModule:
    """A head whose norms have the weights that they multiply with; it shares all other arrays."""
    modules = dict(module.named_modules())
    own = [modules[path] for path in module.norm_paths() if path.startswith("layers.")]
    mean = to_float(mx.mean(mx.concatenate([one.weight.astype(mx.float32) for one in own])))
    found: MtpNorms = "raw" if mean < 0.5 else "shifted"
    _log.debug("the norms of the MTP head's layer are %.2f on average: %s", mean, found)
    copied: Any = clone_sharing_arrays(module)
    if (found if stored_norms == "auto" else stored_norms) == "raw":
        modules = dict(copied.named_modules())
        for path in module.norm_paths():
            modules[path].weight = modules[path].weight + 1
    mx.eval(module_arrays(copied))
    return copied  # type: ignore[no-any-return]


def _layer_class(backbone: Backbone) -> type[nn.Module]:
    found = type(backbone.layers[0]) if backbone.layers else None
    require(
        found in _LAYER_KINDS,
        f"the model type {getattr(backbone.model, 'model_type', '')!r} with --drafter mtp",
        expected="a Qwen3-Next or Qwen3.5 model",
        do="choose another drafter",
    )
    assert found is not None
    return found


def _require_same_settings(
    settings: Mapping[str, Any],  # the content of the head's config.json
    folder: Path,  # of the head, for messages
    backbone: Backbone,  # the target
) -> None:
    inner = settings.get("text_config")
    values = {**settings, **(inner if isinstance(inner, dict) else {})}
    expected = _base_type(getattr(backbone.args, "model_type", ""))
    # Beside a model with experts, only the inner settings say so.
    kind = _base_type(str(values.get("model_type", expected)))
    require(
        kind == expected,
        f"the MTP head in {folder} belongs to another base model: its type is {kind}",
        expected=f"{expected}, as in the target",
        do=_OTHER,
    )
    for name in _SHARED_SETTINGS:
        own = getattr(backbone.args, name, None)
        found = values.get(name, own)
        require(
            own is None or found is None or found == own,
            f"the MTP head in {folder} belongs to another base model: {name} is {quoted(found)}",
            expected=f"{own}, as in the target",
            do=_OTHER,
        )


def _base_type(model_type: str) -> str:
    """A model type without its suffixes for parts and experts: "qwen3_5" of "qwen3_5_moe_text"."""
    return re.sub(r"(_(text|mtp|moe))+$", "", model_type)


def _find_head_tensors(folder: Path, *, may_be_head_alone: bool) -> dict[str, mx.array]:
    """The head's tensors by their names without `mtp.`, not read yet; without copies of the
    target's embedding and LM head."""
    files = tensor_names(folder)
    own = {name: name.partition(MTP_PREFIX)[2] for name in files if is_mtp_name(name)}
    if not own and may_be_head_alone:
        own = {name: name for name in files}
        require(
            any(name.startswith("fc.") for name in own),
            f"{folder} holds no MTP head",
            expected="tensors named mtp.*, or only those of a head",
            do=_OTHER,
        )
    require(
        bool(own),
        f"{folder} holds no MTP head",
        expected="tensors named mtp.*, which many conversions drop",
        do='give --drafter "mtp model=MODEL", a folder or Hub name that holds them',
    )
    own = {name: own_name for name, own_name in own.items() if not own_name.startswith(_OTHERS)}
    loaded: dict[Path, Any] = {
        path: mx.load(str(path), format="safetensors") for path in {files[name] for name in own}
    }
    tensors = {own_name: loaded[files[name]][name] for name, own_name in own.items()}
    for name, one in tensors.items():  # the head's sizes are read off these shapes
        require(
            (one.ndim >= 2 and one.size > 0) or not _MATRIX.fullmatch(name),
            f"the MTP head in {folder} has {name} of the shape {list(one.shape)}",
            expected="a matrix",
            do="download it again, or choose another head",
        )
    return tensors


def _stack_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rename and reshape tensors as mlx-lm's layers have them: single experts are stacked, and a
    joint tensor of gates and ups is split in two."""
    joined: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, tensor in tensors.items():
        if single := _EXPERT.fullmatch(name):
            prefix, number, part, leaf = single.groups()
            experts.setdefault(f"{prefix}.switch_mlp.{part}.{leaf}", {})[int(number)] = tensor
        elif name.endswith(".mlp.experts.gate_up_proj"):
            prefix = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            middle = tensor.shape[-2] // 2
            joined[prefix + "gate_proj.weight"] = tensor[..., :middle, :]
            joined[prefix + "up_proj.weight"] = tensor[..., middle:, :]
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix("experts.down_proj") + "switch_mlp."
            joined[prefix + "down_proj.weight"] = tensor
        else:
            joined[name] = tensor
    for name, parts in experts.items():
        shapes = {part.shape for part in parts.values()}
        require(
            sorted(parts) == list(range(len(parts))) and len(shapes) == 1,
            f"the MTP head has experts {join_first([*map(str, sorted(parts))])} of {name}",
            expected="all of them, of one shape",
            do="download it again",
        )
        joined[name] = mx.stack([parts[number] for number in range(len(parts))])
    return joined


def _build_module(
    tensors: Mapping[str, mx.array],  # only names and shapes are looked at
    args: Any,  # the target's settings
    layer_class: type[nn.Module],
    folder: Path,
) -> MtpModule:
    """The module that these tensors are for, its layers quantised as they are, with random
    weights."""
    args = copy.copy(args)
    mlp = "layers.0.mlp."
    has_experts = any(name.startswith(f"{mlp}switch_mlp.") for name in tensors)
    require(
        not has_experts or args.num_experts > 0,
        f"the MTP head in {folder} has a layer of experts, which the target lacks",
        expected="a dense layer, as in the target",
        do=_OTHER,
    )
    args.mlp_only_layers = []
    args.decoder_sparse_step = 1
    if not has_experts:
        args.num_experts = 0
        gate = tensors.get(f"{mlp}gate_proj.weight")
        args.intermediate_size = args.intermediate_size if gate is None else gate.shape[0]
    module = MtpModule(args, layer_class)

    def packing(path: str, layer: nn.Module) -> bool | dict[str, int]:
        scales = tensors.get(f"{path}.scales")
        if scales is None or not hasattr(layer, "to_quantized"):
            return False
        width = layer.weight.shape[-1]
        packed = tensors.get(f"{path}.weight", scales)
        bits = packed.shape[-1] * 32 // width
        group_size = width // scales.shape[-1]
        is_known = bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
        require(
            is_known and f"{path}.biases" in tensors,
            f"{path} of the MTP head in {folder} is quantised to {bits} bits, {group_size} a group",
            expected="MLX's affine quantisation",
            do="use a head that is not quantised",
        )
        return {"bits": bits, "group_size": group_size}

    nn.quantize(module, class_predicate=packing)
    return module


def _require_tensors_fit(tensors: Mapping[str, mx.array], module: MtpModule, folder: Path) -> None:
    expected: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]
    packed = [name for name, one in expected.items() if one.dtype == mx.uint32]
    wrong = [name for name in packed if name in tensors and tensors[name].dtype != mx.uint32]
    unknown = sorted(name for name in tensors if name not in expected)
    require(
        not wrong and not unknown,
        f"the MTP head in {folder} has unexpected tensors, or tensors of another type: "
        f"{join_first([*wrong, *unknown])}",
        expected=_ONE,
        do=_OTHER,
    )
    shapes = {name: one.shape for name, one in expected.items()}
    check_tensors(tensors, shapes, folder, of_any_dtype=packed)


def quantise_like(target: nn.Module, module: nn.Module) -> None:
    """Quantise layers as those of `target` with the same names are; a layer that the target lacks,
    such as `fc`, as most of its layers are. A layer stays as it is if its width is no multiple of
    the group size."""
    found: dict[str, dict[str, Any]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for path, layer in target.named_modules():
        if hasattr(layer, "bits") and hasattr(layer, "group_size"):
            how = {
                "group_size": layer.group_size,
                "bits": layer.bits,
                "mode": getattr(layer, "mode", "affine"),
            }
            found.setdefault(_path_in_layer(path), how)
            key: tuple[Any, ...] = (*how.values(),)
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return
    most: tuple[Any, ...] = max(counts, key=counts.__getitem__)
    usual = dict(zip(("group_size", "bits", "mode"), most, strict=True))

    def packing(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        how = found.get(_path_in_layer(path), usual)
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % how["group_size"]:
            return False
        return how

    nn.quantize(module, class_predicate=packing)


def _path_in_layer(path: str) -> str:
    """The part of a path after its layer's number; the whole path outside of layers."""
    return re.sub(r"^.*\blayers\.\d+\.", "", path)
