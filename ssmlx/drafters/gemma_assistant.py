"""Gemma 4's assistants: small models that draft from the target's own keys and values.

An assistant has only queries. Its layers read what the target's last layer with full attention,
and its last with a window, keep of the text. For the target's width D, the assistant's width Da, a
step from the text's last token t at position p is:

    x = pre_projection([scaled target embedding of t; h])     [1, 1, 2 D] to [1, 1, Da]
    y = norm(layers(x)), every query at position p            [1, 1, Da]
    logits = y times the assistant's embedding                [1, V]
    h = post_projection(y)                                    [1, 1, D], of the next step

At first h is the target's last hidden state after its final norm, of the row that predicted t. Each
step's t is the token that the step before drafted; p stays that of the first.

The keys and values are those of all tokens before t, in layers with a window of W tokens those of
the newest W. transformers' loop also leaves the row of one rejected token among them, and in long
texts one token more than W: neither is wanted, and both change only guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import get_total_parameters

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Needs, Taps, Verified
from ..decoding.sampling import Sampling
from ..errors import require
from ..loading.load import is_quantised
from ..model.backbone import Backbone
from ..model.family import model_type
from ..model.modules import module_arrays
from ..model.text_cache import TextCache
from ..model.tree import Tree, chain_tree
from ..policy.offers import LevelsOffer
from .chain import ChainRanking, UnacceptedDrafts
from .gemma_assistant_model import (
    AssistantConfig,
    AssistantModel,
    KeysAndValues,
    load_assistant_model,
)
from .mtp_head import quantise_like

_PAIR = "choose the assistant that was made for this model"


@dataclass(frozen=True, eq=False)
class Assistant:
    """An assistant that was loaded for a target; it is only read, so answers share it."""

    config: AssistantConfig
    model: AssistantModel
    layers: Mapping[str, int]  # by layer type, the target's layer whose keys and values are read
    folder: Path
    drafter: str = "mtp"

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in module_arrays(self.model))

    @property
    def num_parameters(self) -> int:
        """The number of parameters; packed ones are counted one by one."""
        return int(get_total_parameters(self.model))

    def require_fits(self, backbone: Backbone) -> None:
        layers = _layers_to_read(self.config, backbone, self.folder)
        require(
            layers == self.layers,
            f"{self.folder} was loaded for a model with other layers",
            expected="this model",
            do="load it for this model",
        )

    def visible_keys_and_values(self, cache: TextCache) -> KeysAndValues:
        found = {}
        for kind, layer in self.layers.items():
            keys, values = cache.keys_and_values(layer)
            if kind == "sliding_attention":
                first = -self.config.sliding_window
                keys, values = keys[..., first:, :], values[..., first:, :]
            found[kind] = keys, values
        return found


class AssistantDrafter:
    """Drafts a chain, each token by a step of an assistant.

    The steps are one graph: no drafted token is read by the host. If the target samples, guesses
    are drawn under the same settings and with the same noise for each position.
    """

    cache_bytes = 0

    def __init__(
        self,
        assistant: Assistant,
        backbone: Backbone,
        max_tokens: int,  # K, the most tokens of a chain
        sampling: Sampling,  # how guesses are ranked
    ) -> None:
        assistant.require_fits(backbone)
        self.largest = DraftShape(assistant.drafter, 1 + max_tokens, max_tokens)
        self._last_layer = len(backbone.layers)
        self.needs = Needs(taps=(self._last_layer,), host_tokens=True)
        self.num_parameters = assistant.num_parameters
        self.draft_model_calls = 0
        self._assistant = assistant
        self._backbone = backbone
        self._sampling = sampling
        self.start([])

    def start(self, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        self._unaccepted = UnacceptedDrafts("the assistant", _PAIR)

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        self._unaccepted.note_accepted(len(tokens) - 1)
        self._text.extend(tokens)

    def offer(self) -> LevelsOffer | None:
        return None if self._unaccepted.has_warned else LevelsOffer(self.largest)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        backbone = self._backbone
        row = verified.taps[self._last_layer][:, verified.acceptance.last]
        hidden = backbone.final_norm(row)
        seen = self._assistant.visible_keys_and_values(verified.cache)
        position = verified.root_position
        ranking = ChainRanking(self._sampling, self._text)
        scale: float = backbone.parts.decoder.embed_scale  # of what Gemma's layers are given
        chain = [verified.root]
        for _ in range(min(shape.levels, self.largest.levels)):
            embedded = backbone.token_embeddings(chain[-1][None]) * scale
            logits, hidden = self._assistant.model(embedded, hidden, position, seen)
            self.draft_model_calls += 1
            chain.append(ranking.rank(logits))
        self._unaccepted.note_chain(len(chain) - 1)
        tree = chain_tree(mx.concatenate(chain))
        # Done before the next call writes to the caches that it reads, which would be copied.
        mx.async_eval(tree.tokens)
        return tree


def load_assistant(
    folder: Path,
    values: Mapping[str, Any],  # its config.json
    backbone: Backbone,
    dtype: str = "auto",  # as `ssmlx.load` takes it
) -> Assistant:
    """Load an assistant, computed, in the target's dtype. If the target's weights are packed and
    the assistant's are not, these are packed alike."""
    config = AssistantConfig.from_config_json(folder / "config.json", values)
    layers = _layers_to_read(config, backbone, folder)
    model = load_assistant_model(folder, config, dtype)
    model.set_dtype(backbone.dtype)
    if not is_quantised(model):
        quantise_like(backbone.model, model)
    mx.eval(module_arrays(model))
    return Assistant(config, model, layers, folder)


def _layers_to_read(config: AssistantConfig, backbone: Backbone, folder: Path) -> dict[str, int]:
    """The number, by layer type, of the target's last layer that keeps keys and values of its
    own."""
    kind = model_type(backbone.model)
    require(
        kind.startswith("gemma4"),
        f"{folder} is an assistant of Gemma 4, but the target is a {kind}",
        expected="a Gemma 4 model",
        do="choose one with --model, or another drafter",
    )
    backbone.capabilities.require("last_hidden", "an assistant")
    sizes = {
        "width": (config.backbone_hidden_size, backbone.hidden_size),
        "vocabulary": (config.vocab_size, backbone.vocab_size),
    }
    found: dict[str, int] = {}
    for number, layer in enumerate(backbone.layers):
        if layer.self_attn.has_kv:
            found[layer.layer_type] = number
    for layer_type in dict.fromkeys(config.layer_types):
        require(
            layer_type in found,
            f"{folder} reads layers of the type {layer_type}, which the target lacks",
            expected="layers of the types " + ", ".join(found),
            do=_PAIR,
        )
        attention = backbone.layers[found[layer_type]].self_attn
        name = f"heads of {layer_type}"
        sizes[f"width of {name}"] = config.head_width(layer_type), attention.head_dim
        require(
            config.num_attention_heads % attention.n_kv_heads == 0,
            f"{folder} has {config.num_attention_heads} {name}",
            expected=f"a multiple of the target's {attention.n_kv_heads}",
            do=_PAIR,
        )
    for name, (own, targets) in sizes.items():
        require(
            own == targets,
            f"{folder} is for a target with a {name} of {own}",
            expected=f"{targets}, as in this target",
            do=_PAIR,
        )
    return {layer_type: found[layer_type] for layer_type in config.layer_types}
