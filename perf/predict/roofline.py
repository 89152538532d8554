"""What bandwidth and arithmetic allow: the roofline that section 4.1.2 of the paper argues from.

A forward reads its weights and multiplies them with R rows. It takes at least as long as the
memory needs for the bytes, and as the lanes need for the arithmetic:

    seconds >= max(bytes / bandwidth, 2 * R * weights / peak)

Plain decoding has one row, and waits for memory; a tree's rows ride on the same bytes. Two bounds
are given: `once`, every weight comes from memory one time, and `repeated`, as often as MLX's
kernel asks for it. Launching kernels, building graphs, unpacking weights, norms and softmax are
left out, so small models stay below what is said here. These are predictions, not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ssmlx.tuning.cost import StepCosts, Surface

from .chips import Chip

Bound = Literal["once", "repeated"]
Matrix = tuple[int, int]
"""(inner, outer) of a product x @ W.T, x of [R, inner]."""
GROUP = 64
ROWS = tuple(range(1, 65))
_FAR = 8192


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


def head_seconds(decoder: Decoder, chip: Chip, bound: Bound, rows: int, vocab: int) -> float:
    """A head of `vocab` tokens."""
    return product(decoder, chip, bound, (decoder.hidden, vocab), rows).seconds(chip)


def costs(decoder: Decoder, chip: Chip, bound: Bound) -> StepCosts:
    """What steps would cost at least, in the form that measured costs have."""
    upper = decoder.msa_layers
    lower, streams = decoder.layers - upper, decoder.num_streams

    def run(layers: int, rows: Sequence[int]) -> Surface:
        return Surface.of(
            {
                (row, context): layers_seconds(decoder, chip, bound, layers, row, context)
                for row in rows
                for context in (0, _FAR)
            }
        )

    def head(vocab: int, rows: Sequence[int]) -> Surface:
        return Surface.of(
            {(row, 0): head_seconds(decoder, chip, bound, row, vocab) for row in rows}
        )

    plain = {
        (1, context): layers_seconds(decoder, chip, bound, decoder.layers, 1, context)
        + head_seconds(decoder, chip, bound, 1, decoder.vocab)
        for context in (0, _FAR)
    }
    return StepCosts(
        plain=Surface.of(plain),
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
