"""Apple's chips in published figures, and what their bandwidth and arithmetic allow.

The roofline that section 4.1.2 of the paper argues from. A forward reads its weights and
multiplies them with R rows. It takes at least as long as the memory needs for the bytes, and as
the lanes need for the arithmetic:

    seconds >= max(bytes / bandwidth, 2 * R * weights / peak)

Plain decoding has one row, and waits for memory; a tree's rows ride on the same bytes. Two bounds
are given: `once`, every weight comes from memory one time, and `repeated`, as often as MLX's
kernel asks for it. Launching kernels, building graphs, unpacking weights, norms and softmax are
left out, so small models stay below what is said here. These are predictions, not measurements.

Bandwidth and GPU cores are Apple's, of each chip's largest form, read in reports of its
announcements. Apple publishes no GPU clock: clocks are those that hmc-tech.com lists, and
`clock_from` names the chip whose clock stands in where none was found. Floating-point rates
follow as cores * 128 lanes * 2 * clock, in float32 and float16 alike; for M1 and M2 that gives
the 2.6 and 3.6 TFLOPS that Apple did publish. What M5's neural accelerators add to matrix
products is not published as a rate ("over 4x" of M4's peak for AI), and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from ssmlx.tuning.cost import StepCosts, Surface

Bound = Literal["once", "repeated"]
Matrix = tuple[int, int]
"""(inner, outer) of a product x @ W.T, x of [R, inner]."""
GROUP = 64
ROWS = tuple(range(1, 65))
_FAR = 8192

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


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder of regular layers, in numbers.

    Attributes:
        name: what it is called.
        hidden, heads, kv_heads, head_size, inner, layers, vocab: its sizes.
        msa_layers: Ns, the top layers through which streams run.
        num_streams: G.
        draft_vocab: tokens that streams draft from.
        bits: of a weight; 16 is not quantised. Quantised ones come with a scale and a bias of 16
            bits for every `GROUP`.
        is_gated: whether the MLP has a gate beside its two products.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    layers: int
    vocab: int
    msa_layers: int
    num_streams: int
    draft_vocab: int
    bits: int
    is_gated: bool = True

    @property
    def weight_bytes(self) -> float:
        """Of one weight, its share of scales and biases included."""
        return self.bits / 8 + (4 / GROUP if self.bits < 16 else 0)

    @property
    def layer(self) -> tuple[Matrix, ...]:
        """The products of a layer."""
        query, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = ((self.hidden, query), (self.hidden, keys), (self.hidden, keys))
        ends = ((query, self.hidden), (self.inner, self.hidden))
        inner = ((self.hidden, self.inner),) * (2 if self.is_gated else 1)
        return (*attention, *ends, *inner)

    @property
    def num_weights(self) -> int:
        """Weights that a call reads: all layers and the head."""
        layers = self.layers * sum(inner * outer for inner, outer in self.layer)
        return layers + self.hidden * self.vocab

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in one layer, of 16 bits."""
        return 2 * 2 * self.kv_heads * self.head_size

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], **settings: Any) -> Decoder:
        """From a config.json."""
        heads = int(config["num_attention_heads"])
        size = config.get("head_dim") or int(config["hidden_size"]) // heads
        return cls(
            name=name,
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(size),
            inner=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            vocab=int(config["vocab_size"]),
            **settings,
        )


@dataclass(frozen=True)
class Work:
    """What some rows ask of a chip.

    Attributes:
        read: bytes from memory.
        operations: floating-point ones.
    """

    read: float
    operations: float

    def __add__(self, other: Work) -> Work:
        return Work(self.read + other.read, self.operations + other.operations)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.read

    def seconds(self, chip: Chip) -> float:
        """At least."""
        return max(self.read / (chip.bandwidth * 1e9), self.operations / (chip.tflops * 1e12))


def product(decoder: Decoder, chip: Chip, bound: Bound, matrix: Matrix, rows: int) -> Work:
    """One product of `rows` rows."""
    inner, outer = matrix
    passes = 1
    if bound == "repeated" and decoder.bits < 16:
        passes = chip.weight_passes(rows, inner, outer)
    return Work(passes * inner * outer * decoder.weight_bytes, 2.0 * rows * inner * outer)


def layers_seconds(
    decoder: Decoder, chip: Chip, bound: Bound, layers: int, rows: int, context: int
) -> float:
    """`layers` layers on `rows` rows behind `context` tokens, each product after the other."""
    products = [product(decoder, chip, bound, matrix, rows) for matrix in decoder.layer]
    keys = decoder.cache_bytes * context
    attended = 4.0 * rows * context * decoder.heads * decoder.head_size
    return layers * sum(one.seconds(chip) for one in (*products, Work(keys, attended)))


def costs(decoder: Decoder, chip: Chip, bound: Bound) -> StepCosts:
    """What steps would cost at least, in the form that measured costs have."""
    upper = decoder.msa_layers
    lower, streams = decoder.layers - upper, decoder.num_streams

    def head_seconds(vocab: int, rows: int) -> float:
        return product(decoder, chip, bound, (decoder.hidden, vocab), rows).seconds(chip)

    def run(layers: int, rows: Sequence[int], vocab: int = 0) -> Surface:
        return Surface.of(
            {
                (row, context): layers_seconds(decoder, chip, bound, layers, row, context)
                + (head_seconds(vocab, row) if vocab else 0.0)
                for row in rows
                for context in (0, _FAR)
            }
        )

    def head(vocab: int, rows: Sequence[int]) -> Surface:
        return Surface.of({(row, 0): head_seconds(vocab, row) for row in rows})

    return StepCosts(
        plain=run(decoder.layers, [1], decoder.vocab),
        lower=run(lower, ROWS),
        upper=run(upper, ROWS),
        fused=run(upper, [row * (1 + streams) for row in ROWS]),
        head=head(decoder.vocab, ROWS),
        draft_head=head(decoder.draft_vocab, range(1, streams + 1)),
        early_exit=head(decoder.vocab, ROWS),
    )


def call_work(decoder: Decoder, rows: int) -> Work:
    """A whole forward of `rows` rows, weights read once, no context: a point of the roofline."""
    weights = decoder.num_weights
    return Work(weights * decoder.weight_bytes, 2.0 * rows * weights)
