"""Apple's chips in published figures, and when MLX's quantised kernels change on them.

Bandwidth and GPU cores are Apple's, of each chip's largest form, read in reports of its
announcements. Apple publishes no GPU clock: clocks are those that hmc-tech.com lists, and
`clock_from` names the chip whose clock stands in where none was found. Floating-point rates
follow as cores * 128 lanes * 2 * clock, in float32 and float16 alike; for M1 and M2 that gives
the 2.6 and 3.6 TFLOPS that Apple did publish. What M5's neural accelerators add to matrix
products is not published as a rate ("over 4x" of M4's peak for AI), and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

LANES = 128
QMV_TILE = 5
"""Rows that M3 and later multiply with a weight they have read once (qmv_wide)."""
QMM_TILE = 32
"""Rows of a tile of the matrix kernel."""

_M1 = ((2048, 14), (4096, 10), (0, 6))
_M3 = ((2048, 13), (4096, 15), (0, 13))
_M5 = ((2048, 33), (4096, 25), (0, 13))
_ULTRA = ((2048, 32), (4096, 18), (0, 12))
_LIMITS = {1: _M1, 2: _M1, 3: _M3, 4: _M3, 5: _M5}


@dataclass(frozen=True)
class Chip:
    """A chip.

    Attributes:
        name: such as "M2 Pro".
        generation: 1 to 5.
        gpu_cores: of its largest form.
        bandwidth: of its memory, GB/s.
        clock: of its GPU, MHz.
        clock_from: the chip whose clock that is, where its own was not found.
    """

    name: str
    generation: int
    gpu_cores: int
    bandwidth: float
    clock: int
    clock_from: str = ""

    @property
    def is_ultra(self) -> bool:
        """Whether MLX takes it for one of two dies."""
        return self.name.endswith("Ultra")

    @property
    def tflops(self) -> float:
        """Peak of its ordinary lanes, 10^12 operations a second."""
        return self.gpu_cores * LANES * 2 * self.clock / 1e6

    def matrix_rows(self, inner: int, outer: int) -> int:
        """Rows from which on a quantised product is left to the matrix kernel.

        As `get_qmv_batch_limit` of MLX 0.32 has it, for transposed weights [outer, inner].
        """
        limits = _ULTRA if self.is_ultra else _LIMITS[self.generation]
        for size, rows in limits:
            if not size or (inner <= size and outer <= size):
                return rows
        raise AssertionError("the last limit holds for every size")

    def weight_passes(self, rows: int, inner: int, outer: int) -> int:
        """How often the kernel that MLX takes asks for each quantised weight.

        Caches may answer all but the first time.
        """
        if rows >= self.matrix_rows(inner, outer):
            return ceil(rows / QMM_TILE)
        return ceil(rows / QMV_TILE) if self.generation >= 3 else rows


CHIPS = (
    Chip("M1", 1, 8, 68.25, 1278),
    Chip("M1 Pro", 1, 16, 200, 1290, "M1 Ultra"),
    Chip("M1 Max", 1, 32, 400, 1290, "M1 Ultra"),
    Chip("M1 Ultra", 1, 64, 800, 1290),
    Chip("M2", 2, 10, 100, 1398),
    Chip("M2 Pro", 2, 19, 200, 1398, "M2 Max"),
    Chip("M2 Max", 2, 38, 400, 1398),
    Chip("M2 Ultra", 2, 76, 800, 1398, "M2 Max"),
    Chip("M3", 3, 10, 100, 1398),
    Chip("M3 Pro", 3, 18, 150, 1398),
    Chip("M3 Max", 3, 40, 400, 1398),
    Chip("M3 Ultra", 3, 80, 819, 1398, "M3 Max"),
    Chip("M4", 4, 10, 120, 1470),
    Chip("M4 Pro", 4, 20, 273, 1470),
    Chip("M4 Max", 4, 40, 546, 1678),
    Chip("M5", 5, 10, 153, 1740),
    Chip("M5 Pro", 5, 20, 307, 1740, "M5"),
    Chip("M5 Max", 5, 40, 614, 1740, "M5"),
)
