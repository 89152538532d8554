"""Which models compute the same keys and values for the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .streams import StreamFusedModel


@dataclass(frozen=True)
class CacheKey:
    """What decides the keys and values of a token sequence beside its tokens.

    Models with equal keys may continue each other's caches. LoRA that acts on every row counts,
    merged into the weights or not, as that differs by rounding alone. Streams, and LoRA of the
    scope "streams", leave a prompt's rows as they are and do not count.

    Attributes:
        model: the model type, its number of layers and its width, in words.
        dtype: of the activations, such as "float32".
        weights: digest of the base model's settings and weights.
        lora: digest of the LoRA that acts on every row, or "none".
    """

    model: str
    dtype: str
    weights: str
    lora: str

    @classmethod
    def of(cls, model: StreamFusedModel) -> CacheKey:
        """The key of a model, as it answers now: with its LoRA on every row, if it has any.

        Computes the digest of the base model's weights where it was not asked for before, so it has
        to run on the thread that runs MLX.
        """
        backbone = model.backbone
        kind = getattr(backbone.model, "model_type", type(backbone.model).__name__)
        return cls(
            model=f"{kind}, {model.num_layers} layers of {backbone.hidden_size}",
            dtype=str(backbone.dtype).removeprefix("mlx.core."),
            weights=backbone.digest,
            lora=model.lora_digest or "none",
        )
