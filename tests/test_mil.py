"""The MIL interpreter on packages that coremltools saved, against PyTorch and coremltools."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import cache, wraps

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ct = pytest.importorskip("coremltools")
import coremltools.optimize.coreml as cto
from tiny_mil import (
    HEAD_DIM,
    KV_HEADS,
    ROWS,
    SLOTS,
    VOCAB,
    Decoder,
    make_inputs,
    state_names,
)

from convert.mil import Program
from convert.mil.execution import Run
from convert.mil.ops import OPERATIONS
from convert.mil.package import find_model, read_model
from convert.mil.values import DTYPES, read_type
from ssmlx.errors import InputError

logging.getLogger("coremltools").setLevel(logging.ERROR)
STEPS = 4
OUTPUTS = ("choice", "best", "ids", "row")
# Of a write and a layout, every one that the profiles use.
KINDS = {
    "scatter": {"write": "scatter"},
    "onehot": {"write": "onehot", "channels_first": True},
    "slice": {"write": "slice"},
}


@cache
def converted(kind: str, precision: str):
    """The decoder as coremltools converts it."""
    model = Decoder(**KINDS[kind]).eval()
    inputs = make_inputs(0)
    traced = torch.jit.trace(model, tuple(map(torch.from_numpy, inputs.values())))
    shape = (1, KV_HEADS, SLOTS, HEAD_DIM)
    return ct.convert(
        traced,
        inputs=[ct.TensorType(n, shape=x.shape, dtype=x.dtype.type) for n, x in inputs.items()],
        outputs=[ct.TensorType(name) for name in OUTPUTS],
        states=[
            ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name)
            for name in state_names()
        ],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision(precision),
        skip_model_load=True,
    )


@pytest.fixture
def saved(tmp_path):
    """Saves a model of coremltools and gives the path."""

    def save(model, name: str = "model"):
        path = tmp_path / f"{name}.mlpackage"
        model.save(str(path))
        return path

    return save


@cache
def expected(kind: str, half_weights: bool) -> list[tuple[np.ndarray, ...]]:
    """What PyTorch says at each step; with weights that float16 holds where asked."""
    model = Decoder(**KINDS[kind]).eval()
    if half_weights:
        model = model.half().float()
    return [model.predict(make_inputs(step)) for step in range(STEPS)]


def run(path, arithmetic: str = "declared") -> list[dict[str, np.ndarray]]:
    """What the interpreter says at each step."""
    main = Program.load(path, arithmetic=arithmetic).function()
    state = main.make_state()
    return [main.predict(make_inputs(step), state) for step in range(STEPS)]


def furthest(steps, references) -> float:
    """The largest difference of any number of any step; NaN where one is NaN."""
    gaps = [
        np.abs(given[name].astype(np.float64) - reference).max()
        for given, of_step in zip(steps, references, strict=True)
        for name, reference in zip(OUTPUTS, of_step, strict=True)
    ]
    return float(np.max(gaps))


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_decoder_says_what_pytorch_says(saved, kind):
    steps = run(saved(converted(kind, "float32")), "float32")
    references = expected(kind, half_weights=False)
    assert furthest(steps, references) < 1e-5
    for given, reference in zip(steps, references, strict=True):
        assert given["choice"].dtype == np.int32
        np.testing.assert_array_equal(given["choice"], reference[0])


@pytest.mark.parametrize("kind", ["scatter", "onehot"])
def test_a_float16_decoder_is_pytorch_with_halved_weights_and_then_rounded(saved, kind):
    path = saved(converted(kind, "float16"))
    references = expected(kind, half_weights=True)
    assert furthest(run(path, "float32"), references) < 5e-5
    assert 1e-4 < furthest(run(path), references) < 1e-2


def test_float64_shows_the_rounding_of_float32(saved):
    path = saved(converted("scatter", "float32"))
    exact, plain = run(path, "float64"), run(path, "float32")
    gap = furthest(plain, [tuple(step.values()) for step in exact])
    assert exact[0]["row"].dtype == np.float64 and 0 < gap < 1e-5


def test_the_state_is_what_pytorch_keeps(saved):
    main = Program.load(saved(converted("scatter", "float32"))).function()
    model, state = Decoder(**KINDS["scatter"]).eval(), main.make_state()
    assert list(state) == list(main.states) and set(state) == set(state_names())
    for step in range(2):
        main.predict(make_inputs(step), state)
        model.predict(make_inputs(step))
    for name in state_names():
        kept = getattr(model, name).numpy()
        assert state[name].dtype == np.float16 and np.abs(kept[:, :, : 2 * ROWS]).min() > 0
        np.testing.assert_allclose(state[name], kept, atol=2e-3)


# An operation, and what it does in place of the right thing.
WRONG = {
    "an attention mask that is ignored": (
        "scaled_dot_product_attention",
        lambda right, attn_mask, **given: right(**given),
    ),
    "attention that is not scaled": (
        "scaled_dot_product_attention",
        lambda right, query, **given: right(query=4 * query, **given),
    ),
    "rows one slot off": (
        "scatter_along_axis",
        lambda right, indices, **given: right(indices=indices + 1, **given),
    ),
    "rows that are added to what a slot held": (
        "scatter_along_axis",
        lambda right, mode, **given: right(mode="add", **given),
    ),
    "streams without LoRA": ("pad", lambda right, x, **given: right(x=0 * x, **given)),
    "rotary positions that stand still": (
        "gather",
        lambda right, x, indices, **given: right(
            x=x, indices=indices if len(x) == VOCAB else 0 * indices, **given
        ),
    ),
    "halves of a head in the wrong order": (
        "concat",
        lambda right, values, **given: right(values=values[::-1], **given),
    ),
    "the worst candidates": (
        "topk",
        lambda right, ascending, **given: right(ascending=True, **given),
    ),
    "another activation": ("silu", lambda right, x: np.maximum(x, 0)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_one_operation_is_seen(saved, monkeypatch, mistake):
    name, wrong = WRONG[mistake]
    right = OPERATIONS[name]

    @wraps(right.call)
    def call(**given):
        return wrong(right.call, **given)

    monkeypatch.setitem(OPERATIONS, name, replace(right, call=call))
    steps = run(saved(converted("scatter", "float32")), "float32")
    assert furthest(steps, expected("scatter", half_weights=False)) > 1e-3


def test_a_state_that_is_not_written_is_seen(saved, monkeypatch):
    monkeypatch.setattr(Run, "_write", lambda *_: None)
    steps = run(saved(converted("scatter", "float32")), "float32")
    assert furthest(steps, expected("scatter", half_weights=False)) > 1e-3


def quantized(**settings):
    # For linear maps alone: a table of sines has a row of zeros, which no scale fits.
    config = cto.OpLinearQuantizerConfig(weight_threshold=64, **settings)
    chosen = cto.OptimizationConfig(op_type_configs={"linear": config})
    return lambda model: cto.linear_quantize_weights(model, chosen)


def palettized(**settings):
    config = cto.OpPalettizerConfig(mode="uniform", weight_threshold=64, **settings)
    chosen = cto.OptimizationConfig(op_type_configs={"linear": config, "conv": config})
    return lambda model: cto.palettize_weights(model, chosen)


COMPRESSIONS = {
    "int8": quantized(mode="linear_symmetric", dtype="int8"),
    "uint8 with offsets": quantized(mode="linear", dtype="uint8"),
    "int4 in blocks": quantized(
        mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=16
    ),
    "tables of 16 by groups": palettized(nbits=4, granularity="per_grouped_channel", group_size=8),
    "tables of 8 with scales": palettized(nbits=3, enable_per_channel_scale=True),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_weights_are_those_that_coremltools_decompresses(saved, compression):
    compressed = COMPRESSIONS[compression](converted("scatter", "float16"))
    given, dense = run(saved(compressed)), run(saved(cto.decompress_weights(compressed), "dense"))
    assert furthest(given, [tuple(step.values()) for step in dense]) == 0
    lost = np.abs(given[0]["row"] - expected("scatter", half_weights=True)[0][-1]).max()
    assert 5e-3 < lost < 1


def test_an_operation_that_exports_do_not_use_is_named(saved):
    config = cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=64)
    sparse = cto.prune_weights(converted("scatter", "float16"), cto.OptimizationConfig(config))
    with pytest.raises(InputError, match="by the operation constexpr_sparse_to_dense"):
        Program.load(saved(sparse)).function()


def test_two_functions_of_a_package_share_a_state_and_the_weights(saved, tmp_path):
    kinds, merged = {"prefill": "scatter", "decode": "slice"}, tmp_path / "merged.mlpackage"
    parts = ct.utils.MultiFunctionDescriptor()
    for name, kind in kinds.items():
        path = saved(converted(kind, "float32"), name)
        parts.add_function(str(path), "main", name)
    parts.default_function_name = "prefill"
    ct.utils.save_multifunction(parts, str(merged))

    program = Program.load(merged, arithmetic="float32")
    state, order = (
        program.function("prefill").make_state(),
        ["prefill", "prefill", "decode", "decode"],
    )
    steps = [
        program.function(name).predict(make_inputs(step), state) for step, name in enumerate(order)
    ]
    assert set(program.function_names) == set(kinds)
    assert furthest(steps, expected("scatter", half_weights=False)) < 1e-5
    weights = [sum(f.stat().st_size for f in p.rglob("weight.bin")) for p in (merged, path)]
    assert weights[0] < 1.1 * weights[1]


def test_operations_types_and_names_are_read_as_protobuf_reads_them(saved):
    model = converted("scatter", "float16")
    block = model.get_spec().mlProgram.functions["main"].block_specializations["CoreML8"]
    ours = read_model(find_model(saved(model)))["mlProgram"]["functions"]["main"]
    operations = ours["block_specializations"]["CoreML8"]["operations"]
    assert len(operations) == len(block.operations) > 200
    for mine, theirs in zip(operations, block.operations, strict=True):
        assert mine["type"] == theirs.type
        assert set(mine.get("inputs", {})) == set(theirs.inputs)
        for out, other in zip(mine.get("outputs", []), theirs.outputs, strict=True):
            sizes = tuple(d.constant.size for d in other.type.tensorType.dimensions)
            kind = read_type(out["type"], out["name"])
            assert (out["name"], kind.shape) == (other.name, sizes)
            assert DTYPES[other.type.tensorType.dataType] == kind.dtype
