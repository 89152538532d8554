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

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""What config.json of an assistant's folder says."""
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

KeysAndValues = Mapping[str, tuple[mx.array, mx.array]]
"""By layer type: keys [1, H, R, Dh] and values [1, H, R, Dh] of the target's last such layer."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """An assistant's settings, as its config.json has them; checked by `from_config_json`.

    Attributes:
        backbone_hidden_size: D, the target's width.
        use_ordered_embeddings: whether logits are computed for some clusters of tokens alone.
        num_centroids: clusters that the vocabulary is divided into.
        centroid_intermediate_top_k: clusters that logits are computed for.
        tie_word_embeddings: whether the embedding is the head.
        hidden_size: Da, its own width.
        num_hidden_layers: its layers.
        layer_types: of each layer, which of the target's keys and values it reads.
        intermediate_size: of its feed-forward networks.
        num_attention_heads: heads of its queries.
        head_dim: Dh, their width in layers with a window.
        global_head_dim: Dh in layers with full attention.
        vocab_size: V.
        sliding_window: newest tokens that layers with a window read.
        rms_norm_eps: of its norms.
        rope_parameters: rotary embeddings by layer type.
        quantization: `group_size`, `bits` and maybe `mode` of packed weights; None where they are
            not packed.
    """

    backbone_hidden_size: int = setting(least=1, most=2**17)
    use_ordered_embeddings: bool = setting(False, choices=(True, False))
    num_centroids: int = setting(2048, least=1, most=2**20)
    centroid_intermediate_top_k: int = setting(32, least=1, most=2**20)
    tie_word_embeddings: bool = setting(True, choices=(True, False))
    hidden_size: int = setting(least=1, most=2**17)
    num_hidden_layers: int = setting(least=1, most=256)
    layer_types: tuple[str, ...] = setting(choices=LAYER_TYPES)
    intermediate_size: int = setting(least=1, most=2**20)
    num_attention_heads: int = setting(least=1, most=1024)
    head_dim: int = setting(256, least=2, most=2**14)
    global_head_dim: int = setting(512, least=2, most=2**14)
    vocab_size: int = setting(262_144, least=2, most=2**24)
    sliding_window: int = setting(512, least=1, most=2**31)
    rms_norm_eps: float = setting(1e-6, above=0, most=1)
    rope_parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _ROPES)
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def from_config_json(cls, path: Path, values: Mapping[str, Any]) -> AssistantConfig:
        """Make and check settings of an assistant's config.json, which is not read here.

        What the file leaves out has transformers' defaults. Settings of a model that this class
        does not describe, such as experts, are refused.

        Args:
            path: of the file, for messages.
            values: its JSON object.

        Raises:
            InputError: a setting is missing, or not allowed.
        """
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

    def mlx_lm_layer_args(self) -> gemma4_text.ModelArgs:
        """The settings of mlx-lm's layers: every layer is given its keys and values."""
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
        """Raise InputError where settings of the file `path` do not go with each other."""
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
            f"{path} has {clusters} clusters of {self.vocab_size} tokens, of which "
            f"{self.centroid_intermediate_top_k} are looked at",
            expected="clusters of one size, and no more looked at than there are",
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
    """Whether the settings of a rotary embedding are of a kind that assistants have."""
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
    """Raise InputError where an assistant's settings ask for layers of another kind."""
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
    """Clusters of tokens: a row that finds each, and its tokens, one cluster behind the other."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.zeros(config.vocab_size, mx.int32)


class AssistantModel(nn.Module):
    """An assistant's modules, under the names of published tensors.

    Args:
        config: its settings. Weights are random until they are loaded.
    """

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        width = config.hidden_size
        target_width = config.backbone_hidden_size
        self.model = _Body(config.mlx_lm_layer_args())
        self.pre_projection = nn.Linear(2 * target_width, width, bias=False)
        self.post_projection = nn.Linear(width, target_width, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.use_ordered_embeddings:
            self.masked_embedding = _Clusters(config)
        self._num_clusters = config.centroid_intermediate_top_k

    def __call__(
        self,
        embedded: mx.array,
        hidden: mx.array,
        position: mx.array,
        keys_and_values: KeysAndValues,
    ) -> tuple[mx.array, mx.array]:
        """Run a step.

        Args:
            embedded: [1, 1, D] the last token's row of the target's embedding, scaled.
            hidden: [1, 1, D] the target's normed hidden state; then what the step before returned.
            position: [1] where the root stands in the text, in every step.
            keys_and_values: the target's; all of them are seen, and none is added.

        Returns:
            [1, V] logits of the next token, and [1, 1, D] the next step's `hidden`.
        """
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            x, _, _ = layer(x, shared_kv=keys_and_values[layer.layer_type], offset=position)
        normed = self.model.norm(x)
        return self._logits_of_head_or_clusters(normed[:, 0]), self.post_projection(normed)

    def _logits_of_head_or_clusters(self, normed: mx.array) -> mx.array:
        """[1, V] logits of `normed` [1, Da]: of all tokens; or where the assistant has clusters, of
        the likeliest clusters' tokens, and -inf for the others."""
        logits: mx.array
        if "masked_embedding" in self:
            return self._cluster_logits(normed)
        head = self.lm_head if "lm_head" in self else self.model.embed_tokens.as_linear
        logits = head(normed)
        return logits

    def _cluster_logits(self, normed: mx.array) -> mx.array:
        """[1, V] logits of `normed` [1, Da], -inf but for tokens of the likeliest clusters.

        transformers gives all others a logit just below the least of these. They are so many that a
        sampled guess would mostly be one of them, so they are ruled out here.
        """
        clusters = self.masked_embedding
        order = clusters.token_ordering
        scores = clusters.centroids(normed)
        best = mx.argpartition(-scores, self._num_clusters - 1, axis=-1)[0, : self._num_clusters]
        tokens = order.reshape(scores.shape[-1], -1)[best].flatten()
        layer = self.lm_head if "lm_head" in self else self.model.embed_tokens
        found = normed @ row_weights(layer, tokens).T
        nothing = mx.full((1, order.size), -math.inf, found.dtype)
        return mx.put_along_axis(nothing, tokens[None], found, axis=-1)


def load_assistant_model(folder: Path, config: AssistantConfig, dtype: str) -> AssistantModel:
    """Build an assistant's modules on the weights of its folder.

    Args:
        folder: with all files of weights, and the config.json that `config` was read from.
        config: its settings.
        dtype: of the weights, as `ssmlx.load` takes it; packed ones are unpacked or stay as that
            says.

    Returns:
        The modules, their weights checked and not computed yet.

    Raises:
        InputError: the weights are broken, or do not fit the settings.
    """
    tensors = _load_tensors_but_tied_head(folder, config)
    model = _build_unloaded_model(config, tensors.keys(), folder / "config.json")
    _require_tensors_fit(tensors, dict(tree_flatten(model.parameters())), folder)
    if config.use_ordered_embeddings:
        order = tensors[_TOKEN_ORDERING].astype(mx.int32)
        _require_every_token_once(order, config.vocab_size, folder)
        tensors[_TOKEN_ORDERING] = order
    model.load_weights(list(tensors.items()))
    cast: Any = cast_model(model, resolve_dtype(dtype))
    return cast  # type: ignore[no-any-return]


def _load_tensors_but_tied_head(folder: Path, config: AssistantConfig) -> dict[str, mx.array]:
    """The tensors of a folder's model*.safetensors by their names there, not computed.

    Of a config whose embedding is the head, a stored head is left out. Empty where there are no
    files.

    Raises:
        InputError: a file cannot be read.
    """
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
    """An InputError that says that weights cannot be read, to be raised by the caller."""
    return InputError(
        f"{path} cannot be read ({first_line(error)})",
        expected="the whole weights of an assistant",
        do="download it again, it may be truncated",
    )


def _build_unloaded_model(
    config: AssistantConfig, stored_names: Collection[str], config_file: Path
) -> AssistantModel:
    """Build the modules of an assistant with random weights, none computed.

    Args:
        config: its settings.
        stored_names: of the folder's tensors: a layer with scales among them is packed.
        config_file: that the settings were read from, for messages.

    Raises:
        InputError: the settings ask for a packing that MLX has not.
    """
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
                expected="group_size and bits as MLX has them",
                do=_DO,
            ) from error
    return model


def _require_tensors_fit(
    tensors: Mapping[str, mx.array], expected: Mapping[str, mx.array], folder: Path
) -> None:
    """Check an assistant's tensors against those of its modules; they are read whole.

    Args:
        tensors: as read.
        expected: by name, of the shapes and kinds that are wanted.
        folder: named in messages.

    Raises:
        InputError: some are missing, superfluous, of another shape or kind, not finite, or cannot
            be read.
    """
    shapes = {name: tuple(array.shape) for name, array in expected.items()}
    whole = [name for name, array in expected.items() if not _is_float(array)]
    try:
        check_tensors(tensors, shapes, folder, of_any_dtype=whole)
    except RuntimeError as error:
        raise _unreadable_error(folder, error) from error


def _require_every_token_once(order: mx.array, vocab_size: int, folder: Path) -> None:
    """Raise InputError unless `order` has each of the ids below `vocab_size` once."""
    all_tokens = mx.arange(vocab_size, dtype=mx.int32)
    require(
        bool(mx.array_equal(mx.sort(order), all_tokens)),
        f"{folder} has a {_TOKEN_ORDERING} that does not name every token once",
        expected=f"the {vocab_size} tokens in some order",
        do=_DO,
    )


def _is_float(array: mx.array) -> bool:
    """Whether an array is of floats."""
    return mx.issubdtype(array.dtype, mx.floating)
