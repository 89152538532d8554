"""The export itself, from settings to a folder:

    model.mlpackage or model.aimodel    the functions "prefill" and "decode"
    manifest.json                       what a host must know, see `ssmlx.exported.manifest`
    report.json                         sizes, weight error, time and memory of the export
    config.json, tokenizer.json, ...    the model's own settings and tokenizer, as they were

It is written beside its place and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ssmlx import __version__
from ssmlx.errors import InputError
from ssmlx.exported.manifest import MANIFEST, PACKAGES, REPORT, Manifest, TreeTables, package_digest
from ssmlx.loading.adapter import Adapter, load_adapter
from ssmlx.loading.files import new_folder
from ssmlx.loading.load import load_tokenizer
from ssmlx.loading.names import CONFIG_FILE, resolve_adapter, resolve_model
from ssmlx.settings import read_json

from ..base import copy_settings
from . import compression
from .ane import AneProfile
from .coreai import import_coreai, write_coreai
from .coreml import convert_graph, import_coremltools, merge_functions, write_metadata, writing
from .gpu import GpuProfile
from .graph import DECODE, DecodeGraph, Graph, PrefillGraph
from .settings import ExportConfig
from .source import build_reference, check_context

_PACKAGES = ("coremltools", "coreai-core", "coreai-torch", "numpy", "torch", "transformers")


@dataclass(kw_only=True)
class Report:
    """What an export came to.

    Attributes:
        package_bytes: size of the package.
        weight_error: `compression.WeightError` as a dictionary; None for Core AI's.
        seconds: of each stage.
        peak_bytes: most memory that the process has held.
    """

    package_bytes: int = 0
    weight_error: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and show it while it runs."""
        from huggingface_hub.utils import tqdm

        started = time.perf_counter()
        with tqdm(total=1, desc=name, bar_format="{desc}: {elapsed}", disable=None) as shown:
            yield
            shown.update()
        self.seconds[name] = round(time.perf_counter() - started, 1)
        self.peak_bytes = _peak_bytes()


def export(model: str, adapter: str | None, out: Path, config: ExportConfig) -> Report:
    """Write the folder `out`, whole or not at all.

    Args:
        model: a folder, an alias or a Hub name.
        adapter: a bundled adapter's name or a folder; None for the streams of a fused model.
        out: the folder.
        config: the settings.

    Raises:
        InputError: a package is missing, the model or the adapter does not fit, or the disk is
            full.
    """
    (import_coreai if config.target == "coreai" else import_coremltools)()
    _check_target(out)
    report = Report()
    with writing(out):
        with report.stage("load"):
            folder = resolve_model(model)
            own = _load_adapter(folder, adapter)
            source = _Source(
                folder, own, config, build_graphs(folder, own, config),
                own.config.base_model or Path(model).name, Path(adapter or model).name,
            )  # fmt: skip
        with new_folder(out) as work:
            _write_package(source, work / PACKAGES[config.target], report)
            _write_rest(source, work, report)
    return report


@dataclass(frozen=True, eq=False)
class _Source:
    """What is exported.

    Attributes:
        folder: of the model.
        adapter: the streams and LoRA.
        config: the settings.
        graphs: "prefill" and "decode".
        model_name, adapter_name: what a package says of itself.
    """

    folder: Path
    adapter: Adapter
    config: ExportConfig
    graphs: tuple[Graph, Graph]
    model_name: str
    adapter_name: str

    @property
    def texts(self) -> dict[str, str]:
        """What a package says of itself where its host looks: in Xcode, or in its metadata."""
        return {
            "ssmlx.version": __version__,
            "ssmlx.model": self.model_name,
            "ssmlx.adapter": self.adapter_name,
            "ssmlx.scope": self.adapter.config.adapter_scope,
            "ssmlx.profile": self.config.profile,
            "ssmlx.compression": self.config.compression,
            "ssmlx.precision": self.config.precision,
        }


def build_graphs(folder: Path, adapter: Adapter, config: ExportConfig) -> tuple[Graph, Graph]:
    """The functions "prefill" and "decode" of a base model with an adapter.

    Raises:
        InputError: adapter, model and settings do not fit one another.
    """
    sizes = config.sizes(adapter.config, adapter.base.vocab_size)
    reference = build_reference(folder, adapter, sizes.num_streams)
    check_context(reference, sizes.num_slots)
    profile = (AneProfile if config.profile == "ane" else GpuProfile)(reference, sizes)
    num_layers, split = adapter.config.num_layers, adapter.config.insertion_layer
    return (
        PrefillGraph(profile, num_layers).eval(),
        DecodeGraph(profile, num_layers, split, reference.draft_vocab).eval(),
    )


def _check_target(out: Path) -> None:
    """Refuse to replace a folder that this command did not write."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or _is_export(out))):
        raise InputError(
            f"{out} exists and is no exported model",
            expected="a new folder, or an exported model to replace",
            do="choose another --out",
        )


def _is_export(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / REPORT).is_file()


def _load_adapter(folder: Path, adapter: str | None) -> Adapter:
    found = None if adapter is None else resolve_adapter(adapter)
    if found is None:
        if adapter is not None or not (folder / CONFIG_FILE).exists():
            raise InputError(
                "no adapter: an exported model drafts with its streams",
                expected="--adapter, or a fused model folder",
                do="name an adapter or its folder",
            )
        found = folder
    return load_adapter(found)


def _write_package(source: _Source, package: Path, report: Report) -> None:
    config = source.config
    if config.target == "coreai":
        with report.stage("convert"):
            write_coreai(source.graphs, config, package, source.texts)
        return
    models, expected = {}, {}
    for graph in source.graphs:
        with report.stage(f"convert {graph.name}"):
            models[graph.name] = convert_graph(graph, config)
        if graph.name == DECODE:
            truth = compression.true_weights(graph)
            expected = compression.expected_matrices(models[DECODE], truth)
        if config.compression != "none":
            with report.stage(f"compress {graph.name}"):
                models[graph.name] = compression.compress(models[graph.name], config.compression)
    with report.stage("write"):
        merge_functions(models, package)
        write_metadata(package, source.texts)
    models.clear()
    with report.stage("compare weights"):
        report.weight_error = asdict(compression.weight_error(package, expected))


def _write_rest(source: _Source, work: Path, report: Report) -> None:
    """Tokenizer, manifest and report, beside the package."""
    copy_settings(source.folder, work)
    words = load_tokenizer(work, read_json(work / "config.json", "a model's settings"))
    package = work / PACKAGES[source.config.target]
    ends = {*words.eos_token_ids, *source.adapter.config.end_token_ids}
    _manifest(source, sorted(ends), package).write(work)
    files = [file for file in package.rglob("*") if file.is_file()]
    report.package_bytes = sum(file.stat().st_size for file in files)
    saved = json.dumps(asdict(report), indent=1) + "\n"
    (work / REPORT).write_text(saved, encoding="utf-8")


def _manifest(source: _Source, end_token_ids: list[int], package: Path) -> Manifest:
    config, adapter, graph = source.config, source.adapter, source.graphs[-1]
    sizes = graph.profile.sizes
    carried = config.target == "coreml" and config.precision == "float32"
    return Manifest(
        target=config.target,
        profile=config.profile,
        dtype=config.precision,
        cache="arrays" if carried else "state",
        cache_names=tuple(graph.caches),
        cache_shape=tuple(graph.cache_shape),
        num_slots=sizes.num_slots,
        chunk=sizes.chunk,
        num_nodes=sizes.num_nodes,
        num_kept=sizes.num_kept,
        num_streams=sizes.num_streams,
        tree=TreeTables(config.topology(adapter.config, adapter.base.vocab_size), sizes.num_nodes),
        prompt_template=adapter.config.prompt_template,
        end_token_ids=tuple(end_token_ids),
        digest=package_digest(package),
        compression=config.compression,
        model=source.model_name,
        adapter=source.adapter_name,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {"ssmlx": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
