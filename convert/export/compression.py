"""Smaller weights in a Core ML package, and how far they are from the model's own.

What is compressed is every matrix that multiplies rows: layers and LM head, and with a tied head
the embedding, which is the same tensor. Streams and LoRA are not: they are small, and drafting
is what they are there for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .coreml import import_coremltools, quiet
from .graph import DECODE, Graph
from .settings import Compression

if TYPE_CHECKING:
    import coremltools

MATRIX_OPS = ("linear", "conv")
MIN_WEIGHTS = 2048
BLOCK = 32
LOOK_UP_BITS = 4
LOOK_UP_ROWS = 32
_OWN = ("lora_A", "lora_B")


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """How far stored weights are from the float32 ones, over all matrices of "decode".

    Attributes:
        matrices: how many.
        weights: numbers in them.
        relative_rms: root mean square of the differences over that of the weights.
        worst_relative_rms: the same, of the matrix where it is largest.
        largest: the largest difference.
    """

    matrices: int
    weights: int
    relative_rms: float
    worst_relative_rms: float
    largest: float

    def __str__(self) -> str:
        return (
            f"relative RMS {self.relative_rms:.2e} (worst matrix {self.worst_relative_rms:.2e}), "
            f"largest difference {self.largest:.2e}, over {self.matrices} matrices"
        )


def compress(model: coremltools.models.MLModel, kind: Compression) -> coremltools.models.MLModel:
    """One function's model with its matrices compressed; a package of several would be refused.

    "int8": symmetric, a scale for every output row. "int4": symmetric, a scale for every 32
    inputs of a row. "palettised": 16 values for every 32 output rows, found by k-means.
    """
    import_coremltools()
    with quiet():
        import coremltools.optimize.coreml as optimize

        names = dict.fromkeys(weight_names(model))
        if kind == "palettised":
            look_up = optimize.OpPalettizerConfig(
                mode="kmeans",
                nbits=LOOK_UP_BITS,
                granularity="per_grouped_channel",
                group_size=LOOK_UP_ROWS,
                weight_threshold=MIN_WEIGHTS,
            )
            config = optimize.OptimizationConfig(op_name_configs=dict.fromkeys(names, look_up))
            return optimize.palettize_weights(model, config)
        granularity = "per_channel" if kind == "int8" else "per_block"
        linear = optimize.OpLinearQuantizerConfig(
            mode="linear_symmetric",
            dtype=kind,
            granularity=granularity,
            block_size=BLOCK,
            weight_threshold=MIN_WEIGHTS,
        )
        config = optimize.OptimizationConfig(op_name_configs=dict.fromkeys(names, linear))
        return optimize.linear_quantize_weights(model, config)


def weight_names(model: coremltools.models.MLModel) -> list[str]:
    """Names of the constants to compress, once each."""
    names: dict[str, None] = {}
    for operation in _operations(model._mil_program):
        weight = operation.weight
        own = any(name in weight.name for name in _OWN)
        if weight.val is not None and weight.val.size >= MIN_WEIGHTS and not own:
            names[weight.op.name] = None
    return list(names)


def _operations(program: Any, function: str = "main") -> Iterator[Any]:
    for operation in program.functions[function].operations:
        if operation.op_type in MATRIX_OPS:
            yield operation


def expected_matrices(
    model: coremltools.models.MLModel, truth: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What each matrix product should multiply by, by the name of its output.

    In float32 where it is one of `true_weights`; what the converter made by itself, such as
    LoRA with its scale multiplied in, as it is in the uncompressed model.
    """
    found = {}
    for operation in _operations(model._mil_program):
        weight = operation.weight.val
        if weight is not None:
            found[operation.outputs[0].name] = truth.get(_digest(weight), weight)
    return found


def _digest(weights: np.ndarray) -> str:
    """Of the numbers in float16, whatever their shape."""
    return hashlib.sha256(weights.astype(np.float16).tobytes()).hexdigest()


def true_weights(graph: Graph) -> dict[str, np.ndarray]:
    """The float32 matrices of a graph, by digest; those of a head in pieces, piece by piece."""
    found = {}
    for tensor in graph.parameters():
        if tensor.dim() == 2:
            found[_digest(tensor.numpy())] = tensor.numpy()
    for head in (graph.profile.head, graph.profile.draft_head):
        for first in range(0, head.weight.shape[0], head.piece):
            piece = head.weight[first : first + head.piece].detach().numpy()
            found[_digest(piece)] = piece
    return found


def load_program(package: Path) -> Any:
    """The program of a saved package, with its weights, as coremltools reads it."""
    ct = import_coremltools()
    with quiet():
        from coremltools.converters.mil.frontend.milproto.load import load

        spec = ct.utils.load_spec(str(package))
        weights = package / "Data" / "com.apple.CoreML" / "weights"
        return load(spec, spec.specificationVersion, str(weights))


def stored_matrices(program: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of "decode", decompressed one by one, by the name of the product's output."""
    for operation in _operations(program, DECODE):
        weight = operation.weight
        if weight.val is not None:
            yield operation.outputs[0].name, weight.val
        elif weight.op.op_type.startswith("constexpr"):
            yield operation.outputs[0].name, weight.op.materialized_val_inference()


def weight_error(package: Path, expected: Mapping[str, np.ndarray]) -> WeightError:
    """Compare a saved package with the model's own weights.

    Args:
        package: the saved package.
        expected: `expected_matrices` of its function "decode".
    """
    squares = total = worst = largest = 0.0
    matrices = count = 0
    for name, stored in stored_matrices(load_program(package)):
        true = expected[name].astype(np.float64).ravel()
        gap = stored.astype(np.float64).ravel() - true
        own, size = float(gap @ gap), float(true @ true)
        worst = max(worst, math.sqrt(own / size) if size else 0.0)
        largest = max(largest, float(np.abs(gap).max()))
        squares, total = squares + own, total + size
        matrices, count = matrices + 1, count + gap.size
    return WeightError(
        matrices=matrices,
        weights=count,
        relative_rms=math.sqrt(squares / total),
        worst_relative_rms=worst,
        largest=largest,
    )
