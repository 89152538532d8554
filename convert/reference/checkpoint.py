"""Checkpoints of the PyTorch model: reading, writing, resuming, merging LoRA."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from ssmlx.errors import InputError, require
from ssmlx.json_files import read_json
from ssmlx.loading.adapter import StreamAdapter, load_adapter, read_stream_weights, stream_tensors
from ssmlx.loading.files import write_whole
from ssmlx.loading.folders import CONFIG_FILE
from ssmlx.loading.identity import NORM_PROBE_LENGTH, BaseIdentity
from ssmlx.loading.lora_files import Loras, lora_tensors
from ssmlx.loading.tensors import check_tensors, read_tensors
from ssmlx.model.lora import split_layer_path
from ssmlx.training.config import Part
from ssmlx.training.job import (
    require_run_has_start_shapes,
    require_same_lora_scale,
    require_same_stream_design,
    require_task_lora_kept,
)
from ssmlx.training.mlx_model import replace_weights

from ..typed_torch import without_gradients
from . import format as layout
from .format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, STREAMS_CONFIG, STREAMS_WEIGHTS, LoraSettings
from .model import StreamFusedReference, check_base

_DRAFT_VOCAB = "draft_vocab"
_STREAMS = "stream weights"
_LORA = "PEFT's LoRA weights"


def load_reference(
    base: nn.Module,  # becomes part of the model, and is changed
    checkpoint_dir: str | Path,  # with the two stream files, and PEFT's two if there is LoRA
) -> StreamFusedReference:
    """Load the model in evaluation mode; streams and LoRA take gradients, the base does not."""
    folder = Path(checkpoint_dir)
    config = layout.read_stream_config(folder / STREAMS_CONFIG)
    has_lora = any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    lora = (
        layout.read_lora_settings(folder / ADAPTER_CONFIG, config.num_layers)
        if has_lora
        else LoraSettings()
    )
    check_base(base, config)
    vocab_size: Any = base.config.vocab_size
    streams = read_stream_weights(folder / STREAMS_WEIGHTS, config, vocab_size)
    vocab = None if streams.draft_vocab is None else to_tensor(streams.draft_vocab)
    model = StreamFusedReference(base, config, draft_vocab=vocab, lora=lora)
    if has_lora:
        path, tensors = layout.read_peft_tensors(folder)
        _copy_tensors(_lora_parameters(model), tensors, path)
    _copy_tensors(_stream_parameters(model), stream_tensors(streams), folder / STREAMS_WEIGHTS)
    loaded: StreamFusedReference = model.eval()
    return loaded


def build_frozen(
    base: nn.Module,  # becomes part of the model, and is changed
    adapter: StreamAdapter,
) -> StreamFusedReference:
    """Build the PyTorch model of a base and an MLX adapter; no parameter takes gradients."""
    adapter.base.require_same(
        base_identity(base),
        "the adapter belongs",
        expected=adapter.config.base_model or "the model it was converted for",
        do="choose that model with --model, or another --adapter",
    )
    source = Path("the adapter")
    merge_mlx_lora(base, adapter.task_lora, source)
    vocab = adapter.streams.draft_vocab
    vocab = None if vocab is None else to_tensor(vocab)
    model = StreamFusedReference(
        base, adapter.config, lora=_uniform_lora_settings(adapter), draft_vocab=vocab
    )
    trained = lora_tensors(adapter.trained_lora)
    pairs = {_peft_name(name): array.T for name, array in trained.items()}
    _copy_tensors(_lora_parameters(model), pairs, source)
    _copy_tensors(_stream_parameters(model), stream_tensors(adapter.streams), source)
    frozen: StreamFusedReference = model.eval().requires_grad_(False)
    return frozen


def set_trained_part(model: StreamFusedReference, part: Part | None) -> None:
    """Choose what takes gradients; LoRA of scope "all" and the base stay frozen."""
    parameters = dict(_stream_parameters(model))
    parameters.pop(_DRAFT_VOCAB, None)
    if model.config.adapter_scope == "streams":
        parameters |= _lora_parameters(model)
    for name, parameter in parameters.items():
        parameter.requires_grad_(part != "condition" or name.startswith("condition."))


def replace_trained_weights(
    adapter: StreamAdapter,
    # built by `build_frozen` from this adapter, and trained since
    model: StreamFusedReference,
) -> StreamAdapter:
    """The adapter with the model's parameters that take gradients."""
    parameters = {**_stream_parameters(model), **_lora_parameters(model)}
    trained = {
        name: mx.array(parameter.detach().cpu().numpy())
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }
    lora = {
        name: trained.pop(_peft_name(name)).T
        for name in lora_tensors(adapter.trained_lora)
        if _peft_name(name) in trained
    }
    return replace_weights(adapter, {**trained, **lora})


def load_fine_tuned(
    base: nn.Module,  # becomes part of the model, and is changed
    lora: str | Path,
) -> StreamFusedReference:
    """Load a base with LoRA on every row, unmerged, which changes the answers."""
    model = load_reference(base, lora)
    if model.config.adapter_scope != "all":
        raise InputError(
            f"--lora {lora} acts on streams alone",
            expected="scope all: LoRA that changes the answers",
            do="omit --lora: the model is then the base model",
        )
    return model


def save_reference(model: StreamFusedReference, checkpoint_dir: str | Path) -> None:
    """Save the checkpoint for `load_reference`; PEFT can load its two LoRA files.

    Without LoRA no PEFT files are written; earlier ones stay, and would be read.
    """
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(_stream_parameters(model), folder / STREAMS_WEIGHTS)
    _write_json(layout.stream_settings_json(model.config), folder / STREAMS_CONFIG)
    if model.adapters:
        _write_tensors(_lora_parameters(model), folder / ADAPTER_WEIGHTS)
        modules = model.lora.modules or {path.split(".", 2)[2] for path in model.adapters}
        settings = layout.peft_settings_json(model.lora, modules, model.config.base_model)
        _write_json(settings, folder / ADAPTER_CONFIG)


def copy_task_lora(source: str | Path, checkpoint_dir: str | Path) -> None:
    """Copy the LoRA into a checkpoint's folder `task_lora`, where the converter looks for it."""
    target = Path(checkpoint_dir) / layout.TASK_LORA
    target.mkdir(parents=True, exist_ok=True)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, STREAMS_CONFIG, STREAMS_WEIGHTS):
        if (Path(source) / name).is_file():
            write_whole(target / name, (Path(source) / name).read_bytes())


@without_gradients
def copy_checkpoint_weights(
    model: StreamFusedReference, folder: Path, *, has_task_lora: bool
) -> None:
    """Copy a checkpoint's weights; those that it lacks stay, and so does the draft vocabulary."""
    config = layout.read_stream_config(folder / STREAMS_CONFIG)
    start_has_it = (folder / layout.TASK_LORA).is_dir()
    require_task_lora_kept(folder, start_has_it=start_has_it, run_has_it=has_task_lora)
    require_same_stream_design(folder, config, model.config)
    if (folder / ADAPTER_CONFIG).is_file() and model.adapters:
        lora = layout.read_lora_settings(folder / ADAPTER_CONFIG, config.num_layers)
        require_same_lora_scale(folder, lora.scale, model.lora.scale)
    files = {ADAPTER_WEIGHTS: _LORA, STREAMS_WEIGHTS: _STREAMS}
    there = [(folder / name, what) for name, what in files.items() if (folder / name).is_file()]
    found = {name: a for path, what in there for name, a in read_tensors(path, what).items()}
    found.pop(_DRAFT_VOCAB, None)
    if not found:
        raise InputError(f"{folder} has no weights", expected=" or ".join(files), do="check --init")
    parameters = {**_lora_parameters(model), **_stream_parameters(model)}
    require_run_has_start_shapes(folder, found, parameters)
    for name, array in found.items():
        parameters[name].copy_(to_tensor(array))


def merge_fine_tuning(
    base: Any,
    folder: Path,  # a checkpoint of `convert.train` of scope "all", or what `ssmlx.load` takes
) -> Any:
    """Merge LoRA on every row into the weights of a PyTorch base model, in place."""
    if (folder / STREAMS_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS).is_file():
        return merge_lora(load_fine_tuned(base, folder))
    merge_mlx_lora(base, load_adapter(folder).lora, folder)
    return base


def read_prompt_template(folder: Path) -> str | None:
    """Read the template, a text with `{prompt}`; None for the model's own chat template."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    template: str | None = read_json(folder / CONFIG_FILE, "stream settings").get("prompt_template")
    return template


@without_gradients
def merge_lora(model: StreamFusedReference) -> nn.Module:
    """Merge LoRA of scope "all" into the base's weights; the reference is unusable then."""
    for path, wrapped in model.adapters.items():
        low = wrapped.adapter
        wrapped.linear.weight += wrapped.scale * (low.lora_B.weight @ low.lora_A.weight)
        _, index, place = path.split(".", 2)
        parent, _, name = place.rpartition(".")
        layer = model.decoder.layers[int(index)]
        setattr(layer.get_submodule(parent), name, wrapped.linear)
    model.adapters = {}
    return model.base


@without_gradients
def merge_mlx_lora(
    base: Any,
    lora: Loras,  # by module path of the MLX model
    source: Path,  # for messages
) -> None:
    """Merge LoRA or DoRA in mlx-lm's layout into the linear modules of a PyTorch model.

    If a module is refused, those before it are changed already.
    """
    decoder = getattr(base.model, "decoder", base.model)
    linears = {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}
    for path, weights in lora.items():
        a, b = (to_tensor(part) for part in (weights.a, weights.b))
        linear = linears.get("layers." + path.partition("layers.")[2])
        if linear is None or linear.weight.shape != (b.shape[1], a.shape[0]):
            raise InputError(
                f"{source} has LoRA for {path} of {a.shape[0]} inputs and {b.shape[1]} outputs",
                expected="linear modules of this base model",
                do="choose the model that the LoRA was trained on",
            )
        linear.weight += weights.scale * (a @ b).t()
        if weights.magnitude is not None:
            norms = linear.weight.norm(dim=1)
            linear.weight *= (to_tensor(weights.magnitude) / norms)[:, None]


def to_tensor(array: mx.array) -> torch.Tensor:
    """Convert to a tensor on the CPU; int32 stays, other types become float32."""
    whole = array if array.dtype == mx.int32 else array.astype(mx.float32)
    return torch.from_numpy(np.array(whole))


def base_identity(base: Any) -> BaseIdentity:
    """The base's identity, equal to that of the same weights in MLX."""
    inner = getattr(base, "model", None)
    inner = getattr(inner, "decoder", inner)
    names = ("norm", "final_layernorm", "final_layer_norm")
    norm = next(filter(None, (getattr(inner, name, None) for name in names)), None)
    weight = getattr(norm, "weight", torch.zeros(0))
    config = base.config
    return BaseIdentity(
        config.model_type,
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        tuple(round(value, 6) for value in weight[:NORM_PROBE_LENGTH].float().tolist()),
    )


def _uniform_lora_settings(adapter: StreamAdapter) -> LoraSettings:
    """The settings that all layers share; rank 0 without LoRA."""
    lora = adapter.trained_lora
    if not lora:
        return LoraSettings()
    sizes = {(weights.rank, weights.scale) for weights in lora.values()}
    places = [split_layer_path(path) for path in lora]
    modules = sorted({m for _, m in places})
    layers = sorted({n for n, _ in places})
    require(
        len(sizes) == 1 and len(places) == len(modules) * len(layers),
        "the adapter's LoRA differs from layer to layer",
        expected="one rank and scale, on the same modules of each layer",
        do="convert it with uniform LoRA",
    )
    ((rank, scale),) = sizes
    return LoraSettings(rank, scale * rank, tuple(modules), tuple(layers))


def _peft_name(name: str) -> str:
    """PEFT's name of a tensor that `lora_tensors` names; PEFT's is transposed."""
    path, _, part = name.rpartition(".lora_")
    return f"{layout.PEFT_PREFIX}{path}.lora_{part.upper()}.weight"


def _lora_parameters(model: StreamFusedReference) -> dict[str, torch.Tensor]:
    """LoRA parameters, not copies, by PEFT's names."""
    return {
        f"{layout.PEFT_PREFIX}{model.decoder.path}.{path}.{name}": weight
        for path, module in model.adapters.items()
        for name, weight in module.adapter.named_parameters()
    }


def _stream_parameters(model: StreamFusedReference) -> dict[str, torch.Tensor]:
    """Stream parameters, not copies, by name in a streams file; with the draft vocabulary."""
    own = ("stream_embeddings", "stream_init.", "root_init.", "prune_adapter.", "condition.")
    found = {name: weight for name, weight in model.named_parameters() if name.startswith(own)}
    return found if model.draft_vocab is None else {**found, _DRAFT_VOCAB: model.draft_vocab}


@without_gradients
def _copy_tensors(
    parameters: Mapping[str, torch.Tensor], arrays: Mapping[str, mx.array], source: Path
) -> None:
    """Copy all tensors; if one is missing, unknown or of another shape, copy none."""
    check_tensors(arrays, {name: tuple(p.shape) for name, p in parameters.items()}, source)
    for name, parameter in parameters.items():
        parameter.copy_(to_tensor(arrays[name]))


def _write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(kept, metadata={"format": "pt"}))


def _write_json(values: Mapping[str, Any], path: Path) -> None:
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
