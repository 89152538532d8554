"""`ssmlx` before `mlx`, for every test: the package chooses the BLAS that MLX will load."""

from __future__ import annotations

import ssmlx  # noqa: F401  # isort: skip
import pytest


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch, tmp_path):
    """What this machine was calibrated for decides nothing here."""
    monkeypatch.setattr("ssmlx.tuning._FOLDER", str(tmp_path / "profiles"))
