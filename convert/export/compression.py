"""Smaller weights in a Core ML package, and how far they are from the model's own.

What is compressed is every matrix that multiplies rows: layers and LM head, and with a tied head
the embedding, which is the same tensor. Streams, their condition and LoRA are not: they are small,
and drafting is what they are there for.
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
    weights: int  # numbers in them
    relative_rms: float  # root mean square of the differences over that of the weights
    worst_relative_rms: float  # the same, of the matrix where it is largest
    largest: float  # the largest difference

    def __str__(self) -> str:
        """Return the errors in one line."""
        return (
            f"relative RMS {self.relative_rms:.2e} (worst matrix {self.worst_relative_rms:.2e}), "
            f"largest difference {self.largest:.2e}, over {self.matrices} matrices"
        )


def compress(model: Any, kind: Compression, graph: Graph) -> Any:
    """Return a Core ML model with the matrices of the base model compressed; LoRA and streams stay.

    "int8" is symmetric with a scale for every output row; "int4" symmetric with a scale for every
    32 inputs of a row; "palettised" has 16 values for every 32 output rows, found by k-means.
    Matrices of fewer than 2,048 weights stay.

    Args:
        model: converted from `graph`; one function, as a package of several is refused.
        kind: how.
        graph: tells which matrices are the base model's.

    Raises:
        InputError: coremltools is missing or does not work.
    """
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
    """Return the names of a Core ML model's constants that are matrices of the base model, each
    once.

    They are found by content: the profile `ane` does not name kernels after parameters. Left out
    are LoRA, the condition's matrices, and those of fewer than 2,048 weights.

    Args:
        model: converted from `graph`; its function "main" is looked at.
        graph: whose parameters are looked for.
    """
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
    """Yield a graph's matrices [out, in] in NumPy, each with its parameter's name.

    The pieces of both LM heads come last, all under the name "head".
    """
    for name, parameter in graph.named_parameters():
        if parameter.dim() == 2:
            yield name, parameter.numpy()
    for head in (graph.profile.head, graph.profile.draft_head):
        for piece in head.weight.detach().split(head.piece):
            yield "head", piece.numpy()


def _matrix_operations(program: Any, function: str = "main") -> Iterable[Any]:
    """Return the operations of a program's function that multiply by a weight.

    Where several multiply by a weight of one name, the last of them only.
    """
    every = program.functions[function].operations
    return {one.weight.name: one for one in every if one.op_type in MATRIX_OPS}.values()


def expected_matrices_by_output(model: Any, graph: Graph) -> dict[str, np.ndarray]:
    """Return what each matrix product of a converted model should multiply by, by the name of its
    output.

    It is the float32 matrix where the graph has it; what the converter has made by itself, such as
    LoRA times its scale, is as in the uncompressed model. Products whose weight is no constant are
    left out.

    Args:
        model: converted from `graph`, not compressed yet; its function "main" is looked at.
        graph: has the float32 matrices.
    """
    truth = {_content_digest(matrix): matrix for _, matrix in _named_matrices(graph)}
    found = {}
    for operation in _matrix_operations(model._mil_program):
        weight = operation.weight.val
        if weight is not None:
            found[operation.outputs[0].name] = truth.get(_content_digest(weight), weight)
    return found


def _content_digest(weights: np.ndarray) -> str:
    """Return the SHA-256 of weights rounded to float16."""
    return hashlib.sha256(weights.astype(np.float16).tobytes()).hexdigest()


def load_program(package: Path) -> Any:
    """Read a saved Core ML package back as a program of MIL, coremltools' form of a model, its
    weights included.

    Raises:
        InputError: coremltools is missing or does not work.
    """
    ct = import_coremltools()
    with silence_output():
        from coremltools.converters.mil.frontend.milproto.load import load

        spec = ct.utils.load_spec(str(package))
        weights = package / "Data" / "com.apple.CoreML" / "weights"
        return load(spec, spec.specificationVersion, str(weights))


def measure_decode_weight_error(package: Path, expected: Mapping[str, np.ndarray]) -> WeightError:
    """Compare the matrices of a saved package's function "decode" with what they should be.

    Compressed weights are unpacked for that, in memory. Products of two activations are passed
    over.

    Args:
        package: the .mlpackage.
        expected: as `expected_matrices_by_output` returns it for that function.
    """
    squares = total = worst = largest = 0.0
    matrices = count = 0
    for operation in _matrix_operations(load_program(package), DECODE):
        stored = operation.weight.val
        if stored is None:
            if not operation.weight.op.op_type.startswith("constexpr"):
                continue  # what one operation makes and another multiplies by
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
