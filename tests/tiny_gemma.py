"""Tiny models of Gemma 4, and assistants of them."""

import json
from copy import deepcopy
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models import gemma4, gemma4_text
from tiny_classes import random_weights

from ssmlx.drafters.gemma_assistant_model import AssistantConfig, AssistantModel
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel

VOCAB = 64
WINDOW = 8
TARGET = {
    "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 6, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0, "max_position_embeddings": 1024,
}  # fmt: skip
TARGETS = {
    # As 31B: full attention has heads of its own, whose keys are its values.
    "large": {**TARGET, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # As E2B: the last layers read the keys and values of earlier ones; inputs for each layer; in a
    # model that also sees.
    "small": {
        "model_type": "gemma4", "vocab_size": VOCAB,
        "text_config": {
            **TARGET, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
        },
    },
}  # fmt: skip
TEXT_CONFIG = {
    "model_type": "gemma4_text", "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "vocab_size": VOCAB, "vocab_size_per_layer_input": 0, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0, "max_position_embeddings": 1024,
}  # fmt: skip
CONFIG = {
    "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 32, "use_ordered_embeddings": False, "num_centroids": 16,
    "centroid_intermediate_top_k": 5, "tie_word_embeddings": True, "text_config": TEXT_CONFIG,
}  # fmt: skip


@lru_cache(maxsize=4)
def make_target(name, bits=None):
    """A random target, with weights of 4 bits or so where `bits` is given."""
    config = deepcopy(TARGETS[name])
    file = gemma4 if "text_config" in config else gemma4_text
    model = file.Model(file.ModelArgs.from_dict(config))
    model.update(tree_unflatten(list(random_weights(model).items())))
    if bits:
        nn.quantize(
            model,
            group_size=32,
            bits=bits,
            class_predicate=lambda _, one: (
                hasattr(one, "to_quantized") and one.weight.shape[-1] % 32 == 0
            ),
        )
    mx.eval(model.parameters())
    return StreamFusedModel(Backbone(model))


def changed(config, **changes):
    """Settings with some changed, wherever they stand."""
    config = deepcopy(config)
    for name, value in changes.items():
        (config["text_config"] if name in TEXT_CONFIG else config)[name] = value
    return config


def write_assistant(folder, tensors=None, **changes):
    """A folder with an assistant of random weights, some of them as given; None drops one."""
    folder.mkdir()
    values = changed(CONFIG, **changes)
    (folder / "config.json").write_text(json.dumps(values))
    model = AssistantModel(AssistantConfig.from_config_json(folder / "config.json", values))
    weights = random_weights(model)
    if "masked_embedding.token_ordering" in weights:
        order = np.random.default_rng(0).permutation(VOCAB)
        weights["masked_embedding.token_ordering"] = mx.array(order, mx.int64)
    weights |= tensors or {}
    weights = {name: one for name, one in weights.items() if one is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder
