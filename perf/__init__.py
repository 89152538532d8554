"""Measurements: what is claimed of the package, and the commands that show it."""

import ssmlx  # noqa: F401  (before MLX, so that OpenBLAS serves both sides of a comparison)
