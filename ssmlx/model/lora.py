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
LORA_KINDS = (*LINEARS, *EMBEDDINGS, *EXPERTS)
"""Layers that LoRA may act on; on stream rows alone, linear ones."""

# Modules of one part of a layer that are called on the same rows.
_SAME_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp"),
}


class RowScope(threading.local):
    """The first row that LoRA acts on; None while it acts on no row.

    For scope "all" it stays 0. For scope "streams" the model sets it while its upper layers run,
    where stream rows stand behind the nodes. Each thread has its own, so that others may use the
    same model; every thread starts with the value given here.
    """

    def __init__(self, first: int | None = None) -> None:
        self.first = first

    @contextmanager
    def starting_at(self, row: int | None) -> Iterator[None]:
        """Let LoRA act on rows from number `row` on inside the `with` block, on this thread alone.

        On no row where `row` is None. Behind the block it acts as before, also after an error.
        """
        before = self.first
        self.first = row
        try:
            yield
        finally:
            self.first = before


@dataclass(frozen=True)
class LoraWeights:
    """One module's LoRA, in mlx-lm's layout: y = W x + scale * (x a) b.

    Attributes:
        a: [in, r]; [V, r] of an embedding, [E, r, in] of E experts.
        b: [r, out]; [r, D] of an embedding, [E, out, r] of experts.
        scale: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA.
        magnitude: the norms that make it DoRA; [out] of a linear layer. Of an embedding [V], of its
            rows; or [D], of its columns, unless it acts on the head. None for LoRA.
        acts_on_head: of an embedding that is the LM head too, whether LoRA acts there, as mlx-lm
            has it, or where tokens are embedded alone, as PEFT has it.
    """

    a: mx.array
    b: mx.array
    scale: float
    magnitude: mx.array | None = None
    acts_on_head: bool = True

    @property
    def rank(self) -> int:
        """r."""
        return int(self.a.shape[1])

    @property
    def arrays(self) -> list[mx.array]:
        """What was trained."""
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]


class RowsAndProduct(NamedTuple):
    """The rows that a layer with LoRA is called on, and what A makes of some of them."""

    rows: mx.array  # [R, in] all rows
    product: mx.array  # [R - first, r] those from the first that LoRA acts on, times A


ReplacedModules = dict[str, nn.Module]
"""The modules that stood in a model before others took their places, by path."""

_IN_A_LAYER = re.compile(r"\.(\d+)\.")
"""The first number in a module's path is its layer's, whatever the model calls its layers."""


def in_layer(path: str) -> bool:
    """Whether the module at `path` is part of one of the model's layers."""
    return _IN_A_LAYER.search(path) is not None


def split_layer_path(path: str) -> tuple[int, str]:
    """The number of the layer that a module is in, and the module's path inside the layer.

    (22, "mlp.up_proj") of "model.layers.22.mlp.up_proj". `in_layer(path)` must be true, else an
    AssertionError is raised.
    """
    match = _IN_A_LAYER.search(path)
    assert match is not None, path
    return int(match[1]), path[match.end() :]


def select_paths_by_name(
    paths: Sequence[str], names: Sequence[str], layer_label: str, do: str
) -> list[str]:
    """Choose modules by name, as PEFT does.

    Args:
        paths: of the linear modules of one layer.
        names: whole paths, or their ends behind a "."; where empty, all are chosen.
        layer_label: its name for the error, such as "layer 3".
        do: what the user can do, for the error.

    Returns:
        The chosen paths, in the order of `paths`, each once.

    Raises:
        InputError: a name fits no path; the error lists the paths.
    """

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
    model: nn.Module, layers: Iterable[int], names: Sequence[str], do: str
) -> list[str]:
    """Find the linear modules of some layers that have given names, to put LoRA on them.

    Args:
        model: an mlx-lm model.
        layers: numbers of the decoder layers.
        names: modules inside a layer, whole paths or their ends, as in `select_paths_by_name`;
            where empty, all linear modules of these layers.
        do: what the user can do, for the error.

    Returns:
        Their paths in `model`, such as "model.layers.22.mlp.up_proj", layer by layer in the order
        of `layers`. Experts are never among them, nor linear modules outside of the layers.

    Raises:
        InputError: a name fits no linear module of some layer.
    """
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
    """A layer with LoRA beside its weight: holds the factors, cast to `dtype` unless that is
    None."""

    def __init__(self, weights: LoraWeights, dtype: mx.Dtype | None) -> None:
        """Keep LoRA's factors, cast to `dtype` unless that is None, and the scale; not the
        magnitude.
        """
        super().__init__()
        self.lora_a = weights.a if dtype is None else weights.a.astype(dtype)
        self.lora_b = weights.b if dtype is None else weights.b.astype(dtype)
        self.scale = weights.scale

    @property
    def added(self) -> list[mx.array]:
        """Its own arrays, such as LoRA's factors and DoRA's gain; not those of the layer that it
        wraps.
        """
        return [value for value in self.values() if isinstance(value, mx.array)]


class RowLora(LoraLayer):
    """A linear layer with LoRA on the rows from `scope.first` on; DoRA's gain acts on every row.

    Rows before that are computed exactly as without LoRA. Rows are told apart in one sequence
    alone: in a batch of several, LoRA acts on every row or on none.

    Args:
        linear: the layer; its weights may be quantised.
        weights: LoRA of its shapes.
        scope: which rows.
        dtype: that of activations, which the factors are cast to; None keeps theirs.
    """

    def __init__(
        self,
        linear: nn.Module,
        weights: LoraWeights,
        scope: RowScope,
        dtype: mx.Dtype | None = None,
    ) -> None:
        """Keep `linear`, the factors and, of DoRA, its gain, which is also multiplied into factor
        B.

        With DoRA a bias gets an offset that leaves it as it is. `scope` is shared, not copied.
        """
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

    def __call__(self, x: mx.array) -> mx.array:
        """[..., R, in] to [..., R, out]."""
        return self.product_with_lora(x)

    def product_with_lora(self, x: mx.array) -> mx.array:
        """The layer's output with LoRA; of a layer whose inputs are split over ranks, a summand.

        Where the scope's first row is None, LoRA acts on no row. Other rows than its own are
        computed exactly as without LoRA, but for DoRA's gain.

        Args:
            x: [..., R, in]; of several sequences the rows count as one, one after the other. Or
                [in], a single row.

        Returns:
            [..., R, out]; or [out].
        """
        first = self._scope.first
        if first is None:
            return self.product_without_lora(x)
        if x.ndim == 1:  # a single row, as some experts are given
            return self.product_with_lora(x[None])[0]
        rows, z = self._flatten_and_multiply_by_a(x, first)
        y = self.product_without_lora(rows)
        # A cast only in training, where LoRA stays in float32.
        b = self.lora_b.astype(x.dtype)
        tail = mx.addmm(y[first:] if first else y, z, b, alpha=self.scale)
        y = mx.concatenate([y[:first], tail]) if first else tail
        return y if x.ndim == 2 else mx.unflatten(y, 0, x.shape[:-1])

    def product_without_lora(self, x: mx.array) -> mx.array:
        """[..., out] of `x` [..., in] without LoRA; where LoRA is DoRA, with its gain."""
        y: mx.array = self.linear(x)
        if "gain" in self:
            y = y * self.gain
        return y + self.offset if "offset" in self else y

    def layer_of_merged_rows(self, tokens: mx.array) -> nn.Module:
        """Make a plain linear layer of some of the outputs, with LoRA merged into their weights.

        Args:
            tokens: [Vd] numbers of the outputs.

        Returns:
            An `nn.Linear` of Vd outputs in this order, with their bias where the layer has one; not
            quantised, its weights in the dtype of LoRA's factors.
        """
        weight = weight_in_float32(self.linear, tokens)
        if "gain" in self:
            weight = self.gain[tokens][:, None] * weight
        weight = weight + self.scale * (self.lora_a @ self.lora_b[:, tokens]).T
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = weight.astype(self.lora_b.dtype)
        if "bias" in self.linear:
            layer.bias = self.linear.bias[tokens]
        return layer

    def _flatten_and_multiply_by_a(self, x: mx.array, first_row: int) -> RowsAndProduct:
        """Flatten `x` [..., in] to R rows, and multiply those from number `first_row` on by A.

        Takes both from `shared` where modules share a product.
        """
        if self.shared is not None:
            return self.shared.take_own_product(x, first_row, self.index)
        rows = mx.flatten(x, 0, -2)
        tail = rows[first_row:] if first_row else rows
        return RowsAndProduct(rows, tail @ self.lora_a.astype(x.dtype))


class SummedLora(RowLora):
    """`RowLora` on a layer whose inputs are split over ranks: one sum for the layer and LoRA."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., R, out] of `x` [..., R, in], summed over ranks; LoRA on rows as in `RowLora`."""
        linear = self.linear
        y = mx.distributed.all_sum(self.product_with_lora(x), group=linear.group)
        return y + linear.bias if "bias" in linear else y

    def product_without_lora(self, x: mx.array) -> mx.array:
        """[..., out] of `x` [..., in]: this rank's summand, without bias."""
        return partial_product(self.linear, x)


class EmbeddingLora(LoraLayer):
    """An embedding with LoRA or DoRA: where it embeds and, if `acts_on_head`, where it is the LM
    head.

    Args:
        embedding: may be quantised.
        weights: LoRA of its shapes.
        dtype: that of activations, which the factors are cast to; None keeps theirs.
    """

    def __init__(
        self, embedding: nn.Module, weights: LoraWeights, dtype: mx.Dtype | None = None
    ) -> None:
        """Keep `embedding` itself, the factors and, of DoRA, the gain, which is computed here."""
        super().__init__(weights, dtype)
        gain = dora_gain(embedding, weights)
        self.embedding = embedding
        if gain is not None:
            self.gain = gain.astype(self.lora_b.dtype)
        self.acts_on_head = weights.acts_on_head

    def __call__(self, tokens: mx.array) -> mx.array:
        """[..., D] embeddings of `tokens` [...] ids, with LoRA, and where it is DoRA its gain."""
        rows: mx.array = self.embedding(tokens)
        rows = rows + (self.scale * (self.lora_a[tokens] @ self.lora_b)).astype(rows.dtype)
        if "gain" not in self:
            return rows
        return rows * (self.gain[tokens][..., None] if self.acts_on_head else self.gain)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., V] of `x` [..., D], where the embedding is the LM head too.

        With LoRA, or DoRA's gain, only if `acts_on_head`.
        """
        logits: mx.array = self.embedding.as_linear(x)
        if not self.acts_on_head:
            return logits
        more = (x @ self.lora_b.T) @ self.lora_a.T
        logits = logits + (self.scale * more).astype(logits.dtype)
        return logits * self.gain if "gain" in self else logits

    def layer_of_merged_rows(self, tokens: mx.array) -> nn.Module:
        """Make a plain embedding of some tokens, with their rows as the LM head has them.

        Args:
            tokens: [Vd] ids.

        Returns:
            An `nn.Embedding` of Vd rows in this order, LoRA or DoRA merged into them only if
            `acts_on_head`; not quantised, in the dtype of LoRA's factors.
        """
        weight = weight_in_float32(self.embedding, tokens)
        if self.acts_on_head:
            weight = weight + self.scale * (self.lora_a[tokens] @ self.lora_b)
            if "gain" in self:
                weight = self.gain[tokens][:, None] * weight
        layer = nn.Embedding(1, 1)
        layer.weight = weight.astype(self.lora_b.dtype)
        return layer


class ExpertsLora(LoraLayer):
    """The linear layer of E experts, with LoRA of its own for each."""

    def __init__(
        self, linear: nn.Module, weights: LoraWeights, dtype: mx.Dtype | None = None
    ) -> None:
        super().__init__(weights, dtype)
        self.linear = linear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Send each row through its expert, with the expert's LoRA, as mlx-lm's `SwitchLinear`.

        Args:
            x: [..., R, in] rows, of any leading axes that broadcast against `indices`.
            indices: [...] ints, the expert that each row goes to.
            sorted_indices: whether they are in ascending order.

        Returns:
            What the `SwitchLinear` returns for them, [..., R, out], with LoRA added to every row.
        """
        chosen: dict[str, Any] = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
        z = mx.gather_mm(x, self.lora_a.swapaxes(-1, -2), **chosen)
        z = mx.gather_mm(z, self.lora_b.swapaxes(-1, -2), **chosen)
        return y + (self.scale * z).astype(y.dtype)


class SharedInput(threading.local):
    """The A factors of modules that a layer calls on the same rows, multiplied in one product.

    The product is kept on this thread until every module took its part.

    Args:
        a: [in, sum of r] the matrices side by side.
        ends: the columns where all but the last of them end.
    """

    def __init__(self, a: mx.array, ends: list[int]) -> None:
        """Keep the matrix and the ends; on each thread no product is held at first."""
        self._a = a
        self._ends = ends
        # what was given last, its rows, and the products that are still to be taken
        self._held: tuple[mx.array, int, mx.array, dict[int, mx.array]] | None = None

    def take_own_product(self, x: mx.array, first_row: int, module_index: int) -> RowsAndProduct:
        """Hand out the part of the product that belongs to module number `module_index`.

        The product of all modules is computed for the first that asks, and kept for the others.
        It is computed anew where `x` or `first_row` is another, or where the module has had its
        part.

        Args:
            x: [..., R, in] the rows; the same array object for all modules of a call.
            first_row: number of the first row that LoRA acts on.
            module_index: of the module, among those that share the product.

        Returns:
            The rows of `x`, and those from `first_row` on times the module's A.
        """
        held = self._held
        is_same_call = held is not None and held[0] is x and held[1] == first_row
        if held is None or not is_same_call or module_index not in held[3]:
            rows = mx.flatten(x, 0, -2)
            products = (rows[first_row:] if first_row else rows) @ self._a
            held = x, first_row, rows, dict(enumerate(mx.split(products, self._ends, axis=1)))
        product = held[3].pop(module_index)
        self._held = held if held[3] else None
        return RowsAndProduct(held[2], product)


def share_products(loras: Mapping[str, RowLora]) -> None:
    """Let modules that a layer calls on the same rows share one product with their A factors.

    These are q, k and v projections, and gate and up projections, of one parent module. They are
    changed in place: each gets `shared` and its `index`, and its `lora_a` becomes a part of the
    common matrix. Other modules stay as they are.

    Args:
        loras: by path in the model.
    """
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


def linear_out_and_in(linear: nn.Module) -> tuple[int, int]:
    """(out, in), the numbers of a linear layer's outputs and inputs, quantised or not.

    Where the layer is split over ranks, those of all ranks together.
    """
    out_size, in_size = linear.weight.shape
    if "scales" in linear:
        in_size = in_size * 32 // linear.bits
    if isinstance(linear, SPLIT_OUTPUTS):
        out_size *= linear.group.size()
    if isinstance(linear, SPLIT_INPUTS):
        in_size *= linear.group.size()
    return out_size, in_size


def expected_lora_shapes(
    layer: nn.Module | None, weights: LoraWeights
) -> dict[str, tuple[int, ...]]:
    """The shapes that LoRA has to have to fit a layer, by mlx-lm's names.

    Args:
        layer: of the model, quantised or not, perhaps split over ranks (the shapes are those of the
            whole); None where the model has none.
        weights: only its rank, whether it is DoRA, and `acts_on_head` count.

    Returns:
        "lora_a", "lora_b" and, for DoRA, "m" (the magnitude), each with its shape; experts have no
        "m". {} where LoRA cannot act on the layer, or it is None.
    """
    rank = weights.rank
    # mlx-lm's layers with a `to_lora` have LoRA of their own kind.
    if not isinstance(layer, LORA_KINDS) or hasattr(layer, "to_lora"):
        return {}
    if isinstance(layer, EXPERTS):
        experts, out_size, in_size = layer.num_experts, layer.output_dims, layer.input_dims
        return {"lora_a": (experts, rank, in_size), "lora_b": (experts, out_size, rank)}
    out_size, in_size = linear_out_and_in(layer)
    norms = {} if weights.magnitude is None else {"m": (out_size,)}
    if isinstance(layer, LINEARS):
        return {"lora_a": (in_size, rank), "lora_b": (rank, out_size), **norms}
    if norms and not weights.acts_on_head:
        norms = {"m": (in_size,)}
    return {"lora_a": (out_size, rank), "lora_b": (rank, in_size), **norms}


def weight_in_float32(layer: nn.Module, rows: mx.array | None = None) -> mx.array:
    """A layer's weight in float32, dequantised where it is quantised.

    Args:
        layer: linear, an embedding, or experts.
        rows: [n] numbers of the rows (outputs, tokens or experts) that are wanted; all unless
            given.
    """
    parts: list[Any] = [layer.get(name) for name in ("weight", "scales", "biases")]
    if rows is not None:
        parts = [None if part is None else part[rows] for part in parts]
    scales, biases = parts[1:]
    weight: mx.array = parts[0]
    if scales is not None:
        form: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits}
        weight = mx.dequantize(weight, scales, biases, mode=layer.mode, **form)
    return weight.astype(mx.float32)


def _weight_with_lora(layer: nn.Module, weights: LoraWeights) -> mx.array:
    """A layer's weight with scale * A B added, in float32, dequantised; without DoRA's norms.

    Its shape is that of the layer: [out, in], [V, D] of an embedding, [E, out, in] of experts.
    """
    a, b = (array.astype(mx.float32) for array in (weights.a, weights.b))
    if isinstance(layer, EXPERTS):
        delta = b @ a
    elif isinstance(layer, EMBEDDINGS):
        delta = a @ b
    else:
        delta = b.T @ a.T
    return weight_in_float32(layer) + weights.scale * delta


def dora_gain(layer: nn.Module, weights: LoraWeights) -> mx.array | None:
    """What DoRA multiplies each feature by: magnitude / norm of the weight with LoRA.

    The norm is that of each row of the weight; of an embedding whose LoRA does not act on the head,
    that of each column. It is computed here, and waited for: the unpacked weights of many layers
    would not fit into memory at once.

    Returns:
        Float32 in the magnitude's shape; None where the weights have no magnitude (LoRA).
    """
    if weights.magnitude is None:
        return None
    of_columns = isinstance(layer, EMBEDDINGS) and not weights.acts_on_head
    norms = mx.linalg.norm(_weight_with_lora(layer, weights), axis=0 if of_columns else 1)
    gain = weights.magnitude.astype(mx.float32) / norms
    mx.eval(gain)
    return gain


def shard_lora(weights: LoraWeights, linear: nn.Module) -> LoraWeights:
    """This rank's part of a layer's LoRA, where the layer is split over ranks.

    Args:
        weights: LoRA of the whole layer; no DoRA, whose magnitude would not be split.
        linear: the layer, with this rank's part of its weight.

    Returns:
        A part of B where the layer's outputs are split, a part of A where its inputs are; `weights`
        where the layer is not split.
    """
    if isinstance(linear, SPLIT_OUTPUTS):
        parts = mx.split(weights.b, linear.group.size(), axis=1)
        return replace(weights, b=parts[linear.group.rank()])
    if isinstance(linear, SPLIT_INPUTS):
        parts = mx.split(weights.a, linear.group.size(), axis=0)
        return replace(weights, a=parts[linear.group.rank()])
    return weights


def copy_with_merged_lora(layer: nn.Module, weights: LoraWeights) -> nn.Module:
    """Make a copy of a layer with LoRA or DoRA merged into its weight.

    Args:
        layer: not quantised, one that `is_mergeable`; it stays as it is.
        weights: LoRA of its shapes.

    Returns:
        The copy, whose weight has the dtype that it had; the other arrays are shared.
    """
    twin = copy.copy(layer)
    weight = _weight_with_lora(layer, weights)
    gain = dora_gain(layer, weights)
    if gain is not None:
        weight = weight * (gain[:, None] if weights.acts_on_head else gain)
    twin.weight = weight.astype(layer.weight.dtype)
    return twin


def is_mergeable(layer: nn.Module, weights: LoraWeights) -> bool:
    """Whether LoRA on every row may be merged into a layer's weight.

    True for linear layers and experts that are not quantised. True for an embedding that is not
    quantised where LoRA acts on the head too, as the weight may be the LM head's.
    """
    if isinstance(layer, nn.Embedding):  # which may be the head too
        return weights.acts_on_head
    return isinstance(layer, (*UNPACKED_LINEARS, SwitchLinear))


def wrap_with_lora(
    layer: nn.Module, weights: LoraWeights, scope: RowScope, dtype: mx.Dtype | None
) -> LoraLayer:
    """Make the layer that has LoRA beside the weight of `layer`, of the class for its kind.

    Args:
        layer: linear, an embedding, or experts, quantised or not; it is held, and stays as it is.
        weights: LoRA of its shapes; this rank's part of it.
        scope: which rows LoRA acts on. Only linear layers follow it: of embeddings and experts LoRA
            acts on every row.
        dtype: what the factors are cast to, that of activations; None keeps theirs.
    """
    if isinstance(layer, EMBEDDINGS):
        return EmbeddingLora(layer, weights, dtype)
    if isinstance(layer, EXPERTS):
        return ExpertsLora(layer, weights, dtype)
    kind = SummedLora if isinstance(layer, SPLIT_INPUTS) else RowLora
    return kind(layer, weights, scope, dtype)


def attach_lora(
    model: nn.Module,
    lora: Mapping[str, LoraWeights],
    scope: RowScope,
    *,
    merge: bool,
    dtype: mx.Dtype,
    shares_products: bool = True,
) -> ReplacedModules:
    """Put LoRA on modules of a model, in place. Nothing is computed, but DoRA's gains.

    Args:
        model: an mlx-lm model.
        lora: by module path.
        scope: which rows LoRA acts on.
        merge: add it into the weights of layers that are not quantised, which costs nothing per
            row: only for LoRA that acts on every row.
        dtype: of the activations; what is not merged is cast to it.
        shares_products: let modules that are called on the same rows share one product with A, see
            `share_products`. False in training, where the factors change.

    Returns:
        The modules that were replaced, by path, untouched: while those of merged layers are kept,
        their weights are in memory twice.

    Raises:
        KeyError: the model has no module at a path; the model is as it was then.
    """
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
