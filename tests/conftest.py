"""`ssmlx` before `mlx`, for every test: the package chooses the BLAS that MLX will load."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if _WORKER:
    # Workers share the cores, so each takes one; and each has a folder for what MLX's CPU backend
    # compiles, which two at once would write over each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _own = Path(tempfile.gettempdir()) / f"ssmlx-tests-{_WORKER}"
    _own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(_own)


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    """At these sizes a second thread costs more than it brings."""
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch, tmp_path):
    """What this machine was calibrated for decides nothing here."""
    monkeypatch.setattr("ssmlx.tuning.profile._FOLDER", str(tmp_path / "profiles"))
