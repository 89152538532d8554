"""An adapter's streams and LoRA on a loaded base, off it, and exchanged."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..errors import InputError, require
from ..model.backbone import Backbone, BaseIdentity, digest_of
from ..model.lora import LoraWeights, RowScope, attach_lora, linear_shape
from ..model.ranks import LINEARS, UNPACKED_LINEARS
from ..model.streams import StreamFusedModel
from .adapter import Adapter, cast_streams, load_adapter, lora_tensors, read_identity, read_lora
from .files import account_for
from .found import log_outdated, runs_for
from .names import (
    AUTO_ADAPTER,
    CONFIG_FILE,
    DEFAULT_ADAPTER,
    Fetch,
    bundled_adapters,
    own_adapters,
    resolve_adapter,
)


def check_base(adapter: Adapter, backbone: Backbone) -> None:
    """Raises InputError where the adapter was made for another model than `backbone`."""
    config = adapter.config
    base = adapter.base
    base.require_same(
        BaseIdentity.of(backbone),
        "the adapter belongs",
        expected=f"{config.base_model or 'the model it was converted for'}, not {backbone.name}",
        do="choose that model with --model, or another --adapter",
    )
    own = (config.num_layers, config.hidden_size)
    true = (base.num_layers, base.hidden_size)
    what = f"the adapter's settings say {own[0]} layers of width {own[1]}"
    expected = f"{true[0]} of width {true[1]}, as its base model has"
    require(own == true, what, expected=expected, do="convert the checkpoint again")


def check_lora(model: nn.Module, lora: Mapping[str, LoraWeights], source: Path) -> None:
    """Raises InputError where a pair does not fit its linear layer of `model`."""
    modules = dict(model.named_modules())
    expected: dict[str, tuple[int, ...]] = {}
    for path, weights in lora.items():
        if isinstance(modules.get(path), LINEARS):
            out_size, in_size = linear_shape(modules[path])
            rank = weights.a.shape[-1]
            expected |= {f"{path}.lora_a": (in_size, rank), f"{path}.lora_b": (rank, out_size)}
    account_for(lora_tensors(lora), expected, source)


def lora_digest(lora: Mapping[str, LoraWeights]) -> str | None:
    """What tells one LoRA from another, merged or not; None of none."""
    pairs = ((f"{path} {one.scale}", ab) for path, one in lora.items() for ab in (one.a, one.b))
    return digest_of(pairs) if lora else None


def fuse_streams(backbone: Backbone, adapter: Adapter, *, merge_lora: bool) -> StreamFusedModel:
    """A base model with an adapter on it: modules of its own, on the base's arrays.

    `backbone`, alone or with another adapter, stays as it is. With `merge_lora`, LoRA that acts on
    every row is added into layers that are not quantised, whose original weights are not kept where
    the backbone can read them again.

    Raises:
        InputError: the adapter is another model's.
    """
    check_base(adapter, backbone)
    base = backbone.base()
    _ = base.digest  # before layers are changed
    backbone = base.twin()
    model = backbone.model
    dtype = backbone.dtype
    for lora in (adapter.every_row_lora, adapter.stream_lora):
        check_lora(model, lora, Path("the adapter"))
    every_row = RowScope(0)
    scope = every_row if adapter.config.adapter_scope == "all" else RowScope()
    streams = cast_streams(adapter.streams, dtype)
    fused = StreamFusedModel(backbone, adapter.config, streams, scope)
    fused.lora_digest = lora_digest(adapter.every_row_lora)
    on_all = attach_lora(model, adapter.every_row_lora, every_row, merge=merge_lora, dtype=dtype)
    on_streams = attach_lora(model, adapter.stream_lora, scope, merge=False, dtype=dtype)
    replaced: dict[str, nn.Module | None] = {**on_streams, **on_all}
    if merge_lora and backbone.reload is not None:
        merged = (path for path, module in on_all.items() if isinstance(module, UNPACKED_LINEARS))
        replaced |= dict.fromkeys(merged)
    backbone.replaced = replaced
    # Now: the first answer would merge and cast, which takes time and memory.
    mx.eval(model.parameters(), streams.trained)
    return fused


def swap_adapter(
    model: StreamFusedModel, adapter: Adapter | str | Path | None, *, merge_lora: bool = True
) -> StreamFusedModel:
    """The same base model with another adapter, without loading the base again.

    Only the layers that LoRA was merged into are read again, from the model's folder. `model`
    stays as it is, and both share what the adapters leave alone; what is no longer used is freed.
    A cache belongs to the model that filled it, for an adapter may change keys and values.

    Args:
        model: as `load` or `swap_adapter` returned it.
        adapter: a folder or a name as `load` takes it (fetched as that was told to), an adapter in
            memory, "auto" for what `default_adapter` finds, or None (or "none") for the base model.
            Of a fused folder, the base is the model in that folder; give the folder itself for its
            own streams.
        merge_lora: as for `load`.

    Raises:
        InputError: the adapter is missing, broken, or belongs to another model.
    """
    if adapter == AUTO_ADAPTER:
        _, adapter = default_adapter(model) or ("", None)
    if isinstance(adapter, str | Path):
        own = model.backbone
        folder = resolve_adapter(adapter, Fetch(cache_dir=own.cache_dir, offline=own.offline))
        adapter = None if folder is None else load_adapter(folder)
    if adapter is None:
        return StreamFusedModel(model.backbone.base())
    return fuse_streams(model.backbone, adapter, merge_lora=merge_lora)


def adapters_for(model: StreamFusedModel) -> dict[str, Path]:
    """Folders of the adapters, bundled or made here, that belong to `model`'s base, by name.

    Reads their settings, no weights. One whose settings cannot be read belongs to no model.
    """
    identity = BaseIdentity.of(model.backbone)
    found = {}
    for name, folder in {**own_adapters(), **bundled_adapters()}.items():
        with suppress(InputError):
            if read_identity(folder).difference(identity) is None:
                found[name] = folder
    return found


def default_adapter(model: StreamFusedModel) -> tuple[str, Path] | None:
    """What drafts for a model that brings no streams, where nothing is asked for.

    That is the newest adapter that was made here from its very weights, unless it brought nothing
    on this machine; else the bundled one for chats, where it belongs to the model.

    Returns:
        Its name and its folder; None where there is none.
    """
    backbone = model.backbone
    found = runs_for(backbone.folder, backbone.name)
    log_outdated(found, backbone.name)
    names = [found.chosen.name] if found.chosen else []
    fitting = adapters_for(model)
    return next(
        ((name, fitting[name]) for name in (*names, DEFAULT_ADAPTER) if name in fitting), None
    )


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
