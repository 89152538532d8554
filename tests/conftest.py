"""`ssmlx` before `mlx`, for every test: the package chooses the BLAS that MLX will load."""

from __future__ import annotations

import ssmlx  # noqa: F401
