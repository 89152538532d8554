"""The export itself, from settings to a folder:

    model.mlpackage or model.aimodel    the functions "prefill" and "decode"
    manifest.json                       what a host must know, see `ssmlx.exported.manifest`
    report.json                         sizes, weight error, time and memory of the export
    config.json, tokenizer.json, ...    the model's own settings and tokenizer, as they were

It is written beside its place and renamed, so that it is there whole or not at all.
"""

import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import nn

from ssmlx import __version__
from ssmlx.errors import require
from ssmlx.exported.api import peak_bytes
from ssmlx.exported.backends import DECODE
from ssmlx.exported.manifest import MANIFEST, PACKAGES, REPORT, Manifest, package_digest
from ssmlx.json_files import read_json
from ssmlx.loading.adapter import StreamAdapter, load_stream_adapter
from ssmlx.loading.files import atomic_folder, require_nothing_else_in
from ssmlx.loading.folders import CONFIG_FILE, MODEL_FILES
from ssmlx.loading.load import load_tokenizer
from ssmlx.loading.names import resolve_adapter, resolve_model

from ..base import copy_settings_and_tokenizer, load_base
from ..reference.checkpoint import build_frozen
from ..reference.model import StreamFusedReference
from . import compression, packages
from .ane import AneProfile
from .gpu import GpuProfile
from .graph import DecodeGraph, Graph, PrefillGraph
from .settings import ExportConfig

_PACKAGES = ("coremltools", "coreai-core", "coreai-torch", "numpy", "torch", "transformers")


@dataclass(kw_only=True)
class Report:
    """The size of an exported package, the error of its weights, and the cost of making it."""

    package_bytes: int = 0  # size of the package
    weight_error: compression.WeightError | None = None  # None for Core AI's
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    peak_bytes: int = 0  # most memory that the process has held

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block and show its name; record the process's peak memory after it."""
        from huggingface_hub.utils import tqdm

        started = time.perf_counter()
        with tqdm(total=1, desc=name, bar_format="{desc}: {elapsed}", disable=None) as shown:
            yield
            shown.update()
        self.seconds[name] = round(time.perf_counter() - started, 1)
        self.peak_bytes = peak_bytes()

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        lines = [f"{self.package_bytes / 1e6:.1f} MB"]
        if self.weight_error is not None:
            lines.append(f"weights against float32: {self.weight_error}")
        lines.append(f"{sum(self.seconds.values()):.0f} s ({stages})")
        lines.append(f"peak memory {self.peak_bytes / 1e9:.2f} GB")
        return "\n".join(lines)


def export(
    model: str,  # a folder, a Hub name or an alias; may be downloaded
    adapter: str | None,  # None for the streams of a fused model
    out: Path,  # must be new, empty, or an exported model, which is replaced
    config: ExportConfig,
) -> Report:
    (packages.import_coreai if config.target == "coreai" else packages.import_coremltools)()
    do = "choose another --out"
    ours = all((out / name).is_file() for name in (MANIFEST, REPORT))
    require(
        not out.exists() or (out.is_dir() and (ours or not any(out.iterdir()))),
        f"{out} exists and is not an exported model",
        expected="a new folder, or an exported model to replace",
        do=do,
    )
    require_nothing_else_in(out, (*MODEL_FILES, "*.txt", *PACKAGES.values()), do)
    report = Report()
    with packages.explain_write_errors(out):
        with report.stage("load"):
            folder = resolve_model(model)
            own = adapter_for_export(folder, adapter)
            graphs = build_graphs(folder, own, config)
        with atomic_folder(out) as work:
            package = work / PACKAGES[config.target]
            _write_package(graphs, config, package, report)
            copy_settings_and_tokenizer(folder, work)
            words = load_tokenizer(work, read_json(work / "config.json", "a model's settings"))
            ends = {*words.eos_token_ids, *own.config.end_token_ids}
            manifest = replace(
                make_partial_manifest(graphs[-1], own, config),
                model=own.config.base_model or Path(model).name,
                adapter=Path(adapter or model).name,
                versions=_package_versions(),
                end_token_ids=tuple(sorted(ends)),
                digest=package_digest(package),
            )
            manifest.write(work)
            files = [file for file in package.rglob("*") if file.is_file()]
            report.package_bytes = sum(file.stat().st_size for file in files)
            saved = json.dumps(asdict(report), indent=1) + "\n"
            (work / REPORT).write_text(saved, encoding="utf-8")
    return report


def adapter_for_export(
    folder: Path,
    adapter: str | None,  # None for the streams in `folder`
) -> StreamAdapter:
    found = None if adapter is None else resolve_adapter(adapter)
    require(
        found is not None or (adapter is None and (folder / CONFIG_FILE).exists()),
        "no adapter: an exported model drafts with its streams",
        expected="--adapter, or a fused model folder",
        do="name an adapter or its folder",
    )
    return load_stream_adapter(found or folder)


def build_graphs(folder: Path, adapter: StreamAdapter, config: ExportConfig) -> tuple[Graph, Graph]:
    """Build "prefill" and "decode", which share a profile and thus their float32 weights."""
    sizes = config.sizes(adapter.config, adapter.base.vocab_size)
    reference = build_reference(folder, adapter, sizes.num_streams)
    _check_context(reference, sizes.num_slots)
    profile = (AneProfile if config.profile == "ane" else GpuProfile)(reference, sizes)
    num_layers = adapter.config.num_layers
    split = adapter.config.insertion_layer
    return (
        PrefillGraph(profile, num_layers).eval(),
        DecodeGraph(profile, num_layers, split, reference.draft_vocab).eval(),
    )


def make_partial_manifest(
    graph: Graph,  # "decode"
    adapter: StreamAdapter,
    config: ExportConfig,
) -> Manifest:
    """Make a manifest without names, versions, digest and end tokens."""
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
        tree=sizes.tree,
        prompt_template=adapter.config.prompt_template,
        compression=config.compression,
    )


def _write_package(
    graphs: Sequence[Graph], config: ExportConfig, package: Path, report: Report
) -> None:
    if config.target == "coreai":
        with report.stage("convert"):
            packages.write_coreai_package(graphs, config, package)
        return
    models = {}
    expected = {}
    for graph in graphs:
        with report.stage(f"convert {graph.name}"):
            models[graph.name] = packages.convert_graph(graph, config)
        if graph.name == DECODE:
            expected = compression.expected_matrices_by_output(models[DECODE], graph)
        if config.compression != "none":
            with report.stage(f"compress {graph.name}"):
                model = models[graph.name]
                models[graph.name] = compression.compress(model, config.compression, graph)
    with report.stage("write"):
        packages.merge_functions(models, package)
    models.clear()
    with report.stage("compare weights"):
        report.weight_error = compression.measure_decode_weight_error(package, expected)


def _package_versions() -> dict[str, str]:
    found = {"ssmlx": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def build_reference(folder: Path, adapter: StreamAdapter, num_streams: int) -> StreamFusedReference:
    """Build the reference with the first `num_streams` streams, frozen; a task's LoRA is merged."""
    model = build_frozen(load_base(folder), adapter)
    model.config = replace(model.config, num_streams=num_streams)
    if model.stream_embeddings is not None:
        first = model.stream_embeddings[:num_streams].detach()
        model.stream_embeddings = nn.Parameter(first, requires_grad=False)
    return model


def _check_context(model: StreamFusedReference, num_slots: int) -> None:
    limit = getattr(model.base.config, "max_position_embeddings", None)
    what = f"--context {num_slots}"
    expected = f"at most {limit}, the model's own"
    require(limit is None or num_slots <= limit, what, expected=expected, do="choose a smaller one")
    windows = [window for window in model.windows if window is not None]
    require(
        not windows or min(windows) >= num_slots,
        f"the model looks back {min(windows, default=0)} tokens in some layers",
        expected=f"at least --context {num_slots}, as every slot is visible here",
        do="choose a --context of at most that",
    )
