"""The preloaded conversions that make Core AI's float16 bearable on Linux give numpy's bits."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or shutil.which("cc") is None
    or " f16c " not in Path("/proc/cpuinfo").read_text(),
    reason="for Linux on x86-64, with a C compiler",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("half") / "half_conversions.so"
    source = ROOT / "perf" / "half_conversions.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", path, source], check=True)
    return ctypes.CDLL(str(path))


def converted(function, bits: np.ndarray) -> np.ndarray:
    """32 bits in, 32 bits out: a half is the low 16 of them, as in its register."""
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    given = np.ascontiguousarray(bits, np.uint32).view(np.float32)
    return np.array([function(float(one)) for one in given], np.float32).view(np.uint32)


def test_every_half_becomes_its_float(library):
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[~np.isnan(halves.view(np.float16))]
    found = converted(library["__extendhfsf2"], halves)
    assert np.array_equal(found, halves.view(np.float16).astype(np.float32).view(np.uint32))


def test_floats_are_rounded_to_the_nearest_half(library):
    rng = np.random.default_rng(0)
    halves = rng.integers(0, 0x7C00, 4000, dtype=np.uint16).view(np.float16).astype(np.float32)
    above = np.nextafter(halves.astype(np.float16), np.float16(np.inf)).astype(np.float32)
    floats = np.concatenate(
        [
            rng.normal(size=4000) * 10.0 ** rng.integers(-8, 6, 4000),
            (halves + above) / 2,  # ties
            [0.0, -0.0, 65504, 65519.99, 65520, 1e30, -np.inf, 6e-8, 2.98e-8, 2.9e-8],
        ]
    ).astype(np.float32)
    found = converted(library["__truncsfhf2"], floats.view(np.uint32))
    with np.errstate(over="ignore"):
        expected = floats.astype(np.float16).view(np.uint16)
    assert np.array_equal(found.astype(np.uint16), expected)
