"""Heads and assistants that were trained to draft for a published model, by their names on the Hub.

Data alone: `model_heads` looks them up. Only publicly documented heads are listed, each row under
the pages where its names, sizes and licence were read.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownHead:
    model: str
    families: tuple[str, ...]  # mlx-lm's files that have its class, such as "qwen3_5"
    hidden_size: int  # D
    num_layers: int
    vocab_size: int  # V
    # what the model's name has to contain, in lower case, as other generations have the same sizes;
    # "" if the sizes are unique
    generation: str = ""
    # of the head on the Hub, in several precisions; the first is the one to download
    repositories: tuple[str, ...]
    licence: str = "Apache-2.0"  # of the head, or of the model that it is part of


# mlx-lm's files of classes whose checkpoints may have an MTP head that `--drafter mtp` takes.
OWN_HEAD_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def _qwen(
    model: str,
    family: str,
    hidden_size: int,
    num_layers: int,
    precisions: str,
    generation: str = "",
) -> KnownHead:
    return KnownHead(
        model=model,
        families=(family,),
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=248_320,
        generation=generation,
        repositories=tuple(f"mlx-community/{model}-MTP-{one}" for one in precisions.split()),
    )


def _gemma(size: str, hidden_size: int, num_layers: int, precisions: str) -> KnownHead:
    head = f"gemma-4-{size}-it-assistant"
    converted = (f"mlx-community/{head}-{one}" for one in precisions.split())
    return KnownHead(
        model=f"Gemma 4 {size}",
        families=("gemma4", "gemma4_text"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=262_144,
        repositories=(*converted, f"google/{head}"),
    )


# Heads of other models are given with `--drafter "mtp model="`.
KNOWN_HEADS = (
    # https://huggingface.co/mlx-community/Qwen3.8-27B-MTP-4bit
    # https://github.com/lablup/mlxcel/issues/1165
    # https://github.com/raullenchai/Rapid-MLX/issues/3140
    _qwen("Qwen3.8-27B", "qwen3_5", 5120, 64, "4bit 8bit bf16", "qwen3.8"),
    # https://huggingface.co/mlx-community/Qwen3.6-27B-MTP-bf16
    # https://github.com/Blaizzy/mlx-vlm/blob/main/mlx_vlm/speculative/drafters/qwen3_5_mtp/README.md
    # https://huggingface.co/Qwen/Qwen3.6-27B
    _qwen("Qwen3.6-27B", "qwen3_5", 5120, 64, "4bit bf16", "qwen3.6"),
    # https://huggingface.co/Kagemusha07/collections
    # https://github.com/jundot/omlx/pull/1791
    # https://huggingface.co/Qwen/Qwen3.6-35B-A3B
    _qwen("Qwen3.6-35B-A3B", "qwen3_5_moe", 2048, 40, "4bit 5bit bf16", "qwen3.6"),
    # https://huggingface.co/mlx-community/Qwen3.5-9B-MTP-4bit
    # https://apxml.com/models/qwen35-9b
    _qwen("Qwen3.5-9B", "qwen3_5", 4096, 32, "4bit bf16"),
    # https://github.com/Blaizzy/mlx-vlm/blob/main/mlx_vlm/speculative/drafters/qwen3_5_mtp/README.md
    # https://github.com/Blaizzy/mlx-vlm/pull/1167
    # https://apxml.com/models/qwen35-4b
    _qwen("Qwen3.5-4B", "qwen3_5", 2560, 32, "4bit bf16"),
    # https://github.com/Blaizzy/mlx-vlm/blob/main/mlx_vlm/speculative/drafters/gemma4_assistant/README.md
    # https://github.com/ddalcu/mlx-serve/issues/84
    # https://huggingface.co/google/gemma-4-31B-it-assistant
    _gemma("31B", 5376, 60, "bf16"),
    # https://github.com/Blaizzy/mlx-vlm/blob/main/mlx_vlm/speculative/drafters/gemma4_assistant/README.md
    # https://github.com/jundot/omlx/issues/1071
    _gemma("26B-A4B", 2816, 30, "bf16"),
    # https://github.com/lablup/mlxcel/issues/154
    # https://github.com/xorbitsai/inference/pull/5241
    # https://huggingface.co/google/gemma-4-12B-it-assistant
    _gemma("12B", 3840, 48, "bf16 4bit"),
    # https://huggingface.co/mlx-community/gemma-4-E4B-it-assistant-bf16
    # https://github.com/vllm-project/tpu-inference/pull/2690
    _gemma("E4B", 2560, 42, "bf16"),
    # https://github.com/Blaizzy/mlx-vlm/blob/main/mlx_vlm/speculative/drafters/gemma4_assistant/README.md
    # https://github.com/vllm-project/tpu-inference/pull/2690
    _gemma("E2B", 1536, 35, "bf16"),
)
