"""Heads and assistants that were trained to draft for a published model, and where the Hub has
them. Data alone: `model_heads` looks them up.

Only publicly documented heads are listed; `read_at` gives the sources.
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
    licence: str  # of the head, or of the model that it is part of
    read_at: tuple[str, ...]  # sources of names, sizes and licence


# mlx-lm's files of classes whose checkpoints may have an MTP head that `--drafter mtp` takes.
OWN_HEAD_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

_QWEN_VOCAB = 248_320
_GEMMA_VOCAB = 262_144
_GEMMA = ("gemma4", "gemma4_text")
_MLX_VLM = "https://github.com/Blaizzy/mlx-vlm/blob/main/mlx_vlm/speculative/drafters"

# Heads of other models are given with `--drafter "mtp model="`.
KNOWN_HEADS = (
    KnownHead(
        model="Qwen3.8-27B",
        families=("qwen3_5",),
        hidden_size=5120,
        num_layers=64,
        vocab_size=_QWEN_VOCAB,
        generation="qwen3.8",
        repositories=(
            "mlx-community/Qwen3.8-27B-MTP-4bit",
            "mlx-community/Qwen3.8-27B-MTP-8bit",
            "mlx-community/Qwen3.8-27B-MTP-bf16",
        ),
        licence="Apache-2.0",
        read_at=(
            "https://huggingface.co/mlx-community/Qwen3.8-27B-MTP-4bit",
            "https://github.com/lablup/mlxcel/issues/1165",
            "https://github.com/raullenchai/Rapid-MLX/issues/3140",
        ),
    ),
    KnownHead(
        model="Qwen3.6-27B",
        families=("qwen3_5",),
        hidden_size=5120,
        num_layers=64,
        vocab_size=_QWEN_VOCAB,
        generation="qwen3.6",
        repositories=(
            "mlx-community/Qwen3.6-27B-MTP-4bit",
            "mlx-community/Qwen3.6-27B-MTP-bf16",
        ),
        licence="Apache-2.0",
        read_at=(
            "https://huggingface.co/mlx-community/Qwen3.6-27B-MTP-bf16",
            f"{_MLX_VLM}/qwen3_5_mtp/README.md",
            "https://huggingface.co/Qwen/Qwen3.6-27B",
        ),
    ),
    KnownHead(
        model="Qwen3.6-35B-A3B",
        families=("qwen3_5_moe",),
        hidden_size=2048,
        num_layers=40,
        vocab_size=_QWEN_VOCAB,
        generation="qwen3.6",
        repositories=(
            "mlx-community/Qwen3.6-35B-A3B-MTP-4bit",
            "mlx-community/Qwen3.6-35B-A3B-MTP-5bit",
            "mlx-community/Qwen3.6-35B-A3B-MTP-bf16",
        ),
        licence="Apache-2.0",
        read_at=(
            "https://huggingface.co/Kagemusha07/collections",
            "https://github.com/jundot/omlx/pull/1791",
            "https://huggingface.co/Qwen/Qwen3.6-35B-A3B",
        ),
    ),
    KnownHead(
        model="Qwen3.5-9B",
        families=("qwen3_5",),
        hidden_size=4096,
        num_layers=32,
        vocab_size=_QWEN_VOCAB,
        repositories=(
            "mlx-community/Qwen3.5-9B-MTP-4bit",
            "mlx-community/Qwen3.5-9B-MTP-bf16",
        ),
        licence="Apache-2.0",
        read_at=(
            "https://huggingface.co/mlx-community/Qwen3.5-9B-MTP-4bit",
            "https://apxml.com/models/qwen35-9b",
        ),
    ),
    KnownHead(
        model="Qwen3.5-4B",
        families=("qwen3_5",),
        hidden_size=2560,
        num_layers=32,
        vocab_size=_QWEN_VOCAB,
        repositories=(
            "mlx-community/Qwen3.5-4B-MTP-4bit",
            "mlx-community/Qwen3.5-4B-MTP-bf16",
        ),
        licence="Apache-2.0",
        read_at=(
            f"{_MLX_VLM}/qwen3_5_mtp/README.md",
            "https://github.com/Blaizzy/mlx-vlm/pull/1167",
            "https://apxml.com/models/qwen35-4b",
        ),
    ),
    KnownHead(
        model="Gemma 4 31B",
        families=_GEMMA,
        hidden_size=5376,
        num_layers=60,
        vocab_size=_GEMMA_VOCAB,
        repositories=(
            "mlx-community/gemma-4-31B-it-assistant-bf16",
            "google/gemma-4-31B-it-assistant",
        ),
        licence="Apache-2.0",
        read_at=(
            f"{_MLX_VLM}/gemma4_assistant/README.md",
            "https://github.com/ddalcu/mlx-serve/issues/84",
            "https://huggingface.co/google/gemma-4-31B-it-assistant",
        ),
    ),
    KnownHead(
        model="Gemma 4 26B-A4B",
        families=_GEMMA,
        hidden_size=2816,
        num_layers=30,
        vocab_size=_GEMMA_VOCAB,
        repositories=(
            "mlx-community/gemma-4-26B-A4B-it-assistant-bf16",
            "google/gemma-4-26B-A4B-it-assistant",
        ),
        licence="Apache-2.0",
        read_at=(
            f"{_MLX_VLM}/gemma4_assistant/README.md",
            "https://github.com/jundot/omlx/issues/1071",
        ),
    ),
    KnownHead(
        model="Gemma 4 12B",
        families=_GEMMA,
        hidden_size=3840,
        num_layers=48,
        vocab_size=_GEMMA_VOCAB,
        repositories=(
            "mlx-community/gemma-4-12B-it-assistant-bf16",
            "mlx-community/gemma-4-12B-it-assistant-4bit",
            "google/gemma-4-12B-it-assistant",
        ),
        licence="Apache-2.0",
        read_at=(
            "https://github.com/lablup/mlxcel/issues/154",
            "https://github.com/xorbitsai/inference/pull/5241",
            "https://huggingface.co/google/gemma-4-12B-it-assistant",
        ),
    ),
    KnownHead(
        model="Gemma 4 E4B",
        families=_GEMMA,
        hidden_size=2560,
        num_layers=42,
        vocab_size=_GEMMA_VOCAB,
        repositories=(
            "mlx-community/gemma-4-E4B-it-assistant-bf16",
            "google/gemma-4-E4B-it-assistant",
        ),
        licence="Apache-2.0",
        read_at=(
            "https://huggingface.co/mlx-community/gemma-4-E4B-it-assistant-bf16",
            "https://github.com/vllm-project/tpu-inference/pull/2690",
        ),
    ),
    KnownHead(
        model="Gemma 4 E2B",
        families=_GEMMA,
        hidden_size=1536,
        num_layers=35,
        vocab_size=_GEMMA_VOCAB,
        repositories=(
            "mlx-community/gemma-4-E2B-it-assistant-bf16",
            "google/gemma-4-E2B-it-assistant",
        ),
        licence="Apache-2.0",
        read_at=(
            f"{_MLX_VLM}/gemma4_assistant/README.md",
            "https://github.com/vllm-project/tpu-inference/pull/2690",
        ),
    ),
)
