"""`ssmlx` before `mlx`, for every test: the package chooses the BLAS that MLX will load."""

from __future__ import annotations

import ssmlx  # noqa: F401  # isort: skip
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    """At these sizes a second thread costs more than it brings."""
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch, tmp_path):
    """What this machine was calibrated for decides nothing here."""
    monkeypatch.setattr("ssmlx.tuning._FOLDER", str(tmp_path / "profiles"))
