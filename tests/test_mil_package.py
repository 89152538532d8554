"""The MIL interpreter on packages written byte by byte: reading, rounding, states, bad input."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
from mil_writer import (
    blob_const,
    blob_file,
    const,
    function,
    named,
    operation,
    write_package,
)

from convert.mil import ExecutionError, Program
from convert.mil.blobs import BlobFile
from convert.mil.values import DTYPES, TensorType
from ssmlx.errors import InputError

MODEL, WEIGHTS = "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"
X = named("x", "float16", 4)


def add_and_mul(kind: str = "add", **more: str) -> bytes:
    """(x + 0.1) * x, and x + 0.1 itself."""
    return function(
        [X],
        [
            const("tenth", np.float16([0.1])),
            operation(kind, {"x": "x", "y": "tenth", **more}, named("sum", "float16", 4)),
            operation("mul", {"x": "sum", "y": "x"}, named("product", "float16", 4)),
        ],
        ["product", "sum"],
    )


def matrix(*, name: str = "w", offset: int = 64) -> bytes:
    """x times a matrix [3, 4] of the weights file."""
    return function(
        [X],
        [
            blob_const(name, "float16", (3, 4), offset),
            operation("linear", {"x": "x", "weight": name}, named("y", "float16", 3)),
        ],
        ["y"],
    )


W = np.arange(12, dtype=np.float16).reshape(3, 4) / 8
FILE, (OFFSET,) = blob_file(("float16", W.tobytes()))


@pytest.fixture
def simple(tmp_path):
    return write_package(tmp_path / "p", {"main": add_and_mul()}, maker="me")


@pytest.fixture
def weighted(tmp_path):
    return write_package(tmp_path / "p", {"main": matrix()}, FILE)


def message_of(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and "; expected " in text
    return text


def test_a_package_says_what_it_takes_and_gives(simple):
    program = Program.load(simple)
    main = program.function()
    assert program.metadata == {"maker": "me"} and program.function_names == ("main",)
    assert {name: str(kind) for name, kind in main.inputs.items()} == {"x": "fp16[4]"}
    assert {n: str(k) for n, k in main.outputs.items()} == {"product": "fp16[4]", "sum": "fp16[4]"}
    assert main.states == {} and main.make_state() == {}


def test_declared_arithmetic_rounds_to_half_after_every_operation(simple):
    x = np.random.default_rng(0).normal(0, 3, 4).astype(np.float16)
    given = Program.load(simple).function().predict({"x": x})
    total = x + np.float16([0.1])
    assert given["sum"].dtype == np.float16
    np.testing.assert_array_equal(given["sum"], total)
    np.testing.assert_array_equal(given["product"], total * x)


@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
def test_wider_arithmetic_does_not_round_to_half(simple, arithmetic):
    x = np.float16([1.1, 2.3, -0.7, 1000])
    given = Program.load(simple, arithmetic=arithmetic).function().predict({"x": x})
    wide = x.astype(arithmetic)
    expected = (wide + np.float16([0.1]).astype(arithmetic)) * wide
    assert given["product"].dtype == arithmetic
    np.testing.assert_array_equal(given["product"], expected)


def test_halves_overflow_to_infinity_without_a_warning(simple, recwarn):
    given = Program.load(simple).function().predict({"x": np.full(4, 60000, np.float16)})
    assert np.isinf(given["product"]).all() and not recwarn.list


def test_weights_come_from_the_blob_that_the_program_names(tmp_path):
    data, offsets = blob_file(("int8", b"abc"), ("float16", W.tobytes()))
    package = write_package(tmp_path / "p", {"main": matrix(offset=offsets[1])}, data)
    x = np.float16([1, 2, 3, 4])
    np.testing.assert_array_equal(Program.load(package).function().predict({"x": x})["y"], W @ x)


@pytest.mark.parametrize("dtype", ["uint1", "uint2", "uint3", "uint4", "uint6", "int4"])
def test_packed_elements_are_unpacked_bit_by_bit(tmp_path, dtype):
    bits, signed = int(dtype[-1]), dtype[0] == "i"
    low = -(1 << (bits - 1)) if signed else 0
    values = [low + (i * 5 + i // 3) % (1 << bits) for i in range(33)]
    number = sum((v & ((1 << bits) - 1)) << (bits * i) for i, v in enumerate(values))
    data, (offset,) = blob_file((dtype, number.to_bytes(-(-33 * bits // 8), "little")))
    (tmp_path / "w").write_bytes(data)
    kind = next(d for d in DTYPES.values() if d.name == dtype)
    read = BlobFile(tmp_path / "w").read(offset, TensorType(kind, (3, 11)))
    assert read.ravel().tolist() == values and read.shape == (3, 11)


def test_a_blockwise_scale_is_applied_to_its_own_block(tmp_path):
    scales = np.float16([[1, 2], [3, 4]])
    offsets = np.float16([[0, 1], [0, 1]])
    data, (d, s, o) = blob_file(
        ("int4", bytes([0x21, 0x43, 0x65, 0xF7])),
        ("float16", scales.tobytes()),
        ("float16", offsets.tobytes()),
    )
    main = function(
        [named("x", "float16", 2, 4)],
        [
            blob_const("d", "int4", (2, 4), d),
            blob_const("s", "float16", (2, 2), s),
            blob_const("o", "float16", (2, 2), o),
            operation(
                "constexpr_blockwise_shift_scale",
                {"data": "d", "scale": "s", "offset": "o"},
                named("w", "float16", 2, 4),
            ),
            operation("add", {"x": "x", "y": "w"}, named("y", "float16", 2, 4)),
        ],
        ["y"],
    )
    package = write_package(tmp_path / "p", {"main": main}, data)
    given = Program.load(package).function().predict({"x": np.zeros((2, 4), np.float16)})
    assert given["y"].tolist() == [[1, 2, 4, 6], [15, 18, 24, -8]]


def counter(writes: bool = True) -> bytes:
    """Reads a sum, adds x to it, writes it, and reads it again."""
    kind = named("s", "float16", 4)
    change = operation("write_state", {"input": "total", "data": "s"})
    return function(
        [X, named("total", "float16", 4, state=True)],
        [
            operation("read_state", {"input": "total"}, named("old", "float16", 4)),
            operation("add", {"x": "old", "y": "x"}, kind),
            *([change] if writes else []),
            operation("read_state", {"input": "total"}, named("new", "float16", 4)),
        ],
        ["old", "new"],
    )


def test_states_live_between_calls_and_are_read_in_the_order_of_the_program(tmp_path):
    main = Program.load(write_package(tmp_path / "p", {"main": counter()})).function()
    state, x = main.make_state(), np.float16([1, 2, 3, 4])
    assert {name: str(kind) for name, kind in main.states.items()} == {"total": "fp16[4]"}
    for call in range(3):
        given = main.predict({"x": x}, state)
        np.testing.assert_array_equal(given["old"], call * x)
        np.testing.assert_array_equal(given["new"], (call + 1) * x)
    assert state["total"].dtype == np.float16


def test_a_shallow_copy_of_the_state_is_a_snapshot(tmp_path):
    main = Program.load(write_package(tmp_path / "p", {"main": counter()})).function()
    state, x = main.make_state(), np.float16([1, 2, 3, 4])
    main.predict({"x": x}, state)
    snapshot = dict(state)
    first = main.predict({"x": x}, state)["new"]
    np.testing.assert_array_equal(main.predict({"x": x}, snapshot)["new"], first)


def test_a_run_that_fails_leaves_the_state_alone(tmp_path):
    body = [
        operation("write_state", {"input": "total", "data": "x"}),
        operation("gather", {"x": "x", "indices": "i"}, named("y", "float16", 1)),
    ]
    given = [X, named("total", "float16", 4, state=True), named("i", "int32", 1)]
    main = write_package(tmp_path / "p", {"main": function(given, body, ["y"])})
    main = Program.load(main).function()
    state, ones = main.make_state(), np.ones(4, np.float16)
    with pytest.raises(ExecutionError):
        main.predict({"x": ones, "i": np.array([9])}, state)
    assert not state["total"].any()
    main.predict({"x": ones, "i": np.array([0])}, state)
    assert state["total"].all()


def test_functions_share_the_weights_that_they_have_in_common(tmp_path, monkeypatch):
    reads, read = [], BlobFile.read
    monkeypatch.setattr(BlobFile, "read", lambda *a: reads.append(a[1]) or read(*a))
    both = {"prefill": matrix(), "decode": matrix(name="other")}
    program = Program.load(write_package(tmp_path / "p", both, FILE))
    x = np.float16([1, 2, 3, 4])
    given = [program.function(name).predict({"x": x})["y"] for name in (*both, *both)]
    assert reads == [OFFSET] and len({tuple(y.tolist()) for y in given}) == 1


def test_a_value_is_dropped_after_its_last_use(tmp_path):
    count, seen = 6, []
    links = [
        operation("square", {"x": f"v{i}"}, named(f"v{i + 1}", "float16", 4)) for i in range(count)
    ]
    main = function([named("v0", "float16", 4)], links, [f"v{count}"])

    def observe(name, value):
        seen.append((name, weakref.ref(value)))
        # The one before is in use; whatever was before that is gone.
        assert all(ref() is None for _, ref in seen[:-2])

    program = Program.load(write_package(tmp_path / "p", {"main": main}))
    program.function().predict({"v0": np.ones(4, np.float16)}, observe=observe)
    assert [name for name, _ in seen] == [f"v{i + 1}" for i in range(count)]


def test_an_unknown_operation_is_named(tmp_path):
    package = write_package(tmp_path / "p", {"main": add_and_mul("frobnicate")})
    with pytest.raises(InputError) as error:
        Program.load(package).function()
    assert "makes sum by the operation frobnicate" in message_of(error)


def test_an_input_that_an_operation_has_not_is_named(tmp_path):
    package = write_package(tmp_path / "p", {"main": add_and_mul(beta="tenth")})
    with pytest.raises(InputError, match="add of sum has inputs beta, x, y"):
        Program.load(package).function()


@pytest.mark.parametrize("kept", [0, 1, 20, 100, 200, -1])
def test_a_truncated_program_is_one_line(simple, kept):
    path = simple / MODEL
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"cannot be read|holds no ML program") as error:
        Program.load(simple)
    message_of(error)


def test_random_damage_is_an_input_error_or_a_whole_program(simple):
    path, rng = simple / MODEL, np.random.default_rng(0)
    data, refused = path.read_bytes(), 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            program = Program.load(simple)
            for name in program.function_names:
                program.function(name)
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("kept", [0, 30, 100, len(FILE) - 64])
def test_truncated_weights_are_one_line_before_anything_runs(weighted, kept):
    path = weighted / WEIGHTS
    path.write_bytes(FILE[:kept])
    with pytest.raises(InputError, match=f"weight.bin has {kept} bytes") as error:
        Program.load(weighted).function()
    message_of(error)


def test_weights_of_another_package_are_refused(weighted):
    other, _ = blob_file(("float16", bytes(20)))
    (weighted / WEIGHTS).write_bytes(other)
    with pytest.raises(InputError, match=r"has no fp16\[3, 4\] at 64"):
        Program.load(weighted).function()


def test_missing_parts_are_named(weighted, tmp_path):
    (weighted / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"weight.bin does not exist"):
        Program.load(weighted).function()
    (weighted / MODEL).unlink()
    with pytest.raises(InputError, match=r"model.mlmodel does not exist"):
        Program.load(weighted)
    (weighted / "Manifest.json").write_text('{"itemInfo')
    with pytest.raises(InputError, match="does not say where the model is"):
        Program.load(weighted)
    with pytest.raises(InputError, match=r"Manifest\.json does not exist"):
        Program.load(tmp_path / "nowhere")


def test_a_missing_function_and_an_unknown_arithmetic_are_named(simple):
    with pytest.raises(InputError, match="no function decode; expected one of main"):
        Program.load(simple).function("decode")
    with pytest.raises(InputError, match="arithmetic 'exact'"):
        Program.load(simple, arithmetic="exact")


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ({}, "missing x"),
        ({"x": np.zeros(4, np.float16), "y": np.zeros(1)}, "spare y"),
        ({"x": np.zeros((1, 4), np.float16)}, r"x is float16\[1, 4\]"),
        ({"x": np.zeros(4, np.int32)}, r"x is int32\[4\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(simple, inputs, found):
    with pytest.raises(InputError, match=found) as error:
        Program.load(simple).function().predict(inputs)
    message_of(error)


def test_integers_must_be_held_by_the_declared_type(tmp_path):
    kind = named("y", "uint16", 2)
    main = function([named("x", "uint16", 2)], [operation("identity", {"x": "x"}, kind)], ["y"])
    main = Program.load(write_package(tmp_path / "p", {"main": main})).function()
    assert main.predict({"x": np.array([1, 65535])})["y"].tolist() == [1, 65535]
    with pytest.raises(InputError, match=r"x is int64\[2\]"):
        main.predict({"x": np.array([1, 65536])})


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (None, "missing total"),
        ({"total": np.zeros(4, np.float32)}, r"total is float32\[4\]"),
        ({"total": np.zeros(3, np.float16)}, r"total is float16\[3\]"),
    ],
)
def test_states_that_do_not_fit_are_named(tmp_path, state, found):
    main = Program.load(write_package(tmp_path / "p", {"main": counter()})).function()
    with pytest.raises(InputError, match=found):
        main.predict({"x": np.zeros(4, np.float16)}, state)


@pytest.mark.parametrize(
    ("kind", "declared", "found"),
    [
        ("reduce_sum", named("y", "float16", 4), r"reduce_sum of y: gives shape \[\], declared"),
        ("reduce_argmax", named("y", "float16"), "gives int32, declared"),
        ("abs", named("y", "int32", 4), "gives float32, declared"),
    ],
)
def test_a_result_that_is_not_as_declared_is_an_error(tmp_path, kind, declared, found):
    main = function([X], [operation(kind, {"x": "x"}, declared)], ["y"])
    main = Program.load(write_package(tmp_path / "p", {"main": main})).function()
    with pytest.raises(ExecutionError, match=found):
        main.predict({"x": np.zeros(4, np.float16)})


def test_an_index_outside_the_array_is_an_error(tmp_path):
    main = function(
        [X, named("i", "int32", 2)],
        [operation("gather", {"x": "x", "indices": "i"}, named("y", "float16", 2))],
        ["y"],
    )
    main = Program.load(write_package(tmp_path / "p", {"main": main})).function()
    x = np.float16([5, 6, 7, 8])
    assert main.predict({"x": x, "i": np.array([3, 0])})["y"].tolist() == [8, 5]
    for wrong in ([4, 0], [0, -1]):
        with pytest.raises(ExecutionError, match="gather of y: has indices"):
            main.predict({"x": x, "i": np.array(wrong)})


def test_the_interpreter_needs_no_coremltools():
    folder = Path(__file__).parents[1] / "convert" / "mil"
    for path in folder.rglob("*.py"):
        assert "import coremltools" not in path.read_text()
