"""The exported package itself: read back and executed by `mil`, and run by Core AI."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("coremltools", exc_type=ImportError)
from mil import interpreted_backend, load_functions
from oracle import stream_config
from real import ROOT, run_module, snapshot, words
from refusals import exits, found_in, mentions, one_line
from tiny_export import WORDS, Folders, write_pair

from convert.export import compression
from convert.export.export import Report, build_graphs, export
from convert.export.packages import convert_graph, import_coremltools, merge_functions
from convert.export.settings import ExportConfig
from perf import export as perf_export
from ssmlx import exported
from ssmlx.api import stream_generate
from ssmlx.export import main
from ssmlx.model.tree import count_candidates
from ssmlx.settings import GenerateConfig, PruneConfig, TreeConfig

pytestmark = pytest.mark.slow
TREE = TreeConfig(size=6)
PROMPTS = [words(count, first) for count, first in ((9, 0), (4, 7), (14, 20))]
TOKENS = 16


def config(**changes) -> ExportConfig:
    return ExportConfig(**{"tree": TREE, "context": 64, "chunk": 4, **changes})


def write_small(folder: Path, *, base=None, **changes) -> Folders:
    """Two layers, one of them with streams: converting takes time for every operation."""
    base = {"num_hidden_layers": 2, **(base or {})}
    return write_pair(folder, vocab=WORDS, base=base, num_layers=2, num_msa_layers=1, **changes)


@dataclass(frozen=True)
class Exported:
    """An export and what it was made from."""

    folders: Folders
    out: Path
    config: ExportConfig
    report: Report


@pytest.fixture(scope="module")
def make_export(tmp_path_factory):
    """Exports by scope, rank of condition and root_init, and settings, each made once."""
    made = {}
    pairs = {}

    def make(scope="all", rank=0, **changes) -> Exported:
        if (scope, rank) not in pairs:
            folder = tmp_path_factory.mktemp(scope)
            ranks = {"condition_rank": rank, "root_init_rank": rank}
            pairs[scope, rank] = write_small(folder, adapter_scope=scope, **ranks)
        settings = config(**changes)
        folders = pairs[scope, rank]
        if (scope, rank, settings) not in made:
            out = folders.base.parent / f"out{len(made)}"
            report = export(str(folders.base), str(folders.adapter), out, settings)
            made[scope, rank, settings] = Exported(folders, out, settings, report)
        return made[scope, rank, settings]

    return make


def mlx_answers(made: Exported) -> list[tuple[list[int], int]]:
    """Tokens and target calls of MLX with the same tree; the tokens are plain decoding's."""
    model, tokenizer = made.folders.mlx()
    found = []
    for prompt in PROMPTS:
        manifest = exported.Manifest.read(made.out)
        settings = perf_export.config_of_package(manifest, TOKENS)
        streamed = list(stream_generate(model, tokenizer, prompt, settings))
        plain = GenerateConfig(decoding="plain", max_tokens=TOKENS)
        tokens = [t for r in stream_generate(model, tokenizer, prompt, plain) for t in r.tokens]
        assert [t for r in streamed for t in r.tokens] == tokens
        found.append((tokens, streamed[-1].target_calls))
    return found


def exported_answers(model: exported.ExportedModel) -> list[tuple[list[int], int]]:
    found = []
    for prompt in PROMPTS:
        responses = list(exported.stream_generate(model, prompt, max_tokens=TOKENS))
        found.append(([t for r in responses for t in r.tokens], responses[-1].target_calls))
    return found


def agreement(found, expected) -> float:
    """The share of tokens before the first difference, over all prompts."""
    same = 0
    for (mine, _), (theirs, _) in zip(found, expected, strict=True):
        pairs = [a == b for a, b in zip(mine, theirs, strict=False)]  # one may end early
        same += pairs.index(False) if False in pairs else len(pairs)
    return same / sum(len(theirs) for theirs, _ in expected)


@pytest.mark.parametrize(
    ("scope", "changes"),
    [
        ("streams", {"profile": "ane", "prune_to": 4}),
        ("all", {"profile": "gpu", "rank": 4}),
        pytest.param("all", {"profile": "gpu"}, marks=pytest.mark.long),
        pytest.param("streams", {"profile": "ane", "rank": 4}, marks=pytest.mark.long),
    ],
)
def test_a_float32_package_writes_what_mlx_writes_in_as_many_calls(scope, changes, make_export):
    made = make_export(scope, precision="float32", **changes)
    model = exported.load(made.out, backend=interpreted_backend)
    assert model.manifest.cache == "arrays"
    assert exported_answers(model) == mlx_answers(made)


@pytest.mark.parametrize("changes", [
    {"profile": "gpu"},
    pytest.param({"profile": "ane"}, marks=pytest.mark.long),
    pytest.param({"profile": "gpu", "prune_to": 4, "compression": "int8"}, marks=pytest.mark.long),
    pytest.param({"profile": "gpu", "rank": 4, "compression": "int8"}, marks=pytest.mark.long),
    {"profile": "ane", "rank": 4},
])  # fmt: skip
def test_a_float16_package_keeps_the_cache_as_state(changes, make_export):
    made = make_export(**changes)
    model = exported.load(made.out, backend=interpreted_backend)
    assert model.manifest.cache == "state"
    state = model.make_cache().state
    assert set(state) == set(model.manifest.cache_names)
    assert {array.dtype for array in state.values()} == {np.dtype("float16")}
    # Near-ties flip in half precision; a wrong mask or slot loses everything at once.
    assert agreement(exported_answers(model), mlx_answers(made)) > 0.6


@pytest.mark.parametrize(("precision", "rank"), [
    ("float32", 4),
    *(pytest.param(*rest, marks=pytest.mark.long) for rest in (
        ("float32", 0), ("float16", 0), ("float16", 4),
    )),
])  # fmt: skip
def test_core_ai_runs_the_same_graph(precision, rank, make_export):
    pytest.importorskip("coreai_torch")
    made = make_export("streams", rank, target="coreai", precision=precision, prune_to=4)
    model = exported.load(made.out)
    found = exported_answers(model)
    expected = mlx_answers(made)
    model.backend.close()
    if precision == "float32":
        assert found == expected
    assert agreement(found, expected) > 0.6


def test_both_functions_are_there_and_share_their_weights(make_export):
    made = make_export(profile="gpu")
    package = made.out / "model.mlpackage"
    spec = import_coremltools().utils.load_spec(str(package))
    assert set(spec.mlProgram.functions) == {"prefill", "decode"}
    prefill, decode = (weights_of(spec, name) for name in ("prefill", "decode"))
    assert len(prefill) > 8 and prefill <= decode
    weights = (package / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    assert weights < 1.3 * 2 * made.report.weight_error.weights


def weights_of(spec, function: str) -> set[int]:
    """Where the matrices of a function stand in the weights' file."""
    (block,) = spec.mlProgram.functions[function].block_specializations.values()
    values = {op.outputs[0].name: op for op in block.operations if op.type == "const"}
    products = [op for op in block.operations if op.type == "linear"]
    names = [op.inputs["weight"].arguments[0].name for op in products]
    return {values[name].attributes["val"].blobFileValue.offset for name in names}


def operations(package: Path) -> list[str]:
    return [op.op_type for op in load_functions(package)["decode"].operations]


def test_each_profile_has_the_operations_that_it_was_made_for(make_export):
    gpu = operations(make_export(profile="gpu").out / "model.mlpackage")
    assert gpu.count("scaled_dot_product_attention") == 3  # streams pass one layer again
    assert gpu.count("scatter_along_axis") == gpu.count("coreml_update_state") == 4
    assert not {"conv", "slice_update"} & set(gpu)
    ane = operations(make_export(profile="ane", rank=4).out / "model.mlpackage")
    assert ane.count("coreml_update_state") == 4 and ane.count("conv") > 14
    assert not {"scatter_along_axis", "slice_update", "linear"} & set(ane)


def test_the_folder_holds_all_that_a_host_needs(make_export):
    made = make_export(profile="gpu")
    names = {path.name for path in made.out.iterdir()}
    assert {"manifest.json", "report.json", "tokenizer.json", "model.mlpackage"} <= names
    manifest = exported.Manifest.read(made.out)
    assert (manifest.num_slots, manifest.chunk, manifest.num_nodes) == (64, 4, 6)
    assert manifest.end_token_ids == (2,)
    assert (manifest.profile, manifest.adapter) == ("gpu", "adapter")
    assert manifest.versions["coremltools"] == import_coremltools().__version__
    report = json.loads((made.out / "report.json").read_text())
    assert report == asdict(made.report)
    assert report["package_bytes"] > 100_000 and report["peak_bytes"] > 1e8
    assert {"convert prefill", "convert decode", "write"} <= set(report["seconds"])


def measured(folder: Path, results: Path, monkeypatch, *more: str) -> dict:
    monkeypatch.setattr("perf.export.RESULTS", results)
    real = exported.load  # what `perf.export` runs a package with, but without a Mac
    monkeypatch.setattr(exported, "load", lambda at, **_: real(at, backend=interpreted_backend))
    asked = ("--compute-units", "cpu-only", *more)
    assert perf_export.main([str(folder), *asked]) == 0
    (row,) = json.loads((results / "export.json").read_text())["rows"]
    return row


def test_the_check_compares_with_plain_decoding(make_export, tmp_path, monkeypatch, capsys):
    made = make_export(precision="float32", profile="gpu")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    source = ("--model", str(made.folders.base), "--adapter", str(made.folders.adapter))
    asked = ("--prompts", str(prompts), "--max-tokens", "12")
    row = measured(made.out, tmp_path, monkeypatch, *source, *asked)
    assert (row["prompts"], row["same_tokens"], row["same_calls"]) == (3, 3, 3)
    mine, mlx, plain = row["tokens_per_call"]
    assert mine == mlx > plain == 1
    assert row["megabytes"] == round(made.report.package_bytes / 1e6, 1)
    assert mentions(capsys.readouterr().out, "3/3")
    (tmp_path / "report.json").write_text("{}")
    line = exits(capsys, perf_export.main, tmp_path)
    assert mentions(line, "report.json", "'weight_error'")


@pytest.mark.parametrize("rank", [0, 4])
def test_the_check_knows_the_tree_of_a_package(rank):
    streams = stream_config(num_streams=3, condition_rank=rank)
    for tree in (TREE, TreeConfig(kind="full", width=2), TreeConfig(size=9, width=3)):
        sizes = config(tree=tree).sizes(streams, WORDS)
        manifest = SimpleNamespace(
            tree=sizes.tree, num_streams=3, num_nodes=sizes.num_nodes, num_kept=sizes.num_nodes - 1
        )
        found = perf_export.config_of_package(manifest, 5)
        asked = {"num_streams": 3, "conditional": rank > 0}
        assert count_candidates(found.tree, **asked) == count_candidates(tree, **asked)
        assert found.tree.size == tree.num_nodes(3)
        assert found.prune == PruneConfig(kind="budget", keep=sizes.num_nodes - 1)


def test_operations_and_cost_are_counted_by_device():
    kinds = {name: type(f"ML{name}ComputeDevice", (), {}) for name in ("GPU", "CPU")}
    used = {name: SimpleNamespace(preferred_compute_device=kind()) for name, kind in kinds.items()}
    plan = SimpleNamespace(
        get_compute_device_usage_for_mlprogram_operation=lambda op: used.get(op[0]),
        get_estimated_cost_for_mlprogram_operation=lambda op: (
            None if op[1] is None else SimpleNamespace(weight=op[1])
        ),
    )
    costs = [("GPU", 3.0), ("CPU", 1.0), ("GPU", None), ("constant", None)]
    expected = ({"GPU": 2, "CPU": 1}, {"GPU": 0.75, "CPU": 0.25})
    assert perf_export.count_operations_by_device(plan, costs) == expected


@pytest.mark.parametrize(("profile", "kinds"), [
    ("gpu", {"int8": (0.6, 1e-3, 2e-2), "int4": (0.4, 5e-2, 0.2)}),
    pytest.param("ane", {"palettised": (0.4, 2e-2, 0.2)}, marks=pytest.mark.long),
])  # fmt: skip
def test_compressed_weights_are_smaller_and_as_far_off_as_reported(profile, kinds, tmp_path):
    """On matrices of some size, of "decode" alone. Each kind: share of the size, error's range."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folders = write_small(tmp_path, base=sizes, hidden_size=128, condition_rank=32)
    settings = config(profile=profile)
    graph = build_graphs(folders.base, folders.load_adapter(), settings)[1]
    whole = convert_graph(graph, settings)
    expected = compression.expected_matrices_by_output(whole, graph)
    names = compression.compressible_weight_names(whole, graph)
    assert len(names) > 14
    for operation in compression._matrix_operations(whole._mil_program):
        if operation.weight.val is not None and 32 in operation.weight.shape:  # the condition's
            assert operation.weight.op.name not in names

    def measured(kind):
        package = tmp_path / f"{kind}.mlpackage"
        model = whole if kind == "none" else compression.compress(whole, kind, graph)
        merge_functions({"decode": model}, package)
        size = (package / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
        return size, compression.measure_decode_weight_error(package, expected)

    size, exact = measured("none")
    assert exact.relative_rms < 3e-4
    for kind, (share, least, most) in kinds.items():
        smaller, found = measured(kind)
        assert smaller < share * size
        assert least < found.relative_rms < most
        assert found.relative_rms <= found.worst_relative_rms < 3 * found.relative_rms
        assert found.matrices == exact.matrices and math.isfinite(found.largest)


def run_export(folders: Folders, out: Path, *more: str) -> subprocess.CompletedProcess:
    return run_module(
        "ssmlx.export",
        "--model",
        str(folders.base),
        "--adapter",
        str(folders.adapter),
        "--out",
        str(out),
        "--context",
        "64",
        "--chunk",
        "4",
        "--tree-size",
        "6",
        *more,
    )


@pytest.mark.long
def test_a_full_disk_leaves_nothing(make_export, tmp_path):
    folders = make_export(profile="gpu").folders
    # Files of more than 64 KiB cannot be written: what a full disk is to the program.
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536));"
        "from ssmlx.export import main; sys.exit(main(sys.argv[1:]))"
    )
    target = tmp_path / "exported" / "out"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "--model",
            str(folders.base),
            "--adapter",
            str(folders.adapter),
            "--out",
            str(target),
            "--context",
            "64",
            "--chunk",
            "4",
            "--tree-size",
            "6",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert str(target) in one_line(done.stderr.splitlines()[-1] + "\n", "ssmlx.export")
    assert not target.exists() and not list(target.parent.glob(".*"))


def test_a_folder_of_another_kind_is_not_replaced(make_export, tmp_path, capsys):
    folders = make_export(profile="gpu").folders
    (tmp_path / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    given = ("--model", folders.base, "--adapter", folders.adapter, "--out", tmp_path)
    assert str(tmp_path) in exits(capsys, main, *given)
    assert snapshot(tmp_path) == before


def test_bad_input_is_one_line(make_export, tmp_path, capsys, monkeypatch):
    folders = make_export(profile="gpu").folders
    base = str(folders.base)
    adapter = str(folders.adapter)
    capsys.readouterr()  # what the export printed

    def refused(*args: str) -> str:
        line = exits(capsys, main, "--out", tmp_path / "out", *args)
        assert not (tmp_path / "out").exists()
        return line

    assert mentions(refused("--model", base), "--adapter")
    line = refused("--model", base, "--adapter", adapter, "--context", "65")
    assert mentions(found_in(line), "--context", "65")
    ours = ("--model", base, "--adapter", adapter)
    assert mentions(refused(*ours, "--context", "256"), "--context", "256", "128")
    line = refused(*ours, "--target", "coreai", "--compress", "int8")
    assert mentions(line, "--compress", "int8")
    other = folders.base.parent / "other"
    shutil.copytree(folders.base, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "model_type": "mistral"}))
    assert "mistral" in refused("--model", str(other), *ours[2:])
    (other / "config.json").write_text(json.dumps({**settings, "model_type": "none such"}))
    assert str(other) in refused("--model", str(other), *ours[2:])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "ssmlx[coreml]"' in refused(*ours)
    assert 'pip install "ssmlx[coreai]"' in refused(*ours, "--target", "coreai")


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("changes", [{"precision": "float32"}, {"prune_to": 10}])
def test_a_package_of_the_real_model_writes_what_mlx_writes(changes, tmp_path, monkeypatch):
    settings = config(context=512, chunk=64, tree=TreeConfig(), **changes)
    export("smollm2-135m-q4_1", "sql", tmp_path / "sql", settings)
    asked = ("--count", "3", "--max-tokens", "32")
    row = measured(tmp_path / "sql", tmp_path, monkeypatch, *asked)
    assert row["same_tokens"] >= (3 if settings.precision == "float32" else 2)  # near-ties flip
