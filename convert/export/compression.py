"""Compresses the weights of a Core ML package, and measures the error of the stored ones.

Compressed is every matrix that multiplies rows: layers and LM head, and with a tied head the
embedding, which is the same tensor. Streams, their condition and LoRA are not: they are small, and
drafting is what they are there for.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ssmlx.exported.backends import DECODE

from .graph import Graph
from .packages import import_coremltools, silence_output

MATRIX_OPS = ("linear", "conv")
MIN_WEIGHTS = 2048
Compression = Literal["int8", "int4", "palettised"]


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """How far stored weights are from the float32 ones, over all matrices of the function "decode".

    Differences are in the weights' own unit, without sign.
    """

    matrices: int
    weights: int  # how many numbers they have
    relative_rms: float  # root mean square of the differences over that of the weights
    worst_relative_rms: float  # the same, of the worst matrix
    largest: float  # the largest difference

    def __str__(self) -> str:
        return (
            f"relative RMS {self.relative_rms:.2e} (worst matrix {self.worst_relative_rms:.2e}), "
            f"largest difference {self.largest:.2e}, over {self.matrices} matrices"
        )


def compress(
    model: Any,  # converted from `graph`; one function, as a package of several is refused
    kind: Compression,
    graph: Graph,
) -> Any:
    """Compress: a scale per output row (int8) or 32 inputs (int4); 16 values per 32 rows."""
    import_coremltools()
    with silence_output():
        import coremltools.optimize.coreml as optimize

        if kind == "palettised":
            apply = optimize.palettize_weights
            change = optimize.OpPalettizerConfig(
                mode="kmeans",
                nbits=4,
                granularity="per_grouped_channel",
                group_size=32,
                weight_threshold=MIN_WEIGHTS,
            )
        else:
            apply = optimize.linear_quantize_weights
            granularity = "per_channel" if kind == "int8" else "per_block"
            change = optimize.OpLinearQuantizerConfig(
                mode="linear_symmetric",
                dtype=kind,
                granularity=granularity,
                block_size=32,
                weight_threshold=MIN_WEIGHTS,
            )
        each = dict.fromkeys(compressible_weight_names(model, graph), change)
        return apply(model, optimize.OptimizationConfig(op_name_configs=each))


def compressible_weight_names(model: Any, graph: Graph) -> list[str]:
    """Find them by content, since the profile `ane` does not name kernels after parameters."""
    weights = [operation.weight for operation in _matrix_operations(model._mil_program)]
    large = [one for one in weights if one.val is not None and one.val.size >= MIN_WEIGHTS]
    added = ("lora_A", "lora_B", "condition")
    base = {
        _content_digest(matrix)
        for name, matrix in _named_matrices(graph)
        if not any(part in name for part in added)
    }
    return list(dict.fromkeys(one.op.name for one in large if _content_digest(one.val) in base))


def _named_matrices(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """Yield [out, in] by parameter name; the pieces of both LM heads come last, as "head"."""
    for name, parameter in graph.named_parameters():
        if parameter.dim() == 2:
            yield name, parameter.numpy()
    for head in (graph.profile.head, graph.profile.draft_head):
        for piece in head.weight.detach().split(head.piece):
            yield "head", piece.numpy()


def _matrix_operations(program: Any, function: str = "main") -> Iterable[Any]:
    """Operations that multiply by a weight; of several under one name, the last."""
    every = program.functions[function].operations
    return {one.weight.name: one for one in every if one.op_type in MATRIX_OPS}.values()


def expected_matrices_by_output(
    model: Any,  # converted from `graph`, not compressed yet
    graph: Graph,
) -> dict[str, np.ndarray]:
    """The matrix that each matrix product should multiply by, under the name of its output.

    The float32 matrix if the graph has it; what the converter has made, such as LoRA times its
    scale, as in the uncompressed model.
    """
    truth = {_content_digest(matrix): matrix for _, matrix in _named_matrices(graph)}
    found = {}
    for operation in _matrix_operations(model._mil_program):
        weight = operation.weight.val
        if weight is not None:
            found[operation.outputs[0].name] = truth.get(_content_digest(weight), weight)
    return found


def _content_digest(weights: np.ndarray) -> str:
    """A digest of the weights, rounded to float16."""
    return hashlib.sha256(weights.astype(np.float16).tobytes()).hexdigest()


def load_program(package: Path) -> Any:
    """Load a package with its weights as MIL, coremltools' form of a model."""
    ct = import_coremltools()
    with silence_output():
        from coremltools.converters.mil.frontend.milproto.load import load

        spec = ct.utils.load_spec(str(package))
        weights = package / "Data" / "com.apple.CoreML" / "weights"
        return load(spec, spec.specificationVersion, str(weights))


def measure_decode_weight_error(
    package: Path,
    # as `expected_matrices_by_output` returns it for that function
    expected: Mapping[str, np.ndarray],
) -> WeightError:
    """Measure the error of stored weights; products of two activations are left out."""
    squares = total = worst = largest = 0.0
    matrices = count = 0
    for operation in _matrix_operations(load_program(package), DECODE):
        stored = operation.weight.val
        if stored is None:
            if not operation.weight.op.op_type.startswith("constexpr"):
                continue  # an activation: one operation's result, another's factor
            stored = operation.weight.op.materialized_val_inference()
        true = expected[operation.outputs[0].name].astype(np.float64).ravel()
        gap = stored.astype(np.float64).ravel() - true
        own = float(gap @ gap)
        size = float(true @ true)
        worst = max(worst, math.sqrt(own / size) if size else 0.0)
        largest = max(largest, float(np.abs(gap).max()))
        squares = squares + own
        total = total + size
        matrices = matrices + 1
        count = count + gap.size
    return WeightError(
        matrices=matrices,
        weights=count,
        relative_rms=math.sqrt(squares / total),
        worst_relative_rms=worst,
        largest=largest,
    )
