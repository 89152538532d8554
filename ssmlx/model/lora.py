"""LoRA and DoRA on linear layers, embeddings and experts; on linear layers it knows its rows.

DoRA gives each feature of what LoRA makes of a weight a norm that was learned. Nothing of that
changes while a model answers, so the factor of each feature, its gain, is computed once.
"""

import copy
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import require
from .ranks import LINEARS, SPLIT_INPUTS, SPLIT_OUTPUTS, UNPACKED_LINEARS, partial_product

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
# Layers that LoRA may act on; only linear ones if it acts on stream rows alone.
LORA_KINDS = (*LINEARS, *EMBEDDINGS, *EXPERTS)

# Modules of one part of a layer that are called on the same rows.
_SAME_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp"),
}


class RowScope(threading.local):
    """The first row that LoRA acts on; None while it acts on no row.

    For scope "all" it stays 0. For scope "streams" the model sets it while its upper layers run,
    in which stream rows come after the nodes. Each thread has its own, so that others may use the
    same model; every thread starts with the value given here.
    """

    def __init__(self, first: int | None = None) -> None:
        self.first = first

    @contextmanager
    def starting_at(
        self,
        row: int | None,  # None: LoRA acts on no row
    ) -> Iterator[None]:
        """Set the first row on this thread, inside the `with` block."""
        before = self.first
        self.first = row
        try:
            yield
        finally:
            self.first = before


@dataclass(frozen=True)
class LoraWeights:
    """One module's LoRA, in mlx-lm's layout: y = W x + scale * (x a) b."""

    a: mx.array  # [in, r]; [V, r] of an embedding, [E, r, in] of E experts
    b: mx.array  # [r, out]; [r, D] of an embedding, [E, out, r] of experts
    scale: float  # alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA
    # makes it DoRA: [out] of a linear layer; of an embedding [V], of its rows, or [D], of its
    # columns, unless it acts on the head
    magnitude: mx.array | None = None
    # of an embedding that is the LM head too: as mlx-lm has it; PEFT's acts only on embedding
    # tokens
    acts_on_head: bool = True

    @property
    def rank(self) -> int:
        """r, the inner width of LoRA."""
        return int(self.a.shape[1])

    @property
    def arrays(self) -> list[mx.array]:
        """The trained arrays."""
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]


class RowsAndProduct(NamedTuple):
    """The rows that a layer with LoRA is called on, and what A makes of some of them."""

    rows: mx.array  # [R, in] all rows
    product: mx.array  # [R - first, r] those from the first that LoRA acts on, times A


# The modules of a model that others have replaced, by path.
ReplacedModules = dict[str, nn.Module]

# The first number in a module's path is its layer's, whatever the model calls its layers.
_IN_A_LAYER = re.compile(r"\.(\d+)\.")


def in_layer(path: str) -> bool:
    """Whether the module is part of one of the model's layers."""
    return _IN_A_LAYER.search(path) is not None


def split_layer_path(path: str) -> tuple[int, str]:
    """(22, "mlp.up_proj") of "model.layers.22.mlp.up_proj"."""
    match = _IN_A_LAYER.search(path)
    assert match is not None, path
    return int(match[1]), path[match.end() :]


def select_paths_by_name(
    paths: Sequence[str],  # of the linear modules of one layer
    names: Sequence[str],  # whole paths, or their ends after a "."; empty for all
    layer_label: str,  # for the error, such as "layer 3"
    do: str,  # for the error
) -> list[str]:
    """The paths that PEFT would choose, in the order of `paths`."""

    def is_named(path: str, name: str) -> bool:
        return path == name or path.endswith("." + name)

    for name in names:
        require(
            any(is_named(path, name) for path in paths),
            f"{layer_label} has no linear module {name}",
            expected="one of " + ", ".join(paths),
            do=do,
        )
    return [path for path in paths if not names or any(is_named(path, name) for name in names)]


def linear_paths(
    model: nn.Module,
    layers: Iterable[int],  # numbers of the decoder layers
    names: Sequence[str],  # as in `select_paths_by_name`
    do: str,  # for the error
) -> list[str]:
    """Paths of linear modules of some layers, layer by layer, such as
    "model.layers.22.mlp.up_proj". Experts are never included."""
    found: dict[int, dict[str, str]] = {layer: {} for layer in layers}
    for path, module in model.named_modules():
        if isinstance(module, LINEARS) and in_layer(path):
            layer, inside = split_layer_path(path)
            if layer in found:
                found[layer][inside] = path
    return [
        inside[name]
        for layer, inside in found.items()
        for name in select_paths_by_name(list(inside), names, f"layer {layer}", do)
    ]


class LoraLayer(nn.Module):
    """A layer with LoRA beside its weight; its factors are cast to `dtype` unless that is None."""

    def __init__(self, weights: LoraWeights, dtype: mx.Dtype | None) -> None:
        super().__init__()
        self.lora_a = weights.a if dtype is None else weights.a.astype(dtype)
        self.lora_b = weights.b if dtype is None else weights.b.astype(dtype)
        self.scale = weights.scale

    @property
    def added(self) -> list[mx.array]:
        """The arrays that it adds, such as LoRA's factors and DoRA's gain; not those of the layer
        that it wraps."""
        return [value for value in self.values() if isinstance(value, mx.array)]


class RowLora(LoraLayer):
    """A linear layer with LoRA on the rows from `scope.first` on; DoRA's gain acts on every row, in
    scope or not.

    Rows before that are computed exactly as without LoRA, except for DoRA's gain. Rows can be
    distinguished only within one sequence: in a batch of several, LoRA acts on every row or on
    none.
    """

    def __init__(
        self,
        linear: nn.Module,  # may be quantised
        weights: LoraWeights,
        scope: RowScope,  # shared, not copied
        # of activations, which the factors are cast to; None keeps theirs
        dtype: mx.Dtype | None = None,
    ) -> None:
        gain = dora_gain(linear, weights)
        if gain is not None:
            weights = replace(weights, b=weights.b * gain)
        super().__init__(weights, dtype)
        self.linear = linear
        if gain is not None:
            self.gain = gain.astype(self.lora_b.dtype)
            if "bias" in linear:  # which DoRA leaves as it is
                self.offset = ((1 - gain) * linear.bias).astype(self.lora_b.dtype)
        self._scope = scope
        self.shared: SharedInput | None = None
        self.index = 0  # among the modules of `shared`

    def __call__(
        self,
        x: mx.array,  # [..., R, in]
    ) -> mx.array:  # [..., R, out]
        return self.product_with_lora(x)

    def product_with_lora(
        self,
        x: mx.array,  # [..., R, in], the rows of several sequences one after the other; or [in]
    ) -> mx.array:  # [..., R, out]; or [out]
        """A partial sum if the layer's inputs are split over ranks."""
        first = self._scope.first
        if first is None:
            return self.product_without_lora(x)
        if x.ndim == 1:  # a single row, as some experts are given
            return self.product_with_lora(x[None])[0]
        rows, z = self._rows_and_product(x, first)
        y = self.product_without_lora(rows)
        # A cast only in training, where LoRA stays in float32.
        b = self.lora_b.astype(x.dtype)
        tail = mx.addmm(y[first:] if first else y, z, b, alpha=self.scale)
        y = mx.concatenate([y[:first], tail]) if first else tail
        return y if x.ndim == 2 else mx.unflatten(y, 0, x.shape[:-1])

    def product_without_lora(
        self,
        x: mx.array,  # [..., in]
    ) -> mx.array:  # [..., out]
        """The layer's product without LoRA, but with DoRA's gain if there is one."""
        y: mx.array = self.linear(x)
        if "gain" in self:
            y = y * self.gain
        return y + self.offset if "offset" in self else y

    def layer_of_merged_rows(
        self,
        tokens: mx.array,  # [Vd] numbers of the outputs
    ) -> nn.Module:
        """A plain linear layer of some outputs, LoRA merged in, not quantised, in the dtype of
        LoRA's factors."""
        weight = weight_in_float32(self.linear, tokens)
        if "gain" in self:
            weight = self.gain[tokens][:, None] * weight
        weight = weight + self.scale * (self.lora_a @ self.lora_b[:, tokens]).T
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = weight.astype(self.lora_b.dtype)
        if "bias" in self.linear:
            layer.bias = self.linear.bias[tokens]
        return layer

    def _rows_and_product(
        self,
        x: mx.array,  # [..., in]
        first_row: int,  # that LoRA acts on
    ) -> RowsAndProduct:
        if self.shared is not None:
            return self.shared.take_own_product(x, first_row, self.index)
        rows = mx.flatten(x, 0, -2)
        tail = rows[first_row:] if first_row else rows
        return RowsAndProduct(rows, tail @ self.lora_a.astype(x.dtype))


class SummedLora(RowLora):
    """`RowLora` on a layer whose inputs are split over ranks: one sum for the layer and LoRA."""

    def __call__(
        self,
        x: mx.array,  # [..., R, in]
    ) -> mx.array:  # [..., R, out], summed over ranks
        linear = self.linear
        y = mx.distributed.all_sum(self.product_with_lora(x), group=linear.group)
        return y + linear.bias if "bias" in linear else y

    def product_without_lora(
        self,
        x: mx.array,  # [..., in]
    ) -> mx.array:  # [..., out]
        """This rank's partial sum, without bias."""
        return partial_product(self.linear, x)


class EmbeddingLora(LoraLayer):
    """An embedding, perhaps quantised, with LoRA or DoRA; also as the LM head, if
    `acts_on_head`."""

    def __init__(
        self,
        embedding: nn.Module,
        weights: LoraWeights,
        # of activations, which the factors are cast to; None keeps theirs
        dtype: mx.Dtype | None = None,
    ) -> None:
        super().__init__(weights, dtype)
        gain = dora_gain(embedding, weights)
        self.embedding = embedding
        if gain is not None:
            self.gain = gain.astype(self.lora_b.dtype)
        self.acts_on_head = weights.acts_on_head

    def __call__(
        self,
        tokens: mx.array,  # [...]
    ) -> mx.array:  # [..., D]
        rows: mx.array = self.embedding(tokens)
        rows = rows + (self.scale * (self.lora_a[tokens] @ self.lora_b)).astype(rows.dtype)
        if "gain" not in self:
            return rows
        return rows * (self.gain[tokens][..., None] if self.acts_on_head else self.gain)

    def as_linear(
        self,
        x: mx.array,  # [..., D]
    ) -> mx.array:  # [..., V]
        """Logits of the LM head; with LoRA, or DoRA's gain, only if `acts_on_head`."""
        logits: mx.array = self.embedding.as_linear(x)
        if not self.acts_on_head:
            return logits
        more = (x @ self.lora_b.T) @ self.lora_a.T
        logits = logits + (self.scale * more).astype(logits.dtype)
        return logits * self.gain if "gain" in self else logits

    def layer_of_merged_rows(
        self,
        tokens: mx.array,  # [Vd]
    ) -> nn.Module:
        """A plain embedding of some tokens' rows as the LM head has them, not quantised, in the
        dtype of LoRA's factors."""
        weight = weight_in_float32(self.embedding, tokens)
        if self.acts_on_head:
            weight = weight + self.scale * (self.lora_a[tokens] @ self.lora_b)
            if "gain" in self:
                weight = self.gain[tokens][:, None] * weight
        layer = nn.Embedding(1, 1)
        layer.weight = weight.astype(self.lora_b.dtype)
        return layer


class ExpertsLora(LoraLayer):
    def __init__(
        self, linear: nn.Module, weights: LoraWeights, dtype: mx.Dtype | None = None
    ) -> None:
        super().__init__(weights, dtype)
        self.linear = linear

    def __call__(
        self,
        x: mx.array,  # [..., R, in], leading axes broadcast against `indices`
        indices: mx.array,  # [...] the expert that each row goes to
        sorted_indices: bool = False,  # they are in ascending order
    ) -> mx.array:  # [..., R, out]
        """The product of mlx-lm's `SwitchLinear`, with the expert's own LoRA."""
        chosen: dict[str, Any] = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
        z = mx.gather_mm(x, self.lora_a.swapaxes(-1, -2), **chosen)
        z = mx.gather_mm(z, self.lora_b.swapaxes(-1, -2), **chosen)
        return y + (self.scale * z).astype(y.dtype)


class SharedInput(threading.local):
    """The A factors of modules that a layer calls on the same rows, multiplied in one product,
    which is kept on this thread until every module took its part."""

    def __init__(
        self,
        a: mx.array,  # [in, sum of r] the matrices side by side
        ends: list[int],  # the columns where all but the last of them end
    ) -> None:
        self._a = a
        self._ends = ends
        # what was given last, its rows, and the products that are still to be taken
        self._held: tuple[mx.array, int, mx.array, dict[int, mx.array]] | None = None

    def take_own_product(
        self,
        x: mx.array,  # [..., R, in]; the same array object for all modules of a call
        first_row: int,  # that LoRA acts on
        module_index: int,  # among those that share the product
    ) -> RowsAndProduct:
        """The first module that asks has all products computed."""
        held = self._held
        is_same_call = held is not None and held[0] is x and held[1] == first_row
        if held is None or not is_same_call or module_index not in held[3]:
            rows = mx.flatten(x, 0, -2)
            products = (rows[first_row:] if first_row else rows) @ self._a
            held = x, first_row, rows, dict(enumerate(mx.split(products, self._ends, axis=1)))
        product = held[3].pop(module_index)
        self._held = held if held[3] else None
        return RowsAndProduct(held[2], product)


def share_products(
    loras: Mapping[str, RowLora],  # by path in the model
) -> None:
    """Let q, k and v projections of one parent module share one product, and gate and up
    projections too; in place."""
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


def linear_sizes(linear: nn.Module) -> tuple[int, int]:
    """Outputs and inputs, of all ranks together if the layer is split over ranks."""
    out_size, in_size = linear.weight.shape
    if "scales" in linear:
        in_size = in_size * 32 // linear.bits
    if isinstance(linear, SPLIT_OUTPUTS):
        out_size *= linear.group.size()
    if isinstance(linear, SPLIT_INPUTS):
        in_size *= linear.group.size()
    return out_size, in_size


def expected_lora_shapes(
    layer: nn.Module | None,  # perhaps split over ranks: the shapes are those of the whole
    weights: LoraWeights,  # only rank, DoRA and `acts_on_head` count
) -> dict[str, tuple[int, ...]]:
    """Shapes by mlx-lm's names: "lora_a", "lora_b" and, for DoRA, "m" (the magnitude), which
    experts lack. {} if LoRA cannot act on the layer."""
    rank = weights.rank
    # mlx-lm's layers with a `to_lora` have LoRA of their own kind.
    if not isinstance(layer, LORA_KINDS) or hasattr(layer, "to_lora"):
        return {}
    if isinstance(layer, EXPERTS):
        experts, out_size, in_size = layer.num_experts, layer.output_dims, layer.input_dims
        return {"lora_a": (experts, rank, in_size), "lora_b": (experts, out_size, rank)}
    out_size, in_size = linear_sizes(layer)
    norms = {} if weights.magnitude is None else {"m": (out_size,)}
    if isinstance(layer, LINEARS):
        return {"lora_a": (in_size, rank), "lora_b": (rank, out_size), **norms}
    if norms and not weights.acts_on_head:
        norms = {"m": (in_size,)}
    return {"lora_a": (out_size, rank), "lora_b": (rank, in_size), **norms}


def weight_in_float32(
    layer: nn.Module,  # linear, an embedding, or experts
    rows: mx.array | None = None,  # [n] numbers of outputs, tokens or experts; all unless given
) -> mx.array:
    """A layer's weight, dequantised."""
    parts: list[Any] = [layer.get(name) for name in ("weight", "scales", "biases")]
    if rows is not None:
        parts = [None if part is None else part[rows] for part in parts]
    scales, biases = parts[1:]
    weight: mx.array = parts[0]
    if scales is not None:
        form: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits}
        weight = mx.dequantize(weight, scales, biases, mode=layer.mode, **form)
    return weight.astype(mx.float32)


def _weight_with_lora(layer: nn.Module, weights: LoraWeights) -> mx.array:  # in the layer's shape
    """A layer's weight, dequantised, in float32, plus scale * A B, without DoRA's norms."""
    a, b = (array.astype(mx.float32) for array in (weights.a, weights.b))
    if isinstance(layer, EXPERTS):
        delta = b @ a
    elif isinstance(layer, EMBEDDINGS):
        delta = a @ b
    else:
        delta = b.T @ a.T
    return weight_in_float32(layer) + weights.scale * delta


def dora_gain(
    layer: nn.Module,
    weights: LoraWeights,
) -> mx.array | None:  # in the magnitude's shape
    """Magnitude over norm of the weight with LoRA, of each row; of each column of an embedding
    whose LoRA does not act on the head. Waits for it: the unpacked weights of many layers would not
    fit into memory at once."""
    if weights.magnitude is None:
        return None
    of_columns = isinstance(layer, EMBEDDINGS) and not weights.acts_on_head
    norms = mx.linalg.norm(_weight_with_lora(layer, weights), axis=0 if of_columns else 1)
    gain = weights.magnitude.astype(mx.float32) / norms
    mx.eval(gain)
    return gain


def shard_lora(
    weights: LoraWeights,  # of the whole layer; no DoRA, whose magnitude would not be split
    linear: nn.Module,  # with this rank's part of its weight
) -> LoraWeights:
    """The rank's part of LoRA, if the layer is split over ranks."""
    if isinstance(linear, SPLIT_OUTPUTS):
        parts = mx.split(weights.b, linear.group.size(), axis=1)
        return replace(weights, b=parts[linear.group.rank()])
    if isinstance(linear, SPLIT_INPUTS):
        parts = mx.split(weights.a, linear.group.size(), axis=0)
        return replace(weights, a=parts[linear.group.rank()])
    return weights


def copy_with_merged_lora(
    layer: nn.Module,  # not quantised, one that `is_mergeable`
    weights: LoraWeights,
) -> nn.Module:
    """A copy with LoRA merged, in the weight's own dtype; the other arrays are shared."""
    twin = copy.copy(layer)
    weight = _weight_with_lora(layer, weights)
    gain = dora_gain(layer, weights)
    if gain is not None:
        weight = weight * (gain[:, None] if weights.acts_on_head else gain)
    twin.weight = weight.astype(layer.weight.dtype)
    return twin


def is_mergeable(layer: nn.Module, weights: LoraWeights) -> bool:
    if isinstance(layer, nn.Embedding):  # which may be the head too
        return weights.acts_on_head
    return isinstance(layer, (*UNPACKED_LINEARS, SwitchLinear))


def wrap_with_lora(
    layer: nn.Module,
    weights: LoraWeights,  # this rank's part
    # only linear layers follow it: of embeddings and experts LoRA acts on every row
    scope: RowScope,
    dtype: mx.Dtype | None,  # of activations, which the factors are cast to; None keeps theirs
) -> LoraLayer:
    """A layer with LoRA around `layer`, which is held and stays as it is."""
    if isinstance(layer, EMBEDDINGS):
        return EmbeddingLora(layer, weights, dtype)
    if isinstance(layer, EXPERTS):
        return ExpertsLora(layer, weights, dtype)
    kind = SummedLora if isinstance(layer, SPLIT_INPUTS) else RowLora
    return kind(layer, weights, scope, dtype)


def attach_lora(
    model: nn.Module,
    lora: Mapping[str, LoraWeights],  # by module path
    scope: RowScope,
    *,
    # add it into the weights of layers that are not quantised, which costs nothing per row: only
    # for LoRA that acts on every row
    merge: bool,
    dtype: mx.Dtype,  # of the activations; what is not merged is cast to it
    # see `share_products`; False in training, where the factors change
    shares_products: bool = True,
) -> ReplacedModules:
    """Put LoRA into the model, in place; only DoRA's gains are computed. Returns the replaced
    modules: while those of merged layers are kept, their weights are in memory twice."""
    modules = dict(model.named_modules())
    updates: dict[str, nn.Module] = {}
    for path, weights in lora.items():
        layer = modules[path]
        own = shard_lora(weights, layer)
        if merge and is_mergeable(layer, own):
            updates[path] = copy_with_merged_lora(layer, own)
        else:
            updates[path] = wrap_with_lora(layer, own, scope, dtype)
    if shares_products:
        share_products({path: one for path, one in updates.items() if isinstance(one, RowLora)})
    model.update_modules(tree_unflatten(list(updates.items())))
    return {path: modules[path] for path in lora}
