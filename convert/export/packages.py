"""Converts the two graphs into a package of two functions that share their weights."""

import contextlib
import importlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssmlx.errors import InputError, first_line, missing_package_error, require
from ssmlx.exported.backends import NEW

from .graph import ConvertibleGraph, Graph
from .settings import ExportConfig

# Kept in float32 by the profile `gpu`: squares of hidden states and sums of exponentials.
_WIDE_OPS = frozenset({"pow", "reduce_mean", "rsqrt", "exp", "reduce_sum", "log"})


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Discard what any thread prints inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def import_coremltools() -> Any:
    try:
        with silence_output():
            import coremltools
    except (ImportError, AttributeError) as error:
        raise missing_package_error("coremltools", error, "coreml") from error
    require(
        tuple(int(part) for part in np.__version__.split(".")[:2]) < (2, 4),
        f"numpy {np.__version__}, with which coremltools {coremltools.__version__} fails",
        expected="numpy below 2.4",
        do='`pip install "ssmlx[coreml]"`',
    )
    return coremltools


def import_coreai() -> Any:
    """Import the module `coreai_torch`."""
    try:
        with silence_output():
            importlib.import_module("coreai")
            return importlib.import_module("coreai_torch")
    except ImportError as error:
        what = "Core AI's converter (for Python 3.11 or later)"
        raise missing_package_error(what, error, "coreai") from error


@contextlib.contextmanager
def explain_write_errors(target: Path) -> Iterator[None]:
    """Explain OSError and RuntimeError, which a full or read-only disk raises here."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else first_line(error)
        raise InputError(
            f"cannot write {target} ({reason})",
            expected="a disk with room for twice the package",
            do="free some space, or choose another --out",
        ) from error


def convert_graph(graph: Graph, config: ExportConfig) -> Any:
    """Convert a graph, without compressing it or loading it into Core ML.

    In float16 the cache is Core ML's state, which can only be float16; in float32 the caches are
    inputs, and outputs of the same name with the suffix `NEW`.
    """
    ct = import_coremltools()
    stateful = config.precision == "float16"
    module = ConvertibleGraph(graph, stateful=stateful).eval()
    examples = [tensor.zeros() for tensor in graph.inputs]
    examples += [] if stateful else [torch.zeros(graph.cache_shape) for _ in graph.caches]
    with silence_output(), torch.no_grad():
        return ct.convert(
            torch.jit.trace(module, tuple(examples), check_trace=False),
            **_tensor_types(ct, graph, stateful),
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=_compute_precision(ct, config),
            pass_pipeline=_make_pipeline(ct),
            skip_model_load=True,
        )


def _tensor_types(ct: Any, graph: Graph, stateful: bool) -> dict[str, Any]:
    """Types for `ct.convert`; floats are float16 if `stateful`, else float32."""
    kinds = {"int": np.int32, "float": np.float16 if stateful else np.float32}
    inputs = [ct.TensorType(t.name, shape=t.shape, dtype=kinds[t.kind]) for t in graph.inputs]
    outputs = [ct.TensorType(t.name, dtype=kinds[t.kind]) for t in graph.outputs]
    if not stateful:
        shape = graph.cache_shape
        inputs += [ct.TensorType(name, shape=shape, dtype=np.float32) for name in graph.caches]
        outputs += [ct.TensorType(name + NEW, dtype=np.float32) for name in graph.caches]
        return {"inputs": inputs, "outputs": outputs}
    # Without `states` the cache would silently become a constant.
    state = ct.TensorType(shape=graph.cache_shape, dtype=np.float16)
    states = [ct.StateType(state, name=name) for name in graph.caches]
    return {"inputs": inputs, "outputs": outputs, "states": states}


def _compute_precision(ct: Any, config: ExportConfig) -> Any:
    """In profile `gpu`, squares, exponentials, logarithms, sums with means stay in float32."""
    if config.precision == "float32":
        return ct.precision.FLOAT32
    if config.profile == "ane":
        return ct.precision.FLOAT16

    def runs_in_float16(op: Any) -> bool:
        if op.op_type == "add":
            given = [value.op for value in (op.x, op.y) if value.op is not None]
            return all(one.op_type != "reduce_mean" for one in given)
        return op.op_type not in _WIDE_OPS

    return ct.transform.FP16ComputePrecision(op_selector=runs_in_float16)


def _make_pipeline(ct: Any) -> Any:
    """The converter's passes, and one of ours that saves a copy of the cache per layer."""
    with silence_output():
        from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
        from coremltools.converters.mil.mil.passes.pass_registry import register_pass

    class DropWholeUpdates(AbstractGraphPass):  # type: ignore[misc]  # mypy skips coremltools
        """Replaces an assignment to a whole tensor by the new tensor."""

        def apply(self, prog: Any) -> None:
            for block in prog.functions.values():
                for op in list(block.operations):
                    if op.op_type == "slice_update" and op.x.shape == op.update.shape:
                        block.replace_uses_of_var_after_op(
                            anchor_op=op,
                            old_var=op.outputs[0],
                            new_var=op.update,
                            force_replace=True,
                        )
                        block.remove_ops([op])

    register_pass(namespace="ssmlx", override=True)(DropWholeUpdates)
    pipeline = ct.PassPipeline()
    where = pipeline.passes.index("common::canonicalize_inplace_pattern")
    pipeline.insert_pass(where, "ssmlx::DropWholeUpdates")
    # It would hold depths, of which some are -1, and tokens in 16 bits, where they overflow.
    pipeline.remove_passes(["common::add_int16_cast"])
    return pipeline


def merge_functions(
    models: Mapping[str, Any],  # of one function each, by the function's name
    package: Path,
) -> None:
    """Merge functions into a package that stores equal weights once; the last is the default."""
    ct = import_coremltools()
    with (
        explain_write_errors(package),
        silence_output(),
        tempfile.TemporaryDirectory(dir=package.parent) as work,
    ):
        descriptor = ct.utils.MultiFunctionDescriptor()
        for name, model in models.items():
            path = str(Path(work, f"{name}.mlpackage"))
            model.save(path)
            descriptor.add_function(path, src_function_name="main", target_function_name=name)
        descriptor.default_function_name = list(models)[-1]
        ct.utils.save_multifunction(descriptor, str(package))


def write_coreai_package(graphs: Sequence[Graph], config: ExportConfig, package: Path) -> None:
    """Write the package; caches are state in either precision; weights are cast in place."""
    coreai_torch = import_coreai()
    converter = coreai_torch.TorchConverter
    dtype = getattr(torch, config.precision)
    with silence_output(), torch.no_grad():
        conversion = converter(mode=converter.Mode.RELEASE)
        for graph in graphs:
            module = ConvertibleGraph(graph, stateful=True).eval().to(dtype)
            examples = [tensor.zeros() for tensor in graph.inputs]
            examples = [x.to(dtype) if x.is_floating_point() else x for x in examples]
            exported = torch.export.export(module, args=tuple(examples))
            conversion.add_exported_program(
                exported.run_decompositions(coreai_torch.get_decomp_table()),
                input_names=[tensor.name for tensor in graph.inputs],
                output_names=[tensor.name for tensor in graph.outputs],
                state_names=graph.caches,
                entrypoint_name=graph.name,
            )
        program = conversion.to_coreai()

    with explain_write_errors(package), silence_output():
        program.save_asset(package)
