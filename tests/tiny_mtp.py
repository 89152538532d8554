"""MTP heads of tiny models, and the folders that they come in."""

import json
from copy import deepcopy
from functools import lru_cache
from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from real import write_tokenizer
from tiny_classes import OWN, SIZES, random_weights

from ssmlx.drafters.mtp_head import MtpModule
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel

DENSE = {"num_experts": 0}
# By name: mlx-lm's class, and settings beside those of all classes.
MODELS = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next dense": ("qwen3_next", DENSE),
    "qwen3_5": ("qwen3_5", DENSE),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
}


def config_of(name):
    kind, more = MODELS[name]
    return {**SIZES, "model_type": kind, **OWN.get(kind, {}), **more}


@lru_cache(maxsize=4)
def base_of(name):
    config = config_of(name)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(deepcopy(config)))
    model.update(tree_unflatten(list(random_weights(model).items())))
    mx.eval(model.parameters())
    return model


@lru_cache(maxsize=4)
def model_of(name):
    return StreamFusedModel(Backbone(base_of(name)))


def head_tensors(name, seed=100):
    """Random weights of a head, by the names of mlx-lm's layers, norms as they multiply."""
    backbone = model_of(name).backbone
    module = MtpModule(backbone.args, type(backbone.layers[0]))
    weights = {}
    for number, (path, old) in enumerate(tree_flatten(module.parameters())):
        noise = 0.25 * mx.random.normal(old.shape, key=mx.random.key(seed + number))
        weights[path] = noise if old.ndim > 1 else 1 + noise
    return weights


def published(tensors, *, raw=True, fused=False, prefix="mtp."):
    """The same as Qwen's own files have them: norms less one, experts one by one or joined."""
    found = {}
    for path, tensor in tensors.items():
        if raw and tensor.ndim == 1:
            tensor = tensor - 1
        start, stacked, part = path.partition("switch_mlp.")
        if not stacked:
            found[prefix + path] = tensor
        elif not fused:
            for number, expert in enumerate(tensor):
                found[f"{prefix}{start}experts.{number}.{part}"] = expert
        elif part.startswith("down_proj"):
            found[f"{prefix}{start}experts.down_proj"] = tensor
        elif part.startswith("gate_proj"):
            up = tensors[path.replace("gate_proj", "up_proj")]
            found[f"{prefix}{start}experts.gate_up_proj"] = mx.concatenate([tensor, up], axis=1)
    return found


def write_target(name, folder, head=None, **settings):
    """A model folder, with the tensors of a head beside the model's where they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_of(name), **settings}))
    weights = dict(tree_flatten(base_of(name).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **(head or {})})
    write_tokenizer(folder)
    return folder


def write_head(name, folder, tensors, **settings):
    """A folder of a head alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_of(name), **settings}))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder
