"""From a call of a Metal kernel to the source that MLX generates for it, and to numbers on a CPU.

While a function is exported, MLX writes a kernel's whole source without Metal, and prints it when
asked. A C++ compiler then takes that text: `include/msl.h` gives the words of Metal's language a
meaning, `include/gpu.h` runs threads, barriers and simdgroups. Only three things are rewritten:
attributes go, threadgroup arrays become one for all threads, and the entry point is called by name.

What it cannot show: that Apple's compiler takes the source, its fast-math, registers, speed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ssmlx.model.metal.kernels import Call, Kernel

INCLUDE = Path(__file__).with_name("include")
# Fibers are made with glibc's makecontext.
COMPILER = shutil.which("g++") or shutil.which("clang++") if sys.platform == "linux" else None
NO_COMPILER = "the shim needs Linux, and g++ or clang++"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wconversion")
QUIET = ("-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-sign-conversion")
SANITISE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NUMPY_TYPES = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16}

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.DOTALL)
_BUFFER = re.compile(r"\s*(?:const )?(device|constant) (\w+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]")
_ATTRIBUTE = re.compile(r"\s*(\w+) (\w+) \[\[(\w+)\]\]")
_INSTANCE = re.compile(
    r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*?)\).*", re.S
)
_SHARED = re.compile(r"^(\s*)threadgroup (\w+) (\w+)\[(.*)\];$", re.MULTILINE)
_VALUES = {
    "thread_position_in_grid": "gpu::self().position",
    "threadgroup_position_in_grid": "gpu::group.position",
    "threadgroups_per_grid": "gpu::group.groups",
    "threads_per_threadgroup": "gpu::group.size",
    "thread_index_in_threadgroup": "gpu::self().index",
    "thread_index_in_simdgroup": "gpu::self().lane()",
    "simdgroup_index_in_threadgroup": "gpu::self().simdgroup()",
    "simdgroups_per_threadgroup": "unsigned(gpu::group.simdgroups.size())",
}


class KernelFailedError(RuntimeError):
    """What a run ended with: a barrier that not all reach, a read out of bounds, a compiler's."""


def generated_source(kernel: Kernel, call: Call) -> str:
    """The Metal source that MLX makes of a call. Only sizes and types of its inputs count."""

    def traced(*inputs: mx.array) -> list[mx.array]:
        return kernel.build()(**{**vars(call), "inputs": list(inputs)}, verbose=True)

    with tempfile.TemporaryDirectory() as folder:
        with Printed(Path(folder) / "printed") as printed:
            mx.export_function(str(Path(folder) / "kernel.mlxfn"), traced, *call.inputs)
        return printed.text.split("```\n", 1)[1].rsplit("\n```", 1)[0]


class Printed:
    """What C++ prints meanwhile, which Python's own redirection does not see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""

    def __enter__(self) -> Printed:
        self._stdout = os.dup(1)
        with self.path.open("w") as file:
            os.dup2(file.fileno(), 1)
        return self

    def __exit__(self, *error: object) -> None:
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
        self.text = self.path.read_text()


@dataclass(frozen=True)
class Buffer:
    """A buffer of a kernel's signature."""

    space: str
    type: str
    is_pointer: bool
    name: str


def buffers_of(source: str) -> list[Buffer]:
    """The buffers of a generated signature, in order."""
    found = [_BUFFER.match(line) for line in _parameters(source)]
    return [Buffer(m[1], m[2], m[3] == "*", m[4]) for m in found if m]


def _parameters(source: str) -> list[str]:
    signature = _SIGNATURE.search(source)
    assert signature is not None, "MLX generated another form of signature"
    return signature[2].split(",\n")


def without_attributes(source: str, shared: str) -> tuple[str, str]:
    """A generated source in C++'s terms, and its entry point's name with template arguments.

    Args:
        source: as MLX prints it.
        shared: what becomes of an array in threadgroup memory: \\2 is its type, \\3 its name.
    """
    instance = _INSTANCE.search(source)
    assert instance is not None, "MLX generated another form of instantiation"
    body = _SHARED.sub(shared, source[: instance.start()])
    return re.sub(r" ?\[\[\w+(\(\d+\))?\]\]", "", body), instance[1]


def to_cpp(source: str) -> str:
    """The generated Metal source as a C++ program around it; see `include/host.h`."""
    body, instance = without_attributes(source, r"\1auto& \3 = gpu::shared<\2[\4]>();")
    arguments = [
        f"{'' if b.is_pointer else '*'}reinterpret_cast<{b.type}*>(buffers[{i}])"
        for i, b in enumerate(buffers_of(source))
    ]
    attributes = [m for m in map(_ATTRIBUTE.match, _parameters(source)) if m]
    arguments += [_VALUES[m[3]] for m in attributes]
    return (
        '#include "msl.h"\n#define threadgroup\n#line 1 "kernel.metal"\n'
        f"{body}\nint main(int argc, char** argv) {{\n"
        f"  return gpu::serve(argc, argv, [](char** buffers) {{\n"
        f"    {instance}(\n        " + ",\n        ".join(arguments) + ");\n  });\n}\n"
    )


@dataclass(frozen=True)
class Program:
    """A compiled kernel.

    Attributes:
        source: the Metal source.
        binary: the program around it.
        warnings: what the compiler said.
    """

    source: str
    binary: Path
    warnings: str

    def run(
        self,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, tuple[tuple[int, ...], Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        order: int = 0,
    ) -> dict[str, np.ndarray]:
        """The outputs of one launch, by name.

        Args:
            inputs: by name; views keep their strides, and the kernel sees all of their base.
            outputs: shape and type of each; filled with NaN before the launch.
            grid: threads in all.
            threadgroup: threads of a threadgroup.
            order: who runs first; see `gpu::in_order`.

        Raises:
            KernelFailedError: the run ended with a message.
        """
        filled = {
            n: np.full(s, np.nan, t) if t != np.uint16 else np.full(s, 0xFFFF, t)
            for n, (s, t) in outputs.items()
        }
        arrays = [_array_of(b.name, inputs, filled) for b in buffers_of(self.source)]
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "in"
            read = Path(folder) / "out"
            is_output = [b.name in filled for b in buffers_of(self.source)]
            _write_launch(written, arrays, is_output, (*grid, *threadgroup, order))
            _execute([self.binary, written, read])
            raw = read.read_bytes()
        return _split(raw, filled)


def _array_of(
    name: str, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> np.ndarray:
    if name in inputs or name in outputs:
        return inputs.get(name, outputs.get(name))
    owner, _, what = name.rpartition("_")
    array = inputs[owner]
    if what == "shape":
        return np.array(array.shape, np.int32)
    assert what == "strides", name
    return np.array([stride // array.itemsize for stride in array.strides], np.int64)


def _write_launch(
    path: Path, arrays: list[np.ndarray], is_output: list[bool], head: tuple[int, ...]
) -> None:
    layout = []
    data = []
    for array, output in zip(arrays, is_output, strict=True):
        base = array if array.base is None else array.base
        assert base.flags.c_contiguous
        offset = array.ctypes.data - base.ctypes.data
        layout += [base.nbytes, offset, int(output)]
        data.append(base.tobytes())
    numbers = np.array([*head, len(arrays), *layout], np.uint32)
    path.write_bytes(numbers.tobytes() + b"".join(data))


def _execute(command: list[Any], seconds: float = 120) -> str:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise KernelFailedError(f"no end after {seconds} s") from error
    if done.returncode:
        raise KernelFailedError(done.stderr or f"ended by signal {-done.returncode}")
    return done.stderr


def _split(raw: bytes, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {}
    at = 0
    for name, array in outputs.items():
        part = np.frombuffer(raw, array.dtype, array.size, at)
        found[name] = part.reshape(array.shape)
        at = at + array.nbytes
    return found


def build(source: str, folder: Path, flags: tuple[str, ...] = ()) -> Program:
    """Compile a generated source, once for each text, into `folder`.

    Raises:
        KernelFailedError: it does not compile.
    """
    assert COMPILER is not None
    shim = "".join(path.read_text() for path in sorted(INCLUDE.iterdir()))
    options = (*FLAGS, *QUIET, *flags)
    text = to_cpp(source)
    name = hashlib.sha256(f"{text}{shim}{options}{COMPILER}".encode()).hexdigest()[:16]
    binary = folder / name
    said = folder / f"{name}.txt"
    if not said.exists():
        (folder / f"{name}.cpp").write_text(text)
        command = [COMPILER, *options, f"-I{INCLUDE}", folder / f"{name}.cpp", "-o", binary]
        said.write_text(_execute(command, 300))
    return Program(source, binary, said.read_text())


class Shim:
    """Stands in for `kernels.run_on_metal`: MLX arrays in, MLX arrays out.

    Args:
        folder: where compiled programs are kept.
        order: which threads run first.
        strided: inputs by name whose strides MLX's arrays would not show; others lie densely.
        flags: more flags for the compiler.
    """

    def __init__(
        self,
        folder: Path,
        *,
        order: int = 0,
        strided: dict[str, np.ndarray] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.order = order
        self.calls = 0
        self.strided = strided or {}
        self.flags = flags

    def __call__(self, kernel: Kernel, call: Call) -> list[mx.array]:
        self.calls += 1
        program = build(generated_source(kernel, call), self.folder, self.flags)
        inputs = {n: to_numpy(a) for n, a in zip(kernel.inputs, call.inputs, strict=True)}
        inputs |= {name: raw for name, raw in self.strided.items() if name in inputs}
        types = list(zip(kernel.outputs, call.output_shapes, call.output_dtypes, strict=True))
        outputs = {name: (shape, NUMPY_TYPES[dtype]) for name, shape, dtype in types}
        found = program.run(inputs, outputs, call.grid, call.threadgroup, self.order)
        return [to_mlx(found[name], dtype) for name, _, dtype in types]


def to_numpy(array: mx.array) -> np.ndarray:
    """The elements of an array, in memory of their own; bfloat16 as uint16."""
    raw = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(raw).copy()


def to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """The reverse."""
    found = mx.array(array)
    return found.view(mx.bfloat16) if dtype == mx.bfloat16 else found
