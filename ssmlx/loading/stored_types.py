"""Refusing weights whose stored types mlx-lm's class would misread.

MLX reads FP8 as plain bytes, so weights that are not decoded would be numbers from 0 to 255,
without an error. mlx-lm decodes its own formats, those of the methods in `_METHODS`, and FP8 with
scales if the model's class does.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING

from ..errors import InputError, join_first, quoted, require
from ..json_files import read_json
from .stored_tensors import StoredTensor, is_head_name, read_header

# `quant_method` that mlx-lm's loader takes; it refuses some of their forms by itself.
_METHODS = (
    "awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8"
)  # fmt: skip
# Modules of mlx-lm whose classes decode FP8 by the scales beside it, or keep it packed.
_DECODE_FP8 = frozenset((
    "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm_moe_dsa", "kimi_k25", "mimo_v2_flash",
    "minimax", "minimax_m3_vl", "mistral4",
))  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")
# Types that MLX reads, and that may be packed weights, scales, or tables of ids.
_PACKED = ("F8_E4M3", "F8_E8M0", "BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
_BY_DEFAULT = {"num_bits": 8, "symmetric": True, "type": "int"}
# All that mlx-lm reads of the packed integers of compressed-tensors, whatever its settings say.
_FOUR_BITS = {**_BY_DEFAULT, "num_bits": 4}
_SCALES = re.compile(r"(.+?)[._](?:weight_)?(?:global_)?scale")
_EXPECTED = "weights of float16, bfloat16 or float32, or quantised by mlx-lm"
_DO = "use the model in bfloat16, or one that mlx-lm converted"


def require_known_quantisation(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that no class of mlx-lm decodes, by settings and headers; no weights are
    read."""
    is_mlx_own = config.get("quantization") is not None
    method = None if is_mlx_own else _require_known_method(folder, config)
    stored: dict[str, StoredTensor] = {}
    with suppress(InputError, OSError):  # mlx-lm's loader says which header cannot be read
        for path in sorted(folder.glob("model*.safetensors")):
            stored |= {one.name: one for one in read_header(path) if not is_head_name(one.name)}
    odd = [one for one in stored.values() if one.dtype not in _FLOATS]
    unread = [one for one in odd if one.dtype not in _PACKED]
    _refuse_if_any(folder, unread, "which MLX cannot read")
    scaled = {_scaled_by(name) for name in stored}
    packed = [one for one in odd if _is_weight(one) and "scale" not in one.name]
    bare = [one for one in packed if one.name.removesuffix(".weight") not in scaled]
    _refuse_if_any(folder, bare, "without the scales that decode them")
    if is_mlx_own or (method is not None and method != "fp8"):
        return
    fp8 = [one for one in packed if one.dtype == "F8_E4M3"]
    classes = _module_names(config)
    if not classes & _DECODE_FP8:
        why = f"which mlx-lm's class of {join_first(sorted(classes))} does not decode"
        _refuse_if_any(folder, fp8, why)


def refuse_other_types(model_class: Any, folder: Path) -> Any:
    """A subclass of a model class of mlx-lm that refuses weights in other types than its own.

    For example, numbers for a quantised layer, or integers for one that computes with floats.
    """

    class OfItsOwnTypes(model_class):  # type: ignore[misc]  # known at run time
        __module__ = model_class.__module__  # messages name the model by it

        def load_weights(self, file_or_weights: Any, strict: bool = True) -> Any:
            # `sanitize`, which may decode them, has run by now.
            own: dict[str, mx.array] = dict(tree_flatten(self.parameters()))
            wrong = [
                f"{name} of {str(given.dtype).removeprefix('mlx.core.')}"
                for name, given in file_or_weights
                if name in own and _is_quantised(given) != _is_quantised(own[name])
            ]
            require(
                not wrong,
                f"{folder} has weights in types that {model_class.__module__} does not compute "
                f"with ({join_first(wrong)})",
                expected=_EXPECTED,
                do=_DO,
            )
            return super().load_weights(file_or_weights, strict)

    return OfItsOwnTypes


def _is_quantised(array: mx.array) -> bool:
    return not mx.issubdtype(array.dtype, mx.floating)


def _require_known_method(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's `quant_method`, as mlx-lm's loader finds it; None if it is not quantised."""
    inner = config.get("text_config")
    beside = folder / "hf_quant_config.json"
    found: Any = None
    if "quantization_config" in config:
        found = config["quantization_config"]
    elif isinstance(inner, dict) and "quantization_config" in inner:
        found = inner["quantization_config"]
    elif beside.is_file():
        found = read_json(beside, "how a model was quantised")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    told = f"is quantised by {quoted(method)}"
    if method is None:
        told = f"describes its quantisation by {quoted(found)}, without a quant_method"
    require(
        isinstance(method, str) and method in _METHODS,
        f"{folder} {told}",
        expected=f"{_EXPECTED}, or by one of {', '.join(_METHODS)}",
        do=f"{_DO}; if its weights are floats, remove quantization_config from config.json",
    )
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        _require_four_bits(folder, found.get("config_groups"))
    return str(method)


def _require_four_bits(
    folder: Path,
    groups: Any,  # "config_groups" of quantization_config
) -> None:
    """Refuse other packed integers than symmetric ones of 4 bits, as mlx-lm reads all of them as
    these."""
    listed = groups.values() if isinstance(groups, dict) else []
    weights = [one.get("weights") for one in listed if isinstance(one, dict)]
    stated = [
        {name: one.get(name, value) for name, value in _BY_DEFAULT.items()}
        for one in weights
        if isinstance(one, dict)
    ]
    wrong = [one for one in stated if one != _FOUR_BITS]
    require(
        bool(stated) and not wrong,
        f"{folder} has weights packed by compressed-tensors as {quoted(wrong or groups)}",
        expected=f"{_FOUR_BITS}, which mlx-lm assumes of all of them",
        do=_DO,
    )


def _is_weight(one: StoredTensor) -> bool:
    # Other tensors that are not floats may be tables of positions or masks, which classes drop.
    return one.name.endswith(".weight") or one.dtype.startswith("F8_E4M3")


def _scaled_by(name: str) -> str:
    """The name of the layer that a tensor has scales for; "" for a tensor of another kind."""
    found = _SCALES.match(name)
    return "" if found is None else found[1]


def _module_names(config: Mapping[str, Any]) -> frozenset[str]:
    """mlx-lm's modules that read the weights: the model's own, and that of its `text_config`."""
    inner = config.get("text_config")
    types = [config.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None]
    return frozenset(MODEL_REMAPPING.get(one, one) for one in types if isinstance(one, str))


def _refuse_if_any(folder: Path, tensors: Iterable[StoredTensor], why: str) -> None:
    found = list(tensors)
    types = ", ".join(sorted({one.dtype for one in found}))
    names = join_first([one.name for one in found])
    require(
        not found, f"{folder} has weights in {types} {why} ({names})", expected=_EXPECTED, do=_DO
    )
