"""What steps should cost on a chip, from measurements that others published: `row_costs.json`.

A forward launches its kernels one after the other, and waits for its weights and for the keys and
values of its context:

    seconds(n rows) = kernels * launch + weight bytes / rate * r(n) + context bytes / rate * a(n)

Launches are paid once for all rows, so rows cost less in narrow models. r(n) is the median of what
was published of the nearest chips: of the same precision before another, M1 and M2 apart from
later ones, whose kernels multiply several rows with a weight that they have read once (MLX 0.32.2).
It ranges from below the `low`est to above the `high`est that was published of such kernels.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Self

from .cost import StepCosts, Surface, interpolate

if TYPE_CHECKING:
    from ..model.streams import StreamFusedModel

Bound = Literal["low", "middle", "high"]
LAYER_KERNELS = 17
"""7 products, 2 norms, 2 rotations, 2 writes to the cache, attention, 2 sums, a gate."""
HEAD_KERNELS = 3
STEP_KERNELS = 90
"""Beside layers and heads: acceptance, commit, ranks, the next tree. From counts, without views."""
CONDITION_KERNELS = 73
"""More of them where a condition scores pairs, copies are looked up and learnt of, and a beam grows
the tree."""
ROOT_KERNELS = 11
"""More of them where streams start from the root too."""
MOST_ROWS = 128
_ROWS = (*range(1, 18), 20, 24, 28, 32, 33, 48, 64, 65, 96, 97, MOST_ROWS)
_FAR = 8192
_TILE = 32
_NEAR = 1.0
_BOUNDS: Mapping[str, Any] = {"low": (min, 0.85), "middle": (median, 1.0), "high": (max, 1.15)}
"""What is taken of all that was published, and the median error of those left out of it."""


@cache
def published() -> dict[str, list[dict[str, Any]]]:
    """The tables of `row_costs.json`, a measurement with its source an entry."""
    text = Path(__file__).with_name("row_costs.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Chip:
    """A chip."""

    name: str  # such as "M2 Pro", "CPU" (x86-64 with OpenBLAS) or "CUDA"
    generation: int  # of Apple's; that of the nearest for CUDA; 0 for the CPU
    bandwidth: float  # of its memory, GB/s; of its largest form
    share: float  # of it that products of one row reach
    source: str

    @property
    def shares_reads(self) -> bool:
        """Whether its kernels multiply several rows with a weight that they have read once."""
        return self.generation >= 3

    def far_from(self, other: str) -> float:
        """How unlike another chip it is."""
        ultra = self.name.endswith("Ultra") != other.endswith("Ultra")
        one = self.generation
        two = CHIPS[other].generation
        return inf if (one == 0) != (two == 0) else abs(one - two) + 1.5 * ultra

    def launch(self) -> float:
        """Seconds that launching a kernel takes where each waits for the one before."""
        near = min(published()["launch"], key=lambda one: self.far_from(one["chip"]))
        return float(near["us"]) / 1e6

    def seconds(self, read: float) -> float:
        """For reading so many bytes from memory."""
        return read / (self.bandwidth * 1e9 * self.share)


CHIPS = {one["name"]: Chip(**one) for one in published()["chips"]}


def chip_named(device_name: str) -> Chip:
    """The chip that MLX's `device_name` tells of; where it is unknown, the nearest."""
    if re.search(r"\d cores?$", device_name):  # as `this_machine` tells of a CPU
        return CHIPS["CPU"]
    apple = re.search(r"\bM(\d+)( Pro| Max| Ultra)?", device_name)
    if apple or "Apple" in device_name:
        generation, form = (int(apple[1]), apple[2] or "") if apple else (1, "")
        ours = [one for one in CHIPS.values() if re.fullmatch(rf"M\d+{form}", one.name)]
        return min(ours, key=lambda one: abs(one.generation - generation))
    cuda = re.search("nvidia|cuda|geforce|rtx|tesla|quadro", device_name, re.IGNORECASE)
    return CHIPS["CUDA" if cuda else "CPU"]


def _bytes(bits: int) -> float:
    """Of a weight; 64 that are quantised share a scale and a bias of 16 bits each."""
    return bits / 8 + (4 / 64 if bits < 16 else 0)


def launched(chip: Chip, one: Mapping[str, Any]) -> float:
    """The share of launches in a call of one row that took `ms` through `layers`."""
    return min(0.9, one.get("layers", 0) * LAYER_KERNELS * chip.launch() / one.get("ms", 1) * 1000)


def _points(one: Mapping[str, Any]) -> list[float]:
    """r at the rows of a measurement: without launches, and without a round's `draft` a row."""
    fixed = launched(CHIPS[one["chip"]], one)
    draft = one.get("draft", 0.0)
    both = zip(one["rows"], one["cost"], strict=True)
    return [max(1.0, (cost - draft * (row - 1) - fixed) / (1 - fixed)) for row, cost in both]


def _known(one: Mapping[str, Any], row: int) -> bool:
    """Whether a measurement tells of so many rows: at them, or on both sides and not far off."""
    rows = one["rows"]
    place = bisect_left(one["rows"], row)
    return place < len(rows) and (rows[place] == row or rows[place] <= 4 * rows[place - 1])


def _told(chip: Chip, bits: int, row: int, without: str) -> Iterator[tuple[bool, float, float]]:
    """What each measurement says: whether of another precision, how far off, and r."""
    for one in published()["rows"]:
        other = CHIPS[one["chip"]]
        own = one["bits"] == bits or min(bits, one["bits"], 16 * chip.generation) >= 16
        shares = one.get("shares_reads", other.shares_reads)
        alike = (bool(other.generation), shares) == (bool(chip.generation), chip.shares_reads)
        alike &= (one["bits"] < 16) == (bits < 16) and (own or chip.generation > 0)
        if alike and _known(one, row) and not (without and one["source"].startswith(without)):
            found = interpolate(one["rows"], _points(one), row)
            # Rows cost arithmetic, and are told in bytes.
            scale = 1.0 if own or not shares else _bytes(one["bits"]) / _bytes(bits)
            # A later chip that was made to do as earlier ones shows their kernel, not their speed.
            far = chip.far_from(one["chip"]) + 2 * (shares != other.shares_reads)
            yield not own, far, 1 + (found - 1) * scale


@cache
def row_costs(chip: Chip, bits: int, bound: Bound = "middle", without: str = "") -> Sequence[float]:
    """r of 0, 1 .. `MOST_ROWS` rows of weights of `bits` bits; no more rows are ever cheaper.

    Args:
        without: what a source's address begins with, that is left out.
    """
    known, (of, factor) = {0: 0.0, 1: 1.0}, _BOUNDS[bound]
    for row in range(2, MOST_ROWS + 1):
        told = list(_told(chip, bits, row, without))
        other, nearest, _ = min(told, default=(False, 0.0, 0.0))
        reach = nearest + _NEAR if bound == "middle" else inf
        values = [value for odd, far, value in told if odd == other and far <= reach]
        if values:
            known[row] = max(1.0, factor * of(values))
    last = max(known)
    for row in range(last + 1, MOST_ROWS + 1):
        known[row] = known[last] * ceil(row / _TILE) / ceil(last / _TILE)
    rows = list(known)
    found = list(known.values())
    return tuple(accumulate((interpolate(rows, found, row) for row in range(MOST_ROWS + 1)), max))


def ratio(
    chip: Chip, call: Mapping[str, Any], rows: int, bound: Bound = "middle", without: str = ""
) -> float:
    """T(n) / T(1) of a `call` of known `bits`, `layers` and `ms`, or of a product."""
    fixed = launched(chip, call)
    return fixed + (1 - fixed) * row_costs(chip, call["bits"], bound, without)[rows]


def origin(source: str) -> str:
    """What the addresses of a source's authors begin with: a repository, or an issue of MLX's."""
    return source if "ml-explore" in source else "/".join(source.split("/")[:3])


def left_out() -> dict[str, list[float]]:
    """Errors of T(n) / T(1) by origin, predicted over published - 1, each without that origin."""
    errors: dict[str, list[float]] = {}
    for one in published()["rows"]:
        chip = CHIPS[one["chip"]]
        own = origin(one["source"])
        if chip.generation and one.get("shares_reads", chip.shares_reads) == chip.shares_reads:
            for row, cost in zip(one["rows"][1:], one["cost"][1:], strict=True):
                found = ratio(chip, one, row, without=own) + one.get("draft", 0.0) * (row - 1)
                errors.setdefault(own, []).append(found / cost - 1)
    return errors


@dataclass(frozen=True)
class Decoder:
    """A decoder of regular layers, in numbers."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    layers: int
    vocab: int
    bits: int = 16  # of a weight; from 16 on it is not quantised
    msa_layers: int = 0  # Ns, the top layers through which streams run
    num_streams: int = 0  # G
    draft_vocab: int = 0  # tokens that streams draft from
    window: int = 256  # tokens that streams see at most
    is_conditional: bool = False  # whether streams have a condition
    starts_from_root: bool = False  # whether they start from the root too
    experts: int = 0  # of a layer, each of the width `inner`
    experts_per_row: int = 0  # that a row goes through

    @classmethod
    def of(cls, model: StreamFusedModel) -> Self:
        """That of a loaded model."""
        backbone = model.backbone
        args = model.backbone.args
        hidden = backbone.hidden_size
        layers = len(backbone.layers)
        heads = getattr(args, "num_attention_heads", hidden // 64)
        modules = backbone.layers[-1].modules()
        packed = [one.bits for one in modules if hasattr(one, "bits")]
        experts = max((getattr(one, "num_experts", 0) for one in modules), default=0)
        inner = getattr(args, "moe_intermediate_size", None) if experts else None
        return cls(
            name=getattr(args, "model_type", "model"),
            hidden=hidden,
            heads=heads,
            kv_heads=getattr(args, "num_key_value_heads", None) or heads,
            head_size=getattr(args, "head_dim", None) or hidden // heads,
            inner=inner or getattr(args, "intermediate_size", None) or 4 * hidden,
            layers=layers,
            vocab=backbone.vocab_size,
            bits=min(packed, default=8 * backbone.dtype.size),
            msa_layers=layers - model.insertion_layer,
            num_streams=model.num_streams,
            draft_vocab=model.draft_vocab_size,
            window=model.config.stream_window if model.config else 0,
            is_conditional=model.is_conditional,
            starts_from_root=model.starts_from_root,
            experts=experts,
            experts_per_row=getattr(args, "num_experts_per_tok", 0),
        )

    def layer_bytes(self, rows: int = 1, cost: float = 1.0) -> float:
        """Of a layer's matrices, where so many rows `cost` as if they were read so often.

        Of experts, those that rows go through which choose on their own: few, of a row each.
        """
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        chosen = cost
        if self.experts:
            chosen = self.experts * (1 - (1 - self.experts_per_row / self.experts) ** rows)
        return _bytes(self.bits) * (attention * cost + 3 * self.hidden * self.inner * chosen)

    def head_bytes(self, vocab: int) -> float:
        """Of the head of `vocab` tokens."""
        return _bytes(self.bits) * self.hidden * vocab


def costs(decoder: Decoder, chip: Chip, bound: Bound = "middle") -> StepCosts:
    """What steps should cost, in the form that measured costs have."""
    upper = decoder.msa_layers
    streams = decoder.num_streams
    launch = chip.launch()
    r, (attention,) = row_costs(chip, decoder.bits, bound), published()["attention"]

    kernels = STEP_KERNELS + CONDITION_KERNELS * decoder.is_conditional
    kernels += ROOT_KERNELS * decoder.starts_from_root

    def head(vocab: int, rows: Sequence[int]) -> Surface:
        read = chip.seconds(decoder.head_bytes(vocab))
        return Surface.of({(row, 0): HEAD_KERNELS * launch + read * r[row] for row in rows})

    def layer(rows: int, context: int) -> float:
        keys = 2 * 2 * context * decoder.kv_heads * decoder.head_size  # of 16 bits
        passes = interpolate(attention["rows"], attention["cost"], rows)
        read = decoder.layer_bytes(rows, r[rows]) + keys * passes
        return LAYER_KERNELS * launch + chip.seconds(read)

    def run(layers: int, rows: Sequence[int], more: float = 0.0) -> Surface:
        points = [(row, context) for row in rows for context in (0, _FAR)]
        return Surface.of({point: layers * layer(*point) + more for point in points})

    whole_head = head(decoder.vocab, _ROWS)
    beside = Surface.of({(1, 0): kernels * launch})
    return StepCosts(
        plain=run(decoder.layers, [1], whole_head.at(1)),
        lower=run(decoder.layers - upper, _ROWS),
        upper=run(upper, _ROWS),
        fused=run(upper, _ROWS),
        head=whole_head,
        draft_head=head(decoder.draft_vocab, range(1, min(max(1, streams), MOST_ROWS) + 1)),
        early_exit=whole_head,
        overhead={"second-pass": beside, "fused": beside},
        window=decoder.window,
    )
