"""The files and modules of Gemma 4's assistants, see `gemma_assistant`.

The equations are those of transformers' `Gemma4AssistantForCausalLM`. The layers are mlx-lm's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text

from ..errors import InputError, first_line, quoted, require
from ..json_files import build_settings
from ..loading.load import cast_model, resolve_dtype
from ..loading.tensors import check_tensors
from ..model.lm_head import row_weights
from ..settings import check_settings, setting

# What config.json of an assistant's folder says.
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
LAYER_TYPES = ("full_attention", "sliding_attention")
_ACTIVATION = "gelu_pytorch_tanh"
_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_TOKEN_ORDERING = "masked_embedding.token_ordering"
_DO = "download it again, or choose an assistant of Gemma 4"

# By layer type: keys [1, H, R, Dh] and values [1, H, R, Dh] of the target's last such layer.
KeysAndValues = Mapping[str, tuple[mx.array, mx.array]]


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """An assistant's settings, as its config.json has them; checked by `from_config_json`."""

    backbone_hidden_size: int = setting(least=1, most=2**17)  # D, the target's width
    # only tokens of some clusters get logits
    use_ordered_embeddings: bool = setting(False, choices=(True, False))
    # clusters that the vocabulary is divided into
    num_centroids: int = setting(2048, least=1, most=2**20)
    # clusters that logits are computed for
    centroid_intermediate_top_k: int = setting(32, least=1, most=2**20)
    tie_word_embeddings: bool = setting(True, choices=(True, False))  # the embedding is the head
    hidden_size: int = setting(least=1, most=2**17)  # Da, its own width
    num_hidden_layers: int = setting(least=1, most=256)
    # of the target's keys and values that each layer reads
    layer_types: tuple[str, ...] = setting(choices=LAYER_TYPES)
    intermediate_size: int = setting(least=1, most=2**20)
    num_attention_heads: int = setting(least=1, most=1024)
    head_dim: int = setting(256, least=2, most=2**14)  # Dh in layers with a window
    global_head_dim: int = setting(512, least=2, most=2**14)  # Dh in layers with full attention
    vocab_size: int = setting(262_144, least=2, most=2**24)  # V
    # newest tokens that layers with a window read
    sliding_window: int = setting(512, least=1, most=2**31)
    rms_norm_eps: float = setting(1e-6, above=0, most=1)
    rope_parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _ROPES)
    # `group_size`, `bits` and maybe `mode` of packed weights
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def from_config_json(cls, path: Path, values: Mapping[str, Any]) -> AssistantConfig:
        """Read a config.json. What it leaves out has transformers' defaults; settings of another
        model, such as experts, are refused."""
        text: Any = values.get("text_config")
        require(
            isinstance(text, dict),
            f"{path} has {quoted(text)} for text_config",
            expected="the settings of the assistant's layers",
            do=_DO,
        )
        given: dict[str, Any] = {**text, **values}
        _refuse_other_layers(path, given)
        config = build_settings(cls, given, path, do=_DO)
        check_settings(config, found=f"{path} has {{value!r}} for {{name}}", do=_DO)
        config._require_consistent(path)
        return config

    def layer_args(self) -> gemma4_text.ModelArgs:
        """Arguments of mlx-lm's layers, each of which gets its keys and values from the target."""
        names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
        more = ("head_dim", "global_head_dim", "vocab_size", "sliding_window", "rms_norm_eps")
        return gemma4_text.ModelArgs(
            **{name: getattr(self, name) for name in (*names, *more)},
            layer_types=list(self.layer_types),
            rope_parameters={kind: dict(one) for kind, one in self.rope_parameters.items()},
            num_kv_shared_layers=self.num_hidden_layers,
            hidden_size_per_layer_input=0,
            use_double_wide_mlp=False,
        )

    def head_width(self, layer_type: str) -> int:
        """Dh of the queries in layers of a type."""
        return self.global_head_dim if layer_type == "full_attention" else self.head_dim

    def _require_consistent(self, path: Path) -> None:
        require(
            len(self.layer_types) == self.num_hidden_layers,
            f"{path} has {len(self.layer_types)} layer_types",
            expected=f"one for each of its {self.num_hidden_layers} layers",
            do=_DO,
        )
        clusters = self.num_centroids
        fits = self.vocab_size % clusters == 0 and self.centroid_intermediate_top_k <= clusters
        require(
            fits or not self.use_ordered_embeddings,
            f"{path} has {clusters} clusters for {self.vocab_size} tokens, and uses "
            f"{self.centroid_intermediate_top_k}",
            expected="clusters of one size, and at most all of them used",
            do=_DO,
        )
        ropes: Any = self.rope_parameters
        for kind in self.layer_types:
            rope = ropes.get(kind) if isinstance(ropes, dict) else None
            require(
                isinstance(rope, dict) and _is_known_rope(rope),
                f"{path} has {quoted(rope)} for the rotary embedding of {kind}",
                expected="rope_type default or proportional, with numbers",
                do=_DO,
            )


def _is_known_rope(rope: Mapping[str, Any]) -> bool:
    numbers = {
        "rope_theta": (1.0, 1e12),
        "partial_rotary_factor": (0.0, 1.0),
        "factor": (0.0, 1e6),
    }
    given = {name: rope[name] for name in numbers if rope.get(name) is not None}
    return (
        rope.get("rope_type") in ("default", "proportional")
        and "rope_theta" in given
        and all(
            isinstance(value, int | float) and numbers[name][0] < value <= numbers[name][1]
            for name, value in given.items()
        )
    )


def _refuse_other_layers(path: Path, given: Mapping[str, Any]) -> None:
    layers = given.get("num_hidden_layers")
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_activation": (_ACTIVATION,),
        "attention_bias": (False,),
        "enable_moe_block": (False,),
        "use_double_wide_mlp": (False,),
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0, layers),
    }
    for name, values in allowed.items():
        value = given.get(name)
        require(
            value is None or value in values,
            f"{path} has {quoted(value)} for {name}",
            expected=str(values[-1]),
            do=_DO,
        )


class _Body(nn.Module):
    """Embedding, layers and norm, under the names of published tensors."""

    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, n) for n in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _Clusters(nn.Module):
    """A row that finds each cluster of tokens, and the clusters' tokens, one cluster after the
    other."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.zeros(config.vocab_size, mx.int32)


class AssistantModel(nn.Module):
    """An assistant's modules, under the names of published tensors; random weights until they are
    loaded."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        width = config.hidden_size
        target_width = config.backbone_hidden_size
        self.model = _Body(config.layer_args())
        self.pre_projection = nn.Linear(2 * target_width, width, bias=False)
        self.post_projection = nn.Linear(width, target_width, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.use_ordered_embeddings:
            self.masked_embedding = _Clusters(config)
        self._num_clusters = config.centroid_intermediate_top_k

    def __call__(
        self,
        embedded: mx.array,  # [1, 1, D] the last token's row of the target's embedding, scaled
        hidden: mx.array,  # [1, 1, D] the target's normed state; then what the step before returned
        position: mx.array,  # [1] the root's position in the text, in every step
        keys_and_values: KeysAndValues,  # the target's; all are seen, none is added
    ) -> tuple[mx.array, mx.array]:
        """Run a step: [1, V] logits of the next token, and [1, 1, D] the next step's `hidden`."""
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            x, _, _ = layer(x, shared_kv=keys_and_values[layer.layer_type], offset=position)
        normed = self.model.norm(x)
        return self._logits(normed[:, 0]), self.post_projection(normed)

    def _logits(
        self,
        normed: mx.array,  # [1, Da]
    ) -> mx.array:  # [1, V]
        logits: mx.array
        if "masked_embedding" in self:
            return self._cluster_logits(normed)
        head = self.lm_head if "lm_head" in self else self.model.embed_tokens.as_linear
        logits = head(normed)
        return logits

    def _cluster_logits(
        self,
        normed: mx.array,  # [1, Da]
    ) -> mx.array:  # [1, V]
        """Logits, -inf except for tokens of the likeliest clusters. transformers gives all others a
        logit just below the least of these: they are so many that a sampled guess would mostly be
        one of them."""
        clusters = self.masked_embedding
        order = clusters.token_ordering
        scores = clusters.centroids(normed)
        best = mx.argpartition(-scores, self._num_clusters - 1, axis=-1)[0, : self._num_clusters]
        tokens = order.reshape(scores.shape[-1], -1)[best].flatten()
        layer = self.lm_head if "lm_head" in self else self.model.embed_tokens
        found = normed @ row_weights(layer, tokens).T
        nothing = mx.full((1, order.size), -math.inf, found.dtype)
        return mx.put_along_axis(nothing, tokens[None], found, axis=-1)


def load_assistant_model(
    folder: Path,
    config: AssistantConfig,  # that the folder's config.json holds
    dtype: str,  # as `ssmlx.load` takes it, which decides whether packed weights are unpacked
) -> AssistantModel:
    """Load an assistant; its weights are checked and not computed yet."""
    tensors = _load_tensors(folder, config)
    model = _build_model(config, tensors.keys(), folder / "config.json")
    _require_tensors_fit(tensors, dict(tree_flatten(model.parameters())), folder)
    if config.use_ordered_embeddings:
        order = tensors[_TOKEN_ORDERING].astype(mx.int32)
        _require_permutation(order, config.vocab_size, folder)
        tensors[_TOKEN_ORDERING] = order
    model.load_weights(list(tensors.items()))
    cast: Any = cast_model(model, resolve_dtype(dtype))
    return cast  # type: ignore[no-any-return]


def _load_tensors(folder: Path, config: AssistantConfig) -> dict[str, mx.array]:
    """The tensors by their names in model*.safetensors, not computed; without a stored head if the
    embedding is the head."""
    tensors: dict[str, mx.array] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            loaded: Any = mx.load(str(path), format="safetensors")
        except (RuntimeError, ValueError, OSError) as error:
            raise _unreadable_error(path, error) from error
        tensors |= loaded
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def _unreadable_error(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} cannot be read ({first_line(error)})",
        expected="all weights of an assistant",
        do="download it again, since it may be truncated",
    )


def _build_model(
    config: AssistantConfig,
    # of the folder's tensors: a layer with scales among them is packed
    stored_names: Collection[str],
    config_file: Path,  # for messages
) -> AssistantModel:
    """An assistant with random weights, none computed."""
    model = AssistantModel(config)
    if config.quantization is not None:
        packing = {
            name: config.quantization[name]
            for name in ("group_size", "bits", "mode")
            if name in config.quantization
        }
        try:
            nn.quantize(
                model,
                **packing,
                class_predicate=lambda name, module: (
                    hasattr(module, "to_quantized") and f"{name}.scales" in stored_names
                ),
            )
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{config_file} has {quoted(packing)} for quantization ({first_line(error)})",
                expected="group_size and bits that MLX supports",
                do=_DO,
            ) from error
    return model


def _require_tensors_fit(
    tensors: Mapping[str, mx.array],
    expected: Mapping[str, mx.array],  # by name, of the wanted shapes and kinds
    folder: Path,  # for messages
) -> None:
    """Reads the tensors whole."""
    shapes = {name: tuple(array.shape) for name, array in expected.items()}
    whole = [
        name for name, array in expected.items() if not mx.issubdtype(array.dtype, mx.floating)
    ]
    try:
        check_tensors(tensors, shapes, folder, of_any_dtype=whole)
    except RuntimeError as error:
        raise _unreadable_error(folder, error) from error


def _require_permutation(order: mx.array, vocab_size: int, folder: Path) -> None:
    all_tokens = mx.arange(vocab_size, dtype=mx.int32)
    require(
        bool(mx.array_equal(mx.sort(order), all_tokens)),
        f"{folder} has a {_TOKEN_ORDERING} that does not name every token once",
        expected=f"the {vocab_size} tokens in some order",
        do=_DO,
    )
