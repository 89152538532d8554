"""From the two graphs to a Core AI package of two functions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ssmlx.errors import InputError, first_line

from .coreml import quiet, writing
from .graph import Graph, Stateful
from .settings import ExportConfig


def import_coreai() -> tuple[Any, Any]:
    """The converter from PyTorch, and what makes packages.

    Raises:
        InputError: they are not installed.
    """
    try:
        with quiet():
            return importlib.import_module("coreai_torch"), importlib.import_module("coreai")
    except ImportError as error:
        raise InputError(
            f"Core AI's converter cannot be imported ({first_line(error)})",
            expected="the packages coreai-core and coreai-torch (Python 3.11 or later)",
            do='`pip install "ssmlx[coreai]"`',
        ) from error


def write_coreai(
    graphs: Sequence[Graph], config: ExportConfig, package: Path, texts: Mapping[str, str]
) -> None:
    """Convert `graphs` and write them as one package, with `texts` in its metadata.

    The cache is state in either precision. Nothing is compressed.

    Raises:
        InputError: the converter is missing, or the package cannot be written.
    """
    coreai_torch, _ = import_coreai()
    converter = coreai_torch.TorchConverter
    with quiet():
        conversion = converter(mode=converter.Mode.RELEASE)
        for graph in graphs:
            conversion.add_exported_program(
                _exported(graph, config, coreai_torch.get_decomp_table()),
                input_names=[tensor.name for tensor in graph.inputs],
                output_names=[tensor.name for tensor in graph.outputs],
                state_names=graph.caches,
                entrypoint_name=graph.name,
            )
        program = conversion.to_coreai()
    with writing(package), quiet():
        asset = program.save_asset(package)
        asset.update_metadata(lambda metadata: _describe(metadata, texts))


def _exported(graph: Graph, config: ExportConfig, table: Any) -> Any:
    """The graph as torch.export gives it, in the precision that was asked for."""
    dtype = getattr(torch, config.precision)
    module = Stateful(graph).eval().to(dtype)
    examples = [tensor.zeros() for tensor in graph.inputs]
    examples = [x.to(dtype) if x.is_floating_point() else x for x in examples]
    with torch.no_grad():
        return torch.export.export(module, args=tuple(examples)).run_decompositions(table)


def _describe(metadata: Any, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        metadata.set_custom(name, text)
