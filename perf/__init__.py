"""Measurements: the commands that support the package's claims."""

import ssmlx  # noqa: F401  (before MLX, so that OpenBLAS serves both sides of a comparison)
