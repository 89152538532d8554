"""Surgery on a loaded model: an adapter's streams and LoRA on, off, and exchanged."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import InputError, require
from ..model.backbone import Backbone, BaseIdentity, digest_of
from ..model.lora import LoraWeights, RowScope, attach_lora, linear_shape
from ..model.streams import StreamFusedModel
from .adapter import Adapter, load_adapter, lora_tensors, read_identity, read_lora
from .files import account_for
from .names import CONFIG_FILE, bundled_adapters, resolve_adapter


def check_base(adapter: Adapter, backbone: Backbone) -> None:
    """Check that `backbone` is the model that the adapter was made for."""
    config, base = adapter.config, adapter.base
    base.require_same(
        BaseIdentity.of(backbone),
        "the adapter belongs",
        expected=config.base_model or "the model it was converted for",
        do="choose that model with --model, or another --adapter",
    )
    require(
        (config.num_layers, config.hidden_size) == (base.num_layers, base.hidden_size),
        f"the adapter's settings say {config.num_layers} layers of width {config.hidden_size}",
        expected=f"{base.num_layers} of width {base.hidden_size}, as its base model has",
        do="convert the checkpoint again",
    )


def check_lora(
    model: nn.Module,
    lora: Mapping[str, LoraWeights],
    source: Path,
    replaced: Mapping[str, nn.Module] | None = None,
) -> None:
    """Check that every LoRA pair fits a linear layer of `model`, or one that is `replaced`."""
    modules = {**dict(model.named_modules()), **(replaced or {})}
    expected: dict[str, tuple[int, ...]] = {}
    for path, weights in lora.items():
        if isinstance(modules.get(path), nn.Linear | nn.QuantizedLinear):
            out_size, in_size = linear_shape(modules[path])
            rank = weights.a.shape[-1]
            expected |= {f"{path}.lora_a": (in_size, rank), f"{path}.lora_b": (rank, out_size)}
    account_for(lora_tensors(lora), expected, source)


def lora_digest(lora: Mapping[str, LoraWeights]) -> str | None:
    """What tells one LoRA from another, merged or not; None of none."""
    pairs = ((f"{path} {one.scale}", ab) for path, one in lora.items() for ab in (one.a, one.b))
    return digest_of(pairs) if lora else None


def fuse_streams(
    backbone: Backbone,
    adapter: Adapter,
    *,
    merge_lora: bool,
    check: Callable[[StreamFusedModel], object] | None = None,
) -> StreamFusedModel:
    """Attach an adapter to its base model, in place of one that is attached already.

    Args:
        backbone: the base model; its layers are changed in place, until `unfuse_streams`.
        adapter: what to attach.
        merge_lora: add LoRA that acts on every row into the weights of layers that are not
            quantised. The original weights are dropped where the backbone can read them again.
        check: called with the new model before any layer is changed; may refuse it by raising.

    Raises:
        InputError: the adapter is another model's. No layer is changed then.
    """
    check_base(adapter, backbone)
    for lora in (adapter.every_row_lora, adapter.stream_lora):
        check_lora(backbone.model, lora, Path("the adapter"), backbone.kept)
    every_row, dtype = RowScope(0), backbone.dtype
    scope = every_row if adapter.config.adapter_scope == "all" else RowScope()
    streams = adapter.streams.astype(dtype)
    _ = backbone.digest  # of the base, before layers are changed
    fused = StreamFusedModel(backbone, adapter.config, streams, scope)
    fused.lora_digest = lora_digest(adapter.every_row_lora)
    if check is not None:
        check(fused)
    unfuse_streams(backbone)
    model = backbone.model
    on_all = attach_lora(model, adapter.every_row_lora, every_row, merge=merge_lora, dtype=dtype)
    on_streams = attach_lora(model, adapter.stream_lora, scope, merge=False, dtype=dtype)
    replaced: dict[str, nn.Module | None] = {**on_streams, **on_all}
    if merge_lora and backbone.reload is not None:
        merged = {path for path, module in on_all.items() if isinstance(module, nn.Linear)}
        replaced |= dict.fromkeys(merged)
    backbone.replaced = replaced
    # Now: the first answer would merge and cast, which takes time and memory.
    mx.eval(model.parameters(), streams.trained)
    return fused


def unfuse_streams(backbone: Backbone) -> None:
    """Take off what `fuse_streams` attached: the base model's own weights come back.

    Raises:
        InputError: weights have to be read again, and cannot be. Nothing is changed then.
    """
    dropped = [path for path, module in backbone.replaced.items() if module is None]
    read = backbone.reload(dropped) if dropped and backbone.reload is not None else {}
    backbone.model.update_modules(tree_unflatten([*backbone.kept.items(), *read.items()]))
    backbone.replaced = {}


def swap_adapter(
    model: StreamFusedModel,
    adapter: Adapter | str | Path | None,
    *,
    merge_lora: bool = True,
    check: Callable[[StreamFusedModel], object] | None = None,
) -> StreamFusedModel:
    """The same base model with another adapter, without loading the base again.

    Only the layers that LoRA was merged into are read again, from the model's folder.

    The new adapter is read and checked first: where it does not fit, `model` stays as it was.
    Otherwise `model` is used up, for the weights that it reads are the new one's now; so are
    its caches, whose keys and values an adapter may have changed.

    Args:
        model: as `load` or `swap_adapter` returned it.
        adapter: a folder or a name as `load` takes it, an adapter in memory, or None (or
            "none") for the base model, decoding plainly. Of a fused folder, the base is the
            model in that folder; give the folder itself for its own streams.
        merge_lora: as for `load`.
        check: called with the new model before any layer is changed; may refuse it by raising.

    Raises:
        InputError: the adapter is missing, broken, or belongs to another model.
    """
    if isinstance(adapter, str | Path):
        folder = resolve_adapter(adapter)
        adapter = None if folder is None else load_adapter(folder)
    backbone = model.backbone
    if adapter is None:
        swapped = StreamFusedModel(backbone)
        if check is not None:
            check(swapped)
        unfuse_streams(backbone)
    else:
        swapped = fuse_streams(backbone, adapter, merge_lora=merge_lora, check=check)
    model.backbone = _UsedUp()  # type: ignore[assignment]
    return swapped


class _UsedUp:
    """In the place of a swapped model's backbone: better no answer than another adapter's."""

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            "this model was given to `swap_adapter`, and its weights follow another adapter now",
            expected="the model that `swap_adapter` returned",
            do="use that one, with a new cache",
        )


def adapters_for(model: StreamFusedModel) -> dict[str, Path]:
    """Folders of the bundled adapters that belong to `model`'s base, by name.

    Reads their settings, no weights. One whose settings cannot be read belongs to no model.
    """
    identity, found = BaseIdentity.of(model.backbone), {}
    for name, folder in bundled_adapters().items():
        with suppress(InputError):
            if read_identity(folder).difference(identity) is None:
                found[name] = folder
    return found


def read_task_lora(folder: Path, backbone: Backbone) -> dict[str, LoraWeights]:
    """The LoRA that a model is to have on every row while streams learn to draft for it."""
    lora = read_lora(folder, "--task-lora")
    if (folder / CONFIG_FILE).exists():
        read_identity(folder).require_same(
            BaseIdentity.of(backbone),
            f"the LoRA in {folder} belongs",
            expected="a LoRA of this model",
            do="choose its model with --model, or another --task-lora",
        )
    check_lora(backbone.model, lora, folder)
    return lora
