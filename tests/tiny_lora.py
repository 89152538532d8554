"""Folders of LoRA for tiny models, as mlx-lm and PEFT write them."""

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save_config

from ssmlx.loading.folders import PEFT_FILE

TOKENS = mx.array([5, 2, 3, 11, 7, 1, 40, 9])
FILE = "adapters.safetensors"
SETTINGS = "adapter_config.json"


def write_lora(folder, base, **settings):
    """`mlx_lm_lora` for a folder of `write_family`."""
    return mlx_lm_lora(folder, mlx_lm.load(str(base))[0], **settings)


def mlx_lm_lora(folder, model, *, dora=False, keys=None, num_layers=2, rank=4, scale=3.0, seed=0):
    """The folder that `mlx_lm.lora` writes for a model of mlx-lm's, trained weights at random."""
    model.freeze()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    parameters |= {} if keys is None else {"keys": keys}
    linear_to_lora_layers(model, num_layers, parameters, use_dora=dora)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, array in tree_flatten(model.trainable_parameters()):
        leaf = name.rpartition(".")[2]
        drawn = rng.normal(0, 0.3, array.shape)
        tensors[name] = array * mx.array(1 + drawn) if leaf == "m" else mx.array(drawn, mx.float32)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / FILE), tensors)
    settings = {"fine_tune_type": "dora" if dora else "lora", "num_layers": num_layers}
    save_config({**settings, "lora_parameters": parameters}, folder / SETTINGS)
    return folder


PEFTS = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": "all-linear"}


def write_pefts(folder, tensors, **settings):
    """The tensors of `write_lora`, as PEFT writes them, by its names and transposed."""
    folder.mkdir(parents=True)
    named = {}
    for name, array in tensors.items():
        path, _, leaf = name.rpartition(".lora_")
        named[f"base_model.model.{path}.lora_{leaf.upper()}.weight"] = array.T
    mx.save_safetensors(str(folder / PEFT_FILE), named)
    save_config({**PEFTS, **settings}, folder / SETTINGS)
    return folder


def logits(model):
    """[T, V] of `TOKENS`, by the stages that decoding runs."""
    return model.append(TOKENS, model.make_cache()).logits.astype(mx.float32)
