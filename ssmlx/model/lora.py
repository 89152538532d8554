"""LoRA that knows which rows it acts on."""

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import require
from .ranks import LINEARS, SPLIT_INPUTS, SPLIT_OUTPUTS, UNPACKED_LINEARS, own_product

# Modules of one part of a layer that are called on the same rows.
_SAME_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp"),
}


class RowScope(threading.local):
    """The first row that LoRA acts on; None while it acts on no row.

    For scope "all" it stays 0. For scope "streams" the model sets it for the time that its
    upper layers run, where stream rows stand behind the nodes: on the thread that runs them
    alone, so that another one may use the same model.
    """

    def __init__(self, first: int | None = None) -> None:
        self.first = first

    @contextmanager
    def starting_at(self, row: int | None) -> Iterator[None]:
        """Act on rows from `row` on inside the `with` block."""
        before = self.first
        self.first = row
        try:
            yield
        finally:
            self.first = before


@dataclass(frozen=True)
class LoraWeights:
    """One module's LoRA, in mlx-lm's layout: y = W x + scale * (x a) b."""

    a: mx.array  # [in, r]
    b: mx.array  # [r, out]
    scale: float  # alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA


def layer_of(path: str) -> tuple[int, str]:
    """Layer and path inside it of `model.layers.22.mlp.up_proj`."""
    _, _, inside = path.partition("layers.")
    layer, _, module = inside.partition(".")
    return int(layer), module


def select_modules(paths: Sequence[str], names: Sequence[str], where: str, do: str) -> list[str]:
    """Those of the layer's linear modules `paths` that LoRA acts on, as PEFT decides it.

    `names` are whole paths or their last parts; where there are none, all are chosen.
    """

    def is_named(path: str, name: str) -> bool:
        return path == name or path.endswith("." + name)

    for name in names:
        require(
            any(is_named(path, name) for path in paths),
            f"{where} has no linear module {name}",
            expected="one of " + ", ".join(paths),
            do=do,
        )
    return [path for path in paths if not names or any(is_named(path, name) for name in names)]


def linear_paths(
    model: nn.Module, layers: Iterable[int], names: Sequence[str], do: str
) -> list[str]:
    """Paths of the modules of `layers` that LoRA acts on; see `select_modules`."""
    found: dict[int, dict[str, str]] = {layer: {} for layer in layers}
    for path, module in model.named_modules():
        if isinstance(module, LINEARS) and "layers." in path:
            layer, inside = layer_of(path)
            if layer in found:
                found[layer][inside] = path
    return [
        inside[name]
        for layer, inside in found.items()
        for name in select_modules(list(inside), names, f"layer {layer}", do)
    ]


class RowLora(nn.Module):
    """A linear layer with LoRA on the rows from `scope.first` on.

    Rows before that are computed exactly as without LoRA. In one sequence alone: where there are
    more, LoRA acts on every row or on none.
    """

    def __init__(self, linear: nn.Module, weights: LoraWeights, scope: RowScope) -> None:
        super().__init__()
        self.linear = linear
        self.lora_a = weights.a
        self.lora_b = weights.b
        self.scale = weights.scale
        self._scope = scope
        self.shared: SharedInput | None = None
        self.index = 0  # among the modules of `shared`

    def __call__(self, x: mx.array) -> mx.array:
        """[..., R, in] to [..., R, out]."""
        return self.summand(x)

    def summand(self, x: mx.array) -> mx.array:
        """[..., R, out] of `x` [..., R, in]: where inputs are split over ranks, this rank's own."""
        first = self._scope.first
        if first is None:
            return self.product(x)
        rows, z = self._low_rank(x, first)
        y = self.product(rows)
        # A cast only in training, where LoRA stays in float32.
        b = self.lora_b.astype(x.dtype)
        tail = mx.addmm(y[first:] if first else y, z, b, alpha=self.scale)
        y = mx.concatenate([y[:first], tail]) if first else tail
        return y if x.ndim == 2 else mx.unflatten(y, 0, x.shape[:-1])

    def product(self, x: mx.array) -> mx.array:
        """[..., out] what `summand` adds LoRA to."""
        return self.linear(x)

    def _low_rank(self, x: mx.array, first: int) -> tuple[mx.array, mx.array]:
        """The rows [R, in] of `x`, and those from `first` on times A, [R - first, r]."""
        if self.shared is not None:
            return self.shared.take(x, first, self.index)
        rows = mx.flatten(x, 0, -2)
        return rows, (rows[first:] if first else rows) @ self.lora_a.astype(x.dtype)


class SummedLora(RowLora):
    """`RowLora` on a layer whose inputs are split over ranks: one sum for the layer and LoRA."""

    def __call__(self, x: mx.array) -> mx.array:
        linear = self.linear
        y = mx.distributed.all_sum(self.summand(x), group=linear.group)
        return y + linear.bias if "bias" in linear else y

    def product(self, x: mx.array) -> mx.array:
        return own_product(self.linear, x)


class SharedInput(threading.local):
    """Modules that are called on the same rows, one after the other: one product with all their A.

    `a` [in, sum of r] are the matrices side by side, `ends` where all but the last of them end.
    """

    def __init__(self, a: mx.array, ends: list[int]) -> None:
        self._a = a
        self._ends = ends
        # what was given last, its rows, and the products that are still to be taken
        self._held: tuple[mx.array, int, mx.array, dict[int, mx.array]] | None = None

    def take(self, x: mx.array, first: int, index: int) -> tuple[mx.array, mx.array]:
        """`RowLora._low_rank` of module number `index`; kept until every module took its own."""
        held = self._held
        if held is None or held[0] is not x or held[1] != first or index not in held[3]:
            rows = mx.flatten(x, 0, -2)
            products = (rows[first:] if first else rows) @ self._a
            held = x, first, rows, dict(enumerate(mx.split(products, self._ends, axis=1)))
        product = held[3].pop(index)
        self._held = held if held[3] else None
        return held[2], product


def share_inputs(loras: Mapping[str, RowLora]) -> None:
    """Let those modules, by path, that a layer calls on the same rows share a product."""
    groups: dict[tuple[str, str], list[RowLora]] = {}
    for path, lora in loras.items():
        above, _, name = path.rpartition(".")
        groups.setdefault((above, _SAME_INPUT.get(name, name)), []).append(lora)
    for group in groups.values():
        if len(group) > 1:
            a = mx.concatenate([one.lora_a for one in group], axis=1)
            ends = list(accumulate(one.lora_a.shape[1] for one in group))[:-1]
            shared = SharedInput(a, ends)
            for index, part in enumerate(mx.split(a, ends, axis=1)):
                group[index].lora_a = part
                group[index].shared = shared
                group[index].index = index


def linear_shape(linear: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer, quantised or not, all ranks' parts of it together."""
    out_size, in_size = linear.weight.shape
    if "scales" in linear:
        in_size = in_size * 32 // linear.bits
    if isinstance(linear, SPLIT_OUTPUTS):
        out_size *= linear.group.size()
    if isinstance(linear, SPLIT_INPUTS):
        in_size *= linear.group.size()
    return out_size, in_size


def own_part(weights: LoraWeights, linear: nn.Module) -> LoraWeights:
    """What of the LoRA of a linear layer belongs to this rank's part of the layer."""
    if isinstance(linear, SPLIT_OUTPUTS):
        parts = mx.split(weights.b, linear.group.size(), axis=1)
        return replace(weights, b=parts[linear.group.rank()])
    if isinstance(linear, SPLIT_INPUTS):
        parts = mx.split(weights.a, linear.group.size(), axis=0)
        return replace(weights, a=parts[linear.group.rank()])
    return weights


def merged(linear: nn.Module, weights: LoraWeights) -> nn.Module:
    """A linear layer, not quantised, with the LoRA added into its weight."""
    layer = copy.copy(linear)
    weight, a, b = (array.astype(mx.float32) for array in (linear.weight, weights.a, weights.b))
    layer.weight = (weight + (weights.scale * b.T) @ a.T).astype(linear.weight.dtype)
    return layer


def attach_lora(
    model: nn.Module,
    lora: Mapping[str, LoraWeights],
    scope: RowScope,
    *,
    merge: bool,
    dtype: mx.Dtype,
    fixed: bool = True,
) -> dict[str, nn.Module]:
    """Put LoRA, by module path, on those modules of `model`, in place; returns what it replaced.

    With `merge`, layers that are not quantised get it added into their weights, which costs nothing
    per row: only for LoRA that acts on every row. What is not merged is cast to `dtype`, that of
    the activations; where it is `fixed`, modules that are called on the same rows share a product.
    The modules that are returned are untouched: while those of merged layers are kept, their
    weights are in memory twice.
    """
    modules = dict(model.named_modules())
    updates: list[tuple[str, nn.Module]] = []
    apart: dict[str, RowLora] = {}
    for path, weights in lora.items():
        linear = modules[path]
        weights = own_part(weights, linear)
        if merge and isinstance(linear, UNPACKED_LINEARS):
            updates.append((path, merged(linear, weights)))
        else:
            cast = LoraWeights(weights.a.astype(dtype), weights.b.astype(dtype), weights.scale)
            kind = SummedLora if isinstance(linear, SPLIT_INPUTS) else RowLora
            apart[path] = kind(linear, cast, scope)
    if fixed:
        share_inputs(apart)
    updates += apart.items()
    model.update_modules(tree_unflatten(updates))
    return {path: modules[path] for path in lora}
