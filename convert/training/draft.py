"""A draft model: the first layers of a base model, trained to say what the base model says.

It keeps the base's embedding, first K layers, final norm and LM head. Layers and norm are trained.
The first ones, because each of them then sees the states that it was pretrained on: only the norm
and the head meet others. So it is a stream-fused model without streams, whose upper layers are
all that it has, and its loss is that of the main stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ssmlx.loading.files import new_folder
from ssmlx.settings import StreamConfig, read_json
from ssmlx.training.data import Batch
from ssmlx.training.objective import MAIN, answers
from ssmlx.tuning.replay import Replay

from ..base import copy_settings, load_base
from ..reference.model import StreamFusedReference
from .run import TorchObjective

_TRAINED = ("layers", "norm", "final_layernorm", "final_layer_norm")
# What a config.json says of the weights that it came with; those written here are float32.
_OF_THE_WEIGHTS = ("quantization", "quantization_config", "dtype", "torch_dtype")


def load_first_layers(path: Path, num_layers: int) -> Any:
    """A base model of transformers in float32, without its layers from `num_layers` on."""
    base = load_base(path, attn_implementation="sdpa")
    decoder = base.get_decoder()
    decoder.layers = decoder.layers[:num_layers]
    base.config.num_hidden_layers = num_layers
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = base.config.layer_types[:num_layers]
    return base


def build_draft(path: Path, config: StreamConfig, num_layers: int) -> StreamFusedReference:
    """The draft model of K layers, these and its norm to be trained.

    `config` has the settings of a model without streams.
    """
    settings = replace(config, num_layers=num_layers, num_msa_layers=num_layers)
    model = StreamFusedReference(load_first_layers(path, num_layers), settings)
    for name in _TRAINED:
        part = getattr(model.decoder.module, name, None)
        if part is not None:
            part.requires_grad_(True)
    return model


class DraftObjective(TorchObjective):
    """Cross-entropy of the answers, and held-out text replayed with chains of drafted tokens."""

    @torch.no_grad()
    def replay(self, batch: Batch, lower: torch.Tensor, size: int) -> Replay:
        """The target calls of decoding the answers with chains of `size` drafted tokens."""
        hidden = self.upper(batch, lower.to(self.device)).main
        carriers = self.tensor(batch.carriers)
        num_tokens = num_calls = 0
        for row, answer in enumerate(answers(batch)):
            states = hidden[row, carriers[: len(answer)]]
            said = self.logits(states, MAIN).argmax(-1).cpu().numpy()
            num_tokens += len(answer)
            num_calls += chain_calls(said == answer, size)
        return Replay(num_tokens, num_calls)


def chain_calls(agrees: np.ndarray, num_draft_tokens: int) -> int:
    """Target calls that an answer takes; the first comes with the prompt.

    As long as a chain agrees with the text, its next token is the one that the text before it
    calls for: so one forward over the text tells where every chain would end.

    `agrees` [A] says whether the draft model's likeliest token is the answer's.
    """
    place, calls = 0, 1
    while place + 1 < len(agrees):
        # The call before gave the token at `place`; the chain goes on from it.
        chain = agrees[place + 1 : place + 1 + num_draft_tokens]
        place += 1 + (len(chain) if chain.all() else int(chain.argmin()))
        calls += 1
    return calls


def trained_weights(model: StreamFusedReference) -> dict[str, torch.Tensor]:
    """What was trained, under the base model's names."""
    named = model.base.named_parameters()
    return {name: p.detach().cpu() for name, p in named if p.requires_grad}


def write_draft(
    trained: Mapping[str, torch.Tensor], source: Path, num_layers: int, target: Path
) -> None:
    """Write a model folder that mlx-lm and transformers load, in float32.

    What was not `trained` is the base model's, unrounded, of the folder `source`. A folder `target`
    that exists is replaced.
    """
    base = load_first_layers(source, num_layers)
    base.load_state_dict(trained, strict=False)
    tensors = base.state_dict()
    if base.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    settings = read_json(source / "config.json", "a model folder")
    settings = {name: value for name, value in settings.items() if name not in _OF_THE_WEIGHTS}
    settings["num_hidden_layers"] = num_layers
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:num_layers]
    with new_folder(target) as folder:
        copy_settings(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
