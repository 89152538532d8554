"""The PyTorch side: checkpoints into MLX adapters, and the reference forward of the model."""

import ssmlx  # noqa: F401  (before MLX, so that it finds OpenBLAS)
